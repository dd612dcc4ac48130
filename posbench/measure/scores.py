"""Attention scores before the softmax: read in a forward, and averaged over heads and samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from posbench.errors import UserError
from posbench.late import Tensor, inference_mode, sdpa, torch
from posbench.model import families
from posbench.model.guard import forward, guarded
from posbench.model.hooks import intercepting_attention
from posbench.model.lm import LM
from posbench.stats.bootstrap import Array, normal
from posbench.stats.findings import estimate_row


class MeanMap:
    """Inner products of queries and keys, averaged over heads and samples as these come, in linear memory.

    Attributes:
        each: ``near`` and ``shift`` of every sample; see :func:`contrast_weights`.
    """

    def __init__(self, tokens: int) -> None:
        # Sums over the samples of even and odd index.
        self._halves = torch.zeros(2, tokens, tokens, dtype=torch.float64)
        self.each: list[list[float]] = []

    def add(self, query: Tensor, key: Tensor, factor: float = 1.0) -> None:
        """Add B samples.

        Args:
            query: Queries [B, H, n, d].
            key: Keys [B, H, n, d].
            factor: Of their inner products.
        """
        query = query.float() * factor
        key = key.float()
        count, heads, tokens, _ = query.shape
        half_of_sample = (torch.arange(count) + len(self.each)) % 2
        for half in (0, 1):
            # Summed over samples and heads at once: one product of [n, B H d] matrices.
            members = (half_of_sample == half).to(query.device)
            queries = query[members].permute(2, 0, 1, 3).reshape(tokens, -1)
            keys = key[members].permute(2, 0, 1, 3).reshape(tokens, -1)
            self._halves[half] += (queries @ keys.T).double().cpu() / heads
        sample_contrasts = [
            (query * (weights @ key)).sum((2, 3)).mean(1)
            for weights in contrast_weights(tokens, query.device)
        ]
        self.each += torch.stack(sample_contrasts, dim=1).tolist()

    @property
    def mean(self) -> Array:
        """The mean map [n, n], NaN above the diagonal."""
        return _lower_mean(self._halves.sum(0), len(self.each))

    @property
    def halves(self) -> tuple[Array, Array]:
        """The mean maps [n, n] of the samples of even and odd index."""
        count = len(self.each)
        even = _lower_mean(self._halves[0], (count + 1) // 2)
        odd = _lower_mean(self._halves[1], count // 2)
        return even, odd

    def facts(self) -> dict[str, Any]:
        """Summarise the map in numbers, token 1 left out throughout.

        Returns:
            near and shift (:func:`contrast_weights`, means over samples) with normal 95 % intervals; score_low,
            score_high (1 % and 99 % quantile below the diagonal); repeat (correlation of the scores of two
            halves of the samples) and beyond (share of the variance that both halves have in common which is
            left without each diagonal's mean; NaN where they have none); n samples.
        """
        facts: dict[str, Any] = {}
        near, shift = np.array(self.each).T
        facts |= estimate_row(normal(near), "near")
        facts |= estimate_row(normal(shift), "shift")
        lower = np.tril_indices(len(self.mean) - 1, -1)
        even, odd = (half[1:, 1:] for half in self.halves)
        covariance = np.cov(even[lower], odd[lower])
        residual_covariance = np.cov(
            diagonal_normalised(even)[lower], diagonal_normalised(odd)[lower]
        )
        scores = self.mean[1:, 1:][lower]
        facts["score_low"], facts["score_high"] = np.quantile(scores, [0.01, 0.99])
        common = covariance[0, 1]
        facts["repeat"] = common / np.sqrt(covariance[0, 0] * covariance[1, 1])
        facts["beyond"] = np.nan
        if common > 0:
            facts["beyond"] = max(residual_covariance[0, 1], 0) / common
        facts["n"] = len(self.each)
        return facts


def _lower_mean(total: Tensor, count: int) -> Array:
    """A mean map from its sum, NaN above the diagonal."""
    return np.where(np.tri(len(total), dtype=bool), (total / count).numpy(), np.nan)


@functools.lru_cache(maxsize=2)
def contrast_weights(tokens: int, device: torch.device) -> Tensor:
    """Make the weights of the scores for two contrasts, token 1 left out (it is an attention sink).

    ``near``: for each query the nearest quarter of its keys minus the farthest, mean over queries with four
    keys or more. ``shift``: for each distance the earlier half of its pairs minus the later half, mean over
    distances; scores that depend on i - j alone give 0.

    Returns:
        Weights of ``near`` and ``shift``, [2, n, n], 0 above the diagonal.
    """
    near = torch.zeros(tokens, tokens)
    shift = torch.zeros(tokens, tokens)
    for query in range(5, tokens):
        width = (query - 1) // 4
        near[query, query - width : query] = 1 / width
        near[query, 1 : 1 + width] = -1 / width
    for distance in range(1, tokens - 2):
        keys = torch.arange(1, tokens - distance)
        width = len(keys) // 2
        earlier = keys[:width]
        later = keys[-width:]
        shift[earlier + distance, earlier] = 1 / width
        shift[later + distance, later] = -1 / width
    return torch.stack([near / (tokens - 5), shift / (tokens - 3)]).to(device)


@guarded
@inference_mode
def score_maps(
    lm: LM,
    batches: Sequence[Sequence[Sequence[int]]],
    advance: Callable[[int], None] = lambda n: None,
) -> list[MeanMap]:
    """Compute the mean score of every pair of tokens in each layer; see :func:`read_scores`.

    Args:
        lm: The model.
        batches: Batches of prompts as token ids, all of one length.
        advance: Called with the size of each batch when it is done.

    Returns:
        A map for each layer.
    """
    maps = [MeanMap(len(batches[0][0])) for _ in range(lm.layers)]
    for batch in batches:
        read_scores(lm, batch, lambda layer, *scores: maps[layer].add(*scores))
        advance(len(batch))
    return maps


@guarded
def read_scores(
    lm: LM,
    batch: Sequence[Sequence[int]],
    add: Callable[[int, Tensor, Tensor, float], None],
) -> None:
    """Run prompts of one length and pass on the queries and keys of each layer.

    Queries and keys are rotated; soft-caps are left out. Where a method runs several rows for a sample
    (attention_buckets), these count as heads; where it attends several times in a layer (moice), the last
    time counts. The family must pass :func:`need_attention_interface`.

    Args:
        lm: The model.
        batch: Token ids of B prompts, all of one length n.
        add: Called with each layer, its queries and keys [B, H, n, d], and the factor of their products.

    Raises:
        UserError: A method rotates queries and keys in several ways, so that no single product is the score.
    """
    # Queries, keys and factor of the layer that ran last, until the next layer runs.
    pending: dict[int, tuple[Tensor, Tensor, float]] = {}

    def add_pending() -> None:
        for layer, (query, key, factor) in pending.items():
            add(layer, query, key, factor)
        pending.clear()

    def read(
        module: Any,
        query: Tensor,
        key: Tensor,
        *args: Any,
        following: Any,
        **settings: Any,
    ) -> Any:
        if "rotations" in settings:
            allowed = "a method under which all pairs of tokens have the same rotated queries and keys"
            hint = "leave self_extend, rerope, dca or string_shift out"
            raise UserError("method", "other relative positions", allowed, hint)
        # A method may attend several times in a layer: the last one replaces those before it.
        if module.layer_idx not in pending:
            add_pending()
        keys = sdpa.repeat_kv(key, query.shape[1] // key.shape[1])
        pending[module.layer_idx] = (
            rows_to_heads(query, len(batch)),
            rows_to_heads(keys, len(batch)),
            settings.get("scaling") or query.shape[-1] ** -0.5,
        )
        return following(module, query, key, *args, **settings)

    with intercepting_attention(lm.model, read):
        forward(lm, **lm.pad(batch))
    add_pending()


def diagonal_normalised(scores: Array) -> Array:
    """Each sub-diagonal of maps [..., n, n] minus its own mean; NaN above the diagonal."""
    n = scores.shape[-1]
    normalised = np.full(scores.shape, np.nan)
    for distance in range(n):
        query = np.arange(distance, n)
        key = query - distance
        diagonal = scores[..., query, key]
        mean = diagonal.mean(axis=-1, keepdims=True)
        normalised[..., query, key] = diagonal - mean
    return normalised


def rows_to_heads(states: Tensor, count: int) -> Tensor:
    """[rows, H, n, d] as [count, rows / count * H, n, d]: several rows of a sample count as further heads."""
    return states.reshape(count, -1, *states.shape[2:])


def need_attention_interface(lm: LM) -> None:
    """Raise UserError unless a model's attention runs through the library's functions."""
    family = families.family_of(lm.model)
    if not family.interface:
        allowed = f"a family that uses the attention functions of transformers; {family.name} does not"
        raise UserError(
            "model",
            lm.name,
            allowed,
            "choose a model of another family: docs/families.md",
        )
