"""Multi-document question answering (Liu et al. 2023): the answer stands in one of n documents, which is
moved over positions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from posbench.files.sources import Source, local
from posbench.tasks.base import Example, Split, Task
from posbench.tasks.items import gold_indices, joined
from posbench.tasks.reading import Row, refuse, refuse_line, rows, take
from posbench.tasks.scorers import best_subspan_em

REPOSITORY = (
    "https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/04cbd0df78d3260600fd04e524a29bd1404ef86b"
)
SIZES = (10, 20, 30)
"""Documents per prompt of the benchmark's own files."""
QUESTIONS = 2655
"""Questions in each of the benchmark's own files."""

INSTRUCTION = (
    "Write a high-quality answer for the given question using only the provided search results "
    "(some of which might be irrelevant)."
)
RANDOM_ORDER = " The search results are ordered randomly."

Prompt = Literal["official", "query_aware", "random_order", "closed_book", "oracle"]


class Document(NamedTuple):
    """A document: its number in the file, from 1, and its text."""

    number: int
    title: str
    text: str


class Question(NamedTuple):
    """A question with its accepted answers, the gold document (None: not needed), and the others in retrieval
    order."""

    text: str
    answers: tuple[str, ...]
    gold: Document | None
    others: list[Document]


def render(
    prompt: Prompt, question: str, documents: list[Document], *, renumber: bool = True
) -> tuple[str, list[tuple[int, int]]]:
    """The benchmark's prompt, and the character span of every document.

    Source: nelson-liu/lost-in-the-middle, ``qa.prompt``, ``qa_with_query_aware_contextualization.prompt``,
    ``qa_ordered_randomly.prompt``, ``closedbook_qa.prompt`` (MIT).

    Args:
        prompt: Which of them; ``oracle`` is ``qa.prompt``.
        question: The question.
        documents: The documents, in order; none for ``closed_book``.
        renumber: Number them from 1; False keeps their numbers in the file.
    """
    ending = f"Question: {question}\nAnswer:"
    if prompt == "closed_book":
        return ending, []
    head = INSTRUCTION + (RANDOM_ORDER if prompt == "random_order" else "") + "\n\n"
    if prompt == "query_aware":
        head += f"Question: {question}\n\n"
    shown = [
        f"Document [{place if renumber else document.number}](Title: {document.title}) {document.text}"
        for place, document in enumerate(documents, start=1)
    ]
    return joined(head, shown, "\n", f"\n\n{ending}")


