"""What a prompt's tokens may see, where they seem to stand, and what one channel holds: changed for a span of
tokens per prompt.

A batch is padded on the left to its longest prompt, as :meth:`posbench.model.lm.LM.pad` and ``generate`` do.
Each block serves one
batch: its prompts in their order, then any number of calls on their caches. Leaving a block, also by an
exception, restores the model.

Letters: B prompts, T columns of the batch, S keys that a layer holds, D channels, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posbench.errors import UserError
from posbench.model import families, rope
from posbench.model.hooks import Attend, attending

if TYPE_CHECKING:
    from posbench.model.lm import LM

Span = tuple[int, int]
"""First token of a span in its prompt, padding not counted, and the token behind its last one; (0, 0) holds
none."""

Site = Literal["attention_input", "residual"]


@contextmanager
def cropped(
    lm: LM, lengths: Sequence[int], spans: Sequence[Span], layers: Collection[int], *, keep_first: bool = True
) -> Iterator[None]:
    """Let the tokens of a span see nothing before it: they attend, causally, to the span alone and to the
    first token.

    Args:
        lm: The model.
        lengths: Tokens of each prompt of the batch, [B].
        spans: The cropped span of each prompt, [B].
        layers: Layers whose mask is cropped, 0-based.
        keep_first: Whether the first token stays visible, which keeps the attention sink in place.

    Whatever else the model's own mask shuts (padding, a window) stays shut. In the cropped layers the kernel
    gets a mask of booleans [B, 1, T, T], one layer at a time, where it would otherwise know causality by
    itself: a byte per pair of tokens.

    Raises:
        UserError: The kernel takes no such mask (FlashAttention).

    Source: Yu et al. 2025, Section 2.2, Appendix D.3 and Figure 8 (with the first token), D.4 and Figure 11b.
    """
    _check_kernel(lm, "the crop mask")
    first, start, stop = _columns(lengths, spans)
    # Only MPT's masks are true where a key is shut.
    shut_is_true = lm.model.config.model_type == "mpt"

    def crop(past: int, hidden: Tensor, mask: Tensor | None) -> Tensor | None:
        rows = past + torch.arange(hidden.shape[1])
        cropping = (rows >= start) & (rows < stop)
        if not cropping.any():
            return mask
        keys = torch.arange(past + len(rows) if mask is None else mask.shape[-1])
        seen = (keys >= start) & (keys < stop)
        if keep_first:
            seen |= keys == first
        cropping, seen = _for_rows(cropping, hidden), _for_rows(seen, hidden)
        shut = cropping[:, None, :, None] & ~seen[:, None, None, :]
        if mask is None:
            return ~shut & (keys <= rows[:, None]).to(shut.device)
        if mask.dtype == torch.bool:
            return mask | shut if shut_is_true else mask & ~shut
        return mask.masked_fill(shut, torch.finfo(mask.dtype).min)

    with ExitStack() as stack:
        past = stack.enter_context(_past(lm.model))

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            mask = crop(past(), families.attention_input(args, kwargs), kwargs.get("attention_mask"))
            return args, kwargs | {"attention_mask": mask}

        _on_each(stack, families.attention_modules(lm.model), layers, lambda layer: hook)
        yield


def can_move(lm: LM) -> bool:
    """Whether :func:`moved` knows the model: it rotates in some layer, in attention that runs through the
    library's functions."""
    return bool(rope.rotated_layers(lm.model)) and families.family_of(lm.model).interface


