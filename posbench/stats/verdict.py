"""One verdict on position bias for each method of a run, from its metrics.csv (docs/metrics.md)."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

from posbench.late import pd
from posbench.stats import outcomes
from posbench.stats.findings import SMALLEST_POINTS
from posbench.stats.frames import (
    SERVED,
    UNMODIFIED,
    display_name,
    rows_at_positions,
    rows_over_all_positions,
)
from posbench.stats.position_bias import MINUS_HALF, SMALLEST_BIAS, CurveIntervals
from posbench.stats.shape import (
    NEGLIGIBLE_CONTRAST,
    WITHOUT_SIDE,
    curve_in_metrics,
    is_flat,
    is_named_bias,
    shape_in_metrics,
)

CANNOT_DO = "cannot do the task"
NO_BIAS = "no bias"
BIAS = "bias"
FIXED = "fixed"
NOT_FIXED = "not fixed"
CANNOT_TELL = "cannot tell"
VERDICTS = (CANNOT_DO, NO_BIAS, BIAS, FIXED, NOT_FIXED, CANNOT_TELL)

FIXED_SHARE = 0.5
"""Share of the position bias that a fix removes at least."""
BIAS_MEANING = "Position bias: standard deviation of the score over the gold positions, without what noise adds."
RULES = {
    CANNOT_DO: "no score is surely above a guess.",
    NO_BIAS: (
        f"every position is surely within {100 * NEGLIGIBLE_CONTRAST:g} points of the mean of the others."
    ),
    BIAS: f"it is surely above zero, and at least {100 * SMALLEST_BIAS:g} points.",
    FIXED: "more than half of it is surely gone, and the average does not surely fall by more than a point.",
    NOT_FIXED: "surely less than half of it is gone, or the average surely falls by more than a point.",
    CANNOT_TELL: "no other verdict is sure.",
}
"""When a verdict is given, in a sentence after :data:`BIAS_MEANING`; docs/metrics.md has the whole rule."""


def verdict_rule(name: str) -> str:
    """Return what a position bias is, and when a verdict on it is given."""
    return f"{BIAS_MEANING} {name.capitalize()}: {RULES[name]}"


class Verdict(NamedTuple):
    """A verdict, one of :data:`VERDICTS`, and the numbers or the obstacle behind it, in words."""

    name: str
    reason: str

    def __str__(self) -> str:
        """The verdict with its reason."""
        return f"{self.name} ({self.reason})"


def run_verdict(metrics: pd.DataFrame | None) -> Verdict | None:
    """Return the verdict on a run: on its method, or without one on the unmodified model.

    Args:
        metrics: Rows of metrics.csv of one run; None when nothing was scored.

    Returns:
        The verdict; None where no position bias was measured, as with fewer than three gold positions.
    """
    if metrics is None or "note" not in metrics:
        return None
    methods = list(dict.fromkeys(metrics["method"]))
    base = SERVED if SERVED in methods else UNMODIFIED
    verdict = _base_verdict(metrics, base)
    others = [method for method in methods if method != base]
    if verdict is None or not others:
        return verdict
    if verdict.name == CANNOT_DO:
        return _verdict_above_floor(metrics, others[-1]) or verdict
    if verdict.name == BIAS:
        return _method_verdict(metrics, others[-1], base)
    return verdict


def _base_verdict(metrics: pd.DataFrame, base: str) -> Verdict | None:
    """Return the verdict on the unmodified model's position bias; None where none was measured.

    Args:
        metrics: Rows of metrics.csv.
        base: Name of the unmodified model in them.
    """
    bias = _row(metrics, base, "position_bias")
    average = _score(metrics, base)
    if bias is None or average is None:
        return None
    obstacle = _note(average) or _note(bias)
    if obstacle.startswith("at the floor"):
        return Verdict(CANNOT_DO, obstacle.partition(": ")[2] or obstacle)
    curve = curve_in_metrics(metrics, base)
    reach = _reach(curve)
    if curve and is_flat(curve.contrasts) and not is_named_bias(curve.bias):
        text = (
            f"no position differs from the mean of the others by more than {100 * NEGLIGIBLE_CONTRAST:g} points: by "
            f"at most {reach}; a smaller difference may be missed"
        )
        return Verdict(NO_BIAS, text)
    if obstacle or pd.isna(bias.ci_low):
        text = obstacle or "too few questions for an interval"
        if obstacle.startswith("at the ceiling"):
            text = f"{display_name(base)} is {obstacle}"
        return Verdict(CANNOT_TELL, text)
    measured = f"position bias of {display_name(base)} {_interval(bias)} points{_side(metrics, base)}"
    if is_named_bias(bias):
        return Verdict(BIAS, measured)
    return Verdict(
        CANNOT_TELL,
        f"{measured}; a position may differ from the mean of the others by up to {reach}",
    )


def _reach(curve: CurveIntervals | None) -> str:
    """The largest difference of a position from the mean of the others that an interval holds, with their number."""
    if curve is None:
        return ""
    reach = max((max(abs(c.ci_low), abs(c.ci_high)), c.n) for c in curve.contrasts)
    return f"{_points(reach[0])} points by the 95 % intervals, n = {reach[1]} at each position"


def _method_verdict(metrics: pd.DataFrame, method: str, base: str) -> Verdict:
    """Return the verdict whether a method removes most of the unmodified model's bias without lowering the average.

    It is fixed if more than half of the bias is surely removed, not fixed if surely less is, or if the average surely
    falls by an amount worth naming: the interval of the bias after minus half of the bias before decides.

    Args:
        metrics: Rows of metrics.csv.
        method: The method.
        base: Name of the unmodified model in them.
    """
    before = _row(metrics, base, "position_bias")
    after = _row(metrics, method, "position_bias")
    change = _row(metrics, method, "position_bias_difference")
    excess = _row(metrics, method, MINUS_HALF)
    gain = _score(metrics, method, "difference")
    assert before is not None
    obstacle = _note(_score(metrics, method)) or _note(after)
    if obstacle.startswith(outcomes.PROBLEM):
        return Verdict(CANNOT_TELL, f"{method}: {obstacle}")
    if gain is not None and gain.ci_high < -SMALLEST_POINTS / 100:
        return Verdict(
            NOT_FIXED, f"{method} lowers the average by {_points(-gain.value)} points"
        )
    was = f"position bias {_points(before.value)} points{_side(metrics, base)}"
    shortfall = _shortfall(metrics, method)
    # The standard deviation of three or more scores between 1 - d and 1 is at most d / sqrt(3).
    is_fixed = shortfall / math.sqrt(3) < FIXED_SHARE * before.ci_low
    if obstacle.startswith("at the ceiling"):
        name = FIXED if is_fixed else CANNOT_TELL
        return Verdict(name, f"{was}; {method} is {obstacle}")
    if obstacle and is_fixed:
        # Too few questions to see a small bias that may be left, but enough to see that most of it is gone.
        left = f"{method} surely answers more than {math.floor(100 * (1 - shortfall))} % at every position"
        return Verdict(FIXED, f"{was}; {left}")
    if obstacle.startswith("at the floor"):
        # That the average falls for sure was looked at above.
        return Verdict(CANNOT_TELL, f"{was}; {method} is {obstacle}")
    if None in (after, change, excess) or obstacle or pd.isna(excess.ci_low):
        return Verdict(CANNOT_TELL, obstacle or f"{method} and {base} are not compared")
    measured = (
        f"{was}, with {method} {_points(after.value)}: change {_interval(change)} points; "
        f"what is left minus half of the bias before {_interval(excess)}"
    )
    if excess.ci_high < 0:
        return Verdict(FIXED, measured)
    if excess.ci_low > 0:
        return Verdict(NOT_FIXED, measured)
    return Verdict(CANNOT_TELL, measured)


def _verdict_above_floor(metrics: pd.DataFrame, method: str) -> Verdict | None:
    """Return the verdict on a method that lifts a model off the floor of its task; None if it stays there.

    Args:
        metrics: Rows of metrics.csv.
        method: The method.
    """
    average = _score(metrics, method)
    if _note(average).startswith(outcomes.PROBLEM):
        return Verdict(CANNOT_TELL, f"{method}: {_note(average)}")
    note = _note(_row(metrics, method, "position_bias"))
    if average is None or note.startswith("at the floor"):
        return None
    reason = f"{method} reaches {_percent(average)}, but the unmodified model is at the floor: "
    return Verdict(CANNOT_TELL, f"{reason}there is no bias to compare with")


def _side(metrics: pd.DataFrame, method: str) -> str:
    """The shape of a method's score in brackets; empty where it favours no part of the prompt."""
    shape = shape_in_metrics(metrics, method)
    return "" if not shape or shape in WITHOUT_SIDE else f" ({shape})"


