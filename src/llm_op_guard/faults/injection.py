"""Injection: for each contract valid calls and mutants, guarded and not, and what comes of it as numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Any

from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.unbreakable import unbreakable
from llm_op_guard.contract.validate import clauses_of
from llm_op_guard.errors import GuardError
from llm_op_guard.faults.build import build
from llm_op_guard.faults.capsule import TWO_KILOBYTES, Replayed, retried
from llm_op_guard.faults.coverage import untried
from llm_op_guard.faults.ingredients import Ingredients, ingredients
from llm_op_guard.faults.judge import Judgement, judge
from llm_op_guard.faults.mutants import CHANGED_CALLS, Mutant, is_huge, mutants, varied
from llm_op_guard.faults.operators import Operator
from llm_op_guard.faults.outcome import EMPTY, Outcome, Trial, outcomes
from llm_op_guard.faults.promises import returned
from llm_op_guard.faults.solve import valid_calls
from llm_op_guard.frozen import frozen
from llm_op_guard.guard.call import Call
from llm_op_guard.guard.call_json import to_json
from llm_op_guard.guard.capture import Known, capture
from llm_op_guard.guard.guard import Guard
from llm_op_guard.guard.violation import Violation
from llm_op_guard.policy import CLASSES, Action, Policy, Setting

# A valid call differs from itself where its operator draws random numbers, or its elements were never set.
_TAKEN = ("harmless", "silent")
_MADE_UP = Outcome("not run", "the result is made up: nothing runs that could return it")
INTENDED, OTHER, MISSED = "caught by the intended rule", "caught by another rule", "missed"


@frozen
class Case:
    """One mutant and what became of it; `message` is the guard's diagnosis in one line."""

    id: str
    contract: str
    rule: str
    kind: str
    call: str
    guarded: str
    unguarded: Outcome
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The case as JSON-ready data."""
        return {
            "id": self.id,
            "contract": self.contract,
            "rule": self.rule,
            "kind": self.kind,
            "call": self.call,
            "arguments": dict(self.data),
            "guarded": self.guarded,
            "unguarded": {"kind": self.unguarded.kind, "text": self.unguarded.text},
            "message": self.message,
        }


@frozen
class FalseAlarm:
    """A valid call that a guard stopped, or told of."""

    contract: str
    call: str
    message: str


@frozen
class Injected:
    """What injection into one contract came to.

    `valid_calls` were made, `changed_calls` are changes of them that turned out to be valid, `unbuildable` counts
    those of which no arguments can be made on this machine; of what the contract allows, `untried` is in none of the
    valid calls. `rules` counts what can be broken, `unbroken` are those for which no
    mutant was found, `unbreakable` has the reasons why no call breaks others. `lenient` are those whose mutants are all
    harmless without a guard: they may be too strict. `capsules` are those of one mutant of each rule, replayed.
    `refused` counts, by error, the valid calls that the operator itself did not take.
    """

    contract: str
    rules: int
    valid_calls: int
    changed_calls: int
    unbuildable: int
    untried: tuple[str, ...]
    cases: tuple[Case, ...]
    false_alarms: tuple[FalseAlarm, ...]
    unbroken: tuple[str, ...]
    unbreakable: Mapping[str, str]
    capsules: tuple[Replayed, ...]
    operator: str
    refused: Mapping[str, int]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON-ready data, without the cases."""
        return {
            "contract": self.contract,
            "operator": self.operator,
            "rules": self.rules,
            "mutants": len(self.cases),
            "caught": len(self.cases) - self.count(MISSED),
            "caught_by_intended_rule": self.count(INTENDED),
            "valid_calls": self.valid_calls,
            "changed_valid_calls": self.changed_calls,
            "changed_calls_that_cannot_be_made_here": self.unbuildable,
            "not_tried_in_valid_calls": list(self.untried),
            "false_alarms": [{"call": alarm.call, "message": alarm.message} for alarm in self.false_alarms],
            "rules_without_mutant": list(self.unbroken),
            "rules_that_no_call_can_break": [
                {"rule": rule, "reason": reason} for rule, reason in self.unbreakable.items()
            ],
            "possibly_too_strict": self.lenient,
            "capsules": len(self.capsules),
            "largest_capsule": max((capsule.size for capsule in self.capsules), default=0),
            "capsules_that_do_not_replay": [
                {"rule": capsule.rule, "reason": capsule.reason} for capsule in self.lost_capsules
            ],
            "capsules_telling_of_another_element": [capsule.rule for capsule in self.capsules if capsule.elsewhere],
            "valid_calls_that_fail_unguarded": dict(self.refused),
            "seconds": round(self.seconds, 1),
        }

    @property
    def lenient(self) -> list[str]:
        """Rules whose mutants are all harmless."""
        kinds: dict[str, set[str]] = {}
        for case in self.cases:
            kinds.setdefault(case.rule, set()).add(case.unguarded.kind + case.unguarded.text)
        return [rule for rule, found in kinds.items() if found == {"harmless"}]

    @property
    def lost_capsules(self) -> list[Replayed]:
        """Those that do not replay to the same rule."""
        return [capsule for capsule in self.capsules if capsule.reason]

    @property
    def failed(self) -> bool:
        """Whether there is a fault of ours: a miss, a false alarm, a capsule that does not replay."""
        return bool(self.count(MISSED) or self.false_alarms or self.lost_capsules)

    def count(self, guarded: str) -> int:
        """How many mutants came to that."""
        return sum(case.guarded == guarded for case in self.cases)


