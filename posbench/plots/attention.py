"""Attention to the gold item."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from posbench.late import Axes, Figure, pd
from posbench.plots import base as plot
from posbench.stats import frames


@plot.styled
def attention_by_position(attention: pd.DataFrame) -> Figure:
    """Attention of the last prompt token to the gold item: as curves, and as the change in every layer.

    Left: one line per method, of the layer that is strongest in the unmodified model. Right, one panel per
    method: layer x gold position, method minus unmodified, a dash in each cell that went down; with one method
    only, its own attention.

    Args:
        attention: attention.csv rows of one model and task (method, gold_position, layer, item, attention: the mean
            weight per token of the item over heads and examples, with the interval of the gold item's).

    Raises:
        UserError: A column is missing, no row has item = gold_position, or several models or tasks are mixed.
    """
    gold = frames.gold_attention(attention)
    frames.need_single_value(gold, "attention", "model", "task")
    maps = {
        str(method): rows.pivot_table(
            index="layer", columns="depth", values="attention"
        )
        for method, rows in gold.groupby("method", sort=False)
    }
    base = None
    if len(maps) > 1:
        base = maps.pop(frames.UNMODIFIED, None)
    figure, panels = plot.new_figure(
        plot.PAGE, 2.6, 1, 1 + len(maps), n=attention.get("n", ()), squeeze=False
    )
    left, *map_panels = panels[0]
    layer = frames.strongest_layer(gold)
    _draw_curves(left, gold[gold["layer"] == layer])
    plot.attention_axes(left, plot.strongest_layer_title(layer))
    left.legend(loc="lower left", bbox_to_anchor=(0, 1.1), ncols=2, borderaxespad=0)
    for axes, (method, attention_map) in zip(map_panels, maps.items(), strict=True):
        _draw_map(figure, axes, attention_map, base, frames.display_name(method))
    return figure


def _draw_curves(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw a line over the gold position for each method."""
    num_modified = 0
    for method, of_method in rows.groupby("method", sort=False):
        if method == frames.UNMODIFIED:
            style = plot.line_style(0, unmodified=True)
        else:
            style = plot.line_style(num_modified)
            num_modified += 1
        label = frames.display_name(method)
        plot.band(axes, of_method, style, name="attention", scale=1, label=label)


def _draw_map(
    figure: Figure,
    axes: Axes,
    attention: pd.DataFrame,
    base: pd.DataFrame | None,
    name: str,
) -> None:
    """Draw a heat map of layer (rows) x depth (columns).

    A change from a base is drawn around 0, with a dash where it falls; a change of less
    than a twentieth of the strongest attention stays pale.

    Args:
        figure: The figure, for the colour bar.
        axes: Where it is drawn.
        attention: Attention to the gold item, layers x depths.
        base: The unmodified model's attention; None draws the attention itself.
        name: The method.
    """
    if base is None:
        values = attention.to_numpy(dtype=float)
        top = float(np.nanmax(np.abs(values))) or 1.0
        lowest = 0.0
        colours = "viridis"
        title = name
        label = "attention to the gold item"
    else:
        values = (attention - base).to_numpy(dtype=float)
        palest = 0.05 * float(base.max(axis=None))
        top = max(float(np.nanmax(np.abs(values))), palest) or 1.0
        lowest = -top
        colours = "PuOr_r"
        title = f"{name}\nminus unmodified (dash: less)"
        label = "attention to the gold item, change"
    image = axes.imshow(
        values, cmap=colours, vmin=lowest, vmax=top, aspect="auto", origin="lower"
    )
    if base is not None:
        rows, columns = np.nonzero(values < -0.02 * top)  # rounding is no change
        axes.plot(
            columns, rows, linestyle="none", marker="_", color="black", markersize=4
        )
    layers = attention.index
    layer_step = max(1, len(layers) // 8)
    layer_names = [str(layer) for layer in layers[::layer_step]]
    axes.set_yticks(range(0, len(layers), layer_step), layer_names)
    depths = attention.columns
    depth_step = max(1, len(depths) // 6)
    depth_names = [f"{100 * depth:.0f}" for depth in depths[::depth_step]]
    axes.set_xticks(range(0, len(depths), depth_step), depth_names)
    axes.set(xlabel=plot.DEPTH_LABEL, ylabel="layer", title=title)
    bar = figure.colorbar(image, ax=axes, label=label)
    bar.ax.ticklabel_format(axis="y", scilimits=(-3, 3))


def draw_over_positions(
    attention: Axes,
    score: Axes,
    table: pd.DataFrame,
    by: str,
    labels: Mapping[Any, str],
    ordered: bool = False,
) -> None:
    """Draw attention to the gold item and score over its position, with 95 % bands.

    Args:
        attention: Panel of the attention.
        score: Panel of the score.
        table: Rows with depth, attention and score (0..1) and their intervals.
        by: See :func:`posbench.plots.base.bands`, also for labels and ordered.
        labels: Label of each line.
        ordered: Whether the lines are steps of a scale.
    """
    plot.bands(attention, table, by, labels, name="attention", scale=1, ordered=ordered)
    plot.bands(score, table, by, labels, name="score", ordered=ordered)
    attention.set(xlabel=plot.DEPTH_LABEL, ylabel=plot.ATTENTION_LABEL)
    plot.start_at_zero(attention)
    plot.percent_axes(score)
