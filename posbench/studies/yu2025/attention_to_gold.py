"""Where the last token looks, by layer and head, as the gold item moves; and whether accuracy follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

import numpy as np
from annotated_types import MinLen
from numpy.typing import NDArray

from posbench.errors import UserError
from posbench.files.atomic import Row, rounded
from posbench.late import Figure, matplotlib, pd
from posbench.model.prefix import Prefix
from posbench.plots import base as plot
from posbench.plots.attention import over_positions
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.cost import InspectionPasses
from posbench.schema import Several
from posbench.stats import bootstrap
from posbench.stats.bootstrap import RESAMPLES, Array, Estimate
from posbench.stats.correlation import permutation_p, spearman
from posbench.stats.findings import Finding, ends, estimate, joint
from posbench.stats.position_bias import curves, dips
from posbench.studies import prompts as shared
from posbench.studies.base import Study, Tables
from posbench.studies.prompts import Prompts, gold
from posbench.tasks import Example, Task
from posbench.tasks.items import placed

Integers = NDArray[np.int64]
View = Literal["maps", "heads", "head_maps", "gold", "lengths"]

SHUFFLES = 1000
HEAD_EXAMPLES = 20  # of each gold position, behind the maps of single heads
AT_LEAST = 0.5  # at the better end of the prompt: a model below it cannot do the task at that length
SOURCE = "Yu et al. 2025, Section 2.1"
FOLLOW = (
    "Some layers and heads follow the gold item, others one place (Yu et al. 2025, Figures 2, 12, 13)",
    "retrieval score of the best layer: share of examples above shuffled gold positions",
)
DEEP = (
    f"The layers that follow the gold item are the deep ones ({SOURCE}, Appendix F)",
    "share of pairs of a retrieval-related and another layer in which the former is the deeper one",
)
LINK = (
    f"Attention to the gold item in the retrieval-related layers follows the position bias ({SOURCE})",
    "Spearman correlation over the gold positions of attention and score",
)
DIP = (
    f"Attention to the gold item is higher at the start and the end than in the middle ({SOURCE}, Figure 2b)",
    "1 - mean attention to a gold item at depth 25 to 75 % / that at the lower of the two ends",
)
LENGTH = (
    "With a longer context this dip in the middle is more pronounced (Yu et al. 2025, Figure 2c)",
    "growth of that dip from one number of items to the next, the least sure step",
)
"""Claims, and the statistics that they are held against."""


@dataclass(frozen=True, kw_only=True)
class AttentionToGold(Study):
    """Attention of the last token to every item as the gold item moves; layers and heads that follow it.

    The retrieval score of a layer or head is the share of examples in which it gives the gold item the
    largest weight of all items, minus the share that is left when gold positions are shuffled: 0 for one that
    looks at one place (a vertical line in Figure 2a), near 1 for one that always finds the gold item (the
    diagonal of Figure 2b). It must also exceed the largest score of any under shuffled positions (95 %).

    Source: Yu et al. 2025, Section 2.1, Eq. 4, Figures 2, 12 and 13, Appendix F. The paper picks the
    retrieval-related layers by eye (15 to 20 of Mistral-7B).
    """

    examples: Several | None = 100  # per gold position at most; None: all of the task
    items: tuple[int, ...] | None = (
        None  # further numbers of items, for the decline with context length
    )
    layers: tuple[int, ...] | None = (
        None  # retrieval-related ones, in place of those that are detected
    )
    head_layer: int | None = (
        None  # whose heads are drawn (Figure 13: 15); None: the one with the best score
    )
    # Lower end of the score's interval that a retrieval-related layer or head must pass: 0.2, say, leaves out
    # those that find the gold item at the two ends of the prompt alone.
    least: float = 0.0
    # Figures to draw: layers (2a, 2b, 12), scores of heads, heads of one layer (13), curves, lengths (2c).
    show: Annotated[tuple[View, ...], MinLen(1)] = get_args(View)

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        head_layer = None if self.head_layer is None else [self.head_layer]
        shared.check_each_layer(run.lm, "study.layers", self.layers)
        shared.check_each_layer(run.lm, "study.head_layer", head_layer)
        for task in self.tasks(run.task):
            shared.check_prompts(run, task)

    def tasks(self, task: Task) -> list[Task]:
        """The task itself, then a copy for each further number of items, which it must let us set."""
        more = [n for n in dict.fromkeys(self.items or ()) if n != task.items]
        if more and not hasattr(task, "pairs"):
            raise UserError(
                "study.items",
                more,
                f"null with task {task.name}",
                "take task=kv_retrieval",
            )
        return [task, *(replace(task, pairs=n) for n in more)]  # type: ignore[call-arg]

    def reads(self, run: Run) -> list[InspectionPasses]:
        """See :meth:`Study.reads`."""
        every = [
            placed(shared.need_items(task), self.examples)
            for task in self.tasks(run.task)
        ]
        looks = [
            InspectionPasses(examples, times=1, replies=1, shared=True)
            for examples in every
        ]
        return [
            *looks,
            InspectionPasses(placed(every[0], HEAD_EXAMPLES), times=1, shared=True),
        ]  # maps of heads

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Six tables.

        ``maps``, ``head_maps``: mean weights per token by layer or head, gold position and item. ``layers``,
        ``heads``: :func:`scores`; of layers also how vertical their map is, and whether they are ``used``.
        ``examples``: attention to the gold item, mean over these layers, and score. ``lengths``: their means.
        """
        parts = []
        tables = dict[str, pd.DataFrame]()
        used = list[int]()
        for task in self.tasks(run.task):
            prompts = Prompts.of(run, self.examples, task=task)
            key = {"items_per_prompt": task.items}

            def compute(
                batch: Sequence[Example],
                prefix: Prefix | None,
                prompts: Prompts = prompts,
            ) -> list[Row]:
                found = prompts.attention(batch, prefix, heads=True).astype(np.float32)
                return [
                    head_row(weights, gold(e))
                    for weights, e in zip(found, batch, strict=True)
                ]

            rows = prompts.as_read(
                "attention.jsonl", f"attention, {task.items} items", key, compute
            )
            if not tables:
                tables = self._scores(prompts, [rows[e.id] for e in prompts.examples])
                used = tables["layers"].loc[tables["layers"]["used"], "layer"].tolist()
            said = prompts.as_read(
                "replies.jsonl", f"accuracy, {task.items} items", key, prompts.replies
            )
            for e in prompts.examples:
                said[e.id]["attention"] = np.array(rows[e.id]["items"])[
                    used, gold(e)
                ].mean()
            parts.append(prompts.results(said))
        examples = pd.concat(parts, ignore_index=True)
        lengths = shared.means_by_position(examples, ("attention", "score"))
        return {**tables, "examples": examples, "lengths": lengths}

    def _scores(self, prompts: Prompts, rows: Sequence[Row]) -> dict[str, pd.DataFrame]:
        """Tables ``layers``, ``heads``, ``maps`` and ``head_maps`` of the task's own number of items."""
        frame = prompts.frame()
        place = frame["gold_position"].to_numpy()
        clusters = list(frame["cluster"])
        kept = ("items", "largest", "gold", "others")
        items, *each = (np.array([row[name] for row in rows]) for name in kept)
        at_gold = np.take_along_axis(items, place[:, None, None], axis=2)[..., 0]
        others = (items.sum(2) - at_gold) / max(items.shape[2] - 1, 1)
        layers = scores(items.argmax(2), at_gold, others, place, clusters, self.least)
        layers = layers.rename_axis("layer").reset_index()
        maps = mean_maps(items, place, "layer")
        layers["vertical"] = [vertical_share(rows) for _, rows in maps.groupby("layer")]
        # Where no layer follows the gold item, the best one stands in, so that there is something to look at.
        best = int(layers["score"].idxmax())
        found = (
            layers["retrieval"]
            if layers["retrieval"].any()
            else layers["layer"] == best
        )
        layers["used"] = (
            found if self.layers is None else layers["layer"].isin(self.layers)
        )
        largest, at_gold, others = (values.reshape(len(rows), -1) for values in each)
        heads = scores(largest, at_gold, others, place, clusters, self.least)
        layer, head = np.divmod(heads.index, each[0].shape[2])
        heads = heads.assign(layer=layer, head=head)
        by_head = self._head_maps(
            prompts, best if self.head_layer is None else self.head_layer
        )
        return {"layers": layers, "heads": heads, "maps": maps, "head_maps": by_head}

    def _head_maps(self, prompts: Prompts, layer: int) -> pd.DataFrame:
        """Mean weights of every head of one layer, known only now: a few examples run again."""
        few = Prompts.of(prompts.run, HEAD_EXAMPLES, prompts.examples)

        def compute(batch: Sequence[Example], prefix: Prefix | None) -> list[Row]:
            found = few.attention(batch, prefix, heads=True)[:, layer]
            return [{"heads": rounded(weights)} for weights in found]

        rows = few.as_read(
            "heads.jsonl", f"heads of layer {layer}", {"layer": layer}, compute
        )
        weights = np.array([rows[e.id]["heads"] for e in few.examples])
        return mean_maps(
            weights, few.frame()["gold_position"].to_numpy(), "head"
        ).assign(layer=layer)

    def figures(self, tables: Tables) -> Drawn:
        """See :meth:`Study.figures`."""
        layers = tables["layers"]
        own = tables["maps"]
        lengths = tables["lengths"]
        items = int(own["item"].max()) + 1
        head_maps = tables["head_maps"]
        used = ", ".join(map(str, layers.loc[layers["used"], "layer"]))
        titles = {
            row.layer: f"layer {row.layer} (score {row.score:.2f})"
            for row in layers.itertuples()
        }
        maps = "Mean of heads. A diagonal follows the gold item, a vertical line stays where it is."
        heads = "Share of examples in which the gold item gets the most weight, minus that under shuffled "
        heads += "positions."
        by_head = (
            f"The heads of layer {head_maps['layer'].iloc[0]}, drawn as the layers are."
        )
        curve = f"Attention to the gold item (mean of layers {used}) and score, same examples (95 %)."
        names = {head: f"head {head}" for head in head_maps["head"]}
        same = f"The same for several numbers of items; layers ({used}) as found with {items}."
        ways: dict[str, Callable[[], tuple[Figure, str]]] = {
            "maps": lambda: (map_panels(own, "layer", titles), maps),
            "heads": lambda: (head_figure(tables["heads"]), heads),
            "head_maps": lambda: (map_panels(head_maps, "head", names), by_head),
            "gold": lambda: (curve_figure(lengths[lengths["items"] == items]), curve),
            "lengths": lambda: (curve_figure(lengths), same),
        }
        several = lengths["items"].nunique() > 1
        return {
            n: draw()
            for n, draw in ways.items()
            if n in self.show and (several or n != "lengths")
        }

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Claim C1: layers and heads that follow the gold item, the U shape, accuracy, and length."""
        layers = tables["layers"]
        examples = tables["examples"]
        own = examples[examples["items"] == tables["maps"]["item"].max() + 1]
        found = _of_layers(layers, tables["heads"])
        if self.layers is None and not layers["retrieval"].any():
            note = "no layer is retrieval-related: study.layers=[...] names some"
            return found + [
                Finding.untestable(*claim, note, len(own))
                for claim in (LINK, DIP, LENGTH)
            ]
        return [*found, *_of_positions(own, tables), _of_lengths(examples)]


def _of_layers(layers: pd.DataFrame, heads: pd.DataFrame) -> list[Finding]:
    """Whether some layer follows the gold item, and whether such layers stand behind the others."""
    related, others = (
        layers.loc[layers["retrieval"] == kind, "layer"].to_numpy()
        for kind in (True, False)
    )
    best = layers.loc[layers["score"].idxmax()]
    deeper = np.subtract.outer(related, others) > 0
    note = (
        f"layer {best['layer']} of {len(layers)}; retrieval-related layers {related.tolist()}, "
        f"{heads['retrieval'].sum()} of {len(heads)} heads; largest score under shuffled positions "
        f"{best['threshold']:.3f} (95 %); in the other layers the place of an item alone explains "
        f"{layers.loc[~layers['retrieval'], 'vertical'].mean():.0%} of the map"
    )
    p = (
        min(2 * best["p"], 1.0) if len(related) else 1.0
    )  # of the permutation test, which has one side
    found = [Finding.tested(True, *FOLLOW, estimate(best, "score"), p, note)]
    note = f"retrieval-related layers {related.tolist()} of 0 to {len(layers) - 1}; no interval: one model"
    if not deeper.size:
        return [*found, Finding.untestable(*DEEP, note)]
    return [
        *found,
        Finding.that(deeper.mean() > 0.5, *DEEP, (deeper.mean(), deeper.size), note),
    ]


def _of_positions(own: pd.DataFrame, tables: Tables) -> list[Finding]:
    """Correlation of attention and score over gold positions; attention in the middle and at the ends."""
    ((attention, seen),) = curves(own, "attention", "items", RESAMPLES).values()
    ((score, said),) = curves(own, "score", "items", RESAMPLES).values()
    maps = tables["maps"]
    used = tables["layers"].loc[tables["layers"]["used"], "layer"].tolist()
    at_gold = maps[maps["item"] == maps["gold_position"]]
    by_layer = at_gold.pivot(
        index="layer", columns="gold_position", values="attention"
    ).loc[used]
    each = zip(used, spearman(by_layer.to_numpy(), score), strict=True)
    note = (
        "mean over the retrieval-related layers (each by itself: "
        f"{', '.join(f'layer {layer} {rho:.2f}' for layer, rho in each)}); one-sided permutation of the "
        f"positions: p = {permutation_p(attention, score):.4f}; same examples, resampled within positions"
    )
    questions = own["cluster"].nunique()
    ends = bootstrap.quantiles(spearman(seen, said), questions)
    link = Estimate(float(spearman(attention, score)), *ends, len(own))
    dip, other = (dips(own, name, RESAMPLES)[0] for name in ("attention", "score"))
    same = f"the same of the score: {other.value:.2f} [{other.ci_low:.2f}, {other.ci_high:.2f}]"
    return [Finding.above(*LINK, link, note=note), Finding.above(*DIP, dip, note=same)]


def _of_lengths(examples: pd.DataFrame) -> Finding:
    """Growth of the dip at every step of the number of items: a line through them would hide a fall."""
    parts = {int(items): part for items, part in examples.groupby("items")}
    n = len(examples)
    if len(parts) < 2:
        return Finding.untestable(
            *LENGTH, "one number of items only: study.items=[16,32,64]", n
        )
    curve = {
        items: part.groupby("gold_position")["score"].mean()
        for items, part in parts.items()
    }
    ends = {items: score.iloc[[0, -1]].max() for items, score in curve.items()}
    if min(ends.values()) < AT_LEAST:
        listed = ", ".join(
            f"{items} items: {score:.0%}" for items, score in ends.items()
        )
        note = f"too long for the model, which answers less than {AT_LEAST:.0%} even at the better end"
        return Finding.untestable(*LENGTH, f"{note} ({listed})", n)
    doublings = np.log2(list(parts))
    found, drawn = zip(
        *(dips(part, "attention", RESAMPLES) for part in parts.values()), strict=True
    )
    values = [at.value for at in found]
    questions = min(part["cluster"].nunique() for part in parts.values())
    grown = zip(np.diff(values), np.diff(np.stack(drawn), axis=0), strict=True)
    level = np.polyfit(
        doublings, np.log2([part["attention"].mean() for part in parts.values()]), 1
    )[0]
    listed = ", ".join(
        f"{items}: {dip:.2f}" for items, dip in zip(parts, values, strict=True)
    )
    note = f"dips: {listed}; for each doubling the attention itself is multiplied by {2**level:.2f}"
    return joint(
        [
            Finding.above(*LENGTH, bootstrap.percentile(*step, n, questions), note=note)
            for step in grown
        ]
    )


def head_row(weights: Array, place: int) -> Row:
    """Kept of weights [L, H, N]: mean over heads [L, N]; largest item, gold and other weights [L, H]."""
    at_gold = weights[..., place]
    others = (weights.sum(-1) - at_gold) / max(weights.shape[-1] - 1, 1)
    parts = {"items": weights.mean(1), "gold": at_gold, "others": others}
    return {
        "largest": weights.argmax(-1).tolist(),
        **{name: rounded(part) for name, part in parts.items()},
    }


def scores(
    largest: Integers,
    at_gold: Array,
    others: Array,
    place: Integers,
    clusters: Sequence[str],
    least: float,
) -> pd.DataFrame:
    """Retrieval scores of U layers or heads in n examples, from the item with the largest weight, the weight
    of the gold item and the mean weight of the others, [n, U], and gold position and question, [n].

    Rows of score with its interval, found (share of examples with the gold item first), expected (that with
    shuffled positions), threshold (95 % quantile of the largest score of any then), p (share of shuffles in
    which some score reaches this one), gold_attention, ratio (to the others'), retrieval, n.
    """
    share = np.bincount(place, minlength=int(largest.max()) + 1) / len(place)
    hits = largest == place[:, None]
    chance = share[largest]
    # The expectation over all shuffles is a mean over examples too: one bootstrap covers the difference.
    parts = hits - chance
    expected = chance.mean(0)
    score = parts.mean(0)
    at = pd.DataFrame(
        [ends(bootstrap.difference(part, clusters), "score") for part in parts.T]
    )
    rng = np.random.default_rng(0)
    shuffles = (rng.permutation(place)[:, None] for _ in range(SHUFFLES))
    top = np.array(
        [((largest == shuffled).mean(0) - expected).max() for shuffled in shuffles]
    )
    threshold, (gold_attention, rest) = (
        float(np.quantile(top, 0.95)),
        (at_gold.mean(0), others.mean(0)),
    )
    return at.assign(
        score=score,
        found=hits.mean(0),
        expected=expected,
        threshold=threshold,
        p=(1 + (top[:, None] >= score).sum(0)) / (1 + SHUFFLES),
        gold_attention=gold_attention,
        ratio=np.divide(
            gold_attention, rest, out=np.full(len(rest), np.nan), where=rest > 0
        ),
        retrieval=(at["score_ci_low"] > least) & (score > threshold),
        n=len(place),
    )


def mean_maps(weights: Array, place: Integers, unit: str) -> pd.DataFrame:
    """Mean weights [n, U, N] for each gold position: rows of the unit, gold_position, item, attention, n."""
    places, counts = np.unique(place, return_counts=True)
    means = np.stack([weights[place == position].mean(0) for position in places])
    at, number, item = (index.ravel() for index in np.indices(means.shape))
    values = {
        unit: number,
        "gold_position": places[at],
        "item": item,
        "attention": means.ravel(),
    }
    return pd.DataFrame({**values, "n": counts[at]})


def vertical_share(rows: pd.DataFrame) -> float:
    """Share of the variance of a layer's map that the place of an item explains: 1 for vertical lines."""
    grid = rows.pivot(
        index="gold_position", columns="item", values="attention"
    ).to_numpy()
    return float(grid.mean(0).var() / grid.var()) if grid.var() > 0 else math.nan


@plot.styled
def map_panels(frame: pd.DataFrame, unit: str, titles: Mapping[int, str]) -> Figure:
    """A heat map of gold position x item for each value of the column ``unit``, on one colour scale."""
    columns = 5 if len(titles) == 5 else 4 if len(titles) <= 12 else 8
    large = columns < 8
    shape = {"sharex": True, "sharey": True, "n": frame["n"]}
    figure, panels = plot.new_panels(
        len(titles), columns, 1.55 if large else 0.95, **shape
    )
    norm = matplotlib.colors.PowerNorm(
        0.5, vmin=0, vmax=float(frame["attention"].max())
    )
    for axes, (number, title) in zip(panels, titles.items(), strict=True):
        rows = frame[frame[unit] == number]
        grid = rows.pivot_table(
            index="gold_position", columns="item", values="attention"
        )
        image = axes.imshow(
            grid, norm=norm, cmap="viridis", aspect="auto", interpolation="nearest"
        )
        plot.few_ticks(axes.set_yticks, grid.index, 5)
        size = plot.STYLE["axes.titlesize" if large else "xtick.labelsize"]
        axes.set_title(title if large else f"{unit} {number}", fontsize=size)
    figure.supxlabel(plot.ITEM, fontsize=plot.STYLE["axes.labelsize"])
    figure.supylabel("gold position (item)", fontsize=plot.STYLE["axes.labelsize"])
    label = "attention of the last token\n(mean weight per token)"
    bar = figure.colorbar(image, ax=figure.axes, label=label)
    bar.ax.ticklabel_format(axis="y", scilimits=(-3, 3))
    return figure


@plot.styled
def head_figure(heads: pd.DataFrame) -> Figure:
    """Retrieval score by layer and head; a ring on retrieval-related heads."""
    grid = heads.pivot_table(index="layer", columns="head", values="score")
    height = 1.3 + 0.16 * max(len(grid.index), 5)
    figure, axes = plot.new_figure(plot.COLUMN, height, n=heads["n"])
    lowest = min(0.0, float(grid.min().min()))
    image = axes.imshow(
        grid.to_numpy(),
        vmin=lowest,
        vmax=1,
        cmap="viridis",
        aspect="auto",
        origin="lower",
    )
    marked = heads[heads["retrieval"]]
    ring = {"linestyle": "none", "marker": "o", "color": "black"}
    if len(marked):
        fill = {
            "markerfacecolor": "white",
            "markersize": 4,
            "label": "retrieval-related",
        }
        axes.plot(marked["head"], marked["layer"], **ring, **fill)
        plot.legend_below(figure)
    plot.few_ticks(axes.set_xticks, grid.columns)
    plot.few_ticks(axes.set_yticks, grid.index)
    axes.set(xlabel="head", ylabel="layer")
    figure.colorbar(image, ax=axes, label="retrieval score")
    return figure


@plot.styled
def curve_figure(lengths: pd.DataFrame) -> Figure:
    """Attention to the gold item and score over the gold position, a line for each number of items."""
    figure, (left, right) = plot.new_figure(plot.PAGE, 2.5, 1, 2, n=lengths["n"])
    labels = {number: f"{number} items" for number in sorted(lengths["items"].unique())}
    over_positions(left, right, lengths, "items", labels, ordered=len(labels) > 1)
    if len(labels) > 1:
        plot.legend_below(figure)
    return figure
