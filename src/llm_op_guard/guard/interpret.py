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
from llm_op_guard.guard.memory import Token, distrusting, forget, remember
from llm_op_guard.guard.plan import forgotten
from llm_op_guard.guard.reading import INAPPLICABLE, Broken, is_tracing, kept, path_value, snapshot
from llm_op_guard.guard.traced import comptime

# What answers for a call that is not accepted: (arguments or result, …) → the error to raise, if any.
Failed = Callable[[Any], GuardError | None]


def is_interpreted(contract: Contract) -> bool:
    """Whether a contract has a type that no source is written for."""
    return any(_has_list(declared) for declared in declared_types(contract))


def _has_list(declared: Type) -> bool:
    return any(isinstance(alternative, ListType) for alternative in declared.alternatives)


class InterpretedCheck:
    """The checks of one contract for the rules of these classes; they do what the generated ones do.

    `failed` and `failed_after` answer for a call that is not accepted: given the arguments, or the result, the state
    and the arguments, they return the error to raise, if any. `tally` counts checked calls, `jit_state` tells whether
    torch.jit.trace is at work. `notes` are those of the ledger, of arguments and of the result, where accepted.
    """

    def __init__(
        self,
        contract: Contract,
        parameters: tuple[str, ...],
        classes: frozenset[CostClass],
        *,
        failed: Failed,
        failed_after: Failed,
        tally: Callable[[], None],
        jit_state: Callable[[], Any],
        notes: tuple[Callable[[tuple[Any, ...]], Any], Callable[[Any, Any], None]],
    ) -> None:
        self._contract = contract
        self._parameters = parameters
        self._classes = classes
        self._failed = failed
        self._failed_after = failed_after
        self._tally = tally
        self._jit_state = jit_state
        self._note, self._note_result = notes
        judged = [clause for clause in contract.clauses if clause.cost_class in classes]
        self._is_awaited = any(clause.after_call for clause in judged)
        self._forgets = list(forgotten(judged))
        self._distrust = distrusting(self._forgets)

    def before(self, *arguments: Any) -> Any:
        """Check a call: takes the parameters, returns what the check after it needs."""
        if is_tracing():
            if self._forgets:
                comptime()(self._distrust)
            return None
        given = dict(zip(self._parameters, arguments, strict=True))
        if self._jit_state() is not None:
            self._forget(given)
            return None
        self._tally()
        try:
            violations = explain(self._contract, given, classes=self._classes)
            goes_on = not any(violation.certain for violation in violations)
            state = self._state(given, arguments) if goes_on and self._is_awaited else None
            accepted = not violations
        except Exception:  # what to make of it is decided where every other call that is not accepted goes
            accepted, state = False, None
        if not accepted and (error := self._failed(arguments)) is not None:
            raise error
        tokens = self._forget(given)
        call = self._note(arguments) if accepted else None
        return call if state is None else (*state, tokens)

    def after(self, result: Any, state: Any) -> None:
        """Check what was returned: takes it and what the check before the call returned."""
        if state is None:
            return
        arguments, known, at_entry, tokens = state
        given = {**dict(zip(self._parameters, arguments, strict=True)), "result": result}
        try:
            violations = explain(
                self._contract, given, classes=self._classes, after_call=True, known=known, at_entry=at_entry
            )
            goes_on = not any(violation.certain for violation in violations)
            accepted = not violations
            facts = list(facts_to_keep(self._contract, given, self._classes, known)) if goes_on else []
        except Exception:
            accepted, facts = False, []
        if not accepted and (error := self._failed_after((result, state, arguments))) is not None:
            raise error
        if accepted:
            self._note_result(result, None)
        for path, owner, names, values in facts:
            remember(owner, names, values, tokens.get((path, names)))

    def _forget(self, given: Mapping[str, Any]) -> dict[tuple[Path, tuple[str, ...]], Token]:
        return {
            (path, names): forget(path_value(given.get(path.root), *path.steps), names) for path, names in self._forgets
        }

    def _state(self, given: dict[str, Any], arguments: tuple[Any, ...]) -> Any:
        contract, classes = self._contract, self._classes
        clauses = [c for c in contract.clauses if not c.after_call and c.cost_class in classes]
        bindings = Bindings(contract, clauses, given, {}, after_call=False)
        bindings.collect()
        known = {**bindings.values.symbols, **{name: kept(v) for name, v in bindings.values.assigned.items()}}
        paths = [path for declared in declared_types(contract) for path in paths_in_type(declared)]
        at_entry = {path: snapshot(given.get(path.root), *path.steps) for path in paths if path.root != "result"}
        return arguments, known, at_entry


def facts_to_keep(
    contract: Contract, arguments: Mapping[str, Any], classes: frozenset[CostClass], known: Mapping[str, Any]
) -> Iterator[tuple[Path, Any, tuple[str, ...], dict[str, Any]]]:
    """What the statements `remember` of a contract keep after a call: of which object, where it was found, which
    names, and what is known.
    """
    clauses = [clause for clause in contract.clauses if clause.cost_class in classes]
    bindings = Bindings(contract, clauses, arguments, known, after_call=True)
    bindings.collect()
    for clause in clauses:
        statement = clause.statement
        if isinstance(statement, Remember) and bindings.applies(clause):
            facts = {}
            for name, expr in statement.facts:
                with contextlib.suppress(*INAPPLICABLE, Broken):
                    facts[name] = bindings.values.evaluate(expr)
            owner = path_value(arguments.get(statement.path.root), *statement.path.steps)
            yield statement.path, owner, tuple(name for name, _ in statement.facts), facts
