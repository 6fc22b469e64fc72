"""What the parts of an expression can be, and what they are used as.

It goes through an expression as `guard/evaluate.py` does on a call, with the kinds of values in place of values.
Refused is what no call that keeps the certain declarations can evaluate, and what can only come out one way.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager

from llm_op_guard.contract.expressions import LOOPS, device_types, suggestion
from llm_op_guard.contract.kinds import (
    ANYTHING,
    ATTRIBUTES,
    COUNT,
    DEVICE,
    DICT,
    DTYPE,
    GIVES,
    INDEX,
    KEY,
    MAPPING,
    NONE,
    NOT_PLAIN,
    NUMBER,
    OPERAND,
    ORDERED,
    SEQUENCE,
    SEQUENCES,
    SIZES,
    STARRED,
    SYMBOLS,
    TENSOR,
    TEXT,
    Kinds,
    Taken,
    Thing,
    all_kinds,
    always_so,
    called,
    families,
    has_dimensions,
    kind_of,
    kinds_of,
    literal_index,
    no_operand,
    only_alternative,
    ranks_of,
    taken_by,
)
from llm_op_guard.contract.model import Assign, Condition, Contract, Declare, ListType, Size, TupleType, Type
from llm_op_guard.contract.path import Path, path_of
from llm_op_guard.contract.source import Place
from llm_op_guard.contract.vocabulary import (
    DEVICE_TYPES,
    DTYPE_NAMES,
    DTYPE_SETS,
    FUNCTIONS,
    RAW_KINDS,
    TENSOR_ATTRIBUTES,
)
from llm_op_guard.contract.walk import tensor_types
from llm_op_guard.errors import ContractError

# Of names that are told by each other, no more are followed: the stack has an end.
_MOST_NAMES = 50


class Operands:
    """Reads the expressions of one contract; all of it raises ContractError for a thing that is used as what it is not.

    `declared` are the declarations that hold where an expression stands, `loop_names` what the names of the loops
    around it stand for, `given` what assigned names do.
    """

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.declared: dict[Path, Thing] = {}
        self.loop_names: dict[str, Thing] = {}
        self.given: dict[str, Thing] = {}
        self.under_way: list[str] = []
        self.by_branch: dict[tuple[tuple[Condition, ...], bool], dict[Path, Thing]] = {}
        self.after_call = False

    def enter(self, conditions: tuple[Condition, ...], after_call: bool) -> None:
        """Go to a branch, before or after the call, out of all loops."""
        self.loop_names = {}
        self.after_call = after_call
        if (conditions, after_call) not in self.by_branch:
            here = set(conditions)
            # What a suspect declaration says need not be so, nor what one says of another branch.
            declared = [
                clause.statement
                for clause in self.contract.clauses
                if isinstance(clause.statement, Declare) and clause.certain and here.issuperset(clause.conditions)
            ]
            # Of several about one path that of the fewest kinds, wherever it stands: the last put in is kept.
            declared.sort(key=lambda one: (len(kinds_of(one.type)), one.type.text), reverse=True)
            found = {one.path: one.type for one in declared}
            self.by_branch[conditions, after_call] = self._lasting(found) if after_call else dict(found)
        self.declared = self.by_branch[conditions, after_call]

    def _lasting(self, declared: dict[Path, Type]) -> dict[Path, Thing]:
        """What declarations say after the call, which may have changed what is in an argument, and its shape."""
        return {
            path: kind if path.root == "result" else kinds_of(kind)
            for path, kind in declared.items()
            if path.root == "result" or not path.steps
        }

    def error(self, problem: str, node: ast.AST | Place) -> ContractError:
        """The error for a problem at a syntax node or place."""
        return self.contract.source.error(problem, node)

    def taken(self, node: ast.expr, thing: Thing, taken: Taken, function: str = "") -> None:
        """Refuse what no place takes that takes such things."""
        kinds = kinds_of(thing)
        if not kinds & taken.kinds:
            text = ast.unparse(node)
            instead = taken.instead.format(text) if kinds - NONE == TENSOR else ""
            raise self.error(f"{taken.words.format(function)}; {text} is {called(kinds)}{instead}", node)

    # ------------------------------------------------------------ conditions

    def truth(self, node: ast.expr) -> None:
        """A part of an expression that is taken as true or false."""
        match node:
            case ast.BoolOp(values=parts):
                for part in parts:
                    if isinstance(part, ast.Constant) and not isinstance(part.value, bool | None):
                        raise self.error(always_so(part, parts), part)
                    self.truth(part)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self.truth(operand)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                for part in (test, body, orelse):
                    self.truth(part)
            case _:
                kinds = self.operand(node, "neither true nor false")
                if kinds - NONE and kinds - NONE <= DTYPE | DEVICE:
                    problem = f"{ast.unparse(node)} is {called(kinds)}, which is neither true nor false"
                    raise self.error(problem, node)

    def _compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.Is | ast.IsNot):
            self.raw(node.left)
            return
        if self._compares_device_type(node):
            return
        for op, left, right in zip(node.ops, [node.left, *node.comparators], node.comparators, strict=False):
            if isinstance(op, ast.In | ast.NotIn):
                self._contains(left, right)
                continue
            a, b = self.operand(left), self.operand(right)
            if NONE in (a, b):
                continue
            equal = isinstance(op, ast.Eq | ast.NotEq)
            if not equal:
                for side, kinds in ((left, a), (right, b)):
                    if not kinds & ORDERED:
                        raise self.error(f"{ast.unparse(side)} is {called(kinds)}, which has no order", side)
            if not families(a) & families(b):
                what = "equal" if equal else "in an order"
                both = f"{ast.unparse(left)} is {called(a)} and {ast.unparse(right)} {called(b)}"
                raise self.error(f"{both}: never {what}", left)

    def _contains(self, left: ast.expr, right: ast.expr) -> None:
        a, text = self.operand(left), ast.unparse(left)
        if isinstance(right, ast.Name) and right.id in DTYPE_SETS:
            if "dtype" not in a:
                raise self.error(f"{text} is {called(a)}; only a dtype is in {right.id}", left)
            return
        if isinstance(right, ast.Tuple | ast.List):
            items = [self._item(item) for item in right.elts]
            if items and not any(families(a) & families(item) for item in items):
                raise self.error(f"{text} is {called(a)}, and none of {ast.unparse(right)} is one", left)
            return
        kinds = self.value(right)
        if kinds - NONE == TENSOR:
            raise self.error(no_operand(right), right)
        if not kinds & (TEXT | SEQUENCES):
            asked = f" has({ast.unparse(right)}[{text}]) asks for a key;" if kinds - NONE == DICT else ""
            raise self.error(f"nothing is in {called(kinds)}:{asked} `in` takes a tuple, a shape or a text", right)
        if kinds - NONE == SIZES and "number" not in a:
            raise self.error(f"{text} is {called(a)}, and no item of {ast.unparse(right)} is one", left)
        if kinds - NONE == TEXT and "text" not in a:
            raise self.error(f"{text} is {called(a)}; only a text is in a text", left)

    def _item(self, node: ast.expr) -> Kinds:
        if isinstance(node, ast.Starred):
            self.taken(node.value, self.value(node.value), STARRED)
            return ANYTHING
        return self.operand(node)

    def _compares_device_type(self, node: ast.Compare) -> bool:
        """Types of device are compared with devices, and stand nowhere else."""
        own = {*self.contract.parameters, *self.contract.assigned, *self.loop_names}
        if len(node.ops) != 1:
            return False
        op, left, right = node.ops[0], node.left, node.comparators[0]
        contains = isinstance(op, ast.In | ast.NotIn)
        for device, written in [(left, right)] if contains else [(left, right), (right, left)]:
            listed = isinstance(written, ast.Tuple | ast.List)
            if device_types(written, own) and isinstance(op, ast.In | ast.NotIn if listed else ast.Eq | ast.NotEq):
                if device_types(device, own) or _is_no_device(device) or "device" not in self.operand(device):
                    raise self.error(f"{ast.unparse(device)} is no device{_DEVICE_TYPES}", device)
                return True
        return False

    # ------------------------------------------------------------ values

    def operand(self, node: ast.expr, not_so: str = "not compared") -> Kinds:
        """The kinds of what stands in a comparison, arithmetic or a condition."""
        kinds = self.value(node)
        if kinds & NOT_PLAIN and kinds - NOT_PLAIN <= NONE:
            if "tensor" not in kinds:
                raise self.error(f"{ast.unparse(node)} is a dict, which is {not_so}", node)
            raise self.error(no_operand(node), node)
        return kinds - NOT_PLAIN

    def value(self, node: ast.expr) -> Kinds:
        """The kinds that a part of an expression can be of."""
        match node:
            case ast.Name() | ast.Attribute() | ast.Subscript():
                return kinds_of(self.raw(node))
            case ast.Constant(value=value):
                return kind_of(value)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self.truth(operand)
            case ast.UnaryOp(operand=operand):
                self._number(operand)
            case ast.BinOp():
                return self._arithmetic(node)
            case ast.BoolOp(values=parts):
                return all_kinds([self.operand(part, "neither true nor false") for part in parts])
            case ast.Compare():
                self._compare(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self.truth(test)
                return self.value(body) | self.value(orelse)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                kinds = [self._item(item) for item in items]
                return SIZES if kinds and all(kind == NUMBER for kind in kinds) else SEQUENCE
            case ast.Call(func=ast.Name(id=name), args=[ast.GeneratorExp() as loop]) if name in LOOPS:
                self._loop(name, loop)
            case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
                return self._call(name, node)
            case ast.Call(args=arguments):  # of an imported predicate
                for argument in arguments:
                    self.raw(argument)
                return ORDERED | NONE
        return NUMBER

    def _number(self, node: ast.expr) -> None:
        self.taken(node, self.operand(node, "no number"), OPERAND)

    def _arithmetic(self, node: ast.BinOp) -> Kinds:
        sides = (node.left, node.right)
        for side in sides:
            if isinstance(side, ast.Constant) and not isinstance(side.value, int | float):
                raise self.error("arithmetic is for numbers", side)
        if not isinstance(node.op, ast.Add):
            for side in sides:
                self._number(side)
            return NUMBER
        a, b = (self.operand(side, "no number") for side in sides)
        for side, kinds in zip(sides, (a, b), strict=True):
            self.taken(side, kinds, OPERAND._replace(kinds=ORDERED))
        both = families(a) & families(b) & ORDERED
        if not both:
            texts = [ast.unparse(side) for side in sides]
            raise self.error(f"{texts[0]} is {called(a)} and {texts[1]} {called(b)}: no sum", node)
        return both

    def _call(self, name: str, node: ast.Call) -> Kinds:
        function = FUNCTIONS[name]
        arguments = function.arguments
        given = [(arguments[min(i, len(arguments) - 1)], argument) for i, argument in enumerate(node.args)]
        given += [((str(k.arg), dict(arguments)[str(k.arg)]), k.value) for k in node.keywords]
        for (argument_name, kind), argument in given:
            if kind == "path":
                self.raw(argument)
                continue
            if kind == "tensor":
                thing = self._tensor(argument)
            else:
                thing = self.raw(argument) if kind in RAW_KINDS else self.value(argument)
            taken = taken_by(name, argument_name, kind)
            if taken is not None:
                self.taken(argument, thing, taken, name)
        if name == "stride" and (index := literal_index(node.args[1])) is not None:
            self._within_rank(node.args[0], index, node.args[1])
        return TENSOR if function.gives_tensor else GIVES.get(name, NUMBER)

    # ------------------------------------------------------------ what is read

    def raw(self, node: ast.expr) -> Thing:
        """What is known of an argument that is handed over as it is."""
        match node:
            case ast.Name():
                return self._named(node)
            case ast.Attribute(value=owner, attr=attr):
                thing = self.raw(owner)
                return self._declared_at(node) or self._attribute(kinds_of(thing) - NONE, attr, node)
            case ast.Subscript(value=owner, slice=key):
                self.taken(key, self.value(key), KEY)
                thing = self.raw(owner)
                return self._declared_at(node) or self._item_of(thing, node)
        return self.value(node)

    def _declared_at(self, node: ast.expr) -> Thing | None:
        path = path_of(node)
        return None if path is None or path.root in self.loop_names else self.declared.get(path)

    def _named(self, node: ast.Name) -> Thing:
        name, contract = node.id, self.contract
        if name in self.loop_names:
            return self.loop_names[name]
        if name in contract.assigned:
            return self._assigned(name)
        if name in contract.parameters or name == "result":
            return self.declared.get(Path(name), ANYTHING)
        if name in contract.symbols:
            return SYMBOLS[contract.symbols[name]]
        if name in contract.constants:
            return kind_of(contract.constants[name])
        if name in DEVICE_TYPES:
            raise self.error(f"{name} is a type of device{_DEVICE_TYPES}", node)
        return DTYPE if name in DTYPE_NAMES or name in DTYPE_SETS else ANYTHING

    def _assigned(self, name: str) -> Thing:
        if len(self.under_way) > _MOST_NAMES:
            return ANYTHING
        if name not in self.given:
            self.given[name] = ANYTHING  # while it is worked out, for names that need each other
            self.under_way.append(name)
            outside = self.declared, self.loop_names, self.after_call
            found: list[Thing] = []
            for clause in self.contract.clauses:
                match clause.statement:
                    case Assign(names=names, expr=expr) if name in names:
                        self.enter(clause.conditions, clause.after_call)
                        thing = self.raw(expr.node)
                        parts = self.parts(thing, len(names), expr.node) if len(names) > 1 else [thing]
                        found.append(parts[names.index(name)])
            self.declared, self.loop_names, self.after_call = outside
            self.given[name] = found[0] if len(found) == 1 else all_kinds(found)
            self.under_way.pop()
        return kinds_of(self.given[name]) if self.after_call else self.given[name]

    def _attribute(self, kinds: Kinds, attr: str, node: ast.Attribute) -> Kinds:
        if kinds == TENSOR:
            if attr not in TENSOR_ATTRIBUTES:
                known = ", ".join(TENSOR_ATTRIBUTES)
                hint = suggestion(attr, TENSOR_ATTRIBUTES) or f"; what can be read from a tensor: {known}"
                raise self.error(f"{attr!r} is not read from a tensor{hint}", node)
            return ATTRIBUTES.get(attr, ANYTHING)
        # A number or a text may be of a class that has more to it.
        bare = DTYPE | DEVICE | SIZES | (NUMBER | TEXT if attr in TENSOR_ATTRIBUTES else frozenset())
        if kinds and kinds <= bare:
            raise self.error(f"{attr!r} is not read from {called(kinds)}", node)
        return ANYTHING

    def _item_of(self, thing: Thing, node: ast.Subscript) -> Thing:
        kinds, text, key = kinds_of(thing) - NONE, ast.unparse(node.value), literal_index(node.slice)
        if kinds == TENSOR:
            instead = f"such as first({ast.unparse(node)})"
            raise self.error(f"{text} is a tensor, whose items only value functions read, {instead}", node)
        if kinds and kinds <= NUMBER | TEXT | DTYPE | DEVICE:
            raise self.error(f"{text} is {called(kinds)}, which has no items", node)
        if kinds == SIZES:
            if key is not None and isinstance(node.value, ast.Attribute):
                self._within_rank(node.value.value, key, node)
            return NUMBER
        match only_alternative(thing):
            case ListType(item=item):
                return item
            case TupleType(items=items) if key is not None:
                if not -len(items) <= key < len(items):
                    raise self.error(f"{text} has {len(items)} items", node)
                return items[key]
        return ANYTHING

    def _within_rank(self, x: ast.expr, index: int, node: ast.expr) -> None:
        """Refuse a dimension that a tensor never has."""
        ranks = ranks_of(self.raw(x))
        if ranks and not any(-rank <= index < rank for rank in ranks):
            raise self.error(has_dimensions(x, ranks), node)

    def _tensor(self, node: ast.expr) -> Thing:
        """What is known of an argument of a value function: something read, a part of it, or what a function gives."""
        if not isinstance(node, ast.Subscript):
            return self.raw(node)
        thing = self._tensor(node.value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        taken = INDEX if kinds_of(thing) - NONE == TENSOR else KEY
        for part in parts:
            for index in (part.lower, part.upper, part.step) if isinstance(part, ast.Slice) else (part,):
                if index is not None and not (isinstance(index, ast.Constant) and index.value is Ellipsis):
                    self.taken(index, self.value(index), taken)
        if taken is INDEX:
            return TENSOR
        if len(parts) == 1 and not isinstance(parts[0], ast.Slice):
            return self._declared_at(node) or self._item_of(thing, node)
        return ANYTHING

    # ------------------------------------------------------------ loops

    def _loop(self, name: str, loop: ast.GeneratorExp) -> None:
        (comprehension,) = loop.generators
        item = self._each(comprehension.iter)
        with self._within(comprehension.target, item, comprehension.iter):
            for condition in comprehension.ifs:
                self.truth(condition)
            if name == "sum":
                self._number(loop.elt)
            else:
                self.truth(loop.elt)

    @contextmanager
    def _within(self, target: ast.expr, item: Thing, iterable: ast.expr) -> Iterator[None]:
        before = dict(self.loop_names)
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        parts = self.parts(item, len(names), iterable) if isinstance(target, ast.Tuple) else [item]
        self.loop_names |= {
            name.id: part for name, part in zip(names, parts, strict=True) if isinstance(name, ast.Name)
        }
        yield
        self.loop_names = before

    def _each(self, node: ast.expr) -> Thing:
        """What is known of each item of a sequence."""
        match node:
            case ast.Call(func=ast.Name(id="range"), args=[count]):
                self.taken(count, self.value(count), COUNT)
                return NUMBER
            case ast.Call(func=ast.Name(id="items"), args=[mapping]):
                self.taken(mapping, self.raw(mapping), MAPPING)
                return (ANYTHING, ANYTHING)
            case ast.Call(func=ast.Name(id="enumerate"), args=[inner]):
                return (NUMBER, self._each(inner))
            case ast.Call(func=ast.Name(id="zip"), args=inners):
                return tuple(self._each(inner) for inner in inners)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                things = [self.raw(item) for item in items if not isinstance(item, ast.Tuple | ast.List)]
                return all_kinds(things) if len(things) == len(items) else ANYTHING
        thing = self.raw(node)
        kinds = kinds_of(thing) - NONE
        if kinds and not kinds & (SEQUENCES | DICT):
            raise self.error(self._no_sequence(node, thing), node)
        if kinds == SIZES:
            return NUMBER
        match only_alternative(thing):
            case ListType(item=item):
                return item
            case TupleType(items=types):
                return all_kinds(list(types))
        return ANYTHING

    def _no_sequence(self, node: ast.expr, thing: Thing) -> str:
        kinds, text = kinds_of(thing), ast.unparse(node)
        problem = f"a loop goes over sequences, and {text} is {called(kinds)}"
        if "tensor" in kinds:
            tensors = list(tensor_types(thing)) if isinstance(thing, Type) else []
            first = tensors[0].dims[0] if len(tensors) == 1 and tensors[0].dims else None
            count = first.expr.text if isinstance(first, Size) else f"{text}.shape[0]"
            return f"{problem}; write `for i in range({count})`, and {text}[i] in value functions"
        return f"{problem}; write range({text})" if "number" in kinds else problem

    def parts(self, thing: Thing, count: int, node: ast.expr) -> list[Thing]:
        """What is known of each part of what is taken apart into so many names."""
        kinds = kinds_of(thing) - NONE
        if kinds and not kinds & SEQUENCES:
            raise self.error(f"{called(kinds)} has no parts", node)
        only = only_alternative(thing)
        parts = thing if isinstance(thing, tuple) else only.items if isinstance(only, TupleType) else None
        if parts is not None:
            if len(parts) != count:
                raise self.error(f"{len(parts)} parts for {count} names", node)
            return list(parts)
        if kinds == SIZES:
            if isinstance(node, ast.Attribute) and (ranks := ranks_of(self.raw(node.value))) and count not in ranks:
                raise self.error(has_dimensions(node.value, ranks), node)
            return [NUMBER] * count
        return [only.item if isinstance(only, ListType) else ANYTHING] * count


_DEVICE_TYPES = "; a type of device is compared with a device: x.device == cpu, or x.device in (cpu, cuda)"


def _is_no_device(node: ast.expr) -> bool:
    """Whether an expression reads what is no device of whatever it reads from."""
    match node:
        case ast.Attribute(attr=attr) | ast.Subscript(value=ast.Attribute(attr=attr)):
            return attr != "device" and attr in TENSOR_ATTRIBUTES
        case ast.IfExp(body=body, orelse=orelse):
            return any(isinstance(part, ast.Constant) or _is_no_device(part) for part in (body, orelse))
    return False
