"""Does what the mask wrote into the hidden states steer attention? The gold item is cropped, or moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.late import Axes, Figure, pd
from posbench.methods.scale_channel import check_layers, share
from posbench.perturbations.crop_mask import crop_mask
from posbench.perturbations.move_positions import can_move, move_positions
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.cost import InspectionPasses
from posbench.schema import Count, Seed
from posbench.stats import bootstrap
from posbench.stats.findings import Finding, ends
from posbench.stats.frames import UNMODIFIED
from posbench.studies import prompts as shared
from posbench.studies.base import Study, Tables
from posbench.studies.prompts import Block, Measured, Prompts, Range, gold
from posbench.tasks import Example
from posbench.tasks.items import placed

LABELS = {
    UNMODIFIED: "unmodified",
    "crop": "crop mask",
    "pe_to_beginning": "PE to beginning",
    "pe_to_end": "PE to end",
    "crop_other": "crop another (control)",
}
CROSSED = {
    "crop_pe_to_beginning": "crop mask and PE to beginning",
    "crop_pe_to_end": "crop mask and PE to end",
    "pe_to_end_other": "PE of another to end (control)",
}
MOVES = ("pe_to_beginning", "pe_to_end")
NO_LATE = "no gold position lies in the last third of the items"


@dataclass(frozen=True, kw_only=True)
class CropMask(Study):
    """Crop mask and moved position ids of the gold item, and what its attention and the accuracy do.

    Position ids are moved in all layers (:mod:`posbench.perturbations.move_positions`), but not in models
    without rotary embedding.

    Source: Yu et al. 2025, Section 2.2, Appendix D.3, Figures 3, 8 and 9. Controls and ``crossed`` are ours.
    """

    # First and last layer with a cropped mask; None: the paper's 2 to 8 of 32, counted from 1 (D.3: 1 to 8),
    # or that share, and none from the retrieval layers on.
    layers: tuple[int, int] | None = None
    retrieval: tuple[int, int] | None = None  # averaged; None: see retrieval_layers
    keep_first: bool = True  # whether the cropped item sees the prompt's first token (Appendix D.3: yes)
    crossed: bool = False  # also mask and position ids together, and moved ids of another item (control)
    examples: Count = 100  # of each gold position at most
    seed: Seed = 0  # of the controls' items

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        check_layers(run.lm, "study.layers", self.layers)
        check_layers(run.lm, "study.retrieval", self.retrieval)
        shared.check_prompts(run)
        if self.crossed and not can_move(run.lm):
            allowed = f"false here: {shared.NO_ROPE}"
            raise UserError(
                "study.crossed",
                True,
                allowed,
                "set study.crossed=false, or take model=tiny",
            )
        nothing = [1], [(0, 0)]
        moved = (
            move_positions(run.lm, *nothing, nothing[1])
            if can_move(run.lm)
            else nullcontext()
        )
        with run.method.trial().applied(run.lm), crop_mask(run.lm, *nothing, []), moved:
            pass

    def reads(self, run: Run) -> list[InspectionPasses]:
        """See :meth:`Study.reads`."""
        variants = len(LABELS) + self.crossed * len(CROSSED)
        return [
            InspectionPasses(
                placed(shared.need_items(run.task), self.examples), variants, variants
            )
        ]

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``crop_mask`` (by variant, gold position), ``crop_mask_layers``, ``crop_mask_effects``."""
        prompts = Prompts.of(run, self.examples)
        measured: dict[str, dict[str, Row]] = {}
        retrieval = cropped = (0, 0)
        variants = [*LABELS, *(CROSSED if self.crossed else ())]
        for variant in [v for v in variants if "pe_to" not in v or can_move(run.lm)]:
            block = self._block(prompts, variant, cropped)
            measured[variant] = prompts.under(variant, block, shared.gold_attention)
            if variant == UNMODIFIED:
                every = np.array(
                    [row["attention"] for row in measured[variant].values()]
                )
                retrieval = shared.retrieval_layers(self.retrieval, every.mean(0))
                first, last = share(shared.CROP, run.lm.layers)
                cropped = self.layers or (
                    first,
                    max(min(last, retrieval[0] - 1), first),
                )
        parts = [
            prompts.results(rows, retrieval).assign(variant=v)
            for v, rows in measured.items()
        ]
        frame = pd.concat(parts)
        resamples = run.runtime.resamples
        layers = {"crop_first": cropped[0], "crop_last": cropped[1]}
        layers |= {"retrieval_first": retrieval[0], "retrieval_last": retrieval[1]}
        placed = _by_position(frame, run.task.metric).assign(**layers)
        by_layer = _by_layer(measured, prompts.examples).assign(**layers)
        effects = _effects(frame, resamples)
        return {
            "crop_mask": placed,
            "crop_mask_layers": by_layer,
            "crop_mask_effects": effects,
        }

    def _block(self, prompts: Prompts, variant: str, cropped: Range) -> Block:
        """What a variant does to a batch."""
        lm = prompts.run.lm
        layers = range(cropped[0], cropped[1] + 1)
        other = lambda e: shared.other_item(e, "crop_mask", self.seed)  # noqa: E731
        end = 0 if variant.endswith("beginning") else -1

        @contextmanager
        def block(batch: Sequence[Example]) -> Iterator[None]:
            lengths = prompts.lengths(batch)
            spans = prompts.spans(batch, other if variant.endswith("other") else gold)
            with ExitStack() as stack:
                if variant.startswith("crop"):
                    stack.enter_context(
                        crop_mask(
                            lm, lengths, spans, layers, keep_first=self.keep_first
                        )
                    )
                if "pe_to" in variant:
                    target = prompts.spans(batch, lambda e: end)
                    stack.enter_context(move_positions(lm, lengths, spans, target))
                yield

        return block

    def figures(self, tables: Tables) -> Drawn:
        """See :meth:`Study.figures`."""
        caption = "Score and attention, and change of attention by layer, with 95 % intervals."
        drawn = {
            "crop_mask": (
                crop_figure(tables["crop_mask"], tables["crop_mask_layers"]),
                caption,
            )
        }
        if _is_crossed(tables):
            caption = "Change at the inner gold positions (95 %); lines: what the first and last one have."
            drawn["crop_mask_crossed"] = (
                crossed_figure(tables["crop_mask_effects"]),
                caption,
            )
        return drawn

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Claim C2: hidden states carry positional information of their own."""
        table = tables["crop_mask"].iloc[0]
        where = shared.named(table["retrieval_first"], table["retrieval_last"])
        note = (
            f"mask cropped in {shared.named(table['crop_first'], table['crop_last'])}"
        )
        studies = (
            "crop_mask",
            *(("crop_mask_crossed",) if _is_crossed(tables) else ()),
        )
        effects = tables["crop_mask_effects"]
        missing = (
            NO_LATE if "crop_over_moves" in set(effects["effect"]) else shared.NO_ROPE
        )
        told = {"missing": missing, "layers": where}
        return [
            found
            for study in studies
            for found in shared.judged(effects, study, note, **told)
        ]


def _is_crossed(tables: Tables) -> bool:
    """Whether the run put mask and position ids together."""
    return "crop_pe_to_end_attention" in set(tables["crop_mask_effects"]["effect"])


def _by_position(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Rows of variant, gold_position, depth, measure, value and change (each with its interval), n."""
    base = frame[frame["variant"] == UNMODIFIED].set_index("id")
    out = []
    by = ["variant", "gold_position", "depth"]
    for measure, name in (("score", metric), ("attention", "attention")):
        for place, rows in frame.groupby(by, sort=False):
            clusters = list(rows["cluster"])
            values = rows[measure].to_numpy()
            before = base.loc[rows["id"], measure].to_numpy()
            value = bootstrap.mean(values, clusters)
            scored = measure == "score" and place[0] != UNMODIFIED
            pair = (
                bootstrap.paired
                if scored
                else lambda a, b, asked: bootstrap.difference(a - b, asked)
            )
            change = pair(values, before, clusters)
            where = {**dict(zip(by, place, strict=True)), "measure": name}
            out.append(where | ends(value) | ends(change, "change") | {"n": len(rows)})
    return pd.DataFrame(out)


