"""A method that moves all items of a prompt around in a circle."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from posbench.methods.prompt_change import PromptChange
from posbench.model.encode import Encoder
from posbench.model.items import ItemPrompt


@dataclass(frozen=True, kw_only=True)
class Rotate(PromptChange):
    """Ask every prompt with its items moved towards its end, those at the end to its start.

    Args:
        places: How many places each item moves; negative: towards the start.
    """

    changes: ClassVar[Literal["order", "number", "repetition"]] = "order"
    places: int = 1

    def rewrite(self, lm: Encoder, prompt: ItemPrompt) -> ItemPrompt:
        """The prompt with its items rotated."""
        count = len(prompt.items)
        return prompt.reordered([(i - self.places) % count for i in range(count)])
