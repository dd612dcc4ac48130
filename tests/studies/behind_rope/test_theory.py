"""The causal mask alone: closed forms, the exact limit and the simulation, each against the others."""

from __future__ import annotations

import numpy as np
import pytest

from behind_rope import theory
from posbench.measure.scores import diagonal_normalised


@pytest.mark.parametrize("alpha", [0, 0.05, 0.2, 0.5, 0.8, 0.99])
def test_closed_forms_are_the_exact_limit(alpha: float) -> None:
    n = 50
    lower = np.tril_indices(50, -1)
    assert theory.second_layer_scores(n, alpha)[lower] == pytest.approx(
        theory.limit_scores(n, 2, alpha)[1][lower], abs=1e-13
    )
    i = np.arange(1, n + 1)
    # The unnormalised score without residual stream, worked out by hand.
    e = np.e
    a = np.exp(alpha)
    g_prime = (e * alpha + a * (1 + alpha * (i - 2))) / (e + (i - 1) * a)
    plain = np.outer(g_prime / theory.h_prime(i, alpha), 1 / theory.h_prime(i, alpha))
    assert plain[lower] == pytest.approx(
        theory.limit_scores(n, 2, alpha, residual=False)[1][lower], abs=1e-13
    )
    long = np.arange(1, 2001)
    assert (np.diff(theory.h(long, alpha)) < 0).all() and (
        np.diff(theory.h_prime(long, alpha)) < 0
    ).all()
    step = theory.h_prime(long + 1, alpha) ** 2 - theory.h_prime(long, alpha) ** 2
    assert step == pytest.approx(theory.h_prime_step(long, alpha), abs=1e-13)
    printed = theory.h_prime_step(long, alpha, printed=True)
    assert printed[0] == pytest.approx(step[0]) and not np.allclose(
        printed[1:9], step[1:9], rtol=0.01, atol=0
    )


def test_printed_values() -> None:
    assert [
        float(theory.second_layer_scores(3, 0)[i, j])
        for i, j in ((1, 0), (2, 0), (2, 1))
    ] == pytest.approx([0.154, 0.132, 0.150], abs=1e-3)
    for alpha, g2, g50, h50 in (
        (0, 0.53788, 0.03867, 1.06123),
        (0.2, 1.29604, 0.83123, 1.29845),
        (0.5, 2.37754, 2.01974, 1.59456),
    ):
        assert [
            theory.g(2, alpha),
            theory.g(50, alpha),
            theory.h(50, alpha),
            theory.h(1, alpha),
        ] == pytest.approx([g2, g50, h50, 2], abs=1e-5)
    rows = {
        (0, False): (
            0.0182,
            0.0326,
            0.0343,
            0.0697,
            0.1415,
            0.1390,
            0.1539,
            0.3559,
            0.3591,
        ),
        (0.2, False): (
            0.3201,
            0.4813,
            0.4928,
            0.4079,
            0.7218,
            0.7403,
            0.4576,
            0.8480,
            0.8653,
        ),
        (0, True): (
            0.0087,
            0.0205,
            0.0331,
            0.0331,
            0.0889,
            0.1343,
            0.0729,
            0.2225,
            0.3460,
        ),
    }
    for (alpha, rotated), wanted in rows.items():
        found = theory.limit_scores(
            50, 4, alpha, kernel=theory.rope_kernel(50) if rotated else None
        )
        assert [
            found[layer][49, j] for layer in (1, 2, 3) for j in (0, 24, 48)
        ] == pytest.approx(wanted, abs=6e-5)


def test_scores_rise_with_the_key_but_not_at_every_layer() -> None:
    def rising(alpha: float, layer: int) -> int:
        rows = theory.limit_scores(50, 4, alpha)[layer - 1]
        return sum((np.diff(rows[i, :i]) > 0).all() for i in range(2, 50))

    assert [rising(0, layer) for layer in (2, 3, 4)] == [48, 24, 30], (
        "layers 3 and 4 do not always rise at alpha 0"
    )
    assert [rising(0.2, layer) for layer in (2, 3, 4)] == [48, 48, 48]


def test_the_simulation_meets_the_limit() -> None:
    lower = np.tril_indices(20, -1)
    mean, error = theory.simulate(20, 3, 0.2, dim=512, draws=3000, seed=1)
    exact = theory.limit_scores(20, 3, 0.2)
    assert mean[0][lower] == pytest.approx(0.2, abs=0.01)
    # The bias at layer 2 is about -1/2 per dimension.
    away = mean[1][lower] - exact[1][lower]
    assert (
        abs(away.mean() + 0.5 / 512) < 0.002
        and np.corrcoef(mean[1][lower], exact[1][lower])[0, 1] > 0.999
    )
    assert (error[1:][:, lower[0], lower[1]] > 0).all() and np.abs(away).max() < 0.01


def test_layernorm_with_inputs_of_length_sqrt_d_is_l2() -> None:
    dim = 256
    lower = np.tril_indices(12, -1)
    plain, _ = theory.simulate(12, 3, 0.2, dim=dim, draws=1500, seed=2)
    normed, _ = theory.simulate(
        12, 3, 0.2, dim=dim, draws=1500, seed=2, norm="layernorm", input_norm=dim**0.5
    )
    short, _ = theory.simulate(
        12, 3, 0.2, dim=dim, draws=1500, seed=2, norm="layernorm"
    )
    assert np.abs(normed[1:] - plain[1:])[:, lower[0], lower[1]].max() < 0.01
    assert np.abs(short[1] - plain[1])[lower].max() > 0.1, (
        "inputs of length 1 are another model"
    )


def test_only_the_mask_leaves_more_than_distance() -> None:
    rotated = {
        "rope": True,
        "draws": 2000,
        "dim": 64,
        "n": 30,
        "layers": 3,
        "alpha": 0.0,
    }
    halves = [
        [
            diagonal_normalised(theory.simulate(mask=mask, seed=seed, **rotated)[0][2])
            for seed in (0, 1)
        ]
        for mask in (True, False)
    ]
    lower = np.tril_indices(30, -1)
    with_mask, without = (np.corrcoef(a[lower], b[lower])[0, 1] for a, b in halves)
    assert with_mask > 0.8 and abs(without) < 0.3


def test_diagonal_normalisation() -> None:
    rng = np.random.default_rng(0)
    only_distance = rng.normal(size=9)[
        np.abs(np.subtract.outer(np.arange(9), np.arange(9)))
    ]
    assert np.nan_to_num(diagonal_normalised(only_distance)) == pytest.approx(0)
    found = diagonal_normalised(rng.normal(size=(2, 9, 9)))
    for offset in range(9):
        assert np.diagonal(found, -offset, axis1=1, axis2=2).mean(-1) == pytest.approx(
            0
        )
    assert np.isnan(found[:, 0, 1:]).all() and (found[:, 8, 0] == 0).all()


def test_what_rises_and_what_lies_beyond_distance_by_hand() -> None:
    assert theory.rising_rows(np.tril(np.arange(25.0).reshape(5, 5))) == 3
    assert theory.rising_rows(np.zeros((5, 5))) == 0
    free = theory.limit_scores(50, 4, 0.0, mask=False, kernel=theory.rope_kernel(50))
    assert [theory.beyond_distance(x) for x in free] == pytest.approx(
        [0, 0, 0, 0], abs=1e-6
    )
