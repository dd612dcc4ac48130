"""Attention weights of some queries, computed once more from what an attention function is given."""

from __future__ import annotations

from typing import Any

from posbench.late import Tensor, sdpa, torch


def last_row(
    query: Tensor, key: Tensor, mask: Tensor | None, **settings: Any
) -> Tensor:
    """Attention weights of the last query, [B, H, T]; the arguments of :func:`attention_weights`."""
    return attention_weights(query, key, mask, slice(-1, None), **settings)[:, :, 0]


def attention_weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    rows: slice,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Attention weights [B, H, R, T] of some queries, from what an attention function is given.

    Args:
        query: [B, H, Tq, d], the newest of T tokens.
        key: [B, G, T, d].
        mask: None (causal), boolean or additive [B, 1, Tq, >= T], or a flash kernel's padding mask [B, >= T].
        rows: R of the queries.
        scaling: Factor of the scores; d^-0.5 if None.
        softcap: Bound of the scores through tanh (Gemma 2).
        sliding_window: Keys that a row may see, for kernels that get no mask of their own.
        s_aux: Sink logits per head (GPT-OSS).
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    keys = sdpa.repeat_kv(key, query.shape[1] // key.shape[1]).to(exact)
    scores = (
        query[:, :, rows].to(exact)
        @ keys.transpose(-1, -2)
        * (scaling or query.shape[-1] ** -0.5)
    )
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    total = scores.shape[-1]
    shut = float("-inf")
    if mask is not None and mask.ndim == 4:
        part = mask[:, :, rows, :total]
        scores = (
            scores.masked_fill(~part, shut)
            if part.dtype == torch.bool
            else scores + part
        )
    else:
        at = torch.arange(total, device=query.device)
        distance = at[total - query.shape[2] :][rows, None] - at
        hidden = (distance < 0) | (distance >= (sliding_window or total))
        padding = False if mask is None else ~mask[:, None, None, -total:].bool()
        scores = scores.masked_fill(hidden | padding, shut)
    if s_aux is not None:
        sinks = s_aux.to(exact)[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    return scores.softmax(-1)
