"""The command line's entry: runs, and the verbs by their names."""

from __future__ import annotations

import ctypes
import inspect
import io
import logging
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from posbench import versions
from posbench.errors import (
    TRACEBACK,
    IncompleteRun,
    UserError,
    complain,
    in_one_line,
    near,
    own_code_error,
)
from posbench.files.secrets import command_line

if TYPE_CHECKING:
    from posbench.model.lm import LM
    from posbench.pipeline.compose import ComposedConfig
    from posbench.pipeline.config import Config
    from posbench.pipeline.multirun import Record
    from posbench.run.budget import Stopwatch

HELP = """posbench finds, explains and removes position bias in language models.

  posbench
      the embedded model, all stages, under a minute
  posbench task=kv_retrieval model=mistral7b method=scale_channel
      a task, a model and a method by name
  posbench model=DIR_OR_HUB_ID
      your own checkpoint: finds its channel, then measures it
  posbench model.base_url=http://HOST:8000/v1
      a model behind a server; model.served=ID where it has several
  posbench method=[layer_scaling,scale_channel]
      two methods, one inside the other; method=from:RUN takes a run's
  posbench -m method.factor=1,0.5,0,-0.5,-1
      a sweep; ends with one table and one figure
  posbench model=DIR budget=10min
      as much as fits into ten minutes (2h, 90s, 500prompts, 3Mtok, 2usd)
  posbench study=rollout
      what happens inside the model
  posbench experiment=yu2025_fig6
      one table or figure of a paper, seconds to minutes
  posbench model=llama2_13b runtime=gpu runtime.device_map=auto
      a model spread over all GPUs of this machine

Verbs (posbench VERB --help says more):
  diagnose      whether a model has a position bias, where from, what helps: one page
  order         which order of retrieved documents, how many? On a log of your own
  figures       run all experiments without downloads (17 minutes on two cores)
  ls            list what can be chosen: models, tasks, methods, ...
  ls runs       list runs, a line each: settings, verdict, score, bias, age
  view          write one page over all runs of a folder, to filter and click
  compare       set runs side by side: a table, a figure and a page
  check-data    say what a data file holds, and the command that runs it
  fetch         list and download what a config needs
  validate      compose and check configs without running them
  report        redraw a run or a sweep; write a gallery of many runs
  rescore       score the saved replies of a run again, without a model
  audit         prove a run: its rows, tables and some replies made again
  show          show prompts, expected answers, replies and scores of a run
  export        write a method into a checkpoint, an adapter or code
  verify        load an export and compare it with the method
  push          send tables, figures and page of a run to a tracker or the hub
  submit        send runs to a cluster
  jobs          list the states of submitted runs
  collect       summarise submitted runs
  resume        continue the run in a folder
  lm_eval       run lm-evaluation-harness under a method
  completion    print shell completion for bash, zsh or fish

Every key can be set as key=value; `--cfg job` prints the whole config, `--yes`
skips questions, `--config-dir DIR` adds YAML files.
Runs go to outputs/<task>/vNNN/<model>__<method>__<hash>; the same command
resumes. Exit status: 0 done; 1 some rows failed (repeat the command); 2 the
input needs a correction; 3 the machine is at fault; 130, 143 stopped (signals).
"""

VERBS = {
    "diagnose": "diagnose",
    "order": "order",
    "ls": "ls",
    "fetch": "verbs",
    "validate": "verbs",
    "report": "verbs",
    "rescore": "verbs",
    "audit": "verbs",
    "show": "verbs",
    "figures": "figures",
    "lm_eval": "lm_eval",
    "completion": "completion",
    "export": "export",
    "verify": "export",
    "push": "push",
    "submit": "submit",
    "jobs": "submit",
    "collect": "submit",
    "resume": "submit",
    "ls runs": "runs",
    "view": "view",
    "compare": "runs",
    "check-data": "check_data",
}
"""Module of each verb, which is a function there; only the typed verb's is imported."""
RUN_VERBS = (
    "report",
    "rescore",
    "audit",
    "show",
    "export",
    "verify",
    "jobs",
    "collect",
    "resume",
    "ls runs",
    "view",
    "compare",
)
"""Verbs that read runs, and so find the user's own classes in ``--config-dir``, or in the one that a run records."""
VERBS_WITH_MODEL = ("audit", "export", "verify", "resume")
"""Verbs that run a model, which takes a while."""
BUDGET_VERBS = ("diagnose", "order")
"""Verbs whose budget counts from before their libraries are imported."""
OVERRIDE_VERBS = (
    "",
    "diagnose",
    "order",
    "fetch",
    "validate",
    "submit",
    "figures",
    "export",
)
"""Verbs that take overrides as a run does, and the run itself."""
NO_VERBS = {
    "run": "leave it out",
}
"""Words that users type as verbs, and the right command for each."""

