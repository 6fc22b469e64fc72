"""Where a value rule is broken: the first element, row or pair, and how many; on every dtype and kind of tensor."""

from __future__ import annotations

import ast
import contextlib
import itertools
import math
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import llm_op_guard  # noqa: F401 - registers the functions
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.contract.vocabulary import DTYPE_NAMES, FUNCTIONS
from llm_op_guard.guard.evaluate import Values
from llm_op_guard.guard.explain import explain
from llm_op_guard.guard.functions import Element, Located
from llm_op_guard.guard.reading import INAPPLICABLE
from llm_op_guard.values import locate, plain
from llm_op_guard.values.pieces import pieces

NAN = float("nan")
LOWEST = torch.finfo(torch.float32).min


def one(index: tuple[int, ...], value: Any, count: int, total: int, argument: str = "x") -> Located:
    return Located((Element(argument, index, value),), count, total)


def pair(first: Element, second: Element, count: int, total: int) -> Located:
    return Located((first, second), count, total)


@pytest.mark.parametrize(
    ("name", "arguments", "found"),
    [
        ("finite", ([[0.0, 1.0], [math.inf, -math.inf]],), one((1, 0), math.inf, 2, 4)),
        ("within", ([[5, 7], [-1, 9]], 0, 6, -1), one((0, 1), 7, 2, 4)),
        ("within", (3, 0, 3), one((), 3, 1, 1)),
        ("only", ([0, 1, 2, 3], 0, 1), one((2,), 2, 2, 4)),
        ("all_true", ([[1, 1, 0]],), one((0, 2), 0, 1, 3)),
        ("all_true", ([[True], [False]],), one((1, 0), False, 1, 2)),
        ("nondecreasing", ([[0, 3, 3], [5, 4, 1]],), pair(Element("x", (1, 1), 4), Element("x", (1, 0), 5), 2, 6)),
        ("unique", ([4, 7, 7, 4, 7],), pair(Element("x", (1,), 7), Element("x", (2,), 7), 3, 5)),
        ("unique", ([[3, 1], [2, 3]],), pair(Element("x", (0, 0), 3), Element("x", (1, 1), 3), 1, 4)),
        ("any_per_row", ([[[0, 1], [0, 0]], [[0, 0], [1, 0]]],), one((0, 1), None, 2, 4)),
        ("any_per_row", ([0, 0],), one((), None, 1, 1)),
        ("live_rows", ([[0.0, LOWEST], [LOWEST, LOWEST]],), one((1,), None, 1, 2, "mask")),
        ("live_rows", ([[True], [False], [False]],), one((1,), None, 2, 3, "mask")),
        ("equal", ([1, 2, 3], [1, 5, 6]), pair(Element("a", (1,), 2), Element("b", (1,), 5), 2, 3)),
        ("equal", ([1, 2, 3], [1, 5, 6], [1, 0, 1]), pair(Element("a", (2,), 3), Element("b", (2,), 6), 1, 2)),
        ("count", ([[1, 0], [0, 0]], 0), one((0, 1), 0, 3, 4)),
        ("lowest", ([[3, -2], [5, -2]],), one((0, 1), -2, 2, 4)),
        ("highest", ([[3, -2], [5, 0]],), one((1, 0), 5, 1, 4)),
        ("absmax", ([3, -7, 7],), one((1,), -7, 2, 3)),
        ("first", ([[4, 5], [6, 7]],), one((0, 0), 4, 1, 4)),
        ("last", ([[4, 5], [6, 7]],), one((1, 1), 7, 1, 4)),
        ("last", (9,), one((), 9, 1, 1)),
    ],
)
def test_what_is_found(name: str, arguments: tuple[Any, ...], found: Located) -> None:
    tensors = {name for name, kind in FUNCTIONS[name].arguments if kind == "tensor"}
    names = [name for name, _ in FUNCTIONS[name].arguments]
    given = [
        torch.tensor(argument) if names[min(i, len(names) - 1)] in tensors else argument
        for i, argument in enumerate(arguments)
    ]
    assert locate.LOCATORS[name](*given) == found


