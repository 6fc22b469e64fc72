"""`scripts/gpu_check.py`: what it says where there is no device, and that its parts fit the library as it is now."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from graphs import replay, stand_in

import llm_op_guard as og
from llm_op_guard.guard import late

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_check.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so_and_exits_with_2(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main() == 2
    assert capsys.readouterr().out == script.NO_DEVICE + "\n"
    assert "sees no CUDA device, so nothing was checked" in script.NO_DEVICE


def test_what_it_guards_is_told_as_it_expects(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late, "DEVICES", {"cpu"})
    og.set_policy(B="raise,async")
    x = torch.ones(64, 64)
    x[-1, -2] = float("nan")
    script.doubled(x)
    with pytest.raises(og.GuardError) as raised:
        og.flush()
    assert raised.value.violations[0].observed.startswith("x[63, 62] = nan")


def test_what_it_expects_of_replays(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stand_in(monkeypatch)
    og.set_policy(B="raise,async")

    class Graph:
        def __init__(self, call: Callable[[], torch.Tensor]) -> None:
            self.call = call
            with stream.capture() as self.asked:
                self.result = call()

        def replay(self) -> None:
            replay(self.asked)
            og.disable()
            self.result.copy_(self.call())
            og.enable()

    def captured(call: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        graph = Graph(call)
        return graph, graph.result

    monkeypatch.setattr(script, "DEVICE", "cpu")
    monkeypatch.setattr(script, "warmed", lambda call: call())
    monkeypatch.setattr(script, "captured", captured)
    rows = script.replays()
    assert len(rows) == 6
    assert all(right for *_, right in rows), rows
