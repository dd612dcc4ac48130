"""A model's rotary embedding, changed inside a block: other angles per layer, or keys that are rotated by hand in attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posbench import arch
from posbench.errors import UserError
from posbench.hooks import Attend, attending, replaced

if TYPE_CHECKING:
    from posbench.lm import LM

Table = tuple[Tensor, Tensor]
"""cos and sin, each [B, T, r] with r the rotated coordinates of a head."""

_POSITIONS = "posbench_positions"


@dataclass(frozen=True)
class Call:
    """One evaluation of a model's rotary embedding.

    Attributes:
        module: The rotary embedding.
        hidden: A tensor of the dtype and device that the tables take.
        positions: Positions of the tokens, [B, T].
        options: Further arguments, such as the kind of layer in Gemma 3.
        bases: Bases theta that the rows of the batch take in turn, None for the model's own; empty: the model's own in all rows.
    """

    module: nn.Module
    hidden: Tensor
    positions: Tensor
    options: dict[str, Any]
    bases: tuple[float | None, ...] = ()

    def table(self, positions: Tensor | None = None, base: float | None = None) -> Table:
        """The tables at other positions, which may be fractional, [B, T], or with another base theta in all rows."""
        at = self.positions if positions is None else positions
        if base is None and self.bases:
            # Positions that all rows share come as a single row.
            at, alone = at.expand(self.hidden.shape[0], -1), replace(self, bases=())
            parts = [alone.table(at[row :: len(self.bases)], base) for row, base in enumerate(self.bases)]
            cos, sin = (torch.stack(kind, dim=1).flatten(0, 1) for kind in zip(*parts, strict=True))
            return cos, sin
        if base is None:
            return self.module.forward(self.hidden, at, **self.options)
        count = self.module.inv_freq.numel()
        powers = torch.arange(count, device=self.hidden.device, dtype=torch.float32) / count
        with replaced_buffer(self.module, "inv_freq", base**-powers):
            return self.module.forward(self.hidden, at, **self.options)

    def identity(self) -> Table:
        """Tables that rotate by nothing."""
        cos, sin = self.table()
        return torch.ones_like(cos), torch.zeros_like(sin)


class _Tables(tuple[Tensor, Tensor]):
    """Tables that remember the call they were made for, so that the method of an inner block starts from it."""

    call: Call


def _given(kwargs: Mapping[str, Any], call_of: Callable[[int], Call], layer: int) -> Call:
    """The call that an attention module's tables were made for, as the methods of outer blocks left it."""
    tables = kwargs["position_embeddings"]
    return tables.call if isinstance(tables, _Tables) else call_of(layer)


@contextmanager
def replaced_buffer(module: nn.Module, name: str, value: Tensor) -> Iterator[None]:
    """Put another tensor in the place of a module's buffer for the duration of a block."""
    before = module._buffers[name]
    module._buffers[name] = value
    try:
        yield
    finally:
        module._buffers[name] = before


def rotary_module(model: PreTrainedModel) -> nn.Module | None:
    """The model's rotary embedding; None in models that have none, or have removed it."""
    base = model.base_model
    # Gemma 3 with vision keeps its decoder one step further down.
    module = getattr(base, "rotary_emb", None) or getattr(getattr(base, "language_model", None), "rotary_emb", None)
    unused = getattr(model.config, "alibi", False) or getattr(module, arch.REMOVED, False)
    return None if unused else module


def rotated_layers(model: PreTrainedModel) -> list[int]:
    """The layers that rotate queries and keys."""
    if rotary_module(model) is None:
        return []
    flag = arch.family_of(model).rope_if
    return [i for i, attention in enumerate(arch.attention_modules(model)) if not flag or getattr(attention, flag)]


