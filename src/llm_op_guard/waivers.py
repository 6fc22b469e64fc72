"""Exceptions that somebody has answered for: one rule at one site, with a reason and perhaps a last day."""

from __future__ import annotations

import os
import re
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from llm_op_guard.contract.expressions import suggestion
from llm_op_guard.errors import PolicyError
from llm_op_guard.log import log

if TYPE_CHECKING:
    import datetime
    from pathlib import Path


FILE = "pyproject.toml"
TABLE = "tool.llm-op-guard"
_REQUIRED = ("rule", "site", "reason")
_KEYS = (*_REQUIRED, "until")
_HEADER = re.compile(r"^\s*\[\[\s*tool\s*\.\s*[\"']?llm-op-guard[\"']?\s*\.\s*[\"']?waivers[\"']?\s*\]\]", re.MULTILINE)


class Waiver:
    """A broken `rule` at `site` is recorded, marked as waived, and neither raised nor warned of.

    It holds through the day `until`, or until `withdraw()`; used in a `with` statement, to the end of the block.
    """

    def __init__(self, held: Waivers, rule: str, site: str, reason: str, until: datetime.date | None) -> None:
        self.rule = rule
        self.site = site
        self.reason = reason
        self.until = until
        self._held = held
        self._told_expired = False

    @property
    def expired(self) -> bool:
        """Whether its last day is over."""
        import datetime  # noqa: PLC0415 - few need it

        return self.until is not None and datetime.date.today() > self.until

    def withdraw(self) -> None:
        """Let the rule hold again; doing it again changes nothing."""
        self._held.remove(self)

    def first_told_expired(self) -> bool:
        """Whether nobody has been told yet that it has expired; true once."""
        told, self._told_expired = self._told_expired, True
        return not told

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.withdraw()

    def __repr__(self) -> str:
        until = f", until={self.until.isoformat()!r}" if self.until is not None else ""
        return f"<waiver of {self.rule!r} at {self.site!r}, reason={self.reason!r}{until}>"


class Waivers:
    """The waivers of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: tuple[Waiver, ...] = ()
        self._file_read = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._in_a_fork)

    def add(self, rule: object, site: object, reason: object, until: object = None) -> Waiver:
        """Waive one rule at one site; raises PolicyError."""
        made = self._made(rule, site, reason, until)
        with self._lock:
            self._all = (*self._all, made)
        return made

    def _made(self, rule: object, site: object, reason: object, until: object = None) -> Waiver:
        return Waiver(
            self,
            _text("rule", rule, "the id of one rule"),
            _one_site(_text("site", site, "where the guard is")),
            _text("reason", reason, "why this is right, for whoever reads it next"),
            _date(until),
        )

    def remove(self, waiver: Waiver) -> None:
        """Forget a waiver."""
        with self._lock:
            self._all = tuple(other for other in self._all if other is not waiver)

    def all(self) -> list[Waiver]:
        """Those that were not withdrawn, expired or not."""
        return list(self._all)

    def matching(self, site: str, rule: str) -> Waiver | None:
        """The waiver of a rule at a site; one that has expired only where no other holds."""
        found = [waiver for waiver in self._all if waiver.rule == rule and waiver.site == site]
        return next((waiver for waiver in found if not waiver.expired), found[0] if found else None)

    def read_file(self) -> None:
        """Add those of the nearest pyproject.toml, from the working directory upwards; once.

        Raises PolicyError for an entry that is wrong, at each attempt.
        """
        with self._lock:
            if self._file_read:
                return
            path = _nearest_file()
            made = []
            for place, entry in [] if path is None else _entries(path):
                try:
                    _check_keys(entry)
                    made.append(self._made(**entry))
                except PolicyError as error:
                    raise PolicyError(f"{path}: {place}: {error}") from None
            self._file_read = True
            self._all = (*self._all, *made)  # all of them are right, or none is taken

    def clear(self) -> None:
        """Forget all, and read the file again when it is next needed; for tests."""
        with self._lock:
            self._all = ()
            self._file_read = False

    def _in_a_fork(self) -> None:
        self._lock = threading.Lock()


def _text(name: str, value: object, meaning: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise PolicyError(f"a waiver needs {name}=, {meaning}, as a text that is not empty; got {value!r}")
    return value.strip()


def _one_site(site: str) -> str:
    if "*" in site or "?" in site:
        raise PolicyError(
            f"a waiver is for one site, not for the pattern {site!r}; "
            f"name the site that violation.site has, or use og.set_policy(operator=...) for several"
        )
    return site


def _date(until: object) -> datetime.date | None:
    import datetime  # noqa: PLC0415 - few need it

    if until is None:
        return None
    # A datetime is a date too, but of a day with an hour.
    if isinstance(until, datetime.date) and not isinstance(until, datetime.datetime):
        return until
    if isinstance(until, str) and re.fullmatch(r"\d{4}-\d{2}-\d{2}", until):
        try:
            return datetime.date.fromisoformat(until)
        except ValueError:
            pass
    raise PolicyError(f"until= is the last day of a waiver, written as '2027-01-31'; got {until!r}")


# ---------------------------------------------------------------- pyproject.toml


def _nearest_file() -> Path | None:
    from pathlib import Path  # noqa: PLC0415 - few need it

    try:
        folder = Path.cwd()
        return next((path for at in (folder, *folder.parents) if (path := at / FILE).is_file()), None)
    except OSError:  # the working directory is gone, or not ours to look into
        return None


def _entries(path: Path) -> list[tuple[str, Any]]:
    """The waiver tables of a file, each with its place in it. Raises PolicyError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        log().warning("llm-op-guard cannot read %s, so no waiver in it holds: %s", path, error)
        return []
    if "llm-op-guard" not in text:
        return []
    import tomllib  # noqa: PLC0415 - few need it

    try:
        table: Any = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PolicyError(f"{path}: {error}") from None
    for key in TABLE.split("."):
        table = table.get(key, {}) if isinstance(table, dict) else {}
    if not isinstance(table, dict):
        raise PolicyError(f"{path}: {TABLE} is a table, written as [[{TABLE}.waivers]]")
    if unknown := [key for key in table if key != "waivers"]:
        raise PolicyError(
            f"{path}: unknown key {unknown[0]!r} in [{TABLE}]{suggestion(unknown[0], ['waivers'])}; known: waivers"
        )
    entries = table.get("waivers", [])
    if not isinstance(entries, list):
        raise PolicyError(f"{path}: each waiver is a table of its own, written as [[{TABLE}.waivers]]")
    lines = [text.count("\n", 0, match.end()) + 1 for match in _HEADER.finditer(text)]
    places = [f"waiver {number}" for number in range(1, len(entries) + 1)]
    if len(lines) == len(entries):  # else they are written in another way, and counted only
        places = [f"waiver {number} (line {line})" for number, line in enumerate(lines, 1)]
    return list(zip(places, entries, strict=True))


def _check_keys(entry: object) -> None:
    if not isinstance(entry, dict):
        raise PolicyError(f"a waiver is a table with {', '.join(_KEYS)}; got {entry!r}")
    for key in entry:
        if key not in _KEYS:
            raise PolicyError(f"unknown key {key!r}{suggestion(key, _KEYS)}; known: {', '.join(_KEYS)}")
    if missing := [key for key in _REQUIRED if key not in entry]:
        raise PolicyError(f"{missing[0]!r} is missing; a waiver has {', '.join(_REQUIRED)}, and perhaps until")
