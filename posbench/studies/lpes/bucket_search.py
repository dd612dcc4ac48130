"""Bases for Attention Buckets from theory alone: attention waves whose troughs the peaks of other bases fill.

``make bucket-search``, or ``python -m posbench.studies.lpes.bucket_search --help``. No model runs. The
published list (10000, 17500, 18000, 19000, 20000, 25000) comes out in part only: what counts as a peak is not
written down, and the choice depends on it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.signal import argrelextrema

from posbench.files.atomic import write_csv
from posbench.studies.lpes.rope_curves import wave

PUBLISHED = (10000.0, 17500.0, 18000.0, 19000.0, 20000.0, 25000.0)
"""The authors' list for tool use."""

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """One base of the search, in the order of choice.

    Attributes:
        base: Theta of the rotary embedding.
        coincidences: Its peaks near troughs, and troughs near peaks, that the set before it had left over.
        offset: Mean squared distance of these pairs in tokens; NaN without any.
    """

    base: float
    coincidences: int
    offset: float


def extrema(scores: NDArray[np.float64], reach: int) -> tuple[Positions, Positions]:
    """Indices of peaks and troughs of a curve's envelope: the largest and smallest value within ``reach`` on
    both sides.

    A place nearer to an end of the curve than that is compared with what there is; the ends themselves are
    neither.
    """
    return argrelextrema(scores, np.greater, order=reach)[0], argrelextrema(scores, np.less, order=reach)[0]


def choose(
    found: Mapping[float, tuple[Positions, Positions]], first: float, count: int, tolerance: int = 3
) -> list[Step]:
    """Greedy choice of bases whose peaks stand where the chosen ones have troughs, and the other way round.

    A pair within ``tolerance`` cancels: neither counts for later bases. Ties go to the smaller mean squared
    offset, then to the smaller base.

    Args:
        found: Peaks and troughs per candidate, in tokens.
        first: The base to start from, one of the candidates.
        count: Bases to choose, the first included.
        tolerance: Largest distance of a pair in tokens.

    Returns:
        At most ``count`` steps; the first one has no coincidences.

    Source: Attention Buckets (Chen et al. 2023), base search, after its released program.
    """
    steps = [Step(first, 0, float("nan"))]
    open_peaks, open_troughs = (set(part.tolist()) for part in found[first])
    while len(steps) < min(count, len(found)):
        tried = []
        for base in sorted(set(found) - {step.base for step in steps}):
            peaks, troughs = found[base]
            pairs = [*_pairs(peaks, open_troughs, tolerance), *_pairs(troughs, open_peaks, tolerance)]
            offset = float(np.mean([(a - b) ** 2 for a, b in pairs])) if pairs else float("nan")
            tried.append(Step(base, len(pairs), offset))
        best = min(
            tried, key=lambda step: (-step.coincidences, np.nan_to_num(step.offset, nan=np.inf), step.base)
        )
        peaks, troughs = found[best.base]
        filled, emptied = _pairs(peaks, open_troughs, tolerance), _pairs(troughs, open_peaks, tolerance)
        # In this order: a pair is a new extremum and an open one, and both are gone.
        open_troughs = (open_troughs - {b for _, b in filled}) | (
            set(troughs.tolist()) - {a for a, _ in emptied}
        )
        open_peaks = (open_peaks - {b for _, b in emptied}) | (set(peaks.tolist()) - {a for a, _ in filled})
        steps.append(best)
    return steps


def _pairs(new: Positions, there: set[int], tolerance: int) -> list[tuple[int, int]]:
    """Each new position with the nearest one that is there and within reach; each of these is used once."""
    free, pairs = set(there), []
    for position in new.tolist():
        nearest = min(free, key=lambda other: (abs(other - position), other), default=None)
        if nearest is not None and abs(nearest - position) <= tolerance:
            free.remove(nearest)
            pairs.append((position, nearest))
    return pairs


def curves(
    distance: Positions, found: Mapping[float, tuple[Positions, Positions]], steps: Sequence[Step], dim: int
) -> pd.DataFrame:
    """The waves of the chosen bases, to draw: rows of step, base, distance, score, and extremum (peak, trough
    or nothing)."""
    parts = []
    for number, step in enumerate(steps):
        kind = np.full(len(distance), "", dtype=object)
        for name, positions in zip(("peak", "trough"), found[step.base], strict=True):
            kind[np.isin(distance, positions)] = name
        score = wave(distance.astype(float), dim, step.base)
        parts.append(
            pd.DataFrame(
                {"step": number, "base": step.base, "distance": distance, "score": score, "extremum": kind}
            )
        )
    return pd.concat(parts, ignore_index=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Search, print the bases per definition of a peak, and write the waves of the chosen ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=128, help="size of a head")
    parser.add_argument("--distances", type=int, nargs=2, default=(1000, 4090), metavar=("FIRST", "LAST"))
    parser.add_argument(
        "--candidates", type=int, nargs=3, default=(10000, 30000, 500), metavar=("FIRST", "LAST", "STEP")
    )
    parser.add_argument("--first", type=float, default=10000.0, help="the base to start from")
    parser.add_argument("--count", type=int, default=6, help="bases to choose")
    parser.add_argument(
        "--tolerance", type=int, default=3, help="largest distance of a peak and a trough that cancel"
    )
    parser.add_argument(
        "--reach",
        type=int,
        nargs="+",
        default=[250, 150, 200, 300, 400],
        help="a peak is the largest score within so many tokens; the waves of the first value are written",
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/bucket_search"))
    options = parser.parse_args(argv)
    distance = np.arange(options.distances[0], options.distances[1] + 1)
    low, high, step = options.candidates
    bases = [float(base) for base in range(low, high + 1, step)]
    if options.first not in bases:
        parser.error(f"--first {options.first:g} is none of the candidates")
    waves = {base: wave(distance.astype(float), options.dim, base) for base in bases}
    table = Table(
        "reach",
        "peaks and troughs per base",
        "bases in the order of choice (coincidences)",
        "of the published list",
    )
    for number, reach in enumerate(options.reach):
        places = {base: extrema(scores, reach) for base, scores in waves.items()}
        found = {base: (distance[peaks], distance[troughs]) for base, (peaks, troughs) in places.items()}
        steps = choose(found, options.first, options.count, options.tolerance)
        extent = [float(np.mean([len(pair[side]) for pair in found.values()])) for side in (0, 1)]
        chosen = ", ".join(f"{s.base:g} ({s.coincidences})" for s in steps)
        same = [s.base for s in steps if s.base in PUBLISHED]
        table.add_row(
            str(reach),
            " and ".join(f"{n:.1f}" for n in extent),
            chosen,
            f"{len(same)} of {len(PUBLISHED)}: {', '.join(f'{base:g}' for base in same)}",
        )
        if not number:
            frame = curves(distance, found, steps, options.dim)
            options.out.mkdir(parents=True, exist_ok=True)
            write_csv(options.out / "waves.csv", frame)
    console = Console()
    console.print(table)
    console.print(
        f"published: {', '.join(f'{base:g}' for base in PUBLISHED)}; waves of the first row: {options.out / 'waves.csv'}"
    )


if __name__ == "__main__":
    main()
