"""What an expression reads from the arguments: `cos.shape[-1]` reads the shape of cos, `finite(q)` the values of q."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.path import Path, path_of
from llm_op_guard.contract.vocabulary import FUNCTIONS, TENSOR_ATTRIBUTES

_SHAPE = {"shape": "shape", "ndim": "shape", "dtype": "dtype", "device": "device"}
_SHAPE_FUNCTIONS = frozenset({"broadcasts", "numel", "dense", "stride"})


@dataclass(frozen=True)
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
