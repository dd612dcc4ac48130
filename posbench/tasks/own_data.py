"""Your own file, a JSON object per line: items or documents with a gold one, choices, or a long text."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Any, ClassVar, NamedTuple, get_type_hints

from annotated_types import Ge, MaxLen, MinLen
from pydantic import BaseModel, Field, Strict, StringConstraints, ValidationError

from posbench.errors import Faults, UserError
from posbench.schema import Several, describe_type
from posbench.tasks.base import Example
from posbench.tasks.items import Positions, gold_indices
from posbench.tasks.logs import Log, LoggedQuestion, read_log
from posbench.tasks.logs import fields as log_fields
from posbench.tasks.logs.base import Entry, Skips
from posbench.tasks.logs.entries import read_entries
from posbench.tasks.logs.read import recognise
from posbench.tasks.nq_multidoc import INSTRUCTION
from posbench.tasks.own_questions import (
    Match,
    OwnQuestions,
    document_text,
    fill_template,
    short_answer_note,
)
from posbench.tasks.reading import (
    Line,
    check_subsets,
    need_text,
    parse_rows,
    raise_faults,
    read_data_rows,
    refuse,
)
from posbench.tasks.scorers import contains_answer

Text = Annotated[str, Field(pattern=r"\S")]
Index = Annotated[int, Strict(), Ge(0)]
Answer = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Answers = Annotated[tuple[Answer, ...], MinLen(1)]
DEFAULT_TEMPLATE = "{context}\n\nQuestion: {question}\nAnswer:"
TASK_BY_FIELD = {"ordered_kv_records": "kv_retrieval"}
"""A field of a benchmark's own files, and the task that reads them."""
LOG_SUFFIXES = (".csv", ".tsv")
"""Suffixes of files whose cells are texts: this task's own form has lists."""
LOG_FIELDS = {
    *log_fields.QUESTION,
    *log_fields.REFERENCES,
    *log_fields.REPLY,
    *log_fields.GOLD_IDS,
    *log_fields.GOLD_INDICES,
    *log_fields.GOLD_TEXTS,
    log_fields.ANSWER,
} - {"question", "answers", "gold", "id"}
"""Fields of retrieval logs that this task's own form does not have."""
RESERVED_SUBSETS = ("all", "nan")
"""Forbidden names of subsets: the average over subsets, and the name that tables read as missing."""


class Record(BaseModel):
    """A line of a file; fields of other names are left alone."""

    # in words
    kind: ClassVar[str]
    # the field that defines the kind: the parts of the prompt besides the question
    holds: ClassVar[str]
    template: ClassVar[str] = DEFAULT_TEMPLATE

    question: Text = Field(description="what is asked")
    id: Text = Field(
        "", description="unique name of the example; by default the line's number"
    )
    subset: str = Field("", description="a group of examples, also scored separately")

    def parts(self) -> list[Any]:
        """The parts of the prompt besides the question."""
        return list(getattr(self, self.holds))

    def text(self, number: int, part: Any) -> str:
        """Render the part at index ``number`` (from 0) for the prompt."""
        return str(part)

    def contents(self) -> str:
        """The content without id and subset: lines with equal contents ask the same question."""
        return self.model_dump_json(exclude={"id", "subset"})


class RecordWithGold(Record):
    """Several items or documents of which one holds the answer."""

    gold: Index = Field(
        description="index of the one with the answer, from 0; posbench moves it"
    )
    other_gold: tuple[Index, ...] = Field(
        (),
        description="indices of others that the answer needs, from 0; they stay among the rest",
    )
    answers: Answers = Field(
        description="accepted answers; one of them must occur in the reply"
    )

    def gold_has_answer(self, match: Match) -> bool:
        """Whether an answer occurs in a gold item."""
        return self._has_answer([self.gold, *self.other_gold], match)

    def another_has_answer(self, match: Match) -> bool:
        """Whether an answer occurs in an item that is not gold."""
        gold = {self.gold, *self.other_gold}
        others = (i for i in range(len(self.parts())) if i not in gold)
        return self._has_answer(others, match)

    def _has_answer(self, indices: Iterable[int], match: Match) -> bool:
        """Whether an answer occurs in some of the items."""
        parts = self.parts()
        whole_words = match == "words"
        return any(
            contains_answer(
                self.text(0, parts[i]), self.answers, whole_words=whole_words
            )
            for i in indices
        )


