"""The command `llm-op-guard` as a shell sees it: output, exit codes, and never a traceback for a user's mistake."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import llm_op_guard
from llm_op_guard.cli import main
from llm_op_guard.formatting import formatted

Called = Callable[..., subprocess.CompletedProcess[str]]

CLEAN = {
    name: value
    for name, value in os.environ.items()
    if name not in ("LLM_OP_GUARD", "NO_COLOR", "PYTHONSAFEPATH", "PYTHONWARNINGS")
} | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(llm_op_guard.__file__).parents[1])}

SUMMARY = re.compile(r"llm-op-guard: (\d+) sites?, (\d+) checks?, (\d+) violations?")


def command(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llm_op_guard", *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=cwd,
        env=CLEAN | environment,
        timeout=300,
        check=False,
    )


@pytest.fixture
def called(capsys: pytest.CaptureFixture[str]) -> Called:
    """The same in this process, for what needs none of its own: what `main` returns is the exit code."""

    def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        words = [*map(str, arguments)]
        code = main(words)
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    return call


def program(folder: Path, text: str, name: str = "program.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def summary(done: subprocess.CompletedProcess[str]) -> tuple[int, int, int]:
    """The figures of the closing line, which is the last one and the only one of its kind."""
    last = done.stderr.splitlines()[-1]
    match = SUMMARY.fullmatch(last)
    assert match, done.stderr
    assert len(SUMMARY.findall(done.stderr)) == 1
    return int(match[1]), int(match[2]), int(match[3])


# ---------------------------------------------------------------- the command itself


def test_version() -> None:
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"llm-op-guard {llm_op_guard.__version__}\n")


def test_help_names_the_commands(called: Called) -> None:
    done = called("--help")
    assert done.returncode == 0
    for name in ("demo", "run", "doctor", "check", "report"):
        assert re.search(rf"^    {name}\b", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments", [(), ("nonsense",), ("check",), ("run",), ("run", "-m"), ("doctor", "--nonsense"), ("demo", "extra")]
)
def test_misuse_is_a_usage_message(called: Called, arguments: tuple[str, ...]) -> None:
    done = called(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: llm-op-guard")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("arguments", [("doctor",), ("demo",), ("run", "program.py"), ("run", "-m", "program")])
def test_a_bad_environment_is_one_line(arguments: tuple[str, ...], tmp_path: Path) -> None:
    program(tmp_path, "print('ran')")
    done = command(*arguments, cwd=tmp_path, LLM_OP_GUARD="A=loud")
    assert done.returncode == 2
    assert done.stderr == (
        "llm-op-guard: error: LLM_OP_GUARD: unknown or repeated 'loud' in the policy setting 'loud'; "
        "known: raise, warn, record, off, sync, async, every=N or sample=P\n"
    )
    assert "ran" not in done.stdout


def test_main_returns_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert main(["nonsense"]) == 2
    assert main(["check", "/nowhere/x.contract"]) == 2
    assert "cannot read /nowhere/x.contract: No such file or directory" in capsys.readouterr().err


def test_a_reader_who_leaves_is_no_error(tmp_path: Path) -> None:
    good = program(tmp_path, "def f(x):\n    x: int\n", "good.contract")
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "llm_op_guard", "check", str(good)],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        env=CLEAN,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


# ---------------------------------------------------------------- colour


def on_a_terminal(*arguments: str, **environment: str) -> str:
    main, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "llm_op_guard", *arguments],
        stdout=other,
        stderr=other,
        env=CLEAN | {"TERM": "xterm"} | environment,
    )
    os.close(other)
    output = b""
    try:
        while part := os.read(main, 65536):
            output += part
    except OSError:  # the other side is closed
        pass
    os.close(main)
    process.wait(60)
    return output.decode()


def test_colour_is_for_terminals() -> None:
    assert "\033[" in on_a_terminal("check", "nowhere.contract")
    assert "\033[" not in command("check", "nowhere.contract").stderr


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colour_can_be_refused(environment: dict[str, str]) -> None:
    output = on_a_terminal("check", "nowhere.contract", **environment)
    assert "cannot read" in output
    assert "\033[" not in output


def test_an_empty_no_color_refuses_nothing() -> None:
    assert "\033[" in on_a_terminal("check", "nowhere.contract", NO_COLOR="")


# ---------------------------------------------------------------- check

GOOD = "def f(x, y):\n    x: floating[_, D]\n    y: like(x)\n    require(D % 2 == 0)\n\ndef g(x):\n    x: int\n"
BAD = "def f(x):\n    x: floting[B]\n"


def test_contracts_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["contracts"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"^transformers/norm:rms_norm +8 +A +RMSNorm with one weight", listed, re.MULTILINE)
    for name in ("rms_norm", "norm:rms_norm", "transformers/norm:rms_norm"):
        assert main(["contracts", name]) == 0
        shown = capsys.readouterr().out
        assert "self.weight: floating[...] @ dev" in shown
        assert re.search(r"^weight_fits +A +certain +the weight scales each column", shown, re.MULTILINE)
    assert main(["contracts", "apply_rotary_pos_emb"]) == 0  # reasons that are constants of the file
    assert re.search(
        r"^cos.shape +A +certain +cos and sin are broadcast over heads", capsys.readouterr().out, re.MULTILINE
    )
    assert main(["contracts", "rms_nor"]) == 2
    assert "did you mean 'rms_norm'?" in capsys.readouterr().err


def test_contracts_of_a_file_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = program(tmp_path, GOOD, "good.contract"), program(tmp_path, BAD, "bad.contract")
    assert main(["contracts", str(good)]) == 0
    shown = capsys.readouterr().out
    assert f"{good}:f" in shown and f"{good}:g" in shown and "require(D % 2 == 0)" in shown
    assert main(["contracts", f"{good}:g"]) == 0
    assert "def f(" not in capsys.readouterr().out
    assert main(["contracts", f"{good}:h"]) == 2
    assert "there is no contract or file" in capsys.readouterr().err
    assert main(["contracts", str(bad)]) == 2
    assert "did you mean 'floating'?" in capsys.readouterr().err


def test_contracts_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = program(tmp_path, GOOD, "good.contract")
    assert main(["contracts", str(good), "--json"]) == 0
    as_json = program(tmp_path, capsys.readouterr().out, "good.json")
    assert main(["contracts", str(as_json), "--json"]) == 0
    assert capsys.readouterr().out == as_json.read_text()
    assert main(["check", str(as_json)]) == 0
    capsys.readouterr()
    assert main(["contracts", "--json"]) == 0
    names = [contract["name"] for contract in json.loads(capsys.readouterr().out)["contracts"]]
    assert "rms_norm" in names and "apply_rotary_pos_emb" in names
    assert main(["contracts", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out)["$id"] == "urn:llm-op-guard:contract"


# ---------------------------------------------------------------- fmt

CROOKED = """\
'Of a file.'
# before
MOST={"a":1}
def f( x,y ):   # beside
    # within
    x : floating[B , D]
    require( D%2==0,  # why
       id='even' )
