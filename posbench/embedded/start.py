"""The hand-set starts of the tiny networks.

Common to all: a constant channel 0, and layers from 1 on whose heads compare (equal query and key matrices)
and copy (output matrix the transpose of the value matrix). What differs is how a key reaches its value and
the question's end:

- ``rope``: layer 0's offset heads look one and two tokens back.
- ``alibi``: a head of layer 0 looks for words, one of layer 1 for the pieces that follow a key; the nearest
  weighs most.
- ``nope``: the same one layer later, with a clock from layer 0 in place of the bias by distance; a head that
  tells values from keys; and heads of the last layers that compare what arrived.

All weights are trained afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posbench.embedded.recipe import Recipe
from posbench.embedded.tokenizer import COLON, FIRST_WORD, IS, OPEN, VOCAB

WORD_CHANNEL, AFTER_KEY_CHANNEL, OPEN_CHANNEL, CLOCK_CHANNEL, ROLE_CHANNEL = 1, 2, 3, 4, 5
"""Channels with a hand-set start: marks on the embeddings of words and of the pieces that follow a key
(``nope`` and ``alibi``); a mark on the first token, a clock that falls with every token, and one for "the
last piece follows a key", which tells values from keys (``nope``)."""
MARKS: dict[str, dict[int, list[int]]] = {"rope": {}}
"""Marked token ids per channel and kind of recipe."""
MARKS["alibi"] = {
    WORD_CHANNEL: list(range(FIRST_WORD, len(VOCAB))),
    AFTER_KEY_CHANNEL: [VOCAB[COLON], VOCAB[IS]],
}
MARKS["nope"] = MARKS["alibi"] | {OPEN_CHANNEL: [VOCAB[OPEN]], CLOCK_CHANNEL: [], ROLE_CHANNEL: []}


