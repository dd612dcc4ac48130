"""Statistics of a score over gold positions: spread, gap, primacy, recency, middle drop (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from posbench.late import pd
from posbench.stats.bootstrap import (
    Z95,
    Array,
    Estimate,
    chunk_sizes,
    combined,
    mean,
    percentile,
    quantiles,
    resampled,
    tail,
)

CONTRAST = "position_contrast"
"""Score at a gold position minus the mean of the other positions, one row per position."""
MINUS_HALF = "position_bias_minus_half"
"""Position bias under a method minus half of the unmodified model's: below zero where more than half is removed."""
STATISTICS = ("position_bias", "gap", "gap_null", "primacy", "recency", "middle_drop")
"""Over three gold positions or more: :func:`position_bias` (the one to sort by), best minus worst position, its
expectation if positions do not matter, and the others of :func:`curve_statistics`."""

SMALLEST_BIAS = 0.02
"""Position bias (standard deviation over gold positions) worth naming.

Of a straight line over five positions whose ends lie five points apart it is 0.02.
"""
BOOTSTRAPPED = ("primacy", "recency", "middle_drop", "position_bias")
"""Statistics that are compared with the unmodified model's."""
TOO_FEW = "too few questions"
"""Beginning of a note where even all right, or all wrong, would not tell."""
FLOOR_MARGIN = 0.2
"""At the floor, the average is surely less than this above a guess; 20 wrong answers of 20 give an interval to 0.16."""
NEGLIGIBLE_SHARE = 0.05
"""A score that exceeds guessing, or falls short of 1, by no more than this shows no bias.

See :func:`score_limit_note`.
"""


class CurveIntervals(NamedTuple):
    """Position bias of a curve over K gold positions, each number with its interval.

    Attributes:
        bias: Position bias.
        primacy: First position minus the mean of the inner ones.
        recency: Last position minus that mean.
        contrasts: Each position minus the mean of the others, [K].
    """

    bias: Estimate
    primacy: Estimate
    recency: Estimate
    contrasts: Sequence[Estimate]


class StatisticRow(NamedTuple):
    """A statistic of a method.

    Attributes:
        method: The method.
        statistic: One of :data:`STATISTICS`, ``<statistic>_difference``, :data:`CONTRAST` or :data:`MINUS_HALF`.
        estimate: The estimate; NaN with a note.
        note: Why the estimate says nothing, for the method or, in a comparison, for the unmodified model.
        position: Gold position of a contrast; None: over all positions.
    """

    method: str
    statistic: str
    estimate: Estimate
    note: str
    position: float | None = None


def position_curves(
    frame: pd.DataFrame,
    score_column: str,
    group_column: str,
    resamples: int,
    seed: int = 0,
) -> dict[Any, tuple[Array, Array]]:
    """Mean score at K gold positions, with bootstrap draws of questions that all curves share.

    Args:
        frame: Rows with gold_position, cluster, and the columns ``score_column`` and ``group_column``.
        score_column: Column of the score.
        group_column: Column with a curve for each of its values.
        resamples: Number of draws R.
        seed: Of the random generator.

    Returns:
        For each value of ``group_column`` the curve [K] and its draws [R, K], NaN at a position without a row.
    """
    frame = frame.dropna(subset=[score_column])
    positions = sorted(frame["gold_position"].unique())
    keys = list(dict.fromkeys(frame[group_column]))
    cells = dict(iter(frame.groupby([group_column, "gold_position"], sort=False)))
    groups = {}
    for key in keys:
        for position in positions:
            cell = cells.get((key, position))
            if cell is not None:
                groups[key, position] = (
                    cell[score_column].to_numpy(),
                    list(cell["cluster"]),
                )
    means = resampled(groups, stratified=True, resamples=resamples, seed=seed)
    missing = (np.nan, np.full(resamples, np.nan))
    result = {}
    for key in keys:
        points = [means.get((key, position), missing) for position in positions]
        curve = np.array([value for value, _ in points])
        draws = np.stack([point_draws for _, point_draws in points], axis=-1)
        result[key] = (curve, draws)
    return result


