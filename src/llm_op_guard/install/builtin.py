"""A guard on a builtin of a module: it has no code to swap, so something that calls it stands in its place.

Whoever took the builtin by reference before keeps it, unguarded; whoever takes the stand-in keeps that, and calls
through it when the guard is off.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from llm_op_guard.guard.guard import Guard
from llm_op_guard.install.binding import Binding
from llm_op_guard.install.site import Site
from llm_op_guard.install.stand_in import StandIn
from llm_op_guard.log import log


class _BuiltinStandIn(StandIn):
    """Equal to what it stands for: who looks a function up in a table of theirs finds it under either.

    While nothing is checked, who holds it calls the builtin through it, and nothing besides.
    """

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.__wrapped__

    def __hash__(self) -> int:
        return hash(self.__wrapped__)


def underneath(found: object) -> object:
    """The builtin that a stand-in of ours stands for; anything else as it is."""
    return found.__wrapped__ if isinstance(found, _BuiltinStandIn) else found


class Replaced:
    """The place of a builtin in a module.

    `aside()` gives the builtin back for as long as somebody needs it there: calls are not checked meanwhile.
    """

    def __init__(self, home: ModuleType, name: str, builtin: Callable[..., Any]) -> None:
        self.builtin = builtin
        self.stand_in: Any = None
        self.front: Any = None
        self._home = home
        self._name = name
        self._on = False
        self._aside = 0
        self._lock = threading.Lock()

    def set(self, *, on: bool) -> bool:
        """Put the stand-in there, or the builtin; False when somebody else's is there, which is left alone."""
        with self._lock:
            self._on = on
            vars(self.stand_in)["_guarded_call"] = self.front if on else self.builtin
            return self._aside > 0 or self._swap()

    def __enter__(self) -> None:
        """Step aside."""
        with self._lock:
            self._aside += 1
            self._swap()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._aside -= 1
            self._swap()

    def _swap(self) -> bool:
        there = vars(self._home).get(self._name)
        wanted = self.stand_in if self._on and not self._aside else self.builtin
        if there is not wanted:
            if there is not self.builtin and there is not self.stand_in:
                return False
            setattr(self._home, self._name, wanted)
        return True


class BuiltinSite(Site):
    """A guarded builtin. `front` is a function that calls it with arguments that come packed, as in `stand_in`."""

    def __init__(self, place: Replaced, front: FunctionType, guard: Guard, signature: inspect.Signature) -> None:
        super().__init__(front, guard, Binding(signature, guard.parameters, guard.operator))
        self._place = place
        place.front, place.stand_in = front, _BuiltinStandIn(place.builtin, front)

    def adjust(self) -> None:
        """As for any site; the builtin itself is there while the policy has nothing switched on."""
        super().adjust()
        if not self._place.set(on=self.patch.armed):
            log().warning("llm-op-guard steps aside at %s: somebody else put their own there", self.name)

    def remove(self) -> bool:
        """Give the builtin back; False when somebody else put their own there since, and it was left alone."""
        return all((super().remove(), self._place.set(on=False)))