@dataclass(frozen=True, kw_only=True)
class NQMultiDoc(Task):
    """Multi-document question answering over gold positions.

    Args:
        path: A file of the benchmark (``*.jsonl`` or ``*.jsonl.gz``), whatever its gold position: the gold
            document is taken out and put back at each position. It may hold more documents than
            ``documents``: the others are cut. None: the official file, downloaded once.
        documents: Documents per prompt.
        positions: Gold positions: ``"50%"`` of the way (index floor(p * (documents - 1)), the benchmark's
            0/4/9/14/19 of 20 documents) or explicit 0-based indices.
        examples_per_position: Questions, the first ones; each is asked at every position.
        prompt: ``official``; ``query_aware`` asks before and after the documents; ``random_order`` says that
            the documents are in random order and shuffles all but the gold one; ``closed_book`` shows no
            document and ``oracle`` the gold one alone (these two once per question, without positions).
        labels: ``renumbered`` from 1 (Liu et al.), or the ``original`` numbers of the file, which then run
            out of order (Ms-PoE, Zhang et al. 2024).
        reading: Which script reads the reply: ``yu`` strips it before it is cut at the first line break,
            ``liu`` after.
        calibration_examples: Calibration questions: those of the file that come after the evaluation's.
        calibration_positions: Gold positions that the calibration questions take in turn; None:
            ``positions``.
        seed: Seed of the shuffle.

    Score: 1 if a gold answer, normalised, occurs in the first line of the reply (:func:`best_subspan_em`).
    """

    version: ClassVar[str] = "1"
    metric: ClassVar[str] = "accuracy"
    source: ClassVar[str] = "Liu et al. 2023, github.com/nelson-liu/lost-in-the-middle, qa_data/"
    licence: ClassVar[str] = "MIT; questions and passages CC BY-SA 3.0"
    size: ClassVar[str] = "2655 questions with 10, 20 or 30 documents; the first 500 by default"

    name: str = "nq_multidoc"
    max_new_tokens: int = 100
    path: str | None = None
    documents: int = 20
    positions: tuple[int | str, ...] = ("0%", "25%", "50%", "75%", "100%")
    examples_per_position: int = 500
    prompt: Prompt = "official"
    labels: Literal["renumbered", "original"] = "renumbered"
    reading: Literal["yu", "liu"] = "yu"
    calibration_examples: int = 200
    calibration_positions: tuple[int | str, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in {
            "documents": 2,
            "examples_per_position": 1,
            "calibration_examples": 1,
            "max_new_tokens": 1,
        }.items():
            if getattr(self, name) < low:
                refuse(
                    name,
                    getattr(self, name),
                    f"a whole number from {low} up",
                    f"set task.{name}={low} or more",
                )
        if self.documents > max(SIZES) and not self.path:
            refuse(
                "documents",
                self.documents,
                f"at most {max(SIZES)}, without a file",
                "set task.path to a file with more documents",
            )
        gold_indices("positions", self.positions, "documents", self.documents)
        self._calibration_indices()

    @property
    def gold_positions(self) -> list[int]:
        """The gold positions as 0-based indices."""
        return gold_indices("positions", self.positions, "documents", self.documents)

    @property
    def items(self) -> int:
        """Documents per prompt."""
        return self.documents

    @property
    def calibration_items(self) -> int:
        """Documents per prompt."""
        return self.documents

    def files(self) -> tuple[Source, ...]:
        """The given file, or the official one with the least documents that are enough."""
        if self.path:
            return (Source(kind="path", id=self.path, field="task.path"),)
        if self.prompt in ("closed_book", "oracle"):
            name = "nq-open-oracle.jsonl.gz"
        else:
            size = next(size for size in SIZES if size >= self.documents)
            name = f"{size}_total_documents/nq-open-{size}_total_documents_gold_at_0.jsonl.gz"
        return (Source(kind="url", id=f"{REPOSITORY}/qa_data/{name}", field="task.path"),)

    def examples(self, split: Split) -> list[Example]:
        """See :meth:`Task.examples`. Calibration: the next questions of the file, whose text no evaluation
        question has."""
        shown, lines = self._lines()
        count = self.examples_per_position
        if len(lines) < count:
            allowed = f"at most {len(lines)}, the questions in {shown}"
            refuse("examples_per_position", count, allowed, f"set task.examples_per_position={len(lines)}")
        evaluation = [self._question(shown, *row) for row in lines[:count]]
        if split == "evaluation":
            return [
                self._example(
                    f"{number}" if position is None else f"{position}-{number}", number, question, position
                )
                for number, question in enumerate(evaluation)
                for position in self._places(self.gold_positions)
            ]
        return list(self._calibration(shown, lines, {_key(question.text) for question in evaluation}))

    def score(self, example: Example, text: str) -> dict[str, float]:
        """1 if a gold answer occurs in the first line of the reply."""
        return {"accuracy": best_subspan_em(text, example.answers, strip_first=self.reading == "yu")}

    def _places(self, positions: list[int]) -> list[int] | list[None]:
        return [None] if self.prompt in ("closed_book", "oracle") else positions

    def _calibration_indices(self) -> list[int]:
        if self.calibration_positions is None:
            return self.gold_positions
        return gold_indices("calibration_positions", self.calibration_positions, "documents", self.documents)

    def _lines(self) -> tuple[str, list[Row]]:
        """The file as it is called in errors, and its rows."""
        if not self.path:
            file = local(self.files()[0])
            return str(file), list(rows("path", file, count=QUESTIONS))
        if not Path(self.path).expanduser().is_file():
            refuse(
                "path",
                self.path,
                "a file on this machine",
                f"take one from {self.source}, or set task.path=null to download it",
            )
        return self.path, list(rows("path", self.path))

    def _calibration(self, shown: str, lines: list[Row], asked: set[str]) -> Iterator[Example]:
        start = self.examples_per_position
        places = self._places(self._calibration_indices())
        later = (
            (number, self._question(shown, *row)) for number, row in enumerate(lines[start:], start=start)
        )
        fresh = list(
            islice(((n, q) for n, q in later if _key(q.text) not in asked), self.calibration_examples)
        )
        if len(fresh) < self.calibration_examples:
            refuse(
                "calibration_examples",
                self.calibration_examples,
                f"at most {len(fresh)}: {shown} has {len(lines)} questions, and the evaluation asks the first {start}",
                "lower task.calibration_examples or task.examples_per_position, or set task.path to a longer file",
            )
        for turn, (number, question) in enumerate(fresh):
            yield self._example(f"c{number}", number, question, places[turn % len(places)])

    def _question(self, shown: str, line: int, row: dict[str, object]) -> Question:
        text = take("path", shown, line, row, "question")
        answers = take("path", shown, line, row, "answers", list)
        if not all(isinstance(answer, str) and answer for answer in answers):
            refuse_line("path", shown, line, 'a field "answers" (list of str, none empty)')
        if self.prompt == "closed_book":
            return Question(text, tuple(answers), None, [])
        gold: list[Document] = []
        others: list[Document] = []
        for number, entry in enumerate(take("path", shown, line, row, "ctxs", list), start=1):
            if not isinstance(entry, dict) or not all(
                isinstance(entry.get(name), str) for name in ("title", "text")
            ):
                refuse_line(
                    "path", shown, line, 'a field "ctxs" (list of objects with texts "title" and "text")'
                )
            document = Document(number, entry["title"], entry["text"])
            (gold if take("path", shown, line, entry, "isgold", bool) else others).append(document)
        if len(gold) != 1:
            refuse_line(
                "path", shown, line, f'one document with "isgold": true in "ctxs" ({len(gold)} have it)'
            )
        if self.prompt == "oracle":
            return Question(text, tuple(answers), gold[0], [])
        if len(others) < self.documents - 1:
            refuse_line(
                "path",
                shown,
                line,
                f'{self.documents} documents in "ctxs", as task.documents asks ({len(others) + 1})',
            )
        return Question(text, tuple(answers), gold[0], others[: self.documents - 1])

    def _example(self, name: str, number: int, question: Question, position: int | None) -> Example:
        others = list(question.others)
        if self.prompt == "random_order":
            random.Random(f"posbench nq_multidoc {self.seed}/{number}").shuffle(others)
        at = position or 0
        documents = [*others[:at], question.gold, *others[at:]] if question.gold else []
        prompt, spans = render(self.prompt, question.text, documents, renumber=self.labels == "renumbered")
        return Example(
            id=name,
            prompt=prompt,
            answers=question.answers,
            gold_position=position,
            items=tuple(spans),
            cluster=str(number),
        )


def _key(question: str) -> str:
    """A question's text as far as two spellings of it agree."""
    return " ".join(question.casefold().split())
