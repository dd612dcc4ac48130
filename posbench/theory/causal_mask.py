"""How the causal mask alone encodes position (Behind RoPE): closed forms, exact limit, simulation.

The network has no parameters: f(X) = softmax(mask(Y Y')) Y + X with Y the rows of X at length 1. Inputs are
unit vectors with cosine ``alpha`` between any two. Maps are of Y Y' before the softmax, numbered by the layer
that reads them, from 1.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from posbench.late import F, inference_mode, torch

Array = NDArray[np.float64]
Norm = Literal["l2", "layernorm", "layernorm_sqrt"]
BATCH = 400  # draws at once


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
    own = 2 * e + (i - 1) * a
    rest = a * (i - 1)
    return np.sqrt(
        own**2 + 2 * own * rest * alpha + a * rest * (1 + (i - 2) * alpha)
    ) / (e + (i - 1) * a)


def h_prime(i: ArrayLike, alpha: float) -> Array:
    """As :func:`h` without the residual stream; see :func:`h_prime_step`."""
    i = np.asarray(i, dtype=np.float64)
    e = np.e
    a = float(np.exp(alpha))
    squared = (
        e**2 + 2 * e * a * alpha * (i - 1) + a**2 * (i - 1) * (1 + alpha * (i - 2))
    )
    return np.sqrt(squared) / (e + (i - 1) * a)


def h_prime_step(i: ArrayLike, alpha: float, *, printed: bool = False) -> Array:
    """h'(i + 1)^2 - h'(i)^2, never positive.

    Differs from source: Appendix A.2 has a wrong sign, kept with ``printed``.
    """
    i = np.asarray(i, dtype=np.float64)
    e = np.e
    a = float(np.exp(alpha))
    inside = (
        2 * e**3 + (-1 if printed else 1) * 2 * e**2 * a * (i - 1) + a**3 * i * (i - 1)
    )
    return (alpha - 1) * a * inside / ((e + i * a) ** 2 * (e + (i - 1) * a) ** 2)


def scores_2(n: int, alpha: float) -> Array:
    """Scores that layer 2 reads, [n, n]: g(i) / (h(i) h(j)), 1 on the diagonal, not a number above it."""
    i = np.arange(1, n + 1)
    found = np.outer(g(i, alpha) / h(i, alpha), 1 / h(i, alpha))
    found[np.diag_indices(n)] = 1
    return np.where(np.tri(n, dtype=bool), found, np.nan)


def rope_kernel(n: int, dim: int = 64, base: float = 10000.0) -> Array:
    """What RoPE multiplies scores with in the limit, [n, n]: mean of cos((i - j) theta) over frequencies."""
    distance = np.subtract.outer(np.arange(n), np.arange(n))
    theta = base ** (-2 * np.arange(dim // 2) / dim)
    return np.cos(distance[..., None] * theta).mean(-1)


def limit(
    n: int,
    layers: int,
    alpha: float,
    *,
    mask: bool = True,
    kernel: Array | None = None,
    stream: bool = True,
) -> list[Array]:
    """Scores in the limit of infinitely many dimensions, exactly: one [n, n] per layer, layer 1 first.

    Every hidden state is a combination of the inputs; with the inputs' Gram matrix G known, a layer maps its
    coefficients C to softmax(mask(Y G Y')) Y + C, Y being C with rows of length 1. ``alpha`` is the cosine of
    any two inputs, 0 <= alpha < 1; scores are multiplied with the ``kernel`` [n, n]; without the residual
    ``stream`` C is not added.
    """
    gram = (1 - alpha) * np.eye(n) + alpha
    seen = np.tri(n, dtype=bool) if mask else np.ones((n, n), dtype=bool)
    state = np.eye(n)
    found = []
    for _ in range(layers):
        unit = state / np.sqrt(np.einsum("ij,jk,ik->i", state, gram, state))[:, None]
        scores = unit @ gram @ unit.T * (1 if kernel is None else kernel)
        found.append(scores)
        weights = np.exp(np.where(seen, scores, -np.inf))
        state = weights / weights.sum(1, keepdims=True) @ unit + (
            state if stream else 0
        )
    return found


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
    """Mean scores over random inputs of ``dim`` dimensions, and their standard errors: both [layers, n, n].

    Args:
        alpha: Share of a direction that all tokens of a draw have in common, 0 <= alpha < 1.
        rope: Rotate queries and keys (not values) with RoPE, halves paired, base 10000.
        norm: ``l2`` (the paper's), or a LayerNorm without parameters, scores divided by d or by sqrt(d).
        input_norm: Length of the inputs. The paper's LayerNorm runs start from length 1, at which the update
            weighs sqrt(d) times the stream; with sqrt(d) and ``layernorm`` the limit is that of ``l2``.
    """
    generator = torch.Generator().manual_seed(seed)
    total, square = torch.zeros(2, layers, n, n, dtype=torch.float64)
    angles = torch.outer(
        torch.arange(n).float(), 10000.0 ** (-2 * torch.arange(dim // 2) / dim)
    ).repeat(1, 2)
    shut = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)
    factor = {"l2": 1.0, "layernorm": 1 / dim, "layernorm_sqrt": dim**-0.5}[norm]
    for done in range(0, draws, BATCH):
        size = min(BATCH, draws - done)
        own, shared = (
            torch.randn(size, count, dim, generator=generator) for count in (n, 1)
        )
        states = (
            F.normalize((1 - alpha) ** 0.5 * own + alpha**0.5 * shared, dim=-1)
            * input_norm
        )
        for layer in range(layers):
            unit = (
                F.layer_norm(states, (dim,), eps=1e-12)
                if norm != "l2"
                else F.normalize(states, dim=-1)
            )
            turned = unit
            if rope:
                halves = torch.cat(
                    [-unit[..., dim // 2 :], unit[..., : dim // 2]], dim=-1
                )
                turned = unit * angles.cos() + halves * angles.sin()
            scores = turned @ turned.transpose(1, 2) * factor
            total[layer] += scores.double().sum(0)
            square[layer] += scores.double().square().sum(0)
            weights = (
                scores.masked_fill(shut, float("-inf")) if mask else scores
            ).softmax(-1)
            states = weights @ unit + states
    mean = total / draws
    error = ((square / draws - mean**2).clamp(min=0) / max(draws - 1, 1)).sqrt()
    return mean.numpy(), error.numpy()


def diagonal_normalised(scores: Array) -> Array:
    """Each sub-diagonal minus its own mean, [..., n, n]; NaN above the diagonal."""
    n = scores.shape[-1]
    found = np.full(scores.shape, np.nan)
    for offset in range(n):
        rows = np.arange(offset, n)
        line = scores[..., rows, rows - offset]
        found[..., rows, rows - offset] = line - line.mean(axis=-1, keepdims=True)
    return found


def rising_rows(scores: Array) -> int:
    """Rows in which the score rises strictly with the key, up to the one before the query."""
    return sum(bool((np.diff(scores[i, :i]) > 0).all()) for i in range(2, len(scores)))


def beyond_distance(scores: Array) -> float:
    """Share of the variance below the diagonal left without each diagonal's mean; 0 where all are equal."""
    lower = np.tril_indices(len(scores), -1)
    whole = ((scores[lower] - scores[lower].mean()) ** 2).sum()
    return (
        float((diagonal_normalised(scores)[lower] ** 2).sum() / whole)
        if whole > 1e-20
        else 0.0
    )
