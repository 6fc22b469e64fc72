"""All that one run found, and its JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from llm_op_guard.benching.calls import Measured
from llm_op_guard.benching.growth import Curve
from llm_op_guard.benching.model import Cost
from llm_op_guard.benching.start import Start


@dataclass
class Findings:
    """Where it ran, what was measured, and how long that took."""

    machine: dict[str, Any]
    quick: bool
    calls: list[Measured]
    arguments: Curve
    rules: Curve
    size: Curve
    model: list[Cost]
    start: Start
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The same in dicts and lists. An estimate is {value, low, high}; names say the units."""
        return dataclasses.asdict(self)
