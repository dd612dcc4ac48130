"""Intervals against scipy, against every possible draw, and against cases worked out by hand."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, norm
from scipy.stats import t as student

from posbench.stats.bootstrap import (
    Estimate,
    combined,
    difference,
    mean,
    normal,
    paired,
    quantiles,
    resampled,
    statistic,
    tail,
    wilson,
    with_interval,
)

VALUES = {"a": [1.0, 2.0], "b": [4.0], "c": [0.0, 0.5, 7.0], "d": [3.0, -2.0]}
"""Scores of four questions, asked once to three times."""


def flat(clusters: dict[str, list[float]]) -> tuple[list[float], list[str]]:
    return [v for values in clusters.values() for v in values], [
        c for c, v in clusters.items() for _ in v
    ]


def every_draw(clusters: dict[str, list[float]]) -> np.ndarray:
    """Means of all 4^4 equally likely draws of four clusters."""
    draws = product(clusters.values(), repeat=len(clusters))
    return np.array([np.mean(np.concatenate(draw)) for draw in draws])


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_scipys(counts: tuple[int, int]) -> None:
    successes, n = counts
    theirs = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert wilson(successes, n) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_draws_are_those_of_whole_clusters() -> None:
    """Against the distribution over every possible draw."""
    exact = every_draw(VALUES)
    value, drawn = resampled({"x": flat(VALUES)}, stratified=False, resamples=40000)[
        "x"
    ]
    assert value == np.mean(flat(VALUES)[0])
    assert set(np.round(drawn, 9)) == set(np.round(exact, 9))
    for at in np.unique(exact.round(9)):
        assert np.mean(drawn < at + 1e-6) == pytest.approx(
            np.mean(exact < at + 1e-6), abs=0.012
        )


def test_intervals_are_quantiles_of_every_draw() -> None:
    # Of four clusters they reach further out than 2.5 %.
    beyond = norm.cdf(-student.ppf(0.975, 3) * np.sqrt(4 / 3))
    low, high = np.quantile(every_draw(VALUES), [beyond, 1 - beyond])
    at = statistic({"x": flat(VALUES)}, lambda means: means["x"], resamples=40000)
    assert at == pytest.approx((np.mean(flat(VALUES)[0]), low, high, 8), abs=0.08)


def test_a_mean_has_halls_interval() -> None:
    """Ends are where Hall's (1992) polynomial of the studentised mean reaches Student's quantiles."""
    values = np.random.default_rng(7).lognormal(sigma=1.0, size=30)
    names = [str(i) for i in range(30)]
    n = 30
    spread = values.std()
    end = student.ppf(0.975, 29)
    skew = ((values - values.mean()) ** 3).mean() / spread**3

    def reached(mean: float) -> float:
        t = (values.mean() - mean) / spread * np.sqrt(n - 1)
        linear = t + skew / np.sqrt(n) * (t**2 / 3 + 1 / 6)
        return linear + skew**2 * t**3 / (27 * n)

    at = difference(values, names)
    assert [reached(at.ci_low), reached(at.ci_high)] == pytest.approx([end, -end])
    assert mean(values, names) == at, "scores that are not in 0..1"
    even = np.array([1.0, 2.0, 3.0, 4.0, 2.5])
    assert difference(even, names[:5]) == pytest.approx(normal(even)), (
        "nothing is skewed"
    )
    assert np.isnan(difference([1.0, 2.0], ["q", "q"])[1:3]).all()


def test_a_statistic_of_two_groups_keeps_questions_paired() -> None:
    values, names = flat(VALUES)
    other = [v + 0.25 for v in values]
    groups = {"before": (values, names), "after": (other, names)}
    at = statistic(
        groups, lambda means: means["after"] - means["before"], resamples=300
    )
    assert at == pytest.approx((0.25, 0.25, 0.25, 8))
    # A ratio of means, by every draw of clusters.
    exact = [
        np.mean(np.concatenate(d) + 3) / np.mean(np.concatenate(d) ** 2 + 1)
        for d in product(map(np.array, VALUES.values()), repeat=4)
    ]
    groups = {
        "x": ([v + 3 for v in values], names),
        "y": ([v * v + 1 for v in values], names),
    }
    found = statistic(groups, lambda means: means["x"] / means["y"], resamples=40000)
    assert found[1:3] == pytest.approx(
        tuple(np.quantile(exact, [tail(4), 1 - tail(4)])),
        abs=0.03,
    )
    assert np.isnan(
        statistic({"x": ([1.0, 2.0], ["q", "q"])}, lambda m: m["x"], resamples=100)[1:3]
    ).all()
    # One question at each of two places, as with a limit of 1.
    ones = {"x": ([1.0], ["q"]), "y": ([3.0], ["r"])}
    alone = statistic(ones, lambda m: m["x"] - m["y"], resamples=100)
    assert alone.value == -2 and np.isnan(alone[1:3]).all()


def test_an_interval_of_few_clusters_ends_at_a_draw() -> None:
    """A position bias whose smallest draw is zero is not surely above zero."""
    draws = np.r_[0.0, np.linspace(0.05, 0.6, 1999)]
    assert quantiles(draws, 2) == (0.0, 0.6)
    low, high = quantiles(draws, 30)
    assert 0.05 < low < high < 0.6


def test_a_stratified_draw_keeps_the_size_of_every_group() -> None:
    groups = {
        p: (list(range(p + 1)), [f"{p}-{i}" for i in range(p + 1)]) for p in range(3)
    }
    alone = resampled(groups, stratified=True, resamples=200)
    assert not any(np.isnan(drawn).any() for _, drawn in alone.values())
    assert set(alone[0][1]) == {0} and set(alone[1][1]) == {0, 0.5, 1}, (
        "one prompt, and two of two"
    )
    assert np.isnan(resampled(groups, stratified=False, resamples=200)[0][1]).any(), (
        "a group may run out"
    )
    # A question that is asked at every position is drawn for all of them.
    asked = {p: ([1.0, 2.0, 4.0], ["a", "b", "c"]) for p in range(3)}
    draws = [
        drawn for _, drawn in resampled(asked, stratified=True, resamples=200).values()
    ]
    assert np.array_equal(draws[0], draws[1]) and np.array_equal(draws[0], draws[2])


def test_questions_with_missing_prompts_are_drawn_with_the_others() -> None:
    """The spread of each position's draws is that of its own prompts, whichever are missing."""
    rng = np.random.default_rng(4)
    right = (rng.random((60, 5)) < 0.5).astype(float)
    is_asked = rng.random((60, 5)) < 0.6
    groups = {
        place: (right[asked, place], [f"q{i}" for i in np.flatnonzero(asked)])
        for place, asked in enumerate(is_asked.T)
    }
    means = resampled(groups, stratified=True, resamples=4000)
    for place, (mean_of_place, draws) in means.items():
        n = is_asked[:, place].sum()
        expected = np.sqrt(mean_of_place * (1 - mean_of_place) / n)
        assert np.nanstd(draws) == pytest.approx(expected, rel=0.06)


