"""The tiny networks: stock Hugging Face classes, their hand-set starts, and a training forward over question blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from posbench.synth.data import Batch, block_mask, block_positions
from posbench.synth.recipe import Recipe
from posbench.synth.tokenizer import COLON, END, FIRST_WORD, IS, OPEN, VOCAB

WORD_CHANNEL, AFTER_KEY_CHANNEL, OPEN_CHANNEL, CLOCK_CHANNEL, ROLE_CHANNEL = 1, 2, 3, 4, 5
"""Channels with a hand-set start in ``nope`` and ``alibi`` recipes: marks on the embeddings of words and of the pieces that
follow a key; for ``nope`` also a mark on the first token, a clock that counts tokens, and one for "the last piece follows a
key", which tells values from keys."""


def build_config(recipe: Recipe) -> PreTrainedConfig:
    """The config of a recipe: Llama, SmolLM3 without rotation in any layer, or MPT; no biases, tied embeddings."""
    tokens: dict[str, Any] = {"vocab_size": len(VOCAB), "bos_token_id": None}
    tokens |= {"eos_token_id": VOCAB[END], "pad_token_id": VOCAB[END], "dtype": "float32"}
    if recipe.positions == "alibi":
        return MptConfig(
            d_model=recipe.hidden_size,
            n_heads=recipe.num_heads,
            n_layers=recipe.num_layers,
            expansion_ratio=recipe.intermediate_size // recipe.hidden_size,
            max_seq_len=recipe.max_positions,
            layer_norm_epsilon=recipe.rms_norm_eps,
            learned_pos_emb=False,
            attn_config={"alibi": True},
            no_bias=True,
            use_cache=True,
            tie_word_embeddings=True,
            **tokens,
        )
    llama: dict[str, Any] = {
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_heads,
        "max_position_embeddings": recipe.max_positions,
        "rms_norm_eps": recipe.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": recipe.rope_theta},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    }
    if recipe.positions == "nope":
        return SmolLM3Config(no_rope_layers=[0] * recipe.num_layers, **llama, **tokens)
    return LlamaConfig(head_dim=recipe.head_dim, **llama, **tokens)


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[T, head_dim]`` of the rotary embedding, halves convention."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(positions.float(), frequencies).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` (``[..., T, head_dim]``) rotated by the tables of `rope_tables`."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def alibi_slopes(heads: int) -> Tensor:
    """``[heads]`` nats of attention logit per token of distance, for a power of two of heads, steepest first.

    The stock MPT model reads no ``alibi_bias_max`` from its config: it is 8.
    """
    return 2.0 ** (-torch.arange(1, heads + 1) * 8 / heads)


def initialise(model: PreTrainedModel, recipe: Recipe, rng: torch.Generator) -> None:
    """Set the start of training in place: random weights, except for the parts the recipe sets by hand.

    Set by hand are a constant channel 0; layers from 1 on that compare (equal query and key matrices) and copy (output
    matrix the transpose of the value matrix); with ``rope`` layer 0's offset heads that copy the key to its value and to
    the question's end; with ``nope`` and ``alibi`` two marker channels and one head in layers 0 and 1 each that looks for
    marked tokens. All weights are trained afterwards.
    """
    d = recipe.hidden_size
    std = d**-0.5

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, generator=rng) * scale

    with torch.no_grad():
        embedding = normal(len(VOCAB), d, scale=std)
        embedding[:, 0] = recipe.constant_channel * std
        marked: list[int] = []
        looks: dict[int, tuple[int, Tensor, Tensor]] = {}
        if recipe.positions != "rope":
            marks = {WORD_CHANNEL: list(range(FIRST_WORD, len(VOCAB))), AFTER_KEY_CHANNEL: [VOCAB[COLON], VOCAB[IS]]}
            if recipe.positions == "nope":
                marks |= {OPEN_CHANNEL: [VOCAB[OPEN]], CLOCK_CHANNEL: [], ROLE_CHANNEL: []}
            marked = list(marks)
            embedding[:, marked] = 0
            for channel, tokens in marks.items():
                embedding[tokens, channel] = recipe.constant_channel * std
            if recipe.positions == "nope":
                # Equal norms, or the clock would run at another rate for every word.
                free = [channel for channel in range(1, d) if channel not in marked]
                wanted = (recipe.constant_channel**2 * std**2 + 1) - embedding[:, marked].square().sum(1)
                embedding[:, free] *= (wanted / embedding[:, free].square().sum(1)).sqrt()[:, None]
            # A word's identity goes through two layers; the second head reads it where the first wrote it.
            hd, first = recipe.head_dim, int(recipe.positions == "nope")
            identity = normal(hd, d, scale=std)
            basis = torch.linalg.qr(normal(d, 2 * hd, scale=1.0))[0]
            looks[first] = (WORD_CHANNEL, identity, basis[:, :hd])
            looks[first + 1] = (AFTER_KEY_CHANNEL, basis[:, :hd].T, basis[:, hd:])
        model.get_input_embeddings().weight.copy_(embedding)
        for index, layer in enumerate(model.base_model.blocks if recipe.positions == "alibi" else model.base_model.layers):
            if recipe.positions == "alibi":
                layer.ffn.up_proj.weight.copy_(normal(recipe.intermediate_size, d, scale=std))
                layer.ffn.down_proj.weight.copy_(normal(d, recipe.intermediate_size, scale=0.5 * std * std))
            else:
                mlp = layer.mlp
                mlp.gate_proj.weight.copy_(normal(recipe.intermediate_size, d, scale=std))
                mlp.up_proj.weight.copy_(normal(recipe.intermediate_size, d, scale=std))
                mlp.down_proj.weight.copy_(normal(d, recipe.intermediate_size, scale=0.5 * std * std))
            query, value = normal(d, d, scale=std), normal(d, d, scale=std)
            if index == 0:
                key, output = normal(d, d, scale=std), normal(d, d, scale=0.5 * std)
                if recipe.positions == "rope":
                    _set_offset_heads(query, key, value, output, recipe, rng)
            else:
                query *= recipe.similarity_gain
                # The question's end and the value to be found carry different marks: these must not count against it.
                query[:, marked] = 0
                key = query.clone()
                output = recipe.copy_gain * std * value.T
            if index in looks:
                _set_class_head(query, key, value, output, recipe, *looks[index])
            if recipe.positions == "nope":
                # The clock is read as a small difference of these channels: at the start nothing else may write to them.
                layer.mlp.down_proj.weight[[0, *marked]] = 0
                output[[0, *marked]] = 0
                if index <= max(looks):
                    output[:, recipe.head_dim :] *= recipe.offset_leak
                if index == 0:
                    _set_clock_head(query, key, value, output, recipe)
                elif index == 1:
                    _set_role_head(query, key, value, output, recipe)
                elif index > max(looks):
                    _set_match_head(query, key, recipe, basis[:, recipe.head_dim :].T)
            if recipe.positions == "alibi":
                layer.attn.Wqkv.weight.copy_(torch.cat([query, key, value]))
                layer.attn.out_proj.weight.copy_(output)
            else:
                attention = layer.self_attn
                attention.q_proj.weight.copy_(query)
                attention.k_proj.weight.copy_(key)
                attention.v_proj.weight.copy_(value)
                attention.o_proj.weight.copy_(output)