def curve_statistics(means: Array) -> dict[str, Array]:
    """Compute the statistics of mean scores at K >= 3 gold positions in order.

    ``primacy`` and ``recency`` are first and last position minus the mean of the inner ones; ``middle_drop``
    is the mean of the ends minus the lowest inner one; ``gap`` is best minus worst (Zhang et al. 2024,
    Ms-PoE: "Gap"). Sampling noise alone raises the last two.

    Args:
        means: Curves, [..., K].

    Returns:
        Each statistic, [...], by name.
    """
    first = means[..., 0]
    inner = means[..., 1:-1]
    last = means[..., -1]
    return {
        "primacy": first - inner.mean(-1),
        "recency": last - inner.mean(-1),
        "middle_drop": (first + last) / 2 - inner.min(-1),
        "gap": means.max(-1) - means.min(-1),
    }


def contrast_with_others(scores: Array) -> Array:
    """Score at each of K gold positions minus the mean of the other positions, [..., K]."""
    num_positions = scores.shape[-1]
    means = scores.mean(axis=-1, keepdims=True)
    return (scores - means) * (num_positions / (num_positions - 1))


def dip_from_rows(
    frame: pd.DataFrame, name: str, resamples: int
) -> tuple[Estimate, Array]:
    """Estimate the :func:`dip_from_curve` of a column: 1 - its mean in the middle / its mean at the lower end.

    The middle is every gold position at a depth of 25 to 75 % of the prompt, give or take 5 for rounded
    positions.

    Args:
        frame: Rows of one number of items, with items, gold_position, depth (0..1), cluster, and the column.
        name: The column.
        resamples: Number of draws R.

    Returns:
        The estimate and its draws, [R].
    """
    ((curve, draws),) = position_curves(frame, name, "items", resamples).values()
    depth = np.sort(frame["depth"].unique())
    middle = (depth >= 0.2) & (depth <= 0.8)
    middle[[0, -1]] = False
    estimate = dip_from_curve(
        curve, draws, middle, len(frame), frame["cluster"].nunique()
    )
    return estimate, _dips_from_ends(draws, middle).min(1)


def dip_from_curve(
    curve: Array, draws: Array, middle: NDArray[np.bool_], n: int, questions: int
) -> Estimate:
    """Estimate 1 - mean of a curve in the middle / its lower end.

    Of two equal ends the lower one is the unluckier one. So each end of the interval is the lower of the two
    that the ends of the curve give one by one.

    Args:
        curve: Means at K gold positions, [K].
        draws: Its bootstrap draws, [R, K].
        middle: Mask of the positions in the middle, [K].
        n: Prompts behind the curve.
        questions: Clusters behind the curve.
    """
    intervals = [
        quantiles(draws_of_end, questions)
        for draws_of_end in _dips_from_ends(draws, middle).T
    ]
    low, high = np.min(intervals, axis=0)
    value = _dips_from_ends(curve[None], middle).min()
    return Estimate(float(value), float(low), float(high), n)


def _dips_from_ends(means: Array, middle: NDArray[np.bool_]) -> Array:
    """Return 1 - mean in the middle / mean at an end, for the first and the last position of curves.

    Args:
        means: Curves, [N, K].
        middle: Mask of the positions in the middle, [K].

    Returns:
        [N, 2]; NaN where an end is 0.
    """
    ends = means[:, [0, -1]]
    missing = np.full((len(means), 2), np.nan)
    if not middle.any():
        return missing
    inner = means[:, middle].mean(1, keepdims=True)
    has_ends = (ends > 0).all(1, keepdims=True)
    return np.divide(ends - inner, ends, out=missing, where=has_ends)


