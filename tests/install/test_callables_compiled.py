"""A caller of each guarded kind compiles into as many graphs as a caller of the unguarded one."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import llm_op_guard as og

MATRIX = "x: T[B, D]\nrequire(D % 2 == 0, id='even')"
GOOD, ODD = torch.ones(2, 4), torch.ones(2, 3)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def double(x: Any, scale: int = 2) -> Any:
    return x * scale


def hidden(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Layer(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2


class Holder:
    factor = 2

    def method(self, x: Any) -> Any:
        return x * self.factor

    @staticmethod
    def static(x: Any) -> Any:
        return x * 2

    @classmethod
    def of_class(cls, x: Any) -> Any:
        return x * cls.factor

    def __call__(self, x: Any) -> Any:
        return x * self.factor


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return grad * 2


class Kernel:
    """Launched as a kernel is; a real one cannot run here."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __getitem__(self, grid: Any) -> Any:
        return self.fn


@torch.library.custom_op("llm_op_guard_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def class_copy(cls: type) -> Any:
    return type(cls.__name__, cls.__bases__, dict(vars(cls)))


Make = Callable[[], Any]

# Each makes a new one, unguarded.
KINDS: dict[str, Make] = {
    "function": lambda: double,
    "function made by wraps": lambda: hidden(double),
    "no_grad": lambda: torch.no_grad()(double),
    "partial": lambda: functools.partial(double, scale=2),
    "bound method": lambda: Holder().method,
    "bound class method": lambda: Holder.of_class,
    "static method": lambda: Holder.static,
    "callable object": Holder,
    "module instance": Layer,
    "module class": lambda: class_copy(Layer),
    "autograd function": lambda: class_copy(Twice),
    "custom op": lambda: twice,
    "op packet": lambda: torch.ops.llm_op_guard_tests.twice,
    "op overload": lambda: torch.ops.llm_op_guard_tests.twice.default,
    "builtin": lambda: torch.relu,
    "builtin of _C._nn": lambda: torch._C._nn.gelu,
    "method of a builtin type": lambda: torch.Tensor.abs,
    "compiled function": lambda: torch.compile(double, backend="eager"),
    "kernel": lambda: Kernel(double),
}


def caller(target: Any) -> Callable[[Any], Any]:
    if isinstance(target, type) and issubclass(target, nn.Module):
        target = target()
    if isinstance(target, type):
        target = target.apply
    if hasattr(type(target), "__getitem__"):
        return lambda x: target[(1,)](x) + 1
    return lambda x: target(x) + 1


def graphs_of(call: Any, *, dynamic: bool | None) -> int:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=dynamic)
    for size in (2, 3, 5):
        x = torch.ones(size, 4)
        assert torch.equal(compiled(x), call(x))
    return len(graphs)


# Of what is dynamic from the start: a code that is swapped, and an object that stands in. After its first size a
# caller is dynamic by itself.
@pytest.mark.parametrize(
    ("kind", "dynamic"), [*((kind, None) for kind in KINDS), ("function", True), ("callable object", True)]
)
def test_as_many_graphs(kind: str, dynamic: bool | None, tmp_path: Path) -> None:
    file = tmp_path / "mine.contract"
    # A method of C that takes nothing else has a signature since.
    x = "self" if kind == "method of a builtin type" and sys.version_info >= (3, 13) else "x"
    file.write_text(f"def op({x}):\n    {x}: T[B, D]\n    require(D % 2 == 0, id='even')\n")
    needs_stub = kind in ("builtin", "builtin of _C._nn", "method of a builtin type")
    contract = og.load(file)["op"] if needs_stub else MATRIX
    unguarded = graphs_of(caller(KINDS[kind]()), dynamic=dynamic)
    torch.compiler.reset()
    call = caller(og.guard(contract)(KINDS[kind]()))
    assert graphs_of(call, dynamic=dynamic) == unguarded
    compiled = torch.compile(call, backend="eager")
    with pytest.raises(og.GuardError):
        compiled(ODD)


def test_a_compiled_guarded_module() -> None:
    layer = og.guard(MATRIX)(Layer())
    compiled = torch.compile(layer, backend="eager")
    assert torch.equal(compiled(GOOD), GOOD * 2)
    with pytest.raises(og.GuardError):
        compiled(ODD)
    assert torch.equal(torch.compile(copy.deepcopy(layer), backend="eager", fullgraph=True)(GOOD), GOOD * 2)
    layer.compile(backend="eager", fullgraph=True)
    assert torch.equal(layer(GOOD), GOOD * 2)


def test_compiled_callers_follow_the_policy() -> None:
    guarded = og.guard(MATRIX)(Holder())
    compiled = torch.compile(lambda x: guarded(x) + 1, backend="eager")
    for _ in range(3):
        compiled(GOOD)
        with pytest.raises(og.GuardError):
            compiled(ODD)
        with og.policy(A="off", B="off"):
            assert torch.equal(compiled(ODD), ODD * 2 + 1)
