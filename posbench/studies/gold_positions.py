"""Examples by gold position, and statistics over gold positions, for studies that move the gold item."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from posbench.errors import UserError
from posbench.model.lm import LM
from posbench.stats.tables import estimate
from posbench.tasks import Example, Task

Array = NDArray[np.float64]

RESAMPLES = 2000
PERMUTATIONS = 20000
MIDDLE = (0.25, 0.75)
"""Depths that count as the middle of a prompt."""


def need_items(task: Task, examples: int | None) -> None:
    """Refuse a task whose prompts have no gold item among items or whose replies are chosen, and fewer than 2
    examples.

    Raises:
        UserError: Something does not fit.
    """
    if examples is not None and examples < 2:
        allowed = "a whole number from 2 up, or null"
        raise UserError("study.examples", examples, allowed, "set study.examples=20")
    # A task without items would first have to be downloaded.
    there = task.evaluation() if task.items else []
    if any(e.choices for e in there) or not any(e.gold_position is not None and e.items for e in there):
        raise UserError(
            "task", task.name, "a task with gold positions", "take task=kv_retrieval or nq_multidoc"
        )


def need_layers(lm: LM, name: str, layers: Sequence[int] | None) -> None:
    """Refuse layers that a model lacks, and an empty list of them; None is all that a study finds by itself.

    Raises:
        UserError: There is no such layer.
    """
    if layers is not None and (not layers or any(not 0 <= layer < lm.layers for layer in layers)):
        allowed = f"layers from 0 to {lm.layers - 1}, or null"
        raise UserError(f"study.{name}", list(layers), allowed, f"set study.{name}=null")


def placed(task: Task, most: int | None) -> list[Example]:
    """The evaluation examples with a gold position, at most so many of each, sorted by it."""
    there = [e for e in task.evaluation() if e.gold_position is not None and e.items]
    return first_of_each(sorted(there, key=lambda e: e.gold_position or 0), most)


def first_of_each(examples: Sequence[Example], most: int | None) -> list[Example]:
    """The first examples of each gold position, in order; all where ``most`` is None."""
    seen: Counter[int | None] = Counter()
    kept = []
    for example in examples:
        seen[example.gold_position] += 1
        if most is None or seen[example.gold_position] <= most:
            kept.append(example)
    return kept


def facts(examples: Sequence[Example]) -> pd.DataFrame:
    """Rows of items (per prompt), id, cluster, gold_position and depth (0..1)."""
    count = len(examples[0].items)
    return pd.DataFrame(
        [
            (count, e.id, e.cluster or e.id, e.gold_position, (e.gold_position or 0) / max(count - 1, 1))
            for e in examples
        ],
        columns=["items", "id", "cluster", "gold_position", "depth"],
    )


def position_draws(
    frame: pd.DataFrame, columns: Sequence[str], resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Array]:
    """Resampled means of each gold position, columns to [R, P], positions in order; columns share their
    draws.

    Clusters are resampled among those that stand at the same positions: examples within a position where each
    is a question of its own, whole questions where each is asked at every position.
    """
    positions, place = np.unique(frame["gold_position"], return_inverse=True)
    names, member = np.unique(frame["cluster"].astype(str), return_inverse=True)
    stands = np.zeros((len(names), len(positions)), dtype=np.int64)
    np.add.at(stands, (member, place), 1)
    rng = np.random.default_rng(seed)
    weights = np.zeros((resamples, len(names)))
    for pattern in np.unique(stands, axis=0):
        group = np.flatnonzero((stands == pattern).all(1))
        weights[:, group] = rng.multinomial(len(group), np.full(len(group), 1 / len(group)), size=resamples)
    sizes = weights @ stands
    drawn = {}
    for column in columns:
        totals = np.zeros((len(names), len(positions)))
        np.add.at(totals, (member, place), frame[column].to_numpy(dtype=np.float64))
        drawn[column] = weights @ totals / sizes
    return drawn


def spearman(x: Array, y: Array) -> Array:
    """Spearman correlation of each row of x and y, [R, P] each; not a number where a row is constant."""
    a, b = (rankdata(values, axis=1) for values in (x, y))
    a, b = a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True)
    scale = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    return np.divide((a * b).sum(1), scale, out=np.full(len(a), np.nan), where=scale > 0)


def permutation_p(x: Array, y: Array, draws: int = PERMUTATIONS, seed: int = 0) -> float:
    """Share of random pairings of x and y [P] whose Spearman correlation reaches theirs, the given pairing
    counted."""
    rng = np.random.default_rng(seed)
    shuffled = rng.permuted(np.tile(y, (draws, 1)), axis=1)
    found = spearman(np.tile(x, (draws, 1)), shuffled)
    return float((1 + (found >= spearman(x[None], y[None])[0] - 1e-12).sum()) / (1 + draws))


def dips(frame: pd.DataFrame, column: str) -> tuple[float, Array]:
    """1 - mean of a column in the middle / its mean at the lower of the two ends: the value, and resampled
    values [R].

    The middle is every gold position at a depth of 25 to 75 % of the prompt; the ends are the first and the
    last one.
    """
    depth = np.sort(frame["depth"].unique())
    middle = (depth >= MIDDLE[0] - 0.05) & (depth <= MIDDLE[1] + 0.05)
    middle[[0, -1]] = False
    means = frame.groupby("gold_position")[column].mean().to_numpy()[None]

    def dip(rows: Array) -> Array:
        ends = np.minimum(rows[:, 0], rows[:, -1])
        inner = rows[:, middle].mean(1) if middle.any() else np.full(len(rows), np.nan)
        return np.divide(ends - inner, ends, out=np.full(len(rows), np.nan), where=ends > 0)

    return float(dip(means)[0]), dip(position_draws(frame, [column])[column])


def quantiles(values: Array) -> tuple[float, float]:
    """95 % of the values lie between."""
    low, high = np.nanquantile(values, [0.025, 0.975])
    return float(low), float(high)


def by_length(examples: pd.DataFrame) -> pd.DataFrame:
    """Means at each gold position and number of items, with 95 % intervals.

    Returns:
        Rows of items, gold_position, depth, n, and attention and score, each with its _low and _high.
    """
    rows = []
    for (items, position, depth), part in examples.groupby(["items", "gold_position", "depth"], sort=True):
        row = {"items": items, "gold_position": position, "depth": depth, "n": len(part)}
        for column in ("attention", "score"):
            values = part[column].to_numpy(dtype=np.float64)
            _, (low, high) = estimate(values, list(part["cluster"]), resamples=RESAMPLES)
            row |= {column: values.mean(), f"{column}_low": low, f"{column}_high": high}
        rows.append(row)
    return pd.DataFrame(rows)
