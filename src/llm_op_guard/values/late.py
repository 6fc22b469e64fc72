"""What was asked on devices and not told yet: put there by guards, told at a later call, at `flush`, or at exit.

A call whose answer is not there is never waited for but in `flush`. Where the device is so far behind that its ring is
full, a call is let go and counted. What waits is metadata and rules, no tensor. Calls that a CUDA graph holds have
places of their own (`places`): what a replay leaves there joins what waits.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from llm_op_guard.errors import GuardError, GuardWarning
from llm_op_guard.guard import late
from llm_op_guard.guard.late import LateCall, Probe, Replay, Verdict
from llm_op_guard.guard.readable import is_captured, is_capturing, unseen
from llm_op_guard.guard.reading import NotApplicable
from llm_op_guard.guard.violation import Violation
from llm_op_guard.log import log
from llm_op_guard.policy import is_off
from llm_op_guard.values import by_torch, ring
from llm_op_guard.values.places import Place, Places
from llm_op_guard.values.ring import Look, Ring

if TYPE_CHECKING:
    from llm_op_guard.guard.guard import Guard


@dataclass(eq=False)
class _Asked:
    """What a slot of a ring is taken by: its number, the answers that it waits for, and what they are about."""

    device: _Device
    number: int
    slot: int
    questions: list[int]
    looks: list[Look]
    found: list[Verdict] | None = None

    def verdicts(self) -> list[Verdict] | None:
        """The verdicts, if they are there; takes them out of the slot."""
        if self.found is None and self.device.ring.has(self.slot, self.number):
            answers = self.device.ring.answers(self.slot, self.questions)
            self.found = [look.verdict(*answer) for look, answer in zip(self.looks, answers, strict=True)]
            self.device.busy[self.slot] = None
        return self.found


@dataclass(eq=False)
class _Waiting:
    """A call that was not told of yet, what gives the verdicts on it once they are there, and of which replay where."""

    call: LateCall
    verdicts: Callable[[], list[Verdict] | None]
    replay: Replay | None = None
    place: Place | None = None


class _Device:
    """The ring of one device, who waits in which slot, the places of what is captured, and how the device is asked."""

    def __init__(self, device: Any) -> None:
        self.ring = Ring(device)
        self.places = Places(device)
        self.busy: list[_Asked | None] = [None] * self.ring.slots
        self.asked = 0
        self._launch = _launcher(device)

    def ask(self, probes: Sequence[Probe]) -> _Asked | None:
        """Ask; None where the ring is full."""
        number = self.asked + 1
        slot = number % self.ring.slots
        former = self.busy[slot]
        if former is not None and former.verdicts() is None:
            return None
        self.asked = number
        asked = self.busy[slot] = _Asked(self, number, slot, *self._sent(self.ring, slot, number, probes))
        self.places.provide()
        return asked

    def capture(self, call: LateCall, probes: Sequence[Probe]) -> bool:
        """Have each replay of the graph that is being captured ask; False where there is no more place."""
        place = self.places.free()
        if place is None:
            return False
        sent = self._sent(*place, ring.AT_EACH_REPLAY, probes, captured=True)
        self.places.taken.append(Place(call, threading.get_ident(), *place, *sent))
        return True

    def prepare(self, probes: Sequence[Probe]) -> None:
        """Have the kernel loaded that asks these, by asking: into a graph goes none that is not."""
        if self._launch is not None:
            self.ask(probes)

    def _sent(
        self, answers: Ring, slot: int, number: int, probes: Sequence[Probe], *, captured: bool = False
    ) -> tuple[list[int], list[Look]]:
        sent = self._launched(answers, slot, number, probes, captured=captured)
        if sent is None:
            by_torch.send(answers.memory, slot, number, probes)
            sent = list(range(len(probes))), [ring.look_of(probe.tensor) for probe in probes]
        return sent

    def _launched(
        self, answers: Ring, slot: int, number: int, probes: Sequence[Probe], *, captured: bool = False
    ) -> tuple[list[int], list[Look]] | None:
        if self._launch is None:
            return None
        try:
            return self._launch(answers, slot, number, probes, captured=captured)
        except NotApplicable:
            raise
        except Exception as error:  # no compiler, or a Triton that the kernel was not made for
            log().warning("Triton cannot be used on %s (%s): values are asked for by torch", self.ring.device, error)
            self._launch = None
            return None

    def wait(self) -> None:
        """Wait for all work of the device; where it is lost, there is nothing to wait for."""
        if self.ring.device.type != "cuda":
            return
        import torch  # noqa: PLC0415

        try:
            if not is_capturing():  # what is captured is not under way
                torch.cuda.synchronize(self.ring.device)
        except RuntimeError as error:
            log().info("%s does not answer any more: %s", self.ring.device, error)


# Asks with one launch: (the questions of the answers, what they are about), or None where it cannot.
_Launch = Callable[..., tuple[list[int], list[Look]] | None]


def _launcher(device: Any) -> _Launch | None:
    """What asks with Triton; None where there is none."""
    try:
        from llm_op_guard.values import kernel  # noqa: PLC0415 - imports Triton
    except Exception as error:  # none, or another version
        log().info("Triton cannot be used on %s: %s", device, error)
        return None
    return kernel.Launcher(device).ask if kernel.runs_on(device) else None


class LateQueue:
    """What is under way in this process: by device where it is asked, by thread who is told."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._devices: dict[Any, _Device] = {}
        self._waiting: dict[int, deque[_Waiting]] = {}
        # Devices that are asked no more. Launches that are under way write to their memory, graphs that hold one may be
        # replayed, and to give memory back takes calls of CUDA, which a fork cannot make: it is kept.
        self._former: list[_Device] = []
        self._ends_with_process = False
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self._in_a_fork)

    @unseen
    def put(self, call: LateCall, probes: Sequence[Probe]) -> None:
        """Ask for a call, or while a graph is captured for each of its replays. Never waits and never raises."""

        def ask() -> bool:
            if is_captured(probes[0].tensor):
                device = self._devices.get(probes[0].tensor.device)
                return device is not None and device.capture(call, probes)
            asked = self._device(probes).ask(probes)
            if asked is None:
                return False
            self._waiting.setdefault(threading.get_ident(), deque()).append(_Waiting(call, asked.verdicts))
            return True

        if not self._done(call.guard, ask):
            self.unasked(call.guard)

    @unseen
    def prepare(self, guard: Guard, probes: Sequence[Probe]) -> None:
        """Make ready what would ask so in a graph, where nothing can be compiled. Never waits and never raises."""
        self._done(guard, lambda: self._device(probes).prepare(probes))

    def unasked(self, guard: Guard) -> None:
        """Count a call that nothing can be asked about."""
        guard.reporter.values_late(guard, False)

    def _device(self, probes: Sequence[Probe]) -> _Device:
        device = probes[0].tensor.device
        if device not in self._devices:
            self._devices[device] = _Device(device)
        return self._devices[device]

    def _done(self, guard: Guard, work: Callable[[], bool | None]) -> bool:
        """Work of ours in a call; False where it says so, or where the device cannot do it."""
        try:
            with self._lock:
                if not self._ends_with_process:
                    self._ends_with_process = True
                    atexit.register(self.end)
                return work() is not False
        except NotApplicable:
            return True
        except RuntimeError as error:  # the device is lost, or its memory is full
            log().info("values of a call of %s could not be asked for: %s", guard.operator, error)
            return False
        except Exception as error:
            guard.fail_inside(error)
            return True

    def told(self) -> Exception | None:
        """Act on the verdicts that are there, of calls of this thread; the error to raise for one, if any.

        While a graph is captured nothing is told: an error would end the capture.
        """
        if any(device.places.has_more() for device in tuple(self._devices.values())):
            with self._lock:
                self._collect()
        thread = threading.get_ident()
        if not self._waiting.get(thread) or is_capturing():
            return None
        while True:
            with self._lock:
                own = self._waiting.get(thread)  # another one after `flush`, which told of what was in this
                if not own or own[0].verdicts() is None:
                    return None
                waiting = own.popleft()
            error = _act(waiting)
            if error is not None:
                return error

    def flush(self) -> None:
        """Wait for all that is under way, of every thread, and act on it; raises GuardError as the policy says."""
        with self._lock:
            devices = list(self._devices.values())
        for device in devices:
            device.wait()
        with self._lock:
            self._collect()
            answered: list[_Waiting] = []
            for thread, own in list(self._waiting.items()):
                left: deque[_Waiting] = deque()
                for waiting in own:
                    (left if waiting.verdicts() is None else answered).append(waiting)
                self._waiting[thread] = left
                if not left:
                    del self._waiting[thread]
        errors: list[GuardError] = []
        warned: GuardWarning | None = None
        for waiting in answered:
            try:
                error = _act(waiting)
            except GuardWarning as warning:  # warnings are errors here, and there may be more verdicts behind this one
                warned = warned or warning
            else:
                errors += [] if error is None else [error]
        if len(errors) == 1:
            raise errors[0]
        if errors:
            violations = [violation for error in errors for violation in error.violations]
            raise type(errors[0])("\n\n".join(error.message for error in errors), violations)
        if warned is not None:
            raise warned

    def end(self) -> None:
        """Tell what is left when the process ends: an error can be raised no more, and is a warning."""
        try:
            self.flush()
        except GuardError as error:
            with contextlib.suppress(GuardWarning):
                warnings.warn(GuardWarning(f"found when the process ended\n{error.message}"), stacklevel=1)

    def postmortem(self) -> tuple[list[Violation], list[LateCall]]:
        """What was found and not told, and the calls without an answer. Asks no device, and takes nothing away."""
        found: list[Violation] = []
        silent: list[LateCall] = []
        with self._lock:
            unread = [waiting for own in self._waiting.values() for waiting in own]
            for waiting in sorted(unread, key=lambda waiting: waiting.call.begun):
                if (answers := waiting.verdicts()) is None:
                    silent.append(waiting.call)
                elif not is_off():
                    found += waiting.call.violations(answers, waiting.replay)
            for device in [] if is_off() else self._devices.values():
                for place, verdicts, replay in device.places.found(take=False):
                    found += place.call.violations(verdicts, replay)
        return found, silent

    def note(self, error: BaseException) -> None:
        """Give an exception the text of `postmortem`; calls without an answer are told of where a device failed."""
        try:
            found, silent = self.postmortem()
            if found or (silent and isinstance(error, _of_devices())):
                text = _text(found, silent)
                if text not in getattr(error, "__notes__", ()):
                    error.add_note(text)
        except Exception:  # the error is what matters
            log().debug("no note could be given to an exception", exc_info=True)

    def forget(self) -> None:
        """Drop all that is under way; for tests."""
        with self._lock:
            self._leave()

    def _collect(self) -> None:
        """Let what replays have left join what waits, for the thread that captured them; and count them.

        That thread may be gone: of a call that waits so already, the later replays are counted only.
        """
        untold = {waiting.place: waiting for own in self._waiting.values() for waiting in own}
        for device in self._devices.values():
            for place in device.places.taken:
                if (replays := place.replays()) > 0:
                    place.call.guard.reporter.values_late(place.call.guard, True, replays)
            for place, verdicts, replay in device.places.found(take=True):
                former = untold.get(place)
                if former is not None and former.replay is not None:
                    former.replay = Replay(former.replay.at, former.replay.broken + replay.broken, replay.replays)
                    continue
                waiting = _Waiting(place.call, partial(list, verdicts), replay, place)
                self._waiting.setdefault(place.thread, deque()).append(waiting)

    def _in_a_fork(self) -> None:
        # A thread that is not in the child may have held it; and devices answer their own process only.
        self._lock = threading.RLock()
        self._leave()

    def _leave(self) -> None:
        self._former += self._devices.values()
        self._devices, self._waiting = {}, {}


