"""Runs submitted to a cluster: the records in their folders, and their states.

submitit's own state of a job asks ``sacct``, which clusters without accounting lack, and knows nothing of the run:
here the run's folder, its lock and ``squeue`` give the state.
"""

from __future__ import annotations

import getpass
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le, MinLen

from posbench.errors import UserError
from posbench.files.atomic import write_json
from posbench.files.parse import read_json
from posbench.run.folder import CONFIG, SUBMITTED, open_run_dir, runs_in
from posbench.run.lease import in_use, is_alive
from posbench.run.shards import is_running, missing_shards
from posbench.schema import Count, no_other_keys

JobState = Literal["done", "damaged", "running", "waiting", "failed", "lost", "unknown"]
"""The state of a submitted run."""
ENDED = ("failed", "incomplete", "mixed")
SQUEUE_TIMEOUT_SECONDS = 20
LAUNCHER_PREFIXES = ("srun:", "submitit ", "INFO ")
"""Prefixes of lines that submitit and srun print themselves, such as that a task failed."""


@no_other_keys
@dataclass(frozen=True)
class Submission:
    """One time that a run was submitted.

    Attributes:
        id: Id of all runs of one command.
        kind: Kind of cluster.
        overrides: The arguments of the run.
        multirun: Whether it is one of a sweep.
        own: The user's --config-dir.
        number: Its number among the runs of the command.
        runs: How many these are.
        jobs: Name of its jobs and of the folder of their logs: the id of the command that sent them.
        first: Number of its first job; None: it needed none.
        shards: Number of its jobs.
        pids: Process number and start of local jobs.
        command: The command that submitted the run; empty in records of earlier versions.
    """

    id: str
    kind: str
    overrides: tuple[str, ...]
    multirun: bool
    own: str | None
    number: int = 0
    runs: int = 1
    jobs: str = ""
    first: Annotated[int, Ge(0), Le(10**9)] | None = None
    shards: Count = 1
    pids: tuple[tuple[int, str], ...] = ()
    command: str = ""

    def logs(self, folder: Path) -> Path:
        """Return where the logs of its jobs are, by the run's folder."""
        return log_folder(folder.parents[2], self.jobs)


def log_folder(outputs: Path, submission: str) -> Path:
    """Return where the logs of a submission go."""
    return outputs / ".jobs" / submission


def submissions(folder: Path) -> list[Submission]:
    """Return the record of each ``posbench submit`` of a run, oldest first; empty if there was none.

    Raises:
        UserError: The file is damaged.
    """
    file = folder / SUBMITTED
    if not file.is_file():
        return []
    hint = f"remove {file}: posbench submit sends that run again"
    entries: list[Submission] = read_json(
        file, Annotated[list[Submission], MinLen(1)], hint=hint
    )
    return entries


def record_submission(folder: Path, submission: Submission) -> None:
    """Add a submission to a run's list; one of the same id is replaced."""
    remaining = [entry for entry in submissions(folder) if entry.id != submission.id]
    _write(folder, [*remaining, submission])


def forget_submission(folder: Path, name: str) -> None:
    """Take back that jobs of a name were to make a run: none was sent."""
    remaining = [entry for entry in submissions(folder) if entry.jobs != name]
    if remaining:
        _write(folder, remaining)
    else:
        (folder / SUBMITTED).unlink(missing_ok=True)


def _write(folder: Path, entries: Sequence[Submission]) -> None:
    write_json(folder / SUBMITTED, [asdict(entry) for entry in entries])


def submitted_runs(root: Path) -> list[Path]:
    """Return the submitted runs of an outputs folder, or the one run that ``root`` is.

    Raises:
        UserError: There is no such folder, or nothing in it was submitted.
    """
    candidates = []
    if (root / CONFIG).is_file():
        candidates = [root]
    elif root.is_dir():
        candidates = runs_in(root)
    folders = [folder for folder in candidates if (folder / SUBMITTED).is_file()]
    if not folders:
        allowed = "an outputs folder or a run for which jobs were submitted"
        hint = "no such folder"
        if root.is_dir():
            hint = "posbench submit ... runtime/cluster=slurm"
        raise UserError("DIR", str(root), allowed, hint)
    return folders


Queue = set[tuple[str, int]] | None
"""Jobs in a queue: their names and numbers; None where it cannot be read."""


