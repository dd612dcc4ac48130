"""Stop rule: no more questions than are needed to decide the shape of a position bias."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from posbench.files.atomic import Row
from posbench.run.stop import ReadRows, StopRule
from posbench.stats.bootstrap import Array, mean
from posbench.stats.position_bias import CurveIntervals, floor_note
from posbench.stats.sequential import FIRST_QUESTIONS, curve_intervals
from posbench.stats.shape import FLAT, UNCLEAR, name_shape
from posbench.tasks import Example

MIN_SHAPE_POSITIONS = 3


class ShapeRule(StopRule):
    """Ends the rounds of questions once the shape of the score over the gold position is decided.

    It looks at the replies under one method; the error rate of its intervals holds however often it looks, see
    :func:`posbench.stats.sequential.log_capital`.

    Args:
        metric: The score that counts.
        method: The method whose rows are looked at.
        examples: The examples in the order in which they are asked.
        chance: Score of a guess, 0..1.
    """

    keeps_rounds = True  # the shape is computed from complete rounds

    def __init__(
        self, metric: str, method: str, examples: Sequence[Example], chance: float
    ) -> None:
        self.metric = metric
        self.method = method
        self.chance = chance
        self._tuples = tuples_of_examples(examples)

    def ends_before(self, size: float, rows: ReadRows) -> bool:
        """See :meth:`posbench.run.stop.StopRule.ends_before`."""
        return self.is_decided(rows())

    def is_decided(self, rows: Sequence[Row]) -> bool:
        """Return whether the rows of the rounds so far decide the shape, or show that the model cannot do the task."""
        scores = self.scores(rows)
        if len(scores) < FIRST_QUESTIONS:
            return False
        name = name_shape(curve_intervals(scores))
        return name != UNCLEAR and (name != FLAT or self._level_is_known(scores))

    def _level_is_known(self, scores: Array) -> bool:
        """Whether a model that is alike at all positions is surely above the floor there, or surely at it."""
        clusters = [str(index) for index in range(len(scores))]
        positions = [mean(column, clusters) for column in scores.T]
        average = mean(scores.ravel(), [c for c in clusters for _ in scores.T])
        note = floor_note(positions, average, self.chance, len(scores))
        return not note or note.startswith("at the floor")

    def intervals(self, rows: Sequence[Row]) -> dict[str, CurveIntervals]:
        """Estimate the curve under the method, with intervals that hold whenever a run stops.

        Returns:
            The intervals by the method's name; empty without scores at three gold positions or more.
        """
        scores = self.scores(rows)
        return {self.method: curve_intervals(scores)} if len(scores) else {}

    def scores(self, rows: Sequence[Row]) -> Array:
        """Return the method's scores of the questions that are answered at all K gold positions so far, [N, K].

        Args:
            rows: Rows of predictions.
        """
        score_of = {
            row["id"]: row["scores"][self.metric]
            for row in rows
            if row["method"] == self.method and row.get("scores")
        }
        scores_by_question = [
            [score_of[name] for name in ids]
            for ids in self._tuples
            if all(name in score_of for name in ids)
        ]
        return np.array(scores_by_question, dtype=np.float64)


def tuples_of_examples(examples: Sequence[Example]) -> list[list[str]]:
    """Group the examples of a task that are asked together: one at each gold position.

    The n-th examples of all positions are the same question, or, where a task draws others for each position,
    questions that are independent of one another.

    Args:
        examples: The examples in the order in which they are asked.

    Returns:
        Tuples of ids, one at each gold position in order; none without three positions, or if a question is in several
        tuples, which would then not be independent.
    """
    placed = [e for e in examples if e.gold_position is not None]
    positions = sorted({e.gold_position for e in placed if e.gold_position is not None})
    if len(positions) < MIN_SHAPE_POSITIONS:
        return []
    counts = Counter[tuple[str, int | None]]()
    tuples: dict[tuple[int, str], dict[int | None, str]] = {}
    tuple_of_question: dict[str, tuple[int, str]] = {}
    for example in placed:
        cell = (example.subset, example.gold_position)
        # The n-th example of a subset at its position.
        key = (counts[cell], example.subset)
        counts[cell] += 1
        tuples.setdefault(key, {})[example.gold_position] = example.id
        if tuple_of_question.setdefault(example.question_id, key) != key:
            return []
    return [
        [ids[position] for position in positions]
        for _, ids in sorted(tuples.items())
        if len(ids) == len(positions)
    ]
