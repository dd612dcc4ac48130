"""Effect of the method inside the model: attention of the last prompt token to every item, before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from posbench.files.atomic import Row, round_values, write_csv
from posbench.late import pd
from posbench.measure.items import attention_to_items
from posbench.measure.replies import BatchShape
from posbench.model.encode import Encoded
from posbench.pipeline.config import Config
from posbench.report.text import describe_cut_prompts
from posbench.run.base import Run
from posbench.run.batch_plan import BatchPlan
from posbench.run.plan import Prompts, Request, Subject, subjects
from posbench.stats.bootstrap import difference
from posbench.stats.findings import estimate_columns
from posbench.tasks import Example
from posbench.tasks.items import sort_by_gold_position

STAGE = "intervene"
FILE = "attention.jsonl"
COLUMNS = (
    "model",
    "method",
    "task",
    "gold_position",
    "layer",
    "item",
    "attention",
    "n",
    *estimate_columns("attention")[1:],
)
"""Columns of ``attention.csv``: attention is the mean weight per token of item ``item`` (0-based).

The 95 % interval is that of the gold item (item = gold_position), and empty for others.
"""


def run(config: Config, run: Run) -> None:
    """Measure the last token's attention to every item, without and with the method, and write ``attention.csv``."""
    examples = sort_by_gold_position(run.evaluation, run.runtime.intervene_examples)
    if not examples:
        run.console.print(
            f"intervene: task {run.task.name} has no gold positions, nothing to measure"
        )
        return
    encoded = run.prompts.encode(examples)
    cut_prompts = describe_cut_prompts(
        {"id": name, "dropped": prompt.dropped} for name, prompt in encoded.items()
    )
    if cut_prompts:
        run.console.print(f"intervene: {cut_prompts}")
    unmodified_key = run.share_unmodified(FILE, run.runtime.intervene_examples)
    plan = plan_attention(subjects([run]), encoded)
    rows = plan.complete(run, FILE, STAGE)
    run.out.mark(FILE, key=unmodified_key, done=True)
    write_csv(run.out.path / "attention.csv", _mean_attention(run, examples, rows))


def _mean_attention(
    run: Run, examples: Sequence[Example], rows: Sequence[Row]
) -> pd.DataFrame:
    """Return the table of ``attention.csv``: each layer's attention to each item, the mean over examples.

    Args:
        run: The run.
        examples: Examples by gold position.
        rows: A row for each method and example, with ``attention`` of shape (layers, items).

    Returns:
        A row for each method, gold position, layer and item.
    """
    frames = []
    questions: dict[int | None, list[str]] = {}
    for example in examples:
        questions.setdefault(example.gold_position, []).append(example.question_id)
    for name in dict.fromkeys(row["method"] for row in rows):
        attention = {
            row["id"]: np.array(row["attention"])
            for row in rows
            if row["method"] == name
        }
        for position in questions:
            # of shape (examples, layers, items)
            values = np.stack(
                [attention[e.id] for e in examples if e.gold_position == position]
            )
            mean = values.mean(0)
            layers, items = np.indices(mean.shape)
            low, high = np.full((2, *mean.shape), np.nan)
            for layer, weights in enumerate(values[:, :, position].T):
                interval = difference(weights, questions[position])
                low[layer, position] = max(interval.ci_low, 0.0)
                high[layer, position] = interval.ci_high
            columns = (
                run.model.name,
                name,
                run.task.name,
                position,
                layers.ravel(),
                items.ravel(),
                mean.ravel(),
                len(values),
                low.ravel(),
                high.ravel(),
            )
            frames.append(pd.DataFrame(dict(zip(COLUMNS, columns, strict=True))))
    return pd.concat(frames, ignore_index=True)


def fill(runs: Sequence[Run]) -> None:
    """Make the rows of runs that differ in their methods alone, in one pass over the prompts.

    Args:
        runs: The runs; the first one shows progress.
    """
    first = runs[0]
    examples = sort_by_gold_position(first.evaluation, first.runtime.intervene_examples)
    if examples:
        first.share_unmodified(FILE, first.runtime.intervene_examples)
        encoded = first.prompts.encode(examples)
        plan = plan_attention(subjects(runs), encoded)
        plan.fill(first, FILE, STAGE)


def plan_attention(
    subjects: Sequence[Subject], encoded: Mapping[str, Encoded]
) -> AttentionBatches:
    """Plan how to measure the attention to the items of prompts, for runs that differ only in their method.

    Args:
        subjects: The methods, each with its run.
        encoded: The prompts by the id of their example.
    """
    run = subjects[0].run
    examples = sort_by_gold_position(run.evaluation, run.runtime.intervene_examples)
    return AttentionBatches(subjects, examples, encoded)


class AttentionBatches(BatchPlan):
    """The attention to the items of prompts; each row has its example's, of shape (layers, items)."""

    def make_batches(
        self, examples: Sequence[Example], prompts: Prompts, shape: BatchShape
    ) -> list[list[Example]]:
        """Divide examples into batches of prompts of similar length.

        Args:
            examples: The examples.
            prompts: Their tokens by id.
            shape: Limits of a batch.
        """

        def length(example: Example) -> int:
            return len(prompts[example.id].ids)

        return self.run.prompts.batches_by_length(examples, length, shape.max_tokens)

    def answer(self, batch: Sequence[Request]) -> list[Row]:
        """Return the row of each request of a batch: ``attention`` of each layer to each item, [layers, items]."""
        asked_prompts = [self.asked_prompt(request) for request in batch]
        examples = [prompt.example for prompt in asked_prompts]
        prompts = [prompt.encoded for prompt in asked_prompts]
        with self.applied(batch) as prefix:
            attention = attention_to_items(self.lm, prompts, examples, prefix=prefix)
        return [{"attention": round_values(weights)} for weights in attention]
