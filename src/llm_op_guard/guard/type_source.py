"""Declarations → source: what a tensor tells about symbols, and what must agree with them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from llm_op_guard.contract.model import (
    AnySize,
    DeviceOf,
    DeviceSymbol,
    DeviceType,
    Dim,
    DtypeName,
    DtypeOf,
    DtypeSet,
    DtypeSymbol,
    Like,
    LiteralType,
    NoneType,
    Rest,
    RestOf,
    ScalarType,
    Size,
    SizeOneOf,
    TensorType,
    TupleType,
    dim_symbol,
)
from llm_op_guard.contract.path import Path
from llm_op_guard.guard.draft import Draft, comment, indented, steps_source
from llm_op_guard.guard.expression_source import atom
from llm_op_guard.guard.steps import Agree, Match, Solve, directly_checked, late_device, late_dtype


class TypeWriter:
    """Writes the steps of declarations."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft

    def match(self, step: Match) -> Iterator[str]:
        """Find the alternative that fits, and bind or compare what the value itself tells."""
        value = self.draft.names.path(step.path)
        yield comment(f"{step.path}: {step.type.text}")
        alternatives = step.type.alternatives
        if len(alternatives) == 1:
            yield from self._match_only(step, value)
            return
        kind = self.draft.names.kind(step.path)
        told = any(given.name == step.fact for other in self.draft.plan.steps for given in other.given)
        keyword = "if"
        for index, alternative in enumerate(alternatives):
            lines = [f"{kind} = {index}"] if told else []
            match alternative:
                case TensorType():
                    lines += self._observe(step, alternative, value, ranked=True)
                case Like(path=path):
                    lines += self._like(step, path, value)
                case ScalarType(text="int" | "float" as kind_of_number) if not step.path.steps:
                    lines += [f"if {_is_no_plain(kind_of_number, value)}:", f"    {value} = _plain({value})"]
            yield f"{keyword} {self._fits(alternative, value)}:"
            yield from indented(lines or ["pass"])
            keyword = "elif"
        yield "else:"
        if told and not step.certain:
            yield f"    {kind} = -1"
        yield f"    {self.draft.fail(step)}"

    def _match_only(self, step: Match, value: str) -> Iterator[str]:
        only = step.type.alternatives[0]
        tensor = isinstance(only, TensorType | Like)
        misfit = f"not isinstance({value}, _Tensor)" if tensor else f"not {self._fits(only, value)}"
        if isinstance(only, TensorType) and (not step.certain or not _unpacks(only)):
            rank = self._rank_misfit(only, value)
            misfit = f"{misfit} or {rank}" if rank else misfit
        if isinstance(only, ScalarType) and only.text in ("int", "float") and step.certain and not step.path.steps:
            # What most calls give is seen at once; a number of NumPy, whose arithmetic is its own, becomes Python's.
            yield f"if {_is_no_plain(only.text, value)}:"
            yield from indented([f"if {misfit}:", f"    {self.draft.fail(step)}", f"{value} = _plain({value})"])
            return
        kind = self.draft.names.kind(step.path)
        known = step.certain and (isinstance(only, Like) or (isinstance(only, TensorType) and _unpacks(only)))
        if not (known and self.draft.is_tested(step)):
            yield f"if {misfit}:"
            yield f"    {self.draft.fail(step)}"
        lines: list[str] = []
        if step.fact is not None:
            yield f"    {kind} = -1"
            lines.append(f"{kind} = 0")
        if isinstance(only, TensorType):
            lines += list(self._observe(step, only, value, ranked=not (step.certain and _unpacks(only))))
        elif isinstance(only, Like):
            lines += list(self._like(step, only.path, value))
        if lines and not step.certain:
            yield "else:"
            lines = list(indented(lines))
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
        return self.draft.names.dtypes(tuple(d for d in tensor.dtypes if isinstance(d, DtypeName | DtypeSet)))

    def _observe(self, step: Match, tensor: TensorType, value: str, *, ranked: bool) -> Iterator[str]:
        """Bind and compare what the tensor itself tells: sizes, dtype, device."""
        read = {aspect: f"{value}.{aspect}" for aspect in ("dtype", "shape", "device")}
        if self.draft.has_shape(step):
            read["shape"] = self.draft.names.aspect(step.path, "shape")
        if self.draft.keeps_aspects(step):
            for aspect, code in read.items():
                kept = self.draft.names.aspect(step.path, aspect)
                if kept != code:
                    yield f"{kept} = {code}"
                read[aspect] = kept
        dtype, shape, device = read["dtype"], read["shape"], read["device"]
        if tensor.dtype_symbol is not None:
            yield from self._sight(step, tensor.dtype_symbol, dtype, cast=True)
        elif len(step.type.alternatives) == 1 and (accepted := self._accepted(tensor)) is not None:
            yield f"if {dtype} not in {accepted}:"
            yield f"    {self.draft.fail(step)}"
        yield from self._observe_sizes(step, tensor, shape, ranked)
        devices = tensor.devices or ()
        if tensor.device_symbol is not None:
            yield from self._sight(step, tensor.device_symbol, device)
        elif devices and not late_device(tensor):
            kinds = tuple(d.name for d in devices if isinstance(d, DeviceType))
            yield f"if {device}.type not in {kinds!r}:"
            yield f"    {self.draft.fail(step)}"

    def _observe_sizes(self, step: Match, tensor: TensorType, shape: str, ranked: bool) -> Iterator[str]:
        dims = tensor.dims
        if dims is None:
            return
        if not dims:
            if not ranked:
                yield f"if {shape}:"
                yield f"    {self.draft.fail(step)}"
            return
        targets: list[str] = []
        later: list[str] = []
        bound_here: set[str] = set()
        for axis, dim in enumerate(dims):
            local = self.draft.names.size(step.path, axis)
            target = local
            match dim:
                case AnySize():
                    target = "_"
                case Rest(name=None):
                    target = "*_"
                case Rest() | RestOf():
                    target = f"*{local}"
            symbol = self._bound_by(dim)
            if (
                symbol is not None
                and isinstance(dim, Size)
                and symbol not in bound_here
                and self.draft.first(step, symbol)
            ):
                target = self.draft.names.own(symbol)
                bound_here.add(symbol)
            elif symbol is not None:
                seen = f"tuple({local})" if isinstance(dim, Rest) else local
                later += self._compared(step, symbol, seen, surely=symbol in bound_here)
                bound_here.add(symbol)
            elif isinstance(dim, Size) and isinstance(dim.expr.node, ast.Constant):
                later += [f"if {local} != {dim.expr.text}:", f"    {self.draft.fail(step)}"]
            targets.append(target)
        if any(target.lstrip("*") != "_" for target in targets) or not ranked:
            yield f"{', '.join(targets)}{',' if len(targets) == 1 else ''} = {shape}"
        yield from later

    def _bound_by(self, dim: Dim) -> str | None:
        name = dim_symbol(dim)
        return name if name is not None and name in self.draft.contract.symbols else None

    def _sight(self, step: Match, symbol: str, seen: str, *, cast: bool = False) -> Iterator[str]:
        if self.draft.first(step, symbol):
            yield f"{self.draft.names.own(symbol)} = {seen}"
        else:
            yield from self._compared(step, symbol, seen, surely=False, cast=cast)

    def _compared(self, step: Match, symbol: str, seen: str, *, surely: bool, cast: bool = False) -> list[str]:
        own = self.draft.names.own(symbol)
        differ = [f"    {self.draft.fail(step)}"]
        if cast and step.certain:
            differ = [f"    {own} = _agreed({own}, {seen})"]
        elif cast:
            differ = ["    try:", f"        {own} = _agreed({own}, {seen})", "    except _Broken:", f"    {differ[0]}"]
        if surely or self.draft.sure(symbol, step.given):
            return [f"if {seen} != {own}:", *differ]
        if self.draft.first(step, symbol):
            return [f"{own} = {seen}"]
        self.draft.maybe.add(symbol)
        return [f"if {own} is None:", f"    {own} = {seen}", f"elif {seen} != {own}:", *differ]

    def _like(self, step: Match, other: Path, value: str) -> Iterator[str]:
        aspects = ("dtype", "shape", "device")
        setup: list[str] = []
        guard = ""
        if not self.draft.plan.after_call and self.draft.has_aspects(other, step.given):
            models = [self.draft.names.aspect(other, aspect) for aspect in aspects]
        else:
            setup, model, guarded = self._model(step, other)
            models = [f"{model}.{aspect}" for aspect in aspects]
            guard = f"{model} is not None and " if guarded else ""
        unlike = " or ".join(
            f"{value}.{a} != {model}" if a != "dtype" else _other_dtype(f"{value}.{a}", model)
            for a, model in zip(aspects, models, strict=True)
        )
        yield from setup
        yield f"if {guard}({unlike}):" if guard else f"if {unlike}:"
        yield f"    {self.draft.fail(step)}"

    def _model(self, step: Match | Agree, path: Path) -> tuple[list[str], str, bool]:
        """How to get at a tensor to compare with: lines before, its name, whether the name may be None."""
        if self.draft.plan.after_call and path.root != "result":
            return [], self.draft.names.snapshot(path), True
        if self.draft.writer(step).is_tensor(path):
            return [], self.draft.names.path(path), False
        local = self.draft.names.model(path)
        return [f"{local} = _tensor_at({self.draft.names.own(path.root)}{steps_source(path)})"], local, True

    def solve(self, step: Solve) -> Iterator[str]:
        """Get a symbol that nothing else has told out of a dimension expression."""
        writer = self.draft.writer(step)
        writer.lazy = True
        operands = ["None" if undo.operand is None else writer.value(undo.operand) for undo in step.undo]
        undo = "".join(f", ({undo.undo!r}, {operand})" for undo, operand in zip(step.undo, operands, strict=True))
        code = f"_undone({self.draft.names.size(step.path, step.axis)}{undo})"
        self.draft.maybe.add(step.symbol)
        own = self.draft.names.own(step.symbol)
        yield f"if {own} is None:"
        yield "    try:"
        yield f"        {own} = {code}"
        if not step.certain:
            yield "    except _Broken:"
            yield f"        {self.draft.fail(step)}"
        yield "    except _inapplicable:"
        yield "        pass"

    def agree(self, step: Agree) -> Iterator[str]:
        """Compare what could not be compared before other names were known."""
        tensor, value = step.tensor, self.draft.names.path(step.path)
        if late_dtype(tensor):
            yield from self._agree_dtype(step, value)
        for axis, dim in enumerate(tensor.dims or ()):
            if isinstance(dim, Size | SizeOneOf | RestOf) and not directly_checked(dim, self.draft.contract):
                yield from self._agree_size(step, dim, self.draft.names.size(step.path, axis))
        if late_device(tensor):
            yield from self._agree_device(step, value)

    def _agree_size(self, step: Agree, dim: Dim, local: str) -> Iterator[str]:
        writer = self.draft.writer(step)
        match dim:
            case Size(expr=expr):
                broken = f"{local} != {atom(writer.size(expr.node))}"
            case SizeOneOf():
                # Plain numbers first: a size that is one of them needs nothing else to be known.
                writer.lazy = True
                broken = " and ".join(f"{local} != {atom(writer.size(o.node))}" for o in dim.in_order)
            case RestOf(path=other):
                setup, model, guarded = self._model(step, other)
                yield from setup
                writer.hoisted += [model] if guarded else []
                broken = f"tuple({local}) != tuple({model}.shape)"
            case _:
                return
        yield from self.draft.judged(step, broken, writer)

    def _agree_dtype(self, step: Agree, value: str) -> Iterator[str]:
        tests: list[str] = []
        dtypes = step.tensor.dtypes
        fixed = tuple(d for d in dtypes if isinstance(d, DtypeName | DtypeSet))
        writer = self.draft.writer(step)
        if fixed:
            tests.append(f"{value}.dtype not in {self.draft.names.dtypes(fixed)}")
        for dtype in dtypes:
            if isinstance(dtype, DtypeSymbol):
                tests.append(_other_dtype(f"{value}.dtype", writer.value(ast.Name(dtype.name))))
            elif isinstance(dtype, DtypeOf):
                setup, model, guarded = self._model(step, dtype.path)
                yield from setup
                writer.hoisted += [model] if guarded else []
                tests.append(_other_dtype(f"{value}.dtype", f"{model}.dtype"))
        yield from self.draft.judged(step, " and ".join(tests), writer)

    def _agree_device(self, step: Agree, value: str) -> Iterator[str]:
        tests: list[str] = []
        devices = step.tensor.devices or ()
        writer = self.draft.writer(step)
        kinds = tuple(d.name for d in devices if isinstance(d, DeviceType))
        if kinds:
            tests.append(f"{value}.device.type not in {kinds!r}")
        for device in devices:
            if isinstance(device, DeviceSymbol):
                tests.append(f"{value}.device != {writer.value(ast.Name(device.name))}")
            elif isinstance(device, DeviceOf):
                setup, model, guarded = self._model(step, device.path)
                yield from setup
                writer.hoisted += [model] if guarded else []
                tests.append(f"{value}.device != {model}.device")
        yield from self.draft.judged(step, " and ".join(tests), writer)


def _other_dtype(seen: str, wanted: str) -> str:
    """Whether a dtype is another one, also after autocast has cast it."""
    return f"{seen} != {wanted} and _apart({seen}, {wanted})"


def _unpacks(tensor: TensorType) -> bool:
    """Whether taking the shape apart also checks the rank."""
    return bool(tensor.dims)


def _is_no_plain(kind: str, value: str) -> str:
    """Whether a declared number is of another class than Python's own."""
    return f"type({value}) is not int" + (f" and type({value}) is not float" if kind == "float" else "")
