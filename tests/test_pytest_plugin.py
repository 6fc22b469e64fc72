"""`pytest --op-guard`, and tests made from contracts; the example project."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import llm_op_guard as og
from llm_op_guard.testing import Case, cases

ROOT = Path(__file__).resolve().parents[1]


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own, with the plugin whether or not the package is installed."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(folder)]
    command += ["-p", "no:cacheprovider", "-p", "llm_op_guard.pytest_plugin", *options, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


TESTS = """
import pytest, torch, llm_op_guard as og
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

def call(width):
    q, table = torch.randn(1, 2, 3, 8), torch.randn(1, 3, width)
    return apply_rotary_pos_emb(q, q, table, table)

def test_right(): call(8)
def test_wrong(): call(1)
def test_swallowed():
    try: call(1)
    except Exception: pass
@pytest.mark.op_guard_expected
def test_meant():
    with pytest.raises(og.GuardError): call(1)
"""


def test_a_project_with_guards_on(tmp_path: Path) -> None:
    (tmp_path / "test_project.py").write_text(TESTS)
    done = run(tmp_path, "--op-guard")
    assert "2 failed, 2 passed" in done.stdout, done.stdout
    assert "cos.shape[2] = 1, expected D = 8" in done.stdout
    assert "rules were broken and the test passed; one that means to is marked op_guard_expected:" in done.stdout


def test_without_the_option_nothing_is_guarded(tmp_path: Path) -> None:
    (tmp_path / "test_project.py").write_text(TESTS.partition("@pytest")[0])
    done = run(tmp_path)
    assert "3 passed" in done.stdout, done.stdout


def test_a_library_that_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "test_project.py").write_text("def test(): pass")
    done = run(tmp_path, "--op-guard", "-o", "op_guard_libraries=tensorflow")
    assert "op_guard_libraries: nothing is known of tensorflow" in done.stderr + done.stdout


def test_the_example_project() -> None:
    done = run(ROOT / "examples" / "own_operator", "--op-guard")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@og.guard("x: floating[N, D]\nw: floating[D]\nrequire(0 <= n < 4, id='n')\nn: int")
def scale(x, w, n):  # type: ignore[no-untyped-def]
    return x * w


@cases(scale, valid=5, broken=2)
def test_cases(case: Case) -> None:
    if case.accepted:
        scale(**case.arguments())
        return
    with pytest.raises(og.GuardError) as caught:
        scale(**case.arguments())
    assert case.rule in [violation.rule_id for violation in caught.value.violations]


def test_cases_are_for_contracts() -> None:
    with pytest.raises(TypeError, match="not a builtin_function_or_method"):
        cases(len)
