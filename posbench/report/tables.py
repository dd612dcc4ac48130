"""The numbers of a run as tables; frames in, text out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd

from posbench.report.text import BIAS_WORDS, GROUP, cell, interval
from posbench.stats.frames import UNMODIFIED, at_positions, own_metric
from posbench.stats.position_bias import STATISTICS

Table = tuple[list[str], list[list[str]]]
"""A header, and rows."""


def findings_table(findings: pd.DataFrame) -> Table:
    """Claims, the statistics they are held against, and verdicts: one row for each finding."""
    rows = []
    for row in findings.fillna({"note": "", "model": ""}).itertuples():
        value = f"{row.value:.3g}" + interval(row, "{:.3g}")
        rows.append([row.claim, row.statistic, value, str(row.n), row.verdict, str(row.note)])
    return ["claim", "statistic", "value", "n", "verdict", "note"], rows


class _Columns:
    """A column for each method, and one for the difference of each modified one from the unmodified model."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self.methods = sorted(rows["method"].unique(), key=lambda m: m != UNMODIFIED)
        differs = rows["metric"].str.endswith("_difference")
        self.changed = [m for m in self.methods if (differs & (rows["method"] == m)).any()]

    @property
    def header(self) -> list[str]:
        one = len(self.changed) == 1
        names = ["unmodified" if m == UNMODIFIED else str(m) for m in self.methods]
        return names + ["difference" if one else f"{m}: difference" for m in self.changed]

    def line(self, cells: dict[tuple[str, str], Any], name: str, scale: float = 100) -> list[str]:
        """The cells of one metric, from rows by method and metric; a share in %, others in their own unit."""
        form = "{:.1f}" if scale == 100 else "{:.3f}"
        values = [cell(cells.get((m, name)), form, scale) for m in self.methods]
        plus = form.replace(":", ":+")
        return values + [cell(cells.get((m, f"{name}_difference")), plus, scale) for m in self.changed]


def _groups(rows: pd.DataFrame) -> tuple[list[str], Callable[[], Iterator[tuple[list[str], pd.DataFrame]]]]:
    """Which of model, task and seed vary, and their groups with the values of those."""
    many = [c for c in GROUP if rows[c].nunique() > 1]

    def groups() -> Iterator[tuple[list[str], pd.DataFrame]]:
        for key, group in rows.groupby(GROUP, sort=False, dropna=False):
            yield [str(v) for c, v in zip(GROUP, key, strict=True) if c in many], group

    return many, groups


def position_table(metrics: pd.DataFrame) -> Table:
    """The task's score per gold position: one row per position with `all` last.

    Args:
        metrics: metrics.csv rows.

    Returns:
        Columns: gold position (depth in %), score of each method in % with its interval, difference of each
        modified one in points with its interval, n. Where model, task or seed vary, they stand in front.
    """
    own = own_metric(metrics)
    kept = (metrics["metric"] == own) | (metrics["metric"] == own + "_difference")
    rows = metrics[kept].assign(metric=metrics["metric"].where(metrics["metric"] == own, "score_difference"))
    rows["metric"] = rows["metric"].where(rows["metric"] == "score_difference", "score")
    columns, (many, groups) = _Columns(rows), _groups(rows)
    table = []
    for front, group in groups():
        placed = group[group["gold_position"].astype(str) != "all"]
        places = at_positions(placed.assign(metric="score")).sort_values("depth") if len(placed) else placed
        depth = dict(zip(places["gold_position"], places["depth"], strict=True)) if len(places) else {}
        for place in [*depth, "all"]:
            here = group[group["gold_position"].astype(str) == str(place)]
            cells = {(r.method, r.metric): r for r in here.itertuples()}
            shown = "all" if place == "all" else f"{100 * depth[place]:.3g} %"
            n = "/".join(dict.fromkeys(str(n) for n in here["n"]))
            table.append([*front, shown, *columns.line(cells, "score"), n])
    return [*many, "gold position", *columns.header, "n"], table


def bias_table(metrics: pd.DataFrame) -> Table:
    """What the curves over gold positions amount to: one row for each statistic that there is.

    Args:
        metrics: metrics.csv rows.

    Returns:
        Columns: statistic, each method and the difference of each modified one, in points with their
        intervals. Where model, task or seed vary, they stand in front.
    """
    rows = metrics[metrics["metric"].str.removesuffix("_difference").isin(STATISTICS)]
    columns, (many, groups) = _Columns(rows), _groups(rows)
    table = []
    for front, group in groups():
        cells = {(r.method, r.metric): r for r in group.itertuples()}
        for name, words in BIAS_WORDS.items():
            line = columns.line(cells, name)
            if any(line):
                table.append([*front, words, *line])
    return [*many, "statistic", *columns.header], table


def other_scores(metrics: pd.DataFrame) -> pd.DataFrame:
    """The scores over all examples beside the task's own, as :func:`subset_table` takes them; empty without
    any."""
    metric = metrics["metric"].str.removesuffix("_difference")
    rest = (metric != own_metric(metrics)) & ~metric.isin(STATISTICS)
    rows = metrics[rest & (metrics["gold_position"].astype(str) == "all")]
    return rows.assign(subset="all", kind="average")


def subset_table(subsets: pd.DataFrame, kind: str = "", own: str | None = None) -> Table:
    """Subsets and averages: one row per subset or average and metric.

    Args:
        subsets: subsets.csv rows of one model and task.
        kind: `subset` or `average` for these alone.
        own: The task's own metric; None takes it from the rows, and empty says that it is not among them.

    Returns:
        Columns: subset, metric (if there are several), value of each method with its interval, difference of
        each modified one, n. The task's own metric is in % and points, the others are in their own unit.
    """
    rows = subsets[subsets["kind"] == kind] if kind else subsets
    own = own_metric(subsets).iloc[0] if own is None else own
    columns, table = _Columns(rows), []
    plain = rows[~rows["metric"].str.endswith("_difference")]
    for where, name in dict.fromkeys(zip(plain["subset"], plain["metric"], strict=True)):
        cells = {(r.method, r.metric): r for r in rows[rows["subset"] == where].itertuples()}
        n = str(cells[columns.methods[0], name].n)
        table.append([where, name, *columns.line(cells, name, 100 if name == own else 1), n])
    header = ["subset", "metric", *columns.header, "n"]
    if own and len({line[1] for line in table}) == 1:
        header, table = [header[0], *header[2:]], [[line[0], *line[2:]] for line in table]
    return header, table
