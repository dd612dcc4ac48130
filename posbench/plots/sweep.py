"""Figures of a sweep: accuracy and attention over the swept values (Yu et al. 2025, Figure 6)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from posbench.errors import UserError
from posbench.plots import base as plot
from posbench.stats import frames

CENTRE, HALVES = "centre of attention", "score of the first minus the second half of the gold positions"
SPREAD = "position bias"
"""Statistics of ``trend.csv``: 0 is the first item and 1 the last; a share; see
:func:`posbench.stats.position_bias.position_bias`."""


def with_setting(summary: pd.DataFrame, axis: str | Sequence[str]) -> tuple[pd.DataFrame, list[str], str]:
    """Name each row's setting of the swept columns.

    Args:
        summary: rows with the swept columns.
        axis: the swept column, or several, whose labels are then combined.

    Returns:
        The rows with a text column `setting`, the settings in drawing order (numeric if all are numbers,
        otherwise as they come; those of the modified rows where there are any), and a label for the axis.
    """
    columns = [axis] if isinstance(axis, str) else list(axis)
    frames.need(summary, "summary", *columns, "method")
    parts = [
        summary[c].map(lambda v: f"{v:g}" if isinstance(v, float) and not pd.isna(v) else str(v))
        for c in columns
    ]
    parts = [part.where(summary[c].notna(), "(default)") for part, c in zip(parts, columns, strict=True)]
    setting = parts[0]
    if len(columns) > 1:
        parts = [c.rsplit(".", 1)[-1] + "=" + part for part, c in zip(parts, columns, strict=True)]
        setting = functools.reduce(lambda a, b: a + ", " + b, parts)
    rows = summary.assign(setting=setting)
    modified = rows[rows["method"] != frames.UNMODIFIED]
    settings = list((rows if modified.empty else modified)["setting"].unique())
    numbers = pd.to_numeric(pd.Series(settings), errors="coerce")
    if numbers.notna().all():
        settings = [settings[i] for i in np.argsort(numbers.to_numpy(), kind="stable")]
    return rows, settings, " and ".join(columns)


def unmodified_of(rows: pd.DataFrame, setting: str) -> pd.DataFrame:
    """The unmodified model's rows that belong to a setting: same runs where a `run` column says so."""
    column = "run" if "run" in rows else "setting"
    keys = rows.loc[rows["setting"] == setting, column]
    return rows[(rows["method"] == frames.UNMODIFIED) & rows[column].isin(keys)]


def _setting_lines(axes: Axes, rows: pd.DataFrame, settings: list[str], y: str, scale: float) -> None:
    """One line over depth per setting; the unmodified model once if it is the same in all, else dashed beside
    each."""
    modified, base = rows[rows["method"] != frames.UNMODIFIED], rows[rows["method"] == frames.UNMODIFIED]
    if modified.empty:
        modified, base = base, modified
    same = base[["depth", y]].drop_duplicates().sort_values("depth")
    # Equal in every run: each point occurs once per run that has a baseline.
    shared = (
        len(same) > 0 and (base.groupby(["depth", y]).size() == base["run"].nunique()).all()
        if "run" in base
        else True
    )
    shared = shared and same["depth"].is_unique
    for index, setting in enumerate(settings):
        style = plot.line_style(index, of=len(settings))
        line = modified[modified["setting"] == setting].sort_values("depth")
        axes.plot(100 * line["depth"], scale * line[y], label=setting, **style)
        if not shared:
            own = unmodified_of(rows, setting).sort_values("depth")
            label = "unmodified (same colour)" if index == 0 else None
            axes.plot(
                100 * own["depth"], scale * own[y], label=label, color=style["color"], linestyle=plot.DASHED
            )
    if len(same) and shared:
        axes.plot(100 * same["depth"], scale * same[y], label="unmodified", **plot.line_style(0, True))


@plot.styled
def factor_sweep(summary: pd.DataFrame, axis: str | Sequence[str] = "method.factor") -> Figure:
    """Score over the swept values: overall with intervals (left), and per gold position (right).

    Args:
        summary: summary.csv rows (run, the swept columns, then those of metrics.csv).
        axis: the swept column, or all of them when several were swept.

    Returns:
        A double-column figure. The unmodified model is a horizontal band where it is the same in all runs.

    Raises:
        UserError: a column is missing, no score is given, or one setting has several overall rows.
    """
    frames.need(
        summary,
        "summary",
        "model",
        "method",
        "gold_position",
        "depth",
        "metric",
        "value",
        "ci_low",
        "ci_high",
    )
    rows, settings, label = with_setting(summary[summary["metric"] == frames.own_metric(summary)], axis)
    modified = (
        rows if (rows["method"] == frames.UNMODIFIED).all() else rows[rows["method"] != frames.UNMODIFIED]
    )
    points = frames.overall(modified)
    if points["setting"].duplicated().any():
        twice = str(points.loc[points["setting"].duplicated(), "setting"].iloc[0])
        hint = "name every swept column in axis"
        raise UserError(label, f"{twice} (several runs)", "one run for each setting", hint)
    figure = plot.new_figure(plot.PAGE, max(2.6, 0.8 + 0.16 * len(settings)))
    left, right = figure.subplots(1, 2)
    numbers = pd.to_numeric(pd.Series(settings), errors="coerce")
    numeric = bool(numbers.notna().all())
    x = numbers.to_numpy(dtype=float) if numeric else np.arange(len(settings), dtype=float)
    base = (
        [frames.overall(unmodified_of(rows, s)).head(1).assign(setting=s) for s in settings]
        if len(modified) < len(rows)
        else []
    )
    levels = pd.concat(base).set_index("setting").reindex(settings) if base else pd.DataFrame()
    distinct = levels[["value", "ci_low", "ci_high"]].dropna(how="all").drop_duplicates() if base else levels
    aside = 0.0 if numeric or len(distinct) < 2 else 0.1  # keeps equal points of two methods apart
    _error_bars(
        left,
        x + aside,
        points.set_index("setting").reindex(settings),
        "-" if numeric else "none",
        plot.line_style(0),
    )
    if len(distinct) == 1:
        value, low, high = 100 * distinct.iloc[0]
        left.axhline(value, color="black", linestyle=plot.DASHED)
        left.axhspan(low, high, color="black", alpha=0.1, linewidth=0)
    elif len(distinct):
        _error_bars(left, x - aside, levels, plot.DASHED if numeric else "none", plot.line_style(1, True))
    _setting_lines(right, frames.at_positions(rows), settings, "value", 100)
    handles, labels = right.get_legend_handles_labels()
    left.set_xlabel(label)
    if not numeric:
        long = sum(map(len, settings)) > 36
        if long:
            labels = [f"{settings.index(name) + 1}: {name}" if name in settings else name for name in labels]
            left.set_xlabel("setting (numbered in the legend)")
        left.set_xticks(x, [str(i + 1) for i in range(len(settings))] if long else settings)
        left.set_xlim(-0.5, len(settings) - 0.5)
    plot.percent_axes(left, f"{frames.metric_name(summary)}, all positions (%)", left.get_xlabel())
    if len(distinct):
        left.set_title("blue: method; black: unmodified")
    plot.percent_axes(right, f"{frames.metric_name(summary)} (%)")
    figure.legend(handles, labels, loc="outside right center", title=label)
    return figure


