"""A prefill shared by several continuations: its cache, and the activations that methods asked to record."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posbench.late import PreTrainedModel, Tensor, nn, torch
from posbench.model import families
from posbench.model.hooks import pre_hooks

if TYPE_CHECKING:
    from transformers import DynamicCache

PREFIX_ATTRIBUTE = "posbench_prefix"
"""Attribute of a cache with the :class:`Prefix` that it belongs to."""


@dataclass
class Prefix:
    """A prefill of P tokens that serves any number of continuations, each on a fork of its cache.

    Attributes:
        cache: Keys and values of the P tokens, never changed by a fork.
        channels: The C recorded channels of the attention input.
        inputs: By layer, the attention input at these channels, [B, P, C]; all channels, [B, P, D], where keys are not
            linear in the input.
        rotary: By layer, (cos, sin) of the P positions; None in models without rotary embedding.
        parts: Intermediate results that a method keeps for the next continuation.
    """

    cache: DynamicCache
    channels: tuple[int, ...] = ()
    inputs: dict[int, Tensor] = field(default_factory=dict)
    rotary: dict[int, tuple[Tensor, Tensor] | None] = field(default_factory=dict)
    parts: dict[tuple[Any, ...], Tensor] = field(default_factory=dict, repr=False)

    @property
    def tokens(self) -> int:
        """P, padding included."""
        return int(self.cache.get_seq_length())


@contextmanager
def recording_inputs(
    model: PreTrainedModel,
    prefix: Prefix,
    channels: Sequence[int],
    layers: Collection[int],
) -> Iterator[None]:
    """Record the attention input and the rotation of some layers in the next forward inside the block.

    Args:
        model: The model.
        prefix: Takes the recording in ``inputs`` and ``rotary``.
        channels: Channels of the attention input to record.
        layers: Layers to record.
    """

    def make_hook(layer: int) -> Any:
        def record(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> None:
            hidden = families.attention_input(args, kwargs)
            if families.keys_are_linear(model, layer):
                if hidden.device not in indices:
                    indices[hidden.device] = hidden.new_tensor(
                        channels, dtype=torch.long
                    )
                hidden = hidden.index_select(-1, indices[hidden.device])
            prefix.inputs[layer] = hidden
            prefix.rotary[layer] = families.rotary_of(kwargs)

        return record

    prefix.channels = tuple(channels)
    # Copied to a GPU once: a copy in each layer would wait for the work of all layers before.
    indices: dict[torch.device, Tensor] = {}
    with pre_hooks(families.attention_modules(model), layers, make_hook):
        yield
