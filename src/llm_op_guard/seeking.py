"""The program behind `llm-op-guard nan`: somebody's program, watched for its first NaN or infinity."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from llm_op_guard import run
from llm_op_guard.errors import LlmOpGuardError
from llm_op_guard.guard.context import site_of
from llm_op_guard.guard.violation import CallSite
from llm_op_guard.nonfinite.calls import observed, uncompiled
from llm_op_guard.nonfinite.finding import NonFinite
from llm_op_guard.nonfinite.watch import Watch
from llm_op_guard.report.terminal import Terminal

_FOUND = 1


class SeekError(LlmOpGuardError):
    """There is nothing to watch with; the text says what is missing."""


class _Found(SystemExit):
    """Ends the program where the first value that is not finite was found."""


def main(out: Terminal, target: str, arguments: Sequence[str], *, is_module: bool) -> int:
    """Run a script or module, and stop it at the first NaN or infinity: 1 then, else its own exit code.

    Raises SeekError without torch, TargetError for a target that is none, SystemExit as the program does.
    """
    if importlib.util.find_spec("torch") is None:
        raise SeekError("it is the modules of torch that are watched, and torch is not installed")
    prepare = run.prepared_module if is_module else run.prepared_script
    program = prepare(target, arguments)

    def tell(finding: NonFinite, may_raise: bool) -> None:
        out.line(f"{out.paint('llm-op-guard: not finite:', 'bold', 'red')} {finding}")
        # Another thread of the program is left to go on: somebody may wait for it. Those of autograd are nobody's, and
        # hand it on.
        thread = threading.current_thread()
        if may_raise and (thread is threading.main_thread() or isinstance(thread, threading._DummyThread)):
            raise _Found(_FOUND)

    watch = Watch(line=_line, on_found=tell)
    try:
        with uncompiled(always=True), observed(watch):
            code = run.shown(program)
    except SystemExit:
        if watch.found is None:
            _conclude(out, watch)
            raise
        return _FOUND
    if watch.found is not None:
        return _FOUND
    _conclude(out, watch)
    return code


def _conclude(out: Terminal, watch: Watch) -> None:
    watch.is_on = False
    if not watch.calls:
        out.warning("nothing was watched: the program called no module of torch")
        return
    if watch.suspect is not None:
        out.warning(f"perhaps not meant: {watch.suspect}")
    if watch.overflowed:
        out.line("llm-op-guard: gradients overflowed under a GradScaler, which skips such steps")
    calls = f"{watch.calls} call{'' if watch.calls == 1 else 's'}"
    out.line(f"llm-op-guard: {calls} of modules, {'nothing else' if watch.suspect else 'nothing'} that is not finite")


def _line() -> CallSite | None:
    """Where the program is, the libraries that it called left out; of the main thread, for a thread of autograd."""
    own: FrameType | None = sys._getframe(1)
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    for top in (own, main):
        frame = top
        while frame is not None:
            if _is_theirs(frame):
                return site_of(frame)
            frame = frame.f_back
    return None


_INSTALLED = tuple(
    {os.path.normcase(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_PACKAGE = os.path.normcase(Path(__file__).parent) + os.sep


def _is_theirs(frame: FrameType) -> bool:
    file = os.path.normcase(frame.f_code.co_filename)
    return not file.startswith(("<", _PACKAGE, *_INSTALLED)) and "site-packages" not in file
