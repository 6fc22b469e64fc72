"""The plain definitions of the value functions: what each of them means, before anything makes it fast.

Every function raises NotApplicable on a tensor whose values cannot be read here and now (`require_readable`). A rule
about elements is defined by where it is broken, which `locate` asks as well: `not_finite`, `outside`, `falling`,
`dead_rows` and so on give a bool tensor on the device of the values.
"""

from __future__ import annotations

import math
from typing import Any

from llm_op_guard.guard.readable import require_readable, unseen
from llm_op_guard.guard.reading import NotApplicable


def finite(x: Any) -> bool:
    """No element is NaN or infinite; true for integers and for an empty tensor."""
    return not not_finite(x).any()


def within(x: Any, low: Any, high: Any, allow: Any = ()) -> bool:
    """Every element is at least `low` and below `high`, or is one of the sentinels in `allow`; true when empty.

    Nothing is at least NaN, or below it.
    """
    return not outside(x, low, high, allow).any()


def lowest(x: Any) -> Any:
    """The smallest element; raises NotApplicable for an empty tensor."""
    return _extreme(x, "min")


def highest(x: Any) -> Any:
    """The largest element; raises NotApplicable for an empty tensor."""
    return _extreme(x, "max")


def absmax(x: Any) -> Any:
    """The largest magnitude; raises NotApplicable for an empty tensor."""
    return max(abs(_extreme(x, "min")), abs(_extreme(x, "max")))


def first(x: Any) -> Any:
    """The first element in row order; raises NotApplicable for an empty tensor."""
    return _corner(x, 0)


def last(x: Any) -> Any:
    """The last element in row order; raises NotApplicable for an empty tensor."""
    return _corner(x, -1)


def _corner(x: Any, index: int) -> Any:
    require_readable(x)
    if x.numel() == 0:
        raise NotApplicable
    return x.detach()[(index,) * x.ndim].item()


def count(x: Any, value: Any) -> int:
    """How many elements equal the value."""
    return int((~other_than(x, value)).sum())


def only(x: Any, *values: Any) -> bool:
    """Every element is one of the values; true when empty."""
    return not other_than(x, *values).any()


def nondecreasing(x: Any) -> bool:
    """Along the last dimension no element is below the one before; with NaN, which is not above anything, one is."""
    return not falling(x).any()


def unique(x: Any) -> bool:
    """No element occurs twice; NaN equals nothing."""
    require_readable(x)
    ordered = comparable(x)[0].reshape(-1).sort().values
    return not (ordered[1:] == ordered[:-1]).any()


def all_true(x: Any) -> bool:
    """Every element is true; holds for an empty tensor."""
    return not false_elements(x).any()


def any_per_row(x: Any) -> bool:
    """Along the last dimension some element is true."""
    return not false_rows(x).any()


def live_rows(mask: Any) -> bool:
    """Every row of an attention mask keeps a key.

    A mask of bools or integers keeps what is not 0. An additive one drops what no bias is, -1e8 and below (in float16,
    and in float8, half the lowest number and below: masks may have been added up, or scaled), and NaN. That covers
    the lowest number of a dtype, -inf, and the -1e9 and -1e10 of EoMT and LongT5.

    The -1e4 of BERT's descendants is no such number: ALiBi over tens of thousands of keys goes as low. But biases
    differ from key to key where a mask writes one number, so that a row which is filled with one and the same number,
    -9984 (what bfloat16 makes of -1e4) or below, keeps no key either. A row of one key is not judged so: it may be a
    bias of queries, the same for all keys.
    """
    return not dead_rows(mask).any()


def equal(a: Any, b: Any, where: Any = None) -> bool:
    """Of one shape and equal in every element, or in those where a third tensor is true."""
    require_readable(a)
    require_readable(b)
    return a.shape == b.shape and a.device == b.device and not unequal(a, b, where).any()


def negated(mask: Any) -> Any:
    """True where the mask is not."""
    return false_elements(mask)


def consecutive(x: Any) -> Any:
    """What x would be if it counted up by one from its first element, along the last dimension.

    Rounded once, as numbers are that were counted in a wider dtype. Raises NotApplicable where the first element is so
    large that it may have been rounded itself.
    """
    import torch  # noqa: PLC0415

    require_readable(x)
    if x.ndim == 0 or x.shape[-1] == 0 or x.dtype is torch.bool:
        raise NotApplicable
    y = x.detach()[..., :1]
    if x.dtype is torch.uint64:
        y = y.contiguous().view(torch.int64)  # of which addition is the same
    start, _, whole = comparable(y)
    if not whole and ((start.abs() >= 2 / torch.finfo(x.dtype).eps) & start.isfinite()).any():
        raise NotApplicable
    counted = start + torch.arange(x.shape[-1], device=x.device, dtype=start.dtype)
    return counted.view(torch.uint64) if x.dtype is torch.uint64 else counted.to(x.dtype)


