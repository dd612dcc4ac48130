"""From a budget to the sizes of a run, by the measured speed of this machine."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console

from posbench import paths
from posbench.backends.base import text_encoder
from posbench.errors import UserError
from posbench.files.atomic import write_json
from posbench.files.parse import read_json
from posbench.model.encode import Encoder
from posbench.model.load import (
    CheckpointReader,
    load_without_weights,
    read_checkpoint,
    torch_device,
)
from posbench.model.precision import bfloat16_speedup, has_bfloat16
from posbench.pipeline.config import Config, Stage
from posbench.pipeline.estimate import estimate_run, measure_speed
from posbench.pipeline.prepare import build_run
from posbench.pipeline.served import (
    ASSUMED_TOKENS_PER_CHARACTER,
    asked_examples,
    estimate_served,
)
from posbench.run.base import Run
from posbench.run.budget import Budget, Stopwatch, half_width, money, price_of
from posbench.run.cost import Costs, Speed, WorkEstimate
from posbench.run.progress import SECONDS_PER_UNIT, duration
from posbench.schema import no_other_keys
from posbench.stats.glance import noun_for
from posbench.tasks.base import num_questions
from posbench.tasks.items import GoldPositionTask

T = TypeVar("T")

ENOUGH_QUESTIONS = 30
"""Questions at each position below which fewer positions, then fewer items are taken: half an interval is 17 points."""
MIN_PLANNED_ITEMS = 10
"""Fewest items of a prompt under a budget: gold positions need room."""
MIN_PLANNED_POSITIONS = 3
"""Fewest gold positions under a budget: first, middle, last."""
SEARCH_SHARE = 0.4
"""Largest share of a budget for the search, unless its smallest sizes need more."""
INTERVENE_SHARE = 0.15
"""Largest share of a budget for the attention maps; the stage is left out where its smallest sizes need more."""
MIN_CALIBRATION = 6
"""Fewest calibration prompts under a budget."""
MIN_INTERVENE = 2
"""Fewest questions per gold position whose attention is measured."""
USED_SHARE = 0.85
"""Share of the remaining time that a plan uses: speeds vary."""
MAX_OVERPLANNING = 3
"""Largest ratio of planned to expected questions where the length of replies is not known."""
LONG_REPLY_RATIO = 1.5
"""Replies are long if a question with full ones costs this factor of a question with replies of one token."""
ROUND_SECONDS = 45.0
"""Longest time of a round of questions."""
ROUND_SHARE = 0.05
"""Largest share of the budget for a round of questions."""
PROBED_QUESTIONS = 4
"""Questions from which the work of more is estimated."""
OPTION_CHARACTERS = 10_000
"""Characters of the prompts of a stage that are tokenised for each of the compared options."""
TIMED_BATCH_TOKENS = 1024
"""Tokens of a timed batch."""
WARNING_BATCH_TOKENS = 64
"""Tokens of the batch that is timed to warn of a long run."""
MEASURING_SHARE = 0.05
"""Share of the budget after which timing ends."""
CLEAR_SPEEDUP = 1.3
"""Smallest speedup for which a budget chooses bfloat16."""
LONG_RUN_SECONDS = 3600.0
"""Time of a run from which a budget is suggested."""
PLANNED_KEYS = (
    "task.",
    "search.",
    "study.",
    "stages",
    "model.dtype",
    "runtime.intervene_examples",
    "runtime.round_questions",
)
"""Prefixes of the keys that a budget sets where the user did not."""
SUGGESTED_BUDGETS = ("10min", "30min", "1h", "2h", "4h", "8h", "1d")
SMALL_BUDGETS = ("1min", "2min", "5min")
"""Suggested in place of smaller ones; a run of hours would have to be cut too far to fit."""


@no_other_keys
@dataclass(frozen=True)
class BudgetPlan:
    """The plan for a budget; a killed run continues with it.

    Attributes:
        budget: The budget, as typed.
        settings: The chosen settings, by dotted key.
        questions: Questions at each position that are expected; 0 where none is evaluated.
        positions: Number of gold positions; 0 where the task has none.
        seconds: Seconds of the run as a whole, as estimated; None: no time was measured.
        prompts: Prompts of all stages, as estimated.
        operation: Measured seconds per operation of a prefill.
        step: Measured seconds per step of generation.
        note: The decision about the precision, or that a typed number of questions takes more than the budget.
        tokens: Tokens of all stages, as estimated, where the budget counts them.
        usd: Money of all stages, as estimated, where the budget is one.
        study: The sizes of a study, in words; empty for other runs.
        is_kept: Whether the run itself stops at the budget; else its sizes alone keep it.
    """

    budget: str
    settings: Mapping[str, Any]
    questions: int
    positions: int = 0
    seconds: float | None = None
    prompts: int = 0
    operation: float | None = None
    step: float | None = None
    note: str = ""
    tokens: int | None = None
    usd: float | None = None
    study: str = ""
    is_kept: bool = True

    def lines(self) -> list[str]:
        """Return the lines that tell the user the chosen sizes and what they are expected to cost."""
        points = 100 * half_width(max(self.questions, 1))
        prompts = f"{self.prompts} prompts in all"
        places = f" at each of {self.positions} positions" if self.positions else ""
        questions = f"{self.questions} {noun_for(self.questions, 'question')}"
        workload = f"{questions}{places}, {prompts}"
        limit = self.settings.get("task.limit", 0)
        if limit > self.questions:
            workload = f"{questions}{places}, up to {limit} where replies end early; {self.prompts} prompts or more"
        lines = [
            f"budget {self.budget}: {workload}; 95 % intervals of at most +-{points:.0f} points"
        ]
        # A study has sizes of its own, and no gold positions.
        if self.study:
            ending = f"; {prompts}" if self.prompts else ""
            lines = [f"budget {self.budget}: {self.study}{ending}"]
        elif not self.questions:
            lines = [f"budget {self.budget}: {prompts}"]
        if self.settings:
            lines.append(f"budget: chosen {spelled(self.settings)}")
        if self.note:
            lines.append(f"budget: {self.note}")
        if self.seconds is not None:
            lines.append(
                f"budget: about {duration(self.seconds)} expected, at most {self.budget}"
            )
        # A run whose questions were typed may exceed its budget.
        bound = "at most" if self.is_kept else "of"
        if self.tokens is not None:
            lines.append(
                f"budget: about {self.tokens:,} tokens expected, {bound} {self.budget}"
            )
        if self.usd is not None:
            lines.append(
                f"budget: about {money(self.usd)} expected, {bound} {self.budget}"
            )
        return lines

    def facts(self) -> dict[str, Any]:
        """Return the part of a run's provenance that describes the plan."""
        facts = asdict(self)
        facts["settings"] = spelled(self.settings)
        return facts


