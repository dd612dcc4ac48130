"""Does the mask's effect on the hidden states steer attention? The gold item is cropped, or moved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from posbench.errors import UserError
from posbench.late import Axes, Figure, pd
from posbench.methods.scale_channel import check_layers, scale_layer_range
from posbench.model.lm import LM
from posbench.perturbations.crop_mask import crop_mask
from posbench.perturbations.move_positions import can_move, move_positions
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.cost import InspectionPasses
from posbench.schema import Count, Seed
from posbench.stats import bootstrap
from posbench.stats.bootstrap import Array, Estimate, Group
from posbench.stats.findings import Finding, estimate_row
from posbench.stats.frames import UNMODIFIED
from posbench.studies import prompts as shared
from posbench.studies.base import Tables
from posbench.studies.prompts import (
    ItemChange,
    LayerRange,
    Prompts,
    RowsByVariant,
    gold_index,
)
from posbench.tasks import Example
from posbench.tasks.items import sort_by_gold_position
from yu2025 import common

CHANGES = {
    "crop": ItemChange("crop mask", crops_mask=True),
    "pe_to_beginning": ItemChange("PE to beginning", moved_to="beginning"),
    "pe_to_end": ItemChange("PE to end", moved_to="end"),
    "crop_other": ItemChange(
        "crop another (control)", crops_mask=True, of_another=True
    ),
}
CROSSED_CHANGES = {
    "crop_pe_to_beginning": ItemChange(
        "crop mask and PE to beginning", crops_mask=True, moved_to="beginning"
    ),
    "crop_pe_to_end": ItemChange(
        "crop mask and PE to end", crops_mask=True, moved_to="end"
    ),
    "pe_to_end_other": ItemChange(
        "PE of another to end (control)", moved_to="end", of_another=True
    ),
}
"""Changes that :attr:`CropMask.crossed` adds."""
CHANGE_LABELS = {UNMODIFIED: "unmodified"}
CHANGE_LABELS |= {name: change.label for name, change in CHANGES.items()}
NO_LATE = "no gold position lies in the last third of the items"
NEAR_LEVEL = 0.8
"""Share of a level from which attention is near it: the bound of the claims on levels in ``yu2025_claims.csv``."""
EMPTY_SPAN = [(0, 0)]


@dataclass(frozen=True, kw_only=True)
class CropMask(shared.GoldStudy):
    """Crop mask and moved position ids of the gold item, and what its attention and the accuracy do.

    Position ids are moved in all layers (:mod:`posbench.perturbations.move_positions`), but not in models
    without rotary embedding.

    Source: Yu et al. 2025, Section 2.2, Appendix D.3, Figures 3, 8 and 9. Controls and ``crossed`` are ours.

    Attributes:
        layers: First and last layer with a cropped mask; None is the paper's 2 to 8 of 32, counted from 1
            (D.3: 1 to 8), or that share, and none from the retrieval layers on.
        retrieval: First and last layer whose attention is averaged; None: see
            :func:`yu2025.common.retrieval_layers`.
        keep_first: Whether the cropped item sees the prompt's first token (Appendix D.3: yes).
        crossed: Whether to change mask and position ids together, too, and to move another item's position
            ids (control).
        examples: Examples of each gold position at most.
        seed: Seed of the controls' items.
    """

    smallest: ClassVar[Mapping[str, int]] = {"examples": 6}
    layers: tuple[int, int] | None = None
    retrieval: tuple[int, int] | None = None
    keep_first: bool = True
    crossed: bool = False
    examples: Count = 100
    seed: Seed = 0

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        lm = run.lm
        check_layers(lm, "study.layers", self.layers)
        check_layers(lm, "study.retrieval", self.retrieval)
        shared.check_prompts(run)
        positions = sorted({gold_index(e) for e in shared.need_items(run.task)})
        if len(positions) < 3:
            allowed = (
                "three or more: the claims are on those between the first and the last"
            )
            hint = "set task.positions=[0%,50%,100%], or leave it out"
            raise UserError("task.positions", positions, allowed, hint)
        if self.crossed and not can_move(lm):
            allowed = f"false here: {shared.NO_ROPE_NOTE}"
            hint = "set study.crossed=false, or take model=tiny"
            raise UserError("study.crossed", True, allowed, hint)
        with ExitStack() as stack:
            stack.enter_context(run.method.trial().applied(lm))
            stack.enter_context(crop_mask(lm, [1], EMPTY_SPAN, []))
            if can_move(lm):
                stack.enter_context(move_positions(lm, [1], EMPTY_SPAN, EMPTY_SPAN))

    def workload(self, run: Run) -> list[InspectionPasses]:
        """See :meth:`Study.workload`."""
        num_variants = 1 + len(self._changes())
        examples = sort_by_gold_position(shared.need_items(run.task), self.examples)
        passes = InspectionPasses(examples, times=num_variants, replies=num_variants)
        return [passes, *self.lead_passes(examples)]

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``crop_mask`` (by variant, gold position), ``crop_mask_layers``, ``crop_mask_effects``."""
        prompts = self.prompts(run)
        unmodified = prompts.under(
            UNMODIFIED, lambda batch: nullcontext(), common.gold_attention_rows
        )
        attention = np.mean([row["attention"] for row in unmodified.values()], axis=0)
        cropped, retrieval = self._layer_ranges(run.lm, attention)

        measured = {UNMODIFIED: unmodified}
        for variant, change in self._changes().items():
            if change.moved_to and not can_move(run.lm):
                continue
            block = partial(self._changed, prompts, change, cropped)
            measured[variant] = prompts.under(
                variant, block, common.gold_attention_rows
            )

        frame = pd.concat(
            [
                prompts.results(rows, retrieval).assign(variant=variant)
                for variant, rows in measured.items()
            ]
        )
        layers = {
            "crop_first": cropped[0],
            "crop_last": cropped[1],
            "retrieval_first": retrieval[0],
            "retrieval_last": retrieval[1],
        }
        by_position = _by_position(frame, run.task.metric)
        by_layer = _by_layer(measured, prompts.examples)
        return {
            "crop_mask": by_position.assign(**layers),
            "crop_mask_layers": by_layer.assign(**layers),
            "crop_mask_effects": _effects(frame, run.runtime.resamples),
        }

    def _changes(self) -> dict[str, ItemChange]:
        """The change of each variant, by name."""
        return CHANGES | CROSSED_CHANGES if self.crossed else CHANGES

    def _layer_ranges(self, lm: LM, attention: Array) -> tuple[LayerRange, LayerRange]:
        """First and last layer with a cropped mask, and those whose attention is averaged.

        Args:
            lm: The model.
            attention: The unmodified model's attention to the gold item, [L].
        """
        retrieval = common.retrieval_layers(self.retrieval, attention)
        if self.layers is not None:
            return self.layers, retrieval
        first, last = scale_layer_range(common.CROP_LAYERS, lm.layers)
        return (first, max(min(last, retrieval[0] - 1), first)), retrieval

    @contextmanager
    def _changed(
        self,
        prompts: Prompts,
        change: ItemChange,
        cropped: LayerRange,
        batch: Sequence[Example],
    ) -> Iterator[None]:
        """Apply a change to a batch for the duration of a block; the mask is cropped in the layers ``cropped``."""
        lm = prompts.run.lm
        lengths = prompts.lengths(batch)
        item = gold_index
        if change.of_another:
            item = partial(shared.random_distractor, name="crop_mask", seed=self.seed)
        spans = prompts.spans(batch, item)
        with ExitStack() as stack:
            if change.crops_mask:
                layers = range(cropped[0], cropped[1] + 1)
                stack.enter_context(
                    crop_mask(lm, lengths, spans, layers, keep_first=self.keep_first)
                )
            if change.moved_to:
                target = 0 if change.moved_to == "beginning" else -1
                targets = prompts.spans(batch, lambda e: target)
                stack.enter_context(move_positions(lm, lengths, spans, targets))
            yield

    def figures(self, tables: Tables) -> Drawn:
        """See :meth:`Study.figures`."""
        caption = "Score and attention, and change of attention by layer, with 95 % intervals."
        figure = crop_figure(tables["crop_mask"], tables["crop_mask_layers"])
        figures = {"crop_mask": (figure, caption)}
        if _is_crossed(tables):
            caption = "Change at the inner gold positions (95 %); lines: what the first and last one have."
            figure = crossed_figure(tables["crop_mask_effects"])
            figures["crop_mask_crossed"] = (figure, caption)
        return figures

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Claim C2: hidden states carry positional information of their own."""
        row = tables["crop_mask"].iloc[0]
        retrieval = common.layers_label(row["retrieval_first"], row["retrieval_last"])
        note = f"mask cropped in {common.layers_label(row['crop_first'], row['crop_last'])}"
        effects = tables["crop_mask_effects"]
        missing = shared.NO_ROPE_NOTE
        if "crop_over_moves" in set(effects["effect"]):
            missing = NO_LATE
        studies = ["crop_mask"]
        if _is_crossed(tables):
            studies.append("crop_mask_crossed")
        findings = []
        for study in studies:
            findings += shared.judge_claims(
                effects,
                study,
                note,
                missing_note=missing,
                untestable=_levels_without_a_fall(effects),
                layers=retrieval,
            )
        return findings


def _levels_without_a_fall(effects: pd.DataFrame) -> dict[str, str]:
    """Why the level at an end says nothing, by its effect: the unmodified model is near it at the inner positions."""
    values = effects.set_index("effect")["value"]
    inner = values["unmodified_inner"]
    ends = {"crop_level": ("first", values["unmodified_first"])}
    if "last_over_inner_attention" in values:
        last = inner + values["last_over_inner_attention"]
        ends["end_level"] = ("last", last)
    return {
        effect: f"the unmodified model has {100 * inner / level:.0f} % of its {end} one there already"
        for effect, (end, level) in ends.items()
        if inner > NEAR_LEVEL * level
    }


def _is_crossed(tables: Tables) -> bool:
    """Whether the run put mask and position ids together."""
    return "crop_pe_to_end_attention" in set(tables["crop_mask_effects"]["effect"])


def _by_position(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Rows of variant, gold_position, depth, measure, value and change (each with its interval), n."""
    unmodified = frame[frame["variant"] == UNMODIFIED].set_index("id")
    table = []
    for measure, name in (("score", metric), ("attention", "attention")):
        for (variant, position, depth), rows in frame.groupby(
            ["variant", "gold_position", "depth"], sort=False
        ):
            clusters = list(rows["cluster"])
            values = rows[measure].to_numpy()
            before = unmodified.loc[rows["id"], measure].to_numpy()
            if measure == "score" and variant != UNMODIFIED:
                change = bootstrap.paired(values, before, clusters)
            else:
                change = bootstrap.difference(values - before, clusters)
            row = {
                "variant": variant,
                "gold_position": position,
                "depth": depth,
                "measure": name,
                **estimate_row(
                    bootstrap.mean(values, clusters, of_scores=measure == "score")
                ),
                **estimate_row(change, "change"),
                "n": len(rows),
            }
            table.append(row)
    return pd.DataFrame(table)


