"""The in-memory record of violations: what happened, and how often, bounded."""

from __future__ import annotations

import threading
from collections import Counter, deque

from llm_op_guard.guard.violation import Violation

_KEPT = 1000


class Record:
    """The last violations of the process and a count of all of them by site and rule."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[Violation] = deque(maxlen=_KEPT)
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, violation: Violation) -> None:
        """Keep one violation."""
        with self._lock:
            self._kept.append(violation)
            self._counts[violation.site, violation.rule_id] += 1

    def count(self, site: str, rule_id: str) -> None:
        """Count a violation that was told before, without keeping it again."""
        with self._lock:
            self._counts[site, rule_id] += 1

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
