"""Attention masks as graphs, and where attention goes after many layers (Wu et al. 2025, Section 4).

Tokens are numbered from 0 here and from 1 in the paper. The rollout of t layers is A^(t) ... A^(1): no
residual, no averaging.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import nbinom

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


def causal(n: int) -> Mask:
    """Every token sees itself and all before it, [n, n]."""
    return np.tril(np.ones((n, n), dtype=bool))


def window(n: int, width: int) -> Mask:
    """Every token sees the newest ``width`` tokens up to itself, [n, n]."""
    return causal(n) & ~np.tril(np.ones((n, n), dtype=bool), -width)


def prefix(n: int, length: int) -> Mask:
    """The first ``length`` tokens are seen by all, each other too; the rest is causal, [n, n]."""
    mask = causal(n)
    mask[:, :length] = True
    return mask


def decay(n: int, m: float) -> Array:
    """Decay added to scores: -(i - j) m where j <= i, minus infinity elsewhere, [n, n]."""
    distance = np.subtract.outer(np.arange(n), np.arange(n))
    return np.where(distance >= 0, -m * distance, -np.inf)


def centre_nodes(mask: Mask) -> list[int]:
    """Tokens whose content can reach every token through enough layers (Definition of a centre node).

    An edge runs from j to i where i sees j; the answer is computed from the graph, not from the kind of mask.
    """
    n = len(mask)
    reach = mask | np.eye(n, dtype=bool)
    for _ in range(max(n - 1, 1).bit_length()):
        reach = (reach.astype(np.int64) @ reach.astype(np.int64)) > 0
    return [int(j) for j in np.flatnonzero(reach.all(axis=0))]


def path_counts(mask: Mask, layers: int) -> NDArray[np.int64]:
    """Number of ways from token j to token i through that many layers, [n, n]; binom(layers - 1 + i - j, i -
    j) if causal."""
    counts = np.eye(len(mask), dtype=np.int64)
    for _ in range(layers):
        counts = mask.astype(np.int64) @ counts
    return counts


def attention(scores: Array, mask: Mask) -> Array:
    """Softmax of the scores over what a token sees, [..., n, n]."""
    shut = np.where(mask, scores, -np.inf)
    weights = np.exp(shut - shut.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def uniform(mask: Mask) -> Array:
    """Equal weight on everything a token sees, [n, n]."""
    return attention(np.zeros(mask.shape), mask)


def rollout(layers: Sequence[Array]) -> list[Array]:
    """Cumulative context probability after 1, 2, ... layers, each [..., n, n]: A^(t) ... A^(1), first layer
    first in ``layers``.

    Source: Wu et al. 2025, Section 3; attention rollout (Abnar and Zuidema 2020) without its residual
        averaging.
    """
    found: list[Array] = []
    for weights in layers:
        found.append(weights if not found else weights @ found[-1])
    return found


def causal_bound(n: int, layers: int, epsilon: float) -> Array:
    """Upper bound (1 - (j - 1) epsilon)^t of the weight of token j (from 1) after t layers, [n]; 1 for the
    first token.

    Args:
        n: Tokens.
        layers: t.
        epsilon: A lower bound of every allowed attention weight.

    Source: Wu et al. 2025, Theorem 4.1, with C = 1, which holds for any t (the paper's C = 1 - epsilon counts
        one layer less).
    """
    return np.clip(1 - np.arange(n) * epsilon, 0, 1) ** layers


def prefix_bound(n: int, length: int, layers: int, epsilon: float) -> Array:
    """The same for a prefix mask: (1 - (j - K) epsilon)^t behind the prefix of K tokens, [n] (Theorem
    4.3)."""
    return np.clip(1 - np.maximum(np.arange(1, n + 1) - length, 0) * epsilon, 0, 1) ** layers


def decay_bounds(n: int, m: float, low: float, high: float, *, printed: bool = False) -> tuple[Array, Array]:
    """Lower and upper bound of one layer's attention under a decay mask with scores in [low, high], both [n,
    n] (Lemma 4.4).

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
    """Weight at a distance after t layers of equal scores under a decay mask, far from the first token,
    [len(distance)].

    The negative binomial law binom(t - 1 + x, x) e^(-x m) (1 - e^-m)^t, which the Theta of Theorem 4.5 is
    exactly.
    """
    return nbinom.pmf(distance, layers, 1 - np.exp(-m))


def decay_peak(layers: int, m: float) -> float:
    """Distance x* of the largest weight after t layers: (t - 1) / (e^m - 1) (Theorem 4.5, whose t counts from
    0)."""
    return (layers - 1) / np.expm1(m)


def window_half_time(n: int, width: int) -> float:
    """Layers until about half of the last token's weight is on the first one under a window mask of equal
    weights.

    The drift of a random walk, 2 (n - 1) / (width - 1), while the window is short against n; the paper's rate
    is far below.
    """
    return 2 * (n - 1) / (width - 1)


HEAD, ENTRY = 0.3, 0.2
"""Thresholds of both sink metrics: of a mean weight (Gu et al. 2024), and of single weights (Wu et al.
2025)."""


def sink_by_head(weights: Array, threshold: float = HEAD) -> Array:
    """Share of heads in which a token is a sink, [n], from attention weights [..., n, n] (layers, heads,
    samples in front).

    A token is a sink of a head if its mean weight over the queries that see it is above the threshold.

    Source: Gu et al. 2024, attention sink metric (threshold 0.3, 64 tokens, 100 sequences); causal attention.
    """
    n = weights.shape[-1]
    importance = weights.sum(axis=-2) / np.arange(n, 0, -1)
    return (importance > threshold).reshape(-1, n).mean(0)


def sink_by_entry(weights: Array, mask: Mask, threshold: float = ENTRY) -> Array:
    """Share of queries that give a token more than the threshold, averaged over whatever stands in front,
    [n].

    Source: Wu et al. 2025, Appendix K.4. Not the metric of Gu et al.: it counts single entries.
    """
    n = len(mask)
    return ((weights > threshold) & mask).sum(axis=-2).reshape(-1, n).mean(0) / mask.sum(0)
