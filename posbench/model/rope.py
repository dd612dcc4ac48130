"""A model's rotary embedding, changed inside a block: other angles, or keys rotated by hand in attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

from posbench.errors import UserError
from posbench.late import Module, PreTrainedModel, Tensor, nn, sdpa, torch
from posbench.model import families
from posbench.model.attention import Rotations, last_query_weights
from posbench.model.hooks import (
    AttentionFunction,
    find_cache,
    intercepting_attention,
    pre_hooks,
    replace_attribute,
)
from posbench.model.lm import LM

Table: TypeAlias = "tuple[Tensor, Tensor]"
"""cos and sin, each [B, T, r] with r the rotated coordinates of a head."""

_POSITIONS = "posbench_positions"
"""Attribute of a cache: by layer, the positions of the tokens that it holds, [B, S]."""
_MEMORY = "posbench_memory"
"""Attribute of a cache: by layer, the cached keys of the last step and the memory of its :data:`ByHand`."""
_BUSY = "posbench_rotates"
"""Attribute of a rotary embedding inside a block that changes it: how the block does so."""
BY_HAND = "ms_poe, moice, self_extend, rerope, dca, string_shift, pine"
"""Names of the methods that rotate by hand, for messages."""
MAX_SHARED_POSITIONS = 16_384
"""Most positions for which one call makes the tables of all layers, as in generation; more take much memory."""


@dataclass(frozen=True)
class RotaryCall:
    """One evaluation of a model's rotary embedding.

    Attributes:
        module: The rotary embedding.
        hidden: A tensor of the dtype and device that the tables take.
        positions: Positions of the tokens, [B, T].
        options: Further arguments, such as the kind of layer in Gemma 3.
        bases: Bases theta that the rows of the batch take in turn, None or empty for the model's own.
    """

    module: Module
    hidden: Tensor
    positions: Tensor
    options: dict[str, Any]
    bases: tuple[float | None, ...] = ()

    def table(
        self, positions: Tensor | None = None, base: float | None = None
    ) -> Table:
        """Return cos and sin of this call, at other positions or with another base theta where given.

        Args:
            positions: [B, T], or [B * H, T] with positions for each head; None: the call's.
            base: theta of all rows; None: the call's.

        Returns:
            cos and sin, [B, T, r] or [B * H, T, r].
        """
        if positions is None:
            positions = self.positions
        positions = positions.to(self.hidden.device)
        if base is not None:
            return self._table_of_base(positions, base)
        if self.bases:
            return self._table_of_bases(positions)
        with fixed_frequencies(self.module):
            return self.module.forward(self.hidden, positions, **self.options)

    def _table_of_base(self, positions: Tensor, base: float) -> Table:
        """Return cos and sin with the plain frequencies of one base: ``base ** -(i / n)`` for i = 0, ..., n - 1.

        Args:
            positions: Position ids, [B, T].
            base: The base.
        """
        buffers = self.module._buffers
        count = self.module.inv_freq.numel()
        indices = torch.arange(count, device=self.hidden.device, dtype=torch.float32)
        own_frequencies = buffers["inv_freq"]
        buffers["inv_freq"] = base ** -(indices / count)
        try:
            return self.module.forward(self.hidden, positions, **self.options)
        finally:
            buffers["inv_freq"] = own_frequencies

    def _table_of_bases(self, positions: Tensor) -> Table:
        """Return cos and sin for rows that take the N ``bases`` in turn; :meth:`table` has the shapes.

        Args:
            positions: Position ids, [1 or B, T], or per head [B * H, T].
        """
        rows = self.hidden.shape[0]
        # Positions that all rows share come as a single row.
        if positions.shape[0] == 1:
            positions = positions.expand(rows, -1)
        positions = positions.unflatten(0, (rows, -1))  # [B, H, T], or [B, 1, T]
        heads = positions.shape[1]
        call = replace(self, bases=())
        cos_of_bases = []
        sin_of_bases = []
        for index, base in enumerate(self.bases):
            rows_of_base = positions[index :: len(self.bases)].flatten(0, 1)
            cos, sin = call.table(rows_of_base, base)
            cos_of_bases.append(cos.unflatten(0, (-1, heads)))
            sin_of_bases.append(sin.unflatten(0, (-1, heads)))
        # [B / N, N, H, T, r] has the rows in their order.
        cos = torch.stack(cos_of_bases, dim=1).flatten(0, 2)
        sin = torch.stack(sin_of_bases, dim=1).flatten(0, 2)
        return cos, sin

    def identity(self) -> Table:
        """Tables that rotate by nothing."""
        cos, sin = self.table()
        return torch.ones_like(cos), torch.zeros_like(sin)


def fixed_frequencies(module: nn.Module) -> AbstractContextManager[None]:
    """Keep a rotary embedding's present frequencies inside a block, whatever positions it is given.

    Longrope (short or long factors) and dynamic RoPE choose them by the largest position they are given.
    Scaled positions would choose others, in each layer or head anew: the length of the prompt decides, once.
    """
    rope_type: Any = getattr(module, "rope_type", "default")
    # A type that the library does not know has no rule to choose by.
    unknown: Any = "kept"
    if isinstance(rope_type, dict):
        unknown = dict.fromkeys(rope_type, "kept")
    return replace_attribute(module, "rope_type", unknown)


class _TracedTable(tuple[Any, Any]):
    """A table that remembers the call it was made for: the method of an inner block starts from it.

    Inside the attention module it does so no longer: accelerate makes it anew on the layer's own GPU.
    """

    call: RotaryCall | None

    def __new__(cls, table: Iterable[Tensor], call: RotaryCall | None = None) -> Self:
        traced = super().__new__(cls, table)
        traced.call = call
        return traced

    def to(self, device: torch.device) -> _TracedTable:
        """The table on a device."""
        if self[0].device == device:
            return self
        return _TracedTable((self[0].to(device), self[1].to(device)), self.call)


def _traced_call(
    kwargs: Mapping[str, Any], call_of: Callable[[int], RotaryCall], layer: int
) -> RotaryCall:
    """The call that an attention module's table was made for, as the methods of outer blocks left it."""
    return getattr(kwargs["position_embeddings"], "call", None) or call_of(layer)


