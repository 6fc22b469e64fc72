"""Facts that contracts keep about objects from one call to the next: what a plan was made for, who filled a cache.

They are kept beside the object for as long as it lives, never in it, and never keep it alive. An object that cannot be
referred to weakly (a list, a dict, a number) has none. Nothing is kept of it but plain values. What may no longer be
so is forgotten: a fact that is out of date would be a false alarm.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from llm_op_guard.guard.reading import NotApplicable, is_a, is_tracing
from llm_op_guard.log import log


class Identity(NamedTuple):
    """What stands for an object and for no other, in facts and messages: `LlamaModel 3`."""

    kind: str
    serial: int

    def __str__(self) -> str:
        return f"{self.kind} {self.serial}"


class Token(NamedTuple):
    """What a call that may change facts is known by: it remembers them only if no other such call began since."""

    serial: int
    epoch: int


class _Entry(NamedTuple):
    owner: weakref.ref[Any]
    identity: Identity
    facts: dict[str, Any]
    begun: dict[str, int]  # by fact: the serial of the last call that began to change it


# By the object's address: it may not be hashable, and its == is not ours to call.
_entries: dict[int, _Entry] = {}
_serials = itertools.count(1)
_epochs = [0]  # how often all was forgotten
_distrusted: set[str] = set()
_KEPT_OF_TORCH = ("dtype", "device")


def remember(owner: Any, names: Iterable[str], facts: Mapping[str, Any], token: Token | None = None) -> None:
    """Keep facts about an object; a name for which there is no plain value is not known any more.

    With the `token` of the call nothing is kept where another call that changes them began since: which of the two
    was the last to do so is not known.
    """
    entry = _entry_of(owner) or _begin(owner)
    if entry is None:
        return
    overtaken = token is not None and (
        token.epoch != _epochs[0] or any(entry.begun.get(name) != token.serial for name in names)
    )
    for name in names:
        value = None if overtaken else _plain(facts.get(name))
        if value is None:
            entry.facts.pop(name, None)
        else:
            entry.facts[name] = value


def forget(owner: Any, names: Iterable[str]) -> Token:
    """Facts of these names are no longer known about an object: a call that may change them begins."""
    token = Token(next(_serials), _epochs[0])
    entry = _entry_of(owner) or _begin(owner)
    if entry is not None:
        for name in names:
            entry.begun[name] = token.serial
            entry.facts.pop(name, None)
    return token


def forget_all() -> None:
    """No fact is known any more: calls may have gone by unseen. Objects keep their identity."""
    _epochs[0] += 1
    for entry in list(_entries.values()):
        entry.facts.clear()


def distrusting(forgotten: Iterable[tuple[object, Iterable[str]]]) -> Callable[[object], None]:
    """What is called while a program is traced that would forget these facts: they are not known from now on.

    The program, when it runs, changes what they speak of unseen. By name, of any object: which one it will be is not
    known.
    """
    names = {name for _, group in forgotten for name in group}

    def distrust(_: object) -> None:
        if not names <= _distrusted:
            log().info("a compiled program changes what %s stand for: rules that recall them step aside", names)
            _distrusted.update(names)

    return distrust


def recall(owner: Any, name: str) -> Any:
    """A fact that was kept about an object; raises NotApplicable where none is known, and while tracing."""
    entry = _entry_of(owner)
    if entry is None or name not in entry.facts or name in _distrusted or is_tracing():
        raise NotApplicable
    return entry.facts[name]


def identity(owner: Any) -> Identity:
    """What stands for an object; raises NotApplicable where it cannot be referred to weakly, and while tracing."""
    entry = None if is_tracing() else _entry_of(owner) or _begin(owner)
    if entry is None:
        raise NotApplicable
    return entry.identity


def _entry_of(owner: Any) -> _Entry | None:
    entry = _entries.get(id(owner))
    return entry if entry is not None and entry.owner() is owner else None


def _begin(owner: Any) -> _Entry | None:
    key = id(owner)

    def end(reference: object) -> None:
        entry = _entries.get(key)
        if entry is not None and entry.owner is reference:  # the address may be another object's by now
            del _entries[key]

    try:
        entry = _Entry(weakref.ref(owner, end), Identity(type(owner).__name__, next(_serials)), {}, {})
    except TypeError:
        return None
    former = _entries.setdefault(key, entry)
    if former.owner() is owner:  # another thread was faster
        return former
    _entries[key] = entry
    return entry


def _plain(value: Any) -> Any:
    """The value to keep, None where it would keep something else alive: a size that is a symbol, its program."""
    kind = type(value)
    if kind in (int, float, str, bool, Identity) or (kind.__module__ == "torch" and kind.__name__ in _KEPT_OF_TORCH):
        return value
    if is_a(value, tuple):
        parts = tuple(map(_plain, value))
        return None if None in parts else parts
    return None
