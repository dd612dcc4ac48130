"""The look of all figures: palette, lines with bands, axes, legends; `save` writes a figure.

Nothing touches pyplot's global state. A colour has one meaning in all figures: see the palette. It is
Okabe-Ito with four further colours, which the colour-blind can distinguish; lines also differ by marker
or dash, so that every figure survives a grey printer.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from posbench.files.atomic import write_bytes
from posbench.late import Axes, Figure, matplotlib, pd, run_inside
from posbench.stats.findings import estimate_columns

BLACK = "#000000"
"""The unmodified model."""
BLUE = "#0072B2"
"""The method, or the change of a study."""
GOLD_COLOUR = "#E69F00"
"""The gold item."""
CONTROL_COLOUR = "#CC79A7"
"""Controls."""
PAPER_COLOUR = "#882255"
"""The paper's values."""
COLOURS = (
    BLUE,
    "#D55E00",
    "#009E73",
    "#56B4E9",
    "#332288",
    "#8B5A2B",
    "#8914EB",
)
"""Things of a kind (methods, models, settings that are no numbers) in their order. Numbers in their order
(layers, factors, lengths) are steps of a scale instead: see :func:`line_style`."""
SCALE_END = 0.62
"""Where the scale of ordered lines ends: lighter steps have a contrast to white of less than 3:1."""
GOOD_COLOUR = "#2e7d32"
"""The verdict that there is no bias, or none left."""
BAD_COLOUR = "#c62828"
"""The verdict that there is a bias."""
NEUTRAL_COLOUR = "#616161"
"""The verdict that neither is shown."""
SHADE = "0.9"
"""A shaded range; greys mark the absence of a measurement."""
GUIDE = "0.5"
"""Lines that help to read (chance, zero)."""
DASHED = (0, (4, 2))
UNMODIFIED_LINE: dict[str, Any] = {"color": BLACK, "linestyle": DASHED, "linewidth": 1}
"""Style of a straight line for the unmodified model."""
CONTROL_STYLE: dict[str, Any] = {
    "color": CONTROL_COLOUR,
    "linestyle": ":",
    "marker": "x",
    "linewidth": 1.5,
    "zorder": 4,
}
"""Style of a control, which often lies on the unmodified model's dashes."""
PAPER_MARKER: dict[str, Any] = {
    "color": PAPER_COLOUR,
    "marker": "D",
    "linestyle": "none",
    "markerfacecolor": "white",
    "markersize": 4,
    "zorder": 4,
    "label": "paper",
}
"""Style of the paper's values."""
COLUMN = 3.4
"""Width in inches of a figure in one column."""
PAGE = 7.0
"""Width in inches of a figure across two columns."""
STYLE: dict[str, Any] = {
    "axes.labelsize": 7.5,
    "axes.titlesize": 7.5,
    "font.size": 7.5,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "axes.linewidth": 0.6,
    "image.interpolation": "none",  # a cell of a map has the colour of its value
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",  # letters look the same without our font
    "svg.hashsalt": "posbench",  # ids of parts: the same figure has the same
}
FONTS = (
    "DejaVu Sans",
    # For what it lacks: Chinese, Japanese and Korean.
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "PingFang SC",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
)
"""Fonts of a figure, as far as this machine has them; a letter is of the first that has it."""
VEGA = "vl.json"
"""The format of a Vega-Lite specification, as its files end."""
FORMATS = ("svg", "png", "pdf", VEGA)
"""Formats of a figure's file; the first is the one that pages show."""
VOLATILE_METADATA = {
    "svg": ("Creator", "Date"),
    "png": ("Software",),
    "pdf": ("CreationDate",),
}
"""Metadata that matplotlib writes into a file of each format and that changes with its version or the day."""
DOTS_PER_INCH = 200
"""Of a PNG, and of pictures inside the other formats."""
MARKERS = "os^vPp*h"
ITEM_LABEL = "item (0 is the first)"
"""Axis label of items counted from 0, as in every table."""
TOKEN_LABEL = "token\n(0 is the first)"
"""Axis label of tokens counted from 0, as in every table; axes of a formula count from 1."""
DEPTH_LABEL = "gold position (% of the items)"
ATTENTION_LABEL = "attention to the gold item\n(mean weight per token)"


