"""Attention of a prompt's last tokens to scaled keys, inside one forward of the whole prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, NamedTuple

from posbench.late import F, PreTrainedModel, Tensor, torch
from posbench.model import families
from posbench.model.hooks import (
    AttentionFunction,
    functions_in_front,
    intercepting_attention,
    pre_hooks,
)

KERNELS = ("sdpa", "eager")
"""Attention kernels with a mask over pairs of query and key, of which they take some rows."""
Table = tuple[Tensor, Tensor]
"""cos and sin."""


class _Columns(NamedTuple):
    """A channel's contribution to unrotated queries and keys: its columns of their projections, head by head.

    Attributes:
        query: [1, H, 1, d].
        key: [1, G, 1, d].
    """

    query: Tensor
    key: Tensor


@dataclass
class LastRows:
    """Scales channels of the attention input for the last tokens of prompts that are read in one forward.

    In a scaled layer all tokens attend unscaled at first. Then each channel p adds ``(s - 1) h_p RoPE(W[:, p])`` to
    the keys, in place, and to the last tokens' queries, and these attend once more. The keys stay scaled in the
    cache: no earlier token reads them again.

    Attributes:
        model: A model for which :meth:`fits` holds.
        channels: The channels p of the attention input.
        factor: The factor s.
        layers: The scaled layers.
        tokens: Whose inputs are scaled, see :class:`posbench.methods.scale_channel.ScaleChannel`.
    """

    model: PreTrainedModel
    channels: Sequence[int]
    factor: float
    layers: Sequence[int]
    tokens: Literal["both", "last", "earlier"] = "both"
    # By layer, the attention input and its rotation, from the hook before a module to the function inside it.
    _inputs: dict[int, tuple[Tensor, Table | None]] = field(default_factory=dict)
    # By width of the rotation, and then by layer and channel, the columns, and the same turned by a right angle.
    _columns: dict[int, dict[tuple[int, int], tuple[_Columns, _Columns]]] = field(
        default_factory=dict
    )

    @staticmethod
    def fits(model: PreTrainedModel, layers: Sequence[int]) -> bool:
        """Whether the last rows can be computed by themselves: linear layers, and nothing in front of the kernel."""
        return (
            families.family_of(model).interface
            and families.text_config(model)._attn_implementation in KERNELS
            and not functions_in_front(model)
            and families.queries_and_keys_are_linear(model, layers)
        )

    @contextmanager
    def scaling(self, num_rows: int) -> Iterator[None]:
        """Scale the channels for the last ``num_rows`` tokens of prompts that run inside the block, without gradients.

        The attention of these rows is computed once more with scaled queries and keys, and replaces their output.
        """

        def make_hook(layer: int) -> Any:
            def keep_input(
                _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
            ) -> None:
                table = families.rotary_of(kwargs)
                if not families.rotates(self.model, layer):
                    table = None
                self._inputs[layer] = families.attention_input(args, kwargs), table

            return keep_input

        def attend(
            module: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            mask: Tensor | None,
            *,
            following: AttentionFunction,
            **settings: Any,
        ) -> Any:
            # All rows unscaled first; then the last ones again, with scaled queries and keys.
            output, weights = following(module, query, key, value, mask, **settings)
            if module.layer_idx in self._inputs:
                rows = slice(-num_rows, None)
                last_query = self._scale(module.layer_idx, query[:, :, rows], key)
                mask = last_mask(mask, last_query, key)
                output[:, rows] = following(
                    module, last_query, key, value, mask, **settings
                )[0]
            return output, weights

        modules = families.attention_modules(self.model)
        try:
            with (
                pre_hooks(modules, self.layers, make_hook),
                intercepting_attention(self.model, attend),
            ):
                yield
        finally:
            self._inputs.clear()

    def _scale(self, layer: int, last_query: Tensor, key: Tensor) -> Tensor:
        """Scale a layer's keys in place, and return scaled queries.

        Queries and keys are linear in the layer's input. So what a scaled channel adds to them is (factor - 1) times
        the channel's value times its column of the weights, which then rotates as they do.

        Args:
            layer: The layer.
            last_query: Queries of the last n tokens, [B, H, n, d].
            key: Keys of all T tokens, [B, G, T, d].

        Returns:
            The scaled queries, [B, H, n, d].
        """
        hidden, table = self._inputs.pop(layer)
        columns = self._read_columns(layer, key.shape[-1], table)
        first_row = key.shape[2] - last_query.shape[2]
        last = slice(first_row, None)
        scaled = {"both": slice(None), "last": last, "earlier": slice(first_row)}
        key_tokens = scaled[self.tokens]
        if table is not None:
            cos, sin = _per_coordinate(table, key.shape[-1])
        for channel in self.channels:
            # (factor - 1) times the channel's value, [B, 1, T, 1].
            share = (hidden[..., channel] * (self.factor - 1))[:, None, :, None]
            # The column as it is, and turned by a right angle.
            straight, turned = columns[layer, channel]
            terms = [(share, straight)]
            if table is not None:
                # A rotation is linear in cos and sin.
                terms = [(share * cos, straight), (share * sin, turned)]
            for amount, column in terms:
                key[:, :, key_tokens].addcmul_(amount[:, :, key_tokens], column.key)
                if self.tokens != "earlier":
                    last_amount = amount[:, :, last]
                    last_query = last_query.addcmul(last_amount, column.query)
        return last_query

    def _read_columns(
        self, rotating_layer: int, head_size: int, table: Table | None
    ) -> dict[tuple[int, int], tuple[_Columns, _Columns]]:
        """Return the weights of each layer and channel in queries and keys, as they are and turned by a right angle.

        They are read at the first call, all layers in a few operations.

        Args:
            rotating_layer: A layer that rotates, whose rotation is used for all.
            head_size: Width of a head.
            table: cos and sin of that layer; None without rotation.

        Returns:
            By layer and channel: the columns as they are, and turned. Both make up any rotation of them.
        """
        width = 0 if table is None else table[0].shape[-1]
        if width in self._columns:
            return self._columns[width]
        by_device: dict[torch.device, list[tuple[int, int, Tensor, Tensor]]] = {}
        for layer, channel in product(self.layers, self.channels):
            query, key = families.query_key_columns(self.model, layer, channel)
            group = by_device.setdefault(key.device, [])
            group.append((layer, channel, query, key))
        columns = self._columns[width] = {}
        for group in by_device.values():
            parts = [column for *_, query, key in group for column in (query, key)]
            straight = torch.cat(parts).view(len(group), -1, 1, head_size)
            turned = straight
            if width:
                zeros = straight.new_zeros(1, 1, width)
                right_angle = (zeros, torch.ones_like(zeros))
                turned = families.rotate(
                    self.model, rotating_layer, straight, right_angle
                )
                turned = F.pad(turned[..., :width], (0, head_size - width))
            for i, (layer, channel, query, _) in enumerate(group):
                heads = len(query) // head_size
                columns[layer, channel] = (
                    _Columns(straight[i : i + 1, :heads], straight[i : i + 1, heads:]),
                    _Columns(turned[i : i + 1, :heads], turned[i : i + 1, heads:]),
                )
        return columns


def _per_coordinate(table: Table, head_size: int) -> Table:
    """Return cos and sin for all d coordinates of a head, [B or 1, 1, T, d].

    Coordinates that are not rotated get cos = 1 and sin = 0.

    Args:
        table: cos and sin, [B or 1, T, r] each.
        head_size: Coordinates of a head, d.
    """
    cos, sin = table
    num_plain = head_size - cos.shape[-1]
    if num_plain:
        cos = F.pad(cos, (0, num_plain), value=1.0)
        sin = F.pad(sin, (0, num_plain))
    return cos[:, None], sin[:, None]


def last_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the attention mask's rows of the last queries; None where the only query sees all keys.

    Args:
        mask: Mask of all rows, [B, 1, T, T], or None for a causal one.
        query: The last queries, [B, H, rows, d].
        key: All keys, [B, G, T, d].
    """
    num_rows = query.shape[2]
    if mask is not None:
        return mask[:, :, -num_rows:]
    if num_rows == 1:
        return None
    num_keys = key.shape[2]
    shut = query.new_full((num_rows, num_keys), float("-inf"))
    return shut.triu(num_keys - num_rows + 1)[None, None]
