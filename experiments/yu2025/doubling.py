"""Does attention cause the answer? The last prompt token's weight on one item is multiplied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Annotated, ClassVar

from annotated_types import Gt

from posbench.files.atomic import Row, round_values
from posbench.late import Figure, Tensor, pd, torch
from posbench.measure.items import item_pool, pooled
from posbench.perturbations.scale_attention import scale_attention
from posbench.plots import base as plot
from posbench.plots.attention import draw_over_positions
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.cost import InspectionPasses
from posbench.schema import Seed, Several, Share
from posbench.stats import bootstrap
from posbench.stats.findings import SMALLEST_POINTS, Finding, estimate
from posbench.stats.frames import UNMODIFIED
from posbench.studies import prompts as shared
from posbench.studies.base import Tables
from posbench.studies.prompts import Prompts, gold_index
from posbench.tasks import Example
from posbench.tasks.items import index_at_share, sort_by_gold_position

MODE_LABELS = {
    UNMODIFIED: "unmodified",
    "item": "one place, whatever it holds",
    "gold": "the gold item",
    "other": "a random other item (control)",
}
SOURCE = "Yu et al. 2025, Appendix D.2"
MAX_CONTROL_GAIN = 5
"""Points of accuracy that a control may gain."""


@dataclass(frozen=True, kw_only=True)
class Doubling(shared.GoldStudy):
    """Attention weight on one item, multiplied in the forward pass: what it does to attention and accuracy.

    Three changes: of the item at one place whatever it holds (``item``: Figure 7), of the gold item at every
    position (``gold``), and of an item drawn among the others (``other``, the negative control). Only the
    last prompt token's row changes; later layers, and further tokens of the reply, see the consequences.

    Source: Yu et al. 2025, Appendix D.2, Figure 7. The paper states neither layers nor renormalisation.

    Attributes:
        examples: Examples per gold position at most; None is all of the task.
        item: Depth of the item that mode ``item`` changes, rounded down; the paper's 25th of 50 is 0.5.
        factor: Factor of the item's weight, above 1: the claims are on more attention.
        renormalise: Whether the weights are divided by their sum; otherwise the head's output grows by the
            added weight.
        layers: Changed layers; None is all.
        generated: Whether rows of generated tokens are changed too.
        seed: Seed of the control's items.
    """

    smallest: ClassVar[Mapping[str, int]] = {"examples": 6}
    examples: Several | None = 100
    item: Share = 0.5
    factor: Annotated[float, Gt(1)] = 2.0
    renormalise: bool = True
    layers: tuple[int, ...] | None = None
    generated: bool = False
    seed: Seed = 0

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        shared.check_each_layer(run.lm, "study.layers", self.layers)
        shared.check_prompts(run)

    def workload(self, run: Run) -> list[InspectionPasses]:
        """See :meth:`Study.workload`."""
        examples = sort_by_gold_position(shared.need_items(run.task), self.examples)
        passes = InspectionPasses(examples, times=0, replies=len(MODE_LABELS))
        return [passes, *self.lead_passes(examples)]

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``examples`` (by mode: target, attention, score) and ``doubling``, their means.

        Attention is the gold item's mean weight per token after the change, over heads and changed layers.
        """
        prompts = self.prompts(run)
        examples = []
        means = []
        for mode, label in MODE_LABELS.items():
            rows = prompts.complete(
                "doubling.jsonl",
                f"changed: {label.split(',')[0]}",
                {"mode": mode},
                partial(self._rows, prompts, mode),
            )
            results = prompts.results(rows).assign(mode=mode)
            targets = [self.target(mode, example) for example in prompts.examples]
            examples.append(results.assign(target=targets))
            by_position = shared.means_by_position(results, ("attention", "score"))
            means.append(by_position.assign(mode=mode))
        return {
            "doubling": pd.concat(means, ignore_index=True),
            "examples": pd.concat(examples, ignore_index=True),
        }

    def target(self, mode: str, example: Example) -> int | None:
        """Item whose weight is changed in an example; None in the unmodified model."""
        if mode == "item":
            return self._changed_item(len(example.items))
        if mode == "gold":
            return gold_index(example)
        if mode == "other":
            return shared.random_distractor(example, "doubling", self.seed)
        return None

    def _changed_item(self, num_items: int) -> int:
        """The item that mode ``item`` changes."""
        return index_at_share(Fraction(str(self.item)), num_items)

    def _layers(self, run: Run) -> Sequence[int]:
        return self.layers or range(run.lm.layers)

    def _rows(self, prompts: Prompts, mode: str, batch: Sequence[Example]) -> list[Row]:
        """Scored replies of a batch under a change, with the attention to the gold item."""
        replies, weights = self.replies_and_weights(prompts, mode, batch)
        layers = list(self._layers(prompts.run))
        rows = []
        for example, reply, by_layer in zip(batch, replies, weights, strict=True):
            attention = float(by_layer[layers, gold_index(example)].mean())
            rows.append({**reply, "attention": round_values(attention)})
        return rows

    def replies_and_weights(
        self, prompts: Prompts, mode: str, batch: Sequence[Example]
    ) -> tuple[list[Row], Tensor]:
        """Scored replies under a change, and the last prompt token's changed weight on each item, [B, L, N]."""
        lm = prompts.run.lm
        width = max(prompts.lengths(batch))
        pool = item_pool([prompts.encoded[e.id] for e in batch], batch, width)
        tokens = torch.zeros(len(batch), width)
        for row, example in enumerate(batch):
            target = self.target(mode, example)
            if target is not None:
                tokens[row] = (pool[row, target] > 0).float()
        with scale_attention(
            lm,
            tokens,
            self.factor,
            self._layers(prompts.run),
            renormalise=self.renormalise,
            generated=self.generated,
        ) as weights:
            replies = prompts.replies(batch)
        by_layer = []
        for layer in range(lm.layers):
            # A method may run a prompt as several rows, which are averaged as heads are.
            rows = weights[layer].unflatten(0, (len(batch), -1)).mean((1, 2))
            by_layer.append(rows.float().cpu()[:, None])
        return replies, pooled(by_layer, pool)[:, :, 0]

    def figures(self, tables: Tables) -> Drawn:
        """See :meth:`Study.figures`."""
        table = tables["doubling"]
        item = self._changed_item(int(table["items"].iloc[0]))
        renormalised = "" if self.renormalise else ", not renormalised"
        layers = "all layers"
        if self.layers is not None:
            layers = f"layers {', '.join(map(str, self.layers))}"
        caption = (
            f"The last token's weight on an item times {self.factor:g}{renormalised}. Attention after "
            f"the change: mean of {layers}. Bands: 95 %."
        )
        return {"doubling": (doubling_figure(table, item), caption)}

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Whether accuracy rises with the weight of the gold item, and not with another item's."""
        examples = tables["examples"]
        item = self._changed_item(int(examples["items"].iloc[0]))
        scores = examples.pivot(
            index=["id", "cluster", "gold_position"], columns="mode", values="score"
        ).reset_index()
        change = f"times {self.factor:g}, minus the unmodified model's, in points"
        return [
            _finding(
                scores[scores["gold_position"] == item],
                "item",
                UNMODIFIED,
                f"More attention to the gold item where it stands raises accuracy ({SOURCE}, Figure 7)",
                f"score with the weight of item {item}, where it is the gold item, {change}",
            ),
            _finding(
                scores,
                "gold",
                UNMODIFIED,
                f"Accuracy depends on attention to the gold item ({SOURCE})",
                f"score with the weight of the gold item {change}",
            ),
            _finding(
                scores,
                "other",
                UNMODIFIED,
                f"Negative control: more attention to another item gains less than {MAX_CONTROL_GAIN} points",
                f"score with the weight of a random other item {change}",
            ).control(),
            _finding(
                scores,
                "gold",
                "other",
                "Control: it is the gold item's attention that counts, not a change as such",
                "the same of the gold item minus the same of the other item, in points",
            ).control(),
        ]


