"""All per-architecture knowledge: one row per model family, refused by name when unknown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from posbench.errors import UserError
from posbench.late import PreTrainedConfig, PreTrainedModel, Tensor, nn, torch

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True, kw_only=True)
class Family:
    """Where one model family keeps its attention, and what happens to a key between projection and cache."""

    name: str  # name shown to users
    model_types: tuple[
        str, ...
    ]  # values of ``config.model_type`` that belong to the family
    traits: str = ""  # what sets it apart, in a few words for the support table
    layers: str = "model.layers"  # dotted path from the causal-LM object to its list of decoder layers
    # attribute of a decoder layer that holds the attention module, whose attributes follow
    attention: str = "self_attn"
    query: str = "q_proj"  # projects queries
    key: str = "k_proj"  # projects keys; the same as ``query`` where they are fused
    # rows of a fused projection with H query and G key heads: ``blocks`` is all queries, all keys, all
    # values; ``groups`` is, for each key head, its H / G queries, the key, the value
    fused: Literal["blocks", "groups"] | None = None
    key_norm: str | None = None  # normalises keys before the rotation
    # what that norm sees at once: one ``head``, or the whole ``projection``
    norm_over: Literal["head", "projection"] = "head"
    clip: str | None = (
        None  # the bound to which the projection's output is clamped; None or 0 means no bound
    )
    # None or 0 in layers without rotary embedding; None where all layers are alike
    rope_if: str | None = None
    position: str = "RoPE"  # how the model knows positions, beside its causal mask
    # whether attention runs through the library's functions, which posbench can listen to
    interface: bool = True
    output: str = "o_proj"  # projects the heads' outputs; read without ``interface``
    shut_is_true: bool = (
        False  # whether its masks of booleans are true where a key is shut
    )
    # whether its mask holds the ALiBi bias, which eager attention then adds a second time
    mask_has_bias: bool = False


REMOVED = "posbench_removed"
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
    Family(name="Gemma 1", model_types=("gemma",), traits="head size apart from hidden size / heads"),
    Family(name="Gemma 2", model_types=("gemma2",), traits="logit soft-cap, every other layer sliding"),
    Family(
        name="Gemma 3 (text)", model_types=("gemma3_text",), key_norm="k_norm",
        traits="local and global RoPE",
    ),
    Family(
        name="Gemma 3 (with vision, text prompts)", model_types=("gemma3",), key_norm="k_norm",
        traits="local and global RoPE; images are not read", layers="model.language_model.layers",
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
        norm_over="projection",
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
"""Architectures outside the shape that posbench works on, by the reason that users are told."""


def support_table() -> tuple[list[str], list[list[str]]]:
    """The families as docs/families.md shows them: header and rows."""
    rows = []
    for f in FAMILIES:
        projection = f"fused, in {f.fused}" if f.fused else "apart"
        projection += f", keys normed per {f.norm_over}" if f.key_norm else ""
        keys = "rank-1, projected again if clipped" if f.clip else "rank-1"
        keys = "projected again" if f.key_norm else keys
        types = ", ".join(f"`{t}`" for t in f.model_types)
        rows.append([f.name, types, f.position, projection, keys, f.traits])
    return [
        "family",
        "`model_type`",
        "positions",
        "queries and keys",
        "prefilled keys",
        "also covered",
    ], rows


def family_of(model: PreTrainedModel) -> Family:
    """The family row of a model; see :func:`family_of_type`."""
    return family_of_type(model.config.model_type)


def family_of_type(model_type: str | None) -> Family:
    """The family row of a ``config.model_type``; UserError, with the reason, if there is none."""
    known = {kind: family for family in FAMILIES for kind in family.model_types}
    if model_type in known:
        return known[model_type]
    otherwise = ", or add a row to posbench/model/families.py (see docs/families.md)"
    reasons = [reason for reason, types in UNSUPPORTED.items() if model_type in types]
    why = f": this one cannot be supported, {reasons[0]}" if reasons else otherwise
    hint = f"choose a model of a listed family{why}"
    raise UserError("model architecture", model_type, ", ".join(known), hint)


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The config of the language model, also inside a model that sees images."""
    return model.config.get_text_config()


