"""The program behind `llm-op-guard inject`: which contracts, on how many processes, what is shown and written."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path

from llm_op_guard import api, catalogue
from llm_op_guard.contract.expressions import suggestion
from llm_op_guard.contract.model import Contract
from llm_op_guard.errors import LlmOpGuardError
from llm_op_guard.faults.injection import Injected, inject, summary
from llm_op_guard.faults.operators import Operator, operators_of
from llm_op_guard.frozen import frozen
from llm_op_guard.report import injection as report
from llm_op_guard.report.injection_page import injection_page
from llm_op_guard.report.terminal import Terminal

VALID = 200


class InjectError(LlmOpGuardError):
    """Injection cannot begin; the text says what is missing."""


@frozen
class Wanted:
    """What was asked for on the command line."""

    targets: tuple[str, ...]
    every: bool = False
    seed: int = 0
    case: str | None = None
    valid: int = VALID
    jobs: int | None = None
    json_file: str | None = None
    junit_file: str | None = None
    html_file: str | None = None


Chosen = dict[str, tuple[Contract, Operator | None]]

# In a process that does the work: what it was started with. Contracts and operators cannot be sent to it later.
_started_with: Chosen = {}


def main(out: Terminal, complaints: Terminal, wanted: Wanted) -> bool:
    """Inject, write and show; whether every mutant was caught, no valid call was stopped, and every capsule replays.

    A contract of which no valid call was found shows nothing, and is as bad.

    Raises InjectError for a target that is none, or files that cannot be written.
    """
    if find_spec("torch") is None:
        raise InjectError("injection makes tensors, which needs torch: pip install 'llm-op-guard[transformers]'")
    files = [file for file in (wanted.json_file, wanted.junit_file, wanted.html_file) if file is not None]
    for number, file in enumerate(files):
        place = Path(file).resolve()
        if not place.parent.is_dir():
            raise InjectError(f"cannot write {file}: there is no folder {place.parent}")
        if place.is_dir():
            raise InjectError(f"cannot write {file}: it is a folder; name a file in it")
        if place in (Path(other).resolve() for other in files[:number]):
            raise InjectError(f"{file} is named for two formats; one would be lost")
    left_out: list[tuple[str, str]] = []
    chosen = _contracts(wanted, left_out)
    complaints.line(f"llm-op-guard: {len(chosen)} contracts, seed {wanted.seed}")
    results: list[Injected] = []
    for result in _injected(chosen, wanted):
        results.append(result)
        complaints.line(f"[{len(results)}/{len(chosen)}] {result.contract}: {result.seconds:.1f} s")
    results.sort(key=lambda result: list(chosen).index(result.contract))
    if wanted.case is not None and not any(result.cases for result in results):
        raise InjectError(
            f"there is no case {wanted.case!r} with --seed {wanted.seed} --valid {wanted.valid}: "
            "ids stand in the JSON of --json, with the seed and the number of valid calls"
        )
    # First, since whoever reads the table may leave before its end.
    _write(results, left_out, wanted)
    _show(out, results, left_out, wanted)
    return not any(result.failed or not result.valid_calls for result in results)


def _contracts(wanted: Wanted, left_out: list[tuple[str, str]]) -> Chosen:
    if not wanted.every and not wanted.targets:
        raise InjectError("name a contract, a FILE, FILE:OPERATOR or MODULE:FUNCTION, or say --all")
    if wanted.every and wanted.targets:
        raise InjectError(f"--all is every shipped contract: leave it out, or {', '.join(wanted.targets)}")
    shipped = catalogue.shipped()
    chosen = dict(shipped) if wanted.every else {}
    functions: Chosen = {}
    for target in wanted.targets:
        if named := catalogue.chosen(target, shipped):
            chosen |= named
            continue
        contract, function = catalogue.guarded(target)
        if contract is None:
            near = suggestion(target, [*shipped, *(contract.name for contract in shipped.values())])
            raise InjectError(f"there is no contract, file or function {target!r}{near}")
        functions[target] = (contract, Operator(target, function))
    for library in sorted({name.partition("/")[0] for name in chosen if name in shipped}):
        if find_spec(library) is None:
            left_out += [(name, f"{library} is not installed") for name in chosen if name.startswith(f"{library}/")]
    present = {name: contract for name, contract in chosen.items() if name not in dict(left_out)}
    operators = operators_of(api.integrations(), {name for name in present if name in shipped})
    for name in present:
        if name in shipped and name not in operators:
            left_out.append((name, "no code that it holds for is in the installed version; its check alone is tried"))
    return {name: _with_operator(contract, operators.get(name)) for name, contract in present.items()} | functions


def _with_operator(contract: Contract, operator: Operator | None) -> tuple[Contract, Operator | None]:
    """A contract, in the names of the operator that it holds for."""
    return (contract if operator is None or operator.contract is None else operator.contract), operator


def _injected(chosen: Chosen, wanted: Wanted) -> Iterator[Injected]:
    jobs = min(wanted.jobs or os.cpu_count() or 1, len(chosen))
    if jobs <= 1:
        for name, (contract, operator) in chosen.items():
            yield _on_one_thread(name, contract, operator, wanted)
        return
    # The largest first: none of them is waited for alone at the end.
    names = sorted(chosen, key=lambda name: -len(chosen[name][0].rules))
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_started_with.update, initargs=(chosen,)) as pool:
        for future in as_completed([pool.submit(_one, name, wanted) for name in names]):
            yield future.result()


def _one(name: str, wanted: Wanted) -> Injected:
    return _on_one_thread(name, *_started_with[name], wanted)


def _on_one_thread(name: str, contract: Contract, operator: Operator | None, wanted: Wanted) -> Injected:
    """Several processes at once are faster so; afterwards torch has as many threads as before."""
    import torch  # noqa: PLC0415

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return inject(name, contract, operator, seed=wanted.seed, valid=wanted.valid, case=wanted.case)
    finally:
        torch.set_num_threads(threads)


def _show(out: Terminal, results: list[Injected], left_out: Sequence[tuple[str, str]], wanted: Wanted) -> None:
    if wanted.case is not None:
        for case in (case for result in results for case in result.cases):
            out.line(f"{case.contract}: {case.rule} ({case.kind})\n  call       {case.call}")
            out.line(f"  unguarded  {case.unguarded.kind}: {case.unguarded.text}")
            out.line(f"  guarded    {case.guarded}: {case.message}")
        return
    out.line(report.table(results))
    for line in report.findings(results):
        out.line(line)
    for name, reason in left_out:
        out.line(f"left out: {name}: {reason}")
    out.line(", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in summary(results).items()))


def _write(results: list[Injected], left_out: Sequence[tuple[str, str]], wanted: Wanted) -> None:
    document = report.document(results, left_out, seed=wanted.seed, valid=wanted.valid)
    texts = {
        wanted.json_file: json.dumps(document, indent=1) + "\n",
        wanted.junit_file: report.junit(results),
        wanted.html_file: injection_page(document),
    }
    for file, text in texts.items():
        if file is not None:
            try:
                Path(file).write_text(text, encoding="utf-8")
            except OSError as error:
                raise InjectError(f"cannot write {file}: {error.strerror or error}") from None
