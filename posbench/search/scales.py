"""Common parts of the searches for scales of layer_scaling: calibration questions and scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from posbench.errors import UserError
from posbench.late import torch
from posbench.measure.replies import encode_prompt, reply_to_batch
from posbench.methods import Method
from posbench.methods.layer_scaling import LayerScaling
from posbench.model.lm import LM
from posbench.plots.search import POSITIONS
from posbench.run.base import Run
from posbench.schema import Count, NonNegative, Seed
from posbench.search import held_back
from posbench.search.base import Search
from posbench.tasks import Example, Task

Scales = tuple[float, ...]
"""A candidate: one RoPE scale per layer."""

NO_SCALES = {"points": None, "curve": "bezier", "x": "stretched", "scales": None}
"""Fields of layer_scaling without points or scales."""


@dataclass(frozen=True, kw_only=True)
class ScaleSearch(Search):
    """A search for the scales of layer_scaling.

    Attributes:
        weights: Of the accuracies with the answer at the beginning, in the middle and at the end, in the
            fitness (0.2, 0.3, 0.5).
        batch_size: Prompts per forward (32).
        seed: Seed of the search's random draws.
        calibration_seed: Seed of the calibration questions; None: the task's, which also draws the
            evaluation.
    """

    serves: ClassVar[type[LayerScaling]] = LayerScaling
    finds: ClassVar[Mapping[str, Any]] = {**NO_SCALES, "points": ((0.0, 1.0),)}

    weights: tuple[NonNegative, NonNegative, NonNegative] = (0.2, 0.3, 0.5)
    batch_size: Count = 32
    seed: Seed = 0
    calibration_seed: Seed | None = None

    def __post_init__(self) -> None:
        # The paper itself prints three times 0.333.
        if abs(sum(self.weights) - 1) > 5e-3:
            allowed = "three numbers from 0 up with sum 1"
            hint = "set search.weights=[0.2,0.3,0.5], as in the paper"
            raise UserError("search.weights", list(self.weights), allowed, hint)

    def check(self, run: Run) -> None:
        """Refuse typed scales, and a task without gold positions."""
        super().check(run)
        calibration_questions(run.task, self.calibration_seed)

    def held_back_examples(self, run: Run, count: int | None) -> list[Example]:
        """Held-back questions, each with the answer at the beginning, in the middle and at the end."""
        questions = count or len(run.examples("calibration"))
        examples, _ = calibration_questions(run.task, self.calibration_seed, questions)
        return examples

    def prompt_length(self, run: Run, example: Example) -> int:
        """Tokens of the prompt and of the longest reply; see :meth:`Search.prompt_length`."""
        return (
            len(encode_prompt(run.lm, run.task, example).ids) + run.task.max_new_tokens
        )

    def measure_batch(self, run: Run, batch: Sequence[Example]) -> list[float]:
        """Return the weighted score (or loss) of each prompt; the mean over all prompts is the fitness (or loss).

        A prompt's weight is three times its gold position's weight, as each position has a third of the prompts.
        """
        score = super().measure_batch if self.measure == "loss" else self._task_scores
        values = score(run, batch)
        positions = [example.id.partition("-")[0] for example in batch]
        weights = [3 * self.weights[POSITIONS.index(name)] for name in positions]
        return [weight * value for weight, value in zip(weights, values, strict=True)]

    def _task_scores(self, run: Run, batch: Sequence[Example]) -> list[float]:
        encoded = {e.id: encode_prompt(run.lm, run.task, e) for e in batch}
        rows = reply_to_batch(run.lm, run.task, batch, encoded)
        return [
            run.task.checked_score(example, str(row["output"]))[run.task.metric]
            for example, row in zip(batch, rows, strict=True)
        ]

    def write_scales(
        self,
        run: Run,
        parameters: Mapping[str, Any],
        scales: Scales,
        scores: Scores,
        description: str,
    ) -> None:
        """Write ``found.yaml``: the parameters, and facts about the scales that they define.

        Args:
            run: The run.
            parameters: Fields of layer_scaling.
            scales: The same as one scale per layer; their mean is LPES' uniform baseline.
            scores: Scores of these scales and of the unmodified model.
            description: The beginning of the block's source, with an open parenthesis.
        """
        unmodified = (1.0,) * len(scales)
        facts = {
            "lowest": min(scales),
            "highest": max(scales),
            "mean": float(np.mean(scales)),
            "fitness": round(scores.fitness_bound(scales), 6),
            "fitness_unmodified": round(scores.fitness_bound(unmodified), 6),
        }
        prompts = f"{len(scores.positions)} calibration prompts of {run.task.name}"
        source = f"{description}, {prompts}, seed {self.seed})"
        self.write_found(run, {**parameters, **facts}, source)

    def describe(self, block: Mapping[str, Any]) -> str:
        """Range of the scales, and fitness."""
        text = f"scales {block['lowest']:.3g} to {block['highest']:.3g}: fitness {block['fitness']:.4f}"
        before = held_back.baseline(block.get("held_back", {}))
        text += f", {before} {block['fitness_unmodified']:.4f}"
        if block["fitness"] <= block["fitness_unmodified"]:
            text += "; no better"
        return text


@dataclass
class Scores:
    """Scores of candidates on N examples, filled batch by batch.

    Attributes:
        search: Gives weights and batch size.
        positions: Gold position of each example, shape (N,): 0 beginning, 1 middle, 2 end.
        evaluate: Scores a candidate on the examples of some indices: a number in 0..1 for each, in order.
        values: By candidate, its scores, shape (N,), NaN where it is not scored yet.
    """

    search: ScaleSearch
    positions: NDArray[np.int64]
    evaluate: Callable[[Scales, list[int]], Sequence[float]]
    values: dict[Scales, NDArray[np.float64]] = field(default_factory=dict)

    @property
    def evaluations(self) -> int:
        """Number of pairs of candidate and example that have been scored."""
        return sum(int(np.isfinite(row).sum()) for row in self.values.values())

    def add(
        self, scales: Scales, indices: Sequence[int], scores: Sequence[float]
    ) -> None:
        """Record scores of a candidate on the examples ``indices``."""
        if scales not in self.values:
            self.values[scales] = np.full(len(self.positions), np.nan)
        self.values[scales][list(indices)] = scores

    def score(self, scales: Scales, indices: list[int]) -> None:
        """Score a candidate on some examples, unless all are scored already."""
        if scales not in self.values or np.isnan(self.values[scales][indices]).any():
            self.add(scales, indices, self.evaluate(scales, indices))

    def score_all(self, scales: Scales) -> None:
        """Score a candidate on every example, in batches in order."""
        for batch in self._batches(list(range(len(self.positions)))):
            self.score(scales, batch)

    def _batches(self, order: list[int]) -> list[list[int]]:
        size = self.search.batch_size
        return [order[start : start + size] for start in range(0, len(order), size)]

    def accuracy_bounds(self, scales: Scales) -> list[float]:
        """Return the highest accuracy that scales can still reach at beginning, middle and end.

        Examples that were not scored yet count as right.
        """
        unscored = np.ones(len(self.positions))
        scores = np.nan_to_num(self.values.get(scales, unscored), nan=1.0)
        bounds = []
        for index in range(len(POSITIONS)):
            group = scores[self.positions == index]
            bounds.append(float(group.mean()) if len(group) else 0.0)
        return bounds

    def fitness_bound(self, scales: Scales) -> float:
        """Fitness (weighted accuracy) of a candidate; while not all is scored, the highest possible one."""
        bounds = self.accuracy_bounds(scales)
        return sum(w * a for w, a in zip(self.search.weights, bounds, strict=True))

    def rank_key(self, scales: Scales) -> tuple[float, float, float]:
        """Key that sorts candidates best first, with the ties of :class:`.GeneticSearch`."""
        lowest_accuracy = min(self.accuracy_bounds(scales))
        distance = sum(abs(scale - 1) for scale in scales)
        return -self.fitness_bound(scales), -lowest_accuracy, distance

    def plan_batches(self, finished: Sequence[Scales]) -> list[list[int]]:
        """Return batches of example indices, those first that cost the finished candidates the most fitness.

        The race then drops a bad candidate after few batches.

        Args:
            finished: Scales of candidates that are scored on all examples; without any, examples of the largest weight
                come first.
        """
        counts = np.bincount(self.positions, minlength=len(POSITIONS))
        weight_per_example = np.array(self.search.weights) / np.maximum(counts, 1)
        losses = weight_per_example[self.positions]
        if finished:
            errors = np.mean([1 - self.values[scales] for scales in finished], axis=0)
            losses = losses * errors
        return self._batches(np.argsort(-losses, kind="stable").tolist())


def calibration_questions(
    task: Task, seed: int | None = None, held_back: int | None = None
) -> tuple[list[Example], list[int]]:
    """Return calibration questions, each asked three times: answer at the beginning, in the middle and at the end.

    Args:
        task: Its three ``calibration_positions`` are used where it has them, else 0, n // 2 and n - 1.
        seed: Draws the questions; None: the task's seed.
        held_back: Number of held-back questions to use instead of the calibration questions.

    Returns:
        The examples, and the gold position of each as an index into ``POSITIONS``.

    Raises:
        UserError: The task cannot move the answers of its calibration questions.
    """
    num_items = task.calibration_items
    gold_positions = getattr(task, "calibration_positions", None)
    if num_items is None or getattr(task, "calibration_path", None):
        allowed = "a task that can put the answer of a calibration question anywhere: kv_retrieval, nq_multidoc"
        hint = "search with one of these, then set the method's parameters here with stages=[evaluate,report]"
        raise UserError("task", task.name, allowed, hint)
    gold_positions = gold_positions or (0, num_items // 2, num_items - 1)
    if len(gold_positions) != len(POSITIONS):
        allowed = "null, or three positions: beginning, middle and end"
        hint = 'set task.calibration_positions=["0%","50%","100%"]'
        value = list(gold_positions)
        raise UserError("task.calibration_positions", value, allowed, hint)

    options: dict[str, Any] = {} if seed is None else {"seed": seed}
    examples: list[Example] = []
    position_indices: list[int] = []
    for index, position in enumerate(gold_positions):
        options["calibration_positions"] = (position,)
        at_position = replace(task, **options)
        questions = (
            at_position.held_back(held_back)
            if held_back
            else at_position.examples("calibration")
        )
        for question in questions:
            examples.append(replace(question, id=f"{POSITIONS[index]}-{question.id}"))
            position_indices.append(index)
    return examples, position_indices


def make_evaluator(
    lm: LM,
    task: Task,
    examples: Sequence[Example],
    compose: Callable[[Method], Method] = lambda method: method,
) -> Callable[[Scales, list[int]], list[float]]:
    """Make a function that scores scales on some of the examples by the task's metric.

    Args:
        lm: The model.
        task: Scores the replies.
        examples: The examples that the function's indices refer to.
        compose: Adds the run's other methods to the layer scaling.

    Returns:
        A function of scales and indices of examples that returns one score per index.
    """
    encoded = {example.id: encode_prompt(lm, task, example) for example in examples}

    def evaluate(scales: Scales, indices: list[int]) -> list[float]:
        batch = [examples[i] for i in indices]
        replies: list[dict[str, Any]] | None = None
        try:
            with compose(LayerScaling(scales=scales)).applied(lm):
                replies = reply_to_batch(lm, task, batch, encoded)
        except torch.OutOfMemoryError:
            if len(indices) < 2:
                raise
        if replies is None:
            # Only behind the handler are the tensors of the failed forward free.
            torch.cuda.empty_cache()
            half = len(indices) // 2
            return evaluate(scales, indices[:half]) + evaluate(scales, indices[half:])
        return [
            task.checked_score(example, str(reply["output"]))[task.metric]
            for example, reply in zip(batch, replies, strict=True)
        ]

    return evaluate
