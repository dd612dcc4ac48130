"""The course of a diagnosis: ordinary runs, each of which decides what the next one asks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from posbench.backends.base import text_encoder
from posbench.diagnose.allowance import LARGER_FACTOR, Allowance
from posbench.diagnose.outcome import (
    LEVELS,
    Pilot,
    best_place_in_prompt,
    judge_pilot,
    judge_source,
    judge_structure,
    points,
    shape_of_run,
)
from posbench.diagnose.remedies import Remedies
from posbench.diagnose.runs import Runs, key_of
from posbench.diagnose.signal import (
    answer_signal,
    has_no_signal,
    spread_over_positions,
)
from posbench.diagnose.sizes import END_SHARES, LAST_SHARE, Sizes
from posbench.errors import UserError
from posbench.files.atomic import short_hash
from posbench.files.secrets import command_line
from posbench.methods.choice import MethodChoice
from posbench.perturbations.move_positions import can_move
from posbench.pipeline.arguments import folder_name, read_flags
from posbench.pipeline.budget import need_counted, suggested_budget
from posbench.pipeline.config import Config
from posbench.pipeline.served import estimate_served, need_consent
from posbench.report.folder import read_csv, read_json, study_tables
from posbench.report.glance import name_in_commands
from posbench.run.budget import Budget, Stopwatch
from posbench.run.folder import PREDICTIONS, open_run_dir
from posbench.run.heartbeat import doing
from posbench.run.progress import duration
from posbench.run.sequential import ShapeRule
from posbench.schema import override_text
from posbench.stats import outcomes
from posbench.stats.bootstrap import Array, Estimate
from posbench.stats.policies import USE
from posbench.stats.position_bias import NEGLIGIBLE_SHARE, TOO_FEW, fewest_questions
from posbench.stats.sequential import (
    FARTHEST_FORECAST,
    FIRST_FORECAST,
    forecast_questions,
)
from posbench.stats.shape import NEGLIGIBLE_CONTRAST
from posbench.stats.verdict import (
    BIAS,
    CANNOT_DO,
    CANNOT_TELL,
    FIXED,
    NOT_FIXED,
    run_verdict,
)
from posbench.studies.bias_source import SOURCE_TABLES
from posbench.studies.order import VERDICT_FILE
from posbench.studies.prompts import need_items
from posbench.tasks import KVRetrieval, Task
from posbench.tasks.own_data import OwnData

PILOT_QUESTIONS = 20
"""Questions at each position of a pilot."""
MIN_PILOT_QUESTIONS = 5
"""Fewest questions at each position from which a pilot draws a conclusion."""
HALF_SPENT = 0.5
"""Share of a budget above which it may have kept a diagnosis from asking more; each part has its own share."""
BUDGET_MARGIN = 1.2
"""Budget of the suggested command, divided by the forecast."""
REPLY_LIMIT_FACTOR = 4
"""Factor on the reply limit after a pilot whose replies were cut."""
HARDER_ITEMS_FACTOR = 3
"""Factor on the number of items that makes a task harder."""
FIRST_ITEMS = 20
"""Items of a prompt where user and model's file leave it open, for a pilot on two cores."""
MIN_EASIER_ITEMS = 6
"""Fewest items of a prompt of an easier task."""
ATTENTION_EXAMPLES = 5
"""Questions at each position whose attention is measured."""
MIN_SOURCE_EXAMPLES = 10
"""Fewest questions at each position of the search for the source."""
MAX_SOURCE_EXAMPLES = 30
"""Most questions at each position of the search for the source."""
SOURCE_PROMPTS_PER_QUESTION = 10
"""Prompts in the search for the source: three positions, and seven interventions and controls at the middle one."""
SOURCE_TIME_RATIO = 2.0
"""Time of such a prompt divided by the time of a prompt of the shape, which shares its prefix with others."""
STRUCTURE_QUESTIONS = 20
"""Questions at each of three positions for what structure alone predicts."""
STRUCTURE_INFLUENCES = 12
"""Prompts among them whose influence is measured."""
STRUCTURE_PROMPTS = 2 * (3 * STRUCTURE_QUESTIONS + 4 * STRUCTURE_INFLUENCES)
"""Prompts in all, a gradient counted as three: replies and influences, each also behind a text."""
PROMPT_QUESTIONS = 40
"""Questions at each position of the race of changed prompts."""
MIN_PROMPT_QUESTIONS = 10
"""Fewest questions at each position for which changed prompts are raced."""
PROMPT_COST = 12
"""Prompts that a question takes there: the changes of the prompt, some of which are longer, until losers drop out."""
PROMPT_OVERRIDES = ("study=order", "study.probes=0")
"""The study that races changed prompts."""
OWN_KEYS = ("stages", "study", "experiment", "search", "runtime.until")
"""Keys that a diagnosis sets itself."""


