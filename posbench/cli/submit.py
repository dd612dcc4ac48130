"""``posbench submit``, ``jobs``, ``collect`` and ``resume``: runs as jobs of a cluster."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from posbench import paths
from posbench.cli.main import main
from posbench.cli.options import flag, option
from posbench.errors import Faults, UserError
from posbench.files.secrets import command_line
from posbench.pipeline import jobs as job_records
from posbench.pipeline.compose import ComposedConfig, compose
from posbench.pipeline.config import Config, check_config
from posbench.pipeline.execute import (
    execute,
    find_finished_run,
    is_shardable,
    make_run_folder,
    recorded_config,
)
from posbench.pipeline.jobs import Submission
from posbench.pipeline.prepare import prepare
from posbench.pipeline.sharing import make_shard, make_shard_and_finish
from posbench.report.console import make_console, show_lists
from posbench.report.sweep import same_runs_note, summarise
from posbench.run.base import IncompleteRun
from posbench.run.folder import find_run, open_run_dir
from posbench.run.lease import ONE_PROCESS, in_use, process_start
from posbench.run.runtime import Cluster, Runtime
from posbench.run.shards import Shard, missing_shards
from posbench.versions import install_hint

POLL_SECONDS = 5.0
"""Between looks at a run that another process owns."""


@dataclass(frozen=True)
class Job:
    """A job of a cluster: resumes a run, from its folder alone.

    Attributes:
        folder: The run's folder.
        shard: Its shard, as ``0/2``, the first of two.
        config_dir: The user's --config-dir.
    """

    folder: str
    shard: str
    config_dir: str | None

    def __call__(self) -> None:
        """Make the shard, with the exit status of the command line."""
        args = ["resume", self.folder, f"--shard={self.shard}"]
        if self.config_dir:
            args.append(f"--config-dir={self.config_dir}")
        status = main(args)
        if status:
            sys.exit(status)

    def checkpoint(self) -> Any:
        """The job that submitit queues again when the time is up: the same one."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit(args: list[str]) -> int:
    """Send runs to a cluster, each as a job of its own, and return at once.

    usage: posbench submit OVERRIDES runtime/cluster=slurm [--shards N]

      OVERRIDES  as a run has them, also -m and experiment=NAME
      --shards N  N jobs for each run, which share out its prompts; the tables are those of one job
      runtime.cluster.KEY=VALUE  what each job asks for: minutes, cpus, gpus, memory (GB), partition, account,
                 qos, constraint, at_once, requeue, setup=[LINES OF SHELL], more={SBATCH OPTION: VALUE}

    Nothing is sent unless every run can go. Runs that are done, run, or wait already are left alone, so the
    same command sends those again that failed. Logs go to .jobs/ in the outputs, which all nodes must see.
    `runtime/cluster=local` takes processes of this machine instead.

    example: posbench submit -m method.factor=1,0,-1 runtime/cluster=slurm runtime.cluster.partition=cpu
    """
    count, remaining = option(args, "--shards")
    if not re.fullmatch("[1-9][0-9]{0,3}", count or "1"):
        hint = "leave it out for one job per run"
        raise UserError("--shards", count, "a whole number from 1 to 9999", hint)
    num_shards = int(count or 1)
    jobs = compose(remaining)
    faults = Faults()
    runs: list[tuple[ComposedConfig, Config]] = []
    # All runs are checked before any is submitted.
    for composed in jobs.composed:
        with faults.collecting():
            runs.append((composed, _config_to_submit(composed, num_shards)))
    errors = [record["error"] for record in jobs.refused.values()]
    for error in errors:
        for line in error.splitlines():
            print(f"posbench: {line}", file=sys.stderr)
    faults.raise_any()
    if errors:
        return 2
    submission_id = f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    command = command_line(["submit", *args])
    to_submit: list[tuple[Path, Submission]] = []
    rows: list[dict[str, object]] = []
    queue = job_records.queued_jobs()
    # Settings that change no result share a run, which is sent once.
    by_folder: dict[Path, tuple[ComposedConfig, Config]] = {}
    folders = [make_run_folder(config, command).absolute() for _, config in runs]
    for folder, run in zip(folders, runs, strict=True):
        by_folder.setdefault(folder, run)
    states = {
        folder: _submission_state(folder, config, queue)
        for folder, (_, config) in by_folder.items()
    }
    _need_known(states)
    for number, (folder, (composed, config)) in enumerate(by_folder.items()):
        state = states[folder]
        entry = _entry(folder, composed, config, state)
        entry = replace(
            entry, id=submission_id, number=number, runs=len(states), command=command
        )
        # Other runs are done, running or waiting.
        if state == "submitted":
            entry = replace(
                entry,
                jobs=submission_id,
                first=len(to_submit) * num_shards,
                shards=num_shards,
            )
            to_submit.append((folder, entry))
        job_records.record_submission(folder, entry)
        settings = " ".join(composed.overrides)
        rows.append({"run": folder.name, "state": state, "settings": settings})
    runtime = runs[0][1].runtime
    if to_submit:
        assert runtime.cluster is not None, "the config was checked"
        _submit_jobs(runtime.cluster, submission_id, to_submit)
    title = f"{len(to_submit)} of {len(states)} runs submitted as {submission_id}"
    show_lists({title: rows})
    note = same_runs_note([composed.overrides for composed, _ in runs], folders)
    if note:
        print(note, file=sys.stderr)
    outputs = shlex.quote(runtime.outputs)
    print(
        f"next: posbench jobs {outputs}; then: posbench collect {outputs}",
        file=sys.stderr,
    )
    return 0


