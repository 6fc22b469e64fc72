"""What log files say as a page: sites by what was broken there, each rule with its diagnosis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llm_op_guard.guard.violation import LastSeen
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

# The columns: what a declaration says of a value, and rules that are written out, by what they read.
_ASPECTS = ("type", "dtype", "shape", "device")
_CONDITIONS = "conditions"
_CLASSES = {"B": "values", "C": "predicates"}
_WIDEST_NAME = 30

# Worst first.
_LEGEND = {
    "broken": "broken: a certain rule, not waived",
    "suspect": "suspect: legal, but usually a mistake; or somebody reported a false alarm",
    "waived": "waived: let pass each time, with a reason",
    "none": "nothing was recorded",
}


def log_page(digest: Mapping[str, Any], unreadable: Sequence[str] = ()) -> str:
    """The page; `digest` is what `llm-op-guard report --json` prints, `unreadable` the files that could not be read.

    An example may hold anything, since others may write to the files: only texts and sizes in their places are shown.
    """
    rules = digest["rules"]
    sites: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for rule in rules:
        sites.setdefault(rule["site"], {}).setdefault(_aspect(rule), []).append(rule)
    total, moments = sum(rule["count"] for rule in rules), [*_moments(rules)]
    numbers = {
        "violations": f"{total} of {counted(len(rules), 'rule')} at {counted(len(sites), 'site')}",
        "let pass by waivers": str(sum(rule["waived"] for rule in rules)),
        "reported as false alarms": str(sum(rule["false_alarms"] for rule in rules)),
        "first and last": f"{_minute(min(moments))}, {_minute(max(moments))}" if moments else "none",
    }
    skipped = [f"{file}: {counted(count, 'line')} not understood" for file, count in digest["skipped_lines"].items()]
    absent = section(
        "Not in this log",
        element("p", "Calls that kept their contracts, and what came of those that did not: neither is recorded."),
        folded("Lines and files that could not be read", [*skipped, *unreadable]),
    )
    rows = [_row(site or "(any site)", aspects) for site, aspects in sites.items()]
    return page(
        f"Log: {counted(total, 'violation')} of {counted(len(rules), 'rule')}",
        beside(section("Recorded", figures(numbers)), absent),
        matrix("site", [*_ASPECTS, _CONDITIONS, *_CLASSES.values()], rows, "broken or suspect", _LEGEND),
    )


def _moments(rules: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for rule in rules:
        yield from filter(None, (rule["first"], rule["last"]))


def _minute(moment: str) -> str:
    return moment.replace("T", " ")[:16]


def _aspect(rule: Mapping[str, Any]) -> str:
    cost_class = _text(rule["example"], "cost_class")
    aspect = rule["rule"].rpartition(".")[2]
    return _CLASSES.get(cost_class) or (aspect if aspect in _ASPECTS else _CONDITIONS)


def _row(site: str, aspects: Mapping[str, Sequence[Mapping[str, Any]]]) -> Row:
    cells = {aspect: _cell(rules) for aspect, rules in aspects.items()}
    return Row(site, cells, any(cell.look != "waived" for cell in cells.values()))


def _cell(rules: Sequence[Mapping[str, Any]]) -> Cell:
    look = min(map(_look, rules), key=list(_LEGEND).index)
    count = str(sum(rule["count"] for rule in rules))
    return Cell(look, count, (counted(len(rules), "rule"),), f"violations, {look}:", tuple(map(_rule, rules)))


def _look(rule: Mapping[str, Any]) -> str:
    if rule["count"] and rule["waived"] == rule["count"]:
        return "waived"
    is_suspicion = isinstance(rule["example"], Mapping) and rule["example"].get("certain") is False
    return "suspect" if is_suspicion or rule["false_alarms"] else "broken"


def _rule(rule: Mapping[str, Any]) -> Node:
    told = [f"{counted(rule['count'], 'time')}, {_minute(rule['first'] or '?')} to {_minute(rule['last'] or '?')}"]
    told += [f"{count} from {place}" for place, count in rule["call_sites"].items() if place]
    told += [f"{rule['waived']} let pass by a waiver"] if rule["waived"] else []
    told += [f"{rule['false_alarms']} reported as false alarms"] if rule["false_alarms"] else []
    told += [f"reported with: {note}" for note in rule["notes"]]
    diagnosis = "\n".join(_diagnosis(rule["example"])).strip()
    return element(
        "article",
        element("h3", "breaks ", element("code", rule["rule"])),
        beside(
            side("the calls", badge(_look(rule), _look(rule)), listed(told)),
            side("the diagnosis of one", element("pre", diagnosis or "not in these files")),
        ),
    )


def _diagnosis(example: Any) -> Iterator[str]:
    yield _text(example, "summary")
    for binding in _entries(example, "bindings"):
        if sources := [source for source in _entries(binding, "sources") if isinstance(source, str)]:
            yield f"  {_text(binding, 'symbol')} = {_text(binding, 'value')} from {', '.join(sources)}"
    for title, key in (("because", "because"), ("likely cause:", "hint")):
        if text := _text(example, key):
            yield f"  {title} {text}"
    seen = LastSeen.of(example.get("last_seen")) if isinstance(example, Mapping) else None
    if seen is not None:
        yield f"  {_text(example, 'argument')}: {seen}"
    yield ""
    tensors = _entries(example, "tensors")
    width = min(max((len(_text(tensor, "name")) for tensor in tensors), default=0), _WIDEST_NAME)
    for tensor in tensors:
        name, sizes = _text(tensor, "name"), [str(n) for n in _entries(tensor, "shape") if isinstance(n, int)]
        here = "   <- here" if name and name == _text(example, "argument") else ""
        yield f"  {name:<{width}}  {_text(tensor, 'dtype')}[{', '.join(sizes)}] {_text(tensor, 'device')}{here}"
    if contract := _text(example, "contract_id"):
        yield f"  contract {contract} {_text(example, 'contract_hash')}"


def _text(found: Any, key: str) -> str:
    value = found.get(key) if isinstance(found, Mapping) else None
    return value if isinstance(value, str) else ""


def _entries(found: Any, key: str) -> list[Any]:
    value = found.get(key) if isinstance(found, Mapping) else None
    return value if isinstance(value, list) else []
