"""What happens once in a process: importing the library, installing guards, and what is left when they are gone."""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from llm_op_guard import api
from llm_op_guard.benching.clock import calling, calls_for, interleaved
from llm_op_guard.benching.estimate import Estimate, estimates, medians

MEGABYTE = 2**20

# As after an installation, there is bytecode: the first process, which is not counted, writes it into a folder for all.
_BYTECODE = """
import sys
sys.dont_write_bytecode, sys.pycache_prefix = False, sys.argv[1]
"""
_IMPORT = f"""
import json, time
{_BYTECODE}
began = time.perf_counter()
import llm_op_guard
print(json.dumps({{"seconds": time.perf_counter() - began}}))
"""
# Resident memory is read where the system tells it.
_INSTALL = f"""
import json, time
import torch, transformers
import transformers.models.llama.modeling_llama
{_BYTECODE}
import llm_op_guard

def resident():
    try:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
    except (OSError, StopIteration):
        return None

before = resident()
began = time.perf_counter()
report = llm_op_guard.install("transformers")
took = time.perf_counter() - began
after = None if before is None else resident() - before
print(json.dumps({{"seconds": took, "sites": len(report.guarded), "resident": after}}))
"""


@dataclass
class Start:
    """Seconds and bytes of a process: each figure is the median of its processes, in bytes where the system tells.

    `off_differs` are the functions that were not what they had been when the guards were gone. `held_builtin` is what
    a call adds that goes through the stand-in of a builtin, taken by reference while it was guarded, when the guard is
    off; `plain_call` what a Python function adds that does no more than pass its arguments on.
    """

    import_seconds: Estimate
    install_seconds: Estimate
    sites: int
    resident_bytes: Estimate | None
    functions_looked_at: int = 0
    off_differs: list[str] = field(default_factory=list)
    held_builtin: Estimate | None = None
    plain_call: Estimate | None = None


def measure(*, processes: int, rounds: int, block: float) -> Start:
    """Start so many processes of each kind, one after the other; then look at what guards leave behind here."""
    with tempfile.TemporaryDirectory() as folder:
        kinds = {"import": lambda: _process(_IMPORT, folder), "install": lambda: _process(_INSTALL, folder)}
        said = interleaved(kinds, processes, warm_up=min(1, processes - 1))
    figures = {name: [answer["seconds"] for answer in answers] for name, answers in said.items()}
    resident = [answer["resident"] for answer in said["install"]]
    if None not in resident:
        figures["resident"] = resident
    estimated = estimates(processes, lambda chosen: medians(figures, chosen))
    sites = said["install"][0]["sites"]
    start = Start(estimated["import"], estimated["install"], sites, estimated.get("resident"))
    _look_at_off(start)
    _time_builtin(start, rounds, block)
    return start


def _process(program: str, folder: str) -> dict[str, Any]:
    command = [sys.executable, "-c", program, folder]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _look_at_off(start: Start) -> None:
    """Every function of the process, before guards and after: who it is and what its code is."""
    importlib.import_module("transformers.models.llama.modeling_llama")
    before = {id(found): (found, found.__code__) for found in gc.get_objects() if type(found) is FunctionType}
    with api.installed("transformers"):
        guarded = [site.function for site in api.sites()]
    start.functions_looked_at = len(guarded)
    for function in guarded:
        was, code = before.get(id(function), (None, None))
        if was is not function or function.__code__ is not code:
            start.off_differs.append(f"{function.__module__}.{function.__qualname__}")


def _time_builtin(start: Start, rounds: int, block: float) -> None:
    torch = importlib.import_module("torch")
    builtin = torch.nn.functional.scaled_dot_product_attention
    with api.installed("torch"):
        held = torch.nn.functional.scaled_dot_product_attention
    if torch.nn.functional.scaled_dot_product_attention is not builtin:
        start.off_differs.append("torch.nn.functional.scaled_dot_product_attention")
    if held is builtin:  # not guarded with this PyTorch
        return

    def passes_on(*args: Any, **kwargs: Any) -> Any:
        return builtin(*args, **kwargs)

    arguments = (torch.randn(1, 1, 1, 4),) * 3
    functions = {"builtin": builtin, "held": held, "plain": passes_on}
    with torch.no_grad():
        blocks = {name: calling(f, arguments, calls_for(f, arguments, block)) for name, f in functions.items()}
        times = interleaved(blocks, rounds)

    def figures(chosen: Sequence[int]) -> dict[str, float]:
        found = medians(times, chosen)
        return {name: found[name] - found["builtin"] for name in ("held", "plain")}

    estimated = estimates(rounds, figures)
    start.held_builtin, start.plain_call = estimated["held"], estimated["plain"]
