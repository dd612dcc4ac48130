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
from posbench.stats.findings import Finding, ends, estimate
from posbench.studies.base import Study, Tables
from posbench.studies.prompts import Prompts, Range, check_prompts
from posbench.studies.yu2025.ablations import (
    CONTROL,
    channel_search,
    evaluated,
    random_channel,
)
from posbench.tasks import Example

LOSSES = "range_losses.jsonl"
ATTENTION = "range_attention.jsonl"
ROWS = "range_predictions.jsonl"
CHOSEN = "channel of the method"
BEST = "best range"
PUBLISHED = "published range"
EVERY = "all layers"
SOURCE = "Yu et al. 2025, Section 3.3"
OUTSIDE = "inside minus outside the {} range"


@dataclass(frozen=True, kw_only=True)
class LayerSelection(Study):
    """Layer ranges of scale_channel: loss of each, best against published, retrieval layer by layer.

    Source: beyond Yu et al. 2025, who choose layers "based on engineering experience" (Section 3.3,
    Limitations) as those "more likely to be retrieval-related". Channel and factor stay the method's own.
    """

    uses_method: ClassVar[bool] = True

    search: Search  # the channel search, for its calibration losses and steps
    step: Count | None = (
        None  # of starts and ends; None: about eight steps, as ``search.layers=auto``
    )
    control: bool = (
        True  # whether the ranges of a channel drawn at random are tried, too
    )
    seed: Seed = 0

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        _method(run)
        channel_search(self.search)
        check_prompts(run)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``ranges``, ``edges`` (what the first and last layers do), ``layers`` and ``evaluation``."""
        method = _method(run)
        search = channel_search(self.search)
        grid = replace(search, layers="auto", layer_step=self.step).layer_ranges(
            run.lm.layers, None
        )
        kinds = {CHOSEN: method}
        if self.control:
            kinds[CONTROL] = replace(
                method, channel=random_channel(run.lm, method, self.seed)
            )
        ranges = dict.fromkeys([*grid, method.layers])
        tried = [
            (kind, replace(m, layers=r)) for kind, m in kinds.items() for r in ranges
        ]
        candidates = [c for _, c in tried]
        each = search.losses(run, LOSSES, candidates)
        changes = dict(zip(candidates, each[1:] - each[0], strict=True))
        base = each[0]
        clusters = [e.cluster or e.id for e in run.examples("calibration")]
        rows = []
        for kind, c in tried:
            place = {
                "kind": kind,
                "channel": c.channel,
                "first": c.layers[0],
                "last": c.layers[1],
            }
            change = bootstrap.difference(changes[c], clusters)
            rows.append(
                {**place, "loss": (changes[c] + base).mean(), **ends(change, "change")}
            )
        best = {
            k: min(
                (c for kind, c in tried if kind == k), key=lambda c: changes[c].mean()
            )
            for k in kinds
        }
        settings = {BEST: best[CHOSEN], PUBLISHED: method}
        settings[EVERY] = replace(method, layers=(0, run.lm.layers - 1))
        if self.control:
            settings[CONTROL] = best[CONTROL]
        own = {c.layers: changes[c] for kind, c in tried if kind == CHOSEN}
        held = {"best": best[CHOSEN].layer_indices, "published": method.layer_indices}
        return {
            "ranges": pd.DataFrame(rows).assign(loss_unmodified=base.mean()),
            "edges": edges(own, run.lm.layers, clusters),
            "layers": layer_table(run, own, held),
            "evaluation": evaluated(run, ROWS, settings, PUBLISHED)[0],
        }

    def figures(self, tables: Tables) -> Drawn:
        """See :meth:`Study.figures`."""
        caption = "Retrieval score: share of prompts whose gold item gets most attention, minus chance."
        return {"layers": (layer_figure(tables["ranges"], tables["layers"]), caption)}

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Whether a search for the range pays, its layers retrieve, and the first and last layers harm."""
        rows = tables["evaluation"].set_index("setting")
        layers = tables["layers"].set_index("layer")
        gain = estimate(rows.loc[BEST], "difference", 100)
        ranges = rows.loc[[BEST, PUBLISHED], "layers"]
        claim = "Searching the layers improves on the published range"
        words = "best minus published range, points of the score"
        note = f"layers {' against '.join(ranges)}"
        found = [Finding.above(claim, words, gain, note=note).control()]
        claims = {
            "best": "The range with the lowest loss is that of the retrieval-related layers",
            "published": f"The layers to scale are more likely to be retrieval-related ({SOURCE})",
        }
        for name, claim in claims.items():
            at = estimate(layers.loc[OUTSIDE.format(name)], "retrieval")
            words = f"retrieval score of the layers {OUTSIDE.format(name)}"
            whole = Finding.untestable(claim, words, "all layers", at.n)
            one = whole if np.isnan(at.value) else Finding.above(claim, words, at)
            found.append(one.control() if name == "best" else one)
        for row in tables["edges"].to_dict("records"):
            claim = f"Scaling the {row['edge']} layers, too, does harm ({SOURCE})"
            words = f"calibration loss of ranges with the {row['edge']} layers minus without, nats per token"
            found.append(Finding.above(claim, words, estimate(row, "change")))
        if CONTROL in rows.index:
            value, low, high, n = estimate(rows.loc[CONTROL], "difference", -100)
            claim = "Control: a random channel with the best of its ranges stays below the published setting"
            words = "published range minus control, points of the score"
            found.append(
                Finding.above(claim, words, Estimate(value, high, low, n)).control()
            )
        return found


