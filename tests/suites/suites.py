"""The test suites of Transformers come to the same with guards as without.

    python tests/suites/suites.py SDIST [--types llama,bert] [--jobs N] [--json FILE]

SDIST is the unpacked source distribution of the installed Transformers. Each suite runs in two processes, one of them
guarded. Exit status 1 for another outcome, for anything that the guards say, and for a process that died; 2 where
there is nothing to run. docs/transformers-suites.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from suite_settings import COMPLETE, TYPES

HERE = Path(__file__).parent
LIMIT = 900.0  # seconds for a process; most take twenty
ALIKE = ("passed", "failed", "skipped")
FAULTS = ("different", "alarm", "died")


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sdist", type=Path, help="the folder of the unpacked source distribution")
    parser.add_argument("--types", help="only these, separated by commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes at a time")
    parser.add_argument("--json", metavar="FILE", help="write everything that was found to a file")
    options = parser.parse_args(arguments)
    if problem := _problem(options.sdist):
        print(problem, file=sys.stderr)
        return 2
    names = _names(options.types)
    started = time.perf_counter()
    reports = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for report in pool.map(lambda name: examined(options.sdist / "tests", name), names):
            reports.append(report)
            print(f"[{len(reports)}/{len(names)}] {' '.join(_cells(report))}", file=sys.stderr, flush=True)
    totals = _totals(reports) | {"seconds": round(time.perf_counter() - started, 1), "versions": _versions()}
    print(_table([*reports, {"type": "all", **totals}]))
    print("\n".join(_details(reports)))
    if options.json:
        Path(options.json).write_text(json.dumps({"summary": totals, "types": reports}, indent=1) + "\n")
    return 1 if any(totals["outcomes"].get(fault) for fault in FAULTS) else 0


def _problem(sdist: Path) -> str | None:
    """Why there is nothing to run."""
    try:
        lines = (sdist / "PKG-INFO").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        return f"{sdist} is no unpacked source distribution: {error.strerror}: {error.filename}"
    theirs = next((line.removeprefix("Version: ") for line in lines if line.startswith("Version: ")), "unknown")
    ours = version("transformers")
    return None if theirs == ours else f"{sdist} has the tests of Transformers {theirs}, and {ours} is installed"


def _names(wanted: str | None) -> list[str]:
    known = [*TYPES, *COMPLETE]
    if wanted is None:
        return known
    if unknown := [name for name in wanted.split(",") if name not in known]:
        sys.exit(f"there is no suite for {', '.join(unknown)}; there are: {', '.join(known)}")
    return wanted.split(",")


# ---------------------------------------------------------------- processes


def examined(tests: Path, name: str) -> dict[str, Any]:
    """What came of one suite, run without guards and then with them."""
    started = time.perf_counter()
    plain, guarded = _run(tests, name), _run(tests, name, "--guarded")
    found = compared(plain, guarded)
    return {
        "type": name,
        "tests": found,
        "outcomes": dict(Counter(one["outcome"] for one in found.values())),
        "checks": sum(one["checks"] for one in guarded["tests"].values()),
        "sites": guarded["sites"],
        "seconds": round(time.perf_counter() - started, 1),
    }


def _run(tests: Path, name: str, *options: str) -> dict[str, Any]:
    """The report of one process; nothing is downloaded, and no policy comes from outside."""
    kept = {variable: value for variable, value in os.environ.items() if not variable.startswith("LLM_OP_GUARD")}
    paths = [HERE.parent / "zoo", *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    environment = {**kept, **settings, "PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in paths)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, str(HERE / "suite_process.py"), str(tests.absolute()), name, str(file), *options]
        died = None
        try:
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=LIMIT, env=environment, cwd=folder
            )
        except subprocess.TimeoutExpired:
            died = f"it was not done after {LIMIT:.0f} s"
        else:
            if done.returncode:
                last = done.stderr.strip().splitlines()[-1:] or [""]
                died = f"its process ended with status {done.returncode}: {last[0]}"
        if died is not None:
            return {"tests": {}, "alarms": [], "sites": [], "died": died}
        report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return report


def compared(plain: dict[str, Any], guarded: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each test with an outcome: what it comes to with guards and without, or a fault of ours with the reason."""
    found: dict[str, dict[str, Any]] = {}
    for which, report in (("without guards", plain), ("with guards", guarded)):
        if "died" in report:
            found[f"the process {which}"] = {"outcome": "died", "reason": report["died"]}
    if found:
        return found
    if guarded["alarms"]:
        found["before the first test"] = {"outcome": "alarm", "reason": "\n".join(guarded["alarms"])}
    absent = {"outcome": "absent", "told": "", "alarms": []}
    for test in dict.fromkeys([*plain["tests"], *guarded["tests"]]):
        one, other = plain["tests"].get(test, absent), guarded["tests"].get(test, absent)
        sides = [f"{side['outcome']} {side['told']}".strip() for side in (one, other)]
        if other["alarms"]:
            found[test] = {"outcome": "alarm", "reason": "\n".join(other["alarms"]), "without guards": sides[0]}
        elif sides[0] != sides[1]:
            found[test] = {"outcome": "different", "reason": f"{sides[0]} without guards, {sides[1]} with them"}
        else:
            found[test] = {"outcome": one["outcome"], "reason": one["told"]}
    return found


# ---------------------------------------------------------------- telling


def _totals(reports: list[dict[str, Any]]) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    for report in reports:
        outcomes.update(report["outcomes"])
    sites = {site for report in reports for site in report["sites"]}
    return {
        "outcomes": dict(outcomes),
        "checks": sum(report["checks"] for report in reports),
        "sites": sorted(sites),
    }


_HEADINGS = ("type", "tests", "passed", "failed alike", "skipped", *FAULTS, "checks", "sites", "seconds")


def _cells(report: dict[str, Any]) -> tuple[str, ...]:
    outcomes = report["outcomes"]
    counts = [sum(outcomes.values()), *(outcomes.get(outcome, 0) for outcome in (*ALIKE, *FAULTS))]
    return report["type"], *map(str, [*counts, report["checks"], len(report["sites"]), report["seconds"]])


def _table(reports: list[dict[str, Any]]) -> str:
    rows = [_HEADINGS, *map(_cells, reports)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


def _details(reports: list[dict[str, Any]]) -> Iterator[str]:
    alike: dict[str, list[str]] = {}
    for report in reports:
        for test, one in report["tests"].items():
            if one["outcome"] in FAULTS:
                yield f"{one['outcome'].upper()}: {report['type']} {test}: {one['reason']}"
            elif one["outcome"] == "failed":
                alike.setdefault(f"{test}: {one['reason'].splitlines()[0]:.200}", []).append(report["type"])
    for what, names in alike.items():
        yield f"fails without guards too: {', '.join(names)}: {what}"


def _versions() -> dict[str, str]:
    return {"python": sys.version.split()[0], **{name: version(name) for name in ("torch", "transformers")}}


if __name__ == "__main__":
    sys.exit(main())
