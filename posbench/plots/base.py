"""Figures from tidy frames: each function takes a DataFrame and returns a matplotlib `Figure`; `save` writes
it.

Nothing here reads a model, touches pyplot's global state, or averages over rows that a reader would want to
see apart. Colours are Okabe-Ito; lines also differ by marker, so that every figure survives a grey printer.
The unmodified model (method `none`) is always black and dashed.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
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

from posbench.errors import UserError
from posbench.files.atomic import write_bytes
from posbench.stats.tables import BIAS

UNMODIFIED = "none"
COLUMN, PAGE = 3.4, 7.0  # figure widths in inches: one column, two columns
STYLE: dict[str, Any] = {
    "font.size": 7.5,
    "axes.labelsize": 7.5,
    "axes.titlesize": 7.5,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "legend.frameon": False,
    "pdf.fonttype": 42,
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


def need(frame: pd.DataFrame, what: str, *columns: str) -> None:
    """Raise `UserError` if a column is missing or the frame has no row."""
    missing = [column for column in columns if column not in frame]
    if missing or frame.empty:
        problem = f"columns missing: {', '.join(missing)}" if missing else "no row"
        hint = "run the stage that writes these rows first"
        raise UserError(what, problem, f"rows with {', '.join(columns)}", hint)


def need_one(frame: pd.DataFrame, what: str, *columns: str) -> None:
    """Raise `UserError` if one of the columns holds several values, which a single panel would mix up."""
    for column in columns:
        values: list[Any] = list(frame[column].unique()) if column in frame else []
        if len(values) > 1:
            found = ", ".join(map(str, values))
            raise UserError(f"{what} {column}", found, "one", "draw one figure for each")


def line_style(index: int, unmodified: bool = False, of: int = 0) -> dict[str, Any]:
    """Line style number `index`; with `of` > 0, a step of an ordered scale of that many values."""
    marker = MARKERS[index % len(MARKERS)]
    if unmodified:
        return {
            "color": "black",
            "linestyle": (0, (4, 2)),
            "marker": marker,
            "markerfacecolor": "white",
            "zorder": 3,
        }
    ordered = colormaps["viridis"](0.88 * index / max(of - 1, 1)) if of else None
    # Colours come a second time as dashed lines.
    again = not ordered and index >= len(COLOURS)
    return {
        "color": ordered or COLOURS[index % len(COLOURS)],
        "linestyle": "--" if again else "-",
        "marker": marker,
    }


def _band(axes: Axes, rows: pd.DataFrame, label: str, style: dict[str, Any]) -> None:
    """One accuracy line over depth with its interval; rows need depth (0..1), value, ci_low, ci_high
    (0..1)."""
    rows = rows.sort_values("depth")
    x = 100 * rows["depth"]
    axes.plot(x, 100 * rows["value"], label=label, **style)
    axes.fill_between(
        x, 100 * rows["ci_low"], 100 * rows["ci_high"], color=style["color"], alpha=0.15, linewidth=0
    )


def percent_axes(axes: Axes, ylabel: str = "accuracy (%)", xlabel: str = DEPTH_LABEL) -> None:
    """Label axes of a score in percent over the gold position, from 0 to 100."""
    axes.set(xlabel=xlabel, ylabel=ylabel, ylim=(-3, 103), yticks=range(0, 101, 20))


def from_zero(axes: Axes) -> None:
    """Let the y axis of weights start at 0 and end above the highest line."""
    top = max(float(np.nanmax(line.get_ydata())) for line in axes.lines)
    axes.set_ylim(0, 1.08 * top or 1.0)
    axes.ticklabel_format(axis="y", scilimits=(-3, 3))


def own_metric(metrics: pd.DataFrame) -> pd.Series:
    """For each row the metric that its task is judged by: the first one in the task's table."""
    task = metrics["task"] if "task" in metrics else pd.Series("", index=metrics.index)
    derived = metrics["metric"].str.endswith("_difference") | metrics["metric"].isin(BIAS)
    return metrics["metric"].mask(derived).groupby(task, sort=False).transform("first")


