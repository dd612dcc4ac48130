"""Compare a claim with a number, and draw conclusions from several claims together."""

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
FINDING_VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Kind = Literal["paper", "control", "source"]
FINDING_COLUMNS = (
    "model",
    "kind",
    "verdict",
    "claim",
    "statistic",
    "value",
    "ci_low",
    "ci_high",
    "holds_if",
    "n",
    "p",
    "p_holm",
    "note",
)
"""Columns of ``findings.csv``."""
SMALLEST_SHARE = 0.05
"""Smallest effect worth naming: as a share of the changed quantity or of all examples, or as a correlation."""
SMALLEST_POINTS = 1.0
"""Smallest difference of two scores worth naming, in points."""
ALPHA = 0.05
MIN_OBSERVATIONS = 6  # with fewer a sign test cannot reach ALPHA at all
CONSTANT = "nothing varies here: every draw gives one value, or none"
TOO_FEW = f"fewer than {MIN_OBSERVATIONS} observations"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A claim compared with a number.

    The verdict is ``holds`` where the number's interval lies on the claimed side of a bound, ``contradicted`` where it
    lies on the other, ``inconclusive`` where it contains the bound, and ``not testable`` where the run says nothing
    about the claim. The bound of an effect is the smallest one worth naming, not zero (:data:`SMALLEST_SHARE`,
    :data:`SMALLEST_POINTS`).

    Attributes:
        kind: Whose claim it is: a paper's, a control of ours, or that something is a source of a bias.
        verdict: See above.
        claim: The claim with its source.
        statistic: Name of ``value``, with its unit.
        value: The number.
        ci_low: Lower end of its 95 % interval; NaN where it has none.
        ci_high: Upper end.
        holds_if: Where the number must lie for the claim to hold, in words; empty for an exact claim.
        n: Observations behind it.
        p: Two-sided p of the claim's bound; NaN for an exact claim.
        p_holm: ``p`` adjusted within its family, see :func:`correct_findings`.
        note: Caveats for the reader.
        rests_on: The claim without which this one says nothing, such as that of the layers which it is about.
    """

    kind: Kind = "paper"
    verdict: Verdict
    claim: str
    statistic: str
    value: float
    ci_low: float = math.nan
    ci_high: float = math.nan
    holds_if: str = ""
    n: int
    p: float = math.nan
    p_holm: float = math.nan
    note: str = ""
    rests_on: str = ""

    @classmethod
    def that(
        cls,
        holds: bool,
        claim: str,
        statistic: str,
        number: Sequence[float],
        note: str = "",
    ) -> Self:
        """State an exact claim (theory, a count, a criterion), which takes no part in a correction.

        Args:
            holds: Whether it holds, as the caller judges.
            claim: The claim with its source.
            statistic: Name of the number, with its unit.
            number: An :class:`Estimate`, or value and n of a number without an interval.
            note: Caveats for the reader.
        """
        if len(number) == 4:
            value, low, high, n = number
        else:
            value, n = number
            low = high = math.nan
        return cls(
            verdict="holds" if holds else "contradicted",
            claim=claim,
            statistic=statistic,
            value=float(value),
            ci_low=float(low),
            ci_high=float(high),
            n=int(n),
            note=note,
        )

    @classmethod
    def tested(
        cls,
        holds: bool,
        claim: str,
        statistic: str,
        number: Sequence[float],
        p: float,
        note: str = "",
    ) -> Self:
        """State a claim with its own test.

        Args:
            holds: Whether the number speaks for the claim rather than against it.
            claim: The claim with its source.
            statistic: Name of the number, with its unit.
            number: An :class:`Estimate`, or value and n of a number without an interval.
            p: The test's two-sided p.
            note: Caveats for the reader.
        """
        finding = cls.that(holds, claim, statistic, number, note)
        if finding.n < MIN_OBSERVATIONS:
            return finding.not_testable(TOO_FEW)
        if math.isnan(finding.value) or math.isnan(p):
            return finding.not_testable(CONSTANT)
        # n observations cannot be stronger evidence than their sign test.
        p = min(max(p, 2.0 ** (1 - finding.n)), 1)
        if p > ALPHA:
            return replace(finding, p=p, verdict="inconclusive")
        return replace(finding, p=p)

    @classmethod
    def within(
        cls,
        claim: str,
        statistic: str,
        estimate: Estimate,
        low: float,
        high: float,
        note: str = "",
        least_p: float = 0.0,
    ) -> Self:
        """State the claim that a number lies between two bounds.

        It holds where the whole interval does, and is contradicted where the whole interval lies beyond one.

        Args:
            claim: The claim with its source.
            statistic: Name of the number, with its unit.
            estimate: The number with its interval.
            low: Lower bound, -inf for none.
            high: Upper bound, inf for none.
            note: Caveats for the reader.
            least_p: A p of another test of the claim, below which this one's may not lie.
        """
        is_inside = low < estimate.ci_low and estimate.ci_high < high
        is_beyond = estimate.ci_low > high or estimate.ci_high < low
        # An interval without width, on the bound, is no test.
        is_bound_itself = estimate.ci_low == estimate.ci_high in (low, high)
        p = math.nan
        if not is_bound_itself:
            p = max(p_value(estimate, low, high), least_p)
        finding = cls.tested(is_inside, claim, statistic, estimate, p, note)
        finding = replace(finding, holds_if=_describe_bounds(low, high))
        if is_inside or is_beyond or finding.verdict == "not testable":
            return finding
        # The interval as it is printed decides, whatever the last digit of p.
        return replace(finding, verdict="inconclusive")

    @classmethod
    def above(
        cls,
        claim: str,
        statistic: str,
        estimate: Estimate,
        bound: float,
        note: str = "",
        least_p: float = 0.0,
    ) -> Self:
        """Return the finding on the claim that a number lies above a bound; arguments as of :meth:`within`."""
        return cls.within(claim, statistic, estimate, bound, math.inf, note, least_p)

    @classmethod
    def below(
        cls,
        claim: str,
        statistic: str,
        estimate: Estimate,
        bound: float,
        note: str = "",
        least_p: float = 0.0,
    ) -> Self:
        """Return the finding on the claim that a number lies below a bound; arguments as of :meth:`within`."""
        return cls.within(claim, statistic, estimate, -math.inf, bound, note, least_p)

    @classmethod
    def untestable(cls, claim: str, statistic: str, note: str, n: int = 0) -> Self:
        """Return the finding that a run says nothing about a claim.

        Args:
            claim: The claim.
            statistic: What would have been measured.
            note: Why it was not.
            n: Number of observations, if there are any.
        """
        return cls(
            claim=claim,
            statistic=statistic,
            value=math.nan,
            n=n,
            verdict="not testable",
            note=note,
        )

    def not_testable(self, note: str) -> Self:
        """Return the same number without a verdict; ``note``, put before the finding's note, says why."""
        notes = "; ".join(filter(None, [note, self.note]))
        return replace(self, verdict="not testable", p=math.nan, note=notes)

    def inconclusive(self, note: str = "") -> Self:
        """Return the same number as undecided, such as a tie; ``note``, put before the finding's note, says why."""
        notes = "; ".join(filter(None, [note, self.note]))
        return replace(self, verdict="inconclusive", note=notes)

    def control(self) -> Self:
        """Return the same finding as a control of ours, which no paper claims."""
        return replace(self, kind="control")


