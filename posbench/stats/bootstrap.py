"""Confidence intervals over questions: prompts of one question are not independent, so a question is a cluster."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import scipy
from numpy.typing import NDArray

Array = NDArray[np.float64]
K = TypeVar("K", bound=Hashable)
Values = Sequence[float] | Array
Group = tuple[Values, Sequence[str]]
"""Values, and the cluster (question) that each belongs to."""

RESAMPLES = 2000
MAX_RESAMPLED_ENTRIES = 1 << 22  # in memory at once
Z95 = 1.959963984540054


def with_interval(value: float, low: float, high: float, form: str = "") -> str:
    """Format a number and its interval with the same decimals, such as ``12.3 [10.0, 14.5]``.

    Args:
        value: The number.
        low: Lower end of its interval; where it is NaN the number is returned alone.
        high: Upper end.
        form: Format specification (``+z.1f``); empty for three digits of the largest of the three.
    """
    if np.isnan(low):
        return format(value, form or ".3g")
    if not form:
        form = _three_digit_format(max(abs(value), abs(low), abs(high)))
    unsigned_form = form.removeprefix("+")
    return f"{value:{form}} [{low:{unsigned_form}}, {high:{unsigned_form}}]"


def _three_digit_format(largest: float) -> str:
    """Format specification that shows three digits of a number."""
    exponent = np.floor(np.log10(largest or 1))
    if -5 < exponent < 6:
        return f"z.{max(2 - int(exponent), 0)}f"
    return ".2e"


class Estimate(NamedTuple):
    """A number with its 95 % interval and the count of observations behind it."""

    value: float
    ci_low: float
    ci_high: float
    n: int

    @property
    def loss_verdict(self) -> str:
        """Whether a change of a loss is for the worse, the better, or neither for sure."""
        if self.ci_low > 0:
            return "worse"
        if self.ci_high < 0:
            return "better"
        return "cannot be told apart"

    @property
    def words(self) -> str:
        """The estimate as notes quote it: ``0.12 [0.10, 0.14]``."""
        return with_interval(self.value, self.ci_low, self.ci_high)


def estimate_in(row: Mapping[str, Any], name: str, n: int) -> Estimate:
    """Read the columns ``name``, ``name_low`` and ``name_high`` of a row as an estimate from ``n`` observations."""
    return Estimate(row[name], row[f"{name}_low"], row[f"{name}_high"], n)


NO_ESTIMATE = Estimate(np.nan, np.nan, np.nan, 0)


def chunk_sizes(resamples: int, width: int) -> Iterator[int]:
    """Split resamples of ``width`` entries each into chunks that fit in memory; yield the sizes of the chunks."""
    largest = max(MAX_RESAMPLED_ENTRIES // width, 1)
    return (min(largest, resamples - start) for start in range(0, resamples, largest))


def _resampled_weights(
    strata: NDArray[np.int64], resamples: int, seed: int
) -> Iterator[Array]:
    """Draw clusters with replacement within strata, and count how often each cluster occurs.

    Args:
        strata: Stratum of each of C clusters, [C]; every draw keeps the size of each stratum.
        resamples: Number of draws.
        seed: Of the random generator.

    Yields:
        Counts by draw and cluster, [r, C], for a chunk of r draws.
    """
    rng = np.random.default_rng(seed)
    num_clusters = len(strata)
    for chunk_size in chunk_sizes(resamples, num_clusters):
        weights = np.zeros((chunk_size, num_clusters))
        for stratum in range(strata.max() + 1):
            members = np.flatnonzero(strata == stratum)
            equal_shares = np.full(len(members), 1 / len(members))
            weights[:, members] = rng.multinomial(
                len(members), equal_shares, size=chunk_size
            )
        yield weights


def resampled(
    groups: Mapping[K, Group],
    *,
    stratified: bool,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[K, tuple[float, Array]]:
    """Compute the mean of every group, and its means in bootstrap draws of clusters.

    All groups share each draw, which keeps pairs together.

    Args:
        groups: Values and their clusters, by group.
        stratified: Draw clusters among those that share groups, directly or by others between them. For gold
            positions this draws prompts within a position where each prompt is a question of its own, and whole
            questions where questions have prompts at several positions, complete or not.
        resamples: Number of draws R.
        seed: Of the random generator.

    Returns:
        By group, the mean and the resampled means, [R]; NaN where a draw has no cluster of the group.
    """
    all_clusters = np.concatenate(
        [np.asarray(clusters) for _, clusters in groups.values()]
    )
    names, all_indices = np.unique(all_clusters, return_inverse=True)
    totals = []
    sizes = []
    start = 0
    for values, _ in groups.values():
        indices = all_indices[start : start + len(values)]
        start += len(values)
        weights = np.asarray(values, dtype=np.float64)
        totals.append(np.bincount(indices, weights=weights, minlength=len(names)))
        sizes.append(np.bincount(indices, minlength=len(names)).astype(np.float64))

    strata = np.zeros(len(names), dtype=np.int64)
    if stratified:
        occurs = np.stack(sizes, axis=1) > 0
        # Groups that share a cluster, directly or through others, are one stratum.
        shares_cluster = occurs.T.astype(float) @ occurs > 0
        _, parts = scipy.sparse.csgraph.connected_components(shares_cluster)
        _, strata = np.unique(parts[occurs.argmax(1)], return_inverse=True)

    chunks = []
    with np.errstate(invalid="ignore"):  # a draw may miss all clusters of a group
        for weights in _resampled_weights(strata, resamples, seed):
            chunk = [
                (weights @ total) / (weights @ size)
                for total, size in zip(totals, sizes, strict=True)
            ]
            chunks.append(np.stack(chunk, axis=1))
    resampled_means = np.concatenate(chunks)
    return {
        key: (float(totals[i].sum() / sizes[i].sum()), resampled_means[:, i])
        for i, key in enumerate(groups)
    }


def resampled_means(
    values: Array, clusters: Iterable[str], resamples: int, seed: int
) -> Array:
    """Compute means of bootstrap draws of clusters, over the values that are not NaN.

    Equal clusters and seeds give equal draws.

    Args:
        values: [n], NaN where an observation has no value.
        clusters: Cluster of each value.
        resamples: Number of draws R.
        seed: Of the random generator.

    Returns:
        A mean for each draw, [R].
    """
    _, indices = np.unique(np.asarray(clusters), return_inverse=True)
    has_value = ~np.isnan(values)
    totals = np.bincount(indices, weights=np.where(has_value, values, 0))
    sizes = np.bincount(indices, weights=has_value)
    num_clusters = len(totals)
    rng = np.random.default_rng(seed)
    chunks = []
    with np.errstate(invalid="ignore"):
        for chunk_size in chunk_sizes(resamples, num_clusters):
            draws = rng.integers(0, num_clusters, size=(chunk_size, num_clusters))
            chunks.append(totals[draws].sum(1) / sizes[draws].sum(1))
    return np.concatenate(chunks)


def tail(num_clusters: int) -> float:
    """Return the share of the draws to leave out beyond each end of a percentile interval.

    2.5 %, and less for few clusters, whose draws vary too little (Hesterberg 2015, "expanded percentile
    interval").

    Args:
        num_clusters: Clusters that were drawn, 2 or more.
    """
    t = scipy.special.stdtrit(num_clusters - 1, 0.975)
    expansion = np.sqrt(num_clusters / (num_clusters - 1))
    return float(scipy.special.ndtr(-t * expansion))


def quantiles(draws: Array, num_clusters: int) -> tuple[float, float]:
    """Return the ends of the percentile interval of draws [R], adjusted for the number of clusters.

    NaN for a single cluster, and where no draw has a value.
    """
    if num_clusters < 2 or np.isnan(draws).all():
        return np.nan, np.nan
    share_beyond = tail(num_clusters)
    if share_beyond * (len(draws) - 1) < 1:
        # Between the two smallest draws there is nothing: an end there would be above zero where a draw is zero.
        share_beyond = 0.0
    low, high = np.nanquantile(draws, [share_beyond, 1 - share_beyond])
    return float(low), float(high)


def percentile(
    value: float | Array, draws: Array, n: int, clusters: int | None = None
) -> Estimate:
    """Pair a number with its percentile interval.

    Args:
        value: The number.
        draws: Its bootstrap draws, [R].
        n: Observations behind it.
        clusters: Number of clusters that were drawn; None where each observation is one.
    """
    low, high = quantiles(draws, clusters or n)
    return Estimate(float(value), low, high, n)


def statistic(
    groups: Mapping[K, Group],
    function: Callable[[Mapping[K, Array]], Array],
    *,
    resamples: int,
) -> Estimate:
    """Estimate a statistic of group means with its percentile interval.

    Args:
        groups: Values and their clusters, by group; see :func:`resampled`.
        function: Maps the means of each group, [R], to the statistic, [R].
        resamples: Number of draws R.

    Returns:
        The estimate; its n is the size of the first group. Where a group has a single cluster there is no interval.
    """
    means = resampled(groups, stratified=False, resamples=resamples)
    value = function({key: np.array([mean]) for key, (mean, _) in means.items()})[0]
    resampled_values = function({key: draws for key, (_, draws) in means.items()})
    clusters = [set(names) for _, names in groups.values()]
    num_clusters = len(set.union(*clusters)) if min(map(len, clusters)) > 1 else 1
    first_values, _ = next(iter(groups.values()))
    return percentile(value, resampled_values, len(first_values), num_clusters)


def difference(
    values: Values,
    clusters: Sequence[str],
    weights: Values | None = None,
    alpha: float = 0.05,
) -> Estimate:
    """Estimate the mean of paired differences, or of any numbers, with an interval over clusters.

    The interval over clusters is Student's, with the skewness of the clusters' sums removed by Hall's (1992)
    cubic transformation; NaN for a single cluster.

    Args:
        values: The numbers.
        clusters: The cluster (question) of each.
        weights: The weight of each; None: equal ones. See :func:`mean`.
        alpha: Probability that the interval misses the mean; of K comparisons, 0.05 / K holds for all together.
    """
    array = np.asarray(values, dtype=np.float64)
    relative = _relative_weights(array, weights)
    value = float((relative * array).mean())
    sums, sizes = _cluster_sums(array, relative, clusters)
    num_clusters = len(sums)
    if num_clusters < 2:
        return Estimate(value, np.nan, np.nan, len(array))
    errors = (sums - sizes * value) / sizes.mean()
    spread = np.sqrt((errors**2).mean())
    skewness = (
        (errors**3).mean() / max(spread, 1e-12) ** 3 / (3 * np.sqrt(num_clusters))
    )
    t = scipy.special.stdtrit(num_clusters - 1, 1 - alpha / 2) * np.array([1, -1])
    if abs(skewness) > 1e-6:
        t = (np.cbrt(1 + 3 * skewness * (t - skewness / 2)) - 1) / skewness
    low, high = value - t * spread / np.sqrt(num_clusters - 1)
    return Estimate(value, float(low), float(high), len(array))


def paired(
    after: Values,
    before: Values,
    clusters: Sequence[str],
    weights: Values | None = None,
    alpha: float = 0.05,
) -> Estimate:
    """Estimate the mean of the paired differences ``after - before``, with an interval over clusters.

    Scores in 0..1 get Bonett and Price's (2012) interval, which adds half a pair of each sign, with n divided
    by the design effect; the added pairs of scores strictly between 0 and 1 differ by the root mean square of
    those that differ. Anything else gets the interval of :func:`difference`.

    Args:
        after: One number of each pair.
        before: The other one.
        clusters: The cluster (question) of each pair.
        weights: The weight of each pair; None: equal ones. See :func:`mean`.
        alpha: See :func:`difference`.
    """
    pairs = np.array([after, before], dtype=np.float64)
    array = pairs[0] - pairs[1]
    if pairs.min() < 0 or pairs.max() > 1:
        return difference(array, clusters, weights, alpha)
    relative = _relative_weights(array, weights)
    value = float((relative * array).mean())
    sums, sizes = _cluster_sums(array, relative, clusters)
    n = _effective_size(array, relative, sums, sizes)
    added_square = (array**2).sum() / max(np.count_nonzero(array), 1) or 1.0
    centre = value * n / (n + 1)
    mean_square = ((relative * array**2).mean() * n + added_square) / (n + 1)
    t = scipy.special.stdtrit(max(len(sums) - 1, 1), 1 - alpha / 2)
    half = t * np.sqrt((mean_square - centre**2) / (n + 1))
    low = float(max(centre - half, -1))
    high = float(min(centre + half, 1))
    return Estimate(value, low, high, len(array))


def mean(
    values: Values,
    clusters: Sequence[str],
    weights: Values | None = None,
    *,
    of_scores: bool = True,
) -> Estimate:
    """Estimate a mean: with Wilson's interval for scores in 0..1, else with the interval of :func:`difference`.

    Values of unequal weight are worth fewer of equal weight (Kish 1965). A mean over subsets is such a mean; as
    differences between the subsets count as chance, its interval is somewhat wide.

    Where clusters hold several values, Wilson's n is divided by the design effect (Korn and Graubard 1998), and t's
    quantile replaces the normal one; its degrees of freedom are the clusters with the rarer answer, at least 3. Scores
    strictly between 0 and 1 count as the number of right-or-wrong ones of equal variance.

    Args:
        values: The numbers.
        clusters: The cluster (question) of each.
        weights: The weight of each; None: equal ones.
        of_scores: Whether any value could have been 0 or 1, as a score and unlike a share of the attention.
    """
    array = np.asarray(values, dtype=np.float64)
    if (array < 0).any() or (array > 1).any():
        return difference(array, clusters, weights)
    relative = _relative_weights(array, weights)
    value = float((relative * array).mean())
    sums, sizes = _cluster_sums(array, relative, clusters)
    num_clusters = len(sums)
    n = _effective_size(array, relative, sums, sizes)
    is_binary = np.isin(array, (0, 1)).all()
    if not is_binary:
        extra = 0.5 if of_scores else 0.0
        n *= _answers_per_value(array, relative, num_clusters, extra)

    # The number of clusters with either answer; fewer where the clusters' sums or sizes are unequal.
    answers = (sums, sizes - sums)
    if is_binary and np.ptp(sizes) < 1e-9:
        answers = (np.sign(sums), np.sign(sizes - sums))
    rarer = min(counts.sum() ** 2 / max((counts**2).sum(), 1e-12) for counts in answers)
    is_independent = is_binary and num_clusters == len(array)
    if num_clusters == 1 or is_independent or not rarer:
        z = Z95
    else:
        degrees_of_freedom = min(max(rarer, 3), num_clusters - 1)
        z = float(scipy.special.stdtrit(degrees_of_freedom, 0.975))
    low, high = wilson(value * n, n, z)
    return Estimate(value, low, high, len(array))


def _answers_per_value(
    values: Array, weights: Array, num_clusters: int, extra: float
) -> float:
    """How many right-or-wrong answers a value strictly between 0 and 1 is worth: the ratio of their variances.

    Args:
        values: The values, [n].
        weights: Their weights, [n], of mean 1.
        num_clusters: Clusters (questions) that they belong to.
        extra: Answers of each kind to add, so that scores that hardly vary do not rule out a rare other one.
    """
    total = num_clusters + 2 * extra
    mean = (num_clusters * (weights * values).mean() + extra) / total
    square = (num_clusters * (weights * values**2).mean() + extra) / total
    variance = square - mean**2
    return float(mean * (1 - mean) / variance) if variance > 1e-15 else 1.0


def _relative_weights(values: Array, weights: Values | None) -> Array:
    """Weights of values [n] whose mean is 1; None: all are 1."""
    if weights is None:
        return np.ones(len(values))
    array = np.asarray(weights, dtype=np.float64)
    return array / array.mean()


def _effective_size(values: Array, weights: Array, sums: Array, sizes: Array) -> float:
    """Number of independent values of equal weight that clustered values [n] are worth.

    That is Kish's number over the design effect (at least 1), and at most the number of clusters where nothing varies.

    Args:
        values: The values, [n].
        weights: Their weights, [n], of mean 1.
        sums: Weighted sums of the clusters, [C].
        sizes: Summed weights of the clusters, [C].
    """
    n = len(values)
    num_clusters = len(sums)
    # Values of unequal weight are worth fewer of equal weight.
    kish = n**2 / (weights**2).sum()
    value = (weights * values).mean()
    variance = (weights * (values - value) ** 2).mean()
    # Then there is no variance within clusters to compare with.
    if num_clusters in (1, n) or variance == 0:
        return float(max(num_clusters * kish / n, 1))
    squared_errors = ((sums - sizes * value) ** 2).sum()
    between = num_clusters / (num_clusters - 1) * squared_errors
    design_effect = max(between / (variance * (weights**2).sum()), 1)
    return float(kish / design_effect)


def _cluster_sums(
    values: Array, weights: Array, clusters: Sequence[str]
) -> tuple[Array, Array]:
    """Return the weighted sum of the values of every cluster, and the sum of their weights, [C] each.

    Args:
        values: The values, [n].
        weights: Their weights, [n].
        clusters: The cluster of each, [n].
    """
    _, indices = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.bincount(indices, weights=weights * values).astype(float)
    sizes = np.bincount(indices, weights=weights).astype(float)
    return sums, sizes


def normal(values: Array) -> Estimate:
    """Estimate the mean of independent values [n] with Student's interval."""
    value = float(values.mean())
    n = len(values)
    half = float(scipy.special.stdtrit(n - 1, 0.975) * values.std(ddof=1) / np.sqrt(n))
    return Estimate(value, value - half, value + half, n)


def wilson(successes: float, n: float, z: float = Z95) -> tuple[float, float]:
    """Return both ends of the Wilson score interval of a proportion.

    Args:
        successes: Sum of the scores, each 0..1.
        n: Number of scores, at least 1; may be a fraction, as an effective number is.
        z: Normal quantile that sets the level of the interval.
    """
    p = successes / n
    z2 = z**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z * np.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # Exactly, where rounding would leave the least bit between.
    low = 0.0 if successes <= 0 else max(centre - half, 0)
    high = 1.0 if successes >= n else min(centre + half, 1)
    return float(low), float(high)


def combined(
    parts: Sequence[Estimate],
    weights: Values,
    n: int,
    correlation: float | Array = 0.0,
) -> Estimate:
    """Estimate a weighted sum, with an interval computed from its parts' intervals (Zou and Donner 2008).

    For two shares and weights 1 and -1 it is Newcombe's (1998, method 10).

    Args:
        parts: Estimates to add up.
        weights: A weight for each part.
        n: Observations behind the sum.
        correlation: Of any two of the K parts, or of each two, [K, K].
    """
    correlations = np.full((len(parts), len(parts)), correlation)
    np.fill_diagonal(correlations, 1)
    value = sum(
        weight * part.value for weight, part in zip(weights, parts, strict=True)
    )
    ends = []
    for side in (-1, 1):
        # How far each part moves the sum when the part itself moves to its end on that side.
        reaches = [
            (part.ci_high if side * weight > 0 else part.ci_low) - part.value
            for weight, part in zip(weights, parts, strict=True)
        ]
        shifts = np.abs(np.array(weights) * reaches) * np.sign(weights)
        ends.append(value + side * np.sqrt(max(shifts @ correlations @ shifts, 0)))
    return Estimate(float(value), float(ends[0]), float(ends[1]), n)


def difference_of_shares(first: int, second: int, n: int) -> Estimate:
    """Estimate the difference of two counts as shares of n."""
    shares = [Estimate(count / n, *wilson(count, n), n) for count in (first, second)]
    return combined(shares, (1, -1), n)._replace(value=(first - second) / n)


def detectable(estimate: Estimate) -> float:
    """Return the smallest number that observations of this spread tell from zero with a probability of 80 %.

    Args:
        estimate: A number measured on them, with its 95 % interval.
    """
    half = (estimate.ci_high - estimate.ci_low) / 2
    return float(half * (1 + scipy.special.ndtri(0.8) / Z95))
