"""Attention of the last prompt token to the items of a prompt (Yu et al. 2025, Eq. 4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from posbench.errors import UserError
from posbench.late import F, Tensor, inference_mode, torch
from posbench.model.encode import Encoded
from posbench.model.guard import forward, guarded
from posbench.model.items import token_spans
from posbench.model.lm import LM
from posbench.model.prefix import Prefix
from posbench.tasks import Example


def item_tokens(encoded: Encoded, example: Example) -> list[tuple[int, int]]:
    """Return the span of tokens of every item, ``(first, last + 1)``; (0, 0) if the item was cut away.

    A token that an item shares with its neighbour belongs to both.

    Raises:
        UserError: No item has a token: the tokenizer gives no offsets, or the chat template rewrites the prompt.
    """
    spans = token_spans(encoded.offsets, example.items)
    if spans and set(spans) == {(0, 0)}:
        allowed = "a prompt whose items can be found in its tokens, which a slow tokenizer does not tell"
        hint = "set model.chat_template=none, or use a fast tokenizer (tokenizer.json)"
        raise UserError("prompt", f"example {example.id}", allowed, hint)
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
    """Compute the attention weight of the last token to each item, averaged over the item's tokens.

    Args:
        lm: The model, with L layers of H heads.
        encoded: B prompts as tokens.
        examples: The same B prompts with their spans of N items.
        heads: Return the weights of each head instead of their mean.
        prefix: Cache with all tokens of these prompts but the last.

    Returns:
        [B, L, N], or with ``heads`` [B, L, H, N]; float32 on the CPU.
    """
    inputs = lm.pad([code.ids for code in encoded], prefix)
    pool = item_pool(encoded, examples, inputs["attention_mask"].shape[1])
    layers = []
    with lm.last_attention() as weights:
        forward(lm, **inputs)
        for layer in range(lm.layers):
            # A method may run a prompt as several rows next to each other, which are averaged as heads are.
            rows = weights[layer].unflatten(0, (len(examples), -1)).mean(1)
            if not heads:
                rows = rows.mean(1, keepdim=True)
            layers.append(rows.float().cpu())
    attention = pooled(layers, pool)
    if heads:
        return attention
    return attention[:, :, 0]


def item_pool(
    encoded: Sequence[Encoded], examples: Sequence[Example], width: int
) -> Tensor:
    """Make the matrix that averages over the tokens of each item.

    Args:
        encoded: B prompts as tokens.
        examples: The same B prompts with their spans of N items.
        width: Tokens T of a batch, which pads prompts on the left.

    Returns:
        1 / (an item's tokens) at its tokens, else 0; [B, N, T].
    """
    pool = torch.zeros(len(examples), len(examples[0].items), width)
    for row, (code, example) in enumerate(zip(encoded, examples, strict=True)):
        padding = width - len(code.ids)
        for item, (start, end) in enumerate(item_tokens(code, example)):
            pool[row, item, padding + start : padding + end] = 1 / max(end - start, 1)
    return pool


def pooled(weights: Sequence[Tensor], pool: Tensor) -> Tensor:
    """Average attention over the tokens of each item.

    Args:
        weights: Attention weights of each of L layers, [B, H, T'].
        pool: Averages from :func:`item_pool`, [B, N, T].

    Returns:
        [B, L, H, N].
    """
    # A sliding-window layer may hold the newest keys only: the others have no weight.
    width = pool.shape[-1]
    layers = [F.pad(layer, (width - layer.shape[-1], 0)) for layer in weights]
    return torch.einsum("lbht,bit->blhi", torch.stack(layers), pool)


@guarded
@inference_mode
def attention_to_thirds(
    lm: LM, prompts: Sequence[Sequence[int]], batches: Sequence[Sequence[int]]
) -> NDArray[np.float64]:
    """Compute the share of the last token's attention on each third of its prompt, mean over heads.

    Args:
        lm: A model with rotary embedding and L layers.
        prompts: Token ids of N prompts.
        batches: Indices of the prompts in each batch.

    Returns:
        [N, L, 3].
    """
    shares = np.zeros((len(prompts), lm.layers, 3))
    for batch in batches:
        with lm.last_attention() as weights:
            forward(lm, **lm.pad([prompts[i] for i in batch]))
        for layer in range(lm.layers):
            # A method may run a prompt as several rows, which are averaged as heads are.
            by_prompt = weights[layer].unflatten(0, (len(batch), -1))
            rows = by_prompt.flatten(1, 2).mean(1).double().cpu().numpy()
            for row, i in zip(rows, batch, strict=True):
                thirds = np.array_split(row[-len(prompts[i]) :], 3)
                shares[i, layer] = [third.sum() for third in thirds]
    return shares
