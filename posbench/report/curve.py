"""The score over the gold position as SVG in a page: a point tells its numbers when pointed at, or reached with Tab."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posbench.late import matplotlib, pd
from posbench.plots import base as plot
from posbench.plots import sweep as sweep_plots
from posbench.report.index import cut_text
from posbench.report.template import render_html
from posbench.stats import frames
from posbench.stats.findings import estimate_columns

PLANE_LEFT, PLANE_TOP, PLANE_WIDTH, PLANE_HEIGHT = 30, 34, 314, 170
"""Of the rectangle between the axes, in an SVG that is 360 units wide and 240 high."""
MAX_LABEL_CHARACTERS = 36
"""Characters of a line's name above the plane."""


@dataclass(frozen=True)
class Line:
    """One line of a curve.

    Attributes:
        label: Its name for readers.
        rows: Rows of metrics.csv at a gold position, with `depth` (0..1).
        style: Its style, see :func:`posbench.plots.base.line_style`.
        method: Name of the method in the run's rows.
        page: Address of the page with its questions; empty: no link.
        has_band: Whether its intervals are shown before it is pointed at.
    """

    label: str
    rows: pd.DataFrame
    style: Mapping[str, Any]
    method: str
    page: str = ""
    has_band: bool = True


def curve_of_run(metrics: pd.DataFrame, page: str = "") -> str:
    """Return the HTML of a run's curve, a line for each method; empty where it cannot be drawn here.

    That is where no score has a gold position, some lines have none, or a method has several scores at one.

    Args:
        metrics: Rows of metrics.csv, or of several runs that differ in the column `method`.
        page: Address of the run's page, to which points lead; empty on that page itself.
    """
    return curve_of_methods(metrics, lambda method: page)


def curve_of_methods(
    metrics: pd.DataFrame,
    page_of: Callable[[str], str],
    unmodified: Collection[str] = (frames.UNMODIFIED,),
) -> str:
    """Return the HTML of a curve, see :func:`curve_of_run`.

    Args:
        metrics: Rows of metrics.csv.
        page_of: Address of the page with the questions of a method; empty: no link.
        unmodified: Names of the methods that leave the model as it is.
    """
    rows = frames.rows_at_positions(metrics).dropna(subset=["value"])
    if rows.empty or rows.duplicated(["method", "gold_position"]).any():
        return ""
    if set(metrics["method"]) != set(rows["method"]):
        return ""
    lines = list[Line]()
    for method, of_method in rows.groupby("method", sort=False):
        is_unmodified = method in unmodified
        number = sum((line.method in unmodified) == is_unmodified for line in lines)
        style = plot.line_style(number, is_unmodified)
        name = str(method)
        page = page_of(name)
        lines.append(Line(frames.display_name(name), of_method, style, name, page))
    return draw(lines, frames.metric_name(metrics))


def curve_of_sweep(
    summary: pd.DataFrame, axes: Sequence[str], pages: Mapping[str, str]
) -> str:
    """Return the HTML of a sweep's curve: a line for each setting, and the unmodified model's.

    That is one line where all settings share it, else one for each, dashed in the setting's colour. The curve is empty
    where no score has a gold position.

    Args:
        summary: Rows of summary.csv of the settings to draw.
        axes: The columns that distinguish settings.
        pages: Address of each run's page, by the name in the column `run`.
    """
    rows, settings, label = sweep_plots.with_setting(
        frames.rows_of_metric(summary), axes
    )
    rows = frames.rows_at_positions(rows).dropna(subset=["value"])
    if rows.empty:
        return ""
    styles = sweep_plots.setting_styles(settings)
    modified = sweep_plots.modified_of(rows)
    has_unmodified = len(modified) < len(rows)
    is_shared = not sweep_plots.common_baseline(rows).empty
    lines = []

    def add(
        name: str,
        of_setting: pd.DataFrame,
        style: Mapping[str, Any],
        has_band: bool = True,
    ) -> None:
        # Runs of one setting that differ in the seed alone: the first one's.
        of_run = of_setting[of_setting["run"] == of_setting["run"].min()]
        if len(of_run):
            run, method = str(of_run["run"].iloc[0]), str(of_run["method"].iloc[0])
            lines.append(
                Line(name, of_run, style, method, pages.get(run, ""), has_band)
            )

    if is_shared:
        unmodified = rows[rows["method"] == frames.UNMODIFIED]
        add("unmodified", unmodified, plot.line_style(0, unmodified=True))
    for setting, style in zip(settings, styles, strict=True):
        # The names of several keys are in the setting, as is that of a seed.
        name = setting
        if len(axes) == 1 and not setting.startswith("seed "):
            name = f"{label.rpartition('.')[2]} {setting}"
        add(name, modified[modified["setting"] == setting], style)
        if has_unmodified and not is_shared:
            dashed = {"color": style["color"], "linestyle": plot.DASHED}
            of_setting = sweep_plots.unmodified_of(rows, setting)
            add(f"unmodified, {name}", of_setting, dashed, has_band=False)
    return draw(lines, frames.metric_name(summary))


