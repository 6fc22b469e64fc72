"""Waivers: one rule at one site, with a reason, until a day; from the program and from pyproject.toml."""

from __future__ import annotations

import datetime
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

import llm_op_guard as og

TODAY = datetime.date.today()
YESTERDAY, TOMORROW = TODAY - datetime.timedelta(1), TODAY + datetime.timedelta(1)


def make() -> tuple[Any, str]:
    @og.guard("n: int\nm: int\nrequire(m < 5, id='small', certain=False)")
    def operator(n: Any, m: Any = 0) -> Any:
        return n

    return operator, f"{operator.__module__}.{operator.__qualname__}"


def test_a_waived_violation_is_recorded_and_nothing_else() -> None:
    operator, site = make()
    og.waive("n.type", site=site, reason="strings are handled, ticket 7")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert operator("x") == "x"
        assert operator("y") == "y"
    assert [(v.rule_id, v.waived) for v in og.record.violations] == [("n.type", "strings are handled, ticket 7")] * 2
    assert og.record.violations[0].to_dict()["waived"] == "strings are handled, ticket 7"


def test_what_is_not_waived_says_so() -> None:
    operator, _ = make()
    with pytest.raises(og.GuardError) as caught:
        operator("x")
    assert caught.value.violations[0].waived is None


def test_other_rules_and_other_sites_hold() -> None:
    operator, site = make()
    og.waive("n.type", site=site, reason="r")
    with pytest.raises(og.GuardError) as caught:
        operator("x", "y")
    assert [v.rule_id for v in caught.value.violations] == ["m.type"]
    assert sorted(v.rule_id for v in og.record.violations) == ["m.type", "n.type"]

    @og.guard("n: int")
    def another(n: Any) -> Any:
        return n

    with pytest.raises(og.GuardError):
        another("x")


def test_a_waived_suspect_rule_does_not_warn_however_often() -> None:
    operator, site = make()
    with pytest.warns(og.GuardWarning):
        operator(1, 9)
    with og.waive("small", site=site, reason="large on purpose"), warnings.catch_warnings():
        warnings.simplefilter("error")
        operator(1, 9)
        operator(1, 9)
    assert [v.waived for v in og.record.violations] == [None, "large on purpose", "large on purpose"]


def test_a_waiver_can_be_taken_back() -> None:
    operator, site = make()
    waiver = og.waive("n.type", site=site, reason="r")
    assert og.waivers() == [waiver]
    operator("x")
    waiver.withdraw()
    waiver.withdraw()
    assert og.waivers() == []
    with pytest.raises(og.GuardError):
        operator("x")


def test_a_with_block_ends_it_for_all_threads() -> None:
    operator, site = make()
    with og.waive("n.type", site=site, reason="r"):
        thread = threading.Thread(target=operator, args=("x",))
        thread.start()
        thread.join()
        operator("x")
    assert len(og.record.violations) == 2
    with pytest.raises(og.GuardError):
        operator("x")


@pytest.mark.parametrize("until", [TODAY, TOMORROW, TODAY.isoformat(), None])
def test_it_holds_through_its_last_day(until: Any) -> None:
    operator, site = make()
    assert not og.waive("n.type", site=site, reason="r", until=until).expired
    operator("x")


def test_an_expired_waiver_says_so_once_and_no_longer_holds(caplog: pytest.LogCaptureFixture) -> None:
    operator, site = make()
    og.waive("n.type", site=site, reason="until the fix", until=YESTERDAY)
    expected = (
        f"the waiver of rule 'n.type' at {site} expired on {YESTERDAY.isoformat()}, so the rule holds again; correct "
        f"the call, or give the waiver another date (its reason: until the fix)"
    )
    with pytest.warns(og.GuardWarning) as caught, pytest.raises(og.GuardError):
        operator("x")
    assert [str(warning.message) for warning in caught] == [expected]
    assert expected in caplog.text
    with warnings.catch_warnings(), pytest.raises(og.GuardError):
        warnings.simplefilter("error")
        operator("x")
    assert [v.waived for v in og.record.violations] == [None, None]


def test_where_warnings_are_errors_an_expired_waiver_hides_no_violation() -> None:
    operator, site = make()
    og.waive("n.type", site=site, reason="r", until=YESTERDAY)
    with warnings.catch_warnings(), pytest.raises(og.GuardError):
        warnings.simplefilter("error")
        operator("x")


def test_of_two_the_one_that_holds_counts() -> None:
    operator, site = make()
    og.waive("n.type", site=site, reason="old", until=YESTERDAY)
    og.waive("n.type", site=site, reason="new", until=TOMORROW)
    operator("x")
    assert og.record.violations[0].waived == "new"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reason": ""}, "a waiver needs reason=, why this is right"),
        ({"reason": "  "}, "a waiver needs reason="),
        ({"reason": None}, "a waiver needs reason="),
        ({"site": ""}, "a waiver needs site="),
        (
            {"site": "a.*"},
            r"a waiver is for one site, not for the pattern 'a.\*'; name the site that violation.site has",
        ),
        ({"rule": 3}, "a waiver needs rule="),
        ({"until": "31.1.2027"}, "until= is the last day of a waiver, written as '2027-01-31'; got '31.1.2027'"),
        ({"until": "2027-02-30"}, "until= is the last day"),
        ({"until": "20270131"}, "until= is the last day"),
        ({"until": datetime.datetime(2027, 1, 31)}, "until= is the last day"),
        ({"until": 20270131}, "until= is the last day"),
    ],
)
def test_bad_waivers(change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"rule": "r", "site": "a.b", "reason": "why", **change}
    with pytest.raises(og.PolicyError, match=said):
        og.waive(given.pop("rule"), **given)
    assert og.waivers() == []


