"""Value rules whose verdict is not waited for: which they are, what is asked for them, how a late verdict is told.

On a CUDA device an answer in the call is a wait for all work before it. A rule that protects no memory access can be
asked on the device, in the order of the program's own work, and told of when the answer is there. While a CUDA graph
is captured nothing can be waited for, and all rules that can be asked so are: at each replay. `values.late` does the
asking and keeps what is under way; nothing of it holds a tensor.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import CodeType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from llm_op_guard.contract.model import Clause, Contract
from llm_op_guard.contract.path import path_of
from llm_op_guard.contract.vocabulary import FUNCTIONS
from llm_op_guard.errors import GuardWarning
from llm_op_guard.frozen import frozen
from llm_op_guard.guard import elements
from llm_op_guard.guard.context import caller
from llm_op_guard.guard.deferred import Deferred, asks_values, deferred
from llm_op_guard.guard.functions import Element, Located, StandIn
from llm_op_guard.guard.pace import may_be_left_out
from llm_op_guard.guard.readable import is_captured, plain_tensors, require_values
from llm_op_guard.guard.reading import NotApplicable, is_tracing
from llm_op_guard.guard.run_time import Handed, violation_of
from llm_op_guard.guard.violation import CallSite, Replayed, TensorMetadata, ToldLate, Violation
from llm_op_guard.policy import Action, Policy, Time, current

if TYPE_CHECKING:
    from llm_op_guard.guard.guard import Guard

# Where an answer in the call costs a wait. Tests add "cpu".
DEVICES = {"cuda"}

# Of one call; what comes after is judged in the call.
MOST_PROBES = 8

Number = int | float


class Range(NamedTuple):
    """What every element has to lie in, save the sentinels; nothing is in a range but numbers."""

    low: Number
    high: Number
    low_open: bool = False
    high_open: bool = False
    allow: tuple[Number, ...] = ()


class Probe(NamedTuple):
    """A question about all elements of a tensor: are they in the range, or (without one) finite?"""

    tensor: Any
    range: Range | None


@frozen
class Verdict:
    """The answer: how many elements are wrong; where the first of them is, and its value.

    It is the first in row order, or (`in_memory`) as the elements lie in memory.
    """

    count: int
    index: tuple[int, ...] = ()
    value: Number = 0
    in_memory: bool = False


class Replay(NamedTuple):
    """Which replay of a graph broke a captured call; how many broke it since, and how many there were in all."""

    at: int
    broken: int
    replays: int


class Queue(Protocol):
    """What is under way: asked, and not told yet."""

    def put(self, call: LateCall, probes: Sequence[Probe]) -> None:
        """Ask for a call, or while a graph is captured for each of its replays. Never waits and never raises."""

    def prepare(self, guard: Guard, probes: Sequence[Probe]) -> None:
        """Make ready what would ask so in a graph, where nothing can be compiled. Never waits and never raises."""

    def unasked(self, guard: Guard) -> None:
        """Count a call that nothing can be asked about."""

    def told(self) -> Exception | None:
        """Act on the verdicts that are there, of calls of this thread; the error to raise for one, if any."""

    def note(self, error: Exception) -> None:
        """Give an exception a note of what was found before and not told yet."""


_queue: Queue | None = None


def register(queue: Queue) -> None:
    """Give late rules their queue; without one, every rule is judged in the call."""
    global _queue  # noqa: PLW0603
    _queue = queue


def noting(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; what it raises is given a note of what was found before and not told yet."""

    def call_and_note(*args: Any, **kwargs: Any) -> Any:
        if is_tracing() or _queue is None:
            return call(*args, **kwargs)
        try:
            return call(*args, **kwargs)
        except Exception as error:
            _queue.note(error)
            raise

    return call_and_note