def _style() -> AbstractContextManager[None]:
    from matplotlib.font_manager import fontManager
    from matplotlib.rcsetup import cycler
    from matplotlib.style import context

    installed = {font.name for font in fontManager.ttflist}
    fonts = [name for name in FONTS if name in installed]
    cycle = cycler(color=COLOURS)
    return context(["default", STYLE, {"axes.prop_cycle": cycle, "font.family": fonts}])


styled = run_inside(_style)
"""Decorator: draw under our style alone, whatever the user's matplotlibrc says."""


Counts = Iterable[float] | str
"""Observations behind the points of a figure; or, without a model, their source, as ``exact``."""


def new_figure(
    width: float, height: float, *shape: int, n: Counts = (), **grid: Any
) -> tuple[Figure, Any]:
    """A new figure and its axes.

    Args:
        width: In inches.
        height: In inches.
        shape: Rows and columns of axes.
        n: Observations behind the points, which :func:`sign` writes on the figure.
        grid: Options of :meth:`matplotlib.figure.Figure.subplots`.

    Returns:
        The figure, and its axes as :meth:`matplotlib.figure.Figure.subplots` returns them.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.set_label(count_label(n))
    return figure, figure.subplots(*shape, **grid)


def new_panels(
    count: int, across: int, height: float, **grid: Any
) -> tuple[Figure, list[Axes]]:
    """A new figure of page width with many axes.

    Args:
        count: Number of axes.
        across: Most axes in a row.
        height: Of a row, in inches.
        grid: Options of :func:`new_figure`.
    """
    across = min(across, count)
    num_rows = math.ceil(count / across)
    figure, panels = new_figure(
        PAGE, 0.5 + height * num_rows, num_rows, across, squeeze=False, **grid
    )
    for axes in panels.flat[count:]:
        axes.remove()
    return figure, list(panels.flat[:count])


LOG_AXIS_RATIO = 100
"""Largest over smallest of positive numbers from which their axis is logarithmic, as for learning rates."""
MAX_PANELS_PER_ROW = 8
"""Most small axes of layers in a row, with room for two ticks on each x axis."""


def layers_per_row(layers: int) -> int:
    """Number of small axes of layers in a row."""
    return layers if layers <= 6 else MAX_PANELS_PER_ROW


def label_bottom_row(panels: Sequence[Axes], across: int) -> None:
    """Label the x axes of the last row of panels as tokens; in long rows, with the first line of the label.

    Args:
        panels: The panels row by row; the last row may be shorter.
        across: Panels in a row.
    """
    xlabel = TOKEN_LABEL
    if across >= MAX_PANELS_PER_ROW:
        xlabel, *_ = xlabel.splitlines()
    num_above = (len(panels) - 1) // across * across
    for axes in panels[num_above:]:
        axes.set_xlabel(xlabel)


def count_label(n: Counts) -> str:
    """`n = 20`, or `n = 20 to 30`; empty where no count is known."""
    if isinstance(n, str):
        return n
    counts = [int(count) for count in n if not np.isnan(count)]
    if not counts:
        return ""
    lowest = min(counts)
    highest = max(counts)
    return f"n = {lowest}" if lowest == highest else f"n = {lowest} to {highest}"


def line_style(index: int, unmodified: bool = False, steps: int = 0) -> dict[str, Any]:
    """The style of one line among several.

    Args:
        index: Number of the line.
        unmodified: Whether it is the unmodified model's.
        steps: Length of an ordered scale of which the line is a step; 0 for names.
    """
    marker = MARKERS[index % len(MARKERS)]
    if unmodified:
        return {
            "color": BLACK,
            "linestyle": DASHED,
            "marker": marker,
            "markerfacecolor": "white",
            "zorder": 3,
        }
    if steps:
        colour = matplotlib.colormaps["plasma"](SCALE_END * index / max(steps - 1, 1))
        return {"color": colour, "linestyle": "-", "marker": marker}
    return {
        "color": COLOURS[index % len(COLOURS)],
        # Colours come a second time as dashed lines.
        "linestyle": "-" if index < len(COLOURS) else "--",
        "marker": marker,
    }


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
    """Draw one line with its 95 % band.

    Args:
        axes: Where it is drawn.
        rows: A row per point.
        style: The style of the line.
        x: Column of the x axis; a depth in 0..1 is drawn in %.
        name: The estimate, see :func:`posbench.stats.findings.estimate_columns`.
        scale: Factor of the estimate.
        label: Its text in a legend.
    """
    rows = rows.sort_values(x)
    x_values = rows[x] * (100 if x == "depth" else 1)
    value, low, high = (
        scale * rows[column].astype(float) for column in estimate_columns(name)
    )
    axes.plot(x_values, value, label=label, **style)
    axes.fill_between(
        x_values, low, high, color=style["color"], alpha=0.15, linewidth=0
    )


def level(
    axes: Axes, row: Mapping[str, Any], style: Mapping[str, Any], label: str
) -> None:
    """Draw a share in % with its 95 % interval as a horizontal line, for scores without a position.

    Args:
        axes: Where it is drawn.
        row: Has value, ci_low and ci_high in 0..1; nothing is drawn without a value.
        style: The style of a line, of which the marker is left out.
        label: Its text in a legend.
    """
    value, low, high = (100 * row[column] for column in estimate_columns())
    if pd.isna(value):
        return
    colour = style["color"]
    axes.axhline(value, color=colour, linestyle=DASHED, linewidth=1, label=label)
    axes.axhspan(low, high, color=colour, alpha=0.1, linewidth=0)


def percent_bars(
    axes: Axes, positions: Any, rows: pd.DataFrame, upright: bool = True, **style: Any
) -> None:
    """Draw a point in % with its 95 % interval for each row.

    Args:
        axes: Where they are drawn.
        positions: Place of each row on the x axis; on the y axis if not upright.
        rows: Rows with value, ci_low and ci_high in 0..1.
        upright: Whether the intervals are vertical.
        style: Options of :meth:`matplotlib.axes.Axes.errorbar`.
    """
    value, low, high = (
        100 * rows[column].to_numpy(dtype=float) for column in estimate_columns()
    )
    error = np.clip([value - low, high - value], 0, None)
    if upright:
        axes.errorbar(x=positions, y=value, yerr=error, elinewidth=0.8, **style)
    else:
        axes.errorbar(x=value, y=positions, xerr=error, elinewidth=0.8, **style)


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
    """Draw a line with its band (:func:`band`) for each labelled value of a column.

    Args:
        axes: Where they are drawn.
        table: A row per point.
        by: The column.
        labels: Label of each value, in the order of the lines. ``none`` is the
            unmodified model; a label with "gold item" or "control" has that colour.
        x: Column of the x axis.
        name: The estimate.
        scale: Factor of the estimate.
        ordered: Whether the values are steps of a scale.
    """
    num_steps = len(labels) if ordered else 0
    num_unmodified = int("none" in labels)
    for index, (value, label) in enumerate(labels.items()):
        rows = table[table[by] == value]
        if rows.empty:
            continue
        style = line_style(max(index - num_unmodified, 0), value == "none", num_steps)
        if "gold item" in label:
            style["color"] = GOLD_COLOUR
        elif "control" in label:
            style |= CONTROL_STYLE
        band(axes, rows, style, x=x, name=name, scale=scale, label=label)


def set_few_ticks(
    set_ticks: Callable[..., Any], names: Sequence[Any], count: int = 8
) -> None:
    """Label some of the rows or columns of a map.

    Args:
        set_ticks: ``axes.set_xticks`` or ``axes.set_yticks``.
        names: Name of each column or row.
        count: Most ticks.
    """
    step = max(1, math.ceil(len(names) / count))
    set_ticks(range(0, len(names), step), [str(name) for name in names[::step]])


def percent_axes(
    axes: Axes, ylabel: str = "accuracy (%)", xlabel: str = DEPTH_LABEL
) -> None:
    """Label axes of a score in percent over the gold position, from 0 to 100."""
    axes.set(xlabel=xlabel, ylabel=ylabel, ylim=(-3, 103), yticks=range(0, 101, 20))


def strongest_layer_title(layer: int) -> str:
    """Title of a panel of the layer of :func:`posbench.stats.frames.strongest_layer`."""
    return f"layer {layer} (strongest when unmodified)"


def layer_title(layers: Sequence[int]) -> str:
    """Which layers a panel averages."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if len(layers) > 7:
        return (
            f"mean of layers {layers[0]}, {layers[1]}, ... {layers[-1]} ({len(layers)})"
        )
    return f"mean of layers {', '.join(map(str, layers))}"


