"""Lists of items (documents, pairs) in a prompt: the position of each, and the placement of the gold item."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from annotated_types import Ge, Le, MinLen

from posbench.schema import Seed
from posbench.tasks.base import Example, Task, first_examples
from posbench.tasks.reading import refuse

Positions = Annotated[tuple[int | str, ...], MinLen(1)]
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class GoldPositionTask(Task):
    """A task whose gold item is moved over positions among others."""

    # file of the benchmark; see the task
    path: str | None = None
    # gold positions; ``"50%"`` is index floor(0.5 * (items - 1)), which gives the benchmarks' 0/4/9/14/19 of
    # 20 documents and 0/34/69/104/139 of 140 pairs; or explicit 0-based indices
    positions: Positions = ("0%", "25%", "50%", "75%", "100%")
    # questions at each gold position
    limit: Annotated[int, Ge(1), Le(100_000)] = 500
    # calibration questions
    calibration_examples: Annotated[int, Ge(1), Le(100_000)] = 100
    # gold positions that they take in turn; None: see the task
    calibration_positions: Positions | None = None
    # seed of all random choices
    seed: Seed = 0

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
        """``calibration_positions`` as 0-based indices; empty where it is None."""
        return gold_indices(
            "calibration_positions",
            self.calibration_positions or (),
            self.sizes[1],
            self.calibration_items,
        )


def joined(
    head: str, items: Iterable[str], separator: str, tail: str
) -> tuple[str, Spans]:
    """Join the parts of a prompt.

    Args:
        head: Text before the items.
        items: The items.
        separator: Text between two items.
        tail: Text after the items.

    Returns:
        The prompt, and the character span (start, end) of every item in it.
    """
    items = list(items)
    spans = []
    start = len(head)
    for item in items:
        end = start + len(item)
        spans.append((start, end))
        start = end + len(separator)
    return head + separator.join(items) + tail, tuple(spans)


def index_at_share(share: Fraction, size: int) -> int:
    """The index floor(share * (size - 1)); exact (floats put 0.7 * 90 at 62); -1 for a share outside 0..1."""
    return int(share * (size - 1)) if 0 <= share <= 1 else -1


def index_at_percent(label: str, size: int) -> int:
    """The index of a label as ``12.5%``; raises ValueError or ZeroDivisionError where it is no number."""
    return index_at_share(Fraction(label.removesuffix("%")) / 100, size)


def positions_in_fewer_items(
    positions: Sequence[int | str], size: int, new_size: int
) -> tuple[int | str, ...]:
    """Return gold positions for prompts with fewer items: indices at the same share of the list, shares as they are.

    Args:
        positions: Indices, or shares such as ``"50%"``.
        size: Number of items that the indices count.
        new_size: Number of items of the new prompts, 1 or more.

    Returns:
        The positions, each once.
    """
    last = max(size - 1, 1)
    moved = [
        position
        if isinstance(position, str)
        # Exactly, and a half rounds up.
        else int(Fraction(position * (new_size - 1), last) + Fraction(1, 2))
        for position in positions
    ]
    return tuple(dict.fromkeys(moved))


def gold_indices(
    field: str, positions: Sequence[int | str], size_field: str, size: int
) -> list[int]:
    """Return gold positions as 0-based indices, in their order; shares that fall on the same item are merged.

    Args:
        field: Key that holds the positions, without ``task.``.
        positions: Indices, or shares such as ``"50%"``.
        size_field: Key that holds the number of items, without ``task.``.
        size: Number of items.

    Raises:
        UserError: A position lies outside the list, or an index repeats another index or a share.
    """
    indices: list[int] = []
    from_shares: set[int] = set()
    has_repetition = False
    for position in positions:
        is_share = str(position).endswith("%")
        try:
            index = index_at_percent(str(position), size) if is_share else int(position)
        except (ValueError, ZeroDivisionError):
            # Neither an index nor a share: refused below as outside the list.
            index = -1
        if not 0 <= index < size:
            allowed = f'an index from 0 to {size - 1} (task.{size_field}={size}) or a share from "0%" to "100%"'
            refuse(field, position, allowed, "put the gold item inside the list")
        if index in indices and not (is_share and index in from_shares):
            has_repetition = True
        if is_share:
            from_shares.add(index)
        indices.append(index)
    if has_repetition:
        allowed = f"different gold positions (task.{size_field}={size} puts these at {indices})"
        hint = f"set task.{field}=[...] or raise task.{size_field}"
        refuse(field, list(positions), allowed, hint)
    return list(dict.fromkeys(indices))


def sort_by_gold_position(
    examples: Sequence[Example], per_position: int | None = None
) -> list[Example]:
    """The examples with a gold item among items, sorted by gold position; at most ``per_position`` of each."""
    with_gold = [e for e in examples if e.gold_position is not None and e.items]
    with_gold.sort(key=lambda example: example.gold_position or 0)
    return first_examples(with_gold, per_position)


def ranks_items(task: Task, examples: Sequence[Example]) -> bool:
    """Whether the order of the items means anything: the data rank them, or the task does not place the gold item."""
    return not task.gold_positions or any("relevance" in e.orders for e in examples)


def spread_examples(examples: Sequence[Example], count: int) -> list[Example]:
    """Return ``count`` examples, sorted by gold position and spread evenly over all; all if there are no more."""
    ordered = sorted(examples, key=lambda example: example.gold_position or 0)
    count = min(count, len(ordered))
    return [ordered[i * len(ordered) // count] for i in range(count)]


def evenly_spaced(examples: Sequence[Example], count: int) -> list[Example]:
    """Return ``count`` examples at equal distances, in their order; all if there are no more."""
    step = max(len(examples) // count, 1)
    return list(examples[::step][:count])