class Course:
    """Takes the parts of a diagnosis in turn.

    Args:
        args: Overrides as typed, with Hydra's flags, without the budget.
        budget: Its budget.
        console: Where progress goes.
        watch: Measures the time; None: from now on.

    Raises:
        UserError: The diagnosis sets a typed key itself, the task has no gold positions, or the user refuses to ask a
            server.
    """

    def __init__(
        self,
        args: Sequence[str],
        budget: Budget,
        console: Console,
        watch: Stopwatch | None = None,
    ) -> None:
        _refuse_own_keys(read_flags(args).overrides)
        self.args = list(args)
        self.console = console
        self.allowance = Allowance(budget, None, watch)
        self.runs = Runs(args, self.allowance, console)
        self.diagnosis = self.runs.diagnosis
        self.sizes = Sizes(self.runs)
        config = self._prepare_first()
        task = config.task
        _need_moving_gold_item(task)
        self._set_sizes(config, task)
        self.runs.use(self._prepare_task())
        positions = list(self.runs.task.gold_positions)
        if len(positions) < 3:
            allowed = (
                "three or more in a diagnosis: the first, the last, and one between"
            )
            raise UserError("task.positions", positions, allowed, "leave it out")
        model = self.runs.config.model
        self.allowance.price = model.price
        need_counted(self.runs.config, budget)
        self.diagnosis.model = model.name if model.in_process else model.server_name
        self.diagnosis.task = task.name

    @property
    def folder(self) -> Path:
        """Where the files of the diagnosis go: one folder for each set of overrides."""
        outputs = Path(self.runs.config.runtime.outputs).expanduser()
        model = folder_name(self.diagnosis.model) or "model"
        typed = sorted(a for a in self.args if not a.startswith("runtime.yes="))
        name = f"{model}__{self.diagnosis.task}__{short_hash(typed)}"
        return outputs / "diagnose" / name

    def run(self) -> None:
        """Take the parts in turn until the question is answered; the findings go to :attr:`diagnosis`."""
        diagnosis = self.diagnosis
        remedies = Remedies(self.runs, self.sizes, self.folder)
        if not self.runs.is_served:
            remedies.check()
        self._announce()
        if self._has_signal() and self._pilot():
            self._shape()
            self._name_server()
            if diagnosis.verdict == BIAS and self.runs.has_checkpoint:
                self._attention()
                self._source()
                self._structure()
                self._prompts()
                remedies.run()
            elif diagnosis.verdict == BIAS:
                note = "a server shows nothing of the inside of its model"
                diagnosis.source_note = note
                diagnosis.remedies_note = note
                self._prompts()
        diagnosis.next = self._next_command()
        diagnosis.total = self.allowance.words(self.runs.is_served)
        diagnosis.total_seconds = round(self.allowance.watch.seconds, 1)

    # Parts

    def _announce(self) -> None:
        """Print notes on the task's data and the limits of the diagnosis, and ask for consent where it costs money."""
        for note in self.runs.task.notes():
            self.console.print(note)
        budget = self.allowance.budget.text
        if not self.runs.is_served:
            positions = len(self.runs.task.gold_positions)
            most = self.sizes.shape_limit()
            pilot = 3 * self.sizes.typed_limit(PILOT_QUESTIONS)
            line = (
                f"diagnosis: a pilot of {pilot} prompts, then as many as tell the shape, at most {most * positions:,}, "
                f"and what explains and fixes it; at most {budget}"
            )
            self.console.print(line)
            return
        config = self.runs.prepare([f"task.limit={self.sizes.shape_limit()}"])
        profile = config.server
        assert profile is not None, "a server that does not answer was refused"
        encoder = text_encoder(config.model)
        estimate = estimate_served(config, profile, encoder)
        if not self.allowance.budget.prompts:
            questions = self.sizes.typed_limit(PROMPT_QUESTIONS)
            overrides = [*PROMPT_OVERRIDES, *self._three_positions(questions)]
            changed = self.runs.prepare(overrides, method=None, stages="study")
            estimate = estimate.plus(estimate_served(changed, profile, encoder))
        line = f"{estimate.line(config.model.concurrency)}; fewer where these tell the shape; at most {budget}"
        self.console.print(line)
        need_consent(
            replace(config, budget=self.allowance.budget), estimate, self.console
        )
        # Each run inherits this consent.
        self.runs.settings["runtime.yes"] = True

    def _has_signal(self) -> bool:
        """Check whether the prompt makes the answer likelier; if not, set the verdict.

        A model that is random, or does not fit its tokenizer, ends here within seconds.
        """
        if self.runs.is_served:
            return True
        gain = self._measure_signal()
        if not has_no_signal(gain):
            return True
        changes = self._other_task("floor")
        if changes:
            self._change_task(changes, "the prompt tells the model nothing")
            gain = self._measure_signal()
            if not has_no_signal(gain):
                return True
        self.diagnosis.verdict = CANNOT_DO
        self.diagnosis.reason = (
            "the right answer is hardly likelier after its own prompt than after that of another question: by "
            f"{gain.words} nats per token, n = {gain.n}; so it is with a model that is not trained, or has another "
            "model's tokenizer"
        )
        return False

    def _measure_signal(self) -> Estimate:
        """Estimate how much likelier (nats per token) the right answer is after its own prompt than after another's."""
        examples = spread_over_positions(self.runs.task.evaluation())
        lm = self.runs.lm
        text = f"first look: at most {2 * len(examples)} prompts"
        with (
            self.runs.counted("first look", lm),
            self.console.status(text),
            doing(text),
        ):
            gain = answer_signal(lm, self.runs.task, examples)
        self.allowance.add(2 * gain.n, 0, 0)
        self.runs.count_prompts("first look", 2 * gain.n)
        return gain

    def _pilot(self) -> bool:
        """Ask a few questions, and once make the task easier, harder or longer where it shows no bias.

        Returns:
            Whether a position bias can be looked for.
        """
        diagnosis = self.diagnosis
        changes: dict[str, Any] = {}
        tried = set[str]()
        while True:
            positions = _ends_and_middle(self.runs.task.gold_positions)
            most = self.sizes.typed_limit(PILOT_QUESTIONS)
            questions = self.sizes.affordable("pilot", most, len(positions))
            questions = min(questions, self.sizes.questions_in_time(len(positions)))
            if questions < min(
                MIN_PILOT_QUESTIONS, self.sizes.typed_limit(PILOT_QUESTIONS)
            ):
                if diagnosis.pilots:
                    return self._end_at(diagnosis.pilots[-1])
                spent = self.allowance.prompts
                needed = MIN_PILOT_QUESTIONS * len(positions)
                prompts = math.ceil((spent + needed) / END_SHARES["pilot"])
                allowed = f"more: a diagnosis begins with {MIN_PILOT_QUESTIONS} questions at {len(positions)} positions"
                hint = f"set budget={self.allowance.larger()}, or {prompts}prompts"
                if self.allowance.is_time:
                    seconds = needed * self.sizes.seconds_of_prompt()
                    allowed += f", which take this server about {duration(seconds)}"
                    needed_seconds = (self.allowance.spent + seconds) / END_SHARES[
                        "pilot"
                    ]
                    hint = f"set budget={suggested_budget(needed_seconds)}, or smaller prompts"
                raise UserError("budget", self.allowance.budget.text, allowed, hint)
            round_questions = self.sizes.round_questions(
                "first look", len(positions), share=0.5
            )
            folder = self.runs.execute(
                "pilot",
                [
                    f"task.positions={positions}",
                    f"task.limit={questions}",
                    f"runtime.round_questions={round_questions}",
                ],
                share=END_SHARES["pilot"],
            )
            rows = open_run_dir(folder).rows_without_error(PREDICTIONS)
            pilot = judge_pilot(
                rows, self.runs.task.metric, self.runs.task.chance or 0.0, changes
            )
            diagnosis.pilots.append(pilot)
            if pilot.level == "in between":
                return True
            is_missing = pilot.level == "missing answers"
            kind = "cut" if is_missing else "difficulty"
            changes = {} if kind in tried else self._other_settings(pilot)
            if not changes:
                return self._end_at(pilot)
            tried.add(kind)
            self._change_task(changes, f"pilot: {LEVELS[pilot.level]}")

    def _end_at(self, pilot: Pilot) -> bool:
        """Set the verdict of a pilot that shows no bias; return whether to go on."""
        if pilot.level == "ceiling":
            return True  # the shape shows whether this holds at every position
        self.diagnosis.verdict = CANNOT_DO if pilot.level == "floor" else CANNOT_TELL
        score = f"{points(pilot.average)} % of the pilot's answers are right"
        self.diagnosis.reason = score
        if pilot.level == "missing answers":
            text = f"{pilot.missing} prompts of the pilot got no answer: {pilot.kinds}"
            self.diagnosis.reason = text
        return False

    def _shape(self) -> None:
        """Ask questions at all positions until the shape is decided or the budget is spent."""
        diagnosis = self.diagnosis
        # Without a shape there is nothing to explain or fix, so it may use the budget of those parts.
        num_positions = len(self.runs.task.gold_positions)
        limit = self.sizes.affordable("shape", self.sizes.shape_limit(), num_positions)
        round_questions = self.sizes.round_questions("pilot", num_positions, share=1.0)
        folder = self.runs.execute(
            "shape",
            [
                f"task.limit={limit}",
                f"runtime.round_questions={round_questions}",
                "runtime.until=decided",
            ],
            share=LAST_SHARE,
        )
        self.runs.write_page(folder)
        metrics = read_csv(folder / "metrics.csv")
        verdict = run_verdict(metrics)
        if metrics is None or verdict is None:
            diagnosis.verdict = CANNOT_TELL
            diagnosis.reason = "fewer than three gold positions have scores"
            return
        diagnosis.verdict, diagnosis.reason = verdict
        diagnosis.shape = shape_of_run(metrics)
        if verdict.name == BIAS:
            positions = sorted(self.runs.task.gold_positions)
            scores = self._shape_scores(folder)
            diagnosis.place = best_place_in_prompt(scores, positions)
        if verdict.name == CANNOT_TELL and outcomes.PROBLEM not in verdict.reason:
            self._forecast(folder)

    def _forecast(self, folder: Path) -> None:
        """Forecast the questions at each position that would decide the shape, where the run allows a forecast."""
        diagnosis = self.diagnosis
        scores = self._shape_scores(folder)
        if not len(scores):
            return
        total = forecast_questions(scores, NEGLIGIBLE_CONTRAST)
        if total and TOO_FEW in diagnosis.reason:
            total = max(total, fewest_questions(NEGLIGIBLE_SHARE))
        diagnosis.needed_questions = total
        if total is None:
            text = f"more than {FARTHEST_FORECAST:,} questions at each position would be needed to tell"
        else:
            seconds = self.runs.seconds_of_run["shape"] / len(scores)
            more = duration(max(total - len(scores), 0) * seconds)
            about = "about" if len(scores) >= FIRST_FORECAST else "up to about"
            text = f"{about} {total} questions at each position in all, {more} more, would tell"
        diagnosis.reason += f"; {text}"
        if (total or FARTHEST_FORECAST) > self.sizes.available_questions:
            diagnosis.reason += f", and the data hold {self.sizes.available_questions}"

    def _shape_scores(self, folder: Path) -> Array:
        """Scores of the questions that the shape's run answered at all gold positions, shape (questions, positions)."""
        rows = open_run_dir(folder).rows_without_error(PREDICTIONS)
        task = replace(self.runs.task, limit=self.sizes.shape_limit())
        examples = task.evaluation()
        rule = ShapeRule(task.metric, rows[0]["method"], examples, task.chance or 0.0)
        return rule.scores(rows)

    def _name_server(self) -> None:
        """Note that a bias may be the server's, unless a check showed that prompts arrive whole."""
        server = self.runs.config.server
        delivery = server.delivery if server else None
        if delivery and delivery.unchecked and self.diagnosis.verdict == BIAS:
            self.diagnosis.reason += (
                f"; of this server, if not of its model: {delivery}"
            )

    def _attention(self) -> None:
        """Measure the attention of the last token to the items, where the budget leaves room for it."""
        prompts = ATTENTION_EXAMPLES * len(self.runs.task.gold_positions)
        left = self.allowance.left(END_SHARES["source"])
        # For a served model the cost of a prompt in process is unknown until this part has measured it.
        is_unknown = self.runs.is_served and self.allowance.is_time
        cost = 0.0 if is_unknown else self.sizes.measured_cost_of_prompt()
        if not left or prompts * cost > left / 3:
            return
        part_overrides = [f"runtime.intervene_examples={ATTENTION_EXAMPLES}"]
        if "task.limit" not in self.runs.typed_keys:
            part_overrides.append(f"task.limit={ATTENTION_EXAMPLES}")
        try:
            self.runs.execute(
                "attention",
                part_overrides,
                prompts=prompts,
                stages="intervene",
                in_process=True,
            )
        except UserError as error:
            self.console.print(f"attention: {error}")

    def _source(self) -> None:
        """Remove the cues to the gold item's position one by one, and measure the effect on its answer."""
        diagnosis = self.diagnosis
        try:
            need_items(self.runs.task)
        except UserError as error:
            diagnosis.source_note = f"{error.field}: {error.allowed}"
            return
        examples = self._source_examples()
        if examples < MIN_SOURCE_EXAMPLES:
            return
        folder, refusal = self._run_study(
            "source",
            ["study=bias_source", f"study.examples={examples}"],
            examples,
            prompts=SOURCE_PROMPTS_PER_QUESTION * examples,
            in_process=True,
        )
        if folder is None:
            diagnosis.source_note = refusal
            return
        findings = read_csv(folder / "findings.csv")
        assert findings is not None, "the study writes it"
        tables = study_tables(folder, SOURCE_TABLES)
        diagnosis.source = judge_source(tables, findings)
        if not can_move(self.runs.lm):
            diagnosis.source_note = "the model has no rotary embedding to move"

    def _source_examples(self) -> int:
        """Return how many questions at each position the budget leaves for the source.

        If these are too few, the diagnosis gets a note that says what more would take.
        """
        diagnosis = self.diagnosis
        per_question = (
            SOURCE_PROMPTS_PER_QUESTION * self.sizes.measured_cost_of_prompt()
        )
        if self.allowance.is_time and "attention" not in diagnosis.prompts:
            per_question *= SOURCE_TIME_RATIO
        examples = int(
            self.allowance.left(END_SHARES["source"]) / max(per_question, 1e-9)
        )
        if examples < MIN_SOURCE_EXAMPLES:
            needed = f"{MIN_SOURCE_EXAMPLES * SOURCE_PROMPTS_PER_QUESTION} prompts"
            if self.allowance.is_time:
                needed = f"about {duration(MIN_SOURCE_EXAMPLES * per_question)}"
            diagnosis.source_note = f"it takes {needed}, more than this budget leaves"
        return min(examples, MAX_SOURCE_EXAMPLES)

    def _structure(self) -> None:
        """Compare the bias with what mask, ALiBi and residual stream alone predict, where the budget allows it."""
        diagnosis = self.diagnosis
        cost = STRUCTURE_PROMPTS * self.sizes.measured_cost_of_prompt()
        if diagnosis.source is None or cost > self.allowance.left(
            END_SHARES["structure"]
        ):
            return
        folder, refusal = self._run_study(
            "structure",
            [
                "study=structure",
                f"study.examples={STRUCTURE_QUESTIONS}",
                f"study.prompts={STRUCTURE_INFLUENCES}",
            ],
            STRUCTURE_QUESTIONS,
            prompts=STRUCTURE_PROMPTS,
            in_process=True,
        )
        if folder is None:
            diagnosis.structure = f"not compared, {refusal}"
            return
        findings = read_csv(folder / "findings.csv")
        assert findings is not None, "the study writes it"
        diagnosis.structure = judge_structure(findings)

    def _prompts(self) -> None:
        """Race the changes of the prompt on the same task, which any model can be asked under."""
        diagnosis = self.diagnosis
        if self.runs.is_method_typed:
            return  # the user asks about one method
        if self.allowance.budget.prompts:
            # A study of replies ends by time, tokens or money.
            command = "posbench study=order with the same keys"
            diagnosis.prompt_changes_note = (
                f"a budget of prompts does not limit them; {command}"
            )
            return
        questions = self._prompt_questions()
        if questions < min(
            MIN_PROMPT_QUESTIONS, self.sizes.typed_limit(PROMPT_QUESTIONS)
        ):
            diagnosis.prompt_changes_note = (
                "they take more than this budget leaves: posbench study=order with the same keys, or posbench order "
                "LOG on a log of your own"
            )
            return
        folder, refusal = self._run_study(
            "prompts",
            PROMPT_OVERRIDES,
            questions,
            share=self._prompts_end_share,
            method=None,
        )
        if folder is None:
            diagnosis.prompt_changes_note = refusal
            return
        diagnosis.prompt_changes = read_json(folder / VERDICT_FILE)

    def _run_study(
        self, part: str, overrides: Sequence[str], questions: int, **choices: Any
    ) -> tuple[Path | None, str]:
        """Run a study at the first, a middle and the last gold position.

        Args:
            part: Name of the part.
            overrides: The study and its settings.
            questions: Questions at each of these positions.
            **choices: See :meth:`posbench.diagnose.runs.Runs.execute`.

        Returns:
            The run folder, or None and why the study cannot be made on this model and task.
        """
        overrides = [*overrides, *self._three_positions(questions)]
        try:
            folder = self.runs.execute(part, overrides, stages="study", **choices)
        except UserError as error:
            return None, f"{error.field}: {error.allowed}"
        return folder, ""

    def _three_positions(self, questions: int) -> list[str]:
        """Overrides that ask so many questions at the first, a middle and the last gold position."""
        positions = _ends_and_middle(self.runs.task.gold_positions)
        return [f"task.positions={positions}", f"task.limit={questions}"]

    @property
    def _prompts_end_share(self) -> float:
        """Share of the budget that is spent when changed prompts are raced; at a server nothing follows."""
        return END_SHARES["prompts"] if self.runs.has_checkpoint else LAST_SHARE

    def _prompt_questions(self) -> int:
        """Return how many questions at each position the budget leaves for the race of changed prompts."""
        num_prompts = max(self.diagnosis.prompts["shape"], 1)
        seconds = self.runs.seconds_of_run["shape"] / num_prompts
        cost = seconds if self.allowance.is_time else self.sizes.cost_of_prompt()
        left = self.allowance.left(self._prompts_end_share)
        affordable = left / max(3 * PROMPT_COST * cost, 1e-9)
        return int(min(affordable, self.sizes.typed_limit(PROMPT_QUESTIONS)))

    # Sizes

    def _prepare_first(self) -> Config:
        """The config of the typed task, with few pairs where the default number does not fit the rest."""
        size = f"task.{KVRetrieval.sizes[0]}"
        try:
            return self._prepare_task()
        except UserError as error:
            if error.field != size or size in self.runs.typed_keys:
                raise
            self.runs.settings[size] = FIRST_ITEMS
            return self._prepare_task()

    def _set_sizes(self, config: Config, task: Task) -> None:
        """Begin with few items where user, model's file and task's file leave the number open.

        Methods are raced on as many items as they are asked about later: what helps among few may harm among many.
        """
        items = task.items
        assert items is not None, "a gold item is moved among items"
        size, calibration_size = (f"task.{name}" for name in task.sizes)
        named = config.model.blocks.get(task.name, {})
        is_set = size in self.runs.typed_keys or task.sizes[0] in named
        is_open = not is_set and getattr(task, "path", None) is None
        if is_open and (items > FIRST_ITEMS or size in self.runs.settings):
            items = FIRST_ITEMS
            self.runs.settings[size] = items
        if calibration_size not in (size, *self.runs.typed_keys):
            self.runs.settings[calibration_size] = items

    # Settings

    def _prepare_task(self) -> Config:
        """The config of the task with its current settings and the questions of a pilot."""
        part_overrides = []
        if "task.limit" not in self.runs.typed_keys:
            part_overrides.append(f"task.limit={PILOT_QUESTIONS}")
        return self.runs.prepare(part_overrides)

    def _other_settings(self, pilot: Pilot) -> dict[str, Any]:
        """Changes after a pilot: longer replies or more thinking where they were cut, else another task."""
        if pilot.level != "missing answers":
            return self._other_task(pilot.level)
        if not pilot.is_cut:
            return {}
        key, tokens = self._longer_replies(pilot)
        return self._if_possible({key: tokens})

    def _longer_replies(self, pilot: Pilot) -> tuple[str, int]:
        """The key and the value of a reply or thinking limit larger than the pilot's."""
        if pilot.thinks:
            tokens = self.runs.config.model.thinking_tokens or 1
            return "model.thinking_tokens", REPLY_LIMIT_FACTOR * tokens
        return "task.max_new_tokens", REPLY_LIMIT_FACTOR * self.runs.task.max_new_tokens

    def _other_task(self, level: str) -> dict[str, Any]:
        """Return settings that make the task easier or harder, by key; empty if there are none.

        Args:
            level: ``floor`` if the task was too hard, else it was too easy.
        """
        task = self.runs.task
        size, calibration_size = (f"task.{name}" for name in task.sizes)
        changes: dict[str, Any] = {}
        assert task.items is not None, "a gold item is moved among items"
        items = HARDER_ITEMS_FACTOR * task.items
        if level == "floor":
            items = max(task.items // 2, MIN_EASIER_ITEMS)
            changes |= {
                f"task.{name}": value
                for name, value in task.simpler.items()
                if name not in task.sizes and value != getattr(task, name)
            }
        if items != task.items:
            changes |= {size: items, calibration_size: items}
        return self._if_possible(changes)

    def _if_possible(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Return changes of settings that the user did not type; empty where they do not fit the window or the data."""
        changes = {k: v for k, v in changes.items() if k not in self.runs.typed_keys}
        if not changes:
            return {}
        settings_before = dict(self.runs.settings)
        self.runs.settings |= changes
        try:
            self._prepare_task()
        except UserError as error:
            line = f"{error.field} stays as it is: {error.allowed}"
            self.console.print(line)
            return {}
        finally:
            self.runs.settings = settings_before
        return changes

    def _change_task(self, changes: Mapping[str, Any], reason: str) -> None:
        """Change the settings of the task, and print the change."""
        self.runs.settings |= changes
        self.runs.use(self._prepare_task())
        text = ", ".join(
            f"{key}={override_text(value)}" for key, value in changes.items()
        )
        line = f"{reason}; asked again with {text}"
        self.console.print(line)

    def _next_command(self) -> str:
        """Return the command to run next; empty if nothing is left to do."""
        diagnosis = self.diagnosis
        if diagnosis.verdict == FIXED:
            fixed = open_run_dir(Path(diagnosis.runs["held-back"]))
            config = fixed.config()
            to = MethodChoice.of(config["method"]).export_format
            name = name_in_commands(fixed.path)
            return f"posbench export {name} --to {to} --out fix" if to else ""
        if self._lacks_answers():
            step = diagnosis.pilots[-1].step
            if not step and outcomes.PROBLEM in diagnosis.reason:
                _, _, step = diagnosis.reason.rpartition("; ")
            setting = outcomes.setting_in(step)
            if step and "_tokens=" not in setting:
                return step
            key, tokens = self._longer_replies(diagnosis.pilots[-1])
            if setting:
                key, _, number = setting.partition("=")
                tokens = int(number)
            return self._command_with({key: tokens})
        changes = diagnosis.prompt_changes
        has_bias = diagnosis.verdict in (BIAS, NOT_FIXED)
        if has_bias and changes and changes["verdict"] == USE:
            # Whether it removes the bias, too: the race measured the average alone.
            *with_change, _stages = self.runs.overrides([], method=changes["policy"])
            # As much as this diagnosis could ask, and not the task's default.
            return self._spelled([*with_change, f"budget={self.allowance.budget.text}"])
        if diagnosis.verdict == BIAS and not self.runs.has_checkpoint:
            # Of a server the changes of the prompt are all that a user can try.
            if self.allowance.budget.prompts and not self.runs.is_method_typed:
                questions = self.sizes.typed_limit(PROMPT_QUESTIONS)
                study = [*PROMPT_OVERRIDES, *self._three_positions(questions)]
                *overrides, _stages = self.runs.overrides(
                    study, method=None, stages="study"
                )
                return self._spelled(overrides)
            if changes and changes["verdict"] != CANNOT_TELL:
                return ""
            return self._command_with_more_questions()
        if diagnosis.shape and self._is_undecided():
            # Without a forecast it is more than a diagnosis would ask.
            if diagnosis.verdict == CANNOT_TELL and not diagnosis.needed_questions:
                return ""
            return self._command_with_more_questions()
        if diagnosis.verdict == CANNOT_DO and diagnosis.pilots and self.runs.task.items:
            key = f"task.{self.runs.task.sizes[0]}"
            return self._command_with({key: max(self.runs.task.items // 4, 3)})
        return ""

    def _spelled(self, overrides: Sequence[str]) -> str:
        """A command without the consent to this diagnosis: whoever types it gives the consent to its own price."""
        typed = [o for o in overrides if key_of(o) != "runtime.yes"]
        return command_line(typed)

    def _command_with(self, settings: Mapping[str, Any]) -> str:
        """The typed command with these settings, by key, in place of typed ones."""
        typed = [
            arg for arg in self.args if key_of(arg) not in ("runtime.yes", *settings)
        ]
        if "budget" not in settings:
            typed.append(f"budget={self.allowance.budget.text}")
        changed = [f"{key}={value}" for key, value in settings.items()]
        return command_line(["diagnose", *typed, *changed])

    def _lacks_answers(self) -> bool:
        """Whether the last pilot lacks answers, or missing answers leave the verdict open."""
        diagnosis = self.diagnosis
        if not diagnosis.pilots:
            return False
        cannot_tell = diagnosis.verdict == CANNOT_TELL
        are_missing_later = cannot_tell and outcomes.PROBLEM in diagnosis.reason
        return diagnosis.pilots[-1].level == "missing answers" or are_missing_later

    def _is_undecided(self) -> bool:
        """Whether more questions may decide the bias, or whether a method helps."""
        diagnosis = self.diagnosis
        if diagnosis.verdict == CANNOT_TELL:
            return True
        was_raced = any(remedy.gain for remedy in diagnosis.remedies)
        return diagnosis.verdict == BIAS and was_raced

    def _command_with_more_questions(self) -> str:
        """Return the command with the budget, and the limit, that the verdict or the race of methods asks for."""
        diagnosis = self.diagnosis
        needed = diagnosis.needed_questions
        task = self.runs.task
        available = self.sizes.available_questions
        is_all_asked = diagnosis.shape and available <= diagnosis.shape.questions
        if not needed and self._is_short_of_budget():
            return self._command_with({"budget": self.allowance.larger()})
        if is_all_asked:
            file = getattr(task, "path", task.name)
            others = " besides those for calibration"
            kept_back = getattr(task, "calibration_share", 0)
            return (
                f"add questions to {file}: it has {available}{others * bool(kept_back)}"
            )
        if not needed:
            return ""
        needed = min(needed, available)
        budget = {"budget": self._budget_for(needed)}
        if needed > self.sizes.shape_limit():
            return self._command_with({"task.limit": needed, **budget})
        return self._command_with(budget)

    def _is_short_of_budget(self) -> bool:
        """Whether a larger budget would ask more than this one."""
        allowance = self.allowance
        spent = allowance.spent
        if allowance.is_time:
            spent = sum(self.runs.seconds_of_run.values())
            sizes = self.sizes
            is_raced = self.runs.has_checkpoint and not self.runs.task.files()
            # The race of methods asks more prompts in more time.
            if is_raced and sizes.race_prompts(LARGER_FACTOR) > sizes.race_prompts():
                return True
        return spent > HALF_SPENT * allowance.budget.size

    def _budget_for(self, questions: int) -> str:
        """Return a budget, at least this one, in which ``questions`` at each position decide the shape."""
        assert self.diagnosis.shape is not None, "it was forecast from it"
        allowance = self.allowance
        if allowance.is_time:
            seconds = self.runs.seconds_of_run["shape"]
            per_question = seconds / max(self.diagnosis.shape.questions, 1)
        else:
            per_question = (
                len(self.runs.task.gold_positions) * self.sizes.cost_of_prompt()
            )
        others = allowance.spent - per_question * self.diagnosis.shape.questions
        size = (max(others, 0) + per_question * questions) * BUDGET_MARGIN / LAST_SHARE
        return allowance.larger(max(size / allowance.budget.size, 1))


def _need_moving_gold_item(task: Task) -> None:
    """Refuse a task, or prompts of one, that put no gold item at several positions.

    Raises:
        UserError: The task has none; names the content of a file of the user's own.
    """
    if task.gold_positions and task.evaluation()[0].gold_position is not None:
        return
    value = task.name
    if isinstance(task, OwnData):
        value += f", {task.path} with {task.own.kind.kind}"
    allowed = "a task that moves a gold item over positions"
    hint = "set task=kv_retrieval or task=nq_multidoc, or give items or documents with gold (docs/own_data.md)"
    raise UserError("task", value, allowed, hint)


def _refuse_own_keys(overrides: Sequence[str]) -> None:
    """Refuse settings that a diagnosis chooses itself."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key in OWN_KEYS:
            allowed = "left out: a diagnosis chooses it"
            raise UserError(key, value, allowed, f"leave {key} out")


def _ends_and_middle(positions: Sequence[int]) -> list[int]:
    """First, middle and last of some positions."""
    ordered = sorted(positions)
    return [ordered[0], ordered[len(ordered) // 2], ordered[-1]]
