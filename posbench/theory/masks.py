"""Attention masks as graphs, and where attention goes after many layers (Wu et al. 2025, Section 4).

Tokens are numbered from 0 here and from 1 in the paper. The rollout of t layers is A^(t) ... A^(1).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import scipy
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

HEAD = 0.3
ENTRY = 0.2
"""Thresholds of the sink metrics: a mean weight (Gu et al. 2024), single weights (Wu et al. 2025)."""


def causal(n: int) -> Mask:
    """Every token sees itself and all before it, [n, n]."""
    return np.tri(n, dtype=bool)


def window(n: int, width: int) -> Mask:
    """Every token sees the newest ``width`` tokens up to itself, [n, n]."""
    return causal(n) & ~np.tri(n, k=-width, dtype=bool)


def prefix(n: int, length: int) -> Mask:
    """The first ``length`` tokens are seen by all, each other too; the rest is causal, [n, n]."""
    mask = causal(n)
    mask[:, :length] = True
    return mask


def decay(n: int, m: float) -> Array:
    """Decay added to scores: -(i - j) m where j <= i, minus infinity elsewhere, [n, n]."""
    distance = np.subtract.outer(np.arange(n), np.arange(n))
    return np.where(distance >= 0, -m * distance, -np.inf)


def attention(scores: Array, mask: Mask) -> Array:
    """Softmax of the scores over what a token sees, [..., n, n]."""
    shut = np.where(mask, scores, -np.inf)
    weights = np.exp(shut - shut.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def uniform(mask: Mask) -> Array:
    """Equal weight on everything a token sees, [n, n]."""
    return attention(np.zeros(mask.shape), mask)


def rollout(layers: Sequence[Array]) -> list[Array]:
    """Cumulative context probability after 1, 2, ... layers, each [..., n, n]; first layer first.

    Source: Wu et al. 2025, Section 3; the rollout of Abnar and Zuidema 2020 without its residual.
    """
    return list(accumulate(layers, lambda state, weights: weights @ state))


def causal_bound(n: int, layers: int, epsilon: float) -> Array:
    """Upper bound (1 - (j - 1) epsilon)^t of the weight of token j (from 1) after t layers, [n].

    Every allowed attention weight is at least epsilon. Theorem 4.1 with C = 1 (1 - epsilon there counts a
    layer less).
    """
    return np.clip(1 - np.arange(n) * epsilon, 0, 1) ** layers


def decay_bounds(
    n: int, m: float, low: float, high: float, *, printed: bool = False
) -> tuple[Array, Array]:
    """Bounds of a layer's attention under a decay mask, scores in [low, high], both [n, n] (Lemma 4.4).

    Differs from source: the printed C_max, e^(high - low) / (1 + e^-m), fails in the first row, whose only
    weight is 1; there the bound is e^(high - low). With ``printed`` it is as printed.
    """
    spread = np.exp(high - low)
    near = np.exp(decay(n, m))
    most = np.full((n, 1), spread / (1 + np.exp(-m)))
    if not printed:
        most[0] = spread
    return (1 - np.exp(-m)) / spread * near, np.minimum(most * near, 1)


def decay_law(layers: int, m: float, distance: NDArray[np.int64]) -> Array:
    """Weight at each distance after t layers of equal scores under a decay mask, far from the first token.

    The Theta of Theorem 4.5, exactly: the law binom(t - 1 + x, x) e^(-x m) (1 - e^-m)^t.
    """
    return scipy.stats.nbinom.pmf(distance, layers, 1 - np.exp(-m))


def decay_peak(layers: int, m: float) -> float:
    """Distance of the largest weight after t layers: (t - 1) / (e^m - 1) (Theorem 4.5, with t from 0)."""
    return (layers - 1) / np.expm1(m)


def window_half_time(n: int, width: int) -> float:
    """Layers until half of the last token's weight is on the first one, equal weights under a window mask.

    The drift of a random walk while the window is short against n; the paper's rate is far below.
    """
    return 2 * (n - 1) / (width - 1)


def sink_by_head(weights: Array, threshold: float = HEAD) -> Array:
    """Share of heads in which a token is a sink, [n], from causal weights [..., n, n] (Gu et al. 2024).

    A token is one if its mean weight over the queries that see it is above the threshold.
    """
    n = weights.shape[-1]
    importance = weights.sum(axis=-2) / np.arange(n, 0, -1)
    return (importance > threshold).reshape(-1, n).mean(0)


def sink_by_entry(weights: Array, mask: Mask, threshold: float = ENTRY) -> Array:
    """Share of queries that give a token more than the threshold, [n], mean over heads (Appendix K.4)."""
    n = len(mask)
    return ((weights > threshold) & mask).sum(axis=-2).reshape(-1, n).mean(
        0
    ) / mask.sum(0)