def _method(run: Run) -> ScaleChannel:
    """The method, where it is scale_channel with one channel; another one is refused."""
    method = run.method.build()
    if not isinstance(method, ScaleChannel) or len(method.channels) > 1:
        allowed = "scale_channel with one channel: the study chooses its layers"
        raise UserError(
            "method", run.method.choice.name, allowed, "set method=scale_channel"
        )
    return method


def edges(
    changes: Mapping[Range, Array], layers: int, clusters: list[str]
) -> pd.DataFrame:
    """What the first and last layers add to the loss: ranges that hold them against those a step inside.

    From the loss of each range minus the unmodified model's, by prompt, and the question of each prompt: rows
    of edge (first, last), change (nats per answer token, mean over ranges) with its interval, n (prompts).
    """
    starts, stops = (sorted({layer[end] for layer in changes}) for end in (0, 1))
    rows = []
    for edge in ("first", "last") if len(starts) > 1 < len(stops) else ():
        outer = [
            r for r in changes if (r[0] == 0 if edge == "first" else r[1] == layers - 1)
        ]
        inner = [
            (starts[1], last) if edge == "first" else (first, stops[-2])
            for first, last in outer
        ]
        both = [
            changes[a] - changes[b]
            for a, b in zip(outer, inner, strict=True)
            if b in changes
        ]
        if both:
            at = bootstrap.difference(np.mean(both, axis=0), clusters)
            rows.append({"edge": edge, **ends(at, "change"), "n": at.n})
    return pd.DataFrame(
        rows, columns=["edge", "change", "change_ci_low", "change_ci_high", "n"]
    )


def layer_table(
    run: Run, changes: Mapping[Range, Array], ranges: Mapping[str, range]
) -> pd.DataFrame:
    """Rows of layer: retrieval with interval and n, benefit, which ranges hold it; the last ones compare.

    The retrieval score is the share of prompts (``runtime.intervene_examples`` of each gold position) in
    which the unmodified model gives the gold item the most attention of all items, minus that of a guess; the
    benefit is the mean loss of the ranges without a layer minus that of those with it.
    """
    prompts = Prompts.of(run, run.runtime.intervene_examples)
    rows = []

    def compute(batch: Sequence[Example], prefix: Prefix | None) -> list[Row]:
        return [
            {"most": layers}
            for layers in prompts.attention(batch, prefix).argmax(-1).tolist()
        ]

    most = prompts.as_read(ATTENTION, "attention", {}, compute)
    frame = prompts.frame()
    hits = (
        np.array([most[i]["most"] for i in frame["id"]])
        == frame[["gold_position"]].to_numpy()
    )

    def add(
        name: str, values: Array | None, benefit: float, flags: Mapping[str, bool]
    ) -> None:
        at = Estimate(np.nan, np.nan, np.nan, len(hits))
        clusters = list(frame["cluster"])
        if values is not None:
            at = bootstrap.difference(values, clusters)
        rows.append(
            {
                "layer": name,
                **ends(at, "retrieval"),
                "n": at.n,
                "benefit": benefit,
                **flags,
            }
        )

    for layer in range(run.lm.layers):
        loss = dict[bool, list[float]]({False: [], True: []})
        for (first, last), change in changes.items():
            loss[first <= layer <= last].append(change.mean())
        benefit = (
            float(np.mean(loss[False]) - np.mean(loss[True]))
            if all(loss.values())
            else np.nan
        )
        held = {name: layer in inside for name, inside in ranges.items()}
        add(str(layer), hits[:, layer] - 1 / frame["items"].iloc[0], benefit, held)
    for name, layers in ranges.items():
        inside = np.isin(np.arange(run.lm.layers), layers)
        apart = (
            None if inside.all() else hits[:, inside].mean(1) - hits[:, ~inside].mean(1)
        )
        add(
            OUTSIDE.format(name),
            apart,
            np.nan,
            {other: other == name for other in ranges},
        )
    return pd.DataFrame(rows)


