"""`pytest --op-guard`: a project's own tests with guards on; what breaks a rule fails, swallowed or not."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import unittest
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

_POLICY = {"A": "raise", "B": "raise"}


class _Watch:
    """What was broken since somebody last asked: in all threads of this process, and in those that it started."""

    def __init__(self, file: Path) -> None:
        import llm_op_guard as og  # noqa: PLC0415 - not for who does not ask for it

        self._record = og.record
        self._file = file
        self._total = og.record.total
        self._read = 0

    def broken(self) -> list[str]:
        """A line for each certain rule that was broken and not waived."""
        count = self._record.total - self._total
        self._total += count
        fresh = self._record.violations[-count:] if count > 0 else []
        told = [violation.summary for violation in fresh if violation.certain and violation.waived is None]
        return [*told, *self._in_other_processes()]

    def _in_other_processes(self) -> Iterator[str]:
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._read)
            lines = file.read()
        # A line that another process is just writing is for the next time.
        lines = lines[: lines.rfind(b"\n") + 1]
        self._read += len(lines)
        for line in lines.splitlines():
            entry = json.loads(line) if line.strip() else {}
            certain = entry.get("kind") == "violation" and entry["certain"] and entry["waived"] is None
            if certain and entry["pid"] != os.getpid():
                yield f"{entry.get('diagnosis', {}).get('summary', entry['rule'])} (in process {entry['pid']})"


_guards = pytest.StashKey[contextlib.ExitStack]()
_watch = pytest.StashKey[_Watch]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option, and the libraries to guard."""
    group = parser.getgroup("llm-op-guard")
    group.addoption(
        "--op-guard",
        action="store_true",
        help="run with the operators of libraries guarded, values too, and with predicates asked in the calls of your "
        "own guarded functions; a broken rule fails the test that broke it",
    )
    parser.addini("op_guard_libraries", "libraries that --op-guard guards (default: transformers)", "args", [])


def pytest_configure(config: pytest.Config) -> None:
    """Guards come before the tests are collected, and with them the modules that take operators by name."""
    config.addinivalue_line("markers", "op_guard_expected: a test that breaks rules on purpose, under --op-guard")
    if not config.getoption("--op-guard"):
        return
    import llm_op_guard as og  # noqa: PLC0415 - not for who does not ask for it
    from llm_op_guard.api import default_libraries, known_libraries  # noqa: PLC0415
    from llm_op_guard.guard import asked  # noqa: PLC0415
    from llm_op_guard.policy import guarding_children, policy_of_all_threads  # noqa: PLC0415
    from llm_op_guard.run import STARTUP  # noqa: PLC0415

    libraries = config.getini("op_guard_libraries") or default_libraries()
    if unknown := [name for name in libraries if name not in known_libraries()]:
        raise pytest.UsageError(f"op_guard_libraries: nothing is known of {', '.join(unknown)}")
    guards = config.stash[_guards] = contextlib.ExitStack()
    file = Path(guards.enter_context(tempfile.TemporaryDirectory(prefix="llm-op-guard-"))) / "violations.jsonl"
    # Processes that tests start have the same guards, forks of this one too, and write what they find to the file.
    settings = " ".join(f"{name}={action}" for name, action in _POLICY.items())
    guards.enter_context(guarding_children(STARTUP, libraries, file, settings))
    og.record_to(file)
    guards.callback(og.record_to, None)
    asked.switch(on=True)
    guards.callback(asked.switch, on=False)
    # The one reaches other threads, the other goes before what the project sets for the process.
    guards.enter_context(policy_of_all_threads(A=_POLICY["A"], B=_POLICY["B"]))
    guards.enter_context(og.policy(A=_POLICY["A"], B=_POLICY["B"]))
    guards.enter_context(og.installed(*libraries))
    config.stash[_watch] = _Watch(file)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Take the guards away."""
    if _guards in config.stash:
        config.stash[_guards].close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test during which a rule was broken for certain, where its error did not get out."""
    return (yield from _watched(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """As in the test: fixtures break rules too, and so do threads and processes that they wait for."""
    return (yield from _watched(item))


def _watched(item: pytest.Item) -> Generator[None, Any, Any]:
    if _watch not in item.config.stash:
        return (yield)
    watch = item.config.stash[_watch]
    result, skipped = None, None
    try:
        result = yield
    except (pytest.skip.Exception, unittest.SkipTest) as error:
        skipped = error
    except BaseException:
        watch.broken()  # it fails as it is, or is expected to (pytest.xfail)
        raise
    _fail_for(item, watch.broken(), "passed" if skipped is None else "was skipped")
    if skipped is not None:
        raise skipped
    return result


def _fail_for(item: pytest.Item, broken: list[str], ended: str) -> None:
    if broken and item.get_closest_marker("op_guard_expected") is None:
        lines = "\n".join(f"  {line}" for line in broken)
        pytest.fail(
            f"rules were broken and the test {ended}; one that means to is marked op_guard_expected:\n{lines}",
            pytrace=False,
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run where a rule was broken after the last test, by what was still at work."""
    if _watch not in session.config.stash:
        return
    broken = session.config.stash[_watch].broken()
    if not broken:
        return
    session.exitstatus = pytest.ExitCode.TESTS_FAILED
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        for line in ("", "rules were broken after the last test:", *(f"  {line}" for line in broken)):
            terminal.write_line(line)
