"""The demonstration: what it prints, and that it notices when something is wrong."""

from __future__ import annotations

import io
import re
import subprocess
from pathlib import Path

import pytest

import llm_op_guard as og
from llm_op_guard import api, demo
from llm_op_guard.report.comparison import Comparison, render_comparison
from llm_op_guard.report.terminal import Terminal
from test_cli import command

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def done() -> subprocess.CompletedProcess[str]:
    return command("demo")


def test_it_succeeds_in_silence(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0
    assert done.stderr == ""


def test_the_tokens_are_identical(done: subprocess.CompletedProcess[str]) -> None:
    assert "\ntokens: identical\nscores: identical, bit for bit\n" in done.stdout


def test_calls_were_really_checked(done: subprocess.CompletedProcess[str]) -> None:
    match = re.search(
        r"^guarded: (\d+) sites, (\d+) checks in (\d+) forward passes .*, (\d+) violations$", done.stdout, re.M
    )
    assert match
    sites, checks, passes, violations = map(int, match.groups())
    assert passes == 2 * demo.NEW_TOKENS
    assert sites >= 6
    assert checks > passes
    assert violations == 0


def test_every_bad_input_is_stopped(done: subprocess.CompletedProcess[str]) -> None:
    match = re.search(r"^(\d+) of (\d+) stopped; (\d+) of them are silent without the guard$", done.stdout, re.M)
    assert match
    stopped, of, silent = map(int, match.groups())
    assert stopped == of >= 12
    assert silent >= 9
    assert len(re.findall(r"^ ?\d+\. ", done.stdout, re.M)) == of


def test_it_fits_a_terminal(done: subprocess.CompletedProcess[str]) -> None:
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_off_is_refused() -> None:
    done = command("demo", LLM_OP_GUARD="off")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "llm-op-guard: error: LLM_OP_GUARD=off switches every guard off; unset it for the demo\n"


# ---------------------------------------------------------------- it can fail


def test_a_call_that_no_guard_stops_is_seen() -> None:
    comparison = demo.compare(demo.Case("nothing wrong", lambda: None))
    assert not comparison.stopped
    assert comparison.guarded == ["not stopped"]


def test_an_error_of_the_call_itself_is_not_a_stop() -> None:
    comparison = demo.compare(demo.Case("an error", lambda: 1 / 0))
    assert not comparison.stopped
    assert comparison.unguarded == "ZeroDivisionError: division by zero"
    assert not comparison.silent


def test_a_right_result_is_not_called_wrong() -> None:
    import torch

    comparison = demo.compare(demo.Case("right", lambda: torch.ones(2), lambda: torch.ones(2)))
    assert (comparison.unguarded, comparison.silent) == ("the right result", False)


def test_how_far_off_is_measured() -> None:
    import torch

    def unguarded(bad: torch.Tensor, right: torch.Tensor) -> str:
        return demo.compare(demo.Case("wrong", lambda: bad, lambda: right)).unguarded

    assert unguarded(torch.tensor([1.0, 4.5]), torch.tensor([1.0, 2.0])) == "silent: off by 2.5"
    assert unguarded(torch.ones(1, 2), torch.ones(2)) == "silent: shape [1, 2] instead of [2]"
    assert unguarded(torch.tensor([torch.nan]), torch.ones(1)) == "silent: NaN in the result"


def test_a_miss_fails_the_demonstration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "cases", lambda: [demo.Case("a miss", lambda: None)])
    stream = io.StringIO()
    assert not demo.compare_bad_inputs(Terminal(stream))
    assert "0 of 1 stopped" in stream.getvalue()


def test_different_tokens_fail_the_demonstration(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    whole = demo._sampled
    calls = iter(range(100))

    def other(model: object) -> object:
        result = whole(model)
        result.sequences = result.sequences + torch.tensor(next(calls))
        return result

    monkeypatch.setattr(demo, "_sampled", other)
    monkeypatch.setattr(api.tally, "counting", False)  # the demonstration leaves it on, in a process of its own
    stream = io.StringIO()
    assert not demo.compare_generation(Terminal(stream))
    assert "tokens: DIFFERENT" in stream.getvalue()


def test_guards_are_gone_afterwards() -> None:
    demo.compare(demo.cases()[0])
    assert og.status().guarded == []


# ---------------------------------------------------------------- how it looks


def test_two_columns() -> None:
    comparison = Comparison("A title", "silent: off by 5.6", True, ["f: x.shape = 1", "  likely cause: no"], True)
    assert render_comparison(3, comparison, Terminal(io.StringIO())).splitlines() == [
        " 3. A title",
        "    silent: off by 5.6          │ f: x.shape = 1",
        "                                │   likely cause: no",
    ]


def test_what_a_stream_cannot_encode_is_replaced(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as stream:
        Terminal(stream).line("a │ b")
    assert (tmp_path / "out").read_text() == "a ? b\n"
