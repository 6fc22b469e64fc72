"""Figures and their intervals, against answers that are known."""

from __future__ import annotations

import random
from statistics import median

import pytest

from llm_op_guard.benching.estimate import Estimate, estimates, medians, pair_ratio, quantile


@pytest.mark.parametrize(
    ("values", "fraction", "expected"),
    [
        ([7.0], 0.99, 7.0),
        ([1, 2], 0.5, 1.5),
        ([3, 1, 2], 0.5, 2),
        ([4, 3, 2, 1], 0.25, 1.75),
        (range(101), 0.99, 99),
        (range(1, 11), 0.99, 9.91),
        ([5, 1, 9], 0, 1),
        ([5, 1, 9], 1, 9),
    ],
)
def test_quantiles(values: list[float], fraction: float, expected: float) -> None:
    assert quantile(values, fraction) == pytest.approx(expected)


def test_nothing_has_no_quantile() -> None:
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


def test_what_never_varies_has_no_width() -> None:
    assert estimates(5, lambda chosen: {"n": float(len(chosen))}) == {"n": Estimate(5.0, 5.0, 5.0)}


def test_the_value_is_that_of_all_rounds_in_order() -> None:
    seen = []

    def figures(chosen: object) -> dict[str, float]:
        seen.append(list(chosen))  # type: ignore[call-overload]
        return {"x": 0.0}

    estimates(4, figures, resamples=20)
    assert seen[0] == [0, 1, 2, 3]
    assert len(seen) == 21
    assert all(len(drawn) == 4 and set(drawn) <= {0, 1, 2, 3} for drawn in seen[1:])
    assert any(len(set(drawn)) < 4 for drawn in seen[1:]), "drawn with replacement"


def test_the_same_rounds_give_the_same_interval() -> None:
    values = [random.Random(3).gauss(10, 2) for _ in range(50)]
    one, other = (estimates(50, lambda chosen: {"m": median(values[n] for n in chosen)}) for _ in range(2))
    assert one == other


def test_the_interval_of_a_mean_is_that_of_the_textbook() -> None:
    chance = random.Random(0)
    values = [chance.gauss(0, 1) for _ in range(400)]
    found = estimates(400, lambda chosen: {"mean": sum(values[n] for n in chosen) / 400}, resamples=2000)["mean"]
    spread = (sum((v - found.value) ** 2 for v in values) / 400) ** 0.5 / 400**0.5
    assert found.low == pytest.approx(found.value - 1.96 * spread, abs=0.02)
    assert found.high == pytest.approx(found.value + 1.96 * spread, abs=0.02)


def test_about_19_of_20_intervals_hold_the_truth() -> None:
    chance = random.Random(1)
    held = 0
    for seed in range(100):
        values = [chance.expovariate(1.0) for _ in range(60)]
        found = estimates(
            60, lambda chosen, values=values: {"m": median(values[n] for n in chosen)}, resamples=200, seed=seed
        )["m"]
        held += found.low <= 0.6931 <= found.high  # the median of the distribution: ln 2
    assert 85 <= held <= 100


def test_medians_are_of_the_chosen_rounds() -> None:
    assert medians({"a": [1, 2, 9], "b": [5, 5, 5]}, [0, 1, 1]) == {"a": 2, "b": 5}


def test_a_ratio_of_pairs_knows_no_drift() -> None:
    # The machine becomes ten times as slow; each pair says 2.
    times = {"guarded": [2, 4, 20, 40], "plain": [1, 2, 10, 20]}
    assert pair_ratio(times, "guarded", "plain", range(4)) == 2
    assert pair_ratio(times, "guarded", "plain", [3]) == 2
    found = estimates(4, lambda chosen: {"ratio": pair_ratio(times, "guarded", "plain", chosen)})["ratio"]
    assert found == Estimate(2, 2, 2)


def test_scaled() -> None:
    assert Estimate(1.0, 0.5, 2.0).scaled(1e3) == Estimate(1000.0, 500.0, 2000.0)
