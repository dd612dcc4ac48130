"""Intervals: prompts of one question are not independent, so whole questions (clusters) are drawn."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import scipy
from numpy.typing import NDArray

Array = NDArray[np.float64]
K = TypeVar("K", bound=Hashable)
Values = Sequence[float] | Array
Group = tuple[Values, Sequence[str]]
"""Values, and the cluster (question) that each belongs to."""

RESAMPLES = 2000
CHUNK = 1 << 22  # resampled entries held at once
Z95 = 1.959963984540054


def with_interval(value: float, low: float, high: float, form: str = "") -> str:
    """``12.3 [10.0, 14.5]``: a number and its interval with the same decimals: those of ``form``
    (``+z.1f``), else three digits of the largest; without an interval the number alone."""
    if np.isnan(low):
        return format(value, form or ".3g")
    digits = np.floor(np.log10(max(map(abs, (value, low, high))) or 1))
    form = form or (f"z.{max(2 - int(digits), 0)}f" if -5 < digits < 6 else ".2e")
    plain = form.removeprefix("+")
    return f"{value:{form}} [{low:{plain}}, {high:{plain}}]"


class Estimate(NamedTuple):
    """A number with its 95 % interval and the observations behind it."""

    value: float
    ci_low: float
    ci_high: float
    n: int

    @property
    def loss_verdict(self) -> str:
        """How a change of a loss reads."""
        return (
            "worse"
            if self.ci_low > 0
            else "better"
            if self.ci_high < 0
            else "cannot be told apart"
        )

    @property
    def words(self) -> str:
        """As notes quote it: ``0.12 [0.10, 0.14]``."""
        return with_interval(*self[:3])


def chunks(resamples: int, width: int) -> Iterator[int]:
    """Sizes of the parts in which draws of ``width`` entries each are made."""
    step = max(CHUNK // width, 1)
    return (min(step, resamples - start) for start in range(0, resamples, step))


def _draws(strata: NDArray[np.int64], resamples: int, seed: int) -> Iterator[Array]:
    """How often each cluster occurs in each draw, [r, C] at a time; each stratum keeps its size."""
    rng = np.random.default_rng(seed)
    clusters = len(strata)
    for part in chunks(resamples, clusters):
        weights = np.zeros((part, clusters))
        for number in range(strata.max() + 1):
            members = np.flatnonzero(strata == number)
            even = np.full(len(members), 1 / len(members))
            weights[:, members] = rng.multinomial(len(members), even, size=part)
        yield weights


def resampled(
    groups: Mapping[K, Group],
    *,
    stratified: bool,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[K, tuple[float, Array]]:
    """Mean of every group, exact and resampled [R]; all groups share each draw, which keeps pairs together.

    ``stratified`` draws clusters among those that occur in the same groups, so that no group runs out. For
    gold positions this draws prompts within a position where each is a question of its own, and whole
    questions where each is asked at every position.
    """
    clusters = np.concatenate([np.asarray(names) for _, names in groups.values()])
    names, member = np.unique(clusters, return_inverse=True)
    totals = []
    sizes = []
    for values, _ in groups.values():
        here, member = np.split(member, [len(values)])
        totals.append(
            np.bincount(
                here, weights=np.asarray(values, dtype=np.float64), minlength=len(names)
            )
        )
        sizes.append(np.bincount(here, minlength=len(names)).astype(np.float64))
    strata = np.zeros(len(names), dtype=np.int64)
    if stratified:
        _, strata = np.unique(np.stack(sizes, axis=1) > 0, axis=0, return_inverse=True)
    parts = list[Array]()
    with np.errstate(invalid="ignore"):
        for weights in _draws(strata.ravel(), resamples, seed):
            pairs = zip(totals, sizes, strict=True)
            parts.append(
                np.stack(
                    [(weights @ total) / (weights @ size) for total, size in pairs],
                    axis=1,
                )
            )
    exact = [t.sum() / s.sum() for t, s in zip(totals, sizes, strict=True)]
    drawn = np.concatenate(parts)
    return {key: (float(exact[i]), drawn[:, i]) for i, key in enumerate(groups)}


def drawn_means(
    values: Array, clusters: Iterable[str], resamples: int, seed: int
) -> Array:
    """Means of draws of clusters, [R], over the values that are numbers; equal clusters give equal draws."""
    _, member = np.unique(np.asarray(clusters), return_inverse=True)
    there = ~np.isnan(values)
    rng = np.random.default_rng(seed)
    totals = np.bincount(member, weights=np.where(there, values, 0))
    sizes = np.bincount(member, weights=there)
    count = len(totals)
    draws = (
        rng.integers(0, count, size=(part, count)) for part in chunks(resamples, count)
    )
    with np.errstate(invalid="ignore"):
        return np.concatenate(
            [totals[which].sum(1) / sizes[which].sum(1) for which in draws]
        )


def tail(clusters: int) -> float:
    """Share of the draws beyond each end of an interval: 2.5 %, and less for few clusters, whose draws vary
    too little (Hesterberg 2015, "expanded percentile interval")."""
    return float(
        scipy.special.ndtr(
            -scipy.special.stdtrit(clusters - 1, 0.975)
            * np.sqrt(clusters / (clusters - 1))
        )
    )


def quantiles(values: Array, clusters: int) -> tuple[float, float]:
    """Ends of the interval that draws [R] of so many clusters give; not a number for a single cluster."""
    if clusters < 2:
        return np.nan, np.nan
    low, high = np.nanquantile(values, [tail(clusters), 1 - tail(clusters)])
    return float(low), float(high)


def percentile(
    value: float | Array, draws: Array, n: int, clusters: int | None = None
) -> Estimate:
    """A number with the interval of its draws [R]; each of n observations is a cluster unless said."""
    return Estimate(float(value), *quantiles(draws, clusters or n), n)


def statistic(
    groups: Mapping[K, Group],
    of: Callable[[Mapping[K, Array]], Array],
    *,
    resamples: int,
) -> Estimate:
    """A statistic of group means, each [R] to [R], with its percentile interval; see :func:`resampled`."""
    found = resampled(groups, stratified=False, resamples=resamples)
    value = of({key: np.array([mean]) for key, (mean, _) in found.items()})[0]
    drawn = of({key: values for key, (_, values) in found.items()})
    clusters = set[str]().union(*(names for _, names in groups.values()))
    return percentile(value, drawn, len(next(iter(groups.values()))[0]), len(clusters))


def difference(values: Values, clusters: Sequence[str]) -> Estimate:
    """A mean, of paired differences or of any numbers, with its interval over clusters: Student's without the
    skewness of the clusters' sums, which Hall's (1992) cubic transformation takes off; not a number for a
    single cluster."""
    array = np.asarray(values, dtype=np.float64)
    value, (sums, sizes) = float(array.mean()), _sums(array, clusters)
    count = len(sums)
    errors = (sums - sizes * value) / sizes.mean()
    if count < 2:
        return Estimate(value, np.nan, np.nan, len(array))
    spread = np.sqrt((errors**2).mean())
    skew = (errors**3).mean() / max(spread, 1e-12) ** 3 / (3 * np.sqrt(count))
    reach = scipy.special.stdtrit(count - 1, 0.975) * np.array([1, -1])
    if abs(skew) > 1e-6:
        reach = (np.cbrt(1 + 3 * skew * (reach - skew / 2)) - 1) / skew
    low, high = value - reach * spread / np.sqrt(count - 1)
    return Estimate(value, float(low), float(high), len(array))


def paired(after: Values, before: Values, clusters: Sequence[str]) -> Estimate:
    """Mean of paired differences with its interval: :func:`difference`, but of scores in 0..1 Bonett and
    Price's (2012: half a pair more each way), for n over the design effect; scores between 0 and 1 get pairs
    as far apart as those that differ are (root of the mean square)."""
    pairs = np.array([after, before], dtype=np.float64)
    array = pairs[0] - pairs[1]
    if pairs.min() < 0 or pairs.max() > 1:
        return difference(array, clusters)
    value, (n, sums, _) = float(array.mean()), _worth(array, clusters)
    more = (array**2).sum() / max(np.count_nonzero(array), 1) or 1.0
    centre = value * n / (n + 1)
    square = ((array**2).mean() * n + more) / (n + 1)
    half = scipy.special.stdtrit(max(len(sums) - 1, 1), 0.975) * np.sqrt(
        (square - centre**2) / (n + 1)
    )
    return Estimate(
        value, float(max(centre - half, -1)), float(min(centre + half, 1)), len(array)
    )


def mean(values: Values, clusters: Sequence[str]) -> Estimate:
    """A mean with its interval: Wilson's for scores in 0..1, else that of :func:`difference`.

    Of clusters of several it is that of n over the design effect (Korn and Graubard 1998), with t's quantile:
    degrees of freedom are the clusters that tell of the rarer answer, at least 3. Scores between 0 and 1 are
    worth as many right-or-wrong ones as have their variance.
    """
    array = np.asarray(values, dtype=np.float64)
    if (array < 0).any() or (array > 1).any():
        return difference(array, clusters)
    value, (n, sums, sizes) = float(array.mean()), _worth(array, clusters)
    whole = np.isin(array, (0, 1)).all()
    variance = array.var()
    n *= 1 if whole or variance == 0 else value * (1 - value) / variance
    # How many clusters tell of either answer: of equal sums their number, fewer of unequal ones.
    each = (np.sign(sums), np.sign(sizes - sums)) if whole else (sums, sizes - sums)
    rarer = min(side.sum() ** 2 / max((side**2).sum(), 1e-12) for side in each)
    plain = len(sums) == 1 or (whole and len(sums) == len(array)) or not rarer
    z = (
        Z95
        if plain
        else float(scipy.special.stdtrit(min(max(rarer, 3), len(sums) - 1), 0.975))
    )
    return Estimate(value, *wilson(value * n, n, z), len(array))


def _worth(values: Array, clusters: Sequence[str]) -> tuple[float, Array, Array]:
    """How many independent values these are worth, n over the design effect (at least 1), which is that of
    equal answers to each question where nothing varies; and sum and size of every cluster, [C]."""
    sums, sizes = _sums(values, clusters)
    n = len(values)
    count = len(sums)
    variance = values.var()
    if count in (1, n) or variance == 0:
        return float(count), sums, sizes
    between = count / (count - 1) * ((sums - sizes * values.mean()) ** 2).sum()
    return float(n / max(between / (n * variance), 1)), sums, sizes


def _sums(values: Array, clusters: Sequence[str]) -> tuple[Array, Array]:
    """Sum and size of every cluster, [C]."""
    _, member = np.unique(np.asarray(clusters), return_inverse=True)
    sums, sizes = (
        np.bincount(member, weights=each).astype(float)
        for each in (values, np.ones(len(values)))
    )
    return sums, sizes


def normal(values: Array) -> Estimate:
    """A mean of independent values with Student's interval."""
    value = float(values.mean())
    n = len(values)
    half = float(scipy.special.stdtrit(n - 1, 0.975) * values.std(ddof=1) / np.sqrt(n))
    return Estimate(value, value - half, value + half, n)


