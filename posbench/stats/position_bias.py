"""What a score over gold positions amounts to: spread, gap, primacy, recency, drop (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from posbench.stats.bootstrap import Array, Estimate, chunks, percentile, resampled

STATISTICS = ("position_bias", "gap", "gap_null", "primacy", "recency", "middle_drop")
"""Over three gold positions or more: :func:`position_bias` (the one to sort by), best minus worst position,
what that is where positions do not matter, and the others of :func:`curve_statistics`."""


def curves(
    frame: pd.DataFrame, name: str, by: str, resamples: int, seed: int = 0
) -> dict[Any, tuple[Array, Array]]:
    """Mean score over K gold positions: for each value of ``by``, the curve [K] and its draws [R, K].

    Equal questions (``cluster``) are drawn for all. A curve is not a number at a position without a row.
    """
    frame = frame.dropna(subset=[name])
    places, keys = sorted(frame["gold_position"].unique()), list(dict.fromkeys(frame[by]))
    parts = dict(iter(frame.groupby([by, "gold_position"], sort=False)))
    cells = [(key, place) for key in keys for place in places if (key, place) in parts]
    groups = {cell: (parts[cell][name].to_numpy(), list(parts[cell]["cluster"])) for cell in cells}
    found = resampled(groups, stratified=True, resamples=resamples, seed=seed)
    nothing = np.nan, np.full(resamples, np.nan)
    out = {}
    for key in keys:
        means, drawn = zip(*(found.get((key, place), nothing) for place in places), strict=True)
        out[key] = np.array(means), np.stack(drawn, axis=-1)
    return out


def curve_statistics(means: Array) -> dict[str, Array]:
    """What mean scores at K >= 3 gold positions in order, [..., K], amount to: by name, [...].

    ``primacy`` and ``recency`` are first and last position minus the mean of the inner ones; ``middle_drop``
    is the mean of the ends minus the lowest inner one; ``gap`` is best minus worst (Zhang et al. 2024,
    Ms-PoE: "Gap"). Sampling noise alone raises the last two.
    """
    first, inner, last = means[..., 0], means[..., 1:-1], means[..., -1]
    return {
        "primacy": first - inner.mean(-1),
        "recency": last - inner.mean(-1),
        "middle_drop": (first + last) / 2 - inner.min(-1),
        "gap": means.max(-1) - means.min(-1),
    }


def dips(frame: pd.DataFrame, name: str, resamples: int) -> tuple[float, Array]:
    """1 - mean of a column in the middle / its mean at the lower of the two ends: value and draws [R].

    The middle is every gold position at a depth of 25 to 75 % of the prompt, give or take 5 for rounded
    positions. The frame is of one number of items, with items, gold_position, depth (0..1) and cluster.
    """
    ((curve, draws),) = curves(frame, name, "items", resamples).values()
    depth = np.sort(frame["depth"].unique())
    middle = (depth >= 0.2) & (depth <= 0.8)
    middle[[0, -1]] = False

    def dip(means: Array) -> Array:
        ends = means[:, [0, -1]].min(1)
        inner = means[:, middle].mean(1) if middle.any() else np.full(len(means), np.nan)
        return np.divide(ends - inner, ends, out=np.full(len(means), np.nan), where=ends > 0)

    return float(dip(curve[None])[0]), dip(draws)


def position_bias(curve: Array, draws: Array) -> tuple[float, Array]:
    """Standard deviation of a curve over K >= 2 gold positions without what sampling noise adds.

    From the curve [K] and its draws [R, K], the root of what is left of the variance, 0 where noise explains
    more than all of it; and its draws [R], off which the noise of the sample and that of the draw are taken.
    """
    variance, drawn = curve.var(ddof=1), draws.var(-1, ddof=1)
    noise = np.nanmean(drawn) - variance
    return float(np.sqrt(np.maximum(variance - noise, 0))), np.sqrt(np.maximum(drawn - 2 * noise, 0))


def rows(
    frame: pd.DataFrame, name: str, unmodified: str, resamples: int, seed: int
) -> Iterator[tuple[str, str, Estimate]]:
    """Method, statistic of :data:`STATISTICS` or its difference from the unmodified model, estimate.

    The draws of a statistic that noise raises lie twice as far up as its estimate does (noise of the sample,
    and of the draw), so twice that bias is taken off them. A gap is off by at most the gap of the curve's
    errors; its interval adds the 95 % quantile of that, as Tukey's range test does. Without position bias the
    intervals then reach zero. A difference of two gaps gets no row: the errors of two maxima do not cancel,
    and no such interval would hold. ``frame`` has method, gold_position, cluster and the score ``name``.
    """
    placed = frame.dropna(subset=["gold_position", name])
    if placed["gold_position"].nunique() < 3:
        return
    base: dict[str, tuple[float, Array]] = {}
    found = curves(placed, name, "method", resamples, seed)
    whole = [method for method, (curve, _) in found.items() if not np.isnan(curve).any()]
    for method in sorted(whole, key=lambda m: m != unmodified):
        part, (curve, draws) = placed[placed["method"] == method], found[method]
        exact, drawn, n = curve_statistics(curve), curve_statistics(draws), len(part)
        own = {key: (float(exact[key]), drawn[key]) for key in ("primacy", "recency", "middle_drop")}
        drop, drops = own["middle_drop"]
        own["middle_drop"] = drop, drops - 2 * (np.nanmean(drops) - drop)
        own["position_bias"] = position_bias(curve, draws)
        gap, error = float(exact["gap"]), float(np.nanquantile(np.ptp(draws - curve, axis=1), 0.95))
        yield method, "gap", Estimate(gap, max(gap - error, 0.0), min(gap + error, 1.0), n)
        shuffled = _shuffled_gaps(part, name, resamples, seed)
        yield method, "gap_null", percentile(shuffled.mean(), shuffled, n)
        for key, (value, values) in own.items():
            yield method, key, percentile(value, values, n)
            if base:
                yield method, f"{key}_difference", percentile(value - base[key][0], values - base[key][1], n)
        if method == unmodified:
            base = own


def _shuffled_gaps(part: pd.DataFrame, name: str, resamples: int, seed: int) -> Array:
    """Best minus worst position, [R], positions shuffled within questions asked at several, else in all."""
    _, member = np.unique(part["cluster"], return_inverse=True)
    order = np.argsort(member, kind="stable")
    block = member[order] if member.max() + 1 < len(member) else np.zeros(len(member))
    values = part[name].to_numpy(dtype=np.float64)[order]
    places = part["gold_position"].to_numpy(dtype=np.int64)[order]
    _, place, counts = np.unique(places, return_inverse=True, return_counts=True)
    shares, rng = np.eye(len(counts))[place] / counts, np.random.default_rng(seed)
    gaps = []
    for size in chunks(resamples, len(order)):
        keys = rng.random((size, len(order))) + block
        gaps.append(np.ptp(values[np.argsort(keys, axis=1)] @ shares, axis=1))
    return np.concatenate(gaps)