def with_subject(claim: str, subject: str) -> str:
    """Return a claim with its subject, where a paper's words ("the positional channel") fit several things.

    Args:
        claim: The claim, with its source in brackets at its end where it has one.
        subject: The subject; empty adds nothing. It is put in square brackets before the source.
    """
    if not subject:
        return claim
    text, bracket, source = claim.rpartition(" (")
    if not bracket:
        return f"{claim} [{subject}]"
    return f"{text} [{subject}] ({source}"


def inert_note(name: str, changed: float, difference: Estimate) -> str:
    """Explain that a change is inert, so that no claim on it can be tested; empty if it is not.

    A change is inert where it alters the scores of fewer than :data:`SMALLEST_SHARE` of the prompts and the mean not
    significantly. With enough questions, a comparison of inert settings would hold or be "contradicted" whatever the
    claim says.

    Args:
        name: The setting, for the note.
        changed: Share of the n prompts whose score it changes.
        difference: Its mean score minus that of the unmodified model.
    """
    moves = difference.ci_low > 0 or difference.ci_high < 0
    if moves or not changed < SMALLEST_SHARE:
        return ""
    count = round(changed * difference.n)
    return f"{name} changes the scores of {count} of {difference.n} prompts: it is inert here"


def _describe_bounds(low: float, high: float) -> str:
    """Describe in words the range between two bounds, one of which may be infinite."""
    if math.isinf(high):
        return f"above {_describe_bound(low)}"
    if math.isinf(low):
        return f"below {_describe_bound(high)}"
    return f"between {_describe_bound(low)} and {_describe_bound(high)}"