def _act(waiting: _Waiting) -> GuardError | None:
    """Do with the verdicts on a call what its policy says; the error to raise, if any."""
    guard, verdicts = waiting.call.guard, waiting.verdicts() or []
    try:
        if waiting.replay is None:
            guard.reporter.values_late(guard, True)
        violations = waiting.call.violations(verdicts, waiting.replay)
        return guard.reporter.told_late(guard, violations, waiting.call.policy) if violations else None
    except GuardWarning:
        raise  # warnings are errors here, and this one is the user's
    except Exception as error:
        guard.fail_inside(error)
        return None


queue = LateQueue()
late.register(queue)


# ---------------------------------------------------------------- for users


def flush() -> None:
    """Wait for the verdicts on values that were not waited for (`B="async"`), and raise, warn or record as the policy
    of each call said; of several that raise, one error has all violations. Raises GuardError, and nothing of CUDA's.
    """
    queue.flush()


_MOST_TOLD = 20


def postmortem() -> str:
    """What guards found on devices and could not tell yet, as a text; empty where there is nothing.

    Asks no device: the answers lie in memory of the host, where they can be read after a device-side assertion, too.
    """
    return _text(*queue.postmortem())


def _text(found: Sequence[Violation], silent: Sequence[LateCall]) -> str:
    lines = []
    if found:
        lines.append("llm-op-guard found before this, and had not told yet:")
        lines += [f"  {violation.summary} ({_circumstances(violation)})" for violation in found[:_MOST_TOLD]]
        if len(found) > _MOST_TOLD:
            lines.append(f"  … and {len(found) - _MOST_TOLD} more")
    if silent:
        first = silent[0]
        lines.append(
            f"llm-op-guard had no answer yet about the values of {len(silent)} guarded "
            f"call{'s' if len(silent) > 1 else ''}, the first of them call {first.number} of {first.guard.operator}"
        )
    return "\n".join(lines)


