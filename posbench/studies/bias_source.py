"""Where does a position bias come from? Each intervention removes one cue to an item's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np

from posbench.errors import UserError
from posbench.files.atomic import Row, round_values
from posbench.late import Figure, Tensor, pd, torch
from posbench.model.lm import LM
from posbench.perturbations.crop_mask import crop_mask
from posbench.perturbations.move_positions import can_move, move_positions
from posbench.perturbations.scale_attention import scale_attention
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.cost import InspectionPasses
from posbench.schema import Count, Seed
from posbench.stats import bootstrap
from posbench.stats.bootstrap import Array, Estimate, Group
from posbench.stats.findings import (
    Finding,
    estimate,
    estimate_row,
    join_findings,
)
from posbench.stats.frames import UNMODIFIED
from posbench.stats.position_bias import largest_gap
from posbench.studies import prompts as shared
from posbench.studies.base import Study, Tables
from posbench.studies.prompts import ItemChange, Prompts, gold_index
from posbench.tasks import Example
from posbench.tasks.items import sort_by_gold_position

MASK = "causal mask"
POSITION_IDS = "position ids"
SINK = "first token"
Means: TypeAlias = "Mapping[str, Array]"
"""Means of groups of losses, [R] over bootstrap draws, by group."""
SMALLEST_GAP_SHARE = 1 / 3
"""Share of the gap between the best and the worst gold position that an intervention on a source closes at least."""
SINK_FACTOR = 0.01
"""Factor on the last token's attention to the first token; at 0, heads that see nothing else would see nothing."""
SOURCE_TABLES = ("bias_source", "bias_source_effects")
"""Tables of the study."""
NO_GAP = "no gold position is surely better than the others"


class Intervention(NamedTuple):
    """A change of the forward pass that takes one source away.

    Attributes:
        source: The cue to the place of an item, which is removed.
        change: The change to the gold item; for the sink, to the first token.
        control: The intervention that changes another item in the same way; for both moves of position ids that to the
            end.
        place: The place that the item then looks like having: ``first`` or ``last``; empty: none.
    """

    source: str
    change: ItemChange
    control: str
    place: Literal["first", "last", ""]

    def __str__(self) -> str:
        """The source, and the change."""
        return f"{self.source}: {self.change.label}"

    @property
    def claim(self) -> str:
        """The claim that holds where the intervention closes a third of the gap."""
        return f"A third or more of the gap comes from the {self}"


INTERVENTIONS = {
    "crop": Intervention(
        source=MASK,
        change=ItemChange(
            "the gold item sees itself and the first token alone", crops_mask=True
        ),
        control="crop_other",
        place="first",
    ),
    "pe_to_beginning": Intervention(
        source=POSITION_IDS,
        change=ItemChange(
            "its keys at the position ids of the first item", moved_to="beginning"
        ),
        control="pe_to_end_other",
        place="first",
    ),
    "pe_to_end": Intervention(
        source=POSITION_IDS,
        change=ItemChange(
            "its keys at the position ids of the last item", moved_to="end"
        ),
        control="pe_to_end_other",
        place="last",
    ),
    "sink": Intervention(
        source=SINK,
        change=ItemChange("the last token hardly sees the first token"),
        control="sink_other",
        place="",
    ),
}
CONTROLS = {
    "crop_other": ItemChange(
        "another item sees itself and the first token alone (control)",
        crops_mask=True,
        of_another=True,
    ),
    "pe_to_end_other": ItemChange(
        "keys of another item at the position ids of the last (control)",
        moved_to="end",
        of_another=True,
    ),
    "sink_other": ItemChange(
        "the last token hardly sees another item (control)", of_another=True
    ),
}


