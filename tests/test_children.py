"""Python processes that a guarded program starts are guarded too: under `run`, or through the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import llm_op_guard
from llm_op_guard.cli import main

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("LLM_OP_GUARD")} | {
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(Path(llm_op_guard.__file__).parents[1]),
}
# What a process says of itself: the libraries that are guarded in it, None where ours is not even loaded.
SHOW = """
import json, sys
og = sys.modules.get("llm_op_guard")
print(json.dumps(og and og.status().libraries), flush=True)
"""


@pytest.fixture(autouse=True)
def _has_transformers() -> None:
    pytest.importorskip("transformers")


def program(folder: Path, text: str, name: str = "program.py") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return str(path)


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=CLEAN | environment,
        timeout=300,
        check=False,
    )


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "llm_op_guard", "run", *arguments, **environment)


def starting(*flags: str) -> str:
    return f"""
        import subprocess, sys
        subprocess.run([sys.executable, *{flags!r}, sys.argv[1]], check=True)
    """


def test_a_child_of_a_program_under_run_is_guarded(tmp_path: Path) -> None:
    done = run(program(tmp_path, starting()), program(tmp_path, SHOW, "child.py"))
    assert json.loads(done.stdout) == ["transformers"], done.stderr


def test_a_grandchild_too(tmp_path: Path) -> None:
    between = program(tmp_path, starting(), "between.py")
    text = "import subprocess, sys\nsubprocess.run([sys.executable, *sys.argv[1:]], check=True)"
    done = run(program(tmp_path, text), between, program(tmp_path, SHOW, "child.py"))
    assert json.loads(done.stdout) == ["transformers"], done.stderr


def test_without_run_nothing_is(tmp_path: Path) -> None:
    done = python(program(tmp_path, starting()), program(tmp_path, SHOW, "child.py"))
    assert json.loads(done.stdout) is None


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_a_child_that_ignores_the_environment_runs_unguarded(flag: str, tmp_path: Path) -> None:
    done = run(program(tmp_path, starting(flag)), program(tmp_path, SHOW, "child.py"))
    assert json.loads(done.stdout) is None, done.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_workers_of_multiprocessing_are_guarded(method: str, tmp_path: Path) -> None:
    text = f"""
        import multiprocessing, sys

        def work(queue):
            og = sys.modules.get("llm_op_guard")
            queue.put(og and og.status().libraries)

        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            queue = context.SimpleQueue()
            worker = context.Process(target=work, args=(queue,))
            worker.start()
            print(queue.get())
            worker.join()
    """
    assert run(program(tmp_path, text)).stdout == "['transformers']\n"


def test_a_spawned_worker_calls_the_script_as_its_parent_does(tmp_path: Path) -> None:
    """Waivers, settings for one operator and imported predicates hold there."""
    text = """
        import multiprocessing, os
        import llm_op_guard as og

        @og.predicate
        def fits(n):
            return n < 8

        @og.guard("from __main__ import fits\\nn: int\\nrequire(n > 0, id='some')\\nrequire(fits(n), id='fits')")
        def waived(n):
            return n

        @og.guard("n: int\\nrequire(n > 0, id='some')")
        def switched_off(n):
            return n

        og.waive("some", site="__main__.waived", reason="ticket 7")

        def work():
            print(waived(0), switched_off(0), og.record.violations[-1].site, flush=True)
            og.verify(waived, 8)

        if __name__ == "__main__":
            worker = multiprocessing.get_context("spawn").Process(target=work)
            worker.start()
            worker.join()
    """
    done = python(program(tmp_path, text), LLM_OP_GUARD="__main__.switched_off:A=off")
    assert done.stdout == "0 0 __main__.waived\n", done.stderr
    assert "rule         fits (class C, certain)" in done.stderr


MODEL = """
    import subprocess, sys
    if len(sys.argv) > 1:
        sys.exit(subprocess.run([sys.executable, __file__]).returncode)
    import torch
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    q, table = torch.ones(1, 2, 3, 4), torch.ones(1, 3, 1)
    apply_rotary_pos_emb(q, q, table, table)
    print("went on")
"""


def test_a_bad_call_in_a_child_is_stopped(tmp_path: Path) -> None:
    done = run(program(tmp_path, MODEL), "in a child")
    assert done.returncode == 1 and done.stdout == ""
    assert "apply_rotary_pos_emb: cos.shape[2] = 1, expected D = 4" in done.stderr


OWN = """
    import llm_op_guard as og

    @og.guard("x: int")
    def f(x):
        return x

    f("no")
    print("went on")
