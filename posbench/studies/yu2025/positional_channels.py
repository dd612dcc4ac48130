"""Channels of the hidden states that rise or fall along the prompt: their curves, and how much of them
position explains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from scipy.stats import t
from torch import Tensor, nn

from posbench.errors import UserError
from posbench.model import families
from posbench.model.lm import LM
from posbench.pipeline.config import Config
from posbench.plots.base import COLUMN, PAGE, channel_curves, legend_below, line_style, new_figure, styled
from posbench.run.base import Run
from posbench.search import ChannelSearch, statistics
from posbench.search.channel_run import STATE, average_states, random_strings
from posbench.stats.tables import wilson
from posbench.studies.base import Finding, Study
from posbench.studies.gold_positions import spearman

Array = NDArray[np.floating]

PAPER = {"mistral7b": 213, "llama2_7b": 2393, "mpt_30b": 1942, "tinyllama_nope": 1156}
"""Channels of Figures 4 and 14 by our model names; for MPT-30B the paper's Table 4 scales another one,
6926."""
GROUPS = 20
"""Groups of strings whose means are kept apart, for intervals."""


@dataclass(frozen=True, kw_only=True)
class PositionalChannels(Study):
    """Curves of hidden-state channels over the token position, averaged over random strings, layer by layer.

    Channels are chosen on one set of strings and measured on another, so that the choice does not flatter
    them. Each is held against random channels, and against the same states with the positions of every string
    shuffled: under that null the largest correlation of any channel is the bar.

    Source: Yu et al. 2025, Definition 2.1, Section 2.3, Appendix C.1, Figures 4 and 14.

    Attributes:
        channels: Channels to draw; None: the one the paper draws for this model, the one in the model's YAML,
            and ``top`` more.
        top: Channels with the strongest monotone trend: the largest mean over layers of the absolute Spearman
            correlation of the averaged curve with the position.
        controls: Random channels beside them.
        site: ``attention_input`` (after the first norm, the tensor that scale_channel scales) or ``residual``
            (block outputs).
        strings: Random strings, once to choose and once to measure (paper 2000).
        length: Tokens per string.
        alphabet: ``characters`` or ``tokens``, as in the search.
        window: Positions in the sliding mean of the filter.
        skip: First positions left out (paper 30).
        batch_size: Strings per forward.
        seed: Seed of the strings, the random channels and the shuffles.
    """

    channels: tuple[int, ...] | None = None
    top: int = 2
    controls: int = 2
    site: Literal["attention_input", "residual"] = "attention_input"
    strings: int = 2000
    length: int = 1000
    alphabet: Literal["characters", "tokens"] = "characters"
    window: int = 100
    skip: int = 30
    batch_size: int = 8
    seed: int = 0

    def check(self, config: Config, lm: LM | None) -> None:
        """Refuse channels that the model lacks, strings that do not fit it, and counts that leave nothing."""
        assert lm is not None
        width = int(families.text_config(lm.model).hidden_size)
        if self.channels is not None and (
            not self.channels or any(not 0 <= c < width for c in self.channels)
        ):
            allowed = f"channels from 0 to {width - 1}, or null"
            raise UserError("study.channels", list(self.channels), allowed, "set study.channels=null")
        for name, low in (
            ("top", 1),
            ("controls", 1),
            ("strings", GROUPS),
            ("window", 1),
            ("skip", 0),
            ("batch_size", 1),
        ):
            if getattr(self, name) < low:
                raise UserError(
                    f"study.{name}",
                    getattr(self, name),
                    f"a whole number from {low} up",
                    f"set study.{name}={max(low, 2)}",
                )
        low = self.window + self.skip + 7
        if not low <= self.length <= lm.context_window:
            allowed = f"from {low} (study.window + study.skip + 7) to {lm.context_window} (context window of {lm.name})"
            raise UserError("study.length", self.length, allowed, "change study.length or study.window")

    @property
    def search(self) -> ChannelSearch:
        """The channel search whose strings and filter the study takes."""
        names = ("site", "strings", "length", "alphabet", "window", "skip", "batch_size", "seed")
        return ChannelSearch(**{name: getattr(self, name) for name in names})

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Four tables.

        ``curves`` (channel, kind, site, layer, position, value, sliding_mean): averages over the second set
        of strings; kind says why a channel is there. ``statistics``: by channel and layer, whether the fitted
        curve rises or falls throughout (1, -1, 0), the Spearman correlation of the averaged curve with the
        position, and the share of the channel's variance over strings and positions that the position
        explains, each also with shuffled positions. ``summary``: by channel, means over layers with their
        interval, and the share of all channels with a larger one. ``null``: channels that pass the search's
        filter, and the largest mean absolute correlation of any, as they are and with shuffled positions.
        """
        lm, first = run.lm, self.search
        averages = average_states(lm, first, run)
        (run.out.path / STATE).unlink(missing_ok=True)
        outputs = averages["residual"][1:]
        chosen = self.chosen(run.config, outputs if self.site == "residual" else averages["attention_input"])
        with run.progress("strings to measure on", self.strings) as advance:
            found = moments(lm, replace(first, seed=self.seed + 1), list(chosen), self.skip, advance)
        return {
            "curves": self._curves(found, chosen),
            "statistics": self._statistics(found, chosen),
            **self._summary(found, chosen),
        }

    def chosen(self, config: Config, curves: Array) -> dict[int, str]:
        """The channels to measure and why each was chosen, from averaged states [L, P, D] of other
        strings."""
        found = dict.fromkeys(self.channels or (), GIVEN)
        if self.channels is None:
            order = np.argsort(-mean_correlation(curves[:, self.skip :]), kind="stable")
            named = [(int(c), STRONGEST) for c in order[: self.top]]
            published = {
                "the paper's": PAPER.get(config.model.name),
                "the model's": (config.model.scale_channel or {}).get("channel"),
            }
            named += [(channel, kind) for kind, channel in published.items() if channel is not None]
            for channel, kind in named:
                found[channel] = f"{found[channel]} and {kind}" if channel in found else kind
        rest = [c for c in range(curves.shape[2]) if c not in found]
        drawn = np.random.default_rng(self.seed).permutation(rest)[: self.controls]
        return found | {int(c): RANDOM for c in drawn}

    def _curves(self, found: Moments, chosen: Mapping[int, str]) -> pd.DataFrame:
        """Curves of the chosen channels, and of the first one with shuffled positions."""
        first = next(iter(chosen))
        shown = [(c, kind, found.mean[:, :, c]) for c, kind in chosen.items()] + [
            (first, SHUFFLED, found.shuffled[:, :, first])
        ]
        parts = []
        for channel, kind, curve in shown:
            layer, position = np.indices(curve.shape)
            smooth = np.full(curve.shape, np.nan)
            behind = statistics.sliding_mean(curve[:, self.skip :, None], self.window)[:, :, 0]
            start = self.skip + self.window // 2
            smooth[:, start : start + behind.shape[1]] = behind
            place = {
                "channel": channel,
                "kind": kind,
                "site": self.site,
                "layer": layer.ravel(),
                "position": position.ravel(),
            }
            parts.append(pd.DataFrame({**place, "value": curve.ravel(), "sliding_mean": smooth.ravel()}))
        return pd.concat(parts, ignore_index=True)

    def _statistics(self, found: Moments, chosen: Mapping[int, str]) -> pd.DataFrame:
        """What position does to each chosen channel, layer by layer."""
        channels = list(chosen)
        mean, shuffled = found.mean[:, self.skip :, channels], found.shuffled[:, self.skip :, channels]
        direction = statistics.paper(found.mean[:, :, channels], window=self.window, skip=self.skip).direction
        rows = [
            {
                "channel": channel,
                "kind": chosen[channel],
                "layer": layer,
                "monotone": int(direction[layer, i]),
                "spearman": rho,
                "shuffled_spearman": null,
                "explained": mean[layer, :, i].var() / total,
                "shuffled_explained": shuffled[layer, :, i].var() / total,
                "n": found.strings,
            }
            for i, channel in enumerate(channels)
            for layer, (rho, null, total) in enumerate(
                zip(
                    correlation(mean[:, :, i]),
                    correlation(shuffled[:, :, i]),
                    found.variance[:, i],
                    strict=True,
                )
            )
        ]
        return pd.DataFrame(rows)

    def _summary(self, found: Moments, chosen: Mapping[int, str]) -> dict[str, pd.DataFrame]:
        """Means over layers with intervals, and what the filter and the correlation make of shuffled
        positions."""
        every = {name: getattr(found, name) for name in ("mean", "shuffled")}
        level = {name: mean_correlation(curves[:, self.skip :]) for name, curves in every.items()}
        filtered = {
            name: statistics.paper(curves, window=self.window, skip=self.skip)
            for name, curves in every.items()
        }
        layers = found.mean.shape[0]
        rows = []
        for i, (channel, kind) in enumerate(chosen.items()):
            value, low, high = jackknife(found.groups[:, :, self.skip :, i], found.sizes)
            share = float((level["mean"] > level["mean"][channel]).mean())
            count = int(filtered["mean"].monotone_layers[channel])
            rows.append((channel, kind, count, layers, value, low, high, share, found.strings))
        names = [
            "channel",
            "kind",
            "monotone_layers",
            "layers",
            "spearman",
            "low",
            "high",
            "stronger_channels",
            "n",
        ]
        null = [
            {
                "positions": positions,
                "passing": len(filtered[name].ranking),
                "channels": len(level[name]),
                "largest": np.nanmax(level[name]),
                "median": np.nanmedian(level[name]),
            }
            for name, positions in (("mean", REAL), ("shuffled", SHUFFLED))
        ]
        return {"summary": pd.DataFrame(rows, columns=names), "null": pd.DataFrame(null)}

    def figures(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[Figure, str]]:
        """The curves averaged over layers (Figure 4), layer by layer (Figure 14), and the statistics of each
        layer."""
        curves, words = tables["curves"], self.site.replace("_", " ")
        drawn = {
            "averaged": (
                averaged_figure(curves, self.skip),
                f"Channels of the {words} over the token position, averaged over layers and random strings, each less its own "
                "mean. Thin: as averaged; thick: sliding mean.",
            ),
            "statistics": (
                layer_figure(tables["statistics"]),
                "Left: rank correlation of the averaged curve with the position. Right: share of a channel's variance over "
                "strings and positions that the position explains; dotted: the first channel with shuffled positions.",
            ),
        }
        shown = curves[~curves["kind"].isin([RANDOM, SHUFFLED])]
        for channel, kind in shown.groupby("channel", sort=False)["kind"].first().items():
            figure = channel_curves(shown, int(channel))
            drawn[f"layers_{channel}"] = (
                figure,
                f"Channel {channel} ({kind}) of the {words}, layer by layer.",
            )
        return drawn

    def findings(self, tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        """Claim C3: a channel follows the position, the filter finds such channels, and the trend begins in
        the first layer."""
        summary, null, layers = tables["summary"], tables["null"].set_index("positions"), tables["statistics"]
        controls = ", ".join(f"{rho:.2f}" for rho in summary.loc[summary["kind"] == RANDOM, "spearman"])
        bar, median = float(null.loc[SHUFFLED, "largest"]), float(null.loc[REAL, "median"])
        found = []
        for row in summary[summary["kind"] != RANDOM].to_dict("records"):
            own = layers[layers["channel"] == row["channel"]]
            share, chance = own["explained"].mean(), own["shuffled_explained"].mean()
            note = (
                f"channel {row['channel']}: {row['kind']}; monotone in {row['monotone_layers']} of {row['layers']} layers; "
                f"position explains {share:.1%} of its variance (shuffled {chance:.1%}); the largest correlation of any channel "
                f"with shuffled positions is {bar:.2f}; random channels {controls}, median of all {median:.2f}"
            )
            words = f"mean over layers of channel {row['channel']}'s absolute Spearman correlation with the position"
            found.append(
                Finding(
                    claim=EXISTS,
                    statistic=words,
                    value=row["spearman"],
                    low=row["low"],
                    high=row["high"],
                    n=row["n"],
                    verdict="holds" if row["low"] > bar else "does not hold",
                    note=note,
                )
            )
        return [*found, _filter_finding(null), _start_finding(layers, self)]


EXISTS = "C3: positional channels exist across model families, also with NoPE and ALiBi (Yu et al. 2025, Figures 4 and 14)"
FILTER = "C3: the filter of Algorithm 1 tells positional channels from noise (monotone in more than a quarter of the layers)"
START = "C3: the trend first appears just after the first attention module (Yu et al. 2025, Appendix G)"
REAL, SHUFFLED = "as they are", "shuffled positions"
STRONGEST, GIVEN, RANDOM = "strongest trend", "given", "random"
DASHES = {RANDOM: (0, (4, 2)), SHUFFLED: ":"}


def _filter_finding(null: pd.DataFrame) -> Finding:
    """Channels that pass as they are, against those that pass with shuffled positions."""
    there, chance = (int(null.loc[positions, "passing"]) for positions in (REAL, SHUFFLED))
    count = int(null.loc[REAL, "channels"])
    low, high = difference_interval(there, chance, count)
    return Finding(
        claim=FILTER,
        statistic="share of channels that pass, minus the share that pass with shuffled positions",
        value=(there - chance) / count,
        low=low,
        high=high,
        n=count,
        verdict="holds" if low > 0 else "does not hold",
        note=f"{there} of {count} pass, {chance} of {count} with shuffled positions; channels taken as independent",
    )


def _start_finding(layers: pd.DataFrame, study: PositionalChannels) -> Finding:
    """Correlation of the strongest channel right after the first attention, against that of shuffled
    positions."""
    own = layers[layers["channel"] == layers["channel"].iloc[0]].set_index("layer")
    first = 1 if study.site == "attention_input" else 0
    value, bar = abs(own.loc[first, "spearman"]), 1.96 / math.sqrt(study.length - study.skip - 1)
    channel = int(own["channel"].iloc[0])
    where = f"input of layer {first}" if first else "output of layer 0"
    early = abs(own.loc[0, "spearman"]) if first else 0.0
    before = f"; input of layer 0, where no token has seen another: {early:.2f}" if first else ""
    return Finding(
        claim=START,
        statistic=f"channel {channel}'s absolute Spearman correlation with the position at the {where}",
        value=value,
        n=int(own["n"].iloc[0]),
        verdict="holds" if value > bar and early <= bar else "does not hold",
        note=f"95 % of uncorrelated curves stay below {bar:.2f}{before}; last layer: {abs(own['spearman'].iloc[-1]):.2f}",
    )


# Moments of hidden states


@dataclass(frozen=True)
class Moments:
    """Hidden states of one site over random strings. L layers, P positions, D channels, C chosen ones, G
    groups of strings.

    Attributes:
        mean: Averages, [L, P, D].
        shuffled: Averages with the positions behind the first ``skip`` shuffled within each string, [L, P,
            D].
        groups: Averages of each group of strings at the chosen channels, [G, L, P, C].
        sizes: Strings in each group, [G].
        variance: Variance over strings and positions behind the first ``skip``, [L, C].
        strings: Number of strings.
    """

    mean: Array
    shuffled: Array
    groups: Array
    sizes: Array
    variance: Array
    strings: int


@torch.inference_mode()
def moments(
    lm: LM,
    search: ChannelSearch,
    channels: Sequence[int],
    skip: int,
    advance: Callable[[int], None] = lambda n: None,
) -> Moments:
    """Run random strings and keep sums alone: memory is linear in the length of a string.

    Args:
        lm: The model.
        search: Site, number, length, alphabet and seed of the strings.
        channels: Channels whose groups and variance are kept.
        skip: First positions that are left where they are, and out of the variance.
        advance: Told how many strings are done.
    """
    rows, rng = random_strings(lm, search), np.random.default_rng(search.seed)
    layers = list(lm.model.get_submodule(families.family_of(lm.model).layers))  # type: ignore[call-overload]
    modules = families.attention_modules(lm.model) if search.site == "attention_input" else layers[1:]
    shape, width = (lm.layers, search.length), int(families.text_config(lm.model).hidden_size)
    place = {"dtype": torch.float32, "device": lm.device}
    total, mixed = (torch.zeros(*shape, width, **place) for _ in range(2))  # type: ignore[call-overload]
    squares = torch.zeros(*shape, len(channels), **place)  # type: ignore[call-overload]
    groups = torch.zeros(GROUPS, *shape, len(channels), **place)  # type: ignore[call-overload]
    batch: dict[str, Tensor] = {}

    def add(layer: int, hidden: Tensor) -> None:
        states = hidden.float().to(lm.device)
        part = states[..., channels]
        total[layer] += states.sum(0)
        squares[layer] += (part**2).sum(0)
        groups[:, layer].index_add_(0, batch["group"], part)
        mixed[layer] += states[torch.arange(len(states), device=lm.device)[:, None], batch["order"]].sum(0)

    def capture(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            add(layer, families.attention_input(args, kwargs))

        return hook

    with ExitStack() as stack:
        for layer, module in enumerate(modules):
            stack.callback(module.register_forward_pre_hook(capture(layer), with_kwargs=True).remove)
        for start in range(0, len(rows), search.batch_size):
            ids = rows[start : start + search.batch_size]
            order = np.tile(np.arange(search.length), (len(ids), 1))
            order[:, skip:] = rng.permuted(order[:, skip:], axis=1)
            batch["order"] = torch.tensor(order, device=lm.device)
            batch["group"] = torch.arange(start, start + len(ids), device=lm.device) % GROUPS
            out = lm.model.base_model(input_ids=torch.tensor(ids, device=lm.device), use_cache=False)
            if search.site == "residual":
                add(lm.layers - 1, out.last_hidden_state)
            advance(len(ids))
    n, sizes = len(rows), np.bincount(np.arange(len(rows)) % GROUPS, minlength=GROUPS)
    kept = groups.cpu().numpy().astype(np.float64)
    mean = kept.sum(0)[:, skip:] / n
    variance = (squares.cpu().numpy().astype(np.float64)[:, skip:] / n).mean(1) - mean.mean(1) ** 2
    averages = {name: (values / n).cpu().numpy() for name, values in (("mean", total), ("shuffled", mixed))}
    return Moments(
        **averages,
        groups=kept / sizes[:, None, None, None],
        sizes=sizes.astype(np.float64),
        variance=variance,
        strings=n,
    )


def correlation(curves: Array) -> Array:
    """Spearman correlation of each curve [R, P] with the position, [R]."""
    values = curves.astype(np.float64)
    return spearman(values, np.broadcast_to(np.arange(values.shape[1], dtype=np.float64), values.shape))


def mean_correlation(curves: Array) -> Array:
    """Mean over layers of the absolute Spearman correlation with the position, [D], from curves [L, P, D]."""
    return np.nanmean([np.abs(correlation(layer.T)) for layer in curves], axis=0)


def jackknife(groups: Array, sizes: Array) -> tuple[float, float, float]:
    """Mean over layers of one channel's absolute correlation, with a 95 % interval: groups of strings left
    out one by one.

    Args:
        groups: Averages of each group, [G, L, P].
        sizes: Strings in each group, [G].
    """
    sums = groups * sizes[:, None, None]
    whole = sums.sum(0)
    value = float(np.abs(correlation(whole)).mean())
    left = np.array([np.abs(correlation(whole - part)).mean() for part in sums])
    half = t.ppf(0.975, len(left) - 1) * np.sqrt((len(left) - 1) * left.var())
    return value, max(value - half, 0.0), min(value + half, 1.0)


def difference_interval(first: int, second: int, n: int) -> tuple[float, float]:
    """95 % interval of the difference of two shares of n each, from their Wilson intervals (Newcombe 1998,
    method 10)."""
    a, b = first / n, second / n
    (a_low, a_high), (b_low, b_high) = wilson(first, n), wilson(second, n)
    return a - b - math.hypot(a - a_low, b_high - b), a - b + math.hypot(a_high - a, b - b_low)


# Figures


@styled
def averaged_figure(curves: pd.DataFrame, skip: int) -> Figure:
    """Curves averaged over layers, less their mean, over the token position; random channels dashed, the null
    dotted."""
    figure = new_figure(COLUMN, 3.0)
    axes = figure.subplots()
    shown = curves[curves["position"] >= skip]
    for index, ((channel, kind), line) in enumerate(shown.groupby(["channel", "kind"], sort=False)):
        mean = line.groupby("position")[["value", "sliding_mean"]].mean()
        mean -= mean["value"].mean()
        style = line_style(index) | {"marker": "", "linestyle": DASHES.get(str(kind), "-")}
        axes.plot(mean.index, mean["value"], color=style["color"], linewidth=0.4, alpha=0.4)
        axes.plot(mean.index, mean["sliding_mean"], label=f"{channel} ({kind})", **style)
    axes.set(xlabel="token position", ylabel="mean value of the channel,\nless its mean over positions")
    legend_below(figure, axes)
    return figure


@styled
def layer_figure(table: pd.DataFrame) -> Figure:
    """Correlation with the position, and share of variance that it explains, over the layers; a line for each
    channel."""
    figure = new_figure(PAGE, 2.8)
    left, right = figure.subplots(1, 2)
    for index, ((channel, kind), line) in enumerate(table.groupby(["channel", "kind"], sort=False)):
        style = line_style(index) | {"linestyle": DASHES.get(str(kind), "-")}
        left.plot(line["layer"], line["spearman"], label=f"{channel} ({kind})", **style)
        right.plot(line["layer"], 100 * line["explained"], **style)
        if not index:
            null = line_style(0) | {"linestyle": ":", "marker": "", "label": f"{channel} ({SHUFFLED})"}
            left.plot(line["layer"], line["shuffled_spearman"], **null)
            right.plot(line["layer"], 100 * line["shuffled_explained"], **null)
    left.axhline(0, color="0.5", linewidth=0.6, zorder=0)
    left.set(
        xlabel="layer", ylabel="rank correlation of the averaged\ncurve with the position", ylim=(-1.08, 1.08)
    )
    right.set(xlabel="layer", ylabel="variance that the\nposition explains (%)", ylim=(0, None))
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_below(figure, left)
    return figure
