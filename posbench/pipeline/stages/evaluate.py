"""Score the unmodified and the modified model on the same examples."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from posbench.files.atomic import Row, write_csv, write_text
from posbench.methods import Method
from posbench.model.lm import LM, Encoded, batches
from posbench.pipeline.config import Config, Runtime
from posbench.run.base import UNMODIFIED, Run, complete, encode, share_unmodified
from posbench.run.folder import RunDir
from posbench.stats import tables as metrics
from posbench.tasks import Example, Task

FILE = "predictions.jsonl"


def run(run: Run) -> None:
    """Generate or choose, score, and write ``predictions.jsonl``, ``metrics.csv``, ``subsets.csv`` and
    ``prompts.json``.

    The unmodified model's rows are copied from another run of the same version where one has them.
    """
    task = run.config.task
    unmodified = share_unmodified(run, FILE)
    examples = run.evaluation
    encoded = {e.id: encode(run.lm, task, e) for e in examples}
    run.out.write_json("prompts.json", _prompts(examples, encoded))
    rows: list[Row] = []
    submissions: dict[str, str] = {}
    for name, method in run.methods().items():
        done = answers(run, FILE, name, method, encoded)
        if name == UNMODIFIED:
            run.out.mark(FILE, key=unmodified, done=True)
        rows += done
        by_id = {row["id"]: str(row["output"]) for row in done}
        for file, text in task.submission([(e, by_id[e.id]) for e in examples]).items():
            submissions[f"{name}/{file}"] = text
    for file, text in submissions.items():
        (run.out.path / "submission" / file).parent.mkdir(parents=True, exist_ok=True)
        write_text(run.out.path / "submission" / file, text)
        run.console.print(f"for the leaderboard: {run.out.path / 'submission' / file}", soft_wrap=True)
    if not write_metrics(run.config, run.out, rows):
        run.console.print(
            f"evaluate: {task.name} publishes no answers for these examples, so nothing is scored"
        )


def answers(run: Run, file: str, name: str, method: Method, encoded: Mapping[str, Encoded]) -> list[Row]:
    """Scored replies to all evaluation examples under a method; resumed from a JSON-lines file.

    Args:
        run: The run.
        file: JSON-lines file in the run folder.
        name: What its rows call the method.
        method: The method.
        encoded: The prompts by id.
    """
    task, examples = run.config.task, run.evaluation
    choices = {
        e.id: [run.lm.continuation_ids(encoded[e.id], c) for c in e.choices] for e in examples if e.choices
    }
    with method.applied(run.lm) as lm:

        def compute(batch: Sequence[Example]) -> list[Row]:
            return [
                {
                    "subset": e.subset,
                    "gold_position": e.gold_position,
                    "cluster": e.cluster,
                    **reply,
                    "scores": task.score(e, str(reply["output"])),
                    "tokens": len(encoded[e.id].ids),
                    "dropped": encoded[e.id].dropped,
                }
                for e, reply in zip(batch, replies(lm, task, batch, encoded, choices), strict=True)
            ]

        order = plan(task, examples, encoded, run.config.runtime)
        return complete(
            run,
            file,
            f"evaluate {name}",
            [[examples[i] for i in group] for group in order],
            lambda e: {"method": name, "id": e.id},
            compute,
        )


def plan(
    task: Task, examples: Sequence[Example], encoded: Mapping[str, Encoded], runtime: Runtime
) -> list[list[int]]:
    """Batches of examples that are decoded alike, the largest first."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for number, e in enumerate(examples):
        alike.setdefault(
            (bool(e.choices), e.max_new_tokens or task.max_new_tokens, e.min_new_tokens, e.stop), []
        ).append(number)
    out = []
    for (chosen, new, *_), members in alike.items():
        lengths = [len(encoded[examples[i].id].ids) + (0 if chosen else new) for i in members]
        out += [
            [members[i] for i in group]
            for group in batches(lengths, runtime.batch_size, runtime.batch_tokens)
        ]
    return sorted(out, key=lambda group: -len(encoded[examples[group[0]].id].ids))


def replies(
    lm: LM,
    task: Task,
    batch: Sequence[Example],
    encoded: Mapping[str, Encoded],
    choices: Mapping[str, Sequence[Sequence[int]]],
) -> list[Row]:
    """Output of each example of a batch; where it is chosen, with the log-likelihoods (nats) of the
    choices."""
    tokens, first = [encoded[e.id].ids for e in batch], batch[0]
    if first.choices:
        found = lm.continuations(tokens, [choices[e.id] for e in batch], batch_size=len(batch))
        nats = [[total for total, _ in row] for row in found]
        best = [e.choices[row.index(max(row))].strip() for e, row in zip(batch, nats, strict=True)]
        return [{"output": text, "loglikelihoods": row} for text, row in zip(best, nats, strict=True)]
    texts = lm.generate(
        tokens,
        max_new_tokens=first.max_new_tokens or task.max_new_tokens,
        min_new_tokens=first.min_new_tokens,
        stop=first.stop,
        repetition_penalty=task.repetition_penalty,
        batch_size=len(batch),
    )
    return [{"output": text} for text in texts]


def _prompts(examples: Sequence[Example], encoded: Mapping[str, Encoded]) -> dict[str, Any]:
    """The first prompt of each subset as the model reads it, and a checksum over all prompts of the run."""
    total = hashlib.sha256()
    first: dict[str, dict[str, Any]] = {}
    for e in examples:
        code = encoded[e.id]
        total.update(f"{e.id}\0{code.text}\0".encode())
        if e.subset not in first:
            checksum = hashlib.sha256(code.text.encode()).hexdigest()
            first[e.subset] = {"id": e.id, "tokens": len(code.ids), "sha256": checksum, "text": code.text}
    return {"sha256": total.hexdigest(), "prompts": len(examples), "first": first}


def write_metrics(config: Config, out: RunDir, rows: Sequence[Row]) -> bool:
    """Tabulate scored rows into ``metrics.csv`` and ``subsets.csv``; False, and no file, where no row has a
    score."""
    order = {name: i for i, name in enumerate(dict.fromkeys(row["method"] for row in rows))}
    ordered = sorted(rows, key=lambda r: (order[r["method"]], r["id"]))
    if not any(row["scores"] for row in ordered):
        return False
    settings: dict[str, Any] = {
        "model": config.model.name,
        "unmodified": UNMODIFIED,
        "resamples": config.runtime.resamples,
        "seed": getattr(config.task, "seed", 0),
    }
    write_csv(out.path / "metrics.csv", metrics.tidy(ordered, config.task, **settings))
    subsets = metrics.by_subset(ordered, config.task, **settings)
    if len(subsets):
        write_csv(out.path / "subsets.csv", subsets)
    return True


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
