"""`llm-op-guard bench` as a shell sees it: one quick run, what its JSON holds, and mistakes in its arguments."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm_op_guard.benching.calls import CHECKING
from llm_op_guard.benching.growth import COUNTS, SIZES
from test_cli import command

pytest.importorskip("transformers")

DRAWS = importlib.util.find_spec("matplotlib") is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def done(folder: Path) -> subprocess.CompletedProcess[str]:
    plots = ("--plots", folder) if DRAWS else ()
    return command("bench", "--quick", "--json", folder / "bench.json", *plots)


@pytest.fixture(scope="module")
def written(done: subprocess.CompletedProcess[str], folder: Path) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    return found


def estimates(found: Any) -> Iterator[dict[str, float]]:
    """Everything with an interval, wherever it is."""
    if isinstance(found, dict):
        if found.keys() == {"value", "low", "high"}:
            yield found
        else:
            for inner in found.values():
                yield from estimates(inner)
    elif isinstance(found, list):
        for inner in found:
            yield from estimates(inner)


def test_it_says_what_it_does_and_shows_tables(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert all(line.startswith("llm-op-guard: ") for line in done.stderr.splitlines())
    assert "A quick run" in done.stdout
    headings = [line for line in done.stdout.splitlines() if line.startswith("## ")]
    assert headings[0] == "## RoPE: one call"
    assert headings[-1] == "## Aims"


def test_the_json_says_where_it_ran(written: dict[str, Any]) -> None:
    assert set(written) == {
        "machine", "quick", "calls", "arguments", "rules", "size", "model", "start", "seconds", "notes", "aims",
    }  # fmt: skip
    assert written["quick"] is True
    assert {"llm-op-guard", "Python", "torch", "transformers", "cores", "threads"} <= set(written["machine"])


def test_each_operator_has_each_variant(written: dict[str, Any]) -> None:
    assert [m["operator"] for m in written["calls"]] == ["RoPE", "RMSNorm", "attention", "embedding", "cache update"]
    for measured in written["calls"]:
        variants = {variant["name"]: variant for variant in measured["variants"]}
        assert set(CHECKING) < set(variants)
        for name, variant in variants.items():
            assert (variant["nanoseconds"] is None) == bool(variant["left_out"]), name
        for name in ("guard, in Python", "ifs by hand", "torch._check"):
            assert (variants[name]["let_through"], variants[name]["wrongly_refused"]) == ([], 0)
        assert "guard, in Python / ifs by hand" in measured["ratios"]


def test_curves_have_their_points(written: dict[str, Any]) -> None:
    assert written["arguments"]["at"] == written["rules"]["at"] == list(COUNTS)
    assert written["size"]["at"] == list(SIZES)
    for curve in ("arguments", "rules"):
        assert len(written[curve]["added"]["ifs by hand"]) == len(COUNTS)


def test_models_are_timed_under_each_setting(written: dict[str, Any]) -> None:
    works = [tuple(cost["work"][key] for key in ("model", "phase", "batch")) for cost in written["model"]]
    assert works == [(m, p, b) for m in ("tiny", "12 layers") for p in ("decode", "prefill") for b in (1, 8)]
    for cost in written["model"]:
        for figure in ("p50", "p99", "tokens_per_second"):
            assert set(cost[figure]) == {"unguarded", "A", "A+B"}
        assert set(cost["ratios"]) == {"A", "A+B"}
        assert set(cost["ratios"]["A"]) == {"step", "wall", "p99", "tokens_per_second"}


def test_guards_leave_nothing_behind(written: dict[str, Any]) -> None:
    assert written["start"]["functions_looked_at"] == written["start"]["sites"] > 10
    assert written["start"]["off_differs"] == []


def test_every_estimate_is_a_number_in_its_interval(written: dict[str, Any]) -> None:
    found = list(estimates(written))
    assert len(found) > 200
    for one in found:
        assert all(math.isfinite(end) for end in one.values())
        assert one["low"] <= one["high"]


def test_the_aims_are_there(written: dict[str, Any]) -> None:
    assert len(written["aims"]) == 10
    assert all(aim["reached"] in (True, False, None) for aim in written["aims"])


@pytest.mark.skipif(not DRAWS, reason="matplotlib is not installed")
def test_pictures_are_written(written: dict[str, Any], folder: Path) -> None:
    for name in ("calls.png", "growth.png", "model.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--json", "nowhere/x.json"), "cannot write nowhere/x.json: there is no folder"),
        (("--json", "."), "cannot write .: it is a folder; name a file in it"),
        (("--plots", "nowhere"), "nowhere" if DRAWS else "plots need matplotlib: pip install 'llm-op-guard[bench]'"),
    ],
    ids=["no folder for JSON", "JSON is a folder", "plots"],
)
def test_what_cannot_be_written_is_said_first(tmp_path: Path, arguments: tuple[str, ...], problem: str) -> None:
    bench = command("bench", *arguments, cwd=tmp_path)
    assert (bench.returncode, bench.stdout) == (2, "")
    assert bench.stderr.startswith("llm-op-guard: error: ")
    assert problem in bench.stderr
    assert bench.stderr.count("\n") == 1


def test_guards_that_are_off_cannot_be_timed() -> None:
    bench = command("bench", LLM_OP_GUARD="off")
    assert bench.returncode == 2
    assert bench.stderr == ("llm-op-guard: error: LLM_OP_GUARD=off switches every guard off; unset it for benchmarks\n")


@pytest.mark.parametrize("arguments", [("--threads", "0"), ("--rounds", "3"), ("extra",)])
def test_wrong_arguments_are_a_usage_message(arguments: tuple[str, ...]) -> None:
    bench = command("bench", *arguments)
    assert bench.returncode == 2
    assert bench.stderr.startswith("usage: llm-op-guard")
    assert "Traceback" not in bench.stderr
