"""The tables of the study of masks against matrix powers and the numbers of independent runs."""

from __future__ import annotations

from math import log

import numpy as np
import pytest

from posbench.theory import masks
from wu2025 import masks as study
from wu2025 import rope as rotation

M = -log(0.8)


def _walk(weights: np.ndarray, layers: int) -> np.ndarray:
    return np.linalg.matrix_power(weights, layers)[-1, ::-1]


def test_the_peak_under_rope_grows_with_depth_and_wavelength() -> None:
    """Theorem 4.7's monotonicity, and by how much its closed form with one layer's c falls short."""
    tops = study.rope_peaks()
    first = tops[tops.theta == 0.01].set_index("layers")
    # An independent run found these.
    assert list(first["measured"]) == pytest.approx(
        [6, 10, 18, 33, 65], abs=1
    ) and list(first["formula"]) == [5, 7, 9, 13, 18]
    weights = masks.attention(
        rotation.scores(314, 0.01, (0.01 * 5.3) ** -2), masks.causal(314)
    )
    assert _walk(weights, 9)[:-1].argmax() == first.loc[9, "measured"]
    assert (tops.groupby("theta")["measured"].diff().dropna() > 0).all()
    assert (
        tops.sort_values("theta").groupby("layers")["measured"].diff().dropna() < 0
    ).all()
    assert tops["measured"].between(tops["formula"], tops["formula_shared"]).all()
    mean = (_walk(weights, 17) * np.arange(314)).sum()
    assert mean == pytest.approx(rotation.drift(17, 5.3), rel=0.08)


def test_the_slack_of_a_bound_is_the_median_over_all_weights() -> None:
    rows = study.bounds(n=2, draws=1)
    for _, of_bound in rows.groupby("bound"):
        only, middle = of_bound["slack"]
        smaller = of_bound["tightest"].iloc[1]
        three_weights = [only, smaller, 2 * middle - smaller]
        assert of_bound["slack_all"].to_numpy() == pytest.approx(
            np.median(three_weights)
        )


def test_bounds_that_break_and_bounds_that_hold() -> None:
    rows = study.bounds(n=8, draws=6)
    table = rows.groupby("bound")
    assert table["broken"].sum().to_dict() == {
        "4.4 lower": 0,
        "4.4 upper, printed": 6,
        "4.4 upper, first row corrected": 0,
        "4.6 lower": 0,
        "4.6 upper": 0,
    }
    first = rows[(rows.bound == "4.4 upper, printed") & (rows["query"] == 1)]
    # The first row's only weight is 1, whatever the scores.
    assert first["broken"].item() == 6 and first["tightest"].item() == pytest.approx(
        np.exp(0.4) / 1.8
    )
    assert (table["weights"].sum() == 6 * 36).all() and (
        rows["slack"] >= rows["tightest"]
    ).all()


def test_prefix_and_window_tables() -> None:
    mass = study.prefix_mass()
    late = mass[mass.layers == 20].set_index("token")["weight"]
    power = np.linalg.matrix_power(masks.uniform(masks.prefix(12, 4)), 20)[-1]
    assert late.to_numpy() == pytest.approx(power[:5]) and late.loc[
        1:4
    ].to_numpy() == pytest.approx(0.25, abs=1e-9)
    behind = mass[(mass.token == 5) & (mass.layers > 18)]["weight"].to_numpy()
    assert behind[0] / behind[1] == pytest.approx(5, rel=0.05)
    halves = study.half_times()
    assert (halves["reaches"] == halves["hops"]).all()


def test_predicted_gaps_are_differences_of_the_rollout() -> None:
    gaps = study.predicted_gaps().set_index(["attention", "layers", "pair"])
    row = np.linalg.matrix_power(
        masks.attention(masks.decay(17, M), masks.causal(17)), 4
    )[-1]
    cell = gaps.loc[("decay 0.8, causal", 4, "first - last")]
    assert (
        cell["predicted"] == pytest.approx(row[0] + row[1] - row[14] - row[15])
        and cell["paper"] == -0.001
    )
    assert len(gaps) == 18


def test_the_gaps_of_one_network_count_once() -> None:
    masks_study = study.Masks()
    *_, finding = masks_study.findings(masks_study.measure(None))
    # 12 clear gaps of 5 networks, all with the sign: Wilson's lower end of 5 of 5 is n / (n + z^2).
    assert (finding.value, finding.n) == (1, 12)
    assert finding.ci_low == pytest.approx(5 / (5 + 1.959964**2), abs=1e-5)


def test_the_studies_of_masks() -> None:
    rates = study.causal_rates()
    assert (rates["weight"] <= rates["bound"] + 1e-12).all()
    late = rates[rates["layers"] > 36]
    assert (
        (late["weight"] / late["predicted"])
        .between(0.97, 1.03)
        .groupby(late["token"])
        .all()[[2, 3, 5]]
        .all()
    )
    halves = study.half_times().set_index("width")["measured"]
    assert list(halves.index) == list(range(2, 33))
    # An independent run found these, in products of one attention more than its count.
    assert list(halves.loc[[2, 3, 5, 9, 17, 32]]) == [
        60 + 1,
        30 + 1,
        15 + 1,
        8 + 1,
        5 + 1,
        4 + 1,
    ]
    tops = study.peaks()
    assert (tops["measured"] - tops["predicted"]).abs().max() <= 1 + 1e-9
    # e^m is 1.25, so x = 4 (t - 1) and x - 1 weigh the same: the nearer one counts.
    assert list(tops["measured"][:5]) == [3, 11, 19, 35, 59]
    mass = study.item_mass().set_index(["attention", "layers", "item"])["weight"]
    assert [
        mass["no PE, causal", 2, i] for i in ("first", "middle", "last")
    ] == pytest.approx([0.35, 0.08, 0.02], abs=0.006)
    assert [
        mass["decay 0.8, causal", 6, i] for i in ("first", "middle", "last")
    ] == pytest.approx([0.60, 0.03, 0.00], abs=0.006)
