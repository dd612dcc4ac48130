"""Figures of searches: how they went, and what they found. A missing column raises a `UserError`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from posbench.late import Axes, Figure, pd
from posbench.plots import base as plot
from posbench.stats.frames import need

POSITIONS = ("beginning", "middle", "end")


@plot.styled
def convergence(generations: pd.DataFrame, n: Iterable[float] = ()) -> Figure:
    """Best and mean fitness of the parents per generation, in %; where a column ``search`` names several
    searches, one line each, the best only. From generations.csv rows (fitness in 0..1), on ``n`` prompts."""
    need(generations, "generations", "generation", "best", "mean", "unmodified")
    figure, axes = plot.new_figure(plot.COLUMN, 2.7, n=n)
    rows = generations.set_index("generation")
    lines = {"best": rows["best"], "mean of the parents": rows["mean"]}
    if "search" in rows:
        searches = rows.groupby("search", sort=False)["best"]
        lines = {str(name): best.groupby(level=0).mean() for name, best in searches}
    for index, (label, line) in enumerate(lines.items()):
        axes.plot(line.index, 100 * line, label=label, **plot.line_style(index))
    for value in generations["unmodified"].dropna().unique():
        axes.axhline(100 * value, label="unmodified", **plot.LEVEL)
    plot.percent_axes(axes, "fitness (%)", "generation")
    axes.locator_params("x", integer=True)
    plot.legend_below(figure)
    return figure


@plot.styled
def curve_figure(parts: pd.DataFrame, search: pd.DataFrame) -> Figure:
    """Control points and curve, where there are any; the scale of every layer; the accuracy that it gives.

    From rows of curve.csv: part (``point``, ``curve``, ``layer``), x, y; and of search.csv: beginning,
    middle, end, fitness (0..1), unmodified, selected. Source: LPES, Figure 2.
    """
    need(parts, "curve", "part", "x", "y")
    need(search, "search", *POSITIONS, "fitness", "unmodified", "selected")
    points, drawn, layers = (
        parts[parts["part"] == part] for part in ("point", "curve", "layer")
    )
    ends = [search[search[column]] for column in ("unmodified", "selected")]
    counts = pd.concat(ends).get("scored", ())
    columns = [*POSITIONS, "fitness"]
    shape = (1, 3 if len(points) else 2)
    figure, (*more, left, fitness) = plot.new_figure(plot.PAGE, 2.3, *shape, n=counts)
    for axes in more:
        axes.plot(drawn["x"], drawn["y"], color=plot.COLOURS[1], label="curve")
        axes.plot(
            points["x"], points["y"], "s:", color=plot.COLOURS[2], label="its points"
        )
        axes.set(xlabel="x (layers)", ylabel="y (scale)")
    left.plot(layers["x"], layers["y"], color=plot.BLUE, marker="o", label="found")
    left.axhline(1, label="unmodified", **plot.LEVEL)
    left.set(xlabel="layer", ylabel="scale")
    left.locator_params("x", integer=True)
    places = np.arange(len(columns))
    width = 0.38
    outlined = dict(color="white", edgecolor=plot.BLACK, linestyle="--")
    for rows, side, style in zip(
        ends, (-0.5, 0.5), (outlined, dict(color=plot.BLUE)), strict=True
    ):
        values = 100 * rows[columns].iloc[0].astype(float)
        fitness.bar(places + side * width, values, width, **style)
    plot.percent_axes(fitness, "calibration accuracy (%)", "")
    fitness.set_xticks(places, columns)
    plot.legend_below(figure)
    return figure


@plot.styled
def channel_curves(
    channels: pd.DataFrame, channel: int | str, n: Iterable[float] = ()
) -> Figure:
    """Value of one channel over the token position, a panel with an axis of its own for each site and layer.

    Where the first token's value dwarfs all others, the axis is fitted to the others and the title says so.
    From channels.csv rows: channel, site, layer, token, value (mean over ``n`` random strings) and its
    sliding mean.
    """
    need(
        channels,
        "channels",
        "channel",
        "site",
        "layer",
        "token",
        "value",
        "sliding_mean",
    )
    rows = channels[channels["channel"].astype(str) == str(channel)]
    need(rows, f"channels (channel {channel})", "value")
    sites = {
        str(site): [*part.groupby("layer")]
        for site, part in rows.groupby("site", sort=False)
    }
    across = plot.layers_across(max(map(len, sites.values())))
    cells = {site: -(-len(parts) // across) * across for site, parts in sites.items()}
    figure, panels = plot.new_panels(sum(cells.values()), across, 1.15, n=n)
    for site, parts in sites.items():
        own = panels[: cells[site]]
        panels = panels[cells[site] :]
        for axes in own[len(parts) :]:
            axes.remove()
        for axes, (layer, line) in zip(own, parts, strict=False):
            _channel_line(axes, line.sort_values("token"), f"layer {layer}")
            axes.locator_params("x", nbins=3 if across < 8 else 1)
        for axes in own[: len(parts) : across]:
            axes.set_ylabel(f"channel {channel},\n{site.replace('_', ' ')}")
    for axes in own[max(len(parts) - across, 0) : len(parts)]:
        axes.set_xlabel(plot.TOKEN)
    plot.legend_below(figure)
    return figure


def _channel_line(axes: Axes, line: pd.DataFrame, title: str) -> None:
    """One layer's values, thin, and their sliding mean where it is known."""
    smooth = line["sliding_mean"].notna().any()
    thin: dict[str, Any] = {"linewidth": 0.5, "alpha": 0.5} if smooth else {}
    axes.plot(
        line["token"], line["value"], color=plot.BLUE, label="mean over strings", **thin
    )
    if smooth:
        axes.plot(
            line["token"], line["sliding_mean"], color=plot.BLUE, label="sliding mean"
        )
    first = line.loc[line["token"] == 0, "value"]
    rest = line.loc[line["token"] != 0, "value"]
    if len(first) and len(rest) and first.abs().max() > 5 * rest.abs().max() > 0:
        room = 0.05 * (rest.max() - rest.min()) + 1e-12
        axes.set_ylim(rest.min() - room, rest.max() + room)
        title += f"\n(token 0: {first.max():.3g})"
    axes.set_title(title)
    axes.locator_params("y", nbins=3)


