"""Work that is shared: jobs of a sweep in one pass over the prompts, a run's rows by several processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress

from rich.console import Console
from rich.text import Text

from posbench.errors import UserError
from posbench.files.atomic import short_hash
from posbench.files.hardware import describe_hardware
from posbench.model.lm import LM
from posbench.pipeline.config import Config
from posbench.pipeline.execute import (
    ROW_STAGES,
    ClaimedRun,
    RunLocation,
    claim_run,
    execute,
    find_finished_run,
    need_unchanged,
    set_threads,
)
from posbench.pipeline.identity import identity, run_contents
from posbench.pipeline.prepare import build_run, silence_transformers
from posbench.pipeline.stages import search, stage_module
from posbench.run.base import IncompleteRun, Run
from posbench.run.budget import Stopwatch
from posbench.run.folder import MIXED, STATUS, RunDir
from posbench.run.lease import owning
from posbench.run.shards import (
    HARDWARE,
    Shard,
    WorkerMain,
    has_found_parameters,
    missing_shards,
    read_found_parameters,
    write_found_parameters,
)


def run_together(
    configs: Sequence[Config], *, command: str, console: Console
) -> LM | None:
    """Make the rows of runs that differ in their methods alone, in one pass over the prompts.

    Each run then only has to finish; the first one is charged for the time. Failures here are left to the run they
    belong to.

    Args:
        configs: The runs, as :func:`groups_to_share` gives them.
        command: The command line, for the record.
        console: Where progress goes.

    Returns:
        The model, where one was loaded.
    """
    watch = Stopwatch()
    with ExitStack() as stack:
        claimed_runs = list[ClaimedRun]()
        lm = None
        for config in configs:
            try:
                claimed = stack.enter_context(
                    claim_run(config, command, Console(quiet=True), lm)
                )
                out = claimed.run.out
                if out.damaged():
                    continue
                out.resume(config.stages, config.raw, claimed.facts)
                lm = claimed.run.lm
                # The search gives the method its constants, which the rows need.
                if "search" in config.stages:
                    _search(config, claimed.run)
                claimed_runs.append(claimed)
            except (UserError, IncompleteRun):
                continue  # its own run reports it
        if len(claimed_runs) > 1:
            _fill_rows(configs[0], [claimed.run for claimed in claimed_runs], console)
        for claimed in claimed_runs:
            with suppress(UserError):  # its own run reports it
                need_unchanged(claimed.contents, claimed.run.out)
        if claimed_runs:
            claimed_runs[0].run.out.add_seconds(watch.seconds)
        return lm


def _search(config: Config, run: Run) -> None:
    with run.out.recorded("search"), run.meter.stage("search", run.out):
        search.run(config, run)


def _fill_rows(config: Config, runs: Sequence[Run], console: Console) -> None:
    """Make the rows of all runs, stage by stage.

    Args:
        config: Config of one of them; they differ in their methods alone.
        runs: The runs; the first one shows progress, and is charged for the time.
        console: Where progress goes.
    """
    first = runs[0]
    first.console = console
    title = f"{len(runs)} runs that differ in their methods alone"
    console.rule(Text(title, style="bold"))
    for stage in ROW_STAGES:
        if stage in config.stages:
            with first.meter.stage(stage, first.out):
                stage_module(stage).fill(runs)


def groups_to_share(configs: Sequence[Config]) -> list[list[Config]]:
    """Group the unfinished jobs of a sweep that differ in their methods alone, so that they share prefills.

    Jobs without such a partner are left out. :func:`run_together` makes the rows of a group.
    """
    groups = dict[str, list[Config]]()
    for config in configs:
        if not _may_share(config):
            continue
        common = {
            group: section
            for group, section in config.raw.items()
            if group not in ("method", "typed", "constants")
        }
        with suppress(UserError):  # its own run reports it
            shares_prefill = config.method_under_test().trial().prefill()
            if shares_prefill and not find_finished_run(config):
                groups.setdefault(short_hash([common, config.stages]), []).append(
                    config
                )
    return [group for group in groups.values() if len(group) > 1]


def _may_share(config: Config) -> bool:
    """Whether :func:`run_together` can make a run's rows: a local model, one process, shared prefills, no study."""
    stages = set(config.stages)
    only_row_stages = stages <= {*ROW_STAGES, "search", "report"}
    local_model = config.uses_model and config.model.in_process
    shares = bool(config.runtime.share) and config.runtime.workers == 1
    makes_rows = bool(stages & set(ROW_STAGES))
    # A budget, or a decided shape, ends the rounds of each run by itself.
    is_sized = config.budget is None and not config.runtime.until
    return is_sized and local_model and shares and makes_rows and only_row_stages


