"""Lists of tensors and other things."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import llm_op_guard as og
from llm_op_guard import api
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.guard import functions, memory
from llm_op_guard.guard.explain import explain


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def said(body: str, **arguments: Any) -> list[tuple[str, str, str]]:
    found = explain(parse_body(body, "operator", tuple(arguments)), arguments)
    return [(v.rule_id, v.observed, v.expected) for v in found]


def test_every_item_is_of_the_type_and_symbols_are_shared() -> None:
    body = "xs: list[T[_, D] @ dev]\nw: T[D] | None"
    assert said(body, xs=[t(2, 4), t(3, 4)], w=t(4)) == []
    assert said(body, xs=(), w=None) == []
    assert said(body, xs=[t(2, 4), t(3, 5), t(1, 4)], w=t(4)) == [("xs[_].shape", "xs[1].shape[1] = 5", "D = 4")]
    assert said(body, xs=[t(2, 4), None], w=None) == [("xs[_].type", "xs[1] is None", "T[_, D] @ dev")]
    assert said(body, xs=t(2, 4), w=None) == [("xs.type", "xs is a tensor", "list[T[_, D] @ dev]")]
    assert said(body, xs=[t(2, 4), t(2, 4, dtype=torch.bfloat16)], w=t(4)) == [
        ("xs[_].dtype", "xs[1].dtype = bfloat16", "T = float32")
    ]


def test_lists_of_numbers_and_of_tuples() -> None:
    assert said("xs: list[int]", xs=[1, 2]) == []
    assert said("xs: list[int]", xs=[1, "2"]) == [("xs[_].type", "xs[1] is a str", "int")]
    body = "xs: list[(int, floating[D])]"
    assert said(body, xs=[(1, t(4)), (2, t(4))]) == []
    assert said(body, xs=[(1, t(4)), (2, t(5)), (3, t(4))]) == [("xs[_][1].shape", "xs[1][1].shape[0] = 5", "D = 4")]
    assert said("xs: optional[list[list[int]]]", xs=[[1], [2, 3]]) == []


def test_a_guard_with_lists_checks_arguments_and_results() -> None:
    @og.guard("xs: list[T[_, D]]\nreturns: list[T[_, 2 * D]]\nrequire(len(result) == len(xs), id='as_many')")
    def widen(xs: Any, times: int = 2, lost: int = 0) -> Any:
        return [torch.cat([x] * times, dim=1) for x in xs[lost:]]

    assert len(widen([t(2, 4), t(3, 4)])) == 2
    with pytest.raises(og.GuardError) as caught:
        widen([t(2, 4), t(3, 4)], times=3)
    assert [(v.rule_id, v.expected) for v in caught.value.violations] == [
        ("result[_].shape", "2 * D = 8"),
    ]
    with pytest.raises(og.GuardError, match="as_many"):
        widen([t(2, 4), t(3, 4)], lost=1)
    with pytest.raises(og.GuardError, match=r"xs\[1\]\.shape"):
        widen([t(2, 4), t(3, 5), t(2, 4)])
    with og.policy(A="off"):
        assert len(widen([t(2, 4), t(3, 5)])) == 2


def test_the_argument_of_a_list_is_shown() -> None:
    @og.guard("xs: list[T[_, D]]")
    def operator(xs: Any) -> None: ...

    with pytest.raises(og.GuardError) as caught:
        operator([t(2, 4), t(3, 5), t(2, 4)])
    (violation,) = caught.value.violations
    assert violation.argument == "xs[1]"
    assert [tensor.shape for tensor in violation.tensors] == [(2, 4), (3, 5), (2, 4)]
    assert re.search(r"xs\[1\] +float32\[3, 5\] cpu   <- here", str(caught.value))


def test_compiled_callers_are_left_alone() -> None:
    @og.guard("xs: list[floating[D]]")
    def total(xs: Any) -> Any:
        return sum(xs)

    compiled = torch.compile(lambda xs: total(xs) + 1, fullgraph=True, backend="eager")
    assert compiled([t(2), t(2)]).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("xs: list[int] | list[str]", "cannot be told apart"),
        ("xs: list[int] | (int, int)", "cannot be told apart"),
        ("xs: list[foo]", "unknown type 'foo'"),
    ],
)
def test_lists_that_are_refused(body: str, problem: str) -> None:
    with pytest.raises(og.ContractError, match=problem):
        parse_body(body, "operator", ("xs",))


def test_odd_tensors_in_lists_are_left_alone(no_alarm: None) -> None:
    def same(x: Any, y: Any = None) -> Any:
        return x

    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert og.guard("x: list[floating[A]]")(same)([nested])[0] is nested
    lazy = torch.nn.UninitializedParameter()
    assert og.guard("y: list[int]\nx: floating[A]")(same)(lazy, [1]) is lazy
    assert len(og.guard("y: list[int]\nrequire(3 in x)")(same)([t(2, 3)] * 2, [1])) == 2
    sparse = t(2, 3).to_sparse()
    assert og.guard("y: list[int]\nrequire(finite(x[:, :1]))")(same)(sparse, [1]) is sparse


# ---------------------------------------------------------------- as in a check that is written as source


def test_a_suspicion_keeps_nothing_from_being_checked_after_the_call() -> None:
    @og.guard("""
        xs: list[floating[N]]
        require(N > 1, id="more", certain=False)
        ensure(len(result) == N, id="one_each")
        remember(self, rows=N)
    """)
    def operator(self: Any, xs: Any, count: int) -> list[int]:
        return [0] * count

    class Owner:
        pass

    owner = Owner()
    with pytest.warns(og.GuardWarning, match="more"), pytest.raises(og.GuardError, match="one_each"):
        operator(owner, [t(1)], 2)
    operator(owner, [t(1)], 1)
    assert memory.recall(owner, "rows") == 1


def test_values_are_left_alone_where_their_rules_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    @og.guard("""
        xs: list[floating[N]]
        m = highest(y)
        require(m > 0)
        remember(self, rows=N)
    """)
    def operator(self: Any, xs: Any, y: Any) -> None: ...

    class Owner:
        pass

    asked: list[Any] = []
    monkeypatch.setitem(functions.IMPLEMENTATIONS, "highest", lambda x: asked.append(x) or 1)
    og.set_policy(B="off")
    operator(Owner(), [t(1)], t(2))
    assert asked == []
    og.set_policy(B="raise")
    operator(Owner(), [t(1)], t(2))
    assert asked != []


def test_under_jit_trace_it_steps_aside_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    @og.guard("xs: list[floating[N]]\nrequire(N > 1)")
    def operator(xs: Any) -> torch.Tensor:
        return xs[0] + 1

    torch.jit.trace(lambda x: operator([x, x]), (t(1),), check_trace=False)
    assert [w for w in recwarn if issubclass(w.category, torch.jit.TracerWarning)] == []


def test_a_compiled_program_makes_facts_unknown() -> None:
    @og.guard("xs: list[floating[N]]\nremember(self, listed=N)")
    def plan(self: Any, xs: Any) -> torch.Tensor:
        return xs[0] + 1

    @og.guard("x: floating[N]\nrequire(N == recall(self, 'listed'), id='as_planned')")
    def run(self: Any, x: Any) -> None: ...

    class Owner:
        pass

    owner = Owner()
    plan(owner, [t(2)])
    with pytest.raises(og.GuardError):
        run(owner, t(3))
    torch.compile(plan, fullgraph=True, backend="eager")(owner, [t(3)])
    run(owner, t(3))
    torch.compiler.reset()


def test_checked_calls_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.tally, "counting", True)

    @og.guard("xs: list[floating[N]]")
    def operator(xs: Any) -> None: ...

    before = api.tally.checks
    operator([t(1)])
    operator([t(2)])
    assert api.tally.checks == before + 2


def test_a_rule_that_many_items_break_is_told_once() -> None:
    @og.guard("stop: list[str]\npairs: None | list[(int, str)]\nx: None | list[any[D]]")
    def operator(stop: Any, pairs: Any = None, x: Any = None) -> None: ...

    def told(*arguments: Any) -> list[tuple[str, str | None, str]]:
        with pytest.raises(og.GuardError) as caught:
            operator(*arguments)
        return [(v.rule_id, v.argument, v.observed) for v in caught.value.violations]

    assert told(["a", 1]) == [("stop[_].type", "stop[1]", "stop[1] is an int")]
    assert told(["a", 1, "b", 2]) == [("stop[_].type", "stop[1]", "stop[1] is an int (and 1 more item)")]
    assert told([1] * 9_000) == [("stop[_].type", "stop[0]", "stop[0] is an int (and 8999 more items)")]
    assert told([], [(1, "a"), (1, 2), ("a", 3)]) == [
        ("pairs[_][1].type", "pairs[1][1]", "pairs[1][1] is an int (and 1 more item)"),
        ("pairs[_][0].type", "pairs[2][0]", "pairs[2][0] is a str"),
    ]
    assert told([], None, [torch.ones(3), torch.ones(4), torch.ones(3), torch.ones(5)]) == [
        ("x[_].shape", "x[1]", "x[1].shape[0] = 4 (and 1 more item)")
    ]
    assert len(og.record.violations) == 6


@pytest.mark.parametrize(
    ("condition", "broken", "kept"),
    [
        ("xs", [()], [(1,), (t(2),), ("a", object())]),
        ("not xs", [(1,), (t(2),), (object(),)], [()]),
        ("not xs or n == 1", [(1,), (t(2),)], [()]),
        ("(n if xs else 1) == 1", [(1,), (t(2),)], [()]),
    ],
)
def test_a_list_is_true_where_it_has_items_whatever_they_are(
    condition: str, broken: list[tuple[Any, ...]], kept: list[tuple[Any, ...]]
) -> None:
    @og.guard(f"require({condition}, id='it')")
    def operator(xs: Any, n: int = 2) -> None:
        pass

    for kind in (list, tuple):
        for items in kept:
            operator(kind(items))
        for items in broken:
            with pytest.raises(og.GuardError, match=r"rule +it "):
                operator(kind(items))


@pytest.mark.parametrize("declared", ["", "xs: list[any[_]]\n"])
def test_a_branch_for_a_list_of_tensors_is_taken(declared: str) -> None:
    @og.guard(f"{declared}if xs:\n    require(n == 1, id='one')\nelse:\n    require(n == 2, id='two')")
    def operator(xs: Any, n: int) -> None:
        pass

    operator([t(2)], 1)
    operator([], 2)
    with pytest.raises(og.GuardError, match="one"):
        operator([t(2)], 2)
    with pytest.raises(og.GuardError, match="two"):
        operator([], 1)


@pytest.mark.parametrize(
    "condition", ["xs == (1, 2)", "xs != (1, 2)", "n in xs", "xs in ((1,), (2,))", "xs < (1,)", "max(xs) < 1"]
)
def test_what_is_asked_of_items_that_are_no_numbers_does_not_apply(condition: str) -> None:
    @og.guard(f"require({condition}, id='it', hint=f'{{xs}}')\nrequire(n == 2, id='other', hint=f'{{xs}}')")
    def operator(xs: Any, n: int) -> None:
        pass

    operator([t(2)], 2)
    operator([object()], 2)
    with pytest.raises(og.GuardError) as caught:
        operator([t(2)], 3)
    assert [(v.rule_id, v.hint) for v in caught.value.violations] == [("other", None)]


@pytest.mark.parametrize(("rows", "columns", "judged"), [(1, 100_000, True), (1, 100_001, False), (320, 320, False)])
def test_sequences_are_gone_through_to_a_limit(rows: int, columns: int, judged: bool) -> None:
    """What is longer does not apply, and is there all the same."""
    xs: Any = [0] * columns if rows == 1 else [[0] * columns] * rows
    assert bool(said("require(xs == (1, 2), id='it')", xs=xs)) is judged
    assert said("require(not xs, id='none')", xs=xs)


def test_no_list_is_shown() -> None:
    body = "m = n\nrequire((m if n else n) == (1, 2), id='it', hint=f'{n}')"
    (found,) = explain(parse_body(body, "operator", ("n",)), {"n": [7] * 17})
    assert (found.observed, found.hint) == ("m if n else n = a tuple of 17 items", "a tuple of 17 items")
    (found,) = explain(parse_body(body, "operator", ("n",)), {"n": [7] * 16})
    assert "7, 7" in found.observed


@pytest.mark.parametrize(
    ("condition", "cost"),
    [
        ("max(xs) < 8", "B"),
        ("2 in xs", "B"),
        ("xs == (1, 2)", "B"),
        ("len(xs) < 8", "A"),
        ("xs[0] < 8", "A"),
        ("max(xs[0], 2) < 8", "A"),
        ("xs is not None", "A"),
        ("not xs", "A"),
        ("max(shape) < 8", "A"),
        ("2 in shape", "A"),
    ],
)
def test_what_goes_through_a_list_reads_values(condition: str, cost: str) -> None:
    contract = parse_body(f"xs: None | list[int]\nrequire({condition}, id='it')", "operator", ("xs", "shape"))
    assert {rule.id: rule.cost_class for rule in contract.rules}["it"] == cost
