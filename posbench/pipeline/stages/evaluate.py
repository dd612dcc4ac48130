"""Score the unmodified and the modified model on the same examples."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from posbench.errors import UserError
from posbench.files.atomic import Row, write_csv, write_text
from posbench.model.encode import Encoded
from posbench.pipeline.config import Config
from posbench.run.answers import STAGE, answers, planned
from posbench.run.base import Run
from posbench.run.folder import RunDir
from posbench.run.shared import subjects
from posbench.stats.frames import UNMODIFIED
from posbench.stats.scores import Tabulator
from posbench.tasks import Example, Task

FILE = "predictions.jsonl"
TABLES = ("metrics.csv", "subsets.csv")


def run(config: Config, run: Run) -> None:
    """Generate or choose, score, and write predictions.jsonl, metrics.csv, subsets.csv and prompts.json.

    The unmodified model's rows are copied from another run of the same version where one has them.
    """
    task = run.task
    unmodified = run.share_unmodified(FILE)
    encoded = run.encode(run.evaluation)
    facts = _prompts(run.evaluation, encoded) | {
        "questions": _questions(run.evaluation)
    }
    run.out.write_json("prompts.json", facts)
    found = answers(run, FILE, run.methods(), encoded)
    rows = list[Row]()
    run.out.mark(FILE, key=unmodified, done=True)
    for name, done in found.items():
        rows += done
        by_id = {row["id"]: str(row["output"]) for row in done}
        for file, text in task.submission(
            [(e, by_id[e.id]) for e in run.evaluation]
        ).items():
            path = run.out.path / "submission" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
            run.console.print(f"for the leaderboard: {path}", soft_wrap=True)
    if not write_metrics(task, run.model.name, run.runtime.resamples, run.out, rows):
        notes = ", ".join(dict.fromkeys(row["note"] for row in rows if "note" in row))
        why = (
            f"the model read none of them: {notes}"
            if notes
            else f"{task.name} publishes no answers for them"
        )
        run.console.print(f"evaluate: nothing is scored, {why}")


def fill(runs: Sequence[Run]) -> None:
    """Make the rows of runs that differ in their methods alone, in one pass over the prompts."""
    first = runs[0]
    first.share_unmodified(FILE)
    asks, compute = planned(subjects(runs), first.encode(first.evaluation))
    asks.fill(first, FILE, STAGE, compute, lambda ask: ask.subject.run.out)


def _prompts(
    examples: Sequence[Example], encoded: Mapping[str, Encoded]
) -> dict[str, Any]:
    """The first prompt of each subset as the model reads it, and a checksum over all prompts of the run."""
    total = hashlib.sha256()
    first: dict[str, dict[str, Any]] = {}
    for e in examples:
        code = encoded[e.id]
        total.update(f"{e.id}\0{code.text}\0".encode())
        if e.subset not in first:
            checksum = hashlib.sha256(code.text.encode()).hexdigest()
            size = len(code.ids) or None
            first[e.subset] = {
                "id": e.id,
                "tokens": size,
                "sha256": checksum,
                "text": code.text,
            }
    return {"sha256": total.hexdigest(), "prompts": len(examples), "first": first}


def _questions(examples: Sequence[Example]) -> str:
    """A checksum over what is asked, before any template: no model is needed to compare it."""
    total = hashlib.sha256()
    for e in examples:
        total.update(f"{e.id}\0{e.prompt}\0".encode())
    return total.hexdigest()


def write_metrics(
    task: Task, model: str, resamples: int, out: RunDir, rows: Sequence[Row]
) -> bool:
    """Tabulate scored rows into metrics.csv and subsets.csv; False, and no file, where no row has a score."""
    order = {
        name: i for i, name in enumerate(dict.fromkeys(row["method"] for row in rows))
    }
    ordered = sorted(rows, key=lambda r: (order[r["method"]], r["id"]))
    if not any(row["scores"] for row in ordered):
        return False
    seed = getattr(task, "seed", 0)
    tabulator = Tabulator(
        task=task, model=model, unmodified=UNMODIFIED, resamples=resamples, seed=seed
    )
    write_csv(out.path / "metrics.csv", tabulator.metrics(ordered))
    subsets = tabulator.subsets(ordered)
    if len(subsets):
        write_csv(out.path / "subsets.csv", subsets)
    return True


def rescore(task: Task, model: str, resamples: int, out: RunDir) -> int:
    """Score the saved outputs again, without a model; returns how many rows changed their score.

    Raises:
        UserError: The task no longer asks what the run asked.
    """
    examples = {e.id: e for e in task.evaluation()}
    rows: list[Row] = []
    changed = 0
    told = out.rows(FILE)
    strange = next((row["id"] for row in told if row["id"] not in examples), None)
    asked = _questions(list(examples.values()))
    if (
        strange is not None
        or out.read_json("prompts.json").get("questions", asked) != asked
    ):
        value = (
            f"{task.name}, {len(examples)} questions"
            if strange is None
            else f"no question {strange}"
        )
        hint = "bring back the data or the version of posbench of that run, or run it again"
        raise UserError(
            "task", value, f"the questions that {out.path.name} asked", hint
        )
    for row in told:
        if "error" not in row and not row.get("note"):
            scores = task.score(examples[row["id"]], row["output"])
            changed += scores != row["scores"]
            row = {**row, "scores": scores}
        rows.append(row)
    if changed:
        out.write_rows(FILE, rows)
    write_metrics(
        task, model, resamples, out, [row for row in rows if "error" not in row]
    )
    return changed
