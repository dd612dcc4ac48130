"""Confidence sequences: the definition re-computed, the rate of misses under peeking, and how soon they decide."""

from __future__ import annotations

import math

import numpy as np
import pytest

from posbench.stats import sequential
from posbench.stats.bootstrap import Estimate
from posbench.stats.sequential import (
    GRID_SIZE,
    confidence_sequence,
    dominant_end,
    is_decided,
    more_questions,
    shape_intervals,
    shape_is_decided,
)


def capital_rejects(values: list[float], candidate: float, alpha: float) -> bool:
    """Whether a gambler against a candidate mean ever multiplies his capital, value by value."""
    total, squares = 0.5, 0.25
    variance = 0.25
    more = less = 0.5
    for number, value in enumerate(values, 1):
        bet = math.sqrt(
            2 * math.log(2 / alpha) / (variance * number * math.log(1 + number))
        )
        more *= 1 + min(bet, 0.5 / candidate) * (value - candidate)
        less *= 1 - min(bet, 0.5 / (1 - candidate)) * (value - candidate)
        if max(more, less) >= 1 / alpha:
            return True
        total += value
        mean = total / (number + 1)
        squares += (value - mean) ** 2
        variance = squares / (number + 1)
    return False


def test_the_interval_holds_the_means_that_no_gambler_rejects() -> None:
    rng = np.random.default_rng(1)
    values = rng.choice([0.0, 0.5, 1.0], p=[0.1, 0.2, 0.7], size=80)
    ends = confidence_sequence(values, 0, 1, alpha=0.05)
    step = 1 / (GRID_SIZE - 1)
    for count in (1, 7, 30, 80):
        low, high = ends[count - 1]
        seen = list(values[:count])
        for candidate in np.linspace(0.05, 0.95, 19):
            rejected = capital_rejects(seen, float(candidate), 0.05)
            if rejected:
                assert not low + step < candidate < high - step
            else:
                assert low <= candidate <= high


def test_values_of_another_range_give_the_same_intervals_there() -> None:
    values = np.random.default_rng(2).random(40)
    unit = confidence_sequence(values, 0, 1, 0.1)
    np.testing.assert_allclose(
        confidence_sequence(4 * values - 3, -3, 1, 0.1), 4 * unit - 3, atol=1e-12
    )


@pytest.mark.parametrize("shares", [(0.2, 0.6, 0.2), (0.02, 0.96, 0.02)])
def test_at_most_one_unbiased_run_in_twenty_ever_seems_biased(
    shares: tuple[float, float, float],
) -> None:
    rng = np.random.default_rng(3)
    num_misses = 0
    for _ in range(200):
        values = rng.choice([-1.0, 0.0, 1.0], p=shares, size=200)
        ends = confidence_sequence(values, -1, 1, 0.05)
        num_misses += bool(((ends[:, 0] > 0) | (ends[:, 1] < 0)).any())
    assert num_misses <= 10


def test_an_interval_for_a_fixed_number_misses_more_often() -> None:
    # So the test above is able to fail.
    rng = np.random.default_rng(3)
    count = np.arange(1, 201)
    values = rng.choice([-1.0, 0.0, 1.0], p=(0.2, 0.6, 0.2), size=(200, 200))
    means = np.cumsum(values, axis=1) / count
    variances = np.cumsum(values**2, axis=1) / count - means**2
    half_widths = 1.96 * np.sqrt(variances / count)
    assert (np.abs(means) > half_widths)[:, 20:].any(axis=1).sum() > 30


def score_matrix(rng: np.random.Generator, accuracy: list[float], n: int) -> np.ndarray:
    return (rng.random((n, len(accuracy))) < accuracy).astype(float)


def questions_until_decided(scores: np.ndarray, negligible: float) -> int | None:
    for count in range(20, len(scores) + 1, 40):
        if shape_is_decided(shape_intervals(scores[:count]), negligible):
            return count
    return None


def test_a_drop_of_the_middle_is_decided_early_and_with_its_sign() -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        scores = score_matrix(rng, [0.9, 0.3, 0.3, 0.3, 0.9], 300)
        count = questions_until_decided(scores, 0.1)
        assert count is not None and count <= 80
        intervals = shape_intervals(scores[:count])
        assert intervals["primacy"].ci_low > 0 and intervals["recency"].ci_low > 0


def test_a_flat_curve_takes_longer_and_is_no_bias() -> None:
    rng = np.random.default_rng(5)
    num_wrong = 0
    for _ in range(20):
        scores = score_matrix(rng, [0.8] * 5, 300)
        count = questions_until_decided(scores, 0.1)
        if count is None:
            continue
        assert count >= 100
        intervals = shape_intervals(scores[:count])
        num_wrong += any(e.ci_low > 0 or e.ci_high < 0 for e in intervals.values())
    assert num_wrong <= 1


def test_one_end_above_all_others_needs_no_verdict_on_the_other_end() -> None:
    first = Estimate(0.7, 0.5, 0.8, 50)
    undecided = Estimate(0.1, -0.1, 0.3, 50)
    assert not is_decided(undecided, 0.1)
    assert shape_is_decided({"primacy": first, "recency": undecided}, 0.1)
    assert dominant_end({"primacy": first, "recency": undecided}) == "primacy"
    overlapping = Estimate(0.4, -0.1, 0.6, 50)
    assert not shape_is_decided({"primacy": first, "recency": overlapping}, 0.1)
    below = Estimate(-0.4, -0.6, -0.2, 50)
    assert dominant_end({"primacy": undecided, "recency": below}) == ""


def test_nothing_is_decided_by_a_few_questions() -> None:
    scores = np.tile([1.0, 0.0, 1.0], (sequential.FIRST_QUESTIONS - 1, 1))
    assert not shape_is_decided(shape_intervals(scores), 0.1)
    scores = np.tile([1.0, 0.0, 1.0], (sequential.FIRST_QUESTIONS, 1))
    assert shape_is_decided(shape_intervals(scores), 0.1)


def test_more_questions_are_those_at_which_the_interval_would_decide() -> None:
    undecided = Estimate(value=0.1, ci_low=-0.1, ci_high=0.3, n=50)
    more = more_questions(undecided, negligible=0.05)
    half_width = 0.2 * math.sqrt(50 / (50 + more))
    assert half_width <= 0.1
    assert 0.2 * math.sqrt(50 / (50 + more - 1)) > 0.1
    assert not is_decided(undecided, 0.05)
