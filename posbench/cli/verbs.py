"""``posbench fetch``, ``validate``, ``report``, ``rescore``, ``audit`` and ``show``."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posbench import paths
from posbench.backends.base import text_encoder
from posbench.backends.served import Endpoint
from posbench.cli.options import flag, option
from posbench.cli.runs import check_flags, figure_formats, split_outputs
from posbench.errors import UserError, choices, complain, near
from posbench.files import sources
from posbench.model.load import load_without_weights, read_checkpoint
from posbench.pipeline import audit as auditing
from posbench.pipeline import estimate
from posbench.pipeline.compose import ComposedConfig, Jobs, compose
from posbench.pipeline.config import Config, check_config, needs
from posbench.pipeline.execute import recorded_config, set_threads
from posbench.pipeline.identity import model_identity, need_same_contents, run_contents
from posbench.pipeline.prepare import (
    PreparedRun,
    build_run,
    prepare,
    silence_transformers,
)
from posbench.pipeline.served import describe_endpoint, estimate_served, probe_server
from posbench.pipeline.stages import evaluate
from posbench.report import sweep
from posbench.report.collect import collect_entries
from posbench.report.console import make_console, make_wide_console, show_next
from posbench.report.failures import RunExamples, spread_sample
from posbench.report.folder import sweep_runs
from posbench.report.gallery import write_gallery
from posbench.report.page import render_run
from posbench.run.folder import (
    CONFIG,
    JOBS,
    PREDICTIONS,
    PROVENANCE,
    REDRAWN_FILES,
    STATUS,
    RunDir,
    find_run,
    is_run,
    open_run,
    open_undamaged,
    runs_in,
)
from posbench.run.lease import owning
from posbench.run.own_code import make_importable
from posbench.run.runtime import Runtime
from posbench.schema import MAX_COUNT, build
from posbench.tasks.base import read_recorded_task

USERS_TASKS = ("own_data", "retrieval_log")
"""Tasks that hold nothing without a file of the user's."""


def fetch(args: list[str]) -> int:
    """List every file that a config needs (checkpoint, data), and download what is missing.

    usage: posbench fetch [MODEL] [OVERRIDES] [--dry-run] [--config-dir DIR]

      MODEL      a model's name, for model=MODEL
      OVERRIDES  as a run has them, also -m and experiment=NAME
      --dry-run  list with sizes, download nothing

    Prints where the files are. Afterwards runs of this config need no network. HF_TOKEN (or `hf auth login`) opens
    gated repositories.

    example: posbench fetch model=mistral7b task=nq_multidoc --dry-run
    """
    dry_run, overrides = flag(args, "--dry-run")
    if overrides and not re.search("^-|=", overrides[0]):
        overrides[0] = f"model={overrides[0]}"
    jobs = compose(overrides)
    for record in jobs.refused.values():
        print(f"posbench: {record['error']}", file=sys.stderr)
    # A sweep's jobs share most files.
    needed = [source for job in jobs.composed for source in needs(job)]
    if needed:
        console = make_wide_console()
        sources.fetch(needed, dry_run=dry_run, console=console)
        if not dry_run:
            for source in dict.fromkeys(needed):
                group = source.field.partition(".")[0]
                console.print(f"{group}: {sources.cached_path(source)}")
            typed = shlex.join(overrides)
            show_next(console, f"posbench {typed}  (runs it)")
            if all(re.match("model[=.]", arg) for arg in overrides):
                purpose = "whether it has a position bias, and what helps"
                show_next(console, f"posbench diagnose {typed}  ({purpose})")
    return max((record["status"] for record in jobs.refused.values()), default=0)


def validate(args: list[str]) -> int:
    """Check configs and what they read, and tell what a run takes.

    usage: posbench validate [OVERRIDES] [--measure] [--config-dir DIR]

      OVERRIDES  as a run has them, also -m and experiment=NAME; without any: every choice of every
                 group and every experiment
      --measure  load the model and time a few batches

    Prints the defaults that change to fit the model's window, prompts and tokens of each stage, and memory.
    All that is wrong is told together, a line for each, with what to fetch; the exit status is then 2, and 3 where
    a server does not answer. Of a served model it counts requests, tokens and money.

    example: posbench validate model=mistral7b method=layer_scaling
    """
    measure, args = flag(args, "--measure")
    # Without arguments: every choice, checked without its files.
    checks_choices = not args and not measure
    commands = _all_choices() if checks_choices else [args]
    status = 0
    for command in commands:
        jobs = Jobs()
        problems: list[UserError] = []
        runs: list[tuple[ComposedConfig, PreparedRun]] = []
        try:
            jobs = compose(command)
        except UserError as error:
            problems.append(error)
        for job in jobs.composed:
            try:
                if checks_choices:
                    check_config(job)
                else:
                    prepared = prepare(job, download=False)
                    runs.append((job, with_server(prepared)))
            except UserError as error:
                problems.append(error)
        is_bad = bool(problems or jobs.refused)
        print(f"{'BAD ' if is_bad else 'ok  '} {shlex.join(command)}")
        for record in jobs.refused.values():
            print(f"posbench: {record['error']}", file=sys.stderr)
            status = max(status, record["status"])
        for problem in problems:
            complain(problem)
            status = max(status, problem.status)
        for job, run in runs:
            if len(jobs.composed) > 1:
                print(f"\n{_job_title(job, jobs.composed)}")
            _print_estimate(run, measure)
    return status


