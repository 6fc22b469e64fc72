"""Ways from a call into its native check, timed in turn: `docs/decisions/0008-the-way-into-a-native-check.md`.

    python benchmarks/ways_in.py

The function beneath does nothing, so that only the way and the check count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from llm_op_guard.benching import by_hand
from llm_op_guard.benching.clock import calling, interleaved
from llm_op_guard.benching.operators import Absent, rope
from llm_op_guard.guard.fast import Accepting, accepted_by
from llm_op_guard.guard.plan import plan_check

ROUNDS, CALLS = 300, 1000


def ways(function: Callable[..., Any], accepting: Accepting) -> dict[str, Callable[..., Any]]:
    """The function behind its native check, by how a call gets there."""
    accepts, program = accepting

    def check(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int) -> None:
        if accepts(program, q, k, cos, sin, unsqueeze_dim):
            return
        raise AssertionError("every call here is right")

    def asked_first(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        accepts(program, q, k, cos, sin, unsqueeze_dim) or check(q, k, cos, sin, unsqueeze_dim)
        return function(q, k, cos, sin, unsqueeze_dim)

    def asked_by_the_check(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        check(q, k, cos, sin, unsqueeze_dim)
        return function(q, k, cos, sin, unsqueeze_dim)

    def packed(*args: Any, **kwargs: Any) -> Any:
        accepts(program, *args, *kwargs.values(), 1) or check(*args, **kwargs)
        return function(*args, **kwargs)

    def in_the_function(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        accepts(program, q, k, cos, sin, unsqueeze_dim) or check(q, k, cos, sin, unsqueeze_dim)
        return q, k

    return {
        "the wrapper asks, then calls the function": asked_first,
        "the wrapper calls the check, which asks": asked_by_the_check,
        "a wrapper of *args and **kwargs asks": packed,
        "the function itself asks": in_the_function,
    }


def main() -> None:
    """Print what each way adds."""
    operator = rope()
    if isinstance(operator, Absent):
        sys.exit(operator.reason)
    plan = plan_check(operator.contract, {"A"})
    accepting = accepted_by(plan) if plan is not None else None
    if accepting is None:
        sys.exit("there are no native checks here: llm-op-guard doctor says why")
    functions = {
        "nothing": operator.bare,
        "ifs by hand": by_hand.checks(torch)["RoPE"],
        **ways(operator.bare, accepting),
    }
    blocks = {name: calling(function, operator.arguments, CALLS) for name, function in functions.items()}
    found = {name: median(times) for name, times in interleaved(blocks, ROUNDS).items()}
    by_hands = found["ifs by hand"] - found["nothing"]
    for name, time in found.items():
        added = time - found["nothing"]
        sys.stdout.write(f"{name:42} {time:6.0f} ns, adds {added:6.0f} ns, {added / by_hands:.2f} of the ifs\n")


if __name__ == "__main__":
    main()
