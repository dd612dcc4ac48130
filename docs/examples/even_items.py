"""A method that reads where the items stand: every item gets more nearly the same attention."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from posbench.methods import Method
from posbench.methods.base import Needs
from posbench.methods.scale_channel import check_layers
from posbench.model.attention import last_query_weights
from posbench.model.hooks import intercepting_attention
from posbench.model.items import reading_items
from posbench.model.lm import LM
from posbench.schema import Share


@dataclass(frozen=True, kw_only=True)
class EvenItems(Method):
    """Even out the last token's attention to the items of the prompt, in each head.

    With attention a_i to item i (the sum over its tokens) and its mean m over the items, the weights of the item's
    tokens are multiplied by (m / a_i)^strength. All other weights stay as they are.

    Args:
        strength: 0 changes nothing; at 1 all items get the same attention.
        layers: First and last layer, 0-based; None: all.
    """

    needs: ClassVar[Needs] = Needs(by_hand=True, items=True)

    strength: Share = 0.5
    layers: tuple[int, int] | None = None

    def neutral(self) -> Self:
        """Strength 0."""
        return replace(self, strength=0.0)

    def check(self, lm: LM) -> None:
        """Refuse layers that the model does not have."""
        super().check(lm)
        check_layers(lm, "method.layers", self.layers)

    @contextmanager
    def changed(self, lm: LM) -> Iterator[None]:
        """Change the attention of the last token behind the kernel."""
        first, last = self.layers or (0, lm.layers - 1)
        with reading_items(lm) as batch:

            def attend(
                module: Any,
                query: Tensor,
                key: Tensor,
                value: Tensor,
                mask: Tensor | None,
                *,
                following: Callable[..., Any],
                **settings: Any,
            ) -> Any:
                output, weights = following(module, query, key, value, mask, **settings)
                # A sliding-window layer may have dropped keys of the items.
                is_complete = key.shape[2] >= batch.width
                if self.strength and first <= module.layer_idx <= last and is_complete:
                    row = last_query_weights(query, key, mask, **settings)
                    values = value.repeat_interleave(
                        query.shape[1] // value.shape[1], 1
                    )
                    evened = self._evened(row, batch.rows).to(values.dtype)
                    # [B, H, 1, T] x [B, H, T, d]; the kernel's output is [B, Tq, H, d].
                    new = evened.unsqueeze(2) @ values
                    output = torch.cat([output[:, :-1], new.transpose(1, 2)], dim=1)
                return output, weights

            with intercepting_attention(lm.model, attend):
                yield

    def _evened(self, row: Tensor, items: list[list[tuple[int, int]]]) -> Tensor:
        """The last token's weights [B, H, T] with those of the items evened out."""
        evened = row.clone()
        for number, spans in enumerate(items):
            totals = torch.stack(
                [row[number, :, start:end].sum(-1) for start, end in spans]
            )
            factors = (totals.mean(0) / totals.clamp(min=1e-12)) ** self.strength
            for (start, end), factor in zip(spans, factors, strict=True):
                evened[number, :, start:end] *= factor.unsqueeze(-1)
        return evened