def wilson(successes: float, n: float, z: float = Z95) -> tuple[float, float]:
    """Wilson score interval (95 %) of a proportion, from the sum of n >= 1 scores in 0..1."""
    p = successes / n
    z2 = z**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z * np.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return float(max(centre - half, 0)), float(min(centre + half, 1))


def combined(
    parts: Sequence[Estimate], weights: Values, n: int, r: float = 0.0
) -> Estimate:
    """A weighted sum of estimates, any two of which correlate by r, its interval made of theirs (Zou and
    Donner 2008); for two shares and weights 1 and -1 it is Newcombe's (1998, method 10)."""
    value = sum(w * part.value for w, part in zip(weights, parts, strict=True))
    ends = []
    for side in (-1, 1):
        # What each part moves the sum by where it stands at its own end, with its weight's sign.
        at = [
            (p.ci_high if side * w > 0 else p.ci_low) - p.value
            for w, p in zip(weights, parts, strict=True)
        ]
        moved = np.abs(np.array(weights) * at)
        mixed = (moved * np.sign(weights)).sum() ** 2 - (moved**2).sum()
        ends.append(value + side * np.sqrt(max((moved**2).sum() + r * mixed, 0)))
    return Estimate(float(value), float(ends[0]), float(ends[1]), n)


def difference_of_shares(first: int, second: int, n: int) -> Estimate:
    """Difference of two counts as shares of n with its 95 % interval."""
    parts = [Estimate(count / n, *wilson(count, n), n) for count in (first, second)]
    return combined(parts, (1, -1), n)._replace(value=(first - second) / n)
