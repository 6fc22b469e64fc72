"""What one guarded call costs before any check: swapped code against a closure put in place with setattr.

Interleaved: each round times every variant once, in turn, so that a slow second hits all of them; medians of rounds.
Prints a Markdown table.  Run: make bench
"""

from __future__ import annotations

import platform
import statistics
import time
import types
from collections.abc import Callable
from typing import Any

from llm_op_guard.install.patch import Patch

ROUNDS = 201
CALLS = 5_000


def operator(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:  # noqa: ARG001 - a signature
    """Stands for an operator; does nothing."""
    return q


def _copy() -> types.FunctionType:
    return types.FunctionType(operator.__code__, operator.__globals__, "operator", operator.__defaults__)


def _check(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int) -> None:
    """A check of nothing."""


def _closure(function: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        _check(q, k, cos, sin, unsqueeze_dim)
        return function(q, k, cos, sin, unsqueeze_dim)

    return guarded


def _generic_closure(function: Callable[..., Any], check: Callable[..., None] = _check) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        check(*args, 1, **kwargs)
        return function(*args, **kwargs)

    return guarded


def _swapped() -> Callable[..., Any]:
    function = _copy()
    Patch(function, ("q", "k", "cos", "sin", "unsqueeze_dim")).arm(_check)
    return function


def _disarmed() -> Callable[..., Any]:
    function = _copy()
    patch = Patch(function, ("q", "k", "cos", "sin", "unsqueeze_dim"))
    patch.arm(_check)
    patch.disarm()
    return function


def _timed(function: Callable[..., Any]) -> float:
    """Nanoseconds a call."""
    calls = range(CALLS)
    start = time.perf_counter_ns()
    for _ in calls:
        function(1, 2, 3, 4)
    return (time.perf_counter_ns() - start) / CALLS


def main() -> None:
    """Time all variants and print the table."""
    variants: dict[str, Callable[..., Any]] = {
        "direct call": _copy(),
        "code swapped, then taken away": _disarmed(),
        "code swapped, empty check": _swapped(),
        "setattr: closure with the operator's signature, empty check": _closure(_copy()),
        "setattr: closure with *args, **kwargs, empty check": _generic_closure(_copy()),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, function in variants.items():
            times[name].append(_timed(function))
    medians = {name: statistics.median(values) for name, values in times.items()}
    direct = medians["direct call"]
    print(f"Python {platform.python_version()}, {platform.machine()}; medians of {ROUNDS} interleaved rounds\n")
    print("| variant | ns a call | above direct |")
    print("| --- | ---: | ---: |")
    for name, median in medians.items():
        print(f"| {name} | {median:.0f} | {median - direct:.0f} |")


if __name__ == "__main__":
    main()
