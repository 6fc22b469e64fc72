"""The page of log files: sites by what was broken, whatever else stands in the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import Parsed, logged, rule

from llm_op_guard.cli import main
from llm_op_guard.report.log_page import log_page

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def page() -> Parsed:
    return Parsed(log_page(logged(), ["cannot read x.jsonl: No such file or directory"]))


def test_cells_are_sites_by_aspects(page: Parsed) -> None:
    assert page.rows[0] == ["site", "type", "dtype", "shape", "device", "conditions", "values", "predicates"]
    assert page.cells("m.f") == {
        "shape": "shape ✗ 7 violations, broken: 2 rules",
        "conditions": "conditions ! 2 violations, suspect: 1 rule",
    }
    assert page.cells("m.g") == {
        "dtype": "dtype w 3 violations, waived: 1 rule",
        "values": "values ✗ 2 violations, broken: 1 rule",
    }
    assert page.cells("(any site)") == {"predicates": "predicates ! 2 violations, suspect: 1 rule"}
    assert page.cells("m.h") == {"device": "device ! 0 violations, suspect: 1 rule"}


def test_a_cell_opens_the_calls_beside_the_diagnosis(page: Parsed) -> None:
    assert page.opened_by("m.f", "shape").startswith(
        "m.f: shapeClosebreaks x.shapethe callsbroken2 times, 2026-11-02 10:00 to 2026-11-02 11:00"
        "2 from a.py:3 in mainthe diagnosis of onef: broke x.shape D = 2 from y.shape[0] because of a reason "
        "likely cause: a mistake? x: last valid leaving norm of Norm, layer 3, 2 guarded calls ago "
        "x int64[1, 3] cpu <- here contract f.contract:f 0123breaks y.shape"
    )
    assert "5 let pass by a waiver" in page.opened_by("m.f", "shape")
    alarm = page.opened_by("(any site)", "predicates")
    assert "1 reported as false alarmsreported with: it was right" in alarm
    assert page.opened_by("m.h", "device").endswith("the diagnosis of onenot in these files")


def test_figures_and_what_the_log_does_not_hold(page: Parsed) -> None:
    for told in (
        "Log: 16 violations of 7 rules",
        "violations16 of 7 rules at 4 sites",
        "let pass by waivers8",
        "reported as false alarms3",
        "first and last2026-11-01 09:30, 2026-11-02 11:00",
        "Calls that kept their contracts, and what came of those that did not: neither is recorded.",
        "Lines and files that could not be read: 2",
        "guards.jsonl: 2 lines not understood",
        "cannot read x.jsonl: No such file or directory",
        "Each row has a finding (broken or suspect).",
    ):
        assert told in page.text


def test_rows_that_are_waived_can_be_left_out() -> None:
    digest = {"rules": [rule("m.f", "x.shape"), rule("m.g", "x.shape", waived=2)], "skipped_lines": {}}
    text = Parsed(log_page(digest)).text
    assert "only the rows with a finding (broken or suspect): 1 of 2" in text
    digest["rules"] = digest["rules"][1:]
    assert "No row has a finding (broken or suspect)." in Parsed(log_page(digest)).text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=4), part, max_size=3),
    max_leaves=6,
)
KEYS = (
    "summary",
    "cost_class",
    "certain",
    "argument",
    "because",
    "hint",
    "bindings",
    "tensors",
    "contract_id",
    "last_seen",
)
ENTRY = st.dictionaries(st.sampled_from(("symbol", "value", "sources", "name", "dtype", "shape", "device")), JSON)


@settings(max_examples=100, deadline=None)
@given(JSON | st.dictionaries(st.sampled_from(KEYS), JSON | st.lists(JSON | ENTRY, max_size=3)))
def test_an_example_may_be_anything(example: Any) -> None:
    page = Parsed(log_page({"rules": [rule("m.f", "x.shape", example=example)], "skipped_lines": {}}))
    assert len(page.opens) == 1
    assert not {"script", "img", "b1"} & {tag for tag, _ in page.tags}


def test_of_an_example_only_texts_and_sizes_are_shown() -> None:
    example = {
        "summary": 5,
        "because": ["x"],
        "bindings": [3, {"symbol": None, "value": "2", "sources": [1, "y.shape[0]", None]}, {"sources": "y"}],
        "tensors": [None, {"name": 1, "shape": ["x", 2, {}], "dtype": "int64", "device": "cpu"}],
    }
    page = Parsed(log_page({"rules": [rule("m.f", "x.shape", example=example)], "skipped_lines": {}}))
    assert page.opened_by("m.f", "shape").endswith("the diagnosis of one= 2 from y.shape[0] [] int64[2] cpu")


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.sampled_from("<>/&'\"=-![]\x00\n\r a;#x\ud800\u202e"), min_size=1))
def test_no_text_becomes_a_tag_here_either(hostile: str) -> None:
    def tags(text: str) -> Any:
        bad = rule(
            f"m.f{text}",
            f"x.shape{text}",
            call_sites={f"a.py{text}": 2},
            notes=[text],
            false_alarms=1,
            first=f"9{text}",
        )
        bad["example"] |= dict.fromkeys(("summary", "because", "hint", "argument", "contract_id"), f"s{text}")
        page = Parsed(log_page({"rules": [bad], "skipped_lines": {f"f{text}": 1}}, [f"u{text}"]))
        return [tag for tag, _ in page.tags]

    assert tags(hostile) == tags("x")


def test_report_writes_the_page(tmp_path: Path, capsys: Capture) -> None:
    entry = {
        "kind": "violation", "site": "m.f", "rule": "n.type", "class": "A", "certain": True, "waived": None,
        "call_site": "a.py:3 in main", "count": 2, "first": "2026-11-02T10:00", "last": "2026-11-02T11:00", "pid": 7,
        "diagnosis": {"summary": "f: n is a str, expected int <b>"},
    }  # fmt: skip
    log, out = tmp_path / "guards.jsonl", tmp_path / "out.html"
    log.write_text(json.dumps(entry) + "\nnonsense\n", encoding="utf-8")
    assert main(["report", str(log), "--html", str(out)]) == 0
    assert "m.f  n.type" in capsys.readouterr().out
    page = Parsed(out.read_text(encoding="utf-8"))
    assert page.cells("m.f") == {"type": "type ✗ 2 violations, broken: 1 rule"}
    assert "expected int <b>" in page.opened_by("m.f", "type")
    assert f"{log}: 1 line not understood" in page.text
    assert main(["report", str(log), "nowhere.jsonl", "--json", "--html", str(out)]) == 2
    assert json.loads(capsys.readouterr().out)["rules"][0]["rule"] == "n.type"
    assert "cannot read nowhere.jsonl: No such file or directory" in Parsed(out.read_text(encoding="utf-8")).text


def test_a_page_of_yesterday_does_not_stay(tmp_path: Path, capsys: Capture) -> None:
    log, out = tmp_path / "guards.jsonl", tmp_path / "out.html"
    log.write_text("", encoding="utf-8")
    out.write_text("of yesterday", encoding="utf-8")
    assert main(["report", str(log), "--html", str(out)]) == 1
    assert "Log: 0 violations of 0 rules" in Parsed(out.read_text(encoding="utf-8")).text
    assert "there are no records in these files" in capsys.readouterr().err


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: Capture) -> None:
    log = tmp_path / "guards.jsonl"
    log.write_text("", encoding="utf-8")
    out = tmp_path / "nowhere" / "out.html"
    assert main(["report", str(log), "--html", str(out)]) == 2
    assert f"llm-op-guard: error: cannot write {out}: No such file or directory" in capsys.readouterr().err


def test_a_log_is_not_overwritten(tmp_path: Path, capsys: Capture) -> None:
    log, rotated = tmp_path / "guards.jsonl", tmp_path / "guards.jsonl.1"
    log.write_text("kept", encoding="utf-8")
    rotated.write_text("", encoding="utf-8")
    assert main(["report", "--html", str(log), str(rotated)]) == 2
    assert log.read_text(encoding="utf-8") == "kept"
    assert "is overwritten with a page: name a file that ends in .html" in capsys.readouterr().err
