"""Which faults are made of a contract, and which valid calls: those that the documentation names are all there."""

from __future__ import annotations

import math

import pytest

from llm_op_guard.contract.parse import parse_body
from llm_op_guard.faults.build import build
from llm_op_guard.faults.coverage import untried
from llm_op_guard.faults.edits import Edit
from llm_op_guard.faults.ingredients import ingredients
from llm_op_guard.faults.judge import Judgement, judge
from llm_op_guard.faults.mutants import Mutant, all_edits, mutants
from llm_op_guard.faults.solve import HUGE_SIZES, valid_calls
from llm_op_guard.guard.call import Call, MappingSpec, ObjectSpec, TensorSpec

TENSORS = """
q: (float16 | bfloat16 | float32)[B, L, D] @ dev
ids: int64[B, L] @ dev
table: floating[V, _] @ dev
mask: None | boolean[B, L]
scale: None | float
side: "left" | "right"
require(D % 2 == 0, id="even")
require(within(ids, 0, V, allow=-100), id="ids_in_table")
require(finite(q), id="finite")
require(live_rows(mask), id="live")
require(dense(table), id="dense")
require(aligned(q, 16), id="aligned")
if side == "left":
    require(L < 900, id="short")
"""
LENGTHS = """
x: any[L, _]
cu: int64[_]
require(nondecreasing(cu), id="sorted")
require(last(cu) == L, id="whole")
require(length >= L, id="length")
require(rows == L, id="rows")
require(L > 0, id="some")
require(cache_length(cache) <= length, id="room")
require(cache.keys.shape[0] == L, id="cache_batch")
require(misspelt(kwargs, "attention_mask") is None, id="spelt")
"""
Made = tuple[dict[str, list[Mutant]], list[Call]]


@pytest.fixture(scope="module")
def valid() -> list[Judgement]:
    contract = parse_body(TENSORS, "operator", ("q", "ids", "table", "mask", "scale", "side"))
    return valid_calls(ingredients(contract), 0, 200)


@pytest.fixture(scope="module")
def valid_lengths() -> list[Judgement]:
    contract = parse_body(LENGTHS, "operator", ("x", "cu", "length", "rows", "cache", "kwargs"))
    return valid_calls(ingredients(contract), 0, 30)


@pytest.fixture(scope="module")
def made(valid: list[Judgement]) -> Made:
    passed: list[Call] = []

    def told(judgement: Judgement | None) -> None:
        if judgement is not None and not judgement.broken:
            passed.append(judgement.call)

    return mutants(ingredients(valid[0].contract), valid, 0, told), passed


def test_every_rule_is_broken(made: Made, valid_lengths: list[Judgement]) -> None:
    lengths = mutants(ingredients(valid_lengths[0].contract), valid_lengths, 0)
    assert not [rule for rule, kinds in (made[0] | lengths).items() if not kinds]


@pytest.mark.parametrize(
    ("rule", "kinds"),
    [
        ("q.shape", ["axes 0 and 1 swapped", "rank + 1", "rank - 1"]),
        ("even", ["one more everywhere", "one fewer everywhere"]),
        ("q.dtype", ["neighbouring dtype"]),
        ("ids.dtype", ["neighbouring dtype"]),
        ("q.device", ["meta device"]),
        ("dense", ["transposed strides", "gaps between elements"]),
        ("aligned", ["off its alignment by an element"]),
        ("ids_in_table", ["element -1, first", "element 2147483648, last"]),
        ("finite", ["element nan, first", "element inf, in the middle", "element -inf, last"]),
        ("sorted", ["descending"]),
        ("whole", ["one fewer in axis 0"]),
        ("live", ["all 0", "a row of 0"]),
        ("some", ["empty batch"]),
        ("rows", ["doubled batch", "empty batch"]),
        ("cache_batch", ["size 1 in axis 0", "an object of another call"]),
        ("length", ["a stale number"]),
        ("room", ["another object"]),
        ("spelt", ["misspelt name"]),
        ("ids.type", ["missing", "an array that is no tensor"]),
    ],
)
def test_kinds_of_faults(rule: str, kinds: list[str], every_kind: dict[str, set[str]]) -> None:
    assert set(kinds) <= every_kind[rule], sorted(every_kind[rule])


