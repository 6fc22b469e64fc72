"""Contract → Plan: the steps of a check in an order in which every step finds what it needs.

Statements of a contract have no order; a check has. Steps are put behind those that give the names they need. A
contract whose steps wait for each other in a circle is refused.
"""

from __future__ import annotations

import ast
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from llm_op_guard.contract.model import (
    Clause,
    Contract,
    CostClass,
    Declare,
    Like,
    Remember,
    TensorType,
)
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.vocabulary import FUNCTIONS
from llm_op_guard.contract.walk import paths_in_type
from llm_op_guard.frozen import frozen
from llm_op_guard.guard.steps import (
    Agree,
    Decide,
    Demand,
    Given,
    Keep,
    Let,
    Match,
    Read,
    Solve,
    Step,
    Telling,
    expressions,
    names_read,
    steps_of,
)
from llm_op_guard.policy import CLASSES


@frozen
class Plan:
    """The steps of one check in order: those before the call, or (`after_call`) those that wait for the result.

    `parameters` are the arguments that the check needs, in signature order. What the check before the call hands on
    to the check after it: the symbols and assigned names `known`, what the tensors at `snapshots` looked like, and
    the arguments `hands_on`. `has_later` says whether there is a check after it, `forgets` which facts about which
    objects are not known while the call is under way: those that the check after it may remember.
    """

    contract: Contract
    steps: tuple[Step, ...]
    parameters: tuple[str, ...]
    after_call: bool = False
    known: tuple[str, ...] = ()
    snapshots: tuple[Path, ...] = ()
    hands_on: tuple[str, ...] = ()
    has_later: bool = False
    forgets: tuple[tuple[Path, tuple[str, ...]], ...] = ()

    @cached_property
    def read_once(self) -> frozenset[str]:
        """The tensors, as they are written, whose extremes more than one function asks for."""
        asked = Counter(
            ast.unparse(call.args[0])
            for step in self.steps
            for expr in expressions(step)
            for call in ast.walk(expr.node)
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id in FUNCTIONS
            and FUNCTIONS[call.func.id].of_extremes
        )
        return frozenset(tensor for tensor, times in asked.items() if times > 1)

    def with_parameters(self, parameters: tuple[str, ...]) -> Plan:
        """The same steps in a check that takes these arguments, some of which it may not use."""
        return replace(self, parameters=parameters)


def plan_check(contract: Contract, classes: Iterable[CostClass], *, after_call: bool = False) -> Plan | None:
    """The plan for the rules of these cost classes, or None when there are none at that time.

    Of class C there is none: imported predicates are never asked in a call. Made once for each contract object, which
    keeps it. Raises ContractError when statements need each other in a circle.
    """
    wanted = frozenset(classes) & frozenset(CLASSES)
    if (wanted, after_call) not in contract.plans:
        contract.plans[wanted, after_call] = _planned(contract, wanted, after_call)
    plan: Plan | None = contract.plans[wanted, after_call]
    return plan


def check_order(contract: Contract) -> None:
    """Raise ContractError when statements need each other in a circle, those of class C among them."""
    # Without the rules about values others may have to give the names that are needed.
    switched_on: tuple[tuple[CostClass, ...], ...] = (("A",), CLASSES)
    for classes in switched_on:
        for after_call in (False, True):
            plan_check(contract, classes, after_call=after_call)
    _ordered(list(steps_of(contract, [c for c in contract.clauses if not c.after_call])), contract, frozenset())


def _planned(contract: Contract, wanted: frozenset[CostClass], after_call: bool) -> Plan | None:
    clauses = [c for c in contract.clauses if c.cost_class in wanted]
    later = [c for c in clauses if c.after_call]
    if not clauses or (after_call and not later):
        return None
    before = list(steps_of(contract, [c for c in clauses if not c.after_call]))
    after = list(steps_of(contract, later))
    # What the check before the call knows of the names that the one after it meets again.
    earlier = frozenset().union(*(step.gives for step in before))
    known = earlier & frozenset().union(*(step.needs | step.gives for step in after))
    used = frozenset().union(*map(names_read, (*before, *after)))
    # A parameter may be called result; what the contract calls so is what was returned.
    parameters = tuple(name for name in contract.parameters if name in used and name != "result")
    return Plan(
        contract,
        tuple(_ordered(after, contract, known) if after_call else _ordered(before, contract, frozenset())),
        parameters,
        after_call,
        known=tuple(sorted(known)),
        snapshots=tuple(dict.fromkeys(path for clause in later for path in _paths_at_entry(clause))),
        # After the call all arguments are at hand again, so that explain can say where a symbol got its value.
        hands_on=parameters if later else (),
        has_later=bool(later),
        forgets=tuple(forgotten(later)),
    )


