"""The look of all figures: style, lines with bands, axes, legends; `save` writes a figure.

Nothing here reads a model, touches pyplot's global state, or averages over rows that a reader would want to
see apart. Colours are Okabe-Ito; lines also differ by marker, so that every figure survives a grey printer.
The unmodified model (method `none`) is always black and dashed.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure

from posbench.files.atomic import write_bytes

DASHED = (0, (4, 2))
COLUMN, PAGE = 3.4, 7.0  # figure widths in inches: one column, two columns
SMALL = ("axes.labelsize", "axes.titlesize", "font.size")
STYLE: dict[str, Any] = {
    **dict.fromkeys(SMALL, 7.5),
    **dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), 7),
    **{"lines.linewidth": 1.2, "lines.markersize": 3.5, "axes.linewidth": 0.6, "legend.frameon": False},
    **{"axes.spines.top": False, "axes.spines.right": False, "pdf.fonttype": 42},
}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX*"
DEPTH_LABEL = "gold position (% of the context)"
ATTENTION_LABEL = "attention to the gold item\n(mean weight per token)"

P = ParamSpec("P")


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw under our style alone, whatever the user's matplotlibrc says."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.style.context(["default", STYLE]):
            return draw(*args, **kwargs)

    return drawn


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that size in inches that lays itself out."""
    return Figure(figsize=(width, height), layout="constrained")


def line_style(index: int, unmodified: bool = False, of: int = 0) -> dict[str, Any]:
    """Line style number `index`; with `of` > 0, a step of an ordered scale of that many values."""
    marker = MARKERS[index % len(MARKERS)]
    if unmodified:
        return {
            "color": "black",
            "linestyle": DASHED,
            "marker": marker,
            "markerfacecolor": "white",
            "zorder": 3,
        }
    ordered = colormaps["viridis"](0.88 * index / max(of - 1, 1)) if of else None
    # Colours come a second time as dashed lines.
    again = not ordered and index >= len(COLOURS)
    colour = ordered or COLOURS[index % len(COLOURS)]
    return {"color": colour, "linestyle": "--" if again else "-", "marker": marker}


def band(
    axes: Axes,
    rows: pd.DataFrame,
    style: dict[str, Any],
    *,
    x: str = "depth",
    name: str = "",
    scale: float = 100,
    label: str | None = None,
) -> None:
    """One line with its 95 % band.

    Args:
        axes: Where it is drawn.
        rows: Its points, with the column ``x``, and the columns of :func:`posbench.stats.findings.estimate`.
        style: Of the line.
        x: Column of the x axis; a depth in 0..1 is drawn in %.
        name: Column of the number where it is not ``value``.
        scale: Factor of the numbers.
        label: For the legend.
    """
    rows = rows.sort_values(x)
    at = rows[x] * (100 if x == "depth" else 1)
    low, high = (scale * rows[f"{name}_{end}".strip("_")].astype(float) for end in ("ci_low", "ci_high"))
    axes.plot(at, scale * rows[name or "value"], label=label, **style)
    axes.fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0)


def bands(
    axes: Axes,
    table: pd.DataFrame,
    by: str,
    labels: Mapping[Any, str],
    *,
    x: str = "depth",
    name: str = "",
    scale: float = 100,
    ordered: bool = False,
) -> None:
    """A line with its band for each value of a column, where the table has it, in the order of the labels.

    Args:
        axes: Where they are drawn.
        table: See :func:`band`.
        by: The column; its value ``none`` is the unmodified model.
        labels: Texts for the legend, by value.
        x: See :func:`band`.
        name: See :func:`band`.
        scale: See :func:`band`.
        ordered: Whether the values are an ordered scale.
    """
    steps, first = len(labels) if ordered else 0, int("none" in labels)
    for index, (value, label) in enumerate(labels.items()):
        rows, style = table[table[by] == value], line_style(max(index - first, 0), value == "none", steps)
        if len(rows):
            band(axes, rows, style, x=x, name=name, scale=scale, label=label)


def few_ticks(place: Callable[..., Any], names: Sequence[Any], most: int = 8) -> None:
    """Ticks of a map, ``axes.set_xticks`` or ``set_yticks``, at most about so many."""
    step = max(1, -(-len(names) // most))
    place(range(0, len(names), step), [str(name) for name in names[::step]])


class LayerColours:
    """A colour and a dash for each layer, dark to light, and the bar that tells them."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = list(layers)
        self.colours = ListedColormap(colormaps["viridis"](np.linspace(0, 0.9, len(self.layers))))

    def style(self, layer: int) -> dict[str, Any]:
        """Style of a layer's line."""
        index = self.layers.index(layer)
        return {"color": self.colours(index), "linestyle": ("-", "--", "-.", ":")[index % 4]}

    def bar(self, figure: Figure, panels: Iterable[Axes]) -> None:
        """The colour bar beside the panels."""
        count = len(self.layers)
        norm, ticks = BoundaryNorm(np.arange(count + 1) - 0.5, count), range(0, count, max(1, count // 8))
        bar = figure.colorbar(
            ScalarMappable(norm, self.colours), ax=list(panels), label="layer", ticks=list(ticks)
        )
        bar.ax.set_yticklabels([str(self.layers[tick]) for tick in ticks])
        bar.minorticks_off()


def percent_axes(axes: Axes, ylabel: str = "accuracy (%)", xlabel: str = DEPTH_LABEL) -> None:
    """Label axes of a score in percent over the gold position, from 0 to 100."""
    axes.set(xlabel=xlabel, ylabel=ylabel, ylim=(-3, 103), yticks=range(0, 101, 20))


def layer_title(layers: Sequence[int], chosen: bool) -> str:
    """Which layers a panel averages, and that posbench chose them where it did."""
    listed = ", ".join(map(str, layers))
    if len(layers) > 7:
        listed = f"{layers[0]}, {layers[1]}, ... {layers[-1]} ({len(layers)})"
    name = f"layer {layers[0]}" if len(layers) == 1 else f"mean of layers {listed}"
    return f"{name} (strongest when unmodified)" if chosen else name


def from_zero(axes: Axes) -> None:
    """Let the y axis of weights start at 0 and end above the highest line."""
    top = max(float(np.nanmax(line.get_ydata())) for line in axes.lines)
    axes.set_ylim(0, 1.08 * top or 1.0)
    axes.ticklabel_format(axis="y", scilimits=(-3, 3))


def legend_below(figure: Figure, axes: Axes) -> None:
    """Legend under the axes, in as many columns as the longest label allows."""
    handles, labels = axes.get_legend_handles_labels()
    room = figure.get_figwidth() / (0.06 * max(map(len, labels)) + 0.45)
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(4, len(labels), int(room))))


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write `stem`.png (200 dpi) and `stem`.pdf, each at once and byte-stable for the same figure.

    Args:
        figure: what one of the functions above returned.
        stem: path without suffix; folders are made as needed.

    Returns:
        The two paths, png first.
    """
    metadata: dict[str, dict[str, Any]] = {"png": {"Software": None}, "pdf": {"CreationDate": None}}
    written = []
    stem.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.style.context(["default", STYLE]):
        for kind, entries in metadata.items():
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=200, metadata=entries)
            written.append(stem.with_name(f"{stem.name}.{kind}"))
            write_bytes(written[-1], buffer.getvalue())
    return written
