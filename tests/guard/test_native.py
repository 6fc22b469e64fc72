"""Native programs say yes and no where `explain` does, or that they cannot tell."""

from __future__ import annotations

import gc
import weakref
from importlib import resources
from pathlib import Path
from types import SimpleNamespace as Box
from typing import Any

import pytest
import torch
from contracts_and_calls import PARAMETERS, calls, contract_bodies, remember
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_equivalence import assert_agreement, explained, loaded

import llm_op_guard
from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.guard import lower as lowering
from llm_op_guard.guard.fast import natively, usable
from llm_op_guard.guard.lower import Lowered, lower
from llm_op_guard.guard.plan import plan_check
from llm_op_guard.native import extension
from llm_op_guard.native.program import Op, Program, Refused

native = usable()
pytestmark = pytest.mark.skipif(isinstance(native, Refused), reason=f"no native checks here: {native}")

EXAMPLES = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
)


def lowered_of(contract: Contract) -> Lowered | Refused:
    plan = plan_check(contract, {"A"})
    return Refused("it has no rules about metadata") if plan is None else lower(plan)


def program_of(contract: Contract) -> Program | Refused:
    lowered = lowered_of(contract)
    return lowered if isinstance(lowered, Refused) else lowered.program


def judged(contract: Contract, arguments: dict[str, Any]) -> bool | None:
    """What the program of a contract says of a call; None where it cannot tell, or where there is no program."""
    plan, program = plan_check(contract, {"A"}), program_of(contract)
    if plan is None or isinstance(program, Refused):
        return None
    remember(arguments)
    said: bool | None = native.judge(extension.made(native, program), *(arguments[name] for name in plan.parameters))
    return said


@EXAMPLES
@given(contract_bodies(), st.lists(calls(), min_size=1, max_size=6), st.booleans())
def test_as_explain_says(body: list[list[str]], some_calls: list[dict[str, Any]], autocast: bool) -> None:
    contract = loaded(body)
    lowered = lowered_of(contract)
    assume(isinstance(lowered, Lowered))
    assert isinstance(lowered, Lowered)
    with torch.autocast("cpu", enabled=autocast):
        for arguments in some_calls:
            said = judged(contract, arguments)
            if said is False or (said and lowered.remainder is None):
                expected = explained(contract, arguments, ("A",))
                assert said is not bool(expected), (contract.text, arguments, expected)


@EXAMPLES
@given(contract_bodies(), st.lists(calls(), min_size=1, max_size=4), st.booleans())
def test_with_what_is_left_to_python(body: list[list[str]], some_calls: list[dict[str, Any]], autocast: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "_LEAST_SPARED", 0)
        contract = loaded(body)
        plans = [plan_check(contract, classes) for classes in ({"A"}, {"A", "B"})]
        lowered = [lower(plan) for plan in plans if plan is not None]
        assume(any(isinstance(part, Lowered) and part.remainder is not None for part in lowered))
        with torch.autocast("cpu", enabled=autocast):
            assert_agreement(contract, some_calls)


WORDS = torch.ones(64)


def test_a_size_that_may_be_one_whose_value_is_told_by_values() -> None:
    contract = parse_body("x: any[A | 1]\nif finite(y):\n    y: any[A]", "operator", PARAMETERS)
    given = {**dict.fromkeys(PARAMETERS), "result": None, "y": torch.ones(2)}
    for size, broken in ((1, False), (2, False), (3, True)):
        call = {**given, "x": torch.ones(size)}
        assert bool(explained(contract, call, ("A", "B"))) is broken
        assert_agreement(contract, [call])


