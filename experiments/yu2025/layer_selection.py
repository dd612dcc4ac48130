"""Which layers to scale: every range on calibration prompts, the published one, the layers that retrieve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.late import Axes, Figure, pd
from posbench.methods.scale_channel import ScaleChannel
from posbench.model.prefix import Prefix
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.schema import Count, Seed
from posbench.search.base import Search
from posbench.stats import bootstrap
from posbench.stats.bootstrap import Array, Estimate
from posbench.stats.findings import (
    SMALLEST_POINTS,
    SMALLEST_SHARE,
    Finding,
    estimate,
    estimate_columns,
    estimate_row,
)
from posbench.studies.base import Study, Tables
from posbench.studies.prompts import LayerRange, Prompts, check_prompts
from posbench.tasks import Example
from yu2025.ablations import (
    CONTROL,
    channel_search,
    evaluate_settings,
    random_channel,
)
from yu2025.common import unless_missing

LOSSES_FILE = "range_losses.jsonl"
ATTENTION_FILE = "range_attention.jsonl"
SCORES_FILE = "range_predictions.jsonl"
CHOSEN = "channel of the method"
BEST = "best range"
PUBLISHED_RANGE = "published range"
EVERY = "all layers"
SOURCE = "Yu et al. 2025, Section 3.3"
OUTSIDE = "inside minus outside the {} range"


@dataclass(frozen=True, kw_only=True)
class LayerSelection(Study):
    """Layer ranges of scale_channel: loss of each, best against published, retrieval layer by layer.

    Source: beyond Yu et al. 2025, who choose layers "based on engineering experience" (Section 3.3,
    Limitations) as those "more likely to be retrieval-related". Channel and factor stay the method's own.

    Attributes:
        search: The channel search, for its calibration losses and steps.
        step: Step of the first and last layers of ranges; None is about eight steps, as ``search.layers=auto``.
        control: Whether the ranges of a channel drawn at random are measured, too.
        seed: Seed of that draw.
    """

    uses_method: ClassVar[bool] = True

    search: Search
    step: Count | None = None
    control: bool = True
    seed: Seed = 0

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        _scale_channel(run)
        channel_search(self.search)
        check_prompts(run)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``ranges``, ``edges`` (effect of the first and last layers), ``layers`` and ``evaluation``."""
        method = _scale_channel(run)
        search = channel_search(self.search)
        search_grid = replace(search, layers="auto", layer_step=self.step)
        grid = search_grid.layer_ranges(run.lm.layers, None)
        ranges = dict.fromkeys([*grid, method.layers])
        methods = {CHOSEN: method}
        if self.control:
            channel = random_channel(run.lm, method, self.seed)
            methods[CONTROL] = replace(method, channel=channel)
        candidates = {
            kind: [replace(scaled, layers=layers) for layers in ranges]
            for kind, scaled in methods.items()
        }
        every_candidate = [c for of_kind in candidates.values() for c in of_kind]
        losses = search.losses(run, LOSSES_FILE, every_candidate)  # [1 + C, prompts]
        unmodified = losses[0]
        changes = dict(zip(every_candidate, losses[1:] - unmodified, strict=True))

        clusters = [e.question_id for e in run.examples("calibration")]
        rows = []
        best = {}
        for kind, of_kind in candidates.items():
            for candidate in of_kind:
                first, last = candidate.layers
                change = bootstrap.difference(changes[candidate], clusters)
                row = {
                    "kind": kind,
                    "channel": candidate.channel,
                    "first": first,
                    "last": last,
                    "loss": (changes[candidate] + unmodified).mean(),
                    **estimate_row(change, "change"),
                }
                rows.append(row)
            best[kind] = min(of_kind, key=lambda c: changes[c].mean())
        settings = {
            BEST: best[CHOSEN],
            PUBLISHED_RANGE: method,
            EVERY: replace(method, layers=(0, run.lm.layers - 1)),
        }
        if self.control:
            settings[CONTROL] = best[CONTROL]
        evaluation, _ = evaluate_settings(run, settings, PUBLISHED_RANGE)
        changes_by_range = {c.layers: changes[c] for c in candidates[CHOSEN]}
        compared_ranges = {
            "best": best[CHOSEN].layer_indices,
            "published": method.layer_indices,
        }
        return {
            "ranges": pd.DataFrame(rows).assign(loss_unmodified=unmodified.mean()),
            "edges": edges(changes_by_range, run.lm.layers, clusters),
            "layers": layer_table(run, changes_by_range, compared_ranges),
            "evaluation": evaluation,
        }

    def figures(self, tables: Tables) -> Drawn:
        """See :meth:`Study.figures`."""
        caption = "Retrieval score: share of prompts whose gold item gets most attention, minus chance."
        return {"layers": (layer_figure(tables["ranges"], tables["layers"]), caption)}

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Whether a search for the range pays, its layers retrieve, and the first and last layers harm."""
        settings = tables["evaluation"].set_index("setting")
        layers = tables["layers"].set_index("layer")
        gain = estimate(settings.loc[BEST], "difference", 100)
        ranges = settings.loc[[BEST, PUBLISHED_RANGE], "layers"]
        claim = "Searching the layers improves on the published range"
        statistic = "best minus published range, points of the score"
        note = f"layers {' against '.join(ranges)}"
        finding = Finding.above(claim, statistic, gain, SMALLEST_POINTS, note).control()
        findings = [unless_missing(finding, settings.loc[BEST])]
        claims = {
            "best": "The range with the lowest loss is that of the retrieval-related layers",
            "published": f"The layers to scale are more likely to be retrieval-related ({SOURCE})",
        }
        for name, claim in claims.items():
            contrast = OUTSIDE.format(name)
            retrieval = estimate(layers.loc[contrast], "retrieval")
            statistic = f"retrieval score of the layers {contrast}"
            if np.isnan(retrieval.value):
                finding = Finding.untestable(
                    claim, statistic, "all layers", retrieval.n
                )
            else:
                finding = Finding.above(claim, statistic, retrieval, SMALLEST_SHARE)
            if name == "best":
                finding = finding.control()
            findings.append(finding)
        for row in tables["edges"].to_dict("records"):
            edge = row["edge"]
            claim = f"Scaling the {edge} layers, too, does harm ({SOURCE})"
            statistic = f"calibration loss of ranges with the {edge} layers minus without, nats per token"
            change = estimate(row, "change")
            findings.append(Finding.above(claim, statistic, change, SMALLEST_SHARE))
        if CONTROL in settings.index:
            # Minus the difference, so that its ends change places.
            value, low, high, n = estimate(settings.loc[CONTROL], "difference", -100)
            loss = Estimate(value, high, low, n)
            claim = "Control: a random channel with the best of its ranges stays below the published setting"
            statistic = "published range minus control, points of the score"
            finding = Finding.above(claim, statistic, loss, SMALLEST_POINTS)
            row = settings.loc[CONTROL]
            findings.append(unless_missing(finding.control(), row))
        return findings


def _scale_channel(run: Run) -> ScaleChannel:
    """The method, where it is scale_channel with one channel; another one is refused."""
    method = run.method.build()
    if not isinstance(method, ScaleChannel) or len(method.channels) > 1:
        allowed = "scale_channel with one channel: the study chooses its layers"
        raise UserError(
            "method", run.method.choice.name, allowed, "set method=scale_channel"
        )
    return method


def edges(
    changes: Mapping[LayerRange, Array], layers: int, clusters: list[str]
) -> pd.DataFrame:
    """Effect of the first and last layers on the loss: ranges that hold them against ranges a step inside.

    Args:
        changes: Loss of each range minus the unmodified model's, by prompt, [n].
        layers: Layers of the model.
        clusters: Question of each prompt, [n].

    Returns:
        Rows of edge (first, last), change (nats per answer token, mean over ranges) with its interval, n
        (prompts).
    """
    starts = sorted({first for first, _ in changes})
    stops = sorted({last for _, last in changes})
    # Pairs of a range with the edge and the same range a step inside.
    pairs: dict[str, list[tuple[LayerRange, LayerRange]]] = {"first": [], "last": []}
    if len(starts) > 1 and len(stops) > 1:
        for first, last in changes:
            if first == 0:
                pairs["first"].append(((first, last), (starts[1], last)))
            if last == layers - 1:
                pairs["last"].append(((first, last), (first, stops[-2])))
    rows = []
    for edge, ranges in pairs.items():
        added = [
            changes[outer] - changes[inner]
            for outer, inner in ranges
            if inner in changes
        ]
        if added:
            change = bootstrap.difference(np.mean(added, axis=0), clusters)
            rows.append({"edge": edge, **estimate_row(change, "change"), "n": change.n})
    return pd.DataFrame(rows, columns=["edge", *estimate_columns("change"), "n"])


def layer_table(
    run: Run, changes: Mapping[LayerRange, Array], ranges: Mapping[str, range]
) -> pd.DataFrame:
    """Score each layer's retrieval and its benefit from scaling, and compare ranges of layers.

    The retrieval score is the share of prompts (``runtime.intervene_examples`` of each gold position) in
    which the unmodified model gives the gold item the most attention of all items, minus the share of a guess; the
    benefit is the mean loss of the ranges without a layer minus the mean with it.

    Args:
        run: The run.
        changes: Loss of each range minus the unmodified model's, by prompt, [n].
        ranges: Ranges to compare, by name.

    Returns:
        Rows of layer: retrieval with interval and n, benefit, and which ranges hold the layer; behind them a
        row for each range: retrieval of the layers inside minus those outside.
    """
    prompts = Prompts.of(run, run.runtime.intervene_examples)

    def compute(batch: Sequence[Example], prefix: Prefix | None) -> list[Row]:
        largest = prompts.attention(batch, prefix).argmax(-1)
        return [{"most": layers} for layers in largest.tolist()]

    largest = prompts.as_read(ATTENTION_FILE, "attention", {}, compute)
    frame = prompts.frame()
    clusters = list(frame["cluster"])
    hits = (
        np.array([largest[name]["most"] for name in frame["id"]])
        == frame[["gold_position"]].to_numpy()
    )  # [prompts, L]
    chance = 1 / frame["items"].iloc[0]
    rows = []
    for layer in range(run.lm.layers):
        retrieval = bootstrap.difference(hits[:, layer] - chance, clusters)
        row = {
            "layer": str(layer),
            **estimate_row(retrieval, "retrieval"),
            "n": retrieval.n,
            "benefit": _benefit(changes, layer),
        }
        for name, layers in ranges.items():
            row[name] = layer in layers
        rows.append(row)
    for name, layers in ranges.items():
        inside = np.isin(np.arange(run.lm.layers), layers)
        retrieval = Estimate(np.nan, np.nan, np.nan, len(hits))
        if not inside.all():
            contrast = hits[:, inside].mean(1) - hits[:, ~inside].mean(1)
            retrieval = bootstrap.difference(contrast, clusters)
        row = {
            "layer": OUTSIDE.format(name),
            **estimate_row(retrieval, "retrieval"),
            "n": retrieval.n,
            "benefit": np.nan,
        }
        for column in ranges:
            row[column] = column == name
        rows.append(row)
    return pd.DataFrame(rows)


def _benefit(changes: Mapping[LayerRange, Array], layer: int) -> float:
    """Mean loss of the ranges without a layer minus the mean with it; NaN if either group is empty."""
    losses_with: list[float] = []
    losses_without: list[float] = []
    for (first, last), change in changes.items():
        losses = losses_with if first <= layer <= last else losses_without
        losses.append(change.mean())
    if not losses_with or not losses_without:
        return np.nan
    return float(np.mean(losses_without) - np.mean(losses_with))


@plot.styled
def layer_figure(ranges: pd.DataFrame, layers: pd.DataFrame) -> Figure:
    """Loss over ranges, a map per channel on one scale (left); retrieval and benefit by layer (right)."""
    kinds = list(ranges["kind"].unique())
    rows = layers[layers["layer"].str.isdigit()]
    figure, (*maps, right) = plot.new_figure(
        plot.PAGE, 2.6, 1, len(kinds) + 1, n=ranges.get("n", ())
    )
    largest = float(ranges["change"].abs().max()) or 1.0
    layer = rows["layer"].astype(int)
    published = layer[rows["published"].astype(str).str.lower() == "true"]
    for axes, kind in zip(maps, kinds, strict=True):
        ranges_of_kind = ranges[ranges["kind"] == kind]
        image = _loss_map(
            axes, ranges_of_kind, largest, (published.min(), published.max())
        )
        title = f"channel {ranges_of_kind['channel'].iloc[0]}"
        if kind == CONTROL:
            title += " (random)"
        axes.set_title(title)
    label = "loss minus unmodified\n(nats per answer token)"
    figure.colorbar(image, ax=maps, label=label)
    below = rows["retrieval"] - rows["retrieval_ci_low"]
    above = rows["retrieval_ci_high"] - rows["retrieval"]
    right.bar(
        layer,
        rows["retrieval"],
        yerr=np.stack([below, above]).clip(0),
        color=plot.COLOURS[3],
        error_kw={"elinewidth": 0.8},
        label="retrieval score",
    )
    right.set(
        xlabel="layer",
        xticks=layer[:: max(1, len(layer) // 8)],
        ylabel="retrieval score (bars)",
    )
    benefit = right.twinx()
    benefit.plot(
        layer,
        rows["benefit"],
        color=plot.COLOURS[1],
        marker="s",
        label="benefit of scaling the layer",
    )
    benefit.set_ylabel("benefit (line, nats)", color=plot.COLOURS[1])
    benefit.spines["right"].set_visible(True)
    plot.add_legend_below(figure)
    return figure


def _loss_map(
    axes: Axes, rows: pd.DataFrame, largest: float, published: tuple[int, int]
) -> Any:
    """Draw how the method changes the loss, by first and last layer that it changes, as a heat map.

    Args:
        axes: Where to draw.
        rows: A row for each range: first, last, change (nats per token).
        largest: Value at both ends of the colour scale.
        published: First and last layer of the paper.

    Returns:
        The image, for a colour bar.
    """
    grid = rows.pivot(index="first", columns="last", values="change")
    image = axes.imshow(
        grid, cmap="PuOr_r", vmin=-largest, vmax=largest, aspect="auto", origin="lower"
    )
    lowest = rows.loc[rows["change"].idxmin()]
    axes.plot(
        grid.columns.get_loc(lowest["last"]),
        grid.index.get_loc(lowest["first"]),
        "*",
        markeredgewidth=1.2,
        color=plot.BLUE,
        markersize=8,
        label="lowest loss",
    )
    first, last = published
    axes.plot(
        grid.columns.get_loc(last),
        grid.index.get_loc(first),
        "s",
        markeredgewidth=1.2,
        color=plot.PAPER_COLOUR,
        markersize=12,
        markerfacecolor="none",
        label="published range",
    )
    plot.set_few_ticks(axes.set_xticks, grid.columns, 6)
    plot.set_few_ticks(axes.set_yticks, grid.index, 6)
    axes.set(xlabel="last layer", ylabel="first layer")
    return image
