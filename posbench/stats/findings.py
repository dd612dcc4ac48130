"""A claim held against a number, and claims held against each other: what may be said of them together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self, get_args

import numpy as np
import scipy

from posbench.late import pd
from posbench.stats.bootstrap import Z95, Array, Estimate

Verdict = Literal["holds", "contradicted", "inconclusive", "not testable"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Kind = Literal["paper", "control"]
COLUMNS = (
    *(
        "model",
        "kind",
        "verdict",
        "claim",
        "statistic",
        "value",
        "ci_low",
        "ci_high",
        "n",
        "p",
        "p_holm",
    ),
    "note",
)
"""Columns of ``findings.csv``."""
ALPHA = 0.05
FEW = 6  # observations from which on a sign test can reach ALPHA at all
CONSTANT = "nothing varies here: every draw gives one value, or none"
TOO_FEW = f"fewer than {FEW} observations"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A claim held against a number: ``holds`` where its interval lies on the claimed side, ``contradicted``
    on the other, ``inconclusive`` where it cannot tell, ``not testable`` where this run says nothing."""

    kind: Kind = "paper"  # whose claim it is: a paper's, or a control of ours
    verdict: Verdict
    claim: str  # the claim with its source
    statistic: str  # what ``value`` is, with its unit
    value: float  # the number
    ci_low: float = (
        math.nan
    )  # ends of its 95 % interval; not a number where it has none
    ci_high: float = math.nan
    n: int  # observations behind it
    p: float = (
        math.nan
    )  # two-sided, of the claim's bound; not a number for an exact claim
    p_holm: float = math.nan  # adjusted within its family, see :func:`corrected`
    note: str = ""  # what a reader must know to judge it

    @classmethod
    def that(
        cls,
        holds: bool,
        claim: str,
        statistic: str,
        at: Sequence[float],
        note: str = "",
    ) -> Self:
        """An exact claim (theory, a count, a criterion), judged by the caller; ``at`` is the number with its
        interval, or number and n. It takes no part in a correction."""
        value, low, high, n = at if len(at) == 4 else (at[0], math.nan, math.nan, at[1])
        numbers: dict[str, Any] = ends(
            Estimate(float(value), float(low), float(high), int(n))
        )
        verdict: Verdict = "holds" if holds else "contradicted"
        return cls(
            claim=claim,
            statistic=statistic,
            **numbers,
            n=int(n),
            verdict=verdict,
            note=note,
        )

    @classmethod
    def tested(
        cls,
        holds: bool,
        claim: str,
        statistic: str,
        at: Sequence[float],
        p: float,
        note: str = "",
    ) -> Self:
        """A claim with a test of its own: which side the number speaks for, and the test's two-sided p."""
        found = cls.that(holds, claim, statistic, at, note)
        if math.isnan(found.value) or math.isnan(p) or found.n < FEW:
            return found.not_testable(TOO_FEW if found.n < FEW else CONSTANT)
        p = min(
            max(p, 2.0 ** (1 - found.n)), 1
        )  # no n observations can say more than a sign test of them
        return replace(
            found, p=p, verdict=found.verdict if p <= ALPHA else "inconclusive"
        )

    @classmethod
    def within(
        cls,
        claim: str,
        statistic: str,
        at: Estimate,
        low: float,
        high: float,
        note: str = "",
    ) -> Self:
        """Holds where the whole interval lies between two bounds; contradicted beyond one of them."""
        inside = low < at.ci_low and at.ci_high < high
        beyond = at.ci_low > high or at.ci_high < low
        p = (
            math.nan
            if at.ci_low == at.ci_high in (low, high)
            else p_value(at, low, high)
        )
        found = cls.tested(inside, claim, statistic, at, p, note)
        # By the interval as it is printed, whatever the last digit of p.
        sure = inside or beyond or found.verdict == "not testable"
        return found if sure else replace(found, verdict="inconclusive")

    @classmethod
    def above(
        cls,
        claim: str,
        statistic: str,
        at: Estimate,
        bound: float = 0.0,
        note: str = "",
    ) -> Self:
        """Holds where the whole interval lies above a bound; contradicted below it."""
        return cls.within(claim, statistic, at, bound, math.inf, note)

    @classmethod
    def below(
        cls,
        claim: str,
        statistic: str,
        at: Estimate,
        bound: float = 0.0,
        note: str = "",
    ) -> Self:
        """Holds where the whole interval lies below a bound; contradicted above it."""
        return cls.within(claim, statistic, at, -math.inf, bound, note)

    @classmethod
    def untestable(cls, claim: str, statistic: str, note: str, n: int = 0) -> Self:
        """A claim that this run says nothing about."""
        return cls(
            claim=claim,
            statistic=statistic,
            value=math.nan,
            n=n,
            verdict="not testable",
            note=note,
        )

    def not_testable(self, note: str = "") -> Self:
        """The same number without a verdict, and why."""
        told = "; ".join(filter(None, [note, self.note]))
        return replace(self, verdict="not testable", p=math.nan, note=told)

    def control(self) -> Self:
        """The same as a control of ours, which no paper claims."""
        return replace(self, kind="control")


