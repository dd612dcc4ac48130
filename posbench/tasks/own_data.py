"""Your own file, a JSON object per line: items or documents with a gold one, choices, or a long text."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Any, ClassVar, NamedTuple, get_type_hints

from annotated_types import Ge, MaxLen, MinLen
from pydantic import BaseModel, Field, Strict, ValidationError

from posbench.errors import Faults
from posbench.files.sources import Source
from posbench.schema import Count, Several, words
from posbench.tasks.base import EvaluationOnly, Example
from posbench.tasks.items import Positions, gold_indices, joined
from posbench.tasks.nq_multidoc import INSTRUCTION
from posbench.tasks.reading import Line, check_names, each, refuse, rows

Text = Annotated[str, Field(pattern=r"\S")]
Place = Annotated[int, Strict(), Ge(0)]
Answers = Annotated[tuple[Text, ...], MinLen(1)]
ASKED = "{context}\n\nQuestion: {question}\nAnswer:"
ELSEWHERE = {"ordered_kv_records": "kv_retrieval", "ctxs": "nq_multidoc"}
"""A field of a benchmark's own files, and the task that reads them."""


class Record(BaseModel):
    """A line of a file; fields of other names are left alone."""

    kind: ClassVar[str]  # in words
    holds: ClassVar[
        str
    ]  # the field that tells the kind: what the prompt shows beside the question
    template: ClassVar[str] = ASKED

    question: Text = Field(description="what is asked")
    id: Text = Field(
        "", description="name of the example, which occurs once; else the line's number"
    )
    subset: str = Field(
        "", description="a group of examples, which is scored apart, too"
    )

    def parts(self) -> list[Any]:
        """What the prompt shows beside the question, one by one."""
        return list(getattr(self, self.holds))

    def text(self, number: int, part: Any) -> str:
        """A part as the prompt has it where it is the one of that number, from 0."""
        return str(part)


class Moved(Record):
    """Several of which one holds the answer."""

    gold: Place = Field(
        description="place from 0 of the one with the answer, which posbench moves"
    )
    answers: Answers = Field(
        description="accepted answers, one of which has to occur in the reply"
    )


class Items(Moved):
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


class Documents(Moved):
    """Documents in the form of Liu et al. 2023."""

    kind: ClassVar[str] = "documents with a gold one"
    holds: ClassVar[str] = "documents"
    template: ClassVar[str] = f"{INSTRUCTION}\n\n{ASKED}"

    documents: Annotated[tuple[Document, ...], MinLen(2)] = Field(
        description="those of one prompt; their titles may be left out"
    )

    def text(self, number: int, part: Document) -> str:
        """With its number, from 1."""
        return f"Document [{number + 1}]{f'(Title: {part.title})' if part.title else ''} {part.text}"


class Choices(Record):
    """Options with letters."""

    kind: ClassVar[str] = "choices"
    holds: ClassVar[str] = "choices"
    template: ClassVar[str] = "{question}\n{context}\nAnswer:"

    choices: Annotated[tuple[Text, ...], MinLen(2), MaxLen(len(ascii_uppercase))] = (
        Field(
            description="the options, which get the letters A, B, ...; the likeliest letter is the reply"
        )
    )
    gold: Place = Field(
        description="place from 0 of the right one, which stays where it is"
    )

    def text(self, number: int, part: str) -> str:
        """With its letter."""
        return f"{ascii_uppercase[number]}. {part}"


class LongText(Record):
    """One text."""

    kind: ClassVar[str] = "long text"
    holds: ClassVar[str] = "context"

    context: Text = Field(description="the text that the question is about")
    answers: Answers = Field(
        description="accepted answers, one of which has to occur in the reply"
    )

    def parts(self) -> list[str]:
        """The text alone."""
        return [self.context]


KINDS: dict[str, type[Record]] = {
    kind.holds: kind for kind in (Items, Documents, Choices, LongText)
}