def _finding(
    scores: pd.DataFrame, mode: str, base: str, claim: str, statistic: str
) -> Finding:
    """Hold a claim against the paired difference of scores of two modes.

    Args:
        scores: Score by mode of each prompt, with its cluster.
        mode: The mode whose score should be higher; for ``other``, a control, it should hardly rise.
        base: The mode that it is compared with.
        claim: The claim.
        statistic: The difference in words, with its unit.
    """
    if scores.empty:
        note = "no gold position stands there: see study.item and task.positions"
        return Finding.untestable(claim, statistic, note)
    clusters = list(scores["cluster"].astype(str))
    change = bootstrap.paired(scores[mode], scores[base], clusters)
    points = estimate(change._asdict(), scale=100)
    note = ", ".join(
        f"{name} {100 * scores[name].mean():.1f} %" for name in (base, mode)
    )
    if mode == "other":
        return Finding.below(claim, statistic, points, MAX_CONTROL_GAIN, note)
    return Finding.above(claim, statistic, points, SMALLEST_POINTS, note)


@plot.styled
def doubling_figure(table: pd.DataFrame, item: int) -> Figure:
    """Attention to the gold item and score over its position by change; dotted: the changed place."""
    figure, (left, right) = plot.new_figure(plot.PAGE, 2.6, 1, 2, n=table["n"])
    draw_over_positions(left, right, table, "mode", MODE_LABELS)
    depth = 100 * item / max(int(table["items"].iloc[0]) - 1, 1)
    guide = {"color": plot.GUIDE, "linestyle": ":", "linewidth": 1, "zorder": 0}
    for axes in (left, right):
        axes.axvline(depth, label=f"that place: item {item} (0 is the first)", **guide)
    plot.add_legend_below(figure)
    return figure
