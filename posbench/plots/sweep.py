"""Figures of a sweep: accuracy and attention over the swept values (Yu et al. 2025, Figure 6)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posbench.errors import UserError
from posbench.late import Axes, Figure, pd
from posbench.plots import base as plot
from posbench.stats import frames
from posbench.stats.findings import columns

CENTRE, HALVES = "centre of attention", "score of the first minus the second half of the gold positions"
SPREAD = "position bias"
"""Statistics of ``trend.csv``: 0 is the first item and 1 the last; a share; see
:func:`posbench.stats.position_bias.position_bias`."""

PANELS = {
    CENTRE: ("centre of attention\n(0 first item, 1 last item)", 1, 0.5),
    HALVES: ("score, first minus second half\nof the gold positions (points)", 100, 0),
    SPREAD: ("position bias (points)", 100, 0),
}
"""Label of the y axis, factor of the numbers, and the value that prefers no side."""


def with_setting(summary: pd.DataFrame, axis: str | Sequence[str]) -> tuple[pd.DataFrame, list[str], str]:
    """Name each row's setting of the swept column, or of several, whose labels are then combined.

    Returns the rows with a text column `setting`, the settings in drawing order (numeric if all are numbers,
    otherwise as they come; those of the modified rows where there are any), and a label for the axis.
    """
    swept = [axis] if isinstance(axis, str) else list(axis)
    frames.need(summary, "summary", *swept, "method")
    setting = pd.Series("", index=summary.index)
    for column in swept:
        cells = summary[column]
        text = cells.map(lambda v: f"{v:g}" if isinstance(v, float) else str(v))
        text = text.where(cells.notna(), "(default)")
        front = f"{column.rsplit('.', 1)[-1]}=" if len(swept) > 1 else ""
        setting += (", " if column != swept[0] else "") + front + text
    rows = summary.assign(setting=setting)
    settings = list(modified_of(rows)["setting"].unique())
    numbers = _numbers(settings)
    if numbers is not None:
        settings = [settings[i] for i in np.argsort(numbers, kind="stable")]
    return rows, settings, " and ".join(swept)


def _numbers(settings: list[str]) -> np.ndarray | None:
    """The settings as numbers, if all are."""
    numbers = pd.to_numeric(pd.Series(settings), errors="coerce")
    return numbers.to_numpy(dtype=float) if numbers.notna().all() else None


def modified_of(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of modified models; all, where there are none."""
    modified = rows[rows["method"] != frames.UNMODIFIED]
    return rows if modified.empty else modified


def unmodified_of(rows: pd.DataFrame, setting: str) -> pd.DataFrame:
    """The unmodified model's rows that belong to a setting: same runs where a `run` column says so."""
    column = "run" if "run" in rows else "setting"
    keys = rows.loc[rows["setting"] == setting, column]
    return rows[(rows["method"] == frames.UNMODIFIED) & rows[column].isin(keys)]


def _setting_lines(axes: Axes, rows: pd.DataFrame, settings: list[str], y: str, scale: float) -> None:
    """A line over depth per setting; the unmodified model once if it is the same in all, else for each."""
    modified = modified_of(rows)
    base = rows[rows["method"] == frames.UNMODIFIED] if len(modified) < len(rows) else rows.iloc[:0]
    same = base[["depth", y]].drop_duplicates().sort_values("depth")
    # Equal in every run: each point occurs once per run that has a baseline.
    shared = same["depth"].is_unique
    if "run" in base:
        shared &= len(same) > 0 and (base.groupby(["depth", y]).size() == base["run"].nunique()).all()
    # Models and methods are no scale.
    scale_of = len(settings) if _numbers(settings) is not None or len(settings) > len(plot.COLOURS) else 0
    for index, setting in enumerate(settings):
        style = plot.line_style(index, of=scale_of)
        line = modified[modified["setting"] == setting].sort_values("depth")
        axes.plot(100 * line["depth"], scale * line[y], label=setting, **style)
        if not shared:
            own = unmodified_of(rows, setting).sort_values("depth")
            dashed = dict(color=style["color"], linestyle=plot.DASHED)
            label = "unmodified (same colour)" if setting == settings[-1] else None
            axes.plot(100 * own["depth"], scale * own[y], label=label, **dashed)
    if len(same) and shared:
        axes.plot(100 * same["depth"], scale * same[y], label="unmodified", **plot.line_style(0, True))


@plot.styled
def factor_sweep(summary: pd.DataFrame, axis: str | Sequence[str] = "method.factor") -> Figure:
    """Score over the swept values: overall with intervals (left), and per gold position (right).

    From summary.csv rows (run, the swept columns, then those of metrics.csv); ``axis`` names what was swept.
    Raises `UserError` where a column or all scores are missing, or a setting has several overall rows.
    """
    frames.need(summary, "summary", "model", "method", "gold_position", "depth", "metric", *columns())
    rows, settings, label = with_setting(frames.of_metric(summary), axis)
    figure, (left, right) = plot.new_figure(plot.PAGE, max(2.6, 0.8 + 0.16 * len(settings)), 1, 2)
    _overall_panel(left, rows, settings, label)
    _setting_lines(right, frames.at_positions(rows), settings, "value", 100)
    handles, labels = right.get_legend_handles_labels()
    under = label
    if _numbers(settings) is None:
        names, places = settings, range(len(settings))
        if sum(map(len, settings)) > 36:
            labels = [f"{settings.index(name) + 1}: {name}" if name in settings else name for name in labels]
            names, under = [str(i + 1) for i in places], "setting (numbered in the legend)"
        left.set_xticks(places, names)
        left.set_xlim(-0.5, len(settings) - 0.5)
    plot.percent_axes(left, f"{frames.metric_name(summary)}, all positions (%)", under)
    plot.percent_axes(right, f"{frames.metric_name(summary)} (%)")
    figure.legend(handles, labels, loc="outside right center", title=label)
    return figure


