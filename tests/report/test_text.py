"""Messages are API: line by line, the way they reach the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import llm_op_guard as og
from llm_op_guard.guard.violation import CallSite, Violation
from llm_op_guard.report.text import place, render


@og.guard
def rotate(q: Any, cos: Any, ids: Any = None) -> None:
    """Turn.

    Contract:
        q: floating[B, H, L, D] @ dev
        cos: floating[B | 1, L, D] @ dev = why(
            because="cos is broadcast over heads, never over width",
            hint="half-width table" if cos.shape[-1] * 2 == D else "cos from another model?")
        require(D % 2 == 0, id="even_head_dim")
        require(within(ids, 0, 9), id="ids", error=IndexError)
    """


def said(call: Callable[[], Any]) -> list[str]:
    with pytest.raises(og.GuardError) as caught:
        call()
    return str(caught.value).splitlines()


def here() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def test_one_broken_rule() -> None:
    line = here() + 1
    lines = said(lambda: rotate(torch.ones(2, 4, 7, 16), torch.ones(1, 7, 8)))
    contract = rotate.__llm_op_guard__.guard.contract  # type: ignore[attr-defined]
    assert lines == [
        "rotate: cos.shape[2] = 8, expected D = 16",
        "  D = 16 from q.shape[3]",
        "  because cos is broadcast over heads, never over width",
        "  likely cause: half-width table",
        "",
        "  q            float32[2, 4, 7, 16] cpu",
        "  cos          float32[1, 7, 8] cpu   <- here",
        f"  called from  {place(CallSite(__file__, line, '<lambda>'))}",
        "  rule         cos.shape (class A, certain)",
        f"  contract     test_text.py:rotate {contract.hash}",
    ]


def test_several_broken_rules() -> None:
    line = here() + 1
    lines = said(lambda: rotate(torch.ones(2, 4, 7, 15), torch.ones(7, 15), ids=torch.tensor([3, 9, -1])))
    contract = rotate.__llm_op_guard__.guard.contract  # type: ignore[attr-defined]
    assert lines == [
        "rotate: 3 rules are broken",
        "  1. cos.shape = (7, 15), rank 2, expected rank 3, [B | 1, L, D]",
        "     because cos is broadcast over heads, never over width",
        "     likely cause: cos from another model?",
        "  2. D % 2 = 1, expected D % 2 == 0",
        "     D = 15 from q.shape[3]",
        "  3. ids[1] = 9 (of 3, 2 elements are wrong, this one first), expected 0 <= ids < 9",
        "",
        "  q            float32[2, 4, 7, 15] cpu   <- here",
        "  cos          float32[7, 15] cpu   <- here",
        "  ids          int64[3] cpu   <- here",
        f"  called from  {place(CallSite(__file__, line, '<lambda>'))}",
        "  rule 1       cos.shape (class A, certain)",
        "  rule 2       even_head_dim (class A, certain)",
        "  rule 3       ids (class B, certain)",
        f"  contract     test_text.py:rotate {contract.hash}",
    ]


class Attention(torch.nn.Module):
    layer_idx = 3

    def forward(self, q: Any, cos: Any) -> None:
        rotate(q, cos)


def test_the_call_site_names_module_and_layer() -> None:
    with pytest.raises(og.GuardError) as caught:
        Attention()(torch.ones(2, 4, 7, 16), torch.ones(1, 7, 1))
    site = caught.value.violations[0].call_site
    assert site is not None
    assert (site.function, site.module_class, site.layer_idx) == ("forward", "Attention", 3)
    assert str(site).endswith(" in forward (Attention, layer 3)")


def test_places_are_shortened() -> None:
    assert place(CallSite("/opt/python/lib/site-packages/transformers/a.py", 7, "f")) == "transformers/a.py:7 in f"
    assert place(CallSite("<stdin>", 1, "f")) == "<stdin>:1 in f"


def test_a_bare_violation_renders() -> None:
    violation = Violation("op", "r", "A", False, None, "a = 1", "a == 2")
    assert render([violation]).splitlines() == ["op: a = 1, expected a == 2", "", "  rule  r (class A, suspect)"]


def test_the_width_fits_a_notebook_cell() -> None:
    lines = said(lambda: rotate(torch.ones(2, 4, 7, 15), torch.ones(7, 15), ids=torch.tensor([3, 9, -1])))
    assert max(map(len, lines)) <= 110
