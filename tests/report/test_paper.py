"""A paper's numbers stand where ours can be compared with them, and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from posbench.report.paper import (
    compare_cells,
    paper_cells,
    reference_table,
    reference_text,
    with_subsets,
)
from posbench.stats.bootstrap import Z95, Estimate, wilson
from posbench.stats.reference import agreement
from tests.frames import metrics, sweep, with_missing_answers
from tests.messages import assert_names


def row(value: float, place: str = "50%", **more: Any) -> dict[str, Any]:
    same = {
        "model": "tiny",
        "method": "none",
        "task": "kv",
        "gold_position": place,
        "metric": "accuracy",
    }
    return {**same, "value": value, **more}


def test_a_number_of_missing_answers_is_not_compared() -> None:
    printed = [row(0.6), row(0.98, "0")]
    cut = with_missing_answers(metrics(), "none")
    found = compare_cells(cut, printed)
    assert set(found["verdict"]) == {"missing answers, not comparable"}
    assert set(compare_cells(with_missing_answers(metrics()), printed)["verdict"]) == {
        "agrees"
    }


@pytest.mark.parametrize(
    ("printed", "verdict", "ours"),
    [
        (row(0.61), "agrees", 0.6),  # 1 +- 2.5 points
        (row(0.63), "inconclusive", 0.6),  # inside our interval, but 3 +- 2.5 points
        (row(0.5), "differs", 0.6),
        (
            row(0.61, n=500),
            "inconclusive",
            0.6,
        ),  # 1 +- 4.4 points with the paper's own noise
        (row(0.61, n=50_000), "agrees", 0.6),
        (row(0.61, margin=0.02), "inconclusive", 0.6),
        (row(0.5, margin=0.2), "agrees", 0.6),
        (row(0.61, model="gpt"), "other model, not comparable", None),
        (row(0.6, "80%"), "not measured", None),
        (row(0.6, "52%"), "agrees", 0.6),
        (row(0.84, "all"), "agrees", 0.84),
        (row(0.98, "0"), "agrees", 0.98),
    ],
)
def test_a_number_agrees_where_an_equivalence_test_says_so(
    printed: dict[str, Any], verdict: str, ours: float | None
) -> None:
    (found,) = compare_cells(metrics(), [printed]).itertuples()
    assert found.verdict == verdict
    if ours is None:
        assert pd.isna(found.ours) and pd.isna(found.difference)
        return
    assert found.ours == pytest.approx(ours) and found.difference == pytest.approx(
        ours - printed["value"]
    )
    _, (texts,) = reference_table(*paper_cells(metrics(), [printed]))
    where = ["tiny", "none", printed["gold_position"], f"{100 * printed['value']:.1f}"]
    assert texts[:5] == [verdict, *where]


def test_a_wide_interval_never_agrees_and_the_test_is_two_one_sided_tests() -> None:
    rng = np.random.default_rng(0)
    for ours, away, error, paper_error in rng.uniform(
        (0.3, -0.15, 0.001, 0), (0.7, 0.15, 0.08, 0.03), (2000, 4)
    ):
        one, other = (
            Estimate(v, v - Z95 * e, v + Z95 * e, 50)
            for v, e in ((ours, error), (ours - away, paper_error))
        )
        both = np.hypot(error, paper_error)
        p = max(norm.cdf((away - 0.05) / both), norm.sf((away + 0.05) / both))
        beyond = norm.sf((abs(away) - 0.05) / both)
        wanted = (
            "agrees" if p < 0.05 else "differs" if beyond < 0.05 else "inconclusive"
        )
        assert agreement(one, other, 0.05) == wanted
        assert both < 0.05 / 1.6448 or wanted != "agrees", (
            "wider than the margin: nothing agrees"
        )
    few = Estimate(0.5, 0.49, 0.51, 5)
    assert agreement(few, Estimate(0.5, 0.5, 0.5, 0), 0.05) == "inconclusive"


def test_at_the_margin_one_number_in_twenty_agrees() -> None:
    rng = np.random.default_rng(1)
    n = 2000
    agrees = 0
    for right in rng.binomial(n, 0.55, 1000):
        ours = Estimate(right / n, *wilson(right, n), n)
        agrees += agreement(ours, Estimate(0.5, 0.5, 0.5, 0), 0.05) == "agrees"
    assert agrees / 1000 < 0.05 + 3 * (0.05 * 0.95 / 1000) ** 0.5


def test_each_cell_counts_once_and_those_near_zero_apart() -> None:
    table = metrics()
    fallen = table.assign(value=0.01, ci_low=0.0, ci_high=0.02, method="fallen")
    printed = [
        row(0.61),
        row(0.5, "all"),
        row(0.98, "0"),
        row(0.02, method="fallen"),
        row(0.6, "80%"),
    ]
    found, _ = paper_cells(pd.concat([table, fallen]), printed)
    text = reference_text({}, printed, found)
    counted, _, apart = text.partition("1 not measured")
    assert_names(counted, "2 agree", "1 differs")
    assert_names(apart, "1", "margin")
    assert_names(text, "5 points", "n", "not known")
    assert text.count("1 agrees") == 1
    known = [{**each, "n": 500} for each in printed]
    assert_names(reference_text({}, known, found), "n = 500")
    swept, _ = paper_cells(sweep([1.0, 0.0]), [row(0.7, "1", method="scale_channel")])
    assert len(swept) == 2 and "Cells of the paper: 1 " in reference_text(
        {}, [row(0.7, "1")], swept
    )


def test_a_swept_setting_must_match_too() -> None:
    swept = row(0.82, "1", method="scale_channel", **{"method.factor": 1})
    assert list(compare_cells(sweep([1.0, 0.0]), [swept])["ours"]) == [
        pytest.approx(0.8)
    ]


def test_without_an_interval_nothing_agrees() -> None:
    assert list(
        compare_cells(metrics().assign(ci_low=float("nan")), [row(0.6)])["verdict"]
    ) == ["no interval"]


def test_data_sets_of_a_benchmark_are_compared_by_their_name() -> None:
    common = {
        "model": "tiny",
        "method": "none",
        "task": "kv",
        "metric": "accuracy",
        "n": 20,
        "seed": 0,
    }
    subset = {
        "subset": "gov_report",
        "kind": "subset",
        "value": 0.19,
        "ci_low": 0.17,
        "ci_high": 0.21,
    }
    whole = {
        "subset": "all",
        "kind": "average",
        "value": 0.2,
        "ci_low": 0.0,
        "ci_high": 1.0,
    }
    table = with_subsets(
        metrics(), pd.DataFrame([{**common, **subset}, {**common, **whole}])
    )
    found = compare_cells(table, [row(0.1844, "gov_report"), row(0.1691, "all")])
    # The average over everything is that of metrics.csv.
    assert list(found["verdict"]) == ["agrees", "differs"] and list(found["ours"]) == [
        0.19,
        0.84,
    ]
    assert with_subsets(metrics(), None).equals(metrics())


def test_a_reader_is_told_what_cannot_be_compared() -> None:
    printed = [row(0.6, model="gpt", source="Table 1")]
    text = reference_text({"claims": ["it helps"]}, printed, pd.DataFrame())
    assert_names(text, "it helps", "gpt", "nothing is compared", "Source: Table 1.")
    assert reference_table(*paper_cells(metrics(), printed))[1] == []


def test_a_row_of_a_sweep_names_the_settings_that_it_holds_for() -> None:
    summary = sweep([1.0, 0.0])
    runs = summary["run"].unique()
    printed = [row(0.6, run=run) for run in runs] + [
        row(0.7, method="scale_channel", run=run) for run in runs
    ]
    header, rows = reference_table(*paper_cells(summary, printed))
    assert header[-1] == "method.factor"
    own = summary[(summary["gold_position"] == "1") & (summary["metric"] == "accuracy")]
    ours = own[own["method"] == "scale_channel"].set_index("method.factor")["value"]
    # The unmodified model is the same in both runs; the method is not.
    assert [line[2] for line in rows] == ["none", "scale_channel", "scale_channel"]
    assert [line[-1] for line in rows] == ["all", "1", "0"]
    assert [line[5].split()[0] for line in rows[1:]] == [
        f"{100 * ours[factor]:.1f}" for factor in (1.0, 0.0)
    ]
    assert (
        len(reference_table(*paper_cells(metrics(), [row(0.6)]))[0]) == len(header) - 1
    )
