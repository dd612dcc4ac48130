"""The last token sees the tokens of a span at other positions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from posbench.errors import UserError
from posbench.late import PreTrainedModel, Tensor, nn, torch
from posbench.model import families, rope
from posbench.model.hooks import Attend, attending, before_each
from posbench.model.lm import LM
from posbench.perturbations.base import Spans, columns, for_rows, need_own_mask, past


def can_move(lm: LM) -> bool:
    """Whether the model rotates, in attention that runs through the library's functions."""
    return (
        bool(rope.rotated_layers(lm.model)) and families.family_of(lm.model).interface
    )


@contextmanager
def move_positions(
    lm: LM,
    lengths: Sequence[int],
    spans: Spans,
    targets: Spans,
    layers: Collection[int] | None = None,
) -> Iterator[None]:
    """Let the last token see the tokens of a span at the positions of another one.

    Token i of the span stands where token i of the target [B] stands, or its last token where the target is
    shorter. This concerns the rows of the last prompt token and of all tokens behind it (generated ones: each
    is the last one when it is read). Earlier rows see every key at its own position, and masks stay as they
    are, as do layers without rotary embedding; None is all layers.

    Raises:
        UserError: The model has no rotary embedding (ALiBi, NoPE), its attention does not run through the
            library's functions, or a method rotates head by head (ms_poe, moice).

    Source: Yu et al. 2025, Section 2.2, Appendix D.3, Figure 9. The rule for unequal lengths is ours.
    """
    if not can_move(lm):
        allowed = "a model with rotary position embedding (RoPE) in attention through the library's functions"
        raise UserError(
            "position ids of a span",
            lm.name,
            allowed,
            "crop the mask, or take model=tiny",
        )
    rope.check(lm, "position ids of a span", by_hand=True)
    need_own_mask(lm, "moved position ids")
    width = max(lengths)
    source, low = _sources(lengths, spans, targets)
    chosen = set(rope.rotated_layers(lm.model)) & (
        set(range(lm.layers)) if layers is None else set(layers)
    )
    turns: dict[int, rope.Table] = {}

    with ExitStack() as stack:
        held = stack.enter_context(past(lm.model))

        def remember(layer: int) -> Callable[..., None]:
            def hook(
                _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
            ) -> None:
                table = families.rotary_of(kwargs)
                if table is None or held():
                    return
                if source.numel() and table[0].shape[1] <= int(source.max()):
                    raise ValueError(
                        "spans and targets have to lie in the prompt's part that comes first"
                    )
                turns[layer] = _turn(
                    table, for_rows(source, families.attention_input(args, kwargs)), low
                )

            return hook

        def attend(module: Any, *given: Any, following: Attend, **rest: Any) -> Any:
            query, key, value, mask = given
            rows = query.shape[2]
            total = key.shape[2]
            last = min(max(held() + rows - (width - 1), 0), rows)
            if module.layer_idx not in chosen or not last:
                return following(module, *given, **rest)
            gone = held() + rows - total  # what a sliding-window layer holds no more
            keys = _turned(
                lm.model, module.layer_idx, key, turns[module.layer_idx], low - gone
            )
            if last == rows:
                return following(module, query, keys, value, mask, **rest)
            out, weights = following(module, *given, **rest)
            mask = _last_rows(
                mask, last, torch.ones(total, dtype=torch.bool, device=query.device)
            )
            # The call that counts comes last: a listener keeps the latest.
            again, new = following(
                module, query[:, :, -last:], keys, value, mask, **rest
            )
            both = (
                None if new is None else torch.cat([weights[:, :, :-last], new], dim=2)
            )
            return torch.cat([out[:, :-last], again], dim=1), both

        stack.enter_context(
            before_each(families.attention_modules(lm.model), chosen, remember)
        )
        stack.enter_context(attending(lm.model, attend))
        yield


def _last_rows(mask: Tensor | None, last: int, every: Tensor) -> Tensor | None:
    """A mask's last rows; where they need the causal one that None stands for, that, over keys [T]."""
    if mask is None:
        return (
            every.expand(last, -1).tril(len(every) - last)[None, None]
            if last > 1
            else None
        )
    return mask[:, :, -last:]


def _sources(
    lengths: Sequence[int], spans: Spans, targets: Spans
) -> tuple[Tensor, int]:
    """The columns, [B, C], whose positions those that hold a span take; and the first of the latter."""
    _, start, stop = columns(lengths, spans)
    _, to, to_stop = columns(lengths, targets)
    every = torch.arange(max(lengths))
    inside = (every >= start) & (every < stop)
    source = torch.where(inside, torch.minimum(to + every - start, to_stop - 1), every)
    held = inside.any(0).nonzero().flatten().tolist()
    low, high = (held[0], held[-1] + 1) if held else (0, 0)
    return source[:, low:high], low


def _turn(table: rope.Table, source: Tensor, low: int) -> rope.Table:
    """cos and sin [B, C, r] in float32 that turn keys of the C columns from ``low`` on to those of a source.

    They are exactly 1 and 0 where a column is its own source.
    """
    exact = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in table)
    cos, sin = (part.expand(len(source), -1, -1) for part in exact)
    at = source[..., None].expand(-1, -1, cos.shape[-1])
    to = cos.gather(1, at), sin.gather(1, at)
    cos, sin = (part[:, low : low + source.shape[1]] for part in (cos, sin))
    # Some embeddings rescale as they rotate: the same factor is in both tables.
    size = cos**2 + sin**2
    return (to[0] * cos + to[1] * sin) / size, (to[1] * cos - to[0] * sin) / size


def _turned(
    model: PreTrainedModel, layer: int, key: Tensor, turn: rope.Table, low: int
) -> Tensor:
    """A copy of rotated keys [B, G, S, d], turned further from column ``low`` on; those below 0 are gone."""
    skip = max(-low, 0)
    out = key.clone()
    cos, sin = (part[:, skip:].to(key.device) for part in turn)
    at = slice(max(low, 0), max(low, 0) + cos.shape[1])
    out[:, :, at] = families.rotate(
        model, layer, key[:, :, at].to(cos.dtype), (cos, sin)
    ).to(key.dtype)
    return out
