"""Tables of scores against cases worked out by hand, and position bias against brute-force resampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

from posbench.report.tables import subset_table
from posbench.stats.bootstrap import mean, paired, tail, wilson
from posbench.stats.position_bias import (
    CONTRAST,
    MINUS_HALF,
    STATISTICS,
    score_limit_note,
)
from posbench.stats.scores import METRIC_COLUMNS, SUBSET_COLUMNS, Tabulator
from posbench.tasks import KVRetrieval, Task
from tests.messages import assert_names


def _row(
    method: str, name: str, accuracy: float, place: int | None = None, **more: Any
) -> dict[str, Any]:
    row = {"method": method, "id": name, "gold_position": place, "cluster": name}
    return row | {"scores": {"accuracy": accuracy}} | more


def _rows(method: str, scores: dict[int, list[float]]) -> list[dict[str, Any]]:
    return [
        _row(method, f"{p}-{i}", s, p)
        for p, values in scores.items()
        for i, s in enumerate(values)
    ]


def _tabulator(task: Task, resamples: int = 200, seed: int = 7) -> Tabulator:
    return Tabulator(
        task=task, model="m", unmodified="none", resamples=resamples, seed=seed
    )


def _table(rows: list[dict[str, Any]], items: int | None = 11, **settings: int) -> Any:
    return _tabulator(
        KVRetrieval(name="t", pairs=items or 2, positions=(0,)), **settings
    ).metrics(rows)


def test_tidy_by_hand() -> None:
    before = _rows("none", {0: [1, 1, 1, 1], 5: [0, 0, 0, 1], 10: [1, 1, 1, 0]})
    after = _rows("scaled", {0: [1, 1, 1, 0], 5: [1, 1, 0, 1], 10: [1, 1, 1, 0]})
    table = _table(before + after)
    assert tuple(table.columns) == METRIC_COLUMNS
    rows = {(r.method, r.gold_position, r.metric): r for r in table.itertuples()}
    places = ("0", "5", "10", "all")
    assert [rows["none", p, "accuracy"].depth for p in places[:3]] == [0, 0.5, 1]
    wanted = {
        ("none", "accuracy"): (1, 0.25, 0.75, 8 / 12),
        ("scaled", "accuracy"): (0.75, 0.75, 0.75, 9 / 12),
        ("scaled", "accuracy_difference"): (-0.25, 0.5, 0, 1 / 12),
    }
    for (method, metric), values in wanted.items():
        assert [rows.pop((method, p, metric)).value for p in places] == pytest.approx(
            values
        )
    one = table[(table.method == "none") & (table.gold_position == "5")].iloc[0]
    assert (
        (one.ci_low, one.ci_high) == pytest.approx(wilson(1, 4))
        and one.n == 4
        and one.seed == 7
    )
    # The rest sums up the curves.
    contrasts = [rows.pop(("none", p, CONTRAST)).value for p in places[:3]]
    assert contrasts == pytest.approx([1 - 1 / 2, 1 / 4 - 7 / 8, 3 / 4 - 5 / 8])
    equal = [rows.pop(("scaled", p, CONTRAST)).value for p in places[:3]]
    assert equal == pytest.approx([0, 0, 0])
    assert {metric.removesuffix("_difference") for _, _, metric in rows} == {
        *STATISTICS,
        MINUS_HALF,
    }
    plain, scaled = (
        {key[2]: r for key, r in rows.items() if key[0] == m}
        for m in ("none", "scaled")
    )
    for name, was in {
        "gap": 0.75,
        "middle_drop": 0.625,
        "primacy": 0.75,
        "recency": 0.5,
    }.items():
        assert plain[name].value == was and plain[name].note == ""
    assert 0 < plain["position_bias"].value < np.std([1, 0.25, 0.75], ddof=1)
    # 3 of 4 everywhere may be always: nothing is said of the bias, nor of its difference.
    assert {r.note.split(":")[0] for r in scaled.values()} == {
        "too few questions"
    } and len(scaled) == 11
    assert all(
        np.isnan([r.value, r.ci_low, r.ci_high]).all() and r.n == 12
        for r in scaled.values()
    )


def _curve(
    shares: list[float], n: int, seed: int, method: str = "none", together: bool = False
) -> list[dict[str, Any]]:
    """Right-or-wrong rows at gold positions 0, 1, ...; ``together``: one draw decides a question anywhere."""
    luck = np.random.default_rng(seed).random((n, len(shares)))
    luck = luck[:, :1].repeat(len(shares), 1) if together else luck
    return [
        _row(
            method,
            f"{p}-{i}",
            float(luck[i, p] < share),
            p,
            cluster=f"q{i}" if together else f"{p}-{i}",
        )
        for p, share in enumerate(shares)
        for i in range(n)
    ]


def _all(table: Any, method: str = "none") -> dict[str, Any]:
    return {
        r.metric: r
        for r in table.itertuples()
        if r.gold_position == "all" and r.method == method
    }


def test_without_bias_the_intervals_cover_zero_and_the_gap_is_that_of_shuffled_positions() -> (
    None
):
    missed = dict.fromkeys(("position_bias", "gap", "primacy", "recency"), 0)
    gaps = []
    shuffled = []
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
    found = _all(table)
    true = np.std(shares, ddof=1)
    assert found["position_bias"].ci_low < true < found["position_bias"].ci_high
    assert found["position_bias"].value == pytest.approx(true, abs=0.03)
    assert found["gap_null"].ci_high < found["gap"].ci_low
    scaled = _all(table, "scaled")
    change = scaled["position_bias_difference"]
    fall = scaled["position_bias"].value - found["position_bias"].value
    assert (
        change.ci_low < change.value == pytest.approx(fall)
        and change.value < change.ci_high < -0.1
    )
    assert not {"gap_difference", "gap_null_difference"} & set(scaled)
    assert "position_bias_difference" not in found


def test_bias_is_the_variance_that_brute_force_resampling_leaves() -> None:
    rows = _curve([0.9, 0.5, 0.6, 0.8], 30, 3)
    scores = np.array([r["scores"]["accuracy"] for r in rows]).reshape(4, 30)
    rng = np.random.default_rng(11)
    draws = [[rng.choice(line, size=30).mean() for line in scores] for _ in range(3000)]
    variance = np.var(scores.mean(1), ddof=1)
    noise = np.mean(np.var(draws, axis=1, ddof=1)) - variance
    found = _all(_table(rows, resamples=3000, seed=0))
    assert found["position_bias"].value == pytest.approx(
        np.sqrt(variance - noise), abs=0.003
    )
    # The ends are the spreads of such a curve that would vary so much, or so little, in 2 % of all samples.
    errors = np.array(draws) - scores.mean(1)
    shape = scores.mean(1) - scores.mean()
    spreads = np.linspace(0, 0.4, 401)
    at = found["position_bias"]
    seen = np.array(
        [
            np.var(s * shape / np.sqrt(variance) + errors, axis=1, ddof=1)
            for s in spreads
        ]
    )
    above = (seen >= variance).mean(1)
    beyond = tail(30)
    assert at.ci_low == pytest.approx(spreads[above >= beyond][0], abs=0.012)
    assert at.ci_high == pytest.approx(spreads[above <= 1 - beyond][-1], abs=0.012)
    gaps = [
        np.ptp(rng.permutation(scores.ravel()).reshape(4, 30).mean(1))
        for _ in range(3000)
    ]
    assert found["gap_null"].value == pytest.approx(np.mean(gaps), abs=0.006)


def test_questions_asked_at_every_position_are_drawn_and_shuffled_whole() -> None:
    # One draw decides a question everywhere: the curve is flat without any noise, and no shuffle within
    # questions changes it.
    found = _all(_table(_curve([0.6] * 4, 40, 5, together=True)))
    for at in (found[name] for name in STATISTICS):
        assert (at.value, at.ci_low, at.ci_high) == pytest.approx((0, 0, 0), abs=1e-12)
    assert _all(_table(_curve([0.6] * 4, 40, 5)))["gap_null"].value > 0.05


def test_the_average_of_questions_asked_at_every_position_is_worth_the_questions() -> (
    None
):
    """Fidelity, 1: 40 questions at 9 positions are no 360 prompts."""
    whole = _table(_curve([0.6] * 9, 40, 5, together=True))
    at = whole[(whole.metric == "accuracy") & (whole.gold_position == "all")].iloc[0]
    alone = wilson(40 * at.value, 40)
    assert at.n == 360 and at.ci_low < alone[0] and at.ci_high > alone[1]
    one = whole[(whole.metric == "accuracy") & (whole.gold_position == "0")].iloc[0]
    assert (one.ci_low, one.ci_high) == pytest.approx(alone), "each question once"


@pytest.mark.parametrize(
    ("share", "n", "items", "note"),
    [
        (
            0.0,
            80,
            100,
            "at the floor: no score is reliably 5 points above chance, 1.0 %",
        ),
        (1.0, 80, 100, "at the ceiling: no score is reliably below 95 %"),
        (
            0.25,
            40,
            4,
            "at the floor: no score is reliably 5 points above chance, 25.0 %",
        ),
        (0.25, 40, 100, ""),
        (
            0.0,
            60,
            100,
            "at the floor: no score is reliably 5 points above chance, 1.0 %",
        ),
        (
            0.0,
            10,
            100,
            "nothing answered: 0.0 % of 30 prompts; make the task easier, "
            "or ask 61 or more questions at each gold position",
        ),
        (11 / 12, 12, 100, "too few questions: ask 73 or more at each gold position"),
    ],
)
def test_no_bias_is_said_where_almost_nothing_or_everything_is_answered(
    share: float, n: int, items: int, note: str
) -> None:
    """Newcomer, 3: a model that answers nothing has no position bias of 0.0 [0.0, 0.0]."""
    right = [float(i < share * n) for i in range(n)]
    table = _table(_rows("none", {0: right, 1: right, 2: right}), items=items)
    rows = table[table.metric.isin(STATISTICS)]
    assert set(rows.note) == {note} and len(rows) == 6
    assert rows[["value", "ci_low", "ci_high"]].isna().all().all() == bool(note)
    # A strong position is enough to see a bias.
    strong = _table(_rows("none", {0: [1.0] * n, 1: right, 2: [0.0] * n}), items=items)
    assert set(strong[strong.metric.isin(STATISTICS)].note) == {""}


@pytest.mark.parametrize(
    ("right", "chance", "wanted"),
    [(1, 0.0, 73), (0, 0.0, 73), (0, 0.01, 61), (0, 0.25, 9)],
)
def test_the_questions_asked_for_are_the_fewest_that_can_tell(
    right: int, chance: float, wanted: int
) -> None:
    def told(n: int) -> str:
        at_position = mean([right] * n, [str(i) for i in range(n)])
        return score_limit_note([at_position] * 3, at_position, chance, n)

    name = f"at the {'ceiling' if right else 'floor'}"
    assert told(wanted).startswith(name)
    assert_names(told(wanted - 1), "questions", str(wanted), "gold position")
    low, high = binomtest(wanted * right, wanted).proportion_ci(method="wilson")
    assert low >= 0.95 if right else high <= chance + 0.05


def test_two_positions_make_no_curve() -> None:
    assert not set(_table(_curve([0.9, 0.5], 20, 0)).metric) & set(STATISTICS)


def test_the_difference_pairs_prompts_by_id_not_by_order() -> None:
    before = _rows("none", {0: [1, 0, 1, 0]})
    after = _rows("scaled", {0: [1, 0, 1, 0]})[::-1]
    table = _table(before + after)
    row = table[
        (table.metric == "accuracy_difference") & (table.gold_position == "0")
    ].iloc[0]
    assert (row.value, row.ci_low, row.ci_high) == paired(
        [0, 1, 0, 1], [0, 1, 0, 1], list("abcd")
    )[:3]


def test_a_task_without_positions() -> None:
    table = _table([_row("none", str(i), i % 2) for i in range(4)], items=None)
    assert (
        list(table.gold_position) == ["all"]
        and list(table.value) == [0.5]
        and table.depth.isna().all()
    )


@dataclass(frozen=True, kw_only=True)
class Several(KVRetrieval):
    """Subsets with a named average and a total that is no mean."""

    average: ClassVar[Any] = "subsets"

    def averages(self) -> dict[str, tuple[str, ...]]:
        return {"pair": ("a", "b"), "both": ("pair", "c")}

    def total(self, subset: str, means: Any) -> Any:
        return (
            means["accuracy"]
            if subset != "c"
            else np.sqrt(means["accuracy"] * means["other"])
        )


def _subset_rows() -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)
    rows = []
    for method in ("none", "scaled"):
        for subset, n in (("a", 9), ("b", 4), ("c", 6)):
            for i in range(n):
                rows.append(
                    _row(
                        method,
                        f"{subset}{i}",
                        float(rng.random()),
                        subset=subset,
                        cluster="",
                    )
                )
                if subset == "c":
                    rows[-1]["scores"]["other"] = float(rng.random())
    return rows


def test_subsets_and_averages_by_hand() -> None:
    rows = _subset_rows()
    task = Several(name="t")
    table = _tabulator(task, 300, 1).subsets(rows)
    assert tuple(table.columns) == SUBSET_COLUMNS
    found = {(r.method, r.subset, r.metric): r for r in table.itertuples()}

    def share(method: str, subset: str, metric: str = "accuracy") -> float:
        here = [r for r in rows if r["method"] == method and r["subset"] == subset]
        return float(np.mean([r["scores"][metric] for r in here]))

    for method in ("none", "scaled"):
        a = share(method, "a")
        b = share(method, "b")
        c = np.sqrt(share(method, "c") * share(method, "c", "other"))
        wanted = {"a": a, "b": b, "c": c, "pair": (a + b) / 2, "all": (a + b + c) / 3}
        for name, value in (wanted | {"both": (wanted["pair"] + c) / 2}).items():
            row = found[method, name, "accuracy"]
            assert (
                row.value == pytest.approx(value) and row.ci_low < value < row.ci_high
            )
            assert row.kind == ("subset" if name in "abc" else "average")
        assert found[method, "c", "other"].value == pytest.approx(
            share(method, "c", "other")
        )
        whole = _tabulator(task, 300, 1).metrics(rows)
        total = whole[(whole.method == method) & (whole.metric == "accuracy")].iloc[0]
        assert total.value == pytest.approx(wanted["all"])
        assert total.ci_low == found[method, "all", "accuracy"].ci_low
    for name in ("a", "pair", "all"):
        change = found["scaled", name, "accuracy_difference"]
        assert change.value == pytest.approx(
            found["scaled", name, "accuracy"].value
            - found["none", name, "accuracy"].value
        )
        assert change.ci_low < change.value < change.ci_high
    assert found["none", "all", "accuracy"].n == 19


def test_an_average_over_examples_is_the_pooled_mean() -> None:
    rows = _subset_rows()
    table = _tabulator(KVRetrieval(name="t"), 2000, 1).subsets(rows)
    row = table[
        (table.method == "none")
        & (table.subset == "all")
        & (table.metric == "accuracy")
    ].iloc[0]
    scores = [r["scores"]["accuracy"] for r in rows if r["method"] == "none"]
    assert row.value == pytest.approx(np.mean(scores))
    # Stratified resampling: the variance of a sum of independent subset means.
    parts = [
        np.array(
            [
                r["scores"]["accuracy"]
                for r in rows
                if r["method"] == "none" and r["subset"] == s
            ]
        )
        for s in "abc"
    ]
    # The halves of independent intervals add up as their squares do; those of a few scores are somewhat wider.
    halves = [
        len(p) / 19 * np.diff(mean(p, [str(i) for i in range(len(p))])[1:3])[0] / 2
        for p in parts
    ]
    assert (row.ci_high - row.ci_low) / 2 == pytest.approx(
        np.hypot.reduce(halves), rel=0.15
    )


def test_a_question_in_several_subsets_counts_once() -> None:
    """A question that is right in both is worth one answer, not two."""
    rng = np.random.default_rng(0)
    right = rng.integers(0, 2, 80).astype(float)
    rows = []
    for method, other in (("none", 1 - right), ("scaled", right)):
        for subset, scores in (("a", right), ("b", other)):
            rows += [
                _row(
                    method,
                    f"{subset}{i}",
                    score,
                    subset=subset,
                    cluster=f"question {i}",
                )
                for i, score in enumerate(scores)
            ]
    table = _tabulator(Several(name="t"), 2000, 1).subsets(rows)
    cells = table.set_index(["method", "subset", "metric"])
    opposite = cells.loc["none", "pair", "accuracy"]
    independent = mean([0, 1] * 80, [str(i) for i in range(160)])
    assert opposite.value == pytest.approx(0.5)
    assert opposite.ci_low == pytest.approx(independent.ci_low, abs=0.01)
    alike = cells.loc["scaled", "pair", "accuracy"]
    one = mean(right, [str(i) for i in range(80)])
    assert alike.value == pytest.approx(one.value)
    assert alike.ci_low == pytest.approx(one.ci_low, abs=0.015)
    assert alike.ci_high == pytest.approx(one.ci_high, abs=0.015)
    change = cells.loc["scaled", "pair", "accuracy_difference"]
    assert change.value == pytest.approx(one.value - 0.5)
    assert change.ci_high - change.ci_low == pytest.approx(
        one.ci_high - one.ci_low, abs=0.03
    )


def test_where_all_replies_are_wrong_the_average_is_not_known_exactly() -> None:
    rows = [
        _row(method, f"{subset}{i}", 0.0, subset=subset, cluster=f"{i}")
        for method in ("none", "scaled")
        for subset in "ab"
        for i in range(6)
    ]
    table = _tabulator(Several(name="t"), 300, 1).subsets(rows)
    cells = table.set_index(["method", "subset", "metric"])
    average = cells.loc["none", "pair", "accuracy"]
    # Wilson's upper end of 0 of 6, as six questions stand in both subsets.
    bound = 1.959964**2 / (6 + 1.959964**2)
    assert (average.value, average.ci_low) == (0, 0)
    assert average.ci_high == pytest.approx(bound, abs=1e-5)
    change = cells.loc["scaled", "pair", "accuracy_difference"]
    assert change.ci_low < -0.1 and change.ci_high > 0.1


@pytest.mark.parametrize(
    ("subsets", "questions", "share"),
    [(57, 1, 0.25), (57, 5, 0.25), (57, 5, 0.8), (16, 5, 0.25), (5, 6, 0.4)],
)
def test_the_mean_of_small_subsets_is_as_often_above_as_below_its_interval(
    subsets: int, questions: int, share: float
) -> None:
    """Subsets of unequal size, each as much worth: at most one truth in 40 beyond either end, and chance."""
    rng = np.random.default_rng(5)
    sizes = questions + np.arange(subsets) % 3
    weights = np.repeat(1 / sizes, sizes)
    names = [str(i) for i in range(sizes.sum())]
    beyond = np.zeros(2)
    for _ in range(600):
        right = (rng.random(len(names)) < share).astype(float)
        estimate = mean(right, names, weights)
        beyond += share < estimate.ci_low, share > estimate.ci_high
    assert (beyond / 600 < 0.025 + 3 * np.sqrt(0.025 * 0.975 / 600)).all(), beyond


def test_an_average_with_the_name_of_a_subset_has_its_own_row() -> None:
    cells = {"method": "none", "metric": "accuracy", "n": 4}
    rows = [
        {**cells, "subset": "all", "kind": "subset", "value": 0.25},
        {**cells, "subset": "all", "kind": "average", "value": 0.75},
    ]
    frame = pd.DataFrame(rows).assign(ci_low=0.0, ci_high=1.0)
    _, table = subset_table(frame)
    assert [row[1].split()[0] for row in table] == ["25.0", "75.0"]


def test_the_same_scores_differ_by_nothing() -> None:
    rows = _subset_rows()
    same = [r | {"method": "copy"} for r in rows if r["method"] == "none"]
    table = _tabulator(Several(name="t"), 50, 1).subsets(
        [*[r for r in rows if r["method"] == "none"], *same]
    )
    changes = table[table.metric.str.endswith("_difference")]
    assert len(changes) == 7 and (changes["value"] == 0).all()
    assert np.allclose(changes["ci_low"], -changes["ci_high"]), "no side is preferred"


def test_unlabelled_rows_are_left_out() -> None:
    rows = _rows("none", {0: [1, 0]})
    empty = [r | {"id": "x", "scores": {}} for r in rows[:1]]
    assert _table(rows + empty).equals(_table(rows))
    with pytest.raises(ValueError, match="no scored rows"):
        _table(empty)
