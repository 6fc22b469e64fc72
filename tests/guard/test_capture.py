"""What is kept of a call: of a user's numbers, keys and texts only what the broken rule needs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import llm_op_guard as og
from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.parse import parse_stubs
from llm_op_guard.contract.path import Path as ContractPath
from llm_op_guard.faults.capsule import Capsule, Replay, read, replay
from llm_op_guard.guard.call import Call, ManySpec, MappingSpec, NumberSpec, SequenceSpec, TextSpec
from llm_op_guard.guard.call_json import from_json, to_json
from llm_op_guard.guard.capture import capture
from llm_op_guard.testing import capsule


def told(body: str, **arguments: Any) -> Capsule:
    """The capsule of the first rule that is broken."""

    with pytest.raises(og.GuardError) as caught:
        og.verify(stub(body, arguments), **arguments)
    return read(capsule(caught.value.violations[0]))


def stub(body: str, arguments: dict[str, Any]) -> Contract:
    """The contract of an operator with these parameters."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return parse_stubs(f"def operator({', '.join(arguments)}):\n{lines}", "some.contract")["operator"]


def again(body: str, **arguments: Any) -> Replay:
    """The replay of that capsule."""
    return replay(told(body, **arguments), stub(body, arguments))


PROMPT = list(range(70_000, 70_400))


@pytest.mark.parametrize("kind", [list, tuple])
def test_of_a_list_of_token_ids_the_length_is_kept(kind: Any) -> None:
    found = told("ids: list[int]\nrequire(len(ids) <= 100)", ids=kind(PROMPT))
    assert dict(found.call.arguments) == {"ids": ManySpec(kind.__name__, NumberSpec("int"), 400)}
    assert not any(str(number) in json.dumps(found.to_json()) for number in PROMPT)
    assert again("ids: list[int]\nrequire(len(ids) <= 100)", ids=kind(PROMPT)).reproduced


def test_a_short_list_is_no_exception() -> None:
    found = told("ids: list[int]\nrequire(len(ids) > 2)", ids=[70_001, 70_002])
    assert dict(found.call.arguments) == {"ids": SequenceSpec("list", (NumberSpec("int"),) * 2)}


@pytest.mark.parametrize(
    "rule", ["require(all(i < 50 for i in ids))", "for i in ids:\n    require(i < 50)"], ids=["all", "for"]
)
def test_the_item_that_breaks_a_rule_is_kept(rule: str) -> None:
    ids = [7] * 200 + [4711] + [9] * 3
    found = told(rule, ids=ids)
    assert dict(found.call.arguments) == {"ids": ManySpec("list", NumberSpec("int"), 204, ((200, 4711),))}
    made = again(rule, ids=ids)
    assert made.reproduced and not made.elsewhere
    assert made.judgement.violations[0].observed == "i = 4711 at item 200 of ids"


def test_numbers_that_suit_the_rule_are_made_up() -> None:
    made = again("require(all(i > 30000 for i in ids))", ids=[40_000, 50_000, 7, 60_000])
    assert made.judgement.violations[0].observed == "i = 7 at item 2 of ids"
    assert made.judgement.arguments["ids"] == [30_001, 30_001, 7, 30_001]


@pytest.mark.parametrize(("length", "is_kept"), [(8, True), (9, False)])
def test_a_size_that_is_compared_is_kept(length: int, is_kept: bool) -> None:
    size = tuple(range(101, 101 + length))
    found = told("require(size == (1, 2))", size=size)
    assert (dict(found.call.arguments)["size"] == SequenceSpec("tuple", size)) is is_kept


def test_the_items_that_a_contract_reads_are_kept() -> None:
    found = told("require(pad[0] == pad[-1])", pad=[101, 102, 103])
    assert dict(found.call.arguments) == {"pad": SequenceSpec("list", (101, NumberSpec("int"), 103))}


@pytest.mark.parametrize("length", [64, 65, 200])
def test_a_list_of_more_items_is_as_long_again(length: int) -> None:
    body = "xs: list[floating[B, D]]\nrequire(len(xs) == n)"
    made = again(body, xs=[torch.ones(2, 3)] * length, n=1)
    assert made.reproduced
    assert made.judgement.violations[0].observed == f"len(xs) = {length}, n = 1"


