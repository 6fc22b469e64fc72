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
from llm_op_guard.policy import OFF, Action, Layer, Policy, Scoped, Setting, Time, parse_environment


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
    assert Setting.parse("sync") == Setting(Action.RAISE, Time.SYNC)
    assert Setting.parse("warn,sync") == Setting.parse(" SYNC , warn ") == Setting(Action.WARN, Time.SYNC)
    assert Setting.parse("warn,async,every=2") == Setting(Action.WARN, Time.ASYNC, every=2)
    assert str(Setting.parse("async,warn")) == "warn,async"


def test_only_values_can_be_judged_later() -> None:
    with pytest.raises(og.PolicyError, match="A='async': async is for class B; metadata is judged in the call"):
        og.set_policy(A="async")
    with og.policy(B="warn,async"):
        pass


@pytest.mark.parametrize("bad", ["", "loud", "warn,raise", "sync,sync", "sync,async", 3, ["warn"]])
def test_bad_settings(bad: Any) -> None:
    with pytest.raises(og.PolicyError):
        og.set_policy(A=bad)
    with pytest.raises(og.PolicyError):
        og.policy(B=bad)


def test_bad_settings_name_what_is_known() -> None:
    with pytest.raises(og.PolicyError, match=r"unknown or repeated 'loud' .*; known: raise, warn, record, off, sync"):
        og.set_policy(A="loud")
    with pytest.raises(og.PolicyError, match="unknown cost class 'D'; known: A, B"):
        og.set_policy(D="raise")


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
    assert parse_environment("A=warn B=raise,sync default=record") == Layer(
        Policy.of(A="warn", B="raise,sync", default="record")
    )
    assert parse_environment("A=off x.*:A=warn y:B=off x.*:B=off") == Layer(
        Policy.of(A="off"), (Scoped(Policy.of(A="warn", B="off"), "x.*"), Scoped(Policy.of(B="off"), "y"))
    )
    assert parse_environment("  off ") == Layer(OFF)
    assert parse_environment("") == Layer()
    bad_ones = ("A", "A=", "A=loud", "C=warn", "A=warn A=off", "A=warn,B=off", "x:A", ":A=off", "x:A=off x:A=warn")
    for bad in (*bad_ones, "default=sometimes", "x:=off"):
        with pytest.raises(og.PolicyError, match="LLM_OP_GUARD"):
            parse_environment(bad)


@pytest.mark.parametrize("setting", ["sync", "record,sync"])
def test_a_default_has_no_time(setting: str) -> None:
    told = f"default='{setting}': it takes an action alone, such as 'record'"
    for setter in (og.set_policy, og.policy):
        with pytest.raises(og.PolicyError, match=told):
            setter(default=setting)


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


# ---------------------------------------------------------------- some operators only


def pair() -> tuple[Any, Any]:
    @og.guard("n: int\nrequire(finite(x), id='finite')")
    def first(n: Any, x: Any = None) -> Any:
        return n

    @og.guard("n: int\nrequire(finite(x), id='finite')")
    def second(n: Any, x: Any = None) -> Any:
        return n

    return first, second


def test_a_policy_for_one_operator_leaves_the_others() -> None:
    first, second = pair()
    og.set_policy(A="off", operator=first.__qualname__.rpartition(".")[2])
    assert not stops(first, "x") and stops(second, "x")
    assert stops(first, 1, BAD)


@pytest.mark.parametrize("pattern", ["first", "fir*", "f[hi]rst", f"{__name__}.*first", "*.pair.<locals>.first"])
def test_operators_match_by_name_or_site_as_files_do_in_a_shell(pattern: str) -> None:
    first, second = pair()
    og.set_policy(A="off", operator=pattern)
    assert not stops(first, "x") and stops(second, "x")


@pytest.mark.parametrize("pattern", ["First", "irst", "fir", "first.*"])
def test_other_patterns_match_nothing(pattern: str) -> None:
    first, _ = pair()
    og.set_policy(A="off", operator=pattern)
    assert stops(first, "x")


def test_the_most_specific_and_then_the_last_set_wins() -> None:
    first, second = pair()
    og.set_policy(A="off", operator="first")
    og.set_policy(A="raise")  # for all: does not reach what was set for one
    assert not stops(first, "x") and stops(second, "x")
    og.set_policy(A="raise", operator="f*")
    assert stops(first, "x")
    og.set_policy(A="off", operator="*")
    assert not stops(first, "x") and not stops(second, "x")


def test_settings_for_one_operator_merge_class_by_class() -> None:
    first, _ = pair()
    og.set_policy(A="off", operator="first")
    og.set_policy(B="off", operator="first")
    assert not stops(first, "x", BAD)
    og.set_policy(B="raise", operator="fi*")
    assert not stops(first, "x") and stops(first, 1, BAD)


def test_setting_the_same_again_takes_no_memory() -> None:
    layer = Layer()
    for action in ("off", "warn") * 5:
        layer = layer.with_set(Scoped.of("f*", {"A": action}))
    assert layer.scoped == (Scoped(Policy.of(A="warn"), "f*"),)


