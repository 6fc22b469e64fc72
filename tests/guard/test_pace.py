"""Value rules in some calls only: which may be left out, when it is a call's turn, and that it is counted."""

from __future__ import annotations

import random
import threading

import pytest
import torch

import llm_op_guard as og
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.guard.pace import may_be_left_out
from llm_op_guard.policy import Setting

NAN = torch.full((2,), float("nan"))
CONTRACT = """
x: floating[L]
ids: int64[_]
require(finite(x))
require(within(ids, 0, L), id="ids_in_x")
ensure(finite(result), id="finite_result")
"""


def taken(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x * 1 if ids.numel() == 0 else x * len(ids)


def outcomes(function: object, x: torch.Tensor, calls: int, ids: torch.Tensor | None = None) -> list[bool]:
    """Of so many calls, which were stopped."""
    found = []
    for _ in range(calls):
        try:
            function(x, torch.tensor([0]) if ids is None else ids)  # type: ignore[operator]
            found.append(False)
        except og.GuardError:
            found.append(True)
    return found


@pytest.mark.parametrize(
    ("rule", "left_out"),
    [
        ("require(finite(x))", True),
        ("require(within(x, 0, 1))", True),
        ("require(within(ids, 0, 5))", False),
        ("require(lowest(ids) >= 0 and highest(ids) < x.shape[0])", False),
        ("require(within(mask, 0, 2))", True),
        ("require(only(flags, 0, 1))", True),
        ("require(within(undeclared, 0, 5))", True),
        ("require(within(undeclared, 0, 5), error=IndexError)", False),
        ("require(equal(x, x))", True),
        ("require(within(ids, 0, embedding_rows(undeclared)))", False),
        ("require(x.shape[0] > 1)", False),
        ("require(all(finite(y) for y in undeclared))", True),
    ],
)
def test_what_may_be_left_out(rule: str, left_out: bool) -> None:
    declared = "x: floating[_]\nids: int64[_] | int32[_]\nmask: integer[_] | floating[_]\nflags: boolean[_]\n"
    contract = parse_body(declared + rule, "f", ("x", "ids", "mask", "flags", "undeclared"))
    assert may_be_left_out(contract.clauses[-1], contract) is left_out


def test_every_third_call() -> None:
    guarded = og.guard(CONTRACT)(taken)
    with og.policy(B="raise,every=3"):
        assert outcomes(guarded, NAN, 7) == [True, False, False, True, False, False, True]
        # What protects a memory access keeps no pace.
        assert outcomes(guarded, torch.ones(2), 4, torch.tensor([2])) == [True] * 4
    assert outcomes(guarded, NAN, 3) == [True] * 3


def test_results_keep_the_pace_too() -> None:
    guarded = og.guard("ensure(finite(result), id='finite_result')")(lambda x, ids: x / 0)
    with og.policy(B="every=2"):
        assert outcomes(guarded, torch.ones(2), 4) == [True, False, True, False]


def test_by_chance_and_without_touching_the_numbers_of_others() -> None:
    guarded = og.guard(CONTRACT)(taken)
    random.seed(3)
    before = random.getstate(), torch.random.get_rng_state()
    with og.policy(B="sample=0.3"):
        stopped = sum(outcomes(guarded, NAN, 600))
    assert 100 < stopped < 260
    assert random.getstate() == before[0] and torch.equal(torch.random.get_rng_state(), before[1])


def test_it_is_counted() -> None:
    guarded = og.guard(CONTRACT)(taken)
    outcomes(guarded, torch.ones(2), 5)
    assert og.record.values_judged == {}, "nothing is left out"
    with og.policy(B="every=4"):
        outcomes(guarded, torch.ones(2), 10)
    (counts,) = og.record.values_judged.values()
    assert counts == (3, 7)
    og.record.clear()
    assert og.record.values_judged == {}


def test_another_thread_keeps_its_own_policy() -> None:
    guarded = og.guard(CONTRACT)(taken)
    found: list[list[bool]] = []
    with og.policy(B="every=1000"):
        outcomes(guarded, torch.ones(2), 1)
        thread = threading.Thread(target=lambda: found.append(outcomes(guarded, NAN, 3)))
        thread.start()
        thread.join()
        assert outcomes(guarded, NAN, 3) == [False] * 3
    assert found == [[True] * 3]


def test_a_compiled_program_judges_in_every_run() -> None:
    torch._dynamo.reset()
    guarded = og.guard(CONTRACT)(taken)
    with og.policy(B="every=5"):
        program = torch.compile(guarded, fullgraph=True, backend="eager")
        assert outcomes(program, torch.ones(2), 2) == [False, False]
        assert outcomes(program, NAN, 3) == [True] * 3


def test_suspect_rules_keep_it() -> None:
    guarded = og.guard(
        "x: floating[_]\nrequire(finite(x), certain=False)\nrequire(x.shape[0] < 9, certain=False, id='n')"
    )(lambda x, ids: x)
    with og.policy(B="every=2", A="warn"), pytest.warns(og.GuardWarning, match="x.shape"):
        guarded(torch.ones(10), None)
        guarded(torch.ones(10), None)


def test_settings() -> None:
    assert Setting.parse("warn,every=10").every == 10
    assert Setting.parse("sample=0.5,record").sample == 0.5
    assert str(Setting.parse("warn,every=10")) == "warn,every=10"
    assert str(Setting.parse("sample=0.25")) == "raise,sample=0.25"
    assert Setting.parse("every=1") == Setting.parse("raise")
    for text, problem in (
        ("every=0", "every takes a whole number from 1 on"),
        ("every=x", "every takes a whole number from 1 on"),
        ("sample=0", "sample takes a number above 0 and up to 1"),
        ("sample=1.5", "sample takes a number above 0 and up to 1"),
        ("sample=nan", "sample takes a number above 0 and up to 1"),
        ("every=2,sample=0.5", "unknown or repeated 'sample=0.5' .* or sample=P"),
        ("sometimes=2", "unknown or repeated 'sometimes=2'"),
    ):
        with pytest.raises(og.PolicyError, match=problem):
            Setting.parse(text)
    with pytest.raises(og.PolicyError, match="a pace is for class B; metadata is judged in every call"):
        og.set_policy(A="raise,every=2")
