"""What injection found as a page: operators by kinds of faults, each call with and without its guard."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llm_op_guard.faults.injection import INTENDED, MISSED, OTHER
from llm_op_guard.report.page import (
    Cell,
    Node,
    Row,
    badge,
    beside,
    counted,
    element,
    figures,
    folded,
    listed,
    matrix,
    page,
    section,
    side,
)

# The columns, by how the kinds of mutants begin; a kind belongs to the longest beginning that it has.
GROUPS: dict[str, tuple[str, ...]] = {
    "sizes": (
        *(
            f"{change} {where}"
            for change in ("one more", "one fewer", "half", "twice")
            for where in ("in", "everywhere")
        ),
        *("size 1 in", "empty in", "another size in", "another size everywhere", "the shape of another"),
    ),
    "axes": ("rank ", "axes ", "no dimensions", "the last dimensions"),
    "dtypes": ("neighbouring dtype", "another dtype"),
    "devices": ("meta device",),
    "strides": ("transposed strides", "expanded strides", "gaps ", "off its alignment"),
    "values": ("element ", "all ", "0 and 1", "1 and 0", "ascending", "descending", "repeated", "noise", "a row of"),
    "numbers": (
        *("one more", "one fewer", "twice"),
        *("another number", "a negative number", "a stale number", "other truth"),
    ),
    "texts": ("other text",),
    "kinds": ("missing", "other kind", "a tensor", "an array", "another object", "an object of another call"),
    "names": ("missing name", "misspelt name", "swapped arguments"),
    "items": ("one item fewer", "one item more", "other items"),
    "batch": ("empty batch", "doubled batch"),
    "several": ("several changes",),
    "results": ("result: ",),
}
OTHER_KINDS = "other"
_ALARMS, _OPEN = "false alarms", "not checked"

# Worst first. What the guard made of a call: its look. What came of it without: what a case says, and a cell.
_GUARDED = {MISSED: "missed", OTHER: "other", INTENDED: "caught"}
_UNGUARDED = {
    "died": ("the process died", "died"),
    "hung": ("it hung", "hung"),
    "silent": ("no error, another result", "silent"),
    "obscure error": ("obscure error", "obscure"),
    "clear error": ("clear error", "clear"),
    "harmless": ("harmless: the same result", "harmless"),
    "not run": ("not run", "not run"),
}
_NOT_RUN = "not run"
_LONG_CALL = 80
_GRAVE = ("died", "hung", "silent")
_A_FINDING = f"{MISSED}, {OTHER}, a false alarm, or a capsule that does not replay"
_FINDINGS = ("missed", "other", "alarm")
_LEGEND = {
    "missed": "missed: the guard let a broken call pass; as a false alarm: it stopped a valid one",
    "other": "caught, but by another rule than the one that was to be broken",
    "caught grave": "caught; without a guard: no error and another result, a dead process or a hang",
    "caught error": "caught; without a guard: an error, clear or obscure",
    "caught harmless": "caught; without a guard: the same result",
    "caught unrun": "caught; not run without a guard",
    "caught valid": "no false alarm",
    "unchecked": "not checked, or to look at: open it",
    "none": "no mutant of this kind breaks a rule here",
}
_OPEN_POINTS = {
    "rules_without_mutant": "Rules that no call was found to break",
    "rules_that_no_call_can_break": "Rules that no call can break, and why",
    "capsules_that_do_not_replay": "Capsules that do not replay to the same rule",
    "capsules_telling_of_another_element": "Capsules that tell of another element when they are replayed",
    "possibly_too_strict": "Possibly too strict: without a guard nothing changed",
    "valid_calls_that_fail_unguarded": "Valid calls that the operator itself does not take, by error",
}


def injection_page(document: Mapping[str, Any]) -> str:
    """The page; `document` is what `llm-op-guard inject --json` writes."""
    summary, contracts = document["summary"], document["contracts"]
    cases: dict[str, list[Mapping[str, Any]]] = {contract["contract"]: [] for contract in contracts}
    again = f"--seed {document['seed']} --valid {document['valid']} --case"
    for case in document["cases"]:
        command = f"llm-op-guard inject {case['contract']} {again} {case['id']}"
        cases[case["contract"]].append({**case, "command": command})
    rows = [_row(contract, cases[contract["contract"]]) for contract in contracts]
    left_out = [(entry["contract"], entry["reason"]) for entry in document["left_out"]]
    rows += [Row(name, {}, reason=f"left out: {reason}") for name, reason in left_out if name not in cases]
    used = {group_of(case["kind"]) for case in document["cases"]}
    columns = [_ALARMS, *GROUPS, *({OTHER_KINDS} & used), _OPEN]
    return page(
        f"Injection: {counted(len(contracts), 'contract')}, seed {document['seed']}",
        beside(_checked(summary, document["cases"]), _unchecked(contracts, left_out)),
        matrix("contract", columns, rows, _A_FINDING, _LEGEND),
    )


def group_of(kind: str) -> str:
    """The column of a kind of mutant."""
    known = [(len(start), group) for group, starts in GROUPS.items() for start in starts if kind.startswith(start)]
    return max(known)[1] if known else OTHER_KINDS


def _row(contract: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> Row:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for case in cases:
        groups.setdefault(group_of(case["kind"]), []).append(case)
    cells = {group: _cell(found) for group, found in groups.items()}
    cells[_ALARMS] = _valid_calls(contract)
    if opens := _open_points(contract):
        count = sum(len(contract[key]) for key in _OPEN_POINTS) + (not contract["operator"])
        cells[_OPEN] = Cell("unchecked", str(count), opens=opens)
    is_finding = bool(contract["capsules_that_do_not_replay"]) or any(c.look in _FINDINGS for c in cells.values())
    return Row(contract["contract"], cells, is_finding)


def _cell(cases: Sequence[Mapping[str, Any]]) -> Cell:
    worst_first = sorted(cases, key=lambda case: (_rank(_GUARDED, case["guarded"]), _rank(_UNGUARDED, _bare(case))))
    look = _look(worst_first[0])
    outcomes = Counter(map(_bare, cases))
    gravest = min(outcomes, key=lambda kind: _rank(_UNGUARDED, kind))
    if look == "caught":
        look += f" {_depth(gravest)}"
    verdicts = Counter(case["guarded"] for case in worst_first)
    spoken = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    # What was not run is told beside the gravest of what was.
    told = dict.fromkeys((gravest, _NOT_RUN))
    notes = tuple(f"{outcomes[kind]} {_word(kind)}" for kind in told if outcomes[kind])
    return Cell(look, str(len(cases)), notes, f"mutants: {spoken}; without a guard:", tuple(map(_case, worst_first)))


def _depth(kind: str) -> str:
    if kind in _GRAVE:
        return "grave"
    return {"harmless": "harmless", _NOT_RUN: "unrun"}.get(kind, "error")


def _look(case: Mapping[str, Any]) -> str:
    return _GUARDED.get(case["guarded"], "missed")


def _bare(case: Mapping[str, Any]) -> str:
    return str(case["unguarded"]["kind"])


def _word(kind: str) -> str:
    return _UNGUARDED[kind][1] if kind in _UNGUARDED else kind


def _rank(order: Mapping[str, object], key: str) -> int:
    """Worst first; what is not known comes before all."""
    return list(order).index(key) if key in order else -1


def _case(case: Mapping[str, Any]) -> Node:
    kind = _bare(case)
    look, said = (kind, _UNGUARDED[kind][0]) if kind in _UNGUARDED else ("", kind)
    return element(
        "article",
        element("h3", "breaks ", element("code", case["rule"]), f" by: {case['kind']}"),
        element("pre", _call(case)),
        beside(
            side("without a guard", badge(look, said), element("p", case["unguarded"]["text"])),
            side("with its guard", badge(_look(case), case["guarded"]), element("p", case["message"])),
        ),
        element("p", "again: ", element("code", case["command"]), class_="faint"),
    )


def _call(case: Mapping[str, Any]) -> str:
    """The call; where it is long, with a line for each argument."""
    text, names = str(case["call"]), case["arguments"].get("arguments", {})
    if len(text) <= _LONG_CALL or not names:
        return text
    return re.sub(rf", (?=(?:{'|'.join(map(re.escape, names))})=)", ",\n", text)


def _valid_calls(contract: Mapping[str, Any]) -> Cell:
    alarms, calls = contract["false_alarms"], contract["valid_calls"]
    opens = tuple(
        element(
            "article",
            element("h3", "a valid call was stopped"),
            element("pre", alarm["call"]),
            element("p", alarm["message"]),
        )
        for alarm in alarms
    )
    look = "alarm" if alarms else "caught valid" if calls else "unchecked"
    return Cell(look, str(len(alarms)), (f"of {counted(calls, 'call')}",), opens=opens)


def _open_points(contract: Mapping[str, Any]) -> tuple[Node, ...]:
    parts = [
        element("article", element("h3", title), listed(_lines(contract[key])))
        for key, title in _OPEN_POINTS.items()
        if contract[key]
    ]
    if not contract["operator"]:
        parts.append(element("article", element("h3", "No operator is known: nothing was run without a guard")))
    return tuple(parts)


def _lines(found: Iterable[str | Mapping[str, str]] | Mapping[str, int]) -> list[str]:
    if isinstance(found, Mapping):
        return [f"{count} of: {text}" for text, count in found.items()]
    return [line if isinstance(line, str) else f"{line['rule']}: {line['reason']}" for line in found]


def _checked(summary: Mapping[str, int], cases: Sequence[Mapping[str, Any]]) -> Node:
    outcomes = Counter(map(_bare, cases))
    worst_first = sorted(outcomes, key=lambda kind: _rank(_UNGUARDED, kind))
    mutants, calls = summary["mutants"], counted(summary["valid_calls"], "valid call")
    wrong = ["mutants caught"] if summary["caught"] < mutants else []
    wrong += [_ALARMS] if summary["false_alarms"] else []
    wrong += ["capsules that replay"] if summary["capsules_replayed"] < summary["capsules"] else []
    numbers = {
        "mutants caught": f"{summary['caught']} of {mutants}",
        "by the intended rule": f"{summary['caught_by_intended_rule']} of {mutants}",
        _ALARMS: f"{summary['false_alarms']} of {calls}",
        "rules broken": f"{summary['rules_with_mutants']} of {summary['rules']}",
        "capsules that replay": f"{summary['capsules_replayed']} of {summary['capsules']}, the largest of "
        f"{summary['largest_capsule']} bytes",
        "the mutants without a guard": ", ".join(f"{outcomes[kind]} {_word(kind)}" for kind in worst_first) or "none",
    }
    return section("Checked", figures(numbers, wrong))


def _unchecked(contracts: Sequence[Mapping[str, Any]], left_out: Sequence[tuple[str, str]]) -> Node:
    parts = [folded("Contracts left out, or tried in part", [f"{name}: {reason}" for name, reason in left_out])]
    for key, title in _OPEN_POINTS.items():
        found = [f"{contract['contract']}: {line}" for contract in contracts for line in _lines(contract[key])]
        parts.append(folded(title, found))
    return section("Not checked, and what to look at", *parts)
