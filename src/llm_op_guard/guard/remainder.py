"""What Python still has to do where a native program has said yes: steps that no program can say, and what they need.

All that the program looked at is right. Of its steps those are taken again that tell something, a symbol, an assigned
name or a fact, that the others or a check after the call ask for; and of a tensor no more is looked at than that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from llm_op_guard.contract.model import AnySize, Dim, DtypeSet, Rest, RestOf, TensorType, Type, dim_symbol
from llm_op_guard.guard.plan import Plan, never_both
from llm_op_guard.guard.steps import Agree, Given, Match, Solve, Step, Telling


def remainder(plan: Plan, unsaid: Iterable[Step]) -> Plan:
    """The plan of these steps and of what they need, in the order that the steps have in the whole."""
    taking = _Taking(plan, unsaid)
    for name in plan.known:
        taking.ask(name, ())
    taking.follow()
    taken = [step for step in plan.steps if id(step) in taking.taken]
    # The sizes that a later step of a declaration compares, or solves, are those that its first step has kept.
    resumed = {(id(step.clause), step.path) for step in taken if isinstance(step, Agree | Solve)}
    return replace(
        plan,
        steps=tuple(
            step
            if taking.is_unsaid(step) or not isinstance(step, Match) or (id(step.clause), step.path) in resumed
            else _narrowed(step, taking.taken[id(step)])
            for step in taken
        ),
    )


class _Taking:
    """The steps that are taken, by identity, each with the names that it was asked for."""

    def __init__(self, plan: Plan, unsaid: Iterable[Step]) -> None:
        self.taken: dict[int, set[str]] = {}
        self._unsaid = frozenset(map(id, unsaid))
        self._waiting: list[Step] = []
        self._givers: dict[str, list[Step]] = {}
        self._tellers = {step.fact: step for step in plan.steps if isinstance(step, Telling)}
        self._declared = {(id(step.clause), step.path): step for step in plan.steps if isinstance(step, Match)}
        for step in plan.steps:
            for name in step.gives:
                self._givers.setdefault(name, []).append(step)
        self.take(*filter(self.is_unsaid, plan.steps))

    def is_unsaid(self, step: Step) -> bool:
        """Whether a program does not say this step."""
        return id(step) in self._unsaid

    def take(self, *steps: Step) -> None:
        """Take these steps; what they need is taken by `follow`."""
        for step in steps:
            if id(step) not in self.taken:
                self.taken[id(step)] = set()
                self._waiting.append(step)

    def ask(self, name: str, given: tuple[Given, ...]) -> None:
        """Take what gives a name its value where these facts hold: one step where one surely does, else all that may.

        They agree: where they do not, a program says no.
        """
        self._take_from(self._givers.get(name, []), name, given)

    def follow(self) -> None:
        """Take what the steps need that are taken."""
        while self._waiting:
            step = self._waiting.pop()
            self.take(*(self._tellers[given.name] for given in step.given))
            if isinstance(step, Agree | Solve):
                self.take(self._declared[id(step.clause), step.path])
            for name in step.needs:
                self.ask(name, step.given)
            # What a program has not seen may differ from what it has: that is compared here.
            for name in step.gives if self.is_unsaid(step) else ():
                said = [giver for giver in self._givers[name] if not self.is_unsaid(giver)]
                self._take_from(said, name, step.given)

    def _take_from(self, givers: list[Step], name: str, given: tuple[Given, ...]) -> None:
        sure = next((step for step in givers if name in step.surely and set(step.given) <= set(given)), None)
        for giver in [sure] if sure is not None else givers:
            if not never_both(giver.given, given):
                self.take(giver)
                self.taken[id(giver)].add(name)


def _narrowed(step: Match, names: set[str]) -> Match:
    """A step that tells these names and looks at nothing besides, where it only tells what is certain."""
    only = step.type.alternatives[0]
    if len(step.type.alternatives) > 1 or not isinstance(only, TensorType) or not step.certain:
        return step
    dims = only.dims if any(dim_symbol(dim) in names for dim in only.dims or ()) else None
    tensor = replace(
        only,
        dtypes=only.dtypes if only.dtype_symbol in names else (DtypeSet("any"),),
        dims=None if dims is None else tuple(_dim_asked_for(dim, names) for dim in dims),
        devices=only.devices if only.device_symbol in names else None,
    )
    told = Type((tensor,), step.type.text)
    return replace(step, type=told, gives=step.gives & names, surely=step.surely & names)


def _dim_asked_for(dim: Dim, names: set[str]) -> Dim:
    if dim_symbol(dim) in names:
        return dim
    return Rest(None) if isinstance(dim, Rest | RestOf) else AnySize()
