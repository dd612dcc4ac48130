"""The shape of a score over the gold position: its names, its words, and the rule that names it (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from posbench.late import pd
from posbench.stats.bootstrap import Estimate
from posbench.stats.position_bias import SMALLEST_BIAS
from posbench.stats.sequential import dominant_end, more_questions

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
    FLAT: "the ends and the middle differ by less than 10 points",
    UNEVEN: "inner positions differ, but not the ends from the middle",
    UNCLEAR: "the shape cannot be told yet",
}
"""Shapes of the score over the gold position, each as a clause about the model."""
WITHOUT_SIDE = (FLAT, UNEVEN, UNCLEAR)
"""Shapes that favour no part of the prompt."""

NEGLIGIBLE_CONTRAST = 0.1
"""Difference between an end of the prompt and its inner positions below which it need not be told from zero."""
MINOR_SHARE = 1 / 3
"""An end that differs from the inner positions by less than this share of what the other one does is a minor one."""


@dataclass(frozen=True)
class Shape:
    """The shape of the score over the gold position.

    Attributes:
        name: One of :data:`SHAPES`.
        contrasts: First and last position minus the mean of the inner ones, in shares, with their intervals.
        questions: Questions at each position.
        missing: Questions at each position that would decide an unclear shape, as far as can be told.
    """

    name: str
    contrasts: Mapping[str, Estimate]
    questions: int
    missing: int = 0


def name_shape(contrasts: Mapping[str, Estimate]) -> Shape:
    """Name a shape by the intervals of its contrasts.

    Both ends above the inner positions are a middle drop, both below a middle rise, unless one end differs by less
    than a third of what the other does. One end that is surely the better, or the other surely the worse, gives
    primacy or recency; so does an end that differs from the inner positions, further than the other one, which is
    like them. Ends that are both like the inner positions are flat.

    Args:
        contrasts: ``primacy`` and ``recency``: first and last position minus the mean of the inner ones.
    """
    first = contrasts["primacy"]
    last = contrasts["recency"]
    name = _name(first, last)
    missing = 0
    if name == UNCLEAR:
        missing = max(
            (
                more_questions(contrast, NEGLIGIBLE_CONTRAST)
                for contrast in (first, last)
                if _sign(contrast) is None
            ),
            default=0,
        )
    return Shape(name, contrasts, min(first.n, last.n), missing)


def _name(first: Estimate, last: Estimate) -> str:
    """The name for the contrasts of the first and of the last position."""
    first_sign = _sign(first)
    last_sign = _sign(last)
    favoured_end = PRIMACY if first.value > last.value else RECENCY
    sizes = sorted([abs(first.value), abs(last.value)])
    has_minor_end = sizes[0] < MINOR_SHARE * sizes[1]
    if first_sign == last_sign and first_sign in ("higher", "lower"):
        if has_minor_end:
            return favoured_end
        return MIDDLE_DROP if first_sign == "higher" else MIDDLE_RISE
    if dominant_end({PRIMACY: first, RECENCY: last}):
        return favoured_end
    if dominant_end({PRIMACY: _negated(first), RECENCY: _negated(last)}):
        return favoured_end
    signs = {first_sign, last_sign}
    if "like" in signs and signs & {"higher", "lower"}:
        like, other = (first, last) if first_sign == "like" else (last, first)
        if abs(other.value) > abs(like.value):
            return favoured_end
    if _is_negligible(first) and _is_negligible(last):
        return FLAT
    return UNCLEAR


def _sign(contrast: Estimate) -> Literal["higher", "lower", "like"] | None:
    """Whether an end scores higher or lower than the inner positions, or like them; None: cannot tell."""
    if contrast.ci_low > 0:
        return "higher"
    if contrast.ci_high < 0:
        return "lower"
    return "like" if _is_negligible(contrast) else None


def _is_negligible(contrast: Estimate) -> bool:
    """Whether an end surely differs from the inner positions by less than is worth telling."""
    is_above = contrast.ci_low > -NEGLIGIBLE_CONTRAST
    return is_above and contrast.ci_high < NEGLIGIBLE_CONTRAST


def _negated(contrast: Estimate) -> Estimate:
    """A contrast with the inner positions minus the end."""
    return Estimate(-contrast.value, -contrast.ci_high, -contrast.ci_low, contrast.n)


def shape_in_metrics(metrics: pd.DataFrame, method: str) -> str:
    """Name the shape of a method's score over the gold position, from its rows of metrics.csv.

    The intervals are those of a number of questions that was fixed beforehand. A side is named only where the
    position bias as a whole is surely above zero and worth naming; that and the interval of each contrast together
    name a side that is not there in at most about one of twenty runs.

    Args:
        metrics: Rows of metrics.csv of one run.
        method: Name in its column ``method``.

    Returns:
        One of :data:`SHAPES`; empty where fewer than three positions, or their scores, can show none.
    """
    rows = metrics[metrics["method"] == method].drop_duplicates("metric")
    by_metric: dict[str, Any] = {row.metric: row for row in rows.itertuples()}
    keys = ("position_bias", "primacy", "recency")
    found = [by_metric[key] for key in keys if key in by_metric]
    estimates = [Estimate(r.value, r.ci_low, r.ci_high, int(r.n)) for r in found]
    if len(estimates) < len(keys) or any(pd.isna(e.ci_low) for e in estimates):
        return ""
    bias, first, last = estimates
    name = _name(first, last)
    if is_named_bias(bias):
        return UNEVEN if name == FLAT else name
    if bias.ci_high < SMALLEST_BIAS:
        return FLAT
    return name if name == FLAT else UNCLEAR


def is_named_bias(bias: Any) -> bool:
    """Return whether a position bias is surely above zero, and large enough to be named.

    Args:
        bias: Has ``value`` and ``ci_low``.
    """
    return bool(bias.ci_low > 0 and bias.value >= SMALLEST_BIAS)