@cache
def has_devices() -> bool:
    """Whether torch was built for CUDA: else a policy that says no time means `sync`, and checks need not ask."""
    try:
        import torch  # noqa: PLC0415 - who asks has a contract about the values of tensors
    except ImportError:
        return False
    return bool(torch.backends.cuda.is_built())  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- which rules, and what is asked for them

# A literal, or the number of a fact.
_Operand = tuple[Literal["is", "fact"], Any]
_NO_SENTINEL: _Operand = ("is", ())


@frozen
class _Asked:
    """One question of a rule: `call` is the value function in it, `expected` what is told where that says more."""

    call: ast.Call
    tensor: int
    low: _Operand | None = None
    high: _Operand | None = None
    allow: _Operand = _NO_SENTINEL
    open: tuple[bool, bool] = (False, False)
    expected: str | None = None

    def range(self, facts: Sequence[Any]) -> Range | None:
        """The range that is asked for; raises NotApplicable where a bound is no number."""
        if self.low is None and self.high is None:
            return None
        low = -math.inf if self.low is None else _number(_operand(self.low, facts))
        high = math.inf if self.high is None else _number(_operand(self.high, facts))
        if _name(self.call) == "absmax":
            low = -high
        given = _operand(self.allow, facts)
        allow = given if type(given) is tuple else (given,)
        return Range(low, high, *self.open, tuple(map(_number, allow)))


@frozen
class LateRule:
    """A rule in parts, and the questions that it comes to.

    What `protects` a memory access is judged in the call, wherever that can be waited for.
    """

    parts: Deferred
    asked: tuple[_Asked, ...]
    protects: bool


def late_rule(clause: Clause, contract: Contract) -> LateRule | None:
    """A rule as it is asked on a device; None for one that cannot be.

    It has to be about single elements: `finite(x)`, `within(x, …)`, an extreme compared with what is no value of a
    tensor, or several of these with `and`.
    """
    if clause.cost_class != "B" or (parts := deferred(clause)) is None:
        return None
    node = parts.rule.expr.node
    conjuncts = node.values if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And) else [node]
    asked = [_asked(conjunct, parts) for conjunct in conjuncts]
    found = tuple(one for one in asked if one is not None)
    return LateRule(parts, found, not may_be_left_out(clause, contract)) if len(found) == len(asked) else None


def _asked(node: ast.expr, parts: Deferred) -> _Asked | None:
    match node:
        case ast.Call(func=ast.Name(id="finite"), args=[x], keywords=[]):
            at = _tensor(x, parts)
            return None if at is None else _Asked(node, at)
        case ast.Call(func=ast.Name(id="within")):
            names = [name for name, _ in FUNCTIONS["within"].arguments]
            given = dict(zip(names, node.args, strict=False)) | {str(k.arg): k.value for k in node.keywords}
            if (at := _tensor(given["x"], parts)) is None:
                return None
            low, high = (_operand_of(given[name], parts) for name in ("low", "high"))
            allow = _operand_of(given["allow"], parts) if "allow" in given else _NO_SENTINEL
            if low is None or high is None or allow is None:
                return None
            return _Asked(node, at, low, high, allow, (False, True))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            if isinstance(left, ast.Call) and not asks_values(right):
                return _compared(left, type(op), right, node, parts)
            if isinstance(right, ast.Call) and not asks_values(left) and type(op) in _MIRRORED:
                return _compared(right, _MIRRORED[type(op)], left, node, parts)
    return None


_MIRRORED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}


def _compared(call: ast.Call, op: type[ast.cmpop], other: ast.expr, node: ast.expr, parts: Deferred) -> _Asked | None:
    """`lowest(x) >= n` is about every element; `lowest(x) < n` about some, which is another question."""
    match call:
        case ast.Call(func=ast.Name(id="lowest" | "highest" | "absmax" as name), args=[x], keywords=[]):
            at, bound = _tensor(x, parts), _operand_of(other, parts)
        case _:
            return None
    if at is None or bound is None or op not in ((ast.Gt, ast.GtE) if name == "lowest" else (ast.Lt, ast.LtE)):
        return None
    is_open, expected = op in (ast.Gt, ast.Lt), ast.unparse(node)
    if name == "lowest":
        return _Asked(call, at, low=bound, open=(is_open, False), expected=expected)
    return _Asked(call, at, high=bound, open=(is_open and name == "absmax", is_open), expected=expected)


