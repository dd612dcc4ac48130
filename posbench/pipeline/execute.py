"""One run: claim the folder, take the stages in order, finish."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.text import Text

from posbench.errors import UserError
from posbench.files.atomic import write_json
from posbench.files.digests import Content, find_change
from posbench.files.hardware import default_threads
from posbench.files.parse import read_json
from posbench.files.sources import Source, cached_path
from posbench.late import has_torch, torch
from posbench.methods.unmodified import Unmodified
from posbench.model import families
from posbench.model.guard import need_restored, probe
from posbench.model.items import probe_items
from posbench.model.lm import LM
from posbench.pipeline.compose import compose_record
from posbench.pipeline.config import Config, check_config
from posbench.pipeline.identity import (
    identity,
    input_sources,
    provenance,
    run_contents,
    run_name,
    threads,
    version_key,
)
from posbench.pipeline.prepare import (
    build_run,
    longest_prompts,
    need_text_model,
    silence_transformers,
)
from posbench.pipeline.stages import stage_module
from posbench.report.terminal import show_run
from posbench.report.text import describe_stop
from posbench.run.base import IncompleteRun, Run
from posbench.run.budget import Budget, Deadline, Stopwatch
from posbench.run.claim import claim, find
from posbench.run.cost import LIGHT_PARAMETERS, Costs
from posbench.run.folder import (
    AUDIT,
    MIXED,
    PREDICTIONS,
    PROVENANCE,
    STATUS,
    SUBMITTED,
    RunDir,
    State,
    open_run,
    run_id,
    was_rescored,
)
from posbench.run.heartbeat import doing
from posbench.run.progress import duration, repeating
from posbench.run.shards import (
    Shard,
    WorkerMain,
    WorkerPool,
    merge_records,
    shard_folders,
)
from posbench.tasks.items import GoldPositionTask

if TYPE_CHECKING:
    from posbench.pipeline.budget import BudgetPlan

STAGE_ACTIVITIES = {
    "search": "search: between its loops",
    "study": "study: tables and intervals",
    "intervene": "intervene: plans and averages",
    "evaluate": "evaluate: plans, scores and intervals",
    "report": "report: figures and page",
}
"""Message of a stage while it shows no progress."""
ROW_STAGES = ("intervene", "evaluate")
"""Stages whose rows several runs make together, or several processes share out."""

RESUMING_BUDGET_RATIO = 1.5
"""A run that stopped at its budget resumes if the budget grew by half; a part of a diagnosis gets the rest of a budget,
which differs a little between repetitions."""
USED_TIME = ".seconds_used.json"
"""File of a run folder with a budget: seconds that its sessions took. Hidden, so no part of its results."""
RECORD_SECONDS = 2.0
CHECKED_TOKENS = 64
"""Tokens of the prompt that checks a loaded model."""
LONG_CHECK_OPERATIONS = 1e11
"""Operations of that prompt from which it is announced: about a second of one core."""


def execute(
    config: Config,
    *,
    command: str,
    console: Console,
    lm: LM | None = None,
    worker_main: WorkerMain | None = None,
    plan: BudgetPlan | None = None,
    watch: Stopwatch | None = None,
    shows_result: bool = True,
) -> Path:
    """Run the stages of a config in its versioned folder; finished work is not repeated.

    Args:
        config: The checked config.
        command: The command line, for the record.
        console: Where progress and tables go.
        lm: Its model, where that is loaded already.
        worker_main: Entry point of each of ``runtime.workers``; without it this process makes all rows.
        plan: The plan for the config's budget, see :func:`posbench.pipeline.apply_budget.apply_budget`.
        watch: Measures this session; None: from now on.
        shows_result: Whether the result is printed at the end.

    Returns:
        The run folder.

    Raises:
        UserError: Something the user can correct.
        IncompleteRun: Some rows failed and will be retried by the same command.
    """
    watch = watch or Stopwatch()
    with claim_run(config, command, console, lm, plan) as (run, contents, facts):
        out = run.out
        damaged = out.damaged()
        stages = config.stages
        # Nothing is left to compute; at most the page is made again.
        if not damaged and _has_ended(out, config):
            if _has_current_report(out, config):
                console.print("finished before: nothing is computed again")
                if shows_result:
                    show_run(out.path, console)
                return out.path
            console.print(
                "finished before; reported again, as the experiment or the paper's table has changed"
            )
            stages = ("report",)
        if damaged:
            names = ", ".join(damaged)
            console.print(f"damaged: {names}; made again, rows that are whole are kept")
        # A run may be continued on another machine.
        earlier_machines = out.hardware()
        out.resume(stages, config.raw, facts)
        if earlier_machines and out.hardware() != earlier_machines:
            console.print(
                f"begun on {' and '.join(earlier_machines)}, continued on {facts['hardware']}: "
                "their rows agree up to rounding, not to the byte",
            )
        if config.budget is None:
            _announce_long_run(config, run)
        _record_begin(out, plan)
        # A server's tokens and money are counted and limited.
        if config.asks_server:
            from posbench.pipeline import served_run

            run.spending = served_run.spending(config, run)
        try:
            with (
                _time_counted(run, config.budget, watch),
                _worker_pool(config, run, worker_main),
            ):
                for stage in stages:
                    # The page needs the rows of all processes.
                    if stage == "report":
                        _merge_shards(run)
                    with (
                        out.recorded(stage),
                        run.meter.stage(stage, out),
                        doing(STAGE_ACTIVITIES[stage]),
                    ):
                        stage_module(stage).run(config, run)
                        need_unchanged(contents, out)
                _merge_shards(run)  # without a report; after one it finds nothing left
        except BaseException as error:
            _record_failure(out, error, watch.seconds)
            raise
        if plan:
            _record_end(out, plan, watch)
        out.finish("done", seconds=watch.seconds)
        if shows_result:
            show_run(out.path, console)
        if plan:
            _print_time(plan, watch.total, console)
        return out.path


def _has_ended(out: RunDir, config: Config) -> bool:
    """Whether a run's folder holds everything that this config asks for.

    A run that stopped at its budget, or after enough questions, has ended under that setting and resumes under a much
    larger budget. Scores of ``posbench rescore`` are made again.
    """
    if "evaluate" in config.stages and was_rescored(out):
        return False
    stages = [out.stage(stage) for stage in config.stages]
    for stage in stages:
        if stage.get("stopped") and not _would_stop_again(stage, config):
            return False
    return out.done and all(stage.get("done") for stage in stages)


def _has_current_report(out: RunDir, config: Config) -> bool:
    """Whether the report of a run, if it has one, shows the experiment and the paper's table as they are now."""
    if "report" not in config.stages:
        return True
    return bool(stage_module("report").is_current(config, out.path))


