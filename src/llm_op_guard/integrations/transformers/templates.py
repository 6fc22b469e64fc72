"""Syntax compared with templates: Python source in which names of capitals are holes, which anything fills."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import Any

_HOLE = re.compile(r"[A-Z][A-Z_]*")
_NOT_WRITTEN = frozenset({"ctx", "kind", "type_comment"})


def filled(template: str, node: ast.AST | None) -> dict[str, str] | None:
    """What fills the holes of a template, as it is written; None where `node` is something else.

    A hole takes any expression, or the name of an attribute; the same hole takes the same everywhere. `...` as the last
    argument of a call takes any further arguments, and there keywords may stand in any order.
    """
    holes: dict[str, str] = {}
    return holes if _fits(_tree(template), node, holes) else None


def fits(template: str, node: ast.AST | None) -> bool:
    """Whether `node` is what a template says."""
    return filled(template, node) is not None


@cache
def _tree(template: str) -> ast.AST:
    (statement,) = ast.parse(template).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _fits(template: Any, node: Any, holes: dict[str, str]) -> bool:
    match template:
        case ast.Name(id=name) if _HOLE.fullmatch(name):
            return isinstance(node, ast.expr) and _fills(name, ast.unparse(node), holes)
        case ast.Attribute(attr=name) if _HOLE.fullmatch(name):
            return (
                isinstance(node, ast.Attribute)
                and _fits(template.value, node.value, holes)
                and _fills(name, node.attr, holes)
            )
        case ast.Call(args=[*first, ast.Constant(value=value)]) if value is ...:
            named = {keyword.arg: keyword for keyword in node.keywords} if isinstance(node, ast.Call) else {}
            return (
                isinstance(node, ast.Call)
                and _fits(template.func, node.func, holes)
                and _fits(first, node.args[: len(first)], holes)
                and all(_fits(keyword, named.get(keyword.arg), holes) for keyword in template.keywords)
            )
        case ast.AST():
            return type(template) is type(node) and all(
                _fits(getattr(template, field), getattr(node, field), holes)
                for field in template._fields
                if field not in _NOT_WRITTEN
            )
        case list():
            return len(template) == len(node) and all(
                _fits(one, other, holes) for one, other in zip(template, node, strict=True)
            )
    return type(template) is type(node) and bool(template == node)


def _fills(name: str, written: str, holes: dict[str, str]) -> bool:
    return holes.setdefault(name, written) == written
