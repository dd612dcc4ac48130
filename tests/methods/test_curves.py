"""The curves over layers against de Casteljau's construction, straight lines and their properties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posbench.errors import UserError
from posbench.methods.curves import CURVE_KINDS, check_points, layer_scales


@st.composite
def control_points(draw, least=1, most=6):
    """Points with x strictly rising on whole layers, and y on the paper's grid."""
    xs = sorted(draw(st.sets(st.integers(0, 31), min_size=least, max_size=most)))
    return [(float(x), draw(st.integers(10, 20)) / 10) for x in xs]


def de_casteljau(points, t):
    """Points of a Bezier curve, [T, 2], by repeated marks between neighbours, no binomials."""
    rows = np.array(points, dtype=float)[:, None, :] * np.ones((1, len(t), 1))
    while len(rows) > 1:
        rows = (1 - t)[:, None] * rows[:-1] + t[:, None] * rows[1:]
    return rows[0]


@given(control_points(), st.integers(1, 40), st.sampled_from(CURVE_KINDS))
def test_ends_range_and_constant(points, layers, curve):
    scales = layer_scales(curve, points, layers)
    assert len(scales) == layers
    assert scales[0] == points[0][1]
    if layers > 1:
        assert scales[-1] == points[-1][1]
    ys = [y for _, y in points]
    assert min(ys) <= min(scales) and max(scales) <= max(ys)
    if len(points) == 1:
        assert scales == [points[0][1]] * layers


@given(control_points(least=2), st.integers(2, 40))
def test_bezier_agrees_with_a_dense_de_casteljau_curve(points, layers):
    curve = de_casteljau(points, np.linspace(0, 1, 2001))
    assert (
        np.diff(curve[:, 0]) > 0
    ).all()  # x(t) rises, so that bisection finds the only t
    at = np.linspace(points[0][0], points[-1][0], layers)
    expected = np.interp(at, curve[:, 0], curve[:, 1])
    # Where the curve is nearly upright a chord of the dense curve is this far off at most.
    np.testing.assert_allclose(
        layer_scales("bezier", points, layers), expected, atol=2e-3
    )


@given(
    control_points(least=2),
    st.floats(-40, 40),
    st.floats(0.01, 30),
    st.sampled_from(["bezier", "linear"]),
)
def test_shifting_and_stretching_x_changes_nothing(points, shift, stretch, curve):
    moved = [(shift + stretch * x, y) for x, y in points]
    np.testing.assert_allclose(
        layer_scales(curve, moved, 32), layer_scales(curve, points, 32), atol=1e-7
    )


@given(
    control_points(least=2, most=2),
    st.integers(1, 40),
    st.sampled_from(["stretched", "absolute"]),
)
def test_bezier_of_degree_one_is_the_straight_line(points, layers, x):
    np.testing.assert_allclose(
        layer_scales("bezier", points, layers, x),
        layer_scales("linear", points, layers, x),
        atol=1e-12,
    )


@given(control_points(), st.integers(1, 40))
def test_absolute_layers(points, layers):
    xs = [x for x, _ in points]
    ys = [y for _, y in points]
    h = np.arange(layers)
    np.testing.assert_allclose(
        layer_scales("linear", points, layers, "absolute"),
        np.interp(h, xs, ys),
        atol=1e-12,
    )
    step = [
        ys[max([k for k, x in enumerate(xs) if x <= layer], default=0)] for layer in h
    ]
    assert layer_scales("step", points, layers, "absolute") == step
    bezier = layer_scales("bezier", points, layers, "absolute")
    for layer, scale in zip(h, bezier, strict=True):
        if layer <= xs[0] or layer >= xs[-1]:
            assert scale == (ys[0] if layer <= xs[0] else ys[-1])
    if xs[0] == 0 and xs[-1] == layers - 1:
        assert bezier == layer_scales("bezier", points, layers)


def test_worked_example():
    # Cubic with evenly spaced x: x(t) = 3 t, so layer h of 4 has t = h / 3 and the Bernstein weights are
    # twenty-sevenths.
    scales = layer_scales("bezier", [(0, 1.0), (1, 2.0), (2, 1.0), (3, 1.0)], 4)
    np.testing.assert_allclose(scales, [1, 1 + 12 / 27, 1 + 6 / 27, 1], atol=1e-12)
    assert layer_scales("step", [(0, 1.0), (10, 1.2), (21, 1.4), (31, 1.6)], 32) == [
        1.0
    ] * 10 + [1.2] * 11 + [1.4] * 10 + [1.6]


def test_a_curve_that_turns_back_still_crosses_every_layer():
    scales = layer_scales("bezier", [(0, 1.0), (3, 1.5), (1, 2.0), (2, 1.2)], 4)
    assert scales[0] == 1.0 and scales[-1] == 1.2 and all(1 <= s <= 2 for s in scales)


@pytest.mark.parametrize(
    "bad", [dict(curve="spline"), dict(x="log"), dict(points=[]), dict(layers=0)]
)
def test_unknown_curves_are_refused(bad):
    with pytest.raises(ValueError, match="no curve"):
        layer_scales(**dict(curve="bezier", points=[(0, 1.0)], layers=4) | bad)


@pytest.mark.parametrize(
    "points, allowed",
    [
        ([], "at least one"),
        ([(0, 1.0, 2.0)], "at least one"),
        ([(0, float("nan"))], "at least one"),
        ([(0, 1.0), (0, 1.5)], "strictly rising"),
        ([(2, 1.0), (1, 1.5)], "strictly rising"),
        ([(-1, 1.0), (1, 1.5)], "to 3 or less"),
        ([(0, 1.0), (4, 1.5)], "to 3 or less"),
        ([(0, 0.9), (1, 1.5)], "from 1 to 2"),
        ([(0, 1.0), (1, 2.1)], "from 1 to 2"),
    ],
)
def test_points_outside_the_constraints_are_refused_in_one_line(points, allowed):
    with pytest.raises(UserError, match=allowed) as error:
        check_points(points, layers=4)
    assert error.value.field == "method.points" and "\n" not in str(error.value)


@given(control_points())
def test_points_within_the_constraints_pass(points):
    check_points(points, layers=32)
