"""Channels of the hidden states that rise or fall along the prompt, and the share that position explains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import scipy
from annotated_types import Ge

from posbench.errors import UserError
from posbench.late import Figure, pd
from posbench.measure.states import NUM_GROUPS, Array, Moments, Site, moments
from posbench.methods.scale_channel import (
    SEARCH_SUBJECT,
    STRONGEST_SUBJECT,
    check_channels,
)
from posbench.plots import base as plot
from posbench.plots.search import channel_figure
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.cost import StudyWorkload
from posbench.schema import Alphabet, Count, Seed, Whole
from posbench.search import statistics
from posbench.search.base import STATE_FILE
from posbench.search.channel import ChannelSearch
from posbench.stats.bootstrap import Z95, Estimate, difference_of_shares
from posbench.stats.correlation import spearman
from posbench.stats.findings import (
    SMALLEST_SHARE,
    Finding,
    estimate,
    estimate_row,
    with_subject,
)
from posbench.studies.base import Study, Tables
from posbench.studies.prompts import need_whole_maps

PAPER_CHANNELS = {
    "mistral7b": 213,
    "llama2_7b": 2393,
    "mpt_30b": 1942,
    "tinyllama_nope": 1156,
}
"""Channels of Figures 4 and 14, by our model names; for MPT-30B Table 4 scales another one, 6926."""

# Values of the column ``positions``; with the reasons, of ``kind``.
REAL = "as they are"
SHUFFLED = "shuffled positions"
# Why a channel is measured.
STRONGEST = "strongest trend"
OF_MODEL = "the model's"
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

    Attributes:
        channels: Channels to measure; None: the paper's for this model, the one in the model's YAML, and
            ``top`` more.
        top: Channels with the strongest trend, which is the largest :func:`mean_correlation`.
        controls: Random channels.
        site: Hidden states to read.
        strings: Random strings, once to choose and once to measure (2000 as the paper).
        length: Tokens of each string, see :class:`posbench.measure.states.Strings`.
        alphabet: Alphabet of the strings.
        window: Tokens in the sliding mean of the filter.
        skip: First tokens that are left out (30 as the paper).
        batch_size: Strings in a forward.
        seed: Seed of the strings, the random channels and the shuffles.
    """

    text_lengths: ClassVar[tuple[str, ...]] = ("length",)
    smallest: ClassVar[Mapping[str, int]] = {"strings": NUM_GROUPS}
    channels: tuple[int, ...] | None = None
    top: Count = 2
    controls: Count = 2
    site: Site = "attention_input"
    strings: Annotated[int, Ge(NUM_GROUPS)] = 2000
    length: Count = 1000
    alphabet: Alphabet = "characters"
    window: Count = 100
    skip: Whole = 30
    batch_size: Count = 8
    seed: Seed = 0

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        if self.channels is not None:
            check_channels(run.lm, "study.channels", self.channels)
        shortest = self.window + self.skip + 7
        longest = run.lm.context_window
        if not shortest <= self.length <= longest:
            allowed = (
                f"from {shortest} (study.window + study.skip + 7) to {longest} "
                f"(window of {run.lm.name})"
            )
            hint = "change study.length, study.window or study.skip"
            raise UserError("study.length", self.length, allowed, hint)
        need_whole_maps(run)

    @property
    def search(self) -> ChannelSearch:
        """The channel search whose strings and filter the study takes."""
        return ChannelSearch(
            site=self.site,
            strings=self.strings,
            length=self.length,
            alphabet=self.alphabet,
            window=self.window,
            skip=self.skip,
            batch_size=self.batch_size,
            seed=self.seed,
        )

    def workload(self, run: Run) -> list[StudyWorkload]:
        """See :meth:`Study.workload`."""
        return [StudyWorkload(texts=2 * self.strings, length=self.length)]

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Choose channels on a first set of strings and measure them on a second one.

        Returns:
            ``curves``: averages over the second set of strings, and why a channel is there. ``statistics``,
            by layer: whether the fitted curve rises or falls throughout (``monotone`` 1, -1, 0), the averaged
            curve's Spearman correlation with the position, and the share of variance that the position
            explains; as positions are and shuffled. ``summary``: means of the statistics over layers, and the
            share of channels with a larger correlation. ``null``: channels that pass the search's filter and
            the largest mean absolute correlation of any, as positions are and shuffled.
        """
        averages = self.search.averages(run)
        (run.out.path / STATE_FILE).unlink(missing_ok=True)
        curves = averages[self.site]
        if self.site == "residual":
            curves = curves[1:]  # block outputs, without the embedding
        reasons = self.choose_channels(run, curves)
        strings = replace(self.search.drawn, seed=self.seed + 1)
        with run.progress("strings to measure on", self.strings) as advance:
            states = moments(
                run.lm, strings, self.site, list(reasons), self.skip, advance
            )
        return {
            "curves": self._curves(states, reasons),
            "statistics": self._statistics(states, reasons),
            **self._summary_and_null(states, reasons),
        }

    def choose_channels(self, run: Run, curves: Array) -> dict[int, str]:
        """Choose the channels to measure.

        Args:
            run: The run.
            curves: Averaged states [L, P, D] of other strings than the measured ones.

        Returns:
            Why each channel is measured, by channel.
        """
        reasons = dict.fromkeys(self.channels or (), GIVEN)
        if self.channels is None:
            trend = mean_correlation(curves[:, self.skip :])
            strongest = np.argsort(-trend, kind="stable")[: self.top]
            block = run.model.blocks.get("scale_channel", {})
            candidates = [
                *((int(channel), STRONGEST) for channel in strongest),
                (PAPER_CHANNELS.get(run.model.name), "the paper's"),
                (block.get("channel"), OF_MODEL),
            ]
            for channel, reason in candidates:
                if channel is None:
                    continue
                if channel in reasons:
                    reason = f"{reasons[channel]} and {reason}"
                reasons[channel] = reason
        unchosen = [c for c in range(curves.shape[2]) if c not in reasons]
        rng = np.random.default_rng(self.seed)
        for channel in rng.permutation(unchosen)[: self.controls]:
            reasons[int(channel)] = RANDOM
        return reasons

    def _curves(self, states: Moments, reasons: Mapping[int, str]) -> pd.DataFrame:
        """Curves of the chosen channels, and of the first one with shuffled positions."""
        curves = [
            (channel, reason, states.mean[:, :, channel])
            for channel, reason in reasons.items()
        ]
        first = next(iter(reasons))
        curves.append((first, SHUFFLED, states.shuffled[:, :, first]))
        parts = []
        for channel, kind, curve in curves:
            layer, token = (index.ravel() for index in np.indices(curve.shape))
            columns = {
                "channel": channel,
                "kind": kind,
                "site": self.site,
                "layer": layer,
                "token": token,
                "value": curve.ravel(),
                "sliding_mean": self._sliding_mean(curve).ravel(),
            }
            parts.append(pd.DataFrame(columns))
        return pd.concat(parts, ignore_index=True)

    def _sliding_mean(self, curve: Array) -> Array:
        """Centred sliding mean of curves [L, P]; NaN where the window leaves the tokens after ``skip``."""
        means = statistics.sliding_mean(curve[:, self.skip :, None], self.window)
        means = means[:, :, 0]
        smooth = np.full(curve.shape, np.nan)
        start = self.skip + self.window // 2
        smooth[:, start : start + means.shape[1]] = means
        return smooth

    def _statistics(self, states: Moments, reasons: Mapping[int, str]) -> pd.DataFrame:
        """Effect of position on each chosen channel, layer by layer."""
        channels = list(reasons)
        mean = states.mean[:, self.skip :, channels]
        shuffled = states.shuffled[:, self.skip :, channels]
        direction = statistics.paper_filter(
            states.mean[:, :, channels], window=self.window, skip=self.skip
        ).direction
        parts = []
        for i, channel in enumerate(channels):
            variance = states.variance[:, i]
            columns = {
                "channel": channel,
                "kind": reasons[channel],
                "layer": range(len(mean)),
                "monotone": direction[:, i],
                "spearman": correlation(mean[:, :, i]),
                "shuffled_spearman": correlation(shuffled[:, :, i]),
                "explained": mean[:, :, i].var(1) / variance,
                "shuffled_explained": shuffled[:, :, i].var(1) / variance,
                "n": states.strings,
            }
            parts.append(pd.DataFrame(columns))
        return pd.concat(parts, ignore_index=True)

    def _summary_and_null(
        self, states: Moments, reasons: Mapping[int, str]
    ) -> dict[str, pd.DataFrame]:
        """Means over layers with intervals, and filter and correlation under shuffled positions."""
        correlations = {}
        filters = {}
        for positions, curves in ((REAL, states.mean), (SHUFFLED, states.shuffled)):
            correlations[positions] = mean_correlation(curves[:, self.skip :])
            filters[positions] = statistics.paper_filter(
                curves, window=self.window, skip=self.skip
            )
        summary = []
        for i, (channel, reason) in enumerate(reasons.items()):
            is_stronger = correlations[REAL] > correlations[REAL][channel]
            groups = states.groups[:, :, self.skip :, i]
            row = {
                "channel": channel,
                "kind": reason,
                "monotone_layers": filters[REAL].monotone_layers[channel],
                "layers": len(states.mean),
                **estimate_row(jackknife(groups, states.sizes), "spearman"),
                "stronger_channels": is_stronger.mean(),
                "n": states.strings,
            }
            summary.append(row)
        null = [
            {
                "positions": positions,
                "passing": len(filters[positions].ranking),
                "channels": len(values),
                "largest": np.nanmax(values),
                "median": np.nanmedian(values),
            }
            for positions, values in correlations.items()
        ]
        return {"summary": pd.DataFrame(summary), "null": pd.DataFrame(null)}

    def figures(self, tables: Tables) -> Drawn:
        """See :meth:`Study.figures`."""
        curves = tables["curves"]
        site = self.site.replace("_", " ")
        caption = f"Channels of the {site}, averaged over layers and random strings. Thick: sliding mean."
        averaged = averaged_figure(curves[curves["token"] >= self.skip])
        figures = {"averaged": (averaged, caption)}
        caption = (
            "Rank correlation, and variance that the position explains, layer by layer."
        )
        figures["statistics"] = (layer_figure(tables["statistics"]), caption)
        chosen = curves[~curves["kind"].isin([RANDOM, SHUFFLED])]
        kinds = chosen.groupby("channel", sort=False)["kind"].first()
        for channel, kind in kinds.items():
            caption = f"Channel {channel} ({kind}) of the {site}, layer by layer."
            figure = channel_figure(chosen, int(channel))
            figures[f"layers_{channel}"] = (figure, caption)
        return figures

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Claim C3: some channel follows the position, the filter finds such, layer 0 starts the trend."""
        summary = tables["summary"]
        null = tables["null"].set_index("positions")
        layers = tables["statistics"]
        is_random = summary["kind"] == RANDOM
        controls = ", ".join(f"{rho:.2f}" for rho in summary.loc[is_random, "spearman"])
        noise = null.loc[SHUFFLED, "largest"]
        median = null.loc[REAL, "median"]
        findings = []
        # The paper claims that one exists: the other strong ones are in the table.
        for subject, row in _claimed_channels(summary[~is_random]).items():
            rows = layers[layers["channel"] == row["channel"]]
            name = f"channel {row['channel']}"
            note = (
                f"{name}: {row['kind']}; monotone in {row['monotone_layers']} of "
                f"{row['layers']} layers; position explains {rows['explained'].mean():.1%} of its variance "
                f"(shuffled {rows['shuffled_explained'].mean():.1%}); the largest correlation of any channel "
                f"with shuffled positions is {noise:.2f}; random channels {controls}, median {median:.2f}"
            )
            statistic = f"{name}'s absolute Spearman correlation with position, mean over layers"
            rho = estimate(row, "spearman")
            claim = with_subject(EXISTS, subject)
            findings.append(Finding.above(claim, statistic, rho, noise, note))

        passing = int(null.loc[REAL, "passing"])
        passing_shuffled = int(null.loc[SHUFFLED, "passing"])
        count = int(null.loc[REAL, "channels"])
        note = (
            f"{passing} of {count} pass, {passing_shuffled} with shuffled positions; "
            "channels taken as independent"
        )
        statistic = "share of channels that pass, minus the share that pass with shuffled positions"
        gain = difference_of_shares(passing, passing_shuffled, count)
        findings.append(
            Finding.above(FILTER, statistic, gain, SMALLEST_SHARE, note).control()
        )
        findings.append(self._start_finding(layers))
        return findings

    def _start_finding(self, layers: pd.DataFrame) -> Finding:
        """Correlation of the strongest channel right after the first attention, against noise."""
        channel = layers["channel"].iloc[0]
        rows = layers[layers["channel"] == channel].set_index("layer")
        rho = rows["spearman"].abs()
        noise = 1.96 / math.sqrt(self.length - self.skip - 1)
        if self.site == "attention_input":
            first = 1
            rho_before = rho[0]
            measured_at = "input of layer 1"
            before = (
                f"; input of layer 0, where no token has seen another: {rho_before:.2f}"
            )
        else:
            first = 0
            rho_before = 0.0
            measured_at = "output of layer 0"
            before = ""
        statistic = f"channel {channel}'s absolute Spearman correlation with position, {measured_at}"
        note = (
            f"95 % of uncorrelated curves stay below {noise:.2f}{before}; "
            f"last layer: {rho.iloc[-1]:.2f}"
        )
        value_and_n = (rho[first], rows["n"].iloc[0])
        if rho_before > noise:
            return Finding.that(False, START, statistic, value_and_n, note)
        p = 2 * scipy.stats.norm.sf(Z95 * rho[first] / noise)
        return Finding.tested(True, START, statistic, value_and_n, p, note)


