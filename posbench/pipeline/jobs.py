"""Runs that were submitted to a cluster: what their folders record of it, and how they stand."""

from __future__ import annotations

import getpass
import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from posbench.errors import UserError
from posbench.files.atomic import write_text
from posbench.run.folder import CONFIG, RunDir, opened, runs_in
from posbench.run.lease import in_use, runs
from posbench.run.shards import is_running, missing_shards

SUBMITTED = ".submitted.json"
"""File of a run folder: a list of the times that the run was submitted. Hidden, so no part of its results."""
ENDED = ("failed", "incomplete", "mixed")


@dataclass(frozen=True)
class Submission:
    """One time that a run was submitted."""

    id: str  # of all runs of one command
    kind: str  # of cluster
    overrides: tuple[str, ...]
    multirun: bool  # whether it is one of a sweep
    own: str | None  # the user's --config-dir
    number: int = 0  # among the runs of the command
    runs: int = 1  # how many these are
    jobs: str = ""  # name of its jobs and of the folder of their logs: the id of the command that sent them
    first: int | None = None  # number of its first job; None: it needed none
    shards: int = 1  # its jobs
    pids: tuple[tuple[int, str], ...] = ()  # of local jobs: process and start

    def logs(self, folder: Path) -> Path:
        """Where the logs of its jobs are, by the run's folder."""
        return log_folder(folder.parents[2], self.jobs)


def log_folder(outputs: Path, submission: str) -> Path:
    """Where the logs of a submission go."""
    return outputs / ".jobs" / submission


def submissions(folder: Path) -> list[Submission]:
    """The times that a run was submitted, the last one last.

    Raises:
        UserError: That file is damaged.
    """
    found = RunDir(folder).read_json(SUBMITTED)
    keys = "overrides", "pids"
    return [
        Submission(**{**each, **{key: tuple(map(_frozen, each[key])) for key in keys}})
        for each in found
    ]


def _frozen(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def record(folder: Path, submission: Submission) -> None:
    """Add a submission to those of a run; one of the same id is replaced."""
    _write(
        folder,
        [
            *(each for each in submissions(folder) if each.id != submission.id),
            submission,
        ],
    )


def forget(folder: Path, name: str) -> None:
    """Take back that jobs of a name were to make a run: none was sent."""
    if kept := [each for each in submissions(folder) if each.jobs != name]:
        _write(folder, kept)
    else:
        (folder / SUBMITTED).unlink(missing_ok=True)


def _write(folder: Path, every: Sequence[Submission]) -> None:
    write_text(
        folder / SUBMITTED,
        json.dumps([asdict(each) for each in every], indent=2) + "\n",
    )


def submitted(place: Path) -> list[Path]:
    """The submitted runs of an outputs folder, or the one run that is given.

    Raises:
        UserError: There is no such folder, or nothing in it was submitted.
    """
    there = (
        [place]
        if (place / CONFIG).is_file()
        else runs_in(place)
        if place.is_dir()
        else []
    )
    found = [folder for folder in there if (folder / SUBMITTED).is_file()]
    if not found:
        hint = (
            "posbench submit ... runtime/cluster=slurm"
            if place.is_dir()
            else "no such folder"
        )
        raise UserError(
            "DIR",
            str(place),
            "an outputs folder or a run that jobs were submitted for",
            hint,
        )
    return found


Queue = set[tuple[str, int]] | None
"""Jobs in a queue: their names and numbers; None where it cannot be asked."""


def queue() -> Queue:
    """This user's jobs that Slurm has: waiting, running, or ending."""
    if not shutil.which("squeue"):
        return None
    ask = [
        "squeue",
        "--noheader",
        "--array",
        f"--user={getpass.getuser()}",
        "--format=%j %K",
    ]
    try:
        answer = subprocess.run(
            ask, capture_output=True, text=True, check=False, timeout=20
        )
    except subprocess.TimeoutExpired:
        return None  # as it does where its controller is away
    lines = [line.split() for line in answer.stdout.splitlines()]
    told = {
        (line[0], int(line[1]) if line[1].isdigit() else 0)
        for line in lines
        if len(line) == 2
    }
    return told if answer.returncode == 0 else None


def state(folder: Path, known: Queue) -> tuple[str, str]:
    """How a submitted run stands, and what is to be said of it.

    done, damaged; running (a process owns it or a part); waiting (in the queue); failed; lost (no job
    of it is left); unknown (not done, and the queue cannot be asked).
    """
    run = opened(folder)
    last = submissions(folder)[-1]
    if run.done:
        return ("damaged", ", ".join(run.damaged())) if run.damaged() else ("done", "")
    missing = missing_shards(run, last.shards) if last.shards > 1 else [0]
    parts = (
        f"{last.shards - len(missing)} of {last.shards} shards are made"
        if last.shards > 1
        else ""
    )
    if in_use(folder) or is_running(folder):
        return "running", parts
    numbers = (
        range(last.first, last.first + last.shards)
        if last.first is not None
        else range(0)
    )
    if last.kind == "local":
        waits: bool | None = any(runs(pid, start) for pid, start in last.pids)
    else:
        waits = (
            None
            if known is None
            else any((last.jobs, number) in known for number in numbers)
        )
    status = run.status()
    said = "; ".join(filter(None, [parts, last_line(folder, last, missing)]))
    if waits:
        return "waiting", parts
    if status["state"] in ENDED:
        return "failed", said or str(status.get("error") or "")
    return ("unknown", "squeue does not answer") if waits is None else ("lost", said)


def last_line(folder: Path, submission: Submission, shards: Sequence[int]) -> str:
    """What the jobs of some shards of a run said last on their error stream."""
    if submission.first is None:
        return ""
    logs = submission.logs(folder)
    files = list[Path]()
    for shard in shards:
        files += logs.glob(f"*_{submission.first + shard}_0_log.err")
        files += [
            logs / f"{pid}_0_log.err" for pid, _ in submission.pids[shard : shard + 1]
        ]
    files += [
        file
        for file in logs.glob("*_0_log.err")
        if file.name.count("_") == 2 and not submission.pids
    ]
    files = sorted(
        {file for file in files if file.is_file()},
        key=lambda file: file.stat().st_mtime,
    )
    lines = [
        line
        for file in files
        for line in file.read_text(errors="replace").splitlines()
        if line.strip()
    ]
    # What submitit says of itself; srun adds that its task failed.
    own = [
        line for line in lines if not line.startswith(("srun:", "submitit ", "INFO "))
    ]
    return (own or [""])[-1]


def grouped(folders: Sequence[Path]) -> dict[str, list[tuple[Submission, Path]]]:
    """The runs of each submission, in their order."""
    found = dict[str, list[tuple[Submission, Path]]]()
    for folder in folders:
        for each in submissions(folder):
            found.setdefault(each.id, []).append((each, folder))
    return {
        name: sorted(parts, key=lambda part: part[0].number)
        for name, parts in sorted(found.items())
    }