def position_bias(curve: Array, draws: Array) -> tuple[float, Array]:
    """Compute the standard deviation of a curve over gold positions without the share of sampling noise.

    Args:
        curve: Means at K >= 2 gold positions, [K].
        draws: Its bootstrap draws, [R, K].

    Returns:
        The root of the curve's variance minus the noise variance, 0 if noise explains it all; and for each draw [R] the
        deviation at which a curve of this shape plus the draw's errors would have the observed variance, 0 if the
        errors alone vary more.
    """
    variance = curve.var(ddof=1)
    errors = draws - curve
    noise = np.nanmean(draws.var(-1, ddof=1)) - variance
    error_variance = errors.var(-1, ddof=1)
    shape = (curve - curve.mean()) / np.sqrt(variance or 1)
    # Solve var(deviation * shape + errors) = observed variance, a quadratic equation, for the deviation.
    covariance = errors @ shape / (len(curve) - 1)
    excess = max(variance, np.nanmean(error_variance)) - error_variance
    deviations = np.sqrt(np.maximum(covariance**2 + excess, 0)) - covariance
    bias = float(np.sqrt(np.maximum(variance - noise, 0)))
    return bias, np.where(excess <= 0, 0.0, deviations)


def score_limit_note(
    positions: Iterable[Estimate], average: Estimate, chance: float, questions: int
) -> str:
    """Explain why the scores at the gold positions can show no bias, by their 95 % intervals.

    Args:
        positions: Mean score (0..1) at each gold position.
        average: Mean score over all positions.
        chance: Score of a guess, 0..1.
        questions: Questions at each position.

    Returns:
        :func:`floor_note`, else :func:`ceiling_note`; empty where a bias can be seen.
    """
    estimates = list(positions)
    note = floor_note(estimates, average, chance, questions)
    return note or ceiling_note(estimates, questions)


def ceiling_note(positions: Iterable[Estimate], questions: int) -> str:
    """Explain that no score is surely below 1, give or take :data:`NEGLIGIBLE_SHARE`; see :func:`score_limit_note`.

    Args:
        positions: Mean score at each gold position.
        questions: Questions at each position.

    Returns:
        ``at the ceiling: ...``; ``too few questions: ...`` if their number could not show the opposite even with all
        wrong (Wilson's interval); empty where a score is surely lower.
    """
    ceiling = 1 - NEGLIGIBLE_SHARE
    if min(estimate.ci_high for estimate in positions) < ceiling:
        return ""
    if questions < (least := fewest_questions(NEGLIGIBLE_SHARE)):
        return f"{TOO_FEW}: ask {least} or more at each gold position"
    return f"at the ceiling: no score is reliably below {100 * ceiling:.0f} %"


def floor_note(
    positions: Iterable[Estimate], average: Estimate, chance: float, questions: int
) -> str:
    """Explain that no score is surely above a guess, give or take :data:`NEGLIGIBLE_SHARE`.

    Arguments as of :func:`score_limit_note`.

    Returns:
        ``at the floor: ...``. If the number of questions could not show the opposite even with all right, or the
        average may lie far above the floor, ``nothing answered: ...`` if the average is no better than a guess, else
        ``too few questions: ...``. Empty where a score or the average is surely higher.
    """
    floor = chance + NEGLIGIBLE_SHARE
    if max(estimate.ci_low for estimate in [*positions, average]) > floor:
        return ""
    least = fewest_questions(floor)
    may_be_far_above = average.ci_high > chance + FLOOR_MARGIN
    if average.ci_high <= floor or (questions >= least and not may_be_far_above):
        guess = f"chance, {100 * chance:.1f} %" if chance else "zero"
        points = f"{100 * NEGLIGIBLE_SHARE:.0f} points"
        return f"at the floor: no score is reliably {points} above {guess}"
    if average.value <= chance:
        score = f"{100 * average.value:.1f} % of {average.n} prompts"
        more = f"ask {least} or more questions at each gold position"
        return f"nothing answered: {score}; make the task easier, or {more}"
    least = max(least, 2 * questions)
    return f"{TOO_FEW}: ask {least} or more at each gold position"