def _would_stop_again(stage: Mapping[str, Any], config: Config) -> bool:
    """Whether a stage that stopped early under a budget or stop rule would stop at the same place under this config.

    Args:
        stage: The stage's entry in ``status.json``.
        config: The config, whose budget may be larger now.
    """
    # It stopped because the shape of the curve was decided (runtime.until).
    if stage.get("decided"):
        return bool(config.runtime.until)
    if config.budget is None:
        return False
    budget_then = stage.get("budget")
    if budget_then is None:  # an older run does not say it
        return True
    unit, size = config.budget.amount
    # A budget of the same unit that is only a little larger is not worth another session.
    return unit in budget_then and size < RESUMING_BUDGET_RATIO * budget_then[unit]


def _record_failure(out: RunDir, error: BaseException, seconds: float) -> None:
    """Record how a session ended that raised an error; a run that is marked as mixed stays so."""
    state: State = "failed"
    if isinstance(error, IncompleteRun):
        state = "incomplete"
    if isinstance(error, KeyboardInterrupt):
        # Lists call a run that nobody makes, and that has not ended, killed.
        state = "running"
    if out.status()["state"] == MIXED:
        state = MIXED
    with suppress(OSError):  # a full disk, which the error itself reports
        text = "" if state == "running" else f"{type(error).__name__}: {error}"
        out.finish(state, text, seconds)


@contextmanager
def _worker_pool(
    config: Config, run: Run, worker_main: WorkerMain | None
) -> Iterator[None]:
    """Start worker processes for a block if ``runtime.workers`` is more than one; each makes a shard of the rows.

    Args:
        config: The config.
        run: Gets its own shard and the pool.
        worker_main: What a worker process runs; None in a worker, which starts no others.
    """
    count = config.runtime.workers
    if worker_main and count > 1 and is_shardable(config):
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        run.shard = Shard(0, count)
        run.workers = WorkerPool(run.out, count, num_gpus, run.console, worker_main)
    try:
        yield
    finally:
        if run.workers:
            run.workers.stop()