def _tensor(node: ast.expr, parts: Deferred) -> int | None:
    path = path_of(node)
    if path is None or not all(isinstance(step, str) for step in path.steps):
        return None  # an item of a tensor is a part of it, and of a list an argument
    written = ast.unparse(node)
    return next((at for at, tensor in enumerate(parts.tensors) if ast.unparse(tensor) == written), None)


def _operand_of(node: ast.expr, parts: Deferred) -> _Operand | None:
    written = ast.unparse(node)
    for at, fact in enumerate(parts.facts):
        if ast.unparse(fact) == written:
            return "fact", at
    try:
        return "is", ast.literal_eval(node)
    except ValueError:
        return None


def _operand(operand: _Operand, facts: Sequence[Any]) -> Any:
    kind, value = operand
    return value if kind == "is" else facts[value]


def _number(value: Any) -> Number:
    if type(value) not in (int, float, bool) or value != value:  # noqa: PLR0124 - of NaN `plain` knows
        raise NotApplicable
    number: Number = value
    return number


def _name(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Name)
    return call.func.id


# ---------------------------------------------------------------- in a call


class _Taken(NamedTuple):
    """A rule of a call as it is kept: no tensor is in it. One that `waits` is judged in the call, and made ready."""

    rule: int
    facts: tuple[Any, ...]
    stand_ins: tuple[Any, ...]
    waits: bool = False


class LateRules:
    """The late rules of one check; generated code and the operator in compiled programs ask it.

    `rules` are those of the check by number, None for one that is judged in the call.
    """

    def __init__(self, guard: Guard, rules: Sequence[LateRule | None], *, count: bool) -> None:
        self.guard = guard
        self.rules = rules
        self._count = count
        # What was made ready for a graph, where rules that wait here would not: the rules of a call, dtypes and device.
        self._ready: set[tuple[Any, ...]] = set()

    def told(self) -> Exception | None:
        """Begin a call: the error to raise for what was found of calls before it, if any."""
        if self._count:
            self.guard.calls += 1
            calls.begin()
        try:
            return None if _queue is None else _queue.told()
        except GuardWarning:
            raise  # warnings are errors here, and this one is the user's
        except Exception as error:
            self.guard.fail_inside(error)
            return None

    def takes(self, taken: list[tuple[_Taken, list[Probe]]], number: int, tensors: Sequence[Any], facts: Any) -> bool:
        """Whether a rule need not be judged in the call: it is put to `taken`, or the policy here asks nothing."""
        rule = self.rules[number]
        if rule is None or not tensors or _queue is None:
            return False
        for x in tensors:
            if type(x) not in plain_tensors() or x.device.type not in DEVICES:
                return False
        setting = current(self.guard.defaults, self.guard.names).B
        if setting is None or setting.action is Action.OFF:
            return True
        captured = is_captured(tensors[0])
        waits = not captured and (rule.protects or setting.time is Time.SYNC)
        probes = _probes(rule, [probe for _, probes in taken for probe in probes], tensors, facts)
        if probes is None:
            if captured:
                _queue.unasked(self.guard)
            return False
        kept = () if waits else tuple(StandIn(shape=tuple(x.shape), dtype=x.dtype, device=x.device) for x in tensors)
        taken.append((_Taken(number, tuple(facts), kept, waits), probes))
        return not waits

    def send(self, taken: list[tuple[_Taken, list[Probe]]]) -> None:
        """Ask for all that was taken in a call, at once."""
        if not taken or _queue is None:
            return
        late = [one for one in taken if not one[0].waits]
        if len(late) < len(taken):
            probes = [probe for _, probes in taken for probe in probes]
            wanted = probes[0].tensor.device, *(one.rule for one, _ in taken), *(probe.tensor.dtype for probe in probes)
            if wanted not in self._ready:
                self._ready.add(wanted)
                _queue.prepare(self.guard, probes)
        if not late:
            return
        policy = current(self.guard.defaults, self.guard.names)
        call = LateCall(self, self.guard.calls, calls.begun, caller(), policy, tuple(rule for rule, _ in late))
        _queue.put(call, [probe for _, probes in late for probe in probes])