def check(lm: LM, method: str, *, plain: bool = False, by_hand: bool = False) -> None:
    """Refuse a model to which a method of rotary embeddings does not apply.

    Args:
        lm: The model.
        method: Name of the method, for the message.
        plain: Whether the method sets the base, which says nothing under a rescaled embedding.
        by_hand: Whether it rotates in attention, which has to run through the library's attention functions.

    Raises:
        UserError: The model has no rotary embedding (ALiBi, NoPE), or not of the kind that is needed.
    """
    family, module = arch.family_of(lm.model), rotary_module(lm.model)

    def refuse(allowed: str) -> None:
        raise UserError(field="method", value=method, allowed=allowed, hint="method=scale_channel needs no rotary embedding")

    if not rotated_layers(lm.model):
        refuse(f"a model with rotary position embedding (RoPE); {lm.name} ({family.name}) has none")
    if plain and getattr(module, "rope_type", "default") != "default":
        refuse(f"a model with plain RoPE; that of {lm.name} is {getattr(module, 'rope_type', None)}")
    if by_hand and not family.interface:
        refuse(f"a family whose attention runs through the library's attention functions; {family.name} does not")


@contextmanager
def calls_of(model: PreTrainedModel) -> Iterator[Callable[[int], Call]]:
    """Remember the rotary embedding's evaluations; yields the function from a layer to the latest one that serves it."""
    module = rotary_module(model)
    assert module is not None, "check() comes first"
    latest: dict[Any, Call] = {}
    kinds: Any = getattr(arch.text_config(model), "layer_types", None)

    def remember(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Table) -> None:
        given = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
        options = {"layer_type": given["layer_type"]} if given.get("layer_type") is not None else {}
        latest[given.get("layer_type")] = Call(module, given["x"], given["position_ids"], options)

    handle = module.register_forward_hook(remember, with_kwargs=True)
    try:
        yield lambda layer: latest[None] if None in latest else latest[kinds[layer]]
    finally:
        handle.remove()


@contextmanager
def tables(
    model: PreTrainedModel, layers: Mapping[int, Callable[[Call], Call]], make: Callable[[Call], Table] = Call.table
) -> Iterator[None]:
    """Rotate in some layers with other tables. An inner block changes what the outer ones have made of the call.

    Args:
        model: The model; see :func:`check`.
        layers: Per layer, what to change in the call. Layers that share a function share their tables.
        make: The tables of a changed call.
    """
    made: dict[tuple[int, Any], tuple[Call, _Tables]] = {}
    with ExitStack() as stack:
        call_of = stack.enter_context(calls_of(model))

        def hook_of(layer: int, change: Callable[[Call], Call]) -> Callable[..., Any]:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
                if kwargs.get("position_embeddings") is None:
                    return args, kwargs
                call = _given(kwargs, call_of, layer)
                key = (id(change), call.options.get("layer_type"))
                if key not in made or made[key][0] is not call:
                    changed = change(call)
                    made[key] = (call, _remembering(make(changed), changed))
                found, where = made[key][1], kwargs["position_embeddings"][0].device
                if found[0].device != where:
                    found = _remembering((found[0].to(where), found[1].to(where)), found.call)
                return args, kwargs | {"position_embeddings": found}

            return hook

        attentions = arch.attention_modules(model)
        for layer, change in layers.items():
            stack.callback(attentions[layer].register_forward_pre_hook(hook_of(layer, change), with_kwargs=True).remove)
        yield


def _remembering(table: Table, call: Call) -> _Tables:
    tables = _Tables(table)
    tables.call = call
    return tables


def scaled(scales: Mapping[int, float]) -> dict[int, Callable[[Call], Call]]:
    """Per layer, the function that divides positions by its scale; layers of one scale share their tables."""

    def divide(scale: float) -> Callable[[Call], Call]:
        # Angles of fractional positions need float32: positions are whole numbers otherwise.
        return lambda call: call if scale == 1 else replace(call, positions=call.positions.float() / scale)

    by_scale = {scale: divide(scale) for scale in set(scales.values())}
    return {layer: by_scale[scale] for layer, scale in scales.items()}


ByHand = Callable[["HandRotation"], Tensor]


