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

from rich.console import Console

from posbench import paths
from posbench.cli.options import option
from posbench.errors import UserError, choices, in_one_line, unknown_name
from posbench.files import sources
from posbench.files.parse import CORRECT_FILE, read_yaml
from posbench.pipeline.compose import compose
from posbench.pipeline.config import Config, check_config
from posbench.pipeline.execute import find_finished_run, missing_sources
from posbench.report import sweep
from posbench.report.console import make_wide_console, show_next
from posbench.report.experiments import PAPERS, trains_networks
from posbench.run.lease import owning
from posbench.run.progress import Progress, duration, progress
from posbench.run.runtime import Runtime
from posbench.studies.cost.timing import TimingStudy

COMMAND = [
    sys.executable,
    "-c",
    f"from posbench.cli.main import run_below; run_below({os.getpid()})",
]
STOP_SECONDS = 30.0
"""Time that processes have to end by themselves when all are stopped."""
POLL_SECONDS = 0.1


@dataclass(eq=False)
class Experiment:
    """An experiment to run, its state and its result.

    Attributes:
        name: Its name.
        args: Arguments of the command that runs it.
        minutes: Minutes of one core that it takes without overrides; 0 if not known.
        configs: Configs of its jobs.
        overrides: Overrides of its jobs.
        multirun: Whether it is a sweep.
        state: ``waiting``, then ``finished before``, ``done``, ``failed``, ``to fetch``
            or ``refused``.
        status: Its exit status.
        note: Why it is not done.
        folder: Folder of its result.
        missing_sources: Files to download first.
        start_seconds: When its process started, by the monotonic clock.
        elapsed_seconds: How long its process ran.
    """

    name: str
    args: list[str]
    minutes: float
    configs: list[Config] = field(default_factory=list)
    overrides: list[Sequence[str]] = field(default_factory=list)
    multirun: bool = False
    state: str = "waiting"
    status: int = 0
    note: str = ""
    folder: Path | None = None
    missing_sources: list[sources.Source] = field(default_factory=list)
    start_seconds: float = 0.0
    elapsed_seconds: float = 0.0

    @property
    def command(self) -> str:
        """The command that runs it alone, or fetches its missing files."""
        verb = ["fetch"] if self.state == "to fetch" else []
        return shlex.join(["posbench", *verb, *self.args])

    @property
    def line(self) -> str:
        """Its line in the table of all experiments."""
        elapsed = duration(self.elapsed_seconds) if self.elapsed_seconds else ""
        # A failure's note is printed below the table.
        result = self.folder or (self.note if self.missing_sources else "")
        return f"{self.state:<15}  {self.name:<24}  {elapsed:>9}  {result}"

    @property
    def weight(self) -> float:
        """Its share of all work: its minutes, or one where they are not known."""
        return self.minutes or 1.0

    @property
    def embedded(self) -> bool:
        """Whether it uses only models that come with posbench."""
        return all(
            config.model.path.startswith(paths.EMBEDDED)
            for config in self.configs
            if config.uses_model
        )

    @property
    def timed(self) -> bool:
        """Whether it measures times, which other processes would distort."""
        return any(isinstance(config.study, TimingStudy) for config in self.configs)

    def log(self, logs: Path) -> Path:
        """The file that takes the output of its process."""
        return logs / f"{self.name}.log"

    def inspect(self) -> None:
        """Compose and check the experiment's configs, and look for a finished result.

        Unless a process has to run it, its state becomes `refused`, `to fetch` or `finished before`.
        """
        try:
            problems = self._compose()
            if problems:
                self._end("refused", 2, problems[0])
                return
            missing = (s for config in self.configs for s in missing_sources(config))
            self.missing_sources = list(dict.fromkeys(missing))
            if self.missing_sources:
                count = len(self.missing_sources)
                note = f"{count} of its sources are not on this machine"
                self._end("to fetch", 2, note)
                return
            self.folder = self.result()
            if self.folder:
                self._end("finished before", 0, "")
        except Exception as error:
            fault = in_one_line(error)
            if fault is None:  # a defect of one experiment must not stop the others
                logging.exception("%s", self.name)
                self._end("refused", 1, repr(error))
            else:
                self._end("refused", fault.status, str(fault))

    def _compose(self) -> list[str]:
        """Compose and check the config of each job, and keep those that are valid; return the faults of the others."""
        jobs = compose(self.args)
        problems = []
        for job in jobs.composed:
            self.multirun |= job.multirun
            try:
                self.configs.append(check_config(job))
                self.overrides.append(job.overrides)
            except UserError as error:
                problems.append(str(error))
        problems += [record["error"] for record in jobs.refused.values()]
        return problems

    def result(self) -> Path | None:
        """Return the folder of the run, or of the sweep over the runs; None unless all runs are done and undamaged."""
        folders = [find_finished_run(config) for config in self.configs]
        runs = [folder for folder in folders if folder]
        if not runs or len(runs) < len(folders):
            return None
        return (
            sweep.find_finished_sweep(self.overrides, runs)
            if self.multirun
            else runs[0]
        )

    def end_process(self, returncode: int, logs: Path) -> None:
        """Set the state of the experiment once its process has ended.

        Without a whole result it is not done, whatever the exit status is.

        Args:
            returncode: Exit status, or minus the number of the signal that stopped it.
            logs: Folder of the logs.
        """
        self.elapsed_seconds = time.monotonic() - self.start_seconds
        if returncode == 0:
            with suppress(UserError):
                self.folder = self.result()
        else:
            self.folder = None
        if self.folder:
            self._end("done", 0, "")
        elif returncode == 0:
            note = "a file that takes part changed while it ran; run it again"
            self._end("failed", 1, note)
        else:
            ending = f"exit status {returncode}"
            if returncode < 0:
                ending = f"stopped by signal {-returncode}"
            status = returncode if returncode in (1, 2) else 3
            self._end("failed", status, f"{ending}: {self._last_message(logs)}")

    def _last_message(self, logs: Path) -> str:
        """The last message of posbench in its log, else the last line."""
        text = self.log(logs).read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        messages = [line for line in lines if line.startswith("posbench: ")]
        return (messages or lines)[-1]

    def _end(self, state: str, status: int, note: str) -> None:
        """Set state and exit status, and the first line of a note."""
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
    count, remaining = option(args, "--jobs")
    if count is not None and not (count.isdecimal() and int(count)):
        raise UserError(
            "--jobs",
            count,
            "a whole number from 1 up",
            "leave it out for one process per core",
        )
    console = make_wide_console()
    experiments = _select(remaining, console)
    waiting = [e for e in experiments if e.state == "waiting"]
    waiting.sort(key=lambda e: -e.minutes)
    num_processes = 1
    if count:
        num_processes = int(count)
    elif all(e.embedded for e in waiting):
        # Two large models may not fit into memory, and one uses all cores.
        num_processes = _num_cores()
    configs = (config for e in experiments for config in e.configs)
    runtime = next((config.runtime for config in configs), Runtime())
    logs = Path(runtime.outputs).expanduser() / "figures"
    if waiting:
        minutes = sum(e.weight for e in waiting)
        estimate = ""
        # The minutes were measured on embedded models; another one takes hours.
        if all(e.minutes and e.embedded for e in waiting):
            estimate = f" (about {minutes:.0f} minutes of one core as they stand)"
        console.print(
            f"{len(waiting)} of {len(experiments)} to run{estimate}, "
            f"{num_processes} at a time; logs in {logs}"
        )
        logs.mkdir(parents=True, exist_ok=True)
        with (
            owning(logs),
            progress(
                console, runtime.log_every, "figures", len(waiting), 0, minutes
            ) as work,
        ):
            # Experiments that measure times run alone, after the others.
            untimed = [e for e in waiting if not e.timed]
            timed = [e for e in waiting if e.timed]
            _run(untimed, num_processes, logs, console, work)
            _run(timed, 1, logs, console, work)
    return _report(experiments, logs, console)


