"""Lists of items (documents, pairs) in a prompt: where each one stands, and where the gold one goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le, MinLen

from posbench.schema import Seed
from posbench.tasks.base import Example, Task, first
from posbench.tasks.reading import refuse

Positions = Annotated[tuple[int | str, ...], MinLen(1)]
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Placed(Task):
    """A task whose gold item is moved over positions among others."""

    renamed: ClassVar[Mapping[str, str]] = {"examples_per_position": "limit"}
    sizes: ClassVar[
        tuple[str, str]
    ]  # fields with the items per prompt, and per calibration prompt

    path: str | None = None  # file of the benchmark; see the task
    # gold positions; ``"50%"`` is index floor(0.5 * (items - 1)), which gives the benchmarks' 0/4/9/14/19 of
    # 20 documents and 0/34/69/104/139 of 140 pairs; or explicit 0-based indices
    positions: Positions = ("0%", "25%", "50%", "75%", "100%")
    limit: Annotated[int, Ge(1), Le(100_000)] = 500  # questions at each gold position
    calibration_examples: Annotated[int, Ge(1), Le(100_000)] = (
        100  # calibration questions
    )
    # gold positions that they take in turn; None: see the task
    calibration_positions: Positions | None = None
    seed: Seed = 0  # seed of what is drawn

    @property
    def simpler(self) -> Mapping[str, Any]:
        """Fields that make a prompt shorter and easier to spell; empty where nothing does."""
        return {}

    @property
    def items(self) -> int:  # type: ignore[override]
        """Items per prompt."""
        return int(getattr(self, self.sizes[0]))

    @property
    def calibration_items(self) -> int:  # type: ignore[override]
        """Items per calibration prompt."""
        return int(getattr(self, self.sizes[1]))

    @property
    def gold_positions(self) -> list[int]:
        """The gold positions as 0-based indices."""
        return gold_indices("positions", self.positions, self.sizes[0], self.items)

    @property
    def calibration_indices(self) -> list[int]:
        """The same of the calibration questions; empty where none are given."""
        given = self.calibration_positions or ()
        return gold_indices(
            "calibration_positions", given, self.sizes[1], self.calibration_items
        )


def joined(
    head: str, items: Iterable[str], between: str, tail: str
) -> tuple[str, Spans]:
    """``head``, the items with ``between`` in between, ``tail``; and the character span of every item."""
    items = list(items)
    spans = []
    at = len(head)
    for item in items:
        spans.append((at, at + len(item)))
        at += len(item) + len(between)
    return head + between.join(items) + tail, tuple(spans)


def at_share(share: Fraction, size: int) -> int:
    """The index floor(share * (size - 1)); exact (floats put 0.7 * 90 at 62); -1 for a share outside 0..1."""
    return int(share * (size - 1)) if 0 <= share <= 1 else -1


def at_percent(label: str, size: int) -> int:
    """The index of a label as ``12.5%``; raises ValueError or ZeroDivisionError where it is no number."""
    return at_share(Fraction(label.removesuffix("%")) / 100, size)


def gold_indices(
    field: str, positions: Sequence[int | str], size_field: str, size: int
) -> list[int]:
    """Gold positions (of the key ``field``) as 0-based indices into a list whose size is another key.

    Shares that meet in a short list are one position. Raises UserError where one lies outside the list, or
    two indices are the same.
    """
    found = list[int]()
    shares = set[int]()
    repeated = False
    for position in positions:
        share = str(position).endswith("%")
        try:
            index = at_percent(str(position), size) if share else int(position)
        except (ValueError, ZeroDivisionError):
            index = -1
        if not 0 <= index < size:
            allowed = f'an index from 0 to {size - 1} (task.{size_field}={size}) or a share from "0%" to "100%"'
            refuse(field, position, allowed, "put the gold item inside the list")
        repeated |= index in found and not (share and index in shares)
        shares |= {index} if share else set()
        found.append(index)
    if repeated:
        places = (
            f"different gold positions (task.{size_field}={size} puts these at {found})"
        )
        refuse(
            field,
            list(positions),
            places,
            f"set task.{field}=[...] or raise task.{size_field}",
        )
    return list(dict.fromkeys(found))


def placed(examples: Sequence[Example], most: int | None = None) -> list[Example]:
    """The examples with a gold item among items, sorted by gold position; at most ``most`` of each."""
    there = [e for e in examples if e.gold_position is not None and e.items]
    return first(sorted(there, key=lambda e: e.gold_position or 0), most)
