"""Where a value rule is broken, and where a value stands: asked after the verdict, for the diagnosis.

A locator takes the arguments of its function, raises what that raises, and reads no more than the one element (or pair)
that it gives. It gives None where it finds nothing to point to.
"""

from __future__ import annotations

from typing import Any

from llm_op_guard.guard.functions import Element, Located, Locator
from llm_op_guard.guard.reading import require_readable, unseen
from llm_op_guard.values import plain


def not_finite(x: Any) -> Located | None:
    """The first element that is NaN or infinite."""
    return _element(x, plain.not_finite(x))


def outside(x: Any, low: Any, high: Any, allow: Any = ()) -> Located | None:
    """The first element outside the range."""
    return _element(x, plain.outside(x, low, high, allow))


def other_than(x: Any, *values: Any) -> Located | None:
    """The first element that is none of the values."""
    return _element(x, plain.other_than(x, *values))


def false(x: Any) -> Located | None:
    """The first element that is false."""
    return _element(x, plain.false_elements(x))


def counted(x: Any, value: Any) -> Located | None:
    """The first element that equals the value."""
    return _element(x, ~plain.other_than(x, value))


def falling(x: Any) -> Located | None:
    """The first element that is not at least the one before, and the one before."""
    falls = plain.falling(x)
    if (index := first_true(falls)) is None:
        return None
    pair = (_at("x", x, (*index[:-1], index[-1] + 1)), _at("x", x, index))
    return Located(pair, int(falls.sum()), x.numel())


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
    return _row("x", plain.false_rows(x))


def dead_row(mask: Any) -> Located | None:
    """The first row of an attention mask that keeps no key."""
    return _row("mask", plain.dead_rows(mask))


def unequal(a: Any, b: Any, where: Any = None) -> Located | None:
    """The first two elements that differ; None where the shapes or devices do."""
    require_readable(a)
    require_readable(b)
    if a.shape != b.shape or a.device != b.device:
        return None
    differ = plain.unequal(a, b, where)
    if (index := first_true(differ)) is None:
        return None
    total = a.numel() if where is None else int(plain.compared(a, where).sum())
    return Located((_at("a", a, index), _at("b", b, index)), int(differ.sum()), total)


def lowest(x: Any) -> Located | None:
    """Where the smallest element stands first."""
    return _extreme(x, plain.lowest(x))


def highest(x: Any) -> Located | None:
    """Where the largest element stands first."""
    return _extreme(x, plain.highest(x))


def absmax(x: Any) -> Located | None:
    """Where the largest magnitude stands first."""
    largest = plain.absmax(x)
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


def _element(x: Any, wanted: Any) -> Located | None:
    index = first_true(wanted)
    return None if index is None else Located((_at("x", x, index),), int(wanted.sum()), x.numel())


def _row(argument: str, rows: Any) -> Located | None:
    index = first_true(rows)
    return None if index is None else Located((Element(argument, index),), int(rows.sum()), rows.numel())


def _extreme(x: Any, *values: Any) -> Located | None:
    y = plain.comparable(x)[0]
    is_nan = values[0] != values[0]
    return _element(x, y != y if is_nan else ~plain.other_than(x, *values))  # noqa: PLR0124


def _corner(x: Any, at_end: bool) -> Located | None:
    require_readable(x)
    if x.numel() == 0:
        return None
    return Located((_at("x", x, tuple(size - 1 if at_end else 0 for size in x.shape)),), 1, x.numel())


def _at(argument: str, x: Any, index: tuple[int, ...]) -> Element:
    return Element(argument, index, x.detach()[index].item())


def first_true(wanted: Any) -> tuple[int, ...] | None:
    """The index of the first true element, in row order."""
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
