"""What the columns of the tables mean: the task's own metric, gold positions, attention to the gold item."""

from __future__ import annotations

from posbench.errors import UserError
from posbench.late import pd
from posbench.stats.position_bias import STATISTICS

UNMODIFIED = "none"
SERVED = "served"
"""What tables call the unmodified model, and one behind a server, of which it is not known what it is."""


def shown(method: object) -> str:
    """A method's name for readers."""
    return "unmodified" if method == UNMODIFIED else str(method)


def need(frame: pd.DataFrame, what: str, *columns: str) -> None:
    """Raise `UserError` if a column is missing or the frame has no row."""
    missing = [column for column in columns if column not in frame]
    if missing or frame.empty:
        problem = f"columns missing: {', '.join(missing)}" if missing else "no row"
        hint = "run the stage that writes these rows first"
        raise UserError(what, problem, f"rows with {', '.join(columns)}", hint)


def need_one(frame: pd.DataFrame, what: str, *columns: str) -> None:
    """Raise `UserError` if a column holds several values, which a single panel would mix up."""
    for column in columns:
        found = (
            [str(value) for value in frame[column].unique()] if column in frame else []
        )
        if len(found) > 1:
            raise UserError(
                f"{what} {column}", ", ".join(found), "one", "draw one figure for each"
            )


def own_metric(metrics: pd.DataFrame) -> pd.Series:
    """For each row the metric that its task is judged by: the first one in the task's table."""
    task = metrics["task"] if "task" in metrics else pd.Series("", index=metrics.index)
    derived = metrics["metric"].str.endswith("_difference") | metrics["metric"].isin(
        STATISTICS
    )
    return metrics["metric"].mask(derived).groupby(task, sort=False).transform("first")


def metric_name(metrics: pd.DataFrame) -> str:
    """The task's own metric in words; `score` where several tasks have different ones."""
    names = own_metric(metrics).unique()
    return str(names[0]).replace("_", " ") if len(names) == 1 else "score"


def of_metric(metrics: pd.DataFrame, metric: str = "") -> pd.DataFrame:
    """Rows of one metric: the task's own (empty), its paired ``difference``, or one by its name."""
    own = own_metric(metrics)
    name = {"": own, "difference": own + "_difference"}.get(metric, metric)
    return metrics[metrics["metric"] == name]


def at_positions(metrics: pd.DataFrame, metric: str = "") -> pd.DataFrame:
    """Rows of :func:`of_metric` at a gold position (not `all`), with `depth` as a number in 0..1; where the
    task does not say how many items its prompts hold, the last position counts as 1."""
    rows = of_metric(metrics, metric)
    rows = rows[rows["gold_position"].astype(str) != "all"]
    index = pd.to_numeric(rows["gold_position"])
    return rows.assign(
        depth=pd.to_numeric(rows["depth"]).fillna(index / max(index.max(), 1))
    )


def overall(metrics: pd.DataFrame, metric: str = "") -> pd.DataFrame:
    """Rows of :func:`of_metric` over all gold positions (position `all`)."""
    rows = of_metric(metrics, metric)
    return rows[rows["gold_position"].astype(str) == "all"]


def gold_attention(attention: pd.DataFrame) -> pd.DataFrame:
    """Attention to the gold item alone (item = gold_position), with the `depth` (0..1) of the gold item."""
    need(
        attention, "attention", "method", "gold_position", "layer", "item", "attention"
    )
    items = int(attention["item"].max()) + 1
    rows = attention[attention["item"] == attention["gold_position"]]
    need(rows, "attention (rows with item = gold_position)", "attention")
    return rows.assign(depth=rows["gold_position"] / max(items - 1, 1))


def strongest_layer(gold: pd.DataFrame) -> int:
    """The layer (0-based) with the most attention to the gold item on average, unmodified where that ran."""
    unmodified = gold[gold["method"] == UNMODIFIED]
    return int(
        (gold if unmodified.empty else unmodified)
        .groupby("layer")["attention"]
        .mean()
        .idxmax()
    )
