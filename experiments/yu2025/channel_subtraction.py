"""One channel, one item: the positional channel of an item is lowered, attention to every item is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from posbench.errors import UserError
from posbench.files.atomic import Row, round_values
from posbench.late import Axes, Figure, Tensor, pd
from posbench.measure.states import Site, channel_input, stacked
from posbench.methods.scale_channel import check_layers
from posbench.perturbations.subtract_channel import subtract_channel
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.cost import InspectionPasses
from posbench.schema import Count, Positive, Seed, Share
from posbench.stats import bootstrap
from posbench.stats.bootstrap import Array, Estimate
from posbench.stats.findings import Finding, estimate_row
from posbench.stats.frames import UNMODIFIED
from posbench.studies import prompts as shared
from posbench.studies.base import Study, Tables
from posbench.studies.prompts import Prompts, RowsByVariant, gold_index
from posbench.tasks import Example
from yu2025 import common

ROLES = {"gold": "the gold item", "other": "another item"}
"""Roles of the items whose channel is changed."""


@dataclass(frozen=True, kw_only=True)
class ChannelSubtraction(Study):
    """One channel of one item's tokens lowered, and the attention to every item.

    Source: Yu et al. 2025, Appendix D.5, Figure 10: 0.3 from channel 213 of Mistral-7B for item 26 of 50
    (gold) or 36, layers 15 to 20. Ours are the random channels as a control and the sign: subtracted where
    the channel rises over the items, added where it falls: the item always moves towards the beginning.

    By default ``value`` is the channel's whole range over the items, which takes any item at least to where
    the first one is; the paper's 0.3 belongs to one channel of one model.

    Attributes:
        channel: The positional channel; None: the one in the model's scale_channel block.
        value: Amount to subtract, in units of ``unit``.
        unit: ``range`` of the unmodified item means by layer, or ``absolute`` (paper).
        gold: Depth of the gold item: the nearest gold position of the task (paper: 25 / 49).
        other: Depth of the item without the answer (paper: 35 / 49).
        layers: First and last layer that are changed and averaged; None: see
            :func:`yu2025.common.retrieval_layers`.
        site: Changed hidden states: ``attention_input`` changes each layer alone, ``residual`` adds up; the
            paper does not say.
        controls: Random channels, from which the same amount is taken.
        opposite: Whether to move the items by the same amount towards the end, too (control).
        examples: Examples at most.
        seed: Seed of the random channels.
    """

    smallest: ClassVar[Mapping[str, int]] = {"examples": 6}
    channel: int | None = None
    value: Positive = 1.0
    unit: Literal["range", "absolute"] = "range"
    gold: Share = 0.5
    other: Share = 0.7
    layers: tuple[int, int] | None = None
    site: Site = "attention_input"
    controls: Count = 3
    opposite: bool = False
    examples: Count = 100
    seed: Seed = 0

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        shared.need_whole_maps(run)
        common.study_channels(run, self.channel, self.controls, self.seed)
        check_layers(run.lm, "study.layers", self.layers)
        shared.check_prompts(run)
        examples = self._examples(run)
        if any(self._item(e, "other") in e.gold_positions for e in examples):
            allowed = "a depth other than that of the gold item"
            raise UserError("study.other", self.other, allowed, "set study.other=0.7")
        behind = "an item behind the first one, as the channel is moved to that"
        if any(self._item(example, "other") == 0 for example in examples):
            raise UserError("study.other", self.other, behind, "set study.other=0.7")
        if any(gold_index(example) == 0 for example in examples):
            hint = "set task.positions=[50%]"
            raise UserError("study.gold", self.gold, f"near {behind}", hint)

    def _examples(self, run: Run) -> list[Example]:
        """Prompts at the gold position that is nearest to the depth."""
        examples = shared.need_items(run.task)
        nearest = min(
            examples, key=lambda e: abs(gold_index(e) / (len(e.items) - 1) - self.gold)
        )
        at_position = [e for e in examples if gold_index(e) == gold_index(nearest)]
        return at_position[: self.examples]

    def _item(self, example: Example, role: str) -> int:
        """The item that has a role, see :data:`ROLES`."""
        if role == "gold":
            return gold_index(example)
        return round(self.other * (len(example.items) - 1))

    def workload(self, run: Run) -> list[InspectionPasses]:
        """See :meth:`Study.workload`."""
        changes_per_item = 1 + self.controls + int(self.opposite)
        num_variants = 1 + len(ROLES) * changes_per_item
        return [
            InspectionPasses(
                self._examples(run), times=num_variants, replies=num_variants
            )
        ]

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``items`` (channel and attention of each item, score as item -1), amounts and effects."""
        tested, *controls = common.study_channels(
            run, self.channel, self.controls, self.seed
        )
        prompts = Prompts.of(run, examples=self._examples(run))
        items = {role: self._item(prompts.examples[0], role) for role in ROLES}
        unmodified = self._variant(prompts, UNMODIFIED, "gold", tested, tested, {})
        attention = np.mean([row["attention"] for row in unmodified.values()], axis=0)
        curves = np.mean([row["channel"] for row in unmodified.values()], axis=0)
        first, last = common.retrieval_layers(self.layers, attention[:, items["gold"]])
        amounts = {
            layer: self._amount(curves[layer]) for layer in range(first, last + 1)
        }
        opposite_amounts = {layer: -amount for layer, amount in amounts.items()}

        measured = {UNMODIFIED: unmodified}
        for role in ROLES:
            measured[role] = self._variant(prompts, role, role, tested, tested, amounts)
            for control in controls:
                variant = f"{role}_control_{control}"
                measured[variant] = self._variant(
                    prompts, variant, role, tested, control, amounts
                )
            if self.opposite:
                variant = f"{role}_opposite"
                measured[variant] = self._variant(
                    prompts, variant, role, tested, tested, opposite_amounts
                )

        frame = _frame(prompts, measured, slice(first, last + 1))
        amount_table = pd.DataFrame(amounts.items(), columns=["layer", "subtracted"])
        return {
            "items": _items(frame).assign(
                gold=items["gold"],
                other=items["other"],
                layer_first=first,
                layer_last=last,
                tested_channel=tested,
                subject=common.channel_subject(run, tested),
            ),
            "amounts": amount_table.assign(
                channel=tested, rises=amount_table["subtracted"] > 0
            ),
            "effects": _effects(frame, items, run.runtime.resamples),
        }

    def _variant(
        self,
        prompts: Prompts,
        variant: str,
        role: str,
        tested: int,
        changed: int,
        amounts: Mapping[int, float],
    ) -> dict[str, Row]:
        """Run the prompts with one channel of one item changed.

        Args:
            prompts: The prompts.
            variant: Name of the variant.
            role: Role of the changed item, see :data:`ROLES`.
            tested: The channel that is read.
            changed: The channel that is changed.
            amounts: Amounts to subtract from it, by layer.

        Returns:
            By id: score, and by layer attention to every item and mean of the tested channel over it.
        """
        lm = prompts.run.lm
        states: dict[int, Tensor] = {}  # of the batch in the block, by layer

        @contextmanager
        def block(batch: Sequence[Example]) -> Iterator[None]:
            nonlocal states
            subtraction = subtract_channel(
                lm,
                prompts.lengths(batch),
                prompts.spans(batch, lambda e: self._item(e, role)),
                changed,
                amounts,
                site=self.site,
            )
            with subtraction, channel_input(lm, [tested], self.site) as states:
                yield

        def keep(batch: Sequence[Example], attention: Array) -> list[Row]:
            channel = stacked(states, len(batch))[..., 0]  # [B, L, T]
            rows = []
            for example, weights, by_token in zip(
                batch, attention, channel, strict=True
            ):
                padding = by_token.shape[1] - len(prompts.encoded[example.id].ids)
                means = [
                    by_token[:, padding + start : padding + stop].mean(1)
                    for start, stop in prompts.tokens[example.id]
                ]
                row = {
                    "attention": round_values(weights),
                    "channel": round_values(np.stack(means, axis=1)),
                }
                rows.append(row)
            return rows

        return prompts.under(variant, block, keep)

    def _amount(self, curve: Array) -> float:
        """The amount to subtract in a layer, by the items' unmodified means [N]: positive where they rise."""
        slope = float(np.polyfit(np.arange(len(curve)), curve, 1)[0])
        amount = float(np.sign(slope)) * self.value
        if self.unit == "range":
            amount *= float(np.ptp(curve))
        return amount

    def figures(self, tables: Tables) -> Drawn:
        """See :meth:`Study.figures`."""
        caption = "Mean of the channel over every item (95 %), and attention to it."
        return {"channel_subtraction": (items_figure(tables["items"]), caption)}

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Claim C4: one channel of an item sets the attention to it."""
        first = tables["items"].iloc[0]
        layers = common.layers_label(first["layer_first"], first["layer_last"])
        amounts = ", ".join(
            f"{row.subtracted:.3g} in layer {row.layer}"
            for row in tables["amounts"].itertuples()
        )
        note = f"channel {first['tested_channel']}, subtracted: {amounts}"
        effects = tables["effects"]
        studies = ["channel_subtraction"]
        if "gold_opposite" in set(effects["effect"]):
            studies.append("channel_subtraction_opposite")
        findings = []
        for study in studies:
            findings += shared.judge_claims(
                effects, study, note, subject=first["subject"], layers=layers
            )
        return findings


def _frame(prompts: Prompts, measured: RowsByVariant, layers: slice) -> pd.DataFrame:
    """A row per variant, prompt and item: cluster, score, attention and channel, averaged over the layers."""
    parts = []
    for variant, rows in measured.items():
        for example in prompts.examples:
            row = rows[example.id]
            columns = {
                "variant": variant,
                "cluster": example.question_id,
                "score": row["score"],
                "item": range(len(example.items)),
                "attention": np.mean(row["attention"][layers], axis=0),
                "channel": np.mean(row["channel"][layers], axis=0),
            }
            parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


def _items(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of variant, item, measure, value with its interval, n; the score is at item -1."""
    keys = []
    estimates = []
    for (variant, item), rows in frame.groupby(["variant", "item"], sort=False):
        for measure in ("channel", "attention"):
            keys.append({"variant": variant, "item": item, "measure": measure})
            estimates.append(
                bootstrap.difference(*shared.values_and_clusters(rows, measure))
            )
    for variant, rows in frame[frame["item"] == 0].groupby("variant", sort=False):
        keys.append({"variant": variant, "item": -1, "measure": "score"})
        estimates.append(bootstrap.mean(*shared.values_and_clusters(rows, "score")))
    return pd.DataFrame(
        [
            {**key, **estimate_row(value), "n": value.n}
            for key, value in zip(keys, estimates, strict=True)
        ]
    )


