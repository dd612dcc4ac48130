"""Sort the documents of a prompt by the attention that its last token gives them, then ask."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from posbench.errors import UserError
from posbench.late import F, Tensor, inference_mode, torch
from posbench.methods.base import Method, Needs
from posbench.methods.unmodified import Unmodified
from posbench.model.encode import Encoder
from posbench.model.guard import forward, guarded
from posbench.model.items import ItemPrompt, Span, token_spans
from posbench.model.lm import LM
from posbench.schema import Whole

Score = Literal["sum", "mean"]


@dataclass(frozen=True, kw_only=True)
class AttentionSorting(Method):
    """Ask every prompt with its items in the order of the attention that its last token gives them.

    The unmodified model reads the prompt, and item k gets the score ::

        score_k = mean over layers and heads of the sum over the tokens t of item k of the attention weight of t

    in the row of the last prompt token. The items are sorted by it, the sorted prompt is read again, and so on; the
    model answers the prompt of the last order. Equal scores keep their order. An order that stays as it was ends the
    repetition: all later ones would be the same. Each repetition takes a prefill of the prompt; the weights of the last
    token alone are computed.

    Text between items stays in place, and belongs to none; numbers inside items move with them. A later method of a
    list takes the last scores for the ranking of the items, best first. In a list, too, the scores are those of the
    unmodified model.

    Args:
        score: ``sum`` over the tokens of an item, by which long items win; or ``mean``, their average.
        best_last: Whether the item with the highest score comes last, next to the question, or first.
        iterations: Repetitions at most; 0 leaves the prompt as it is.

    Source: Peysakhovich & Lerer 2023, arXiv 2310.01427; released program adamlerer/synthwiki, 47e9dcd, whose script has
    these defaults. Differs from source: prompts are tokenised whole, not document by document, and sums leave out the
    text between documents; ties are stable.
    """

    needs: ClassVar[Needs] = Needs(items=True)

    score: Score = "sum"
    best_last: bool = True
    iterations: Whole = 3

    @property
    def rewrites_by_text(self) -> bool:
        """False: the model is asked for its attention."""
        return False

    def prefill(self) -> Method:
        """The unmodified model."""
        return Unmodified()

    def neutral(self) -> Self:
        """No repetition."""
        return replace(self, iterations=0)

    def changed(self, lm: LM) -> AbstractContextManager[None]:
        """An empty block: the model stays as it is."""
        return nullcontext()

    def rewrite(self, lm: Encoder, prompt: ItemPrompt) -> ItemPrompt:
        """The prompt with its items sorted.

        Raises:
            UserError: The model cannot be asked for its attention, or a prompt's items are not found in its tokens.
        """
        if not isinstance(lm, LM):
            allowed = "a model in this process, whose attention can be read"
            hint = "leave out model.base_url, or take a method that changes the prompt alone"
            raise UserError("method", self.short_name(), allowed, hint)
        shown = prompt.shown_items
        for _ in range(self.iterations if len(shown) > 1 else 0):
            scores = self._scores(lm, prompt)
            best_first = sorted(shown, key=lambda item: -scores[item])
            order = best_first
            if self.best_last:
                order = sorted(shown, key=lambda item: scores[item])
            orders = {**prompt.orders, "relevance": best_first}
            prompt = replace(prompt.with_items(order), orders=orders)
            if order == shown:
                break
            shown = order
        return prompt

    def _scores(self, lm: LM, prompt: ItemPrompt) -> list[float]:
        """The score of every item of a prompt."""
        encoded = lm.encode(prompt.text, **prompt.form)
        spans = token_spans(encoded.offsets, prompt.items)
        if all(span == (0, 0) for span in spans):
            allowed = "a prompt whose items can be found in its tokens"
            hint = (
                "set model.chat_template=none, or use a fast tokenizer (tokenizer.json)"
            )
            raise UserError("prompt", f"{len(encoded.ids)} tokens", allowed, hint)
        return item_scores(lm, encoded.ids, spans, self.score)


@guarded
@inference_mode
def item_scores(
    lm: LM, ids: Sequence[int], spans: Sequence[Span], score: Score
) -> list[float]:
    """Return the attention of a prompt's last token to each item, the mean over layers and heads.

    Args:
        lm: The model.
        ids: Token ids of the prompt.
        spans: Tokens (first, last + 1) of each item.
        score: Whether the weights of an item's tokens are summed or averaged.
    """
    with lm.last_attention() as weights:
        forward(lm, **lm.pad([ids]))
    row = mean_weights([weights[layer] for layer in range(lm.layers)], len(ids))[0]
    scores = []
    for start, end in spans:
        total = float(row[start:end].sum())
        scores.append(total if score == "sum" else total / max(end - start, 1))
    return scores


def mean_weights(layers: Sequence[Tensor], width: int) -> Tensor:
    """Return attention weights averaged over layers and heads, [B, T] in float64 on the CPU.

    Args:
        layers: Weights of one query in each layer, [B, H, T'].
        width: T; a layer with a sliding window may hold the newest T' tokens alone, and gives the others nothing.
    """
    means = [layer.double().mean(1).cpu() for layer in layers]
    padded = [F.pad(mean, (width - mean.shape[-1], 0)) for mean in means]
    return torch.stack(padded).mean(0)
