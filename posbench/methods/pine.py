"""Attention in which no document of a prompt comes before another: each query orders them by importance (PINE)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self

from posbench.late import F, PreTrainedModel, Tensor, sdpa, torch
from posbench.methods.base import Method, Needs
from posbench.model import families, rope
from posbench.model.attention import masked_scores
from posbench.model.hooks import AttentionFunction, intercepting_attention
from posbench.model.items import BatchItems, Span, disjoint_spans, reading_items
from posbench.model.lm import LM
from posbench.model.rope import HandRotation, Table

CHUNK_ROWS = 256
"""Queries whose scores are in memory at a time, for all heads of one prompt."""


@dataclass(frozen=True, kw_only=True)
class Pine(Method):
    """Let all documents see each other, and give each query positions of its own, the most important document nearest.

    A prompt is a prefix of P tokens, documents D_1, ..., D_K that end before token E, and a suffix. A document's token
    sees the prefix, all tokens of the other documents, and its own document causally; all else is causal. In every
    layer and query head, with unrotated queries q and keys k and a softmax over document tokens::

        imp(a, b) = sum over i in D_a of mean over j in D_b of softmax_j(q_i k_j scaling),  j in all documents but D_a
        imp(i, b) = mean over j in D_b of softmax_j(q_i k_j scaling),  j in all documents; i in the suffix

    For the tokens of D_a, the document D_a ends at E, and the others stand before it, without gaps, the most important
    one nearest. For a token of the suffix, also a generated one, the most important document ends at E. Prefix and
    suffix keep their positions. So the suffix does not depend on the order of the documents, but for rounding and where
    two documents are equally important.

    The documents are the items of the prompt; text between two items is the end of the first of them, and so is a token
    that both share. The order of items matters as far as they differ in that text, or are numbered in it.

    Scores are computed for 256 queries at a time, in float32. The cache holds keys that are not rotated, which are
    rotated anew for each head at every step.

    Args:
        order: ``importance``, or ``reversed``: the least important document nearest (the paper's ablation). ``none``:
            the unmodified model.

    Source: Wang et al., ICLR 2025 (PINE), arXiv 2407.01100; released program wzq016/PINE, 5c2e9de. Differs from source:
    any batch with left padding; any rotary embedding, through the model's own cos and sin; layers without RoPE get the
    mask alone; documents are found in the tokens of the whole prompt, where the program tokenises each by itself; the
    suffix may be empty.
    """

    needs: ClassVar[Needs] = Needs(
        rope=True, by_hand=True, items=True, full_attention=True
    )

    order: Literal["importance", "reversed", "none"] = "importance"

    def neutral(self) -> Self:
        """The order ``none``."""
        return replace(self, order="none")

    @contextmanager
    def changed(self, lm: LM) -> Iterator[None]:
        """See :meth:`Method.changed`."""
        rotated = rope.rotated_layers(lm.model)
        with reading_items(lm) as batch:

            def attend_by_hand(rotation: HandRotation) -> Tensor:
                table = rotation.call.table(rotation.key_positions)
                if self.order == "none":
                    return _attend_unmodified(rotation, table)
                layer = _Layer(
                    query=rotation.query,
                    key=rotation.key,
                    value=rotation.value,
                    mask=rotation.mask,
                    settings=rotation.settings,
                    kernel=rotation.attend,
                    rotate=rotation.rotate,
                    table=table,
                )
                return layer.attend(batch, nearest_first=self.order == "importance")

            with (
                rope.rotating_by_hand(lm.model, dict.fromkeys(rotated, attend_by_hand)),
                self._masking_others(lm.model, rotated, batch),
            ):
                yield

    @contextmanager
    def _masking_others(
        self, model: PreTrainedModel, rotated: Sequence[int], batch: BatchItems
    ) -> Iterator[None]:
        """Let documents see each other in the layers without RoPE, for the duration of a block."""
        others = {*range(len(families.attention_modules(model)))} - {*rotated}
        if self.order == "none" or not others:
            yield
            return

        def attend(
            module: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            mask: Tensor | None,
            *,
            following: AttentionFunction,
            **settings: Any,
        ) -> Any:
            if module.layer_idx not in others:
                return following(module, query, key, value, mask, **settings)
            weights = None

            def kernel(last_query: Tensor, last_key: Tensor) -> Tensor:
                nonlocal weights
                last_mask = mask
                if mask is not None and mask.ndim == 4:
                    last_mask = mask[:, :, -1:]
                output, weights = following(
                    module, last_query, key, value, last_mask, **settings
                )
                return output

            layer = _Layer(query, key, value, mask, settings, kernel)
            return layer.attend(batch, nearest_first=True), weights

        with intercepting_attention(model, attend):
            yield


def _attend_unmodified(rotation: HandRotation, table: Table) -> Tensor:
    """The attention output of a layer that rotates queries and keys as the model does, [B, T, H, d]."""
    num_queries = rotation.query.shape[2]
    query_table = (table[0][:, -num_queries:], table[1][:, -num_queries:])
    return rotation.attend(
        rotation.rotate(rotation.query, query_table),
        rotation.rotate(rotation.key, table),
    )


def document_columns(items: Sequence[Span]) -> list[Span]:
    """Return the columns (first, last + 1) of each document, in the order of the prompt, without gaps or overlaps.

    Text between two items belongs to the first of them, and so does a token that both share.

    Args:
        items: Columns of every item, in any order; (0, 0) for one that was cut away, which may not be all.
    """
    spans = disjoint_spans(items)
    starts = [start for start, _ in spans]
    return list(pairwise([*starts, spans[-1][1]]))


@dataclass(frozen=True)
class _Layer:
    """One layer of one forward.

    Attributes:
        query: Un-rotated queries of the new tokens, [B, H, T, d].
        key: Un-rotated keys of all tokens, [B, G, S, d].
        value: [B, G, S, d].
        mask: The kernel's mask.
        settings: Its other arguments.
        kernel: The kernel, for the last query [B, H, 1, d] and keys of its head [B, H, S, d].
        rotate: Rotates by a table of each head; None in a layer without RoPE.
        table: cos and sin of the positions of all tokens, [B, S, r] each; None in a layer without RoPE.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    settings: Mapping[str, Any]
    kernel: Callable[[Tensor, Tensor], Tensor]
    rotate: Callable[[Tensor, Table], Tensor] | None = None
    table: Table | None = None

    def attend(self, batch: BatchItems, *, nearest_first: bool) -> Tensor:
        """Return the attention output, [B, T, H, d].

        Args:
            batch: The items of all rows.
            nearest_first: Whether the most important document is the nearest, or the least important one.
        """
        outputs = []
        last_queries = []
        last_keys = []
        for number, items in enumerate(batch.rows):
            row = _Row(self, number, batch.starts[number], document_columns(items))
            output, last_query, keys = row.attend(nearest_first)
            outputs.append(output)
            last_queries.append(last_query)
            last_keys.append(keys)
        # The last query goes through the kernel, where listeners see the weights of its head's own positions.
        last_output = self.kernel(torch.stack(last_queries), torch.stack(last_keys))
        output = torch.stack(outputs).transpose(1, 2).to(last_output.dtype)
        return torch.cat([output, last_output], dim=1)


class _Row:
    """One prompt in one layer. Columns are those of the padded prompt, and of all tokens after it.

    The keys of every document are rotated once, as if the prompt began with it. A query rotates once for each document,
    to as many columns behind the document's first token as it sees it away: only differences of positions count.
    """

    def __init__(
        self, layer: _Layer, number: int, start: int, documents: Sequence[Span]
    ) -> None:
        """Lay out a prompt.

        Args:
            layer: The layer.
            number: Row of the batch.
            start: First column behind the padding.
            documents: Columns of each document, one or more.
        """
        device = layer.query.device
        num_heads, num_queries = layer.query.shape[1:3]
        num_keys = layer.key.shape[2]
        groups = num_heads // layer.key.shape[1]
        self.layer = layer
        self.number = number
        self.start = start
        self.documents = documents
        self.begin = documents[0][0]
        self.end = documents[-1][1]
        self.precise = torch.promote_types(layer.query.dtype, torch.float32)
        self.scaling = layer.settings.get("scaling") or layer.query.shape[-1] ** -0.5
        self.query = layer.query[number]  # [H, T, d]
        self.key = sdpa.repeat_kv(layer.key[number : number + 1], groups)[0]
        self.value = sdpa.repeat_kv(layer.value[number : number + 1], groups)[0]
        lengths = [last - first for first, last in documents]
        self.lengths = torch.tensor(lengths, device=device)
        # Of each key: its document, -1 outside; and its column if the prompt began with that document.
        self.document_of = torch.full((num_keys,), -1, device=device)
        self.key_columns = torch.arange(num_keys, device=device)
        # Of each query: the column at which it stands.
        first_query = num_keys - num_queries
        self.query_columns = self.key_columns[first_query:].clone()
        for index, (first, last) in enumerate(documents):
            self.document_of[first:last] = index
            self.key_columns[first:last] -= first - start
            # The own document ends where all documents end.
            own = slice(max(first - first_query, 0), max(last - first_query, 0))
            self.query_columns[own] += self.end - last
        self.query_documents = self.document_of[first_query:]

    def attend(self, nearest_first: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Attend with all queries but the last one, which the kernel takes.

        Args:
            nearest_first: Whether the most important document is the nearest, or the least important one.

        Returns:
            The output [H, T - 1, d], and rotated for the kernel the last query [H, 1, d] and the keys [H, S, d].
        """
        starts = self.document_starts(nearest_first)
        outputs = [self.value[:, :0].to(self.precise)]
        if self.query.shape[1] > 1:
            keys = self.rotated(self.key, self.key_columns).to(self.precise)
            values = self.value.to(self.precise)
            for rows in self.chunks(self.query.shape[1] - 1):
                weights = self.scores(rows, keys, starts[:, rows]).softmax(-1)
                # Padding sees no key at all.
                is_padding = self.query_columns[rows, None] < self.start
                outputs.append(weights.masked_fill(is_padding, 0.0) @ values)
        last_query = self.rotated(self.query[:, -1:], self.query_columns[-1:])
        # Where the last query sees each key: [H, S].
        columns = torch.arange(self.key.shape[1], device=starts.device)
        columns = columns.repeat(len(self.query), 1)
        for index, (first, last) in enumerate(self.documents):
            columns[:, first:last] += starts[:, -1, index, None] - first
        return torch.cat(outputs, dim=1), last_query, self.rotated(self.key, columns)

    def scores(self, rows: slice, keys: Tensor, starts: Tensor) -> Tensor:
        """Return the scores of some queries, the lowest number where a key is shut, [H, R, S].

        Args:
            rows: R of the queries.
            keys: All keys rotated to ``key_columns``, [H, S, d].
            starts: Column at which each of these queries sees each document start, [H, R, K].
        """
        query = self.query[:, rows]
        query_columns = self.query_columns[rows]
        in_place = self.rotated(query, query_columns).to(self.precise)
        scores = in_place @ keys.mT
        for index, (first, last) in enumerate(self.documents):
            # Queries of the prefix see no document, and may stand before it.
            columns = query_columns - starts[..., index] + self.start
            from_document = self.rotated(query, columns.clamp(min=0))
            document_keys = keys[:, first:last]
            scores[..., first:last] = from_document.to(self.precise) @ document_keys.mT
        scores = scores * self.scaling
        softcap = self.layer.settings.get("softcap")
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        mask = self.layer.mask
        if mask is not None and mask.shape[0] > 1:
            mask = mask[self.number : self.number + 1]
        masked = masked_scores(scores[None], mask, self.query.shape[1], rows)[0]
        # Documents see each other, also those behind them.
        own = self.query_documents[rows, None]
        is_other = (own >= 0) & (self.document_of >= 0) & (own != self.document_of)
        return torch.where(is_other, scores, masked)

    def document_starts(self, nearest_first: bool) -> Tensor:
        """Return the column at which each query sees each of K documents start, [H, T, K].

        Args:
            nearest_first: See :meth:`attend`.
        """
        importance = self.importance()
        if not nearest_first:
            importance = -importance
        # The own document is the nearest one.
        is_own = self.query_documents[:, None] == torch.arange(
            len(self.documents), device=importance.device
        )
        importance = importance.masked_fill(is_own, float("inf"))
        order = importance.argsort(dim=-1, descending=True, stable=True)
        starts = self.end - self.lengths[order].cumsum(-1)
        return torch.zeros_like(starts).scatter(-1, order, starts)

    def importance(self) -> Tensor:
        """Return the importance of each of K documents to each query, from scores without positions, [H, T, K].

        All queries of a document have the sum of theirs. It is 0 where a query has no other document to see.
        """
        in_documents = slice(self.begin, self.end)
        key_documents = self.document_of[in_documents]
        keys = self.key[:, in_documents].to(self.precise)
        members = F.one_hot(key_documents, len(self.documents))
        averages = members.to(self.precise) / self.lengths  # [tokens, K]
        parts = []
        for rows in self.chunks(self.query.shape[1]):
            scores = self.query[:, rows].to(self.precise) @ keys.mT * self.scaling
            is_own = self.query_documents[rows, None] == key_documents
            shares = scores.masked_fill(is_own, float("-inf")).softmax(-1)
            if len(self.documents) == 1:
                shares = shares.masked_fill(is_own, 0.0)
            parts.append(shares @ averages)
        importance = torch.cat(parts, dim=1)
        for index in self.query_documents.unique().tolist():
            if index >= 0:
                rows_of_document = self.query_documents == index
                total = importance[:, rows_of_document].sum(1, keepdim=True)
                importance[:, rows_of_document] = total
        return importance

    def rotated(self, x: Tensor, columns: Tensor) -> Tensor:
        """Return queries or keys [H, R, d] rotated to columns [R], or [H, R]; as they are in a layer without RoPE."""
        if self.layer.rotate is None or self.layer.table is None:
            return x
        cos, sin = (
            part[self.number].to(x.device)[columns] for part in self.layer.table
        )
        return self.layer.rotate(x[None], (cos[None], sin[None]))[0]

    def chunks(self, num_queries: int) -> Iterator[slice]:
        """Slices of the first queries."""
        for first in range(0, num_queries, CHUNK_ROWS):
            yield slice(first, min(first + CHUNK_ROWS, num_queries))
