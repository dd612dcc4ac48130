"""The remedies of a diagnosis: the methods raced on calibration prompts, and held-back questions for the winner."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from posbench import paths
from posbench.diagnose.outcome import Remedy, none_of
from posbench.diagnose.race import (
    FIRST_ROUND,
    QUESTION_FIRST,
    RACE_FILE,
    applicable_methods,
    hopeful_methods,
    lead_over,
    race,
    winner_of,
)
from posbench.diagnose.runs import Runs
from posbench.diagnose.sizes import (
    END_SHARES,
    LAST_SHARE,
    RACE_PROMPTS,
    ROUND_QUESTIONS,
    Sizes,
)
from posbench.errors import UserError
from posbench.files.atomic import short_hash
from posbench.files.parse import CORRECT_FILE, read_yaml
from posbench.methods.base import Method
from posbench.methods.choice import MethodChoice, all_choices
from posbench.model.lm import LM
from posbench.pipeline.arguments import read_flags
from posbench.pipeline.identity import identity, run_contents
from posbench.report.folder import read_csv
from posbench.run.folder import FOUND_FILE, RunDir
from posbench.run.lease import owning
from posbench.run.progress import duration, progress
from posbench.run.rows import ResumableRows
from posbench.schema import override_text, required_fields
from posbench.stats.verdict import (
    CANNOT_TELL,
    FIXED,
    NOT_FIXED,
    Verdict,
    run_verdict,
)
from posbench.tasks import Example
from posbench.tasks.items import GoldPositionTask

HELD_BACK = 75
"""Held-back questions at each position, where data and time allow; from 73 on, all right surely means over 95 %."""
MIN_HELD_BACK = 30
"""Held-back questions at each position of a smaller file."""
MIN_SEARCH_SECONDS = 60.0
"""Least time left for which a search of a method's constants starts."""
SEARCHES: Mapping[str, tuple[str, int, Sequence[str]]] = {
    "rope_base": ("bases", 160, ()),
    "scale_channel": ("channel", 300, ("search.strings=100",)),
}
"""By method that may lack its constants: its search, the cost of that in prompts (about; measured on SmolLM2-135M), and
its settings. The cheap one comes first."""


class RaceSplit(NamedTuple):
    """The questions of a race of methods.

    Attributes:
        examples: The calibration prompts that the methods are raced on.
        num_held_back: Questions at each gold position outside ``examples``.
    """

    examples: list[Example]
    num_held_back: int


class Searched(NamedTuple):
    """A method with the constants that a search found.

    Attributes:
        choice: The method; None where there is nothing to race.
        note: Why not.
    """

    choice: MethodChoice | None
    note: str = ""


class Pair(NamedTuple):
    """A change of the prompt and a method of the model together.

    Attributes:
        choice: The two.
        remedy: What is known of them.
        leads: Whether they are surely better than either alone, and than the unmodified model.
    """

    choice: MethodChoice
    remedy: Remedy
    leads: bool