class Items(RecordWithGold):
    """Items of a line each."""

    kind: ClassVar[str] = "items with a gold one"
    holds: ClassVar[str] = "items"

    items: Annotated[tuple[Text, ...], MinLen(2)] = Field(
        description="pairs, passages, ... of one prompt"
    )


class Document(BaseModel):
    """One of several documents."""

    text: Text
    title: str = ""


class Documents(RecordWithGold):
    """Documents in the form of Liu et al. 2023."""

    kind: ClassVar[str] = "documents with a gold one"
    holds: ClassVar[str] = "documents"
    template: ClassVar[str] = f"{INSTRUCTION}\n\n{DEFAULT_TEMPLATE}"

    documents: Annotated[tuple[Document, ...], MinLen(2)] = Field(
        description="documents of one prompt; titles are optional"
    )

    def text(self, number: int, part: Document) -> str:
        """Render the document with its number, from 1."""
        return document_text(number, part.title, part.text)


class Choices(Record):
    """Options with letters."""

    kind: ClassVar[str] = "choices"
    holds: ClassVar[str] = "choices"
    template: ClassVar[str] = "{question}\n{context}\nAnswer:"

    choices: Annotated[tuple[Text, ...], MinLen(2), MaxLen(len(ascii_uppercase))] = (
        Field(
            description="the options, lettered A, B, ...; the likeliest letter is the reply"
        )
    )
    gold: Index = Field(description="index of the right one, from 0; it stays in place")

    def text(self, number: int, part: str) -> str:
        """Render the choice with its letter."""
        return f"{ascii_uppercase[number]}. {part}"


class LongText(Record):
    """One text."""

    kind: ClassVar[str] = "long text"
    holds: ClassVar[str] = "context"

    context: Text = Field(description="the text that the question is about")
    answers: Answers = Field(
        description="accepted answers; one of them must occur in the reply"
    )

    def parts(self) -> list[str]:
        """The text alone."""
        return [self.context]


KINDS: dict[str, type[Record]] = {
    kind.holds: kind for kind in (Items, Documents, Choices, LongText)
}


class ParsedFile(NamedTuple):
    """The content of a file.

    Attributes:
        kind: The kind of its records.
        records: The records.
        unread: Fields of the lines that nothing reads.
        lines: Number of the line of each record, by its id.
        log: The retrieval log that the records were taken from; None: a file of this task's own form.
        notes: What was not taken from the log, and why.
    """

    kind: type[Record]
    records: list[Any]
    unread: list[str]
    lines: dict[str, int]
    log: Log | None = None
    notes: tuple[str, ...] = ()

    @property
    def moves(self) -> bool:
        """Whether there is a gold one to move."""
        return issubclass(self.kind, RecordWithGold)

    @property
    def sizes(self) -> list[int]:
        """Items, documents or choices of every record."""
        return [len(record.parts()) for record in self.records]


