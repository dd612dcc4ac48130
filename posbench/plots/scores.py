"""Scores over gold positions and over subsets."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from posbench.late import Figure, pd
from posbench.plots import base as plot
from posbench.stats import frames
from posbench.stats.findings import estimate_columns
from posbench.stats.shape import shape_in_metrics

CURVE_COLUMNS = (
    "model",
    "method",
    "gold_position",
    "depth",
    "metric",
    *estimate_columns(),
)
"""Columns that a figure of scores over the gold position needs."""
PANELS_PER_ROW = 3
MAX_NAMED_SHAPES = 2
"""Methods whose shapes the title of a figure names."""


@plot.styled
def accuracy_by_position(
    metrics: pd.DataFrame, unmodified: Collection[str] = (frames.UNMODIFIED,)
) -> Figure:
    """The task's score over the gold position, a line with its 95 % band per method.

    Where model, task or seed vary, each combination is its own line. Else the title names the shape of each line.
    Questions without positions (a closed book, the gold document alone) are a horizontal line.

    Args:
        metrics: Rows of metrics.csv.
        unmodified: Names of the methods that leave the model as it is.

    Raises:
        UserError: A column or every score per position is missing.
    """
    frames.need_columns(metrics, "metrics", *CURVE_COLUMNS)
    rows = frames.rows_at_positions(metrics)
    frames.need_columns(rows, "metrics (score per position)", "value")
    varied = [
        column
        for column in ("model", "task", "seed")
        if column in rows and rows[column].nunique() > 1
    ]
    figure, axes = plot.new_figure(plot.COLUMN, 2.5, n=rows.get("n", ()))
    if not varied:
        title = describe_shapes(metrics)
        if title:
            figure.suptitle(title)
    num_lines = {True: 0, False: 0}  # by whether they are unmodified
    for (method, *values), line in rows.groupby(["method", *varied], sort=False):
        is_unmodified = method in unmodified
        names = [f"{key} {value}" for key, value in zip(varied, values, strict=True)]
        label = ", ".join([frames.display_name(method), *names])
        style = plot.line_style(num_lines[is_unmodified], is_unmodified)
        plot.band(axes, line, style, label=label)
        num_lines[is_unmodified] += 1
    keys = ["method", *varied]
    levels = frames.rows_over_all_positions(metrics).drop_duplicates(keys)
    has_positions = pd.MultiIndex.from_frame(levels[keys]).isin(
        pd.MultiIndex.from_frame(rows[keys])
    )
    for level in levels[~has_positions].to_dict("records"):
        names = [f"{key} {level[key]}" for key in varied]
        label = ", ".join([frames.display_name(level["method"]), *names])
        plot.level(axes, level, plot.line_style(num_lines[False]), label=label)
        num_lines[False] += 1
    plot.percent_axes(axes, f"{frames.metric_name(metrics)} (%)")
    plot.add_legend_below(figure)
    return figure


@plot.styled
def accuracy_by_model(summary: pd.DataFrame) -> Figure:
    """The score over the gold position: a panel per model, a line with its 95 % band per method.

    The unmodified model, which each run of a sweep measured, is drawn once; the title of a panel names its shape.

    Args:
        summary: Rows of summary.csv of a sweep over models and methods.

    Raises:
        UserError: A column or every score per position is missing.
    """
    frames.need_columns(summary, "summary", *CURVE_COLUMNS)
    rows = frames.rows_at_positions(summary)
    frames.need_columns(rows, "summary (score per position)", "value")
    models = list(rows["model"].unique())
    methods = [name for name in rows["method"].unique() if name != frames.UNMODIFIED]
    styles = {name: plot.line_style(index) for index, name in enumerate(methods)}
    styles[frames.UNMODIFIED] = plot.line_style(0, unmodified=True)
    counts = rows.get("n", ())
    figure, panels = plot.new_panels(
        len(models), PANELS_PER_ROW, 2.1, n=counts, sharey=True
    )
    for index, (axes, model) in enumerate(zip(panels, models, strict=True)):
        of_model = rows[rows["model"] == model].drop_duplicates(["method", "depth"])
        for method, style in styles.items():
            line = of_model[of_model["method"] == method]
            if len(line):
                plot.band(axes, line, style, label=frames.display_name(method))
        shape = shape_in_metrics(summary[summary["model"] == model], frames.UNMODIFIED)
        axes.set_title(f"{model}: {shape}" if shape else str(model))
        is_first_in_row = index % PANELS_PER_ROW == 0
        label = f"{frames.metric_name(summary)} (%)" if is_first_in_row else ""
        plot.percent_axes(axes, label)
    plot.add_legend_below(figure)
    return figure


def describe_shapes(metrics: pd.DataFrame) -> str:
    """Name the shape of each method's score over the gold position; methods without one are left out.

    Two methods of one shape share its name; different ones are on a line each, so that they fit above a figure. Of
    more than two methods the unmodified model alone is named.

    Args:
        metrics: Rows of metrics.csv of one run.
    """
    methods = list(metrics["method"].unique())
    if len(methods) > MAX_NAMED_SHAPES:
        methods = [method for method in methods if method == frames.UNMODIFIED]
    shapes = {name: shape_in_metrics(metrics, name) for name in methods}
    texts = [f"{frames.display_name(n)}: {s}" for n, s in shapes.items() if s]
    if len(texts) == MAX_NAMED_SHAPES and len(set(shapes.values())) == 1:
        return f"both: {next(iter(shapes.values()))}"
    return "\n".join(texts)


@plot.styled
def by_subset(subsets: pd.DataFrame) -> Figure:
    """The task's score on every subset, then on every average.

    Each method has a point with its 95 % interval.

    Args:
        subsets: Rows of subsets.csv.

    Raises:
        UserError: A column is missing, or several models or tasks are mixed.
    """
    names = ("model", "method", "task", "subset", "kind", "metric")
    frames.need_columns(subsets, "subsets", *names, *estimate_columns())
    frames.need_single_value(subsets, "subsets", "model", "task")
    rows = frames.rows_of_metric(subsets)
    lines = list(dict.fromkeys(zip(rows["kind"], rows["subset"], strict=True)))
    methods = sorted(rows["method"].unique(), key=lambda m: m != frames.UNMODIFIED)
    figure, axes = plot.new_figure(plot.PAGE, 0.9 + 0.16 * len(lines), n=rows["n"])
    for index, method in enumerate(methods):
        points = rows[rows["method"] == method]
        points = points.set_index(["kind", "subset"]).reindex(lines)
        offset = 0.3 * (index - (len(methods) - 1) / 2)
        y = np.arange(len(lines)) + offset
        if method == frames.UNMODIFIED:
            style = plot.line_style(0, unmodified=True)
        else:
            style = plot.line_style(index - (frames.UNMODIFIED in methods))
        style["linestyle"] = "none"
        label = frames.display_name(method)
        plot.percent_bars(axes, y, points, upright=False, label=label, **style)
    num_subsets = sum(kind == "subset" for kind, _ in lines)
    if num_subsets < len(lines):
        axes.axhline(num_subsets - 0.5, color=plot.GUIDE, linewidth=0.6)
    axes.set_yticks(range(len(lines)), [name.replace("_", " ") for _, name in lines])
    axes.set(
        xlabel=f"{frames.metric_name(subsets)} (%)",
        ylim=(len(lines) - 0.5, -0.5),
        xlim=(-3, 103),
    )
    plot.add_legend_below(figure)
    return figure
