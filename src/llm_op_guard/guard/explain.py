"""The definition of right: evaluate a whole contract on one call and say everything that is broken.

Slow and thorough; the compiled check only says yes or no, and a property test holds the two together. Nothing here
looks at the order of statements: symbols are collected until nothing new is learnt, then every rule is judged.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from llm_op_guard.contract.expressions import names_in
from llm_op_guard.contract.model import (
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
    Leaf,
    Like,
    ListType,
    Remember,
    Require,
    Rest,
    RestOf,
    Size,
    SizeOneOf,
    TensorType,
    TupleType,
    Type,
)
from llm_op_guard.contract.path import Path
from llm_op_guard.guard.asked import Answers
from llm_op_guard.guard.bind import LONGEST_LIST, Bindings, aligned, committed, dtype_fits, fits, symbols_of
from llm_op_guard.guard.describe import (
    describe_rule,
    dtypes_text,
    misfit_text,
    rank_text,
    shape_text,
    without_repeats,
)
from llm_op_guard.guard.evaluate import dtype_values, show, text_of
from llm_op_guard.guard.fault import Fault, first_of_each_rule
from llm_op_guard.guard.reading import (
    INAPPLICABLE,
    Broken,
    NotApplicable,
    Snapshot,
    autocast_dtype,
    is_integer,
    is_tensor,
)
from llm_op_guard.guard.reads import Read, reads_of
from llm_op_guard.guard.violation import Binding, Violation
from llm_op_guard.policy import CLASSES


def explain(
    contract: Contract,
    arguments: Mapping[str, Any],
    *,
    classes: Iterable[CostClass] = CLASSES,
    after_call: bool = False,
    known: Mapping[str, Any] | None = None,
    at_entry: Mapping[Path, Snapshot | None] | None = None,
    answers: Answers | None = None,
) -> list[Violation]:
    """Every rule of `contract` that this call breaks, in the order of its statements; consequences are left out.

    `arguments` maps parameter names (and, after the call, `result`) to values. Only rules of the given cost classes
    are judged; after the call, only those that had to wait for the result. `known` are the values that assigned
    names had before the call, `at_entry` what the tensors looked like that types refer to. `answers` asks the
    predicates of class C; what went wrong with them stands in its `failures`.
    """
    return Explanation(contract, arguments, classes, after_call, known, at_entry, answers).violations()


class Explanation:
    """What `explain` finds of one call, for those who want less: `broken` and `bindings` are told without its texts.

    All is worked out when it is made.
    """

    def __init__(
        self,
        contract: Contract,
        arguments: Mapping[str, Any],
        classes: Iterable[CostClass] = CLASSES,
        after_call: bool = False,
        known: Mapping[str, Any] | None = None,
        at_entry: Mapping[Path, Snapshot | None] | None = None,
        answers: Answers | None = None,
    ) -> None:
        self.contract = contract
        self.at_entry = at_entry or {}
        self.after_call = after_call
        self.judged = frozenset(classes)
        # Symbols are told by class A statements whether or not their own rules are judged.
        clauses = [
            clause
            for clause in contract.clauses
            if clause.cost_class in {"A", *self.judged} and (after_call or not clause.after_call)
        ]
        self.answers = answers
        self.bindings = Bindings(contract, clauses, arguments, known or {}, after_call, answers)
        self.values = self.bindings.values
        self.faults: list[Fault] = []
        self.bindings.collect()
        self.misfits = self.bindings.misfits(filter(self._is_judged, self.bindings.clauses))
        for clause in self.bindings.clauses:
            if self._is_judged(clause):
                if self.answers is not None:
                    self.answers.about(clause)
                self._judge(clause)
        if self.answers is not None:
            self.answers.about(None)
        self.faults = self._without_consequences()

    @property
    def broken(self) -> tuple[str, ...]:
        """The ids of the rules that are broken."""
        return tuple(dict.fromkeys(fault.rule_id for fault in self.faults))

    def violations(self) -> list[Violation]:
        """The same with everything that is to be said of them."""
        return [self._violation(fault) for fault in self.faults]

    def _is_judged(self, clause: Clause) -> bool:
        return clause.after_call == self.after_call and clause.cost_class in self.judged

    def _model(self, path: Path) -> Any:
        """The tensor at a path, as it was before the call, to compare with; raises NotApplicable where none is."""
        value = self.at_entry[path] if path in self.at_entry else self.values.path(path)
        if value is None or not (is_tensor(value) or isinstance(value, Snapshot)):
            raise NotApplicable
        return value

    # ------------------------------------------------------------ judging

    def _judge(self, clause: Clause) -> None:
        for condition in clause.conditions:
            outcome = self.bindings.outcome(condition.test)
            if isinstance(outcome, Broken):
                self._broken_test(clause, condition.test, str(outcome))
            if outcome is not condition.wanted:
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
                    rule_id = clause.statement.text
                    self._fault(clause, rule_id, names[0], str(broken), f"a value for {expr.text}", expr)

    def _broken_test(self, clause: Clause, test: Expr, broken: str) -> None:
        rule_id = f"if {test.text}"
        if all(fault.rule_id != rule_id for fault in self.faults):  # once, not for every statement in the branch
            fault = Fault(clause, rule_id, self._argument_of(test), broken, test.text, set(names_in(test.node)))
            fault.is_test = True
            self.faults.append(fault)

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

    def _judge_type(self, clause: Clause, path: Path, declared: Type, value: Any, rule: Path | None = None) -> None:
        """Judge the value at `path` by its type; `rule` is what its rules are called, where that is not the path."""
        rule = rule or path
        before = len(self.faults)
        self._judge_declared(clause, path, declared, value, rule)
        if rule != path:
            for fault in self.faults[before:]:
                fault.rule_id = fault.rule_id.replace(str(path), str(rule), 1)

    def _judge_declared(self, clause: Clause, path: Path, declared: Type, value: Any, rule: Path) -> None:
        chosen = committed(declared, value)
        if chosen is None or not fits(chosen, value):
            self._judge_misfit(clause, path, declared, value)
            return
        match chosen:
            case Like(path=other):
                self._judge_like(clause, path, other, value)
            case TupleType(items=items):
                for index, item in enumerate(items):
                    self._judge_type(clause, path.item(index), item, value[index], rule.item(index))
            case ListType(item=item):
                before = len(self.faults)
                for index in range(min(len(value), LONGEST_LIST)):
                    self._judge_type(clause, path.item(index), item, value[index], rule.item("_"))
                self.faults[before:] = first_of_each_rule(self.faults[before:])
            case TensorType():
                self._judge_dtype(clause, path, chosen, value)
                self._judge_sizes(clause, path, chosen, value)
                self._judge_device(clause, path, chosen, value)

    def _judge_misfit(self, clause: Clause, path: Path, declared: Type, value: Any) -> None:
        """No alternative fits: say whether the kind, the rank or the dtype is to blame."""
        tensors = [a for a in declared.alternatives if isinstance(a, TensorType)]
        if not is_tensor(value) or not tensors:
            observed = misfit_text(path, declared, value)
            self._fault(clause, f"{path}.type", str(path), observed, declared.text, None, "type")
            return
        same_rank = [t for t in tensors if t.accepts_rank(len(value.shape))]
        if same_rank:
            dtypes = " or ".join(dict.fromkeys(dtypes_text(t) for t in same_rank))
            observed = f"{path}.dtype = {show(value.dtype)}"
            self._fault(clause, f"{path}.dtype", str(path), observed, dtypes, None, "dtype")
            return
        fitting = [t for t in tensors if dtype_fits(t, value)] or tensors
        shapes = " or ".join(dict.fromkeys(shape_text(t) for t in fitting))
        ranks = " or ".join(dict.fromkeys(rank_text(t) for t in fitting))
        observed = f"{path}.shape = {show(tuple(value.shape))}, rank {len(value.shape)}"
        self._fault(clause, f"{path}.shape", str(path), observed, f"rank {ranks}, {shapes}", None, "shape")

    def _judge_dtype(self, clause: Clause, path: Path, tensor: TensorType, value: Any) -> None:
        expected: list[str] = []
        names: set[str] = set()
        for dtype in tensor.dtypes:
            match dtype:
                case DtypeSymbol(name=name):
                    wanted = self.values.symbols.get(name)
                    if wanted is None or _same_dtype(value.dtype, wanted):
                        return
                    expected.append(f"{name} = {show(wanted)}")
                    names.add(name)
                case DtypeOf(path=other):
                    try:
                        wanted = self._model(other).dtype
                    except INAPPLICABLE:
                        return
                    if _same_dtype(value.dtype, wanted):
                        return
                    expected.append(f"{other}.dtype = {show(wanted)}")
                case _:
                    if dtype.name == "any" or value.dtype in dtype_values(dtype):
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
                names |= symbols_of(dim)
        if observed_parts:
            self._fault(
                clause,
                f"{path}.shape",
                str(path),
                ", ".join(observed_parts),
                ", ".join(expected_parts),
                None,
                "shape",
                names,
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
            case SizeOneOf():
                wrong: list[str] = []
                for option in dim.in_order:
                    text = self._wrong_value(option, observed, where)
                    if text is None:
                        return None
                    wrong.append(text)
                return " or ".join(without_repeats(reversed(wrong)))
        return None

    def _wrong_value(self, expr: Expr, observed: Any, where: str) -> str | None:
        if (where, expr.text) in self.bindings.unsolvable:
            unknown = ", ".join(self.bindings.unknown_in(expr))
            return f"{expr.text} for a whole {unknown} ({self.bindings.unsolvable[where, expr.text]})"
        if self.misfits.intersection(names_in(expr.node)):
            raise NotApplicable  # the argument that gives it is told to be wrong
        try:
            wanted = self.values.evaluate(expr)
        except Broken as broken:
            return f"{expr.text} ({broken})"
        if not is_integer(wanted):
            raise NotApplicable  # a size that is given by an argument which is no number
        if observed == wanted:
            return None
        return expr.text if isinstance(expr.node, ast.Constant) else f"{expr.text} = {show(wanted)}"

    def _judge_like(self, clause: Clause, path: Path, other: Path, value: Any) -> None:
        try:
            model = self._model(other)
        except INAPPLICABLE:
            return
        for aspect in ("dtype", "shape", "device"):
            mine, wanted = getattr(value, aspect), getattr(model, aspect)
            if not (_same_dtype(mine, wanted) if aspect == "dtype" else mine == wanted):
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
        """What to look at first: a tensor that the rule reads, another argument, or where its first symbol was seen."""
        reads = reads_of(expr.node, self.contract)
        for read in reads:
            try:
                if is_tensor(self.values.path(read.path)):
                    return str(read.path)
            except INAPPLICABLE:
                continue
        # An argument that stands in the rule itself is nearer than one that only told a symbol.
        if reads:
            return str(reads[0].path)
        for name in names_in(expr.node):
            for observation in self.bindings.observations:
                if observation.symbol == name:
                    return observation.path
        return None

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
        self.faults.append(Fault(clause, rule_id, argument, observed, expected, used, aspect))

    def _without_consequences(self) -> list[Fault]:
        """Leave out rules that read just what a broken certain declaration already says is wrong."""
        causes = [fault for fault in self.faults if fault.aspect is not None and fault.certain]
        kept = [
            fault
            for fault in self.faults
            if not any(cause.spoils(read) for read in self._reads(fault) for cause in causes if cause is not fault)
        ]
        # Two declarations may each be the consequence of the other; then both are told.
        return kept if any(fault.certain for fault in kept) or not causes else self.faults

    def _reads(self, fault: Fault) -> list[Read]:
        statement = fault.clause.statement
        if fault.is_test:
            return []
        if isinstance(statement, Require):
            return reads_of(statement.expr.node, self.contract)
        if isinstance(statement, Declare) and fault.aspect is not None:
            likes = [a.path for a in statement.type.alternatives if isinstance(a, Like)]
            return [Read(path, fault.aspect) for path in likes]
        return []

    def _violation(self, fault: Fault) -> Violation:
        statement = fault.clause.statement
        reason = None if isinstance(statement, Assign | Remember) or fault.is_test else statement.reason
        bindings = [
            Binding(name, show(self.values.symbols[name]), self.bindings.seen_at(name))
            for name in self.contract.symbols
            if name in fault.names and name in self.values.symbols
        ]
        return Violation(
            operator=self.contract.name,
            rule_id=fault.rule_id,
            cost_class=fault.clause.cost_class,
            certain=fault.certain,
            argument=fault.argument,
            observed=fault.told,
            expected=fault.expected,
            bindings=tuple(bindings),
            because=text_of(self.values, reason.because) if reason else None,
            hint=text_of(self.values, reason.hint) if reason else None,
            contract_id=self.contract.id,
            contract_hash=self.contract.hash,
            blames="operator" if _is_promise(statement) else "caller",
            error=reason.error if reason else None,
        )


# ---------------------------------------------------------------- parts


def _same_dtype(one: Any, other: Any) -> bool:
    """Whether two dtypes are one, if need be by way of autocast."""
    return one == other or autocast_dtype(one, other) is not None


def _is_promise(statement: Leaf) -> bool:
    """Whether the operator, not its caller, has to keep a rule: what it returns, and what `ensure` says."""
    match statement:
        case Require(promised=promised):
            return promised
        case Declare(path=path):
            return path.root == "result"
    return False
