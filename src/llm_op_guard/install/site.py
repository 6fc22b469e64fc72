"""A guard at its place: one function, its guard, and the patch that puts the one in front of the other."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from types import FunctionType

from llm_op_guard.frozen import frozen
from llm_op_guard.guard import fast, ledger
from llm_op_guard.guard.asked import in_calls
from llm_op_guard.guard.guard import Guard
from llm_op_guard.guard.late import has_devices, noting
from llm_op_guard.install.binding import PACKED, Binding
from llm_op_guard.install.patch import Patch
from llm_op_guard.log import log
from llm_op_guard.policy import CLASSES, Setting, Time, anywhere, switched_on


class Site:
    """One guarded function. `name` is where it is found: `module.qualified_name`.

    With a `binding` the function takes the call's arguments packed, as those in `stand_in` do. While it is guarded its
    `__wrapped__` leads to its source, which `inspect` and `torch.jit.script` read, unless it has one of its own.

    Raises TypeError for what is not a plain Python function, ValueError where the contract wants a parameter that
    the function lacks.
    """

    def __init__(self, function: FunctionType, guard: Guard, binding: Binding | None = None) -> None:
        self.function = function
        self.guard = guard
        self.patch = Patch(function, guard.parameters if binding is None else PACKED)
        self._binding = binding
        self._classes: frozenset[str] = frozenset()
        self._ways = (False, False, False, False, False)
        self._lock = threading.Lock()
        self._again = False

    @property
    def name(self) -> str:
        """Where the guard is."""
        return self.guard.site

    def adjust(self, *, wait: bool = True) -> None:
        """Check what the policy has switched on, or give the function its own code back when that is nothing.

        Making a check may import torch, and who imports it adjusts all sites when it is there. That must not `wait`:
        whoever is at it does it once more.
        """
        self._again = True
        while self._lock.acquire(blocking=wait):
            try:
                self._again = False
                self._adjust()
            finally:
                self._lock.release()
            if not self._again:
                return

    def _adjust(self) -> None:
        policies = anywhere(self.guard.defaults, self.guard.names)
        classes = switched_on(policies) & self.guard.classes
        settings = [policy.B for policy in policies if policy.B is not None]
        noted, paced = ledger.is_on(), any(setting.is_paced for setting in settings)
        late = not noted and "B" in classes and self._tells_late(settings)
        ways = (noted, paced, in_calls(), late, fast.is_usable())
        if classes == self._classes and ways == self._ways:
            return
        if not classes:
            self._disarm()
            self._classes, self._ways = classes, ways
            return
        wanted = [c for c in CLASSES if c in classes]
        checks = self.guard.checks(wanted, noted=noted, paced=paced, late=late)
        if self._binding is not None:
            checks = checks._replace(before=self._binding.around(checks.before), accepting=None)
        try:
            self.patch.arm(checks.before, checks.after, noting if late else None, checks.accepting)
            vars(self.function).setdefault("__wrapped__", self.patch.call)
        except RuntimeError as error:
            # Somebody patched the same function after us: theirs stays.
            log().warning("llm-op-guard steps aside at %s: %s", self.name, error)
        self._classes, self._ways = classes, ways  # not before: where making the check fails, it is tried again

    def _tells_late(self, settings: list[Setting]) -> bool:
        """Whether the verdict of a rule may come after its call, by these settings."""
        if not self.guard.may_tell_late:
            return False
        return has_devices() or any(setting.time is Time.ASYNC for setting in settings)

    def remove(self) -> bool:
        """Restore the function; False when somebody else changed it since, and it was left alone."""
        with self._lock:
            self._classes = frozenset()
            return self._disarm()

    def _disarm(self) -> bool:
        if vars(self.function).get("__wrapped__") is self.patch.call:
            del vars(self.function)["__wrapped__"]
        return self.patch.disarm()


class LivingSites:
    """Sites, for as long as somebody has their functions. Threads may add one while another goes through them."""

    def __init__(self) -> None:
        self._sites: weakref.WeakSet[Site] = weakref.WeakSet()
        self._lock = threading.RLock()

    def add(self, site: Site) -> None:
        """Take one more."""
        with self._lock:
            self._sites.add(site)

    def __iter__(self) -> Iterator[Site]:
        with self._lock:
            return iter(list(self._sites))


@frozen
class Refusal:
    """A place where no guard was put, and why."""

    site: str
    reason: str

    def __str__(self) -> str:
        return f"{self.site}: {self.reason}"
