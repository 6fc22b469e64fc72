"""Which values an expression can have: sets of numbers, texts, dtypes and devices, never too small.

Where a set cannot be held exactly it is held too large: what is empty here is empty for sure.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from typing import Any

from llm_op_guard.frozen import frozen

# Sets and steps that grow beyond this are held too large instead.
_MOST_ITEMS = 256
_MOST_STEP = 1 << 256


@frozen
class Numbers:
    """Some of the real numbers: a `few`, or those between two bounds; and NaN, perhaps.

    Of those between bounds: if `whole`, the integers that are `rest` modulo `step`; none of those in `without`. A bound
    that is None is infinity, which it holds unless it is `whole`.
    """

    few: frozenset[int | float] | None = None
    low: int | float | None = None
    high: int | float | None = None
    low_open: bool = False
    high_open: bool = False
    whole: bool = False
    step: int = 1
    rest: int = 0
    without: frozenset[int | float] = frozenset()
    nan: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing."""
        return not self.nan and self.few is not None and not self.few

    @property
    def is_whole(self) -> bool:
        """Whether it holds whole numbers only, none of them a float."""
        return not self.nan and (self.whole if self.few is None else all(isinstance(v, int) for v in self.few))

    @property
    def only(self) -> int | float | None:
        """The number, when it holds just one."""
        return next(iter(self.few)) if self.few is not None and len(self.few) == 1 and not self.nan else None

    @property
    def lower(self) -> tuple[int | float | None, bool]:
        """The lower bound, and whether it is left out."""
        return (min(self.few, default=None), False) if self.few is not None else (self.low, self.low_open)

    @property
    def upper(self) -> tuple[int | float | None, bool]:
        """The upper bound, and whether it is left out."""
        return (max(self.few, default=None), False) if self.few is not None else (self.high, self.high_open)

    def holds(self, value: int | float) -> bool:
        """Whether a number, not NaN, is one of them."""
        if self.few is not None:
            return value in self.few
        if self.low is not None and (value < self.low or (self.low_open and value == self.low)):
            return False
        if self.high is not None and (value > self.high or (self.high_open and value == self.high)):
            return False
        if self.whole:
            is_whole = isinstance(value, int) or value.is_integer()
            if not is_whole or (int(value) - self.rest) % self.step != 0:
                return False
        return value not in self.without

    def meet(self, other: Numbers) -> Numbers:
        """The numbers that both hold."""
        nan = self.nan and other.nan
        if self.few is not None or other.few is not None:
            few, others = (self, other) if self.few is not None else (other, self)
            return Numbers(frozenset(v for v in few.few or () if others.holds(v)), nan=nan)
        low, low_open = _higher((self.low, self.low_open), (other.low, other.low_open), 1)
        high, high_open = _higher((self.high, self.high_open), (other.high, other.high_open), -1)
        congruence = _congruence((self.step, self.rest), (other.step, other.rest))
        if congruence is None:
            return Numbers(frozenset(), nan=nan)
        step, rest = congruence
        without = self.without | other.without
        if len(without) > _MOST_ITEMS:
            without = self.without
        whole = self.whole or other.whole
        return Numbers(None, low, high, low_open, high_open, whole, step, rest, without, nan)._settled()

    def join(self, other: Numbers) -> Numbers:
        """The numbers that either holds, and perhaps some between them."""
        nan = self.nan or other.nan
        for one, more in ((self, other), (other, self)):
            if one.few is not None and not one.few:
                return replace(more, nan=nan)
        if self.few is not None and other.few is not None and len(self.few | other.few) <= _MOST_ITEMS:
            return Numbers(self.few | other.few, nan=nan)
        low, low_open = _lower(self.lower, other.lower, 1)
        high, high_open = _lower(self.upper, other.upper, -1)
        whole = replace(self, nan=False).is_whole and replace(other, nan=False).is_whole
        same_step = whole and (self.step, self.rest) == (other.step, other.rest) and self.few is other.few is None
        step, rest = (self.step, self.rest) if same_step else (1, 0)
        without = {v for v in self.without if not other.holds(v)} | {v for v in other.without if not self.holds(v)}
        return Numbers(None, low, high, low_open, high_open, whole, step, rest, frozenset(without), nan)._settled()

    def minus(self, value: int | float) -> Numbers:
        """All but one."""
        if self.few is not None:
            return replace(self, few=self.few - {value})
        if len(self.without) >= _MOST_ITEMS:
            return self
        return replace(self, without=self.without | {value})._settled()

    def _settled(self) -> Numbers:
        """The same, as a few where it holds no more than that; bounds of whole numbers are such numbers."""
        low, high = self.low, self.high
        if not self.whole:
            if low is None or high is None or low < high:
                return self
            is_one = low == high and not self.low_open and not self.high_open and low not in self.without
            return Numbers(frozenset({low} if is_one else ()), nan=self.nan)
        if low is not None:
            low = math.floor(low) + 1 if self.low_open else math.ceil(low)
            low += (self.rest - low) % self.step
        if high is not None:
            high = math.ceil(high) - 1 if self.high_open else math.floor(high)
            high -= (high - self.rest) % self.step
        if low is not None and high is not None and (high - low) // self.step < _MOST_ITEMS:
            within = range(int(low), int(high) + 1, self.step)
            return Numbers(frozenset(v for v in within if v not in self.without), nan=self.nan)
        return replace(self, low=low, high=high, low_open=False, high_open=False)


