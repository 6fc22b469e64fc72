"""From the violations of one call to what the policy says: raise, warn, record."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llm_op_guard.errors import GUARD_ERRORS, GuardError, GuardWarning
from llm_op_guard.guard.context import call_site, tensor_metadata
from llm_op_guard.guard.guard import Guard
from llm_op_guard.guard.violation import Violation
from llm_op_guard.policy import Action, current
from llm_op_guard.report.record import Record
from llm_op_guard.report.text import render

logger = logging.getLogger("llm_op_guard")


class Dispatcher:
    """Acts on violations; keeps all of them in `record`."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def report(self, guard: Guard, violations: list[Violation], arguments: Mapping[str, Any]) -> GuardError | None:
        """Return the error to raise, warn or only record, as the policy says for each violation's class.

        A suspect rule never does more than warn. Whatever is warned of is warned of once per rule and site.
        """
        actions = self._actions(guard, violations)
        told = [_dressed(guard, v, arguments) for v in violations if actions[v.rule_id] is not Action.OFF]
        for violation in told:
            self.record.add(violation)
        if any(actions[violation.rule_id] is Action.RAISE for violation in told):
            return _error(told)
        fresh = [v for v in told if actions[v.rule_id] is Action.WARN and not guard.warned[v.rule_id]]
        guard.warned.update(violation.rule_id for violation in told)
        for violation in told:
            if violation not in fresh:
                logger.info("%s", violation.summary)
        if fresh:
            self._warn(fresh)
        return None

    def repeated(self, guard: Guard, rule_ids: list[str]) -> None:
        """Count suspect rules that have been warned about before."""
        for rule_id in rule_ids:
            self.record.count(guard.site, rule_id)

    def _actions(self, guard: Guard, violations: list[Violation]) -> dict[str, Action]:
        effective = current(guard.defaults)
        actions: dict[str, Action] = {}
        for violation in violations:
            action = effective.action(violation.cost_class)
            suspect = not violation.certain and action is Action.RAISE
            actions[violation.rule_id] = Action.WARN if suspect else action
        return actions

    def _warn(self, violations: list[Violation]) -> None:
        message = _text(violations)
        logger.warning("%s", message)
        site = violations[0].call_site
        # Explicit, because the frames between here and the caller are no fixed number.
        file, line = (site.file, site.line) if site is not None else ("<unknown>", 1)
        warnings.warn_explicit(GuardWarning(message), None, file, line)


def _dressed(guard: Guard, violation: Violation, arguments: Mapping[str, Any]) -> Violation:
    return replace(
        violation,
        operator=guard.operator,
        site=guard.site,
        call_site=call_site(),
        tensors=tensor_metadata(guard.contract, arguments),
    )


def _error(violations: list[Violation]) -> GuardError:
    named = next((v.error for v in violations if v.error is not None), None)
    return GUARD_ERRORS[named or "ValueError"](_text(violations), violations)


def _text(violations: list[Violation]) -> str:
    try:
        return render(violations)
    except Exception:  # a diagnosis must never replace the failure it describes
        logger.exception("llm-op-guard could not render a diagnosis")
        return "; ".join(f"{v.operator}: rule {v.rule_id} is broken" for v in violations)