def _num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _select(args: Sequence[str], console: Console) -> list[Experiment]:
    """Return the experiments that the arguments name, or all that can run here, each inspected.

    Prints which are left out, and why.

    Raises:
        UserError: An argument is wrong, or leaves no experiment.
    """
    config_dir, remaining = option(args, "--config-dir")
    papers = [
        arg.removeprefix("paper=") for arg in remaining if arg.startswith("paper=")
    ]
    # Words without = are experiments; all others are overrides for each of them.
    names = [
        arg for arg in remaining if "=" not in arg and not arg.startswith(("-", "~"))
    ]
    overrides = [
        arg for arg in remaining if arg not in names and not arg.startswith("paper=")
    ]
    _check_overrides(overrides)
    folders = paths.config_folders(config_dir)
    all_names = choices(*paths.group_folders("experiment", folders))
    _check_names("figures", names, all_names)
    _check_names("paper", papers, list(PAPERS))
    shared_args = overrides
    if config_dir:
        shared_args = ["--config-dir", config_dir, *overrides]
    experiments: list[Experiment] = []
    left_out: dict[str, list[str]] = {}
    with console.status("looking for what is finished"):
        for name in names or all_names:
            facts = _facts(name, folders)
            if papers and facts.get("paper") not in papers:
                continue
            minutes = float(facts.get("minutes") or 0)
            experiment = Experiment(name, [f"experiment={name}", *shared_args], minutes)
            reason = ""
            if names:
                experiment.inspect()
            else:
                reason = _reason_to_leave_out(experiment, facts, overrides)
            if reason:
                left_out.setdefault(reason, []).append(name)
            else:
                experiments.append(experiment)
    for reason, left_names in left_out.items():
        console.print(f"left out: {', '.join(left_names)} ({reason})")
    if not experiments:
        raise UserError(
            "figures",
            shlex.join(args),
            "arguments that match at least one experiment",
            "choose one: posbench ls experiments",
        )
    return experiments