"""
STRAIGHT = """\
"Of a file."

# before
MOST = {"a": 1}


def f(x, y):  # beside
    # within
    x: floating[B, D]
    require(
        D % 2 == 0,  # why
        id="even",
    )
"""


def test_fmt(called: Called, tmp_path: Path) -> None:
    file = program(tmp_path, CROOKED, "crooked.contract")
    link = tmp_path / "link.contract"
    link.symlink_to(file)
    file.chmod(0o640)
    done = called("fmt", "--check", file)
    assert (done.returncode, done.stdout, done.stderr) == (1, f"would format {file}\n", "")
    assert file.read_text() == CROOKED
    done = called("fmt", link)
    assert (done.returncode, done.stdout) == (0, f"formatted {link}\n")
    assert file.read_text() == STRAIGHT and link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    done = called("fmt", "--check", file, link)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["crooked.contract", "link.contract"]


def test_fmt_beside_a_file_named_like_a_module_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = program(tmp_path, CROOKED, "crooked.contract")
    for name in ("sysconfig.py", "ruff.py", "os.py"):
        program(tmp_path, "raise SystemExit('not me')\n", name)
    monkeypatch.chdir(tmp_path)
    assert formatted(CROOKED, str(file)) == STRAIGHT


def test_fmt_of_json(called: Called, tmp_path: Path) -> None:
    file = program(
        tmp_path, '{"name": "f", "signature": "x", "body": [{"require": "x > 1", "hint": "\u00e9"}]}', "a.json"
    )
    assert called("fmt", file).returncode == 0
    assert file.read_text(encoding="utf-8").startswith('{\n  "name": "f",\n') and '"hint": "\u00e9"' in file.read_text(
        "utf-8"
    )
    assert called("fmt", "--check", file).returncode == 0


def test_fmt_leaves_what_is_wrong_alone(called: Called, tmp_path: Path) -> None:
    bad, good = program(tmp_path, BAD, "bad.contract"), program(tmp_path, CROOKED, "crooked.contract")
    done = called("fmt", bad, tmp_path / "nowhere.contract", good)
    assert done.returncode == 2
    assert "did you mean 'floating'?" in done.stderr and "cannot read the file: No such file" in done.stderr
    assert bad.read_text() == BAD and good.read_text() == STRAIGHT


def test_fmt_without_ruff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    file = program(tmp_path, CROOKED, "crooked.contract")
    assert main(["fmt", str(file)]) == 2
    assert "pip install 'llm-op-guard[fmt]'" in capsys.readouterr().err
    assert file.read_text() == CROOKED


# ---------------------------------------------------------------- check


def test_check_counts(called: Called, tmp_path: Path) -> None:
    good = program(tmp_path, GOOD, "good.contract")
    done = called("check", good)
    assert done.returncode == 0
    assert re.fullmatch(rf"{re.escape(str(good))}: 2 contracts, \d+ rules\n", done.stdout)
    assert done.stderr == ""


ASKING = """from shop.rules import fits
from till import known

