"""What it costs to track tensors (`og.track`): a guarded rotary embedding, and a decode step of Llama.

Unguarded, guarded (class A), and guarded and tracked calls run interleaved in one process, in rounds whose order
rotates.  A time is the median over the rounds of what the thread spent on the processor, so that other work on the
machine counts less; a ratio is the median of the ratios within a round.  The rotary embedding is timed with the real
function beneath the guard, and with one that does nothing, so that only the guard counts.  Prints a Markdown table.

    python benchmarks/ledger.py [--rounds N]
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import repeat
from statistics import mean, median
from typing import Any

import torch
import transformers

import llm_op_guard as og
from llm_op_guard.benching import model
from llm_op_guard.benching.operators import Operator, rope

VARIANTS = ("unguarded", "guarded", "tracked")
CALLS = 100
VOCABULARY = 1024
LLAMAS = {
    "tiny": model.TINY,
    "small": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16},
}


def rounds_of(timed: Callable[[str], float], rounds: int) -> list[dict[str, float]]:
    """What `timed` says of each variant, by round; the first rounds warm up and are left out."""
    found = []
    for number in range(-rounds // 10, rounds):
        start = number % len(VARIANTS)
        times = {}
        for variant in VARIANTS[start:] + VARIANTS[:start]:
            og.track(on=variant == "tracked")
            times[variant] = timed(variant)
        if number >= 0:
            found.append(times)
    og.track(on=False)
    return found


def rotary(operator: Operator, function: Callable[..., Any]) -> Callable[[str], float]:
    """Seconds of a call of the function, with the shipped contract of the rotary embedding in front of it."""
    guarded = og.guard(operator.contract)(function)
    arguments = operator.arguments

    @torch.no_grad()
    def timed(variant: str) -> float:
        called = function if variant == "unguarded" else guarded
        called(*arguments)
        start = time.thread_time()
        for _ in repeat(None, CALLS):
            called(*arguments)
        return (time.thread_time() - start) / CALLS

    return timed


def step(config: dict[str, int]) -> Callable[[str], float]:
    """Seconds of a decode step of a Llama with that configuration."""
    with torch.no_grad():
        prompt = torch.randint(3, VOCABULARY, (1, model.PROMPT))
        decode = model.decoding(model.llama(VOCABULARY, config), prompt)

    @torch.no_grad()
    def timed(variant: str) -> float:
        with nullcontext() if variant == "unguarded" else og.installed("transformers"):
            return mean(step.processor for step in decode())

    return timed


def main() -> None:
    """Time and print the table."""
    parser = argparse.ArgumentParser(description="Cost of tracking tensors.")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    og.set_policy(A="raise", B="off")
    print(f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}\n")
    print("| what is timed | unguarded, µs | guarded, µs | tracked, µs | tracked / guarded |")
    print("| --- | ---: | ---: | ---: | ---: |")
    operator = rope()
    if not isinstance(operator, Operator):
        sys.exit(operator.reason)
    cases = {
        "a rotary embedding that does nothing": (rotary(operator, operator.bare), options.rounds),
        "`apply_rotary_pos_emb` of Llama": (rotary(operator, operator.real), options.rounds),
        **{f"a decode step of a {name} Llama": (step(config), options.rounds // 8) for name, config in LLAMAS.items()},
    }
    for name, (timed, rounds) in cases.items():
        found = rounds_of(timed, rounds)
        times = " | ".join(f"{median(r[variant] for r in found) * 1e6:.2f}" for variant in VARIANTS)
        print(f"| {name} | {times} | {median(r['tracked'] / r['guarded'] for r in found):.3f} |", flush=True)


if __name__ == "__main__":
    main()
