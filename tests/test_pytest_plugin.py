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
    # Where CI is set, pytest says each message twice.
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
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


OTHERS = """
import multiprocessing, subprocess, sys, threading, time
import llm_op_guard as og

@og.guard("n: int\\nrequire(n < 3, id='small')")
def count(n): return n

def quietly(n=5):
    try: count(n)
    except og.GuardError: pass

def test_thread():
    thread = threading.Thread(target=quietly)
    thread.start()
    thread.join()
def test_fork():
    child = multiprocessing.get_context("fork").Process(target=quietly)
    child.start()
    child.join()
def test_child():
    subprocess.run([sys.executable, "-c", "import test_others; test_others.quietly(7)"], check=True)
def test_right(): quietly(2)
def test_fixture(late): pass

import pytest
@pytest.fixture
def late():
    yield
    quietly(9)
"""


def test_threads_children_and_fixtures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_others.py").write_text(OTHERS)
    monkeypatch.chdir(tmp_path)
    done = run(tmp_path, "--op-guard", "-o", "op_guard_libraries=torch")
    assert "3 failed, 2 passed, 1 error" in done.stdout, done.stdout
    assert done.stdout.count("rules were broken and the test passed") == 4
    assert done.stdout.count("count: n = 5, expected n < 3 (in process ") == 1
    assert done.stdout.count("count: n = 7, expected n < 3 (in process ") == 1
    assert "count: n = 9, expected n < 3" in done.stdout


SKIPPED = """
import pytest, unittest, llm_op_guard as og

@og.guard("n: int\\nrequire(n < 3, id='small')")
def count(n): return n

def quietly(n):
    try: count(n)
    except og.GuardError: pass

def test_skipped():
    quietly(5)
    pytest.skip("no more")
def test_skipped_otherwise():
    quietly(6)
    raise unittest.SkipTest("no more")
def test_rightly_skipped():
    quietly(2)
    pytest.skip("no more")
@pytest.mark.op_guard_expected
def test_meant():
    quietly(7)
    pytest.skip("no more")
def test_expected_to_fail():
    quietly(8)
    pytest.xfail("not yet")
@pytest.mark.xfail(strict=True)
def test_marked_as_expected_to_fail():
    quietly(9)
"""


def test_a_test_that_is_skipped_after_a_rule_was_broken_fails(tmp_path: Path) -> None:
    (tmp_path / "test_skipping.py").write_text(SKIPPED)
    done = run(tmp_path, "--op-guard", "-o", "op_guard_libraries=torch")
    assert "2 failed, 2 skipped, 2 xfailed" in done.stdout, done.stdout
    assert done.stdout.count("rules were broken and the test was skipped; one that means to is marked") == 2
    assert "count: n = 5, expected n < 3" in done.stdout and "count: n = 6, expected n < 3" in done.stdout


def test_what_is_broken_after_the_last_test_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import threading, pytest, llm_op_guard as og\n"
        "count = og.guard('require(n < 3)')(lambda n: n)\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_sessionfinish():\n"
        "    try: count(5)\n"
        "    except og.GuardError: pass\n"
    )
    (tmp_path / "test_it.py").write_text("def test(): pass")
    done = run(tmp_path, "--op-guard", "-o", "op_guard_libraries=torch")
    assert done.returncode == 1 and "1 passed" in done.stdout, done.stdout
    assert "rules were broken after the last test:" in done.stdout
    assert "n = 5, expected n < 3" in done.stdout


PREDICATES = """
import llm_op_guard as og, pytest

@og.predicate
def even(n): return n % 2 == 0

@og.guard("from test_predicates_here import even\\nm: int\\nrequire(even(n), id='even')")
def halves(n, m=1): return n // 2

@og.guard("from nobody_has_it import odd\\nn: int\\nrequire(odd(n), id='odd')")
def third(n): return n // 3

def test_right(): assert halves(4) == 2
def test_wrong(): halves(3)
def test_keyword(): halves(m=2, n=5)
def test_the_others_are_judged_first(): halves(3, "x")
def test_unregistered():
    with pytest.warns(og.GuardWarning, match="asks nobody_has_it.odd, which nobody registered"): third(3)
"""


def test_predicates_are_asked_in_calls(tmp_path: Path) -> None:
    (tmp_path / "test_predicates_here.py").write_text(PREDICATES)
    done = run(tmp_path, "--op-guard", "-o", "op_guard_libraries=torch")
    assert "3 failed, 2 passed" in done.stdout, done.stdout
    assert done.stdout.count("even (class C, certain)") == 2
    assert "expected int" in done.stdout
    assert "2 passed" not in run(tmp_path).stdout  # without the option nothing asks


UNGUARDED = """
import sys, llm_op_guard as og
def test(): assert og.status().libraries == [] and "torch" not in sys.modules
"""


def test_without_the_option_nothing_is_guarded(tmp_path: Path) -> None:
    (tmp_path / "test_project.py").write_text(UNGUARDED)
    done = run(tmp_path)
    assert "1 passed" in done.stdout, done.stdout
    assert "1 failed" in run(tmp_path, "--op-guard").stdout


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
