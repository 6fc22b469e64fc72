"""`llm-op-guard report`: files of violations added up, whatever else stands in them."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import llm_op_guard as og
from llm_op_guard.cli import main
from llm_op_guard.guard.violation import LastSeen

Capture = pytest.CaptureFixture[str]


def line(**changes: Any) -> str:
    entry = {
        "kind": "violation",
        "site": "m.f",
        "rule": "n.type",
        "operator": "f",
        "class": "A",
        "certain": True,
        "call_site": "a.py:3 in main",
        "waived": None,
        "count": 2,
        "first": "2026-11-02T10:00:00+00:00",
        "last": "2026-11-02T11:00:00+00:00",
        "pid": 7,
        **changes,
    }
    return json.dumps(entry) + "\n"


def write(folder: Path, *lines: str, name: str = "guards.jsonl") -> str:
    path = folder / name
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def test_a_table_by_site_and_rule_most_frequent_first(tmp_path: Path, capsys: Capture) -> None:
    diagnosis = {"summary": "f: n is a str, expected int", "because": "n is counted", "hint": "read from a file?"}
    file = write(
        tmp_path,
        line(site="m.g", rule="x.shape", count=1),
        line(diagnosis=diagnosis),
        line(first="2026-11-01T09:00:00+00:00", last="2026-11-01T09:00:00+00:00", call_site="b.py:4 in main"),
        line(count=40, last="2026-11-03T09:59:00+00:00", waived="agreed"),
        json.dumps({"kind": "false_alarm", "rule": "n.type", "site": "m.f", "note": "it was right", "time": "t"})
        + "\n",
    )
    assert main(["report", file]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert told.out.splitlines() == [
        "count  waived  false alarms  first             last              site and rule",
        "   44      40             1  2026-11-01 09:00  2026-11-03 09:59  m.f  n.type",
        "    f: n is a str, expected int",
        "    because n is counted",
        "    likely cause: read from a file?",
        "    called from a.py:3 in main and 1 more",
        "    reported as a false alarm: it was right",
        "    1       0             0  2026-11-02 10:00  2026-11-02 11:00  m.g  x.shape",
        "    called from a.py:3 in main",
        "45 violations of 2 rules",
    ]
    page = Path(__file__).parents[2] / "docs" / "production.md"
    assert "\n".join(told.out.splitlines()[:6]) in page.read_text(encoding="utf-8")


def test_what_record_to_writes_can_be_read(tmp_path: Path, capsys: Capture) -> None:
    @og.guard("n: int")
    def operator(n: Any) -> Any:
        return n

    file = tmp_path / "guards.jsonl"
    og.set_policy(default="record")
    og.record_to(file, max_records=1)
    for _ in range(100):
        operator("x")
    og.record.false_alarm(og.record.violations[0], note="said by a user")
    og.record_to(None)
    files = [str(path) for path in tmp_path.iterdir()]
    assert len(files) > 2
    assert main(["report", *files, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (row,) = told["rules"]
    assert (row["rule"], row["count"], row["false_alarms"]) == (
        "n.type",
        96,
        1,
    )  # the last six files: 4, 8, 16, 32, a false alarm, 36
    assert row["example"]["rule_id"] == "n.type"
    assert row["notes"] == ["said by a user"]


def test_json_has_it_all(tmp_path: Path, capsys: Capture) -> None:
    file = write(tmp_path, line(diagnosis={"summary": "s"}), "nonsense\n")
    assert main(["report", "--json", file]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "rules": [
            {
                "site": "m.f",
                "rule": "n.type",
                "count": 2,
                "waived": 0,
                "false_alarms": 0,
                "first": "2026-11-02T10:00:00+00:00",
                "last": "2026-11-02T11:00:00+00:00",
                "call_sites": {"a.py:3 in main": 2},
                "example": {"summary": "s", "call_site_text": "a.py:3 in main"},
                "notes": [],
            }
        ],
        "skipped_lines": {file: 1},
    }


@pytest.mark.parametrize(
    "broken",
    [
        "nonsense\n",
        '{"kind": "viol\n',
        "[]\n",
        "3\n",
        "null\n",
        '{"kind": "other", "rule": "r", "site": "s"}\n',
        line(count=0),
        line(count="2"),
        line(count=True),
        line(site=None),
        line(first=3),
        line(call_site=["x"]),
        "[" * 100_000 + "\n",
        "x" * (3 << 20) + "\n",
        "\x00\n",
        line().rstrip()[:-5],
    ],
    ids=lambda text: text[:20].strip(),
)
def test_broken_lines_are_counted_and_skipped(broken: str, tmp_path: Path, capsys: Capture) -> None:
    file = write(tmp_path, line(), "\n", broken if broken.endswith("\n") else broken + "\n", line())
    assert main(["report", file]) == 0
    told = capsys.readouterr()
    assert re.search(r"^ +4 +0", told.out, re.MULTILINE)
    assert told.err == f"llm-op-guard: WARNING: {file}: 1 line could not be understood, and not counted\n"


def test_bytes_that_are_no_text(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "guards.jsonl"
    file.write_bytes(b"\xff\xfe\n" + line().encode() + b"\xff\n")
    assert main(["report", str(file)]) == 0
    assert "2 lines could not be understood" in capsys.readouterr().err


def test_a_missing_file_and_the_others_are_read(tmp_path: Path, capsys: Capture) -> None:
    file = write(tmp_path, line())
    assert main(["report", "nowhere.jsonl", file, str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert told.err.splitlines() == [
        "llm-op-guard: error: cannot read nowhere.jsonl: No such file or directory",
        f"llm-op-guard: error: cannot read {tmp_path}: Is a directory",
    ]
    assert "m.f  n.type" in told.out


@pytest.mark.parametrize("content", ["", "\n\n", "nonsense\n"])
def test_a_file_without_records(content: str, tmp_path: Path, capsys: Capture) -> None:
    assert main(["report", write(tmp_path, content)]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "llm-op-guard: error: there are no records in these files; og.record_to and LLM_OP_GUARD_RECORD" in told.err


def test_a_file_named_twice_counts_once(tmp_path: Path, capsys: Capture) -> None:
    file = write(tmp_path, line())
    assert main(["report", file, file]) == 0
    assert "2 violations of 1 rule" in capsys.readouterr().out


def test_text_of_others_cannot_steer_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    hostile = "\x1b[2Jx\nm.z"
    file = write(tmp_path, line(site=hostile, rule=hostile, call_site=hostile, diagnosis={"summary": hostile * 1000}))
    assert main(["report", file]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told and len(told.splitlines()) == 5 and max(map(len, told.splitlines())) < 500


def test_false_alarms_alone_are_something_to_tell(tmp_path: Path, capsys: Capture) -> None:
    alarm = {"kind": "false_alarm", "rule": "r", "site": "", "note": "", "time": "t"}
    assert main(["report", write(tmp_path, json.dumps(alarm) + "\n")]) == 0
    assert "(any site)  r" in capsys.readouterr().out


def test_report_needs_a_file(capsys: Capture) -> None:
    assert main(["report"]) == 2
    assert "usage: llm-op-guard report" in capsys.readouterr().err


def test_where_the_tensor_was_last_seen(tmp_path: Path, capsys: Capture) -> None:
    norm = og.guard("x: floating[N]\nreturns: like(x)")(lambda x: x * 2)
    rotate = og.guard("x: floating[4]")(lambda x: x)
    og.record_to(tmp_path / "guards.jsonl")
    og.track()
    with og.policy(A="record"):
        rotate(norm(torch.ones(3)))
    og.record_to(None)
    assert main(["report", str(tmp_path / "guards.jsonl")]) == 0
    assert "    x: last valid leaving " in (out := capsys.readouterr().out) and ", 1 guarded call ago" in out


SEEN = LastSeen("norm", "m.norm", "leaving", True, None, "Norm", 3, 2, False, None)


def test_what_was_written_of_where_it_was_last_seen_can_be_read() -> None:
    written = json.loads(json.dumps(asdict(SEEN)))
    assert LastSeen.of(written) == SEEN
    for name, value in {"when": "never", "calls_ago": "2", "operator": None, "valid": "yes", "changes": 0.5}.items():
        assert LastSeen.of({**written, name: value}) is None
    assert LastSeen.of(None) is None and LastSeen.of({}) is None
