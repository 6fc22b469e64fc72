"""The file of `record_to`: counted, bounded, rotated, whole lines from many threads and processes, never in the way."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import llm_op_guard as og
from llm_op_guard.report import sink

PRELUDE = "import os, sys\nimport llm_op_guard as og\n@og.guard('n: int')\ndef f(n): return n\n"


def make() -> Any:
    @og.guard("n: int\nrequire(finite(x), id='finite')")
    def operator(n: Any, x: Any = None) -> Any:
        return n

    return operator


@pytest.fixture
def file(tmp_path: Path) -> Path:
    og.set_policy(default="record")
    return tmp_path / "guards.jsonl"


def entries(file: Path) -> list[dict[str, Any]]:
    # Between processes there may be an empty line: see _ends_a_line.
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def total(*files: Path) -> int:
    return sum(entry["count"] for file in files for entry in entries(file))


def program(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + text],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_violation_becomes_a_line_at_once(file: Path) -> None:
    og.record_to(file)
    make()("x")
    (entry,) = entries(file)
    assert entry["kind"] == "violation"
    assert entry["site"] == f"{__name__}.make.<locals>.operator"
    assert (entry["operator"], entry["rule"], entry["class"], entry["certain"]) == ("operator", "n.type", "A", True)
    assert (entry["count"], entry["waived"], entry["pid"]) == (1, None, os.getpid())
    assert entry["call_site"].startswith(f"{__file__}:") and entry["call_site"].endswith("at_once")
    assert entry["first"] == entry["last"] and entry["first"].endswith("+00:00")
    assert entry["diagnosis"]["summary"] == "operator: n is a str, expected int"


def test_what_happens_again_is_counted(file: Path) -> None:
    og.record_to(file)
    operator = make()
    for _ in range(1000):
        operator("x")
    assert len(entries(file)) <= 11 and total(file) > 500
    og.record_to(None)
    assert total(file) == 1000
    assert sum("diagnosis" in entry for entry in entries(file)) == 1


def test_other_call_sites_rules_and_reasons_are_other_lines(file: Path) -> None:
    og.record_to(file)
    operator = make()
    operator("x")
    operator("x", torch.tensor([float("nan")]))
    with og.waive("n.type", site=f"{__name__}.make.<locals>.operator", reason="known"):
        operator("x")
    found = [(entry["rule"], entry["waived"]) for entry in entries(file)]
    assert found == [("n.type", None), ("n.type", None), ("finite", None), ("n.type", "known")]


def test_contents_of_tensors_are_not_written(file: Path) -> None:
    og.record_to(file)
    make()(torch.full((3,), 4.25))
    make()("a secret of the user")
    text = file.read_text()
    assert "4.25" not in text and "secret" not in text and "float32" in text


def test_whatever_the_policy_does_is_recorded(file: Path) -> None:
    og.set_policy(default="raise")
    og.record_to(file)
    with pytest.raises(og.GuardError):
        make()("x")
    with pytest.warns(og.GuardWarning), og.policy(A="warn"):
        make()("x")
    assert total(file) == 2


def test_a_suspect_rule_warned_of_before_is_counted(file: Path) -> None:
    og.set_policy(default="raise")

    @og.guard("n: int\nrequire(n < 5, id='small', certain=False)")
    def operator(n: int) -> int:
        return n

    og.record_to(file)
    with pytest.warns(og.GuardWarning):
        for _ in range(10):
            operator(9)
    og.record_to(None)
    assert total(file) == 10


def test_a_suspect_rule_warned_of_before_recording_began_is_counted_with_its_diagnosis(file: Path) -> None:
    og.set_policy(default="raise")

    @og.guard("n: int\nrequire(n < 5, id='small', certain=False)")
    def operator(n: int) -> int:
        return n

    with pytest.warns(og.GuardWarning):
        operator(9)
    og.record_to(file)
    operator(9)
    operator(9)
    assert total(file) == 2 and entries(file)[0]["diagnosis"]["rule_id"] == "small"


def test_many_call_sites_take_little_memory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "_MOST_PLACES", 5)
    og.record_to(file)
    operator = make()
    code = "".join("operator('x')\noperator('x')\noperator('x')\n" for _ in range(20))
    exec(compile(code, "many.py", "exec"), {"operator": operator})
    assert og.record.sink is not None and len(og.record.sink._places) == 5
    og.record_to(None)
    assert total(file) == 60


def test_files_are_rotated_by_count_and_the_oldest_deleted(file: Path) -> None:
    og.record_to(file, max_records=3, keep=2)
    code = "".join("operator('x')\n" for _ in range(20))
    exec(compile(code, "many.py", "exec"), {"operator": make()})
    assert sorted(path.name for path in file.parent.iterdir()) == [f"guards.jsonl{end}" for end in ("", ".1", ".2")]
    lines = [[e["call_site"] for e in entries(file.with_name(f"guards.jsonl{end}"))] for end in (".2", ".1", "")]
    assert [len(part) for part in lines] == [3, 3, 2]
    assert [place for part in lines for place in part] == [f"many.py:{number} in <module>" for number in range(13, 21)]


def test_keep_nothing(file: Path) -> None:
    og.record_to(file, max_records=1, keep=0)
    exec("operator('x')\noperator('x')\n", {"operator": make()})
    assert [path.name for path in file.parent.iterdir()] == ["guards.jsonl"]
    assert len(entries(file)) == 1


def test_lines_of_an_earlier_run_count(file: Path) -> None:
    file.write_text("{}\n" * 3)
    og.record_to(file, max_records=3)
    make()("x")
    assert len(entries(file)) == 1 and file.with_name("guards.jsonl.1").read_text() == "{}\n" * 3


def test_a_line_that_was_cut_off_spoils_no_other(file: Path) -> None:
    file.write_text('{"kind": "viol')
    og.record_to(file)
    make()("x")
    assert len(file.read_text().splitlines()) == 2
    json.loads(file.read_text().splitlines()[1])


def test_somebody_moved_the_file(file: Path) -> None:
    og.record_to(file)
    make()("x")
    file.rename(file.with_name("taken"))
    make()("x")
    assert len(entries(file)) == 1


def test_the_path_does_not_move_with_the_working_directory(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    og.record_to("below/guards.jsonl")  # a folder that is made
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    make()("x")
    assert len(entries(tmp_path / "below" / "guards.jsonl")) == 1


def test_threads(file: Path) -> None:
    og.record_to(file, max_records=7, keep=1000)
    operator = make()

    def work() -> None:
        for _ in range(200):
            operator("x")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    og.record_to(None)
    assert total(*file.parent.iterdir()) == 800


PROCESS = """
og.set_policy(default="record")
og.record_to(sys.argv[1], max_records=20, keep=1000)
for number in range(150):
    exec(compile(chr(10) * number + "f('x')", f"{os.getpid()}.py", "exec"))
