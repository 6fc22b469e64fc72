"""What follows from statements that are kept: how a condition never comes out beside them.

What is said here is so for sure; much that follows is not seen. Conditions are compared by their text, and by what they
say that one and the same expression can be.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import reduce

from llm_op_guard.contract.declared import Declared
from llm_op_guard.contract.expressions import names_in
from llm_op_guard.contract.model import Clause, Condition, Contract, Declare, Require
from llm_op_guard.contract.outcomes import Judge, State, Steps
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.possible import Possible

# What is known of a call: a statement that it keeps, or a test of a branch that it takes.
Known = Clause | Condition

# Fifty times what the largest contract that is shipped takes.
_MOST_STEPS = 50_000
# No more are tried one by one to find those that are needed.
_MOST_WEIGHED = 20
# `a != b` is true where `a == b` is false.
_NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.NotEq: ast.Eq, ast.IsNot: ast.Is, ast.NotIn: ast.In}


class Implications:
    """What follows from the statements of one contract. Its methods raise TooMuch where that would take too long."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._steps = Steps(_MOST_STEPS)
        self._declared = Declared(contract)
        self._texts: dict[ast.expr, tuple[str, bool]] = {}
        self._said: dict[int, set[tuple[str, bool]]] = {}
        self._names: dict[int, set[str]] = {}

    def excludes(self, known: Sequence[Known], node: ast.expr, outcome: bool) -> tuple[Known, ...] | None:
        """The few that are known which keep a condition from coming out so; None where it may come out so."""
        names = names_in(node)
        about = [one for one in known if not self._names_of(one).isdisjoint(names)]
        # Types first: what they say is known from the start.
        about.sort(key=lambda one: _declaration(one) is None)
        needed = self._excluded(node, outcome, about)
        if needed is None:
            return None
        few = about[:needed]
        if self._excluded(node, outcome, few[-1:]) is not None:
            few = few[-1:]
        for one in few[-_MOST_WEIGHED:]:
            rest = [other for other in few if other is not one]
            if self._excluded(node, outcome, rest) is not None:
                few = rest
        return tuple(one for one in known if any(one is other for other in few))

    def repeats(self, known: Sequence[Known], node: ast.expr, outcome: bool) -> tuple[Known, ...] | None:
        """The one that says by the same words that a condition does not come out so, even by an error; else None."""
        text = self._text(node, outcome)
        return next(((one,) for one in known if text in self._ruled_out(one)), None)

    def always_applies(self, known: Sequence[Known], node: ast.expr) -> bool:
        """Whether a condition is true or false for every call of which this is known."""
        return self._judge(known).outcomes(node).inapplicable is None

    # ------------------------------------------------------------ by words and by values

    def _excluded(self, node: ast.expr, outcome: bool, known: Sequence[Known]) -> int | None:
        """How many of those that are known, from the first on, keep a condition from coming out so; else None."""
        self._steps.take()
        text = self._text(node, outcome)
        for number, one in enumerate(known, 1):
            if text in self._ruled_out(one):
                return number
        match node:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._excluded(operand, not outcome, known)
            case ast.BoolOp(op=op, values=parts):
                counts = [self._excluded(part, outcome, known) for part in parts]
                needed = [count for count in counts if count is not None]
                # a and b is false where one of them is, true where both are.
                if isinstance(op, ast.And) is outcome and needed:
                    return min(needed)
                if len(needed) == len(parts):
                    return max(needed)
        return self._left_no_value(node, outcome, known)

    def _left_no_value(self, node: ast.expr, outcome: bool, known: Sequence[Known]) -> int | None:
        judge = self._judge(known)
        outcomes = judge.outcomes(node)
        state: State | None = outcomes.true if outcome else outcomes.false
        types = sum(_declaration(one) is not None for one in known)
        if state is None:
            return types
        for count, one in enumerate(known[types:], types + 1):
            if isinstance(one, Condition):
                outcomes = judge.outcomes(one.test.node, state)
                state = outcomes.true if one.wanted else outcomes.false
            elif isinstance(one.statement, Require):
                state = judge.outcomes(one.statement.expr.node, state).kept
            if state is None:
                return count
        return None

    def _judge(self, known: Sequence[Known]) -> Judge:
        declared = [declaration for one in known if (declaration := _declaration(one)) is not None]

        def of_path(path: Path) -> Possible:
            values = [value for d in declared if (value := self._declared.told(path, d)) is not None]
            return reduce(Possible.meet, values, self._declared.by_itself(path))

        return Judge(of_path, self._contract, self._steps)

    # ------------------------------------------------------------ what is known

    def _names_of(self, known: Known) -> set[str]:
        if id(known) not in self._names:
            if isinstance(known, Condition):
                names = set(names_in(known.test.node))
            elif isinstance(known.statement, Declare):
                names = self._declared.names(known.statement)
            else:
                names = set(names_in(known.statement.expr.node)) if isinstance(known.statement, Require) else set()
            self._names[id(known)] = names
        return self._names[id(known)]

    def _ruled_out(self, known: Known) -> set[tuple[str, bool]]:
        """The conditions that do not come out so where this is known, each with the outcome that it has not."""
        if id(known) not in self._said:
            found: set[tuple[str, bool]] = set()
            if isinstance(known, Condition):
                found = {self._text(part, not truth) for part, truth in settled(known.test.node, known.wanted)}
            elif isinstance(known.statement, Require):
                found = {self._text(part, not truth) for part, truth in _first(known.statement.expr.node, truth=True)}
            self._said[id(known)] = found
        return self._said[id(known)]

    def _text(self, node: ast.expr, outcome: bool) -> tuple[str, bool]:
        """A condition without `not` and `!=`, with what is then its outcome."""
        if node not in self._texts:
            whole, is_so = node, True
            while isinstance(whole, ast.UnaryOp) and isinstance(whole.op, ast.Not):
                whole, is_so = whole.operand, not is_so
            match whole:
                case ast.Compare(left=left, ops=[op], comparators=right) if type(op) in _NEGATED:
                    whole, is_so = ast.Compare(left, [_NEGATED[type(op)]()], right), not is_so
            self._texts[node] = ast.unparse(whole), is_so
        text, is_so = self._texts[node]
        return text, outcome is is_so


