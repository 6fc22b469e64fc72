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
