"""Attention weights of some queries, and the output where pairs of tokens differ in how they are rotated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from posbench.late import F, Tensor, torch

MAX_BLOCK_WEIGHTS = {"cpu": 1 << 20, "cuda": 1 << 24}
"""By kind of device, attention weights in memory at once in :func:`attend_with_rotations`; a CPU's fit its caches."""


class Rotations(NamedTuple):
    """Queries and keys rotated in several ways, and which way counts for a pair of tokens.

    A method passes it to the kernel as the setting ``rotations``; listeners in between hand it on with the other
    settings.

    Attributes:
        queries: One for each way, [B, H, T, d].
        keys: One for each way, [B, G, S, d].
        select: From scaled scores, [B, H, R, n] for each way, of the first n keys, and the slice of their R query rows
            to the scores that count, [B, H, R, n].
    """

    queries: Sequence[Tensor]
    keys: Sequence[Tensor]
    select: Callable[[Sequence[Tensor], slice], Tensor]

    def first_keys(self, count: int) -> Rotations:
        """The same with the first ``count`` keys alone."""
        return self._replace(keys=[keys[:, :, :count] for keys in self.keys])


def last_query_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, **settings: Any
) -> Tensor:
    """Attention weights of the last query, [B, H, T]; the arguments of :func:`attention_weights`."""
    last_query = slice(-1, None)
    return attention_weights(query, key, mask, last_query, **settings)[:, :, 0]


def attention_weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    query_rows: slice,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    rotations: Rotations | None = None,
    **_: Any,
) -> Tensor:
    """Attention weights of some queries, from the arguments of an attention function.

    Args:
        query: [B, H, Tq, d], the newest of T tokens.
        key: [B, G, T, d].
        mask: None (causal), boolean or additive [B, 1, Tq, >= T], or a flash kernel's padding mask [B, >= T].
        query_rows: R of the queries.
        scaling: Factor of the scores; d^-0.5 if None.
        softcap: Bound of the scores through tanh (Gemma 2).
        sliding_window: Keys that a row may see, for kernels that get no mask of their own.
        s_aux: Sink logits per head (GPT-OSS).
        rotations: Queries and keys in place of ``query`` and ``key``, where pairs differ in their rotation.

    Returns:
        Weights after the softmax, [B, H, R, T], in float32 or better.
    """
    precise = torch.promote_types(query.dtype, torch.float32)
    factor = scaling or query.shape[-1] ** -0.5

    def score(queries: Tensor, keys: Tensor) -> Tensor:
        rows = queries[:, :, query_rows].to(precise) * factor
        scores = _grouped_product(rows, keys.to(precise).transpose(-1, -2))
        return softcap * torch.tanh(scores / softcap) if softcap else scores

    if rotations is None:
        scores = score(query, key)
    else:
        ways = zip(rotations.queries, rotations.keys, strict=True)
        scores = rotations.select([score(*way) for way in ways], query_rows)
    scores = masked_scores(scores, mask, query.shape[2], query_rows, sliding_window)
    # A sink takes a share of the attention and has no key.
    if s_aux is not None:
        sinks = s_aux.to(precise)[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    return scores.softmax(-1)


def masked_scores(
    scores: Tensor,
    mask: Tensor | None,
    num_queries: int,
    query_rows: slice,
    sliding_window: int | None = None,
) -> Tensor:
    """Scores of some queries as the mask of an attention function leaves them: the lowest number where a key is shut.

    Args:
        scores: [B, H, R, T].
        mask: See :func:`attention_weights`.
        num_queries: Tq, the newest of T tokens.
        query_rows: R of the queries.
        sliding_window: See :func:`attention_weights`.
    """
    num_keys = scores.shape[-1]
    # Not -infinity: padding in front of a prompt sees no key at all, and would become NaN.
    lowest = torch.finfo(scores.dtype).min
    # Made here: causal, within the sliding window, without padding.
    if mask is None or mask.ndim != 4:
        tokens = torch.arange(num_keys, device=scores.device)
        query_tokens = tokens[num_keys - num_queries :][query_rows, None]
        distance = query_tokens - tokens
        hidden = (distance < 0) | (distance >= (sliding_window or num_keys))
        if mask is not None:
            hidden = hidden | ~mask[:, None, None, -num_keys:].bool()
        return scores.masked_fill(hidden, lowest)
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask[:, :, query_rows, :num_keys], lowest)
    return scores + mask[:, :, query_rows, :num_keys]


def attend_with_rotations(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    rotations: Rotations,
    keep_weights: bool = False,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as a kernel does, exactly and block by block of queries.

    Args:
        query: [B, H, T, d].
        key: [B, G, S, d].
        value: [B, G, S, d].
        mask: As :func:`attention_weights` takes it.
        rotations: Queries and keys in place of ``query`` and ``key``.
        keep_weights: Whether to return the weights.
        **settings: Further arguments of :func:`attention_weights`.

    Returns:
        The output, [B, T, H, d], and the weights, [B, H, T, S].
    """
    batch_size, heads, num_queries, _ = query.shape
    num_keys = key.shape[2]
    max_weights = MAX_BLOCK_WEIGHTS.get(query.device.type, MAX_BLOCK_WEIGHTS["cuda"])
    block_size = max(max_weights // (batch_size * heads * num_keys), 1)
    values = value.to(torch.promote_types(value.dtype, torch.float32))
    if mask is not None and mask.ndim != 4:
        mask = mask[:, -num_keys:]
    # A mask of its own may show a row later keys; all others are causal.
    is_causal = mask is None or mask.ndim != 4
    outputs = []
    kept_weights = []
    for start in range(0, num_queries, block_size):
        stop = min(start + block_size, num_queries)
        end = num_keys - num_queries + stop if is_causal else num_keys
        block_mask = mask[..., :end] if mask is not None else None
        weights = attention_weights(
            query[:, :, :stop],
            key[:, :, :end],
            block_mask,
            slice(start, stop),
            rotations=rotations.first_keys(end),
            **settings,
        )
        output = _grouped_product(weights, values[:, :, :end])
        outputs.append(output.to(query.dtype))
        if keep_weights:
            weights = F.pad(weights, (0, num_keys - end))
            kept_weights.append(weights.to(query.dtype))
    output = torch.cat(outputs, dim=2).transpose(1, 2).contiguous()
    return output, torch.cat(kept_weights, dim=2) if keep_weights else None


def first_visible_key(mask: Tensor | None) -> Tensor:
    """Index of the first key that a query sees: the first real token of a prompt with left padding.

    Args:
        mask: The mask of a prompt, as :func:`attention_weights` takes it.

    Returns:
        [B], or [1] where all rows share it.
    """
    if mask is None:
        return torch.zeros(1, dtype=torch.long)
    if mask.ndim == 4:
        if mask.dtype != torch.bool:
            mask = mask > torch.finfo(mask.dtype).min / 2
        mask = mask[:, 0].any(dim=1)
    return mask.long().argmax(dim=-1)


def _grouped_product(x: Tensor, y: Tensor) -> Tensor:
    """Matrix products [B, H, R, n] of x [B, H, R, m] and y [B, G, m, n], whose heads serve H / G heads of x each."""
    groups = x.unflatten(1, (y.shape[1], -1))
    return (groups.flatten(2, 3) @ y).reshape(*x.shape[:3], y.shape[-1])
