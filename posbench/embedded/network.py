"""The networks: stock Hugging Face classes, and a training forward over question blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from posbench.embedded.data import Batch, block_mask, block_positions
from posbench.embedded.recipe import Recipe
from posbench.embedded.start import initialise, rope_tables, rotate
from posbench.embedded.tokenizer import END, VOCAB
from posbench.late import F, PreTrainedConfig, PreTrainedModel, torch, transformers

Map = Callable[[Tensor], Tensor]
MODEL_CLASSES = {
    "rope": "LlamaForCausalLM",
    "nope": "SmolLM3ForCausalLM",
    "alibi": "MptForCausalLM",
}


class Layer(NamedTuple):
    """Matrices and maps of a decoder layer, whatever its class calls them."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    attention_norm: Map
    mlp_norm: Map
    mlp: Map


def build_config(recipe: Recipe) -> PreTrainedConfig:
    """Llama, SmolLM3 without rotation in any layer, or MPT; no biases, tied embeddings."""
    shared: dict[str, Any] = {
        "vocab_size": len(VOCAB),
        "bos_token_id": None,
        "eos_token_id": VOCAB[END],
        "pad_token_id": VOCAB[END],
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    if recipe.positions == "alibi":
        return transformers.MptConfig(
            d_model=recipe.hidden_size,
            n_heads=recipe.num_heads,
            n_layers=recipe.num_layers,
            max_seq_len=recipe.max_positions,
            expansion_ratio=recipe.intermediate_size // recipe.hidden_size,
            layer_norm_epsilon=recipe.rms_norm_eps,
            no_bias=True,
            learned_pos_emb=False,
            attn_config={"alibi": True},
            use_cache=True,
            **shared,
        )
    shared |= {
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "max_position_embeddings": recipe.max_positions,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_heads,
        "rope_parameters": {"rope_type": "default", "rope_theta": recipe.rope_theta},
        "rms_norm_eps": recipe.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
    }
    if recipe.positions == "nope":
        return transformers.SmolLM3Config(
            no_rope_layers=[0] * recipe.num_layers, **shared
        )
    return transformers.LlamaConfig(head_dim=recipe.head_dim, **shared)


def alibi_slopes(heads: int) -> Tensor:
    """Nats per token of distance, [heads], steepest first; MPT reads no alibi_bias_max, it is 8."""
    return 2.0 ** (-torch.arange(1, heads + 1) * 8 / heads)


def build_model(recipe: Recipe, rng: torch.Generator) -> PreTrainedModel:
    """A float32 model at the start of training, in training mode."""
    model_class = getattr(transformers, MODEL_CLASSES[recipe.positions])
    model = model_class(build_config(recipe))
    initialise(model, recipe, rng)
    return model.train()


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _llama_layers(model: Any) -> tuple[list[Layer], Map]:
    """The layers of Llama or SmolLM3, and the final norm."""
    norm = partial(_rms_norm, eps=model.config.rms_norm_eps)
    layers = [
        Layer(
            query=layer.self_attn.q_proj.weight,
            key=layer.self_attn.k_proj.weight,
            value=layer.self_attn.v_proj.weight,
            output=layer.self_attn.o_proj.weight,
            attention_norm=partial(norm, weight=layer.input_layernorm.weight),
            mlp_norm=partial(norm, weight=layer.post_attention_layernorm.weight),
            mlp=layer.mlp,
        )
        for layer in model.model.layers
    ]
    return layers, partial(norm, weight=model.model.norm.weight)


def _mpt_layers(model: Any) -> tuple[list[Layer], Map]:
    """The layers of MPT, and the final norm."""
    layers = []
    for block in model.transformer.blocks:
        query, key, value = block.attn.Wqkv.weight.chunk(3)
        layer = Layer(
            query=query,
            key=key,
            value=value,
            output=block.attn.out_proj.weight,
            attention_norm=block.norm_1,
            mlp_norm=block.norm_2,
            mlp=partial(block.ffn, residual=0),
        )
        layers.append(layer)
    return layers, model.transformer.norm_f


def block_logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Compute the logits after a question, after its value and after the closing quote.

    They equal the logits of the model's own forward on each question apart. The last layer computes only the rows
    whose logits are returned.

    Args:
        model: Llama, SmolLM3 or MPT of :func:`build_model`.
        batch: Contexts with question blocks.

    Returns:
        Logits for the value, the closing quote and ``<|end|>``, [contexts, questions, 3, vocabulary].
    """
    config: Any = model.config
    heads = config.num_attention_heads
    rope = config.model_type == "llama"
    alibi = config.model_type == "mpt"
    contexts, total = batch.ids.shape
    context_length = 4 * batch.pairs
    questions = batch.gold.shape[1]
    positions = block_positions(context_length, questions)
    mask = block_mask(context_length, questions)
    layers, final_norm = _mpt_layers(model) if alibi else _llama_layers(model)
    if alibi:
        # A bias by the key's position equals one by its distance: a softmax ignores a constant per row.
        bias = alibi_slopes(heads)[:, None, None] * (positions - positions.max())
        mask = torch.where(mask, bias, -math.inf)
    if rope:
        head_dim = config.hidden_size // heads
        theta = float(config.rope_parameters["rope_theta"])
        cos, sin = rope_tables(positions, head_dim, theta)
    # The last three tokens of each block.
    block_rows = torch.arange(context_length, total).view(questions, -1)
    rows = block_rows[:, 2:].reshape(-1)
    embedding = model.get_input_embeddings().weight
    hidden = F.embedding(batch.ids, embedding)
    for index, layer in enumerate(layers):
        normed = layer.attention_norm(hidden)
        key = _split_heads(F.linear(normed, layer.key), heads)
        value = _split_heads(F.linear(normed, layer.value), heads)
        if rope:
            key = rotate(key, cos, sin)
        if index == len(layers) - 1:
            normed = normed[:, rows]
            hidden = hidden[:, rows]
            mask = mask[..., rows, :]
            if rope:
                cos = cos[rows]
                sin = sin[rows]
        query = _split_heads(F.linear(normed, layer.query), heads)
        if rope:
            query = rotate(query, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        mixed = mixed.transpose(1, 2).flatten(2)
        hidden = hidden + F.linear(mixed, layer.output)
        hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
    logits = F.linear(final_norm(hidden), embedding)
    return logits.view(contexts, questions, 3, -1)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, H * head_dim] as [B, H, T, head_dim]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
