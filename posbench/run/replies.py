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
from posbench.run.plan import Plan, Request, Subject
from posbench.run.reply_rows import make_row
from posbench.run.stop import StopRules
from posbench.stats.outcomes import is_scorable
from posbench.tasks import Example

EVALUATE_STAGE = "evaluate"


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
        rules: Rules that may end the run early.

    Returns:
        The rows of each method, by its name.
    """
    subjects = [Subject(run, name, method) for name, method in methods.items()]
    plan = plan_replies(subjects, encoded)
    rows = plan.complete(run, file, EVALUATE_STAGE, rules)
    return {name: [row for row in rows if row["method"] == name] for name in methods}


def plan_replies(subjects: Sequence[Subject], encoded: Mapping[str, Encoded]) -> Plan:
    """Return the plan of replies to the evaluation examples, of runs that differ in their methods alone.

    Args:
        subjects: The methods, each with its run.
        encoded: The prompts by the id of their example.
    """
    run = subjects[0].run
    if run.model.in_process:
        return ReplyBatches(subjects, run.evaluation, encoded)
    from posbench.run.served_plan import ServedPlan

    return ServedPlan(subjects, run.evaluation, encoded)


class ReplyBatches(BatchPlan):
    """Replies of a model in process to examples."""

    packs = True

    def make_batches(
        self, examples: Sequence[Example], prompts: Prompts, shape: BatchShape
    ) -> list[list[Example]]:
        """See :meth:`posbench.run.batch_plan.BatchPlan.make_batches`."""
        return self.run.prompts.batches(examples, prompts, shape=shape)

    def answer(self, batch: Sequence[Request]) -> list[Row]:
        """See :meth:`posbench.run.plan.Plan.answer`."""
        return [row for part in self.parts(batch) for row in self._reply_to(part)]

    def _reply_to(self, batch: Sequence[Request]) -> list[Row]:
        """Generate the replies to a batch of requests; return the row of each."""
        run = self.run
        asked_prompts = [self.asked_prompt(request) for request in batch]
        examples = [prompt.example for prompt in asked_prompts]
        prompts = {prompt.example.id: prompt.encoded for prompt in asked_prompts}
        with self.applied(batch) as prefix:
            replies = reply_to_batch(self.lm, run.task, examples, prompts, prefix)
        rows = []
        for request, prompt, reply in zip(batch, asked_prompts, replies, strict=True):
            row = make_row(run, request.example, prompt.encoded, reply)
            # A policy rewrote the prompt: keep what was asked.
            if prompt.example.prompt != request.example.prompt:
                row["rewritten_prompt"] = prompt.example.prompt
            rows.append(row)
        return rows


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