def _error_bars(axes: Axes, x: np.ndarray, rows: pd.DataFrame, linestyle: Any, style: dict[str, Any]) -> None:
    value, low, high = (100 * rows[column].to_numpy(dtype=float) for column in ("value", "ci_low", "ci_high"))
    error = np.clip([value - low, high - value], 0, None)
    axes.errorbar(x, value, yerr=error, capsize=2, elinewidth=0.8, **{**style, "linestyle": linestyle})


@plot.styled
def attention_sweep(
    attention: pd.DataFrame, axis: str | Sequence[str] = "method.factor", layers: Sequence[int] | None = None
) -> Figure:
    """Attention to each gold item over the gold position, one line per swept value (Yu et al. 2025, Fig. 6a).

    Args:
        attention: attention.csv rows of several runs, with the swept columns and, where known, `run`.
        axis: the swept column, or all of them when several were swept.
        layers: 0-based layers to average; by default the strongest one of the unmodified model. The title
            names it.

    Returns:
        A figure of one column plus its legend.

    Raises:
        UserError: a column is missing or no row has item = gold_position.
    """
    gold = frames.gold_attention(attention)
    shown = [frames.strongest_layer(gold)] if layers is None else list(layers)
    rows, settings, label = with_setting(gold[gold["layer"].isin(shown)], axis)
    by = ["setting", *(["run"] if "run" in rows else []), "method", "depth"]
    curves = rows.groupby(by, sort=False)["attention"].mean().reset_index()
    figure = plot.new_figure(plot.COLUMN + 1.4, max(2.6, 0.8 + 0.16 * len(settings)))
    axes = figure.subplots()
    _setting_lines(axes, curves, settings, "attention", 1)
    axes.set(
        xlabel=plot.DEPTH_LABEL, ylabel=plot.ATTENTION_LABEL, title=plot.layer_title(shown, layers is None)
    )
    plot.from_zero(axes)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", title=label)
    return figure


@plot.styled
def trend(rows: pd.DataFrame) -> Figure:
    """How a model follows a swept number: centre of attention, first minus second half, position bias.

    Args:
        rows: trend.csv rows of one key: group, axis, statistic, number, value, ci_low, ci_high.

    Returns:
        A figure with one panel per statistic that is there, one line per group with its 95 % band, dashed the
        unmodified model.
    """
    frames.need(rows, "trend", "group", "axis", "statistic", "number", "value", "ci_low", "ci_high")
    panels = [(name, label) for name, label in PANELS.items() if (rows["statistic"] == name).any()]
    groups = list(rows["group"].unique())
    figure = plot.new_figure(plot.PAGE if len(panels) > 1 else plot.COLUMN, 2.6)
    for axes, (name, (label, scale, level)) in zip(
        np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True
    ):
        axes.axhline(level, color="0.5", linestyle=":", linewidth=1)
        for index, group in enumerate(groups):
            here = rows[(rows["statistic"] == name) & (rows["group"] == group)]
            style = plot.line_style(index)
            base = here[here["number"].astype(str) == frames.UNMODIFIED]
            line = (
                here.drop(base.index).assign(number=lambda f: f["number"].astype(float)).sort_values("number")
            )
            plot.band(axes, line, style, x="number", scale=scale, label=str(group))
            for value in base["value"]:
                plain = {
                    "color": style["color"] if len(groups) > 1 else "black",
                    "linestyle": plot.DASHED,
                    "linewidth": 1,
                }
                axes.axhline(scale * value, label="unmodified" if index == 0 else None, **plain)
        axes.set(xlabel=rows["axis"].iloc[0], ylabel=label)
    plot.legend_below(figure, figure.axes[0])
    return figure


PANELS = {
    CENTRE: ("centre of attention\n(0 first item, 1 last item)", 1, 0.5),
    HALVES: ("score, first minus second half\nof the gold positions (points)", 100, 0),
    SPREAD: ("position bias (points)", 100, 0),
}
