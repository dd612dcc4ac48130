"""A task: find the word that stands behind a given one."""

import random
from dataclasses import dataclass
from typing import ClassVar

from posbench.errors import UserError
from posbench.schema import Count, Several, Whole
from posbench.tasks import Example, Task
from posbench.tasks.base import Split
from posbench.tasks.items import gold_indices, joined
from posbench.tasks.kv_retrieval import WORDS


@dataclass(frozen=True, kw_only=True)
class RollCall(Task):
    """Names with their places, the one that is asked for moved over gold positions; generated, no files.

    Args:
        names: Names in a prompt.
        positions: Gold positions: 0-based indices, or shares such as ``"50%"``.
        limit: Questions at each.
        seed: Seed of the draws.

    Score: 1 if the place occurs in the reply.
    """

    version: ClassVar[str] = "1"
    metric: ClassVar[str] = "accuracy"
    source: ClassVar[str] = "generated"
    licence: ClassVar[str] = "none needed"
    size: ClassVar[str] = "as many as you ask for"

    name: str = "roll_call"
    max_new_tokens: Count = 1
    names: Several = 16
    positions: tuple[int | str, ...] = ("0%", "50%", "100%")
    limit: Count = 10
    seed: Whole = 0

    def __post_init__(self) -> None:
        """Refuse values that contradict each other."""
        if self.names > len(WORDS):
            allowed = f"at most {len(WORDS)}, the words that there are"
            hint = f"set task.names={len(WORDS)}"
            raise UserError("task.names", self.names, allowed, hint)

    @property
    def items(self) -> int:  # type: ignore[override]
        """Names in a prompt."""
        return self.names

    def examples(self, split: Split) -> list[Example]:
        """A context of its own for every question; calibration draws from another stream."""
        return [
            self._draw(f"{position}-{number}", split, position)
            for position in gold_indices(
                "positions", self.positions, "names", self.names
            )
            for number in range(self.limit)
        ]

    def _draw(self, name: str, split: Split, position: int) -> Example:
        rng = random.Random(f"roll_call {self.seed} {split} {name}")
        people = rng.sample(WORDS, self.names)
        places = rng.sample(WORDS, self.names)
        told = [
            f'"{who}": "{where}"' for who, where in zip(people, places, strict=True)
        ]
        # The character span of every item lets posbench measure the attention to it.
        prompt, spans = joined(
            "Json data: {", told, ", ", f'}} The value of key "{people[position]}" is "'
        )
        return Example(
            id=f"{split} {name}",
            prompt=prompt,
            answers=(places[position],),
            gold_position=position,
            items=tuple(spans),
        )

    def score(self, example: Example, text: str) -> dict[str, float]:
        """1 if the place occurs in the reply."""
        return {"accuracy": float(example.answers[0] in text)}
