"""Attention to documents by their relevance, after the bias of their positions has been measured and taken off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from posbench.errors import UserError
from posbench.late import Tensor, nn, torch
from posbench.methods.base import Method, Needs
from posbench.model.attention import attention_weights, last_query_weights
from posbench.model.hooks import AttentionFunction, cache_name, intercepting_attention
from posbench.model.items import BatchItems, Span, disjoint_spans, reading_items
from posbench.model.lm import LM
from posbench.schema import Positive, Share


def document_shares(
    attention: Tensor, dummy_attention: Tensor, temperature: float
) -> Tensor:
    """Return alpha = softmax(rel / temperature) over K documents, with rel = attention - dummy_attention.

    Args:
        attention: Attention of the last prompt token to a token of each document, on average, [K].
        dummy_attention: The same for a dummy in the place of that document, [K].
        temperature: Of the softmax.
    """
    return ((attention - dummy_attention) / temperature).softmax(-1)


@dataclass(frozen=True, kw_only=True)
class CalibratedAttention(Method):
    """Give each document the attention that its relevance deserves: our reading of "Found in the Middle".

    Attn(x, k) is the attention weight of the last prompt token to a token of the text x in place of document k, the
    mean over layers, heads and tokens. A dummy without content there gives the bias of the place; the rest is
    relevance::

        rel_k = Attn(document_k, k) - Attn(dummy, k)        alpha = softmax(rel / temperature)

    In the last layers, for the last prompt token and all generated ones, in every head, the weight a_i of token i of
    document k becomes ::

        a_i alpha_k / m_k C        C = (sum of a over all documents) / (sum over k of length_k alpha_k)

    with m_k the mean of a over the document's tokens. So all documents together keep their attention, a document's
    tokens share its part as before, and the weights of all other tokens stay.

    The documents are the items of the prompt; text between them is in none. The K dummies, each of its document's
    length, are read one after the other, so that a prompt with K documents takes K + 2 prefills. Weights read by
    :meth:`posbench.model.lm.LM.last_attention` are those before the change. Together with scale_channel, which runs a
    prompt in two parts, the last prompt token is the one before the last.

    Args:
        temperature: Of the softmax; the paper's 5e-5 leaves nearly all to the most relevant document in small models.
        last_layers: Share of the layers that change, the last ones; the paper's is 16 of 32. 0 changes nothing.
        dummy: Text of the dummy, repeated and cut to the tokens of the document; or the id of a token to repeat.

    Source: Hsieh et al., Findings of ACL 2024, arXiv 2406.16008, in our reading: no program was released, and the paper
    leaves open the text and length of the dummy, whether m_k and C belong to a head, and which queries change.
    """

    needs: ClassVar[Needs] = Needs(by_hand=True, items=True, full_attention=True)

    temperature: Positive = 5e-5
    last_layers: Share = 0.5
    dummy: str | int = "N/A "

    @classmethod
    def example(cls, lm: LM) -> Self:
        """A milder temperature, at which rounding moves little, and a dummy that needs no tokenizer."""
        return cls(temperature=0.01, dummy=5)

    def neutral(self) -> Self:
        """No layer changes."""
        return replace(self, last_layers=0.0)

    def check(self, lm: LM) -> None:
        """Refuse a model outside the library's attention functions or with a sliding window, and an empty dummy.

        Raises:
            UserError: States which.
        """
        super().check(lm)
        self.dummy_tokens(lm, 1)

    def dummy_tokens(self, lm: LM, length: int) -> list[int]:
        """Return the token ids of a dummy.

        Args:
            lm: The model.
            length: Tokens of the dummy.

        Raises:
            UserError: The text has no tokens, or the model no such token.
        """
        if isinstance(self.dummy, str):
            tokenizer = lm.need_tokenizer()
            tokens = tokenizer(self.dummy, add_special_tokens=False)["input_ids"]
        else:
            tokens = [self.dummy]
        count = lm.model.get_input_embeddings().weight.shape[0]
        if not tokens or not all(0 <= token < count for token in tokens):
            allowed = f"a text of one token or more, or a token id of 0 to {count - 1}"
            raise UserError("method.dummy", self.dummy, allowed, "set method.dummy=a")
        return (tokens * length)[:length]

    @contextmanager
    def changed(self, lm: LM) -> Iterator[None]:
        """See :meth:`Method.changed`."""
        num_changed = round(self.last_layers * lm.layers)
        if not num_changed:
            yield
            return
        with reading_items(lm) as batch:
            calibration = _Calibration(lm, self, batch, lm.layers - num_changed)
            # Behind the hook of reading_items(), so that the items of the prompt are known.
            handle = lm.model.base_model.register_forward_pre_hook(
                calibration.measure, with_kwargs=True
            )
            try:
                with intercepting_attention(lm.model, calibration.attend):
                    yield
            finally:
                handle.remove()


@dataclass
class _Calibration:
    """Measures the documents of each batch of prompts before it is read, and then changes attention to them.

    Attributes:
        lm: The model.
        method: The parameters.
        batch: The items of the batch.
        first_layer: First layer that changes.
        documents: For each row the columns of its K documents.
        shares: For each row alpha of its documents, [K].
        row_total: Sum over layers of the last query's weights, mean over heads, [B, T]; None outside a measurement.
    """

    lm: LM
    method: CalibratedAttention
    batch: BatchItems
    first_layer: int
    documents: list[list[Span]] = field(default_factory=list)
    shares: list[Tensor] = field(default_factory=list)
    row_total: Tensor | None = None

    def measure(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Read the prompts, and once more for each document with a dummy in its place; set ``shares``.

        It is a hook before the model's decoder, whose arguments it gets; a step on a filled cache measures nothing.
        """
        if self.batch.past:
            return
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        settings = {**kwargs, cache_name(kwargs): None, "use_cache": False}
        self.documents = [disjoint_spans(items) for items in self.batch.rows]
        most = max(map(len, self.documents))
        attention = self._document_attention(module, ids, args, settings)
        dummy_attention = [list(row) for row in attention]
        for index in range(most):
            changed_ids = ids.clone()
            for row, documents in enumerate(self.documents):
                if index < len(documents):
                    start, end = documents[index]
                    tokens = self.method.dummy_tokens(self.lm, end - start)
                    changed_ids[row, start:end] = changed_ids.new_tensor(tokens)
            read = self._document_attention(module, changed_ids, args, settings)
            for row, documents in enumerate(self.documents):
                if index < len(documents):
                    dummy_attention[row][index] = read[row][index]
        self.shares = [
            document_shares(
                torch.tensor(own, dtype=torch.float64),
                torch.tensor(dummy, dtype=torch.float64),
                self.method.temperature,
            )
            for own, dummy in zip(attention, dummy_attention, strict=True)
        ]

    def _document_attention(
        self,
        module: nn.Module,
        ids: Tensor,
        args: tuple[Any, ...],
        settings: Mapping[str, Any],
    ) -> list[list[float]]:
        """Return for each row the attention of its last token to a token of each document, mean over layers and heads.

        Args:
            module: The model's decoder.
            ids: Token ids, [B, T].
            args: Its positional arguments, of which token ids are the first.
            settings: Its other arguments.
        """
        if "input_ids" in settings:
            settings = {**settings, "input_ids": ids}
        else:
            args = (ids, *args[1:])
        self.row_total = torch.zeros(ids.shape, dtype=torch.float64)
        try:
            # forward(), not a call of the module: hooks would take this for a prompt.
            module.forward(*args, **settings)
            row = self.row_total / self.lm.layers
        finally:
            self.row_total = None
        return [
            [float(row[number, start:end].mean()) for start, end in documents]
            for number, documents in enumerate(self.documents)
        ]

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        following: AttentionFunction,
        **settings: Any,
    ) -> Any:
        """Record the last query's weights in a measurement; else change those of the last prompt token and later ones.

        See :data:`posbench.model.hooks.AttentionFunction`.
        """
        output, weights = following(module, query, key, value, mask, **settings)
        if self.row_total is not None:
            row = last_query_weights(query, key, mask, **settings)
            self.row_total += row.double().mean(1).cpu()
            return output, weights
        if module.layer_idx < self.first_layer:
            return output, weights
        rows = slice(None) if self.batch.past else slice(-1, None)
        before = attention_weights(query, key, mask, rows, **settings)
        groups = query.shape[1] // value.shape[1]
        values = value.repeat_interleave(groups, 1).to(before.dtype)
        changed = (self._changed(before) @ values).transpose(1, 2)
        kept = output.shape[1] - changed.shape[1]
        return torch.cat([output[:, :kept], changed.to(output.dtype)], dim=1), weights

    def _changed(self, weights: Tensor) -> Tensor:
        """Weights [B, H, R, T] with the documents' part shared out anew."""
        if len(self.documents) != len(weights):
            raise ValueError("the prompt was read outside the block: run it inside")
        result = weights.clone()
        tiny = torch.finfo(weights.dtype).tiny
        pairs = zip(self.documents, self.shares, strict=True)
        for number, (documents, shares) in enumerate(pairs):
            row = weights[number]
            masses = torch.stack([row[..., a:b].sum(-1) for a, b in documents])
            lengths = shares.new_tensor([b - a for a, b in documents])
            parts = lengths * shares / (lengths * shares).sum()
            parts = parts.to(weights)[:, None, None]
            factors = masses.sum(0) * parts / masses.clamp(min=tiny)  # [K, H, R]
            for (start, end), factor in zip(documents, factors, strict=True):
                result[number, ..., start:end] *= factor[..., None]
        return result
