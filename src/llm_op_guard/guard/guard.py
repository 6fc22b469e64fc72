"""The guard of one operator at one site: its compiled checks, and what happens when one does not say yes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from types import FunctionType
from typing import Any, Literal, NamedTuple, Protocol

from llm_op_guard.contract.model import Contract, CostClass, Remember, Require
from llm_op_guard.contract.path import Path
from llm_op_guard.errors import GuardError, GuardInternalWarning, GuardWarning
from llm_op_guard.guard.asked import in_calls
from llm_op_guard.guard.capture import Known
from llm_op_guard.guard.compile import compile_check
from llm_op_guard.guard.context import all_arguments, any_beyond
from llm_op_guard.guard.deferred import Deferred
from llm_op_guard.guard.explain import explain
from llm_op_guard.guard.fast import Accepting, accepted_by, is_usable
from llm_op_guard.guard.interpret import InterpretedCheck, is_interpreted
from llm_op_guard.guard.late import LateRules, late_rule
from llm_op_guard.guard.ledger import Side, count_call, entering, leaving
from llm_op_guard.guard.memory import distrusting
from llm_op_guard.guard.names import Names
from llm_op_guard.guard.pace import Pace, lean, may_be_left_out
from llm_op_guard.guard.pace import paced as in_turn
from llm_op_guard.guard.plan import Plan, plan_check
from llm_op_guard.guard.reading import Snapshot, is_tracing
from llm_op_guard.guard.run_time import Judge, answering, can_wait, kinds_of, numbers_of
from llm_op_guard.guard.run_time import operator as run_time_operator
from llm_op_guard.guard.source import CheckSource, Native, check_source
from llm_op_guard.guard.traced import Local, comptime, constant, is_whole_program, may_break_graph, teller
from llm_op_guard.guard.violation import Violation
from llm_op_guard.log import log
from llm_op_guard.policy import CLASSES, Action, Policy, current, native_wanted


class Reporter(Protocol):
    """What a guard tells its violations to; `api` hands it in."""

    def report(
        self, guard: Guard, violations: list[Violation], arguments: Mapping[str, Any], before: Known | None = None
    ) -> GuardError | None:
        """Act on the violations of one call as the policy says; what is returned is raised.

        `before` is what was known before a call that has returned; then its `result` is among the arguments.
        """

    def error(self, guard: Guard, violations: list[Violation], arguments: Mapping[str, Any]) -> GuardError:
        """The error for the violations of one call; nothing is recorded."""

    def values_judged(self, guard: Guard, judged: bool) -> None:
        """Count a call whose policy leaves values out of some: whether it was one of those."""

    def values_late(self, guard: Guard, judged: bool, calls: int = 1) -> None:
        """Count calls whose verdict was not waited for: whether it came, or nothing could be asked."""

    def told_late(self, guard: Guard, violations: list[Violation], effective: Policy) -> GuardError | None:
        """As `report`, for a call that is over, under the policy that held then; the violations say where it was."""

    def repeated(self, guard: Guard, rule_ids: list[str]) -> bool:
        """Whether all of these suspect rules have been told of before; counts them if so."""


class Checks(NamedTuple):
    """The check before a call and the one after it. Where `accepts(program, *arguments)` is true, neither is needed.

    `before` asks that itself; whoever asks it first spares the calls of `before`.
    """

    before: Callable[..., Any]
    after: Callable[..., None] | None = None
    accepting: Accepting | None = None


class Guard:
    """One contract at one site.

    `operator` and `site` are what reports call it; `defaults` is the policy where nobody set one. `parameters` are
    the arguments that its checks take, in order: the same for every choice of classes. `ask` judges the rules that ask
    predicates, of all arguments of a call, and returns the error to raise, if any; it is for tests alone.
    """

    def __init__(
        self,
        contract: Contract,
        *,
        operator: str,
        site: str,
        defaults: Policy,
        reporter: Reporter,
        tally: Callable[[], None] | None = None,
        ask: Callable[[Mapping[str, Any]], GuardError | None] | None = None,
        parameters: tuple[str, ...] | None = None,
    ) -> None:
        self.contract = contract
        self.operator = operator
        self.site = site
        self.defaults = defaults
        self.reporter = reporter
        self._tally = tally
        self._ask = ask
        whole = plan_check(contract, CLASSES)
        if parameters is None:
            parameters = whole.parameters if whole is not None else ()
        self.parameters = parameters
        self._pace = Pace(defaults, self.names, lambda judged: reporter.values_judged(self, judged))
        self._checks: dict[tuple[frozenset[CostClass], bool, bool, bool, bool, bool], Checks] = {}
        self.calls = 0  # that late rules have counted
        self._failed_inside = False

    @property
    def names(self) -> tuple[str, str]:
        """What a policy may call it: its operator, or its site."""
        return self.operator, self.site

    @property
    def classes(self) -> frozenset[CostClass]:
        """The cost classes that the contract has something of: rules, or facts to remember."""
        return frozenset(clause.cost_class for clause in self.contract.clauses)

    @cached_property
    def may_tell_late(self) -> bool:
        """Whether it has a rule that can be asked on a device, and be told of when the call is over."""
        return not is_interpreted(self.contract) and any(
            late_rule(clause, self.contract) is not None for clause in self.contract.clauses
        )

    def checks(
        self, classes: Iterable[CostClass], *, noted: bool = False, paced: bool = False, late: bool = False
    ) -> Checks:
        """The check before the call and the one after it, for the rules of these classes; compiled once.

        Both raise nothing of their own: what a violation does is the reporter's decision. `noted` checks write in the
        ledger what they accept, and what a call returns that no rule waits for; `paced` ones leave value rules out of
        some calls, and `late` ones do not wait for verdicts on a device, as the policy says.
        """
        # Class B rules use the symbols that class A statements bind, so A is always compiled in.
        wanted = frozenset({"A", *classes})
        asking = in_calls() and self._ask is not None
        key = (wanted, noted, asking, paced, late, is_usable())
        if key not in self._checks and paced and (without := self._lean()) is not None:
            fewer = without.checks(wanted, noted=noted, late=late)
            full = self.checks(wanted, noted=noted, late=late)
            self._checks[key] = Checks(*in_turn(full[:2], fewer[:2], self._pace.is_due, is_tracing))
        elif key not in self._checks:
            native_wanted()  # elements are read natively, too, and within a call it is too late for a PolicyError
            interpreted = is_interpreted(self.contract)
            made = self._interpreted(wanted, noted) if interpreted else self._generated(wanted, noted, late)
            if asking and self._ask is not None:
                made = Checks(self._asking(made.before, self._ask), made.after)
            if noted and made.after is None:
                made = made._replace(after=leaving(self._side("leaving")))
            self._checks[key] = made
        return self._checks[key]

    def _lean(self) -> Guard | None:
        """The guard without the value rules that may be left out of a call; None where there are none."""
        if not any(may_be_left_out(clause, self.contract) for clause in self.contract.clauses):
            return None
        return Guard(
            lean(self.contract),
            operator=self.operator,
            site=self.site,
            defaults=self.defaults,
            reporter=self.reporter,
            tally=self._tally,
            ask=self._ask,
            parameters=self.parameters,
        )

    def _asking(
        self, check: Callable[..., Any], ask: Callable[[Mapping[str, Any]], GuardError | None]
    ) -> Callable[..., Any]:
        """The check before a call, and after it the predicates: of all arguments, since they may want others."""
        parameters = self.parameters

        def check_and_ask(*arguments: Any) -> Any:
            state = check(*arguments)
            if not is_tracing():
                error = ask(all_arguments(dict(zip(parameters, arguments, strict=True))))
                if error is not None:
                    raise error
            return state

        return check_and_ask

    def _generated(self, classes: frozenset[CostClass], noted: bool, late: bool) -> Checks:
        before = plan_check(self.contract, classes)
        after = plan_check(self.contract, classes, after_call=True)
        if before is not None:
            before = before.with_parameters(self.parameters)
        accepting = None if before is None else self.accepted_by(before, noted=noted)
        return Checks(
            _nothing if before is None else self._compiled(before, classes, noted, late, accepting),
            None if after is None else self._compiled(after, classes, noted, late),
            accepting if self._tally is None and accepting is not None and accepting.remainder is None else None,
        )

    def accepted_by(self, plan: Plan, *, noted: bool = False) -> Accepting | None:
        """What accepts right calls before the check is asked, if anything does."""
        return accepted_by(plan, noted=noted)

    def _side(self, when: Literal["entering", "leaving"], classes: Iterable[CostClass] = ()) -> Side:
        """What the ledger calls one side of the operator; a result is valid where one of these classes judges it."""
        judged = any(
            clause.after_call and clause.cost_class in classes and not isinstance(clause.statement, Remember)
            for clause in self.contract.clauses
        )
        goes_in = when == "entering"
        return Side(self.operator, self.site, goes_in, goes_in or judged, self.parameters if goes_in else ())

    def _interpreted(self, classes: frozenset[CostClass], noted: bool) -> Checks:
        before, after = (plan_check(self.contract, classes, after_call=late) for late in (False, True))
        outcomes = [_Outcome(self, plan.with_parameters(self.parameters), classes) for plan in (before, after) if plan]
        if before is None or not outcomes:
            return Checks(_nothing)
        notes = entering(self._side("entering")), leaving(self._side("leaving", classes))
        check = InterpretedCheck(
            self.contract,
            self.parameters,
            classes,
            failed=_untraced(outcomes[0].failed, self.operator),
            failed_after=_untraced(outcomes[-1].failed_interpreted, self.operator),
            tally=self._tally or _nothing,
            jit_state=_jit_state(),
            notes=notes if noted else (_nothing, _nothing),
        )
        return Checks(check.before, check.after if after is not None else None)

    def source(self, classes: Iterable[CostClass]) -> str:
        """The generated source of the check before the call, to read."""
        plan = plan_check(self.contract, {"A", *classes})
        return check_source(plan.with_parameters(self.parameters)).text if plan is not None else ""

    def _compiled(
        self,
        plan: Plan,
        classes: frozenset[CostClass],
        noted: bool,
        late: bool,
        accepting: Accepting | None = None,
        native: Native = Native.NONE,
    ) -> FunctionType:
        outcome = _Outcome(self, plan, classes)
        reason = (
            f"a call of {self.operator} breaks its contract ({self.contract.id}); without fullgraph it is explained"
        )
        if accepting is not None:
            native = Native.DECIDES if accepting.remainder is None else Native.BEGINS
        source = self._source_of(plan, classes, noted, late, native)
        failed = outcome.failed_after if plan.after_call else outcome.failed
        hooks: dict[str, Any] = {
            "_failed": _untraced(failed, reason),
            "_noticed": _untraced(outcome.noticed, reason),
            "_tracing": is_tracing,
            "_jit_state": _jit_state(),
            "_tally": self._tally or _nothing,
            "_note": leaving(self._side("leaving", classes)) if plan.after_call else entering(self._side("entering")),
            "_lets_through": constant(self._lets_through_traced),
            "_comptime": comptime,
            "_distrust": distrusting(plan.forgets),
            "_tell": teller(lambda local: outcome.traced(source, local), reason),
        }
        if accepting is not None:
            hooks |= {"_accepts": accepting.accepts, "_program": accepting.program}
            if accepting.remainder is not None:
                hooks["_remainder"] = self._compiled(
                    accepting.remainder, classes, noted, late, native=Native.HAS_ACCEPTED
                )
        if source.late:
            hooks["_late"] = LateRules(self, source.late, count=not plan.after_call)
        if source.deferred:
            hooks |= outcome.deferring(source.deferred, source.names)
        return compile_check(source, f"{self.operator}{' result' if plan.after_call else ''}", hooks)

    def _source_of(
        self, plan: Plan, classes: frozenset[CostClass], noted: bool, late: bool, native: Native
    ) -> CheckSource:
        """The source of a check, written once for all guards of the contract: a model has the same norm many times."""
        made, counted = self.contract.sources, self._tally is not None
        key = (classes, plan.after_call, plan.parameters, counted, noted, late, native)
        if key not in made:
            made[key] = check_source(plan, counted=counted, noted=noted, late=late, native=native)
        source: CheckSource = made[key]
        return source

    def _lets_through_traced(self) -> bool:
        """Whether a broken rule in a traced program goes through: the policy does not raise, and nothing is recorded.

        Only metadata is looked at while tracing, which is class A. Where Dynamo may break the graph, the call is
        recorded when the program runs.
        """
        return current(self.defaults, self.names).action("A") is not Action.RAISE and not may_break_graph()

    def fail_inside(self, error: Exception) -> None:
        """Say once that the guard itself failed; the call goes through."""
        if self._failed_inside:
            return
        self._failed_inside = True
        message = (
            f"llm-op-guard failed while checking {self.operator} ({type(error).__name__}); the call went through "
            f"unchecked. This is a fault of the guard, not of the call; it is reported once for each site."
        )
        log().error(message)
        # What an error says may be what a user wrote: only for who looks for it.
        log().debug("llm-op-guard failed while checking %s", self.operator, exc_info=error)
        warn_of_inside(message)


def warn_of_inside(message: str) -> None:
    """Give a GuardInternalWarning; where warnings are errors, the call goes through all the same."""
    try:
        warnings.warn(GuardInternalWarning(message), stacklevel=3)
    except GuardInternalWarning:
        log().debug("warnings are errors here; the call goes through all the same")


class _Outcome:
    """What one compiled check calls when it does not come to a plain yes."""

    def __init__(self, guard: Guard, plan: Plan, classes: frozenset[CostClass]) -> None:
        self._guard = guard
        self._plan = plan
        self._classes = classes

    def failed(self, arguments: tuple[Any, ...]) -> GuardError | None:
        """The error to raise for a call with these arguments, if any."""
        count_call()
        return self._explained(dict(zip(self._plan.parameters, arguments, strict=True)))

    def failed_after(self, handed: tuple[Any, tuple[Any, ...], tuple[Any, ...]]) -> GuardError | None:
        """The error to raise for a result: (result, state that the check before the call handed on, arguments)."""
        result, state, arguments = handed
        names, paths = self._plan.known, self._plan.snapshots
        known = {name: value for name, value in zip(names, state, strict=False) if value is not None}
        at_entry = dict(zip(paths, state[len(names) :], strict=False))
        values = dict(zip(self._plan.parameters, arguments, strict=True))
        return self._explained({**values, "result": result}, Known(known, at_entry))

    def traced(self, source: CheckSource, local: Local) -> GuardError | None:
        """The error for a call that is traced, whose values `local` gives; None where nothing is broken for sure."""
        plan, names = self._plan, source.names
        given = {name: local(names.own(name)) for name in plan.parameters}
        known: dict[str, Any] | None = None
        at_entry: dict[Path, Snapshot | None] | None = None
        if plan.after_call:
            given["result"] = local("result")
            known = {n: value for n in plan.known if (value := local(names.own(n))) is not None}
            at_entry = {path: local(names.snapshot(path)) for path in plan.snapshots}
        guard = self._guard
        violations = explain(
            guard.contract, given, classes=("A",), after_call=plan.after_call, known=known, at_entry=at_entry
        )
        return guard.reporter.error(guard, violations, given) if any(v.certain for v in violations) else None

    def deferring(self, rules: Sequence[Deferred], names: Names) -> dict[str, Any]:
        """What a check calls that leaves rules to a program which is compiled."""
        guard = self._guard
        # The same in every process, since graphs are kept on disk; another for another choice of rules.
        import hashlib  # noqa: PLC0415 - few need it

        chosen = hashlib.sha256("\n".join(rule.rule.text for rule in rules).encode()).hexdigest()[:8]
        name = f"{guard.contract.hash} {chosen} {guard.site}{' result' if self._plan.after_call else ''}"

        def told(violations: list[Violation], arguments: Mapping[str, Any]) -> GuardError | None:
            return guard.reporter.report(guard, violations, arguments)

        # Kept here: graphs find it by its name only, for as long as the check lives.
        late = LateRules(guard, [late_rule(rule.clause, guard.contract) for rule in rules], count=True)
        self._judge = Judge(name, guard.contract, rules, told, guard.fail_inside, late)
        return {
            "_judged_as": name,
            "_judge": run_time_operator(),
            "_can_wait": can_wait,
            "_kinds": kinds_of,
            "_numbers": numbers_of,
            "_defers": constant(is_whole_program),
            **{
                f"_{hook}_{number}_{at}": function
                for number, rule in enumerate(rules)
                for at, asked in rule.asked.items()
                for hook, function in answering(asked, names).items()
            },
        }

    def failed_interpreted(self, handed: tuple[Any, Any, tuple[Any, ...]]) -> GuardError | None:
        """As `failed_after`, for a check that `explain` itself makes."""
        result, (_, known, at_entry, _), arguments = handed
        values = dict(zip(self._plan.parameters, arguments, strict=True))
        return self._explained({**values, "result": result}, Known(known, at_entry))

    def noticed(self, doubts: list[int], arguments: tuple[Any, ...]) -> GuardError | None:
        """As `failed`, for broken suspect statements, given by number; saves explaining the same doubt every time."""
        ids = []
        for doubt in doubts:
            statement = self._plan.contract.clauses[doubt].statement
            # Which rule of a suspect declaration is broken only explain can tell.
            ids.append(statement.id if isinstance(statement, Require) else None)
        told = [rule_id for rule_id in ids if rule_id is not None]
        if len(told) == len(ids) and self._guard.reporter.repeated(self._guard, told):
            if not self._plan.after_call:
                count_call()
            return None
        return self.failed_after(arguments) if self._plan.after_call else self.failed(arguments)

    def _explained(self, arguments: Mapping[str, Any], before: Known | None = None) -> GuardError | None:
        guard = self._guard
        try:
            if any_beyond(guard.contract, arguments):
                return None
            effective = current(guard.defaults, guard.names)
            told: frozenset[CostClass] = frozenset({"A"}) if is_tracing() else self._classes
            judged = frozenset(c for c in told if effective.action(c) is not Action.OFF)
            violations = explain(
                guard.contract,
                arguments,
                classes=judged,
                after_call=self._plan.after_call,
                known=before.names if before is not None else None,
                at_entry=before.tensors if before is not None else None,
            )
            if violations:
                return guard.reporter.report(guard, violations, arguments, before)
            if judged == self._classes:
                raise RuntimeError("the compiled check said no and explain found nothing")
        except GuardWarning:
            raise  # warnings are errors here, and this one is the user's
        except Exception as error:
            guard.fail_inside(error)
        return None


def _nothing(*_: Any) -> None:
    return None


def _jit_state() -> Callable[[], Any]:
    """What returns None unless torch.jit.trace is at work, where sizes are not numbers and a test is a warning."""
    native: Any = getattr(sys.modules.get("torch"), "_C", None)  # of a stand-in for PyTorch there is none
    state: Callable[[], Any] = _nothing if native is None else native._get_tracing_state
    return state


def _untraced(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """The same function, which Dynamo leaves to Python, saying why; as `torch.compiler.disable` without its import."""

    def call(*arguments: Any) -> Any:
        dynamo = sys.modules.get("torch._dynamo")
        # Where Dynamo is loaded, it must leave what is called from here alone as well.
        return function(*arguments) if dynamo is None else dynamo.disable(function)(*arguments)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return call
