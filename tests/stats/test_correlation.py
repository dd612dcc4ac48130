"""Rank correlation against scipy and against every pairing."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from scipy.stats import spearmanr

from posbench.stats.correlation import permutation_p, spearman


def test_many_rows_at_once_are_scipys() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 4, size=(5, 4, 7)).astype(float)
    y = rng.normal(size=7)
    found = spearman(x, y)
    assert found.shape == (5, 4)
    for row, value in zip(x.reshape(-1, 7), found.ravel(), strict=True):
        assert value == pytest.approx(spearmanr(row, y).statistic)
    pairs = rng.normal(size=(3, 7))
    wanted = [spearmanr(a, b).statistic for a, b in zip(x[0, :3], pairs, strict=True)]
    np.testing.assert_allclose(spearman(x[0, :3], pairs), wanted)
    assert np.isnan(spearman(np.ones(7), y)), "a constant has no ranks"


@pytest.mark.parametrize("ties", [False, True])
def test_permutation_p_is_the_share_of_all_pairings(ties: bool) -> None:
    x = np.arange(6.0)
    y = np.array([1.0, 0, 3, 2, 4, 2 if ties else 5])
    every = np.array([spearmanr(x, list(p)).statistic for p in permutations(y)])
    for sign in (1, -1):
        share = np.mean(sign * every >= spearmanr(x, sign * y).statistic - 1e-9)
        assert permutation_p(x, sign * y) == pytest.approx(share, abs=0.008)
