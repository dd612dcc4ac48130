"""Policies that show the items of a prompt in another order, each under the name of its order."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from posbench.errors import UserError
from posbench.methods.prompt_change import (
    PromptChange,
    ranked_items,
    with_chosen_items,
)
from posbench.model.encode import Encoder
from posbench.model.items import ItemPrompt
from posbench.model.lm import LM
from posbench.schema import Seed

Order = Literal[
    "reversed",
    "best_first",
    "best_last",
    "both_ends",
    "both_ends_haystack",
    "original_order",
    "shuffled",
    "cache_stable",
]
KNOWN_ORDERS = {"original_order": "source", "cache_stable": "id"}
"""Orders that only the data can know, with their names in :attr:`ItemPrompt.orders`."""
RECIPES: Mapping[Order, str] = {
    "reversed": "documents = documents[::-1]",
    "best_last": "documents = documents[::-1]",
    "both_ends": (
        "# LangChain\n"
        "from langchain_community.document_transformers import LongContextReorder\n"
        "documents = LongContextReorder().transform_documents(documents)"
    ),
    "both_ends_haystack": (
        "# Haystack\n"
        "from haystack.components.rankers import LostInTheMiddleRanker\n"
        'documents = LostInTheMiddleRanker().run(documents=documents)["documents"]'
    ),
    "original_order": 'documents = sorted(documents, key=lambda d: (d.metadata["source"], d.metadata["page"]))',
    "cache_stable": "documents = sorted(documents, key=lambda d: d.id)",
    "shuffled": "random.Random(question).shuffle(documents)",
}


@dataclass(frozen=True, kw_only=True)
class Reorder(PromptChange):
    """Ask every prompt with its items in another order.

    The ranking is the data's relevance where it states one, else the prompt's order: a retriever's list is best first.

    Args:
        order: ``reversed``: the last item first. ``best_first``, ``best_last``: by the ranking. ``both_ends``: the best
            items at both ends, the worst in the middle, as LangChain's ``LongContextReorder`` does (for an even number
            the best is last); ``both_ends_haystack``: as Haystack's ``LostInTheMiddleRanker`` does (the best is always
            first). ``original_order``: as the items stand in their source. ``cache_stable``: by their ids, so that the
            same items always make the same beginning of a prompt. ``shuffled``: at random.
        seed: Of ``shuffled``: the order depends on it and on the text of the prompt alone.
    """

    changes: ClassVar[Literal["order"]] = "order"

    order: Order
    seed: Seed = 0

    @property
    def recipe(self) -> str:
        """See :attr:`PromptChange.recipe`."""
        return RECIPES.get(self.order, "")

    @property
    def takes_ranking(self) -> bool:
        """See :attr:`PromptChange.takes_ranking`."""
        return self.order.startswith(("best_", "both_ends"))

    @classmethod
    def example(cls, lm: LM) -> Self:
        """The reversed order."""
        return cls(order="reversed")

    def rewrite(self, lm: Encoder, prompt: ItemPrompt) -> ItemPrompt:
        """The prompt with its items in the order of the method."""
        shown = prompt.shown_items
        if not shown:
            return prompt
        items = self._arrange(prompt, shown, ranked_items(prompt))
        return with_chosen_items(prompt, items)

    def _arrange(
        self, prompt: ItemPrompt, shown: Sequence[int], ranking: Sequence[int]
    ) -> list[int]:
        """The items that a prompt shows, in the new order.

        Args:
            prompt: The prompt.
            shown: Its items as they stand.
            ranking: Its items, the best first.

        Raises:
            UserError: The data does not know the order.
        """
        match self.order:
            case "best_first":
                return [*ranking]
            case "best_last":
                return [*reversed(ranking)]
            case "reversed":
                return [*reversed(shown)]
            case "both_ends":
                worst_first = ranking[::-1]
                return [*worst_first[::2][::-1], *worst_first[1::2]]
            case "both_ends_haystack":
                return [*ranking[::2], *ranking[1::2][::-1]]
            case "shuffled":
                rng = random.Random(f"posbench shuffled {self.seed}/{prompt.text}")
                return rng.sample(shown, len(shown))
        order = prompt.orders.get(KNOWN_ORDERS[self.order])
        if order is None:
            what = "of their source" if self.order == "original_order" else "of ids"
            allowed = f"an order that the data states: it gives none {what}"
            hint = "choose another method, such as best_first, or data that states it (docs/own_data.md)"
            raise UserError("method.order", self.order, allowed, hint)
        return [index for index in order if index in set(shown)]
