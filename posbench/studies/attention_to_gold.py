"""Where the last token looks, by layer and head, as the gold item moves; and whether accuracy follows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Annotated, ClassVar, Literal, get_args

import numpy as np
from annotated_types import MinLen
from numpy.typing import NDArray

from posbench.errors import UserError
from posbench.files.atomic import Row, round_values
from posbench.late import Figure, matplotlib, pd
from posbench.model.prefix import Prefix
from posbench.plots import base as plot
from posbench.plots.attention import draw_over_positions
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.cost import InspectionPasses
from posbench.run.leads import words_before
from posbench.schema import Several
from posbench.stats import bootstrap
from posbench.stats.bootstrap import RESAMPLES, Array, Estimate
from posbench.stats.correlation import permutation_p, spearman
from posbench.stats.findings import (
    ALPHA,
    SMALLEST_SHARE,
    Finding,
    estimate,
    estimate_row,
    join_findings,
)
from posbench.stats.position_bias import dip_from_rows, position_curves
from posbench.studies import prompts as shared
from posbench.studies.base import Tables
from posbench.studies.prompts import Prompts, gold_index
from posbench.tasks import Example, Task
from posbench.tasks.items import sort_by_gold_position

Integers = NDArray[np.int64]
View = Literal["maps", "heads", "head_maps", "gold", "lengths"]

SHUFFLES = 1000
"""Shuffles of the gold positions behind a threshold and a p value."""
HEAD_EXAMPLES = 20
"""Examples of each gold position behind the maps of single heads."""
MIN_RANKED_POSITIONS = 5
"""Fewest gold positions for a meaningful rank correlation."""
MIN_END_SCORE = 0.5
"""Score at the better end of the prompt; a model below it cannot do the task at that length."""

SOURCE = "Yu et al. 2025, Section 2.1"
# Claims, each with the statistic that it is held against.
FOLLOW = (
    "Some layers and heads follow the gold item, others one place (Yu et al. 2025, Figures 2, 12, 13)",
    "retrieval score of the best layer: share of examples above shuffled gold positions",
)
DEEP = (
    f"The layers that follow the gold item are the deep ones ({SOURCE}, Appendix F)",
    "share of pairs of a retrieval-related and another layer in which the former is the deeper one",
)
PART = (
    "Only a part of the heads of a retrieval-related layer follows the gold item (Yu et al. 2025, Figure 13)",
    "share of the layer's heads that are retrieval-related",
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


@dataclass(frozen=True, kw_only=True)
class AttentionToGold(shared.GoldStudy):
    """Attention of the last token to every item as the gold item moves; layers and heads that follow it.

    The retrieval score of a layer or head is the share of examples in which it gives the gold item the
    largest weight of all items, minus that share under shuffled gold positions: 0 for one that
    looks at one place (a vertical line in Figure 2a), near 1 for one that always finds the gold item (the
    diagonal of Figure 2b). A layer or head is retrieval-related if its score is worth naming (``least``) and
    exceeds the largest score of any under shuffled positions (95 %).

    Source: Yu et al. 2025, Section 2.1, Eq. 4, Figures 2, 12 and 13, Appendix F. The paper picks the
    retrieval-related layers by eye (15 to 20 of Mistral-7B).

    Attributes:
        examples: Examples per gold position at most; None is all of the task.
        items: Further numbers of items, for the decline with context length.
        layers: Retrieval-related layers, in place of those that are detected.
        head_layer: Layer whose heads are drawn (Figure 13: 15); None is the layer with the best score.
        least: Lower end of the score's interval that a retrieval-related layer or head must pass: 0.2, say,
            leaves out those that find the gold item at the two ends of the prompt alone.
        show: Figures to draw, and claims to judge: layers (2a, 2b, 12), scores of heads, heads of one layer (13),
            curves, lengths (2c).
    """

    smallest: ClassVar[Mapping[str, int]] = {"examples": 6}

    examples: Several | None = 100
    items: tuple[Several, ...] | None = None
    layers: tuple[int, ...] | None = None
    head_layer: int | None = None
    least: float = SMALLEST_SHARE
    show: Annotated[tuple[View, ...], MinLen(1)] = get_args(View)

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        shared.check_each_layer(run.lm, "study.layers", self.layers)
        if self.head_layer is not None:
            shared.check_each_layer(run.lm, "study.head_layer", [self.head_layer])
        for task in self.tasks(run.task):
            shared.check_prompts(run, task)

    def tasks(self, task: Task) -> list[Task]:
        """Return the task, then a copy for each further number of items in ``study.items``.

        Raises:
            UserError: The task's number of items cannot be set.
        """
        numbers = [n for n in dict.fromkeys(self.items or ()) if n != task.items]
        if numbers and not hasattr(task, "pairs"):
            allowed = f"null with task {task.name}"
            raise UserError(
                "study.items",
                numbers,
                allowed,
                "set task=kv_retrieval, or study.items=null",
            )
        return [task, *(replace(task, pairs=n) for n in numbers)]  # type: ignore[call-arg]

    def workload(self, run: Run) -> list[InspectionPasses]:
        """Return the study's forward passes and replies: each prompt once, and a few again for the maps of heads."""
        examples_by_task = [
            sort_by_gold_position(shared.need_items(task), self.examples)
            for task in self.tasks(run.task)
        ]
        measured_passes = [
            InspectionPasses(examples, times=1, replies=1, shared=True)
            for examples in examples_by_task
        ]
        measured_passes += self.lead_passes([*chain.from_iterable(examples_by_task)])
        head_examples = sort_by_gold_position(examples_by_task[0], HEAD_EXAMPLES)
        measured_passes.append(InspectionPasses(head_examples, times=1, shared=True))
        return measured_passes

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Measure attention to the items, and replies, for every number of items.

        Returns:
            ``maps``, ``head_maps``: mean weights per token by layer or head, gold position and item.
            ``layers``, ``heads``: :func:`retrieval_scores`; of layers also how vertical their map is, and
            whether they are ``used``. ``examples``: attention to the gold item, mean over the used layers,
            score, and characters of the reply before its answer (``answer_start``; NaN without one). ``lengths``:
            their means.
        """
        tables: dict[str, pd.DataFrame] = {}
        used_layers: list[int] = []
        results = []
        for task in self.tasks(run.task):
            prompts = self.prompts(run, task)
            key = {"items_per_prompt": task.items}
            rows = prompts.as_read(
                "attention.jsonl",
                f"attention, {task.items} items",
                key,
                partial(_attention_rows, prompts),
            )
            # Layers are chosen by the first task, and used for all numbers of items.
            if not tables:
                tables = self._score_tables(prompts, rows)
                layers = tables["layers"]
                used_layers = layers.loc[layers["used"], "layer"].tolist()
            replies = prompts.as_read(
                "replies.jsonl", f"accuracy, {task.items} items", key, prompts.replies
            )
            for example in prompts.examples:
                weights = np.array(rows[example.id]["items"])
                gold_weights = weights[used_layers, gold_index(example)]
                replies[example.id]["attention"] = gold_weights.mean()
            leads = [
                words_before(replies[example.id]["output"], example.answers)
                for example in prompts.examples
            ]
            starts = [math.nan if lead is None else len(lead) for lead in leads]
            results.append(prompts.results(replies).assign(answer_start=starts))
        tables["examples"] = pd.concat(results, ignore_index=True)
        tables["lengths"] = shared.means_by_position(
            tables["examples"], ("attention", "score")
        )
        return tables

    def _score_tables(
        self, prompts: Prompts, rows: Mapping[str, Row]
    ) -> dict[str, pd.DataFrame]:
        """Return the tables ``layers``, ``heads``, ``maps`` and ``head_maps`` for the task's own number of items.

        Args:
            prompts: The prompts.
            rows: By example id: attention of each layer to each item (``items``, [L, N]), and by layer and head the
                attention to the gold item (``gold``), to the others (``others``), and the item with most (``largest``).
        """
        frame = prompts.frame()
        positions = frame["gold_position"].to_numpy()
        clusters = list(frame["cluster"])
        kept_rows = [rows[name] for name in frame["id"]]

        weights = np.array([row["items"] for row in kept_rows])  # [n, L, N]
        gold_weights = np.take_along_axis(weights, positions[:, None, None], axis=2)
        gold_weights = gold_weights[..., 0]
        other_weights = np.stack(
            [
                shared.mean_distractor_attention(layers, example)
                for layers, example in zip(weights, prompts.examples, strict=True)
            ]
        )
        layers = retrieval_scores(
            weights.argmax(2),
            gold_weights,
            other_weights,
            positions,
            clusters,
            self.least,
        )
        layers = layers.rename_axis("layer").reset_index()
        maps = mean_maps(weights, positions, "layer")
        layers["vertical"] = [vertical_share(rows) for _, rows in maps.groupby("layer")]
        best_layer = int(layers["score"].idxmax())
        if self.layers is not None:
            layers["used"] = layers["layer"].isin(self.layers)
        elif layers["retrieval"].any():
            layers["used"] = layers["retrieval"]
        else:
            # No layer follows the gold item: the best one is used, so that there is something to look at.
            layers["used"] = layers["layer"] == best_layer

        num_heads = len(kept_rows[0]["gold"][0])
        largest, gold_weights, other_weights = (
            np.array([row[name] for row in kept_rows]).reshape(len(kept_rows), -1)
            for name in ("largest", "gold", "others")
        )
        heads = retrieval_scores(
            largest, gold_weights, other_weights, positions, clusters, self.least
        )
        layer, head = np.divmod(heads.index, num_heads)
        heads = heads.assign(layer=layer, head=head)

        head_layer = best_layer if self.head_layer is None else self.head_layer
        head_maps = self._head_maps(prompts, head_layer)
        return {"layers": layers, "heads": heads, "maps": maps, "head_maps": head_maps}

    def _head_maps(self, prompts: Prompts, layer: int) -> pd.DataFrame:
        """Return the mean attention of every head of one layer to each item, by gold position.

        Which layer is only known after the other measurements: a few examples run again.

        Args:
            prompts: The prompts of the study.
            layer: Number of the layer.

        Returns:
            Rows of head, gold_position, item, attention, n (examples), layer.
        """
        sample = Prompts.of(prompts.run, HEAD_EXAMPLES, prompts.examples)

        def compute(batch: Sequence[Example], prefix: Prefix | None) -> list[Row]:
            weights = sample.attention(batch, prefix, heads=True)[:, layer]
            return [{"heads": round_values(heads)} for heads in weights]

        rows = sample.as_read(
            "heads.jsonl", f"heads of layer {layer}", {"layer": layer}, compute
        )
        weights = np.array([rows[e.id]["heads"] for e in sample.examples])
        positions = sample.frame()["gold_position"].to_numpy()
        return mean_maps(weights, positions, "head").assign(layer=layer)

    def figures(self, tables: Tables) -> Drawn:
        """Draw the figures that ``study.show`` names, each with its caption.

        Args:
            tables: Those of :meth:`measure`: ``layers``, ``maps`` (attention by layer, gold position and item),
                ``heads``, ``head_maps`` (as ``maps``, for one layer's heads) and ``lengths`` (by number of items).

        Returns:
            Figure and caption by name.
        """
        layers = tables["layers"]
        maps = tables["maps"]
        head_maps = tables["head_maps"]
        lengths = tables["lengths"]
        # The maps are of the task's own number of items.
        num_items = int(maps["item"].max()) + 1
        used_layers = ", ".join(map(str, layers.loc[layers["used"], "layer"]))
        figures: dict[str, tuple[Figure, str]] = {}
        if "maps" in self.show:
            titles = {
                row.layer: f"layer {row.layer} (score {round(row.score, 2) + 0.0:.2f})"
                for row in layers.itertuples()
            }
            caption = "Mean of heads. A diagonal follows the gold item, a vertical line stays where it is."
            figures["maps"] = map_panels(maps, "layer", titles), caption
        if "heads" in self.show:
            caption = (
                "Share of examples in which the gold item gets the most weight, minus that under shuffled "
                "positions."
            )
            figures["heads"] = head_figure(tables["heads"]), caption
        if "head_maps" in self.show:
            titles = {head: f"head {head}" for head in head_maps["head"]}
            layer = head_maps["layer"].iloc[0]
            caption = f"The heads of layer {layer}, drawn as the layers are."
            figures["head_maps"] = map_panels(head_maps, "head", titles), caption
        if "gold" in self.show:
            rows = lengths[lengths["items"] == num_items]
            caption = f"Attention to the gold item (mean of layers {used_layers}) and score, same examples (95 %)."
            caption += self._where_read(tables["examples"])
            figures["gold"] = curve_figure(rows), caption
        if "lengths" in self.show and lengths["items"].nunique() > 1:
            caption = (
                f"The same for several numbers of items; layers ({used_layers}) "
                f"as found with {num_items}."
            )
            figures["lengths"] = curve_figure(lengths), caption
        return figures

    def _where_read(self, examples: pd.DataFrame) -> str:
        """A sentence on where attention was read, if that is not where the answers begin."""
        if self.read_at == "answer":
            return " Read at the token before the answer, behind the model's own words."
        starts = examples["answer_start"].dropna()
        late = int((starts > 0).sum())
        if not late:
            return ""
        return (
            f" In {late} of {len(starts)} replies with the answer other words come first; attention is that of the "
            "prompt's last token, study.read_at=answer reads it at the answer."
        )

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Judge the paper's claims on layers and heads that follow the gold item, the U shape, accuracy, and length.

        Only what ``study.show`` draws is judged.

        Args:
            tables: Those of :meth:`measure`: ``layers``, ``maps`` (attention by layer, gold position and item),
                ``heads``, ``head_maps`` (as ``maps``, for one layer's heads) and ``examples`` (a row for each prompt).
        """
        layers = tables["layers"]
        examples = tables["examples"]
        # The claims are asked of the task's own number of items; others serve the claim on length.
        num_items = tables["maps"]["item"].max() + 1
        examples_of_task = examples[examples["items"] == num_items]
        findings = []
        if {"maps", "heads"} & set(self.show):
            findings += _layer_findings(layers, tables["heads"], self.least)
        if "head_maps" in self.show:
            findings.append(_part_finding(tables))
        claims = []
        if "gold" in self.show:
            claims += [LINK, DIP]
        if "lengths" in self.show:
            claims.append(LENGTH)
        # The remaining claims are on layers: found by their score, or named by the user.
        if self.layers is None and not layers["retrieval"].any():
            note = "no layer is retrieval-related: study.layers=[...] names some"
            for claim in claims:
                finding = Finding.untestable(*claim, note, len(examples_of_task))
                findings.append(finding)
            return findings
        if "gold" in self.show:
            findings += _position_findings(examples_of_task, tables)
        if "lengths" in self.show:
            findings.append(_length_finding(examples))
        return findings


def _attention_rows(
    prompts: Prompts, batch: Sequence[Example], prefix: Prefix | None
) -> list[Row]:
    """Run a batch and summarise each example's attention to its items.

    Args:
        prompts: The prompts.
        batch: Examples of them.
        prefix: Cache of all their tokens but the last; None: the prompts are read whole.

    Returns:
        A row of :func:`head_row` for each example.
    """
    weights = prompts.attention(batch, prefix, heads=True).astype(np.float32)
    return [
        head_row(layers, example)
        for layers, example in zip(weights, batch, strict=True)
    ]


def _layer_findings(
    layers: pd.DataFrame, heads: pd.DataFrame, least: float
) -> list[Finding]:
    """Judge whether some layer follows the gold item, and whether such layers lie deeper than the others.

    Args:
        layers: The table ``layers``: retrieval score of each layer, and its threshold under shuffled positions.
        heads: The table ``heads``.
        least: The score above which a layer counts.
    """
    is_related = layers["retrieval"]
    related = layers.loc[is_related, "layer"].to_numpy()
    unrelated = layers.loc[~is_related, "layer"].to_numpy()
    best = layers.loc[layers["score"].idxmax()]
    note = (
        f"layer {best['layer']} of {len(layers)}; retrieval-related layers {related.tolist()}, "
        f"{heads['retrieval'].sum()} of {len(heads)} heads; largest score under shuffled positions "
        f"{best['threshold']:.3f} (95 %)"
    )
    if len(unrelated):
        explained = layers.loc[~is_related, "vertical"].mean()
        note += f"; in the other layers the place of an item alone explains {explained:.0%} of the map"
    p = 1.0
    if len(related):
        p = min(2 * best["p"], 1.0)  # the permutation test has one side
    follow = Finding.tested(True, *FOLLOW, estimate(best, "score"), p, note)
    follow = replace(follow, holds_if=f"above {least:.3g}")

    note = f"retrieval-related layers {related.tolist()} of 0 to {len(layers) - 1}; no interval: one model"
    is_deeper = np.subtract.outer(related, unrelated) > 0
    # All layers follow the gold item, or none does.
    if is_deeper.size == 0:
        return [follow, Finding.untestable(*DEEP, note)]
    share = is_deeper.mean()
    deep = Finding.that(share > 0.5, *DEEP, (share, is_deeper.size), note)
    bound = f"above {0.5 + SMALLEST_SHARE:.3g}"
    deep = replace(deep, holds_if=bound, rests_on=FOLLOW[0])
    if abs(share - 0.5) <= SMALLEST_SHARE:
        deep = deep.inconclusive("as many pairs speak for it as against it")
    return [follow, deep]


def _part_finding(tables: Tables) -> Finding:
    """Judge whether some heads of the layer drawn in ``head_maps`` follow the gold item, and some do not."""
    layer = tables["head_maps"]["layer"].iloc[0]
    heads = tables["heads"]
    of_layer = heads.loc[heads["layer"] == layer, "retrieval"]
    share = of_layer.mean()
    note = f"layer {layer}: {of_layer.sum()} of {len(of_layer)} heads; no interval: one model"
    if not of_layer.any():
        return Finding.untestable(*PART, f"none follows it; {note}", len(of_layer))
    finding = Finding.that(share < 1, *PART, (share, len(of_layer)), note)
    return replace(finding, holds_if="below 1", rests_on=FOLLOW[0])


def _p_words(p: float) -> str:
    """A permutation's p in words; NaN where the scores have no order."""
    return "none, as all scores are equal" if math.isnan(p) else f"p = {p:.4f}"


def _position_findings(examples: pd.DataFrame, tables: Tables) -> list[Finding]:
    """Judge whether attention and score correlate over gold positions, and whether attention is lower in the middle.

    Args:
        examples: Rows of the table ``examples``: attention to the gold item and score of each prompt.
        tables: All tables of the study.
    """
    [(attention, attention_draws)] = position_curves(
        examples, "attention", "items", RESAMPLES
    ).values()
    [(score, score_draws)] = position_curves(
        examples, "score", "items", RESAMPLES
    ).values()
    maps = tables["maps"]
    layers = tables["layers"]
    used_layers = layers.loc[layers["used"], "layer"].tolist()
    # Attention to the gold item by layer and gold position.
    gold_maps = maps[maps["item"] == maps["gold_position"]]
    gold_maps = gold_maps.pivot(
        index="layer", columns="gold_position", values="attention"
    )
    by_layer = spearman(gold_maps.loc[used_layers].to_numpy(), score)
    listed = ", ".join(
        f"layer {layer} {rho:.2f}"
        for layer, rho in zip(used_layers, by_layer, strict=True)
    )
    permuted = permutation_p(attention, score)
    note = (
        f"mean over the retrieval-related layers (each by itself: {listed}); one-sided permutation of the "
        f"positions: {_p_words(permuted)}; same examples, resampled within positions"
    )
    # A constant curve has no rank order, so no correlation.
    rhos = np.nan_to_num(spearman(attention_draws, score_draws))
    low, high = bootstrap.quantiles(rhos, examples["cluster"].nunique())
    rho = float(spearman(attention, score))
    correlation = Estimate(rho, low, high, len(examples))
    link = Finding.above(*LINK, correlation, SMALLEST_SHARE, note)
    # The interval is of other questions at the same positions; two unrelated curves may have one order there, too.
    if link.verdict == "contradicted":
        permuted = permutation_p(attention, -score)
    by_chance = min(2 * permuted, 1)
    if link.verdict in ("holds", "contradicted"):
        link = Finding.above(*LINK, correlation, SMALLEST_SHARE, note, by_chance)
        if by_chance > ALPHA:
            link = link.inconclusive("so few positions may have this order by chance")
    if len(score) < MIN_RANKED_POSITIONS:
        few = f"{len(score)} gold positions, of which one order in {math.factorial(len(score))} is right by chance"
        link = link.not_testable(f"{few}: ask {MIN_RANKED_POSITIONS} or more")

    dip, _ = dip_from_rows(examples, "attention", RESAMPLES)
    score_dip, _ = dip_from_rows(examples, "score", RESAMPLES)
    note = f"the same of the score: {score_dip.value:.2f} [{score_dip.ci_low:.2f}, {score_dip.ci_high:.2f}]"
    return [link, Finding.above(*DIP, dip, SMALLEST_SHARE, note)]


def _length_finding(examples: pd.DataFrame) -> Finding:
    """Judge whether the dip of attention in the middle grows at every step of the number of items.

    A line through all numbers of items would hide a fall between two of them.

    Args:
        examples: Rows of the table ``examples`` for all numbers of items.
    """
    rows_by_items = {int(items): rows for items, rows in examples.groupby("items")}
    n = len(examples)
    if len(rows_by_items) < 2:
        note = "one number of items only: study.items=[16,32,64]"
        return Finding.untestable(*LENGTH, note, n)
    # A model that fails even at the ends shows nothing about length.
    end_scores = {}
    for items, rows in rows_by_items.items():
        curve = rows.groupby("gold_position")["score"].mean()
        end_scores[items] = curve.iloc[[0, -1]].max()
    if min(end_scores.values()) < MIN_END_SCORE:
        listed = ", ".join(
            f"{items} items: {score:.0%}" for items, score in end_scores.items()
        )
        note = f"too long for the model, which answers less than {MIN_END_SCORE:.0%} even at the better end"
        return Finding.untestable(*LENGTH, f"{note} ({listed})", n)

    values = []
    draws = []
    for rows in rows_by_items.values():
        dip, dip_draws = dip_from_rows(rows, "attention", RESAMPLES)
        values.append(dip.value)
        draws.append(dip_draws)
    doublings = np.log2(list(rows_by_items))
    attention = [rows["attention"].mean() for rows in rows_by_items.values()]
    # How attention falls with the number of items, for the note.
    slope = np.polyfit(doublings, np.log2(attention), 1)[0]
    listed = ", ".join(
        f"{items}: {dip:.2f}" for items, dip in zip(rows_by_items, values, strict=True)
    )
    note = f"dips: {listed}; for each doubling the attention itself is multiplied by {2**slope:.2f}"
    num_questions = min(rows["cluster"].nunique() for rows in rows_by_items.values())
    # A finding for each step; the claim is about all of them.
    growth = np.diff(values)
    growth_draws = np.diff(np.stack(draws), axis=0)
    steps = []
    for value, step_draws in zip(growth, growth_draws, strict=True):
        step = bootstrap.percentile(value, step_draws, n, num_questions)
        steps.append(Finding.above(*LENGTH, step, SMALLEST_SHARE, note))
    return join_findings(steps)


def head_row(weights: Array, example: Example) -> Row:
    """Summarise the attention of every layer and head to N items.

    Args:
        weights: Weights of one example, [L, H, N].
        example: The example.

    Returns:
        ``largest``: the item with the largest weight, [L, H]; ``items``: mean over heads, [L, N]; ``gold``
        and ``others``: weight of the gold item and mean weight of the distractors, [L, H].
    """
    return {
        "largest": weights.argmax(-1).tolist(),
        "items": round_values(weights.mean(1)),
        "gold": round_values(weights[..., gold_index(example)]),
        "others": round_values(shared.mean_distractor_attention(weights, example)),
    }


def retrieval_scores(
    largest: Integers,
    gold_weights: Array,
    other_weights: Array,
    positions: Integers,
    clusters: Sequence[str],
    least: float,
) -> pd.DataFrame:
    """Score how well U layers or heads follow the gold item in n examples.

    Args:
        largest: Item with the largest weight, [n, U].
        gold_weights: Weight of the gold item, [n, U].
        other_weights: Mean weight of the distractors, [n, U].
        positions: Gold positions, [n].
        clusters: Question of each example, [n].
        least: Bound that the lower end of a retrieval-related unit's interval must pass.

    Returns:
        A row per layer or head: score with its interval, found (share of examples with the gold item first),
        expected (the same share under shuffled positions), threshold (95 % quantile of the largest score of any then),
        p (share of shuffles in which some score reaches this one), gold_attention, ratio (to the attention to
        distractors), retrieval, n. Among several gold items the one at ``gold_position`` has to come first.
    """
    # How often each position is gold: the score of a unit that always picks one item.
    counts = np.bincount(positions, minlength=int(largest.max()) + 1)
    position_shares = counts / len(positions)
    is_gold = largest == positions[:, None]
    # The expectation over all shuffles is a mean over examples too: one bootstrap covers the difference.
    chance = position_shares[largest]
    excess = is_gold - chance
    expected = chance.mean(0)
    score = excess.mean(0)
    table = pd.DataFrame(
        [
            estimate_row(bootstrap.difference(unit, clusters), "score")
            for unit in excess.T
        ]
    )
    rng = np.random.default_rng(0)
    largest_scores = np.empty(SHUFFLES)
    # The largest score of any unit that chance gives.
    for shuffle in range(SHUFFLES):
        shuffled = rng.permutation(positions)[:, None]
        largest_scores[shuffle] = ((largest == shuffled).mean(0) - expected).max()
    threshold = float(np.quantile(largest_scores, 0.95))
    reached = (largest_scores[:, None] >= score).sum(0)
    gold_attention = gold_weights.mean(0)
    other_attention = other_weights.mean(0)
    ratio = np.full(len(other_attention), np.nan)
    np.divide(gold_attention, other_attention, out=ratio, where=other_attention > 0)
    return table.assign(
        score=score,
        found=is_gold.mean(0),
        expected=expected,
        threshold=threshold,
        p=(1 + reached) / (1 + SHUFFLES),
        gold_attention=gold_attention,
        ratio=ratio,
        retrieval=(table["score_ci_low"] > least) & (score > threshold),
        n=len(positions),
    )


def mean_maps(weights: Array, positions: Integers, unit: str) -> pd.DataFrame:
    """Average weights over the examples of each gold position.

    Args:
        weights: Attention of U layers or heads to N items in n examples, [n, U, N].
        positions: Gold positions, [n].
        unit: Name of the column that counts the U units.

    Returns:
        Rows of the unit, gold_position, item, attention, n.
    """
    gold_positions, counts = np.unique(positions, return_counts=True)
    means = np.stack([weights[positions == p].mean(0) for p in gold_positions])
    row, number, item = (index.ravel() for index in np.indices(means.shape))
    return pd.DataFrame(
        {
            unit: number,
            "gold_position": gold_positions[row],
            "item": item,
            "attention": means.ravel(),
            "n": counts[row],
        }
    )


def vertical_share(rows: pd.DataFrame) -> float:
    """Share of the variance of a layer's map that the place of an item explains: 1 for vertical lines."""
    grid = rows.pivot(index="gold_position", columns="item", values="attention")
    grid = grid.to_numpy()
    if grid.var() > 0:
        return float(grid.mean(0).var() / grid.var())
    return math.nan


@plot.styled
def map_panels(frame: pd.DataFrame, unit: str, titles: Mapping[int, str]) -> Figure:
    """Draw a heat map of attention over gold position and item for each layer or head, on one colour scale.

    Args:
        frame: Columns ``gold_position``, ``item``, ``attention``, ``n``, and ``unit``.
        unit: Name of the column that separates the maps: ``layer`` or ``head``.
        titles: Title of each map by its value of ``unit``.
    """
    columns = 8
    if len(titles) == 5:
        columns = 5
    elif len(titles) <= 12:
        columns = 4
    large = columns < 8
    height = 1.55 if large else 0.95
    figure, panels = plot.new_panels(
        len(titles), columns, height, sharex=True, sharey=True, n=frame["n"]
    )
    highest = float(frame["attention"].max())
    norm = matplotlib.colors.PowerNorm(0.5, vmin=0, vmax=highest)
    for axes, (number, title) in zip(panels, titles.items(), strict=True):
        rows = frame[frame[unit] == number]
        grid = rows.pivot_table(
            index="gold_position", columns="item", values="attention"
        )
        image = axes.imshow(grid, norm=norm, cmap="viridis", aspect="auto")
        plot.set_few_ticks(axes.set_yticks, grid.index, 5)
        if large:
            axes.set_title(title, fontsize=plot.STYLE["axes.titlesize"])
        else:
            axes.set_title(f"{unit} {number}", fontsize=plot.STYLE["xtick.labelsize"])
    figure.supxlabel(plot.ITEM_LABEL, fontsize=plot.STYLE["axes.labelsize"])
    figure.supylabel("gold position (item)", fontsize=plot.STYLE["axes.labelsize"])
    label = "attention of the last token\n(mean weight per token)"
    bar = figure.colorbar(image, ax=figure.axes, label=label)
    bar.ax.ticklabel_format(axis="y", scilimits=(-3, 3))
    return figure


@plot.styled
def head_figure(heads: pd.DataFrame) -> Figure:
    """Draw the retrieval score by layer and head, with a ring on retrieval-related heads.

    Args:
        heads: The table ``heads``.
    """
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
    related = heads[heads["retrieval"]]
    if len(related):
        axes.plot(
            related["head"],
            related["layer"],
            linestyle="none",
            marker="o",
            color="black",
            markerfacecolor="white",
            markersize=4,
            label="retrieval-related",
        )
        plot.add_legend_below(figure)
    plot.set_few_ticks(axes.set_xticks, grid.columns)
    plot.set_few_ticks(axes.set_yticks, grid.index)
    axes.set(xlabel="head", ylabel="layer")
    figure.colorbar(image, ax=axes, label="retrieval score")
    return figure


@plot.styled
def curve_figure(lengths: pd.DataFrame) -> Figure:
    """Draw attention to the gold item and score over the gold position, a line for each number of items.

    Args:
        lengths: The table ``lengths``.
    """
    figure, (left, right) = plot.new_figure(plot.PAGE, 2.5, 1, 2, n=lengths["n"])
    labels = {number: f"{number} items" for number in sorted(lengths["items"].unique())}
    draw_over_positions(left, right, lengths, "items", labels, ordered=len(labels) > 1)
    if len(labels) > 1:
        plot.add_legend_below(figure)
    return figure
