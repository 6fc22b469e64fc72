"""`ensure`, and the constants of a contract file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import llm_op_guard as og
from llm_op_guard.contract.parse import parse_stubs


def pool(free: int) -> Any:
    return SimpleNamespace(queue=SimpleNamespace(free=free))


@og.guard("""
    num_blocks: int
    free = self.queue.free
    require(num_blocks <= free, id="enough")
    ensure(self.queue.free == free - num_blocks, id="count_falls", because="each block is handed out once")
    ensure(len(result) == num_blocks)
""")
def get_blocks(self: Any, num_blocks: int, lost: int = 0, extra: int = 0) -> list[int]:
    self.queue.free -= num_blocks + lost
    return [0] * (num_blocks + extra)


def test_a_name_given_before_the_call_keeps_its_value_and_ensure_reads_the_new_one() -> None:
    assert get_blocks(pool(5), 2) == [0, 0]
    with pytest.raises(og.GuardError) as caught:
        get_blocks(pool(5), 2, lost=1)
    (violation,) = caught.value.violations
    assert (violation.rule_id, violation.blames) == ("count_falls", "operator")
    assert violation.observed == "self.queue.free = 2, free - num_blocks = 3"
    assert "the operator did not keep what its contract promises" in str(caught.value)


def test_what_is_required_is_the_callers_and_stops_the_call() -> None:
    blocks = pool(1)
    with pytest.raises(og.GuardError) as caught:
        get_blocks(blocks, 2)
    assert [(v.rule_id, v.blames) for v in caught.value.violations] == [("enough", "caller")]
    assert blocks.queue.free == 1


def test_all_promises_are_judged_together() -> None:
    with pytest.raises(og.GuardError) as caught:
        get_blocks(pool(5), 2, lost=1, extra=1)
    assert [v.rule_id for v in caught.value.violations] == ["count_falls", "len(result) == num_blocks"]


def test_a_promise_about_an_argument_that_is_changed_in_place() -> None:
    @og.guard("x: floating[B]\nensure(finite(x), id='still_finite')")
    def divide(x: Any, by: float) -> None:
        x /= by

    divide(torch.ones(2), 2.0)
    with pytest.raises(og.GuardError, match="still_finite"):
        divide(torch.ones(2), 0.0)


CAPABILITIES = """
MAX_HEAD_DIM = {("flash", 8): 256, ("flash", 7): 128, "default": 64}
EPSILON = 1e-6

def attention(kind, major, head_dim, eps):
    require(head_dim <= MAX_HEAD_DIM[kind, major], id="head_dim_limit")
    require(eps >= EPSILON, id="eps")
    require(head_dim >= MAX_HEAD_DIM["default"] / 64)

def other(x):
    require(x in (1, 2))
"""


def test_a_table_is_looked_up_and_what_it_lacks_does_not_apply() -> None:
    contracts = parse_stubs(CAPABILITIES)

    @og.guard(contracts["attention"])
    def attention(kind: str, major: int, head_dim: int, eps: float = 1.0) -> None: ...

    attention("flash", 8, 256)
    attention("flash", 9, 1024)
    for bad in (("flash", 8, 257), ("flash", 7, 129)):
        with pytest.raises(og.GuardError, match="head_dim_limit"):
            attention(*bad)
    with pytest.raises(og.GuardError, match="expected eps >= EPSILON"):
        attention("flash", 8, 64, 1e-7)
    assert contracts["other"].constants == {}


def test_a_constant_is_part_of_the_contract() -> None:
    changed = parse_stubs(CAPABILITIES.replace("256", "192"))["attention"]
    assert changed.hash != parse_stubs(CAPABILITIES)["attention"].hash


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("LIMIT = open('x')", "a constant is a number, a text, or a tuple, list or dict of these"),
        ("limit = 3", "a constant has a name of capitals"),
        ("T = 3", "a constant has a name of capitals"),
        ("LIMIT = 3\nLIMIT = 4", "a constant has a name of capitals"),
        ("LIMIT = [i for i in (1, 2)]", "a constant is a number"),
    ],
)
def test_constants_that_are_refused(text: str, problem: str) -> None:
    with pytest.raises(og.ContractError, match=problem):
        parse_stubs(f"{text}\ndef f(x):\n    require(x > 1)\n")


def test_constants_are_not_assigned() -> None:
    with pytest.raises(og.ContractError, match="'LIMIT' is a constant; choose another name"):
        parse_stubs("LIMIT = 3\ndef f(x):\n    LIMIT = x\n    require(LIMIT > 1)\n")


def test_a_list_that_is_changed_in_place_is_kept_as_it_was() -> None:
    def append(x: Any) -> Any:
        x.append(9)
        return x

    for body in ("old = x\nensure(len(result) == len(old) + 1)", "old = x\nensure(all(v < 9 for v in old))"):
        for lists in ("", "\nx: list[int]"):
            assert og.guard(body + lists)(append)([1]) == [1, 9]


KEPT = "rows = taken(x, index)\nensure(equal(result, rows), id='rows')"


def test_a_tensor_that_a_value_function_gives_may_be_named() -> None:
    """It is a copy from before the call: an operator that changes its argument in place is judged by what it was."""
    index = torch.tensor([1, 1, 0])
    x = torch.arange(6).reshape(3, 2)
    for operator in (
        lambda x, index: x.index_select(0, index),
        lambda x, index: x.copy_(x.index_select(0, index)),
    ):
        result = og.guard(KEPT)(operator)(x.clone(), index)
        assert torch.equal(result, x[index])
    for operator in (lambda x, index: x, lambda x, index: x.zero_()):
        with pytest.raises(og.GuardError) as caught:
            og.guard(KEPT)(operator)(x.clone(), index)
        assert [(v.rule_id, v.cost_class, v.blames) for v in caught.value.violations] == [("rows", "B", "operator")]
    assert og.guard(KEPT)(lambda x, index: x)(x, torch.tensor([9])) is x


def test_a_named_tensor_is_a_tensor() -> None:
    for rest, problem in (
        ("require(rows > 1)", "rows is a tensor, which has no truth and no order"),
        ("require(rows[0] == 1)", "rows is a tensor, whose items only value functions read"),
        ("require(rows.size == 1)", "'size' is not read from a tensor"),
        ("a, b = negated(x)", "negated gives a tensor, for a value function or a name"),
        ("require(taken(x, index))", "taken gives a tensor, for a value function or a name"),
        ("require(taken(x, index).ndim == 2)", "taken gives a tensor"),
    ):
        with pytest.raises(og.ContractError, match=problem):
            og.guard(f"rows = taken(x, index)\n{rest}")(lambda x, index: x)
    guarded = og.guard("m = taken(x, index)\nx: any[B, D]\nrequire(m.shape[0] == B)")(lambda x, index: x)
    guarded(torch.ones(2, 3), torch.tensor([0, 1]))
    with pytest.raises(og.GuardError, match=r"m\.shape\[0\] = 1, B = 2"):
        guarded(torch.ones(2, 3), torch.tensor([0]))


def test_sizes_are_solved_beside_a_named_tensor() -> None:
    guarded = og.guard("x: any[2 * D, ...]\nm = taken(x, index)\nrequire(D == 2)\nrequire(finite(m))")(
        lambda x, index: x
    )
    guarded(torch.ones(4, 1), torch.tensor([0]))
    with pytest.raises(og.GuardError, match="D = 3"):
        guarded(torch.ones(6, 1), torch.tensor([0]))