def _effects(
    frame: pd.DataFrame, items: Mapping[str, int], resamples: int
) -> pd.DataFrame:
    """The numbers behind the verdicts: differences of groups of prompts; all random channels form one.

    Args:
        frame: Attention and score by variant, prompt and item.
        items: The changed items, by their roles.
        resamples: Draws of the bootstrap.
    """
    kind = frame["variant"].str.replace(r"_control_.*", "_control", regex=True)
    attention = {}
    scores = {}
    for kind_and_item, rows in frame.groupby([kind, "item"]):
        attention[kind_and_item] = shared.values_and_clusters(rows, "attention")
        scores[kind_and_item] = shared.values_and_clusters(rows, "score")
    effects: dict[str, Estimate] = {}
    for role, item in items.items():
        level = bootstrap.mean(*attention[UNMODIFIED, item], of_scores=False)
        effects[f"{role}_unmodified"] = level
        changed = (role, item)
        unmodified = (UNMODIFIED, item)
        control = (f"{role}_control", item)
        opposite = (f"{role}_opposite", item)
        contrasts = {
            "over_first": (changed, (role, 0)),
            "before": (unmodified, (UNMODIFIED, 0)),
            "rise": (changed, unmodified),
            "control": (control, unmodified),
            "over_control": (changed, control),
        }
        for name, (minuend, subtrahend) in contrasts.items():
            effects[f"{role}_{name}"] = common.difference_of_means(
                attention, minuend, subtrahend, resamples
            )
        effects[f"{role}_score"] = common.difference_of_means(
            scores, changed, unmodified, resamples
        )
        if opposite in attention:
            effects[f"{role}_opposite"] = common.difference_of_means(
                attention, opposite, unmodified, resamples
            )
            effects[f"{role}_over_opposite"] = common.difference_of_means(
                attention, changed, opposite, resamples
            )
    return shared.effects_table(effects)