def _inner(positions: Iterable[int]) -> set[int]:
    """The positions between the first and the last one."""
    return set(sorted(set(positions))[1:-1])


def _by_layer(measured: RowsByVariant, examples: Sequence[Example]) -> pd.DataFrame:
    """Rows of variant, layer, attention, change with its interval, n: means over the inner gold positions."""
    inner = _inner(gold_index(e) for e in examples)
    examples = [e for e in examples if e.gold_position in inner]
    clusters = [e.question_id for e in examples]
    unmodified = np.array([measured[UNMODIFIED][e.id]["attention"] for e in examples])
    table = []
    for variant, rows in measured.items():
        attention = np.array([rows[e.id]["attention"] for e in examples])  # [n, L]
        for layer, changes in enumerate((attention - unmodified).T):
            change = bootstrap.difference(changes, clusters)
            row = {
                "variant": variant,
                "layer": layer,
                "attention": attention[:, layer].mean(),
                **estimate_row(change, "change"),
                "n": change.n,
            }
            table.append(row)
    return pd.DataFrame(table)


def _group(
    frame: pd.DataFrame, variant: str, measure: str, positions: Iterable[int]
) -> Group:
    """Values of a measure under a variant at some gold positions, with their clusters."""
    rows = frame[frame["variant"] == variant]
    return shared.values_and_clusters(
        rows[rows["gold_position"].isin(positions)], measure
    )


