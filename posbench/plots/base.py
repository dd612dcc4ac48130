"""The look of all figures: palette, lines with bands, axes, legends; `save` writes a figure.

Nothing touches pyplot's global state. A colour has one meaning in all figures: see the palette. It is
Okabe-Ito with three dark colours of its kind, told apart by the colour-blind; lines also differ by marker
or dash, so that every figure survives a grey printer.
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

BLACK = "#000000"
BLUE = "#0072B2"
GOLD = "#E69F00"
CONTROL = "#CC79A7"
PAPER = "#882255"
"""The unmodified model; the method, or what a study changes; the gold item; controls; the paper's values."""
COLOURS = (BLUE, "#D55E00", "#009E73", "#56B4E9", "#332288", "#8B5A2B")
"""Things of a kind (methods, models, settings that are no numbers) in their order. Numbers in their order
(layers, factors, lengths) are steps of a scale instead: see :func:`line_style`."""
SHADE = "0.9"
GUIDE = "0.5"
"""A shaded range, and lines that help to read (chance, zero): greys stand for no measurement."""
DASHED = (0, (4, 2))
LEVEL: dict[str, Any] = {"color": BLACK, "linestyle": DASHED, "linewidth": 1}
"""Style of a straight line that stands for the unmodified model."""
ON_TOP: dict[str, Any] = {
    "color": CONTROL,
    "linestyle": ":",
    "marker": "x",
    "linewidth": 1.5,
    "zorder": 4,
}
"""Style of a control, which often lies on the unmodified model's dashes."""
OPEN_DIAMOND: dict[str, Any] = {
    **{"color": PAPER, "marker": "D", "linestyle": "none", "markerfacecolor": "white"},
    **{"markersize": 4, "zorder": 4, "label": "paper"},
}
"""Style of the paper's values."""
COLUMN = 3.4
PAGE = 7.0  # figure widths in inches: one column, two columns
STYLE: dict[str, Any] = {
    **dict.fromkeys(("axes.labelsize", "axes.titlesize", "font.size"), 7.5),
    **dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), 7),
    **{
        "lines.linewidth": 1.2,
        "lines.markersize": 3.5,
        "axes.linewidth": 0.6,
        "legend.frameon": False,
    },
    **{"axes.spines.top": False, "axes.spines.right": False, "pdf.fonttype": 42},
}
MARKERS = "os^vPp*h"
ITEM = "item (0 is the first)"
TOKEN = "token\n(0 is the first)"
"""Axes that count as every table does; tokens of a formula are counted from 1, and their axes say so."""
DEPTH_LABEL = "gold position (% of the context)"
ATTENTION_LABEL = "attention to the gold item\n(mean weight per token)"


def _style() -> AbstractContextManager[None]:
    from matplotlib.rcsetup import cycler
    from matplotlib.style import context

    cycle = cycler(color=COLOURS)
    return context(["default", STYLE, {"axes.prop_cycle": cycle}])


styled = within(_style)
"""Decorator: draw under our style alone, whatever the user's matplotlibrc says."""


Counts = Iterable[float] | str
"""Observations behind the points of a figure; or what it rests on in place of a model, as ``exact``."""