def queued_jobs() -> Queue:
    """Return name and array number of this user's jobs in Slurm: waiting, running, or ending.

    None where Slurm is not installed or does not answer.
    """
    if not shutil.which("squeue"):
        return None
    user = f"--user={getpass.getuser()}"
    command = ["squeue", "--noheader", "--array", user, "--format=%j %K"]
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=SQUEUE_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return None  # as it does where its controller is away
    if answer.returncode != 0:
        return None
    jobs = set()
    for line in answer.stdout.splitlines():
        fields = line.split()
        if len(fields) == 2:
            name, number = fields
            jobs.add((name, int(number) if number.isdigit() else 0))
    return jobs


def run_state(folder: Path, queued: Queue) -> tuple[JobState, str]:
    """Return the state of a submitted run, and a note on it.

    Args:
        folder: The run.
        queued: The jobs in the queue.

    Returns:
        ``done``, ``damaged``, ``running`` (a process owns it or a shard), ``waiting`` (in the queue),
        ``failed``, ``lost`` (none of its jobs is left) or ``unknown`` (not done, and the queue cannot be read);
        and the note, which may be empty.
    """
    run = open_run_dir(folder)
    if run.done:
        damaged = run.damaged()
        return ("damaged", ", ".join(damaged)) if damaged else ("done", "")
    submission = submissions(folder)[-1]
    shards = submission.shards
    missing = [0]
    progress = ""
    if shards > 1:
        missing = missing_shards(run, shards)
        progress = f"{shards - len(missing)} of {shards} shards are made"
    if in_use(folder) or is_running(folder):
        return "running", progress
    # A job of an earlier submission makes the run as well as one of the last.
    have_jobs = [_has_jobs(earlier, queued) for earlier in submissions(folder)]
    if True in have_jobs:
        return "waiting", progress
    status = run.status()
    last_words = last_line(folder, submission, missing)
    note = "; ".join(filter(None, [progress, last_words]))
    if status["state"] in ENDED:
        return "failed", note or str(status.get("error") or "")
    if None in have_jobs:
        return "unknown", "squeue does not answer"
    return "lost", note


def _has_jobs(submission: Submission, queued: Queue) -> bool | None:
    """Whether a job of a submission runs or waits; None where that cannot be known.

    Args:
        submission: Processes of this machine, or array jobs of Slurm.
        queued: Jobs in Slurm's queue, from :func:`queued_jobs`.
    """
    if submission.kind == "local":
        return any(is_alive(pid, start) for pid, start in submission.pids)
    if queued is None:
        return None
    # The run needed no jobs.
    if submission.first is None:
        return False
    numbers = range(submission.first, submission.first + submission.shards)
    return any((submission.jobs, number) in queued for number in numbers)


def last_line(folder: Path, submission: Submission, shards: Sequence[int]) -> str:
    """Return the last line that the jobs of some shards of a run wrote to their error stream.

    Args:
        folder: The run.
        submission: Its submission.
        shards: Indices of the shards.
    """
    if submission.first is None:
        return ""
    logs = submission.logs(folder)
    files = set[Path]()
    for shard in shards:
        files.update(logs.glob(f"*_{submission.first + shard}_0_log.err"))
        for pid, _ in submission.pids[shard : shard + 1]:
            files.add(logs / f"{pid}_0_log.err")
    if not submission.pids:
        # A single job has no number.
        files.update(f for f in logs.glob("*_0_log.err") if f.name.count("_") == 2)
    existing = sorted(
        (file for file in sorted(files) if file.is_file()),
        key=lambda file: file.stat().st_mtime,
    )
    newest_line = ""
    for file in existing:
        for line in file.read_text(errors="replace").splitlines():
            if line.strip() and not line.startswith(LAUNCHER_PREFIXES):
                newest_line = line
    return newest_line


def runs_by_submission(
    folders: Sequence[Path],
) -> dict[str, list[tuple[Submission, Path]]]:
    """Return for each ``posbench submit`` its runs, by its id.

    Each run is a pair of its record of that submission and its folder, in the order of submission.
    """
    by_id = dict[str, list[tuple[Submission, Path]]]()
    for folder in folders:
        for submission in submissions(folder):
            by_id.setdefault(submission.id, []).append((submission, folder))
    return {
        name: sorted(runs, key=lambda run: run[0].number)
        for name, runs in sorted(by_id.items())
    }