def _check_overrides(overrides: Sequence[str]) -> None:
    """Refuse ``experiment=NAME`` (the name alone is meant), a budget, and unknown flags.

    Args:
        overrides: The arguments that name neither an experiment nor a paper.

    Raises:
        UserError: The first of these.
    """
    for arg in overrides:
        if arg.startswith("experiment="):
            name = arg.removeprefix("experiment=")
            hint = f"posbench figures {name}"
            raise UserError(
                "experiment", name, "the name alone, without experiment=", hint
            )
        if arg.startswith("budget="):
            allowed = "left out: a budget chooses other sizes than those by which finished figures are found"
            hint = f"posbench experiment=NAME {arg}"
            raise UserError("budget", arg.removeprefix("budget="), allowed, hint)
        if arg.startswith("-") and arg not in ("-m", "--multirun"):
            allowed = "--jobs N, --config-dir DIR, -m"
            raise UserError("flag", arg, allowed, "posbench figures --help")


def _check_names(
    field_name: str, names: Sequence[str], all_names: Sequence[str]
) -> None:
    """Refuse a name that does not exist.

    Args:
        field_name: What is named, for the error.
        names: The typed names.
        all_names: The existing names.

    Raises:
        UserError: The first such name.
    """
    for name in names:
        if name not in all_names:
            raise unknown_name(field_name, name, all_names, "posbench ls experiments")


def _facts(name: str, folders: Sequence[Path]) -> dict[str, Any]:
    """Return the description in an experiment's file, and under ``trains`` whether it trains; empty for a bad file."""
    file = paths.find_choice("experiment", name, folders)
    try:
        data = read_yaml(file, hint=CORRECT_FILE) if file else {}
        return {**data["experiment"], "trains": trains_networks(data)}
    except (UserError, KeyError, TypeError):
        return {}  # composing it reports the fault


