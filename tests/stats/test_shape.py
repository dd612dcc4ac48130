"""The shape that is named is the one that was planted, in every place that names it."""

from __future__ import annotations

from io import StringIO

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posbench.plots.scores import accuracy_by_position, describe_shapes
from posbench.report.sweep import sweep_table
from posbench.report.text import headline
from posbench.stats.bootstrap import Estimate
from posbench.stats.scores import Tabulator
from posbench.stats.shape import (
    FLAT,
    MIDDLE_DROP,
    MIDDLE_RISE,
    PRIMACY,
    RECENCY,
    SHAPES,
    UNCLEAR,
    UNEVEN,
    WITHOUT_SIDE,
    name_shape,
    shape_in_metrics,
)
from posbench.stats.verdict import BIAS, run_verdict
from posbench.tasks import KVRetrieval

CURVES = {
    # A real model on ten UUID pairs; both ends are above the inner positions.
    (0.92, 0.3, 0.13, 0.13, 0.3): PRIMACY,
    (0.58, 0.17, 0.17, 0.17, 0.0): PRIMACY,
    (0.6, 0.6, 0.6, 0.6, 0.1): PRIMACY,
    (0.24, 0.24, 0.24, 0.24, 0.6): RECENCY,
    (0.1, 0.6, 0.6, 0.6, 0.6): RECENCY,
    (1.0, 0.6, 0.3, 0.6, 1.0): MIDDLE_DROP,
    (0.9, 0.3, 0.3, 0.3, 0.6): MIDDLE_DROP,
    (0.2, 0.7, 0.9, 0.7, 0.3): MIDDLE_RISE,
    (0.5, 0.1, 0.5, 0.9, 0.5): UNEVEN,
}


def metrics_of(questions: int, seed: int, **shares: tuple[float, ...]) -> pd.DataFrame:
    """The metrics.csv of readers that answer so large a share at each position, as it is read back."""
    rng = np.random.default_rng(seed)
    num_positions = len(next(iter(shares.values())))
    luck = rng.random((questions, num_positions))
    rows = [
        {
            "method": method,
            "id": f"{question}-{position}",
            "gold_position": position,
            "cluster": str(question),
            "scores": {"accuracy": float(luck[question, position] < curve[position])},
        }
        for method, curve in shares.items()
        for question, position in np.ndindex(luck.shape)
    ]
    tabulator = Tabulator(
        task=KVRetrieval(pairs=num_positions),
        model="m",
        unmodified="none",
        resamples=200,
        seed=0,
    )
    table = tabulator.metrics(rows).to_csv(index=False)
    return pd.read_csv(StringIO(table), keep_default_na=False, na_values=[""])


@pytest.mark.parametrize(("curve", "name"), CURVES.items())
def test_the_planted_shape_is_named(curve: tuple[float, ...], name: str) -> None:
    metrics = metrics_of(400, 0, none=curve)
    assert shape_in_metrics(metrics, "none") == name
    verdict = run_verdict(metrics)
    assert verdict is not None
    assert verdict.name == BIAS
    assert (f"({name})" in verdict.reason) == (name not in WITHOUT_SIDE)
    text = headline(metrics)
    assert f"({name}: {SHAPES[name]})" in text
    assert f"points: unmodified {100 * bias_of(metrics):.1f}" in text
    assert accuracy_by_position(metrics).get_suptitle() == f"unmodified: {name}"


def bias_of(metrics: pd.DataFrame) -> float:
    return float(metrics.loc[metrics["metric"] == "position_bias", "value"].iloc[0])


def test_the_headline_has_the_three_numbers_of_the_curve() -> None:
    metrics = metrics_of(400, 0, none=(0.92, 0.3, 0.13, 0.13, 0.3))
    scores = metrics[metrics["metric"] == "accuracy"].set_index("gold_position")
    first, second, third, fourth, last = (
        100 * scores.loc[position, "value"] for position in "01234"
    )
    inner = (second + third + fourth) / 3
    expected = (
        f"{first:.1f} % at the first gold position, a mean of {inner:.1f} % at inner ones "
        f"and {last:.1f} % at the last"
    )
    assert expected in headline(metrics)


@pytest.mark.parametrize(
    ("questions", "share", "name"),
    [(3000, 0.6, FLAT), (12, 0.6, UNCLEAR), (100, 0.0, ""), (100, 1.0, "")],
)
def test_no_side_is_named_where_there_is_none(
    questions: int, share: float, name: str
) -> None:
    metrics = metrics_of(questions, 0, none=(share,) * 5)
    assert shape_in_metrics(metrics, "none") == name
    named = [shape for shape in SHAPES if f"({shape}: " in headline(metrics)]
    assert named == ([name] if name else [])


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_hardly_an_unbiased_reader_favours_a_side(share: float) -> None:
    names = [
        shape_in_metrics(metrics_of(60, seed, none=(share,) * 5), "none")
        for seed in range(30)
    ]
    with_side = [name for name in names if name and name not in WITHOUT_SIDE]
    assert len(with_side) <= 2, names


