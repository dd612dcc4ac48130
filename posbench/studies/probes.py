"""Prompts that show fewer documents: none, or the gold ones alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from posbench.model.items import ItemPrompt
from posbench.tasks import Example

CLOSED_BOOK = "closed_book"
"""The question without its documents."""
GOLD_ALONE = "gold_alone"
"""The question with its gold documents alone."""


def gold_documents(example: Example) -> tuple[int, ...] | None:
    """Return the indices of the gold documents; None where they are not known, empty where none was retrieved."""
    if example.gold_position is not None:
        return example.gold_positions
    gold = example.meta.get("gold")
    return None if gold is None else tuple(gold)


def with_documents(example: Example, kept: Sequence[int]) -> Example:
    """Return the example with some of its documents alone, in the first places.

    Args:
        example: The example.
        kept: Indices of the documents; empty: none, and the text around them stays.
    """
    prompt = ItemPrompt(example.prompt, example.items, example.question)
    if kept:
        prompt = prompt.with_items(list(kept))
    else:
        start = min(first for first, _ in example.items)
        end = max(last for _, last in example.items)
        prompt = ItemPrompt(example.prompt[:start] + example.prompt[end:], ())
    return replace(
        example,
        prompt=prompt.text,
        items=prompt.items,
        question=prompt.question,
        gold_position=None,
        other_gold=(),
    )


def question_alone(example: Example) -> Example:
    """Return the example from its question on: neither documents nor the instruction to use them.

    Where the question does not follow the documents, the documents alone are left out.
    """
    last_item = max(end for _, end in example.items)
    if example.question is None or example.question[0] < last_item:
        return with_documents(example, ())
    start, end = example.question
    return replace(
        example,
        prompt=example.prompt[start:],
        items=(),
        question=(0, end - start),
        gold_position=None,
        other_gold=(),
    )