def _effects(frame: pd.DataFrame, resamples: int) -> pd.DataFrame:
    """The numbers behind the verdicts: differences and ratios of means at the inner gold positions."""
    variants = list(frame["variant"].unique())
    positions = sorted(frame["gold_position"].unique())
    inner = _inner(positions)
    attention = {v: _group(frame, v, "attention", inner) for v in variants}
    scores = {v: _group(frame, v, "score", inner) for v in variants}
    first = {"first": _group(frame, UNMODIFIED, "attention", positions[:1])}
    effects = {
        "unmodified_inner": bootstrap.statistic(
            attention, lambda means: means[UNMODIFIED], resamples=resamples
        ),
        "unmodified_first": bootstrap.statistic(
            first, lambda means: means["first"], resamples=resamples
        ),
    }
    for variant in variants[1:]:
        for measure, groups in (("attention", attention), ("score", scores)):
            effects[f"{variant}_{measure}"] = common.difference_of_means(
                groups, variant, UNMODIFIED, resamples
            )
    effects["crop_level"] = bootstrap.statistic(
        attention | first,
        lambda means: means["crop"] / means["first"],
        resamples=resamples,
    )
    effects["crop_over_other"] = common.difference_of_means(
        attention, "crop", "crop_other", resamples
    )
    if "pe_to_beginning" in variants:
        effects["crop_over_moves"] = bootstrap.statistic(
            attention, _crop_over_moves, resamples=resamples
        )
        num_items = frame["items"].iloc[0]
        late = [p for p in positions if 3 * p >= 2 * (num_items - 1)]
        if late:
            for measure in ("attention", "score"):
                groups = {
                    variant: _group(frame, variant, measure, late)
                    for variant in (UNMODIFIED, "pe_to_beginning")
                }
                effects[f"beginning_late_{measure}"] = common.difference_of_means(
                    groups, UNMODIFIED, "pe_to_beginning", resamples
                )
    if "crop_pe_to_end" in variants:
        effects |= _crossed_effects(frame, positions, inner, resamples)
    return shared.effects_table(effects)


