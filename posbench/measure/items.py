"""Attention of the last prompt token to the items of a prompt (Yu et al. 2025, Eq. 4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from posbench.late import F, Tensor, inference_mode, torch
from posbench.model.encode import Encoded
from posbench.model.guard import finite, guarded
from posbench.model.lm import LM
from posbench.model.prefix import Prefix
from posbench.tasks import Example


def item_tokens(encoded: Encoded, example: Example) -> list[tuple[int, int]]:
    """First token of every item and the one behind its last; (0, 0) where the prompt lost the item.

    A token that an item shares with its neighbour belongs to both.
    """
    starts, ends = (np.array(side) for side in zip(*encoded.offsets, strict=True))
    spans = []
    for first, last in example.items:
        tokens = np.flatnonzero((starts < last) & (ends > first))
        spans.append((int(tokens[0]), int(tokens[-1]) + 1) if len(tokens) else (0, 0))
    return spans


@guarded
@inference_mode
def attention_to_items(
    lm: LM,
    encoded: Sequence[Encoded],
    examples: Sequence[Example],
    *,
    heads: bool = False,
    prefix: Prefix | None = None,
) -> Tensor:
    """Attention weight of the last token to each item, mean over heads and over the item's tokens.

    [B, L, N] for B prompts with N items each and L layers; with ``heads`` [B, L, H, N], the heads kept apart.
    ``prefix`` holds all tokens of these prompts but the last.
    """
    inputs = lm.pad([e.ids for e in encoded], prefix)
    pool = item_pool(encoded, examples, inputs["attention_mask"].shape[1])
    with lm.last_attention() as weights:
        finite(lm.model(**inputs, use_cache=False, logits_to_keep=1).logits)
        # A method may run a prompt as several rows next to each other, which are averaged as heads are.
        rows = [
            weights[layer].unflatten(0, (len(examples), -1)).mean(1)
            for layer in range(lm.layers)
        ]
        kept = [
            (row if heads else row.mean(1, keepdim=True)).float().cpu() for row in rows
        ]
    found = pooled(kept, pool)
    return found if heads else found[:, :, 0]


def item_pool(
    encoded: Sequence[Encoded], examples: Sequence[Example], width: int
) -> Tensor:
    """1 / (an item's tokens) at its tokens, else 0, [B, N, width]; prompts are padded on the left."""
    pool = torch.zeros(len(examples), len(examples[0].items), width)
    for row, (code, example) in enumerate(zip(encoded, examples, strict=True)):
        for item, (first, last) in enumerate(item_tokens(code, example)):
            pad = width - len(code.ids)
            pool[row, item, pad + first : pad + last] = 1 / max(last - first, 1)
    return pool


def pooled(weights: Sequence[Tensor], pool: Tensor) -> Tensor:
    """Weights [B, H, T'] of each layer averaged over items' tokens by :func:`item_pool`: [B, L, H, N]."""
    # A sliding-window layer may hold the newest keys only: the others have no weight.
    layers = [F.pad(row, (pool.shape[-1] - row.shape[-1], 0)) for row in weights]
    return torch.einsum("lbht,bit->blhi", torch.stack(layers), pool)


@guarded
@inference_mode
def attention_to_thirds(
    lm: LM, prompts: Sequence[Sequence[int]], plan: Sequence[Sequence[int]]
) -> NDArray[np.float64]:
    """Share of the last token's attention on each third of its prompt, mean over heads, [N, L, 3].

    The model has rotary embedding; ``plan`` has the numbers of the N prompts in each batch.
    """
    found = np.zeros((len(prompts), lm.layers, 3))
    for batch in plan:
        with lm.last_attention() as weights:
            given = lm.pad([prompts[i] for i in batch])
            finite(lm.model(**given, use_cache=False, logits_to_keep=1).logits)
        for layer in range(lm.layers):
            # A method may run a prompt as several rows, which are averaged as heads are.
            rows = (
                weights[layer]
                .unflatten(0, (len(batch), -1))
                .flatten(1, 2)
                .mean(1)
                .double()
                .cpu()
                .numpy()
            )
            for row, i in zip(rows, batch, strict=True):
                found[i, layer] = [
                    part.sum() for part in np.array_split(row[-len(prompts[i]) :], 3)
                ]
    return found
