"""Does attention cause the answer? The last prompt token's weight on one item is multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from posbench.files.atomic import Row, rounded
from posbench.late import Figure, Tensor, pd, torch
from posbench.measure.items import item_pool, pooled
from posbench.perturbations.scale_attention import scale_attention
from posbench.plots import base as plot
from posbench.plots.attention import over_positions
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.cost import InspectionPasses
from posbench.schema import Positive, Seed, Several, Share
from posbench.stats import bootstrap
from posbench.stats.findings import Finding, estimate
from posbench.stats.frames import UNMODIFIED
from posbench.studies import prompts as shared
from posbench.studies.base import Study, Tables
from posbench.studies.prompts import Prompts, gold
from posbench.tasks import Example
from posbench.tasks.items import at_share, placed

LABELS = {
    UNMODIFIED: "unmodified",
    "item": "one place, whatever it holds",
    "gold": "the gold item",
    "other": "a random other item (control)",
}
SOURCE = "Yu et al. 2025, Appendix D.2"
LITTLE = 5  # points of accuracy that a control may gain


@dataclass(frozen=True, kw_only=True)
class Doubling(Study):
    """Attention weight on one item, multiplied in the forward pass: what it does to attention and accuracy.

    Three changes: of the item at one place whatever it holds (``item``: Figure 7), of the gold item at every
    position (``gold``), and of an item drawn among the others (``other``, the negative control). Only the
    last prompt token's row changes; later layers, and further tokens of the reply, see the consequences.

    Source: Yu et al. 2025, Appendix D.2, Figure 7. The paper states neither layers nor renormalisation.
    """

    examples: Several | None = 100  # per gold position at most; None: all of the task
    item: Share = (
        0.5  # depth of the changed item, rounded down; the paper's 25th of 50 is 0.5
    )
    factor: Positive = 2.0  # of its weight
    renormalise: bool = (
        True  # to sum 1; otherwise the head's output grows by the added weight
    )
    layers: tuple[int, ...] | None = None  # None: all
    generated: bool = False  # whether rows of generated tokens are changed too
    seed: Seed = 0  # of the control's items

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        shared.check_each_layer(run.lm, "study.layers", self.layers)
        shared.check_prompts(run)

    def reads(self, run: Run) -> list[InspectionPasses]:
        """See :meth:`Study.reads`."""
        return [
            InspectionPasses(
                placed(shared.need_items(run.task), self.examples), 0, len(LABELS)
            )
        ]

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``examples`` (by mode: target, attention, score) and ``doubling``, their means.

        Attention is the gold item's mean weight per token after the change, over heads and changed layers.
        """
        prompts = Prompts.of(run, self.examples)
        parts = []
        means = []
        shown = list(self.layers or range(run.lm.layers))
        for mode, label in LABELS.items():

            def compute(batch: Sequence[Example], mode: str = mode) -> list[Row]:
                said, weights = self.answered(prompts, batch, mode)
                seen = [
                    float(row[shown, gold(e)].mean())
                    for row, e in zip(weights, batch, strict=True)
                ]
                return [
                    {**row, "attention": rounded(at)}
                    for row, at in zip(said, seen, strict=True)
                ]

            text = f"changed: {label.split(',')[0]}"
            rows = prompts.complete("doubling.jsonl", text, {"mode": mode}, compute)
            frame = prompts.results(rows).assign(mode=mode)
            parts.append(
                frame.assign(target=[self.target(mode, e) for e in prompts.examples])
            )
            means.append(
                shared.means_by_position(frame, ("attention", "score")).assign(
                    mode=mode
                )
            )
        tables = {"doubling": means, "examples": parts}
        return {
            name: pd.concat(each, ignore_index=True) for name, each in tables.items()
        }

    def target(self, mode: str, example: Example) -> int | None:
        """Item whose weight is changed in an example; None in the unmodified model."""
        if mode == "item":
            return self._place(len(example.items))
        if mode == "other":
            return shared.other_item(example, "doubling", self.seed)
        return gold(example) if mode == "gold" else None

    def _place(self, items: int) -> int:
        """The item that mode ``item`` changes."""
        return at_share(Fraction(str(self.item)), items)

    def answered(
        self, prompts: Prompts, batch: Sequence[Example], mode: str
    ) -> tuple[list[Row], Tensor]:
        """Scored replies under a change, and the last prompt token's weight on each item then, [B, L, N]."""
        lm = prompts.run.lm
        width = max(prompts.lengths(batch))
        pool = item_pool([prompts.encoded[e.id] for e in batch], batch, width)
        tokens = torch.zeros(len(batch), width)
        for row, example in enumerate(batch):
            target = self.target(mode, example)
            if target is not None:
                tokens[row] = (pool[row, target] > 0).float()
        layers = range(lm.layers) if self.layers is None else self.layers
        settings = {"renormalise": self.renormalise, "generated": self.generated}
        with scale_attention(lm, tokens, self.factor, layers, **settings) as weights:
            said = prompts.replies(batch)
        each = [
            weights[layer].unflatten(0, (len(batch), -1)).mean((1, 2))
            for layer in range(lm.layers)
        ]
        return said, pooled([row.float().cpu()[:, None] for row in each], pool)[:, :, 0]

    def figures(self, tables: Tables) -> Drawn:
        """See :meth:`Study.figures`."""
        table = tables["doubling"]
        place = self._place(int(table["items"].iloc[0]))
        renormalised = "" if self.renormalise else ", not renormalised"
        layers = (
            "all layers"
            if self.layers is None
            else f"layers {', '.join(map(str, self.layers))}"
        )
        caption = f"The last token's weight on an item times {self.factor:g}{renormalised}. Attention after "
        caption += f"the change: mean of {layers}. Bands: 95 %."
        return {"doubling": (doubling_figure(table, place), caption)}

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Whether accuracy rises with the weight of the gold item, and does not with that of another one."""
        examples = tables["examples"]
        place = self._place(int(tables["examples"]["items"].iloc[0]))
        keys = ["id", "cluster", "gold_position"]
        wide = examples.pivot(index=keys, columns="mode", values="score").reset_index()
        change = f"times {self.factor:g}, minus the unmodified model's, in points"
        cases = {
            ("item", UNMODIFIED): (
                f"More attention to the gold item where it stands raises accuracy ({SOURCE}, Figure 7)",
                f"score with the weight of item {place}, where it is the gold item, {change}",
            ),
            ("gold", UNMODIFIED): (
                f"Accuracy depends on attention to the gold item ({SOURCE}), at every position",
                f"score with the weight of the gold item {change}",
            ),
            ("other", UNMODIFIED): (
                f"Negative control: more attention to another item gains less than {LITTLE} points",
                f"score with the weight of a random other item {change}",
            ),
            ("gold", "other"): (
                "Control: it is the gold item's attention that counts, not a change as such",
                "the same of the gold item minus the same of the other item, in points",
            ),
        }
        found = []
        for (mode, base), claim in cases.items():
            rows = wide[wide["gold_position"] == place] if mode == "item" else wide
            if rows.empty:
                note = (
                    "no gold position stands there: see study.item and task.positions"
                )
                found.append(Finding.untestable(*claim, note))
                continue
            clusters = list(rows["cluster"].astype(str))
            at = estimate(
                bootstrap.paired(rows[mode], rows[base], clusters)._asdict(), scale=100
            )
            note = ", ".join(
                f"{name} {100 * rows[name].mean():.1f} %" for name in (base, mode)
            )
            below = Finding.below(*claim, at, LITTLE, note).control()
            found.append(
                below if mode == "other" else Finding.above(*claim, at, note=note)
            )
        return [each.control() if "ontrol: " in each.claim else each for each in found]


@plot.styled
def doubling_figure(table: pd.DataFrame, place: int) -> Figure:
    """Attention to the gold item and score over its position by change; dotted: the changed place."""
    figure, (left, right) = plot.new_figure(plot.PAGE, 2.6, 1, 2, n=table["n"])
    over_positions(left, right, table, "mode", LABELS)
    depth = 100 * place / max(int(table["items"].iloc[0]) - 1, 1)
    guide = {"color": plot.GUIDE, "linestyle": ":", "linewidth": 1, "zorder": 0}
    for axes in (left, right):
        axes.axvline(depth, label=f"that place: item {place} (0 is the first)", **guide)
    plot.legend_below(figure)
    return figure