def operator(x, y):
    x: int
    require(fits(x), id="fits", because="ten at most")
    require(known(y))
"""


def test_rules_of_class_c_are_shown_with_the_modules_that_they_ask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "asking.contract"
    file.write_text(ASKING)
    assert main(["check", str(file)]) == 0
    said = f"{file}: 1 contract, 3 rules; 2 of class C (og.verify), with shop.rules, till\n"
    assert capsys.readouterr().out == said
    assert main(["contracts", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "from shop.rules import fits\nfrom till import known\n" in shown
    assert re.search(r"^fits +C +certain +ten at most$", shown, re.MULTILINE)
    assert re.search(r"^x\.type +A +certain", shown, re.MULTILINE)
    assert main(["contracts", "--json", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["imports"] == {"fits": "shop.rules", "known": "till"}


def test_check_goes_on_after_a_bad_file(called: Called, tmp_path: Path) -> None:
    bad, good = program(tmp_path, BAD, "bad.contract"), program(tmp_path, GOOD, "good.contract")
    done = called("check", bad, good)
    assert done.returncode == 1
    assert done.stdout.splitlines()[:3] == [
        f"{bad}:2:8: unknown type 'floting'; did you mean 'floating'?",
        "        x: floting[B]",
        "           ^",
    ]
    assert done.stdout.splitlines()[3].startswith(f"{good}: 2 contracts")


def test_check_of_a_missing_file(called: Called, tmp_path: Path) -> None:
    good, bad = program(tmp_path, GOOD, "good.contract"), program(tmp_path, BAD, "bad.contract")
    done = called("check", "nowhere.contract", tmp_path, bad, good)
    assert done.returncode == 2
    assert "llm-op-guard: error: cannot read nowhere.contract: No such file or directory" in done.stderr
    assert f"llm-op-guard: error: cannot read {tmp_path}: Is a directory" in done.stderr
    assert "2 contracts" in done.stdout and "floting" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"x = (", b"def f(x):\n    x: int\n" * 2, b"\x00"])
def test_check_of_what_is_no_contract(called: Called, content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "odd.contract"
    file.write_bytes(content)
    done = called("check", file)
    assert done.returncode == 1
    assert done.stdout.startswith(f"{file}:")
    assert done.stderr == ""


WORDY = "def f(x):\n    x: any[_, D]\n    require(D > 4)\n    require(D > 2, id='few')\n"


def test_check_warns_of_what_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "wordy.contract"
    file.write_text(WORDY)
    said = (
        f"{file}:4:13: warning: the rule 'few' says nothing new: D > 2, while D > 4 is required in line 3\n"
        "        require(D > 2, id='few')\n"
        "                ^\n"
        f"{file}: 1 contract, 4 rules, 1 warning\n"
    )
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr() == (said, "")
    assert main(["check", "--strict", str(file)]) == 1
    assert capsys.readouterr() == (said, "")
    good = program(tmp_path, GOOD, "good.contract")
    assert main(["check", "--strict", str(good)]) == 0


def test_check_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wordy, bad = tmp_path / "wordy.contract", program(tmp_path, BAD, "bad.contract")
    wordy.write_text(WORDY)
    assert main(["check", "--json", str(wordy), str(bad), "nowhere.contract"]) == 2
    out, complaint = capsys.readouterr()
    assert "cannot read nowhere.contract" in complaint
    assert json.loads(out)["files"] == [
        {
            "file": str(wordy),
            "contracts": 1,
            "rules": 4,
            "error": None,
            "warnings": [
                {
                    "kind": "redundant",
                    "contract": "f",
                    "rule": "few",
                    "problem": "the rule 'few' says nothing new: D > 2, while D > 4 is required in line 3",
                    "file": str(wordy),
                    "line": 4,
                    "column": 13,
                    "text": "    require(D > 2, id='few')",
                }
            ],
        },
        {
            "file": str(bad),
            "contracts": 0,
            "rules": 0,
            "error": {"problem": "unknown type 'floting'; did you mean 'floating'?", "line": 2, "column": 8},
            "warnings": [],
        },
        {
            "file": "nowhere.contract",
            "contracts": 0,
            "rules": 0,
            "error": {"problem": "No such file or directory"},
            "warnings": [],
        },
    ]


def test_the_shipped_contracts_are_right(called: Called) -> None:
    files = sorted((Path(llm_op_guard.__file__).parent / "contracts").rglob("*.contract"))
    done = called("check", "--strict", *files)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == len(files) > 0


# ---------------------------------------------------------------- run

SHOW = """
    import json, os, sys
    import beside
    print(json.dumps({
        "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "spec": __spec__ and __spec__.name,
        "main": sys.modules["__main__"].__dict__ is globals(), "package": __package__, "doc": __doc__,
    }, sort_keys=True))
