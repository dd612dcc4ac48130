"""Figures of a sweep: accuracy and attention over the swept values (Yu et al. 2025, Figure 6)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from posbench.errors import UserError
from posbench.late import Axes, Figure, pd
from posbench.plots import base as plot
from posbench.stats import frames
from posbench.stats.findings import estimate_columns

CENTRE = "centre of attention"
"""Statistic of ``trend.csv``: mean place of the attention; 0 is the first item, 1 the last."""
HALVES = "score of the first minus the second half of the gold positions"
"""Statistic of ``trend.csv``: a difference of scores, each 0..1."""
SPREAD = "position bias"
"""Statistic of ``trend.csv``, see :func:`posbench.stats.position_bias.position_bias`."""

PANELS = {
    CENTRE: ("centre of attention\n(0 first item, 1 last item)", 1, 0.5),
    HALVES: ("score, first minus second half\nof the gold positions (points)", 100, 0),
    SPREAD: ("position bias (points)", 100, 0),
}
"""Label of the y axis, factor of the numbers, and the value that prefers no side."""
MAX_TICK_CHARACTERS = 36
"""Length of all settings above which they stand one below the other."""
MAX_BANDS = 5
"""Lines beside the unmodified one up to which each has its 95 % band; more get a panel with their changes."""


def with_setting(
    summary: pd.DataFrame, axis: str | Sequence[str]
) -> tuple[pd.DataFrame, list[str], str]:
    """Name each row's setting of the swept columns.

    Args:
        summary: Rows of a sweep.
        axis: The swept column, or several, whose labels are then combined.

    Returns:
        The rows with a text column `setting`; the settings in drawing order (numeric if
        all are numbers, otherwise as they come; those of :func:`modified_of`); a label
        for the axis.
    """
    swept = [axis] if isinstance(axis, str) else list(axis)
    frames.need_columns(summary, "summary", *swept, "method")
    setting = pd.Series("", index=summary.index)
    for column in swept:
        values = summary[column]
        texts = _strip_common_folders(values.map(_value_text))
        texts = texts.where(values.notna(), "(default)")
        if column.endswith("seed") and len(swept) == 1:
            texts = "seed " + texts  # a name: seeds have no order
        if len(swept) > 1:
            texts = f"{_shortest_name(column, swept)}=" + texts
        if column != swept[0]:
            texts = ", " + texts
        setting += texts
    rows = summary.assign(setting=setting)
    settings = list(modified_of(rows)["setting"].unique())
    numbers = _as_numbers(settings)
    if numbers is not None:
        settings = [settings[i] for i in np.argsort(numbers, kind="stable")]
    return rows, settings, " and ".join(swept)


def _shortest_name(key: str, keys: Sequence[str]) -> str:
    """The shortest end of a dotted key that no other key has: ``factor`` of ``method.factor``."""
    parts = key.split(".")
    ends = [".".join(parts[start:]) for start in reversed(range(len(parts)))]
    others = [f".{other}" for other in keys if other != key]
    unique = (end for end in ends if not any(o.endswith(f".{end}") for o in others))
    return next(unique, key)


def _value_text(value: object) -> str:
    """A swept value for readers; `points 1` for ``{points:1}``, a block of keys."""
    text = str(value)
    if isinstance(value, float):
        text = f"{value:g}"
        if float(text) != value:  # two values must not look like one
            text = repr(value)
    if re.fullmatch(r"\{.*\}", text):
        return text[1:-1].replace(":", " ").replace(",", ", ")
    return text


def _strip_common_folders(texts: pd.Series) -> pd.Series:
    """Paths without the folders that all share; other texts unchanged."""
    parts_of = {text: text.split("/") for text in texts.unique()}
    while len(parts_of) > 1:
        first_parts = {parts[0] for parts in parts_of.values()}
        shortest = min(map(len, parts_of.values()))
        if len(first_parts) > 1 or shortest == 1:
            break
        parts_of = {text: parts[1:] for text, parts in parts_of.items()}
    return texts.map({text: "/".join(parts) for text, parts in parts_of.items()})


def _as_numbers(settings: list[str]) -> np.ndarray | None:
    """The settings as numbers, float, shape (settings,); None if any is a name."""
    numbers = pd.to_numeric(pd.Series(settings), errors="coerce")
    return numbers.to_numpy(dtype=float) if numbers.notna().all() else None


def setting_styles(settings: list[str]) -> list[dict[str, Any]]:
    """A style for each setting: steps of a scale for numbers, else separate colours."""
    num_steps = 0 if _as_numbers(settings) is None else len(settings)
    return [plot.line_style(index, steps=num_steps) for index in range(len(settings))]


def modified_of(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of modified models, and of a model and task that ran unmodified alone."""
    is_modified = rows["method"] != frames.UNMODIFIED
    groups = pd.Series("", index=rows.index)
    for column in ("model", "task"):
        if column in rows:
            groups += rows[column].astype(str) + "\n"
    return rows[is_modified | ~groups.isin(groups[is_modified])]