def _submission_state(folder: Path, config: Config, queue: job_records.Queue) -> str:
    """Return ``done``, ``running`` or ``waiting`` for a run that needs no new job, else ``submitted``.

    It is ``unknown`` where an earlier job may still wait, and the queue cannot be read.

    Args:
        folder: The run.
        config: Its config.
        queue: Jobs in Slurm's queue.
    """
    state = ""
    if job_records.submissions(folder):
        if in_use(folder):
            state = "running"
        else:
            state, _ = job_records.run_state(folder, queue)
    # Last, as the run may have ended since it was looked at.
    if find_finished_run(config):
        return "done"
    # Without squeue no job of an earlier submission waits here.
    is_unknown = state == "unknown" and shutil.which("squeue")
    return state if state in ("running", "waiting") or is_unknown else "submitted"


def _need_known(states: Mapping[Path, str]) -> None:
    """Refuse to send runs whose earlier jobs may still wait: they would run twice.

    Args:
        states: State of each run, from :func:`_submission_state`.

    Raises:
        UserError: The queue cannot be read.
    """
    unknown = [folder for folder, state in states.items() if state == "unknown"]
    if unknown:
        runs = "1 run was" if len(unknown) == 1 else f"{len(unknown)} runs were"
        allowed = f"an answer: {runs} submitted before and may still wait"
        raise UserError("squeue", "no answer", allowed, "repeat the command")


def _entry(
    folder: Path, composed: ComposedConfig, config: Config, state: str
) -> Submission:
    """Return the record of a submission; of a run that needs no job that is its last one, with the new overrides.

    Args:
        folder: The run's folder.
        composed: The run as composed.
        config: Its config.
        state: Result of :func:`_submission_state`.
    """
    earlier = job_records.submissions(folder)
    if earlier and state != "submitted":
        return replace(
            earlier[-1], overrides=composed.overrides, multirun=composed.multirun
        )
    own_folder = paths.own_folder(composed.folders)
    return Submission(
        id="",
        kind=config.runtime.cluster.kind if config.runtime.cluster else "",
        overrides=composed.overrides,
        multirun=composed.multirun,
        own=str(own_folder) if own_folder else None,
    )


