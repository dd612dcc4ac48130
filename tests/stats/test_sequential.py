"""Intervals by betting: the definition re-computed, the rate of misses under peeking, and what the verdict takes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from posbench.stats.sequential import (
    BET_HORIZONS,
    BET_WEIGHTS,
    BISECTIONS,
    FIRST_QUESTIONS,
    MAX_BET,
    anytime_intervals,
    curve_intervals,
    forecast_questions,
    verdict_times,
)
from posbench.stats.shape import NEGLIGIBLE_CONTRAST, is_flat
from tools.verdicts import (
    NAMED_QUESTIONS,
    POSITIONS,
    count_no_bias,
    simulated_scores,
    with_lost,
)


def capital_rejects(values: list[float], candidate: float, alpha: float) -> bool:
    """Whether a gambler who bets that the mean is above a candidate ever has 1 / alpha, value by value."""
    total, squares, variance = 0.5, 0.25, 0.25
    capital = list(BET_WEIGHTS)
    for number, value in enumerate(values, 1):
        for index, horizon in enumerate(BET_HORIZONS):
            bet = math.sqrt(2 * math.log(1 / alpha) / (variance * horizon))
            capital[index] *= 1 + min(bet, MAX_BET / candidate) * (value - candidate)
        if sum(capital) >= 1 / alpha:
            return True
        total += value
        squares += (value - total / (number + 1)) ** 2
        variance = squares / (number + 1)
    return False


def test_the_interval_holds_the_means_that_no_gambler_rejects() -> None:
    rng = np.random.default_rng(1)
    values = rng.choice([0.0, 0.5, 1.0], p=[0.1, 0.2, 0.7], size=80)
    step = 0.5**BISECTIONS
    for count in (1, 7, 30, 80):
        seen = values[:count]
        (low,), (high,) = anytime_intervals(seen[None], 0, 1, alpha=0.1)
        for candidate in np.linspace(0.05, 0.95, 19):
            is_rejected = capital_rejects(list(seen), float(candidate), 0.05)
            is_rejected |= capital_rejects(list(1 - seen), 1 - float(candidate), 0.05)
            assert is_rejected == (not low <= candidate <= high) or (
                min(abs(candidate - low), abs(candidate - high)) < step
            )


def test_values_of_another_range_give_the_same_intervals_there() -> None:
    values = np.random.default_rng(2).random((3, 40))
    unit = np.array(anytime_intervals(values, 0, 1, 0.1))
    np.testing.assert_allclose(
        anytime_intervals(4 * values - 3, -3, 1, 0.1), 4 * unit - 3, atol=1e-12
    )


@pytest.mark.parametrize("shares", [(0.2, 0.6, 0.2), (0.02, 0.96, 0.02)])
def test_at_most_one_interval_in_twenty_ever_misses(
    shares: tuple[float, float, float],
) -> None:
    """An interval only narrows, so that its last state holds all the looks before it."""
    values = np.random.default_rng(3).choice([-1.0, 0, 1], p=shares, size=(400, 400))
    low, high = anytime_intervals(values, -1, 1, 0.05)
    assert ((low > 0) | (high < 0)).sum() <= 20


def test_an_interval_for_a_fixed_number_misses_more_often() -> None:
    # So the test above is able to fail.
    count = np.arange(1, 401)
    rng = np.random.default_rng(3)
    values = rng.choice([-1.0, 0, 1], p=(0.2, 0.6, 0.2), size=(400, 400))
    means = np.cumsum(values, axis=1) / count
    variances = np.cumsum(values**2, axis=1) / count - means**2
    half_widths = 1.96 * np.sqrt(variances / count)
    assert (np.abs(means) > half_widths)[:, 20:].any(axis=1).sum() > 60


@pytest.mark.parametrize("shares", [(0.7, 0.7, 0.7), (0.9, 0.9, 0.6, 0.9, 0.9)])
def test_the_times_of_a_verdict_are_those_of_its_intervals(
    shares: tuple[float, ...],
) -> None:
    scores = simulated_scores(np.random.default_rng(4), shares, 600)
    bias, no_bias = (
        times[0] for times in verdict_times(scores[None], NEGLIGIBLE_CONTRAST)
    )
    first = int(min(bias, no_bias))
    assert FIRST_QUESTIONS < first < 600
    before, after = (curve_intervals(scores[:n]) for n in (first - 3, first + 1))
    assert not before.bias.ci_low > 0 and not is_flat(before.contrasts)
    assert (after.bias.ci_low > 0) == (bias < no_bias)
    assert is_flat(after.contrasts) == (no_bias < bias)


def test_nothing_is_told_by_a_few_questions() -> None:
    scores = np.tile([1.0, 0.0, 1.0], (60, 1))
    bias, no_bias = verdict_times(scores[None], NEGLIGIBLE_CONTRAST)
    assert bias[0] >= FIRST_QUESTIONS and np.isinf(no_bias[0])


@pytest.mark.parametrize("num_positions", POSITIONS)
@pytest.mark.parametrize("share", NAMED_QUESTIONS)
def test_a_reader_without_bias_gets_there(num_positions: int, share: float) -> None:
    """Within the questions that docs/metrics.md names, at least four of five; the table there has more simulations."""
    rng = np.random.default_rng(num_positions)
    questions = NAMED_QUESTIONS[share]
    scores = simulated_scores(rng, [share] * num_positions, questions, runs=100)
    bias, no_bias = verdict_times(scores, NEGLIGIBLE_CONTRAST)
    assert (no_bias < bias).sum() >= 80
    assert ((bias <= no_bias) & np.isfinite(bias)).sum() <= 5


@pytest.mark.parametrize("num_positions", POSITIONS)
@pytest.mark.parametrize("share", NAMED_QUESTIONS)
def test_a_position_that_is_lost_by_twice_the_margin_is_hardly_ever_no_bias(
    num_positions: int, share: float
) -> None:
    for position in {0, num_positions // 2}:
        shares = with_lost(num_positions, [position], share, 2 * NEGLIGIBLE_CONTRAST)
        rng = np.random.default_rng((num_positions, position))
        assert count_no_bias(simulated_scores(rng, shares, 400, runs=40)) <= 2


def test_peeking_at_intervals_of_a_fixed_number_names_a_bias_far_too_often() -> None:
    # So the rate of false biases above is one that can be missed.
    scores = simulated_scores(np.random.default_rng(5), [0.6] * 5, 400, runs=60)
    contrasts = (scores - scores.mean(axis=2, keepdims=True)) * 5 / 4
    count = np.arange(1, 401)[None, :, None]
    means = np.cumsum(contrasts, axis=1) / count
    errors = np.sqrt((np.cumsum(contrasts**2, axis=1) / count - means**2) / count)
    is_biased = (np.abs(means) > 2.6 * errors)[:, FIRST_QUESTIONS:]
    assert is_biased.any(axis=(1, 2)).sum() > 10


def test_a_forecast_is_near_what_a_run_needs() -> None:
    """At least four of five within a factor of two; from few questions it is what a reader without bias takes."""
    rng = np.random.default_rng(6)
    hits = []
    for share, asked in ((0.6, 100), (0.8, 100), (0.95, 20)):
        scores = simulated_scores(rng, [share] * 5, 2000, runs=6)
        needed = np.minimum(*verdict_times(scores, NEGLIGIBLE_CONTRAST))
        for run, number in zip(scores, needed, strict=True):
            if number > asked:
                forecast = forecast_questions(run[:asked], NEGLIGIBLE_CONTRAST)
                hits.append(forecast is not None and 0.5 <= forecast / number <= 2)
    assert len(hits) > 12 and sum(hits) >= 0.8 * len(hits)


def test_no_forecast_says_one_more_question_after_five() -> None:
    """A reader of 95, 50, 35, 50 and 95 % needs about 30; from five questions alone "1 more" was said of 4 of 10."""
    rng = np.random.default_rng(1)
    for _ in range(5):
        scores = simulated_scores(rng, [0.95, 0.5, 0.35, 0.5, 0.95], 5)
        forecast = forecast_questions(scores, NEGLIGIBLE_CONTRAST)
        assert forecast is None or forecast >= 100
