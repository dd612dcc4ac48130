"""Curves over the layers of a model: from control points to one scale per layer (LPES, Section 3.2)."""

from collections.abc import Sequence
from itertools import pairwise
from math import comb, isfinite

import numpy as np
from numpy.typing import NDArray

from posbench.errors import UserError

CURVE_KINDS = ("bezier", "linear", "step")
ROOT_BISECTIONS = 52  # halvings of 0..1 that leave the spacing of doubles near 1

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
    known_x = x in ("stretched", "absolute")
    if curve not in CURVE_KINDS or not known_x or not points or layers < 1:
        raise ValueError(
            f"no curve {curve!r} with x={x!r} through {len(points)} points over {layers} layers"
        )
    if curve != "bezier":
        points = sorted(points, key=lambda point: point[0])
    first_x, first_y = points[0]
    last_x, last_y = points[-1]
    layer = np.arange(layers)
    if x == "stretched":
        layer_x = first_x + (last_x - first_x) * layer / max(layers - 1, 1)
        at_start = layer == 0
        at_end = (layer == layers - 1) & (layer > 0)
    else:
        layer_x = np.clip(layer, first_x, last_x).astype(float)
        at_start = layer <= first_x
        at_end = layer >= last_x
    scales = _values(curve, points, layer_x)
    # The ends are set, not computed: rounding must not move them.
    scales[at_start] = first_y
    scales[at_end] = last_y
    ys = [y for _, y in points]
    return np.clip(scales, min(ys), max(ys)).tolist()


def check_points(points: Points, layers: int) -> None:
    """Refuse control points unless x rises strictly within 0..L-1 and y lies in 1..2: LPES, Eq. 9-10.

    Args:
        points: Points (x, y).
        layers: Number of layers L.

    Raises:
        UserError: States which.
    """
    field = "method.points"
    values = [list(point) for point in points]
    hint = "give them from left to right, such as [[0,1.2],[1,1.5]]"
    pairs = all(len(point) == 2 and all(map(isfinite, point)) for point in values)
    if not values or not pairs:
        raise UserError(field, values, "at least one pair [x, y] of numbers", hint)
    xs = [x for x, _ in values]
    rising = all(left < right for left, right in pairwise(xs))
    if not rising or xs[0] < 0 or xs[-1] > layers - 1:
        allowed = f"x strictly rising from 0 or more to {layers - 1} or less ({layers} layers)"
        raise UserError(field, values, allowed, hint)
    if any(not 1 <= y <= 2 for _, y in values):
        raise UserError(field, values, "y from 1 to 2", hint)


def bezier_coordinate(values: Sequence[float] | Array, t: Array) -> Array:
    """Return one coordinate of a Bezier curve: sum over k of C(d, k) t^k (1 - t)^(d - k) values[k].

    Args:
        values: The coordinate of each of the d + 1 control points.
        t: Curve parameters in 0..1, any shape.

    Returns:
        The coordinate at each t, of the same shape.
    """
    degree = len(values) - 1
    power = np.ones_like(t)
    total = values[0] * np.ones_like(t)
    # Horner's scheme in 1 - t: general powers of an array are slow, and bisection asks for thousands.
    for k in range(1, degree + 1):
        power = power * t
        total = total * (1 - t) + comb(degree, k) * values[k] * power
    return total


def _values(curve: str, points: Points, x: Array) -> Array:
    """Return y of a curve at every x.

    Args:
        curve: ``linear``, ``step`` or ``bezier``.
        points: Control points.
        x: Values between the x of the first and of the last point.
    """
    xs = np.array([point_x for point_x, _ in points], dtype=float)
    ys = np.array([point_y for _, point_y in points], dtype=float)
    if curve == "linear":
        return np.interp(x, xs, ys)
    if curve == "step":
        return ys[np.searchsorted(xs, x, side="right") - 1]
    # t with x(t) = x, by bisection: x(t) rises where the control points do (Appendix D).
    low = np.zeros(len(x))
    high = np.ones(len(x))
    falling = xs[-1] < xs[0]
    for _ in range(ROOT_BISECTIONS):
        middle = (low + high) / 2
        too_small = (bezier_coordinate(xs, middle) < x) != falling
        low = np.where(too_small, middle, low)
        high = np.where(too_small, high, middle)
    return bezier_coordinate(ys, (low + high) / 2)
