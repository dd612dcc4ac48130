"""Which tokens reach the last one when layers keep a share of their own input: what structure alone predicts.

A layer with attention A maps hidden states X to (1 - s) X + s A X, where s, the share of attention, is the lambda of
Herasimchyk et al. 2026 (arXiv 2602.16837). The influence of token j is the weight of the last token on it after all
layers. Its closed forms are for attention that is equal on all tokens of a causal mask, where layers commute: any
order of the shares gives the same. The limit at constant shares is that of arXiv 2603.10123.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import comb, prod

import numpy as np
import scipy

from posbench.theory import masks
from posbench.theory.masks import Array, Mask


def alibi_slopes(heads: int) -> Array:
    """ALiBi slopes 2^(-8 h / heads) of heads h = 1 ... heads, [heads], for a power of two of heads."""
    return 2.0 ** (-8 * np.arange(1, heads + 1) / heads)


def structural_attention(
    mask: Mask, slopes: Sequence[float] | Array = (0.0,), diagonal: Array | None = None
) -> Array:
    """Compute the attention of a layer that sees no content: mask and ALiBi alone, mean over heads.

    Args:
        mask: Which tokens each query sees, [n, n]; no later ones.
        slopes: ALiBi slope of each head, [H]; (0,) is a layer without ALiBi.
        diagonal: Added to the score of a token on itself, by head, [H]; None: nothing.

    Returns:
        [n, n].
    """
    n = len(mask)
    added = np.zeros(len(slopes)) if diagonal is None else diagonal
    heads = [
        masks.attention(masks.decay(n, slope) + own * np.eye(n), mask)
        for slope, own in zip(slopes, added, strict=True)
    ]
    return np.mean(heads, axis=0)


def rollout(layers: Sequence[Array], shares: Sequence[float] | Array) -> list[Array]:
    """Compute the rollout with residual stream after 1, 2, ... layers.

    With shares of 1 it is :func:`posbench.theory.masks.rollout`.

    Args:
        layers: Attention of each layer, [..., n, n], first layer first.
        shares: Share of attention of each layer, 0 to 1.

    Returns:
        [..., n, n] each; row: query, column: source token.
    """
    mixed = [
        (1 - share) * np.eye(weights.shape[-1]) + share * weights
        for weights, share in zip(layers, shares, strict=True)
    ]
    return masks.rollout(mixed)


def is_u_shaped(influence: Sequence[float] | Array) -> bool:
    """Whether the smallest influence is neither at the first token nor at the last but one.

    The last token is left out: its influence is what the residual stream keeps of itself, which makes a U of any curve
    that falls.

    Args:
        influence: Influence of each token, [n].
    """
    smallest = int(np.argmin(influence[:-1]))
    return 0 < smallest < len(influence) - 2


# Equal attention on all tokens of a causal mask


def attending_layers(shares: Sequence[float] | Array) -> Array:
    """Probability that exactly k = 0 ... L layers attend rather than keep their input (Poisson binomial), [L + 1]."""
    return _expand([(1 - share, share) for share in shares])


def _expand(factors: Sequence[tuple[float, float]]) -> Array:
    """Coefficients of the product of polynomials a + b z, constant first."""
    return np.array(list(accumulate(factors, np.convolve, initial=np.ones(1)))[-1])


def last_token_influence(n: int, shares: Sequence[float] | Array) -> float:
    """Influence of the last of n tokens on itself under equal causal attention, exactly."""
    return float(prod(1 - share + share / n for share in shares))


def equal_influence(n: int, shares: Sequence[Fraction]) -> list[Fraction]:
    """Compute the influence of each token under equal causal attention, exactly.

    Cost grows with n^2 large fractions; the alternating sum would cancel all digits of floats.

    Args:
        n: Tokens.
        shares: Share of attention of each layer.

    Returns:
        n fractions, whose sum is 1.
    """
    # Of a prompt of m tokens, the influence of the last one.
    kept = [
        prod((1 - share + share / m for share in shares), start=Fraction(1))
        for m in range(1, n + 1)
    ]
    return [
        comb(n - 1, j)
        * sum(
            ((-1) ** m * comb(n - 1 - j, m) * kept[j + m] for m in range(n - j)),
            start=Fraction(0),
        )
        for j in range(n)
    ]


def equal_influence_limit(n: int, shares: Sequence[float] | Array) -> Array:
    """Approximate the influence of each token under equal causal attention, for ln n far above the sum of the shares.

    In the limit of many tokens the influence has the density sum_k w_k ln(1/x)^(k-1) / (k-1)! at depth x in (0, 1), w_k
    being the probability that k layers attend, and the weight w_0 at x = 1.

    Args:
        n: Tokens.
        shares: Share of attention of each layer.

    Returns:
        The limit's weight on each n-th of the prompt, [n].
    """
    probabilities = attending_layers(shares)
    edges = np.arange(1, n + 1) / n
    cumulative = np.zeros(n)
    for k, probability in enumerate(probabilities[1:], start=1):
        cumulative += probability * scipy.special.gammaincc(k, -np.log(edges))
    weights = np.diff(cumulative, prepend=0.0)
    weights[-1] += probabilities[0]
    return np.asarray(weights)


def random_value_influence(n: int, shares: Sequence[float] | Array) -> Array:
    """Influence of each token, [n], where value maps are random and independent, so that paths add as squares.

    In a deep model with random weights the norm of the Jacobian follows this rather than the rollout, which adds paths
    as if all values pointed one way. With C equal causal attention and e_k the coefficients of
    prod(1 + (s / (1 - s))^2 z) over the shares s, it is sqrt(sum_k e_k (C^k)[n - 1, j]^2), with sum 1.

    Args:
        n: Tokens.
        shares: Share of attention of each layer, below 1.
    """
    coefficients = _expand([(1.0, (share / (1 - share)) ** 2) for share in shares])
    attention = masks.uniform(masks.causal(n))
    row = np.eye(n)[-1]
    squares = np.zeros(n)
    for coefficient in coefficients:
        squares += coefficient * row**2
        row = row @ attention
    influence = np.sqrt(squares)
    return np.asarray(influence / influence.sum())