def _inner(positions: Sequence[int]) -> set[int]:
    """The positions between the first and the last one; all where there are none between."""
    ordered = sorted(set(positions))
    return set(ordered[1:-1] or ordered)


def _by_layer(measured: Measured, examples: Sequence[Example]) -> pd.DataFrame:
    """Rows of variant, layer, attention, change with its interval, n: means over the inner gold positions."""
    inner = _inner([gold(e) for e in examples])
    chosen = [e for e in examples if e.gold_position in inner]
    clusters = [e.cluster or e.id for e in chosen]
    base = np.array([measured[UNMODIFIED][e.id]["attention"] for e in chosen])
    out = []
    for variant, rows in measured.items():
        values = np.array([rows[e.id]["attention"] for e in chosen])
        for layer, change in enumerate((values - base).T):
            at = bootstrap.difference(change, clusters)
            mean = {
                "variant": variant,
                "layer": layer,
                "attention": values[:, layer].mean(),
            }
            out.append({**mean, **ends(at, "change"), "n": at.n})
    return pd.DataFrame(out)


def _effects(frame: pd.DataFrame, resamples: int) -> pd.DataFrame:
    """The numbers behind the verdicts."""
    positions = sorted(frame["gold_position"].unique())
    inner = _inner(positions)
    late = [p for p in positions if 3 * p >= 2 * (frame["items"].iloc[0] - 1)]

    def group(variant: str, measure: str, where: Iterable[int]) -> bootstrap.Group:
        rows = frame[(frame["variant"] == variant) & frame["gold_position"].isin(where)]
        return shared.group(rows, measure)

    here = list(frame["variant"].unique())
    attention, scores = (
        {v: group(v, measure, inner) for v in here}
        for measure in ("attention", "score")
    )
    first = {"first": group(UNMODIFIED, "attention", positions[:1])}
    ratio = lambda m: m["crop"] / m["first"]  # noqa: E731
    out = {
        "unmodified_inner": bootstrap.statistic(
            attention, lambda m: m[UNMODIFIED], resamples=resamples
        ),
        "unmodified_first": bootstrap.statistic(
            first, lambda m: m["first"], resamples=resamples
        ),
    }
    for variant in here[1:]:
        out[f"{variant}_attention"] = shared.minus(
            attention, variant, UNMODIFIED, resamples
        )
        out[f"{variant}_score"] = shared.minus(scores, variant, UNMODIFIED, resamples)
    out["crop_level"] = bootstrap.statistic(
        attention | first, ratio, resamples=resamples
    )
    out["crop_over_other"] = shared.minus(attention, "crop", "crop_other", resamples)
    if MOVES[0] in here:
        over = lambda m: m["crop"] - np.maximum(m[MOVES[0]], m[MOVES[1]])  # noqa: E731
        out["crop_over_moves"] = bootstrap.statistic(
            attention, over, resamples=resamples
        )
        for measure in ("attention", "score") if late else ():
            groups = {v: group(v, measure, late) for v in (UNMODIFIED, MOVES[0])}
            out[f"beginning_late_{measure}"] = shared.minus(
                groups, UNMODIFIED, MOVES[0], resamples
            )
    if "crop_pe_to_end" in here:
        out |= _crossed(group, positions, inner, resamples)
    return shared.effects_table(out)


