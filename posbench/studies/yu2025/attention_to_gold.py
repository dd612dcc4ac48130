"""Where the last token looks, layer by layer and head by head, as the gold item moves; and whether accuracy
follows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.model.encode import Encoded
from posbench.model.lm import LM
from posbench.pipeline.config import Config
from posbench.pipeline.stages.evaluate import plan, replies
from posbench.pipeline.stages.intervene import attention_to_items
from posbench.plots.base import (
    ATTENTION_LABEL,
    COLOURS,
    COLUMN,
    DEPTH_LABEL,
    PAGE,
    STYLE,
    from_zero,
    legend_below,
    line_style,
    new_figure,
    percent_axes,
    styled,
)
from posbench.run.base import Run, complete, encode
from posbench.stats.tables import mean_interval
from posbench.studies.base import Finding, Study
from posbench.studies.gold_positions import (
    RESAMPLES,
    by_length,
    dips,
    facts,
    first_of_each,
    need_items,
    need_layers,
    permutation_p,
    placed,
    position_draws,
    quantiles,
    spearman,
)
from posbench.tasks import Example, Task

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

SHUFFLES = 1000
HEAD_EXAMPLES = 20
"""Examples of each gold position behind the maps of single heads."""


@dataclass(frozen=True, kw_only=True)
class AttentionToGold(Study):
    """Attention of the last token to every item as the gold item moves, the layers and heads that follow it,
    and accuracy.

    The retrieval score of a layer or head is the share of examples in which it gives the gold item the
    largest weight of all items, minus the share that is left when the gold positions are shuffled among the
    examples. A layer that looks at one place, such as the first pair, whatever is asked for, has the score 0:
    the vertical lines of Figure 2a. One that always finds the gold item comes near 1: the diagonal of Figure
    2b. Beside its interval stands the largest score that any layer, or any head, reaches under shuffled
    positions (95 % quantile), which guards against looking at many of them.

    Source: Yu et al. 2025, Section 2.1, Eq. 4, Figures 2, 12 and 13, Appendix F. The paper picks the
    retrieval-related layers by eye (15 to 20 of Mistral-7B).

    Attributes:
        examples: Examples per gold position at most; None: all of the task.
        pairs: Further numbers of pairs, for the decline with context length; each is a copy of the task.
            None: the task's own.
        layers: Retrieval-related layers, 0-based, in place of those that are detected.
        head_layer: Layer whose heads are drawn one by one (Figure 13: 15); None: the one with the highest
            score.
        least: Lower end of the score's interval that a layer or head must pass to be retrieval-related. 0:
            anything above chance; 0.2, say, leaves out layers that find the gold item now and then, such as
            at the two ends of the prompt alone.
    """

    examples: int | None = 100
    pairs: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    head_layer: int | None = None
    least: float = 0.0

    def check(self, config: Config, lm: LM | None) -> None:
        """Refuse a task without gold positions, layers that the model lacks, and numbers of pairs that do not
        fit."""
        assert lm is not None
        need_items(config.task, self.examples)
        need_layers(lm, "layers", self.layers)
        need_layers(lm, "head_layer", None if self.head_layer is None else (self.head_layer,))
        for task in self.tasks(config.task):
            longest = max(task.evaluation(), key=lambda e: len(e.prompt))
            encode(lm, task, longest)

    def tasks(self, task: Task) -> list[Task]:
        """The task itself, then a copy for each further number of pairs.

        Raises:
            UserError: The task has no pairs to count.
        """
        more = [n for n in dict.fromkeys(self.pairs or ()) if n != task.items]
        if more and "pairs" not in {field.name for field in fields(task)}:
            raise UserError(
                "study.pairs", list(more), f"null with task {task.name}", "take task=kv_retrieval"
            )
        return [task, *(replace(task, pairs=n) for n in more)]  # type: ignore[call-arg]

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Six tables.

        ``maps`` (layer, gold_position, item, attention, n) and ``head_maps`` (the same with head) hold mean
        weights per token; ``layers`` and ``heads`` the retrieval scores, see :func:`scores`, and for layers
        how vertical their map is and whether they are ``used``; ``examples`` a row for each example with its
        attention to the gold item, mean over the layers in use, and its score; ``lengths`` the means of these
        at each gold position and number of items.
        """
        parts, tables = [], dict[str, pd.DataFrame]()
        for task in self.tasks(run.config.task):
            chosen = placed(task, self.examples)
            encoded = {e.id: encode(run.lm, task, e) for e in chosen}
            rows = self._attention(run, task, chosen, encoded)
            frame = facts(chosen)
            if not tables:
                tables = self._scores(run, chosen, rows, frame, encoded)
                shown = tables["layers"].loc[tables["layers"]["used"], "layer"].tolist()
            gold = np.array(
                [
                    [layer[e.gold_position] for layer in row["items"]]
                    for e, row in zip(chosen, rows, strict=True)
                ]
            )
            frame["attention"] = gold[:, shown].mean(1)
            frame["score"] = self._replies(run, task, chosen, encoded)
            parts.append(frame)
        tables["examples"] = pd.concat(parts, ignore_index=True)
        tables["lengths"] = by_length(tables["examples"])
        return tables

    def _attention(
        self, run: Run, task: Task, chosen: Sequence[Example], encoded: Mapping[str, Encoded]
    ) -> list[Row]:
        """One row for each example, in order: weights of every item by layer, and what each head made of
        them."""

        def compute(batch: Sequence[Example]) -> list[Row]:
            found = attention_to_items(run.lm, [encoded[e.id] for e in batch], batch, heads=True).numpy()
            return [
                head_row(weights, int(e.gold_position or 0)) for weights, e in zip(found, batch, strict=True)
            ]

        order = plan(task, chosen, encoded, run.config.runtime)
        rows = complete(
            run,
            "attention.jsonl",
            f"attention, {task.items} items",
            [[chosen[i] for i in group] for group in order],
            lambda e: {"items_per_prompt": task.items, "id": e.id},
            compute,
        )
        by_id = {row["id"]: row for row in rows}
        return [by_id[e.id] for e in chosen]

    def _replies(
        self, run: Run, task: Task, chosen: Sequence[Example], encoded: Mapping[str, Encoded]
    ) -> list[float]:
        """The task's score of each example, in order."""

        def compute(batch: Sequence[Example]) -> list[Row]:
            answers = replies(run.lm, task, batch, encoded, {})
            return [
                {"output": row["output"], "score": task.score(e, str(row["output"]))[task.metric]}
                for e, row in zip(batch, answers, strict=True)
            ]

        order = plan(task, chosen, encoded, run.config.runtime)
        rows = complete(
            run,
            "replies.jsonl",
            f"accuracy, {task.items} items",
            [[chosen[i] for i in group] for group in order],
            lambda e: {"items_per_prompt": task.items, "id": e.id},
            compute,
        )
        by_id = {row["id"]: float(row["score"]) for row in rows}
        return [by_id[e.id] for e in chosen]

    def _scores(
        self,
        run: Run,
        chosen: Sequence[Example],
        rows: Sequence[Row],
        frame: pd.DataFrame,
        encoded: Mapping[str, Encoded],
    ) -> dict[str, pd.DataFrame]:
        """Tables ``layers``, ``heads``, ``maps`` and ``head_maps`` of the task's own number of items."""
        gold, clusters = frame["gold_position"].to_numpy(), list(frame["cluster"])
        items = np.array([row["items"] for row in rows])
        at_gold = np.take_along_axis(items, gold[:, None, None], axis=2)[..., 0]
        others = (items.sum(2) - at_gold) / max(items.shape[2] - 1, 1)
        layers = scores(items.argmax(2), at_gold, others, gold, clusters, self.least).rename(
            columns={"unit": "layer"}
        )
        layers["vertical"] = [vertical_share(items[:, layer], gold) for layer in layers["layer"]]
        # Where no layer follows the gold item, the best one stands in, so that there is something to look at.
        found = (
            layers["retrieval"] if layers["retrieval"].any() else layers["layer"] == layers["score"].idxmax()
        )
        layers["used"] = found if self.layers is None else layers["layer"].isin(self.layers)
        largest, at_gold, others = (
            np.array([row[name] for row in rows]) for name in ("largest", "gold", "others")
        )
        shape = largest.shape[1:]
        flat = [values.reshape(len(rows), -1) for values in (largest, at_gold, others)]
        heads = scores(flat[0], flat[1], flat[2], gold, clusters, self.least)
        place = np.unravel_index(heads.pop("unit"), shape)
        heads = pd.concat([pd.DataFrame({"layer": place[0], "head": place[1]}), heads], axis=1)
        picked = int(layers["score"].idxmax()) if self.head_layer is None else self.head_layer
        return {
            "layers": layers,
            "heads": heads,
            "maps": mean_maps(items, gold).rename(columns={"unit": "layer"}),
            "head_maps": self._head_maps(run, chosen, encoded, picked),
        }

    def _head_maps(
        self, run: Run, chosen: Sequence[Example], encoded: Mapping[str, Encoded], layer: int
    ) -> pd.DataFrame:
        """Mean weights of every head of one layer: it is known only now, so a few examples of each position
        run again."""
        few = first_of_each(chosen, HEAD_EXAMPLES)

        def compute(batch: Sequence[Example]) -> list[Row]:
            found = attention_to_items(run.lm, [encoded[e.id] for e in batch], batch, heads=True)[:, layer]
            return [{"heads": rounded(weights)} for weights in found.numpy()]

        order = plan(run.config.task, few, encoded, run.config.runtime)
        rows = complete(
            run,
            "heads.jsonl",
            f"heads of layer {layer}",
            [[few[i] for i in group] for group in order],
            lambda e: {"layer": layer, "id": e.id},
            compute,
        )
        by_id = {row["id"]: row["heads"] for row in rows}
        found = mean_maps(
            np.array([by_id[e.id] for e in few]), np.array([int(e.gold_position or 0) for e in few])
        )
        found.insert(0, "layer", layer)
        return found.rename(columns={"unit": "head"})

    def figures(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[Figure, str]]:
        """Maps by layer and by head, scores, attention beside accuracy, and the decline with the number of
        items."""
        layers, own, lengths = tables["layers"], tables["maps"], tables["lengths"]
        items = int(own["item"].max()) + 1
        used = ", ".join(map(str, layers.loc[layers["used"], "layer"]))
        score = layers.set_index("layer")["score"]
        drawn = {
            "maps": (
                map_panels(
                    own,
                    "layer",
                    {layer: f"layer {layer} (score {score[layer]:.2f})" for layer in score.index},
                ),
                "Attention of the last token to every item (columns) as the gold item moves (rows), mean over heads. A diagonal "
                "follows the gold item, a vertical line stays where it is. One colour scale, square root.",
            ),
            "heads": (
                head_figure(tables["heads"]),
                "Retrieval score of every head: share of examples in which the gold item gets the largest weight, minus the same "
                "share under shuffled gold positions. Dots: retrieval-related heads.",
            ),
            "head_maps": (
                map_panels(tables["head_maps"], "head", {}),
                f"The heads of layer {int(tables['head_maps']['layer'].iloc[0])} one by one, drawn as the layers are.",
            ),
            "gold": (
                curve_figure(lengths[lengths["items"] == items]),
                f"Attention to the gold item (mean of layers {used}) and the task's score on the same examples. Bands: 95 %.",
            ),
        }
        if lengths["items"].nunique() > 1:
            words = f"The same for several numbers of items; the layers ({used}) are those found with {items}. Bands: 95 %."
            drawn["lengths"] = (curve_figure(lengths), words)
        return drawn

    def findings(self, tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        """Claim C1: layers and heads that follow the gold item, the U shape, its link to accuracy, the effect
        of length."""
        layers, heads, examples = tables["layers"], tables["heads"], tables["examples"]
        best = layers.loc[layers["score"].idxmax()]
        found = [_layer_finding(best, layers, heads), _depth_finding(layers)]
        items = int(tables["maps"]["item"].max()) + 1
        own = examples[examples["items"] == items]
        if self.layers is None and not layers["retrieval"].any():
            note = "no layer is retrieval-related: study.layers=[...] names some"
            claims = {LINK: "Spearman correlation", DIP: "dip of attention"}
            return [
                *found,
                *(
                    Finding(
                        claim=claim,
                        statistic=words,
                        value=math.nan,
                        n=len(own),
                        verdict="not testable here",
                        note=note,
                    )
                    for claim, words in claims.items()
                ),
            ]
        return [*found, _link(own, tables), _dip(own), _decline(examples)]


AT_LEAST = 0.5
"""Score at the better end of the prompt below which a model cannot do the task at that length."""
LINK = "C1: attention to the gold item in the retrieval-related layers follows the position bias (Yu et al. 2025, Section 2.1)"
DIP = "C1: that attention is higher at the start and the end, lower in the middle (Yu et al. 2025, Section 2.1, Figure 2b)"
LENGTH = (
    "C1: with a longer context its attenuation over positions is more pronounced (Yu et al. 2025, Figure 2c)"
)
FOLLOW = "C1: some layers and heads follow the gold item, others look at one place (Yu et al. 2025, Figures 2, 12, 13)"
DEEP = "C1: the layers that follow the gold item are the deep ones (Yu et al. 2025, Section 2.1, Appendix F)"


def _layer_finding(best: pd.Series, layers: pd.DataFrame, heads: pd.DataFrame) -> Finding:
    related = layers.loc[layers["retrieval"], "layer"].tolist()
    sharp = heads[heads["retrieval"]]
    fixed = layers.loc[~layers["retrieval"], "vertical"].mean()
    note = (
        f"layer {int(best['layer'])} of {len(layers)}; retrieval-related layers {related}, {len(sharp)} of {len(heads)} heads; "
        f"largest score under shuffled positions {best['threshold']:.3f} (95 %); in the other layers the place of an item alone "
        f"explains {fixed:.0%} of the map"
    )
    return Finding(
        claim=FOLLOW,
        statistic="retrieval score of the best layer: share of examples above shuffled gold positions",
        value=best["score"],
        low=best["low"],
        high=best["high"],
        n=int(best["n"]),
        verdict="holds" if related else "does not hold",
        note=note,
    )


def _depth_finding(layers: pd.DataFrame) -> Finding:
    """Whether retrieval-related layers stand behind the others."""
    related, others = (layers.loc[layers["retrieval"] == kind, "layer"].to_numpy() for kind in (True, False))
    pairs = np.subtract.outer(related, others) > 0
    share = float(pairs.mean()) if pairs.size else math.nan
    return Finding(
        claim=DEEP,
        statistic="share of pairs of a retrieval-related and another layer in which the former is the deeper one",
        value=share,
        n=pairs.size,
        verdict="holds" if share > 0.5 else "does not hold" if pairs.size else "not testable here",
        note=f"retrieval-related layers {related.tolist()} of 0 to {len(layers) - 1}",
    )


def _link(own: pd.DataFrame, tables: Mapping[str, pd.DataFrame]) -> Finding:
    """Rank correlation of attention and score over gold positions."""
    means = own.groupby("gold_position")[["attention", "score"]].mean()
    drawn = position_draws(own, ["attention", "score"])
    value = float(spearman(means["attention"].to_numpy()[None], means["score"].to_numpy()[None])[0])
    low, high = quantiles(spearman(drawn["attention"], drawn["score"]))
    p = permutation_p(means["attention"].to_numpy(), means["score"].to_numpy())
    return Finding(
        claim=LINK,
        statistic=f"Spearman correlation over {len(means)} gold positions of attention and score",
        value=value,
        low=low,
        high=high,
        n=len(own),
        verdict=_above(low),
        note=f"mean over the retrieval-related layers (each by itself: {_by_layer(tables, means['score'])}); one-sided "
        f"permutation of the positions: p = {p:.4f}; same examples, resampled within positions",
    )


def _by_layer(tables: Mapping[str, pd.DataFrame], score: pd.Series) -> str:
    """Spearman correlation of the score with the attention of each layer in use, in words."""
    maps, layers = tables["maps"], tables["layers"]
    at_gold = maps[maps["item"] == maps["gold_position"]].pivot(
        index="layer", columns="gold_position", values="attention"
    )
    chosen = layers.loc[layers["used"], "layer"].tolist()
    values = spearman(at_gold.loc[chosen].to_numpy(), np.tile(score.to_numpy(), (len(chosen), 1)))
    return ", ".join(f"layer {layer} {rho:.2f}" for layer, rho in zip(chosen, values, strict=True))


def _dip(own: pd.DataFrame) -> Finding:
    """Attention in the middle against the lower of the two ends."""
    value, drawn = dips(own, "attention")
    low, high = quantiles(drawn)
    accuracy, resampled = dips(own, "score")
    score_low, score_high = quantiles(resampled)
    return Finding(
        claim=DIP,
        statistic="1 - mean attention to a gold item at depth 25 to 75 % / that at the lower of the two ends",
        value=value,
        low=low,
        high=high,
        n=len(own),
        verdict=_above(low),
        note=f"the same of the score: {accuracy:.2f} [{score_low:.2f}, {score_high:.2f}]",
    )


def _decline(examples: pd.DataFrame) -> Finding:
    """Slope of the dip, and of the attention itself, on the logarithm of the number of items."""
    parts = {int(items): part for items, part in examples.groupby("items")}
    words = "growth of that dip for each doubling of the number of items (least squares)"
    if len(parts) < 2:
        note = "one number of items only: study.pairs=[16,32,64]"
        return Finding(
            claim=LENGTH,
            statistic=words,
            value=math.nan,
            n=len(examples),
            verdict="not testable here",
            note=note,
        )
    ends = {
        items: part.groupby("gold_position")["score"].mean().iloc[[0, -1]].max()
        for items, part in parts.items()
    }
    if min(ends.values()) < AT_LEAST:
        listed = ", ".join(f"{items} items: {score:.0%}" for items, score in ends.items())
        note = f"too long for the model, which answers less than {AT_LEAST:.0%} even at the better end ({listed})"
        return Finding(
            claim=LENGTH,
            statistic=words,
            value=math.nan,
            n=len(examples),
            verdict="not testable here",
            note=note,
        )
    doublings = np.log2(list(parts))
    centred = (doublings - doublings.mean()) / ((doublings - doublings.mean()) ** 2).sum()
    single = [dips(part, "attention") for part in parts.values()]
    value = float(centred @ np.array([dip for dip, _ in single]))
    low, high = quantiles(centred @ np.stack([drawn for _, drawn in single]))
    level = centred @ np.log2([part["attention"].mean() for part in parts.values()])
    listed = ", ".join(f"{items}: {dip:.2f}" for items, (dip, _) in zip(parts, single, strict=True))
    return Finding(
        claim=LENGTH,
        statistic=words,
        value=value,
        low=low,
        high=high,
        n=len(examples),
        verdict=_above(low),
        note=f"dips: {listed}; for each doubling the attention itself is multiplied by {2**level:.2f}",
    )


def _above(low: float) -> Literal["holds", "does not hold"]:
    return "holds" if low > 0 else "does not hold"


def rounded(weights: Array) -> list[list[float]]:
    """A matrix as plain lists with 6 significant digits."""
    return [[float(f"{x:.6g}") for x in row] for row in weights.tolist()]


def head_row(weights: Array, gold: int) -> Row:
    """What is kept of one example's weights [L, H, N]: the mean over heads [L, N], and of each head [L, H]
    three numbers.

    Per head: the item with the largest weight, the weight of the gold item, and the mean weight of the
    others.
    """
    at_gold = weights[..., gold]
    others = (weights.sum(-1) - at_gold) / max(weights.shape[-1] - 1, 1)
    return {
        "items": rounded(weights.mean(1)),
        "largest": weights.argmax(-1).tolist(),
        "gold": rounded(at_gold),
        "others": rounded(others),
    }


# Scores


def scores(
    largest: Integers,
    at_gold: Array,
    others: Array,
    gold: Integers,
    clusters: Sequence[str],
    least: float,
    seed: int = 0,
) -> pd.DataFrame:
    """Retrieval score of layers or heads, each called a unit here.

    Args:
        largest: Item with the largest weight, [n, U].
        at_gold: Weight of the gold item, [n, U].
        others: Mean weight of the other items, [n, U].
        gold: Gold position of each example, [n].
        clusters: The question of each example, [n]; intervals resample these.
        least: What the lower end of the interval must pass.
        seed: Seed of the bootstrap and of the shuffles.

    Returns:
        Rows of unit, score, low, high (95 %), found (share of examples in which the gold item comes first),
        expected (that share under shuffled positions), threshold (largest score of any unit under shuffled
        positions, 95 % quantile), p (share of shuffles in which some unit reaches the score), gold_attention
        (mean weight per token), ratio (of the gold item's mean weight to the others'), retrieval, n.
    """
    places, counts = np.unique(gold, return_counts=True)
    share = np.zeros(int(max(largest.max(), gold.max())) + 1)
    share[places] = counts / len(gold)
    hits, chance = largest == gold[:, None], share[largest]
    expected = chance.mean(0)
    # The expectation over all shuffles is a mean over examples too, so that one bootstrap of a mean covers
    # the difference.
    parts = hits - chance
    score = parts.mean(0)
    bounds = [
        mean_interval(parts[:, u], clusters, resamples=RESAMPLES, seed=seed) for u in range(parts.shape[1])
    ]
    low, high = np.array(bounds).T
    rng = np.random.default_rng(seed)
    top = np.array(
        [((largest == rng.permutation(gold)[:, None]).mean(0) - expected).max() for _ in range(SHUFFLES)]
    )
    threshold = float(np.quantile(top, 0.95))
    gold_attention, rest = at_gold.mean(0), others.mean(0)
    return pd.DataFrame(
        {
            "unit": range(len(score)),
            "score": score,
            "low": low,
            "high": high,
            "found": hits.mean(0),
            "expected": expected,
            "threshold": threshold,
            "p": (1 + (top[:, None] >= score).sum(0)) / (1 + SHUFFLES),
            "gold_attention": gold_attention,
            "ratio": np.divide(gold_attention, rest, out=np.full(len(rest), np.nan), where=rest > 0),
            "retrieval": (low > least) & (score > threshold),
            "n": len(gold),
        }
    )


def mean_maps(weights: Array, gold: Integers) -> pd.DataFrame:
    """Mean weights [n, U, N] for each gold position: rows of unit, gold_position, item, attention, n."""
    parts = []
    for position in np.unique(gold):
        mean = weights[gold == position].mean(0)
        unit, item = np.indices(mean.shape)
        values = {
            "unit": unit.ravel(),
            "gold_position": position,
            "item": item.ravel(),
            "attention": mean.ravel(),
        }
        parts.append(pd.DataFrame({**values, "n": int((gold == position).sum())}))
    return pd.concat(parts, ignore_index=True)


def vertical_share(weights: Array, gold: Integers) -> float:
    """Share of a map's variance that the place of an item alone explains, whatever the gold position: 1 for
    vertical lines.

    Args:
        weights: [n, N] weights of one layer.
        gold: [n] gold positions.
    """
    rows = np.stack([weights[gold == position].mean(0) for position in np.unique(gold)])
    total = float(rows.var())
    return float(rows.mean(0).var() / total) if total > 0 else math.nan


# Figures


@styled
def map_panels(frame: pd.DataFrame, unit: str, titles: Mapping[int, str]) -> Figure:
    """A heat map of gold position x item for each layer or head, on one colour scale.

    Args:
        frame: Rows of the unit's column, gold_position, item, attention (mean weight per token).
        unit: ``layer`` or ``head``.
        titles: Title of each unit; by default its name and number.
    """
    units = sorted(frame[unit].unique())
    columns = min(4 if len(units) <= 12 else 8, len(units))
    lines = -(-len(units) // columns)
    figure = new_figure(PAGE, 0.75 + (1.55 if columns <= 4 else 0.95) * lines)
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    norm = PowerNorm(0.5, vmin=0, vmax=float(frame["attention"].max()))
    for axes in panels.flat[len(units) :]:
        axes.set_visible(False)
    for axes, number in zip(panels.flat, units, strict=False):
        grid = frame[frame[unit] == number].pivot_table(
            index="gold_position", columns="item", values="attention"
        )
        image = axes.imshow(
            grid.to_numpy(), norm=norm, cmap="viridis", aspect="auto", origin="upper", interpolation="nearest"
        )
        step = max(1, -(-len(grid.index) // 5))
        axes.set_yticks(range(0, len(grid.index), step), [str(position) for position in grid.index[::step]])
        size = "axes.titlesize" if columns <= 4 else "xtick.labelsize"
        axes.set_title(
            titles.get(number, f"{unit} {number}") if columns <= 4 else f"{unit} {number}",
            fontsize=STYLE[size],
        )
    figure.supxlabel("item", fontsize=STYLE["axes.labelsize"])
    figure.supylabel("gold position (item)", fontsize=STYLE["axes.labelsize"])
    bar = figure.colorbar(
        image, ax=panels.ravel().tolist(), label="attention of the last token\n(mean weight per token)"
    )
    bar.ax.ticklabel_format(axis="y", scilimits=(-3, 3))
    return figure


@styled
def head_figure(heads: pd.DataFrame) -> Figure:
    """Retrieval score by layer and head; a dot on retrieval-related heads."""
    grid = heads.pivot_table(index="layer", columns="head", values="score")
    figure = new_figure(COLUMN, 1.1 + 0.16 * max(len(grid.index), 5))
    axes = figure.subplots()
    lowest = min(0.0, float(grid.min().min()))
    image = axes.imshow(grid.to_numpy(), vmin=lowest, vmax=1, cmap="viridis", aspect="auto", origin="lower")
    marked = heads[heads["retrieval"].astype(str) == "True"]
    axes.plot(marked["head"], marked["layer"], linestyle="none", marker="o", color=COLOURS[1], markersize=3)
    for values, place in ((grid.columns, axes.set_xticks), (grid.index, axes.set_yticks)):
        step = max(1, len(values) // 8)
        place(range(0, len(values), step), [str(value) for value in values[::step]])
    axes.set(xlabel="head", ylabel="layer")
    figure.colorbar(image, ax=axes, label="retrieval score")
    return figure


@styled
def curve_figure(lengths: pd.DataFrame) -> Figure:
    """Attention to the gold item and score over the gold position, a line for each number of items."""
    figure = new_figure(PAGE, 2.5)
    left, right = figure.subplots(1, 2)
    numbers = sorted(lengths["items"].unique())
    for index, items in enumerate(numbers):
        line = lengths[lengths["items"] == items].sort_values("depth")
        style = line_style(index, of=len(numbers) if len(numbers) > 1 else 0)
        for axes, column, scale in ((left, "attention", 1), (right, "score", 100)):
            axes.plot(100 * line["depth"], scale * line[column], label=f"{items} items", **style)
            low, high = (scale * line[f"{column}_{end}"] for end in ("low", "high"))
            axes.fill_between(100 * line["depth"], low, high, color=style["color"], alpha=0.15, linewidth=0)
    left.set(xlabel=DEPTH_LABEL, ylabel=ATTENTION_LABEL)
    from_zero(left)
    percent_axes(right, "score (%)")
    if len(numbers) > 1:
        legend_below(figure, left)
    return figure
