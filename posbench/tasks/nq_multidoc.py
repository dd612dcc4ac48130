"""Multi-document question answering (Liu et al. 2023): the answer is in one of n documents."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from posbench.errors import Faults
from posbench.files.sources import Source
from posbench.schema import Count, Several
from posbench.tasks.base import Example, Split
from posbench.tasks.items import GoldPositionTask, Spans, joined
from posbench.tasks.reading import Line, Row, parse_rows, read_data_rows, refuse
from posbench.tasks.scorers import WHOLE_REPLY, best_subspan_em, first_line

COMMIT = "04cbd0df78d3260600fd04e524a29bd1404ef86b"
LOST_IN_THE_MIDDLE_URL = (
    f"https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/{COMMIT}"
)
OFFICIAL_DOCUMENTS = (10, 20, 30)
"""Documents per prompt of the benchmark's own files."""
NQ_QUESTIONS = 2655
"""Questions in each of these files."""

INSTRUCTION = (
    "Write a high-quality answer for the given question using only the provided search results "
    "(some of which might be irrelevant)."
)
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
    distractors: list[Document]


def render(
    prompt: Prompt, question: str, documents: list[Document], *, renumber: bool = True
) -> tuple[str, Spans]:
    """Return the benchmark's prompt (``qa*.prompt``, ``closedbook_qa.prompt``; MIT).

    Args:
        prompt: Form of the prompt.
        question: The question.
        documents: The documents in their order.
        renumber: Whether to number the documents from 1, or as in the file.

    Returns:
        The prompt, and the character span of every document in it.
    """
    ending = f"Question: {question}\nAnswer:"
    if prompt == "closed_book":
        return ending, ()
    head = INSTRUCTION
    if prompt == "random_order":
        head += " The search results are ordered randomly."
    head += "\n\n"
    if prompt == "query_aware":
        head += f"Question: {question}\n\n"
    texts = []
    for position, document in enumerate(documents, start=1):
        number = position if renumber else document.number
        texts.append(f"Document [{number}](Title: {document.title}) {document.text}")
    return joined(head, texts, "\n", f"\n\n{ending}")


