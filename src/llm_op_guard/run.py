"""Runs somebody's program with guards installed before its first line, and says at the end what they did."""

from __future__ import annotations

import atexit
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from llm_op_guard import api
from llm_op_guard.errors import LlmOpGuardError
from llm_op_guard.policy import CLASSES, OFF, Action, Policy, current, is_disabled, set_for_children, set_policy
from llm_op_guard.report.terminal import Terminal

_MOST_REFUSALS = 3
_OURS = (__file__, runpy.__file__)


class TargetError(LlmOpGuardError):
    """There is no such script or module to run."""


def script(path: str, arguments: Sequence[str], out: Terminal, record: str | None = None) -> int:
    """Run a file (or a directory or archive with a `__main__`) as `python path` does; the exit code.

    Raises TargetError when it is not there, PolicyError for a bad LLM_OP_GUARD, SystemExit as the program does.
    """
    run = prepared_script(path, arguments)
    _guard(record)
    return _reported(run, out)


def module(name: str, arguments: Sequence[str], out: Terminal, record: str | None = None) -> int:
    """Run a module as `python -m name` does; the exit code.

    Raises TargetError when it is not there, PolicyError for a bad LLM_OP_GUARD, SystemExit as the program does.
    """
    run = prepared_module(name, arguments)
    _guard(record)  # before the module is looked for: that imports the packages it lies in
    return _reported(run, out)


def prepared_script(path: str, arguments: Sequence[str]) -> Callable[[], object]:
    """What runs a file as its own program, whose `sys.argv` and `sys.path` are set; raises TargetError."""
    target = Path(path)
    try:
        if not target.exists():
            raise TargetError(f"there is no file {path}")
        is_source = target.is_file() and target.suffix != ".pyz"
        if is_source:
            with target.open("rb") as file:
                is_source = file.read(2) != b"PK"
    except OSError as error:
        raise TargetError(f"cannot read {path}: {error.strerror}") from None
    if not is_source and target.is_dir() and not (target / "__main__.py").is_file():
        raise TargetError(f"the directory {path} has no __main__.py")

    sys.argv = [path, *arguments]
    if is_source:
        _search_first(target.resolve().parent)
        return lambda: _run_source(os.path.abspath(path))  # noqa: PTH100 - as Python: links stay as they are
    if not sys.flags.safe_path:
        del sys.path[0]  # runpy puts the folder there
    return lambda: runpy.run_path(str(target.absolute()), run_name="__main__")


def prepared_module(name: str, arguments: Sequence[str]) -> Callable[[], object]:
    """The same of a module, which is looked for when it runs: that raises TargetError."""
    sys.argv = [name, *arguments]
    _search_first(Path.cwd())

    def run() -> None:
        _refuse_missing(name)
        runpy.run_module(name, run_name="__main__", alter_sys=True)

    return run


def _search_first(folder: Path) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = str(folder)


def _refuse_missing(name: str) -> None:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    except ValueError as error:
        raise TargetError(f"cannot run {name}: {error}") from None
    if spec is None:
        raise TargetError(f"there is no module {name}")


class _ScriptLoader(SourceFileLoader):
    """Python leaves no compiled file beside a script, and so neither does this."""

    def set_data(self, path: str, data: object, *, _mode: int = 0) -> None:
        pass


def _run_source(path: str) -> None:
    loader = _ScriptLoader("__main__", path)
    # It stays in sys.modules after the run: threads and exit handlers of the program need it.
    main = ModuleType("__main__")
    main.__file__, main.__loader__, main.__spec__ = path, loader, None
    main.__dict__.update(__builtins__=sys.modules["builtins"], __cached__=None, __annotations__={})
    sys.modules["__main__"] = main
    loader.exec_module(main)


def _reported(run: Callable[[], object], out: Terminal) -> int:
    """Run it, and say at its end what guards did."""
    # At exit rather than after the run: threads of the program may still be at work until then.
    conclude = atexit.register(_conclusion(out))
    try:
        return shown(run)
    except TargetError:
        atexit.unregister(conclude)
        raise


def shown(run: Callable[[], object]) -> int:
    """Run a program; an exception is shown as Python shows it, without the frames of this library. The exit code.

    Raises TargetError for a module that is not there, SystemExit as the program does.
    """
    try:
        run()
    except (SystemExit, TargetError):
        raise
    except BaseException as error:
        sys.excepthook(type(error), error.with_traceback(_theirs(error.__traceback__)), error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _theirs(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file not in _OURS and not file.startswith("<frozen "):
            return traceback
        traceback = traceback.tb_next
    return None


# ---------------------------------------------------------------- guards, and what they did


# The folder of the `sitecustomize` that installs guards in the Python processes which the program starts.
STARTUP = Path(__file__).parent / "startup"


def _guard(record: str | None) -> None:
    policy = current(Policy())  # a bad LLM_OP_GUARD is an error here, before the program runs
    softened = None
    if record is not None:
        api.record_to(record)
        if policy.default is None and policy != OFF:
            softened = Action.RECORD
            set_policy(default=softened)
    sink = api.record.sink
    set_for_children(STARTUP, api.default_libraries(), sink.path if sink is not None else None, softened)
    api.count_checks()
    for library in api.default_libraries():
        api.install(library)


def _conclusion(out: Terminal) -> Callable[[], None]:
    process = os.getpid()

    def conclude() -> None:
        if os.getpid() == process:  # not in a fork
            summarise(out)

    return conclude


def summarise(out: Terminal) -> None:
    """The closing line, and a warning when nothing was guarded."""
    sites = len(api.sites())
    checks, violations = api.tally.checks, api.record.total
    try:
        reason = _why_nothing(sites, checks)
        if reason:
            out.warning(f"nothing was checked: {reason}")
        sink = api.record.sink
        if sink is not None and violations:
            out.line(f"llm-op-guard: violations are recorded; read them with: llm-op-guard report {sink.path}")
        line = f"llm-op-guard: {_count(sites, 'site')}, {_count(checks, 'check')}, {_count(violations, 'violation')}"
        out.line(out.paint(line, "red") if violations else line)
    except (OSError, ValueError):  # the program closed stderr
        pass


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _why_nothing(sites: int, checks: int) -> str:
    """Why the guards saw nothing; empty when they did."""
    if checks:
        return ""
    look = "; look at: llm-op-guard doctor"
    if is_disabled():
        return "the program switched the guards off (og.disable)"
    policy = current(api.USER_DEFAULTS)
    if all(policy.action(name) is Action.OFF for name in CLASSES):
        return "the policy is off (LLM_OP_GUARD or set_policy)"
    if sites:
        return "no guarded operator was called outside compiled code"
    status = api.status()
    absent = [library for library in api.default_libraries() if library not in sys.modules]
    if not status.libraries:
        return "the program took the guards away (uninstall)"
    if absent and status.refused:
        return "; ".join(str(refusal) for refusal in status.refused) + look
    if absent:
        return f"the program never imported {', '.join(absent)}{look}"
    if status.refused:
        shown = "; ".join(str(refusal) for refusal in status.refused[:_MOST_REFUSALS])
        return f"all {len(status.refused)} operators that were loaded were refused, such as {shown}{look}"
    return f"the program loaded no operators that guards are known for{look}"
