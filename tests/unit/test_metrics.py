"""Intervals against scipy and against cases that can be worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from posbench.metrics import COLUMNS, SUBSET_COLUMNS, by_subset, mean_interval, tidy, wilson
from posbench.tasks import KVRetrieval


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_scipys(counts: tuple[int, int]) -> None:
    successes, n = counts
    theirs = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert wilson(successes, n) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_a_constant_difference_has_no_width() -> None:
    assert mean_interval(np.full(20, 0.25), [str(i) for i in range(20)], resamples=100, seed=0) == (0.25, 0.25)


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
        {"method": method, "id": f"{p}-{i}", "gold_position": p, "cluster": f"{p}-{i}", "scores": {"accuracy": s}}
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
    assert values == {
        ("none", "0", "accuracy"): 1.0,
        ("none", "5", "accuracy"): 0.25,
        ("none", "10", "accuracy"): 0.75,
        ("none", "all", "accuracy"): 8 / 12,
        ("none", "all", "middle_drop"): 0.875 - 0.25,
        ("scaled", "0", "accuracy"): 0.75,
        ("scaled", "5", "accuracy"): 0.75,
        ("scaled", "10", "accuracy"): 0.75,
        ("scaled", "all", "accuracy"): 9 / 12,
        ("scaled", "all", "middle_drop"): 0.0,
        ("scaled", "0", "accuracy_difference"): -0.25,
        ("scaled", "5", "accuracy_difference"): 0.5,
        ("scaled", "10", "accuracy_difference"): 0.0,
        ("scaled", "all", "accuracy_difference"): pytest.approx(1 / 12),
    }
    depths = {r.position: r.depth for r in table.itertuples() if r.position != "all"}
    assert depths == {"0": 0.0, "5": 0.5, "10": 1.0}
    one = table[(table.method == "none") & (table.position == "5") & (table.metric == "accuracy")].iloc[0]
    assert (one.ci_low, one.ci_high) == pytest.approx(wilson(1, 4)) and one.n == 4 and one.seed == 7
    assert table[table.metric == "middle_drop"].ci_low.isna().all()


def test_the_difference_pairs_prompts_by_id_not_by_order() -> None:
    before = _rows("none", {0: [1, 0, 1, 0]})
    after = _rows("scaled", {0: [1, 0, 1, 0]})[::-1]
    table = _table(before + after)
    row = table[(table.metric == "accuracy_difference") & (table.position == "0")].iloc[0]
    assert (row.value, row.ci_low, row.ci_high) == (0.0, 0.0, 0.0)


def test_a_task_without_positions() -> None:
    rows = [
        {"method": "none", "id": str(i), "gold_position": None, "cluster": str(i), "scores": {"accuracy": i % 2}}
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
                scores = {"accuracy": float(rng.random()), **({"other": float(rng.random())} if subset == "c" else {})}
                rows.append({"method": method, "id": f"{subset}{i}", "gold_position": None, "cluster": "", "subset": subset,
                             "scores": scores})  # fmt: skip
    return rows


def test_subsets_and_averages_by_hand() -> None:
    rows, task = _subset_rows(), Several(name="t")
    table = by_subset(rows, task, model="m", unmodified="none", resamples=300, seed=1)
    assert tuple(table.columns) == SUBSET_COLUMNS
    found = {(r.method, r.subset, r.metric): r for r in table.itertuples()}

    def mean(method: str, subset: str, metric: str = "accuracy") -> float:
        return float(np.mean([r["scores"][metric] for r in rows if r["method"] == method and r["subset"] == subset]))

    for method in ("none", "scaled"):
        a, b = mean(method, "a"), mean(method, "b")
        c = np.sqrt(mean(method, "c") * mean(method, "c", "other"))
        wanted = {"a": a, "b": b, "c": c, "pair": (a + b) / 2, "both": ((a + b) / 2 + c) / 2, "all": (a + b + c) / 3}
        for name, value in wanted.items():
            row = found[method, name, "accuracy"]
            assert row.value == pytest.approx(value) and row.ci_low < value < row.ci_high
            assert row.kind == ("subset" if name in "abc" else "average")
        assert found[method, "c", "other"].value == pytest.approx(mean(method, "c", "other"))
        whole = tidy(rows, task, model="m", unmodified="none", resamples=300, seed=1)
        total = whole[(whole.method == method) & (whole.metric == "accuracy")].iloc[0]
        assert total.value == pytest.approx(wanted["all"]) and total.ci_low == found[method, "all", "accuracy"].ci_low
    for name in ("a", "pair", "all"):
        change = found["scaled", name, "accuracy_difference"]
        assert change.value == pytest.approx(found["scaled", name, "accuracy"].value - found["none", name, "accuracy"].value)
        assert change.ci_low < change.value < change.ci_high
    assert found["none", "all", "accuracy"].n == 19


def test_an_average_over_examples_is_the_pooled_mean() -> None:
    rows = [r | {"scores": {"accuracy": r["scores"]["accuracy"]}} for r in _subset_rows()]
    table = by_subset(rows, KVRetrieval(name="t"), model="m", unmodified="none", resamples=2000, seed=1)
    row = table[(table.method == "none") & (table.subset == "all") & (table.metric == "accuracy")].iloc[0]
    scores = [r["scores"]["accuracy"] for r in rows if r["method"] == "none"]
    assert row.value == pytest.approx(np.mean(scores))
    # Stratified resampling: the variance of a sum of independent subset means.
    parts = [np.array([r["scores"]["accuracy"] for r in rows if r["method"] == "none" and r["subset"] == s]) for s in "abc"]
    error = np.sqrt(sum((len(p) / 19) ** 2 * p.var() / len(p) for p in parts))
    assert (row.ci_high - row.ci_low) / 2 == pytest.approx(1.96 * error, rel=0.1)


def test_the_same_scores_differ_by_nothing_in_every_draw() -> None:
    rows = _subset_rows()
    same = [r | {"method": "copy"} for r in rows if r["method"] == "none"]
    table = by_subset([*[r for r in rows if r["method"] == "none"], *same], Several(name="t"), model="m", unmodified="none",
                      resamples=50, seed=1)  # fmt: skip
    changes = table[table.metric.str.endswith("_difference")]
    assert len(changes) == 7 and (changes[["value", "ci_low", "ci_high"]] == 0).all().all()


def test_unlabelled_rows_are_left_out() -> None:
    rows = _rows("none", {0: [1, 0]})
    empty = [r | {"id": "x", "scores": {}} for r in rows[:1]]
    assert _table(rows + empty).equals(_table(rows))
    with pytest.raises(ValueError, match="no scored rows"):
        _table(empty)
