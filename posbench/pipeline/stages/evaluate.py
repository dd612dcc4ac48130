"""Score the unmodified and the modified model on the same examples."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from posbench.errors import UserError
from posbench.files.atomic import Row, csv_text, write_csv, write_text
from posbench.late import pd
from posbench.measure.replies import template_sources
from posbench.model.encode import Encoded
from posbench.pipeline.config import Config
from posbench.report.folder import read_csv
from posbench.run.base import Run
from posbench.run.folder import (
    EVALUATE_STAGE,
    FOUND_FILE,
    PREDICTIONS,
    RESCORED,
    RunDir,
    json_text,
    was_rescored,
)
from posbench.run.plan import subjects
from posbench.run.replies import plan_replies, scored_replies
from posbench.run.reply_rows import prompt_columns, prompt_digest, rescored_row
from posbench.run.stop import StopRules
from posbench.search.base import note_verdict
from posbench.stats.frames import UNMODIFIED
from posbench.stats.outcomes import is_scorable
from posbench.stats.position_bias import CurveIntervals
from posbench.stats.scores import Tabulator
from posbench.stats.verdict import run_verdict
from posbench.tasks import Example, Task

if TYPE_CHECKING:
    from posbench.run.sequential import ShapeRule

PROMPTS_FILE = "prompts.json"
METRICS_FILE = "metrics.csv"
FILE = PREDICTIONS
"""The rows of this stage; each stage with rows calls their file so."""
SUBSETS_FILE = "subsets.csv"
SCORE_TABLES = (METRICS_FILE, SUBSETS_FILE)
RESCORED_FILES = (*SCORE_TABLES, PREDICTIONS, FOUND_FILE)
"""Files that :func:`rescore` writes."""
SUBMISSION = "submission"
"""Folder of the files for a benchmark's leaderboard, by method."""


def run(config: Config, run: Run) -> None:
    """Ask the evaluation prompts, score the replies, and write predictions.jsonl and the tables made from it.

    The unmodified model's rows are copied from another run of the same version where one has them.
    """
    task = run.task
    _undo_rescore(run)
    unmodified_key = run.share_unmodified(PREDICTIONS)
    encoded = run.prompts.encode(run.evaluation)
    run.out.write_json(PROMPTS_FILE, _prompt_facts(run, encoded))
    methods = run.methods()
    # With runtime.until, the stage stops once the shape of the curve is certain.
    shape_rule = None
    if run.runtime.until:
        shape_rule = _shape_rule(task, next(iter(methods)), run.evaluation)
    rules = StopRules(shape_rule, run.deadline, run.spending)
    rows_by_method = scored_replies(run, PREDICTIONS, methods, encoded, rules)
    all_rows = [row for rows in rows_by_method.values() for row in rows]
    facts = _facts_of_stop(config, rules, shape_rule)
    facts |= prompt_columns(all_rows, run.encoder.context_window)
    run.out.mark(EVALUATE_STAGE, **facts)
    run.out.mark(PREDICTIONS, key=unmodified_key, done=rules.stop is None)
    for name, rows in rows_by_method.items():
        _write_submission(run, name, rows)
    resamples = run.runtime.resamples
    anytime = shape_rule.intervals(all_rows) if shape_rule else {}
    if not write_metrics(task, run.model.name, resamples, run.out, all_rows, anytime):
        reason = f"{task.name} publishes no answers for them"
        run.console.print(f"evaluate: nothing is scored, {reason}")


def _facts_of_stop(
    config: Config, rules: StopRules, shape_rule: ShapeRule | None
) -> dict[str, Any]:
    """Return the entry of ``status.json`` on where and why the stage stopped early.

    ``stopped`` holds the numbers of questions asked and planned, None for a stage that asked them all.
    """
    stop = rules.stop
    budget = None
    if config.budget and stop:
        unit, size = config.budget.amount
        budget = {unit: size}
    return {
        "stopped": (stop.asked, stop.planned) if stop else None,
        "decided": stop is not None and stop.rule is shape_rule,
        "budget": budget,
        "until": config.runtime.until,
    }


def _shape_rule(task: Task, method: str, examples: Sequence[Example]) -> ShapeRule:
    """The rule that ends a run once the shape of its scores under a method is decided."""
    from posbench.run.sequential import ShapeRule  # few runs have it

    return ShapeRule(task.metric, method, examples, task.chance or 0.0)


def _write_submission(run: Run, method: str, rows: Sequence[Row]) -> None:
    """Write the replies under a method as the benchmark's leaderboard takes them, where it has one."""
    for name, text in _submission(run, rows).items():
        path = run.out.path / SUBMISSION / method / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
        run.console.print(f"for the leaderboard: {path}")