def _reason_to_leave_out(
    experiment: Experiment, facts: Mapping[str, Any], overrides: Sequence[str]
) -> str:
    """Return why an experiment that was not named does not run; empty if it does, and then it is inspected.

    Args:
        experiment: The experiment.
        facts: The description in its file.
        overrides: Overrides for all experiments.
    """
    if facts.get("trains"):
        return "training, hours: make trainings"
    sets_model = any(arg.startswith(("model=", "model.path=")) for arg in overrides)
    if facts.get("needs_weights") and not sets_model:
        return "needs weights: model=NAME"
    experiment.inspect()
    if facts.get("needs_weights") and experiment.embedded:
        return "needs weights"
    if experiment.state == "refused":
        # Is it refused without the overrides for all experiments, too?
        plain_args = [arg for arg in experiment.args if arg not in overrides]
        plain = Experiment(experiment.name, plain_args, 0)
        plain.inspect()
        if plain.state != "refused":  # it is the overrides that it does not take
            return experiment.note
    return ""


def _run(
    experiments: Sequence[Experiment],
    num_processes: int,
    logs: Path,
    console: Console,
    work: Progress,
) -> None:
    """Run experiments in order; stop their processes when this one is stopped.

    Args:
        experiments: The experiments.
        num_processes: How many run at a time.
        logs: Folder of their logs.
        console: Takes a line for each that ended.
        work: Progress of all experiments.
    """
    waiting = list(experiments)
    running: dict[Experiment, subprocess.Popen[bytes]] = {}
    num_threads = 1 if num_processes > 1 else None
    try:
        while waiting or running:
            while waiting and len(running) < num_processes:
                experiment = waiting.pop(0)
                running[experiment] = _start(experiment, logs, num_threads)
            work.note = ", ".join(experiment.name for experiment in running)
            time.sleep(POLL_SECONDS)
            for experiment, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[experiment]
                experiment.end_process(process.returncode, logs)
                work(1, weight=experiment.weight)
                console.print(experiment.line)
        work.note = ""
    finally:
        _stop(list(running.values()))


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate processes, and kill the ones that do not end in time."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()


def _start(
    experiment: Experiment, logs: Path, num_threads: int | None
) -> subprocess.Popen[bytes]:
    """Start the process of an experiment; its output goes to its log.

    Args:
        experiment: The experiment.
        logs: Folder of the logs.
        num_threads: Threads of its numerical libraries; None leaves that to them.
    """
    experiment.start_seconds = time.monotonic()
    environment = dict(os.environ)
    if num_threads:
        environment.setdefault("OMP_NUM_THREADS", str(num_threads))
    with open(experiment.log(logs), "wb") as log:
        log.write(f"$ {experiment.command}\n".encode(errors="replace"))
        log.flush()
        return subprocess.Popen(
            [*COMMAND, *experiment.args],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _report(experiments: Sequence[Experiment], logs: Path, console: Console) -> int:
    """Print the state of all experiments, files to fetch, and failures; return the highest exit status.

    Args:
        experiments: The experiments, run or not.
        logs: Folder with the output of each.
        console: Gets the table of states; failures go to stderr.
    """
    # Of a single experiment the whole output is shown.
    if len(experiments) == 1 and experiments[0].elapsed_seconds:
        print(experiments[0].log(logs).read_text(errors="replace"))
    console.print()
    for experiment in experiments:
        console.print(experiment.line)
    for experiment in experiments:
        if experiment.status and not experiment.missing_sources:
            lines = [
                f"posbench: {experiment.name} {experiment.state}: {experiment.note}"
            ]
            if experiment.state == "failed":
                lines.append(f"  log: {experiment.log(logs)}")
            lines.append(f"  next: {experiment.command}")
            print("\n".join(lines), file=sys.stderr)
    to_fetch = [e for e in experiments if e.missing_sources]
    if to_fetch:
        console.print("\nnot on this machine:")
        missing = [source for e in to_fetch for source in e.missing_sources]
        with suppress(UserError):  # the table shows the unreachable files
            sources.fetch(missing, dry_run=True, console=console)
        commands = "\n  ".join(e.command for e in to_fetch)
        print(
            f"posbench: {len(to_fetch)} of {len(experiments)} not run: "
            f"files are not on this machine; next:\n  {commands}",
            file=sys.stderr,
        )
    if any(e.folder for e in experiments):
        show_next(console, f"posbench report {logs.parent}")
    return max(e.status for e in experiments)
