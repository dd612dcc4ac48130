"""The command line's entry: runs, and the verbs by their names."""

from __future__ import annotations

import io
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from posbench import versions
from posbench.errors import complain, in_one_line

HELP = """posbench finds, explains and removes position bias in language models.

  posbench                                         the embedded model: search, intervene, evaluate, report
  posbench task=kv_retrieval model=mistral7b method=scale_channel
  posbench model=hf model.path=DIR stages=[search] find the channel of your own checkpoint
  posbench method=[layer_scaling,scale_channel]    one inside the other
  posbench -m method.factor=1,0.5,0,-0.5,-1        sweep; ends with one table and one figure
  posbench study=rollout                           what happens inside the model
  posbench experiment=yu2025_fig6                  one table or figure of a paper
  posbench model=llama2_13b runtime=gpu runtime.device_map=auto     over all GPUs of this machine

  posbench figures [NAMES] [paper=yu2025] [model=NAME] [--jobs N]   many experiments, side by side
  posbench ls [models|methods|tasks|searches|studies|runtimes|experiments|families] [--config-dir DIR]
  posbench ls runs [FILTERS] [--outputs DIR]       find runs again: what ran, score, bias, age, state
  posbench compare RUN RUN... [--out FOLDER]       runs side by side: one table, one figure
  posbench fetch [OVERRIDES] [--dry-run]           list and download what a config needs
  posbench check-data FILE [OVERRIDES]             what a file of your own holds, and the command that asks it
  posbench validate [OVERRIDES]                    compose and check configs, run nothing
  posbench report DIR                              redraw the figures and report.html of a run or a sweep
  posbench report OUTPUTS [--out FOLDER]           of many runs: one gallery of all figures, PDFs and tables
  posbench rescore DIR                             score saved replies of a run or sweep again, no model
  posbench show DIR [--wrong] [--all] [--id ID]    prompts, expected answers, replies and scores of a run
  posbench docs PAGE [DIR] [--out FILE]            a page of the documentation from code or runs, as Markdown:
                                                   families, data, claims, run, experiments or gallery
  posbench lm_eval FLAGS                           lm-evaluation-harness under a method; its own flags

Every key can be set as key=value; `--cfg job` prints the whole config, `--config-dir DIR` adds your own YAML
files, `--hydra-help` lists Hydra's own flags. Runs go to outputs/<task>/vNNN/<model>__<method>__<hash>; the
same command resumes. Exit status: 0 done; 1 some rows failed (run again to retry them); 2 something to
correct in the input; 3 the machine stands in the way: disk, permission, memory; 130 stopped by Ctrl-C; 143 by
SIGTERM.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that is no text can be told, too
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        if args and args[0] in ("-h", "--help", "help"):
            print(HELP)
            return 0
        if args and args[0] == "--version":
            print(f"posbench {versions.__version__}")
            return 0
        versions.check()
        with _terminable():
            verb = _verbs().get(args[0]) if args else None
            if verb and args[0] != "lm_eval" and {"-h", "--help"} & set(args[1:]):
                print(_usage(args[0], verb))
                return 0
            return verb(args[1:]) if verb else _run(args)
    except KeyboardInterrupt as stop:
        print("posbench: stopped; the same command resumes", file=sys.stderr)
        return 143 if isinstance(stop, _Terminated) else 130
    except Exception as error:
        told = in_one_line(error)
        if told is None:
            raise
        complain(told)
        return told.status


class _Terminated(KeyboardInterrupt):
    """SIGTERM: batch systems send it, and a run ends as with Ctrl-C."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does; only the main thread can hear it."""

    def stop(*_: object) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _usage(name: str, verb: Callable[[list[str]], int]) -> str:
    """How a verb is called, as :data:`HELP` has it, and what it does."""
    form = next(line.strip() for line in HELP.splitlines() if line.startswith(f"  posbench {name} "))
    return f"usage: {form.split('  ')[0]}\n{(verb.__doc__ or '').splitlines()[0]}"


def _verbs() -> dict[str, Callable[[list[str]], int]]:
    # Help and version do without the libraries that verbs need.
    from posbench.cli import check_data, docs, figures, lm_eval, runs, verbs

    each: tuple[Callable[[list[str]], int], ...] = (
        verbs.ls,
        verbs.fetch,
        verbs.validate,
        verbs.report,
        verbs.rescore,
        verbs.show,
        runs.compare,
    )
    each += docs.docs, figures.figures
    return {
        **{verb.__name__: verb for verb in each},
        "lm_eval": lm_eval.command,
        "check-data": check_data.check_data,
    }


def _run(args: list[str]) -> int:
    """Run what the arguments ask for, once or once per job of a sweep."""
    from posbench.pipeline.compose import compose
    from posbench.report.console import terminal
    from posbench.report.sweep import summarise

    if "--cfg" in args:
        return _show_config(args)
    command = shlex.join(["posbench", *args])
    jobs = compose(args, lambda composed: _job(composed, command))
    for line in (line for job in jobs for line in job.get("error", "").splitlines()):
        print(f"posbench: {line}", file=sys.stderr)
    if len(jobs) > 1 or any(job["multirun"] for job in jobs):
        summarise(jobs, terminal())
    return max((job["status"] for job in jobs), default=0)


def _job(composed: Any, command: str) -> None:
    """One run: everything that can go wrong ends as a status, so that a sweep goes on."""
    from posbench.pipeline.compose import leave
    from posbench.pipeline.execute import execute
    from posbench.pipeline.ready import ready
    from posbench.report.console import terminal
    from posbench.run.base import IncompleteRun

    facts = {"overrides": composed.overrides, "multirun": composed.multirun}
    record: dict[str, Any] = {**facts, "folder": None, "status": 0}
    try:
        made = ready(composed)
        for line in made.said:
            terminal().print(line, soft_wrap=True, markup=False)
        record["folder"] = str(execute(made.config, command=command, console=terminal()))
    except IncompleteRun as error:
        print(f"posbench: {error}", file=sys.stderr)
        record["status"] = 1
    except Exception as error:
        told = in_one_line(error)
        if told:
            complain(told)
        elif not composed.multirun:
            raise
        else:
            # One job's defect must not stop the others of a sweep.
            logging.exception("%s", " ".join(composed.overrides))
        record["status"] = told.status if told else 1
    finally:
        leave(composed.number, record)


def _show_config(args: list[str]) -> int:
    """Print the whole config of ``--cfg job``, filled in and resolved; Hydra prints other choices."""
    import yaml

    from posbench.pipeline.compose import compose

    at = args.index("--cfg")
    if args[at + 1 : at + 2] != ["job"]:
        compose(args, lambda composed: None)
        return 0
    rest = [a for a in (*args[:at], *args[at + 2 :]) if a != "--resolve"]
    compose(rest, lambda composed: print(yaml.safe_dump(composed.raw, sort_keys=False), end=""))
    return 0


def run() -> None:
    """Entry point of the ``posbench`` command."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads the pipe (head, less) has read enough; a shell calls this 141.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    sys.exit(status)
