"""What searches for the scales of layer_scaling share: questions at three gold positions, found block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from posbench.errors import UserError
from posbench.late import torch
from posbench.measure.replies import encode, replies
from posbench.methods import Method
from posbench.methods.layer_scaling import LayerScaling
from posbench.model.lm import LM
from posbench.plots.search import POSITIONS
from posbench.run.base import Run
from posbench.schema import Count, NonNegative, Seed
from posbench.search.base import Search
from posbench.tasks import Example, Task

Scales = tuple[float, ...]
"""One factor per layer: what a candidate is scored by, and the key of everything that is remembered of it."""

NEUTRAL = {"points": None, "curve": "bezier", "x": "stretched", "scales": None}
"""Fields of layer_scaling without points or scales."""


@dataclass(frozen=True, kw_only=True)
class ScaleSearch(Search):
    """A search for the scales of layer_scaling."""

    serves: ClassVar[type[LayerScaling]] = LayerScaling
    finds: ClassVar[Mapping[str, Any]] = {**NEUTRAL, "points": ((0.0, 1.0),)}

    # of examples with the answer at the beginning, in the middle, at the end (0.2, 0.3, 0.5)
    weights: tuple[NonNegative, NonNegative, NonNegative] = (0.2, 0.3, 0.5)
    batch_size: Count = 32  # prompts per forward (32)
    seed: Seed = 0  # seed of the draws
    # of the calibration questions; None: the task's, which also draws the evaluation
    calibration_seed: Seed | None = None

    def __post_init__(self) -> None:
        # The paper itself prints three times 0.333.
        if abs(sum(self.weights) - 1) > 5e-3:
            allowed = "three numbers from 0 up with sum 1"
            raise UserError(
                "search.weights",
                list(self.weights),
                allowed,
                "the paper takes [0.2,0.3,0.5]",
            )

    def check(self, run: Run) -> None:
        """Refuse typed scales, and a task whose gold answers have no places."""
        super().check(run)
        calibration(run.task, self.calibration_seed)

    def further(self, run: Run, count: int | None) -> list[Example]:
        """Questions, each with the answer at the beginning, in the middle and at the end."""
        asked = count or len(run.examples("calibration"))
        return calibration(run.task, self.calibration_seed, further=asked)[0]

    def tokens(self, run: Run, example: Example) -> int:
        """See :meth:`Search.tokens`: the reply counts, too."""
        return len(encode(run.lm, run.task, example).ids) + run.task.max_new_tokens

    def measured(self, run: Run, batch: Sequence[Example]) -> list[float]:
        """The part of each prompt in the fitness, or in the loss: times three and the weight of its place."""
        weights = [
            3 * self.weights[POSITIONS.index(e.id.partition("-")[0])] for e in batch
        ]
        values = (
            super().measured(run, batch)
            if self.measure == "loss"
            else self._scores(run, batch)
        )
        return [weight * value for weight, value in zip(weights, values, strict=True)]

    def _scores(self, run: Run, batch: Sequence[Example]) -> list[float]:
        told = replies(
            run.lm, run.task, batch, {e.id: encode(run.lm, run.task, e) for e in batch}
        )
        scored = [
            run.task.score(e, str(reply["output"]))
            for e, reply in zip(batch, told, strict=True)
        ]
        return [scores[run.task.metric] for scores in scored]

    def write_scales(
        self,
        run: Run,
        parameters: Mapping[str, Any],
        scales: Scales,
        scores: Scores,
        how: str,
    ) -> None:
        """Write the found block, with its mean scale (LPES' uniform baseline)."""
        facts = {
            "lowest": min(scales),
            "highest": max(scales),
            "mean": float(np.mean(scales)),
        }
        for name, which in (
            ("fitness", scales),
            ("fitness_unmodified", (1.0,) * len(scales)),
        ):
            facts[name] = round(scores.bound(which), 6)
        among = f"{len(scores.positions)} calibration prompts of {run.task.name}, seed {self.seed}"
        self.write_found(run, {**parameters, **facts}, f"{how}, {among})")

    def told(self, block: Mapping[str, Any]) -> str:
        """Range of the scales, and fitness."""
        worse = block["fitness"] <= block["fitness_unmodified"]
        remark = "; not better than the unmodified model" if worse else ""
        text = f"scales {block['lowest']:.3g} to {block['highest']:.3g}: fitness {block['fitness']:.4f}"
        return f"{text}, unmodified {block['fitness_unmodified']:.4f}{remark}"


@dataclass
class Scores:
    """What each candidate scores on each of N examples."""

    search: ScaleSearch  # weights and batch size
    # [N], 0 where an example's answer stands at the beginning, 1 in the middle, 2 at the end
    positions: NDArray[np.int64]
    # scores a candidate on some examples: one number in 0..1 for each, in order
    answer: Callable[[Scales, list[int]], Sequence[float]]
    # candidate to scores [N], NaN where there is none yet
    known: dict[Scales, NDArray[np.float64]] = field(default_factory=dict)

    @property
    def evaluations(self) -> int:
        """Pairs of candidate and example that have been scored."""
        return sum(int(np.isfinite(row).sum()) for row in self.known.values())

    def add(
        self, scales: Scales, examples: Sequence[int], scores: Sequence[float]
    ) -> None:
        """Remember scores of a candidate."""
        self.known.setdefault(scales, np.full(len(self.positions), np.nan))[
            list(examples)
        ] = scores

    def ask(self, scales: Scales, examples: list[int]) -> None:
        """Score a candidate on some examples, unless it was."""
        if scales not in self.known or np.isnan(self.known[scales][examples]).any():
            self.add(scales, examples, self.answer(scales, examples))

    def fill(self, scales: Scales) -> None:
        """Score a candidate on every example that it was not scored on, in batches in order."""
        for batch in self._batches(list(range(len(self.positions)))):
            self.ask(scales, batch)

    def _batches(self, order: list[int]) -> list[list[int]]:
        size = self.search.batch_size
        return [order[i : i + size] for i in range(0, len(order), size)]

    def accuracies(self, scales: Scales) -> list[float]:
        """Accuracy at beginning, middle, end; what is not scored counts as right, so that it only falls."""
        right = np.nan_to_num(
            self.known.get(scales, np.ones(len(self.positions))), nan=1.0
        )
        parts = (right[self.positions == p] for p in range(len(POSITIONS)))
        return [float(part.mean()) if len(part) else 0.0 for part in parts]

    def bound(self, scales: Scales) -> float:
        """Fitness (weighted accuracy) of a candidate; while not all is scored, the highest it can have."""
        return sum(
            w * a
            for w, a in zip(self.search.weights, self.accuracies(scales), strict=True)
        )

    def rank(self, scales: Scales) -> tuple[float, float, float]:
        """Sorts candidates, best first; ties as :class:`posbench.search.genetic.GeneticSearch` says."""
        return (
            -self.bound(scales),
            -min(self.accuracies(scales)),
            sum(abs(s - 1) for s in scales),
        )

    def plan(self, scored: Sequence[Scales]) -> list[list[int]]:
        """Batches of examples, those on which candidates lost most first: a bad one is found out early."""
        asked = np.bincount(self.positions, minlength=len(POSITIONS))
        loss = (np.array(self.search.weights) / np.maximum(asked, 1))[self.positions]
        if scored:
            loss = loss * np.mean([1 - self.known[scales] for scales in scored], axis=0)
        return self._batches(np.argsort(-loss, kind="stable").tolist())


def calibration(
    task: Task, seed: int | None = None, further: int | None = None
) -> tuple[list[Example], list[int]]:
    """Every calibration question, or so many ``further`` ones, three times, with the answer at the beginning,
    in the middle (n // 2) and at the end, or at the task's three ``calibration_positions``: the examples, and
    for each 0, 1 or 2. Raises `UserError` where the task has no such positions."""
    count = task.calibration_items
    places = getattr(task, "calibration_positions", None)
    if count is None or getattr(task, "calibration_path", None):
        allowed = "a task that puts the answers of calibration questions anywhere: kv_retrieval, nq_multidoc"
        hint = "search there, then set the method's parameters here and stages=[evaluate,report]"
        raise UserError("task", task.name, allowed, hint)
    places = places or (0, count // 2, count - 1)
    if len(places) != len(POSITIONS):
        allowed = "null, or the beginning, the middle and the end: three of them"
        hint = 'set task.calibration_positions=["0%","50%","100%"]'
        raise UserError("task.calibration_positions", list(places), allowed, hint)
    changed: dict[str, Any] = {} if seed is None else {"seed": seed}
    examples = list[Example]()
    positions = list[int]()
    for number, place in enumerate(places):
        moved = replace(task, **changed, calibration_positions=(place,))  # type: ignore[call-arg]
        asked = moved.held_back(further) if further else moved.examples("calibration")
        examples += [
            replace(example, id=f"{POSITIONS[number]}-{example.id}")
            for example in asked
        ]
        positions += [number] * len(asked)
    return examples, positions


def answering(
    lm: LM,
    task: Task,
    examples: Sequence[Example],
    whole: Callable[[Method], Method] = lambda method: method,
) -> Callable[[Scales, list[int]], list[float]]:
    """What scores scales on some of the examples by the task's metric; ``whole`` adds other methods."""
    encoded = [encode(lm, task, example) for example in examples]

    def answer(scales: Scales, numbers: list[int]) -> list[float]:
        texts = list[str]()
        half = len(numbers) // 2
        try:
            with whole(LayerScaling(scales=scales)).applied(lm):
                texts = lm.generate(
                    [encoded[i].ids for i in numbers],
                    max_new_tokens=task.max_new_tokens,
                    repetition_penalty=task.repetition_penalty,
                    batch_size=len(numbers),
                )
        except torch.OutOfMemoryError:
            if not half:
                raise
        if not texts:
            # Only behind the handler are the tensors of the failed forward free.
            torch.cuda.empty_cache()
            return answer(scales, numbers[:half]) + answer(scales, numbers[half:])
        return [
            task.score(examples[i], text)[task.metric]
            for i, text in zip(numbers, texts, strict=True)
        ]

    return answer
