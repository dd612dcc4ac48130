"""What searches for the scales of layer_scaling share: calibration questions at three gold positions, and the
found block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from posbench.errors import UserError
from posbench.measure.replies import encode
from posbench.methods import Method
from posbench.methods.layer_scaling import LayerScaling
from posbench.model.lm import LM
from posbench.run.base import Run
from posbench.schema import Count, NonNegative
from posbench.search.base import Search
from posbench.search.evolution import POSITIONS, Scales, Scores
from posbench.tasks import Example, Task

Weights = tuple[NonNegative, NonNegative, NonNegative]


@dataclass(frozen=True, kw_only=True)
class ScaleSearch(Search):
    """What searches for the scales of layer_scaling share: three gold positions with weights, and the found
    block.

    Attributes:
        calibration_seed: Of the calibration questions; None: the task's, which also draws the evaluation.
    """

    serves: ClassVar[type[LayerScaling]] = LayerScaling
    finds: ClassVar[Mapping[str, Any]] = {
        "points": ((0.0, 1.0),),
        "scales": None,
        "curve": "bezier",
        "x": "stretched",
    }

    weights: Weights = (0.2, 0.3, 0.5)
    batch_size: Count = 32
    seed: int = 0
    calibration_seed: int | None = None

    def __post_init__(self) -> None:
        # The paper itself prints three times 0.333.
        if abs(sum(self.weights) - 1) > 5e-3:
            allowed = "three numbers from 0 up with sum 1"
            raise UserError("search.weights", list(self.weights), allowed, "the paper takes [0.2,0.3,0.5]")

    def check(self, run: Run) -> None:
        """Refuse typed scales, and a task whose gold answers have no places."""
        super().check(run)
        calibration(run.task, self.calibration_seed)

    def write_scales(
        self, run: Run, parameters: Mapping[str, Any], scales: Scales, scores: Scores, how: str
    ) -> None:
        """Write the found block, with its mean scale (LPES' uniform baseline)."""
        ends = {"lowest": min(scales), "highest": max(scales), "mean": float(np.mean(scales))}
        fitness = {"fitness": scales, "fitness_unmodified": (1.0,) * len(scales)}
        measured = {name: round(scores.bound(which), 6) for name, which in fitness.items()}
        among = f"{len(scores.positions)} calibration prompts of {run.task.name}, seed {self.seed}"
        self.write_found(run, {**parameters, **ends, **measured}, f"{how}, {among})")

    def told(self, block: Mapping[str, Any]) -> str:
        """Range of the scales, and fitness."""
        worse = block["fitness"] <= block["fitness_unmodified"]
        remark = "; not better than the unmodified model" if worse else ""
        return (
            f"scales {block['lowest']:.3g} to {block['highest']:.3g}: fitness {block['fitness']:.4f}, "
            f"unmodified {block['fitness_unmodified']:.4f}{remark}"
        )


def calibration(task: Task, seed: int | None = None) -> tuple[list[Example], list[int]]:
    """Every calibration question three times, with the answer at the beginning, in the middle and at the end.

    Args:
        task: A task with gold positions. Three ``calibration_positions`` replace the first, the middle
            (n // 2) and the last.
        seed: Of the questions; None: the task's.

    Returns:
        The examples, and for each 0, 1 or 2.

    Raises:
        UserError: The task has no such positions.
    """
    count, given = task.calibration_items, getattr(task, "calibration_positions", None)
    if count is None or getattr(task, "calibration_path", None):
        allowed = "a task that puts the answers of calibration questions anywhere: kv_retrieval, nq_multidoc"
        hint = "search there, then set the method's parameters here and stages=[evaluate,report]"
        raise UserError("task", task.name, allowed, hint)
    places = given or (0, count // 2, count - 1)
    if len(places) != len(POSITIONS):
        allowed = "null, or the beginning, the middle and the end: three of them"
        hint = 'set task.calibration_positions=["0%","50%","100%"]'
        raise UserError("task.calibration_positions", list(places), allowed, hint)
    task = task if seed is None else replace(task, seed=seed)  # type: ignore[call-arg]
    examples, positions = list[Example](), list[int]()
    for number, place in enumerate(places):
        asked = replace(task, calibration_positions=(place,)).examples("calibration")  # type: ignore[call-arg]
        examples += [replace(example, id=f"{POSITIONS[number]}-{example.id}") for example in asked]
        positions += [number] * len(asked)
    return examples, positions


def answering(
    lm: LM, task: Task, examples: Sequence[Example], whole: Callable[[Method], Method] = lambda method: method
) -> Callable[[Scales, list[int]], list[float]]:
    """The function that scores scales on some of the examples, by the task's own metric.

    Args:
        lm: The model.
        task: Its task.
        examples: What is asked.
        whole: Puts other methods around the scales or inside them.
    """
    encoded = [encode(lm, task, example) for example in examples]

    def answer(scales: Scales, numbers: list[int]) -> list[float]:
        try:
            with whole(LayerScaling(scales=scales)).applied(lm):
                texts = lm.generate(
                    [encoded[i].ids for i in numbers],
                    max_new_tokens=task.max_new_tokens,
                    repetition_penalty=task.repetition_penalty,
                    batch_size=len(numbers),
                )
        except torch.OutOfMemoryError:
            if len(numbers) == 1:
                raise
            texts = []
        if not texts:
            # Only behind the handler are the tensors of the failed forward free.
            torch.cuda.empty_cache()
            half = len(numbers) // 2
            return answer(scales, numbers[:half]) + answer(scales, numbers[half:])
        return [task.score(examples[i], text)[task.metric] for i, text in zip(numbers, texts, strict=True)]

    return answer
