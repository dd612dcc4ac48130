"""The figures of the searches for scales show the numbers they are given."""

import numpy as np
import pandas as pd

from posbench.plots.search import convergence_figure, curve_figure
from tests.messages import refused

GENERATIONS = pd.DataFrame(
    {
        "generation": [0, 1, 2],
        "best": [0.5, 0.6, 0.75],
        "mean": [0.4, 0.5, 0.7],
        "unmodified": 0.55,
    }
)
PARTS = pd.DataFrame(
    [
        ("point", 0.0, 1.0),
        ("point", 3.0, 2.0),
        ("curve", 0.0, 1.0),
        ("curve", 3.0, 2.0),
        ("layer", 0.0, 1.0),
        ("layer", 1.0, 2.0),
    ],
    columns=["part", "x", "y"],
)
SEARCH = pd.DataFrame(
    {
        "beginning": [1.0, 0.9],
        "middle": [0.8, 0.3],
        "end": [0.9, 1.0],
        "fitness": [0.89, 0.77],
        "unmodified": [False, True],
        "selected": [True, False],
    }
)


def test_convergence_draws_best_mean_and_the_unmodified_model():
    (axes,) = convergence_figure(GENERATIONS).axes
    drawn = {line.get_label(): line.get_ydata() for line in axes.lines}
    np.testing.assert_allclose(drawn["best"], [50, 60, 75])
    np.testing.assert_allclose(drawn["mean of the parents"], [40, 50, 70])
    np.testing.assert_allclose(drawn["unmodified"], [55, 55])


def test_several_searches_are_averaged_per_setting():
    several = pd.concat(
        [GENERATIONS.assign(search="4", best=b, unmodified=np.nan) for b in (0.2, 0.4)]
    )
    (axes,) = convergence_figure(several).axes
    assert [line.get_label() for line in axes.lines] == ["4"]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [30, 30, 30])


def test_curve_has_points_scales_and_accuracies():
    left, middle, right = curve_figure(PARTS, SEARCH).axes
    np.testing.assert_allclose(left.lines[1].get_xydata(), [[0, 1], [3, 2]])
    np.testing.assert_allclose(middle.lines[0].get_xydata(), [[0, 1], [1, 2]])
    np.testing.assert_allclose(
        [bar.get_height() for bar in right.patches], [90, 30, 100, 77, 100, 80, 90, 89]
    )
    assert len(curve_figure(PARTS[PARTS["part"] == "layer"], SEARCH).axes) == 2


def test_missing_columns_are_named():
    with refused(
        "generations",
        "columns missing: mean",
        allowed=("generation", "mean"),
        hint="stage",
    ):
        convergence_figure(GENERATIONS.drop(columns="mean"))
    with refused(
        "search",
        "columns missing: fitness",
        allowed=("fitness", "unmodified"),
        hint="stage",
    ):
        curve_figure(PARTS, SEARCH.drop(columns="fitness"))