def _job_title(job: ComposedConfig, jobs: Sequence[ComposedConfig]) -> str:
    """The title of a job of a sweep: its number and the settings that differ between jobs."""
    common = set.intersection(*(set(other.overrides) for other in jobs))
    differing = [override for override in job.overrides if override not in common]
    return f"job {jobs.index(job) + 1} of {len(jobs)}: {' '.join(differing)}"


def with_server(run: PreparedRun) -> PreparedRun:
    """Return the run with what is known of its server; the server is probed unless that was done before.

    Raises:
        UserError: The server does not answer, or refuses a typed setting.
    """
    config = run.config
    if config.asks_server and config.server is None:
        return replace(run, config=probe_server(config))
    return run


def _print_estimate(run: PreparedRun, measure: bool) -> None:
    """Print the changes that fit a config to its model, and the cost of the run.

    Args:
        run: The prepared run.
        measure: Load the model and time a few batches.
    """
    for line in run.warnings:
        print(line)
    console = make_console()
    config = run.config
    # A server's requests are counted; of a backend that the user wrote nothing is known.
    if config.server and not config.model.backend:
        endpoint = Endpoint(config.model, config.server)
        lines = describe_endpoint(endpoint)
        requests = estimate_served(config, config.server, text_encoder(config.model))
        for line in (*lines, requests.line(config.model.concurrency)):
            console.print(line)
    elif run.reader:
        estimate.show(config, run.reader, measure, console)


def _all_choices() -> list[list[str]]:
    """Return the overrides that check each choice of every config group, and every experiment.

    Choices that need a value of the user are left out.
    """
    commands = []
    for group in paths.GROUPS:
        for name in choices(*paths.group_folders(group)):
            file = paths.find_choice(group, name)
            leaves_open = file is not None and "???" in file.read_text("utf-8")
            if not leaves_open and not (group == "task" and name in USERS_TASKS):
                choice = f"{group}={name}"
                commands.append([choice, *_required_overrides(group, name)])
    experiments = choices(*paths.group_folders("experiment"))
    return commands + [[f"experiment={name}"] for name in experiments]


def _required_overrides(group: str, name: str) -> list[str]:
    """Return the overrides without which a choice cannot be checked alone."""
    if (group, name) == ("model", "endpoint"):
        return ["model.base_url=http://localhost:8000/v1"]
    if (group, name) == ("model", "hf"):
        return ["model.path=posbench://tiny", "stages=[search]"]
    if group == "model":
        # A model without published constants is a model to search on.
        return ["stages=[search]"]
    if group == "search":
        # The settings of a search are checked without the method that it serves.
        return ["stages=[evaluate]"]
    return []


def _folder(verb: str, args: list[str], flags: str) -> Path:
    """The folder that the arguments name, or whose hash they do; ``flags`` are those that the verb knows."""
    outputs, names = split_outputs(args)
    check_flags(names, flags, verb)
    if len(names) != 1:
        raise UserError(verb, " ".join(names), "one folder", f"posbench {verb} DIR")
    return find_run(names[0], outputs)


def report(args: list[str]) -> int:
    """Redraw the figures and the page of a run or a sweep; of a folder of many runs, write their gallery.

    usage: posbench report DIR [--format pdf,png] [--out FOLDER] [--config-dir DIR]

      DIR           a run, a sweep, or a folder of many runs such as outputs
      --format pdf,png,vl.json  the figures in these formats, too, beside the SVG in the run's figures/; vl.json
                    is a Vega-Lite specification with the numbers
      --out FOLDER  where the gallery of many runs goes; DIR/gallery unless said
      --config-dir DIR  your own classes, where these are no longer in the folder that the run records

    A gallery has the newest run of every experiment: its figures, and its tables as CSV, Markdown and LaTeX.

    example: posbench report outputs --format pdf
    """
    out, args = option(args, "--out")
    formats, args = figure_formats(args)
    folder = _folder("report", args, "--format pdf,png, --out FOLDER, --outputs DIR")
    if not is_run(folder) and runs_in(folder):
        if formats:
            for entry in collect_entries(folder):
                for result in entry.results:
                    _redraw(result.folder, formats)
        print(write_gallery(folder, Path(out).expanduser() if out else None))
        return 0
    if out is not None:
        raise UserError(
            "--out",
            out,
            "a folder for the gallery of many runs",
            "leave it out for a single run",
        )
    print(_redraw(folder, formats))
    return 0


