"""Which dimension expressions tell the value of a symbol, and how: `2 * D`, `B + 1`, `D / 2`.

`+ - * /` with one unknown that occurs once can be turned round; `%`, `//` and function calls only check.
"""

from __future__ import annotations

import ast
from typing import Literal

from llm_op_guard.contract.expressions import names_in
from llm_op_guard.frozen import frozen

# What to do with the observed value v and the operand a, outermost first, to get at the unknown:
# plus v+a, minus v-a, from a-v, over v/a (exact), under a/v (exact), times v*a, negate -v.
Undo = Literal["plus", "minus", "from", "over", "under", "times", "negate"]


@frozen
class Step:
    """One operation on the way from an observed size to the unknown; `operand` is None for negate."""

    undo: Undo
    operand: ast.expr | None


def inverse(node: ast.expr, unknown: str) -> list[Step] | None:
    """The steps that solve `node == v` for `unknown`, or None when it cannot be solved."""
    steps: list[Step] = []
    while True:
        match node:
            case ast.Name(id=name):
                return steps if name == unknown else None
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                steps.append(Step("negate", None))
                node = operand
            case ast.BinOp(left=left, op=op, right=right):
                in_left, in_right = unknown in names_in(left), unknown in names_in(right)
                if in_left == in_right:
                    return None
                undo = _UNDO.get((type(op), in_left))
                if undo is None:
                    return None
                steps.append(Step(undo, right if in_left else left))
                node = left if in_left else right
            case _:
                return None


# (operator, whether the unknown is its left operand) → what undoes it.
_UNDO: dict[tuple[type[ast.operator], bool], Undo] = {
    (ast.Add, True): "minus",
    (ast.Add, False): "minus",
    (ast.Sub, True): "plus",
    (ast.Sub, False): "from",
    (ast.Mult, True): "over",
    (ast.Mult, False): "over",
    (ast.Div, True): "times",
    (ast.Div, False): "under",
}