def rotary_module(model: PreTrainedModel) -> nn.Module | None:
    """Return the model's rotary embedding; None for models that have none, or from which it was removed."""
    decoder = model.base_model
    if not hasattr(decoder, "rotary_emb"):
        # Gemma 3 with vision keeps its decoder one step further down.
        decoder = getattr(decoder, "language_model", None)
    module = getattr(decoder, "rotary_emb", None)
    is_removed = getattr(module, families.REMOVED_ATTRIBUTE, False)
    # A Falcon with ALiBi holds a rotary embedding that it does not use.
    if is_removed or getattr(model.config, "alibi", False):
        return None
    return module


def own_base(model: PreTrainedModel) -> float:
    """Return the base theta of a model whose layers all rotate with the same one."""
    module: Any = rotary_module(model)
    return float(module.config.rope_parameters["rope_theta"])


def reach(base: float, pairs: int, longest: int) -> int:
    """Distance up to which a key like the query is expected to score above a random one, in tokens.

    For a query, a key close to it and a random one, all with independent coordinates of one variance, the lead expected
    at distance m is proportional to sum_i cos(m base^(-i / n)), i = 0, ..., n - 1. The reach is the largest distance up
    to which this sum is nowhere below 0.

    Args:
        base: The RoPE base.
        pairs: Rotated channel pairs of a head, n.
        longest: Largest distance to look at, in tokens.

    Returns:
        The reach, ``longest`` at most.

    Source: Men et al. 2024, Base of RoPE Bounds Context Length (arXiv 2405.14591), where the smallest base with a reach
    of a length is the lower bound for it.
    """
    distances = torch.arange(longest + 1, dtype=torch.float64)
    lead = torch.zeros_like(distances)
    for pair in range(pairs):
        lead += torch.cos(distances * base ** (-pair / pairs))
    behind = torch.nonzero(lead < 0)
    return int(behind[0]) - 1 if len(behind) else longest