class _Collector:
    """What a guard tells, with the call as data; nothing is raised, recorded or warned of."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def report(
        self, guard: Guard, violations: list[Violation], arguments: Mapping[str, Any], before: Known | None = None
    ) -> GuardError | None:
        call = capture(guard.contract, arguments, [violation.rule_id for violation in violations], before)
        self.violations += [replace(violation, call=call) for violation in violations]
        return None

    def error(self, _guard: Guard, violations: list[Violation], _arguments: Mapping[str, Any]) -> GuardError:
        self.violations += violations
        return GuardError("", violations)

    def values_judged(self, _guard: Guard, _judged: bool) -> None:
        return None

    def values_late(self, _guard: Guard, _judged: bool, _calls: int = 1) -> None:
        return None

    def told_late(self, guard: Guard, violations: list[Violation], effective: Policy) -> GuardError | None:
        del guard, effective
        self.violations += violations
        return None

    def repeated(self, _guard: Guard, _rule_ids: list[str]) -> bool:
        return False


class Checked:
    """The compiled check of a contract, which says what it finds."""

    def __init__(self, contract: Contract) -> None:
        self._collector = _Collector()
        every = Policy(A=Setting(Action.RAISE), B=Setting(Action.RAISE))
        guard = Guard(contract, operator=contract.name, site=contract.name, defaults=every, reporter=self._collector)
        self._parameters = guard.parameters
        self._check, self._check_result, _ = guard.checks(CLASSES)

    def __call__(self, call: Call) -> list[Violation]:
        """What the guard tells of a call, or of the result of one that has returned."""
        return self.told(call, build(call))

    def told(self, call: Call, arguments: dict[str, Any]) -> list[Violation]:
        """The same where its arguments are made already."""
        self._collector.violations.clear()
        result = arguments.pop("result", None) if call.entry is not None else None
        state = self._check(*(arguments.get(name) for name in self._parameters))
        if call.entry is not None and self._check_result is not None:
            self._check_result(result, state)
        return list(self._collector.violations)


class _Passing:
    """Has the guard look at calls that break nothing, and counts them."""

    def __init__(self, contract: str, check: Checked) -> None:
        self._contract = contract
        self._check = check
        self.alarms: list[FalseAlarm] = []
        self.changed = self.unbuildable = 0

    def valid(self, judgement: Judgement) -> None:
        for violation in self._check.told(judgement.call, dict(judgement.arguments))[:1]:
            self.alarms.append(FalseAlarm(self._contract, str(judgement.call), violation.summary))

    def change(self, judgement: Judgement | None) -> None:
        """A change of a valid call, whatever it breaks; None where it cannot be made here."""
        if judgement is None:
            self.unbuildable += 1
        elif not judgement.broken:
            self.changed += 1
            self.valid(judgement)


def inject(
    name: str,
    contract: Contract,
    operator: Operator | None,
    *,
    seed: int = 0,
    valid: int = 200,
    case: str | None = None,
    check: Checked | None = None,
) -> Injected:
    """Make valid calls and mutants of a contract, and try them with its guard and, where there is one, its operator.

    `check` takes the place of the contract's own.
    """
    started = time.perf_counter()
    made_of = ingredients(contract)
    checked = check or Checked(contract)
    right = valid_calls(made_of, seed, valid)
    refused: dict[str, int] = {}
    running = right
    unfit: dict[Call, str] = {}
    if operator is not None:
        right, running, refused = _runnable_first(operator, [*_specimens(contract, operator), *right], unfit)
        different = _varied(operator, running[:CHANGED_CALLS], unfit)
        right, running = [*different, *right], [*different, *running]
    late = returned(contract, right, seed)
    passing = _Passing(name, checked)
    for judgement in (*right, *late.kept):
        passing.valid(judgement)
    # Of a mutant more is learnt where its origin runs.
    made = mutants(made_of, running, seed, passing.change)
    if running != right and not all(made.values()):
        others = mutants(made_of, right, seed)
        made = {rule: kinds or others[rule] for rule, kinds in made.items()}
    made |= late.broken
    chosen = [mutant for kinds in made.values() for mutant in kinds if case is None or mutant.id == case]
    read = {rule.id: _read(made_of, rule.id) for rule in contract.rules}
    trials = [Trial(m.call, m.origin, read[m.rule]) for m in chosen if m.call.entry is None]
    found = outcomes(operator, trials, unfit) if operator is not None else _nowhere(len(trials))
    cases, replayed = [], {}
    for mutant in chosen:
        told = checked(mutant.call)
        cases.append(_case(name, mutant, told, _MADE_UP if mutant.call.entry is not None else next(found)))
        mine = next((violation for violation in told if violation.rule_id == mutant.rule), None)
        if mine is not None and mutant.rule not in replayed:
            replayed[mutant.rule] = retried(mine, contract)
    return Injected(
        contract=name,
        rules=len(made),
        valid_calls=len(right) + len(late.kept),
        changed_calls=passing.changed,
        unbuildable=passing.unbuildable,
        untried=tuple(untried(contract, right)),
        cases=tuple(cases),
        false_alarms=tuple(passing.alarms),
        unbroken=tuple(rule for rule, kinds in made.items() if not kinds),
        unbreakable=unbreakable(contract),
        capsules=tuple(replayed.values()),
        operator=operator.site if operator is not None else "",
        refused=refused,
        seconds=time.perf_counter() - started,
    )


def _runnable_first(
    operator: Operator, valid: list[Judgement], unfit: dict[Call, str]
) -> tuple[list[Judgement], list[Judgement], dict[str, int]]:
    """Valid calls, those first that the operator takes; those alone, if any; the errors of the others, counted."""
    # An operator may make contents for tensors that have none, and take as long as their sizes say.
    huge = [judgement for judgement in valid if is_huge(judgement.call)]
    valid = [judgement for judgement in valid if not is_huge(judgement.call)]
    found = list(outcomes(operator, [Trial(judgement.call, judgement.call) for judgement in valid], unfit))
    refused: dict[str, int] = {}
    for outcome in found:
        if outcome.kind not in _TAKEN:
            refused[outcome.text] = refused.get(outcome.text, 0) + 1
    # What comes to nothing shows no difference.
    order = sorted(range(len(valid)), key=lambda n: (found[n].kind not in _TAKEN, found[n].text == EMPTY))
    ordered = [valid[number] for number in order]
    return [*ordered, *huge], ordered[: len(valid) - sum(refused.values())] or ordered, refused


def _varied(operator: Operator, running: list[Judgement], unfit: dict[Call, str]) -> list[Judgement]:
    """Such calls with different elements in their tensors, as far as the operator takes them."""
    tried: dict[Call, tuple[Judgement, Call]] = {}
    for judgement in running:
        for way in (varied(judgement), varied(judgement, whole_numbers=False)):
            if way.call != judgement.call:
                tried.setdefault(way.call, (way, judgement.call))
    found: dict[Call, Judgement] = {}
    trials = [Trial(call, call) for call in tried]
    for (way, origin), outcome in zip(tried.values(), outcomes(operator, trials, unfit), strict=True):
        if outcome.kind in _TAKEN:
            found.setdefault(origin, way)
    return list(found.values())


def _specimens(contract: Contract, operator: Operator) -> list[Judgement]:
    """The call of the operator's specimen, where the contract has nothing against it."""
    call = operator.specimen_call()[0]
    judgement = None if call is None else judge(contract, call)
    return [] if judgement is None or judgement.broken else [judgement]


