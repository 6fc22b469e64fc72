"""Expressions that could never be judged: refused when the contract is loaded, since nobody would notice later."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from llm_op_guard.contract.expressions import names_in, suggestion
from llm_op_guard.contract.model import (
    Assign,
    Clause,
    Contract,
    Declare,
    Expr,
    Like,
    NoneType,
    Remember,
    Require,
    ScalarType,
    TensorType,
)
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.vocabulary import FUNCTIONS, TENSOR_ATTRIBUTES


def check_uses(clause: Clause, contract: Contract) -> None:
    """Raise ContractError for an expression that says nothing of a call, or uses a thing as what it is not."""
    statement = clause.statement
    if isinstance(statement, Assign) and set(statement.names) & set(names_in(statement.expr.node)):
        raise contract.source.error("a name is defined by itself", statement.place)
    judged = [condition.test for condition in clause.conditions]
    if isinstance(statement, Require):
        judged.append(statement.expr)
    if isinstance(statement, Require) and not names_in(statement.expr.node):
        raise contract.source.error("the condition reads nothing of the call", statement.expr.node)
    kept = [expr for _, expr in statement.facts] if isinstance(statement, Remember) else []
    for expr in (*judged, *kept, *([statement.expr] if isinstance(statement, Assign) else [])):
        _check(expr, contract)


def _check(expr: Expr, contract: Contract) -> None:
    kinds = _kinds(contract)
    whole = expr.node
    for operand in _plain_operands(whole):
        if isinstance(operand, ast.Name) and kinds.get(operand.id) == "tensor":
            raise contract.source.error(
                f"{operand.id} is a tensor, which has no truth and no order; read its shape or dtype, or use a value "
                f"rule such as within({operand.id}, …)",
                operand,
            )
    for node in ast.walk(whole):
        match node:
            case ast.BinOp(left=left, right=right):
                for side in (left, right):
                    if isinstance(side, ast.Constant) and not isinstance(side.value, int | float):
                        raise contract.source.error("arithmetic is for numbers", side)
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if kinds.get(name) == "tensor":
                if attr not in TENSOR_ATTRIBUTES:
                    known = ", ".join(TENSOR_ATTRIBUTES)
                    hint = suggestion(attr, TENSOR_ATTRIBUTES) or f"; what can be read from a tensor: {known}"
                    raise contract.source.error(f"{attr!r} is not read from a tensor{hint}", node)
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id=name), attr="device" | "dtype" | "shape")) if (
                kinds.get(name) == "tensor"
            ):
                raise contract.source.error(f"{node.attr!r} is not read from that", node)
            case ast.Call(func=ast.Name(id=function), args=arguments) if function in FUNCTIONS:
                _check_arguments(function, arguments, kinds, contract)


def _check_arguments(function: str, arguments: list[ast.expr], kinds: dict[str, str], contract: Contract) -> None:
    declared = FUNCTIONS[function].arguments
    for index, argument in enumerate(arguments):
        kind = declared[min(index, len(declared) - 1)][1]
        if kind == "tensor" and isinstance(argument, ast.Name) and kinds.get(argument.id) == "number":
            raise contract.source.error(f"{function} takes a tensor; {argument.id} is a number", argument)
        if kind == "sequence" and isinstance(argument, ast.Name) and kinds.get(argument.id) == "tensor":
            raise contract.source.error(f"{function} takes a sequence: {argument.id}.shape", argument)
        if kind in ("int", "number") and isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            raise contract.source.error(f"{function} takes a number here", argument)


def _plain_operands(node: ast.expr) -> Iterator[ast.expr]:
    """The parts of an expression that are used as plain values: compared, computed with, taken as true or false."""
    match node:
        case ast.BoolOp(values=values):
            for value in values:
                yield from _plain_operands(value)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            if not any(isinstance(op, ast.Is | ast.IsNot) for op in ops):
                for operand in (left, *comparators):
                    yield from _plain_operands(operand)
        case ast.BinOp(left=left, right=right):
            yield from _plain_operands(left)
            yield from _plain_operands(right)
        case ast.UnaryOp(operand=operand):
            yield from _plain_operands(operand)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            for part in (test, body, orelse):
                yield from _plain_operands(part)
        case ast.Name():
            yield node


def _kinds(contract: Contract) -> dict[str, str]:
    """What parameters are, where every declaration of one agrees: tensor or number."""
    found: dict[str, set[str]] = {}
    for clause in contract.clauses:
        statement = clause.statement
        if isinstance(statement, Declare) and statement.path == Path(statement.path.root):
            kinds = found.setdefault(statement.path.root, set())
            for alternative in statement.type.alternatives:
                match alternative:
                    case TensorType() | Like():
                        kinds.add("tensor")
                    case ScalarType(text="int" | "float" | "bool"):
                        kinds.add("number")
                    case NoneType():
                        pass
                    case _:
                        kinds.add("other")
    return {name: next(iter(kinds)) for name, kinds in found.items() if len(kinds) == 1}
