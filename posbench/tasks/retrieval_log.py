"""A retrieval log: each question once, with its documents in the order in which they were logged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from posbench.schema import Count
from posbench.tasks.base import Example
from posbench.tasks.logs import Log, LoggedDocument, LoggedQuestion, read_log
from posbench.tasks.logs.fields import comparable
from posbench.tasks.logs.order import has_best_at_ends, rank_order
from posbench.tasks.own_data import Documents
from posbench.tasks.own_questions import (
    OwnQuestions,
    fill_template,
    short_answer_note,
)


@dataclass(frozen=True, kw_only=True)
class RetrievalLog(OwnQuestions):
    """The questions of a retrieval log in any shape that docs/own_data.md lists.

    Args:
        path: The log: a file, or a BEIR folder with a TREC run.
        references: File of reference answers by question or id (CSV, JSON lines), for logs that hold none.
        template: The prompt, with ``{context}`` (the documents) and ``{question}``; None: that of Liu et al. 2023.
        separator: Text between documents.
        match: ``words``: an answer must occur in the reply as whole words; ``text``: it may be part of a word.
        max_documents: Documents of a question at most, the first ones of the log; None: all.
        calibration_share: Share of the questions with answers that searches and their checks ask, and the evaluation
            does not.
        seed: Chooses these questions.

    Score: 1 if an accepted answer occurs in the reply, letter case ignored; none where the log has no reference.
    """

    version: ClassVar[str] = "1"

    name: str = "retrieval_log"
    max_documents: Count | None = None

    @cached_property
    def log(self) -> Log:
        """The content of the log; see :func:`posbench.tasks.logs.read_log`."""
        log = read_log(self.place(), self.references_file)
        if self.max_documents is None:
            return log
        shown = tuple(first_documents(q, self.max_documents) for q in log.questions)
        return replace(log, questions=shown)

    def notes(self) -> list[str]:
        """See :meth:`Task.notes`."""
        log = self.log
        total = len(log.questions)
        notes = log.notes()
        num_unscored = sum(question.answers is None for question in log.questions)
        if 0 < num_unscored < total:
            notes.append(
                f"{num_unscored} of {total} questions have no reference and no score"
            )
        num_moved = sum(
            self._relevance(question) is not None for question in log.questions
        )
        num_ends = sum(
            has_best_at_ends(scores, log.are_distances)
            for scores in (question.scores for question in log.questions)
            if scores is not None
        )
        if num_moved:
            pattern = ""
            if num_ends:
                pattern = f", in {num_ends} with the best at both ends"
            notes.append(
                f"{num_moved} of {total} lists are not in the order of their scores{pattern}: this is not the order in "
                "which they were retrieved"
            )
        answers = [question.answers or () for question in log.questions]
        return [*notes, *short_answer_note(answers, self.match), *self.split_notes()]

    def _relevance(self, question: LoggedQuestion) -> tuple[int, ...] | None:
        """Indices of the documents, best first; None where that is the order of the log, or not known."""
        scores = question.scores
        if scores is None:
            return None
        order = rank_order(scores, self.log.are_distances)
        return order if order != tuple(range(len(scores))) else None

    def questions(self) -> Iterator[Example]:
        """See :meth:`EvaluationOnly.questions`."""
        first_id: dict[str, str] = {}
        for name, question in zip(self.log.names, self.log.questions, strict=True):
            documents = question.documents
            texts = [unnumbered_text(d.title, d.text) for d in documents]
            template = self.template or Documents.template
            filled = fill_template(template, question.question, texts, self.separator)
            orders = {
                "relevance": self._relevance(question),
                "source": source_order(documents),
                "id": id_order(documents),
            }
            yield Example(
                id=name,
                prompt=filled.prompt,
                answers=question.answers or (),
                items=filled.items,
                question=filled.question,
                orders={key: order for key, order in orders.items() if order},
                cluster=first_id.setdefault(comparable(question.question), name),
                meta={
                    "gold": question.gold,
                    "ids": tuple(document.id for document in documents),
                },
            )

    def how_to_shorten(self, example: Example) -> str:
        """See :meth:`Task.how_to_shorten`: names the line, and its longest document."""
        question = self.log.questions[self.log.names.index(example.id)]
        sizes = [len(document.text) for document in question.documents]
        longest = max(range(len(sizes)), key=sizes.__getitem__)
        return (
            f"set task.max_documents to less than {len(sizes)}, or shorten document {longest} (from 0) of "
            f"{self.log.unit} {question.line} of {self.path} ({sizes[longest]:,} characters)"
        )


def unnumbered_text(title: str | None, text: str) -> str:
    """Render a document without a number, which would be wrong in another order."""
    return f"Document (Title: {title}) {text}" if title else f"Document: {text}"


def first_documents(question: LoggedQuestion, count: int) -> LoggedQuestion:
    """The question with its first ``count`` documents."""
    gold = question.gold
    if gold is not None:
        gold = tuple(index for index in gold if index < count)
    return question._replace(documents=question.documents[:count], gold=gold)


def natural_key(name: str) -> list[Any]:
    """A key that sorts ``p2`` before ``p10``."""
    parts = re.split(r"([0-9]+)", name)
    return [
        (len(digits := part.lstrip("0")), digits) if index % 2 else part
        for index, part in enumerate(parts)
    ]


def id_order(documents: Sequence[LoggedDocument]) -> tuple[int, ...] | None:
    """Indices of the documents by their ids, numbers in these by value; None unless all have one."""
    ids = [document.id for document in documents]
    if None in ids:
        return None
    keys = [natural_key(name or "") for name in ids]
    return tuple(sorted(range(len(ids)), key=keys.__getitem__))


def source_order(documents: Sequence[LoggedDocument]) -> tuple[int, ...] | None:
    """Indices of the documents by source (else title), in it by page or position, else by id.

    None unless all documents have a source, or all a title, and those of one source a page or an id each.
    """
    sources = [document.source for document in documents]
    if not all(sources):
        sources = [document.title for document in documents]
    if not all(sources):
        return None
    keys: list[Any] = []
    for document, source in zip(documents, sources, strict=True):
        group = [d for d, s in zip(documents, sources, strict=True) if s == source]
        within: Any = 0
        if len(group) > 1:
            if all(d.page is not None for d in group):
                within = document.page
            elif all(d.id is not None for d in group):
                within = natural_key(document.id or "")
            else:
                return None
        keys.append((natural_key(source or ""), within))
    return tuple(sorted(range(len(keys)), key=keys.__getitem__))
