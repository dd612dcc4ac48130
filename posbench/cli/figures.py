"""``posbench figures``: many experiments, several at a time, each a process of its own."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from posbench import paths
from posbench.cli.options import option
from posbench.errors import UserError, choices, in_one_line, near
from posbench.files import sources
from posbench.pipeline.compose import Composed, compose
from posbench.pipeline.config import Config, check
from posbench.pipeline.execute import absent, finished
from posbench.report import sweep
from posbench.report.console import terminal
from posbench.report.experiments import PAPERS, trains
from posbench.run.lease import owned
from posbench.run.progress import Progress, duration, progress
from posbench.run.runtime import Runtime
from posbench.studies.cost.timing import Timed

COMMAND = [
    sys.executable,
    "-c",
    f"from posbench.cli.main import run_below; run_below({os.getpid()})",
]
PATIENCE = 30.0
"""Seconds that processes have to end by themselves when all are stopped."""


@dataclass(eq=False)
class Figure:
    """An experiment, with what becomes of it."""

    name: str
    args: list[str]  # of the command that runs it
    minutes: float  # of one core that it takes as it stands, about; 0: not known
    configs: list[Config] = field(default_factory=list)  # of every job
    overrides: list[Sequence[str]] = field(default_factory=list)
    multirun: bool = False
    state: str = "waiting"  # then ``finished before``, ``done``, ``failed``, ``to fetch`` or ``refused``
    status: int = 0
    note: str = ""  # why it is not done
    folder: Path | None = None
    absent: list[sources.Source] = field(
        default_factory=list
    )  # what would have to be downloaded
    began: float = 0.0  # seconds, as those of ``took``
    took: float = 0.0

    @property
    def command(self) -> str:
        """What runs it alone, or gets what it lacks."""
        return shlex.join(
            ["posbench", *["fetch"] * (self.state == "to fetch"), *self.args]
        )

    @property
    def line(self) -> str:
        """What it is and what became of it."""
        took = duration(self.took) if self.took else ""
        return (
            f"{self.state:<15}  {self.name:<24}  {took:>9}  {self.folder or self.note}"
        )

    @property
    def weight(self) -> float:
        """Its share of all work: its minutes, or one where they are not known."""
        return self.minutes or 1.0

    @property
    def embedded(self) -> bool:
        """Whether it looks at no model but those that ship with posbench."""
        used = [config.model.path for config in self.configs if config.uses_model]
        return all(path.startswith(paths.EMBEDDED) for path in used)

    @property
    def timed(self) -> bool:
        """Whether it measures times, which others beside it would stretch."""
        return any(isinstance(config.study, Timed) for config in self.configs)

    def look(self) -> None:
        """Compose and check it; see whether it is finished, and whether its files are here."""
        problems: list[str] = []

        def each(composed: Composed) -> None:
            self.multirun |= composed.multirun
            try:
                self.configs.append(
                    check(composed.raw, composed.typed, composed.folders)
                )
                self.overrides.append(composed.overrides)
            except UserError as error:
                problems.append(str(error))

        try:
            problems += [
                record["error"]
                for record in compose(self.args, each)
                if "error" in record
            ]
            if problems:
                self._end("refused", 2, problems[0])
                return
            lacking = dict.fromkeys(
                source for config in self.configs for source in absent(config)
            )
            self.absent = list(lacking)
            self.folder = None if lacking else self.result()
            if lacking:
                self._end(
                    "to fetch",
                    2,
                    f"{len(lacking)} of its sources are not on this machine",
                )
            elif self.folder:
                self._end("finished before", 0, "")
        except Exception as error:
            told = in_one_line(error)
            if told is None:  # one experiment's defect must not stop the others
                logging.exception("%s", self.name)
            self._end("refused", told.status if told else 1, str(told or repr(error)))

    def result(self) -> Path | None:
        """Folder of the run, or of the sweep over the runs; None unless all is done and whole."""
        runs = [finished(config) for config in self.configs]
        found = [run for run in runs if run]
        if not found or len(found) < len(runs):
            return None
        return sweep.finished(self.overrides, found) if self.multirun else found[0]

    def log(self, logs: Path) -> Path:
        """Where what its process prints goes."""
        return logs / f"{self.name}.log"

    def ended(self, code: int, logs: Path) -> None:
        """Note how its process ended; what did not leave a whole result is not done, whatever it says."""
        self.took = time.monotonic() - self.began
        with suppress(UserError):
            self.folder = self.result() if code == 0 else None
        text = self.log(logs).read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        last = next(
            (line for line in reversed(lines) if line.startswith("posbench: ")),
            lines[-1],
        )
        if self.folder:
            self._end("done", 0, "")
        elif code == 0:
            self._end(
                "failed", 1, "a file that takes part changed while it ran; run it again"
            )
        else:
            how = f"stopped by signal {-code}" if code < 0 else f"exit status {code}"
            self._end("failed", code if code in (1, 2) else 3, f"{how}: {last}")

    def _end(self, state: str, status: int, note: str) -> None:
        self.state = state
        self.status = status
        self.note = (note.splitlines() or [""])[0]


def figures(args: list[str]) -> int:
    """Run experiments side by side: those named, or all that need neither weights nor trainings.

    usage: posbench figures [NAMES] [paper=NAME] [model=NAME] [OVERRIDES] [--jobs N] [--config-dir DIR]

      NAMES             names of `posbench ls experiments`; without any, see above
      paper=NAME        those of one paper: yu2025, lpes, wu2025 or behind_rope
      model=NAME        on this model; also those that need weights
      OVERRIDES         any key of a config, for all of them
      --jobs N          so many at a time; one on each core unless said
      --config-dir DIR  your own YAML files; also your experiments

    What is finished is not run again. Each writes a log to OUTPUTS/figures. All of them take 17 minutes
    on two cores; `posbench ls experiments` has the minutes of each.

    example: posbench figures yu2025_fig6 lpes_table7 --jobs 2

    Raises:
        UserError: An argument is wrong, or leaves no experiment.
    """
    count, rest = option(args, "--jobs")
    if count is not None and not (count.isdecimal() and int(count)):
        raise UserError(
            "--jobs", count, "a number from 1 on", "leave it out: one on each core"
        )
    console = terminal(width=None if sys.stdout.isatty() else 10_000)
    asked = _asked(rest, console)
    todo = sorted(
        (f for f in asked if f.state == "waiting"), key=lambda figure: -figure.minutes
    )
    # Two large models do not fit where one does, and one has work for all cores.
    small = all(figure.embedded for figure in todo)
    jobs = int(count) if count else _cores() if small else 1
    runtime = next(
        (config.runtime for figure in asked for config in figure.configs), Runtime()
    )
    logs = Path(runtime.outputs).expanduser() / "figures"
    if todo:
        known = all(figure.minutes for figure in todo)
        minutes = sum(figure.weight for figure in todo)
        about = (
            f" (about {minutes:.0f} minutes of one core as they stand)" if known else ""
        )
        console.print(
            f"{len(todo)} of {len(asked)} to run{about}, {jobs} at a time; logs in {logs}"
        )
        logs.mkdir(parents=True, exist_ok=True)
        with (
            owned(logs),
            progress(
                console, runtime.log_every, "figures", len(todo), 0, minutes
            ) as work,
        ):
            _run(
                [figure for figure in todo if not figure.timed],
                jobs,
                logs,
                console,
                work,
            )
            _run([figure for figure in todo if figure.timed], 1, logs, console, work)
    return _tell(asked, logs, console)


def _cores() -> int:
    """Cores that this process may use."""
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


def _asked(args: Sequence[str], console: Console) -> list[Figure]:
    """The experiments that arguments ask for, looked at."""
    own, rest = option(args, "--config-dir")
    papers = [arg.removeprefix("paper=") for arg in rest if arg.startswith("paper=")]
    names = [arg for arg in rest if "=" not in arg and not arg.startswith(("-", "~"))]
    typed = [arg for arg in rest if arg not in names and not arg.startswith("paper=")]
    for arg in typed:
        name = arg.removeprefix("experiment=")
        if name != arg:
            raise UserError(
                "experiment", name, "a name alone", f"posbench figures {name}"
            )
        if arg.startswith("-") and arg not in ("-m", "--multirun"):
            raise UserError(
                "flag", arg, "--jobs N, --config-dir DIR, -m", "posbench figures --help"
            )
    folders = [
        paths.EXPERIMENTS,
        *(root / "experiment" for root in paths.config_folders(own)[1:]),
    ]
    there = choices(*folders)
    for field_, given, known in (
        ("figures", names, there),
        ("paper", papers, [*PAPERS]),
    ):
        for name in given:
            if name not in known:
                raise UserError(
                    field_,
                    name,
                    ", ".join(known),
                    near(name, known, "posbench ls experiments"),
                )
    shared = [*(["--config-dir", own] if own else []), *typed]
    of_model = any(arg.startswith(("model=", "model.path=")) for arg in typed)
    found = list[Figure]()
    out = dict[str, list[str]]()
    with console.status("looking for what is finished"):
        for name in names or there:
            facts = _facts(name, folders)
            figure = Figure(
                name, [f"experiment={name}", *shared], float(facts.get("minutes") or 0)
            )
            if papers and facts.get("paper") not in papers:
                continue
            reason = "" if names else _reason(facts, of_model)
            if not reason:
                figure.look()
                if not names and facts.get("needs_weights") and figure.embedded:
                    reason = "needs weights"
                elif not names and figure.state == "refused":
                    plain = Figure(
                        name, [arg for arg in figure.args if arg not in typed], 0
                    )
                    plain.look()
                    reason = (
                        "" if plain.state == "refused" else figure.note
                    )  # it does not take what is typed
            out.setdefault(reason, []).append(name)
            found += [] if reason else [figure]
    for reason in filter(None, out):
        console.print(f"left out: {', '.join(out[reason])} ({reason})")
    if not found:
        hint = "name one: posbench ls experiments"
        raise UserError(
            "figures",
            shlex.join(args),
            "arguments that leave an experiment to run",
            hint,
        )
    return found


def _facts(name: str, folders: Sequence[Path]) -> dict[str, Any]:
    """What the file of an experiment says of it, and whether it trains."""
    file = next(
        folder / f"{name}.yaml"
        for folder in folders
        if (folder / f"{name}.yaml").is_file()
    )
    try:
        data = yaml.safe_load(file.read_text())
        return {**data["experiment"], "trains": trains(data)}
    except (yaml.YAMLError, ValueError, KeyError, TypeError):
        return {}  # composing it tells what is wrong


def _reason(facts: Mapping[str, Any], of_model: bool) -> str:
    """Why an experiment is not among those that run unnamed; empty where it is."""
    if facts.get("trains"):
        return "training, hours: make trainings"
    return (
        "needs weights: model=NAME"
        if facts.get("needs_weights") and not of_model
        else ""
    )


def _run(
    todo: Sequence[Figure], jobs: int, logs: Path, console: Console, work: Progress
) -> None:
    """Run so many at a time, in this order; when this process is stopped so are they."""
    waiting = list(todo)
    running = dict[Figure, subprocess.Popen[bytes]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                figure = waiting.pop(0)
                running[figure] = _start(figure, logs, threads=1 if jobs > 1 else None)
            work.note = ", ".join(figure.name for figure in running)
            time.sleep(0.1)
            for figure in [
                f for f, process in running.items() if process.poll() is not None
            ]:
                figure.ended(running.pop(figure).returncode, logs)
                work(1, weight=figure.weight)
                console.print(figure.line, soft_wrap=True)
        work.note = ""
    finally:
        for process in running.values():
            process.terminate()
        end = time.monotonic() + PATIENCE
        for process in running.values():
            try:
                process.wait(max(end - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()


def _start(figure: Figure, logs: Path, threads: int | None) -> subprocess.Popen[bytes]:
    """Start the process of an experiment; what it prints goes to its log."""
    figure.began = time.monotonic()
    environment = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    with open(figure.log(logs), "wb") as out:
        out.write(f"$ {figure.command}\n".encode(errors="replace"))
        out.flush()
        streams: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": out,
            "stderr": out,
        }
        return subprocess.Popen(
            [*COMMAND, *figure.args], env={**environment, **os.environ}, **streams
        )


def _tell(asked: Sequence[Figure], logs: Path, console: Console) -> int:
    """Print all of them, what to fetch, and what failed with the command that repeats it."""
    if len(asked) == 1 and asked[0].took:
        print(asked[0].log(logs).read_text(errors="replace"))
    console.print()
    for figure in asked:
        console.print(figure.line, soft_wrap=True)
    for figure in asked:
        if figure.status and not figure.absent:
            log = f"\n  log: {figure.log(logs)}" if figure.state == "failed" else ""
            told = f"posbench: {figure.name} {figure.state}: {figure.note}{log}\n  next: {figure.command}"
            print(told, file=sys.stderr)
    lacking = [figure for figure in asked if figure.absent]
    if lacking:
        console.print("\nnot on this machine:")
        with suppress(UserError):  # the table says what could not be reached
            sources.fetch(
                [s for figure in lacking for s in figure.absent],
                dry_run=True,
                console=console,
            )
        commands = "\n  ".join(figure.command for figure in lacking)
        told = f"{len(lacking)} of {len(asked)} not run: files are not on this machine; next:\n  {commands}"
        print(f"posbench: {told}", file=sys.stderr)
    if any(figure.folder for figure in asked):
        console.print(f"next: posbench report {logs.parent}", soft_wrap=True)
    return max(figure.status for figure in asked)