def _describe_bound(bound: float) -> str:
    """A bound in three digits; one that few would read, such as 0.0000058, with what it is."""
    text = f"{bound:.3g}"
    if "e-" not in text:
        return text
    decimals = 2 - math.floor(math.log10(abs(bound)))
    return f"{bound:.{decimals}f}, the smallest effect worth naming"


def p_value(
    estimate: Estimate, low: float = -math.inf, high: float = math.inf
) -> float:
    """Two-sided p of the bound that separates a claim (``low`` < number < ``high``) from the number.

    Between the bounds it is the larger p of the two, beyond a bound that bound's p. The p is normal, with the
    half of the interval towards the bound as 1.96 standard errors: below 0.05 exactly where the interval leaves
    the bound out, also where the interval is lopsided. NaN without a finite bound.

    Args:
        estimate: The number with its 95 % interval.
        low: Lower bound of the claim.
        high: Upper bound of the claim.
    """
    value = estimate.value
    if not estimate.ci_low < value < estimate.ci_high:
        # A correction for bias may leave the number outside its interval.
        value = (estimate.ci_low + estimate.ci_high) / 2

    if value < low:
        return _bound_p(value, estimate, low)
    if value > high:
        return _bound_p(value, estimate, high)
    finite_bounds = [bound for bound in (low, high) if math.isfinite(bound)]
    return max(
        (_bound_p(value, estimate, bound) for bound in finite_bounds), default=math.nan
    )


def draws_p(draws: Array, bound: float) -> float:
    """Two-sided p of a bound from bootstrap draws: twice the share of them on its smaller side, or on it.

    For a statistic of few values, such as a rank correlation of four numbers, which no normal distribution fits.

    Args:
        draws: The draws, [R].
        bound: The bound.
    """
    fewer = min((draws <= bound).sum(), (draws >= bound).sum())
    return float(min(2 * (1 + fewer) / (1 + len(draws)), 1))


def _bound_p(value: float, estimate: Estimate, bound: float) -> float:
    """Return the two-sided normal p of one bound.

    Args:
        value: The number.
        estimate: Its interval, of which the half towards the bound is 1.96 standard errors.
        bound: The bound.
    """
    half = estimate.ci_high - value
    if bound < value:
        half = value - estimate.ci_low
    distance = abs(value - bound)
    if not half:
        return float(distance == 0)
    return float(2 * scipy.stats.norm.sf(Z95 * distance / half))