def caution_about_bases(lm: LM, bases: Iterable[float | None], tokens: int) -> str:
    """Say that the smallest base reaches less far than the texts and than the model's own; empty where it does not.

    Args:
        lm: The model, with plain RoPE.
        bases: Bases theta; None is the model's own.
        tokens: Tokens of the longest text.
    """
    module: Any = rotary_module(lm.model)
    model_base = own_base(lm.model)
    smallest = min(model_base if base is None else base for base in bases)
    pairs = module.inv_freq.numel()
    distance = reach(smallest, pairs, tokens)
    if distance >= reach(model_base, pairs, tokens):
        return ""
    return (
        f"in theory (Men et al. 2024) a base of {smallest:,.0f} reaches {distance:,} tokens, and the model's own, "
        f"{model_base:,.0f}, more"
    )


def rotated_layers(model: PreTrainedModel) -> list[int]:
    """Return the indices of the layers that rotate queries and keys."""
    if rotary_module(model) is None:
        return []
    # In some families a flag of each attention module says whether it rotates.
    flag = families.family_of(model).rope_if
    modules = families.attention_modules(model)
    return [
        layer
        for layer, module in enumerate(modules)
        if not flag or getattr(module, flag)
    ]


def check_rope(
    lm: LM, method: str, *, plain: bool = False, by_hand: bool = False
) -> None:
    """Refuse a model to which a method of rotary embeddings does not apply.

    Args:
        lm: The model.
        method: Name of the method.
        plain: The method sets the base, and needs rotary embeddings whose angles are not rescaled.
        by_hand: The method rotates by hand, and needs attention through the library's functions.

    Raises:
        UserError: The method does not apply.
    """
    family = families.family_of(lm.model)
    module = rotary_module(lm.model)
    hint = "set method=scale_channel, which needs no rotary embedding"
    if not rotated_layers(lm.model):
        allowed = f"a model with rotary position embedding (RoPE); {lm.name} ({family.name}) has none"
    # Rescaled angles do not follow from the base alone.
    elif plain and getattr(module, "rope_type", "default") != "default":
        allowed = f"a model with plain RoPE; that of {lm.name} is {getattr(module, 'rope_type', None)}"
    elif getattr(module, _BUSY, None) == "by hand":
        # Rotating by hand would rotate twice.
        allowed = f"no method of rotary embeddings inside one that rotates by hand ({BY_HAND})"
        hint = "put that one last in the list; two of them do not go together"
    elif by_hand and not family.interface:
        allowed = f"a family that uses the attention functions of transformers; {family.name} does not"
    else:
        return
    raise UserError("method", method, allowed, hint)


@contextmanager
def latest_calls(model: PreTrainedModel) -> Iterator[Callable[[int], RotaryCall]]:
    """Record the rotary embedding's evaluations inside a block.

    Yields:
        A function from a layer to the latest evaluation whose tables that layer uses.
    """
    module = rotary_module(model)
    assert module is not None, "check() comes first"
    layer_types: Any = getattr(families.text_config(model), "layer_types", None)
    # By the type of the layers that they serve; None: all layers.
    latest: dict[str | None, RotaryCall] = {}

    def remember(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Table
    ) -> None:
        names = ("x", "position_ids", "layer_type")
        arguments = dict(zip(names, args, strict=False)) | kwargs
        layer_type = arguments.get("layer_type")
        options = {} if layer_type is None else {"layer_type": layer_type}
        latest[layer_type] = RotaryCall(
            module, arguments["x"], arguments["position_ids"], options
        )

    def call_of(layer: int) -> RotaryCall:
        return latest[None] if None in latest else latest[layer_types[layer]]

    with module.register_forward_hook(remember, with_kwargs=True):
        yield call_of


