"""A model's rotary embedding, changed inside a block: other angles, or keys rotated by hand in attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

from posbench.errors import UserError
from posbench.late import PreTrainedModel, Tensor, nn, sdpa, torch
from posbench.model import families
from posbench.model.attention import last_row
from posbench.model.hooks import Attend, attending, before_each, replaced
from posbench.model.lm import LM

Table: TypeAlias = "tuple[Tensor, Tensor]"
"""cos and sin, each [B, T, r] with r the rotated coordinates of a head."""

_POSITIONS = "posbench_positions"
_MEMORY = "posbench_memory"
_BUSY = "posbench_rotates"


@dataclass(frozen=True)
class Call:
    """One evaluation of a model's rotary embedding."""

    module: nn.Module  # the rotary embedding
    hidden: Tensor  # a tensor of the dtype and device that the tables take
    positions: Tensor  # positions of the tokens, [B, T]
    options: dict[str, Any]  # further arguments, such as the kind of layer in Gemma 3
    # bases theta that the rows of the batch take in turn, None or empty for the model's own
    bases: tuple[float | None, ...] = ()

    def table(
        self, positions: Tensor | None = None, base: float | None = None
    ) -> Table:
        """The tables at other positions [B, T] (or of each head, [B * H, T]), or with another base theta."""
        at = self.positions if positions is None else positions.to(self.hidden.device)
        if base is None and self.bases:
            rows = self.hidden.shape[0]
            alone = replace(self, bases=())
            # Positions that all rows share come as a single row.
            at = (at.expand(rows, -1) if at.shape[0] == 1 else at).unflatten(
                0, (rows, -1)
            )
            count = len(self.bases)
            parts = [
                alone.table(at[i::count].flatten(0, 1), base)
                for i, base in enumerate(self.bases)
            ]
            kinds = zip(*parts, strict=True)
            split = (
                [part.unflatten(0, (-1, at.shape[1])) for part in kind]
                for kind in kinds
            )
            cos, sin = (torch.stack(kind, dim=1).flatten(0, 2) for kind in split)
            return cos, sin
        if base is None:
            with steady(self.module):
                return self.module.forward(self.hidden, at, **self.options)
        buffers = self.module._buffers
        count = self.module.inv_freq.numel()
        powers = (
            torch.arange(count, device=self.hidden.device, dtype=torch.float32) / count
        )
        before, buffers["inv_freq"] = buffers["inv_freq"], base**-powers
        try:
            return self.module.forward(self.hidden, at, **self.options)
        finally:
            buffers["inv_freq"] = before

    def identity(self) -> Table:
        """Tables that rotate by nothing."""
        cos, sin = self.table()
        return torch.ones_like(cos), torch.zeros_like(sin)


def steady(module: nn.Module) -> AbstractContextManager[None]:
    """Inside the block a rotary embedding keeps the frequencies that it took for the model's own positions.

    Longrope (short or long factors) and dynamic RoPE choose them by the largest position they are given.
    Scaled positions would choose others, in each layer or head anew: the length of the prompt decides, once.
    """
    kind = getattr(module, "rope_type", "default")
    return replaced(
        module,
        "rope_type",
        dict.fromkeys(kind, "kept") if isinstance(kind, dict) else "kept",
    )


class _Tables(tuple[Any, Any]):
    """Tables that remember the call they were made for: the method of an inner block starts from it.

    Inside the attention module they do so no longer: accelerate makes them anew on the layer's own GPU.
    """

    call: Call | None

    def __new__(cls, table: Iterable[Tensor], call: Call | None = None) -> Self:
        made = super().__new__(cls, table)
        made.call = call
        return made


def _given(
    kwargs: Mapping[str, Any], call_of: Callable[[int], Call], layer: int
) -> Call:
    """The call that an attention module's tables were made for, as the methods of outer blocks left it."""
    return getattr(kwargs["position_embeddings"], "call", None) or call_of(layer)


def rotary_module(model: PreTrainedModel) -> nn.Module | None:
    """The model's rotary embedding; None in models that have none, or have removed it."""
    base = model.base_model
    # Gemma 3 with vision keeps its decoder one step further down.
    decoder = (
        base if hasattr(base, "rotary_emb") else getattr(base, "language_model", None)
    )
    module = getattr(decoder, "rotary_emb", None)
    unused = getattr(model.config, "alibi", False) or getattr(
        module, families.REMOVED, False
    )
    return None if unused else module


def rotated_layers(model: PreTrainedModel) -> list[int]:
    """The layers that rotate queries and keys."""
    if rotary_module(model) is None:
        return []
    flag = families.family_of(model).rope_if
    modules = families.attention_modules(model)
    return [
        layer
        for layer, module in enumerate(modules)
        if not flag or getattr(module, flag)
    ]


