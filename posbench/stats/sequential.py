"""Intervals that hold however long one samples: betting on a mean, and the curve over gold positions by it."""

from __future__ import annotations

from typing import Any

import numpy as np

from posbench.stats.bootstrap import Array, Estimate
from posbench.stats.position_bias import CurveIntervals, contrast_with_others

ALPHA = 0.05
"""Probability with which an interval may ever miss its mean."""
JOINT_ALPHA = 0.025
"""Probability with which any interval of the contrasts of all positions together may ever miss: half of :data:`ALPHA`,
so that the tests for any bias (over all positions) and for its absence stay within 5 % together."""
BET_HORIZONS = (40, 400)
"""Numbers of questions at which the bets of a gambler gain most."""
BET_WEIGHTS = (0.3, 0.7)
"""Share of his capital that he bets for each of the horizons."""
MAX_BET = 0.5
"""Largest share of the capital that a single bet risks."""
FIRST_QUESTIONS = 20
"""Questions at each position before a run may stop."""
FIRST_FORECAST = 100
"""Questions at each position from which a curve can forecast the further questions that its bias needs."""
BISECTIONS = 12
"""Halvings of 0..1 in which an end of an interval is searched, on its wide side."""
FUTURES = 24
"""Continuations of a run that a forecast rests on."""
FARTHEST_FORECAST = 4000
"""Questions at each position beyond which no forecast looks."""


def log_capital(
    values: Array, candidate: float | Array, alpha: float, max_bet: float = MAX_BET
) -> Array:
    """Compute the log capital of a gambler who bets that a mean is above a candidate, after each value.

    If the mean is the candidate or below, the capital ever reaches 1 / alpha with a probability of at most
    ``alpha``, whatever rule ends the sampling.

    Source: Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting", capital process
    with predictable plug-in bets (Theorem 3, equation 26), here a mixture of two with fixed horizons.

    Args:
        values: Independent values of one distribution in 0..1, [..., N].
        candidate: Candidate mean, above 0, or one for each series, [..., 1].
        alpha: Probability of a miss at any time.
        max_bet: Largest share of the capital that a single bet risks, below 1; any holds the level.

    Returns:
        Natural logarithm of the capital, which begins with 1, [..., N].
    """
    count = np.arange(1, values.shape[-1] + 1)
    means = (0.5 + np.cumsum(values, axis=-1)) / (count + 1)
    variances = (0.25 + np.cumsum((values - means) ** 2, axis=-1)) / (count + 1)
    # A bet may rest on the values before it alone.
    first_variance = np.full_like(variances[..., :1], 0.25)
    known_variances = np.concatenate([first_variance, variances[..., :-1]], axis=-1)
    parts = []
    for horizon, weight in zip(BET_HORIZONS, BET_WEIGHTS, strict=True):
        bets = np.sqrt(2 * np.log(1 / alpha) / (known_variances * horizon))
        bets = np.minimum(bets, max_bet / candidate)
        gains = np.cumsum(np.log1p(bets * (values - candidate)), axis=-1)
        parts.append(np.log(weight) + gains)
    return np.logaddexp.reduce(parts)


def anytime_intervals(
    values: Array, low: float, high: float, alpha: float, max_bet: float = MAX_BET
) -> tuple[Array, Array]:
    """Compute intervals of means that hold whatever rule ended the sampling.

    They hold the candidate means that no gambler ever rejected, see :func:`log_capital`.

    Args:
        values: Independent values of one distribution in each of S series, [S, N].
        low: Their lowest possible value.
        high: Their highest possible value.
        alpha: Probability that one of the intervals misses its mean, after any number of values.
        max_bet: See :func:`log_capital`.

    Returns:
        Lower and upper ends, [S] each.
    """
    scaled = (np.asarray(values, dtype=np.float64) - low) / (high - low)
    lower = _lower_ends(scaled, alpha / 2, max_bet)
    upper = 1 - _lower_ends(1 - scaled, alpha / 2, max_bet)
    # Where every candidate was rejected, the mean lies between two candidates.
    means = scaled.mean(axis=-1)
    is_empty = lower > upper
    between = np.clip(means, upper, lower)
    lower, upper = np.where(is_empty, between, (lower, upper))
    return low + (high - low) * lower, low + (high - low) * upper


