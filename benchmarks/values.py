"""What it costs to look at every element of a tensor, against how people write it, on one thread of the CPU.

    python benchmarks/values.py [--rounds N] [--largest MB] [--json FILE]

All variants run interleaved in one process, in rounds whose order rotates, so that a slow moment of the machine hits
all of them; a variant's time is the median over the rounds, in time of the processor, which other processes do not
lengthen. The memory that a variant takes is how far one call raises the peak of the process (Linux only; pages that the
process had already are not seen). Compiled programs of one operation come last, guarded by one rule and not.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import llm_op_guard as og
from llm_op_guard.guard.functions import IMPLEMENTATIONS

SIZES = {"4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "32 MB": 32 << 20, "256 MB": 256 << 20}
VOCABULARY = 151_936
finite, within = IMPLEMENTATIONS["finite"], IMPLEMENTATIONS["within"]

Variants = dict[str, Callable[[Any], Any]]
OF_NUMBERS: Variants = {
    "finite": finite,
    "finite and within": lambda x: finite(x, reads=(reads := {})) and within(x, -1e4, 1e4, reads=reads),
    "isfinite().all()": lambda x: bool(torch.isfinite(x).all()),
    "isnan().any()": lambda x: not bool(torch.isnan(x).any()),
    "aminmax": torch.aminmax,
    "sum": torch.sum,
}
OF_IDS: Variants = {
    "within": lambda ids: within(ids, 0, VOCABULARY),
    "(ids >= 0).all() and (ids < v).all()": lambda ids: bool((ids >= 0).all()) and bool((ids < VOCABULARY).all()),
    "aminmax": torch.aminmax,
    "sum": torch.sum,
}


def tensor(dtype: torch.dtype, size: int) -> torch.Tensor:
    """A flat tensor of so many bytes: normal numbers, or token ids."""
    count, made = size // dtype.itemsize, torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(count, generator=made).to(dtype)
    return torch.randint(0, VOCABULARY, (count,), generator=made, dtype=dtype)


def interleaved(variants: Variants, x: torch.Tensor, rounds: int) -> dict[str, float]:
    """Seconds a call, by variant."""
    calls = max(1, min(200, (1 << 20) // (x.numel() * x.itemsize)))
    names, times = list(variants), {name: [] for name in variants}
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            function, start = variants[name], time.thread_time()
            for _ in range(calls):
                function(x)
            if number:  # the first round warms up
                times[name].append((time.thread_time() - start) / calls)
    return {name: median(found) for name, found in times.items()}


RULES = {
    "finite, 4 KB": ("x: floating[_]\nrequire(finite(x))", tensor(torch.float32, 4 << 10), float("nan")),
    "within, 64 ids": (f"x: int64[_]\nrequire(within(x, 0, {VOCABULARY}))", tensor(torch.int64, 512), VOCABULARY),
}


def compiled(backend: str, rule: str, x: torch.Tensor, wrong: float, rounds: int) -> dict[str, float]:
    """Seconds a run of a compiled program that doubles a tensor, with a guard of one rule and without."""
    torch._dynamo.reset()
    plain = torch.compile(lambda x: x * 2, backend=backend, fullgraph=True)
    guarded = torch.compile(og.guard(rule)(lambda x: x * 2), backend=backend, fullgraph=True)
    bad = x.clone()
    bad[1] = wrong
    try:
        guarded(bad)
    except og.GuardError:
        return interleaved({"unguarded": plain, "guarded": guarded}, x, rounds)
    sys.exit(f"a compiled program does not see what is wrong: {rule}")


def allocated(function: Callable[[Any], Any], x: torch.Tensor) -> int:
    """The bytes by which one call raises the peak of the process."""
    if not _STATUS.exists():
        return 0
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _peak()
    function(x)
    return _peak() - before


_STATUS = Path("/proc/self/status")


def _peak() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def same_verdicts() -> None:
    """Exit where a variant does not see what it is timed for."""
    x = torch.randn(1000)
    x[777] = float("nan")
    ids = torch.arange(1000)
    ids[3] = VOCABULARY
    for variants, bad, seen in ((OF_NUMBERS, x, 4), (OF_IDS, ids, 2)):
        for name in list(variants)[:seen]:
            if variants[name](bad):
                sys.exit(f"{name} does not see what is wrong")


def main() -> None:
    """Print the table, and write it as JSON where a file is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--largest", type=int, default=256, metavar="MB")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    same_verdicts()
    rows = []
    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread, {platform.machine()}\n")
    for dtype, variants in ((torch.float32, OF_NUMBERS), (torch.bfloat16, OF_NUMBERS), (torch.int64, OF_IDS)):
        for label, size in SIZES.items():
            if size > arguments.largest << 20:
                continue
            x = tensor(dtype, size)
            times = interleaved(variants, x, arguments.rounds)
            memory = {name: allocated(function, x) for name, function in variants.items()}
            print(f"{str(dtype).removeprefix('torch.')}, {label}")
            for name, seconds in times.items():
                ratio = seconds / times["sum"]
                print(f"  {name:<40} {seconds * 1e6:>12.1f} us {ratio:>8.2f} x sum {memory[name] / 1e6:>10.2f} MB more")
                row = {"dtype": str(dtype), "bytes": size, "variant": name, "seconds": seconds, "memory": memory[name]}
                rows.append(row)
    og.set_policy(B="raise")
    print("compiled programs, a run")
    for label, (rule, x, wrong) in RULES.items():
        for backend in ("eager", "inductor"):
            times = compiled(backend, rule, x, wrong, arguments.rounds)
            rows += [{"rule": label, "backend": backend, "variant": name, "seconds": s} for name, s in times.items()]
            more = times["guarded"] - times["unguarded"]
            told = ", ".join(f"{name} {seconds * 1e6:.1f} us" for name, seconds in times.items())
            print(f"  {label}, {backend}: {told}: {more * 1e6:.1f} us more")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
