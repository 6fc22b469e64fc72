"""Plan → program of the native check, or why there is none. Pure: nothing is loaded or run here.

A program says yes where the steps that it has would say yes in Python, and no where one would not; what it cannot tell
is the Python check's to say. Steps that no program can say, and those that need what they give, are left to Python:
`remainder` says what that comes to.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from llm_op_guard.contract.model import (
    Alternative,
    Declare,
    DeviceOf,
    DeviceSymbol,
    DeviceType,
    Dim,
    Dtype,
    DtypeName,
    DtypeOf,
    DtypeSet,
    DtypeSymbol,
    Leaf,
    Like,
    LiteralType,
    NoneType,
    Require,
    Rest,
    RestOf,
    ScalarType,
    Size,
    SizeOneOf,
    TensorType,
    dim_symbol,
)
from llm_op_guard.contract.path import Path
from llm_op_guard.guard.assembly import Assembly, Label, NoProgram, Operand
from llm_op_guard.guard.expression_program import Expressions, device_set, dtype_set
from llm_op_guard.guard.plan import Plan
from llm_op_guard.guard.remainder import remainder
from llm_op_guard.guard.steps import (
    Agree,
    Decide,
    Demand,
    Given,
    Let,
    Match,
    Read,
    Solve,
    Step,
    Telling,
    directly_checked,
    late_device,
    late_dtype,
)
from llm_op_guard.native.program import MOST_DIMS, Kind, Op, Program, Refused

_KINDS = {"int": Kind.INT, "float": Kind.FLOAT, "bool": Kind.BOOL, "str": Kind.STR, "dict": Kind.DICT}


# What a program costs to ask is what Python takes for one or two steps: as much as a tensor that only tells spares.
_LEAST_SPARED = 3


class Lowered(NamedTuple):
    """A program, the plan of what Python still has to check (None: nothing), and the reasons in words.

    That a step is about values, or hangs on another that is not said, is no reason that is given.
    """

    program: Program
    remainder: Plan | None
    reasons: tuple[str, ...]


def lower(plan: Plan) -> Lowered | Refused:
    """The program of a check, or why there is none that spares Python anything."""
    if plan.after_call or not plan.steps:
        return Refused("all of it is asked after the call")
    lowering = _Lowering(plan)
    try:
        program = lowering.program()
    except NoProgram as refusal:
        return Refused(str(refusal))
    unsaid = lowering.unsaid
    remains = remainder(plan, unsaid) if unsaid or plan.has_later or plan.forgets else None
    again = frozenset(map(id, remains.steps)) if remains is not None else frozenset()
    if remains is not None and sum(id(step) not in again for step in plan.steps) < _LEAST_SPARED:
        most = "most of it is about values or results, or hangs on what is"
        return Refused(next(iter(lowering.reasons), most))
    return Lowered(program, remains, tuple(lowering.reasons))


class _Lowering:
    """Writes the steps of one check, but for those that are `unsaid`, some of them for `reasons`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.contract = plan.contract
        self.asm = Assembly(plan.parameters)
        self.expressions = Expressions(plan.contract, self.asm)
        self.no = Label()
        self.cannot = Label()
        self.unsaid: list[Step] = []
        self.reasons: list[str] = []
        # The names and facts that unsaid steps would have told, and the declarations that begin with one.
        self._untold: set[str] = set()
        self._undeclared: set[tuple[int, Path]] = set()

    def program(self) -> Program:
        opened: list[tuple[Given, Label]] = []
        for step in self.plan.steps:
            if self.is_beyond(step):
                self.leave(step)
                continue
            self.enter(step.given, opened)
            mark, done = self.asm.mark(), Label()
            if not isinstance(step, Match | Read):  # what a tensor tells is there
                self.asm.emit(Op.ON_ABSENT, done)
            try:
                self.step(step, done)
            except NoProgram as refusal:
                self.asm.back_to(mark)
                self.reasons.append(str(refusal))
                self.leave(step)
            else:
                self.asm.put(done)
        self.enter((), opened)
        self.asm.emit(Op.YES)
        self.asm.put(self.no)
        self.asm.emit(Op.NO)
        self.asm.put(self.cannot)
        self.asm.emit(Op.CANNOT)
        return self.asm.assembled()

    def is_beyond(self, step: Step) -> bool:
        """Whether a step is about values, or hangs on what an unsaid one would have told."""
        if step.clause.cost_class != "A":
            return True
        # A size that only Python has seen might be another than the one that is solved for.
        needs = step.needs | step.gives if isinstance(step, Solve) else step.needs
        return (
            not self._untold.isdisjoint(needs)
            or any(given.name in self._untold for given in step.given)
            or (isinstance(step, Agree | Solve) and (id(step.clause), step.path) in self._undeclared)
        )

    def leave(self, step: Step) -> None:
        """Leave a step to Python."""
        self.unsaid.append(step)
        self._untold |= step.gives
        if isinstance(step, Telling) and step.fact is not None:
            self._untold.add(step.fact)
        if isinstance(step, Match):
            self._undeclared.add((id(step.clause), step.path))

    def enter(self, given: tuple[Given, ...], opened: list[tuple[Given, Label]]) -> None:
        """Leave the branches that a step does not stand in, and enter those that it does; neighbours share them."""
        shared = 0
        while shared < min(len(given), len(opened)) and given[shared] == opened[shared][0]:
            shared += 1
        while len(opened) > shared:
            self.asm.put(opened.pop()[1])
        for fact in given[shared:]:
            opened.append((fact, Label()))
            self.asm.emit(Op.UNLESS, self.asm.keep(fact.name), int(fact.value), opened[-1][1])

    def step(self, step: Step, done: Label) -> None:
        match step:
            case Decide(fact=fact, test=test):
                false = Label()
                self.expressions.test(test.node, false)
                self.asm.emit(Op.COPY, self.asm.keep(fact), self.asm.given(True))
                self.asm.emit(Op.JUMP, done)
                self.asm.put(false)
                self.asm.emit(Op.COPY, self.asm.keep(fact), self.asm.given(False))
            case Read(fact=fact, path=path):
                found = self.asm.walk(self.asm.own(path.root), path.steps)
                there = Label()
                if path.steps:
                    self.asm.emit(Op.COPY, self.asm.where(path), found)
                    self.asm.emit(Op.WHERE_SET, found, there)
                else:
                    self.asm.emit(Op.WHERE_TRUE, self.asm.made(Op.PRESENT, found), there)
                self.asm.emit(Op.JUMP, done)
                self.asm.put(there)
                self.asm.emit(Op.COPY, self.asm.keep(fact), self.asm.given(True))
            case Match():
                self.match(step, done)
            case Solve():
                self.solve(step, done)
            case Agree():
                self.agree(step, done)
            case Let(statement=statement):
                if len(statement.names) > 1:
                    raise NoProgram(f"{statement.text} takes a sequence apart")
                found = self.expressions.raw(statement.expr.node)
                self.asm.emit(Op.WHERE_FALSE, self.asm.made(Op.PRESENT, found), done)
                self.asm.emit(Op.COPY, self.asm.own(statement.names[0]), found)
            case Demand(statement=statement):
                self.expressions.test(statement.expr.node, self.no)
            case _:
                raise NoProgram(f"{_named(step.clause.statement)} keeps something")

    def match(self, step: Match, done: Label) -> None:
        alternatives = step.type.alternatives
        for index, alternative in enumerate(alternatives):
            last = index + 1 == len(alternatives)
            misfit = self.no if last else Label()
            if last and isinstance(alternative, TensorType) and alternative.dims is not None:
                self.matched(step, alternative)
            else:
                self.fits(step, alternative, misfit)
                if isinstance(alternative, TensorType):
                    self.observe(step, alternative)
            if step.fact is not None:
                self.asm.emit(Op.COPY, self.asm.keep(step.fact), self.asm.given(index))
            if isinstance(alternative, Like):
                self.like(step.path, alternative.path, done)
            if not last:
                self.asm.emit(Op.JUMP, done)
                self.asm.put(misfit)

    def fits(self, step: Match, alternative: Alternative, misfit: Label) -> None:
        value = self.asm.where(step.path)
        match alternative:
            case NoneType():
                self.asm.emit(Op.IS_KIND, value, Kind.NONE, misfit)
            case ScalarType(text="object"):
                pass
            case ScalarType(text=kind) if kind in _KINDS:
                self.asm.emit(Op.IS_KIND, value, _KINDS[kind], misfit)
            case LiteralType(value=wanted):
                self.asm.emit(Op.IS_LITERAL, value, self.asm.scalar(wanted), misfit)
            case Like():
                self.asm.emit(Op.TENSOR, self.asm.tensor(step.path), value, misfit)
            case TensorType(dims=dims, rest_index=rest):
                x = self.asm.tensor(step.path)
                self.asm.emit(Op.TENSOR, x, value, misfit)
                if dims is not None and rest is None:
                    self.asm.emit(Op.RANK, x, len(dims), misfit)
                elif dims is not None and len(dims) > 1:
                    self.asm.emit(Op.RANK_AT_LEAST, x, len(dims) - 1, misfit)
                fixed = _fixed_dtypes(alternative.dtypes)
                if fixed is not None:
                    self.asm.emit(Op.DTYPE_IN, x, self.asm.constant(dtype_set(fixed)), misfit)
            case _:
                raise NoProgram(f"{alternative.text} is no tensor and no plain scalar")

    def observe(self, step: Match, tensor: TensorType) -> None:
        """Bind and compare what the tensor itself tells: dtype, sizes, device."""
        x = self.asm.tensor(step.path)
        if tensor.dtype_symbol is not None:
            self.asm.emit(Op.SIGHT_DTYPE, self.asm.own(tensor.dtype_symbol), self.asm.made(Op.DTYPE, x))
        for axis, dim in enumerate(tensor.dims or ()):
            symbol = dim_symbol(dim)
            if symbol is not None and symbol in self.contract.symbols:
                self.sight(self.asm.own(symbol), x, tensor, axis)
            elif isinstance(dim, Size) and isinstance(dim.expr.node, ast.Constant):
                wanted = self.asm.given(dim.expr.node.value)
                self.asm.emit(Op.WHERE_FALSE, self.asm.made(Op.EQUAL, self.size(x, tensor, axis), wanted), self.no)
        if tensor.device_symbol is not None:
            self.asm.emit(Op.DEVICE_IS, self.asm.own(tensor.device_symbol), x)
        elif tensor.devices and not late_device(tensor):
            names = [d.name for d in tensor.devices if isinstance(d, DeviceType)]
            self.asm.emit(Op.DEVICE_IN, x, self.asm.constant(device_set(names)), self.no)

    def matched(self, step: Match, tensor: TensorType) -> None:
        """All of this at once, where a misfit is a broken rule."""
        x, dims, rest = self.asm.tensor(step.path), tensor.dims or (), tensor.rest_index
        if len(dims) > MOST_DIMS:
            raise NoProgram(f"{tensor.text} has more than {MOST_DIMS} dimensions")
        fixed = _fixed_dtypes(tensor.dtypes)
        device = tensor.device_symbol
        sizes: list[Operand] = []
        for dim in dims:
            symbol = dim_symbol(dim)
            if isinstance(dim, Size) and isinstance(dim.expr.node, ast.Constant):
                sizes.append(self.asm.given(dim.expr.node.value))
            else:
                known = symbol is not None and symbol in self.contract.symbols and not isinstance(dim, Rest)
                sizes.append(self.asm.own(symbol) if known and symbol is not None else -1)
        form: list[Operand] = [
            len(dims) - (rest is not None),
            -1 if rest is None else rest,
            -1 if fixed is None else dtype_set(fixed),
            -1 if device is None else self.asm.own(device),
            *sizes,
        ]
        self.asm.emit(Op.MATCH, x, self.asm.where(step.path), len(self.asm.forms))
        self.asm.forms.append(form)
        if tensor.dtype_symbol is not None:
            self.asm.emit(Op.SIGHT_DTYPE, self.asm.own(tensor.dtype_symbol), self.asm.made(Op.DTYPE, x))
        if rest is not None and (symbol := dim_symbol(dims[rest])) is not None and symbol in self.contract.symbols:
            self.sight(self.asm.own(symbol), x, tensor, rest)
        if device is None and tensor.devices and not late_device(tensor):
            names = [d.name for d in tensor.devices if isinstance(d, DeviceType)]
            self.asm.emit(Op.DEVICE_IN, x, self.asm.constant(device_set(names)), self.no)

    def sight(self, symbol: int, x: int, tensor: TensorType, axis: int) -> None:
        """Bind a symbol to a size, or compare it with what it is bound to."""
        if tensor.rest_index == axis:
            self.asm.emit(Op.SIGHT, symbol, self.size(x, tensor, axis), self.no)
        else:
            self.asm.emit(Op.SIZE_IS, symbol, x, _axis(tensor, axis))

    def size(self, x: int, tensor: TensorType, axis: int) -> int:
        """Where one size is, or the sizes of a dimension of open length."""
        if tensor.rest_index == axis:
            behind = len(tensor.dims or ()) - 1 - axis
            return self.asm.made(Op.SIZES, x, axis | behind << 8)
        return self.asm.made(Op.SIZE, x, _axis(tensor, axis))

    def like(self, path: Path, other: Path, done: Label) -> None:
        found = self.asm.walk(self.asm.own(other.root), other.steps)
        self.asm.emit(Op.TENSOR, self.asm.tensor(other), found, done)
        self.asm.emit(Op.LIKE, self.asm.tensor(path), self.asm.tensor(other), self.no)

    def solve(self, step: Solve, done: Label) -> None:
        tensor = self.declared(step, step.path)
        symbol = self.asm.own(step.symbol)
        self.asm.emit(Op.WHERE_SET, symbol, done)
        operands = [None if undo.operand is None else self.expressions.value(undo.operand) for undo in step.undo]
        x = self.asm.tensor(step.path)
        self.asm.emit(Op.HELD, x, self.asm.where(step.path))
        size = self.size(x, tensor, step.axis)
        for undo, operand in zip(step.undo, operands, strict=True):
            other = operand if operand is not None else size
            match undo.undo:
                case "plus":
                    size = self.asm.made(Op.ADD, size, other)
                case "minus":
                    size = self.asm.made(Op.SUBTRACT, size, other)
                case "from":
                    size = self.asm.made(Op.SUBTRACT, other, size)
                case "times":
                    self.asm.emit(Op.NO_FACTOR, other)
                    size = self.asm.made(Op.MULTIPLY, size, other)
                case "negate":
                    size = self.asm.made(Op.NEGATE, size)
                case "over":
                    size = self.asm.made(Op.WHOLE_RATIO, size, other)
                case "under":
                    size = self.asm.made(Op.WHOLE_RATIO, other, size)
        self.asm.emit(Op.NO_SIZE, size)
        self.asm.emit(Op.COPY, symbol, size)

    def declared(self, step: Solve, path: Path) -> TensorType:
        """The tensor type of a solution: that of the declaration that it stands in."""
        declared = [
            alternative
            for other in self.plan.steps
            if isinstance(other, Match) and other.path == path and other.clause is step.clause
            for alternative in other.type.alternatives
            if isinstance(alternative, TensorType) and _has_size(alternative, step)
        ]
        if len(declared) != 1:
            raise NoProgram(f"in {_named(step.clause.statement)} one symbol stands in several alternatives")
        return declared[0]

    def agree(self, step: Agree, done: Label) -> None:
        tensor, x = step.tensor, self.asm.tensor(step.path)
        self.asm.emit(Op.HELD, x, self.asm.where(step.path))
        if late_dtype(tensor):
            self.part(partial(self.agree_dtype, x, tensor))
        for axis, dim in enumerate(tensor.dims or ()):
            if isinstance(dim, Size | SizeOneOf | RestOf) and not directly_checked(dim, self.contract):
                self.part(partial(self.agree_size, x, tensor, axis, dim))
        if late_device(tensor):
            self.part(partial(self.agree_device, x, tensor))
        self.asm.emit(Op.JUMP, done)

    def part(self, write: Callable[[Label], None]) -> None:
        """One of several things that a step compares: what is absent in it leaves the others as they are."""
        known = Label()
        self.asm.emit(Op.ON_ABSENT, known)
        write(known)
        self.asm.put(known)

    def agree_dtype(self, x: int, tensor: TensorType, known: Label) -> None:
        fixed = [d for d in tensor.dtypes if isinstance(d, DtypeName | DtypeSet)]
        if fixed:
            other = Label()
            self.asm.emit(Op.DTYPE_IN, x, self.asm.constant(dtype_set(fixed)), other)
            self.asm.emit(Op.JUMP, known)
            self.asm.put(other)
        own = self.asm.made(Op.DTYPE, x)
        for dtype in tensor.dtypes:
            match dtype:
                case DtypeSymbol(name=name):
                    wanted = self.asm.own(name)
                case DtypeOf(path=path):
                    wanted = self.asm.made(Op.DTYPE, self.model(path, known))
                case _:
                    continue
            self.asm.emit(Op.WHERE_TRUE, self.asm.made(Op.EQUAL, own, wanted), known)
        self.asm.emit(Op.JUMP, self.cannot)  # autocast may make them one

    def agree_size(self, x: int, tensor: TensorType, axis: int, dim: Dim, known: Label) -> None:
        own = self.size(x, tensor, axis)
        match dim:
            case Size(expr=expr):
                wanted = [self.expressions.size(expr.node)]
            case SizeOneOf():
                for option in dim.in_order:
                    self.asm.emit(
                        Op.WHERE_TRUE, self.asm.made(Op.EQUAL, own, self.expressions.size(option.node)), known
                    )
                self.asm.emit(Op.JUMP, self.no)
                return
            case RestOf(path=other):
                wanted = [self.asm.made(Op.SIZES, self.model(other, known), 0)]
            case _:
                return
        self.asm.emit(Op.WHERE_FALSE, self.asm.made(Op.EQUAL, own, wanted[0]), self.no)

    def agree_device(self, x: int, tensor: TensorType, known: Label) -> None:
        devices = tensor.devices or ()
        own = self.asm.made(Op.DEVICE, x)
        kinds = [d.name for d in devices if isinstance(d, DeviceType)]
        if kinds:
            self.asm.emit(Op.WHERE_TRUE, self.asm.made(Op.ON_DEVICE, own, self.asm.constant(device_set(kinds))), known)
        for device in devices:
            match device:
                case DeviceSymbol(name=name):
                    wanted = self.asm.own(name)
                case DeviceOf(path=path):
                    wanted = self.asm.made(Op.DEVICE, self.model(path, known))
                case _:
                    continue
            self.asm.emit(Op.WHERE_TRUE, self.asm.made(Op.EQUAL, own, wanted), known)
        self.asm.emit(Op.JUMP, self.no)

    def model(self, path: Path, known: Label) -> int:
        """The tensor that another is compared with, where there is one."""
        x = self.asm.tensor(path)
        self.asm.emit(Op.TENSOR, x, self.asm.walk(self.asm.own(path.root), path.steps), known)
        return x


