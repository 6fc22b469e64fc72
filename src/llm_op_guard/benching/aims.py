"""The aims that were set, and what a run says of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from llm_op_guard.benching.calls import BY_HAND, JAXTYPING, NATIVE, PYTHON, Measured
from llm_op_guard.benching.estimate import Estimate
from llm_op_guard.benching.findings import Findings
from llm_op_guard.benching.growth import Curve
from llm_op_guard.benching.model import A, Cost
from llm_op_guard.benching.start import Start
from llm_op_guard.frozen import frozen


@frozen
class Aim:
    """One aim: at most `at_most`, told in `unit`. Without an estimate it was not measured, for the reason in `why`.

    `judged_by` is the end of the interval that has to be below: `value`, or the upper end.
    """

    what: str
    unit: str
    at_most: float
    measured: Estimate | None
    judged_by: Literal["value", "high"] = "value"
    why: str = ""

    @property
    def reached(self) -> bool | None:
        """None where it was not measured."""
        return None if self.measured is None else self.missed_by <= 0

    @property
    def missed_by(self) -> float:
        """How far above the aim, in its unit; nothing or less where it was reached."""
        if self.measured is None:
            raise ValueError(f"not measured: {self.what}")
        return (self.measured.value if self.judged_by == "value" else self.measured.high) - self.at_most


def aims(findings: Findings) -> list[Aim]:
    """All that were set, in the order in which they were."""
    rope = next(measured for measured in findings.calls if measured.operator == "RoPE")
    return [*_calls(rope), *_decode(findings.model), _size(findings.size), *_start(findings.start)]


def _calls(rope: Measured) -> Iterator[Aim]:
    for what, above, below, at_most in (
        ("RoPE, native guard ÷ ifs by hand", NATIVE, BY_HAND, 0.35),
        ("RoPE, guard in Python ÷ ifs by hand", PYTHON, BY_HAND, 1.3),
        ("RoPE, native guard ÷ jaxtyping+beartype", NATIVE, JAXTYPING, 0.01),
    ):
        missing = [variant.left_out for variant in rope.variants if variant.name in (above, below)]
        why = rope.left_out or "; ".join(filter(None, missing))
        yield Aim(what, "", at_most, rope.ratios.get(f"{above} / {below}"), why=why)


def _decode(costs: list[Cost]) -> Iterator[Aim]:
    for cost in costs:
        if cost.work.phase == "decode" and cost.work.model != "tiny":
            step = cost.ratios[A]["step"]
            added = Estimate(*((end - 1) * 100 for end in (step.value, step.low, step.high)))
            yield Aim(
                f"decode step of Llama ({cost.work.model}, batch {cost.work.batch}), A adds", "%", 1, added, "high"
            )


def _size(size: Curve) -> Aim:
    return Aim("class A at 1 GB ÷ at 1 KB", "", 1.05, size.last_to_first.get(NATIVE), why="; ".join(size.notes))


def _start(start: Start) -> Iterator[Aim]:
    differ = float(len(start.off_differs))
    yield Aim("off: functions that are another object or have other code", "", 0, Estimate(differ, differ, differ))
    if start.held_builtin is not None and start.plain_call is not None:
        yield Aim(
            "off: a builtin taken by reference while guarded adds (one plain call)",
            "ns",
            start.plain_call.high,
            start.held_builtin,
        )
    yield Aim("import llm_op_guard", "ms", 50, start.import_seconds.scaled(1e3))
    yield Aim('install("transformers"), Llama imported', "s", 0.5, start.install_seconds)