class Remedies:
    """Races the methods, and asks held-back questions under the winner.

    Args:
        runs: The runs of the diagnosis.
        sizes: How much each part may ask.
        folder: Where the rows of the race go.
    """

    def __init__(self, runs: Runs, sizes: Sizes, folder: Path) -> None:
        self.runs = runs
        self.allowance = runs.allowance
        self.diagnosis = runs.diagnosis
        self.sizes = sizes
        self.folder = folder

    def check(self) -> None:
        """Refuse a method of the user or of a plug-in that cannot be imported, before anything is asked."""
        if "method" not in self.runs.typed_keys:
            all_choices(self._folders(), {})

    def run(self) -> None:
        """Race the methods on calibration prompts, and ask held-back questions of the winner."""
        diagnosis = self.diagnosis
        lm = self.runs.lm
        try:
            split = self._split_for_race()
        except UserError as error:
            diagnosis.remedies_note = f"{error.field}: {error.allowed}"
            return
        choices, without_constants = self._choices(split.num_held_back)
        methods, left_out = applicable_methods(
            lm,
            choices,
            split.examples,
            typed="method" in self.runs.typed_keys,
            changes_raced=bool(diagnosis.prompt_changes),
        )
        left_out += without_constants
        if not methods:
            diagnosis.remedies = left_out
            diagnosis.remedies_note = "no method runs on this model"
            return
        allowance = self.allowance
        if allowance.left(END_SHARES["remedies"]) <= 0:
            diagnosis.remedies = left_out
            diagnosis.remedies_note = "nothing is left of the budget"
            return
        remedies = self._race(methods, split.examples)
        diagnosis.winner = winner_of(remedies)
        pair = self._with_question_first(choices, methods, remedies, split.examples)
        if pair:
            remedies = [pair.remedy, *remedies]
        diagnosis.remedies = [*remedies, *left_out]
        if pair and pair.leads:
            diagnosis.winner = pair.remedy.name
            choices[diagnosis.winner] = pair.choice
        if diagnosis.winner:
            winner = choices[diagnosis.winner]
            diagnosis.winner_changes = winner.changed_part
            self._hold_back(winner, split.num_held_back)
            return
        gap = diagnosis.source.gap if diagnosis.source else None
        hopeful = hopeful_methods(remedies, gap)
        note = f"{none_of(len(remedies))} makes the right answer likelier for sure"
        num_prompts = max(remedy.gain.n for remedy in remedies if remedy.gain)
        if hopeful or num_prompts < FIRST_ROUND:
            of_which = ", ".join(hopeful or methods)
            note += f"; of {of_which} it cannot be told from so few prompts"
        else:
            diagnosis.verdict = NOT_FIXED
            if gap and gap.ci_low > 0:
                note += ", and none closes a third of the gap between the best and the worst gold position"
        diagnosis.remedies_note = note

    def _with_question_first(
        self,
        choices: Mapping[str, MethodChoice],
        methods: Mapping[str, Method],
        remedies: Sequence[Remedy],
        examples: Sequence[Example],
    ) -> Pair | None:
        """Race the best method of the model with the question before the prompt as well, which costs few tokens.

        On both real models of docs/remedies.md a smaller RoPE base gains more with it.

        Args:
            choices: The methods by name.
            methods: Those that were raced.
            remedies: What is known of them, the best first.
            examples: The prompts of the race.

        Returns:
            The two; None where there is no such method, no time, or no question.
        """
        hopeful = hopeful_methods(remedies, None)
        best = winner_of(remedies) or (hopeful[0] if hopeful else "")
        if self.runs.is_method_typed or not best:
            return None
        if self.allowance.left(END_SHARES["remedies"]) <= 0:
            return None
        parts = {name: choices[name] for name in (QUESTION_FIRST, best)}
        name = "-".join(parts)
        pair = MethodChoice.listed(parts, name)
        # The question alone is a control: it could be all that helps.
        contestants = {
            QUESTION_FIRST: choices[QUESTION_FIRST].build(),
            best: methods[best],
            name: pair.build(),
        }
        try:
            raced = self._race(contestants, examples)
        except UserError:
            return None  # the prompts have no question that could come first
        rows = self._race_folder().rows_without_error(RACE_FILE)
        leads = [lead_over(name, part, rows, examples) for part in parts]
        (remedy,) = (remedy for remedy in raced if remedy.name == name)
        is_ahead = all(lead.n >= FIRST_ROUND and lead.ci_low > 0 for lead in leads)
        return Pair(pair, remedy, leads=is_ahead and bool(winner_of([remedy])))

    def _race(
        self, methods: Mapping[str, Method], examples: Sequence[Example]
    ) -> list[Remedy]:
        """Race methods on calibration prompts by the likelihood of the right answer.

        A killed race resumes from the rows in the diagnosis' folder.

        Args:
            methods: Methods by name.
            examples: The prompts, in the order in which they are asked.

        Returns:
            What is known of each method.
        """
        lm = self.runs.lm
        allowance = self.allowance

        @contextmanager
        def show_progress(
            label: str, total: int, done: int
        ) -> Iterator[Callable[[int], None]]:
            with progress(
                self.runs.console,
                self.runs.config.runtime.log_every,
                label,
                total,
                done,
                tokens=lambda: lm.tokens_read,
            ) as advance:

                def count(prompts: int) -> None:
                    self.runs.count_prompts("remedies", prompts)
                    allowance.add(prompts, 0, 0)
                    advance(prompts)

                yield count

        self.folder.mkdir(parents=True, exist_ok=True)
        with owning(self.folder), self.runs.counted("remedies", lm):
            return race(
                lm,
                self.runs.task,
                methods,
                examples,
                ResumableRows(self._race_folder(), show_progress),
                is_over=lambda: allowance.left(END_SHARES["remedies"]) <= 0,
            )

    def _race_folder(self) -> RunDir:
        """The folder with the rows of the race, which belong to these weights."""
        config = self.runs.prepare(["task.limit=1"], in_process=True)
        model = identity(config, run_contents(config))
        return RunDir(self.folder, short_hash(model))

    def _split_for_race(self) -> RaceSplit:
        """Return the questions of the race, and the number of others left for the winner.

        Calibration prompts are shuffled: some tasks let the gold item move through the prompt from one to the next, and
        the first few decide which methods drop out.

        Raises:
            UserError: The task has too few calibration questions.
        """
        assert self.diagnosis.shape is not None, "without a bias there is no race"
        of_shape = self.diagnosis.shape.questions
        most_prompts = self.sizes.race_prompts()
        fewest_prompts = min(most_prompts, RACE_PROMPTS)
        split = None
        # A file may hold too few questions for both.
        for held_back, num_prompts in (
            (max(of_shape, HELD_BACK), most_prompts),
            (max(of_shape, MIN_HELD_BACK), most_prompts),
            (max(of_shape, MIN_HELD_BACK), fewest_prompts),
        ):
            with suppress(UserError):
                split = self._split(num_prompts, self.sizes.typed_limit(held_back))
                break
        limit = self.sizes.typed_limit(MIN_HELD_BACK)
        split = split or self._split(fewest_prompts, limit)
        random.Random(0).shuffle(split.examples)
        return split

    def _split(self, num_prompts: int, num_held_back: int) -> RaceSplit:
        """Calibration prompts of the task, and the number of questions held back."""
        if not isinstance(self.runs.task, GoldPositionTask):
            allowed = (
                f"{self.runs.task.name} has no calibration questions to race methods on"
            )
            hint = "ask for remedies on task=kv_retrieval"
            raise UserError("task", self.runs.task.name, allowed, hint)
        task = replace(
            self.runs.task, limit=num_held_back, calibration_examples=num_prompts
        )
        return RaceSplit(task.examples("calibration"), num_held_back)

    def _choices(
        self, num_held_back: int
    ) -> tuple[dict[str, MethodChoice], list[Remedy]]:
        """Return the methods to race: the typed one, or all, with the results of searches where time is left for them.

        Args:
            num_held_back: Questions that are held back from the search.

        Returns:
            The methods by name, and those that a search gave no constants, each with the reason.
        """
        part_overrides = ["task.limit=1"]
        if "method" in self.runs.typed_keys:
            choice = self.runs.prepare(
                part_overrides, method="", in_process=True
            ).choice
            return {choice.name: choice}, []
        config = self.runs.prepare(part_overrides, in_process=True)
        choices = all_choices(self._folders(), config.model.blocks)
        choices = {name: _without_training(c) for name, c in choices.items()}
        left_out = []
        for name in SEARCHES:
            choice = choices[name]
            needed = required_fields(choice.cls)
            if all(choice.values.get(key) is not None for key in needed):
                continue
            if not _fits(choice, self.runs.lm):
                continue
            found = self._search(choice, num_held_back)
            if found.choice:
                choices[name] = found.choice
            else:
                del choices[name]
                left_out.append(Remedy(name, note=found.note))
        return choices, left_out

    def _folders(self) -> list[Path]:
        """The config folders of the diagnosis."""
        return paths.config_folders(read_flags(self.runs.args).config_dir)

    def _search(self, choice: MethodChoice, num_held_back: int) -> Searched:
        """Search for constants of a method, where the budget is a time that leaves room for it.

        Args:
            choice: The method, of :data:`SEARCHES`, without its constants.
            num_held_back: Questions to evaluate, which the search must leave alone.
        """
        name = choice.name
        search, prompts, settings = SEARCHES[name]
        if not self.allowance.is_time:
            note = f"no constants for this model are known: posbench method={name} search={search}"
            return Searched(None, note)
        left = self.allowance.left(END_SHARES["remedies"])
        needed = max(prompts * self.sizes.measured_cost_of_prompt(), MIN_SEARCH_SECONDS)
        if left < needed:
            note = f"its search takes about {duration(needed)}, and {duration(max(left, 0))} are left for it"
            return Searched(None, note)
        part_overrides = [
            f"method={name}",
            f"search={search}",
            *settings,
            f"task.limit={num_held_back}",
            "task.calibration_examples=16",
        ]
        options: Mapping[str, Any] = {
            "method": "",
            "stages": "search",
            "in_process": True,
        }
        try:
            config = self.runs.prepare(part_overrides, **options)
            folder = self.runs.execute(f"search of {name}", part_overrides, **options)
        except UserError as error:
            return Searched(None, f"{error.field}: {error.allowed}")
        found: dict[str, dict[str, Any]] = read_yaml(
            folder / FOUND_FILE, dict[str, dict[str, Any]], hint=CORRECT_FILE
        )
        block = found[name]
        values = choice.values | config.search.parameters(block)
        with_constants = replace(choice, values=values)
        if config.search.keeps_unmodified(block, with_constants.build()):
            # It could win the race by rounding.
            note = "its search found no lower loss than the unmodified model's"
            return Searched(None, note)
        return Searched(with_constants)

    def _hold_back(self, choice: MethodChoice, num_questions: int) -> None:
        """Ask the winner and the unmodified model held-back questions, if anything is left of the budget.

        Args:
            choice: The winner.
            num_questions: Questions to ask at each position, at most.
        """
        diagnosis = self.diagnosis
        prompts_per_question = 2 * len(self.runs.task.gold_positions)
        limit = self.sizes.affordable(
            "held-back", num_questions, prompts_per_question, in_process=True
        )
        if not limit:
            diagnosis.held_back = "not asked: nothing is left of the budget"
            return
        part_overrides = [
            f"task.limit={limit}",
            f"runtime.round_questions={ROUND_QUESTIONS}",
            *self._spell_method(choice),
        ]
        task = self.runs.task
        assert isinstance(task, GoldPositionTask), "others have no race"
        # Another seed draws other questions than those of the shape.
        if task.path is None and "task.seed" not in self.runs.typed_keys:
            part_overrides.append(f"task.seed={task.seed + 1}")
        options: Mapping[str, Any] = {"method": "", "in_process": True}
        try:
            asked = self.runs.prepare(part_overrides, **options).task
        except UserError as error:
            diagnosis.held_back = f"not asked: {error.field}: {error.allowed}"
            return
        if asked.items != task.items:
            diagnosis.held_back = f"not asked: prompts of {task.items} items do not fit the window under it"
            return
        folder = self.runs.execute("held-back", part_overrides, LAST_SHARE, **options)
        self.runs.write_page(folder)
        verdict = run_verdict(read_csv(folder / "metrics.csv"))
        verdict = verdict or Verdict(CANNOT_TELL, "nothing was scored")
        diagnosis.held_back = str(verdict)
        # Any other verdict leaves the bias as found.
        if verdict.name in (FIXED, NOT_FIXED):
            diagnosis.verdict, diagnosis.reason = verdict

    def _spell_method(self, choice: MethodChoice) -> list[str]:
        """Return a method, or a list of methods, and its constants as overrides."""
        names = f"[{','.join(choice.parts)}]" if choice.parts else choice.name
        nodes = {"method": choice}
        if choice.parts:
            nodes = {f"method.parts.{name}": p for name, p in choice.parts.items()}
        constants = [
            f"{node}.{key}={override_text(value)}"
            for node, part in nodes.items()
            for key, value in part.values.items()
            if value is not None
        ]
        return [f"method={names}", *constants]


def _without_training(choice: MethodChoice) -> MethodChoice:
    """Return a method with the parameters that need no training, where it has none of its own for the model."""
    known = {k: v for k, v in choice.values.items() if v is not None}
    return replace(choice, values={**choice.values, **choice.cls.untrained, **known})


def _fits(choice: MethodChoice, lm: LM) -> bool:
    """Whether a method runs on a model, whatever its constants."""
    try:
        choice.cls.example(lm).check(lm)
    except UserError:
        return False
    return True
