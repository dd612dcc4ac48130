"""What writes the position into a channel: the causal mask is cropped, or position ids are shifted, for a
span of random text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
import torch
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.model.lm import LM, batches
from posbench.perturbations import spans as perturb
from posbench.perturbations.spans import Site
from posbench.pipeline.config import Config
from posbench.plots.base import COLUMN, PAGE, legend_below, line_style, new_figure, styled
from posbench.run.base import UNMODIFIED, Run, complete
from posbench.search import ChannelSearch
from posbench.search.channel_run import random_strings
from posbench.studies import perturbing
from posbench.studies.base import Finding, Study
from posbench.studies.perturbing import Array, Range

LABELS = {UNMODIFIED: "unmodified", "crop": "crop mask", "shift": "position ids shifted"}
SOURCE = "Yu et al. 2025, Appendix D.4, Figure 11"


@dataclass(frozen=True, kw_only=True)
class HiddenPerturbation(Study):
    """Crop mask and shifted position ids of a span of random text, and the positional channel there (Yu et
    al. 2025, Figure 11).

    Every statistic is a change of the channel's mean over the span (or behind it) in units of the channel's
    range over the prompt in that layer, positive towards its value at the beginning, and averaged over the
    layers behind the first cropped one.

    Source: Yu et al. 2025, Appendix D.4. Random channels as a control are ours.

    Attributes:
        channel: The positional channel, 0-based.
        texts: Random texts to average over.
        length: Tokens per text (paper: 1000).
        alphabet: See :class:`posbench.search.ChannelSearch`.
        span: Start and end of the span, as shares of the text (paper: tokens 400 to 600).
        layers: First and last layer with a cropped mask, 0-based; None is all (the paper does not say).
        keep_first: Whether the span still sees the first token (D.4: it sees no token before it; D.3 keeps
            the first).
        site: ``attention_input``, the tensor whose channel is scaled, or the ``residual`` stream.
        skip: First positions left out of the range (paper: 30).
        bins: Points of a curve: means over equal parts of the text.
        controls: Random channels.
        seed: Seed of the texts and of the random channels.
    """

    channel: int | None = None
    texts: int = 100
    length: int = 1000
    alphabet: Literal["characters", "tokens"] = "characters"
    span: tuple[float, float] = (0.4, 0.6)
    layers: Range | None = None
    keep_first: bool = False
    site: Site = "attention_input"
    skip: int = 30
    bins: int = 40
    controls: int = 5
    seed: int = 0

    def check(self, config: Config, lm: LM | None) -> None:
        """Refuse a channel, layers, a length or a span that does not fit the model."""
        assert lm is not None
        perturbing.check_counts(texts=self.texts, bins=self.bins, controls=self.controls)
        perturbing.positional_channel(lm, self.channel)
        perturbing.check_range(lm, "layers", self.layers)
        if not self.skip + self.bins <= self.length <= lm.context_window:
            raise UserError(
                "study.length",
                self.length,
                f"from {self.skip + self.bins} (study.skip + study.bins) to {lm.context_window} (window of {lm.name})",
                "set study.length=128",
            )
        start, stop = self._span
        if not 0 < start < stop < self.length or stop > 2 * start:
            raise UserError(
                "study.span",
                list(self.span),
                "[start, end] as shares of the text, not at its ends, and no longer than what comes before it",
                "set study.span=[0.4,0.6]",
            )
        if self.layers is not None and self.layers[0] == lm.layers - 1:
            raise UserError(
                "study.layers", list(self.layers), "layers before the last one", "set study.layers=null"
            )
        with config.trial().applied(lm), perturb.cropped(lm, [1], [(0, 0)], []):
            pass

    @property
    def _span(self) -> Range:
        return round(self.span[0] * self.length), round(self.span[1] * self.length)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``curves``, ``layer_effects`` and ``effects``."""
        lm, runtime = run.lm, run.config.runtime
        channel = perturbing.positional_channel(lm, self.channel)
        channels = [channel, *perturbing.random_channels(lm, channel, self.controls, self.seed)]
        search = ChannelSearch(strings=self.texts, length=self.length, alphabet=self.alphabet, seed=self.seed)
        texts = list(enumerate(random_strings(lm, search)))
        variants = [v for v in LABELS if v != "shift" or perturb.can_move(lm)]
        start, stop = self._span
        parts = np.array_split(np.arange(self.length), self.bins)

        @torch.inference_mode()
        def compute(batch: Sequence[tuple[int, list[int]]]) -> list[Row]:
            inputs, lengths = lm.pad([ids for _, ids in batch]), [self.length] * len(batch)
            spans, made = [(start, stop)] * len(batch), []
            for variant in variants:
                given = dict(inputs)
                if variant == "shift":
                    given["position_ids"] = inputs["position_ids"].clone()
                    given["position_ids"][:, start:stop] -= stop - start
                cropped = (
                    range(lm.layers) if self.layers is None else range(self.layers[0], self.layers[1] + 1)
                )
                crop = perturb.cropped(lm, lengths, spans, cropped, keep_first=self.keep_first)
                with (
                    crop if variant == "crop" else nullcontext(),
                    perturb.channel_input(lm, channels, self.site) as found,
                ):
                    lm.model(**given, use_cache=False, logits_to_keep=1)
                made.append(
                    np.stack([found[layer].double().cpu().numpy() for layer in range(lm.layers)], axis=1)
                )
            every = np.stack(made, axis=1)
            # A method may run a text as several rows next to each other.
            every = every.reshape(len(batch), -1, *every.shape[1:]).mean(1)  # [B, V, L, P, C]
            curves = np.stack([every[..., part, :].mean(-2) for part in parts], axis=-1)  # [B, V, L, C, bins]
            inside, behind = every[..., start:stop, :].mean(-2), every[..., stop:, :].mean(-2)
            return [
                {"curves": _rounded(c), "inside": _rounded(i), "behind": _rounded(b)}
                for c, i, b in zip(curves, inside, behind, strict=True)
            ]

        plan = batches([self.length] * self.texts, runtime.batch_size, runtime.batch_tokens)
        rows = complete(
            run,
            "rows.jsonl",
            "hidden perturbation",
            [[texts[i] for i in group] for group in plan],
            lambda text: {"text": text[0]},
            compute,
        )
        curves = np.mean([row["curves"] for row in rows], axis=0)
        middle = np.array([part.mean() for part in parts])
        whole = curves[0][..., middle >= self.skip]
        reach = whole.max(-1) - whole.min(-1)  # [L, C]
        unmodified = np.mean([row["inside"] for row in rows], axis=0)[0]
        sign = np.sign(whole[..., 0] - unmodified)
        change = {
            where: sign / reach * (values - values[:, :1])
            for where in ("inside", "behind")
            for values in [np.array([row[where] for row in rows])]
        }  # [texts, V, L, C]
        after = list(range((self.layers or (0, 0))[0] + 1, lm.layers))
        resamples = runtime.resamples
        return {
            "curves": self._curves(curves, channels, variants, middle),
            "layer_effects": _by_layer(change, channels, variants, resamples),
            "effects": _effects(
                {where: v[:, :, after].mean(2) for where, v in change.items()}, variants, resamples
            ),
        }

    def _curves(
        self, curves: Array, channels: Sequence[int], variants: Sequence[str], middle: Array
    ) -> pd.DataFrame:
        """Variant, layer, channel, control, position, value; start and end of the span, in tokens."""
        variant, layer, channel, place = np.indices(curves.shape)
        return pd.DataFrame(
            {
                "variant": np.array(variants)[variant.ravel()],
                "layer": layer.ravel(),
                "channel": np.array(channels)[channel.ravel()],
                "control": channel.ravel() > 0,
                "position": middle[place.ravel()],
                "value": curves.ravel(),
                "start": self._span[0],
                "end": self._span[1],
            }
        )

    def figures(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[Figure, str]]:
        """The channel over the position under each perturbation, and its change in every layer."""
        curves = "The positional channel over the token position, mean over random texts, a line per layer (grey: the span)."
        layers = (
            "Change of the channel's mean inside the span, in units of its range over the prompt in that layer, positive towards "
            "its value at the beginning; 95 % intervals over texts. Dashed: mean over the random channels."
        )
        return {
            "hidden_perturbation": (curves_figure(tables["curves"]), curves),
            "hidden_perturbation_layers": (layers_figure(tables["layer_effects"]), layers),
        }

    def findings(self, tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        """Claim C3, second half: the causal mask, not the position embedding, makes positional hidden
        states."""
        effects = tables["effects"].set_index("effect")
        unit = (
            "in units of the channel's range, towards its value at the beginning, mean over layers and texts"
        )
        claims = [
            (
                "crop_inside",
                f"C3: without what comes before, the channel in the span falls back ({SOURCE}b)",
                f"change inside the span under the crop mask, {unit}",
            ),
            (
                "crop_over_shift",
                f"C3: the causal mask, not the position embedding, makes positional hidden states ({SOURCE})",
                "change inside the span under the crop mask minus the size of that under shifted position ids, same unit",
            ),
            (
                "crop_over_control",
                "Control: the crop mask moves random channels less",
                "change inside the span under the crop mask minus the mean over the random channels, same unit",
            ),
        ]
        found = []
        for name, claim, statistic in claims:
            if name not in effects.index:
                text = (
                    "the model has no rotary embedding in attention that runs through the library's functions"
                )
                found.append(
                    Finding(
                        claim=claim,
                        statistic=statistic,
                        value=np.nan,
                        n=0,
                        verdict="not testable here",
                        note=text,
                    )
                )
                continue
            row = effects.loc[name]
            others = [
                f"{key.replace('_', ' ')} {effects.at[key, 'value']:.3g}"
                for key in CONTEXT[name]
                if key in effects.index
            ]
            found.append(
                Finding(
                    claim=claim,
                    statistic=statistic,
                    value=row["value"],
                    low=row["low"],
                    high=row["high"],
                    n=int(row["n"]),
                    verdict=perturbing.verdict(row["low"]),
                    note="; ".join(others),
                )
            )
        return found


CONTEXT = {
    "crop_inside": ("crop_behind",),
    "crop_over_shift": ("shift_inside", "shift_behind"),
    "crop_over_control": ("control_crop_inside",),
}
"""Further effects that a finding's note quotes."""


def _rounded(values: Array) -> list[float]:
    """Nested lists with 6 significant digits."""
    flat = np.array([float(f"{x:.6g}") for x in values.ravel()])
    return flat.reshape(values.shape).tolist()


def _by_layer(
    change: Mapping[str, Array], channels: Sequence[int], variants: Sequence[str], resamples: int
) -> pd.DataFrame:
    """Variant, where, layer, channel, control, change, low, high, n: in units of the range of the channel in
    that layer."""
    out = []
    for where, values in change.items():
        for v, variant in enumerate(variants[1:], start=1):
            for layer in range(values.shape[2]):
                for c, channel in enumerate(channels):
                    found = values[:, v, layer, c]
                    estimate = perturbing.change_of(list(found), _texts(found), resamples)
                    out.append((variant, where, layer, channel, c > 0, *estimate, len(found)))
    columns = ["variant", "where", "layer", "channel", "control", "change", "low", "high", "n"]
    return pd.DataFrame(out, columns=columns)


def _effects(change: Mapping[str, Array], variants: Sequence[str], resamples: int) -> pd.DataFrame:
    """The numbers behind the verdicts, from changes [texts, V, C] averaged over layers."""
    out: dict[str, tuple[tuple[float, float, float], int]] = {}
    for where, values in change.items():
        for v, variant in enumerate(variants[1:], start=1):
            for name, found in (
                (variant, values[:, v, 0]),
                (f"control_{variant}", values[:, v, 1:].mean(-1)),
            ):
                out[f"{name}_{where}"] = (
                    perturbing.change_of(list(found), _texts(found), resamples),
                    len(found),
                )
    inside = change["inside"]
    crop = variants.index("crop")
    groups = {"crop": inside[:, crop, 0], "control": inside[:, crop, 1:].mean(-1)}
    if "shift" in variants:
        groups["shift"] = inside[:, variants.index("shift"), 0]
    named = {key: (list(values), _texts(values)) for key, values in groups.items()}
    n = len(inside)
    out["crop_over_control"] = (
        perturbing.interval(named, lambda m: m["crop"] - m["control"], resamples=resamples),
        n,
    )
    if "shift" in variants:
        out["crop_over_shift"] = (
            perturbing.interval(named, lambda m: m["crop"] - np.abs(m["shift"]), resamples=resamples),
            n,
        )
    return perturbing.effects_table(out)


def _texts(values: Array) -> list[str]:
    return [str(i) for i in range(len(values))]


@styled
def curves_figure(curves: pd.DataFrame) -> Figure:
    """The positional channel over the position, a panel per perturbation and a line per layer."""
    rows = curves[~curves["control"].astype(bool)]
    layers, first = sorted(rows["layer"].unique()), rows.iloc[0]
    colours = ListedColormap(colormaps["viridis"](np.linspace(0, 0.9, len(layers))))
    variants = [v for v in LABELS if v in set(rows["variant"])]
    figure = new_figure(PAGE, 2.4)
    panels = figure.subplots(1, len(variants), sharey=True)
    for axes, variant in zip(panels, variants, strict=True):
        axes.axvspan(first["start"], first["end"], color="0.9", linewidth=0)
        for layer, line in rows[rows["variant"] == variant].groupby("layer"):
            dash = ("-", "--", "-.", ":")[layers.index(layer) % 4]
            axes.plot(line["position"], line["value"], color=colours(layers.index(layer)), linestyle=dash)
        axes.set(xlabel="token position", title=LABELS[variant])
    panels[0].set_ylabel(f"mean value of channel {first['channel']}")
    norm = BoundaryNorm(np.arange(len(layers) + 1) - 0.5, len(layers))
    ticks = list(range(0, len(layers), max(1, len(layers) // 8)))
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=list(panels), label="layer", ticks=ticks)
    bar.ax.set_yticklabels([str(layers[tick]) for tick in ticks])
    bar.minorticks_off()
    return figure


@styled
def layers_figure(table: pd.DataFrame) -> Figure:
    """Change inside the span by layer: the positional channel with its interval, and the mean over the random
    ones."""
    inside = table[table["where"] == "inside"]
    figure = new_figure(COLUMN, 2.5)
    axes = figure.subplots()
    axes.axhline(0, color="black", linewidth=0.6)
    for index, variant in enumerate(v for v in LABELS if v in set(inside["variant"])):
        rows, style = inside[inside["variant"] == variant], line_style(index)
        control = rows["control"].astype(bool)
        line = rows[~control].sort_values("layer")
        axes.plot(line["layer"], line["change"], label=LABELS[variant], **style)
        axes.fill_between(
            line["layer"], line["low"], line["high"], color=style["color"], alpha=0.15, linewidth=0
        )
        random = rows[control].groupby("layer")["change"].mean()
        dashed = style | {"linestyle": "--", "markerfacecolor": "white"}
        axes.plot(random.index, random.to_numpy(), **dashed)
    axes.plot(
        [], [], color="0.4", linestyle="--", marker="o", markerfacecolor="white", label="random channels"
    )
    axes.set(xlabel="layer", ylabel="change inside the span\n(share of the range)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_below(figure, axes)
    return figure
