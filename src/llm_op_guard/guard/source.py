"""Plan → the source of a check. Pure: the same plan gives the same text.

The text is straight-line Python that a reader can follow and a debugger can step through. It decides and nothing
else: on anything but a plain yes it hands the arguments to `_failed`, which explains.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from llm_op_guard.contract.model import (
    AnySize,
    Assign,
    Declare,
    DeviceOf,
    DeviceSymbol,
    DeviceType,
    Dim,
    DtypeName,
    DtypeOf,
    DtypeSet,
    DtypeSymbol,
    Expr,
    Like,
    LiteralType,
    NoneType,
    Path,
    Require,
    Rest,
    RestOf,
    ScalarType,
    Size,
    SizeOneOf,
    TensorType,
    TupleType,
)
from llm_op_guard.contract.solve import inverse
from llm_op_guard.guard.expression_source import ExpressionWriter, Names
from llm_op_guard.guard.plan import Given, Plan, Step, directly_checked, late_device, late_dtype, never_both, sure

CHECK = "check"


@dataclass(frozen=True)
class CheckSource:
    """The text of a check and the sets of dtypes that it names."""

    text: str
    dtype_sets: dict[str, tuple[DtypeName | DtypeSet, ...]]


def check_source(plan: Plan, *, counted: bool = False) -> CheckSource:
    """The source of the function `check` for a plan.

    Before the call it takes `plan.parameters` and returns what the check after the call needs; after the call it
    takes `(result, state)`. `counted` adds one tally for each checked call. The names that begin with an underscore
    are those that `compile` puts in its namespace.
    """
    writer = _CheckWriter(plan, counted)
    return CheckSource(writer.text(), writer.names.dtype_sets)


Block = tuple[tuple[Given, ...], list[str]]


class _CheckWriter:
    def __init__(self, plan: Plan, counted: bool) -> None:
        self.plan = plan
        self.counted = counted
        self.contract = plan.contract
        self.names = Names(plan)
        self.done: list[Step] = []
        self.maybe: set[str] = set(plan.known)
        self.doubtful: list[str] = []
        # Branch tests that always come out: the others may also not apply.
        self.decided: set[str] = set()

    def text(self) -> str:
        blocks: list[tuple[bool, Block]] = []
        for step in self.plan.steps:
            lines = list(self._step(step))
            self.done.append(step)
            if lines:
                blocks.append((step.clause.cost_class == "B", (step.given, lines)))
        metadata = list(self._nested([block for costly, block in blocks if not costly]))
        values = list(self._nested([block for costly, block in blocks if costly]))
        body = metadata + (["if not _tracing():", *_indented(values)] if values else [])
        return "\n".join([*self._head(), *_indented(self._frame(body)), ""])

    def _head(self) -> Iterator[str]:
        yield f"def {CHECK}({'result, state' if self.plan.after_call else ', '.join(map(self.names.own, self.plan.parameters))}):"

    def _frame(self, body: list[str]) -> Iterator[str]:
        arguments = f"({''.join(f'{self.names.own(name)}, ' for name in self.plan.parameters)})"
        if self.plan.after_call:
            handed = [*self.plan.known, *(self.names.snapshot(path) for path in self.plan.snapshots)]
            names = "".join(f"{self.names.own(name)}, " for name in (*handed, *self.plan.parameters))
            yield "if state is None:"
            yield "    return"
            if names:
                yield f"({names}) = state"
            arguments = f"(result, state, {arguments})"
        for name in sorted(self.maybe - set(self.plan.known) if self.plan.after_call else self.maybe):
            yield f"{self.names.own(name)} = None"
        if self.doubtful:
            yield "_doubts = []"
        if self.counted and not self.plan.after_call:
            yield "if not _tracing():"
            yield "    _tally()"
        yield "try:"
        yield from _indented(body or ["pass"])
        yield "except Exception:  # anything but a plain yes: explain decides"
        yield "    pass"
        yield "else:"
        if self.doubtful:
            yield "    if _doubts:"
            yield f"        _noticed(_doubts, {arguments})"
        yield f"    return {self._state()}"
        yield f"return _failed({arguments})"

    def _state(self) -> str:
        if self.plan.after_call or not (self.plan.known or self.plan.snapshots or self.plan.hands_on):
            return "None"
        parts = [
            *map(self.names.own, self.plan.known),
            *(f"_snapshot({self.names.own(path.root)}{_steps(path)})" for path in self.plan.snapshots),
            *map(self.names.own, self.plan.hands_on),
        ]
        return f"({''.join(f'{part}, ' for part in parts)})"

    def _nested(self, blocks: list[Block]) -> Iterator[str]:
        """Blocks under their conditions; neighbours share those that they have in common."""
        opened: list[Given] = []
        for given, lines in blocks:
            shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(opened, given, strict=False)))
            opened = opened[:shared]
            for fact in given[shared:]:
                yield "    " * len(opened) + f"if {self._condition(fact)}:"
                opened.append(fact)
            yield from (("    " * len(opened)) + line for line in lines)

    def _condition(self, fact: Given) -> str:
        step = next(s for s in self.plan.steps if s.fact == fact.name)
        match step.kind:
            case "test":
                case = self.names.case(fact.name)
                if fact.value:
                    return case
                return f"not {case}" if fact.name in self.decided else f"{case} is False"
            case "read":
                return f"{self.names.path(_path(step))} is not _unset"
            case _:
                return f"{self.names.kind(_path(step))} == {fact.value}"

    # ------------------------------------------------------------ steps

    def _step(self, step: Step) -> Iterator[str]:
        match step.kind:
            case "test":
                yield from self._test(step)
            case "read":
                assert step.path is not None  # noqa: S101
                yield f"{self.names.path(step.path)} = _path_value({self.names.own(step.path.root)}{_steps(step.path)})"
            case "match":
                yield from self._match(step)
            case "solve":
                yield from self._solve(step)
            case "agree":
                yield from self._agree(step)
            case "let":
                yield from self._let(step)
            case "require":
                yield from self._require(step)

    def _writer(self, step: Step) -> ExpressionWriter:
        return ExpressionWriter(self.plan, self.names, self.done, step.given, self.maybe)

    def _test(self, step: Step) -> Iterator[str]:
        assert step.test is not None and step.fact is not None  # noqa: S101
        writer = self._writer(step)
        writer.lazy = True
        code = writer.value(step.test.node)
        if not isinstance(step.test.node, ast.Compare):
            code = f"bool({code})"
        case = self.names.case(step.fact)
        if writer.fallible or writer.hoisted:
            yield from (f"{case} = None", "try:", f"    {case} = {code}", "except _inapplicable:", "    pass")
        else:
            self.decided.add(step.fact)
            yield f"{case} = {code}"

    def _let(self, step: Step) -> Iterator[str]:
        statement = step.clause.statement
        assert isinstance(statement, Assign)  # noqa: S101
        writer = self._writer(step)
        writer.lazy = True
        code = writer.raw(statement.expr.node)
        self.maybe |= set(statement.names)
        targets = [self.names.own(name) for name in statement.names]
        target = targets[0] if len(targets) == 1 else f"({', '.join(targets)})"
        if len(statement.names) > 1:
            code = f"_parts({code}, {len(statement.names)})"
        yield f"# {ast.unparse(statement.node)}"
        yield from ("try:", f"    {target} = {code}", "except _inapplicable:", "    pass")

    def _require(self, step: Step) -> Iterator[str]:
        statement = step.clause.statement
        assert isinstance(statement, Require)  # noqa: S101
        writer = self._writer(step)
        yield f"# {statement.id}"
        broken = negated(statement.expr.node, writer)
        yield from self._judged(step, broken, writer)

    def _judged(self, step: Step, broken: str, writer: ExpressionWriter) -> Iterator[str]:
        """`if broken: fail`, with whatever the expression may raise taken care of."""
        guard = " and ".join(f"{name} is not None" for name in writer.hoisted)
        test = f"{guard} and ({broken})" if guard else broken
        lines = [f"if {test}:", f"    {self._fail(step)}"]
        if not writer.fallible and (step.certain or not writer.may_break):
            yield from lines
            return
        yield "try:"
        yield from _indented(lines)
        if not step.certain:
            yield "except _Broken:"
            yield f"    {self._fail(step)}"
        yield "except _inapplicable:"
        yield "    pass"

    def _fail(self, step: Step) -> str:
        if step.certain:
            return "raise _Broken"
        # A doubt is numbered by its statement; the rules of one statement warn together.
        return f"_doubts.append({self.plan.contract.clauses.index(step.clause)})" if self._doubt() else ""

    def _doubt(self) -> bool:
        self.doubtful.append("")
        return True

    # ------------------------------------------------------------ types

    def _match(self, step: Step) -> Iterator[str]:
        assert step.path is not None and step.type is not None  # noqa: S101
        value = self.names.path(step.path)
        statement = step.clause.statement
        assert isinstance(statement, Declare)  # noqa: S101
        yield f"# {step.path}: {step.type.text}"
        alternatives = step.type.alternatives
        if len(alternatives) == 1:
            yield from self._match_only(step, value)
            return
        kind = self.names.kind(step.path)
        told = any(given.name == step.fact for other in self.plan.steps for given in other.given)
        keyword = "if"
        for index, alternative in enumerate(alternatives):
            lines = [f"{kind} = {index}"] if told else []
            match alternative:
                case TensorType():
                    lines += self._observe(step, alternative, value, ranked=True)
                case Like(path=path):
                    lines += self._like(step, path, value)
            yield f"{keyword} {self._fits(alternative, value)}:"
            yield from _indented(lines or ["pass"])
            keyword = "elif"
        yield "else:"
        if told and not step.certain:
            yield f"    {kind} = -1"
        yield f"    {self._fail(step)}"

    def _match_only(self, step: Step, value: str) -> Iterator[str]:
        assert step.type is not None  # noqa: S101
        only = step.type.alternatives[0]
        tensor = isinstance(only, TensorType | Like)
        misfit = f"not isinstance({value}, _Tensor)" if tensor else f"not {self._fits(only, value)}"
        if isinstance(only, TensorType) and (not step.certain or not _unpacks(only)):
            rank = self._rank_misfit(only, value)
            misfit = f"{misfit} or {rank}" if rank else misfit
        yield f"if {misfit}:"
        yield f"    {self._fail(step)}"
        lines: list[str] = []
        if isinstance(only, TensorType):
            lines = list(self._observe(step, only, value, ranked=not (step.certain and _unpacks(only))))
        elif isinstance(only, Like):
            lines = list(self._like(step, only.path, value))
        if lines and not step.certain:
            yield "else:"
            lines = list(_indented(lines))
        yield from lines

    def _fits(self, alternative: object, value: str) -> str:
        match alternative:
            case NoneType():
                return f"{value} is None"
            case LiteralType(value=wanted):
                return f"(type({value}) is {type(wanted).__name__} and {value} == {wanted!r})"
            case ScalarType(text="int"):
                return f"(isinstance({value}, int) or _is_int({value}))"
            case ScalarType(text="float"):
                return f"(isinstance({value}, (float, int)) or _is_float({value}))"
            case ScalarType(text=kind):
                return f"_is_{kind}({value})"
            case Like():
                return f"isinstance({value}, _Tensor)"
            case TupleType(items=items):
                return f"(isinstance({value}, (tuple, list)) and len({value}) == {len(items)})"
            case TensorType():
                tests = [f"isinstance({value}, _Tensor)"]
                rank = self._rank_misfit(alternative, value)
                if rank:
                    tests.append(f"not {rank}")
                accepted = self._accepted(alternative)
                if accepted is not None:
                    tests.append(f"{value}.dtype in {accepted}")
                return " and ".join(tests)
        raise AssertionError(alternative)

    def _rank_misfit(self, tensor: TensorType, value: str) -> str | None:
        if tensor.dims is None:
            return None
        if tensor.rest_index is None:
            return f"len({value}.shape) != {len(tensor.dims)}"
        return f"len({value}.shape) < {len(tensor.dims) - 1}" if len(tensor.dims) > 1 else None

    def _accepted(self, tensor: TensorType) -> str | None:
        """The name of the frozenset of dtypes that a tensor type accepts, when it is fixed."""
        names: list[str] = []
        for dtype in tensor.dtypes:
            if isinstance(dtype, DtypeSymbol | DtypeOf) or dtype == DtypeSet("any"):
                return None
            names.append(dtype.name)
        return self.names.dtypes(tuple(d for d in tensor.dtypes if isinstance(d, DtypeName | DtypeSet)))

    def _observe(self, step: Step, tensor: TensorType, value: str, *, ranked: bool) -> Iterator[str]:
        """Bind and compare what the tensor itself tells: sizes, dtype, device."""
        if len(tensor.dtypes) == 1 and isinstance(tensor.dtypes[0], DtypeSymbol):
            yield from self._sight(step, tensor.dtypes[0].name, f"{value}.dtype")
        elif step.fact is None and (accepted := self._accepted(tensor)) is not None:
            yield f"if {value}.dtype not in {accepted}:"
            yield f"    {self._fail(step)}"
        yield from self._observe_sizes(step, tensor, value, ranked)
        devices = tensor.devices or ()
        if len(devices) == 1 and isinstance(devices[0], DeviceSymbol):
            yield from self._sight(step, devices[0].name, f"{value}.device")
        elif devices and not late_device(tensor):
            kinds = tuple(device.name for device in devices if isinstance(device, DeviceType))
            yield f"if {value}.device.type not in {kinds!r}:"
            yield f"    {self._fail(step)}"

    def _observe_sizes(self, step: Step, tensor: TensorType, value: str, ranked: bool) -> Iterator[str]:
        dims = tensor.dims
        if dims is None:
            return
        shape = f"{value}.shape"
        if not dims:
            if not ranked:
                yield f"if {shape}:"
                yield f"    {self._fail(step)}"
            return
        targets: list[str] = []
        later: list[str] = []
        bound_here: set[str] = set()
        for axis, dim in enumerate(dims):
            local = self.names.size(_path(step), axis)
            target = local
            match dim:
                case AnySize():
                    target = "_"
                case Rest(name=None):
                    target = "*_"
                case Rest() | RestOf():
                    target = f"*{local}"
            symbol = _binds(dim, self.contract.symbols)
            if symbol is not None and isinstance(dim, Size) and symbol not in bound_here and self._first(step, symbol):
                target = self.names.own(symbol)
                bound_here.add(symbol)
            elif symbol is not None:
                seen = f"tuple({local})" if isinstance(dim, Rest) else local
                later += self._compared(step, symbol, seen, surely=symbol in bound_here)
                bound_here.add(symbol)
            elif isinstance(dim, Size) and isinstance(dim.expr.node, ast.Constant):
                later += [f"if {local} != {dim.expr.text}:", f"    {self._fail(step)}"]
            targets.append(target)
        if any(target.lstrip("*") != "_" for target in targets) or not ranked:
            yield f"{', '.join(targets)}{',' if len(targets) == 1 else ''} = {shape}"
        yield from later

    def _sight(self, step: Step, symbol: str, seen: str) -> Iterator[str]:
        if self._first(step, symbol):
            yield f"{self.names.own(symbol)} = {seen}"
        else:
            yield from self._compared(step, symbol, seen, surely=False)

    def _compared(self, step: Step, symbol: str, seen: str, *, surely: bool) -> list[str]:
        own = self.names.own(symbol)
        if surely or self._sure(symbol, step.given):
            return [f"if {seen} != {own}:", f"    {self._fail(step)}"]
        if self._first(step, symbol):
            return [f"{own} = {seen}"]
        self.maybe.add(symbol)
        return [f"if {own} is None:", f"    {own} = {seen}", f"elif {seen} != {own}:", f"    {self._fail(step)}"]

    def _sure(self, name: str, given: tuple[Given, ...]) -> bool:
        return sure(name, given, self.done, set(self.plan.known) if self.plan.after_call else set())

    def _first(self, step: Step, symbol: str) -> bool:
        """Whether no step before this one, on the same path, can have bound the symbol."""
        if self.plan.after_call and symbol in self.plan.known:
            return False
        return not any(symbol in other.gives and not never_both(other.given, step.given) for other in self.done)

    def _like(self, step: Step, other: Path, value: str) -> Iterator[str]:
        setup, model, guarded = self._model(step, other)
        unlike = (
            f"{value}.dtype != {model}.dtype or {value}.shape != {model}.shape or {value}.device != {model}.device"
        )
        yield from setup
        yield f"if {model} is not None and ({unlike}):" if guarded else f"if {unlike}:"
        yield f"    {self._fail(step)}"

    def _model(self, step: Step, path: Path) -> tuple[list[str], str, bool]:
        """How to get at a tensor to compare with: lines before, its name, whether the name may be None."""
        if self.plan.after_call and path.root != "result":
            return [], self.names.snapshot(path), True
        if self._writer(step).is_tensor(path):
            return [], self.names.path(path), False
        local = self.names.model(path)
        return [f"{local} = _tensor_at({self.names.own(path.root)}{_steps(path)})"], local, True

    def _solve(self, step: Step) -> Iterator[str]:
        assert isinstance(step.dim, Size) and step.symbol and step.axis is not None  # noqa: S101
        writer = self._writer(step)
        writer.lazy = True
        code = self.names.size(_path(step), step.axis)
        for undo in inverse(step.dim.expr.node, step.symbol) or ():
            operand = "None" if undo.operand is None else writer.value(undo.operand)
            code = _UNDO[undo.undo].format(code, operand)
        self.maybe.add(step.symbol)
        own = self.names.own(step.symbol)
        yield f"if {own} is None:"
        yield "    try:"
        yield f"        {own} = {code}"
        if not step.certain:
            yield "    except _Broken:"
            yield f"        {self._fail(step)}"
        yield "    except _inapplicable:"
        yield "        pass"

    def _agree(self, step: Step) -> Iterator[str]:
        assert step.path is not None and step.tensor is not None  # noqa: S101
        tensor, value = step.tensor, self.names.path(step.path)
        if late_dtype(tensor):
            yield from self._agree_dtype(step, tensor, value)
        for axis, dim in enumerate(tensor.dims or ()):
            if isinstance(dim, Size | SizeOneOf | RestOf) and not directly_checked(dim, self.contract):
                yield from self._agree_size(step, dim, self.names.size(_path(step), axis))
        if late_device(tensor):
            yield from self._agree_device(step, tensor, value)

    def _agree_size(self, step: Step, dim: Dim, local: str) -> Iterator[str]:
        writer = self._writer(step)
        match dim:
            case Size(expr=expr):
                broken = f"{local} != {_atom(writer.value(expr.node))}"
            case SizeOneOf(options=options):
                # Plain numbers first: a size that is one of them needs nothing else to be known.
                writer.lazy = True
                broken = " and ".join(f"{local} != {_atom(writer.value(o.node))}" for o in constants_first(options))
            case RestOf(path=other):
                setup, model, guarded = self._model(step, other)
                yield from setup
                writer.hoisted += [model] if guarded else []
                broken = f"tuple({local}) != tuple({model}.shape)"
            case _:
                return
        yield from self._judged(step, broken, writer)

    def _agree_dtype(self, step: Step, tensor: TensorType, value: str) -> Iterator[str]:
        tests: list[str] = []
        fixed = tuple(d for d in tensor.dtypes if isinstance(d, DtypeName | DtypeSet))
        writer = self._writer(step)
        if fixed:
            tests.append(f"{value}.dtype not in {self.names.dtypes(fixed)}")
        for dtype in tensor.dtypes:
            if isinstance(dtype, DtypeSymbol):
                tests.append(f"{value}.dtype != {writer.value(ast.Name(dtype.name))}")
            elif isinstance(dtype, DtypeOf):
                setup, model, guarded = self._model(step, dtype.path)
                yield from setup
                writer.hoisted += [model] if guarded else []
                tests.append(f"{value}.dtype != {model}.dtype")
        yield from self._judged(step, " and ".join(tests), writer)

    def _agree_device(self, step: Step, tensor: TensorType, value: str) -> Iterator[str]:
        tests: list[str] = []
        writer = self._writer(step)
        kinds = tuple(d.name for d in tensor.devices or () if isinstance(d, DeviceType))
        if kinds:
            tests.append(f"{value}.device.type not in {kinds!r}")
        for device in tensor.devices or ():
            if isinstance(device, DeviceSymbol):
                tests.append(f"{value}.device != {writer.value(ast.Name(device.name))}")
            elif isinstance(device, DeviceOf):
                setup, model, guarded = self._model(step, device.path)
                yield from setup
                writer.hoisted += [model] if guarded else []
                tests.append(f"{value}.device != {model}.device")
        yield from self._judged(step, " and ".join(tests), writer)


# How to turn one operation of a dimension expression round: {0} the value so far, {1} the operand.
_UNDO = {
    "plus": "({0} + {1})",
    "minus": "({0} - {1})",
    "from": "({1} - {0})",
    "times": "({0} * {1})",
    "negate": "(-{0})",
    "over": "_whole({0}, {1})",
    "under": "_whole({1}, {0})",
}

_NEGATED: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip


def negated(node: ast.expr, writer: ExpressionWriter) -> str:
    """The source of `not expr`, as a person would write it.

    `<` is not turned into `>=`: with NaN neither holds.
    """
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _NEGATED:
        left, right = writer.operands(node)
        return f"{left} {_NEGATED[type(node.ops[0])]} {right}"
    return f"not ({writer.value(node)})"


def constants_first(options: tuple[Expr, ...]) -> list[Expr]:
    """The options of a size, plain numbers in front."""
    return sorted(options, key=lambda option: not isinstance(option.node, ast.Constant))


def _binds(dim: Dim, symbols: object) -> str | None:
    name = dim.expr.symbol if isinstance(dim, Size) else dim.name if isinstance(dim, Rest) else None
    return name if name is not None and name in symbols else None  # type: ignore[operator]


def _unpacks(tensor: TensorType) -> bool:
    """Whether taking the shape apart also checks the rank."""
    return bool(tensor.dims)


def _path(step: Step) -> Path:
    assert step.path is not None  # noqa: S101 - steps on declared values have one
    return step.path


def _steps(path: Path) -> str:
    return "".join(f", {step!r}" for step in path.steps)


def _atom(code: str) -> str:
    return code if code.isidentifier() or code.isdigit() else f"({code})"


def _indented(lines: Iterator[str] | list[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)
