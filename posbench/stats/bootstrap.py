"""The bootstrap: whole clusters are drawn, for prompts of one question are not independent."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
K = TypeVar("K", bound=Hashable)
Values = Sequence[float] | Array
Group = tuple[Values, Sequence[str]]
"""Values, and the cluster (question) that each belongs to."""

RESAMPLES = 2000
CHUNK = 1 << 22  # resampled entries held at once
Z95 = 1.959963984540054


class Estimate(NamedTuple):
    """A number with its 95 % interval and the observations behind it."""

    value: float
    ci_low: float
    ci_high: float
    n: int

    @property
    def words(self) -> str:
        """As notes quote it: ``0.12 [0.1, 0.14]``."""
        return f"{self.value:.3g} [{self.ci_low:.3g}, {self.ci_high:.3g}]"


def chunks(resamples: int, width: int) -> Iterator[int]:
    """Sizes of the parts in which draws of ``width`` entries each are made."""
    step = max(CHUNK // width, 1)
    return (min(step, resamples - start) for start in range(0, resamples, step))


def _draws(strata: NDArray[np.int64], resamples: int, seed: int) -> Iterator[Array]:
    """How often each cluster occurs in each draw, [r, C] at a time; each stratum keeps its size."""
    rng, clusters = np.random.default_rng(seed), len(strata)
    for part in chunks(resamples, clusters):
        weights = np.zeros((part, clusters))
        for number in range(strata.max() + 1):
            members = np.flatnonzero(strata == number)
            even = np.full(len(members), 1 / len(members))
            weights[:, members] = rng.multinomial(len(members), even, size=part)
        yield weights


def resampled(
    groups: Mapping[K, Group], *, stratified: bool, resamples: int = RESAMPLES, seed: int = 0
) -> dict[K, tuple[float, Array]]:
    """Mean of every group, exact and resampled [R]; all groups share each draw, which keeps pairs together.

    ``stratified`` draws clusters among those that occur in the same groups, so that no group runs out. For
    gold positions this draws prompts within a position where each is a question of its own, and whole
    questions where each is asked at every position.
    """
    clusters = np.concatenate([np.asarray(names) for _, names in groups.values()])
    names, member = np.unique(clusters, return_inverse=True)
    totals, sizes = [], []
    for values, _ in groups.values():
        here, member = np.split(member, [len(values)])
        totals.append(np.bincount(here, weights=np.asarray(values, dtype=np.float64), minlength=len(names)))
        sizes.append(np.bincount(here, minlength=len(names)).astype(np.float64))
    strata = np.zeros(len(names), dtype=np.int64)
    if stratified:
        _, strata = np.unique(np.stack(sizes, axis=1) > 0, axis=0, return_inverse=True)
    parts = list[Array]()
    with np.errstate(invalid="ignore"):
        for weights in _draws(strata.ravel(), resamples, seed):
            pairs = zip(totals, sizes, strict=True)
            parts.append(np.stack([(weights @ total) / (weights @ size) for total, size in pairs], axis=1))
    exact, drawn = [t.sum() / s.sum() for t, s in zip(totals, sizes, strict=True)], np.concatenate(parts)
    return {key: (float(exact[i]), drawn[:, i]) for i, key in enumerate(groups)}


def drawn_means(values: Array, clusters: Iterable[str], resamples: int, seed: int) -> Array:
    """Means of draws of clusters, [R], over the values that are numbers; equal clusters give equal draws."""
    _, member = np.unique(np.asarray(clusters), return_inverse=True)
    there, rng = ~np.isnan(values), np.random.default_rng(seed)
    totals = np.bincount(member, weights=np.where(there, values, 0))
    sizes, count = np.bincount(member, weights=there), len(totals)
    draws = (rng.integers(0, count, size=(part, count)) for part in chunks(resamples, count))
    with np.errstate(invalid="ignore"):
        return np.concatenate([totals[which].sum(1) / sizes[which].sum(1) for which in draws])


def quantiles(values: Array) -> tuple[float, float]:
    """Between these lie 95 % of the values."""
    low, high = np.nanquantile(values, [0.025, 0.975])
    return float(low), float(high)


def percentile(value: float | Array, draws: Array, n: int) -> Estimate:
    """A number with the interval of 95 % of its draws [R]."""
    return Estimate(float(value), *quantiles(draws), n)


def statistic(
    groups: Mapping[K, Group], of: Callable[[Mapping[K, Array]], Array], *, resamples: int
) -> Estimate:
    """A statistic of group means, each [R] to [R], with its percentile interval; see :func:`resampled`."""
    found = resampled(groups, stratified=False, resamples=resamples)
    value = of({key: np.array([mean]) for key, (mean, _) in found.items()})[0]
    drawn = of({key: values for key, (_, values) in found.items()})
    return percentile(value, drawn, len(next(iter(groups.values()))[0]))


def difference(
    values: Values, clusters: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """A mean, of paired differences or of any scores, with its percentile interval over clusters."""
    array = np.asarray(values, dtype=np.float64)
    return percentile(array.mean(), drawn_means(array, clusters, resamples, seed), len(array))


def mean(values: Values, clusters: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """A mean with its interval: Wilson for values that are all 0 or 1, else :func:`difference`."""
    array = np.asarray(values, dtype=np.float64)
    if np.isin(array, (0, 1)).all():
        return Estimate(float(array.mean()), *wilson(float(array.sum()), len(array)), len(array))
    return difference(array, clusters, resamples=resamples, seed=seed)


def normal(values: Array) -> Estimate:
    """A mean of independent values with its normal interval."""
    value, half = values.mean(), Z95 * values.std(ddof=1) / np.sqrt(len(values))
    return Estimate(float(value), float(value - half), float(value + half), len(values))


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Wilson score interval (95 %) of a proportion, from the sum of n >= 1 scores in 0..1."""
    p, z2 = successes / n, Z95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * np.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return float(max(centre - half, 0)), float(min(centre + half, 1))


def difference_of_shares(first: int, second: int, n: int) -> Estimate:
    """Difference of two counts as shares of n with its 95 % interval (Newcombe 1998, method 10)."""
    a, b = first / n, second / n
    (a_low, a_high), (b_low, b_high) = wilson(first, n), wilson(second, n)
    low = a - b - math.hypot(a - a_low, b_high - b)
    return Estimate((first - second) / n, low, a - b + math.hypot(a_high - a, b - b_low), n)