def unmodified_of(rows: pd.DataFrame, setting: str) -> pd.DataFrame:
    """The unmodified model's rows of a setting: of the same runs, if `run` is a column."""
    column = "run" if "run" in rows else "setting"
    keys = rows.loc[rows["setting"] == setting, column]
    return rows[(rows["method"] == frames.UNMODIFIED) & rows[column].isin(keys)]


def _draw_setting_lines(
    axes: Axes, rows: pd.DataFrame, settings: list[str], name: str, scale: float
) -> None:
    """Draw a line over depth per setting, with its 95 % band where there are few.

    The unmodified model's line is drawn once if it is the same in all settings, else
    for each.

    Args:
        axes: Where they are drawn.
        rows: Rows with setting, method and depth (0..1).
        settings: The settings in drawing order.
        name: The estimate of the y axis, see :func:`posbench.stats.findings.estimate_columns`.
        scale: Factor of its values.
    """
    y = estimate_columns(name)[0]
    has_band = len(settings) <= MAX_BANDS
    modified = modified_of(rows)
    has_unmodified = len(modified) < len(rows)
    common = common_baseline(rows, name)
    styles = setting_styles(settings)
    for setting, style in zip(settings, styles, strict=True):
        line = modified[modified["setting"] == setting].sort_values("depth")
        if len(line) and has_band:
            plot.band(axes, line, style, name=name, scale=scale, label=setting)
        elif len(line):
            axes.plot(100 * line["depth"], scale * line[y], label=setting, **style)
        if has_unmodified and common.empty:
            line = unmodified_of(rows, setting).sort_values("depth")
            label = "unmodified (its colour, open)" if setting == settings[-1] else None
            axes.plot(
                100 * line["depth"],
                scale * line[y],
                label=label,
                color=style["color"],
                linestyle=plot.DASHED,
            )
    if len(common):
        style = plot.line_style(0, unmodified=True)
        plot.band(axes, common, style, name=name, scale=scale, label="unmodified")


def common_baseline(rows: pd.DataFrame, name: str = "") -> pd.DataFrame:
    """The unmodified model's line if it is the same in all settings: depth and estimate; else no rows.

    Args:
        rows: Rows with setting, method and depth, and run where the rows of several runs are compared.
        name: The estimate, see :func:`posbench.stats.findings.estimate_columns`.
    """
    unmodified = rows.iloc[:0]
    if len(modified_of(rows)) < len(rows):
        unmodified = rows[rows["method"] == frames.UNMODIFIED]
    columns = ["depth", *estimate_columns(name)]
    points = unmodified[columns].drop_duplicates().sort_values("depth")
    is_common = points["depth"].is_unique
    if "run" in unmodified:
        # Equal in every run: each point occurs once per run that has a baseline.
        occurrences = unmodified.groupby(["depth", estimate_columns(name)[0]]).size()
        is_common &= bool((occurrences == unmodified["run"].nunique()).all())
    return points if is_common else points.iloc[:0]


def _draw_changes(
    axes: Axes, rows: pd.DataFrame, common: pd.DataFrame, settings: list[str]
) -> None:
    """Draw how each setting changes the score at each gold position, in points.

    Args:
        axes: Where they are drawn.
        rows: Rows with setting, method and depth.
        common: The unmodified model's line.
        settings: The settings in drawing order.
    """
    base = common.set_index("depth")["value"]
    modified = modified_of(rows)
    for setting, style in zip(settings, setting_styles(settings), strict=True):
        line = modified[modified["setting"] == setting].set_index("depth")["value"]
        change = 100 * (line - base).sort_index()
        axes.plot(100 * change.index, change, **style)
    axes.axhline(0, **plot.UNMODIFIED_LINE)
    axes.set(xlabel=plot.DEPTH_LABEL, ylabel="change (points)")


def _draw_levels(
    axes: Axes, rows: pd.DataFrame, at_positions: pd.DataFrame, settings: list[str]
) -> None:
    """Draw a horizontal line for each setting that was asked without gold positions, where others have them.

    Args:
        axes: Where they are drawn.
        rows: Rows with setting, of the task's own metric.
        at_positions: The rows at a gold position.
        settings: The settings in drawing order.
    """
    if at_positions.empty:
        return
    placed = set(at_positions["setting"])
    overall = frames.rows_over_all_positions(modified_of(rows)).set_index("setting")
    styles = setting_styles(settings)
    for setting, style in zip(settings, styles, strict=True):
        if setting not in placed and setting in overall.index:
            plot.level(axes, overall.loc[setting], style, label=setting)


