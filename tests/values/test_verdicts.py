"""What guards ask is what the plain definitions say, on every dtype and layout; and it makes no copy of a tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_op_guard.guard.reading import INAPPLICABLE
from llm_op_guard.values import extremes, pieces, plain, verdicts

FLOATS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz,
    torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
INTEGERS = [
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool,
]  # fmt: skip
COMPLEX = [torch.complex128, torch.complex64, torch.complex32]
DTYPES = [*FLOATS, *INTEGERS, *COMPLEX]

# Every function with arguments that some tensors keep to and others do not.
CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("finite", ()),
    ("within", (0, 3)),
    ("within", (-2, 2.5)),
    ("within", (0, 3, -1)),
    ("within", (0, 3, (-1, 255, math.inf))),
    ("within", (0, 2**63)),
    ("within", (-(10**400), 10**400)),
    ("within", (0, 2**53 + 1)),
    ("within", (0, math.nan)),
    ("within", (0, "3")),
    ("lowest", ()),
    ("highest", ()),
    ("absmax", ()),
    ("count", (1,)),
    ("only", (0, 1)),
    ("only", (0, 1, 2.0, -1)),
    ("only", ("0",)),
    ("nondecreasing", ()),
    ("unique", ()),
    ("all_true", ()),
    ("any_per_row", ()),
    ("live_rows", ()),
]


def said(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        found = function(*arguments)
    except INAPPLICABLE:
        return "does not apply"
    return "NaN" if isinstance(found, float) and math.isnan(found) else found


def agree(x: torch.Tensor) -> None:
    for name, arguments in CALLS:
        fast, defined = said(verdicts.FUNCTIONS[name], x, *arguments), said(plain.FUNCTIONS[name], x, *arguments)
        assert fast == defined, f"{name}{arguments} of {x.dtype} {tuple(x.shape)} {x.stride()}: {x.reshape(-1)[:20]}"
        assert type(fast) is type(defined), name


def bytes_of(dtype: torch.dtype, draw: Callable[[int], bytes], elements: int) -> torch.Tensor:
    raw = torch.tensor(list(draw(elements * dtype.itemsize)), dtype=torch.uint8)
    if dtype is torch.bool:
        return raw % 2 == 1
    return raw.view(dtype)


def layouts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements of x, laid out in every way that tensors are."""
    n = x.numel()
    yield x
    yield x[:0]
    yield x.reshape(n, 1).expand(n, 3)
    yield x.reshape(2, n // 2).t()
    yield x.reshape(2, n // 2)[:, ::2]
    yield x.reshape(1, 2, n // 2, 1).expand(3, 2, n // 2, 2)
    yield x[0]
    yield x[1 : n - 1 : 3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_bits_in_any_layout(dtype: torch.dtype, data: st.DataObject) -> None:
    x = bytes_of(dtype, lambda n: data.draw(st.binary(min_size=n, max_size=n)), 12)
    for laid_out in layouts(x):
        agree(laid_out)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d is not torch.complex32], ids=str)
@pytest.mark.parametrize("numbers", [(0, 1), (1, 2, 2, 3), (0,), (1, 1, 0, 1), (3, 1), (0, 2, 255)], ids=str)
def test_small_numbers(dtype: torch.dtype, numbers: tuple[int, ...]) -> None:
    for count in (1, 2, 12):
        x = torch.tensor(list(itertools.islice(itertools.cycle(numbers), count)), dtype=torch.float64).to(dtype)
        agree(x)
        agree(x.reshape(-1, 1))
        if count == 12:
            agree(x.reshape(3, 4))


@pytest.mark.parametrize("dtype", [*FLOATS[:4], torch.float8_e5m2], ids=str)
def test_subnormals_are_finite_and_the_largest_numbers_are_too(dtype: torch.dtype) -> None:
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[dtype.itemsize]
    subnormal = torch.ones(5, dtype=bits).view(dtype)
    assert verdicts.finite(subnormal)
    assert verdicts.lowest(subnormal) == subnormal[0].item() > 0
    # Their sum overflows; they do not.
    largest = torch.full((5,), torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
    assert verdicts.finite(largest)
    assert verdicts.finite((-largest.double()).to(dtype))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small tensor is taken apart as a large one."""
    monkeypatch.setattr(verdicts, "MOST_ELEMENTS", 5)
    monkeypatch.setattr(pieces.pieces, "__kwdefaults__", {"whole_rows": False, "most": 5})


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_tensors_that_are_taken_apart(dtype: torch.dtype, data: st.DataObject) -> None:
    x = bytes_of(dtype, lambda n: data.draw(st.binary(min_size=n, max_size=n)), 24)
    for laid_out in (*layouts(x), x.reshape(2, 3, 4), x.reshape(4, 3, 2).transpose(0, 2), x.reshape(12, 2)[:, :1]):
        agree(laid_out)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("wrong", [None, 0, 4, 5, 9, 10, 22])
def test_a_fall_between_pieces_is_seen(wrong: int | None) -> None:
    x = torch.arange(24)
    if wrong is not None:
        x[wrong + 1] = x[wrong] - 1
    assert verdicts.nondecreasing(x) is plain.nondecreasing(x) is (wrong is None)


@pytest.mark.usefixtures("small_pieces")
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equal_tensors_taken_apart(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(24,), (2, 12), (3, 2, 4), (0, 3), ()]))
    dtypes = st.sampled_from([torch.int64, torch.float32, torch.bool, torch.uint8])
    a = torch.randint(0, 2, shape).to(data.draw(dtypes))
    b = a.clone().to(data.draw(dtypes))
    where = data.draw(st.sampled_from([None, torch.randint(0, 2, shape), torch.ones(1, 1, 7)]))
    if a.numel() and data.draw(st.booleans()):
        b.reshape(-1)[data.draw(st.integers(0, a.numel() - 1))] = 0
    assert said(verdicts.equal, a, b, where) == said(plain.equal, a, b, where)


def test_pieces_are_the_tensor_in_row_order() -> None:
    x = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    for most in (1, 3, 5, 7, 20, 60, 1000):
        found = list(pieces.pieces(x, most=most))
        assert torch.equal(torch.cat([piece.part.reshape(-1) for piece in found]), x.reshape(-1))
        assert all(piece.part.numel() <= most for piece in found)
        for piece in found:
            first = (0,) * piece.part.ndim
            assert x[piece.where(first)] == piece.part[first]
    assert all(piece.part.shape[-1] == 5 for piece in pieces.pieces(x, whole_rows=True, most=2))


def test_rows_without_elements_are_taken_apart_too() -> None:
    x = torch.empty(7, 3, 0)
    found = list(pieces.pieces(x, whole_rows=True, most=6))
    assert [tuple(piece.part.shape) for piece in found] == [(2, 3, 0)] * 3 + [(1, 3, 0)]
    assert verdicts.live_rows(x) is plain.live_rows(x) is False
    assert next(pieces.pieces(x, most=6)).part is x


@pytest.mark.parametrize("size", [4, 10_000])
def test_one_read_of_a_tensor_serves_several_questions(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, read = torch.randn(size), []

    def reader(y: torch.Tensor) -> tuple[float, float]:
        read.append(y)
        return -1.0, 1.0

    monkeypatch.setattr(extremes, "_readers", lambda: {x.dtype: reader})
    monkeypatch.setattr(extremes, "_native", lambda y: reader(y) if size == 4 else None)
    reads: extremes.Reads = {}
    assert verdicts.finite(x, reads=reads)
    assert verdicts.within(x, -2, 2, reads=reads)
    assert verdicts.highest(x, reads=reads) == 1.0
    assert len(read) == 1
    assert verdicts.highest(x) == 1.0, "another check reads it again"
    assert len(read) == 2


def test_autograd_does_not_notice() -> None:
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    assert verdicts.finite(y)
    assert verdicts.within(y, -99, 99)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


def test_bytes_that_stand_for_true() -> None:
    """A view of a mask of 0 and 255, say: torch takes every byte but 0 for True, and so do the rules."""
    x = torch.tensor([0, 255, 9, 1], dtype=torch.uint8).view(torch.bool)
    assert x.long().tolist() == [0, 1, 1, 1]
    for module in (verdicts, plain):
        assert module.within(x, 0, 2) and not module.within(x, 0, 1) and module.within(x, 0, 1, 1)
        assert (module.lowest(x), module.highest(x), module.absmax(x)) == (0, 1, 1)
        assert module.only(x, 0, 1) and not module.only(x, 0) and module.only(x[1:], 1)
        assert module.all_true(x[1:]) and not module.all_true(x)
        assert module.nondecreasing(x) and module.unique(x[:2]) and not module.unique(x)
        assert module.count(x, 1) == 3