def _overall_panel(axes: Axes, rows: pd.DataFrame, settings: list[str], label: str) -> None:
    """Score of every setting over all positions; unmodified, a band if it is the same in all, else points."""
    modified, numbers = modified_of(rows), _numbers(settings)
    points = frames.overall(modified).set_index("setting")
    twice = points.index[points.index.duplicated()]
    if len(twice):
        hint = "name every swept column in axis"
        raise UserError(label, f"{twice[0]} (several runs)", "one run for each setting", hint)
    x = np.arange(len(settings), dtype=float) if numbers is None else numbers
    levels = distinct = points.iloc[:0]
    if len(modified) < len(rows):
        base = [frames.overall(unmodified_of(rows, s)).head(1).assign(setting=s) for s in settings]
        levels = pd.concat(base).set_index("setting").reindex(settings)
        distinct = levels[columns()].dropna(how="all").drop_duplicates()
    aside = 0.1 if numbers is None and len(distinct) > 1 else 0.0  # keeps equal points of two methods apart
    solid, dashed = ("none", "none") if numbers is None else ("-", plot.DASHED)
    style = plot.line_style(0) | {"linestyle": solid, "capsize": 2}
    plot.percent_bars(axes, x + aside, points.reindex(settings), **style)
    if len(distinct) == 1:
        value, low, high = 100 * distinct.iloc[0]
        axes.axhline(value, color="black", linestyle=plot.DASHED)
        axes.axhspan(low, high, color="black", alpha=0.1, linewidth=0)
    elif len(distinct):
        style = plot.line_style(1, True) | {"linestyle": dashed, "capsize": 2}
        plot.percent_bars(axes, x - aside, levels, **style)
    if len(distinct):
        axes.set_title("blue: method; black: unmodified")


@plot.styled
def attention_sweep(
    attention: pd.DataFrame, axis: str | Sequence[str] = "method.factor", layers: Sequence[int] | None = None
) -> Figure:
    """Attention to each gold item over the gold position, one line per swept value (Yu et al. 2025, Fig. 6a).

    From attention.csv rows of several runs, with the swept columns and, where known, `run`; averaged over the
    given 0-based layers, or else the strongest one of the unmodified model. Raises `UserError` where a column
    is missing or no row has item = gold_position.
    """
    gold = frames.gold_attention(attention)
    shown = [frames.strongest_layer(gold)] if layers is None else list(layers)
    rows, settings, label = with_setting(gold[gold["layer"].isin(shown)], axis)
    by = ["setting", *(["run"] if "run" in rows else []), "method", "depth"]
    curves = rows.groupby(by, sort=False)["attention"].mean().reset_index()
    figure, axes = plot.new_figure(plot.COLUMN + 1.4, max(2.6, 0.8 + 0.16 * len(settings)))
    _setting_lines(axes, curves, settings, "attention", 1)
    plot.attention_axes(axes, plot.layer_title(shown, layers is None))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", title=label)
    return figure


@plot.styled
def trend(rows: pd.DataFrame) -> Figure:
    """How a model follows a swept number: one panel per statistic of :data:`PANELS`, one line per group; from
    trend.csv rows of one key: group, axis, statistic, number, value, ci_low, ci_high."""
    frames.need(rows, "trend", "group", "axis", "statistic", "number", *columns())
    panels = [name for name in PANELS if (rows["statistic"] == name).any()]
    groups = list(rows["group"].unique())
    width = plot.PAGE if len(panels) > 1 else plot.COLUMN
    figure, grid = plot.new_figure(width, 2.6, 1, len(panels), squeeze=False)
    for axes, name in zip(grid[0], panels, strict=True):
        label, scale, level = PANELS[name]
        axes.axhline(level, color="0.5", linestyle=":", linewidth=1)
        for index, group in enumerate(groups):
            here = rows[(rows["statistic"] == name) & (rows["group"] == group)]
            plain = here["number"].astype(str) == frames.UNMODIFIED
            style, line = plot.line_style(index), here[~plain].astype({"number": float})
            plot.band(axes, line, style, x="number", scale=scale, label=str(group))
            for value in here.loc[plain, "value"]:
                dashed = plot.LEVEL | ({"color": style["color"]} if len(groups) > 1 else {})
                axes.axhline(scale * value, label="unmodified" if index == 0 else None, **dashed)
        axes.set(xlabel=rows["axis"].iloc[0], ylabel=label)
    plot.legend_below(figure, figure.axes[0])
    return figure