def fewest_questions(share: float) -> int:
    """Return the number of questions, all wrong, whose Wilson interval ends at a share."""
    return int(np.ceil(Z95**2 * (1 - share) / share))


def statistic_rows(
    frame: pd.DataFrame,
    name: str,
    unmodified: str,
    resamples: int,
    seed: int,
    chance: float = 0.0,
    notes: Mapping[str, str] | None = None,
    anytime: Mapping[str, CurveIntervals] | None = None,
) -> Iterator[StatisticRow]:
    """Estimate each of :data:`STATISTICS` for each method, and its difference from the unmodified model.

    Methods without a score at some gold position are left out. A difference of two gaps gets no row: the difference of
    the position biases says more. Contrasts are given at the ceiling, too: there they show that no position is lost.

    Args:
        frame: Rows with method, gold_position, cluster and the score.
        name: Column of the score.
        unmodified: Name of the unmodified model in the column method.
        resamples: Number of draws R.
        seed: Seed of the random generators.
        chance: Score of a guess, 0..1.
        notes: Why nothing can be said about a method, by its name; by default its :func:`score_limit_note`.
        anytime: Intervals that hold at any time, by method, for methods whose scores decided the number of questions.

    Yields:
        Rows of method, statistic, estimate (NaN where nothing can be said) and note (why).
    """
    placed = frame.dropna(subset=["gold_position", name])
    # A curve of fewer positions has no middle.
    if placed["gold_position"].nunique() < 3:
        return
    all_curves = position_curves(placed, name, "method", resamples, seed)
    complete = [
        method for method, (curve, _) in all_curves.items() if not np.isnan(curve).any()
    ]
    # The unmodified model first: the others are compared with it.
    complete.sort(key=lambda method: method != unmodified)
    base: CurveEstimates | None = None
    base_note = ""
    for method in complete:
        part = placed[placed["method"] == method]
        groups = {
            position: (group[name].to_numpy(), list(group["cluster"]))
            for position, group in part.groupby("gold_position")
        }
        questions = min(len(set(clusters)) for _, clusters in groups.values())
        curve, draws = all_curves[method]
        positions = [mean(values, clusters) for values, clusters in groups.values()]
        # Equal answers have equal draws, and get the same noise: their statistics are equal.
        first_alike = next(
            number
            for number, other in enumerate(complete)
            if np.array_equal(all_curves[other][1], draws)
        )
        estimates = CurveEstimates(
            curve,
            draws,
            sizes=np.array([len(values) for values, _ in groups.values()]),
            questions=questions,
            is_binary=part[name].isin((0, 1)).all(),
            seed=(seed, first_alike),
        )
        average = mean(part[name].to_numpy(), list(part["cluster"]))
        floor = (notes or {}).get(method, "")
        floor = floor or floor_note(positions, average, chance, questions)
        note = floor or ceiling_note(positions, questions)
        if questions < 3 and not note:
            note = f"{TOO_FEW}: one or two at each gold position do not show the noise"
        # The gap that chance alone gives, for comparison.
        gaps = shuffled_gaps(part, name, resamples, seed)
        low, high = np.quantile(gaps, [0.025, 0.975])
        gap_null = Estimate(float(gaps.mean()), low, high, len(part))
        own = {key: estimates.bounded(key) for key in BOOTSTRAPPED}
        contrasts = contrast_estimates(positions, draws)
        if anytime and method in anytime:
            held = anytime[method]
            by_key = zip(("position_bias", "primacy", "recency"), held[:3], strict=True)
            # These statistics decided the number of questions, so they need such intervals.
            own |= {key: e._replace(n=own[key].n) for key, e in by_key}
            contrasts = list(held.contrasts)

        yield StatisticRow(method, "gap", _unless(note, estimates.bounded("gap")), note)
        yield StatisticRow(method, "gap_null", _unless(note, gap_null), note)
        for position, contrast in zip(groups, contrasts, strict=True):
            row = StatisticRow(method, CONTRAST, _unless(floor, contrast), floor)
            yield row._replace(position=float(position))
        # A difference says nothing where one of the two methods says nothing.
        either_note = note or base_note
        for key in BOOTSTRAPPED:
            yield StatisticRow(method, key, _unless(note, own[key]), note)
            if base is not None:
                difference = estimates.difference_from(base, key)
                difference = _unless(either_note, difference)
                yield StatisticRow(method, f"{key}_difference", difference, either_note)
        if base is not None:
            excess = _unless(either_note, estimates.minus_half_of(base))
            yield StatisticRow(method, MINUS_HALF, excess, either_note)
        if method == unmodified:
            base = estimates
            base_note = note