def _submission(run: Run, rows: Sequence[Row]) -> dict[str, str]:
    """Texts of the files for the benchmark's leaderboard, by name; none where it has none."""
    outputs = {row["id"]: str(row["output"]) for row in rows}
    # A run that stopped at its budget left some unanswered.
    replies = [(e, outputs[e.id]) for e in run.evaluation if e.id in outputs]
    return dict(run.task.submission(replies))


def files_of_rows(
    run: Run, encoded: Mapping[str, Encoded], rows: Sequence[Row]
) -> dict[str, str]:
    """Make the files of this stage again from its rows, which are not changed.

    Args:
        run: The finished run.
        encoded: The prompts by the id of their example.
        rows: Rows of all methods, without failed ones.

    Returns:
        Their texts by name, as the stage wrote them; a file that it did not write is left out.
    """
    files = {PROMPTS_FILE: json_text(_prompt_facts(run, encoded))}
    tabulator = _tabulator(run.task, run.model.name, run.runtime.resamples, run.out)
    methods = list(run.method.methods())
    anytime = {}
    if run.runtime.until:
        anytime = _shape_rule(run.task, methods[0], run.evaluation).intervals(rows)
    tables = _score_tables(tabulator, rows, anytime)
    files |= {name: csv_text(table) for name, table in tables.items() if len(table)}
    for method in methods:
        replies = [row for row in rows if row["method"] == method]
        for name, text in _submission(run, replies).items():
            files[f"{SUBMISSION}/{method}/{name}"] = text
    return files


def fill(runs: Sequence[Run]) -> None:
    """Make the rows of runs that differ in their methods alone, in one pass over the prompts."""
    first = runs[0]
    first.share_unmodified(PREDICTIONS)
    encoded = first.prompts.encode(first.evaluation)
    plan = plan_replies(subjects(runs), encoded)
    plan.fill(first, PREDICTIONS, EVALUATE_STAGE)


def _prompt_facts(run: Run, encoded: Mapping[str, Encoded]) -> dict[str, Any]:
    """Return the content of prompts.json: the first prompt of each subset as the model reads it, and checksums.

    Args:
        run: The run.
        encoded: Its prompts as tokens, by the example's id.

    Returns:
        ``first`` (by subset), ``sha256`` over all prompts, ``questions`` (checksum of the questions), the number of
        ``prompts``, what the chat template reads besides, and the task's notes on its data.
    """
    examples = run.evaluation
    total = hashlib.sha256()
    first_of_subset: dict[str, dict[str, Any]] = {}
    for example in examples:
        prompt = encoded[example.id]
        total.update(f"{example.id}\0{prompt.text}\0".encode())
        if example.subset not in first_of_subset:
            first_of_subset[example.subset] = {
                "id": example.id,
                "tokens": len(prompt.ids) or None,
                "sha256": hashlib.sha256(prompt.text.encode()).hexdigest(),
                "text": prompt.text,
            }
    facts = {
        "sha256": total.hexdigest(),
        "prompts": len(examples),
        "first": first_of_subset,
        "questions": _questions_checksum(examples),
    }
    if run.encoder.tokenizer:
        sources = template_sources(run.encoder, examples)
        if sources:
            facts["template_reads"] = sources
    notes = run.task.notes()
    if notes:
        facts["notes"] = notes
    return facts


def _questions_checksum(examples: Sequence[Example]) -> str:
    """A checksum over the questions before any template: comparing it needs no model."""
    total = hashlib.sha256()
    for example in examples:
        total.update(f"{example.id}\0{example.prompt}\0".encode())
    return total.hexdigest()


def write_metrics(
    task: Task,
    model: str,
    resamples: int,
    out: RunDir,
    rows: Sequence[Row],
    anytime: Mapping[str, CurveIntervals] | None = None,
) -> bool:
    """Tabulate scored rows into metrics.csv and subsets.csv.

    Args:
        task: The task.
        model: The model's name.
        resamples: Bootstrap draws behind an interval.
        out: The run folder.
        rows: Rows of all methods.
        anytime: See :func:`posbench.stats.position_bias.statistic_rows`.

    Returns:
        Whether any row has a score, or would have one if it had been answered; else no file is written.
    """
    tables = _score_tables(_tabulator(task, model, resamples, out), rows, anytime)
    if not tables:
        return False
    write_csv(out.path / METRICS_FILE, tables[METRICS_FILE])
    # From the written file, like the page and the card.
    note_verdict(out, run_verdict(read_csv(out.path / METRICS_FILE)))
    if len(tables[SUBSETS_FILE]):
        write_csv(out.path / SUBSETS_FILE, tables[SUBSETS_FILE])
    return True


