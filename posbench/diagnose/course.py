"""The course of a diagnosis: ordinary runs, each of which decides what the next one asks."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from posbench import paths
from posbench.diagnose.outcome import (
    Diagnosis,
    judge_pilot,
    judge_source,
    points,
)
from posbench.diagnose.race import applicable_methods, race, winner_of
from posbench.errors import UserError
from posbench.files.parse import CORRECT_FILE, read_yaml
from posbench.methods.choice import MethodChoice, all_choices
from posbench.model.lm import LM
from posbench.model.load import load
from posbench.perturbations.move_positions import can_move
from posbench.pipeline.arguments import read_flags
from posbench.pipeline.compose import compose
from posbench.pipeline.config import Config
from posbench.pipeline.execute import execute, set_threads
from posbench.pipeline.prepare import prepare, silence_transformers
from posbench.report.folder import read_csv
from posbench.report.page import render_run
from posbench.run.budget import Budget, Stopwatch
from posbench.run.folder import open_run_dir
from posbench.run.heartbeat import loading
from posbench.run.progress import duration, progress
from posbench.search.base import FOUND_FILE
from posbench.stats.findings import estimate
from posbench.stats.frames import SERVED, UNMODIFIED
from posbench.stats.shape import FLAT, UNCLEAR, name_shape
from posbench.stats.verdict import (
    BIAS,
    CANNOT_DO,
    CANNOT_TELL,
    NO_BIAS,
    NOT_FIXED,
    Verdict,
    run_verdict,
)
from posbench.studies.prompts import need_items
from posbench.tasks.items import GoldPositionTask

DEFAULT_BUDGET = "10min"
PILOT_QUESTIONS = 20
ROUND_QUESTIONS = 10
MAX_QUESTIONS = 300
"""Questions at each position of the pilot, of a round, and of the shape at most."""
MORE_TOKENS = 4
"""How many times as many tokens a reply gets where the pilot's were cut."""
LARGER = 3
"""How many times as many items make a task harder."""
FIRST_ITEMS = 20
"""Items of a prompt where neither the user nor the model's file says it: a pilot on two cores."""
MIN_ITEMS = 6
SHARES = {"pilot": 0.2, "source": 0.65, "remedies": 0.8}
"""Share of the time that is over at the end of each part at most; the rest is for held-back questions."""
LAST_SHARE = 0.95
"""Share of the time that is over when the last question is answered."""
SOURCE_VARIANTS = 5
MIN_SOURCE_EXAMPLES = 8
MAX_SOURCE_EXAMPLES = 20
SOURCE_WORK = 2.0
"""Variants of the study, its questions at each position, and its time per prompt over that of a plain reply."""
RACE_PROMPTS = 48
MIN_HELD_BACK = 30
"""Calibration prompts of the race, and held-back questions at each position where time allows."""
MIN_SEARCH_SECONDS = 60.0
"""Time that must be left for a search of constants that are not known."""
REFUSED = ("stages", "study", "experiment", "search", "runtime.until")
"""Keys that a diagnosis sets itself."""