def metric_name(metrics: pd.DataFrame) -> str:
    """The task's own metric in words; `score` where several tasks have different ones."""
    names = own_metric(metrics).unique()
    return str(names[0]).replace("_", " ") if len(names) == 1 else "score"


def _of(metrics: pd.DataFrame, metric: str) -> pd.DataFrame:
    own = own_metric(metrics)
    name = {"": own, "difference": own + "_difference"}.get(metric, metric)
    return metrics[metrics["metric"] == name]


def at_positions(metrics: pd.DataFrame, metric: str = "") -> pd.DataFrame:
    """Rows of one metric that belong to a gold position (not `all`), with `depth` as a number in 0..1.

    The metric is the task's own, or `difference` for its paired differences, or a name.

    A task that does not say how many items its prompts hold has no depth; the largest position then counts as
    1.
    """
    rows = _of(metrics, metric)
    rows = rows[rows["position"].astype(str) != "all"]
    index = pd.to_numeric(rows["position"])
    return rows.assign(depth=pd.to_numeric(rows["depth"]).fillna(index / max(index.max(), 1)))


def overall(metrics: pd.DataFrame, metric: str = "") -> pd.DataFrame:
    """Rows of one metric over all gold positions (position `all`); see :func:`at_positions` for the
    metric."""
    rows = _of(metrics, metric)
    return rows[rows["position"].astype(str) == "all"]


@styled
def accuracy_by_position(metrics: pd.DataFrame, chance: float | None = None) -> Figure:
    """The task's score over the gold position, one line per method with its 95 % band.

    Args:
        metrics: metrics.csv rows; model, method, task, position, depth, metric, value, ci_low, ci_high, seed
            are used. Where model, task or seed vary, each combination is its own line.
        chance: accuracy of guessing (0..1), drawn as a dotted line.

    Returns:
        A figure of single-column width; x is depth in % of the context, y the score in %.

    Raises:
        UserError: a column is missing, or no score is given per position.
    """
    need(metrics, "metrics", "model", "method", "position", "depth", "metric", "value", "ci_low", "ci_high")
    rows = at_positions(metrics)
    need(rows, "metrics (score per position)", "value")
    by = ["method", *(c for c in ("model", "task", "seed") if c in rows and rows[c].nunique() > 1)]
    figure = new_figure(COLUMN, 2.5)
    axes = figure.subplots()
    counts = {True: 0, False: 0}
    for key, line in rows.groupby(by, sort=False):
        unmodified = key[0] == UNMODIFIED
        method = "unmodified" if unmodified else str(key[0])
        label = ", ".join([method, *(f"{c} {v}" for c, v in zip(by[1:], key[1:], strict=True))])
        _band(axes, line, label, line_style(counts[unmodified], unmodified))
        counts[unmodified] += 1
    if chance is not None:
        axes.axhline(100 * chance, color="0.5", linestyle=":", linewidth=1, label="chance")
    percent_axes(axes, f"{metric_name(metrics)} (%)")
    legend_below(figure, axes)
    return figure


