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
from posbench.stats.findings import columns

CENTRE = "centre of attention"
HALVES = "score of the first minus the second half of the gold positions"
SPREAD = "position bias"
"""Statistics of ``trend.csv``: 0 is the first item and 1 the last; a share; see
:func:`posbench.stats.position_bias.position_bias`."""

PANELS = {
    CENTRE: ("centre of attention\n(0 first item, 1 last item)", 1, 0.5),
    HALVES: ("score, first minus second half\nof the gold positions (points)", 100, 0),
    SPREAD: ("position bias (points)", 100, 0),
}
"""Label of the y axis, factor of the numbers, and the value that prefers no side."""


def with_setting(
    summary: pd.DataFrame, axis: str | Sequence[str]
) -> tuple[pd.DataFrame, list[str], str]:
    """Name each row's setting of the swept column, or of several, whose labels are then combined.

    Returns the rows with a text column `setting`, the settings in drawing order (numeric if all are numbers,
    otherwise as they come; those of the modified rows where there are any), and a label for the axis.
    """
    swept = [axis] if isinstance(axis, str) else list(axis)
    frames.need(summary, "summary", *swept, "method")
    setting = pd.Series("", index=summary.index)
    for column in swept:
        cells = summary[column]
        text = _apart(cells.map(_told))
        text = text.where(cells.notna(), "(default)")
        front = f"{column.rsplit('.', 1)[-1]}=" if len(swept) > 1 else ""
        setting += (", " if column != swept[0] else "") + front + text
    rows = summary.assign(setting=setting)
    settings = list(modified_of(rows)["setting"].unique())
    numbers = _numbers(settings)
    if numbers is not None:
        settings = [settings[i] for i in np.argsort(numbers, kind="stable")]
    return rows, settings, " and ".join(swept)


def _told(value: object) -> str:
    """A swept value for readers; of ``{points:1}``, a block of keys, `points 1`."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(
        r"^\{(.*)\}$", lambda block: block[1].replace(":", " ").replace(",", ", "), text
    )


def _apart(texts: pd.Series) -> pd.Series:
    """Paths without the folders that all of them share; other texts as they are."""
    parts = {text: text.split("/") for text in texts.unique()}
    while len(parts) > 1 and len({part[0] for part in parts.values()}) == 1 < min(
        map(len, parts.values())
    ):
        parts = {text: part[1:] for text, part in parts.items()}
    return texts.map({text: "/".join(part) for text, part in parts.items()})


def _numbers(settings: list[str]) -> np.ndarray | None:
    """The settings as numbers, if all are."""
    numbers = pd.to_numeric(pd.Series(settings), errors="coerce")
    return numbers.to_numpy(dtype=float) if numbers.notna().all() else None


def _styles(settings: list[str]) -> list[dict[str, Any]]:
    """A style for each setting: steps of a scale for numbers, colours of their own for names."""
    steps = len(settings) if _numbers(settings) is not None else 0
    return [plot.line_style(index, of=steps) for index in range(len(settings))]


def modified_of(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of modified models; all, where there are none."""
    modified = rows[rows["method"] != frames.UNMODIFIED]
    return rows if modified.empty else modified


def unmodified_of(rows: pd.DataFrame, setting: str) -> pd.DataFrame:
    """The unmodified model's rows that belong to a setting: same runs where a `run` column says so."""
    column = "run" if "run" in rows else "setting"
    keys = rows.loc[rows["setting"] == setting, column]
    return rows[(rows["method"] == frames.UNMODIFIED) & rows[column].isin(keys)]