def _shortfall(metrics: pd.DataFrame, method: str) -> float:
    """Return 1 minus the lowest end of the intervals of a method's scores by position."""
    rows = rows_at_positions(metrics)
    return float(1 - rows.loc[rows["method"] == method, "ci_low"].min())


def _row(metrics: pd.DataFrame, method: str, metric: str) -> Any:
    """The row of a statistic of a method; None where there is none."""
    return _first(
        metrics[(metrics["method"] == method) & (metrics["metric"] == metric)]
    )


def _score(metrics: pd.DataFrame, method: str, metric: str = "") -> Any:
    """The row of a method's score over all positions, or its ``difference``; None where there is none."""
    rows = rows_over_all_positions(metrics, metric)
    return _first(rows[rows["method"] == method])


def _first(rows: pd.DataFrame) -> Any:
    """The first of these rows, its columns as attributes; None where there is none."""
    records = rows.to_dict("records")
    return SimpleNamespace(**records[0]) if records else None


def _note(row: Any) -> str:
    """Return the note on why a number says nothing; empty if there is none."""
    note = getattr(row, "note", "")
    return note if isinstance(note, str) else ""


def _percent(row: Any) -> str:
    return f"{100 * row.value:.1f} %"


def _points(share: float) -> str:
    return f"{100 * share:z.1f}"


def _interval(row: Any) -> str:
    return f"{_points(row.value)} [{_points(row.ci_low)}, {_points(row.ci_high)}]"
