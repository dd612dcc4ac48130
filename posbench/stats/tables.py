"""From scored rows to tidy tables with intervals; pure functions."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from posbench.tasks.base import Task

Array = NDArray[np.float64]

COLUMNS = (
    "model",
    "method",
    "task",
    "position",
    "depth",
    "metric",
    "value",
    "n",
    "ci_low",
    "ci_high",
    "seed",
)
"""Columns of ``metrics.csv``. The first metric is the task's own, in 0..1; position is a 0-based gold index
or ``all``; depth is index / (items - 1); n counts prompts; the interval is 95 %: Wilson for right-or-wrong
scores, else a bootstrap over questions, paired for a difference. :data:`BIAS` names the rows that sum up the
curve over gold positions."""

BIAS = ("position_bias", "gap", "gap_null", "primacy", "recency", "middle_drop")
"""Statistics of the score over three gold positions or more, see :func:`curve_statistics` and
``docs/metrics.md``: the standard deviation over positions without the part that sampling noise adds (the one
to sort by), best minus worst position, what that is where positions do not matter, first position minus the
inner ones, last minus the inner ones, mean of the ends minus the lowest inner one."""

SUBSET_COLUMNS = (
    "model",
    "method",
    "task",
    "subset",
    "kind",
    "metric",
    "value",
    "n",
    "ci_low",
    "ci_high",
    "seed",
)
"""Columns of ``subsets.csv``: kind is ``subset`` or ``average`` (a named mean over subsets); the rest as in
``metrics.csv``."""

Z95 = 1.959963984540054
CHUNK = 1 << 22  # resampled entries held at once


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


def mean_interval(
    values: NDArray[np.float64], clusters: Sequence[str], *, resamples: int, seed: int
) -> tuple[float, float]:
    """Percentile bootstrap (95 %) of a mean, of scores or of paired differences; whole clusters are
    resampled.

    Args:
        values: Score, or method minus unmodified, per prompt, [n].
        clusters: The question each prompt belongs to, [n]; prompts of one question are not independent.
        resamples: Bootstrap draws.
        seed: Seed of the draws.
    """
    _, member = np.unique(np.asarray(clusters), return_inverse=True)
    totals, sizes = np.bincount(member, weights=values), np.bincount(member)
    means = np.concatenate([totals[d].sum(1) / sizes[d].sum(1) for d in _draws(len(totals), resamples, seed)])
    return _quantiles(means)


def _draws(clusters: int, resamples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Drawn cluster numbers, [r, clusters] at a time."""
    rng = np.random.default_rng(seed)
    step = max(CHUNK // clusters, 1)
    for start in range(0, resamples, step):
        yield rng.integers(0, clusters, size=(min(step, resamples - start), clusters))


def _quantiles(means: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.nanquantile(means, [0.025, 0.975])
    return float(low), float(high)


def tidy(
    rows: Sequence[Mapping[str, Any]], task: Task, *, model: str, unmodified: str, resamples: int, seed: int
) -> pd.DataFrame:
    """The metrics table of a run.

    Args:
        rows: Prediction rows with ``method``, ``id``, ``gold_position``, ``cluster``, ``subset`` and
            ``scores``; rows without scores (no gold answer is known) are left out.
        task: The task, for its name, its metric and its means over subsets.
        model: Model name.
        unmodified: Method name of the unmodified model; others are compared with it on the same prompts.
        resamples: Bootstrap draws per interval.
        seed: Seed of the draws and the ``seed`` column.

    Returns:
        Frame with :data:`COLUMNS`.

    Raises:
        ValueError: There are no scored rows.
    """
    frame, names = _scored(rows, task)
    out: list[dict[str, Any]] = []

    def add(
        method: str, position: Any, name: str, value: float, n: int, interval: tuple[float, float]
    ) -> None:
        depth = position / (task.items - 1) if position != "all" and task.items and task.items > 1 else np.nan
        cells = (model, method, task.name, str(position), depth, name, value, n, *interval, seed)
        out.append(dict(zip(COLUMNS, cells, strict=True)))

    whole = _whole(frame, names, task, unmodified, resamples, seed)
    methods = list(dict.fromkeys(frame["method"]))
    for name in names:
        for method in methods:
            part = frame[frame["method"] == method].dropna(subset=[name])
            for position, group in part.groupby("position", sort=True) if name == task.metric else ():
                value, interval = _mean(group, name, resamples, seed)
                add(method, int(position), name, value, len(group), interval)
            if (method, name) in whole:
                add(method, "all", name, *whole[method, name])
        for method in methods:
            both = _paired(frame, method, unmodified, name)
            for position, group in both.groupby("position", sort=True) if name == task.metric else ():
                value, interval = _mean(group, "difference", resamples, seed)
                add(method, int(position), f"{name}_difference", value, len(group), interval)
            if (method, f"{name}_difference") in whole:
                add(method, "all", f"{name}_difference", *whole[method, f"{name}_difference"])
    for method, name, value, n, interval in _bias(frame, task.metric, unmodified, resamples, seed):
        add(method, "all", name, value, n, interval)
    return pd.DataFrame(out, columns=list(COLUMNS))


def curve_statistics(means: Array) -> dict[str, Array]:
    """What a score over K >= 3 gold positions amounts to.

    Args:
        means: Mean score at every gold position in order, [..., K].

    Returns:
        By name [...]: ``primacy`` and ``recency``, first and last position minus the mean of the inner ones;
        ``middle_drop``, mean of the ends minus the lowest inner one; ``gap``, best minus worst (Zhang et al.
        2024, Ms-PoE: "Gap"). Sampling noise alone raises the last two.
    """
    first, inner, last = means[..., 0], means[..., 1:-1], means[..., -1]
    return {
        "primacy": first - inner.mean(-1),
        "recency": last - inner.mean(-1),
        "middle_drop": (first + last) / 2 - inner.min(-1),
        "gap": means.max(-1) - means.min(-1),
    }


def resampled_curves(
    frame: pd.DataFrame, name: str, by: str, resamples: int, seed: int
) -> dict[Any, tuple[Array, Array]]:
    """Mean score over gold positions, exact and resampled; equal questions are drawn for all.

    Args:
        frame: Rows with position, cluster, the score and ``by``.
        name: Column of the score.
        by: Column that tells the curves apart (method, setting).
        resamples: Bootstrap draws R. Clusters are drawn among those asked at the same positions, so that no
            position runs out.
        seed: Seed of the draws.

    Returns:
        By value of ``by``: the curve [K] and its draws [R, K].
    """
    frame = frame.dropna(subset=[name])
    names, member = np.unique(frame["cluster"], return_inverse=True)
    places, place = np.unique(frame["position"], return_inverse=True)
    asked = np.zeros((len(names), len(places)), dtype=bool)
    asked[member, place] = True
    _, stratum = np.unique(asked, axis=0, return_inverse=True)
    curves: dict[Any, tuple[Array, Array]] = {}
    for key in dict.fromkeys(frame[by]):
        here, shape = (frame[by] == key).to_numpy(), asked.shape
        cells = np.ravel_multi_index((member[here], place[here]), shape)
        scores = frame[name].to_numpy(dtype=np.float64)[here]
        sums = [
            np.bincount(cells, weights=w, minlength=asked.size).reshape(shape)
            for w in (scores, np.ones_like(scores))
        ]
        curves[key] = sums[0].astype(np.float64), sums[1].astype(np.float64)
    drawn: dict[Any, list[Array]] = {key: [] for key in curves}
    rng = np.random.default_rng(seed)
    step = max(CHUNK // len(names), 1)
    for start in range(0, resamples, step):
        weights = np.zeros((min(step, resamples - start), len(names)))
        for number in range(stratum.max() + 1):
            members = np.flatnonzero(stratum == number)
            weights[:, members] = rng.multinomial(
                len(members), np.full(len(members), 1 / len(members)), size=len(weights)
            )
        with np.errstate(invalid="ignore"):
            for key, (totals, counts) in curves.items():
                drawn[key].append(weights @ totals / (weights @ counts))
    with np.errstate(invalid="ignore"):
        return {
            key: (totals.sum(0) / counts.sum(0), np.concatenate(drawn[key]))
            for key, (totals, counts) in curves.items()
        }


def position_bias(curve: Array, draws: Array) -> tuple[float, Array]:
    """Standard deviation over gold positions without what sampling noise adds.

    Args:
        curve: Mean score at K >= 2 gold positions, [K].
        draws: Its bootstrap draws, [R, K].

    Returns:
        The root of what is left of the variance, 0 where noise explains more than all of it; and its draws
        [R], off which the noise is taken twice: that of the sample and that of the draw.
    """
    variance, drawn = curve.var(ddof=1), draws.var(-1, ddof=1)
    noise = np.nanmean(drawn) - variance
    return float(np.sqrt(np.maximum(variance - noise, 0))), np.sqrt(np.maximum(drawn - 2 * noise, 0))


def _bias(
    frame: pd.DataFrame, name: str, unmodified: str, resamples: int, seed: int
) -> Iterator[tuple[str, str, float, int, tuple[float, float]]]:
    """Method, statistic of :data:`BIAS` or its difference from the unmodified model, value, n, interval.

    The draws of a statistic that noise raises lie twice as far up as its estimate does (noise of the sample,
    and of the draw), so twice that bias is taken off them. A gap is off by at most the gap of the curve's
    errors; its interval adds the 95 % quantile of that, as Tukey's range test does. Without position bias the
    intervals then reach zero. A difference of two gaps gets no
    row: the errors of two maxima do not cancel, and no such interval would hold.
    """
    placed = frame.dropna(subset=["position", name])
    if placed["position"].nunique() < 3:
        return
    base: dict[str, tuple[float, Array]] = {}
    curves = resampled_curves(placed, name, "method", resamples, seed)
    for method in sorted(
        (m for m, (curve, _) in curves.items() if not np.isnan(curve).any()), key=lambda m: m != unmodified
    ):
        part, (curve, draws) = placed[placed["method"] == method], curves[method]
        exact, drawn = curve_statistics(curve), curve_statistics(draws)
        found = {key: (float(exact[key]), drawn[key]) for key in ("primacy", "recency")}
        drop = exact["middle_drop"]
        found["middle_drop"] = (
            float(drop),
            drawn["middle_drop"] - 2 * (np.nanmean(drawn["middle_drop"]) - drop),
        )
        found["position_bias"] = position_bias(curve, draws)
        gap, error = float(exact["gap"]), float(np.nanquantile(np.ptp(draws - curve, axis=1), 0.95))
        shuffled = _shuffled_gaps(part, name, resamples, seed)
        yield method, "gap", gap, len(part), (max(gap - error, 0.0), min(gap + error, 1.0))
        yield method, "gap_null", float(shuffled.mean()), len(part), _quantiles(shuffled)
        for key, (value, values) in found.items():
            yield method, key, value, len(part), _quantiles(values)
            if base:
                yield (
                    method,
                    f"{key}_difference",
                    value - base[key][0],
                    len(part),
                    _quantiles(values - base[key][1]),
                )
        if method == unmodified:
            base = found


def _shuffled_gaps(part: pd.DataFrame, name: str, resamples: int, seed: int) -> Array:
    """Best minus worst position after positions were shuffled, [R]: within questions that were asked at
    several positions, else among all prompts."""
    _, member = np.unique(part["cluster"], return_inverse=True)
    rows = np.argsort(member, kind="stable")
    block = member[rows] if member.max() + 1 < len(member) else np.zeros(len(member))
    values = part[name].to_numpy(dtype=np.float64)[rows]
    places = part["position"].to_numpy(dtype=np.int64)[rows]
    _, place, counts = np.unique(places, return_inverse=True, return_counts=True)
    shares = np.eye(len(counts))[place] / counts
    rng, step = np.random.default_rng(seed), max(CHUNK // len(rows), 1)
    gaps = []
    for start in range(0, resamples, step):
        keys = rng.random((min(step, resamples - start), len(rows))) + block
        gaps.append(np.ptp(values[np.argsort(keys, axis=1)] @ shares, axis=1))
    return np.concatenate(gaps)


def by_subset(
    rows: Sequence[Mapping[str, Any]], task: Task, *, model: str, unmodified: str, resamples: int, seed: int
) -> pd.DataFrame:
    """Every subset and every named average, for a task that has several subsets.

    Args:
        rows: As in :func:`tidy`, like all other arguments.

    Returns:
        Frame with :data:`SUBSET_COLUMNS`; no rows where there are no subsets. Subsets have all metrics,
        averages the task's own.
    """
    frame, names = _scored(rows, task)
    out: list[dict[str, Any]] = []
    if frame["subset"].nunique() > 1:
        for method, kind, where, name, value, n, interval in _subsets(
            frame, names, task, unmodified, resamples, seed
        ):
            out.append(
                dict(
                    zip(
                        SUBSET_COLUMNS,
                        (model, method, task.name, where, kind, name, value, n, *interval, seed),
                        strict=True,
                    )
                )
            )
    return pd.DataFrame(out, columns=list(SUBSET_COLUMNS))


def _scored(rows: Sequence[Mapping[str, Any]], task: Task) -> tuple[pd.DataFrame, list[str]]:
    """One row per scored reply (method, id, position, cluster, subset and a column per metric), and the
    metrics."""
    kept = [r for r in rows if r["scores"]]
    if not kept:
        raise ValueError("no scored rows to tabulate")
    names = list(dict.fromkeys([task.metric, *(name for r in kept for name in r["scores"])]))
    return pd.DataFrame(
        [
            {
                "method": r["method"],
                "id": r["id"],
                "position": r["gold_position"],
                "cluster": r["cluster"] or r["id"],
                "subset": r.get("subset", ""),
                **{name: r["scores"].get(name, np.nan) for name in names},
            }
            for r in kept
        ]
    ), names


def _paired(frame: pd.DataFrame, method: str, unmodified: str, name: str) -> pd.DataFrame:
    """Prompts that both the method and the unmodified model answered, with their ``difference``."""
    base = frame.loc[frame["method"] == unmodified, ["id", name]]
    both = frame[(frame["method"] == method) & (method != unmodified)].merge(
        base, on="id", suffixes=("", "_base")
    )
    return both.assign(difference=both[name] - both[f"{name}_base"]).dropna(subset=["difference"])


def estimate(
    values: NDArray[np.float64], clusters: Sequence[str], *, resamples: int, seed: int = 0
) -> tuple[float, tuple[float, float]]:
    """A mean with its 95 % interval: Wilson for values that are all 0 or 1, else a bootstrap over
    clusters."""
    if np.isin(values, (0, 1)).all():
        return float(values.mean()), wilson(float(values.sum()), len(values))
    return float(values.mean()), mean_interval(values, clusters, resamples=resamples, seed=seed)


def _mean(group: pd.DataFrame, name: str, resamples: int, seed: int) -> tuple[float, tuple[float, float]]:
    """A mean with its interval; differences are no counts, even where all are 0 or 1."""
    values, clusters = group[name].to_numpy(dtype=np.float64), list(group["cluster"])
    if name == "difference":
        return float(values.mean()), mean_interval(values, clusters, resamples=resamples, seed=seed)
    return estimate(values, clusters, resamples=resamples, seed=seed)


def _whole(
    frame: pd.DataFrame, names: Sequence[str], task: Task, unmodified: str, resamples: int, seed: int
) -> dict[tuple[str, str], tuple[float, int, tuple[float, float]]]:
    """(method, metric or metric_difference) -> value, n and interval over all prompts."""
    out: dict[tuple[str, str], tuple[float, int, tuple[float, float]]] = {}
    if frame["subset"].nunique() > 1 or type(task).total is not Task.total:
        for method, _, where, name, value, n, interval in _subsets(
            frame, names, task, unmodified, resamples, seed
        ):
            if where == "all":
                out[method, name] = (value, n, interval)
    for method in dict.fromkeys(frame["method"]):
        for name in names:
            for key, column, rows in (
                ((method, name), name, frame[frame["method"] == method].dropna(subset=[name])),
                ((method, f"{name}_difference"), "difference", _paired(frame, method, unmodified, name)),
            ):
                if key not in out and len(rows):
                    value, interval = _mean(rows, column, resamples, seed)
                    out[key] = (value, len(rows), interval)
    return out


Line = tuple[str, str, str, str, float, int, tuple[float, float]]


def _subsets(
    frame: pd.DataFrame, names: Sequence[str], task: Task, unmodified: str, resamples: int, seed: int
) -> Iterator[Line]:
    """Method, kind, subset or average, metric, value, n and interval; questions are resampled within their
    subset."""
    subsets = list(dict.fromkeys(frame["subset"]))
    averages = {"all": tuple(subsets)} | dict(task.averages())
    # An average that is made of other averages comes after them, and the total last.
    averages["all"] = averages.pop("all")
    exact: dict[tuple[str, str], tuple[float, NDArray[np.float64], int]] = {}
    binary: dict[tuple[str, str], tuple[float, float]] = {}
    methods = list(dict.fromkeys(frame["method"]))
    for method in methods:
        part = frame[frame["method"] == method]
        for subset in subsets:
            here = part[part["subset"] == subset].sort_values("id")
            means, draws, counts = _resample(here, names, resamples, seed + zlib.crc32(subset.encode()))
            if task.metric in means:
                value = float(task.total(subset, {k: np.array(v) for k, v in means.items()}))
                means[task.metric], draws[task.metric] = value, task.total(subset, draws)
            for name in means:
                exact[method, f"{subset}/{name}"] = (means[name], draws[name], counts[name])
                if type(task).total is Task.total and here[name].dropna().isin((0, 1)).all():
                    binary[method, f"{subset}/{name}"] = wilson(means[name] * counts[name], counts[name])
    for kind, where, name in [("subset", s, n) for s in subsets for n in names] + [
        ("average", a, task.metric) for a in averages
    ]:
        for method in methods:
            if kind == "average":
                parts = [
                    exact[method, f"{p}/{name}"] for p in averages[where] if (method, f"{p}/{name}") in exact
                ]
                if not parts:
                    continue
                counts_ = np.array([n for _, _, n in parts])
                weights = (
                    counts_ / counts_.sum()
                    if task.average == "examples"
                    else np.full(len(parts), 1 / len(parts))
                )
                value = float(sum(w * v for w, (v, _, _) in zip(weights, parts, strict=True)))
                drawn = np.sum([w * d for w, (_, d, _) in zip(weights, parts, strict=True)], axis=0)
                exact[method, f"{where}/{name}"] = (value, drawn, int(counts_.sum()))
            found = exact.get((method, f"{where}/{name}"))
            if found is None:
                continue
            value, drawn, n = found
            yield (
                method,
                kind,
                where,
                name,
                value,
                n,
                binary.get((method, f"{where}/{name}")) or _quantiles(drawn),
            )
            base = exact.get((unmodified, f"{where}/{name}"))
            if method != unmodified and base is not None:
                yield (
                    method,
                    kind,
                    where,
                    f"{name}_difference",
                    value - base[0],
                    n,
                    _quantiles(drawn - base[1]),
                )


def _resample(
    rows: pd.DataFrame, names: Sequence[str], resamples: int, seed: int
) -> tuple[dict[str, float], dict[str, NDArray[np.float64]], dict[str, int]]:
    """Mean, resampled means and count of every metric that occurs; equal questions and seed give equal
    draws."""
    _, member = np.unique(rows["cluster"], return_inverse=True)
    size = int(member.max()) + 1
    drawn = np.concatenate(list(_draws(size, resamples, seed)))
    means, draws, counts = {}, {}, {}
    for name in names:
        values = rows[name].to_numpy(dtype=np.float64)
        there = ~np.isnan(values)
        if there.any():
            totals = np.bincount(member, weights=np.where(there, values, 0), minlength=size)
            sizes = np.bincount(member, weights=there, minlength=size)
            means[name], counts[name] = float(values[there].mean()), int(there.sum())
            with np.errstate(invalid="ignore"):
                draws[name] = totals[drawn].sum(1) / sizes[drawn].sum(1)
    return means, draws, counts