def _config_to_submit(composed: ComposedConfig, num_shards: int) -> Config:
    """Return the checked config of a run, with the device that its jobs get.

    All that it reads must be on this machine, which may lack the GPU.

    Args:
        composed: The config as composed.
        num_shards: Jobs among which the run is divided.

    Raises:
        UserError: The run cannot be submitted.
    """
    checked = check_config(composed)
    cluster = checked.runtime.cluster
    if cluster is None:
        allowed = "slurm, local"
        raise UserError("runtime/cluster", None, allowed, "add runtime/cluster=slurm")
    if checked.budget:
        allowed = "null: what is chosen for a budget depends on the machine that it is measured on"
        budget = checked.budget.text
        raise UserError("budget", budget, allowed, "set the sizes: task.limit=...")
    device = checked.runtime.device
    if device.startswith("cuda") and not cluster.gpus:
        allowed = f"1 or more with runtime.device={device}"
        raise UserError("runtime.cluster.gpus", cluster.gpus, allowed, "set it")
    if device == "auto":
        device = "cuda" if cluster.gpus else "cpu"
    # The device of another machine cannot be checked here.
    device_to_check = device if cluster.kind == "local" else "auto"
    runtime = {**composed.raw["runtime"], "device": device_to_check}
    raw = {**composed.raw, "runtime": runtime}
    config = prepare(replace(composed, raw=raw)).config
    if num_shards > 1 and not is_shardable(config):
        allowed = "1 for a study, and for a served model"
        raise UserError("--shards", num_shards, allowed, "leave it out")
    return config.with_fields("runtime", {"device": device})


def _submit_jobs(
    cluster: Cluster, name: str, entries: Sequence[tuple[Path, Submission]]
) -> None:
    """Hand the jobs of runs to the cluster, in the order of runs and shards.

    Args:
        cluster: Resources of each job.
        name: Name of the jobs.
        entries: Folder and record of each run.

    Raises:
        UserError: submitit is not installed, or the cluster refuses.
    """
    try:
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError
    except ImportError as error:
        hint = install_hint("cluster")
        raise UserError(
            "runtime/cluster",
            cluster.kind,
            "a cluster, once submitit is installed",
            hint,
        ) from error
    logs = job_records.log_folder(entries[0][0].parents[2], name)
    logs.mkdir(parents=True)
    timeouts = {f"{cluster.kind}_max_num_timeout": 1000 if cluster.requeue else 0}
    # Local jobs outlive the terminal; Windows has no such signal.
    hangup = getattr(signal, "SIGHUP", None)
    previous_handler = hangup and signal.signal(hangup, signal.SIG_IGN)
    try:
        executor = submitit.AutoExecutor(logs, cluster=cluster.kind, **timeouts)
        executor.update_parameters(**_submitit_parameters(cluster, name))
        submitted = []
        with _without_streams(), executor.batch():
            for folder, entry in entries:
                for shard in range(entry.shards):
                    job = Job(str(folder), f"{shard}/{entry.shards}", entry.own)
                    submitted.append(executor.submit(job))
    except (FailedJobError, FailedSubmissionError, RuntimeError, OSError) as error:
        if cluster.kind == "slurm":  # all jobs are one array: none was submitted
            for folder, _ in entries:
                job_records.forget_submission(folder, name)
            shutil.rmtree(logs, ignore_errors=True)
        hint = "correct what it reports and repeat the command, or set runtime/cluster=local"
        allowed = f"a cluster that accepts the jobs ({' '.join(str(error).split())})"
        raise UserError("runtime/cluster", cluster.kind, allowed, hint) from error
    finally:
        if hangup:
            signal.signal(hangup, previous_handler)
    if cluster.kind != "local":
        return
    for folder, entry in entries:
        assert entry.first is not None, "its jobs were submitted"
        run_jobs = submitted[entry.first : entry.first + entry.shards]
        pids = [int(job.job_id) for job in run_jobs]
        processes = tuple((pid, process_start(pid)) for pid in pids)
        job_records.record_submission(folder, replace(entry, pids=processes))


def _submitit_parameters(cluster: Cluster, name: str) -> dict[str, Any]:
    """Return the parameters of submitit's executor for a cluster, without unset ones.

    Args:
        cluster: What each job asks for.
        name: Name of the jobs.
    """
    requeue = "requeue" if cluster.requeue else "no-requeue"
    parameters = {
        "name": name,
        "timeout_min": cluster.minutes,
        "cpus_per_task": cluster.cpus,
        "gpus_per_node": cluster.gpus or None,
        "mem_gb": cluster.memory,
        "slurm_additional_parameters": {**cluster.more, requeue: True},
        "slurm_array_parallelism": cluster.at_once,
        "slurm_setup": list(cluster.setup) or None,
        "slurm_partition": cluster.partition,
        "slurm_account": cluster.account,
        "slurm_qos": cluster.qos,
        "slurm_constraint": cluster.constraint,
    }
    return {key: value for key, value in parameters.items() if value is not None}