@styled
def by_subset(subsets: pd.DataFrame) -> Figure:
    """The task's score on every subset, then on every average: a point per method with its 95 % interval.

    Args:
        subsets: subsets.csv rows of one model and task.

    Returns:
        A double-column figure, as high as the number of subsets asks for; x is the score in %.

    Raises:
        UserError: a column is missing, or several models or tasks are mixed.
    """
    need(
        subsets,
        "subsets",
        "model",
        "method",
        "task",
        "subset",
        "kind",
        "metric",
        "value",
        "ci_low",
        "ci_high",
    )
    need_one(subsets, "subsets", "model", "task")
    rows = _of(subsets, "")
    names = list(dict.fromkeys(zip(rows["kind"], rows["subset"], strict=True)))
    methods = sorted(rows["method"].unique(), key=lambda m: m != UNMODIFIED)
    figure = new_figure(PAGE, 0.9 + 0.16 * len(names))
    axes = figure.subplots()
    for index, method in enumerate(methods):
        here = rows[rows["method"] == method].set_index(["kind", "subset"]).reindex(names)
        value, low, high = (
            100 * here[column].to_numpy(dtype=float) for column in ("value", "ci_low", "ci_high")
        )
        y = np.arange(len(names)) + 0.3 * (index - (len(methods) - 1) / 2)
        style = line_style(max(index - (UNMODIFIED in methods), 0), method == UNMODIFIED) | {
            "linestyle": "none"
        }
        error = np.clip([value - low, high - value], 0, None)
        axes.errorbar(
            value,
            y,
            xerr=error,
            label="unmodified" if method == UNMODIFIED else method,
            elinewidth=0.8,
            **style,
        )
    first = sum(kind == "subset" for kind, _ in names)
    if first < len(names):
        axes.axhline(first - 0.5, color="0.5", linewidth=0.6)
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for _, name in names])
    axes.set(xlabel=f"{metric_name(subsets)} (%)", ylim=(len(names) - 0.5, -0.5), xlim=(-3, 103))
    legend_below(figure, axes)
    return figure


def legend_below(figure: Figure, axes: Axes) -> None:
    """Legend under the axes, in as many columns as the longest label allows."""
    handles, labels = axes.get_legend_handles_labels()
    room = figure.get_figwidth() / (0.06 * max(map(len, labels)) + 0.45)
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(4, len(labels), int(room))))


def gold_attention(attention: pd.DataFrame) -> pd.DataFrame:
    """Attention to the gold pair alone (pair = gold_position), with the `depth` (0..1) of the gold pair."""
    need(attention, "attention", "method", "gold_position", "layer", "pair", "attention")
    pairs = int(attention["pair"].max()) + 1
    rows = attention[attention["pair"] == attention["gold_position"]]
    need(rows, "attention (rows with pair = gold_position)", "attention")
    return rows.assign(depth=rows["gold_position"] / max(pairs - 1, 1))


def strongest_layer(gold: pd.DataFrame) -> int:
    """The layer (0-based) with the largest mean attention to the gold pair in the unmodified model, if it is
    there."""
    unmodified = gold[gold["method"] == UNMODIFIED]
    layer: Any = (gold if unmodified.empty else unmodified).groupby("layer")["attention"].mean().idxmax()
    return int(layer)


def layer_title(layers: Sequence[int], chosen: bool) -> str:
    """Which layers a panel averages, and that posbench chose them where it did."""
    listed = (
        ", ".join(map(str, layers))
        if len(layers) < 8
        else f"{layers[0]}, {layers[1]}, ... {layers[-1]} ({len(layers)})"
    )
    name = f"layer {layers[0]}" if len(layers) == 1 else f"mean of layers {listed}"
    return f"{name} (strongest when unmodified)" if chosen else name


