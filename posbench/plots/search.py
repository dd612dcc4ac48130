"""Figures of a search for one scale per layer: its course, and what it found."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from posbench.plots.base import COLOURS, COLUMN, PAGE, legend_below, line_style, need, new_figure, styled

POSITIONS = ("beginning", "middle", "end")


@styled
def convergence(generations: pd.DataFrame) -> Figure:
    """Best and mean fitness of the parents per generation.

    Args:
        generations: generations.csv rows: generation, best, mean, unmodified (fitness, 0..1). Several
            searches where a column ``search`` names them: then one line each, the best only.

    Returns:
        A single-column figure; y is the fitness in %.

    Raises:
        UserError: a column is missing or there is no row.
    """
    need(generations, "generations", "generation", "best", "mean", "unmodified")
    figure = new_figure(COLUMN, 2.7)
    axes = figure.subplots()
    if "search" in generations:
        for index, (name, rows) in enumerate(generations.groupby("search", sort=False)):
            curve = rows.groupby("generation")["best"].mean()
            axes.plot(curve.index, 100 * curve, label=str(name), **line_style(index))
    else:
        for index, (column, label) in enumerate((("best", "best"), ("mean", "mean of the parents"))):
            axes.plot(generations["generation"], 100 * generations[column], label=label, **line_style(index))
    for value in generations["unmodified"].dropna().unique():
        axes.axhline(100 * value, color="black", linestyle=(0, (4, 2)), linewidth=1, label="unmodified")
    axes.set(xlabel="generation", ylabel="fitness (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_below(figure, axes)
    return figure


@styled
def curve(parts: pd.DataFrame, search: pd.DataFrame) -> Figure:
    """What was found: control points and curve, the scale of every layer, and the accuracy that it gives
    (LPES, Figure 2).

    Args:
        parts: curve.csv rows: part (``point``, ``curve``, ``layer``), x, y.
        search: search.csv rows of the candidates: beginning, middle, end, fitness (0..1), unmodified,
            selected.

    Returns:
        A double-column figure of three panels; without control points the left one is left out.

    Raises:
        UserError: a column is missing or there is no row.
    """
    need(parts, "curve", "part", "x", "y")
    need(search, "search", *POSITIONS, "fitness", "unmodified", "selected")
    points, drawn, layers = (parts[parts["part"] == part] for part in ("point", "curve", "layer"))
    figure = new_figure(PAGE, 2.2)
    panels = list(figure.subplots(1, 3 if len(points) else 2))
    if len(points):
        axes = panels.pop(0)
        axes.plot(drawn["x"], drawn["y"], color=COLOURS[0], label="curve")
        axes.plot(
            points["x"], points["y"], color=COLOURS[1], marker="s", linestyle=":", label="control points"
        )
        axes.set(xlabel="x (layers)", ylabel="y (scale)")
        axes.legend()
    axes, fitness = panels
    axes.plot(layers["x"], layers["y"], color=COLOURS[0], marker="o")
    axes.axhline(1, color="black", linestyle=(0, (4, 2)), linewidth=1)
    axes.set(xlabel="layer", ylabel="scale")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    columns, width = (*POSITIONS, "fitness"), 0.38
    for index, (column, label) in enumerate((("unmodified", "unmodified"), ("selected", "found"))):
        row = search[search[column].astype(str).str.lower().isin(("true", "1"))].iloc[0]
        values = [100 * float(row[name]) for name in columns]
        style = (
            {"color": "white", "edgecolor": "black", "linestyle": "--"}
            if not index
            else {"color": COLOURS[0]}
        )
        fitness.bar(np.arange(len(columns)) + (index - 0.5) * width, values, width, label=label, **style)
    fitness.set_xticks(range(len(columns)), columns)
    fitness.set(ylabel="calibration accuracy (%)", ylim=(0, 103))
    fitness.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    return figure
