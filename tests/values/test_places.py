"""Guarded calls in CUDA graphs: asked at each replay, told of the replay that broke them, and never waited for.

The processor stands in for a device (`graphs`). The kernel itself is tried in Triton's interpreter: `make triton`.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import Graph, Stream, replay, stand_in

import llm_op_guard as og
from llm_op_guard.guard import late as late_rules
from llm_op_guard.guard import readable
from llm_op_guard.guard.late import Probe, Range, Replay
from llm_op_guard.values import by_torch, late, places, ring
from llm_op_guard.values.places import Place, Places

CPU = torch.device("cpu")
NAN = float("nan")
CONTRACT = """
x: floating[L]
ids: int64[_]
require(finite(x), id="finite_x")
require(within(ids, 0, L), id="ids_in_x")
"""
IDS = torch.tensor([0, 1])


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    og.set_policy(B="async")
    return stand_in(monkeypatch)


def guarded(contract: str = CONTRACT, function: Any = lambda x, ids: x * 2) -> Any:
    return og.guard(contract)(function)


# ---------------------------------------------------------------- each replay


def test_each_replay_is_judged_and_told_of(stream: Stream) -> None:
    one, x = guarded(), torch.ones(4)
    one(x, IDS)
    with stream.capture() as graph:
        one(x, IDS)
    assert len(graph) == 1, "all rules of a call are asked at once"
    og.flush()  # captured is not run
    replay(graph, 2)
    og.flush()
    x[2] = NAN
    replay(graph, 3)
    with pytest.raises(og.GuardError) as raised:
        og.flush()
    (violation,) = raised.value.violations
    assert (violation.rule_id, violation.observed) == ("finite_x", "x[2] = nan (of 4, 1 element is wrong)")
    assert str(violation.told_late) == (
        "call 2 of this operator; captured in a CUDA graph, broken at replay 3 and in 3 replays since then, of 5 so far"
    )
    assert violation.to_dict()["told_late"]["replayed"] == {"at": 3, "broken": 3, "replays": 5, "protects": False}
    og.flush()  # told once
    x[2] = 1
    replay(graph)
    og.flush()
    x[0] = x[1] = float("inf")
    replay(graph)
    with pytest.raises(og.GuardError, match="broken at replay 7, of 7 so far") as raised:
        og.flush()
    assert raised.value.violations[0].observed.startswith("x[0] = inf (of 4, 2 elements")
    assert next(iter(og.record.values_late.values())) == (8, 0), "the call before the capture, and 7 replays"


def test_the_first_replay_that_broke_is_kept_until_it_is_read(stream: Stream) -> None:
    one, x = guarded(), torch.ones(4)
    one(x, IDS)
    with stream.capture() as graph:
        one(x, IDS)
    x[3] = NAN
    replay(graph)
    x[0] = NAN
    replay(graph)
    assert "x[3] = nan" in og.postmortem() and "x[3] = nan" in og.postmortem()
    with pytest.raises(og.GuardError, match=r"x\[3\] = nan \(of 4, 1 element is wrong\)"):
        og.flush()
    assert og.postmortem() == ""


def test_what_protects_a_memory_access_is_late_in_a_graph_and_says_so(stream: Stream) -> None:
    one, x, ids = guarded(), torch.ones(4), torch.tensor([0, 1])
    with pytest.raises(og.GuardError, match="ids"):
        one(x, torch.tensor([9]))
    one(x, ids)
    with stream.capture() as graph:
        one(x, ids)
    ids[1] = 4
    replay(graph)
    with pytest.raises(og.GuardError) as raised:
        og.flush()
    assert raised.value.violations[0].observed == "ids[1] = 4 (of 2, 1 element is wrong)"
    assert str(raised.value.violations[0].told_late).endswith(
        "broken at replay 1, of 1 so far; a graph does not wait, so that the operator ran"
    )


def test_a_policy_that_waits_does_not_in_a_graph(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["llm_op_guard.install.site"], "has_devices", lambda: True)
    og.set_policy(B="sync")
    one, x = guarded(), torch.ones(4)
    with pytest.raises(og.GuardError):
        one(torch.full((4,), NAN), IDS)
    one(x, IDS)
    assert stream.asked == 0
    with stream.capture() as graph:
        one(x, IDS)
    x[1] = NAN
    replay(graph)
    with pytest.raises(og.GuardError, match="broken at replay 1"):
        og.flush()


def test_calls_that_a_pace_leaves_out_protect_in_a_graph(stream: Stream) -> None:
    one, x, ids = guarded(), torch.ones(4), torch.tensor([0, 1])
    with og.policy(B="async,every=2"):
        one(x, ids)
        with stream.capture() as graph:
            one(x, ids)
    x[1], ids[0] = NAN, -1
    replay(graph)
    with pytest.raises(og.GuardError) as raised:
        og.flush()
    assert [v.rule_id for v in raised.value.violations] == ["ids_in_x"]


def test_each_captured_call_has_a_place_of_its_own(stream: Stream) -> None:
    """A layer that is computed again for its gradient is another call; a replay is the same one."""
    one, x = guarded(), torch.ones(4)
    one(x, IDS)
    with stream.capture() as graph:
        for _ in range(2):
            one(x, IDS)
    x[0] = NAN
    replay(graph, 2)
    with pytest.raises(og.GuardError) as raised:
        og.flush()
    told = [v.told_late for v in raised.value.violations]
    assert [(late.call, late.replayed) for late in told if late] == [
        (call, late_rules.Replayed(1, 2, 2, protects=False)) for call in (2, 3)
    ]


# ---------------------------------------------------------------- who is told


def test_told_at_the_next_guarded_call_of_the_thread_that_captured(stream: Stream) -> None:
    one, x = guarded(), torch.ones(4)
    other = guarded("y: floating[_]\nrequire(finite(y))", lambda y: y)
    one(x, IDS)
    with stream.capture() as graph:
        one(x, IDS)
    replay(graph)
    other(torch.ones(1))
    x[1] = NAN
    replay(graph)
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            other(torch.ones(1))
        except og.GuardError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert errors == []
    with pytest.raises(og.GuardError, match=r"x\[1\] = nan"):
        other(torch.ones(1))
    other(torch.ones(1))


def test_what_nobody_is_told_of_does_not_pile_up(stream: Stream) -> None:
    """The thread that captured is gone, as one that warms a server up; another replays, and calls guards."""
    one, x, graphs = guarded(), torch.ones(4), []
    one(x, IDS)

    def warm_up() -> None:
        with stream.capture() as graph:
            one(x, IDS)
        graphs.append(graph)

    thread = threading.Thread(target=warm_up)
    thread.start()
    thread.join()
    x[1] = NAN
    for _ in range(3):
        replay(graphs[0])
        one(torch.ones(4), IDS)
        x[2] = NAN
    with pytest.raises(og.GuardError) as raised:
        og.flush()
    (violation,) = raised.value.violations
    assert violation.observed == "x[1] = nan (of 4, 1 element is wrong)"
    assert violation.told_late.replayed == late_rules.Replayed(1, 3, 3, protects=False)
    replay(graphs[0])
    with pytest.raises(og.GuardError, match=r"x\[1\] = nan \(of 4, 2 elements.*\n.*at replay 4, of 4 so far"):
        og.flush()


def test_nothing_is_told_while_a_graph_is_captured(stream: Stream) -> None:
    one, x = guarded(), torch.ones(4)
    one(torch.full((4,), NAN), IDS)
    with stream.capture() as graph:
        one(x, IDS)  # an error here would end the capture
        one(x, IDS)
    assert len(graph) == 2
    with pytest.raises(og.GuardError, match="call 1 of this operator"):
        one(x, IDS)


def test_an_exception_after_a_replay_gets_a_note(stream: Stream) -> None:
    one, x = guarded(), torch.ones(4)
    one(x, IDS)
    with stream.capture() as graph:
        one(x, IDS)
    x[1] = NAN
    with pytest.raises(ZeroDivisionError) as raised, og.watch():
        replay(graph)
        raise ZeroDivisionError
    assert "x[1] = nan" in raised.value.__notes__[0] and "broken at replay 1" in raised.value.__notes__[0]


def test_the_kill_switch_and_policies_hold(stream: Stream) -> None:
    one, x = guarded(), torch.ones(4)
    one(x, IDS)
    with og.policy(B="record,async"), stream.capture() as graph:
        one(x, IDS)
    with og.policy(B="off"), stream.capture() as none:
        one(x, IDS)
    assert none == []
    x[1] = NAN
    replay(graph)
    og.flush()
    assert [v.rule_id for v in og.record.violations] == ["finite_x"]
    replay(graph)
    og.disable()
    og.flush()
    assert og.postmortem() == ""
    og.enable()
    assert og.record.total == 1


# ---------------------------------------------------------------- what is kept, and what cannot be


def test_nothing_is_made_while_a_graph_is_captured(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(late, "_Device", made.append)
    one = guarded()
    with stream.capture() as graph:
        one(torch.ones(4), IDS)
    assert graph == made == []
    assert list(og.record.values_late.values()) == [(0, 1)]


def test_places_that_run_out(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "BLOCK", 5)
    monkeypatch.setattr(places, "MOST", 10)
    one, x = guarded(), torch.ones(4)
    one(x, IDS)
    with stream.capture() as graph:
        for _ in range(6):
            one(x, IDS)
    assert len(graph) == 4
    one(x, IDS)  # makes room
    with stream.capture() as more:
        for _ in range(6):
            one(x, IDS)
    one(x, IDS)
    with stream.capture() as none:
        one(x, IDS)
    assert len(more) == 4 and none == []
    x[0] = NAN
    replay(more)
    with pytest.raises(og.GuardError) as raised:
        og.flush()
    assert len(raised.value.violations) == 4
    assert next(iter(og.record.values_late.values())) == (3 + 4, 2 + 2 + 1)


def test_nothing_holds_a_tensor(stream: Stream) -> None:
    one, x = guarded(), torch.ones(4)
    one(x, IDS)
    with stream.capture() as graph:
        one(x, IDS)
    gone = weakref.ref(x)
    graph.clear()
    del x
    assert gone() is None


def test_a_rule_that_no_device_can_be_asked_is_counted(stream: Stream) -> None:
    one = guarded("require(finite(x))", lambda x: x)
    one(torch.ones(2))
    with stream.capture() as graph:
        one(torch.ones(2, dtype=torch.complex64))
    assert graph == []
    og.flush()
    assert list(og.record.values_late.values()) == [(1, 1)]


@pytest.mark.parametrize("wrap", [torch.inference_mode, torch.no_grad])
def test_memory_outlives_inference_mode(stream: Stream, wrap: Any) -> None:
    one, x = guarded(), torch.ones(4)
    with wrap():
        one(x, IDS)
        with stream.capture() as graph:
            one(x, IDS)
    replay(graph)
    x[0] = NAN
    with wrap():
        replay(graph)
    with pytest.raises(og.GuardError, match="broken at replay 2, of 2"):
        og.flush()


def test_memory_is_not_that_of_a_mode_that_is_on() -> None:
    with torch.inference_mode(), torch.device("meta"):
        made = ring.Ring(CPU, slots=2)
    assert {x.device.type for x in (made.memory, made.scratch)} == {"cpu"}
    assert not made.memory.is_inference() and not made.scratch.is_inference()


# ---------------------------------------------------------------- compiled


def test_compiled_programs_in_a_graph(stream: Stream) -> None:
    """As `mode="reduce-overhead"` does: a run that warms up, one that is captured, then replays."""
    torch._dynamo.reset()
    program, x, ids = torch.compile(guarded(), fullgraph=True, backend="eager"), torch.ones(4), torch.tensor([0, 1])
    program(x, ids)
    with stream.capture() as graph:
        program(x, ids)
    assert len(graph) == 2, "each rule is a call of the operator"
    replay(graph)
    og.flush()
    x[1], ids[1] = NAN, 7
    replay(graph, 2)
    with pytest.raises(og.GuardError) as raised:
        og.flush()
    found = {v.rule_id: v.told_late.replayed for v in raised.value.violations if v.told_late}
    assert found == {
        "finite_x": late_rules.Replayed(2, 2, 3, protects=False),
        "ids_in_x": late_rules.Replayed(2, 2, 3, protects=True),
    }


# ---------------------------------------------------------------- both ways of asking

Ask = Callable[[list[Probe], bool], Place]


def asked_by_torch(monkeypatch: pytest.MonkeyPatch) -> tuple[Places, Ask, Callable[[], None]]:
    graph: Graph = []
    made = Places(CPU)

    def ask(probes: list[Probe], _: bool) -> Place:
        answers, slot = made.free() or pytest.fail("no place")
        graph.append(lambda: by_torch.send(answers.memory, slot, ring.AT_EACH_REPLAY, probes))
        place = Place(None, 0, answers, slot, list(range(len(probes))), [ring.look_of(p.tensor) for p in probes])  # type: ignore[arg-type]
        made.taken.append(place)
        return place

    return made, ask, lambda: replay(graph)


class Captured:
    """Takes launches down; a replay launches with what was given then, as a graph does."""

    def __init__(self, launch: Any, graph: Graph) -> None:
        self._launch, self._graph = launch, graph

    def __getitem__(self, grid: Any) -> Any:
        return lambda *given, **options: self._graph.append(lambda: self._launch[grid](*given, **options))


def asked_by_triton(monkeypatch: pytest.MonkeyPatch) -> tuple[Places, Ask, Callable[[], None]]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter of Triton is not on: make triton")
    kernel = pytest.importorskip("llm_op_guard.values.kernel")
    monkeypatch.setattr(kernel, "TILE", 64)
    made, launcher, graph = Places(CPU), kernel.Launcher(CPU), []
    launcher._most = 2
    launch = kernel.probe

    def ask(probes: list[Probe], prepared: bool) -> Place:
        if prepared:
            assert launcher.ask(ring.Ring(CPU, slots=2), 1, 1, probes) is not None
        answers, slot = made.free() or pytest.fail("no place")
        monkeypatch.setattr(kernel, "probe", Captured(launch, graph))
        sent = launcher.ask(answers, slot, ring.AT_EACH_REPLAY, probes, captured=True)
        monkeypatch.setattr(kernel, "probe", launch)
        assert sent is not None
        place = Place(None, 0, answers, slot, *sent)  # type: ignore[arg-type]
        made.taken.append(place)
        return place

    return made, ask, lambda: replay(graph)


@pytest.mark.parametrize("asked_by", [asked_by_torch, asked_by_triton])
def test_replays_are_counted_and_the_first_that_broke_is_kept(
    asked_by: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, ask, run = asked_by(monkeypatch)
    x, ids = torch.ones(150), torch.zeros(70, dtype=torch.int64)
    place = ask([Probe(x, None), Probe(ids, Range(0, 9)), Probe(x, Range(0, 5))], True)
    other = ask([Probe(ids, Range(0, 9))], True)
    assert (place.replays(), made.found(take=True)) == (0, [])
    run()
    run()
    assert (place.replays(), other.replays(), made.found(take=True)) == (2, 2, [])
    x[140], x[149] = NAN, 6
    run()
    assert made.has_more()
    x[0], ids[3] = NAN, 9 + 1
    run()
    (found_at, verdicts, replayed), (at_other, of_other, _) = made.found(take=False)
    assert (found_at, at_other) == (place, other)
    assert [(v.count, v.index) for v in verdicts] == [(1, (140,)), (0, ()), (2, (140,))]
    assert [(v.count, v.index, v.value) for v in of_other] == [(1, (3,), 10)]
    assert replayed == Replay(3, 2, 4)
    assert len(made.found(take=True)) == 2
    x.fill_(1)
    ids.fill_(0)
    assert made.found(take=True) == []
    run()
    assert (place.replays(), made.found(take=True)) == (3, [])
    ids[69] = -1
    run()
    assert made.has_more()
    (_, verdicts, replayed), _ = made.found(take=True)
    assert [(v.count, v.index, v.value) for v in verdicts] == [(0, (), 0), (1, (69,), -1), (0, (), 0)]
    assert replayed == Replay(6, 1, 6)


def test_a_guard_in_a_graph_asks_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_by_triton(monkeypatch)
    from llm_op_guard.values import kernel

    launcher, launch = late._launcher, kernel.probe
    stream = stand_in(monkeypatch)
    monkeypatch.setattr(late, "_launcher", launcher)
    monkeypatch.setattr(by_torch, "send", None)
    og.set_policy(B="async")
    one, x, ids = guarded(), torch.ones(4), torch.tensor([0, 1])
    one(x, ids)
    with stream.capture() as graph:
        monkeypatch.setattr(kernel, "probe", Captured(launch, graph))
        one(x, ids)
    assert len(graph) == 1
    replay(graph)
    og.flush()
    x[1], ids[0] = NAN, 4
    replay(graph, 2)
    with pytest.raises(og.GuardError) as raised:
        og.flush()
    found = {v.observed: v.told_late.replayed for v in raised.value.violations if v.told_late}
    assert found == {
        "x[1] = nan (of 4, 1 element is wrong)": late_rules.Replayed(2, 2, 3, protects=False),
        "ids[0] = 4 (of 2, 1 element is wrong)": late_rules.Replayed(2, 2, 3, protects=True),
    }


def test_into_a_graph_goes_no_kernel_that_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_by_triton(monkeypatch)
    from llm_op_guard.values import kernel

    launcher, made = kernel.Launcher(CPU), Places(CPU)
    answers, slot = made.free() or pytest.fail("no place")
    probes = [Probe(torch.ones(3), None)]
    assert launcher.ask(answers, slot, ring.AT_EACH_REPLAY, probes, captured=True) is None
    assert answers.word(slot, ring.REPLAYS_AT) == 0
    assert launcher.ask(ring.Ring(CPU, slots=2), 1, 1, probes) is not None
    assert launcher.ask(answers, slot, ring.AT_EACH_REPLAY, probes, captured=True) is not None
    assert answers.word(slot, ring.REPLAYS_AT) == 1


def test_what_waits_in_the_call_is_made_ready_for_a_graph(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[list[torch.dtype]] = []
    monkeypatch.setattr(
        late.queue, "prepare", lambda _, probes: prepared.append([probe.tensor.dtype for probe in probes])
    )
    ids_first = CONTRACT.replace('require(finite(x), id="finite_x")\n', "") + "require(finite(x))"
    for contract in (CONTRACT, ids_first):
        one = guarded(contract)
        for dtype in (torch.float32, torch.float64) * 2:
            one(torch.ones(4, dtype=dtype), IDS)
        asked = [{torch.float32, torch.int64}, {torch.float64, torch.int64}]
        assert list(map(set, prepared)) == asked, (
            "all that the call would ask in a graph, once for each choice of dtypes"
        )
        prepared.clear()


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="a test before used the device")
def test_asking_whether_a_graph_is_captured_starts_no_device() -> None:
    assert not readable.is_capturing() and not readable.is_captured(torch.ones(1))
    assert not torch.cuda.is_initialized()
