"""How positional is each channel? The filter of Yu et al. 2025, Algorithm 1, as printed and as released.

Letters: L layers (rows), P token positions, D channels.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy
from numpy.typing import NDArray

from posbench.errors import UserError

Array = NDArray[np.floating]


@dataclass(frozen=True)
class ChannelStatistics:
    """What the filter measured."""

    direction: NDArray[np.int8]  # +1 rising, -1 falling, 0 neither, [L, D]
    monotone_layers: NDArray[np.int64]  # layers that count as monotone, [D]
    smoothness: Array  # lower is smoother; infinite without a monotone layer, [D]
    ranking: list[int]  # channels that pass the threshold, smoothest first


def paper(
    curves: Array,
    *,
    window: int = 100,
    skip: int = 30,
    aggregate: Literal["sum", "mean"] = "sum",
    monotone_only: bool = True,
) -> ChannelStatistics:
    """The filter as the paper's text has it.

    A sliding mean, the first positions dropped (Section 2.3), a cubic least-squares fit (Appendix C.1); a
    layer counts when the fit's derivative keeps one sign; a channel passes in more than a quarter of the
    layers (Algorithm 1); smoothness is the squared second difference of the averaged curve, over the layers
    that count.

    Args:
        curves: Averaged hidden states, [L, P, D]; 8 positions or more must be left.
        window: Positions in the sliding mean.
        skip: Positions dropped at the start.
        aggregate: Over layers: ``sum`` (Algorithm 1, line 7) or ``mean`` (Section 3.2).
        monotone_only: Without it every channel passes and every layer counts ("w/o monotonicity", Table 6).
    """
    layers, positions, _ = curves.shape
    if positions - window + 1 - skip < 8:
        allowed = f"at least search.window + search.skip + 7 = {window + skip + 7}"
        raise UserError(
            "search.length",
            positions,
            allowed,
            "lengthen the strings or shorten the window",
        )
    mean = sliding_mean(curves, window)[:, skip:]
    x = np.linspace(-1, 1, mean.shape[1])
    coefficients = np.einsum(
        "cp,lpd->lcd", np.linalg.pinv(np.vander(x, 4, increasing=True)), mean
    )
    slopes = np.vander(x, 3, increasing=True) * np.array([1, 2, 3])
    slope = np.einsum("pc,lcd->lpd", slopes, coefficients[:, 1:])
    direction = (
        (slope > 0).all(1).astype(np.int8) - (slope < 0).all(1).astype(np.int8)
    ).astype(np.int8)
    monotone = direction != 0
    counted = monotone if monotone_only else np.ones_like(monotone)
    count = counted.sum(0)
    rough = (np.diff(mean, n=2, axis=1) ** 2).sum(1)
    total = np.where(counted, rough, 0).sum(0) / (
        np.maximum(count, 1) if aggregate == "mean" else 1
    )
    return _ranked(
        direction,
        monotone.sum(0),
        np.where(count > 0, total, np.inf),
        count > layers / 4,
    )


def sliding_mean(curves: Array, window: int) -> Array:
    """Mean of every ``window`` successive positions, [L, P - window + 1, D]."""
    sums = np.cumsum(
        np.pad(curves.astype(np.float64), ((0, 0), (1, 0), (0, 0))), axis=1
    )
    return (sums[:, window:] - sums[:, :-window]) / window


def official(hidden: Array) -> ChannelStatistics:
    """The filter as the authors released it (PositionalHidden, commit f3bcd55), over the rows that it keeps.

    Differs from the paper: residual stream instead of the tensor that is scaled; the embedding row is dropped
    only when the number of rows is odd; the two rows at either end are ignored; no sliding mean; curves are
    scaled to 0..1 first; 300 positions are skipped for monotonicity and 200 for smoothness; flat steps count
    as monotone; only the majority direction counts (ties go to falling); smoothness is a Savitzky-Golay (10,
    3) second difference and the minimum, not the sum, over layers; the threshold is rows // 4.

    Takes averaged ``hidden_states`` of transformers [L, P, D]: embedding, block outputs, the last after the
    final norm; raises `UserError` for 300 positions or fewer.
    """
    rows, positions, channels = hidden.shape
    if positions <= 300:
        allowed = "more than 300 with variant=official"
        raise UserError("search.length", positions, allowed, "set search.length=1000")
    if rows % 2:
        hidden = hidden[1:]
        rows = rows - 1
    curves = hidden.astype(np.float32)
    direction = np.zeros((rows, channels), dtype=np.int8)
    smoothness = np.full((rows, channels), np.inf)
    x = np.arange(300, positions) - 300.0
    design = np.vander(x / x[-1], 4, increasing=True)
    for row in range(2, rows - 1):
        fitted = design @ (np.linalg.pinv(design) @ _unit(curves[row, 300:]))
        steps = np.diff(fitted, axis=0)
        moves = np.isfinite(steps).all(0) & (np.abs(steps).max(0) > 0)
        rises = (steps >= 0).all(0)
        falls = (steps <= 0).all(0)
        direction[row] = moves * (rises.astype(np.int8) - falls)
        unit = _unit(curves[row, 200:])
        usable = np.isfinite(unit).all(0)
        if usable.any():
            smooth = scipy.signal.savgol_filter(
                unit[:, usable], window_length=10, polyorder=3, axis=0
            )
            smoothness[row, usable] = (np.diff(smooth, n=2, axis=0) ** 2).sum(0)
    rising = direction == 1
    falling = direction == -1
    used = np.where(rising.sum(0) > falling.sum(0), rising, falling)
    lowest = np.where(used, smoothness, np.inf).min(0)
    return _ranked(direction, used.sum(0), lowest, used.sum(0) > rows // 4)


def _unit(curves: Array) -> Array:
    """Each column scaled to 0..1; constant columns become NaN."""
    low = curves.min(0)
    high = curves.max(0)
    return (curves - low) / np.where(high > low, high - low, np.nan)


def _ranked(
    direction: NDArray[np.int8],
    count: NDArray[np.int64],
    smoothness: Array,
    passed: NDArray[np.bool_],
) -> ChannelStatistics:
    order = np.argsort(smoothness, kind="stable")
    return ChannelStatistics(
        direction, count, smoothness, [int(c) for c in order if passed[c]]
    )