def test_blocks_for_one_operator_nest_and_the_innermost_wins() -> None:
    first, second = pair()
    og.set_policy(A="raise", operator="first")
    with og.policy(A="off", operator="first"):
        assert not stops(first, "x") and stops(second, "x")
        with og.policy(A="raise"):
            assert stops(first, "x")
        with og.policy(B="off", operator="sec*"):
            assert not stops(first, "x") and not stops(second, 1, BAD)
    assert stops(first, "x")


def test_a_function_that_is_off_has_its_own_code() -> None:
    first, second = pair()
    og.set_policy(A="off", B="off", operator="first")
    assert first.__code__ is first.__wrapped__.__code__ and second.__code__ is not second.__wrapped__.__code__
    with og.policy(B="warn", operator="*.first"):
        assert first.__code__ is not first.__wrapped__.__code__
    assert first.__code__ is first.__wrapped__.__code__


@pytest.mark.parametrize("bad", ["", "  ", 3, ["first"]])
def test_bad_operators(bad: Any) -> None:
    with pytest.raises(og.PolicyError, match="operator= is the name or the site of an operator, or a pattern"):
        og.set_policy(A="off", operator=bad)
    with pytest.raises(og.PolicyError):
        og.policy(A="off", operator=bad)


def test_a_policy_for_an_operator_says_something() -> None:
    with pytest.raises(og.PolicyError, match="nothing is set for 'first'; add a setting such as A='warn'"):
        og.set_policy(operator="first")


def test_the_environment_reaches_single_operators() -> None:
    assert run("print(f('x'))", "A=raise f:A=warn") == "x\n"
    assert run("print(f('x'))", "__main__.*:A=warn") == "x\n"
    assert "GuardError" in run("f('x')", "A=warn f:A=raise")
    assert "GuardError" in run("og.set_policy(A='raise')\nf('x')", "f:A=warn")


def test_default_softens_only_what_nobody_set() -> None:
    operator = make()
    og.set_policy(default="record")
    assert not stops(operator, "x", BAD)
    assert [v.rule_id for v in og.record.violations] == ["n.type", "finite"]
    og.set_policy(B="raise")
    assert not stops(operator, "x") and stops(operator, 1, BAD)
    with og.policy(default="raise"):
        assert stops(operator, "x")


def test_default_switches_nothing_on() -> None:
    defaults = Policy.of(A="raise", B="off")
    assert Policy.of(default="record").over_defaults(defaults) == Policy.of(A="record", B="off", default="record")


# ---------------------------------------------------------------- the kill switch


def test_disable_restores_every_function_whatever_policies_say() -> None:
    first, second = pair()
    og.set_policy(A="raise", operator="first")
    with og.policy(A="raise"):
        og.disable()
        og.disable()
        for function in (first, second):
            assert function.__code__ is function.__wrapped__.__code__
            assert not stops(function, "x", BAD)
        late, _ = pair()
        og.set_policy(A="raise", operator="*")
        assert not stops(late, "x") and not stops(first, "x")
        og.enable()
        assert stops(first, "x") and stops(late, "x")


def test_disable_reaches_other_threads() -> None:
    operator = make()
    disabled, entered = threading.Event(), threading.Event()
    seen: list[bool] = []

    def other() -> None:
        with og.policy(A="raise", B="raise"):
            seen.append(stops(operator, "x"))
            entered.set()
            assert disabled.wait(10)
            seen.append(stops(operator, "x"))

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(10)
    og.disable()
    disabled.set()
    thread.join()
    assert seen == [True, False]


def test_disable_while_others_call() -> None:
    operator = make()
    wrong: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            try:
                operator(1)
                stops(operator, "x")
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        og.disable()
        assert not stops(operator, "x")
        og.enable()
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == [] and stops(operator, "x")


def test_enable_does_not_overrule_the_environment() -> None:
    assert run("og.enable()\nprint(f('x'))", "off") == "x\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_guarded_and_has_its_own_switch() -> None:
    program = """
import os
pid = os.fork()
if pid == 0:
    try:
        f('x')
    except og.GuardError:
        og.disable()
        f('x')
        os._exit(7)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
try:
    f('x')
except og.GuardError:
    print('guarded')
"""
    assert run(program, "") == "7\nguarded\n"


def test_tasks_have_their_own_operators() -> None:
    @og.guard("n: int")
    async def first(n: Any) -> Any:
        await asyncio.sleep(0)
        return n

    async def quiet() -> Any:
        with og.policy(A="off", operator="first"):
            await asyncio.sleep(0.01)
            return await first("x")

    async def strict() -> bool:
        await asyncio.sleep(0.005)
        try:
            await first("x")
        except og.GuardError:
            return True
        return False

    async def both() -> list[Any]:
        return await asyncio.gather(quiet(), strict())

    assert asyncio.run(both()) == ["x", True]
