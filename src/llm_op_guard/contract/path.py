"""What a contract reads: a parameter, and what can be reached from it."""

from __future__ import annotations

import ast

from llm_op_guard.frozen import frozen


@frozen
class Path:
    """A parameter or assigned name, and what is read from it: `q`, `self.weight`, `kwargs["input_ids"]`, `result[0]`.

    `steps` are attribute names (`".weight"`) and literal keys (`["input_ids"]`, `[0]`).
    """

    root: str
    steps: tuple[str | tuple[str | int], ...] = ()

    def item(self, index: int | str) -> Path:
        """The path to an item of the sequence here; `_` stands for any."""
        return Path(self.root, (*self.steps, (index,)))

    def __str__(self) -> str:
        return self.root + "".join(_step_text(step) for step in self.steps)


def _step_text(step: str | tuple[str | int]) -> str:
    if isinstance(step, str):
        return f".{step}"
    return "[_]" if step == ("_",) else f"[{step[0]!r}]"


def path_of(node: ast.expr) -> Path | None:
    """The path that an expression spells, or None when it is not a plain path."""
    steps: list[str | tuple[str | int]] = []
    while True:
        match node:
            case ast.Attribute(value=value, attr=attr):
                steps.append(attr)
                node = value
            case ast.Subscript(value=value, slice=ast.Constant(value=str() | int() as key)):
                steps.append((key,))
                node = value
            case ast.Subscript(value=value, slice=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as key))):
                steps.append((-key,))
                node = value
            case ast.Name(id=root):
                return Path(root, tuple(reversed(steps)))
            case _:
                return None