@dataclass
class _Maps:
    """Attention matrices of one layer, each [D, D]; rows of the first three and columns of the last belong to
    heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[T, head_dim]`` of the rotary embedding, halves convention."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(positions.float(), frequencies).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` (``[..., T, head_dim]``) rotated by the tables of `rope_tables`."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def initialise(model: PreTrainedModel, recipe: Recipe, rng: torch.Generator) -> None:
    """Set the start of training in place: random weights, except for the parts that the recipe sets by
    hand."""
    d, hd, std = recipe.hidden_size, recipe.head_dim, recipe.hidden_size**-0.5
    marked = list(MARKS[recipe.positions])

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, generator=rng) * scale

    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(_embedding(recipe, normal(len(VOCAB), d, scale=std)))
        looks: dict[int, tuple[int, Tensor, Tensor]] = {}
        if marked:
            # A word's identity goes through two layers; the second head reads it where the first wrote it.
            identity = normal(hd, d, scale=std)
            basis = torch.linalg.qr(normal(d, 2 * hd, scale=1.0))[0]
            first = int(recipe.positions == "nope")
            looks[first] = (WORD_CHANNEL, identity, basis[:, :hd])
            looks[first + 1] = (AFTER_KEY_CHANNEL, basis[:, :hd].T, basis[:, hd:])
        layers = model.base_model.blocks if recipe.positions == "alibi" else model.base_model.layers
        for index, layer in enumerate(layers):
            mlp = layer.ffn if recipe.positions == "alibi" else layer.mlp
            for name in ("up_proj",) if recipe.positions == "alibi" else ("gate_proj", "up_proj"):
                getattr(mlp, name).weight.copy_(normal(recipe.intermediate_size, d, scale=std))
            mlp.down_proj.weight.copy_(normal(d, recipe.intermediate_size, scale=0.5 * std * std))
            query, value = normal(d, d, scale=std), normal(d, d, scale=std)
            if index == 0:
                maps = _Maps(query, normal(d, d, scale=std), value, normal(d, d, scale=0.5 * std))
                if recipe.positions == "rope":
                    _set_offset_heads(maps, recipe, rng)
            else:
                query *= recipe.similarity_gain
                # The question's end and the value to be found carry different marks: these must not count
                # against it.
                query[:, marked] = 0
                maps = _Maps(query, query.clone(), value, recipe.copy_gain * std * value.T)
            if index in looks:
                _set_class_head(maps, recipe, *looks[index])
            if recipe.positions == "nope":
                # The clock is read as a small difference of these channels: at the start nothing else may
                # write to them.
                mlp.down_proj.weight[[0, *marked]] = 0
                maps.output[[0, *marked]] = 0
                if index <= max(looks):
                    maps.output[:, hd:] *= recipe.offset_leak
                if index == 0:
                    _set_clock_head(maps, recipe)
                elif index == 1:
                    _set_role_head(maps, recipe)
                elif index > max(looks):
                    _set_match_head(maps, recipe, basis[:, hd:].T)
            _write(layer, maps)


def _embedding(recipe: Recipe, embedding: Tensor) -> Tensor:
    d, marks = recipe.hidden_size, MARKS[recipe.positions]
    mark = recipe.constant_channel * d**-0.5
    embedding[:, 0] = mark
    embedding[:, list(marks)] = 0
    for channel, tokens in marks.items():
        embedding[tokens, channel] = mark
    if recipe.positions == "nope":
        # Equal norms, or the clock would run at another rate for every word.
        free = [channel for channel in range(1, d) if channel not in marks]
        wanted = mark**2 + 1 - embedding[:, list(marks)].square().sum(1)
        embedding[:, free] *= (wanted / embedding[:, free].square().sum(1)).sqrt()[:, None]
    return embedding


def _write(layer: torch.nn.Module, maps: _Maps) -> None:
    if hasattr(layer, "attn"):
        layer.attn.Wqkv.weight.copy_(torch.cat([maps.query, maps.key, maps.value]))
        layer.attn.out_proj.weight.copy_(maps.output)
        return
    attention = layer.self_attn
    for name, weight in (("q", maps.query), ("k", maps.key), ("v", maps.value), ("o", maps.output)):
        getattr(attention, f"{name}_proj").weight.copy_(weight)


def _constant_after_norm(recipe: Recipe) -> float:
    """Value of the constant channel after the input norm, for embeddings of the start."""
    return recipe.constant_channel / math.sqrt(
        (recipe.constant_channel**2 + recipe.hidden_size - 1) / recipe.hidden_size
    )


def _set_class_head(maps: _Maps, recipe: Recipe, channel: int, reads: Tensor, writes: Tensor) -> None:
    """Head 0 looks, from everywhere, for the last token so far whose embedding is marked in ``channel``."""
    hd = recipe.head_dim
    amplitude = math.sqrt(recipe.offset_logit / math.sqrt(hd)) / _constant_after_norm(recipe)
    maps.query[:hd] *= recipe.offset_leak
    maps.key[:hd] *= recipe.offset_leak
    maps.query[:hd, 0] = amplitude
    maps.key[:hd, channel] = amplitude
    if recipe.positions == "nope":
        _set_latest_rows(maps, recipe, 0, channel)
    maps.value[:hd] = reads
    maps.output[:, :hd] = recipe.copy_gain * recipe.hidden_size**-0.5 * writes


def _set_clock_head(maps: _Maps, recipe: Recipe) -> None:
    """Head 0 weighs the first token against all others: its share falls with the number of tokens so far."""
    hd = recipe.head_dim
    amplitude = math.sqrt(recipe.clock_logit / math.sqrt(hd)) / _constant_after_norm(recipe)
    maps.query[:hd], maps.key[:hd], maps.value[:hd] = 0, 0, 0
    maps.query[:hd, 0] = amplitude
    maps.key[:hd, OPEN_CHANNEL] = amplitude
    maps.value[0, OPEN_CHANNEL] = 1
    maps.output[:, :hd] = 0
    maps.output[CLOCK_CHANNEL, 0] = (
        recipe.constant_channel * recipe.hidden_size**-0.5 / _constant_after_norm(recipe)
    )


def _set_latest_rows(maps: _Maps, recipe: Recipe, head: int, channel: int, sign: int = 1) -> None:
    """For ``nope``: a head that looks for the last token with (-1: without) the mark, by the clock.

    Both terms are differences to the constant channel: the norm scales all channels of a token alike, and its
    scatter would drown the clock. One row carries all: a step of the optimizer then disturbs the logits
    least.
    """
    hd = recipe.head_dim
    rows, row = slice(head * hd, (head + 1) * hd), head * hd
    amplitude = math.sqrt(recipe.offset_logit * math.sqrt(hd)) / _constant_after_norm(recipe)
    maps.query[rows, 0], maps.key[rows, channel] = 0, 0
    maps.query[row, 0], maps.key[row, channel] = amplitude, sign * amplitude
    maps.key[row, 0] = amplitude * (recipe.clock_gain * recipe.clock_zero - (sign > 0))
    maps.key[row, CLOCK_CHANNEL] = -amplitude * recipe.clock_gain


def _set_role_head(maps: _Maps, recipe: Recipe) -> None:
    """For ``nope``: head 1 tells every token whether the last piece (no word) follows a key."""
    hd = recipe.head_dim
    maps.query[hd : 2 * hd], maps.key[hd : 2 * hd], maps.value[hd : 2 * hd] = 0, 0, 0
    _set_latest_rows(maps, recipe, 1, WORD_CHANNEL, sign=-1)
    maps.value[hd, AFTER_KEY_CHANNEL] = 1
    maps.output[:, hd : 2 * hd] = 0
    maps.output[ROLE_CHANNEL, hd] = (
        recipe.constant_channel * recipe.hidden_size**-0.5 / _constant_after_norm(recipe)
    )


def _set_match_head(maps: _Maps, recipe: Recipe, reads: Tensor) -> None:
    """For ``nope``: head 0 compares the keys that reached the values and the question's end, among values."""
    hd = recipe.head_dim
    maps.query[:hd], maps.key[:hd] = recipe.match_gain * reads, recipe.match_gain * reads
    amplitude = math.sqrt(recipe.match_logit * math.sqrt(hd)) / _constant_after_norm(recipe)
    maps.query[0], maps.key[0] = 0, 0
    maps.query[0, 0] = amplitude
    maps.key[0, [WORD_CHANNEL, ROLE_CHANNEL]] = amplitude


def _set_offset_heads(maps: _Maps, recipe: Recipe, rng: torch.Generator) -> None:
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
        maps.query[rows] *= recipe.offset_leak
        maps.key[rows] *= recipe.offset_leak
        cos, sin = rope_tables(torch.tensor([-offset]), hd, recipe.rope_theta)
        maps.query[rows, 0] = rotate(amplitude[None], cos, sin)[0]
        maps.key[rows, 0] = amplitude
        # One value and output map for both heads: the key reaches its value and the question in the same
        # subspace.
        maps.value[rows] = shared_value
        maps.output[:, rows] = recipe.copy_gain * d**-0.5 * basis
