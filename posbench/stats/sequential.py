"""Intervals that hold however long one samples: confidence sequences of a mean, and the rule that stops on them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from posbench.stats.bootstrap import Array, Estimate

ALPHA = 0.05
"""Probability with which any interval of a sequence may ever miss its mean."""
GRID_SIZE = 1001
"""Candidate means that are tested: intervals end at one of them, on the wide side."""
MAX_BET = 0.5
"""Share of the capital that a bet risks at most."""
FIRST_QUESTIONS = 20
"""Questions before a run may stop."""


def confidence_sequence(values: Array, low: float, high: float, alpha: float) -> Array:
    """Compute an interval of the mean after each of N values, all of which hold at once.

    Whatever rule stops the sampling, the last interval misses the mean with a probability of at most ``alpha``.
    A candidate mean is rejected when a gambler who bets against it multiplies his capital by 1 / alpha.

    Source: Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting", hedged
    capital process with predictable plug-in bets (Theorem 3, equation 26).

    Args:
        values: Independent values of one distribution, [N].
        low: Their lowest possible value.
        high: Their highest possible value.
        alpha: Probability of a miss at any time.

    Returns:
        Ends of the intervals, [N, 2], each within the one before it.
    """
    scaled = (np.asarray(values, dtype=np.float64) - low) / (high - low)
    count = np.arange(1, len(scaled) + 1)
    means = (0.5 + np.cumsum(scaled)) / (count + 1)
    variances = (0.25 + np.cumsum((scaled - means) ** 2)) / (count + 1)
    # A bet may rest on the values before it alone.
    known_variances = np.concatenate([[0.25], variances[:-1]])
    bets = np.sqrt(2 * np.log(2 / alpha) / (known_variances * count * np.log1p(count)))

    candidates = np.linspace(0, 1, GRID_SIZE)
    errors = scaled[:, None] - candidates
    with np.errstate(divide="ignore"):
        bets_on_more = np.minimum(bets[:, None], MAX_BET / candidates)
        bets_on_less = np.minimum(bets[:, None], MAX_BET / (1 - candidates))
    log_more = np.cumsum(np.log1p(bets_on_more * errors), axis=0)
    log_less = np.cumsum(np.log1p(-bets_on_less * errors), axis=0)
    log_capital = np.maximum(log_more, log_less) + np.log(0.5)
    rejected = np.logical_or.accumulate(log_capital >= np.log(1 / alpha), axis=0)

    ends = np.empty((len(scaled), 2))
    for index, row in enumerate(rejected):
        kept = np.flatnonzero(~row)
        # Where every candidate is rejected, the mean lies between two of them.
        if not len(kept):
            kept = np.array([round(means[index] * (GRID_SIZE - 1))])
        first = max(kept[0] - 1, 0)
        last = min(kept[-1] + 1, GRID_SIZE - 1)
        ends[index] = candidates[[first, last]]
    return low + (high - low) * ends


def contrasts_of_questions(scores: Array) -> dict[str, Array]:
    """Compute what each question says about the shape of the score over the gold position.

    Args:
        scores: Scores in 0..1 of N questions at K >= 3 gold positions in order, [N, K].

    Returns:
        For each question, [N], ``primacy`` (first position minus the mean of the inner ones) and ``recency``
        (last position minus that mean).
    """
    inner = scores[:, 1:-1].mean(axis=1)
    return {"primacy": scores[:, 0] - inner, "recency": scores[:, -1] - inner}


def shape_intervals(scores: Array, alpha: float = ALPHA) -> dict[str, Estimate]:
    """Estimate the contrasts of the shape with intervals that hold together and at any time.

    Args:
        scores: Scores in 0..1 of N >= 1 questions at K >= 3 gold positions in order, [N, K].
        alpha: Probability that any of the intervals ever misses.

    Returns:
        Each of :func:`contrasts_of_questions`, its interval the last one of its confidence sequence.
    """
    contrasts = contrasts_of_questions(scores)
    result = {}
    for name, values in contrasts.items():
        ends = confidence_sequence(values, -1, 1, alpha / len(contrasts))
        low, high = ends[-1]
        result[name] = Estimate(
            float(values.mean()), float(low), float(high), len(values)
        )
    return result


def is_decided(estimate: Estimate, negligible: float) -> bool:
    """Return whether an interval says that a contrast differs from zero, or that it is negligible."""
    excludes_zero = estimate.ci_low > 0 or estimate.ci_high < 0
    is_negligible = -negligible < estimate.ci_low and estimate.ci_high < negligible
    return excludes_zero or is_negligible


def shape_is_decided(intervals: Mapping[str, Estimate], negligible: float) -> bool:
    """Return whether the contrasts of :func:`shape_intervals` name a shape, after :data:`FIRST_QUESTIONS`.

    They do where each is decided, or where one end is surely above both the inner positions and the other end.
    """
    if min(estimate.n for estimate in intervals.values()) < FIRST_QUESTIONS:
        return False
    return bool(dominant_end(intervals)) or all(
        is_decided(estimate, negligible) for estimate in intervals.values()
    )


def dominant_end(intervals: Mapping[str, Estimate]) -> str:
    """Return the contrast that is surely above zero and above the other one; empty where neither is."""
    for name, estimate in intervals.items():
        others = [other for key, other in intervals.items() if key != name]
        if estimate.ci_low > max(0.0, *(other.ci_high for other in others)):
            return name
    return ""


def more_questions(estimate: Estimate, negligible: float) -> int:
    """Estimate how many questions more would decide a contrast, if its mean stays where it is.

    The half-width of an interval shrinks with the square root of the number of questions.
    """
    half_width = (estimate.ci_high - estimate.ci_low) / 2
    distance = abs(estimate.value)
    needed_half_width = max(distance, negligible - distance)
    total = estimate.n * (half_width / needed_half_width) ** 2
    return max(int(np.ceil(total)) - estimate.n, 0)
