"""The shape that is named is the one that was planted, in every place that names it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tools.verdicts
from posbench.plots.scores import accuracy_by_position, describe_shapes
from posbench.report.sweep import sweep_table
from posbench.report.text import headline
from posbench.stats.bootstrap import Estimate
from posbench.stats.position_bias import CurveIntervals
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
from posbench.stats.verdict import BIAS, NO_BIAS, run_verdict
from tools.verdicts import lost_places, simulated_scores, stopped_shape, with_lost

CURVES = {
    # A real model on ten UUID pairs; both ends are above the inner positions.
    (0.92, 0.3, 0.13, 0.13, 0.3): PRIMACY,
    (0.58, 0.17, 0.17, 0.17, 0.0): PRIMACY,
    (0.6, 0.6, 0.6, 0.6, 0.1): PRIMACY,
    (0.24, 0.24, 0.24, 0.24, 0.6): RECENCY,
    (0.1, 0.6, 0.6, 0.6, 0.6): RECENCY,
    (1.0, 0.6, 0.3, 0.6, 1.0): MIDDLE_DROP,
    (0.9, 0.3, 0.3, 0.3, 0.6): MIDDLE_DROP,
    # A trained small model: the dip takes three of seven inner positions.
    (1.0, 1.0, 0.86, 0.31, 0.2, 0.34, 0.83, 0.97, 1.0): MIDDLE_DROP,
    (0.2, 0.7, 0.9, 0.7, 0.3): MIDDLE_RISE,
    (0.5, 0.1, 0.5, 0.9, 0.5): UNEVEN,
}


def metrics_of(questions: int, seed: int, **shares: tuple[float, ...]) -> pd.DataFrame:
    """The metrics.csv of readers that answer so large a share at each position, all by the same luck."""
    luck = np.random.default_rng(seed).random(
        (questions, len(next(iter(shares.values()))))
    )
    scores = {
        name: (luck < np.array(curve)).astype(float) for name, curve in shares.items()
    }
    return tools.verdicts.metrics_of(scores)


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
    assert text.endswith("Verdict: bias.")
    unchecked = headline(metrics, {"unchecked": "it counts no tokens"})
    assert unchecked.endswith("Verdict: bias, of this server if not of its model.")
    assert headline(metrics, {"unchecked": ""}) == text
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
    [(3000, 0.6, FLAT), (12, 0.6, UNCLEAR), (100, 0.0, ""), (20, 1.0, "")],
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
    counted = "by settings: flat (1), middle drop (1)."
    assert sentence.endswith(f"shape of the unmodified model {counted}")


def test_two_positions_and_older_tables_have_no_shape() -> None:
    assert shape_in_metrics(metrics_of(50, 0, none=(0.9, 0.1)), "none") == ""
    metrics = metrics_of(50, 0, none=(0.9, 0.1, 0.9))
    assert shape_in_metrics(metrics, "other") == ""
    bias_alone = metrics[metrics["metric"] != "recency"]
    assert shape_in_metrics(bias_alone, "none") == ""


# What one shape or the other says of the positions that are not lost, in words a test can check.
SIDES = {
    3: {(0,): RECENCY, (1,): MIDDLE_DROP, (2,): PRIMACY}
    | {(0, 1): RECENCY, (0, 2): MIDDLE_RISE, (1, 2): PRIMACY},
    5: {(0,): RECENCY, (4,): PRIMACY, (0, 1): RECENCY, (3, 4): PRIMACY}
    | {(0, 4): MIDDLE_RISE, (1, 2): MIDDLE_DROP, (2, 3): MIDDLE_DROP},
    9: {(0,): RECENCY, (8,): PRIMACY, (0, 1): RECENCY, (7, 8): PRIMACY}
    | {(0, 8): MIDDLE_RISE},
}
"""The lost positions that leave a side to name; the others make a curve uneven, by number of positions."""


@pytest.mark.parametrize(
    ("num_positions", "lost"),
    [(3, lost) for lost in lost_places(3)]
    + [(5, lost) for lost in lost_places(5)]
    + [(9, lost) for lost in lost_places(9) if sum(lost) % 4 == 0]
    + [
        pytest.param(9, lost, marks=pytest.mark.slow)
        for lost in lost_places(9)
        if sum(lost) % 4
    ],
)
def test_each_lost_position_and_pair_is_a_bias_of_the_right_shape(
    num_positions: int, lost: tuple[int, ...]
) -> None:
    """Read by a fixed number of questions, and by a run that stops when it knows."""
    shares = with_lost(num_positions, lost, 0.9, 0.55)
    rng = np.random.default_rng((num_positions, *lost))
    scores = simulated_scores(rng, shares, 400)
    name = SIDES[num_positions].get(lost, UNEVEN)
    metrics = tools.verdicts.metrics_of({"none": scores})
    verdict = run_verdict(metrics)
    assert verdict is not None and verdict.name == BIAS
    assert shape_in_metrics(metrics, "none") == name
    stopped, curve = stopped_shape(scores)
    assert stopped == name and curve.bias.ci_low > 0


def test_no_side_is_named_that_a_position_contradicts() -> None:
    """The first contrasts of this reader are those of primacy; one inner position says otherwise."""
    shares = (0.92, 0.97, 0.97, 0.35, 0.97, 0.97, 0.97, 0.97, 0.82)
    metrics = metrics_of(400, 0, none=shares)
    assert shape_in_metrics(metrics, "none") == UNEVEN
    rng = np.random.default_rng(0)
    assert stopped_shape(simulated_scores(rng, shares, 400))[0] == UNEVEN


@pytest.mark.parametrize("end", [0.9, 0.8])
def test_a_lost_position_between_others_is_never_no_bias(end: float) -> None:
    """These readers were flat in 50 and 21 of 60 runs, as what is lost inside cancels out beside the ends."""
    shares = [end, 0.97, 0.97, 0.3, 0.97, 0.97 if end == 0.9 else 0.3, 0.97, 0.97, end]
    for seed in range(6):
        rng = np.random.default_rng(seed)
        assert stopped_shape(simulated_scores(rng, shares, 300))[0] == UNEVEN
        verdict = run_verdict(metrics_of(60, seed, none=tuple(shares)))
        assert verdict is not None and verdict.name != NO_BIAS


def test_wide_and_narrow_drops() -> None:
    """A drop that deepens towards the middle is one; a single lost position in the middle of nine is none."""
    wide = (0.9, 0.85, 0.6, 0.4, 0.35, 0.4, 0.6, 0.85, 0.9)
    for curve, name in (
        (wide, MIDDLE_DROP),
        ((0.9,) * 4 + (0.4,) + (0.9,) * 4, UNEVEN),
    ):
        assert shape_in_metrics(metrics_of(400, 0, none=curve), "none") == name
        mirrored = tuple(1 - share for share in curve)
        name = MIDDLE_RISE if name == MIDDLE_DROP else name
        assert shape_in_metrics(metrics_of(400, 0, none=mirrored), "none") == name


POINTS = st.integers(-100, 100)
ENDS = st.tuples(POINTS, POINTS, POINTS).map(sorted)


def contrast(ends: list[int]) -> Estimate:
    low, value, high = ends
    return Estimate(value / 100, low / 100, high / 100, 50)


def name_of(*ends: list[int], bias: float = 0.3) -> str:
    """The shape by the contrasts of the ends, then of each position; the bias is sure unless it is 0."""
    first, last, *others = map(contrast, ends)
    return name_shape(
        CurveIntervals(Estimate(bias, bias, bias, 50), first, last, others)
    )


@given(ENDS, ENDS, st.lists(ENDS, min_size=3, max_size=6))
def test_a_prompt_read_backwards_has_the_mirrored_shape(
    first: list[int], last: list[int], positions: list[list[int]]
) -> None:
    mirrored = {PRIMACY: RECENCY, RECENCY: PRIMACY}
    name = name_of(first, last, *positions)
    backwards = name_of(last, first, *positions[::-1])
    inner = sorted(ends[1] for ends in positions[1:-1])
    # Of two equal values neither end is the favoured one, and of two equal inner ones neither is the turn.
    if first[1] != last[1] and len(set(inner)) == len(inner):
        assert backwards == mirrored.get(name, name)


@given(ENDS, ENDS, st.lists(ENDS, min_size=3, max_size=6))
def test_a_named_side_rests_on_an_interval(
    first: list[int], last: list[int], positions: list[list[int]]
) -> None:
    """What each name claims, said by the ends of the intervals alone."""
    name = name_of(first, last, *positions)
    if name == MIDDLE_DROP:
        assert min(first[0], last[0]) > 0
    elif name == MIDDLE_RISE:
        assert max(first[2], last[2]) < 0
    elif name == PRIMACY:
        assert first[0] > 0 or last[2] < 0
        assert first[1] > last[1]
    elif name == RECENCY:
        assert last[0] > 0 or first[2] < 0
        assert last[1] >= first[1]
    else:
        assert name in (UNEVEN, UNCLEAR)
    is_flat = all(max(map(abs, ends)) < 10 for ends in positions)
    without_bias = name_of(first, last, *positions, bias=0.0)
    assert without_bias == (FLAT if is_flat else UNCLEAR)
