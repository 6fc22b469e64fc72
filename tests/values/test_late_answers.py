"""Answers of devices, by torch and by Triton, against a reference in plain Python.

Triton is tried in its interpreter: `make triton`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
import torch
from late_verdicts import DTYPES, NAN, RANGES, questions, reference, same, tensors

import llm_op_guard as og
from llm_op_guard.guard import late
from llm_op_guard.guard.late import MOST_PROBES, Probe, Range, Verdict
from llm_op_guard.values import by_torch, ring

Ask = Callable[[Sequence[Probe]], list[Verdict] | None]
CPU = torch.device("cpu")


def asked_by_torch() -> Ask:
    memory = ring.Ring(CPU, slots=2)

    def ask(probes: Sequence[Probe]) -> list[Verdict]:
        by_torch.send(memory.memory, 1, 7, probes)
        assert memory.has(1, 7)
        answers = memory.answers(1, range(len(probes)))
        return [ring.look_of(p.tensor).verdict(*answer) for p, answer in zip(probes, answers, strict=True)]

    return ask


def asked_by_triton(monkeypatch: pytest.MonkeyPatch) -> Ask:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter of Triton is not on: make triton")
    kernel = pytest.importorskip("llm_op_guard.values.kernel")
    monkeypatch.setattr(kernel, "TILE", 64)
    memory, launcher = ring.Ring(CPU, slots=2), kernel.Launcher(CPU)
    launcher._most = 3  # programs for one tensor
    calls = iter(range(1, 10**6))

    def ask(probes: Sequence[Probe]) -> list[Verdict] | None:
        number = next(calls)
        slot = number % 2
        assert not memory.has(slot, number)
        sent = launcher.ask(memory, slot, number, probes)
        if sent is None:
            return None
        assert memory.has(slot, number), "the number of the call is written last"
        wanted, looks = sent
        return [look.verdict(*answer) for look, answer in zip(looks, memory.answers(slot, wanted), strict=True)]

    return ask


@pytest.fixture(params=["torch", "triton"])
def ask(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ask:
    return asked_by_torch() if request.param == "torch" else asked_by_triton(monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_as_the_reference(ask: Ask, dtype: str) -> None:
    answered = 0
    for x in tensors(dtype):
        probes = questions(x)
        for start in range(0, len(probes), 6):
            group = probes[start : start + 6]
            found = ask(group)
            if found is None:  # of whole numbers, a range without any
                found = [verdict for probe in group for verdict in ask([probe]) or [reference(x, probe.range)]]
            for probe, verdict in zip(group, found, strict=True):
                assert same(verdict, reference(x, probe.range)), (x.shape, probe.range, verdict)
                answered += 1
    assert answered > 50


def test_bytes_that_stand_for_true(ask: Ask) -> None:
    x = torch.tensor([0, 255, 9, 1], dtype=torch.uint8).view(torch.bool)
    for asked, wrong in (
        (Range(0, 1), Verdict(0)),
        (Range(0, 2, high_open=True), Verdict(0)),
        (Range(0, 0), Verdict(3, (1,), True)),
        (Range(1, 1), Verdict(1, (0,), False)),
    ):
        assert ask([Probe(x, asked)]) == [wrong]


def test_torch_answers_what_triton_cannot_read() -> None:
    ask = asked_by_torch()
    whole = torch.tensor([0, 5, 2**62]).view(torch.uint64)
    large = torch.tensor([2**63 + 5 - 2**64, 1]).view(torch.uint64)
    for x in (whole, large):
        for asked in (Range(0, 6), Range(2**63, 2**64 - 1), Range(0, 2, allow=(2**63 + 5,)), None):
            (found,) = ask([Probe(x, asked)])  # type: ignore[misc]
            assert same(found, reference(x, asked))
    negative = torch.view_as_complex(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).conj().imag
    assert negative.is_neg(), "the sign is not in memory"
    (found,) = ask([Probe(negative, Range(-3, 0))])  # type: ignore[misc]
    assert same(found, Verdict(1, (1,), -4.0))
    x = torch.arange(60.0).reshape(6, 10)[:, ::3]
    (found,) = ask([Probe(x, Range(0, 20))])  # type: ignore[misc]
    assert same(found, reference(x, Range(0, 20))) and found.count == 15
    assert ring.dense(x) is None


def test_several_tensors_in_one_launch(ask: Ask) -> None:
    x, y = torch.zeros(200), torch.zeros(3, 70, dtype=torch.int64)
    z = torch.full((4,), 2.0, dtype=torch.bfloat16)
    x[150], y[2, 5], y[2, 6] = NAN, 9, -100
    allowed = Range(0, 9, high_open=True, allow=(-100,))
    probes = [Probe(x, None), Probe(y, allowed), Probe(z, Range(0, 1)), Probe(x, Range(1, 2)), Probe(x, Range(0, 0))]
    found = ask(probes)
    assert found is not None
    for probe, verdict in zip(probes, found, strict=True):
        assert same(verdict, reference(probe.tensor, probe.range)), probe.range
    # A slot is used again and again.
    assert ask([Probe(z, None)] * 2) == [Verdict(0), Verdict(0)]
    assert ask([Probe(z, Range(0, 1))] * MOST_PROBES) == [Verdict(4, (0,), 2.0)] * MOST_PROBES


def test_views_that_are_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = asked_by_triton(monkeypatch)
    x = torch.zeros(5, 7, 30)
    x[1, 2, 3] = x[4, 0, 1] = NAN
    turned = x.permute(2, 0, 1)
    (found,) = ask([Probe(turned, None)])  # type: ignore[misc]
    assert (found.count, found.index, found.in_memory) == (2, (3, 1, 2), True)
    wide = x[1:2].expand(4, 7, 30)
    (found,) = ask([Probe(wide, None)])  # type: ignore[misc]
    assert (found.count, found.index, found.in_memory) == (4, (0, 2, 3), False)
    assert ask([Probe(x[:, :, ::2], None)]) is None, "it has gaps"
    assert ask([Probe(x, Range(0, 1, allow=(7, 8, 9)))]) is None, "a row holds two sentinels"
    assert ask([Probe(torch.view_as_complex(torch.zeros(3, 2)).conj().imag, None)]) is None, "the sign is not in memory"


def test_questions_in_words() -> None:
    assert ring.question(Range(5, 5, low_open=True), torch.int64) is None, "nothing is in it"
    assert ring.question(Range(0, 10, high_open=True), torch.int32) == (0, 9, 0, 0)
    assert ring.question(Range(-0.5, 2.5), torch.int8) == (0, 2, 0, 0)
    assert ring.question(Range(0, 1, allow=(-100, 0.5)), torch.int64) == (0, 1, -100, 0)
    for asked in RANGES:
        for dtype in (torch.float32, torch.bfloat16):
            words = ring.question(asked, dtype)
            assert words is not None
            for word in words[:2]:
                number = torch.tensor([word]).view(torch.float64).item()
                assert number == torch.tensor(number, dtype=torch.float32).item(), "bounds are numbers of float32"


def test_a_guard_asks_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_by_triton(monkeypatch)
    monkeypatch.setattr(late, "DEVICES", {"cpu"})
    monkeypatch.setattr(by_torch, "send", None)
    guarded = og.guard("x: floating[L, _]\nrequire(finite(x))\nrequire(absmax(x) < L, id='small')")(lambda x: x)
    x = torch.ones(5, 70, dtype=torch.bfloat16)
    x[3, 60] = 7
    with og.policy(B="async"):
        guarded(torch.ones(5, 70))
        guarded(x)
        with pytest.raises(og.GuardError) as raised:
            og.flush()
    assert [v.observed for v in raised.value.violations] == ["x[3, 60] = 7.0 (of 350, 1 element is wrong)"]
