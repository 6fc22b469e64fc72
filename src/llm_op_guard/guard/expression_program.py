"""Expressions of the language → instructions of the native check."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from llm_op_guard.contract.expressions import device_types, steps_of
from llm_op_guard.contract.model import Contract, DtypeName, DtypeSet
from llm_op_guard.contract.path import path_of
from llm_op_guard.contract.vocabulary import DTYPE_NAMES, DTYPE_SETS, dtype_names
from llm_op_guard.guard.assembly import Assembly, Label, NoProgram, Operand
from llm_op_guard.native.program import DEVICES, DTYPES, MOST_DIMS, MOST_NUMBERS, Op

_ASPECTS = {"shape": Op.SIZES, "dtype": Op.DTYPE, "device": Op.DEVICE, "ndim": Op.NDIM}
_ARITHMETIC: dict[type[ast.operator], Op] = {
    ast.Add: Op.ADD, ast.Sub: Op.SUBTRACT, ast.Mult: Op.MULTIPLY,
    ast.Div: Op.DIVIDE, ast.FloorDiv: Op.FLOOR_DIVIDE, ast.Mod: Op.MODULO,
}  # fmt: skip
# Each with whether its operands change places.
_COMPARISONS: dict[type[ast.cmpop], tuple[Op, bool]] = {
    ast.Eq: (Op.EQUAL, False), ast.NotEq: (Op.UNEQUAL, False), ast.Lt: (Op.LESS, False),
    ast.LtE: (Op.AT_MOST, False), ast.Gt: (Op.LESS, True), ast.GtE: (Op.AT_MOST, True),
}  # fmt: skip
_FOLDED = {"min": Op.LEAST, "max": Op.GREATEST, "ceildiv": Op.CEIL_DIVIDE}


class Expressions:
    """Writes the expressions of one check."""

    def __init__(self, contract: Contract, assembly: Assembly) -> None:
        self.contract = contract
        self.asm = assembly

    def test(self, node: ast.expr, false: Label) -> None:
        """Go on where an expression is true."""
        match node:
            case ast.BoolOp(op=ast.And(), values=parts):
                for part in parts:
                    self.test(part, false)
            case ast.BoolOp(op=ast.Or(), values=[*parts, last]):
                true = Label()
                for part in parts:
                    self.asm.emit(Op.WHERE_TRUE, self.known(part), true)
                self.test(last, false)
                self.asm.put(true)
            case ast.UnaryOp(op=ast.Not(), operand=operand) if not isinstance(operand, ast.BoolOp):
                self.asm.emit(Op.WHERE_TRUE, self.known(operand), false)
            case ast.Compare(
                left=ast.Attribute(value=owner, attr="ndim"),
                ops=[ast.Eq() | ast.GtE() as op],
                comparators=[ast.Constant(value=int() as rank)],
            ) if 0 <= rank < 1 << 31:
                self.asm.emit(Op.RANK if isinstance(op, ast.Eq) else Op.RANK_AT_LEAST, self._held(owner), rank, false)
            case _:
                self.asm.emit(Op.WHERE_FALSE, self.known(node), false)

    def size(self, node: ast.expr) -> Operand:
        """What a size is compared with; the rule does not apply where that is no whole number."""
        found = self.value(node)
        is_whole = isinstance(node, ast.Constant) and type(node.value) is int
        if is_whole or (isinstance(node, ast.Name) and self.contract.symbols.get(node.id) == "size"):
            return found
        return self.asm.made(Op.WHOLE, found)

    def known(self, node: ast.expr) -> Operand:
        """The value of an expression; the rule does not apply where it has none."""
        found = self.value(node)
        if isinstance(node, ast.Name | ast.IfExp):
            self.asm.emit(Op.NEED, found)
        return found

    def value(self, node: ast.expr) -> Operand:
        """Where the value of an expression is that stands in arithmetic, a comparison or a condition."""
        match node:
            case ast.Constant(value=value):
                return self.asm.given(value)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return self.asm.given(-value)
            case ast.Name(id=name):
                return self._named(name)
            case ast.Attribute() | ast.Subscript():
                return self._plain(node)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self.asm.made(Op.NOT, self.value(operand))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.asm.made(Op.NEGATE, self.value(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                a = self.value(left)
                return self.asm.made(_ARITHMETIC[type(op)], a, self.value(right))
            case ast.BoolOp(op=op, values=parts):
                return self._either(parts, Op.WHERE_TRUE if isinstance(op, ast.Or) else Op.WHERE_FALSE)
            case ast.Compare():
                return self._compare(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._choice(self.value(test), body, orelse)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return self._sequence(items)
            case ast.Call(func=ast.Name(id=name)):
                return self._call(name, node)
        raise NoProgram(f"no operation says {ast.unparse(node)}")

    def _named(self, name: str) -> Operand:
        if name in self.contract.symbols:
            return self.asm.own(name)
        if name in self.contract.assigned:
            return self.asm.made(Op.PLAIN, self.asm.own(name))
        if name in self.contract.constants:
            return self.asm.given(self.contract.constants[name])
        if name in self.contract.parameters:
            return self.asm.made(Op.PLAIN, self.asm.own(name))
        raise NoProgram(f"{name} stands alone")

    def _plain(self, node: ast.expr) -> Operand:
        found = self.raw(node)
        return found if self._is_aspect(node) else self.asm.made(Op.PLAIN, found)

    def _is_aspect(self, node: ast.expr) -> bool:
        """Whether a read asks a tensor: what it gives is plain."""
        if isinstance(node, ast.Subscript):
            node = node.value
        return isinstance(node, ast.Attribute) and node.attr in _ASPECTS

    def raw(self, node: ast.expr) -> Operand:
        """Where something is that is read, as it is; the rule does not apply where it is absent."""
        match node:
            case ast.Name(id=name) if name in self.contract.constants:
                return self._named(name)
            case ast.Name(id=name):
                if name in {*self.contract.symbols, *self.contract.assigned}:
                    self.asm.emit(Op.NEED, self.asm.own(name))
                elif name not in self.contract.parameters:
                    raise NoProgram(f"{name} stands alone")
                return self.asm.own(name)
            case ast.Attribute(value=owner, attr=attr) if attr in _ASPECTS:
                return self._aspect(self._held(owner), attr)
            case ast.Subscript(value=ast.Attribute(value=owner, attr="shape"), slice=index):
                if isinstance(index, ast.Slice):
                    raise NoProgram(f"no operation says {ast.unparse(node)}")
                x = self._held(owner)
                path = path_of(node)
                if path is not None and isinstance(path.steps[-1][0], int):
                    return self.asm.made(Op.SIZE, x, path.steps[-1][0])
                shape = self._aspect(x, "shape")
                return self.asm.made(Op.AT, shape, self.value(index))
            case ast.Attribute() | ast.Subscript():
                path = path_of(node)
                if path is None and isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice):
                    sequence = self._plain(node.value)
                    return self.asm.made(Op.AT, sequence, self.value(node.slice))
                if path is None:
                    raise NoProgram(f"what {ast.unparse(node)} leads to is not written out")
                found = self.asm.walk(self._rooted(path.root), path.steps)
                there = Label()
                self.asm.emit(Op.WHERE_SET, found, there)
                self.asm.emit(Op.ABSENT)
                self.asm.put(there)
                return found
        return self.value(node)

    def _rooted(self, root: str) -> Operand:
        """Where the first of a path is."""
        return self.raw(ast.Name(root))

    def _aspect(self, x: int, attr: str) -> int:
        return self.asm.made(Op.SIZES, x, 0) if attr == "shape" else self.asm.made(_ASPECTS[attr], x)

    def _held(self, node: ast.expr) -> int:
        """The tensor that is read; the rule does not apply where there is none."""
        path = path_of(node)
        if path is None:
            raise NoProgram(f"{ast.unparse(node)} is no argument or part of one")
        x = self.asm.tensor(path)
        self.asm.emit(Op.HELD, x, self.asm.walk(self._rooted(path.root), path.steps))
        return x

    def _either(self, parts: list[ast.expr], leave: Op) -> int:
        into, end = self.asm.fresh(), Label()
        for number, part in enumerate(parts):
            self.asm.emit(Op.COPY, into, self.known(part))
            if number + 1 < len(parts):
                self.asm.emit(leave, into, end)
        self.asm.put(end)
        return into

    def _choice(self, test: Operand, body: ast.expr, orelse: ast.expr) -> int:
        into, other, end = self.asm.fresh(), Label(), Label()
        self.asm.emit(Op.WHERE_FALSE, test, other)
        self.asm.emit(Op.COPY, into, self.value(body))
        self.asm.emit(Op.JUMP, end)
        self.asm.put(other)
        self.asm.emit(Op.COPY, into, self.value(orelse))
        self.asm.put(end)
        return into

    def _sequence(self, items: list[ast.expr]) -> int:
        if any(isinstance(item, ast.Starred) for item in items):
            raise NoProgram("a tuple is made of another")
        if len(items) > MOST_DIMS:
            raise NoProgram(f"a tuple has more than {MOST_DIMS} items")
        found = [self.value(item) for item in items]
        first = self.asm.fresh(len(found)) if found else 0
        for number, item in enumerate(found):
            self.asm.emit(Op.NEED, item)
            self.asm.emit(Op.COPY, first + number, item)
        return self.asm.made(Op.TUPLE, first, len(found))

    def _compare(self, node: ast.Compare) -> int:
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.Is | ast.IsNot):
            if not (isinstance(node.comparators[0], ast.Constant) and node.comparators[0].value is None):
                raise NoProgram(f"no operation says {ast.unparse(node)}")
            none = self.asm.made(Op.IS_NONE, self.raw(node.left))
            return none if isinstance(node.ops[0], ast.Is) else self.asm.made(Op.NOT, none)
        left: Operand | None = None
        if len(node.ops) == 1:
            return self._comparison(node.left, None, node.ops[0], node.comparators[0])[0]
        into, end = self.asm.fresh(), Label()
        for number, (op, right) in enumerate(zip(node.ops, node.comparators, strict=True)):
            before = node.left if number == 0 else node.comparators[number - 1]
            found, left = self._comparison(before, left, op, right)
            self.asm.emit(Op.COPY, into, found)
            if number + 1 < len(node.ops):
                self.asm.emit(Op.WHERE_FALSE, into, end)
        self.asm.put(end)
        return into

    def _comparison(
        self, left: ast.expr, known: Operand | None, op: ast.cmpop, right: ast.expr
    ) -> tuple[int, Operand | None]:
        """Where the outcome of one comparison is, and its right side, which a chain goes on with."""
        own = {*self.contract.parameters, *self.contract.assigned, *self.contract.symbols}
        for one, written in ((left, right), (right, left)):
            names = device_types(written, own)
            dtypes = _written_dtypes(written, own)
            if not names and dtypes is None:
                continue
            if (one is right and isinstance(op, ast.In | ast.NotIn)) or not isinstance(
                op, ast.Eq | ast.NotEq | ast.In | ast.NotIn
            ):
                raise NoProgram("what is written out is compared in an odd way")
            seen = known if known is not None and one is left else self._compared(one)
            sets = device_set(names) if names else dtype_set(dtypes or [])
            found = self.asm.made(Op.ON_DEVICE if names else Op.IN_DTYPES, seen, self.asm.constant(sets))
            return self.asm.made(Op.NOT, found) if isinstance(op, ast.NotEq | ast.NotIn) else found, None
        seen = known if known is not None else self._compared(left)
        if isinstance(op, ast.In | ast.NotIn):
            found = self._among(seen, right)
            return self.asm.made(Op.NOT, found) if isinstance(op, ast.NotIn) else found, None
        if type(op) not in _COMPARISONS:
            raise NoProgram(f"no operation says {type(op).__name__}")
        other = self._compared(right)
        operation, turned = _COMPARISONS[type(op)]
        return self.asm.made(operation, *((other, seen) if turned else (seen, other))), other

    def _compared(self, node: ast.expr) -> Operand:
        """Where one side of a comparison is: what is read and is None has no value then."""
        if isinstance(node, ast.Name) and node.id in self.contract.symbols:
            return self.asm.own(node.id)
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and not self._is_aspect(node):
            return self.asm.made(Op.COMPARED, self.raw(node))
        return self.value(node)

    def _among(self, value: Operand, node: ast.expr) -> int:
        if not isinstance(node, ast.Tuple | ast.List) or any(isinstance(item, ast.Starred) for item in node.elts):
            raise NoProgram(f"what {ast.unparse(node)} holds is not written out")
        numbers = [_whole_number(item) for item in node.elts]
        if len(numbers) > MOST_NUMBERS:
            raise NoProgram(f"{len(numbers)} are too many to be looked through")
        if None not in numbers:
            return self.asm.made(Op.AMONG, value, self.asm.constant(tuple(numbers)))
        items = [self.value(item) for item in node.elts]
        into, end = self.asm.fresh(), Label()
        for item in (value, *items):
            self.asm.emit(Op.NEED, item)
        self.asm.emit(Op.COPY, into, self.asm.given(False))
        for item in items:
            self.asm.emit(Op.EQUAL, into, value, item)
            self.asm.emit(Op.WHERE_TRUE, into, end)
        self.asm.put(end)
        return into

    def _call(self, name: str, node: ast.Call) -> Operand:
        if name in ("has", "get"):
            return self._optional(name, node)
        if node.keywords:
            raise NoProgram(f"no operation says {ast.unparse(node)}")
        match name, node.args:
            case "len", [sequence]:
                found = self.raw(sequence)
                return self.asm.made(Op.LENGTH, found)
            case "abs", [x]:
                return self.asm.made(Op.ABSOLUTE, self.value(x))
            case (("min" | "max" | "ceildiv"), [_, *_]):
                numbers = [self.value(argument) for argument in node.args]
                found = numbers[0]
                for number in numbers[1:]:
                    found = self.asm.made(_FOLDED[name], found, number)
                return found
            case "numel", [x]:
                return self.asm.made(Op.NUMEL, self._held(x))
            case "dense", [x]:
                return self.asm.made(Op.DENSE, self._held(x))
            case "stride" | "aligned", [x, number]:
                held = self._held(x)
                return self.asm.made(Op.STRIDE if name == "stride" else Op.ALIGNED, held, self.value(number))
            case "broadcasts", [shape, target]:
                one = self._shape(shape)
                return self.asm.made(Op.BROADCASTS, one, self._shape(target))
        raise NoProgram(f"no operation says {name}(…)")

    def _shape(self, node: ast.expr) -> Operand:
        """Where a shape is, of a tensor or written out."""
        if isinstance(node, ast.Tuple) or self._is_aspect(node):
            return self.value(node)
        return self._aspect(self._held(node), "shape")

    def _optional(self, name: str, node: ast.Call) -> int:
        """What may be absent, without the rule not applying."""
        root, steps = steps_of(node.args[0])
        literal = [step if isinstance(step, str) else _literal(step) for step in steps]
        if isinstance(root, ast.Name) and root.id in self.contract.constants:
            raise NoProgram(f"no operation says {ast.unparse(node)}")
        found = self.asm.walk(self._rooted(root.id), literal)
        there = self.asm.made(Op.PRESENT, found)
        if name == "has":
            return there
        into, absent, end = self.asm.fresh(), Label(), Label()
        self.asm.emit(Op.WHERE_FALSE, there, absent)
        self.asm.emit(Op.PLAIN, into, found)
        self.asm.emit(Op.JUMP, end)
        self.asm.put(absent)
        self.asm.emit(Op.COPY, into, self.value(node.args[1]))
        self.asm.put(end)
        return into


def dtype_set(dtypes: Sequence[DtypeName | DtypeSet]) -> int:
    """Dtypes as the bits of a number, by their places in `DTYPES`."""
    names = {name for dtype in dtypes for name in dtype_names(dtype)}
    return sum(1 << number for number, name in enumerate(DTYPES) if name in names)


def device_set(names: Sequence[str]) -> int:
    """Types of devices as the bits of a number, by what DLPack calls them."""
    return sum(1 << number for name in names for number in DEVICES.get(name, ()))


def _written_dtypes(node: ast.expr, own: set[str]) -> list[DtypeName | DtypeSet] | None:
    """The dtypes that an operand writes out, alone or in a tuple; None where it is anything else."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List) else [node]
    names = [part.id for part in parts if isinstance(part, ast.Name) and part.id not in own]
    if not names or len(names) != len(parts) or not all(name in DTYPE_NAMES or name in DTYPE_SETS for name in names):
        return None
    return [DtypeSet(name) if name in DTYPE_SETS else DtypeName(name) for name in names]


def _whole_number(node: ast.expr) -> int | None:
    """The integer that an expression writes out, if it does and it takes no more than 64 bits."""
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node, sign = node.operand, -1
    value = node.value if isinstance(node, ast.Constant) else None
    return sign * value if type(value) is int and value.bit_length() < 63 else None


def _literal(node: ast.expr) -> tuple[str | int]:
    path = path_of(ast.Subscript(ast.Name("_"), node))
    if path is None or isinstance(path.steps[0], str):
        raise NoProgram(f"the key {ast.unparse(node)} is not written out")
    return path.steps[0]
