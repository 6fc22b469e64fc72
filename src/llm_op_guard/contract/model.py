"""What a contract is once it has been read: statements, types and where each stands in its text.

Everything here is immutable. Expressions stay Python syntax trees (restricted by `parse`), are never executed,
and print themselves with `ast.unparse`, so two spellings of one expression are equal.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import field, replace
from functools import cached_property
from typing import Any, Literal

from llm_op_guard.contract.path import Path
from llm_op_guard.contract.source import Place, Source
from llm_op_guard.frozen import frozen

CostClass = Literal["A", "B", "C"]


@frozen
class Expr:
    """One expression of the language: a syntax tree that `parse` has restricted."""

    text: str
    node: ast.expr = field(compare=False, repr=False)

    @classmethod
    def of(cls, node: ast.expr) -> Expr:
        """Wrap a syntax tree."""
        return cls(ast.unparse(node), node)

    @cached_property
    def symbol(self) -> str | None:
        """The name, when the expression is nothing but one."""
        return self.node.id if isinstance(self.node, ast.Name) else None


# ---------------------------------------------------------------- types


@frozen
class DtypeName:
    """One exact dtype, `float32`."""

    name: str


@frozen
class DtypeSet:
    """A named set of dtypes: floating, half, integer, boolean, complexes, any."""

    name: str


@frozen
class DtypeSymbol:
    """`T`: the same dtype wherever it stands."""

    name: str


@frozen
class DtypeOf:
    """`weight.dtype`: the dtype of another tensor."""

    path: Path


Dtype = DtypeName | DtypeSet | DtypeSymbol | DtypeOf


@frozen
class Size:
    """One dimension that equals an expression; a bare symbol binds."""

    expr: Expr


@frozen
class SizeOneOf:
    """`B | 1`: one dimension that equals one of several expressions; never binds."""

    options: tuple[Expr, ...]

    @property
    def in_order(self) -> list[Expr]:
        """The options as they are tried: a size that is a plain number needs nothing else to be known."""
        return sorted(self.options, key=lambda option: not isinstance(option.node, ast.Constant))


@frozen
class AnySize:
    """`_`: one dimension of any size."""


@frozen
class Rest:
    """`...` (no name) or `*lead`: any number of dimensions."""

    name: str | None


@frozen
class RestOf:
    """`*q.shape`: the dimensions of another tensor."""

    path: Path


Dim = Size | SizeOneOf | AnySize | Rest | RestOf


def dim_symbol(dim: Dim) -> str | None:
    """The name that a dimension, or a group of them, is nothing but; it binds unless it is a parameter's."""
    if isinstance(dim, Size):
        return dim.expr.symbol
    return dim.name if isinstance(dim, Rest) else None


@frozen
class DeviceSymbol:
    """`dev`: the same device wherever it stands."""

    name: str


@frozen
class DeviceType:
    """`cpu`, `cuda`, …: any device of that type."""

    name: str


@frozen
class DeviceOf:
    """`weight.device`: the device of another tensor."""

    path: Path


Device = DeviceSymbol | DeviceType | DeviceOf


@frozen
class TensorType:
    """A tensor: one of several dtypes, dimensions (`None`: any shape), one of several devices (`None`: any)."""

    dtypes: tuple[Dtype, ...]
    dims: tuple[Dim, ...] | None
    devices: tuple[Device, ...] | None
    text: str = field(compare=False)

    @property
    def dtype_symbol(self) -> str | None:
        """The symbol that the dtype binds, when it is nothing but one."""
        only = self.dtypes[0] if len(self.dtypes) == 1 else None
        return only.name if isinstance(only, DtypeSymbol) else None

    @property
    def device_symbol(self) -> str | None:
        """The symbol that the device binds, when it is nothing but one."""
        only = self.devices[0] if self.devices is not None and len(self.devices) == 1 else None
        return only.name if isinstance(only, DeviceSymbol) else None

    @property
    def sizes(self) -> tuple[Expr, ...]:
        """The expressions that stand as dimensions."""
        exprs: list[Expr] = []
        for dim in self.dims or ():
            if isinstance(dim, Size):
                exprs.append(dim.expr)
            elif isinstance(dim, SizeOneOf):
                exprs += dim.options
        return tuple(exprs)

    @property
    def rest_index(self) -> int | None:
        """Where the one dimension of open length stands, if there is one."""
        for index, dim in enumerate(self.dims or ()):
            if isinstance(dim, Rest | RestOf):
                return index
        return None

    def accepts_rank(self, rank: int) -> bool:
        """Whether a tensor of that rank can match, sizes apart."""
        if self.dims is None:
            return True
        if self.rest_index is None:
            return rank == len(self.dims)
        return rank >= len(self.dims) - 1


