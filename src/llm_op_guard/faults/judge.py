"""What a contract says of a call that is data: which rules it breaks, which statements apply to it at all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from llm_op_guard.contract.model import Clause, Condition, Contract, Declare, Require
from llm_op_guard.faults.build import MOST_ELEMENTS, Unbuildable, build
from llm_op_guard.faults.entry import known_again
from llm_op_guard.frozen import frozen
from llm_op_guard.guard.bind import Bindings
from llm_op_guard.guard.call import Call
from llm_op_guard.guard.capture import Known
from llm_op_guard.guard.explain import Explanation
from llm_op_guard.guard.reading import INAPPLICABLE, Broken
from llm_op_guard.guard.violation import Violation


@frozen
class Judgement:
    """A call, the arguments that were made of it, and what `explain` says of them: before it, or of its result."""

    contract: Contract
    call: Call
    arguments: dict[str, Any]
    explanation: Explanation
    before: Known | None = None

    @cached_property
    def broken(self) -> tuple[str, ...]:
        """The ids of the rules that are broken."""
        return self.explanation.broken

    @cached_property
    def violations(self) -> tuple[Violation, ...]:
        """What is said of the broken rules."""
        return tuple(self.explanation.violations())

    @property
    def bindings(self) -> Bindings:
        """The symbols of the call."""
        return self.explanation.bindings

    def applied(self) -> Iterator[int]:
        """The numbers of the statements that have something to say about this call."""
        for number, clause in enumerate(self.contract.clauses):
            if not clause.after_call and self._applies(clause):
                yield number

    def away_from(self, clause: Clause) -> int:
        """How many parts of the conditions of a statement are not met, and one more where it still says nothing."""
        unmet = sum(self._missing(condition.test.node, condition.wanted) for condition in clause.conditions)
        return unmet + (not self._applies(clause))

    def away_from_breaking(self, clause: Clause) -> int:
        """How many parts of its conditions, and of what it requires, have to come out otherwise to break a rule."""
        unmet = sum(self._missing(condition.test.node, condition.wanted) for condition in clause.conditions)
        if isinstance(clause.statement, Require):
            return unmet + self._missing(clause.statement.expr.node, False)
        return unmet + 1

    def _missing(self, node: ast.expr, wanted: bool) -> int:
        """How many parts of a condition have to come out otherwise for it to come out as wanted.

        A part that does not apply is farther away than one that comes out otherwise.
        """
        match node:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._missing(operand, not wanted)
            case ast.BoolOp(op=op, values=parts):
                missing = [self._missing(part, wanted) for part in parts]
                return sum(missing) if isinstance(op, ast.And) is wanted else min(missing)
        try:
            return int(bool(self.bindings.values.value_of(node)) is not wanted)
        except Broken:
            return 1
        except INAPPLICABLE:
            return 2

    def first_unmet(self, clause: Clause) -> Condition | None:
        """The first of the conditions of a statement that is not met."""
        return next((condition for condition in clause.conditions if not self._met(condition)), None)

    def _met(self, condition: Condition) -> bool:
        return self.bindings.outcome(condition.test) is condition.wanted

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
    # Without elements, too: rows of none are still rows.
    if any(spec.device != "meta" and max(spec.shape, default=0) > MOST_ELEMENTS for _, spec in call.tensors()):
        return None
    try:
        arguments, before = build(call), known_again(contract, call)
    except Unbuildable:
        return None
    if before is None:
        return Judgement(contract, call, arguments, Explanation(contract, arguments))
    names, tensors = before
    found = Explanation(contract, arguments, after_call=True, known=names, at_entry=tensors)
    return Judgement(contract, call, arguments, found, before)
