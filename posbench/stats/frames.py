"""Columns of the tables: the task's own metric, gold positions, attention to the gold item."""

from __future__ import annotations

import numpy as np

from posbench.errors import UserError
from posbench.late import pd
from posbench.stats.position_bias import STATISTICS

UNMODIFIED = "none"
"""Name of the unmodified model in tables."""
SERVED = "served"
"""Name of a model behind a server, of which it is not known how it is modified."""


def display_name(method: object) -> str:
    """A method's name for readers."""
    if method == UNMODIFIED:
        return "unmodified"
    return str(method)


def need_columns(frame: pd.DataFrame, name: str, *columns: str) -> None:
    """Refuse a frame that lacks a column, or has no row.

    Raises:
        UserError: Says so; ``name`` is what the frame is called there.
    """
    missing = [column for column in columns if column not in frame]
    if missing:
        problem = f"columns missing: {', '.join(missing)}"
    elif frame.empty:
        problem = "no row"
    else:
        return
    hint = "run the stage that writes these rows first"
    raise UserError(name, problem, f"rows with {', '.join(columns)}", hint)


def need_single_value(frame: pd.DataFrame, name: str, *columns: str) -> None:
    """Refuse a frame in which a column holds several values, which a single panel would mix up.

    Raises:
        UserError: Says so; ``name`` is what the frame is called there.
    """
    for column in columns:
        if column not in frame:
            continue
        values = frame[column].unique()
        if len(values) > 1:
            listed = ", ".join(str(value) for value in values)
            hint = f"draw one figure per {column}"
            raise UserError(f"{name} {column}", listed, "one", hint)


def metric_of_task(metrics: pd.DataFrame) -> pd.Series:
    """Return for each row of metrics.csv the metric that its task is judged by: the first one in the task's rows."""
    task = pd.Series("", index=metrics.index)
    if "task" in metrics:
        task = metrics["task"]
    is_difference = metrics["metric"].str.endswith("_difference")
    is_statistic = metrics["metric"].isin(STATISTICS)
    scores = metrics["metric"].mask(is_difference | is_statistic)
    return scores.groupby(task, sort=False).transform("first")


def metric_name(metrics: pd.DataFrame) -> str:
    """The task's own metric in words; `score` where several tasks have different ones."""
    names = metric_of_task(metrics).unique()
    if len(names) > 1:
        return "score"
    return str(names[0]).replace("_", " ")


def rows_of_metric(metrics: pd.DataFrame, metric: str = "") -> pd.DataFrame:
    """Return the rows of one metric.

    Args:
        metrics: Rows of metrics.csv.
        metric: Its name; empty for the task's own metric, ``difference`` for that one's paired differences.
    """
    name: pd.Series | str = metric
    if metric == "":
        name = metric_of_task(metrics)
    elif metric == "difference":
        name = metric_of_task(metrics) + "_difference"
    return metrics[metrics["metric"] == name]


def rows_at_positions(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the task's own metric at a gold position (not `all`), with `depth` as a number in 0..1.

    Where the task does not say how many items its prompts hold, the last position counts as 1.
    """
    rows = rows_of_metric(metrics)
    rows = rows[rows["gold_position"].astype(str) != "all"]
    index = pd.to_numeric(rows["gold_position"])
    relative_index = index / max(index.max(), 1)
    return rows.assign(depth=pd.to_numeric(rows["depth"]).fillna(relative_index))


def rows_over_all_positions(metrics: pd.DataFrame, metric: str = "") -> pd.DataFrame:
    """Rows of :func:`rows_of_metric` over all gold positions (position `all`)."""
    rows = rows_of_metric(metrics, metric)
    return rows[rows["gold_position"].astype(str) == "all"]


def gold_attention(attention: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of an attention table on the gold item (item = gold_position), with its `depth` (0..1)."""
    columns = ("method", "gold_position", "layer", "item", "attention")
    need_columns(attention, "attention", *columns)
    last_item = attention["item"].max()
    if "run" in attention:
        # Runs of a sweep may differ in the number of items.
        last_item = attention.groupby("run")["item"].transform("max")
    depth = attention["gold_position"] / np.maximum(last_item, 1)
    is_gold = attention["item"] == attention["gold_position"]
    rows = attention.assign(depth=depth)[is_gold]
    # Refuses a table without such rows.
    need_columns(rows, "attention (rows with item = gold_position)", "attention")
    return rows


def strongest_layer(gold: pd.DataFrame) -> int:
    """Return the layer (0-based) with the most attention to the gold item on average.

    Of the unmodified model's rows where it has some, else of all.

    Args:
        gold: Rows of :func:`gold_attention`.
    """
    rows = gold[gold["method"] == UNMODIFIED]
    if rows.empty:
        rows = gold
    return int(rows.groupby("layer")["attention"].mean().idxmax())
