"""Several methods on the same evaluation examples, and their paired differences; shared by studies of one
method's parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from posbench.methods import Method
from posbench.pipeline.stages.evaluate import answers
from posbench.run.base import Run, encode
from posbench.stats.tables import estimate, mean_interval


def scores(run: Run, file: str, methods: Mapping[str, Method]) -> pd.DataFrame:
    """The task's own score of every evaluation example under every method; resumed from a JSON-lines file.

    Returns:
        Rows of method, id, position (gold), cluster, score.
    """
    encoded = {e.id: encode(run.lm, run.config.task, e) for e in run.evaluation}
    rows = [row for name, method in methods.items() for row in answers(run, file, name, method, encoded)]
    return pd.DataFrame(
        [
            {
                "method": row["method"],
                "id": row["id"],
                "position": row["gold_position"],
                "cluster": row["cluster"] or row["id"],
                "score": row["scores"][run.config.task.metric],
            }
            for row in rows
            if row["scores"]
        ]
    )


def accuracy(table: pd.DataFrame, method: str, resamples: int) -> dict[str, Any]:
    """Mean score of a method with its 95 % interval: value, low, high, n."""
    rows = table[table["method"] == method]
    value, (low, high) = estimate(
        rows["score"].to_numpy(dtype=np.float64), list(rows["cluster"]), resamples=resamples
    )
    return {"value": value, "low": low, "high": high, "n": len(rows)}


def difference(table: pd.DataFrame, method: str, base: str, resamples: int) -> dict[str, float]:
    """Mean paired difference of two methods with its 95 % bootstrap interval over questions: value, low,
    high."""
    wide = table.pivot(index="id", columns="method", values="score")
    clusters = table.drop_duplicates("id").set_index("id").loc[wide.index, "cluster"].tolist()
    change = (wide[method] - wide[base]).to_numpy(dtype=np.float64)
    low, high = mean_interval(change, clusters, resamples=resamples, seed=0)
    return {"value": float(change.mean()), "low": low, "high": high}
