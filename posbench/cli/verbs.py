"""``posbench ls``, ``fetch``, ``validate``, ``report``, ``rescore`` and ``show``."""

from __future__ import annotations

import itertools
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml

from posbench import paths
from posbench.cli.options import option
from posbench.cli.runs import outputs_of
from posbench.errors import UserError, choices, complain, near
from posbench.files import sources
from posbench.model.endpoint import look as at_server
from posbench.model.families import FAMILIES
from posbench.pipeline import estimate
from posbench.pipeline.arguments import GROUPS, PLURALS
from posbench.pipeline.compose import Composed, compose
from posbench.pipeline.config import check, needs
from posbench.pipeline.identity import need_same
from posbench.pipeline.prepare import PreparedRun, prepare
from posbench.pipeline.stages import evaluate
from posbench.report import sweep
from posbench.report.console import show_lists, terminal
from posbench.report.experiments import trains
from posbench.report.failures import Examples, few
from posbench.report.folder import runs_of
from posbench.report.gallery import write_gallery
from posbench.report.index import run_named
from posbench.report.page import render_run
from posbench.run.folder import (
    CONFIG,
    DRAWN,
    PROVENANCE,
    RunDir,
    checked,
    is_run,
    open_run,
    runs_in,
)
from posbench.run.lease import owned
from posbench.run.runtime import Runtime
from posbench.schema import build, target
from posbench.tasks import Task
from posbench.tasks.base import recorded

TASK_COLUMNS = ("version", "metric", "size", "source", "licence")
KINDS = {plural: group for group, plural in PLURALS.items()}
CHOICES = *KINDS, "experiments", "families"


def ls(args: list[str]) -> int:
    """List what there is to choose from, with a line on each.

    usage: posbench ls [KIND] [--json] [--config-dir DIR]

      KIND              models, methods, tasks, searches, studies, runtimes, experiments or families;
                        all of them unless said; `posbench ls runs --help` says how runs are found
      --json            as JSON
      --config-dir DIR  your own YAML files, too

    A terminal gets a table, a pipe tab-separated columns below a header.

    example: posbench ls experiments | cut -f 1
    """
    own, args = option(args, "--config-dir")
    names = [arg for arg in args if arg != "--json"]
    if len(names) > 1 or (names and names[0] not in CHOICES):
        asked = " ".join(names)
        known = [*CHOICES, "runs"]
        raise UserError(
            "ls", asked, ", ".join(known), near(asked, known, "posbench ls models")
        )
    show_lists(
        {kind: _records(kind, own) for kind in names or CHOICES},
        as_json="--json" in args,
    )
    return 0


def _records(kind: str, own: str | None) -> list[dict[str, object]]:
    """The choices of a kind, by column."""
    if kind == "families":
        return [
            {
                "name": f.name,
                "model_type": ", ".join(f.model_types),
                "positions": f.position,
            }
            for f in FAMILIES
        ]
    folders = [
        root / KINDS.get(kind, "experiment") for root in paths.config_folders(own)
    ]
    folders[0] = folders[0] if kind in KINDS else paths.EXPERIMENTS
    records = []
    for name in choices(*folders):
        text = next(
            f for folder in folders if (f := folder / f"{name}.yaml").is_file()
        ).read_text()
        data = yaml.safe_load(text) or {}
        if kind == "tasks":
            cls, _ = target(data, Task, "task")  # type: ignore[type-abstract]
            facts = {column: getattr(cls, column) for column in TASK_COLUMNS}
        elif kind == "experiments":
            about = data.get("experiment") or {}
            facts = {"what": about.get("title"), "minutes": about.get("minutes")}
            facts["needs"] = (
                "training"
                if trains(data)
                else "weights"
                if about.get("needs_weights")
                else ""
            )
        else:
            facts = {"what": _about(text) or data.get("path")}
        records.append({"name": name, **facts})
    return records


