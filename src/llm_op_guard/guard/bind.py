"""What one call tells about the symbols and assigned names of a contract.

Nothing here looks at the order of statements: sightings are collected again and again until nothing new is learnt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from llm_op_guard.contract.expressions import names_in
from llm_op_guard.contract.model import (
    Alternative,
    Assign,
    Clause,
    Contract,
    Declare,
    Dim,
    DtypeOf,
    DtypeSymbol,
    Expr,
    Like,
    ListType,
    LiteralType,
    NoneType,
    Rest,
    ScalarType,
    Size,
    SizeOneOf,
    TensorType,
    TupleType,
    Type,
    dim_symbol,
)
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.solve import inverse
from llm_op_guard.frozen import frozen
from llm_op_guard.guard import functions
from llm_op_guard.guard.asked import Answers
from llm_op_guard.guard.evaluate import Values, dtype_values
from llm_op_guard.guard.reading import INAPPLICABLE, SCALAR_TESTS, Broken, autocast_dtype, is_a, is_tensor

# Items of a list that are looked at; more would take longer than the operator.
LONGEST_LIST = 10_000


@frozen
class Observation:
    """One sighting of a symbol: `q.shape[3]` is 129."""

    symbol: str
    value: Any
    where: str
    path: str
    certain: bool = True


class Bindings:
    """The symbols and assigned names of one call, and where each was seen.

    `known` are the values that assigned names and symbols had before the call. After `collect`: `values` evaluates
    expressions, `observations` are all sightings, `unsolvable` says which dimension expressions no whole number
    solves, and why.
    """

    def __init__(
        self,
        contract: Contract,
        clauses: list[Clause],
        arguments: Mapping[str, Any],
        known: Mapping[str, Any],
        after_call: bool,
        answers: Answers | None = None,
    ) -> None:
        self.after_call = after_call
        self.contract = contract
        self.clauses = clauses
        self.values = Values(arguments, contract.constants, answers, contract.tensors)
        self.known = {name: value for name, value in known.items() if name in contract.assigned}
        self.symbols_at_entry = {name: value for name, value in known.items() if name in contract.symbols}
        self.observations: list[Observation] = []
        self.unsolvable: dict[tuple[str, str], str] = {}
        # What is asked again and again while no name gets another value: how tests of branches come out, which most
        # statements share, and the tensors that are declared.
        self._outcomes: dict[str, bool | Broken | None] = {}
        self._declared: list[tuple[Declare, Path, TensorType, Any]] | None = None

    def collect(self) -> None:
        """Collect until nothing changes."""
        self.values.assigned = dict(self.known)
        solved: list[Observation] = []
        for _ in range(3 * (len(self.clauses) + len(self.contract.symbols)) + 5):
            before = (dict(self.values.symbols), dict(self.values.assigned))
            self._forget()
            # By signature, not by statement: which of two is believed must not depend on the order of statements.
            self.observations = sorted([*self._sightings(), *solved], key=self._by_signature)
            votes = list(self._votes())
            self.values.symbols = {
                name: _reference(
                    [o for o in self.observations if o.symbol == name], [o for o in votes if o.symbol == name]
                )
                for name in dict.fromkeys(o.symbol for o in self.observations)
            }
            # The call may have changed its arguments in place: what was seen before it counts.
            self.values.symbols |= self.symbols_at_entry
            self._autocast()
            self._forget()
            self._assign()
            if _same(before, (self.values.symbols, self.values.assigned)):
                found = list(self._solutions())
                if not found:
                    return
                solved += found

    def _autocast(self) -> None:
        """A dtype symbol that was seen as dtypes which autocast makes one stands for that one."""
        for observation in self.observations:
            if self.contract.symbols[observation.symbol] == "dtype":
                value = self.values.symbols[observation.symbol]
                if observation.value != value:
                    cast = autocast_dtype(value, observation.value)
                    self.values.symbols[observation.symbol] = value if cast is None else cast

    def seen_at(self, symbol: str) -> tuple[str, ...]:
        """The places where a symbol had the value that it is taken to have."""
        value = self.values.symbols[symbol]
        places = dict.fromkeys(o.where for o in self.observations if o.symbol == symbol and o.value == value)
        return tuple(places) or (("before the call",) if symbol in self.symbols_at_entry else ())

    def unknown_in(self, expr: Expr) -> list[str]:
        """The symbols of an expression that have no value."""
        return [n for n in names_in(expr.node) if n in self.contract.symbols and n not in self.values.symbols]

    def misfits(self, clauses: Iterable[Clause]) -> set[str]:
        """The arguments that are not of the type that these clauses declare them as for certain."""
        found: set[str] = set()
        for clause in clauses:
            match clause.statement:
                case Declare(path=Path(root=root, steps=()), type=declared) if root in self.values.arguments:
                    value = self.values.arguments[root]
                    chosen = committed(declared, value)
                    fitting = chosen is not None and fits(chosen, value)
                    if not fitting and clause.certain and self.applies(clause):
                        found.add(root)
        return found

    def _tensors(self) -> Iterator[tuple[Declare, Path, TensorType, Any]]:
        """Every tensor that fits its declaration as far as kind and rank go."""
        if self._declared is None:
            self._declared = [
                (clause.statement, *found)
                for clause in self.clauses
                if isinstance(clause.statement, Declare) and self.applies(clause)
                for found in self._tensors_in(clause.statement.path, clause.statement.type)
            ]
        yield from self._declared

    def _by_signature(self, observation: Observation) -> tuple[int, str]:
        root = re.split(r"[.\[]", observation.where, maxsplit=1)[0]
        parameters = self.contract.parameters
        return (parameters.index(root) if root in parameters else len(parameters), observation.where)

    def _tensors_in(self, path: Path, declared: Type) -> Iterator[tuple[Path, TensorType, Any]]:
        try:
            value = self.values.path(path)
        except INAPPLICABLE:
            return
        match committed(declared, value):
            case TupleType(items=items):
                for index, item in enumerate(items):
                    yield from self._tensors_in(path.item(index), item)
            case ListType(item=item):
                for index in range(min(len(value), LONGEST_LIST) if is_a(value, tuple | list) else 0):
                    yield from self._tensors_in(path.item(index), item)
            case TensorType() as tensor if is_tensor(value) and tensor.accepts_rank(len(value.shape)):
                yield path, tensor, value

    def _sightings(self) -> Iterator[Observation]:
        for statement, path, tensor, value in self._tensors():
            certain = statement.reason.certain
            for dim, axis, observed in aligned(tensor, value.shape):
                name = dim_symbol(dim)
                if name is not None and name in self.contract.symbols:
                    where = f"{path}.shape[{axis}]" if isinstance(dim, Size) else f"{path}.shape"
                    yield Observation(name, observed, where, str(path), certain)
            if tensor.dtype_symbol is not None:
                yield Observation(tensor.dtype_symbol, value.dtype, f"{path}.dtype", str(path), certain)
            if tensor.device_symbol is not None:
                yield Observation(tensor.device_symbol, value.device, f"{path}.device", str(path), certain)

    def _solutions(self) -> Iterator[Observation]:
        """Turn round every dimension expression whose one unknown nothing else has told."""
        for statement, path, expr, axis, observed in self._expressions():
            unknown = self.unknown_in(expr)
            if len(unknown) != 1:
                continue
            where = f"{path}.shape[{axis}]"
            try:
                answer = self._solved(expr, unknown[0], observed)
            except INAPPLICABLE:
                continue
            except Broken as broken:
                self.unsolvable[where, expr.text] = str(broken)
                continue
            if answer is not None:
                yield Observation(unknown[0], answer, where, str(path), statement.reason.certain)

    def _votes(self) -> Iterator[Observation]:
        """What dimension expressions of one symbol and nothing else that is learnt say of it: `S + 1`, `2 * D`."""
        learnt = {*self.contract.symbols, *self.contract.assigned}
        for statement, path, expr, axis, observed in self._expressions():
            names = list(learnt.intersection(names_in(expr.node)))
            if expr.symbol is not None or len(names) != 1:
                continue
            try:
                answer = self._solved(expr, names[0], observed)
            except (*INAPPLICABLE, Broken):
                continue
            if answer is not None:
                yield Observation(names[0], answer, f"{path}.shape[{axis}]", str(path), statement.reason.certain)

    def _expressions(self) -> Iterator[tuple[Declare, Path, Expr, int, Any]]:
        """Every dimension that equals an expression, and the size seen there."""
        for statement, path, tensor, value in self._tensors():
            for dim, axis, observed in aligned(tensor, value.shape):
                if isinstance(dim, Size):
                    yield statement, path, dim.expr, axis, observed

    def _solved(self, expr: Expr, unknown: str, observed: Any) -> Any:
        steps = inverse(expr.node, unknown)
        if steps is None:
            return None
        operands = [None if step.operand is None else self.values.value_of(step.operand) for step in steps]
        return functions.undone(observed, *((s.undo, operand) for s, operand in zip(steps, operands, strict=True)))

    def _assign(self) -> None:
        for clause in self.clauses:
            if not isinstance(clause.statement, Assign) or not self.applies(clause):
                continue
            if self.after_call and not clause.after_call:
                continue  # named before the call: what it was then counts
            names = clause.statement.names
            if all(name in self.known for name in names):
                continue
            try:
                value = self.values.raw(clause.statement.expr.node)
            except (*INAPPLICABLE, Broken):
                continue
            parts = [value] if len(names) == 1 else list(value) if is_a(value, tuple | list) else []
            if len(parts) == len(names):
                self.values.assigned.update((n, p) for n, p in zip(names, parts, strict=True) if p is not None)
                self._forget()

    def applies(self, clause: Clause) -> bool:
        """Whether all the branches are taken that a clause stands in."""
        return all(self.outcome(condition.test) is condition.wanted for condition in clause.conditions)

    def outcome(self, test: Expr) -> bool | Broken | None:
        """Whether a test is true, or why it has no value; None where it does not apply."""
        # Which statements wanted the answer of a predicate that fails has to be told.
        if test.text not in self._outcomes or self.values.answers is not None:
            self._outcomes[test.text] = self._evaluated(test)
        return self._outcomes[test.text]

    def _evaluated(self, test: Expr) -> bool | Broken | None:
        try:
            return bool(self.values.evaluate(test))
        except INAPPLICABLE:
            return None
        except Broken as broken:
            return broken.with_traceback(None)

    def _forget(self) -> None:
        self._outcomes.clear()
        self._declared = None


# ---------------------------------------------------------------- types


def committed(declared: Type, value: Any) -> Alternative | None:
    """The alternative that a value commits to: the only one, or the first that fits."""
    if len(declared.alternatives) == 1:
        return declared.alternatives[0]
    return next((a for a in declared.alternatives if fits(a, value)), None)


def fits(alternative: Alternative, value: Any) -> bool:
    """Whether a value is of a type by None, type, rank and dtype."""
    match alternative:
        case NoneType():
            return value is None
        case LiteralType(value=wanted):
            return type(value) is type(wanted) and value == wanted
        case ScalarType(text=kind):
            return bool(SCALAR_TESTS[kind](value))
        case Like():
            return is_tensor(value)
        case TupleType(items=items):
            return is_a(value, tuple | list) and len(value) == len(items)
        case ListType():
            return is_a(value, tuple | list)
        case TensorType():
            return is_tensor(value) and alternative.accepts_rank(len(value.shape)) and dtype_fits(alternative, value)


def dtype_fits(tensor: TensorType, value: Any) -> bool:
    """Whether a tensor's dtype is one that its type names, or may be any that a symbol stands for."""
    return any(
        isinstance(dtype, DtypeSymbol | DtypeOf) or dtype.name == "any" or value.dtype in dtype_values(dtype)
        for dtype in tensor.dtypes
    )


