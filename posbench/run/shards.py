"""Shards of a run's rows that several processes make, each in a folder of its own inside the run's.

joblib returns results when a task ends; here rows outlive a kill of any process, each process has its own GPU and log,
and the others make the rows that a dead one lacks.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any

from rich.console import Console

from posbench.files.atomic import Row
from posbench.late import torch
from posbench.run.folder import (
    MIXED,
    Proofs,
    RowKey,
    RunDir,
    is_proven,
    warn_of_unproven,
)
from posbench.run.lease import in_use

log = logging.getLogger(__name__)

SHARDS = ".parts"
"""Folder of the shards inside the run's; hidden, so no part of its results, and removed when it is done."""
SEARCH_RESULT_FILE = "found.json"
"""Result of the search, for the processes that make shards."""
PARAMETERS = "parameters"
"""Field of :data:`SEARCH_RESULT_FILE`: the parameters; null where there was no search."""
HARDWARE = "hardware"
"""Field of a shard's status: the machines that made its rows."""
PEAKS = ("resident", "cuda")
"""Memory, which does not add up over processes: see :func:`posbench.files.hardware.peak_memory`."""
LOG = "log"
"""Output of a worker process of this machine, in its shard's folder."""
POLL_SECONDS = 0.1
SECONDS_TO_END = 30

WorkerMain = Callable[[list[str]], int]
"""Main function of a worker process: takes the command-line arguments, returns the exit status. It is pickled."""


@dataclass(frozen=True)
class Shard:
    """Shard ``index`` of ``count``: the groups of batches whose number is ``index`` modulo ``count``."""

    index: int = 0
    count: int = 1

    def folder(self, out: RunDir) -> RunDir:
        """Return the folder of this shard in a run's."""
        return RunDir(out.path / SHARDS / f"{self.index}-of-{self.count}", out.id)


def shard_folders(run: Path) -> list[Path]:
    """Return the folders of all shards of a run."""
    return sorted(folder for folder in (run / SHARDS).glob("*-of-*") if folder.is_dir())


def is_running(run: Path) -> bool:
    """Return whether a process owns a shard of a run."""
    return any(in_use(folder) for folder in shard_folders(run))


def missing_shards(out: RunDir, count: int) -> list[int]:
    """Return the indices of the shards that are not done, of ``count``."""
    return [
        index
        for index in range(count)
        if Shard(index, count).folder(out).status()["state"] != "done"
    ]


def merge_rows(out: RunDir, file: str, proofs: Proofs) -> None:
    """Append to a run's file the rows that shards have and it lacks.

    Rows without the run's proof, and rows of a shard during which a file changed, are skipped, so that they are made
    again.

    Args:
        out: The run's folder.
        file: Name of the JSON-lines file.
        proofs: The proof of each row of the run, by method and id.
    """
    folders = shard_folders(out.path)
    if not folders:
        return
    merged = finished_keys(out, file, proofs)
    for folder in folders:
        shard_out = RunDir(folder, out.id)
        if shard_out.status()["state"] == MIXED:
            message = "%s: passed over, a file changed while its rows were made"
            log.warning(message, folder)
            continue
        rows = dict[RowKey, Row]()
        unproven = list[tuple[Row, Mapping[str, Any]]]()
        for row in shard_out.rows_without_error(file):
            key = _row_key(row)
            if key not in proofs:
                continue
            if is_proven(row, proofs[key]):
                rows[key] = row
            else:
                unproven.append((row, proofs[key]))
        if unproven:
            warn_of_unproven(folder / file, unproven)
        new_rows = [row for key, row in rows.items() if key not in merged]
        if new_rows:
            out.append(file, new_rows)
        merged |= rows.keys()


def finished_keys(out: RunDir, file: str, proofs: Proofs) -> set[RowKey]:
    """Return method and id of the rows of a file that are proven, see :func:`merge_rows`."""
    return {
        _row_key(row)
        for row in out.rows_without_error(file)
        if _row_key(row) in proofs and is_proven(row, proofs[_row_key(row)])
    }


def _row_key(row: Row) -> RowKey:
    return row.get("method"), row.get("id")


def write_found_parameters(out: RunDir, parameters: Mapping[str, Any] | None) -> None:
    """Write the search's result for the processes that make shards."""
    (out.path / SHARDS).mkdir(exist_ok=True)
    out.write_facts(f"{SHARDS}/{SEARCH_RESULT_FILE}", {PARAMETERS: parameters})


