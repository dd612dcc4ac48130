"""Maps of scores over query and key, as long tables and as heat maps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from posbench.late import Figure, pd
from posbench.plots import base as plot
from posbench.stats.bootstrap import Array

QUANTILES = (0.01, 0.99)
"""Of the finite entries: the paper's colour range."""


def long_table(
    by: str, maps: Mapping[Any, Mapping[str, Array]], cells: int
) -> pd.DataFrame:
    """Maps [n, n] as rows of ``by``, query, key (tokens from 1) and a column for each map, without what is no
    number.

    A causal map of more than ``cells`` tokens is cut into blocks: query and key are then the mean token of a
    block, and the value is the mean below the diagonal.
    """
    parts = []
    for name, values in maps.items():
        first = next(iter(values.values()))
        n = len(first)
        block = -(-len(first) // cells)
        i, j = np.nonzero(~np.isnan(first)) if block == 1 else np.tril_indices(n, -1)
        edges = np.arange(0, n, block)
        middle = (
            (edges + np.minimum(edges + block, n) + 1) / 2 if block > 1 else edges + 1
        )
        columns = {column: each[i, j] for column, each in values.items()}
        table = pd.DataFrame(
            {
                by: name,
                "query": middle[i // block],
                "key": middle[j // block],
                **columns,
            }
        )
        parts.append(
            table.groupby([by, "query", "key"], as_index=False).mean()
            if block > 1
            else table
        )
    return pd.concat(parts)


def stacked(table: pd.DataFrame, column: str, by: str = "layer") -> Array:
    """The maps of a long table, [L, cells, cells]; not a number where it has no row."""
    places = np.union1d(table["query"], table["key"])
    each = list(table.groupby(by, sort=False))
    found = np.full((len(each), len(places), len(places)), np.nan)
    for number, (_, frame) in enumerate(each):
        query, key = (np.searchsorted(places, frame[side]) for side in ("query", "key"))
        found[number, query, key] = frame[column]
    return found


def by_layer(values: Array) -> dict[str, Array]:
    """Maps [L, n, n] with their titles."""
    return {f"layer {layer}": each for layer, each in enumerate(values)}


@plot.styled
def maps_figure(
    rows: Sequence[tuple[str, Mapping[str, Array]]],
    last: int | None = None,
    n: Iterable[float] = (),
) -> Figure:
    """Heat maps of a query's score with every key but itself, each with colours of its own.

    From the name of each row and its maps [n, n] by their titles; ``last`` is the number of the last token
    where a cell stands for several, none of them a token's score with itself; ``n`` samples. The colours of a
    causal map are told in its empty half.
    """
    across = max(len(maps) for _, maps in rows)
    width = max(plot.PAGE, 1.4 * across)
    shape: dict[str, Any] = {"sharex": True, "sharey": True, "squeeze": False, "n": n}
    height = len(rows) * (0.92 * width / across + 0.1) + 0.4  # squares with a title
    figure, grid = plot.new_figure(width, height, len(rows), across, **shape)
    for line, (name, maps) in zip(grid, rows, strict=True):
        line[0].set_ylabel(name.replace(", ", "\n"))
        for axes, (title, values) in zip(line, maps.items(), strict=False):
            size = len(values)
            # The diagonal is far above the rest and would hide it.
            shown = (
                values if last else np.where(np.eye(size, dtype=bool), np.nan, values)
            )
            low, high = np.nanquantile(shown, QUANTILES)
            image = axes.imshow(
                shown, cmap="viridis", vmin=low, vmax=high, interpolation="nearest"
            )
            if np.isnan(shown[0, -1]):
                inside = axes.inset_axes((0.45, 0.9, 0.5, 0.06))
                bar = figure.colorbar(
                    image, cax=inside, orientation="horizontal", ticks=[low, high]
                )
                bar.ax.set_xticklabels([f"{low:.3g}", f"{high:.3g}"], fontsize=5.5)
                bar.ax.tick_params(length=2, pad=1)
                bar.outline.set_visible(False)
            else:
                figure.colorbar(
                    image, ax=axes, location="bottom", fraction=0.046, pad=0.02
                )
            axes.set_title(title)
            for place in (axes.set_xticks, axes.set_yticks):
                place([0, size - 1], ["1", str(last or size)])
        for axes in line[len(maps) :]:
            axes.remove()
    figure.supxlabel(
        "key (1 is the first token)", fontsize=plot.STYLE["axes.labelsize"]
    )
    figure.supylabel("query", fontsize=plot.STYLE["axes.labelsize"])
    return figure