def aligned(tensor: TensorType, shape: Any) -> list[tuple[Dim, int, Any]]:
    """Each dimension of a type with its axis and the size seen there; an open group with the sizes it covers."""
    dims, rest = tensor.dims, tensor.rest_index
    if dims is None:
        return []
    sizes = tuple(shape)
    if rest is None:
        return [(dim, axis, sizes[axis]) for axis, dim in enumerate(dims)]
    after = len(dims) - rest - 1
    end = len(sizes) - after
    return [
        *((dims[axis], axis, sizes[axis]) for axis in range(rest)),
        (dims[rest], rest, sizes[rest:end]),
        *((dims[rest + 1 + i], end + i, sizes[end + i]) for i in range(after)),
    ]


def symbols_of(dim: Dim) -> set[str]:
    """The names that a dimension is written with."""
    match dim:
        case Size(expr=expr):
            return set(names_in(expr.node))
        case SizeOneOf(options=options):
            return {name for option in options for name in names_in(option.node)}
        case Rest(name=str() as name):
            return {name}
    return set()


# ---------------------------------------------------------------- agreement


def _reference(seen: list[Observation], votes: list[Observation]) -> Any:
    """Which of several sightings to believe: of certain declarations; not 1, not meta; the majority, in which what
    expressions say counts too; the first.
    """
    values = [o.value for o in seen if o.certain] or [o.value for o in seen]
    more = [o.value for o in votes if o.certain]
    # What was broadcast or left without its contents is the likelier mistake.
    others = [value for value in values if value != 1 and getattr(value, "type", None) != "meta"] or values
    # By counting: a size that is a symbol of a traced program cannot be hashed.
    voting = [*others, *more]
    return max(others, key=lambda value: sum(1 for other in voting if other == value))  # the first of equals


def _same(before: tuple[dict[str, Any], dict[str, Any]], now: tuple[dict[str, Any], dict[str, Any]]) -> bool:
    """Whether a round taught nothing."""
    return all(
        old.keys() == new.keys() and all(_unchanged(old[k], new[k]) for k in new)
        for old, new in zip(before, now, strict=True)
    )


def _unchanged(old: Any, new: Any) -> bool:
    # Identity first: an assigned name may be a tensor or any object, whose == is not ours to call.
    if is_tensor(old) and is_tensor(new) and old is not new:  # what a value function gives anew each time
        return bool((old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device))
    return old is new or (_is_comparable(old) and _is_comparable(new) and bool(old == new))


def _is_comparable(value: Any) -> bool:
    return type(value) in (int, float, str, tuple, bool) or (type(value).__module__ == "torch" and not is_tensor(value))
