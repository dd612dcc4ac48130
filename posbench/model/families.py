"""All per-architecture knowledge: one row per model family, refused by name when unknown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from posbench.errors import UserError
from posbench.late import PreTrainedConfig, PreTrainedModel, Tensor, nn, torch

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True, kw_only=True)
class Family:
    """The attention modules of one model family, and the changes to a key between projection and cache."""

    # name shown to users
    name: str
    # values of ``config.model_type`` that belong to the family
    model_types: tuple[str, ...]
    # its peculiarity, in a few words for the support table
    traits: str = ""
    # dotted path from the causal-LM object to its list of decoder layers
    layers: str = "model.layers"
    # attribute of a decoder layer that holds the attention module, whose attributes follow
    attention: str = "self_attn"
    # projects queries
    query: str = "q_proj"
    # projects keys; the same as ``query`` where they are fused
    key: str = "k_proj"
    # rows of a fused projection with H query and G key heads: ``blocks`` is all queries, all keys, all
    # values; ``groups`` is, for each key head, its H / G queries, the key, the value
    fused: Literal["blocks", "groups"] | None = None
    # normalises keys before the rotation
    key_norm: str | None = None
    # scope of that norm: one ``head``, or the whole ``projection``
    norm_over: Literal["head", "projection"] = "head"
    # the bound to which the projection's output is clamped; None or 0 means no bound
    clip: str | None = None
    # None or 0 in layers without rotary embedding; None where all layers are alike
    rope_if: str | None = None
    # how positions are encoded, besides the causal mask
    position: str = "RoPE"
    # whether attention runs through the library's functions, which posbench can listen to
    interface: bool = True
    # projects the heads' outputs; read without ``interface``
    output: str = "o_proj"
    # attribute of a decoder layer that normalises the attention's output before it is added to the stream
    output_norm: str | None = None
    # whether its masks of booleans are true where a key is shut
    shut_is_true: bool = False
    # whether its mask holds the ALiBi bias, which eager attention then adds a second time
    mask_has_bias: bool = False


_unchanged_inputs = ContextVar("unchanged_inputs", default=False)
"""Whether projections read their inputs without the changes of :func:`on_query_key_input`."""
REMOVED_ATTRIBUTE = "posbench_removed"
"""Attribute that marks a rotary embedding which :func:`remove_rope` has switched off."""

FAMILIES = (
    Family(
        name="Llama 1 to 3.x, Vicuna, StableBeluga, TinyLlama", model_types=("llama",),
        traits="grouped keys, biases, Llama 3 RoPE",
    ),
    Family(
        name="Mistral, Mixtral", model_types=("mistral", "mixtral"), traits="sliding window (v0.1), experts",
    ),
    Family(name="Qwen1.5, Qwen2, Qwen2.5", model_types=("qwen2",), traits="biases, YaRN"),
    Family(name="Qwen3", model_types=("qwen3", "qwen3_moe"), traits="experts (MoE)", key_norm="k_norm"),
    Family(name="Gemma 1", model_types=("gemma",), traits="head size independent of hidden size / heads"),
    Family(
        name="Gemma 2", model_types=("gemma2",), traits="logit soft-cap, every other layer sliding",
        output_norm="post_attention_layernorm",
    ),
    Family(
        name="Gemma 3 (text)", model_types=("gemma3_text",), key_norm="k_norm",
        traits="local and global RoPE", output_norm="post_attention_layernorm",
    ),
    Family(
        name="Gemma 3 (with vision, text prompts)", model_types=("gemma3",), key_norm="k_norm",
        traits="local and global RoPE; images are not read", layers="model.language_model.layers",
        output_norm="post_attention_layernorm",
    ),
    Family(
        name="Phi-3, Phi-3.5, Phi-4", model_types=("phi3",), query="qkv_proj", key="qkv_proj", fused="blocks",
        traits="partial rotary, longrope, sliding window",
    ),
    Family(
        name="GPT-NeoX, Pythia", model_types=("gpt_neox",), traits="partial rotary", layers="gpt_neox.layers",
        attention="attention", query="query_key_value", key="query_key_value", fused="groups",
    ),
    Family(
        name="MPT", model_types=("mpt",), traits="optional clip, prompts up to max_seq_len", position="ALiBi",
        layers="transformer.blocks", attention="attn", query="Wqkv", key="Wqkv", fused="blocks",
        clip="clip_qkv", interface=False, output="out_proj", shut_is_true=True,
    ),
    Family(
        name="Falcon", model_types=("falcon",), traits="new and old layout, biases", position="RoPE or ALiBi",
        layers="transformer.h", attention="self_attention", query="query_key_value", key="query_key_value",
        fused="groups", interface=False, output="dense", mask_has_bias=True,
    ),
    Family(
        name="OLMo 2", model_types=("olmo2",), traits="norms after the blocks", key_norm="k_norm",
        norm_over="projection", output_norm="post_attention_layernorm",
    ),
    Family(
        name="SmolLM3", model_types=("smollm3",), traits="some or all layers without RoPE",
        position="RoPE or none", rope_if="use_rope",
    ),
    Family(
        name="Cohere 2 (Command R7B, Command A)", model_types=("cohere2",), position="RoPE or none",
        traits="interleaved RoPE in the sliding layers only", rope_if="sliding_window",
    ),
)  # fmt: skip

UNSUPPORTED = {
    "their keys come from a compressed latent (MLA), so there is no channel of one key projection to scale":
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "longcat_flash", "minicpm3", "youtu"),
    "Llama 4 rotates in complex numbers, normalises after the rotation and attends in chunks":
        ("llama4", "llama4_text"),
    "some of its layers share the keys of earlier layers":
        ("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"),
    "a part of its layers has no softmax attention (linear attention or state space)": (
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "mamba", "mamba2",
        "minimax", "nemotron_h", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "recurrent_gemma",
        "rwkv", "xlstm", "zamba", "zamba2",
    ),
    "it is no causal decoder": ("bart", "bert", "led", "longt5", "mt5", "roberta", "t5"),
}  # fmt: skip
"""Unsupported architectures, by the reason given to users."""


def require_attention_interface(model: PreTrainedModel, name: str) -> None:
    """Raise UserError for a model whose attention a method cannot hook into: it would change nothing.

    Args:
        model: The model.
        name: Name of the method.

    Raises:
        UserError: The model's attention does not run through the library's functions.
    """
    family = family_of(model)
    if not family.interface:
        allowed = f"a family that uses the attention functions of transformers; {family.name} does not"
        hint = "set method=scale_channel, or choose a model of another family: docs/families.md"
        raise UserError("method", name, allowed, hint)


def family_of(model: PreTrainedModel) -> Family:
    """The family row of a model; see :func:`family_of_type`."""
    return family_of_type(model.config.model_type)


def family_of_type(model_type: str | None) -> Family:
    """Return the row of the families table for a ``config.model_type``.

    Raises:
        UserError: There is none; says why if the type is known not to work.
    """
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    reason = ", or add a row to posbench/model/families.py (see docs/families.md)"
    for obstacle, types in UNSUPPORTED.items():
        if model_type in types:
            reason = f": this one cannot be supported, {obstacle}"
    supported = ", ".join(
        model_type for family in FAMILIES for model_type in family.model_types
    )
    hint = f"choose a model of a listed family{reason}"
    raise UserError("model architecture", model_type, supported, hint)


def require_full_attention(model: PreTrainedModel, name: str, tokens: int) -> None:
    """Raise UserError for a model with layers that see only the newest tokens of a prompt.

    Args:
        model: The model.
        name: Name of the method.
        tokens: Tokens of a prompt at most.

    Raises:
        UserError: Some layers have a sliding window of fewer tokens.
    """
    config = text_config(model)
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"]
    if window and window < tokens and "sliding_attention" in layer_types:
        allowed = f"a model whose layers all see the whole prompt: this one has a sliding window of {window} tokens"
        hint = "set method=scale_channel, or choose a model without a sliding window"
        raise UserError("method", name, allowed, hint)


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The config of the language model, also inside a model that sees images."""
    return model.config.get_text_config()


