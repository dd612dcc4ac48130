"""What the method does inside: attention of the last prompt token to every item, before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from posbench.files.atomic import Row, rounded, write_csv
from posbench.late import pd
from posbench.measure.items import attention_to_items
from posbench.model.encode import Encoded
from posbench.pipeline.config import Config
from posbench.report.text import shortened
from posbench.run.base import Run
from posbench.run.shared import Ask, Asks, Compute, Subject, subjects
from posbench.tasks.items import placed

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
)
"""Columns of ``attention.csv``: attention is the mean weight per token of item ``item`` (0-based)."""


def run(config: Config, run: Run) -> None:
    """Measure the attention to every item and write ``attention.csv``."""
    examples = placed(run.evaluation, run.runtime.intervene_examples)
    if not examples:
        run.console.print(
            f"intervene: task {run.task.name} has no gold positions, nothing to measure"
        )
        return
    encoded = run.encode(examples)
    frames = []
    cut = shortened(
        {"id": name, "dropped": code.dropped} for name, code in encoded.items()
    )
    if cut:
        run.console.print(f"intervene: {cut}")
    unmodified = run.share_unmodified(FILE, run.runtime.intervene_examples)
    asks, compute = planned(subjects([run]), encoded)
    rows = asks.complete(run, FILE, "intervene", compute)
    run.out.mark(FILE, key=unmodified, done=True)
    for name in dict.fromkeys(row["method"] for row in rows):
        found = {
            row["id"]: np.array(row["attention"])
            for row in rows
            if row["method"] == name
        }
        for position in dict.fromkeys(e.gold_position for e in examples):
            values = np.stack(
                [found[e.id] for e in examples if e.gold_position == position]
            )
            mean = values.mean(0)
            layer, item = (index.ravel() for index in np.indices(mean.shape))
            columns = (
                run.model.name,
                name,
                run.task.name,
                position,
                layer,
                item,
                mean.ravel(),
                len(values),
            )
            frames.append(pd.DataFrame(dict(zip(COLUMNS, columns, strict=True))))
    write_csv(run.out.path / "attention.csv", pd.concat(frames, ignore_index=True))


def fill(runs: Sequence[Run]) -> None:
    """Make the rows of runs that differ in their methods alone, in one pass over the prompts."""
    first = runs[0]
    examples = placed(first.evaluation, first.runtime.intervene_examples)
    if examples:
        first.share_unmodified(FILE, first.runtime.intervene_examples)
        asks, compute = planned(subjects(runs), first.encode(examples))
        asks.fill(first, FILE, "intervene", compute, lambda ask: ask.subject.run.out)


def planned(
    subjects: Sequence[Subject], encoded: Mapping[str, Encoded]
) -> tuple[Asks, Compute]:
    """What to run, of runs that differ in their methods alone, and what makes the rows of a batch: the
    attention [L, N] of each example."""
    run = subjects[0].run

    def compute(batch: Sequence[Ask]) -> list[Row]:
        given = [each.example for each in batch]
        with asks.under(batch) as prefix:
            found = attention_to_items(
                run.lm, [encoded[e.id] for e in given], given, prefix=prefix
            )
        return [{"attention": rounded(weights)} for weights in found]

    length = lambda e: len(encoded[e.id].ids)  # noqa: E731
    examples = placed(run.evaluation, run.runtime.intervene_examples)
    asks = Asks.of(
        subjects, examples, encoded, lambda part, most: run.batches(part, length, most)
    )
    return asks, compute