"""


def test_processes_append_whole_lines_and_lose_none_while_they_rotate(file: Path) -> None:
    started = [subprocess.Popen([sys.executable, "-c", PRELUDE + PROCESS, str(file)]) for _ in range(3)]
    assert [process.wait(120) for process in started] == [0, 0, 0]
    files = list(file.parent.iterdir())
    assert len(files) > 10
    assert total(*files) == 450


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_counts_for_itself(file: Path) -> None:
    og.record_to(file)
    operator = make()

    def work() -> None:
        for _ in range(10):
            operator("x")

    for _ in range(10):  # of which two are not written yet
        operator("x")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads
        worker = multiprocessing.get_context("fork").Process(target=work)
        worker.start()
    worker.join(60)
    assert worker.exitcode == 0
    og.record_to(None)
    assert total(file) == 20
    assert sum(entry["count"] for entry in entries(file) if entry["pid"] == worker.pid) == 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_waits_for_no_lock_of_its_parents_threads(tmp_path: Path) -> None:
    code = """
import threading
from llm_op_guard import api
policy = sys.modules['llm_op_guard.policy']
locks = [og.record._lock, api._waivers._lock, policy._state.lock, og.record.sink._lock]
def hold():
    for lock in locks: lock.acquire()
    held.set()
    threading.Event().wait()
held = threading.Event()
threading.Thread(target=hold, daemon=True).start()
held.wait()
pid = os.fork()
if pid == 0:
    f('x')
    with og.waive('n.type', site='s', reason='r'), og.policy(A='record'):
        f('x')
    os._exit(0)