def test_keys_that_the_contract_does_not_spell_are_made_up() -> None:
    opts = {"k": 7, "hunter2": "alice", "alice": {"S3CRET": [1, 2]}, 4242: 1, ("a", "b"): 2}
    found = told("opts: dict\nrequire(opts['k'] == n)", opts=opts, n=3)
    text = json.dumps(found.to_json())
    assert not [secret for secret in ("hunter2", "alice", "S3CRET", "4242") if secret in text]
    kept = found.call.get(ContractPath("opts"))
    assert isinstance(kept, MappingSpec) and len(kept.items) == 5 and dict(kept.items)["k"] == 7
    assert again("opts: dict\nrequire(opts['k'] == n)", opts=opts, n=3).reproduced


def test_names_of_keyword_arguments_are_the_programmers() -> None:
    contract = parse_stubs("def f(x, **options):\n    require(x > 0)", "f.contract")["f"]
    call = capture(contract, {"x": 0, "options": {"temperature": 0.123, "a key": "a text"}}, ["x > 0"])
    assert call.get(ContractPath("options")) == MappingSpec(
        (("temperature", NumberSpec("float")), ("xxxxx", TextSpec(6)))
    )


def test_a_misspelt_name_is_kept() -> None:
    body = "require(misspelt(opts, 'temperature', 'top_p') is None)"
    made = again(body, opts={"hunter2": 1, "temprature": 0.5})
    assert made.reproduced and list(made.judgement.arguments["opts"]) == ["xxxxxxx", "temprature"]


@pytest.mark.parametrize("given", [[[[{"sekret": 5}]]], {"sekret": 5}, 4242, ("sekret", 4242.5)], ids=repr)
def test_what_no_statement_reads_is_its_kind_alone(given: Any) -> None:
    found = told("require(n > 0)", x=given, n=0)
    assert "sekret" not in json.dumps(found.to_json()) and "424" not in json.dumps(found.to_json())


def test_numbers_that_a_hint_shows_are_kept() -> None:
    body = "require(n > 0, hint=f'the limit is {limit}')"
    assert again(body, n=0, limit=4711).judgement.violations[0].hint == "the limit is 4711"


def test_numbers_that_are_sizes_are_kept() -> None:
    found = told("x: floating[n, D]", x=torch.ones(2, 3), n=4711)
    assert dict(found.call.arguments)["n"] == 4711


def test_the_record_file_holds_no_prompt(tmp_path: Path) -> None:
    guarded = og.guard("ids: list[int]\nrequire(len(ids) < 5)\nopts: dict")(lambda ids, opts: ids)
    og.record_to(tmp_path / "guards.jsonl")
    with og.policy(A="record"):
        guarded(PROMPT, {"hunter2": 4242})
    og.record_to(None)
    text = (tmp_path / "guards.jsonl").read_text()
    assert not [secret for secret in ("hunter2", "4242", *map(str, PROMPT)) if secret in text]


TEXTS = [
    ("require(a == b)", {"a": "alpha", "b": "gamma"}),
    ("require(a != b)", {"a": "alpha", "b": "alpha"}),
    ("require(m[key] == n)", {"m": {"alice": 7, "S3CRET": 4}, "key": "alice", "n": 1}),
    ("require(controls(t) == 0)", {"t": "abc\x01"}),
    ("require(surrogates(t) == 0)", {"t": "abc\ud800"}),
    ("require(all(controls(t) == 0 for t in ts))", {"ts": ["ok", "bad\x00 sekret"]}),
    ("require(a in ('x', 'xy'))", {"a": "q"}),
]


@pytest.mark.parametrize(("body", "arguments"), TEXTS, ids=[body for body, _ in TEXTS])
def test_rules_about_texts_come_again(body: str, arguments: dict[str, Any]) -> None:
    made = again(body, **arguments)
    assert made.reproduced and not made.elsewhere
    assert not [text for text in ("alpha", "gamma", "alice", "S3CRET", "abc", "bad") if text in str(made.capsule)]


