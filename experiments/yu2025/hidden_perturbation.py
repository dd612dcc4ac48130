"""Does the mask or do the position ids write the position into a channel? Each is perturbed in random text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from posbench.errors import UserError
from posbench.files.atomic import Row, round_values
from posbench.late import Figure, inference_mode, pd
from posbench.measure.states import Site, Strings, channel_input, stacked
from posbench.methods.scale_channel import check_layers
from posbench.model.guard import forward
from posbench.model.lm import LM
from posbench.perturbations.crop_mask import crop_mask
from posbench.perturbations.move_positions import can_move
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.cost import StudyWorkload
from posbench.schema import Alphabet, Count, Seed, Share, Whole
from posbench.stats import bootstrap
from posbench.stats.bootstrap import Array
from posbench.stats.findings import Finding, estimate_row
from posbench.stats.frames import UNMODIFIED
from posbench.studies import prompts as shared
from posbench.studies.base import Study, Tables
from posbench.studies.prompts import LayerRange
from yu2025 import common

VARIANT_LABELS = {
    UNMODIFIED: "unmodified",
    "crop": "crop mask",
    "shift": "position ids shifted",
}
REGIONS = ("inside", "behind")
POSITIONAL = 0
"""Index of the positional channel among the channels that are read; the random ones follow."""
"""Where the channel is averaged: over the changed span, and over the text behind it."""
Changes = Mapping[str, Array]


@dataclass(frozen=True, kw_only=True)
class HiddenPerturbation(Study):
    """Crop mask and shifted position ids of a span of random text, and the positional channel there.

    Every statistic is a change of the channel's mean over the span (or behind it) in units of its range over
    the text in that layer, positive towards the beginning; a mean of the layers behind the first cropped one.

    Source: Yu et al. 2025, Appendix D.4, Figure 11. Random channels as a control are ours.

    Attributes:
        channel: The positional channel; None: the one in the model's scale_channel block.
        texts: Random texts.
        length: Tokens of each text (1000 as the paper).
        alphabet: Alphabet of the texts, see :class:`posbench.measure.states.Strings`.
        span: Start and end of the changed span, as shares of the text (as the paper).
        layers: First and last cropped layer; None is all (the paper does not say).
        keep_first: Whether the span still sees the first token (D.4: no; D.3: yes).
        site: Hidden states to read.
        skip: First tokens left out of the range (30 as the paper).
        bins: Points of a curve: means over equal parts of the text.
        controls: Random channels.
        seed: Seed of the texts and of the random channels.
    """

    text_lengths: ClassVar[tuple[str, ...]] = ("length",)
    smallest: ClassVar[Mapping[str, int]] = {"texts": 8}
    channel: int | None = None
    texts: Count = 100
    length: Count = 1000
    alphabet: Alphabet = "characters"
    span: tuple[Share, Share] = (0.4, 0.6)
    layers: tuple[int, int] | None = None
    keep_first: bool = False
    site: Site = "attention_input"
    skip: Whole = 30
    bins: Count = 40
    controls: Count = 5
    seed: Seed = 0

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        lm = run.lm
        common.study_channels(run, self.channel, self.controls, self.seed)
        check_layers(lm, "study.layers", self.layers)
        shortest = self.skip + self.bins
        longest = lm.context_window
        if not shortest <= self.length <= longest:
            allowed = f"from {shortest} (study.skip + study.bins) to {longest} (window of {lm.name})"
            hint = "set study.length=128"
            raise UserError("study.length", self.length, allowed, hint)
        start, stop = self._span_tokens
        if not 0 < start < stop < self.length or stop > 2 * start:
            allowed = (
                "[start, end] as shares of the text, no longer than the part before it"
            )
            hint = "set study.span=[0.4,0.6]"
            raise UserError("study.span", list(self.span), allowed, hint)
        if self._cropped_layers(lm)[0] == lm.layers - 1:
            allowed = "layers before the last one"
            hint = "set study.layers=null"
            raise UserError("study.layers", self.layers, allowed, hint)
        shared.need_whole_maps(run)
        with run.method.trial().applied(lm), crop_mask(lm, [1], [(0, 0)], []):
            pass

    @property
    def _span_tokens(self) -> LayerRange:
        """First token of the changed span and the token after its last one."""
        return round(self.span[0] * self.length), round(self.span[1] * self.length)

    def _cropped_layers(self, lm: LM) -> range:
        first, last = self.layers or (0, lm.layers - 1)
        return range(first, last + 1)

    def workload(self, run: Run) -> list[StudyWorkload]:
        """See :meth:`Study.workload`."""
        return [
            StudyWorkload(texts=self.texts * len(VARIANT_LABELS), length=self.length)
        ]

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``curves``, ``layer_effects`` and ``effects``."""
        lm = run.lm
        channels = common.study_channels(run, self.channel, self.controls, self.seed)
        strings = Strings(
            count=self.texts, length=self.length, alphabet=self.alphabet, seed=self.seed
        )
        variants = [v for v in VARIANT_LABELS if v != "shift" or can_move(lm)]
        bins = np.array_split(np.arange(self.length), self.bins)
        start, stop = self._span_tokens

        def compute(batch: Sequence[tuple[int, list[int]]]) -> list[Row]:
            texts = [tokens for _, tokens in batch]
            states = np.stack(
                [self._channels(lm, texts, v, channels) for v in variants], axis=1
            )  # [B, V, L, P, C]
            means = {
                "curves": np.stack(
                    [states[..., tokens, :].mean(-2) for tokens in bins], axis=-1
                ),  # [B, V, L, C, bins]
                "inside": states[..., start:stop, :].mean(-2),
                "behind": states[..., stop:, :].mean(-2),
            }
            return [
                {name: round_values(values[i]) for name, values in means.items()}
                for i in range(len(batch))
            ]

        batches = run.prompts.batches_by_length(
            list(enumerate(strings.draw(lm))), lambda text: self.length
        )
        rows = run.rows.complete(
            "rows.jsonl",
            "hidden perturbation",
            batches,
            lambda text: {"text": text[0]},
            compute,
        )
        curves = np.mean([row["curves"] for row in rows], axis=0)  # [V, L, C, bins]
        bin_centres = np.array([tokens.mean() for tokens in bins])
        changes = self._changes(
            rows, curves[variants.index(UNMODIFIED)][..., bin_centres >= self.skip]
        )
        after_first = slice(self._cropped_layers(lm)[0] + 1, None)
        mean_changes = {
            region: values[:, :, after_first].mean(2)
            for region, values in changes.items()
        }
        return {
            "curves": self._curves(curves, channels, variants, bin_centres),
            "layer_effects": _by_layer(changes, channels, variants),
            "effects": _effects(mean_changes, variants, run.runtime.resamples).assign(
                channel=channels[POSITIONAL],
                subject=common.channel_subject(run, channels[POSITIONAL]),
            ),
        }

    @inference_mode
    def _channels(
        self, lm: LM, texts: Sequence[list[int]], variant: str, channels: Sequence[int]
    ) -> Array:
        """Run texts under a variant and read C channels of the hidden states, [B, L, P, C]."""
        inputs = lm.pad(texts)
        start, stop = self._span_tokens
        block: AbstractContextManager[None] = nullcontext()
        if variant == "crop":
            block = crop_mask(
                lm,
                [self.length] * len(texts),
                [(start, stop)] * len(texts),
                self._cropped_layers(lm),
                keep_first=self.keep_first,
            )
        elif variant == "shift":
            inputs["position_ids"][:, start:stop] -= stop - start
        with block, channel_input(lm, channels, self.site) as states:
            forward(lm, **inputs)
        return stacked(states, len(texts))

    def _changes(self, rows: Sequence[Row], unmodified: Array) -> Changes:
        """Changes of the channels from the unmodified model, in units of their range.

        Args:
            rows: Means of the channels by text.
            unmodified: The unmodified curves behind the first ``skip`` tokens, [L, C, bins].

        Returns:
            By region the changes of V variants, positive towards the beginning, [texts, V, L, C].
        """
        extent = unmodified.max(-1) - unmodified.min(-1)
        inside = np.mean([row["inside"] for row in rows], axis=0)[0]
        sign = np.sign(unmodified[..., 0] - inside)
        changes = {}
        for region in REGIONS:
            values = np.array([row[region] for row in rows])
            changes[region] = sign / extent * (values - values[:, :1])
        return changes

    def _curves(
        self, curves: Array, channels: list[int], variants: list[str], tokens: Array
    ) -> pd.DataFrame:
        """Rows of variant, layer, channel, control, token, value; start and end of the span, in tokens."""
        variant, layer, channel_index, point = (
            index.ravel() for index in np.indices(curves.shape)
        )
        start, stop = self._span_tokens
        return pd.DataFrame(
            {
                "variant": np.take(variants, variant),
                "layer": layer,
                "channel": np.take(channels, channel_index),
                "control": channel_index > POSITIONAL,
                "token": tokens[point],
                "value": curves.ravel(),
                "start": start,
                "end": stop,
            }
        )

    def figures(self, tables: Tables) -> Drawn:
        """See :meth:`Study.figures`."""
        effects = tables["layer_effects"]
        curves = curves_figure(tables["curves"], effects["n"])
        caption = "The positional channel over the token, mean over texts; each layer has an axis of its own."
        figures = {"hidden_perturbation": (curves, caption)}
        caption = "Change of its mean in the span by layer, in ranges, towards the beginning (95 %)."
        figures["hidden_perturbation_layers"] = (layers_figure(effects), caption)
        return figures

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Claim C3, second half: the mask, not the position embedding, makes positional hidden states."""
        effects = tables["effects"]
        first = effects.iloc[0]
        note = f"channel {first['channel']}"
        return shared.judge_claims(
            effects, "hidden_perturbation", note, subject=first["subject"]
        )


def _text_clusters(changes: Array) -> list[str]:
    """Each text as a cluster of its own."""
    return [str(text) for text in range(len(changes))]


def _by_layer(
    changes: Changes, channels: list[int], variants: list[str]
) -> pd.DataFrame:
    """Rows of variant, where, layer, channel, control, change (in the channel's range) and interval, n.

    Args:
        changes: By region the changes of every variant, [texts, V, L, C].
        channels: The positional channel, then the random ones, [C].
        variants: The unmodified model, then the others, [V].
    """
    table = []
    for region, values in changes.items():
        clusters = _text_clusters(values)
        _, num_variants, num_layers, num_channels = values.shape
        for variant in range(1, num_variants):
            for layer, channel_index in np.ndindex(num_layers, num_channels):
                change = bootstrap.difference(
                    values[:, variant, layer, channel_index], clusters
                )
                row = {
                    "variant": variants[variant],
                    "where": region,
                    "layer": layer,
                    "channel": channels[channel_index],
                    "control": channel_index > POSITIONAL,
                    **estimate_row(change, "change"),
                    "n": change.n,
                }
                table.append(row)
    return pd.DataFrame(table)


def _effects(changes: Changes, variants: Sequence[str], resamples: int) -> pd.DataFrame:
    """The numbers behind the verdicts.

    Args:
        changes: By region the changes of every variant averaged over layers, [texts, V, C]; channel 0 is the
            positional one, the others are controls.
        variants: The unmodified model, then the others, [V].
        resamples: Draws of the bootstrap.
    """
    effects = {}
    for region, values in changes.items():
        clusters = _text_clusters(values)
        for index, variant in enumerate(variants[1:], start=1):
            positional = values[:, index, POSITIONAL]
            controls = values[:, index, 1:].mean(-1)
            effects[f"{variant}_{region}"] = bootstrap.difference(positional, clusters)
            effects[f"control_{variant}_{region}"] = bootstrap.difference(
                controls, clusters
            )
    inside = changes["inside"]
    clusters = _text_clusters(inside)
    groups = {
        variant: (inside[:, index, 0], clusters)
        for index, variant in enumerate(variants[1:], start=1)
    }
    groups["control"] = (inside[:, variants.index("crop"), 1:].mean(-1), clusters)
    effects["crop_over_control"] = common.difference_of_means(
        groups, "crop", "control", resamples
    )
    if "shift" in variants:
        effects["crop_over_shift"] = bootstrap.statistic(
            groups,
            lambda means: means["crop"] - np.abs(means["shift"]),
            resamples=resamples,
        )
        effects["shift_size"] = bootstrap.statistic(
            groups, lambda means: np.abs(means["shift"]), resamples=resamples
        )
    return shared.effects_table(effects)


@plot.styled
def curves_figure(curves: pd.DataFrame, n: Iterable[float] = ()) -> Figure:
    """The positional channel over the token, mean of ``n`` texts; a panel per layer, a line per change."""
    rows = curves[~curves["control"]]
    layers = list(rows.groupby("layer"))
    first = rows.iloc[0]
    across = plot.layers_per_row(len(layers))
    figure, panels = plot.new_panels(len(layers), across, 1.5, n=n)
    for axes, (layer, layer_rows) in zip(panels, layers, strict=True):
        axes.axvspan(
            first["start"],
            first["end"],
            color=plot.SHADE,
            linewidth=0,
            label="changed span",
        )
        for index, (variant, label) in enumerate(VARIANT_LABELS.items()):
            line = layer_rows[layer_rows["variant"] == variant]
            if line.empty:
                continue
            style = plot.line_style(max(index - 1, 0), variant == UNMODIFIED)
            style["marker"] = ""
            axes.plot(line["token"], line["value"], label=label, **style)
        axes.set_title(f"layer {layer}")
        axes.locator_params("y", nbins=4)
        axes.locator_params("x", nbins=4 if across < plot.MAX_PANELS_PER_ROW else 1)
    for axes in panels[::across]:
        axes.set_ylabel(f"mean of channel {first['channel']}")
    plot.label_bottom_row(panels, across)
    plot.add_legend_below(figure)
    return figure


@plot.styled
def layers_figure(table: pd.DataFrame) -> Figure:
    """Change inside the span by layer: the positional channel (95 %), and the mean of the random ones."""
    inside = table[table["where"] == "inside"]
    figure, axes = plot.new_figure(plot.COLUMN, 2.7, n=table["n"])
    axes.axhline(0, color=plot.GUIDE, linewidth=0.6)
    variants = [
        variant for variant in VARIANT_LABELS if variant in set(inside["variant"])
    ]
    for index, variant in enumerate(variants):
        label = VARIANT_LABELS[variant]
        rows = inside[inside["variant"] == variant]
        positional = rows[~rows["control"]]
        style = plot.line_style(index)
        plot.band(
            axes, positional, style, x="layer", name="change", scale=1, label=label
        )
        random = rows[rows["control"]].groupby("layer")["change"].mean()
        style = plot.CONTROL_STYLE | {"marker": style["marker"]}
        axes.plot(random, label=f"{label}, random channels", **style)
    axes.set(xlabel="layer", ylabel="change inside the span\n(share of the range)")
    axes.locator_params("x", integer=True)
    plot.add_legend_below(figure)
    return figure
