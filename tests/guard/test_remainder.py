"""What is left to Python of a call that a native program accepts: no more than what has to be."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from test_equivalence import assert_agreement, explained

import llm_op_guard as og
from llm_op_guard.api import sites
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.guard import fast
from llm_op_guard.guard.lower import Lowered, lower
from llm_op_guard.guard.plan import Plan, plan_check
from llm_op_guard.guard.source import Native, check_source

pytestmark = pytest.mark.skipif(not fast.is_usable(), reason="there are no native checks here")

PARAMETERS = ("q", "k", "ids", "table", "n")
GROUPED = (
    "require(n ** 2 < 100, id='power')\nq: floating[B, T, D] @ dev\nk: floating[B, S, D] @ dev\nrequire(D % 2 == 0)"
)


def left_of(body: str, classes: str = "AB") -> Plan | None:
    """What a program of this contract leaves to Python."""
    contract = parse_body(body, "operator", PARAMETERS)
    plan = plan_check(contract, frozenset(classes))  # type: ignore[arg-type] # its letters
    assert plan is not None
    lowered = lower(plan)
    assert isinstance(lowered, Lowered), lowered
    return lowered.remainder


def left_text(body: str, classes: str = "AB") -> str:
    """Its source, between `try` and `except`."""
    plan = left_of(body, classes)
    assert plan is not None
    text = check_source(plan, native=Native.HAS_ACCEPTED).text
    return text.partition("    try:\n")[2].partition("    except Exception:")[0]


def test_nothing() -> None:
    assert left_of("q: floating[B, T, D]\nk: floating[B, T, D]", "A") is None


def test_a_value_rule_and_where_its_symbol_comes_from() -> None:
    text = left_text(
        "ids: int64[T]\ntable: floating[R, D]\nk: floating[T, D]\nrequire(within(ids, 0, R), id='in_table')"
    )
    assert text == (
        "        # table: floating[R, D]\n"
        "        if not isinstance(table, _Tensor):\n"
        "            raise _Broken\n"
        "        R, _ = table.shape\n"
        "        # in_table\n"
        "        try:\n"
        "            if ids is not None and (not (_fn_within(ids, 0, R))):\n"
        "                raise _Broken\n"
        "        except _inapplicable:\n"
        "            pass\n"
    )


def test_a_metadata_rule_that_no_program_can_say() -> None:
    text = left_text(GROUPED, "A")
    assert "# power" in text
    assert "q" not in text
    assert "shape" not in text


def test_what_hangs_on_a_name_that_python_gives() -> None:
    text = left_text(f"{GROUPED}\nm = n ** 2\nrequire(m == S, id='square')\nrequire(T == B, id='own')", "A")
    assert "# square" in text
    assert "_, S, _ = k.shape" in text
    assert "own" not in text


def test_where_a_branch_decides() -> None:
    text = left_text(f"{GROUPED}\nif n:\n    ids: int64[T]\n    require(nondecreasing(ids), id='sorted')")
    assert "# power" in text
    assert "if case_1:" in text
    assert "# ids" not in text


def test_every_alternative_that_may_have_told_a_symbol() -> None:
    text = left_text(f"{GROUPED}\nids: int64[R] | None\ntable: None | any[R, D]\nrequire(within(k, 0, R), id='low')")
    assert "# ids: int64[R] | None" in text
    assert "# table: None | any[R, D]" in text
    assert "q.shape" not in text


def test_a_size_that_is_solved_for() -> None:
    text = left_text(f"{GROUPED}\nids: int64[2 * R]\nrequire(within(table, 0, R), id='low')")
    assert "ids_0, = ids.shape" in text
    assert "R = _undone(ids_0, ('over', 2))" in text


def test_a_declaration_is_taken_whole_where_some_of_it_is_left() -> None:
    text = left_text(f"{GROUPED}\ntable: floating[n ** 2, D]", "A")
    assert "table.dtype not in _floating" in text
    assert "table_0 != _whole(_power(_plain(n), 2))" in text
    assert "table_1" not in text
    assert "q.dtype" not in text


SEEN_WHERE_IT_MAY_NOT_APPLY = {
    "values decide": ("q: None | any[B]\nif finite(ids):\n    k: any[B]", {"q": 2, "ids": 1, "k": 3}),
    "two branches": ("if n:\n    q: any[B]\nif n ** 2 > 1:\n    k: any[B]", {"n": 2, "q": 2, "k": 3}),
    "a suspicion": ("q: any[B] = why(certain=False)\nif n ** 2 > 1:\n    k: any[B]", {"n": 2, "q": 2, "k": 3}),
}


@pytest.mark.parametrize("name", SEEN_WHERE_IT_MAY_NOT_APPLY)
def test_a_symbol_that_the_program_may_have_seen(name: str) -> None:
    body, given = SEEN_WHERE_IT_MAY_NOT_APPLY[name]
    others = ("x", "y", "z")
    parameters = (*PARAMETERS, *others)
    contract = parse_body("\n".join([body, *(f"{other}: any[D]" for other in others)]), "op", parameters)
    arguments = {key: size if key == "n" else torch.ones(size) for key, size in given.items()}
    wrong = {
        **dict.fromkeys(parameters),
        "box": None,
        "result": None,
        **dict.fromkeys(others, torch.ones(4)),
        **arguments,
    }
    assert explained(contract, wrong, ("A", "B"))
    assert_agreement(contract, [wrong, {**wrong, "k": wrong["q"]}])


PAST = "q: floating[N, H, L, D]\nk: any[N, H, L, D]\nmask: None | boolean[B, S]\n"
PAST += "past: None | (floating[B, H, S, D], floating[B, H, S, D])"


def test_what_is_left_is_compared_with_what_the_program_may_have_seen() -> None:
    """Both of `past` surely tell S where they are there: they are no witnesses of each other alone."""

    @og.guard(PAST)
    def attention(q: Any, k: Any, past: Any = None, mask: Any = None) -> Any:
        return q

    q, past = torch.ones(1, 2, 3, 4), (torch.ones(1, 2, 5, 4),) * 2
    for mask in (torch.ones(1, 5) > 0, None):
        attention(q, q, past, mask)
    attention(q, q, None, torch.ones(2, 7) > 0)
    with pytest.raises(og.GuardError, match=r"mask.shape\[1\] = 6, expected S = 5"):
        attention(q, q, past, torch.ones(1, 6) > 0)


def test_what_a_check_after_the_call_asks_for() -> None:
    text = left_text(f"{GROUPED}\nreturns: floating[B, T, S]", "A")
    assert "B, T, _ = q.shape" in text
    assert "_, S, _ = k.shape" in text
    assert "_state = (B, S, T, " in text


@og.guard(f"{GROUPED}\ntable: floating[R, D]\nrequire(within(ids, 0, R), id='in_table')\nreturns: any[B]")
def looked_up(q: Any, k: Any, ids: Any, table: Any, n: int) -> Any:
    return torch.ones(q.shape[0] + (n == 3))


RIGHT = {
    "q": torch.ones(2, 3, 4),
    "k": torch.ones(2, 5, 4),
    "ids": torch.tensor([0, 6]),
    "table": torch.ones(7, 4),
    "n": 2,
}
WRONG = {
    "by the program": ({"k": torch.ones(2, 5, 3)}, "k.shape"),
    "in Python, metadata": ({"n": 10}, "power"),
    "in Python, values": ({"ids": torch.tensor([0, 7])}, "in_table"),
    "after the call": ({"n": 3}, "result.shape"),
}


def test_a_program_begins() -> None:
    guard = next(site.guard for site in sites() if site.guard.operator.endswith("looked_up"))
    check = guard.checks(("A", "B")).before
    accepts, program = check.__globals__["_accepts"], check.__globals__["_program"]
    given = [RIGHT[name] for name in guard.parameters]
    assert accepts(program, *given)
    assert accepts(program, *(torch.tensor([0, 7]) if name == "ids" else RIGHT[name] for name in guard.parameters))
    assert not accepts(program, *(torch.ones(2, 5, 3) if name == "k" else RIGHT[name] for name in guard.parameters))


@pytest.mark.parametrize("where", WRONG)
def test_every_part_stops_what_is_wrong(where: str) -> None:
    looked_up(**RIGHT)
    wrong, rule_id = WRONG[where]
    with pytest.raises(og.GuardError) as caught:
        looked_up(**{**RIGHT, **wrong})
    assert [violation.rule_id for violation in caught.value.violations] == [rule_id]


DECLARED = "x: any[B, D]\ny: any[B, D]\nrequire(D % 2 == 0)\n"
OF_SIZES = {
    "a shape": "require(broadcasts(x.shape, (n ** 1, 2)))",
    "strides": "require(dense(x) or n ** 3 == 0)",
    "elements": "require(numel(x) ** 2 == 16)",
    "a loop": "require(all(s ** 2 == 4 for s in x.shape))",
    "after the call": "was = x.shape\nensure(result.shape == was)",
    "after the call, from a type": "returns: any[*x.shape]",
}


@pytest.mark.parametrize("declared", [DECLARED, ""], ids=["declared", "not declared"])
@pytest.mark.parametrize("rule", OF_SIZES.values(), ids=OF_SIZES)
def test_under_jit_trace_it_steps_aside_without_a_trace(declared: str, rule: str) -> None:
    def double(x: Any, y: Any, n: int) -> Any:
        return x + y

    def traced(operator: Any) -> str:
        program = torch.jit.trace(lambda x: operator(x, x, 2), (torch.ones(2, 2),), check_trace=False)
        return str(program.graph)

    guarded = og.guard(declared + rule)(double)
    guarded(torch.ones(2, 2), torch.ones(2, 2), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        assert traced(guarded) == traced(double)


@og.guard("n: int\nm: int\nk: int\nrequire(n ** 2 < 5, id='power', certain=False)")
def suspected(n: int, m: int, k: int, xs: Any) -> int:
    return n


@og.guard("n: int\nm: int\nk: int\nrequire(n ** 2 < 5, id='power')")
def required(n: int, m: int, k: int, xs: Any) -> int:
    return n


@og.guard("n: int\nm: int\nk: int\nrequire(all(x > 0 for x in xs), id='positive')")
def of_values(n: int, m: int, k: int, xs: Any) -> int:
    return n


@pytest.mark.parametrize(
    ("operator", "action", "stops"),
    [(suspected, "raise", False), (required, "raise", True), (required, "warn", False), (of_values, "raise", False)],
)
def test_while_a_program_is_exported_it_says_what_the_whole_check_would(
    operator: Any, action: str, *, stops: bool
) -> None:
    """Export runs the program in Python, where a native program accepts what is no fake tensor."""

    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * operator(3, 3, 3, [0])

    og.record.clear()
    with warnings.catch_warnings(), og.policy(A=action):
        warnings.simplefilter("error", og.GuardWarning)
        if stops:
            with pytest.raises(og.GuardError):
                torch.export.export(Model(), (torch.ones(2),), strict=False)
        else:
            torch.export.export(Model(), (torch.ones(2),), strict=False)
    assert og.record.total == stops
