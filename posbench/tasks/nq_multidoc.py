"""Multi-document question answering (Liu et al. 2023): the answer stands in one of n documents."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from posbench.errors import Faults
from posbench.files.sources import Source
from posbench.schema import Count, Several
from posbench.tasks.base import Example, Split
from posbench.tasks.items import Placed, Spans, joined
from posbench.tasks.reading import Line, Row, each, refuse, rows
from posbench.tasks.scorers import best_subspan_em, first_line

COMMIT = "04cbd0df78d3260600fd04e524a29bd1404ef86b"
REPOSITORY = f"https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/{COMMIT}"
SIZES = (10, 20, 30)
QUESTIONS = 2655
"""Documents per prompt of the benchmark's own files, and questions in each."""

INSTRUCTION = "Write a high-quality answer for the given question using only the provided search results "
INSTRUCTION += "(some of which might be irrelevant)."
Prompt = Literal["official", "query_aware", "random_order", "closed_book", "oracle"]


class Document(NamedTuple):
    """A document, with its number in the file from 1."""

    number: int
    title: str
    text: str


class Question(NamedTuple):
    """A question with its answers, the gold document (None: not needed), the others in retrieval order."""

    text: str
    answers: tuple[str, ...]
    gold: Document | None
    others: list[Document]


def render(
    prompt: Prompt, question: str, documents: list[Document], *, renumber: bool = True
) -> tuple[str, Spans]:
    """The benchmark's prompt (``qa*.prompt``, ``closedbook_qa.prompt``; MIT), and every document's span."""
    ending = f"Question: {question}\nAnswer:"
    if prompt == "closed_book":
        return ending, ()
    randomly = (
        " The search results are ordered randomly." if prompt == "random_order" else ""
    )
    first = f"Question: {question}\n\n" if prompt == "query_aware" else ""
    numbers = (
        range(1, len(documents) + 1)
        if renumber
        else [document.number for document in documents]
    )
    shown = [
        f"Document [{n}](Title: {d.title}) {d.text}"
        for n, d in zip(numbers, documents, strict=True)
    ]
    return joined(f"{INSTRUCTION}{randomly}\n\n{first}", shown, "\n", f"\n\n{ending}")


