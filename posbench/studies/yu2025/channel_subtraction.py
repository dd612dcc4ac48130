"""One channel, one item: the positional channel of an item is lowered, attention to every item is read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from posbench.errors import UserError
from posbench.files.atomic import Row, rounded
from posbench.late import Axes, Figure, pd, torch
from posbench.measure.states import Site, channel_input, stacked
from posbench.methods.scale_channel import check_layers
from posbench.perturbations.subtract_channel import subtract_channel
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.cost import InspectionPasses
from posbench.schema import Count, Positive, Seed, Share
from posbench.stats import bootstrap
from posbench.stats.bootstrap import Array
from posbench.stats.findings import Finding, ends
from posbench.stats.frames import UNMODIFIED
from posbench.studies import prompts as shared
from posbench.studies.base import Study, Tables
from posbench.studies.prompts import Measured, Prompts, gold
from posbench.tasks import Example

WHERE = {"gold": "the gold item", "other": "another item"}


@dataclass(frozen=True, kw_only=True)
class ChannelSubtraction(Study):
    """One channel of one item's tokens lowered, and the attention to every item.

    Source: Yu et al. 2025, Appendix D.5, Figure 10: 0.3 from channel 213 of Mistral-7B for item 26 of 50
    (gold) or 36, layers 15 to 20. Ours are the random channels as a control and the sign: subtracted where
    the channel rises over the items, added where it falls: the item always moves towards the beginning.

    By default ``value`` is the channel's whole range over the items, which takes any item at least to where
    the first one stands; the paper's 0.3 belongs to one channel of one model.
    """

    channel: int | None = (
        None  # the positional channel; None: that of the model's scale_channel block
    )
    value: Positive = 1.0
    unit: Literal["range", "absolute"] = (
        "range"  # of the unmodified item means by layer; as it is (paper)
    )
    gold: Share = 0.5  # depth of the gold item: the nearest gold position of the task (paper: 25 / 49)
    other: Share = 0.7  # depth of the item without the answer (paper: 35 / 49)
    layers: tuple[int, int] | None = (
        None  # changed and averaged; None: see retrieval_layers
    )
    site: Site = "attention_input"  # each layer alone; ``residual`` adds up; the paper does not say
    controls: Count = 3  # random channels, from which the same amount is taken
    opposite: bool = False  # also the same amount towards the end (control)
    examples: Count = 100
    seed: Seed = 0  # of the random channels

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        shared.channels(run, self.channel, self.controls, self.seed)
        check_layers(run.lm, "study.layers", self.layers)
        shared.check_prompts(run)
        example = self._examples(run)[0]
        if self._item(example, "other") == gold(example):
            allowed = "the depth of another item than the gold one"
            raise UserError("study.other", self.other, allowed, "set study.other=0.7")

    def _examples(self, run: Run) -> list[Example]:
        """Prompts at the gold position that is nearest to the depth."""
        there = shared.need_items(run.task)
        nearest = gold(
            min(there, key=lambda e: abs(gold(e) / (len(e.items) - 1) - self.gold))
        )
        return [e for e in there if gold(e) == nearest][: self.examples]

    def _item(self, example: Example, where: str) -> int:
        return (
            gold(example)
            if where.startswith("gold")
            else round(self.other * (len(example.items) - 1))
        )

    def reads(self, run: Run) -> list[InspectionPasses]:
        """See :meth:`Study.reads`."""
        variants = 1 + len(WHERE) * (1 + self.controls + self.opposite)
        return [InspectionPasses(self._examples(run), variants, variants)]

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``items`` (channel and attention of each item, score as item -1), amounts and effects."""
        channels = shared.channels(run, self.channel, self.controls, self.seed)
        prompts = Prompts.of(run, examples=self._examples(run))
        measured = self._under(prompts, "gold", channels[0], channels[0], {})
        base = measured[UNMODIFIED].values()
        at = {w: self._item(prompts.examples[0], w) for w in WHERE}
        attention, curves = (
            np.mean([row[of] for row in base], axis=0)
            for of in ("attention", "channel")
        )
        first, last = shared.retrieval_layers(self.layers, attention[:, at["gold"]])
        values = {
            layer: self._amount(curves[layer]) for layer in range(first, last + 1)
        }
        for where in WHERE:
            for changed in channels:
                measured |= self._under(prompts, where, channels[0], changed, values)
            if self.opposite:
                back = {layer: -value for layer, value in values.items()}
                measured |= self._under(
                    prompts, f"{where}_opposite", channels[0], channels[0], back
                )
        frame = _frame(prompts, measured, slice(first, last + 1))
        at |= {"layer_first": first, "layer_last": last, "tested_channel": channels[0]}
        amounts = pd.DataFrame(values.items(), columns=["layer", "subtracted"])
        return {
            "items": _items(frame).assign(**at),
            "amounts": amounts.assign(
                channel=channels[0], rises=amounts["subtracted"] > 0
            ),
            "effects": _effects(frame, at, run.runtime.resamples),
        }

    def _under(
        self,
        prompts: Prompts,
        where: str,
        channel: int,
        changed: int,
        values: Mapping[int, float],
    ) -> dict[str, dict[str, Row]]:
        """By variant: score, and by layer attention to every item and mean of the tested channel over it."""
        read = dict[int, torch.Tensor]()
        variant = (
            f"{where}_control_{changed}"
            if changed != channel
            else where
            if values
            else UNMODIFIED
        )

        @contextmanager
        def block(batch: Sequence[Example]) -> Iterator[None]:
            nonlocal read
            lm = prompts.run.lm
            spans = prompts.spans(batch, lambda e: self._item(e, where))
            change = subtract_channel(
                lm, prompts.lengths(batch), spans, changed, values, site=self.site
            )
            with change, channel_input(lm, [channel], self.site) as read:
                yield

        def keep(batch: Sequence[Example], attention: Array) -> list[Row]:
            out = []
            for e, weights, states in zip(
                batch, attention, stacked(read, len(batch))[..., 0], strict=True
            ):
                pad = states.shape[1] - len(prompts.encoded[e.id].ids)
                means = [
                    states[:, pad + first : pad + end].mean(1)
                    for first, end in prompts.tokens[e.id]
                ]
                out.append(
                    {
                        "attention": rounded(weights),
                        "channel": rounded(np.stack(means, axis=1)),
                    }
                )
            return out

        return {variant: prompts.under(variant, block, keep)}

    def _amount(self, curve: Array) -> float:
        """What is subtracted in a layer, by the items' unmodified means [N]: positive where they rise."""
        slope = float(np.polyfit(np.arange(len(curve)), curve, 1)[0])
        return (
            float(np.sign(slope))
            * self.value
            * (float(np.ptp(curve)) if self.unit == "range" else 1.0)
        )

    def figures(self, tables: Tables) -> Drawn:
        """See :meth:`Study.figures`."""
        caption = "Mean of the channel over every item, and attention to it (95 %)."
        return {"channel_subtraction": (items_figure(tables["items"]), caption)}

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Claim C4: one channel of an item sets the attention to it."""
        first = tables["items"].iloc[0]
        layers = shared.named(first["layer_first"], first["layer_last"])
        amounts = [
            f"{row.subtracted:.3g} in layer {row.layer}"
            for row in tables["amounts"].itertuples()
        ]
        note = f"channel {first['tested_channel']}, subtracted: {', '.join(amounts)}"
        studies = ["channel_subtraction"]
        effects = tables["effects"]
        if "gold_opposite" in set(effects["effect"]):
            studies.append("channel_subtraction_opposite")
        return [
            found
            for study in studies
            for found in shared.judged(effects, study, note, layers=layers)
        ]


def _frame(prompts: Prompts, measured: Measured, layers: slice) -> pd.DataFrame:
    """A row per variant, prompt and item: cluster, score, attention and channel, averaged over the layers."""
    parts = []
    for (variant, rows), e in itertools.product(measured.items(), prompts.examples):
        values = {
            key: np.mean(rows[e.id][key][layers], axis=0)
            for key in ("attention", "channel")
        }
        facts = {
            "variant": variant,
            "cluster": e.cluster or e.id,
            "score": rows[e.id]["score"],
        }
        parts.append(pd.DataFrame({**facts, "item": range(len(e.items)), **values}))
    return pd.concat(parts, ignore_index=True)


def _items(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of variant, item, measure, value with its interval, n; the score stands with item -1."""
    out = []
    for (variant, item), rows in frame.groupby(["variant", "item"], sort=False):
        for measure in ("channel", "attention"):
            at = bootstrap.difference(*shared.group(rows, measure))
            out.append(
                {
                    "variant": variant,
                    "item": item,
                    "measure": measure,
                    **ends(at),
                    "n": at.n,
                }
            )
    for variant, rows in frame[frame["item"] == 0].groupby("variant", sort=False):
        at = bootstrap.mean(*shared.group(rows, "score"))
        out.append(
            {"variant": variant, "item": -1, "measure": "score", **ends(at), "n": at.n}
        )
    return pd.DataFrame(out)


