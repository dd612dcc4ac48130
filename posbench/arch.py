"""All per-architecture knowledge: one row per model family, refused by name when unknown."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posbench.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Family:
    """Where one model family keeps its attention.

    Attributes:
        name: Name shown to users.
        model_types: Values of ``config.model_type`` that belong to the family.
        layers: Dotted path from the causal-LM object to its list of decoder layers.
        attention: Attribute of a decoder layer that holds the attention module.
        query: Attribute of the attention module that projects queries.
        key: Attribute of the attention module that projects keys.
    """

    name: str
    model_types: tuple[str, ...]
    layers: str = "model.layers"
    attention: str = "self_attn"
    query: str = "q_proj"
    key: str = "k_proj"


FAMILIES = (
    Family(name="Llama (1-3, Vicuna, tiny)", model_types=("llama",)),
    Family(name="Mistral", model_types=("mistral",)),
    Family(name="Gemma 1", model_types=("gemma",)),
    Family(name="Qwen1.5 / Qwen2 / Qwen2.5", model_types=("qwen2",)),
)


def family_of(model: PreTrainedModel) -> Family:
    """Look up the family row of a model.

    Raises:
        UserError: The architecture is not in the table.
    """
    kind = model.config.model_type
    for family in FAMILIES:
        if kind in family.model_types:
            return family
    known = ", ".join(t for f in FAMILIES for t in f.model_types)
    raise UserError(
        field="model architecture",
        value=kind,
        allowed=known,
        hint="choose a model of a listed family, or add a row to posbench/arch.py (see CONTRIBUTING.md)",
    )


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Attention modules in layer order."""
    family = family_of(model)
    return [getattr(layer, family.attention) for layer in model.get_submodule(family.layers)]  # type: ignore[union-attr]


def query_key_projections(model: PreTrainedModel, layer: int) -> tuple[nn.Module, nn.Module]:
    """The modules that project the attention input of ``layer`` to queries and to keys."""
    family, attention = family_of(model), attention_modules(model)[layer]
    return getattr(attention, family.query), getattr(attention, family.key)


def key_columns(projection: nn.Module, channels: Sequence[int], like: Tensor) -> Tensor:
    """Columns of the key projection, ``W_K[:, channels]``, without the bias.

    Args:
        projection: The key projection.
        channels: C channel indices of the attention input.
        like: A tensor of the attention input's width, dtype and device, shape [..., D].

    Returns:
        Tensor [C, G * d] (G key heads of d dimensions).
    """
    weight = getattr(projection, "weight", None)
    if type(projection) is nn.Linear and isinstance(weight, Tensor) and not weight.is_meta:
        return weight[:, list(channels)].T
    # Quantised, adapted or offloaded linears hide their columns: ask the module with unit vectors instead.
    unit = torch.zeros(len(channels) + 1, like.shape[-1], dtype=like.dtype, device=like.device)
    unit[torch.arange(len(channels)), torch.tensor(list(channels))] = 1
    out = projection(unit)
    return out[:-1] - out[-1:]


def rotate(attention: nn.Module, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Apply the family's own rotary embedding.

    Args:
        attention: Attention module; the rotary function is read from the module file that defines it.
        x: Un-rotated queries or keys, [B, G, T, d].
        rotary: (cos, sin) as the model handed them to this attention module, each [B or 1, T, d].

    Returns:
        Rotated tensor, [B, G, T, d].
    """
    apply = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    return apply(x, x, *rotary)[1]


def remove_rope(model: PreTrainedModel) -> None:
    """Make a model position-free for good: its rotary embedding yields cos = 1 and sin = 0.

    For checkpoints trained without position embeddings under the name of a family that rotates
    (AntNLP/TinyLlama-NoPE-1.1B): their config does not say so, and a stock model would rotate silently.

    Raises:
        UserError: The model has no rotary embedding that serves all its layers.
    """
    rotary = getattr(model.base_model, "rotary_emb", None)
    # A Falcon with ALiBi holds a rotary embedding that it does not use.
    if rotary is None or getattr(model.config, "alibi", False):
        raise UserError(
            field="model.rope",
            value="none",
            allowed=f"checkpoint (this {model.config.model_type} model has no rotary embedding to remove)",
            hint="set model.rope=checkpoint",
        )
    # A hook keeps the shape, dtype and device of whatever the family's own module returns.
    rotary.register_forward_hook(lambda module, args, out: (torch.ones_like(out[0]), torch.zeros_like(out[1])))
