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
from posbench.run.batch_plan import BatchPlan
from posbench.run.folder import EVALUATE_STAGE
from posbench.run.plan import Plan, Prompts, Request, Subject
from posbench.run.reply_rows import make_row
from posbench.run.stop import StopRules
from posbench.stats.outcomes import is_scorable
from posbench.tasks import Example


def scored_replies(
    run: Run,
    file: str,
    methods: Mapping[str, Method],
    encoded: Mapping[str, Encoded],
    rules: StopRules | None = None,
    examples: Sequence[Example] | None = None,
    round_questions: int | None = None,
) -> dict[str, list[Row]]:
    """Return scored replies to evaluation examples under each method.

    Args:
        run: The run; rows that its folder has already are not computed again.
        file: Name of the JSON-lines file in its folder.
        methods: The methods by name.
        encoded: The prompts by the id of their example.
        rules: Rules that may end the run early.
        examples: The examples; None: all of the run.
        round_questions: Questions of a round; None: the runtime's.

    Returns:
        The rows of each method, by its name.
    """
    subjects = [Subject(run, name, method) for name, method in methods.items()]
    plan = plan_replies(subjects, encoded, examples, round_questions)
    rows = plan.complete(run, file, EVALUATE_STAGE, rules)
    return {name: [row for row in rows if row["method"] == name] for name in methods}


def plan_replies(
    subjects: Sequence[Subject],
    encoded: Mapping[str, Encoded],
    examples: Sequence[Example] | None = None,
    round_questions: int | None = None,
) -> Plan:
    """Plan the replies to the evaluation examples, of runs that differ in their methods alone.

    Args:
        subjects: The methods, each with its run.
        encoded: The prompts by the id of their example.
        examples: The examples; None: all of the run.
        round_questions: Questions of a round; None: the runtime's.
    """
    run = subjects[0].run
    asked = run.evaluation if examples is None else examples
    if run.model.in_process:
        return ReplyBatches(subjects, asked, encoded, round_questions)
    from posbench.run.served_plan import ServedPlan

    return ServedPlan(subjects, asked, encoded, round_questions)


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
            texts = reply_to_batch(self.lm, run.task, examples, prompts, prefix)
        return [
            make_row(run, prompt.example, prompt.encoded, reply)
            for prompt, reply in zip(asked_prompts, texts, strict=True)
        ]


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
