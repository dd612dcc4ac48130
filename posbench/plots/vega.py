"""A drawn figure as a Vega-Lite specification, with its numbers: for slides, notebooks and pages of one's own.

Lines, bands, error bars, bars and heat maps are translated; guides, annotations and colours are not.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from posbench.late import Axes, Figure, matplotlib

SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
"""The version of the grammar."""
BAND_OPACITY = 0.25
"""Opacity of the band of an interval."""


def specification(figure: Figure) -> dict[str, Any]:
    """The Vega-Lite specification of a figure, a view for each of its panels."""
    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    views = [_view(axes) for axes in panels]
    num_columns = 1
    for axes in panels:
        grid = axes.get_subplotspec()
        if grid is not None:
            num_columns = max(num_columns, grid.get_gridspec().ncols)
    return {"$schema": SCHEMA, "columns": num_columns, "concat": views}


def _view(axes: Axes) -> dict[str, Any]:
    """One panel."""
    x = {
        "field": "x",
        "type": "quantitative",
        **_scale(axes.get_xlabel(), axes.get_xscale()),
    }
    y = {
        "field": "y",
        "type": "quantitative",
        **_scale(axes.get_ylabel(), axes.get_yscale()),
    }
    colour = {"field": "series", "type": "nominal", "title": None}
    encoding = {"x": x, "y": y, "color": colour}
    to = {"x2": {"field": "x2"}, "y2": {"field": "y2"}}
    layers = [
        _layer({"type": "area", "opacity": BAND_OPACITY}, _bands(axes), encoding, to),
        _layer({"type": "rule"}, _error_bars(axes), encoding, to),
        _layer({"type": "rect"}, _bars(axes), encoding, to),
        _layer({"type": "line", "point": True}, _lines(axes), encoding),
        _layer(
            {"type": "rect"},
            _cells(axes),
            {**encoding, "color": {"field": "value", "type": "quantitative"}},
            to,
        ),
    ]
    return {"title": axes.get_title(), "layer": [layer for layer in layers if layer]}


def _scale(title: str, scale: str) -> dict[str, Any]:
    """Title and scale of an axis; Vega-Lite has no logit and the like, which stay linear."""
    kind = scale if scale in ("log", "symlog") else "linear"
    return {"title": title, "scale": {"type": kind, "zero": False}}


def _layer(
    mark: dict[str, Any],
    rows: list[dict[str, Any]],
    encoding: dict[str, Any],
    to: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """A layer with its rows; None without any.

    Args:
        mark: The mark.
        rows: The data.
        encoding: The channels of every layer.
        to: The second ends, of which those that the rows have are used.
    """
    if not rows:
        return None
    ends = {name: end for name, end in (to or {}).items() if name in rows[0]}
    return {"mark": mark, "data": {"values": rows}, "encoding": {**encoding, **ends}}


def _number(value: Any) -> float | None:
    """A number as JSON holds it; None for one that is not finite."""
    return float(value) if math.isfinite(value) else None


def _name(label: object) -> str:
    """A label of the legend; empty for matplotlib's own ones."""
    return "" if str(label).startswith("_") else str(label)


def _lines(axes: Axes) -> list[dict[str, Any]]:
    """Points of all lines in data coordinates: a line across the panel is a guide."""
    labels = {
        container.lines[0]: container.get_label()
        for container in axes.containers
        if isinstance(container, matplotlib.container.ErrorbarContainer)
    }
    return [
        {
            "series": _name(labels.get(line, line.get_label())),
            "x": _number(x),
            "y": _number(y),
        }
        for line in axes.lines
        if line.get_transform() == axes.transData
        for x, y in np.asarray(line.get_xydata(), dtype=float)
    ]


def _bands(axes: Axes) -> list[dict[str, Any]]:
    """Both ends of all bands, at each x."""
    rows = []
    for band in axes.collections:
        if isinstance(band, matplotlib.collections.FillBetweenPolyCollection):
            vertices = np.concatenate([path.vertices for path in band.get_paths()])
            for x in np.unique(vertices[:, 0]):
                ends = vertices[vertices[:, 0] == x, 1]
                low, high = _number(ends.min()), _number(ends.max())
                rows.append({"series": "", "x": _number(x), "y": low, "y2": high})
    return rows


def _error_bars(axes: Axes) -> list[dict[str, Any]]:
    """Both ends of all error bars."""
    rows = []
    for bars in axes.collections:
        if isinstance(bars, matplotlib.collections.LineCollection):
            for (x, y), (x2, y2) in (
                segment[[0, -1]] for segment in bars.get_segments()
            ):
                ends = {"x": x, "y": y, "x2": x2, "y2": y2}
                rows.append({"series": "", **{k: _number(v) for k, v in ends.items()}})
    return rows


def _bars(axes: Axes) -> list[dict[str, Any]]:
    """Corners of all bars."""
    rows = []
    for container in axes.containers:
        if isinstance(container, matplotlib.container.BarContainer):
            for bar in container.patches:
                (x, y), (x2, y2) = bar.get_bbox().get_points()
                ends = {"x": x, "y": y, "x2": x2, "y2": y2}
                series = _name(container.get_label())
                rows.append(
                    {"series": series, **{k: _number(v) for k, v in ends.items()}}
                )
    return rows


def _cells(axes: Axes) -> list[dict[str, Any]]:
    """Corners and values of the cells of all heat maps with one value a cell."""
    rows = []
    for image in axes.images:
        values: Any = np.ma.filled(
            np.ma.asarray(image.get_array(), dtype=float), np.nan
        )
        if values.ndim != 2:
            continue
        left, right, bottom, top = image.get_extent()
        if image.origin == "upper":
            bottom, top = top, bottom
        xs = np.linspace(left, right, values.shape[1] + 1)
        ys = np.linspace(bottom, top, values.shape[0] + 1)
        for (row, column), value in np.ndenumerate(values):
            corners = {
                "x": xs[column],
                "x2": xs[column + 1],
                "y": ys[row],
                "y2": ys[row + 1],
            }
            rows.append(
                {**{k: _number(v) for k, v in corners.items()}, "value": _number(value)}
            )
    return rows