def context_window(config: PreTrainedConfig) -> int:
    """Tokens a checkpoint reads by its own config, 2^31 where the config sets no limit."""
    text = config.get_text_config()
    return (
        getattr(text, "max_position_embeddings", None)
        or getattr(text, "max_seq_len", None)
        or 2**31
    )


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Decoder layers in order."""
    return list(model.get_submodule(family_of(model).layers))  # type: ignore[call-overload]


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Attention modules in layer order."""
    name = family_of(model).attention
    return [getattr(layer, name) for layer in blocks(model)]


Site = Literal["attention_input", "residual"]
"""``attention_input``: after a layer's first norm, what queries, keys and values are projected from;
``residual``: the stream before the layer."""


def site_modules(model: PreTrainedModel, site: Site) -> list[nn.Module]:
    """The modules, one per layer, whose input is a site of the hidden states."""
    return attention_modules(model) if site == "attention_input" else blocks(model)


def attention_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states [B, T, D] among the arguments of an attention module's call."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def rotary_of(kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """(cos, sin) that a call of attention rotates with, each [B or 1, T, up to d]; None where it does not."""
    # Falcon gives both and rotates only without ALiBi.
    return (
        None if kwargs.get("alibi") is not None else kwargs.get("position_embeddings")
    )


def on_query_key_input(
    model: PreTrainedModel, layer: int, change: Callable[[Tensor], Tensor]
) -> list[RemovableHandle]:
    """Make the queries and keys of a layer, and not its values, see a changed input.

    ``change`` maps the attention input [B, T, D], without writing to it, to what they are projected from. The
    layer is as before once all the hooks are removed.
    """
    family = family_of(model)
    attention = attention_modules(model)[layer]
    query = getattr(attention, family.query)
    key = getattr(attention, family.key)
    if family.fused is None:
        before = lambda module, args: (change(args[0]), *args[1:])  # noqa: E731
        return [
            projection.register_forward_pre_hook(before) for projection in (query, key)
        ]

    def twice(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        # forward(), not a call of the module: that would come back here.
        changed = module.forward(change(args[0]), *args[1:])
        rows = torch.cat(_fused_rows(model, layer, output.shape[-1])).to(output.device)
        return output.index_copy(-1, rows, changed.index_select(-1, rows))

    return [key.register_forward_hook(twice)]


def query_key_rows(model: PreTrainedModel, layer: int) -> dict[str, Tensor | None]:
    """The projections of a layer that make queries and keys, by their dotted names in the model, each with
    the output rows that do; None: all of them."""
    family = family_of(model)
    attention = attention_modules(model)[layer]
    place = next(name for name, module in model.named_modules() if module is attention)
    if family.fused is None:
        return dict.fromkeys((f"{place}.{family.query}", f"{place}.{family.key}"))
    # What it gives, not its weight, which may be packed.
    zeros = torch.zeros(
        1, text_config(model).hidden_size, dtype=model.dtype, device=model.device
    )
    width = getattr(attention, family.key)(zeros).shape[-1]
    return {f"{place}.{family.key}": torch.cat(_fused_rows(model, layer, width))}


def keys_are_linear(model: PreTrainedModel, layer: int) -> bool:
    """Whether cached keys depend linearly on the attention input, through a weight matrix that can be read.

    Not so behind a norm or a clamp, and not for quantised, adapted or offloaded projections.
    """
    family = family_of(model)
    attention = attention_modules(model)[layer]
    key = getattr(attention, family.key)
    # Subclasses are quantised or adapted, but for this one, which only orders the sum its own way.
    plain = type(key) is nn.Linear or type(key).__name__ == "FalconLinear"
    # Without a hook, a model without any weights is an outline.
    if (
        not plain
        or family.key_norm
        or (key.weight.is_meta and hasattr(key, "_hf_hook"))
    ):
        return False
    return not (family.clip and getattr(attention, family.clip))


def key_columns(model: PreTrainedModel, layer: int, channels: Sequence[int]) -> Tensor:
    """Columns of the key projection, ``W_K[:, channels]``, without the bias, [C, G * d] for C channels."""
    key = getattr(attention_modules(model)[layer], family_of(model).key)
    return _keys_among(model, layer, key.weight[:, list(channels)].T)


def project_keys(model: PreTrainedModel, layer: int, hidden: Tensor) -> Tensor:
    """Keys as the layer's projection gives them, before norm and rotation: [B, T, G * d] from [B, T, D]."""
    key = getattr(attention_modules(model)[layer], family_of(model).key)
    return _keys_among(model, layer, key(hidden))


def finish_keys(
    model: PreTrainedModel,
    layer: int,
    projected: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """What the layer does to projected keys [B, T, G * d] before it caches them as [B, G, T, d]: clamp,
    normalise, split in heads, rotate; ``rotary`` as :func:`rotary_of` gives it."""
    family = family_of(model)
    attention = attention_modules(model)[layer]
    norm = getattr(attention, family.key_norm) if family.key_norm else None
    bound = getattr(attention, family.clip) if family.clip else None
    if bound:
        projected = projected.clamp(-bound, bound)
    if norm is not None and family.norm_over == "projection":
        projected = norm(projected)
    keys = projected.unflatten(-1, (_heads(model, layer)[1], -1))
    if norm is not None and family.norm_over == "head":
        keys = norm(keys)
    return rotate(model, layer, keys.transpose(1, 2), rotary)


def rotate(
    model: PreTrainedModel, layer: int, x: Tensor, rotary: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Apply the layer's own rotary embedding, where it has one, to queries or keys [B, G, T, d]."""
    family = family_of(model)
    attention = attention_modules(model)[layer]
    if rotary is None or (family.rope_if and not getattr(attention, family.rope_if)):
        return x
    apply = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    # Some families rotate the first coordinates of each head only.
    turned = x[..., : rotary[0].shape[-1]]
    rest = x[..., rotary[0].shape[-1] :]
    # The functions rotate queries and keys: no queries here.
    turned = apply(turned[:, :0], turned, *rotary)[1]
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def _heads(model: PreTrainedModel, layer: int) -> tuple[int, int]:
    """Query heads and key heads of a layer."""
    config = text_config(model)
    attention = attention_modules(model)[layer]
    groups = getattr(attention, "num_kv_heads", None) or getattr(
        config, "num_key_value_heads", None
    )
    return config.num_attention_heads, groups or config.num_attention_heads


def _fused_rows(
    model: PreTrainedModel, layer: int, width: int
) -> tuple[Tensor, Tensor]:
    """Output rows of a fused projection of ``width`` rows that are queries, and those that are keys."""
    heads, groups = _heads(model, layer)
    d = width // (heads + 2 * groups)
    if family_of(model).fused == "blocks":
        return torch.arange(heads * d), torch.arange(heads * d, (heads + groups) * d)
    rows = torch.arange(width).view(groups, heads // groups + 2, d)
    return rows[:, :-2].flatten(), rows[:, -2].flatten()


def _keys_among(model: PreTrainedModel, layer: int, projected: Tensor) -> Tensor:
    """The keys in the output [..., rows] of a projection that may be fused."""
    if family_of(model).fused is None:
        return projected
    return projected[
        ..., _fused_rows(model, layer, projected.shape[-1])[1].to(projected.device)
    ]


def remove_rope(model: PreTrainedModel) -> None:
    """Make a model position-free for good: its rotary embedding yields cos = 1 and sin = 0.

    For checkpoints trained without position embeddings under the name of a family that rotates
    (AntNLP/TinyLlama-NoPE-1.1B). Raises UserError where no rotary embedding serves all layers.
    """
    rotary = getattr(model.base_model, "rotary_emb", None)
    # A Falcon with ALiBi holds a rotary embedding that it does not use.
    if rotary is None or getattr(model.config, "alibi", False):
        allowed = f"checkpoint (this {model.config.model_type} model has no rotary embedding to remove)"
        raise UserError("model.rope", "none", allowed, "set model.rope=checkpoint")
    # A hook keeps the shape, dtype and device of whatever the family's own module returns.
    rotary.register_forward_hook(
        lambda _, args, out: (torch.ones_like(out[0]), torch.zeros_like(out[1]))
    )
    setattr(rotary, REMOVED, True)