def make_shard(
    config: Config, shard: Shard, console: Console
) -> tuple[RunDir, LM | None]:
    """Make a shard of the rows of a run that other processes may own, in a folder of its own.

    Rows that were made while a file changed are made anew.

    Args:
        config: The checked config.
        shard: The shard.
        console: Where progress goes.

    Returns:
        The run's folder, and the model where it was needed.

    Raises:
        UserError: Another process makes this shard, a file changed, or the run has still to search.
        IncompleteRun: Some rows failed.
    """
    contents = run_contents(config)
    run_identity = identity(config, contents)
    main_out = RunLocation.of(config, run_identity, contents).find()
    assert main_out, "its folder was made before"
    if "search" in config.stages and not has_found_parameters(main_out):
        spelled = f"{shard.index}/{shard.count}"
        allowed = "a part of a run whose search is done: its method comes from there"
        hint = f"posbench resume {main_out.path} --shard={spelled} searches first"
        raise UserError("--part", spelled, allowed, hint)
    silence_transformers()
    set_threads(config)
    run = build_run(config, console, run_identity, contents)
    run.main_out = main_out
    run.out = shard.folder(main_out)
    run.shard = shard
    run.out.path.mkdir(parents=True, exist_ok=True)
    with owning(run.out.path):
        # The stages whose rows can be divided among processes.
        row_stages = {stage: stage_module(stage) for stage in ROW_STAGES}
        if run.out.status()["state"] == MIXED:
            for name in (STATUS, *(module.FILE for module in row_stages.values())):
                (run.out.path / name).unlink(missing_ok=True)
        # The search ran in the process that owns the run.
        run.method.use(read_found_parameters(main_out))
        status = run.out.status()
        # Merging adds these machines to the run's provenance.
        machines = [*status.get(HARDWARE, []), describe_hardware()]
        run.out.write_facts(STATUS, {**status, HARDWARE: list(dict.fromkeys(machines))})
        for stage, module in row_stages.items():
            if stage in config.stages and not run.out.stage(module.FILE).get("done"):
                with run.meter.stage(stage, run.out):
                    module.fill([run])
                    need_unchanged(contents, run.out)
        run.out.write_facts(STATUS, {**run.out.status(), "state": "done"})
    return main_out, vars(run).get("lm")


def make_shard_and_finish(
    config: Config,
    shard: Shard,
    command: str,
    console: Console,
    worker_main: WorkerMain,
) -> None:
    """Make a shard of a run, and finish the run where that was the last shard.

    Args:
        config: The checked config.
        shard: The shard.
        command: The command line, for the record.
        console: Where progress and tables go.
        worker_main: Entry point of worker processes, see :func:`posbench.pipeline.execute.execute`.

    Raises:
        UserError: Another process owns the run, or makes this shard; a file changed.
        IncompleteRun: Some rows failed.
    """
    if "search" in config.stages:
        with claim_run(config, command, console) as (run, _, facts):
            if not run.out.done and not has_found_parameters(run.out):
                run.out.resume(config.stages, config.raw, facts)
                _search(config, run)
                write_found_parameters(run.out, run.method.found_parameters)
    if find_finished_run(config):
        return
    main_out, lm = make_shard(config, shard, console)
    if not missing_shards(main_out, shard.count):
        execute(
            config, command=command, console=console, lm=lm, worker_main=worker_main
        )
