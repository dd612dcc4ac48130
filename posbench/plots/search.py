"""Figures of searches: their course, and their result. A missing column raises a `UserError`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from posbench.late import Axes, Figure, pd
from posbench.plots import base as plot
from posbench.stats.frames import need_columns

POSITIONS = ("beginning", "middle", "end")
MAX_CHANNEL_PANELS = 24
"""Most panels of a figure of a channel: of a deep model it draws some of the layers."""
LARGEST_RISE = 1.5
"""Rise of the loss that a figure of bases shows, over the largest fall."""
MAX_CANDIDATES = 30
"""Most candidates that a figure draws in addition to the selected one."""


@plot.styled
def convergence_figure(generations: pd.DataFrame, n: Iterable[float] = ()) -> Figure:
    """Best and mean fitness of the parents per generation, in %.

    Args:
        generations: Rows of generations.csv (fitness in 0..1). Where a column
            ``search`` names several searches, only the best fitness of each is drawn.
        n: Prompts behind a fitness.
    """
    need_columns(generations, "generations", "generation", "best", "mean", "unmodified")
    figure, axes = plot.new_figure(plot.COLUMN, 2.7, n=n)
    rows = generations.set_index("generation")
    if "search" in rows:
        searches = rows.groupby("search", sort=False)["best"]
        lines = {str(name): best.groupby(level=0).mean() for name, best in searches}
    else:
        lines = {"best": rows["best"], "mean of the parents": rows["mean"]}
    for index, (label, line) in enumerate(lines.items()):
        axes.plot(line.index, 100 * line, label=label, **plot.line_style(index))
    for value in generations["unmodified"].dropna().unique():
        axes.axhline(100 * value, label="unmodified", **plot.UNMODIFIED_LINE)
    plot.percent_axes(axes, "fitness (%)", "generation")
    axes.locator_params("x", integer=True)
    plot.add_legend_below(figure)
    return figure


@plot.styled
def bases_figure(table: pd.DataFrame) -> Figure:
    """Fall of the loss under RoPE bases against the model's own; a line for each model where there are several.

    Args:
        table: Rows of search.csv: base, fall with its interval in nats per answer token, n, and ``own_base``; ``model``
            where there are several.
    """
    need_columns(table, "search", "base", "own_base", "fall", "ci_low", "ci_high")
    models = table["model"] if "model" in table else pd.Series("", index=table.index)
    # Each line more in the legend takes height from the axes.
    height = 2.6 + 0.16 * max(models.nunique() - 3, 0)
    figure, axes = plot.new_figure(plot.COLUMN, height, n=table["n"])
    ratios = table["base"] / table["own_base"]
    for index, (model, rows) in enumerate(table.groupby(models, sort=False)):
        falls = rows["fall"].to_numpy()
        ends = np.nan_to_num(np.abs(rows[["ci_low", "ci_high"]].to_numpy().T - falls))
        axes.errorbar(
            ratios[rows.index],
            falls,
            yerr=ends,
            label=str(model) or None,
            capsize=1.5,
            elinewidth=0.7,
            **plot.line_style(index),
        )
    axes.axhline(0, label="own base", **plot.UNMODIFIED_LINE)
    # Bases far below the own one break a model: they would take the axis.
    lowest = -LARGEST_RISE * max(table["fall"].max(), 0.1)
    axes.set_ylim(bottom=np.nanmax([table["ci_low"].min(), lowest]))
    axes.set_xscale("log")
    ticks: list[float] = []
    for tick in sorted({float(f"{ratio:.3g}") for ratio in ratios}):
        # Nearer ones would touch.
        if not ticks or tick >= 1.8 * ticks[-1]:
            ticks.append(tick)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("RoPE base over the model's own")
    axes.set_ylabel("fall of the loss (nats per token)")
    plot.add_legend_below(figure)
    return figure


@plot.styled
def curve_figure(parts: pd.DataFrame, search: pd.DataFrame) -> Figure:
    """Control points and curve, if any; the scale of every layer; its accuracy.

    Source: LPES, Figure 2.

    Args:
        parts: Rows of curve.csv: part (``point``, ``curve``, ``layer``), x, y.
        search: Rows of search.csv: beginning, middle, end, fitness (0..1), unmodified,
            selected.
    """
    need_columns(parts, "curve", "part", "x", "y")
    need_columns(search, "search", *POSITIONS, "fitness", "unmodified", "selected")
    points = parts[parts["part"] == "point"]
    curve = parts[parts["part"] == "curve"]
    layers = parts[parts["part"] == "layer"]
    unmodified = search[search["unmodified"]]
    selected = search[search["selected"]]
    counts = pd.concat([unmodified, selected]).get("scored", ())
    num_panels = 3 if len(points) else 2
    figure, panels = plot.new_figure(plot.PAGE, 2.3, 1, num_panels, n=counts)
    if len(points):
        axes = panels[0]
        axes.plot(curve["x"], curve["y"], color=plot.COLOURS[1], label="curve")
        axes.plot(
            points["x"], points["y"], "s:", color=plot.COLOURS[2], label="its points"
        )
        axes.set(xlabel="x (layers)", ylabel="y (scale)")
    scales, accuracy = panels[-2:]
    scales.plot(layers["x"], layers["y"], color=plot.BLUE, marker="o", label="found")
    scales.axhline(1, label="unmodified", **plot.UNMODIFIED_LINE)
    scales.set(xlabel="layer", ylabel="scale")
    scales.locator_params("x", integer=True)
    columns = [*POSITIONS, "fitness"]
    x = np.arange(len(columns))
    width = 0.38
    outlined = {"color": "white", "edgecolor": plot.BLACK, "linestyle": "--"}
    accuracy.bar(x - 0.5 * width, _percent(unmodified, columns), width, **outlined)
    accuracy.bar(x + 0.5 * width, _percent(selected, columns), width, color=plot.BLUE)
    plot.percent_axes(accuracy, "calibration accuracy (%)", "")
    accuracy.set_xticks(x, columns)
    plot.add_legend_below(figure)
    return figure


def _percent(rows: pd.DataFrame, columns: list[str]) -> pd.Series:
    """Shares of the first row in %."""
    return 100 * rows[columns].iloc[0].astype(float)


@plot.styled
def channel_figure(
    channels: pd.DataFrame, channel: int | str, n: Iterable[float] = ()
) -> Figure:
    """Value of one channel over the token position, a panel for each site and layer.

    Of a deep model it draws every second, third, ... layer, and its title says so. Each panel has a y axis of its own.
    Where the first token's value dwarfs all others, the axis is fitted to the others, and its value is below the title
    in brackets.

    Args:
        channels: Rows of channels.csv: channel, site, layer, token, value (mean over
            random strings) and its sliding mean.
        channel: The channel.
        n: Number of random strings.
    """
    columns = ("channel", "site", "layer", "token", "value", "sliding_mean")
    need_columns(channels, "channels", *columns)
    rows = channels[channels["channel"].astype(str) == str(channel)]
    need_columns(rows, f"channels (channel {channel})", "value")
    layers_of = {
        str(site): list(of_site.groupby("layer"))
        for site, of_site in rows.groupby("site", sort=False)
    }
    most_layers = max(map(len, layers_of.values()))
    step = math.ceil(most_layers * len(layers_of) / MAX_CHANNEL_PANELS)
    layers_of = {site: layers[::step] for site, layers in layers_of.items()}
    across = plot.layers_per_row(max(map(len, layers_of.values())))
    rows_of = {site: math.ceil(len(ls) / across) for site, ls in layers_of.items()}
    num_panels = across * sum(rows_of.values())
    figure, panels = plot.new_panels(num_panels, across, 1.15, n=n)
    for site, layers in layers_of.items():
        num_cells = across * rows_of[site]
        of_site = panels[: len(layers)]
        for axes in panels[len(layers) : num_cells]:
            axes.remove()
        panels = panels[num_cells:]
        for axes, (layer, line) in zip(of_site, layers, strict=True):
            _draw_channel(axes, line.sort_values("token"), f"layer {layer}")
            axes.locator_params("x", nbins=3 if across < plot.MAX_PANELS_PER_ROW else 1)
        for axes in of_site[::across]:
            axes.set_ylabel(f"channel {channel},\n{site.replace('_', ' ')}")
    # The last site is at the bottom of the figure.
    plot.label_bottom_row(of_site, across)
    if step > 1:
        figure.suptitle(f"one layer of {step}; the others are left out")
    plot.add_legend_below(figure)
    return figure


def _draw_channel(axes: Axes, line: pd.DataFrame, title: str) -> None:
    """Draw one layer's values, thin, and their sliding mean where it is known."""
    tokens = line["token"]
    thin: dict[str, Any] = {}
    has_mean = line["sliding_mean"].notna().any()
    if has_mean:
        thin = {"linewidth": 0.5, "alpha": 0.5}
    axes.plot(tokens, line["value"], color=plot.BLUE, label="mean over strings", **thin)
    if has_mean:
        axes.plot(tokens, line["sliding_mean"], color=plot.BLUE, label="sliding mean")
    first = line.loc[tokens == 0, "value"]
    later = line.loc[tokens != 0, "value"]
    if len(first) and len(later) and first.abs().max() > 5 * later.abs().max() > 0:
        margin = 0.05 * (later.max() - later.min()) + 1e-12
        axes.set_ylim(later.min() - margin, later.max() + margin)
        title += f"\n({first.max():.3g})"
    axes.set_title(title)
    axes.locator_params("y", nbins=3)


