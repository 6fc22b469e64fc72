"""Going through types: what is inside a tuple or a list, which tensors, paths and symbols a declaration names."""

from __future__ import annotations

from collections.abc import Iterator

from llm_op_guard.contract.expressions import names_in
from llm_op_guard.contract.model import (
    Alternative,
    Clause,
    Contract,
    Declare,
    DeviceOf,
    DtypeOf,
    Expr,
    Like,
    ListType,
    NoneType,
    RestOf,
    ScalarType,
    Size,
    TensorType,
    TupleType,
    Type,
    dim_symbol,
)
from llm_op_guard.contract.path import Path


def items_of(alternative: Alternative) -> tuple[Type, ...]:
    """The types of the items of a tuple, or the one of those of a list."""
    if isinstance(alternative, TupleType):
        return alternative.items
    return (alternative.item,) if isinstance(alternative, ListType) else ()


def declared_types(contract: Contract) -> Iterator[Type]:
    """Every type that a contract declares, those of items included."""

    def within(declared: Type) -> Iterator[Type]:
        yield declared
        for alternative in declared.alternatives:
            for item in items_of(alternative):
                yield from within(item)

    for clause in contract.clauses:
        if isinstance(clause.statement, Declare):
            yield from within(clause.statement.type)


def tensor_types(declared: Type) -> Iterator[TensorType]:
    """Every tensor alternative of a type, those inside tuples included."""
    for alternative in declared.alternatives:
        if isinstance(alternative, TensorType):
            yield alternative
        for item in items_of(alternative):
            yield from tensor_types(item)


def paths_in_type(declared: Type) -> Iterator[Path]:
    """Every path whose dtype, shape or device a type refers to."""
    for alternative in declared.alternatives:
        match alternative:
            case Like(path=path):
                yield path
            case TupleType() | ListType():
                for item in items_of(alternative):
                    yield from paths_in_type(item)
            case TensorType():
                yield from paths_in_tensor(alternative)


def paths_in_tensor(tensor: TensorType) -> Iterator[Path]:
    """Every path whose dtype, shape or device a tensor type refers to."""
    for part in (*tensor.dtypes, *(tensor.dims or ()), *(tensor.devices or ())):
        if isinstance(part, DtypeOf | RestOf | DeviceOf):
            yield part.path


def declared_paths(path: Path, declared: Type) -> Iterator[tuple[Path, Type]]:
    """A declaration's path and, for tuples, those of the items."""
    yield path, declared
    for alternative in declared.alternatives:
        for index, item in enumerate(items_of(alternative)):
            inner = path.item("_") if isinstance(alternative, ListType) else path.item(index)
            yield from declared_paths(inner, item)


def binders(contract: Contract) -> list[tuple[str, Clause]]:
    """Every symbol with each clause that shows its value directly."""
    found: list[tuple[str, Clause]] = []
    for clause in contract.clauses:
        if isinstance(clause.statement, Declare):
            for tensor in tensor_types(clause.statement.type):
                found += [(symbol, clause) for symbol in bound_symbols(tensor, contract)]
    return found


def bound_symbols(tensor: TensorType, contract: Contract) -> Iterator[str]:
    """The symbols that a tensor of this type shows directly."""
    for name in (*map(dim_symbol, tensor.dims or ()), tensor.dtype_symbol, tensor.device_symbol):
        if name is not None and name in contract.symbols:
            yield name


def solvable(contract: Contract) -> list[tuple[Expr, Clause]]:
    """The dimension expressions that are more than a symbol and hold at least one."""
    return [
        (dim.expr, clause)
        for clause in contract.clauses
        if isinstance(clause.statement, Declare)
        for tensor in tensor_types(clause.statement.type)
        for dim in tensor.dims or ()
        if isinstance(dim, Size)
        and dim.expr.symbol is None
        and not contract.symbols.keys().isdisjoint(names_in(dim.expr.node))
    ]


def tensors_declared(contract: Contract) -> frozenset[str]:
    """The parameters that are declared as tensors or None, and as nothing else in any branch."""
    declared: dict[str, list[Alternative]] = {}
    for clause in contract.clauses:
        if isinstance(clause.statement, Declare) and not clause.after_call and not clause.statement.path.steps:
            declared.setdefault(clause.statement.path.root, []).extend(clause.statement.type.alternatives)
    return frozenset(
        name
        for name, alternatives in declared.items()
        if name in contract.parameters
        and any(isinstance(a, TensorType | Like) for a in alternatives)
        and all(isinstance(a, TensorType | Like | NoneType) for a in alternatives)
    )


def numbers_declared(contract: Contract) -> frozenset[str]:
    """The parameters that are declared as numbers, or as numbers among other things."""
    return frozenset(
        clause.statement.path.root
        for clause in contract.clauses
        if isinstance(clause.statement, Declare)
        and any(isinstance(a, ScalarType) and a.text in ("int", "float") for a in clause.statement.type.alternatives)
    )