def _crop_over_moves(means: Mapping[str, Array]) -> Array:
    """Attention under the crop mask minus that under the better of the two moves."""
    return means["crop"] - np.maximum(means["pe_to_beginning"], means["pe_to_end"])


def _crossed_effects(
    frame: pd.DataFrame, positions: Sequence[int], inner: set[int], resamples: int
) -> dict[str, Estimate]:
    """Mask and position ids together at the inner positions, and the unmodified model's ends over them.

    Args:
        frame: Scores and attention by variant and prompt.
        positions: Gold positions in their order.
        inner: The positions between the first and the last one.
        resamples: Draws of the bootstrap.
    """
    contrasts = {
        "mask_beyond_ids": ("crop_pe_to_end", "pe_to_end"),
        "ids_beyond_mask": ("crop_pe_to_end", "crop"),
        "end_over_other": ("pe_to_end", "pe_to_end_other"),
        "first_over_inner": ("first", UNMODIFIED),
        "last_over_inner": ("last", UNMODIFIED),
        "last_over_end": ("last", "pe_to_end"),
    }
    variants = ("crop_pe_to_end", "pe_to_end", "crop", "pe_to_end_other", UNMODIFIED)
    effects: dict[str, Estimate] = {}
    for measure in ("score", "attention"):
        groups = {v: _group(frame, v, measure, inner) for v in variants}
        groups["first"] = _group(frame, UNMODIFIED, measure, positions[:1])
        groups["last"] = _group(frame, UNMODIFIED, measure, positions[-1:])
        for name, (minuend, subtrahend) in contrasts.items():
            effects[f"{name}_{measure}"] = common.difference_of_means(
                groups, minuend, subtrahend, resamples
            )
    effects["end_level"] = bootstrap.statistic(
        {name: groups[name] for name in ("pe_to_end", "last")},  # of attention
        lambda means: means["pe_to_end"] / means["last"],
        resamples=resamples,
    )
    return effects