ELEMENTS: list[tuple[str, dict[str, Any], str]] = [
    (
        "t: integer[B, M]\nfor b in range(B):\n    require(within(t[b], 0, P))",
        {"t": torch.tensor([[0, 1], [2, 77]]), "P": 50},
        "t[1, 1] = 77",
    ),
    (
        "cu: integer[B]\nfor i in range(B - 1):\n    require(nondecreasing(cu[i:]))",
        {"cu": torch.tensor([0, 5, 3, 8])},
        "cu[2] = 3 after cu[1] = 5",
    ),
    (
        "for i, x in enumerate(xs):\n    require(finite(x))",
        {"xs": [torch.ones(2), torch.tensor([1, torch.inf])]},
        "x[1] = inf",
    ),
    (
        "for x, m in zip(xs, ms):\n    require(within(x, 0, m))",
        {"xs": [torch.ones(2), torch.tensor([1, 77])], "ms": [5, 9]},
        "x[1] = 77",
    ),
    (
        "for name, x in items(states):\n    require(finite(x))",
        {"states": {"alice": torch.ones(2), "bob": torch.tensor([1, torch.inf])}},
        "x[1] = inf",
    ),
    ("require(any_per_row(m))", {"m": torch.eye(600, dtype=torch.int64)[:, :599]}, "m[599] has no true value"),
    ("require(live_rows(m))", {"m": torch.tensor([[0.0] * 40, [-torch.inf] * 40])}, "m[1] keeps no key"),
]


@pytest.mark.parametrize(("body", "arguments", "says"), ELEMENTS, ids=[body for body, *_ in ELEMENTS])
def test_the_same_element_is_told_of_loops_and_rows(body: str, arguments: dict[str, Any], says: str) -> None:
    made = again(body, **arguments)
    assert made.capsule.observed.startswith(says)
    assert made.reproduced and not made.elsewhere


def test_another_element_is_said() -> None:
    made = again("require(equal(x, consecutive(x)))", x=torch.tensor([3, 4, 6, 7]))
    assert made.reproduced and made.elsewhere.startswith("x[") and not made.elsewhere.startswith("x[2]")
    assert made.not_held == ["the other elements of x"]


def test_an_attribute_of_the_item_that_an_index_leads_to() -> None:
    layers = [SimpleNamespace(w=torch.ones(4)), SimpleNamespace(w=torch.ones(9))]
    made = again("x: any[N, D]\nrequire(layers[i].w.shape[0] == D)", x=torch.ones(2, 4), layers=layers, i=1)
    assert made.reproduced


MANY = [
    ManySpec("list", NumberSpec("int"), 400, ((200, 99),)),
    ManySpec("tuple", TextSpec(5, 3, 1, 2), 65),
    NumberSpec("bool"),
]


@pytest.mark.parametrize("spec", MANY, ids=str)
def test_it_is_read_as_it_was_written(spec: Any) -> None:
    call = Call((("x", spec),))
    assert from_json(json.loads(json.dumps(to_json(call)))) == call


BAD = [
    ({"tensor": "int64", "shape": [3, 4], "at": [[99, 1.0]]}, "x: element 99 of 12"),
    ({"tensor": "int64", "shape": [3, 4], "at": [[10, 1, 3]]}, "x: element 12 of 12"),
    ({"tensor": "int64", "shape": [3, 4], "at": [[-1, 1]]}, "x: element -1 of 12"),
    ({"tensor": "int64", "shape": [2**40], "at": [[0, 1, 2**30]]}, "a tensor has 1000000 single elements at most"),
    ({"tensor": "int64", "shape": [3, 4], "at": [[1]]}, "single elements are a list of"),
    ({"list": {"each": 1, "length": 10**9}}, "a list has 1000000 items at most"),
    ({"list": {"each": 1, "length": 3, "at": [[3, 1]]}}, "single items are a list of"),
    ({"text": 3, "number": -1}, "of a text are whole numbers"),
    ({"a": "str"}, "not a value of a call"),
]


@pytest.mark.parametrize(("data", "says"), BAD, ids=[says for _, says in BAD])
def test_what_is_no_call_is_said(data: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        from_json({"arguments": {"x": data}})
