"""What writes the position into a channel? Masks are cropped, or position ids shifted, in random text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from posbench.errors import UserError
from posbench.files.atomic import Row, rounded
from posbench.late import Figure, inference_mode, pd
from posbench.measure.states import Alphabet, Site, Strings, channel_input, stacked
from posbench.methods.scale_channel import check_layers
from posbench.model.guard import forward
from posbench.model.lm import LM
from posbench.perturbations.crop_mask import crop_mask
from posbench.perturbations.move_positions import can_move
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.cost import StudyWorkload
from posbench.schema import Count, Seed, Share, Whole
from posbench.stats import bootstrap
from posbench.stats.bootstrap import Array
from posbench.stats.findings import Finding, ends
from posbench.stats.frames import UNMODIFIED
from posbench.studies import prompts as shared
from posbench.studies.base import Study, Tables
from posbench.studies.prompts import Range

LABELS = {
    UNMODIFIED: "unmodified",
    "crop": "crop mask",
    "shift": "position ids shifted",
}
Changes = Mapping[str, Array]


@dataclass(frozen=True, kw_only=True)
class HiddenPerturbation(Study):
    """Crop mask and shifted position ids of a span of random text, and the positional channel there.

    Every statistic is a change of the channel's mean over the span (or behind it) in units of its range over
    the text in that layer, positive towards the beginning; a mean of the layers behind the first cropped one.

    Source: Yu et al. 2025, Appendix D.4, Figure 11. Random channels as a control are ours.
    """

    channel: int | None = (
        None  # the positional channel; None: that of the model's scale_channel block
    )
    texts: Count = 100
    length: Count = 1000  # tokens per text (as the paper)
    alphabet: Alphabet = "characters"  # see measure.states.Strings
    span: tuple[Share, Share] = (
        0.4,
        0.6,
    )  # start and end, as shares of the text (as the paper)
    layers: tuple[int, int] | None = (
        None  # first and last cropped one; None is all (the paper does not say)
    )
    keep_first: bool = (
        False  # whether the span still sees the first token (D.4: no; D.3: yes)
    )
    site: Site = "attention_input"
    skip: Whole = 30  # first tokens left out of the range (as the paper)
    bins: Count = 40  # points of a curve: means over equal parts of the text
    controls: Count = 5  # random channels
    seed: Seed = 0  # of the texts and of the random channels

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        lm = run.lm
        low = self.skip + self.bins
        shared.channels(run, self.channel, self.controls, self.seed)
        check_layers(lm, "study.layers", self.layers)
        if not low <= self.length <= lm.context_window:
            allowed = f"from {low} (study.skip + study.bins) to {lm.context_window} (window of {lm.name})"
            raise UserError(
                "study.length", self.length, allowed, "set study.length=128"
            )
        start, stop = self._span
        if not 0 < start < stop < self.length or stop > 2 * start:
            allowed = "[start, end] inside the text as shares of it, no longer than what comes before it"
            raise UserError(
                "study.span", list(self.span), allowed, "set study.span=[0.4,0.6]"
            )
        if self._cropped(lm)[0] == lm.layers - 1:
            allowed = "layers before the last one"
            raise UserError(
                "study.layers", self.layers, allowed, "set study.layers=null"
            )
        with run.method.trial().applied(lm), crop_mask(lm, [1], [(0, 0)], []):
            pass

    @property
    def _span(self) -> Range:
        return round(self.span[0] * self.length), round(self.span[1] * self.length)

    def _cropped(self, lm: LM) -> range:
        first, last = self.layers or (0, lm.layers - 1)
        return range(first, last + 1)

    def reads(self, run: Run) -> list[StudyWorkload]:
        """See :meth:`Study.reads`."""
        return [StudyWorkload(texts=self.texts * len(LABELS), length=self.length)]

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``curves``, ``layer_effects`` and ``effects``."""
        channels = shared.channels(run, self.channel, self.controls, self.seed)
        strings = Strings(
            count=self.texts, length=self.length, alphabet=self.alphabet, seed=self.seed
        )
        variants = [v for v in LABELS if v != "shift" or can_move(run.lm)]
        (start, stop), parts = (
            self._span,
            np.array_split(np.arange(self.length), self.bins),
        )

        def compute(batch: Sequence[tuple[int, list[int]]]) -> list[Row]:
            ids = [text for _, text in batch]
            every = np.stack(
                [self._channels(run.lm, ids, v, channels) for v in variants], axis=1
            )
            curves = np.stack(
                [every[..., part, :].mean(-2) for part in parts], axis=-1
            )  # [B, V, L, C, bins]
            means = {
                "inside": every[..., start:stop, :].mean(-2),
                "behind": every[..., stop:, :].mean(-2),
            }
            found = {"curves": curves, **means}
            return [
                {name: rounded(part[i]) for name, part in found.items()}
                for i in range(len(batch))
            ]

        batches = run.prompts.batches_by_length(
            list(enumerate(strings.draw(run.lm))), lambda text: self.length
        )
        rows = run.rows.complete(
            "rows.jsonl",
            "hidden perturbation",
            batches,
            lambda t: {"text": t[0]},
            compute,
        )
        curves = np.mean([row["curves"] for row in rows], axis=0)
        middle = np.array([part.mean() for part in parts])
        whole = curves[0][..., middle >= self.skip]
        reach = whole.max(-1) - whole.min(-1)
        change = {}  # [L, C]; [texts, V, L, C]
        sign = np.sign(
            whole[..., 0] - np.mean([row["inside"] for row in rows], axis=0)[0]
        )
        for where in ("inside", "behind"):
            values = np.array([row[where] for row in rows])
            change[where] = sign / reach * (values - values[:, :1])
        after = slice(self._cropped(run.lm)[0] + 1, None)
        averaged = {
            where: values[:, :, after].mean(2) for where, values in change.items()
        }
        return {
            "curves": self._curves(curves, channels, variants, middle),
            "layer_effects": _by_layer(change, channels, variants),
            "effects": _effects(averaged, variants, run.runtime.resamples),
        }

    @inference_mode
    def _channels(
        self, lm: LM, ids: Sequence[list[int]], variant: str, channels: Sequence[int]
    ) -> Array:
        """The channels of texts under a variant, [B, L, P, C]."""
        given, (start, stop) = lm.pad(ids), self._span
        spans = [self._span] * len(ids)
        layers = self._cropped(lm)
        block: AbstractContextManager[None] = nullcontext()
        if variant == "crop":
            block = crop_mask(
                lm, [self.length] * len(ids), spans, layers, keep_first=self.keep_first
            )
        elif variant == "shift":
            given["position_ids"][:, start:stop] -= stop - start
        with block, channel_input(lm, channels, self.site) as found:
            forward(lm, **given)
        return stacked(found, len(ids))

    def _curves(
        self, curves: Array, channels: list[int], variants: list[str], middle: Array
    ) -> pd.DataFrame:
        """Rows of variant, layer, channel, control, token, value; start and end of the span, in tokens."""
        variant, layer, channel, place = (
            index.ravel() for index in np.indices(curves.shape)
        )
        what = {
            "variant": np.take(variants, variant),
            "layer": layer,
            "channel": np.take(channels, channel),
        }
        where = {
            "control": channel > 0,
            "token": middle[place],
            "value": curves.ravel(),
        }
        return pd.DataFrame(
            {**what, **where, "start": self._span[0], "end": self._span[1]}
        )

    def figures(self, tables: Tables) -> Drawn:
        """See :meth:`Study.figures`."""
        curves = "The positional channel over the token, mean over texts; each layer has an axis of its own."
        effects = tables["layer_effects"]
        layers = "Change of its mean in the span by layer, in ranges, towards the beginning (95 %)."
        return {
            "hidden_perturbation": (
                curves_figure(tables["curves"], effects["n"]),
                curves,
            ),
            "hidden_perturbation_layers": (layers_figure(effects), layers),
        }

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Claim C3, second half: the mask, not the position embedding, makes positional hidden states."""
        return shared.judged(tables["effects"], "hidden_perturbation")


def _by_layer(
    change: Changes, channels: list[int], variants: list[str]
) -> pd.DataFrame:
    """Rows of variant, where, layer, channel, control, change (in the channel's range) and interval, n."""
    out = []
    for where, values in change.items():
        clusters = list(map(str, range(len(values))))
        for variant, layer, channel in np.ndindex(values.shape[1:]):
            if variant:
                at = bootstrap.difference(values[:, variant, layer, channel], clusters)
                place = {"variant": variants[variant], "where": where, "layer": layer}
                which = {"channel": channels[channel], "control": channel > 0}
                out.append({**place, **which, **ends(at, "change"), "n": at.n})
    return pd.DataFrame(out)


def _effects(change: Changes, variants: Sequence[str], resamples: int) -> pd.DataFrame:
    """The numbers behind the verdicts, from changes [texts, V, C] averaged over layers."""
    out = {}
    clusters = list(map(str, range(len(change["inside"]))))
    for where, values in change.items():
        for number, variant in enumerate(variants[1:], start=1):
            own = values[:, number, 0]
            controls = values[:, number, 1:].mean(-1)
            for name, found in ((variant, own), (f"control_{variant}", controls)):
                out[f"{name}_{where}"] = bootstrap.difference(found, clusters)
    inside = change["inside"]
    groups = {v: (inside[:, i, 0], clusters) for i, v in enumerate(variants) if i}
    groups["control"] = inside[:, variants.index("crop"), 1:].mean(-1), clusters
    out["crop_over_control"] = shared.minus(groups, "crop", "control", resamples)
    if "shift" in variants:
        over = lambda m: m["crop"] - np.abs(m["shift"])  # noqa: E731
        out["crop_over_shift"] = bootstrap.statistic(groups, over, resamples=resamples)
    return shared.effects_table(out)


@plot.styled
def curves_figure(curves: pd.DataFrame, n: Iterable[float] = ()) -> Figure:
    """The positional channel over the token, mean of ``n`` texts; a panel per layer, a line per change."""
    rows = curves[~curves["control"]]
    layers = [*rows.groupby("layer")]
    first = rows.iloc[0]
    across = plot.layers_across(len(layers))
    figure, panels = plot.new_panels(len(layers), across, 1.5, n=n)
    for axes, (layer, here) in zip(panels, layers, strict=True):
        axes.axvspan(
            first["start"],
            first["end"],
            color=plot.SHADE,
            linewidth=0,
            label="changed span",
        )
        for index, variant in enumerate(LABELS):
            line = here[here["variant"] == variant]
            style = plot.line_style(max(index - 1, 0), not index)
            if len(line):
                axes.plot(
                    line["token"],
                    line["value"],
                    label=LABELS[variant],
                    **style | {"marker": ""},
                )
        axes.set_title(f"layer {layer}")
        axes.locator_params(nbins=4)
    panels[0].set_ylabel(f"mean value of channel {first['channel']}")
    for axes in panels[-across:]:
        axes.set_xlabel(plot.TOKEN)
    plot.legend_below(figure)
    return figure


@plot.styled
def layers_figure(table: pd.DataFrame) -> Figure:
    """Change inside the span by layer: the positional channel (95 %), and the mean of the random ones."""
    inside = table[table["where"] == "inside"]
    figure, axes = plot.new_figure(plot.COLUMN, 2.7, n=table["n"])
    axes.axhline(0, color=plot.GUIDE, linewidth=0.6)
    for index, variant in enumerate(v for v in LABELS if v in set(inside["variant"])):
        rows = inside[inside["variant"] == variant]
        style = plot.line_style(index)
        own = rows[~rows["control"]]
        label = LABELS[variant]
        plot.band(axes, own, style, x="layer", name="change", scale=1, label=label)
        random = rows[rows["control"]].groupby("layer")["change"].mean()
        control = plot.ON_TOP | {
            "marker": style["marker"],
            "label": f"{LABELS[variant]}, random channels",
        }
        axes.plot(random, **control)
    axes.set(xlabel="layer", ylabel="change inside the span\n(share of the range)")
    axes.locator_params("x", integer=True)
    plot.legend_below(figure)
    return figure
