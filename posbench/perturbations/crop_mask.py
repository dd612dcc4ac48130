"""The tokens of a span see nothing before it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from posbench.late import Tensor, nn, torch
from posbench.model import families
from posbench.model.hooks import before_each
from posbench.model.lm import LM
from posbench.perturbations.base import Spans, columns, for_rows, need_own_mask, past


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

    That is the prompt's first token. Whatever else the model's own mask shuts (padding, a window) stays shut.
    In the cropped layers the kernel gets a mask of booleans [B, 1, T, T], one layer at a time, where it would
    otherwise know causality by itself: a byte per pair of tokens.

    Raises:
        UserError: The kernel takes no such mask (FlashAttention).

    Source: Yu et al. 2025, Section 2.2, Appendix D.3 and Figure 8 (with the first token), D.4 and Figure 11b.
    """
    need_own_mask(lm, "the crop mask")
    first, start, stop = columns(lengths, spans)
    shut_is_true = families.family_of(lm.model).shut_is_true

    def crop(before: int, hidden: Tensor, mask: Tensor | None) -> Tensor | None:
        rows = before + torch.arange(hidden.shape[1])
        cropping = (rows >= start) & (rows < stop)
        if not cropping.any():
            return mask
        keys = torch.arange(before + len(rows) if mask is None else mask.shape[-1])
        seen = (keys >= start) & (keys < stop)
        if keep_first:
            seen |= keys == first
        cropping = for_rows(cropping, hidden)
        seen = for_rows(seen, hidden)
        shut = cropping[:, None, :, None] & ~seen[:, None, None, :]
        if mask is None:
            return ~shut & (keys <= rows[:, None]).to(shut.device)
        if mask.dtype == torch.bool:
            return mask | shut if shut_is_true else mask & ~shut
        return mask.masked_fill(shut, torch.finfo(mask.dtype).min)

    with past(lm.model) as held:

        def hook(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, Any]:
            mask = crop(
                held(),
                families.attention_input(args, kwargs),
                kwargs.get("attention_mask"),
            )
            return args, kwargs | {"attention_mask": mask}

        with before_each(families.attention_modules(lm.model), layers, lambda _: hook):
            yield
