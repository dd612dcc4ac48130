"""The tiny network: a stock Hugging Face Llama, its hand-set start, and a training forward over question blocks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from posbench.synth.data import Batch, block_mask, block_positions
from posbench.synth.recipe import Recipe
from posbench.synth.tokenizer import END, VOCAB


def build_config(recipe: Recipe) -> LlamaConfig:
    """The Llama config of a recipe: no biases, tied embeddings, one key head per query head."""
    return LlamaConfig(
        vocab_size=len(VOCAB),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_positions,
        rms_norm_eps=recipe.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=None,
        eos_token_id=VOCAB[END],
        pad_token_id=VOCAB[END],
        dtype="float32",
    )


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[T, head_dim]`` of the rotary embedding, halves convention."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(positions.float(), frequencies).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` (``[..., T, head_dim]``) rotated by the tables of `rope_tables`."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def initialise(model: LlamaForCausalLM, recipe: Recipe, rng: torch.Generator) -> None:
    """Set the start of training in place: random weights, except for the parts the recipe sets by hand.

    Set by hand are a constant channel 0, layer 0's offset heads that copy the key to its value and to the
    question's end, and layers from 1 on that compare (equal query and key matrices) and copy (output matrix the
    transpose of the value matrix). All weights are trained afterwards.
    """
    d = recipe.hidden_size
    std = d**-0.5

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, generator=rng) * scale

    with torch.no_grad():
        embedding = normal(len(VOCAB), d, scale=std)
        embedding[:, 0] = recipe.constant_channel * std
        model.model.embed_tokens.weight.copy_(embedding)
        for index, layer in enumerate(model.model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            mlp.gate_proj.weight.copy_(normal(recipe.intermediate_size, d, scale=std))
            mlp.up_proj.weight.copy_(normal(recipe.intermediate_size, d, scale=std))
            mlp.down_proj.weight.copy_(normal(d, recipe.intermediate_size, scale=0.5 * std * std))
            query, value = normal(d, d, scale=std), normal(d, d, scale=std)
            if index == 0:
                key, output = normal(d, d, scale=std), normal(d, d, scale=0.5 * std)
                _set_offset_heads(query, key, value, output, recipe, rng)
            else:
                query *= recipe.similarity_gain
                key = query.clone()
                output = recipe.copy_gain * std * value.T
            attention.q_proj.weight.copy_(query)
            attention.k_proj.weight.copy_(key)
            attention.v_proj.weight.copy_(value)
            attention.o_proj.weight.copy_(output)


def _set_offset_heads(query: Tensor, key: Tensor, value: Tensor, output: Tensor, recipe: Recipe, rng: torch.Generator) -> None:
    d, hd = recipe.hidden_size, recipe.head_dim
    half = hd // 2
    # Value of the constant channel after the input norm, for embeddings of the start.
    constant = recipe.constant_channel / math.sqrt((recipe.constant_channel**2 + d - 1) / d)
    weights = torch.zeros(half)
    weights[: len(recipe.offset_weights)] = torch.tensor(recipe.offset_weights)
    amplitude = torch.zeros(hd)
    amplitude[:half] = (weights / weights.sum() * recipe.offset_logit * math.sqrt(hd)).sqrt() / constant
    shared_value = torch.randn(hd, d, generator=rng) * d**-0.5
    basis = torch.linalg.qr(torch.randn(d, hd, generator=rng))[0]
    for head, offset in enumerate(recipe.offsets):
        rows = slice(head * hd, (head + 1) * hd)
        query[rows] *= recipe.offset_leak
        key[rows] *= recipe.offset_leak
        cos, sin = rope_tables(torch.tensor([-offset]), hd, recipe.rope_theta)
        query[rows, 0] = rotate(amplitude[None], cos, sin)[0]
        key[rows, 0] = amplitude
        # One value and output map for both heads: the key reaches its value and the question in the same subspace.
        value[rows] = shared_value
        output[:, rows] = recipe.copy_gain * d**-0.5 * basis


def build_model(recipe: Recipe, rng: torch.Generator) -> LlamaForCausalLM:
    """A float32 model at the start of training, in training mode."""
    model = LlamaForCausalLM(build_config(recipe))
    initialise(model, recipe, rng)
    return model.train()


def block_logits(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Logits ``[contexts, questions, 3, vocab]`` for the value, the closing quote and ``<|end|>``.

    The same function of the same weights as the model's own forward on each question apart; the last layer
    computes the rows that are asked for only.
    """
    config: Any = model.config
    heads, hd = config.num_attention_heads, config.head_dim
    contexts, total = batch.ids.shape
    start = batch.context_length
    questions = batch.blocks.shape[1]
    mask = block_mask(start, questions)
    theta = float(config.rope_parameters["rope_theta"])
    cos, sin = rope_tables(block_positions(start, questions), hd, theta)
    rows = (start + torch.arange(total - start).view(questions, -1)[:, 2:]).reshape(-1)

    def split(x: Tensor) -> Tensor:
        return x.view(contexts, -1, heads, hd).transpose(1, 2)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, config.rms_norm_eps)

    hidden = F.embedding(batch.ids, model.model.embed_tokens.weight)
    last = len(model.model.layers) - 1
    for index, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        normed = norm(hidden, layer.input_layernorm.weight)
        key = rotate(split(F.linear(normed, attention.k_proj.weight)), cos, sin)
        value = split(F.linear(normed, attention.v_proj.weight))
        if index == last:
            normed, hidden = normed[:, rows], hidden[:, rows]
            mask, cos, sin = mask[rows], cos[rows], sin[rows]
        query = rotate(split(F.linear(normed, attention.q_proj.weight)), cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        hidden = hidden + F.linear(mixed.transpose(1, 2).flatten(2), attention.o_proj.weight)
        normed = norm(hidden, layer.post_attention_layernorm.weight)
        gate = F.silu(F.linear(normed, mlp.gate_proj.weight)) * F.linear(normed, mlp.up_proj.weight)
        hidden = hidden + F.linear(gate, mlp.down_proj.weight)
    hidden = norm(hidden, model.model.norm.weight)
    return F.linear(hidden, model.model.embed_tokens.weight).view(contexts, questions, 3, -1)