def _lower_ends(values: Array, alpha: float, max_bet: float) -> Array:
    """Return for each series the lower end of its interval at any time, by bisection.

    That is the largest mean such that it and all below it were rejected in favour of a higher one.

    Args:
        values: Series of values 0..1, shape (..., questions).
        alpha: Level of each test.
        max_bet: See :func:`log_capital`.
    """
    rejected = np.zeros(values.shape[:-1])
    not_rejected = np.ones(values.shape[:-1])
    for _ in range(BISECTIONS):
        candidates = (rejected + not_rejected) / 2
        capital = log_capital(values, candidates[..., None], alpha, max_bet).max(
            axis=-1
        )
        is_rejected = capital >= np.log(1 / alpha)
        rejected = np.where(is_rejected, candidates, rejected)
        not_rejected = np.where(is_rejected, not_rejected, candidates)
    return rejected


def curve_intervals(scores: Array) -> CurveIntervals:
    """Estimate the curve over gold positions with intervals that hold at any time.

    The interval of each position's contrast holds by itself, with a probability of 1 - :data:`ALPHA`; ``primacy`` and
    ``recency`` hold together. The interval of the position bias is made of all contrasts, whose intervals hold together
    with a probability of 1 - :data:`JOINT_ALPHA`.

    Args:
        scores: Scores in 0..1 of N >= 1 questions at K >= 3 gold positions in order, [N, K].
    """
    num_positions = scores.shape[1]
    inner = scores[:, 1:-1].mean(axis=1)
    contrasts = contrast_with_others(scores).T
    low, high = anytime_intervals(contrasts, -1, 1, JOINT_ALPHA / num_positions)
    distances = np.abs([low, high])
    # The smallest distance from 0 that each interval allows.
    nearest = np.where((low <= 0) & (high >= 0), 0, distances.min(axis=0))
    least, most = (
        float(np.sqrt((num_positions - 1) * (ends**2).sum())) / num_positions
        for ends in (nearest, distances.max(axis=0))
    )
    variance = scores.mean(axis=0).var(ddof=1) - noise_variance(scores)
    value = float(np.sqrt(max(variance, 0)))
    ends = np.array([scores[:, 0] - inner, scores[:, -1] - inner])
    primacy, recency = _estimates(ends, ALPHA / 2)
    return CurveIntervals(
        bias=Estimate(value, min(least, value), max(most, value), scores.size),
        primacy=primacy,
        recency=recency,
        contrasts=_estimates(contrasts, ALPHA),
    )


def noise_variance(scores: Array) -> float:
    """Variance over K positions of the mean scores of N questions, [N, K], that sampling noise explains."""
    num_questions, num_positions = scores.shape
    deviations = scores - scores.mean(axis=1, keepdims=True)
    total = deviations.var(axis=0).sum()
    return float(total / (num_positions - 1) / num_questions)


def _estimates(values: Array, alpha: float) -> list[Estimate]:
    """Estimate the means of series in -1..1 with intervals that hold at any time.

    Args:
        values: The series, [S, N].
        alpha: Probability that one of the intervals misses its mean.

    Returns:
        An estimate for each series; an interval that does not hold its mean is widened.
    """
    lows, highs = anytime_intervals(values, -1, 1, alpha)
    means = values.mean(axis=1)
    n = values.shape[1]
    return [
        Estimate(float(mean), float(min(low, mean)), float(max(high, mean)), n)
        for mean, low, high in zip(means, lows, highs, strict=True)
    ]


def verdict_times(scores: Array, margin: float) -> tuple[Array, Array]:
    """Compute the questions after which the intervals of :func:`curve_intervals` show a bias, or that there is none.

    Args:
        scores: Scores in 0..1 of S runs of N questions at K gold positions, [S, N, K].
        margin: Negligible difference of a position from the mean of the others.

    Returns:
        Questions of each run until some contrast surely differs from zero, and until every contrast is surely within
        the margin, [S] each; infinite where neither is so after N questions.
    """
    num_positions = scores.shape[-1]
    contrasts = np.moveaxis(contrast_with_others(scores), -1, 1)  # [S, K, N]
    above = (1 + contrasts) / 2
    below = (1 - contrasts) / 2
    alpha_of_bias = JOINT_ALPHA / num_positions / 2
    differs = np.zeros(contrasts.shape, dtype=bool)
    is_negligible = np.ones(contrasts.shape, dtype=bool)
    for values in (above, below):
        capital = log_capital(values, 0.5, alpha_of_bias)
        differs |= capital >= np.log(1 / alpha_of_bias)
        capital = log_capital(values, (1 - margin) / 2, ALPHA / 2)
        rejected = capital >= np.log(2 / ALPHA)
        is_negligible &= np.logical_or.accumulate(rejected, axis=-1)
    return _first_time(differs.any(axis=1)), _first_time(is_negligible.all(axis=1))


