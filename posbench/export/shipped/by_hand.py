# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The posbench authors
"""A language model whose attention rotates queries and keys itself, under other
positions or bases than the model's own: Ms-PoE (Zhang et al. 2024, Algorithm 1) or
MoICE (Lin et al. 2024).

``AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`` loads it;
nothing but transformers is needed. ``posbench`` in config.json holds the ``method``,
its constants, and the ``indices`` of the changed layers; ``where`` names the model's
``layers``, their ``attention`` and the ``rotary`` embedding.

Keys stay un-rotated in the cache. Shapes: B batch, H query heads, G key heads, T new
tokens, S all tokens, d size of a head, r rotated coordinates of a head, N bases.
"""

import inspect
import sys
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers import LlamaConfig as BaseConfig
from transformers import LlamaForCausalLM as Base
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# "cache" from transformers 5.24 on; "layer_past" in GPT-NeoX, Bloom and others before.
CACHE_NAMES = ("cache", "past_key_values", "layer_past")

if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError("transformers 5 or later: earlier ones read no rope_parameters")


def cache_name(names: Any) -> str:
    """What a forward calls its cache, by its parameters or the arguments of a call."""
    return next((name for name in CACHE_NAMES if name in names), "past_key_values")


class PosbenchConfig(BaseConfig):
    """The config of the unmodified model, and ``posbench``."""

    model_type = "posbench"


class Router(nn.Module):
    """Scores of N bases from queries (MoICE)."""

    def __init__(self, width: int, bases: int) -> None:
        super().__init__()
        self.gate_1 = nn.Linear(width, bases, bias=False)
        self.gate_2 = nn.Linear(bases, bases, bias=False)
        self.gate_3 = nn.Linear(width, bases, bias=False)

    def forward(self, query: Tensor) -> Tensor:
        """Logits [B, H, T, N] of the bases for queries [B, H, T, d]."""
        return self.gate_2(nn.functional.silu(self.gate_1(query)) * self.gate_3(query))


class LayerState(NamedTuple):
    """What :func:`attend` needs to rotate in one layer.

    Attributes:
        constants: The method and its constants, ``posbench`` in config.json.
        positions: Positions of all tokens, [B, S].
        prompt_values: Values computed on the prompt that hold for generated tokens too.
        rotary_tables: Function from positions [B, T], and optionally another base, to
            cos and sin, each [B, T, r].
    """

    constants: dict[str, Any]
    positions: Tensor
    prompt_values: dict[str, Any]
    rotary_tables: Any