class Course:
    """Takes the parts of a diagnosis in turn.

    Args:
        args: Overrides as typed, with Hydra's flags, without the budget.
        budget: What it may take.
        console: Where progress goes.

    Raises:
        UserError: A key is the diagnosis' own, or the task has no gold positions.
    """

    def __init__(self, args: Sequence[str], budget: Budget, console: Console) -> None:
        self.args = list(args)
        self.console = console
        self.watch = Stopwatch()
        if budget.seconds is None:
            allowed = "a time: a diagnosis asks as many prompts as it needs"
            raise UserError("budget", budget.text, allowed, "set budget=10min")
        self.budget = budget
        self.seconds = budget.seconds
        _refuse_own_keys(read_flags(args).overrides)
        self.typed_keys = {
            override.lstrip("+").partition("=")[0]
            for override in read_flags(args).overrides
        }
        self.settings: dict[str, Any] = {}
        config = self._prepare([]).config
        task = config.task
        if not isinstance(task, GoldPositionTask):
            allowed = "a task that moves a gold item over positions"
            raise UserError(
                "task", task.name, allowed, "set task=kv_retrieval or task=nq_multidoc"
            )
        self._set_first_size(config, task)
        config = self._prepare([]).config
        self.config = config
        self.is_served = bool(config.model.base_url)
        self.method = SERVED if self.is_served else UNMODIFIED
        self.diagnosis = Diagnosis(
            model=config.model.server_name if self.is_served else config.model.name,
            task=task.name,
        )
        self._lm: LM | None = None

    @property
    def task(self) -> GoldPositionTask:
        """The task as it is asked now."""
        task = self.config.task
        assert isinstance(task, GoldPositionTask), "others were refused"
        return task

    def run(self) -> Diagnosis:
        """Take the parts in turn until the question is answered."""
        diagnosis = self.diagnosis
        if self._pilot():
            self._shape()
            if diagnosis.verdict == BIAS:
                if self.is_served:
                    note = "a server shows nothing of the inside of its model"
                    diagnosis.source_note = note
                    diagnosis.remedies_note = note
                else:
                    self._source()
                    self._remedies()
        diagnosis.next = self._next_command()
        diagnosis.total_seconds = round(self.watch.seconds, 1)
        return diagnosis

    # Parts

    def _pilot(self) -> bool:
        """Ask a few questions, and once make the task easier, harder or longer where it shows no bias.

        Returns:
            Whether a position bias can be looked for.
        """
        diagnosis = self.diagnosis
        changes: dict[str, Any] = {}
        tried = set[str]()
        while True:
            positions = _ends_and_middle(self.task.gold_positions)
            folder = self._execute(
                "pilot",
                [
                    f"task.positions={positions}",
                    f"task.limit={PILOT_QUESTIONS}",
                    "runtime.round_questions=5",
                ],
                share=SHARES["pilot"],
            )
            rows = open_run_dir(folder).rows_without_error("predictions.jsonl")
            chance = self.task.chance or 0.0
            pilot = judge_pilot(rows, self.task.metric, chance, changes)
            diagnosis.pilots.append(pilot)
            if pilot.level == "in between":
                return True
            kind = "cut" if pilot.level == "cut" else "difficulty"
            changes = {} if kind in tried else self._other_task(pilot.level)
            if not changes:
                return self._end_at(pilot.level, pilot.average)
            tried.add(kind)
            self.settings |= changes
            self.config = self._prepare([]).config
            text = ", ".join(f"{key}={_spell(value)}" for key, value in changes.items())
            self.console.print(
                f"pilot: {_level_text(pilot.level)}; asked again with {text}"
            )

    def _end_at(self, level: str, average: Any) -> bool:
        """Set the verdict of a pilot that shows no bias; return whether to go on all the same."""
        diagnosis = self.diagnosis
        score = f"{points(average)} % of the pilot's answers are right"
        if level == "ceiling":
            return True  # whether that is so at every position, the shape tells
        diagnosis.verdict = CANNOT_DO if level == "floor" else CANNOT_TELL
        diagnosis.reason = score
        if level == "cut":
            cut = diagnosis.pilots[-1].cut
            diagnosis.reason = f"{cut} replies end before an answer"
        return False

    def _shape(self) -> None:
        """Ask questions at all positions until the shape is decided or the time is over."""
        diagnosis = self.diagnosis
        limit = self._typed("task.limit") or MAX_QUESTIONS
        overrides = [
            f"task.limit={limit}",
            f"runtime.round_questions={ROUND_QUESTIONS}",
            "runtime.until=decided",
        ]
        # Without a shape there is nothing to explain or fix: it may take the time of these parts, too.
        folder = self._execute("shape", overrides, share=LAST_SHARE)
        render_run(folder)
        metrics = read_csv(folder / "metrics.csv")
        table = read_csv(folder / "shape.csv")
        run = run_verdict(metrics)
        if table is None:
            diagnosis.verdict = CANNOT_TELL
            diagnosis.reason = "fewer than three gold positions have scores"
            return
        contrasts = {row["contrast"]: estimate(row) for _, row in table.iterrows()}
        shape = name_shape(contrasts)
        diagnosis.shape = shape
        numbers = (
            f"first minus inner positions {points(contrasts['primacy'])} points, "
            f"last minus inner {points(contrasts['recency'])}, n = {shape.questions}"
        )
        if (run and run.name in (CANNOT_DO, NO_BIAS)) or (
            run and run.name == CANNOT_TELL and "cut replies" in run.reason
        ):
            diagnosis.verdict, diagnosis.reason = run
        elif shape.name == FLAT:
            diagnosis.verdict = NO_BIAS
            diagnosis.reason = numbers
        elif shape.name == UNCLEAR:
            diagnosis.verdict = CANNOT_TELL
            diagnosis.reason = numbers
            if shape.missing:
                more = shape.missing * diagnosis.seconds["shape"] / shape.questions
                diagnosis.reason += f"; about {shape.missing} more questions, {duration(more)}, would tell"
        else:
            diagnosis.verdict = BIAS
            diagnosis.reason = numbers

    def _source(self) -> None:
        """Take the gold item's mask and position ids away, and see what that does to the inner positions."""
        diagnosis = self.diagnosis
        try:
            need_items(self.task)
        except UserError as error:
            diagnosis.source_note = f"{error.field}: {error.allowed}"
            return
        left = self.seconds * SHARES["source"] - self.watch.seconds
        per_prompt = diagnosis.seconds["shape"] / max(diagnosis.prompts["shape"], 1)
        positions = _ends_and_middle(self.task.gold_positions)
        per_question = SOURCE_WORK * SOURCE_VARIANTS * len(positions) * per_prompt
        examples = min(int(left / per_question), MAX_SOURCE_EXAMPLES)
        if examples < MIN_SOURCE_EXAMPLES:
            needed = duration(MIN_SOURCE_EXAMPLES * per_question)
            diagnosis.source_note = (
                f"it takes about {needed}, more than this budget leaves"
            )
            return
        try:
            folder = self._execute(
                "source",
                [
                    "study=crop_mask",
                    f"study.examples={examples}",
                    f"task.positions={positions}",
                    f"task.limit={examples}",
                ],
                method="",
                stages="study",
            )
        except UserError as error:
            diagnosis.source_note = f"{error.field}: {error.allowed}"
            return
        by_position = read_csv(folder / "crop_mask.csv")
        effects = read_csv(folder / "crop_mask_effects.csv")
        assert by_position is not None and effects is not None, "the study writes both"
        metric = self.task.metric
        diagnosis.source = judge_source(by_position, effects, metric)
        if not can_move(self.lm):
            diagnosis.source_note = "the model has no rotary embedding to move"

    def _remedies(self) -> None:
        """Race the methods on calibration prompts, and ask held-back questions of the winner."""
        diagnosis = self.diagnosis
        try:
            examples = self.task.examples("calibration")[:RACE_PROMPTS]
        except UserError as error:
            diagnosis.remedies_note = f"{error.field}: {error.allowed}"
            return
        choices = self._choices()
        methods, left_out = applicable_methods(self.lm, choices)
        if not methods:
            diagnosis.remedies = left_out
            diagnosis.remedies_note = "no method runs on this model"
            return
        left = self.seconds * SHARES["remedies"] - self.watch.seconds
        with (
            self._timed("remedies"),
            progress(
                self.console,
                self.config.runtime.log_every,
                "remedies",
                len(examples) * (len(methods) + 1),
                tokens=lambda: self.lm.tokens_read,
            ) as advance,
        ):
            remedies = race(self.lm, methods, examples, left, advance)
        diagnosis.prompts["remedies"] = sum(r.gain.n for r in remedies if r.gain)
        diagnosis.remedies = [*remedies, *left_out]
        diagnosis.winner = winner_of(remedies)
        if not diagnosis.winner:
            diagnosis.verdict = NOT_FIXED
            diagnosis.remedies_note = f"none of {len(remedies)} methods makes the right answer likelier for sure"
            return
        self._hold_back(choices[diagnosis.winner])

    def _hold_back(self, choice: MethodChoice) -> None:
        """Ask the winner, and the unmodified model, questions that nothing was chosen on."""
        diagnosis = self.diagnosis
        assert diagnosis.shape is not None, "without a bias there is no race"
        overrides = [
            f"task.limit={max(diagnosis.shape.questions, MIN_HELD_BACK)}",
            f"runtime.round_questions={ROUND_QUESTIONS}",
            *_spell_method(choice),
        ]
        if self.task.path is None and "task.seed" not in self.typed_keys:
            overrides.append(f"task.seed={self.task.seed + 1}")
        folder = self._execute("held-back", overrides, share=LAST_SHARE, method="")
        render_run(folder)
        verdict = run_verdict(read_csv(folder / "metrics.csv"))
        verdict = verdict or Verdict(CANNOT_TELL, "nothing was scored")
        diagnosis.held_back = str(verdict)
        if verdict.name == BIAS:
            verdict = Verdict(CANNOT_TELL, verdict.reason)
        elif verdict.name in (NO_BIAS, CANNOT_DO):
            reason = f"on held-back questions: {verdict}"
            verdict = Verdict(CANNOT_TELL, reason)
        diagnosis.verdict, diagnosis.reason = verdict

    # Methods

    def _choices(self) -> dict[str, MethodChoice]:
        """The methods to race: the typed one, or all, with what a search finds where time is left for it."""
        folders = paths.config_folders(read_flags(self.args).config_dir)
        choices = all_choices(folders, self.config.model.blocks)
        if "method" in self.typed_keys:
            config = self._prepare([], method="").config
            return {config.choice.name: config.choice}
        choice = choices["scale_channel"]
        if choice.values.get("channel") is None:
            found = self._search()
            values = {k: v for k, v in found.items() if k in choice.values}
            choices["scale_channel"] = MethodChoice(
                name=choice.name, cls=choice.cls, values={**choice.values, **values}
            )
        return choices

    def _search(self) -> Mapping[str, Any]:
        """What a search finds for scale_channel; empty where there is no time for it."""
        left = self.seconds * SHARES["remedies"] - self.watch.seconds
        if left < MIN_SEARCH_SECONDS:
            return {}
        try:
            folder = self._execute(
                "search",
                [
                    "method=scale_channel",
                    "search=channel",
                    "search.strings=100",
                    "task.calibration_examples=16",
                ],
                method="",
                stages="search",
            )
        except UserError as error:
            self.console.print(f"search: {error}")
            return {}
        hint = CORRECT_FILE
        found: dict[str, dict[str, Any]] = read_yaml(
            folder / FOUND_FILE, dict[str, dict[str, Any]], hint=hint
        )
        return found["scale_channel"]

    # Runs

    @property
    def lm(self) -> LM:
        """The model in process, loaded when it is first needed."""
        if self._lm is None:
            silence_transformers()
            set_threads(self.config)
            runtime = self.config.runtime
            with loading(self.config.model.name, self.console):
                self._lm = load(
                    self.config.model,
                    device=runtime.device,
                    device_map=runtime.device_map,
                    max_memory=runtime.max_memory,
                )
        return self._lm

    def _overrides(self, own: Sequence[str], method: str, stages: str) -> list[str]:
        """The command line of a run: what was typed, what the diagnosis changed, and what the part sets."""
        own_keys = {override.partition("=")[0] for override in own}
        typed = [
            arg
            for arg in self.args
            if arg.partition("=")[0] not in own_keys
            and not (method and arg.startswith("method"))
        ]
        changed = [
            f"{key}={_spell(value)}"
            for key, value in self.settings.items()
            if key not in own_keys
        ]
        overrides = [*typed, *changed]
        if method:
            overrides.append(f"method={method}")
        overrides += own
        return [*overrides, f"stages=[{stages}]"]

    def _prepare(
        self, own: Sequence[str], method: str = "none", stages: str = "evaluate"
    ) -> Any:
        configs: list[Any] = []
        compose(self._overrides(own, method, stages), configs.append)
        return prepare(configs[0])

    def _execute(
        self,
        part: str,
        own: Sequence[str],
        share: float | None = None,
        method: str = "none",
        stages: str = "evaluate",
    ) -> Path:
        """Make a run, and record it as a part of the diagnosis.

        Args:
            part: Name of the part.
            own: Overrides of the part.
            share: Share of the time of the diagnosis that is over when its rows must be there; None: no limit.
            method: The method; empty: the typed one, or one among ``own``.
            stages: Its stages.

        Returns:
            The run folder.
        """
        config: Config = self._prepare(own, method, stages).config
        command = shlex.join(["posbench", *self._overrides(own, method, stages)])
        watch = Stopwatch()
        if share is not None:
            left = max(share * self.seconds - self.watch.seconds, 1.0)
            config = _with_time(config, left)
        lm = None if self.is_served else self.lm
        with self._timed(part):
            folder = execute(
                config,
                command=command,
                console=self.console,
                lm=lm,
                watch=watch,
                shows_result=False,
            )
        self.diagnosis.runs[part] = str(folder)
        file = folder / "predictions.jsonl"
        if file.is_file():
            rows = open_run_dir(folder).rows_without_error(file.name)
            self.diagnosis.prompts[part] = len(rows)
        return folder

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Add the time of a block to that of a part."""
        began = time.monotonic()
        yield
        seconds = self.diagnosis.seconds
        seconds[part] = round(seconds.get(part, 0) + time.monotonic() - began, 1)

    # Settings

    def _typed(self, key: str) -> int | None:
        """A number that the user typed."""
        for override in self.args:
            name, _, value = override.partition("=")
            if name == key and value.isdigit():
                return int(value)
        return None

    def _set_first_size(self, config: Config, task: GoldPositionTask) -> None:
        """Begin with few items where neither the user nor the model's file says how many."""
        size = f"task.{task.sizes[0]}"
        named = config.model.blocks.get(task.name, {})
        is_set = size in self.typed_keys or task.sizes[0] in named
        if not is_set and task.path is None and task.items > FIRST_ITEMS:
            self.settings[size] = FIRST_ITEMS
            self.settings[f"task.{task.sizes[1]}"] = FIRST_ITEMS

    def _other_task(self, level: str) -> dict[str, Any]:
        """Settings that give replies more room, or make the task easier or harder; empty where nothing does.

        What the user typed stays.
        """
        task = self.task
        if level == "cut":
            key = "task.max_new_tokens"
            changes = {key: MORE_TOKENS * task.max_new_tokens}
        else:
            size, calibration_size = (f"task.{name}" for name in task.sizes)
            items = max(task.items // 2, MIN_ITEMS)
            changes = {}
            if level == "floor":
                simpler = {
                    f"task.{name}": value
                    for name, value in task.simpler.items()
                    if name not in task.sizes and value != getattr(task, name)
                }
                changes |= simpler
            else:
                items = LARGER * task.items
            if items != task.items:
                changes |= {size: items, calibration_size: items}
        changes = {k: v for k, v in changes.items() if k not in self.typed_keys}
        if not changes:
            return {}
        before = dict(self.settings)
        self.settings |= changes
        try:
            self._prepare([])
        except UserError:
            return {}  # it does not fit the window or the data
        finally:
            self.settings = before
        return changes

    def _next_command(self) -> str:
        """What to run next; empty where nothing is left to do."""
        diagnosis = self.diagnosis
        begin = shlex.join(["posbench", "diagnose", *self.args])
        if diagnosis.verdict == "fixed":
            return f"posbench export {diagnosis.runs['held-back']} --out fix"
        if diagnosis.verdict == CANNOT_TELL and diagnosis.shape is not None:
            return f"{begin} budget={_larger_budget(self.seconds)}"
        if diagnosis.verdict == CANNOT_DO:
            return f"{begin} task.{self.task.sizes[0]}={max(self.task.items // 4, 3)}"
        if diagnosis.verdict == BIAS and self.is_served:
            return "posbench diagnose model=DIR_OR_HUB_ID"
        return ""


def _refuse_own_keys(overrides: Sequence[str]) -> None:
    """Refuse settings that a diagnosis chooses itself."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key in REFUSED:
            allowed = "left out: a diagnosis chooses it"
            raise UserError(key, value, allowed, f"leave {key} out")


def _with_time(config: Config, seconds: float) -> Config:
    """The config with a time in which its rows must be made."""
    return replace(config, budget=Budget(f"{seconds:.0f}s", seconds=seconds))


def _ends_and_middle(positions: Sequence[int]) -> list[int]:
    """First, middle and last of some positions."""
    ordered = sorted(positions)
    return [ordered[0], ordered[len(ordered) // 2], ordered[-1]]


def _level_text(level: str) -> str:
    """Where a pilot found the model, in words."""
    return {
        "floor": "the model is at the floor",
        "ceiling": "the model is at the ceiling",
        "cut": "replies are cut before an answer",
    }[level]


def _spell(value: Any) -> str:
    """A value as an override has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_spell, value))}]"
    return str(value)


def _spell_method(choice: MethodChoice) -> list[str]:
    """A method and its constants as overrides."""
    constants = [
        f"method.{key}={_spell(value)}"
        for key, value in choice.values.items()
        if value is not None
    ]
    return [f"method={choice.name}", *constants]


def _larger_budget(seconds: float) -> str:
    """Three times a budget, in minutes."""
    return f"{-(-3 * seconds // 60):.0f}min"
