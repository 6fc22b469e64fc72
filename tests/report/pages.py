"""Data for pages, and what a parser of HTML finds in them."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

VOID = {"input", "meta"}

INTENDED, OTHER, MISSED = "caught by the intended rule", "caught by another rule", "missed"


def case(name: str, rule: str, kind: str, guarded: str, unguarded: str, text: str = "", **changes: Any) -> Any:
    return {
        "id": f"id-{kind}",
        "contract": name,
        "rule": rule,
        "kind": kind,
        "call": f"x=float32[2] made by {kind}",
        "arguments": {},
        "guarded": guarded,
        "unguarded": {"kind": unguarded, "text": text},
        "message": "" if guarded == MISSED else f"told of {kind}",
        **changes,
    }


def contract(name: str, **changes: Any) -> Any:
    return {
        "contract": name,
        "operator": f"m.{name}",
        "rules": 4,
        "mutants": 0,
        "caught": 0,
        "caught_by_intended_rule": 0,
        "valid_calls": 20,
        "false_alarms": [],
        "rules_without_mutant": [],
        "rules_that_no_call_can_break": [],
        "capsules": 4,
        "largest_capsule": 900,
        "capsules_that_do_not_replay": [],
        "capsules_telling_of_another_element": [],
        "possibly_too_strict": [],
        "valid_calls_that_fail_unguarded": {},
        "seconds": 1.0,
        **changes,
    }


def injected() -> dict[str, Any]:
    """One of everything: a clean contract, one with every finding, one without an operator, one that was left out."""
    good, bad = "lib/norm:good", "lib/norm:bad"
    cases = [
        case(good, "x.shape", "one more in axis 0", INTENDED, "clear error", "RuntimeError: x"),
        case(good, "x.shape", "twice in axis 1", INTENDED, "silent", "off by 0.3"),
        case(good, "x.dtype", "neighbouring dtype", INTENDED, "obscure error", "RuntimeError: y"),
        case(good, "x.type", "missing", INTENDED, "harmless"),
        case(good, "x.type", "missing name", INTENDED, "not run", "no operator is known for this contract"),
        case(bad, "x.shape", "rank + 1", INTENDED, "died", "the process ended with -11"),
        case(bad, "x.shape", "rank - 1", OTHER, "harmless"),
        case(bad, "n > 1", "another number", OTHER, "silent", "off by 1"),
        case(bad, "within(x, 0, 4)", "element 4", INTENDED, "silent", "off by 2"),
        case(bad, "within(x, 0, 4)", "element -1", MISSED, "hung", "no result after 20 s"),
        case(bad, "x.shape", "a kind of tomorrow", INTENDED, "silent", "off by 3"),
    ]
    return {
        "summary": {
            "contracts": 3,
            "rules": 12,
            "rules_with_mutants": 9,
            "mutants": 11,
            "caught": 10,
            "caught_by_intended_rule": 8,
            "missed": 1,
            "valid_calls": 60,
            "false_alarms": 1,
            "capsules": 12,
            "capsules_replayed": 11,
            "capsules_telling_of_another_element": 1,
            "largest_capsule": 900,
            "capsules_over_2_kb": 0,
        },
        "seed": 7,
        "valid": 20,
        "contracts": [
            contract(good),
            contract(
                bad,
                false_alarms=[{"call": "x=float32[0]", "message": "bad: x is empty"}],
                rules_without_mutant=["y.shape", "y.dtype"],
                capsules_that_do_not_replay=[{"rule": "result.shape", "reason": "it breaks nothing"}],
                capsules_telling_of_another_element=["finite(x)"],
                possibly_too_strict=["x.device"],
                valid_calls_that_fail_unguarded={"RuntimeError: float8": 3},
            ),
            contract("lib/norm:alone", operator="", valid_calls=0),
        ],
        "left_out": [
            {"contract": "lib/norm:alone", "reason": "its check alone is tried"},
            {"contract": "other/norm:absent", "reason": "other is not installed"},
        ],
        "cases": cases,
    }


def rule(site: str, name: str, **changes: Any) -> Any:
    return {
        "site": site,
        "rule": name,
        "count": 2,
        "waived": 0,
        "false_alarms": 0,
        "first": "2026-11-02T10:00:00+00:00",
        "last": "2026-11-02T11:00:00+00:00",
        "call_sites": {"a.py:3 in main": 2},
        "example": {
            "summary": f"f: broke {name}",
            "cost_class": "A",
            "certain": True,
            "argument": "x",
            "because": "of a reason",
            "hint": "a mistake?",
            "bindings": [{"symbol": "D", "value": "2", "sources": ["y.shape[0]"]}],
            "last_seen": {
                "operator": "norm",
                "site": "m.norm",
                "when": "leaving",
                "valid": True,
                "argument": None,
                "module_class": "Norm",
                "layer_idx": 3,
                "calls_ago": 2,
                "is_view": False,
                "changes": 0,
            },
            "tensors": [{"name": "x", "dtype": "int64", "shape": [1, 3], "device": "cpu"}],
            "contract_id": "f.contract:f",
            "contract_hash": "0123",
        },
        "notes": [],
        **changes,
    }


def logged() -> dict[str, Any]:
    return {
        "rules": [
            rule("m.f", "x.shape"),
            rule("m.f", "y.shape", count=5, waived=5),
            rule("m.f", "n > 1", example={"certain": False, "summary": "f: n is small"}),
            rule("m.g", "within(x, 0, 4)", example={"cost_class": "B"}),
            rule("m.g", "x.dtype", count=3, waived=3, first="2026-11-01T09:30:00+00:00"),
            rule("", "fits(x)", example={"cost_class": "C"}, false_alarms=1, notes=["it was right"]),
            rule("m.h", "x.device", count=0, false_alarms=2, first=None, last=None, call_sites={}, example=None),
        ],
        "skipped_lines": {"guards.jsonl": 2},
    }


class Parsed(HTMLParser):
    """The tags of a page with their attributes, and the texts of elements by id and of cells by row and column."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.by_id: dict[str, str] = {}
        self.opens: dict[tuple[str, str], str] = {}
        self.looks: dict[tuple[str, str], str] = {}
        self.rows: list[list[str]] = []
        self.text = ""
        self._open: list[tuple[str, dict[str, str | None], int]] = []
        self.feed(page)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        assert len(found) == len(attributes)
        self.tags.append((tag, tuple(attributes)))
        if tag not in VOID:
            self._open.append((tag, found, len(self.text)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("button", "span") and (look := found.get("class") or "").startswith("cell") and self._in("td"):
            key = (self.rows[-1][0], self.rows[0][len(self.rows[-1])])
            self.looks[key] = look.removeprefix("cell ")
            if "popovertarget" in found:
                self.opens[key] = str(found["popovertarget"])

    def handle_endtag(self, tag: str) -> None:
        opened, attributes, start = self._open.pop()
        assert opened == tag, (opened, tag)
        text = " ".join(self.text[start:].split())
        if tag in ("td", "th"):
            self.rows[-1].append(text)
        if name := attributes.get("id"):
            assert name not in self.by_id
            self.by_id[name] = text

    def handle_data(self, data: str) -> None:
        self.text += data

    def _in(self, tag: str) -> bool:
        return any(opened == tag for opened, _, _ in self._open)

    def opened_by(self, row: str, column: str) -> str:
        """The text of what a cell opens."""
        return self.by_id[self.opens[row, column]]

    def cells(self, row: str) -> dict[str, str]:
        """The texts of a row by their columns; only those with something in them."""
        line = next(line for line in self.rows[1:] if line[0] == row)
        return {title: text for title, text in zip(self.rows[0][1:], line[1:], strict=True) if text != "-"}
