"""From the violations of one call to what the policy says: raise, warn, record."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from llm_op_guard.errors import GUARD_ERRORS, GuardError, GuardWarning
from llm_op_guard.guard.context import all_arguments, call_site, tensor_metadata
from llm_op_guard.guard.guard import Guard
from llm_op_guard.guard.violation import Violation
from llm_op_guard.policy import Action, Policy, current
from llm_op_guard.report.record import Record
from llm_op_guard.report.text import render

logger = logging.getLogger("llm_op_guard")


class Dispatcher:
    """Acts on violations; keeps all of them in `record`."""

    def __init__(self, record: Record) -> None:
        self.record = record
        # By guard, not by its name: a function defined anew is another site.
        self._warned: WeakKeyDictionary[Guard, set[str]] = WeakKeyDictionary()

    def report(self, guard: Guard, violations: list[Violation], arguments: Mapping[str, Any]) -> GuardError | None:
        """Return the error to raise, warn or only record, as the policy says for each violation's class.

        A suspect rule never does more than warn. Whatever is warned of is warned of once per rule and site.
        """
        effective = current(guard.defaults)
        acted = [(violation, _action(effective, violation)) for violation in violations]
        acted = [(violation, action) for violation, action in acted if action is not Action.OFF]
        told = _dressed(guard, [violation for violation, _ in acted], arguments)
        for violation in told:
            self.record.add(violation)
        if any(action is Action.RAISE for _, action in acted):
            return _error(told)
        fresh = []
        warned = self._warned.setdefault(guard, set())
        for violation, (_, action) in zip(told, acted, strict=True):
            if action is Action.WARN and violation.rule_id not in warned:
                warned.add(violation.rule_id)
                fresh.append(violation)
            else:
                logger.info("%s", violation.summary)
        if fresh:
            self._warn(fresh)
        return None

    def error(self, guard: Guard, violations: list[Violation], arguments: Mapping[str, Any]) -> GuardError:
        """The error for the violations of one call; nothing is recorded."""
        return _error(_dressed(guard, violations, arguments))

    def repeated(self, guard: Guard, rule_ids: list[str]) -> bool:
        """Whether all of these suspect rules have been warned about here before; counts them if so."""
        if not self._warned.get(guard, set()).issuperset(rule_ids):
            return False
        for rule_id in rule_ids:
            self.record.count(guard.site, rule_id)
        return True

    def _warn(self, violations: list[Violation]) -> None:
        message = _text(violations)
        logger.warning("%s", message)
        site = violations[0].call_site
        # Explicit, because the frames between here and the caller are no fixed number.
        file, line = (site.file, site.line) if site is not None else ("<unknown>", 1)
        warnings.warn_explicit(GuardWarning(message), None, file, line)


def _action(effective: Policy, violation: Violation) -> Action:
    action = effective.action(violation.cost_class)
    return Action.WARN if action is Action.RAISE and not violation.certain else action


def _dressed(guard: Guard, violations: list[Violation], arguments: Mapping[str, Any]) -> list[Violation]:
    """The violations with what surrounds the call."""
    caller, tensors = call_site(), tensor_metadata(guard.contract, all_arguments(arguments))
    return [
        replace(violation, operator=guard.operator, site=guard.site, call_site=caller, tensors=tensors)
        for violation in violations
    ]


def _error(violations: list[Violation]) -> GuardError:
    named = next((v.error for v in violations if v.error is not None), None)
    return GUARD_ERRORS[named or "ValueError"](_text(violations), violations)


def _text(violations: list[Violation]) -> str:
    try:
        return render(violations)
    except Exception:  # a diagnosis must never replace the failure it describes
        logger.exception("llm-op-guard could not render a diagnosis")
        return "; ".join(f"{v.operator}: rule {v.rule_id} is broken" for v in violations)
