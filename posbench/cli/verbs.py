"""``posbench ls``, ``fetch``, ``validate``, ``report``, ``rescore`` and ``show``."""

from __future__ import annotations

import itertools
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from posbench import paths
from posbench.cli.options import option
from posbench.cli.runs import ls_runs, outputs_of
from posbench.errors import UserError, choices, complain, near
from posbench.files import sources
from posbench.model.families import FAMILIES
from posbench.pipeline import estimate
from posbench.pipeline.arguments import GROUPS, PLURALS
from posbench.pipeline.compose import Composed, compose
from posbench.pipeline.config import check, needs
from posbench.pipeline.identity import need_same_data
from posbench.pipeline.ready import Ready, ready
from posbench.pipeline.stages import evaluate
from posbench.report import sweep
from posbench.report.console import terminal
from posbench.report.failures import Examples, few
from posbench.report.folder import runs_of
from posbench.report.gallery import write_gallery
from posbench.report.index import run_named
from posbench.report.page import render_run
from posbench.run.folder import CONFIG, DRAWN, PROVENANCE, RunDir, checked, is_run, open_run, owned, runs_in
from posbench.run.runtime import Runtime
from posbench.schema import build, target
from posbench.tasks import Task
from posbench.tasks.base import recorded

TASK_COLUMNS = ("version", "metric", "size", "source", "licence")
KINDS = {plural: group for group, plural in PLURALS.items()}


def ls(args: list[str]) -> int:
    """List the choices of each group, the experiments and the families; ``ls runs`` lists runs."""
    if args[:1] == ["runs"]:
        return ls_runs(args[1:])
    kinds, (own, args) = [*KINDS, "experiments", "families"], option(args, "--config-dir")
    if len(args) > 1 or (args and args[0] not in kinds):
        raise UserError("ls", " ".join(args), ", ".join([*kinds, "runs"]), "posbench ls models")
    for kind in args or kinds:
        if kind == "families":
            facts = [[f.name, ", ".join(f.model_types), f.position] for f in FAMILIES]
            _table(kind, ("name", "model_type", "positions"), facts)
            continue
        folders = [root / KINDS.get(kind, "experiment") for root in paths.config_folders(own)]
        folders[0] = folders[0] if kind in KINDS else paths.EXPERIMENTS
        columns = TASK_COLUMNS if kind == "tasks" else ("what",)
        rows = []
        for name in choices(*folders):
            file = next(f / f"{name}.yaml" for f in folders if (f / f"{name}.yaml").is_file())
            rows.append([name, *(_task_facts(file) if kind == "tasks" else [_about(file)])])
        _table(kind, ("name", *columns), rows)
    return 0


def _table(title: str, columns: tuple[str, ...], rows: list[list[str]]) -> None:
    # Who reads a pipe wants a line for each choice, whole.
    console = terminal(width=None if sys.stdout.isatty() else 10_000)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column in ("name", "metric"), overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _task_facts(file: Path) -> list[str]:
    """What a task's class says of itself."""
    cls, _ = target(yaml.safe_load(file.read_text()) or {}, Task, "task")  # type: ignore[type-abstract]
    return [str(getattr(cls, column)) for column in TASK_COLUMNS]


def _about(file: Path) -> str:
    """The title of an experiment; else the first comment of a YAML, or its path."""
    text = file.read_text()
    lines = list(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()))
    comment = " ".join(line.lstrip("# ") for line in lines).replace("et al. ", "et al.\0")
    data = yaml.safe_load(text) or {}
    title = (data.get("experiment") or {}).get("title")
    return str(title or comment.split(". ")[0].replace("\0", " ").rstrip(".") or data.get("path") or "")


def fetch(args: list[str]) -> int:
    """List and download all that configs need."""
    needed: list[sources.Source] = []
    problems: list[UserError] = []

    def collect(composed: Composed) -> None:
        # A sweep's jobs share most of what they need; what one lacks must not hide what the others do.
        try:
            needed.extend(needs(composed.raw))
        except UserError as error:
            problems.append(error)

    compose([a for a in args if a != "--dry-run"], collect)
    if problems:
        raise problems[0]
    if needed:
        sources.fetch(needed, dry_run="--dry-run" in args, console=terminal())
    return 0


def validate(args: list[str]) -> int:
    """Check configs and what they read, and tell what a run takes; without arguments, every choice and every
    experiment.

    posbench validate [OVERRIDES] [--measure]

    Prints the defaults that change to fit the model's window, prompts and tokens of each stage, and memory;
    ``--measure`` loads the model and times a few batches. Status 2 where weights or data are not on this
    machine, with what to fetch.
    """
    measure, args = "--measure" in args, [arg for arg in args if arg != "--measure"]
    jobs = [args] if args or measure else _every()
    status = 0
    for job in jobs:
        problems: list[UserError] = []
        made: list[Ready] = []

        def look(composed: Composed, made: list[Ready] = made, problems: list[UserError] = problems) -> None:
            try:
                if args or measure:
                    made.append(ready(composed, download=False))
                else:
                    check(composed.raw, composed.typed, composed.folders)
            except UserError as error:
                problems.append(error)

        try:
            compose(job, look)
        except UserError as error:
            problems.append(error)
        print(f"{'ok  ' if not problems else 'BAD '} {shlex.join(job)}")
        for problem in problems:
            complain(problem)
            status = 2
        for one in made:
            for line in one.said:
                print(line)
            if one.reader:
                estimate.show(one.config, one.reader, measure, terminal())
    return status