def test_right_or_wrong_scores_get_wilsons_interval_and_others_none() -> None:
    names = [str(i) for i in range(5)]
    assert mean([1, 0, 1, 1, 1], names) == (0.8, *wilson(4, 5), 5)
    assert difference([1, 0, 1, 1, 1], names)[1:3] != wilson(4, 5)


def test_a_normal_interval_is_scipys() -> None:
    values = np.random.default_rng(0).normal(size=50)
    low, high = student.interval(
        0.95, 49, values.mean(), values.std(ddof=1) / np.sqrt(50)
    )
    assert normal(values) == pytest.approx((values.mean(), low, high, 50))


def test_the_mirrored_difference_has_the_mirrored_interval() -> None:
    values = np.random.default_rng(1).choice([-1.0, 0.0, 1.0], size=200)
    names = [str(i) for i in range(200)]
    value, low, high, _ = difference(values, names)
    assert difference(-values, names)[1:3] == pytest.approx((-high, -low))
    assert low < value < high
    assert difference([0.25] * 20, names[:20]) == (0.25, 0.25, 0.25, 20)


def test_pairs_of_right_or_wrong_scores_get_bonett_and_prices_interval() -> None:
    after = np.array([1.0] * 9 + [0.0] * 31)
    before = np.array([0.0] * 6 + [1.0] * 6 + [0.0] * 28)
    names = [str(i) for i in range(40)]
    better = (6 + 0.5) / 41
    worse = (3 + 0.5) / 41
    half = student.ppf(0.975, 39) * np.sqrt(
        (better + worse - (better - worse) ** 2) / 41
    )
    at = paired(after, before, names)
    assert at == pytest.approx(
        (3 / 40, better - worse - half, better - worse + half, 40)
    )
    # Each question nine times is worth as much, nothing changed is not certain.
    repeated = paired(after.repeat(9), before.repeat(9), np.repeat(names, 9).tolist())
    assert repeated[:3] == pytest.approx(at[:3], abs=0.003)
    same = paired(before, before, names)
    assert same.value == 0 and -same.ci_low == same.ci_high == pytest.approx(
        2 / 41, abs=0.002
    )
    assert paired(after / 2, before / 2, names)[:3] == pytest.approx(
        np.array(at[:3]) / 2
    ), "scores in 0..1"
    assert paired(2 * after, before, names) == difference(2 * after - before, names)