def _effects(
    frame: pd.DataFrame, at: Mapping[str, int], resamples: int
) -> pd.DataFrame:
    """The numbers behind the verdicts: differences of groups of prompts; all random channels form one."""
    kind = frame["variant"].str.replace(r"_control_.*", "_control", regex=True)
    cells = list(frame.groupby([kind, "item"]))
    groups, scores = (
        {key: shared.group(rows, of) for key, rows in cells}
        for of in ("attention", "score")
    )
    out = dict[str, bootstrap.Estimate]()
    for where in WHERE:
        after, before, control = (
            (name, at[where]) for name in (where, UNMODIFIED, f"{where}_control")
        )
        out |= {
            f"{where}_over_first": shared.minus(groups, after, (where, 0), resamples),
            f"{where}_before": shared.minus(groups, before, (UNMODIFIED, 0), resamples),
            f"{where}_rise": shared.minus(groups, after, before, resamples),
            f"{where}_control": shared.minus(groups, control, before, resamples),
            f"{where}_over_control": shared.minus(groups, after, control, resamples),
            f"{where}_score": shared.minus(scores, after, before, resamples),
        }
        if (opposite := (f"{where}_opposite", at[where])) in groups:
            out[f"{where}_opposite"] = shared.minus(groups, opposite, before, resamples)
            out[f"{where}_over_opposite"] = shared.minus(
                groups, after, opposite, resamples
            )
    return shared.effects_table(out)


