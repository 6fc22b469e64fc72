"""The zoo: a tiny model of every type in the installed Transformers computes the same with guards as without.

    python tests/zoo/zoo.py [--types llama,bert] [--sample N] [--jobs N] [--json FILE]

One process for each type, with a time limit. Exit status 1 for an alarm, a difference, or a process that died only
when guards were on. What is counted, and what it proves: docs/zoo.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LIMIT = 300.0  # seconds for a type; most take five
_TOLD = ("alarm", "difference", "unsteady", "diagnosed")


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; the exit status."""
    options = _parser().parse_args(arguments)
    _surroundings()
    from animals import all_animals

    chosen = _chosen(all_animals(), options.types, options.sample)
    started = time.perf_counter()
    reports = []
    for report in examined(chosen, options.jobs):
        reports.append(report)
        print(f"[{len(reports)}/{len(chosen)}] {_line(report)}", file=sys.stderr, flush=True)
    order = {(animal.task, animal.type): place for place, animal in enumerate(chosen)}
    reports.sort(key=lambda report: order[report["task"], report["type"]])
    totals = summary(reports) | {"seconds": round(time.perf_counter() - started, 1), "versions": _versions()}
    print(_table(reports))
    print(_details(reports))
    print(_sentence(totals))
    if options.json:
        Path(options.json).write_text(json.dumps({"summary": totals, "types": reports}, indent=1) + "\n")
    return 1 if totals["alarms"] or totals["differences"] or totals["died"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--types", help="only these, by type or by task:type, separated by commas")
    parser.add_argument("--sample", type=int, metavar="N", help="only N of them, evenly spaced: the same every time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes at a time")
    parser.add_argument("--json", metavar="FILE", help="write everything that was found to a file")
    return parser


def _surroundings() -> None:
    """Nothing is downloaded, one thread each, and no policy from outside; before torch is imported anywhere."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    # Python 3.11's fork server does not take over sys.path.
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    for variable in [name for name in os.environ if name.startswith("LLM_OP_GUARD")]:
        del os.environ[variable]


def _chosen(animals: list[Any], types: str | None, sample: int | None) -> list[Any]:
    if types:
        wanted = types.split(",")
        unknown = set(wanted) - {a.type for a in animals} - {a.name for a in animals}
        if unknown:
            sys.exit(f"no such type in this Transformers: {', '.join(sorted(unknown))}")
        animals = [animal for animal in animals if animal.type in wanted or animal.name in wanted]
    if sample is not None and sample < len(animals):
        animals = [animals[place * len(animals) // sample] for place in range(sample)]
    return animals


# ---------------------------------------------------------------- processes


def examined(animals: list[Any], jobs: int) -> Iterator[dict[str, Any]]:
    """The reports, in the order in which they come."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["child"])  # torch and Transformers are imported once
    pending = list(reversed(animals))
    running: dict[Connection, tuple[Any, Any, float]] = {}
    while pending or running:
        while pending and len(running) < jobs:
            animal = pending.pop()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_examine, args=(animal, there), daemon=True)
            process.start()
            there.close()
            running[here] = animal, process, time.perf_counter()
        ready = wait(list(running), timeout=1.0)
        for here, (animal, process, started) in list(running.items()):
            late = time.perf_counter() - started > LIMIT
            if here in ready or late:
                del running[here]
                yield _received(here, animal, process, late=late and here not in ready)


def _examine(animal: Any, there: Connection) -> None:
    from child import examine

    os.dup2(2, 1)  # what Transformers prints is not part of the table
    there.send(examine(animal))


def _received(here: Connection, animal: Any, process: Any, *, late: bool) -> dict[str, Any]:
    report: dict[str, Any] = {"task": animal.task, "type": animal.type, "class": animal.cls, "seconds": LIMIT}
    try:
        report = {**report, "died": f"not done after {LIMIT:.0f} s"} if late else here.recv()
    except EOFError:
        process.join()
        report["died"] = f"its process ended with status {process.exitcode}"
    here.close()
    process.kill()
    process.join()
    return report


# ---------------------------------------------------------------- telling


def summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a run."""
    built = [report for report in reports if "scenarios" in report]
    outcomes = Counter(found["outcome"] for report in built for found in report["scenarios"].values())
    return {
        "built": dict(Counter(report["task"] for report in built)),
        "built only": sum(_did_nothing(report) for report in built),
        "types": dict(Counter(report["task"] for report in reports)),
        "died": sum("died" in report for report in reports),
        "scenarios": outcomes.total() - outcomes["not supported"] - outcomes["diagnosed"],
        "not supported": outcomes["not supported"],
        "checks": sum(found["checks"] for report in built for found in report["scenarios"].values()),
        "alarms": outcomes["alarm"],
        "differences": outcomes["difference"],
        "diagnosed": outcomes["diagnosed"],
        "unsteady": outcomes["unsteady"],
        "sites": len({site for report in built for site in report["guarded"]}),
        "refused": len({site for report in built for site in report["refused"]}),
    }


def _did_nothing(report: dict[str, Any]) -> bool:
    """Whether a type could be built and then took none of the inputs."""
    done = {name for name, found in report["scenarios"].items() if found["outcome"] != "not supported"}
    return not any(not name.endswith("/build") for name in done)


def _sentence(totals: dict[str, Any]) -> str:
    built = ", ".join(f"{totals['built'].get(task, 0)} of {count} {task}" for task, count in totals["types"].items())
    return (
        f"built: {built} ({totals['built only']} of them took no input); "
        f"{totals['scenarios']} scenarios, {totals['not supported']} not supported; "
        f"{totals['checks']} guarded calls checked at {totals['sites']} sites, {totals['refused']} refused; "
        f"{totals['alarms']} alarms, {totals['differences']} differences, "
        f"{totals['diagnosed']} diagnosed that fail anyway, {totals['unsteady']} unsteady, {totals['died']} died; "
        f"{totals['seconds']} s"
    )


def _line(report: dict[str, Any]) -> str:
    cells = _cells(report)
    return f"{cells[0]} {cells[1]}: {cells[-1]}"


_HEADINGS = ("task", "type", "scenarios", "not supported", "checks", "guarded", "refused", "seconds", "outcome")


def _cells(report: dict[str, Any]) -> tuple[str, ...]:
    head, seconds = (report["task"], report["type"]), f"{report['seconds']:.1f}"
    if "scenarios" not in report:
        outcome = "DIED" if "died" in report else "not built"
        return (*head, "", "", "", "", "", seconds, outcome)
    outcomes = Counter(found["outcome"] for found in report["scenarios"].values())
    checks = sum(found["checks"] for found in report["scenarios"].values())
    bad = ", ".join(f"{outcomes[kind]} {kind}" for kind in _TOLD if outcomes[kind])
    run = outcomes.total() - outcomes["not supported"] - outcomes["diagnosed"]
    counts = (run, outcomes["not supported"], checks, len(report["guarded"]), len(report["refused"]))
    return (*head, *map(str, counts), seconds, bad or "same")


def _table(reports: list[dict[str, Any]]) -> str:
    rows = [_HEADINGS, *map(_cells, reports)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


def _details(reports: list[dict[str, Any]]) -> str:
    lines = []
    for report in reports:
        name = f"{report['task']}:{report['type']}"
        if why := report.get("error") or report.get("died"):
            lines.append(f"not built: {name}: {why}")
        for scenario, found in report.get("scenarios", {}).items():
            if found["outcome"] in _TOLD:
                lines.append(f"{found['outcome'].upper()}: {name} {scenario}: {found['reason']}")
    reasons: dict[str, set[str]] = {}
    for report in reports:
        for site, reason in report.get("refused", {}).items():
            reasons.setdefault(reason.partition(" (")[0], set()).add(site)
    for reason, sites in sorted(reasons.items(), key=lambda item: -len(item[1])):
        lines.append(f"refused: {len(sites)} sites: {reason}; {', '.join(sorted(sites)[:3])}")
    return "\n".join(lines)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"python": sys.version.split()[0], **{name: version(name) for name in ("torch", "transformers")}}


if __name__ == "__main__":
    sys.exit(main())
