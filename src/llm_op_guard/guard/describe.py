"""What a broken `require` looked like: the operand values of its first false part, never the contents of a tensor."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from llm_op_guard.contract.expressions import is_read
from llm_op_guard.contract.model import DtypeOf, Expr, TensorType
from llm_op_guard.guard import functions
from llm_op_guard.guard.evaluate import Values, show
from llm_op_guard.guard.reading import INAPPLICABLE, Broken


def describe_rule(rule: Expr, values: Values) -> tuple[str, str, str | None]:
    """(observed, expected, argument or None) for a rule that came out false."""
    node = _first_false(rule.node, values)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "all":
            return _describe_item(node, values)
        if node.func.id in functions.LOCATORS:
            return _describe_elements(node.func.id, node, values)
        return _operands(node.args, values), ast.unparse(node), None
    if isinstance(node, ast.Compare):
        return _operands([node.left, *node.comparators], values), ast.unparse(node), None
    if isinstance(node, ast.BoolOp):  # of an `or`, every part is false
        sides = [side for part in node.values for side in _sides(part)]
        return _operands(sides, values), ast.unparse(node), None
    return _operands([node], values), rule.text, None


def _sides(node: ast.expr) -> list[ast.expr]:
    return [node.left, *node.comparators] if isinstance(node, ast.Compare) else [node]


def _first_false(node: ast.expr, values: Values) -> ast.expr:
    """The part of an `and` chain that failed; anything else as it stands."""
    while isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        node = next(part for part in node.values if not values.value_of(part))
    return node


def _describe_item(node: ast.Call, values: Values) -> tuple[str, str, str | None]:
    """The first item of a loop that breaks its condition."""
    loop = node.args[0]
    assert isinstance(loop, ast.GeneratorExp)
    for number in values.each(loop):
        try:
            if values.value_of(loop.elt):
                continue
        except INAPPLICABLE:
            continue
        observed, expected, _ = describe_rule(Expr.of(loop.elt), values)
        return f"{observed} at item {number} of {ast.unparse(loop.generators[0].iter)}", expected, None
    return "the condition is false", ast.unparse(node), None


def _describe_elements(name: str, node: ast.Call, values: Values) -> tuple[str, str, str | None]:
    arguments, keywords = values.call_arguments(name, node)
    index, value, count = functions.LOCATORS[name](*arguments, **keywords)
    argument = ast.unparse(node.args[0])
    place = f"{argument}[{', '.join(map(str, index))}]" if index else argument
    total = functions.numel(arguments[0])
    elements = "1 element is wrong" if count == 1 else f"{count} elements are wrong, this one first"
    observed = f"{place} = {value} (of {total}, {elements})"
    if name == "within":
        low, high = arguments[1], arguments[2]
        allowed = keywords.get("allow", arguments[3] if len(arguments) > 3 else ())
        sentinels = f" or {show(allowed)}" if allowed != () else ""
        return observed, f"{show(low)} <= {argument} < {_with_name(node.args[2], high)}{sentinels}", argument
    return observed, "finite values" if name == "finite" else ast.unparse(node), argument


def _with_name(node: ast.expr, value: Any) -> str:
    return show(value) if isinstance(node, ast.Constant) else f"{show(value)} ({ast.unparse(node)})"


def _operands(nodes: list[ast.expr], values: Values) -> str:
    """`D % 2 = 1, H = 8`: every operand that is not a constant, with its value."""
    seen: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id in _CONSTANT_NAMES):
            continue
        for text, value in _shown(node, values):
            seen.setdefault(text, value)
    said = [f"{text} = {value}" for text, value in seen.items() if text != value]  # float32, (cpu, cuda)
    return ", ".join(said) or "the condition is false"


def _shown(node: ast.expr, values: Values) -> list[tuple[str, str]]:
    try:
        if is_read(node):
            return [(ast.unparse(node), show(values.raw(node)))]
        return [(ast.unparse(node), show(values.value_of(node)))]
    except (*INAPPLICABLE, Broken):
        return []


_CONSTANT_NAMES: frozenset[str] = frozenset({"floating", "half", "integer", "boolean", "complexes", "any"})


def without_repeats(options: Iterable[str]) -> list[str]:
    """`B = 1` and `1` say the same."""
    kept: list[str] = []
    for option in options:
        if not any(earlier.endswith(f"= {option}") for earlier in kept):
            kept.append(option)
    return kept


def dtypes_text(tensor: TensorType) -> str:
    """The dtypes that a type accepts."""
    names = [f"{dtype.path}.dtype" if isinstance(dtype, DtypeOf) else dtype.name for dtype in tensor.dtypes]
    return " or ".join(names)


def shape_text(tensor: TensorType) -> str:
    """The sizes of a type as they are written."""
    start = tensor.text.find("[")
    return tensor.text[start : tensor.text.rfind("]") + 1]


def rank_text(tensor: TensorType) -> str:
    """The ranks that a type accepts."""
    dims = tensor.dims or ()
    return str(len(dims)) if tensor.rest_index is None else f"{len(dims) - 1} or more"


def kind_text(value: Any) -> str:
    """What kind of thing a value is, without asking it."""
    cls = type(value)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__.split('.')[0]}.{cls.__name__}"
