"""Coroutines, generators and threads: calls that are under way while a patch comes or goes."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import sys
import threading
import types
from typing import Any

import pytest
from patch_recorder import MakeModule, Recorder

from llm_op_guard.install.patch import Patch, sweep

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def add(a: int, b: int = 2) -> int:
    return a + b


class SpecialError(Exception):
    pass


# ------------------------------------------------------------------------------------------ coroutines and generators


def test_a_coroutine_function(seen: Recorder) -> None:
    async def function(a, *, b=2):
        await asyncio.sleep(0)
        return a + b

    patch = Patch(function, ["a"])
    patch.arm(seen.check, seen.check_result)
    assert inspect.iscoroutinefunction(function)
    coroutine = function(1)
    assert coroutine.__qualname__ == function.__qualname__
    assert seen.calls == []
    assert asyncio.run(coroutine) == 3
    assert seen.calls == [(1,)] and seen.results == [(3, 1)]
    patch.disarm()


def test_a_generator_function(seen: Recorder) -> None:
    def function(n):
        got = yield n
        try:
            yield got
        except SpecialError:
            yield "caught"
        return "done"

    patch = Patch(function, ["n"])
    patch.arm(seen.check, seen.check_result)
    assert inspect.isgeneratorfunction(function)
    generator = function(1)
    assert seen.calls == []
    assert next(generator) == 1
    assert seen.calls == [(1,)]
    assert generator.send("sent") == "sent"
    assert generator.throw(SpecialError()) == "caught"
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert stop.value.value == "done"
    assert seen.results == [("done", 1)]
    patch.disarm()


def test_an_async_generator_function(seen: Recorder) -> None:
    closed = []

    async def function(n):
        try:
            got = yield n
            try:
                yield got
            except SpecialError:
                await asyncio.sleep(0)
                yield "caught"
        finally:
            closed.append(n)

    patch = Patch(function, ["n"])
    patch.arm(seen.check)
    assert inspect.isasyncgenfunction(function)

    async def use() -> None:
        whole = function(1)
        assert seen.calls == []
        assert await anext(whole) == 1
        assert seen.calls == [(1,)]
        assert await whole.asend("sent") == "sent"
        assert await whole.athrow(SpecialError()) == "caught"
        with pytest.raises(StopAsyncIteration):
            await anext(whole)
        assert closed == [1]
        early = function(2)
        assert await anext(early) == 2
        await early.aclose()
        assert closed == [1, 2]
        failing = function(3)
        await anext(failing)
        with pytest.raises(ZeroDivisionError):
            await failing.athrow(ZeroDivisionError())
        suspended = function(4)
        await anext(suspended)
        patch.disarm()
        assert sweep() == 1  # its wrapper still runs
        assert [value async for value in suspended] == [None]
        assert [value async for value in function(5)] == [5, None]

    asyncio.run(use())
    assert seen.calls == [(1,), (2,), (3,), (4,)]


def test_a_generator_based_coroutine(seen: Recorder) -> None:
    @types.coroutine
    def function(n):
        yield
        return n

    async def main() -> int:
        return await function(3)

    patch = Patch(function, ["n"])
    patch.arm(seen.check)
    assert asyncio.run(main()) == 3
    assert seen.calls == [(3,)]
    patch.disarm()


@pytest.mark.parametrize("begun", [False, True])
def test_a_suspended_generator_outlives_the_patch(seen: Recorder, begun: bool) -> None:
    before = dict(globals())
    function = counting
    patch = Patch(function, ["n"])
    patch.arm(seen.check, seen.check_result)
    generator = function(2)
    if begun:
        assert next(generator) == 0
    assert patch.disarm()
    assert sweep() == 1
    assert list(generator) == ([1] if begun else [0, 1])
    assert len(seen.results) == 1
    assert sweep() == 0
    assert dict(globals()) == before


def counting(n):
    yield from range(n)


def test_a_suspended_coroutine_outlives_the_patch(seen: Recorder) -> None:
    async def function(n):
        await asyncio.sleep(0)
        return n

    async def main() -> int:
        patch = Patch(function, ["n"])
        patch.arm(seen.check, seen.check_result)
        task = asyncio.create_task(function(7))
        await asyncio.sleep(0)
        assert patch.disarm()
        assert sweep() == 1
        return await task

    assert asyncio.run(main()) == 7
    assert seen.results == [(7, 1)]


# ------------------------------------------------------------------------------------------------------------- threads


def test_a_call_in_flight_finishes_with_its_own_checks(make_module: MakeModule, seen: Recorder) -> None:
    module = make_module("def op(wait):\n    wait()\n    return 1\n")
    before = dict(vars(module))
    entered, release = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        release.wait()

    results: list[Any] = []
    patch = Patch(module.op, ["wait"])
    patch.arm(seen.check, seen.check_result)
    thread = threading.Thread(target=lambda: results.append(module.op(wait)), daemon=True)
    thread.start()
    entered.wait()
    assert patch.disarm()
    assert sweep() == 1
    patch.arm(seen.check, seen.check_result)  # the same names again, now wanted
    assert sweep() == 0
    assert patch.disarm()
    release.set()
    thread.join()
    assert results == [1]
    assert seen.results == [(1, 1)]
    assert sweep() == 0
    assert vars(module) == before


def test_a_stack_that_changed_while_it_was_read_counts_as_in_use(
    seen: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A generator called beneath the wrapper, suspended by its thread since: its frame no longer leads to the wrapper.
    generator = counting(2)
    next(generator)
    assert generator.gi_frame.f_back is None
    patch = Patch(add, ["a"])
    patch.arm(seen.check)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "_current_frames", lambda: {1: generator.gi_frame})
        assert patch.disarm()
        assert sweep() == 1
    assert sweep() == 0


def test_names_taken_by_another_copy_of_the_library(
    make_module: MakeModule, seen: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make_module("def one(a):\n    return 1\ndef two(a):\n    return 2\n")
    for function in (module.one, module.two):
        monkeypatch.setattr(sys.modules[Patch.__module__], "_serial", itertools.count(1))
        Patch(function, ["a"]).arm(seen.check)
    assert (module.one("x"), module.two("y")) == (1, 2)
    assert seen.calls == [("x",), ("y",)]


def test_disarmed_from_within_its_own_check(seen: Recorder) -> None:
    def function(a):
        return a

    patch = Patch(function, ["a"])
    patch.arm(lambda a: patch.disarm(), seen.check_result)
    assert function(1) == 1
    assert seen.results == [(1, True)]


def test_threads_calling_while_another_arms_and_disarms(make_module: MakeModule) -> None:
    module = make_module(
        "def make(k):\n    def inner(a, *, b=1):\n        return a + b * k\n    return inner\n"
        "inner = make(1)\n"
        "def op(a, b=1, *rest, c=3, **more):\n    return inner(a, b=b) + sum(i for i in (0,))\n"
        "def gen(a):\n    yield a\n    yield a + 1\n"
    )
    before = dict(vars(module))
    stop = threading.Event()
    errors: list[BaseException] = []
    counts = [0, 0]

    def call() -> None:
        try:
            while not stop.is_set():
                assert module.op(1, c=4) == 2
                assert module.inner(1) == 2
                assert list(module.gen(1)) == [1, 2]
        except BaseException as error:
            errors.append(error)

    def check(*values: Any) -> None:
        counts[0] += 1

    def check_result(result: Any, state: Any) -> None:
        counts[1] += 1

    patches = [Patch(module.op, ["a", "more"]), Patch(module.inner, ["b"]), Patch(module.gen, ["a"])]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=call, daemon=True) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for turn in range(500):
            # The generator's patch costs a look at every object of the process when it is disarmed.
            for patch in patches if turn % 50 == 0 else patches[:2]:
                patch.arm(check, check_result if turn % 2 else None)
            for patch in patches:
                assert patch.disarm()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert errors == []
    assert counts[0] > 0
    assert sweep() == 0
    assert vars(module) == before