@dataclass(frozen=True, kw_only=True)
class BiasSource(Study):
    """What tells the model where an item stands: loss of the right answer when one source of that is taken away.

    The gap is the loss at the worst gold position minus the loss at the best one. A source contributes where an
    intervention on it at the worst position closes a third of the gap or more, and more than the same intervention on
    another item of the prompt, for sure. The crop covers all layers, so that an item's hidden states carry no
    information on earlier tokens; it makes an item look like the first one, so that a preference for the end which
    the mask alone brings about cannot be shown.

    Source: perturbations of Yu et al. 2025, Section 2.2 and Appendix D.2; the crop of all layers, the sink and the rule
    are ours.

    Attributes:
        examples: Examples of each gold position at most.
        seed: Seed of the controls' items.
    """

    smallest: ClassVar[Mapping[str, int]] = {"examples": 8}

    examples: Count = 40
    seed: Seed = 0

    def check(self, run: Run) -> None:
        """Refuse a task without two gold positions or without answers, and interventions that the model does not allow.

        Raises:
            UserError: The task or the model does not fit.
        """
        examples = shared.check_positions(run, "a better and a worse one")
        if any(not example.answers for example in examples):
            allowed = "a task with answers, whose loss can be measured"
            raise UserError(
                "task",
                run.task.name,
                allowed,
                "take task=kv_retrieval or task=nq_multidoc",
            )
        # Each intervention is applied once, to a prompt of one token, as some refuse a model.
        with run.method.trial().applied(run.lm):
            for change in _changes(run.lm).values():
                with _applied(run.lm, change, [1], [(0, 0)], [(0, 0)]):
                    pass

    def workload(self, run: Run) -> list[InspectionPasses]:
        """Return the forward passes: each prompt once, and those of the worst gold position for each intervention.

        Which position is the worst shows in the run only; each has about as many prompts.
        """
        examples = sort_by_gold_position(shared.need_items(run.task), self.examples)
        num_changes = len(_changes(run.lm))
        # Any position has the size of the worst one: the first.
        at_one_position = [
            e for e in examples if gold_index(e) == gold_index(examples[0])
        ]
        return [
            InspectionPasses(examples, times=1),
            InspectionPasses(at_one_position, times=num_changes),
        ]

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Measure the loss of the right answer unmodified, and under each intervention at the worst gold position.

        Returns:
            Tables ``bias_source`` (loss by variant and gold position) and ``bias_source_effects``.
        """
        prompts = Prompts.of(run, self.examples)
        unmodified = self._losses(prompts, UNMODIFIED, None)
        _, worst = _best_and_worst(unmodified)
        at_worst = [e for e in prompts.examples if gold_index(e) == worst]
        worst_prompts = Prompts.of(run, self.examples, examples=at_worst)
        frames = [unmodified]
        for variant, change in _changes(run.lm, _place_of(at_worst[0])).items():
            frames.append(self._losses(worst_prompts, variant, change))
        frame = pd.concat(frames, ignore_index=True)
        return {
            "bias_source": _by_position(frame),
            "bias_source_effects": _effects(frame, run.runtime.resamples),
        }

    def _losses(
        self, prompts: Prompts, variant: str, change: ItemChange | None
    ) -> pd.DataFrame:
        """Return the loss of the right answer to each prompt under a variant, in nats per token.

        Args:
            prompts: The prompts; their rows in ``rows.jsonl`` are resumed.
            variant: Name of the variant.
            change: Its change of the forward pass; None: unmodified.

        Returns:
            A row for each prompt: its id, question, gold position and depth, ``variant`` and ``loss``.
        """
        lm = prompts.run.lm

        def compute(batch: Sequence[Example]) -> list[Row]:
            pairs = []
            for example in batch:
                encoded = prompts.encoded[example.id]
                answer = lm.continuation_ids(encoded, example.answers[0])
                pairs.append((encoded.ids, answer))
            with self._changed(prompts, change, batch):
                losses = lm.answer_token_loss(pairs, batch_size=len(pairs))
            return [{"loss": round_values(loss)} for loss in losses.tolist()]

        label = variant.replace("_", " ")
        rows = prompts.complete("rows.jsonl", label, {"variant": variant}, compute)
        losses = [rows[example.id]["loss"] for example in prompts.examples]
        return prompts.frame().assign(variant=variant, loss=losses)

    @contextmanager
    def _changed(
        self, prompts: Prompts, change: ItemChange | None, batch: Sequence[Example]
    ) -> Iterator[None]:
        """Apply a change to the gold item (or another one) of each prompt of a batch; None changes nothing."""
        if change is None:
            yield
            return
        item = gold_index
        if change.of_another:
            item = partial(shared.random_distractor, name="bias_source", seed=self.seed)
        spans = prompts.spans(batch, item)
        target = 0 if change.moved_to == "beginning" else -1
        targets = prompts.spans(batch, lambda example: target)
        lengths = prompts.lengths(batch)
        with _applied(prompts.run.lm, change, lengths, spans, targets):
            yield

    def figures(self, tables: Tables) -> Drawn:
        """Draw the share of the gap that each intervention closes; nothing where there is no gap."""
        caption = (
            "Share of the gap that each intervention closes, with 95 % intervals; line: a third. The gap is the loss "
            "of the right answer at the worst gold position minus that at the best one."
        )
        effects = read_effects(tables)
        if not has_gap(effects):
            return {}
        return {"bias_source": (source_figure(effects), caption)}

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Judge whether each intervention closes a third of the gap, and more than its control does."""
        effects = read_effects(tables)
        return [
            replace(_finding(name, effects), kind="source")
            for name in INTERVENTIONS
            if f"{name}_gain" in effects
        ]


