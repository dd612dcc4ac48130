"""What a task's score() may return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from posbench.errors import UserError
from posbench.tasks import Example, Task
from posbench.tasks.base import Split

EXAMPLE = Example(id="x7", prompt="?", answers=("y",))


@dataclass(frozen=True, kw_only=True)
class Scored(Task):
    metric: ClassVar[str] = "accuracy"
    name: str = "scored"
    max_new_tokens: int = 1
    returned: Any = None

    def examples(self, split: Split) -> list[Example]:
        return [EXAMPLE]

    def score(self, example: Example, text: str) -> dict[str, float]:
        return dict(self.returned)


@pytest.mark.parametrize(
    "returned",
    [
        {"f1": 1.0},
        {"accuracy": float("nan")},
        {"accuracy": float("inf")},
        {"accuracy": "1"},
        {"accuracy": 1.0, "f1": None},
    ],
)
def test_a_score_without_the_metric_or_without_numbers_is_refused(
    returned: dict[str, Any],
) -> None:
    with pytest.raises(UserError) as error:
        Scored(returned=returned).checked_score(EXAMPLE, "y")
    assert error.value.field == "task scored: score"
    assert "x7" in str(error.value.value)
    assert "accuracy" in error.value.allowed


@pytest.mark.parametrize(
    "returned", [{}, {"accuracy": 0}, {"accuracy": 1.0, "f1": 0.5}]
)
def test_a_score_with_the_metric_or_without_a_gold_answer_is_taken(
    returned: dict[str, Any],
) -> None:
    assert Scored(returned=returned).checked_score(EXAMPLE, "y") == returned
