"""Multiple-choice exams in many subjects (MMLU, C-Eval): their common prompts, files and scores."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

from annotated_types import Le

from posbench.files.sources import Source
from posbench.schema import Whole
from posbench.tasks.base import EvaluationOnly, Example
from posbench.tasks.reading import (
    Line,
    check_subsets,
    find_file,
    read_data_rows,
    refuse,
)

LETTERS = ("A", "B", "C", "D")
PARQUET = "{}/{}-00000-of-00001.parquet"


class Question(NamedTuple):
    """A question of a file.

    Attributes:
        id: Its number in the file, or the id that it has there.
        text: The question with its options.
        answer: The right letter; empty where it is not published.
    """

    id: str
    text: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Exam(EvaluationOnly):
    """Questions with four options, after demonstrations from the subject's dev file.

    Attributes:
        path: Folder or .zip with the benchmark's own CSV files (``dev/<subject>_dev.csv`` and so on, also
            under ``data/``); None: the hub's parquet files.
        revision: Commit of the hub's data set; None: its default branch.
        subsets: Subjects: ``all``, or some by name.
        shots: Demonstrations, the first ones of the dev file.
        answer: ``loglikelihood``: the most likely of the four letters as continuation of the prompt.
            ``generate``: the letter read from a greedy reply. Compare only like with like.
        prompt: ``official`` or ``lm_eval``; the benchmark's class says where they differ.
        chat_format: Put the prompt into the model's chat template; the letters then come without a blank.
        mean: Average over ``questions`` (micro) or ``subjects`` (macro), in the total and in categories.
    """

    metric: ClassVar[str] = "accuracy"
    chance: ClassVar[float | None] = 1 / len(LETTERS)
    # by subject, in the order of the examples
    categories: ClassVar[Mapping[str, str]]
    # data set of the hub with parquet files
    hub: ClassVar[str]
    # columns of the CSV files, where these have no header line
    columns: ClassVar[tuple[str, ...]] = ()
    # the parts that can be evaluated, and how many questions each holds
    parts: ClassVar[Mapping[str, int]]
    # the part that is evaluated
    split: ClassVar[str] = "test"
    # the part whose questions need no answer
    unlabelled: ClassVar[str] = ""
    # last line of a question, which the letter follows
    cue: ClassVar[str]
    # text between the two
    gap: ClassVar[str] = " "
    # texts that end a generated reply
    stop: ClassVar[tuple[str, ...]] = ()

    holds: ClassVar[tuple[str, ...]] = ("*/*.csv", "data/*/*.csv", "*/*.parquet")

    revision: str | None = None
    subsets: Literal["all"] | tuple[str, ...] = "all"
    shots: Annotated[Whole, Le(5)] = 5
    answer: Literal["loglikelihood", "generate"] = "loglikelihood"
    prompt: Literal["official", "lm_eval"] = "official"
    chat_format: bool = False
    mean: Literal["questions", "subjects"] = "questions"

    def __post_init__(self) -> None:
        check_subsets(self.chosen, list(self.categories))

    @property
    def chosen(self) -> tuple[str, ...]:
        """The subjects that are asked."""
        return tuple(self.categories) if self.subsets == "all" else self.subsets

    @property
    def average(self) -> Literal["examples", "subsets"]:  # type: ignore[override]
        """See :class:`Task`."""
        return "examples" if self.mean == "questions" else "subsets"

    @abstractmethod
    def header(self, subject: str) -> str:
        """First line of a prompt."""

    @abstractmethod
    def letter(self, text: str) -> str:
        """Return the letter that a reply gives; anything else if it gives none."""

    def official(self) -> tuple[Source, ...]:
        """The hub's files of the chosen subjects: the split that is asked, and demonstrations."""
        names = tuple(
            PARQUET.format(subject, part)
            for subject in self.chosen
            for part in ("dev", self.split)
        )
        source = Source(
            kind="dataset",
            id=self.hub,
            field="task.path",
            files=names,
            revision=self.revision,
        )
        return (source,)

    def questions(self) -> list[Example]:
        """Return the questions of the chosen subjects as examples.

        Raises:
            UserError: Files are missing, wrong or incomplete.
        """
        folder = self.place()
        examples: list[Example] = []
        for subject in self.chosen:
            examples += self._subject(folder, subject)
        expected = self.parts[self.split]
        is_complete = self.path or self.subsets != "all" or len(examples) == expected
        if not is_complete:
            content = f"{len(examples)} questions of {self.hub}"
            refuse("path", content, f"all {expected}", "posbench fetch, once more")
        return examples

    def averages(self) -> Mapping[str, tuple[str, ...]]:
        """The categories, as far as their subjects are asked."""
        subjects_of: dict[str, tuple[str, ...]] = {}
        for subject in self.chosen:
            category = self.categories[subject]
            subjects_of[category] = (*subjects_of.get(category, ()), subject)
        return subjects_of

    def score(self, example: Example, text: str) -> dict[str, float]:
        """1 if the reply gives the right letter; nothing where the right one is not published."""
        if not example.answers:
            return {}
        return {"accuracy": float(self.letter(text) in example.answers)}

    def has_answer(self, example: Example, text: str) -> bool:
        """Whether a letter can be read."""
        return bool(self.letter(text))

    def extracted(self, example: Example, text: str) -> str:
        """The letter."""
        return self.letter(text)

    def _subject(self, folder: Path, subject: str) -> Iterator[Example]:
        """Yield the questions of a subject as examples, each behind solved demonstrations."""
        demonstrations: list[Question] = []
        if self.shots:
            demonstrations = self._read(folder, subject, "dev")[: self.shots]
        available = len(demonstrations)
        if available < self.shots:
            allowed = f"at most {available}, all of {subject}"
            refuse("shots", self.shots, allowed, f"set task.shots={available}")
        solved = [
            f"{question.text}{self.gap}{question.answer}" for question in demonstrations
        ]
        choices: tuple[str, ...] = ()
        stop = self.stop
        if self.answer == "loglikelihood":
            gap = "" if self.chat_format else self.gap
            choices = tuple(f"{gap}{letter}" for letter in LETTERS)
            stop = ()
        for question in self._read(folder, subject, self.split):
            yield Example(
                id=f"{subject}-{question.id}",
                prompt="\n\n".join([self.header(subject), *solved, question.text]),
                answers=(question.answer,) if question.answer else (),
                subset=subject,
                choices=choices,
                chat=self.chat_format,
                stop=stop,
            )

    def _read(self, folder: Path, subject: str, part: str) -> list[Question]:
        """Return the questions of one part (``dev``, ``test``, ...) of a subject, from a CSV or Parquet file."""
        csv_name = f"{part}/{subject}_{part}.csv"
        names = (csv_name, f"data/{csv_name}", PARQUET.format(subject, part))
        hint = (
            f"get it from {self.source}, or leave that subject out: task.subsets=[...]"
        )
        file, member = find_file(folder, names, hint)
        # The hub's dev files have five demonstrations each.
        count = 5 if part == "dev" and not self.path else 0
        lines = read_data_rows(
            "path", file, member, names=self.columns, unique="id", count=count
        )
        return [
            self._question(line, number, part) for number, (_, line) in enumerate(lines)
        ]

    def _question(self, line: Line, number: int, part: str) -> Question:
        """Return a line of a file as a question.

        Args:
            line: Its fields: question, options A to D, answer. A wrong option may be blank, the right one not.
            number: Its index, the id where the line has none.
            part: The part of the benchmark; one without published answers may lack the answer.
        """
        name = str(line.take("id", (str, int))) if "id" in line else str(number)
        question: str = line.take("question")
        if self.prompt == "lm_eval":
            question = question.strip()
        text = [question]
        for letter in LETTERS:
            if not isinstance(line.get(letter), str):
                line.refuse(f'a field "{letter}" with the text of that option')
            text.append(f"{letter}. {line[letter]}")
        text.append(self.cue)
        answer = str(line.get("answer") or "").strip()
        if (answer or part != self.unlabelled) and answer not in LETTERS:
            line.refuse(f'a field "answer" with a letter from A to D (not "{answer}")')
        if answer:
            line.take(answer)
        return Question(name, "\n".join(text), answer)
