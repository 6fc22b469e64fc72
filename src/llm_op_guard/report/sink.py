"""Violations → lines of JSON in a file, for weeks: bounded, counted rather than repeated, never in the way.

Each line counts what happened since the line before it that is about the same site, rule and call site: readers add
up. A line is written at the first violation and then each time the count has doubled, so that a process that is killed
loses less than half of what it saw, and a rule broken a million times takes twenty lines.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import stat
import sys
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llm_op_guard.errors import GuardInternalWarning, PolicyError
from llm_op_guard.guard.violation import Violation
from llm_op_guard.log import log

if TYPE_CHECKING:
    from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: files are not rotated there while several processes write
    fcntl = None  # type: ignore[assignment]


_MOST_PLACES = 2000
_MOST_NOTE = 1000
_NEWLINE = b"\n"

_Key = tuple[str, str, str, str | None]  # site, rule, call site, why waived


@dataclass
class _Place:
    """What is known of one key: the lines that stand in the file, and what happened since."""

    operator: str
    cost_class: str
    certain: bool
    first: str
    last: str
    pending: int = 0
    written: int = 0
    due: int = 1  # how many pending ones are written as a line
    diagnosis: dict[str, Any] | None = None
    explained_in: int = 0  # the file that has the diagnosis, by its inode


class JsonLines:
    """A file to which violations and reported false alarms are appended.

    After `max_records` lines the file becomes `PATH.1`, that one `PATH.2` and so on up to `keep`; older ones are
    deleted. Several processes may append to one file: each line is one write. Nothing here raises into a guarded
    call: when the file cannot be written to, that is said once, and the counts are kept for the next attempt.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_records: int = 10_000, keep: int = 5) -> None:
        from pathlib import Path  # noqa: PLC0415 - few need it

        for name, value, least in (("max_records", max_records, 1), ("keep", keep, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise PolicyError(f"{name}= is a whole number, {least} or more; got {value!r}")
        try:
            self.path = Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100 - links stay as they are
            if "\0" in str(self.path):
                raise ValueError("embedded null byte")
            is_folder = self.path.is_dir()
        except (OSError, ValueError, RuntimeError) as error:  # too long, in a folder that is gone, of no such user
            raise PolicyError(
                f"cannot record to {os.fspath(path)!r}: {getattr(error, 'strerror', None) or error}"
            ) from None
        if is_folder:
            raise PolicyError(f"cannot record to {self.path}: it is a directory; name a file, such as guards.jsonl")
        with contextlib.suppress(OSError):  # said when a line cannot be written
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._most = max_records
        self._keep = keep
        self._lock = threading.RLock()
        self._places: OrderedDict[_Key, _Place] = OrderedDict()
        self._counted: tuple[int, int, int] = (0, 0, 0)  # inode, bytes and lines in them
        self._failed = False
        self._closed = False
        atexit.register(self.flush)
        _sinks.append(self)

    def add(self, violation: Violation) -> None:
        """Count a violation; keep its diagnosis when it is the first of its kind."""
        site = violation.call_site
        # Without the layer: the same line of code, eighty times.
        owner = f" ({site.module_class})" if site is not None and site.module_class else ""
        place = f"{site.file}:{site.line} in {site.function}{owner}" if site is not None else ""
        key = (violation.site, violation.rule_id, place, violation.waived)
        with self._never_raising(), self._lock:
            now = _now()
            if key not in self._places:
                self._make_room()
                self._places[key] = _Place(
                    violation.operator,
                    violation.cost_class,
                    violation.certain,
                    now,
                    now,
                    diagnosis={"summary": violation.summary, **violation.to_dict()},
                )
            self._happened(key, now)

    def count(self, site: str, rule_id: str) -> None:
        """Count a violation of which nothing else is known, on the last of its kind."""
        with self._never_raising(), self._lock:
            key = next((key for key in reversed(self._places) if key[:2] == (site, rule_id)), None)
            if key is not None:
                self._happened(key, _now())

    def knows(self, site: str, rule_id: str) -> bool:
        """Whether there is a place that `count` can count on."""
        return any(key[:2] == (site, rule_id) for key in tuple(self._places))

    def false_alarm(self, rule_id: str, site: str, note: str) -> None:
        """Write down that somebody says a rule was wrong."""
        entry = {"kind": "false_alarm", "rule": rule_id, "site": site, "note": note[:_MOST_NOTE], "time": _now()}
        with self._never_raising(), self._lock:
            self._append(entry)

    def flush(self) -> None:
        """Write what has been counted and not written yet; happens at exit, and when a forked worker ends."""
        with self._never_raising(), self._lock:
            for key, place in self._places.items():
                if place.pending:
                    self._write(key, place)

    def close(self) -> None:
        """Flush, and take part in nothing any more."""
        self.flush()
        self._closed = True
        atexit.unregister(self.flush)
        with contextlib.suppress(ValueError):
            _sinks.remove(self)

    def forget_pending(self) -> None:
        """In a fork: what was counted before is for the parent to write, and no thread holds the lock."""
        self._lock = threading.RLock()
        self._places.clear()

    def _happened(self, key: _Key, now: str) -> None:
        if self._closed:
            return
        place = self._places[key]
        self._places.move_to_end(key)
        if not place.pending:
            place.first = now
        place.last = now
        place.pending += 1
        if place.pending >= place.due:
            self._write(key, place)

    def _make_room(self) -> None:
        if len(self._places) >= _MOST_PLACES:
            key, place = self._places.popitem(last=False)
            if place.pending:
                self._write(key, place)

    def _write(self, key: _Key, place: _Place) -> None:
        site, rule, call_site, waived = key
        entry = {
            "kind": "violation",
            "site": site,
            "rule": rule,
            "operator": place.operator,
            "class": place.cost_class,
            "certain": place.certain,
            "call_site": call_site,
            "waived": waived,
            "count": place.pending,
            "first": place.first,
            "last": place.last,
            "pid": os.getpid(),
        }
        place.due = 2 * place.pending  # where it fails
        self._append(entry, place)
        place.written += place.pending
        place.pending, place.due = 0, place.written

    def _append(self, entry: dict[str, Any], place: _Place | None = None) -> None:
        """Write one line, with the diagnosis of its place when this file does not have it yet; raises OSError."""
        file = self._open()
        try:
            before = b""
            if stat.S_ISREG(os.fstat(file).st_mode):  # not a pipe or a device
                if self._lines(file) >= self._most and self._rotate(file):
                    os.close(file)
                    file = -1
                    file = self._open()
                if not _ends_a_line(file):
                    before = _NEWLINE
            inode = os.fstat(file).st_ino
            if place is not None and place.explained_in != inode:
                entry = {**entry, "diagnosis": place.diagnosis}
            import json  # noqa: PLC0415 - few need it

            line = before + json.dumps(entry, ensure_ascii=True, default=str).encode() + _NEWLINE
            written = os.write(file, line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes could be written")
            if place is not None:
                place.explained_in = inode
        finally:
            if file != -1:
                os.close(file)

    def _open(self) -> int:
        # Anew for each line: lines are rare, and so forks share nothing and a file that was moved is noticed.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        return os.open(self.path, flags, 0o644)

    def _lines(self, file: int) -> int:
        """How many lines the file has; only what was added since the last time is read."""
        state = os.fstat(file)
        inode, at, lines = self._counted
        if inode != state.st_ino or state.st_size < at:
            at = lines = 0
        os.lseek(file, at, os.SEEK_SET)
        while part := os.read(file, 1 << 20):
            at += len(part)
            lines += part.count(_NEWLINE)
        self._counted = (state.st_ino, at, lines)
        return lines

    def _rotate(self, file: int) -> bool:
        """Move the full file out of the way; False when another process is just doing it."""
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go when the file is closed
            except OSError:
                return False
        # `stat` may fail when somebody moved it: then there is nothing to move.
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_ino != os.fstat(file).st_ino:
                return True
            if self._keep == 0:
                self.path.unlink()
                return True
            there = 0
            while there < self._keep - 1 and self._numbered(there + 1).exists():
                there += 1
            for number in range(there, 0, -1):
                self._numbered(number).replace(self._numbered(number + 1))
            self.path.replace(self._numbered(1))
        return True

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    @contextlib.contextmanager
    def _never_raising(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._say_failed(error)

    def _say_failed(self, error: Exception) -> None:
        if self._failed:
            return
        self._failed = True
        message = (
            f"llm-op-guard cannot record to {self.path} ({type(error).__name__}: {error}); guarded calls go on, and "
            f"counts are kept for the next attempt. This is said once."
        )
        log().error(message)
        # Where warnings are errors the log has to do.
        with contextlib.suppress(GuardInternalWarning):
            warnings.warn(GuardInternalWarning(message), stacklevel=2)


_sinks: list[JsonLines] = []


def _ends_a_line(file: int) -> bool:
    """Not so where a process died while it wrote, or the disk was full.

    Nor while another process is just writing: then an empty line comes of it, which readers pass over.
    """
    if os.fstat(file).st_size == 0:
        return True
    os.lseek(file, -1, os.SEEK_END)
    return os.read(file, 1) == _NEWLINE


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())


def _in_a_fork() -> None:
    for sink in _sinks:
        sink.forget_pending()
        # A worker of multiprocessing ends without exit handlers, but runs its own finalisers.
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.register_after_fork(sink, _flush_when_the_worker_ends)


def _flush_when_the_worker_ends(sink: JsonLines) -> None:
    sys.modules["multiprocessing.util"].Finalize(sink, sink.flush, exitpriority=0)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_in_a_fork)
