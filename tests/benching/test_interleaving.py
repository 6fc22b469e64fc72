"""Variants are timed in turn, each once a round, and no round is lost or made up."""

from __future__ import annotations

import gc

import pytest

from llm_op_guard.benching.clock import calling, calls_for, interleaved


def test_each_variant_once_a_round() -> None:
    order: list[str] = []

    def says(name: str) -> int:
        order.append(name)
        return order.count(name)

    said = interleaved({name: lambda name=name: says(name) for name in "abc"}, 6, warm_up=2)
    assert said == {name: [3, 4, 5, 6, 7, 8] for name in "abc"}, "those that warm up are left out"
    rounds = [order[at : at + 3] for at in range(0, len(order), 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)


def test_who_goes_before_whom_changes() -> None:
    order: list[str] = []
    interleaved({name: lambda name=name: order.append(name) for name in "abc"}, 60)
    before_a = {order[at - 1] for at in range(1, len(order)) if order[at] == "a"}
    assert before_a >= {"b", "c"}


@pytest.mark.parametrize(("rounds", "warm_up", "asked"), [(1, None, 2), (5, None, 6), (40, None, 44), (3, 0, 3)])
def test_rounds_that_warm_up(rounds: int, warm_up: int | None, asked: int) -> None:
    count = 0

    def variant() -> int:
        nonlocal count
        count += 1
        return count

    assert len(interleaved({"x": variant}, rounds, warm_up)["x"]) == rounds
    assert count == asked


def test_garbage_is_collected_again_afterwards() -> None:
    states = interleaved({"x": gc.isenabled}, 2)["x"]
    assert states == [False, False]
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        interleaved({"x": lambda: 1 // 0}, 2)
    assert gc.isenabled()


def test_a_block_is_so_many_calls_and_one_before() -> None:
    calls: list[tuple[int, int]] = []
    assert calling(lambda a, b: calls.append((a, b)), (1, 2), 10)() > 0
    assert calls == [(1, 2)] * 11


def test_how_many_calls_make_a_block() -> None:
    assert calls_for(lambda: None, (), 0) == 1
    assert calls_for(lambda: None, (), 1e12) == 1000