@styled
def attention_by_position(attention: pd.DataFrame, layers: Sequence[int] | None = None) -> Figure:
    """Attention of the last prompt token to the gold pair: as curves, and as the change in every layer.

    Args:
        attention: attention.csv rows of one model and task (method, gold_position, layer, pair, attention),
            attention being the mean weight per token of the pair over heads and examples.
        layers: 0-based layers to average in the left panel; by default the one layer whose attention to the
            gold pair is largest in the unmodified model. The title names it.

    Returns:
        A double-column figure. Left: one line per method. Right, one panel per method: layer x gold position,
        method minus unmodified, a dash in each cell that went down. With one method only, its own attention.

    Raises:
        UserError: a column is missing, no row has pair = gold_position, or several models or tasks are mixed.
    """
    gold = gold_attention(attention)
    need_one(gold, "attention", "model", "task")
    shown = [strongest_layer(gold)] if layers is None else list(layers)
    grids = {
        str(method): rows.pivot_table(index="layer", columns="depth", values="attention")
        for method, rows in gold.groupby("method", sort=False)
    }
    base = grids.pop(UNMODIFIED, None) if len(grids) > 1 else None
    figure = new_figure(PAGE, 2.6)
    left, *others = np.atleast_1d(figure.subplots(1, 1 + len(grids)))
    picked = gold[gold["layer"].isin(shown)]
    need(picked, f"attention (layers {shown})", "attention")
    index = 0
    for method, rows in picked.groupby("method", sort=False):
        curve = rows.groupby("depth")["attention"].mean()
        unmodified = method == UNMODIFIED
        label, style = ("unmodified", line_style(0, True)) if unmodified else (str(method), line_style(index))
        left.plot(100 * curve.index, curve.to_numpy(), label=label, **style)
        index += not unmodified
    left.set(xlabel=DEPTH_LABEL, ylabel=ATTENTION_LABEL, title=layer_title(shown, layers is None))
    from_zero(left)
    left.legend(
        *left.get_legend_handles_labels(), loc="lower left", bbox_to_anchor=(0, 1.1), ncols=2, borderaxespad=0
    )
    for axes, (method, grid) in zip(others, grids.items(), strict=True):
        _heat(figure, axes, grid if base is None else grid - base, method, change=base is not None)
    return figure


