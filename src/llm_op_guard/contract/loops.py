"""`for` statements and `all`/`any`/`sum` over sequences, turned into what the rest of the language knows.

Over a tuple that is written out, everything is written out: `for x in (q, k): require(dense(x))` is two rules. Over a
sequence of the call, a `for` is a rule about all its items: `require(all(… for x in xs))`.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator

from llm_op_guard.contract.expressions import names_in
from llm_op_guard.contract.model import Assign, Declare, Expr, For, If, Remember, Require, Statement
from llm_op_guard.contract.path import path_of
from llm_op_guard.contract.source import Place, Source

# What a loop that is written out may stand for: far above any real contract, and read in good time.
_MOST_ITEMS = 64
_MOST_COPIES = 400


def written_out(expr: Expr, source: Source) -> Expr:
    """The expression with every loop over a tuple that is written out replaced by its items.

    Raises ContractError where that would be too many, or would give a name another meaning.
    """
    copies = 0

    class WriteOut(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            match node:
                case ast.Call(func=ast.Name(id=name), args=[ast.GeneratorExp(elt=elt, generators=[loop])]) if (
                    isinstance(loop.iter, ast.Tuple | ast.List)
                    and loop.iter.elts
                    and not any(isinstance(item, ast.Starred) for item in loop.iter.elts)
                ):
                    for item in loop.iter.elts:
                        # With a condition nothing is written out, and what is read may have parts at the call.
                        if not loop.ifs or isinstance(item, ast.Tuple | ast.List):
                            _refuse_unequal(loop.target, item, source)
                    if loop.ifs:
                        return node
                    nonlocal copies
                    copies += len(loop.iter.elts) * sum(1 for _ in ast.walk(elt)) // 8 + len(loop.iter.elts)
                    _refuse_many(loop.iter.elts, copies, node, source)
                    parts = [_replaced(elt, _bound(loop.target, item), source) for item in loop.iter.elts]
                    return ast.copy_location(_joined(name, parts), node)
            return node

    if not any(isinstance(node, ast.GeneratorExp) for node in ast.walk(expr.node)):
        return expr
    return Expr.of(ast.fix_missing_locations(WriteOut().visit(copy.deepcopy(expr.node))))


def _refuse_unequal(target: ast.expr, item: ast.expr, source: Source) -> None:
    if not _bound(target, item):
        raise source.error("each item has as many parts as the loop has names", item)


def _refuse_many(items: list[ast.expr], copies: int, node: ast.AST | Place, source: Source) -> None:
    if len(items) > _MOST_ITEMS or copies > _MOST_COPIES:
        raise source.error("the loop stands for too much; go over a sequence of the call instead", node)


def _joined(name: str, parts: list[ast.expr]) -> ast.expr:
    if len(parts) == 1:
        return parts[0]
    if name in ("all", "any"):
        return ast.BoolOp(op=ast.And() if name == "all" else ast.Or(), values=parts)
    total = parts[0]
    for part in parts[1:]:
        total = ast.BinOp(left=total, op=ast.Add(), right=part)
    return total


def _bound(target: ast.expr, item: ast.expr) -> dict[str, ast.expr]:
    """What the names of a loop stand for at one item; nothing where the item has not as many parts."""
    if isinstance(target, ast.Name):
        return {target.id: item}
    names = target.elts if isinstance(target, ast.Tuple) else []
    parts = item.elts if isinstance(item, ast.Tuple | ast.List) else []
    if len(names) != len(parts):
        return {}
    return {name.id: part for name, part in zip(names, parts, strict=True) if isinstance(name, ast.Name)}


def _replaced(node: ast.expr, bound: dict[str, ast.expr], source: Source) -> ast.expr:
    outside = {name for value in bound.values() for name in names_in(value)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.comprehension):
            taken = {name.id for name in ast.walk(inner.target) if isinstance(name, ast.Name)}
            if taken & (outside | bound.keys()):
                name = sorted(taken & (outside | bound.keys()))[0]
                raise source.error(f"{name!r} is the name of a loop within and of something else here", node)

    class Replace(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return copy.deepcopy(bound[node.id]) if node.id in bound else node

    replaced: ast.expr = Replace().visit(copy.deepcopy(node))
    for part in ast.walk(replaced):
        if isinstance(part, ast.expr):
            ast.copy_location(part, node)  # errors point to the loop's body
    return replaced


def unrolled(statement: For, source: Source) -> Iterator[Statement]:
    """The statements that a `for` stands for."""
    items = statement.iterable.node
    if isinstance(items, ast.Tuple | ast.List):
        depth = _depth(statement)
        _refuse_many(items.elts, len(items.elts) ** depth, statement.place, source)
        for item in items.elts:
            if isinstance(item, ast.Starred):
                raise source.error("the items of a loop that is written out are written one by one", item)
            _refuse_unequal(statement.target.node, item, source)
            bound = _bound(statement.target.node, item)
            yield from _substituted(statement.body, bound, ast.unparse(item), source)
        return
    yield from _quantified(statement.body, statement, (), source)


_NOT_HELD: dict[type[Statement], str] = {
    Assign: "gives no names: write the expression in place of the name",
    Declare: "declares nothing: a declaration stands outside, and x: list[type] speaks of every item",
    Remember: "remembers nothing: remember stands outside",
}


def _depth(statement: Statement) -> int:
    """How many loops stand within each other."""
    match statement:
        case For(body=body):
            return 1 + max((_depth(inner) for inner in body), default=0)
        case If(body=body, orelse=orelse):
            return max((_depth(inner) for inner in (*body, *orelse)), default=0)
    return 0


def _substituted(
    body: Iterable[Statement], bound: dict[str, ast.expr], item: str, source: Source
) -> Iterator[Statement]:
    """The statements of a loop for one item."""
    for statement in body:
        match statement:
            case If(test=test, body=inner, orelse=orelse, place=place):
                yield If(
                    Expr.of(_replaced(test.node, bound, source)),
                    tuple(_substituted(inner, bound, item, source)),
                    tuple(_substituted(orelse, bound, item, source)),
                    place,
                )
            case Require(expr=expr):
                replaced = Expr.of(_replaced(expr.node, bound, source))
                own = statement.id != expr.text
                yield Require(
                    replaced,
                    f"{statement.id} ({item})" if own else replaced.text,
                    statement.reason,
                    statement.promised,
                    statement.place,
                )
            case Declare(path=path):
                target = bound.get(path.root)
                root = path_of(target) if target is not None else path
                if root is None:
                    raise source.error("a declaration names a parameter or what can be read from one", statement.place)
                steps = path.steps if target is not None else ()
                whole = type(path)(root.root, (*root.steps, *steps))
                yield Declare(whole, statement.type, statement.reason, statement.place)
            case Assign() | Remember():
                raise source.error(f"a loop {_NOT_HELD[type(statement)]}", statement.place)
            case For():
                iterable = Expr.of(_replaced(statement.iterable.node, bound, source))
                inner_loop = For(statement.target, iterable, statement.body, statement.place)
                for nested in unrolled(inner_loop, source):
                    yield from _substituted((nested,), bound, item, source)


def _quantified(
    body: Iterable[Statement], loop: For, conditions: tuple[ast.expr, ...], source: Source
) -> Iterator[Statement]:
    """The rules of a loop over a sequence of the call, each about all of its items."""
    for statement in body:
        match statement:
            case Require(expr=expr):
                generator = ast.GeneratorExp(
                    elt=expr.node,
                    generators=[ast.comprehension(loop.target.node, loop.iterable.node, list(conditions), is_async=0)],
                )
                call = ast.Call(ast.Name("all", ast.Load()), [generator], [])
                about_all = Expr.of(ast.fix_missing_locations(ast.copy_location(call, expr.node)))
                own = statement.id != expr.text
                yield Require(
                    about_all,
                    statement.id if own else about_all.text,
                    statement.reason,
                    statement.promised,
                    statement.place,
                )
            case If(test=test, body=inner, orelse=orelse):
                yield from _quantified(inner, loop, (*conditions, test.node), source)
                refuted = ast.copy_location(ast.UnaryOp(ast.Not(), test.node), test.node)
                yield from _quantified(orelse, loop, (*conditions, refuted), source)
            case _:
                instead = f"; it {_NOT_HELD[type(statement)]}" if type(statement) in _NOT_HELD else ""
                raise source.error(
                    f"a loop over a sequence of the call holds require, ensure and if{instead}", statement.place
                )
