"""What a call ends in, unguarded and guarded: what the tests of entries, masks and routers ask of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import llm_op_guard as og

Call = Callable[[], Any]


def logits(call: Call) -> torch.Tensor:
    """What an unguarded call gives without an error or a warning, in finite numbers."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        result = call().logits
    assert isinstance(result, torch.Tensor)
    assert result.isfinite().all()
    return result


def assert_clearly_wrong(wrong: torch.Tensor, right: torch.Tensor) -> None:
    assert wrong.shape == right.shape
    assert (wrong - right).abs().max() > 0.01


def diagnosed(call: Call, operator: str, rule_id: str, *, cost_class: str = "A") -> og.Violation:
    """The one violation that the call ends in when it is guarded; of class B, when that is switched on."""
    policy = {"B": "raise"} if cost_class == "B" else {}
    with og.policy(**policy), og.installed("transformers"), pytest.raises(og.GuardError) as caught, torch.no_grad():
        call()
    (violation,) = caught.value.violations
    assert (violation.operator, violation.rule_id, violation.cost_class) == (operator, rule_id, cost_class)
    assert violation.certain and violation.because and violation.hint
    assert violation.hint in str(caught.value)
    return violation


def suspected(call: Call, operator: str, text: str) -> str:
    """The warning of the call when it is guarded, values too."""
    with (
        og.policy(B="raise"),
        og.installed("transformers"),
        torch.no_grad(),
        pytest.warns(og.GuardWarning, match=text) as caught,
    ):
        call()
    (warning,) = [w for w in caught if issubclass(w.category, og.GuardWarning)]
    assert str(warning.message).startswith(f"{operator}: ")
    return str(warning.message)


def assert_quiet(*calls: Call) -> None:
    """No call is told of, values looked at, and guarded each gives what it gives unguarded."""
    told = og.record.total
    plain = [logits(call) for call in calls]
    with og.policy(B="raise"), og.installed("transformers"), warnings.catch_warnings():
        warnings.simplefilter("error", og.GuardWarning)
        warnings.simplefilter("error", og.GuardInternalWarning)
        for call, before in zip(calls, plain, strict=True):
            assert torch.equal(logits(call), before)
    assert og.record.total == told
