"""What injection found, for people and for programs: a table, JSON, and JUnit's XML for what shows test results."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any

from llm_op_guard.faults.injection import INTENDED, MISSED, OTHER, Injected, summary
from llm_op_guard.report.overview import render_table

_KINDS = ("clear error", "obscure error", "silent", "harmless", "died", "hung", "not run")


def document(
    results: Sequence[Injected], left_out: Sequence[tuple[str, str]], *, seed: int, valid: int
) -> dict[str, Any]:
    """Everything that was found as JSON-ready data; from `seed` and the number of `valid` calls all of it is made."""
    return {
        "summary": summary(list(results)),
        "seed": seed,
        "valid": valid,
        "contracts": [result.to_dict() for result in results],
        "left_out": [{"contract": name, "reason": reason} for name, reason in left_out],
        "cases": [case.to_dict() for result in results for case in result.cases],
    }


def row(result: Injected) -> tuple[str, ...]:
    """One line of the table."""
    found = {kind: sum(case.unguarded.kind == kind for case in result.cases) for kind in _KINDS}
    return (
        result.contract,
        f"{result.rules - len(result.unbroken)}/{result.rules}",
        f"{result.count(INTENDED)}+{result.count(OTHER)}/{len(result.cases)}",
        str(len(result.false_alarms)) + f"/{result.valid_calls}",
        f"{len(result.capsules) - len(result.lost_capsules)}/{len(result.capsules)}",
        ", ".join(f"{count} {kind}" for kind, count in found.items() if count),
    )


HEADER = ("contract", "rules broken", "caught", "false alarms", "capsules replayed", "the mutants without a guard")


def table(results: Sequence[Injected]) -> str:
    """A line for each contract; `caught` is by the intended rule + by another, of all."""
    return render_table([HEADER, *map(row, results)])


def findings(results: Sequence[Injected]) -> list[str]:
    """What to look at: misses, false alarms, lost capsules, rules that nothing broke, rules that may be too strict."""
    lines: list[str] = []
    for result in results:
        name = result.contract
        if not result.valid_calls:
            lines.append(f"{name}: no valid call was found, so nothing was tried; does its contract allow one?")
        lines += [
            f"MISSED {name}: {c.rule} ({c.kind}, case {c.id}): {c.call}" for c in result.cases if c.guarded == MISSED
        ]
        lines += [f"FALSE ALARM {name}: {alarm.message}: {alarm.call}" for alarm in result.false_alarms]
        lines += [f"CAPSULE LOST {name}: {lost.rule}: {lost.reason}" for lost in result.lost_capsules]
        if elsewhere := [capsule.rule for capsule in result.capsules if capsule.elsewhere]:
            lines.append(f"{name}: replayed, the capsule tells of another element: {', '.join(elsewhere)}")
        if result.unbroken:
            lines.append(f"{name}: no call was found that breaks {', '.join(result.unbroken)}")
        lines += [f"{name}: no call can break {rule}: {reason}" for rule, reason in result.unbreakable.items()]
        if result.lenient:
            lines.append(f"{name}: possibly too strict, without a guard nothing changes: {', '.join(result.lenient)}")
        for error, count in list(result.refused.items())[:3]:
            lines.append(f"{name}: {count} of {result.valid_calls} valid calls fail without a guard: {error}")
    return lines


def junit(results: Sequence[Injected]) -> str:
    """JUnit's XML: a suite for each contract, a test for each mutant and for the valid calls together."""
    root = ET.Element("testsuites", name="llm-op-guard inject")
    for result in results:
        failures = result.count(MISSED) + len(result.false_alarms) + len(result.lost_capsules)
        count = str(len(result.cases) + 2)
        suite = ET.SubElement(root, "testsuite", name=result.contract, tests=count, failures=str(failures))
        valid = ET.SubElement(suite, "testcase", classname=result.contract, name=f"{result.valid_calls} valid calls")
        for alarm in result.false_alarms:
            ET.SubElement(valid, "failure", message=alarm.message).text = alarm.call
        replayed = ET.SubElement(suite, "testcase", classname=result.contract, name=f"{len(result.capsules)} capsules")
        for lost in result.lost_capsules:
            ET.SubElement(replayed, "failure", message=f"the capsule does not replay: {lost.reason}").text = lost.rule
        for case in result.cases:
            test = ET.SubElement(
                suite, "testcase", classname=result.contract, name=f"{case.rule}: {case.kind} [{case.id}]"
            )
            if case.guarded == MISSED:
                ET.SubElement(test, "failure", message="the guard let it pass").text = case.call
            ET.SubElement(test, "system-out").text = f"unguarded: {case.unguarded.kind} {case.unguarded.text}"
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