def new_figure(
    width: float, height: float, *shape: int, n: Counts = (), **grid: Any
) -> tuple[Figure, Any]:
    """A figure of that size in inches that lays itself out, and its axes, as of :meth:`Figure.subplots`;
    :func:`sign` tells ``n``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.set_label(counted(n))
    return figure, figure.subplots(*shape, **grid)


def new_panels(
    count: int, across: int, height: float, **grid: Any
) -> tuple[Figure, list[Axes]]:
    """A page of that many axes, so many in a row of that height in inches; see :func:`new_figure`."""
    across = min(across, count)
    lines = -(-count // across)
    figure, panels = new_figure(
        PAGE, 0.5 + height * lines, lines, across, squeeze=False, **grid
    )
    for axes in panels.flat[count:]:
        axes.remove()
    return figure, list(panels.flat[:count])


def layers_across(layers: int) -> int:
    """How many small axes of layers stand in a row."""
    return layers if layers <= 6 else 8


def counted(n: Counts) -> str:
    """`n = 20`, or the lowest and the highest; empty where none is known."""
    if isinstance(n, str):
        return n
    known = [int(each) for each in n if not np.isnan(each)]
    return (
        f"n = {' to '.join(map(str, sorted({min(known), max(known)})))}"
        if known
        else ""
    )


def line_style(index: int, unmodified: bool = False, of: int = 0) -> dict[str, Any]:
    """Line style number `index`; with `of` > 0, a step of an ordered scale of that many values."""
    marker = MARKERS[index % len(MARKERS)]
    if unmodified:
        return dict(
            color=BLACK,
            linestyle=DASHED,
            marker=marker,
            markerfacecolor="white",
            zorder=3,
        )
    if of:
        return dict(
            color=matplotlib.colormaps["viridis"](0.88 * index / max(of - 1, 1)),
            linestyle="-",
            marker=marker,
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


def percent_bars(
    axes: Axes, at: Any, rows: pd.DataFrame, upright: bool = True, **style: Any
) -> None:
    """A point in % with its 95 % interval for each row; on its side, ``at`` is the place on the y axis."""
    value, low, high = (
        100 * rows[column].to_numpy(dtype=float) for column in columns()
    )
    error = np.clip([value - low, high - value], 0, None)
    place = (
        dict(x=at, y=value, yerr=error) if upright else dict(x=value, y=at, xerr=error)
    )
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
    ``none`` is the unmodified model, a label with "gold item" the gold item, with "control" a control;
    ``ordered`` values are steps of a scale."""
    steps = len(labels) if ordered else 0
    first = int("none" in labels)
    for index, (value, label) in enumerate(labels.items()):
        rows = table[table[by] == value]
        style = line_style(max(index - first, 0), value == "none", steps)
        style |= (
            {"color": GOLD}
            if "gold item" in label
            else ON_TOP
            if "control" in label
            else {}
        )
        if len(rows):
            band(axes, rows, style, x=x, name=name, scale=scale, label=label)


def few_ticks(place: Callable[..., Any], names: Sequence[Any], most: int = 8) -> None:
    """Ticks of a map, ``axes.set_xticks`` or ``set_yticks``, at most about so many."""
    step = max(1, -(-len(names) // most))
    place(range(0, len(names), step), [str(name) for name in names[::step]])


def percent_axes(
    axes: Axes, ylabel: str = "accuracy (%)", xlabel: str = DEPTH_LABEL
) -> None:
    """Label axes of a score in percent over the gold position, from 0 to 100."""
    axes.set(xlabel=xlabel, ylabel=ylabel, ylim=(-3, 103), yticks=range(0, 101, 20))


def layer_title(layers: Sequence[int], chosen: bool) -> str:
    """Which layers a panel averages, and that posbench chose them where it did."""
    short = (
        f"{layers[0]}, {layers[1]}, ... {layers[-1]} ({len(layers)})"
        if len(layers) > 7
        else ""
    )
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


def entries(figure: Figure) -> tuple[list[Any], list[str]]:
    """What a legend of all panels holds: each label once."""
    found = dict[str, Any]()
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def legend_below(figure: Figure) -> None:
    """Legend of all panels under them, in as many columns as the longest label allows."""
    handles, labels = entries(figure)
    room = figure.get_figwidth() / (0.06 * max(map(len, labels)) + 0.45)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=max(1, min(5, len(labels), int(room))),
    )


def sign(figure: Figure, models: Sequence[str]) -> None:
    """Write above a figure, small, models and n that it rests on: it may leave its page. A title stays."""
    n = str(figure.get_label())
    words = (
        n if n and not n.startswith("n = ") else ", ".join(filter(None, [*models, n]))
    )
    if words:
        size = STYLE["axes.titlesize"] if figure.get_suptitle() else 6
        title = " | ".join(filter(None, [figure.get_suptitle(), words]))
        drawn = figure.suptitle(title, x=0.99, ha="right", fontsize=size, color="0.35")
        if drawn.get_window_extent().width > 0.98 * figure.bbox.width:
            drawn.set_text(title.replace(" | ", "\n"))


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