def _higher(
    a: tuple[int | float | None, bool], b: tuple[int | float | None, bool], sign: int
) -> tuple[int | float | None, bool]:
    """The lower bound of what two have in common; with sign -1 the upper one."""
    if a[0] is None or b[0] is None:
        return b if a[0] is None else a
    if a[0] == b[0]:
        return a[0], a[1] or b[1]
    return a if (a[0] > b[0]) is (sign == 1) else b


def _lower(
    a: tuple[int | float | None, bool], b: tuple[int | float | None, bool], sign: int
) -> tuple[int | float | None, bool]:
    """The lower bound of two together; with sign -1 the upper one."""
    if a[0] is None or b[0] is None:
        return None, False
    if a[0] == b[0]:
        return a[0], a[1] and b[1]
    return a if (a[0] < b[0]) is (sign == 1) else b


def _congruence(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int] | None:
    """What is `rest` modulo `step` for both (the Chinese remainder theorem), None where nothing is."""
    (step, rest), (other_step, other_rest) = a, b
    common = math.gcd(step, other_step)
    if (other_rest - rest) % common != 0:
        return None
    together = step // common * other_step
    if together > _MOST_STEP:
        return a
    times = (other_rest - rest) // common * pow(step // common, -1, other_step // common)
    return together, (rest + step * times) % together


NO_NUMBERS = Numbers(frozenset())
ALL_NUMBERS = Numbers(nan=True)
WHOLE = Numbers(whole=True)
SIZES = Numbers(low=0, whole=True)
TRUTHS = Numbers(frozenset({0, 1}))


