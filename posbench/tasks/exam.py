"""Multiple-choice exams in many subjects (MMLU, C-Eval): what their prompts, files and scores share."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

from annotated_types import Le

from posbench.files.sources import Source
from posbench.schema import Whole
from posbench.tasks.base import EvaluationOnly, Example
from posbench.tasks.reading import Line, check_names, pick, refuse, rows

LETTERS = ("A", "B", "C", "D")
PARQUET = "{}/{}-00000-of-00001.parquet"


class Question(NamedTuple):
    """A question: its number in the file, text with options, right letter (empty where not published)."""

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
    renamed: ClassVar[Mapping[str, str]] = {"subjects": "subsets"}
    chance: ClassVar[float | None] = 1 / len(LETTERS)
    categories: ClassVar[
        Mapping[str, str]
    ]  # of the subjects, in the order of the examples
    hub: ClassVar[str]  # data set of the hub with parquet files
    columns: ClassVar[
        tuple[str, ...]
    ] = ()  # of the CSV files, where these have no header line
    parts: ClassVar[
        Mapping[str, int]
    ]  # that can be evaluated, and how many questions each holds
    split: ClassVar[str] = "test"  # the part that is evaluated
    unlabelled: ClassVar[str] = ""  # the part whose questions need no answer
    cue: ClassVar[str]  # last line of a question, which the letter follows
    gap: ClassVar[str] = " "  # what stands between the two
    stop: ClassVar[tuple[str, ...]] = ()  # texts that end a generated reply

    holds: ClassVar[tuple[str, ...]] = ("*/*.csv", "data/*/*.csv", "*/*.parquet")

    revision: str | None = None
    subsets: Literal["all"] | tuple[str, ...] = "all"
    shots: Annotated[Whole, Le(5)] = 5
    answer: Literal["loglikelihood", "generate"] = "loglikelihood"
    prompt: Literal["official", "lm_eval"] = "official"
    chat_format: bool = False
    mean: Literal["questions", "subjects"] = "questions"

    def __post_init__(self) -> None:
        check_names("subsets", self.chosen, list(self.categories))

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
        """The letter that a reply gives; anything else where it gives none."""

    def official(self) -> tuple[Source, ...]:
        """The hub's files of the subjects that are asked."""
        names = tuple(
            PARQUET.format(subject, part)
            for subject in self.chosen
            for part in ("dev", self.split)
        )
        return (
            Source(
                kind="dataset",
                id=self.hub,
                field="task.path",
                files=names,
                revision=self.revision,
            ),
        )

    def questions(self) -> list[Example]:
        """See :meth:`EvaluationOnly.questions`."""
        folder = self.place()
        out = [
            example for subject in self.chosen for example in self._of(folder, subject)
        ]
        whole = self.parts[self.split]
        if not self.path and self.subsets == "all" and len(out) != whole:
            refuse(
                "path",
                f"{len(out)} questions of {self.hub}",
                f"all {whole}",
                "posbench fetch, once more",
            )
        return out

    def averages(self) -> Mapping[str, tuple[str, ...]]:
        """The categories, as far as their subjects are asked."""
        kinds = dict.fromkeys(self.categories[subject] for subject in self.chosen)
        return {
            kind: tuple(s for s in self.chosen if self.categories[s] == kind)
            for kind in kinds
        }

    def score(self, example: Example, text: str) -> dict[str, float]:
        """1 if the reply gives the right letter; nothing where the right one is not published."""
        return (
            {"accuracy": float(self.letter(text) in example.answers)}
            if example.answers
            else {}
        )

    def extracted(self, example: Example, text: str) -> str:
        """The letter."""
        return self.letter(text)

    def _of(self, folder: Path, subject: str) -> Iterator[Example]:
        shown = self._read(folder, subject, "dev")[: self.shots] if self.shots else []
        if (most := len(shown)) < self.shots:
            refuse(
                "shots",
                self.shots,
                f"at most {most}, all of {subject}",
                f"set task.shots={most}",
            )
        solved = [f"{question.text}{self.gap}{question.answer}" for question in shown]
        choices = tuple(
            letter if self.chat_format else self.gap + letter for letter in LETTERS
        )
        generate = self.answer == "generate"
        for question in self._read(folder, subject, self.split):
            yield Example(
                id=f"{subject}-{question.id}",
                prompt="\n\n".join([self.header(subject), *solved, question.text]),
                answers=(question.answer,) if question.answer else (),
                subset=subject,
                choices=() if generate else choices,
                chat=self.chat_format,
                stop=self.stop if generate else (),
            )

    def _read(self, folder: Path, subject: str, part: str) -> list[Question]:
        name = f"{part}/{subject}_{part}.csv"
        hint = (
            f"get it from {self.source}, or leave that subject out: task.subsets=[...]"
        )
        file, member = pick(
            folder, (name, f"data/{name}", PARQUET.format(subject, part)), hint
        )
        count = 5 if part == "dev" and not self.path else 0
        lines = rows("path", file, member, names=self.columns, unique="id", count=count)
        found = [
            self._question(row, number, part) for number, (_, row) in enumerate(lines)
        ]
        return found

    def _question(self, row: Line, number: int, part: str) -> Question:
        """A row as a question. A wrong option may be blank, the right one not."""
        name = str(row.take("id", (str, int))) if "id" in row else str(number)
        text: str = row.take("question")
        lines = [text.strip() if self.prompt == "lm_eval" else text]
        for letter in LETTERS:
            if not isinstance(row.get(letter), str):
                row.refuse(f'a field "{letter}" with the text of that option')
            lines.append(f"{letter}. {row[letter]}")
        answer = str(row.get("answer") or "").strip()
        if (answer or part != self.unlabelled) and answer not in LETTERS:
            row.refuse(f'a field "answer" with a letter from A to D (not "{answer}")')
        if answer:
            row.take(answer)
        return Question(name, "\n".join([*lines, self.cue]), answer)