def _first_time(events: Any) -> Array:
    """Number of the first question, of :data:`FIRST_QUESTIONS` at least, after which each run [S, N] is True."""
    happened = np.logical_or.accumulate(events, axis=-1)
    happened[:, : FIRST_QUESTIONS - 1] = False
    return np.where(happened.any(axis=-1), happened.argmax(axis=-1) + 1.0, np.inf)


def forecast_questions(scores: Array, margin: float) -> int | None:
    """Forecast the total of questions at each position until a run shows a bias, or that there is none.

    The run is continued :data:`FUTURES` times with questions like those asked. The curve of few questions varies by
    noise alone, and the part of its variance that noise explains is no bias that further questions would show: that
    share of these questions, drawn anew for each continuation from its distribution, has its scores shuffled over the
    positions (James and Stein 1961). Before :data:`FIRST_FORECAST` questions all are shuffled: the forecast is then for
    a model without a bias, about the longest. The forecast is the number within a factor of two of which most
    continuations end.

    Args:
        scores: Scores in 0..1 of N >= 1 questions at K gold positions in order, [N, K].
        margin: Negligible difference of a position from the mean of the others.

    Returns:
        Questions at each position, N or more; None where most continuations take more than :data:`FARTHEST_FORECAST`.
    """
    num_questions = len(scores)
    times = np.full(FUTURES, np.inf)
    for farthest in (FARTHEST_FORECAST // 4, FARTHEST_FORECAST):
        if np.isinf(times).mean() > 0.2 and farthest > num_questions:
            times = _future_times(scores, farthest, margin)
    total = _centre_within_factor_two(times)
    return None if np.isinf(total) else max(int(np.ceil(total)), num_questions)


def _future_times(scores: Array, farthest: int, margin: float) -> Array:
    """Return the number of questions that a run needs for its verdict, in each of some simulated continuations.

    A continuation asks the questions so far again, drawn at random. The positions of some are shuffled: of as many as
    it takes to remove what noise alone explains of the differences between positions.

    Args:
        scores: Scores so far, shape (questions, positions).
        farthest: Number of questions up to which runs are continued; one that needs more is infinite.
        margin: Difference of a position from the mean of the others that counts.
    """
    num_questions, num_positions = scores.shape
    rng = np.random.default_rng(0)
    variance = max(float(scores.mean(axis=0).var(ddof=1)), 1e-12)
    noise = noise_variance(scores)
    size = farthest - num_questions
    times = []
    for _ in range(FUTURES):
        drawn = scores[rng.integers(num_questions, size=size)]
        # With few questions nothing can be told from noise: all are shuffled.
        share = 1.0
        if num_questions >= FIRST_FORECAST:
            # How much variance between positions noise alone may have given, drawn anew in each continuation.
            explained = noise * rng.chisquare(num_positions - 1) / (num_positions - 1)
            share = explained / variance
        # Differences of the positions that noise alone explains are shuffled away.
        is_shuffled = rng.random(size) < share
        drawn[is_shuffled] = rng.permuted(drawn[is_shuffled], axis=1)
        future = np.concatenate([scores, drawn])
        times.append(np.min(verdict_times(future[None], margin)))
    return np.array(times)


def _centre_within_factor_two(times: Array) -> float:
    """Return the number such that most of some numbers lie within a factor of two of it; infinite where most are.

    Args:
        times: Positive numbers, some of which may be infinite.
    """
    ordered = np.sort(times)
    if np.isinf(ordered[len(ordered) // 2]):
        return float("inf")
    finite = ordered[np.isfinite(ordered)]
    # From each number, the last one that is at most four times as large.
    last = np.searchsorted(finite, 4 * finite, side="right") - 1
    counts = last - np.arange(len(finite))
    best = np.flatnonzero(counts == counts.max())
    first = best[len(best) // 2]
    return float(np.sqrt(finite[first] * finite[last[first]]))
