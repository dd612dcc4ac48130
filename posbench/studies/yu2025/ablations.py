"""What every part of scale_channel and of its search is worth (Yu et al. 2025, Appendix E, Table 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from posbench.errors import UserError
from posbench.methods import Method, ScaleChannel, Unmodified
from posbench.model.lm import LM
from posbench.pipeline.config import Config
from posbench.plots.base import COLOURS, PAGE, UNMODIFIED, legend_below, new_figure, styled
from posbench.run.base import Run
from posbench.search import Candidate, ChannelSearch
from posbench.search import channel_run as channel_search
from posbench.search.statistics import ChannelStatistics
from posbench.studies import paired
from posbench.studies.base import Finding, Study, Verdict

LOSSES, ROWS = "ablation_losses.jsonl", "ablation_predictions.jsonl"
FULL, CONTROL = "full method", "control: random channel"
NO_MONOTONICITY, NO_SMOOTHNESS, NO_VALIDATION = (
    "without monotonicity",
    "without smoothness",
    "without validation",
)
TWO, LAST_16, ALL_TOKENS = "top-2 channels", "last 16 tokens", "all tokens"
CLAIMS = {
    NO_MONOTONICITY: "without the filter by monotonicity performance may decline",
    NO_SMOOTHNESS: "without the filter by smoothness performance may decline",
    NO_VALIDATION: "without the validation set performance declines more",
    TWO: "with two channels most models lose",
    LAST_16: "with the last 16 tokens most models lose",
    ALL_TOKENS: "with all tokens most models lose",
}


@dataclass(frozen=True, kw_only=True)
class Ablations(Study):
    """Ablations of scale_channel and its search.

    Source: Yu et al. 2025, Appendix E, Table 6. The paper gives no definitions ("details in Appendix C" are
    not there), so these are ours; see ``conf/study/ablations.yaml``.

    Attributes:
        smoothness: What replaces the smoothest K channels: ``all`` monotone ones go to validation, or
            ``random`` K of them.
        control: Whether a channel drawn at random is scaled, too, with the full method's factor and layers.
        seed: Seed of both draws.
    """

    uses_search: ClassVar[bool] = True

    smoothness: Literal["all", "random"] = "all"
    control: bool = True
    seed: int = 0

    def check(self, config: Config, lm: LM | None) -> None:
        """Refuse another search than Algorithm 1, a method that would be ablated with it, and what the search
        refuses.

        Raises:
            UserError: See above.
        """
        search = config.search
        kind = (
            f"{search.variant}, {search.candidates}"
            if isinstance(search, ChannelSearch)
            else type(search).__name__
        )
        if kind != "paper, monotone":
            raise UserError(
                "search",
                kind,
                "channel with variant=paper and candidates=monotone: Algorithm 1 is what is ablated",
                "leave search= out",
            )
        if config.trial().needs_prompt:
            allowed = "none, or a method that treats all tokens alike: the study scales channels itself"
            raise UserError("method", config.method_name, allowed, "leave the method out")
        assert lm is not None
        channel_search.check(config, lm)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``ablations``, a row each; ``positions``, their score by gold position; ``candidates``, what
        validation saw."""
        search, resamples = run.config.search, run.config.runtime.resamples
        assert isinstance(search, ChannelSearch)
        averages = channel_search.average_states(run.lm, search, run)
        found, free = search.statistics(averages), search.statistics(averages, monotone_only=False)
        pools = self.pools(search, found, free)
        ranges = channel_search.ranges(run)
        channels = list(dict.fromkeys(c for pool in pools.values() for c in pool))
        candidates = [Candidate(c, factor, r) for c in channels for r in ranges for factor in search.factors]
        each = channel_search.calibration_losses(run, LOSSES, candidates)
        losses = dict(zip(candidates, each[1:].mean(1).tolist(), strict=True))
        settings = self.settings(pools, losses, len(found.smoothness))
        methods: dict[str, Method] = {
            UNMODIFIED: Unmodified(),
            **{label(method): method for method in settings.values()},
        }
        scores = paired.scores(run, ROWS, methods)
        printed = paper(run)
        rows = []
        for name, method in {UNMODIFIED: None, **settings}.items():
            text = label(method) if method else UNMODIFIED
            own = paired.accuracy(scores, text, resamples)
            change = paired.difference(scores, text, label(settings[FULL]), resamples)
            gain = paired.difference(scores, text, UNMODIFIED, resamples)
            rows.append(
                {
                    "ablation": name,
                    "channels": "+".join(map(str, method.channels)) if method else "",
                    "factor": method.factor if method else np.nan,
                    "layers": f"{method.layers[0]}-{method.layers[1]}" if method else "",
                    "last": str(method.last) if method else "",
                    **own,
                    **{
                        f"difference{end}": change[key]
                        for end, key in (("", "value"), ("_low", "low"), ("_high", "high"))
                    },
                    **{
                        f"gain{end}": gain[key]
                        for end, key in (("", "value"), ("_low", "low"), ("_high", "high"))
                    },
                    "paper": printed.get(name, np.nan),
                }
            )
        names = {label(method): name for name, method in reversed(settings.items())} | {
            UNMODIFIED: UNMODIFIED
        }
        placed = (
            scores.dropna(subset=["position"])
            .groupby(["method", "position"], sort=False)["score"]
            .agg(["mean", "size"])
        )
        positions = placed.reset_index().set_axis(["ablation", "position", "value", "n"], axis=1)
        table = pd.DataFrame([{**_plain(c), "loss": loss} for c, loss in losses.items()])
        facts = {
            "loss_unmodified": float(each[0].mean()),
            "monotone_layers": [int(found.monotone_layers[c]) for c in table["channel"]],
            "smoothness": [float(found.smoothness[c]) for c in table["channel"]],
            "smoothness_all_layers": [float(free.smoothness[c]) for c in table["channel"]],
        }
        pooled = {
            name.replace(" ", "_"): [c in pool for c in table["channel"]] for name, pool in pools.items()
        }
        return {
            "ablations": pd.DataFrame(rows),
            "positions": positions.assign(ablation=positions["ablation"].map(names)),
            "candidates": table.assign(**facts, **pooled),
        }

    def pools(
        self, search: ChannelSearch, found: ChannelStatistics, free: ChannelStatistics
    ) -> dict[str, list[int]]:
        """The channels that go to validation, in the order in which ties are broken.

        Args:
            search: For K.
            found: The filter's statistics.
            free: The same without the filter by monotonicity.

        Raises:
            UserError: No channel passes the filter.
        """
        passed = list(
            dict.fromkeys(
                c.channel for c in replace(search, top_k=len(found.smoothness)).ask(found, [(0, 0)])
            )
        )
        some = passed
        if self.smoothness == "random":
            drawn = np.random.default_rng(self.seed).permutation(len(passed))[: search.top_k]
            some = [passed[i] for i in sorted(drawn)]
        return {
            FULL: passed[: search.top_k],
            NO_MONOTONICITY: free.ranking[: search.top_k],
            NO_SMOOTHNESS: some,
        }

    def settings(
        self, pools: Mapping[str, Sequence[int]], losses: Mapping[Candidate, float], width: int
    ) -> dict[str, ScaleChannel]:
        """What each ablation scales.

        Args:
            pools: Channels that go to validation, by ablation.
            losses: Mean calibration loss of every candidate.
            width: Channels of the model, for the control.
        """

        def best(channels: Sequence[int]) -> Candidate:
            return min(
                (c for channel in channels for c in losses if c.channel == channel), key=losses.__getitem__
            )

        full = best(pools[FULL])
        rest = [replace(full, channel=c) for c in pools[FULL] if c != full.channel]
        method = scaling(full)
        found = {
            FULL: method,
            NO_MONOTONICITY: scaling(best(pools[NO_MONOTONICITY])),
            NO_SMOOTHNESS: scaling(best(pools[NO_SMOOTHNESS])),
            NO_VALIDATION: scaling(replace(full, channel=pools[FULL][0])),
        }
        if rest:
            found[TWO] = replace(method, channel=(full.channel, min(rest, key=losses.__getitem__).channel))
        found |= {LAST_16: replace(method, last=16), ALL_TOKENS: replace(method, last="all")}
        if self.control:
            others = [c for c in range(width) if c != full.channel]
            found[CONTROL] = replace(method, channel=int(np.random.default_rng(self.seed).choice(others)))
        return found

    def figures(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[Figure, str]]:
        """Scores, and differences from the full method."""
        caption = (
            "Left: score over all gold positions with 95 % intervals. Right: paired difference from the full method. "
            "Diamonds: the paper's numbers, where this model, task and setting have any."
        )
        return {"ablations": (ablation_figure(tables["ablations"]), caption)}

    def findings(self, tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        """The paper's reading of Table 6, an ablation at a time, the control, and the gain of the full
        method."""
        rows = tables["ablations"].set_index("ablation")
        full = rows.loc[FULL]
        found = [
            _finding(
                "C5: the method raises the average (Yu et al. 2025, Tables 1 and 6)",
                "full method minus unmodified",
                [full["gain"], full["gain_low"], full["gain_high"]],
                int(full["n"]),
                "",
                below=False,
            )
        ]
        claims = {name: f"{words} (Yu et al. 2025, Table 6)" for name, words in CLAIMS.items()}
        for name, claim in (
            claims | {CONTROL: "Control: a random channel does not do what the chosen one does"}
        ).items():
            if name not in rows.index:
                continue
            row = rows.loc[name]
            values = [row["difference"], row["difference_low"], row["difference_high"]]
            scaled = ["channels", "factor", "layers", "last"]
            same = (row[scaled].astype(str) == full[scaled].astype(str)).all()
            note = (
                "it chooses what the full method chooses"
                if same
                else "better than the full method"
                if values[1] > 0
                else ""
            )
            found.append(
                _finding(claim, f"{name} minus full method", values, int(row["n"]), note, below=True)
            )
        return found


def scaling(candidate: Candidate) -> ScaleChannel:
    """The method of a candidate."""
    return ScaleChannel(channel=candidate.channel, factor=candidate.factor, layers=candidate.layers)


def label(method: ScaleChannel) -> str:
    """`ch 15+20 x -1, layers 1-3, last 1`: equal settings are measured once."""
    channels = "+".join(map(str, method.channels))
    return (
        f"ch {channels} x {method.factor:g}, layers {method.layers[0]}-{method.layers[1]}, last {method.last}"
    )


def paper(run: Run) -> dict[str, float]:
    """The paper's numbers by ablation, where the experiment has some for this model, task and setting."""
    reference = run.config.experiment.reference if run.config.experiment else None
    task = run.config.task
    if reference is None or any(
        getattr(task, key, None) != value for key, value in reference.setting.items()
    ):
        return {}
    return {
        r["method"]: r["value"]
        for r in reference.rows()
        if r["model"] == run.config.model.name and r["task"] == task.name
    }


def _plain(candidate: Candidate) -> dict[str, Any]:
    first, last = candidate.layers
    return {
        "channel": candidate.channel,
        "factor": candidate.factor,
        "layer_first": first,
        "layer_last": last,
    }


def _finding(claim: str, what: str, values: Sequence[float], n: int, note: str, below: bool) -> Finding:
    value, low, high = (100 * float(v) for v in values)
    verdict: Verdict = "holds" if (high < 0 if below else low > 0) else "does not hold"
    return Finding(
        claim=claim,
        statistic=f"{what}, points",
        value=value,
        low=low,
        high=high,
        n=n,
        verdict=verdict,
        note=note,
    )


@styled
def ablation_figure(table: pd.DataFrame) -> Figure:
    """Scores of the ablations (left), and their paired differences from the full method (right), with 95 %
    intervals."""
    figure = new_figure(PAGE, 0.9 + 0.2 * len(table))
    left, right = figure.subplots(1, 2, sharey=True)
    y = np.arange(len(table))
    for axes, (value, low, high) in (
        (left, ("value", "low", "high")),
        (right, ("difference", "difference_low", "difference_high")),
    ):
        values, error = (
            100 * table[value],
            100 * np.stack([table[value] - table[low], table[high] - table[value]]),
        )
        style: dict[str, Any] = {"linestyle": "none", "marker": "o", "color": COLOURS[0], "elinewidth": 0.8}
        axes.errorbar(values, y, xerr=np.clip(error, 0, None), label="posbench", **style)
        axes.grid(axis="y", color="0.9", linewidth=0.5)
        axes.set_axisbelow(True)
    if table["paper"].notna().any():
        full = float(table.set_index("ablation").loc[FULL, "paper"])
        for axes, values in ((left, table["paper"]), (right, table["paper"] - full)):
            axes.plot(
                100 * values,
                y,
                linestyle="none",
                marker="D",
                color=COLOURS[1],
                markerfacecolor="white",
                label="paper",
            )
        legend_below(figure, left)
    base = 100 * float(table.set_index("ablation").loc[UNMODIFIED, "value"])
    left.axvline(base, color="black", linestyle=(0, (4, 2)), linewidth=1)
    right.axvline(0, color="0.5", linestyle=":", linewidth=1)
    names = table["ablation"].replace(UNMODIFIED, "unmodified")
    left.set_yticks(y, list(names))
    left.set(xlabel="score over all positions (%)", ylim=(len(table) - 0.5, -0.5))
    right.set(xlabel="difference from the full method (points)")
    return figure