class PosbenchForCausalLM(Base):
    """The model with its own rotation.

    Ms-PoE ranks heads on the prompt, which is a call with an empty cache.
    """

    config_class = PosbenchConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        constants = config.posbench
        text_config = config.get_text_config()
        modules = constants["where"]
        # By kind of layer: an empty tensor of the hidden states' dtype and device,
        # and the positions [B, T] of the current forward.
        self.rotary_inputs: dict[Any, tuple[Tensor, Tensor]] = {}
        rotary = self.get_submodule(modules["rotary"])
        rotary.register_forward_hook(self.record_rotary_inputs, with_kwargs=True)
        layers = self.get_submodule(modules["layers"])
        layer_kinds = getattr(text_config, "layer_types", None) or [None] * len(layers)
        for index in constants["indices"]:
            attention = getattr(layers[index], modules["attention"])
            hook = partial(self.prepare_layer, layer_kinds[index])
            attention.register_forward_pre_hook(hook, with_kwargs=True)
            if constants.get("router"):
                attention.router = Router(constants["router"], len(constants["bases"]))
        # `attend` wraps the kernel in use, under a name that only this file has.
        self.kernel_name = text_config._attn_implementation
        self.attention_name = f"posbench_{self.kernel_name}_{__name__}"
        AttentionInterface.register(
            self.attention_name, partial(attend, self.kernel_name)
        )
        AttentionMaskInterface.register(
            self.attention_name, ALL_MASK_ATTENTION_FUNCTIONS[self.kernel_name]
        )
        self.set_attn_implementation(self.attention_name)

    def record_rotary_inputs(
        self, rotary: Any, args: Any, kwargs: Any, tables: Any
    ) -> None:
        """Forward hook of the rotary embedding: record the positions [B, T] of a forward.

        Models with several kinds of layers call their rotary embedding once per kind.
        """
        names = ("x", "position_ids", "layer_type")
        arguments = dict(zip(names, args, strict=False)) | kwargs
        # Of the hidden states only dtype and device matter.
        like_hidden = arguments["x"].new_empty(0)
        layer_kind = arguments.get("layer_type")
        self.rotary_inputs[layer_kind] = (like_hidden, arguments["position_ids"])

    def prepare_layer(
        self, layer_kind: str | None, attention: Any, args: Any, kwargs: Any
    ) -> Any:
        """Hook before a layer's attention: identity tables, and the state for `attend`.

        With cos = 1 and sin = 0 the layer rotates nothing and caches un-rotated keys.

        Args:
            layer_kind: Kind of the layer, where the model has several.
            attention: The attention module.
            args: Its arguments.
            kwargs: Its arguments by name, among them the cache.

        Returns:
            The changed arguments.
        """
        if attention.config._attn_implementation != self.attention_name:
            raise ValueError(
                "choose the attention kernel in from_pretrained(attn_implementation=...)"
            )
        if layer_kind not in self.rotary_inputs:
            layer_kind = None
        cache = kwargs.get(cache_name(kwargs))
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        layer = attention.layer_idx
        positions = self.rotary_inputs[layer_kind][1]
        positions = positions.expand(hidden.shape[0], -1).to(hidden.device)
        prompt_values: dict[str, Any] = {}
        num_cached = 0
        if cache is not None:
            num_cached = cache.get_seq_length(layer)
        if num_cached:
            cached_positions, prompt_values = cache.posbench[layer]
            positions = torch.cat([cached_positions[:, :num_cached], positions], dim=1)
        if cache is not None:
            # A copy of a cache shares this dictionary: replace it, never change it.
            states = getattr(cache, "posbench", {})
            cache.posbench = {**states, layer: (positions, prompt_values)}
        attention.posbench_state = LayerState(
            self.config.posbench,
            positions,
            prompt_values,
            partial(self.rotary_tables, layer_kind),
        )
        cos, sin = kwargs["position_embeddings"]
        identity = (torch.ones_like(cos), torch.zeros_like(sin))
        return args, {**kwargs, "position_embeddings": identity}

    def rotary_tables(
        self, layer_kind: str | None, positions: Tensor, base: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin [B, T, r] at positions [B, T].

        Args:
            layer_kind: Kind of the layer, where the model has several.
            positions: The positions, which may be fractions.
            base: theta of the rotation; None: the model's own frequencies.
        """
        rotary = self.get_submodule(self.config.posbench["where"]["rotary"])
        like_hidden = self.rotary_inputs[layer_kind][0]
        original = rotary._buffers.get("inv_freq")
        if base is not None:
            count = original.numel()
            indices = torch.arange(count, device=original.device, dtype=torch.float32)
            rotary._buffers["inv_freq"] = base ** -(indices / count)
        # Without its decorators, which would choose other frequencies by the largest
        # position: those chosen for the prompt stay.
        forward = inspect.unwrap(type(rotary).forward)
        options = {"layer_type": layer_kind} if layer_kind else {}
        try:
            with torch.no_grad():
                return forward(
                    rotary, like_hidden, positions.to(like_hidden.device), **options
                )
        finally:
            if base is not None:
                rotary._buffers["inv_freq"] = original


class AttentionCall(NamedTuple):
    """The attention of one layer under a method.

    Attributes:
        module: The model's attention module.
        query: Un-rotated queries, [B, H, T, d].
        key: Un-rotated keys, [B, G, S, d].
        value: Values, [B, G, S, d].
        mask: The mask as the kernel takes it; None for a plain causal one.
        kernel: The attention kernel.
        kernel_options: Further arguments of the kernel.
        query_positions: [B, T].
        key_positions: [B, S].
        state: Constants, positions and tables of the layer.
    """

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    kernel: Any
    kernel_options: dict[str, Any]
    query_positions: Tensor
    key_positions: Tensor
    state: LayerState

    def run_kernel(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The attention's output, [B, T, H, d]."""
        return self.kernel(
            self.module, query, key, value, self.mask, **self.kernel_options
        )[0]


def attend(
    kernel_name: str,
    attention: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    **kernel_options: Any,
) -> Any:
    """Attention under the method in its layers, and unmodified in all others.

    Args:
        kernel_name: Name of the kernel, as in ``attn_implementation``.
        attention: The model's attention module.
        query: Queries, [B, H, T, d]; un-rotated in the layers of the method.
        key: Keys, [B, G, S, d]; un-rotated in the layers of the method.
        value: Values, [B, G, S, d].
        mask: The mask as the kernel takes it.
        **kernel_options: Further arguments of the kernel.

    Returns:
        The output [B, T, H, d], and the attention weights or None.
    """
    eager = sys.modules[type(attention).__module__].eager_attention_forward
    kernel = ALL_ATTENTION_FUNCTIONS.get_interface(kernel_name, eager)
    if not hasattr(attention, "posbench_state"):
        return kernel(attention, query, key, value, mask, **kernel_options)
    state: LayerState = attention.posbench_state
    if state.positions.shape[1] < key.shape[2]:
        raise ValueError("a cache that grows is needed (DynamicCache)")
    call = AttentionCall(
        attention,
        query,
        key,
        value,
        mask,
        kernel,
        kernel_options,
        query_positions=state.positions[:, -query.shape[2] :],
        # A sliding-window layer holds the newest keys alone.
        key_positions=state.positions[:, -key.shape[2] :],
        state=state,
    )
    method = ms_poe if state.constants["method"] == "ms_poe" else moice
    return method(call), None


def ms_poe(call: AttentionCall) -> Tensor:
    """Return the attention output [B, T, H, d] of Ms-PoE: each head divides positions by a ratio.

    Ratios are chosen once, at the end of the prompt, and kept for generated tokens.

    Args:
        call: Queries and keys [.., d] of one layer before rotation, values, positions, the
            kernel, and the method's constants and what it kept since the prompt.
    """
    tables = call.state.rotary_tables
    prompt_values = call.state.prompt_values
    if "ratios" not in prompt_values:
        prompt_values["ratios"] = head_ratios(call)
    ratios = prompt_values["ratios"][..., None]  # [B, H, 1]
    query_positions = call.query_positions[:, None] / ratios  # [B, H, T]
    key_positions = call.key_positions[:, None] / ratios  # [B, H, S]
    query = rotate(call.module, call.query, *tables_per_head(tables, query_positions))
    group_size = call.query.shape[1] // call.key.shape[1]
    if call.state.constants["variant"] == "official":
        # The keys of a group are rotated with the ratio of its first head.
        key_tables = tables_per_head(tables, key_positions[:, ::group_size])
        key = rotate(call.module, call.key, *key_tables)
        return call.run_kernel(query, key, call.value)
    key = call.key.repeat_interleave(group_size, dim=1)
    value = call.value.repeat_interleave(group_size, dim=1)
    key = rotate(call.module, key, *tables_per_head(tables, key_positions))
    if group_size == 1:
        return call.run_kernel(query, key, value)
    # Each query head has keys of its own now: the kernel must not repeat them.
    call.module.num_key_value_groups = 1
    try:
        return call.run_kernel(query, key, value)
    finally:
        call.module.num_key_value_groups = group_size


def head_ratios(call: AttentionCall) -> Tensor:
    """Return the ratio by which each head divides positions, [B, H], by its number of outlying attention weights.

    A weight in the row of the last prompt token is outlying if it is alpha times the
    mean (Zhang et al. 2024, Algorithm 1). Ratios grow evenly over the ranks of heads.

    Args:
        call: The attention call of one layer, with the method's constants in its state:
            ``variant`` is ``paper`` or ``official`` (the released program, which compares
            queries and keys without RoPE); ``order`` is ``rank`` (head of rank i gets ratio
            i), ``permutation`` (as released: head i gets the ratio at the i-th place of the
            sorted heads) or ``reversed`` (by the heads' numbers alone, from last to first).
    """
    constants = call.state.constants
    num_heads = call.query.shape[1]
    low, high = constants["ratios"]
    is_paper_variant = constants["variant"] == "paper"
    if constants["order"] == "reversed":
        ranks = torch.arange(num_heads - 1, -1, -1, device=call.query.device)
        ranks = ranks.expand(call.query.shape[:2])
    else:
        last_query = call.query[:, :, -1:]
        key = call.key
        if is_paper_variant:
            tables = call.state.rotary_tables
            last_position = call.query_positions[:, -1:]
            last_query = rotate(call.module, last_query, *tables(last_position))
            key = rotate(call.module, key, *tables(call.key_positions))
        weights = last_row(last_query, key, call.mask, **call.kernel_options)
        # Equal scores give the mean to every key that the row may see, 0 to padding.
        no_query = torch.zeros_like(last_query)
        mean = last_row(no_query, key, call.mask, **call.kernel_options)
        threshold = constants["alpha"] * mean
        is_outlying = weights >= threshold if is_paper_variant else weights > threshold
        num_outlying = (is_outlying & (mean > 0)).sum(-1)
        ranks = num_outlying.argsort(dim=1, descending=True, stable=True)
        if constants["order"] != "permutation":
            # From the heads in sorted order to the place of each head in it.
            ranks = ranks.argsort(dim=1)
    steps = max(num_heads - 1, 1) if is_paper_variant else num_heads
    return low + (high - low) * ranks.float() / steps


def moice(call: AttentionCall) -> Tensor:
    """Return the attention under every base, mixed with a router's weights per token and head.

    Args:
        call: Queries and keys [.., d] of one layer before rotation, values, positions, the
            kernel, and the method's constants, among them ``bases``.

    Returns:
        The output [B, T, H, d] in the dtype of the queries.
    """
    tables = call.state.rotary_tables
    mixed = torch.zeros(())
    for index, base in enumerate(call.state.constants["bases"]):
        query = rotate(call.module, call.query, *tables(call.query_positions, base))
        if index == 0:  # the router reads queries rotated under the first base
            weights = base_weights(call.module, query.float(), call.state.constants)
        key = rotate(call.module, call.key, *tables(call.key_positions, base))
        output = call.run_kernel(query, key, call.value)
        mixed = mixed + weights[..., index].transpose(1, 2)[..., None] * output
    return mixed.to(call.query.dtype)


def base_weights(attention: Any, query: Tensor, constants: Any) -> Tensor:
    """Return the weights [B, H, T, N] of the bases for queries [B, H, T, d].

    They sum to 1; only the largest ``top_k`` of a token and head are not 0. Without a
    router all are equal.

    Args:
        attention: The layer's attention module; holds the trained ``router``, if any.
        query: The queries, rotated under the first base.
        constants: The method's: ``bases`` (N), ``router`` (whether there is one), ``top_k``.
    """
    num_bases = len(constants["bases"])
    if not constants.get("router"):
        return query.new_full((*query.shape[:3], num_bases), 1 / num_bases)
    logits = attention.router.to(query)(query)
    weights = logits.softmax(-1)
    top = logits.topk(constants["top_k"], dim=-1).indices
    weights = torch.zeros_like(weights).scatter(-1, top, weights.gather(-1, top))
    return weights / weights.sum(-1, keepdim=True)


def rotate(attention: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys by the model's own function.

    Args:
        attention: The attention module, whose file defines the function.
        x: Queries or keys, [B, H, T, d].
        cos: Cosines, [B, T, r], or [B, H, T, r] for tables per head.
        sin: Sines, of the same shape.

    Returns:
        The rotated queries or keys, [B, H, T, d].
    """
    if cos.ndim == 4:  # heads become rows
        rows = x.flatten(0, 1)[:, None]
        rows = rotate(attention, rows, cos.flatten(0, 1), sin.flatten(0, 1))
        return rows.reshape(x.shape)
    apply_rotary = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    width = cos.shape[-1]
    rotary_part = x[..., :width]
    no_heads = rotary_part[:, :0]
    cos = cos.to(x.device)
    sin = sin.to(x.device)
    rotated = apply_rotary(no_heads, rotary_part, cos, sin)[1]
    return torch.cat([rotated, x[..., width:]], dim=-1)


def tables_per_head(rotary_tables: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [B, H, T, r] at positions [B, H, T]."""
    cos, sin = rotary_tables(positions.flatten(0, 1))
    shape = positions.shape[:2]
    return cos.unflatten(0, shape), sin.unflatten(0, shape)


def last_row(
    query: Tensor,
    key: Tensor,
    mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> Tensor:
    """Attention weights of the last query, float32.

    Args:
        query: Queries, [B, H, T, d].
        key: Keys, [B, G, S, d].
        mask: [B, 1, T, S], boolean or added to the scores; [B, S], 0 on padding, as
            flash kernels take it; or None.
        scaling: Factor of the scores; None for 1 / sqrt(d).
        softcap: Bound of the scores' absolute values, if any.
        sliding_window: Keys that a query sees, in tokens, if not all.

    Returns:
        Weights [B, H, S], each row sums to 1.
    """
    group_size = query.shape[1] // key.shape[1]
    keys = key.repeat_interleave(group_size, dim=1).float()
    scores = (query.float() @ keys.transpose(-1, -2))[:, :, -1]
    scores = scores * (scaling or query.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    num_keys = scores.shape[-1]
    if mask is not None and mask.ndim == 4:
        row = mask[:, :, -1, :num_keys]
        if row.dtype == torch.bool:
            return scores.masked_fill(~row, float("-inf")).softmax(-1)
        return (scores + row).softmax(-1)
    distances = torch.arange(num_keys - 1, -1, -1, device=scores.device)
    is_hidden = distances >= (sliding_window or num_keys)
    if mask is not None:
        is_hidden = is_hidden | ~mask[:, None, -num_keys:].bool()
    return scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
