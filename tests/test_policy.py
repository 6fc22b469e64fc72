"""Policies: how they are written, merge, reach guards in place, and stay within a thread or task."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import warnings
from typing import Any

import pytest
import torch

import llm_op_guard as og
from llm_op_guard.policy import OFF, Action, Policy, Setting, parse_environment


def make() -> Any:
    @og.guard("n: int\nrequire(finite(x), id='finite')")
    def operator(n: Any, x: Any = None) -> Any:
        return n

    return operator


BAD = torch.tensor([float("nan")])


def stops(operator: Any, *arguments: Any) -> bool:
    try:
        operator(*arguments)
    except og.GuardError:
        return True
    return False


def test_settings_are_an_action_a_time_or_both() -> None:
    assert Setting.parse("warn") == Setting(Action.WARN)
    assert Setting.parse("sync") == Setting(Action.RAISE)
    assert Setting.parse("warn,sync") == Setting.parse(" SYNC , warn ") == Setting(Action.WARN)


@pytest.mark.parametrize("bad", ["", "loud", "warn,raise", "sync,sync", "async", 3, ["warn"]])
def test_bad_settings(bad: Any) -> None:
    with pytest.raises(og.PolicyError):
        og.set_policy(A=bad)
    with pytest.raises(og.PolicyError):
        og.policy(B=bad)


def test_bad_settings_name_what_is_known() -> None:
    with pytest.raises(og.PolicyError, match=r"unknown or repeated 'loud' .*; known: raise, warn, record, off, sync"):
        og.set_policy(A="loud")
    with pytest.raises(og.PolicyError, match="unknown cost class 'C'; known: A, B"):
        og.set_policy(C="raise")


def test_contracts_of_users_run_both_classes() -> None:
    operator = make()
    assert stops(operator, "x")
    assert stops(operator, 1, BAD)


def test_policies_act_on_guards_in_place_and_merge() -> None:
    operator = make()
    og.set_policy(B="off")
    assert stops(operator, "x") and not stops(operator, 1, BAD)
    og.set_policy(A="off")
    assert not stops(operator, "x") and not stops(operator, 1, BAD)
    og.set_policy(B="raise")
    assert not stops(operator, "x") and stops(operator, 1, BAD)


def test_with_blocks_nest_and_end() -> None:
    operator = make()
    with og.policy(A="off"):
        assert not stops(operator, "x") and stops(operator, 1, BAD)
        with og.policy(B="off"):
            assert not stops(operator, "x") and not stops(operator, 1, BAD)
        assert stops(operator, 1, BAD)
    assert stops(operator, "x")


def test_a_with_block_ends_by_an_exception() -> None:
    operator = make()
    with pytest.raises(ZeroDivisionError), og.policy(A="off"):
        raise ZeroDivisionError
    assert stops(operator, "x")


def test_warn_once_per_rule_and_site_then_count() -> None:
    operator, other = make(), make()
    og.set_policy(A="warn")
    with pytest.warns(og.GuardWarning, match="operator: n is a str, expected int"):
        assert operator("x") == "x"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert operator("y") == "y"
    with pytest.warns(og.GuardWarning):
        other("x")
    assert og.record.total == 3


def test_record_keeps_silent() -> None:
    operator = make()
    og.set_policy(A="record", B="record")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert operator("x", BAD) == "x"
    assert [v.rule_id for v in og.record.violations] == ["n.type", "finite"]


def test_a_with_block_is_for_its_own_thread() -> None:
    operator = make()
    og.set_policy(B="off")
    inside, checked = threading.Event(), threading.Event()
    elsewhere: list[bool] = []

    def other() -> None:
        inside.wait(10)
        elsewhere.extend([stops(operator, 1, BAD), stops(operator, "x")])
        checked.set()

    thread = threading.Thread(target=other)
    thread.start()
    with og.policy(B="raise", A="off"):
        inside.set()
        assert checked.wait(10)
        assert stops(operator, 1, BAD) and not stops(operator, "x")
    thread.join()
    assert elsewhere == [False, True]


def test_a_with_block_is_for_its_own_task() -> None:
    operator = make()

    async def quiet() -> bool:
        with og.policy(A="off"):
            await asyncio.sleep(0.01)
            return stops(operator, "x")

    async def strict() -> bool:
        await asyncio.sleep(0.005)
        return stops(operator, "x")

    async def both() -> list[bool]:
        return await asyncio.gather(quiet(), strict())

    assert asyncio.run(both()) == [False, True]


def test_the_environment() -> None:
    assert parse_environment("A=warn B=raise,sync") == Policy.of(A="warn", B="raise")
    assert parse_environment("  off ") == OFF
    assert parse_environment("") == Policy()
    for bad in ("A", "A=", "A=loud", "C=warn", "A=warn A=off", "A=warn,B=off"):
        with pytest.raises(og.PolicyError, match="LLM_OP_GUARD"):
            parse_environment(bad)


def run(program: str, value: str) -> str:
    prelude = "import llm_op_guard as og\n@og.guard('n: int')\ndef f(n): return n\n"
    command = [sys.executable, "-W", "ignore", "-c", prelude + program]
    environment = {**os.environ, "LLM_OP_GUARD": value}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr


def test_the_environment_sets_what_guards_do() -> None:
    assert run("print(f('x'))", "A=warn") == "x\n"
    assert "GuardError" in run("f('x')", "B=warn")
    assert run("og.set_policy(A='raise')\nprint(f('x'))", "off") == "x\n"
    assert "GuardError" in run("og.set_policy(A='raise')\nf('x')", "A=off")
    assert "LLM_OP_GUARD='A:raise' cannot be understood" in run("", "A:raise")
