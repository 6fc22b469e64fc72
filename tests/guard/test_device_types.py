"""Types of device in expressions: `x.device == cpu` compares by type only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import llm_op_guard as og
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.guard.explain import explain

pytestmark = pytest.mark.usefixtures("no_alarm")

CPU, META = torch.ones(2), torch.ones(2, device="meta")
CUDA = SimpleNamespace(device=torch.device("cuda", 1))


def observed(body: str, **arguments: Any) -> list[str]:
    """What is said of a call; the compiled check says so too."""
    said = [v.observed for v in explain(parse_body(body, "operator", tuple(arguments)), arguments)]
    namespace: dict[str, Any] = {}
    exec(f"def operator({', '.join(arguments)}): ...", namespace)
    guarded = og.guard(body)(namespace["operator"])
    if said:
        with pytest.raises(og.GuardError) as caught:
            guarded(**arguments)
        assert [violation.observed for violation in caught.value.violations] == said
    else:
        guarded(**arguments)
    return said


@pytest.mark.parametrize(
    ("condition", "cpu", "meta", "cuda"),
    [
        ("x.device == cpu", True, False, False),
        ("cuda == x.device", False, False, True),
        ("x.device != meta", True, False, True),
        ("x.device in (cpu, cuda)", True, False, True),
        ("x.device not in (cpu, cuda)", False, True, False),
        ("x.device in (cpu,)", True, False, False),
        ("x.device in [cuda]", False, False, True),
        ("not (x.device == cpu)", False, True, True),
        ("x.device == cpu or x.device == cuda", True, False, True),
        ("(x.device if n else x.device) == cpu", True, False, False),
        ("get(x.device, 0) == cpu", True, False, False),
        ("any(d == cpu for d in (x.device, x.device))", True, False, False),
        ("all(t.device == cpu for t in xs)", True, False, False),
    ],
)
def test_a_device_is_compared_by_its_type(condition: str, *, cpu: bool, meta: bool, cuda: bool) -> None:
    for x, holds in ((CPU, cpu), (META, meta), (CUDA, cuda)):
        assert (observed(f"require({condition}, id='r')", x=x, xs=[x], n=1) == []) is holds, (condition, x)


def test_symbols_names_and_branches() -> None:
    body = "x: any[...] @ dev\nrequire(dev == cpu)"
    assert observed(body, x=CPU) == []
    assert observed(body, x=META) == ["dev = meta"]
    body = "where = x.device\nrequire(where in (cpu, cuda))"
    assert observed(body, x=CUDA) == []
    assert observed(body, x=META) == ["where = meta"]
    body = "x: None | any[...]\nif x.device != meta:\n    require(n == 1)"
    assert observed(body, x=CPU, n=2) == ["n = 2"]
    for x in (META, None):
        assert observed(body, x=x, n=2) == []
    assert observed("require(device == cpu)", device=torch.device("cpu", 0)) == []
    assert observed("require(device == cpu)", device=torch.device("cuda", 0)) == ["device = cuda:0"]


@pytest.mark.parametrize("device", [None, "cpu", "cuda", 0, 1.5, CPU, object(), ("cpu",), torch.float32, [1]])
def test_what_is_no_device_does_not_apply(device: Any) -> None:
    for condition in ("device == cpu", "device != cpu", "device in (cpu, cuda)", "device not in (cpu,)"):
        assert observed(f"require({condition})", device=device) == []
    assert observed("require(device.device.type == cpu)", device=device) == []


def test_promises_about_devices() -> None:
    @og.guard("ensure(result.device == cpu, id='on_the_host')")
    def gather(x: Any) -> Any:
        return x

    assert gather(CPU) is CPU
    with pytest.raises(og.GuardError, match=r"result\.device = meta"):
        gather(META)


def test_a_device_that_is_remembered() -> None:
    class Layer:
        @og.guard("require(recall(self, 'home') == cpu)\nremember(self, home=x.device)")
        def run(self, x: Any) -> Any:
            return x

    layer = Layer()
    assert layer.run(CPU) is CPU
    assert layer.run(META) is META
    with pytest.raises(og.GuardError, match=r"recall\(self, 'home'\) = meta"):
        layer.run(CPU)


REFUSED = {
    "require(cpu)": (9, "cpu is a type of device; a type of device is compared with a device"),
    "require(x.device < cpu)": (20, "cpu is a type of device"),
    "require(x.device is None or cpu)": (29, "cpu is a type of device"),
    "require(cpu < 3)": (9, "cpu is a type of device"),
    "require(x.n + cpu == 1)": (15, "cpu is a type of device"),
    "require(x.device == (cpu, cuda))": (22, "cpu is a type of device"),
    "require(x.device in cpu)": (21, "cpu is a type of device"),
    "require(x.device in (cpu, y.device))": (22, "cpu is a type of device"),
    "require(cpu in (x.device, y.device))": (9, "cpu is a type of device"),
    "require(x.device == y.device == cpu)": (33, "cpu is a type of device"),
    "require(cpu == cuda)": (9, "cpu is no device; a type of device is compared with a device: x.device == cpu, or"),
    "require(cpu in (cpu, cuda))": (9, "cpu is no device"),
    "require(x.shape == cpu)": (9, "x.shape is no device"),
    "require(x.shape[0] == cpu)": (9, r"x.shape\[0\] is no device"),
    "require(x.ndim != cpu)": (9, "x.ndim is no device"),
    "require(x.dtype in (cpu, cuda))": (9, "x.dtype is no device"),
    "require(3 == cpu)": (9, "3 is no device"),
    "require('cpu' == cpu)": (9, "'cpu' is no device"),
    "require(float32 == cpu)": (9, "float32 is no device"),
    "require(len(x.a) == cpu)": (9, r"len\(x.a\) is no device"),
    "require((1 if x.a else x.device) == cpu)": (10, "1 if x.a else x.device is no device"),
    "require(get(x.device, cpu) == y.device)": (23, "cpu is a type of device"),
    "require(arch(cuda) == (8, 0))": (14, "cuda is a type of device"),
    "where = cpu\nrequire(x.a == where)": (9, "cpu is a type of device"),
    "require(x.a, hint=f'on {cpu}')": (25, "cpu is a type of device"),
    "require(x.a, because='a' if x.b < cpu else 'b')": (35, "cpu is a type of device"),
    "if cpu:\n    require(x.a)": (4, "cpu is a type of device"),
    "require(all(t < cpu for t in x))": (17, "cpu is a type of device"),
    "remember(x, home=cpu)": (18, "cpu is a type of device"),
    "require(finite(x[cpu]))": (18, "cpu is a type of device"),
}


@pytest.mark.parametrize("body", REFUSED)
def test_a_type_of_device_stands_nowhere_else(body: str) -> None:
    column, problem = REFUSED[body]
    with pytest.raises(og.ContractError, match=problem) as caught:
        parse_body(body, "operator", ("x", "y"))
    assert (caught.value.line, caught.value.column) == (1, column)


def test_declared_things_that_are_no_devices() -> None:
    for declared in ("D: int\nrequire(D == cpu)", "y: any[N]\nrequire(N == cpu)", "y: T[...]\nrequire(T == cpu)"):
        with pytest.raises(og.ContractError, match="is no device; a type of device"):
            parse_body(declared, "operator", ("D", "y"))
    with pytest.raises(og.ContractError, match="x is a tensor, which has no truth and no order"):
        parse_body("x: any[...]\nrequire(x == cpu)", "operator", ("x",))
    with pytest.raises(og.ContractError, match="unknown name 'gpu'"):
        parse_body("require(x.device == gpu)", "operator", ("x",))
    with pytest.raises(og.ContractError, match="'cpu' has a meaning in the language"):
        parse_body("x: any[cpu]", "operator", ("x",))


def test_names_of_the_operator_come_first() -> None:
    """As they do before names of dtypes."""
    assert observed("require(x.device == cpu)", x=CPU, cpu=torch.device("meta")) == ["x.device = cpu, cpu = meta"]
    assert observed("require(x.dtype == float32)", x=CPU, float32=torch.int8) != []
    for float32 in (CPU, object()):
        assert observed("require(float32 == 1)", float32=float32) == []
    assert observed("require(cpu == 1 and cpu < 2)", cpu=1) == []
    assert observed("meta = n + 1\nrequire(meta < 3)", n=2) == ["meta = 3"]
    assert observed("require(all(meta > 1 for meta in xs))", xs=[1]) == ["meta = 1 at item 0 of xs"]
    # Within a type they are types of device all the same.
    assert observed("x: any[...] @ cpu", x=META, cpu=1) == ["x.device = meta"]


def test_what_is_written_out_is_not_said_again() -> None:
    assert observed("require(x.device in (cuda, xpu))", x=CPU) == ["x.device = cpu"]
    assert observed("require(x.dtype == int64)", x=CPU) == ["x.dtype = float32"]
    assert observed("require(x.dtype in (int64, int8))", x=CPU) == ["x.dtype = float32"]
