"""`for`, and `all`, `any` and `sum` over the sequences of a call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import llm_op_guard as og
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.guard.explain import explain


def said(body: str, **arguments: Any) -> list[tuple[str, str, str | None]]:
    found = explain(parse_body(body, "operator", tuple(arguments)), arguments)
    return [(v.rule_id, v.observed, v.argument) for v in found]


def test_a_tuple_that_is_written_out_is_as_many_rules_of_class_a() -> None:
    body = "for x in (q, k):\n    x: any[..., D]\n    require(dense(x), id='dense')\n    require(x.ndim == 2)"
    contract = parse_body(body, "operator", ("q", "k"))
    assert {rule.cost_class for rule in contract.rules} == {"A"}
    assert [r.id for r in contract.rules if "." not in r.id] == ["dense (q)", "dense (k)"]
    q, k = torch.ones(2, 3), torch.ones(3, 2).t()
    assert said(body, q=q, k=q) == []
    assert [(rule, argument) for rule, _, argument in said(body, q=q, k=k)] == [("dense (k)", "k")]
    assert [rule for rule, _, _ in said(body, q=q, k=torch.ones(2, 4))] == ["k.shape"]
    assert [rule for rule, _, _ in said(body, q=q, k=torch.ones(3))] == ["k.ndim == 2"]


def test_a_loop_with_a_condition_takes_what_is_read_apart_at_the_call() -> None:
    body = "require(all(a < b for a, b in (q, k) if a > 0), id='r')"
    assert said(body, q=(1, 2), k=(0, 0)) == []
    assert said(body, q=(1, 2), k=(2, 1)) == [("r", "a = 2, b = 1 at item 1 of (q, k)", "q")]


def test_several_names_and_conditions_in_a_loop_that_is_written_out() -> None:
    body = "for x, n in ((q, 1), (k, 2)):\n    if n > 1:\n        require(x.ndim == n, id='rank')"
    assert said(body, q=torch.ones(1, 1), k=torch.ones(2, 2)) == []
    assert [rule for rule, _, _ in said(body, q=torch.ones(1), k=torch.ones(2))] == ["rank ((k, 2))"]


def test_a_sequence_of_the_call_is_one_rule_about_all_items() -> None:
    body = "for t in ids:\n    require(0 <= t < n, id='ids')"
    contract = parse_body(body, "operator", ("ids", "n"))
    assert [(rule.id, rule.cost_class) for rule in contract.rules] == [("ids", "B")]
    for good in ([], [0, 2], (1,), None, {0: "a"}, iter([9])):
        assert said(body, ids=good, n=3) == []
    assert said(body, ids=[0, 3, 9], n=3) == [("ids", "t = 3, n = 3 at item 1 of ids", "ids")]


def test_items_to_which_a_condition_does_not_apply_count_for_nothing() -> None:
    body = "require(all(b.count >= 1 for b in blocks), id='owned')"
    owned, free, odd = SimpleNamespace(count=1), SimpleNamespace(count=0), object()
    assert said(body, blocks=[owned, odd]) == []
    assert said(body, blocks=[odd, free]) == [("owned", "b.count = 0 at item 1 of blocks", "blocks")]


def test_zip_enumerate_items_range_any_and_sum() -> None:
    assert said("require(all(a == b for a, b in zip(x, y)), id='r')", x=[1, 2], y=(1, 3))[0][1] == (
        "a = 2, b = 3 at item 1 of zip(x, y)"
    )
    assert said("require(all(i == t for i, t in enumerate(x)), id='r')", x=[0, 1]) == []
    assert said("require(all(v > 0 for k, v in items(x)), id='r')", x={"a": 1, "b": 0})[0][0] == "r"
    assert said("require(any(t == 2 for t in x), id='r')", x=[1, 3])[0][:2] == ("r", "no item of x (of 2)")
    assert said("require(sum(s for s in x) * 2 == n, id='r')", x=[1, 2], n=6) == []
    assert said("require(sum(s for s in x if s > 1) == n, id='r')", x=[1, 2], n=3)[0][0] == "r"
    assert said("require(all(stride(x, i) % 8 == 0 for i in (0, 1)), id='r')", x=torch.ones(2, 8))[0][0] == "r"
    assert said("require(sum(i for i in range(n)) == 3, id='r')", n=3) == []
    assert said("require(sum(i for i in range(n)) == 3, id='r')", n=10**9) == []


def test_modules_are_gone_through_without_running_code() -> None:
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 3), torch.nn.Linear(2, 4)])
    assert said("require(all(m.out_features == 3 for m in layers), id='r')", layers=layers) == [
        ("r", "m.out_features = 4 at item 1 of layers", "layers")
    ]


def test_promises_about_every_item() -> None:
    @og.guard("for b in result:\n    ensure(b == n, id='all_n')")
    def operator(n: int, blocks: list[int]) -> list[int]:
        return blocks

    assert operator(1, [1, 1]) == [1, 1]
    with pytest.raises(og.GuardError, match="b = 2, n = 1 at item 1 of result"):
        operator(1, [1, 2])


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            "for x in q:\n    x: any[B]",
            "a loop over a sequence of the call holds require, ensure and if; it declares nothing: a declaration "
            "stands outside, and x: list",
        ),
        (
            "for x in q:\n    m = x\n    require(m > 1)",
            "if; it gives no names: write the expression in place of the name",
        ),
        ("for x in (q, k):\n    m = x", "a loop gives no names: write the expression in place of the name"),
        ("for x, y in (q, k):\n    require(x == y)", "each item has as many parts as the loop has names"),
        (
            "require(all(a == b for a, b in ((q, k), (q, k, q))))",
            r"1:41: each item has as many parts as the loop has names\n.*\n {44}\^",
        ),
        ("require(any(a == b for a, b in (q, k)))", "1:33: each item has as many parts as the loop has names"),
        ("require(sum(a for a, b in ((q,), (q, k))) > 0)", "1:28: each item has as many parts as the loop has names"),
        ("require(all(a > b for a, b in ((q, k, q), (q, k)) if a > 0))", "1:32: each item has as many parts"),
        ("for x in q.items():\n    require(x)", "a loop goes over what is read or written out"),
        ("for x.y in q:\n    require(x)", "a loop gives names"),
        ("for finite in q:\n    require(finite)", "a loop gives names"),
        ("for x in q:\n    require(x > 0)\nelse:\n    require(k)", "not a statement of the language"),
        ("require(all(q))", r"written as all\(condition for item in q\)"),
        ("require(all(q, k))", "written as all"),
        (
            "for a in (q, k):\n    require(all(a > q for q in k))",
            "'q' is the name of a loop within and of something else",
        ),
        ("require(all(all(a > q for q in k) for a in (q, k)))", "'q' is the name of a loop within"),
        ("for v in (*q, k):\n    require(v > 0)", "written one by one"),
        ("for a, a in q:\n    require(a > 0)", "a loop gives each name once"),
        (f"for v in ({'q, ' * 200}):\n    require(v > 0)", "the loop stands for too much"),
        (f"require(sum(v for v in ({'q, ' * 2000})) > 0)", "the loop stands for too much"),
        ("require(all(x for x in q for y in k))", "written as all"),
        ("require(all(z > 0 for x in q))", "unknown name 'z'"),
        ("require([x for x in q])", "comprehensions are not in the language"),
    ],
)
def test_loops_that_are_refused(body: str, problem: str) -> None:
    with pytest.raises(og.ContractError, match=problem):
        parse_body(body, "operator", ("q", "k"))


def test_nested_loops_that_stand_for_too_much_are_refused_at_once() -> None:
    for depth in (11, 16):
        text = "".join(" " * i + f"for v{i} in (q, k):\n" for i in range(depth)) + " " * depth + "require(v0 < 10)"
        with pytest.raises(og.ContractError, match="the loop stands for too much"):
            parse_body(text, "operator", ("q", "k"))
    total = "q"
    for i in range(12):
        total = f"sum({total} for v{i} in (1, 2, 3))"
    with pytest.raises(og.ContractError, match="the loop stands for too much"):
        parse_body(f"require({total} > 0)", "operator", ("q",))


def test_odd_items_do_not_apply() -> None:
    tensors = [torch.ones(2, 3), torch.ones(2, 3)]
    assert said("for v in x:\n    require(v in y)", x=(1,), y=tensors) == []
    assert said("require(all(finite(v[:1]) for v in x))", x=[torch.ones(2, 3).to_sparse_csr()]) == []
    for rule in ("finite(x[::-1])", "finite(x[::n])", "finite(x[n, :])", "max(y) == 1"):
        assert said(f"require({rule})", x=torch.ones(2, 3), n=2**70 if "[n" in rule else 0, y=tensors) == []
