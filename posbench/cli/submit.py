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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from posbench import paths
from posbench.cli.main import main
from posbench.cli.options import option
from posbench.errors import Faults, UserError
from posbench.pipeline import jobs as state
from posbench.pipeline.compose import Composed, compose
from posbench.pipeline.config import Config
from posbench.pipeline.execute import (
    execute,
    finished,
    is_shardable,
    make_run_folder,
    recorded_config,
)
from posbench.pipeline.jobs import Submission
from posbench.pipeline.prepare import prepare
from posbench.pipeline.sharing import make_shard, make_shard_and_finish
from posbench.report.console import show_lists, terminal
from posbench.report.index import run_named
from posbench.report.sweep import summarise
from posbench.run.base import IncompleteRun
from posbench.run.folder import PROVENANCE, opened
from posbench.run.lease import in_use, started
from posbench.run.runtime import Cluster, Runtime
from posbench.run.shards import Shard, missing_shards

PAUSE = 5.0
"""Seconds between looks at a run that another process owns."""


@dataclass(frozen=True)
class Job:
    """What a job does: go on with a run, told by its folder alone."""

    folder: str
    shard: str  # as ``0/2``, the first of two
    own: str | None  # the user's --config-dir

    def __call__(self) -> None:
        """Do it; the exit status is that of the command line."""
        own = [f"--config-dir={self.own}"] if self.own else []
        if status := main(["resume", self.folder, f"--shard={self.shard}", *own]):
            sys.exit(status)

    def checkpoint(self) -> Any:
        """What goes into the queue again where the time is up: the same."""
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
    found = list[tuple[Composed, Config]]()
    faults = Faults()
    given, rest = option(args, "--shards")
    if not re.fullmatch("[1-9][0-9]{0,3}", given or "1"):
        raise UserError(
            "--shards",
            given,
            "a whole number from 1 to 9999",
            "leave it out for one job a run",
        )
    shards = int(given or 1)

    def each(composed: Composed) -> None:
        with faults.collecting():
            found.append((composed, _checked(composed, shards)))

    wrong = [job["error"] for job in compose(rest, each) if job["status"]]
    for line in (line for error in wrong for line in error.splitlines()):
        print(f"posbench: {line}", file=sys.stderr)
    faults.raise_any()
    if wrong:
        return 2
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    command = ["posbench", "submit", *args]
    sent = list[tuple[Path, Submission]]()
    rows = list[dict[str, object]]()
    known = state.queue()
    for number, (composed, config) in enumerate(found):
        folder = make_run_folder(config, shlex.join(command)).absolute()
        how, entry = _entry(folder, composed, config, known)
        entry = replace(entry, id=name, number=number, runs=len(found))
        if how == "submitted":
            entry = replace(entry, jobs=name, first=len(sent) * shards, shards=shards)
            sent.append((folder, entry))
        state.record(folder, entry)
        rows.append(
            {"run": folder.name, "state": how, "settings": " ".join(composed.overrides)}
        )
    if sent:
        _send(found[0][1].runtime.cluster, name, sent)  # type: ignore[arg-type]
    show_lists({f"{len(sent)} of {len(found)} runs submitted as {name}": rows})
    outputs = shlex.quote(found[0][1].runtime.outputs)
    print(
        f"next: posbench jobs {outputs}; then: posbench collect {outputs}",
        file=sys.stderr,
    )
    return 0


def _entry(
    folder: Path, composed: Composed, config: Config, known: state.Queue
) -> tuple[str, Submission]:
    """How a run stands that is asked for, ``submitted`` where it needs a job, and what to record of it."""
    there = state.submissions(folder)
    how = (
        "running" if in_use(folder) else state.state(folder, known)[0] if there else ""
    )
    how = (
        "done"
        if finished(config)
        else how
        if how in ("running", "waiting")
        else "submitted"
    )
    own = str(composed.folders[-1]) if len(composed.folders) > 1 else None
    kind = config.runtime.cluster.kind if config.runtime.cluster else ""
    if there and how != "submitted":  # its jobs are those of the last time
        return how, replace(
            there[-1], overrides=composed.overrides, multirun=composed.multirun
        )
    return how, Submission("", kind, composed.overrides, composed.multirun, own)


