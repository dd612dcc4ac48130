"""A method that changes the prompt alone, so that any model can be asked under it, also one behind a server."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from posbench.methods.base import CheckpointChange, Method
from posbench.methods.unmodified import Unmodified
from posbench.model.items import ItemPrompt
from posbench.model.lm import LM

UNRANKED = "the task places the gold item, so that another order only moves it, and fewer items only cut it away"
"""Why a study leaves out an order of items, or a number of them, where nothing ranks them."""


@dataclass(frozen=True, kw_only=True)
class PromptChange(Method):
    """Base of the methods whose :meth:`rewrite` is all they do; it looks at the prompt, and never at the model.

    Attributes:
        changes: What they change: the order of the items, their number, or how often something is said.
    """

    changes: ClassVar[Literal["order", "number", "repetition"]] = "repetition"

    @property
    def recipe(self) -> str:
        """Python lines that do the same where ``documents`` and ``prompt`` are made; empty: none are known."""
        return ""

    @classmethod
    def uses_order(cls) -> bool:
        """Whether it means nothing where the order of the items does not."""
        return cls.changes != "repetition"

    @property
    def takes_ranking(self) -> bool:
        """Whether :attr:`recipe` takes the documents for ranked, the best first."""
        return False

    @property
    def rewrites_by_text(self) -> bool:
        """True."""
        return True

    def prefill(self) -> Method:
        """The unmodified model."""
        return Unmodified()

    def folded(self, lm: LM) -> CheckpointChange:
        """Nothing: the weights stay as they are."""
        return CheckpointChange()

    def changed(self, lm: LM) -> AbstractContextManager[None]:
        """An empty block."""
        return nullcontext()

    def neutral(self) -> Self:
        """Itself: no search looks for its parameters."""
        return self


def ranked_items(prompt: ItemPrompt) -> list[int]:
    """The items that a prompt shows, best first: by the data's relevance, else as they stand."""
    shown = prompt.shown_items
    ranking = prompt.orders.get("relevance", shown)
    return [index for index in ranking if index in set(shown)]


def with_chosen_items(prompt: ItemPrompt, items: Sequence[int]) -> ItemPrompt:
    """The prompt with these items in this order; a later method does not take the new order for a ranking."""
    orders = {"relevance": ranked_items(prompt), **prompt.orders}
    return replace(prompt.with_items(items), orders=orders)
