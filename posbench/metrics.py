"""From scored rows to a tidy table with intervals; pure functions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

COLUMNS = ("model", "method", "task", "position", "depth", "metric", "value", "n", "ci_low", "ci_high", "seed")
"""Columns of ``metrics.csv``: position is a 0-based gold index or ``all``; depth is index / (items - 1); values lie in
0..1; n counts prompts; the interval is 95 %: Wilson for an accuracy, paired bootstrap for a difference."""

Z95 = 1.959963984540054


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


def paired_interval(
    difference: NDArray[np.float64], clusters: Sequence[str], *, resamples: int, seed: int
) -> tuple[float, float]:
    """Percentile bootstrap (95 %) of a mean paired difference; whole clusters are resampled.

    Args:
        difference: Method minus unmodified, per prompt, [n].
        clusters: The question each prompt belongs to, [n]; prompts of one question are not independent.
        resamples: Bootstrap draws.
        seed: Seed of the draws.
    """
    _, member = np.unique(np.asarray(clusters), return_inverse=True)
    totals = np.bincount(member, weights=difference)
    sizes = np.bincount(member)
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(totals), size=(resamples, len(totals)))
    means = totals[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def tidy(
    rows: Sequence[Mapping[str, Any]],
    *,
    model: str,
    task: str,
    metric: str,
    unmodified: str,
    items: int | None,
    resamples: int,
    seed: int,
) -> pd.DataFrame:
    """The metrics table of a run.

    Args:
        rows: Prediction rows with ``method``, ``id``, ``gold_position``, ``cluster`` and ``scores``.
        model: Model name.
        task: Task name.
        metric: The score to tabulate, in 0..1.
        unmodified: Method name of the unmodified model; others are compared with it on the same prompts.
        items: Items per prompt, for the depth column.
        resamples: Bootstrap draws per difference.
        seed: Seed of the draws and the ``seed`` column.

    Returns:
        Frame with :data:`COLUMNS`.

    Raises:
        ValueError: There are no rows.
    """
    frame = pd.DataFrame(
        [
            {
                "method": r["method"],
                "id": r["id"],
                "position": r["gold_position"],
                "cluster": r["cluster"],
                "score": r["scores"][metric],
            }
            for r in rows
        ]
    )
    if frame.empty:
        raise ValueError("no scored rows to tabulate")
    out: list[dict[str, Any]] = []

    def add(method: str, position: Any, name: str, value: float, n: int, interval: tuple[float, float] | None) -> None:
        low, high = interval or (np.nan, np.nan)
        depth = position / (items - 1) if position != "all" and items and items > 1 else np.nan
        out.append(dict(zip(COLUMNS, (model, method, task, str(position), depth, name, value, n, low, high, seed), strict=True)))

    def groups(part: pd.DataFrame) -> list[tuple[Any, pd.DataFrame]]:
        by_position = [(int(p), g) for p, g in part.groupby("position", sort=True)]  # type: ignore[call-overload]
        return [*by_position, ("all", part)] if by_position else [("all", part)]

    methods = list(dict.fromkeys(frame["method"]))
    for method in methods:
        part = frame[frame["method"] == method]
        for position, group in groups(part):
            n, total = len(group), float(group["score"].sum())
            add(method, position, metric, total / n, n, wilson(total, n))
        means = part.groupby("position")["score"].mean().sort_index()
        if len(means) > 2:
            drop = (means.iloc[0] + means.iloc[-1]) / 2 - means.iloc[1:-1].min()
            add(method, "all", "middle_drop", float(drop), len(part), None)
    base = frame[frame["method"] == unmodified]
    for method in methods:
        if method == unmodified or base.empty:
            continue
        both = frame[frame["method"] == method].merge(base[["id", "score"]], on="id", suffixes=("", "_base"))
        for position, group in groups(both):
            difference = (group["score"] - group["score_base"]).to_numpy(dtype=np.float64)
            interval = paired_interval(difference, list(group["cluster"]), resamples=resamples, seed=seed)
            add(method, position, f"{metric}_difference", float(difference.mean()), len(group), interval)
    return pd.DataFrame(out, columns=list(COLUMNS))