def check(lm: LM, method: str, *, plain: bool = False, by_hand: bool = False) -> None:
    """Raise UserError for a model to which a method of rotary embeddings does not apply.

    A method that sets the base needs ``plain`` rotary embeddings, whose angles are not rescaled; one that
    rotates ``by_hand`` needs attention through the library's functions.
    """
    family = families.family_of(lm.model)
    module = rotary_module(lm.model)

    def refuse(
        allowed: str, hint: str = "method=scale_channel needs no rotary embedding"
    ) -> None:
        raise UserError("method", method, allowed, hint)

    if not rotated_layers(lm.model):
        refuse(
            f"a model with rotary position embedding (RoPE); {lm.name} ({family.name}) has none"
        )
    if plain and getattr(module, "rope_type", "default") != "default":
        refuse(
            f"a model with plain RoPE; that of {lm.name} is {getattr(module, 'rope_type', None)}"
        )
    # One that rotates by hand would rotate what the other has rotated.
    if getattr(module, _BUSY, None) == "by hand":
        inside = "no method of rotary embeddings inside one that rotates head by head (ms_poe, moice)"
        refuse(inside, "put that one last")
    if by_hand and not family.interface:
        refuse(
            f"a family whose attention runs through the library's functions; {family.name} does not"
        )


@contextmanager
def calls_of(model: PreTrainedModel) -> Iterator[Callable[[int], Call]]:
    """Yields the function from a layer to the rotary embedding's latest evaluation that serves it."""
    module = rotary_module(model)
    assert module is not None, "check() comes first"
    latest: dict[Any, Call] = {}
    kinds: Any = getattr(families.text_config(model), "layer_types", None)

    def remember(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Table
    ) -> None:
        given = (
            dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
        )
        options = (
            {"layer_type": given["layer_type"]}
            if given.get("layer_type") is not None
            else {}
        )
        latest[given.get("layer_type")] = Call(
            module, given["x"], given["position_ids"], options
        )

    with module.register_forward_hook(remember, with_kwargs=True):
        yield lambda layer: latest[None] if None in latest else latest[kinds[layer]]


@contextmanager
def tables(
    model: PreTrainedModel,
    layers: Mapping[int, Callable[[Call], Call]],
    make: Callable[[Call], Table] = Call.table,
) -> Iterator[None]:
    """Rotate in some layers with other tables. An inner block changes what the outer ones made of the call.

    Per layer, ``layers`` holds what to change in the call; layers that share a function share their tables.
    """
    made: dict[tuple[int, Any], tuple[Call, _Tables]] = {}
    with ExitStack() as stack:
        call_of = stack.enter_context(calls_of(model))
        stack.enter_context(replaced(rotary_module(model), _BUSY, "tables"))

        def hook_of(layer: int) -> Callable[..., Any]:
            change = layers[layer]

            def hook(
                _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
            ) -> tuple[Any, Any]:
                if kwargs.get("position_embeddings") is None:
                    return args, kwargs
                call = _given(kwargs, call_of, layer)
                key = (id(change), call.options.get("layer_type"))
                if key not in made or made[key][0] is not call:
                    changed = change(call)
                    made[key] = call, _Tables(make(changed), changed)
                found = made[key][1]
                where = kwargs["position_embeddings"][0].device
                if found[0].device != where:
                    found = _Tables(
                        (found[0].to(where), found[1].to(where)), found.call
                    )
                return args, kwargs | {"position_embeddings": found}

            return hook

        stack.enter_context(
            before_each(families.attention_modules(model), layers, hook_of)
        )
        yield


def scaled(scales: Mapping[int, float]) -> dict[int, Callable[[Call], Call]]:
    """Per layer, the function that divides positions by its scale; layers of one scale share their tables."""

    def divide(scale: float) -> Callable[[Call], Call]:
        # Angles of fractional positions need float32: positions are whole numbers otherwise.
        return lambda call: (
            call
            if scale == 1
            else replace(call, positions=call.positions.float() / scale)
        )

    by_scale = {scale: divide(scale) for scale in set(scales.values())}
    return {layer: by_scale[scale] for layer, scale in scales.items()}


ByHand: TypeAlias = "Callable[[HandRotation], Tensor]"
"""From what a layer gives to the attention output [B, T, H, d]."""