@contextmanager
def tables(
    model: PreTrainedModel,
    layers: Mapping[int, Callable[[RotaryCall], RotaryCall]],
    make: Callable[[RotaryCall], Table] = RotaryCall.table,
) -> Iterator[None]:
    """Rotate in some layers with other cos and sin inside a block. Inner blocks change what outer ones have changed.

    Args:
        model: The model.
        layers: By layer, the change to the call; layers that share a function share their tables.
        make: Makes the tables of a changed call.
    """
    # By function and type of layer: the changed call and its table.
    latest: dict[tuple[int, Any], tuple[RotaryCall, _TracedTable]] = {}
    changes = {id(change): change for change in layers.values()}
    with ExitStack() as stack:
        call_of = stack.enter_context(latest_calls(model))
        stack.enter_context(replace_attribute(rotary_module(model), _BUSY, "tables"))

        def update(layer: int, call: RotaryCall) -> None:
            """Make the table of a layer; in generation also the tables of all other layers."""
            change = layers[layer]
            changed_calls = {id(change): change(call)}
            # Inside another block of this kind every layer starts from a call of its own.
            # Tables of all layers are made together, but for long prompts, whose tables take memory.
            is_shared = make is RotaryCall.table and call is call_of(layer)
            if is_shared and call.positions.numel() <= MAX_SHARED_POSITIONS:
                all_calls = {key: change(call) for key, change in changes.items()}
                if all(_moves_only(call, other) for other in all_calls.values()):
                    changed_calls = all_calls
            if len(changed_calls) == 1:
                new_tables = [make(changed_calls[id(change)])]
            else:
                new_tables = _tables_at_once(list(changed_calls.values()))
            layer_type = call.options.get("layer_type")
            pairs = zip(changed_calls.items(), new_tables, strict=True)
            for (key, changed_call), table in pairs:
                latest[key, layer_type] = call, _TracedTable(table, changed_call)

        def make_hook(layer: int) -> Callable[..., Any]:
            def hook(
                _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
            ) -> tuple[Any, Any]:
                if kwargs.get("position_embeddings") is None:
                    return args, kwargs
                call = _traced_call(kwargs, call_of, layer)
                key = (id(layers[layer]), call.options.get("layer_type"))
                if key not in latest or latest[key][0] is not call:
                    update(layer, call)
                table = latest[key][1].to(kwargs["position_embeddings"][0].device)
                return args, kwargs | {"position_embeddings": table}

            return hook

        stack.enter_context(
            pre_hooks(families.attention_modules(model), layers, make_hook)
        )
        yield


def _moves_only(call: RotaryCall, changed: RotaryCall) -> bool:
    """Whether a changed call differs from the plain one in its positions alone."""
    return (
        not changed.bases
        and changed.module is call.module
        and changed.hidden is call.hidden
        and changed.options is call.options
    )


def _tables_at_once(calls: Sequence[RotaryCall]) -> list[Table]:
    """Return cos and sin of calls that differ in their positions alone, from one evaluation of the embedding.

    One for each layer would add a quarter to the operations of a generated token, which on a GPU set its time.
    """
    positions = torch.cat([call.positions.float() for call in calls])
    cos, sin = calls[0].table(positions)
    rows = calls[0].positions.shape[0]
    return list(zip(cos.split(rows), sin.split(rows), strict=True))


def divide_positions(
    scales: Mapping[int, float],
) -> dict[int, Callable[[RotaryCall], RotaryCall]]:
    """Return by layer a function that divides the positions of a rotary call by the layer's scale.

    Layers of one scale get the same function, by which callers see that they can share cos and sin.
    """

    def divide_by(scale: float) -> Callable[[RotaryCall], RotaryCall]:
        def divide(call: RotaryCall) -> RotaryCall:
            if scale == 1:
                return call
            # Angles of fractional positions need float32: positions are whole numbers otherwise.
            return replace(call, positions=call.positions.float() / scale)

        return divide

    by_scale = {scale: divide_by(scale) for scale in set(scales.values())}
    return {layer: by_scale[scale] for layer, scale in scales.items()}


ByHand: TypeAlias = "Callable[[HandRotation], Tensor]"
"""From one layer of one forward to the attention output [B, T, H, d]."""


