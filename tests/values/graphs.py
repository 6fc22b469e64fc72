"""A stand-in for a stream that can be captured: what is captured is done at each `replay`, on the processor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from llm_op_guard.guard import late as late_rules
from llm_op_guard.guard import readable
from llm_op_guard.values import by_torch, late

Graph = list[Callable[[], None]]
ANSWER = by_torch.send


class Stream:
    """What is asked of the device is done at once, or (captured) at each replay."""

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.asked = 0

    def send(self, memory: torch.Tensor, *arguments: Any) -> None:
        self.asked += 1
        if self.graph is None:
            ANSWER(memory, *arguments)
        else:
            # The operations are asked for while the graph is captured, when nothing can be read, and done later.
            ANSWER(torch.zeros_like(memory), *arguments)
            self.graph.append(lambda: ANSWER(memory, *arguments))

    @contextlib.contextmanager
    def capture(self) -> Iterator[Graph]:
        self.graph = graph = []
        try:
            yield graph
        finally:
            self.graph = None


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The processor as a device, which is asked by torch."""
    made = Stream()
    monkeypatch.setattr(late_rules, "DEVICES", {"cpu"})
    monkeypatch.setattr(late, "_launcher", lambda _: None)
    monkeypatch.setattr(by_torch, "send", made.send)
    for module in (readable, late_rules, late):
        monkeypatch.setattr(module, "is_captured", lambda _: made.graph is not None)
    monkeypatch.setattr(late, "is_capturing", lambda: made.graph is not None)
    late_rules.calls.begun = 0
    return made


def replay(graph: Graph, times: int = 1) -> None:
    for _ in range(times):
        for work in graph:
            work()