@dataclass(frozen=True)
class HandRotation:
    """What a method that rotates by hand gets for one layer of one forward."""

    layer: int
    query: Tensor  # un-rotated queries of the new tokens, [B, H, T, d], at ``query_positions`` [B, T]
    # un-rotated keys of all tokens that the layer holds, [B, G, S, d], at ``key_positions`` [B, S]
    key: Tensor
    query_positions: Tensor
    key_positions: Tensor
    call: Call  # the evaluation of the rotary embedding, for tables at any positions and base
    # kernel from rotated queries [B, H, T, d] and keys [B, G or H, S, d] to [B, T, H, d]
    attend: Callable[[Tensor, Tensor], Tensor]
    # attention weights of the last query, [B, H, S], from the same two arguments
    last_row: Callable[[Tensor, Tensor], Tensor]
    # whatever the function left here at the cache's last step in this layer; empty at a prompt
    memory: dict[str, Any]
    # whether the cached keys are those of that step: not so after a beam search has reordered its rows, after
    # a crop, or when another method has corrected them
    unchanged: bool
    model: PreTrainedModel

    def rotate(self, x: Tensor, table: Table) -> Tensor:
        """Rotate queries or keys [B, H, T, d] with tables [B, T, r], or per head [B, H, T, r]."""
        cos, sin = (t.to(x.device) for t in table)
        if cos.ndim == 3:
            return families.rotate(self.model, self.layer, x, (cos, sin))
        # The family's own function rotates all heads alike: heads become rows.
        flat = cos.flatten(0, 1), sin.flatten(0, 1)
        return families.rotate(
            self.model, self.layer, x.flatten(0, 1).unsqueeze(1), flat
        ).reshape(x.shape)

    def rotate_by_each(self, x: Tensor, tables: Iterable[Table]) -> Iterator[Tensor]:
        """Rotate queries or keys [B, H, T, d] with one table [B, T, r] after another: ``x cos + x' sin``.

        A rotation is linear in cos and sin: x', which is x turned by a right angle, serves all tables.
        """
        turned: Tensor | None = None
        for table in tables:
            cos, sin = (t.to(x.device) for t in table)
            if turned is None:
                turned = self.rotate(x, (torch.zeros_like(cos), torch.ones_like(sin)))[
                    ..., : cos.shape[-1]
                ]
                part = x[..., : cos.shape[-1]]
                rest = x[..., cos.shape[-1] :]
            rotated = (part * cos[:, None]).addcmul_(turned, sin[:, None])
            yield torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


@dataclass(frozen=True)
class _Held:
    """What the hook before an attention module leaves for the function inside it."""

    call: Call
    positions: Tensor
    cache: Any
    memory: dict[str, Any]
    unchanged: bool


@contextmanager
def by_hand(model: PreTrainedModel, layers: Mapping[int, ByHand]) -> Iterator[None]:
    """Keep keys un-rotated in the cache of some layers; functions rotate queries and keys at every step."""
    with ExitStack() as stack:
        call_of = stack.enter_context(calls_of(model))
        stack.enter_context(
            tables(model, dict.fromkeys(layers, lambda call: call), Call.identity)
        )
        stack.enter_context(replaced(rotary_module(model), _BUSY, "by hand"))
        hands = _Hands(model, layers, call_of, {})
        stack.enter_context(
            before_each(families.attention_modules(model), layers, hands.hold)
        )
        stack.enter_context(attending(model, hands.attend))
        yield


@dataclass(frozen=True)
class _Hands:
    """What :func:`by_hand` puts before the attention modules and in front of the kernel."""

    model: PreTrainedModel
    layers: Mapping[int, ByHand]
    call_of: Callable[[int], Call]
    held: dict[int, _Held]

    def hold(self, layer: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # GPT-NeoX has another name for it.
            cache = kwargs.get("past_key_values", kwargs.get("layer_past"))
            call = _given(kwargs, self.call_of, layer)
            now = call.positions.expand(
                families.attention_input(args, kwargs).shape[0], -1
            )
            past = cache.get_seq_length(layer) if cache is not None else 0
            if cache is None or not past:
                self.held[layer] = _Held(call, now, cache, {}, unchanged=False)
                return
            before = (
                getattr(cache, _POSITIONS, {})
                .get(layer, now[:, :0])[:, :past]
                .to(now.device)
            )
            keys, memory = getattr(cache, _MEMORY, {}).get(layer, (None, {}))
            unchanged = keys is not None and cache.layers[layer].keys is keys
            self.held[layer] = _Held(
                call, torch.cat([before, now], dim=1), cache, dict(memory), unchanged
            )

        return hook

    def attend(self, module: Any, *given: Any, following: Attend, **rest: Any) -> Any:
        query, key, value, mask = given
        layer = module.layer_idx
        others = None
        if layer not in self.layers:
            return following(module, *given, **rest)
        now = self.held[layer]
        if now.positions.shape[1] < key.shape[2]:
            filled = "this cache was filled outside the block, or has a fixed size"
            raise ValueError(f"{filled}: run the prompt inside")

        def kernel(q: Tensor, k: Tensor) -> Tensor:
            nonlocal others
            groups = k.shape[1] // value.shape[1]
            with (
                replaced(module, "num_key_value_groups", 1)
                if groups > 1
                else nullcontext()
            ):
                out, others = following(
                    module, q, k, sdpa.repeat_kv(value, groups), mask, **rest
                )
            return out

        positions = now.positions.to(query.device)
        places = positions[:, -query.shape[2] :], positions[:, -key.shape[2] :]
        kernels = kernel, lambda q, k: last_row(q, k, mask, **rest)
        past = now.memory, now.unchanged
        out = self.layers[layer](
            HandRotation(
                layer, query, key, *places, now.call, *kernels, *past, self.model
            )
        )
        if now.cache is not None:
            # A copy of a cache shares its attributes: replace, never change.
            kept = {
                _POSITIONS: now.positions,
                _MEMORY: (now.cache.layers[layer].keys, now.memory),
            }
            for name, fresh in kept.items():
                setattr(now.cache, name, {**getattr(now.cache, name, {}), layer: fresh})
        return out, others