@plot.styled
def factor_sweep(
    summary: pd.DataFrame, axis: str | Sequence[str] = "method.factor"
) -> Figure:
    """Score over the swept values: overall with intervals (left), and per gold position (right).

    Many settings that share one unmodified model have a third panel with their changes by gold position. A setting
    without positions (a closed book, the gold document alone) is a horizontal line in the second one.

    Args:
        summary: Rows of summary.csv: run, the swept columns, then those of metrics.csv.
        axis: The swept column or columns.

    Raises:
        UserError: A column or all scores are missing, or a setting has several overall
            rows.
    """
    needed = (
        "model",
        "method",
        "gold_position",
        "depth",
        "metric",
        *estimate_columns(),
    )
    frames.need_columns(summary, "summary", *needed)
    rows, settings, label = with_setting(frames.rows_of_metric(summary), axis)
    at_positions = frames.rows_at_positions(rows)
    counts = (at_positions if len(at_positions) else rows).get("n", ())
    height = max(2.6, 0.8 + 0.16 * len(settings))
    common = common_baseline(at_positions)
    shows_changes = len(settings) > MAX_BANDS and len(common) > 0
    numbers = _as_numbers(settings)
    is_list = numbers is None and sum(map(len, settings)) > MAX_TICK_CHARACTERS
    num_panels = 3 if shows_changes else 2
    figure, panels = plot.new_figure(plot.PAGE, height, 1, num_panels, n=counts)
    left, right = panels[:2]
    _draw_overall(left, rows, settings, label, is_list)
    _draw_setting_lines(right, at_positions, settings, "", 100)
    _draw_levels(right, rows, at_positions, settings)
    if shows_changes:
        _draw_changes(panels[2], at_positions, common, settings)
    metric = frames.metric_name(summary)
    score_label = f"{metric}, all positions (%)"
    plot.percent_axes(right, f"{metric} (%)")
    handles, labels = right.get_legend_handles_labels()
    line_of = dict(zip(labels, handles, strict=True))
    if is_list:
        left.set(xlabel=score_label, xlim=(-3, 103), xticks=range(0, 101, 20))
        left.set_yticks(range(len(settings)), settings)
        left.set_ylim(len(settings) - 0.5, -0.5)
        # The left axis names the colours and marks.
        line_of = {text: line for text, line in line_of.items() if text not in settings}
        left.set_title(label, loc="left")
    else:
        plot.percent_axes(left, score_label, label)
        if numbers is None:
            left.set_xticks(range(len(settings)), settings)
            left.set_xlim(-0.5, len(settings) - 0.5)
        elif 0 < plot.LOG_AXIS_RATIO * numbers.min() <= numbers.max():
            left.set_xscale("log")
    entries = line_of.values(), line_of.keys()
    if is_list and line_of:
        figure.legend(*entries, loc="outside lower center", ncols=2)
    elif line_of:
        figure.legend(*entries, loc="outside right center", title=label)
    return figure


def _draw_overall(
    axes: Axes, rows: pd.DataFrame, settings: list[str], label: str, is_list: bool
) -> None:
    """Draw the score of every setting over all positions.

    The unmodified model is a band if it is the same in all settings, else open points.

    Args:
        axes: Where they are drawn.
        rows: Rows with setting, of the task's own metric.
        settings: The settings in drawing order.
        label: Name of the settings, for an error.
        is_list: Whether the settings stand on the y axis, one below the other, in place of the x axis.
    """
    modified = modified_of(rows)
    points = frames.rows_over_all_positions(modified).set_index("setting")
    repeated = points.index[points.index.duplicated()]
    if len(repeated):
        raise UserError(
            label,
            f"{repeated[0]} (several runs)",
            "one run for each setting",
            "name every swept column in axis",
        )
    levels = points.iloc[:0]
    if len(modified) < len(rows):
        first_rows = [
            frames.rows_over_all_positions(unmodified_of(rows, setting))
            .head(1)
            .assign(setting=setting)
            for setting in settings
        ]
        levels = pd.concat(first_rows).set_index("setting").reindex(settings)
    distinct = levels[estimate_columns()].dropna(how="all").drop_duplicates()
    numbers = _as_numbers(settings)
    offset = 0.0
    if numbers is None:
        x = np.arange(len(settings), dtype=float)
        if len(distinct) > 1:
            offset = 0.2  # keeps equal points of two methods apart
    else:
        x = numbers
        y = 100 * points["value"].reindex(settings)
        axes.plot(x, y, color=plot.GUIDE, linewidth=0.8)
    styles = setting_styles(settings)
    for x_value, setting, style in zip(x, settings, styles, strict=True):
        style |= {"linestyle": "none", "capsize": 2, "upright": not is_list}
        plot.percent_bars(axes, [x_value + offset], points.reindex([setting]), **style)
        if len(distinct) > 1:
            style["markerfacecolor"] = "white"
            plot.percent_bars(axes, [x_value], levels.loc[[setting]], **style)
    if len(distinct) == 1:
        value, low, high = 100 * distinct.iloc[0]
        shade: dict[str, Any] = {"color": plot.BLACK, "alpha": 0.1, "linewidth": 0}
        if is_list:
            axes.axvline(value, **plot.UNMODIFIED_LINE)
            axes.axvspan(low, high, **shade)
        else:
            axes.axhline(value, **plot.UNMODIFIED_LINE)
            axes.axhspan(low, high, **shade)


