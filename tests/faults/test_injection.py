"""Valid calls and mutants from contracts: every one judged by `explain`, and caught by the compiled check."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import llm_op_guard as og
from llm_op_guard.catalogue import contract_of, shipped
from llm_op_guard.cli import main
from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.faults import build, outcome
from llm_op_guard.faults.ingredients import ingredients
from llm_op_guard.faults.injection import INTENDED, MISSED, Checked, Injected, inject, summary
from llm_op_guard.faults.judge import judge
from llm_op_guard.faults.mutants import breakable, mutants
from llm_op_guard.faults.operators import Operator
from llm_op_guard.faults.outcome import Trial, outcomes
from llm_op_guard.faults.solve import _to_blame, valid_calls
from llm_op_guard.guard.call import Call, IdentitySpec, ObjectSpec
from llm_op_guard.guard.explain import explain

ROPE = """
q: T[B, H, L, D]
k: T[B, G, L, D]
cos: T[B | 1, L, D]
require(T in floating)
require(D % 2 == 0, id='even')
require(H % G == 0, id='groups')
"""


def contract(body: str, *parameters: str) -> Contract:
    return parse_body(body, "operator", parameters)


def injected(body: str, *parameters: str, operator: Any = None, valid: int = 30) -> Injected:
    wrapped = None if operator is None else Operator("operator", operator)
    return inject("operator", contract(body, *parameters), wrapped, valid=valid)


def test_valid_calls_are_valid_and_reach_every_statement() -> None:
    rope = contract(ROPE, "q", "k", "cos")
    found = valid_calls(ingredients(rope), 0, 60)
    assert len(found) >= 60
    assert all(not explain(rope, judgement.arguments) for judgement in found)
    sizes = {size for judgement in found for _, tensor in judgement.call.tensors() for size in tensor.shape}
    assert sizes >= {1, 2, 3, 4, 8} and any(size > 8 for size in sizes)
    assert {tensor.dtype for j in found for _, tensor in j.call.tensors()} >= {"float32", "bfloat16", "float16"}


def test_the_same_seed_makes_the_same() -> None:
    made = ingredients(contract(ROPE, "q", "k", "cos"))
    one, other, third = (valid_calls(made, seed, 5) for seed in (3, 3, 4))
    assert [j.call for j in one] == [j.call for j in other] != [j.call for j in third]
    ids = [[m.id for kinds in mutants(made, calls, 3).values() for m in kinds] for calls in (one, other)]
    assert ids[0] == ids[1]


def test_every_rule_is_broken_by_itself() -> None:
    rope = contract(ROPE, "q", "k", "cos")
    made = ingredients(rope)
    found = mutants(made, valid_calls(made, 0, 30), 0)
    assert found.keys() == {rule.id for rule in breakable(rope)}
    for rule, kinds in found.items():
        assert kinds, f"nothing breaks {rule}"
        # Three tensors share T: a dtype that is no float is another's too.
        assert not kinds[0].others or rule == "T in floating"


@pytest.mark.parametrize(
    ("body", "parameters"),
    [
        ("require(within(ids, 0, rows))\nrows: int", ("ids", "rows")),
        ("require(finite(x))", ("x",)),
        ("require(nondecreasing(cu))\nrequire(first(cu) == 0)\nrequire(last(cu) == N)\nx: any[N, _]", ("cu", "x")),
        ("mask: boolean[B, L]\nrequire(live_rows(mask))", ("mask",)),
        ("require(misspelt(kwargs, 'attention_mask') is None)", ("kwargs",)),
        (
            "if side == 'left':\n    require(n > 3)\nelse:\n    require(n < 2)\nside: 'left' | 'right'\nn: int",
            ("side", "n"),
        ),
        ("self.weight: floating[D]\nx: floating[..., D]\nrequire(self.groups * 2 == D)", ("self", "x")),
        ("require(recall(self, 'rows') == N)\nx: any[N]", ("self", "x")),
        ("xs: list[any[D]]", ("xs",)),
        ("x: any[N] @ dev\ny: any[N] @ dev\nrequire(dense(x))", ("x", "y")),
    ],
)
def test_kinds_of_rules(body: str, parameters: tuple[str, ...]) -> None:
    result = injected(body, *parameters)
    assert result.valid_calls >= 5
    assert not result.false_alarms
    assert not result.unbroken
    assert result.cases and all(case.guarded == INTENDED for case in result.cases)


def test_what_becomes_of_calls_without_a_guard() -> None:
    def operator(x: torch.Tensor, w: torch.Tensor, mode: int) -> torch.Tensor:
        if mode < 0:
            os._exit(9)
        if mode > 1:
            raise ValueError("mode is 0 or 1")
        return x * w

    body = "x: floating[N, D]\nw: floating[D]\nmode: int\nrequire(0 <= mode < 2, id='mode')"
    result = injected(body, "x", "w", "mode", operator=operator)
    kinds = {(case.rule, case.unguarded.kind) for case in result.cases}
    assert {("w.shape", "obscure error"), ("w.shape", "silent"), ("mode", "clear error"), ("mode", "died")} <= kinds
    assert all(case.guarded == INTENDED for case in result.cases)
    assert summary([result])["caught"] == len(result.cases)


def test_a_clear_error_names_what_the_rule_reads() -> None:
    def operator(x: torch.Tensor, scale: float, norm: Any, mode: str) -> torch.Tensor:
        if not scale < 4:
            raise ValueError("scale has to be less than 4")
        if not norm.eps < 4:
            raise ValueError("eps has to be less than 4")
        if mode != "left":
            raise ValueError("x cannot be turned that way")
        return x

    rules = "require(scale < 4, id='first')\nrequire(norm.eps < 4, id='second')\nrequire(mode == 'left', id='x')"
    result = injected(f"x: floating[N]\n{rules}\nscale: float", "x", "scale", "norm", "mode", operator=operator)
    kinds = {(case.rule, case.unguarded.kind) for case in result.cases if case.unguarded.text.startswith("ValueError")}
    assert {("first", "clear error"), ("second", "clear error"), ("x", "obscure error")} <= kinds
    assert not kinds & {("first", "obscure error"), ("second", "obscure error"), ("x", "clear error")}


def test_changes_that_cannot_be_made_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "MOST_ELEMENTS", 8)  # a ninth element is too many
    result = injected("x: any[N]", "x")
    assert result.to_dict()["changed_calls_that_cannot_be_made_here"] == result.unbuildable > 0


def test_a_comparison_that_fails_is_no_fault_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def slip(right: list[Any], found: list[Any]) -> Any:
        raise ZeroDivisionError("nothing to compare")

    monkeypatch.setattr(outcome, "_difference", slip)
    call = Call((("n", 1),))
    with pytest.raises(RuntimeError, match="comparing the results of n=1: ZeroDivisionError: nothing to compare"):
        list(outcomes(Operator("operator", lambda n: n), [Trial(call, call)]))


def test_a_rule_that_nothing_needs_is_called_too_strict() -> None:
    result = injected("x: floating[N]\nrequire(n < 4, id='idle')\nn: int", "x", "n", operator=lambda x, n: x)
    assert "idle" in result.lenient


def test_an_answer_that_is_an_identity_is_that_of_the_object_or_of_another() -> None:
    made = ingredients(contract("require(recall(cache, 'by') == identity(self))", "self", "cache"))
    found = valid_calls(made, 0, 20)
    assert answers(judgement.call for judgement in found) >= {(("recall('by')", IdentitySpec("self")),)}
    (broken,) = mutants(made, found, 0).values()
    assert answers(mutant.call for mutant in broken) == {(("recall('by')", IdentitySpec()),)}


def answers(calls: Iterable[Call]) -> set[Any]:
    caches = [dict(call.arguments)["cache"] for call in calls]
    return {cache.answers for cache in caches if isinstance(cache, ObjectSpec) and cache.answers}


def test_what_is_to_blame_is_what_the_taken_branch_reads() -> None:
    branches = contract(
        "if side == 'left':\n    require(m > 3, id='r')\nelif side == 'right':\n    require(n > 3, id='r')",
        *("side", "m", "n"),
    )
    made = ingredients(branches)
    for side, other in (("left", "m"), ("right", "n")):
        judgement = judge(branches, Call((("side", side), ("m", 0), ("n", 0))))
        assert judgement is not None
        assert [str(choice.path) for choice in _to_blame(made, judgement, random.Random(0))] == [other]


BELOW_FOUR = "require(n < 4, id='n')\nn: int"


def test_a_check_that_misses_is_reported() -> None:
    check = Checked(contract("n: int", "n"))
    result = inject("operator", contract(BELOW_FOUR, "n"), None, valid=20, check=check)
    assert not result.false_alarms
    assert result.count(MISSED) == sum(case.rule == "n" for case in result.cases) > 0


def test_a_check_that_stops_valid_calls_is_reported() -> None:
    check = Checked(contract("require(n < 2, id='n')", "n"))
    result = inject("operator", contract(BELOW_FOUR, "n"), None, valid=20, check=check)
    assert result.false_alarms and result.false_alarms[0].message.startswith("operator: n = ")


def test_a_capsule_that_does_not_replay_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from llm_op_guard.faults import injection

    real = injection.retried
    monkeypatch.setattr(
        injection, "retried", lambda violation, contract: replace(real(violation, contract), reason="it breaks nothing")
    )
    file, data, xml = tmp_path / "mine.contract", tmp_path / "out.json", tmp_path / "out.xml"
    file.write_text("def f(n):\n    require(n < 4, id='small')\n")
    assert main(["inject", str(file), "--valid", "5", "--json", str(data), "--junit", str(xml)]) == 1
    assert "CAPSULE LOST" in (out := capsys.readouterr().out) and "small: it breaks nothing" in out
    document = json.loads(data.read_text())
    assert document["summary"]["capsules"] == 1 and document["summary"]["capsules_replayed"] == 0
    assert document["contracts"][0]["capsules_that_do_not_replay"] == [{"rule": "small", "reason": "it breaks nothing"}]
    assert "the capsule does not replay: it breaks nothing" in xml.read_text()


SAMPLE = ["transformers/norm:rms_norm", "transformers/moe:router", "torch/functional:layer_norm"]


@pytest.mark.parametrize("name", SAMPLE)
def test_shipped_contracts(name: str) -> None:
    result = inject(name, shipped()[name], None, valid=20)
    assert not result.false_alarms
    assert result.cases and all(case.guarded == INTENDED for case in result.cases)
    assert {capsule.rule for capsule in result.capsules} == {case.rule for case in result.cases}
    assert not any(capsule.reason or capsule.elsewhere for capsule in result.capsules)


# ---------------------------------------------------------------- the command

FILE = "def scale(x, w):\n    x: floating[N, D]\n    w: floating[D]\n"


def test_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, data, xml = tmp_path / "mine.contract", tmp_path / "out.json", tmp_path / "out.xml"
    file.write_text(FILE)
    assert main(["inject", str(file), "--valid", "20", "--json", str(data), "--junit", str(xml)]) == 0
    document = json.loads(data.read_text())
    figures = document["summary"]
    assert figures["contracts"] == 1 and figures["false_alarms"] == 0
    assert figures["mutants"] == figures["caught"] == figures["caught_by_intended_rule"] == len(document["cases"])
    assert figures["valid_calls"] >= 20 and figures["rules"] == 6
    case = document["cases"][0]
    assert {"id", "contract", "rule", "kind", "call", "guarded", "unguarded", "message"} <= case.keys()
    assert xml.read_text().count("<testcase") == len(document["cases"]) + 2
    assert figures["capsules"] == figures["capsules_replayed"] == figures["rules_with_mutants"]
    assert 0 < figures["largest_capsule"] < 2048 and figures["capsules_over_2_kb"] == 0
    out = capsys.readouterr().out
    assert "false alarms: 0" in out and "mutants: " in out

    other = tmp_path / "other.contract"
    other.write_text("def half(n):\n    require(n % 2 == 0)\n")
    assert main(["inject", f"{file}:scale", str(other), "--valid", "5"]) == 0
    assert "contracts: 2, " in capsys.readouterr().out

    assert main(["inject", str(file), "--valid", "20", "--case", case["id"]]) == 0
    assert case["message"] in capsys.readouterr().out


def test_torch_has_as_many_threads_as_before(tmp_path: Path) -> None:
    file = tmp_path / "mine.contract"
    file.write_text("def half(n):\n    require(n % 2 == 0)\n")
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert main(["inject", str(file), "--valid", "2"]) == 0
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_a_guarded_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_operators.py").write_text(
        "import llm_op_guard as og\n"
        "@og.guard('x: floating[N, D]\\nw: floating[D]')\n"
        "def scale(x, w):\n    return x * w\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["inject", "my_operators:scale", "--valid", "20"]) == 0
    out = capsys.readouterr().out
    assert "my_operators:scale" in out and "silent" in out and "obscure error" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name a contract"),
        (["rotary"], "there is no contract, file or function 'rotary'"),
        (["no_such_module:f"], "cannot import no_such_module"),
        (["json:dumps"], "json:dumps is nothing that og.guard has guarded"),
        (["norm:rms_norm", "--json", "/no/such/folder/x.json"], "cannot write /no/such/folder/x.json"),
        (["norm:rms_norm", "--json", "/"], "cannot write /: it is a folder"),
        (["norm:rms_norm", "--json", "x.html", "--html", "./x.html"], "is named for two formats"),
        (["norm:rms_norm", "--all"], "--all is every shipped contract: leave it out, or norm:rms_norm"),
        (["norm:rms_nrom"], "norm has no contract 'rms_nrom'; did you mean 'rms_norm'?"),
        (["transformers/moe:nothing"], "transformers/moe has no contract 'nothing'; it has "),
    ],
)
def test_what_cannot_be_injected(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inject", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("raised", ["SystemExit(0)", "ZeroDivisionError('by zero')"])
def test_a_module_that_cannot_be_imported(
    raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"raises_{raised.partition('(')[0].lower()}"
    (tmp_path / f"{name}.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["inject", f"{name}:f"]) == 2
    assert f"cannot import {name}: it raises {raised.partition('(')[0]}: " in capsys.readouterr().err


def test_an_operator_that_a_file_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.contract"
    file.write_text(FILE)
    assert main(["inject", f"{file}:scales"]) == 2
    assert f"{file} has no contract 'scales'; did you mean 'scale'?" in capsys.readouterr().err


def test_a_contract_that_no_call_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.contract"
    file.write_text("def f(n, m):\n    n: int\n    m: int\n    require(n * n + m * m == 3)\n")
    assert main(["inject", str(file), "--valid", "2"]) == 1
    assert "no valid call was found, so nothing was tried" in capsys.readouterr().out


def test_files_are_written_though_nobody_reads_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> None:
        raise BrokenPipeError

    file, data = tmp_path / "mine.contract", tmp_path / "out.json"
    file.write_text(FILE)
    monkeypatch.setattr("llm_op_guard.injecting._show", closed)
    with contextlib.suppress(BrokenPipeError, SystemExit):
        main(["inject", str(file), "--valid", "2", "--json", str(data)])
    assert json.loads(data.read_text())["summary"]["contracts"] == 1


def test_an_unknown_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.contract"
    file.write_text(FILE)
    assert main(["inject", str(file), "--valid", "5", "--case", "nothing"]) == 2
    assert "there is no case 'nothing' with" in capsys.readouterr().err


def test_contract_of() -> None:
    guarded = og.guard("require(n > 0)")(lambda n: n)
    found = contract_of(guarded)
    assert found is not None and [rule.id for rule in found.rules] == ["n > 0"]
    assert contract_of(len) is None and contract_of(3) is None
