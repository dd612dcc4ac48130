"""Bases for Attention Buckets from theory: attention waves whose troughs the peaks of other bases fill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import MinLen

from posbench.late import Figure, pd
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.schema import Count, Several, Whole
from posbench.stats.findings import Finding
from posbench.studies.base import Study, Tables
from posbench.theory.waves import Step, choose, extrema, wave

PUBLISHED = (
    10000.0,
    17500.0,
    18000.0,
    19000.0,
    20000.0,
    25000.0,
)  # the authors' list for tool use


@dataclass(frozen=True, kw_only=True)
class BucketSearch(Study):
    """Whether the published bases come out of a greedy search on RoPE's waves, after Chen et al. 2023.

    No search of the pipeline: it finds nothing for a model, and what counts as a peak is not written down.

    Attributes:
        dim: Size of a head.
        distances: First and last distance in tokens.
        candidates: First and last base, and the step between two.
        first: The base to start from.
        count: Bases to choose, the first included.
        tolerance: Largest distance in tokens of a peak and a trough that cancel.
        reach: A peak is the largest score within so many tokens; the waves of the first value are written.
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

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``bases`` (reach, mean number of peaks and troughs, order, :class:`Step`, published) and
        ``waves`` (step, base, distance, score, extremum)."""
        distance, (low, high, step) = (
            np.arange(self.distances[0], self.distances[1] + 1),
            self.candidates,
        )
        candidates = sorted({self.first, *map(float, range(low, high + 1, step))})
        scores = {
            base: wave(distance.astype(float), self.dim, base) for base in candidates
        }
        rows = []
        parts = []
        for reach in self.reach:
            found = {
                base: [distance[at] for at in extrema(each, reach)]
                for base, each in scores.items()
            }
            extent = [
                np.mean([len(pair[side]) for pair in found.values()]) for side in (0, 1)
            ]
            for order, chosen in enumerate(
                choose(found, self.first, self.count, self.tolerance)
            ):
                rows.append((reach, *extent, order, *chosen, chosen.base in PUBLISHED))
                kind = np.select(
                    [np.isin(distance, at) for at in found[chosen.base]],
                    ["peak", "trough"],
                    "",
                )
                line = {
                    "distance": distance,
                    "score": scores[chosen.base],
                    "extremum": kind,
                }
                parts.append(pd.DataFrame({"step": order, "base": chosen.base, **line}))
        bases = pd.DataFrame(
            rows,
            columns=["reach", "peaks", "troughs", "order", *Step._fields, "published"],
        )
        return {
            "bases": bases,
            "waves": pd.concat(parts[: len(parts) // len(self.reach)]),
        }

    def figures(self, tables: Tables) -> Drawn:
        """The peaks and troughs of the chosen bases."""
        words = f"Peaks and troughs of the chosen bases in their order, within {self.reach[0]} tokens each."
        return {"waves": (waves_figure(tables["waves"]), words)}

    def findings(self, tables: Tables) -> list[Finding]:
        """Whether the published list comes out."""
        counts = tables["bases"].groupby("reach", sort=False)["published"].sum()
        n = len(PUBLISHED)
        told = ", ".join(f"{count} with {reach}" for reach, count in counts.items())
        claim = "Attention Buckets (Chen et al. 2023): peaks that fill troughs give the bases for tool use"
        size = "published bases among those chosen, for the reach of a peak that finds most"
        note = f"{told}; published: {', '.join(f'{base:g}' for base in PUBLISHED)}"
        return [Finding.that(counts.max() == n, claim, size, (counts.max(), n), note)]


@plot.styled
def waves_figure(waves: pd.DataFrame) -> Figure:
    """Where the waves of the chosen bases have their peaks and troughs, a line for each base."""
    (figure, axes), bases = (
        plot.new_figure(plot.PAGE, 2.4, n="exact"),
        waves.groupby("step")["base"].first(),
    )
    for kind, marker, colour in (
        ("peak", "^", plot.COLOURS[1]),
        ("trough", "v", plot.COLOURS[0]),
    ):
        at = waves[waves["extremum"] == kind]
        axes.plot(at["distance"], at["step"], marker, color=colour, label=kind)
    axes.set(xlabel="relative distance (tokens)", ylabel="base, in the order of choice")
    axes.set_yticks(bases.index, [f"{base:g}" for base in bases])
    axes.invert_yaxis()
    plot.legend_below(figure)
    return figure