def _checked(composed: Composed, shards: int) -> Config:
    """A run that can go: all but the GPU, which this machine may lack, is here."""
    runtime = composed.raw["runtime"]
    if not isinstance(cluster := runtime.get("cluster"), dict):
        raise UserError(
            "runtime/cluster", cluster, "slurm, local", "add runtime/cluster=slurm"
        )
    asked = str(runtime["device"])
    gpus = cluster.get("gpus")
    if asked.startswith("cuda") and not gpus:
        raise UserError(
            "runtime.cluster.gpus",
            gpus,
            f"1 or more with runtime.device={asked}",
            "set it",
        )
    device = asked if asked != "auto" else "cuda" if gpus else "cpu"
    tried = (
        device if cluster["kind"] == "local" else "auto"
    )  # that of another machine cannot be tried here
    config = prepare(
        replace(composed, raw={**composed.raw, "runtime": {**runtime, "device": tried}})
    ).config
    if shards > 1 and not is_shardable(config):
        raise UserError(
            "--shards", shards, "1 for a study, and for a served model", "leave it out"
        )
    raw = {**config.raw, "runtime": {**config.raw["runtime"], "device": device}}
    return replace(config, runtime=replace(config.runtime, device=device), raw=raw)


def _send(cluster: Cluster, name: str, sent: Sequence[tuple[Path, Submission]]) -> None:
    """Hand jobs to the cluster.

    Raises:
        UserError: submitit is not installed, or the cluster refuses.
    """
    try:
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError
    except ImportError as error:
        hint = "python -m pip install 'posbench[cluster]'"
        raise UserError(
            "runtime/cluster", cluster.kind, "submitit, which is not installed", hint
        ) from error
    logs = state.log_folder(sent[0][0].parents[2], name)
    logs.mkdir(parents=True)
    rounds = {f"{cluster.kind}_max_num_timeout": 1000 if cluster.requeue else 0}
    given: dict[str, Any] = {
        "name": name,
        "timeout_min": cluster.minutes,
        "cpus_per_task": cluster.cpus,
        "gpus_per_node": cluster.gpus or None,
        "mem_gb": cluster.memory,
        "slurm_additional_parameters": {
            **cluster.more,
            "requeue" if cluster.requeue else "no-requeue": True,
        },
        "slurm_array_parallelism": cluster.at_once,
        "slurm_setup": list(cluster.setup) or None,
    }
    given |= {
        f"slurm_{key}": getattr(cluster, key)
        for key in ("partition", "account", "qos", "constraint")
    }
    before = signal.signal(
        signal.SIGHUP, signal.SIG_IGN
    )  # local jobs outlive the terminal
    try:
        executor = submitit.AutoExecutor(logs, cluster=cluster.kind, **rounds)
        executor.update_parameters(
            **{key: value for key, value in given.items() if value is not None}
        )
        with _without_streams(), executor.batch():
            jobs = [
                executor.submit(Job(str(folder), f"{shard}/{each.shards}", each.own))
                for folder, each in sent
                for shard in range(each.shards)
            ]
    except (FailedJobError, FailedSubmissionError, RuntimeError, OSError) as error:
        hint = "see what it says, and give the same command again, or take runtime/cluster=local"
        if cluster.kind == "slurm":  # one array: nothing was sent
            for folder, _ in sent:
                state.forget(folder, name)
            shutil.rmtree(logs, ignore_errors=True)
        allowed = f"a cluster that takes jobs ({' '.join(str(error).split())})"
        raise UserError("runtime/cluster", cluster.kind, allowed, hint) from error
    finally:
        signal.signal(signal.SIGHUP, before)
    if cluster.kind == "local":
        for folder, each in sent:
            assert each.first is not None, "it was sent"
            mine = [
                int(job.job_id) for job in jobs[each.first : each.first + each.shards]
            ]
            state.record(
                folder, replace(each, pids=tuple((pid, started(pid)) for pid in mine))
            )


@contextmanager
def _without_streams() -> Iterator[None]:
    """Processes that begin in the block have no part in this one's output: a pipe would wait for them."""
    kept = {number: os.dup(number) for number in (1, 2)}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in kept:
            os.dup2(nowhere, number)
        yield
    finally:
        for number, stream in kept.items():
            os.dup2(stream, number)
            os.close(stream)
        os.close(nowhere)


def resume(args: list[str]) -> int:
    """Go on with a run, told by its folder alone: what the jobs of a cluster do.

    usage: posbench resume RUN [--shard I/N] [--part I/N] [--config-dir DIR]

      --shard I/N  make the rows of shard I of N (from 0); whoever makes the last one finishes the run
      --part I/N   the same, and leave the end to the process that owns the run: what runtime.workers does

    While another process owns the run this one waits; then it does what is left, if anything is.

    example: posbench resume outputs/kv_retrieval/v001/tiny__scale_channel__51cc60e3
    """
    own, rest = option(args, "--config-dir")
    given, rest = option(rest, "--part")
    shard, rest = option(rest, "--shard")
    paths.config_folders(own)
    alone = given is not None
    part = (
        _part("--part", given)
        if given is not None
        else _part("--shard", shard or "0/1")
    )
    if len(rest) != 1 or rest[0].startswith("-"):
        raise UserError(
            "RUN", " ".join(rest), "one run folder", "posbench ls runs lists them"
        )
    folder = run_named(rest[0], Path(Runtime.outputs))
    told = False
    while True:
        while in_use(folder) and not alone:
            if not told:
                print(f"waiting for another process that owns {folder}", flush=True)
            told = True
            time.sleep(PAUSE)
        try:
            command = _command(folder)
            config = recorded_config(folder)
            if alone:
                make_shard(config, part, terminal())
            elif part.count > 1:
                make_shard_and_finish(config, part, command, terminal(), main)
            else:
                execute(config, command=command, console=terminal(), worker_main=main)
            return 0
        except IncompleteRun as error:
            print(f"posbench: {error}", file=sys.stderr)
            return 1
        except UserError as error:
            if error.allowed != "one process at a time":  # it was faster
                raise
            time.sleep(PAUSE)


