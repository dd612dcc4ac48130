"""Random schedules of one command: workers, shards, parts, kills, files that change and change back.

Whatever the schedule, the run ends with the bytes of the same command run once, alone and to its end.
``python -m tests.schedules COUNT FOLDER [SEED]`` plays so many and names those that differ.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from posbench.cli.main import main as command_line
from posbench.pipeline.execute import make_run_folder
from posbench.run.folder import open_run_dir
from tests.cli.task_files import write_key_values
from tests.conftest import config_of, run_folders
from tests.kills import CHANGES

BASE = [
    "model=tiny",
    "runtime.device=cpu",
    "runtime.threads=1",
    "runtime.resamples=100",
    "runtime.intervene_examples=1",
    "task.pairs=12",
    "task.positions=[0,5,11]",
    "task.limit=3",
]
SEARCH = [
    "task.calibration_pairs=12",
    "task.calibration_examples=8",
    "search.strings=16",
    "search.length=48",
    "search.window=6",
    "search.skip=2",
    "search.top_k=2",
]
FIXED = ["method.channel=15", "method.factor=-1", "method.layers=[1,3]"]
METHODS = {
    "scaled": [*FIXED, "stages=[intervene,evaluate]"],
    "last three": [*FIXED, "method.last=3", "stages=[evaluate]"],
    "found": [*SEARCH, "stages=[search,evaluate]"],
    "layers": [
        "method=layer_scaling",
        "method.points=null",
        "method.scales=[1.2,1.1,1.3,1.0]",
        "stages=[intervene,evaluate]",
    ],
    "two bases": [
        "method=attention_buckets",
        "method.bases=[10000,20000]",
        "stages=[evaluate]",
    ],
    "two methods": [
        "method=[position_interpolation,ms_poe]",
        "method.parts.position_interpolation.scale=1.5",
        "stages=[evaluate]",
    ],
}
SIZES = (
    "runtime.batch_tokens=256",
    "runtime.batch_tokens=1024",
    "runtime.batch_size=2",
    "runtime.share=null",
    "runtime.share=1MiB",
)
LEFT = (".csv", ".jsonl", ".yaml", "method.json", "prompts.json")
"""Endings of files whose bytes do not depend on the schedule."""
ANOTHER = {"config.yaml", "search_state.pt"}
"""Files that hold the place of the outputs, or are gone at the end."""


@dataclass(frozen=True)
class Step:
    """A call of the command line.

    Attributes:
        kind: ``run``, ``workers``, ``search``, ``sweep``, ``shard``, ``part`` or ``other data``.
        shard: ``I/N``, of a shard or part.
        kill_at: Number of the operation on a file in front of which the process is killed; None: it may end.
    """

    kind: str
    shard: str = ""
    kill_at: int | None = None

    def __str__(self) -> str:
        """The step in a word or three."""
        killed = f" killed at {self.kill_at}" if self.kill_at else ""
        return f"{self.kind} {self.shard}{killed}".replace("  ", " ")


class Reference(NamedTuple):
    """A run that was left alone: the name of its folder, and its files."""

    name: str
    files: dict[str, bytes]


@dataclass
class Schedules:
    """Plays schedules under a folder, each against a run of its command that was left alone.

    Attributes:
        root: A folder of its own.
        references: Files of these runs, by their command.
        failures: A line for each schedule that left something else.
    """

    root: Path
    references: dict[tuple[str, ...], Reference] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Run once in this process: children then have all modules."""
        data = self.root / "data.jsonl"
        write_key_values(data, seed=0)
        outputs = f"runtime.outputs={self.root / 'warm'}"
        command = [*BASE, f"task.path={data}", *METHODS["found"], outputs]
        with redirect_stdout(io.StringIO()):
            assert command_line(command) == 0

    def play(self, seed: int) -> bool:
        """Play the schedule of a seed; return whether all files are as they should be."""
        rng = random.Random(seed)
        name = rng.choice(list(METHODS))
        data = self.root / "data.jsonl"
        write_key_values(data, seed=0)
        command = [*BASE, f"task.path={data}", *METHODS[name], rng.choice(SIZES)]
        steps = draw_steps(rng, "stages=[search,evaluate]" in command)
        outputs = self.root / "outputs"
        shutil.rmtree(outputs, ignore_errors=True)
        reference = self._reference(command)
        try:
            for step in steps:
                self._take(step, command, outputs)
            status = _call([*command, f"runtime.outputs={outputs}"], self.root)
            assert status == 0, f"status {status}"
            left = files_of(outputs, reference.name)
            names = reference.files | left
            differing = [n for n in names if reference.files.get(n) != left.get(n)]
            assert not differing, f"differ: {', '.join(differing)}"
        except AssertionError as error:
            said = (self.root / "said").read_text()[-300:]
            listed = "; ".join(map(str, steps))
            self.failures.append(
                f"seed {seed}, {name}, {command[-1]}: {listed}: {error}\n{said}"
            )
            return False
        return True

    def _reference(self, command: Sequence[str]) -> Reference:
        """The command run once."""
        key = tuple(command)
        if key not in self.references:
            outputs = self.root / "alone"
            shutil.rmtree(outputs, ignore_errors=True)
            status = _call([*command, f"runtime.outputs={outputs}"], self.root)
            assert status == 0, (self.root / "said").read_text()[-2000:]
            (folder,) = run_folders(outputs)
            files = files_of(outputs, folder.name)
            self.references[key] = Reference(folder.name, files)
        return self.references[key]

    def _take(self, step: Step, command: Sequence[str], outputs: Path) -> None:
        """Take a step; one that was not killed may be refused, but not end in a traceback."""
        here = f"runtime.outputs={outputs}"
        args = [*command, here]
        if step.kind == "workers":
            args.append("runtime.workers=2")
        elif step.kind == "search":
            args = [*args[:-3], "stages=[search]", *args[-2:]]
        elif step.kind == "sweep":
            args = ["-m", *args, "task.limit=3,2"]
        elif step.shard:
            folder = make_run_folder(config_of(*command, here), "schedules")
            args = ["resume", str(folder), f"--{step.kind}={step.shard}"]
        data = self.root / "data.jsonl"
        write_key_values(data, seed=int(step.kind == "other data"))
        status = _call(args, self.root, outputs, step.kill_at)
        write_key_values(data, seed=0)
        killed = step.kill_at is not None and status == -signal.SIGKILL
        assert killed or status in (0, 2), f"{step}: status {status}"


