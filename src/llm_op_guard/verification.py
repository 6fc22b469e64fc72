"""A contract held against arguments where nothing is called: every rule that needs no result, of every cost class."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from llm_op_guard.contract.expressions import suggestion
from llm_op_guard.contract.model import Contract
from llm_op_guard.errors import GuardError, GuardWarning, PredicateError
from llm_op_guard.guard.asked import Answers, registered
from llm_op_guard.guard.context import any_beyond
from llm_op_guard.guard.explain import explain
from llm_op_guard.guard.guard import warn_of_inside
from llm_op_guard.guard.reading import UNSET
from llm_op_guard.guard.violation import Violation
from llm_op_guard.log import log
from llm_op_guard.policy import is_off
from llm_op_guard.report.dispatch import Dispatcher


class Verification:
    """One contract, outside of any call. `operator` and `site` are what reports call it.

    Raises PredicateError where the contract asks a predicate that nobody registered.
    """

    def __init__(self, contract: Contract, *, operator: str, site: str, dispatcher: Dispatcher) -> None:
        known = registered()
        for name, module in contract.imports.items():
            if f"{module}.{name}" not in known:
                siblings = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == module]
                raise PredicateError(
                    f"the contract {contract.id} asks {module}.{name}, which nobody registered"
                    f"{suggestion(name, siblings)}; import {module} first, and decorate the function with @og.predicate"
                )
        self.contract = contract
        self.operator = operator
        self.site = site
        self.dispatcher = dispatcher

    def broken(self, arguments: Mapping[str, Any], others: tuple[Violation, ...] = ()) -> GuardError | None:
        """The error for arguments that break a certain rule; suspect rules warn, and all are recorded.

        `others` are violations that are known already. Nothing is judged while guards are switched off.
        """
        if is_off():
            return None
        found = [*others, *self._judged(arguments)]
        return self.dispatcher.verified(self, found, arguments) if found else None

    def asked_in_a_call(self, arguments: Mapping[str, Any]) -> GuardError | None:
        """As `broken`, of the rules that ask predicates alone: a guard judges the others."""
        found = [] if is_off() else [violation for violation in self._judged(arguments) if violation.cost_class == "C"]
        return self.dispatcher.verified(self, found, arguments) if found else None

    def _judged(self, arguments: Mapping[str, Any]) -> list[Violation]:
        answers = Answers(self.contract.imports)
        try:
            if any_beyond(self.contract, arguments):
                return []
            found = explain(self.contract, arguments, classes=("A", "B", "C"), answers=answers)
        except Exception as error:
            message = (
                f"llm-op-guard failed while verifying {self.site} ({type(error).__name__}), so nothing of it was "
                f"judged. This is a fault of llm-op-guard, not of the arguments."
            )
            _say(message, error)
            return []
        for predicate, failure in answers.failures.items():
            rules = ", ".join(failure.statements)
            lost = f"so these are not judged: {rules}" if rules else "so a hint is left out"
            _say(f"the predicate {predicate}, which {self.site} asks, {failure.how}, {lost}", failure.error)
        return found


def asking(
    contract: Contract, *, operator: str, site: str, dispatcher: Dispatcher
) -> Callable[[Mapping[str, Any]], GuardError | None] | None:
    """What asks the predicates of a contract in its guard's calls; None where it has none.

    They are looked up at the first call, when whoever offers them has been imported; one that nobody registered is a
    GuardWarning, given once.
    """
    if all(clause.cost_class != "C" for clause in contract.clauses):
        return None
    made: list[Verification | None] = []

    def ask(arguments: Mapping[str, Any]) -> GuardError | None:
        if not made:
            try:
                made.append(Verification(contract, operator=operator, site=site, dispatcher=dispatcher))
            except PredicateError as error:
                made.append(None)
                warnings.warn(GuardWarning(f"{error}; until then its rules of class C are not judged"), stacklevel=2)
        return made[0].asked_in_a_call(arguments) if made[0] is not None else None

    return ask


def _say(message: str, error: Exception | None) -> None:
    log().warning("%s", message)
    log().debug("this was the error", exc_info=error)  # its text may hold what stands in the arguments
    warn_of_inside(message)


def bound(signature: inspect.Signature, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by parameter, defaults included. Raises TypeError where they do not fit, as the call."""
    try:
        call = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    call.apply_defaults()
    return {parameter: value for parameter, value in call.arguments.items() if value is not UNSET}