def _redraw(folder: Path, formats: Sequence[str]) -> Path:
    """Draw the figures and the page of a run or a sweep again; return the page's path.

    Args:
        folder: The run or sweep.
        formats: Further formats of figures.
    """
    run = open_run(folder)
    with owning(run.path):
        # By its config: a study, too, may have a table named summary.csv.
        is_single_run = (
            open_undamaged(run.path, REDRAWN_FILES).path / CONFIG
        ).is_file()
        if is_single_run:
            page = render_run(folder, formats)
        else:
            page = sweep.render_sweep(folder, formats=formats)
        run.renew(REDRAWN_FILES)
    return page


def rescore(args: list[str]) -> int:
    """Score saved outputs of a run, or of all runs of a sweep, again, without a model.

    usage: posbench rescore DIR [--config-dir DIR]

      DIR  a finished run that evaluated, or a sweep; sweeps that share its runs are summarised again, too
      --config-dir DIR  your own classes, where these are no longer in the folder that the run records

    example: posbench rescore outputs/kv_retrieval/v001/tiny__scale_channel__1a2b3c4d
    """
    folder = _folder("rescore", args, "--outputs DIR")
    runs = sweep_runs(folder) or [folder]
    for run in runs:
        _rescore_run(open_run(run))
    rescored = {run.resolve() for run in runs}
    outputs_folder = runs[0].resolve().parents[2]
    for file in sorted(outputs_folder.glob(f"*/v*/*/{JOBS}")):
        if rescored & set(sweep_runs(file.parent)):
            sweep.summarise_again(file.parent, make_console())
    return 0


def _rescore_run(run: RunDir) -> None:
    """Score the saved replies of a run again, and redraw its page.

    Raises:
        UserError: The run is not finished, or its rows are damaged.
    """
    rewritten = (*REDRAWN_FILES, *evaluate.RESCORED_FILES)
    made_again = (*REDRAWN_FILES, *evaluate.SCORE_TABLES)
    with owning(run.path):
        # One that was stopped had written some of its files; each row of the predictions has a checksum.
        goes_on = run.is_rescore_unfinished
        open_undamaged(run.path, (*rewritten, STATUS) if goes_on else made_again)
        raw = run.config("task", "model", "runtime")
        _refuse_study("DIR", run, raw)
        rows = run.rows(PREDICTIONS)
        torn = run.num_torn_rows(PREDICTIONS)
        is_finished = run.done or goes_on
        if torn or not rows or not is_finished:
            allowed = f"a finished run with the stage evaluate and undamaged rows (damaged: {torn})"
            hint = "repeat its command with evaluate in stages=[...]"
            if not is_finished:
                hint = f"go on with it: posbench resume {shlex.quote(str(run.path))}"
            raise UserError("DIR", str(run.path), allowed, hint)
        make_importable(run)
        task = read_recorded_task(raw["task"])
        runtime = build(Runtime, raw["runtime"], "runtime")
        need_same_contents(task.files(), run.facts(PROVENANCE))
        changed = evaluate.rescore(task, raw["model"]["name"], runtime.resamples, run)
        page = render_run(run.path)
        run.renew(rewritten)
    print(f"{changed} of {len(rows)} scores changed; {page}")


def _refuse_study(field: str, run: RunDir, config: Mapping[str, Any]) -> None:
    """Refuse the run of a study, which makes its tables of more than its replies."""
    if config.get("study"):
        allowed = "a run that evaluated a model, not a study"
        raise UserError(field, str(run.path), allowed, "choose another run")