def test_nan_is_found_where_it_stands() -> None:
    x = torch.tensor([1.0, NAN, 0.5, NAN])
    for name, arguments in (("finite", ()), ("within", (0, 2)), ("only", (1.0, 0.5))):
        found = locate.LOCATORS[name](x, *arguments)
        assert found is not None
        assert (found.elements[0].index, found.count) == ((1,), 2)
        assert math.isnan(found.elements[0].value)
    for name in ("lowest", "highest", "absmax"):
        found = locate.LOCATORS[name](x)
        assert found is not None and found.elements[0].index == (1,)
    assert locate.falling(x) is not None
    assert [e.index for e in locate.falling(x).elements] == [(1,), (0,)]  # type: ignore[union-attr]
    assert locate.unequal(x, x).elements[0].index == (1,)  # type: ignore[union-attr]
    assert locate.repeated(x) is None
    assert plain.unique(x)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    x = torch.tensor([1, 2])
    for name in ("finite", "all_true", "nondecreasing", "unique", "any_per_row", "live_rows"):
        assert locate.LOCATORS[name](x) is None
    assert locate.outside(x, 0, 3) is None and locate.other_than(x, 1, 2) is None and locate.counted(x, 7) is None
    assert locate.unequal(x, x) is None and locate.unequal(x, x[:1]) is None
    assert locate.first(x[:0]) is None and locate.last(x[:0]) is None


def test_numbers_past_int64_are_found() -> None:
    x = torch.tensor([7, 2**64 - 1, 2**63], dtype=torch.uint64)
    assert locate.outside(x, 0, 2**63) == one((1,), 2**64 - 1, 2, 3)
    assert locate.highest(x) == locate.absmax(x) == one((1,), 2**64 - 1, 1, 3)
    assert locate.lowest(x) == one((0,), 7, 1, 3)
    assert locate.counted(x, 2**63) == one((2,), 2**63, 1, 3)


def _as_list(x: torch.Tensor) -> list[tuple[tuple[int, ...], Any]]:
    return [(index, x[index].item()) for index in itertools.product(*map(range, x.shape))]


@pytest.mark.parametrize("seed", range(40))
def test_what_is_found_is_what_a_plain_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    shape = [rng.choice((1, 2, 3)) for _ in range(rng.choice((1, 2, 3)))]
    numbers = (0, 0, 1, 2, -1, NAN) if seed % 2 else (0, 0, 1, 2, -1)
    x, y = (torch.tensor(rng.choices(numbers, k=math.prod(shape))).reshape(shape) for _ in range(2))
    x, y = (x.transpose(0, -1), y.transpose(0, -1)) if rng.random() < 0.5 else (x, y)
    items = _as_list(x)

    def places(found: Located | None) -> tuple[list[tuple[int, ...]], int]:
        return ([], 0) if found is None else ([element.index for element in found.elements], found.count)

    def expected(indices: list[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], int]:
        return indices[:1], len(indices)

    assert places(locate.not_finite(x)) == expected([i for i, v in items if not math.isfinite(v)])
    assert places(locate.outside(x, 0, 2)) == expected([i for i, v in items if not 0 <= v < 2])
    assert places(locate.other_than(x, 0, 2)) == expected([i for i, v in items if v not in (0, 2)])
    assert places(locate.counted(x, 1)) == expected([i for i, v in items if v == 1])
    assert places(locate.false(x)) == expected([i for i, v in items if v == 0])
    rows = [(i[:-1], [v for j, v in items if j[:-1] == i[:-1]]) for i, _ in items if i[-1] == 0]
    assert places(locate.false_row(x)) == expected([i for i, row in rows if not any(row)])
    falls = [(i, (*i[:-1], i[-1] - 1)) for i, v in items if i[-1] and not v >= x[(*i[:-1], i[-1] - 1)].item()]
    assert places(locate.falling(x)) == (list(falls[0]) if falls else [], len(falls))
    again = [
        (next(i for i, v in items if v == value), j)
        for n, (j, value) in enumerate(items)
        if any(v == value for _, v in items[:n])
    ]
    assert places(locate.repeated(x)) == (list(again[0]) if again else [], len(again))
    unlike = [i for i, v in items if v != y[i].item()]
    assert places(locate.unequal(x, y)) == ([unlike[0]] * 2 if unlike else [], len(unlike))
    if not any(math.isnan(v) for _, v in items):
        for locator, value in ((locate.lowest, min), (locate.highest, max)):
            extreme = value(v for _, v in items)
            assert places(locator(x)) == expected([i for i, v in items if v == extreme])
        extreme = max(abs(v) for _, v in items)
        assert places(locate.absmax(x)) == expected([i for i, v in items if abs(v) == extreme])


