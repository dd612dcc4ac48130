"""Attention to the gold item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posbench.late import Axes, Figure, pd
from posbench.plots import base as plot
from posbench.stats import frames


@plot.styled
def attention_by_position(
    attention: pd.DataFrame, layers: Sequence[int] | None = None
) -> Figure:
    """Attention of the last prompt token to the gold item: as curves, and as the change in every layer.

    Left: one line per method. Right, one panel per method: layer x gold position, method minus unmodified, a
    dash in each cell that went down; with one method only, its own attention.

    Args:
        attention: attention.csv rows of one model and task (method, gold_position, layer, item, attention:
            the mean weight per token of the item over heads and examples).
        layers: 0-based layers to average on the left; None: the strongest one of the unmodified model.

    Raises:
        UserError: A column is missing, no row has item = gold_position, or several models or tasks are mixed.
    """
    gold = frames.gold_attention(attention)
    frames.need_one(gold, "attention", "model", "task")
    shown = [frames.strongest_layer(gold)] if layers is None else list(layers)
    grids = {
        str(method): rows.pivot_table(
            index="layer", columns="depth", values="attention"
        )
        for method, rows in gold.groupby("method", sort=False)
    }
    base = grids.pop(frames.UNMODIFIED, None) if len(grids) > 1 else None
    counts = attention.get("n", ())
    figure, ((left, *others),) = plot.new_figure(
        plot.PAGE, 2.6, 1, 1 + len(grids), n=counts, squeeze=False
    )
    picked = gold[gold["layer"].isin(shown)]
    frames.need(picked, f"attention (layers {shown})", "attention")
    styles = iter(range(len(grids) + 1))
    for method, rows in picked.groupby("method", sort=False):
        curve = rows.groupby("depth")["attention"].mean()
        unmodified = method == frames.UNMODIFIED
        style = (
            plot.line_style(0, True) if unmodified else plot.line_style(next(styles))
        )
        left.plot(
            100 * curve.index, curve.to_numpy(), label=frames.shown(method), **style
        )
    plot.attention_axes(left, plot.layer_title(shown, layers is None))
    left.legend(loc="lower left", bbox_to_anchor=(0, 1.1), ncols=2, borderaxespad=0)
    for axes, (method, grid) in zip(others, grids.items(), strict=True):
        _heat(figure, axes, grid, base, frames.shown(method))
    return figure


def _heat(
    figure: Figure, axes: Axes, grid: pd.DataFrame, base: pd.DataFrame | None, name: str
) -> None:
    """Heat map of layer (rows) x depth (columns); a change from a base is drawn around 0, with a dash where
    it falls; less than a twentieth of the strongest attention stays pale."""
    change = base is not None
    values = (grid if base is None else grid - base).to_numpy(dtype=float)
    least = 0.0 if base is None else 0.05 * float(base.max(axis=None))
    top = max(float(np.nanmax(np.abs(values))), least) or 1.0
    cmap, low = ("PuOr_r", -top) if change else ("viridis", 0)
    image = axes.imshow(
        values, cmap=cmap, vmin=low, vmax=top, aspect="auto", origin="lower"
    )
    if change:
        rows, columns = np.nonzero(values < -0.02 * top)  # rounding is no change
        axes.plot(
            columns, rows, linestyle="none", marker="_", color="black", markersize=4
        )
    step = max(1, len(grid.index) // 8)
    axes.set_yticks(
        range(0, len(grid.index), step), [str(layer) for layer in grid.index[::step]]
    )
    step = max(1, len(grid.columns) // 6)
    depths = [f"{100 * depth:.0f}" for depth in grid.columns[::step]]
    axes.set_xticks(range(0, len(grid.columns), step), depths)
    title = f"{name}\nminus unmodified (dash: less)" if change else name
    axes.set(xlabel=plot.DEPTH_LABEL, ylabel="layer", title=title)
    bar = figure.colorbar(
        image,
        ax=axes,
        label="attention to the gold item" + (", change" if change else ""),
    )
    bar.ax.ticklabel_format(axis="y", scilimits=(-3, 3))


def over_positions(
    attention: Axes,
    score: Axes,
    table: pd.DataFrame,
    by: str,
    labels: Mapping[Any, str],
    ordered: bool = False,
) -> None:
    """Draw attention to the gold item and score (0..1) over its position into two panels, with 95 % bands.

    For table (with depth), column, labels and order see :func:`posbench.plots.base.bands`.
    """
    plot.bands(attention, table, by, labels, name="attention", scale=1, ordered=ordered)
    plot.bands(score, table, by, labels, name="score", ordered=ordered)
    attention.set(xlabel=plot.DEPTH_LABEL, ylabel=plot.ATTENTION_LABEL)
    plot.from_zero(attention)
    plot.percent_axes(score, "score (%)")