def test_the_reason_cannot_be_left_out() -> None:
    with pytest.raises(TypeError):
        og.waive("r", site="a.b")  # type: ignore[call-arg]


# ---------------------------------------------------------------- pyproject.toml


def table(**entry: str) -> str:
    lines = "".join(f"{key} = {value}\n" for key, value in entry.items())
    return f"[[tool.llm-op-guard.waivers]]\n{lines}\n"


GOOD = {"rule": "'n.type'", "site": f"'{__name__}.make.<locals>.operator'", "reason": "'as agreed'"}


def project(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, below: str = ".") -> Path:
    path = folder / "pyproject.toml"
    path.write_text("[project]\nname = 'x'\n\n" + text, encoding="utf-8")
    (folder / below).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(folder / below)
    return path


@pytest.mark.parametrize("below", [".", "a/b"])
def test_a_table_is_found_from_the_working_directory_upwards(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(tmp_path, table(**GOOD), monkeypatch, below)
    operator, _ = make()
    assert operator("x") == "x"
    assert og.record.violations[0].waived == "as agreed"


def test_the_nearest_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, table(**GOOD), monkeypatch)
    (tmp_path / "a").mkdir()
    project(tmp_path / "a", "", monkeypatch)
    assert og.waivers() == []


@pytest.mark.parametrize("until", [f"'{TOMORROW.isoformat()}'", TOMORROW.isoformat()])
def test_dates_are_texts_or_dates(until: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, table(**GOOD, until=until), monkeypatch)
    assert [waiver.until for waiver in og.waivers()] == [TOMORROW]


def test_the_file_is_read_once_and_when_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = project(tmp_path, "", monkeypatch)
    path.write_text(table(**GOOD))
    operator, _ = make()
    operator("x")
    path.write_text(table(**{**GOOD, "reason": "'another'"}))
    make()[0]("x")
    assert [v.waived for v in og.record.violations] == ["as agreed"] * 2


def test_threads_read_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, table(**GOOD), monkeypatch)
    threads = [threading.Thread(target=og.waivers) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(og.waivers()) == 1


def test_install_reads_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, table(**{**GOOD, "reason": "3"}), monkeypatch)
    with pytest.raises(og.PolicyError):
        og.install("transformers")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (table(**GOOD) + table(**GOOD, untill="'x'"), "waiver 2 (line 9): unknown key 'untill'; did you mean 'until'?"),
        (table(rule="'r'", site="'s'"), "waiver 1 (line 4): 'reason' is missing; a waiver has rule, site, reason"),
        (table(**{**GOOD, "reason": "''"}), "waiver 1 (line 4): a waiver needs reason=, why this is right"),
        (table(**GOOD, until="'soon'"), "waiver 1 (line 4): until= is the last day of a waiver"),
        (table(**GOOD, until="2027-01-31T10:00:00"), "waiver 1 (line 4): until= is the last day of a waiver"),
        (table(**{**GOOD, "site": "'a.*'"}), "waiver 1 (line 4): a waiver is for one site"),
        ("[tool.llm-op-guard]\nwaivers = [{rule = 'r'}]\n", "waiver 1: 'site' is missing"),
        ("[tool.llm-op-guard]\nwaivers = [3]\n", "waiver 1: a waiver is a table with rule, site, reason, until; got 3"),
        ("[tool.llm-op-guard]\nwaivers = 3\n", "each waiver is a table of its own, written as [[tool.llm-op-guard."),
        ("[tool.llm-op-guard]\nwaiver = 3\n", "unknown key 'waiver' in [tool.llm-op-guard]; did you mean 'waivers'?"),
        ("[tool]\nllm-op-guard = 3\n", "tool.llm-op-guard is a table"),
        ("[tool.llm-op-guard\n", "Expected ']'"),
    ],
)
def test_a_bad_table_is_named_with_its_place(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project(tmp_path, text, monkeypatch)
    for _ in range(2):  # it does not go away by itself
        with pytest.raises(og.PolicyError) as caught:
            make()
        assert str(caught.value).startswith(f"{path}: ")
        assert said in str(caught.value)
    assert og.record.total == 0


def test_a_file_of_others_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, "[[[ nonsense", monkeypatch)
    assert og.waivers() == []


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="everything can be read here")
def test_a_file_that_cannot_be_read_waives_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    project(tmp_path, table(**GOOD), monkeypatch).chmod(0)
    assert og.waivers() == []
    assert "cannot read" in caplog.text


def test_bytes_that_are_no_text_waive_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    project(tmp_path, "", monkeypatch).write_bytes(b"\xff\xfe llm-op-guard")
    assert og.waivers() == []
    assert "cannot read" in caplog.text


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert og.waivers() == []
    make()
