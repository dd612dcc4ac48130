"""One RoPE scale per attention head (Ms-PoE): position-aware heads keep positions further apart."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from posbench.errors import UserError
from posbench.late import Tensor, sdpa, torch
from posbench.methods.base import Method, Needs
from posbench.model import rope
from posbench.model.lm import LM
from posbench.model.rope import HandRotation, Table
from posbench.schema import Positive, Scale, Whole


@dataclass(frozen=True, kw_only=True)
class MsPoE(Method):
    """Divide the positions that a head sees by a ratio of its own, from the smallest to the largest of
    ``ratios``.

    A head is position-aware when many keys get an outlying share of its attention: S_P is the share of keys
    whose weight, in the row of the last prompt token, reaches ``alpha`` times the row's mean. The most
    position-aware head of a layer gets the smallest ratio, the least aware the largest, in equal steps; equal
    heads go by their index.

    A call with an empty cache is a prompt and ranks the heads, for every row of the batch apart; later calls on its
    cache keep that order. Together with scale_channel, which runs a prompt in two parts, the ranking comes from the
    token before the last.

    Args:
        first_layer: First layer that is changed, 0-based; the paper's 3rd layer is 2.
        alpha: Threshold of an outlying weight, in multiples of the mean attention weight.
        variant: ``paper``, or ``official`` for the differences of the released program: scores come from
            queries and keys before the rotation (paper: rotated as in the unmodified model), a weight has to
            exceed the bound (paper: or equal it), the largest of H ratios stays one step below the maximum
            (paper: reaches it), heads are matched with ratios in the inverse order, and a grouped key is
            rotated with the ratio of its group's first query head, so that the group's other heads lose
            relative positions (paper: every query head sees keys with its own ratio).
        order: ``rank`` (the paper's intent: the head of rank i gets ratio i), ``permutation`` (released
            program: head i gets the ratio whose number is the head of rank i), ``reversed`` (its head type
            "normal": head i of H gets ratio H - 1 - i, whatever the scores); None: the variant's.

    Source: Zhang et al. 2024 (Ms-PoE), Algorithm 1; released program VITA-Group/Ms-PoE, a46c3d1. Differs from source:
    batches, with a ranking per row; a new prompt is ranked anew without a reset.
    """

    needs: ClassVar[Needs] = Needs(rope=True, by_hand=True)

    ratios: tuple[Scale, Scale] = (1.2, 1.8)
    first_layer: Whole = 2
    alpha: Positive = 3.0
    variant: Literal["paper", "official"] = "paper"
    order: Literal["rank", "permutation", "reversed"] | None = None

    @property
    def needs_prompt(self) -> bool:
        """Whether heads are scored on the last prompt token; see :class:`Method`."""
        return self.order != "reversed"

    def check(self, lm: LM) -> None:
        """Refuse a model without RoPE, ratios in the wrong order, and a first layer behind the last one with RoPE.

        Raises:
            UserError: States which.
        """
        super().check(lm)
        smallest, largest = self.ratios
        if smallest > largest:
            hint = "set method.ratios=[1.2,1.8]"
            value = list(self.ratios)
            raise UserError("method.ratios", value, "[smallest, largest]", hint)
        last = rope.rotated_layers(lm.model)[-1]
        if self.first_layer > last:
            allowed = f"0 to {last}, the last layer of {lm.name} with RoPE"
            hint = "set method.first_layer=2, or 0"
            raise UserError("method.first_layer", self.first_layer, allowed, hint)

    def neutral(self) -> Self:
        """Ratio 1 in every head."""
        return replace(self, ratios=(1.0, 1.0))

    def changed(self, lm: LM) -> AbstractContextManager[None]:
        """See :meth:`Method.changed`."""
        rotated = rope.rotated_layers(lm.model)
        layers = [layer for layer in rotated if layer >= self.first_layer]
        return rope.rotating_by_hand(lm.model, dict.fromkeys(layers, self._attend))

    def head_ratios(self, outlying: Tensor) -> Tensor:
        """Return the ratio by which each head divides positions, evenly spaced between the two of ``ratios``.

        With the paper's order (rank), the head with most outlying keys gets the smallest ratio. The released program's
        (permutation) gives head i the ratio whose number is the head of rank i; reversed looks at no scores.

        Args:
            outlying: Number of outlying keys of each head, shape (B, H).

        Returns:
            Shape (B, H), float32.
        """
        num_heads = outlying.shape[1]
        order = self.order
        if order is None:
            order = "permutation" if self.variant == "official" else "rank"
        if order == "reversed":
            reversed_heads = torch.arange(num_heads - 1, -1, -1, device=outlying.device)
            ratio_index = reversed_heads.expand(outlying.shape)
        else:
            ratio_index = outlying.argsort(dim=1, descending=True, stable=True)
        if order == "rank":
            ratio_index = ratio_index.argsort(dim=1)  # the rank of each head
        # The released program stops one step below the largest ratio.
        num_steps = num_heads if self.variant == "official" else max(num_heads - 1, 1)
        low, high = self.ratios
        return low + (high - low) * ratio_index.float() / num_steps

    def outlying(self, rotation: HandRotation) -> Tensor:
        """Return for each head how many keys the last token attends to with an outlying weight, shape (B, H).

        A weight is outlying if it is more than alpha times the mean (paper: at least).

        Args:
            rotation: Queries and keys of one layer before they are rotated, and the means to rotate them.
        """
        query = rotation.query[:, :, -1:]
        key = rotation.key
        # The official program compares queries and keys before they are rotated.
        if self.variant == "paper":
            cos, sin = rotation.call.table()
            query = rotation.rotate(query, (cos[:, -1:], sin[:, -1:]))
            key = rotation.rotate(key, (cos, sin))
        weights = rotation.last_row(query, key)
        # Equal scores give the mean to every key that the row may see, and nothing to padding.
        mean = rotation.last_row(torch.zeros_like(query), key)
        bound = self.alpha * mean
        above = weights >= bound if self.variant == "paper" else weights > bound
        return (above & (mean > 0)).sum(-1)

    def _attend(self, rotation: HandRotation) -> Tensor:
        """Return the attention output of a layer in which each head has its own positions, shape (B, T, H, d).

        Args:
            rotation: Queries, keys and positions of the layer, and what earlier steps left in its memory.
        """
        memory = rotation.memory
        if "ratios" not in memory:
            memory["ratios"] = self.head_ratios(self.outlying(rotation))
        ratios = memory["ratios"]
        group_size = rotation.query.shape[1] // rotation.key.shape[1]
        # The official program rotates the keys of a group once, with the ratio of its first query head; the
        # paper's method rotates them once for each of its query heads.
        key_ratios = ratios
        key_copies = group_size
        if self.variant == "official":
            key_ratios = ratios[:, ::group_size]
            key_copies = 1

        # Ratios stay as they are, so keys that were rotated at an earlier step are good for this one.
        old_keys = memory.get("keys") if rotation.unchanged else None
        num_old = 0
        if old_keys is not None:
            num_old = rotation.key.shape[2] - rotation.query.shape[2]
        new_keys = sdpa.repeat_kv(rotation.key[:, :, num_old:], key_copies)
        new_positions = rotation.key_positions[:, num_old:]
        tables = _head_tables(rotation, new_positions, key_ratios)
        keys = rotation.rotate(new_keys, tables)
        if old_keys is not None:
            # A sliding window has dropped the oldest keys.
            old_keys = old_keys[:, :, old_keys.shape[2] - num_old :]
            keys = torch.cat([old_keys, keys], dim=2)
        memory["keys"] = keys

        same_heads = key_ratios.shape == ratios.shape
        if not same_heads or new_keys.shape[2] != rotation.query.shape[2]:
            tables = _head_tables(rotation, rotation.query_positions, ratios)
        return rotation.attend(rotation.rotate(rotation.query, tables), keys)


def _head_tables(rotation: HandRotation, positions: Tensor, ratios: Tensor) -> Table:
    """Cosines and sines of positions (B, T) that each head divides by its ratio (B, H): (B, H, T, r) each."""
    scaled = positions[:, None] / ratios[:, :, None]
    cos, sin = rotation.call.table(scaled.flatten(0, 1))
    return cos.unflatten(0, scaled.shape[:2]), sin.unflatten(0, scaled.shape[:2])
