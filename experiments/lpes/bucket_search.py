"""Bases for Attention Buckets from theory: attention waves whose troughs the peaks of other bases fill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import MinLen

from lpes.waves import choose_bases, extrema, rope_wave
from posbench.errors import UserError
from posbench.late import Figure, pd
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.schema import Count, Several, Whole, override_text
from posbench.stats.findings import Finding
from posbench.studies.base import Study, Tables

PUBLISHED_BASES = (10000.0, 17500.0, 18000.0, 19000.0, 20000.0, 25000.0)
"""The authors' list of bases for tool use."""


@dataclass(frozen=True, kw_only=True)
class BucketSearch(Study):
    """Whether the published bases come out of a greedy search on RoPE's waves, after Chen et al. 2023.

    Not a search of the pipeline: it finds nothing for a model, and the paper does not define a peak.

    Attributes:
        dim: Size of a head.
        distances: First and last distance in tokens.
        candidates: First and last base, and the step between two.
        first: The base to start from.
        count: Bases to choose, the first included.
        tolerance: Largest distance in tokens of a peak and a trough that cancel.
        reach: A peak is the largest score within ``reach`` tokens; the waves of the first value are written.
    """

    needs_model: ClassVar[bool] = False
    needs_task: ClassVar[bool] = False

    dim: Several = 128
    distances: tuple[Whole, Count] = (1000, 4090)
    candidates: tuple[Count, Count, Count] = (10000, 30000, 500)
    first: float = 10000.0
    count: Count = 6
    tolerance: Whole = 3
    reach: Annotated[tuple[Count, ...], MinLen(1)] = (250, 150, 200, 300, 400)

    def __post_init__(self) -> None:
        for field, (first, last, *_) in (
            ("distances", self.distances),
            ("candidates", self.candidates),
        ):
            if last <= first:
                value = list(getattr(self, field))
                allowed = "a last value above the first"
                default = list(getattr(type(self), field))
                hint = f"set study.{field}={override_text(default)}"
                raise UserError(f"study.{field}", value, allowed, hint)
        if self.first <= 0:
            allowed = "a base above 0"
            raise UserError("study.first", self.first, allowed, "set study.first=10000")
        if self.dim % 2:
            hint = f"set study.dim={self.dim + 1}"
            raise UserError("study.dim", self.dim, "an even number", hint)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``bases`` (reach, mean number of peaks and troughs, order, the fields of
        :class:`lpes.waves.ChosenBase`, published) and ``waves`` (step, base, distance, score, extremum)."""
        low, high, step = self.candidates
        candidates = sorted({self.first, *map(float, range(low, high + 1, step))})
        distance = np.arange(self.distances[0], self.distances[1] + 1)
        scores = {
            base: rope_wave(distance.astype(float), self.dim, base)
            for base in candidates
        }
        bases = []
        waves = []
        for reach in self.reach:
            peaks = {}
            troughs = {}
            for base, score in scores.items():
                peak_indices, trough_indices = extrema(score, reach)
                peaks[base] = distance[peak_indices]
                troughs[base] = distance[trough_indices]
            chosen = choose_bases(
                {base: (peaks[base], troughs[base]) for base in candidates},
                self.first,
                self.count,
                self.tolerance,
            )
            for order, choice in enumerate(chosen):
                row = {
                    "reach": reach,
                    "peaks": np.mean([len(p) for p in peaks.values()]),
                    "troughs": np.mean([len(t) for t in troughs.values()]),
                    "order": order,
                    **choice._asdict(),
                    "published": choice.base in PUBLISHED_BASES,
                }
                bases.append(row)
                is_peak = np.isin(distance, peaks[choice.base])
                is_trough = np.isin(distance, troughs[choice.base])
                columns = {
                    "step": order,
                    "base": choice.base,
                    "distance": distance,
                    "score": scores[choice.base],
                    "extremum": np.select([is_peak, is_trough], ["peak", "trough"], ""),
                }
                waves.append(pd.DataFrame(columns))
        waves_of_first_reach = waves[: len(waves) // len(self.reach)]
        return {"bases": pd.DataFrame(bases), "waves": pd.concat(waves_of_first_reach)}

    def figures(self, tables: Tables) -> Drawn:
        """The peaks and troughs of the chosen bases."""
        caption = f"Peaks and troughs of the chosen bases in their order, within {self.reach[0]} tokens each."
        return {"waves": (waves_figure(tables["waves"]), caption)}

    def findings(self, tables: Tables) -> list[Finding]:
        """Whether the published list comes out."""
        counts = tables["bases"].groupby("reach", sort=False)["published"].sum()
        num_published = len(PUBLISHED_BASES)
        by_reach = ", ".join(f"{count} with {reach}" for reach, count in counts.items())
        published = ", ".join(f"{base:g}" for base in PUBLISHED_BASES)
        finding = Finding.that(
            counts.max() == num_published,
            "Attention Buckets (Chen et al. 2023): peaks that fill troughs give the bases for tool use",
            "published bases among those chosen, for the reach of a peak that finds most",
            (counts.max(), num_published),
            f"{by_reach}; published: {published}",
        )
        num_chosen = tables["bases"].groupby("reach").size().max()
        if num_chosen < num_published:
            finding = finding.not_testable(
                f"{num_chosen} bases were chosen, {num_published} are published"
            )
        return [finding]


@plot.styled
def waves_figure(waves: pd.DataFrame) -> Figure:
    """Where the waves of the chosen bases have their peaks and troughs, a line for each base."""
    figure, axes = plot.new_figure(plot.PAGE, 2.4, n="exact")
    blue, vermilion = plot.COLOURS[:2]
    for extremum, marker, colour in (("peak", "^", vermilion), ("trough", "v", blue)):
        rows = waves[waves["extremum"] == extremum]
        axes.plot(rows["distance"], rows["step"], marker, color=colour, label=extremum)
    axes.set(xlabel="relative distance (tokens)", ylabel="base, in the order of choice")
    bases = waves.groupby("step")["base"].first()
    axes.set_yticks(bases.index, [f"{base:g}" for base in bases])
    axes.invert_yaxis()
    plot.add_legend_below(figure)
    return figure
