"""What every part of scale_channel and of its search is worth (Yu et al. 2025, Appendix E, Table 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

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
from posbench.stats.findings import Finding, columns, estimate
from posbench.stats.frames import UNMODIFIED
from posbench.studies.base import Study, Tables
from posbench.studies.prompts import contrasts

Pools = Mapping[str, Sequence[int]]
Settings = Mapping[str, ScaleChannel]

LOSSES = "ablation_losses.jsonl"
ROWS = "ablation_predictions.jsonl"
FULL = "full method"
CONTROL = "control: random channel"
TWO = "top-2 channels"
NO_MONOTONICITY = "without monotonicity"
NO_SMOOTHNESS = "without smoothness"
LABEL = "ch {channels} x {factor:g}, layers {layers}, last {last}"
CLAIMS = {
    NO_MONOTONICITY: "without the filter by monotonicity performance may decline",
    NO_SMOOTHNESS: "without the filter by smoothness performance may decline",
    "without validation": "without the validation set performance declines more",
    TWO: "with two channels most models lose",
    "last 16 tokens": "with the last 16 tokens most models lose",
    "all tokens": "with all tokens most models lose",
}


@dataclass(frozen=True, kw_only=True)
class Ablations(Study):
    """Ablations of scale_channel and its search.

    Source: Yu et al. 2025, Appendix E, Table 6. The definitions are ours, for the paper gives none ("details
    in Appendix C" are not there); see ``conf/study/ablations.yaml``.
    """

    search: Search  # the channel search that is ablated
    smoothness: Literal["all", "random"] = (
        "all"  # monotone channels validated instead of the smoothest K
    )
    control: bool = True  # whether a random channel is scaled, too, with the full method's factor and layers
    seed: Seed = 0  # of both draws

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`; refuses methods that would be ablated, too."""
        search = channel_search(self.search)
        if (search.variant, search.candidates) != ("paper", "monotone"):
            allowed = "channel with variant=paper and candidates=monotone: Algorithm 1 is what is ablated"
            raise UserError(
                "search",
                f"{search.variant}, {search.candidates}",
                allowed,
                "leave search= out",
            )
        if run.method.trial().needs_prompt:
            allowed = "none, or a method that treats all tokens alike: the study scales channels itself"
            raise UserError(
                "method", run.method.choice.name, allowed, "leave the method out"
            )
        search.check(run)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``ablations``, ``positions`` (by gold position), ``candidates`` (what validation saw)."""
        search = channel_search(self.search)
        averages = search.averages(run)
        found = search.statistics(averages)
        free = search.statistics(averages, monotone_only=False)
        pools = self.pools(search, found, free)
        channels = dict.fromkeys(c for pool in pools.values() for c in pool)
        candidates = [
            c
            for channel in channels
            for c in search.ask(found, search.ranges(run), channel)
        ]
        each = search.losses(run, LOSSES, candidates)
        losses = dict(zip(candidates, each[1:].mean(1).tolist(), strict=True))
        settings = self.settings(run.lm, pools, losses)
        table, scores = evaluated(run, ROWS, settings, FULL)
        paper = {
            row["method"]: row["value"]
            for row in run.reference
            if row["model"] == run.model.name
        }
        placed = scores.groupby(["setting", "gold_position"], sort=False)["score"].agg(
            value="mean", n="size"
        )
        named = {"setting": "ablation"}
        tried = [c.channels[0] for c in losses]
        seen = {
            "channel": tried,
            "factor": [c.factor for c in losses],
            "layer_first": [c.layers[0] for c in losses],
            "layer_last": [c.layers[1] for c in losses],
            "loss": list(losses.values()),
            "loss_unmodified": each[0].mean(),
            "monotone_layers": found.monotone_layers[tried],
            "smoothness": found.smoothness[tried],
            "smoothness_all_layers": free.smoothness[tried],
        }
        seen |= {
            name.replace(" ", "_"): np.isin(tried, pool) for name, pool in pools.items()
        }
        return {
            "ablations": table.assign(
                paper=table["setting"].map(paper).astype(float)
            ).rename(columns=named),
            "positions": placed.reset_index().rename(columns=named),
            "candidates": pd.DataFrame(seen),
        }

    def pools(
        self, search: ChannelSearch, found: ChannelStatistics, free: ChannelStatistics
    ) -> Pools:
        """Channels for validation, by ablation, smoothest first; ``free`` is the filter less monotonicity."""
        search.ask(found, [])  # refuses a model in which no channel passes
        passed = some = list(found.ranking)
        if self.smoothness == "random":
            drawn = np.random.default_rng(self.seed).permutation(len(passed))[
                : search.top_k
            ]
            some = [passed[i] for i in sorted(drawn)]
        filtered = passed[: search.top_k]
        every = free.ranking[: search.top_k]
        return {FULL: filtered, NO_MONOTONICITY: every, NO_SMOOTHNESS: some}

    def settings(
        self, lm: LM, pools: Pools, losses: Mapping[ScaleChannel, float]
    ) -> Settings:
        """What each ablation scales, from its :meth:`pools` and each candidate's mean calibration loss."""
        won = {}
        for name, pool in pools.items():
            won[name] = min(
                (c for p in pool for c in losses if c.channel == p),
                key=losses.__getitem__,
            )
        full = won[FULL]
        smoothest = pools[FULL][0]
        found = {**won, "without validation": replace(full, channel=smoothest)}
        rest = [replace(full, channel=c) for c in pools[FULL] if c != full.channel]
        if rest:
            second = min(rest, key=losses.__getitem__)
            found[TWO] = replace(full, channel=(*full.channels, *second.channels))
        found |= {
            "last 16 tokens": replace(full, last=16),
            "all tokens": replace(full, last="all"),
        }
        if self.control:
            found[CONTROL] = replace(full, channel=random_channel(lm, full, self.seed))
        return found

    def figures(self, tables: Tables) -> Drawn:
        """See :meth:`Study.figures`."""
        caption = "With 95 % intervals; the paper's numbers where this setting has any."
        return {"ablations": (ablation_figure(tables["ablations"]), caption)}

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """The gain of the full method, the paper's reading of Table 6 an ablation at a time, the control."""
        rows = tables["ablations"].set_index("ablation")
        full = rows.loc[FULL]
        scaled = ["channels", "factor", "layers", "last"]
        gain = "The method raises the average (Yu et al. 2025, Tables 1 and 6)"
        found = [
            Finding.above(
                gain,
                "full method minus unmodified, points",
                estimate(full, "gain", 100),
            )
        ]
        claims = {
            name: f"{words} (Yu et al. 2025, Table 6)" for name, words in CLAIMS.items()
        }
        claims[CONTROL] = (
            "Control: a random channel does not do what the chosen one does"
        )
        for name, claim in claims.items():
            if name in rows.index:
                row = rows.loc[name]
                words = f"{name} minus full method, points"
                change = estimate(row, "difference", 100)
                same = (row[scaled].astype(str) == full[scaled].astype(str)).all()
                note = "better than the full method" if change.ci_low > 0 else ""
                note = "it chooses what the full method chooses" if same else note
                one = Finding.below(claim, words, change, note=note)
                found.append(one.control() if name == CONTROL else one)
        return found


def channel_search(search: Search) -> ChannelSearch:
    """The search, where it is the channel search; another one is refused."""
    if not isinstance(search, ChannelSearch):
        allowed = "channel: the study takes its factors, layers and calibration losses"
        raise UserError("search", type(search).__name__, allowed, "leave search= out")
    return search


def random_channel(lm: LM, method: ScaleChannel, seed: int) -> int:
    """Another channel than a method's own, for a control."""
    others = [
        c
        for c in range(families.text_config(lm.model).hidden_size)
        if c != method.channels[0]
    ]
    return int(np.random.default_rng(seed).choice(others))


def evaluated(
    run: Run, file: str, settings: Settings, base: str
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of setting, what it scales and its :func:`contrasts`, the unmodified model first; and the scores.

    Equal settings are measured once, and stand under the first of their names among the scores.
    """
    names = {UNMODIFIED: UNMODIFIED} | {
        name: LABEL.format(**_shown(m)) for name, m in settings.items()
    }
    methods: dict[str, Method] = {
        names[name]: method for name, method in settings.items()
    }
    scores = compare_scores(run, file, {UNMODIFIED: Unmodified(), **methods})
    rows = []
    for name, text in names.items():
        change = contrasts(scores, text, names[base])
        rows.append({"setting": name, **_shown(settings.get(name)), **change})
    first = {text: name for name, text in reversed(names.items())}
    return pd.DataFrame(rows), scores.assign(setting=scores["method"].map(first))


def _shown(method: ScaleChannel | None) -> dict[str, str | float]:
    """What a table shows of a setting; nothing of the unmodified model."""
    if method is None:
        return {"channels": "", "factor": np.nan, "layers": "", "last": ""}
    layers = f"{method.layers[0]}-{method.layers[1]}"
    last = str(method.last)
    channels = "+".join(map(str, method.channels))
    return {
        "channels": channels,
        "factor": method.factor,
        "layers": layers,
        "last": last,
    }


@plot.styled
def ablation_figure(table: pd.DataFrame) -> Figure:
    """Scores of the ablations, and their paired differences from the full method, with 95 % intervals."""
    height = 1.1 + 0.2 * len(table)
    rows = table.set_index("ablation")
    y = np.arange(len(table))
    figure, (left, right) = plot.new_figure(
        plot.PAGE, height, 1, 2, n=table["n"], sharey=True
    )
    colours = {UNMODIFIED: plot.BLACK, CONTROL: plot.CONTROL}
    names = {FULL: "posbench", CONTROL: "control"}
    for axes, name in ((left, ""), (right, "difference")):
        points = rows[columns(name)].set_axis(columns(), axis=1)
        for place, ablation in enumerate(rows.index):
            style = {"fmt": "o", "color": colours.get(ablation, plot.BLUE)}
            style |= {"label": names[ablation]} if ablation in names else {}
            plot.percent_bars(
                axes, [place], points.loc[[ablation]], upright=False, **style
            )
        axes.grid(axis="y", color=plot.SHADE, linewidth=0.5)
        paper = rows["paper"] - (rows.loc[FULL, "paper"] if name else 0)
        if paper.notna().any():
            axes.plot(100 * paper, y, **plot.OPEN_DIAMOND)
    left.axvline(100 * rows.loc[UNMODIFIED, "value"], label="unmodified", **plot.LEVEL)
    right.axvline(0, color=plot.GUIDE, linestyle=":", linewidth=1)
    left.set_yticks(
        y, ["unmodified" if name == UNMODIFIED else name for name in rows.index]
    )
    left.set(
        xlabel="score over all positions (%)",
        xlim=(-3, 103),
        ylim=(len(table) - 0.5, -0.5),
    )
    right.set(xlabel="difference from the full method (points)")
    plot.legend_below(figure)
    return figure
