"""What a call comes to without a guard: what counts as a difference, and calls that die, hang, wait or draw numbers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from llm_op_guard.contract.parse import parse_body
from llm_op_guard.faults import outcome
from llm_op_guard.faults.build import Unbuildable, build
from llm_op_guard.faults.injection import inject
from llm_op_guard.faults.judge import judge
from llm_op_guard.faults.mutants import varied
from llm_op_guard.faults.operators import Operator
from llm_op_guard.faults.outcome import Outcome, Trial, outcomes
from llm_op_guard.guard.call import Call, SequenceSpec, TensorSpec

X = TensorSpec("float32", (2, 3), fill=(1.0, 2.0, 3.0))
RIGHT, WRONG = (Call((("x", X), ("n", n))) for n in (2, 5))


def without_a_guard(function: Callable[..., Any], *calls: Call, names: tuple[str, ...] = ()) -> list[Outcome]:
    trials = [Trial(call, RIGHT, names) for call in calls or (WRONG,)]
    return list(outcomes(Operator("operator", function), trials))


class Holder:
    """An object whose properties and comparisons are a user's."""

    def __init__(self, held: Any) -> None:
        self.held = held

    @property
    def touched(self) -> Any:
        raise AssertionError("a property of the user ran")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("a comparison of the user ran")

    __hash__ = None  # type: ignore[assignment]


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


@dataclass
class Answer:
    scores: torch.Tensor
    name: str = "answer"


def in_a_circle(n: int) -> Holder:
    made = Holder(n)
    made.itself = made  # type: ignore[attr-defined]
    return made


SAME = float("nan")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x, n: n * 10, "off by 30"),
        (lambda x, n: float(n), "off by 3"),
        (lambda x, n: complex(0, n), "off by 3"),
        (lambda x, n: "left" if n < 4 else "right", "another text"),
        (lambda x, n: b"left" if n < 4 else b"right", "other bytes"),
        (lambda x, n: n < 4, "False instead of True"),
        (lambda x, n: x.dtype if n < 4 else torch.int64, "torch.int64 instead of torch.float32"),
        (lambda x, n: {"a": [x * n], "b": "s"}, "off by 9"),
        (lambda x, n: {n: x}, "other keys"),
        (lambda x, n: {"a": x} if n < 4 else {"a": x, "b": x}, "other keys"),
        (lambda x, n: {n, 2}, "other members"),
        (lambda x, n: [x] * n, "5 results instead of 2"),
        (lambda x, n: (x, [x] * n), "5 items instead of 2 in [1]"),
        (lambda x, n: x.numpy() * n, "off by 9"),
        (lambda x, n: np.float32(n), "off by 3"),
        (lambda x, n: np.array(["a", "b"][n > 4]), "another array"),
        (lambda x, n: x.numpy().astype("int32" if n < 4 else "int64"), "a result in int64 instead of int32"),
        (lambda x, n: Holder(x * n), "off by 9"),
        (lambda x, n: Slotted(x * n), "off by 9"),
        (lambda x, n: Answer(x * n), "off by 9"),
        (lambda x, n: Answer(x, "a" * n), "another text in .name"),
        (lambda x, n: in_a_circle(n), "off by 3"),
        (lambda x, n: x if n < 4 else None, "a NoneType instead of a Tensor"),
        (lambda x, n: n if n < 4 else float(n), "a float instead of an int"),
        (lambda x, n: x * (1 if n < 4 else SAME), "NaN in the result"),
        (lambda x, n: x * (SAME if n < 4 else 1), "numbers where the valid call has NaN"),
        (lambda x, n: SAME if n < 4 else 1.0, "numbers where the valid call has NaN"),
        (lambda x, n: 1.0 if n < 4 else SAME, "NaN in the result"),
        (lambda x, n: x * (1 if n < 4 else float("inf")), "off by inf"),
        (lambda x, n: x.to_sparse() * n, "off by 9"),
    ],
)
def test_differences(function: Callable[..., Any], says: str) -> None:
    assert without_a_guard(function) == [Outcome("silent", says)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x,
        lambda x, n: x * SAME,
        lambda x, n: [SAME, float("inf"), 3, "text", b"bytes", None, True, 2j],
        lambda x, n: {"a": {1: x}, "b": (1, 2)},
        lambda x, n: {3, 4, "five"},
        lambda x, n: x.numpy(),
        lambda x, n: np.array([SAME, 1.0]),
        lambda x, n: Holder(Slotted(Answer(x))),
        lambda x, n: in_a_circle(3),
        lambda x, n: object(),
        lambda x, n: (print, Holder, lambda: n),
        lambda x, n: None,
        lambda x, n: x.to_sparse(),
        lambda x, n: x.to("meta") * n,
    ],
)
def test_what_is_the_same(function: Callable[..., Any]) -> None:
    assert without_a_guard(function) == [Outcome("harmless", "")]