@frozen
class NoneType:
    """`None`."""

    text: str = "None"


@frozen
class ScalarType:
    """`int`, `float`, `bool`, `str`, `dict`, `callable`, `object`."""

    text: str


@frozen
class LiteralType:
    """One value: `"left"`, `3`."""

    value: str | int | float | bool
    text: str


@frozen
class Like:
    """`like(x)`: x's dtype, shape and device as they are at entry."""

    path: Path
    text: str


@frozen
class TupleType:
    """A tuple (or list) of exactly these items."""

    items: tuple[Type, ...]
    text: str


@frozen
class ListType:
    """`list[type]`: a list or tuple of any length, every item of the type."""

    item: Type
    text: str


Alternative = TensorType | NoneType | ScalarType | LiteralType | Like | TupleType | ListType


@frozen
class Type:
    """One alternative, or several of which the first that fits by None, type, rank and dtype commits."""

    alternatives: tuple[Alternative, ...]
    text: str = field(compare=False)


# ---------------------------------------------------------------- statements


@frozen
class Reason:
    """Why a rule holds, what probably went wrong when it does not, and whether breaking it is wrong for sure.

    `error` names the exception that the unguarded call would have raised.
    """

    because: Expr | None = None
    hint: Expr | None = None
    certain: bool = True
    error: str | None = None

    @property
    def keywords(self) -> list[str]:
        """As it is written, the defaults left out."""
        texts = [("because", self.because), ("hint", self.hint)]
        return [
            *(f"{name}={text.text}" for name, text in texts if text is not None),
            *(["certain=False"] if not self.certain else []),
            *([f"error={self.error}"] if self.error is not None else []),
        ]


@frozen
class Declare:
    """`path: type`; `returns: type` declares the path `result`."""

    path: Path
    type: Type
    reason: Reason
    place: Place = field(compare=False, repr=False)

    @property
    def text(self) -> str:
        """The statement in normal form."""
        why = f" = why({', '.join(self.reason.keywords)})" if self.reason.keywords else ""
        return f"{self.target}: {self.type.text}{why}"

    @property
    def target(self) -> str:
        """The path as it is written."""
        return str(replace(self.path, root="returns") if self.path.root == "result" else self.path)


@frozen
class Assign:
    """`names = expr`; several names take a sequence apart."""

    names: tuple[str, ...]
    expr: Expr
    place: Place = field(compare=False, repr=False)

    @property
    def text(self) -> str:
        """The statement in normal form."""
        return f"{', '.join(self.names)} = {self.expr.text}"


@frozen
class Require:
    """`require(expr, id=, because=, hint=, certain=, error=)`; with `promised`, `ensure(…)`.

    What is required is the caller's to keep, what is promised the operator's.
    """

    expr: Expr
    id: str
    reason: Reason
    promised: bool
    place: Place = field(compare=False, repr=False)

    @property
    def text(self) -> str:
        """The statement in normal form."""
        parts = [self.expr.text]
        if self.id != self.expr.text:
            parts.append(f"id={self.id!r}")
        parts += self.reason.keywords
        return f"{'ensure' if self.promised else 'require'}({', '.join(parts)})"


@frozen
class Remember:
    """`remember(path, name=expr, …)`: facts about an object, which the contracts of later calls `recall`."""

    path: Path
    facts: tuple[tuple[str, Expr], ...]
    place: Place = field(compare=False, repr=False)

    @property
    def text(self) -> str:
        """The statement in normal form."""
        return f"remember({self.path}, {', '.join(f'{name}={expr.text}' for name, expr in self.facts)})"


@frozen
class If:
    """`if`/`elif`/`else`; an `elif` is an `If` alone in `orelse`."""

    test: Expr
    body: tuple[Statement, ...]
    orelse: tuple[Statement, ...]
    place: Place = field(compare=False, repr=False)


@frozen
class For:
    """`for target in iterable:`; `loops` says what it stands for."""

    target: Expr
    iterable: Expr
    body: tuple[Statement, ...]
    place: Place = field(compare=False, repr=False)


Statement = Declare | Assign | Require | Remember | If | For
Leaf = Declare | Assign | Require | Remember


