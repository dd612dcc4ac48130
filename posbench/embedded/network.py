"""The networks: stock Hugging Face classes, and a training forward over question blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from posbench.embedded.data import Batch, block_mask, block_positions
from posbench.embedded.recipe import Recipe
from posbench.embedded.start import initialise, rope_tables, rotate
from posbench.embedded.tokenizer import END, VOCAB
from posbench.late import F, PreTrainedConfig, PreTrainedModel, torch, transformers

Map = Callable[[Tensor], Tensor]
Layer = tuple[Tensor, Tensor, Tensor, Tensor, Map, Map, Map]
"""Matrices of queries, keys, values and output of a decoder layer; its two norms; its MLP."""


def build_config(recipe: Recipe) -> PreTrainedConfig:
    """Llama, SmolLM3 without rotation in any layer, or MPT; no biases, tied embeddings."""
    width = recipe.hidden_size
    depth = recipe.num_layers
    heads = recipe.num_heads
    inner = recipe.intermediate_size
    longest = recipe.max_positions
    eps = recipe.rms_norm_eps
    shared: dict[str, Any] = {
        "vocab_size": len(VOCAB),
        "bos_token_id": None,
        "tie_word_embeddings": True,
    }
    shared |= {
        "eos_token_id": VOCAB[END],
        "pad_token_id": VOCAB[END],
        "dtype": "float32",
    }
    if recipe.positions == "alibi":
        shared |= {
            "d_model": width,
            "n_heads": heads,
            "n_layers": depth,
            "max_seq_len": longest,
        }
        shared |= {
            "expansion_ratio": inner // width,
            "layer_norm_epsilon": eps,
            "no_bias": True,
        }
        shared |= {
            "learned_pos_emb": False,
            "attn_config": {"alibi": True},
            "use_cache": True,
        }
        return transformers.MptConfig(**shared)
    shared |= {
        "hidden_size": width,
        "intermediate_size": inner,
        "max_position_embeddings": longest,
    }
    shared |= {
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    shared |= {
        "rope_parameters": {"rope_type": "default", "rope_theta": recipe.rope_theta}
    }
    shared |= {"rms_norm_eps": eps, "attention_bias": False, "mlp_bias": False}
    if recipe.positions == "nope":
        return transformers.SmolLM3Config(no_rope_layers=[0] * depth, **shared)
    return transformers.LlamaConfig(head_dim=recipe.head_dim, **shared)


def alibi_slopes(heads: int) -> Tensor:
    """Nats per token of distance, [heads], steepest first; MPT reads no alibi_bias_max, it is 8."""
    return 2.0 ** (-torch.arange(1, heads + 1) * 8 / heads)


def build_model(recipe: Recipe, rng: torch.Generator) -> PreTrainedModel:
    """A float32 model at the start of training, in training mode."""
    kind = {"rope": "Llama", "nope": "SmolLM3", "alibi": "Mpt"}[recipe.positions]
    model = getattr(transformers, f"{kind}ForCausalLM")(build_config(recipe))
    initialise(model, recipe, rng)
    return model.train()


def _llama_layers(model: Any) -> tuple[list[Layer], Map]:
    def norm(module: Any) -> Map:
        return lambda x: F.rms_norm(
            x, (x.shape[-1],), module.weight, model.config.rms_norm_eps
        )

    layers: list[Layer] = []
    for layer in model.model.layers:
        query, key, value, output = (
            getattr(layer.self_attn, f"{name}_proj").weight for name in "qkvo"
        )
        norms = norm(layer.input_layernorm), norm(layer.post_attention_layernorm)
        layers.append((query, key, value, output, *norms, layer.mlp))
    return layers, norm(model.model.norm)


def _mpt_layers(model: Any) -> tuple[list[Layer], Map]:
    layers: list[Layer] = []
    for block in model.transformer.blocks:
        query, key, value = block.attn.Wqkv.weight.chunk(3)
        mlp = partial(block.ffn, residual=0)
        layers.append(
            (
                query,
                key,
                value,
                block.attn.out_proj.weight,
                block.norm_1,
                block.norm_2,
                mlp,
            )
        )
    return layers, model.transformer.norm_f


def block_logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Logits for the value, the closing quote and ``<|end|>``, [contexts, questions, 3, vocabulary].

    As the model's own forward on each question apart; the last layer computes only the rows asked for.
    """
    config: Any = model.config
    heads = config.num_attention_heads
    rope = config.model_type == "llama"
    alibi = config.model_type == "mpt"
    head_dim, (contexts, total) = config.hidden_size // heads, batch.ids.shape
    start = 4 * batch.pairs
    questions = batch.gold.shape[1]
    positions = block_positions(start, questions)
    mask = block_mask(start, questions)
    layers, final_norm = (_mpt_layers if alibi else _llama_layers)(model)
    if alibi:
        # A bias by the key's position equals one by its distance: a softmax ignores what a row's keys share.
        bias = alibi_slopes(heads)[:, None, None] * (positions - positions.max())
        mask = torch.where(mask, bias, -math.inf)
    if rope:
        cos, sin = rope_tables(
            positions, head_dim, float(config.rope_parameters["rope_theta"])
        )
    rows = (start + torch.arange(total - start).view(questions, -1)[:, 2:]).reshape(-1)

    def split(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).view(contexts, -1, heads, head_dim).transpose(1, 2)

    embedding = model.get_input_embeddings().weight
    hidden = F.embedding(batch.ids, embedding)
    for index, (to_query, to_key, to_value, output, norm_1, norm_2, mlp) in enumerate(
        layers
    ):
        normed = norm_1(hidden)
        key = split(normed, to_key)
        value = split(normed, to_value)
        if rope:
            key = rotate(key, cos, sin)
        if index == len(layers) - 1:
            normed = normed[:, rows]
            hidden = hidden[:, rows]
            mask = mask[..., rows, :]
            if rope:
                cos = cos[rows]
                sin = sin[rows]
        query = split(normed, to_query)
        if rope:
            query = rotate(query, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        hidden = hidden + F.linear(mixed.transpose(1, 2).flatten(2), output)
        hidden = hidden + mlp(norm_2(hidden))
    return F.linear(final_norm(hidden), embedding).view(contexts, questions, 3, -1)