def spelled(settings: Mapping[str, Any]) -> str:
    """Spell settings as a command line has them."""
    return " ".join(f"{key}={_spelled_value(value)}" for key, value in settings.items())


def _spelled_value(value: Any) -> str:
    if isinstance(value, str):
        return value
    return shlex.quote(json.dumps(value, separators=(",", ":")))


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return a config with other values.

    Args:
        config: The config.
        settings: Values by dotted key ``group.field``, and the stages under ``stages``.
    """
    for key, value in settings.items():
        if key == "stages":
            config = config.with_stages(value)
            continue
        group, name = key.split(".")
        field = tuple(value) if isinstance(value, list) else value
        config = config.with_fields(group, {name: field})
    return config


# Arithmetic


def most_questions(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number of questions up to ``limit`` that fits; 0 if none fits.

    Args:
        fits: Whether a number of questions fits; if one fits, all smaller ones fit.
        limit: Upper bound.
    """
    low = 0
    high = limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def choose(
    options: Iterator[T] | Sequence[T],
    cost: Callable[[T, int], float],
    limit: int,
    available: float,
    enough: int = ENOUGH_QUESTIONS,
) -> tuple[T, int] | None:
    """Choose between larger prompts and more questions.

    Args:
        options: Ways to ask, the best first.
        cost: Cost of a number of questions under an option; rises with the number.
        limit: Upper bound of the number of questions.
        available: Upper limit of the cost.
        enough: Number of questions to reach before prompts are made larger.

    Returns:
        The first option in which enough questions fit, else the one with most, and the number of questions
        that fit; None if no question fits in any.
    """
    best: tuple[T, int] | None = None
    for option in options:

        def fits(questions: int, option: T = option) -> bool:
            return cost(option, questions) <= available

        questions = most_questions(fits, limit)
        if questions >= min(enough, limit):
            return option, questions
        if questions and (best is None or questions > best[1]):
            best = option, questions
    return best


# Refusals


def need_counted(config: Config, budget: Budget) -> None:
    """Refuse a budget of money or tokens that nobody would count.

    Raises:
        UserError: States why, and what to set instead.
    """
    model = config.model
    budget.need_price(model.price)
    if budget.usd and model.price and not any(model.price):
        allowed = "a time, prompts or tokens: at the price 0 nothing is spent"
        raise UserError("budget", budget.text, allowed, "set budget=3Mtok")
    counts_tokens = config.server is None or config.server.counts_tokens
    if not model.in_process and (budget.usd or budget.tokens) and not counts_tokens:
        allowed = f"a time or prompts: {model.base_url or model.name} does not tell the tokens of a request"
        raise UserError("budget", budget.text, allowed, "set budget=500prompts")


