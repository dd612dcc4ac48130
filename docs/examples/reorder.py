"""A method that rewrites the prompt: the items in another order."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal, Self

from posbench.methods import Method
from posbench.model.encode import Encoder
from posbench.model.items import ItemPrompt
from posbench.model.lm import LM


@dataclass(frozen=True, kw_only=True)
class Reorder(Method):
    """Ask every prompt with its items in another order; the model stays as it is.

    Args:
        order: ``given``; ``reversed``; or ``outside_in``: the first items of a ranked list go to both ends of
            the prompt, the last ones to its middle.
    """

    order: Literal["given", "reversed", "outside_in"] = "outside_in"

    def neutral(self) -> Self:
        """The order of the task."""
        return replace(self, order="given")

    def rewrite(self, lm: Encoder, prompt: ItemPrompt) -> ItemPrompt:
        """The prompt with its items in the order of the method."""
        ranks = list(range(len(prompt.items)))
        if self.order == "reversed":
            ranks.reverse()
        if self.order == "outside_in":
            ranks = ranks[::2] + ranks[1::2][::-1]
        return prompt.reordered(ranks)

    def changed(self, lm: LM) -> AbstractContextManager[object]:
        """Leave the model as it is."""
        return nullcontext()
