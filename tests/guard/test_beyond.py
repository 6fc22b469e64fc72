"""Tensors beyond what the language speaks of, wherever in a call they stand; dtypes without a name in it."""

from __future__ import annotations

from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import llm_op_guard as og
from llm_op_guard.guard import functions

pytestmark = pytest.mark.usefixtures("no_alarm")

UNINITIALISED = torch.nn.UninitializedParameter()


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make", [lambda: UNINITIALISED, nested, quantised], ids=["uninitialised", "nested", "quantised"]
)
def test_wherever_they_stand(make: Any) -> None:
    @og.guard("x: floating[N]\nself.weight: floating[N]\npair: (floating[N], any)\nreturns: like(x)")
    def operator(self: Any, x: Any, pair: Any) -> Any:
        return x

    odd, plain = make(), torch.ones(2)
    for weight, x, other in ((odd, plain, plain), (plain, odd, plain), (plain, plain, odd)):
        operator(SimpleNamespace(weight=weight), x, (other, other))
    assert og.record.total == 0
    with pytest.raises(og.GuardError):
        operator(SimpleNamespace(weight=plain), plain, (torch.ones(3), plain))


def test_lazy_modules() -> None:
    @og.guard("x: floating[B, I]\nself.weight: floating[O, I]\nreturns: floating[B, O]")
    def forward(self: Any, x: Any) -> Any:
        return torch.nn.functional.linear(x, self.weight, self.bias)

    lazy = torch.nn.LazyLinear(4)
    forward(torch.nn.Linear(3, 4), torch.ones(2, 3))
    with pytest.raises(ValueError, match="uninitialized") as caught:
        forward(lazy, torch.ones(2, 3))
    assert not isinstance(caught.value, og.GuardError)
    lazy(torch.ones(2, 3))
    assert forward(lazy, torch.ones(2, 3)).shape == (2, 4)
    with pytest.raises(og.GuardError):
        forward(lazy, torch.ones(2, 5))


def test_any_takes_dtypes_that_have_no_name_in_the_language() -> None:
    @og.guard("x: any[N] | None\nrequire(N == 2, id='two')")
    def operator(x: Any) -> Any:
        return x

    operator(torch.empty(2, dtype=torch.uint1))
    with pytest.raises(og.GuardError) as caught:
        operator(torch.empty(3, dtype=torch.uint1))
    assert [violation.rule_id for violation in caught.value.violations] == ["two"]


def test_sparse_tensors_have_no_strides() -> None:
    @og.guard("x: floating[M, N]\nrequire(dense(x), id='dense')\nrequire(stride(x, 0) == 7, id='stride')")
    def operator(x: Any) -> Any:
        return x

    for x in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.eye(3).to_mkldnn()):
        operator(x)
    with pytest.raises(og.GuardError) as caught:
        operator(torch.eye(3))
    assert [violation.rule_id for violation in caught.value.violations] == ["stride"]


class Diagonal:
    """No tensor, and yet torch's functions take it: they are its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "its own"


def test_what_takes_torch_functions_over() -> None:
    @og.guard("x: floating[N]\ny: None | floating[N]")
    def operator(x: Any, y: Any = None) -> Any:
        return torch.add(x, 1)

    assert operator(Diagonal()) == "its own"
    assert torch.equal(operator(torch.ones(2), Diagonal()), torch.full((2,), 2.0))
    with pytest.raises(og.GuardError):
        operator(object())
    with pytest.raises(og.GuardError):
        operator(Diagonal)  # the class is no such thing


class Counting(list):  # type: ignore[type-arg]
    """A list whose class has a say in its length, items and order."""

    def __len__(self) -> int:
        raise AssertionError

    def __getitem__(self, key: object) -> object:
        raise AssertionError

    def __iter__(self) -> object:  # type: ignore[override]
        raise AssertionError


@pytest.mark.parametrize(
    "rule", ["len(xs) > 9", "xs[0] > 9", "all(x > 9 for x in xs)", "xs == (1,)", "sum(x for x in xs) > 9", "9 in xs"]
)
def test_no_code_of_a_list_runs(rule: str, no_alarm: None) -> None:
    @og.guard(f"require({rule})")
    def operator(xs: object) -> None: ...

    operator(Counting([1]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_no_integer_is(value: float, no_alarm: None) -> None:
    @og.guard("require(count(ids, p) == 0)\nrequire(only(ids, p, 1))")
    def operator(ids: object, p: float) -> None: ...

    operator(torch.ones(2, dtype=torch.int64), value)


class Index:
    """A number of a class of its own."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [Index(9), Decimal(9)])
