"""Figures of a search for one scale per layer: its course, and what it found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from posbench.plots import base as plot
from posbench.stats.frames import need

POSITIONS = ("beginning", "middle", "end")


@plot.styled
def convergence(generations: pd.DataFrame) -> Figure:
    """Best and mean fitness of the parents per generation.

    Args:
        generations: generations.csv rows: generation, best, mean, unmodified (fitness, 0..1). Several
            searches where a column ``search`` names them: then one line each, the best only.

    Returns:
        A single-column figure; y is the fitness in %.

    Raises:
        UserError: a column is missing or there is no row.
    """
    need(generations, "generations", "generation", "best", "mean", "unmodified")
    figure = plot.new_figure(plot.COLUMN, 2.7)
    axes = figure.subplots()
    if "search" in generations:
        for index, (name, rows) in enumerate(generations.groupby("search", sort=False)):
            curve = rows.groupby("generation")["best"].mean()
            axes.plot(curve.index, 100 * curve, label=str(name), **plot.line_style(index))
    else:
        for index, (column, label) in enumerate((("best", "best"), ("mean", "mean of the parents"))):
            axes.plot(
                generations["generation"], 100 * generations[column], label=label, **plot.line_style(index)
            )
    for value in generations["unmodified"].dropna().unique():
        axes.axhline(100 * value, color="black", linestyle=(0, (4, 2)), linewidth=1, label="unmodified")
    axes.set(xlabel="generation", ylabel="fitness (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    plot.legend_below(figure, axes)
    return figure


@plot.styled
def curve_figure(parts: pd.DataFrame, search: pd.DataFrame) -> Figure:
    """What was found: control points and curve, the scale of every layer, and the accuracy that it gives
    (LPES, Figure 2).

    Args:
        parts: curve.csv rows: part (``point``, ``curve``, ``layer``), x, y.
        search: search.csv rows of the candidates: beginning, middle, end, fitness (0..1), unmodified,
            selected.

    Returns:
        A double-column figure of three panels; without control points the left one is left out.

    Raises:
        UserError: a column is missing or there is no row.
    """
    need(parts, "curve", "part", "x", "y")
    need(search, "search", *POSITIONS, "fitness", "unmodified", "selected")
    points, drawn, layers = (parts[parts["part"] == part] for part in ("point", "curve", "layer"))
    figure = plot.new_figure(plot.PAGE, 2.2)
    panels = list(figure.subplots(1, 3 if len(points) else 2))
    if len(points):
        axes = panels.pop(0)
        axes.plot(drawn["x"], drawn["y"], color=plot.COLOURS[0], label="curve")
        axes.plot(
            points["x"], points["y"], color=plot.COLOURS[1], marker="s", linestyle=":", label="control points"
        )
        axes.set(xlabel="x (layers)", ylabel="y (scale)")
        axes.legend()
    axes, fitness = panels
    axes.plot(layers["x"], layers["y"], color=plot.COLOURS[0], marker="o")
    axes.axhline(1, color="black", linestyle=(0, (4, 2)), linewidth=1)
    axes.set(xlabel="layer", ylabel="scale")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    columns, width = (*POSITIONS, "fitness"), 0.38
    for index, (column, label) in enumerate((("unmodified", "unmodified"), ("selected", "found"))):
        row = search[search[column]].iloc[0]
        values = [100 * float(row[name]) for name in columns]
        style = (
            {"color": "white", "edgecolor": "black", "linestyle": "--"}
            if not index
            else {"color": plot.COLOURS[0]}
        )
        fitness.bar(np.arange(len(columns)) + (index - 0.5) * width, values, width, label=label, **style)
    fitness.set_xticks(range(len(columns)), columns)
    fitness.set(ylabel="calibration accuracy (%)", ylim=(0, 103))
    fitness.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    return figure


@plot.styled
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
    need(channels, "channels", "channel", "site", "layer", "token", "value", "sliding_mean")
    rows = channels[channels["channel"].astype(str) == str(channel)]
    need(rows, f"channels (channel {channel})", "value")
    colours = plot.LayerColours(sorted(rows["layer"].unique()))
    sites = list(rows["site"].unique())
    figure = plot.new_figure(plot.COLUMN if len(sites) == 1 else plot.PAGE, 2.4)
    panels = np.atleast_1d(figure.subplots(1, len(sites)))
    for axes, site in zip(panels, sites, strict=True):
        here = rows[rows["site"] == site]
        for layer, line in here.groupby("layer"):
            line = line.sort_values("token")
            style = colours.style(layer)
            if line["sliding_mean"].notna().any():
                axes.plot(line["token"], line["value"], color=style["color"], linewidth=0.4, alpha=0.5)
                axes.plot(line["token"], line["sliding_mean"], **style)
            else:
                axes.plot(line["token"], line["value"], **style)
        axes.set(
            xlabel="token position",
            ylabel=f"mean value of channel {channel}",
            title=str(site).replace("_", " "),
        )
        first, rest = here.loc[here["token"] == 0, "value"], here.loc[here["token"] != 0, "value"]
        if len(first) and len(rest) and first.abs().max() > 5 * rest.abs().max() > 0:
            room = 0.05 * (rest.max() - rest.min()) + 1e-12
            axes.set_ylim(rest.min() - room, rest.max() + room)
            note = f"token 0 is off the scale: {first.min():.3g} to {first.max():.3g}"
            axes.set_title(f"{axes.get_title()}\n({note})")
    colours.bar(figure, panels)
    return figure


def candidate_label(row: pd.Series) -> str:
    """`ch 33 x 0, layers 1-3` for a search.csv row."""
    return f"ch {row['channel']} x {float(row['factor']):g}, layers {row['layer_first']}-{row['layer_last']}"


@plot.styled
def candidate_losses_figure(search: pd.DataFrame, most: int = 30) -> Figure:
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
    search = search.assign(won=search["selected"]).sort_values("loss")
    best = search[(np.arange(len(search)) < most) | search["won"]]
    figure = plot.new_figure(plot.COLUMN, 0.9 + 0.125 * max(len(best), 4))
    axes = figure.subplots()
    row = np.arange(len(best))
    for won, colour, marker, label in (
        (False, plot.COLOURS[0], "o", "candidate"),
        (True, plot.COLOURS[1], "D", "selected"),
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
    figure.suptitle(title, fontsize=plot.STYLE["axes.titlesize"])
    axes.grid(axis="y", color="0.9", linewidth=0.5)
    axes.set_axisbelow(True)
    plot.legend_below(figure, axes)
    return figure