@contextmanager
def _without_streams() -> Iterator[None]:
    """Discard the output of a block, and of processes that start in the block.

    A process that inherited the output would keep a pipe behind this command waiting until it ends.
    """
    copies = {number: os.dup(number) for number in (1, 2)}
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in copies:
            os.dup2(null, number)
        yield
    finally:
        for number, copy in copies.items():
            os.dup2(copy, number)
            os.close(copy)
        os.close(null)


def resume(args: list[str]) -> int:
    """Go on with a run, told by its folder alone: what the jobs of a cluster do.

    usage: posbench resume RUN [--shard I/N] [--part I/N] [--yes] [--config-dir DIR]

      --shard I/N  make the rows of shard I of N (from 0); whoever makes the last one finishes the run
      --part I/N   the same, and leave the search and the end to the process that owns the run: what
                   runtime.workers does
      --yes        what the rest of a served run costs is not asked about

    While another process owns the run this one waits; then it does what is left, if anything is.

    example: posbench resume outputs/kv_retrieval/v001/tiny__scale_channel__51cc60e3
    """
    part_text, remaining = option(args, "--part")
    shard_text, remaining = option(remaining, "--shard")
    agrees, remaining = flag(remaining, "--yes")
    leaves_end = part_text is not None
    text = part_text if part_text is not None else shard_text or "0/1"
    shard = _shard("--part" if leaves_end else "--shard", text)
    if len(remaining) != 1 or remaining[0].startswith("-"):
        raise UserError(
            "RUN", " ".join(remaining), "one run folder", "posbench ls runs lists them"
        )
    folder = find_run(remaining[0], Path(Runtime.outputs))
    is_announced = False
    while True:
        # A shard can be made beside the owner; a whole run cannot.
        while in_use(folder) and not leaves_end:
            if not is_announced:
                print(f"waiting for another process that owns {folder}", flush=True)
                is_announced = True
            time.sleep(POLL_SECONDS)
        try:
            command = _command(folder)
            config = recorded_config(folder)
            if agrees:
                runtime = replace(config.runtime, yes=True)
                config = replace(config, runtime=runtime)
            if leaves_end and find_finished_run(config):
                print("finished before: no part is left to make")
            elif leaves_end:
                make_shard(config, shard, make_console())
            elif shard.count > 1:
                make_shard_and_finish(config, shard, command, make_console(), main)
            else:
                execute(
                    config, command=command, console=make_console(), worker_main=main
                )
            return 0
        except IncompleteRun as error:
            print(f"posbench: {error}", file=sys.stderr)
            return 1
        except UserError as error:
            if error.allowed != ONE_PROCESS:
                raise
            # Another process was faster to take the run.
            time.sleep(POLL_SECONDS)


def _command(folder: Path) -> str:
    """The command that made a run, else the one that resumes it."""
    return open_run_dir(folder).command or f"posbench resume {folder}"


def _shard(flag: str, text: str) -> Shard:
    """The shard that the value of a flag names, as ``0/2``."""
    match = re.fullmatch("([0-9]{1,4})/([0-9]{1,4})", text)
    if not match or int(match[1]) >= int(match[2]):
        allowed = "I/N, shard I of N, counted from 0, as 0/2"
        raise UserError(flag, text, allowed, "0/1 makes the whole run")
    return Shard(int(match[1]), int(match[2]))


def jobs(args: list[str]) -> int:
    """List the runs that were submitted, and how each stands by its folder.

    usage: posbench jobs [OUTPUTS or RUN] [--json] [--config-dir DIR]

    waiting (in the queue), running, done, failed, lost (no job of it is left: it was killed), unknown (the
    queue cannot be asked), damaged. Of a failed one the last line of its log is told. Exit status 1 where one
    failed or was lost: the same `posbench submit` sends it again, and it goes on where it stopped.

    example: posbench jobs outputs
    """
    rows = _submitted_runs([arg for arg in args if arg != "--json"])
    show_lists({"jobs": rows}, "--json" in args)
    has_failed = any(row["state"] in ("failed", "lost", "damaged") for row in rows)
    return 1 if has_failed else 0