def context_window(config: PreTrainedConfig) -> int:
    """Return how many tokens a checkpoint reads by its own config, 2^31 where the config sets no limit."""
    text = config.get_text_config()
    return (
        getattr(text, "max_position_embeddings", None)
        or getattr(text, "max_seq_len", None)
        or 2**31
    )


def rope_boundary(model: PreTrainedModel) -> int | None:
    """Return the length (tokens of prompt and reply) up to which a longrope model has its short factors.

    None for other models. transformers takes the long factors for a whole batch where one of its prompts is longer.
    """
    config = text_config(model)
    rope_parameters = getattr(config, "rope_parameters", None) or {}
    if rope_parameters.get("rope_type") != "longrope":
        return None
    boundary = rope_parameters.get("original_max_position_embeddings")
    boundary = boundary or getattr(config, "original_max_position_embeddings", None)
    return int(boundary) if boundary else None


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Decoder layers in order."""
    return list(model.get_submodule(family_of(model).layers))  # type: ignore[call-overload]


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Attention modules in layer order."""
    name = family_of(model).attention
    return [getattr(layer, name) for layer in decoder_layers(model)]


def attention_module(model: PreTrainedModel, layer: int) -> nn.Module:
    """The attention module of a layer."""
    family = family_of(model)
    return getattr(model.get_submodule(family.layers)[layer], family.attention)  # type: ignore[index, no-any-return]


