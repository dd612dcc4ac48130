"""Ordinary attention with other relative positions: base of self_extend, rerope, dca and string_shift."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from posbench.late import Tensor, torch
from posbench.methods.base import Method, Needs
from posbench.model import rope
from posbench.model.attention import Rotations, first_visible_key
from posbench.model.lm import LM
from posbench.model.rope import HandRotation, RotaryCall, Table

REFERENCE_WINDOW = 4096
"""Trained tokens of the models for which the released programs state their windows."""


class Pairs(NamedTuple):
    """Pairs of R queries and S keys, by token: counted from the first real token of a row, which is 0.

    Attributes:
        query: Tokens of the queries, [B, 1, R, 1].
        key: Tokens of the keys, [B, 1, 1, S].
        is_prompt: Whether the queries are a prompt, read with an empty cache.
    """

    query: Tensor
    key: Tensor
    is_prompt: bool

    @property
    def distance(self) -> Tensor:
        """Query minus key, [B, 1, R, S]; below 0 for keys that a query does not see."""
        return self.query - self.key


@dataclass(frozen=True, kw_only=True)
class RelativePositions(Method):
    """Put another relative position R(i, j) into the rotary embedding for the query of token i and the key of token j.

    Queries and keys are rotated in two or three ways, each to give the right R for some pairs, and each pair takes the
    score of its way: the exact attention, in every layer that rotates, of every token. Tokens count from the first
    real one of a row, so that padding in front changes nothing, and a token depends on those before it alone. A layer
    with a sliding window keeps its window. Inside a method that scales positions, all lengths are scaled positions.

    The cache holds the keys without rotation, and beside them each rotation that is needed: one for dca and
    string_shift, two for the others.
    """

    needs: ClassVar[Needs] = Needs(rope=True, by_hand=True)

    @abstractmethod
    def query_positions(self, tokens: Tensor) -> Sequence[Tensor]:
        """Positions at which queries are rotated, one tensor for each way, each of the shape of ``tokens``."""

    @abstractmethod
    def key_positions(self, tokens: Tensor) -> Sequence[Tensor]:
        """The same of keys; a single tensor where all ways rotate keys alike."""

    @abstractmethod
    def select(self, scores: Sequence[Tensor], pairs: Pairs) -> Tensor:
        """Return the scores that count, [B, H, R, S], from those of each way."""

    def query_factor(self, tokens: Tensor, length: Tensor) -> Tensor | None:
        """Factor of the queries, [B, T] or [B, 1]; None: 1.

        Args:
            tokens: Their tokens, [B, T].
            length: Tokens of the text so far, [B, 1].
        """
        return None

    def key_factor(self, length: Tensor) -> Tensor | None:
        """Factor of the new keys, [B, 1]; None: 1.

        Args:
            length: Tokens of the text so far, [B, 1].
        """
        return None

    def fitted(self, lm: LM) -> Self:
        """The same method with all parameters set that depend on the model."""
        return self

    def changed(self, lm: LM) -> AbstractContextManager[None]:
        """See :meth:`Method.changed`."""
        attention = _Attention(self.fitted(lm))
        layers = rope.rotated_layers(lm.model)
        return rope.rotating_by_hand(lm.model, dict.fromkeys(layers, attention.attend))


class _Forward(NamedTuple):
    """What the layers of a forward share.

    Attributes:
        call: The evaluation of the rotary embedding.
        query_tokens: [B, T].
        key_tokens: [B, S].
        num_old: Keys that are rotated already.
        query_tables: By way.
        key_tables: By way, of the other keys; a single one where all ways rotate keys alike.
        query_factor: [B, 1, T, 1], or [B, 1, 1, 1]; None: 1.
        key_factor: [B, 1, 1, 1]; None: 1.
    """

    call: RotaryCall
    query_tokens: Tensor
    key_tokens: Tensor
    num_old: int
    query_tables: list[Table]
    key_tables: list[Table]
    query_factor: Tensor | None
    key_factor: Tensor | None


class _Attention:
    """The attention of :class:`RelativePositions` in one block.

    Args:
        method: The method, fitted to the model.
    """

    def __init__(self, method: RelativePositions) -> None:
        self._method = method
        self._latest: _Forward | None = None

    def attend(self, rotation: HandRotation) -> Tensor:
        """Return the attention output of a layer, [B, T, H, d].

        Args:
            rotation: Queries, keys and positions of the layer, and what earlier steps left in its memory.
        """
        query = rotation.query
        num_queries = query.shape[2]
        num_keys = rotation.key.shape[2]
        memory = rotation.memory
        is_prompt = not memory
        if is_prompt:
            memory["first"] = _first_position(rotation)
        # A rotated key stays as it is; only where cached keys were changed all are rotated anew.
        old_keys = memory.get("keys") if rotation.unchanged else None
        num_old = 0 if old_keys is None else num_keys - num_queries
        forward = self._forward(rotation, num_old)

        new_keys = rotation.key[:, :, num_old:]
        keys = [rotation.rotate(new_keys, table) for table in forward.key_tables]
        if forward.key_factor is not None:
            keys = [(k * forward.key_factor).to(k.dtype) for k in keys]
        if old_keys is not None:
            # A sliding window has dropped the oldest keys.
            keys = [
                torch.cat([old[:, :, old.shape[2] - num_old :], new], dim=2)
                for old, new in zip(old_keys, keys, strict=True)
            ]
        memory["keys"] = keys
        queries = list(rotation.rotate_by_each(query, forward.query_tables))

        precise = torch.promote_types(query.dtype, torch.float32)
        precise_keys = [k.to(precise) for k in keys]
        precise_queries = [q.to(precise) for q in queries]
        if forward.query_factor is not None:
            precise_queries = [q * forward.query_factor for q in precise_queries]
        if len(precise_keys) == 1:
            precise_keys *= len(queries)

        def select(scores: Sequence[Tensor], rows: slice) -> Tensor:
            query_tokens = forward.query_tokens[:, None, rows, None]
            key_tokens = forward.key_tokens[:, None, None, : scores[0].shape[-1]]
            pairs = Pairs(query_tokens, key_tokens, is_prompt)
            return self._method.select(scores, pairs)

        rotations = Rotations(precise_queries, precise_keys, select)
        return rotation.attend(queries[0], keys[0], rotations)

    def _forward(self, rotation: HandRotation, num_old: int) -> _Forward:
        """Return tokens, tables and factors of a forward, made once for the layers that share them.

        Args:
            rotation: The layer.
            num_old: Keys that are rotated already.
        """
        latest = self._latest
        call = rotation.call
        if (
            latest is not None
            and latest.call is call
            and latest.num_old == num_old
            and latest.key_tokens.shape[1] == rotation.key.shape[2]
            and latest.key_tokens.device == rotation.query.device
        ):
            return latest
        method = self._method
        first = rotation.memory["first"].to(rotation.query.device)
        query_tokens = (rotation.query_positions - first).clamp(min=0)
        key_tokens = (rotation.key_positions - first).clamp(min=0)
        length = query_tokens[:, -1:] + 1
        query_factor = method.query_factor(query_tokens, length)
        if query_factor is not None:
            query_factor = query_factor[:, None, :, None]
        key_factor = method.key_factor(length)
        if key_factor is not None:
            key_factor = key_factor[:, None, :, None]
        self._latest = _Forward(
            call=call,
            query_tokens=query_tokens,
            key_tokens=key_tokens,
            num_old=num_old,
            query_tables=[call.table(p) for p in method.query_positions(query_tokens)],
            key_tables=[
                call.table(p) for p in method.key_positions(key_tokens[:, num_old:])
            ],
            query_factor=query_factor,
            key_factor=key_factor,
        )
        return self._latest


def _first_position(rotation: HandRotation) -> Tensor:
    """Position of the first real token of each row of a prompt, [B, 1]."""
    positions = rotation.key_positions
    index = first_visible_key(rotation.mask).to(positions.device)
    return positions.gather(1, index.expand(positions.shape[0])[:, None])


def default_window(trained_length: int, divisor: int) -> int:
    """A window of 4096 tokens over ``divisor``, in proportion in a model of fewer trained tokens.

    Args:
        trained_length: Trained tokens.
        divisor: What the released program's window is to 4096.
    """
    return max(min(trained_length, REFERENCE_WINDOW) // divisor, 1)


def log_factor(tokens: Tensor, base: float) -> Tensor:
    """Factor of the queries that grows with the text, ``max(1, ln(i + 1) / ln base)``, of the shape of ``tokens``."""
    return ((tokens + 1).log() / math.log(base)).clamp(min=1)
