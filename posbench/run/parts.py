"""Parts of a run's rows that several processes make, each in a folder of its own inside the run's."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from rich.console import Console

from posbench.files.atomic import Row
from posbench.late import torch
from posbench.run.folder import RunDir
from posbench.run.lease import in_use

PARTS = ".parts"
"""Folder of the parts in that of a run; hidden, so no part of its results, and gone when it is done."""
FOUND = "found.json"
"""What the search found, for those that make parts."""
HARDWARE = "hardware"
"""Field of a part's status: the machines that made its rows."""
PEAKS = {"resident", "cuda"}
"""Memory, which does not add up over processes: see :func:`posbench.files.hardware.peak_memory`."""
LOG = "log"
"""What a worker of this machine says, in its part's folder."""
LOOK = 0.1
"""Seconds between looks at what other processes of this machine have made."""


class Part(NamedTuple):
    """Which of so many parts a process makes: every ``of``-th group of batches from ``number`` on."""

    number: int = 0
    of: int = 1

    def place(self, out: RunDir) -> RunDir:
        """The folder of this part."""
        return RunDir(out.path / PARTS / f"{self.number}-of-{self.of}", out.id)


def folders(run: Path) -> list[Path]:
    """The folders of all parts of a run."""
    return sorted(folder for folder in (run / PARTS).glob("*-of-*") if folder.is_dir())


def being_made(run: Path) -> bool:
    """Whether a process owns a part of a run."""
    return any(in_use(folder) for folder in folders(run))


def lacking(out: RunDir, of: int) -> list[int]:
    """Which of so many parts are not made."""
    return [
        number
        for number in range(of)
        if Part(number, of).place(out).status()["state"] != "done"
    ]


def gather(out: RunDir, file: str) -> None:
    """Append to a run's file the rows that parts have and it lacks."""
    parts = folders(out.path)
    there = (
        {_key(row) for row in out.rows(file) if "error" not in row} if parts else set()
    )
    for folder in parts:
        rows = {
            _key(row): row
            for row in RunDir(folder, out.id).rows(file)
            if "error" not in row
        }
        fresh = [row for key, row in rows.items() if key not in there]
        if fresh:
            out.append(file, fresh)
        there |= rows.keys()


def _key(row: Row) -> tuple[object, ...]:
    return row.get("method"), row.get("id")


def leave_found(out: RunDir, found: Mapping[str, Any] | None) -> None:
    """Leave what the search found for those that make parts."""
    (out.path / PARTS).mkdir(exist_ok=True)
    out.write_json(f"{PARTS}/{FOUND}", found or {})


def settle(out: RunDir) -> None:
    """Add what the parts took to what the run took, and remove them."""
    for folder in folders(out.path):
        status = RunDir(folder, out.id).status()
        out.add_hardware(status.get(HARDWARE, []))
        for stage, took in status.get("spent", {}).items():
            peaks = {name: took.pop(name) for name in PEAKS & took.keys()}
            out.spend(stage, took, peaks)
    shutil.rmtree(out.path / PARTS, ignore_errors=True)


def _end_with(parent: BaseProcess) -> None:
    """End this process as soon as another one has ended, however it did."""
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _work(index: int, folder: str, of: int, gpus: Sequence[str]) -> None:
    """What a worker does: its part, its words in a file of the part's folder."""
    parent = multiprocessing.parent_process()
    number = index + 1
    assert parent is not None, "it is started below"
    Thread(target=_end_with, args=(parent,), daemon=True).start()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    with open(Part(number, of).place(RunDir(Path(folder), "")).path / LOG, "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        sys.exit(
            import_module("posbench.cli.main").main(
                ["resume", folder, f"--part={number}/{of}"]
            )
        )
    except Exception:
        traceback.print_exc()
        raise


@dataclass
class Helpers:
    """Processes of this machine that make the parts from 1 on of a run that this process owns."""

    out: RunDir
    of: int
    gpus: int  # which they share out, one each
    console: Console
    running: dict[int, BaseProcess] = field(default_factory=dict)

    def start(self, found: Mapping[str, Any] | None) -> None:
        """Start them, once; they end with this process."""
        leave_found(self.out, found)
        if self.running:
            return
        for number in range(1, self.of):
            Part(number, self.of).place(self.out).path.mkdir(
                parents=True, exist_ok=True
            )
        listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = listed if len(listed) == self.gpus else [*map(str, range(self.gpus))]
        asked = str(self.out.path), self.of, names
        started = torch.multiprocessing.spawn(
            _work, asked, nprocs=self.of - 1, join=False
        )
        self.running = dict(enumerate(started.processes, start=1))

    def wait(self, file: str) -> None:
        """Wait until each has made its rows of a file, or has ended; says of one that died."""
        for number, child in list(self.running.items()):
            place = Part(number, self.of).place(self.out)
            while child.is_alive() and not place.stage(file).get("done"):
                time.sleep(LOOK)
            if child.exitcode:
                said = (
                    (place.path / LOG).read_text(errors="replace").strip().splitlines()
                )
                told = f"worker {number} ended with status {child.exitcode}: what it lacks is made here"
                self.console.print(
                    f"{told} ({said[-1] if said else 'without a word'})", markup=False
                )
                del self.running[number]

    def finish(self) -> None:
        """Let them write what they took: their rows are made."""
        for child in self.running.values():
            child.join(30)

    def stop(self) -> None:
        """End those that run still."""
        for child in self.running.values():
            child.terminate()
        for child in self.running.values():
            child.join(30)
            if child.is_alive():
                child.kill()
