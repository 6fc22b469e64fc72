"""Numbers that are not Python's own count as the numbers they are, in the compiled check as in explain."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import llm_op_guard as og


@og.guard("""
    n: int
    f: float
    m: None | int | str
    require(n * 2 < 200, id="doubled")
    require(f * f <= 2.25, id="squared")
    require(m * 3 != 300, id="tripled")
""")
def operator(n: Any, f: Any = 1.0, m: Any = None) -> None:
    pass


def broken(*arguments: Any) -> list[str]:
    try:
        operator(*arguments)
    except og.GuardError as error:
        return [violation.rule_id for violation in error.violations]
    return []


@pytest.mark.parametrize("kind", [int, np.int8, np.int16, np.uint8, np.int64])
def test_integers(kind: Any) -> None:
    """100 * 2 is 200, in eight bits too."""
    assert broken(kind(99)) == []
    assert broken(kind(100)) == ["doubled"]
    assert broken(1, 1.0, kind(99)) == []
    assert broken(1, 1.0, kind(100)) == ["tripled"]


@pytest.mark.parametrize("kind", [float, np.float16, np.float32, np.float64])
def test_reals(kind: Any) -> None:
    assert broken(1, kind(1.5)) == []
    assert broken(1, kind(2)) == ["squared"]
    assert broken(1, kind("inf")) == ["squared"]
    assert broken(1, kind("nan")) == ["squared"]  # NaN is not at most anything


def test_numbers_of_numpy_are_shown_as_numbers() -> None:
    with pytest.raises(og.GuardError, match=r"f \* f = 4.0"):
        operator(1, np.float32(2))
    with pytest.raises(og.GuardError, match=r"n \* 2 = 200"):
        operator(np.int8(100))


def test_bool_and_int_for_a_real() -> None:
    assert broken(True, True) == []
    assert broken(1, 2) == ["squared"]


@pytest.mark.parametrize("value", [Decimal(9), Fraction(9)])
@pytest.mark.filterwarnings("error")
def test_numbers_with_an_arithmetic_of_their_own_are_beyond_the_language(value: Any) -> None:
    assert broken(1, value) == []


def test_what_is_no_number_is_refused() -> None:
    assert broken("1") == ["n.type"]
    assert broken(1, None) == ["f.type"]
    assert broken(1.5) == ["n.type"]
    assert broken(np.ones(1)) == ["n.type"]


def test_the_argument_stays_what_it_is() -> None:
    @og.guard("n: int\nrequire(n > 0)")
    def same(n: Any) -> Any:
        return n

    given = np.int8(3)
    assert same(given) is given