def check_budget(config: Config) -> None:
    """Refuse a budget where the cost of the run cannot be known in advance, or not in the budget's unit.

    Raises:
        UserError: States which, and what to set instead.
    """
    budget = config.budget
    assert budget is not None
    row_stages = {"search", "intervene", "evaluate"} & set(config.stages)
    if config.study and (row_stages or not config.uses_model):
        name = config.study_name
        allowed = f"null: study {name} does not ask the model, and posbench cannot tell beforehand what it takes"
        hint = "leave it out; sizes, where the study has some, are study.KEY=..."
        if row_stages:
            allowed = f"null where study {name} and {' and '.join(sorted(row_stages))} share a run"
            hint = "run the study alone: stages=[study,report]"
        raise UserError("budget", budget.text, allowed, hint)
    need_counted(config, budget)
    if budget.seconds and config.runtime.workers > 1:
        allowed = (
            "a number of prompts where processes share out a run (runtime.workers)"
        )
        hint = "set budget=500prompts, or leave it out"
        raise UserError("budget", budget.text, allowed, hint)


# Choosing


class _Option(NamedTuple):
    """A choice of settings, with its cost.

    Attributes:
        settings: The settings, by dotted key.
        fixed: Cost of search and attention maps.
        per_question: Cost of a question at all positions under all methods.
        prompts: Prompts of search and attention maps, and of a question.
    """

    settings: Mapping[str, Any]
    fixed: float
    per_question: float
    prompts: tuple[int, int]

    def cost(self, questions: int) -> float:
        return self.fixed + questions * self.per_question


Price = Callable[[WorkEstimate], float]
"""Cost of some work: seconds, prompts, tokens, or money."""


