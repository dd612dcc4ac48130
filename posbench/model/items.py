"""Positions of the items of a prompt: the token spans that a method may read, and never which item is gold."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from posbench.errors import UserError
from posbench.late import nn, torch
from posbench.model.hooks import find_cache

Span = tuple[int, int]
"""First token (or character) of an item, and the one after its last; (0, 0) for an item that was cut away."""


@dataclass(frozen=True)
class ItemPrompt:
    """A prompt as text with its items, which a method may rewrite before it is encoded.

    Attributes:
        text: The prompt, before any chat template.
        items: Characters (start, end) of every item, in the order of the task's items.
        question: Characters of the question; None: not marked.
        orders: Permutations of the items that the data knows, see :class:`posbench.tasks.Example`.
        form: How the model reads it: arguments of :meth:`posbench.model.encode.Encoder.render`.
    """

    text: str
    items: tuple[Span, ...]
    question: Span | None = None
    orders: Mapping[str, Sequence[int]] = field(default_factory=dict)
    form: Mapping[str, Any] = field(default_factory=dict)

    def item_text(self, index: int) -> str:
        """The text of an item."""
        start, end = self.items[index]
        return self.text[start:end]

    @property
    def shown_items(self) -> list[int]:
        """The items that the prompt shows, in the order in which they stand there."""
        shown = [index for index, span in enumerate(self.items) if span != (0, 0)]
        return sorted(shown, key=lambda index: self.items[index])

    def reordered(self, order: Sequence[int]) -> ItemPrompt:
        """Return the prompt with its items in another order; the text between them stays in place.

        Args:
            order: A permutation of the items: ``order[i]`` is the item that goes to the i-th place. Items that were cut
                away take no place.

        Raises:
            ValueError: ``order`` is no permutation, or items overlap.
        """
        if sorted(order) != list(range(len(self.items))):
            raise ValueError(f"no permutation of {len(self.items)} items: {order}")
        shown = set(self.shown_items)
        return self.with_items([index for index in order if index in shown])

    def with_items(self, order: Sequence[int]) -> ItemPrompt:
        """Return the prompt with some of its items alone, in any order.

        They take the first places; the others are cut away, with the text that separates the places left over.

        Args:
            order: The items, one or more of those that the prompt shows, each once.

        Raises:
            ValueError: There is no such item, one occurs twice, or items overlap.
            UserError: The question stands among the items, in text that would be cut away.
        """
        places = [self.items[index] for index in self.shown_items]
        if not order or len({*order}) < len(order) or {*order} - {*self.shown_items}:
            raise ValueError(f"no items of the prompt, each once: {order}")
        if any(end > start for (_, end), (start, _) in pairwise(places)):
            raise ValueError("items overlap")
        gap_starts = [0, *(end for _, end in places)]
        gap_ends = [*(start for start, _ in places), len(self.text)]
        # The text in front of each kept place, and behind the last place of all.
        kept_gaps = [*range(len(order)), len(places)]
        new_spans: list[Span] = [(0, 0)] * len(self.items)
        question = None
        text = ""
        for index, gap in zip([*order, None], kept_gaps, strict=True):
            start, end = gap_starts[gap], gap_ends[gap]
            if self.question and start <= self.question[0] <= self.question[1] <= end:
                question = _shift(self.question, len(text) - start)
            text += self.text[start:end]
            if index is not None:
                item = self.item_text(index)
                new_spans[index] = (len(text), len(text) + len(item))
                text += item
        if self.question and question is None:
            allowed = "a prompt whose question stands before or after all items"
            hint = "choose another method, or move the question in the task"
            raise UserError("method", "a question among the items", allowed, hint)
        return replace(self, text=text, items=tuple(new_spans), question=question)

    def shifted(self, text: str, offset: int) -> ItemPrompt:
        """Return a longer prompt that holds this one's items and question ``offset`` characters further on."""
        return replace(
            self,
            text=text,
            items=tuple(_shift(span, offset) for span in self.items),
            question=_shift(self.question, offset) if self.question else None,
        )


def _shift(span: Span, offset: int) -> Span:
    """A span moved by some characters; that of an item cut away stays."""
    return span if span == (0, 0) else (span[0] + offset, span[1] + offset)


def find_items(text: str, pattern: str) -> tuple[Span, ...]:
    """Characters of the items of a prompt: the matches of a regular expression, as ``r"Document .*"``."""
    return tuple(match.span() for match in re.finditer(pattern, text))


def token_spans(offsets: Sequence[Span], items: Sequence[Span]) -> list[Span]:
    """Convert spans of characters into spans of tokens.

    Args:
        offsets: Characters (start, end) of each token.
        items: Characters (start, end) of each item.

    Returns:
        Tokens of each item; (0, 0) where the prompt lost it. A token that an item shares with its neighbour
        belongs to both.
    """
    starts, ends = np.array(offsets).reshape(-1, 2).T
    spans: list[Span] = []
    for start, end in items:
        tokens = np.flatnonzero((starts < end) & (ends > start))
        if len(tokens):
            spans.append((int(tokens[0]), int(tokens[-1]) + 1))
        else:
            spans.append((0, 0))
    return spans


