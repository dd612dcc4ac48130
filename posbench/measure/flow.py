"""Where the content of the last token comes from, layer by layer, and which tokens are sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from posbench.late import Tensor, inference_mode, sdpa, torch
from posbench.model import families
from posbench.model.attention import attention_weights
from posbench.model.guard import finite, guarded
from posbench.model.hooks import attending
from posbench.model.lm import LM
from posbench.stats.bootstrap import Array
from posbench.theory import masks

KINDS = {"attention alone": 0.0, "with the residual stream": 0.5}
"""Shares of a layer's own input: Wu et al. 2025, and the rollout of Abnar and Zuidema 2020."""
ENTRIES = 1 << 24  # attention weights held at once


@guarded
@inference_mode
def flow(lm: LM, ids: Sequence[int], parts: int, tokens: int) -> dict[str, Array]:
    """Rollout and sinks of one prompt, from one forward whose attention rows are reduced block by block.

    The rollout after t layers is A(t) ... A(1), A being the attention averaged over heads, mixed with the
    layer's own input as :data:`KINDS` says. Only its product with equal parts of the prompt is carried from
    layer to layer, so memory is linear in the tokens. Families that compute whole maps themselves (MPT,
    Falcon) hold one layer's. Where a method runs several rows for a prompt (attention_buckets), these are
    averaged; where it attends several times in a layer (moice), the last time counts.

    Returns:
        ``rollout`` [2, L, parts]: weight of the last token on each part after 1, 2, ... layers, by kind;
        ``by_head`` and ``by_entry`` [tokens], of the prompt's first tokens: see :mod:`posbench.theory.masks`;
        not there for a shorter prompt.
    """
    length = len(ids)
    seen = np.arange(tokens, 0, -1)
    own = torch.tensor(list(KINDS.values()), dtype=torch.float64).view(-1, 1, 1)
    leaving = torch.zeros(len(KINDS), length, parts, dtype=torch.float64)
    for part, rows in enumerate(np.array_split(np.arange(length), parts)):
        leaving[:, rows, part] = 1
    entering = leaving
    current = -1
    last, heads, entries = (dict[int, Array]() for _ in range(3))

    def reduce(layer: int, blocks: Iterable[tuple[int, Tensor]]) -> None:
        nonlocal entering, leaving, current
        if layer != current:
            entering = leaving
            current = layer
        mixed = []
        sums = 0.0
        above = 0.0
        for start, weights in blocks:
            entering = entering.to(weights.device)
            mixed.append(weights.mean(1).double()[:, None] @ entering)
            early = weights[:, :, : max(tokens - start, 0), :tokens].double()
            sums = sums + early.sum(2)
            above = above + (early > masks.ENTRY).double().sum(2)
        share = own.to(entering.device)
        leaving = share * entering + (1 - share) * torch.cat(mixed, dim=2)
        last[layer] = (
            leaving[..., -1, :].reshape(-1, len(KINDS), parts).mean(0).cpu().numpy()
        )
        if length >= tokens:
            # [rows of the prompt, H, tokens], over the queries that see each of the tokens.
            heads[layer] = (
                torch.as_tensor(sums).cpu().numpy() / seen > masks.HEAD
            ).mean((0, 1))
            entries[layer] = torch.as_tensor(above).cpu().numpy().mean((0, 1)) / seen

    def read(
        module: Any, query: Tensor, key: Tensor, value: Any, mask: Any, **rest: Any
    ) -> Any:
        following = rest.pop("following")
        reduce(module.layer_idx, attention_rows(query, key, mask, **rest))
        return following(module, query, key, value, mask, **rest)

    def whole_map(layer: int) -> Callable[..., None]:
        return lambda module, args, output: reduce(layer, [(0, output[1].float())])

    with ExitStack() as stack:
        if families.family_of(lm.model).interface:
            stack.enter_context(attending(lm.model, read))
        else:
            stack.enter_context(lm.eager())
            for layer, module in enumerate(families.attention_modules(lm.model)):
                stack.callback(module.register_forward_hook(whole_map(layer)).remove)
        finite(lm.model(**lm.pad([ids]), use_cache=False, logits_to_keep=1).logits)
    found = {"rollout": np.stack([last[layer] for layer in sorted(last)], axis=1)}
    # Layers have equally many heads and queries.
    sinks = {"by_head": heads, "by_entry": entries} if heads else {}
    return found | {
        name: np.mean(list(each.values()), axis=0) for name, each in sinks.items()
    }


def attention_rows(
    query: Tensor, key: Tensor, mask: Tensor | None, **settings: Any
) -> Iterator[tuple[int, Tensor]]:
    """Attention weights of all queries of a prompt, a block of at most `ENTRIES` weights at a time.

    Takes what :func:`posbench.model.attention.attention_weights` takes; yields the first row of a block, and
    its weights [B, H, rows, T] in float32 or better.
    """
    # Once for all blocks.
    keys = sdpa.repeat_kv(key, query.shape[1] // key.shape[1]).to(
        torch.promote_types(query.dtype, torch.float32)
    )
    step = max(ENTRIES // (query.shape[0] * query.shape[1] * keys.shape[2]), 1)
    for start in range(0, query.shape[2], step):
        yield (
            start,
            attention_weights(
                query, keys, mask, slice(start, start + step), **settings
            ),
        )
