"""The shape of a score over the gold position: its names, its words, and the rule that names it (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from posbench.late import pd
from posbench.stats.bootstrap import Estimate
from posbench.stats.findings import estimate
from posbench.stats.position_bias import CONTRAST, SMALLEST_BIAS, CurveIntervals

PRIMACY = "primacy"
RECENCY = "recency"
MIDDLE_DROP = "middle drop"
MIDDLE_RISE = "middle rise"
FLAT = "flat"
UNEVEN = "uneven"
UNCLEAR = "unclear"
SHAPES = {
    PRIMACY: "it favours the beginning of the prompt",
    RECENCY: "it favours the end of the prompt",
    MIDDLE_DROP: "it loses the middle of the prompt",
    MIDDLE_RISE: "it favours the middle of the prompt",
    FLAT: "no position differs from the mean of the others by more than 10 points",
    UNEVEN: "positions differ, but neither the beginning, the middle nor the end is favoured as a whole",
    UNCLEAR: "the shape cannot be told yet",
}
"""Shapes of the score over the gold position, each as a clause about the model."""
SIDES = (PRIMACY, RECENCY, MIDDLE_DROP, MIDDLE_RISE)
"""Shapes that favour a part of the prompt."""
WITHOUT_SIDE = (FLAT, UNEVEN, UNCLEAR)
"""Shapes that name no part of the prompt as favoured."""

NEGLIGIBLE_CONTRAST = 0.1
"""Difference of a position from the mean of the others, or of an end from the inner positions, that is negligible."""
MINOR_SHARE = 1 / 3
"""Share of the other end's difference, or of best minus worst, below which a difference is a minor one."""


def name_shape(curve: CurveIntervals) -> str:
    """Name a shape by the intervals of a curve, over all its positions.

    Where the position bias is not surely above zero and worth naming, the shape is flat if every position is surely
    like the others, else unclear. Where it is, the ends are compared with the inner positions (:func:`_side`), and the
    side that this gives is named if no position contradicts it (:func:`_is_contradicted`), else the shape is uneven; so
    it is if positions contradict all sides.

    Args:
        curve: Its intervals, either all for a number of questions that was fixed beforehand, or all for any time.
    """
    if not is_named_bias(curve.bias):
        return FLAT if is_flat(curve.contrasts) else UNCLEAR
    possible_sides = [s for s in SIDES if not _is_contradicted(s, curve.contrasts)]
    side = _side(curve.primacy, curve.recency)
    if side in possible_sides:
        return side
    return UNCLEAR if side == UNCLEAR and possible_sides else UNEVEN


def _side(first: Estimate, last: Estimate) -> str:
    """Return the shape that the first and the last gold position show: primacy, recency, middle drop, ...

    Both ends above the inner positions are a middle drop, both below a middle rise, unless one end differs by less than
    a third of the other's difference. One end that is surely the better, or the other surely the worse, gives primacy
    or recency; so does an end that differs from the inner positions, further than the other one, which is like them.
    Ends that are both like the inner positions favour no part: uneven.

    Args:
        first: First gold position minus the mean of the inner ones.
        last: Last gold position minus the mean of the inner ones.
    """
    first_sign = _sign(first)
    last_sign = _sign(last)
    favoured_end = PRIMACY if first.value > last.value else RECENCY
    sizes = sorted([abs(first.value), abs(last.value)])
    has_minor_end = sizes[0] < MINOR_SHARE * sizes[1]
    if first_sign == last_sign and first_sign in ("higher", "lower"):
        if has_minor_end:
            return favoured_end
        return MIDDLE_DROP if first_sign == "higher" else MIDDLE_RISE
    if _one_dominates(first, last) or _one_dominates(_negated(first), _negated(last)):
        return favoured_end
    signs = {first_sign, last_sign}
    if "like" in signs and signs & {"higher", "lower"}:
        like, other = (first, last) if first_sign == "like" else (last, first)
        if abs(other.value) > abs(like.value):
            return favoured_end
    return UNEVEN if signs == {"like"} else UNCLEAR