@contextmanager
def moved(
    lm: LM,
    lengths: Sequence[int],
    spans: Sequence[Span],
    targets: Sequence[Span],
    layers: Collection[int] | None = None,
) -> Iterator[None]:
    """Let the last token see the tokens of a span at the positions of another one.

    Token i of the span stands where token i of the target stands, or its last token where the target is
    shorter. This concerns the rows of the last prompt token and of all tokens behind it (generated ones: each
    is the last one when it is read). Earlier rows see every key at its own position, and masks stay as they
    are.

    Args:
        lm: The model.
        lengths: Tokens of each prompt of the batch, [B].
        spans: The moved span of each prompt, [B].
        targets: The span whose positions it takes, [B].
        layers: Layers, 0-based; None is all. Those without rotary embedding stay as they are.

    Raises:
        UserError: The model has no rotary embedding (ALiBi, NoPE), its attention does not run through the
            library's functions, or a method rotates head by head (ms_poe, moice).

    Source: Yu et al. 2025, Section 2.2, Appendix D.3 and Figure 9. The rule for spans of unequal length is
        ours.
    """
    if not can_move(lm):
        raise UserError(
            "position ids of a span",
            lm.name,
            "a model with rotary position embedding (RoPE), with attention through the library's functions",
            "crop the mask instead, or take model=tiny",
        )
    rope.check(lm, "position ids of a span", by_hand=True)
    _check_kernel(lm, "moved position ids")
    width = max(lengths)
    _, start, stop = _columns(lengths, spans)
    _, to, to_stop = _columns(lengths, targets)
    columns = torch.arange(width)
    inside = (columns >= start) & (columns < stop)
    source = torch.where(inside, torch.minimum(to + columns - start, to_stop - 1), columns)
    held = inside.any(0).nonzero().flatten().tolist()
    low, high = (held[0], held[-1] + 1) if held else (0, 0)
    source, needed = source[:, low:high], int(source[:, low:high].max()) + 1 if held else 0
    chosen = set(rope.rotated_layers(lm.model)) & (set(range(lm.layers)) if layers is None else set(layers))
    turns: dict[int, rope.Table] = {}

    with ExitStack() as stack:
        past = stack.enter_context(_past(lm.model))

        def remember(layer: int) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                table = families.rotary_of(kwargs)
                if table is None or past():
                    return
                if table[0].shape[1] < needed:
                    raise ValueError(
                        "the spans and their targets have to lie in the part of the prompt that comes first"
                    )
                turns[layer] = _turn(table, _for_rows(source, families.attention_input(args, kwargs)), low)

            return hook

        def attend(
            module: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            mask: Tensor | None,
            following: Attend,
            **rest: Any,
        ) -> Any:
            rows, total = query.shape[2], key.shape[2]
            last = min(max(past() + rows - (width - 1), 0), rows)
            if module.layer_idx not in chosen or not last:
                return following(module, query, key, value, mask, **rest)
            gone = past() + rows - total  # what a sliding-window layer holds no more
            keys = _turned(lm.model, module.layer_idx, key, turns[module.layer_idx], low - gone)
            if last == rows:
                return following(module, query, keys, value, mask, **rest)
            out, weights = following(module, query, key, value, mask, **rest)
            if mask is not None:
                mask = mask[:, :, -last:]
            elif last > 1:
                mask = torch.ones(last, total, dtype=torch.bool, device=query.device).tril(total - last)[
                    None, None
                ]
            # The call that counts comes last: a listener keeps the latest.
            again, new = following(module, query[:, :, -last:], keys, value, mask, **rest)
            both = None if new is None else torch.cat([weights[:, :, :-last], new], dim=2)
            return torch.cat([out[:, :-last], again], dim=1), both

        _on_each(stack, families.attention_modules(lm.model), chosen, remember)
        stack.enter_context(attending(lm.model, attend))
        yield


def _turn(table: rope.Table, source: Tensor, low: int) -> rope.Table:
    """cos and sin, each [B, C, r] in float32, that turn keys of the C columns from ``low`` on to the
    positions of the columns ``source`` [B, C]; exactly 1 and 0 where a column is its own source."""
    cos, sin = (
        part.to(torch.promote_types(part.dtype, torch.float32)).expand(len(source), -1, -1) for part in table
    )
    at = source[..., None].expand(-1, -1, cos.shape[-1])
    to = cos.gather(1, at), sin.gather(1, at)
    cos, sin = (part[:, low : low + source.shape[1]] for part in (cos, sin))
    # Some embeddings rescale as they rotate: the same factor is in both tables.
    size = cos**2 + sin**2
    return (to[0] * cos + to[1] * sin) / size, (to[1] * cos - to[0] * sin) / size


def _turned(model: PreTrainedModel, layer: int, key: Tensor, turn: rope.Table, low: int) -> Tensor:
    """A copy of rotated keys [B, G, S, d] with the columns from ``low`` on turned further; those below 0 are
    gone."""
    skip, out = max(-low, 0), key.clone()
    cos, sin = (part[:, skip:].to(key.device) for part in turn)
    columns = slice(max(low, 0), max(low, 0) + cos.shape[1])
    out[:, :, columns] = families.rotate(model, layer, key[:, :, columns].to(cos.dtype), (cos, sin)).to(key.dtype)
    return out


