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

# Thresholds of the sink metrics.
MEAN_WEIGHT_THRESHOLD = 0.3  # of a token's mean weight in a head (Gu et al. 2024)
SINGLE_WEIGHT_THRESHOLD = 0.2  # of single weights (Wu et al. 2025)


def causal(n: int) -> Mask:
    """Causal mask, [n, n]: every token sees itself and all before it."""
    return np.tri(n, dtype=bool)


def window(n: int, width: int) -> Mask:
    """Sliding window, [n, n]: every token sees the newest ``width`` tokens, itself included."""
    return causal(n) & ~np.tri(n, k=-width, dtype=bool)


def prefix(n: int, length: int) -> Mask:
    """Prefix mask, [n, n]: causal, but every token sees all of the first ``length`` tokens."""
    mask = causal(n)
    mask[:, :length] = True
    return mask


def decay(n: int, m: float) -> Array:
    """Decay mask, added to scores, [n, n]: -(i - j) m where j <= i, minus infinity elsewhere."""
    distance = np.subtract.outer(np.arange(n), np.arange(n))
    return np.where(distance >= 0, -m * distance, -np.inf)


def attention(scores: Array, mask: Mask) -> Array:
    """Softmax of scores [..., n, n] over the tokens that a mask [n, n] allows, [..., n, n]."""
    masked = np.where(mask, scores, -np.inf)
    weights = np.exp(masked - masked.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def uniform(mask: Mask) -> Array:
    """Attention with equal weight on every token that a mask allows, [n, n]."""
    return attention(np.zeros(mask.shape), mask)


def rollout(layers: Sequence[Array]) -> list[Array]:
    """Cumulative context probability after 1, 2, ... layers.

    Source: Wu et al. 2025, Section 3; the rollout of Abnar and Zuidema 2020 without its residual.

    Args:
        layers: Attention weights of each layer, [..., n, n], first layer first.

    Returns:
        The product of the first 1, 2, ... layers, [..., n, n] each.
    """
    return list(accumulate(layers, lambda product, weights: weights @ product))


def causal_bound(n: int, layers: int, epsilon: float) -> Array:
    """Upper bound (1 - (j - 1) epsilon)^t of the weight of token j (from 1) after t layers, [n].

    Every allowed attention weight is at least epsilon. Theorem 4.1 with C = 1 (its 1 - epsilon counts one
    layer fewer).
    """
    return np.clip(1 - np.arange(n) * epsilon, 0, 1) ** layers


def decay_bounds(
    n: int, m: float, low: float, high: float, *, printed: bool = False
) -> tuple[Array, Array]:
    """Bound one layer's attention under a decay mask (Lemma 4.4).

    Differs from source: the printed C_max, e^(high - low) / (1 + e^-m), fails in the first row, whose only
    weight is 1; there the bound is e^(high - low).

    Args:
        n: Tokens.
        m: Decay per token of distance.
        low: Smallest score before the decay.
        high: Largest score before the decay.
        printed: Keep the printed C_max in the first row.

    Returns:
        Lower and upper bounds of the weights, both [n, n].
    """
    spread = np.exp(high - low)
    decayed = np.exp(decay(n, m))
    c_max = np.full((n, 1), spread / (1 + np.exp(-m)))
    if not printed:
        c_max[0] = spread
    c_min = (1 - np.exp(-m)) / spread
    return c_min * decayed, np.minimum(c_max * decayed, 1)


def decay_law(layers: int, m: float, distance: NDArray[np.int64]) -> Array:
    """Weight at each distance after t layers of equal scores under a decay mask, far from the first token.

    The Theta of Theorem 4.5, exactly: the law binom(t - 1 + x, x) e^(-x m) (1 - e^-m)^t.
    """
    return scipy.stats.nbinom.pmf(distance, layers, 1 - np.exp(-m))


def decay_peak(layers: int, m: float) -> float:
    """Distance of the largest weight after t layers: (t - 1) / (e^m - 1) (Theorem 4.5 counts t from 0)."""
    return (layers - 1) / np.expm1(m)


def window_half_time(n: int, width: int) -> float:
    """Layers until half of the last token's weight is on the first one, equal weights under a window mask.

    This is the drift of a random walk, for a window that is short against n; the paper's rate is far below.
    """
    return 2 * (n - 1) / (width - 1)


def sink_share_by_head(weights: Array) -> Array:
    """Share of heads in which each token is a sink (Gu et al. 2024).

    A token is one if its mean weight over the queries that see it is above :data:`MEAN_WEIGHT_THRESHOLD`.

    Args:
        weights: Causal attention weights, [..., n, n].

    Returns:
        Shares by token, [n].
    """
    n = weights.shape[-1]
    importance = weights.sum(axis=-2) / np.arange(n, 0, -1)
    return (importance > MEAN_WEIGHT_THRESHOLD).reshape(-1, n).mean(0)


def sink_share_by_entry(
    weights: Array, mask: Mask, threshold: float = SINGLE_WEIGHT_THRESHOLD
) -> Array:
    """Share of single weights on each token that mark it as a sink (Wu et al. 2025, Appendix K.4).

    Args:
        weights: Attention weights, [..., n, n].
        mask: Which keys each query sees, [n, n].
        threshold: A weight counts if it is above this.

    Returns:
        Share of the queries that see a token, mean over heads, by token, [n].
    """
    n = len(mask)
    counts = ((weights > threshold) & mask).sum(axis=-2)
    return counts.reshape(-1, n).mean(0) / mask.sum(0)
