"""Lists of items (documents, pairs) in a prompt: where each one stands, and where the gold one goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from posbench.tasks.base import Example
from posbench.tasks.reading import refuse


def joined(head: str, items: Iterable[str], between: str, tail: str) -> tuple[str, list[tuple[int, int]]]:
    """``head``, the items with ``between`` in between, ``tail``; and the character span of every item."""
    items = list(items)
    spans, at = [], len(head)
    for item in items:
        spans.append((at, at + len(item)))
        at += len(item) + len(between)
    return head + between.join(items) + tail, spans


def gold_indices(field: str, positions: Sequence[int | str], size_field: str, size: int) -> list[int]:
    """Gold positions as 0-based indices into a list of ``size`` items.

    A share ``"p%"`` is index floor(p / 100 * (size - 1)), which gives the benchmarks' own 0/4/9/14/19 of 20
    documents and 0/34/69/104/139 of 140 pairs; anything else is an index.

    Args:
        field: Config key that holds the positions, without ``task.``.
        positions: The positions.
        size_field: Config key that holds the size, without ``task.``.
        size: Items in the list.

    Raises:
        UserError: There is no position, one lies outside the list, or two are the same.
    """
    if not positions:
        refuse(field, [], "at least one gold position", f'set task.{field}=["0%","50%","100%"]')
    found = [_index(field, position, size_field, size) for position in positions]
    if len(set(found)) != len(found):
        places = f"different gold positions (task.{size_field}={size} puts these at {found})"
        refuse(field, list(positions), places, f"set task.{field}=[...] or raise task.{size_field}")
    return found


def _index(field: str, position: int | str, size_field: str, size: int) -> int:
    try:
        if isinstance(position, str) and position.endswith("%"):
            share = float(position[:-1]) / 100
            index = int(share * (size - 1)) if 0 <= share <= 1 else -1
        else:
            index = int(position)
    except ValueError:
        index = -1
    if not 0 <= index < size:
        allowed = f'an index from 0 to {size - 1} (task.{size_field}={size}) or a share from "0%" to "100%"'
        refuse(field, position, allowed, "put the gold item inside the list")
    return index


def placed(examples: Sequence[Example], most: int | None = None) -> list[Example]:
    """The examples with a gold item among items, sorted by gold position; at most so many of each, all where None."""
    there = [e for e in examples if e.gold_position is not None and e.items]
    seen: Counter[int | None] = Counter()
    kept = []
    for example in sorted(there, key=lambda e: e.gold_position or 0):
        seen[example.gold_position] += 1
        if most is None or seen[example.gold_position] <= most:
            kept.append(example)
    return kept
