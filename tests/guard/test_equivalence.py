"""The compiled check and `explain` give one verdict, whatever the contract and whatever the call."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from contracts_and_calls import PARAMETERS, calls, contract_bodies, remember
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import llm_op_guard
from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.errors import ContractError
from llm_op_guard.guard.asked import Answers
from llm_op_guard.guard.bind import Bindings
from llm_op_guard.guard.explain import explain
from llm_op_guard.guard.guard import Guard
from llm_op_guard.guard.violation import Violation
from llm_op_guard.policy import Policy

EXAMPLES = settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Listener:
    """A reporter that only listens."""

    def __init__(self) -> None:
        self.told: list[Violation] = []

    def report(
        self, guard: Guard, violations: list[Violation], arguments: Mapping[str, Any], before: object = None
    ) -> None:
        self.told = violations

    def error(self, guard: Guard, violations: list[Violation], arguments: Mapping[str, Any]) -> Any:
        raise AssertionError("nothing is traced here")

    def repeated(self, guard: Guard, rule_ids: list[str]) -> bool:
        return False


def loaded(body: list[list[str]]) -> Contract:
    """The contract, or a discarded example where it is refused."""
    text = "\n".join(line for lines in body for line in lines)
    try:
        contract = parse_body(text, "operator", PARAMETERS)
        guard_of(contract, Listener()).checks(("A", "B"))
    except ContractError:
        assume(False)
    return contract


def guard_of(contract: Contract, listener: Listener) -> Guard:
    return Guard(
        contract, operator="operator", site="here", defaults=Policy.of(A="raise", B="raise"), reporter=listener
    )


def verdicts(
    contract: Contract, arguments: dict[str, Any], classes: tuple[str, ...]
) -> tuple[list[Violation], list[Violation] | None, str]:
    """What the compiled checks report before the call and, when that is content, after it; and their source."""
    listener = Listener()
    guard = guard_of(contract, listener)
    guard.fail_inside = _raise  # type: ignore[method-assign] # a disagreement must not pass as a warning
    check, check_result, _ = guard.checks(classes)
    remember(arguments)
    state = check(*(arguments[name] for name in guard.parameters))
    before, after = listener.told, None
    if check_result is not None and not any(violation.certain for violation in before):
        listener.told = []
        check_result(arguments["result"], state)
        after = listener.told
    return before, after, guard.source(classes)


def _raise(error: Exception) -> None:
    raise error


def known(contract: Contract, arguments: dict[str, Any], classes: tuple[str, ...]) -> dict[str, Any]:
    """What symbols and assigned names are before the call."""
    remember(arguments)
    clauses = [c for c in contract.clauses if not c.after_call and c.cost_class in {"A", *classes}]
    given = {name: value for name, value in arguments.items() if name != "result"}
    bindings = Bindings(contract, clauses, given, {}, after_call=False)
    bindings.collect()
    return {**bindings.values.symbols, **bindings.values.assigned}


def said(violations: list[Violation]) -> set[tuple[str, str, str, bool]]:
    return {(v.rule_id, v.observed, v.expected, v.certain) for v in violations}


def explained(contract: Contract, arguments: dict[str, Any], classes: tuple[str, ...], **after: Any) -> list[Violation]:
    given = arguments if after else {name: value for name, value in arguments.items() if name != "result"}
    remember(arguments)
    return explain(contract, given, classes=classes, **after)


@EXAMPLES
@given(contract_bodies(), st.lists(calls(), min_size=1, max_size=6), st.booleans())
def test_compiled_check_agrees_with_explain(
    body: list[list[str]], some_calls: list[dict[str, Any]], autocast: bool
) -> None:
    contract = loaded(body)
    with torch.autocast("cpu", enabled=autocast):
        assert_agreement(contract, some_calls)


def assert_agreement(contract: Contract, some_calls: list[dict[str, Any]]) -> None:
    for arguments in some_calls:
        for classes in (("A",), ("A", "B")):
            before, after, source = verdicts(contract, arguments, classes)
            expected = explained(contract, arguments, classes)
            assert bool(before) == bool(expected), (contract.text, arguments, expected, source)
            assert before == expected
            if after is not None:
                expected = explained(
                    contract, arguments, classes, after_call=True, known=known(contract, arguments, classes)
                )
                assert bool(after) == bool(expected), (contract.text, arguments, expected, source)


@EXAMPLES
@given(contract_bodies(), st.lists(calls(), min_size=1, max_size=4), st.randoms(use_true_random=False), st.booleans())
def test_order_of_statements_never_changes_a_verdict(
    body: list[list[str]], some_calls: list[dict[str, Any]], rng: random.Random, autocast: bool
) -> None:
    contract = loaded(body)
    shuffled_body = list(body)
    rng.shuffle(shuffled_body)
    text = "\n".join(line for lines in shuffled_body for line in lines)
    shuffled = parse_body(text, "operator", PARAMETERS)
    with torch.autocast("cpu", enabled=autocast):
        for arguments in some_calls:
            one, other = (explained(c, arguments, ("A", "B")) for c in (contract, shuffled))
            assert said(one) == said(other), (contract.text, shuffled.text, arguments)
            before, _, _ = verdicts(shuffled, arguments, ("A", "B"))
            assert bool(before) == bool(one)


LIKES = [
    "x: like(y)\ny: like(x)",
    "n: None | int | any[...]\nx: like(n)",
    "y: like(x)\nif x.shape[0] == 2:\n    x: like(y) = why(certain=False)",  # a suspicion after a test of the same
]


@pytest.mark.parametrize("body", LIKES)
def test_like_what_keeps_no_aspects(body: str) -> None:
    contract = parse_body(body, "operator", PARAMETERS)
    given = dict.fromkeys(PARAMETERS)
    ones, twos = torch.ones(2), torch.ones(2, 2)
    values = ((ones, ones, 1), (ones, twos, 1), (ones, None, None))
    calls_of = [{**given, "x": x, "y": y, "n": n, "result": None} for x, y, n in values]
    assert_agreement(contract, calls_of)


ASKED: list[Any] = []


@llm_op_guard.predicate
def asked(*arguments: Any) -> bool:
    ASKED.append(arguments)
    return bool(len(ASKED) % 2)


STATEMENTS_OF_CLASS_C = [
    ["require(asked(x), id='asked')"],
    ["require(asked(x.shape, D) or n > 1, certain=False)"],
    ["v = asked(n)", "require(v == D)"],
    ["if n:", "    v = asked(n)", "else:", "    v = 1", "require(v < L)", "y: any[v, ...]"],
    ["if asked(y):", "    z: any[B, L]", "    require(B > 1, id='within')", "else:", "    box.k: int"],
    ["x: any[asked(y), D]"],
]


# Each with a statement of class C, and so fewer: the agreement is looked for above.
@settings(EXAMPLES, max_examples=100)
@given(
    contract_bodies(),
    st.lists(st.sampled_from(STATEMENTS_OF_CLASS_C), min_size=1, max_size=2, unique_by=str),
    st.randoms(use_true_random=False),
    st.lists(calls(), min_size=1, max_size=4),
)
def test_a_call_asks_no_predicate(
    body: list[list[str]], of_class_c: list[list[str]], rng: random.Random, some_calls: list[dict[str, Any]]
) -> None:
    body = [*body, *of_class_c]
    rng.shuffle(body)
    contract = loaded([[f"from {__name__} import asked"], *body])
    ASKED.clear()
    assert_agreement(contract, some_calls)
    assert ASKED == []
    for arguments in some_calls:
        explain(contract, arguments, classes=("A", "B", "C"), answers=Answers(contract.imports))


def test_the_comparison_can_fail() -> None:
    contract = parse_body("require(n == 1)", "operator", PARAMETERS)
    listener = Listener()
    guard = guard_of(contract, listener)
    check = guard.checks(("A",)).before
    check(2)
    assert [violation.rule_id for violation in listener.told] == ["n == 1"]
    listener.told = []
    check(1)
    assert listener.told == []