def parse_file(file: Path) -> ParsedFile:
    """Parse the records of a file, all of one kind.

    Raises:
        UserError: It cannot be read, is empty, or is of no kind; or all faults of its lines together.
    """
    kind = _kind_of(file)
    faults = Faults()
    names: set[str] = set()
    line_of_id: dict[str, int] = {}
    subsets: list[str] = []

    def parse(line: Line) -> Record:
        names.update(line)
        record = _record(kind, line)
        name = record.id or str(line.number)
        first_line = line_of_id.setdefault(name, line.number)
        if first_line != line.number:
            wrong = f'field "id" is {name!r}, as on line {first_line}'
            raise line.fault(wrong, "an id that occurs once")
        subsets.append(record.subset)
        is_named = bool(record.subset)
        if record.subset in RESERVED_SUBSETS or is_named != bool(subsets[0]):
            reserved = " or ".join(RESERVED_SUBSETS)
            allowed = f"a name on every line or on none, but not {reserved}"
            raise line.fault(f'field "subset" is {record.subset!r}', allowed)
        return record.model_copy(update={"id": name})

    records = parse_rows(read_data_rows("path", file, faults=faults), parse, faults)
    unread = sorted(names - kind.model_fields.keys())
    return ParsedFile(kind, records, unread, line_of_id)


def holds_log(file: Path) -> bool:
    """Whether a file or folder is a retrieval log, not one of this task's own form (nor one that cannot be read)."""
    if file.is_dir() or file.suffix in LOG_SUFFIXES:
        return True
    if file.is_file() and file.suffix != ".gz":
        # A file that cannot be opened is refused by whoever reads it.
        with suppress(OSError), file.open("rb") as stream:
            need_text(file, "path", stream.read(4))
    try:
        entries = read_entries(file, "path", Skips()).entries
    except UserError:
        return False
    names_gold = any("gold" in entry.fields for entry in entries)
    for entry in entries:
        for name, kind in KINDS.items():
            # An empty list says nothing of its kind.
            if entry.fields.get(name, []) != []:
                # Documents without gold are those of a log, which finds it by the answers.
                is_log = kind is Documents and not names_gold and recognise([entry])
                return bool(is_log) or not _has_own_form(kind, entry)
    return recognise(entries) is not None


def _has_own_form(kind: type[Record], entry: Entry) -> bool:
    """Whether a line with a field of a kind is meant to be of that kind, though it may have faults."""
    fields = entry.fields
    if kind in (Items, Choices) or recognise([entry]) is None:
        return True
    if kind is LongText:
        return isinstance(fields["context"], str)
    try:
        kind.model_validate(fields)
    except ValidationError:
        documents = fields["documents"]
        items = documents if isinstance(documents, list) else []
        has_own_documents = all(
            isinstance(item, dict) and item.keys() <= {"text", "title"}
            for item in items
        )
        return has_own_documents and not LOG_FIELDS & fields.keys()
    return True


def records_of_log(log: Log, path: str) -> ParsedFile:
    """The questions of a retrieval log that have a reference and a gold document, as documents of which one moves.

    Of several gold documents the first in the log moves.

    Args:
        log: The log.
        path: Its path, for messages.

    Raises:
        UserError: No question has both.
    """
    records = []
    lines = {}
    skipped: Counter[str] = Counter()
    for name, question in zip(log.names, log.questions, strict=True):
        reason = _why_not_moved(question)
        if reason:
            skipped[reason] += 1
            continue
        gold, *other_gold = question.gold or ()
        documents = [
            Document(text=document.text, title=document.title or "")
            for document in question.documents
        ]
        record = Documents(
            question=question.question,
            id=name,
            subset="",
            gold=gold,
            other_gold=tuple(other_gold),
            answers=question.answers or (),
            documents=tuple(documents),
        )
        if _copy_of_gold(record, gold) is not None:
            skipped["a second copy of the gold document"] += 1
            continue
        records.append(record)
        lines[name] = question.line
    total = len(log.questions)
    notes = [
        f"{count} of {total} questions are left out: {reason}"
        for reason, count in skipped.items()
    ]
    if not records:
        value = f"{path} ({log.shape})"
        allowed = f"a log with references, and with gold documents that were retrieved; {', '.join(notes)}"
        hint = (
            "give task.references=FILE, or ask in the logged order: task=retrieval_log"
        )
        refuse("path", value, allowed, hint)
    num_several = sum(bool(record.other_gold) for record in records)
    if num_several:
        notes.append(
            f"{num_several} of {len(records)} questions have several gold documents: the first moves, the others stay"
        )
    return ParsedFile(Documents, records, [], lines, log, tuple(notes))


