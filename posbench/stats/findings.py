"""A claim held against a number: one constructor for each shape of claim."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import pandas as pd

from posbench.stats.bootstrap import Estimate

Verdict = Literal["holds", "does not hold", "not testable here"]
COLUMNS = ("model", "claim", "statistic", "value", "ci_low", "ci_high", "n", "verdict", "note")
"""Columns of ``findings.csv``."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A paper's claim held against a number."""

    claim: str  # the claim with its source
    statistic: str  # what ``value`` is, with its unit
    value: float  # the number
    ci_low: float = math.nan  # ends of its 95 % interval; not a number where it has none
    ci_high: float = math.nan
    n: int  # observations behind it
    verdict: Verdict  # whether the interval supports the claim
    note: str = ""  # what a reader must know to judge it

    @classmethod
    def that(
        cls, holds: bool, claim: str, statistic: str, at: Estimate | tuple[float, int], note: str = ""
    ) -> Self:
        """A claim that is judged by the caller; ``at`` is the number with its interval, or number and n."""
        value, low, high, n = at if len(at) == 4 else (at[0], math.nan, math.nan, at[1])
        verdict: Verdict = "holds" if holds else "does not hold"
        numbers: dict[str, Any] = ends(Estimate(float(value), float(low), float(high), int(n)))
        return cls(claim=claim, statistic=statistic, **numbers, n=int(n), verdict=verdict, note=note)

    @classmethod
    def above(cls, claim: str, statistic: str, at: Estimate, bound: float = 0.0, note: str = "") -> Self:
        """Holds where the whole interval lies above a bound."""
        return cls.that(at.ci_low > bound, claim, statistic, at, note)

    @classmethod
    def below(cls, claim: str, statistic: str, at: Estimate, bound: float = 0.0, note: str = "") -> Self:
        """Holds where the whole interval lies below a bound."""
        return cls.that(at.ci_high < bound, claim, statistic, at, note)

    @classmethod
    def untestable(cls, claim: str, statistic: str, note: str, n: int = 0) -> Self:
        """A claim that this run says nothing about."""
        verdict: Verdict = "not testable here"
        return cls(claim=claim, statistic=statistic, value=math.nan, n=n, verdict=verdict, note=note)


def columns(name: str = "") -> list[str]:
    """Columns of an estimate: ``value``, ``ci_low`` and ``ci_high``, or those that ``name`` begins."""
    return [name or "value", *(f"{name}_{end}".strip("_") for end in ("ci_low", "ci_high"))]


def estimate(row: Mapping[str, Any] | pd.Series, name: str = "", scale: float = 1.0) -> Estimate:
    """The estimate in a table's row: :func:`columns` times a factor, and ``n``."""
    value, low, high = (scale * float(row[column]) for column in columns(name))
    return Estimate(value, low, high, int(row["n"]))


def ends(at: Estimate, name: str = "") -> dict[str, float]:
    """A row's columns for an estimate, without n: the inverse of :func:`estimate`."""
    return dict(zip(columns(name), at[:3], strict=True))


def frame(findings: Sequence[Finding], model: str) -> pd.DataFrame:
    """``findings.csv`` of one model."""
    return pd.DataFrame([{"model": model, **asdict(finding)} for finding in findings], columns=list(COLUMNS))
