"""Whether checks are native, as users choose and as a machine allows; each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401 - what is usable hangs on it

import llm_op_guard as og
from llm_op_guard.guard.fast import usable
from llm_op_guard.native.program import Refused

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import torch, llm_op_guard as og
{before}
@og.guard("x: floating[B, D]\\ny: floating[B, D]")
def add(x, y): return x + y

add(torch.ones(2, 3), torch.ones(2, 3))
try:
    add(torch.ones(2, 3), torch.ones(2, 4))
except og.GuardError as error:
    print("stopped", error.violations[0].rule_id)
from llm_op_guard.guard.fast import usable
found = usable()
print(getattr(found, "reason", "native"))
"""
# What a program does before, and its environment.
CHOICES: dict[str, tuple[str, dict[str, str]]] = {
    "nothing": ("", {}),
    "1": ("", {"LLM_OP_GUARD_NATIVE": "1"}),
    "0": ("", {"LLM_OP_GUARD_NATIVE": "0"}),
    "not built": ("import sys; sys.modules['llm_op_guard.native._check'] = None", {}),
    "an older torch": ("del torch.Tensor.__dlpack_c_exchange_api__", {}),
    "a build of other sources": (
        "import llm_op_guard.native._check as built; built.SOURCES = 'of before'",
        {},
    ),
    "a stale build": (
        "import sys, types; sys.modules['llm_op_guard.native._check'] = types.SimpleNamespace(OPERATIONS=('YES',))",
        {},
    ),
}
# PyTorch is imported once, and each program runs in a fork of its own.
FORKING = """
import json, os, sys, traceback
import torch

assert "llm_op_guard" not in sys.modules
for text, environment, output in json.load(sys.stdin):
    if os.fork() == 0:
        os.environ.update(environment)
        with open(output, "w") as sys.stdout:
            try:
                exec(text, {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc(file=sys.stdout)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("choices")
    files = {name: folder / f"{name}.txt" for name in CHOICES}
    tasks = [
        (PROGRAM.format(before=before), environment, str(files[name]))
        for name, (before, environment) in CHOICES.items()
    ]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", FORKING]
    subprocess.run(command, input=json.dumps(tasks), text=True, check=True, env=variables)
    return files


def found(output: Path) -> str:
    text = output.read_text()
    assert text.startswith("stopped y.shape\n") and text.count("\n") == 2, text
    return text.splitlines()[1]


@pytest.mark.skipif(isinstance(usable(), Refused), reason=f"no native checks here: {usable()}")
def test_where_it_is_built_it_is_used(outputs: dict[str, Path]) -> None:
    assert found(outputs["nothing"]) == "native"
    assert found(outputs["1"]) == "native"


def test_users_may_have_none(outputs: dict[str, Path]) -> None:
    assert found(outputs["0"]) == "LLM_OP_GUARD_NATIVE=0"


def test_where_it_is_not_built(outputs: dict[str, Path]) -> None:
    assert "is not built here" in found(outputs["not built"])


def test_a_build_of_other_sources_is_not_used(outputs: dict[str, Path]) -> None:
    for name in ("a stale build", "a build of other sources"):
        assert found(outputs[name]) == "the extension is of another version of llm-op-guard: install it anew"


def test_an_older_torch_has_no_table(outputs: dict[str, Path]) -> None:
    reason = found(outputs["an older torch"])
    assert "has no table of functions for DLPack" in reason or "is not built here" in reason


@pytest.mark.parametrize("mock", ["unittest.mock.MagicMock()", "types.ModuleType('torch')"])
@pytest.mark.parametrize("native", ["0", "1"])
def test_a_stand_in_for_torch_lets_guards_be_made(mock: str, native: str) -> None:
    body = "x: floating[B]\ny: floating[B]"
    program = f"""
import sys, types, unittest.mock
sys.modules["torch"] = {mock}
import llm_op_guard as og
print(og.guard({body!r})(lambda x, y: x).__name__)
"""
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "LLM_OP_GUARD_NATIVE": native}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables, check=False)
    assert done.stdout == "<lambda>\n", done.stderr


@pytest.mark.parametrize("body", ["x: any[2]", "require(finite(x))", "x: list[any[2]]"])
def test_what_cannot_be_understood_is_no_news_for_a_call(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_OP_GUARD_NATIVE", "yes")
    with pytest.raises(og.PolicyError, match="LLM_OP_GUARD_NATIVE='yes' cannot be understood; write 0"):
        og.guard(body)(lambda x: x)


LATER = """
import sys, llm_op_guard as og
og.install("torch")
import torch
from llm_op_guard.guard.fast import usable
from llm_op_guard.native.program import Refused

F = torch.nn.functional
armed = [name for name in vars(F) if name.startswith("__llm_op_guard") and name.endswith("accepts")]
print(len(armed), isinstance(usable(), Refused))
try:
    F.layer_norm(torch.ones(3, 4), (3,))
except og.GuardError:
    print("stopped")
watches = sum(type(finder).__name__ == "ModuleWatch" for finder in sys.meta_path)
compiled = torch.compile(lambda x: F.layer_norm(x, (4,)), backend="eager", fullgraph=True)
print(tuple(compiled(torch.ones(3, 4)).shape), watches - sum(type(f).__name__ == "ModuleWatch" for f in sys.meta_path))
"""


@pytest.mark.skipif(isinstance(usable(), Refused), reason=f"no native checks here: {usable()}")
def test_guards_from_before_torch_was_imported_are_native_afterwards() -> None:
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["4 False", "stopped", "(3, 4) 1"], "and Dynamo's import is watched no longer"


GUARDED_BEFORE = """
import faulthandler, sys, llm_op_guard as og
from llm_op_guard.install.operation import GUARDED
faulthandler.dump_traceback_later(60, exit=True)

@og.guard("x: any[B, D]")
def first(x):
    return x

@og.guard("x: any[D, D]")
def second(x):
    return x

import torch
print(*(getattr(f, GUARDED).guard.checks("AB").accepting is not None for f in (first, second)))
print(tuple(first(torch.ones(2, 3)).shape))
try:
    second(torch.ones(2, 3))
except og.GuardError:
    print("stopped")
"""


@pytest.mark.parametrize("native", ["1", "0"])
def test_a_function_may_be_guarded_before_torch_is_imported(native: str) -> None:
    """Making the check of one imports torch, and that adjusts all guards there are."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "LLM_OP_GUARD_NATIVE": native}
    done = subprocess.run(
        [sys.executable, "-c", GUARDED_BEFORE], capture_output=True, text=True, check=False, env=variables
    )
    assert done.returncode == 0, done.stderr
    used = native == "1" and not isinstance(usable(), Refused)
    assert done.stdout.splitlines() == [f"{used} {used}", "(2, 3)", "stopped"]
