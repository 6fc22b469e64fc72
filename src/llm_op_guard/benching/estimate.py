"""Figures of a run with their intervals: what they would have been in other rounds of the same kind (bootstrap).

Efron, "Bootstrap methods: another look at the jackknife", Annals of Statistics 7 (1979); the interval is that of
percentiles.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from llm_op_guard.frozen import frozen

RESAMPLES = 1000
COVERED = 0.95


@frozen
class Estimate:
    """A figure, and the interval that holds 95 % of what it is in resampled rounds."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Estimate:
        """The same in another unit."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value below which that fraction lies, on the line between its neighbours (Hyndman and Fan's type 7)."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values, and so no quantile")
    place = fraction * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


Figures = Mapping[str, float]


def estimates(
    rounds: int, figures: Callable[[Sequence[int]], Figures], *, resamples: int | None = None, seed: int = 0
) -> dict[str, Estimate]:
    """What `figures` says of all rounds, by name, and its interval over rounds drawn with replacement.

    The figures of one drawing are of the same rounds, and so a ratio among them keeps its pairs. Where nobody says how
    many drawings, they are `RESAMPLES`, or fewer of rounds that are so few that they can be drawn in few ways.
    """
    resamples = min(RESAMPLES, 50 * rounds) if resamples is None else resamples
    chance = random.Random(seed)
    found = figures(range(rounds))
    drawn = [figures(chance.choices(range(rounds), k=rounds)) for _ in range(resamples)]
    tail = (1 - COVERED) / 2
    return {
        name: Estimate(
            value, quantile([one[name] for one in drawn], tail), quantile([one[name] for one in drawn], 1 - tail)
        )
        for name, value in found.items()
    }


def medians(times: Mapping[str, Sequence[float]], chosen: Sequence[int]) -> dict[str, float]:
    """The median of each variant over the chosen rounds."""
    return {name: median([values[number] for number in chosen]) for name, values in times.items()}


def pair_ratio(times: Mapping[str, Sequence[float]], above: str, below: str, chosen: Sequence[int]) -> float:
    """The median of the ratios within the chosen rounds: what drifts from round to round drops out."""
    over, under = times[above], times[below]
    return median([over[number] / under[number] for number in chosen])