def _named(statement: Leaf) -> str:
    """What a statement is called in few words."""
    match statement:
        case Require(id=rule_id):
            return f"the rule {rule_id!r}"
        case Declare(target=target):
            return f"the declaration of {target}"
    return statement.text


def _axis(tensor: TensorType, axis: int) -> int:
    """The number of a dimension in any tensor of the type: from the end behind one of open length."""
    rest = tensor.rest_index
    return axis if rest is None or axis < rest else axis - len(tensor.dims or ())


def _fixed_dtypes(dtypes: Sequence[Dtype]) -> list[DtypeName | DtypeSet] | None:
    """The dtypes that a tensor type accepts, whatever else is known; None where that is not fixed."""
    if any(isinstance(d, DtypeSymbol | DtypeOf) or d == DtypeSet("any") for d in dtypes):
        return None
    return [d for d in dtypes if isinstance(d, DtypeName | DtypeSet)]


def _has_size(tensor: TensorType, step: Solve) -> bool:
    """Whether the dimension that a solution is about is one of this type."""
    dims = tensor.dims or ()
    if step.axis >= len(dims):
        return False
    dim = dims[step.axis]
    return isinstance(dim, Size) and step.symbol in {n.id for n in ast.walk(dim.expr.node) if isinstance(n, ast.Name)}
