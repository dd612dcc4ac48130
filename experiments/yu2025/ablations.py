"""The contribution of each part of scale_channel and of its search (Yu et al. 2025, Appendix E, Table 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from posbench.errors import UserError
from posbench.late import Figure, pd
from posbench.methods import Method
from posbench.methods.scale_channel import ScaleChannel
from posbench.methods.unmodified import Unmodified
from posbench.model import families
from posbench.model.lm import LM
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.replies import compare_scores
from posbench.schema import Seed
from posbench.search.base import Search
from posbench.search.channel import ChannelSearch
from posbench.search.statistics import ChannelStatistics
from posbench.stats.bootstrap import Estimate
from posbench.stats.findings import (
    SMALLEST_POINTS,
    Finding,
    estimate,
    estimate_columns,
    inert_note,
)
from posbench.stats.frames import UNMODIFIED, display_name
from posbench.studies.base import Study, Tables
from yu2025.common import contrast_columns, unless_missing

Pools = Mapping[str, Sequence[int]]
"""Channels that go to validation, smoothest first, by ablation."""
Settings = Mapping[str, ScaleChannel]
"""The method of each ablation or setting, by name."""

LOSSES_FILE = "ablation_losses.jsonl"
SCORES_FILE = "ablation_predictions.jsonl"
FULL = "full method"
CONTROL = "control: random channel"
TWO = "top-2 channels"
NO_MONOTONICITY = "without monotonicity"
NO_SMOOTHNESS = "without smoothness"
NO_VALIDATION = "without validation"
CLAIMS = {
    NO_MONOTONICITY: "without the filter by monotonicity the average may fall",
    NO_SMOOTHNESS: "without the filter by smoothness the average may fall",
    NO_VALIDATION: "without the validation set the average falls",
    TWO: "with two channels the average of most models falls",
    "last 16 tokens": "with the last 16 tokens the average of most models falls",
    "all tokens": "with all tokens the average of most models falls",
}
SAME_CHOICE = "it chooses what the full method chooses"


@dataclass(frozen=True, kw_only=True)
class Ablations(Study):
    """Ablations of scale_channel and its search.

    Source: Yu et al. 2025, Appendix E, Table 6. The definitions are ours, for the paper gives none ("details
    in Appendix C" are not there); see ``conf/study/ablations.yaml``.

    Attributes:
        search: The channel search that is ablated.
        smoothness: Without the filter by smoothness, whether all monotone channels are validated or K random
            ones.
        control: Whether a random channel is scaled, too, with the full method's factor and layers.
        seed: Seed of both draws.
    """

    search: Search
    smoothness: Literal["all", "random"] = "all"
    control: bool = True
    seed: Seed = 0

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`; refuses methods that would be ablated, too."""
        search = channel_search(self.search)
        if (search.variant, search.candidates) != ("paper", "monotone"):
            value = f"{search.variant}, {search.candidates}"
            allowed = "channel with variant=paper and candidates=monotone: Algorithm 1 is what is ablated"
            raise UserError("search", value, allowed, "leave out search")
        if run.method.trial().needs_prompt:
            allowed = "none, or a method that treats all tokens alike: the study scales channels itself"
            raise UserError(
                "method", run.method.choice.name, allowed, "leave out method"
            )
        search.check(run)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``ablations``, ``positions`` (by gold position), ``candidates`` (scores in validation)."""
        search = channel_search(self.search)
        averages = search.averages(run)
        monotone = search.statistics(averages)
        unfiltered = search.statistics(averages, monotone_only=False)
        pools = self.pools(search, monotone, unfiltered)
        channels = dict.fromkeys(channel for pool in pools.values() for channel in pool)
        ranges = search.ranges(run)
        candidates = [
            candidate
            for channel in channels
            for candidate in search.list_candidates(monotone, ranges, channel)
        ]
        losses = search.losses(run, LOSSES_FILE, candidates)  # [1 + C, prompts]
        mean_losses = dict(zip(candidates, losses[1:].mean(1).tolist(), strict=True))
        settings = self.settings(run.lm, pools, mean_losses)
        ablations, scores = evaluate_settings(run, settings, FULL)
        printed = {
            row["method"]: row["value"]
            for row in run.reference
            if row["model"] == run.model.name
        }
        ablations["paper"] = ablations["setting"].map(printed).astype(float)
        positions = scores.groupby(["setting", "gold_position"], sort=False)["score"]
        positions = positions.agg(value="mean", n="count").reset_index()

        validated = [candidate.channels[0] for candidate in mean_losses]
        table = {
            "channel": validated,
            "factor": [candidate.factor for candidate in mean_losses],
            "layer_first": [candidate.layers[0] for candidate in mean_losses],
            "layer_last": [candidate.layers[1] for candidate in mean_losses],
            "loss": list(mean_losses.values()),
            "loss_unmodified": losses[0].mean(),
            "monotone_layers": monotone.monotone_layers[validated],
            "smoothness": monotone.smoothness[validated],
            "smoothness_all_layers": unfiltered.smoothness[validated],
        }
        for name, pool in pools.items():
            table[name.replace(" ", "_")] = np.isin(validated, pool)
        return {
            "ablations": ablations.rename(columns={"setting": "ablation"}),
            "positions": positions.rename(columns={"setting": "ablation"}),
            "candidates": pd.DataFrame(table),
        }

    def pools(
        self,
        search: ChannelSearch,
        monotone: ChannelStatistics,
        unfiltered: ChannelStatistics,
    ) -> Pools:
        """Channels for validation, by ablation, smoothest first.

        Args:
            search: The channel search, which refuses a model in which no channel is monotone.
            monotone: Statistics with the filter by monotonicity.
            unfiltered: Statistics without it.
        """
        search.list_candidates(monotone, [])
        ranking = list(monotone.ranking)
        not_smoothest = ranking
        if self.smoothness == "random":
            order = np.random.default_rng(self.seed).permutation(len(ranking))
            not_smoothest = [ranking[rank] for rank in sorted(order[: search.top_k])]
        return {
            FULL: ranking[: search.top_k],
            NO_MONOTONICITY: unfiltered.ranking[: search.top_k],
            NO_SMOOTHNESS: not_smoothest,
        }

    def settings(
        self, lm: LM, pools: Pools, losses: Mapping[ScaleChannel, float]
    ) -> Settings:
        """The method of each ablation.

        Args:
            lm: The model.
            pools: Channels that go to validation, see :meth:`pools`.
            losses: Mean calibration loss of each candidate.
        """
        settings = {}
        for name, pool in pools.items():
            # Among candidates with equal losses, the smoother channel's comes first.
            candidates = [
                candidate
                for channel in pool
                for candidate in losses
                if candidate.channel == channel
            ]
            settings[name] = min(candidates, key=losses.__getitem__)
        full = settings[FULL]
        smoothest = pools[FULL][0]
        settings[NO_VALIDATION] = replace(full, channel=smoothest)
        runners_up = [
            replace(full, channel=c) for c in pools[FULL] if c != full.channel
        ]
        if runners_up:
            second = min(runners_up, key=losses.__getitem__)
            two = (*full.channels, *second.channels)
            settings[TWO] = replace(full, channel=two)
        settings["last 16 tokens"] = replace(full, last=16)
        settings["all tokens"] = replace(full, last="all")
        if self.control:
            channel = random_channel(lm, full, self.seed)
            settings[CONTROL] = replace(full, channel=channel)
        return settings

    def figures(self, tables: Tables) -> Drawn:
        """See :meth:`Study.figures`."""
        caption = "With 95 % intervals; the paper's numbers where this setting has any."
        return {"ablations": (ablation_figure(tables["ablations"]), caption)}

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """The gain of the full method, the paper's reading of Table 6 an ablation at a time, the control."""
        rows = tables["ablations"].set_index("ablation")
        full = rows.loc[FULL]
        full_setting = _setting_text(full)
        inert = {name: _inert_note(name, row) for name, row in rows.iterrows()}
        claim = "The method raises the average (Yu et al. 2025, Tables 1 and 6)"
        statistic = "full method minus unmodified, points"
        gain = Finding.above(
            claim, statistic, estimate(full, "gain", 100), SMALLEST_POINTS
        )
        if inert[FULL]:
            gain = gain.not_testable(inert[FULL])
        findings = [unless_missing(gain, full)]
        claims = {
            name: f"{claim} (Yu et al. 2025, Table 6)" for name, claim in CLAIMS.items()
        }
        claims[CONTROL] = (
            "Control: a random channel does not do what the chosen one does"
        )
        for name, claim in claims.items():
            if name not in rows.index:
                continue
            row = rows.loc[name]
            statistic = f"{name} minus full method, points"
            change = estimate(row, "difference", 100)
            note = "better than the full method" if change.ci_low > 0 else ""
            finding = Finding.below(claim, statistic, change, -SMALLEST_POINTS, note)
            if name not in (NO_VALIDATION, CONTROL):
                finding = _may_fall(finding, change)
            if _setting_text(row) == full_setting:
                finding = finding.not_testable(SAME_CHOICE)
            elif inert[FULL] and inert[name]:
                finding = finding.not_testable(f"{inert[FULL]}; {inert[name]}")
            if name == CONTROL:
                finding = finding.control()
            findings.append(unless_missing(finding, row))
        return findings


def _may_fall(falls: Finding, change: Estimate) -> Finding:
    """The finding that a part may matter, or does on most models: only a sure gain without it contradicts that.

    Args:
        falls: The finding that the average falls by a point without it.
        change: The change of the average in points.
    """
    no_gain = Finding.below(falls.claim, falls.statistic, change, 0.0)
    rule = f"{falls.holds_if} (contradicted above 0)"
    if falls.verdict == "contradicted" and change.ci_low <= 0:
        p = max(falls.p, no_gain.p)
        return replace(falls, verdict="inconclusive", p=p, holds_if=rule)
    if no_gain.verdict == "contradicted":
        return replace(falls, verdict="contradicted", p=no_gain.p, holds_if=rule)
    return replace(falls, holds_if=rule)


def _inert_note(name: str, row: pd.Series) -> str:
    """Whether a setting of the table moves hardly any score, see :func:`posbench.stats.findings.inert_note`."""
    return inert_note(name, row["changed"], estimate(row, "gain"))


def channel_search(search: Search) -> ChannelSearch:
    """The search, where it is the channel search; another one is refused."""
    if not isinstance(search, ChannelSearch):
        allowed = "channel: the study takes its factors, layers and calibration losses"
        raise UserError("search", type(search).__name__, allowed, "leave out search")
    return search


def random_channel(lm: LM, method: ScaleChannel, seed: int) -> int:
    """Draw a channel other than the method's, for a control."""
    width = families.text_config(lm.model).hidden_size
    candidates = [c for c in range(width) if c != method.channels[0]]
    return int(np.random.default_rng(seed).choice(candidates))


def evaluate_settings(
    run: Run, settings: Settings, base: str
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Score the unmodified model and every setting; equal settings are measured once.

    Args:
        run: The run.
        settings: The method, by setting.
        base: The setting that the others are compared with.

    Returns:
        Rows of setting, its channel and layers, and :func:`yu2025.common.contrast_columns`, the unmodified
        model first; and the scores of :func:`posbench.run.replies.compare_scores` with the first name of each setting.
    """
    columns_by_name = {UNMODIFIED: _setting_columns(None)}
    labels = {UNMODIFIED: UNMODIFIED}
    methods: dict[str, Method] = {UNMODIFIED: Unmodified()}
    for name, method in settings.items():
        scaled = _setting_columns(method)
        columns_by_name[name] = scaled
        labels[name] = (
            f"ch {scaled['channels']} x {scaled['factor']:g}, "
            f"layers {scaled['layers']}, last {scaled['last']}"
        )
        methods[labels[name]] = method
    scores = compare_scores(run, SCORES_FILE, methods)
    rows = []
    for name, label in labels.items():
        contrast = contrast_columns(scores, label, labels[base])
        rows.append({"setting": name, **columns_by_name[name], **contrast})
    first_names = {label: name for name, label in reversed(labels.items())}
    scores = scores.assign(setting=scores["method"].map(first_names))
    return pd.DataFrame(rows), scores


def _setting_columns(method: ScaleChannel | None) -> dict[str, Any]:
    """A table's columns of channel and layers; empty for the unmodified model (None)."""
    if method is None:
        return {"channels": "", "factor": np.nan, "layers": "", "last": ""}
    first, last = method.layers
    return {
        "channels": "+".join(map(str, method.channels)),
        "factor": method.factor,
        "layers": f"{first}-{last}",
        "last": str(method.last),
    }


def _setting_text(row: pd.Series) -> list[str]:
    """The channel and layers in a table's row, for comparison with another row."""
    return [str(row[column]) for column in _setting_columns(None)]


@plot.styled
def ablation_figure(table: pd.DataFrame) -> Figure:
    """Scores of the ablations, and their paired differences from the full method, with 95 % intervals."""
    rows = table.set_index("ablation")
    height = 1.1 + 0.2 * len(table)
    figure, (left, right) = plot.new_figure(
        plot.PAGE, height, 1, 2, n=table["n"], sharey=True
    )
    colours = {UNMODIFIED: plot.BLACK, CONTROL: plot.CONTROL_COLOUR}
    labels = {FULL: "posbench", CONTROL: "control"}
    heights = np.arange(len(table))
    for axes, name in ((left, ""), (right, "difference")):
        points = rows[estimate_columns(name)].set_axis(estimate_columns(), axis=1)
        for index, ablation in enumerate(rows.index):
            style = {"fmt": "o", "color": colours.get(ablation, plot.BLUE)}
            if ablation in labels:
                style["label"] = labels[ablation]
            point = points.loc[[ablation]]
            plot.percent_bars(axes, [index], point, upright=False, **style)
        axes.grid(axis="y", color=plot.SHADE, linewidth=0.5)
        printed = rows["paper"]
        if name == "difference":
            printed = printed - rows.loc[FULL, "paper"]
        if printed.notna().any():
            axes.plot(100 * printed, heights, **plot.PAPER_MARKER)
    left.axvline(
        100 * rows.loc[UNMODIFIED, "value"], label="unmodified", **plot.UNMODIFIED_LINE
    )
    right.axvline(0, color=plot.GUIDE, linestyle=":", linewidth=1)
    names = [display_name(name) for name in rows.index]
    left.set_yticks(heights, names)
    left.set(
        xlabel="accuracy over all positions (%)",
        xlim=(-3, 103),
        ylim=(len(table) - 0.5, -0.5),
    )
    right.set(xlabel="difference from the full method (points)")
    plot.add_legend_below(figure)
    return figure
