"""The attention waves that RoPE alone makes, and bases whose waves fill each other's troughs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

Array = NDArray[np.float64]
Extrema = Sequence[NDArray[np.int64]]
"""Positions of peaks, and of troughs."""


def rope_wave(
    distance: Array, dim: int = 128, base: float = 10000.0, scale: float = 1.0
) -> Array:
    """Score of two equal unit vectors as RoPE alone makes it.

    (2 / sqrt(d)) sum over k < d / 2 of cos(m / scale * base^(-2k / d)). Source: Attention Buckets (Chen et
    al. 2023), the waveform; LPES, Figures 3 and 4.

    Args:
        distance: Distances m in tokens, [n].
        dim: Dimensions d of a head.
        base: Base of the rotary embedding.
        scale: Divisor of the positions.

    Returns:
        Scores, [n].
    """
    frequencies = base ** (-2 * np.arange(dim // 2) / dim)
    return 2 / np.sqrt(dim) * np.cos(np.outer(distance / scale, frequencies)).sum(1)


def rope_decay_bound(distance: Array, dim: int = 128, scale: float = 1.0) -> Array:
    """Upper bound of a score's size at a distance: the mean size of partial sums of e^(i m theta_k).

    Source: Su et al. 2021 (RoFormer), Section 3.4.3, the long-term decay. Arguments as of :func:`rope_wave`; the base
    is 10000.

    Returns:
        Bounds, [n].
    """
    angles = np.outer(distance / scale, 10000.0 ** (-2 * np.arange(dim // 2) / dim))
    return np.abs(np.cumsum(np.exp(1j * angles), axis=1)).mean(1)


class ChosenBase(NamedTuple):
    """One base that :func:`choose_bases` has chosen.

    Attributes:
        base: Base (theta) of the rotary embedding.
        coincidences: Its peaks near uncancelled troughs, and troughs near uncancelled peaks, of the earlier
            bases.
        offset: Mean squared distance of these pairs in tokens; NaN without any.
    """

    base: float
    coincidences: int
    offset: float


def extrema(scores: Array, reach: int) -> Extrema:
    """Indices of peaks and of troughs: extremes within ``reach`` on both sides, ends left out."""
    (peaks,) = scipy.signal.argrelextrema(scores, np.greater, order=reach)
    (troughs,) = scipy.signal.argrelextrema(scores, np.less, order=reach)
    return peaks, troughs


def choose_bases(
    extrema_by_base: Mapping[float, Extrema],
    first: float,
    count: int,
    tolerance: int = 3,
) -> list[ChosenBase]:
    """Choose greedily bases whose peaks stand where the chosen ones have troughs, and the other way round.

    A peak and a trough within the tolerance cancel: neither counts for later bases. Ties go to the smaller
    mean squared offset, then to the smaller base.

    Source: Attention Buckets (Chen et al. 2023), base search, after its released program.

    Args:
        extrema_by_base: Peaks and troughs of each candidate base, in tokens.
        first: The base to start from; it has no coincidences.
        count: Bases to choose at most, the first included.
        tolerance: Largest distance in tokens at which a peak and a trough cancel.

    Returns:
        The chosen bases in their order.
    """
    steps = [ChosenBase(first, 0, float("nan"))]
    first_peaks, first_troughs = extrema_by_base[first]
    open_peaks = set(first_peaks.tolist())
    open_troughs = set(first_troughs.tolist())
    while len(steps) < min(count, len(extrema_by_base)):
        candidates = []
        for base in sorted(set(extrema_by_base) - {step.base for step in steps}):
            peaks, troughs = extrema_by_base[base]
            filled = _pairs(peaks, open_troughs, tolerance)
            emptied = _pairs(troughs, open_peaks, tolerance)
            pairs = filled + emptied
            offset = float("nan")
            if pairs:
                offset = float(np.mean([(a - b) ** 2 for a, b in pairs]))
            # Without any pair all candidates rank alike, and the smallest base wins.
            rank = (-len(pairs), np.nan_to_num(offset), base)
            step = ChosenBase(base, len(pairs), offset)
            candidates.append((rank, step, filled, emptied))
        _, best, filled, emptied = min(candidates, key=lambda candidate: candidate[0])
        peaks, troughs = extrema_by_base[best.base]
        # A pair is a new extremum and an open one; both are cancelled.
        open_troughs -= {old for _, old in filled}
        open_peaks -= {old for _, old in emptied}
        open_troughs |= set(troughs.tolist()) - {new for new, _ in emptied}
        open_peaks |= set(peaks.tolist()) - {new for new, _ in filled}
        steps.append(best)
    return steps


def _pairs(
    new: NDArray[np.int64], open_positions: set[int], tolerance: int
) -> list[tuple[int, int]]:
    """Pair each new position with the nearest open one within the tolerance; an open one is used once."""
    free = set(open_positions)
    pairs = []
    for position in new.tolist():
        if not free:
            break
        nearest = min(free, key=lambda old: (abs(old - position), old))
        if abs(nearest - position) <= tolerance:
            free.remove(nearest)
            pairs.append((position, nearest))
    return pairs