def test_errors() -> None:
    def raises(x: Any, n: int) -> None:
        if n > 4:
            raise ValueError("n is too large")

    assert without_a_guard(raises, names=("n",)) == [Outcome("clear error", "ValueError: n is too large")]
    assert without_a_guard(raises, names=("x",))[0].kind == "obscure error"


# ---------------------------------------------------------------- what is left in the arguments


def test_a_difference_in_what_is_left_in_the_arguments() -> None:
    def in_place(x: torch.Tensor, n: int) -> None:
        x.add_(n)

    assert without_a_guard(in_place, WRONG, RIGHT) == [
        Outcome("silent", "leaves x changed otherwise: off by 3"),
        Outcome("harmless", ""),
    ]


def test_an_argument_that_only_one_of_the_calls_changes() -> None:
    for wanted in (2, 5):
        (found,) = without_a_guard(lambda x, n, wanted=wanted: x.zero_().sum() if n == wanted else x.sum() * 0)
        assert found == Outcome("silent", "leaves x changed otherwise: off by 3")


def test_an_argument_that_is_wrong_itself_is_no_difference() -> None:
    other = Call((("x", TensorSpec("float32", (4,))), ("n", 2)))
    assert without_a_guard(lambda x, n: n, other) == [Outcome("harmless", "")]


def test_what_is_left_in_a_list_among_the_arguments() -> None:
    right, wrong = (Call((("seen", SequenceSpec("list", (1, 2))), ("n", n))) for n in (2, 5))
    operator = Operator("operator", lambda seen, n: seen.append(n))
    found = list(outcomes(operator, [Trial(wrong, right), Trial(right, right)]))
    assert found == [Outcome("silent", "leaves seen changed otherwise: off by 3"), Outcome("harmless", "")]


# ---------------------------------------------------------------- coroutines and generators


async def waits(x: torch.Tensor, n: int) -> torch.Tensor:
    await asyncio.sleep(0)
    return x * n


async def streams(x: torch.Tensor, n: int) -> AsyncIterator[torch.Tensor]:
    for step in range(2):
        yield x * n + step


def steps(x: torch.Tensor, n: int) -> Iterator[Any]:
    yield x
    yield x * n


def forever(x: torch.Tensor, n: int) -> Iterator[Any]:
    while True:
        yield n


async def fails(x: torch.Tensor, n: int) -> None:
    if n > 4:
        raise ValueError("n is too large")


def test_what_is_lazy_is_driven() -> None:
    for function in (waits, streams, steps, lambda x, n: (x * n for _ in range(2)), lambda x, n: map(n.__mul__, [3])):
        assert without_a_guard(function) == [Outcome("silent", "off by 9")]
    assert without_a_guard(forever) == [Outcome("silent", "off by 3")]
    assert without_a_guard(fails, names=("n",)) == [Outcome("clear error", "ValueError: n is too large")]


# ---------------------------------------------------------------- random numbers


@pytest.mark.parametrize("draw", [torch.rand, lambda _: random.random(), lambda _: np.random.random()])
def test_random_numbers_are_seeded(draw: Callable[..., Any]) -> None:
    assert without_a_guard(lambda x, n: x + draw(1)) == [Outcome("harmless", "")]
    assert without_a_guard(lambda x, n: x * n + draw(1)) == [Outcome("silent", "off by 9")]


