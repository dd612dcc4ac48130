"""A retrieval log in one form, whatever wrote it, and the lines of it that could not be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple


class LoggedDocument(NamedTuple):
    """A retrieved document.

    Attributes:
        id: Its id as text; None: the log has none.
        title: Its title; empty if the log says so, None: the log has none.
        text: What the reader model was shown.
        score: The retriever's score, or distance; None: not known.
        page: Page or position in its source; None: not known.
        source: File or address that it was cut from; None: not known.
    """

    id: str | None
    title: str | None
    text: str
    score: float | None = None
    page: float | None = None
    source: str | None = None


class LoggedQuestion(NamedTuple):
    """A question with the documents that were retrieved for it.

    Attributes:
        line: Number of the line, entry or row, from 1.
        question: The question.
        answers: Reference answers, never a model's reply; None: not known.
        documents: The documents in the order of the log (of a TREC run: by score).
        gold: Indices of the documents that hold the answer; empty: the log names others, which were not retrieved;
            None: not known.
        reply: What the logged model replied; None: not known.
        id: Id of the question; None: the log has none.
        gold_is_named: Whether the log names the gold documents. If not, they are those in which an answer stands.
    """

    line: int
    question: str
    answers: tuple[str, ...] | None
    documents: tuple[LoggedDocument, ...]
    gold: tuple[int, ...] | None = None
    reply: str | None = None
    id: str | None = None
    gold_is_named: bool = False

    @property
    def scores(self) -> list[float] | None:
        """The scores of the documents; None unless all have one."""
        scores = [d.score for d in self.documents if d.score is not None]
        return scores if len(scores) == len(self.documents) else None


@dataclass(frozen=True)
class Problem:
    """Lines that were skipped for one reason.

    Attributes:
        reason: What is wrong with them.
        count: Their number.
        line: The first of them, from 1.
        right: What would be right instead; empty: nothing to correct.
    """

    reason: str
    count: int
    line: int
    right: str


@dataclass(frozen=True, kw_only=True)
class Log:
    """The content of a retrieval log.

    Attributes:
        shape: Name of the shape, such as ``LangChain retrieval chain``.
        unit: What the log consists of: ``line``, ``entry`` (of an array), ``row``, ``span`` or ``query``.
        num_read: Number of these.
        questions: The questions, in the order of the log.
        problems: What was skipped.
        remarks: What a user must know of how the log was read, a line each.
        are_distances: Whether small scores are good.
    """

    shape: str
    unit: str
    num_read: int
    questions: tuple[LoggedQuestion, ...]
    problems: tuple[Problem, ...] = ()
    remarks: tuple[str, ...] = ()
    are_distances: bool = False

    @property
    def names(self) -> list[str]:
        """Unique names of the questions: their ids, or the numbers of their lines if ids are missing or repeated."""
        ids = [question.id for question in self.questions]
        if all(ids) and len(set(ids)) == len(ids):
            return [str(name) for name in ids]
        return [str(question.line) for question in self.questions]

    @property
    def units(self) -> str:
        """The plural of ``unit``."""
        return plural(self.unit)

    def notes(self) -> list[str]:
        """What was skipped, and how the log was read: a line for each kind."""
        lines = []
        for problem in self.problems:
            line = f"{problem.count} of {self.num_read} {self.units} skipped ({problem.reason}), "
            line += f"the first is {self.unit} {problem.line}"
            if problem.right:
                line += f"; right: {problem.right}"
            lines.append(line)
        return [*lines, *self.remarks]


class Entry(NamedTuple):
    """A line, entry, row or span as it was written: its number from 1, and its fields."""

    number: int
    fields: Mapping[str, Any]


class Skip(Exception):
    """An entry cannot be read.

    Args:
        reason: What is wrong with it.
        right: What would be right; None: the example of the shape.
    """

    def __init__(self, reason: str, right: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.right = right


class Skips:
    """Collects skipped or remarkable entries by reason, with the first line of each reason."""

    def __init__(self) -> None:
        self.right = ""
        self._numbers: dict[str, list[int]] = {}
        self._right: dict[str, str | None] = {}

    def add(self, number: int, reason: str, right: str | None = None) -> None:
        """Add an entry."""
        self._numbers.setdefault(reason, []).append(number)
        self._right.setdefault(reason, right)

    @contextmanager
    def collecting(self, number: int) -> Iterator[None]:
        """Add the entry if the block raises :class:`Skip`, and continue after the block."""
        try:
            yield
        except Skip as skip:
            self.add(number, skip.reason, skip.right)

    def problems(self) -> tuple[Problem, ...]:
        """The reasons, the most frequent first."""
        problems = []
        for reason, numbers in self._numbers.items():
            right = self._right[reason]
            right = self.right if right is None else right
            problems.append(Problem(reason, len(numbers), min(numbers), right))
        return tuple(sorted(problems, key=lambda problem: -problem.count))


def plural(unit: str) -> str:
    """The plural of a unit such as ``entry``."""
    return f"{unit[:-1]}ies" if unit.endswith("y") else f"{unit}s"


def indices_of(values: Iterable[bool]) -> tuple[int, ...]:
    """Indices of the true values."""
    return tuple(index for index, value in enumerate(values) if value)
