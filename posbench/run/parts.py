"""Parts of a run's rows that several processes make, each in a folder of its own inside the run's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from posbench.files.atomic import Row
from posbench.run.folder import RunDir
from posbench.run.lease import in_use

PARTS = ".parts"
"""Folder of the parts in that of a run; hidden, so no part of its results, and gone when it is done."""
FOUND = "found.json"
"""What the search found, for those that make parts."""
PEAKS = {"resident", "cuda"}
"""Memory, which does not add up over processes: see :func:`posbench.files.hardware.peak_memory`."""
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


def made(out: RunDir, of: int) -> int:
    """How many of so many parts are made."""
    return sum(Part(number, of).place(out).status()["state"] == "done" for number in range(of))


def gather(out: RunDir, file: str) -> None:
    """Append to a run's file the rows that parts have and it lacks."""
    parts = folders(out.path)
    there = {_key(row) for row in out.rows(file) if "error" not in row} if parts else set()
    for folder in parts:
        rows = {_key(row): row for row in RunDir(folder, out.id).rows(file) if "error" not in row}
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
        for stage, took in RunDir(folder, out.id).status().get("spent", {}).items():
            peaks = {name: took.pop(name) for name in PEAKS & took.keys()}
            out.spend(stage, took, peaks)
    shutil.rmtree(out.path / PARTS, ignore_errors=True)


@dataclass
class Helpers:
    """Processes of this machine that make the parts from 1 on of a run that this process owns."""

    out: RunDir
    of: int
    gpus: int  # which they share out, one each
    threads: int  # of each
    console: Console
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, found: Mapping[str, Any] | None) -> None:
        """Start them, once; they end with this process where the system can tell."""
        leave_found(self.out, found)
        command = [sys.executable, "-c", f"from posbench.cli.main import run_below; run_below({os.getpid()})"]
        for number in range(1, self.of) if not self.running else ():
            path = os.pathsep.join(filter(None, sys.path))  # the user's own modules, too
            env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(self.threads)}
            if self.gpus:
                listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
                names = listed if len(listed) == self.gpus else [*map(str, range(self.gpus))]
                env["CUDA_VISIBLE_DEVICES"] = names[number % self.gpus]
            place = Part(number, self.of).place(self.out).path
            place.mkdir(parents=True, exist_ok=True)
            with open(place / "log", "wb") as log:
                asked = [*command, "resume", str(self.out.path), f"--part={number}/{self.of}"]
                self.running[number] = subprocess.Popen(asked, stdout=log, stderr=log, env=env)

    def wait(self, file: str) -> None:
        """Wait until each has made its rows of a file, or has ended; says of one that died."""
        for number, child in list(self.running.items()):
            place = Part(number, self.of).place(self.out)
            while child.poll() is None and not place.stage(file).get("done"):
                time.sleep(LOOK)
            if child.poll():
                said = (place.path / "log").read_text(errors="replace").strip().splitlines()
                told = f"worker {number} ended with status {child.returncode}: what it lacks is made here"
                self.console.print(f"{told} ({said[-1] if said else 'without a word'})", markup=False)
                del self.running[number]

    def stop(self) -> None:
        """End those that run still."""
        for child in self.running.values():
            child.terminate()
        for child in self.running.values():
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
