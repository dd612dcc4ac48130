"""What all tasks on the user's own questions share: the prompt's template, the score, and a share for searches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

from annotated_types import Ge, Lt

from posbench.errors import UserError
from posbench.files.sources import Source
from posbench.schema import Count, Seed
from posbench.tasks.base import EvaluationOnly, Example, Split
from posbench.tasks.items import Spans, joined
from posbench.tasks.logs.fields import comparable
from posbench.tasks.reading import refuse
from posbench.tasks.scorers import contains_answer

SHORT_ANSWER = 3
"""Characters of an answer so short that a wrong reply may well contain it."""
MAX_LISTED = 5
Match = Literal["words", "text"]
"""Whether an answer must occur in a reply as whole words, or may be part of a word."""
CalibrationShare = Annotated[float, Ge(0), Lt(1)]
MIN_CALIBRATION_QUESTIONS = 2
"""Fewest questions of a share: one to search on, one to check what was found."""


class FilledTemplate(NamedTuple):
    """A prompt with the spans of its parts, in characters (start, end)."""

    prompt: str
    items: Spans
    question: tuple[int, int]


def fill_template(
    template: str, question: str, items: Iterable[str], separator: str
) -> FilledTemplate:
    """Put a question and items into a template.

    Args:
        template: Text with ``{context}`` once, and ``{question}``.
        question: The question.
        items: The items, or documents, or the one text.
        separator: Text between two items.

    Returns:
        The prompt, with the span of every item and that of the question; where the question stands several times, of
        the last after the items, else of the last before them.
    """
    head, tail = template.split("{context}")
    texts = [text.replace("{question}", question) for text in (head, tail)]
    prompt, spans = joined(texts[0], items, separator, texts[1])
    text, offset = (tail, spans[-1][1]) if "{question}" in tail else (head, 0)
    before = text[: text.rindex("{question}")].replace("{question}", question)
    start = offset + len(before)
    return FilledTemplate(prompt, spans, (start, start + len(question)))


def document_text(number: int, title: str | None, text: str) -> str:
    """Render a document in the form of Liu et al. 2023; ``number`` from 0 is shown from 1."""
    shown_title = f"(Title: {title})" if title else ""
    return f"Document [{number + 1}]{shown_title} {text}"


def short_answer_note(all_answers: Sequence[Sequence[str]], match: Match) -> list[str]:
    """A line on how many questions have an answer so short that wrong replies may contain it; empty if none has.

    Args:
        all_answers: The answers of each line.
        match: The task's ``match``.
    """
    short = [
        [answer for answer in answers if len(answer) <= SHORT_ANSWER]
        for answers in all_answers
    ]
    num_lines = sum(map(bool, short))
    if not num_lines:
        return []
    unique = list(dict.fromkeys(answer for answers in short for answer in answers))
    listed = ", ".join(map(repr, unique[:MAX_LISTED]))
    if len(unique) > MAX_LISTED:
        listed += ", ..."
    unit = "a whole word" if match == "words" else "part of any word"
    return [
        f"{num_lines} of {len(all_answers)} lines have an answer of one to {SHORT_ANSWER} characters "
        f"({listed}): a wrong reply may hold it, too, as {unit}; read some with posbench show"
    ]


class QuestionSplit(NamedTuple):
    """Questions (their compared texts) that are not asked in the evaluation.

    Attributes:
        calibration: Those that searches ask.
        held_back: Those on which the result of a search is checked.
        num_questions: Number of all questions.
    """

    calibration: frozenset[str]
    held_back: frozenset[str]
    num_questions: int


@dataclass(frozen=True, kw_only=True)
class OwnQuestions(EvaluationOnly):
    """A task on the user's own questions.

    A share of the questions with answers can be left out of the evaluation: half of it is for searches, and half to
    check what they found.
    """

    metric: ClassVar[str] = "accuracy"
    source: ClassVar[str] = "your file"
    licence: ClassVar[str] = "yours"
    size: ClassVar[str] = "what the file holds"

    max_new_tokens: Count = 100
    references: str | None = None
    template: str | None = None
    separator: str = "\n"
    match: Match = "words"
    calibration_share: CalibrationShare = 0.0
    seed: Seed = 0

    def __post_init__(self) -> None:
        if not self.path:
            hint = "posbench check-data FILE; docs/own_data.md shows what it holds"
            refuse("path", self.path, "your file", hint)
        if self.template is not None and (
            self.template.count("{context}") != 1 or "{question}" not in self.template
        ):
            allowed = "text with {context} once, and {question}"
            hint = "or leave it out: task.template=null"
            refuse("template", self.template, allowed, hint)

    def official(self) -> tuple[Source, ...]:
        """None."""
        return ()

    def files(self) -> tuple[Source, ...]:
        """The user's file or folder, and that of the references."""
        sources = super().files()
        if self.references:
            field = "task.references"
            sources += (Source(kind="path", id=self.references, field=field),)
        return sources

    @property
    def references_file(self) -> Path | None:
        """The file of the references; None if there is none."""
        return Path(self.references).expanduser() if self.references else None

    @cached_property
    def _all_examples(self) -> list[Example]:
        """The examples of all questions."""
        return list(self.questions())

    @cached_property
    def _split(self) -> QuestionSplit:
        """The questions that are kept for searches: those with the smallest digests of seed and text.

        Raises:
            UserError: The share holds too few questions, or leaves none for the evaluation.
        """
        texts = {_question_text(example) for example in self._all_examples}
        if not self.calibration_share:
            return QuestionSplit(frozenset(), frozenset(), len(texts))
        answered = {_question_text(e) for e in self._all_examples if e.answers}
        count = round(self.calibration_share * len(answered))
        if not MIN_CALIBRATION_QUESTIONS <= count < len(texts):
            allowed = f"a share that holds {MIN_CALIBRATION_QUESTIONS} or more of the {len(answered)} questions with "
            allowed += "answers, and not all (0: none)"
            hint = "set another share, or add questions"
            refuse("calibration_share", self.calibration_share, allowed, hint)
        ordered = sorted(answered, key=lambda text: _digest(self.seed, text))
        half = math.ceil(count / 2)
        kept = frozenset(ordered[:half]), frozenset(ordered[half:count])
        return QuestionSplit(*kept, len(texts))

    def examples(self, split: Split) -> list[Example]:
        """See :meth:`Task.examples`; calibration questions are those of ``calibration_share``."""
        if split == "calibration":
            if not self.calibration_share:
                raise _no_calibration(self.name)
            return self._examples_of(self._split.calibration)
        kept = self._split.calibration | self._split.held_back
        return [e for e in self._all_examples if _question_text(e) not in kept]

    def held_back(self, count: int) -> list[Example]:
        """See :meth:`Task.held_back`: the other half of ``calibration_share``."""
        return self._examples_of(self._split.held_back)[:count]

    def _examples_of(self, texts: frozenset[str]) -> list[Example]:
        """The examples of some questions."""
        return [e for e in self._all_examples if _question_text(e) in texts]

    def split_notes(self) -> list[str]:
        """A line on the questions that are kept for searches; empty if none is."""
        if not self.calibration_share:
            return []
        split = self._split
        num_kept = len(split.calibration) + len(split.held_back)
        return [
            f"{num_kept} of {split.num_questions} questions are not asked here (calibration_share="
            f"{self.calibration_share:g}, seed={self.seed}): {len(split.calibration)} are for searches, "
            f"{len(split.held_back)} to check what they find"
        ]

    def score(self, example: Example, text: str) -> dict[str, float]:
        """1 if an answer occurs in the reply, or is the letter chosen; empty without answers."""
        if not example.answers:
            return {}
        if example.choices:
            return {"accuracy": float(text.strip() in example.answers)}
        whole_words = self.match == "words"
        is_right = contains_answer(text, example.answers, whole_words=whole_words)
        return {"accuracy": float(is_right)}


def _question_text(example: Example) -> str:
    """The text of an example's question, by which questions are split."""
    start, end = example.question or (0, 0)
    return comparable(example.prompt[start:end])


def _digest(seed: int, text: str) -> str:
    """A digest of a question, by which a share of them is drawn."""
    return hashlib.sha256(f"{seed} {text}".encode()).hexdigest()


def _no_calibration(name: str) -> UserError:
    """The error of a search where no questions are kept for it."""
    allowed = f"no search on task {name}: it has no calibration questions"
    hint = "set task.calibration_share=0.3, or search with task=kv_retrieval and evaluate with method=from:RUN"
    return UserError("stages", "search", allowed, hint)
