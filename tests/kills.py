"""Kills of a run at its file operations and at random times, resumed and compared byte by byte with a run
that was left alone. A process of its own for slow tests: ``python -m tests.kills JOB KILLS FOLDER``."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console

import posbench.run.base
from posbench.model.lm import LM
from posbench.model.load import load
from posbench.pipeline.execute import execute
from posbench.run.folder import open_run_dir
from tests.conftest import config_of

CHANGES = {
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.truncate",
    "os.link",
    "os.symlink",
}
"""Audit events that change a folder, beside opening a file to write; ``os.replace`` says ``os.rename``."""

Operation = tuple[str, bool, int]
"""Path, whether a file is opened to be written, and its size before."""


@dataclass
class Kills:
    """A command line that is killed and resumed, always under the same outputs folder."""

    args: Sequence[str]
    root: Path
    timed: Sequence[
        str
    ] = ()  # columns and fields that hold times, which no two runs share
    setup: Callable[[Path], None] = lambda root: None  # in the child, before the run
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.outputs = self.root / "outputs"
        self.log = self.root / "operations"
        # Composed once, here: what a run writes begins behind it.
        self.config = config_of(*self.args, f"runtime.outputs={self.outputs}")

    def start(self, kill_at: int | None = None) -> int:
        """A child that runs the command, and dies in front of its ``kill_at``-th operation (from 1)."""
        self.log.write_bytes(b"")
        child = os.fork()
        if child:
            return child
        status = 99
        try:
            said = os.open(self.root / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(said, 1)
            os.dup2(said, 2)
            sys.stdout, sys.stderr = (
                io.TextIOWrapper(io.FileIO(n, "w"), write_through=True) for n in (1, 2)
            )
            self.setup(self.root)
            self._listen(kill_at)
            execute(self.config, command="kills", console=Console())
            status = 0
        finally:
            traceback.print_exc()
            os._exit(status)

    def _listen(self, kill_at: int | None) -> None:
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND)
        count = 0
        front = f"{self.outputs}/"

        def hook(event: str, found: tuple[Any, ...]) -> None:
            nonlocal count
            writes = event == "open" and bool(
                (found[2] or 0) & (os.O_WRONLY | os.O_RDWR)
            )
            if not writes and event not in CHANGES:
                return
            path = (
                os.fsdecode(found[0])
                if isinstance(found[0], str | bytes | os.PathLike)
                else ""
            )
            if not path.startswith(front) or "lock" in Path(path).name:
                return
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            size = os.path.getsize(path) if writes and os.path.exists(path) else 0
            # A file that is not appended to is emptied as it is opened.
            size = size if writes and (found[2] & os.O_APPEND) else 0
            os.write(log, json.dumps([path, writes, size]).encode() + b"\n")

        sys.addaudithook(hook)

    def operations(self) -> list[Operation]:
        """What the last child did."""
        return [tuple(json.loads(line)) for line in self.log.read_bytes().splitlines()]

    def end(self, child: int) -> int:
        """Exit status of a child; negative: the signal that it died of."""
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def whole(self, times: int) -> None:
        """Run without a kill; from the second time on files are warm. Each must leave the same."""
        for _ in range(times):
            shutil.rmtree(self.outputs, ignore_errors=True)
            began = time.monotonic()
            status = self.end(self.start())
            assert status == 0, (status, (self.root / "said").read_text()[-2000:])
            self.wall = time.monotonic() - began
            files = self.contents()
            if hasattr(self, "wanted"):
                assert files == self.wanted, (
                    f"two whole runs differ: {self.unlike(files)}"
                )
            self.wanted = files
            self.known = self.operations()

    def kill(self, number: int, of: int, rng: random.Random) -> bool:
        """One of ``of`` kills: two thirds at an operation, spread over all, half of these with the last write
        torn; the others at a random time. Whether the resumed run ended like the one left alone."""
        shutil.rmtree(self.outputs, ignore_errors=True)
        torn = ""
        at = None
        if number % 3 < 2:
            at = 1 + (
                number * len(self.known) // of + rng.randrange(len(self.known))
            ) % len(self.known)
            status = self.end(self.start(at))
            done = self.operations()
            path, writes, size = done[-1] if done else ("", False, 0)
            if writes and rng.random() < 0.75 and os.path.isfile(path):
                os.truncate(
                    path, rng.randint(size, max(os.path.getsize(path) - 1, size))
                )
                torn = f", {Path(path).name} torn"
        else:
            child = self.start()
            time.sleep(rng.uniform(0.02, 0.98) * self.wall)
            os.kill(child, signal.SIGKILL)
            status = self.end(child)
        status = self.end(self.start())
        files = self.contents()
        if status == 0 and files == self.wanted:
            return True
        place = (
            f"operation {at} ({Path(self.known[at - 1][0]).name}{torn})"
            if at
            else "a random time"
        )
        why = (
            f"status {status}: {(self.root / 'said').read_text()[-300:]}"
            if status
            else self.unlike(files)
        )
        self.failures.append(f"kill {number} at {place}: {why}")
        return False

    def tried(self, count: int, seed: int = 0, whole: int = 2) -> tuple[int, int]:
        """So many kills, after ``whole`` runs without one: how many held, how many were tried."""
        self.whole(whole)
        rng = random.Random(seed)
        return sum(self.kill(number, count, rng) for number in range(count)), count

    def contents(self) -> dict[str, bytes]:
        """Every file under the outputs but locks (empty). Left out: when a run started, how long it took, the
        checksums of what holds these, and of a study of times all checksums and sizes and what ``timed`` names. DONE
        says whether all checksums of its folder hold."""
        found = {}
        for file in sorted(
            p for p in self.outputs.rglob("*") if p.is_file() and "lock" not in p.name
        ):
            data = file.read_bytes()
            if file.name == "DONE":
                data = repr(open_run_dir(file.parent).damaged()).encode()
            elif self.timed and file.suffix == ".csv":
                data = repr(
                    self._timeless(pd.read_csv(file, dtype=str).to_dict("list"))
                ).encode()
            elif self.timed and file.suffix in (".json", ".jsonl"):
                lines = data.splitlines() if file.suffix == ".jsonl" else [data]
                data = repr(
                    [self._timeless(json.loads(line)) for line in lines]
                ).encode()
            elif self.timed and file.suffix == ".pt":
                data = repr(
                    self._timeless(torch.load(file, weights_only=True))
                ).encode()
            elif file.name in (
                "provenance.json",
                "status.json",
                "manifest.json",
                "report.html",
            ):
                data = re.sub(rb'(?s)"spent": \{(\}|.*?\n  \})', b"", data)
                moved = rb"started|seconds|provenance.json|status.json|sum"
                data = re.sub(rb'.*("|&#34;)(' + moved + rb')("|&#34;): .*', b"", data)
            found[file.relative_to(self.outputs).as_posix()] = data
        return found

    def _timeless(self, data: Any) -> Any:
        if isinstance(data, dict):
            moved = ("started", "seconds", "spent", "sum", "sizes")
            left_out = "|".join((*self.timed, *moved))
            return {
                k: self._timeless(v)
                for k, v in data.items()
                if not re.fullmatch(left_out, str(k))
            }
        if isinstance(data, list | tuple):
            return [self._timeless(each) for each in data]
        if isinstance(data, torch.Tensor):
            return data.numpy().tobytes()
        return (
            "" if isinstance(data, str) and re.fullmatch("[0-9a-f]{64}", data) else data
        )

    def unlike(self, files: dict[str, bytes]) -> str:
        """Names of files that are not as they should be."""
        names = sorted(set(files) ^ set(self.wanted))
        return ", ".join(
            [
                *names,
                *(n for n in files if n in self.wanted and files[n] != self.wanted[n]),
            ]
        )


def loaded_once(args: Sequence[str]) -> Callable[..., LM]:
    """In the place of ``posbench.run.base.load``: the model of a command line, loaded for all children."""
    config = config_of(*args)
    lm = load(config.model, device="cpu") if config.uses_model else None
    return lambda model, **where: lm or load(model, **where)


def main() -> None:
    """Kill one job of ``tests.cli.test_kills``; print how many held and were tried, and what failed."""
    from tests.cli.test_kills import JOBS

    job = JOBS[sys.argv[1]]
    count = int(sys.argv[2])
    root = Path(sys.argv[3])
    torch.set_num_threads(1)
    args = job.args(root)
    posbench.run.base.load = loaded_once(args)
    kills = Kills(args, root, job.timed, job.setup)
    held, tried = kills.tried(count)
    print(
        "\n".join(
            [f"{sys.argv[1]}: {held}/{tried} held, {kills.wall:.1f} s", *kills.failures]
        )
    )
    sys.exit(held < tried)


if __name__ == "__main__":
    main()
