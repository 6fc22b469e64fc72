"""`import llm_op_guard` is light: it imports no framework, in a process where nobody else did."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORKS = ("torch", "transformers", "numpy")
PROGRAM = """
import sys
{first}
print(",".join(name for name in {frameworks!r} if name in sys.modules))
"""


def imported_by(first: str, *flags: str) -> list[str]:
    program = PROGRAM.format(first=first, frameworks=FRAMEWORKS)
    done = subprocess.run(
        [sys.executable, *flags, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    return [name for name in done.stdout.strip().split(",") if name]


@pytest.mark.parametrize(
    "first",
    [
        "import llm_op_guard",
        "import llm_op_guard.cli",
        "import llm_op_guard as og; og.install('transformers'); og.status(); og.uninstall()",
        "import llm_op_guard as og\n@og.guard('x: int')\ndef f(x): return x\nf(1)",
        "import llm_op_guard as og; og.set_policy(A='warn'); og.record.total",
    ],
)
def test_no_framework_is_imported(first: str) -> None:
    assert imported_by(first) == []


def test_no_framework_is_imported_without_docstrings() -> None:
    assert imported_by("import llm_op_guard", "-OO") == []


# What takes 0.3 ms or more to import and is not needed for it (decision 0009).
LATER = {
    "concurrent.futures",
    "ctypes",
    "datetime",
    "difflib",
    "hashlib",
    "importlib.resources",
    "json",
    "logging",
    "pathlib",
    "random",
    "tempfile",
    "textwrap",
    "tomllib",
    "traceback",
    "urllib.parse",
}


def test_what_few_calls_need_is_imported_by_them() -> None:
    # Without `site`, which imports what it finds in an environment.
    program = f"import sys; sys.path[:0] = {sys.path!r}; import llm_op_guard; print({LATER!r} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-Sc", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "set()"


def test_the_test_can_fail() -> None:
    pytest.importorskip("torch")
    assert "torch" in imported_by("import llm_op_guard, torch")


def test_import_is_quick() -> None:
    program = "import time; t = time.perf_counter(); import llm_op_guard; print(time.perf_counter() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(times) < 1
