"""The sizes of a run for its budget: chosen once, recorded, and taken again by later sessions."""

from __future__ import annotations

from typing import NamedTuple

from rich.console import Console

from posbench.files.atomic import short_hash
from posbench.model.lm import LM
from posbench.pipeline.budget import (
    PLANNED_KEYS,
    BudgetPlan,
    check_budget,
    plan_run,
    read_plan,
    with_settings,
    write_plan,
)
from posbench.pipeline.config import Config
from posbench.pipeline.execute import RunLocation, set_threads
from posbench.pipeline.identity import identity, run_contents
from posbench.pipeline.prepare import PreparedRun, silence_transformers
from posbench.pipeline.study_budget import plan_study
from posbench.run.budget import Stopwatch
from posbench.run.heartbeat import doing

BUDGETS = ".budgets"
"""Folder next to the versions of a suite, with the plans of budgets."""


class BudgetedRun(NamedTuple):
    """A config with the sizes that its budget chose, the choice, and the model where it was timed."""

    config: Config
    plan: BudgetPlan
    lm: LM | None


def apply_budget(
    prepared: PreparedRun, console: Console, watch: Stopwatch
) -> BudgetedRun:
    """Choose the sizes of a run for its budget, or take an earlier session's choice.

    The choice is recorded in the outputs, so that a killed run resumes with it.

    Args:
        prepared: The run, with a budget.
        console: Where progress and the choice go.
        watch: Measures this session.

    Raises:
        UserError: The budget is too small, or the run's work is not known beforehand.
    """
    config = prepared.config
    assert config.budget is not None
    watch.waits_for_server = not config.model.in_process
    with doing("hashing the files that the run reads"):
        contents = run_contents(config)
    location = RunLocation.of(config, identity(config, contents), contents)
    # The choice depends on which sizes the user typed: those it leaves alone.
    typed = [key for key in sorted(config.typed) if key.startswith(PLANNED_KEYS)]
    # Prices matter only for a budget of money.
    price = config.model.price if config.budget.usd else None
    key = short_hash([location.run_id, config.stages, config.budget.text, typed, price])
    file = location.outputs / location.suite / BUDGETS / f"{key}.json"
    plan = read_plan(file)
    timed = None
    if plan is None:
        check_budget(config)
        location.find()  # outputs that cannot be written are refused before anything is timed
        silence_transformers()
        set_threads(config)
        with doing("choosing sizes for the budget"):
            if config.study:
                plan, timed = plan_study(config, prepared.reader, console, watch)
            else:
                plan, timed = plan_run(config, prepared.reader, console, watch)
        write_plan(file, plan)
    for line in plan.lines():
        console.print(line)
    return BudgetedRun(
        with_settings(config, plan.settings), plan, timed.lm if timed else None
    )