def schema(kind: type[Record]) -> list[tuple[str, str, str]]:
    """The fields of a kind: name, form and meaning."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        (
            name,
            words(hints[name]) + ("" if field.is_required() else ", or left out"),
            str(field.description),
        )
        for name, field in kind.model_fields.items()
    ]


class Own(NamedTuple):
    """What a file holds: its kind, its records, and the fields that nothing reads."""

    kind: type[Record]
    records: list[Any]
    unread: list[str]

    @property
    def moves(self) -> bool:
        """Whether there is a gold one to move."""
        return issubclass(self.kind, Moved)

    @property
    def sizes(self) -> list[int]:
        """Items, documents or choices of every record."""
        return [len(record.parts()) for record in self.records]


def read(file: Path) -> Own:
    """The records of a file, all of one kind.

    Raises:
        UserError: It cannot be read, is empty, or is of no kind; or what is wrong with its lines, together.
    """
    faults = Faults()
    names = dict[str, None]()
    seen = dict[str, int]()
    first = [row for _, row in rows("path", file, faults=Faults())]
    kind = next((KINDS[name] for row in first for name in KINDS if name in row), None)
    if first and kind is None:
        known = next(
            (task for name, task in ELSEWHERE.items() if name in first[0]), None
        )
        hint = (
            f"task={known} reads such a file"
            if known
            else "docs/own_data.md has an example of each"
        )
        shown = f"{file} with fields {', '.join(first[0]) or 'none'}"
        refuse("path", shown, f"lines with one of the fields {', '.join(KINDS)}", hint)

    def make(row: Line) -> Record:
        assert kind is not None, "there is a line"
        names.update(dict.fromkeys(row))
        record = _record(kind, row)
        name = record.id or str(row.number)
        if (other := seen.setdefault(name, row.number)) != row.number:
            raise row.fault(
                f'field "id" is {name!r}, as on line {other}', "an id that occurs once"
            )
        return record.model_copy(update={"id": name})

    records = each(rows("path", file, faults=faults), make, faults)
    assert kind is not None, "a file without lines is refused"
    return Own(kind, records, sorted(names.keys() - kind.model_fields.keys()))


def _record(kind: type[Record], row: Line) -> Record:
    faults = Faults()
    hints = get_type_hints(kind, include_extras=True)
    try:
        record = kind.model_validate(row)
    except ValidationError as error:
        # The first word on a field is as good as the others.
        for name, one in {
            str(one["loc"][0]): one for one in reversed(error.errors())
        }.items():
            at = "".join(
                f"[{part}]" if isinstance(part, int) else f".{part}"
                for part in one["loc"][1:]
            )
            told = (
                "is missing"
                if one["type"] == "missing"
                else f"is {reprlib.repr(one['input'])}"
            )
            blank = ", not blank" if one["type"] == "string_pattern_mismatch" else ""
            faults.found.insert(
                0, row.fault(f'field "{name}{at}" {told}', words(hints[name]) + blank)
            )
        faults.raise_any()
        raise AssertionError("a validation error without an error") from error
    count = len(record.parts())
    gold = getattr(record, "gold", 0)
    if gold >= count:
        raise row.fault(
            f'field "gold" is {gold}',
            f'a place in "{kind.holds}", from 0 to {count - 1}',
        )
    return record


@dataclass(frozen=True, kw_only=True)
class OwnData(EvaluationOnly):
    """Your own questions, from a file that tells its kind by its fields; see docs/own_data.md.

    Args:
        path: The file, with a JSON object per line (``.jsonl``, ``.jsonl.gz``).
        subsets: Those that are asked, by name; None: all.
        positions: Where the gold item or document is put; each question is asked at every one.
        items_per_prompt: Of longer lists the last ones that are not gold are left out. None: all, where every
            line has as many.
        template: The prompt, with ``{context}`` (what stands beside the question) and ``{question}``; None:
            that of the kind.
        separator: What stands between items, documents or choices.

    Score: 1 if an accepted answer occurs in the reply, letter case ignored; of choices, if the likeliest
    letter is the right one.
    """

    metric: ClassVar[str] = "accuracy"
    source: ClassVar[str] = "your file"
    licence: ClassVar[str] = "yours"
    size: ClassVar[str] = "what the file holds"

    name: str = "own_data"
    max_new_tokens: Count = 100
    subsets: tuple[str, ...] | None = None
    positions: Positions = ("0%", "25%", "50%", "75%", "100%")
    items_per_prompt: Several | None = None
    template: str | None = None
    separator: str = "\n"

    def __post_init__(self) -> None:
        if not self.path:
            hint = "posbench check-data FILE; docs/own_data.md shows what it holds"
            refuse("path", self.path, "your file", hint)
        if self.template is not None and self.template.count("{context}") != 1:
            hint = "or leave it out: task.template=null"
            refuse(
                "template",
                self.template,
                "text with {context} once, and {question}",
                hint,
            )

    def official(self) -> tuple[Source, ...]:
        """None."""
        return ()

    @cached_property
    def own(self) -> Own:
        """What the file holds; see :func:`read`."""
        return read(self.place())

    @property
    def items(self) -> int | None:  # type: ignore[override]
        """Items or documents per prompt; None where no gold one is moved.

        Raises:
            UserError: The lists differ in length, or are too short.
        """
        if not self.own.moves:
            return None
        sizes = self.own.sizes
        field = "items_per_prompt"
        given = self.items_per_prompt or max(sizes)
        if min(sizes) < given:
            allowed = f"at most {min(sizes)}, as some lines of {self.path} have no more (others {max(sizes)})"
            refuse(
                field, self.items_per_prompt, allowed, f"set task.{field}={min(sizes)}"
            )
        return given

    def questions(self) -> Iterator[Example]:
        """See :meth:`EvaluationOnly.questions`."""
        size = self.items
        there = dict.fromkeys(record.subset for record in self.own.records)
        if self.subsets is not None:
            check_names("subsets", self.subsets, list(there))
        for record in (
            r for r in self.own.records if r.subset in (self.subsets or there)
        ):
            parts = record.parts()
            if size is None:
                yield self._example(record, parts, None)
                continue
            gold = parts.pop(record.gold)
            for at in gold_indices(
                "positions", self.positions, "items_per_prompt", size
            ):
                yield self._example(record, [*parts[:at], gold, *parts[at:]][:size], at)

    def score(self, example: Example, text: str) -> dict[str, float]:
        """1 if an answer occurs in the reply, or is the letter chosen."""
        if example.choices:
            return {"accuracy": float(text.strip() in example.answers)}
        return {
            "accuracy": float(
                any(answer.lower() in text.lower() for answer in example.answers)
            )
        }

    def _example(self, record: Any, parts: list[Any], at: int | None) -> Example:
        template = self.template or record.template
        head, tail = (
            part.replace("{question}", record.question)
            for part in template.split("{context}")
        )
        shown = [record.text(number, part) for number, part in enumerate(parts)]
        prompt, spans = joined(head, shown, self.separator, tail)
        facts: dict[str, Any] = {
            "id": record.id,
            "prompt": prompt,
            "subset": record.subset,
        }
        if isinstance(record, Choices):
            choices = tuple(f" {letter}" for letter in ascii_uppercase[: len(parts)])
            return Example(
                answers=(choices[record.gold].strip(),),
                choices=choices,
                chat=False,
                **facts,
            )
        if at is None:
            return Example(answers=record.answers, document=spans[0], **facts)
        facts |= {"id": f"{at}-{record.id}", "cluster": record.id}
        return Example(answers=record.answers, gold_position=at, items=spans, **facts)