def test_a_share_over_questions_is_worth_n_over_its_design_effect() -> None:
    rng = np.random.default_rng(8)
    names = np.repeat([str(i) for i in range(50)], 9).tolist()
    question = rng.choice([0.0, 1.0], size=50)
    assert mean(question.repeat(9), names)[1:3] == pytest.approx(
        wilson(question.sum(), 50), abs=0.012
    )
    alone = mean(rng.choice([0.0, 1.0], size=450), names)
    assert alone.ci_high - alone.ci_low == pytest.approx(
        np.diff(wilson(225, 450))[0], rel=0.15
    )
    assert mean([0.0] * 450, names)[1:3] == wilson(0, 50), (
        "nothing says how unlike the prompts are"
    )


def test_a_sum_of_estimates_is_newcombes_interval_for_two_shares() -> None:
    """Newcombe 1998, table II, method 10."""
    for (a, m), (b, n), ends in [
        ((56, 70), (48, 80), (0.0524, 0.3339)),
        ((9, 10), (3, 10), (0.1705, 0.8090)),
        ((10, 10), (0, 10), (0.6075, 1.0)),
    ]:
        parts = [
            Estimate(count / size, *wilson(count, size), size)
            for count, size in ((a, m), (b, n))
        ]
        assert combined(parts, (1, -1), m + n)[1:3] == pytest.approx(ends, abs=1e-4)
    parts = [Estimate(1.0, 0.0, 3.0, 5), Estimate(2.0, 1.0, 3.0, 5)]
    assert combined(parts, (0.5, 0.5), 10) == pytest.approx(
        (1.5, 1.5 - 0.5**0.5, 1.5 + 1.25**0.5, 10)
    )
    assert combined([parts[1]] * 2, (1, -1), 5, correlation=1.0) == pytest.approx(
        (0, 0, 0, 5)
    ), "the same twice"


def test_independent_prompts_give_the_normal_interval() -> None:
    values = np.random.default_rng(2).normal(0.1, 1.0, size=1000)
    found = difference(values, [str(i) for i in range(1000)])
    theirs = normal(values)
    half = theirs.ci_high - theirs.value
    assert found[1:3] == pytest.approx(theirs[1:3], abs=0.15 * half)


def test_prompts_of_one_question_are_not_independent() -> None:
    question = np.random.default_rng(4).choice([0.0, 1.0], size=50)
    repeated = np.repeat(question, 9)
    alone, together = (
        difference(repeated, [str(i // n) for i in range(450)])[1:3] for n in (1, 9)
    )
    once = difference(question, [str(i) for i in range(50)])[1:3]
    assert together[1] - together[0] == pytest.approx(
        3 * (alone[1] - alone[0]), rel=0.15
    )
    assert together == pytest.approx(once, abs=0.03)


def test_draws_are_those_of_their_seed() -> None:
    values = np.random.default_rng(5).normal(size=30)
    names = [str(i) for i in range(30)]
    first, again, other = (
        resampled({"x": (values, names)}, stratified=False, resamples=50, seed=seed)[
            "x"
        ][1]
        for seed in (1, 1, 2)
    )
    assert (first == again).all() and (first != other).any()


@pytest.mark.parametrize(
    ("numbers", "form", "said"),
    [
        ((1.2, 1.0, 3.0), "", "1.20 [1.00, 3.00]"),
        ((0.00123, 0.0004, 0.002), "", "0.00123 [0.00040, 0.00200]"),
        ((120.4, 80.2, 160.0), "", "120 [80, 160]"),
        ((0.0, -0.0001, 0.0), "", "0.000000 [-0.000100, 0.000000]"),
        ((0.0, 0.0, 0.0), "", "0.00 [0.00, 0.00]"),
        ((2e-6, -1e-6, 5e-6), "", "2.00e-06 [-1.00e-06, 5.00e-06]"),
        ((2.0, np.nan, np.nan), "", "2"),
        ((-0.01, -0.04, 0.3), "+z.1f", "+0.0 [0.0, 0.3]"),
        ((8.66, 5.0, 12.04), "+z.1f", "+8.7 [5.0, 12.0]"),
    ],
)
def test_a_number_and_its_interval_have_the_same_decimals(
    numbers: tuple[float, float, float], form: str, said: str
) -> None:
    assert with_interval(*numbers, form) == said


@pytest.mark.filterwarnings("error")
def test_draws_without_a_value_have_no_interval() -> None:
    none = np.full(50, np.nan)
    assert np.isnan(quantiles(none, 10)).all()
    some = np.concatenate([none, np.arange(50.0)])
    assert quantiles(some, 10) == quantiles(np.arange(50.0), 10)