@pytest.fixture(scope="module")
def every_kind(valid: list[Judgement], valid_lengths: list[Judgement]) -> dict[str, set[str]]:
    """Of each rule the kinds of all changes that break it, not only of those that are kept."""
    found: dict[str, set[str]] = {}
    for calls in (valid, valid_lengths):
        made_of = ingredients(calls[0].contract)
        for number, judgement in enumerate(calls[:8]):
            for edit in all_edits(made_of, judgement, calls[number + 1 : number + 8]):
                for rule in broken_by(edit, judgement):
                    found.setdefault(rule, set()).add(edit.kind)
    return found


def broken_by(edit: Edit, origin: Judgement) -> tuple[str, ...]:
    judgement = judge(origin.contract, edit.call)
    return judgement.broken if judgement is not None else ()


def test_bounds_of_an_index(valid: list[Judgement], made: Made) -> None:
    """The last row of a table is in a call that passes, the one behind it is broken."""
    found, passed = made
    good = [*(j.call for j in valid), *passed]
    assert any(last_row(call) in elements(call) for call in good)
    assert not any(last_row(call) + 1 in elements(call) for call in good if last_row(call) >= 0)
    assert any(last_row(m.call) + 1 in elements(m.call) for m in found["ids_in_table"])


def last_row(call: Call) -> int:
    table = dict(call.arguments)["table"]
    return table.shape[0] - 1 if isinstance(table, TensorSpec) and table.shape else -1


def elements(call: Call) -> set[float]:
    ids = dict(call.arguments)["ids"]
    if not isinstance(ids, TensorSpec) or ids.device == "meta":
        return set()
    return {*build(Call((("ids", ids),), call.seed))["ids"].flatten().tolist()}


def test_sizes_of_valid_calls(valid: list[Judgement]) -> None:
    sizes = {size for j in valid for _, tensor in j.call.tensors() for size in tensor.shape}
    assert sizes >= {0, 1, 2, 3, 5, 7, 31, 32, 33, 129}
    assert sizes & {*HUGE_SIZES}
    for judgement in valid:
        for _, tensor in judgement.call.tensors():
            assert tensor.device == "meta" or math.prod(tensor.shape) < 1 << 24


def test_what_valid_calls_are_made_of(valid: list[Judgement]) -> None:
    assert len(valid) >= 200
    assert not untried(valid[0].contract, valid)
    arguments = [dict(j.call.arguments) for j in valid]
    assert {given["side"] for given in arguments} >= {"left", "right"}
    assert {type(given["scale"]) for given in arguments} >= {type(None), float}
    assert {given["mask"] is None for given in arguments} == {True, False}
    assert {given["q"].dtype for given in arguments} >= {"float16", "bfloat16", "float32"}
    assert any(tensor.strides is not None for j in valid for _, tensor in j.call.tensors())


def test_what_objects_of_valid_calls_are(valid_lengths: list[Judgement]) -> None:
    arguments = [dict(j.call.arguments) for j in valid_lengths]
    assert any(isinstance(given["cache"], ObjectSpec) for given in arguments)
    assert any(isinstance(given["kwargs"], MappingSpec) for given in arguments)


def test_what_no_valid_call_has_is_told() -> None:
    contract = parse_body(
        "x: floating[N]\nmode: 'left' | 'right'\nif mode == 'left':\n    n: int", "f", ("x", "mode", "n")
    )
    (first, *_) = valid_calls(ingredients(contract), 0, 1)
    told = untried(contract, [first])
    mode, dtype = dict(first.call.arguments)["mode"], dict(first.call.arguments)["x"].dtype
    assert f"line 1: x as floating[N] of {dtype}" not in told and len(told) > 5
    assert ("line 3: a call for which mode == 'left' is true" in told) is (mode == "right")
    assert ('line 2: mode as "left"' in told or "line 2: mode as 'left'" in told) is (mode == "right")