@dataclass(frozen=True)
class HandRotation:
    """Inputs of a method that rotates by hand, for one layer of one forward.

    Attributes:
        layer: The layer.
        query: Un-rotated queries of the new tokens, [B, H, T, d].
        key: Un-rotated keys of all tokens that the layer holds, [B, G, S, d].
        query_positions: Positions of the queries, [B, T].
        key_positions: Positions of the keys, [B, S].
        call: The evaluation of the rotary embedding, for tables at any positions and base.
        value: Values of all tokens, [B, G, S, d].
        mask: The kernel's mask, see :func:`posbench.model.attention.attention_weights`.
        settings: The kernel's other arguments, among them ``scaling``.
        attend: The kernel, from rotated queries [B, H, T, d] and keys [B, G or H, S, d] to [B, T, H, d]; of the last
            query alone where these are its [B, H, 1, d]. A third argument, :class:`posbench.model.attention.Rotations`,
            replaces both where pairs differ in their rotation.
        last_row: Attention weights of the last query, [B, H, S], from the same two arguments.
        memory: Data that the function stored at the cache's last step in this layer; empty at a prompt.
        unchanged: Whether the cached keys are unchanged since that step: false after a beam search has reordered its
            rows, after a crop, or when another method has corrected them.
        model: The model.
    """

    layer: int
    query: Tensor
    key: Tensor
    query_positions: Tensor
    key_positions: Tensor
    call: RotaryCall
    value: Tensor
    mask: Tensor | None
    settings: Mapping[str, Any]
    attend: Callable[..., Tensor]
    last_row: Callable[[Tensor, Tensor], Tensor]
    memory: dict[str, Any]
    unchanged: bool
    model: PreTrainedModel

    def rotate(self, x: Tensor, table: Table) -> Tensor:
        """Return queries or keys [B, H, T, d] rotated by cos and sin of shape [B, T, r], or per head [B, H, T, r]."""
        cos, sin = (t.to(x.device) for t in table)
        if cos.ndim == 3:
            return families.rotate(self.model, self.layer, x, (cos, sin))
        # The family's own function rotates all heads alike: heads become rows.
        rows = x.flatten(0, 1).unsqueeze(1)
        table_of_rows = (cos.flatten(0, 1), sin.flatten(0, 1))
        rotated = families.rotate(self.model, self.layer, rows, table_of_rows)
        return rotated.reshape(x.shape)

    def rotate_by_each(self, x: Tensor, tables: Iterable[Table]) -> Iterator[Tensor]:
        """Yield queries or keys [B, H, T, d] rotated by one table [B, T, r] after another: ``x cos + x' sin``.

        A rotation is linear in cos and sin: x', which is x turned by a right angle, serves all tables.
        """
        turned: Tensor | None = None
        for table in tables:
            cos, sin = (t.to(x.device) for t in table)
            width = cos.shape[-1]
            if turned is None:
                right_angle = (torch.zeros_like(cos), torch.ones_like(sin))
                turned = self.rotate(x, right_angle)[..., :width]
            rotated = (x[..., :width] * cos[:, None]).addcmul_(turned, sin[:, None])
            if width < x.shape[-1]:
                # Only the first r coordinates of a head are rotated.
                rotated = torch.cat([rotated, x[..., width:]], dim=-1)
            # Tables may be of a wider type than the keys.
            yield rotated.to(x.dtype)


@contextmanager
def rotating_by_hand(
    model: PreTrainedModel, layers: Mapping[int, ByHand]
) -> Iterator[None]:
    """Let functions rotate the queries and keys of some layers inside a block, anew at every step.

    The cache then holds keys that are not rotated.

    Args:
        model: The model.
        layers: By layer, the function that rotates and attends.
    """
    unrotated = dict.fromkeys(layers, lambda call: call)
    with ExitStack() as stack:
        call_of = stack.enter_context(latest_calls(model))
        stack.enter_context(tables(model, unrotated, RotaryCall.identity))
        stack.enter_context(replace_attribute(rotary_module(model), _BUSY, "by hand"))
        attention = _HandAttention(model, layers, call_of, {})
        stack.enter_context(
            pre_hooks(families.attention_modules(model), layers, attention.make_hook)
        )
        stack.enter_context(intercepting_attention(model, attention.attend))
        yield


@dataclass(frozen=True)
class _Step:
    """Data passed from the hook before an attention module to the function inside it.

    Attributes:
        call: The evaluation of the rotary embedding.
        positions: Positions of all tokens, those in the cache first, [B, S].
        cache: The cache of the call, None without one.
        memory: See :class:`HandRotation`.
        unchanged: See :class:`HandRotation`.
    """

    call: RotaryCall
    positions: Tensor
    cache: Any
    memory: dict[str, Any]
    unchanged: bool