def disjoint_spans(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of items in the order of the prompt; a token that two items share is the first one's alone.

    Args:
        spans: Tokens of every item; (0, 0) for one that was cut away, which is left out.
    """
    result: list[Span] = []
    for start, end in sorted(span for span in spans if span != (0, 0)):
        if result:
            start = max(start, result[-1][1])
        if start < end:
            result.append((start, end))
    return result


@dataclass
class ItemIndex:
    """Token spans of the items of prompts, found again by the tokens of a prompt.

    A prompt is identified by its tokens up to the end of its last item: later ones, such as an answer, may differ.
    """

    _spans: dict[bytes, tuple[Span, ...]] = field(default_factory=dict)
    _lengths: set[int] = field(default_factory=set)

    def add(self, ids: Sequence[int], spans: Sequence[Span]) -> None:
        """Remember the items of a prompt.

        Args:
            ids: The prompt's token ids.
            spans: Tokens of every item, as indices into ``ids``.

        Raises:
            ValueError: A span does not lie in the prompt.
        """
        if any(not 0 <= start <= end <= len(ids) for start, end in spans):
            raise ValueError(f"a span lies outside {len(ids)} tokens: {list(spans)}")
        length = max((end for _, end in spans), default=0)
        if length:
            self._lengths.add(length)
            self._spans[_key(ids, length)] = tuple(spans)

    def find(self, ids: Sequence[int]) -> tuple[Span, ...] | None:
        """The spans of a prompt that begins with remembered tokens; None for another one."""
        for length in sorted(self._lengths, reverse=True):
            if length <= len(ids):
                spans = self._spans.get(_key(ids, length))
                if spans is not None:
                    return spans
        return None


def _key(ids: Sequence[int], length: int) -> bytes:
    tokens = np.asarray(ids[:length], dtype=np.int64)
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()


@dataclass
class BatchItems:
    """The items of the batch that a model reads.

    Attributes:
        rows: For each row the tokens of every item, as indices into the padded row.
        width: Tokens of the padded prompts.
        starts: For each row its first token behind the padding, as an index into the padded row.
        past: Tokens that the cache held before the latest forward.
    """

    rows: list[list[Span]] = field(default_factory=list)
    width: int = 0
    starts: list[int] = field(default_factory=list)
    past: int = 0


@contextmanager
def reading_items(lm: Any) -> Iterator[BatchItems]:
    """Follow which prompts a model reads, for the duration of a block.

    Args:
        lm: A :class:`posbench.model.lm.LM`, whose ``items`` hold the spans of its prompts.

    Yields:
        The items of the current batch: set before the first layer reads a prompt, kept while it answers.

    Raises:
        UserError: In a forward, on a prompt whose items are not known.
    """
    batch = BatchItems()

    def read(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        cache = find_cache(kwargs)
        batch.past = 0 if cache is None else cache.get_seq_length()
        if batch.past:
            return
        mask = kwargs.get("attention_mask")
        if mask is None:
            mask = torch.ones_like(ids)
        batch.width = ids.shape[1]
        is_token = mask.bool().tolist()
        batch.starts = [row_mask.index(True) for row_mask in is_token]
        batch.rows = [
            _spans_in_row(lm, row, start)
            for row, start in zip(ids.tolist(), batch.starts, strict=True)
        ]

    # The base model is hooked: the decoder below it sees several rows where a method runs a prompt as several.
    handle = lm.model.base_model.register_forward_pre_hook(read, with_kwargs=True)
    try:
        yield batch
    finally:
        handle.remove()


@contextmanager
def probe_items(lm: Any, prompts: Iterable[Sequence[int]]) -> Iterator[None]:
    """Take two quarters of each prompt for its items, for the duration of a block that looks at no result.

    Args:
        lm: A :class:`posbench.model.lm.LM`.
        prompts: Token ids of the prompts that it reads in the block.
    """
    known = lm.items
    lm.items = ItemIndex()
    for ids in prompts:
        # The end stays free: a method may run the last tokens of a prompt apart.
        quarter = len(ids) // 4
        lm.items.add(ids, [(0, quarter), (quarter, 2 * quarter)])
    try:
        yield
    finally:
        lm.items = known


def _spans_in_row(lm: Any, row: list[int], padding: int) -> list[Span]:
    """Token spans of the items of a row that is padded on the left by so many tokens."""
    spans = lm.items.find(row[padding:])
    if spans is None:
        value = f"{len(row) - padding} tokens"
        allowed = "a prompt whose items are known, to a method that reads them"
        hint = "take a task with gold positions; in Python, lm.add_items(prompt, items)"
        raise UserError("prompt", value, allowed, hint)
    return [(start + padding, end + padding) if end else (0, 0) for start, end in spans]