def attention_panel(axes: Axes, table: pd.DataFrame) -> None:
    """Attention to the gold item over its position, a line for each variant."""
    plot.bands(
        axes, table[table["measure"] == "attention"], "variant", CHANGE_LABELS, scale=1
    )
    first = int(table["retrieval_first"].iloc[0])
    last = int(table["retrieval_last"].iloc[0])
    plot.attention_axes(axes, plot.layer_title(range(first, last + 1)))


@plot.styled
def crop_figure(table: pd.DataFrame, layers: pd.DataFrame) -> Figure:
    """Score and attention over the gold position, change of attention by layer; a line for each variant."""
    counts = [*table["n"], *layers["n"]]
    figure, (left, middle, right) = plot.new_figure(plot.PAGE, 2.7, 1, 3, n=counts)
    metric = next(m for m in table["measure"].unique() if m != "attention")
    plot.bands(left, table[table["measure"] == metric], "variant", CHANGE_LABELS)
    plot.percent_axes(left, f"{metric.replace('_', ' ')} (%)")
    attention_panel(middle, table)
    first, last = layers[["crop_first", "crop_last"]].iloc[0]
    right.axvspan(
        first - 0.5,
        last + 0.5,
        color=plot.SHADE,
        linewidth=0,
        label="layers with a cropped mask",
    )
    right.axhline(0, color=plot.GUIDE, linewidth=0.6)
    changed = layers[layers["variant"] != UNMODIFIED]
    plot.bands(
        right, changed, "variant", CHANGE_LABELS, x="layer", name="change", scale=1
    )
    right.set(xlabel="layer", ylabel="change of that attention\n(inner positions)")
    right.locator_params("x", integer=True)
    right.ticklabel_format(axis="y", scilimits=(-3, 3))
    plot.add_legend_below(figure)
    return figure


@plot.styled
def crossed_figure(effects: pd.DataFrame) -> Figure:
    """Change of attention and score under each variant; lines at the unmodified model's ends."""
    rows = effects.set_index("effect")
    labels = CHANGE_LABELS | {name: c.label for name, c in CROSSED_CHANGES.items()}
    figure, panels = plot.new_figure(plot.PAGE, 2.4, 1, 2, n=effects["n"], sharey=True)
    variants = [variant for variant in labels if variant != UNMODIFIED]
    variants.sort(key=lambda variant: variant.endswith("other"))  # controls last
    for axes, measure in zip(panels, ("attention", "score"), strict=True):
        axes.axvline(0, color=plot.GUIDE, linewidth=0.6)
        for end, dashes in (("first", plot.DASHED), ("last", ":")):
            change = 100 * rows.loc[f"{end}_over_inner_{measure}", "value"]
            style = plot.UNMODIFIED_LINE | {"linestyle": dashes}
            axes.axvline(change, **style, label=f"unmodified, gold item {end}")
        for height, variant in enumerate(variants):
            row = rows.loc[[f"{variant}_{measure}"]]
            colour = plot.CONTROL_COLOUR if "other" in variant else plot.BLUE
            style = {"fmt": "o", "markersize": 3, "color": colour}
            plot.percent_bars(axes, [height], row, upright=False, **style)
    panels[0].set_xlabel("change of attention per token (points)")
    panels[1].set_xlabel("change of score (points)")
    panels[0].set_yticks(range(len(variants)), [labels[v] for v in variants])
    panels[0].invert_yaxis()
    plot.add_legend_below(figure)
    return figure
