"""Scores over gold positions and over subsets."""

from __future__ import annotations

import numpy as np

from posbench.late import Figure, pd
from posbench.plots import base as plot
from posbench.stats import frames
from posbench.stats.findings import columns


@plot.styled
def accuracy_by_position(metrics: pd.DataFrame, chance: float | None = None) -> Figure:
    """The task's score over the gold position, one line per method with its 95 % band, from metrics.csv rows.

    Where model, task or seed vary, each combination is its own line; ``chance`` (0..1) is a dotted line.
    Raises `UserError` where a column or every score per position is missing.
    """
    frames.need(
        metrics,
        "metrics",
        "model",
        "method",
        "gold_position",
        "depth",
        "metric",
        *columns(),
    )
    rows = frames.at_positions(metrics)
    frames.need(rows, "metrics (score per position)", "value")
    by = [
        "method",
        *(c for c in ("model", "task", "seed") if c in rows and rows[c].nunique() > 1),
    ]
    figure, axes = plot.new_figure(plot.COLUMN, 2.5, n=rows.get("n", ()))
    counts = {True: 0, False: 0}
    for (method, *rest), line in rows.groupby(by, sort=False):
        unmodified = method == frames.UNMODIFIED
        front = (f"{c} {v}" for c, v in zip(by[1:], rest, strict=True))
        label = ", ".join([frames.shown(method), *front])
        plot.band(
            axes, line, plot.line_style(counts[unmodified], unmodified), label=label
        )
        counts[unmodified] += 1
    if chance is not None:
        axes.axhline(
            100 * chance, color=plot.GUIDE, linestyle=":", linewidth=1, label="chance"
        )
    plot.percent_axes(axes, f"{frames.metric_name(metrics)} (%)")
    plot.legend_below(figure)
    return figure


@plot.styled
def accuracy_by_model(summary: pd.DataFrame) -> Figure:
    """The score over the gold position, a panel for each model and a line with its 95 % band for each method.

    From summary.csv rows of a sweep over models and methods, whose runs each measured the unmodified model;
    it is drawn once. Raises `UserError` where a column or every score per position is missing.
    """
    frames.need(
        summary,
        "summary",
        "model",
        "method",
        "gold_position",
        "depth",
        "metric",
        *columns(),
    )
    rows = frames.at_positions(summary)
    frames.need(rows, "summary (score per position)", "value")
    models = list(rows["model"].unique())
    methods = list(rows["method"].unique())
    methods = [name for name in methods if name != frames.UNMODIFIED]
    figure, panels = plot.new_panels(
        len(models), 3, 2.1, n=rows.get("n", ()), sharey=True
    )
    for index, (axes, model) in enumerate(zip(panels, models, strict=True)):
        own = rows[rows["model"] == model].drop_duplicates(["method", "depth"])
        for number, method in enumerate([*methods, frames.UNMODIFIED]):
            unmodified = method == frames.UNMODIFIED
            style = plot.line_style(0 if unmodified else number, unmodified)
            if (own["method"] == method).any():
                plot.band(
                    axes,
                    own[own["method"] == method],
                    style,
                    label=frames.shown(method),
                )
        axes.set_title(model)
        plot.percent_axes(
            axes, "" if index % 3 else f"{frames.metric_name(summary)} (%)"
        )
    plot.legend_below(figure)
    return figure


@plot.styled
def by_subset(subsets: pd.DataFrame) -> Figure:
    """The task's score on every subset, then on every average: a point per method with its 95 % interval.

    From subsets.csv rows; raises `UserError` where a column is missing or several models or tasks are mixed.
    """
    front = ("model", "method", "task", "subset", "kind", "metric")
    frames.need(subsets, "subsets", *front, *columns())
    frames.need_one(subsets, "subsets", "model", "task")
    rows = frames.of_metric(subsets)
    names = list(dict.fromkeys(zip(rows["kind"], rows["subset"], strict=True)))
    methods = sorted(rows["method"].unique(), key=lambda m: m != frames.UNMODIFIED)
    figure, axes = plot.new_figure(plot.PAGE, 0.9 + 0.16 * len(names), n=rows["n"])
    for index, method in enumerate(methods):
        here = (
            rows[rows["method"] == method].set_index(["kind", "subset"]).reindex(names)
        )
        y = np.arange(len(names)) + 0.3 * (index - (len(methods) - 1) / 2)
        number = max(index - (frames.UNMODIFIED in methods), 0)
        style = plot.line_style(number, method == frames.UNMODIFIED) | {
            "linestyle": "none"
        }
        plot.percent_bars(
            axes, y, here, upright=False, label=frames.shown(method), **style
        )
    first = sum(kind == "subset" for kind, _ in names)
    if first < len(names):
        axes.axhline(first - 0.5, color=plot.GUIDE, linewidth=0.6)
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for _, name in names])
    axes.set(
        xlabel=f"{frames.metric_name(subsets)} (%)",
        ylim=(len(names) - 0.5, -0.5),
        xlim=(-3, 103),
    )
    plot.legend_below(figure)
    return figure
