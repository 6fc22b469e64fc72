"""Plans: which steps a check has, in which order, what it hands on, and that each contract object has its own."""

from __future__ import annotations

import pytest

import llm_op_guard as og
from llm_op_guard.contract.model import CostClass
from llm_op_guard.contract.parse import parse_body, parse_stubs
from llm_op_guard.guard.plan import Plan, check_order, plan_check
from llm_op_guard.guard.steps import Agree, Decide, Demand, Let, Match, Read, Solve

PARAMETERS = ("x", "y", "n", "box")


def planned(text: str, *, classes: tuple[CostClass, ...] = ("A", "B"), after_call: bool = False) -> Plan:
    plan = plan_check(parse_body(text, "operator", PARAMETERS), classes, after_call=after_call)
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("require(x)", [Demand]),
        ("x: any[B]", [Match]),
        ("x: int", [Match]),
        ("box.w: any[B]", [Read, Match]),
        ("require(m > 1)\nm = D + 1\nx: any[D]", [Match, Let, Demand]),
        ("if n == 1:\n    x: any\nelse:\n    y: any", [Decide, Match, Match]),
        ("if n == 1:\n    require(x)\n    require(y)", [Decide, Demand, Demand]),
        ("x: any[2 * D]", [Match, Solve, Agree]),
        ("x: any[2 * D]\ny: any[D]", [Match, Match, Agree]),  # y shows D: there is nothing to solve
        ("x: any[2 * D]\ny: None | any[D]", [Match, Match, Solve, Agree]),  # it may not be there
        ("x: any[D // 2]\ny: any[D]", [Match, Match, Agree]),
        ("x: y.dtype\ny: T", [Match, Match, Agree]),
        ("x: (any[D], any[D])", [Match, Read, Read, Match, Match]),
    ],
)
def test_the_kinds_of_steps_in_order(text: str, expected: list[type]) -> None:
    assert [type(step) for step in planned(text).steps] == expected


def test_the_cheap_comes_first_then_the_certain() -> None:
    plan = planned("require(highest(x) > 1)\nrequire(n > 1, certain=False)\nrequire(n > 0)")
    ids = [step.statement.id for step in plan.steps if isinstance(step, Demand)]
    assert ids == ["n > 0", "n > 1", "highest(x) > 1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("require(n > 0)", ("n",)),
        ("require(B > 0)\ny: any[B]", ("y",)),
        ("if n == 1:\n    x: any", ("x", "n")),
        ("x: any[n]", ("x", "n")),
        ("x: any[B / n]", ("x", "n")),
        ("x: any[n | 1]", ("x", "n")),
        ("x: like(y)", ("x", "y")),
        ("x: y.dtype", ("x", "y")),
        ("x: any[*y.shape]", ("x", "y")),
        ("x: any @ y.device", ("x", "y")),
        ("x: (int, like(box.w))", ("x", "box")),
        ("m = n\nrequire(m == 1)", ("n",)),
        ("ensure(result == x)", ("x",)),
    ],
)
def test_a_check_takes_what_its_steps_read(text: str, expected: tuple[str, ...]) -> None:
    assert planned(text).parameters == expected


@pytest.mark.parametrize(
    ("text", "known", "snapshots"),
    [
        ("x: any[B]", (), []),
        ("x: any[B]\nreturns: any[B]", ("B",), []),
        ("x: any[B, L]\nensure(result == L)", ("L",), []),
        ("x: any[B]\ny: any[L]\nreturns: any[K]", (), []),
        ("m = n\nensure(result == m)", ("m",), []),
        ("m = n\nk = len(result)\nensure(k == m)", ("m",), []),
        ("returns: like(x)", (), ["x"]),
        ("returns: (any @ box.w.device, any[*y.shape])", (), ["box.w", "y"]),
    ],
)
def test_what_is_handed_on(text: str, known: tuple[str, ...], snapshots: list[str]) -> None:
    for after_call in (False, "result" in text or "returns" in text):
        plan = planned(text, after_call=after_call)
        assert (plan.known, [str(path) for path in plan.snapshots]) == (known, snapshots)


def test_nothing_is_handed_on_that_a_check_without_value_rules_never_knows() -> None:
    text = "x: any[D, highest(y)]\nreturns: any[D]"
    assert planned(text).known == ("D",)
    assert planned(text, classes=("A",)).known == planned(text, classes=("A",), after_call=True).known == ()


def test_each_contract_object_has_its_own_plan_made_once() -> None:
    text = "LIMIT = {}\ndef f(x):\n    require(len(x.shape) == LIMIT)\n    ensure(result == LIMIT)\n"
    one, other = (parse_stubs(text.format(limit))["f"] for limit in (1, 2))
    assert one == other  # constants are no part of what contracts are compared by
    for contract in (one, other):
        for after_call in (False, True):
            plan = plan_check(contract, ("A",), after_call=after_call)
            assert plan is not None and plan.contract is contract
            assert plan_check(contract, ["A"], after_call=after_call) is plan


def test_different_checks_of_one_contract_have_different_plans() -> None:
    contract = parse_body("x: any[B]\nrequire(finite(x))\nreturns: any[B]", "operator", PARAMETERS)
    wanted: list[tuple[CostClass, ...]] = [("A",), ("A", "B")]
    plans = [plan_check(contract, classes, after_call=late) for classes in wanted for late in (False, True)]
    found = [(len(plan.steps), plan.after_call) for plan in plans if plan is not None]
    assert found == [(1, False), (1, True), (2, False), (1, True)]


def test_a_circle_is_refused_every_time() -> None:
    contract = parse_body("a = b\nb = a\nrequire(a == 1)", "operator", PARAMETERS)
    for _ in range(2):
        with pytest.raises(og.ContractError, match="cannot be put in order: a, b is needed") as caught:
            plan_check(contract, ("A",))
        assert (caught.value.line, caught.value.column) == (1, 1)


def test_no_plan_has_what_asks_a_predicate() -> None:
    contract = parse_body("from shop import fits\nx: any[N]\nn = fits(x)\nrequire(n > N)\nrequire(N > 1)", "f", ("x",))
    plan = plan_check(contract, ("A", "B", "C"))
    assert plan is not None
    assert {step.clause.cost_class for step in plan.steps} == {"A"}
    assert plan_check(parse_body("from shop import fits\nrequire(fits(x))", "f", ("x",)), ("A", "B", "C")) is None


def test_what_metadata_alone_cannot_be_put_in_order_is_refused_whatever_is_switched_on() -> None:
    """The policy of a later day would find it out, in a call."""
    body = "y: T[highest(y) + 1]\nz: (T | bool)[B, *lead]\nif box.w.shape[0] == B:\n    x: any[B, D] | object"
    contract = parse_body(body, "operator", ("x", "y", "z", "box"))
    assert plan_check(contract, ("A", "B")) is not None
    with pytest.raises(og.ContractError, match="cannot be put in order: B is needed"):
        check_order(contract)