@dataclass(frozen=True)
class HandRotation:
    """What a method that rotates by hand gets for one layer of one forward.

    Attributes:
        layer: The layer.
        query: Un-rotated queries of the new tokens, [B, H, T, d].
        key: Un-rotated keys of all tokens that the layer holds, one per query head, [B, H, S, d].
        query_positions: [B, T].
        key_positions: [B, S].
        mask: The kernel's mask; see :data:`posbench.hooks.Attend`.
        call: The evaluation of the rotary embedding, for tables at any positions and base.
        attend: Kernel from rotated queries [B, H, T, d] and keys [B, H, S, d] to the output [B, T, H, d].
        model: The model.
    """

    layer: int
    query: Tensor
    key: Tensor
    query_positions: Tensor
    key_positions: Tensor
    mask: Tensor | None
    call: Call
    attend: Callable[[Tensor, Tensor], Tensor]
    model: PreTrainedModel

    def rotate(self, x: Tensor, table: Table) -> Tensor:
        """Rotate queries or keys [B, H, T, d] with tables [B, T, r], or per head [B, H, T, r]."""
        cos, sin = table
        if cos.ndim == 3:
            return arch.rotate(self.model, self.layer, x, table)
        # The family's own function rotates all heads alike: heads become rows.
        flat = x.flatten(0, 1).unsqueeze(1)
        rows = tuple(t.expand(*x.shape[:3], t.shape[-1]).flatten(0, 1) for t in (cos, sin))
        return arch.rotate(self.model, self.layer, flat, rows).reshape(x.shape)  # type: ignore[arg-type]


@contextmanager
def by_hand(model: PreTrainedModel, layers: Mapping[int, ByHand]) -> Iterator[None]:
    """Keep keys un-rotated in the cache of some layers, and let a function rotate queries and keys at every step.

    Args:
        model: The model; see :func:`check`.
        layers: Per layer, the function from a :class:`HandRotation` to the attention output [B, T, H, d].
    """
    held: dict[int, Tensor] = {}
    calls: dict[int, Call] = {}
    with ExitStack() as stack:
        call_of = stack.enter_context(calls_of(model))
        stack.enter_context(tables(model, dict.fromkeys(layers, lambda call: call), Call.identity))

        def positions(layer: int) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                calls[layer] = _given(kwargs, call_of, layer)
                cache, now = kwargs.get("past_key_values"), calls[layer].positions
                batch = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).shape[0]
                now = now.expand(batch, -1)
                before = {} if cache is None or cache.get_seq_length(layer) == 0 else getattr(cache, _POSITIONS, {})
                held[layer] = torch.cat([before[layer].to(now.device), now], dim=1) if layer in before else now
                if cache is not None:
                    # A copy of a cache shares its attributes: replace, never change.
                    setattr(cache, _POSITIONS, {**getattr(cache, _POSITIONS, {}), layer: held[layer]})

            return hook

        def attend(
            module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, following: Attend, **rest: Any
        ) -> Any:
            layer = module.layer_idx
            if layer not in layers:
                return following(module, query, key, value, mask, **rest)
            groups = query.shape[1] // key.shape[1]
            keys, values = (x.repeat_interleave(groups, dim=1) for x in (key, value))
            extra: list[Any] = []

            def kernel(q: Tensor, k: Tensor) -> Tensor:
                # Keys and values are spread over the query heads already.
                with ExitStack() as one:
                    if hasattr(module, "num_key_value_groups"):
                        one.enter_context(replaced(module, "num_key_value_groups", 1))
                    out, *others = following(module, q, k, values, mask, **rest)
                extra[:] = others
                return out

            rotation = HandRotation(
                layer, query, keys, held[layer][:, -query.shape[2] :], held[layer][:, -key.shape[2] :], mask, calls[layer],
                kernel, model,
            )  # fmt: skip
            out = layers[layer](rotation)
            return (out, *(extra or [None]))

        attentions = arch.attention_modules(model)
        for layer in layers:
            stack.callback(attentions[layer].register_forward_pre_hook(positions(layer), with_kwargs=True).remove)
        stack.enter_context(attending(model, attend))
        yield
