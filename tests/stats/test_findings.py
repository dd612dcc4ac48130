"""Verdicts follow from the interval and from what was tested beside it, and estimates survive a table."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from posbench.report import tables
from posbench.stats import findings
from posbench.stats.bootstrap import Z95, Estimate, difference, normal
from posbench.stats.findings import (
    ALPHA,
    FINDING_COLUMNS,
    SMALLEST_SHARE,
    Finding,
    correct_findings,
    holm,
    join_findings,
    p_value,
)

AT = Estimate(0.3, 0.1, 0.5, 40)
SIDES = {"contradicted": 0, "inconclusive": 1, "holds": 2}


@pytest.mark.parametrize(
    ("bound", "above", "below"),
    [
        (0.0, "holds", "contradicted"),
        (0.1, "inconclusive", "inconclusive"),
        (0.3, "inconclusive", "inconclusive"),
        (0.5, "inconclusive", "inconclusive"),
        (0.6, "contradicted", "holds"),
    ],
)
def test_a_claim_holds_where_the_whole_interval_lies_on_its_side(
    bound: float, above: str, below: str
) -> None:
    assert Finding.above("c", "s", AT, bound).verdict == above
    assert Finding.below("c", "s", AT, bound).verdict == below


@pytest.mark.parametrize("n", [10, 100, 10_000])
def test_an_effect_too_small_to_name_never_holds_however_sure_it_is(n: int) -> None:
    rng = np.random.default_rng(n)
    sample = rng.normal(0.4 * SMALLEST_SHARE, 0.01, n)
    finding = Finding.above("c", "s", normal(sample), SMALLEST_SHARE)
    assert finding.ci_low > 0, "the sample tells it from zero"
    assert finding.verdict == "contradicted"
    larger = Finding.above("c", "s", normal(sample + SMALLEST_SHARE), SMALLEST_SHARE)
    assert larger.verdict == "holds"


def test_the_bound_stands_beside_the_verdict() -> None:
    judged = [
        Finding.above("c", "s", AT, 0.05),
        Finding.below("c", "s", AT, -1.0),
        Finding.within("c", "s", AT, -5, 5),
        Finding.that(True, "c", "s", (1, 2)),
    ]
    words = [finding.holds_if for finding in judged]
    assert words == ["above 0.05", "below -1", "between -5 and 5", ""]
    header, rows = tables.findings_table(findings.findings_table(judged, "tiny"))
    assert [row[header.index("holds if")] for row in rows] == words


def test_a_tie_decides_nothing() -> None:
    tie = Finding.that(False, "c", "s", (0.5, 4), "two of four").inconclusive("a tie")
    assert tie.verdict == "inconclusive" and tie.note == "a tie; two of four"


def test_a_number_keeps_its_interval_or_has_none() -> None:
    found = Finding.above("claim", "points", AT, 0, "read this")
    assert (found.value, found.ci_low, found.ci_high, found.n, found.note) == (
        *AT,
        "read this",
    )
    alone = Finding.that(True, "claim", "count", (7, 3)).control()
    assert (alone.value, alone.n, alone.verdict) == (7, 3, "holds") and math.isnan(
        alone.ci_low
    )
    silent = Finding.untestable("claim", "points", "too small")
    assert (
        silent.verdict == "not testable" and math.isnan(silent.value) and silent.n == 0
    )
    table = findings.findings_table([found, alone, silent], "tiny")
    assert (
        tuple(table) == FINDING_COLUMNS
        and list(table["model"]) == ["tiny"] * 3
        and table["value"][0] == 0.3
    )
    assert list(table["kind"]) == ["paper", "control", "paper"]
    assert list(table["p_holm"].isna()) == [False, True, True], (
        "exact claims take no part in the correction"
    )


def test_a_claim_holds_no_more_surely_than_the_one_that_it_rests_on() -> None:
    clear = Finding.above("layers follow (Source)", "share", AT, 0.0)
    unclear = replace(clear, p=0.04)
    resting = Finding.that(True, "they are deep", "share", (0.9, 20), "seen")
    resting = replace(resting, rests_on="layers follow (Source)")
    # One of two claims with p = 0.04 passes alone, and not after the correction.
    other = replace(clear, claim="another", p=0.5, verdict="inconclusive")
    for family, verdict in (
        ([clear, resting], "holds"),
        ([unclear, resting], "holds"),
        ([unclear, resting, other], "inconclusive"),
        ([resting], "holds"),
    ):
        corrected = {f.claim: f for f in findings.correct_findings(family)}
        assert corrected["they are deep"].verdict == verdict
    family = [unclear, other, resting]
    note = findings.correct_findings(family)[-1].note
    assert note == 'it rests on "layers follow", which is inconclusive; seen'
    # What was not tested at all stays so.
    untested = replace(
        Finding.untestable("deep", "share", "none"), rests_on=clear.claim
    )
    corrected = findings.correct_findings([unclear, other, untested])
    assert corrected[-1].verdict == "not testable" and corrected[-1].note == "none"


@pytest.mark.parametrize("name", ["", "change"])
def test_an_estimate_survives_a_row(name: str) -> None:
    row = findings.estimate_row(AT, name) | {"n": AT.n}
    wanted = (
        ["change", "change_ci_low", "change_ci_high"]
        if name
        else ["value", "ci_low", "ci_high"]
    )
    assert list(row) == [*wanted, "n"]
    assert (
        findings.estimate(row, name)
        == findings.estimate(pd.DataFrame([row]).iloc[0], name)
        == AT
    )
    assert findings.estimate(row, name, scale=10) == pytest.approx((3, 1, 5, 40))


def test_an_interval_that_moves_to_the_claimed_side_never_gets_a_worse_verdict() -> (
    None
):
    rng = np.random.default_rng(0)
    for low, high, step in rng.uniform((0.01, 0.01, 0), (0.5, 0.5, 0.2), (40, 3)):
        places = np.cumsum(np.full(12, step)) - 1
        for bound, n in product((-0.3, 0.0, 0.2), (6, 50)):
            moved = [
                Finding.above(
                    "c", "s", Estimate(at, at - low, at + high, n), bound
                ).verdict
                for at in places
            ]
            order = [SIDES[verdict] for verdict in moved]
            assert order == sorted(order)
            turned = [
                Finding.below(
                    "c", "s", Estimate(-at, -at - high, -at + low, n), -bound
                ).verdict
                for at in places
            ]
            assert turned == moved, "the other side is the same claim, mirrored"


def test_an_interval_that_widens_never_gets_a_surer_verdict_and_p_says_what_the_interval_says() -> (
    None
):
    rng = np.random.default_rng(1)
    for value, low, high, n in rng.uniform(
        (-1, 0.001, 0.001, 6), (1, 1, 1, 90), (1000, 4)
    ):
        at = Estimate(value, value - low, value + high, int(n))
        wide = Estimate(value, value - 2 * low, value + 3 * high, int(n))
        narrow = Finding.above("c", "s", at, 0)
        wider = Finding.above("c", "s", wide, 0)
        assert wider.verdict in (narrow.verdict, "inconclusive") and wider.p >= narrow.p
        assert (at.ci_low > 0 or at.ci_high < 0) == (
            p_value(at) < ALPHA or p_value(at, low=0) < ALPHA
        )
    samples = rng.normal(0.3, 1, (50, 40))
    for values in samples:
        half = Z95 * values.std(ddof=1) / np.sqrt(40)
        at = Estimate(values.mean(), values.mean() - half, values.mean() + half, 40)
        assert p_value(at, low=0) == pytest.approx(
            2 * norm.sf(abs(values.mean()) / half * Z95)
        )


@pytest.mark.parametrize(
    ("at", "verdict"),
    [
        (
            (0.0, 0.0, 0.0, 100),
            "not testable",
        ),  # a model at its floor: nothing changes anything
        ((0.9, 0.9, 0.9, 100), "holds"),  # a hundred observations that all say the same
        ((-0.9, -0.9, -0.9, 100), "contradicted"),
        ((0.9, 0.9, 0.9, 5), "not testable"),  # 2 / 2^5 > 0.05
        ((0.9, 0.8, 1.0, 5), "not testable"),
        ((0.9, math.nan, math.nan, 100), "not testable"),
        ((math.nan, math.nan, math.nan, 100), "not testable"),
        ((0.544, -0.617, 0.854, 60), "inconclusive"),
        ((0.2, 0.3, 0.4, 60), "holds"),  # a bias taken off may leave the value outside
    ],
)
def test_what_the_data_cannot_say_is_not_testable(
    at: tuple[float, ...], verdict: str
) -> None:
    found = Finding.above("c", "s", Estimate(*at), 0)
    assert found.verdict == verdict and math.isnan(found.p) == (
        verdict == "not testable"
    )
    assert bool(found.note) == (verdict == "not testable")


def test_between_two_bounds() -> None:
    cases = {
        (0, -0.01, 0.01): "holds",
        (0, -0.1, 0.1): "inconclusive",
        (0.2, 0.1, 0.3): "contradicted",
    }
    for at, verdict in cases.items():
        assert (
            Finding.within("c", "s", Estimate(*at, 50), -0.05, 0.05).verdict == verdict
        )
    # The closed form of two one-sided tests, both of a normal mean.
    p = p_value(Estimate(0.01, 0.01 - 1.96 * 0.02, 0.01 + 1.96 * 0.02, 50), -0.05, 0.05)
    assert p == pytest.approx(
        2 * max(norm.cdf((0.01 - 0.05) / 0.02), norm.sf((0.01 + 0.05) / 0.02)), rel=1e-3
    )


def test_holm_is_the_step_down_procedure() -> None:
    rng = np.random.default_rng(2)
    for size in (1, 2, 5, 30):
        p = rng.uniform(0, 0.1, size)
        rejected = set[int]()
        order = sorted(range(size), key=lambda i: p[i])
        for step, index in enumerate(
            order
        ):  # by hand: stop at the first that is too large
            if p[index] > ALPHA / (size - step):
                break
            rejected.add(index)
        adjusted = holm(p)
        assert {i for i in range(size) if adjusted[i] <= ALPHA} == rejected
        assert (adjusted >= p).all() and (
            adjusted <= np.minimum(size * p, 1) + 1e-15
        ).all()
        with_gaps = holm(np.concatenate([[np.nan], p, [np.nan]]))
        assert np.isnan(with_gaps[[0, -1]]).all() and np.array_equal(
            with_gaps[1:-1], adjusted
        )
    # Holm 1979 by hand, as R's p.adjust prints it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_a_verdict_rests_on_the_adjusted_p_and_controls_are_a_family_of_their_own() -> (
    None
):
    barely = [
        Finding.above(f"{i}", "s", Estimate(2.1, 2.1 - 1.96, 2.1 + 1.96, 50), 0)
        for i in range(3)
    ]
    clear = Finding.below("x", "s", Estimate(9, 8, 10, 50), 0)
    alone, *rest = correct_findings([barely[0].control(), *barely, clear])
    assert alone.verdict == "holds" and alone.p_holm == alone.p
    assert [each.verdict for each in rest] == ["inconclusive"] * 3 + ["contradicted"]


def test_of_claims_that_are_all_at_their_bound_one_in_twenty_families_is_wrong() -> (
    None
):
    rng = np.random.default_rng(3)
    families = 400
    wrong = 0
    alone = 0
    for _ in range(families):
        values = rng.normal(0, 1, (8, 60))
        family = [Finding.above("c", "s", normal(each), 0) for each in values]
        alone += any(each.verdict != "inconclusive" for each in family)
        wrong += any(
            each.verdict != "inconclusive" for each in correct_findings(family)
        )
    assert (
        wrong / families < 0.05 + 3 * (0.05 * 0.95 / families) ** 0.5
        and alone / families > 0.2
    )
    clusters = [str(i) for i in range(40)]
    drawn = [rng.integers(-1, 2, 40) for _ in range(60)]
    family = [Finding.above("c", "s", difference(each, clusters), 0) for each in drawn]
    assert sum(each.verdict == "holds" for each in correct_findings(family)) <= 1


def test_a_claim_of_several_parts_holds_where_all_do() -> None:
    high, low, wide = (
        Finding.above("c", "s", Estimate(*at, 50), 0)
        for at in ((2, 1, 3), (-2, -3, -1), (0.5, -1, 2))
    )
    silent = Finding.untestable("c", "s", "no")
    assert (
        join_findings([high, high]).verdict == "holds"
        and join_findings([high, high]).p == high.p
    )
    # As text: since Python 3.13 a dataclass that holds a NaN does not equal itself.
    assert str(join_findings([high, wide])) == str(wide)
    assert join_findings([high, wide], numbers_of=high).value == high.value
    assert (
        join_findings([high, low, wide]).verdict == "contradicted"
        and join_findings([high, low]).p == 2 * low.p
    )
    assert join_findings([high, silent]).verdict == "not testable"
    # Of many parts one falls barely by chance.
    barely = Finding.above("c", "s", Estimate(-2, -2 - 1.96, -2 + 1.96, 50), 0)
    assert (
        barely.verdict == "contradicted"
        and join_findings([barely, *[high] * 5]).verdict == "inconclusive"
    )


def test_a_test_of_its_own_gives_the_verdict() -> None:
    assert Finding.tested(True, "c", "s", (1, 50), 0.001).verdict == "holds"
    assert Finding.tested(False, "c", "s", (1, 50), 0.001).verdict == "contradicted"
    assert Finding.tested(True, "c", "s", (1, 50), 0.2).verdict == "inconclusive"
    assert Finding.tested(True, "c", "s", (1, 6), 0.0).p == 2.0**-5, (
        "six observations say no more"
    )