def read_effects(tables: Tables) -> dict[str, Estimate]:
    """The table ``bias_source_effects`` as estimates by name."""
    rows = tables["bias_source_effects"].to_dict("records")
    return {row["effect"]: estimate(row) for row in rows}


def _changes(lm: LM, place: str = "") -> dict[str, ItemChange]:
    """Return the changes of interventions and controls that a model can have, by name.

    Args:
        lm: The model.
        place: Place of the gold item, ``first`` or ``last``; a change that makes it look so has no effect there, and
            is left out.
    """
    changes = {
        name: intervention.change
        for name, intervention in INTERVENTIONS.items()
        if not place or intervention.place != place
    }
    changes |= CONTROLS
    if can_move(lm):
        return changes
    return {name: change for name, change in changes.items() if not change.moved_to}


def _place_of(example: Example) -> str:
    """Whether the gold item is the ``first`` or the ``last`` one; empty: neither."""
    index = gold_index(example)
    if index == 0:
        return "first"
    return "last" if index == len(example.items) - 1 else ""


def best_place(tables: Tables) -> str:
    """Whether the unmodified model is best with the gold item ``first`` or ``last`` of all; empty: between them."""
    table = tables["bias_source"]
    unmodified = table[table["variant"] == UNMODIFIED]
    best = unmodified.loc[unmodified["loss"].idxmin()]
    return {0.0: "first", 1.0: "last"}.get(float(best["depth"]), "")


@contextmanager
def _applied(
    lm: LM,
    change: ItemChange,
    lengths: Sequence[int],
    spans: Sequence[tuple[int, int]],
    targets: Sequence[tuple[int, int]],
) -> Iterator[None]:
    """Apply a change to a batch of prompts, longest first.

    Args:
        lm: The model.
        change: The change; if neither mask nor position ids, the last token's attention is dimmed.
        lengths: Tokens of each prompt.
        spans: Tokens of the item that is changed.
        targets: Tokens whose position ids it takes, where it is moved.
    """
    if change.crops_mask:
        block = crop_mask(lm, lengths, spans, range(lm.layers))
    elif change.moved_to:
        block = move_positions(lm, lengths, spans, targets)
    else:
        if not change.of_another:  # the sink is the first token, not the gold item
            spans = [(0, 1)] * len(lengths)
        # What is left is to dim the last token's attention to these tokens.
        marks = _marks(lengths, spans)
        block = scale_attention(lm, marks, SINK_FACTOR, range(lm.layers))  # type: ignore[assignment]
    with block:
        yield