def _why_not_moved(question: LoggedQuestion) -> str:
    """Why a logged question has no gold document to move; empty if it has one."""
    if question.answers is None:
        return "no reference"
    if question.gold is None:
        return "no gold document is known"
    if not question.gold:
        return "the gold document was not retrieved"
    return "a single document" if len(question.documents) < 2 else ""


def _copy_of_gold(record: Record, gold: int) -> int | None:
    """Where the gold item stands a second time, called gold or not.

    Wherever the gold one is moved it would be read there; a second right choice would count as wrong.
    """
    texts = [record.text(0, part).strip() for part in record.parts()]
    copies = (
        index
        for index, text in enumerate(texts)
        if index != gold and text == texts[gold]
    )
    return next(copies, None)


def _kind_of(file: Path) -> type[Record]:
    """Return the kind of a file by the first field that belongs to one kind; UserError if there is none."""
    faults = Faults()
    lines = [line for _, line in read_data_rows("path", file, faults=faults)]
    if not lines:
        raise_faults(faults)
    for line in lines:
        for name, kind in KINDS.items():
            if name in line:
                return kind
    content = f"{file} with fields {', '.join(lines[0]) or 'none'}"
    hint = "docs/own_data.md has an example of each"
    tasks = [task for name, task in TASK_BY_FIELD.items() if name in lines[0]]
    if tasks:
        hint = f"task={tasks[0]} reads such a file"
    refuse("path", content, f"lines with one of the fields {', '.join(KINDS)}", hint)


def _record(kind: type[Record], line: Line) -> Record:
    """Return a line as a record; UserError with the faults of its fields."""
    try:
        record = kind.model_validate(line)
    except ValidationError as error:
        _field_faults(kind, line, error).raise_any()
        raise AssertionError("a validation error without an error") from error
    count = len(record.parts())
    gold = getattr(record, "gold", 0)
    if gold >= count:
        allowed = f'a place in "{kind.holds}", from 0 to {count - 1}'
        raise line.fault(f'field "gold" is {gold}', allowed)
    other_gold = getattr(record, "other_gold", ())
    all_gold = {gold, *other_gold}
    if max(all_gold) >= count or len(all_gold) <= len(other_gold):
        allowed = f'different places in "{kind.holds}", from 0 to {count - 1}, without gold ({gold})'
        raise line.fault(f'field "other_gold" is {list(other_gold)}', allowed)
    if isinstance(record, RecordWithGold | Choices):
        copy = _copy_of_gold(record, gold)
        if copy is not None:
            wrong = f'field "{kind.holds}[{copy}]" repeats the gold one'
            raise line.fault(wrong, "a gold one that stands at one place alone")
    return record


def _field_faults(kind: type[Record], line: Line, error: ValidationError) -> Faults:
    """The fields of a line that pydantic refuses, with the first fault of each."""
    hints = get_type_hints(kind, include_extras=True)
    # The first of several errors of a field says enough.
    details_of: dict[str, Any] = {}
    for details in error.errors():
        details_of.setdefault(str(details["loc"][0]), details)
    faults = Faults()
    for name, details in details_of.items():
        path = "".join(
            f"[{key}]" if isinstance(key, int) else f".{key}"
            for key in details["loc"][1:]
        )
        state = f"is {reprlib.repr(details['input'])}"
        if details["type"] == "missing":
            state = "is missing"
        allowed = describe_type(hints[name])
        if details["type"] == "string_pattern_mismatch":
            allowed += ", not blank"
        faults.found.append(line.fault(f'field "{name}{path}" {state}', allowed))
    return faults


