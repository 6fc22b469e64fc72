"""What a diagnosis tells of the elements of a tensor: the first that breaks the rule, and how many; nothing more."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import llm_op_guard as og
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.guard import functions
from llm_op_guard.guard.explain import explain

NAN = float("nan")
LOWEST = torch.finfo(torch.float32).min


def said(rule: str, **arguments: Any) -> tuple[str, str, str | None]:
    """What the one broken rule observed and expected, and which argument it blames."""
    given = {n: torch.tensor(v) if isinstance(v, list) else v for n, v in arguments.items()}
    (found,) = explain(parse_body(f"require({rule}, id='r')", "operator", tuple(given)), given)
    return found.observed, found.expected, found.argument


@pytest.mark.parametrize(
    ("rule", "x", "observed", "expected"),
    [
        ("finite(x)", [[1.0, NAN]], "x[0, 1] = nan (of 2, 1 element is wrong)", "finite values"),
        ("within(x, 0, n)", [3, 9, 8], "x[1] = 9 (of 3, 2 elements are wrong, this one first)", "0 <= x < 5 (n)"),
        ("within(x=x, high=9, low=0)", [9], "x[0] = 9 (of 1, 1 element is wrong)", "0 <= x < 9"),
        ("within(x, -1, 9, allow=(-100,))", [9], "x[0] = 9 (of 1, 1 element is wrong)", "-1 <= x < 9 or (-100,)"),
        ("only(x, 0, n, -1)", [0, 5, -1, 7], "x[3] = 7 (of 4, 1 element is wrong)", "only 0 or 5 (n) or -1"),
        ("all_true(x)", [[True], [False]], "x[1, 0] = False (of 2, 1 element is wrong)", "true values"),
        (
            "nondecreasing(x)",
            [[0, 2], [7, 3]],
            "x[1, 1] = 3 after x[1, 0] = 7 (of 4, 1 element is wrong)",
            "no value below the one before",
        ),
        (
            "nondecreasing(x)",
            [0.0, NAN, 1.0],
            "x[1] = nan after x[0] = 0.0 (of 3, 2 elements are wrong, this one first)",
            "no value below the one before",
        ),
        ("unique(x)", [4, 7, 9, 7], "x[1] = x[3] = 7 (of 4, 1 repeat)", "no value twice"),
        ("unique(x)", [7, 7, 7], "x[0] = x[1] = 7 (of 3, 2 repeats, this one first)", "no value twice"),
        (
            "any_per_row(x)",
            [[[0, 1], [0, 0]]],
            "x[0, 1] has no true value (of 2, 1 row is wrong)",
            "a true value in every row",
        ),
        ("any_per_row(x)", [0, 0], "x has no true value (of 1, 1 row is wrong)", "a true value in every row"),
        (
            "live_rows(x)",
            [[[0.0, LOWEST], [LOWEST, LOWEST]], [[-1e9, -1e9], [0.0, 0.0]]],
            "x[0, 1] keeps no key (of 4, 2 rows are dead, this one first)",
            "a key in every row",
        ),
        ("live_rows(negated(x))", [[1, 1]], "negated(x)[0] keeps no key (of 1, 1 row is dead)", "a key in every row"),
        (
            "equal(x, consecutive(x))",
            [[4, 5, 7]],
            "x[0, 2] = 7, consecutive(x)[0, 2] = 6 (of 3, 1 pair differs)",
            "equal(x, consecutive(x))",
        ),
        (
            "equal(x[:, 1:], x[:, :1])",
            [[4, 5], [6, 7]],
            "x[0, 1] = 5, x[0, 0] = 4 (of 2, 2 pairs differ, this one first)",
            "equal(x[:, 1:], x[:, :1])",
        ),
        (
            "equal(x, positions_of(x), where=x)",
            [[0, 1, 1]],
            "x[0, 1] = 1, positions_of(x)[0, 1] = 0 (of 2, 1 pair differs)",
            "equal(x, positions_of(x), where=x)",
        ),
        ("equal(x, x[1:])", [1, 2], "x.shape = (2,), x[1:].shape = (1,)", "equal(x, x[1:])"),
    ],
)
def test_a_rule_about_elements_tells_the_first_that_breaks_it(rule: str, x: Any, observed: str, expected: str) -> None:
    assert said(rule, x=x, n=5) == (observed, expected, "x")


@pytest.mark.parametrize(
    ("rule", "x", "observed"),
    [
        ("highest(x) < n", [[1, 2], [3, 70000]], "highest(x) = 70000 at x[1, 1], n = 5"),
        ("lowest(x) >= 0", [3, -1, -1], "lowest(x) = -1 at x[1]"),
        ("absmax(x) <= 2.5", [1.0, -3.0], "absmax(x) = 3.0 at x[1]"),
        ("absmax(x) <= 2.5", [1.0, NAN], "absmax(x) = nan at x[1]"),
        ("first(x) == 0", [[4, 5]], "first(x) = 4 at x[0, 0]"),
        ("last(x) == n", [[4, 6]], "last(x) = 6 at x[0, 1], n = 5"),
        ("highest(x) < 3", torch.tensor(4), "highest(x) = 4"),
        ("count(x, 0) == 0", [1, 0, 0], "count(x, 0) = 2 (of 3, first at x[1])"),
        ("count(x[:, -1], 0) == 0", [[1, 0], [1, 1]], "count(x[:, -1], 0) = 1 (of 2, first at x[0, 1])"),
        ("count(x, 0) == n", [1, 2], "count(x, 0) = 0, n = 5"),
        ("highest(x) // 4 < n", [1, 80], "highest(x) // 4 = 20, highest(x) = 80 at x[1], n = 5"),
        ("-lowest(x) < n", [1, -9], "-lowest(x) = 9, lowest(x) = -9 at x[1], n = 5"),
        ("abs(first(x)) < n", [-9, 1], "abs(first(x)) = 9, first(x) = -9 at x[0], n = 5"),
        ("(highest(x) if n > 3 else lowest(x)) < 2", [1, 8],
         "highest(x) if n > 3 else lowest(x) = 8, highest(x) = 8 at x[1]"),
        ("0 <= lowest(x) <= highest(x) < n", [0, 7], "lowest(x) = 0 at x[0], highest(x) = 7 at x[1], n = 5"),
        ("absmax(x[:, :1]) == 0", [[0, 5], [2, 5]], "absmax(x[:, :1]) = 2 at x[1, 0]"),
        ("highest(positions_of(x)) < 1", [[1, 1]], "highest(positions_of(x)) = 1 at positions_of(x)[0, 1]"),
    ],
)  # fmt: skip
def test_a_value_is_told_with_its_place(rule: str, x: Any, observed: str) -> None:
    assert said(rule, x=x, n=5) == (observed, rule, "x")


@pytest.mark.parametrize(
    ("rule", "observed", "expected", "argument"),
    [
        ("finite(x) and finite(y)", "y[1] = inf (of 2, 1 element is wrong)", "finite values", "y"),
        ("finite(x) and (n > 3 and highest(x) < 2)", "highest(x) = 3.0 at x[1]", "highest(x) < 2", "x"),
        (
            "finite(y) or all_true(x)",
            "y[1] = inf (of 2, 1 element is wrong), x[0] = 0.0 (of 2, 1 element is wrong)",
            "finite(y) or all_true(x)",
            "y",
        ),
        ("not finite(x)", "finite(x) = True", "not finite(x)", "x"),
        ("not highest(x) == 3", "highest(x) = 3.0 at x[1]", "not highest(x) == 3", "x"),
        ("not only(x, 0, 3) or highest(x) == 0", "only(x, 0, 3) = True, highest(x) = 3.0 at x[1]",
         "not only(x, 0, 3) or highest(x) == 0", "x"),
        ("not (n == 5 and finite(x))", "n = 5, finite(x) = True", "not (n == 5 and finite(x))", "x"),
        ("not (n == 4 or finite(x))", "finite(x) = True", "not (n == 4 or finite(x))", "x"),
        ("finite(y) if n == 5 else finite(x)", "n = 5, y[1] = inf (of 2, 1 element is wrong)",
         "finite(y) if n == 5 else finite(x)", "y"),
    ],
)  # fmt: skip
def test_parts_of_a_condition(rule: str, observed: str, expected: str, argument: str) -> None:
    assert said(rule, x=[0.0, 3.0], y=[1.0, math.inf], n=5) == (observed, expected, argument)


def test_an_item_of_a_loop_is_named_with_its_element() -> None:
    xs = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, NAN])]
    ids = [torch.tensor([[0, 4], [9, 1]])]
    assert said("all(finite(t) for t in xs)", xs=tuple(xs)) == (
        "t[1] = nan (of 2, 1 element is wrong) at item 1 of xs",
        "finite values",
        "xs",
    )
    assert said("all(within(t, 0, n) for i, t in enumerate(xs))", xs=tuple(ids), n=9) == (
        "t[1, 0] = 9 (of 4, 1 element is wrong) at item 0 of enumerate(xs)",
        "0 <= t < 9 (n)",
        "xs",
    )
    assert said("all(highest(t[:, 0]) < 9 for t in xs)", xs=tuple(ids))[0] == (
        "highest(t[:, 0]) = 9 at t[1, 0] at item 0 of xs"
    )
    assert said("n == 2 or all(finite(t) for t in xs)", xs=tuple(xs), n=1)[0] == (
        "n = 1, t[1] = nan (of 2, 1 element is wrong) at item 1 of xs"
    )
    assert said("not any(finite(t) for t in xs)", xs=tuple(xs))[0] == "finite(t) = True at item 0 of xs"
    assert said("not all(highest(t) < 10 for t in xs)", xs=tuple(ids))[0] == "every item of xs (of 1)"
    assert said("any(all_true(t) for t in xs)", xs=tuple(ids))[0] == "no item of xs (of 1)"
    assert said("all(finite(t) for t in (x, y))", x=xs[0], y=xs[1]) == (
        "y[1] = nan (of 2, 1 element is wrong)",
        "finite values",
        "y",
    )
    assert said("all(all(finite(t) for t in ts) for ts in xs)", xs=(xs[:1], xs))[0] == (
        "t[1] = nan (of 2, 1 element is wrong) at item 1 of ts at item 1 of xs"
    )


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ("x[1]", "x[1, 0, 2]"),
        ("x[-1, 0]", "x[1, 0, 2]"),
        ("x[n, :1, 1:]", "x[1, 0, 2]"),
        ("x[1:][0][:1][0, ::2]", "x[1, 0, 2]"),
        ("x[..., ::2]", "x[1, 0, 2]"),
        ("x[..., 2]", "x[1, 0, 2]"),
        ("x[1, ..., 1:]", "x[1, 0, 2]"),
        ("x[...]", "x[1, 0, 2]"),
        ("x[True]", "x[True][0, 1, 0, 2]"),
        ("x[None, 1]", "x[None, 1][0, 0, 2]"),
        ("box.l[0][1:]", "box.l[0][1, 0, 2]"),
    ],
)
def test_an_element_of_a_part_is_told_by_its_place_in_the_whole(part: str, place: str) -> None:
    x = torch.zeros(2, 2, 3)
    x[1, 0, 2] = 9
    arguments = {"x": x, "n": 1, "box": SimpleNamespace(l=[x])}
    contract = parse_body(f"require(within({part}, 0, 5))", "operator", tuple(arguments))
    (found,) = explain(contract, arguments)
    assert found.observed.startswith(f"{place} = 9.0 (of "), found.observed


def test_a_row_of_a_part_is_told_as_far_as_its_index_goes() -> None:
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[2, :2] = False
    for part, place in (("m[1:]", None), ("m[1:, :2]", "m[1:, :2][1]"), ("m[:, :2]", "m[:, :2][2]")):
        found = explain(parse_body(f"require(any_per_row({part}))", "operator", ("m",)), {"m": mask})
        assert [v.observed.partition(" has")[0] for v in found] == ([place] if place else [])
    mask[2] = False
    (found_row,) = explain(parse_body("require(any_per_row(m[1:]))", "operator", ("m",)), {"m": mask})
    assert found_row.observed.startswith("m[2] has no true value")


def test_no_other_contents_are_shown() -> None:
    x = torch.tensor([[1234567, 1], [7654321, 1]])
    for rule in (
        "within(x, 0, 2)",
        "unique(x)",
        "highest(x) < 2",
        "equal(x[:1], x[1:])",
        "only(x, 1)",
        "first(x) == 0",
    ):
        told = " ".join(str(part) for part in said(rule, x=x))
        shown = {number for number in ("1234567", "7654321") if number in told}
        assert len(shown) <= (2 if rule.startswith("equal") else 1)


def test_where_a_locator_fails_the_rule_is_told_without_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise KeyError(arguments)

    for name in ("finite", "highest", "equal"):
        monkeypatch.setitem(functions.LOCATORS, name, fail)
    x = [NAN]
    assert said("finite(x)", x=x)[:2] == ("x = float32[1]", "finite(x)")
    assert said("highest(x) < 3", x=x)[0] == "highest(x) = nan"
    assert said("equal(x, y)", x=x, y=x)[0] == "x = float32[1], y = float32[1]"


def test_the_whole_message() -> None:
    @og.guard("ids: int64[B, L]\nrequire(highest(ids) < n, id='in_table')")
    def look_up(ids: Any, n: int) -> None: ...

    with pytest.raises(og.GuardError) as caught:
        look_up(torch.tensor([[1, 2], [3, 70000]]), 50257)
    assert "highest(ids) = 70000 at ids[1, 1], n = 50257" in str(caught.value)


# ---------------------------------------------------------------- how near to the largest number


def observed_of(contract: str, **arguments: torch.Tensor) -> str:
    (violation,) = explain(parse_body(contract, "f", tuple(arguments)), arguments)
    return violation.observed


def test_an_infinity_is_told_with_how_near_the_others_are() -> None:
    x = torch.tensor([60000.0, float("inf"), 1.0], dtype=torch.float16)
    assert observed_of("require(finite(x))", x=x) == (
        "x[1] = inf (of 3, 1 element is wrong); the largest finite one is 60000, 92% of what float16 holds"
    )
    for dtype, near in ((torch.float16, False), (torch.bfloat16, False)):
        y = torch.tensor([16000.0, float("inf")]).to(dtype)
        assert ("largest finite" in observed_of("require(finite(x))", x=y)) is near, dtype
    quarter = torch.tensor([65504 / 4, float("nan")], dtype=torch.float16)
    assert "16376, 25% of what float16 holds" in observed_of("require(finite(x))", x=quarter)
    assert observed_of("require(finite(x))", x=torch.full((2,), float("nan"))).endswith("this one first)")


def test_another_argument_that_is_near_the_largest_number_is_told_of() -> None:
    bad = torch.tensor([1.0, float("nan")], dtype=torch.float16)
    scores = torch.tensor([-64992.0, 3.0], dtype=torch.float16)
    told = "; scores comes to 64992, 99% of what float16 holds"
    assert observed_of("require(finite(x))\nif has(scores): y = 1", x=bad, scores=scores).endswith(told)
    filled = torch.full((2,), torch.finfo(torch.float16).min, dtype=torch.float16)  # as masks are
    for harmless in (filled, scores.float(), torch.tensor([2**15]), torch.tensor([float("inf")]), torch.empty(0)):
        assert "scores" not in observed_of("require(finite(x))\nif has(scores): y = 1", x=bad, scores=harmless)
