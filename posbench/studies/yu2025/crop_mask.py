"""Does what the causal mask wrote into the hidden states steer attention? The gold item is cropped, or its
positions moved."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from posbench.files.atomic import Row
from posbench.model.lm import LM
from posbench.perturbations import spans as perturb
from posbench.pipeline.config import Config
from posbench.plots.base import (
    ATTENTION_LABEL,
    PAGE,
    from_zero,
    layer_title,
    legend_below,
    line_style,
    new_figure,
    percent_axes,
    styled,
)
from posbench.run.base import UNMODIFIED, Run
from posbench.studies import perturbing
from posbench.studies.base import Finding, Study
from posbench.studies.perturbing import CROP, Array, Group, Prompts, Range
from posbench.tasks import Example

LABELS = {
    UNMODIFIED: "unmodified",
    "crop": "crop mask",
    "pe_to_beginning": "PE to beginning",
    "pe_to_end": "PE to end",
    "crop_other": "crop another item (control)",
}
MOVES = ("pe_to_beginning", "pe_to_end")
SOURCE = "Yu et al. 2025, Section 2.2, Figure 3"


@dataclass(frozen=True, kw_only=True)
class CropMask(Study):
    """Crop mask and moved position ids of the gold item, and what its attention and the accuracy do (Yu et
    al. 2025, Figure 3).

    Position ids are moved in all layers, for the rows of the last prompt token and of the generated ones; see
    :mod:`posbench.perturbations.spans`. Models without rotary embedding run without them.

    Source: Yu et al. 2025, Section 2.2, Appendix D.3, Figures 3, 8 and 9. The control, an item drawn at
        random, is ours.

    Attributes:
        layers: First and last layer with a cropped mask, 0-based; None: the paper's layers 2 to 8 of 32,
            counted from 1, or the same share of another depth, and none from the retrieval layers on.
            Appendix D.3 has 1 to 8: ``[0, 7]``.
        retrieval: Layers whose attention to the gold item is averaged; None: the paper's 15 to 20 of 32, or
            the same share; below 16 layers the one that attends to it most in the unmodified model.
        keep_first: Whether the cropped item still sees the prompt's first token (D.3: yes).
        examples: Prompts per gold position at most.
        seed: Seed of the control's items.
    """

    layers: Range | None = None
    retrieval: Range | None = None
    keep_first: bool = True
    examples: int = 100
    seed: int = 0

    def check(self, config: Config, lm: LM | None) -> None:
        """Refuse layers outside the model, tasks without gold items, and methods that leave no positions to
        move."""
        assert lm is not None
        perturbing.check_counts(examples=self.examples)
        perturbing.check_range(lm, "layers", self.layers)
        perturbing.check_range(lm, "retrieval", self.retrieval)
        perturbing.placed(config)
        with (
            config.trial().applied(lm),
            perturb.cropped(lm, [1], [(0, 0)], []),
            self._moved(lm, [1], [(0, 0)], [(0, 0)]),
        ):
            pass

    def _moved(self, lm: LM, *spans: Any) -> AbstractContextManager[None]:
        return perturb.moved(lm, *spans) if perturb.can_move(lm) else nullcontext()

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``crop_mask`` (by variant and gold position), ``crop_mask_layers`` and
        ``crop_mask_effects``."""
        lm = run.lm
        position = lambda e: e.gold_position or 0  # noqa: E731
        sorted_ = sorted(perturbing.placed(run.config), key=position)
        prompts = Prompts.of(
            run, [e for _, group in groupby(sorted_, position) for e in list(group)[: self.examples]]
        )

        def block_of(variant: str) -> Callable[[Sequence[Example]], AbstractContextManager[None]]:
            def block(batch: Sequence[Example]) -> AbstractContextManager[None]:
                lengths, items = prompts.lengths(batch), [prompts.tokens[e.id] for e in batch]
                gold = [spans[position(e)] for spans, e in zip(items, batch, strict=True)]
                if variant == "crop":
                    return perturb.cropped(lm, lengths, gold, _layers(cropped), keep_first=self.keep_first)
                if variant == "crop_other":
                    other = [spans[self._other(e)] for spans, e in zip(items, batch, strict=True)]
                    return perturb.cropped(lm, lengths, other, _layers(cropped), keep_first=self.keep_first)
                if variant in MOVES:
                    return perturb.moved(
                        lm, lengths, gold, [spans[0 if variant == MOVES[0] else -1] for spans in items]
                    )
                return nullcontext()

            return block

        def rows(batch: Sequence[Example], attention: Array) -> list[Row]:
            gold = [layers[:, position(e)] for layers, e in zip(attention, batch, strict=True)]
            return [{"attention": [float(f"{x:.6g}") for x in values]} for values in gold]

        measured: dict[str, dict[str, Row]] = {}
        retrieval = cropped = (0, 0)
        for variant in [v for v in LABELS if v not in MOVES or perturb.can_move(lm)]:
            measured[variant] = {row["id"]: row for row in prompts.measure(variant, block_of(variant), rows)}
            if variant == UNMODIFIED:
                every = np.array([row["attention"] for row in measured[variant].values()])
                retrieval = perturbing.retrieval_layers(self.retrieval, list(every.mean(0)))
                first, last = perturbing.share(CROP, lm.layers)
                cropped = self.layers or (first, max(min(last, retrieval[0] - 1), first))
        frame = _frame(measured, prompts.examples, retrieval)
        resamples = run.config.runtime.resamples
        settings = {
            "crop_first": cropped[0],
            "crop_last": cropped[1],
            "retrieval_first": retrieval[0],
            "retrieval_last": retrieval[1],
        }
        return {
            "crop_mask": _by_position(frame, run.config.task.metric, resamples).assign(**settings),
            "crop_mask_layers": _by_layer(measured, prompts.examples, resamples).assign(**settings),
            "crop_mask_effects": _effects(frame, resamples),
        }

    def _other(self, example: Example) -> int:
        """An item of the prompt that is not the gold one, drawn by example."""
        others = [i for i in range(len(example.items)) if i != example.gold_position]
        return random.Random(f"posbench crop_mask {self.seed} {example.id}").choice(others)

    def figures(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[Figure, str]]:
        """Accuracy and attention over the gold position, and the change of attention in every layer."""
        caption = (
            "Score, and attention of the last token to the gold item, over its position, with 95 % intervals; right: change of "
            "that attention in every layer, mean over inner gold positions (shaded: layers with a cropped mask)."
        )
        return {"crop_mask": (crop_figure(tables["crop_mask"], tables["crop_mask_layers"]), caption)}

    def findings(self, tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        """Claim C2: hidden states carry positional information of their own."""
        table = tables["crop_mask"].iloc[0]
        where = perturbing.named(table["retrieval_first"], table["retrieval_last"])
        note = f"mask cropped in {perturbing.named(table['crop_first'], table['crop_last'])}"
        effects = tables["crop_mask_effects"].set_index("effect")
        claims = [
            (
                "crop_attention",
                f"C2: the crop mask raises attention to the gold item in later, unmodified layers ({SOURCE})",
                f"change of the attention per token to the gold item in {where}, mean over inner gold positions",
                0.0,
            ),
            (
                "crop_level",
                f"C2: the crop mask brings that attention nearly to its level at the beginning ({SOURCE})",
                f"attention in {where} at inner positions under the crop mask, as a share of that of the unmodified model at the "
                "first position; holds from 0.8 up",
                0.8,
            ),
            (
                "crop_score",
                f"C2: the crop mask raises the accuracy ({SOURCE})",
                "change of the score, mean over inner gold positions",
                0.0,
            ),
            (
                "crop_over_moves",
                f"C2: moved position ids raise attention less than the crop mask ({SOURCE})",
                f"change under the crop mask minus the larger change under PE to beginning or end, {where}, inner positions",
                0.0,
            ),
            (
                "beginning_late_attention",
                f"C2: PE to beginning lowers attention to a gold item close to the end ({SOURCE})",
                f"fall of the attention in {where} under PE to beginning, last third of the gold positions",
                0.0,
            ),
            (
                "beginning_late_score",
                f"C2: PE to beginning lowers the accuracy of a gold item close to the end ({SOURCE})",
                "fall of the score under PE to beginning, last third of the gold positions",
                0.0,
            ),
            (
                "crop_over_other",
                "Control: cropping another item does not do it",
                f"change under the crop mask of the gold item minus that of another item, {where}, inner positions",
                0.0,
            ),
        ]
        found = []
        for name, claim, statistic, bound in claims:
            row = effects.loc[name] if name in effects.index else None
            if row is None:
                text = (
                    "the model has no rotary embedding in attention that runs through the library's functions"
                )
                found.append(
                    Finding(
                        claim=claim,
                        statistic=statistic,
                        value=np.nan,
                        n=0,
                        verdict="not testable here",
                        note=text,
                    )
                )
                continue
            others = [
                f"{key} {effects.at[key, 'value']:.3g}"
                for key in CONTEXT.get(name, ())
                if key in effects.index
            ]
            found.append(
                Finding(
                    claim=claim,
                    statistic=statistic,
                    value=row["value"],
                    low=row["low"],
                    high=row["high"],
                    n=int(row["n"]),
                    verdict=perturbing.verdict(row["low"], bound),
                    note="; ".join([note, *others]),
                )
            )
        return found


CONTEXT = {
    "crop_attention": ("unmodified_inner", "unmodified_first"),
    "crop_over_moves": ("pe_to_beginning_attention", "pe_to_end_attention"),
    "crop_over_other": ("crop_other_attention",),
}
"""Further effects that a finding's note quotes."""


def _layers(inclusive: Range) -> range:
    return range(inclusive[0], inclusive[1] + 1)


def _frame(
    measured: Mapping[str, Mapping[str, Row]], examples: Sequence[Example], retrieval: Range
) -> pd.DataFrame:
    """One row per variant and prompt: position, items, cluster, score, attention in the retrieval layers."""
    return pd.DataFrame(
        [
            {
                "variant": variant,
                "id": e.id,
                "position": e.gold_position,
                "items": len(e.items),
                "cluster": e.cluster or e.id,
                "score": rows[e.id]["score"],
                "attention": float(np.mean(rows[e.id]["attention"][retrieval[0] : retrieval[1] + 1])),
            }
            for variant, rows in measured.items()
            for e in examples
        ]
    )


def _by_position(frame: pd.DataFrame, metric: str, resamples: int) -> pd.DataFrame:
    """Variant, position, depth, measure, value, low, high, change, change_low, change_high, n."""
    base = frame[frame["variant"] == UNMODIFIED].set_index("id")
    out = []
    for measure in ("score", "attention"):
        for (variant, position), group in frame.groupby(["variant", "position"], sort=False):
            clusters, values = list(group["cluster"]), group[measure].to_numpy()
            change = values - base.loc[group["id"], measure].to_numpy()
            value, low, high = perturbing.mean_of(list(values), clusters, resamples)
            moved = perturbing.change_of(list(change), clusters, resamples)
            depth = position / (group["items"].iloc[0] - 1)
            name = metric if measure == "score" else measure
            out.append((variant, position, depth, name, value, low, high, *moved, len(group)))
    columns = [
        "variant",
        "position",
        "depth",
        "measure",
        "value",
        "low",
        "high",
        "change",
        "change_low",
        "change_high",
        "n",
    ]
    return pd.DataFrame(out, columns=columns)


def _inner(positions: Sequence[int]) -> set[int]:
    """The positions between the first and the last one; all where there are none between."""
    ordered = sorted(set(positions))
    return set(ordered[1:-1] or ordered)


def _by_layer(
    measured: Mapping[str, Mapping[str, Row]], examples: Sequence[Example], resamples: int
) -> pd.DataFrame:
    """Variant, layer, attention, change, low, high, n: means over the inner gold positions."""
    inner = _inner([e.gold_position or 0 for e in examples])
    chosen = [e for e in examples if e.gold_position in inner]
    clusters = [e.cluster or e.id for e in chosen]
    base = np.array([measured[UNMODIFIED][e.id]["attention"] for e in chosen])
    out = []
    for variant, rows in measured.items():
        values = np.array([rows[e.id]["attention"] for e in chosen])
        for layer, change in enumerate((values - base).T):
            estimate = perturbing.change_of(list(change), clusters, resamples)
            out.append((variant, layer, values[:, layer].mean(), *estimate, len(chosen)))
    return pd.DataFrame(out, columns=["variant", "layer", "attention", "change", "low", "high", "n"])


def _effects(frame: pd.DataFrame, resamples: int) -> pd.DataFrame:
    """The numbers behind the verdicts."""
    positions = sorted(frame["position"].unique())
    inner, late = _inner(positions), [p for p in positions if 3 * p >= 2 * (frame["items"].iloc[0] - 1)]

    def group(variant: str, measure: str, where: Sequence[int] | set[int]) -> Group:
        rows = frame[(frame["variant"] == variant) & frame["position"].isin(where)]
        return list(rows[measure]), list(rows["cluster"])

    out: dict[str, tuple[tuple[float, float, float], int]] = {}

    def add(
        name: str, groups: Mapping[str, Group], statistic: Callable[[Mapping[str, Array]], Array]
    ) -> None:
        out[name] = (
            perturbing.interval(groups, statistic, resamples=resamples),
            len(next(iter(groups.values()))[0]),
        )

    here = [v for v in LABELS if v in set(frame["variant"])]
    attention = {v: group(v, "attention", inner) for v in here}
    first = {**attention, "first": group(UNMODIFIED, "attention", positions[:1])}
    add("unmodified_inner", attention, lambda m: m[UNMODIFIED])
    add("unmodified_first", {"first": first["first"]}, lambda m: m["first"])
    for variant in here[1:]:
        add(f"{variant}_attention", attention, lambda m, v=variant: m[v] - m[UNMODIFIED])  # type: ignore[misc]
        scores = {v: group(v, "score", inner) for v in (variant, UNMODIFIED)}
        add(f"{variant}_score", scores, lambda m, v=variant: m[v] - m[UNMODIFIED])  # type: ignore[misc]
    add("crop_level", first, lambda m: m["crop"] / m["first"])
    add("crop_over_other", attention, lambda m: m["crop"] - m["crop_other"])
    if MOVES[0] in here:
        add("crop_over_moves", attention, lambda m: m["crop"] - np.maximum(m[MOVES[0]], m[MOVES[1]]))
        for measure in ("attention", "score"):
            groups = {v: group(v, measure, late) for v in (MOVES[0], UNMODIFIED)}
            add(f"beginning_late_{measure}", groups, lambda m: m[UNMODIFIED] - m[MOVES[0]])
    return perturbing.effects_table(out)


@styled
def crop_figure(table: pd.DataFrame, layers: pd.DataFrame) -> Figure:
    """Score and attention over the gold position, one line per variant, and the change of attention by
    layer."""
    figure = new_figure(PAGE, 2.7)
    left, middle, right = figure.subplots(1, 3)
    measures = [m for m in table["measure"].unique() if m != "attention"] + ["attention"]
    first = table.iloc[0]
    for axes, measure, share in ((left, measures[0], 100), (middle, "attention", 1)):
        for index, variant in enumerate(LABELS):
            rows = table[(table["variant"] == variant) & (table["measure"] == measure)].sort_values("depth")
            if rows.empty:
                continue
            style = line_style(index - 1, variant == UNMODIFIED)
            axes.plot(100 * rows["depth"], share * rows["value"], label=LABELS[variant], **style)
            band = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
            axes.fill_between(100 * rows["depth"], share * rows["low"], share * rows["high"], **band)
    percent_axes(left, f"{measures[0].replace('_', ' ')} (%)")
    chosen = list(range(int(first["retrieval_first"]), int(first["retrieval_last"]) + 1))
    middle.set(xlabel=left.get_xlabel(), ylabel=ATTENTION_LABEL, title=layer_title(chosen, False))
    from_zero(middle)
    right.axvspan(first["crop_first"] - 0.5, first["crop_last"] + 0.5, color="0.9", linewidth=0)
    right.axhline(0, color="black", linewidth=0.6)
    for index, variant in enumerate(LABELS):
        rows, style = layers[layers["variant"] == variant], line_style(index - 1)
        if variant != UNMODIFIED and len(rows):
            right.plot(rows["layer"], rows["change"], **style)
            right.fill_between(
                rows["layer"], rows["low"], rows["high"], color=style["color"], alpha=0.15, linewidth=0
            )
    right.set(xlabel="layer", ylabel="change of that attention\n(inner positions)")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.ticklabel_format(axis="y", scilimits=(-3, 3))
    legend_below(figure, left)
    return figure