Site = Literal["attention_input", "residual"]
"""``attention_input``: after a layer's first norm, the input of the query, key and value projections;
``residual``: the stream before the layer."""


def site_modules(model: PreTrainedModel, site: Site) -> list[nn.Module]:
    """The modules, one per layer, whose input is a site of the hidden states."""
    return (
        attention_modules(model) if site == "attention_input" else decoder_layers(model)
    )


def attention_output_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules, one per layer, whose output is what attention adds to the residual stream.

    A module's output may be a tuple that begins with it.
    """
    norm = family_of(model).output_norm
    if norm is None:
        return attention_modules(model)
    return [getattr(layer, norm) for layer in decoder_layers(model)]


def attention_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states [B, T, D] among the arguments of an attention module's call."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def rotary_of(kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """(cos, sin) that a call of attention rotates with, each [B or 1, T, up to d]; None where it does not."""
    if kwargs.get("alibi") is not None:
        return None  # Falcon gives both and rotates only without ALiBi.
    return kwargs.get("position_embeddings")


def on_query_key_input(
    model: PreTrainedModel, layer: int, change: Callable[[Tensor], Tensor]
) -> list[RemovableHandle]:
    """Make the queries and keys of a layer, and not its values, see a changed input.

    Args:
        model: The model.
        layer: The layer.
        change: Maps the attention input [B, T, D], without writing to it, to the input of the query and key
            projections.

    Returns:
        The hooks that do it; the layer is restored once all are removed.
    """
    family = family_of(model)
    attention = attention_module(model, layer)
    query_projection = getattr(attention, family.query)
    key_projection = getattr(attention, family.key)

    # The changed input of the query projection, until the key projection reads the same input.
    changed_inputs: list[tuple[Tensor, Tensor]] = []

    def change_query_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        changed = change(args[0])
        changed_inputs[:] = [(args[0], changed)]
        return (changed, *args[1:])

    def change_key_input(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if _unchanged_inputs.get():
            return None
        # Some models compute keys from another tensor, which is then changed by itself.
        hidden, changed = changed_inputs.pop() if changed_inputs else (None, None)
        if hidden is not args[0]:
            changed = change(args[0])
        return (changed, *args[1:])

    def change_rows(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Any:
        if _unchanged_inputs.get():
            return None
        if next(iter(module._forward_hooks.values())) is not change_rows:
            value = f"a hook on the output of {family.key} in layer {layer}"
            allowed = "none before this method's own, as that module makes queries, keys and values at once"
            hint = "open that hook's block inside this one, or change what the module reads"
            raise UserError("model", value, allowed, hint)
        # forward(), not a call of the module: that would come back here.
        changed = module.forward(change(args[0]), *args[1:])
        rows = torch.cat(
            _fused_rows(model, layer, output.shape[-1], device=output.device)
        )
        return output.index_copy(-1, rows, changed.index_select(-1, rows))

    # A fused projection also makes values: only the rows of queries and keys change.
    if family.fused is None:
        return [
            query_projection.register_forward_pre_hook(change_query_input),
            key_projection.register_forward_pre_hook(change_key_input),
        ]
    return [key_projection.register_forward_hook(change_rows)]


def query_key_rows(model: PreTrainedModel, layer: int) -> dict[str, Tensor | None]:
    """Return the parameters that make a layer's queries and keys.

    Returns:
        By dotted name of the projection in the model: the output rows that are queries or keys, None for all rows.
    """
    family = family_of(model)
    attention = attention_module(model, layer)
    path = next(name for name, module in model.named_modules() if module is attention)
    if family.fused is None:
        return {f"{path}.{family.query}": None, f"{path}.{family.key}": None}
    # The width of its output, not of its weight, which may be packed.
    zeros = torch.zeros(
        1, text_config(model).hidden_size, dtype=model.dtype, device=model.device
    )
    width = getattr(attention, family.key)(zeros).shape[-1]
    return {f"{path}.{family.key}": torch.cat(_fused_rows(model, layer, width))}


def keys_are_linear(model: PreTrainedModel, layer: int) -> bool:
    """Whether cached keys depend linearly on the attention input, through a weight matrix that can be read.

    Not so behind a norm or a clamp, and not for quantised, adapted or offloaded projections.
    """
    return _makes_linear_keys(family_of(model), attention_module(model, layer))


def queries_and_keys_are_linear(
    model: PreTrainedModel, layers: Collection[int]
) -> bool:
    """Whether both queries and keys of all these layers depend linearly on the attention input.

    See :func:`keys_are_linear`.
    """
    family = family_of(model)
    modules = attention_modules(model)
    return all(
        _makes_linear_keys(family, modules[layer])
        and _is_plain(getattr(modules[layer], family.query))
        for layer in layers
    )


def _makes_linear_keys(family: Family, attention: nn.Module) -> bool:
    if not _is_plain(getattr(attention, family.key)) or family.key_norm:
        return False
    return not (family.clip and getattr(attention, family.clip))


def _is_plain(projection: nn.Module) -> bool:
    """Whether a projection is no more than a product with a weight that can be read: not quantised, say, or hooked."""
    # Subclasses are quantised or adapted, but for Falcon's, which only orders the sum its own way.
    is_linear = (
        type(projection) is nn.Linear or type(projection).__name__ == "FalconLinear"
    )
    if not is_linear:
        return False
    # accelerate's hook brings an offloaded weight; without it the model is an outline without any weights.
    if hasattr(projection, "_hf_hook"):
        return not projection.weight.is_meta
    # What another method or the user put there; the hooks of on_query_key_input() change no weight.
    hooks = (
        *projection._forward_pre_hooks.values(),
        *projection._forward_hooks.values(),
    )
    is_hooked = any(getattr(hook, "__module__", "") != __name__ for hook in hooks)
    return not is_hooked and "forward" not in vars(projection)


def query_key_columns(
    model: PreTrainedModel, layer: int, channel: int
) -> tuple[Tensor, Tensor]:
    """Return the weights that multiply one channel of the attention input in queries and keys, without biases.

    Returns:
        Columns of shape (query heads * head size,) and (key heads * head size,).
    """
    family = family_of(model)
    attention = attention_module(model, layer)
    query_column = getattr(attention, family.query).weight[:, channel]
    key_column = getattr(attention, family.key).weight[:, channel]
    if family.fused is None:
        return query_column, key_column
    query_rows, key_rows = _fused_rows(
        model, layer, len(key_column), device=key_column.device
    )
    return query_column[query_rows], key_column[key_rows]


def key_columns(model: PreTrainedModel, layer: int, channels: Sequence[int]) -> Tensor:
    """Columns of the key projection, ``W_K[:, channels]``, without the bias, [C, G * d] for C channels."""
    key_projection = getattr(attention_module(model, layer), family_of(model).key)
    columns = [key_projection.weight[:, channel] for channel in channels]
    return _select_keys(model, layer, torch.stack(columns))


def project_keys(model: PreTrainedModel, layer: int, hidden: Tensor) -> Tensor:
    """Keys as the layer's projection and its hooks give them, before norm and rotation: [B, T, G * d] from [B, T, D].

    A change of its input by :func:`on_query_key_input` is left out.
    """
    key_projection = getattr(attention_module(model, layer), family_of(model).key)
    token = _unchanged_inputs.set(True)
    try:
        return _select_keys(model, layer, key_projection(hidden))
    finally:
        _unchanged_inputs.reset(token)


def keys_for_cache(
    model: PreTrainedModel,
    layer: int,
    projected: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return keys as a layer caches them: clamped, normalised, split in heads, rotated.

    Args:
        model: The model.
        layer: The layer.
        projected: Keys as the layer's projection gives them, [B, T, G * d].
        rotary: (cos, sin) as :func:`rotary_of` gives them.

    Returns:
        [B, G, T, d].
    """
    family = family_of(model)
    attention = attention_module(model, layer)
    norm = getattr(attention, family.key_norm) if family.key_norm else None
    bound = getattr(attention, family.clip) if family.clip else None
    if bound:
        projected = projected.clamp(-bound, bound)
    if norm is not None and family.norm_over == "projection":
        projected = norm(projected)
    _, key_heads = _count_heads(model, layer)
    keys = projected.unflatten(-1, (key_heads, -1))
    if norm is not None and family.norm_over == "head":
        keys = norm(keys)
    return rotate(model, layer, keys.transpose(1, 2), rotary)