def contrast_estimates(positions: Sequence[Estimate], draws: Array) -> list[Estimate]:
    """Estimate each position minus the mean of the others, for a number of questions that was fixed beforehand.

    The intervals are made of Wilson's at the positions (Zou and Donner 2008): where nearly all answers are right, the
    bootstrap's are too narrow. Positions that rise and fall together in the draws make them narrower, each two as much
    as these two do.

    Args:
        positions: Mean score at each of K >= 3 gold positions, [K].
        draws: Bootstrap draws of the curve, [R, K].
    """
    num_positions = len(positions)
    with np.errstate(invalid="ignore"):
        correlations = np.asarray(np.nan_to_num(np.corrcoef(draws.T)))
    weights = contrast_with_others(np.eye(num_positions))
    return [
        combined(positions, row, position.n, correlations)
        for row, position in zip(weights, positions, strict=True)
    ]


def _unless(note: str, estimate: Estimate) -> Estimate:
    """The estimate; NaN where there is a note."""
    if note:
        return Estimate(np.nan, np.nan, np.nan, estimate.n)
    return estimate


class CurveEstimates:
    """Estimates of the statistics of one method's curve over gold positions.

    Attributes:
        by_statistic: Estimate of each of :func:`curve_statistics` and of :func:`position_bias`, by name.
        draws: Bootstrap draws of each, [R], by name.
        curve: Means at K gold positions, [K].
        curve_draws: Their bootstrap draws, [R, K].
        sizes: Prompts at each position, [K].
        n: Prompts behind the curve.
        questions: Fewest questions at a position.
    """

    def __init__(
        self,
        curve: Array,
        draws: Array,
        sizes: Array,
        questions: int,
        is_binary: bool,
        seed: tuple[int, int],
    ) -> None:
        """Estimate the statistics of a curve.

        Args:
            curve: Means at K gold positions, [K].
            draws: Its bootstrap draws, [R, K].
            sizes: Prompts at each position, [K].
            questions: Fewest questions at a position.
            is_binary: Whether all scores are 0 or 1.
            seed: Of the noise of :func:`_smoothed`.
        """
        self.n = int(sizes.sum())
        self.questions = questions
        values = {key: float(value) for key, value in curve_statistics(curve).items()}
        values["position_bias"] = position_bias(curve, draws)[0]
        if is_binary:
            draws = _smoothed(curve, draws, sizes, seed)
        self.curve = curve
        self.curve_draws = draws
        self.sizes = sizes
        self.draws = _statistic_draws(curve, draws)
        self.by_statistic = {
            key: percentile(value, self.draws[key], self.n, questions)
            for key, value in values.items()
        }
        if questions < 2:
            return
        # The largest of several contrasts has an interval of its own.
        unit = np.eye(len(curve))
        share_beyond = tail(questions)
        drops = (unit[0] + unit[-1]) / 2 - unit[1:-1]
        low, high = _largest_interval(
            drops, curve, draws, self.draws["middle_drop"], share_beyond
        )
        self.by_statistic["middle_drop"] = Estimate(
            values["middle_drop"], low, high, self.n
        )
        self.by_statistic["gap"] = largest_gap(curve, draws, self.n, questions)

    def bounded(self, key: str) -> Estimate:
        """A statistic with its interval clipped to the range possible for scores in 0..1."""
        estimate = self.by_statistic[key]
        least = 0.0 if key in ("gap", "position_bias") else -1.0
        return estimate._replace(
            ci_low=max(estimate.ci_low, least), ci_high=min(estimate.ci_high, 1.0)
        )

    def difference_from(self, base: CurveEstimates, key: str) -> Estimate:
        """Estimate a statistic of position bias minus that of another method on the same questions.

        Args:
            base: Estimates of the other method.
            key: Name of the statistic.
        """
        own_estimate = self.by_statistic[key]
        base_estimate = base.by_statistic[key]
        # Of a middle drop the interval is not from draws, unless no answer differs; they only give the correlation.
        if key != "middle_drop" or self._has_equal_answers(base):
            value = own_estimate.value - base_estimate.value
            draws = self._draws_beside(base)[key] - base.draws[key]
            return percentile(value, draws, self.n, self.questions)
        with np.errstate(invalid="ignore"):
            correlations = np.corrcoef(self.draws[key], base.draws[key])
        correlation = float(np.nan_to_num(correlations[0, 1]))
        return combined((own_estimate, base_estimate), (1, -1), self.n, correlation)

    def minus_half_of(self, base: CurveEstimates) -> Estimate:
        """Position bias minus half of another method's on the same questions."""
        own_estimate = self.by_statistic["position_bias"]
        base_estimate = base.by_statistic["position_bias"]
        value = own_estimate.value - base_estimate.value / 2
        own_draws = self._draws_beside(base)["position_bias"]
        draws = own_draws - base.draws["position_bias"] / 2
        return percentile(value, draws, self.n, self.questions)

    def _has_equal_answers(self, base: CurveEstimates) -> bool:
        """Whether no answer differs from that of another method, so that draws of a difference are all zero."""
        return np.array_equal(self.curve_draws, base.curve_draws)

    def _draws_beside(self, base: CurveEstimates) -> dict[str, Array]:
        """The draws for a difference from another method: with noise where no answer differs.

        A method that changed none of n answers at a position may yet change some of other questions: up to about 3/n of
        them, by the rule of three. The noise is that of half a pair more of each sign.
        """
        if not self._has_equal_answers(base):
            return self.draws
        noise = np.random.default_rng(self.n).normal(size=self.curve_draws.shape)
        draws = self.curve_draws + noise / (self.sizes + 1)
        return _statistic_draws(self.curve, draws)


