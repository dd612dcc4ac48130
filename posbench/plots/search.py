"""Figures of searches: how they went, and what they found. A missing column raises a `UserError`."""

from __future__ import annotations

import numpy as np

from posbench.late import Figure, pd
from posbench.plots import base as plot
from posbench.stats.frames import need

POSITIONS = ("beginning", "middle", "end")


@plot.styled
def convergence(generations: pd.DataFrame) -> Figure:
    """Best and mean fitness of the parents per generation, in %; where a column ``search`` names several
    searches, one line each, the best only. From generations.csv rows (fitness in 0..1)."""
    need(generations, "generations", "generation", "best", "mean", "unmodified")
    figure, axes = plot.new_figure(plot.COLUMN, 2.7)
    rows = generations.set_index("generation")
    lines = {"best": rows["best"], "mean of the parents": rows["mean"]}
    if "search" in rows:
        searches = rows.groupby("search", sort=False)["best"]
        lines = {str(name): best.groupby(level=0).mean() for name, best in searches}
    for index, (label, line) in enumerate(lines.items()):
        axes.plot(line.index, 100 * line, label=label, **plot.line_style(index))
    for value in generations["unmodified"].dropna().unique():
        axes.axhline(100 * value, label="unmodified", **plot.LEVEL)
    axes.set(xlabel="generation", ylabel="fitness (%)")
    axes.locator_params("x", integer=True)
    plot.legend_below(figure, axes)
    return figure


@plot.styled
def curve_figure(parts: pd.DataFrame, search: pd.DataFrame) -> Figure:
    """Control points and curve, where there are any; the scale of every layer; the accuracy that it gives.

    From rows of curve.csv: part (``point``, ``curve``, ``layer``), x, y; and of search.csv: beginning,
    middle, end, fitness (0..1), unmodified, selected. Source: LPES, Figure 2.
    """
    need(parts, "curve", "part", "x", "y")
    need(search, "search", *POSITIONS, "fitness", "unmodified", "selected")
    points, drawn, layers = (parts[parts["part"] == part] for part in ("point", "curve", "layer"))
    figure, (*more, left, fitness) = plot.new_figure(plot.PAGE, 2.2, 1, 3 if len(points) else 2)
    for axes in more:
        axes.plot(drawn["x"], drawn["y"], color=plot.COLOURS[0], label="curve")
        axes.plot(points["x"], points["y"], "s:", color=plot.COLOURS[1], label="control points")
        axes.set(xlabel="x (layers)", ylabel="y (scale)")
        axes.legend()
    left.plot(layers["x"], layers["y"], color=plot.COLOURS[0], marker="o")
    left.axhline(1, **plot.LEVEL)
    left.set(xlabel="layer", ylabel="scale")
    left.locator_params("x", integer=True)
    columns, places, width = [*POSITIONS, "fitness"], np.arange(len(POSITIONS) + 1), 0.38
    outlined = dict(color="white", edgecolor="black", linestyle="--", label="unmodified")
    filled = dict(color=plot.COLOURS[0], label="found")
    for column, side, style in (("unmodified", -0.5, outlined), ("selected", 0.5, filled)):
        values = 100 * search.loc[search[column], columns].iloc[0].astype(float)
        fitness.bar(places + side * width, values, width, **style)
    fitness.set_xticks(places, columns)
    fitness.set(ylabel="calibration accuracy (%)", ylim=(0, 103))
    fitness.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    return figure


@plot.styled
def channel_curves(channels: pd.DataFrame, channel: int | str) -> Figure:
    """Value of one channel over the token position, one line per layer (dark to light), one panel per site.

    If the first token's values dwarf all others, the axis is fitted to the others and the panel says so. From
    channels.csv rows: channel, site, layer, token, value (mean over random strings) and its sliding mean.
    """
    need(channels, "channels", "channel", "site", "layer", "token", "value", "sliding_mean")
    rows = channels[channels["channel"].astype(str) == str(channel)]
    need(rows, f"channels (channel {channel})", "value")
    colours = plot.LayerColours(sorted(rows["layer"].unique()))
    sites = list(rows["site"].unique())
    width = plot.COLUMN if len(sites) == 1 else plot.PAGE
    figure, (panels,) = plot.new_figure(width, 2.4, 1, len(sites), squeeze=False)
    for axes, site in zip(panels, sites, strict=True):
        here = rows[rows["site"] == site]
        for layer, line in here.groupby("layer"):
            line = line.sort_values("token")
            style, thick = colours.style(layer), "value"
            if line["sliding_mean"].notna().any():
                axes.plot(line["token"], line["value"], color=style["color"], linewidth=0.4, alpha=0.5)
                thick = "sliding_mean"
            axes.plot(line["token"], line[thick], **style)
        title = str(site).replace("_", " ")
        first, rest = here.loc[here["token"] == 0, "value"], here.loc[here["token"] != 0, "value"]
        if len(first) and len(rest) and first.abs().max() > 5 * rest.abs().max() > 0:
            room = 0.05 * (rest.max() - rest.min()) + 1e-12
            axes.set_ylim(rest.min() - room, rest.max() + room)
            title += f"\n(token 0 is off the scale: {first.min():.3g} to {first.max():.3g})"
        axes.set(xlabel="token position", ylabel=f"mean value of channel {channel}", title=title)
    colours.bar(figure, panels)
    return figure


def candidate_label(row: pd.Series) -> str:
    """`ch 33 x 0, layers 1-3` for a search.csv row."""
    return f"ch {row['channel']} x {float(row['factor']):g}, layers {row['layer_first']}-{row['layer_last']}"


@plot.styled
def candidate_losses_figure(search: pd.DataFrame, most: int = 30) -> Figure:
    """Loss of the best candidates, lowest on top; a filled diamond is selected, the line is unmodified.

    From search.csv rows: channel, factor, layer_first, layer_last, loss (nats per answer token),
    loss_unmodified, selected. A selected candidate is always among the ``most`` drawn.
    """
    front = ("channel", "factor", "layer_first", "layer_last")
    need(search, "search", *front, "loss", "loss_unmodified", "selected")
    search = search.sort_values("loss")
    best = search[(np.arange(len(search)) < most) | search["selected"]]
    figure, axes = plot.new_figure(plot.COLUMN, 0.9 + 0.125 * max(len(best), 4))
    row, selected = np.arange(len(best)), best["selected"].to_numpy(dtype=bool)
    blue, red = plot.COLOURS[:2]
    for mask, form, colour, fill in ((~selected, "o", blue, "white"), (selected, "D", red, red)):
        if mask.any():
            label = "candidate" if fill == "white" else "selected"
            axes.plot(best["loss"][mask], row[mask], form, color=colour, markerfacecolor=fill, label=label)
    for value in best["loss_unmodified"].unique():
        axes.axvline(value, label="unmodified", **plot.LEVEL)
    axes.set_yticks(row, [candidate_label(candidate) for _, candidate in best.iterrows()])
    axes.set(ylim=(len(best) - 0.4, -0.6), xlabel="loss (nats per answer token)")
    shown = min(most, len(search))
    title = f"best {shown} of {len(search)} candidates" + ", and the selected one" * (len(best) > shown)
    figure.suptitle(title, fontsize=plot.STYLE["axes.titlesize"])
    axes.grid(axis="y", color="0.9", linewidth=0.5)
    axes.set_axisbelow(True)
    plot.legend_below(figure, axes)
    return figure
