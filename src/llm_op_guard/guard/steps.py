"""Clause → steps: the things that a check does, one small class for each kind.

A statement becomes one or more steps. Those of a declaration come in two parts: first what a tensor tells about
symbols, then what must agree with them. In which order steps are taken is for `plan` to say.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from llm_op_guard.contract import solve
from llm_op_guard.contract.expressions import names_in
from llm_op_guard.contract.model import (
    Alternative,
    Assign,
    Clause,
    Contract,
    Declare,
    DeviceOf,
    DeviceSymbol,
    Dim,
    DtypeOf,
    DtypeSymbol,
    Expr,
    Remember,
    Require,
    RestOf,
    Size,
    SizeOneOf,
    TensorType,
    TupleType,
    Type,
)
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.walk import bound_symbols, paths_in_tensor, paths_in_type
from llm_op_guard.frozen import frozen


@frozen
class Given:
    """A fact that a step waits for: a branch test that came out as wanted, an alternative that was committed to."""

    name: str
    value: bool | int


@frozen(kw_only=True)
class _Step:
    """What all kinds share.

    `clause` is the statement that a step comes from; the step runs only where all of `given` hold. `needs` are the
    symbols and assigned names that it uses, `gives` those that it may bind (`surely`: those that have a value
    whenever the step has not failed the call).
    """

    clause: Clause
    given: tuple[Given, ...]
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset()
    surely: frozenset[str] = frozenset()

    @property
    def certain(self) -> bool:
        """Whether breaking this step is wrong for sure."""
        return self.clause.certain


@frozen(kw_only=True)
class Decide(_Step):
    """Decide whether a branch is taken; its outcome is `fact`. `clause` is the first statement in the branch."""

    fact: str
    test: Expr

    @property
    def certain(self) -> bool:
        """A test cannot be broken."""
        return True


@frozen(kw_only=True)
class Read(_Step):
    """Get the value at a path; whether there is one is `fact`."""

    fact: str
    path: Path


@frozen(kw_only=True)
class Match(_Step):
    """Find the alternative of a type that fits, and take from the value what it tells by itself.

    The index of the alternative is `fact`: None where nothing need ask for it.
    """

    fact: str | None
    path: Path
    type: Type


@frozen(kw_only=True)
class Solve(_Step):
    """Get `symbol` out of the size of one dimension, where nothing else has told it; `undo` says how."""

    path: Path
    axis: int
    symbol: str
    undo: tuple[solve.Step, ...]


@frozen(kw_only=True)
class Agree(_Step):
    """Compare what of a tensor could not be compared before other names were known."""

    path: Path
    tensor: TensorType


@frozen(kw_only=True)
class Let(_Step):
    """Give assigned names their values."""

    statement: Assign


@frozen(kw_only=True)
class Demand(_Step):
    """Judge what a statement requires or promises."""

    statement: Require


@frozen(kw_only=True)
class Keep(_Step):
    """Remember facts about an object, when all else of a call is right."""

    statement: Remember


Step = Decide | Read | Match | Solve | Agree | Let | Demand | Keep
# Those that tell a fact for others to wait for.
Telling = Decide | Read | Match


def names_read(step: Step) -> frozenset[str]:
    """The names that a step reads, those of parameters included."""
    match step:
        case Decide(test=expr):
            return frozenset(names_in(expr.node))
        case Read(path=path):
            return frozenset({path.root})
        case Match(path=path, type=declared):
            return frozenset({path.root, *(other.root for other in paths_in_type(declared))})
        case Solve(path=path, undo=undo):
            operands = [part.operand for part in undo if part.operand is not None]
            return frozenset({path.root, *(name for operand in operands for name in names_in(operand))})
        case Agree(path=path, tensor=tensor):
            sizes = (name for expr in tensor.sizes for name in names_in(expr.node))
            return frozenset({path.root, *sizes, *(other.root for other in paths_in_tensor(tensor))})
        case Let(statement=Assign(expr=expr)) | Demand(statement=Require(expr=expr)):
            return frozenset(names_in(expr.node))
        case Keep(statement=statement):
            return frozenset({statement.path.root, *(n for _, expr in statement.facts for n in names_in(expr.node))})


# ---------------------------------------------------------------- from clauses


def expressions(step: Step) -> tuple[Expr, ...]:
    """What a step evaluates; sizes in types, which ask no values, are left out."""
    match step:
        case Decide(test=test):
            return (test,)
        case Let(statement=statement) | Demand(statement=statement):
            return (statement.expr,)
        case Keep(statement=statement):
            return tuple(expr for _, expr in statement.facts)
    return ()


def steps_of(contract: Contract, clauses: Iterable[Clause]) -> Iterator[Step]:
    """The steps of these clauses, each branch tested once, in no order that they could be taken in."""
    facts: dict[tuple[tuple[Given, ...], str], str] = {}
    # A test is as cheap as the cheapest statement in its branch: cheap statements first, so that it is theirs.
    for clause in sorted(clauses, key=lambda c: (c.cost_class, c.eager)):
        given: tuple[Given, ...] = ()
        for condition in clause.conditions:
            key = (given, condition.test.text)
            if key not in facts:
                facts[key] = f"case_{len(facts) + 1}"
                needs = _names(contract, condition.test.node)
                yield Decide(clause=clause, given=given, needs=needs, fact=facts[key], test=condition.test)
            given = (*given, Given(facts[key], condition.wanted))
        match clause.statement:
            case Declare(path=path, type=declared):
                yield from _declaration_steps(contract, clause, given, path, declared)
            case Assign(names=names, expr=expr) as statement:
                needs = _names(contract, expr.node)
                yield Let(clause=clause, given=given, needs=needs, gives=frozenset(names), statement=statement)
            case Require(expr=expr) as statement:
                yield Demand(clause=clause, given=given, needs=_names(contract, expr.node), statement=statement)
            case Remember() as statement:
                needs = frozenset().union(*(_names(contract, expr.node) for _, expr in statement.facts))
                yield Keep(clause=clause, given=given, needs=needs, statement=statement)


def _declaration_steps(
    contract: Contract, clause: Clause, given: tuple[Given, ...], path: Path, declared: Type
) -> Iterator[Step]:
    root = frozenset({path.root}) if path.root in contract.assigned else frozenset()
    # One path may be declared in several branches; each has facts of its own.
    branch = "".join(f" {g.name}={g.value}" for g in given)
    if path.steps or root:
        there = f"{path} is there{branch}"
        yield Read(clause=clause, given=given, needs=root, fact=there, path=path)
        given = (*given, Given(there, True))
    alternatives = declared.alternatives
    bound = [frozenset(bound_symbols(a, contract) if isinstance(a, TensorType) else ()) for a in alternatives]
    # What follows a certain declaration of one alternative need not ask whether it fitted.
    fact = f"kind of {path}{branch}" if len(alternatives) > 1 or not clause.certain else None
    others = frozenset(p.root for p in paths_in_type(declared) if p.root in contract.assigned)
    yield Match(
        clause=clause,
        given=given,
        needs=root | others,
        gives=frozenset().union(*bound),
        surely=frozenset.intersection(*bound) if clause.certain else frozenset(),
        fact=fact,
        path=path,
        type=declared,
    )
    for index, alternative in enumerate(alternatives):
        inner = given if fact is None else (*given, Given(fact, index))
        yield from _alternative_steps(contract, clause, inner, path, alternative)


def _alternative_steps(
    contract: Contract, clause: Clause, given: tuple[Given, ...], path: Path, alternative: Alternative
) -> Iterator[Step]:
    match alternative:
        case TupleType(items=items):
            for index, item in enumerate(items):
                yield from _declaration_steps(contract, clause, given, path.item(index), item)
        case TensorType(dims=dims):
            for axis, dim in enumerate(dims or ()):
                if isinstance(dim, Size) and not directly_checked(dim, contract):
                    yield from _solutions(contract, clause, given, path, axis, dim.expr)
            if _is_late(alternative, contract):
                needs = _needed_late(alternative, contract)
                yield Agree(clause=clause, given=given, needs=needs, path=path, tensor=alternative)


def _solutions(
    contract: Contract, clause: Clause, given: tuple[Given, ...], path: Path, axis: int, size: Expr
) -> Iterator[Solve]:
    names = _names(contract, size.node)
    for symbol in names_in(size.node):
        undo = solve.inverse(size.node, symbol) if symbol in contract.symbols else None
        if undo is not None:
            yield Solve(
                clause=clause,
                given=given,
                needs=names - {symbol},
                gives=frozenset({symbol}),
                path=path,
                axis=axis,
                symbol=symbol,
                undo=tuple(undo),
            )


# ---------------------------------------------------------------- what a tensor tells late


def directly_checked(dim: Dim, contract: Contract) -> bool:
    """Whether a dimension is bound or compared as soon as its tensor is met: a symbol or a constant."""
    match dim:
        case Size(expr=expr):
            return isinstance(expr.node, ast.Constant) or (expr.symbol is not None and expr.symbol in contract.symbols)
        case SizeOneOf() | RestOf():
            return False
    return True


def late_dtype(tensor: TensorType) -> bool:
    """Whether the dtype can only be judged when other names are known."""
    return any(isinstance(d, DtypeOf) for d in tensor.dtypes) or (
        len(tensor.dtypes) > 1 and any(isinstance(d, DtypeSymbol) for d in tensor.dtypes)
    )


def late_device(tensor: TensorType) -> bool:
    """Whether the device can only be judged when other names are known."""
    devices = tensor.devices or ()
    if any(isinstance(d, DeviceOf) for d in devices):
        return True
    return len(devices) > 1 and any(isinstance(d, DeviceSymbol) for d in devices)


def _is_late(tensor: TensorType, contract: Contract) -> bool:
    late_size = any(not directly_checked(dim, contract) for dim in tensor.dims or ())
    return late_size or late_dtype(tensor) or late_device(tensor)


def _needed_late(tensor: TensorType, contract: Contract) -> frozenset[str]:
    """The symbols and assigned names that a tensor's late sizes, dtypes and devices are compared with."""
    needs = {name for dim in tensor.dims or () for name in _needed_by(dim, contract)}
    if late_dtype(tensor):
        needs |= {d.name for d in tensor.dtypes if isinstance(d, DtypeSymbol)}
    if late_device(tensor):
        needs |= {d.name for d in tensor.devices or () if isinstance(d, DeviceSymbol)}
    return frozenset(needs)


def _needed_by(dim: Dim, contract: Contract) -> Iterator[str]:
    if directly_checked(dim, contract):
        return
    exprs = [dim.expr] if isinstance(dim, Size) else list(dim.options) if isinstance(dim, SizeOneOf) else []
    for expr in exprs:
        yield from _names(contract, expr.node)


def _names(contract: Contract, node: ast.AST) -> frozenset[str]:
    """The symbols and assigned names that an expression uses."""
    return frozenset(n for n in names_in(node) if n in contract.symbols or n in contract.assigned)
