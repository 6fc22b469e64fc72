"""Under autocast, floating dtypes that differ agree: in the check, in `explain`, and in what is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import llm_op_guard as og


@og.guard("q: T[B, L, D] @ dev\nk: T[B, S, D] @ dev\nreturns: T[B, L, S] @ dev")
def scores(q: Any, k: Any) -> Any:
    return q @ k.transpose(-1, -2)


@og.guard("x: T[N]\ny: T[N]\nrequire(T in half, id='half')")
def halves(x: Any, y: Any) -> Any:
    return x


@og.guard("x: T[N]\ny: like(x)\nz: x.dtype[N]\nu: (T | int64)[N]")
def alike(x: Any, y: Any, z: Any, u: Any) -> Any:
    return x


@og.guard("x: any[N]\ny: any[N]\nrequire(x.dtype == y.dtype, id='one_dtype')")
def literal(x: Any, y: Any) -> Any:
    return x


Q, K = torch.ones(2, 3, 4), torch.ones(2, 5, 4)
ONE, HALF, DOUBLE = torch.ones(2), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64)


def rules(caught: pytest.ExceptionInfo[og.GuardError]) -> list[str]:
    return [violation.rule_id for violation in caught.value.violations]


def test_what_autocast_casts_is_no_alarm() -> None:
    with torch.autocast("cpu"):
        assert scores(Q, K).dtype == torch.bfloat16  # the result has another dtype than the arguments
        assert scores(Q.bfloat16(), K).dtype == torch.bfloat16
        alike(ONE, HALF, HALF, HALF)
        alike(HALF, ONE, ONE, torch.ones(2, dtype=torch.int64))


def test_without_autocast_it_is() -> None:
    with pytest.raises(og.GuardError) as caught:
        scores(Q.bfloat16(), K)
    assert rules(caught) == ["k.dtype"]
    with torch.autocast("cpu"), torch.autocast("cpu", enabled=False), pytest.raises(og.GuardError):
        scores(Q.bfloat16(), K)


def test_what_autocast_leaves_alone_is_an_alarm() -> None:
    with torch.autocast("cpu"):
        for other in (torch.float64, torch.int64, torch.bool):
            with pytest.raises(og.GuardError) as caught:
                scores(Q, K.to(other))
            assert rules(caught) == ["k.dtype"]
        with pytest.raises(og.GuardError) as caught:
            alike(ONE, DOUBLE, DOUBLE, DOUBLE)
        assert rules(caught) == ["z.dtype", "u.dtype"] or rules(caught) == ["y.dtype", "z.dtype", "u.dtype"]


def test_a_symbol_is_what_autocast_casts_to_where_dtypes_differ() -> None:
    with torch.autocast("cpu"):
        halves(ONE, HALF)
        halves(HALF, ONE)
        with pytest.raises(og.GuardError) as caught:
            halves(ONE, ONE)  # nothing differs: the rule means what it says
    assert rules(caught) == ["half"]


def test_a_comparison_is_literal() -> None:
    with torch.autocast("cpu"), pytest.raises(og.GuardError) as caught:
        literal(ONE, HALF)
    assert rules(caught) == ["one_dtype"]


def test_suspect_declarations() -> None:
    @og.guard("x: T[N]\ny: T[N] = why(certain=False)")
    def operator(x: Any, y: Any) -> Any:
        return x

    with torch.autocast("cpu"):
        operator(ONE, HALF)
        assert og.record.total == 0
        with pytest.warns(og.GuardWarning, match=r"y\.dtype = float64"):
            operator(ONE, DOUBLE)


def test_one_compiled_program_with_autocast_on_and_off() -> None:
    torch._dynamo.reset()
    run = torch.compile(scores, fullgraph=True, backend="eager")
    for _ in range(2):
        with torch.autocast("cpu"):
            assert run(Q, K.bfloat16()).dtype == torch.bfloat16
        with pytest.raises(og.GuardError) as caught:
            run(Q, K.bfloat16())
        assert rules(caught) == ["k.dtype"]