def _statistic_draws(curve: Array, draws: Array) -> dict[str, Array]:
    """Draws [R] of each of :func:`curve_statistics` and of :func:`position_bias`, by name, from draws [R, K]."""
    return curve_statistics(draws) | {"position_bias": position_bias(curve, draws)[1]}


def _smoothed(curve: Array, draws: Array, sizes: Array, seed: tuple[int, int]) -> Array:
    """Add the noise that draws of shares lack where nearly all prompts are right or nearly all wrong.

    It has the variance that half a prompt more of each kind would add at a position.

    Args:
        curve: Shares at K gold positions, [K].
        draws: Their bootstrap draws, [R, K].
        sizes: Prompts at each position, [K].
        seed: Of the random generator.

    Returns:
        The draws with noise, [R, K].
    """
    shares = (curve * sizes + 0.5) / (sizes + 1)
    # The variance with half a prompt more of each kind, minus that of the draws.
    missing_variance = shares * (1 - shares) / (sizes + 1) - curve * (1 - curve) / sizes
    noise = np.random.default_rng(seed).normal(size=draws.shape)
    return draws + np.sqrt(np.maximum(missing_variance, 0)) * noise


def largest_gap(curve: Array, draws: Array, n: int, questions: int) -> Estimate:
    """Estimate the largest minus the smallest mean of several positions, whichever these are.

    The interval allows for their choice by the same data, see :func:`_largest_interval`. It is NaN for one question.

    Args:
        curve: Means at K gold positions, [K].
        draws: Their bootstrap draws, [R, K].
        n: Observations behind them.
        questions: Questions that were drawn.
    """
    gap = float(curve.max() - curve.min())
    if questions < 2:
        return Estimate(gap, np.nan, np.nan, n)
    unit = np.eye(len(curve))
    # Every difference of two positions, as weights.
    contrasts = (unit[:, None] - unit)[~unit.astype(bool)]
    maxima = draws.max(1) - draws.min(1)
    low, high = _largest_interval(contrasts, curve, draws, maxima, tail(questions))
    return Estimate(gap, low, high, n)