@frozen
class Condition:
    """A branch that a statement stands in: it applies when `test` came out as `wanted`. `place` is that of the `if`."""

    test: Expr
    wanted: bool
    place: Place = field(compare=False, repr=False)


@frozen
class Clause:
    """A statement without its nesting: what it says, the branches it stands in, what it costs, when it runs.

    `eager` says that it reads or keeps what a program that is traced must not depend on.
    """

    statement: Leaf
    conditions: tuple[Condition, ...]
    cost_class: CostClass = "A"
    after_call: bool = False
    eager: bool = False

    @property
    def certain(self) -> bool:
        """Whether breaking it is wrong for sure."""
        return isinstance(self.statement, Assign | Remember) or self.statement.reason.certain


@frozen
class Rule:
    """One thing that a call can break."""

    id: str
    cost_class: CostClass
    certain: bool
    statement: Leaf = field(compare=False, repr=False)


SymbolKind = Literal["size", "sizes", "dtype", "device"]


@frozen
class Contract:
    """What an operator requires of its arguments and promises of its result.

    `parameters` are the operator's parameter names in order, `signature` the parameter list of a stub as it is written
    (None for a contract that has that of its function); `constants` the values that its file names; `imports` the
    predicates that it asks, by name, with their modules; `symbols` the names that stand for sizes, groups of sizes,
    dtypes and devices; `tensors` the parameters that are declared as tensors or None, and as nothing else; `assigned`
    the names that the contract itself defines. In `plans` the guards made from this contract share what they have
    worked out.
    """

    name: str
    parameters: tuple[str, ...]
    doc: str
    body: tuple[Statement, ...]
    source: Source = field(compare=False, repr=False)
    place: Place = field(compare=False, repr=False, default=Place(1, 0))
    signature: str | None = None
    constants: dict[str, Any] = field(compare=False, repr=False, default_factory=dict)
    imports: dict[str, str] = field(compare=False, repr=False, default_factory=dict)
    symbols: dict[str, SymbolKind] = field(compare=False, repr=False, default_factory=dict)
    tensors: frozenset[str] = field(compare=False, repr=False, default=frozenset())
    clauses: tuple[Clause, ...] = field(compare=False, repr=False, default=())
    rules: tuple[Rule, ...] = field(compare=False, repr=False, default=())
    # What later stages make of it, for all its guards. Kept here, not in a dict of contracts: those that say the same
    # are equal, whatever their constants and places.
    plans: dict[Any, Any] = field(init=False, compare=False, repr=False, default_factory=dict)
    sources: dict[Any, Any] = field(init=False, compare=False, repr=False, default_factory=dict)
    programs: dict[Any, Any] = field(init=False, compare=False, repr=False, default_factory=dict)

    @cached_property
    def assigned(self) -> frozenset[str]:
        """Names that the contract defines with `=`."""
        return frozenset(
            name for clause in self.clauses if isinstance(clause.statement, Assign) for name in clause.statement.names
        )

    @property
    def parameter_list(self) -> str:
        """The parameters as a stub has them."""
        return ", ".join(self.parameters) if self.signature is None else self.signature

    @cached_property
    def text(self) -> str:
        """The contract in normal form: two contracts that say the same in the same order have the same text."""
        lines = [f"from {module} import {name}" for name, module in sorted(self.imports.items())]
        lines += [f"{name} = {value!r}" for name, value in sorted(self.constants.items())]
        lines += [f"def {self.name}({self.parameter_list}):"]
        lines += [f"    {line}" for line in _render(self.body)] or ["    pass"]
        return "\n".join(lines) + "\n"

    @cached_property
    def hash(self) -> str:
        """Twelve hex digits of the SHA-256 of `text`."""
        import hashlib  # noqa: PLC0415 - few need it

        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    @property
    def id(self) -> str:
        """`file:name`, the file without its folder."""
        file = self.source.file.replace("\\", "/").rsplit("/", 1)[-1]
        return f"{file}:{self.name}"


def _render(body: tuple[Statement, ...]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, If):
            yield f"if {statement.test.text}:"
            yield from (f"    {line}" for line in _render(statement.body))
            if statement.orelse:
                yield "else:"
                yield from (f"    {line}" for line in _render(statement.orelse))
        elif isinstance(statement, For):
            yield f"for {statement.target.text} in {statement.iterable.text}:"
            yield from (f"    {line}" for line in _render(statement.body))
        else:
            yield statement.text
