"""Capsules: a violation as a small text, and the same diagnosis from it anywhere."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llm_op_guard as og
from llm_op_guard.catalogue import shipped
from llm_op_guard.cli import main
from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.faults.capsule import Capsule, CapsuleError, capsule_of, read, replay
from llm_op_guard.faults.ingredients import ingredients
from llm_op_guard.faults.injection import Checked
from llm_op_guard.faults.mutants import mutants
from llm_op_guard.faults.solve import valid_calls
from llm_op_guard.guard.call import Call, TensorSpec
from llm_op_guard.testing import capsule
from llm_op_guard.testing import replay as replay_text

BODY = (
    "x: floating[N, D]\nw: floating[D]\nrequire(within(ids, 0, 96), id='in_table')\nrequire(mode in ('left', 'right'))"
)


@pytest.fixture
def violation() -> og.Violation:
    guarded = og.guard(BODY)(lambda x, w, ids, mode: x * w)
    with pytest.raises(og.GuardError) as caught:
        guarded(torch.full((2, 3), 7.25), torch.ones(4), torch.tensor([1]), "left")
    (found,) = caught.value.violations
    return found


FILE = f"def mine(x, w, ids, mode):\n{''.join(f'    {line}{chr(10)}' for line in BODY.splitlines())}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.contract"
    path.write_text(FILE)
    return path


@pytest.fixture
def written(file: Path, tmp_path: Path) -> Path:
    """A capsule of a contract in a file."""

    @og.guard(og.load(file)["mine"])
    def mine(x: Any, w: Any, ids: Any, mode: Any) -> Any:
        return x * w

    with pytest.raises(og.GuardError) as caught:
        mine(torch.ones(2, 3), torch.ones(3), torch.tensor([[5, 6], [7, 4711]]), "left")
    path = tmp_path / "capsule.json"
    path.write_text(capsule(caught.value.violations[0]))
    return path


def test_it_is_small_and_holds_no_contents(violation: og.Violation) -> None:
    text = capsule(violation)
    assert len(text) < 2048
    assert "7.25" not in text and str(Path(__file__).parent) not in text
    assert read(text).rules == ("w.shape",)


def test_the_record_has_what_a_capsule_needs(violation: og.Violation, tmp_path: Path) -> None:
    og.record_to(tmp_path / "guards.jsonl")
    guarded = og.guard("n: int\nrequire(n < 3)")(lambda n: n)
    with og.policy(A="record"):
        guarded(5)
    og.record_to(None)
    found = read((tmp_path / "guards.jsonl").read_text())
    assert found.rules == ("n < 3",) and found.call == Call((("n", 5),))


def test_the_diagnosis_comes_again(written: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(written), "--contract", str(file)]) == 0
    out = capsys.readouterr().out
    assert "mine: ids[1, 1] = 4711 (of 4, 1 element is wrong), expected 0 <= ids < 96" in out
    with pytest.raises(og.GuardError, match="4711"):
        replay_text(written.read_text(), contract=str(file))


def test_a_contract_that_has_changed(written: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(FILE.replace("96", "5000"))
    assert main(["replay", str(written), "--contract", str(file)]) == 1
    err = capsys.readouterr().err
    assert "the contract mine.contract:mine has changed since the capsule was made" in err
    assert "the rule in_table is not broken by the call that was made from the capsule" in err


def test_other_versions_are_said(written: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(written.read_text())
    data["versions"]["torch"] = "1.0"
    written.write_text(json.dumps(data))
    assert main(["replay", str(written), "--contract", str(file)]) == 0
    assert "and was 1.0 where the capsule was made" in capsys.readouterr().err


def test_a_test_that_passes(written: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(written), "--contract", str(file), "--pytest"]) == 0
    (tmp_path / "test_again.py").write_text(capsys.readouterr().out)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run([*command, str(tmp_path / "test_again.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


def test_a_script_of_a_shipped_operator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, table = torch.randn(2, 4, 7, 16), torch.randn(2, 7, 1)
    with og.installed("transformers"), pytest.raises(og.GuardError) as caught:
        apply_rotary_pos_emb(q, q, table, table)
    path = tmp_path / "capsule.json"
    path.write_text(capsule(caught.value.violations[0]))
    assert main(["replay", str(path), "--script"]) == 0
    script = capsys.readouterr().out
    assert script.count("\n") < 20
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "apply_rotary_pos_emb: cos.shape[2] = 1, expected D = 16" in done.stderr
    assert main(["replay", str(path), "--unguarded"]) == 0
    assert "without a guard  silent: it returns [2, 4, 7, 16] and [2, 4, 7, 16]" in capsys.readouterr().out


def capsuled(contract: Contract, call: Call, rule: str) -> Capsule:
    """The capsule of what the guard tells of a rule."""
    return read(capsule(next(violation for violation in Checked(contract)(call) if violation.rule_id == rule)))


SAMPLE = ["transformers/norm:rms_norm", "torch/functional:embedding", "transformers/logits:repetition_penalty"]


@pytest.mark.parametrize("name", SAMPLE)
def test_every_rule_replays(name: str) -> None:
    contract = shipped()[name]
    made = ingredients(contract)
    found = mutants(made, valid_calls(made, 0, 20), 0)
    assert found
    for rule, kinds in found.items():
        assert kinds, rule
        for mutant in kinds[:2]:
            again = replay(capsuled(contract, mutant.call, rule), contract)
            assert again.reproduced and rule in again.judgement.broken, (rule, mutant.kind)


@pytest.mark.parametrize(
    "body",
    ["require(nondecreasing(x))", "require(unique(x))", "require(last(x) == N)\nx: any[N]"],
)
def test_values_that_no_element_tells_are_made_up(body: str) -> None:
    contract = parse_body(body, "operator", ("x",))
    call = Call((("x", TensorSpec("int64", (4,), fill=(9, 7, 7, 2))),))
    (rule,) = contract.rules[:1]
    assert replay(capsuled(contract, call, rule.id), contract).reproduced


ELEMENTS = [
    ("require(within(ids, 0, 90), id='r')", ("ids",), (torch.tensor([[5, 6], [7, 4711]]),), "ids[1, 1] = 4711"),
    ("require(lowest(x) > -9, id='r')", ("x",), (torch.tensor([-9.5, 1, -20]),), "lowest(x) = -20.0 at x[2]"),
    ("require(finite(x[:, 1:]), id='r')", ("x",), (torch.tensor([[0, 1], [1, torch.nan]]),), "x[1, 1] = nan"),
    ("require(unique(x), id='r')", ("x",), (torch.tensor([3, 8, 1, 8]),), "x[1] = x[3] = 8"),
    ("require(live_rows(m), id='r')", ("m",), (torch.tensor([[1, 1], [1, 0], [0, 0]]).bool(),), "m[2] keeps no key"),
    ("for x in xs:\n    require(finite(x))", ("xs",), ([torch.ones(2), torch.tensor([1, torch.inf])],), ""),
]


@pytest.mark.parametrize(("body", "parameters", "arguments", "told"), ELEMENTS)
def test_the_offending_value_comes_again_where_it_stood(
    body: str, parameters: tuple[str, ...], arguments: tuple[Any, ...], told: str
) -> None:
    operator = {"x": lambda x: x, "ids": lambda ids: ids, "m": lambda m: m, "xs": lambda xs: xs}[parameters[0]]
    with pytest.raises(og.GuardError) as caught:
        og.guard(body)(operator)(*arguments)
    (violation,) = caught.value.violations
    assert told in violation.observed
    contract = parse_body(body, violation.operator, parameters)
    (again,) = replay(read(capsule(violation)), contract).judgement.violations
    assert again.rule_id == violation.rule_id
    assert again.observed.partition(" (of ")[0] == violation.observed.partition(" (of ")[0]


@pytest.mark.parametrize(("side", "kept"), [("left", {"a": ((1, 11),)}), ("right", {"b": ((1, 12),)})])
def test_of_a_rule_in_several_branches_the_one_that_is_taken_tells(side: str, kept: dict[str, Any]) -> None:
    body = (
        "if side == 'left':\n    require(within(a, 0, 9), id='r')\n"
        "elif side == 'right':\n    require(within(b, 0, 9), id='r')"
    )
    with pytest.raises(og.GuardError) as caught:
        og.guard(body)(lambda a, b, side: a)(torch.tensor([1, 11]), torch.tensor([1, 12]), side)
    found = read(capsule(caught.value.violations[0]))
    assert {str(path): tensor.at for path, tensor in found.call.tensors() if tensor.at} == kept
    assert replay(found, parse_body(body, "operator", ("a", "b", "side"))).reproduced


def test_a_row_is_kept_where_it_is_short() -> None:
    rows = og.guard("require(any_per_row(m), id='r')")(lambda m: m)
    for width, kept in ((32, 32), (1024, 1024), (1025, 0)):
        mask = torch.ones(3, width, dtype=torch.bool)
        mask[1] = False
        with pytest.raises(og.GuardError) as caught:
            rows(mask)
        text = capsule(caught.value.violations[0])
        (tensor,) = [tensor for _, tensor in read(text).call.tensors()]
        assert tensor.at == tuple((width + column, False) for column in range(kept))
        assert len(text) < 2048


def test_an_uneven_row_is_kept_where_it_is_short() -> None:
    rows = og.guard("require(live_rows(m), id='r')")(lambda m: m)
    for width, kept in ((32, 32), (33, 0)):
        mask = torch.zeros(3, width, dtype=torch.float64)
        mask[1] = torch.linspace(-1e38, -2e38, width)
        with pytest.raises(og.GuardError) as caught:
            rows(mask)
        (tensor,) = [tensor for _, tensor in read(capsule(caught.value.violations[0])).call.tensors()]
        assert len(tensor.at) == kept


def test_an_accelerator_is_not_needed() -> None:
    contract = parse_body("x: floating[N, D] @ dev\nw: floating[D] @ dev", "operator", ("x", "w"))
    call = Call((("x", TensorSpec("float32", (2, 3), "cuda:0")), ("w", TensorSpec("float32", (3,), "cuda:1"))))
    kept = Capsule(contract.id, contract.hash, "operator", "", ("w.device",), "", "", "", {}, call)
    assert {*replay(kept, contract).judgement.broken} & {"w.device", "x.device"}


BAD: list[tuple[str, str]] = [
    ("", "no capsule"),
    ("{}", "no capsule"),
    ("[1, 2", "no capsule"),
    ('{"capsule": 2}', "a capsule of format 2"),
    ('{"capsule": 1}', "the capsule has no text 'contract'"),
    ("[" * 100_000, "no capsule"),
]


@pytest.mark.parametrize(("text", "says"), BAD)
def test_what_is_no_capsule(text: str, says: str) -> None:
    with pytest.raises(CapsuleError, match=says):
        read(text)


WORDS = [
    "arguments",
    "tensor",
    "shape",
    "tuple",
    "object",
    "attributes",
    "answers",
    "number",
    "at",
    "fill",
    "dtype",
    "x",
]
HOSTILE = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.just("float32"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
    max_leaves=12,
)
HEAD = {"capsule": 1, "contract": "c", "contract_hash": "", "operator": "", "site": "", "rules": ["r"]}


@given(HOSTILE)
def test_hostile_calls(call: Any) -> None:
    text = json.dumps({**HEAD, "observed": "", "expected": "", "call": {"arguments": call}})
    with contextlib.suppress(CapsuleError):
        replay(read(text), parse_body("require(x.ndim > 3)", "operator", ("x",)))


@pytest.mark.parametrize("arguments", [["/no/such/file"], ["{tmp}"], ["{bytes}"]])
def test_files_that_cannot_be_replayed(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    given = [text.format(tmp=tmp_path, bytes=tmp_path / "bytes") for text in arguments]
    assert main(["replay", *given]) == 2
    assert "llm-op-guard: error: " in capsys.readouterr().err


def test_a_contract_that_nobody_knows(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(written)]) == 2
    assert "say --contract FILE, FILE:OPERATOR or MODULE:FUNCTION" in capsys.readouterr().err


def test_another_element_is_said_and_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.contract"
    file.write_text("def rows(x):\n    require(equal(x, consecutive(x)))\n")
    rows = og.guard(og.load(file)["rows"])(lambda x: x)
    with pytest.raises(og.GuardError) as caught:
        rows(torch.tensor([3, 4, 6, 7]))
    path = tmp_path / "capsule.json"
    path.write_text(capsule(caught.value.violations[0]))
    assert main(["replay", str(path), "--contract", str(file)]) == 0
    err = capsys.readouterr().err
    assert "the capsule tells of x[2] = 6, consecutive(x)[2] = 5 (of 4, 2 pairs differ" in err
    assert "and the call that was made from it of x[" in err
    assert "it does not hold the other elements of x, which the rule reads" in err


def test_the_same_element_is_not_said(written: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(written), "--contract", str(file)]) == 0
    assert capsys.readouterr().err == ""


def test_what_is_not_held_is_said_where_the_rule_is_not_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "same.contract"
    file.write_text("def same(ids, others):\n    require(ids == others)\n")
    with pytest.raises(og.GuardError) as caught:
        og.verify(og.load(file)["same"], [1000] * 9, [1000] * 8 + [7])
    path = tmp_path / "capsule.json"
    path.write_text(capsule(caught.value.violations[0]))
    assert main(["replay", str(path), "--contract", str(file)]) == 1
    says = "made from the capsule: it does not hold the items of ids, the items of others, which the rule reads"
    assert says in capsys.readouterr().err


def test_an_argument_that_the_contract_does_not_have(
    written: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(written.read_text())
    data["call"]["arguments"]["y"] = 3
    written.write_text(json.dumps(data))
    assert main(["replay", str(written), "--contract", str(file)]) == 2
    assert "mine.contract:mine has no parameter 'y'" in capsys.readouterr().err


OWN = """
import llm_op_guard as og

@og.guard("x: floating[N, D]; w: floating[D]; require(len(size) < 3)")
def scale(x, w, size):
    return x * w
"""


def test_a_function_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_scale.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = __import__("own_scale")
    with pytest.raises(og.GuardError) as caught:
        own.scale(torch.ones(2, 3), torch.ones(4), (7, 8))
    path = tmp_path / "capsule.json"
    path.write_text(capsule(caught.value.violations[0]))
    assert main(["replay", str(path)]) == 2
    assert "say --contract own_scale:scale" in capsys.readouterr().err
    assert main(["replay", str(path), "--contract", "own_scale:scale"]) == 0
    assert main(["replay", str(path), "--script"]) == 0
    script = tmp_path / "script.py"
    script.write_text("import importlib" + capsys.readouterr().out.partition("import importlib")[2])
    assert "size = (1, 1)\n" in script.read_text()
    with pytest.raises(og.GuardError, match="scale: w.shape.0. = 4, expected D = 3"):
        runpy.run_path(str(script))


def test_a_violation_without_a_call(violation: og.Violation) -> None:
    from dataclasses import replace as changed

    with pytest.raises(CapsuleError, match="could not be kept as data"):
        capsule_of(changed(violation, call=None))
