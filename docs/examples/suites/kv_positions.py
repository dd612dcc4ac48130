"""Key-value retrieval at the first, a middle and the last position, for lm-evaluation-harness: kv_positions.yaml."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean
from typing import Any

from datasets import Dataset, DatasetDict

from posbench.tasks import KVRetrieval

POSITIONS = ("0%", "50%", "100%")
"""Where the gold pair stands: first, in the middle, last."""
Scored = tuple[int, float]
"""The index of a position in ``POSITIONS``, and the accuracy of one reply there."""


def make_task(pairs: int, questions: int) -> KVRetrieval:
    """The task with random UUIDs, each question at every position."""
    return KVRetrieval(
        pairs=pairs, positions=POSITIONS, limit=questions, prompt="official"
    )


def load(pairs: int, questions: int, **_: Any) -> DatasetDict:
    """The data set of the harness.

    Args:
        pairs: Pairs of a prompt, from the YAML's ``metadata``.
        questions: Questions at each position.
    """
    examples = make_task(pairs, questions).evaluation()
    indices = sorted({example.gold_position for example in examples})
    rows = [
        {
            "prompt": example.prompt,
            "answer": example.answers[0],
            "position": indices.index(example.gold_position),
        }
        for example in examples
    ]
    return DatasetDict({"test": Dataset.from_list(rows)})


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
    """The metrics of one reply; those by position carry it to their aggregation."""
    correct = float(doc["answer"] in results[0])
    scored = (doc["position"], correct)
    by_position = ("accuracy_first", "accuracy_middle", "accuracy_last", "position_gap")
    return {"accuracy": correct, **dict.fromkeys(by_position, scored)}


def accuracy_at(index: int, items: Iterable[Scored]) -> float:
    """Mean accuracy at one of the positions."""
    return mean(correct for position, correct in items if position == index)


def at_first(items: Iterable[Scored]) -> float:
    """Mean accuracy where the gold pair is the first one."""
    return accuracy_at(0, items)


def at_middle(items: Iterable[Scored]) -> float:
    """Mean accuracy where the gold pair is in the middle."""
    return accuracy_at(1, items)


def at_last(items: Iterable[Scored]) -> float:
    """Mean accuracy where the gold pair is the last one."""
    return accuracy_at(2, items)


def position_gap(items: Iterable[Scored]) -> float:
    """Accuracy at the best position minus that at the worst; sampling noise alone makes it larger than 0."""
    items = list(items)
    accuracies = [accuracy_at(index, items) for index in range(len(POSITIONS))]
    return max(accuracies) - min(accuracies)
