"""From a budget to the sizes of a study: its workload is known, its speed is measured in a small trial."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from posbench.backends.base import text_encoder
from posbench.errors import UserError
from posbench.model.load import CheckpointReader
from posbench.pipeline.budget import (
    ENOUGH_QUESTIONS,
    MAX_OVERPLANNING,
    MEASURING_SHARE,
    OPTION_CHARACTERS,
    USED_SHARE,
    BudgetPlan,
    Chooser,
    Price,
    choose,
    choose_precision,
    counted_price,
    describe_if_long,
    describe_least,
    probe_speed,
    served_seconds,
    served_work,
    spelled,
    suggested_budget,
    time_model,
    with_settings,
)
from posbench.pipeline.config import Config
from posbench.pipeline.estimate import estimate_run
from posbench.pipeline.prepare import build_run
from posbench.pipeline.stages import study as study_stage
from posbench.run.base import Run
from posbench.run.budget import Stopwatch
from posbench.run.cost import WorkEstimate
from posbench.run.folder import RunDir
from posbench.run.heartbeat import doing
from posbench.run.lease import owning
from posbench.run.progress import duration
from posbench.tasks.base import num_questions

FIRST_TIME_RATIO = 2.0
"""Time of a study divided by the time of reading its tokens, assumed before a trial has measured it."""
TRIAL_SHARE = 0.05
"""Share of a budget from which on a trial is long enough."""
MAX_TRIAL_SHARE = 0.15
"""Largest share of a budget for all trials, as estimated in advance."""


class StudyChooser:
    """Chooses the sizes of a study for a budget.

    Args:
        config: The run of a study, fitted to its model, with a budget.
        reader: Its model without weights; None for a served one.

    Raises:
        UserError: The study does not know its work in advance, or has no sizes to lower.
    """

    def __init__(self, config: Config, reader: CheckpointReader | None) -> None:
        study = config.study
        assert study is not None
        self.config = config
        self.chooser = Chooser(config, reader, lambda work: 0.0, 0.0)
        self._works: dict[str, list[WorkEstimate]] = {}
        self.sizes = {
            name: getattr(study, name) or num_questions(config.task.evaluation())
            for name in study.smallest
            if f"study.{name}" not in config.typed
        }
        if not study.smallest or not self.works({}, 1):
            raise self._unknown_work()

    @property
    def limit(self) -> int:
        """The largest value of the first size; 1 where all sizes are typed."""
        return next(iter(self.sizes.values()), 1)

    def _unknown_work(self) -> UserError:
        name = self.config.study_name
        text = self.config.budget.text if self.config.budget else None
        allowed = f"null: study {name} cannot tell beforehand what it takes"
        hint = "leave the budget out, or set the sizes of the study: study.KEY=..."
        return UserError("budget", text, allowed, hint)

    def settings_for(self, count: int) -> dict[str, int]:
        """Return the sizes of the study by config key, lowered in proportion so that the first one is ``count``.

        Sizes that keep their configured value are left out.
        """
        assert self.config.study is not None
        smallest = self.config.study.smallest
        settings = {}
        for name, full in self.sizes.items():
            size = max(round(full * count / self.limit), smallest[name])
            if size < full:
                settings[f"study.{name}"] = size
        return settings

    def options(self) -> Iterator[dict[str, Any]]:
        """Yield settings of the task: whole prompts at all positions first, then fewer positions, then fewer items."""
        if self.config.uses_task:
            yield from self.chooser.task_settings()
        else:
            yield {}

    def config_for(self, option: Mapping[str, Any], count: int) -> Config:
        """Return the config with settings of the task and sizes of the study."""
        return with_settings(self.config, {**option, **self.settings_for(count)})

    def works(self, option: Mapping[str, Any], count: int) -> list[WorkEstimate]:
        """Return the workload of the study with these settings."""
        key = str({**option, **self.settings_for(count)})
        if key not in self._works:
            self._works[key] = self._estimate(option, count)
        return self._works[key]

    def _estimate(self, option: Mapping[str, Any], count: int) -> list[WorkEstimate]:
        config = replace(self.config_for(option, count), stages=("study",))
        if not config.model.in_process:
            return [served_work(config, text_encoder(config.model))]
        run = build_run(config, Console(quiet=True))
        assert self.chooser.lm is not None, "the model of this machine was outlined"
        run.lm = self.chooser.lm
        return estimate_run(config, run, characters=OPTION_CHARACTERS)

    def cost(self, option: Mapping[str, Any], count: int, price: Price) -> float:
        """Return the price of the study with these settings."""
        return sum(price(work) for work in self.works(option, count))

    def choose(
        self, price: Price, available: float
    ) -> tuple[dict[str, Any], int] | None:
        """Return the largest sizes that fit into a budget.

        Args:
            price: Cost of work in the budget's unit.
            available: What may be spent, in that unit.

        Returns:
            Settings of the task by config key, and the first size of the study; None if nothing fits.
        """
        return choose(
            self.options(),
            lambda option, count: self.cost(option, count, price),
            self.limit,
            available,
        )

    def least(self, price: Price) -> float:
        """Return the price of the smallest sizes."""
        return min(self.cost(option, 1, price) for option in self.options())


def plan_study(
    config: Config,
    reader: CheckpointReader | None,
    console: Console,
    watch: Stopwatch,
) -> tuple[BudgetPlan, Run | None]:
    """Choose the sizes of a study for its budget.

    A study does more than read: hooks, attention maps, statistics. So it is run once at small sizes, in a folder that
    is thrown away, and the ratio of its time to reading alone is taken to hold at larger sizes. A study that looks at
    replies alone does no more than an evaluation: it needs no trial, and stops at the budget itself, so that more
    questions are planned than are expected to fit.

    Args:
        config: The run, with a budget.
        reader: Its model without weights; None for a served one.
        console: Where progress goes.
        watch: Measures this session.

    Returns:
        The plan, and the run whose model was timed; None where none was.

    Raises:
        UserError: The budget is too small, or the study does not know its work in advance.
    """
    budget = config.budget
    assert budget is not None
    # Prompts, tokens or money: no time has to be measured.
    if budget.seconds is None:
        chooser = StudyChooser(config, reader)
        price = counted_price(config)
        chosen = chooser.choose(price, budget.size)
        if chosen is None:
            needed, suggestion = describe_least(budget, chooser.least(price))
            raise _too_small(config, needed, suggestion)
        if reader is None and not budget.prompts:
            chosen = _overplanned(chooser, chosen)
        return _plan(chooser, chosen, None), None
    if reader is None:
        spent = watch.seconds + watch.report_seconds(budget.seconds)
        price = served_seconds(config)
        return _plan_asking(config, None, price, spent, budget.seconds), None
    StudyChooser(config, reader)  # before anything is timed
    precision, note = choose_precision(config, reader)
    config = with_settings(config, precision)
    chooser = StudyChooser(config, reader)
    total = budget.seconds
    run, speed, costs = time_model(config, reader, console, MEASURING_SHARE * total)
    reading_seconds = partial(speed.seconds, costs)

    def seconds_spent() -> float:
        return watch.seconds + watch.report_seconds(total)

    def choose_within(spent: float, factor: float) -> tuple[dict[str, Any], int]:
        available = USED_SHARE * (total - spent) / factor
        chosen = chooser.choose(reading_seconds, available)
        if chosen is None:
            seconds = spent + factor * chooser.least(reading_seconds) / USED_SHARE
            needed = f"about {duration(seconds)}"
            raise _too_small(config, needed, suggested_budget(seconds))
        return chosen

    if config.study and config.study.asks_only:
        plan = _plan_asking(config, reader, reading_seconds, seconds_spent(), total)
        plan = replace(plan, settings={**precision, **plan.settings}, note=note)
        return replace(plan, operation=speed.operation, step=speed.step), run
    # First with an assumed ratio, then with that of a trial.
    chosen = choose_within(seconds_spent(), FIRST_TIME_RATIO)
    # The trial itself takes time, which is then no longer available.
    factor = _measure_factor(chooser, chosen, reading_seconds, run)
    spent = seconds_spent()
    chosen = choose_within(spent, factor)
    expected = spent + factor * chooser.cost(*chosen, reading_seconds)
    plan = _plan(chooser, chosen, expected)
    measured = (
        f"a small trial of the study took {factor:.1f} times what reading as much takes"
    )
    plan = replace(
        plan,
        settings={**precision, **plan.settings},
        note="; ".join(filter(None, [note, measured])),
        operation=speed.operation,
        step=speed.step,
    )
    return plan, run


def _plan_asking(
    config: Config,
    reader: CheckpointReader | None,
    price: Price,
    spent: float,
    total: float,
) -> BudgetPlan:
    """Choose the sizes of a study that looks at replies alone, for a budget of time.

    Where nothing fits with replies of full length, sizes that fit with replies of one token are chosen: most replies
    end early, and the run stops at the budget in any case.

    Args:
        config: The run, with a budget.
        reader: Its model without weights; None for a served one.
        price: Seconds that work takes.
        spent: Seconds that are spent, or reserved for the report.
        total: Seconds of the budget.

    Raises:
        UserError: The budget is too small.
    """
    one_token = with_settings(config, {"task.max_new_tokens": 1})
    least = 0.0
    for asked in (config, one_token):
        chooser = StudyChooser(asked, reader)
        chosen = chooser.choose(price, USED_SHARE * (total - spent))
        if chosen:
            expected = spent + chooser.cost(*chosen, price)
            return _plan(chooser, _overplanned(chooser, chosen), expected)
        least = spent + chooser.least(price) / USED_SHARE
    raise _too_small(config, f"about {duration(least)}", suggested_budget(least))


def _overplanned(
    chooser: StudyChooser, chosen: tuple[dict[str, Any], int]
) -> tuple[dict[str, Any], int]:
    """A choice with more questions than are expected to fit, where the run itself stops at the budget."""
    option, count = chosen
    return option, min(MAX_OVERPLANNING * count, chooser.limit)


def describe_long_study(config: Config, run: Run) -> str:
    """Return a line that a study takes more than an hour on this machine, and names a budget that shortens it.

    It is empty for shorter studies, and for one that does not know its work in advance.

    Args:
        config: The run.
        run: The same run, its model loaded.
    """
    # Such studies have no sizes that could be lowered, or no model to time.
    if not config.study or not config.study.smallest or not config.uses_model:
        return ""
    reader, speed, costs = probe_speed(config, run)

    # A study that does more than ask takes longer than its forward passes, by a factor that was never timed.
    factor = 1.0 if config.study.asks_only else FIRST_TIME_RATIO

    def price(work: WorkEstimate) -> float:
        return factor * speed.seconds(costs, work)

    chooser = StudyChooser(config, reader)

    def seconds_of(config: Config) -> float:
        return StudyChooser(config, reader).cost({}, chooser.limit, price)

    def fitting(total: float) -> str:
        chosen = chooser.choose(price, total)
        if not chosen or chosen[1] < min(ENOUGH_QUESTIONS, chooser.limit):
            return ""
        option, count = chosen
        sizes = spelled({**option, **chooser.settings_for(count)})
        return f"chooses smaller sizes, about {sizes}"

    return describe_if_long("study", config, seconds_of, fitting)


def _measure_factor(
    chooser: StudyChooser,
    chosen: tuple[dict[str, Any], int],
    reading_seconds: Price,
    run: Run,
) -> float:
    """Time the study at small sizes, and return the ratio of that time to reading alone.

    Args:
        chooser: The sizes.
        chosen: Settings of the task, and the study's first size, chosen without a trial; no trial is larger.
        reading_seconds: The time of reading.
        run: A run with the loaded model.
    """
    assert chooser.config.budget is not None and chooser.config.budget.seconds
    budget = chooser.config.budget.seconds
    option, largest_count = chosen
    trials = 0.0
    factor = 1.0
    for count in _trial_counts(chooser, largest_count):
        seconds = _time_study(chooser.config_for(option, count), run)
        trials += seconds
        factor = seconds / chooser.cost(option, count, reading_seconds)
        # A first, short trial includes one-time loading and compiling.
        tells_enough = seconds >= TRIAL_SHARE * budget
        is_dear = trials + 2 * seconds > MAX_TRIAL_SHARE * budget
        if tells_enough or is_dear:
            break
    return factor


def _trial_counts(chooser: StudyChooser, most: int) -> Iterator[int]:
    """Yield values of the study's first size to time, each about twice the one before, ``most`` at the end.

    Values that lead to the same sizes as the one before are skipped.
    """
    count = 1
    while True:
        yield count
        sizes = chooser.settings_for(count)
        while count < most and chooser.settings_for(count) == sizes:
            count += 1
        count = min(2 * count, most)
        if chooser.settings_for(count) == sizes:
            return


def _time_study(config: Config, run: Run) -> float:
    """Measure the seconds that a study takes at the sizes of a config, in a folder that is thrown away."""
    with tempfile.TemporaryDirectory(prefix="posbench-trial-") as name:
        folder = Path(name)
        trial = build_run(config, Console(quiet=True))
        trial.lm = run.lm
        trial.out = RunDir(folder, "trial")
        tokens_before = run.lm.tokens_read

        def activity() -> str:
            tokens = run.lm.tokens_read - tokens_before
            return f"timing study {config.study_name} at small sizes, {tokens:,} tokens read"

        began = time.perf_counter()
        with owning(folder), doing(activity):
            study_stage.run(config, trial)
        return time.perf_counter() - began


def _plan(
    chooser: StudyChooser, chosen: tuple[dict[str, Any], int], seconds: float | None
) -> BudgetPlan:
    """Return the plan of a choice.

    Args:
        chooser: The sizes.
        chosen: Settings of the task, and the study's first size.
        seconds: Time of the run as a whole; None: no time was measured.
    """
    config = chooser.config
    assert config.budget is not None and config.study is not None
    option, count = chosen
    sizes = {
        name: chooser.settings_for(count).get(f"study.{name}", full)
        for name, full in chooser.sizes.items()
    }
    texts = [f"{name} {size} of {chooser.sizes[name]}" for name, size in sizes.items()]
    works = chooser.works(option, count)
    return BudgetPlan(
        budget=config.budget.text,
        settings={**option, **chooser.settings_for(count)},
        questions=next(iter(sizes.values()), 0),
        seconds=seconds,
        prompts=sum(work.prompts for work in works),
        study=f"study {config.study_name}: {', '.join(texts) or 'the sizes that were typed'}",
    )


def _too_small(config: Config, needed: str, enough: str) -> UserError:
    """That a budget is too small for the smallest sizes of a study."""
    assert config.budget is not None and config.study is not None
    listed = ", ".join(f"{key}={n}" for key, n in config.study.smallest.items())
    allowed = f"{needed}, for study {config.study_name} at its smallest ({listed})"
    hint = f"set budget={enough}, or smaller prompts"
    return UserError("budget", config.budget.text, allowed, hint)
