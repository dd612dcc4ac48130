"""Spearman's rank correlation of many rows at once."""

from __future__ import annotations

import numpy as np
import scipy
from numpy.typing import ArrayLike

from posbench.stats.bootstrap import Array

PERMUTATIONS = 20_000


def spearman(x: ArrayLike, y: ArrayLike) -> Array:
    """Rank correlation over the last axis.

    Args:
        x: [..., P], or [P] for all rows of the other.
        y: As ``x``.

    Returns:
        [...], NaN where a row is constant.
    """
    x_ranks = _centred_ranks(x)
    y_ranks = _centred_ranks(y)
    scale = np.sqrt((x_ranks**2).sum(-1) * (y_ranks**2).sum(-1))
    missing = np.full(np.shape(scale), np.nan)
    return np.divide((x_ranks * y_ranks).sum(-1), scale, out=missing, where=scale > 0)


def _centred_ranks(values: ArrayLike) -> Array:
    """Ranks over the last axis minus their mean."""
    ranks = scipy.stats.rankdata(np.asarray(values, dtype=np.float64), axis=-1)
    return ranks - ranks.mean(-1, keepdims=True)


def permutation_p(x: Array, y: Array) -> float:
    """One-sided permutation p of the rank correlation of x and y, [P] each.

    It is the share of random pairings whose correlation is at least as large, the actual pairing included; NaN where
    x or y is constant.
    """
    actual = spearman(x, y)
    if np.isnan(actual):
        return float("nan")
    rng = np.random.default_rng(0)
    shuffled = rng.permuted(np.tile(y, (PERMUTATIONS, 1)), axis=1)
    reaches = spearman(x, shuffled) >= actual - 1e-12
    return float((1 + reaches.sum()) / (1 + PERMUTATIONS))
