"""Show the best items of a prompt alone."""

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from posbench.methods.prompt_change import (
    PromptChange,
    ranked_items,
    with_chosen_items,
)
from posbench.model.encode import Encoder
from posbench.model.items import ItemPrompt
from posbench.model.lm import LM
from posbench.schema import Count


@dataclass(frozen=True, kw_only=True)
class TopDocuments(PromptChange):
    """Show the best items of every prompt in the order in which they stand, and cut the others away.

    Args:
        count: Items that stay, by the data's relevance where it states one, else the first ones.
    """

    changes: ClassVar[Literal["number"]] = "number"

    count: Count

    @property
    def recipe(self) -> str:
        """See :attr:`PromptChange.recipe`."""
        return f"documents = documents[:{self.count}]"

    @property
    def takes_ranking(self) -> bool:
        """True."""
        return True

    @classmethod
    def example(cls, lm: LM) -> Self:
        """Three items."""
        return cls(count=3)

    def rewrite(self, lm: Encoder, prompt: ItemPrompt) -> ItemPrompt:
        """The prompt with its best items."""
        shown = prompt.shown_items
        if len(shown) <= self.count:
            return prompt
        best = set(ranked_items(prompt)[: self.count])
        return with_chosen_items(prompt, [index for index in shown if index in best])
