"""How the causal mask alone encodes position (Behind RoPE): closed forms, exact limit, simulation.

The network has no parameters: f(X) = softmax(mask(Y Y')) Y + X, where Y has the rows of X at length 1. Inputs
are unit vectors with cosine ``alpha`` between any two. A score map is Y Y' before the softmax; maps are
numbered by the layer that computes them, from 1.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from posbench.late import F, Tensor, inference_mode, torch
from posbench.measure.scores import diagonal_normalised

Array = NDArray[np.float64]
Norm = Literal["l2", "layernorm", "layernorm_sqrt"]
DRAWS_PER_BATCH = 400
MIN_VARIANCE_SUM = 1e-20  # sum of squared deviations below which scores are constant


def g(i: ArrayLike, alpha: float) -> Array:
    """Unnormalised score of token i (from 1, i >= 2) with any earlier token at layer 2 (Section 3)."""
    i = np.asarray(i, dtype=np.float64)
    e = np.e
    a = float(np.exp(alpha))
    return 2 * (2 * alpha * e + a * (1 + alpha * (2 * i - 3))) / (e + (i - 1) * a)


def h(i: ArrayLike, alpha: float) -> Array:
    """Length of token i (from 1) after layer 1."""
    i = np.asarray(i, dtype=np.float64)
    e = np.e
    a = float(np.exp(alpha))
    # Coefficient of the token's own input, and sum of those of the earlier inputs.
    self_weight = 2 * e + (i - 1) * a
    past_weight = a * (i - 1)
    squared = (
        self_weight**2
        + 2 * self_weight * past_weight * alpha
        + a * past_weight * (1 + (i - 2) * alpha)
    )
    return np.sqrt(squared) / (e + (i - 1) * a)


def h_prime(i: ArrayLike, alpha: float) -> Array:
    """Length of token i (from 1) after layer 1 without the residual stream."""
    i = np.asarray(i, dtype=np.float64)
    e = np.e
    a = float(np.exp(alpha))
    squared = (
        e**2 + 2 * e * a * alpha * (i - 1) + a**2 * (i - 1) * (1 + alpha * (i - 2))
    )
    return np.sqrt(squared) / (e + (i - 1) * a)


def h_prime_step(i: ArrayLike, alpha: float, *, printed: bool = False) -> Array:
    """The difference h'(i + 1)^2 - h'(i)^2 in closed form, never positive.

    Differs from source: Appendix A.2 has a wrong sign, which ``printed`` keeps.
    """
    i = np.asarray(i, dtype=np.float64)
    e = np.e
    a = float(np.exp(alpha))
    sign = -1 if printed else 1
    numerator = 2 * e**3 + sign * 2 * e**2 * a * (i - 1) + a**3 * i * (i - 1)
    return (alpha - 1) * a * numerator / ((e + i * a) ** 2 * (e + (i - 1) * a) ** 2)


def second_layer_scores(n: int, alpha: float) -> Array:
    """Score map of layer 2 in closed form, [n, n]: g(i) / (h(i) h(j)) (Equation 4), NaN above the diagonal."""
    i = np.arange(1, n + 1)
    scores = np.outer(g(i, alpha) / h(i, alpha), 1 / h(i, alpha))
    scores[np.diag_indices(n)] = 1
    return np.where(np.tri(n, dtype=bool), scores, np.nan)


def rope_kernel(n: int, dim: int = 64) -> Array:
    """Factor of RoPE on the scores in the limit, [n, n]: cos((i - j) theta), mean over its frequencies."""
    distance = np.subtract.outer(np.arange(n), np.arange(n))
    theta = 10000.0 ** (-2 * np.arange(dim // 2) / dim)
    return np.cos(distance[..., None] * theta).mean(-1)


def limit_scores(
    n: int,
    layers: int,
    alpha: float,
    *,
    mask: bool = True,
    kernel: Array | None = None,
    residual: bool = True,
) -> list[Array]:
    """Compute the score maps in the limit of infinitely many dimensions, exactly.

    Every hidden state is a combination of the inputs. With the Gram matrix G of the inputs known, a layer maps
    the coefficients C to softmax(mask(Y G Y')) Y + C, where Y is C with rows of length 1.

    Args:
        n: Tokens.
        layers: Layers.
        alpha: Cosine of any two inputs, 0 <= alpha < 1.
        mask: Whether attention is causal.
        kernel: Factors on the scores, [n, n], such as :func:`rope_kernel`.
        residual: Whether the residual stream C is added.

    Returns:
        Scores before the softmax, [n, n] for each layer, layer 1 first.
    """
    gram = (1 - alpha) * np.eye(n) + alpha
    visible = np.tri(n, dtype=bool) if mask else np.ones((n, n), dtype=bool)
    state = np.eye(n)
    maps = []
    for _ in range(layers):
        unit = state / np.sqrt(np.einsum("ij,jk,ik->i", state, gram, state))[:, None]
        scores = unit @ gram @ unit.T
        if kernel is not None:
            scores = scores * kernel
        maps.append(scores)
        weights = np.exp(np.where(visible, scores, -np.inf))
        update = weights / weights.sum(1, keepdims=True) @ unit
        state = update + state if residual else update
    return maps


@inference_mode
def simulate(
    n: int,
    layers: int,
    alpha: float,
    *,
    dim: int = 64,
    draws: int,
    mask: bool = True,
    rope: bool = False,
    norm: Norm = "l2",
    input_norm: float = 1.0,
    seed: int = 0,
) -> tuple[Array, Array]:
    """Simulate the network on random inputs.

    Args:
        n: Tokens.
        layers: Layers.
        alpha: Share of a direction that all tokens of a draw have in common, 0 <= alpha < 1.
        dim: Dimensions of an input.
        draws: Random inputs of n tokens to average over.
        mask: Whether attention is causal.
        rope: Rotate queries and keys (not values) with RoPE, halves paired, base 10000.
        norm: ``l2`` (the paper's), or a LayerNorm without parameters, scores divided by d or by sqrt(d).
        input_norm: Length of the inputs, which the paper does not give for its LayerNorm runs. With 1, as
            elsewhere there, the update weighs sqrt(d) times the stream; with sqrt(d) and ``layernorm`` the
            limit is that of ``l2``.
        seed: Seed of the draws.

    Returns:
        Mean scores before the softmax and their standard errors, both [layers, n, n].
    """
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(layers, n, n, dtype=torch.float64)
    total_square = torch.zeros(layers, n, n, dtype=torch.float64)
    theta = 10000.0 ** (-2 * torch.arange(dim // 2) / dim)
    angles = torch.outer(torch.arange(n).float(), theta).repeat(1, 2)
    future = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)
    factor = {"l2": 1.0, "layernorm": 1 / dim, "layernorm_sqrt": dim**-0.5}[norm]
    for start in range(0, draws, DRAWS_PER_BATCH):
        batch = min(DRAWS_PER_BATCH, draws - start)
        private = torch.randn(batch, n, dim, generator=generator)
        shared = torch.randn(batch, 1, dim, generator=generator)
        inputs = (1 - alpha) ** 0.5 * private + alpha**0.5 * shared
        states = F.normalize(inputs, dim=-1) * input_norm
        for layer in range(layers):
            unit = _normalise(states, norm)
            rotated = _rotate(unit, angles) if rope else unit
            scores = rotated @ rotated.transpose(1, 2) * factor
            total[layer] += scores.double().sum(0)
            total_square[layer] += scores.double().square().sum(0)
            if mask:
                scores = scores.masked_fill(future, float("-inf"))
            states = scores.softmax(-1) @ unit + states
    mean = total / draws
    variance = (total_square / draws - mean**2).clamp(min=0)
    error = (variance / max(draws - 1, 1)).sqrt()
    return mean.numpy(), error.numpy()


def _normalise(states: Tensor, norm: Norm) -> Tensor:
    """Tokens at length 1, or after a LayerNorm without parameters, [..., d]."""
    if norm == "l2":
        return F.normalize(states, dim=-1)
    return F.layer_norm(states, (states.shape[-1],), eps=1e-12)


def _rotate(unit: Tensor, angles: Tensor) -> Tensor:
    """Tokens [..., n, d] rotated by RoPE, halves paired, from angles [n, d] in radians."""
    first, second = unit.chunk(2, dim=-1)
    halves = torch.cat([-second, first], dim=-1)
    return unit * angles.cos() + halves * angles.sin()


def rising_rows(scores: Array) -> int:
    """Number of queries whose score rises strictly with the key, up to the key before the query."""
    rows = (scores[query, :query] for query in range(2, len(scores)))
    return sum(bool((np.diff(row) > 0).all()) for row in rows)


def beyond_distance(scores: Array) -> float:
    """Share of the variance of scores below the diagonal that i - j does not explain; 0 for constant scores."""
    lower = np.tril_indices(len(scores), -1)
    total = ((scores[lower] - scores[lower].mean()) ** 2).sum()
    if total <= MIN_VARIANCE_SUM:
        return 0.0
    return float((diagonal_normalised(scores)[lower] ** 2).sum() / total)
