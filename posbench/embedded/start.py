"""The hand-set starts of the networks. All weights are trained afterwards.

Common to all: a constant channel 0, and layers from 1 on whose heads compare (equal query and key matrices)
and copy (output matrix the transpose of the value matrix). How a key reaches value and question's end:

- ``rope``: layer 0's offset heads look one and two tokens back.
- ``alibi``: heads of layers 0 and 1 look for words and for the pieces after a key; the nearest weighs most.
- ``nope``: the same one layer later, by a clock from layer 0; a head that tells values from keys; and heads
  of the last layers that compare what arrived.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from posbench.embedded.recipe import Recipe
from posbench.embedded.tokenizer import COLON, FIRST_WORD, IS, OPEN, VOCAB
from posbench.late import PreTrainedModel, Tensor, torch

WORD_CHANNEL = 1
AFTER_KEY_CHANNEL = 2
OPEN_CHANNEL = 3
CLOCK_CHANNEL = 4
ROLE_CHANNEL = 5
"""Channels that mark words and the pieces after a key (``nope`` and ``alibi``); the first token, a clock
that falls with every token, and "the last piece follows a key", which tells values from keys (``nope``)."""
_WORDS = {
    WORD_CHANNEL: list(range(FIRST_WORD, len(VOCAB))),
    AFTER_KEY_CHANNEL: [VOCAB[COLON], VOCAB[IS]],
}
MARKS: dict[str, dict[int, list[int]]] = {"rope": {}, "alibi": _WORDS}
MARKS["nope"] = _WORDS | {
    OPEN_CHANNEL: [VOCAB[OPEN]],
    CLOCK_CHANNEL: [],
    ROLE_CHANNEL: [],
}
"""Marked token ids per channel and kind of recipe."""


def rope_tables(
    positions: Tensor, head_dim: int, theta: float
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary embedding, halves convention, each [T, head_dim]."""
    frequencies = theta ** (
        -torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    )
    angle = torch.outer(positions.float(), frequencies).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [..., T, head_dim], rotated by the tables of :func:`rope_tables`."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@torch.no_grad()
def initialise(model: PreTrainedModel, recipe: Recipe, rng: torch.Generator) -> None:
    """Set the start of training in place: random weights, except for what the recipe sets by hand."""
    d = recipe.hidden_size
    hd = recipe.head_dim
    std = recipe.hidden_size**-0.5
    alibi = recipe.positions == "alibi"
    nope = recipe.positions == "nope"
    marked = list(MARKS[recipe.positions])

    def normal(*shape: int, scale: float = std) -> Tensor:
        return torch.randn(*shape, generator=rng) * scale

    model.get_input_embeddings().weight.copy_(_embedding(recipe, normal(len(VOCAB), d)))
    looks: dict[int, tuple[int, Tensor, Tensor]] = {}
    if marked:
        # A word's identity goes through two layers; the second head reads it where the first wrote it.
        identity = normal(hd, d)
        basis = torch.linalg.qr(normal(d, 2 * hd, scale=1.0))[0]
        looks[int(nope)] = (WORD_CHANNEL, identity, basis[:, :hd])
        looks[int(nope) + 1] = (AFTER_KEY_CHANNEL, basis[:, :hd].T, basis[:, hd:])
    for index, layer in enumerate(
        model.base_model.blocks if alibi else model.base_model.layers
    ):
        mlp = layer.ffn if alibi else layer.mlp
        for name in ("up_proj",) if alibi else ("gate_proj", "up_proj"):
            getattr(mlp, name).weight.copy_(normal(recipe.intermediate_size, d))
        mlp.down_proj.weight.copy_(
            normal(d, recipe.intermediate_size, scale=0.5 * std * std)
        )
        query = normal(d, d)
        value = normal(d, d)
        if index == 0:
            maps = _Attention(
                query, normal(d, d), value, normal(d, d, scale=0.5 * std), recipe
            )
            if recipe.positions == "rope":
                maps.offset_heads(rng)
        else:
            query *= recipe.similarity_gain
            # The question's end and the value carry different marks: these must not count against a match.
            query[:, marked] = 0
            maps = _Attention(
                query, query.clone(), value, recipe.copy_gain * std * value.T, recipe
            )
        if index in looks:
            maps.class_head(*looks[index])
        if nope:
            # The clock is read as a small difference of these channels: nothing else may write to them yet.
            mlp.down_proj.weight[[0, *marked]] = 0
            maps.output[[0, *marked]] = 0
            if index <= max(looks):
                maps.output[:, hd:] *= recipe.offset_leak
            if index == 0:
                maps.clock_head()
            elif index == 1:
                maps.role_head()
            elif index > max(looks):
                maps.match_head(basis[:, hd:].T)
        if alibi:
            layer.attn.Wqkv.weight.copy_(torch.cat([maps.query, maps.key, maps.value]))
            layer.attn.out_proj.weight.copy_(maps.output)
            continue
        for name in ("query", "key", "value", "output"):
            getattr(layer.self_attn, f"{name[0]}_proj").weight.copy_(
                getattr(maps, name)
            )


def _embedding(recipe: Recipe, embedding: Tensor) -> Tensor:
    """Random embeddings with the constant channel and the marks set."""
    d = recipe.hidden_size
    marks = MARKS[recipe.positions]
    mark = recipe.constant_channel * d**-0.5
    embedding[:, 0] = mark
    embedding[:, list(marks)] = 0
    for channel, tokens in marks.items():
        embedding[tokens, channel] = mark
    if recipe.positions == "nope":
        # Equal norms, or the clock would run at another rate for every word.
        free = [channel for channel in range(1, d) if channel not in marks]
        wanted = mark**2 + 1 - embedding[:, list(marks)].square().sum(1)
        embedding[:, free] *= (wanted / embedding[:, free].square().sum(1)).sqrt()[
            :, None
        ]
    return embedding


