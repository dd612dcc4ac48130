"""One run: claim the folder, take the stages in order, finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from posbench.errors import UserError
from posbench.files.digests import Content, changed
from posbench.files.hardware import default_threads
from posbench.files.sources import Source, cached
from posbench.late import torch
from posbench.model import families
from posbench.model.guard import probe
from posbench.model.lm import LM
from posbench.pipeline.compose import composed
from posbench.pipeline.config import Config, check
from posbench.pipeline.identity import (
    files,
    identity,
    provenance,
    reads,
    run_name,
    threads,
    version_key,
)
from posbench.pipeline.ready import longest, need_words, prepared, quiet
from posbench.pipeline.stages import evaluate, intervene, report, search, study
from posbench.run.base import IncompleteRun, Run
from posbench.run.claim import claim, find
from posbench.run.folder import PROVENANCE, STATUS, RunDir, open_run, run_id
from posbench.run.parts import Helpers, Part, settle

STAGES: Mapping[str, Callable[[Config, Run], None]] = {
    "search": search.run,
    "study": study.run,
    "intervene": intervene.run,
    "evaluate": evaluate.run,
    "report": report.run,
}

ROWS: Mapping[str, Any] = {"intervene": intervene, "evaluate": evaluate}
"""Stages whose rows several runs make together, or several processes share out."""

MIXED = "mixed"
"""State of a run that a file changed under: its rows may stem from either content, so it is never resumed."""


def execute(
    config: Config, *, command: str, console: Console, lm: LM | None = None
) -> Path:
    """Run the stages of a config in its versioned folder; finished work is not repeated.

    Args:
        config: The checked config.
        command: The command line, for the record.
        console: Where progress and tables go.
        lm: Its model, where that is loaded already.

    Returns:
        The run folder.

    Raises:
        UserError: Something the user can correct.
        IncompleteRun: Some rows failed and will be retried by the same command.
    """
    started = time.monotonic()
    with opened(config, command, console, lm) as (run, read, facts):
        out, damaged = run.out, run.out.damaged()
        if not damaged and _ended(out, config):
            console.print("finished before: nothing is computed again")
            report.show(out.path, console)
            return out.path
        if damaged:
            console.print(
                f"damaged: {', '.join(damaged)}; made again, rows that are whole are kept"
            )
        earlier = out.hardware()
        out.resume(config.stages, config.raw, facts)
        if earlier and out.hardware() != earlier:
            machines = (
                f"begun on {' and '.join(earlier)}, continued on {facts['hardware']}"
            )
            console.print(
                f"{machines}: their rows agree up to rounding, not to the byte",
                soft_wrap=True,
                markup=False,
            )
        try:
            with _helped(config, run):
                for stage in config.stages:
                    if stage == "report":
                        _settle(run)
                    with out.recorded(stage), run.measured(stage):
                        STAGES[stage](config, run)
                        need_unchanged(read, out)
                _settle(run)
        except BaseException as error:
            state = "incomplete" if isinstance(error, IncompleteRun) else "failed"
            state = MIXED if out.status()["state"] == MIXED else state
            with suppress(OSError):  # a full disk, of which the error itself tells
                out.finish(
                    state,
                    f"{type(error).__name__}: {error}",
                    time.monotonic() - started,
                )
            raise
        out.finish("done", seconds=time.monotonic() - started)
        if "report" not in config.stages:
            report.show(out.path, console)
        return out.path


@contextmanager
def _helped(config: Config, run: Run) -> Iterator[None]:
    """Processes that make parts of the rows, where ``runtime.workers`` asks for more than this one."""
    count = config.runtime.workers
    if count > 1 and parted(config):
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        run.part = Part(0, count)
        run.helpers = Helpers(run.out, count, gpus, run.console)
    try:
        yield
    finally:
        if run.helpers:
            run.helpers.stop()


def _settle(run: Run) -> None:
    """All rows are made: what their makers took is what the run took."""
    if run.helpers:
        run.helpers.finish()
    settle(run.out)


def set_threads(config: Config) -> None:
    """Give torch the CPU threads of a run: those asked for, else all, shared out among its workers. Rounding
    depends on them, so an earlier run of the process must not leave its own."""
    processes = config.runtime.workers if parted(config) else 1
    torch.set_num_threads(threads(config) or max(default_threads() // processes, 1))


def parted(config: Config) -> bool:
    """Whether processes can share out a run's rows: not those of a study, nor of a served model."""
    return bool(
        not config.study
        and not config.model.base_url
        and set(ROWS) & set(config.stages)
    )


class Opened(NamedTuple):
    """A run whose folder is claimed, what the files that it reads hold, and where it is made."""

    run: Run
    read: Sequence[Content]
    facts: Mapping[str, Any]