def _every() -> list[list[str]]:
    """A job for every choice; with what it cannot do without."""
    jobs = [[f"{group}={name}"] for group in GROUPS for name in choices(paths.CONF / group)]
    jobs.remove(["task=own_data"])  # nothing without a file
    jobs += [[f"experiment={name}"] for name in choices(paths.EXPERIMENTS)]
    for job in jobs:
        job += ["model.path=posbench://tiny"] if job == ["model=hf"] else []
        # A model without published constants is a model to search on.
        job += ["stages=[search]"] if job[0].startswith("model=") else []
        # The settings of a search can be checked without the method that it serves.
        job += ["stages=[evaluate]"] if job[0].startswith("search=") else []
    return jobs


def _folder(verb: str, args: list[str]) -> Path:
    """The folder that the arguments name, or whose hash they do."""
    outputs, args = outputs_of(args)
    if len(args) != 1:
        raise UserError(verb, " ".join(args), "one folder", f"posbench {verb} DIR")
    return run_named(args[0], outputs)


def _evaluated(verb: str, args: list[str]) -> tuple[RunDir, dict[str, Any]]:
    """A whole run with answers, and its config."""
    run = checked(_folder(verb, args))
    if not run.rows(evaluate.FILE):
        raise UserError("DIR", str(run.path), "a run that evaluated", "add evaluate to its stages")
    return run, run.config("task")


def report(args: list[str]) -> int:
    """Redraw the figures and the page of a run or a sweep; of a folder of many runs, write their gallery."""
    out, args = option(args, "--out")
    folder = _folder("report", args)
    if not is_run(folder) and runs_in(folder):
        print(write_gallery(folder, Path(out).expanduser() if out else None))
        return 0
    if out is not None:
        raise UserError(
            "--out", out, "a folder for the gallery of many runs", "leave it out for a single run"
        )
    run = open_run(folder)
    with owned(run.path):
        # A study may have a table of the name summary.csv, too.
        swept = not (checked(run.path, DRAWN).path / CONFIG).is_file()
        print(sweep.render_sweep(folder) if swept else render_run(folder))
        run.renew(DRAWN)
    return 0


def rescore(args: list[str]) -> int:
    """Score saved outputs of a run, or of all runs of a sweep, again, without a model."""
    folder = _folder("rescore", args)
    runs = runs_of(folder)
    for run in runs or [folder]:
        _rescored(open_run(run))
    if runs:
        sweep.again(folder, terminal())
    return 0


def _rescored(run: RunDir) -> None:
    again = (*DRAWN, *evaluate.TABLES)
    with owned(run.path):
        checked(run.path, again)
        raw = run.config("task", "model", "runtime")
        rows, torn = run.rows(evaluate.FILE), run.torn(evaluate.FILE)
        if torn or not rows or not run.done:
            allowed = f"a finished run that evaluated, with whole rows (damaged here: {torn})"
            raise UserError("DIR", str(run.path), allowed, "repeat its command, with evaluate in the stages")
        task = recorded(raw["task"])
        runtime = build(Runtime, raw["runtime"], "runtime")
        need_same_data(task, run.facts(PROVENANCE))
        changed = evaluate.rescore(task, raw["model"]["name"], runtime.resamples, run)
        page = render_run(run.path)
        run.renew((*again, evaluate.FILE))
    print(f"{changed} of {len(rows)} scores changed; {page}")


def show(args: list[str]) -> int:
    """Print examples of a run: prompt, expected answers, and every method's reply and score."""
    name, args = option(args, "--id")
    flags = [arg for arg in args if arg in ("--wrong", "--all")]
    run, raw = _evaluated("show", [arg for arg in args if arg not in flags])
    examples = Examples.of(run, raw)
    if name is not None:
        if name not in examples.rows:
            hint = near(name, list(examples.rows), f"posbench show {run.path} lists some")
            raise UserError("--id", name, f"an id of {run.path / evaluate.FILE}", hint)
        print(examples.text(name, whole=True))
        return 0
    wrong, every = examples.wrong(), examples.ids()
    print(f"{len(wrong)} of {len(every)} examples are scored below 1 under some method")
    names = wrong if "--wrong" in flags else every
    some = names if "--all" in flags else few(names)
    for name in some:
        print(f"\n{examples.text(name)}")
    if some:
        more = f"{len(names) - len(some)} more: add --all; " if len(names) > len(some) else ""
        print(f"\n{more}one in full: posbench show {shlex.quote(str(run.path))} --id {shlex.quote(some[0])}")
    return 0
