"""The definition of right: evaluate a whole contract on one call and say everything that is broken.

Slow and thorough; the compiled check only says yes or no, and a property test holds the two together. Nothing here
looks at the order of statements: symbols are collected until nothing new is learnt, then every rule is judged.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llm_op_guard.contract.expressions import names_in
from llm_op_guard.contract.model import (
    Alternative,
    AnySize,
    Assign,
    Clause,
    Contract,
    CostClass,
    Declare,
    DeviceOf,
    DeviceSymbol,
    DeviceType,
    Dim,
    DtypeOf,
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
    Type,
)
from llm_op_guard.contract.solve import inverse
from llm_op_guard.guard import functions
from llm_op_guard.guard.describe import describe_rule
from llm_op_guard.guard.evaluate import Values, dtype_values, show, text_of
from llm_op_guard.guard.reads import Read, reads_of
from llm_op_guard.guard.reading import INAPPLICABLE, SCALAR_TESTS, Broken, NotApplicable, Snapshot, is_tensor
from llm_op_guard.guard.violation import Binding, Violation

_ALL_CLASSES: frozenset[CostClass] = frozenset({"A", "B"})


@dataclass(frozen=True)
class Observation:
    """One sighting of a symbol: `q.shape[3]` is 129."""

    symbol: str
    value: Any
    where: str
    path: str
    certain: bool = True


@dataclass
class _Fault:
    """A broken rule before it is dressed as a Violation."""

    clause: Clause
    rule_id: str
    argument: str | None
    observed: str
    expected: str
    names: set[str]
    aspect: str | None = None


def explain(
    contract: Contract,
    arguments: Mapping[str, Any],
    *,
    classes: Iterable[CostClass] = _ALL_CLASSES,
    after_call: bool = False,
    known: Mapping[str, Any] | None = None,
    at_entry: Mapping[Path, Snapshot | None] | None = None,
) -> list[Violation]:
    """Every rule of `contract` that this call breaks, in the order of its statements; consequences are left out.

    `arguments` maps parameter names (and, after the call, `result`) to values. Only rules of the given cost classes
    are judged; after the call, only those that had to wait for the result. `known` are the values that assigned
    names had before the call, `at_entry` what the tensors looked like that types refer to.
    """
    return _Explanation(contract, arguments, frozenset(classes), after_call, known or {}, at_entry or {}).violations()


class _Explanation:
    def __init__(
        self,
        contract: Contract,
        arguments: Mapping[str, Any],
        classes: frozenset[CostClass],
        after_call: bool,
        known: Mapping[str, Any],
        at_entry: Mapping[Path, Snapshot | None],
    ) -> None:
        self.contract = contract
        self.values = Values(arguments)
        self.known = {name: value for name, value in known.items() if name in contract.assigned}
        self.at_entry = at_entry
        self.after_call = after_call
        self.clauses = [
            clause for clause in contract.clauses if clause.cost_class in classes and (after_call or not clause.after_call)
        ]
        self.observations: list[Observation] = []
        self.unsolvable: dict[tuple[str, str], str] = {}
        self.faults: list[_Fault] = []

    def violations(self) -> list[Violation]:
        self._bind()
        for clause in self.clauses:
            if clause.after_call == self.after_call:
                self._judge(clause)
        return [self._violation(fault) for fault in self._without_consequences()]

    # ------------------------------------------------------------ binding

    def _bind(self) -> None:
        """Collect symbols and assigned names until nothing changes."""
        self.values.assigned = dict(self.known)
        solved: list[Observation] = []
        rounds = 3 * (len(self.clauses) + len(self.contract.symbols)) + 5
        for _ in range(rounds):
            before = (dict(self.values.symbols), dict(self.values.assigned))
            self.observations = [*self._sightings(), *solved]
            self.values.symbols = {
                name: _reference([o for o in self.observations if o.symbol == name])
                for name in dict.fromkeys(o.symbol for o in self.observations)
            }
            self._assign()
            if _same(before, (self.values.symbols, self.values.assigned)):
                found = self._solve()
                if not found:
                    return
                solved += found

    def _sightings(self) -> list[Observation]:
        found: list[Observation] = []
        for clause in self.clauses:
            if isinstance(clause.statement, Declare) and self._applies(clause):
                certain = clause.statement.reason.certain
                found += self._sightings_in(clause.statement.path, clause.statement.type, certain)
        return found

    def _sightings_in(self, path: Path, declared: Type, certain: bool) -> list[Observation]:
        try:
            value = self.values.path(path)
        except INAPPLICABLE:
            return []
        found: list[Observation] = []
        match self._committed(declared, value):
            case TupleType(items=items):
                for index, item in enumerate(items):
                    found += self._sightings_in(Path(path.root, (*path.steps, (index,))), item, certain)
            case TensorType() as tensor if is_tensor(value) and tensor.accepts_rank(len(value.shape)):
                for dim, axis, observed in aligned(tensor, value.shape):
                    name = dim.expr.symbol if isinstance(dim, Size) else dim.name if isinstance(dim, Rest) else None
                    if name in self.contract.symbols:
                        where = f"{path}.shape[{axis}]" if isinstance(dim, Size) else f"{path}.shape"
                        found.append(Observation(name, observed, where, str(path), certain))
                if len(tensor.dtypes) == 1 and isinstance(tensor.dtypes[0], DtypeSymbol):
                    found.append(Observation(tensor.dtypes[0].name, value.dtype, f"{path}.dtype", str(path), certain))
                if tensor.devices and len(tensor.devices) == 1 and isinstance(tensor.devices[0], DeviceSymbol):
                    found.append(
                        Observation(tensor.devices[0].name, value.device, f"{path}.device", str(path), certain)
                    )
        return found

    def _solve(self) -> list[Observation]:
        """Turn round every dimension expression whose one unknown nothing else has told."""
        found: list[Observation] = []
        for clause in self.clauses:
            if isinstance(clause.statement, Declare) and self._applies(clause):
                found += self._solve_in(clause.statement.path, clause.statement.type)
        return found

    def _solve_in(self, path: Path, declared: Type) -> list[Observation]:
        try:
            value = self.values.path(path)
        except INAPPLICABLE:
            return []
        found: list[Observation] = []
        match self._committed(declared, value):
            case TupleType(items=items):
                for index, item in enumerate(items):
                    found += self._solve_in(Path(path.root, (*path.steps, (index,))), item)
            case TensorType() as tensor if is_tensor(value) and tensor.accepts_rank(len(value.shape)):
                for dim, axis, observed in aligned(tensor, value.shape):
                    if not isinstance(dim, Size) or dim.expr.symbol is not None:
                        continue
                    unknown = [
                        name
                        for name in names_in(dim.expr.node)
                        if name in self.contract.symbols and name not in self.values.symbols
                    ]
                    steps = inverse(dim.expr.node, unknown[0]) if len(unknown) == 1 else None
                    if steps is None:
                        continue
                    where = f"{path}.shape[{axis}]"
                    try:
                        answer: Any = observed
                        for step in steps:
                            operand = None if step.operand is None else self.values.value_of(step.operand)
                            answer = functions.undo(answer, step, operand)
                    except INAPPLICABLE:
                        continue
                    except Broken as broken:
                        self.unsolvable[where, dim.expr.text] = str(broken)
                        continue
                    found.append(Observation(unknown[0], answer, where, str(path)))
        return found

    def _assign(self) -> None:
        for clause in self.clauses:
            if not isinstance(clause.statement, Assign) or not self._applies(clause):
                continue
            names = clause.statement.names
            if all(name in self.known for name in names):
                continue
            try:
                value = self.values.raw(clause.statement.expr.node)
                parts = [value] if len(names) == 1 else list(value) if isinstance(value, tuple | list) else []
            except (*INAPPLICABLE, Broken):
                continue
            if len(parts) == len(names) and not any(part is None for part in parts):
                self.values.assigned.update(zip(names, parts, strict=True))

    def _applies(self, clause: Clause) -> bool:
        for condition in clause.conditions:
            try:
                if bool(self.values.evaluate(condition.test)) is not condition.wanted:
                    return False
            except (*INAPPLICABLE, Broken):
                return False
        return True

    def _model(self, path: Path) -> Any:
        """The tensor at a path, as it was before the call, to compare with; raises NotApplicable where none is."""
        value = self.at_entry[path] if path in self.at_entry else self.values.path(path)
        if value is None or not (is_tensor(value) or isinstance(value, Snapshot)):
            raise NotApplicable
        return value

    # ------------------------------------------------------------ types

    def _committed(self, declared: Type, value: Any) -> Alternative | None:
        """The alternative that a value commits to: the only one, or the first that fits."""
        if len(declared.alternatives) == 1:
            return declared.alternatives[0]
        return next((a for a in declared.alternatives if self._fits(a, value)), None)

    def _fits(self, alternative: Alternative, value: Any) -> bool:
        match alternative:
            case NoneType():
                return value is None
            case LiteralType(value=wanted):
                return type(value) is type(wanted) and value == wanted
            case ScalarType(text=kind):
                return bool(SCALAR_TESTS[kind](value))
            case Like():
                return is_tensor(value)
            case TupleType(items=items):
                return isinstance(value, tuple | list) and len(value) == len(items)
            case TensorType():
                return (
                    is_tensor(value) and alternative.accepts_rank(len(value.shape)) and _dtype_possible(alternative, value)
                )

    # ------------------------------------------------------------ judging

    def _judge(self, clause: Clause) -> None:
        for condition in clause.conditions:
            try:
                taken = bool(self.values.evaluate(condition.test)) is condition.wanted
            except INAPPLICABLE:
                return
            except Broken as broken:
                self._fault(clause, f"if {condition.test.text}", None, str(broken), condition.test.text, condition.test)
                return
            if not taken:
                return
        match clause.statement:
            case Declare(path=path, type=declared):
                try:
                    value = self.values.path(path)
                except INAPPLICABLE:
                    return
                self._judge_type(clause, path, declared, value)
            case Require():
                self._judge_rule(clause, clause.statement)
            case Assign(expr=expr, names=names):
                try:
                    self.values.raw(expr.node)
                except INAPPLICABLE:
                    return
                except Broken as broken:
                    rule_id = ast.unparse(clause.statement.node)
                    self._fault(clause, rule_id, names[0], str(broken), f"a value for {expr.text}", expr)

    def _judge_rule(self, clause: Clause, rule: Require) -> None:
        try:
            if self.values.evaluate(rule.expr):
                return
            observed, expected, argument = describe_rule(rule.expr, self.values)
        except INAPPLICABLE:
            return
        except Broken as broken:
            observed, expected, argument = str(broken), rule.expr.text, None
        argument = argument or self._argument_of(rule.expr)
        self._fault(clause, rule.id, argument, observed, expected, rule.expr)

    def _judge_type(self, clause: Clause, path: Path, declared: Type, value: Any) -> None:
        committed = self._committed(declared, value)
        if committed is None or not self._fits(committed, value):
            self._judge_misfit(clause, path, declared, value)
            return
        match committed:
            case Like(path=other):
                self._judge_like(clause, path, other, value)
            case TupleType(items=items):
                for index, item in enumerate(items):
                    self._judge_type(clause, Path(path.root, (*path.steps, (index,))), item, value[index])
            case TensorType():
                self._judge_dtype(clause, path, committed, value)
                self._judge_sizes(clause, path, committed, value)
                self._judge_device(clause, path, committed, value)

    def _judge_misfit(self, clause: Clause, path: Path, declared: Type, value: Any) -> None:
        """No alternative fits: say whether the kind, the rank or the dtype is to blame."""
        tensors = [a for a in declared.alternatives if isinstance(a, TensorType)]
        if not is_tensor(value) or not tensors:
            kind = "a tensor" if is_tensor(value) else "None" if value is None else f"a {_kind(value)}"
            if isinstance(value, tuple | list):
                kind += f" of {len(value)}"
            self._fault(clause, f"{path}.type", str(path), f"{path} is {kind}", declared.text, None, "type")
            return
        same_rank = [t for t in tensors if t.accepts_rank(len(value.shape))]
        if same_rank:
            dtypes = " or ".join(dict.fromkeys(d.text for t in same_rank for d in [_DtypesText(t)]))
            observed = f"{path}.dtype = {show(value.dtype)}"
            self._fault(clause, f"{path}.dtype", str(path), observed, dtypes, None, "dtype")
            return
        fitting = [t for t in tensors if _dtype_possible(t, value)] or tensors
        shapes = " or ".join(dict.fromkeys(_shape_text(t) for t in fitting))
        ranks = " or ".join(dict.fromkeys(_rank_text(t) for t in fitting))
        observed = f"{path}.shape = {show(tuple(value.shape))}, rank {len(value.shape)}"
        self._fault(clause, f"{path}.shape", str(path), observed, f"rank {ranks}, {shapes}", None, "shape")

    def _judge_dtype(self, clause: Clause, path: Path, tensor: TensorType, value: Any) -> None:
        expected: list[str] = []
        names: set[str] = set()
        for dtype in tensor.dtypes:
            match dtype:
                case DtypeSymbol(name=name):
                    wanted = self.values.symbols.get(name)
                    if wanted is None or value.dtype == wanted:
                        return
                    expected.append(f"{name} = {show(wanted)}")
                    names.add(name)
                case DtypeOf(path=other):
                    try:
                        wanted = self._model(other).dtype
                    except INAPPLICABLE:
                        return
                    if value.dtype == wanted:
                        return
                    expected.append(f"{other}.dtype = {show(wanted)}")
                case _:
                    if value.dtype in dtype_values(dtype):
                        return
                    expected.append(dtype.name)
        observed = f"{path}.dtype = {show(value.dtype)}"
        self._fault(clause, f"{path}.dtype", str(path), observed, " or ".join(expected), None, "dtype", names)

    def _judge_device(self, clause: Clause, path: Path, tensor: TensorType, value: Any) -> None:
        if tensor.devices is None:
            return
        expected: list[str] = []
        names: set[str] = set()
        for device in tensor.devices:
            match device:
                case DeviceSymbol(name=name):
                    wanted = self.values.symbols.get(name)
                    if wanted is None or value.device == wanted:
                        return
                    expected.append(f"{name} = {show(wanted)}")
                    names.add(name)
                case DeviceType(name=kind):
                    if value.device.type == kind:
                        return
                    expected.append(kind)
                case DeviceOf(path=other):
                    try:
                        wanted = self._model(other).device
                    except INAPPLICABLE:
                        return
                    if value.device == wanted:
                        return
                    expected.append(f"{other}.device = {show(wanted)}")
        observed = f"{path}.device = {show(value.device)}"
        self._fault(clause, f"{path}.device", str(path), observed, " or ".join(expected), None, "device", names)

    def _judge_sizes(self, clause: Clause, path: Path, tensor: TensorType, value: Any) -> None:
        if tensor.dims is None:
            return
        observed_parts: list[str] = []
        expected_parts: list[str] = []
        names: set[str] = set()
        for dim, axis, observed in aligned(tensor, value.shape):
            where = f"{path}.shape[{axis}]" if isinstance(observed, int) else f"{path}.shape"
            try:
                expected = self._wrong_size(dim, observed, where)
            except INAPPLICABLE:
                continue
            if expected is not None:
                observed_parts.append(f"{where} = {show(tuple(observed) if isinstance(observed, tuple) else observed)}")
                expected_parts.append(expected)
                names |= _symbols_of(dim)
        if observed_parts:
            self._fault(
                clause, f"{path}.shape", str(path), ", ".join(observed_parts), ", ".join(expected_parts), None, "shape", names
            )

    def _wrong_size(self, dim: Dim, observed: Any, where: str) -> str | None:
        """What the size should have been, or None when it is right."""
        match dim:
            case AnySize() | Rest(name=None):
                return None
            case Rest(name=str() as name):
                wanted = self.values.named(name)
                return None if tuple(observed) == tuple(wanted) else f"{name} = {show(tuple(wanted))}"
            case RestOf(path=other):
                wanted = self._model(other).shape
                return None if tuple(observed) == tuple(wanted) else f"{other}.shape = {show(tuple(wanted))}"
            case Size(expr=expr):
                return self._wrong_value(expr, observed, where)
            case SizeOneOf(options=options):
                wrong: list[str] = []
                for option in sorted(options, key=lambda option: not isinstance(option.node, ast.Constant)):
                    text = self._wrong_value(option, observed, where)
                    if text is None:
                        return None
                    wrong.append(text)
                return " or ".join(reversed(wrong))

    def _wrong_value(self, expr: Expr, observed: Any, where: str) -> str | None:
        if (where, expr.text) in self.unsolvable:
            return f"{expr.text} for a whole {self._unknown_in(expr)} ({self.unsolvable[where, expr.text]})"
        try:
            wanted = self.values.evaluate(expr)
        except Broken as broken:
            return f"{expr.text} ({broken})"
        if observed == wanted:
            return None
        return expr.text if isinstance(expr.node, ast.Constant) else f"{expr.text} = {show(wanted)}"

    def _unknown_in(self, expr: Expr) -> str:
        names = [n for n in names_in(expr.node) if n in self.contract.symbols and n not in self.values.symbols]
        return ", ".join(names)

    def _judge_like(self, clause: Clause, path: Path, other: Path, value: Any) -> None:
        try:
            model = self._model(other)
        except INAPPLICABLE:
            return
        for aspect in ("dtype", "shape", "device"):
            mine, wanted = getattr(value, aspect), getattr(model, aspect)
            if mine != wanted:
                mine, wanted = (tuple(mine), tuple(wanted)) if aspect == "shape" else (mine, wanted)
                self._fault(
                    clause,
                    f"{path}.{aspect}",
                    str(path),
                    f"{path}.{aspect} = {show(mine)}",
                    f"{other}.{aspect} = {show(wanted)}",
                    None,
                    aspect,
                )

    def _argument_of(self, expr: Expr) -> str | None:
        """What to look at first: a path that the rule reads, else where its first symbol was seen."""
        reads = reads_of(expr.node, self.contract)
        for read in reads:
            try:
                if is_tensor(self.values.path(read.path)):
                    return str(read.path)
            except INAPPLICABLE:
                continue
        for name in names_in(expr.node):
            for observation in self.observations:
                if observation.symbol == name:
                    return observation.path
        return next((str(read.path) for read in reads), None)

    # ------------------------------------------------------------ reporting

    def _fault(
        self,
        clause: Clause,
        rule_id: str,
        argument: str | None,
        observed: str,
        expected: str,
        expr: Expr | None,
        aspect: str | None = None,
        names: set[str] | None = None,
    ) -> None:
        used = names or set()
        if expr is not None:
            used = used | (set(names_in(expr.node)) & set(self.contract.symbols))
        self.faults.append(_Fault(clause, rule_id, argument, observed, expected, used, aspect))

    def _without_consequences(self) -> list[_Fault]:
        """Leave out rules that read just what a broken certain declaration already says is wrong."""
        wrong = {
            (fault.argument, fault.aspect)
            for fault in self.faults
            if fault.aspect is not None and fault.clause.statement.reason.certain  # type: ignore[union-attr]
        }
        return [fault for fault in self.faults if not any(_spoilt(read, wrong) for read in self._reads(fault))]

    def _reads(self, fault: _Fault) -> list[Read]:
        statement = fault.clause.statement
        if isinstance(statement, Require):
            return reads_of(statement.expr.node, self.contract)
        if isinstance(statement, Declare) and fault.aspect is not None:
            likes = [a.path for a in statement.type.alternatives if isinstance(a, Like)]
            return [Read(path, fault.aspect) for path in likes]
        return []

    def _violation(self, fault: _Fault) -> Violation:
        statement = fault.clause.statement
        reason = None if isinstance(statement, Assign) else statement.reason
        bindings = []
        for name in sorted(fault.names, key=list(self.contract.symbols).index):
            if name in self.values.symbols:
                value = self.values.symbols[name]
                seen = [o.where for o in self.observations if o.symbol == name and o.value == value]
                bindings.append(Binding(name, show(value), tuple(dict.fromkeys(seen))))
        return Violation(
            operator=self.contract.name,
            rule_id=fault.rule_id,
            cost_class=fault.clause.cost_class,
            certain=reason.certain if reason is not None else True,
            argument=fault.argument,
            observed=fault.observed,
            expected=fault.expected,
            bindings=tuple(bindings),
            because=text_of(self.values, reason.because) if reason else None,
            hint=text_of(self.values, reason.hint) if reason else None,
            contract_id=self.contract.id,
            contract_hash=self.contract.hash,
            error=statement.error if isinstance(statement, Require) else None,
        )


# ---------------------------------------------------------------- parts


def aligned(tensor: TensorType, shape: Any) -> list[tuple[Dim, int, Any]]:
    """Each dimension of a type with its axis and the size seen there; an open group with the sizes it covers."""
    dims, rest = tensor.dims, tensor.rest_index
    if dims is None:
        return []
    sizes = tuple(shape)
    if rest is None:
        return [(dim, axis, sizes[axis]) for axis, dim in enumerate(dims)]
    after = len(dims) - rest - 1
    end = len(sizes) - after
    return [
        *((dims[axis], axis, sizes[axis]) for axis in range(rest)),
        (dims[rest], rest, sizes[rest:end]),
        *((dims[rest + 1 + i], end + i, sizes[end + i]) for i in range(after)),
    ]


def _reference(seen: list[Observation]) -> Any:
    """Which of several sightings to believe: those of certain declarations; not 1; the majority; the first."""
    values = [o.value for o in seen if o.certain] or [o.value for o in seen]
    counted = [value for value in values if value != 1 or isinstance(value, bool)] or values
    most = max(Counter(counted).values())
    return next(value for value in counted if Counter(counted)[value] == most)


def _same(before: tuple[dict[str, Any], dict[str, Any]], now: tuple[dict[str, Any], dict[str, Any]]) -> bool:
    """Whether a round taught nothing. Identity first: an assigned name may be a tensor, and == would compare values."""
    return all(
        old.keys() == new.keys()
        and all(old[k] is new[k] or (not is_tensor(new[k]) and _equal(old[k], new[k])) for k in new)
        for old, new in zip(before, now, strict=True)
    )


def _equal(a: Any, b: Any) -> bool:
    plain_types = (int, float, str, tuple)
    return isinstance(a, plain_types) and isinstance(b, plain_types) and a == b or type(a).__module__ == "torch" and a == b


def _dtype_possible(tensor: TensorType, value: Any) -> bool:
    return any(
        isinstance(dtype, DtypeSymbol | DtypeOf) or value.dtype in dtype_values(dtype) for dtype in tensor.dtypes
    )


class _DtypesText:
    def __init__(self, tensor: TensorType) -> None:
        parts = [
            f"{dtype.path}.dtype" if isinstance(dtype, DtypeOf) else dtype.name for dtype in tensor.dtypes
        ]
        self.text = " or ".join(parts)


def _shape_text(tensor: TensorType) -> str:
    start = tensor.text.find("[")
    return tensor.text[start : tensor.text.rfind("]") + 1]


def _rank_text(tensor: TensorType) -> str:
    dims = tensor.dims or ()
    return str(len(dims)) if tensor.rest_index is None else f"{len(dims) - 1} or more"


def _symbols_of(dim: Dim) -> set[str]:
    match dim:
        case Size(expr=expr):
            return set(names_in(expr.node))
        case SizeOneOf(options=options):
            return {name for option in options for name in names_in(option.node)}
        case Rest(name=str() as name):
            return {name}
    return set()


def _kind(value: Any) -> str:
    cls = type(value)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__.split('.')[0]}.{cls.__name__}"


def _spoilt(read: Read, wrong: set[tuple[str | None, str | None]]) -> bool:
    argument = str(read.path)
    if read.aspect == "value":
        return any((argument, aspect) in wrong for aspect in ("type", "dtype", "shape"))
    return (argument, "type") in wrong or (argument, read.aspect) in wrong


__all__ = ["Observation", "aligned", "explain"]
