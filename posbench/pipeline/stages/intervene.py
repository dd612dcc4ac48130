"""What the method does inside: attention of the last prompt token to every item, before and after."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posbench.files.atomic import Row, rounded, write_csv
from posbench.late import pd
from posbench.measure.items import attention_to_items
from posbench.methods import Method
from posbench.model.encode import Encoded
from posbench.pipeline.config import Config
from posbench.report.text import shortened
from posbench.run.base import Run
from posbench.stats.frames import UNMODIFIED
from posbench.tasks import Example
from posbench.tasks.items import placed

FILE = "attention.jsonl"
COLUMNS = ("model", "method", "task", "gold_position", "layer", "item", "attention", "n")
"""Columns of ``attention.csv``: attention is the mean weight per token of item ``item`` (0-based)."""


def run(config: Config, run: Run) -> None:
    """Measure the attention to every item and write ``attention.csv``."""
    examples = placed(run.evaluation, run.runtime.intervene_examples)
    if not examples:
        run.console.print(f"intervene: task {run.task.name} has no gold positions, nothing to measure")
        return
    encoded = run.encode(examples)
    cut = shortened({"id": name, "dropped": code.dropped} for name, code in encoded.items())
    if cut:
        run.console.print(f"intervene: {cut}")
    plan = run.batches(examples, lambda e: len(encoded[e.id].ids))
    unmodified = run.share_unmodified(FILE, run.runtime.intervene_examples)
    frames = []
    for name, method in run.methods().items():
        rows = _measured(run, name, method, plan, encoded)
        if name == UNMODIFIED:
            run.out.mark(FILE, key=unmodified, done=True)
        found = {row["id"]: np.array(row["attention"]) for row in rows}
        for position in dict.fromkeys(e.gold_position for e in examples):
            values = np.stack([found[e.id] for e in examples if e.gold_position == position])
            mean = values.mean(0)
            layer, item = (index.ravel() for index in np.indices(mean.shape))
            columns = run.model.name, name, run.task.name, position, layer, item, mean.ravel(), len(values)
            frames.append(pd.DataFrame(dict(zip(COLUMNS, columns, strict=True))))
    write_csv(run.out.path / "attention.csv", pd.concat(frames, ignore_index=True))


def _measured(
    run: Run, name: str, method: Method, plan: Sequence[Sequence[Example]], encoded: dict[str, Encoded]
) -> list[Row]:
    """A row with the attention [L, N] of each example."""
    with method.applied(run.lm) as lm:

        def compute(batch: Sequence[Example]) -> list[Row]:
            found = attention_to_items(lm, [encoded[e.id] for e in batch], batch)
            return [{"attention": rounded(weights)} for weights in found]

        return run.complete(FILE, f"intervene {name}", plan, lambda e: {"method": name, "id": e.id}, compute)
