"""A tensor taken apart, so that what looks at it needs no second tensor of its size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

# What a piece is turned into (64-bit numbers, truths) stays below 1 MB.
MOST_ELEMENTS = 1 << 16


class Piece(NamedTuple):
    """Neighbouring elements of a tensor: `part` is `x[at][start : start + len(part)]`, or x itself."""

    at: tuple[int, ...]
    start: int
    part: Any

    def where(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """Where in the tensor an element of the part stands."""
        return (*self.at, self.start + local[0], *local[1:]) if local else self.at


def pieces(x: Any, *, whole_rows: bool = False, most: int = MOST_ELEMENTS) -> Iterator[Piece]:
    """Parts of at most so many elements, in row order; `whole_rows` never cuts the last dimension."""
    return _pieces(x, (), whole_rows, most)


def _pieces(x: Any, at: tuple[int, ...], whole_rows: bool, most: int) -> Iterator[Piece]:
    # Rows without elements have a verdict each all the same.
    size = max(x.numel(), math.prod(x.shape[:-1])) if whole_rows else x.numel()
    if size <= most or x.ndim <= whole_rows:
        yield Piece(at, 0, x)
        return
    in_one = size // x.shape[0]
    if in_one > most:
        for number in range(x.shape[0]):
            yield from _pieces(x[number], (*at, number), whole_rows, most)
        return
    step = max(most // in_one, 1)
    for start in range(0, x.shape[0], step):
        yield Piece(at, start, x.narrow(0, start, min(step, x.shape[0] - start)))


def gathered(x: Any) -> Any:
    """A view with the same elements, each of those in an expanded dimension once, laid out as in memory.

    For what does not depend on order, or on how often an element occurs. No view is dense where there are gaps.
    """
    for axis in reversed(range(x.ndim)):
        if x.shape[axis] > 1 and x.stride(axis) == 0:
            x = x.select(axis, 0)
    return x.permute(sorted(range(x.ndim), key=lambda axis: -x.stride(axis)))
