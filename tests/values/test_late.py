"""Verdicts that are not waited for: when they are told, of which call, and what becomes of those that are not.

The processor stands in for a device, and `Stream` for its stream: work is done when a test says so.
"""

from __future__ import annotations

import gc
import linecache
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

import llm_op_guard as og
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.guard import late as late_rules
from llm_op_guard.guard.late import late_rule
from llm_op_guard.report.text import place
from llm_op_guard.values import by_torch, late, ring

NAN = float("nan")
CONTRACT = """
x: floating[L]
ids: int64[_]
require(finite(x), id="finite_x")
require(within(ids, 0, L), id="ids_in_x")
ensure(finite(result), id="finite_result")
"""


def scaled(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x * float(len(ids))


class Stream:
    """Work that has been given to a device and is not done."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def send(self, *arguments: Any) -> None:
        self.work.append(lambda: ANSWER(*arguments))

    def run(self, steps: int = 10**6) -> None:
        for _ in range(min(steps, len(self.work))):
            self.work.pop(0)()


ANSWER = by_torch.send


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_rules, "DEVICES", {"cpu"})
    monkeypatch.setattr(late, "_launcher", lambda _: None)
    late_rules.calls.begun = 0


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()
    monkeypatch.setattr(by_torch, "send", made.send)
    monkeypatch.setattr(late._Device, "wait", lambda _: made.run())
    return made


def guarded(contract: str = CONTRACT, function: Any = scaled) -> Any:
    return og.guard(contract)(function)


def bad(length: int = 4) -> torch.Tensor:
    x = torch.ones(length)
    x[-2:] = NAN
    return x


IDS = torch.tensor([0, 1])


# ---------------------------------------------------------------- which rules


@pytest.mark.parametrize(
    ("rule", "is_late"),  # None: in a graph only
    [
        ("require(finite(x))", True),
        ("require(finite(x) and lowest(x) > 0)", True),
        ("require(0 < lowest(x))", True),
        ("require(highest(x) <= 2 * n)", True),
        ("require(absmax(x) < x.shape[0])", True),
        ("require(within(x, -1, n, allow=-100))", True),
        ("require(within(x=x, high=n, low=0, allow=(7, 8)))", True),
        ("require(lowest(x) < 0)", False),
        ("require(highest(x) > 0)", False),
        ("require(0 > lowest(x))", False),
        ("require(lowest(x) == 0)", False),
        ("require(0 < lowest(x) < 1)", False),
        ("require(highest(x) < highest(y))", False),
        ("require(finite(x) or n > 3)", False),
        ("require(finite(x) and n > 3)", False),
        ("require(finite(x[:, :1]))", False),
        ("require(finite(x[0]))", False),
        ("require(finite(y[n]))", False),
        ("require(finite(y.weight))", True),
        ("require(all_true(x))", False),
        ("require(nondecreasing(x))", False),
        ("require(within(ids, 0, n))", None),
        ("require(within(y, 0, n), error=IndexError)", None),
        ("require(unique(ids))", False),
        ("require(all(finite(z) for z in y))", False),
        ("require(n > 3)", False),
    ],
)
def test_which_rules_need_not_be_waited_for(rule: str, is_late: bool | None) -> None:
    contract = parse_body(f"x: any[_, _]\nids: int64[_]\nn: int\n{rule}", "f", ("x", "ids", "n", "y"))
    found = late_rule(contract.clauses[-1], contract)
    assert (found is not None, found is not None and found.protects) == (is_late is not False, is_late is None)


@pytest.mark.parametrize(
    "rule",
    [
        "lowest(x) > 0",
        "highest(x) <= 4",
        "absmax(x) < 3",
        "absmax(x) <= 3",
        "1 >= absmax(x)",
        "within(x, 0, 4, allow=-7)",
        "finite(x) and lowest(x) >= -2.5",
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_they_mean_what_they_mean_in_the_call(rule: str, dtype: str) -> None:
    once = guarded(f"x: any[_]\nrequire({rule})", lambda x: None)
    numbers = [-7.0, -3.0, -2.5, -2.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, NAN, float("inf")]
    cases = [torch.tensor([1.0, n, 1.0]) for n in numbers] + [torch.ones(0)]
    for x in cases:
        if dtype == "int32" and not x.isfinite().all():
            continue
        told = []
        for time in ("sync", "async"):
            with og.policy(B=time):
                try:
                    once(x.to(getattr(torch, dtype)))
                    og.flush()
                    told.append(False)
                except og.GuardError:
                    told.append(True)
        assert told[0] == told[1], x


# ---------------------------------------------------------------- when they are told


def test_told_at_the_next_call_of_a_guard_and_of_which_it_was(stream: Stream) -> None:
    og.set_policy(B="async")
    one, other = guarded(), guarded("x: floating[_]\nrequire(absmax(x) < 5, id='small')", lambda x: x)
    one(torch.ones(4), IDS)
    assert one(bad(), IDS).isnan().any(), "the call went through"
    stream.run(1)
    other(torch.ones(2))  # the answers are not there yet
    other(torch.ones(2))
    stream.run()
    with pytest.raises(og.GuardError) as raised:
        other(torch.full((3,), 9.0))
    (violation,) = raised.value.violations
    assert (violation.rule_id, violation.operator) == ("finite_x", "scaled")
    assert violation.call_site is not None
    assert "one(bad(), IDS)" in linecache.getline(__file__, violation.call_site.line)
    assert str(raised.value) == (
        f"scaled: x[2] = nan (of 4, 2 elements are wrong, this one first), expected finite values\n"
        f"  call 2 of this operator; told 3 guarded calls later\n"
        f"\n"
        f"  x            float32[4] cpu   <- here\n"
        f"  called from  {place(violation.call_site)}\n"
        f"  rule         finite_x (class B, certain)\n"
        f"  contract     {violation.contract_id} {violation.contract_hash}"
    )
    assert violation.to_dict()["told_late"] == {"call": 2, "calls_later": 3, "replayed": None}
    with pytest.raises(og.GuardError, match="finite values") as raised:
        og.flush()  # the result of the same call
    assert raised.value.violations[0].blames == "operator"
    og.flush()


def test_flush_waits_and_tells_all_at_once(stream: Stream) -> None:
    og.set_policy(B="async")
    small = guarded("x: floating[_]\nrequire(finite(x))\nrequire(absmax(x) < 5, id='small')", lambda x: x)
    for x in (torch.full((3,), 9.0), torch.ones(3), torch.full((2,), 7.0)):
        small(x)
    with pytest.raises(og.GuardError) as raised:
        og.flush()
    assert [v.rule_id for v in raised.value.violations] == ["small", "small"]
    assert [v.told_late.call for v in raised.value.violations if v.told_late] == [1, 3]
    assert "x[0] = 9.0 (of 3, 3 elements are wrong, this one first), expected absmax(x) < 5" in str(raised.value)
    og.flush()
    assert list(og.record.values_late.values()) == [(3, 0)]


def test_the_policy_of_the_call_decides(stream: Stream) -> None:
    small = guarded("x: floating[_]\nrequire(absmax(x) < 5, id='small')", lambda x: x)
    with og.policy(B="warn,async"):
        small(torch.full((3,), 9.0))
    with og.policy(B="record,async"):
        small(torch.full((3,), 8.0))
    with pytest.warns(og.GuardWarning, match=r"x\[0\] = 9.0"):
        og.flush()
    assert [v.observed[:8] for v in og.record.violations] == ["x[0] = 9", "x[0] = 8"]
    with og.policy(B="async"):
        small(torch.full((3,), 9.0))
    og.disable()
    og.flush()
    og.enable()
    assert og.record.total == 2, "the kill switch holds for what is under way"


def test_a_warning_that_is_an_error_takes_no_other_verdict_away(stream: Stream) -> None:
    og.set_policy(B="warn,async")
    for name in "abc":
        guarded(f"x: floating[_]\nrequire(absmax(x) < 5, id={name!r})", lambda x: x)(torch.full((3,), 9.0))
    with warnings.catch_warnings(), pytest.raises(og.GuardWarning, match=r"rule +a"):
        warnings.simplefilter("error")
        og.flush()
    assert [v.rule_id for v in og.record.violations] == ["a", "b", "c"]
    guarded("x: floating[_]\nrequire(absmax(x) < 5, id='d')", lambda x: x)(torch.full((3,), 9.0))
    with og.policy(B="async"):
        guarded("x: floating[_]\nrequire(absmax(x) < 5, id='e')", lambda x: x)(torch.full((3,), 9.0))
    with warnings.catch_warnings(), pytest.raises(og.GuardError, match=r"rule +e"):
        warnings.simplefilter("error")
        og.flush()


def test_a_flush_between_two_verdicts_of_a_call_tells_each_once(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    og.set_policy(B="record,async")
    small = guarded("x: floating[_]\nrequire(absmax(x) < 5, id='small')", lambda x: x)
    for number in (7.0, 8.0, 9.0):
        small(torch.full((3,), number))
    stream.run()
    act, acted = late._act, []

    def act_and_flush(waiting: Any) -> Any:
        acted.append(waiting)
        if len(acted) == 1:  # as another thread may, since nothing is locked here
            og.flush()
        return act(waiting)

    monkeypatch.setattr(late, "_act", act_and_flush)
    small(torch.ones(1))
    assert sorted(v.observed[:8] for v in og.record.violations) == ["x[0] = 7", "x[0] = 8", "x[0] = 9"]


def test_suspect_rules_warn_and_waivers_hold(stream: Stream) -> None:
    odd = guarded("x: floating[_]\nrequire(absmax(x) < 5, certain=False, id='odd')", lambda x: x)
    og.set_policy(B="async")
    odd(torch.full((3,), 9.0))
    with pytest.warns(og.GuardWarning, match="told 0 guarded calls later"):
        og.flush()
    small = guarded("x: floating[_]\nrequire(absmax(x) < 5, id='small')", lambda x: x)
    small(torch.full((3,), 9.0))
    with pytest.raises(og.GuardError) as raised:
        og.flush()
    with og.waive("small", site=raised.value.violations[0].site, reason="known"):
        small(torch.full((3,), 9.0))
        og.flush()
    assert og.record.violations[-1].waived == "known"


def test_what_protects_a_memory_access_is_judged_in_the_call(stream: Stream) -> None:
    og.set_policy(B="async")
    one = guarded()
    with pytest.raises(og.GuardError) as raised:
        one(bad(), torch.tensor([9]))
    assert [v.rule_id for v in raised.value.violations] == ["finite_x", "ids_in_x"], "a stopped call is told in full"
    assert raised.value.violations[0].told_late is None
    assert stream.work == []


def test_sync_where_the_policy_says_so(stream: Stream) -> None:
    one = guarded()
    og.set_policy(B="raise,sync")
    with pytest.raises(og.GuardError):
        one(bad(), IDS)
    og.set_policy(B="async")
    with og.policy(B="sync"), pytest.raises(og.GuardError):
        one(bad(), IDS)
    with og.policy(B="off"):
        one(bad(), IDS)
    assert stream.work == []


def test_without_a_time_it_is_async_where_torch_has_devices(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    site = sys.modules["llm_op_guard.install.site"]
    monkeypatch.setattr(site, "has_devices", lambda: False)
    with pytest.raises(og.GuardError):
        guarded()(bad(), IDS)
    monkeypatch.setattr(site, "has_devices", lambda: True)
    guarded()(bad(), IDS)
    assert len(stream.work) == 2, "one for the arguments, one for the result"


def test_async_on_the_processor_is_sync(monkeypatch: pytest.MonkeyPatch, stream: Stream) -> None:
    monkeypatch.setattr(late_rules, "DEVICES", {"cuda"})
    og.set_policy(B="async")
    with pytest.raises(og.GuardError) as raised:
        guarded()(bad(), IDS)
    assert raised.value.violations[0].told_late is None and stream.work == []


def test_a_pace_holds_as_well(stream: Stream) -> None:
    small = guarded("x: floating[_]\nrequire(absmax(x) < 5, id='small')", lambda x: x)
    with og.policy(B="async,every=3"):
        for _ in range(6):
            small(torch.ones(2))
    assert len(stream.work) == 2
    assert list(og.record.values_judged.values()) == [(2, 4)]


def test_while_tensors_are_tracked_values_are_judged_in_the_call(stream: Stream) -> None:
    og.set_policy(B="async")
    og.track()
    with pytest.raises(og.GuardError):
        guarded()(bad(), IDS)


def test_what_cannot_be_asked_so_is_judged_in_the_call(stream: Stream) -> None:
    og.set_policy(B="async")
    any_of = guarded("require(finite(x))", lambda x: x)
    with pytest.raises(og.GuardError):
        any_of(torch.full((2,), NAN, dtype=torch.complex64))
    any_of(None)
    any_of("no tensor")
    many = guarded("\n".join(f"require(absmax(x) < {n}, id='below_{n}')" for n in range(20, 31)), lambda x: x)
    with pytest.raises(og.GuardError):
        many(torch.full((2,), 50.0))
    many(torch.full((2,), 1.0))
    assert len(stream.work) == 1


# ---------------------------------------------------------------- what is kept


def test_a_full_ring_lets_calls_go_and_counts_them(stream: Stream) -> None:
    og.set_policy(B="async")
    small = guarded("x: floating[_]\nrequire(absmax(x) < 5, id='small')", lambda x: x)
    slots = late.ring.SLOTS
    for number in range(slots + 5):
        small(torch.full((1,), 9.0 if number in (0, slots + 2) else 1.0))
    assert len(stream.work) == slots
    assert list(og.record.values_late.values()) == [(0, 5)]
    with pytest.raises(og.GuardError) as raised:
        og.flush()
    assert len(raised.value.violations) == 1
    assert list(og.record.values_late.values()) == [(slots, 5)]
    for _ in range(2 * slots):  # answered ones make room, told or not
        small(torch.ones(1))
        stream.run()
    assert next(iter(og.record.values_late.values()))[1] == 5


def test_nothing_holds_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_rules.LateRules, "told", lambda _: None)
    og.set_policy(B="async")
    one = guarded()
    x = bad()
    gone = weakref.ref(x)
    one(x, IDS)
    del x
    gc.collect()
    assert gone() is None
    with pytest.raises(og.GuardError, match=r"x\[2\] = nan \(of 4, 2 elements are wrong"):
        og.flush()


def test_calls_are_counted_whoever_checks_them(stream: Stream) -> None:
    """A native program accepts the first ones, and cannot tell of int8."""
    og.set_policy(B="async")
    body = "x: any[D]\ny: any[D]\nz: any[D]\nrequire(absmax(y) < 5, id='small')"
    one = guarded(body, lambda x, y, z: x)
    x = torch.ones(2)
    for _ in range(4):
        one(x, x, x)
    one(x.to(torch.int8), x * 9, x)
    with pytest.raises(og.GuardError, match="call 5 of this operator"):
        og.flush()


def test_each_thread_is_told_of_its_own_calls(stream: Stream) -> None:
    og.set_policy(B="async")
    one = guarded()
    thread = threading.Thread(target=lambda: one(bad(), IDS))
    thread.start()
    thread.join()
    stream.run()
    one(torch.ones(2), IDS)
    one(torch.ones(2), IDS)
    with pytest.raises(og.GuardError, match="call 1 of this operator"):
        og.flush()


def test_gradients_and_results_are_the_same(stream: Stream) -> None:
    x = torch.randn(5, requires_grad=True)
    plain_gradient = torch.autograd.grad(scaled(x, IDS).sum(), x)[0]
    og.set_policy(B="async")
    result = guarded()(x, IDS)
    stream.run()
    assert torch.equal(torch.autograd.grad(result.sum(), x)[0], plain_gradient)
    og.flush()


@pytest.mark.parametrize("wrap", [torch.inference_mode, torch.no_grad])
def test_buffers_outlive_inference_mode(wrap: Any) -> None:
    og.set_policy(B="async")
    one = guarded()
    with wrap():
        one(torch.ones(3), IDS)
    one(torch.ones(3), IDS)
    with wrap(), pytest.raises(og.GuardError):
        one(bad(), IDS)
        og.flush()


def test_modes_of_torch_neither_see_nor_change_what_is_asked_and_told() -> None:
    og.set_policy(B="async")
    small = guarded("x: floating[_]\nrequire(absmax(x) < 5, id='small')", lambda x: x)
    seen: set[str] = set()

    class Watching(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(function.__name__)
            return function(*args, **(kwargs or {}))

    x = torch.full((3,), 9.0)
    with Watching():
        small(x)
    assert not seen & {"copy_", "stack", "full", "zeros", "to", "sum", "reshape"}
    for mode in (FakeTensorMode(), torch.device("meta")):
        with mode, pytest.raises(og.GuardError, match=r"x\[0\] = 9.0"):
            small(x)
        small(x)


def test_a_fault_of_ours_in_telling_is_none_of_the_callers(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    og.set_policy(B="async")
    one = guarded()
    one(bad(), IDS)
    stream.run()

    def broken(*_: Any) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(late.ring, "number_of", broken)
    with pytest.warns(og.GuardInternalWarning, match="failed while checking scaled"):
        one(torch.ones(3), IDS)


def test_a_fault_of_ours_is_said_once_and_the_call_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    og.set_policy(B="async")
    one = guarded()

    def broken(*_: Any) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(by_torch, "send", broken)
    with pytest.warns(og.GuardInternalWarning, match="failed while checking scaled"):
        one(torch.ones(3), IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one(torch.ones(3), IDS)


def test_torch_stands_in_for_a_triton_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fails(*_: Any, **__: Any) -> None:
        tried.append(1)
        raise RuntimeError("ptxas is missing")

    monkeypatch.setattr(late, "_launcher", lambda _: fails)
    og.set_policy(B="async")
    one = guarded()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one(torch.ones(3), IDS)
        with pytest.raises(og.GuardError, match="finite values"):
            one(bad(), IDS)
            og.flush()
    assert len(tried) == 1


def test_a_device_that_is_lost_is_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    og.set_policy(B="async")
    one = guarded()

    def lost(*_: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    asked_before = guarded("x: floating[_]\nrequire(finite(x))", lambda x: x)
    asked_before(bad())
    monkeypatch.setattr(by_torch, "send", lost)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lost)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(og.GuardError, match="finite values"):
            asked_before(torch.ones(3))
        one(torch.ones(3), IDS)
    assert list(og.record.values_late.values()) == [(1, 0), (0, 2)], "arguments and result"
    og.flush()


def test_what_is_made_ready_is_written_into_no_slot_that_a_launch_may_still_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots: list[tuple[int, int]] = []

    def launch(answers: ring.Ring, slot: int, _: int, probes: Any, **__: Any) -> Any:
        slots.append((id(answers), slot))  # it is not done
        return list(range(len(probes))), [ring.look_of(probe.tensor) for probe in probes]

    monkeypatch.setattr(late, "_launcher", lambda _: launch)
    og.set_policy(B="async")
    for _ in range(3):  # ids protect a memory access: they are judged in the call, and made ready for a graph
        guarded("ids: int64[_]\nrequire(within(ids, 0, 2))", lambda ids: ids)(IDS)
    assert len(slots) == len(set(slots)) == 3


def test_memory_that_a_launch_may_write_to_is_kept() -> None:
    og.set_policy(B="async")
    guarded()(torch.ones(2), IDS)
    (device,) = late.queue._devices.values()
    memory = weakref.ref(device.ring.memory)
    del device
    late.queue.forget()
    gc.collect()
    assert memory() is not None


FORKING = """
import gc, os, weakref, torch, llm_op_guard as og
from llm_op_guard.guard import late
from llm_op_guard.values.late import queue
late.DEVICES.add("cpu")
og.set_policy(B="async")

@og.guard("x: floating[_]\\nrequire(finite(x))")
def f(x): return x

bad = torch.tensor([float("inf")])
f(bad)
(device,) = queue._devices.values()
memory = weakref.ref(device.ring.memory)
del device
pid = os.fork()
if pid == 0:
    og.flush()  # what the parent asked is the parent's to be told
    gc.collect()
    kept = memory() is not None  # to give it back takes a call of CUDA, which a fork cannot make
    f(bad)
    try:
        og.flush()
    except og.GuardError:
        os._exit(7 if kept else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
try:
    og.flush()
except og.GuardError:
    print("told")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_asks_for_itself_and_gives_no_memory_back() -> None:
    ran = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, check=False)
    assert ran.stdout == "7\ntold\n", ran.stderr


# ---------------------------------------------------------------- when something else raises first


def failing(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("something else")


def test_postmortem_reads_what_was_not_told(stream: Stream) -> None:
    assert og.postmortem() == ""
    og.set_policy(B="async")
    one = guarded()
    one(bad(), IDS)
    assert og.postmortem() == (
        "llm-op-guard had no answer yet about the values of 2 guarded calls, the first of them call 1 of scaled"
    )
    stream.run(1)
    found, silent = og.postmortem().splitlines()[1:]
    assert found.startswith(
        "  scaled: x[2] = nan (of 4, 2 elements are wrong, this one first), expected finite values "
        "(rule finite_x; call 1 of this operator; told 0 guarded calls later; called from "
    )
    assert silent.endswith("of 1 guarded call, the first of them call 1 of scaled")
    stream.run()
    assert len(og.postmortem().splitlines()) == 3
    with pytest.raises(og.GuardError):
        og.flush()
    assert og.postmortem() == ""


def test_an_exception_of_a_guarded_call_gets_a_note(stream: Stream) -> None:
    og.set_policy(B="async")
    one = guarded("x: floating[_]\nrequire(finite(x))", failing)
    with pytest.raises(RuntimeError) as plain:
        one(torch.ones(2))
    assert not hasattr(plain.value, "__notes__"), "a call without an answer says nothing of a ValueError"
    guarded("x: floating[_]\nrequire(absmax(x) < 5, id='small')", lambda x: x)(torch.full((2,), 9.0))
    # Answered, and not told yet: while the guarded function runs.
    late_one = guarded("x: floating[_]\nrequire(finite(x))", lambda x: (stream.run(), failing(x)))
    with pytest.raises(RuntimeError, match=r"^something else") as raised:
        late_one(torch.ones(2))
    (note,) = raised.value.__notes__
    assert note.startswith("llm-op-guard found before this, and had not told yet:\n  <lambda>: x[0] = 9.0 (of 2, 2")


def test_a_lost_device_is_told_of_calls_without_an_answer(stream: Stream) -> None:
    og.set_policy(B="async")

    def lost(x: torch.Tensor) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError) as raised:
        guarded("x: floating[_]\nrequire(finite(x))", lost)(torch.ones(2))
    assert raised.value.__notes__ == [
        "llm-op-guard had no answer yet about the values of 1 guarded call, the first of them call 1 of lost"
    ]


def test_watch_notes_what_a_block_raises(stream: Stream) -> None:
    og.set_policy(B="async")
    small = guarded("x: floating[_]\nrequire(absmax(x) < 5, id='small')", lambda x: x)
    with pytest.raises(ZeroDivisionError) as raised, og.watch():
        small(torch.full((2,), 9.0))
        stream.run()
        raise ZeroDivisionError
    assert "x[0] = 9.0" in raised.value.__notes__[0]
    with pytest.raises(og.GuardError):
        og.flush()
    with pytest.raises(ZeroDivisionError) as raised, og.watch():
        raise ZeroDivisionError
    assert not hasattr(raised.value, "__notes__")


PROGRAM = """
import threading, torch, llm_op_guard as og
from llm_op_guard.guard import late
late.DEVICES.add("cpu")
og.set_policy(B="async")

@og.guard("x: floating[_]\\nrequire(finite(x))")
def f(x): return x

x = torch.ones(3)
x[1] = float("inf")
f(x)
thread = threading.Thread(target=lambda: {}["nobody asked"])
thread.start()
thread.join()
og.watch_uncaught()
og.watch_uncaught()
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise TypeError("at the end")
"""


def test_uncaught_exceptions_where_somebody_asks_and_the_rest_at_exit() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    parts = ran.stderr.split("Traceback (most recent call last):\n")
    note = "llm-op-guard found before this, and had not told yet:\n  f: x[1] = inf (of 3, 1 element is wrong)"
    assert len(parts) == 4
    assert "KeyError: 'nobody asked'" in parts[1] and note not in parts[1]
    assert f"ZeroDivisionError: division by zero\n{note}" in parts[2]
    assert f"TypeError: at the end\n{note}" in parts[3] and parts[3].count(note) == 1
    assert "GuardWarning: found when the process ended\nf: x[1] = inf (of 3, 1 element is wrong)" in parts[3]


# ---------------------------------------------------------------- compiled


def test_compiled_programs_do_not_wait_either(stream: Stream) -> None:
    torch._dynamo.reset()
    og.set_policy(B="async")
    one = guarded()
    program = torch.compile(one, fullgraph=True, backend="eager")
    assert program(bad(), IDS).isnan().sum() == 2, "the program went on"
    assert len(stream.work) == 2
    with pytest.raises(og.GuardError) as raised:
        og.flush()
    assert {v.rule_id for v in raised.value.violations} == {"finite_x", "finite_result"}
    with pytest.raises(og.GuardError, match="ids"):
        program(torch.ones(3), torch.tensor([9]))
    with og.policy(B="sync"), pytest.raises(og.GuardError) as raised:
        program(bad(), IDS)
    assert raised.value.violations[0].told_late is None


def test_a_wrapper_that_notes_breaks_no_graph() -> None:
    torch._dynamo.reset()
    og.set_policy(B="async")
    one = guarded()

    def program(x: torch.Tensor) -> torch.Tensor:
        return one(x, IDS) + 1

    assert torch._dynamo.explain(program)(torch.ones(3)).graph_break_count == 0
