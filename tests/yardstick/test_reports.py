"""The yardstick: 80 public reports. Each is said by a contract here, or listed in the docs with the reason."""

from __future__ import annotations

import ast
import functools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import llm_op_guard as og
from llm_op_guard.contract.parse import parse_stubs

pytest.importorskip("torch")
pytest.importorskip("transformers")

HERE = Path(__file__).resolve().parent
from cases import GROUPS, LEGAL, UNSAID, Case  # noqa: E402
from observed import OBSERVED  # noqa: E402

PAGE = HERE.parents[1] / "docs" / "what-contracts-cannot-say.md"
REPORTS = {report["id"]: report for report in map(json.loads, (HERE / "reports.jsonl").read_text("utf-8").splitlines())}
CASES = {case.report: case for cases in GROUPS.values() for case in cases}
CONTRACTS = {group: og.load(HERE / f"{group}.contract") for group in GROUPS}
GROUP_OF = {case.report: group for group, cases in GROUPS.items() for case in cases}


def contract_of(report: str) -> og.Contract:
    return CONTRACTS[GROUP_OF[report]][report.replace("-", "_")]


@functools.cache
def turned_round(group: str) -> dict[str, og.Contract]:
    """The contracts of a file, each named rule that a case is about with its condition denied."""

    class Deny(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
            wanted = CASES[node.name.replace("_", "-")].rule
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and any(
                    keyword.arg == "id" and ast.literal_eval(keyword.value) == wanted for keyword in call.keywords
                ):
                    call.args[0] = ast.UnaryOp(ast.Not(), call.args[0])
            return node

    tree = Deny().visit(ast.parse((HERE / f"{group}.contract").read_text("utf-8")))
    return parse_stubs(ast.unparse(ast.fix_missing_locations(tree)))


def judging(contract: og.Contract, case: Case) -> Any:
    """The operator with its contract: guarded, or where that asks a predicate, verified first."""
    if case.cost != "C":
        return og.guard(contract)(case.operator)

    def verified(*args: Any, **kwargs: Any) -> Any:
        og.verify(contract, *args, **kwargs)
        return case.operator(*args, **kwargs)

    return verified


def judged(case: Case, call: Any, contract: og.Contract | None = None) -> tuple[list[og.Violation], list[str], Any]:
    """What a guarded call is told: violations, warnings, and its result (None where it was rejected)."""
    og.record.clear()
    guarded = judging(contract or contract_of(case.report), case)
    result = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = call(guarded)
        except og.GuardError as error:
            assert list(error.violations) == [v for v in og.record.violations if v.certain]
    ours = [w for w in caught if issubclass(w.category, og.GuardWarning | og.GuardInternalWarning)]
    return og.record.violations, [type(w.message).__name__ for w in ours], result


@pytest.mark.parametrize("report", CASES)
def test_the_mistake_is_rejected_by_its_rule(report: str) -> None:
    case = CASES[report]
    violations, told, result = judged(case, case.broken)
    assert [(v.rule_id, v.cost_class, v.certain, v.blames) for v in violations] == [
        (case.rule, case.cost, case.certain, case.blames)
    ]
    assert told == ([] if case.certain else ["GuardWarning"])
    assert (result is None) == case.certain


@pytest.mark.parametrize("report", OBSERVED)
def test_the_value_and_its_place_are_shown(report: str) -> None:
    case = CASES[report]
    (violation,), _, _ = judged(case, case.broken)
    argument, observed = OBSERVED[report]
    assert violation.argument == argument
    assert violation.observed.startswith(observed)
    assert violation.observed in str(violation)


@pytest.mark.parametrize("report", CASES)
def test_a_near_call_is_accepted(report: str) -> None:
    case = CASES[report]
    violations, told, result = judged(case, case.near)
    assert (violations, told) == ([], [])
    assert result is not None


@pytest.mark.parametrize("report", CASES)
def test_the_mistake_is_real(report: str) -> None:
    case = CASES[report]
    near = case.near(case.operator)
    if isinstance(case.symptom, type):
        with pytest.raises(case.symptom):
            case.broken(case.operator)
    else:
        assert case.symptom(case.broken(case.operator))
        assert not case.symptom(near)


@pytest.mark.parametrize("report", [case.report for case in CASES.values() if case.rule.isidentifier()])
def test_the_near_call_is_judged_by_that_rule(report: str) -> None:
    """It is accepted because the rule holds, not because the rule does not apply."""
    case = CASES[report]
    violations, _, _ = judged(case, case.near, turned_round(GROUP_OF[report])[report.replace("-", "_")])
    assert case.rule in [violation.rule_id for violation in violations]


@pytest.mark.parametrize(("report", "call"), LEGAL, ids=[report for report, _ in LEGAL])
def test_what_is_legal_is_accepted(report: str, call: Any) -> None:
    violations, told, result = judged(CASES[report], call)
    assert (violations, told) == ([], [])
    assert result is not None


def test_every_report_is_said_or_listed() -> None:
    listed = [unsaid.report for unsaid in UNSAID]
    assert len(REPORTS) == 80
    assert sorted([*CASES, *listed]) == sorted(REPORTS)
    assert sum(map(len, GROUPS.values())) == len(CASES)


def test_what_is_shown_is_held_for_every_report_of_class_b() -> None:
    assert list(OBSERVED) == [case.report for case in CASES.values() if case.cost == "B"]


def test_every_contract_has_its_case() -> None:
    names = {f"{group}: {name}" for group, contracts in CONTRACTS.items() for name in contracts}
    assert names == {f"{group}: {report.replace('-', '_')}" for report, group in GROUP_OF.items()}


def test_the_page_lists_what_is_left() -> None:
    rows = [
        f"| [{u.report}]({REPORTS[u.report]['url']}) | {REPORTS[u.report]['operator']} | {u.why} | {u.needed} |"
        for u in UNSAID
    ]
    page = PAGE.read_text("utf-8")
    assert [line for line in page.splitlines() if line.startswith("| [")] == rows
    assert f"{len(CASES)} of {len(REPORTS)}" in page
