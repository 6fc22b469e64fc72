"""Expressions of the language → Python source, and the names that the source uses."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from typing import Literal

from llm_op_guard.contract.expressions import LOOPS, device_types, names_in, steps_of
from llm_op_guard.contract.model import DtypeSet, Expr, Like, NoneType, ScalarType, TensorType
from llm_op_guard.contract.path import Path, path_of
from llm_op_guard.contract.vocabulary import DTYPE_NAMES, DTYPE_SETS, FUNCTIONS, RAW_KINDS
from llm_op_guard.guard.names import Names
from llm_op_guard.guard.plan import Plan
from llm_op_guard.guard.steps import Given, Match, Read, Step

Kind = Literal["number", "other"]

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%",
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not",
    ast.And: "and", ast.Or: "or", ast.USub: "-", ast.UAdd: "+", ast.Not: "not ",
}  # fmt: skip

_ASPECTS = ("shape", "dtype", "device", "ndim")
_BREAKING = {ast.Div: "_divide", ast.FloorDiv: "_floor_divide", ast.Mod: "_modulo", ast.Pow: "_power"}


class ExpressionWriter:
    """Writes the expressions of one step.

    After writing: `fallible` says whether the source may raise NotApplicable, `may_break` whether it may raise
    Broken, `hoisted` which names must be tested for None before it is evaluated, `tested` which arguments a
    conjunction asks beforehand whether they are tensors, `shapes` those whose shape it keeps.
    """

    def __init__(
        self,
        plan: Plan,
        names: Names,
        done: list[Step],
        given: tuple[Given, ...],
        maybe: set[str],
        is_sure: Callable[[str, tuple[Given, ...]], bool],
    ) -> None:
        self._is_sure = is_sure
        self.plan = plan
        self.contract = plan.contract
        self.names = names
        self.done = done
        self.given = given
        self.maybe = maybe
        self.fallible = False
        self.may_break = False
        self.hoisted: list[str] = []
        self.lazy = False
        self._present: set[Path] = set()
        self.tested: set[Path] = set()
        self.shapes: set[Path] = set()

    # ------------------------------------------------------------ what is known here

    def is_tensor(self, path: Path) -> bool:
        """Whether a path is a tensor for certain wherever this step runs."""
        possible = self._committed(path)
        return path in self.tested or (bool(possible) and all(isinstance(a, TensorType | Like) for a in possible))

    def _is_number(self, name: str) -> bool:
        possible = self._committed(Path(name))
        return bool(possible) and all(isinstance(a, ScalarType) and a.text in ("int", "float") for a in possible)

    def _tensor_where_there(self, path: Path) -> str | None:
        """The source of a path of several steps that has been read, and found to be a tensor or not there."""
        here = {*self.given, *(Given(s.fact, True) for s in self.done if isinstance(s, Read) and s.path == path)}
        declared = [
            s for s in self.done if isinstance(s, Match) and s.path == path and s.certain and set(s.given) <= here
        ]
        if not any(all(isinstance(a, TensorType | Like) for a in step.type.alternatives) for step in declared):
            return None
        self.fallible = True
        return f"_there({self.names.path(path)})"

    def _least_rank(self, path: Path) -> int:
        """The dimensions that a path has at least, whatever it can be here."""
        ranks = [
            len(a.dims) - (a.rest_index is not None) if isinstance(a, TensorType) and a.dims is not None else 0
            for a in self._committed(path)
        ]
        return min(ranks, default=0)

    def _committed(self, path: Path) -> list[object]:
        """The alternatives that a path can be here; it is one of them."""
        found: list[object] = []
        facts = {g.name: g.value for g in self.given}
        for step in self._declarations(path):
            if step.fact is None:
                found.append(step.type.alternatives[0])
            elif step.fact in facts:
                found.append(step.type.alternatives[int(facts[step.fact])])
            elif path in self._present:
                found += [a for a in step.type.alternatives if not isinstance(a, NoneType)]
        return found

    def _declarations(self, path: Path) -> list[Match]:
        """The certain declarations of a path that hold wherever this step runs."""
        here = set(self.given)
        return [
            step
            for step in self.done
            if isinstance(step, Match) and step.path == path and step.certain and set(step.given) <= here
        ]

    def _hoist_presence(self, node: ast.expr) -> None:
        """Test an optional argument for None up front when it is the first thing that an expression reads.

        Nothing is evaluated before it, so the outcome is the same, without the cost of an exception.
        """
        read, as_tensor = _first_read(node)
        path = path_of(read) if read is not None else None
        if path is None or path.root not in self.contract.parameters or isinstance(read, ast.Subscript):
            return
        owner = path if as_tensor else Path(path.root, path.steps[:-1])
        if owner.steps or not (as_tensor or isinstance(read, ast.Attribute)):
            return
        declared = [alternative for step in self._declarations(owner) for alternative in step.type.alternatives]
        others = [a for a in declared if not isinstance(a, NoneType)]
        if not as_tensor and len(others) == len(declared):
            return
        if not self.is_tensor(owner):
            self.hoisted.append(self.names.own(owner.root))
            if others and all(isinstance(a, TensorType | Like) for a in others):
                self._present.add(owner)

    def prepare(self, node: ast.expr) -> None:
        """Decide whether names without a value may be tested up front: not where a part may stay unevaluated, nor
        where a part evaluated earlier may break the rule first.
        """
        self.lazy = self.lazy or any(_defers(part) for part in ast.walk(node))

    # ------------------------------------------------------------ writing

    def value(self, node: ast.expr) -> str:
        """The source of an expression that stands in arithmetic, a comparison or a condition."""
        self.prepare(node)
        if not self.hoisted:
            self._hoist_presence(node)
        return self._value(node)[0]

    def size(self, node: ast.expr) -> str:
        """The source of an expression that a size is compared with; does not apply unless it is a whole number."""
        self.prepare(node)
        code, kind = self._value(node)
        is_whole = kind == "number" and not any(
            isinstance(part, ast.Constant) and isinstance(part.value, float) for part in ast.walk(node)
        )
        if is_whole and not any(self._is_number(name) for name in names_in(node)):
            return code
        self.fallible = True
        return f"_whole({code})"

    def conjunction(self, node: ast.expr) -> str:
        """The source of a condition for which not to apply is as good as to be false.

        In a chain of `and`, what is not a tensor can then be asked beforehand instead of being caught.
        """
        parts = node.values if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And) else [node]
        codes: list[str] = []
        for part in parts:
            for name in self._tensors_read(part):
                own, is_tensor = self.names.own(name), name in self.contract.tensors
                self.tested |= {Path(name)} if is_tensor else set()
                codes.append(f"isinstance({own}, _Tensor)" if is_tensor else f"{own} is not None")
            self.prepare(part)
            codes.append(atom(self._value(part)[0]) if len(parts) > 1 else self._value(part)[0])
        return " and ".join(codes)

    def _tensors_read(self, node: ast.expr) -> list[str]:
        """Parameters of which a simple comparison reads what tensors have, and that may be something else."""
        return [
            part.value.id
            for part in (ast.walk(node) if isinstance(node, ast.Compare) else ())
            if isinstance(part, ast.Attribute)
            and isinstance(part.value, ast.Name)
            and part.attr in _ASPECTS
            and part.value.id in self.contract.parameters
            and not self.is_tensor(Path(part.value.id))
        ]

    def raw(self, node: ast.expr) -> str:
        """The source of an argument as it is."""
        self.prepare(node)
        return self._raw(node)

    def operands(self, node: ast.Compare) -> tuple[str, str]:
        """The two sides of a simple comparison."""
        self.prepare(node)
        if not isinstance(node.ops[0], ast.Is | ast.IsNot) and not self.hoisted:
            self._hoist_presence(node)
        return self._sides(node)

    def _sides(self, node: ast.Compare) -> tuple[str, str]:
        op, right = node.ops[0], node.comparators[0]
        if isinstance(op, ast.Is | ast.IsNot):
            return self._raw(node.left), self._value(right)[0]
        own = {*self.contract.parameters, *self.contract.assigned}
        for device, written in ((node.left, right), (right, node.left)):
            if types := device_types(written, own):
                listed = isinstance(written, ast.Tuple | ast.List)
                return self._device_type(device), repr(types if listed else types[0])
        (left_code, left_kind), (right_code, right_kind) = self._compared(node.left), self._compared(right)
        if not isinstance(op, ast.Eq | ast.NotEq) and not self._safe(op, right, left_kind, right_kind):
            self.fallible = True
        return atom(left_code), atom(right_code)

    def _compared(self, node: ast.expr) -> tuple[str, Kind]:
        """The source of what is compared: something that is read and may be None has no value then."""
        code, kind = self._value(node)
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and code.startswith("_plain("):
            return f"_compared({code.removeprefix('_plain(')}", kind
        return code, kind

    def _device_type(self, node: ast.expr) -> str:
        """The source of the type of a device that is compared with a written one."""
        fallible, self.fallible = self.fallible, False
        code = self._value(node)[0]
        path = path_of(node.value) if isinstance(node, ast.Attribute) else None
        known = path is not None and self.is_tensor(path)
        if isinstance(node, ast.Name) and self.contract.symbols.get(node.id) == "device":
            known = not self.fallible
        self.fallible = fallible or not known
        return f"{code}.type" if known else f"_device_type({code})"

    def _safe(self, op: ast.cmpop, right: ast.expr, left_kind: Kind, right_kind: Kind) -> bool:
        if isinstance(op, ast.In | ast.NotIn):
            return isinstance(right, ast.Tuple | ast.List) or (isinstance(right, ast.Name) and right.id in DTYPE_SETS)
        return left_kind == right_kind == "number"

    def _value(self, node: ast.expr) -> tuple[str, Kind]:
        match node:
            case ast.Constant(value=value):
                return repr(value), "number" if isinstance(value, int | float) else "other"
            case ast.Name(id=name):
                return self._name(name)
            case ast.Attribute() | ast.Subscript():
                return self._read(node)
            case ast.UnaryOp(op=op, operand=operand):
                code, kind = self._value(operand)
                if not isinstance(op, ast.Not) and kind != "number":
                    self.fallible = True
                return f"{_OPERATORS[type(op)]}{atom(code)}", "number"
            case ast.BinOp(left=left, op=op, right=right):
                return self._arithmetic(left, op, right)
            case ast.BoolOp(op=op, values=parts):
                return f" {_OPERATORS[type(op)]} ".join(atom(self._value(part)[0]) for part in parts), "other"
            case ast.Compare() if len(node.ops) == 1:
                left_code, right_code = self._sides(node)
                return f"{left_code} {_OPERATORS[type(node.ops[0])]} {right_code}", "other"
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                self.fallible = True
                chain = [atom(self._compared(left)[0])]
                for comparison, comparator in zip(ops, comparators, strict=True):
                    chain += [_OPERATORS[type(comparison)], atom(self._compared(comparator)[0])]
                return " ".join(chain), "other"
            case ast.IfExp(test=test, body=body, orelse=orelse):
                codes = [atom(self._value(part)[0]) for part in (body, test, orelse)]
                return "{} if {} else {}".format(*codes), "other"
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return f"({''.join(f'{self._item(item)}, ' for item in items)})", "other"
            case ast.Call(func=ast.Name(id=name)) if name in LOOPS:
                return self._evaluated(node), "other"
            case ast.Call(func=ast.Name(id=name)):
                return self._call(name, node), "other"
        raise AssertionError(ast.dump(node))

    def _item(self, node: ast.expr) -> str:
        if isinstance(node, ast.Starred):
            self.fallible = True
            return f"*{atom(self._value(node.value)[0])}"
        if isinstance(node, ast.Name) and node.id in DTYPE_SETS:
            return f"*{self._value(node)[0]}"
        return atom(self._value(node)[0])

    def _name(self, name: str) -> tuple[str, Kind]:
        if name in self.contract.symbols:
            kind: Kind = "number" if self.contract.symbols[name] == "size" else "other"
            return self._known(name), kind
        if name in self.contract.assigned:
            self.fallible = True
            return f"_plain({self._known(name)})", "other"
        if name in self.contract.constants:
            value = self.contract.constants[name]
            if isinstance(value, int | float):
                return self._constant(name), "number"
            self.fallible = True
            return f"_plain({self._constant(name)})", "other"
        if name in DTYPE_SETS:
            return self.names.dtypes((DtypeSet(name),)), "other"
        if name in DTYPE_NAMES and name not in self.contract.parameters:
            return f"_dtype_{name}", "other"
        if self._is_number(name):
            return self.names.own(name), "number"
        self.fallible = True
        return f"_plain({self.names.own(name)})", "other"

    def _known(self, name: str) -> str:
        """A symbol or assigned name, with whatever is needed where it may have no value."""
        own = self.names.own(name)
        if self._is_sure(name, self.given):
            return own
        self.maybe.add(name)
        if self.lazy:
            self.fallible = True
            return f"_known({own})"
        if own not in self.hoisted:
            self.hoisted.append(own)
        return own

    def _raw(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                if name in {*self.contract.symbols, *self.contract.assigned}:
                    return self._known(name)
                return self._constant(name) if name in self.contract.constants else self.names.own(name)
            case ast.Attribute(value=owner, attr=attr):
                path = path_of(owner)
                if path is not None and self.is_tensor(path) and attr in _ASPECTS:
                    if attr == "ndim" and path in self.tested and path not in self.shapes:
                        # The shape is read for its length and kept: its sizes are wanted next.
                        self.shapes.add(path)
                        return f"len({self.names.aspect(path, 'shape')} := {self.names.path(path)}.shape)"
                    return f"{self.names.path(path)}.{attr}"
                if path is not None and attr in _ASPECTS and (there := self._tensor_where_there(path)):
                    return f"{there}.{attr}"
                self.fallible = True
                is_tensor = str(path) in self.contract.tensors and attr in _ASPECTS
                return f"{'_tensor' * is_tensor}_attribute({self._raw(owner)}, {attr!r})"
            case ast.Subscript(value=owner, slice=key):
                self.fallible = True
                return f"_item({self._raw(owner)}, {self._looked_for(key)})"
        return self._value(node)[0]

    def _looked_for(self, key: ast.expr) -> str:
        """The source of an index."""
        code = self._value(key)[0]
        if path_of(ast.Subscript(ast.Name("_"), key)) is not None:
            return code  # a literal
        self.fallible = True
        return f"_as_index({code})"

    def _constant(self, name: str) -> str:
        self.names.constants[f"_constant_{name}"] = self.contract.constants[name]
        return f"_constant_{name}"

    def _tensor(self, node: ast.expr) -> str:
        """The source of an argument of a value function."""
        self.fallible = True
        match node:
            case ast.Call(func=ast.Name(id=name)):
                return self._call(name, node)
            case ast.Subscript(value=owner, slice=index):
                parts = index.elts if isinstance(index, ast.Tuple) else [index]
                return f"_part({self._tensor(owner)}, {', '.join(map(self._index, parts))})"
        return self._raw(node)

    def _index(self, node: ast.expr) -> str:
        match node:
            case ast.Slice(lower=lower, upper=upper, step=step):
                codes = ("None" if part is None else self._value(part)[0] for part in (lower, upper, step))
                return f"slice({', '.join(codes)})"
            case ast.Constant(value=value) if value is Ellipsis:
                return "..."
        return self._value(node)[0]

    def _read(self, node: ast.Attribute | ast.Subscript) -> tuple[str, Kind]:
        match node:
            case ast.Attribute(value=owner, attr=attr):
                path = path_of(owner)
                if path is not None and attr in _ASPECTS and (self.is_tensor(path) or self._tensor_where_there(path)):
                    return self._raw(node), "number" if attr == "ndim" else "other"
            case ast.Subscript(value=ast.Attribute(attr="shape")) if (whole := path_of(node)) is not None:
                path, index = Path(whole.root, whole.steps[:-2]), whole.steps[-1][0]
                rank = self._least_rank(path) if self.is_tensor(path) else 0
                if isinstance(index, int) and -rank <= index < rank:
                    return f"{self.names.path(path)}.shape[{index}]", "number"
        self.fallible = True
        return f"_plain({self._raw(node)})", "other"

    def _arithmetic(self, left: ast.expr, op: ast.operator, right: ast.expr) -> tuple[str, Kind]:
        (a, a_kind), (b, b_kind) = self._value(left), self._value(right)
        numbers = a_kind == b_kind == "number"
        if not numbers:
            self.fallible = True
        if type(op) in _BREAKING:
            plain_divisor = isinstance(right, ast.Constant) and isinstance(right.value, int) and right.value != 0
            if not (numbers and plain_divisor and isinstance(op, ast.FloorDiv | ast.Mod)):
                self.may_break = True
                self.fallible = True  # a power may be too large to stand for anything
                return f"{_BREAKING[type(op)]}({a}, {b})", "number" if numbers else "other"
        elif isinstance(op, ast.Add | ast.Mult) and not numbers:
            return f"{'_add' if isinstance(op, ast.Add) else '_multiply'}({a}, {b})", "other"
        return f"{atom(a)} {_OPERATORS[type(op)]} {atom(b)}", "number" if numbers else "other"

    def _evaluated(self, node: ast.Call) -> str:
        """A loop is not written as source: the check evaluates it as `explain` does."""
        self.fallible = True
        self.may_break = True
        expr = f"_expression_{len(self.names.constants)}"
        self.names.constants[expr] = (Expr.of(node), self.contract.constants)
        names = {name: self.names.own(name) for name in names_in(node)}
        given = {*self.contract.parameters, "result"}
        unsure = {name for name in names if name in {*self.contract.symbols, *self.contract.assigned}}
        for name in unsure:
            if not self._is_sure(name, self.given):
                self.maybe.add(name)
        items = "".join(f"{name!r}: {own}, " for name, own in names.items() if name in given or name in unsure)
        return f"_evaluated(*{expr}, {{{items}}}, {tuple(sorted(unsure))!r})"

    def _argument(self, kind: str, node: ast.expr) -> str:
        if kind == "tensor":
            return self._tensor(node)
        return self._raw(node) if kind in RAW_KINDS else self._value(node)[0]

    def _call(self, name: str, node: ast.Call) -> str:
        if name in ("has", "get"):
            root_name, path = steps_of(node.args[0])
            root = self._raw(root_name)
            codes = (repr(step) if isinstance(step, str) else f"({self._looked_for(step)},)" for step in path)
            steps = "".join(f", {code}" for code in codes)
            if name == "has":
                return f"_present({root}{steps})" if steps else f"{atom(root)} is not None"
            self.fallible = True
            rank = f"len({root}.shape) if isinstance({root}, _Tensor) else " if [*path] == ["ndim"] else ""
            return (
                f"{rank}_plain(_got) if (_got := _path_value({root}{steps})) is not _unset and _got is not None "
                f"else {atom(self._value(node.args[1])[0])}"
            )
        self.fallible = True
        self.may_break = True
        kinds = FUNCTIONS[name].arguments
        arguments = [
            self._argument(kinds[min(index, len(kinds) - 1)][1], argument) for index, argument in enumerate(node.args)
        ]
        arguments += [
            f"{keyword.arg}={self._argument(dict(kinds)[str(keyword.arg)], keyword.value)}" for keyword in node.keywords
        ]
        if FUNCTIONS[name].of_extremes and ast.unparse(node.args[0]) in self.plan.read_once:
            arguments.append("reads=_reads")
        return f"_fn_{name}({', '.join(arguments)})"


def _first_read(node: ast.expr) -> tuple[ast.expr | None, bool]:
    """The argument that an expression reads before anything else, and whether a function takes it as a tensor."""
    while True:
        match node:
            case ast.Compare(left=first) | ast.BinOp(left=first) | ast.UnaryOp(operand=first):
                node = first
            case ast.BoolOp(values=[first, *_]):
                node = first
            case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in FUNCTIONS and name not in ("has", "get"):
                if FUNCTIONS[name].arguments[0][1] == "tensor":
                    return first, True
                node = first
            case ast.Subscript(value=ast.Attribute() as inner):
                node = inner
            case ast.Attribute():
                return node, False
            case _:
                return None, False


def _defers(node: ast.AST) -> bool:
    """Whether a part of an expression may stay unevaluated or may break before another part is reached."""
    match node:
        case ast.BoolOp() | ast.IfExp() | ast.Call():
            return True
        case ast.Compare(ops=ops):
            return len(ops) > 1
        case ast.BinOp(op=ast.Div() | ast.Pow()):
            return True
        case ast.BinOp(op=ast.Mod() | ast.FloorDiv(), right=right):
            return not (isinstance(right, ast.Constant) and right.value != 0)
    return False


@cache
def atom(code: str) -> str:
    """The code, in brackets unless it is one term."""
    if isinstance(_parsed(code), ast.Name | ast.Constant | ast.Attribute | ast.Subscript | ast.Call):
        return code
    # What is in brackets already parses without them: `(a + b)` does, `(a) + (b)` does not.
    return code if code.startswith("(") and _parsed(code[1:-1]) is not None else f"({code})"


def _parsed(code: str) -> ast.expr | None:
    try:
        return ast.parse(code, mode="eval").body
    except SyntaxError:
        return None