def _about(text: str) -> str:
    """The first sentence of a YAML's first comment."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    comment = " ".join(line.lstrip("# ") for line in lines).replace(
        "et al. ", "et al.\0"
    )
    return comment.split(". ")[0].replace("\0", " ").rstrip(".")


def fetch(args: list[str]) -> int:
    """List every file that a config needs (checkpoint, data), and download what is missing.

    usage: posbench fetch [OVERRIDES] [--dry-run] [--config-dir DIR]

      OVERRIDES  as a run has them, also -m and experiment=NAME
      --dry-run  list with sizes, download nothing

    Afterwards runs of this config need no network. HF_TOKEN (or `hf auth login`) opens gated repositories.

    example: posbench fetch model=mistral7b task=nq_multidoc --dry-run
    """
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
        wide = terminal(width=None if sys.stdout.isatty() else 10_000)
        sources.fetch(needed, dry_run="--dry-run" in args, console=wide)
    return 0


def validate(args: list[str]) -> int:
    """Check configs and what they read, and tell what a run takes.

    usage: posbench validate [OVERRIDES] [--measure] [--config-dir DIR]

      OVERRIDES  as a run has them, also -m and experiment=NAME; without any: every choice of every
                 group and every experiment
      --measure  load the model and time a few batches

    Prints the defaults that change to fit the model's window, prompts and tokens of each stage, and memory.
    All that is wrong is told together, a line for each, with what to fetch; the exit status is then 2.

    example: posbench validate model=mistral7b method=layer_scaling
    """
    measure = "--measure" in args
    args = [arg for arg in args if arg != "--measure"]
    jobs = [args] if args or measure else _every()
    status = 0
    for job in jobs:
        problems: list[UserError] = []
        made: list[PreparedRun] = []

        def look(
            composed: Composed,
            made: list[PreparedRun] = made,
            problems: list[UserError] = problems,
        ) -> None:
            try:
                if args or measure:
                    made.append(prepare(composed, download=False))
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
            for line in one.warnings:
                print(line)
            if one.reader:
                estimate.show(one.config, one.reader, measure, terminal())
            if one.config.uses_model and one.config.model.base_url:
                terminal().print(
                    at_server(one.config.model), soft_wrap=True, markup=False
                )
    return status


def _every() -> list[list[str]]:
    """A job for every choice; with what it cannot do without."""
    jobs = [
        [f"{group}={name}"] for group in GROUPS for name in choices(paths.CONF / group)
    ]
    jobs = [job for job in jobs if job != ["task=own_data"]]  # nothing without a file
    jobs += [[f"experiment={name}"] for name in choices(paths.EXPERIMENTS)]
    for job in jobs:
        job += ["model.path=posbench://tiny"] if job == ["model=hf"] else []
        job += (
            ["model.base_url=http://localhost:8000/v1"]
            if job == ["model=endpoint"]
            else []
        )
        # A model without published constants is a model to search on.
        job += (
            ["stages=[search]"]
            if job[0].startswith("model=") and job[0] != "model=endpoint"
            else []
        )
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
        raise UserError(
            "DIR", str(run.path), "a run that evaluated", "add evaluate to its stages"
        )
    return run, run.config("task")


def report(args: list[str]) -> int:
    """Redraw the figures and the page of a run or a sweep; of a folder of many runs, write their gallery.

    usage: posbench report DIR [--out FOLDER]

      DIR           a run, a sweep, or a folder of many runs such as outputs
      --out FOLDER  where the gallery of many runs goes; DIR/gallery unless said

    A gallery has the newest run of every experiment: its figures, also as PDF, and its tables as CSV,
    Markdown and LaTeX.

    example: posbench report outputs
    """
    out, args = option(args, "--out")
    folder = _folder("report", args)
    if not is_run(folder) and runs_in(folder):
        print(write_gallery(folder, Path(out).expanduser() if out else None))
        return 0
    if out is not None:
        raise UserError(
            "--out",
            out,
            "a folder for the gallery of many runs",
            "leave it out for a single run",
        )
    run = open_run(folder)
    with owned(run.path):
        # A study may have a table of the name summary.csv, too.
        swept = not (checked(run.path, DRAWN).path / CONFIG).is_file()
        print(sweep.render_sweep(folder) if swept else render_run(folder))
        run.renew(DRAWN)
    return 0


def rescore(args: list[str]) -> int:
    """Score saved outputs of a run, or of all runs of a sweep, again, without a model.

    usage: posbench rescore DIR

      DIR  a finished run that evaluated, or a sweep

    example: posbench rescore outputs/kv_retrieval/v001/tiny__scale_channel__1a2b3c4d
    """
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
        rows = run.rows(evaluate.FILE)
        torn = run.torn(evaluate.FILE)
        if torn or not rows or not run.done:
            allowed = (
                f"a finished run that evaluated, with whole rows (damaged here: {torn})"
            )
            raise UserError(
                "DIR",
                str(run.path),
                allowed,
                "repeat its command, with evaluate in the stages",
            )
        task = recorded(raw["task"])
        runtime = build(Runtime, raw["runtime"], "runtime")
        need_same(task.files(), run.facts(PROVENANCE))
        changed = evaluate.rescore(task, raw["model"]["name"], runtime.resamples, run)
        page = render_run(run.path)
        run.renew((*again, evaluate.FILE))
    print(f"{changed} of {len(rows)} scores changed; {page}")


def show(args: list[str]) -> int:
    """Print examples of a run: prompt, expected answers, and every method's reply and score.

    usage: posbench show DIR [--wrong] [--all] [--id ID]

      DIR      a run that evaluated
      --wrong  only those that are scored below 1 under some method
      --all    all of them, not some
      --id ID  one, with its whole prompt

    example: posbench show outputs/kv_retrieval/v001/tiny__scale_channel__1a2b3c4d --wrong
    """
    name, args = option(args, "--id")
    flags = [arg for arg in args if arg in ("--wrong", "--all")]
    run, raw = _evaluated("show", [arg for arg in args if arg not in flags])
    examples = Examples.of(run, raw)
    if name is not None:
        if name not in examples.rows:
            hint = near(
                name, list(examples.rows), f"posbench show {run.path} lists some"
            )
            raise UserError("--id", name, f"an id of {run.path / evaluate.FILE}", hint)
        print(examples.text(name, whole=True))
        return 0
    wrong = examples.wrong()
    every = examples.ids()
    print(f"{len(wrong)} of {len(every)} examples are scored below 1 under some method")
    names = wrong if "--wrong" in flags else every
    some = names if "--all" in flags else few(names)
    for name in some:
        print(f"\n{examples.text(name)}")
    if some:
        more = (
            f"{len(names) - len(some)} more: add --all; "
            if len(names) > len(some)
            else ""
        )
        print(
            f"\n{more}one in full: posbench show {shlex.quote(str(run.path))} --id {shlex.quote(some[0])}"
        )
    return 0