class Chooser:
    """Chooses the sizes of a run for a budget.

    Args:
        config: The run, fitted to its model.
        reader: Its model without weights; None for a served one.
        price: Cost of work.
        total: The whole budget, in the same unit.

    Attributes:
        lm: The model without weights; None for a served one.
    """

    def __init__(
        self,
        config: Config,
        reader: CheckpointReader | None,
        price: Price,
        total: float,
    ) -> None:
        self.config = config
        self.price = price
        self.total = total
        self.text = config.budget.text if config.budget else ""
        self.lm = None
        self._encoder = None
        if not config.model.in_process:
            self._encoder = text_encoder(config.model)
        elif reader:
            self.lm = load_without_weights(config.model, reader, config.runtime.device)

    @property
    def limit(self) -> int:
        """The most questions that the run would ask at each position."""
        return self.config.task.limit or num_questions(self.config.task.evaluation())

    def options(self) -> Iterator[_Option]:
        """Yield the ways to ask: all positions of whole prompts first, then fewer, then fewer items."""
        for settings in self.task_settings():
            yield self._price_option(settings)

    def choose(self, available: float) -> tuple[_Option, int] | None:
        """Choose the best settings of the task in which enough questions fit.

        Args:
            available: Limit for the cost, in the budget's unit.

        Returns:
            The settings with their cost, and the number of questions at each gold position; None where not one fits.
        """
        return choose(
            self.options(),
            lambda option, questions: option.cost(questions),
            self.limit,
            available,
        )

    def _is_typed(self, key: str) -> bool:
        return key in self.config.typed

    def task_settings(self) -> Iterator[dict[str, Any]]:
        """Yield settings of the task, each cheaper than the one before.

        First as configured, then at three gold positions, then with ever fewer items. What the user typed stays.
        """
        settings = dict[str, Any]()
        yield dict(settings)
        task = self.config.task
        if not isinstance(task, GoldPositionTask):
            return
        positions = task.positions
        if len(positions) > MIN_PLANNED_POSITIONS and not self._is_typed(
            "task.positions"
        ):
            few = [positions[0], positions[len(positions) // 2], positions[-1]]
            settings["task.positions"] = few
            yield dict(settings)
        items_field, calibration_field = task.sizes
        if self._is_typed(f"task.{items_field}") or not _moves_items(task):
            return
        items = task.items
        while items > MIN_PLANNED_ITEMS:
            items = max(items // 2, MIN_PLANNED_ITEMS)
            settings[f"task.{items_field}"] = items
            typed = self._is_typed(f"task.{calibration_field}")
            if task.calibration_items > items and not typed:
                settings[f"task.{calibration_field}"] = items
            try:
                smaller = with_settings(self.config, settings).task
            except UserError:
                return  # gold positions beyond the smaller number of items
            if [source.id for source in smaller.files()] != [
                source.id for source in task.files()
            ]:
                return  # another file, which would have to be downloaded
            yield dict(settings)

    def _price_option(self, settings: Mapping[str, Any]) -> _Option:
        """Choose sizes of search and attention maps for given settings of the task, and price all stages together.

        Returns:
            All chosen settings, the cost that does not depend on the number of questions, the cost of a question at all
            its gold positions, and the prompts of both.
        """
        chosen = dict(settings)
        stages = self.config.stages
        fixed_cost = 0.0
        fixed_prompts = 0
        if "search" in stages:
            sizes, cost, prompts = self._shrink(
                chosen, "search", self._search_steps(chosen)
            )
            chosen |= sizes
            fixed_cost += cost
            fixed_prompts += prompts
        if "intervene" in stages:
            sizes, cost, prompts = self._shrink(
                chosen, "intervene", self._intervene_steps()
            )
            if cost > INTERVENE_SHARE * self.total and not self._is_typed("stages"):
                chosen["stages"] = [stage for stage in stages if stage != "intervene"]
            else:
                chosen |= sizes
                fixed_cost += cost
                fixed_prompts += prompts
        per_question = 0.0
        prompts_per_question = 0
        if "evaluate" in stages:
            questions = min(PROBED_QUESTIONS, self.limit)
            cost, prompts = self._price_stage(chosen, "evaluate", questions)
            if self.lm:
                # These few prompts go through the model one round at a time, which shares fewer prefixes.
                round_questions = self.round_questions(cost / questions)
                if round_questions and round_questions < questions:
                    questions = round_questions
                    cost, prompts = self._price_stage(chosen, "evaluate", questions)
            per_question = cost / questions
            prompts_per_question = -(-prompts // questions)
        return _Option(
            chosen, fixed_cost, per_question, (fixed_prompts, prompts_per_question)
        )

    def most_questions(self, option: _Option, available: float) -> int:
        """Return how many questions at each gold position fit if every reply is a single token.

        0 where that is not clearly more than with full replies, or cannot be priced.

        Args:
            option: Settings, and their cost.
            available: Limit for the cost of all stages.
        """
        settings = {**option.settings, "task.max_new_tokens": 1}
        # Asked of a model in process alone.
        if self.lm is None or "evaluate" not in self.config.stages:
            return 0
        # With a single token the reply costs nearly nothing: this is the reading.
        questions = min(PROBED_QUESTIONS, self.limit)
        cost, _ = self._price_stage(settings, "evaluate", questions)
        per_question = cost / questions
        if option.per_question < LONG_REPLY_RATIO * per_question:
            return 0
        return int((available - option.fixed) / per_question)

    def round_questions(self, seconds_per_question: float) -> int | None:
        """Return the questions of a round; None for a single round, as without a budget of time."""
        if self.config.budget and self.config.budget.seconds is None:
            return None
        seconds = min(ROUND_SECONDS, ROUND_SHARE * self.total)
        questions = max(int(seconds / max(seconds_per_question, 1e-9)), 1)
        return questions if questions < self.limit else None

    def _shrink(
        self,
        chosen: Mapping[str, Any],
        stage: Stage,
        steps: Iterator[Mapping[str, Any]],
    ) -> tuple[Mapping[str, Any], float, int]:
        """Find the largest sizes whose cost is within the share of the budget that a stage may take.

        Args:
            chosen: Settings chosen so far, by config key.
            stage: ``search`` or ``intervene``.
            steps: Sizes to try, from large to small.

        Returns:
            The first sizes that fit (the smallest if none do), their cost in the budget's unit, and their prompts.
        """
        shares: dict[Stage, float] = {
            "search": SEARCH_SHARE,
            "intervene": INTERVENE_SHARE,
        }
        cost = 0.0
        prompts = 0
        step: Mapping[str, Any] = {}
        for step in steps:
            cost, prompts = self._price_stage({**chosen, **step}, stage, self.limit)
            if cost <= shares[stage] * self.total:
                break
        return step, cost, prompts

    def _search_steps(self, chosen: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield sizes of the search by config key, ever smaller: each number halved, down to its minimum.

        The first is empty: the search as configured. Sizes that the user typed stay as they are.

        Args:
            chosen: Settings that are chosen already, by config key.
        """
        config = with_settings(self.config, chosen)
        sizes_and_minima = {
            f"search.{name}": (int(getattr(config.search, name)), smallest)
            for name, smallest in config.search.smallest.items()
        }
        if hasattr(config.task, "calibration_examples"):
            count = config.task.calibration_examples
            sizes_and_minima["task.calibration_examples"] = (count, MIN_CALIBRATION)
        task = config.task
        # Calibration prompts may shrink to the size of evaluation prompts.
        if isinstance(task, GoldPositionTask) and not task.calibration_positions:
            items_field, calibration_field = task.sizes
            items = task.calibration_items
            if calibration_field != items_field:
                smallest = min(items, task.items)
                sizes_and_minima[f"task.{calibration_field}"] = (items, smallest)
        sizes_and_minima = {
            key: size
            for key, size in sizes_and_minima.items()
            if not self._is_typed(key)
        }
        divisor = 1
        settings = dict[str, Any]()
        while True:
            yield dict(settings)
            divisor *= 2
            smaller = {
                key: min(value, max(value // divisor, smallest))
                for key, (value, smallest) in sizes_and_minima.items()
            }
            changed = {k: v for k, v in smaller.items() if v != sizes_and_minima[k][0]}
            # Every size has reached its minimum.
            if changed == settings:
                return
            settings = changed

    def _intervene_steps(self) -> Iterator[dict[str, Any]]:
        """Yield settings with ever fewer questions whose attention is measured; the first is empty, as configured."""
        yield {}
        if self._is_typed("runtime.intervene_examples"):
            return
        count = min(self.config.runtime.intervene_examples, self.limit)
        while count > MIN_INTERVENE:
            count = max(count // 2, MIN_INTERVENE)
            yield {"runtime.intervene_examples": count}

    def _price_stage(
        self, settings: Mapping[str, Any], stage: Stage, questions: int
    ) -> tuple[float, int]:
        """Return the cost (in the budget's unit) and the number of prompts of one stage.

        Args:
            settings: Values by config key.
            stage: The stage.
            questions: Questions at each gold position.

        Raises:
            UserError: The workload of this search is not known in advance.
        """
        config = with_settings(self.config, settings)
        factor = 1.0
        # A few questions are planned, and their work is multiplied.
        if stage == "intervene":
            num_measured = min(questions, config.runtime.intervene_examples)
            questions = min(num_measured, PROBED_QUESTIONS)
            factor = num_measured / questions
        config = with_settings(config, {"task.limit": questions})
        if self._encoder:
            work = served_work(config, self._encoder)
            return self.price(work), work.prompts
        # Price over all stages: a search supplies the constants of the method.
        run = build_run(config, Console(quiet=True))
        assert self.lm is not None, "the model of this machine was outlined"
        run.lm = self.lm
        stage_alone = replace(config, stages=(stage,))
        works = estimate_run(stage_alone, run, characters=OPTION_CHARACTERS)
        estimates = [work.times(factor) for work in works]
        if stage == "search" and not estimates:
            name = config.raw["search"]["name"]
            allowed = f"null: what search {name} takes cannot be told beforehand"
            hint = "leave the budget out, or choose search=channel"
            raise UserError("budget", self.text, allowed, hint)
        cost = sum(self.price(work) for work in estimates)
        return cost, sum(work.prompts for work in estimates)


def _moves_items(task: GoldPositionTask) -> bool:
    """Whether the prompts of a task hold several items."""
    examples = replace(task, limit=1).evaluation()
    return bool(examples) and len(examples[0].items) > 1


# From a budget to a plan


def plan_run(
    config: Config,
    reader: CheckpointReader | None,
    console: Console,
    watch: Stopwatch,
) -> tuple[BudgetPlan, Run | None]:
    """Choose the sizes of a run for its budget.

    Args:
        config: The run, with a budget.
        reader: Its model without weights; None for a served one.
        console: Where progress goes.
        watch: Measures this session.

    Returns:
        The plan, and the run whose model was timed; None where none was.

    Raises:
        UserError: The budget is too small, or the run's work is not known beforehand.
    """
    budget = config.budget
    assert budget is not None
    if budget.seconds is None:
        # Prompts, tokens or money: no time has to be measured.
        chooser = Chooser(config, reader, counted_price(config), budget.size)
        return _make_plan(chooser, budget, budget.size), None
    settings: Mapping[str, Any] = {}
    note = ""
    run = speed = None
    if reader is not None:
        settings, note = choose_precision(config, reader)
        config = with_settings(config, settings)
        max_seconds = MEASURING_SHARE * budget.seconds
        run, speed, costs = time_model(config, reader, console, max_seconds)
        price: Price = partial(speed.seconds, costs)
    else:
        price = served_seconds(config)
    spent = watch.seconds + watch.report_seconds(budget.seconds)
    total = max(budget.seconds - spent, 0.0)
    chooser = Chooser(config, reader, price, total)
    plan = _make_plan(
        chooser, budget, USED_SHARE * total, spent=spent, speed=speed, note=note
    )
    return replace(plan, settings={**settings, **plan.settings}), run


def counted_price(config: Config) -> Price:
    """Return the function that prices work for a budget of prompts, tokens or US dollars, in that unit."""
    budget = config.budget
    assert budget is not None

    def price(work: WorkEstimate) -> float:
        # Of a reply in process, all tokens but the last are read again.
        written = work.decoded_tokens + (work.prompts if work.decode_steps else 0)
        if budget.prompts:
            return float(work.prompts)
        if budget.usd:
            return price_of(work.tokens, written, config.model.price) or 0.0
        return float(work.tokens + written)

    return price


def describe_least(budget: Budget, least: float) -> tuple[str, str]:
    """Return in words the cost of the smallest sizes under a budget that is not a time, and a budget that holds it.

    Args:
        budget: The budget.
        least: Their cost, in its unit.
    """
    if budget.tokens:
        return f"about {least:,.0f} tokens", f"{-(-least // 1000):.0f}ktok"
    if budget.usd:
        return f"about {money(least)}", f"{math.ceil(100 * least) / 100:g}usd"
    return f"about {least:.0f} prompts", f"{-(-least // 10) * 10:.0f}prompts"


def served_work(config: Config, encoder: Encoder) -> WorkEstimate:
    """Return the estimated work of a served run; nothing is known of the attention that the server computes."""
    assert config.server is not None, "a budget asks the server first"
    estimate = estimate_served(config, config.server, encoder)
    prompts = len(asked_examples(config, encoder))
    return WorkEstimate(
        "study" if config.study else "evaluate",
        prompts=prompts,
        tokens=estimate.read,
        computed_tokens=estimate.read,
        attention_pairs=0,
        decode_steps=estimate.written,
        decoded_tokens=max(estimate.written - prompts, 0),
    )


def served_seconds(config: Config) -> Price:
    """Return the function that gives the seconds in which a server does some work.

    It uses the speed that the probe measured, which depends on characters of a prompt; without a speed it gives 0.
    """
    server = config.server
    assert server is not None, "a budget asks the server first"
    density = server.tokens_per_character or ASSUMED_TOKENS_PER_CHARACTER

    def price(work: WorkEstimate) -> float:
        if server.speed is None or not work.prompts:
            return 0.0
        characters = (work.tokens / work.prompts - server.overhead_tokens) / density
        return server.speed.seconds_of_requests(
            work.prompts,
            max(characters, 0.0),
            work.decode_steps / work.prompts,
            config.model.concurrency,
        )

    return price


def time_model(
    config: Config, reader: CheckpointReader, console: Console, max_seconds: float
) -> tuple[Run, Speed, Costs]:
    """Load a run's model, and time it on a few short prompts.

    Args:
        config: The run.
        reader: Its model without weights.
        console: Where progress goes.
        max_seconds: After this time no further batch is timed.

    Returns:
        The run whose model was timed, its speed, and the model's sizes.
    """
    costs = Costs.of(load_without_weights(config.model, reader, config.runtime.device))
    few = with_settings(config, {"task.limit": min(config.task.limit or 2, 2)})
    run = build_run(few, console)
    speed = measure_speed(run, costs, TIMED_BATCH_TOKENS, max_seconds)
    return run, speed, costs


def _make_plan(
    chooser: Chooser,
    budget: Budget,
    available: float,
    *,
    spent: float = 0.0,
    speed: Speed | None = None,
    note: str = "",
) -> BudgetPlan:
    """Return the plan for an available amount in the chooser's unit.

    Args:
        chooser: The sizes to choose from.
        budget: The budget as typed.
        available: The unspent part.
        spent: Seconds that loading and timing took.
        speed: The measured speed of a model in process.
        note: A note to print with the choice.

    Raises:
        UserError: Not even one question at each position fits.
    """
    config = chooser.config
    option, questions = _need_affordable(chooser, budget, available, spent)
    settings = dict(option.settings)
    has_typed_limit = "task.limit" in config.typed
    if not has_typed_limit and questions < chooser.limit:
        settings["task.limit"] = _question_limit(
            chooser, budget, option, questions, available
        )
    is_kept = budget.seconds is not None or (
        not config.model.in_process and bool(budget.tokens or budget.usd)
    )
    # The typed number of questions is asked, whatever it takes.
    if has_typed_limit and not is_kept:
        note = _overspending_note(chooser, budget, option, available) or note
        questions = chooser.limit
    planned = settings.get("task.limit", chooser.limit)
    # The run looks at the clock after each round.
    if budget.seconds and "runtime.round_questions" not in config.typed:
        per_round = chooser.round_questions(option.per_question)
        if per_round and per_round < planned:
            settings["runtime.round_questions"] = per_round
    if "evaluate" not in settings.get("stages", config.stages):
        questions = 0
    fixed_prompts, prompts_per_question = option.prompts
    task = with_settings(config, settings).task
    is_placed = isinstance(task, GoldPositionTask) and _moves_items(task)
    seconds = None
    if budget.seconds:
        # With full replies, but no more than the budget.
        seconds = min(spent + option.cost(planned), budget.seconds)
    return BudgetPlan(
        budget=budget.text,
        settings=settings,
        questions=questions,
        positions=len(task.gold_positions) if is_placed else 0,  # type: ignore[attr-defined]
        seconds=seconds,
        prompts=fixed_prompts + questions * prompts_per_question,
        operation=speed.operation if speed else None,
        step=speed.step if speed else None,
        note=note,
        tokens=round(option.cost(questions)) if budget.tokens else None,
        usd=option.cost(questions) if budget.usd else None,
        is_kept=is_kept,
    )


def _need_affordable(
    chooser: Chooser, budget: Budget, available: float, spent: float
) -> tuple[_Option, int]:
    """Choose the largest sizes that fit into a budget.

    Args:
        chooser: Lists and prices the options.
        budget: The budget as typed, for the message.
        available: What of it can be planned, in its unit.
        spent: What was spent on measuring before, in its unit.

    Returns:
        The option, and the number of questions at each gold position.

    Raises:
        UserError: No sizes fit; states the cost of the smallest ones.
    """
    chosen = chooser.choose(available)
    if chosen:
        return chosen
    lowest_cost = min(option.cost(1) for option in chooser.options())
    if budget.seconds:
        seconds = (lowest_cost / USED_SHARE + spent) / (1 - ROUND_SHARE)
        needed = f"about {duration(seconds)}"
        suggestion = suggested_budget(seconds)
    else:
        needed, suggestion = describe_least(budget, lowest_cost)
    allowed = f"{needed}, for one question at each position"
    hint = f"set budget={suggestion}, or smaller prompts"
    if "search" in chooser.config.stages:
        hint += ", or method=none, for which nothing is searched"
    raise UserError("budget", budget.text, allowed, hint)


def _question_limit(
    chooser: Chooser, budget: Budget, option: _Option, questions: int, available: float
) -> int:
    """Return the most questions at each gold position that a run may begin; ``questions`` of them are sure to fit.

    Replies may end earlier than planned, so a run that stops at its budget has spare questions.

    Args:
        chooser: Chooses the sizes of the run.
        budget: The budget: a time, or a number of prompts, tokens or dollars.
        option: The chosen settings with their cost.
        questions: Questions at each position that are sure to fit.
        available: What is left of the budget, in its unit.
    """
    server = chooser.config.server
    thinks = server is not None and bool(server.thinking)
    spare_limit = min(MAX_OVERPLANNING * questions, chooser.limit)
    # How many tokens a model thinks cannot be planned.
    if thinks and (budget.tokens or budget.usd):
        return spare_limit
    # The clock stops the run: it may begin what the rest of the time could be enough for.
    if budget.seconds:
        affordable = max(questions, chooser.most_questions(option, available))
        return min(affordable, spare_limit)
    return questions


def _overspending_note(
    chooser: Chooser, budget: Budget, option: _Option, available: float
) -> str:
    """Return a note that the typed number of questions takes more than the budget, empty if it does not.

    Nothing stops such a run at the budget.
    """
    if option.cost(chooser.limit) <= available:
        return ""
    needed = describe_least(budget, option.cost(chooser.limit))[0]
    return f"the typed task.limit={chooser.limit} takes {needed}, more than the budget"


def suggested_budget(seconds: float) -> str:
    """Return the smallest suggested budget that holds ``seconds``."""
    for text in (*SMALL_BUDGETS, *SUGGESTED_BUDGETS):
        if (Budget.parse(text).seconds or 0) >= seconds:
            return text
    return f"{-(-seconds // SECONDS_PER_UNIT['d']):.0f}d"


def choose_precision(
    config: Config, reader: CheckpointReader
) -> tuple[dict[str, Any], str]:
    """Choose bfloat16 on a CPU where it is clearly faster than float32.

    Returns:
        The setting of ``model.dtype``, empty if it stays as it is, and the reason for the user, empty if there is no
        choice: a typed precision, an embedded model, a GPU, or a processor without bfloat16.
    """
    model = config.model
    is_embedded = model.path.startswith(paths.EMBEDDED)
    on_cpu = torch_device(config.runtime.device).type == "cpu"
    if model.dtype != "auto" or is_embedded or not on_cpu or not has_bfloat16():
        return {}, ""
    speedup = bfloat16_speedup(reader.facts.get_text_config().hidden_size)
    ratio = f"a product takes 1/{speedup:.1f} of its time in float32"
    if speedup < CLEAR_SPEEDUP:
        return {}, f"float32, as bfloat16 is not clearly faster here ({ratio})"
    return {"model.dtype": "bfloat16"}, (
        f"bfloat16, faster on this processor ({ratio}); study=precision measures what it changes"
    )


# Long runs


def describe_long_run(config: Config, run: Run) -> str:
    """Return a line that a run takes more than an hour on this machine, and names a budget that shortens it.

    It is empty for shorter runs, and for studies and searches whose work is not known in advance.

    Args:
        config: The run.
        run: The same run, its model loaded.
    """
    if config.study or not config.model.in_process or not config.uses_model:
        return ""
    reader, speed, costs = probe_speed(config, run)
    outline = load_without_weights(config.model, reader, config.runtime.device)

    def seconds_of(config: Config) -> float:
        planned = build_run(config, Console(quiet=True))
        planned.lm = outline
        works = estimate_run(config, planned)
        return sum(speed.seconds(costs, work) for work in works)

    def fitting(total: float) -> str:
        chooser = Chooser(config, reader, partial(speed.seconds, costs), total)
        chosen = chooser.choose(total)
        if not chosen or chosen[1] < min(ENOUGH_QUESTIONS, chooser.limit):
            return ""
        width = 100 * half_width(chosen[1])
        return (
            f"asks less: about {chosen[1]} questions at each position, "
            f"intervals of at most +-{width:.0f} points"
        )

    return describe_if_long("run", config, seconds_of, fitting)


def describe_if_long(
    subject: str,
    config: Config,
    seconds_of: Callable[[Config], float],
    fitting: Callable[[float], str],
) -> str:
    """Return a line on the time of a run or study of more than an hour, and on a budget; empty for a shorter one.

    Args:
        subject: ``run`` or ``study``.
        config: Its config.
        seconds_of: Expected seconds of a config.
        fitting: What a budget that leaves this many seconds does, in words; empty where it leaves a handful of
            questions, which would be no good advice.
    """
    seconds = seconds_of(config)
    if seconds < LONG_RUN_SECONDS:
        return ""
    least = seconds_of(with_settings(config, {"task.max_new_tokens": 1}))
    line = f"this {subject} takes {spelled_range(least, seconds)} on this machine; "
    for text in SUGGESTED_BUDGETS:
        # Speeds vary: a plan keeps a part of the budget.
        total = USED_SHARE * (Budget.parse(text).seconds or 0.0)
        if total >= seconds:
            return f"{line}budget={text} holds all of it"
        fits = fitting(total)
        if fits:
            return f"{line}budget={text} {fits}"
    return f"{line}budget=1d takes what fits into a day"


def spelled_range(least: float, most: float) -> str:
    """Spell the time of a run: a range where the length of its replies decides it.

    Args:
        least: Seconds with replies of one token.
        most: Seconds with replies of full length.
    """
    if most < LONG_REPLY_RATIO * least:
        return f"about {duration(most)}"
    return f"{duration(least)} to {duration(most)}, by the length of its replies,"


def probe_speed(config: Config, run: Run) -> tuple[CheckpointReader, Speed, Costs]:
    """Time a model on a few short prompts.

    Args:
        config: The run.
        run: The same run, its model loaded.

    Returns:
        The model without weights, its speed and its sizes.
    """
    reader = read_checkpoint(config.model)
    costs = Costs.of(load_without_weights(config.model, reader, config.runtime.device))
    few = build_run(
        with_settings(config, {"task.limit": 1}),
        run.console,
    )
    few.lm = run.lm
    speed = measure_speed(few, costs, WARNING_BATCH_TOKENS, max_seconds=1.0)
    return reader, speed, costs


# Records


def read_plan(file: Path) -> BudgetPlan | None:
    """Return the sizes that an earlier session of a run chose for its budget; None if there was none.

    Raises:
        UserError: The file is damaged.
    """
    if not file.is_file():
        return None
    hint = f"remove {file}: the sizes are then chosen anew"
    plan: BudgetPlan = read_json(file, BudgetPlan, hint=hint)
    return plan


def write_plan(file: Path, plan: BudgetPlan) -> None:
    """Record a plan."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, asdict(plan))
