"""Checks after the call: they run, with what was known before it, whatever the policy and the arguments do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import llm_op_guard as og


@pytest.mark.parametrize(
    ("promise", "kept", "broken"),
    [
        ("int", 1, "s"),
        ("floating[2, 3]", torch.ones(2, 3), torch.ones(5)),
        ("floating[B, B]", torch.ones(2, 2), torch.ones(2, 3)),
        ("(floating[B], floating[B])", (torch.ones(2), torch.ones(2)), (torch.ones(2), torch.ones(3))),
        ("optional[int]", None, 1.5),
    ],
)
def test_a_contract_that_only_promises(promise: str, kept: Any, broken: Any) -> None:
    @og.guard(f"returns: {promise}")
    def operator(x: Any) -> Any:
        return x

    assert operator(kept) is kept
    with pytest.raises(og.GuardError):
        operator(broken)


def test_a_result_is_judged_with_value_rules_off() -> None:
    @og.guard("x: floating[B]\nrequire(finite(y))\nreturns: floating[B]")
    def operator(x: Any, y: Any, result: Any) -> Any:
        return result

    og.set_policy(B="off")
    x, y = torch.ones(3), torch.tensor([float("nan")])
    assert operator(x, y, torch.ones(3)).shape == (3,)
    with pytest.raises(og.GuardError, match=r"result\.shape\[0\] = 4, expected B = 3"):
        operator(x, y, torch.ones(4))


def test_what_only_value_rules_know_before_the_call_is_learnt_after_it() -> None:
    @og.guard("x: any[D, highest(y)]\nreturns: any[D]\nensure(D > 1)")
    def operator(x: Any, y: Any, result: Any) -> Any:
        return result

    x, y = torch.ones(3, 7), torch.tensor([7])
    with pytest.raises(og.GuardError, match=r"result\.shape\[0\] = 4, expected D = 3"):
        operator(x, y, torch.ones(4))
    og.set_policy(B="off")
    assert operator(x, y, torch.ones(4)).shape == (4,)
    with pytest.raises(og.GuardError, match="D > 1"):
        operator(x, y, torch.ones(1))


def test_symbols_keep_the_value_that_they_had_before_the_call() -> None:
    @og.guard("c.keys: floating[B, S]\nx: floating[B, L]\nreturns: floating[B, S + L]")
    def update(c: Any, x: Any, extra: int = 0) -> Any:
        c.keys = torch.cat([c.keys, x], dim=1)
        return torch.ones(2, c.keys.shape[1] + extra)

    cache = SimpleNamespace(keys=torch.ones(2, 3))
    assert update(cache, torch.ones(2, 4)).shape == (2, 7)
    with pytest.raises(og.GuardError) as caught:
        update(cache, torch.ones(2, 4), extra=4)
    assert caught.value.violations[0].expected == "S + L = 11"
    assert [str(binding) for binding in caught.value.violations[0].bindings] == ["B = 2", "S = 7", "L = 4"][1:]


def test_what_the_policy_leaves_out_hides_nothing() -> None:
    body = "require(n > 0, id='positive')\nif finite(x):\n    x: floating[B, 2]\nrequire(x.ndim == 2, id='matrix')"

    @og.guard(body)
    def operator(n: Any, x: Any) -> None: ...

    with pytest.raises(og.GuardError):
        operator(1, torch.ones(2))
    with og.policy(B="off"), pytest.raises(og.GuardError) as caught:
        operator(1, torch.ones(2))
    assert [violation.rule_id for violation in caught.value.violations] == ["matrix"]


def test_operands_of_a_solved_size_keep_their_brackets() -> None:
    for body, size, past in (("x: any[K + 1 + n]", 9, 3), ("x: any[(n - 1) * K]", 8, 3), ("x: any[K / (n + 1)]", 2, 3)):

        @og.guard(f"{body}\nrequire(K > 0)")
        def operator(x: Any, n: int) -> None: ...

        operator(torch.ones(size), past)
        assert og.record.total == 0


def test_an_operand_that_does_not_apply_comes_before_a_size_that_nothing_solves() -> None:
    # Found by test_equivalence: of n nothing is known, so neither is whether 2 is B * (L + n).
    @og.guard("y: T[...]\nx: T[B * (L + n), B, 3 - L]")
    def operator(x: Any, y: Any, n: Any) -> None: ...

    operator(torch.ones(2, 0, 2), torch.ones(1), torch.tensor(2))
    assert og.record.total == 0
    with pytest.raises(og.GuardError, match="2 is no multiple of 0"):
        operator(torch.ones(2, 0, 2), torch.ones(1), 2)


def test_a_rule_about_the_version_of_a_library() -> None:
    @og.guard("""
        if mode == "old":
            require(version("torch") < (2, 9), id="old_mode", because="it was taken out in 2.9")
    """)
    def operator(mode: str) -> None: ...

    operator("new")
    with pytest.raises(og.GuardError, match="old_mode"):
        operator("old")


def test_a_size_that_reads_values_is_a_value_rule() -> None:
    @og.guard("table: floating[highest(ids) + 1, D]\nids: int64[N]")
    def operator(table: Any, ids: Any) -> None: ...

    bad = torch.ones(3, 2), torch.tensor([5])
    with pytest.raises(og.GuardError):
        operator(*bad)
    with og.policy(B="off"):
        operator(*bad)


def test_a_broken_branch_is_told_once_and_for_certain() -> None:
    @og.guard("if n % m == 0:\n    require(n > 1, id='a')\n    require(n > 2, id='b', certain=False)")
    def operator(n: int, m: int) -> None: ...

    with pytest.raises(og.GuardError) as caught:
        operator(4, 0)
    assert [v.rule_id for v in caught.value.violations] == ["if n % m == 0"]


def test_which_argument_is_blamed_does_not_depend_on_the_order_of_statements() -> None:
    statements = ["x: floating[B, D]", "y: floating[B]", "z: floating[D]", "require(B > D)"]
    for order in (statements, statements[::-1], [statements[i] for i in (1, 3, 0, 2)]):

        @og.guard("\n".join(order))
        def operator(x: Any, y: Any, z: Any) -> None: ...

        with pytest.raises(og.GuardError) as caught:
            operator(torch.ones(3, 2), torch.ones(2), torch.ones(2))
        assert [violation.rule_id for violation in caught.value.violations] == ["y.shape"]


def test_nested_tensors_are_left_alone() -> None:
    @og.guard("x: floating[B, _, D]\nreturns: like(x)")
    def operator(x: Any) -> Any:
        return x

    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    assert operator(nested) is nested


def test_keys_of_dictionaries_are_not_printed() -> None:
    class Loud:
        def __repr__(self) -> str:
            raise AssertionError("asked to print itself")

    @og.guard("n: int")
    def operator(n: Any, d: Any) -> None: ...

    with pytest.raises(og.GuardError) as caught:
        operator("x", {"secret user text": torch.ones(2), Loud(): torch.ones(3)})
    assert "secret" not in str(caught.value)
    assert [t.name for t in caught.value.violations[0].tensors] == ["d[item 0]", "d[item 1]"]


def test_a_parameter_called_result_is_not_what_was_returned() -> None:
    @og.guard("x: floating[B]\nreturns: floating[B]")
    def operator(x: Any, result: Any = None) -> Any:
        return x if result is None else result

    x = torch.ones(3)
    assert operator(x) is x
    with pytest.raises(og.GuardError, match=r"result\.shape\[0\] = 4, expected B = 3"):
        operator(x, torch.ones(4))


def test_attributes_of_classes_are_read() -> None:
    class Base:
        heads = 4

    class Attention(Base):
        @classmethod
        @og.guard("require(width % cls.heads == 0, id='whole_heads')")
        def make(cls, width: int) -> int:
            return width

    assert Attention.make(8) == 8
    with pytest.raises(og.GuardError, match="whole_heads"):
        Attention.make(6)


GATED = "gate_up: floating[T, 2 * I]\nreturns: floating[T, I]"


def test_a_size_that_the_result_shows_is_solved_for_before_the_call() -> None:
    @og.guard(GATED)
    def gated(gate_up: Any) -> Any:
        calls.append(gate_up)
        return gate_up[:, : gate_up.shape[1] // 2 + surplus]

    calls: list[Any] = []
    surplus = 0
    gated(torch.ones(3, 4))
    for wrong in (torch.ones(3, 5), torch.ones(3, 4, 2), torch.ones(3, 4, dtype=torch.int64)):
        with pytest.raises(og.GuardError) as caught:
            gated(wrong)
        assert all(violation.rule_id.startswith("gate_up.") for violation in caught.value.violations)
    assert len(calls) == 1, "what is wrong is stopped before the call"
    surplus = 1
    with pytest.raises(og.GuardError, match=r"result.shape\[1\] = 3, expected I = 2"):
        gated(torch.ones(3, 4))
