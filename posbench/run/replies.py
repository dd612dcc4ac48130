"""Scored replies to the evaluation examples under a method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from posbench.files.atomic import Row
from posbench.late import pd
from posbench.measure.replies import BatchShape, reply_to_batch
from posbench.methods import Method
from posbench.model.encode import Encoded
from posbench.run.base import Run
from posbench.run.batch_plan import BatchPlan, Prompts
from posbench.run.plan import Compute, Plan, Request, Subject
from posbench.run.reply_rows import make_row
from posbench.run.stop import StopRules
from posbench.stats.outcomes import is_scorable
from posbench.tasks import Example

STAGE = "evaluate"


def scored_replies(
    run: Run,
    file: str,
    methods: Mapping[str, Method],
    encoded: Mapping[str, Encoded],
    rules: StopRules | None = None,
) -> dict[str, list[Row]]:
    """Return scored replies to all evaluation examples under each method.

    Args:
        run: The run; rows that its folder has already are not computed again.
        file: Name of the JSON-lines file in its folder.
        methods: The methods by name.
        encoded: The prompts by the id of their example.
        rules: What may end the run before all are asked.

    Returns:
        The rows of each method, by its name.
    """
    subjects = [Subject(run, name, method) for name, method in methods.items()]
    plan, compute = plan_replies(subjects, encoded)
    rows = plan.complete(run, file, STAGE, compute, rules)
    return {name: [row for row in rows if row["method"] == name] for name in methods}


def plan_replies(
    subjects: Sequence[Subject],
    encoded: Mapping[str, Encoded],
    examples: Sequence[Example] | None = None,
) -> tuple[Plan, Compute]:
    """Plan the replies to examples, of runs that differ in their methods alone.

    Args:
        subjects: The methods.
        encoded: The prompts by the id of their example.
        examples: The examples; None: those of the evaluation.

    Returns:
        The plan, and a function that computes the rows of a batch.
    """
    run = subjects[0].run
    if examples is None:
        examples = run.evaluation
    if run.model.in_process:
        return plan_batches(subjects, encoded, examples)
    from posbench.run.served_plan import ServedPlan

    served = ServedPlan(subjects, examples, encoded)
    return served, served.answer


def plan_batches(
    subjects: Sequence[Subject],
    encoded: Mapping[str, Encoded],
    examples: Sequence[Example],
) -> tuple[BatchPlan, Compute]:
    """Plan replies of a model in process; see :func:`plan_replies`."""
    run = subjects[0].run

    def compute(batch: Sequence[Request]) -> list[Row]:
        return [row for part in plan.parts(batch) for row in reply_to(part)]

    def reply_to(batch: Sequence[Request]) -> list[Row]:
        asked_prompts = [plan.asked_prompt(request) for request in batch]
        examples = [prompt.example for prompt in asked_prompts]
        prompts = {prompt.example.id: prompt.encoded for prompt in asked_prompts}
        with plan.applied(batch) as prefix:
            texts = reply_to_batch(run.lm, run.task, examples, prompts, prefix)
        rows = []
        for request, prompt, reply in zip(batch, asked_prompts, texts, strict=True):
            row = make_row(run, request.example, prompt.encoded, reply)
            if prompt.example.prompt != request.example.prompt:
                row["rewritten_prompt"] = prompt.example.prompt
            rows.append(row)
        return rows

    def make_batches(
        examples: Sequence[Example], prompts: Prompts, shape: BatchShape
    ) -> list[list[Example]]:
        return run.prompts.batches(examples, prompts, shape=shape)

    plan = BatchPlan(subjects, examples, encoded, make_batches, packs=True)
    return plan, compute


def compare_scores(run: Run, file: str, methods: Mapping[str, Method]) -> pd.DataFrame:
    """Score every evaluation example under each method.

    Args:
        run: The run; rows that its folder has already are not computed again.
        file: Name of the JSON-lines file in its folder.
        methods: The methods by name.

    Returns:
        A row per method and example that can be scored: ``method``, ``id``, ``gold_position``, ``cluster``, and
        ``score`` by the task's own metric, NaN where the reply is no answer.
    """
    encoded = run.prompts.encode(run.evaluation)
    metric = run.task.metric
    values = [
        (
            row["method"],
            row["id"],
            row["gold_position"],
            row["cluster"] or row["id"],
            row["scores"].get(metric, math.nan),
        )
        for rows in scored_replies(run, file, methods, encoded).values()
        for row in rows
        if is_scorable(row)
    ]
    columns = ["method", "id", "gold_position", "cluster", "score"]
    return pd.DataFrame(values, columns=columns)
