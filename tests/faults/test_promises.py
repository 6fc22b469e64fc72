"""Results that break promises, made up; and capsules of promises, which hold what was known before the call."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import llm_op_guard as og
from llm_op_guard.cli import main
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.faults.capsule import Capsule, read, replay
from llm_op_guard.faults.ingredients import ingredients
from llm_op_guard.faults.injection import INTENDED, inject
from llm_op_guard.faults.promises import promised, returned
from llm_op_guard.faults.solve import valid_calls
from llm_op_guard.guard.call import Call, Entry, TensorSpec, TorchSpec
from llm_op_guard.guard.call_json import from_json, to_json
from llm_op_guard.testing import capsule

PROMISES = [
    ("x: floating[N, D]\nreturns: like(x)", ("x",)),
    ("x: floating[N, D]\nreturns: floating[N, 2 * D] @ x.device", ("x",)),
    ("x: any[*lead, D] @ dev\nreturns: any[*lead, 2 * D] @ dev", ("x",)),
    ("x: floating[N]\nreturns: (like(x), None | int64[N, _])", ("x",)),
    ("x: floating[N]\nensure(finite(result))\nensure(result.shape[0] == N)", ("x",)),
    ("if x.dtype == float16:\n    ensure(result.dtype == float32, id='up')\nelse:\n    ensure(result is None)", ("x",)),
    ("new: int\nrequire(new > 0)\nold = cache.length\nensure(cache.length == old + new, id='grows')", ("cache", "new")),
    ("xs: list[floating[D]]\nreturns: floating[D]\nensure(finite(result))", ("xs",)),
    ("i: int64[M]\nx: int64[N]\nrequire(within(i, 0, N), id='in_x')\nensure(highest(result) <= N)", ("x", "i")),
]


@pytest.mark.parametrize(("body", "parameters"), PROMISES)
def test_every_promise_is_broken_caught_and_replayed(body: str, parameters: tuple[str, ...]) -> None:
    contract = parse_body(body, "operator", parameters)
    rules = {rule.id for rule in promised(contract)}
    result = inject("operator", contract, None, valid=12)
    assert rules and rules <= {case.rule for case in result.cases}
    assert not result.false_alarms and not result.failed
    broken = [case for case in result.cases if case.rule in rules]
    assert all(case.guarded == INTENDED and case.kind.startswith("result: ") for case in broken)
    assert all(case.unguarded.text.startswith("the result is made up") for case in broken)
    assert rules <= {capsule.rule for capsule in result.capsules}
    assert not any(capsule.elsewhere or capsule.size > 2048 for capsule in result.capsules)


def test_results_that_keep_every_promise_are_tried_too() -> None:
    contract = parse_body("x: floating[N, D]\nreturns: floating[N, 2 * D]", "operator", ("x",))
    late = returned(contract, valid_calls(ingredients(contract), 0, 10), 0)
    assert len(late.kept) >= 8
    for judgement in late.kept:
        x, result = judgement.arguments["x"], judgement.arguments["result"]
        assert result.shape == (x.shape[0], 2 * x.shape[1])
    one_more = next(mutant for mutant in late.broken["result.shape"] if mutant.kind == "result: one more in axis 0")
    assert one_more.others == () and one_more.origin.entry is None


def test_a_contract_without_promises_has_none() -> None:
    contract = parse_body("x: floating[N]", "operator", ("x",))
    assert returned(contract, valid_calls(ingredients(contract), 0, 5), 0).broken == {}


def test_a_promise_that_no_result_breaks_is_told() -> None:
    result = inject("operator", parse_body("old = x.shape[0]\nensure(x.shape[0] == old)", "operator", ("x",)), None)
    assert "x.shape[0] == old" in result.unbroken


# ---------------------------------------------------------------- live

POOL = """
    count: int
    free = self.free
    ensure(self.free == free - count, id="falls")
    ensure(len(result) == count)
"""


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """The capsule of a promise about what a call leaves behind."""

    @og.guard(POOL)
    def take(self: Any, count: int) -> list[int]:
        self.free -= count + 1
        return [0] * count

    with pytest.raises(og.GuardError) as caught:
        take(SimpleNamespace(free=7), 3)
    path = tmp_path / "capsule.json"
    path.write_text(capsule(caught.value.violations[0]))
    return path


def test_what_was_known_before_the_call_is_in_the_capsule(broken: Path, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "pool.contract"
    file.write_text(f"def take(self, count):{POOL}")
    call = read(broken.read_text()).call
    assert call.entry is not None and dict(call.entry.names)["free"] == 7
    assert dict(call.arguments)["result"] is not None
    assert main(["replay", str(broken), "--contract", f"{file}:take"]) == 0
    out = capsys.readouterr().out
    assert (
        "take: self.free = 3, free - count = 4, expected self.free == free - count" in out
        and "falls (class A, certain)" in out
    )


def test_the_record_has_it_too(tmp_path: Path) -> None:
    og.record_to(tmp_path / "guards.jsonl")
    grow = og.guard("x: floating[N, D]\nreturns: floating[N, 2 * D]")(lambda x: torch.cat([x, x]))
    with og.policy(A="record"):
        grow(torch.ones(2, 3))
    og.record_to(None)
    found = read((tmp_path / "guards.jsonl").read_text())
    assert replay(found, parse_body("x: floating[N, D]\nreturns: floating[N, 2 * D]", "<lambda>", ("x",))).reproduced
    assert found.call.get(next(path for path, _ in found.call.tensors() if path.root == "result")) == TensorSpec(
        "float32", (4, 3)
    )


def test_a_shipped_promise(tmp_path: Path, capsys: Any) -> None:
    from transformers import LogitsProcessorList

    with og.installed("transformers"), og.policy(B="record"):
        LogitsProcessorList([lambda ids, scores: scores.fill_(float("nan"))])(torch.ones(2, 3).long(), torch.ones(2, 5))
    path = tmp_path / "capsule.json"
    path.write_text(capsule(og.record.violations[-1]))
    assert main(["replay", str(path), "--unguarded"]) == 0
    out = capsys.readouterr().out
    assert "a_choice_in_each_row" in out and "without a guard  " in out
    assert main(["replay", str(path), "--script"]) == 0
    assert "from llm_op_guard.testing import replay" in capsys.readouterr().out


def test_a_promise_about_devices_needs_no_accelerator() -> None:
    contract = parse_body("x: any[N] @ dev\nreturns: any[N] @ dev", "operator", ("x",))
    arguments = (("x", TensorSpec("float32", (2,), "cuda:0")), ("result", TensorSpec("float32", (2,), "cuda:1")))
    call = Call(arguments, entry=Entry((("N", 2), ("dev", TorchSpec("device", "cuda:0")))))
    kept = Capsule(contract.id, contract.hash, "operator", "", ("result.device",), "", "", "", {}, call)
    assert replay(kept, contract).judgement.broken == ("result.device",)


ENTRY = Entry((("N", 2), ("dev", TorchSpec("device", "cpu"))), (("x", TensorSpec("float32", (2,))),))


def test_a_call_that_has_returned_is_json_and_back() -> None:
    call = Call((("x", 1), ("result", None)), 3, ENTRY)
    assert from_json(json.loads(json.dumps(to_json(call)))) == call


@pytest.mark.parametrize("entry", [3, {}, {"names": {}}, {"names": [], "tensors": {}}, {"names": {}, "tensors": 2}])
def test_an_entry_that_is_none(entry: Any) -> None:
    with pytest.raises(ValueError, match="the entry of a call is"):
        from_json({"arguments": {}, "entry": entry})