def _declaration(known: Known) -> Declare | None:
    return known.statement if isinstance(known, Clause) and isinstance(known.statement, Declare) else None


def may_break(node: ast.expr) -> bool:
    """Whether an expression may have no value because the call is wrong: a division by zero, or with a rest."""
    for part in ast.walk(node):
        match part:
            case ast.BinOp(op=ast.FloorDiv() | ast.Mod(), right=ast.Constant(value=int() as divisor)):
                if divisor == 0:
                    return True
            case ast.BinOp(op=ast.Pow(), right=ast.Constant(value=int())):
                pass
            case ast.BinOp(op=ast.Div() | ast.FloorDiv() | ast.Mod() | ast.Pow()):
                return True
            case ast.Call(func=ast.Name(id="ceildiv"), args=[_, ast.Constant(value=int() as divisor)]):
                if divisor == 0:
                    return True
            case ast.Call(func=ast.Name(id="ceildiv")):
                return True
    return False


def settled(node: ast.expr, truth: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The parts of a test that came out so, each with how it came out for certain."""
    yield node, truth
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from settled(operand, not truth)
        case ast.BoolOp(op=op, values=parts) if isinstance(op, ast.And) is truth:
            for part in parts:
                yield from settled(part, truth)


def _first(node: ast.expr, *, truth: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The parts of a rule that is kept, each with the outcome that it has if it has one: those looked at first.

    A later part is not looked at where an earlier one does not apply.
    """
    yield node, truth
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _first(operand, truth=not truth)
        case ast.BoolOp(op=op, values=parts) if isinstance(op, ast.And) is truth:
            yield from _first(parts[0], truth=truth)
