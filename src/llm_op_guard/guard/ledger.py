"""The last guarded calls of each thread: where a tensor that breaks a rule was last seen, and whether it was right.

Off until `switch(on=True)`. Tensors are kept by weak references, with the number of changes that torch has counted on
them, and nothing is kept of their contents. What is said is about the very tensor, or about a view of one that was
seen whole: a tensor that is gone is never taken for a new one at its address.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ref

from llm_op_guard.guard.reading import is_tracing, optional_attribute
from llm_op_guard.guard.violation import LastSeen

# Of each thread. A decode step of a Llama with 32 layers has some 160 guarded calls, with two events each.
EVENTS_KEPT = 512
_MOST_PARTS = 16
_OWNERS = ("self", "module")


class Side(NamedTuple):
    """One side of a guarded operator: what goes in, or what comes out.

    `valid` says whether rules about what is seen there were kept; `arguments` names what goes in, in order.
    """

    operator: str
    site: str
    entering: bool
    valid: bool
    arguments: tuple[str, ...] = ()


# A tensor, and how many changes were counted on it.
_Seen = tuple["ref[Any]", int | None]
# At which side, how many guarded calls of the thread had begun, what was seen there, and whose method it was. A plain
# tuple: a named one takes three times as long to make.
_Event = tuple[Side, int, list[_Seen | None], "ref[Any] | None"]


class _Trail(threading.local):
    def __init__(self) -> None:
        self.calls = 0
        self.events: deque[_Event] = deque(maxlen=EVENTS_KEPT)


class _State:
    def __init__(self) -> None:
        self.on = False
        self.trail = _Trail()


_state = _State()
_kinds: set[type] = set()


def switch(*, on: bool) -> None:
    """Begin with an empty ledger, or keep none any more. It is for whoever arms guards to have them write in it."""
    if on != _state.on:
        _state.on = on
        _state.trail = _Trail()


def is_on() -> bool:
    """Whether guarded calls are to be written down."""
    return _state.on


def entering(side: Side) -> Callable[[Sequence[Any]], _Event | None]:
    """What notes the arguments of a call, `side.arguments` in order; what it returns is for `leaving`."""
    owner_at = next((side.arguments.index(name) for name in _OWNERS if name in side.arguments), None)

    def note(values: Sequence[Any]) -> _Event | None:
        try:
            trail = _state.trail
            trail.calls += 1
            owner = None if owner_at is None else _weakly(values[owner_at])
            event = side, trail.calls, _seen(values), owner
            trail.events.append(event)
        except Exception:  # what cannot be noted is not said
            return None
        return event

    return note


def leaving(side: Side) -> Callable[[Any, Any], None]:
    """What notes the result of a call: takes it, and what `entering` or `owner_of_call` returned, or None."""

    def note(result: Any, call: _Event | ref[Any] | None) -> None:
        if is_tracing():
            return
        try:
            parts = list(result.values()) if type(result) is dict else result
            parts = parts if type(parts) in (tuple, list) else (parts,)
            owner = call if call is None or isinstance(call, ref) else call[3]
            trail = _state.trail
            trail.events.append((side, trail.calls, _seen(parts[:_MOST_PARTS]), owner))
        except Exception:
            return

    return note


def owner_of_call(owner: Any) -> ref[Any] | None:
    """What `leaving` takes for a call of a method: a weak reference to its object."""
    return None if is_tracing() else _weakly(owner)


def count_call() -> None:
    """A guarded call began of which nothing is noted: it broke its contract."""
    if _state.on:
        _state.trail.calls += 1


def last_seen(tensor: Any) -> LastSeen | None:
    """Where this thread has last seen a tensor, or one that it is a view of; None where that is not known."""
    if not _state.on or is_tracing() or type(tensor) not in _plain_kinds():
        return None
    try:
        return _found(tensor)
    except Exception:  # what is not known must not stand in the way of what is
        return None


def _found(tensor: Any) -> LastSeen | None:
    base, version = tensor._base, _version(tensor)
    trail = _state.trail
    for event in reversed(tuple(trail.events)):
        there = [None if seen is None else _referent(seen[0]) for seen in event[2]]
        # The very tensor first: a call may take it and what it is a view of.
        position = next((at for at, other in enumerate(there) if other is tensor), None)
        is_view = position is None and base is not None
        if is_view:
            position = next((at for at, other in enumerate(there) if other is base or _is_all_of(other, base)), None)
        if position is not None:
            _, then = event[2][position] or (None, None)
            return _said(
                event,
                position,
                calls_ago=trail.calls - event[1],
                is_view=is_view,
                changes=None if version is None or then is None or version < then else version - then,
            )
    return None


def _is_all_of(view: Any, base: Any) -> bool:
    """Whether a tensor is a view of the base that leaves nothing out: every other view is one of it as well."""
    if view is None or view._base is not base:
        return False
    if sys.modules["torch"]._debug_has_internal_overlap(view) != 0:
        return False
    return bool(view.numel() * view.element_size() == view.untyped_storage().nbytes())


def _said(event: _Event, position: int, *, calls_ago: int, is_view: bool, changes: int | None) -> LastSeen:
    side, _, _, reference = event
    owner = None if reference is None else reference()
    layer = None if owner is None else optional_attribute(owner, "layer_idx")
    return LastSeen(
        operator=side.operator,
        site=side.site,
        when="entering" if side.entering else "leaving",
        valid=side.valid,
        argument=side.arguments[position] if side.entering else None,
        module_class=None if owner is None else type(owner).__name__,
        layer_idx=layer if type(layer) is int else None,
        calls_ago=calls_ago,
        is_view=is_view,
        changes=changes,
    )


def _seen(values: Sequence[Any]) -> list[_Seen | None]:
    kinds = _kinds or _plain_kinds()
    try:
        return [(ref(value), value._version) if type(value) in kinds else None for value in values]
    except RuntimeError:  # an inference tensor: torch counts no changes
        return [(ref(value), _version(value)) if type(value) in kinds else None for value in values]


def _plain_kinds() -> set[type]:
    """The classes whose attributes are torch's own: those of a subclass may be anybody's code."""
    torch = sys.modules.get("torch")
    if not _kinds and torch is not None:
        _kinds.update((torch.Tensor, torch.nn.Parameter))
    return _kinds


def _version(tensor: Any) -> int | None:
    try:
        return int(tensor._version)
    except RuntimeError:
        return None


def _referent(reference: ref[Any]) -> Any:
    tensor = reference()
    if tensor is not None:
        # As torch.utils.weak does: only torch itself may hold the tensor still, for a view of it.
        tensor._fix_weakref()
    return tensor


def _weakly(owner: Any) -> ref[Any] | None:
    try:
        return ref(owner)
    except TypeError:
        return None
