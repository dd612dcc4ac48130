"""Work that is shared: jobs of a sweep in one pass over the prompts, a run's rows by several processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress

from rich.console import Console
from rich.text import Text

from posbench.errors import UserError
from posbench.files.atomic import digest
from posbench.files.hardware import hardware
from posbench.model.lm import LM
from posbench.pipeline.config import Config, trial
from posbench.pipeline.execute import (
    ROWS,
    Opened,
    execute,
    finished,
    need_unchanged,
    opened,
    place_of,
    set_threads,
)
from posbench.pipeline.identity import identity, reads
from posbench.pipeline.ready import prepared, quiet
from posbench.pipeline.stages import search
from posbench.run.base import IncompleteRun
from posbench.run.claim import find
from posbench.run.folder import STATUS, RunDir, run_id
from posbench.run.lease import owned
from posbench.run.parts import FOUND, HARDWARE, PARTS, Part, lacking, leave_found


def together(configs: Sequence[Config], *, command: str, console: Console) -> LM | None:
    """Search for runs that differ in their methods alone, then make the rows of all of them in one pass over
    the prompts; each run then finds its own. What one cannot do here is left to it. Returns the model."""
    with ExitStack() as stack:
        runs = list[Opened]()
        lm = None
        for config in configs:
            try:
                one = stack.enter_context(
                    opened(config, command, Console(quiet=True), lm)
                )
                if not one.run.out.damaged():
                    one.run.out.resume(config.stages, config.raw, one.facts)
                    lm = one.run.lm
                    if "search" in config.stages:
                        with one.run.out.recorded("search"), one.run.measured("search"):
                            search.run(config, one.run)
                    runs.append(one)
            except (UserError, IncompleteRun):
                continue  # its own run tells
        if len(runs) > 1:
            first = runs[0].run
            first.console = console
            console.rule(
                Text(
                    f"{len(runs)} runs that differ in their methods alone", style="bold"
                )
            )
            for name, module in ROWS.items():
                if name in configs[0].stages:
                    with first.measured(name):
                        module.fill([one.run for one in runs])
        for one in runs:
            with suppress(UserError):  # its own run tells
                need_unchanged(one.read, one.run.out)
        return lm


def sharing(configs: Sequence[Config]) -> list[list[Config]]:
    """Of the jobs of a sweep, those that :func:`together` serves: unfinished ones that differ in their
    methods alone, where a prompt's prefill is of use to others."""
    alike = dict[str, list[Config]]()
    for config in configs:
        stages = set(config.stages)
        runtime = config.runtime
        here = (
            config.uses_model
            and not config.model.base_url
            and runtime.share
            and runtime.workers == 1
        )
        if (
            here
            and stages & ROWS.keys()
            and stages <= ROWS.keys() | {"search", "report"}
        ):
            rest = {
                key: part
                for key, part in config.raw.items()
                if key not in ("method", "typed")
            }
            with suppress(UserError):  # its own run tells
                if trial(config).prefill() and not finished(config):
                    alike.setdefault(digest([rest, config.stages]), []).append(config)
    return [each for each in alike.values() if len(each) > 1]


def make_part(config: Config, part: Part, console: Console) -> tuple[RunDir, LM | None]:
    """Make a part of the rows of a run that other processes may own, in a folder of its own.

    Returns the run's folder, and the model where it was needed.

    Raises:
        UserError: Another process makes this part, or a file changed.
        IncompleteRun: Some rows failed.
    """
    read = reads(config)
    who = identity(config, read)
    quiet()
    set_threads(config)
    place = place_of(config, who, read)
    run = prepared(config, who, read, console)
    folder = find(*place)
    assert folder, "its folder was made before"
    run.main = RunDir(folder, run_id(*place[2:]))
    run.out = part.place(run.main)
    run.part = part
    run.out.path.mkdir(parents=True, exist_ok=True)
    with owned(run.out.path):
        run.found = run.main.read_json(f"{PARTS}/{FOUND}") or None
        status = run.out.status()
        machines = [*status.get(HARDWARE, []), hardware()]
        run.out.write_facts(STATUS, {**status, HARDWARE: list(dict.fromkeys(machines))})
        for stage, module in ROWS.items():
            if stage in config.stages and not run.out.stage(module.FILE).get("done"):
                with run.measured(stage):
                    module.fill([run])
                    need_unchanged(read, run.out)
        run.out.write_facts(STATUS, {**run.out.status(), "state": "done"})
    return run.main, vars(run).get("lm")


def make_shard(config: Config, part: Part, command: str, console: Console) -> None:
    """Make a part of a run, and finish the run where that was the last one.

    Raises:
        UserError: Another process owns the run, or makes this part; a file changed.
        IncompleteRun: Some rows failed.
    """
    if "search" in config.stages:
        with opened(config, command, console) as (run, _, facts):
            if not run.out.done and not (run.out.path / PARTS / FOUND).is_file():
                run.out.resume(config.stages, config.raw, facts)
                with run.out.recorded("search"), run.measured("search"):
                    search.run(config, run)
                leave_found(run.out, run.found)
    if finished(config) is None:
        whole, lm = make_part(config, part, console)
        if not lacking(whole, part.of):
            execute(config, command=command, console=console, lm=lm)