def candidate_label(row: pd.Series) -> str:
    """`ch 33 x 0, layers 1-3` for a search.csv row."""
    layers = f"{row['layer_first']}-{row['layer_last']}"
    return f"ch {row['channel']} x {float(row['factor']):g}, layers {layers}"


@plot.styled
def candidate_losses_figure(search: pd.DataFrame) -> Figure:
    """Loss of the best candidates, lowest on top; filled: selected, line: unmodified.

    A selected one is always among them.

    Args:
        search: Rows of search.csv: channel, factor, layer_first, layer_last, loss (nats
            per answer token), loss_unmodified, selected.
    """
    names = ("channel", "factor", "layer_first", "layer_last")
    need_columns(search, "search", *names, "loss", "loss_unmodified", "selected")
    search = search.sort_values("loss")
    candidates = search[(np.arange(len(search)) < MAX_CANDIDATES) | search["selected"]]
    height = 0.9 + 0.125 * max(len(candidates), 4)
    figure, axes = plot.new_figure(plot.COLUMN, height, n=search.get("n", ()))
    y = np.arange(len(candidates))
    is_selected = candidates["selected"].to_numpy(dtype=bool)
    _draw_losses(axes, candidates["loss"], y, ~is_selected, "white", "candidate")
    _draw_losses(axes, candidates["loss"], y, is_selected, plot.BLUE, "selected")
    for value in candidates["loss_unmodified"].unique():
        axes.axvline(value, label="unmodified", **plot.UNMODIFIED_LINE)
    axes.set_yticks(y, [candidate_label(row) for _, row in candidates.iterrows()])
    axes.set(ylim=(len(candidates) - 0.4, -0.6), xlabel="loss (nats per answer token)")
    num_best = min(MAX_CANDIDATES, len(search))
    title = f"best {num_best} of {len(search)} candidates"
    if len(candidates) > num_best:
        title += ", and the selected one"
    figure.suptitle(title, fontsize=plot.STYLE["axes.titlesize"])
    axes.grid(axis="y", color=plot.SHADE, linewidth=0.5)
    axes.set_axisbelow(True)
    plot.add_legend_below(figure)
    return figure


def _draw_losses(
    axes: Axes, losses: pd.Series, y: Any, mask: Any, fill: str, label: str
) -> None:
    """Draw a point for each candidate in the mask; nothing if there is none.

    Args:
        axes: Where they are drawn.
        losses: Loss of each candidate.
        y: Place of each on the y axis, shape (candidates,).
        mask: Which are drawn, bool, shape (candidates,).
        fill: Colour inside a point.
        label: Their text in a legend.
    """
    if mask.any():
        axes.plot(
            losses[mask],
            y[mask],
            "o",
            color=plot.BLUE,
            markerfacecolor=fill,
            label=label,
        )