def positions_of(mask: Any) -> Any:
    """The position of each token that a padding mask keeps, counted from 0 in its row."""
    require_readable(mask)
    if mask.ndim == 0:
        raise NotApplicable
    return (~false_elements(mask)).long().cumsum(dim=-1) - 1


def taken(x: Any, index: Any) -> Any:
    """The rows of x that `index` picks along the first dimension, as a copy: of its shape and that of a row.

    Raises NotApplicable where x has no such row.
    """
    import torch  # noqa: PLC0415

    require_readable(x)
    require_readable(index)
    if x.ndim == 0 or index.dtype is torch.bool or index.dtype.is_floating_point or index.dtype.is_complex:
        raise NotApplicable
    rows = index.detach().to(x.device, torch.int64)
    if outside(rows, 0, x.shape[0]).any():  # a device would not survive it
        raise NotApplicable
    return x.detach().index_select(0, rows.reshape(-1)).reshape(*rows.shape, *x.shape[1:])


# What the language calls each of them.
FUNCTIONS: dict[str, Any] = {
    function.__name__: unseen(function)
    for function in (
        finite,
        within,
        lowest,
        highest,
        absmax,
        first,
        last,
        count,
        only,
        nondecreasing,
        unique,
        all_true,
        any_per_row,
        live_rows,
        equal,
        negated,
        consecutive,
        positions_of,
        taken,
    )
}


def not_finite(x: Any) -> Any:
    """Where an element is NaN or infinite."""
    import torch  # noqa: PLC0415

    require_readable(x)
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        return torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    return ~torch.isfinite(x.detach() if x.dtype.is_complex else comparable(x)[0])


def outside(x: Any, low: Any, high: Any, allow: Any = ()) -> Any:
    """Where an element is neither in the range nor a sentinel, as numbers compare: no bound is cast to a dtype."""
    require_readable(x)
    sentinels = allow if isinstance(allow, tuple) else (allow,)
    if not all(isinstance(number, int | float) for number in (low, high, *sentinels)):
        raise NotApplicable
    y, offset, whole = comparable(x)
    if low != low or high != high:  # noqa: PLR0124 - nothing is above NaN, and nothing below
        low, high = math.inf, -math.inf
    # So that NaN is outside.
    wrong = ~(_at_least(y, low, offset, whole) & ~_at_least(y, high, offset, whole))
    if y.is_floating_point():
        wrong |= y != y  # noqa: PLR0124 - NaN
    for sentinel in sentinels:
        if not whole:
            wrong &= y != float(sentinel)
        elif math.isfinite(sentinel) and sentinel == int(sentinel) and _fits_int64(int(sentinel) - offset):
            wrong &= y != int(sentinel) - offset
    return wrong


def other_than(x: Any, *values: Any) -> Any:
    """Where an element is none of the values: outside the empty range, with the values for sentinels."""
    return outside(x, 0, 0, values)


def falling(x: Any) -> Any:
    """Where an element is not at least the one before; the first of each row, which has none, is left out."""
    require_readable(x)
    if x.ndim == 0:
        raise NotApplicable
    y = comparable(x)[0]
    return ~(y[..., 1:] >= y[..., :-1])


def false_elements(x: Any) -> Any:
    """Where an element is false (0)."""
    import torch  # noqa: PLC0415

    require_readable(x)
    if x.dtype is getattr(torch, "float8_e8m0fnu", None):
        return torch.zeros_like(x, dtype=torch.bool)  # it has no 0, and `== 0` compares with its smallest number
    return x.detach() == 0


def false_rows(x: Any) -> Any:
    """Which rows have no true element, by index over the leading dimensions."""
    require_readable(x)
    if x.ndim == 0:
        raise NotApplicable
    return false_elements(x).all(dim=-1)


# What no bias is, and what a mask is filled with though a bias may be as low (see `live_rows`).
_NO_BIAS = -1e8
_FILLING = -9984.0


def dead_rows(mask: Any) -> Any:
    """Which rows of an attention mask keep no key, by index over the leading dimensions."""
    import torch  # noqa: PLC0415

    require_readable(mask)
    if mask.ndim == 0:
        raise NotApplicable
    if not mask.dtype.is_floating_point:
        return false_rows(mask)
    numbers = mask.detach()
    if mask.dtype.itemsize == 1:
        numbers = numbers.float()  # torch does not compare float8
    dropped = max(torch.finfo(mask.dtype).min / 2, _NO_BIAS)
    alive = (numbers > max(dropped, _FILLING)).any(dim=-1)
    if not alive.all():  # the rest is asked of masks only that have such a row
        above = (numbers > dropped).any(dim=-1)
        if mask.shape[-1] > 1:
            above &= (numbers != numbers[..., :1]).any(dim=-1)
        alive |= above
    return ~alive


