"""The files that `record_to` writes, read again and added up by site and rule."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_op_guard.guard.violation import LastSeen
from llm_op_guard.report.log_page import log_page
from llm_op_guard.report.terminal import Terminal

_LONGEST_LINE = 1 << 20
_MOST_SHOWN = 300
_ANY_SITE = "(any site)"


@dataclass
class Row:
    """All that was written about one rule at one site."""

    site: str
    rule: str
    count: int = 0
    waived: int = 0
    false_alarms: int = 0
    first: str = ""
    last: str = ""
    call_sites: Counter[str] = field(default_factory=Counter)
    example: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON-ready data."""
        return {
            "site": self.site,
            "rule": self.rule,
            "count": self.count,
            "waived": self.waived,
            "false_alarms": self.false_alarms,
            "first": self.first or None,
            "last": self.last or None,
            "call_sites": dict(self.call_sites.most_common()),
            "example": self.example,
            "notes": self.notes,
        }


@dataclass
class Digest:
    """What some files say, and how many of their lines could not be understood."""

    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)

    def in_order(self) -> list[Row]:
        """The rows, most frequent first."""
        return sorted(self.rows.values(), key=lambda row: (-row.count, row.site, row.rule))

    def read(self, path: Path) -> None:
        """Add one file; raises OSError."""
        with path.open("rb") as file:
            for line in _lines(file):
                if line is not None and not line.strip():
                    continue
                try:
                    self._take(json.loads(line or b""))
                # RecursionError: a line of a thousand brackets
                except (ValueError, TypeError, KeyError, RecursionError):
                    self.skipped[str(path)] += 1

    def to_dict(self) -> dict[str, Any]:
        """The whole as JSON-ready data."""
        return {"rules": [row.to_dict() for row in self.in_order()], "skipped_lines": dict(self.skipped)}

    def _take(self, entry: Any) -> None:
        """Add one entry; raises where it is none of ours, before anything is added."""
        rule, site = _text(entry["rule"]), _text(entry["site"])
        if entry["kind"] == "false_alarm":
            note = _text(entry["note"])
            row = self._row(site, rule)
            row.false_alarms += 1
            if note:
                row.notes.append(note)
            return
        if entry["kind"] != "violation":
            raise ValueError(entry["kind"])
        count, first, last = entry["count"], _text(entry["first"]), _text(entry["last"])
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(count)
        call_site = _text(entry["call_site"])
        diagnosis = entry.get("diagnosis")
        row = self._row(site, rule)
        row.count += count
        row.waived += count if entry.get("waived") is not None else 0
        row.first = min(filter(None, (row.first, first)), default="")
        row.last = max(row.last, last)
        row.call_sites[call_site] += count
        if isinstance(diagnosis, dict) and row.example is None:
            row.example = {**diagnosis, "call_site_text": call_site}

    def _row(self, site: str, rule: str) -> Row:
        return self.rows.setdefault((site, rule), Row(site, rule))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _lines(file: Any) -> Iterator[bytes | None]:
    """The lines of a file; None for one that is longer than any of ours."""
    while line := file.readline(_LONGEST_LINE):
        if len(line) < _LONGEST_LINE or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_LONGEST_LINE)
        yield None


def main(
    out: Terminal, complaints: Terminal, files: Iterable[str], *, as_json: bool, html_file: str | None = None
) -> tuple[bool, bool]:
    """Print what these files say, and write it as a page where one is wanted.

    (Whether they say anything, whether a file could not be read or the page not be written.)
    """
    digest, unreadable = Digest(), []
    seen: set[Path] = set()
    for name in files:
        path = Path(name)
        if path.resolve() in seen:  # named twice: counted once
            continue
        seen.add(path.resolve())
        try:
            digest.read(path)
        except OSError as error:
            unreadable.append(f"cannot read {name}: {error.strerror}")
            complaints.error(unreadable[-1])
    for name, count in digest.skipped.items():
        complaints.warning(f"{name}: {count} line{'' if count == 1 else 's'} could not be understood, and not counted")
    if as_json:
        out.line(json.dumps(digest.to_dict(), indent=2))
    elif digest.rows:
        out.line(render(digest, out))
    if not digest.rows and not unreadable:
        complaints.error("there are no records in these files; og.record_to and LLM_OP_GUARD_RECORD write them")
    is_written = html_file is None or _write_page(complaints, html_file, log_page(digest.to_dict(), unreadable))
    return bool(digest.rows), bool(unreadable) or not is_written


def _write_page(complaints: Terminal, file: str, page: str) -> bool:
    try:
        Path(file).write_text(page, encoding="utf-8")
    except OSError as error:
        complaints.error(f"cannot write {file}: {error.strerror or error}")
        return False
    return True


_TITLES = ("count", "waived", "false alarms", "first", "last", "site and rule")
_NUMBERS = 3


def render(digest: Digest, terminal: Terminal) -> str:
    """A table by site and rule; below each row an example of what was wrong and where."""
    rows = digest.in_order()
    cells = [
        (
            str(row.count),
            str(row.waived),
            str(row.false_alarms),
            _moment(row.first),
            _moment(row.last),
            f"{_printable(row.site) or _ANY_SITE}  {_printable(row.rule)}",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in (_TITLES, *cells)) for column in range(len(_TITLES))]
    lines = [terminal.paint(_aligned(_TITLES, widths), "bold")]
    for row, line in zip(rows, cells, strict=True):
        lines.append(_aligned(line, widths))
        lines += [f"    {text}" for text in _below(row)]
    total, rules = sum(row.count for row in rows), len(rows)
    lines.append(f"{total} violation{'' if total == 1 else 's'} of {rules} rule{'' if rules == 1 else 's'}")
    return "\n".join(lines)


def _aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    aligned = [
        cell.rjust(width) if number < _NUMBERS else cell.ljust(width)
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(aligned).rstrip()


def _below(row: Row) -> Iterator[str]:
    if row.example is not None:
        yield _printable(str(row.example.get("summary", "")))
        for title, key in (("because", "because"), ("likely cause:", "hint")):
            if isinstance(text := row.example.get(key), str):
                yield f"{title} {_printable(text)}"
        if (seen := LastSeen.of(row.example.get("last_seen"))) is not None:
            yield _printable(f"{row.example.get('argument')}: {seen}")
    places = [place for place, _ in row.call_sites.most_common() if place]
    if places:
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        yield f"called from {_printable(places[0])}{more}"
    for note in row.notes[-3:]:
        yield f"reported as a false alarm: {_printable(note)}"


def _moment(text: str) -> str:
    return _printable(text.replace("T", " ")[:16])


def _printable(text: str) -> str:
    """On one line and without control characters, whoever wrote the file."""
    shown = "".join(character if character.isprintable() else " " for character in text)
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"
