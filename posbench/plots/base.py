"""The look of all figures: style, lines with bands, axes, legends; `save` writes a figure.

Nothing touches pyplot's global state. Colours are Okabe-Ito; lines also differ by marker, so that every
figure survives a grey printer. The unmodified model (method `none`) is always black and dashed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from posbench.files.atomic import write_bytes
from posbench.late import Axes, Figure, matplotlib, pd, within
from posbench.stats.findings import columns

DASHED = (0, (4, 2))
LEVEL: dict[str, Any] = {"color": "black", "linestyle": DASHED, "linewidth": 1}
"""Style of a straight line that stands for the unmodified model."""
COLUMN, PAGE = 3.4, 7.0  # figure widths in inches: one column, two columns
STYLE: dict[str, Any] = {
    **dict.fromkeys(("axes.labelsize", "axes.titlesize", "font.size"), 7.5),
    **dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), 7),
    **{"lines.linewidth": 1.2, "lines.markersize": 3.5, "axes.linewidth": 0.6, "legend.frameon": False},
    **{"axes.spines.top": False, "axes.spines.right": False, "pdf.fonttype": 42},
}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX*"
DEPTH_LABEL = "gold position (% of the context)"
ATTENTION_LABEL = "attention to the gold item\n(mean weight per token)"


def _style() -> AbstractContextManager[None]:
    from matplotlib.style import context

    return context(["default", STYLE])


styled = within(_style)
"""Decorator: draw under our style alone, whatever the user's matplotlibrc says."""


def new_figure(width: float, height: float, *shape: int, **grid: Any) -> tuple[Figure, Any]:
    """A figure of that size in inches that lays itself out, and its axes, as of :meth:`Figure.subplots`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(*shape, **grid)


def line_style(index: int, unmodified: bool = False, of: int = 0) -> dict[str, Any]:
    """Line style number `index`; with `of` > 0, a step of an ordered scale of that many values."""
    marker = MARKERS[index % len(MARKERS)]
    if unmodified:
        return dict(color="black", linestyle=DASHED, marker=marker, markerfacecolor="white", zorder=3)
    if of:
        return dict(
            color=matplotlib.colormaps["viridis"](0.88 * index / max(of - 1, 1)), linestyle="-", marker=marker
        )
    # Colours come a second time as dashed lines.
    dashes = "--" if index >= len(COLOURS) else "-"
    return dict(color=COLOURS[index % len(COLOURS)], linestyle=dashes, marker=marker)


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
    """One line of a style, and its 95 % band, over the column ``x``; a depth in 0..1 is drawn in %. Numbers
    are those of ``name`` (:func:`posbench.stats.findings.columns`) times ``scale``."""
    rows = rows.sort_values(x)
    at = rows[x] * (100 if x == "depth" else 1)
    value, low, high = (scale * rows[column].astype(float) for column in columns(name))
    axes.plot(at, value, label=label, **style)
    axes.fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0)


def percent_bars(axes: Axes, at: Any, rows: pd.DataFrame, upright: bool = True, **style: Any) -> None:
    """A point in % with its 95 % interval for each row; on its side, ``at`` is the place on the y axis."""
    value, low, high = (100 * rows[column].to_numpy(dtype=float) for column in columns())
    error = np.clip([value - low, high - value], 0, None)
    place = dict(x=at, y=value, yerr=error) if upright else dict(x=value, y=at, xerr=error)
    axes.errorbar(**place, elinewidth=0.8, **style)


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
    """A line with its band (:func:`band`) for each labelled value of a column, in the order of the labels;
    ``none`` is the unmodified model, ``ordered`` values are steps of a scale."""
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
        self.colours = matplotlib.colors.ListedColormap(
            matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(self.layers)))
        )

    def style(self, layer: int) -> dict[str, Any]:
        """Style of a layer's line."""
        index = self.layers.index(layer)
        return {"color": self.colours(index), "linestyle": ("-", "--", "-.", ":")[index % 4]}

    def bar(self, figure: Figure, panels: Iterable[Axes]) -> None:
        """The colour bar beside the panels."""
        count = len(self.layers)
        norm, ticks = (
            matplotlib.colors.BoundaryNorm(np.arange(count + 1) - 0.5, count),
            range(0, count, max(1, count // 8)),
        )
        shown = matplotlib.cm.ScalarMappable(norm, self.colours)
        bar = figure.colorbar(shown, ax=list(panels), label="layer", ticks=list(ticks))
        bar.ax.set_yticklabels([str(self.layers[tick]) for tick in ticks])
        bar.minorticks_off()


def percent_axes(axes: Axes, ylabel: str = "accuracy (%)", xlabel: str = DEPTH_LABEL) -> None:
    """Label axes of a score in percent over the gold position, from 0 to 100."""
    axes.set(xlabel=xlabel, ylabel=ylabel, ylim=(-3, 103), yticks=range(0, 101, 20))


def layer_title(layers: Sequence[int], chosen: bool) -> str:
    """Which layers a panel averages, and that posbench chose them where it did."""
    short = f"{layers[0]}, {layers[1]}, ... {layers[-1]} ({len(layers)})" if len(layers) > 7 else ""
    listed = short or ", ".join(map(str, layers))
    name = f"layer {layers[0]}" if len(layers) == 1 else f"mean of layers {listed}"
    return f"{name} (strongest when unmodified)" if chosen else name


def from_zero(axes: Axes) -> None:
    """Let the y axis of weights start at 0 and end above the highest line."""
    top = max(float(np.nanmax(line.get_ydata())) for line in axes.lines)
    axes.set_ylim(0, 1.08 * top or 1.0)
    axes.ticklabel_format(axis="y", scilimits=(-3, 3))


def attention_axes(axes: Axes, title: str) -> None:
    """Label axes of attention to the gold item over the gold position."""
    axes.set(xlabel=DEPTH_LABEL, ylabel=ATTENTION_LABEL, title=title)
    from_zero(axes)


def legend_below(figure: Figure, axes: Axes) -> None:
    """Legend under the axes, in as many columns as the longest label allows."""
    handles, labels = axes.get_legend_handles_labels()
    room = figure.get_figwidth() / (0.06 * max(map(len, labels)) + 0.45)
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(4, len(labels), int(room))))


def sign(figure: Figure, words: str) -> None:
    """Write above a figure, small, what it rests on: it may leave its page. A title stays."""
    if words:
        size = STYLE["axes.titlesize"] if figure.get_suptitle() else 6
        title = " | ".join(filter(None, [figure.get_suptitle(), words]))
        figure.suptitle(title, x=0.99, ha="right", fontsize=size, color="0.35")


@styled
def save(figure: Figure, stem: Path) -> list[Path]:
    """Write `stem`.png (200 dpi) and `stem`.pdf, byte-stable for the same figure; returns the two paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, stamp in (("png", "Software"), ("pdf", "CreationDate")):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=200, metadata={stamp: None})
        written.append(stem.with_name(f"{stem.name}.{kind}"))
        write_bytes(written[-1], buffer.getvalue())
    return written
