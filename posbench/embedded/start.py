"""The hand-set starts of the networks. All weights are trained afterwards.

Common to all: a constant channel 0, and layers from 1 on whose heads compare (equal query and key matrices)
and copy (output matrix the transpose of the value matrix). How a key reaches value and question's end:

- ``rope``: layer 0's offset heads look one and two tokens back.
- ``alibi``: heads of layers 0 and 1 look for words and for the pieces after a key; the nearest weighs most.
- ``nope``: as alibi, one layer later, by a clock from layer 0; a head that separates values from keys; and heads
  of the last layers that compare what arrived.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from posbench.embedded.recipe import Recipe
from posbench.embedded.tokenizer import COLON, FIRST_WORD, IS, OPEN, VOCAB
from posbench.late import PreTrainedModel, Tensor, torch

# Channels that mark tokens; from OPEN_CHANNEL on for ``nope`` alone.
WORD_CHANNEL = 1  # words
AFTER_KEY_CHANNEL = 2  # the pieces after a key
OPEN_CHANNEL = 3  # the first token
CLOCK_CHANNEL = 4  # a clock that falls with every token
ROLE_CHANNEL = 5  # "the last piece follows a key", which separates values from keys
_WORD_MARKS = {
    WORD_CHANNEL: list(range(FIRST_WORD, len(VOCAB))),
    AFTER_KEY_CHANNEL: [VOCAB[COLON], VOCAB[IS]],
}
MARKED_TOKENS: dict[str, dict[int, list[int]]] = {
    "rope": {},
    "alibi": _WORD_MARKS,
    "nope": {
        **_WORD_MARKS,
        OPEN_CHANNEL: [VOCAB[OPEN]],
        CLOCK_CHANNEL: [],
        ROLE_CHANNEL: [],
    },
}
"""Marked token ids per channel and kind of recipe."""


def rope_tables(
    positions: Tensor, head_dim: int, theta: float
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary embedding, halves convention.

    Args:
        positions: Position ids, [T].
        head_dim: Channels per head.
        theta: Base of the rotary embedding.

    Returns:
        Two tables, [T, head_dim] each.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = theta ** (-exponents)
    angle = torch.outer(positions.float(), frequencies).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [..., T, head_dim], rotated by the tables of :func:`rope_tables`."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class _LatestMarkHead(NamedTuple):
    """A head that looks for the last marked token; see :meth:`_Attention.latest_mark_head`."""

    channel: int  # of the mark
    reads: Tensor  # value matrix, [head_dim, D]
    writes: Tensor  # output matrix before its gain, [D, head_dim]


@torch.no_grad()
def initialise(model: PreTrainedModel, recipe: Recipe, rng: torch.Generator) -> None:
    """Set the weights before training in place: random, except where the recipe sets them by hand."""
    d = recipe.hidden_size
    hd = recipe.head_dim
    std = d**-0.5
    alibi = recipe.positions == "alibi"
    nope = recipe.positions == "nope"
    marked = list(MARKED_TOKENS[recipe.positions])
    embedding = _normal((len(VOCAB), d), std, rng)
    _mark_embedding(recipe, embedding)
    model.get_input_embeddings().weight.copy_(embedding)
    latest_mark_heads: dict[int, _LatestMarkHead] = {}
    if marked:
        latest_mark_heads = _draw_latest_mark_heads(recipe, rng)
    layers = model.base_model.blocks if alibi else model.base_model.layers
    for index, layer in enumerate(layers):
        mlp = layer.ffn if alibi else layer.mlp
        inner = recipe.intermediate_size
        for projection in [mlp.up_proj] if alibi else [mlp.gate_proj, mlp.up_proj]:
            projection.weight.copy_(_normal((inner, d), std, rng))
        mlp.down_proj.weight.copy_(_normal((d, inner), 0.5 * std * std, rng))
        query = _normal((d, d), std, rng)
        value = _normal((d, d), std, rng)
        if index == 0:
            key = _normal((d, d), std, rng)
            output = _normal((d, d), 0.5 * std, rng)
        else:
            query *= recipe.similarity_gain
            # The question's end and the value carry different marks: these must not count against a match.
            query[:, marked] = 0
            key = query.clone()
            output = recipe.copy_gain * std * value.T
        attention = _Attention(query, key, value, output, recipe)
        if index == 0 and recipe.positions == "rope":
            attention.offset_heads(rng)
        if index in latest_mark_heads:
            attention.latest_mark_head(latest_mark_heads[index])
        if nope:
            last_mark_layer = max(latest_mark_heads)
            # The clock is read as a small difference of these channels: nothing else may write to them yet.
            mlp.down_proj.weight[[0, *marked]] = 0
            attention.output[[0, *marked]] = 0
            if index <= last_mark_layer:
                attention.output[:, hd:] *= recipe.offset_leak
            if index == 0:
                attention.clock_head()
            elif index == 1:
                attention.role_head()
            elif index > last_mark_layer:
                attention.match_head(latest_mark_heads[last_mark_layer].writes.T)
        if alibi:
            projections = [attention.query, attention.key, attention.value]
            layer.attn.Wqkv.weight.copy_(torch.cat(projections))
            layer.attn.out_proj.weight.copy_(attention.output)
        else:
            layer.self_attn.q_proj.weight.copy_(attention.query)
            layer.self_attn.k_proj.weight.copy_(attention.key)
            layer.self_attn.v_proj.weight.copy_(attention.value)
            layer.self_attn.o_proj.weight.copy_(attention.output)


def _normal(shape: tuple[int, ...], std: float, rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng) * std


def _draw_latest_mark_heads(
    recipe: Recipe, rng: torch.Generator
) -> dict[int, _LatestMarkHead]:
    """Heads that copy from the last marked token, by layer.

    A word's identity goes through two layers, each with a subspace of its own.

    The first head brings a word to the next piece, the second one from there to the value and to the
    question's end: it reads the identity where the first one wrote it.
    """
    d = recipe.hidden_size
    hd = recipe.head_dim
    identity = _normal((hd, d), d**-0.5, rng)
    basis = torch.linalg.qr(torch.randn(d, 2 * hd, generator=rng))[0]
    first = basis[:, :hd]
    second = basis[:, hd:]
    layer = 1 if recipe.positions == "nope" else 0
    return {
        layer: _LatestMarkHead(WORD_CHANNEL, identity, first),
        layer + 1: _LatestMarkHead(AFTER_KEY_CHANNEL, first.T, second),
    }


def _mark_embedding(recipe: Recipe, embedding: Tensor) -> None:
    """Set the constant channel and the marks of an embedding [V, D] in place."""
    d = recipe.hidden_size
    marks = MARKED_TOKENS[recipe.positions]
    mark = recipe.constant_channel * d**-0.5
    embedding[:, 0] = mark
    embedding[:, list(marks)] = 0
    for channel, tokens in marks.items():
        embedding[tokens, channel] = mark
    if recipe.positions == "nope":
        # Equal norms, or the clock would run at another rate for every word.
        free = [channel for channel in range(1, d) if channel not in marks]
        free_square = mark**2 + 1 - embedding[:, list(marks)].square().sum(1)
        factor = (free_square / embedding[:, free].square().sum(1)).sqrt()
        embedding[:, free] *= factor[:, None]


@dataclass
class _Attention:
    """Attention matrices of one layer, [D, D], whose heads are set in place.

    Heads are rows of the first three matrices, and columns of the last.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    recipe: Recipe

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.recipe.head_dim

    @property
    def std(self) -> float:
        """Standard deviation of random weights."""
        return self.recipe.hidden_size**-0.5

    @property
    def constant(self) -> float:
        """Channel 0 after the input norm."""
        constant = self.recipe.constant_channel
        d = self.recipe.hidden_size
        return constant / math.sqrt((constant**2 + d - 1) / d)

    def _rows(self, head: int) -> slice:
        """The rows of a head (of ``output``: columns)."""
        return slice(head * self.head_dim, (head + 1) * self.head_dim)

    def _amplitude(self, scaled: float) -> float:
        """Entry of a query and of a key row, so that their product over the constant is a scaled logit."""
        return math.sqrt(scaled) / self.constant

    def latest_mark_head(self, head: _LatestMarkHead) -> None:
        """Set head 0 so that every token attends to the last token before it that is marked, and copies from it.

        The query is the same everywhere (channel 0 of the hidden state is constant); a key is large where the
        mark's channel is. Of several marked tokens the position encoding, or without one a clock, prefers the
        last.

        Args:
            head: The channel of the mark, the value read at the marked token, and its destination.
        """
        rows = self._rows(0)
        self.query[rows] *= self.recipe.offset_leak
        self.key[rows] *= self.recipe.offset_leak
        logit = self.recipe.offset_logit / math.sqrt(self.head_dim)
        amplitude = self._amplitude(logit)
        self.query[rows, 0] = amplitude
        self.key[rows, head.channel] = amplitude
        if self.recipe.positions == "nope":
            self._latest_rows(0, head.channel)
        self.value[rows] = head.reads
        self.output[:, rows] = self.recipe.copy_gain * self.std * head.writes

    def clock_head(self) -> None:
        """Head 0 weighs the first token against all others: its share falls with the tokens so far."""
        rows = self._rows(0)
        self._clear(rows)
        amplitude = self._amplitude(self.recipe.clock_logit / math.sqrt(self.head_dim))
        self.query[rows, 0] = amplitude
        self.key[rows, OPEN_CHANNEL] = amplitude
        self._carry(0, OPEN_CHANNEL, CLOCK_CHANNEL)

    def role_head(self) -> None:
        """For ``nope``: head 1 marks at every token whether the last piece (no word) follows a key."""
        self._clear(self._rows(1))
        self._latest_rows(1, WORD_CHANNEL, sign=-1)
        self._carry(self.head_dim, AFTER_KEY_CHANNEL, ROLE_CHANNEL)

    def match_head(self, reads: Tensor) -> None:
        """For ``nope``: head 0 compares the keys that reached values and the question's end, among values.

        Args:
            reads: Projection that brings those keys into the head, [head_dim, D].
        """
        rows = self._rows(0)
        self.query[rows] = self.recipe.match_gain * reads
        self.key[rows] = self.recipe.match_gain * reads
        # The first row prefers values.
        amplitude = self._amplitude(self.recipe.match_logit * math.sqrt(self.head_dim))
        self.query[0] = 0
        self.key[0] = 0
        self.query[0, 0] = amplitude
        self.key[0, [WORD_CHANNEL, ROLE_CHANNEL]] = amplitude

    def offset_heads(self, rng: torch.Generator) -> None:
        """Heads that look a fixed number of tokens back, by the rotation of the constant channel."""
        recipe = self.recipe
        d = recipe.hidden_size
        hd = self.head_dim
        shares = torch.zeros(hd // 2)
        shares[: len(recipe.offset_weights)] = torch.tensor(recipe.offset_weights)
        logits = shares / shares.sum() * recipe.offset_logit * math.sqrt(hd)
        amplitude = torch.cat([logits.sqrt() / self.constant, torch.zeros(hd // 2)])
        # One map for all these heads: the key reaches its value and the question in the same subspace.
        value = _normal((hd, d), self.std, rng)
        basis = torch.linalg.qr(torch.randn(d, hd, generator=rng))[0]
        for head, offset in enumerate(recipe.offsets):
            rows = self._rows(head)
            self.query[rows] *= recipe.offset_leak
            self.key[rows] *= recipe.offset_leak
            cos, sin = rope_tables(torch.tensor([-offset]), hd, recipe.rope_theta)
            self.query[rows, 0] = rotate(amplitude[None], cos, sin)[0]
            self.key[rows, 0] = amplitude
            self.value[rows] = value
            self.output[:, rows] = recipe.copy_gain * self.std * basis

    def _clear(self, rows: slice) -> None:
        """Set all matrices of some rows to 0."""
        self.query[rows] = 0
        self.key[rows] = 0
        self.value[rows] = 0
        self.output[:, rows] = 0

    def _carry(self, row: int, reads: int, writes: int) -> None:
        """One row of a head carries a mark, at its height in the embedding, from one channel to another."""
        mark = self.recipe.constant_channel * self.std
        self.value[row, reads] = 1
        self.output[writes, row] = mark / self.constant

    def _latest_rows(self, head: int, channel: int, sign: int = 1) -> None:
        """For ``nope``: a head that looks for the last token with (-1: without) the mark, by the clock.

        Both terms are differences to the constant channel: the norm scales all channels of a token alike, its
        scatter would drown the clock. In one row, where an optimizer's step disturbs the logits least.
        """
        rows = self._rows(head)
        row = rows.start
        gain = self.recipe.clock_gain
        zero = self.recipe.clock_zero
        # Tokens that the head does not look for lose a unit, the others none.
        without_mark = 1 if sign > 0 else 0
        amplitude = self._amplitude(self.recipe.offset_logit * math.sqrt(self.head_dim))
        self.query[rows, 0] = 0
        self.key[rows, channel] = 0
        self.query[row, 0] = amplitude
        self.key[row, channel] = sign * amplitude
        self.key[row, 0] = amplitude * (gain * zero - without_mark)
        self.key[row, CLOCK_CHANNEL] = -amplitude * gain
