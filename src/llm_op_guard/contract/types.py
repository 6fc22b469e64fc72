"""The types of a declaration: `T[B, H, L, D] @ dev`, `None | int`, `like(cos)`."""

from __future__ import annotations

import ast
import re

from llm_op_guard.contract.expressions import check_expression, suggestion
from llm_op_guard.contract.model import (
    Alternative,
    AnySize,
    Device,
    DeviceOf,
    DeviceSymbol,
    DeviceType,
    Dim,
    Dtype,
    DtypeName,
    DtypeOf,
    DtypeSet,
    DtypeSymbol,
    Expr,
    Like,
    ListType,
    LiteralType,
    NoneType,
    Rest,
    RestOf,
    ScalarType,
    Size,
    SizeOneOf,
    TensorType,
    TupleType,
    Type,
)
from llm_op_guard.contract.path import path_of
from llm_op_guard.contract.source import Source
from llm_op_guard.contract.vocabulary import DEVICE_TYPES, DTYPE_NAMES, DTYPE_SETS, SCALAR_TYPES

_DTYPE_SYMBOL = re.compile(r"[A-Z][0-9]?")


def parse_type(node: ast.expr, source: Source) -> Type:
    """Read a type; raises ContractError where it is none."""
    return Type(tuple(_alternatives(node, source)), ast.unparse(node))


def _alternatives(node: ast.expr, source: Source) -> list[Alternative]:
    match node:
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return [*_alternatives(left, source), *_alternatives(right, source)]
        case ast.Subscript(value=ast.Name(id="optional"), slice=inner):
            return [NoneType(), *_alternatives(inner, source)]
    return [_alternative(node, source)]


def _alternative(node: ast.expr, source: Source) -> Alternative:
    text = ast.unparse(node)
    match node:
        case ast.Constant(value=None):
            return NoneType()
        case ast.Constant(value=str() | int() | float() as value):
            return LiteralType(value, text)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return LiteralType(-value, text)
        case ast.Name(id=name) if name in SCALAR_TYPES:
            return ScalarType(name)
        case ast.Call(func=ast.Name(id="like"), args=[inner], keywords=[]):
            path = path_of(inner)
            if path is None:
                raise source.error("like takes a parameter or what can be read from one", inner)
            return Like(path, text)
        case ast.Subscript(value=ast.Name(id="list"), slice=inner):
            return ListType(parse_type(inner, source), text)
        case ast.Subscript(value=ast.Name(id=name)) if name in SCALAR_TYPES and name not in DTYPE_NAMES:
            raise source.error(f"{name} takes nothing in brackets: write {name}", node)
        case ast.Subscript(value=ast.Name(id="tuple")) | ast.Name(id="tuple"):
            raise source.error("a tuple is written (type, type), one of any length list[type]", node)
        case ast.Tuple(elts=items):
            return TupleType(tuple(parse_type(item, source) for item in items), text)
    return _tensor(node, source)


def _tensor(node: ast.expr, source: Source) -> TensorType:
    text = ast.unparse(node)
    devices: tuple[Device, ...] | None = None
    dims: tuple[Dim, ...] | None = None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        devices = _devices(node.right, source)
        node = node.left
    if isinstance(node, ast.Subscript):
        dims = _dims(node.slice, source)
        node = node.value
    return TensorType(tuple(_dtypes(node, source)), dims, devices, text)


# ---------------------------------------------------------------- dtypes


def _dtypes(node: ast.expr, source: Source) -> list[Dtype]:
    match node:
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return [*_dtypes(left, source), *_dtypes(right, source)]
        case ast.Name(id=name) if name in DTYPE_NAMES:
            return [DtypeName(name)]
        case ast.Name(id=name) if name in DTYPE_SETS:
            return [DtypeSet(name)]
        case ast.Name(id=name) if _DTYPE_SYMBOL.fullmatch(name):
            return [DtypeSymbol(name)]
        case ast.Attribute(attr="dtype", value=value) if (path := path_of(value)) is not None:
            return [DtypeOf(path)]
        case ast.Name(id=name):
            known = [*DTYPE_NAMES, *DTYPE_SETS, *SCALAR_TYPES, "optional", "like", "list"]
            hint = suggestion(name, known) or "; a tensor type begins with its dtype: floating[B, D], T[B, D], int64[N]"
            raise source.error(f"unknown type {name!r}{hint}", node)
    raise source.error("not a type: write dtype[sizes] @ device, None, int, float, bool, str, like(x) or a union", node)


# ---------------------------------------------------------------- dimensions


# Python takes no more names in front of a star, and a native program numbers them with a byte.
_MOST_BESIDE_A_GROUP = 255


def _dims(node: ast.expr, source: Source) -> tuple[Dim, ...]:
    items = node.elts if isinstance(node, ast.Tuple) else [node]
    dims = tuple(_dim(item, source) for item in items)
    open_ended = [item for item, dim in zip(items, dims, strict=True) if isinstance(dim, Rest | RestOf)]
    if len(open_ended) > 1:
        raise source.error("at most one dimension group of open length: `...`, `*lead` or `*x.shape`", open_ended[1])
    if open_ended and len(items) - 1 > _MOST_BESIDE_A_GROUP:
        problem = f"more than {_MOST_BESIDE_A_GROUP} dimensions beside a group of open length"
        raise source.error(problem, open_ended[0])
    return dims


def _dim(node: ast.expr, source: Source) -> Dim:
    match node:
        case ast.Constant(value=value) if value is Ellipsis:
            return Rest(None)
        case ast.Name(id="_"):
            return AnySize()
        case ast.Starred(value=ast.Name(id=name)):
            return Rest(name)
        case ast.Starred(value=ast.Attribute(attr="shape", value=value)) if (path := path_of(value)) is not None:
            return RestOf(path)
        case ast.Starred():
            raise source.error("a star stands before a name or the shape of an argument: *lead, *q.shape", node)
        case ast.BinOp(op=ast.BitOr()):
            return SizeOneOf(tuple(_size_options(node, source)))
        case ast.Constant(value=bool() | float() | str() | None):
            raise source.error("a dimension is a whole number, a symbol or an expression of these", node)
        case ast.Constant(value=int() as value) if value < 0:
            raise source.error("a dimension cannot be negative", node)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
            raise source.error("a dimension cannot be negative", node)
    return Size(_size(node, source))


def _size(node: ast.expr, source: Source) -> Expr:
    if not isinstance(
        node, ast.Constant | ast.Name | ast.BinOp | ast.UnaryOp | ast.Call | ast.Subscript | ast.Attribute
    ):
        raise source.error("a dimension is a whole number, a symbol or an expression of these", node)
    check_expression(node, source)
    return Expr.of(node)


def _size_options(node: ast.expr, source: Source) -> list[Expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_size_options(node.left, source), *_size_options(node.right, source)]
    return [_size(node, source)]


# ---------------------------------------------------------------- devices


def _devices(node: ast.expr, source: Source) -> tuple[Device, ...] | None:
    match node:
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            parts = (_devices(left, source), _devices(right, source))
            return None if None in parts else tuple(d for part in parts for d in part or ())
        case ast.Name(id="any"):
            return None
        case ast.Name(id=name) if name in DEVICE_TYPES:
            return (DeviceType(name),)
        case ast.Name(id=name):
            return (DeviceSymbol(name),)
        case ast.Attribute(attr="device", value=value) if (path := path_of(value)) is not None:
            return (DeviceOf(path),)
    raise source.error("a device is a symbol, a device type such as cpu or cuda, any, or x.device", node)