@dataclass(frozen=True)
class _HandAttention:
    """The hook before the attention modules, and the function before the kernel, of :func:`rotating_by_hand`."""

    model: PreTrainedModel
    layers: Mapping[int, ByHand]
    call_of: Callable[[int], RotaryCall]
    steps: dict[int, _Step]

    def make_hook(self, layer: int) -> Callable[..., None]:
        """Return the hook before a layer's attention module.

        It prepares the layer's :class:`_Step`: positions of cached and new keys, and what earlier steps remembered.
        """

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            cache = find_cache(kwargs)
            call = _traced_call(kwargs, self.call_of, layer)
            rows = families.attention_input(args, kwargs).shape[0]
            positions = call.positions.expand(rows, -1)
            past = 0 if cache is None else cache.get_seq_length(layer)
            if not past:
                self.steps[layer] = _Step(call, positions, cache, {}, unchanged=False)
                return
            past_positions = getattr(cache, _POSITIONS, {}).get(layer, positions[:, :0])
            past_positions = past_positions[:, :past].to(positions.device)
            keys, memory = getattr(cache, _MEMORY, {}).get(layer, (None, {}))
            self.steps[layer] = _Step(
                call,
                torch.cat([past_positions, positions], dim=1),
                cache,
                dict(memory),
                unchanged=keys is not None and cache.layers[layer].keys is keys,
            )

        return hook

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
        """Let the layer's function rotate queries and keys and attend, in place of a model's attention kernel.

        It is an attention function as of :data:`posbench.model.hooks.AttentionFunction`. The hook before the attention
        module has left the positions, the cache and the rotary embedding's call in ``steps``.

        Args:
            module: The attention module of a layer.
            query: Queries of the new tokens that are not rotated yet, [B, H, T, d].
            key: Keys of all tokens that are not rotated yet, [B, G, S, d].
            value: Values of all tokens, [B, G, S, d].
            mask: The kernel's mask; None: causal.
            following: The model's own kernel.
            **settings: Its other arguments.

        Returns:
            The output, [B, T, H, d], and the attention weights, None where the kernel gives none.

        Raises:
            ValueError: The cache holds keys that were computed outside the block, whose positions are not known.
        """
        layer = module.layer_idx
        if layer not in self.layers:
            return following(module, query, key, value, mask, **settings)
        step = self.steps[layer]
        if step.positions.shape[1] < key.shape[2]:
            reason = "this cache was filled outside the block, or has a fixed size"
            raise ValueError(f"{reason}: run the prompt inside")
        weights = None

        def kernel(
            rotated_query: Tensor,
            rotated_key: Tensor,
            rotations: Rotations | None = None,
        ) -> Tensor:
            nonlocal weights
            more = {} if rotations is None else {"rotations": rotations}
            # Keys may be rotated per head; then values are repeated as well.
            groups = rotated_key.shape[1] // value.shape[1]
            values = sdpa.repeat_kv(value, groups)
            ungrouped: AbstractContextManager[None] = nullcontext()
            if groups > 1:
                ungrouped = replace_attribute(module, "num_key_value_groups", 1)
            query_mask = mask
            if mask is not None and mask.ndim == 4:
                query_mask = mask[:, :, -rotated_query.shape[2] :]
            with ungrouped:
                output, weights = following(
                    module,
                    rotated_query,
                    rotated_key,
                    values,
                    query_mask,
                    **settings,
                    **more,
                )
            return output

        # Positions of all keys; the newest are those of the queries.
        positions = step.positions.to(query.device)
        output = self.layers[layer](
            HandRotation(
                layer=layer,
                query=query,
                key=key,
                query_positions=positions[:, -query.shape[2] :],
                key_positions=positions[:, -key.shape[2] :],
                call=step.call,
                value=value,
                mask=mask,
                settings=settings,
                attend=kernel,
                last_row=lambda q, k: last_query_weights(q, k, mask, **settings),
                memory=step.memory,
                unchanged=step.unchanged,
                model=self.model,
            )
        )
        # For the next step: positions of the cached keys, and what the function remembers.
        if step.cache is not None:
            keys = step.cache.layers[layer].keys
            _set_for_layer(step.cache, _POSITIONS, layer, step.positions)
            _set_for_layer(step.cache, _MEMORY, layer, (keys, step.memory))
        return output, weights


def _set_for_layer(cache: Any, name: str, layer: int, value: Any) -> None:
    """Set the entry of a layer in a dictionary that is an attribute of a cache."""
    # A copy of a cache shares its attributes: replace, never change.
    setattr(cache, name, {**getattr(cache, name, {}), layer: value})