def _crossed(
    group: Callable[[str, str, Iterable[int]], bootstrap.Group],
    positions: Sequence[int],
    inner: Iterable[int],
    resamples: int,
) -> dict[str, bootstrap.Estimate]:
    """Mask and position ids together at the inner positions, and the unmodified model's ends over them."""
    both = "crop_pe_to_end"
    ends_at = {"first": positions[:1], "last": positions[-1:]}
    contrasts = {
        "mask_beyond_ids": (both, "pe_to_end"),
        "ids_beyond_mask": (both, "crop"),
        "end_over_other": ("pe_to_end", "pe_to_end_other"),
        "first_over_inner": ("first", UNMODIFIED),
        "last_over_inner": ("last", UNMODIFIED),
        "last_over_end": ("last", "pe_to_end"),
    }
    out = dict[str, bootstrap.Estimate]()
    for measure in ("score", "attention"):
        names = dict.fromkeys(name for pair in contrasts.values() for name in pair)
        at = {
            n: group(UNMODIFIED if n in ends_at else n, measure, ends_at.get(n, inner))
            for n in names
        }
        for name, (one, other) in contrasts.items():
            out[f"{name}_{measure}"] = shared.minus(at, one, other, resamples)
    level = {name: at[name] for name in ("pe_to_end", "last")}
    out["end_level"] = bootstrap.statistic(
        level, lambda m: m["pe_to_end"] / m["last"], resamples=resamples
    )
    return out


