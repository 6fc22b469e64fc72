"""The value functions as guards ask them: yes or no, in one read, without a copy of the tensor.

Each gives what its definition in `plain` gives. What a whole tensor tells by its extremes, or its sum, is not looked at
element by element; the rest goes through `plain` in pieces.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from llm_op_guard.guard.readable import require_readable, unseen
from llm_op_guard.guard.reading import NotApplicable
from llm_op_guard.values import plain
from llm_op_guard.values.extremes import Reads, at_once, extremes
from llm_op_guard.values.pieces import MOST_ELEMENTS, gathered, pieces


def finite(x: Any, reads: Reads | None = None) -> bool:
    """As `plain.finite`. A sum that is finite has finite parts only, and nothing large is read faster."""
    if (known := at_once(x, reads)) is not None:
        return math.isfinite(known[0]) and math.isfinite(known[1])
    require_readable(x)
    if reads is None and x.dtype in _rarely_overflow():
        total = (x.detach() if x.requires_grad else x).sum().item()
        if total - total == 0:
            return True  # else it may have overflowed
    if not x.dtype.is_floating_point:
        return _finite_parts(x) if x.dtype.is_complex else True
    if x.numel() == 0:
        return True
    low, high = extremes(x, reads)
    return math.isfinite(low) and math.isfinite(high)


@functools.cache
def _rarely_overflow() -> frozenset[Any]:
    """The dtypes in which a sum of the numbers of a model seldom leaves their range."""
    import torch  # noqa: PLC0415

    return frozenset({torch.float64, torch.float32, torch.bfloat16})


def _finite_parts(x: Any) -> bool:
    import torch  # noqa: PLC0415

    x = x.detach()
    return finite(torch.view_as_real(x.conj() if x.is_conj() else x))


def within(x: Any, low: Any, high: Any, allow: Any = (), reads: Reads | None = None) -> bool:
    """As `plain.within`: element by element only where an extreme may be a sentinel."""
    if (known := at_once(x, reads)) is None:
        require_readable(x)
        known = extremes(x, reads) if x.numel() else None
    if known is not None:
        lowest_one, highest_one = known
        if low <= lowest_one and highest_one < high:
            return True
    sentinels = allow if isinstance(allow, tuple) else (allow,)
    if x.dtype.is_complex or not all(isinstance(number, int | float) for number in (low, high, *sentinels)):
        raise NotApplicable
    if known is None:
        return True  # it is empty
    if not sentinels or math.isnan(lowest_one):
        return False
    return not _somewhere(plain.outside, x, low, high, sentinels)


def lowest(x: Any, reads: Reads | None = None) -> Any:
    """As `plain.lowest`."""
    return _of_elements(x, reads)[0]


def highest(x: Any, reads: Reads | None = None) -> Any:
    """As `plain.highest`."""
    return _of_elements(x, reads)[1]


def absmax(x: Any, reads: Reads | None = None) -> Any:
    """As `plain.absmax`."""
    low, high = _of_elements(x, reads)
    return max(abs(low), abs(high))


def _of_elements(x: Any, reads: Reads | None) -> tuple[Any, Any]:
    if (known := at_once(x, reads)) is not None:
        return known
    require_readable(x)
    if x.numel() == 0:
        raise NotApplicable
    return extremes(x, reads)


def count(x: Any, value: Any) -> int:
    """As `plain.count`."""
    require_readable(x)
    return sum(plain.count(piece.part, value) for piece in pieces(x))


def only(x: Any, *values: Any) -> bool:
    """As `plain.only`; of whole numbers, the extremes and what may lie between them often tell."""
    if not all(isinstance(value, int | float) for value in values):
        raise NotApplicable
    _require_ordered(x)
    if x.numel() and not x.dtype.is_floating_point:
        low, high = extremes(x)
        if low not in values or high not in values:
            return False
        if high - low <= len(values) and all(number in values for number in range(low, high + 1)):
            return True
    return not _somewhere(plain.other_than, x, *values)


def nondecreasing(x: Any) -> bool:
    """As `plain.nondecreasing`; of a long row, each piece begins with the last element of the one before."""
    require_readable(x)
    for piece in pieces(x, whole_rows=True):
        row = piece.part
        if row.ndim == 1:
            starts = range(0, max(row.numel() - 1, 1), MOST_ELEMENTS)
            falls = any(plain.falling(row[start : start + MOST_ELEMENTS + 1]).any() for start in starts)
        else:
            falls = bool(plain.falling(row).any())
        if falls:
            return False
    return True


def unique(x: Any) -> bool:
    """As `plain.unique`; whole numbers that lie close together are ticked off, others are sorted."""
    import torch  # noqa: PLC0415

    _require_ordered(x)
    if x.numel() == 0 or x.dtype.is_floating_point:
        return plain.unique(x)
    low, high = extremes(x)
    span = high - low + 1
    if span < x.numel():
        return False
    if span > _MOST_TICKS:
        return plain.unique(x)
    ticks = torch.zeros(span, dtype=torch.bool, device=x.device)
    for piece in pieces(x):
        number, offset, _ = plain.comparable(piece.part)
        ticks[(number - (low - offset)).reshape(-1)] = True
    return bool(ticks.sum() == x.numel())


# A tick is a byte.
_MOST_TICKS = 1 << 20


def all_true(x: Any) -> bool:
    """As `plain.all_true`; of whole numbers, the extremes often tell."""
    require_readable(x)
    if x.numel() and not (x.dtype.is_floating_point or x.dtype.is_complex):
        low, high = extremes(x)
        if low > 0 or high < 0:
            return True
        if low == 0 or high == 0:
            return False
    return not _somewhere(plain.false_elements, x)


def any_per_row(x: Any) -> bool:
    """As `plain.any_per_row`."""
    require_readable(x)
    return all(plain.any_per_row(piece.part) for piece in pieces(x, whole_rows=True))


def live_rows(mask: Any) -> bool:
    """As `plain.live_rows`."""
    require_readable(mask)
    return all(plain.live_rows(piece.part) for piece in pieces(mask, whole_rows=True))


def equal(a: Any, b: Any, where: Any = None) -> bool:
    """As `plain.equal`."""
    require_readable(a)
    require_readable(b)
    if a.shape != b.shape or a.device != b.device:
        return False
    compared = [a, b]
    if where is not None:
        require_readable(where)
        if where.shape != a.shape or where.device != a.device:
            raise NotApplicable
        compared.append(where)
    alike = zip(*map(pieces, compared), strict=True)  # tensors of one shape have the same pieces
    return all(plain.equal(*(piece.part for piece in parts)) for parts in alike)


def _require_ordered(x: Any) -> None:
    require_readable(x)
    if x.dtype.is_complex:
        raise NotApplicable


def _somewhere(broken: Callable[..., Any], x: Any, *arguments: Any) -> bool:
    """Whether a rule about elements is broken anywhere."""
    return any(bool(broken(piece.part, *arguments).any()) for piece in pieces(gathered(x)))


# What the language calls each of them; those that give tensors are as `plain` has them.
FUNCTIONS: dict[str, Any] = {
    **plain.FUNCTIONS,
    **{
        function.__name__: unseen(function)
        for function in (
            finite, within, lowest, highest, absmax, count, only, nondecreasing, unique, all_true, any_per_row,
            live_rows, equal,
        )
    },
}  # fmt: skip