print(os.waitpid(pid, 0)[1], flush=True)
os._exit(0)
"""
    done = program(code, LLM_OP_GUARD="A=record", LLM_OP_GUARD_RECORD=str(tmp_path / "guards.jsonl"))
    assert done.stdout == "0\n", done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk here")
def test_a_full_disk_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    og.set_policy(default="record")
    og.record_to("/dev/full")
    operator = make()
    with pytest.warns(og.GuardInternalWarning, match="cannot record to /dev/full .*No space left") as caught:
        for _ in range(100):
            assert operator("x") == "x"
    assert len(caught) == 1
    assert caplog.text.count("cannot record to") == 1


def test_warnings_as_errors_stop_no_call(tmp_path: Path) -> None:
    og.set_policy(default="record")
    (tmp_path / "file").write_text("")
    og.record_to(tmp_path / "file" / "guards.jsonl")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make()("x") == "x"


def test_counts_are_kept_until_the_file_can_be_written(file: Path) -> None:
    og.record_to(file)
    file.mkdir()
    operator = make()
    with pytest.warns(og.GuardInternalWarning):
        for _ in range(10):
            operator("x")
    file.rmdir()
    og.record_to(None)
    (entry,) = entries(file)
    assert entry["count"] == 10 and entry["diagnosis"]["rule_id"] == "n.type"


@pytest.mark.parametrize("bad", [{"max_records": 0}, {"max_records": 1.5}, {"keep": -1}, {"keep": True}])
def test_numbers_that_make_no_sense(bad: dict[str, Any], file: Path) -> None:
    with pytest.raises(og.PolicyError, match=f"{next(iter(bad))}= is a whole number"):
        og.record_to(file, **bad)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(og.PolicyError, match="it is a directory; name a file"):
        og.record_to(tmp_path)


# ---------------------------------------------------------------- in other processes


def test_the_environment_names_the_file_and_it_is_complete_at_exit(tmp_path: Path) -> None:
    file = tmp_path / "guards.jsonl"
    done = program("for _ in range(100): f('x')", LLM_OP_GUARD_RECORD=str(file), LLM_OP_GUARD="default=record")
    assert (done.returncode, done.stderr) == (0, "")
    assert total(file) == 100


def test_the_program_has_the_last_word(tmp_path: Path) -> None:
    code = "og.record_to(None)\n@og.guard('n: int')\ndef g(n): return n\ng('x')"
    done = program(code, LLM_OP_GUARD_RECORD=str(tmp_path / "guards.jsonl"), LLM_OP_GUARD="A=record")
    assert (done.returncode, list(tmp_path.iterdir())) == (0, [])


def test_a_process_that_is_killed_loses_less_than_half(tmp_path: Path) -> None:
    file = tmp_path / "guards.jsonl"
    done = program(
        "for _ in range(1000): f('x')\nos.kill(os.getpid(), 9)", LLM_OP_GUARD_RECORD=str(file), LLM_OP_GUARD="A=record"
    )
    assert done.returncode == -9
    assert 500 <= total(file) <= 1000


# ---------------------------------------------------------------- false alarms


def test_false_alarms_are_counted_and_written(file: Path) -> None:
    og.record_to(file)
    make()("x")
    (violation,) = og.record.violations
    og.record.false_alarm(violation, note="a NumPy string, and right")
    og.record.false_alarm("n.type", site=violation.site)
    og.record.false_alarm("other")
    assert og.record.false_alarms == {(violation.site, "n.type"): 2, ("", "other"): 1}
    alarms = [entry for entry in entries(file) if entry["kind"] == "false_alarm"]
    assert [(a["rule"], a["site"], a["note"]) for a in alarms] == [
        ("n.type", violation.site, "a NumPy string, and right"),
        ("n.type", violation.site, ""),
        ("other", "", ""),
    ]
    og.record.clear()
    assert og.record.false_alarms == {}


def test_notes_are_bounded(file: Path) -> None:
    og.record_to(file)
    og.record.false_alarm("r", note="x" * 100_000)
    assert file.stat().st_size < 2000


@pytest.mark.parametrize("bad", [None, 3, ""])
def test_a_false_alarm_of_nothing(bad: Any) -> None:
    with pytest.raises(TypeError, match="false_alarm takes a violation, such as"):
        og.record.false_alarm(bad)


@pytest.mark.parametrize("path", ["a" * 300, "a" * 300 + "/b", "a\0b", "~nobody-of-this-name/a"])
def test_a_path_that_cannot_be_is_a_policy_error(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(og.PolicyError, match="cannot record to"):
        og.record_to(path)


def test_a_relative_path_in_a_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(og.PolicyError, match=r"cannot record to 'guards\.jsonl': No such file or directory"):
        og.record_to("guards.jsonl")