def _merge_shards(run: Run) -> None:
    """Wait for the workers, check a sample of their rows, and add their records of cost to the run's.

    Shards are removed once merged, so that a second call changes nothing.
    """
    if run.workers:
        run.workers.finish()
    # The shards of submitted jobs may be merged already; their rows still need the check, once.
    is_submitted = (run.out.path / SUBMITTED).is_file()
    was_audited = AUDIT in run.out.facts(PROVENANCE)
    if shard_folders(run.out.path) or (is_submitted and not was_audited):
        from posbench.pipeline.audit import audit_shards  # few runs need it

        audit_shards(run)
    merge_records(run.out)


def set_threads(config: Config) -> None:
    """Give torch the CPU threads of a run: the typed number, else all, divided among its workers.

    Rounding depends on them, so an earlier run of the process must not leave its own.
    """
    if not has_torch():
        return
    processes = config.runtime.workers if is_shardable(config) else 1
    torch.set_num_threads(threads(config) or max(default_threads() // processes, 1))


def is_shardable(config: Config) -> bool:
    """Return whether processes can share the rows of a run: not for a study or a served model."""
    makes_rows = bool(set(ROW_STAGES) & set(config.stages))
    return makes_rows and not config.study and config.model.in_process


# Budgets


@contextmanager
def _time_counted(run: Run, budget: Budget | None, watch: Stopwatch) -> Iterator[None]:
    """Give a run with a budget of time its deadline for a block, and record the used time regularly.

    Args:
        run: Gets the deadline.
        budget: The budget; nothing is done unless it is a time.
        watch: Measures the time of this session; that of earlier ones is added.
    """
    if budget is None or budget.seconds is None:
        yield
        return
    watch.waits_for_server = not run.model.in_process
    watch.used_before = _seconds_used(run.out)
    if watch.used_before:
        left = max(budget.seconds - watch.used_before, 0.0)
        run.console.print(f"budget: {duration(left)} of {budget.text} are left")
    run.deadline = Deadline(budget.seconds, watch)

    def record() -> None:
        write_json(run.out.path / USED_TIME, watch.total)

    with repeating(record, RECORD_SECONDS):
        yield


def _seconds_used(out: RunDir) -> float:
    """Seconds that the sessions of a run with a budget took so far, killed ones among them."""
    file = out.path / USED_TIME
    if not file.is_file():
        return 0.0
    seconds: float = read_json(file, float, hint=f"remove {file}")
    return seconds


def _record_end(out: RunDir, plan: BudgetPlan, watch: Stopwatch) -> None:
    """Record in the provenance the plan of a budget, the run's duration, and where it stopped."""
    facts = out.facts(PROVENANCE)
    facts["budget"] = {**plan.facts(), "taken": round(watch.total, 1)}
    stop = describe_stop(out.status())
    if stop:
        facts["budget"]["end"] = stop
    out.write_facts(PROVENANCE, facts)


def _record_begin(out: RunDir, plan: BudgetPlan | None) -> None:
    """Record the budget of this session in the provenance, and clear where an earlier session stopped.

    The run goes on from there.
    """
    facts = out.facts(PROVENANCE)
    if plan:
        facts["budget"] = plan.facts()
    elif not facts.get("budget", {}).pop("end", None):
        return
    out.write_facts(PROVENANCE, facts)


def _print_time(plan: BudgetPlan, seconds: float, console: Console) -> None:
    if plan.seconds is not None:
        console.print(
            f"budget: {plan.budget}, {duration(plan.seconds)} expected, {duration(seconds)} taken",
        )


def _announce_long_run(config: Config, run: Run) -> None:
    """Print the expected time of a run that will take long on this machine, and a budget that shortens it."""
    # The model was not loaded (all rows are there, or it is served), or is small.
    if "lm" not in vars(run) or Costs.of(run.lm).parameters < LIGHT_PARAMETERS:
        return
    from posbench.pipeline.budget import describe_long_run
    from posbench.pipeline.study_budget import describe_long_study

    with doing("estimating the time of the run"):
        line = describe_long_study(config, run) or describe_long_run(config, run)
    if line:
        run.console.print(line)


# Folders


class RunLocation(NamedTuple):
    """Arguments with which :func:`posbench.run.claim.find` looks up a run's folder."""

    outputs: Path
    suite: str
    version_key: dict[str, Any]
    name: str

    @classmethod
    def of(
        cls, config: Config, identity: Mapping[str, Any], contents: Sequence[Content]
    ) -> RunLocation:
        """Return where a run lies.

        Args:
            config: The config.
            identity: Distinguishes runs; from :func:`posbench.pipeline.identity.identity`.
            contents: Contents of the files that it reads.
        """
        # Runs of an experiment lie together, others by study or task.
        suite = config.study_name or config.task.name
        if config.experiment:
            suite = config.experiment.name
        outputs = Path(config.runtime.outputs).expanduser()
        name = run_name(config, identity, contents)
        return cls(outputs, suite, version_key(), name)

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return run_id(self.version_key, self.name)

    def find(self) -> RunDir | None:
        """Return the run's folder, None where there is none yet.

        Raises:
            UserError: The outputs cannot be read or written.
        """
        folder = find(*self)
        return RunDir(folder, self.run_id) if folder else None


class ClaimedRun(NamedTuple):
    """A run whose folder is claimed, the contents of the files that it reads, and its provenance."""

    run: Run
    contents: Sequence[Content]
    facts: Mapping[str, Any]


@contextmanager
def claim_run(
    config: Config,
    command: str,
    console: Console,
    lm: LM | None = None,
    plan: BudgetPlan | None = None,
) -> Iterator[ClaimedRun]:
    """Claim the folder of a run for a block, after everything that may refuse it was checked.

    Args:
        config: The checked config.
        command: The command line, for the record.
        console: Where progress and tables go.
        lm: Its model, where that is loaded already.
        plan: The plan for its budget, for the record.

    Yields:
        The run, the contents of its files, and its provenance.

    Raises:
        UserError: A file cannot be read, the model cannot be run, or the folder is another process's.
    """
    # First of all: weights to download, with the hub's own progress bars.
    with doing("hashing the files that the run reads"):
        contents = run_contents(config)
    run_identity = identity(config, contents)
    silence_transformers()
    set_threads(config)
    location = RunLocation.of(config, run_identity, contents)
    run = build_run(config, console, run_identity, contents)
    if lm:
        run.lm = lm
    existing = location.find()
    server_facts: Mapping[str, Any] = {}
    # A run that has begun a stage was checked before.
    if existing is None or existing.status()["stages"].keys() <= {"config"}:
        _check_cut_prompts(config, run)
        with doing("checking the model with its longest prompt"):
            server_facts = probe_model(config, run)
    if config.asks_server:
        from posbench.pipeline import served_run

        made = 0
        is_needed = True
        if existing:
            is_needed = not _has_ended(existing, config) or bool(existing.damaged())
            made = len(existing.rows_without_error(PREDICTIONS))
        if is_needed:
            served_run.announce_cost(config, run, made)
    title = [config.study_name or config.task.name]
    if config.uses_model:
        title = [config.model.name, *title, config.choice.name]
    console.rule(Text("  ".join(title), style="bold"))
    facts = provenance(config, command, run_identity, contents)
    facts |= server_facts
    if plan:
        facts["budget"] = plan.facts()
    with claim(*location, config.raw, facts) as out:
        run.out = out
        if out.status()["state"] == MIXED:
            allowed = "rows that were all made from the same files"
            raise UserError("run folder", str(out.path), allowed, "remove it")
        yield ClaimedRun(run, contents, facts)


def _check_cut_prompts(config: Config, run: Run) -> None:
    """Refuse prompts from which truncation removes the gold item, before any is answered.

    Raises:
        UserError: The first of them.
    """
    is_asked = {"intervene", "evaluate", "study"} & set(config.stages)
    if not is_asked or not config.uses_model or not config.uses_task:
        return
    task = config.task
    if isinstance(task, GoldPositionTask) and task.truncation != "refuse":
        # Encoding cuts the prompts, and refuses those.
        run.prompts.encode(run.examples("evaluation"))


def make_run_folder(config: Config, command: str) -> Path:
    """Return the folder of a run whose rows other processes will make.

    A new folder gets the config and the provenance.

    Args:
        config: The config.
        command: The command line that is recorded.

    Raises:
        UserError: A file cannot be read, or the outputs cannot be written.
    """
    contents = run_contents(config)
    run_identity = identity(config, contents)
    location = RunLocation.of(config, run_identity, contents)
    existing = location.find()
    if existing:
        return existing.path
    facts = provenance(config, command, run_identity, contents)
    # This machine makes no rows.
    facts["prepared_on"] = facts["hardware"]
    facts["hardware"] = ""
    with claim(*location, config.raw, facts) as out:
        return out.path


def recorded_config(folder: Path) -> Config:
    """Return the config of a run folder, from its record alone.

    Raises:
        UserError: It is no run folder, or the code, a file or a setting has changed since.
    """
    from posbench.run.own_code import make_importable

    folder = folder.resolve()
    out = open_run(folder)
    groups = out.config("runtime")
    # The folder may have been moved: its outputs are three levels up.
    runtime = {**groups["runtime"], "outputs": str(out.path.parents[2])}
    folders = make_importable(out)
    config = check_config(compose_record({**groups, "runtime": runtime}, folders))
    contents = run_contents(config)
    # The same config must still lead to this folder, else its rows would not be reproduced.
    same = RunLocation.of(config, identity(config, contents), contents).find()
    if same is None or not same.path.samefile(folder):
        if not re.fullmatch(r"v\d+", folder.parent.name):
            allowed = "a run in its place below an outputs folder: TASK/v001/NAME"
            hint = "copy it with these folders around it"
            raise UserError("RUN", str(folder), allowed, hint)
        allowed = (
            "a run of this code with these libraries and files, on this kind of device"
        )
        hint = f"repeat its command: {out.command}"
        raise UserError("run folder", str(folder), allowed, hint)
    text = out.facts(PROVENANCE).get("budget", {}).get("budget")
    budget = Budget.parse(text) if text else None
    # A spending limit on a server holds for every session; a time limit held for one.
    if budget and (budget.tokens or budget.usd):
        config = replace(config, budget=budget)
    return config


def find_finished_run(config: Config) -> Path | None:
    """Return the folder of a run that :func:`execute` would show and not compute again, else None.

    Nothing is written.

    Raises:
        UserError: A file that takes part cannot be read, or the outputs cannot.
    """
    contents = run_contents(config)
    out = RunLocation.of(config, identity(config, contents), contents).find()
    if out is None or not _has_ended(out, config) or out.damaged():
        return None
    return out.path if _has_current_report(out, config) else None


def missing_sources(config: Config) -> list[Source]:
    """Return the files that a run would download first; empty if all are here.

    Raises:
        UserError: Model and task do not go together.
    """
    need_text_model(config)
    return [
        source
        for source in input_sources(config)
        if source.kind != "path" and cached_path(source) is None
    ]


# Checks


def probe_model(config: Config, run: Run) -> Mapping[str, Any]:
    """Load the model and refuse settings that fail only with the weights, so that bad input leaves no folder behind.

    All else :func:`posbench.pipeline.prepare.prepare` has refused.

    Args:
        config: The run.
        run: The same run.

    Returns:
        For the provenance, how a backend decodes, or the ``dtype`` of the weights in process.

    Raises:
        UserError: The weights are not the checkpoint's, NaN comes out, the method does not restore the model, or the
            server does not answer.
    """
    if not config.model.in_process:
        from posbench.pipeline import served_run

        return served_run.check_backend(config, run)
    if config.uses_model:
        vocabulary = families.text_config(run.lm.model).vocab_size
        num_tokens = min(CHECKED_TOKENS, run.lm.context_window, vocabulary)
        method = run.method.trial()
        parameters = Costs.of(run.lm).parameters
        short_prompt = range(num_tokens)
        changes_model = not isinstance(method, Unmodified)
        logits = probe(run.lm, short_prompt) if changes_model else None
        # Many different tokens, then the longest prompts.
        for ids in (short_prompt, *longest_prompts(run, config.stages)):
            if 2 * parameters * len(ids) > LONG_CHECK_OPERATIONS:
                message = f"checking {run.lm.name} with its longest prompt, {len(ids):,} tokens"
                run.console.print(message)
            with (
                # The run itself splits a batch that is too large.
                suppress(torch.OutOfMemoryError),
                method.applied(run.lm) as lm,
                probe_items(lm, [ids]),
            ):
                probe(lm, ids)
        if logits is not None:
            logits_after = probe(run.lm, short_prompt)
            need_restored(run.lm, run.method.choice.name, logits, logits_after)
        return {"dtype": str(run.lm.model.dtype).removeprefix("torch.")}
    return {}


def need_unchanged(contents: Sequence[Content], out: RunDir) -> None:
    """Refuse a run if a file that it reads has changed since it began.

    The run is marked as mixed, so that no other run copies rows from it.

    Args:
        contents: The files that the run reads, with their digests when it began.
        out: Folder of the run.

    Raises:
        UserError: A file holds something else than when the run began.
    """
    content = find_change(contents)
    if content:
        out.write_facts(STATUS, {"state": MIXED, "stages": {}})
        allowed = "a file that does not change while a run reads it"
        hint = f"remove {out.path} (its rows may come from either version) and repeat the command"
        raise UserError(content.source.field, str(content.file), allowed, hint)
