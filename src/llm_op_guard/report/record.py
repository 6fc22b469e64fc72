"""The in-memory record of violations: what happened, and how often, bounded."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque

from llm_op_guard.guard.violation import Violation
from llm_op_guard.report.sink import JsonLines

_KEPT = 1000


class Record:
    """The last violations of the process and a count of all of them by site and rule.

    `sink` is the file to which they are written as well, if there is one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[Violation] = deque(maxlen=_KEPT)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._false_alarms: Counter[tuple[str, str]] = Counter()
        self._values: Counter[tuple[str, bool]] = Counter()
        self._late: Counter[tuple[str, bool]] = Counter()
        self.sink: JsonLines | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._in_a_fork)

    def add(self, violation: Violation) -> None:
        """Keep one violation."""
        with self._lock:
            self._kept.append(violation)
            self._counts[violation.site, violation.rule_id] += 1
        if self.sink is not None:
            self.sink.add(violation)

    def count(self, site: str, rule_id: str) -> None:
        """Count a violation that was told before, without keeping it again."""
        with self._lock:
            self._counts[site, rule_id] += 1
        if self.sink is not None:
            self.sink.count(site, rule_id)

    def false_alarm(self, violation_or_rule: Violation | str, *, site: str = "", note: str = "") -> None:
        """Count that a rule was broken by a call that was right: hand in the violation, or the rule id and the site.

        It is written to the file of `record_to` too, with the note, and counted by `llm-op-guard report`.
        """
        if isinstance(violation_or_rule, Violation):
            rule_id, site = violation_or_rule.rule_id, site or violation_or_rule.site
        elif isinstance(violation_or_rule, str) and violation_or_rule:
            rule_id = violation_or_rule
        else:
            raise TypeError(
                f"false_alarm takes a violation, such as error.violations[0], or the id of a rule; "
                f"got {type(violation_or_rule).__name__}"
            )
        with self._lock:
            self._false_alarms[site, rule_id] += 1
        if self.sink is not None:
            self.sink.false_alarm(rule_id, site, note)

    def count_values(self, site: str, judged: bool) -> None:
        """Count a call whose values were judged, or left out because the policy gives class B a pace."""
        with self._lock:
            self._values[site, judged] += 1

    @property
    def values_judged(self) -> dict[str, tuple[int, int]]:
        """By site, in how many calls values were judged and in how many they were left out, where class B has a pace.

        Rules that protect a memory access are judged in all of them.
        """
        with self._lock:
            return {site: (self._values[site, True], self._values[site, False]) for site, _ in self._values}

    def count_late(self, site: str, judged: bool, calls: int = 1) -> None:
        """Count calls whose verdict on values was not waited for: whether it came, or nothing could be asked."""
        with self._lock:
            self._late[site, judged] += calls

    @property
    def values_late(self) -> dict[str, tuple[int, int]]:
        """By site, of how many calls the verdict on values came later, and of how many none was asked for.

        The latter is so where the device is further behind than the queue is long (`B="async"`), or a graph is captured
        that cannot hold the question. Each replay of a graph counts as a call.
        """
        with self._lock:
            return {site: (self._late[site, True], self._late[site, False]) for site, _ in self._late}

    @property
    def false_alarms(self) -> dict[tuple[str, str], int]:
        """How many false alarms were reported of each (site, rule id); the site is empty where nobody named it."""
        with self._lock:
            return dict(self._false_alarms)

    @property
    def violations(self) -> list[Violation]:
        """The last violations (at most 1000), oldest first."""
        with self._lock:
            return list(self._kept)

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """How often each (site, rule id) was broken."""
        with self._lock:
            return dict(self._counts)

    @property
    def total(self) -> int:
        """How many violations there were."""
        with self._lock:
            return sum(self._counts.values())

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self._counts.clear()
            self._false_alarms.clear()
            self._values.clear()
            self._late.clear()

    def _in_a_fork(self) -> None:
        # A thread that is not in the child may have held it.
        self._lock = threading.Lock()