def _command(folder: Path) -> str:
    return str(
        opened(folder).facts(PROVENANCE).get("command") or f"posbench resume {folder}"
    )


def _part(flag: str, text: str) -> Shard:
    found = re.fullmatch("([0-9]{1,4})/([0-9]{1,4})", text)
    if not found or int(found[1]) >= int(found[2]):
        raise UserError(
            flag, text, "I/N, the I-th of N from 0 on, as 0/2", "0/1 is all of a run"
        )
    return Shard(int(found[1]), int(found[2]))


def jobs(args: list[str]) -> int:
    """List the runs that were submitted, and how each stands by its folder.

    usage: posbench jobs [OUTPUTS or RUN] [--json]

    waiting (in the queue), running, done, failed, lost (no job of it is left: it was killed), unknown (the
    queue cannot be asked), damaged. Of a failed one the last line of its log is told. Exit status 1 where one
    failed or was lost: the same `posbench submit` sends it again, and it goes on where it stopped.

    example: posbench jobs outputs
    """
    rows = _states(args)
    show_lists({"jobs": rows}, "--json" in args)
    return int(any(row["state"] in ("failed", "lost", "damaged") for row in rows))


def _states(args: Sequence[str]) -> list[dict[str, object]]:
    names = [arg for arg in args if arg != "--json"]
    if len(names) > 1 or any(re.match("-", name) for name in names):
        raise UserError(
            "DIR", " ".join(names), "one folder, --json", "posbench jobs --help"
        )
    place = run_named(
        names[0] if names else Runtime.outputs, Path(Runtime.outputs)
    ).absolute()
    folders = state.submitted(place)
    known = state.queue()
    rows = list[dict[str, object]]()
    for folder in folders:
        how, said = state.state(folder, known)
        logs = (
            state.submissions(folder)[-1].logs(folder)
            if how in ("failed", "lost")
            else ""
        )
        rows.append(
            {
                "run": folder.name,
                "state": how,
                "folder": folder,
                "said": said,
                "logs": logs,
            }
        )
    return rows


def collect(args: list[str]) -> int:
    """Gather what submitted runs left: the summary of each sweep whose runs are all done, as -m makes it.

    usage: posbench collect [OUTPUTS or RUN]

    It waits for nothing, and says what is missing: exit status 1 where something is.

    example: posbench collect outputs
    """
    rows = {row["folder"]: row for row in _states(args)}
    for folder in [
        Path(str(folder))
        for folder, row in rows.items()
        if row["state"] in ("failed", "lost")
    ]:
        last = state.submissions(folder)[-1]
        if last.shards > 1 and not missing_shards(opened(folder), last.shards):
            paths.config_folders(last.own)
            execute(
                recorded_config(folder),
                command=_command(folder),
                console=terminal(),
                worker_main=main,
            )
            rows[folder] |= {"state": "done"}
    for row in rows.values():
        if row["state"] != "done":
            told = f" ({row['said']})" if row["said"] else ""
            print(f"posbench: {row['folder']}: {row['state']}{told}", file=sys.stderr)
    summaries = dict[tuple[Path, ...], list[dict[str, Any]]]()
    for parts in state.grouped([Path(str(folder)) for folder in rows]).values():
        runs = tuple(folder for _, folder in parts)
        whole = len(parts) == parts[0][0].runs and all(
            rows[folder]["state"] == "done" for folder in runs
        )
        if whole and parts[0][0].multirun:
            facts = {"multirun": True, "status": 0}
            summaries[runs] = [
                {**facts, "overrides": e.overrides, "folder": str(f)} for e, f in parts
            ]
    for records in summaries.values():
        summarise(records, terminal())
    missing = sum(row["state"] != "done" for row in rows.values())
    print(f"{len(rows) - missing} of {len(rows)} runs done", file=sys.stderr)
    return int(missing > 0)
