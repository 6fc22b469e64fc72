"""Where a value rule is broken, and where a value stands: asked after the verdict, for the diagnosis.

A locator takes the arguments of its function, raises what that raises, and reads no more than the one element (or pair)
that it gives. It gives None where it finds nothing to point to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llm_op_guard.guard.functions import NEAR, Element, Located, Locator
from llm_op_guard.guard.readable import require_readable, unseen
from llm_op_guard.values import plain, verdicts
from llm_op_guard.values.pieces import pieces


def not_finite(x: Any) -> Located | None:
    """The first element that is NaN or infinite; and how near the others come to the largest number of their dtype."""
    found = _element(x, plain.not_finite)
    return None if found is None else replace(found, note=_headroom(x))


def _headroom(x: Any) -> str:
    import torch  # noqa: PLC0415 - only who has tensors

    if not x.dtype.is_floating_point:
        return ""
    most = torch.finfo(x.dtype).max
    largest = max(float(plain.comparable(p.part)[0].abs().nan_to_num(0.0, 0.0, 0.0).max()) for p in pieces(x))
    if not NEAR * most <= largest < most:  # masks are filled with the lowest number itself
        return ""
    name = str(x.dtype).removeprefix("torch.")
    return f"the largest finite one is {largest:g}, {largest / most:.0%} of what {name} holds"


def outside(x: Any, low: Any, high: Any, allow: Any = ()) -> Located | None:
    """The first element outside the range."""
    return _element(x, lambda part: plain.outside(part, low, high, allow))


def other_than(x: Any, *values: Any) -> Located | None:
    """The first element that is none of the values."""
    return _element(x, lambda part: plain.other_than(part, *values))


def false(x: Any) -> Located | None:
    """The first element that is false."""
    return _element(x, plain.false_elements)


def counted(x: Any, value: Any) -> Located | None:
    """The first element that equals the value."""
    return _element(x, lambda part: ~plain.other_than(part, value))


def falling(x: Any) -> Located | None:
    """The first element that is not at least the one before, and the one before."""
    if (found := _first((x,), plain.falling, whole_rows=True)) is None:
        return None
    index, count = found
    pair = (_at("x", x, (*index[:-1], index[-1] + 1)), _at("x", x, index))
    return Located(pair, count, x.numel())


def repeated(x: Any) -> Located | None:
    """The first element that stood before, and where it did."""
    require_readable(x)
    flat = plain.comparable(x)[0].reshape(-1)
    ordered, order = flat.sort(stable=True)
    repeats = order[1:][ordered[1:] == ordered[:-1]]
    if len(repeats) == 0:
        return None
    again = int(repeats.min())
    before = int((flat == flat[again]).view(_uint8()).argmax())
    pair = (_at("x", x, _index(before, x.shape)), _at("x", x, _index(again, x.shape)))
    return Located(pair, len(repeats), x.numel())


def false_row(x: Any) -> Located | None:
    """The first row without a true element."""
    return _row("x", x, plain.false_rows)


def dead_row(mask: Any) -> Located | None:
    """The first row of an attention mask that keeps no key."""
    return _row("mask", mask, plain.dead_rows)


def unequal(a: Any, b: Any, where: Any = None) -> Located | None:
    """The first two elements that differ; None where the shapes or devices do."""
    require_readable(a)
    require_readable(b)
    if a.shape != b.shape or a.device != b.device:
        return None
    if where is not None:
        total = int(plain.compared(a, where).sum())
    tensors = (a, b) if where is None else (a, b, where)
    if (found := _first(tensors, plain.unequal)) is None:
        return None
    index, count = found
    return Located((_at("a", a, index), _at("b", b, index)), count, a.numel() if where is None else total)


def lowest(x: Any) -> Located | None:
    """Where the smallest element stands first."""
    return _extreme(x, verdicts.lowest(x))


def highest(x: Any) -> Located | None:
    """Where the largest element stands first."""
    return _extreme(x, verdicts.highest(x))


def absmax(x: Any) -> Located | None:
    """Where the largest magnitude stands first."""
    largest = verdicts.absmax(x)
    return _extreme(x, largest, -largest)


def first(x: Any) -> Located | None:
    """The first element."""
    return _corner(x, at_end=False)


def last(x: Any) -> Located | None:
    """The last element."""
    return _corner(x, at_end=True)


_OF: dict[str, Locator] = {
    "finite": not_finite,
    "within": outside,
    "only": other_than,
    "all_true": false,
    "nondecreasing": falling,
    "unique": repeated,
    "any_per_row": false_row,
    "live_rows": dead_row,
    "equal": unequal,
    "count": counted,
    "lowest": lowest,
    "highest": highest,
    "absmax": absmax,
    "first": first,
    "last": last,
}
LOCATORS: dict[str, Locator] = {name: unseen(locator) for name, locator in _OF.items()}


def _element(x: Any, wanted: Callable[[Any], Any]) -> Located | None:
    found = _first((x,), wanted)
    return None if found is None else Located((_at("x", x, found[0]),), found[1], x.numel())


def _row(argument: str, x: Any, rows: Callable[[Any], Any]) -> Located | None:
    found = _first((x,), rows, whole_rows=True)
    return None if found is None else Located((Element(argument, found[0]),), found[1], math.prod(x.shape[:-1]))


def _extreme(x: Any, *values: Any) -> Located | None:
    if values[0] != values[0]:
        return _element(x, lambda part: part != part)  # noqa: PLR0124 - NaN
    return _element(x, lambda part: ~plain.other_than(part, *values))


def _corner(x: Any, at_end: bool) -> Located | None:
    require_readable(x)
    if x.numel() == 0:
        return None
    return Located((_at("x", x, tuple(size - 1 if at_end else 0 for size in x.shape)),), 1, x.numel())


def _at(argument: str, x: Any, index: tuple[int, ...]) -> Element:
    return Element(argument, index, x.detach()[index].item())


def _first(
    tensors: tuple[Any, ...], wanted: Callable[..., Any], *, whole_rows: bool = False
) -> tuple[tuple[int, ...], int] | None:
    """The index of the first true element of what is wanted of tensors of one shape, in row order; and how many are.

    Asked in pieces, so that a diagnosis needs no memory to speak of.
    """
    for x in tensors:
        require_readable(x)
    index, count = None, 0
    taken_apart = (pieces(x, whole_rows=whole_rows) for x in tensors)
    for parts in zip(*taken_apart, strict=True):
        found = wanted(*(piece.part for piece in parts))
        count += int(found.sum())
        if index is None and (here := first_true(found)) is not None:
            index = parts[0].where(here)
    return None if index is None else (index, count)


def first_true(wanted: Any) -> tuple[int, ...] | None:
    """The index of the first true element of a bool tensor, in row order."""
    if not wanted.any():
        return None
    return _index(int(wanted.reshape(-1).view(_uint8()).argmax()), wanted.shape)


def _index(position: int, shape: Any) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        position, rest = divmod(position, size)
        index.append(rest)
    return tuple(reversed(index))


def _uint8() -> Any:
    import torch  # noqa: PLC0415

    return torch.uint8  # torch finds no largest bool
