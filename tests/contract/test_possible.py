"""Sets of values are never too small; where they are small or plain they are exact."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_op_guard.contract.possible import ALL_NUMBERS, NO_NUMBERS, SIZES, WHOLE, Names, Numbers, Possible, joined

SAMPLES = [*range(-12, 13), *(n / 2 for n in range(-9, 10, 2)), 2**130, -(2**130), 1e300, float("inf"), -float("inf")]
MANY = settings(max_examples=500, deadline=None)
bound = st.none() | st.integers(-6, 6) | st.sampled_from([-2.5, 0.5, 3.5])


@st.composite
def numbers(draw: st.DrawFn) -> Numbers:
    """Numbers as conditions make them: intervals met with congruences, single numbers left out, a few of them."""
    if draw(st.booleans()):
        found = Numbers(frozenset(draw(st.lists(st.sampled_from(SAMPLES[:-2]), max_size=4))), nan=draw(st.booleans()))
    else:
        low_open, high_open = draw(st.booleans()), draw(st.booleans())
        between = Numbers(low=draw(bound), high=draw(bound), low_open=low_open, high_open=high_open)
        found = draw(st.sampled_from([ALL_NUMBERS, WHOLE, SIZES])).meet(replace(between, nan=True))
    if found.is_whole and found.few is None and draw(st.booleans()):
        step = draw(st.integers(2, 6))
        found = found.meet(Numbers(whole=True, step=step, rest=draw(st.integers(0, step - 1))))
    for number in draw(st.lists(st.sampled_from(SAMPLES[:-2]), max_size=2)):
        found = found.minus(number)
    return found


@MANY
@given(numbers(), numbers())
def test_meet_and_join_hold_what_they_should(a: Numbers, b: Numbers) -> None:
    meet, join = a.meet(b), a.join(b)
    for number in SAMPLES:
        assert meet.holds(number) is (a.holds(number) and b.holds(number)), (a, b, number)
        assert join.holds(number) or not (a.holds(number) or b.holds(number)), (a, b, number)
    assert (meet.nan, join.nan) == (a.nan and b.nan, a.nan or b.nan)


@MANY
@given(numbers())
def test_what_is_empty_holds_nothing(a: Numbers) -> None:
    assert not (a.is_empty and (a.nan or any(a.holds(number) for number in SAMPLES)))
    assert a.meet(a) == a
    assert a.join(NO_NUMBERS) == a == NO_NUMBERS.join(a)


@MANY
@given(numbers(), st.sampled_from(SAMPLES[:-2]))
def test_minus_leaves_the_others(a: Numbers, gone: float) -> None:
    rest = a.minus(gone)
    for number in SAMPLES:
        assert rest.holds(number) is (a.holds(number) and number != gone)


@MANY
@given(numbers())
def test_bounds_are_bounds(a: Numbers) -> None:
    (low, _), (high, _) = a.lower, a.upper
    for number in SAMPLES:
        if a.holds(number):
            assert low is None or low <= number
            assert high is None or number <= high


def test_emptiness_is_seen() -> None:
    def between(low: int, high: int) -> Numbers:
        return Numbers(low=low, high=high, low_open=True, high_open=True)

    assert WHOLE.meet(between(4, 5)).is_empty
    assert not ALL_NUMBERS.meet(between(4, 5)).is_empty
    assert ALL_NUMBERS.meet(between(4, 4)).is_empty
    assert WHOLE.meet(Numbers(whole=True, step=4, rest=0)).meet(Numbers(whole=True, step=6, rest=3)).is_empty
    assert WHOLE.meet(Numbers(low=2, high=3)).minus(2).minus(3).is_empty


def test_a_bound_that_one_of_two_holds_is_held() -> None:
    above, from_two = Numbers(low=2, low_open=True), Numbers(low=2)
    assert above.join(from_two).holds(2) and from_two.join(above).holds(2)
    assert not above.join(above).holds(2)


def test_what_grows_too_large_is_held_too_large() -> None:
    many = SIZES
    for number in range(1000):
        many = many.minus(number)
    assert len(many.without) <= 256
    assert many.holds(1000)
    steps = SIZES
    for prime in (2**61 - 1, 2**89 - 1, 2**107 - 1, 2**127 - 1):
        steps = steps.meet(Numbers(whole=True, step=prime, rest=0))
    assert steps.step < 2**257
    assert steps.holds(0)
    few = joined([Possible.of(number) for number in range(1000)])
    assert few.numbers.holds(999)


NAMES = [
    Names(),
    Names(frozenset("a")),
    Names(frozenset("ab")),
    Names(all_but=True),
    Names(frozenset("a"), all_but=True),
]


def written(names: Names) -> str:
    """The same in every process, as the order of a set is not."""
    return f"{'all but ' * names.all_but}{''.join(sorted(names.names))}"


@pytest.mark.parametrize("a", NAMES, ids=written)
@pytest.mark.parametrize("b", NAMES, ids=written)
def test_names(a: Names, b: Names) -> None:
    def holds(names: Names, name: str) -> bool:
        return (name in names.names) is not names.all_but

    for name in "abc":
        assert holds(a.meet(b), name) is (holds(a, name) and holds(b, name))
        assert holds(a.join(b), name) is (holds(a, name) or holds(b, name))
        assert holds(a.minus("a"), name) is (holds(a, name) and name != "a")
    assert a.is_empty is not any(holds(a, name) for name in "abc")


def test_minus_takes_one_value_only() -> None:
    one, text, none = Possible.of(1), Possible.of("a"), Possible.of(None)
    several = joined([one, Possible.of(2), text, none])
    assert several.minus(one) == joined([Possible.of(2), text, none])
    assert several.minus(text) == joined([one, Possible.of(2), none])
    assert several.minus(none) == joined([one, Possible.of(2), text])
    assert several.minus(several) == several
    assert several.minus(Possible(devices=Names(frozenset({"cuda"})))) == several  # of several devices of that type
    assert Possible.of(Fraction(1, 2)).other
