"""Curves over the layers of a model: control points in, one scaling factor per layer out (LPES, Section 3.2)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import comb, isfinite

from posbench.errors import UserError

CURVES = ("bezier", "linear", "step")

Points = Sequence[tuple[float, float]]


def layer_scales(curve: str, points: Points, layers: int, x: str = "stretched") -> list[float]:
    """Read one scaling factor per layer off a curve.

    Args:
        curve: ``bezier`` (degree n - 1), ``linear`` (straight lines between the points) or ``step`` (y of the last point that is
            not right of the layer).
        points: n >= 1 control points (x, y): x in layers, y a factor. One point is a constant. From left to right, but for an
            unconstrained Bezier curve: it may turn back, and each layer then takes one of its crossings.
        layers: Number of layers L >= 1.
        x: ``stretched`` spreads the layers evenly from the first to the last point, so that shifting or stretching every x
            changes nothing; ``absolute`` takes layer h at x = h and holds the end values outside the points.

    Returns:
        L factors, layer 0 first, inside [min y, max y]. A stretched curve starts at the first y and ends at the last y exactly.

    Raises:
        ValueError: The curve or ``x`` is unknown, or there is no point or no layer.

    Source: LPES, Eq. 4-8 (Bezier curve, layer positions, bisection), Table 6 (linear, step), Appendix D.
    """
    if curve not in CURVES or x not in ("stretched", "absolute") or not points or layers < 1:
        raise ValueError(f"no curve {curve!r} with x={x!r} through {len(points)} points over {layers} layers")
    if curve != "bezier":
        points = sorted(points, key=lambda point: point[0])
    first, last = points[0][0], points[-1][0]
    scales = []
    for h in range(layers):
        target = first + (last - first) * h / max(layers - 1, 1) if x == "stretched" else float(h)
        # The ends are set, not computed: rounding must not move them.
        if (h == 0 and x == "stretched") or (x == "absolute" and target <= first):
            scales.append(float(points[0][1]))
        elif (h == layers - 1 and x == "stretched") or (x == "absolute" and target >= last):
            scales.append(float(points[-1][1]))
        else:
            scales.append(_value(curve, points, target))
    low, high = min(y for _, y in points), max(y for _, y in points)
    return [min(max(scale, low), high) for scale in scales]


def check_points(points: Points, layers: int, field: str = "method.points") -> None:
    """Raise UserError unless the points are a curve over the layers: LPES, Eq. 9-10.

    Args:
        points: Control points (x, y).
        layers: Number of layers L.
        field: What the message calls them.

    Raises:
        UserError: There is no point, x does not rise strictly within 0..L-1, or a y lies outside 1..2.
    """
    given = [list(point) for point in points]
    hint = "give them from left to right, such as [[0,1.2],[1,1.5]]"
    if not given or any(len(point) != 2 or not all(isfinite(v) for v in point) for point in given):
        raise UserError(field=field, value=given, allowed="at least one pair [x, y] of numbers", hint=hint)
    xs = [x for x, _ in given]
    if any(a >= b for a, b in pairwise(xs)) or xs[0] < 0 or xs[-1] > layers - 1:
        raise UserError(
            field=field,
            value=given,
            allowed=f"x strictly rising from 0 or more to {layers - 1} or less ({layers} layers)",
            hint=hint,
        )
    if any(not 1 <= y <= 2 for _, y in given):
        raise UserError(field=field, value=given, allowed="y from 1 to 2", hint=hint)


def bernstein(values: Sequence[float], t: float) -> float:
    """One coordinate of a Bezier curve: sum over k of C(d, k) t^k (1 - t)^(d - k) values[k], with 0 <= t <= 1."""
    d = len(values) - 1
    return sum(comb(d, k) * t**k * (1 - t) ** (d - k) * value for k, value in enumerate(values))


def _value(curve: str, points: Points, target: float) -> float:
    """y at x = ``target``, which lies between the first and the last x."""
    xs, ys = [point[0] for point in points], [point[1] for point in points]
    if curve == "bezier":
        return bernstein(ys, _parameter(xs, target))
    right = bisect_right(xs, target)
    if curve == "step" or right == len(xs):
        return ys[right - 1]
    share = (target - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


def _parameter(xs: Sequence[float], target: float) -> float:
    """t with x(t) = ``target``, by bisection: x(t) rises where the control points do (Appendix D)."""
    low, high = 0.0, 1.0
    falling = xs[-1] < xs[0]
    # 60 halvings leave less than the spacing of doubles near 1.
    for _ in range(60):
        middle = (low + high) / 2
        if (bernstein(xs, middle) < target) != falling:
            low = middle
        else:
            high = middle
    return (low + high) / 2
