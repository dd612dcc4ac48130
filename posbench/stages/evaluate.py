"""Score the unmodified and the modified model on the same examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posbench import metrics
from posbench.config import Config
from posbench.lm import batches
from posbench.record import Row, RunDir, write_csv
from posbench.stages.base import UNMODIFIED, Run, complete, share_unmodified
from posbench.tasks import Example

FILE = "predictions.jsonl"


def run(run: Run) -> None:
    """Generate, score, and write ``predictions.jsonl`` and ``metrics.csv``.

    The unmodified model's rows are copied from another run of the same version where one has them.
    """
    task, runtime = run.config.task, run.config.runtime
    unmodified = share_unmodified(run, FILE)
    examples = run.evaluation
    encoded = {e.id: run.lm.encode(e.prompt, truncation=task.truncation, reserve=task.max_new_tokens) for e in examples}
    plan = batches([len(encoded[e.id].ids) for e in examples], runtime.batch_size)
    rows: list[Row] = []
    for name, method in run.methods().items():
        with method.applied(run.lm) as lm:

            def compute(batch: Sequence[Example]) -> list[Row]:
                tokens = [encoded[e.id].ids for e in batch]
                texts = lm.generate(tokens, max_new_tokens=task.max_new_tokens, batch_size=len(tokens))
                return [
                    {
                        "gold_position": e.gold_position,
                        "cluster": e.cluster,
                        "output": text,
                        "scores": task.score(e, text),
                        "tokens": len(encoded[e.id].ids),
                        "dropped": encoded[e.id].dropped,
                    }
                    for e, text in zip(batch, texts, strict=True)
                ]

            rows += complete(
                run, FILE, f"evaluate {name}", [[examples[i] for i in group] for group in plan],
                lambda e: {"method": name, "id": e.id}, compute,  # noqa: B023
            )  # fmt: skip
        if name == UNMODIFIED:
            run.out.mark(FILE, key=unmodified, done=True)
    write_metrics(run.config, run.out, rows)


def write_metrics(config: Config, out: RunDir, rows: Sequence[Row]) -> None:
    """Tabulate scored rows into ``metrics.csv``."""
    order = {name: i for i, name in enumerate(dict.fromkeys(row["method"] for row in rows))}
    ordered = sorted(rows, key=lambda r: (order[r["method"]], r["id"]))
    frame = metrics.tidy(
        ordered,
        model=config.model.name,
        task=config.task.name,
        metric=config.task.metric,
        unmodified=UNMODIFIED,
        items=getattr(config.task, "pairs", None),
        resamples=config.runtime.resamples,
        seed=getattr(config.task, "seed", 0),
    )
    write_csv(out.path / "metrics.csv", frame)


def rescore(config: Config, out: RunDir) -> int:
    """Score the saved outputs again, without a model; returns how many rows changed their score."""
    examples = {e.id: e for e in config.task.evaluation()}
    rows: list[dict[str, Any]] = []
    changed = 0
    for row in out.rows(FILE):
        if "error" not in row and row["id"] in examples:
            scores = config.task.score(examples[row["id"]], row["output"])
            changed += scores != row["scores"]
            rows.append({**row, "scores": scores})
    write_metrics(config, out, rows)
    return changed