def test_a_valid_call_that_differs_from_itself() -> None:
    calls = [0]

    def operator(x: torch.Tensor, n: int) -> Any:
        calls[0] += 1
        if n == 7:
            raise ValueError("n is 7")
        return {"a": x + calls[0], "b": x[:1] if n == 6 else x}

    raises, other = (Call((("x", X), ("n", n))) for n in (7, 6))
    assert without_a_guard(operator, WRONG, raises, other, names=("n",)) == [
        Outcome("not run", "the valid call differs from itself each time: off by 1"),
        Outcome("clear error", "ValueError: n is 7"),
        Outcome("silent", "a result of [1, 3] instead of [2, 3] in ['b']"),
    ]
    # As a valid call it runs.
    assert without_a_guard(operator, RIGHT)[0].kind == "silent"


# ---------------------------------------------------------------- calls that end or hang


def test_a_mutant_that_ends_the_process() -> None:
    def ends(how: Callable[[], Any]) -> Callable[..., Any]:
        return lambda x, n: how() if n > 4 else x

    def leave(error: BaseException) -> Any:
        raise error

    for how, says in (
        (lambda: os._exit(3), "the process ended with 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "the process ended with -9"),
        (lambda: leave(SystemExit(4)), "SystemExit: 4"),
        (lambda: leave(KeyboardInterrupt()), "KeyboardInterrupt: "),
    ):
        assert without_a_guard(ends(how), WRONG, RIGHT) == [Outcome("died", says), Outcome("harmless", "")]


def test_a_valid_call_that_ends_the_process_is_no_fault_of_the_mutant() -> None:
    tried = [WRONG, Call((("x", X), ("n", 6)))]
    for function, says in (
        (lambda x, n: os._exit(3), "the valid call fails here: the process ended with 3"),
        (lambda x, n: sys.exit(4), "the valid call fails here: SystemExit: 4"),
    ):
        assert without_a_guard(function, *tried) == [Outcome("not run", says)] * 2


def test_what_the_function_prints_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    def prints(x: torch.Tensor, n: int) -> torch.Tensor:
        sys.stdout.write("NOISE")
        os.write(1, b"NOISE")
        os.write(2, b"NOISE")
        if n > 4:
            raise KeyboardInterrupt
        return x

    assert without_a_guard(prints)[0].kind == "died"
    assert capfd.readouterr() == ("", "")


def sleeps(x: torch.Tensor, n: int) -> Any:
    time.sleep(100)


def of(n: int) -> Call:
    return Call((("x", X), ("n", n)))


def test_hanging_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "SECONDS", 2.0)
    found = without_a_guard(lambda x, n: sleeps(x, n) if n > 4 else x, WRONG, of(3))
    assert found == [Outcome("hung", "no result after 2 s"), Outcome("harmless", "")]


def test_after_some_valid_calls_that_hang_no_more_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "SECONDS", 0.5)
    operator, unfit = Operator("operator", sleeps), {}
    valid = [of(n) for n in range(50)]
    started = time.perf_counter()
    found = list(outcomes(operator, [Trial(call, call) for call in valid], unfit))
    assert found[:3] == [Outcome("not run", "the valid call hangs here: no result after 0.5 s")] * 3
    assert set(found[3:]) == {Outcome("not run", "not tried here: 3 valid calls before it hung")}
    # Nor are the mutants that were made of them.
    again = list(outcomes(operator, [Trial(WRONG, valid[0]), Trial(WRONG, valid[9])], unfit))
    assert again == [found[0], found[9]]
    assert time.perf_counter() - started < 15


def test_after_some_mutants_that_hang_less_time_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "SECONDS", 1.0)
    found = without_a_guard(lambda x, n: sleeps(x, n) if n > 4 else x, *(of(n) for n in (5, 6, 7, 8, 3)))
    assert [one.text for one in found] == [*["no result after 1 s"] * 3, "no result after 0.1 s", ""]


# ---------------------------------------------------------------- methods of classes


