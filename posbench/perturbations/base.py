"""What changes of spans of tokens share: where the spans lie in a batch, and how far its cache has come.

A batch is padded on the left to its longest prompt, as :meth:`posbench.model.lm.LM.pad` and ``generate`` do.
Each block serves one batch: its prompts in their order, then any number of calls on their caches. It gets the
tokens of each prompt (``lengths``, [B]) and one span of each (``spans``, [B]); layers and channels are
0-based. Leaving a block, also by an exception, restores the model.

Letters: B prompts, T columns of the batch, S keys that a layer holds, G key heads, d their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from posbench.errors import UserError
from posbench.late import PreTrainedModel, Tensor, nn, torch
from posbench.model import families
from posbench.model.hooks import before_each
from posbench.model.lm import LM

Span = tuple[int, int]
"""First token in the prompt, padding not counted, and the one behind the last; (0, 0) holds none."""
Spans = Sequence[Span]


def columns(lengths: Sequence[int], spans: Spans) -> tuple[Tensor, Tensor, Tensor]:
    """Columns of the first token of each prompt, of its span and of what is behind the span, each [B, 1]."""
    if len(lengths) != len(spans):
        raise ValueError(f"{len(spans)} spans for {len(lengths)} prompts")
    for length, (start, stop) in zip(lengths, spans, strict=True):
        if not 0 <= start <= stop <= length:
            raise ValueError(f"span {start, stop} in a prompt of {length} tokens")
    width = max(lengths)
    pads = torch.tensor([[width - length] for length in lengths])
    start, stop = torch.tensor(spans).T[..., None]
    return pads, pads + start, pads + stop


def for_rows(values: Tensor, hidden: Tensor) -> Tensor:
    """Values [B, ...] for a call whose batch may hold every prompt several times in a row; on its device."""
    times, rest = divmod(hidden.shape[0], len(values))
    if rest:
        raise ValueError(
            f"a batch of {hidden.shape[0]} rows inside a block for {len(values)} prompts"
        )
    return values.to(hidden.device).repeat_interleave(times, 0)


@contextmanager
def past(model: PreTrainedModel) -> Iterator[Callable[[], int]]:
    """Yields the function that tells how many columns the cache held before the forward that is running."""
    held = 0

    def count(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal held
        cache = kwargs.get("past_key_values")
        held = 0 if cache is None else int(cache.get_seq_length())

    with before_each([model.base_model], None, lambda _: count):
        yield lambda: held


def need_own_mask(lm: LM, what: str) -> None:
    """Raise UserError for FlashAttention, which takes no mask of ours."""
    if "flash" in str(families.text_config(lm.model)._attn_implementation):
        allowed = f"sdpa or eager: {what} needs a mask of its own"
        raise UserError(
            "model.attention", "flash_attention_2", allowed, "set model.attention=sdpa"
        )