def _setting_lines(
    axes: Axes, rows: pd.DataFrame, settings: list[str], y: str, scale: float
) -> None:
    """A line over depth per setting; the unmodified model once if it is the same in all, else for each."""
    modified = modified_of(rows)
    base = (
        rows[rows["method"] == frames.UNMODIFIED]
        if len(modified) < len(rows)
        else rows.iloc[:0]
    )
    same = base[["depth", y]].drop_duplicates().sort_values("depth")
    # Equal in every run: each point occurs once per run that has a baseline.
    shared = same["depth"].is_unique
    if "run" in base:
        shared &= (
            len(same) > 0
            and (base.groupby(["depth", y]).size() == base["run"].nunique()).all()
        )
    for setting, style in zip(settings, _styles(settings), strict=True):
        line = modified[modified["setting"] == setting].sort_values("depth")
        axes.plot(100 * line["depth"], scale * line[y], label=setting, **style)
        if not shared:
            own = unmodified_of(rows, setting).sort_values("depth")
            dashed = dict(color=style["color"], linestyle=plot.DASHED)
            label = "unmodified (its colour, open)" if setting == settings[-1] else None
            axes.plot(100 * own["depth"], scale * own[y], label=label, **dashed)
    if len(same) and shared:
        axes.plot(
            100 * same["depth"],
            scale * same[y],
            label="unmodified",
            **plot.line_style(0, True),
        )


