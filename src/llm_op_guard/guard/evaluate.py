"""Evaluate one expression of the language on the values of a call. Interpreted: what `explain` stands on."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from llm_op_guard.contract.expressions import LOOPS, steps_of
from llm_op_guard.contract.model import DtypeName, DtypeSet, Expr
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.vocabulary import DEVICE_TYPES, DTYPE_NAMES, DTYPE_SETS, FUNCTIONS, RAW_KINDS, dtype_names
from llm_op_guard.guard import functions
from llm_op_guard.guard.asked import Answers
from llm_op_guard.guard.memory import Identity
from llm_op_guard.guard.readable import part
from llm_op_guard.guard.reading import (
    INAPPLICABLE,
    LONGEST,
    SOME_ITEMS,
    UNSET,
    Broken,
    DeviceKind,
    NotApplicable,
    as_index,
    attribute,
    is_a,
    is_integer,
    is_plain_sequence,
    is_real,
    is_tensor,
    item,
    number_now,
    optional_attribute,
    path_value,
    plain,
)

# More than any size, id or bound of a dtype.
_MOST_BITS = 256
# More than a shape has; longer are lists of ids and the like, whose contents are nobody's business.
_MOST_SHOWN = 16


class Unbound(NotApplicable):
    """A symbol or assigned name has no value (yet)."""


BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: functions.add,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: functions.multiply,
    ast.Div: functions.divide,
    ast.FloorDiv: functions.floor_divide,
    ast.Mod: functions.modulo,
    ast.Pow: functions.power,
}

COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: lambda a, b: a is b,
    ast.IsNot: lambda a, b: a is not b,
}


_ASPECTS = ("shape", "dtype", "device", "ndim")
# What reads from the call.
_READS = (ast.Name, ast.Attribute, ast.Subscript)


class Values:
    """The names of one call: parameters, symbols, assigned names.

    `tensors` are the parameters that are declared as tensors: what looks like one has neither shape nor dtype.
    Without `answers` no imported predicate is asked, and what depends on one does not apply.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        constants: Mapping[str, Any],
        answers: Answers | None = None,
        tensors: frozenset[str] = frozenset(),
    ) -> None:
        self.tensors = tensors
        self.arguments = arguments
        self.constants = constants
        self.answers = answers
        self.symbols: dict[str, Any] = {}
        self.assigned: dict[str, Any] = {}
        self.items: dict[str, Any] = {}
        self._steps_left: int | None = None

    def named(self, name: str) -> Any:
        """What a bare name stands for; raises Unbound for a name without a value."""
        for table in self._tables():
            if name in table:
                return table[name]
        if name in DTYPE_NAMES or name in DTYPE_SETS:
            return dtypes_named(name)
        if name in DEVICE_TYPES:
            return DeviceKind(name)
        raise Unbound(name)

    def _tables(self) -> tuple[Mapping[str, Any], ...]:
        return self.items, self.arguments, self.assigned, self.symbols, self.constants

    def path(self, path: Path) -> Any:
        """What a path leads to; raises NotApplicable where a step is absent."""
        value = path_value(self.named(path.root), *path.steps)
        if value is UNSET:
            raise NotApplicable
        return value

    def evaluate(self, expr: Expr) -> Any:
        """The value of an expression that stands in arithmetic, a comparison or a condition.

        Raises NotApplicable (any of `INAPPLICABLE`) or Broken.
        """
        return self._value(expr.node)

    def value_of(self, node: ast.expr) -> Any:
        """The value of a part of an expression."""
        return self._value(node)

    def raw(self, node: ast.expr) -> Any:
        """An argument as it is: tensors and objects stay what they are."""
        match node:
            case ast.Name(id=name):
                return self.named(name)
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in self.tensors and attr in _ASPECTS:
                return functions.tensor_attribute(self.named(name), attr)
            case ast.Attribute(value=owner, attr=attr):
                return attribute(self.raw(owner), attr)
            case ast.Subscript(value=owner, slice=key):
                return item(self.raw(owner), as_index(self._value(key)))
        return self._value(node)

    def tensor(self, node: ast.expr) -> Any:
        """An argument of a value function: something read, a part of it, or what another function gives."""
        match node:
            case ast.Call(func=ast.Name(id=name)):
                return self._call(name, node)
            case ast.Subscript(value=owner, slice=index):
                parts = index.elts if isinstance(index, ast.Tuple) else [index]
                return part(self.tensor(owner), *(self.index(one) for one in parts))
        return self.raw(node)

    def index(self, node: ast.expr) -> Any:
        """One index of a part of a tensor: a slice, an ellipsis or a value."""
        match node:
            case ast.Slice(lower=lower, upper=upper, step=step):
                return slice(*(None if bound is None else self._value(bound) for bound in (lower, upper, step)))
            case ast.Constant(value=value) if value is Ellipsis:
                return value
        return self._value(node)

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if not any(name in table for table in self._tables()):
                return self.named(name)  # a word of the language
            case ast.Name() | ast.Attribute() | ast.Subscript():
                return plain(self.raw(node))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._value(operand)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand)
            case ast.UnaryOp(operand=operand):
                return +self._value(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return BINARY[type(op)](self._value(left), self._value(right))
            case ast.BoolOp(op=op, values=parts):
                outcome: Any = None
                for part in parts:
                    outcome = self._value(part)
                    if bool(outcome) is isinstance(op, ast.Or):
                        break
                return outcome
            case ast.Compare():
                return self._compare(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._value(body if self._value(test) else orelse)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return tuple(self._items(items))
            case ast.Call(func=ast.Name(id=name), args=[ast.GeneratorExp() as loop]) if name in LOOPS:
                return self._loop(name, loop)
            case ast.Call(func=ast.Name(id=name)):
                return self._call(name, node)
            case ast.JoinedStr(values=parts):
                return "".join(self._text(part) for part in parts)
        raise NotApplicable

    def _compare(self, node: ast.Compare) -> bool:
        # `x is None` asks about the argument itself, whatever it is.
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.Is | ast.IsNot):
            return COMPARE[type(node.ops[0])](self.raw(node.left), self._value(node.comparators[0]))
        left = self._compared(node.left)
        for op, comparator in zip(node.ops, node.comparators, strict=True):
            right = self._compared(comparator)
            if not COMPARE[type(op)](left, right):
                return False
            left = right
        return True

    def _compared(self, node: ast.expr) -> Any:
        value = self._value(node)
        if value is None and isinstance(node, _READS):
            raise NotApplicable  # an optional argument that is not there
        return value

    def _items(self, nodes: list[ast.expr]) -> list[Any]:
        found: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                found.extend(self._value(node.value))
                continue
            value = self._value(node)
            if isinstance(value, frozenset):  # a set of dtypes behind `in`
                found.extend(value)
            else:
                found.append(value)
        return found

    def _call(self, name: str, node: ast.Call) -> Any:
        if name in ("has", "get"):
            root, steps = steps_of(node.args[0])
            owner = self.named(root.id)
            value = path_value(owner, *(self._step(step) for step in steps))
            absent = value is UNSET or value is None
            if name == "has":
                return not absent
            return self._value(node.args[1]) if absent else plain(value)
        if name not in FUNCTIONS:
            return self._asked(name, node)
        given, keywords = self.call_arguments(name, node)
        return functions.IMPLEMENTATIONS[name](*given, **keywords)

    def _asked(self, name: str, node: ast.Call) -> Any:
        """What an imported predicate says; an argument of the call that is None is as good as absent."""
        if self.answers is None:
            raise NotApplicable
        given = [self.raw(argument) for argument in node.args]
        read = (value for argument, value in zip(node.args, given, strict=True) if isinstance(argument, _READS))
        if any(value is None for value in read):
            raise NotApplicable
        return self.answers.ask(name, given)

    def _step(self, step: str | ast.expr) -> str | tuple[str | int]:
        return step if isinstance(step, str) else (as_index(self._value(step)),)

    def call_arguments(self, name: str, node: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a function call, tensors as they are and everything else plain."""
        kinds = FUNCTIONS[name].arguments
        given = [self._argument(kinds[min(i, len(kinds) - 1)][1], argument) for i, argument in enumerate(node.args)]
        keywords = {k.arg: self._argument(dict(kinds)[k.arg], k.value) for k in node.keywords if k.arg}
        return given, keywords

    def _argument(self, kind: str, node: ast.expr) -> Any:
        if kind == "tensor":
            return self.tensor(node)
        return self.raw(node) if kind in RAW_KINDS else self._value(node)

    def _loop(self, name: str, loop: ast.GeneratorExp) -> Any:
        """`all`, `any` or `sum` over a sequence; an item to which the condition does not apply counts for nothing."""
        total: Any = 0
        for _ in self.each(loop):
            try:
                value = self._value(loop.elt)
            except INAPPLICABLE:
                continue
            if name == "sum":
                total = BINARY[ast.Add](total, value)
            elif bool(value) is (name == "any"):
                return name == "any"
        return total if name == "sum" else name == "all"

    def each(self, loop: ast.GeneratorExp) -> Iterator[int]:
        """Go through a loop: the names of the loop stand for each item in turn, whose number is given."""
        (comprehension,) = loop.generators
        before = dict(self.items)
        outermost = self._steps_left is None
        if outermost:
            self._steps_left = LONGEST  # of this loop and those within it together
        try:
            for number, item_value in enumerate(self._sequence(comprehension.iter)):
                self._take_a_step()
                self.items = {**before, **_taken_apart(comprehension.target, item_value)}
                if self._all_hold(comprehension.ifs):
                    yield number
        finally:
            self.items = before
            if outermost:
                self._steps_left = None

    def _take_a_step(self) -> None:
        assert self._steps_left is not None
        self._steps_left -= 1
        if self._steps_left < 0:
            raise NotApplicable

    def _all_hold(self, conditions: list[ast.expr]) -> bool:
        try:
            return all(self._value(condition) for condition in conditions)
        except INAPPLICABLE:
            return False

    def _sequence(self, node: ast.expr) -> Iterable[Any]:
        match node:
            case ast.Call(func=ast.Name(id="range"), args=[count]):
                length = self._value(count)
                if not is_integer(length) or length > LONGEST:
                    raise NotApplicable
                return range(length)
            case ast.Call(func=ast.Name(id="items"), args=[mapping]):
                value = self.raw(mapping)
                if not is_a(value, dict):
                    raise NotApplicable
                return list(dict.items(value))
            case ast.Call(func=ast.Name(id="enumerate"), args=[inner]):
                return list(enumerate(self._sequence(inner)))
            case ast.Call(func=ast.Name(id="zip"), args=inners):
                return list(zip(*(self._sequence(inner) for inner in inners), strict=False))
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return [self.raw(part) for part in parts]
        value = self.raw(node)
        if is_a(value, dict):
            return list(dict.keys(value))
        # Never an iterator, which would be used up, nor what a class of its own would make up.
        if is_plain_sequence(value):
            return list(value[:LONGEST])
        modules = optional_attribute(value, "_modules")
        if type(modules) is dict:
            return list(modules.values())
        raise NotApplicable

    def _text(self, part: ast.expr) -> str:
        if isinstance(part, ast.FormattedValue):
            if (value := self._value(part.value)) is SOME_ITEMS:
                raise NotApplicable
            return show(value)
        return str(part.value) if isinstance(part, ast.Constant) else ""


def _taken_apart(target: ast.expr, value: Any) -> dict[str, Any]:
    """What the names of a loop stand for at one item; raises NotApplicable where it has not as many parts."""
    if isinstance(target, ast.Name):
        return {target.id: value}
    names = [name.id for name in target.elts if isinstance(name, ast.Name)] if isinstance(target, ast.Tuple) else []
    if not is_a(value, tuple | list) or len(value) != len(names):
        raise NotApplicable
    return dict(zip(names, value, strict=True))


def evaluated(expr: Expr, constants: Mapping[str, Any], names: Mapping[str, Any], may_lack: tuple[str, ...]) -> Any:
    """The value of an expression for these names; of those in `may_lack`, None says that one has no value."""
    values = Values({}, constants)
    values.items = {name: value for name, value in names.items() if value is not None or name not in may_lack}
    return values.evaluate(expr)


def text_of(values: Values, expr: Expr | None) -> str | None:
    """A `because` or `hint`, evaluated; None where it says nothing about this call."""
    if expr is None:
        return None
    try:
        value = values.evaluate(expr)
    except (*INAPPLICABLE, Broken):
        return None
    return value if isinstance(value, str) and value else None


@cache
def dtypes_named(name: str) -> Any:
    """The dtype that a name stands for, or the frozenset that a set stands for."""
    try:
        import torch  # noqa: PLC0415 - the user's, if there is one
    except ImportError:
        return None if name in DTYPE_NAMES else frozenset()
    if name in DTYPE_NAMES:
        return getattr(torch, name, None)
    return frozenset(
        dtype for known in dtype_names(DtypeSet(name)) if (dtype := getattr(torch, known, None)) is not None
    )


def dtype_values(dtype: DtypeName | DtypeSet) -> Any:
    """The torch dtypes that a dtype or set of a type accepts."""
    found = dtypes_named(dtype.name)
    return found if isinstance(found, frozenset) else frozenset({found})


def show(value: Any) -> str:
    """A value for a message: sizes, dtypes, devices and numbers; texts and objects only by kind."""
    if type(value) is functions.Spelling:
        return repr(str(value))
    if isinstance(value, Identity):
        return str(value)
    if is_a(value, str):
        return f"a text of {len(value)} characters"
    if isinstance(value, tuple):
        if len(value) > _MOST_SHOWN:
            return f"a tuple of {len(value)} items"
        return f"({', '.join(show(part) for part in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to write very long ones
    if value is None or type(value) in (bool, int, float, complex):
        return str(value)
    if isinstance(value, int | float):  # whatever its class would call it
        return (int if isinstance(value, int) else float).__repr__(value)
    if isinstance(value, DeviceKind):
        return value.name
    if is_tensor(value):
        return f"{show(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if is_integer(value):
        return str(number_now(value))
    if type(value).__module__ == "numpy" and is_real(value):
        return str(float(value))
    name = str(value) if type(value).__module__ == "torch" else type(value).__name__
    return name.removeprefix("torch.")