def start_at_zero(axes: Axes) -> None:
    """Let the y axis of weights start at 0 and end above the highest line and band."""
    tops = [np.nanmax(line.get_ydata()) for line in axes.lines]
    tops += [band.get_datalim(axes.transData).y1 for band in axes.collections]
    axes.set_ylim(0, 1.08 * float(max(tops)) or 1.0)
    axes.ticklabel_format(axis="y", scilimits=(-3, 3))


def attention_axes(axes: Axes, title: str) -> None:
    """Label axes of attention to the gold item over the gold position."""
    axes.set(xlabel=DEPTH_LABEL, ylabel=ATTENTION_LABEL, title=title)
    start_at_zero(axes)


def legend_entries(figure: Figure) -> tuple[list[Any], list[str]]:
    """Handles and labels of a legend of all panels, each label once."""
    handles = dict[str, Any]()
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    return list(handles.values()), list(handles)


def add_legend_below(figure: Figure) -> None:
    """Legend of all panels under them, in the number of columns that the longest label allows."""
    handles, labels = legend_entries(figure)
    column_inches = 0.06 * max(map(len, labels)) + 0.45
    num_fitting = int(figure.get_figwidth() / column_inches)
    num_columns = max(1, min(5, len(labels), num_fitting))
    figure.legend(handles, labels, loc="outside lower center", ncols=num_columns)