def _circumstances(violation: Violation) -> str:
    parts = [f"rule {violation.rule_id}", str(violation.told_late)]
    if violation.call_site is not None:
        parts.append(f"called from {violation.call_site}")
    return "; ".join(parts)


@contextlib.contextmanager
def watch() -> Iterator[None]:
    """A `with` block whose exceptions get the text of `postmortem` as a note, where guards found something before."""
    try:
        yield
    except Exception as error:
        queue.note(error)
        raise


@cache
def _of_devices() -> tuple[type[BaseException], ...]:
    torch = sys.modules.get("torch")
    kind = getattr(torch, "AcceleratorError", None)
    return () if kind is None else (kind,)


def watch_uncaught() -> None:
    """Do as `watch` for exceptions that nobody catches, in any thread: by `sys.excepthook` and `threading.excepthook`.

    What stood there is called as before. A second call changes nothing.
    """
    if getattr(sys.excepthook, "_notes_late_verdicts", False):
        return
    former, former_of_threads = sys.excepthook, threading.excepthook

    def excepthook(kind: Any, error: BaseException, traceback: Any) -> None:
        queue.note(error)
        former(kind, error, traceback)

    def excepthook_of_threads(arguments: Any) -> None:
        if arguments.exc_value is not None:
            queue.note(arguments.exc_value)
        former_of_threads(arguments)

    excepthook._notes_late_verdicts = True  # type: ignore[attr-defined]
    sys.excepthook, threading.excepthook = excepthook, excepthook_of_threads