def candidate_label(row: pd.Series) -> str:
    """`ch 33 x 0, layers 1-3` for a search.csv row."""
    return f"ch {row['channel']} x {float(row['factor']):g}, layers {row['layer_first']}-{row['layer_last']}"


@plot.styled
def candidate_losses_figure(search: pd.DataFrame, most: int = 30) -> Figure:
    """Loss of the best candidates, lowest on top; the filled one is selected, the line is unmodified.

    From search.csv rows: channel, factor, layer_first, layer_last, loss (nats per answer token),
    loss_unmodified, selected. A selected candidate is always among the ``most`` drawn.
    """
    front = ("channel", "factor", "layer_first", "layer_last")
    need(search, "search", *front, "loss", "loss_unmodified", "selected")
    search = search.sort_values("loss")
    best = search[(np.arange(len(search)) < most) | search["selected"]]
    height = 0.9 + 0.125 * max(len(best), 4)
    figure, axes = plot.new_figure(plot.COLUMN, height, n=search.get("n", ()))
    row = np.arange(len(best))
    selected = best["selected"].to_numpy(dtype=bool)
    for mask, fill, label in (
        (~selected, "white", "candidate"),
        (selected, plot.BLUE, "selected"),
    ):
        if mask.any():
            style = {"color": plot.BLUE, "markerfacecolor": fill, "label": label}
            axes.plot(best["loss"][mask], row[mask], "o", **style)
    for value in best["loss_unmodified"].unique():
        axes.axvline(value, label="unmodified", **plot.LEVEL)
    axes.set_yticks(
        row, [candidate_label(candidate) for _, candidate in best.iterrows()]
    )
    axes.set(ylim=(len(best) - 0.4, -0.6), xlabel="loss (nats per answer token)")
    shown = min(most, len(search))
    title = f"best {shown} of {len(search)} candidates" + ", and the selected one" * (
        len(best) > shown
    )
    figure.suptitle(title, fontsize=plot.STYLE["axes.titlesize"])
    axes.grid(axis="y", color=plot.SHADE, linewidth=0.5)
    axes.set_axisbelow(True)
    plot.legend_below(figure)
    return figure
