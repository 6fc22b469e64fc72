"""How a condition can come out, given what its parts can be: true, false, or not applicable.

What is said of one outcome holds for every call that has it, and perhaps for more calls. A condition that divides by
zero, or whose division leaves a rest, has none of the three: that breaks the rule.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from llm_op_guard.contract.model import Contract, DtypeSet
from llm_op_guard.contract.path import Path, path_of
from llm_op_guard.contract.possible import (
    ABSENT,
    ALL_NUMBERS,
    ANYTHING,
    NO_NAMES,
    NO_NUMBERS,
    OTHER,
    SIZES,
    TRUTHS,
    UNREAD,
    WHOLE,
    Names,
    Numbers,
    Possible,
    joined,
)
from llm_op_guard.contract.vocabulary import DTYPE_NAMES, DTYPE_SETS, dtype_names

# What expressions can be, by their text: where it is less than what they can be by themselves.
State = Mapping[str, Possible]
_NOTHING: State = MappingProxyType({})

# Larger conditions are taken to come out in any way, larger parts of one to be anything; no real rule is as large.
_LARGEST_CONDITION = 1000
_LARGEST_PART = 40
# Enough for hundreds of statements, and done in a second or two.
_MOST_STEPS = 100_000


class TooMuch(Exception):  # noqa: N818 - not an error: of such a contract nothing is said
    """The contract is larger than what is looked at."""


class Steps:
    """How much has been looked at."""

    def __init__(self, most: int = _MOST_STEPS) -> None:
        self._left = most

    def take(self) -> None:
        """Count one; raises TooMuch where that is enough."""
        self._left -= 1
        if self._left < 0:
            raise TooMuch


class Outcomes(NamedTuple):
    """What holds where a condition is true, false or not applicable; None where it never is."""

    true: State | None
    false: State | None
    inapplicable: State | None

    @property
    def kept(self) -> State | None:
        """What holds where a rule with this condition is not broken."""
        return _either(self.true, self.inapplicable)

    @property
    def negated(self) -> Outcomes:
        """The outcomes of `not`."""
        return Outcomes(self.false, self.true, self.inapplicable)

    def then(self, other: Outcomes) -> Outcomes:
        """The outcomes of `and`, where the other ones are of its right side, looked at where the left one is true."""
        return Outcomes(other.true, _either(self.false, other.false), _either(self.inapplicable, other.inapplicable))


_NEVER = Outcomes(None, None, None)


class Judge:
    """Judges conditions by what the paths in them can be.

    `of_path` tells that of a path.
    """

    def __init__(self, of_path: Callable[[Path], Possible], contract: Contract, steps: Steps) -> None:
        self._of_path = of_path
        self._parameters = frozenset(contract.parameters)  # these always have a value
        self._own = self._parameters | contract.assigned | frozenset(contract.constants)
        self._steps = steps
        self._texts: dict[ast.expr, str | None] = {}

    def outcomes(self, condition: ast.expr, state: State | None = _NOTHING) -> Outcomes:
        """How a condition can come out where this is known besides. Raises TooMuch."""
        if not _is_small(condition, _LARGEST_CONDITION):
            return Outcomes(state, state, state)
        return self._outcomes(condition, state)

    # ------------------------------------------------------------ conditions

    def _outcomes(self, node: ast.expr, state: State | None) -> Outcomes:
        if state is None:
            return _NEVER
        match node:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._outcomes(operand, state).negated
            case ast.BoolOp(op=op, values=parts):
                # a or b: not (not a and not b)
                found = Outcomes(state, None, None)
                for part in parts:
                    outcomes = self._outcomes(part, found.true)
                    found = found.then(outcomes if isinstance(op, ast.And) else outcomes.negated)
                return found if isinstance(op, ast.And) else found.negated
            case ast.IfExp(test=test, body=body, orelse=orelse):
                choice = self._outcomes(test, state)
                one, other = self._outcomes(body, choice.true), self._outcomes(orelse, choice.false)
                either = Outcomes(*map(_either, one, other))
                return either._replace(inapplicable=_either(choice.inapplicable, either.inapplicable))
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[right]):
                outcomes = self._identity(left, right, state)
                return outcomes if isinstance(op, ast.Is) else outcomes.negated
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                found = Outcomes(state, None, None)
                for operator, right in zip(ops, comparators, strict=True):
                    found = found.then(self._comparison(operator, left, right, found.true))
                    left = right
                return found
            case ast.Call(func=ast.Name(id="has"), args=[argument]):
                return self._has(argument, state)
        value = self._value(node, state)
        truthy = replace(value.minus(Possible.of(0)).there, texts=value.texts.minus(""), none=False)
        falsy = Possible(value.numbers.meet(Numbers(frozenset({0}))), value.texts.meet(Names(frozenset({""}))))
        return Outcomes(
            self._known(state, node, truthy),
            self._known(state, node, replace(falsy, none=value.none, other=value.other)),
            self._known(state, node, value.meet(UNREAD)),
        )

    def _has(self, argument: ast.expr, state: State) -> Outcomes:
        value = self._value(argument, state)
        absent = Possible(none=value.none, absent=value.absent and not self._is_there(argument))
        return Outcomes(
            self._known(state, argument, replace(value.there, none=False)),
            self._known(state, argument, absent),
            self._known(state, argument, absent.meet(ABSENT)),  # of a name that has no value
        )

    def _identity(self, left: ast.expr, right: ast.expr, state: State) -> Outcomes:
        """`is None`, `is True`, `is False`: asked of whatever is there."""
        value, wanted = self._value(left, state), self._value(right, state)
        return Outcomes(
            self._known(state, left, value.meet(wanted)),
            self._known(state, left, replace(value.there, none=value.none and not wanted.none)),
            None if self._is_there(left) else self._known(state, left, value.meet(ABSENT)),
        )

    def _comparison(self, op: ast.cmpop, left: ast.expr, right: ast.expr, state: State | None) -> Outcomes:
        if state is None:
            return _NEVER
        match op:
            case ast.Eq():
                return self._equality(left, right, state)
            case ast.NotEq():
                return self._equality(left, right, state).negated
            case ast.Lt() | ast.LtE():
                return self._order(left, right, state, strict=isinstance(op, ast.Lt))
            case ast.Gt() | ast.GtE():
                return self._order(right, left, state, strict=isinstance(op, ast.Gt))
            case ast.In():
                return self._membership(left, right, state)
            case ast.NotIn():
                return self._membership(left, right, state).negated
        return Outcomes(state, state, state)

    def _equality(self, left: ast.expr, right: ast.expr, state: State) -> Outcomes:
        a, b = self._compared(left, state), self._compared(right, state)
        both = a.meet(b).there
        both = replace(both, numbers=replace(both.numbers, nan=False))
        return Outcomes(
            self._known2(state, (left, both), (right, both)),
            self._known2(state, (left, a.minus(b).there), (right, b.minus(a).there)),
            self._unread((left, a), (right, b), state),
        )

    def _compared(self, node: ast.expr, state: State) -> Possible:
        """What is compared can be: something that is read and is None is as good as absent."""
        value = self._value(node, state)
        read = isinstance(node, ast.Name | ast.Attribute | ast.Subscript)
        return replace(value, none=False, absent=True) if read and value.none else value

    def _unread(self, left: tuple[ast.expr, Possible], right: tuple[ast.expr, Possible], state: State) -> State | None:
        """What holds where one of two has no value that is compared."""
        (one, a), (two, b) = left, right
        a, b = a.meet(UNREAD), b.meet(UNREAD)
        return state if not a.is_empty and not b.is_empty else self._known(state, one, a) or self._known(state, two, b)

    def _order(self, low: ast.expr, high: ast.expr, state: State, *, strict: bool) -> Outcomes:
        """`low < high`; where not `strict`, `low <= high`."""
        a, b = self._compared(low, state), self._compared(high, state)
        below, above = _ordered(a, b, strict=strict)
        not_above, not_below = _ordered(b, a, strict=not strict)
        if not b.numbers.is_empty and a.numbers.nan:  # NaN is neither below nor above
            not_below = replace(not_below, numbers=replace(not_below.numbers, nan=True))
            not_above = replace(not_above, numbers=b.numbers)
        if not a.numbers.is_empty and b.numbers.nan:
            not_above = replace(not_above, numbers=replace(not_above.numbers, nan=True))
            not_below = replace(not_below, numbers=a.numbers)
        incomparable: State | None = state
        if a.only_numbers and not b.is_empty:
            incomparable = self._known(state, high, replace(b, numbers=NO_NUMBERS))
        elif b.only_numbers and not a.is_empty:
            incomparable = self._known(state, low, replace(a, numbers=NO_NUMBERS))
        return Outcomes(
            self._known2(state, (low, below), (high, above)),
            self._known2(state, (low, not_below), (high, not_above)),
            incomparable,
        )

    def _membership(self, left: ast.expr, right: ast.expr, state: State) -> Outcomes:
        value = self._compared(left, state)
        items = right.elts if isinstance(right, ast.Tuple | ast.List) else [right]
        members: list[Possible] = []
        for item in items:
            if isinstance(item, ast.Name) and item.id in DTYPE_SETS:
                members += [Possible.of_dtype(known) for known in dtype_names(DtypeSet(item.id))]
            elif item is right or isinstance(item, ast.Starred):
                return Outcomes(state, state, state)
            else:
                members.append(self._value(item, state))
        rest = value
        for member in members[:_LARGEST_PART]:
            rest = rest.minus(member)
        return Outcomes(
            self._known(state, left, value.meet(joined(members)).there),
            self._known(state, left, rest.there),
            state if any(m.other or m.absent for m in members) else self._known(state, left, value.meet(UNREAD)),
        )

    # ------------------------------------------------------------ what is known

    def _known(self, state: State | None, node: ast.expr, value: Possible) -> State | None:
        """The state in which an expression is also known to have one of these values; None where it has none."""
        if state is None or value.is_empty:
            return None
        text = self._text(node)
        if text is None:
            return state
        state = {**state, text: value}
        match node:
            case ast.BinOp(left=left, op=ast.Mod(), right=ast.Constant(value=int() as step)) if value.only_numbers:
                rest, left_value = value.numbers.only, self._value(left, state)
                if step > 0 and isinstance(rest, int) and left_value.numbers.is_whole:
                    alike = Possible(left_value.numbers.meet(Numbers(whole=True, step=step, rest=rest % step)))
                    return self._known(state, left, alike)
        return state

    def _known2(self, state: State, one: tuple[ast.expr, Possible], two: tuple[ast.expr, Possible]) -> State | None:
        return self._known(self._known(state, *one), *two)

    def _text(self, node: ast.expr) -> str | None:
        """What an expression is known by, None for one of which nothing has to be remembered."""
        if node not in self._texts:
            is_known = isinstance(node, ast.Constant) or not _is_small(node, _LARGEST_PART)
            self._texts[node] = None if is_known else ast.unparse(node)
        return self._texts[node]

    def _is_there(self, node: ast.expr) -> bool:
        """Whether an expression is a parameter, which always has a value."""
        return isinstance(node, ast.Name) and node.id in self._parameters

    # ------------------------------------------------------------ values

    def _value(self, node: ast.expr, state: State) -> Possible:
        self._steps.take()
        value = self._by_itself(node, state)
        text = self._text(node)
        return value.meet(state[text]) if text is not None and text in state else value

    def _by_itself(self, node: ast.expr, state: State) -> Possible:
        match node:
            case ast.Constant(value=value):
                return Possible.of(value)
            case ast.Name(id=name) if name in DTYPE_NAMES and name not in self._own:
                return Possible.of_dtype(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return _negative(self._value(operand, state))
            case ast.UnaryOp(op=ast.Not()) | ast.Compare():
                return Possible(TRUTHS, absent=True)
            case ast.BinOp(left=left, op=op, right=right):
                return _computed(op, self._value(left, state), self._value(right, state))
            case ast.IfExp(body=body, orelse=orelse):
                return joined([self._value(body, state), self._value(orelse, state), ABSENT])
            case ast.Tuple() | ast.List():
                return OTHER
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return self._called(name, arguments, state)
        path = path_of(node)
        return ANYTHING if path is None else self._of_path(path)

    def _called(self, name: str, arguments: list[ast.expr], state: State) -> Possible:
        size = Possible(SIZES, absent=True)
        match name, arguments:
            case "len", [ast.Attribute(value=owner, attr="shape")] if (path := path_of(owner)) is not None:
                return self._of_path(Path(path.root, (*path.steps, "ndim"))).meet(size)
            case (("len" | "numel" | "count" | "stride"), _):
                return size
            case "abs", [argument]:
                value = self._value(argument, state)
                absolute = Numbers(low=0, whole=value.numbers.is_whole, nan=value.numbers.nan)
                return Possible(NO_NUMBERS if value.numbers.is_empty else absolute, absent=True)
            case "ceildiv", [_, divisor] if self._value(divisor, state).numbers.only == 0:
                return ABSENT
        return ANYTHING


# ---------------------------------------------------------------- parts


def _is_small(node: ast.expr, most: int) -> bool:
    return all(count < most for count, _ in enumerate(ast.walk(node)))


def _either(one: State | None, other: State | None) -> State | None:
    """What holds in one of two states, or in both."""
    if one is None or other is None:
        return other if one is None else one
    few, many = (one, other) if len(one) < len(other) else (other, one)
    return {text: value.join(many[text]) for text, value in few.items() if text in many}


def _ordered(a: Possible, b: Possible, *, strict: bool) -> tuple[Possible, Possible]:
    """What two can be where the first is below the second: numbers with numbers, texts with texts."""
    (low, low_open), (high, high_open) = a.numbers.lower, b.numbers.upper
    below = a.numbers.meet(Numbers(high=high, high_open=strict or high_open))
    above = b.numbers.meet(Numbers(low=low, low_open=strict or low_open))
    numbers = not a.numbers.is_empty and not b.numbers.is_empty
    texts = not a.texts.is_empty and not b.texts.is_empty
    return tuple(  # type: ignore[return-value]
        Possible(
            some if numbers else NO_NUMBERS,
            value.texts if texts else NO_NAMES,
            other=a.other and b.other,  # tuples
        )
        for some, value in ((below, a), (above, b))
    )


def _negative(value: Possible) -> Possible:
    numbers = value.numbers
    if numbers.few is not None:
        turned = replace(numbers, few=frozenset(-number for number in numbers.few))
    else:
        turned = Numbers(
            low=None if numbers.high is None else -numbers.high,
            high=None if numbers.low is None else -numbers.low,
            low_open=numbers.high_open,
            high_open=numbers.low_open,
            whole=numbers.whole,
            nan=numbers.nan,
        )
    return Possible(turned, absent=not value.only_numbers)


def _computed(op: ast.operator, a: Possible, b: Possible) -> Possible:
    """The values of `a op b`. Only those of whole numbers are told exactly: others are rounded."""
    if isinstance(op, ast.Add) and not a.texts.is_empty and not b.texts.is_empty:
        return ANYTHING
    numbers = NO_NUMBERS
    exact = a.numbers.is_whole and b.numbers.is_whole
    zero = b.numbers.only == 0 and isinstance(op, ast.Div | ast.FloorDiv | ast.Mod)
    if not a.numbers.is_empty and not b.numbers.is_empty and not zero:
        match op:
            case ast.Mod() if (step := b.numbers.only) is not None:
                numbers = _rests(step, exact=exact)
            case ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv() | ast.Mod() | ast.Div() if exact:
                numbers = _whole(op, a.numbers, b.numbers)
            case _:
                numbers = ALL_NUMBERS
    exact = exact and a.only_numbers and b.only_numbers and not isinstance(op, ast.Pow)
    return Possible(numbers, other=isinstance(op, ast.Add) and a.other and b.other, absent=not exact)


def _rests(step: int | float, *, exact: bool) -> Numbers:
    """What `n % step` can be; a rest of a float may be rounded up to the step."""
    low, high = (0, step) if step > 0 else (step, 0)
    found = Numbers(
        low=low, high=high, low_open=exact and step < 0, high_open=exact and step > 0, whole=exact, nan=not exact
    )
    return found.meet(WHOLE) if exact else found


def _whole(op: ast.operator, a: Numbers, b: Numbers) -> Numbers:
    """The values of `a op b` for whole numbers; of a product or quotient, those with one number."""
    if isinstance(op, ast.Sub):
        return _whole(ast.Add(), a, _negative(Possible(b)).numbers)
    (a_low, _), (a_high, _), (b_low, _), (b_high, _) = a.lower, a.upper, b.lower, b.upper
    low: int | float | None = None
    high: int | float | None = None
    step, rest = 1, 0
    if isinstance(op, ast.Add):
        low = None if a_low is None or b_low is None else a_low + b_low
        high = None if a_high is None or b_high is None else a_high + b_high
    elif isinstance(op, ast.Mult) and a.only is not None and b.only is None:
        return _whole(op, b, a)
    elif isinstance(op, ast.Mult) and b.only is not None:
        ends = [None if end is None else end * b.only for end in (a_low, a_high)]
        low, high = ends if b.only >= 0 else reversed(ends)
        step = abs(int(b.only)) or 1
    elif isinstance(op, ast.FloorDiv) and b.only is not None:
        ends = [None if end is None else end // b.only for end in (a_low, a_high)]
        low, high = ends if b.only > 0 else reversed(ends)
    elif a_low is not None and a_low >= 0 and b_low is not None and b_low >= 0:
        low = 0
    return Numbers(low=low, high=high, whole=True, step=step, rest=rest).meet(WHOLE)
