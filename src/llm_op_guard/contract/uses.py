"""Expressions that could never be judged: refused when the contract is loaded, since nobody would notice later."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from llm_op_guard.contract.expressions import (
    calls_in,
    device_types,
    gives_tensor,
    names_in,
    suggestion,
    tensor_arguments,
)
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
from llm_op_guard.contract.vocabulary import DEVICE_TYPES, DTYPE_NAMES, DTYPE_SETS, FUNCTIONS, TENSOR_ATTRIBUTES


def check_uses(clause: Clause, contract: Contract) -> None:
    """Raise ContractError for an expression that says nothing of a call, or uses a thing as what it is not."""
    statement = clause.statement
    if isinstance(statement, Assign) and set(statement.names) & set(names_in(statement.expr.node)):
        raise contract.source.error("a name is defined by itself", statement.place)
    judged = [condition.test for condition in clause.conditions]
    if isinstance(statement, Require):
        judged.append(statement.expr)
    # A library's version is no part of the call, and yet what a call may depend on.
    if (
        isinstance(statement, Require)
        and not names_in(statement.expr.node)
        and "version" not in calls_in(statement.expr.node)
    ):
        raise contract.source.error("the condition reads nothing of the call", statement.expr.node)
    kept = [expr for _, expr in statement.facts] if isinstance(statement, Remember) else []
    given = [statement.expr] if isinstance(statement, Assign) else []
    for expr in (*judged, *kept, *given):
        _check(expr, contract)
    texts = [statement.reason.because, statement.reason.hint] if isinstance(statement, Declare | Require) else []
    for node in (expr.node for expr in (*judged, *kept, *given, *texts) if expr is not None):
        _check_device_types(node, contract, _kinds(contract), frozenset({*contract.parameters, *contract.assigned}))


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
    in_value_functions = {
        id(part)
        for call in ast.walk(whole)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in FUNCTIONS
        for argument in tensor_arguments(call)
        for part in ast.walk(argument)
    }
    for node in ast.walk(whole):
        match node:
            case ast.Subscript(value=ast.Name(id=name)) if kinds.get(name) == "tensor":
                if id(node) not in in_value_functions:
                    instead = f"such as first({ast.unparse(node)})"
                    raise contract.source.error(
                        f"{name} is a tensor, whose items only value functions read, {instead}", node
                    )
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


def _check_device_types(node: ast.AST, contract: Contract, kinds: dict[str, str], own: frozenset[str]) -> None:
    """Types of device are compared with devices, and stand nowhere else."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            sides = [(left, right)] if isinstance(op, ast.In | ast.NotIn) else [(left, right), (right, left)]
            for device, written in sides:
                types = device_types(written, own)
                listed = isinstance(written, ast.Tuple | ast.List)
                if not types or not isinstance(op, ast.In | ast.NotIn if listed else ast.Eq | ast.NotEq):
                    continue
                if not _may_be_device(device, contract, kinds, own):
                    raise contract.source.error(f"{ast.unparse(device)} is no device{_DEVICE_TYPES}", device)
                _check_device_types(device, contract, kinds, own)
                return
        case ast.GeneratorExp(elt=elt, generators=[loop]):
            _check_device_types(loop.iter, contract, kinds, own)
            bound = own | {name.id for name in ast.walk(loop.target) if isinstance(name, ast.Name)}
            for part in (*loop.ifs, elt):
                _check_device_types(part, contract, kinds, bound)
            return
        case ast.Name(id=name) if device_types(node, own):
            raise contract.source.error(f"{name} is a type of device{_DEVICE_TYPES}", node)
        case ast.Call(func=ast.Name(), args=arguments, keywords=keywords):
            for argument in (*arguments, *keywords):
                _check_device_types(argument, contract, kinds, own)
            return
    for child in ast.iter_child_nodes(node):
        _check_device_types(child, contract, kinds, own)


_DEVICE_TYPES = "; a type of device is compared with a device: x.device == cpu, or x.device in (cpu, cuda)"


def _may_be_device(node: ast.expr, contract: Contract, kinds: dict[str, str], own: frozenset[str]) -> bool:
    match node:
        case ast.Name(id=name) if name in contract.symbols:
            return contract.symbols[name] == "device"
        case ast.Name(id=name):
            words = {*contract.constants, *DTYPE_NAMES, *DTYPE_SETS, *DEVICE_TYPES} - own
            return name not in words and kinds.get(name, "other") == "other"
        case ast.Attribute(attr=attr):
            return attr == "device" or attr not in TENSOR_ATTRIBUTES
        case ast.Subscript(value=ast.Attribute(attr=attr)):
            return attr not in TENSOR_ATTRIBUTES
        case ast.Subscript():
            return True
        case ast.IfExp(body=body, orelse=orelse):
            return all(_may_be_device(part, contract, kinds, own) for part in (body, orelse))
        case ast.Call(func=ast.Name(id="get" | "recall")):
            return True
    return False


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
        if kind == "string" and (
            (isinstance(argument, ast.Constant) and not isinstance(argument.value, str))
            or (isinstance(argument, ast.Name) and kinds.get(argument.id) in ("tensor", "number"))
        ):
            raise contract.source.error(f"{function} takes a text here", argument)


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
    """What parameters and assigned names are, where all that is said of one agrees: tensor or number."""
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
        if isinstance(statement, Assign) and gives_tensor(statement.expr.node):
            found.setdefault(statement.names[0], set()).add("tensor")
    return {name: next(iter(kinds)) for name, kinds in found.items() if len(kinds) == 1}
