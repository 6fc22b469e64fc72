"""What value functions show of a tensor in a diagnosis: one element (a pair, a row), and how many are such."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, NamedTuple

from llm_op_guard.contract.path import Path, path_of
from llm_op_guard.contract.vocabulary import FUNCTIONS
from llm_op_guard.guard import functions
from llm_op_guard.guard.evaluate import Values, show
from llm_op_guard.guard.reading import INAPPLICABLE, Broken, is_tensor


class _Wording(NamedTuple):
    """How a broken rule is told: `element` of the places and values found, what it is called, what was expected."""

    element: str
    one: str
    many: str
    expected: str | None = None


_ELEMENT = _Wording("{0} = {1}", "element is wrong", "elements are wrong")

# The rules about elements. All other value functions give a value, which is told with the place where it stands.
_RULES: dict[str, _Wording] = {
    "finite": _ELEMENT._replace(expected="finite values"),
    "within": _ELEMENT,
    "only": _ELEMENT,
    "all_true": _ELEMENT._replace(expected="true values"),
    "nondecreasing": _Wording(
        "{0} = {1} after {2} = {3}", "element is wrong", "elements are wrong", "no value below the one before"
    ),
    "unique": _Wording("{0} = {2} = {1}", "repeat", "repeats", "no value twice"),
    "equal": _Wording("{0} = {1}, {2} = {3}", "pair differs", "pairs differ"),
    "any_per_row": _Wording("{0} has no true value", "row is wrong", "rows are wrong", "a true value in every row"),
    "live_rows": _Wording("{0} keeps no key", "row is dead", "rows are dead", "a key in every row"),
}


def broken(node: ast.Call, values: Values) -> tuple[str, str, str | None] | None:
    """(observed, expected, argument or None) for a rule about elements that came out false; None for another call."""
    name = _name(node)
    wording = _RULES.get(name)
    found = None if wording is None else _located(name, node, values)
    if wording is None or found is None:
        return _unlike(node, values) if name == "equal" else None
    observed, expected, argument = told(node, found, values)
    return observed + (_near_the_limit(values) if name == "finite" else ""), expected, argument


def told(node: ast.Call, found: functions.Located, values: Values) -> tuple[str, str, str | None]:
    """The same for what was found by somebody else: in `lowest(x)`, an element that is too low."""
    name = _name(node)
    wording = _RULES.get(name, _ELEMENT)
    parts = _arguments(name, node)
    texts = [text for element in found.elements for text in (_place(parts, element, values), str(element.value))]
    many = f"1 {wording.one}" if found.count == 1 else f"{found.count} {wording.many}, this one first"
    observed = f"{wording.element.format(*texts)} (of {found.total}, {many})"
    if found.note:
        observed += f"; {found.note}"
    return observed, wording.expected or _expected(name, node, values), _tensor(parts[found.elements[0].argument])


def _near_the_limit(values: Values) -> str:
    """Of a call with a number that is not finite, the first other argument whose numbers are near the largest."""
    for name, x in values.arguments.items():
        if not is_tensor(x) or not str(x.dtype).startswith(("torch.float", "torch.bfloat")):
            continue
        try:
            found = functions.LOCATORS["absmax"](x)
            most = functions.largest_number(x.dtype)
        except Exception:
            continue
        largest = None if found is None else abs(found.elements[0].value)
        if largest is not None and functions.NEAR * most <= largest < most:
            return f"; {name} comes to {largest:g}, {largest / most:.0%} of what {show(x.dtype)} holds"
    return ""


def place(node: ast.expr, values: Values) -> str:
    """Where the value of a function stands, ` at ids[1, 3]`; empty for anything else."""
    if not isinstance(node, ast.Call) or (name := _name(node)) in _RULES:
        return ""
    found = _located(name, node, values)
    if found is None:
        return ""
    where = _place(_arguments(name, node), found.elements[0], values)
    if name == "count":
        return f" (of {found.total}, first at {where})"
    return f" at {where}" if found.elements[0].index else ""


def offenders(node: ast.expr, values: Values) -> Iterator[tuple[Path, tuple[int, ...], Any]]:
    """What a broken rule points to: where it is read, the index of an element of a tensor there, and its value.

    Of a row its index alone, with None. An index that is empty stands for what is read itself: the item of a list for
    which a loop's condition is false, or the one that an index leads to which is worked out.
    """
    yield from _offenders(node, values, {})


def _offenders(node: ast.AST, values: Values, items: dict[str, Path]) -> Iterator[tuple[Path, tuple[int, ...], Any]]:
    """`items` says where what the names of loops stand for is in the call."""
    match node:
        case ast.Call(func=ast.Name(id="all"), args=[ast.GeneratorExp(elt=elt) as loop]):
            for number in values.each(loop):
                if _is_false(elt, values):
                    known = items | _items(loop.generators[0].target, loop.generators[0].iter, number, values, items)
                    names = [name.id for name in ast.walk(loop.generators[0].target) if isinstance(name, ast.Name)]
                    yield from ((known[name], (), values.named(name)) for name in names if name in known)
                    yield from _offenders(elt, values, known)
                    return
            return
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
            found = _located(name, node, values)
            for element in found.elements if found is not None else ():
                whole, index = _whole(_arguments(name, node)[element.argument], element.index, values)
                path = _path(whole, values, items)
                if path is not None and index:
                    yield path, index, element.value
        case ast.Subscript() if path_of(node) is None and (path := _path(node, values, items)) is not None:
            try:
                yield path, (), values.value_of(node)
            except (*INAPPLICABLE, Broken):
                pass
    for child in ast.iter_child_nodes(node):
        yield from _offenders(child, values, items)


def _is_false(node: ast.expr, values: Values) -> bool:
    try:
        return not values.value_of(node)
    except (*INAPPLICABLE, Broken):
        return False


def _items(
    target: ast.expr, sequence: ast.expr, number: int, values: Values, items: dict[str, Path]
) -> dict[str, Path]:
    """Where the item of a loop is in the call that its names stand for."""
    match target, sequence:
        case ast.Tuple(elts=[_, item]), ast.Call(func=ast.Name(id="enumerate"), args=[inner]):
            return _items(item, inner, number, values, items)
        case ast.Tuple(elts=parts), ast.Call(func=ast.Name(id="zip"), args=inners):
            pairs = zip(parts, inners, strict=False)
            return {k: v for part, inner in pairs for k, v in _items(part, inner, number, values, items).items()}
        case ast.Tuple(elts=[ast.Name(id=key), ast.Name(id=value)]), ast.Call(
            func=ast.Name(id="items"), args=[mapping]
        ) if (owner := _path(mapping, values, items)) is not None:
            return {value: owner.item(values.named(key))} if type(values.named(key)) in (str, int) else {}
        case ast.Name(id=name), _ if (owner := _path(sequence, values, items)) is not None:
            return {name: owner.item(number)}
    return {}


def _path(node: ast.expr, values: Values, items: dict[str, Path]) -> Path | None:
    """Where in the call an expression leads that is a read: indices are worked out, and names of loops looked up."""
    match node:
        case ast.Name(id=name):
            return items.get(name) if name in values.items else Path(name)
        case ast.Attribute(value=value, attr=attr):
            owner = _path(value, values, items)
            return None if owner is None else Path(owner.root, (*owner.steps, attr))
        case ast.Subscript(value=value, slice=ast.expr() as key) if not isinstance(key, ast.Slice | ast.Tuple):
            owner = _path(value, values, items)
            try:
                found = values.value_of(key)
            except (*INAPPLICABLE, Broken):
                return None
            return owner.item(found) if owner is not None and isinstance(found, int | str) else None
    return None


def _located(name: str, node: ast.Call, values: Values) -> functions.Located | None:
    """What the locator of a function finds. Where it fails, the diagnosis does without."""
    if name not in functions.LOCATORS:
        return None
    try:
        arguments, keywords = values.call_arguments(name, node)
        return functions.LOCATORS[name](*arguments, **keywords)
    except Exception:
        return None


def _unlike(node: ast.Call, values: Values) -> tuple[str, str, str | None] | None:
    """Of `equal`, that the shapes or devices differ."""
    parts = _arguments("equal", node)
    try:
        a, b = (values.tensor(parts[name]) for name in ("a", "b"))
        aspects = [("shape", tuple(a.shape), tuple(b.shape)), ("device", a.device, b.device)]
    except Exception:
        return None
    for aspect, one, other in aspects:
        if one != other:
            texts = (f"{ast.unparse(parts[n])}.{aspect} = {show(v)}" for n, v in (("a", one), ("b", other)))
            return ", ".join(texts), ast.unparse(node), _tensor(parts["a"])
    return None


def _expected(name: str, node: ast.Call, values: Values) -> str:
    if name == "within":
        parts, (given, keywords) = _arguments(name, node), values.call_arguments(name, node)
        known = {**dict(zip(_names(name), given, strict=False)), **keywords}
        sentinels = f" or {show(known['allow'])}" if known.get("allow", ()) != () else ""
        high = _with_name(parts["high"], known["high"])
        return f"{show(known['low'])} <= {ast.unparse(parts['x'])} < {high}{sentinels}"
    if name == "only":
        return "only " + " or ".join(_with_name(part, values.value_of(part)) for part in node.args[1:])
    return ast.unparse(node)


def _with_name(node: ast.expr, value: Any) -> str:
    literal = isinstance(node.operand if isinstance(node, ast.UnaryOp) else node, ast.Constant)
    return show(value) if literal else f"{show(value)} ({ast.unparse(node)})"


def _name(node: ast.Call) -> str:
    assert isinstance(node.func, ast.Name)
    return node.func.id


def _names(function: str) -> list[str]:
    return [name for name, _ in FUNCTIONS[function].arguments]


def _arguments(name: str, node: ast.Call) -> dict[str, ast.expr]:
    """The arguments of a call by their published names."""
    return dict(zip(_names(name), node.args, strict=False)) | {str(k.arg): k.value for k in node.keywords}


def _place(parts: dict[str, ast.expr], element: functions.Element, values: Values) -> str:
    node, index = _whole(parts[element.argument], element.index, values)
    argument = ast.unparse(node)
    return f"{argument}[{', '.join(map(str, index))}]" if index else argument


def _whole(node: ast.expr, index: tuple[int, ...], values: Values) -> tuple[ast.expr, tuple[int, ...]]:
    """The tensor that an argument is a part of, and where the element stands in it."""
    while index and isinstance(node, ast.Subscript) and (whole := _in_whole(node, index, values)) is not None:
        node, index = node.value, whole
    return node, index


def _in_whole(node: ast.Subscript, index: tuple[int, ...], values: Values) -> tuple[int, ...] | None:
    """Where an element of a part `x[n, 1:]` stands in x; None where its index does not say that."""
    try:
        shape = values.tensor(node.value).shape
        written = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        parts: list[Any] = [values.index(part) for part in written]
    except Exception:
        return None
    if not all(part is ... or isinstance(part, slice) or type(part) is int for part in parts):
        return None
    at = parts.index(...) if ... in parts else len(parts)
    parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + (... in parts))
    left, found = list(index), []
    for size, part in zip(shape, parts, strict=True):
        if isinstance(part, int):
            found.append(part % size)
        elif left:
            start, _, step = part.indices(size)
            found.append(start + step * left.pop(0))
        elif part != slice(None):
            return None  # of a row: its index ends before this dimension
    return tuple(found)


def _tensor(node: ast.expr) -> str | None:
    """What an argument of a value function is a part of, or made from: `cos` of `cos[:, :1]`."""
    while path_of(node) is None:
        match node:
            case ast.Subscript(value=inner) | ast.Call(args=[inner, *_]):
                node = inner
            case _:
                return None
    return ast.unparse(node)