def rotate(
    model: PreTrainedModel, layer: int, x: Tensor, rotary: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Apply the layer's own rotary embedding, where it has one, to queries or keys.

    Args:
        model: The model.
        layer: The layer.
        x: Queries or keys, [B, G, T, d].
        rotary: (cos, sin), [B or 1, T, r] each, where the first r coordinates of a head are rotated; None: none.

    Returns:
        [B, G, T, d].
    """
    if rotary is None or not rotates(model, layer):
        return x
    attention = attention_module(model, layer)
    apply_rotary = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    width = rotary[0].shape[-1]
    coordinates = x[..., :width]
    # The function rotates queries and keys: no queries here.
    _, rotated = apply_rotary(coordinates[:, :0], coordinates, *rotary)
    if width < x.shape[-1]:
        return torch.cat([rotated, x[..., width:]], dim=-1)
    return rotated


def rotates(model: PreTrainedModel, layer: int) -> bool:
    """Whether a layer applies the rotary embedding that it is given."""
    switch = family_of(model).rope_if
    return switch is None or bool(getattr(attention_module(model, layer), switch))


def _count_heads(model: PreTrainedModel, layer: int) -> tuple[int, int]:
    """Return the numbers of query heads and of key heads of a layer."""
    config = text_config(model)
    attention = attention_module(model, layer)
    key_heads = getattr(attention, "num_kv_heads", None) or getattr(
        config, "num_key_value_heads", None
    )
    return config.num_attention_heads, key_heads or config.num_attention_heads


def _fused_rows(
    model: PreTrainedModel,
    layer: int,
    width: int,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """Return which output rows of a projection that makes queries, keys and values at once are queries and keys.

    Args:
        model: The model.
        layer: The layer.
        width: Number of output rows.
        device: Device of the result.

    Returns:
        Indices of the queries' rows, and of the keys' rows.
    """
    heads, key_heads = _count_heads(model, layer)
    head_size = width // (heads + 2 * key_heads)
    # All queries, then all keys, then all values.
    if family_of(model).fused == "blocks":
        first_key = heads * head_size
        first_value = (heads + key_heads) * head_size
        rows = torch.arange(first_value, device=device)
        return rows[:first_key], rows[first_key:]
    # Else by key head: its query heads, its key, its value.
    rows = torch.arange(width, device=device)
    groups = rows.view(key_heads, heads // key_heads + 2, head_size)
    return groups[:, :-2].flatten(), groups[:, -2].flatten()


def _select_keys(model: PreTrainedModel, layer: int, projected: Tensor) -> Tensor:
    """The keys in the output [..., rows] of a projection that may be fused."""
    if family_of(model).fused is None:
        return projected
    width = projected.shape[-1]
    _, key_rows = _fused_rows(model, layer, width, device=projected.device)
    return projected[..., key_rows]


def remove_rope(model: PreTrainedModel) -> None:
    """Make a model position-free for good: its rotary embedding yields cos = 1 and sin = 0.

    For checkpoints trained without position embeddings under the name of a family that rotates
    (AntNLP/TinyLlama-NoPE-1.1B).

    Raises:
        UserError: No rotary embedding serves all layers.
    """
    rotary = getattr(model.base_model, "rotary_emb", None)
    # A Falcon with ALiBi holds a rotary embedding that it does not use.
    if rotary is None or getattr(model.config, "alibi", False):
        allowed = f"checkpoint (this {model.config.model_type} model has no rotary embedding to remove)"
        raise UserError("model.rope", "none", allowed, "set model.rope=checkpoint")
    # A hook keeps the shape, dtype and device of whatever the family's own module returns.
    rotary.register_forward_hook(
        lambda _, args, output: (
            torch.ones_like(output[0]),
            torch.zeros_like(output[1]),
        )
    )
    setattr(rotary, REMOVED_ATTRIBUTE, True)
