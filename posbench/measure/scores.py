"""Attention scores before the softmax: read in a forward, and averaged over heads and samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from posbench.errors import UserError
from posbench.late import Tensor, inference_mode, sdpa, torch
from posbench.model import families
from posbench.model.guard import finite, guarded
from posbench.model.hooks import attending
from posbench.model.lm import LM
from posbench.stats.bootstrap import Array, normal
from posbench.stats.findings import ends
from posbench.theory.causal_mask import diagonal_normalised


class MeanMap:
    """Inner products of queries and keys, averaged over heads and samples as these come, in linear memory.

    ``each`` has ``near`` and ``shift`` of every sample; see :func:`contrasts`.
    """

    def __init__(self, tokens: int) -> None:
        self._halves = torch.zeros(2, tokens, tokens, dtype=torch.float64)
        self.each: list[list[float]] = []

    def add(self, query: Tensor, key: Tensor, factor: float = 1.0) -> None:
        """Add samples: queries and keys [B, H, n, d], and the factor of their products."""
        query = query.float() * factor
        key = key.float()
        count, heads, tokens, _ = query.shape
        half = (torch.arange(count) + len(self.each)) % 2
        for number in (0, 1):
            # Summed over samples and heads at once: one product of [n, B H d] matrices.
            rows = (half == number).to(query.device)
            left, right = (
                x[rows].permute(2, 0, 1, 3).reshape(tokens, -1) for x in (query, key)
            )
            self._halves[number] += (left @ right.T).double().cpu() / heads
        told = [
            (query * (weights @ key)).sum((2, 3)).mean(1)
            for weights in contrasts(tokens, query.device)
        ]
        self.each += torch.stack(told, dim=1).tolist()

    @property
    def mean(self) -> Array:
        """The mean map [n, n], not a number above the diagonal."""
        return _lower(self._halves.sum(0), len(self.each))

    @property
    def halves(self) -> tuple[Array, Array]:
        """The means over every other sample."""
        count = len(self.each)
        return _lower(self._halves[0], (count + 1) // 2), _lower(
            self._halves[1], count // 2
        )

    def facts(self) -> dict[str, Any]:
        """What the map says in numbers, token 1 left out throughout.

        near and shift (:func:`contrasts`, means over samples) with normal 95 % intervals; score_low,
        score_high (1 % and 99 % quantile below the diagonal); repeat (correlation of the scores of two halves
        of the samples) and beyond (share of the variance that both halves have in common which is left
        without each diagonal's mean; not a number where they have none); n samples.
        """
        row: dict[str, Any] = {}
        for name, values in zip(("near", "shift"), np.array(self.each).T, strict=True):
            row |= ends(normal(values), name)
        lower = np.tril_indices(len(self.mean) - 1, -1)
        one, other = (each[1:, 1:] for each in self.halves)
        raw = np.cov(one[lower], other[lower])
        left = np.cov(
            diagonal_normalised(one)[lower], diagonal_normalised(other)[lower]
        )
        row["score_low"], row["score_high"] = np.quantile(
            self.mean[1:, 1:][lower], [0.01, 0.99]
        )
        row["repeat"] = raw[0, 1] / np.sqrt(raw[0, 0] * raw[1, 1])
        row["beyond"] = max(left[0, 1], 0) / raw[0, 1] if raw[0, 1] > 0 else np.nan
        return {**row, "n": len(self.each)}


def _lower(total: Tensor, count: int) -> Array:
    """A mean from its sum, not a number above the diagonal."""
    return np.where(np.tri(len(total), dtype=bool), (total / count).numpy(), np.nan)


@functools.lru_cache(maxsize=2)
def contrasts(tokens: int, device: torch.device) -> Tensor:
    """Weights [2, n, n] of the scores below the diagonal, token 1 left out (it is an attention sink).

    ``near``: for each query the nearest quarter of its keys minus the farthest, mean over queries with four
    keys or more. ``shift``: for each distance the earlier half of its pairs minus the later half, mean over
    distances; scores that depend on i - j alone give 0.
    """
    near = torch.zeros(tokens, tokens)
    shift = torch.zeros(tokens, tokens)
    for i in range(5, tokens):
        width = (i - 1) // 4
        near[i, i - width : i], near[i, 1 : 1 + width] = 1 / width, -1 / width
    for distance in range(1, tokens - 2):
        keys = torch.arange(1, tokens - distance)
        width = len(keys) // 2
        shift[keys[:width] + distance, keys[:width]] = 1 / width
        shift[keys[-width:] + distance, keys[-width:]] = -1 / width
    return torch.stack([near / (tokens - 5), shift / (tokens - 3)]).to(device)


@guarded
@inference_mode
def score_maps(
    lm: LM,
    plan: Sequence[Sequence[Sequence[int]]],
    advance: Callable[[int], None] = lambda n: None,
) -> list[MeanMap]:
    """Mean score of every pair of tokens, a map for each layer; see :func:`read_scores`.

    ``plan`` has batches of token rows, all of one length, and ``advance`` is told the size of each one done.
    """
    found = [MeanMap(len(plan[0][0])) for _ in range(lm.layers)]
    for batch in plan:
        read_scores(lm, batch, lambda layer, *scored: found[layer].add(*scored))
        advance(len(batch))
    return found


@guarded
def read_scores(
    lm: LM,
    batch: Sequence[Sequence[int]],
    add: Callable[[int, Tensor, Tensor, float], None],
) -> None:
    """Run token rows of one length; add each layer, its queries and keys [B, H, n, d] and the scores' factor.

    Queries and keys are rotated; soft-caps are left out. Where a method runs several rows for a sample
    (attention_buckets), these count as heads; where it attends several times in a layer (moice), the last
    time counts. The family must pass :func:`check_interface`.
    """
    pending: dict[int, tuple[Tensor, Tensor, float]] = {}

    def give() -> None:
        for layer, found in pending.items():
            add(layer, *found)
        pending.clear()

    def read(
        module: Any, query: Tensor, key: Tensor, *args: Any, following: Any, **rest: Any
    ) -> Any:
        # A method may attend several times in a layer: the last one replaces those before it.
        if module.layer_idx not in pending:
            give()
        factor = rest.get("scaling") or query.shape[-1] ** -0.5
        keys = sdpa.repeat_kv(key, query.shape[1] // key.shape[1])
        pending[module.layer_idx] = (
            by_sample(query, len(batch)),
            by_sample(keys, len(batch)),
            factor,
        )
        return following(module, query, key, *args, **rest)

    with attending(lm.model, read):
        finite(lm.model(**lm.pad(batch), use_cache=False, logits_to_keep=1).logits)
    give()


def by_sample(states: Tensor, count: int) -> Tensor:
    """[rows, H, n, d] as [count, rows / count * H, n, d]: several rows of a sample count as further heads."""
    return states.reshape(count, -1, *states.shape[2:])


def check_interface(lm: LM) -> None:
    """Raise UserError unless a model's attention runs through the library's functions."""
    family = families.family_of(lm.model)
    if not family.interface:
        allowed = (
            f"a family whose attention runs through the library; {family.name} does not"
        )
        raise UserError("model", lm.name, allowed, "take another model")