def draw_steps(rng: random.Random, searches: bool) -> list[Step]:
    """Draw up to four steps, shards and parts in any order and perhaps not all of them."""
    steps: list[Step] = []
    # Workers are new processes, which take seconds to start.
    kinds = {"run": 4, "workers": 1, "shard": 4, "part": 4, "sweep": 3, "other data": 3}
    if searches:
        kinds["search"] = 3
    for _ in range(rng.randint(1, 3)):
        (kind,) = rng.choices(list(kinds), list(kinds.values()))
        kill_at = rng.randint(1, 90) if rng.random() < 0.5 else None
        if kind not in ("shard", "part"):
            # A run that is not killed would leave nothing to the others.
            kill_at = kill_at or rng.randint(1, 90) if kind == "run" else kill_at
            steps.append(Step(kind, kill_at=kill_at))
            continue
        count = rng.choice((2, 3))
        for index in rng.sample(range(count), rng.randint(1, count)):
            killed = kill_at if rng.random() < 0.5 else None
            steps.append(Step(kind, f"{index}/{count}", killed))
    return steps


def files_of(outputs: Path, name: str) -> dict[str, bytes]:
    """The files of the run of that name, which must be done and whole."""
    (folder,) = [folder for folder in run_folders(outputs) if folder.name == name]
    out = open_run_dir(folder)
    assert out.done, f"{folder.name} is not done"
    assert not out.damaged(), out.damaged()
    assert not (folder / ".parts").exists(), "shards are left"
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name.endswith(LEFT) and file.name not in ANOTHER
    }


def _call(
    args: Sequence[str],
    root: Path,
    outputs: Path | None = None,
    kill_at: int | None = None,
) -> int:
    """Exit status of the command line in a child, negative where it was killed; what it says goes to ``said``."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 99
    try:
        said = os.open(root / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        if kill_at is not None and outputs is not None:
            _die_at(kill_at, outputs)
        status = command_line(list(args))
    except BaseException:  # noqa: BLE001, a child ends here whatever happened
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _die_at(number: int, outputs: Path) -> None:
    """Kill this process in front of its operation of that number on a file below a folder."""
    count = 0
    front = f"{outputs}/"

    def hook(event: str, found: tuple[object, ...]) -> None:
        nonlocal count
        if event != "open" and event not in CHANGES:
            return
        if event == "open" and not (
            isinstance(found[2], int) and found[2] & (os.O_WRONLY | os.O_RDWR)
        ):
            return
        path = found[0]
        if isinstance(path, str | bytes | os.PathLike):
            count += os.fsdecode(path).startswith(front)
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def main() -> None:
    """Play schedules, and print how many held."""
    count = int(sys.argv[1])
    root = Path(sys.argv[2])
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    root.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    schedules = Schedules(root)
    held = 0
    for seed in range(first, first + count):
        held += schedules.play(seed)
        print(f"{held} of {seed - first + 1} held", end="\r", flush=True)
    print("\n".join([f"{held} of {count} schedules held", *schedules.failures]))
    sys.exit(held < count)


if __name__ == "__main__":
    main()
