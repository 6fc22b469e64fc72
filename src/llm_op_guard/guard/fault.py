"""A broken rule before it is dressed as a Violation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llm_op_guard.contract.model import Clause
from llm_op_guard.guard.reads import Read


@dataclass
class Fault:
    """What one rule found wrong. `more` are items of the same list that break it as well."""

    clause: Clause
    rule_id: str
    argument: str | None
    observed: str
    expected: str
    names: set[str]
    aspect: str | None = None
    is_test: bool = False
    more: int = 0

    @property
    def certain(self) -> bool:
        """Whether it is wrong for sure."""
        return self.is_test or self.clause.certain

    @property
    def told(self) -> str:
        """What was observed, and how many more there are."""
        if not self.more:
            return self.observed
        return f"{self.observed} (and {self.more} more item{'s' * (self.more > 1)})"

    def spoils(self, read: Read) -> bool:
        """Whether what is read is just what is wrong here."""
        if str(read.path) != self.argument:
            return False
        if read.aspect == "value":
            return self.aspect in ("type", "dtype", "shape")
        return self.aspect in ("type", read.aspect)


def first_of_each_rule(faults: Iterable[Fault]) -> list[Fault]:
    """Of the faults of a list's items, the first of each rule, which counts the others."""
    found: dict[str, Fault] = {}
    for fault in faults:
        first = found.setdefault(fault.rule_id, fault)
        if first is not fault:
            first.more += 1 + fault.more
    return list(found.values())
