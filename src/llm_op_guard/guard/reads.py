"""What expressions and contracts read: `cos.shape[-1]` reads the shape of cos, `finite(q)` the values of q."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from llm_op_guard.contract.model import Clause, Contract, Declare, LiteralType, Remember, Require
from llm_op_guard.contract.path import Path, path_of
from llm_op_guard.contract.vocabulary import FUNCTIONS, TENSOR_ATTRIBUTES
from llm_op_guard.contract.walk import declared_paths, paths_in_type, tensor_types
from llm_op_guard.frozen import frozen

_SHAPE = {"shape": "shape", "ndim": "shape", "dtype": "dtype", "device": "device"}
_SHAPE_FUNCTIONS = frozenset({"broadcasts", "numel", "dense", "stride", "aligned"})


@frozen
class Read:
    """An argument and the aspect of it that is read: shape, dtype, device, value or the object itself."""

    path: Path
    aspect: str


def reads_of(node: ast.AST, contract: Contract) -> list[Read]:
    """Everything that an expression reads from parameters and assigned names, in the order it is written."""
    roots = {*contract.parameters, *contract.assigned, "result"}
    found: list[Read] = []

    def visit(part: ast.AST, aspect: str) -> None:
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id in contract.imports:
            for argument in part.args:
                visit(argument, "value")  # nobody knows what an imported predicate looks at
            return
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id in FUNCTIONS:
            function = FUNCTIONS[part.func.id]
            inner = (
                "value" if function.cost_class == "B" else "shape" if function.name in _SHAPE_FUNCTIONS else "object"
            )
            for index, argument in enumerate(part.args):
                kind = function.arguments[min(index, len(function.arguments) - 1)][1]
                visit(argument, inner if kind in ("tensor", "shape") else "object")
            for keyword in part.keywords:
                visit(keyword.value, "object")
            return
        if isinstance(part, ast.GeneratorExp):
            # What a loop goes through comes before what it asks of each item.
            for child in (*part.generators, part.elt):
                visit(child, "object")
            return
        if isinstance(part, ast.comprehension):
            for child in (part.iter, *part.ifs):
                visit(child, "object")
            return
        if isinstance(part, ast.Subscript) and path_of(part) is None:
            visit(part.value, aspect)
            visit(part.slice, "object")
            return
        path = path_of(part) if isinstance(part, ast.expr) else None
        if path is not None:
            if path.root in roots:
                found.append(_read_at(path, aspect))
            return
        for child in ast.iter_child_nodes(part):
            visit(child, "object")

    visit(node, "object")
    return list(dict.fromkeys(found))


def _read_at(path: Path, aspect: str) -> Read:
    """Cut a path at the first tensor attribute: what stands before it is the argument."""
    for index, step in enumerate(path.steps):
        if isinstance(step, str) and step in TENSOR_ATTRIBUTES:
            return Read(Path(path.root, path.steps[:index]), _SHAPE.get(step, "object"))
    return Read(path, aspect)


def misspelling(name: str) -> str:
    """A name with its second letter left out."""
    return name[:1] + name[2:]


def reads_of_items(expression: ast.expr) -> Iterator[Read]:
    """What is read of an item whose index is worked out.

    `layers[layer_idx].is_sliding` reads as of the first two items, `kwargs[misspelt(kwargs, "labels")].shape` as of one
    that is misspelt.
    """
    for node in ast.walk(expression):
        steps: list[str] = []
        inner = node
        while isinstance(inner, ast.Attribute):
            steps.insert(0, inner.attr)
            inner = inner.value
        if not steps or not isinstance(inner, ast.Subscript) or path_of(inner) is not None:
            continue
        owner = path_of(inner.value)
        keys: list[str | int] = [0, 1]
        match inner.slice:
            case ast.Slice() | ast.Tuple():
                continue
            case ast.Call(func=ast.Name(id="misspelt"), args=[_, *names]):
                keys = [misspelling(str(name.value)) for name in names if isinstance(name, ast.Constant)]
        if owner is not None:
            for key in keys:
                yield _read_at(Path(owner.root, (*owner.steps, (key,), *steps)), "object")


def expressions_of(clause: Clause) -> list[ast.expr]:
    """The expressions of a clause that are judged: conditions, and what it requires, assigns or remembers."""
    statement = clause.statement
    nodes = [condition.test.node for condition in clause.conditions]
    if isinstance(statement, Remember):
        return nodes + [expr.node for _, expr in statement.facts]
    return nodes if isinstance(statement, Declare) else [*nodes, statement.expr.node]


def read_paths(contract: Contract) -> Iterator[Path]:
    """Every path of the arguments that a contract declares or reads."""
    for clause in contract.clauses:
        if isinstance(clause.statement, Declare):
            yield from (path for path, _ in declared_paths(clause.statement.path, clause.statement.type))
            yield from paths_in_type(clause.statement.type)
        elif isinstance(clause.statement, Remember):
            yield clause.statement.path
        for node in (*expressions_of(clause), *_sizes_and_reasons(clause)):
            for read in (*reads_of(node, contract), *reads_of_items(node)):
                yield read.path
                if read.aspect in ("shape", "dtype", "device"):  # of what is no tensor it is an attribute as any other
                    yield from (Path(read.path.root, (*read.path.steps, name)) for name in ("ndim", read.aspect))


def _sizes_and_reasons(clause: Clause) -> Iterator[ast.expr]:
    """What a clause reads besides what it judges: the sizes of types, and what its reasons show."""
    statement = clause.statement
    if isinstance(statement, Declare):
        for tensor in tensor_types(statement.type):
            yield from (expr.node for expr in tensor.sizes)
    if isinstance(statement, Declare | Require):
        yield from (expr.node for expr in (statement.reason.because, statement.reason.hint) if expr is not None)


def read_whole(contract: Contract) -> frozenset[Path]:
    """The lists whose items expressions look at one by one or together: not those that loops go through, or `len`."""
    found: set[Path] = set()

    def visit(node: ast.AST) -> None:
        match node:
            case ast.Call(func=ast.Name(id="len" | "has" | "enumerate" | "zip" | "items"), args=arguments):
                for argument in arguments:
                    if not isinstance(argument, ast.expr) or path_of(argument) is None:
                        visit(argument)
                return
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()]) if path_of(left) is not None:
                return
            case ast.comprehension(iter=sequence, ifs=conditions):
                for part in (*conditions, *([] if path_of(sequence) is not None else [sequence])):
                    visit(part)
                return
        path = path_of(node) if isinstance(node, ast.expr) else None
        if path is not None:
            found.add(path)
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    for clause in contract.clauses:
        for expression in (*expressions_of(clause), *_sizes_and_reasons(clause)):
            visit(expression)
    return frozenset(found)


def asked_of_objects(contract: Contract) -> Iterator[tuple[Path, ast.Call]]:
    """The functions that a contract asks about objects (`cache_length(cache)`), and where those stand."""
    for clause in contract.clauses:
        for expression in expressions_of(clause):
            for node in ast.walk(expression):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                    function = FUNCTIONS.get(node.func.id)
                    path = path_of(node.args[0])
                    if function is not None and path is not None and function.arguments[0][1] == "owner":
                        yield path, node


def texts_spelt(contract: Contract) -> Iterator[str]:
    """The texts that a contract spells: those alone may be kept of a call."""
    for clause in contract.clauses:
        for expression in expressions_of(clause):
            for node in ast.walk(expression):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
        if isinstance(clause.statement, Declare):
            for alternative in clause.statement.type.alternatives:
                if isinstance(alternative, LiteralType) and isinstance(alternative.value, str):
                    yield alternative.value
    yield from (part for value in contract.constants.values() for part in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for part in (*value.keys(), *value.values()) for text in _texts(part))
    elif isinstance(value, tuple | list):
        yield from (text for part in value for text in _texts(part))


def functions_called(contract: Contract) -> set[str]:
    """The functions of the language that a contract calls."""
    return {
        node.func.id
        for clause in contract.clauses
        for expression in expressions_of(clause)
        for node in ast.walk(expression)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