# Each with the calls that keep its rules, and those that break one.
NAMED: dict[str, tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = {
    "an optional argument as a condition": (
        "if n:\n    require(x.shape[0] == 2)\nelse:\n    require(x.shape[0] == 3)",
        [{"n": 1, "x": torch.ones(2)}, {"n": None, "x": torch.ones(3)}, {"n": 0, "x": torch.ones(3)}],
        [{"n": 1, "x": torch.ones(3)}, {"n": None, "x": torch.ones(2)}],
    ),
    "what an assigned name may not be": (
        "v = n\nrequire(v == 2)\nx: any[2]",
        [{"n": 2, "x": torch.ones(2)}, {"n": None, "x": torch.ones(2)}],
        [{"n": 3, "x": torch.ones(2)}, {"n": None, "x": torch.ones(3)}],
    ),
    "an absent side of or": (
        "require(n == 2 or x.shape[0] == 3)",
        [{"n": 2, "x": torch.ones(1)}, {"n": None, "x": torch.ones(1)}, {"n": 1, "x": torch.ones(3)}],
        [{"n": 1, "x": torch.ones(1)}],
    ),
    "exact division": (
        "x: any[D]\nrequire(D / 2 > 0)",
        [{"x": torch.ones(4)}],
        [{"x": torch.ones(3)}, {"x": torch.ones(0)}],
    ),
    "modulus by nothing": ("x: any[D]\nrequire(4 % D == 0)", [{"x": torch.ones(2)}], [{"x": torch.ones(0)}]),
    "dimensions of open length": (
        "x: any[*lead, D]\ny: any[*lead, D + 1]",
        [{"x": torch.ones(2, 3, 4), "y": torch.ones(2, 3, 5)}, {"x": torch.ones(4), "y": torch.ones(5)}],
        [{"x": torch.ones(2, 3, 4), "y": torch.ones(3, 5)}, {"x": torch.ones(2, 3, 4), "y": torch.ones(2, 3, 4)}],
    ),
    "a size to be solved for": (
        "x: any[2 * H + 1]\ny: any[H]",
        [{"x": torch.ones(7), "y": torch.ones(3)}],
        [{"x": torch.ones(7), "y": torch.ones(4)}],
    ),
    "a size that solves to nothing": (
        "x: any[2 * H + 1]\nrequire(H > 0)",
        [{"x": torch.ones(3)}],
        [{"x": torch.ones(4)}, {"x": torch.ones(1)}],
    ),
    "alternatives": (
        "x: None | int | floating[_, D] | int64[D]\ny: any[D]",
        [
            {"x": None, "y": torch.ones(3)}, {"x": 3, "y": torch.ones(3)}, {"x": torch.ones(2, 3), "y": torch.ones(3)},
            {"x": torch.ones(3, dtype=torch.int64), "y": torch.ones(3)},
        ],
        [
            {"x": "3", "y": torch.ones(3)}, {"x": torch.ones(3), "y": torch.ones(3)},
            {"x": torch.ones(2, 3), "y": torch.ones(4)}, {"x": 1.5, "y": torch.ones(3)},
        ],
    ),
    "literals": (
        "mode: None | 'left' | 2 | 1.5",
        [{"mode": None}, {"mode": "left"}, {"mode": 2}, {"mode": 1.5}],
        [{"mode": "right"}, {"mode": 3}, {"mode": True}, {"mode": 2.0}, {"mode": torch.tensor(2)}, {"mode": [2]}],
    ),
    "a type of device": (
        "x: any @ cpu\ny: None | any @ (cuda | xpu)",
        [{"x": torch.ones(1), "y": None}],
        [{"x": torch.ones(1), "y": torch.ones(1)}],
    ),
    "strides": (
        "require(dense(x) and stride(x, 0) == 4)\nrequire(stride(x, 2) == 1)",
        [{"x": torch.ones(3, 4)}, {"x": torch.ones(2, 2, 2)[:, :, 0].as_strided((2, 1), (4, 9))}, {"x": None}],
        [{"x": torch.ones(3, 5)}, {"x": torch.ones(4, 4).T}, {"x": torch.ones(2, 2, 2)[:, :, 0]}],
    ),
    "alignment": (
        "require(aligned(x, 16))\nrequire(aligned(y, n))",
        [
            {"x": WORDS, "y": WORDS[2:], "n": 8}, {"x": WORDS[4:], "y": WORDS[1:], "n": 4}, {"x": WORDS[:0]},
            {"x": WORDS[1:1], "y": None}, {"x": None, "y": WORDS[1:], "n": 0}, {"y": WORDS[1:], "n": -8},
            {"x": WORDS.view(8, 8)[::2, 4:], "y": WORDS.view(8, 8).T, "n": 64},
        ],
        [{"x": WORDS[1:]}, {"x": WORDS[2:]}, {"y": WORDS[1:], "n": 8}, {"x": WORDS.view(8, 8)[:, 3:]}],
    ),
    "whole numbers": (
        "require(abs(n) // 2 == min(x.shape[0], 3))",
        [{"n": -7, "x": torch.ones(4)}, {"n": 4, "x": torch.ones(2)}],
        [{"n": -7, "x": torch.ones(2)}, {"n": 0, "x": torch.ones(1)}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_rules_that_are_kept_and_broken(name: str) -> None:
    body, kept, broken = NAMED[name]
    contract = parse_body(body, "operator", PARAMETERS)
    assert isinstance(program_of(contract), Program)
    for call, expected in (*((call, True) for call in kept), *((call, False) for call in broken)):
        arguments = {**dict.fromkeys(PARAMETERS), "result": None, **call}
        assert judged(contract, arguments) is expected, call
        assert bool(explained(contract, arguments, ("A",))) is not expected, call


def test_huge_sizes() -> None:
    contract = parse_body("x: any[A, B]\nrequire(A * B * 4 < 2 ** 40)", "operator", PARAMETERS)
    assert isinstance(program_of(contract), Refused)  # powers are not among the operations
    contract = parse_body(f"x: any[A, B]\nrequire(A * B * 4 < {1 << 40})", "operator", PARAMETERS)
    cases = (((1 << 19, 1 << 19), False), ((1 << 18, 1 << 18), True), ((1 << 31, 1 << 31), None))
    for shape, expected in cases:
        x = torch.empty(1).expand(shape)
        arguments = {**dict.fromkeys(PARAMETERS), "result": None, "x": x}
        assert judged(contract, arguments) is expected
        assert bool(explained(contract, arguments, ("A",))) is not (expected or False)


def test_many_attributes() -> None:
    names = [f"n{number}" for number in range(60)]
    contract = parse_body("\n".join(f"require(box.{name} == 1)" for name in names), "operator", PARAMETERS)
    arguments: dict[str, Any] = {**dict.fromkeys(PARAMETERS), "result": None, "box": Box(**dict.fromkeys(names, 1))}
    assert judged(contract, arguments) is True
    arguments["box"].n59 = 2
    assert judged(contract, arguments) is False


def test_many_arguments() -> None:
    names = tuple(f"x{number}" for number in range(40))
    contract = parse_body("\n".join(f"{name}: floating[B, D] @ dev" for name in names), "operator", names)
    program = program_of(contract)
    assert isinstance(program, Program)
    made, right = extension.made(native, program), [torch.ones(2, 3)] * 40
    assert native.judge(made, *right) is True
    assert native.judge(made, *right[1:], torch.ones(2, 4)) is False
    names = tuple(f"x{number}" for number in range(65))
    contract = parse_body("\n".join(f"{name}: floating[B, D] @ dev" for name in names), "operator", names)
    assert program_of(contract) == Refused("it is too long")


NINE = ", ".join("abcdefghi")
BEYOND = {
    "nine dimensions": f"x: any[{NINE}]",
    "a group beside eight": f"x: any[..., {NINE[:-3]}]",
    "a group behind many": f"x: any[{'_, ' * 255}*lead]",
    "a tuple of nine": "require(x.shape == (n, n, n, n, n, n, n, n, n))",
    "many numbers": f"require(n in ({', '.join(map(str, range(1, 1100)))}))",
    "an item at a truth": "require(box.w[True] == 1)",
    "an axis of many digits": "require(x.shape[2147483648] == 2)",
}


@pytest.mark.parametrize("name", BEYOND)
def test_what_the_loader_would_not_take(name: str) -> None:
    """Guards are made of it all the same, and say what `explain` says; the rest of it is checked natively."""
    contract = parse_body(f"{BEYOND[name]}\ny: any[D]\nz: any[D]\nmode: any[D]", "operator", PARAMETERS)
    lowered = lowered_of(contract)
    assert isinstance(lowered, Lowered)
    extension.made(native, lowered.program)
    ones = dict.fromkeys(("y", "z", "mode"), torch.ones(3))
    given = {**dict.fromkeys(PARAMETERS), "result": None, **ones}
    shapes = ((1,) * 9, (2,) * 9, (1,) * 8, (2, 3))
    calls_of = [{**given, "x": torch.ones(shape), "n": n} for shape in shapes for n in (1, 2000)]
    assert_agreement(contract, [*calls_of, {**given, "box": Box(w=[0, 1])}, {**calls_of[0], "y": torch.ones(4)}])


CONTRACTS = sorted(Path(str(resources.files(llm_op_guard))).glob("contracts/*/*.contract"))


def test_most_shipped_contracts_have_a_program() -> None:
    shipped = [contract for path in CONTRACTS for contract in llm_op_guard.load(path).values()]
    metadata = [contract for contract in shipped if plan_check(contract, {"A"}) is not None]
    without = {contract.name: reasons for contract in metadata if (reasons := natively(contract).reasons)}
    assert len(without) <= 12, without
    for contract in metadata:
        if contract.name not in without:
            extension.made(native, program_of(contract))  # the loader takes it


def test_every_operation_is_of_use() -> None:
    shipped = [contract for path in CONTRACTS for contract in llm_op_guard.load(path).values()]
    named = [parse_body(body, "operator", PARAMETERS) for body, _, _ in NAMED.values()]
    programs = [program for contract in (*shipped, *named) if isinstance(program := program_of(contract), Program)]
    used = {number for program in programs for number in program.instructions[::4]}
    assert not [op.name for op in Op if op not in used]


def test_a_guarded_method_lets_its_class_go() -> None:
    def made() -> weakref.ref[type]:
        class Scale(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(3))

            @llm_op_guard.guard("x: any[_, D]\nself.weight: any[D]")
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.weight

        Scale()(torch.ones(2, 3))
        return weakref.ref(Scale)

    alive = made()
    gc.collect()
    assert alive() is None


PROXIED = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("body", "broken"), [("x: any[B, 3]", False), ("x: any[B] | object", False), ("x: any[B, 3] | object", True)]
)
def test_a_proxy_of_a_tensor_is_one(body: str, broken: bool) -> None:
    contract = parse_body(f"{body}\nrequire(B == 7)" if broken else body, "operator", PARAMETERS)
    arguments = {**dict.fromkeys(PARAMETERS), "result": None, "x": weakref.proxy(PROXIED)}
    assert isinstance(program_of(contract), Program)
    assert bool(explained(contract, arguments, ("A",))) is broken
    assert judged(contract, arguments) is None


REFUSED = {
    "require(n ** 2 == 4)": "no operation says n ** 2",
    "ensure(result is None)": "all of it is asked after the call",
    "x: any[D]\nensure(result == D)": "most of it is about values or results, or hangs on what is",
    "v = n ** 2\nrequire(v == 4)\nx: any[v]": "no operation says n ** 2",
    "require(finite(x))": "it has no rules about metadata",
    "require(n in divisors(12))": "what divisors(12) holds is not written out",
}
LEFT = {
    "x: any[D] = why(certain=False)\ny: (any[D], any[D])": "(any[D], any[D]) is no tensor and no plain scalar",
    "x: any[D]\ny: any[D]\nz: any[D]\nrequire(n ** 2 == 4)": "no operation says n ** 2",
    "x: any[D]\ny: any[D]\nz: any[D]\nensure(result is None)": "",
}


@pytest.mark.parametrize("body", REFUSED)
def test_what_has_no_program_says_why(body: str) -> None:
    contract = parse_body(body, "operator", PARAMETERS)
    program = program_of(contract)
    assert isinstance(program, Refused)
    assert REFUSED[body] in program.reason


@pytest.mark.parametrize("body", LEFT)
def test_what_is_left_to_python_says_why(body: str) -> None:
    lowered = lowered_of(parse_body(body, "operator", PARAMETERS))
    assert isinstance(lowered, Lowered)
    assert lowered.remainder is not None
    assert lowered.reasons == ((LEFT[body],) if LEFT[body] else ())
