"""Curves over the layers of a model: control points in, one scaling factor per layer out (LPES, Section
3.2)."""

from collections.abc import Sequence
from itertools import pairwise
from math import comb, isfinite

import numpy as np
from numpy.typing import NDArray

from posbench.errors import UserError

CURVES = ("bezier", "linear", "step")

Points = Sequence[tuple[float, float]]
Array = NDArray[np.float64]


def layer_scales(
    curve: str, points: Points, layers: int, x: str = "stretched"
) -> list[float]:
    """Read one scaling factor per layer off a curve.

    Args:
        curve: ``bezier`` (degree n - 1), ``linear`` (straight lines between the points) or ``step`` (y of the
            last point that is not right of the layer).
        points: n >= 1 control points (x, y), x in layers, y a factor, from left to right; a Bezier curve may
            turn back, and each layer then takes one of its crossings.
        layers: Number of layers L >= 1.
        x: ``stretched`` spreads the layers evenly from the first to the last point; ``absolute`` takes layer
            h at x = h and holds the end values outside the points.

    Returns:
        L factors, layer 0 first, inside [min y, max y]. A stretched curve starts and ends at the outer y
        exactly.

    Raises:
        ValueError: The curve or ``x`` is unknown, or there is no point or no layer.

    Source: LPES, Eq. 4-8 (Bezier curve, layer positions, bisection), Table 6 (linear, step), Appendix D.
    """
    if (
        curve not in CURVES
        or x not in ("stretched", "absolute")
        or not points
        or layers < 1
    ):
        raise ValueError(
            f"no curve {curve!r} with x={x!r} through {len(points)} points over {layers} layers"
        )
    if curve != "bezier":
        points = sorted(points, key=lambda point: point[0])
    first = points[0][0]
    last = points[-1][0]
    h = np.arange(layers)
    if x == "stretched":
        at = first + (last - first) * h / max(layers - 1, 1)
        begun = h == 0
        ended = (h == layers - 1) & (h > 0)
    else:
        at = np.clip(h, first, last).astype(float)
        begun = h <= first
        ended = h >= last
    scales = _values(curve, points, at)
    # The ends are set, not computed: rounding must not move them.
    scales[begun] = points[0][1]
    scales[ended] = points[-1][1]
    ys = [y for _, y in points]
    return np.clip(scales, min(ys), max(ys)).tolist()


def check_points(points: Points, layers: int, field: str = "method.points") -> None:
    """Raise UserError unless x rises strictly within 0..L-1 and y lies in 1..2: LPES, Eq. 9-10."""
    given = [list(point) for point in points]
    hint = "give them from left to right, such as [[0,1.2],[1,1.5]]"
    if not given or any(
        len(point) != 2 or not all(isfinite(v) for v in point) for point in given
    ):
        raise UserError(field, given, "at least one pair [x, y] of numbers", hint)
    xs = [x for x, _ in given]
    if any(a >= b for a, b in pairwise(xs)) or xs[0] < 0 or xs[-1] > layers - 1:
        allowed = f"x strictly rising from 0 or more to {layers - 1} or less ({layers} layers)"
        raise UserError(field, given, allowed, hint)
    if any(not 1 <= y <= 2 for _, y in given):
        raise UserError(field, given, "y from 1 to 2", hint)


def bernstein(values: Sequence[float] | Array, t: Array) -> Array:
    """One coordinate of a Bezier curve at t in 0..1: sum over k of C(d, k) t^k (1 - t)^(d - k) values[k]."""
    d = len(values) - 1
    power = np.ones_like(t)
    total = values[0] * np.ones_like(t)
    # Horner's scheme in 1 - t: general powers of an array are slow, and bisection asks for thousands.
    for k in range(1, d + 1):
        power = power * t
        total = total * (1 - t) + comb(d, k) * values[k] * power
    return total


def _values(curve: str, points: Points, at: Array) -> Array:
    """y at every x of ``at``, which lie between the first and the last x."""
    xs, ys = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    if curve == "linear":
        return np.interp(at, xs, ys)
    if curve == "step":
        return ys[np.searchsorted(xs, at, side="right") - 1]
    # t with x(t) = each of ``at``, by bisection: x(t) rises where the control points do (Appendix D).
    low = np.zeros(len(at))
    high = np.ones(len(at))
    falling = xs[-1] < xs[0]
    # 52 halvings leave the spacing of doubles near 1.
    for _ in range(52):
        middle = (low + high) / 2
        right = (bernstein(xs, middle) < at) != falling
        low = np.where(right, middle, low)
        high = np.where(right, high, middle)
    return bernstein(ys, (low + high) / 2)