def order_with_gold_at(
    record: RecordWithGold, position: int, num_items: int
) -> list[int]:
    """Indices in a record of the items of a prompt, in its order, the gold one at ``position``.

    Args:
        record: The record.
        position: 0-based index in the prompt.
        num_items: Items of the prompt; of a longer record the last that are not gold are left out.
    """
    indices = range(len(record.parts()))
    gold = {record.gold, *record.other_gold}
    distractors = [index for index in indices if index not in gold]
    kept = gold.union(distractors[: num_items - len(gold)])
    others = [index for index in indices if index in kept and index != record.gold]
    return [*others[:position], record.gold, *others[position:]]


@dataclass(frozen=True, kw_only=True)
class OwnData(OwnQuestions):
    """Your own questions, from a file whose fields define its kind, or from a retrieval log; see docs/own_data.md.

    Args:
        path: The file, with a JSON object per line (``.jsonl``, ``.jsonl.gz``), or the retrieval log, of which the
            questions with a reference and a gold document are asked.
        references: File of reference answers for a retrieval log that holds none.
        subsets: Names of the subsets to ask; None: all.
        positions: Positions of the gold item or document; each question is asked at every one.
        items_per_prompt: From longer lists the last non-gold items are left out. None: all, if every line has the same
            number. A line with more gold items is refused.
        template: The prompt, with ``{context}`` (the parts besides the question) and ``{question}``; None: the kind's
            template.
        separator: Text between items, documents or choices.
        match: ``words``: an answer must occur in the reply as whole words, so that "no" is not found in "know", nor
            "42" in "1429"; ``text``: it may be part of a word. In scripts without spaces both are the same.
        calibration_share: Share of the questions that searches and their checks ask, and the evaluation does not.
        seed: Chooses these questions.

    Score: 1 if an accepted answer occurs in the reply, letter case ignored, also where the reply denies it ("not Mark
    Twain"); of choices, if the likeliest letter is the right one.
    """

    version: ClassVar[str] = "4"  # 4: an answer occurs in a reply as whole words

    sizes: ClassVar[tuple[str, ...]] = ("items_per_prompt", "items_per_prompt")

    name: str = "own_data"
    subsets: tuple[str, ...] | None = None
    positions: Positions = ("0%", "25%", "50%", "75%", "100%")
    items_per_prompt: Several | None = None

    @cached_property
    def own(self) -> ParsedFile:
        """The content of the file, see :func:`parse_file`, or of a retrieval log."""
        file = self.place()
        if holds_log(file):
            return records_of_log(read_log(file, self.references_file), str(self.path))
        if self.references:
            allowed = f"no references: {self.path} is no retrieval log, and has its own answers"
            refuse("references", self.references, allowed, "task.references=null")
        return parse_file(file)

    @property
    def items(self) -> int | None:  # type: ignore[override]
        """Items or documents per prompt; None where no gold one is moved.

        Raises:
            UserError: The lists differ in length, or are too short.
        """
        if not self.own.moves:
            return None
        shortest = min(self.own.sizes)
        longest = max(self.own.sizes)
        count = self.items_per_prompt or longest
        if shortest < count:
            key = "items_per_prompt"
            allowed = f"at most {shortest}, as some lines of {self.path} have no more (others {longest})"
            refuse(key, self.items_per_prompt, allowed, f"set task.{key}={shortest}")
        most_gold = max(1 + len(record.other_gold) for record in self.own.records)
        if count < most_gold:
            allowed = f"at least {most_gold}, the most gold {self.own.kind.holds} of a line of {self.path}"
            refuse(
                "items_per_prompt",
                count,
                allowed,
                f"set task.items_per_prompt={most_gold}",
            )
        return count

    @property
    def gold_positions(self) -> list[int]:
        """See :meth:`Task.gold_positions`; empty for a file of choices or long texts."""
        items = self.items
        if items is None:
            return []
        return gold_indices("positions", self.positions, "items_per_prompt", items)

    @cached_property
    def _question_ids(self) -> dict[str, str]:
        """Map the id of each record to the id of the first one with the same contents."""
        first_id: dict[str, str] = {}
        return {
            record.id: first_id.setdefault(record.contents(), record.id)
            for record in self.own.records
        }

    def notes(self) -> list[str]:
        """See :meth:`Task.notes`."""
        notes = [*self.own.log.notes(), *self.own.notes] if self.own.log else []
        records = self.own.records
        num_repeated = sum(name != first for name, first in self._question_ids.items())
        if num_repeated:
            notes.append(
                f"{num_repeated} of {len(records)} lines repeat an earlier one: intervals count them as one question"
            )
        answers = [getattr(record, "answers", ()) for record in records]
        notes += [*short_answer_note(answers, self.match), *self.split_notes()]
        if not self.own.moves:
            return notes
        items = self.own.kind.holds
        num_wrong = sum(not record.gold_has_answer(self.match) for record in records)
        if num_wrong:
            notes.append(
                f"{num_wrong} of {len(records)} gold {items} hold none of their answers: is gold counted from 0?"
            )
        num_doubled = sum(record.another_has_answer(self.match) for record in records)
        if num_doubled:
            notes.append(
                f"in {num_doubled} of {len(records)} lines {items} that are not gold hold an answer, too: it has more "
                "than one place, and a bias shows less"
            )
        return notes

    def questions(self) -> Iterator[Example]:
        """See :meth:`EvaluationOnly.questions`."""
        items = self.items
        subsets = list(dict.fromkeys(record.subset for record in self.own.records))
        if self.subsets is not None:
            check_subsets(self.subsets, subsets)
        positions = self.gold_positions
        for record in self.own.records:
            if record.subset not in (self.subsets or subsets):
                continue
            parts = record.parts()
            if items is None:
                yield self._example(record, parts, None)
                continue
            for position in positions:
                order = order_with_gold_at(record, position, items)
                yield self._example(record, [parts[i] for i in order], position, order)

    def how_to_shorten(self, example: Example) -> str:
        """See :meth:`Task.how_to_shorten`: names the line, and its longest item or document."""
        if not example.items:
            line = self.own.lines[example.id]
            return f"{super().how_to_shorten(example)}, or shorten line {line} of {self.path}"
        name = example.id.partition("-")[2]
        record = next(record for record in self.own.records if record.id == name)
        texts = [record.text(0, part) for part in record.parts()]
        longest = max(range(len(texts)), key=lambda index: len(texts[index]))
        return (
            f"shorten {self.own.kind.holds}[{longest}] on line {self.own.lines[name]} of {self.path} "
            f"({len(texts[longest]):,} characters), or split it into shorter ones"
        )

    def _example(
        self,
        record: Any,
        parts: list[Any],
        position: int | None,
        order: Sequence[int] = (),
    ) -> Example:
        """Return the example that shows some parts of a record.

        Args:
            record: The record.
            parts: The parts shown, in the order of the prompt.
            position: Position of the gold part; None if none is moved.
            order: Index in the record of each part, if the gold one is moved.
        """
        template = self.template or record.template
        texts = [record.text(number, part) for number, part in enumerate(parts)]
        filled = fill_template(template, record.question, texts, self.separator)
        if isinstance(record, Choices):
            choices = tuple(f" {letter}" for letter in ascii_uppercase[: len(parts)])
            return Example(
                id=record.id,
                prompt=filled.prompt,
                question=filled.question,
                answers=(choices[record.gold].strip(),),
                subset=record.subset,
                choices=choices,
                chat=False,
                cluster=self._question_ids[record.id],
            )
        if position is None:
            return Example(
                id=record.id,
                prompt=filled.prompt,
                question=filled.question,
                answers=record.answers,
                subset=record.subset,
                document=filled.items[0],
                cluster=self._question_ids[record.id],
            )
        return Example(
            id=f"{position}-{record.id}",
            prompt=filled.prompt,
            question=filled.question,
            answers=record.answers,
            gold_position=position,
            other_gold=tuple(map(order.index, record.other_gold)),
            items=filled.items,
            cluster=self._question_ids[record.id],
            subset=record.subset,
        )
