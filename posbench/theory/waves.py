"""The attention waves that RoPE alone makes, and bases whose waves fill each other's troughs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

Array = NDArray[np.float64]
Extrema = Sequence[NDArray[np.int64]]
"""Places of peaks, and of troughs."""


def wave(
    distance: Array, dim: int = 128, base: float = 10000.0, scale: float = 1.0
) -> Array:
    """Score of two equal unit vectors of ``dim`` numbers at distances m in tokens, as RoPE alone makes it,
    [n].

    (2 / sqrt(d)) sum over k < d / 2 of cos(m / scale * base^(-2k / d)). Source: Attention Buckets (Chen et
    al. 2023), the waveform; LPES, Figures 3 and 4.
    """
    frequencies = base ** (-2 * np.arange(dim // 2) / dim)
    return 2 / np.sqrt(dim) * np.cos(np.outer(distance / scale, frequencies)).sum(1)


def decay(
    distance: Array, dim: int = 128, base: float = 10000.0, scale: float = 1.0
) -> Array:
    """Upper bound of a score's size at a distance: the mean size of partial sums of e^(i m theta_k), [n].

    Source: Su et al. 2021 (RoFormer), Section 3.4.3, the long-term decay.
    """
    angles = np.outer(distance / scale, base ** (-2 * np.arange(dim // 2) / dim))
    return np.abs(np.cumsum(np.exp(1j * angles), axis=1)).mean(1)


class Step(NamedTuple):
    """One base of the search."""

    base: float  # theta of the rotary embedding
    coincidences: int  # its peaks near troughs, and troughs near peaks, that the set before it had left over
    offset: float  # mean squared distance of these pairs in tokens; not a number without any


def extrema(scores: Array, reach: int) -> Extrema:
    """Indices of peaks and troughs: extremes within ``reach`` on both sides, ends left out."""
    return scipy.signal.argrelextrema(scores, np.greater, order=reach)[
        0
    ], scipy.signal.argrelextrema(scores, np.less, order=reach)[0]


def choose(
    found: Mapping[float, Extrema], first: float, count: int, tolerance: int = 3
) -> list[Step]:
    """Greedy choice of bases whose peaks stand where the chosen ones have troughs, and the other way round.

    ``found`` has the peaks and troughs of each candidate in tokens; at most ``count`` steps, with the
    ``first``, which has no coincidences. A pair within ``tolerance`` tokens cancels: neither counts for later
    bases. Ties go to the smaller mean squared offset, then to the smaller base.

    Source: Attention Buckets (Chen et al. 2023), base search, after its released program.
    """
    steps = [Step(first, 0, float("nan"))]
    open_peaks, open_troughs = (set(part.tolist()) for part in found[first])
    while len(steps) < min(count, len(found)):
        tried = []
        for base in sorted(set(found) - {step.base for step in steps}):
            peaks, troughs = found[base]
            filled = _pairs(peaks, open_troughs, tolerance)
            emptied = _pairs(troughs, open_peaks, tolerance)
            pairs = filled + emptied
            offset = (
                float(np.mean([(a - b) ** 2 for a, b in pairs]))
                if pairs
                else float("nan")
            )
            rank = -len(pairs), np.nan_to_num(offset), base
            tried.append((rank, Step(base, len(pairs), offset), filled, emptied))
        # Where there is no pair, all candidates are alike, and the smallest base wins.
        _, best, filled, emptied = min(tried, key=lambda each: each[0])
        peaks, troughs = found[best.base]
        # A pair is a new extremum and an open one, and both are gone.
        open_troughs -= {old for _, old in filled}
        open_peaks -= {old for _, old in emptied}
        open_troughs |= set(troughs.tolist()) - {new for new, _ in emptied}
        open_peaks |= set(peaks.tolist()) - {new for new, _ in filled}
        steps.append(best)
    return steps


def _pairs(
    new: NDArray[np.int64], there: set[int], tolerance: int
) -> list[tuple[int, int]]:
    """Each new position with the nearest one that is there and within reach; each of these is used once."""
    free = set(there)
    pairs = []
    for position in new.tolist():
        nearest = min(
            free, key=lambda other: (abs(other - position), other), default=None
        )
        if nearest is not None and abs(nearest - position) <= tolerance:
            free.remove(nearest)
            pairs.append((position, nearest))
    return pairs
