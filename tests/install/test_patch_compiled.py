"""Callers compiled by torch.compile follow a patch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from patch_recorder import MakeModule

from llm_op_guard.install.patch import Patch, sweep

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.fixture
def torch() -> Iterator[Any]:
    torch = pytest.importorskip("torch")
    torch.compiler.reset()
    yield torch
    torch.compiler.reset()


DYNAMO_HOME = """
import torch

def check_width(q, width):
    if q.shape[-1] % 2:
        raise ValueError("odd width")

def check_two(q, width):
    if q.ndim != 2:
        raise ValueError("not two dimensions")

def op(q, width=1, *, scale=2.0):
    return q * scale + width

def caller(x):
    return op(x) - 1

def make(k):
    def inner(q, width=0):
        return q * k
    return inner

closed = make(3)

def closed_caller(x):
    return closed(x) + 1

class Base(torch.nn.Module):
    def forward(self, q, width=0):
        return q + 1

class Child(Base):
    def forward(self, q, width=0):
        return super().forward(q) * 2
"""


class Counting:
    """The eager backend, which remembers its graphs."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward


def test_compiled_callers_follow_arm_and_disarm(torch: Any, make_module: MakeModule) -> None:
    module = make_module(DYNAMO_HOME)
    backend = Counting()
    compiled = torch.compile(module.caller, fullgraph=True, backend=backend)
    odd, even = torch.ones(2, 3), torch.ones(2, 4)
    patch = Patch(module.op, ["q", "width"])

    assert torch.equal(compiled(odd), torch.full((2, 3), 2.0))
    patch.arm(module.check_width)
    assert torch.equal(compiled(even), torch.full((2, 4), 2.0))
    with pytest.raises(Exception, match="odd width"):
        compiled(odd)
    patch.disarm()
    assert torch.equal(compiled(odd), torch.full((2, 3), 2.0))
    patch.arm(module.check_two)
    with pytest.raises(Exception, match="not two dimensions"):
        compiled(torch.ones(4))
    patch.disarm()
    assert torch.equal(compiled(torch.ones(4)), torch.full((4,), 2.0))


def test_one_graph_and_the_result_is_checked_too(torch: Any, make_module: MakeModule) -> None:
    module = make_module(
        DYNAMO_HOME + "\ndef check_result(result, state):\n    if state != 3:\n        raise ValueError\n"
    )
    vars(module)["state"] = lambda q, width: 3
    patch = Patch(module.op, ["q", "width"])
    patch.arm(module.state, module.check_result)
    backend = Counting()
    compiled = torch.compile(module.caller, fullgraph=True, backend=backend)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert len(backend.graphs) == 1
    patch.disarm()


def test_the_armed_function_itself_compiled(torch: Any, make_module: MakeModule) -> None:
    module = make_module(DYNAMO_HOME)
    compiled = torch.compile(module.op, fullgraph=True, backend="eager")
    patch = Patch(module.op, ["q", "width"])
    compiled(torch.ones(2, 3))
    patch.arm(module.check_width)
    assert torch.equal(compiled(torch.ones(2, 4), scale=3.0), torch.full((2, 4), 4.0))
    with pytest.raises(Exception, match="odd width"):
        compiled(torch.ones(2, 3))
    patch.disarm()
    compiled(torch.ones(2, 3))


def test_closures_and_super_compile(torch: Any, make_module: MakeModule) -> None:
    module = make_module(DYNAMO_HOME)
    closed, forward = Patch(module.closed, ["q", "width"]), Patch(module.Child.forward, ["q", "width"])
    closed.arm(module.check_width)
    forward.arm(module.check_width)
    compiled = torch.compile(module.closed_caller, fullgraph=True, backend="eager")
    child = torch.compile(module.Child(), fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0))
    assert torch.equal(child(torch.ones(2)), torch.full((2,), 4.0))
    for broken in (compiled, child):
        with pytest.raises(Exception, match="odd width"):
            broken(torch.ones(3))
    assert closed.disarm() and forward.disarm()
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 4.0))
    assert torch.equal(child(torch.ones(3)), torch.full((3,), 4.0))


def test_going_to_and_fro_compiles_nothing_again(torch: Any, make_module: MakeModule) -> None:
    module = make_module(DYNAMO_HOME)
    backend = Counting()
    compiled = torch.compile(module.caller, fullgraph=True, backend=backend)
    patch = Patch(module.op, ["q", "width"])
    x = torch.ones(2, 4)
    for _ in range(30):  # far past Dynamo's limit of recompilations
        compiled(x)
        patch.arm(module.check_width)
        compiled(x)
        patch.arm(module.check_two)
        compiled(x)
        patch.disarm()
    assert len(backend.graphs) == 3


def test_disarmed_during_compilation(torch: Any, make_module: MakeModule) -> None:
    module = make_module(DYNAMO_HOME)
    before = dict(vars(module))
    patch = Patch(module.op, ["q", "width"])
    left: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        patch.disarm()
        left.append(sweep())
        return graph.forward

    patch.arm(module.check_width)
    compiled = torch.compile(module.caller, fullgraph=True, backend=backend)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert left[0] == 1
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert sweep() == 0
    assert {name: value for name, value in vars(module).items() if "llm_op_guard" in name} == {}
    assert before.items() <= vars(module).items()