def _constant_after_norm(recipe: Recipe) -> float:
    """Value of the constant channel after the input norm, for embeddings of the start."""
    return recipe.constant_channel / math.sqrt((recipe.constant_channel**2 + recipe.hidden_size - 1) / recipe.hidden_size)


def _set_class_head(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, recipe: Recipe, channel: int, reads: Tensor, writes: Tensor
) -> None:
    """Head 0 looks, from everywhere, for the last token so far whose embedding is marked in ``channel``."""
    hd = recipe.head_dim
    amplitude = math.sqrt(recipe.offset_logit / math.sqrt(hd)) / _constant_after_norm(recipe)
    query[:hd] *= recipe.offset_leak
    key[:hd] *= recipe.offset_leak
    query[:hd, 0] = amplitude
    key[:hd, channel] = amplitude
    if recipe.positions == "nope":
        _set_latest_rows(query, key, recipe, 0, channel)
    value[:hd] = reads
    output[:, :hd] = recipe.copy_gain * recipe.hidden_size**-0.5 * writes


def _set_clock_head(query: Tensor, key: Tensor, value: Tensor, output: Tensor, recipe: Recipe) -> None:
    """Head 0 weighs the first token against all others: its share falls with the number of tokens so far."""
    hd = recipe.head_dim
    amplitude = math.sqrt(recipe.clock_logit / math.sqrt(hd)) / _constant_after_norm(recipe)
    query[:hd], key[:hd], value[:hd] = 0, 0, 0
    query[:hd, 0] = amplitude
    key[:hd, OPEN_CHANNEL] = amplitude
    value[0, OPEN_CHANNEL] = 1
    output[:, :hd] = 0
    output[CLOCK_CHANNEL, 0] = recipe.constant_channel * recipe.hidden_size**-0.5 / _constant_after_norm(recipe)


