"""Read a retrieval log: recognise its shape, join references, and find the gold documents."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from posbench.tasks.logs import fields as names
from posbench.tasks.logs.base import (
    Entry,
    Log,
    LoggedQuestion,
    Skip,
    Skips,
    indices_of,
    plural,
)
from posbench.tasks.logs.entries import Entries, read_entries
from posbench.tasks.logs.fields import (
    as_answers,
    as_text,
    comparable,
    first,
    has_distances,
    has_unusable_gold,
    read_question,
    unused_parts,
)
from posbench.tasks.logs.folder import CONTENT, read_folder
from posbench.tasks.logs.order import seems_small_first
from posbench.tasks.logs.shapes import SHAPES, Shape, extract_plain
from posbench.tasks.reading import refuse
from posbench.tasks.scorers import occurs_as_word

FOLDER = Shape(
    "BEIR folder with a TREC run",
    CONTENT,
    lambda entry: False,
    lambda entry, seen: entry,
)
TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
REFERENCE_LINE = '{"question": "...", "answers": ["..."]}, or CSV with the columns question and answers'
UNUSABLE_GOLD = (
    "gold documents are named by ids that the documents do not have, and not used"
)
FIELDS_AND_SHAPES = (
    "the fields question, contexts and answers; docs/own_data.md shows each shape"
)


def read_log(path: Path | str, references: Path | str | None = None) -> Log:
    """Read a retrieval log of any known shape; the last log is not read again while its files stay as they are.

    Args:
        path: A file (JSON lines, a JSON array, CSV, parquet) or a BEIR folder.
        references: A file with reference answers by question or id (CSV or JSON lines), which replace those of the
            log.

    Raises:
        UserError: A file cannot be read, or is of no known shape, or none of its lines can be read.
    """
    file = Path(path).expanduser()
    of_references = Path(references).expanduser() if references is not None else None
    stamps = [_stamps(f) for f in (file, of_references) if f is not None]
    return _read_log(file, of_references, *stamps)


def _stamps(place: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Name, inode, size and time of a file, or of all files of a folder; empty where there is none."""
    files = sorted(place.rglob("*")) if place.is_dir() else [place]
    stamps = []
    for file in files:
        if file.is_file():
            stat = file.stat()
            stamps.append((str(file), stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(stamps)


@lru_cache(maxsize=1)
def _read_log(file: Path, references: Path | None, *stamps: object) -> Log:
    """Read a log, see :func:`read_log`; ``stamps`` change with the content of its files."""
    skips = Skips()
    if file.is_dir():
        shape = FOLDER
        entries = read_folder(file, skips)
        unit = "query"
    else:
        as_written = read_entries(file, "path", skips)
        found = _with_known_names(as_written)
        shape = _shape_of(file, found, skips)
        unit = shape.unit or found.unit
        entries = shape.gather(found.entries, skips)
    skips.right = shape.right
    seen = frozenset(name for entry in entries for name in entry.fields)
    if references is not None:
        # With a file of references, the field ``answer`` is the model's reply.
        seen |= frozenset(names.REFERENCES)
    questions = []
    remarks = Skips()
    num_distances = 0
    is_cell = file.name.lower().endswith(TABLES)
    for number, fields in entries:
        with skips.collecting(number):
            extracted = shape.extract(fields, seen)
            question = read_question(number, extracted, is_cell=is_cell)
            questions.append(question)
            if extracted.get("remark"):
                remarks.add(number, extracted["remark"])
            if has_unusable_gold(extracted, question):
                remarks.add(number, UNUSABLE_GOLD)
            for remark in unused_parts(extracted, question):
                remarks.add(number, remark)
            num_distances += has_distances(extracted.get("documents"))
    problems = skips.problems()
    num_read = len(questions) + sum(problem.count for problem in problems)
    if not questions:
        _refuse_all(file, shape, unit, num_read, skips)
    lines = [
        f"{remark.reason}: {remark.count} of {num_read} {plural(unit)}, the first is {unit} {remark.line}"
        for remark in remarks.problems()
    ]
    if references is None:
        lines += _reference_remarks(shape, seen, questions)
    else:
        questions, line = _join(questions, references)
        lines.append(line)
    questions = [_with_gold(question) for question in questions]
    lines += _gold_remarks(questions)
    num_single = sum(len(question.documents) == 1 for question in questions)
    if num_single:
        text = f"{num_single} of {len(questions)} questions have a single document, so that no order can change them"
        lines.append(text)
    are_distances = 2 * num_distances > len(questions)
    num_rising = sum(map(_rises, questions))
    if not are_distances:
        are_distances = seems_small_first(question.scores for question in questions)
    if num_rising:
        reading = "small is read as good" if are_distances else "large is read as good"
        text = f"scores rise along the list in {num_rising} of {len(questions)} lists: distances? ({reading})"
        lines.append(text)
    return Log(
        shape=shape.name,
        unit=unit,
        num_read=num_read,
        questions=tuple(questions),
        problems=problems,
        remarks=tuple(lines),
        are_distances=are_distances,
    )


def recognise(entries: Iterable[Entry]) -> Shape | None:
    """The shape that most of the entries have; None if none has any."""
    votes: Counter[int] = Counter()
    for entry in entries:
        for index, shape in enumerate(SHAPES):
            if shape.recognises(entry.fields):
                votes[index] += 1
                break
    if not votes:
        return None
    index = min(votes, key=lambda i: (-votes[i], i))
    return SHAPES[index]


def _with_known_names(found: Entries) -> Entries:
    """The entries, of no shape as written, with their fields in small letters: ``Ground Truth`` is ``ground_truth``."""
    if recognise(found.entries) is not None:
        return found
    entries = [
        Entry(entry.number, _in_small_letters(entry.fields)) for entry in found.entries
    ]
    return found._replace(entries=entries)


def _in_small_letters(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields by their names in small letters and underscores; as they were where two names would be the same."""
    renamed = {
        re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_"): value
        for name, value in fields.items()
    }
    return renamed if len(renamed) == len(fields) else fields


def _shape_of(file: Path, found: Entries, skips: Skips) -> Shape:
    """The shape of a file; UserError if it has none."""
    shape = recognise(found.entries)
    if shape is not None:
        return shape
    if not found.entries and skips.problems():
        _refuse_all(file, None, found.unit, found.num_read, skips)
    keys = ", ".join(map(str, found.entries[0].fields)) if found.entries else ""
    value = f"{file} with fields {keys[:120] or 'none'}"
    listed = ", ".join(shape.name for shape in SHAPES)
    allowed = f"a retrieval log: {listed}, {FOLDER.name}"
    refuse("path", value, allowed, f"name {FIELDS_AND_SHAPES}")


def _refuse_all(
    file: Path, shape: Shape | None, unit: str, num_read: int, skips: Skips
) -> NoReturn:
    """Raise UserError for a log of which nothing can be read, with its most frequent fault; its shape, if known."""
    right = FIELDS_AND_SHAPES
    value = f"{file} as a retrieval log"
    if shape is not None:
        right = shape.right
        value = f"{file} as {shape.name}"
    problems_text = f"it has no {unit} with documents"
    problems = skips.problems()
    if problems:
        problem = problems[0]
        problems_text = f"{problem.count} of {num_read} {plural(unit)}: {problem.reason} (first: {unit} {problem.line})"
        right = problem.right or right
    refuse(
        "path",
        value,
        f"{plural(unit)} that can be read; {problems_text}",
        f"write {right}",
    )


def _reference_remarks(
    shape: Shape, seen: frozenset[str], questions: Sequence[LoggedQuestion]
) -> list[str]:
    """A line if the log holds no references, or if they come from a field that may hold replies."""
    if all(question.answers is None for question in questions):
        if any(question.reply is not None for question in questions):
            return [
                "the log holds the model's replies, but no references, and so no scores: give task.references=FILE"
            ]
        return [
            "the log holds no references, and so no scores: give task.references=FILE"
        ]
    if (
        shape.extract is extract_plain
        and names.ANSWER in seen
        and not seen & set(names.REFERENCES)
    ):
        return [
            'the field "answer" is read as the reference: if it is the model\'s reply, give task.references=FILE'
        ]
    return []


class _References(NamedTuple):
    """The answers of a file of references, a tuple for each of its lines.

    Attributes:
        by_both: By id and text of the question; None for an id that is not given.
        by_question: By text of the question.
        by_id: By id.
    """

    by_both: dict[tuple[str | None, str], list[tuple[str, ...]]]
    by_question: dict[str, list[tuple[str, ...]]]
    by_id: dict[str | None, list[tuple[str, ...]]]


def _read_references(file: Path, skips: Skips) -> _References:
    """Read a file of references; ``skips`` receives lines without a question or answers."""
    references = _References(by_both={}, by_question={}, by_id={})
    is_cell = file.name.lower().endswith(TABLES)
    for number, fields in read_entries(file, "references", skips).entries:
        with skips.collecting(number):
            value = first(fields, (*names.REFERENCES, names.ANSWER))
            answers = as_answers(value, is_cell=is_cell)
            question = first(fields, names.QUESTION)
            name = as_text(first(fields, names.QUESTION_ID), "id")
            if answers is None or not (isinstance(question, str) or name):
                raise Skip("no question or id, or no answers")
            if isinstance(question, str):
                text = comparable(question)
                references.by_question.setdefault(text, []).append(answers)
                references.by_both.setdefault((name, text), []).append(answers)
            if name:
                references.by_id.setdefault(name, []).append(answers)
    return references


def _texts_by_id(
    pairs: Iterable[tuple[str | None, str]],
) -> defaultdict[str | None, set[str]]:
    """The texts of questions by their id, of which an id may have several."""
    texts = defaultdict[str | None, set[str]](set)
    for name, text in pairs:
        texts[name].add(text)
    return texts


def _join(
    questions: Sequence[LoggedQuestion], file: Path
) -> tuple[list[LoggedQuestion], str]:
    """The questions with the answers of a file of references, and a line about it.

    Where texts and ids disagree the text decides: ids that count lines are those of another file.

    Raises:
        UserError: The file cannot be read, or none of its answers belongs to a question.
    """
    skips = Skips()
    references = _read_references(file, skips)
    texts_in_references = _texts_by_id(references.by_both)
    texts_in_log = _texts_by_id((q.id, comparable(q.question)) for q in questions)
    all_texts_in_log = {text for texts in texts_in_log.values() for text in texts}
    joined = []
    num_joined = num_otherwise = num_shared = num_several = 0
    for question in questions:
        text = comparable(question.question)
        # Several lines may ask the same question about different documents.
        lines = references.by_both.get((question.id, text))
        lines = lines or references.by_question.get(text)
        if lines is None and question.id in references.by_id:
            # What the references ask under this id, which is not this question.
            others = texts_in_references[question.id]
            num_texts = max(len(texts_in_log[question.id]), len(others))
            if num_texts > 1 or others & all_texts_in_log:
                num_shared += 1
            else:
                lines = references.by_id[question.id]
                num_otherwise += bool(others)
        if lines is not None:
            num_joined += 1
            num_several += len({*map(frozenset, lines)}) > 1
            answers = dict.fromkeys(answer for line in lines for answer in line)
            question = question._replace(answers=tuple(answers))
        joined.append(question)
    remarks = [
        f"{problem.count} lines of {file} skipped ({problem.reason}), the first is line {problem.line}"
        for problem in skips.problems()
    ]
    if num_shared:
        remarks.append(f"{num_shared} share their id with another question: give texts")
    if num_otherwise:
        remarks.append(f"{num_otherwise} by id alone, as {file} words them otherwise")
    if num_several:
        remarks.append(f"{num_several} have answers from several lines: any is right")
    faults = "".join(f"; {remark}" for remark in remarks)
    if not num_joined:
        allowed = f"answers to the questions of the log, by their text or id{faults}"
        refuse("references", str(file), allowed, f"lines such as {REFERENCE_LINE}")
    line = f"references of {num_joined} of {len(questions)} questions from {file}"
    return joined, line + faults


def _with_gold(question: LoggedQuestion) -> LoggedQuestion:
    """The question with its gold documents: those that the log names, else those in which an answer stands."""
    if question.gold is not None or question.answers is None:
        return question
    return question._replace(gold=_holding_answer(question) or None)


def _holding_answer(question: LoggedQuestion) -> tuple[int, ...]:
    """Indices of the documents in which an answer stands."""
    answers = [_matched(answer) for answer in question.answers or ()]
    return indices_of(
        any(occurs_as_word(text, answer) for answer in answers)
        for text in (_matched(document.text) for document in question.documents)
    )


def _matched(text: str) -> str:
    """A text in which answers are looked for: NFC, case folded, white space collapsed."""
    folded = unicodedata.normalize("NFC", text).casefold()
    return comparable(folded)


def _gold_remarks(questions: Sequence[LoggedQuestion]) -> list[str]:
    """How the gold documents became known, if the log does not name them; else whether they hold an answer."""
    remarks = []
    num_found = sum(q.gold is not None and not q.gold_is_named for q in questions)
    if num_found:
        remarks.append(
            f"gold documents of {num_found} of {len(questions)} questions found by an answer's words in the text; "
            "the log does not name them"
        )
    named = [q for q in questions if q.gold_is_named and q.gold and q.answers]
    num_wrong = 0
    for question in named:
        holding = set(_holding_answer(question))
        num_wrong += bool(holding) and holding.isdisjoint(question.gold or ())
    if num_wrong:
        remarks.append(
            f"the named gold documents of {num_wrong} of {len(named)} questions hold no answer, another one does: "
            "is gold counted from 0?"
        )
    return remarks


def _rises(question: LoggedQuestion) -> bool:
    """Whether the scores rise along the list."""
    scores = question.scores
    return scores is not None and scores == sorted(scores) and len(set(scores)) > 1
