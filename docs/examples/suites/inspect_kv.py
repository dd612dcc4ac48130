"""Key-value retrieval as a task of inspect_ai, with a gold position for each epoch.

``inspect eval docs/examples/suites/inspect_kv.py --model openai/MODEL`` asks every question once per position: an
epoch is a position. The reducer keeps the scores of the epochs apart, and the metrics compare them.
"""

from __future__ import annotations

import math
from statistics import mean

from inspect_ai import Epochs, Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import (
    Metric,
    SampleScore,
    Score,
    Scorer,
    ScoreReducer,
    Target,
    metric,
    score_reducer,
    scorer,
)
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver

from posbench.tasks import Example, KVRetrieval

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where the gold pair stands in the first epoch, the second, ...: 0 is the first place, 1 the last."""
POSITIONS = [f"{depth:.0%}" for depth in DEPTHS]
"""Their names in the log."""


def with_gold_at(example: Example, index: int) -> str:
    """The prompt of an example with its gold item moved to another place; the others keep their order."""
    texts = [example.prompt[start:end] for start, end in example.items]
    texts.insert(index, texts.pop(example.gold_position))
    prompt = example.prompt[: example.items[0][0]]
    ends = [start for start, _ in example.items[1:]] + [len(example.prompt)]
    for text, (_, end), next_start in zip(texts, example.items, ends, strict=True):
        prompt += text + example.prompt[end:next_start]
    return prompt


def samples(pairs: int, questions: int) -> list[Sample]:
    """A sample for each question; its metadata hold its prompts, one for each of ``DEPTHS``."""
    kv = KVRetrieval(pairs=pairs, positions=(0,), limit=questions)
    indices = [round(depth * (pairs - 1)) for depth in DEPTHS]
    return [
        Sample(
            id=example.id,
            input=example.prompt,
            target=example.answers[0],
            metadata={"prompts": [with_gold_at(example, index) for index in indices]},
        )
        for example in kv.evaluation()
    ]


@solver
def at_position_of_epoch() -> Solver:
    """Replace the prompt by the one of the epoch's position."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state.user_prompt.text = state.metadata["prompts"][state.epoch - 1]
        return state

    return solve


@score_reducer
def by_position() -> ScoreReducer:
    """Keep the score of each epoch under the name of its position."""

    def reduce(scores: list[Score]) -> Score:
        return Score(
            value={score.metadata["position"]: score.as_float() for score in scores}
        )

    return reduce


def accuracies(scores: list[SampleScore]) -> list[float]:
    """Mean accuracy at each position; nan where no question has been asked yet, as metrics are shown on the way."""
    means = []
    for position in POSITIONS:
        values = [score.score.as_dict().get(position) for score in scores]
        asked = [value for value in values if value is not None]
        means.append(mean(asked) if asked else math.nan)
    return means


@metric
def position_gap() -> Metric:
    """Accuracy at the best position minus that at the worst; sampling noise alone makes it larger than 0."""

    def gap(scores: list[SampleScore]) -> float:
        means = accuracies(scores)
        return max(means) - min(means)

    return gap


@metric
def middle_drop() -> Metric:
    """Mean accuracy at both ends minus that at the positions between."""

    def drop(scores: list[SampleScore]) -> float:
        first, *inner, last = accuracies(scores)
        return (first + last) / 2 - mean(inner)

    return drop


@metric
def at_positions() -> Metric:
    """Mean accuracy at each position."""

    def by_name(scores: list[SampleScore]) -> dict[str, float]:
        return dict(zip(POSITIONS, accuracies(scores), strict=True))

    return by_name


@scorer(metrics=[at_positions(), position_gap(), middle_drop()])
def holds_answer() -> Scorer:
    """1 where the reply holds the value that was asked for, else 0."""

    async def score(state: TaskState, target: Target) -> Score:
        position = POSITIONS[state.epoch - 1]
        correct = float(target.text in state.output.completion)
        return Score(value=correct, metadata={"position": position})

    return score


@task
def kv_positions(pairs: int = 20, questions: int = 50) -> Task:
    """Key-value retrieval with random UUIDs, each question at every position."""
    return Task(
        dataset=samples(pairs, questions),
        solver=[at_position_of_epoch(), generate()],
        scorer=holds_answer(),
        epochs=Epochs(len(POSITIONS), by_position()),
    )