def panel(axes: Axes, items: pd.DataFrame, role: str, measure: str) -> None:
    """The channel or the attention of every item, unmodified and with one item changed (the circle)."""
    rows = items[items["measure"] == measure]
    labels = {UNMODIFIED: "unmodified", role: "channel changed"}
    if measure == "attention":
        # An interval of a weight near 0 reaches below it, which a log axis cannot show.
        for variant, label in labels.items():
            line = rows[rows["variant"] == variant].sort_values("item")
            style = plot.line_style(0, variant == UNMODIFIED)
            # Seen on both sides of the unmodified model's dashes where they coincide.
            style["linewidth"] = 1.2 if variant == UNMODIFIED else 3
            axes.plot(line["item"], line["value"], label=label, **style)
    else:
        plot.bands(axes, rows, "variant", labels, x="item", scale=1)
    axes.axvline(
        rows["gold"].iloc[0],
        color=plot.GOLD_COLOUR,
        linewidth=3,
        alpha=0.4,
        zorder=0,
        label="gold item",
    )
    if measure == "attention":
        controls = rows[rows["variant"].str.startswith(f"{role}_control_")]
        mean = controls.groupby("item")["value"].mean()
        axes.plot(mean, label="random channel (control)", **plot.CONTROL_STYLE)
        axes.set(xlabel=plot.ITEM_LABEL, ylabel="attention\n(mean weight per token)")
        axes.locator_params("x", integer=True)
        # The gold item has a hundred times the weight of the others, whose levels matter here.
        axes.set_yscale("log")
    for line in axes.lines:
        line.set_markersize(2)
    changed = rows[(rows["variant"] == role) & (rows["item"] == rows[role])]
    axes.plot(
        changed["item"],
        changed["value"],
        "o",
        label="changed item",
        color=plot.BLUE,
        markersize=9,
        markerfacecolor="none",
    )


@plot.styled
def items_figure(items: pd.DataFrame) -> Figure:
    """Channel (above) and attention (below) of every item, a column for each changed item."""
    figure, grid = plot.new_figure(
        plot.PAGE, 4.2, 2, 2, n=items["n"], sharex=True, sharey="row"
    )
    first = items.iloc[0]
    for (upper, lower), (role, label) in zip(grid.T, ROLES.items(), strict=True):
        panel(upper, items, role, "channel")
        panel(lower, items, role, "attention")
        upper.set_title(f"{label} changed (item {first[role]})")
    grid[0][0].set_ylabel(f"mean of channel {first['tested_channel']}")
    grid[1][1].set_ylabel("")
    plot.add_legend_below(figure)
    return figure