"""


def as_python(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=CLEAN, check=True, timeout=60
    )
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("program.py", "a", "--help", "-m", "--", "b"),
        ("sub/program.py",),
        ("link.py",),
        ("-m", "program", "a", "-m"),
        ("-m", "sub.program"),
        ("-m", "package", "--version"),
        ("package", "x"),
    ],
)
def test_run_is_like_python(arguments: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("program.py", "sub/program.py", "package/__main__.py"):
        program(tmp_path, SHOW, name)
    for name in ("beside.py", "sub/beside.py", "package/beside.py", "package/__init__.py"):
        program(tmp_path, "", name)
    (tmp_path / "link.py").symlink_to("sub/program.py")
    done = command("run", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = as_python(*arguments, cwd=tmp_path)
    if arguments[0] == "package":  # runpy writes a folder's whole path where Python leaves it as typed
        expected = expected.replace('["package"', json.dumps([str(tmp_path / "package")])[:-1])
    assert done.stdout == expected


def test_run_leaves_no_compiled_script(tmp_path: Path) -> None:
    command("run", program(tmp_path, "pass"))
    assert not (tmp_path / "__pycache__").exists()


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('bye')", 1, "bye"),
        ("raise SystemExit(None)", 0, ""),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_run_keeps_the_exit_code(text: str, code: int, said: str, tmp_path: Path) -> None:
    done = command("run", program(tmp_path, text))
    assert done.returncode == code
    assert said in done.stderr
    summary(done)


def test_run_shows_the_programs_own_traceback(tmp_path: Path) -> None:
    path = program(tmp_path, "def f():\n    return 1 / 0\nf()\n")
    for arguments in ((path,), ("-m", "program")):
        done = command("run", *arguments, cwd=tmp_path)
        expected = subprocess.run(
            [sys.executable, path], capture_output=True, text=True, env=CLEAN, check=False, timeout=60
        )
        assert done.returncode == 1
        assert done.stderr.startswith(expected.stderr)
        summary(done)


def test_run_shows_a_syntax_error(tmp_path: Path) -> None:
    done = command("run", program(tmp_path, "x = ("))
    assert done.returncode == 1
    assert "SyntaxError: '(' was never closed" in done.stderr
    assert "Traceback" not in done.stderr
    summary(done)


def test_an_error_of_the_programs_own_imports_is_its_own(tmp_path: Path) -> None:
    program(tmp_path, "import nowhere_to_be_found")
    for arguments in (("program.py",), ("-m", "program")):
        done = command("run", *arguments, cwd=tmp_path)
        assert done.returncode == 1
        assert "ModuleNotFoundError: No module named 'nowhere_to_be_found'" in done.stderr
        summary(done)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere.py",), "there is no file nowhere.py"),
        (("-m", "nowhere"), "there is no module nowhere"),
        (("-m", "package.nowhere"), "there is no module package.nowhere"),
        (("-m", "package"), "there is no module package.__main__"),
        (("package",), "the directory package has no __main__.py"),
    ],
)
def test_a_missing_target_is_one_line(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    program(tmp_path, "", "package/__init__.py")
    done = command("run", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"llm-op-guard: error: {said}\n"


def test_run_warns_when_nothing_was_guarded(tmp_path: Path) -> None:
    done = command("run", program(tmp_path, "print('hello')"))
    assert done.stdout == "hello\n"
    assert done.stderr.splitlines() == [
        "llm-op-guard: WARNING: nothing was checked: the program never imported transformers; "
        "look at: llm-op-guard doctor",
        "llm-op-guard: 0 sites, 0 checks, 0 violations",
    ]


@pytest.mark.parametrize(
    ("text", "environment", "reason"),
    [
        ("import llm_op_guard as og; og.uninstall()", {}, "the program took the guards away (uninstall)"),
        ("", {"LLM_OP_GUARD": "off"}, "the policy is off (LLM_OP_GUARD or set_policy)"),
        (
            "import llm_op_guard as og\nog.set_policy(A='off', B='off')",
            {},
            "the policy is off (LLM_OP_GUARD or set_policy)",
        ),
        ("import llm_op_guard as og; og.disable()", {}, "the program switched the guards off (og.disable)"),
    ],
)
def test_run_says_why_nothing_was_guarded(text: str, environment: dict[str, str], reason: str, tmp_path: Path) -> None:
    done = command("run", program(tmp_path, text), **environment)
    assert f"llm-op-guard: WARNING: nothing was checked: {reason}" in done.stderr
    summary(done)


OWN = """
    import atexit, threading, time
    import llm_op_guard as og

    @og.guard("x: int")
    def f(x):
        return x

    atexit.register(lambda: f(1))
    threading.Thread(target=lambda: (time.sleep(0.2), f(2))).start()
