"""A function that no contract speaks of, whose results are followed: where a rotary table was made."""

from __future__ import annotations

import threading
from types import FunctionType

from llm_op_guard.guard import ledger
from llm_op_guard.install.patch import Patch
from llm_op_guard.log import log
from llm_op_guard.policy import is_off


class Producer:
    """One method, `self` its first parameter, whose results are written in the ledger while one is kept.

    It is not guarded: its arguments are not looked at, and it runs with its own code while nobody tracks.

    Raises TypeError for what is not a plain Python function, ValueError where it has no parameter `self`.
    """

    def __init__(self, function: FunctionType, *, operator: str, site: str) -> None:
        self.function = function
        self.name = site
        self._patch = Patch(function, ("self",))
        self._leaving = ledger.leaving(ledger.Side(operator, site, entering=False, valid=False))
        self._lock = threading.Lock()

    def adjust(self) -> None:
        """Follow results, or give the function its own code back."""
        with self._lock:
            wanted = ledger.is_on() and not is_off()
            if wanted == self._patch.armed:
                return
            if not wanted:
                self._patch.disarm()
                return
            try:
                self._patch.arm(ledger.owner_of_call, self._leaving)
            except RuntimeError as error:
                # Somebody patched the same function after us: theirs stays.
                log().warning("llm-op-guard does not track %s: %s", self.name, error)

    def remove(self) -> bool:
        """Restore the function; False when somebody else changed it since, and it was left alone."""
        with self._lock:
            return self._patch.disarm()