def _submitted_runs(args: Sequence[str]) -> list[dict[str, object]]:
    """Return a row for each submitted run that arguments of `posbench jobs` name: state, last message, and logs.

    Raises:
        UserError: The arguments are wrong, or nothing was submitted.
    """
    run_folders = job_records.submitted_runs(_root_of(args))
    queue = job_records.queued_jobs()
    rows: list[dict[str, object]] = []
    for run_folder in run_folders:
        state, message = job_records.run_state(run_folder, queue)
        logs: Path | str = ""
        if state in ("failed", "lost"):
            logs = job_records.submissions(run_folder)[-1].logs(run_folder)
        rows.append(
            {
                "run": run_folder.name,
                "state": state,
                "folder": run_folder,
                "said": message,
                "logs": logs,
            }
        )
    return rows


def _root_of(args: Sequence[str]) -> Path:
    """The outputs folder, or the run, that arguments of `posbench jobs` name.

    Raises:
        UserError: They are wrong.
    """
    if len(args) > 1 or any(name.startswith("-") for name in args):
        raise UserError("DIR", " ".join(args), "one folder", "posbench jobs --help")
    outputs = Path(Runtime.outputs)
    return find_run(args[0] if args else Runtime.outputs, outputs).absolute()


def collect(args: list[str]) -> int:
    """Gather what submitted runs left: the summary of each sweep whose runs are all done, as -m makes it.

    usage: posbench collect [OUTPUTS or RUN] [--config-dir DIR]

    It waits for nothing, and says what is missing: exit status 1 where something is.

    example: posbench collect outputs
    """
    rows = {Path(str(row["folder"])): row for row in _submitted_runs(args)}
    for folder, row in rows.items():
        if row["state"] in ("failed", "lost") and _finish_from_shards(folder):
            row["state"] = "done"
    for folder, row in rows.items():
        if row["state"] != "done":
            message = f" ({row['said']})" if row["said"] else ""
            print(f"posbench: {folder}: {row['state']}{message}", file=sys.stderr)
    # Several commands may have submitted the same runs: one summary covers all.
    summaries: dict[tuple[Path, ...], list[dict[str, Any]]] = {}
    commands: dict[tuple[Path, ...], str] = {}
    cut_short: dict[str, str] = {}
    sent_whole = set[str]()
    for submissions in job_records.runs_by_submission(list(rows)).values():
        entry = submissions[0][0]
        folders = tuple(folder for _, folder in submissions)
        all_done = all(rows[folder]["state"] == "done" for folder in folders)
        if len(submissions) < entry.runs:
            cut_short[entry.command] = f"{len(submissions)} of {entry.runs} runs"
            continue
        sent_whole.add(entry.command)
        if entry.multirun and all_done:
            commands[folders] = entry.command or _command(folders[0])
            summaries[folders] = [
                {
                    "multirun": True,
                    "status": 0,
                    "overrides": submission.overrides,
                    "folder": str(folder),
                }
                for submission, folder in submissions
            ]
    for folders, records in summaries.items():
        summarise(records, make_console(), command=commands[folders])
    num_done = sum(row["state"] == "done" for row in rows.values())
    print(f"{num_done} of {len(rows)} runs done", file=sys.stderr)
    # Folders were removed, unless one run was asked for, or the same command sent them all again.
    is_one_run = list(rows) == [_root_of(args)]
    lacking = set() if is_one_run else cut_short.keys() - sent_whole
    for command in sorted(lacking):
        left = f"{cut_short[command]} of a command are left"
        print(f"posbench: {left}; next: {command}", file=sys.stderr)
    return 0 if num_done == len(rows) and not lacking else 1


def _finish_from_shards(folder: Path) -> bool:
    """Finish a run whose shards are all made; return False if it has no shards, or some are missing."""
    submission = job_records.submissions(folder)[-1]
    if submission.shards == 1 or missing_shards(
        open_run_dir(folder), submission.shards
    ):
        return False
    # The run's classes and YAML files may lie in the user's folder.
    paths.config_folders(submission.own)
    execute(
        recorded_config(folder),
        command=_command(folder),
        console=make_console(),
        worker_main=main,
    )
    return True