def join_findings(
    parts: Sequence[Finding], numbers_of: Finding | None = None
) -> Finding:
    """Join the findings on the parts of one claim into one, with the estimate of the part that decides.

    The claim holds where all parts hold, with the largest p (intersection-union test). It is contradicted where
    a part is and the smallest p of such parts, times the number of parts (Bonferroni), is at most ALPHA.
    Otherwise it is as weak as its weakest part.

    Args:
        parts: A finding for each part.
        numbers_of: A finding whose estimate to report in place of that of the deciding part.
    """
    contradicted = [part for part in parts if part.verdict == "contradicted"]
    if contradicted:
        decisive = min(contradicted, key=lambda part: part.p)
        p = min(decisive.p * len(parts), 1)
        verdict: Verdict = "inconclusive" if p > ALPHA else "contradicted"
    else:
        order = ("not testable", "inconclusive", "holds")
        decisive = min(parts, key=lambda part: (order.index(part.verdict), -part.p))
        p = decisive.p
        verdict = decisive.verdict
    return replace(numbers_of or decisive, verdict=verdict, p=p)


def holm(p: Sequence[float]) -> Array:
    """Adjust the p values of one family (Holm 1979).

    Args:
        p: Raw p values, [P]; NaN stays NaN and does not count.

    Returns:
        Adjusted p values, [P].
    """
    raw = np.asarray(p, dtype=float)
    count = np.count_nonzero(~np.isnan(raw))
    order = np.argsort(raw)[:count]
    steps = np.maximum.accumulate(raw[order] * np.arange(count, 0, -1))
    adjusted = np.full(len(raw), np.nan)
    adjusted[order] = np.minimum(steps, 1)
    return adjusted


def correct_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings whose verdicts rest on p values adjusted for their number (Holm).

    All are from one study on one model. A family is the paper's claims there, our controls, or the sources of a bias.
    In it the chance that any true bound is taken for passed is at most 5 %: a verdict whose adjusted p is larger
    becomes ``inconclusive``, and so does one that rests on a claim which does not hold then.
    """
    result = list(findings)
    for kind in get_args(Kind):
        family = [i for i, finding in enumerate(result) if finding.kind == kind]
        adjusted = holm([result[i].p for i in family])
        for i, p in zip(family, adjusted, strict=True):
            result[i] = replace(result[i], p_holm=float(p))
            if p > ALPHA:
                result[i] = replace(result[i], verdict="inconclusive")
    verdicts = {finding.claim: finding.verdict for finding in result}
    for i, finding in enumerate(result):
        base = verdicts.get(finding.rests_on, "holds")
        if base != "holds" and finding.verdict in ("holds", "contradicted"):
            claim = finding.rests_on.partition(" (")[0]  # without its source
            note = f'it rests on "{claim}", which is {base}'
            result[i] = finding.inconclusive(note)
    return result


def estimate_columns(name: str = "") -> list[str]:
    """Columns of an estimate: ``value``, ``ci_low``, ``ci_high``, or ``name``, ``<name>_ci_low``, ..."""
    if not name:
        return ["value", "ci_low", "ci_high"]
    return [name, f"{name}_ci_low", f"{name}_ci_high"]


def estimate(
    row: Mapping[str, Any] | pd.Series, name: str = "", scale: float = 1.0
) -> Estimate:
    """Read an estimate from a table's row: its :func:`estimate_columns` times ``scale``, and ``n``."""
    value, low, high = (scale * float(row[column]) for column in estimate_columns(name))
    return Estimate(value, low, high, int(row["n"]))


def estimate_row(estimate: Estimate, name: str = "") -> dict[str, float]:
    """A row's columns for an estimate, without n: the inverse of :func:`estimate`."""
    return dict(zip(estimate_columns(name), estimate[:3], strict=True))


def findings_table(findings: Sequence[Finding], model: str) -> pd.DataFrame:
    """``findings.csv`` of one study on one model, :func:`correct_findings`."""
    rows = [
        {"model": model, **asdict(finding)} for finding in correct_findings(findings)
    ]
    return pd.DataFrame(rows, columns=list(FINDING_COLUMNS))
