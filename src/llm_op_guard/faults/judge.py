"""What a contract says of a call that is data: which rules it breaks, which statements apply to it at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llm_op_guard.contract.model import Clause, Condition, Contract, Declare, Require
from llm_op_guard.faults.build import build
from llm_op_guard.faults.entry import known_again
from llm_op_guard.guard.bind import Bindings
from llm_op_guard.guard.call import Call
from llm_op_guard.guard.capture import Known
from llm_op_guard.guard.explain import explain
from llm_op_guard.guard.reading import INAPPLICABLE, Broken
from llm_op_guard.guard.violation import Violation


@dataclass(frozen=True)
class Judgement:
    """A call, the arguments that were made of it, and what `explain` says of them: before it, or of its result."""

    contract: Contract
    call: Call
    arguments: dict[str, Any]
    violations: tuple[Violation, ...]
    before: Known | None = None

    @property
    def broken(self) -> tuple[str, ...]:
        """The ids of the rules that are broken."""
        return tuple(dict.fromkeys(violation.rule_id for violation in self.violations))

    @cached_property
    def bindings(self) -> Bindings:
        """The symbols of the call."""
        has_returned = self.before is not None
        clauses = [clause for clause in self.contract.clauses if has_returned or not clause.after_call]
        known = self.before.names if self.before is not None else {}
        found = Bindings(self.contract, clauses, self.arguments, known, has_returned)
        found.collect()
        return found

    def applied(self) -> Iterator[int]:
        """The numbers of the statements that have something to say about this call."""
        for number, clause in enumerate(self.contract.clauses):
            if not clause.after_call and self._applies(clause):
                yield number

    def away_from(self, clause: Clause) -> int:
        """How many of the conditions of a statement are not met, and one more where it still says nothing."""
        unmet = sum(not self._met(condition) for condition in clause.conditions)
        return unmet + (not self._applies(clause))

    def first_unmet(self, clause: Clause) -> Condition | None:
        """The first of the conditions of a statement that is not met."""
        return next((condition for condition in clause.conditions if not self._met(condition)), None)

    def _met(self, condition: Condition) -> bool:
        try:
            return bool(self.bindings.values.evaluate(condition.test)) is condition.wanted
        except (Broken, *INAPPLICABLE):
            return False

    def _applies(self, clause: Clause) -> bool:
        values = self.bindings.values
        if not all(self._met(condition) for condition in clause.conditions):
            return False
        try:
            if isinstance(clause.statement, Declare):
                return values.path(clause.statement.path) is not None
            if isinstance(clause.statement, Require):
                values.evaluate(clause.statement.expr)
        except Broken:
            return True
        except INAPPLICABLE:
            return False
        return True


def judge(contract: Contract, call: Call) -> Judgement | None:
    """What the contract says of a call; None for a call that cannot be made on this machine."""
    try:
        arguments, before = build(call), known_again(contract, call)
    except (RuntimeError, ValueError, TypeError, OverflowError, MemoryError, AttributeError, AssertionError):
        return None
    if before is None:
        return Judgement(contract, call, arguments, tuple(explain(contract, arguments)))
    names, tensors = before
    found = explain(contract, arguments, after_call=True, known=names, at_entry=tensors)
    return Judgement(contract, call, arguments, tuple(found), before)