def test_each_method_has_its_own_shape() -> None:
    metrics = metrics_of(
        400, 0, none=(1.0, 0.6, 0.3, 0.6, 0.98), x=(0.95, 0.5, 0.5, 0.5, 0.5)
    )
    assert describe_shapes(metrics) == "unmodified: middle drop\nx: primacy"
    same = metrics[metrics["method"] == "none"].assign(method="y")
    unmodified = metrics[metrics["method"] == "none"]
    assert describe_shapes(pd.concat([unmodified, same])) == "both: middle drop"
    text = headline(metrics)
    assert "] (middle drop), x " in text
    assert "] (primacy), difference" in text
    # A third method leaves no room for all of them above a figure.
    third = metrics[metrics["method"] == "x"].assign(method="y")
    assert describe_shapes(pd.concat([metrics, third])) == "unmodified: middle drop"


def test_a_sweep_names_the_shape_of_each_setting() -> None:
    tables = [
        metrics_of(
            400, 0, none=(1.0, 0.6, 0.3, 0.6, 0.98), x=(0.95, 0.5, 0.5, 0.5, end)
        ).assign(run=f"run {end}", end=end)
        for end in (0.5, 0.95)
    ]
    summary = pd.concat(tables)
    columns = ["run", "end", *summary.columns.drop(["run", "end"])]
    header, rows, sentence = sweep_table(summary[columns], ["end"])
    column = header.index("shape")
    assert [row[column] for row in rows] == [PRIMACY, MIDDLE_DROP]
    assert sentence.endswith("shape of the unmodified model: middle drop.")


def test_a_shape_of_one_setting_is_not_that_of_all() -> None:
    curve = (1.0, 0.6, 0.3, 0.6, 0.98)
    tables = [
        metrics_of(n, 0, none=(share,) * 5 if flat else curve, x=curve).assign(
            run=f"run {n}", pairs=n
        )
        for n, share, flat in ((400, 0.0, False), (300, 1.0, True))
    ]
    summary = pd.concat(tables)
    columns = ["run", "pairs", *summary.columns.drop(["run", "pairs"])]
    _, _, sentence = sweep_table(summary[columns], ["pairs"])
    counted = "by settings: middle drop (1), not measurable (1)."
    assert sentence.endswith(f"shape of the unmodified model {counted}")


def test_two_positions_and_older_tables_have_no_shape() -> None:
    assert shape_in_metrics(metrics_of(50, 0, none=(0.9, 0.1)), "none") == ""
    metrics = metrics_of(50, 0, none=(0.9, 0.1, 0.9))
    assert shape_in_metrics(metrics, "other") == ""
    bias_alone = metrics[metrics["metric"] != "recency"]
    assert shape_in_metrics(bias_alone, "none") == ""


POINTS = st.integers(-100, 100)
ENDS = st.tuples(POINTS, POINTS, POINTS).map(sorted)


def contrast(low: int, value: int, high: int, n: int = 50) -> Estimate:
    return Estimate(value / 100, low / 100, high / 100, n)


@given(ENDS, ENDS)
def test_a_prompt_read_backwards_has_the_mirrored_shape(
    first: list[int], last: list[int]
) -> None:
    mirrored = {PRIMACY: RECENCY, RECENCY: PRIMACY}
    one, two = contrast(*first), contrast(*last)
    name = name_shape({"primacy": one, "recency": two}).name
    backwards = name_shape({"primacy": two, "recency": one}).name
    # Of two equal values neither end is the favoured one.
    if one.value != two.value:
        assert backwards == mirrored.get(name, name)


@given(ENDS, ENDS)
def test_a_named_side_rests_on_an_interval(first: list[int], last: list[int]) -> None:
    """What each name claims, said by the ends of the intervals alone."""
    primacy, recency = contrast(*first), contrast(*last)
    shape = name_shape({"primacy": primacy, "recency": recency})
    both = (primacy, recency)
    if shape.name == MIDDLE_DROP:
        assert min(value.ci_low for value in both) > 0
    elif shape.name == MIDDLE_RISE:
        assert max(value.ci_high for value in both) < 0
    elif shape.name == PRIMACY:
        assert primacy.ci_low > 0 or recency.ci_high < 0
        assert primacy.value > recency.value
    elif shape.name == RECENCY:
        assert recency.ci_low > 0 or primacy.ci_high < 0
        assert recency.value >= primacy.value
    elif shape.name == FLAT:
        assert max(abs(value.ci_low) for value in both) < 0.1
        assert max(abs(value.ci_high) for value in both) < 0.1
    else:
        assert shape.name == UNCLEAR
    assert (shape.missing > 0) <= (shape.name == UNCLEAR)
