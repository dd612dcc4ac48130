"""Recompute the attention weights of some queries from the arguments of an attention function."""

from __future__ import annotations

from typing import Any

from posbench.late import Tensor, sdpa, torch


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

    Returns:
        Weights after the softmax, [B, H, R, T], in float32 or better.
    """
    precise = torch.promote_types(query.dtype, torch.float32)
    keys = sdpa.repeat_kv(key, query.shape[1] // key.shape[1]).to(precise)
    scores = (
        query[:, :, query_rows].to(precise)
        @ keys.transpose(-1, -2)
        * (scaling or query.shape[-1] ** -0.5)
    )
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
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
    """Scores of some queries as the mask of an attention function leaves them: -inf where a key is shut.

    Args:
        scores: [B, H, R, T].
        mask: See :func:`attention_weights`.
        num_queries: Tq, the newest of T tokens.
        query_rows: R of the queries.
        sliding_window: See :func:`attention_weights`.
    """
    num_keys = scores.shape[-1]
    minus_infinity = float("-inf")
    # Made here: causal, within the sliding window, without padding.
    if mask is None or mask.ndim != 4:
        tokens = torch.arange(num_keys, device=scores.device)
        query_tokens = tokens[num_keys - num_queries :][query_rows, None]
        distance = query_tokens - tokens
        hidden = (distance < 0) | (distance >= (sliding_window or num_keys))
        if mask is not None:
            hidden = hidden | ~mask[:, None, None, -num_keys:].bool()
        return scores.masked_fill(hidden, minus_infinity)
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask[:, :, query_rows, :num_keys], minus_infinity)
    return scores + mask[:, :, query_rows, :num_keys]