def _set_latest_rows(query: Tensor, key: Tensor, recipe: Recipe, head: int, channel: int, sign: int = 1) -> None:
    """For ``nope``: a head that looks for the last token with (-1: without) the mark, by the clock.

    Both terms are differences to the constant channel: the norm scales all channels of a token alike, and its scatter
    would drown the clock. One row carries all: a step of the optimizer then disturbs the logits least.
    """
    hd = recipe.head_dim
    rows, row = slice(head * hd, (head + 1) * hd), head * hd
    amplitude = math.sqrt(recipe.offset_logit * math.sqrt(hd)) / _constant_after_norm(recipe)
    query[rows, 0], key[rows, channel] = 0, 0
    query[row, 0], key[row, channel] = amplitude, sign * amplitude
    key[row, 0] = amplitude * (recipe.clock_gain * recipe.clock_zero - (sign > 0))
    key[row, CLOCK_CHANNEL] = -amplitude * recipe.clock_gain


def _set_role_head(query: Tensor, key: Tensor, value: Tensor, output: Tensor, recipe: Recipe) -> None:
    """For ``nope``: head 1 tells every token whether the last piece (no word) follows a key."""
    hd = recipe.head_dim
    query[hd : 2 * hd], key[hd : 2 * hd], value[hd : 2 * hd] = 0, 0, 0
    _set_latest_rows(query, key, recipe, 1, WORD_CHANNEL, sign=-1)
    value[hd, AFTER_KEY_CHANNEL] = 1
    output[:, hd : 2 * hd] = 0
    output[ROLE_CHANNEL, hd] = recipe.constant_channel * recipe.hidden_size**-0.5 / _constant_after_norm(recipe)


def _set_match_head(query: Tensor, key: Tensor, recipe: Recipe, reads: Tensor) -> None:
    """For ``nope``: head 0 compares the keys that reached the values and the question's end, among values."""
    hd = recipe.head_dim
    query[:hd], key[:hd] = recipe.match_gain * reads, recipe.match_gain * reads
    amplitude = math.sqrt(recipe.match_logit * math.sqrt(hd)) / _constant_after_norm(recipe)
    query[0], key[0] = 0, 0
    query[0, 0] = amplitude
    key[0, [WORD_CHANNEL, ROLE_CHANNEL]] = amplitude


def _set_offset_heads(query: Tensor, key: Tensor, value: Tensor, output: Tensor, recipe: Recipe, rng: torch.Generator) -> None:
    d, hd = recipe.hidden_size, recipe.head_dim
    half = hd // 2
    constant = _constant_after_norm(recipe)
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