def unequal(a: Any, b: Any, where: Any = None) -> Any:
    """Where two tensors of one shape and device differ, or of those places where a third tensor is true.

    They compare as numbers: neither is cast to the dtype of the other.
    """
    differ = _differ(a.detach(), b.detach())
    return differ if where is None else differ & compared(a, where)


def _differ(a: Any, b: Any) -> Any:
    if a.dtype.is_complex and b.dtype.is_complex:
        return a != b  # the wider of the two holds every number of the other
    if a.dtype.is_complex:
        return _differ(a.real, b) | (a.imag != 0)
    if b.dtype.is_complex:
        return _differ(b, a)
    if a.dtype == b.dtype and not (a.dtype.is_floating_point and a.dtype.itemsize == 1):  # torch compares no float8
        return a != b
    (x, _, whole), (y, _, other_whole) = comparable(a), comparable(b)
    if whole != other_whole:
        return _unlike_whole(x, a, y) if whole else _unlike_whole(y, b, x)
    if _is_uint64(a) != _is_uint64(b):
        unsigned, signed = (x, y) if _is_uint64(a) else (y, x)
        return ((unsigned ^ -(2**63)) != signed) | (signed < 0)
    return x != y


def _unlike_whole(whole: Any, x: Any, other: Any) -> Any:
    """Where numbers of float64 differ from those of an integer tensor `x`, whose `comparable` values are `whole`."""
    import torch  # noqa: PLC0415

    if _is_uint64(x):  # numbers from 2**63 on, and those below
        bits = whole ^ -(2**63)
        large = other >= 2.0**63
        same_sign = large == (bits < 0)
        return ~same_sign | torch.where(
            large, _unlike_int64(whole, other - 2.0**63), _unlike_int64(bits, other) | (other < 0)
        )
    return _unlike_int64(whole, other)


def _unlike_int64(whole: Any, other: Any) -> Any:
    import torch  # noqa: PLC0415

    fits = (other >= -(2.0**63)) & (other < 2.0**63) & (other == other.floor())
    return ~fits | (torch.where(fits, other, 0.0).to(torch.int64) != whole)


def _is_uint64(x: Any) -> bool:
    import torch  # noqa: PLC0415

    return bool(x.dtype is torch.uint64)


def compared(a: Any, where: Any) -> Any:
    """Where a third tensor is true; raises NotApplicable unless it has the shape and device of the others."""
    require_readable(where)
    if where.shape != a.shape or where.device != a.device:
        raise NotApplicable
    return ~false_elements(where)


def _at_least(y: Any, bound: Any, offset: int, whole: bool) -> Any:
    if not whole:
        return y >= nearest_from(bound)
    if isinstance(bound, float) and not math.isfinite(bound):
        return (y != y) if bound > 0 else (y == y)  # noqa: PLR0124 - nowhere, everywhere
    smallest = math.ceil(bound) - offset
    if _fits_int64(smallest):
        return y >= smallest
    return (y != y) if smallest > 0 else (y == y)  # noqa: PLR0124 - nowhere, everywhere


def nearest_from(bound: Any, *, is_open: bool = False) -> float:
    """The smallest float64 that is not below a number, or (`is_open`) that is above it."""
    try:
        nearest = float(bound)
    except OverflowError:
        nearest = math.inf if bound > 0 else -math.inf
    if nearest < bound or (is_open and nearest == bound):
        return math.nextafter(nearest, math.inf)
    return nearest


def _fits_int64(value: int) -> bool:
    return -(2**63) <= value < 2**63


def _extreme(x: Any, which: str) -> Any:
    require_readable(x)
    if x.numel() == 0:
        raise NotApplicable
    y, offset, whole = comparable(x)
    extreme = getattr(y, which)().item()
    return extreme + offset if whole else extreme


def comparable(x: Any) -> tuple[Any, int, bool]:
    """The values as int64 (plus an offset to add) or as float64, both exact; and whether they are whole numbers.

    Raises NotApplicable for complex numbers, which have no order.
    """
    import torch  # noqa: PLC0415

    x = x.detach()
    if x.dtype.is_complex:
        raise NotApplicable
    if x.dtype.is_floating_point:
        if x.dtype is getattr(torch, "float4_e2m1fn_x2", None):
            raise NotApplicable  # two values to a byte; torch cannot take them apart
        return x.to(torch.float64), 0, False
    if x.dtype is torch.uint64:
        return x.contiguous().view(torch.int64) ^ -(2**63), 2**63, True  # the same order, shifted
    return x.to(torch.int64), 0, True
