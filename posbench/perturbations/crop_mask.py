"""Crop the attention mask: the tokens of a span see nothing before the span."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from posbench.late import Tensor, nn, torch
from posbench.model import families
from posbench.model.hooks import pre_hooks
from posbench.model.lm import LM
from posbench.perturbations.base import (
    Spans,
    need_mask_support,
    repeat_for_batch,
    span_columns,
    track_cache_length,
)


@contextmanager
def crop_mask(
    lm: LM,
    lengths: Sequence[int],
    spans: Spans,
    layers: Collection[int],
    *,
    keep_first: bool = True,
) -> Iterator[None]:
    """Let the tokens of a span attend, causally, to the span alone and, with ``keep_first``, to the sink.

    Whatever the model's own mask shuts (padding, a window) stays shut. In the cropped layers the kernel gets a
    boolean mask [B, 1, T, T], made layer by layer, where it would otherwise apply causality by itself: one byte
    per pair of tokens.

    Source: Yu et al. 2025, Section 2.2, Appendix D.3 and Figure 8 (with the first token), D.4 and Figure 11b.

    Args:
        lm: The model.
        lengths: Tokens of each prompt, [B].
        spans: The span of each prompt, [B]; an empty one changes nothing.
        layers: Layers whose mask is cropped.
        keep_first: Whether the span still sees the sink, which is the prompt's first token.

    Raises:
        UserError: The kernel takes no such mask (FlashAttention).
    """
    need_mask_support(lm, "the crop mask")
    first, start, stop = span_columns(lengths, spans)
    shut_is_true = families.family_of(lm.model).shut_is_true

    def crop(columns_before: int, hidden: Tensor, mask: Tensor | None) -> Tensor | None:
        queries = columns_before + torch.arange(hidden.shape[1])
        in_span = (queries >= start) & (queries < stop)
        if not in_span.any():
            return mask
        num_keys = columns_before + len(queries)
        if mask is not None:
            num_keys = mask.shape[-1]
        # A sliding-window layer holds the newest keys only.
        keys = torch.arange(num_keys) + columns_before + len(queries) - num_keys
        visible = (keys >= start) & (keys < stop)
        if keep_first:
            visible |= keys == first
        in_span = repeat_for_batch(in_span, hidden)
        visible = repeat_for_batch(visible, hidden)
        cropped = in_span[:, None, :, None] & ~visible[:, None, None, :]
        if mask is None:
            causal = (keys <= queries[:, None]).to(cropped.device)
            return ~cropped & causal
        if mask.dtype != torch.bool:
            return mask.masked_fill(cropped, torch.finfo(mask.dtype).min)
        if shut_is_true:
            return mask | cropped
        return mask & ~cropped

    with track_cache_length(lm.model) as cache_length:

        def hook(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, Any]:
            hidden = families.attention_input(args, kwargs)
            mask = crop(cache_length(), hidden, kwargs.get("attention_mask"))
            return args, kwargs | {"attention_mask": mask}

        with pre_hooks(families.attention_modules(lm.model), layers, lambda _: hook):
            yield