"""


def test_run_counts_guards_of_the_programs_own_to_the_very_end(tmp_path: Path) -> None:
    done = command("run", program(tmp_path, OWN))
    assert summary(done) == (1, 2, 0)
    assert "WARNING" not in done.stderr


def test_run_counts_a_violation_that_ends_the_program(tmp_path: Path) -> None:
    done = command("run", program(tmp_path, OWN + "\n    f('no')\n"))
    assert done.returncode == 1
    assert "GuardError" in done.stderr
    assert summary(done) == (1, 3, 1)


MODEL = """
    import sys
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if "install" in sys.argv:
        import llm_op_guard as og
        og.install("transformers")
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config).eval()
    if "never" not in sys.argv:
        model(torch.tensor([[1, 2, 50 if "bad" in sys.argv else 3]]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return program(tmp_path_factory.mktemp("model"), MODEL)


def test_run_guards_a_model(model: Path) -> None:
    done = command("run", model)
    assert done.returncode == 0
    sites, checks, violations = summary(done)
    assert sites >= 5 and checks >= 5 and violations == 0
    assert "WARNING" not in done.stderr


def test_run_stops_a_bad_call_of_a_program_that_installs_as_well(model: Path) -> None:
    done = command("run", model, "install", "bad")
    assert done.returncode == 1
    assert "LlamaModel.forward: input_ids[0, 2] = 50" in done.stderr
    sites, checks, violations = summary(done)
    assert sites >= 5 and checks >= 1 and violations == 1


def test_run_says_when_no_operator_was_called(model: Path) -> None:
    done = command("run", model, "never")
    assert "WARNING: nothing was checked: no guarded operator was called outside compiled code" in done.stderr
    assert summary(done)[0] >= 5


# ---------------------------------------------------------------- doctor


@pytest.fixture(scope="module")
def doctor() -> subprocess.CompletedProcess[str]:
    pytest.importorskip("transformers")
    return command("doctor")


def test_doctor_shows_versions_and_policy(doctor: subprocess.CompletedProcess[str]) -> None:
    from importlib.metadata import version

    facts = dict(re.split(r"  +", line, maxsplit=1) for line in doctor.stdout.splitlines()[:6])
    assert facts["llm-op-guard"] == llm_op_guard.__version__
    assert facts["transformers"] == version("transformers")
    assert facts["torch"] == version("torch")
    assert facts["policy"].startswith("A=raise (default); B=")


def test_doctor_groups_what_is_guarded(doctor: subprocess.CompletedProcess[str]) -> None:
    assert doctor.returncode == 0
    assert re.search(
        r"^  rope\.contract:apply_rotary_pos_emb \(\d+\)\n    llama\.apply_rotary_pos_emb", doctor.stdout, re.M
    )
    assert "llama.LlamaRMSNorm.forward" in doctor.stdout


def test_doctor_says_that_it_took_a_sample(doctor: subprocess.CompletedProcess[str]) -> None:
    assert "Looked at a few model families, as no module was named: llama, qwen2" in doctor.stdout


@pytest.fixture(scope="module")
def doctor_of_two() -> subprocess.CompletedProcess[str]:
    pytest.importorskip("transformers")
    models = (f"transformers.models.{name}.modeling_{name}" for name in ("qwen2", "phimoe"))
    return command("doctor", *models, LLM_OP_GUARD="A=warn")


def test_doctor_looks_at_modules(doctor_of_two: subprocess.CompletedProcess[str]) -> None:
    assert doctor_of_two.returncode == 0
    assert "qwen2.Qwen2RMSNorm.forward" in doctor_of_two.stdout
    assert "llama" not in doctor_of_two.stdout
    assert "A=warn (from LLM_OP_GUARD)" in doctor_of_two.stdout


def test_doctor_says_what_is_refused_and_why(doctor_of_two: subprocess.CompletedProcess[str]) -> None:
    refused = doctor_of_two.stdout.partition("\nNot guarded: ")[2]
    assert re.search(r"code is not one that a contract was written for \(fingerprint \w{16}\)", refused)
    assert "PhimoeTopKRouter.forward" in refused


def test_doctor_says_what_holds_for_some_operators_and_what_is_waived(tmp_path: Path) -> None:
    program(
        tmp_path,
        """
        [[tool.llm-op-guard.waivers]]
        rule = "cos.shape"
        site = "a.b"
        reason = "known"
        until = 2020-01-31
        """,
        "pyproject.toml",
    )
    done = command("doctor", "json", cwd=tmp_path, LLM_OP_GUARD="default=record llama.*:A=warn llama.*:B=off")
    assert "; default=record in place of raise (from LLM_OP_GUARD); " in done.stdout
    assert "; llama.*: A=warn B=off (from LLM_OP_GUARD)" in done.stdout
    assert "waivers       1, of which 1 expired and hold no longer" in done.stdout


def test_a_bad_waiver_is_one_line(tmp_path: Path) -> None:
    program(tmp_path, "[[tool.llm-op-guard.waivers]]\nrule = 'r'\n", "pyproject.toml")
    for arguments in (("doctor",), ("run", program(tmp_path, "print('ran')"))):
        done = command(*arguments, cwd=tmp_path)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr == (
            f"llm-op-guard: error: {tmp_path / 'pyproject.toml'}: waiver 1 (line 1): 'site' is missing; "
            f"a waiver has rule, site, reason, and perhaps until\n"
        )


def test_doctor_of_a_module_that_is_not_there(called: Called) -> None:
    pytest.importorskip("transformers")
    done = called("doctor", "transformers.models.nowhere")
    assert done.returncode == 2
    assert "llm-op-guard: error: cannot load transformers.models.nowhere: ModuleNotFoundError" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_of_an_unknown_library(called: Called) -> None:
    done = called("doctor", "--library", "transformer")
    assert done.returncode == 2
    assert done.stderr == (
        "llm-op-guard: error: nothing is known of 'transformer'; did you mean 'transformers'?; "
        "known: transformers, torch\n"
    )


@pytest.mark.parametrize("arguments", [("doctor",), ("demo",), ("run", "program.py")])
def test_without_the_library(arguments: tuple[str, ...], tmp_path: Path) -> None:
    program(tmp_path, "")
    # -I and -S: no installed packages, as on a machine without them.
    source = str(Path(llm_op_guard.__file__).parents[1])
    start = f"import sys; sys.path.insert(0, {source!r}); from llm_op_guard.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", start, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=CLEAN,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    if arguments == ("doctor",):
        assert done.returncode == 1
        assert re.search(r"^transformers  not installed$", done.stdout, re.MULTILINE)
        assert "Guarded: 0" in done.stdout
        assert "the library is not installed here\n    transformers" in done.stdout
    elif arguments == ("demo",):
        assert done.returncode == 2
        assert "the demo needs torch and transformers" in done.stderr
    else:
        assert done.returncode == 0
        assert "nothing was checked: transformers: the library is not installed here" in done.stderr
        summary(done)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_written_to_by_nobody(closed: str, tmp_path: Path) -> None:
    file = tmp_path / "f.contract"
    file.write_text("def f(n):\n    n: int\n")
    for command, code in ((f"check {file}", 0), (f"contracts {file}", 0), (f"check {file}x", 2)):
        shell = f"{sys.executable} -m llm_op_guard {command} {closed}"
        done = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True, check=False)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


def test_what_is_written_as_json_can_be_read(called: Called, tmp_path: Path) -> None:
    file = program(
        tmp_path,
        """
        TABLE = {("a", -1): [1.5, True, None, "h\u00e9\\n"], 2: {}}
        def f(n=1e400, *, m="\u00e9"):
            require(n in TABLE[2], hint="a" if m else f"{n}", id="h\u00e9")
        """,
        "f.contract",
    )
    written = called("contracts", file, "--json")
    assert written.returncode == 0
    assert called("check", program(tmp_path, written.stdout, "f.json")).returncode == 0