def _marks(lengths: Sequence[int], spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return 1 at the tokens of a span of each prompt and 0 elsewhere, [B, T], for prompts padded on the left.

    Args:
        lengths: Tokens of each prompt.
        spans: First token and end of each span.
    """
    width = max(lengths)
    marks = torch.zeros(len(lengths), width)
    for row, (length, (start, stop)) in enumerate(zip(lengths, spans, strict=True)):
        padding = width - length
        marks[row, padding + start : padding + stop] = 1
    return marks


def _best_and_worst(unmodified: pd.DataFrame) -> tuple[int, int]:
    """The gold positions with the smallest and the largest mean loss of the unmodified model."""
    means = unmodified.groupby("gold_position")["loss"].mean()
    return int(means.idxmin()), int(means.idxmax())


def _by_position(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the mean loss by variant and gold position, with its interval and number of prompts.

    Args:
        frame: A row for each prompt and variant (an intervention, or the unmodified model), from
            :meth:`BiasSource._losses`.

    Returns:
        Rows of variant, gold_position, depth (0..1), loss (nats) with ci_low and ci_high, and n.
    """
    table = []
    for (variant, position, depth), rows in frame.groupby(
        ["variant", "gold_position", "depth"], sort=False
    ):
        losses = rows["loss"].to_numpy()
        mean = bootstrap.difference(losses, list(rows["cluster"]))
        table.append(
            {
                "variant": variant,
                "gold_position": position,
                "depth": depth,
                **estimate_row(mean, "loss"),
                "n": len(rows),
            }
        )
    return pd.DataFrame(table)


def _effects(frame: pd.DataFrame, resamples: int) -> pd.DataFrame:
    """Return the table of effects: the gap, and of each intervention what it gains, its share of the gap, its margins.

    The margins are over a third of the gap and over its control. The gap is the loss at the worst gold position minus
    that at the best; a gain is how much less loss there is at the worst one.

    Args:
        frame: Loss of each prompt by variant (an intervention, its control, or the unmodified model).
        resamples: Bootstrap draws of questions.

    Returns:
        Rows of effect (such as ``gap`` or NAME_gain), value, ci_low, ci_high and n.
    """
    unmodified = frame[frame["variant"] == UNMODIFIED]
    best, worst = (
        unmodified[unmodified["gold_position"] == position]
        for position in _best_and_worst(unmodified)
    )
    groups: dict[str, Group] = {
        "worst": shared.values_and_clusters(worst, "loss"),
        "best": shared.values_and_clusters(best, "loss"),
    }
    variants = [name for name in frame["variant"].unique() if name != UNMODIFIED]
    for variant in variants:
        rows = frame[frame["variant"] == variant]
        groups[variant] = shared.values_and_clusters(rows, "loss")

    def statistic(function: Callable[[Means], Array]) -> Estimate:
        return bootstrap.statistic(groups, function, resamples=resamples)

    effects = {"gap": _gap_of_positions(unmodified, resamples)}
    for variant in variants:
        effects[f"{variant}_gain"] = statistic(partial(_gain, variant))
    for name, intervention in INTERVENTIONS.items():
        # A model without RoPE, say, allows some interventions only.
        if name not in variants:
            continue
        control = intervention.control
        effects |= {
            f"{name}_share": statistic(partial(_share_of_gap, name)),
            f"{name}_over_bound": statistic(partial(_gain_over_bound, name)),
            f"{name}_over_control": statistic(partial(_gain_over, name, control)),
        }
    return shared.effects_table(effects)


def _gap_of_positions(unmodified: pd.DataFrame, resamples: int) -> Estimate:
    """Estimate the loss at the worst gold position minus that at the best one.

    The interval takes into account that the same losses chose these positions.

    Args:
        unmodified: Losses of the unmodified model, a row for each prompt.
        resamples: Bootstrap draws.
    """
    groups = {
        position: shared.values_and_clusters(rows, "loss")
        for position, rows in unmodified.groupby("gold_position")
    }
    means = bootstrap.resampled(groups, stratified=True, resamples=resamples)
    curve = np.array([mean for mean, _ in means.values()])
    draws = np.stack([draws for _, draws in means.values()], axis=1)
    num_prompts = int(unmodified["gold_position"].value_counts().min())
    # A single prompt at a position shows no spread, however many there are elsewhere.
    num_questions = unmodified["cluster"].nunique() if num_prompts > 1 else 1
    return largest_gap(curve, draws, num_prompts, num_questions)


def _gap(means: Means) -> Array:
    """Loss at the worst gold position minus that at the best one."""
    return means["worst"] - means["best"]


def _gain(variant: str, means: Means) -> Array:
    """Fall of the loss at the worst gold position."""
    return means["worst"] - means[variant]


def _share_of_gap(variant: str, means: Means) -> Array:
    """The gain as a share of the gap; NaN where there is none."""
    gap = np.where(_gap(means) > 0, _gap(means), np.nan)
    return _gain(variant, means) / gap


def _gain_over_bound(variant: str, means: Means) -> Array:
    """The gain minus the least that a source closes."""
    return _gain(variant, means) - SMALLEST_GAP_SHARE * _gap(means)


def _gain_over(variant: str, control: str, means: Means) -> Array:
    """The gain minus the control's."""
    return _gain(variant, means) - _gain(control, means)


# Verdicts


def has_gap(effects: Mapping[str, Estimate]) -> bool:
    """Whether the best gold position is surely better than the worst one."""
    return bool(effects["gap"].ci_low > 0)


def _finding(name: str, effects: Mapping[str, Estimate]) -> Finding:
    """Judge whether an intervention closes :data:`SMALLEST_GAP_SHARE` of the gap, and more than its control does.

    Args:
        name: The intervention.
        effects: Estimates by name: ``gap``, and for each intervention its gain, share of the gap, and surplus over the
            bound and over its control.
    """
    intervention = INTERVENTIONS[name]
    claim = intervention.claim
    statistic = "share of the gap that this closes at the worst gold position"
    share = effects[f"{name}_share"]
    if not has_gap(effects):
        return Finding.untestable(claim, statistic, NO_GAP, share.n)
    note = f"gap {effects['gap'].words} nats per answer token; {name} gains {effects[f'{name}_gain'].words}"
    parts = [
        Finding.above(claim, statistic, effects[f"{name}_over_bound"], 0.0, note),
        Finding.above(claim, statistic, effects[f"{name}_over_control"], 0.0, note),
    ]
    numbers = Finding.that(True, claim, statistic, share, note)
    holds_if = f"above {SMALLEST_GAP_SHARE:.2f}, and above its control"
    return replace(join_findings(parts, numbers_of=numbers), holds_if=holds_if)


@plot.styled
def source_figure(effects: Mapping[str, Estimate]) -> Figure:
    """Draw the share of the gap that each intervention closes, with 95 % intervals and a line at a third.

    Args:
        effects: Estimates by name.
    """
    names = [name for name in INTERVENTIONS if f"{name}_share" in effects]
    counts = [effects[f"{name}_share"].n for name in names]
    figure, axes = plot.new_figure(plot.PAGE, 0.9 + 0.3 * len(names), n=counts)
    axes.axvline(0, color=plot.GUIDE, linewidth=0.6)
    axes.axvline(
        100 * SMALLEST_GAP_SHARE, color=plot.GUIDE, linewidth=0.6, linestyle=plot.DASHED
    )
    shares = pd.DataFrame([estimate_row(effects[f"{name}_share"]) for name in names])
    heights = range(len(names))
    plot.percent_bars(
        axes, heights, shares, upright=False, fmt="o", markersize=3, color=plot.BLUE
    )
    labels = [str(INTERVENTIONS[name]) for name in names]
    axes.set_yticks(heights, labels)
    axes.invert_yaxis()
    axes.set_xlabel("share of the gap that is closed (%)")
    return figure