@plot.styled
def layer_figure(ranges: pd.DataFrame, layers: pd.DataFrame) -> Figure:
    """Loss over ranges, a map per channel on one scale (left); retrieval and benefit by layer (right)."""
    kinds = list(ranges["kind"].unique())
    rows = layers[layers["layer"].str.isdigit()]
    figure, (*maps, right) = plot.new_figure(
        plot.PAGE, 2.6, 1, len(kinds) + 1, n=ranges.get("n", ())
    )
    top = float(ranges["change"].abs().max()) or 1.0
    x = rows["layer"].astype(int)
    published = x[rows["published"].astype(str).str.lower() == "true"]
    for axes, kind in zip(maps, kinds, strict=True):
        own = ranges[ranges["kind"] == kind]
        image = _loss_map(axes, own, top, (published.min(), published.max()))
        axes.set_title(
            f"channel {own['channel'].iloc[0]}"
            + (" (random)" if kind == CONTROL else "")
        )
    figure.colorbar(
        image, ax=maps, label="loss minus unmodified\n(nats per answer token)"
    )
    low, high = (rows[f"retrieval_{end}"] for end in ("ci_low", "ci_high"))
    error = np.stack([rows["retrieval"] - low, high - rows["retrieval"]]).clip(0)
    bars = {
        "color": plot.COLOURS[3],
        "error_kw": {"elinewidth": 0.8},
        "label": "retrieval score",
    }
    right.bar(x, rows["retrieval"], yerr=error, **bars)
    right.set(
        xlabel="layer",
        xticks=x[:: max(1, len(x) // 8)],
        ylabel="retrieval score (bars)",
    )
    other = right.twinx()
    other.plot(
        x,
        rows["benefit"],
        color=plot.COLOURS[1],
        marker="s",
        label="benefit of scaling the layer",
    )
    other.set_ylabel("benefit (line, nats)", color=plot.COLOURS[1])
    other.spines["right"].set_visible(True)
    plot.legend_below(figure)
    return figure


def _loss_map(
    axes: Axes, rows: pd.DataFrame, top: float, published: tuple[int, int]
) -> Any:
    grid = rows.pivot(index="first", columns="last", values="change")
    image = axes.imshow(
        grid, cmap="PuOr_r", vmin=-top, vmax=top, aspect="auto", origin="lower"
    )
    lowest = rows.loc[rows["change"].idxmin()]

    def mark(first: int, last: int, marker: str, **style: Any) -> None:
        at = grid.columns.get_loc(last), grid.index.get_loc(first)
        axes.plot(*at, marker, markeredgewidth=1.2, **style)

    mark(
        lowest["first"],
        lowest["last"],
        "*",
        color=plot.BLUE,
        markersize=8,
        label="lowest loss",
    )
    square: dict[str, Any] = dict(
        color=plot.PAPER, markersize=12, markerfacecolor="none"
    )
    mark(*published, "s", label="published range", **square)
    plot.few_ticks(axes.set_xticks, grid.columns, 6)
    plot.few_ticks(axes.set_yticks, grid.index, 6)
    axes.set(xlabel="last layer", ylabel="first layer")
    return image