@dataclass(frozen=True, kw_only=True)
class NQMultiDoc(Placed):
    """Multi-document question answering over gold positions.

    Args:
        path: A file of the benchmark (``*.jsonl`` or ``*.jsonl.gz``), whatever its gold position and with at
            least ``documents``: the gold one is put at each position. None: the official file, downloaded.
        documents: Documents per prompt.
        limit: Questions, the first ones; each is asked at every position.
        prompt: ``official``; ``query_aware`` asks before and after the documents; ``random_order`` says that
            they are in random order and shuffles all but the gold one; ``closed_book`` shows none and
            ``oracle`` the gold one alone (these two once per question, without positions).
        labels: ``renumbered`` from 1 (Liu et al.), or the ``original`` numbers of the file, which then run
            out of order (Ms-PoE, Zhang et al. 2024).
        reading: Which script reads the reply: ``yu`` strips it before it is cut at the first line break,
            ``liu`` after.
        calibration_examples: Calibration questions: those of the file that come after the evaluation's.
        calibration_positions: None: ``positions``.
    """

    metric: ClassVar[str] = "accuracy"
    source: ClassVar[str] = (
        "Liu et al. 2023, github.com/nelson-liu/lost-in-the-middle, qa_data/"
    )
    licence: ClassVar[str] = "MIT; questions and passages CC BY-SA 3.0"
    size: ClassVar[str] = (
        "2655 questions with 10, 20 or 30 documents; the first 500 by default"
    )
    sizes: ClassVar[tuple[str, str]] = ("documents", "documents")

    name: str = "nq_multidoc"
    max_new_tokens: Count = 100
    documents: Several = 20
    prompt: Prompt = "official"
    labels: Literal["renumbered", "original"] = "renumbered"
    reading: Literal["yu", "liu"] = "yu"
    calibration_examples: Count = 200

    def __post_init__(self) -> None:
        if self.documents > max(SIZES) and not self.path:
            allowed = f"at most {max(SIZES)}, without a file"
            refuse(
                "documents",
                self.documents,
                allowed,
                "set task.path to a file with more documents",
            )
        _ = self.gold_positions, self.calibration_indices

    def files(self) -> tuple[Source, ...]:
        """The given file, or the official one with the least documents that are enough."""
        if self.path:
            return (Source(kind="path", id=self.path, field="task.path"),)
        size = (
            f"{next(size for size in SIZES if size >= self.documents)}_total_documents"
        )
        placed = self.prompt not in ("closed_book", "oracle")
        name = (
            f"{size}/nq-open-{size}_gold_at_0.jsonl.gz"
            if placed
            else "nq-open-oracle.jsonl.gz"
        )
        return (
            Source(kind="url", id=f"{REPOSITORY}/qa_data/{name}", field="task.path"),
        )

    def examples(self, split: Split) -> list[Example]:
        """See :meth:`Task.examples`. Calibration: the file's next questions, if not asked before."""
        file, lines = self._lines()
        if split == "calibration":
            count = self.calibration_examples
            found = self._calibration(lines, 0, count)
            if len(found) < count:
                start = min(self.limit, len(lines))
                allowed = f"at most {len(found)}: {file} has {len(lines)} questions, {start} are evaluated"
                hint = "lower it or task.limit, or set task.path to a longer file"
                refuse("calibration_examples", count, allowed, hint)
            return found
        evaluation = each(lines[: self.limit], self._question, Faults())
        return [
            self._example(
                f"{number}" if place is None else f"{place}-{number}",
                number,
                question,
                place,
            )
            for number, question in enumerate(evaluation)
            for place in self._places(self.gold_positions)
        ]

    def held_back(self, count: int) -> list[Example]:
        """See :meth:`Task.held_back`: the questions of the file after the calibration's, while there are."""
        return self._calibration(self._lines()[1], self.calibration_examples, count)

    def score(self, example: Example, text: str) -> dict[str, float]:
        """1 if a gold answer, normalised, occurs in the first line of the reply (:func:`best_subspan_em`)."""
        return {
            "accuracy": best_subspan_em(
                text, example.answers, strip_first=self.reading == "yu"
            )
        }

    def extracted(self, example: Example, text: str) -> str:
        """The first line."""
        return first_line(text, strip_first=self.reading == "yu")

    def _places(self, positions: list[int]) -> list[int] | list[None]:
        return [None] if self.prompt in ("closed_book", "oracle") else positions

    def _lines(self) -> tuple[Path, list[Row]]:
        file = self.place()
        return file, list(rows("path", file, count=0 if self.path else QUESTIONS))

    def _calibration(self, lines: list[Row], skipped: int, count: int) -> list[Example]:
        """At most ``count`` questions that the evaluation does not ask, after the first ``skipped`` ones."""
        start = self.limit
        places = self._places(self.calibration_indices or self.gold_positions)
        asked = {_key(self._question(row)) for _, row in lines[:start]}
        later = (
            (number, self._question(row))
            for number, (_, row) in enumerate(lines[start:], start=start)
        )
        fresh = islice(
            ((n, q) for n, q in later if _key(q) not in asked), skipped, skipped + count
        )
        turns = enumerate(fresh)
        return [
            self._example(f"c{n}", n, q, places[turn % len(places)])
            for turn, (n, q) in turns
        ]

    def _question(self, row: Line) -> Question:
        text = row.take("question")
        answers = tuple(row.take("answers", list))
        if not all(isinstance(answer, str) and answer for answer in answers):
            row.refuse('a field "answers" (list of str, none empty)')
        if self.prompt == "closed_book":
            return Question(text, answers, None, [])
        gold = list[Document]()
        others = list[Document]()
        for number, entry in enumerate(row.take("ctxs", list), start=1):
            texts = (
                [entry.get(name) for name in ("title", "text")]
                if isinstance(entry, dict)
                else [None]
            )
            if not all(isinstance(text, str) for text in texts) or not isinstance(
                entry.get("isgold"), bool
            ):
                row.refuse(
                    'a field "ctxs" (list of objects with texts "title", "text", and "isgold")'
                )
            (gold if entry["isgold"] else others).append(Document(number, *texts))
        if len(gold) != 1:
            row.refuse(
                f'one document with "isgold": true in "ctxs" ({len(gold)} have it)'
            )
        needed = 0 if self.prompt == "oracle" else self.documents - 1
        if len(others) < needed:
            row.refuse(
                f'{self.documents} documents in "ctxs", as task.documents asks ({len(others) + 1})'
            )
        return Question(text, answers, gold[0], others[:needed])

    def _example(
        self, name: str, number: int, question: Question, place: int | None
    ) -> Example:
        others = list(question.others)
        if self.prompt == "random_order":
            random.Random(f"posbench nq_multidoc {self.seed}/{number}").shuffle(others)
        documents = (
            [*others[: place or 0], question.gold, *others[place or 0 :]]
            if question.gold
            else []
        )
        prompt, spans = render(
            self.prompt, question.text, documents, renumber=self.labels == "renumbered"
        )
        facts: dict[str, Any] = {
            "id": name,
            "answers": question.answers,
            "cluster": str(number),
        }
        return Example(prompt=prompt, gold_position=place, items=spans, **facts)


def _key(question: Question) -> str:
    """A question's text as far as two spellings of it agree."""
    return " ".join(question.text.casefold().split())