def p_value(at: Estimate, low: float = -math.inf, high: float = math.inf) -> float:
    """Two-sided p of the bound that separates the claim from the number: of the less sure one between two
    bounds, of the one passed beyond them. Normal, with the standard error of the interval's half towards the
    bound; so p is below 0.05 where the interval leaves the bound out, also where the interval is lopsided."""
    value, first, last, _ = at
    value = (
        value if first < value < last else (first + last) / 2
    )  # a bias taken off may leave it outside

    def of(bound: float) -> float:
        half = value - first if bound < value else last - value
        away = abs(value - bound)
        return (
            float(2 * scipy.stats.norm.sf(Z95 * away / half))
            if half
            else float(away == 0)
        )

    if value < low or value > high:
        return of(low if value < low else high)
    return max(
        (of(bound) for bound in (low, high) if math.isfinite(bound)), default=math.nan
    )


def joint(parts: Sequence[Finding], shown: Finding | None = None) -> Finding:
    """One claim of several parts, with the numbers of the part that decides, or of ``shown``.

    It holds where all parts do, with the largest p (intersection-union test), and is contradicted where one
    is, with its p times the number of parts (Bonferroni).
    """
    against = [part for part in parts if part.verdict == "contradicted"]
    if against:
        worst = min(against, key=lambda part: part.p)
        worst = replace(worst, p=min(worst.p * len(parts), 1))
        worst = worst if not worst.p > ALPHA else replace(worst, verdict="inconclusive")
    else:
        order = ("not testable", "inconclusive", "holds")
        worst = min(parts, key=lambda part: (order.index(part.verdict), -part.p))
    return replace(shown or worst, verdict=worst.verdict, p=worst.p)


def holm(p: Sequence[float]) -> Array:
    """Adjusted p values (Holm 1979) of one family; what is not a number stays so and counts for nothing."""
    raw = np.asarray(p, dtype=float)
    order = np.argsort(raw)[: np.count_nonzero(~np.isnan(raw))]
    steps = np.maximum.accumulate(raw[order] * np.arange(len(order), 0, -1))
    out = np.full(len(raw), np.nan)
    out[order] = np.minimum(steps, 1)
    return out


def corrected(findings: Sequence[Finding]) -> list[Finding]:
    """Findings of one study on one model, whose verdicts rest on adjusted p values.

    A family is the paper's claims there, or our controls. In it the chance that any true bound is taken for
    passed is at most 5 %: a verdict whose adjusted p is larger becomes ``inconclusive``.
    """
    out = list(findings)
    for kind in get_args(Kind):
        family = [index for index, found in enumerate(out) if found.kind == kind]
        for index, p in zip(
            family, holm([out[index].p for index in family]), strict=True
        ):
            verdict: Verdict = "inconclusive" if p > ALPHA else out[index].verdict
            out[index] = replace(out[index], p_holm=float(p), verdict=verdict)
    return out


def columns(name: str = "") -> list[str]:
    """Columns of an estimate: ``value``, ``ci_low`` and ``ci_high``, or those that ``name`` begins."""
    return [
        name or "value",
        *(f"{name}_{end}".strip("_") for end in ("ci_low", "ci_high")),
    ]


def estimate(
    row: Mapping[str, Any] | pd.Series, name: str = "", scale: float = 1.0
) -> Estimate:
    """The estimate in a table's row: :func:`columns` times a factor, and ``n``."""
    value, low, high = (scale * float(row[column]) for column in columns(name))
    return Estimate(value, low, high, int(row["n"]))


def ends(at: Estimate, name: str = "") -> dict[str, float]:
    """A row's columns for an estimate, without n: the inverse of :func:`estimate`."""
    return dict(zip(columns(name), at[:3], strict=True))


def frame(findings: Sequence[Finding], model: str) -> pd.DataFrame:
    """``findings.csv`` of one study on one model, :func:`corrected`."""
    rows = [{"model": model, **asdict(finding)} for finding in corrected(findings)]
    return pd.DataFrame(rows, columns=list(COLUMNS))