def draw(lines: Sequence[Line], metric: str) -> str:
    """Return the HTML of a curve.

    Args:
        lines: Its lines.
        metric: The score, in words.
    """
    shapes = []
    num_modified = sum(line.method != frames.UNMODIFIED for line in lines)
    # Of more lines only the one that is pointed at has its band, and the unmodified model's.
    is_crowded = num_modified > sweep_plots.MAX_BANDS
    # The dashes of the unmodified model lie above a line with the same values.
    for line in sorted(lines, key=lambda line: line.method == frames.UNMODIFIED):
        points = _points(line, metric)
        upper = [(p["x"], p["high"]) for p in points]
        lower = [(p["x"], p["low"]) for p in reversed(points)]
        colour = matplotlib.colors.to_hex(line.style["color"])
        shapes.append(
            {
                "label": line.label,
                # The unmodified model is black, or white in the dark.
                "colour": colour if colour != plot.BLACK else "",
                "dashed": line.style["linestyle"] != "-",
                "bare": not line.has_band
                or (is_crowded and line.method != frames.UNMODIFIED),
                "points": points,
                "path": _path((p["x"], p["y"]) for p in points),
                "band": _path([*upper, *lower]),
                "page": line.page,
            }
        )
    return render_html(
        "curve.html.j2",
        lines=shapes,
        metric=metric,
        x_label=plot.DEPTH_LABEL,
        plane=(
            PLANE_LEFT,
            PLANE_TOP,
            PLANE_LEFT + PLANE_WIDTH,
            PLANE_TOP + PLANE_HEIGHT,
        ),
        y_ticks=[(tick, _y(tick / 100)) for tick in range(0, 101, 20)],
        x_ticks=[(tick, _x(tick / 100)) for tick in range(0, 101, 20)],
    )


def _points(line: Line, metric: str) -> list[dict[str, Any]]:
    """Return the points of a line by rising depth: place in the SVG, name, numbers in words, and address."""
    points = []
    for row in line.rows.sort_values("depth").to_dict("records"):
        value, low, high = (float(row[column]) for column in estimate_columns())
        # Without an interval a point has none, rather than one of no width.
        interval = "" if np.isnan(low) else f" [{100 * low:.1f}, {100 * high:.1f}]"
        position = str(row["gold_position"])
        place = f"gold position {position} ({100 * row['depth']:.0f} %)"
        text = f"{metric} {100 * value:.1f} %{interval}, n = {row['n']:.0f}"
        points.append(
            {
                "x": _x(row["depth"]),
                "y": _y(value),
                "low": _y(value if np.isnan(low) else low),
                "high": _y(value if np.isnan(high) else high),
                "position": position,
                "method": line.method,
                "head": f"{line.label}, {place}",
                "tip": f"{cut_text(line.label, MAX_LABEL_CHARACTERS)}, {place}",
                "text": text,
                "page": f"{line.page}#position={position}" if line.page else "",
            }
        )
    return points


def _x(depth: float) -> float:
    """Horizontal place of a depth (0..1), in units of the SVG."""
    return round(PLANE_LEFT + PLANE_WIDTH * depth, 1)


def _y(share: float) -> float:
    """Vertical place of a score (0..1), in units of the SVG."""
    return round(PLANE_TOP + PLANE_HEIGHT * (1 - share), 1)


def _path(points: Any) -> str:
    """The points of a polygon or a line as SVG has them."""
    return " ".join(f"{x:g},{y:g}" for x, y in points)
