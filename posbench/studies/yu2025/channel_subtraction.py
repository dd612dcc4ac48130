"""One channel, one item: the positional channel of an item's tokens is lowered, and the attention to every
item is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from torch import Tensor

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.model.lm import LM
from posbench.perturbations import spans as perturb
from posbench.perturbations.spans import Site
from posbench.pipeline.config import Config
from posbench.plots.base import PAGE, legend_below, line_style, new_figure, styled
from posbench.run.base import UNMODIFIED, Run
from posbench.studies import perturbing
from posbench.studies.base import Finding, Study
from posbench.studies.perturbing import Array, Group, Prompts, Range
from posbench.tasks import Example

WHERE = {"gold": "the gold item", "other": "another item"}
SOURCE = "Yu et al. 2025, Appendix D.5, Figure 10"


@dataclass(frozen=True, kw_only=True)
class ChannelSubtraction(Study):
    """One channel of one item's tokens lowered, and the attention to every item (Yu et al. 2025, Figure 10).

    Source: Yu et al. 2025, Appendix D.5: 0.3 from channel 213 of Mistral-7B for item 26 of 50 (gold) or 36,
    layers 15 to 20. Random channels as a control are ours, and so is the sign: the value is subtracted where
    the channel rises over the items and added where it falls, so that the item always moves towards the
    beginning, layer by layer.

    Attributes:
        channel: The positional channel, 0-based.
        value: How much. The paper's 0.3 belongs to the scale of one channel of one model; hence by default
            the channel's whole range over the items, which takes any item at least to where the first one
            stands.
        unit: ``range``: of the item means of the channel in the unmodified model, by layer; ``absolute``: as
            it is (paper).
        gold: Depth of the gold item, as a share; the nearest gold position of the task is taken (paper: 25 /
            49).
        other: Depth of the item without the answer (paper: 35 / 49).
        layers: Layers that are changed, and whose attention is averaged, 0-based; None: the paper's 15 to 20
            of 32, or the same share; below 16 layers the one that attends to the gold item most in the
            unmodified model.
        site: ``attention_input`` (each layer on its own) or ``residual`` (adds up over the layers); the paper
            does not say.
        controls: Random channels, from which the same amount is taken.
        examples: Prompts at most.
        seed: Seed of the random channels.
    """

    channel: int | None = None
    value: float = 1.0
    unit: Literal["range", "absolute"] = "range"
    gold: float = 0.5
    other: float = 0.7
    layers: Range | None = None
    site: Site = "attention_input"
    controls: int = 3
    examples: int = 100
    seed: int = 0

    def check(self, config: Config, lm: LM | None) -> None:
        """Refuse a channel, layers or depths that do not fit model and task."""
        assert lm is not None
        perturbing.check_counts(examples=self.examples, controls=self.controls)
        perturbing.positional_channel(lm, self.channel)
        perturbing.check_range(lm, "layers", self.layers)
        if self.value <= 0:
            hint = "set study.value=1: the sign follows the channel"
            raise UserError("study.value", self.value, "a number above 0", hint)
        examples = self._examples(config)
        if any(self._other(e) == e.gold_position for e in examples):
            raise UserError(
                "study.other",
                self.other,
                f"the depth of another item than the gold one (number {examples[0].gold_position})",
                "set study.other=0.7",
            )

    def _examples(self, config: Config) -> list[Example]:
        """Prompts at the gold position that is nearest to the depth."""
        placed = perturbing.placed(config)
        nearest = min(
            placed, key=lambda e: abs((e.gold_position or 0) / (len(e.items) - 1) - self.gold)
        ).gold_position
        return [e for e in placed if e.gold_position == nearest][: self.examples]

    def _other(self, example: Example) -> int:
        return round(self.other * (len(example.items) - 1))

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``items`` (channel and attention of every item) and ``effects``."""
        lm = run.lm
        channel = perturbing.positional_channel(lm, self.channel)
        random = perturbing.random_channels(lm, channel, self.controls, self.seed)
        prompts = Prompts.of(run, self._examples(run.config))
        examples = prompts.examples

        def measure(variant: str, where: str, changed: int, values: Mapping[int, float]) -> dict[str, Row]:
            read: dict[int, Tensor] = {}

            @contextmanager
            def block(batch: Sequence[Example]) -> Iterator[None]:
                nonlocal read
                spans = [
                    prompts.tokens[e.id][e.gold_position or 0 if where == "gold" else self._other(e)]
                    for e in batch
                ]
                change = perturb.subtracted(
                    lm, prompts.lengths(batch), spans, changed, values, site=self.site
                )
                with (
                    change if where else nullcontext(),
                    perturb.channel_input(lm, [channel], self.site) as read,
                ):
                    yield

            def rows(batch: Sequence[Example], attention: Array) -> list[Row]:
                found = np.stack(
                    [read[layer][..., 0].double().cpu().numpy() for layer in range(lm.layers)], axis=1
                )
                # A method may run a prompt as several rows next to each other.
                found = found.reshape(len(batch), -1, *found.shape[1:]).mean(1)
                out = []
                for e, weights, states in zip(batch, attention, found, strict=True):
                    pad = states.shape[1] - len(prompts.encoded[e.id].ids)
                    means = [states[:, pad + a : pad + b].mean(1) for a, b in prompts.tokens[e.id]]
                    out.append({"attention": _rounded(weights), "channel": _rounded(np.stack(means, axis=1))})
                return out

            return {row["id"]: row for row in prompts.measure(variant, block, rows)}

        measured = {UNMODIFIED: measure(UNMODIFIED, "", channel, {})}
        base = measured[UNMODIFIED]
        gold = [np.array(base[e.id]["attention"])[:, e.gold_position] for e in examples]
        layers = perturbing.retrieval_layers(self.layers, list(np.mean(gold, axis=0)))
        curve = np.mean([base[e.id]["channel"] for e in examples], axis=0)  # [L, N]
        values = {layer: self._amount(curve[layer]) for layer in range(layers[0], layers[1] + 1)}
        for where in WHERE:
            measured[where] = measure(where, where, channel, values)
            for control in random:
                measured[f"{where}_control_{control}"] = measure(
                    f"{where}_control_{control}", where, control, values
                )
        settings = {"layer_first": layers[0], "layer_last": layers[1], "tested_channel": channel}
        at = {"gold": examples[0].gold_position or 0, "other": self._other(examples[0])}
        frame = _frame(measured, examples, layers)
        resamples = run.config.runtime.resamples
        table = pd.DataFrame([{"layer": layer, "subtracted": value} for layer, value in values.items()])
        return {
            "items": _items(frame, resamples).assign(gold=at["gold"], other=at["other"], **settings),
            "amounts": table.assign(channel=channel, rises=table["subtracted"] > 0),
            "effects": _effects(frame, at, resamples),
        }

    def _amount(self, curve: Array) -> float:
        """What is subtracted in a layer, from the unmodified means of the items [N]: positive where they
        rise."""
        slope = float(np.polyfit(np.arange(len(curve)), curve, 1)[0])
        return float(np.sign(slope)) * self.value * (float(np.ptp(curve)) if self.unit == "range" else 1.0)

    def figures(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[Figure, str]]:
        """Channel and attention of every item, before and after."""
        caption = (
            "Mean of the positional channel over the tokens of every item, and attention of the last token to it, with 95 % "
            "intervals; the circle is the item whose channel was changed."
        )
        return {"channel_subtraction": (items_figure(tables["items"]), caption)}

    def findings(self, tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        """Claim C4: one channel of an item sets the attention to it."""
        effects, first = tables["effects"].set_index("effect"), tables["items"].iloc[0]
        amounts = tables["amounts"]
        layers = perturbing.named(first["layer_first"], first["layer_last"])
        note = f"channel {first['tested_channel']}, subtracted: " + ", ".join(
            f"{row.subtracted:.3g} in layer {row.layer}" for row in amounts.itertuples()
        )
        found = []
        for where, item in WHERE.items():
            rise = effects.loc[f"{where}_rise"]
            claims = [
                (
                    "rise",
                    f"C4: moving one channel of {item} towards the beginning raises attention to it ({SOURCE})",
                    f"change of the attention per token to the changed item, {layers}",
                    ("score",),
                ),
                (
                    "over_first",
                    f"C4: it lifts attention to {item} over that to the first one ({SOURCE})",
                    f"attention per token to the changed item minus that to the first one, {layers}; holds if it has also risen",
                    ("before",),
                ),
                (
                    "over_control",
                    f"Control: the same amount taken from random channels of {item} does less",
                    f"change of that attention minus the mean change under the random channels, {layers}",
                    ("control",),
                ),
            ]
            for name, claim, statistic, others in claims:
                row = effects.loc[f"{where}_{name}"]
                quoted = [f"{where} {key} {effects.at[f'{where}_{key}', 'value']:.3g}" for key in others]
                low = min(row["low"], rise["low"]) if name == "over_first" else row["low"]
                found.append(
                    Finding(
                        claim=claim,
                        statistic=statistic,
                        value=row["value"],
                        low=row["low"],
                        high=row["high"],
                        n=int(row["n"]),
                        verdict=perturbing.verdict(low),
                        note="; ".join([note, *quoted]),
                    )
                )
        return found


def _rounded(values: Array) -> list[list[float]]:
    return [[float(f"{x:.6g}") for x in row] for row in values]


def _frame(
    measured: Mapping[str, Mapping[str, Row]], examples: Sequence[Example], layers: Range
) -> pd.DataFrame:
    """One row per variant, prompt and item: cluster, score, attention and channel, averaged over the
    layers."""
    parts = []
    for variant, rows in measured.items():
        for e in examples:
            row, inside = rows[e.id], slice(layers[0], layers[1] + 1)
            values = {key: np.mean(row[key][inside], axis=0) for key in ("attention", "channel")}
            facts = {"variant": variant, "cluster": e.cluster or e.id, "score": row["score"]}
            parts.append(pd.DataFrame({**facts, "item": range(len(e.items)), **values}))
    return pd.concat(parts, ignore_index=True)


def _items(frame: pd.DataFrame, resamples: int) -> pd.DataFrame:
    """Variant, item, measure, value, low, high, n; the score stands with item -1."""
    out = []
    for (variant, item), group in frame.groupby(["variant", "item"], sort=False):
        for measure in ("channel", "attention"):
            estimate = perturbing.change_of(list(group[measure]), list(group["cluster"]), resamples)
            out.append((variant, item, measure, *estimate, len(group)))
    for variant, group in frame[frame["item"] == 0].groupby("variant", sort=False):
        estimate = perturbing.mean_of(list(group["score"]), list(group["cluster"]), resamples)
        out.append((variant, -1, "score", *estimate, len(group)))
    return pd.DataFrame(out, columns=["variant", "item", "measure", "value", "low", "high", "n"])


def _effects(frame: pd.DataFrame, at: Mapping[str, int], resamples: int) -> pd.DataFrame:
    """The numbers behind the verdicts."""
    out: dict[str, tuple[tuple[float, float, float], int]] = {}

    def group(variant: str, item: int, measure: str = "attention") -> Group:
        rows = frame[(frame["variant"] == variant) & (frame["item"] == item)]
        return list(rows[measure]), list(rows["cluster"])

    def add(
        name: str, groups: Mapping[str, Group], statistic: Callable[[Mapping[str, Array]], Array]
    ) -> None:
        out[name] = (
            perturbing.interval(groups, statistic, resamples=resamples),
            len(next(iter(groups.values()))[0]),
        )

    for where, item in at.items():
        controls = [v for v in frame["variant"].unique() if v.startswith(f"{where}_control_")]
        groups = {"after": group(where, item), "before": group(UNMODIFIED, item)}
        groups |= {"first": group(where, 0), "first_before": group(UNMODIFIED, 0)}
        groups |= {name: group(name, item) for name in controls}
        rest = lambda m, names=controls: np.mean([m[name] for name in names], axis=0)  # noqa: E731
        add(f"{where}_over_first", groups, lambda m: m["after"] - m["first"])
        add(f"{where}_before", groups, lambda m: m["before"] - m["first_before"])
        add(f"{where}_rise", groups, lambda m: m["after"] - m["before"])
        add(f"{where}_control", groups, lambda m, rest=rest: rest(m) - m["before"])  # type: ignore[misc]
        add(f"{where}_over_control", groups, lambda m, rest=rest: m["after"] - rest(m))  # type: ignore[misc]
        scores = {"after": group(where, 0, "score"), "before": group(UNMODIFIED, 0, "score")}
        add(f"{where}_score", scores, lambda m: m["after"] - m["before"])
    return perturbing.effects_table(out)


@styled
def items_figure(items: pd.DataFrame) -> Figure:
    """Channel (above) and attention (below) of every item, a column for each changed item."""
    figure, first = new_figure(PAGE, 4.2), items.iloc[0]
    grid = figure.subplots(2, 2, sharex=True, sharey="row")
    for column, (where, words) in enumerate(WHERE.items()):
        for line, measure in enumerate(("channel", "attention")):
            axes, rows = grid[line][column], items[items["measure"] == measure]
            controls = rows[rows["variant"].str.startswith(f"{where}_control_")]
            random = controls.groupby("item", as_index=False)["value"].mean()
            if measure == "attention":
                style = line_style(1) | {"linestyle": "--", "markersize": 2}
                axes.plot(random["item"] + 1, random["value"], label="random channel changed", **style)
            lines = (
                (where, "positional channel changed", line_style(0)),
                (UNMODIFIED, "unmodified", line_style(0, True)),
            )
            for variant, label, style in lines:
                part = rows[rows["variant"] == variant]
                axes.plot(part["item"] + 1, part["value"], label=label, **style | {"markersize": 2})
                axes.fill_between(
                    part["item"] + 1, part["low"], part["high"], color=style["color"], alpha=0.15, linewidth=0
                )
            marked = rows[(rows["variant"] == where) & (rows["item"] == first[where])]
            axes.plot(
                marked["item"] + 1,
                marked["value"],
                linestyle="none",
                marker="o",
                markersize=9,
                markerfacecolor="none",
                color="black",
                markeredgewidth=0.8,
            )
            if measure == "attention":
                axes.set_xlabel("item (1 is the first)")
        grid[0][column].set_title(f"{words} changed (item {first[where] + 1})")
    grid[0][0].set_ylabel(f"mean of channel {first['tested_channel']}")
    grid[1][0].set_ylabel("attention\n(mean weight per token)")
    # The gold item has a hundred times the weight of the others, whose levels matter here.
    grid[1][0].set_yscale("log")
    legend_below(figure, grid[1][0])
    return figure