def attention_panel(axes: Axes, table: pd.DataFrame) -> None:
    """Attention to the gold item over its position, a line for each variant."""
    plot.bands(axes, table[table["measure"] == "attention"], "variant", LABELS, scale=1)
    first = int(table["retrieval_first"].iloc[0])
    last = int(table["retrieval_last"].iloc[0])
    plot.attention_axes(axes, plot.layer_title(range(first, last + 1), False))


@plot.styled
def crop_figure(table: pd.DataFrame, layers: pd.DataFrame) -> Figure:
    """Score and attention over the gold position, change of attention by layer; a line for each variant."""
    counts = [*table["n"], *layers["n"]]
    figure, (left, middle, right) = plot.new_figure(plot.PAGE, 2.7, 1, 3, n=counts)
    metric = next(m for m in table["measure"].unique() if m != "attention")
    plot.bands(left, table[table["measure"] == metric], "variant", LABELS)
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
    plot.bands(right, changed, "variant", LABELS, x="layer", name="change", scale=1)
    right.set(xlabel="layer", ylabel="change of that attention\n(inner positions)")
    right.locator_params("x", integer=True)
    right.ticklabel_format(axis="y", scilimits=(-3, 3))
    plot.legend_below(figure)
    return figure


@plot.styled
def crossed_figure(effects: pd.DataFrame) -> Figure:
    """Change of attention and score under each variant; lines where the unmodified model's ends stand."""
    rows = effects.set_index("effect")
    labels = LABELS | CROSSED
    figure, panels = plot.new_figure(plot.PAGE, 2.4, 1, 2, n=effects["n"], sharey=True)
    shown = sorted(
        (v for v in labels if v != UNMODIFIED), key=lambda v: v.endswith("other")
    )
    for axes, measure in zip(panels, ("attention", "score"), strict=True):
        axes.axvline(0, color=plot.GUIDE, linewidth=0.6)
        for dashes, end in zip((plot.DASHED, ":"), ("first", "last"), strict=True):
            at = 100 * rows.loc[f"{end}_over_inner_{measure}", "value"]
            axes.axvline(
                at,
                **plot.LEVEL | {"linestyle": dashes},
                label=f"unmodified, gold item {end}",
            )
        for number, variant in enumerate(shown):
            found = rows.loc[[f"{variant}_{measure}"]]
            colour = (plot.BLUE, plot.CONTROL)["other" in variant]
            style = {"fmt": "o", "markersize": 3, "color": colour}
            plot.percent_bars(axes, [number], found, upright=False, **style)
    panels[0].set_xlabel("change of attention per token (points)")
    panels[1].set_xlabel("change of score (points)")
    panels[0].set_yticks(range(len(shown)), [labels[v] for v in shown])
    panels[0].invert_yaxis()
    plot.legend_below(figure)
    return figure