def _heat(figure: Figure, axes: Axes, grid: pd.DataFrame, method: str, change: bool) -> None:
    """Heat map of layer (rows) x depth (columns); a change is drawn around 0 with falling cells marked by a
    dash."""
    values = grid.to_numpy(dtype=float)
    top = float(np.nanmax(np.abs(values))) or 1.0
    cmap = "PuOr_r" if change else "viridis"
    image = axes.imshow(
        values, cmap=cmap, vmin=-top if change else 0, vmax=top, aspect="auto", origin="lower"
    )
    if change:
        rows, columns = np.nonzero(values < -1e-3 * top)  # rounding is no change
        axes.plot(columns, rows, linestyle="none", marker="_", color="black", markersize=4)
    step = max(1, len(grid.index) // 8)
    axes.set_yticks(range(0, len(grid.index), step), [str(layer) for layer in grid.index[::step]])
    step = max(1, len(grid.columns) // 6)
    axes.set_xticks(
        range(0, len(grid.columns), step), [f"{100 * depth:.0f}" for depth in grid.columns[::step]]
    )
    name = "unmodified" if method == UNMODIFIED else method
    axes.set(
        xlabel=DEPTH_LABEL, ylabel="layer", title=f"{name}\nminus unmodified (dash: less)" if change else name
    )
    bar = figure.colorbar(image, ax=axes, label="attention to the gold item" + (", change" if change else ""))
    bar.ax.ticklabel_format(axis="y", scilimits=(-3, 3))


@styled
def channel_curves(channels: pd.DataFrame, channel: int | str) -> Figure:
    """Value of one channel over the token position, one line per layer, one panel per site.

    Args:
        channels: channels.csv rows (channel, site, layer, position in tokens, value as a mean over random
            strings, and its sliding mean, which the search's filter sees).
        channel: the channel to draw.

    Returns:
        A figure; layers run from dark (first) to light (last). If the first token's values dwarf all others,
        the axis is fitted to the others and the panel says so.

    Raises:
        UserError: a column is missing or the channel has no row.
    """
    need(channels, "channels", "channel", "site", "layer", "position", "value", "sliding_mean")
    rows = channels[channels["channel"].astype(str) == str(channel)]
    need(rows, f"channels (channel {channel})", "value")
    layers = sorted(rows["layer"].unique())
    colours = ListedColormap(colormaps["viridis"](np.linspace(0, 0.9, len(layers))))
    sites = list(rows["site"].unique())
    figure = new_figure(COLUMN if len(sites) == 1 else PAGE, 2.4)
    panels = np.atleast_1d(figure.subplots(1, len(sites)))
    for axes, site in zip(panels, sites, strict=True):
        here = rows[rows["site"] == site]
        for layer, line in here.groupby("layer"):
            line = line.sort_values("position")
            dash = ("-", "--", "-.", ":")[layers.index(layer) % 4]
            style = {"color": colours(layers.index(layer)), "linestyle": dash}
            if line["sliding_mean"].notna().any():
                axes.plot(line["position"], line["value"], color=style["color"], linewidth=0.4, alpha=0.5)
                axes.plot(line["position"], line["sliding_mean"], **style)
            else:
                axes.plot(line["position"], line["value"], **style)
        axes.set(
            xlabel="token position",
            ylabel=f"mean value of channel {channel}",
            title=str(site).replace("_", " "),
        )
        first, rest = here.loc[here["position"] == 0, "value"], here.loc[here["position"] != 0, "value"]
        if len(first) and len(rest) and first.abs().max() > 5 * rest.abs().max() > 0:
            room = 0.05 * (rest.max() - rest.min()) + 1e-12
            axes.set_ylim(rest.min() - room, rest.max() + room)
            note = f"token 0 is off the scale: {first.min():.3g} to {first.max():.3g}"
            axes.set_title(f"{axes.get_title()}\n({note})")
    norm = BoundaryNorm(np.arange(len(layers) + 1) - 0.5, len(layers))
    ticks = range(0, len(layers), max(1, len(layers) // 8))
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=list(panels), label="layer", ticks=list(ticks))
    bar.ax.set_yticklabels([str(layers[tick]) for tick in ticks])
    bar.minorticks_off()
    return figure


def candidate_label(row: pd.Series) -> str:
    """`ch 33 x 0, layers 1-3` for a search.csv row."""
    return f"ch {row['channel']} x {float(row['factor']):g}, layers {row['layer_first']}-{row['layer_last']}"


@styled
def candidate_losses(search: pd.DataFrame, most: int = 30) -> Figure:
    """Loss of the best candidates of a search, lowest on top; the selected one is a filled diamond.

    Args:
        search: search.csv rows (channel, factor, layer_first, layer_last, loss in nats per answer token,
            loss_unmodified, selected).
        most: how many candidates to draw at most; a selected one is always among them.

    Returns:
        A single-column dot plot whose dashed line is the unmodified model.

    Raises:
        UserError: a column is missing or there is no row.
    """
    need(
        search,
        "search",
        "channel",
        "factor",
        "layer_first",
        "layer_last",
        "loss",
        "loss_unmodified",
        "selected",
    )
    search = search.assign(won=search["selected"].astype(str).str.lower().isin(("true", "1"))).sort_values(
        "loss"
    )
    best = search[(np.arange(len(search)) < most) | search["won"]]
    figure = new_figure(COLUMN, 0.9 + 0.125 * max(len(best), 4))
    axes = figure.subplots()
    row = np.arange(len(best))
    for won, colour, marker, label in (
        (False, COLOURS[0], "o", "candidate"),
        (True, COLOURS[1], "D", "selected"),
    ):
        mask = (best["won"] == won).to_numpy()
        if mask.any():
            style: dict[str, Any] = {
                "marker": marker,
                "color": colour,
                "markerfacecolor": colour if won else "white",
            }
            axes.plot(best["loss"][mask], row[mask], linestyle="none", label=label, **style)
    for value in best["loss_unmodified"].unique():
        axes.axvline(value, color="black", linestyle=(0, (4, 2)), linewidth=1, label="unmodified")
    axes.set_yticks(row, [candidate_label(candidate) for _, candidate in best.iterrows()])
    axes.set(ylim=(len(best) - 0.4, -0.6), xlabel="loss (nats per answer token)")
    shown = min(most, len(search))
    title = f"best {shown} of {len(search)} candidates" + (
        ", and the selected one" if len(best) > shown else ""
    )
    figure.suptitle(title, fontsize=STYLE["axes.titlesize"])
    axes.grid(axis="y", color="0.9", linewidth=0.5)
    axes.set_axisbelow(True)
    legend_below(figure, axes)
    return figure


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
