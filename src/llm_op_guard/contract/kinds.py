"""Kinds of values: what a value can be as far as its declaration tells, and what each place of the language takes."""

from __future__ import annotations

import ast
from typing import Any, Literal, NamedTuple, get_args

from llm_op_guard.contract.model import (
    Like,
    ListType,
    LiteralType,
    NoneType,
    ScalarType,
    SymbolKind,
    TensorType,
    TupleType,
    Type,
)
from llm_op_guard.contract.path import path_of

# `sizes` is a sequence of whole numbers. What no word is for may be anything.
Kind = Literal["tensor", "number", "text", "sizes", "sequence", "dict", "dtype", "device", "none"]
Kinds = frozenset[Kind]

ANYTHING: Kinds = frozenset(get_args(Kind))
NONE: Kinds = frozenset({"none"})
NUMBER: Kinds = frozenset({"number"})
TEXT: Kinds = frozenset({"text"})
SIZES: Kinds = frozenset({"sizes"})
SEQUENCE: Kinds = frozenset({"sequence"})
SEQUENCES: Kinds = SIZES | SEQUENCE
TENSOR: Kinds = frozenset({"tensor"})
DICT: Kinds = frozenset({"dict"})
DTYPE: Kinds = frozenset({"dtype"})
DEVICE: Kinds = frozenset({"device"})
# What never stands in arithmetic, a comparison or a condition; what can be added and has an order.
NOT_PLAIN: Kinds = TENSOR | DICT
ORDERED: Kinds = NUMBER | TEXT | SEQUENCES

# What is known of a value: its kinds; the type that it is declared as; of an item of `zip`, what is known of each part.
Thing = Kinds | Type | tuple[Any, ...]

SYMBOLS: dict[SymbolKind, Kinds] = {"size": NUMBER, "sizes": SIZES, "dtype": DTYPE, "device": DEVICE}
ATTRIBUTES: dict[str, Kinds] = {
    "shape": SIZES, "dtype": DTYPE, "device": DEVICE, "ndim": NUMBER, "requires_grad": NUMBER,
}  # fmt: skip
_SCALARS: dict[str, Kinds] = {"int": NUMBER, "float": NUMBER, "bool": NUMBER, "str": TEXT, "dict": DICT}


class Taken(NamedTuple):
    """What a place takes: in words, as kinds, and what to write there instead of a tensor."""

    words: str
    kinds: Kinds
    instead: str = ": first({})"


SIZE = Taken("a size is a number", NUMBER)
INDEX = Taken("an index is a number", NUMBER | NONE | SEQUENCES)
KEY = Taken("an index is a number or a text", ANYTHING - NOT_PLAIN)
OPERAND = Taken("arithmetic is for numbers", NUMBER)
STARRED = Taken("a star stands before a sequence", SEQUENCES, ": {}.shape")
SHOWN = Taken("a text shows plain values", ANYTHING - NOT_PLAIN, ": {}.shape")
COUNT = Taken("range takes a number", NUMBER)
MAPPING = Taken("items takes a dict", DICT, "")
OWNER = Taken("{} takes an object", NOT_PLAIN | SEQUENCE, "")

_NUMBERS = Taken("{} takes numbers", ORDERED)
_ARGUMENTS: dict[str, Taken] = {
    "tensor": Taken("{} takes a tensor", TENSOR),
    "int": Taken("{} takes a number", NUMBER),
    "number": Taken("{} takes a number", NUMBER),
    "shape": Taken("{} takes a shape", TENSOR | SEQUENCES),
    "sequence": Taken("{} takes a sequence", TEXT | DICT | SEQUENCES, ": {}.shape"),
    "string": Taken("{} takes a text here", TEXT, ""),
    "owner": OWNER,
}
# Arguments that say more than their kind does.
_SPECIAL: dict[tuple[str, str], Taken] = {
    ("min", "first"): _NUMBERS._replace(instead=": lowest({})"),
    ("max", "first"): _NUMBERS._replace(instead=": highest({})"),
    ("abs", "x"): _ARGUMENTS["number"]._replace(instead=": absmax({})"),
    ("within", "allow"): Taken("{} takes numbers for allow", NUMBER | SEQUENCES),
    ("largest", "dtype"): Taken("{} takes a dtype", DTYPE, ": {}.dtype"),
    ("arch", "device"): Taken("{} takes a device", DEVICE, ": {}.device"),
    ("version", "library"): Taken("{} takes a text", TEXT, ""),
    ("misspelt", "mapping"): Taken("{} takes a dict", DICT, ""),
}
# What functions give that do not give a number or a truth.
GIVES: dict[str, Kinds] = {
    **dict.fromkeys(("divisors", "arch", "version"), SIZES),
    **dict.fromkeys(("min", "max"), ORDERED),
    **dict.fromkeys(("get", "recall", "identity"), ANYTHING - NOT_PLAIN),
    "misspelt": TEXT | NONE,
}