def _tabulator(task: Task, model: str, resamples: int, out: RunDir) -> Tabulator:
    """Return what computes the tables of a run's rows.

    Args:
        task: The task.
        model: The model's name.
        resamples: Bootstrap draws behind an interval.
        out: The run folder.
    """
    served = out.config().get("model") or {}
    return Tabulator(
        task=task,
        model=model,
        unmodified=UNMODIFIED,
        resamples=resamples,
        seed=getattr(task, "seed", 0),
        thinking_tokens=served.get("thinking_tokens"),
        window=out.stage(EVALUATE_STAGE).get("window"),
    )


def _score_tables(
    tabulator: Tabulator,
    rows: Sequence[Row],
    anytime: Mapping[str, CurveIntervals] | None,
) -> dict[str, pd.DataFrame]:
    """Return metrics and subset tables of rows of all methods, by file name; empty if no row can have a score.

    Args:
        tabulator: Computes the tables.
        rows: Rows of ``predictions.jsonl``.
        anytime: Intervals by method for a run that stops when the shape of its curve is certain.
    """
    # Rows are in the order in which they were made; the tables must not depend on it.
    methods = list(dict.fromkeys(row["method"] for row in rows))
    ordered = sorted(rows, key=lambda row: (methods.index(row["method"]), row["id"]))
    if not any(map(is_scorable, ordered)):
        return {}
    return {
        METRICS_FILE: tabulator.metrics(ordered, anytime),
        SUBSETS_FILE: tabulator.subsets(ordered),
    }


def _undo_rescore(run: Run) -> None:
    """Score the replies again with this version's code if ``posbench rescore`` scored them with other code."""
    if not was_rescored(run.out):
        return
    num_changed = rescore(run.task, run.model.name, run.runtime.resamples, run.out)
    run.out.mark(PREDICTIONS, **{RESCORED: False})
    run.console.print(
        f"evaluate: {num_changed} scores of posbench rescore made again with the code of this version",
    )


def rescore(task: Task, model: str, resamples: int, out: RunDir) -> int:
    """Score the saved outputs again, without a model.

    Where scores change, the run is marked first: their code may differ from its version's, so that no other run
    copies them, and a repeated command makes them again. A finished run is unfinished until it is sealed again.

    Args:
        task: The task.
        model: The model's name.
        resamples: Bootstrap draws behind an interval.
        out: The run folder.

    Returns:
        Number of rows whose score changed.

    Raises:
        UserError: The task no longer has the run's questions, or gives no score any more.
    """
    examples = {example.id: example for example in task.evaluation()}
    saved_rows = out.rows(PREDICTIONS)
    _need_same_questions(task, examples, saved_rows, out)
    rows: list[Row] = []
    num_changed = 0
    for row in saved_rows:
        if "error" not in row:
            rescored = rescored_row(task, examples[row["id"]], row)
            num_changed += rescored != row
            row = rescored
        rows.append(row)
    valid_rows = [row for row in rows if "error" not in row]
    if not any(map(is_scorable, valid_rows)):
        allowed = "a task that scores the replies of the run"
        raise UserError("task", task.name, allowed, "give its score() a value again")
    out.begin_rescore()
    if num_changed:
        # Without a key no other run copies these rows.
        out.mark(PREDICTIONS, key=None, **{RESCORED: True})
        out.write_rows(PREDICTIONS, rows)
    anytime = {}
    if out.stage(EVALUATE_STAGE).get("until"):
        # The rule looked at the first method, whose rows come first.
        rule = _shape_rule(task, rows[0]["method"], list(examples.values()))
        anytime = rule.intervals(valid_rows)
    write_metrics(task, model, resamples, out, valid_rows, anytime)
    return num_changed


def _asks(examples: Mapping[str, Example], row: Row) -> bool:
    """Whether a row and its example have the same prompt; rows of old runs are compared by id alone."""
    example = examples.get(row["id"])
    if example is None:
        return False
    digest = prompt_digest(example)
    return bool(row.get("prompt", digest) == digest)


def _need_same_questions(
    task: Task, examples: Mapping[str, Example], rows: Sequence[Row], out: RunDir
) -> None:
    """Refuse to score a run's replies by a task that asks other questions.

    Args:
        task: The task.
        examples: Its examples by id.
        rows: The run's rows.
        out: The run's folder.

    Raises:
        UserError: A row's question is not in the task, or the questions' checksum differs.
    """
    unknown_ids = [row["id"] for row in rows if not _asks(examples, row)]
    checksum = _questions_checksum(list(examples.values()))
    same = out.read_json(PROMPTS_FILE).get("questions", checksum) == checksum
    if same and not unknown_ids:
        return
    value = f"{task.name}, {len(examples)} questions"
    if unknown_ids:
        value = f"no question {unknown_ids[0]}"
    allowed = f"the questions that {out.path.name} asked"
    hint = "restore the data and the version of posbench of that run, or run it again"
    raise UserError("task", value, allowed, hint)