YES = "--yes"
VERBS_WITH_YES = ("", "diagnose", "order", "figures", "submit", "validate")
"""Verbs, and runs, that start work which may cost money, or check it."""

PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal that a process gets when its parent ends."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File names may hold bytes that are no text.
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        return _dispatch(args)
    except KeyboardInterrupt as stop:
        print("posbench: stopped; the same command resumes", file=sys.stderr)
        return 143 if isinstance(stop, _Terminated) else 130
    except IncompleteRun as error:
        print(f"posbench: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        fault = in_one_line(error)
        if fault is None:
            raise
        _print_traceback()
        complain(fault)
        return fault.status


def _print_traceback() -> None:
    """Print the traceback of the current error where the environment asks for it."""
    if os.environ.get(TRACEBACK):
        traceback.print_exc()


def _dispatch(args: list[str]) -> int:
    """Print help or version, or run a verb or a config; return the exit status.

    Args:
        args: The command line, without ``posbench``.
    """
    if args and args[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if args and args[0] == "--version":
        print(f"posbench {versions.__version__}")
        return 0
    versions.check_transformers()
    # The flag --yes (no question before a server is asked) becomes a key, as runs of a sweep get keys.
    args = _with_consent(args)
    with _sigterm_interrupts():
        # Words such as "ls runs"; empty for a config, which runs.
        name = verb_of(args)
        # These verbs take overrides as a run does, and could swallow a mistyped flag.
        if name in OVERRIDE_VERBS:
            _refuse_foreign_flags(name, args[len(name.split()) :])
        if not name:
            return _run(args)
        if name in BUDGET_VERBS and not {"-h", "--help"} & set(args):
            return _run_with_budget(name, args[1:])
        verb = find_verb(name)
        args = args[len(name.split()) :]
        # Behind other arguments these flags are the harness's own.
        flags = args[:1] if name == "lm_eval" else args
        if "-h" in flags or "--help" in flags:
            print(usage(verb))
            return 0
        if name not in RUN_VERBS:
            return verb(args)
        from posbench.cli.options import option
        from posbench.run.own_code import chosen_config_dir

        config_dir, args = option(args, "--config-dir")
        with chosen_config_dir(config_dir):
            if name not in VERBS_WITH_MODEL:
                return verb(args)
            with _signs_of_life():
                return verb(args)


def _refuse_foreign_flags(verb: str, args: Sequence[str]) -> None:
    """Refuse flags of other tools, with the equivalent command line; nothing is imported without a flag."""
    if any(arg.startswith("-") for arg in args):
        from posbench.cli.habits import refuse_foreign_flags

        refuse_foreign_flags(verb, args)


def _with_consent(args: list[str]) -> list[str]:
    """The arguments with the flag --yes replaced by its key, which every run inherits."""
    if YES not in args or verb_of(args) not in VERBS_WITH_YES:
        return args
    return [*(arg for arg in args if arg != YES), "runtime.yes=true"]


class _Terminated(KeyboardInterrupt):
    """SIGTERM: batch systems send it, and a run ends as with Ctrl-C."""


def _raise_terminated(*_: object) -> None:
    raise _Terminated


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does; outside the main thread, which alone gets signals, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def verb_of(args: Sequence[str]) -> str:
    """The verb that begins a command line; empty for a run."""
    for name in (" ".join(args[:2]), *args[:1]):
        if name in VERBS:
            return name
    return ""


def find_verb(name: str) -> Callable[[list[str]], int]:
    """The function of a verb."""
    module = import_module(f"posbench.cli.{VERBS[name]}")
    verb: Callable[[list[str]], int] = getattr(module, re.sub("[ -]", "_", name))
    return verb


def usage(verb: Callable[[list[str]], int]) -> str:
    """Text of ``posbench VERB --help``: the verb's docstring, without its errors."""
    text = (inspect.getdoc(verb) or "").split("\n\nRaises:")[0]
    return wrap_help(text, shutil.get_terminal_size().columns)


def wrap_help(text: str, width: int) -> str:
    """Return a help text with lines of at most ``width`` characters, where possible.

    Paragraphs are wrapped as a whole; indented lines ("name  description") so that descriptions stay aligned.
    """
    wrapped = []
    for block in text.split("\n\n"):
        if block.startswith("example: "):
            wrapped.append(block)  # a command is copied unwrapped
            continue
        is_paragraph = not any(line.startswith(" ") for line in block.split("\n"))
        lines = [" ".join(block.split("\n"))] if is_paragraph else block.split("\n")
        new_lines = []
        for line in lines:
            # The description follows the name after two spaces or more.
            description = re.match(r" *(?:\S+(?: \S+)* {2,})?", line)
            indent = " " * (description.end() if description else 0)
            new_lines += textwrap.wrap(
                line, width, subsequent_indent=indent, break_on_hyphens=False
            ) or [""]
        wrapped.append("\n".join(new_lines))
    return "\n\n".join(wrapped)


def _run(args: list[str]) -> int:
    """Handle a command without a verb: show the config with ``--cfg``, else run it, or each job of a sweep.

    Args:
        args: The command line, without ``posbench``.

    Returns:
        The exit status.
    """
    from posbench.run.budget import Stopwatch

    watch = Stopwatch()
    _refuse_unknown_verb(args)
    if {"-h", "--help"} & set(args):
        print(HELP)
        return 0
    if "--cfg" in args:
        return _show_config(args)
    with _signs_of_life():
        return _run_jobs(args, watch)


def _run_with_budget(name: str, args: list[str]) -> int:
    """Run one of :data:`BUDGET_VERBS`."""
    from posbench.run.budget import Stopwatch

    watch = Stopwatch()
    with _signs_of_life(is_error="--json" in args):
        verb: Callable[..., int] = find_verb(name)
        return verb(args, watch)


@contextmanager
def _signs_of_life(is_error: bool = False) -> Iterator[None]:
    """Print regularly what is being done while the block runs, where nothing else is printed.

    Args:
        is_error: Whether to print to stderr, as stdout is for a program.
    """
    from posbench.report.console import make_console
    from posbench.run.heartbeat import beating, doing

    def say(text: str) -> None:
        if is_error:
            print(text, file=sys.stderr)
        else:
            make_console().print(text)

    with beating(say), doing("loading libraries"):
        yield


def _run_jobs(args: list[str], watch: Stopwatch) -> int:
    """Run the config of the arguments, or each job of a sweep.

    Args:
        args: The arguments of the command.
        watch: Runs since the command began; a budget of time counts from there.

    Returns:
        The highest exit status of a job.
    """
    from posbench.pipeline.compose import compose, launch
    from posbench.run.heartbeat import doing

    command = command_line(args)
    jobs = compose(args)
    # A launcher plugin or sweeper of the user's choice.
    if jobs.run_by_hydra:
        records = launch(args, jobs, lambda job: _run_job(job, command))
    else:
        models = _share_work(jobs.composed, command)
        by_number = dict(jobs.refused)
        for job in jobs.composed:
            # The time of a job of a sweep begins with the job.
            own_watch = None if job.multirun else watch
            lm = models.get(job.number)
            by_number[job.number] = _run_job(job, command, lm, own_watch)
        records = [by_number[number] for number in sorted(by_number)]
    for record in records:
        for line in record.get("error", "").splitlines():
            print(f"posbench: {line}", file=sys.stderr)
    if len(records) > 1 or any(record["multirun"] for record in records):
        from posbench.report.console import make_console
        from posbench.report.sweep import summarise

        with doing(f"summarising {len(records)} runs"):
            summarise(records, make_console(), command=command)
    return max((record["status"] for record in records), default=0)


def _refuse_unknown_verb(args: Sequence[str]) -> None:
    """Refuse a first word that is neither a verb nor ``key=value``.

    Raises:
        UserError: The hint is the nearest verb, or the right command for a URL.
    """
    if args and re.fullmatch("[^-+~=][^=]*", args[0]):
        allowed = f"{', '.join(VERBS)}; a run takes no verb: posbench key=value"
        hint = NO_VERBS.get(args[0]) or near(args[0], list(VERBS), "posbench --help")
        from posbench.pipeline.arguments import URL

        if URL.fullmatch(args[0]):
            hint = f"posbench diagnose {args[0]}, or posbench model.base_url={args[0]}"
        raise UserError("verb", args[0], allowed, hint)


def _share_work(jobs: Sequence[ComposedConfig], command: str) -> dict[int, LM]:
    """Do the work that jobs of a sweep share: rows of runs that differ in their methods alone.

    Args:
        jobs: The jobs.
        command: The command line, for the record.

    Returns:
        The model that a job can use, by its number.
    """
    if len(jobs) < 2:
        return {}
    from posbench.model.load import is_in_process
    from posbench.pipeline.prepare import prepare
    from posbench.pipeline.sharing import groups_to_share, run_together
    from posbench.report.console import make_console

    configs: dict[int, Config] = {}
    for composed in jobs:
        if not is_in_process(composed.raw.get("model")):
            continue  # served runs share nothing, and their server is asked by each
        try:
            configs[composed.number] = prepare(composed).config
        except Exception as error:
            # The job itself reports its fault.
            if in_one_line(error) is None:
                raise
    models: dict[int, LM] = {}
    for group in groups_to_share(list(configs.values())):
        try:
            lm = run_together(group, command=command, console=make_console())
        except Exception as error:
            # A defect here must not stop the jobs: each can do its work alone and report its own errors.
            if own_code_error(error) is None:
                logging.exception("%d jobs share nothing", len(group))
            continue
        if lm:
            for number, config in configs.items():
                if config in group:
                    models[number] = lm
    return models


def _run_job(
    composed: ComposedConfig,
    command: str,
    lm: LM | None = None,
    watch: Stopwatch | None = None,
) -> Record:
    """Run one job and return its record, so that a sweep continues after any error.

    Args:
        composed: The config as composed.
        command: The command line.
        lm: The model, where jobs before loaded it.
        watch: Measures the job; None: from now on.

    Returns:
        The record of a job: overrides, run folder, exit status.
    """
    from posbench.pipeline.execute import execute
    from posbench.pipeline.multirun import new_record
    from posbench.pipeline.prepare import prepare
    from posbench.report.console import make_console
    from posbench.run.budget import Stopwatch
    from posbench.run.heartbeat import doing, set_interval

    watch = watch or Stopwatch()
    record = new_record(composed.overrides, composed.multirun)
    try:
        with doing("checking the config, the files and the longest prompts"):
            run = prepare(composed)
        set_interval(run.config.runtime.log_every)
        # Jobs are sent by a verb, so that a run never leaves this machine unasked.
        cluster = run.config.runtime.cluster
        if cluster:
            hint = (
                "posbench submit with the same arguments, or leave out runtime/cluster"
            )
            raise UserError(
                "runtime/cluster",
                cluster.kind,
                "none: a run without a verb runs on this machine",
                hint,
            )
        for line in run.warnings:
            make_console().print(line)
        config = run.config
        plan = None
        if config.budget:
            from posbench.pipeline.apply_budget import apply_budget

            config, plan, lm = apply_budget(run, make_console(), watch)
        folder = execute(
            config,
            command=command,
            console=make_console(),
            lm=lm,
            worker_main=main,
            plan=plan,
            watch=watch,
        )
        record["folder"] = str(folder)
    except IncompleteRun as error:
        print(f"posbench: {error}", file=sys.stderr)
        record["status"] = 1
    except BrokenPipeError:
        raise  # whoever read the output has gone: no job's defect
    except Exception as error:
        fault = in_one_line(error)
        if fault:
            _print_traceback()
            complain(fault)
        elif not composed.multirun:
            raise
        else:
            # One job's defect must not stop the others of a sweep.
            logging.exception("%s", " ".join(composed.overrides))
        record["status"] = fault.status if fault else 1
    return record


def _show_config(args: list[str]) -> int:
    """Print the whole config of ``--cfg job``, filled in and resolved, as YAML; of a sweep that of each job.

    Args:
        args: The command line; ``--cfg`` is among them.

    Returns:
        The exit status.
    """
    import yaml

    from posbench.pipeline.compose import compose

    index = args.index("--cfg")
    if args[index + 1 : index + 2] != ["job"]:
        allowed = "job, which prints the whole config"
        value = " ".join(args[index + 1 : index + 2])
        raise UserError("--cfg", value, allowed, "posbench --cfg job")
    for job in compose([*args[:index], *args[index + 2 :]]).composed:
        print(yaml.safe_dump(job.raw, sort_keys=False), end="")
    return 0


def run_below(parent: int) -> None:
    """Entry point of a process that another one started; on Linux it ends with its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit(143)
    run()


def run() -> None:
    """Entry point of the ``posbench`` command."""
    # Python has None for a stream that the caller closed, as ``>&-`` does.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8")
            setattr(sys, name, stream)
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the pipe (head, less) has closed it; shells give 141 for this.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    sys.exit(status)
