"""Move a span: the last token sees the keys of the span rotated to other positions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from posbench.errors import UserError
from posbench.late import Tensor, nn, torch
from posbench.model import families, rope
from posbench.model.hooks import AttentionFunction, intercepting_attention, pre_hooks
from posbench.model.last_rows import last_mask
from posbench.model.lm import LM
from posbench.perturbations.base import (
    Spans,
    need_mask_support,
    repeat_for_batch,
    span_columns,
    track_cache_length,
)


def can_move(lm: LM) -> bool:
    """Whether the model has RoPE, in attention that runs through the library's functions."""
    has_rope = bool(rope.rotated_layers(lm.model))
    return has_rope and families.family_of(lm.model).interface


@contextmanager
def move_positions(
    lm: LM,
    lengths: Sequence[int],
    spans: Spans,
    targets: Spans,
) -> Iterator[None]:
    """Let the last token see the tokens of a span at the positions of another span.

    Token i of the span takes the position of token i of the target, or of the target's last token where the
    target is shorter. Only the queries of the last prompt token and of all later tokens see this (each
    generated token is the last one when it is read). Earlier queries see every key at its own position. Masks
    stay as they are, as do layers without rotary embedding.

    Source: Yu et al. 2025, Section 2.2, Appendix D.3, Figure 9. The rule for unequal lengths is ours.

    Args:
        lm: The model.
        lengths: Tokens of each prompt, [B].
        spans: The span of each prompt whose keys move, [B].
        targets: The span of each prompt whose positions the keys take, [B].

    Raises:
        UserError: The model has no rotary embedding (ALiBi, NoPE), its attention does not run through the
            library's functions, or a method rotates by hand (ms_poe, moice and others).
    """
    if not can_move(lm):
        allowed = "a model with rotary position embedding (RoPE) that uses the attention functions of transformers"
        hint = "crop the mask, or take model=tiny"
        raise UserError("position ids of a span", lm.name, allowed, hint)
    rope.check_rope(lm, "position ids of a span", by_hand=True)
    need_mask_support(lm, "moved position ids")
    target_columns, first_column = _target_columns(lengths, spans, targets)
    moved_layers = rope.rotated_layers(lm.model)

    with ExitStack() as stack:
        cache_length = stack.enter_context(track_cache_length(lm.model))
        mover = _KeyMover(
            lm=lm,
            width=max(lengths),
            target_columns=target_columns,
            first_column=first_column,
            layers=moved_layers,
            cache_length=cache_length,
        )
        stack.enter_context(
            pre_hooks(
                families.attention_modules(lm.model),
                moved_layers,
                lambda layer: partial(mover.record_rotation, layer),
            )
        )
        stack.enter_context(intercepting_attention(lm.model, mover.attend))
        yield


def _target_columns(
    lengths: Sequence[int], spans: Spans, targets: Spans
) -> tuple[Tensor, int]:
    """Find the column whose position each column of a span takes.

    Returns:
        Target columns [B, C] of the C columns from the first to the last one that any prompt's span covers (a
        column outside its prompt's span has itself as the target), and the first of the C columns.
    """
    _, start, stop = span_columns(lengths, spans)
    _, target_start, target_stop = span_columns(lengths, targets)
    columns = torch.arange(max(lengths))
    in_span = (columns >= start) & (columns < stop)
    moved = torch.minimum(target_start + columns - start, target_stop - 1)
    target_columns = torch.where(in_span, moved, columns)
    covered = in_span.any(0).nonzero().flatten().tolist()
    if not covered:
        return target_columns[:, :0], 0
    return target_columns[:, covered[0] : covered[-1] + 1], covered[0]