def _is_contradicted(side: str, contrasts: Sequence[Estimate]) -> bool:
    """Whether a gold position speaks against a shape.

    Primacy says that the score falls over the prompt, recency that it rises, a middle drop that it falls and then
    rises: a position contradicts that if it is surely on the wrong side of another one, by a third of best minus worst
    or more. A middle drop also says that a third of the inner positions or more are lost, each by at least a third of
    the lowest one's loss; one of several is no middle. A middle rise is the mirror image.

    Args:
        side: The shape.
        contrasts: Each position minus the mean of the others, from the first to the last.
    """
    if side == MIDDLE_RISE:
        return _is_contradicted(MIDDLE_DROP, [_negated(c) for c in contrasts])
    values = [contrast.value for contrast in contrasts]
    if side == PRIMACY:
        return _rises(contrasts, values)
    if side == RECENCY:
        return _rises(contrasts[::-1], values[::-1])
    inner = values[1:-1]
    lowest = min(inner)
    turn = values.index(lowest, 1)
    end = min(values[0], values[-1])
    num_lost = sum(end - value >= MINOR_SHARE * (end - lowest) for value in inner)
    return (
        num_lost < max(MINOR_SHARE * len(inner), min(2, len(inner)))
        or _rises(contrasts[: turn + 1], values)
        or _rises(contrasts[turn:][::-1], values)
    )


def _rises(contrasts: Sequence[Estimate], values: Sequence[float]) -> bool:
    """Whether a gold position is surely better than an earlier one, by more than a third of best minus worst.

    Args:
        contrasts: Each position minus the mean of the others, in order.
        values: All contrasts' values, from which best and worst are taken.
    """
    minor = MINOR_SHARE * (max(values) - min(values))
    return any(
        later.value - earlier.value > minor and later.ci_low > earlier.ci_high
        for index, earlier in enumerate(contrasts)
        for later in contrasts[index + 1 :]
    )


def is_flat(contrasts: Sequence[Estimate]) -> bool:
    """Whether every position surely differs from the mean of the others by a negligible amount.

    A test of equivalence: it says so wrongly only if the one position that differs most is missed, so the level of one
    interval is the level of the test (intersection-union test, Berger 1982).
    """
    return bool(contrasts) and all(map(_is_negligible, contrasts))


def _sign(contrast: Estimate) -> Literal["higher", "lower", "like"] | None:
    """Whether an end scores higher or lower than the inner positions, or like them; None: undecided."""
    if contrast.ci_low > 0:
        return "higher"
    if contrast.ci_high < 0:
        return "lower"
    return "like" if _is_negligible(contrast) else None


def _is_negligible(contrast: Estimate) -> bool:
    """Whether a contrast surely differs from zero by less than is worth telling."""
    is_above = contrast.ci_low > -NEGLIGIBLE_CONTRAST
    return is_above and contrast.ci_high < NEGLIGIBLE_CONTRAST


def _one_dominates(one: Estimate, other: Estimate) -> bool:
    """Whether one of two contrasts is surely above zero and above the other one."""
    return any(a.ci_low > max(0.0, b.ci_high) for a, b in ((one, other), (other, one)))


def _negated(contrast: Estimate) -> Estimate:
    """A contrast with the inner positions minus the end."""
    return Estimate(-contrast.value, -contrast.ci_high, -contrast.ci_low, contrast.n)


def shape_in_metrics(metrics: pd.DataFrame, method: str) -> str:
    """Name the shape of a method's score over the gold position, from its rows of metrics.csv.

    Args:
        metrics: Rows of metrics.csv of one run.
        method: Name in its column ``method``.

    Returns:
        One of :data:`SHAPES`; empty where fewer than three positions, or their scores, can show none.
    """
    curve = curve_in_metrics(metrics, method)
    if curve is None:
        return ""
    name = name_shape(curve)
    # At the floor, or near the ceiling, there is no bias to have a shape.
    return "" if name == UNCLEAR and pd.isna(curve.bias.ci_low) else name


def curve_in_metrics(metrics: pd.DataFrame, method: str) -> CurveIntervals | None:
    """Read the intervals of a method's curve over the gold position.

    Args:
        metrics: Rows of metrics.csv of one run.
        method: Name in its column ``method``.

    Returns:
        The curve, numbers about which nothing can be said NaN; None for fewer than three positions.
    """
    # From the last to the first: of repeated rows the first one counts.
    rows = metrics[metrics["method"] == method].to_dict("records")[::-1]
    placed = {
        float(row["gold_position"]): row for row in rows if row["metric"] == CONTRAST
    }
    contrasts = [estimate(placed[position]) for position in sorted(placed)]
    by_metric = {
        row["metric"]: row for row in rows if str(row["gold_position"]) == "all"
    }
    keys = ("position_bias", "primacy", "recency")
    if not contrasts or not all(key in by_metric for key in keys):
        return None
    bias, first, last = (estimate(by_metric[key]) for key in keys)
    return CurveIntervals(bias, first, last, contrasts)


def is_named_bias(bias: Any) -> bool:
    """Return whether a position bias is surely above zero, and large enough to be named.

    Args:
        bias: Has ``value`` and ``ci_low``.
    """
    return bool(bias.ci_low > 0 and bias.value >= SMALLEST_BIAS)