"""


def test_record_lets_it_go_on_and_writes_it_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "guards.jsonl"
    done = run("--record", str(file), program(tmp_path, starting()), program(tmp_path, OWN, "child.py"))
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
    assert "Warning: " not in done.stderr
    assert main(["report", str(file)]) == 0
    assert "__main__.f  x.type" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("policy", "goes_on", "written"), [("", True, 1), ("A=raise", False, 1), ("off", True, 0), ("B=off", True, 1)]
)
def test_record_gives_way_to_the_environment(policy: str, goes_on: bool, written: int, tmp_path: Path) -> None:
    file = tmp_path / "guards.jsonl"
    done = run("--record", str(file), program(tmp_path, OWN), LLM_OP_GUARD=policy)
    assert (done.returncode == 0, "went on" in done.stdout) == (goes_on, goes_on), done.stderr
    assert (len(file.read_text().splitlines()) if file.exists() else 0) == written
    shown = f"llm-op-guard: violations are recorded; read them with: llm-op-guard report {file}\n"
    assert (shown in done.stderr) == bool(written)
    assert done.stderr.splitlines()[-1].endswith(f"{written} violation{'' if written == 1 else 's'}")


def test_record_to_a_directory_is_one_line(tmp_path: Path) -> None:
    done = run("--record", str(tmp_path), program(tmp_path, OWN))
    assert done.returncode == 2
    assert done.stderr == (
        f"llm-op-guard: error: cannot record to {tmp_path}: it is a directory; name a file, such as guards.jsonl\n"
    )


def test_options_after_the_program_are_its_own(tmp_path: Path) -> None:
    done = run(program(tmp_path, "import sys; print(sys.argv[1:])"), "--record", "x")
    assert done.stdout == "['--record', 'x']\n"


# ---------------------------------------------------------------- the module that Python runs at the start


def test_another_sitecustomize_runs_first(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    program(theirs, "import sys; sys.theirs = 'llm_op_guard' in sys.modules", "sitecustomize.py")
    show = "import sys, sitecustomize; print(sys.theirs, sitecustomize.__file__)"
    text = "import subprocess, sys\nsubprocess.run([sys.executable, sys.argv[1]], check=True)"
    done = run(
        program(tmp_path, text),
        program(tmp_path, show, "child.py"),
        PYTHONPATH=os.pathsep.join([CLEAN["PYTHONPATH"], str(theirs)]),
    )
    assert done.stdout == f"False {theirs / 'sitecustomize.py'}\n", done.stderr


@pytest.mark.parametrize("theirs", ["1 / 0", "import nowhere_to_be_found"])
def test_another_sitecustomize_fails_as_without_us(theirs: str, tmp_path: Path) -> None:
    program(tmp_path / "theirs", theirs, "sitecustomize.py")
    path = os.pathsep.join([CLEAN["PYTHONPATH"], str(tmp_path / "theirs")])
    show = program(tmp_path, SHOW, "child.py")
    alone = python(show, PYTHONPATH=path).stderr
    done = run(program(tmp_path, starting()), show, PYTHONPATH=path)
    assert json.loads(done.stdout) == ["transformers"], done.stderr
    assert alone and alone.splitlines()[1] in done.stderr


def with_startup(*rest: str) -> str:
    from llm_op_guard.run import STARTUP

    return os.pathsep.join([str(STARTUP), *rest])


def test_a_python_without_the_library_starts_as_ever(tmp_path: Path) -> None:
    done = python(program(tmp_path, "print('ran')"), PYTHONPATH=with_startup(), PYTHONNOUSERSITE="1")
    assert (done.stdout, done.stderr) == ("ran\n", "")


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("LLM_OP_GUARD_INSTALL", "transformer", "nothing is known of 'transformer'; did you mean 'transformers'?"),
        ("LLM_OP_GUARD_RECORD", "/", "cannot record to /: it is a directory"),
    ],
)
def test_what_is_wrong_is_a_warning_and_the_program_runs(variable: str, value: str, said: str, tmp_path: Path) -> None:
    environment = {"LLM_OP_GUARD_INSTALL": "transformers", variable: value}
    done = python(program(tmp_path, "print('ran')"), PYTHONPATH=with_startup(CLEAN["PYTHONPATH"]), **environment)
    assert done.stdout == "ran\n"
    assert f"llm-op-guard guards nothing in this process: {said}" in done.stderr


# ---------------------------------------------------------------- the environment alone


@pytest.mark.parametrize("value", ["transformers", " transformers, "])
def test_the_environment_installs_at_import(value: str) -> None:
    done = python("-c", "import llm_op_guard\n" + SHOW, LLM_OP_GUARD_INSTALL=value)
    assert json.loads(done.stdout) == ["transformers"]


def test_a_library_that_is_unknown_is_a_warning_at_import() -> None:
    done = python("-c", "import llm_op_guard; print('ran')", LLM_OP_GUARD_INSTALL="vlm")
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert (
        "GuardWarning: llm-op-guard guards nothing in this process: nothing is known of 'vlm'; known: transformers, "
        "torch (from LLM_OP_GUARD_INSTALL)" in done.stderr
    )


def test_an_empty_value_installs_nothing() -> None:
    done = python("-c", "import llm_op_guard\n" + SHOW, LLM_OP_GUARD_INSTALL="")
    assert json.loads(done.stdout) == []