@dataclass
class _KeyMover:
    """Attention in which the last tokens see keys rotated to the positions of other columns.

    Attributes:
        lm: The model.
        width: Columns of the batch of prompts, T.
        target_columns: Columns [B, C] whose positions the C columns from ``first_column`` on take.
        first_column: First column that any prompt's span covers.
        layers: Layers in which keys move.
        cache_length: Returns the columns that the cache held before the running forward.
        rotations: cos and sin [B, C, r] that move the keys, by layer.
        tables: cos and sin [B or 1, T', r] of the prompt's columns that were run so far, by layer.
    """

    lm: LM
    width: int
    target_columns: Tensor
    first_column: int
    layers: Collection[int]
    cache_length: Callable[[], int]
    rotations: dict[int, rope.Table] = field(default_factory=dict)
    tables: dict[int, rope.Table] = field(default_factory=dict)

    def record_rotation(
        self, layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Compute a layer's rotation once the forwards over the prompt have come to its last column."""
        table = families.rotary_of(kwargs)
        num_before = self.cache_length()
        if table is None or num_before >= self.width:
            return
        if num_before:
            if layer not in self.tables:
                raise ValueError("the beginning of the prompt was run before")
            # A method may run the last tokens of the prompt apart.
            parts = zip(self.tables[layer], table, strict=True)
            table = tuple(torch.cat([old, new.to(old)], 1) for old, new in parts)
        self.tables[layer] = table
        if table[0].shape[1] < self.width:
            return
        targets = self.target_columns
        targets = repeat_for_batch(targets, families.attention_input(args, kwargs))
        self.rotations[layer] = _rotation_to(table, targets, self.first_column)

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        following: AttentionFunction,
        **settings: Any,
    ) -> Any:
        """Attend to moved keys from the last prompt token on; see :data:`posbench.model.hooks.AttentionFunction`."""
        num_queries = query.shape[2]
        num_keys = key.shape[2]
        num_columns = self.cache_length() + num_queries
        num_moving = min(max(num_columns - (self.width - 1), 0), num_queries)
        if module.layer_idx not in self.layers or num_moving == 0:
            return following(module, query, key, value, mask, **settings)

        # A sliding-window layer holds the newest keys only.
        num_dropped = num_columns - num_keys
        moved_key = self._move(
            module.layer_idx, key, first_key=self.first_column - num_dropped
        )
        if num_moving == num_queries:
            return following(module, query, moved_key, value, mask, **settings)

        output, weights = following(module, query, key, value, mask, **settings)
        # The call that counts comes last: a listener keeps the latest.
        last_query = query[:, :, -num_moving:]
        last_rows = last_mask(mask, last_query, key)
        moved_output, moved_weights = following(
            module, last_query, moved_key, value, last_rows, **settings
        )
        output = torch.cat([output[:, :-num_moving], moved_output], dim=1)
        if moved_weights is None:
            return output, None
        weights = torch.cat([weights[:, :, :-num_moving], moved_weights], dim=2)
        return output, weights

    def _move(self, layer: int, key: Tensor, first_key: int) -> Tensor:
        """Copy rotated keys [B, G, S, d] and rotate the C of them from ``first_key`` on further.

        A negative ``first_key`` is the number of those C that the layer no longer holds.
        """
        num_dropped = max(-first_key, 0)
        start = max(first_key, 0)
        cos, sin = (
            table[:, num_dropped:].to(key.device) for table in self.rotations[layer]
        )
        span = slice(start, start + cos.shape[1])
        exact = key[:, :, span].to(cos.dtype)
        rotated = families.rotate(self.lm.model, layer, exact, (cos, sin))
        moved = key.clone()
        moved[:, :, span] = rotated.to(key.dtype)
        return moved


def _rotation_to(
    table: rope.Table, target_columns: Tensor, first_column: int
) -> rope.Table:
    """Rotation that takes keys from their own positions to those of other columns.

    Args:
        table: cos and sin that the layer rotates with, each [B or 1, T, r].
        target_columns: Columns [B, C] whose positions the keys of C columns take.
        first_column: The first of these C columns.

    Returns:
        cos and sin [B, C, r] of the difference of the angles, in at least float32; exactly 1 and 0 where a
        column is its own target.
    """
    num_prompts, num_columns = target_columns.shape
    cos, sin = (
        part.to(torch.promote_types(part.dtype, torch.float32)).expand(
            num_prompts, -1, -1
        )
        for part in table
    )
    index = target_columns[..., None].expand(-1, -1, cos.shape[-1])
    target_cos = cos.gather(1, index)
    target_sin = sin.gather(1, index)
    moved = slice(first_column, first_column + num_columns)
    cos = cos[:, moved]
    sin = sin[:, moved]
    # Some embeddings rescale as they rotate: both tables hold the factor.
    squared_factor = cos**2 + sin**2
    return (
        (target_cos * cos + target_sin * sin) / squared_factor,
        (target_sin * cos - target_cos * sin) / squared_factor,
    )
