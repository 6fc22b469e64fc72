"""Times of several ways to do one thing, taken in turn, so that a slow moment of the machine hits all of them."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from itertools import repeat
from statistics import median
from typing import Any, TypeVar

T = TypeVar("T")


def interleaved(variants: Mapping[str, Callable[[], T]], rounds: int, warm_up: int | None = None) -> dict[str, list[T]]:
    """What each variant says, by round. Each is asked once in a round, in an order drawn for it.

    An order that merely rotates would let one variant run after the same other one each time, with what that leaves in
    the processor's caches. Rounds that warm up come first and are left out: a tenth, at least one, where nobody says
    how many. No garbage is collected meanwhile.
    """
    names, chance = list(variants), random.Random(0)
    said: dict[str, list[T]] = {name: [] for name in names}
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for number in range(-(max(1, rounds // 10) if warm_up is None else warm_up), rounds):
            for name in chance.sample(names, len(names)):
                answer = variants[name]()
                if number >= 0:
                    said[name].append(answer)
    finally:
        if collects:
            gc.enable()
    return said


def calling(function: Callable[..., Any], arguments: tuple[Any, ...], calls: int) -> Callable[[], float]:
    """A block of so many calls, which says how many nanoseconds one took; one more, before them, is not counted."""

    def block() -> float:
        function(*arguments)
        began = time.perf_counter_ns()
        for _ in repeat(None, calls):
            function(*arguments)
        return (time.perf_counter_ns() - began) / calls

    return block


def calls_for(function: Callable[..., Any], arguments: tuple[Any, ...], nanoseconds: float) -> int:
    """How many calls take about so long: at least one, at most a thousand."""
    one = median(calling(function, arguments, 3)() for _ in range(5))
    return max(1, min(1000, int(nanoseconds / max(one, 1.0))))