@contextmanager
def subtracted(
    lm: LM,
    lengths: Sequence[int],
    spans: Sequence[Span],
    channel: int,
    values: Mapping[int, float],
    *,
    site: Site = "attention_input",
) -> Iterator[None]:
    """Subtract a value from one channel of the hidden states of a span's tokens.

    Args:
        lm: The model.
        lengths: Tokens of each prompt of the batch, [B].
        spans: The changed span of each prompt, [B].
        channel: Channel, 0-based.
        values: What to subtract, by 0-based layer.
        site: ``attention_input`` changes what queries, keys and values of a layer are projected from, after
            its first norm, each layer on its own; ``residual`` changes the stream before the layer, so that
            it adds up over the layers.

    Source: Yu et al. 2025, Appendix D.5 and Figure 10, which does not say which of the two "hidden states"
        are.
    """
    family, model = families.family_of(lm.model), lm.model
    _, start, stop = _columns(lengths, spans)
    blocks: Sequence[Any] = model.get_submodule(family.layers)  # type: ignore[assignment]
    modules = families.attention_modules(model) if site == "attention_input" else list(blocks)

    with ExitStack() as stack:
        past = stack.enter_context(_past(model))

        def subtract(layer: int) -> Callable[..., Any]:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
                hidden = families.attention_input(args, kwargs)
                columns = past() + torch.arange(hidden.shape[1])
                inside = (columns >= start) & (columns < stop)
                if not inside.any():
                    return args, kwargs
                changed = hidden.clone()
                changed[..., channel] -= values[layer] * _for_rows(inside, hidden).to(hidden.dtype)
                if "hidden_states" in kwargs:
                    return args, kwargs | {"hidden_states": changed}
                return (changed, *args[1:]), kwargs

            return hook

        _on_each(stack, modules, values, subtract)
        yield


@contextmanager
def channel_input(
    lm: LM, channels: Sequence[int], site: Site = "attention_input"
) -> Iterator[dict[int, Tensor]]:
    """Collect some channels of every layer's input in each forward inside the block, as the outer blocks
    leave them.

    Yields:
        Dict layer -> [B, T, C] of the latest forward, for C channels.
    """
    found: dict[int, Tensor] = {}
    blocks: Sequence[Any] = lm.model.get_submodule(families.family_of(lm.model).layers)  # type: ignore[assignment]
    modules = families.attention_modules(lm.model) if site == "attention_input" else list(blocks)

    def read(layer: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[layer] = families.attention_input(args, kwargs)[..., list(channels)]

        return hook

    with ExitStack() as stack:
        _on_each(stack, modules, range(len(modules)), read)
        yield found


def _columns(lengths: Sequence[int], spans: Sequence[Span]) -> tuple[Tensor, Tensor, Tensor]:
    """Columns of the first token of each prompt, of the first token of its span and of the token behind it,
    each [B, 1]."""
    if len(lengths) != len(spans):
        raise ValueError(f"{len(spans)} spans for {len(lengths)} prompts")
    for length, (start, stop) in zip(lengths, spans, strict=True):
        if not 0 <= start <= stop <= length:
            raise ValueError(f"span {start, stop} in a prompt of {length} tokens")
    width = max(lengths)
    pads = torch.tensor([[width - length] for length in lengths])
    start, stop = torch.tensor(spans).T[..., None]
    return pads, pads + start, pads + stop


def _for_rows(values: Tensor, hidden: Tensor) -> Tensor:
    """Values [B, ...] for a call whose batch may hold every prompt several times, next to each other; on its
    device."""
    times, rest = divmod(hidden.shape[0], len(values))
    if rest:
        raise ValueError(f"a batch of {hidden.shape[0]} rows inside a block for {len(values)} prompts")
    return values.to(hidden.device).repeat_interleave(times, 0)


def _on_each(
    stack: ExitStack,
    modules: Sequence[nn.Module],
    layers: Collection[int],
    hook: Callable[[int], Callable[..., Any]],
) -> None:
    """Hooks before the modules of some layers, until the stack is closed."""
    for layer in layers:
        stack.callback(modules[layer].register_forward_pre_hook(hook(layer), with_kwargs=True).remove)


@contextmanager
def _past(model: PreTrainedModel) -> Iterator[Callable[[], int]]:
    """Yields the function that tells how many columns the cache held before the forward that is running."""
    held = 0

    def count(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal held
        cache = kwargs.get("past_key_values")
        held = 0 if cache is None else int(cache.get_seq_length())

    handle = model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield lambda: held
    finally:
        handle.remove()


def _check_kernel(lm: LM, what: str) -> None:
    if "flash" in str(families.text_config(lm.model)._attn_implementation):
        raise UserError(
            "model.attention",
            "flash_attention_2",
            f"sdpa or eager: {what} needs a mask of its own",
            "set model.attention=sdpa",
        )
