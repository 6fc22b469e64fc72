"""From the violations of one call to what the policy says: raise, warn, record."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from llm_op_guard.contract.model import Contract
from llm_op_guard.errors import GuardError, GuardWarning
from llm_op_guard.guard.call import Call
from llm_op_guard.guard.capture import Known, capture
from llm_op_guard.guard.context import all_arguments, call_site, tensor_metadata, tensor_named
from llm_op_guard.guard.guard import Guard
from llm_op_guard.guard.ledger import last_seen
from llm_op_guard.guard.violation import Violation, error_class
from llm_op_guard.log import log
from llm_op_guard.policy import Action, Policy, current, is_off
from llm_op_guard.report.record import Record
from llm_op_guard.report.text import render
from llm_op_guard.waivers import Waiver, Waivers


class Subject(Protocol):
    """What broke its contract: a guard, or what was verified."""

    @property
    def contract(self) -> Contract:
        """What it should have kept."""

    @property
    def operator(self) -> str:
        """What reports call it."""

    @property
    def site(self) -> str:
        """Where it is."""


class Dispatcher:
    """Acts on violations, save those that are waived; keeps all of them in `record`."""

    def __init__(self, record: Record, waivers: Waivers) -> None:
        self.record = record
        self.waivers = waivers
        # By guard, not by its name: a function defined anew is another site.
        self._warned: WeakKeyDictionary[Guard, set[str]] = WeakKeyDictionary()

    def report(
        self, guard: Guard, violations: list[Violation], arguments: Mapping[str, Any], before: Known | None = None
    ) -> GuardError | None:
        """Return the error to raise, warn or only record, as the policy says for each violation's class.

        A suspect rule never does more than warn. Whatever is warned of is warned of once per rule and site. What is
        waived is recorded and nothing else.
        """
        effective = current(guard.defaults, guard.names)
        acted = [violation for violation in violations if _action(effective, violation) is not Action.OFF]
        whole = all_arguments(arguments)
        dressed = _dressed(guard, [self._waived(guard, violation) for violation in acted], whole, before)
        return self._act(guard, dressed, effective)

    def told_late(self, guard: Guard, violations: list[Violation], effective: Policy) -> GuardError | None:
        """As `report`, for a call that is over, under the policy that held then; the violations say where it was."""
        return None if is_off() else self._act(guard, [self._waived(guard, v) for v in violations], effective)

    def _act(self, guard: Guard, violations: list[Violation], effective: Policy) -> GuardError | None:
        for violation in violations:
            self.record.add(violation)
        told = [(v, _action(effective, v)) for v in violations if v.waived is None]
        if any(action is Action.RAISE for _, action in told):
            return _error([violation for violation, _ in told])
        fresh = []
        warned = self._warned.setdefault(guard, set())
        for violation, action in told:
            if action is Action.WARN and violation.rule_id not in warned:
                warned.add(violation.rule_id)
                fresh.append(violation)
            else:
                log().info("%s", violation.summary)
        if fresh:
            self._warn(fresh)
        return None

    def error(self, guard: Guard, violations: list[Violation], arguments: Mapping[str, Any]) -> GuardError:
        """The error for the violations of one call; nothing is recorded."""
        return _error(_dressed(guard, violations, all_arguments(arguments)))

    def verified(
        self, subject: Subject, violations: list[Violation], arguments: Mapping[str, Any]
    ) -> GuardError | None:
        """Return the error to raise for violations that somebody asked for; suspect rules alone warn, each time.

        Policies are about calls, and are not asked. What is waived is recorded and nothing else.
        """
        dressed = _dressed(subject, [self._waived(subject, violation) for violation in violations], arguments)
        for violation in dressed:
            self.record.add(violation)
        told = [violation for violation in dressed if violation.waived is None]
        if any(violation.certain for violation in told):
            return _error(told)
        if told:
            self._warn(told)
        return None

    def refused(self, subject: Subject, violation: Violation) -> GuardError:
        """The error for what leaves nothing to go on with, waived or not; it is recorded."""
        (dressed,) = _dressed(subject, [violation], {})
        self.record.add(dressed)
        return _error([dressed])

    def repeated(self, guard: Guard, rule_ids: list[str]) -> bool:
        """Whether all of these suspect rules have been warned about here before; counts them if so."""
        if not self._warned.get(guard, set()).issuperset(rule_ids):
            return False
        sink = self.record.sink
        if sink is not None and not all(sink.knows(guard.site, rule_id) for rule_id in rule_ids):
            return False  # the file wants a diagnosis
        found = [self.waivers.matching(guard.site, rule_id) for rule_id in rule_ids]
        if any(waiver is not None and not waiver.expired for waiver in found):
            return False  # what is waived is marked, which takes its explanation
        for rule_id in rule_ids:
            self.record.count(guard.site, rule_id)
        return True

    def values_judged(self, guard: Guard, judged: bool) -> None:
        """Count a call of a guard whose policy leaves values out of some calls."""
        self.record.count_values(guard.site, judged)

    def values_late(self, guard: Guard, judged: bool, calls: int = 1) -> None:
        """Count calls of a guard whose verdict was not waited for."""
        self.record.count_late(guard.site, judged, calls)

    def _waived(self, subject: Subject, violation: Violation) -> Violation:
        waiver = self.waivers.matching(subject.site, violation.rule_id)
        if waiver is None:
            return violation
        if waiver.expired:
            _say_expired(waiver)
            return violation
        return replace(violation, waived=waiver.reason)

    def _warn(self, violations: list[Violation]) -> None:
        message = _text(violations)
        log().warning("%s", message)
        site = violations[0].call_site
        # Explicit, because the frames between here and the caller are no fixed number.
        file, line = (site.file, site.line) if site is not None else ("<unknown>", 1)
        warnings.warn_explicit(GuardWarning(message), None, file, line)


def _say_expired(waiver: Waiver) -> None:
    if waiver.until is None or not waiver.first_told_expired():
        return
    message = (
        f"the waiver of rule {waiver.rule!r} at {waiver.site} expired on {waiver.until.isoformat()}, so the rule holds "
        f"again; correct the call, or give the waiver another date (its reason: {waiver.reason})"
    )
    log().warning("%s", message)
    # Where warnings are errors, what becomes of the violation must not depend on this one.
    with contextlib.suppress(GuardWarning):
        warnings.warn(GuardWarning(message), stacklevel=2)


def _action(effective: Policy, violation: Violation) -> Action:
    action = effective.action(violation.cost_class)
    return Action.WARN if action is Action.RAISE and not violation.certain else action


def _dressed(
    subject: Subject, violations: list[Violation], arguments: Mapping[str, Any], before: Known | None = None
) -> list[Violation]:
    """The violations with what surrounds them: the arguments are all that there are."""
    caller, tensors = call_site(), tensor_metadata(subject.contract, arguments)
    call = _captured(subject.contract, arguments, [violation.rule_id for violation in violations], before)
    return [
        replace(
            violation,
            operator=subject.operator,
            site=subject.site,
            call_site=caller,
            tensors=tensors,
            call=call,
            last_seen=last_seen(tensor_named(violation.argument, subject.contract, arguments)),
        )
        for violation in violations
    ]


def _captured(contract: Contract, arguments: Mapping[str, Any], broken: list[str], before: Known | None) -> Call | None:
    try:
        return capture(contract, arguments, broken, before)
    except Exception:  # arguments that do not even let themselves be described: the diagnosis goes without
        log().debug("a call could not be kept as data", exc_info=True)
        return None


def _error(violations: list[Violation]) -> GuardError:
    return error_class(violations)(_text(violations), violations)


def _text(violations: list[Violation]) -> str:
    try:
        return render(violations)
    except Exception:  # a diagnosis must never replace the failure it describes
        log().exception("llm-op-guard could not render a diagnosis")
        return "; ".join(f"{v.operator}: rule {v.rule_id} is broken" for v in violations)
