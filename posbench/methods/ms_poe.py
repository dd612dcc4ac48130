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

    A call with an empty cache is a prompt and ranks the heads, for every row of the batch apart; later calls
    on its cache keep that order. Together with scale_channel, which runs a prompt in two parts, the ranking
    comes from the token before the last.

    Args:
        first_layer: First layer that is changed, 0-based; the paper's 3rd layer is 2.
        alpha: What counts as outlying, in multiples of the mean attention weight.
        variant: ``paper``, or ``official`` for what the released program does differently: scores come from
            queries and keys before the rotation (paper: rotated as in the unmodified model), a weight has to
            exceed the bound (paper: or equal it), the largest of H ratios stays one step below the maximum
            (paper: reaches it), heads are matched with ratios in the inverse order, and a grouped key is
            rotated with the ratio of its group's first query head, so that the group's other heads lose
            relative positions (paper: every query head sees keys with its own ratio).
        order: ``rank`` (the paper's intent: the head of rank i gets ratio i), ``permutation`` (released
            program: head i gets the ratio whose number is the head of rank i), ``reversed`` (its head type
            "normal": head i of H gets ratio H - 1 - i, whatever the scores); None: that of the variant.

    Source: Zhang et al. 2024 (Ms-PoE), Algorithm 1; released program VITA-Group/Ms-PoE, a46c3d1.
    Differs from source: batches, with a ranking per row; a new prompt is ranked anew without a reset.
    """

    needs: ClassVar[Needs] = Needs(rope=True, by_hand=True)

    ratios: tuple[Scale, Scale] = (1.2, 1.8)
    first_layer: Whole = 2
    alpha: Positive = 3.0
    variant: Literal["paper", "official"] = "paper"
    order: Literal["rank", "permutation", "reversed"] | None = None

    @property
    def needs_prompt(self) -> bool:
        """See :class:`Method`; not where no head is scored."""
        return self.order != "reversed"

    def check(self, lm: LM) -> None:
        """See :meth:`Method.check`."""
        super().check(lm)
        given = list(self.ratios)
        if given[0] > given[1]:
            raise UserError(
                "method.ratios",
                given,
                "[smallest, largest]",
                "set method.ratios=[1.2,1.8]",
            )
        last = rope.rotated_layers(lm.model)[-1]
        if self.first_layer > last:
            allowed = f"0 to {last}, the last layer of {lm.name} with RoPE"
            raise UserError(
                "method.first_layer",
                self.first_layer,
                allowed,
                "set method.first_layer=2, or 0",
            )

    def neutral(self) -> Self:
        """Ratio 1 in every head."""
        return replace(self, ratios=(1.0, 1.0))

    def changed(self, lm: LM) -> AbstractContextManager[None]:
        """See :meth:`Method.changed`."""
        layers = [
            layer
            for layer in rope.rotated_layers(lm.model)
            if layer >= self.first_layer
        ]
        return rope.by_hand(lm.model, dict.fromkeys(layers, self._attend))

    def head_ratios(self, outlying: Tensor) -> Tensor:
        """The ratio of each head, [B, H] in float32, from its number of outlying keys, [B, H]."""
        heads = outlying.shape[1]
        if self.order == "reversed":
            number = torch.arange(heads - 1, -1, -1, device=outlying.device).expand(
                outlying.shape
            )
        else:
            ranked = outlying.argsort(dim=1, descending=True, stable=True)
            direct = self.order == "permutation" or (
                self.order is None and self.variant == "official"
            )
            number = ranked if direct else ranked.argsort(dim=1)
        steps = heads if self.variant == "official" else max(heads - 1, 1)
        low, high = self.ratios
        return low + (high - low) * number.float() / steps

    def outlying(self, rotation: HandRotation) -> Tensor:
        """Per head, how many keys the last token attends to with an outlying weight, [B, H]."""
        query = rotation.query[:, :, -1:]
        key = rotation.key
        if self.variant == "paper":
            cos, sin = rotation.call.table()
            query = rotation.rotate(query, (cos[:, -1:], sin[:, -1:]))
            key = rotation.rotate(key, (cos, sin))
        weights = rotation.last_row(query, key)
        # Equal scores give the mean to every key that the row may see, and nothing to padding.
        mean = rotation.last_row(torch.zeros_like(query), key)
        above = (
            weights >= self.alpha * mean
            if self.variant == "paper"
            else weights > self.alpha * mean
        )
        return (above & (mean > 0)).sum(-1)

    def _attend(self, rotation: HandRotation) -> Tensor:
        memory = rotation.memory
        groups = rotation.query.shape[1] // rotation.key.shape[1]
        if "ratios" not in memory:
            memory["ratios"] = self.head_ratios(self.outlying(rotation))
        # The keys of a group once, or once for each of its query heads.
        every, copies = (groups, 1) if self.variant == "official" else (1, groups)

        def table(positions: Tensor, every: int = 1) -> Table:
            fractional = positions[:, None] / memory["ratios"][:, ::every, None]
            cos, sin = rotation.call.table(fractional.flatten(0, 1))
            rows = fractional.shape[:2]
            return cos.unflatten(0, rows), sin.unflatten(0, rows)

        # Ratios stay as they are, so keys that were rotated at an earlier step are good for this one.
        rotated = memory.get("keys") if rotation.unchanged else None
        known = (
            rotation.key.shape[2] - rotation.query.shape[2]
            if rotated is not None
            else 0
        )
        new = sdpa.repeat_kv(rotation.key[:, :, known:], copies)
        tables = table(rotation.key_positions[:, known:], every)
        key = rotation.rotate(new, tables)
        if rotated is not None:
            key = torch.cat([rotated[:, :, rotated.shape[2] - known :], key], dim=2)
        if every > 1 or key.shape[2] - known != rotation.query.shape[2]:
            tables = table(rotation.query_positions)
        memory["keys"] = key
        return rotation.attend(rotation.rotate(rotation.query, tables), key)
