"""What perturbations of token spans share: the columns of the spans in a batch, and the length of its cache.

A batch is padded on the left to its longest prompt, as :meth:`posbench.model.lm.LM.pad` and ``generate`` do.
A perturbation serves one batch inside its block: the batch's prompts in their order, then any number of calls
that go on from their caches. It takes the number of tokens of each prompt (``lengths``, [B]) and one span of
each prompt (``spans``, [B]). Layers and channels are 0-based. When the block ends, also by an exception, the
model is as before.

Letters: B prompts, T columns of the batch, S keys that a layer holds, H query heads, G key heads, d their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from posbench.errors import UserError
from posbench.late import PreTrainedModel, Tensor, nn, torch
from posbench.model import families
from posbench.model.hooks import find_cache, pre_hooks
from posbench.model.lm import LM

Span = tuple[int, int]
"""First token of a span and the token after its last one, padding not counted; (0, 0) is an empty span."""
Spans = Sequence[Span]


def span_columns(lengths: Sequence[int], spans: Spans) -> tuple[Tensor, Tensor, Tensor]:
    """Translate spans of tokens into columns of the batch.

    Args:
        lengths: Tokens of each prompt, [B].
        spans: A span of each prompt, [B].

    Returns:
        Column of each prompt's first token, of its span's first token, and the column after the span,
        each an integer tensor [B, 1].
    """
    if len(lengths) != len(spans):
        raise ValueError(f"{len(spans)} spans for {len(lengths)} prompts")
    for length, (start, stop) in zip(lengths, spans, strict=True):
        if not 0 <= start <= stop <= length:
            raise ValueError(f"span {start, stop} in a prompt of {length} tokens")
    width = max(lengths)
    padding = torch.tensor([[width - length] for length in lengths])
    start, stop = torch.tensor(spans).T[..., None]
    return padding, padding + start, padding + stop


def repeat_for_batch(values: Tensor, hidden: Tensor) -> Tensor:
    """Repeat values of prompts for a batch that runs each prompt as several adjacent rows.

    Args:
        values: One row per prompt, [B, ...].
        hidden: Hidden states of the running call, [B * repeats, T, D].

    Returns:
        The values on the device of the hidden states, [B * repeats, ...].
    """
    repeats, remainder = divmod(hidden.shape[0], len(values))
    if remainder:
        raise ValueError(
            f"a batch of {hidden.shape[0]} rows inside a block for {len(values)} prompts"
        )
    return values.to(hidden.device).repeat_interleave(repeats, 0)


@contextmanager
def track_cache_length(model: PreTrainedModel) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the columns that the cache held before the running forward."""
    columns = 0

    def count(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal columns
        cache = find_cache(kwargs)
        columns = 0 if cache is None else int(cache.get_seq_length())

    with pre_hooks([model.base_model], None, lambda _: count):
        yield lambda: columns


def need_mask_support(lm: LM, perturbation: str) -> None:
    """Raise UserError for FlashAttention, whose kernel takes no mask but its own."""
    if "flash" in str(families.text_config(lm.model)._attn_implementation):
        allowed = f"sdpa or eager: flash_attention_2 takes no mask for {perturbation}"
        raise UserError(
            "model.attention", "flash_attention_2", allowed, "set model.attention=sdpa"
        )