@plot.styled
def factor_sweep(
    summary: pd.DataFrame, axis: str | Sequence[str] = "method.factor"
) -> Figure:
    """Score over the swept values: overall with intervals (left), and per gold position (right).

    From summary.csv rows (run, the swept columns, then those of metrics.csv); ``axis`` names what was swept.
    Raises `UserError` where a column or all scores are missing, or a setting has several overall rows.
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
    rows, settings, label = with_setting(frames.of_metric(summary), axis)
    height = max(2.6, 0.8 + 0.16 * len(settings))
    placed = frames.at_positions(rows)
    counts = (placed if len(placed) else rows).get("n", ())
    figure, (left, right) = plot.new_figure(plot.PAGE, height, 1, 2, n=counts)
    _overall_panel(left, rows, settings, label)
    _setting_lines(right, placed, settings, "value", 100)
    handles, labels = right.get_legend_handles_labels()
    under = label
    if _numbers(settings) is None:
        names = settings
        places = range(len(settings))
        if sum(map(len, settings)) > 36:
            labels = [
                f"{settings.index(name) + 1}: {name}" if name in settings else name
                for name in labels
            ]
            names = [str(i + 1) for i in places]
            under = "setting (numbered in the legend)"
        left.set_xticks(places, names)
        left.set_xlim(-0.5, len(settings) - 0.5)
    plot.percent_axes(left, f"{frames.metric_name(summary)}, all positions (%)", under)
    plot.percent_axes(right, f"{frames.metric_name(summary)} (%)")
    figure.legend(handles, labels, loc="outside right center", title=label)
    return figure


def _overall_panel(
    axes: Axes, rows: pd.DataFrame, settings: list[str], label: str
) -> None:
    """Score of every setting over all positions; unmodified, a band if the same in all, else open points."""
    modified = modified_of(rows)
    numbers = _numbers(settings)
    points = frames.overall(modified).set_index("setting")
    twice = points.index[points.index.duplicated()]
    if len(twice):
        hint = "name every swept column in axis"
        raise UserError(
            label, f"{twice[0]} (several runs)", "one run for each setting", hint
        )
    x = np.arange(len(settings), dtype=float) if numbers is None else numbers
    levels = distinct = points.iloc[:0]
    if len(modified) < len(rows):
        base = [
            frames.overall(unmodified_of(rows, s)).head(1).assign(setting=s)
            for s in settings
        ]
        levels = pd.concat(base).set_index("setting").reindex(settings)
        distinct = levels[columns()].dropna(how="all").drop_duplicates()
    if numbers is not None:
        axes.plot(
            x, 100 * points["value"].reindex(settings), color=plot.GUIDE, linewidth=0.8
        )
    aside = (
        0.2 if numbers is None and len(distinct) > 1 else 0.0
    )  # keeps equal points of two methods apart
    for place, setting, style in zip(x, settings, _styles(settings), strict=True):
        style |= {"linestyle": "none", "capsize": 2}
        plot.percent_bars(axes, [place + aside], points.reindex([setting]), **style)
        if len(distinct) > 1:
            plot.percent_bars(
                axes,
                [place],
                levels.loc[[setting]],
                **style | {"markerfacecolor": "white"},
            )
    if len(distinct) == 1:
        value, low, high = 100 * distinct.iloc[0]
        axes.axhline(value, **plot.LEVEL)
        axes.axhspan(low, high, color=plot.BLACK, alpha=0.1, linewidth=0)


@plot.styled
def attention_sweep(
    attention: pd.DataFrame,
    axis: str | Sequence[str] = "method.factor",
    layers: Sequence[int] | None = None,
) -> Figure:
    """Attention to each gold item over the gold position, one line per swept value (Yu et al. 2025, Fig. 6a),
    a panel for each model.

    From attention.csv rows of several runs, with the swept columns and, where known, `run`; averaged over the
    given 0-based layers, or else the strongest one of the unmodified model. Raises `UserError` where a column
    is missing or no row has item = gold_position.
    """
    gold = frames.gold_attention(attention)
    own = [
        each for each in ([axis] if isinstance(axis, str) else axis) if each != "model"
    ] or ["method"]
    models = list(gold.groupby("model", sort=False))
    height = max(2.6, 0.8 + 0.16 * gold.groupby(own).ngroups / len(models))
    width = plot.PAGE if len(models) > 1 else plot.COLUMN + 1.4
    shape: dict[str, Any] = dict(n=gold.get("n", ()), squeeze=False, sharey=True)
    figure, (panels,) = plot.new_figure(width, height, 1, len(models), **shape)
    for axes, (model, part) in zip(panels, models, strict=True):
        shown = [frames.strongest_layer(part)] if layers is None else list(layers)
        rows, settings, label = with_setting(part[part["layer"].isin(shown)], own)
        by = ["setting", *(["run"] if "run" in rows else []), "method", "depth"]
        curves = rows.groupby(by, sort=False)["attention"].mean().reset_index()
        _setting_lines(axes, curves, settings, "attention", 1)
        title = plot.layer_title(shown, layers is None)
        plot.attention_axes(axes, f"{model}, {title}" if len(models) > 1 else title)
        axes.set_ylabel(axes.get_ylabel() if axes is panels[0] else "")
    figure.legend(*plot.entries(figure), loc="outside right center", title=label)
    return figure


@plot.styled
def trend(rows: pd.DataFrame) -> Figure:
    """How a model follows a swept number: one panel per statistic of :data:`PANELS`, one line per group; from
    trend.csv rows of one key: group, axis, statistic, number, value, ci_low, ci_high."""
    frames.need(rows, "trend", "group", "axis", "statistic", "number", *columns())
    panels = [name for name in PANELS if (rows["statistic"] == name).any()]
    groups = list(rows["group"].unique())
    width = plot.PAGE if len(panels) > 1 else plot.COLUMN
    figure, grid = plot.new_figure(
        width, 2.6, 1, len(panels), n=rows.get("n", ()), squeeze=False
    )
    for axes, name in zip(grid[0], panels, strict=True):
        label, scale, level = PANELS[name]
        guide = {"color": plot.GUIDE, "linestyle": ":", "linewidth": 1}
        axes.axhline(level, label="no side preferred", **guide)
        for index, group in enumerate(groups):
            here = rows[(rows["statistic"] == name) & (rows["group"] == group)]
            plain = here["number"].astype(str) == frames.UNMODIFIED
            style = plot.line_style(index)
            line = here[~plain].astype({"number": float})
            plot.band(axes, line, style, x="number", scale=scale, label=str(group))
            for value in here.loc[plain, "value"]:
                dashed = plot.LEVEL | (
                    {"color": style["color"]} if len(groups) > 1 else {}
                )
                axes.axhline(
                    scale * value, label="unmodified" if index == 0 else None, **dashed
                )
        axes.set(xlabel=rows["axis"].iloc[0], ylabel=label)
    plot.legend_below(figure)
    return figure