@frozen
class Names:
    """Some texts, or the names of some dtypes or devices: these, or all but these."""

    names: frozenset[str] = frozenset()
    all_but: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing."""
        return not self.all_but and not self.names

    @property
    def only(self) -> str | None:
        """The name, when it holds just one."""
        return next(iter(self.names)) if len(self.names) == 1 and not self.all_but else None

    def meet(self, other: Names) -> Names:
        """The names that both hold."""
        match self.all_but, other.all_but:
            case True, True:
                return Names(self.names | other.names, all_but=True)
            case True, False:
                return Names(other.names - self.names)
            case False, True:
                return Names(self.names - other.names)
        return Names(self.names & other.names)

    def join(self, other: Names) -> Names:
        """The names that either holds."""
        outside = Names(self.names, not self.all_but).meet(Names(other.names, not other.all_but))
        return Names(outside.names, not outside.all_but)

    def minus(self, name: str) -> Names:
        """All but one."""
        return self.meet(Names(frozenset({name}), all_but=True))


NO_NAMES = Names()
ALL_NAMES = Names(all_but=True)


@frozen
class Possible:
    """The values that an expression can have, by kind.

    `other` is any other value: tensors and objects, to which a rule about values does not apply, and tuples. `absent`
    is that there is none: an attribute that is not there, a symbol that nothing told.
    """

    numbers: Numbers = NO_NUMBERS
    texts: Names = NO_NAMES
    dtypes: Names = NO_NAMES
    devices: Names = NO_NAMES
    none: bool = False
    other: bool = False
    absent: bool = False

    @classmethod
    def of(cls, value: Any) -> Possible:
        """Just this value."""
        match value:
            case None:
                return cls(none=True)
            case str():
                return cls(texts=Names(frozenset({value})))
            case float() if not math.isfinite(value):
                return cls(ALL_NUMBERS)
            case int() | float():
                return cls(Numbers(frozenset({value})))
        return cls(other=True)

    @classmethod
    def of_dtype(cls, name: str) -> Possible:
        """Just this dtype."""
        return cls(dtypes=Names(frozenset({name})))

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing."""
        return self.only_numbers and self.numbers.is_empty

    @property
    def has_names(self) -> bool:
        """Whether it holds texts, dtypes or devices."""
        return not (self.texts.is_empty and self.dtypes.is_empty and self.devices.is_empty)

    @property
    def only_numbers(self) -> bool:
        """Whether it holds numbers and nothing else."""
        return not (self.none or self.other or self.absent or self.has_names)

    def meet(self, other: Possible) -> Possible:
        """The values that both hold."""
        return Possible(
            self.numbers.meet(other.numbers),
            self.texts.meet(other.texts),
            self.dtypes.meet(other.dtypes),
            self.devices.meet(other.devices),
            self.none and other.none,
            self.other and other.other,
            self.absent and other.absent,
        )

    def join(self, other: Possible) -> Possible:
        """The values that either holds."""
        return Possible(
            self.numbers.join(other.numbers),
            self.texts.join(other.texts),
            self.dtypes.join(other.dtypes),
            self.devices.join(other.devices),
            self.none or other.none,
            self.other or other.other,
            self.absent or other.absent,
        )

    @property
    def there(self) -> Possible:
        """The values, without that there may be none."""
        return replace(self, absent=False)

    def minus(self, other: Possible) -> Possible:
        """The values that are not equal to the other's, where it is one value for sure."""
        number, text, dtype = other.numbers.only, other.texts.only, other.dtypes.only
        kinds = (not other.numbers.is_empty, not other.texts.is_empty, not other.dtypes.is_empty, other.none)
        if sum(kinds) != 1 or other.other or other.absent or not other.devices.is_empty:
            return self
        return replace(
            self,
            numbers=self.numbers if number is None else self.numbers.minus(number),
            texts=self.texts if text is None else self.texts.minus(text),
            dtypes=self.dtypes if dtype is None else self.dtypes.minus(dtype),
            none=self.none and not other.none,
        )


OTHER = Possible(other=True)
ABSENT = Possible(absent=True)
# What a rule about values does not apply to.
UNREAD = Possible(other=True, absent=True)
ANYTHING = Possible(ALL_NUMBERS, ALL_NAMES, ALL_NAMES, ALL_NAMES, none=True, other=True, absent=True)


def joined(parts: list[Possible]) -> Possible:
    """The values that any of several hold."""
    # Few numbers and few texts are the usual case: together at once, not one by one.
    numbers = [part.numbers.few for part in parts if part.numbers.few is not None and not part.numbers.nan]
    texts = [part.texts.names for part in parts if not part.texts.all_but]
    start = Possible(texts=Names(frozenset().union(*texts)))
    together = frozenset[int | float]().union(*numbers)
    if len(together) <= _MOST_ITEMS:
        start = replace(start, numbers=Numbers(together))
    elif together:
        start = replace(start, numbers=Numbers(low=min(together), high=max(together)))
    rest = [
        replace(
            part,
            numbers=part.numbers if part.numbers.few is None or part.numbers.nan else NO_NUMBERS,
            texts=part.texts if part.texts.all_but else NO_NAMES,
        )
        for part in parts
    ]
    return reduce(Possible.join, dict.fromkeys(rest), start)