def forgotten(clauses: Iterable[Clause]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Which facts about which arguments a call may change."""
    for clause in clauses:
        if isinstance(clause.statement, Remember) and clause.statement.path.root != "result":
            yield clause.statement.path, tuple(name for name, _ in clause.statement.facts)


def _paths_at_entry(clause: Clause) -> Iterator[Path]:
    if isinstance(clause.statement, Declare):
        yield from (path for path in paths_in_type(clause.statement.type) if path.root != "result")


# ---------------------------------------------------------------- order


# Far above any real contract; what is done with them is not always linear in their number.
MAX_STEPS = 6000

_KINDS = (Decide, Read, Match, Let, Solve, Agree, Demand, Keep)


def _ordered(steps: list[Step], contract: Contract, known: frozenset[str]) -> list[Step]:
    if len(steps) > MAX_STEPS:
        problem = f"the contract is too large: a check of it has more than {MAX_STEPS} steps"
        raise contract.source.error(problem, steps[MAX_STEPS].clause.statement.place)
    order = _Order(steps, known)
    while order.waiting:
        step = order.next()
        if step is None:
            waiting = list(order.waiting.values())
            stuck = waiting[0]
            names = sorted({n for s in waiting for n in s.needs & {g for w in waiting for g in w.gives}})
            raise contract.source.error(
                f"cannot be put in order: {', '.join(names) or 'a branch'} is needed to decide what gives its value",
                stuck.test.node if isinstance(stuck, Decide) else stuck.clause.statement.place,
            )
        order.take(step)
    return order.done


class _Order:
    """Steps that wait for their turn, by the number that says whose turn is first, and those that have had it."""

    def __init__(self, steps: list[Step], known: frozenset[str]) -> None:
        self.known = known
        self.waiting = dict(enumerate(sorted(steps, key=_turn)))
        self.done: list[Step] = []
        self._number = {id(step): number for number, step in self.waiting.items()}
        self._facts: set[str] = set()
        # The steps that may still give a name, those that wait for a name or fact, those that give a name for sure.
        self._givers: dict[str, list[Step]] = {}
        self._waiting_for: dict[str, list[Step]] = {}
        self._surely: dict[str, list[Step]] = {}
        for step in self.waiting.values():
            for name in step.gives:
                self._givers.setdefault(name, []).append(step)
            for name in {*step.needs, *step.gives, *(given.name for given in step.given)}:
                self._waiting_for.setdefault(name, []).append(step)
        # The numbers of those that wait for nothing any more.
        self._free: list[int] = [number for number, step in self.waiting.items() if self._is_free(step)]

    def next(self) -> Step | None:
        """The first step that can be taken now, if any."""
        while self._free:
            if self._free[0] in self.waiting:
                return self.waiting[self._free[0]]
            heapq.heappop(self._free)
        opened = [step for step in self.waiting.values() if self._is_open(step)]
        return (
            next((step for step in opened if self._is_settled(step)), None)
            # Solutions that wait only for each other: whichever finds its operands at run time goes through.
            or next((s for s in opened if isinstance(s, Solve) and not self._is_pending(s, but_solve=True)), None)
        )

    def take(self, step: Step) -> None:
        del self.waiting[self._number[id(step)]]
        if not (
            isinstance(step, Solve) and sure(step.symbol, step.given, self._surely.get(step.symbol, ()), self.known)
        ):
            self.done.append(step)
            for name in step.surely:
                self._surely.setdefault(name, []).append(step)
        told = set(step.gives)
        for name in step.gives:
            self._givers[name] = [other for other in self._givers[name] if other is not step]
        if isinstance(step, Telling) and step.fact is not None:
            self._facts.add(step.fact)
            told.add(step.fact)
        for other in (other for name in told for other in self._waiting_for.get(name, ())):
            if self._number[id(other)] in self.waiting and self._is_free(other):
                heapq.heappush(self._free, self._number[id(other)])

    def _is_open(self, step: Step) -> bool:
        return all(given.name in self._facts for given in step.given)

    def _is_free(self, step: Step) -> bool:
        return self._is_open(step) and not self._is_pending(step)

    def _is_pending(self, step: Step, *, but_solve: bool = False) -> bool:
        """Whether a step that might give a needed name has not been taken yet."""
        for name in step.needs:
            for other in self._givers.get(name, ()):
                if _comes_first(other, step) and not (but_solve and isinstance(other, Solve)):
                    return True
        # A solution is the last resort: every direct sighting of its symbol comes first.
        return isinstance(step, Solve) and any(
            not isinstance(other, Solve) and _comes_first(other, step) for other in self._givers.get(step.symbol, ())
        )

    def _is_settled(self, step: Step) -> bool:
        return not isinstance(step, Solve) and all(self._is_sure(name, step) for name in step.needs)

    def _is_sure(self, name: str, step: Step) -> bool:
        return sure(name, step.given, self._surely.get(name, ()), self.known)


def _comes_first(other: Step, step: Step) -> bool:
    return other is not step and _tier(other) <= _tier(step) and not never_both(step.given, other.given)


def _turn(step: Step) -> tuple[tuple[bool, CostClass, bool], bool, bool, int]:
    """What comes first where nothing else decides: the cheap, the certain, plain arguments, the kinds in order."""
    return _tier(step), not step.certain, not _is_scalar(step), _KINDS.index(type(step))


def _tier(step: Step) -> tuple[bool, CostClass, bool]:
    """A step never waits for one of a later tier: what is traced too comes before what is not, what is kept last."""
    return isinstance(step, Keep), step.clause.cost_class, step.clause.eager


def _is_scalar(step: Step) -> bool:
    """Whether a step declares a plain argument: what is known to be a number can be compared without more ado."""
    return isinstance(step, Match) and not any(isinstance(a, TensorType | Like) for a in step.type.alternatives)


def sure(name: str, given: tuple[Given, ...], done: Sequence[Step], known: frozenset[str]) -> bool:
    """Whether a name has a value for certain wherever these facts hold."""
    if name in known:
        return False
    return any(name in s.surely and set(s.given) <= set(given) for s in done)


def never_both(a: tuple[Given, ...], b: tuple[Given, ...]) -> bool:
    """Whether two steps stand in branches that exclude each other."""
    wanted = {g.name: g.value for g in a}
    return any(wanted.get(g.name, g.value) != g.value for g in b)