def taken_by(function: str, argument: str, kind: str) -> Taken | None:
    """What a function takes as an argument; None where it takes anything."""
    return _SPECIAL.get((function, argument), _ARGUMENTS.get(kind))


def kinds_of(thing: Thing) -> Kinds:
    """The kinds that a value can be of."""
    if isinstance(thing, frozenset):
        return thing
    if isinstance(thing, tuple):
        return SEQUENCE
    found: Kinds = frozenset()
    for alternative in thing.alternatives:
        match alternative:
            case TensorType() | Like():
                found |= TENSOR
            case NoneType():
                found |= NONE
            case LiteralType(value=value):
                found |= kind_of(value)
            case ScalarType(text=text):
                found |= _SCALARS.get(text, ANYTHING)
            case TupleType() | ListType():
                found |= SEQUENCE
    return found


def kind_of(value: object) -> Kinds:
    """The kind of a constant."""
    kinds: list[tuple[Any, Kinds]] = [
        (int | float, NUMBER), (str, TEXT), (dict, DICT), (tuple | list, SEQUENCE), (type(None), NONE),
    ]  # fmt: skip
    return next((kind for cls, kind in kinds if isinstance(value, cls)), ANYTHING)


def all_kinds(things: list[Any]) -> Kinds:
    """The kinds that any of several can be of."""
    return frozenset[Kind]().union(*map(kinds_of, things))


def only_alternative(thing: Thing) -> object:
    """The one alternative, None apart, of what is declared."""
    others = [a for a in thing.alternatives if not isinstance(a, NoneType)] if isinstance(thing, Type) else []
    return others[0] if len(others) == 1 else None


def ranks_of(thing: Thing) -> set[int]:
    """The ranks that a tensor can have, where its declaration says so."""
    others = [a for a in thing.alternatives if not isinstance(a, NoneType)] if isinstance(thing, Type) else []
    fixed = [a for a in others if isinstance(a, TensorType) and a.dims is not None and a.rest_index is None]
    return {len(tensor.dims or ()) for tensor in fixed} if len(fixed) == len(others) else set()


def families(kinds: Kinds) -> Kinds:
    """The same, all sequences being of one family: what is of different ones is never equal."""
    return kinds | SEQUENCES if kinds & SEQUENCES else kinds


def called(kinds: Kinds) -> str:
    """What a message calls a value of these kinds."""
    words = ["tuple" if kind in SEQUENCES else kind for kind in get_args(Kind) if kind in kinds - NONE]
    return " or ".join(f"a {word}" for word in dict.fromkeys(words)) or "None"


def has_dimensions(x: ast.expr, ranks: set[int]) -> str:
    """What to say where a dimension is read that is never there."""
    return f"{ast.unparse(x)} has {' or '.join(map(str, sorted(ranks)))} dimension{'s' * (ranks != {1})}"


def always_so(constant: ast.Constant, parts: list[ast.expr]) -> str:
    """What to say of a constant that is taken as true or false: `n == 64 or 128`."""
    problem = f"{ast.unparse(constant)} alone is always {'true' if constant.value else 'false'}"
    for part in parts:
        match part:
            case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() as op], comparators=[ast.Constant() as other]):
                word = "in" if isinstance(op, ast.Eq) else "not in"
                both = f"{ast.unparse(left)} {word} ({ast.unparse(other)}, {ast.unparse(constant)})"
                return f"{problem}; write each comparison out, or {both}"
    return f"{problem}; write each comparison out"


def no_operand(node: ast.expr) -> str:
    """What to say of a tensor that is compared, computed with or taken as true or false."""
    text = ast.unparse(node)
    return (
        f"{text} is a tensor, which has no truth and no order; read its shape or dtype, or use a value rule such as "
        f"within({text}, …)"
    )


def literal_index(node: ast.expr) -> int | None:
    """The whole number that an index is, where it is written out."""
    path = path_of(ast.Subscript(ast.Name("_"), node))
    key = path.steps[0][0] if path is not None else None
    return key if type(key) is int else None
