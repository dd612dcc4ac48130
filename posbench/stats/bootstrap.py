"""The bootstrap: whole clusters are drawn, for prompts of one question are not independent."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
K = TypeVar("K", bound=Hashable)
Group = tuple[Sequence[float] | Array, Sequence[str]]
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


def index_draws(clusters: int, resamples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Drawn cluster numbers, [r, clusters] at a time."""
    rng, step = np.random.default_rng(seed), max(CHUNK // clusters, 1)
    for start in range(0, resamples, step):
        yield rng.integers(0, clusters, size=(min(step, resamples - start), clusters))


def _draws(strata: NDArray[np.int64], resamples: int, seed: int) -> Iterator[Array]:
    """How often each cluster occurs in each draw, [r, C] at a time; each stratum keeps its size in every draw.

    Args:
        strata: Stratum 0, 1, ... of each of C clusters.
        resamples: Draws R in all.
        seed: Seed of the draws.
    """
    rng, clusters = np.random.default_rng(seed), len(strata)
    step = max(CHUNK // clusters, 1)
    for start in range(0, resamples, step):
        weights = np.zeros((min(step, resamples - start), clusters))
        for number in range(strata.max() + 1):
            members = np.flatnonzero(strata == number)
            even = np.full(len(members), 1 / len(members))
            weights[:, members] = rng.multinomial(len(members), even, size=len(weights))
        yield weights


def resampled(
    groups: Mapping[K, Group], *, stratified: bool, resamples: int = RESAMPLES, seed: int = 0
) -> dict[K, tuple[float, Array]]:
    """Mean of every group, exact and resampled [R]; each draw is the same in all groups, which keeps pairs together.

    Args:
        groups: Values by group; a cluster may occur in several.
        stratified: Draw clusters among those that occur in the same groups, so that no group runs out. For gold
            positions this draws prompts within a position where each is a question of its own, and whole questions
            where each is asked at every position.
        resamples: Draws R.
        seed: Seed of the draws.
    """
    names, member = np.unique(
        np.concatenate([np.asarray(c) for _, c in groups.values()]), return_inverse=True
    )
    at, totals, sizes = 0, [], []
    for values, _ in groups.values():
        here = member[at : at + len(values)]
        at += len(values)
        totals.append(np.bincount(here, weights=np.asarray(values, dtype=np.float64), minlength=len(names)))
        sizes.append(np.bincount(here, minlength=len(names)).astype(np.float64))
    strata = np.zeros(len(names), dtype=np.int64)
    if stratified:
        _, strata = np.unique(np.stack(sizes, axis=1) > 0, axis=0, return_inverse=True)
    total, size = np.stack(totals, axis=1), np.stack(sizes, axis=1)
    with np.errstate(invalid="ignore"):
        parts = [(w @ total) / (w @ size) for w in _draws(strata.ravel(), resamples, seed)]
        drawn, exact = np.concatenate(parts), total.sum(0) / size.sum(0)
    return {key: (float(exact[i]), drawn[:, i]) for i, key in enumerate(groups)}


def quantiles(values: Array) -> tuple[float, float]:
    """Between these lie 95 % of the values."""
    low, high = np.nanquantile(values, [0.025, 0.975])
    return float(low), float(high)


def statistic(
    groups: Mapping[K, Group], of: Callable[[Mapping[K, Array]], Array], *, resamples: int, seed: int = 0
) -> Estimate:
    """A statistic of group means with its percentile interval.

    Args:
        groups: Values by group; a cluster may occur in several groups, and then stays paired.
        of: From the group means, each [R], to the statistic, [R].
        resamples: Draws R.
        seed: Seed of the draws.
    """
    found = resampled(groups, stratified=False, resamples=resamples, seed=seed)
    value = of({key: np.array([mean]) for key, (mean, _) in found.items()})[0]
    drawn = of({key: values for key, (_, values) in found.items()})
    return Estimate(float(value), *quantiles(drawn), len(next(iter(groups.values()))[0]))


def difference(
    values: Sequence[float] | Array, clusters: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """A mean, of paired differences or of any scores, with its percentile interval over clusters."""
    array = np.asarray(values, dtype=np.float64)
    _, member = np.unique(np.asarray(clusters), return_inverse=True)
    totals, sizes = np.bincount(member, weights=array), np.bincount(member)
    drawn = index_draws(len(totals), resamples, seed)
    means = [totals[which].sum(1) / sizes[which].sum(1) for which in drawn]
    return Estimate(float(array.mean()), *quantiles(np.concatenate(means)), len(array))


def mean(
    values: Sequence[float] | Array, clusters: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """A mean with its interval: Wilson for values that are all 0 or 1, else :func:`difference`."""
    array = np.asarray(values, dtype=np.float64)
    if np.isin(array, (0, 1)).all():
        return Estimate(float(array.mean()), *wilson(float(array.sum()), len(array)), len(array))
    return difference(array, clusters, resamples=resamples, seed=seed)


def normal(values: Array) -> Estimate:
    """A mean of independent values with its normal interval."""
    half = Z95 * values.std(ddof=1) / np.sqrt(len(values))
    return Estimate(
        float(values.mean()), float(values.mean() - half), float(values.mean() + half), len(values)
    )


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Wilson score interval (95 %) of a proportion.

    Args:
        successes: Sum of scores in 0..1.
        n: Number of scores, at least 1.
    """
    p, z2 = successes / n, Z95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * np.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return float(max(centre - half, 0)), float(min(centre + half, 1))