class Scales:
    factor = 3

    @classmethod
    def scaled(cls, x: torch.Tensor, n: int) -> Any:
        return x * n * cls.factor


def test_a_method_of_a_class_has_its_class() -> None:
    right, wrong = (Call((("cls", None), ("x", X), ("n", n))) for n in (2, 5))
    found = list(outcomes(Operator("operator", Scales.scaled), [Trial(wrong, right)]))
    assert found == [Outcome("silent", "off by 27")]


# ---------------------------------------------------------------- what calls are made of


NUMBERS = [
    ("int32", (1 << 31) - 1, True),
    ("int32", 1 << 31, False),
    ("int8", -129, False),
    ("uint8", 255, True),
    ("uint8", -1, False),
    ("int64", SAME, False),
    ("int64", 1e30, False),
    ("bool", 1, True),
    ("float16", 65504.0, True),
    ("float16", 1e30, False),
    ("float16", float("inf"), True),
    ("float16", SAME, True),
    ("bfloat16", 1e30, True),
    ("float32", 1e39, False),
    ("float8_e4m3fn", SAME, True),
    ("float8_e4m3fn", 1000.0, False),
    ("float8_e4m3fn", 0, True),
    ("float8_e5m2", -1, True),
]


@pytest.mark.parametrize(("dtype", "value", "is_held"), NUMBERS)
def test_a_tensor_holds_what_the_call_says_or_is_not_made(dtype: str, value: float, is_held: bool) -> None:
    for spec in (TensorSpec(dtype, (3,), fill=(value,)), TensorSpec(dtype, (3,), at=((1, value),))):
        if not is_held:
            with pytest.raises(Unbuildable, match=f"{dtype} holds no "):
                build(Call((("x", spec),)))
        else:
            found = build(Call((("x", spec),)))["x"].to(torch.float64)[1].item()
            assert found == pytest.approx(value, nan_ok=True, rel=0.1)


def test_elements_vary_where_the_contract_lets_them() -> None:
    body = "x: floating[N, D]\nw: floating[D]\np: float32[D]\nids: int64[D]\none: float32[D]\n"
    rules = "require(within(p, 0, 2))\nrequire(within(ids, 0, 3))\nrequire(within(one, 1, 2))"
    contract = parse_body(body + rules, "operator", ("x", "w", "p", "ids", "one"))
    names = {"x": (2, 4), "w": (4,), "p": (4,), "ids": (4,), "one": (4,)}
    given = [(name, TensorSpec("int64" if name == "ids" else "float32", s, fill=(1,))) for name, s in names.items()]
    judgement = judge(contract, Call(tuple(given)))
    assert judgement is not None and not judgement.broken
    fills = {name: spec.fill for name, spec in varied(judgement).call.arguments}
    assert fills == {"x": None, "w": None, "p": (0.25, 0.75, 0.5), "ids": (0, 1, 2), "one": (1,)}
    assert dict(varied(judgement, whole_numbers=False).call.arguments)["ids"].fill == (1,)


@pytest.mark.parametrize("seed", [0, 2])
def test_a_factor_of_another_shape_shows(seed: int) -> None:
    contract = parse_body("x: floating[N, D]\nw: floating[D]", "scale", ("x", "w"))
    result = inject("scale", contract, Operator("scale", lambda x, w: x * w), seed=seed, valid=60)
    assert not result.lenient
    found = {case.kind: case.unguarded.kind for case in result.cases if case.rule == "w.shape"}
    assert found["size 1 in axis 0"] == "silent"
    assert {kind for kind, unguarded in found.items() if unguarded == "harmless"} == {"rank + 1"}


def test_mutants_of_one_rule_are_different_calls() -> None:
    body = "cu: int32[B]\nrequire(nondecreasing(cu), id='sorted')\nrequire(first(cu) == 0, id='zero')\n"
    result = inject("cu", parse_body(body + "returns: like(cu)", "cu", ("cu",)), None, valid=40)
    calls = [(case.rule, case.call) for case in result.cases]
    assert len(calls) == len(set(calls)) > 10