def test_numbers_of_other_classes_are_left_alone(value: object) -> None:
    @og.guard("n: int\nf: None | float\nrequire(n < 3)\nrequire(f < 3)")
    def operator(n: object, f: object = None) -> None: ...

    operator(value)
    operator(1, value)


def test_an_optional_argument_that_is_none_is_not_compared() -> None:
    @og.guard("""
        n: None | int
        mode: None | str
        require(n == 3)
        require(n != 4)
        require(mode in ("a", "b"))
        require(x.shape[0] == n)
        require(1 < n < 5)
        require(box.k == 3)
    """)
    def operator(n: object = None, mode: object = None, x: object = None, box: object = None) -> None: ...

    operator()
    operator(x=torch.ones(2), box=SimpleNamespace(k=None))
    operator(3, "a", torch.ones(3), SimpleNamespace(k=3))
    with pytest.raises(og.GuardError) as caught:
        operator(4, "c", torch.ones(3), SimpleNamespace(k=4))
    assert [v.rule_id for v in caught.value.violations] == [
        "n == 3", "n != 4", "mode in ('a', 'b')", "x.shape[0] == n", "box.k == 3"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        "require(all(all(i + j + n >= 0 for j in range(100000)) for i in range(100000)))",
        "require(sum(sum(i * j for j in range(20000)) for i in range(20000)) > n)",
        "a0 = (n, n)\n" + "\n".join(f"a{i + 1} = a{i} + a{i}" for i in range(34)) + "\nrequire(len(a34) > 5)",
        "a0 = s + s\n" + "\n".join(f"a{i + 1} = a{i} + a{i}" for i in range(34)) + "\nrequire(len(a34) > 5)",
        "a0 = n + 10\n" + "\n".join(f"a{i + 1} = a{i} * a{i}" for i in range(40)) + "\nrequire(a40 > 5)",
        "a0 = (n, n)\nb0 = (n, n)\n"
        + "\n".join(f"a{i + 1} = (a{i}, a{i})\nb{i + 1} = (b{i}, b{i})" for i in range(30))
        + "\nrequire(a30 == b30)",
    ],
)
def test_no_contract_makes_a_call_take_for_ever(body: str) -> None:
    @og.guard(body)
    def operator(n: int, s: str) -> None: ...

    operator(3, "a")  # what would take too much does not apply


def test_what_an_array_in_a_tuple_answers_is_nobodys_error() -> None:
    @og.guard("require(n == (1, 2))\nrequire(m > 3, id='other')")
    def operator(n: object, m: int) -> None: ...

    operator((np.array([1, 2]), 2), 4)
    with pytest.raises(og.GuardError, match="other"):
        operator((np.array([1, 2]), 2), 3)


def test_no_text_of_an_argument_is_shown_or_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Named(float):
        def __str__(self) -> str:
            return "SECRET"

        __repr__ = __str__

    @og.guard("require(n < 1)")
    def operator(n: object) -> None: ...

    with pytest.raises(og.GuardError) as caught:
        operator(Named(3))
    assert "SECRET" not in str(caught.value) and "n = 3.0" in str(caught.value)

    def broken(*_: object) -> None:
        raise ValueError("SECRET")

    monkeypatch.setitem(functions.IMPLEMENTATIONS, "highest", broken)

    @og.guard("require(highest(x) < 1)")
    def other(x: object) -> None: ...

    with pytest.warns(og.GuardInternalWarning) as told:
        other(torch.ones(1))
    assert all("SECRET" not in str(w.message) for w in told) and "SECRET" not in caplog.text