def _claimed_channels(summary: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """The rows of the channels in the claim, by their kind; the strongest one comes first."""
    rows: dict[str, dict[str, Any]] = {}
    for row in summary.to_dict("records"):
        if STRONGEST in row["kind"]:
            # A second strong channel, or the search's where it is the strongest, is no further subject.
            rows.setdefault(STRONGEST_SUBJECT, row)
        elif OF_MODEL in row["kind"]:
            rows[SEARCH_SUBJECT] = row
        else:
            rows[f"channel {row['channel']}"] = row
    return rows


def correlation(curves: Array) -> Array:
    """Spearman correlation of each curve [..., P] with the position, [...]."""
    position = np.arange(curves.shape[-1], dtype=np.float64)
    return spearman(curves.astype(np.float64), position)


def mean_correlation(curves: Array) -> Array:
    """Mean over layers of the absolute Spearman correlation with the position, [D], from curves [L, P, D]."""
    return np.nanmean([np.abs(correlation(layer.T)) for layer in curves], axis=0)


def jackknife(groups: Array, sizes: Array) -> Estimate:
    """Mean over layers of one channel's absolute correlation, its 95 % interval from leaving groups out.

    Args:
        groups: Averages of the channel over each group of strings, [G, L, P].
        sizes: Strings in each group, [G].
    """
    sums = groups * sizes[:, None, None]
    total = sums.sum(0)
    value = float(np.abs(correlation(total)).mean())
    leave_one_out = np.array(
        [np.abs(correlation(total - group)).mean() for group in sums]
    )
    count = len(leave_one_out)
    error = np.sqrt((count - 1) * leave_one_out.var())
    half = scipy.stats.t.ppf(0.975, count - 1) * error
    low = max(value - half, 0.0)
    high = min(value + half, 1.0)
    return Estimate(value, low, high, int(sizes.sum()))


def _line_style(index: int, kind: str) -> dict[str, Any]:
    """Style of a channel's line; controls have one colour, and dashes by their kind."""
    style = plot.line_style(index)
    if kind in DASHES:
        style |= {"color": plot.CONTROL_COLOUR, "linestyle": DASHES[kind]}
    return style


@plot.styled
def averaged_figure(curves: pd.DataFrame) -> Figure:
    """Curves averaged over layers, less their mean, over the token; random ones dashed, the null dotted."""
    figure, axes = plot.new_figure(plot.COLUMN, 3.0)
    channels = curves.groupby(["channel", "kind"], sort=False)
    for index, ((channel, kind), rows) in enumerate(channels):
        mean = rows.groupby("token")[["value", "sliding_mean"]].mean()
        mean -= mean["value"].mean()
        style = _line_style(index, str(kind)) | {"marker": ""}
        axes.plot(mean["value"], color=style["color"], linewidth=0.4, alpha=0.4)
        axes.plot(mean["sliding_mean"], label=f"{channel} ({kind})", **style)
    axes.set(
        xlabel=plot.TOKEN_LABEL,
        ylabel="mean value of the channel,\nless its mean over positions",
    )
    plot.add_legend_below(figure)
    return figure


@plot.styled
def layer_figure(table: pd.DataFrame) -> Figure:
    """Correlation with the position, and share of variance that it explains, by layer and channel."""
    figure, (left, right) = plot.new_figure(plot.PAGE, 2.8, 1, 2, n=table["n"])
    for axes, name, scale in ((left, "spearman", 1), (right, "explained", 100)):
        channels = table.groupby(["channel", "kind"], sort=False)
        for index, ((channel, kind), rows) in enumerate(channels):
            style = _line_style(index, str(kind))
            label = f"{channel} ({kind})"
            axes.plot(rows["layer"], scale * rows[name], label=label, **style)
            if index == 0:
                style = _line_style(0, SHUFFLED) | {"marker": ""}
                shuffled = scale * rows[f"shuffled_{name}"]
                label = f"{channel} ({SHUFFLED})"
                axes.plot(rows["layer"], shuffled, label=label, **style)
        axes.locator_params("x", integer=True)
    left.axhline(0, color=plot.GUIDE, linewidth=0.6, zorder=0)
    left.set(
        xlabel="layer",
        ylabel="rank correlation of the averaged\ncurve with the position",
        ylim=(-1.08, 1.08),
    )
    right.set(
        xlabel="layer",
        ylabel="variance that the\nposition explains (%)",
        ylim=(0, None),
    )
    plot.add_legend_below(figure)
    return figure
