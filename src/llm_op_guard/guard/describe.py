"""What a broken `require` looked like: the operand values of its first false part, never the contents of a tensor."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from llm_op_guard.contract.expressions import is_read
from llm_op_guard.contract.model import DtypeOf, Expr, LiteralType, TensorType, Type
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.vocabulary import DTYPE_SETS
from llm_op_guard.guard import elements, functions
from llm_op_guard.guard.evaluate import Values, show
from llm_op_guard.guard.reading import INAPPLICABLE, Broken, is_a, is_tensor


def describe_rule(rule: Expr, values: Values) -> tuple[str, str, str | None]:
    """(observed, expected, argument or None) for a rule that came out false."""
    node = _first_false(rule.node, values)
    match node:
        case ast.Call(func=ast.Name(id="all"), args=[ast.GeneratorExp() as loop]):
            for number in _items(loop, values, outcome=False):
                observed, expected, _ = describe_rule(Expr.of(loop.elt), values)
                return f"{observed} {_at_item(number, loop)}", expected, None
        case ast.Call() if (told := elements.broken(node, values)) is not None:
            return told
    observed = ", ".join(dict.fromkeys(_reasons(node, values, outcome=False)))
    return observed or "the condition is false", ast.unparse(node), None


def _first_false(node: ast.expr, values: Values) -> ast.expr:
    """The part of an `and` chain that failed; anything else as it stands."""
    while isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        node = _first(node.values, values, outcome=False)
    return node


def _first(parts: list[ast.expr], values: Values, *, outcome: bool) -> ast.expr:
    return next((part for part in parts if bool(values.value_of(part)) is outcome), parts[-1])


def _reasons(node: ast.expr, values: Values, *, outcome: bool) -> list[str]:
    """What to look at where a condition came out true, or false: `D % 2 = 1`, `H = 8`."""
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _reasons(operand, values, outcome=not outcome)
        case ast.BoolOp(op=op, values=parts):
            # One part decides an `and` that is false and an `or` that is true; otherwise all of them do.
            decided = isinstance(op, ast.And) is not outcome
            decisive = [_first(parts, values, outcome=outcome)] if decided else parts
            return [reason for part in decisive for reason in _reasons(part, values, outcome=outcome)]
        case ast.IfExp(test=test, body=body, orelse=orelse):
            taken = bool(values.value_of(test))
            return [
                *_reasons(test, values, outcome=taken),
                *_reasons(body if taken else orelse, values, outcome=outcome),
            ]
        case ast.Compare(left=left, comparators=comparators):
            return _operands([left, *comparators], values)
        case ast.Call(func=ast.Name(id="all" | "any" as name), args=[ast.GeneratorExp() as loop]):
            if outcome is (name == "all"):
                number = sum(1 for _ in values.each(loop))
                return [f"{'every' if outcome else 'no'} item of {_sequence(loop)} (of {number})"]
            for number in _items(loop, values, outcome=outcome):
                return [f"{', '.join(_reasons(loop.elt, values, outcome=outcome))} {_at_item(number, loop)}"]
        case ast.Call(args=arguments, keywords=keywords) if not outcome:
            told = elements.broken(node, values)
            if isinstance(node.func, ast.Name) and node.func.id == "dense":
                strides = show(functions.strides(values.tensor(arguments[0])))
                return [f"{ast.unparse(arguments[0])}.stride() = {strides}"]
            if isinstance(node.func, ast.Name) and node.func.id == "aligned":
                (x, bytes_), _ = values.call_arguments("aligned", node)
                # The address itself is another in every process.
                return [f"{ast.unparse(arguments[0])}.data_ptr() % {bytes_} = {functions.address(x) % bytes_}"]
            given = [*arguments, *(keyword.value for keyword in keywords)]
            return _operands(given, values) if told is None else [told[0]]
    return _operands([node], values)


def _items(loop: ast.GeneratorExp, values: Values, *, outcome: bool) -> Iterator[int]:
    """The number of each item of a loop for which its condition came out so; the loop's names stand for it."""
    for number in values.each(loop):
        try:
            met = bool(values.value_of(loop.elt)) is outcome
        except INAPPLICABLE:
            continue
        if met:
            yield number


def _at_item(number: int, loop: ast.GeneratorExp) -> str:
    return f"at item {number} of {_sequence(loop)}"


def _sequence(loop: ast.GeneratorExp) -> str:
    return ast.unparse(loop.generators[0].iter)


def _operands(nodes: list[ast.expr], values: Values) -> list[str]:
    """`D % 2 = 1`, `H = 8`: every operand that is not a constant, with its value."""
    return [
        shown
        for node in nodes
        if not isinstance(node, ast.Constant) and not _names_dtypes(node)
        for shown in _shown(node, values)
    ]


def _shown(node: ast.expr, values: Values) -> list[str]:
    try:
        value = values.raw(node) if is_read(node) else values.value_of(node)
        text, told = ast.unparse(node), show(value)
        # What is written out (float32, or cpu and cuda) says itself.
        shown = [f"{text} = {told}{elements.place(node, values)}"] if text != told else []
    except (*INAPPLICABLE, Broken):
        return []
    # Of `highest(ids) // page`, where the highest stands.
    return shown + [text for call in _value_calls(node, values) if call is not node for text in _shown(call, values)]


def _value_calls(node: ast.expr, values: Values) -> Iterator[ast.Call]:
    """The value functions whose values went into an operand."""
    match node:
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield from _value_calls(body if values.value_of(test) else orelse, values)
        case ast.BinOp(left=left, right=right):
            yield from _value_calls(left, values)
            yield from _value_calls(right, values)
        case ast.UnaryOp(operand=operand):
            yield from _value_calls(operand, values)
        case ast.Call(func=ast.Name(id=name)) if name in functions.LOCATORS:
            yield node
        case ast.Call(args=arguments):
            for argument in arguments:
                yield from _value_calls(argument, values)


def _names_dtypes(node: ast.expr) -> bool:
    """Whether an operand is a set of dtypes, or has one among others: it says itself."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List) else [node]
    return any(isinstance(part, ast.Name) and part.id in DTYPE_SETS for part in parts)


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
    """What kind of thing a value is, without asking it: `an int`."""
    cls = type(value)
    name = cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__.split('.')[0]}.{cls.__name__}"
    return f"{'an' if name[0] in 'aeio' else 'a'} {name}"


def misfit_text(path: Path, declared: Type, value: Any) -> str:
    """A value that is not of its type; where values are among what is expected, which one it is."""
    if is_tensor(value):
        return f"{path} is a tensor"
    if any(isinstance(a, LiteralType) for a in declared.alternatives) and is_a(value, bool | int | float | str | None):
        return f"{path} = {show(value)}"
    if value is None:
        return f"{path} is None"
    return f"{path} is {kind_text(value)}{f' of {len(value)}' if is_a(value, tuple | list) else ''}"
