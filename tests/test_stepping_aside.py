"""Where tensors and programs are not plain, a guard is right or does not apply; docs/stepping-aside.md says which."""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import llm_op_guard as og
from stepping_aside_rows import ROWS, Operator, Row, table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "stepping-aside.md"
Q, W = torch.arange(1.0, 25).reshape(2, 3, 4), torch.tensor([1.0, 2.0, 3.0, 4.0])
NARROW = torch.tensor([2.0])
NOT_FINITE = Q.clone().index_fill(0, torch.tensor([1]), float("inf"))


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    former = sys.excepthook  # torch replaces it, for good
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
    sys.excepthook = former
    torch._dynamo.reset()


def outcome(row: Row, f: Operator, q: torch.Tensor, w: torch.Tensor) -> tuple[Any, Counter[tuple[Any, str]]]:
    """What a call gives, an error included, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(3)
        try:
            result = row.call(f, q, w)
        except Exception as error:
            result = error
    return result, Counter((w.category, str(w.message)) for w in caught)


def flat(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value.dtype, tuple(value.shape), value.detach().nan_to_num().tolist()]
    if isinstance(value, tuple | list):
        return [part for item in value for part in flat(item)]
    # An address, a frame or a function's name tells nothing about what was computed.
    return (
        [(type(value), re.sub(r"0x\w+", "", str(value)).partition("\n")[0])]
        if isinstance(value, Exception)
        else [value]
    )


def assert_as_if_unguarded(row: Row, q: torch.Tensor, w: torch.Tensor) -> Any:
    outcome(row, row.plain, q, w)  # what torch warns of only once it has warned of now
    plain, plainly = outcome(row, row.plain, q, w)
    guarded, warned = outcome(row, row.guarded, q, w)
    assert flat(guarded) == flat(plain)
    assert warned == plainly
    assert og.record.total == 0
    return plain


def assert_refused(row: Row, q: torch.Tensor, w: torch.Tensor, rule: str) -> None:
    result, _ = outcome(row, row.guarded, q, w)
    assert isinstance(result, og.GuardError), result
    assert [violation.rule_id for violation in result.violations] == [rule]
    with og.policy(A="record", B="record"):
        og.record.clear()
        let_through, _ = outcome(row, row.guarded, q, w)
    assert flat(let_through) == flat(outcome(row, row.plain, q, w)[0])


each_row = pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id=row.where.replace("`", ""),
            marks=pytest.mark.skipif(row.where.startswith("CUDA") and not torch.cuda.is_available(), reason="no GPU"),
        )
        for row in ROWS
    ],
)


@each_row
def test_a_good_call_is_as_if_unguarded(row: Row) -> None:
    result = assert_as_if_unguarded(row, Q, W)
    assert not isinstance(result, Exception), result


@each_row
def test_bad_metadata(row: Row) -> None:
    if row.a:
        assert_refused(row, Q, NARROW, "w.shape")
    else:
        assert_as_if_unguarded(row, Q, NARROW)


@each_row
def test_bad_values(row: Row) -> None:
    if row.b:
        assert_refused(row, NOT_FINITE, W, "finite")
    else:
        assert_as_if_unguarded(row, NOT_FINITE, W)


def test_capture_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS[0]
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda answer=capturing: answer)
        with pytest.raises(og.GuardError):
            row.guarded(Q, NARROW)
        if capturing:
            row.guarded(NOT_FINITE, W)
        else:
            with pytest.raises(og.GuardError):
                row.guarded(NOT_FINITE, W)


def test_the_page_has_the_rows() -> None:
    shown = PAGE.read_text(encoding="utf-8").partition("<!-- table: rows -->\n")[2].partition("\n<!-- end -->")[0]
    assert shown == table(), f"docs/stepping-aside.md is out of date; its table is now:\n{table()}"
