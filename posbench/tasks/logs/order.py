"""What the scores of a list say of its order: best first, distances, or the best at both ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MIN_REORDERED = 5
"""Fewest documents of a list that shows a reordering: one of sixty orders of five has its form by chance."""


def rank_order(scores: Sequence[float], are_distances: bool) -> tuple[int, ...]:
    """Indices by falling score (of distances: by rising), equal ones in their order."""
    sign = 1 if are_distances else -1
    return tuple(sorted(range(len(scores)), key=lambda index: sign * scores[index]))


def has_best_at_ends(scores: Sequence[float], are_distances: bool) -> bool:
    """Whether a list was reordered so that the best documents stand at both ends.

    Of eight, Haystack writes the ranks 1 3 5 7 8 6 4 2, LangChain and LlamaIndex 2 4 6 8 7 5 3 1.
    """
    size = len(scores)
    if size < MIN_REORDERED or len(set(scores)) < size:
        return False
    rank = {index: r for r, index in enumerate(rank_order(scores, are_distances))}
    ranks = [rank[index] for index in range(size)]
    pattern = [*range(0, size, 2), *reversed(range(1, size, 2))]
    return ranks in (pattern, pattern[::-1])


def seems_small_first(lists: Iterable[Sequence[float] | None]) -> bool:
    """Whether more lists are in order, or have the best at both ends, if small scores are good than if large are.

    Args:
        lists: Scores of each list; None where not all documents have one.
    """
    balance = 0
    for scores in lists:
        if scores is None or len(set(scores)) < 2:
            continue
        in_order = tuple(range(len(scores)))
        for are_distances, sign in ((True, 1), (False, -1)):
            fits = rank_order(scores, are_distances) == in_order
            balance += sign * (fits or has_best_at_ends(scores, are_distances))
    return balance > 0
