"""Maps of scores over query and key, as long tables and as heat maps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posbench.late import Axes, Figure, pd
from posbench.plots import base as plot
from posbench.stats.bootstrap import Array

COLOUR_QUANTILES = (0.01, 0.99)
"""Of the finite entries: the paper's colour range."""


def long_table(
    index_name: str, maps: Mapping[Any, Mapping[str, Array]], max_cells: int
) -> pd.DataFrame:
    """Write maps as rows, without the entries that are NaN.

    A causal map of more than ``max_cells`` tokens is cut into blocks: query and key are then the mean token of a
    block, and the value is the mean below the diagonal.

    Args:
        index_name: Name of the column that distinguishes the maps.
        maps: By the value of that column, the maps [n, n] by name.
        max_cells: Largest side of a written map.

    Returns:
        Rows of ``index_name``, query, key (tokens from 1) and a column for each named map.
    """
    parts = []
    for value, named_maps in maps.items():
        first = next(iter(named_maps.values()))
        n = len(first)
        block = -(-n // max_cells)
        if block == 1:
            query, key = np.nonzero(~np.isnan(first))
            token: NDArray[Any] = np.arange(1, n + 1)
        else:
            query, key = np.tril_indices(n, -1)
            start = np.arange(0, n, block)
            token = (start + np.minimum(start + block, n) + 1) / 2
        columns = {name: scores[query, key] for name, scores in named_maps.items()}
        front = {
            index_name: value,
            "query": token[query // block],
            "key": token[key // block],
        }
        table = pd.DataFrame({**front, **columns})
        if block > 1:
            table = table.groupby([index_name, "query", "key"], as_index=False).mean()
        parts.append(table)
    return pd.concat(parts)


def stack_maps(table: pd.DataFrame, column: str, by: str = "layer") -> Array:
    """The maps of a long table, [L, cells, cells]; NaN where it has no row."""
    tokens = np.union1d(table["query"], table["key"])
    groups = list(table.groupby(by, sort=False))
    maps = np.full((len(groups), len(tokens), len(tokens)), np.nan)
    for index, (_, frame) in enumerate(groups):
        query = np.searchsorted(tokens, frame["query"])
        key = np.searchsorted(tokens, frame["key"])
        maps[index, query, key] = frame[column]
    return maps


def title_layers(values: Array) -> dict[str, Array]:
    """Maps [L, n, n] by their titles."""
    return {f"layer {layer}": scores for layer, scores in enumerate(values)}


def rows_of_panels(
    maps: Mapping[str, Array], across: int
) -> list[tuple[str, dict[str, Array]]]:
    """Maps by their titles in rows of ``across``, without names, for :func:`maps_figure`."""
    titled = list(maps.items())
    return [
        ("", dict(titled[start : start + across]))
        for start in range(0, len(titled), across)
    ]


@plot.styled
def maps_figure(
    rows: Sequence[tuple[str, Mapping[str, Array]]],
    last: int | None = None,
    n: Iterable[float] = (),
    *,
    has_sink: bool = False,
) -> Figure:
    """Draw heat maps of a query's score with every key but itself, each with its own colour range.

    Args:
        rows: Name of each row of the figure, and its maps [n, n] by their titles.
        last: Number of the last token where a cell covers several tokens; such maps have no diagonal.
        n: Numbers of samples, to be written on the figure.
        has_sink: Whether key 1 is left out of the colour ranges: a trained model's scores with it hide all others.
    """
    across = max(len(maps) for _, maps in rows)
    width = max(plot.PAGE, 1.4 * across)
    height = len(rows) * (0.92 * width / across + 0.1) + 0.6  # squares with a title
    figure, grid = plot.new_figure(
        width, height, len(rows), across, sharex=True, sharey=True, squeeze=False, n=n
    )
    for line, (name, maps) in zip(grid, rows, strict=True):
        line[0].set_ylabel(name.replace(", ", "\n"))
        for axes, (title, scores) in zip(line, maps.items(), strict=False):
            size = len(scores)
            if not last:
                # The diagonal is far above the rest and would hide it.
                scores = np.where(np.eye(size, dtype=bool), np.nan, scores)
            ranged = scores[:, 1:] if has_sink else scores
            colour_range = np.nanquantile(ranged, COLOUR_QUANTILES)
            _draw_map(figure, axes, scores, *colour_range)
            axes.set_title(title)
            axes.set_xticks([0, size - 1], ["1", str(last or size)])
            axes.set_yticks([0, size - 1], ["1", str(last or size)])
        for axes in line[len(maps) :]:
            axes.remove()
    label_size = plot.STYLE["axes.labelsize"]
    figure.supxlabel("key (1 is the first token)", fontsize=label_size)
    figure.supylabel("query", fontsize=label_size)
    return figure


def _draw_map(
    figure: Figure, axes: Axes, scores: Array, low: float, high: float
) -> None:
    """Draw one map in colours from a low to a high score, with the bar in the empty half of a causal map."""
    image = axes.imshow(scores, cmap="viridis", vmin=low, vmax=high)
    causal = np.isnan(scores[0, -1])
    if not causal:
        figure.colorbar(image, ax=axes, location="bottom", fraction=0.046, pad=0.02)
        return
    inside = axes.inset_axes((0.45, 0.9, 0.5, 0.06))
    bar = figure.colorbar(
        image, cax=inside, orientation="horizontal", ticks=[low, high]
    )
    # As many decimals as tell the ends of the scale apart.
    decimals = max(0, 1 - math.floor(math.log10(high - low))) if high > low else 2
    bar.ax.set_xticklabels([f"{low:.{decimals}f}", f"{high:.{decimals}f}"])
    bar.ax.tick_params(length=2, pad=1)
    bar.outline.set_visible(False)