def sign(figure: Figure, models: Sequence[str]) -> None:
    """Write the models and n small above a figure, which may leave its page.

    A title of the figure stays. A figure without a model, such as an ``exact`` one,
    names its source instead.
    """
    basis = str(figure.get_label())
    is_count = basis.startswith("n = ")
    signature = basis
    if is_count or not basis:
        signature = ", ".join(filter(None, [*models, basis]))
    if not signature:
        return
    title = figure.get_suptitle()
    size = STYLE["axes.titlesize"] if title else 6
    text = f"{title} | {signature}" if title else signature
    artist = figure.suptitle(text, x=0.99, ha="right", fontsize=size, color="0.35")
    # In the files, which have other dots per inch, letters are up to a twentieth wider.
    if artist.get_window_extent().width > 0.93 * figure.bbox.width:
        artist.set_text(text.replace(" | ", "\n"))


@styled
def save(figure: Figure, stem: Path, formats: Iterable[str] = ()) -> Path:
    """Write a figure as `stem`.svg, and in further formats.

    The same figure gives the same bytes: the files carry no version and no date.

    Args:
        figure: The figure.
        stem: Path of the files without their suffix.
        formats: Further formats, of :data:`FORMATS`. Formats in which the figure has a file already are written, too:
            no file is left of what the figure was before.

    Returns:
        The path of the SVG.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = {name: stem.with_name(f"{stem.name}.{name}") for name in FORMATS}
    for name, file in files.items():
        if name == FORMATS[0] or name in formats or file.is_file():
            if name == VEGA:
                _write_vega(figure, file)
                continue
            buffer = io.BytesIO()
            metadata = dict.fromkeys(VOLATILE_METADATA[name])
            figure.savefig(buffer, format=name, dpi=DOTS_PER_INCH, metadata=metadata)
            write_bytes(file, buffer.getvalue())
    return files[FORMATS[0]]


def _write_vega(figure: Figure, file: Path) -> None:
    """Write a figure as a Vega-Lite specification."""
    from posbench.plots.vega import specification

    write_bytes(file, f"{json.dumps(specification(figure))}\n".encode())
