"""Spearman's rank correlation, of many rows at once."""

from __future__ import annotations

import numpy as np
import scipy
from numpy.typing import ArrayLike

from posbench.stats.bootstrap import Array


def spearman(x: ArrayLike, y: ArrayLike) -> Array:
    """Rank correlation over the last axis of x and y, [..., P] each or [P]; NaN where a row is constant."""
    a, b = (
        scipy.stats.rankdata(np.asarray(values, dtype=np.float64), axis=-1)
        for values in (x, y)
    )
    a = a - a.mean(-1, keepdims=True)
    b = b - b.mean(-1, keepdims=True)
    scale = np.sqrt((a**2).sum(-1) * (b**2).sum(-1))
    return np.divide(
        (a * b).sum(-1), scale, out=np.full(np.shape(scale), np.nan), where=scale > 0
    )


def permutation_p(x: Array, y: Array, draws: int = 20000, seed: int = 0) -> float:
    """Share of random pairings of x and y [P] whose correlation reaches theirs, the given pairing counted."""
    shuffled = np.random.default_rng(seed).permuted(np.tile(y, (draws, 1)), axis=1)
    reached = spearman(x, shuffled) >= spearman(x, y) - 1e-12
    return float((1 + reached.sum()) / (1 + draws))
