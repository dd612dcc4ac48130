"""Channels of the hidden states that rise or fall along the prompt, and what position explains of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import scipy
from annotated_types import Ge

from posbench.errors import UserError
from posbench.late import Figure, pd
from posbench.measure.states import GROUPS, Alphabet, Array, Moments, Site, moments
from posbench.methods.scale_channel import check_channels
from posbench.plots import base as plot
from posbench.plots.search import channel_curves
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.cost import StudyWorkload
from posbench.schema import Count, Seed, Whole
from posbench.search import statistics
from posbench.search.base import STATE
from posbench.search.channel import ChannelSearch
from posbench.stats.bootstrap import Z95, Estimate, difference_of_shares
from posbench.stats.correlation import spearman
from posbench.stats.findings import Finding, ends, estimate
from posbench.studies.base import Study, Tables

PAPER = {"mistral7b": 213, "llama2_7b": 2393, "mpt_30b": 1942, "tinyllama_nope": 1156}
"""Channels of Figures 4 and 14, by our model names; for MPT-30B Table 4 scales another one, 6926."""
REAL = "as they are"
SHUFFLED = "shuffled positions"
STRONGEST = "strongest trend"
GIVEN = "given"
RANDOM = "random"
EXISTS = "Positional channels exist across families, with NoPE and ALiBi (Yu et al. 2025, Figures 4, 14)"
FILTER = "Control: the filter (monotone in over 1/4 of the layers) tells positional channels from noise"
START = "The trend first appears just after the first attention module (Yu et al. 2025, Appendix G)"
DASHES = {RANDOM: (0, (4, 2)), SHUFFLED: ":"}


@dataclass(frozen=True, kw_only=True)
class PositionalChannels(Study):
    """Curves of hidden-state channels over the token position, averaged over random strings, layer by layer.

    Channels are chosen on one set of strings and measured on another, lest the choice flatter them. Each is
    held against random ones, and against the largest correlation of any with the positions shuffled.

    Source: Yu et al. 2025, Definition 2.1, Section 2.3, Appendix C.1, Figures 4 and 14.
    """

    channels: tuple[int, ...] | None = (
        None  # None: the paper's for this model, its YAML's, and ``top`` more
    )
    top: Count = 2  # with the strongest trend: the largest mean_correlation
    controls: Count = 2  # random channels
    site: Site = "attention_input"
    strings: Annotated[int, Ge(GROUPS)] = (
        2000  # once to choose and once to measure (as the paper)
    )
    length: Count = 1000  # see measure.states.Strings
    alphabet: Alphabet = "characters"
    window: Count = 100  # tokens in the sliding mean of the filter
    skip: Whole = 30  # first tokens left out (as the paper)
    batch_size: Count = 8
    seed: Seed = 0  # of the strings, the random channels and the shuffles

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        if self.channels is not None:
            check_channels(run.lm, "study.channels", self.channels)
        low = self.window + self.skip + 7
        high = run.lm.context_window
        if not low <= self.length <= high:
            allowed = f"from {low} (study.window + study.skip + 7) to {high} (window of {run.lm.name})"
            raise UserError(
                "study.length",
                self.length,
                allowed,
                "change study.length or study.window",
            )

    @property
    def search(self) -> ChannelSearch:
        """The channel search whose strings and filter the study takes."""
        names = (
            "site",
            "strings",
            "length",
            "alphabet",
            "window",
            "skip",
            "batch_size",
            "seed",
        )
        return ChannelSearch(**{name: getattr(self, name) for name in names})

    def reads(self, run: Run) -> list[StudyWorkload]:
        """See :meth:`Study.reads`."""
        return [StudyWorkload(texts=2 * self.strings, length=self.length)]

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Four tables, the last two as positions are and with shuffled ones.

        ``curves``: averages over the second set of strings, and why a channel is there. ``summary``: means of
        the statistics over layers, the share of channels with a larger one. ``statistics``, by layer: does
        the fitted curve rise or fall throughout (``monotone`` 1, -1, 0), the averaged curve's Spearman
        correlation with the position, and the share of variance that the position explains. ``null``:
        channels that pass the search's filter, and the largest mean absolute correlation of any.
        """
        averages = self.search.averages(run)
        (run.out.path / STATE).unlink(missing_ok=True)
        residual = self.site == "residual"
        chosen = self.chosen(
            run, averages["residual"][1:] if residual else averages["attention_input"]
        )
        again = replace(self.search.drawn, seed=self.seed + 1)
        with run.progress("strings to measure on", self.strings) as advance:
            found = moments(run.lm, again, self.site, list(chosen), self.skip, advance)
        tables = {
            "curves": self._curves(found, chosen),
            "statistics": self._statistics(found, chosen),
        }
        return tables | self._summary(found, chosen)

    def chosen(self, run: Run, curves: Array) -> dict[int, str]:
        """The channels to measure and why each was chosen, from averaged states [L, P, D] of others."""
        found = dict.fromkeys(self.channels or (), GIVEN)
        if self.channels is None:
            order = np.argsort(-mean_correlation(curves[:, self.skip :]), kind="stable")
            own = run.model.blocks.get("scale_channel", {}).get("channel")
            published = {"the paper's": PAPER.get(run.model.name), "the model's": own}
            for kind, channel in [
                *((STRONGEST, int(c)) for c in order[: self.top]),
                *published.items(),
            ]:
                if channel is not None:
                    found[channel] = (
                        f"{found[channel]} and {kind}" if channel in found else kind
                    )
        rest = [c for c in range(curves.shape[2]) if c not in found]
        drawn = np.random.default_rng(self.seed).permutation(rest)[: self.controls]
        return found | {int(c): RANDOM for c in drawn}

    def _curves(self, found: Moments, chosen: Mapping[int, str]) -> pd.DataFrame:
        """Curves of the chosen channels, and of the first one with shuffled positions."""
        first = next(iter(chosen))
        parts = []
        shown = [
            (channel, kind, found.mean[:, :, channel])
            for channel, kind in chosen.items()
        ]
        for channel, kind, curve in [
            *shown,
            (first, SHUFFLED, found.shuffled[:, :, first]),
        ]:
            layer, token = (index.ravel() for index in np.indices(curve.shape))
            smooth = np.full(curve.shape, np.nan)
            behind = statistics.sliding_mean(curve[:, self.skip :, None], self.window)[
                :, :, 0
            ]
            start = self.skip + self.window // 2
            smooth[:, start : start + behind.shape[1]] = behind
            place = {
                "channel": channel,
                "kind": kind,
                "site": self.site,
                "layer": layer,
                "token": token,
            }
            parts.append(
                pd.DataFrame(
                    {**place, "value": curve.ravel(), "sliding_mean": smooth.ravel()}
                )
            )
        return pd.concat(parts, ignore_index=True)

    def _statistics(self, found: Moments, chosen: Mapping[int, str]) -> pd.DataFrame:
        """What position does to each chosen channel, layer by layer."""
        channels = list(chosen)
        parts = []
        mean, shuffled = (
            part[:, self.skip :, channels] for part in (found.mean, found.shuffled)
        )
        direction = statistics.paper(
            found.mean[:, :, channels], window=self.window, skip=self.skip
        ).direction
        for i, channel in enumerate(channels):
            rows = {
                "layer": range(len(mean)),
                "monotone": direction[:, i],
                "spearman": correlation(mean[:, :, i]),
                "shuffled_spearman": correlation(shuffled[:, :, i]),
                "explained": mean[:, :, i].var(1) / found.variance[:, i],
                "shuffled_explained": shuffled[:, :, i].var(1) / found.variance[:, i],
            }
            place = {"channel": channel, "kind": chosen[channel]}
            parts.append(pd.DataFrame({**place, **rows, "n": found.strings}))
        return pd.concat(parts, ignore_index=True)

    def _summary(
        self, found: Moments, chosen: Mapping[int, str]
    ) -> dict[str, pd.DataFrame]:
        """Means over layers with intervals, and what filter and correlation make of shuffled positions."""
        level = {}
        filtered = {}
        for kind, curves in ((REAL, found.mean), (SHUFFLED, found.shuffled)):
            level[kind] = mean_correlation(curves[:, self.skip :])
            filtered[kind] = statistics.paper(
                curves, window=self.window, skip=self.skip
            )
        rows = []
        null = []
        for i, (channel, kind) in enumerate(chosen.items()):
            count = filtered[REAL].monotone_layers[channel]
            stronger = level[REAL] > level[REAL][channel]
            row = {
                "channel": channel,
                "kind": kind,
                "monotone_layers": count,
                "layers": len(found.mean),
            }
            row |= ends(
                jackknife(found.groups[:, :, self.skip :, i], found.sizes), "spearman"
            )
            rows.append(
                {**row, "stronger_channels": stronger.mean(), "n": found.strings}
            )
        for kind, values in level.items():
            counts = {
                "positions": kind,
                "passing": len(filtered[kind].ranking),
                "channels": len(values),
            }
            null.append(
                {**counts, "largest": np.nanmax(values), "median": np.nanmedian(values)}
            )
        return {"summary": pd.DataFrame(rows), "null": pd.DataFrame(null)}

    def figures(self, tables: Tables) -> Drawn:
        """See :meth:`Study.figures`."""
        curves = tables["curves"]
        site = self.site.replace("_", " ")
        over = f"Channels of the {site}, averaged over layers and random strings. Thick: sliding mean."
        dotted = (
            "Rank correlation, and variance that the position explains, layer by layer."
        )
        drawn = {
            "averaged": (averaged_figure(curves[curves["token"] >= self.skip]), over)
        }
        drawn["statistics"] = layer_figure(tables["statistics"]), dotted
        shown = curves[~curves["kind"].isin([RANDOM, SHUFFLED])]
        for channel, kind in (
            shown.groupby("channel", sort=False)["kind"].first().items()
        ):
            caption = f"Channel {channel} ({kind}) of the {site}, layer by layer."
            drawn[f"layers_{channel}"] = channel_curves(shown, int(channel)), caption
        return drawn

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Claim C3: some channel follows the position, the filter finds such, layer 0 starts the trend."""
        summary = tables["summary"]
        null = tables["null"].set_index("positions")
        layers = tables["statistics"]
        controls = ", ".join(
            f"{rho:.2f}" for rho in summary.loc[summary["kind"] == RANDOM, "spearman"]
        )
        bar = null.loc[SHUFFLED, "largest"]
        median = null.loc[REAL, "median"]
        found = []
        for row in summary[summary["kind"] != RANDOM].to_dict("records"):
            own = layers[layers["channel"] == row["channel"]]
            name = f"channel {row['channel']}"
            note = (
                f"{name}: {row['kind']}; monotone in {row['monotone_layers']} of "
                f"{row['layers']} layers; position explains {own['explained'].mean():.1%} of its variance "
                f"(shuffled {own['shuffled_explained'].mean():.1%}); the largest correlation of any channel "
                f"with shuffled positions is {bar:.2f}; random channels {controls}, median {median:.2f}"
            )
            words = f"{name}'s absolute Spearman correlation with position, mean over layers"
            found.append(
                Finding.above(EXISTS, words, estimate(row, "spearman"), bar, note)
            )
        there, chance = (
            int(null.loc[positions, "passing"]) for positions in (REAL, SHUFFLED)
        )
        count = int(null.loc[REAL, "channels"])
        note = f"{there} of {count} pass, {chance} with shuffled positions; channels taken as independent"
        words = "share of channels that pass, minus the share that pass with shuffled positions"
        passing = Finding.above(
            FILTER, words, difference_of_shares(there, chance, count), note=note
        )
        return [*found, passing.control(), self._start(layers)]

    def _start(self, layers: pd.DataFrame) -> Finding:
        """Correlation of the strongest channel right after the first attention, against that of noise."""
        own = layers[layers["channel"] == layers["channel"].iloc[0]].set_index("layer")
        first = int(self.site == "attention_input")
        rho = own["spearman"].abs()
        bar = 1.96 / math.sqrt(self.length - self.skip - 1)
        early = rho[0] if first else 0.0
        where = "input of layer 1" if first else "output of layer 0"
        before = (
            f"; input of layer 0, where no token has seen another: {early:.2f}"
            if first
            else ""
        )
        words = f"channel {own['channel'].iloc[0]}'s absolute Spearman correlation with position, {where}"
        note = f"95 % of uncorrelated curves stay below {bar:.2f}{before}; last layer: {rho.iloc[-1]:.2f}"
        at = (rho[first], own["n"].iloc[0])
        p = 2 * scipy.stats.norm.sf(Z95 * rho[first] / bar)
        if early > bar:
            return Finding.that(False, START, words, at, note)
        return Finding.tested(True, START, words, at, p, note)


def correlation(curves: Array) -> Array:
    """Spearman correlation of each curve [..., P] with the position."""
    return spearman(
        curves.astype(np.float64), np.arange(curves.shape[-1], dtype=np.float64)
    )


def mean_correlation(curves: Array) -> Array:
    """Mean over layers of the absolute Spearman correlation with the position, [D], from curves [L, P, D]."""
    return np.nanmean([np.abs(correlation(layer.T)) for layer in curves], axis=0)


def jackknife(groups: Array, sizes: Array) -> Estimate:
    """Mean over layers of one channel's absolute correlation, its 95 % interval from leaving groups out.

    ``groups`` are the averages over each group of strings, [G, L, P], ``sizes`` the strings in each, [G].
    """
    sums = groups * sizes[:, None, None]
    whole = sums.sum(0)
    value = float(np.abs(correlation(whole)).mean())
    left = np.array([np.abs(correlation(whole - part)).mean() for part in sums])
    half = scipy.stats.t.ppf(0.975, len(left) - 1) * np.sqrt(
        (len(left) - 1) * left.var()
    )
    return Estimate(
        value, max(value - half, 0.0), min(value + half, 1.0), int(sizes.sum())
    )


def _style(index: int, kind: str) -> dict[str, Any]:
    """Controls have one colour, and dashes by their kind."""
    if kind not in DASHES:
        return plot.line_style(index)
    return plot.line_style(index) | {"color": plot.CONTROL, "linestyle": DASHES[kind]}


@plot.styled
def averaged_figure(curves: pd.DataFrame) -> Figure:
    """Curves averaged over layers, less their mean, over the token; random ones dashed, the null dotted."""
    figure, axes = plot.new_figure(plot.COLUMN, 3.0)
    for index, ((channel, kind), line) in enumerate(
        curves.groupby(["channel", "kind"], sort=False)
    ):
        mean = line.groupby("token")[["value", "sliding_mean"]].mean()
        mean -= mean["value"].mean()
        style = _style(index, str(kind)) | {"marker": ""}
        axes.plot(mean["value"], color=style["color"], linewidth=0.4, alpha=0.4)
        axes.plot(mean["sliding_mean"], label=f"{channel} ({kind})", **style)
    axes.set(
        xlabel=plot.TOKEN,
        ylabel="mean value of the channel,\nless its mean over positions",
    )
    plot.legend_below(figure)
    return figure


@plot.styled
def layer_figure(table: pd.DataFrame) -> Figure:
    """Correlation with the position, and share of variance that it explains, by layer and channel."""
    figure, (left, right) = plot.new_figure(plot.PAGE, 2.8, 1, 2, n=table["n"])
    for axes, name, scale in ((left, "spearman", 1), (right, "explained", 100)):
        for index, ((channel, kind), line) in enumerate(
            table.groupby(["channel", "kind"], sort=False)
        ):
            style = _style(index, str(kind))
            axes.plot(
                line["layer"], scale * line[name], label=f"{channel} ({kind})", **style
            )
            if not index:
                null = _style(0, SHUFFLED) | {"marker": ""}
                shuffled = scale * line[f"shuffled_{name}"]
                axes.plot(
                    line["layer"], shuffled, label=f"{channel} ({SHUFFLED})", **null
                )
        axes.locator_params("x", integer=True)
    left.axhline(0, color=plot.GUIDE, linewidth=0.6, zorder=0)
    ylabel = "rank correlation of the averaged\ncurve with the position"
    left.set(xlabel="layer", ylabel=ylabel, ylim=(-1.08, 1.08))
    right.set(
        xlabel="layer",
        ylabel="variance that the\nposition explains (%)",
        ylim=(0, None),
    )
    plot.legend_below(figure)
    return figure