@contextmanager
def opened(
    config: Config, command: str, console: Console, lm: LM | None = None
) -> Iterator[Opened]:
    """Claim the folder of a run.

    Raises:
        UserError: A file cannot be read, the model cannot be run, or the folder is another process's.
    """
    # First of all: weights to download, with the hub's own progress bars.
    read = reads(config)
    who = identity(config, read)
    quiet()
    set_threads(config)
    subject = config.study_name or config.task.name
    parts = (
        [config.model.name, subject, config.choice.name]
        if config.uses_model
        else [subject]
    )
    place = place_of(config, who, read)
    run = prepared(config, who, read, console)
    if lm:
        run.lm = lm
    folder = find(*place)
    if folder is None or RunDir(folder, run_id(*place[2:])).status()[
        "stages"
    ].keys() <= {"config"}:
        preflight(config, run)
    console.rule(Text("  ".join(parts), style="bold"))
    facts = provenance(config, command, who, read)
    with claim(*place, config.raw, facts) as out:
        run.out = out
        if out.status()["state"] == MIXED:
            raise UserError(
                "run folder",
                str(out.path),
                "rows from one content of each file",
                "remove it",
            )
        yield Opened(run, read, facts)


def prepared_folder(config: Config, command: str) -> Path:
    """The folder of a run that other processes are to make: with config and provenance, if there is none yet.

    Raises:
        UserError: A file cannot be read, or the outputs cannot be written.
    """
    read = reads(config)
    who = identity(config, read)
    place = place_of(config, who, read)
    if folder := find(*place):
        return folder
    facts = provenance(config, command, who, read)
    # This machine makes no rows.
    facts |= {"hardware": "", "prepared_on": facts["hardware"]}
    with claim(*place, config.raw, facts) as out:
        return out.path


def recorded(folder: Path) -> Config:
    """The config of a run folder, from what it records alone.

    Raises:
        UserError: It is no run folder, or the code, a file or a setting has changed since.
    """
    run = open_run(folder.absolute())
    raw = run.config("runtime")
    runtime = {**raw["runtime"], "outputs": str(run.path.parents[2])}
    # Groups that take no part are not recorded: whatever they are, they are not looked at.
    config = check(
        {**composed().raw, "study": None, "experiment": None, **raw, "runtime": runtime}
    )
    read = reads(config)
    found = find(*place_of(config, identity(config, read), read))
    if found is None or not found.samefile(folder):
        allowed = "one of this code, these libraries and files, and this kind of device"
        hint = f"give its command again: {run.facts(PROVENANCE).get('command')}"
        raise UserError("run folder", str(folder), allowed, hint)
    return config


def finished(config: Config) -> Path | None:
    """The folder of a run that :func:`execute` would show and not compute again; None for any other. Makes
    nothing.

    Raises:
        UserError: A file that takes part cannot be read, or the outputs cannot.
    """
    read = reads(config)
    place = place_of(config, identity(config, read), read)
    folder = find(*place)
    out = RunDir(folder, run_id(*place[2:])) if folder else None
    return folder if out and _ended(out, config) and not out.damaged() else None


def absent(config: Config) -> list[Source]:
    """What a run would download first; empty if all of it is here.

    Raises:
        UserError: Model and task do not go together.
    """
    need_words(config)
    return [
        source
        for source in files(config)
        if source.kind != "path" and cached(source) is None
    ]


def place_of(
    config: Config, who: Mapping[str, Any], read: Sequence[Content]
) -> tuple[Path, str, dict[str, Any], str]:
    """Outputs, suite, version key and name: what :func:`posbench.run.claim.find` asks for."""
    suite = (
        config.experiment.name
        if config.experiment
        else config.study_name or config.task.name
    )
    outputs = Path(config.runtime.outputs).expanduser()
    return outputs, suite, version_key(), run_name(config, who, read)


def _ended(out: RunDir, config: Config) -> bool:
    return out.done and all(out.stage(stage).get("done") for stage in config.stages)


def preflight(config: Config, run: Run) -> None:
    """Load the model and refuse what its weights alone tell, so that bad input leaves no folder behind; all
    else :func:`posbench.pipeline.ready.ready` has refused.

    Raises:
        UserError: The weights are not the checkpoint's, or NaN comes out.
    """
    if config.model.base_url:
        run.endpoint.check(any(e.choices for e in run.evaluation))
        models = run.endpoint.models()
        if models and config.model.server_name not in models:
            listed = ", ".join(models[:8])
            said = f"server: it lists {listed}, not {config.model.server_name}, and answers all the same"
            run.console.print(said, soft_wrap=True, markup=False)
        return
    if config.uses_model:
        few = min(
            64, run.lm.context_window, families.text_config(run.lm.model).vocab_size
        )
        for ids in (range(few), *longest(run, config.stages)):
            with suppress(torch.OutOfMemoryError), run.trial().applied(run.lm) as lm:
                probe(lm, ids)


def need_unchanged(read: Sequence[Content], out: RunDir) -> None:
    """Raise UserError, and let no other run copy from this one, unless its files hold what they held."""
    if other := changed(read):
        out.write_facts(STATUS, {"state": MIXED, "stages": {}})
        allowed = "a file that stays as it is while a run reads it; it changed"
        hint = f"remove {out.path}, whose rows may stem from either, and run the same command again"
        raise UserError(other.source.field, str(other.file), allowed, hint)