@plot.styled
def attention_sweep(
    attention: pd.DataFrame,
    axis: str | Sequence[str] = "method.factor",
) -> Figure:
    """Attention to each gold item over the gold position, one line per swept value (Yu et al. 2025, Fig. 6a).

    Each model has a panel, of the layer that is strongest in the unmodified model.

    Args:
        attention: Rows of attention.csv of several runs, with the swept columns and,
            where known, `run`.
        axis: The swept column or columns.

    Raises:
        UserError: A column is missing or no row has item = gold_position.
    """
    gold = frames.gold_attention(attention)
    keys = [axis] if isinstance(axis, str) else axis
    swept = [key for key in keys if key != "model"] or ["method"]
    models = list(gold.groupby("model", sort=False))
    height = max(2.6, 0.8 + 0.16 * gold.groupby(swept).ngroups / len(models))
    width = plot.PAGE if len(models) > 1 else plot.COLUMN + 1.4
    counts = gold.get("n", ())
    figure, (panels,) = plot.new_figure(
        width, height, 1, len(models), n=counts, squeeze=False, sharey=True
    )
    for axes, (model, of_model) in zip(panels, models, strict=True):
        layer = frames.strongest_layer(of_model)
        in_layer = of_model[of_model["layer"] == layer]
        rows, settings, label = with_setting(in_layer, swept)
        run = ["run"] if "run" in rows else []
        columns = ["setting", *run, "method", "depth", *estimate_columns("attention")]
        curves = rows[columns].drop_duplicates()
        _draw_setting_lines(axes, curves, settings, "attention", 1)
        title = plot.strongest_layer_title(layer)
        plot.attention_axes(axes, f"{model}, {title}" if len(models) > 1 else title)
        if axes is not panels[0]:
            axes.set_ylabel("")
    figure.legend(*plot.legend_entries(figure), loc="outside right center", title=label)
    return figure


@plot.styled
def trend(rows: pd.DataFrame) -> Figure:
    """How a model follows a swept number: a panel per statistic, a line per group.

    Args:
        rows: Rows of trend.csv of one swept key: group, axis, statistic (of
            :data:`PANELS`), number, value, ci_low, ci_high.
    """
    frames.need_columns(
        rows, "trend", "group", "axis", "statistic", "number", *estimate_columns()
    )
    statistics = [name for name in PANELS if (rows["statistic"] == name).any()]
    groups = list(rows["group"].unique())
    width = plot.PAGE if len(statistics) > 1 else plot.COLUMN
    counts = rows.get("n", ())
    figure, (panels,) = plot.new_figure(
        width, 2.6, 1, len(statistics), n=counts, squeeze=False
    )
    for axes, statistic in zip(panels, statistics, strict=True):
        y_label, scale, neutral = PANELS[statistic]
        axes.axhline(
            neutral,
            label="no side preferred",
            color=plot.GUIDE,
            linestyle=":",
            linewidth=1,
        )
        for index, group in enumerate(groups):
            of_group = rows[(rows["statistic"] == statistic) & (rows["group"] == group)]
            is_unmodified = of_group["number"].astype(str) == frames.UNMODIFIED
            modified = of_group[~is_unmodified].astype({"number": float})
            style = plot.line_style(index)
            label = str(group)
            plot.band(axes, modified, style, x="number", scale=scale, label=label)
            level = dict(plot.UNMODIFIED_LINE)
            if len(groups) > 1:
                level["color"] = style["color"]
            if index == 0:
                level["label"] = "unmodified"
            for value in of_group.loc[is_unmodified, "value"]:
                axes.axhline(scale * value, **level)
        axes.set(xlabel=rows["axis"].iloc[0], ylabel=y_label)
    plot.add_legend_below(figure)
    return figure
