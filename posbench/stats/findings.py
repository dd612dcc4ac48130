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
    """A paper's claim held against a number.

    Attributes:
        claim: The claim with its source.
        statistic: What ``value`` is, with its unit.
        value: The number.
        ci_low: Lower end of its 95 % interval; not a number where it has none.
        ci_high: Upper end.
        n: Observations behind it.
        verdict: Whether the interval supports the claim.
        note: What a reader must know to judge it.
    """

    claim: str
    statistic: str
    value: float
    ci_low: float = math.nan
    ci_high: float = math.nan
    n: int
    verdict: Verdict
    note: str = ""

    @classmethod
    def that(
        cls, holds: bool, claim: str, statistic: str, at: Estimate | tuple[float, int], note: str = ""
    ) -> Self:
        """A claim that is judged by the caller.

        Args:
            holds: Whether it holds.
            claim: See :class:`Finding`.
            statistic: See :class:`Finding`.
            at: The number with its interval, or the number and n where it has none.
            note: See :class:`Finding`.
        """
        value, low, high, n = at if len(at) == 4 else (at[0], math.nan, math.nan, at[1])
        return cls(
            claim=claim,
            statistic=statistic,
            value=float(value),
            ci_low=float(low),
            ci_high=float(high),
            n=int(n),
            verdict="holds" if holds else "does not hold",
            note=note,
        )

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
        return cls(
            claim=claim, statistic=statistic, value=math.nan, n=n, verdict="not testable here", note=note
        )


def estimate(row: Mapping[str, Any] | pd.Series, name: str = "", scale: float = 1.0) -> Estimate:
    """The estimate in a table's row: ``value``, ``ci_low``, ``ci_high``, ``n``, or the columns that ``name``
    begins.

    Args:
        row: A row of a table.
        name: Column of the number where it is not ``value``; its interval's columns then begin with it.
        scale: Factor of all three numbers.
    """
    columns = (name or "value", *(f"{name}_{end}".strip("_") for end in ("ci_low", "ci_high")))
    value, low, high = (scale * float(row[column]) for column in columns)
    return Estimate(value, low, high, int(row["n"]))


def ends(at: Estimate, name: str = "") -> dict[str, float]:
    """A row's columns for an estimate, without n: the inverse of :func:`estimate`."""
    keys = (name or "value", *(f"{name}_{end}".strip("_") for end in ("ci_low", "ci_high")))
    return dict(zip(keys, at[:3], strict=True))


def frame(findings: Sequence[Finding], model: str) -> pd.DataFrame:
    """``findings.csv`` of one model."""
    return pd.DataFrame([{"model": model, **asdict(finding)} for finding in findings], columns=list(COLUMNS))
