"""What guards cost a model of Transformers: the time of `og.install("transformers")`, and the share of a decode step.

Installing is timed in processes of its own, since it happens once in each: before a model is imported, with Llama, and
with every modeling file of the library.  Decode steps of one token from a cache are timed in interleaved rounds,
without guards and with them (class A), of Llamas with random weights: one so small that nothing but Python is timed,
and one of a size at which this machine computes something.  Prints Markdown tables.  Run: make bench
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

PROCESSES = 5
ROUNDS = 41
STEPS = 10
PROMPT = 16

INSTALL = """
import importlib, pkgutil, sys, time
import torch, transformers
modules = sys.argv[1:]
if modules == ["every"]:
    import transformers.models as models
    modules = [f"transformers.models.{m.name}.modeling_{m.name}" for m in pkgutil.iter_modules(models.__path__)]
for module in modules:
    try:
        importlib.import_module(module)
    except Exception:
        pass
import llm_op_guard as og
start = time.perf_counter()
og.install("transformers")
print(time.perf_counter() - start)
"""
LOADED = {
    "none (each is guarded when it is imported)": (),
    "Llama's": ("transformers.models.llama.modeling_llama",),
    "all": ("every",),
}
LLAMAS = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    "small": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16},
}


def install_times(modules: tuple[str, ...], processes: int) -> list[float]:
    """Seconds of `og.install("transformers")`, each in a new process that has imported these modeling files."""
    command = [sys.executable, "-c", INSTALL, *modules]
    return [float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(processes)]


def decoding(config: dict[str, int]) -> Callable[..., float]:
    """A function that decodes so many tokens, one by one, and returns the seconds of a step, by a clock."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=1024, **config)).eval()
    prompt = torch.randint(3, 1024, (1, PROMPT))

    @torch.no_grad()
    def decode(steps: int, clock: Callable[[], float] = time.perf_counter) -> float:
        token, output = prompt[:, :1], model(prompt, use_cache=True)
        past = {name: value for name, value in output.items() if name != "logits"}  # `cache`, or what 4.x calls it
        start = clock()
        for _ in range(steps):
            model(token, use_cache=True, **past)
        return (clock() - start) / steps

    return decode


def main() -> None:
    """Time both and print the tables."""
    import torch
    import transformers

    import llm_op_guard as og

    print(f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}\n")
    print(f"| modeling files that are loaded | og.install, seconds: median of {PROCESSES} processes | least | most |")
    print("| --- | ---: | ---: | ---: |")
    for what, modules in LOADED.items():
        times = install_times(modules, PROCESSES)
        print(f"| {what} | {statistics.median(times):.2f} | {min(times):.2f} | {max(times):.2f} |")

    torch.set_num_threads(1)
    print(f"\nA decode step of Llama on one core, float32, eager Python; medians of {ROUNDS} interleaved rounds:\n")
    print("| Llama | layers | unguarded, ms | guards add, ms | a layer, µs | share of the guarded step |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, config in LLAMAS.items():
        decode = decoding(config)
        rounds: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            plain, guarded = (_timed(decode, context) for context in (nullcontext(), og.installed("transformers")))
            rounds.append((plain, guarded))
        plain = statistics.median(p for p, _ in rounds)
        added = statistics.median(g - p for p, g in rounds)
        layers = config["num_hidden_layers"]
        cells = (
            f"{plain * 1e3:.2f}",
            f"{added * 1e3:.2f}",
            f"{added / layers * 1e6:.0f}",
            f"{added / (plain + added):.1%}",
        )
        print(f"| {name} | {layers} | {' | '.join(cells)} |")


def _timed(decode: Callable[[int], float], context: Any) -> float:
    with context:
        decode(1)
        return decode(STEPS)


if __name__ == "__main__":
    main()