def build_model(recipe: Recipe, rng: torch.Generator) -> PreTrainedModel:
    """A float32 model at the start of training, in training mode."""
    kinds = {"rope": LlamaForCausalLM, "nope": SmolLM3ForCausalLM, "alibi": MptForCausalLM}
    model = kinds[recipe.positions](build_config(recipe))
    initialise(model, recipe, rng)
    return model.train()


@dataclass(frozen=True)
class _Layer:
    """One decoder layer as the training forward needs it: weights, and functions of a hidden state."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    norm: Callable[[Tensor], Tensor]
    mlp: Callable[[Tensor], Tensor]
    """Feed-forward part with its norm, without the residual."""


def _llama_layers(model: Any) -> tuple[list[_Layer], Callable[[Tensor], Tensor]]:
    def norm(weight: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: F.rms_norm(x, (x.shape[-1],), weight, model.config.rms_norm_eps)

    def mlp(layer: Any) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            x = norm(layer.post_attention_layernorm.weight)(x)
            gate = F.silu(F.linear(x, layer.mlp.gate_proj.weight)) * F.linear(x, layer.mlp.up_proj.weight)
            return F.linear(gate, layer.mlp.down_proj.weight)

        return forward

    layers = []
    for layer in model.model.layers:
        query, key, value, output = (getattr(layer.self_attn, f"{name}_proj").weight for name in "qkvo")
        layers.append(_Layer(query, key, value, output, norm(layer.input_layernorm.weight), mlp(layer)))
    return layers, norm(model.model.norm.weight)


def _mpt_layers(model: Any) -> tuple[list[_Layer], Callable[[Tensor], Tensor]]:
    def mlp(block: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: block.ffn(block.norm_2(x), 0)

    layers = []
    for block in model.transformer.blocks:
        query, key, value = block.attn.Wqkv.weight.chunk(3)
        layers.append(_Layer(query, key, value, block.attn.out_proj.weight, block.norm_1, mlp(block)))
    return layers, model.transformer.norm_f


def block_logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Logits ``[contexts, questions, 3, vocab]`` for the value, the closing quote and ``<|end|>``.

    The same function of the same weights as the model's own forward on each question apart; the last layer
    computes the rows that are asked for only.
    """
    config: Any = model.config
    heads = config.num_attention_heads
    hd = config.hidden_size // heads
    contexts, total = batch.ids.shape
    start = batch.context_length
    questions = batch.blocks.shape[1]
    positions = block_positions(start, questions)
    mask = block_mask(start, questions)
    layers, final_norm = (_mpt_layers if config.model_type == "mpt" else _llama_layers)(model)
    if config.model_type == "mpt":
        # A bias by the key's position equals one by its distance: the softmax of a row ignores what its keys share.
        bias = alibi_slopes(heads)[:, None, None] * (positions - positions.max())
        mask = torch.where(mask, bias, -math.inf)
    rope = config.model_type == "llama"
    if rope:
        cos, sin = rope_tables(positions, hd, float(config.rope_parameters["rope_theta"]))
    rows = (start + torch.arange(total - start).view(questions, -1)[:, 2:]).reshape(-1)

    def split(x: Tensor) -> Tensor:
        return x.view(contexts, -1, heads, hd).transpose(1, 2)

    embedding = model.get_input_embeddings().weight
    hidden = F.embedding(batch.ids, embedding)
    for index, layer in enumerate(layers):
        normed = layer.norm(hidden)
        key, value = split(F.linear(normed, layer.key)), split(F.linear(normed, layer.value))
        if rope:
            key = rotate(key, cos, sin)
        if index == len(layers) - 1:
            normed, hidden = normed[:, rows], hidden[:, rows]
            mask = mask[..., rows, :]
            if rope:
                cos, sin = cos[rows], sin[rows]
        query = split(F.linear(normed, layer.query))
        if rope:
            query = rotate(query, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        hidden = hidden + F.linear(mixed.transpose(1, 2).flatten(2), layer.output)
        hidden = hidden + layer.mlp(hidden)
    return F.linear(final_norm(hidden), embedding).view(contexts, questions, 3, -1)