@dataclass
class _Attention:
    """Attention matrices of one layer, [D, D]; rows of the first three, columns of the last are heads'."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    recipe: Recipe

    def __post_init__(self) -> None:
        self.hd = self.recipe.head_dim
        self.std = self.recipe.hidden_size**-0.5
        constant = self.recipe.constant_channel
        d = self.recipe.hidden_size
        self.constant = constant / math.sqrt(
            (constant**2 + d - 1) / d
        )  # channel 0 after the input norm

    def _amplitude(self, scaled: float) -> float:
        """Entry of a query and of a key row, so that their product over the constant is a scaled logit."""
        return math.sqrt(scaled) / self.constant

    def class_head(self, channel: int, reads: Tensor, writes: Tensor) -> None:
        """Head 0 looks, from everywhere, for the last token so far whose embedding is marked in a channel."""
        hd = self.hd
        self.query[:hd] *= self.recipe.offset_leak
        self.key[:hd] *= self.recipe.offset_leak
        amplitude = self._amplitude(self.recipe.offset_logit / math.sqrt(hd))
        self.query[:hd, 0], self.key[:hd, channel] = amplitude, amplitude
        if self.recipe.positions == "nope":
            self._latest_rows(0, channel)
        self.value[:hd], self.output[:, :hd] = (
            reads,
            self.recipe.copy_gain * self.std * writes,
        )

    def clock_head(self) -> None:
        """Head 0 weighs the first token against all others: its share falls with the tokens so far."""
        hd = self.hd
        self.query[:hd], self.key[:hd], self.value[:hd], self.output[:, :hd] = (
            0,
            0,
            0,
            0,
        )
        amplitude = self._amplitude(self.recipe.clock_logit / math.sqrt(hd))
        self.query[:hd, 0], self.key[:hd, OPEN_CHANNEL] = amplitude, amplitude
        self._carry(0, OPEN_CHANNEL, CLOCK_CHANNEL)

    def role_head(self) -> None:
        """For ``nope``: head 1 tells every token whether the last piece (no word) follows a key."""
        rows = slice(self.hd, 2 * self.hd)
        self.query[rows], self.key[rows], self.value[rows], self.output[:, rows] = (
            0,
            0,
            0,
            0,
        )
        self._latest_rows(1, WORD_CHANNEL, sign=-1)
        self._carry(self.hd, AFTER_KEY_CHANNEL, ROLE_CHANNEL)

    def match_head(self, reads: Tensor) -> None:
        """For ``nope``: head 0 compares the keys that reached values and the question's end, among values."""
        hd = self.hd
        gain = self.recipe.match_gain
        self.query[:hd], self.key[:hd], self.query[0], self.key[0] = (
            gain * reads,
            gain * reads,
            0,
            0,
        )
        amplitude = self._amplitude(self.recipe.match_logit * math.sqrt(hd))
        self.query[0, 0], self.key[0, [WORD_CHANNEL, ROLE_CHANNEL]] = (
            amplitude,
            amplitude,
        )

    def offset_heads(self, rng: torch.Generator) -> None:
        """Heads that look a fixed number of tokens back, by the rotation of the constant channel."""
        recipe, d, hd = self.recipe, self.recipe.hidden_size, self.hd
        weights = torch.zeros(hd // 2)
        weights[: len(recipe.offset_weights)] = torch.tensor(recipe.offset_weights)
        logits = weights / weights.sum() * recipe.offset_logit * math.sqrt(hd)
        amplitude = torch.cat([logits.sqrt() / self.constant, torch.zeros(hd // 2)])
        shared_value = torch.randn(hd, d, generator=rng) * self.std
        basis = torch.linalg.qr(torch.randn(d, hd, generator=rng))[0]
        for head, offset in enumerate(recipe.offsets):
            rows = slice(head * hd, (head + 1) * hd)
            self.query[rows] *= recipe.offset_leak
            self.key[rows] *= recipe.offset_leak
            cos, sin = rope_tables(torch.tensor([-offset]), hd, recipe.rope_theta)
            self.query[rows, 0], self.key[rows, 0] = (
                rotate(amplitude[None], cos, sin)[0],
                amplitude,
            )
            # One map for both heads: the key reaches its value and the question in the same subspace.
            self.value[rows], self.output[:, rows] = (
                shared_value,
                recipe.copy_gain * self.std * basis,
            )

    def _carry(self, row: int, reads: int, writes: int) -> None:
        """One row of a head carries a mark, at its height in the embedding, from one channel to another."""
        mark = self.recipe.constant_channel * self.std
        self.value[row, reads], self.output[writes, row] = 1, mark / self.constant

    def _latest_rows(self, head: int, channel: int, sign: int = 1) -> None:
        """For ``nope``: a head that looks for the last token with (-1: without) the mark, by the clock.

        Both terms are differences to the constant channel: the norm scales all channels of a token alike, its
        scatter would drown the clock. In one row, where an optimizer's step disturbs the logits least.
        """
        rows = slice(head * self.hd, (head + 1) * self.hd)
        row = head * self.hd
        gain = self.recipe.clock_gain
        amplitude = self._amplitude(self.recipe.offset_logit * math.sqrt(self.hd))
        self.query[rows, 0], self.key[rows, channel] = 0, 0
        self.query[row, 0], self.key[row, channel] = amplitude, sign * amplitude
        self.key[row, 0] = amplitude * (gain * self.recipe.clock_zero - (sign > 0))
        self.key[row, CLOCK_CHANNEL] = -amplitude * gain