def audit(args: list[str]) -> int:
    """Prove a run: its rows and tables made again from config and replies, and some replies made again.

    usage: posbench audit RUN [--share X] [--seed N] [--config-dir DIR]

      RUN        a finished run that evaluated a model
      --share X  share of the rows, from 0 to 1 (0.02; 20 rows at least)
      --seed N   of the random choice (0)
      --config-dir DIR  your own classes, where these are no longer in the folder that the run records

    The rows must be those that the run planned; of each of them everything but the reply is made again, and the
    tables from all of them. For a share of the replies the model is loaded in float32, and reads each prompt alone
    with nothing shared: a reply may part from the recorded one where two tokens are so close that rounding decides.
    Replies of a server are not made again. The result stands in the run's provenance and on its page; the exit
    status is 2 where something differs otherwise. Runs whose rows several processes made are audited by themselves.

    example: posbench audit outputs/kv_retrieval/v001/tiny__scale_channel__1a2b3c4d
    """
    share_text, remaining = option(args, "--share")
    seed_text, remaining = option(remaining, "--seed")
    share = _number("--share", share_text or str(auditing.AUDITED_SHARE), 1)
    seed = _number("--seed", seed_text or "0", MAX_COUNT)
    check_flags(remaining, "--share X, --seed N", "audit")
    if len(remaining) != 1:
        hint = "posbench ls runs lists them"
        raise UserError("RUN", " ".join(remaining), "one run", hint)
    folder = find_run(remaining[0], Path(Runtime.outputs))
    out = open_undamaged(folder, REDRAWN_FILES)
    if not out.done or not out.rows_without_error(PREDICTIONS):
        allowed = "a finished run with the stage evaluate"
        raise UserError("RUN", str(folder), allowed, "posbench ls runs lists them")
    config = recorded_config(folder)
    _refuse_study("RUN", out, out.config())
    with owning(folder):
        result = _audit_run(config, out, share, int(seed))
    auditing.need_agreement(out, result)
    return 0


def _audit_run(config: Config, out: RunDir, share: float, seed: int) -> auditing.Audit:
    """Audit a finished run with the model in float32, record the result, print it, and draw the page again.

    Args:
        config: The run's config.
        out: Its folder.
        share: Share (0..1) of the rows whose reply is generated again.
        seed: Seed of their choice.
    """
    silence_transformers()
    set_threads(config)
    made_in = ""
    audited = config
    if config.model.in_process:
        checkpoint = read_checkpoint(config.model)
        outline = load_without_weights(config.model, checkpoint, config.runtime.device)
        made_in = auditing.dtype_name(outline)
        in_float32 = replace(config.model, dtype="float32")
        audited = replace(config, model=in_float32)
    contents = run_contents(config)
    run = build_run(audited, make_console(), contents=contents)
    # The digests of the rows depend on the precision in which they were made.
    run.model_identity = model_identity(config, contents)
    run.out = out
    if "search" in config.stages:
        config.search.use_found(run)
    result = auditing.audit_run(run, made_in, share, seed)
    auditing.record_audit(out, result)
    page = render_run(out.path)
    out.renew((PROVENANCE, *REDRAWN_FILES))
    print(result.words)
    print(f"report: {page}")
    return result


def _number(flag: str, text: str, highest: float) -> float:
    """Return the number that is given with a flag.

    Raises:
        UserError: It is no number, or not from 0 to ``highest``.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= highest:
        allowed = f"a number from 0 to {highest:g}"
        raise UserError(flag, text, allowed, f"leave out {flag} for the default")
    return number


def show(args: list[str]) -> int:
    """Print examples of a run: prompt, expected answers, and every method's reply and score.

    usage: posbench show DIR [--wrong] [--all] [--id ID] [--config-dir DIR]

      DIR      a run that evaluated
      --wrong  only those that are scored below 1 under some method
      --all    all of them, not some
      --id ID  one, with its whole prompt
      --config-dir DIR  your own classes, where these are no longer in the folder that the run records

    example: posbench show outputs/kv_retrieval/v001/tiny__scale_channel__1a2b3c4d --wrong
    """
    example_id, args = option(args, "--id")
    only_wrong, args = flag(args, "--wrong")
    shows_all, args = flag(args, "--all")
    folder = _folder("show", args, "--wrong, --all, --id ID, --outputs DIR")
    run = open_undamaged(folder)
    if not run.rows(PREDICTIONS):
        hint = "repeat its command with evaluate in stages=[...]"
        raise UserError("DIR", str(run.path), "a run with the stage evaluate", hint)
    examples = RunExamples.of(run, run.config("task"))
    if example_id is not None:
        if example_id not in examples.rows:
            lists_some = f"posbench show {run.path} lists some"
            hint = near(example_id, list(examples.rows), lists_some)
            allowed = f"an id of {run.path / PREDICTIONS}"
            raise UserError("--id", example_id, allowed, hint)
        print(examples.text(example_id, whole=True))
        return 0
    all_ids = examples.ids()
    wrong_ids = examples.wrong()
    print(
        f"{len(wrong_ids)} of {len(all_ids)} examples are scored below 1 "
        "under some method"
    )
    ids = wrong_ids if only_wrong else all_ids
    printed_ids = ids if shows_all else spread_sample(ids)
    for example_id in printed_ids:
        print(f"\n{examples.text(example_id)}")
    if printed_ids:
        more = ""
        if len(ids) > len(printed_ids):
            more = f"{len(ids) - len(printed_ids)} more: add --all; "
        command = shlex.join(
            ["posbench", "show", str(run.path), "--id", printed_ids[0]]
        )
        print(f"\n{more}one in full: {command}")
    return 0