def _made(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Tensors of a dtype: not contiguous, expanded, empty, of no dimension, with NaN, with a gradient."""
    numbers = torch.tensor([[1.0, 0.0, 3.0], [0.0, 0.0, 3.0]])
    try:
        x = numbers.to(dtype)
    except RuntimeError:
        x = torch.zeros(2, 3, dtype=torch.uint8).view(dtype)  # torch converts to every dtype but this
    yield from (x, x.t(), x[:, ::2], x[0], x[0, :1].expand(4, 3, 1), x[:0], x[:, :0], x[0, 0])
    if dtype.is_floating_point or dtype.is_complex:
        with contextlib.suppress(RuntimeError):
            yield (numbers / numbers).to(dtype)
            yield (numbers - 1e5).to(dtype).requires_grad_()


STATEMENTS = [
    "finite({})", "within({}, 0, 2)", "within({}, 5, 5, allow=0)", "only({}, 0, 5)", "nondecreasing({})", "unique({})",
    "all_true({})", "any_per_row({})", "live_rows({})", "equal({}, y)", "equal(y, {})", "equal({}, y, where=x)",
]  # fmt: skip
NUMBERS = ["highest({})", "lowest({})", "absmax({})", "first({})", "last({})", "count({}, 0)"]
PARTS = [
    "x", "x[..., :1]", "x[0, ...]", "x[-1:]", "negated(x)", "consecutive(x)", "positions_of(x)", "negated(x)[:, 1:]",
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_broken_rule_always_tells_the_element(dtype: str) -> None:
    """On every kind of tensor: a rule that does not apply says nothing, and one that is broken says where."""
    told = set()
    for call, part in itertools.product([*STATEMENTS, *(f"{number} == 77" for number in NUMBERS)], PARTS):
        rule = call.format(part)
        for text in (rule, f"not ({rule})"):
            contract = parse_body(f"require({text})", "operator", ("x", "y"))
            for x in _made(getattr(torch, dtype)):
                zeros = torch.zeros(*x.shape, x.dtype.itemsize, dtype=torch.uint8)
                arguments = {"x": x, "y": zeros.view(x.dtype)[..., 0]}
                try:
                    holds = bool(Values(arguments, {}).evaluate(contract.rules[0].statement.expr))  # type: ignore[union-attr]
                except INAPPLICABLE:
                    assert explain(contract, arguments) == []
                    continue
                found = explain(contract, arguments)
                assert bool(found) is not holds, (text, x)
                if found and text == rule:
                    told.add(call)
                    place = r"\(of \d+, \d|\.shape = "
                    if call not in STATEMENTS:
                        scalar = Values(arguments, {}).tensor(ast.parse(part, mode="eval").body).ndim == 0
                        place = r"^count.* = 0$|\(of \d+, first at" if call.startswith("count") else r" at .*\]$"
                        place = r" = \S+$|" + place if scalar else place
                    assert re.search(place, found[0].observed), (x, found[0].observed)
    assert len(told) >= (2 if dtype.startswith("float4") else 10), told


@pytest.mark.parametrize("name", sorted(set(locate.LOCATORS) - {"unique", "equal", "first", "last"}))
def test_a_tensor_taken_apart_is_told_of_as_a_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"within": (0, 6), "only": (1, 2), "count": (0,)}.get(name, ())
    x = torch.randint(0, 7, (3, 4, 6), generator=torch.Generator().manual_seed(3)).float()
    x[1, 2, 3:5] = NAN
    x[2, 1] = 0
    for y in (x, x.transpose(0, 1), x[:, 1:, ::2]):
        whole = locate.LOCATORS[name](y, *arguments)
        with monkeypatch.context() as patched:
            patched.setattr(pieces, "__kwdefaults__", {"whole_rows": False, "most": 5})
            apart = locate.LOCATORS[name](y, *arguments)
        assert repr(apart) == repr(whole), name


def test_two_tensors_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.arange(24).reshape(2, 3, 4)
    b = a.clone()
    b[1, 1] += 1
    where = torch.ones(2, 3, 4)
    where[1, 1, 0] = 0
    monkeypatch.setattr(pieces, "__kwdefaults__", {"whole_rows": False, "most": 5})
    assert locate.unequal(a, b) == Located((Element("a", (1, 1, 0), 16), Element("b", (1, 1, 0), 17)), 4, 24)
    assert locate.unequal(a, b, where) == Located((Element("a", (1, 1, 1), 17), Element("b", (1, 1, 1), 18)), 3, 23)
