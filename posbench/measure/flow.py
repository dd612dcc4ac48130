"""Where the content of the last token comes from, layer by layer, and which tokens are sinks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from posbench.late import Tensor, inference_mode, sdpa, torch
from posbench.model.attention import attention_weights
from posbench.model.guard import forward, guarded
from posbench.model.lm import LM
from posbench.stats.bootstrap import Array
from posbench.theory import masks

RESIDUAL_SHARES = {"attention alone": 0.0, "with the residual stream": 0.5}
"""Shares of a layer's own input: Wu et al. 2025, and the rollout of Abnar and Zuidema 2020."""
MAX_BLOCK_WEIGHTS = 1 << 24  # attention weights in memory at once


@guarded
@inference_mode
def flow(lm: LM, ids: Sequence[int], parts: int, sink_tokens: int) -> dict[str, Array]:
    """Compute rollout and sinks of one prompt, from one forward.

    The rollout after t layers is A(t) ... A(1), A being the attention averaged over heads, mixed with the
    layer's own input as :data:`RESIDUAL_SHARES` says. Only its product with equal parts of the prompt is carried from
    layer to layer, and attention rows are reduced block by block, so memory is linear in the tokens. Families
    that compute whole maps themselves (MPT, Falcon) hold one layer's. Where a method runs several rows for a
    prompt (attention_buckets), these are averaged; where it attends several times in a layer (moice), the last
    time counts.

    Args:
        lm: The model, with L layers.
        ids: Token ids of the prompt.
        parts: Number of equal parts of the prompt.
        sink_tokens: Number of the prompt's first tokens to examine as sinks.

    Returns:
        ``rollout`` [2, L, parts]: weight of the last token on each part after 1, 2, ... layers, by kind;
        ``by_head`` and ``by_entry`` [tokens], of the prompt's first tokens, see :mod:`posbench.theory.masks`:
        absent for a shorter prompt.
    """
    reduction = _Reduction(len(ids), parts, sink_tokens)

    def read(
        layer: int, query: Tensor, key: Tensor, mask: Any, **settings: Any
    ) -> None:
        reduction.add_layer(layer, attention_rows(query, key, mask, **settings))

    def read_map(layer: int, weights: Tensor) -> None:
        reduction.add_layer(layer, [(0, weights.float())])

    with lm.reading_attention(read, read_map):
        forward(lm, **lm.pad([ids]))
    return reduction.results()


class _Reduction:
    """Accumulates the attention of one prompt for :func:`flow`; see there for the arguments."""

    def __init__(self, length: int, parts: int, tokens: int) -> None:
        self.length = length
        self.parts = parts
        self.tokens = tokens
        self.num_queries = np.arange(tokens, 0, -1)  # that see each of the tokens
        shares = torch.tensor(list(RESIDUAL_SHARES.values()), dtype=torch.float64)
        self.input_shares = shares.view(-1, 1, 1)
        # Rollout times the parts, [2, length, parts], before and after the current layer.
        self.output = torch.zeros(
            len(RESIDUAL_SHARES), length, parts, dtype=torch.float64
        )
        for part, rows in enumerate(np.array_split(np.arange(length), parts)):
            self.output[:, rows, part] = 1
        self.input = self.output
        self.layer = -1
        # By layer; a method that attends several times in a layer replaces the earlier times.
        self.rollout: dict[int, Array] = {}
        self.by_head: dict[int, Array] = {}
        self.by_entry: dict[int, Array] = {}

    def add_layer(self, layer: int, blocks: Iterable[tuple[int, Tensor]]) -> None:
        """Reduce the attention of one layer, in blocks as :func:`attention_rows` yields them."""
        tokens = self.tokens
        if layer != self.layer:
            self.input = self.output
            self.layer = layer
        mixed = []
        sums: Any = 0.0
        above: Any = 0.0
        for start, weights in blocks:
            self.input = self.input.to(weights.device)
            mixed.append(weights.mean(1).double()[:, None] @ self.input)
            # Of the first tokens, as queries and as keys.
            early = weights[:, :, : max(tokens - start, 0), :tokens].double()
            sums = sums + early.sum(2)
            above = above + (early > masks.SINGLE_WEIGHT_THRESHOLD).double().sum(2)
        share = self.input_shares.to(self.input.device)
        self.output = share * self.input + (1 - share) * torch.cat(mixed, dim=2)
        last_token = self.output[..., -1, :].reshape(
            -1, len(RESIDUAL_SHARES), self.parts
        )
        self.rollout[layer] = last_token.mean(0).cpu().numpy()
        if self.length >= tokens:
            # [rows of the prompt, H, tokens]: the mean over the queries that see each token.
            attention = torch.as_tensor(sums).cpu().numpy() / self.num_queries
            entries = torch.as_tensor(above).cpu().numpy()
            self.by_head[layer] = (attention > masks.MEAN_WEIGHT_THRESHOLD).mean((0, 1))
            self.by_entry[layer] = entries.mean((0, 1)) / self.num_queries

    def results(self) -> dict[str, Array]:
        """See :func:`flow`."""
        rollout = [self.rollout[layer] for layer in sorted(self.rollout)]
        results = {"rollout": np.stack(rollout, axis=1)}
        if self.by_head:
            # Layers have equally many heads and queries.
            results["by_head"] = np.mean(list(self.by_head.values()), axis=0)
            results["by_entry"] = np.mean(list(self.by_entry.values()), axis=0)
        return results


def attention_rows(
    query: Tensor, key: Tensor, mask: Tensor | None, **settings: Any
) -> Iterator[tuple[int, Tensor]]:
    """Compute the attention weights of all queries of a prompt, block by block.

    Args:
        query: [B, H, T, d].
        key: [B, G, T, d].
        mask: As :func:`posbench.model.attention.attention_weights` takes it.
        **settings: Further arguments of that function.

    Yields:
        The first row of a block, and its weights [B, H, rows, T] in float32 or better: at most
        ``MAX_BLOCK_WEIGHTS`` at a time.
    """
    # Repeated and converted once for all blocks.
    dtype = torch.promote_types(query.dtype, torch.float32)
    keys = sdpa.repeat_kv(key, query.shape[1] // key.shape[1]).to(dtype)
    row_weights = query.shape[0] * query.shape[1] * keys.shape[2]
    step = max(MAX_BLOCK_WEIGHTS // row_weights, 1)
    for start in range(0, query.shape[2], step):
        rows = slice(start, start + step)
        yield start, attention_weights(query, keys, mask, rows, **settings)
