"""Multiple-choice exams in many subjects (MMLU, C-Eval): what their prompts, files and scores have in
common."""

import zipfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from posbench.errors import near
from posbench.files.sources import Source, local
from posbench.tasks.base import Example, Split, Task
from posbench.tasks.reading import Row, new, refuse, refuse_line, rows, take

LETTERS = ("A", "B", "C", "D")


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question: its number in the file, text, four options and the right letter (empty where it is not
    published)."""

    id: str
    text: str
    options: tuple[str, ...]
    answer: str


@dataclass(frozen=True, kw_only=True)
class Exam(Task):
    """Questions with four options, after demonstrations from the subject's dev file.

    Args:
        path: Folder or .zip with the benchmark's own CSV files (``dev/<subject>_dev.csv`` and so on, also
            under ``data/``); None: the hub's parquet files.
        revision: Commit of the hub's data set; None: its default branch.
        subjects: ``all``, or some by name.
        shots: Demonstrations, the first ones of the dev file.
        answer: ``loglikelihood``: the most likely of the four letters as continuation of the prompt.
            ``generate``: the letter read from a greedy reply. The two give different numbers: compare only
            like with like.
        prompt: ``official`` or ``lm_eval``; the benchmark's class says where they differ.
        chat_format: Put the prompt into the model's chat template; the letters then start the reply, without
            a blank.
        mean: Average over ``questions`` (micro) or over ``subjects`` (macro), for the total and for the
            categories.

    Score: 1 for the right letter.
    """

    metric: ClassVar[str] = "accuracy"
    categories: ClassVar[Mapping[str, str]]
    """Subject to category; the order is that of the examples."""
    hub: ClassVar[str]
    """Data set of the hub with ``<subject>/<part>-00000-of-00001.parquet``."""
    columns: ClassVar[tuple[str, ...]] = ()
    """Columns of the CSV files, where these have no header line."""
    parts: ClassVar[Mapping[str, int]]
    """Parts that can be evaluated, and how many questions each holds; the first one is, unless a class says
    otherwise."""
    cue: ClassVar[str]
    """Last line of a question, which the letter follows."""
    stop: ClassVar[tuple[str, ...]] = ()
    """Texts that end a generated reply."""

    path: str | None = None
    revision: str | None = None
    subjects: Literal["all"] | tuple[str, ...] = "all"
    shots: int = 5
    answer: Literal["loglikelihood", "generate"] = "loglikelihood"
    prompt: Literal["official", "lm_eval"] = "official"
    chat_format: bool = False
    mean: Literal["questions", "subjects"] = "questions"

    def __post_init__(self) -> None:
        if not 0 <= self.shots <= 5:
            refuse(
                "shots",
                self.shots,
                "a whole number from 0 to 5, the questions of a dev file",
                "set task.shots=5",
            )
        if self.max_new_tokens < 1:
            refuse(
                "max_new_tokens", self.max_new_tokens, "a whole number from 1 up", "set task.max_new_tokens=5"
            )
        known = list(self.categories)
        for subject in self.chosen:
            if subject not in known:
                hint = near(subject, known, f"take one of: {', '.join(known)}")
                refuse("subjects", subject, f"all, or some of the {len(known)} subjects", hint)
        if not self.chosen or len(set(self.chosen)) != len(self.chosen):
            refuse(
                "subjects", list(self.chosen), "all, or a list of different subjects", "set task.subjects=all"
            )

    @property
    def chosen(self) -> tuple[str, ...]:
        """The subjects that are asked."""
        return tuple(self.categories) if self.subjects == "all" else self.subjects

    # A class variable of other tasks is a choice here.
    @property
    def average(self) -> Literal["examples", "subsets"]:  # type: ignore[override]
        """See :class:`Task`."""
        return "examples" if self.mean == "questions" else "subsets"

    @property
    def chance(self) -> float:
        """One of four."""
        return 1 / len(LETTERS)

    @property
    def part(self) -> str:
        """The part that is evaluated."""
        return next(iter(self.parts))

    @property
    @abstractmethod
    def gap(self) -> str:
        """What stands between the cue and the letter."""

    @abstractmethod
    def header(self, subject: str) -> str:
        """First line of a prompt."""

    @abstractmethod
    def letter(self, text: str) -> str:
        """The letter that a reply gives; anything else where it gives none."""

    def unpacked(self, shown: str, line: int, row: dict[str, Any]) -> dict[str, Any]:
        """A row of the hub's files in the columns of the CSV files: question, A, B, C, D, answer."""
        return row

    def labelled(self, part: str) -> bool:
        """Whether every question of a part must have an answer."""
        return True

    def files(self) -> tuple[Source, ...]:
        """The user's folder or file, or the hub's files of the subjects that are asked."""
        if self.path:
            return (Source(kind="path", id=self.path, field="task.path", files=("**/*.csv",)),)
        names = tuple(
            f"{subject}/{part}-00000-of-00001.parquet"
            for subject in self.chosen
            for part in ("dev", self.part)
        )
        return (Source(kind="dataset", id=self.hub, field="task.path", files=names, revision=self.revision),)

    def examples(self, split: Split) -> list[Example]:
        """See :meth:`Task.examples`. There are no calibration questions."""
        if split == "calibration":
            raise self.refuse_split()
        if self.path and not Path(self.path).expanduser().exists():
            hint = f"get it from {self.source}, or set task.path=null for the hub's files"
            refuse("path", self.path, "a folder or .zip with the benchmark's CSV files", hint)
        folder = local(self.files()[0])
        out = [example for subject in self.chosen for example in self._of(folder, subject)]
        whole = self.parts[self.part]
        if not self.path and self.subjects == "all" and len(out) != whole:
            refuse(
                "path",
                f"{len(out)} questions of {self.hub}",
                f"{whole}, as in the benchmark",
                "posbench fetch, once more",
            )
        return out

    def averages(self) -> Mapping[str, tuple[str, ...]]:
        """The categories, as far as their subjects are asked."""
        named: dict[str, tuple[str, ...]] = {}
        for subject in self.chosen:
            named[self.categories[subject]] = (*named.get(self.categories[subject], ()), subject)
        return named

    def score(self, example: Example, text: str) -> dict[str, float]:
        """1 if the reply gives the right letter; nothing where the right one is not published."""
        return {"accuracy": float(self.letter(text) in example.answers)} if example.answers else {}

    def _of(self, folder: Path, subject: str) -> Iterator[Example]:
        shown = self._read(folder, subject, "dev")[: self.shots] if self.shots else []
        if len(shown) < self.shots:
            refuse(
                "shots",
                self.shots,
                f"at most {len(shown)}, the dev questions of {subject}",
                f"set task.shots={len(shown)}",
            )
        solved = [f"{self._ask(question)}{self.gap}{question.answer}" for question in shown]
        choices = tuple(letter if self.chat_format else self.gap + letter for letter in LETTERS)
        generate = self.answer == "generate"
        for question in self._read(folder, subject, self.part):
            yield Example(
                id=f"{subject}-{question.id}",
                prompt="\n\n".join([self.header(subject), *solved, self._ask(question)]),
                answers=(question.answer,) if question.answer else (),
                subset=subject,
                choices=() if generate else choices,
                chat=self.chat_format,
                stop=self.stop if generate else (),
            )

    def _ask(self, question: Question) -> str:
        text = question.text.strip() if self.prompt == "lm_eval" else question.text
        return "\n".join(
            [text, *(f"{a}. {b}" for a, b in zip(LETTERS, question.options, strict=True)), self.cue]
        )

    def _read(self, folder: Path, subject: str, part: str) -> list[Question]:
        if self.path:
            shown, lines = self._csv(folder, f"{part}/{subject}_{part}.csv")
        else:
            file = folder / subject / f"{part}-00000-of-00001.parquet"
            shown, lines = str(file), rows("path", file, count=5 if part == "dev" else None)
        out, seen = [], set[str]()
        for number, (line, row) in enumerate(lines):
            flat = row if self.path else self.unpacked(shown, line, row)
            name = str(take("path", shown, line, flat, "id", (str, int))) if "id" in flat else str(number)
            out.append(
                _question(shown, line, flat, new("path", shown, line, "id", name, seen), self.labelled(part))
            )
        if not out:
            refuse("path", shown, "at least one question", f"get it again from {self.source}")
        return out

    def _csv(self, folder: Path, name: str) -> tuple[str, Iterator[Row]]:
        """What to call a CSV of a folder or .zip in a complaint, and its rows."""
        for inner in (name, f"data/{name}"):
            if folder.suffix == ".zip":
                if inner in _held(folder):
                    return f"{folder}:{inner}", rows("path", folder, member=inner, names=self.columns)
            elif (folder / inner).is_file():
                return str(folder / inner), rows("path", folder / inner, names=self.columns)
        hint = f"get it from {self.source}, or leave that subject out: task.subjects=[...]"
        refuse("path", str(folder), f"a folder or .zip with {name}", hint)


def _question(shown: str, line: int, row: Mapping[str, Any], id: str, labelled: bool) -> Question:
    """A row as a question. A wrong option may be blank, which does not make the question unanswerable; the
    right one not."""
    text = take("path", shown, line, row, "question")
    for letter in LETTERS:
        if not isinstance(row.get(letter), str):
            refuse_line("path", shown, line, f'a field "{letter}" with the text of that option')
    answer = str(row.get("answer") or "").strip()
    if (labelled or answer) and answer not in LETTERS:
        refuse_line("path", shown, line, f'a field "answer" with a letter from A to D (not "{answer}")')
    if answer:
        take("path", shown, line, row, answer)
    return Question(id=id, text=text, options=tuple(row[letter] for letter in LETTERS), answer=answer)


def _held(file: Path) -> set[str]:
    try:
        with zipfile.ZipFile(file) as archive:
            return set(archive.namelist())
    except (OSError, zipfile.BadZipFile) as error:
        refuse("path", str(file), "a readable .zip file", f"get it again ({error})")