def _nowhere(count: int) -> Iterator[Outcome]:
    return iter([Outcome("not run", "no operator is known for this contract")] * count)


def _case(name: str, mutant: Mutant, violations: list[Violation], outcome: Outcome) -> Case:
    mine = next((violation for violation in violations if violation.rule_id == mutant.rule), None)
    told = mine or next(iter(violations), None)
    guarded = INTENDED if mine is not None else OTHER if violations else MISSED
    message = told.summary if told is not None else ""
    return Case(
        mutant.id, name, mutant.rule, mutant.kind, str(mutant.call), guarded, outcome, message, to_json(mutant.call)
    )


def _read(made_of: Ingredients, rule: str) -> tuple[str, ...]:
    """What a clear error about a rule would name: one of the arguments, or of their attributes, that it reads."""
    paths = [choice.path for clause in clauses_of(made_of.contract, rule) for choice in made_of.mentioned(clause)]
    steps = [step for path in paths for step in (path.root, *path.steps[-1:])]
    return tuple(dict.fromkeys(step for step in steps if isinstance(step, str)))


def summary(results: list[Injected]) -> dict[str, int]:
    """The figures of all contracts together."""
    cases = [case for result in results for case in result.cases]
    capsules = [capsule for result in results for capsule in result.capsules]
    caught = sum(case.guarded != MISSED for case in cases)
    return {
        "contracts": len(results),
        "rules": sum(result.rules for result in results),
        "rules_with_mutants": sum(result.rules - len(result.unbroken) for result in results),
        "mutants": len(cases),
        "caught": caught,
        "caught_by_intended_rule": sum(case.guarded == INTENDED for case in cases),
        "missed": len(cases) - caught,
        "valid_calls": sum(result.valid_calls for result in results),
        "changed_valid_calls": sum(result.changed_calls for result in results),
        "false_alarms": sum(len(result.false_alarms) for result in results),
        "capsules": len(capsules),
        "capsules_replayed": sum(not capsule.reason for capsule in capsules),
        "capsules_telling_of_another_element": sum(capsule.elsewhere for capsule in capsules),
        "largest_capsule": max((capsule.size for capsule in capsules), default=0),
        "capsules_over_2_kb": sum(capsule.size > TWO_KILOBYTES for capsule in capsules),
    }