@dataclass(frozen=True, kw_only=True)
class NQMultiDoc(GoldPositionTask):
    """Answer a question from several documents, where the one with the answer stands at one place after another.

    Args:
        path: A file of the benchmark (``*.jsonl`` or ``*.jsonl.gz``), whatever its gold position and with at
            least ``documents``: the gold one is put at each position. None: the official file, downloaded.
        documents: Documents per prompt.
        limit: Questions, the first ones; each is asked at every position.
        prompt: ``official``; ``query_aware`` asks before and after the documents; ``random_order`` says that
            they are in random order and shuffles all but the gold one; ``closed_book`` shows none and
            ``oracle`` the gold one alone (these two once per question, without positions).
        labels: ``renumbered`` from 1 (Liu et al.), or the ``original`` numbers of the file, which then run out of order
            (Ms-PoE, Zhang et al. 2024).
        reading: Which script reads the reply: ``yu`` strips it before it is cut at the first line break,
            ``liu`` after.
        calibration_examples: Calibration questions, which follow the evaluation's in the file.
        calibration_positions: None: ``positions``.

    Score: 1 if a gold answer, normalised, occurs in the first line of the reply. ``whole_reply`` scores the whole
    reply: a model that begins with a heading fails only the first.
    """

    metric: ClassVar[str] = "accuracy"
    metrics_by_position: ClassVar[tuple[str, ...]] = (WHOLE_REPLY,)
    # 2: whole_reply; an answer that normalisation would empty keeps its articles or signs
    version: ClassVar[str] = "2"
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
        largest = max(OFFICIAL_DOCUMENTS)
        if self.documents > largest and not self.path:
            hint = "set task.path to a file with more documents"
            refuse(
                "documents",
                self.documents,
                f"at most {largest}, without a file",
                hint,
            )
        # These refuse positions outside the list.
        _ = self.gold_positions
        _ = self.calibration_indices

    @property
    def _has_positions(self) -> bool:
        """Whether the prompt shows the gold document among others."""
        return self.prompt not in ("closed_book", "oracle")

    def files(self) -> tuple[Source, ...]:
        """Return the user's file, or the smallest official one with enough documents."""
        if self.path:
            return (Source(kind="path", id=self.path, field="task.path"),)
        name = "nq-open-oracle.jsonl.gz"
        if self._has_positions:
            size = next(size for size in OFFICIAL_DOCUMENTS if size >= self.documents)
            folder = f"{size}_total_documents"
            name = f"{folder}/nq-open-{folder}_gold_at_0.jsonl.gz"
        url = f"{LOST_IN_THE_MIDDLE_URL}/qa_data/{name}"
        return (Source(kind="url", id=url, field="task.path"),)

    def examples(self, split: Split) -> list[Example]:
        """Return the questions of a split as examples, for the evaluation each at every gold position.

        Calibration questions are the file's next ones that are not evaluated.

        Raises:
            UserError: The file is wrong, or has too few questions.
        """
        file, lines = self._lines()
        if split == "calibration":
            count = self.calibration_examples
            calibration = self._calibration(lines, 0, count)
            if len(calibration) < count:
                start = min(self.limit, len(lines))
                allowed = f"at most {len(calibration)}: {file} has {len(lines)} questions, {start} are evaluated"
                hint = "lower it or task.limit, or set task.path to a longer file"
                refuse("calibration_examples", count, allowed, hint)
            return calibration
        examples = []
        questions = parse_rows(lines[: self.limit], self._question, Faults())
        for number, question in enumerate(questions):
            if not self._has_positions:
                examples.append(self._example(str(number), number, question, None))
                continue
            for position in self.gold_positions:
                name = f"{position}-{number}"
                examples.append(self._example(name, number, question, position))
        return examples

    def held_back(self, count: int) -> list[Example]:
        """See :meth:`Task.held_back`: the questions of the file after the calibration's, while there are."""
        _, lines = self._lines()
        return self._calibration(lines, self.calibration_examples, count)

    def score(self, example: Example, text: str) -> dict[str, float]:
        """Score a reply: 1 if a gold answer, normalised, occurs in its first line, and likewise for the whole reply.

        Args:
            example: The prompt, with its gold answers.
            text: The reply.

        Returns:
            ``accuracy`` for the first line, and :data:`WHOLE_REPLY` for the whole reply: 0 or 1 each.
        """
        # The papers' scripts differ on a reply that begins with a line break: is its first line empty?
        strip_first = self.reading == "yu"
        accuracy = best_subspan_em(text, example.answers, strip_first=strip_first)
        whole_reply = best_subspan_em(text, example.answers, whole_reply=True)
        return {"accuracy": accuracy, WHOLE_REPLY: whole_reply}

    def has_answer(self, example: Example, text: str) -> bool:
        """Whether the line that is scored is complete, or right already."""
        line_is_complete = "\n" in (text.strip() if self.reading == "yu" else text)
        return line_is_complete or super().has_answer(example, text)

    def extracted(self, example: Example, text: str) -> str:
        """The first line."""
        return first_line(text, strip_first=self.reading == "yu")

    def _lines(self) -> tuple[Path, list[Row]]:
        """The file and its lines."""
        file = self.place()
        count = 0 if self.path else NQ_QUESTIONS
        lines = list(read_data_rows("path", file, count=count))
        lists = [
            line["ctxs"] for _, line in lines if isinstance(line.get("ctxs"), list)
        ]
        counts = [len(documents) for documents in lists if len(documents) > 1]
        most = max(counts, default=self.documents)
        if self.prompt not in ("closed_book", "oracle") and most < self.documents:
            allowed = f"at most {most}: no question of {file} has more documents"
            hint = f"set task.documents={min(counts)}"
            refuse("documents", self.documents, allowed, hint)
        return file, lines

    def _calibration(self, lines: list[Row], start: int, count: int) -> list[Example]:
        """Return calibration examples: questions behind those of the evaluation, without repetitions of these.

        Args:
            lines: Number and fields of the file's lines.
            start: Number of such questions to skip.
            count: The most to return.
        """
        positions: list[int | None] = [None]
        if self._has_positions:
            positions = [*(self.calibration_indices or self.gold_positions)]
        evaluated = {
            _normalized_text(self._question(line)) for _, line in lines[: self.limit]
        }
        examples: list[Example] = []
        skipped = 0
        for number, (_, line) in enumerate(lines[self.limit :], start=self.limit):
            if len(examples) == count:
                break
            question = self._question(line)
            if _normalized_text(question) in evaluated:
                continue
            if skipped < start:
                skipped += 1
                continue
            position = positions[len(examples) % len(positions)]
            examples.append(self._example(f"c{number}", number, question, position))
        return examples

    def _question(self, line: Line) -> Question:
        """Return the question of a line with its gold document and as many distractors as the prompt shows."""
        text = line.take("question")
        answers = tuple(line.take("answers", list))
        if not all(isinstance(answer, str) and answer.strip() for answer in answers):
            line.refuse('a field "answers" (list of str, none blank)')
        if self.prompt == "closed_book":
            return Question(text, answers, None, [])
        gold: list[Document] = []
        distractors: list[Document] = []
        for number, entry in enumerate(line.take("ctxs", list), start=1):
            if not _is_document(entry):
                line.refuse(
                    'a field "ctxs" (list of objects with texts "title", "text", and "isgold")'
                )
            document = Document(number, entry["title"], entry["text"])
            if entry["isgold"]:
                gold.append(document)
            else:
                distractors.append(document)
        if len(gold) != 1:
            line.refuse(
                f'one document with "isgold": true in "ctxs" ({len(gold)} have it)'
            )
        needed = 0 if self.prompt == "oracle" else self.documents - 1
        if len(distractors) < needed:
            line.refuse(
                f'{self.documents} documents in "ctxs", as task.documents asks ({len(distractors) + 1})'
            )
        return Question(text, answers, gold[0], distractors[:needed])

    def _example(
        self, name: str, number: int, question: Question, position: int | None
    ) -> Example:
        """Return the example that asks a question.

        Args:
            name: Id of the example.
            number: Number of the question in the file, from 0.
            question: The question.
            position: Index of the gold document; None: first, or not shown.
        """
        documents = list(question.distractors)
        if self.prompt == "random_order":
            rng = random.Random(f"posbench nq_multidoc {self.seed}/{number}")
            rng.shuffle(documents)
        if question.gold:
            documents.insert(position or 0, question.gold)
        prompt, spans = render(
            self.prompt, question.text, documents, renumber=self.labels == "renumbered"
        )
        # The last time that the prompt says it.
        label = f"Question: {question.text}"
        start = prompt.rindex(label)
        return Example(
            id=name,
            prompt=prompt,
            answers=question.answers,
            gold_position=position,
            items=spans,
            question=(start, start + len(label)),
            cluster=str(number),
        )


def _is_document(entry: Any) -> bool:
    """Whether an entry of a file's ``ctxs`` has the fields of a document."""
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("title"), str)
        and isinstance(entry.get("text"), str)
        and isinstance(entry.get("isgold"), bool)
    )


def _normalized_text(question: Question) -> str:
    """Return a question's text, normalised so that its spellings agree."""
    return " ".join(question.text.casefold().split())
