"""Measure how positional each channel is: the filter of Yu et al. 2025, Algorithm 1, as printed and as released.

Letters: L layers (rows), P token positions, D channels.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy
from numpy.typing import NDArray

from posbench.errors import UserError

Array = NDArray[np.floating]

MIN_CURVE_POSITIONS = (
    8  # of a curve, after the sliding mean and without the skipped ones
)
OFFICIAL_SKIP = 300  # positions that the released program skips for monotonicity
OFFICIAL_SMOOTHNESS_SKIP = 200  # positions that it skips for smoothness


@dataclass(frozen=True)
class ChannelStatistics:
    """Measurements of the filter.

    Attributes:
        direction: +1 rising, -1 falling, 0 neither, shape (L, D).
        monotone_layers: Number of layers that count as monotone, shape (D,).
        smoothness: Lower is smoother; infinite without a monotone layer, shape (D,).
        ranking: Channels that pass the threshold, smoothest first.
    """

    direction: NDArray[np.int8]
    monotone_layers: NDArray[np.int64]
    smoothness: Array
    ranking: list[int]


def paper_filter(
    curves: Array,
    *,
    window: int = 100,
    skip: int = 30,
    aggregate: Literal["sum", "mean"] = "sum",
    scaled: bool = False,
    monotone_only: bool = True,
) -> ChannelStatistics:
    """Rank channels by the filter as the paper's text has it.

    A sliding mean, the first positions dropped (Section 2.3), a cubic least-squares fit (Appendix C.1); a
    layer counts when the fit's derivative keeps one sign; a channel passes in more than a quarter of the
    layers (Algorithm 1); smoothness is the squared second difference of the averaged curve, over the layers
    that count.

    Args:
        curves: Averaged hidden states, shape (L, P, D); 8 positions or more must be left.
        window: Positions in the sliding mean.
        skip: Positions dropped at the start.
        aggregate: Over layers: ``sum`` (Algorithm 1, line 7) or ``mean`` (Section 3.2).
        scaled: Whether each averaged curve is scaled to 0..1 before its second difference, as the released
            program does; otherwise a channel of small values counts as smooth whatever its shape. A constant
            curve has no scale and makes the smoothness infinite.
        monotone_only: Without it every channel passes and every layer counts ("w/o monotonicity", Table 6).

    Returns:
        By channel the direction in each layer (1 rising, -1 falling, 0 neither), the number of monotone layers and the
        smoothness; and the channels that pass, the smoothest first.
    """
    num_layers, num_positions, _ = curves.shape
    if num_positions - window + 1 - skip < MIN_CURVE_POSITIONS:
        minimum = window + skip + MIN_CURVE_POSITIONS - 1
        allowed = f"at least search.window + search.skip + 7 = {minimum}"
        hint = "raise search.length or lower search.window"
        raise UserError("search.length", num_positions, allowed, hint)
    means = sliding_mean(curves, window)[:, skip:]

    # Least squares per layer and channel: c0 + c1 x + c2 x^2 + c3 x^3, whose slope is c1 + 2 c2 x + 3 c3 x^2.
    x = np.linspace(-1, 1, means.shape[1])
    solve = np.linalg.pinv(np.vander(x, 4, increasing=True))
    coefficients = np.einsum("cp,lpd->lcd", solve, means)
    slope_terms = np.vander(x, 3, increasing=True) * np.array([1, 2, 3])
    slopes = np.einsum("pc,lcd->lpd", slope_terms, coefficients[:, 1:])
    rising = (slopes > 0).all(1)
    falling = (slopes < 0).all(1)
    direction = rising.astype(np.int8) - falling.astype(np.int8)

    monotone = direction != 0
    # Layers over which smoothness is summed.
    counted = monotone if monotone_only else np.ones_like(monotone)
    num_counted = counted.sum(0)
    measured = means
    if scaled:
        measured = np.stack([_scaled_to_unit(layer) for layer in means])
    roughness = (np.diff(measured, n=2, axis=1) ** 2).sum(1)
    roughness = np.where(np.isfinite(roughness), roughness, np.inf)
    smoothness = np.where(counted, roughness, 0).sum(0)
    if aggregate == "mean":
        smoothness = smoothness / np.maximum(num_counted, 1)
    smoothness = np.where(num_counted > 0, smoothness, np.inf)
    passed = num_counted > num_layers / 4
    return ChannelStatistics(
        direction, monotone.sum(0), smoothness, _ranking(smoothness, passed)
    )


def sliding_mean(curves: Array, window: int) -> Array:
    """Mean of every ``window`` successive positions, (L, P, D) to (L, P - window + 1, D)."""
    padded = np.pad(curves.astype(np.float64), ((0, 0), (1, 0), (0, 0)))
    sums = np.cumsum(padded, axis=1)
    return (sums[:, window:] - sums[:, :-window]) / window


def official_filter(hidden: Array) -> ChannelStatistics:
    """The filter as the authors released it (PositionalHidden, commit f3bcd55), over the rows that it keeps.

    Differs from the paper: residual stream instead of the tensor that is scaled; the embedding row is dropped
    only when the number of rows is odd; the first two rows and the last are ignored; no sliding mean; curves are
    scaled to 0..1 first; 300 positions are skipped for monotonicity and 200 for smoothness; flat steps count
    as monotone; only the majority direction counts (ties go to falling); smoothness is a Savitzky-Golay (10,
    3) second difference and the minimum, not the sum, over layers; the threshold is rows // 4.

    Args:
        hidden: Averaged ``hidden_states`` of transformers, shape (L, P, D): embedding, block outputs, the last
            after the final norm.

    Raises:
        UserError: There are 300 positions or fewer.
    """
    num_rows, num_positions, num_channels = hidden.shape
    if num_positions <= OFFICIAL_SKIP:
        allowed = "more than 300 with variant=official"
        hint = "set search.length=1000"
        raise UserError("search.length", num_positions, allowed, hint)
    if num_rows % 2:
        hidden = hidden[1:]
        num_rows -= 1
    curves = hidden.astype(np.float32)
    direction = np.zeros((num_rows, num_channels), dtype=np.int8)
    smoothness = np.full((num_rows, num_channels), np.inf)
    x = np.arange(num_positions - OFFICIAL_SKIP, dtype=float)
    design = np.vander(x / x[-1], 4, increasing=True)
    solve = np.linalg.pinv(design)
    for row in range(2, num_rows - 1):
        # A cubic least-squares fit of every channel at once.
        fitted = design @ (solve @ _scaled_to_unit(curves[row, OFFICIAL_SKIP:]))
        steps = np.diff(fitted, axis=0)
        moves = np.isfinite(steps).all(0) & (np.abs(steps).max(0) > 0)
        rises = (steps >= 0).all(0)
        falls = (steps <= 0).all(0)
        direction[row] = moves * (rises.astype(np.int8) - falls)
        unit = _scaled_to_unit(curves[row, OFFICIAL_SMOOTHNESS_SKIP:])
        usable = np.isfinite(unit).all(0)
        if usable.any():
            smooth = scipy.signal.savgol_filter(
                unit[:, usable], window_length=10, polyorder=3, axis=0
            )
            smoothness[row, usable] = (np.diff(smooth, n=2, axis=0) ** 2).sum(0)
    rising = direction == 1
    falling = direction == -1
    # Only layers in the direction that more layers have.
    majority = np.where(rising.sum(0) > falling.sum(0), rising, falling)
    num_monotone = majority.sum(0)
    lowest = np.where(majority, smoothness, np.inf).min(0)
    passed = num_monotone > num_rows // 4
    return ChannelStatistics(direction, num_monotone, lowest, _ranking(lowest, passed))


def _scaled_to_unit(curves: Array) -> Array:
    """Each column scaled to 0..1; constant columns become NaN."""
    low = curves.min(0)
    high = curves.max(0)
    return (curves - low) / np.where(high > low, high - low, np.nan)


def _ranking(smoothness: Array, passed: NDArray[np.bool_]) -> list[int]:
    """Channels that passed, smoothest first."""
    order = np.argsort(smoothness, kind="stable")
    return [int(channel) for channel in order if passed[channel]]
