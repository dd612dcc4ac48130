"""Intervals against scipy and against cases that can be worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from posbench.stats.tables import BIAS, COLUMNS, SUBSET_COLUMNS, by_subset, mean_interval, tidy, wilson
from posbench.tasks import KVRetrieval


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_scipys(counts: tuple[int, int]) -> None:
    successes, n = counts
    theirs = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert wilson(successes, n) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_a_constant_difference_has_no_width() -> None:
    assert mean_interval(np.full(20, 0.25), [str(i) for i in range(20)], resamples=100, seed=0) == (
        0.25,
        0.25,
    )


def test_the_mirrored_difference_has_the_mirrored_interval() -> None:
    difference = np.random.default_rng(1).choice([-1.0, 0.0, 1.0], size=200)
    names = [str(i) for i in range(200)]
    low, high = mean_interval(difference, names, resamples=4000, seed=3)
    assert mean_interval(-difference, names, resamples=4000, seed=3) == pytest.approx((-high, -low))
    assert low < difference.mean() < high


def test_independent_prompts_give_the_normal_interval() -> None:
    difference = np.random.default_rng(2).normal(0.1, 1.0, size=1000)
    half = 1.96 * difference.std() / np.sqrt(1000)
    low, high = mean_interval(difference, [str(i) for i in range(1000)], resamples=8000, seed=0)
    assert (low, high) == pytest.approx((difference.mean() - half, difference.mean() + half), abs=0.15 * half)


def test_prompts_of_one_question_are_not_independent() -> None:
    question = np.random.default_rng(4).choice([0.0, 1.0], size=50)
    repeated = np.repeat(question, 9)
    clusters = [str(i // 9) for i in range(450)]
    alone = mean_interval(repeated, [str(i) for i in range(450)], resamples=4000, seed=0)
    together = mean_interval(repeated, clusters, resamples=4000, seed=0)
    once = mean_interval(question, [str(i) for i in range(50)], resamples=4000, seed=0)
    assert together[1] - together[0] == pytest.approx(3 * (alone[1] - alone[0]), rel=0.15)
    assert together == pytest.approx(once, abs=0.03)


def test_the_interval_is_that_of_its_seed() -> None:
    difference, names = np.random.default_rng(5).normal(size=30), [str(i) for i in range(30)]
    first = mean_interval(difference, names, resamples=50, seed=1)
    assert mean_interval(difference, names, resamples=50, seed=1) == first
    assert mean_interval(difference, names, resamples=50, seed=2) != first


def _rows(method: str, scores: dict[int, list[float]]) -> list[dict[str, Any]]:
    return [
        {
            "method": method,
            "id": f"{p}-{i}",
            "gold_position": p,
            "cluster": f"{p}-{i}",
            "scores": {"accuracy": s},
        }
        for p, values in scores.items()
        for i, s in enumerate(values)
    ]


def _table(rows: list[dict[str, Any]], items: int | None = 11) -> Any:
    task = KVRetrieval(name="t", pairs=items or 2, positions=(0,))
    return tidy(rows, task, model="m", unmodified="none", resamples=200, seed=7)


def test_tidy_by_hand() -> None:
    before = _rows("none", {0: [1, 1, 1, 1], 5: [0, 0, 0, 1], 10: [1, 1, 1, 0]})
    after = _rows("scaled", {0: [1, 1, 1, 0], 5: [1, 1, 0, 1], 10: [1, 1, 1, 0]})
    table = _table(before + after)
    assert tuple(table.columns) == COLUMNS
    values = {(r.method, r.position, r.metric): r.value for r in table.itertuples()}
    summed_up = {key: values.pop(key) for key in list(values) if key[2].removesuffix("_difference") in BIAS}
    assert values == {
        ("none", "0", "accuracy"): 1.0,
        ("none", "5", "accuracy"): 0.25,
        ("none", "10", "accuracy"): 0.75,
        ("none", "all", "accuracy"): 8 / 12,
        ("scaled", "0", "accuracy"): 0.75,
        ("scaled", "5", "accuracy"): 0.75,
        ("scaled", "10", "accuracy"): 0.75,
        ("scaled", "all", "accuracy"): 9 / 12,
        ("scaled", "0", "accuracy_difference"): -0.25,
        ("scaled", "5", "accuracy_difference"): 0.5,
        ("scaled", "10", "accuracy_difference"): 0.0,
        ("scaled", "all", "accuracy_difference"): pytest.approx(1 / 12),
    }
    depths = {r.position: r.depth for r in table.itertuples() if r.position != "all"}
    assert depths == {"0": 0.0, "5": 0.5, "10": 1.0}
    one = table[(table.method == "none") & (table.position == "5") & (table.metric == "accuracy")].iloc[0]
    assert (one.ci_low, one.ci_high) == pytest.approx(wilson(1, 4)) and one.n == 4 and one.seed == 7
    assert summed_up["none", "all", "gap"] == 0.75 and summed_up["scaled", "all", "gap"] == 0
    for name, before_, after_ in (("middle_drop", 0.625, 0), ("primacy", 0.75, 0), ("recency", 0.5, 0)):
        found = [
            summed_up[key]
            for key in (
                ("none", "all", name),
                ("scaled", "all", name),
                ("scaled", "all", f"{name}_difference"),
            )
        ]
        assert found == [before_, after_, after_ - before_]
    # Flat at 0.75: noise explains it.
    assert (
        summed_up["scaled", "all", "position_bias"]
        == 0
        < summed_up["none", "all", "position_bias"]
        < np.std([1, 0.25, 0.75], ddof=1)
    )


def _curve(
    shares: list[float], n: int, seed: int, method: str = "none", together: bool = False
) -> list[dict[str, Any]]:
    """Right-or-wrong rows at gold positions 0, 1, ...; with ``together`` one draw decides a question at all
    positions."""
    rng = np.random.default_rng(seed)
    luck = rng.random((n, len(shares)))
    luck = luck[:, :1].repeat(len(shares), 1) if together else luck
    return [
        {
            "method": method,
            "id": f"{p}-{i}",
            "gold_position": p,
            "cluster": f"q{i}" if together else f"{p}-{i}",
            "scores": {"accuracy": float(luck[i, p] < share)},
        }
        for p, share in enumerate(shares)
        for i in range(n)
    ]


def _all(table: Any, method: str = "none") -> dict[str, Any]:
    return {r.metric: r for r in table.itertuples() if r.position == "all" and r.method == method}


def test_without_bias_the_intervals_cover_zero_and_the_gap_is_that_of_shuffled_positions() -> None:
    missed = dict.fromkeys(("position_bias", "gap", "primacy", "recency"), 0)
    gaps, shuffled = [], []
    for seed in range(30):
        found = _all(_table(_curve([0.7] * 5, 60, seed)))
        for name in missed:
            missed[name] += not found[name].ci_low <= 0 <= found[name].ci_high
        gaps.append(found["gap"].value)
        shuffled.append(found["gap_null"].value)
    # 30 intervals of 95 %: more than 5 misses happen in less than one of a hundred series.
    assert max(missed.values()) <= 5, missed
    assert min(gaps) > 0, "a gap is above zero by noise alone"
    assert np.mean(gaps) == pytest.approx(np.mean(shuffled), abs=0.03)


def test_a_known_bias_is_found_and_told_from_a_smaller_one() -> None:
    shares = [1.0, 0.8, 0.4, 0.5, 0.9]
    rows = _curve(shares, 400, 1) + _curve([0.8, 0.75, 0.7, 0.7, 0.8], 400, 2, "scaled")
    table = _table(rows)
    found, true = _all(table), np.std(shares, ddof=1)
    assert found["position_bias"].ci_low < true < found["position_bias"].ci_high
    assert found["position_bias"].value == pytest.approx(true, abs=0.03)
    assert found["gap_null"].ci_high < found["gap"].ci_low
    scaled = _all(table, "scaled")
    change = scaled["position_bias_difference"]
    assert change.ci_high < -0.1 and change.value == pytest.approx(
        scaled["position_bias"].value - found["position_bias"].value
    )
    assert change.ci_low < change.value < change.ci_high
    assert (
        not {"gap_difference", "gap_null_difference"} & set(scaled)
        and "position_bias_difference" not in found
    )


def test_bias_is_the_variance_that_brute_force_resampling_leaves() -> None:
    rows = _curve([0.9, 0.5, 0.6, 0.8], 30, 3)
    scores = np.array([r["scores"]["accuracy"] for r in rows]).reshape(4, 30)
    rng = np.random.default_rng(11)
    draws = [[rng.choice(line, size=30).mean() for line in scores] for _ in range(3000)]
    variance = np.var(scores.mean(1), ddof=1)
    noise = np.mean(np.var(draws, axis=1, ddof=1)) - variance
    found = _all(
        tidy(
            rows, KVRetrieval(name="t", positions=(0,)), model="m", unmodified="none", resamples=3000, seed=0
        )
    )
    assert found["position_bias"].value == pytest.approx(np.sqrt(variance - noise), abs=0.003)
    low, high = np.sqrt(np.maximum(np.quantile(np.var(draws, axis=1, ddof=1), [0.025, 0.975]) - 2 * noise, 0))
    assert (found["position_bias"].ci_low, found["position_bias"].ci_high) == pytest.approx(
        (low, high), abs=0.015
    )
    gaps = [np.ptp(rng.permutation(scores.ravel()).reshape(4, 30).mean(1)) for _ in range(3000)]
    assert found["gap_null"].value == pytest.approx(np.mean(gaps), abs=0.006)


def test_questions_asked_at_every_position_are_drawn_and_shuffled_whole() -> None:
    # One draw decides a question everywhere: the curve is flat without any noise, and no shuffle within
    # questions changes it.
    found = _all(_table(_curve([0.6] * 4, 40, 5, together=True)))
    for name in BIAS:
        assert (found[name].value, found[name].ci_low, found[name].ci_high) == pytest.approx(
            (0, 0, 0), abs=1e-12
        )
    assert _all(_table(_curve([0.6] * 4, 40, 5)))["gap_null"].value > 0.05


def test_two_positions_make_no_curve() -> None:
    assert not set(_table(_curve([0.9, 0.5], 20, 0)).metric) & set(BIAS)


def test_the_difference_pairs_prompts_by_id_not_by_order() -> None:
    before = _rows("none", {0: [1, 0, 1, 0]})
    after = _rows("scaled", {0: [1, 0, 1, 0]})[::-1]
    table = _table(before + after)
    row = table[(table.metric == "accuracy_difference") & (table.position == "0")].iloc[0]
    assert (row.value, row.ci_low, row.ci_high) == (0.0, 0.0, 0.0)


def test_a_task_without_positions() -> None:
    rows = [
        {
            "method": "none",
            "id": str(i),
            "gold_position": None,
            "cluster": str(i),
            "scores": {"accuracy": i % 2},
        }
        for i in range(4)
    ]
    table = _table(rows, items=None)
    assert list(table.position) == ["all"] and list(table.value) == [0.5] and table.depth.isna().all()


@dataclass(frozen=True, kw_only=True)
class Several(KVRetrieval):
    """Subsets with a named average and a total that is no mean."""

    average: ClassVar[Any] = "subsets"

    def averages(self) -> dict[str, tuple[str, ...]]:
        return {"pair": ("a", "b"), "both": ("pair", "c")}

    def total(self, subset: str, means: Any) -> Any:
        return means["accuracy"] if subset != "c" else np.sqrt(means["accuracy"] * means["other"])


def _subset_rows() -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)
    rows = []
    for method in ("none", "scaled"):
        for subset, n in (("a", 9), ("b", 4), ("c", 6)):
            for i in range(n):
                scores = {
                    "accuracy": float(rng.random()),
                    **({"other": float(rng.random())} if subset == "c" else {}),
                }
                rows.append(
                    {
                        "method": method,
                        "id": f"{subset}{i}",
                        "gold_position": None,
                        "cluster": "",
                        "subset": subset,
                        "scores": scores,
                    }
                )
    return rows


def test_subsets_and_averages_by_hand() -> None:
    rows, task = _subset_rows(), Several(name="t")
    table = by_subset(rows, task, model="m", unmodified="none", resamples=300, seed=1)
    assert tuple(table.columns) == SUBSET_COLUMNS
    found = {(r.method, r.subset, r.metric): r for r in table.itertuples()}

    def mean(method: str, subset: str, metric: str = "accuracy") -> float:
        return float(
            np.mean([r["scores"][metric] for r in rows if r["method"] == method and r["subset"] == subset])
        )

    for method in ("none", "scaled"):
        a, b = mean(method, "a"), mean(method, "b")
        c = np.sqrt(mean(method, "c") * mean(method, "c", "other"))
        wanted = {
            "a": a,
            "b": b,
            "c": c,
            "pair": (a + b) / 2,
            "both": ((a + b) / 2 + c) / 2,
            "all": (a + b + c) / 3,
        }
        for name, value in wanted.items():
            row = found[method, name, "accuracy"]
            assert row.value == pytest.approx(value) and row.ci_low < value < row.ci_high
            assert row.kind == ("subset" if name in "abc" else "average")
        assert found[method, "c", "other"].value == pytest.approx(mean(method, "c", "other"))
        whole = tidy(rows, task, model="m", unmodified="none", resamples=300, seed=1)
        total = whole[(whole.method == method) & (whole.metric == "accuracy")].iloc[0]
        assert (
            total.value == pytest.approx(wanted["all"])
            and total.ci_low == found[method, "all", "accuracy"].ci_low
        )
    for name in ("a", "pair", "all"):
        change = found["scaled", name, "accuracy_difference"]
        assert change.value == pytest.approx(
            found["scaled", name, "accuracy"].value - found["none", name, "accuracy"].value
        )
        assert change.ci_low < change.value < change.ci_high
    assert found["none", "all", "accuracy"].n == 19


def test_an_average_over_examples_is_the_pooled_mean() -> None:
    rows = [r | {"scores": {"accuracy": r["scores"]["accuracy"]}} for r in _subset_rows()]
    table = by_subset(rows, KVRetrieval(name="t"), model="m", unmodified="none", resamples=2000, seed=1)
    row = table[(table.method == "none") & (table.subset == "all") & (table.metric == "accuracy")].iloc[0]
    scores = [r["scores"]["accuracy"] for r in rows if r["method"] == "none"]
    assert row.value == pytest.approx(np.mean(scores))
    # Stratified resampling: the variance of a sum of independent subset means.
    parts = [
        np.array([r["scores"]["accuracy"] for r in rows if r["method"] == "none" and r["subset"] == s])
        for s in "abc"
    ]
    error = np.sqrt(sum((len(p) / 19) ** 2 * p.var() / len(p) for p in parts))
    assert (row.ci_high - row.ci_low) / 2 == pytest.approx(1.96 * error, rel=0.1)


def test_the_same_scores_differ_by_nothing_in_every_draw() -> None:
    rows = _subset_rows()
    same = [r | {"method": "copy"} for r in rows if r["method"] == "none"]
    table = by_subset(
        [*[r for r in rows if r["method"] == "none"], *same],
        Several(name="t"),
        model="m",
        unmodified="none",
        resamples=50,
        seed=1,
    )
    changes = table[table.metric.str.endswith("_difference")]
    assert len(changes) == 7 and (changes[["value", "ci_low", "ci_high"]] == 0).all().all()


def test_unlabelled_rows_are_left_out() -> None:
    rows = _rows("none", {0: [1, 0]})
    empty = [r | {"id": "x", "scores": {}} for r in rows[:1]]
    assert _table(rows + empty).equals(_table(rows))
    with pytest.raises(ValueError, match="no scored rows"):
        _table(empty)
