"""Imported predicates (cost class C): those that were registered, and what they say when somebody asks.

Contract text imports nothing. A predicate is found here because its module registered it, or not at all; and only
where somebody hands `Answers` to `explain` is any of them called, which no guarded call does, save in tests:
`pytest --op-guard` switches it on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llm_op_guard.contract.model import Clause, Require
from llm_op_guard.guard.reading import SCALAR_TESTS, NotApplicable, plain

# By `module.name`.
_registered: dict[str, Callable[..., Any]] = {}
_in_calls = [False]


def switch(*, on: bool) -> None:
    """Have guarded calls ask predicates, or not any more. It is for whoever arms guards to have them do so."""
    _in_calls[0] = on


def in_calls() -> bool:
    """Whether guarded calls are to ask predicates."""
    return _in_calls[0]


def register(name: str, predicate: Callable[..., Any]) -> None:
    """Let contracts ask a predicate by `module.name`; one of that name is replaced."""
    _registered[name] = predicate


def registered() -> frozenset[str]:
    """The predicates that contracts can ask, as `module.name`."""
    return frozenset(_registered)


@dataclass
class Failure:
    """A predicate that gave no answer: how, with which error if any, and the statements that wanted one."""

    how: str
    error: Exception | None
    statements: list[str] = field(default_factory=list)


class Answers:
    """What predicates say about one call. Each is asked once for the same arguments, however many rules want to know.

    `failures` are the predicates that gave no answer, by `module.name`.
    """

    def __init__(self, imports: Mapping[str, str]) -> None:
        self.imports = imports
        self.failures: dict[str, Failure] = {}
        self._statement: str | None = None
        # With the arguments, since an identity is one only while the object lives.
        self._given: dict[Any, tuple[list[Any], Any]] = {}

    def about(self, clause: Clause | None) -> None:
        """From now on it is this statement that wants to know; with None it is no rule but a hint."""
        statement = None if clause is None else clause.statement
        self._statement = statement.id if isinstance(statement, Require) else statement.text if statement else None

    def ask(self, name: str, arguments: list[Any]) -> Any:
        """What the imported `name` says of these arguments; raises NotApplicable where it says nothing, or fails."""
        predicate = f"{self.imports[name]}.{name}"
        key = (predicate, *map(_identity, arguments))
        if key not in self._given:
            self._given[key] = (arguments, _answer(predicate, arguments))
        _, answer = self._given[key]
        if isinstance(answer, Failure):
            known = self.failures.setdefault(predicate, answer)
            if self._statement is not None and self._statement not in known.statements:
                known.statements.append(self._statement)
        if answer is None or isinstance(answer, Failure):
            raise NotApplicable
        return answer


def _answer(predicate: str, arguments: list[Any]) -> Any:
    try:
        answer = _registered[predicate](*arguments)
    except Exception as error:
        # Without its text, which may hold what stands in the arguments.
        return Failure(f"raised {type(error).__name__}", error)
    if SCALAR_TESTS["bool"](answer):
        return bool(answer)  # NumPy's too
    try:
        return plain(answer)
    except NotApplicable:
        kind = type(answer).__name__
        return Failure(f"returned a {kind}, which is no truth, number, text or tuple of these", None)


def _identity(value: Any) -> Any:
    """What makes two arguments the same: plain values are equal, anything else is one object."""
    if isinstance(value, tuple):
        return (type(value), *map(_identity, value))
    return (type(value), value) if type(value) in (int, float, str, bool) else id(value)
