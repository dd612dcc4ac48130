"""RoPE of one angle against every pair rotated on its own, and against closed forms."""

from __future__ import annotations

from math import comb, log

import numpy as np
import pytest

from posbench.theory import masks
from wu2025 import rope as rotation


@pytest.mark.parametrize("seed", range(4))
def test_rope_bounds_hold_for_random_lengths_and_angles(seed: int) -> None:
    """Lemma 4.6 against every pair rotated on its own."""
    rng = np.random.default_rng(seed)
    n = 16
    theta = 0.15
    delta = 2.0
    b = rng.uniform(0.5, 4, (n, n))
    phi = rng.uniform(-delta * theta, delta * theta, (n, n))
    low, high = rotation.bounds(n, theta, 0.5, 4, delta)
    for i in range(n):
        scores = []
        for j in range(i + 1):
            query = np.exp(1j * (phi[i, j] + 0.7)) * np.exp(-1j * i * theta)
            key = np.exp(0.7j) * np.exp(-1j * j * theta)
            scores.append(b[i, j] * (query * key.conjugate()).real)
        weights = np.exp(scores) / np.exp(scores).sum()
        assert (low[i, : i + 1] <= weights).all() and (
            weights <= high[i, : i + 1] + 1e-15
        ).all()
    assert (np.triu(low, 1) == 0).all() and (np.diff(low[-1]) > 0).all()


def test_rope_bounds_need_angles_below_pi() -> None:
    with pytest.raises(ValueError, match="above pi"):
        rotation.bounds(16, 0.25, 1, 1)
    # A token one whole turn away weighs as much as the query itself.
    turn = masks.attention(rotation.scores(64, 2 * np.pi / 60, 4.0), masks.causal(64))[
        -1
    ]
    assert turn[3] == pytest.approx(turn[63]) and turn[33] < 0.01 * turn[63]


@pytest.mark.parametrize("width", [2.65, 5.3, 10.6])
def test_the_closed_form_of_rope(width: float) -> None:
    for t in (1, 2, 4, 8, 16):
        exact = [log(comb(t + x, x)) - x**2 / (2 * width**2) for x in range(120)]
        assert rotation.law(t + 1, width, np.arange(120)) == pytest.approx(
            exact, rel=1e-9, abs=1e-9
        )
        top = rotation.peak(t + 1, width)
        assert top == int(np.argmax(exact))
        # Appendix H: the derivative with theta^2 is 0 at the peak, the printed one with theta is not.
        assert rotation.stationary(t + 1, width) == pytest.approx(top, abs=1)
        x = rotation.stationary(t + 1, width, printed=0.01)
        assert (
            log((t + x) / x) == pytest.approx(x / (0.01 * width**2)) and x < 0.6 * top
        )