def _probes(rule: LateRule, before: list[Probe], tensors: Sequence[Any], facts: Any) -> list[Probe] | None:
    """What is asked for a rule behind other probes of the call; None where that cannot be."""
    device = (before[0].tensor if before else tensors[0]).device
    if len(before) + len(rule.asked) > MOST_PROBES or any(x.device != device for x in tensors):
        return None
    try:
        for x in tensors:
            require_values(x)
            if x.dtype.is_complex:
                return None
        return [Probe(tensors[one.tensor], one.range(facts)) for one in rule.asked]
    except (NotApplicable, OverflowError):
        return None


class _Calls:
    """How many calls of guards with late rules have begun."""

    def __init__(self) -> None:
        self.begun = 0

    def begin(self) -> None:
        self.begun += 1


calls = _Calls()


# ---------------------------------------------------------------- afterwards


@frozen
class LateCall:
    """A call that was asked for: which of its check it was, where it came from, under which policy."""

    rules: LateRules
    number: int
    begun: int
    called_from: tuple[CodeType, int] | None
    policy: Policy
    taken: tuple[_Taken, ...]

    @property
    def guard(self) -> Guard:
        """Whose call it was."""
        return self.rules.guard

    def violations(self, verdicts: Sequence[Verdict], replay: Replay | None = None) -> list[Violation]:
        """What the verdicts on its probes, in order, say is broken: one violation for each rule.

        `replay` is which one the verdicts are of, where the call was captured.
        """
        found, rest = [], iter(verdicts)
        for taken in self.taken:
            rule = self.rules.rules[taken.rule]
            assert rule is not None
            answers = [(one, next(rest)) for one in rule.asked]
            broken = next(((one, verdict) for one, verdict in answers if verdict.count), None)
            if broken is not None:
                replayed = None if replay is None else Replayed(*replay, protects=rule.protects)
                late = ToldLate(self.number, max(calls.begun - self.begun, 0), replayed)
                found.append(replace(self._violation(rule.parts, taken, *broken), told_late=late))
        return found

    def _violation(self, parts: Deferred, taken: _Taken, asked: _Asked, verdict: Verdict) -> Violation:
        contract = self.guard.contract
        values = Handed(parts, list(taken.stand_ins), list(taken.facts), contract.constants)
        shape = taken.stand_ins[asked.tensor].shape
        note = "the first as they lie in memory" if verdict.in_memory and verdict.count > 1 else ""
        located = Located((Element("x", verdict.index, verdict.value),), verdict.count, math.prod(shape), note)
        observed, expected, argument = elements.told(asked.call, located, values)
        violation = violation_of(contract, parts, values, observed, asked.expected or expected, argument)
        return self._placed(violation, [ast.unparse(node) for node in parts.tensors], taken.stand_ins)

    def _placed(self, violation: Violation, names: list[str], stand_ins: Sequence[Any]) -> Violation:
        code = self.called_from
        site = None if code is None else CallSite(code[0].co_filename, code[1], code[0].co_name)
        tensors = tuple(
            TensorMetadata(name, str(x.dtype).removeprefix("torch."), x.shape, str(x.device))
            for name, x in zip(names, stand_ins, strict=True)
        )
        return replace(
            violation,
            operator=self.guard.operator,
            site=self.guard.site,
            call_site=site,
            tensors=tensors,
        )