def _largest_interval(
    contrasts: Array, curve: Array, draws: Array, maxima: Array, share_beyond: float
) -> tuple[float, float]:
    """Compute the interval of the largest of P contrasts of a curve.

    The largest observed one is the luckiest. So the lower end allows for the largest error of all contrasts
    that may be the largest in truth (Chernozhukov, Lee and Rosen 2013); the upper one is the basic bootstrap's.

    Args:
        contrasts: Weights of the gold positions, [P, K].
        curve: Means at the gold positions, [K].
        draws: Its bootstrap draws, [R, K].
        maxima: The largest contrast in each draw, [R].
        share_beyond: Share of the draws beyond each end.

    Returns:
        Lower and upper end.
    """
    values = contrasts @ curve
    covariance = np.cov(draws.T)
    differences = contrasts - contrasts[values.argmax()]
    variances = np.einsum("pk,kl,pl->p", differences, covariance, differences)
    margins = 2 * Z95 * np.sqrt(np.maximum(variances, 0))
    # Contrasts that may be the largest in truth.
    candidates = contrasts[values >= values.max() - margins]
    errors = (draws - curve) @ candidates.T
    scale = np.maximum(errors.std(0), 1e-12)
    reach = np.quantile((errors / scale).max(1), 1 - share_beyond)
    low = (candidates @ curve - reach * scale).max()
    high = 2 * values.max() - np.quantile(maxima, share_beyond)
    return float(low), float(high)


def gap_p(part: pd.DataFrame, name: str, resamples: int, seed: int) -> float:
    """The p of the largest difference between the means of two gold positions, by :func:`shuffled_gaps`."""
    gap = np.ptp(part.groupby("gold_position")[name].mean().to_numpy())
    null = shuffled_gaps(part, name, resamples, seed)
    return float((1 + (null >= gap - 1e-12).sum()) / (1 + len(null)))


def shuffled_gaps(part: pd.DataFrame, name: str, resamples: int, seed: int) -> Array:
    """Best minus worst gold position after shuffling the positions, for each of R shuffles, [R].

    Positions are shuffled within each question where questions are asked at several, else among all prompts.

    Args:
        part: Rows of one method: ``cluster`` (the question), ``gold_position``, and the score.
        name: Column of the score.
        resamples: Number of shuffles R.
        seed: Seed of the shuffles.
    """
    _, questions = np.unique(part["cluster"], return_inverse=True)
    order = np.argsort(questions, kind="stable")
    blocks: NDArray[Any] = np.zeros(len(questions))
    if questions.max() + 1 < len(questions):
        blocks = questions[order]
    values = part[name].to_numpy(dtype=np.float64)[order]
    positions = part["gold_position"].to_numpy(dtype=np.int64)[order]
    _, columns, counts = np.unique(positions, return_inverse=True, return_counts=True)
    averaging = np.eye(len(counts))[columns] / counts  # [prompts, positions]
    rng = np.random.default_rng(seed)
    gaps = []
    for chunk_size in chunk_sizes(resamples, len(order)):
        # Sorting random numbers plus the number of the block shuffles within blocks.
        keys = rng.random((chunk_size, len(order))) + blocks
        shuffled = values[np.argsort(keys, axis=1)]
        gaps.append(np.ptp(shuffled @ averaging, axis=1))
    return np.concatenate(gaps)
