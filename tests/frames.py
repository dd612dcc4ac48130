"""Tables of a run whose every number is known."""

from __future__ import annotations

import numpy as np
import pandas as pd

from posbench.stats.scores import METRIC_COLUMNS

BEFORE = [0.98, 0.6, 0.94]
AFTER = [0.96, 0.9, 0.92]


def metrics(
    method: str = "scale_channel", after: list[float] = AFTER, model: str = "tiny"
) -> pd.DataFrame:
    """A metrics.csv of three positions."""
    rows = []

    def add(name: str, metric: str, values: list[float], half: float) -> None:
        for position, value in [*enumerate(values), ("all", float(np.mean(values)))]:
            n, depth = (300, np.nan) if position == "all" else (100, position / 2)
            rows.append(
                (
                    model,
                    name,
                    "kv",
                    str(position),
                    depth,
                    metric,
                    value,
                    n,
                    value - half,
                    value + half,
                    0,
                    np.nan,
                )
            )

    add("none", "accuracy", BEFORE, 0.03)
    if method != "none":
        add(method, "accuracy", after, 0.03)
        add(
            method,
            "accuracy_difference",
            [a - b for a, b in zip(after, BEFORE, strict=True)],
            0.04,
        )
    return pd.DataFrame(rows, columns=list(METRIC_COLUMNS))


def with_missing_answers(
    table: pd.DataFrame, method: str = "scale_channel"
) -> pd.DataFrame:
    """A metrics.csv whose scores of a method mean nothing, as too many of its answers are missing."""
    table = table.assign(note="")
    is_total = (table["method"] == method) & (table["gold_position"] == "all")
    table.loc[is_total, "note"] = "missing answers: 40.0% of 100 replies; set more"
    return table


def attention(gain: float = 0.01, method: str = "scale_channel") -> pd.DataFrame:
    """An attention.csv of 2 layers, 3 items, 3 gold positions; layer 1 is the stronger; intervals of +-0.001."""
    weight = lambda layer, gold, add: 0.01 + 0.01 * layer + 0.002 * gold + add  # noqa: E731
    rows = [
        (
            "tiny",
            name,
            "kv",
            gold,
            layer,
            item,
            weight(layer, gold, add) if item == gold else 0.001,
            20,
        )
        for name, add in (("none", 0.0), (method, gain))
        for gold in range(3)
        for layer in range(2)
        for item in range(3)
    ]
    columns = [
        "model",
        "method",
        "task",
        "gold_position",
        "layer",
        "item",
        "attention",
        "n",
    ]
    table = pd.DataFrame(rows, columns=columns)
    gold = table["attention"].where(table["item"] == table["gold_position"])
    low, high = gold - 0.001, gold + 0.001
    return table.assign(attention_ci_low=low, attention_ci_high=high)


def search(n: int = 40, selected: int | None = 35) -> pd.DataFrame:
    """A search.csv; candidate `selected` won although others have a lower loss."""
    same = {
        "factor": 0.0,
        "layer_first": 1,
        "layer_last": 3,
        "loss_unmodified": 1.5,
        "n": 50,
    }
    same |= {"monotone_layers": 3, "smoothness": 0.1}
    own = {"rank": range(1, n + 1), "channel": range(n), "loss": np.linspace(1, 2, n)}
    return pd.DataFrame({**own, "selected": [i == selected for i in range(n)], **same})


def channels() -> pd.DataFrame:
    """A channels.csv of 2 sites, 2 layers, 5 tokens."""
    rows = [
        (
            33,
            site,
            layer,
            token,
            layer + token / 10 + 0.01 * (-1) ** token,
            layer + token / 10,
        )
        for site in ("attention_input", "residual")
        for layer in range(2)
        for token in range(5)
    ]
    return pd.DataFrame(
        rows, columns=["channel", "site", "layer", "token", "value", "sliding_mean"]
    )


def sweep(factors: list[float]) -> pd.DataFrame:
    """A summary.csv over method.factor."""
    parts = [
        metrics(after=[v - 0.1 * abs(f) for v in AFTER]).assign(
            **{"run": f"r{f}", "method.factor": f}
        )
        for f in factors
    ]
    frame = pd.concat(parts, ignore_index=True)
    return frame[
        ["run", "method.factor", *frame.columns.drop(["run", "method.factor"])]
    ]
