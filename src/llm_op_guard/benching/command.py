"""What `llm-op-guard bench` does: everything in turn, then tables, JSON and plots."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import platform
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llm_op_guard import __version__
from llm_op_guard.benching import calls, growth, model, plots, start
from llm_op_guard.benching.aims import aims
from llm_op_guard.benching.findings import Findings
from llm_op_guard.benching.model import Work
from llm_op_guard.benching.operators import operators
from llm_op_guard.benching.report import rendered
from llm_op_guard.errors import LlmOpGuardError
from llm_op_guard.frozen import frozen
from llm_op_guard.guard import fast
from llm_op_guard.native.program import Refused
from llm_op_guard.policy import OFF, Policy, current, set_policy
from llm_op_guard.report.terminal import Terminal


class BenchError(LlmOpGuardError):
    """A benchmark cannot begin; the text says what is missing."""


@frozen
class Wanted:
    """What was asked for on the command line."""

    quick: bool = False
    threads: int = 1
    json_file: str | None = None
    plots_folder: str | None = None


@frozen
class _Extent:
    """How much is measured. A block of calls takes about so many nanoseconds."""

    rounds: int
    block: float
    processes: int
    works: tuple[Work, ...]
    configs: dict[str, dict[str, int]]


_FULL = _Extent(
    rounds=400,
    block=200_000,
    processes=7,
    works=(
        Work("tiny", "decode", 1, 100),
        Work("tiny", "decode", 8, 100),
        Work("tiny", "prefill", 1, 100),
        Work("tiny", "prefill", 8, 100),
        Work("12 layers", "decode", 1, 100),
        Work("12 layers", "decode", 8, 120),
        Work("12 layers", "prefill", 1, 40),
        Work("12 layers", "prefill", 8, 30),
    ),
    configs={"tiny": model.TINY, "12 layers": model.TWELVE_LAYERS},
)
_LESS = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_QUICK = _Extent(
    rounds=3,
    block=2_000,
    processes=1,
    works=tuple(dataclasses.replace(work, pairs=2) for work in _FULL.works),
    configs={"tiny": _LESS, "12 layers": _LESS | {"num_hidden_layers": 12}},
)


def main(out: Terminal, complaints: Terminal, wanted: Wanted) -> Findings:
    """Measure, show, and write what was asked for.

    Raises BenchError where something is missing, or a file cannot be written.
    """
    _refuse(wanted)
    began = time.perf_counter()
    findings = _measured(_QUICK if wanted.quick else _FULL, complaints, wanted)
    findings.seconds = time.perf_counter() - began
    out.line(rendered(findings))
    if wanted.json_file is not None:
        text = json.dumps(findings.as_json() | {"aims": _aims(findings)}, indent=1, ensure_ascii=False)
        Path(wanted.json_file).write_text(text + "\n", encoding="utf-8")
    if wanted.plots_folder is not None:
        for file in plots.draw(findings, Path(wanted.plots_folder)):
            complaints.line(f"llm-op-guard: wrote {file}")
    return findings


def _refuse(wanted: Wanted) -> None:
    if absent := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        raise BenchError(f"benchmarks need {' and '.join(absent)}: pip install 'llm-op-guard[transformers]'")
    if current(Policy()) == OFF:
        raise BenchError("LLM_OP_GUARD=off switches every guard off; unset it for benchmarks")
    if wanted.json_file is not None:
        place = Path(wanted.json_file).resolve()
        if not place.parent.is_dir():
            raise BenchError(f"cannot write {wanted.json_file}: there is no folder {place.parent}")
        if place.is_dir():
            raise BenchError(f"cannot write {wanted.json_file}: it is a folder; name a file in it")
    if wanted.plots_folder is not None:
        if find_spec("matplotlib") is None:
            raise BenchError("plots need matplotlib: pip install 'llm-op-guard[bench]'")
        if not Path(wanted.plots_folder).is_dir():
            raise BenchError(f"cannot write plots: there is no folder {wanted.plots_folder}")


def _measured(extent: _Extent, complaints: Terminal, wanted: Wanted) -> Findings:
    def say(what: str) -> None:
        complaints.line(f"llm-op-guard: {what}")

    torch: Any = importlib.import_module("torch")
    importlib.import_module("transformers").logging.set_verbosity_error()
    torch.set_num_threads(wanted.threads)
    set_policy(A="raise", B="off")  # whatever the environment says
    rounds, block = extent.rounds, extent.block
    measured = []
    for operator in operators():
        say(operator.name)
        measured.append(calls.measure(operator, rounds=rounds, block=block))
    say("growth with arguments, rules and bytes")
    curves = (
        growth.by_arguments(rounds=rounds, block=block),
        growth.by_rules(rounds=rounds, block=block),
        growth.by_size(rounds=rounds, block=block),
    )
    say("import and install, in processes of their own")
    started = start.measure(processes=extent.processes, rounds=rounds, block=block)
    costs = model.measure(extent.works, extent.configs, say)
    native = fast.usable()
    notes = [f"Nothing is checked natively here: {native.reason}."] if isinstance(native, Refused) else []
    return Findings(_machine(wanted), wanted.quick, measured, *curves, costs, started, notes=notes)


def _machine(wanted: Wanted) -> dict[str, Any]:
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    return {
        "llm-op-guard": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": wanted.threads,
    }


def _aims(findings: Findings) -> list[dict[str, Any]]:
    return [dataclasses.asdict(aim) | {"reached": aim.reached} for aim in aims(findings)]
