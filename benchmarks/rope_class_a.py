"""What a class A guard of the rotary embedding costs, against the same checks written by hand.

    python benchmarks/rope_class_a.py [--rounds N] [--json FILE]

All variants run interleaved in one process: many short rounds, each timing every variant once in an order that
rotates, so that a slow moment of the machine hits all of them. A variant's time is the median over the rounds; the
cost of a guard is its time less that of the bare call; the ratio has a bootstrap interval over the rounds.

The function beneath does nothing, so that only the guard counts; the real `apply_rotary_pos_emb` is timed for
reference where Transformers is installed.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import sys
import time
from collections.abc import Callable
from importlib import resources, util
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

import torch

import llm_op_guard as og

AIM = 1.3
RESAMPLES = 1000
FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def bare(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:  # noqa: ARG001 - the signature counts
    """Nothing but the signature of `apply_rotary_pos_emb`."""
    return q, k


def handwritten(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """The rules of rope.contract as a careful person writes them: each shape, dtype and device is read once.

    Taking a shape apart checks its rank.
    """
    if not isinstance(unsqueeze_dim, int):
        raise TypeError("unsqueeze_dim")
    if unsqueeze_dim in (1, -3):
        B, _, L, D = q.shape
        kB, _, kL, kD = k.shape
    elif unsqueeze_dim in (2, -2):
        B, L, _, D = q.shape
        kB, kL, _, kD = k.shape
    else:
        return q, k
    if kB != B or kL != L or kD != D:
        raise ValueError("k: sizes")
    if q.dtype not in FLOATING or k.dtype not in FLOATING:
        raise ValueError("q, k: dtype")
    device = q.device
    if k.device != device:
        raise ValueError("k: device")
    shape, dtype = cos.shape, cos.dtype
    cB, cL, cD = shape
    if (cB != 1 and cB != B) or cL != L or cD != D:  # noqa: PLR1714 - a tuple would have to be built
        raise ValueError("cos: sizes")
    if dtype not in FLOATING:
        raise ValueError("cos: dtype")
    if cos.device != device or sin.device != device:
        raise ValueError("cos, sin: device")
    if sin.shape != shape or sin.dtype != dtype:
        raise ValueError("sin: unlike cos")
    if D % 2 != 0:
        raise ValueError("D is odd")
    return q, k


def shipped_contract() -> og.Contract:
    """The contract that `og.install("transformers")` puts in front of the rotary embedding."""
    path = Path(str(resources.files("llm_op_guard"))) / "contracts" / "transformers" / "rope.contract"
    return og.load(path)["apply_rotary_pos_emb"]


def bad_calls(q: Any, k: Any, cos: Any, sin: Any) -> list[tuple[Any, ...]]:
    """Calls that break one rule each: whoever is timed has to refuse all of them."""
    return [
        (q, k, cos[..., :1], sin[..., :1]),
        (q, k, cos[:, :1], sin[:, :1]),
        (q[:1], k[:1], cos.expand(2, -1, -1), sin.expand(2, -1, -1)),
        (q, k, cos[:, None], sin[:, None]),
        (q, k[:, :, :3], cos, sin),
        (q, k, cos, sin.double()),
        (q.long(), k, cos, sin),
        (q, k.to("meta"), cos, sin),
        (q[..., :15], k[..., :15], cos[..., :15], sin[..., :15]),
    ]


def same_verdicts(variants: dict[str, Callable[..., Any]], arguments: tuple[Any, ...]) -> None:
    """Exit when a checking variant refuses a good call or takes a bad one: its time would mean nothing."""
    for name in ("guarded", "handwritten"):
        variants[name](*arguments)
        for call in bad_calls(*arguments):
            try:
                variants[name](*call)
            except ValueError:
                continue
            sys.exit(f"{name} let a bad call through: {[tuple(x.shape) for x in call]}")


def interleaved(
    variants: dict[str, tuple[Callable[..., Any], int]], arguments: tuple[Any, ...], rounds: int
) -> dict[str, list[float]]:
    """Nanoseconds a call, by variant and round. Each variant comes with how many calls make a round."""
    names = list(variants)
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for number in range(-rounds // 10, rounds):  # the first rounds warm up
            start = number % len(names)
            for name in names[start:] + names[:start]:
                function, calls = variants[name]
                began = time.perf_counter_ns()
                for _ in repeat(None, calls):
                    function(*arguments)
                took = (time.perf_counter_ns() - began) / calls
                if number >= 0:
                    times[name].append(took)
    finally:
        gc.enable()
    return times


def ratio(times: dict[str, list[float]], rounds: list[int] | range) -> float:
    """Cost of the guard over cost of the handwritten checks, from the medians of some rounds."""
    base, guarded, by_hand = (median([times[n][r] for r in rounds]) for n in ("bare", "guarded", "handwritten"))
    return (guarded - base) / (by_hand - base)


def interval(times: dict[str, list[float]], seed: int = 0) -> tuple[float, float]:
    """The middle 95 % of the ratio over resampled rounds."""
    chance = random.Random(seed)
    count = len(times["bare"])
    found = sorted(ratio(times, chance.choices(range(count), k=count)) for _ in range(RESAMPLES))
    return found[int(0.025 * RESAMPLES)], found[int(0.975 * RESAMPLES) - 1]


def main() -> None:
    """Time, print the table, write the JSON."""
    og.set_policy(B="off")  # values are not what is timed here
    parser = argparse.ArgumentParser(description="Cost of a class A guard of the rotary embedding.")
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()

    torch.set_num_threads(1)
    arguments = (torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(1, 8, 16), torch.randn(1, 8, 16))
    guarded = og.guard(shipped_contract())
    variants: dict[str, Callable[..., Any]] = {"bare": bare, "handwritten": handwritten, "guarded": guarded(bare)}
    same_verdicts(variants, arguments)
    calls = dict.fromkeys(variants, 200)
    if util.find_spec("transformers") is not None:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        variants |= {"real": apply_rotary_pos_emb, "real, guarded": guarded(apply_rotary_pos_emb)}
        calls |= {"real": 20, "real, guarded": 20}
    with torch.no_grad():
        times = interleaved({name: (variants[name], calls[name]) for name in variants}, arguments, options.rounds)

    medians = {name: median(values) for name, values in times.items()}
    print(f"{'variant':<16}{'ns a call':>12}{'less bare':>12}")
    for name, value in medians.items():
        beneath = "real" if name.startswith("real") else "bare"
        less = "" if name == beneath else f"{value - medians[beneath]:.0f}"
        print(f"{name:<16}{value:12.0f}{less:>12}")
    found, (low, high) = ratio(times, range(len(times["bare"]))), interval(times)
    print(f"ratio guarded / hand-written = {found:.2f} (95 % interval {low:.2f} to {high:.2f}); aim {AIM}")
    if options.json is not None:
        facts = {
            "benchmark": "rope_class_a",
            "median_ns": {name: round(value, 1) for name, value in medians.items()},
            "ratio": round(found, 3),
            "interval_95": [round(low, 3), round(high, 3)],
            "aim": AIM,
            "rounds": options.rounds,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "llm_op_guard": og.__version__,
            "machine": platform.machine(),
        }
        options.json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
