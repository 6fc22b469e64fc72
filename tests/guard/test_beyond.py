"""Tensors beyond what the language speaks of, wherever in a call they stand; dtypes without a name in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import llm_op_guard as og

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