def has_found_parameters(out: RunDir) -> bool:
    """Return whether the search's result was left for the processes that make shards."""
    return bool(out.facts(f"{SHARDS}/{SEARCH_RESULT_FILE}"))


def read_found_parameters(out: RunDir) -> Mapping[str, Any] | None:
    """Return the search's result; None if there was no search."""
    return out.facts(f"{SHARDS}/{SEARCH_RESULT_FILE}").get(PARAMETERS)


def merge_records(out: RunDir) -> None:
    """Add the machines, costs and peak memory of the shards to the run's record, and remove the shards' folders."""
    for folder in shard_folders(out.path):
        status = RunDir(folder, out.id).status()
        out.add_hardware(status.get(HARDWARE, []))
        for stage, spent in status.get("spent", {}).items():
            peaks = {name: spent[name] for name in PEAKS if name in spent}
            amounts = {name: spent[name] for name in spent if name not in PEAKS}
            out.spend(stage, amounts, peaks)
    shutil.rmtree(out.path / SHARDS, ignore_errors=True)


def _end_with(parent: BaseProcess) -> None:
    """End this process as soon as another one has ended, however it did."""
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _run_worker(
    worker: int, main: WorkerMain, run: str, count: int, gpus: Sequence[str]
) -> None:
    """Make a shard in a worker process, whose output goes to a file in the shard's folder.

    Args:
        worker: Index of the worker; shard 0 is the main process's.
        main: The command line's main function.
        run: Folder of the run.
        count: Number of shards.
        gpus: Names of the GPUs that workers take in turn; empty on CPUs.
    """
    index = worker + 1
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker pool started it"
    Thread(target=_end_with, args=(parent,), daemon=True).start()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[index % len(gpus)]
    folder = Shard(index, count).folder(RunDir(Path(run), ""))
    with open(folder.path / LOG, "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        sys.exit(main(["resume", run, f"--part={index}/{count}"]))
    except Exception:
        traceback.print_exc()
        raise


@dataclass
class WorkerPool:
    """Processes on this machine that make the shards from 1 on of a run that this process owns.

    Attributes:
        out: The run's folder.
        count: Number of shards: this process makes one, and each worker another.
        num_gpus: GPUs that the processes share out, one each.
        console: Reports workers that died.
        main: Main function of each worker.
        processes: The workers that run, by the index of their shard.
    """

    out: RunDir
    count: int
    num_gpus: int
    console: Console
    main: WorkerMain
    processes: dict[int, BaseProcess] = field(default_factory=dict)

    def start(self, found_parameters: Mapping[str, Any] | None) -> None:
        """Start the workers, once; they end with this process.

        Args:
            found_parameters: Result of the search.
        """
        write_found_parameters(self.out, found_parameters)
        if self.processes:
            return
        for index in range(1, self.count):
            folder = Shard(index, self.count).folder(self.out)
            folder.path.mkdir(parents=True, exist_ok=True)
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        # The variable is not set, or does not list the visible GPUs.
        if len(gpus) != self.num_gpus:
            gpus = [str(gpu) for gpu in range(self.num_gpus)]
        context = torch.multiprocessing.spawn(
            _run_worker,
            args=(self.main, str(self.out.path), self.count, gpus),
            nprocs=self.count - 1,
            join=False,
        )
        self.processes = dict(enumerate(context.processes, start=1))

    def wait(self, file: str) -> None:
        """Wait until each worker has made its rows of a file, or has ended; print and forget one that died."""
        for index, process in list(self.processes.items()):
            folder = Shard(index, self.count).folder(self.out)
            while process.is_alive() and not folder.stage(file).get("done"):
                time.sleep(POLL_SECONDS)
            if process.exitcode:
                text = (folder.path / LOG).read_text(errors="replace")
                lines = text.strip().splitlines() or ["without a word"]
                message = f"worker {index} ended with status {process.exitcode}: what it lacks is made here"
                self.console.print(f"{message} ({lines[-1]})")
                del self.processes[index]

    def finish(self) -> None:
        """Let the workers record their costs once their rows are made."""
        for process in self.processes.values():
            process.join(SECONDS_TO_END)

    def stop(self) -> None:
        """End the workers that still run, by force if they do not end in time."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.join(SECONDS_TO_END)
            if process.is_alive():
                process.kill()