def panel(axes: Axes, items: pd.DataFrame, where: str, measure: str) -> None:
    """The channel or the attention of every item, unmodified and with one item changed (the circle)."""
    rows = items[items["measure"] == measure]
    labels = {UNMODIFIED: "unmodified", where: "channel changed"}
    plot.bands(axes, rows, "variant", labels, x="item", scale=1)
    axes.axvline(
        rows["gold"].iloc[0],
        color=plot.GOLD,
        linewidth=3,
        alpha=0.4,
        zorder=0,
        label="gold item",
    )
    if measure == "attention":
        controls = (
            rows[rows["variant"].str.startswith(f"{where}_control_")]
            .groupby("item")["value"]
            .mean()
        )
        axes.plot(controls, label="random channel (control)", **plot.ON_TOP)
        axes.set(xlabel=plot.ITEM, ylabel="attention\n(mean weight per token)")
        # The gold item has a hundred times the weight of the others, whose levels matter here.
        axes.set_yscale("log")
    for line in axes.lines:
        line.set_markersize(2)
    circle = rows[(rows["variant"] == where) & (rows["item"] == rows[where])]
    ring: dict[str, Any] = dict(color=plot.BLUE, markersize=9, markerfacecolor="none")
    axes.plot(circle["item"], circle["value"], "o", label="changed item", **ring)


@plot.styled
def items_figure(items: pd.DataFrame) -> Figure:
    """Channel (above) and attention (below) of every item, a column for each changed item."""
    figure, grid = plot.new_figure(
        plot.PAGE, 4.2, 2, 2, n=items["n"], sharex=True, sharey="row"
    )
    first = items.iloc[0]
    for column, (where, words) in zip(grid.T, WHERE.items(), strict=True):
        for axes, measure in zip(column, ("channel", "attention"), strict=True):
            panel(axes, items, where, measure)
        column[0].set_title(f"{words} changed (item {first[where]})")
    grid[0][0].set_ylabel(f"mean of channel {first['tested_channel']}")
    grid[1][1].set_ylabel("")
    plot.legend_below(figure)
    return figure
