"""The plain definitions of the value functions, on every dtype and shape that they meet."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import llm_op_guard  # noqa: F401 - registers the functions
from llm_op_guard.contract.vocabulary import FUNCTIONS
from llm_op_guard.guard.functions import IMPLEMENTATIONS
from llm_op_guard.guard.readable import part
from llm_op_guard.guard.reading import NotApplicable
from llm_op_guard.values import locate, plain, texts

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64])
def test_finite(dtype: torch.dtype) -> None:
    good = torch.ones(2, 3, dtype=torch.complex64 if dtype.is_complex else torch.float32)
    assert plain.finite(good.to(dtype))
    assert plain.finite(good.to(dtype)[:0])
    bad = good.clone()
    bad[1, 2] = float("nan")
    assert not plain.finite(bad.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_infinities_are_not_finite_and_subnormals_are(dtype: torch.dtype) -> None:
    for sign in (1, -1):
        assert not plain.finite(torch.tensor([0.0, sign * float("inf")]).to(dtype))
    smallest = torch.zeros(1, dtype=torch.uint8 if dtype.itemsize == 1 else torch.int64)
    smallest[0] = 1
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[dtype.itemsize]
    assert plain.finite(torch.ones(1, dtype=bits).view(dtype))
    assert plain.finite(torch.tensor([torch.finfo(dtype).max], dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool])
def test_integers_are_finite(dtype: torch.dtype) -> None:
    assert plain.finite(torch.ones(3, dtype=dtype))


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
def test_within_is_low_inclusive_high_exclusive(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1], [2, 3]]).to(dtype)
    assert plain.within(x, 0, 4)
    assert not plain.within(x, 0, 3)
    assert not plain.within(x, 1, 4)
    assert plain.within(x, 1, 3, (0, 3))
    assert plain.within(x, 0, 3, 3)
    assert plain.within(x[:0], 5, 6)


def test_within_rejects_nan_and_reads_strided_tensors() -> None:
    assert not plain.within(torch.tensor([float("nan")]), 0, 1)
    assert not plain.within(torch.arange(6).reshape(2, 3).t(), 0, 4)
    assert plain.within(torch.tensor(3).expand(4, 5), 3, 4)


@pytest.mark.parametrize(
    ("dtype", "values", "low", "high", "allow", "holds"),
    [
        (torch.uint8, [0, 255], 0, 256, (), True),
        (torch.uint8, [255], -1, 300, (), True),
        (torch.uint8, [44], 0, 3, 300, False),
        (torch.uint8, [255], 0, 3, -1, False),
        (torch.int8, [3, -128, 127], -128, 128, (), True),
        (torch.int16, [3], 0, 50000, (), True),
        (torch.int64, [1, 2**63 - 1], 0, 2**63, (), True),
        (torch.int64, [-(2**63)], -(2**63), 0, (), True),
        (torch.int64, [5], 2**63, 2**64, (), False),
        (torch.uint64, [7, 2**64 - 1], 0, 2**64, (), True),
        (torch.uint64, [2**63], 0, 2**63, (), False),
        (torch.uint64, [2**63], 0, 2**63, 2**63, True),
        (torch.bfloat16, [256.0], 0, 257, (), True),
        (torch.float32, [2.0**24], 0, 2**24 + 1, (), True),
        (torch.int64, [2], 1.5, 2.5, (), True),
        (torch.int64, [3], 1.5, 2.5, (), False),
        (torch.int64, [3], 0, float("inf"), (), True),
        (torch.bool, [True], 0, 1, (), False),
    ],
)
def test_bounds_compare_as_numbers(
    dtype: torch.dtype, values: list[float], low: float, high: float, allow: int, holds: bool
) -> None:
    assert plain.within(torch.tensor(values, dtype=dtype), low, high, allow) is holds


def test_lowest_and_highest() -> None:
    x = torch.tensor([[3, -2], [5, 0]])
    assert (plain.lowest(x), plain.highest(x)) == (-2, 5)
    with pytest.raises(NotApplicable):
        plain.lowest(x[:0])


def freed() -> torch.Tensor:
    """As FSDP leaves its parameters between layers: a shape without memory. Whoever reads it ends the process."""
    x = torch.ones(2)
    x.untyped_storage().resize_(0)
    return x


def test_tensors_without_elements_need_no_memory() -> None:
    assert torch.empty(0).untyped_storage().nbytes() == 0
    assert plain.finite(torch.empty(0)) and plain.within(torch.empty(3, 0), 1, 2)


def test_values_that_cannot_be_read_do_not_apply() -> None:
    dense = torch.ones(3)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(dense)
    unreadable = [
        None,
        3,
        dense.to("meta"),
        fake,
        dense.to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
        freed(),
    ]
    for x in unreadable:
        for function in (plain.finite, plain.lowest, lambda x: plain.within(x, 0, 1)):
            with pytest.raises(NotApplicable):
                function(x)
    with pytest.raises(NotApplicable):
        plain.within(torch.ones(2, dtype=torch.complex64), 0, 1)


def test_under_vmap_and_grad_they_step_aside() -> None:
    seen: list[bool] = []

    def operator(x: torch.Tensor) -> torch.Tensor:
        try:
            plain.finite(x)
            seen.append(True)
        except NotApplicable:
            seen.append(False)
        return x.sum()

    torch.vmap(operator)(torch.ones(2, 3))
    torch.func.grad(operator)(torch.ones(3))
    assert seen == [False, False]


def test_gradients_and_random_state_are_left_alone() -> None:
    x = torch.ones(3, requires_grad=True)
    state = torch.get_rng_state()
    assert plain.finite(x) and plain.within(x, 0, 2)
    assert x.grad is None
    assert torch.equal(state, torch.get_rng_state())


NAN = float("nan")
LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("absmax", ([3, -7],), 7),
        ("first", ([[4, 5], [6, 7]],), 4),
        ("last", ([[4, 5], [6, 7]],), 7),
        ("count", ([1, -100, -100], -100), 2),
        ("count", ([], 1), 0),
        ("only", ([0, 1, 1], 0, 1), True),
        ("only", ([0.0, -1e9], 0, 1), False),
        ("only", ([], 0), True),
        ("nondecreasing", ([0, 3, 3, 5],), True),
        ("nondecreasing", ([0, 3, 2],), False),
        ("nondecreasing", ([[5], [3]],), True),
        ("nondecreasing", ([0.0, NAN],), False),
        ("nondecreasing", ([],), True),
        ("unique", ([3, 1, 2],), True),
        ("unique", ([3, 1, 3],), False),
        ("unique", ([],), True),
        ("all_true", ([1, 2],), True),
        ("all_true", ([1, 0],), False),
        ("all_true", ([],), True),
        ("any_per_row", ([[0, 1], [1, 0]],), True),
        ("any_per_row", ([[0, 1], [0, 0]],), False),
        ("live_rows", ([[True, False], [True, True]],), True),
        ("live_rows", ([[True], [False]],), False),
        ("live_rows", ([[0.0, LOWEST], [LOWEST, 0.0]],), True),
        ("live_rows", ([[0.0, LOWEST], [LOWEST, LOWEST]],), False),
        ("live_rows", ([[-float("inf"), -float("inf")]],), False),
        ("live_rows", ([[NAN, -float("inf")]],), False),
        ("live_rows", ([[NAN, 0.0]],), True),
        ("live_rows", ([[0, 1], [0, -10000]],), True),
        ("equal", ([1, 2], [1, 2]), True),
        ("equal", ([1, 2], [1, 3]), False),
        ("equal", ([1, 2], [1]), False),
        ("equal", ([1, 2], [1, 3], [1, 0]), True),
        ("equal", ([1, 2], [1, 3], [0, 1]), False),
    ],
)
def test_the_other_value_functions(name: str, arguments: tuple[Any, ...], answer: Any) -> None:
    given = [torch.tensor(argument) if isinstance(argument, list) else argument for argument in arguments]
    assert plain.FUNCTIONS[name](*given) == answer


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e8m0fnu], ids=str)
def test_the_smallest_numbers_are_not_zero(dtype: torch.dtype) -> None:
    smallest = torch.tensor([1], dtype=torch.uint8)  # 0 in float8_e8m0fnu is its smallest number: it has no zero
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    x = (smallest - 1 if dtype is torch.float8_e8m0fnu else smallest).to(bits).view(dtype)
    assert x.double().item() > 0
    assert plain.all_true(x) and plain.any_per_row(x) and plain.count(x, 0) == 0
    assert plain.equal(plain.positions_of(x), torch.tensor([0]))
    assert not plain.any_per_row(plain.negated(x))


def test_functions_that_give_tensors() -> None:
    assert plain.negated(torch.tensor([1, 0])).tolist() == [False, True]
    assert plain.consecutive(torch.tensor([[4, 9], [0, 0]])).tolist() == [[4, 5], [0, 1]]
    assert plain.positions_of(torch.tensor([[0, 1, 1], [1, 1, 1]])).tolist() == [[-1, 0, 1], [0, 1, 2]]


def test_what_has_no_element_or_no_row_does_not_apply() -> None:
    empty, scalar = torch.ones(0), torch.tensor(1)
    for name in ("absmax", "first", "last"):
        with pytest.raises(NotApplicable):
            plain.FUNCTIONS[name](empty)
    for name in ("nondecreasing", "any_per_row", "live_rows", "consecutive", "positions_of"):
        with pytest.raises(NotApplicable):
            plain.FUNCTIONS[name](scalar)


# What masks write where a key is dropped: the lowest number of the dtype, -inf, EoMT, LongT5, Reformer, BERT.
FILLINGS = (None, -math.inf, -1e9, -1e10, -1e5, -1e4)


@pytest.mark.parametrize("dtype", FLOATS[:4])
@pytest.mark.parametrize("filling", FILLINGS)
def test_a_row_that_is_filled_keeps_no_key(dtype: torch.dtype, filling: float | None) -> None:
    filling = torch.finfo(dtype).min if filling is None else filling
    mask = torch.zeros(2, 1, 3, 4, dtype=torch.float64)
    mask[..., 2:] = filling
    assert plain.live_rows(mask.to(dtype))
    mask[1, 0, 2] = filling
    assert not plain.live_rows(mask.to(dtype))


@pytest.mark.parametrize(
    ("dtype", "row", "alive"),
    [
        # A row of one number: -1e4, which bfloat16 has as -9984.
        (torch.float32, [-9984.0, -9984.0], False),
        (torch.float32, [-9983.0, -9983.0], True),
        (torch.bfloat16, [-9984.0, -9984.0], False),
        (torch.bfloat16, [-9920.0, -9920.0], True),
        (torch.float16, [-9984.0, -9984.0], False),
        (torch.float16, [-9976.0, -9976.0], True),
        # A row of several numbers: what no bias is.
        (torch.float32, [-1e8, -1.1e8], False),
        (torch.float32, [-99999992.0, -1.1e8], True),
        (torch.bfloat16, [-100139008.0, -1.1e8], False),
        (torch.bfloat16, [-99614720.0, -1.1e8], True),
        (torch.float16, [-32752.0, -40000.0], False),
        (torch.float16, [-32736.0, -40000.0], True),
        # A row of one key may be a bias of queries.
        (torch.float32, [-20000.0], True),
        (torch.float32, [-1e9], False),
        (torch.float16, [-20000.0], True),
        (torch.float16, [-65504.0], False),
        (torch.float8_e5m2, [-57344.0, -40960.0], False),
        (torch.float8_e5m2, [0.0, -57344.0], True),
        (torch.float8_e4m3fn, [-448.0, -448.0], False),
        (torch.float8_e4m3fn, [-208.0, -448.0], True),
    ],
)
def test_where_a_key_begins_to_be_dropped(dtype: torch.dtype, row: list[float], alive: bool) -> None:
    mask = torch.tensor(row, dtype=torch.float64).to(dtype)
    assert mask[0].item() == row[0]  # the boundary is a number of the dtype
    assert plain.live_rows(mask) is alive


@pytest.mark.parametrize("dtype", FLOATS[:4])
@pytest.mark.parametrize("keys", [2048, 16384, 65536])
def test_rows_of_legal_biases_are_alive(dtype: torch.dtype, keys: int) -> None:
    """ALiBi as MPT has it: of the last position, so that early queries see only keys with very low biases."""
    keys = min(keys, 32768) if dtype is torch.float16 else keys
    slopes = torch.tensor([2.0 ** (-8 / 32), 2.0**-8], dtype=torch.float64)
    alibi = slopes[:, None, None] * torch.arange(1 - keys, 1)
    queries = torch.tensor([0, 1, keys // 2, keys - 1])
    future = torch.arange(keys) > queries[:, None]
    for filling in (torch.finfo(dtype).min, -math.inf):
        assert plain.live_rows(alibi.expand(2, 4, keys).masked_fill(future, filling).to(dtype))
    assert plain.live_rows(alibi.to(dtype))
    assert plain.live_rows(torch.full((2, 5), -5000.0, dtype=dtype))  # T5: one number for all that is far


def test_every_value_function_of_the_language_is_here() -> None:
    assert {*plain.FUNCTIONS, *texts.FUNCTIONS} == {
        name for name, function in FUNCTIONS.items() if function.cost_class == "B"
    }
    assert set(IMPLEMENTATIONS) == set(FUNCTIONS) - {"has", "get"}


def test_taken() -> None:
    x = torch.arange(12).reshape(4, 3)
    assert torch.equal(plain.taken(x, torch.tensor([2, 0, 2])), x[[2, 0, 2]])
    assert torch.equal(plain.taken(x, torch.tensor([[1], [3]], dtype=torch.uint8)), x[torch.tensor([[1], [3]])])
    assert torch.equal(plain.taken(x, torch.tensor(1)), x[1])
    assert plain.taken(x, torch.zeros(0, dtype=torch.int32)).shape == (0, 3)
    assert torch.equal(plain.taken(torch.arange(3), torch.tensor([2, 2])), torch.tensor([2, 2]))
    for dtype in FLOATS[:4]:
        assert plain.taken(x.to(dtype), torch.tensor([1])).dtype == dtype
    picked = plain.taken(x, torch.tensor(1))
    x += 1
    assert picked.tolist() == [3, 4, 5]  # a copy


@pytest.mark.parametrize(
    ("x", "index"),
    [
        (torch.ones(3), torch.tensor([3])),
        (torch.ones(3), torch.tensor([-1])),
        (torch.ones(3), torch.tensor([0.0])),
        (torch.ones(3), torch.tensor([True, False, True])),
        (torch.ones(3), [0]),
        (torch.ones(3), 0),
        (torch.ones(()), torch.tensor([0])),
        (torch.ones(0, 2), torch.tensor([0])),
        (torch.ones(3, device="meta"), torch.tensor([0])),
        (torch.ones(3), torch.tensor([0], device="meta")),
        (None, torch.tensor([0])),
    ],
)
def test_rows_that_are_not_there_are_not_taken(x: Any, index: Any) -> None:
    with pytest.raises(NotApplicable):
        plain.taken(x, index)


# ---------------------------------------------------------------- numbers as they are


@pytest.mark.parametrize(
    ("dtype", "start", "length"),
    [
        (torch.bfloat16, 1, 300),
        (torch.bfloat16, 255, 50),
        (torch.float16, 1, 3000),
        (torch.float32, 2**24 - 100, 300),
        (torch.float64, 7, 9),
        (torch.float8_e4m3fn, 3, 20),
        (torch.uint8, 7, 200),
        (torch.int8, 0, 300),
    ],
)
def test_counting_up_is_rounded_once(dtype: torch.dtype, start: int, length: int) -> None:
    x = (torch.arange(length) + start).to(dtype)
    assert plain.consecutive(x).dtype == dtype
    assert plain.equal(x, plain.consecutive(x))
    moved = x.clone()
    moved[-1] = x[0]
    assert not plain.equal(moved, plain.consecutive(moved))


def test_counting_up_from_unsigned_numbers() -> None:
    x = torch.tensor([[2**63 - 1, 2**63, 2**63 + 1]], dtype=torch.uint64)
    assert plain.consecutive(x).tolist() == x.tolist()
    assert plain.equal(x, plain.consecutive(x))


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([257.0, 258.0], dtype=torch.float64).bfloat16(),  # 258, then 258: who knows where it began
        torch.tensor([4096.0, 4096.0]).half(),
        torch.tensor([True, True]),
        torch.ones(2, dtype=torch.complex64),
    ],
)
def test_what_cannot_be_counted_up_from_does_not_apply(x: torch.Tensor) -> None:
    with pytest.raises(NotApplicable):
        plain.consecutive(x)


def of(numbers: list[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64 if dtype.is_floating_point else dtype).to(dtype)


EXACT = [
    # (a, its dtype, b, its dtype, equal)
    ([70000], torch.int64, [70000.0], torch.float16, False),  # inf
    ([2049], torch.int64, [2049.0], torch.float16, False),  # 2048
    ([2048], torch.int64, [2048.0], torch.float16, True),
    ([2**24 + 1], torch.int32, [2.0**24], torch.float32, False),
    ([2**53 + 1], torch.int64, [2.0**53], torch.float64, False),
    ([2**63 - 1], torch.int64, [2.0**63], torch.float64, False),
    ([-(2**63)], torch.int64, [-(2.0**63)], torch.float64, True),
    ([2**63], torch.uint64, [2.0**63], torch.float64, True),
    ([2**63 + 1], torch.uint64, [2.0**63], torch.float64, False),
    ([2**64 - 1], torch.uint64, [2.0**64], torch.float64, False),
    ([5], torch.uint64, [5.0], torch.float16, True),
    ([5], torch.uint64, [-5.0], torch.float16, False),
    ([2**63], torch.uint64, [-(2**63)], torch.int64, False),
    ([2**63], torch.uint64, [2**63], torch.uint64, True),
    ([7], torch.uint64, [7], torch.int8, True),
    ([7], torch.uint64, [8], torch.int8, False),
    ([1], torch.bool, [1], torch.int64, True),
    ([1], torch.bool, [2], torch.uint8, False),
    ([3], torch.int64, [3.5], torch.float32, False),
    ([0], torch.int64, [NAN], torch.float32, False),
    ([0], torch.int64, [-0.0], torch.float32, True),
    ([1.0], torch.float8_e4m3fn, [1.0], torch.float8_e4m3fn, True),
    ([1.0], torch.float8_e4m3fn, [1.5], torch.float8_e5m2, False),
    ([1.0], torch.bfloat16, [1.0009765625], torch.float16, False),
    ([0.1], torch.float32, [0.1], torch.float64, False),
    ([1.0], torch.complex64, [1], torch.int64, True),
    ([2.0**24], torch.complex64, [2**24 + 1], torch.int64, False),
    ([1 + 1j], torch.complex64, [1], torch.int64, False),
    ([1 + 1j], torch.complex64, [1 + 1j], torch.complex128, True),
]


@pytest.mark.parametrize(("a", "of_a", "b", "of_b", "same"), EXACT)
def test_tensors_compare_as_numbers(a: Any, of_a: torch.dtype, b: Any, of_b: torch.dtype, same: bool) -> None:
    x, y = of(a, of_a) if not of_a.is_complex else torch.tensor(a, dtype=of_a), of(b, of_b)
    assert plain.equal(x, y) is same
    assert plain.equal(y, x) is same
    assert plain.equal(x, y, torch.zeros(1))


@pytest.mark.parametrize("x", [[1], [1.0], [NAN], [float("inf")], [True]])
@pytest.mark.parametrize("bounds", [(0, NAN), (NAN, 5), (NAN, NAN), (-float("inf"), NAN), (NAN, float("inf"))])
def test_nothing_is_within_bounds_that_are_nan(x: list[Any], bounds: tuple[Any, Any]) -> None:
    given = torch.tensor(x)
    assert not plain.within(given, *bounds)
    assert plain.within(given[:0], *bounds)
    if x == [1]:
        assert plain.within(given, *bounds, (1,))


def test_no_mode_sees_what_value_functions_do() -> None:
    class Watching(torch.overrides.TorchFunctionMode):
        seen: list[Any] = []  # noqa: RUF012

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 3)
    with Watching():
        assert plain.FUNCTIONS["finite"](x)
        assert plain.FUNCTIONS["equal"](part(x, slice(0, 1)), plain.FUNCTIONS["negated"](part(x, slice(1, 2)))) is False
        assert locate.LOCATORS["within"](x, 0, 1).count == 6  # type: ignore[union-attr]
        assert Watching.seen == []


def test_a_part_with_bounds_beyond_all_numbers(recwarn: pytest.WarningsRecorder) -> None:
    x = torch.arange(6).reshape(2, 3)
    assert part(x, slice(None), slice(1, 10**30)).tolist() == [[1, 2], [4, 5]]
    assert part(x, slice(-(10**30), None)).tolist() == x.tolist()
    with pytest.raises(NotApplicable):
        part(x, slice(None, None, 10**30))
    assert list(recwarn) == []


def test_bounds_beyond_all_floats_are_bounds() -> None:
    assert plain.within(torch.tensor([1]), -(10**400), 10**400)
    assert not plain.within(torch.tensor([1]), 10**400, 10**401)
