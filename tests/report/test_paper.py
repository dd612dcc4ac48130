"""A paper's numbers stand where ours can be compared with them, and nowhere else."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from posbench.report.paper import compared, reference_table, reference_text, with_subsets
from tests.frames import metrics, sweep


def row(value: float, place: str = "50%", **more: Any) -> dict[str, Any]:
    same = {"model": "tiny", "method": "none", "task": "kv", "gold_position": place, "metric": "accuracy"}
    return {**same, "value": value, **more}


@pytest.mark.parametrize(
    ("printed", "verdict", "ours"),
    [
        (row(0.61), "agrees", 0.6),
        (row(0.5), "differs", 0.6),
        (row(0.61, model="gpt"), "other model, not comparable", None),
        (row(0.6, "80%"), "not measured", None),
        (row(0.6, "52%"), "agrees", 0.6),
        (row(0.84, "all"), "agrees", 0.84),
        (row(0.98, "0"), "agrees", 0.98),
    ],
)
def test_a_number_agrees_where_it_lies_in_our_interval(
    printed: dict[str, Any], verdict: str, ours: float | None
) -> None:
    (found,) = compared(metrics(), [printed]).itertuples()
    assert found.verdict == verdict
    if ours is None:
        assert pd.isna(found.ours) and pd.isna(found.difference)
        return
    assert found.ours == pytest.approx(ours) and found.difference == pytest.approx(ours - printed["value"])
    _, (cells,) = reference_table(metrics(), [printed])
    assert cells[:4] == ["tiny", "none", printed["gold_position"], f"{100 * printed['value']:.1f}"]


def test_a_swept_setting_must_match_too() -> None:
    swept = row(0.82, "1", method="scale_channel", **{"method.factor": 1})
    assert list(compared(sweep([1.0, 0.0]), [swept])["ours"]) == [pytest.approx(0.8)]


def test_without_an_interval_nothing_agrees() -> None:
    assert list(compared(metrics().assign(ci_low=float("nan")), [row(0.6)])["verdict"]) == ["no interval"]


def test_data_sets_of_a_benchmark_are_compared_by_their_name() -> None:
    common = {"model": "tiny", "method": "none", "task": "kv", "metric": "accuracy", "n": 20, "seed": 0}
    subset = {"subset": "gov_report", "kind": "subset", "value": 0.19, "ci_low": 0.17, "ci_high": 0.21}
    whole = {"subset": "all", "kind": "average", "value": 0.2, "ci_low": 0.0, "ci_high": 1.0}
    table = with_subsets(metrics(), pd.DataFrame([{**common, **subset}, {**common, **whole}]))
    found = compared(table, [row(0.1844, "gov_report"), row(0.1691, "all")])
    # The average over everything is that of metrics.csv.
    assert list(found["verdict"]) == ["agrees", "differs"] and list(found["ours"]) == [0.19, 0.84]
    assert with_subsets(metrics(), None).equals(metrics())


def test_a_reader_is_told_what_cannot_be_compared() -> None:
    printed = [row(0.6, model="gpt", source="Table 1")]
    text = reference_text({"claims": ["it helps"]}, printed, compared=False)
    assert text == (
        "The paper's reading: it helps. The paper's numbers are for gpt; none of these ran here, so nothing "
        "is compared. Source: Table 1."
    )
    assert reference_table(metrics(), printed)[1] == []
