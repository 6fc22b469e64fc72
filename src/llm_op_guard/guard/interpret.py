"""Checks for contracts that are not written as source: `explain` itself decides at every call.

Lists of tensors are of that kind: how many sightings of a symbol there are is known only at the call. Slower than a
compiled check by an order of magnitude, and right by definition. They step aside while a program is traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llm_op_guard.contract.model import Contract, CostClass, ListType, Remember, Type
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.walk import declared_types, paths_in_type
from llm_op_guard.errors import GuardError
from llm_op_guard.guard.bind import Bindings
from llm_op_guard.guard.explain import explain
from llm_op_guard.guard.memory import forget, remember
from llm_op_guard.guard.plan import forgotten
from llm_op_guard.guard.reading import INAPPLICABLE, Broken, is_tracing, kept, path_value, snapshot

# What answers for a call that is not accepted: (arguments or result, …) → the error to raise, if any.
Failed = Callable[[Any], GuardError | None]


def is_interpreted(contract: Contract) -> bool:
    """Whether a contract has a type that no source is written for."""
    return any(_has_list(declared) for declared in declared_types(contract))


def _has_list(declared: Type) -> bool:
    return any(isinstance(alternative, ListType) for alternative in declared.alternatives)


def interpreted_check(
    contract: Contract, parameters: tuple[str, ...], classes: frozenset[CostClass], failed: Failed
) -> Callable[..., Any]:
    """The check before the call: takes the parameters, returns what the check after it needs."""
    judged = [clause for clause in contract.clauses if clause.cost_class in classes]
    later = any(clause.after_call for clause in judged)
    forgets = list(forgotten(judged))

    def check(*arguments: Any) -> Any:
        if is_tracing():
            return None
        given = dict(zip(parameters, arguments, strict=True))
        try:
            accepted = not explain(contract, given, classes=classes)
            state = _state(contract, given, arguments, classes) if accepted and later else None
        except Exception:  # what to make of it is decided where every other call that is not accepted goes
            accepted, state = False, None
        if not accepted and (error := failed(arguments)) is not None:
            raise error
        for path, names in forgets:
            forget(path_value(given.get(path.root), *path.steps), names)
        return state

    return check


def interpreted_check_after(
    contract: Contract, parameters: tuple[str, ...], classes: frozenset[CostClass], failed: Failed
) -> Callable[..., None]:
    """The check after the call: takes the result and what the check before it returned."""

    def check(result: Any, state: Any) -> None:
        if state is None:
            return
        arguments, known, at_entry = state
        given = {**dict(zip(parameters, arguments, strict=True)), "result": result}
        try:
            accepted = not explain(contract, given, classes=classes, after_call=True, known=known, at_entry=at_entry)
        except Exception:
            accepted = False
        if accepted:
            for owner, names, facts in facts_to_keep(contract, given, classes, known):
                remember(owner, names, facts)
        elif (error := failed((result, state, arguments))) is not None:
            raise error

    return check


def facts_to_keep(
    contract: Contract, arguments: Mapping[str, Any], classes: frozenset[CostClass], known: Mapping[str, Any]
) -> Iterator[tuple[Any, tuple[str, ...], dict[str, Any]]]:
    """What the statements `remember` of a contract keep after a call: of which object, which names, what is known."""
    bindings = Bindings(contract, list(contract.clauses), arguments, known, after_call=True)
    bindings.collect()
    for clause in contract.clauses:
        statement = clause.statement
        if isinstance(statement, Remember) and clause.cost_class in classes and bindings.applies(clause):
            facts = {}
            for name, expr in statement.facts:
                with contextlib.suppress(*INAPPLICABLE, Broken):
                    facts[name] = bindings.values.evaluate(expr)
            owner = path_value(arguments.get(statement.path.root), *statement.path.steps)
            yield owner, tuple(name for name, _ in statement.facts), facts


def _state(contract: Contract, given: dict[str, Any], arguments: tuple[Any, ...], classes: frozenset[CostClass]) -> Any:
    clauses = [clause for clause in contract.clauses if clause.cost_class in classes and not clause.after_call]
    bindings = Bindings(contract, clauses, given, {}, after_call=False)
    bindings.collect()
    known = {**bindings.values.symbols, **{name: kept(v) for name, v in bindings.values.assigned.items()}}
    return arguments, known, {path: snapshot(given.get(path.root), *path.steps) for path in _entry_paths(contract)}


def _entry_paths(contract: Contract) -> list[Path]:
    return [path for declared in declared_types(contract) for path in paths_in_type(declared) if path.root != "result"]
