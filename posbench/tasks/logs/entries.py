"""The lines, entries or rows of a file, before anything is known of their shape."""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
import tokenize
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from posbench.files.parse import parse_json
from posbench.late import pd
from posbench.tasks.logs.base import Entry, Skips
from posbench.tasks.reading import need_distinct, need_text, refuse

LISTS = (
    ("results", "results"),
    ("results",),
    ("resourceSpans",),
    ("spans",),
    ("data",),
    ("rows",),
    ("examples",),
    ("samples",),
    ("questions",),
    ("queries",),
    ("runs",),
    ("traces",),
)
"""Where one JSON object may hold the list of its entries."""
NOT_JSON = "not one JSON object"
NOT_UTF8 = "bytes that are not UTF-8", "the file as UTF-8"
"""Why a line is skipped, and what is right."""
SEPARATORS = {",": "commas", "\t": "tabs", ";": ";"}
"""Separators of columns that tools write, by character, and their names; posbench reads the first two."""
MAX_CELL_CHARACTERS = 1 << 27
"""Longest cell of a CSV file: the texts of all documents of a question."""


class Entries(NamedTuple):
    """What a file holds.

    Attributes:
        unit: ``line``, ``entry`` or ``row``.
        entries: Those that are objects with fields.
        num_read: Number of all.
    """

    unit: str
    entries: list[Entry]
    num_read: int


def read_entries(file: Path, field: str, skips: Skips) -> Entries:
    """Read a file: JSON lines, a JSON array or object, CSV, TSV or parquet; ``.gz`` of a text is unpacked.

    Args:
        file: The file.
        field: Key that named it, without ``task.``.
        skips: Receives lines that are no objects.

    Raises:
        UserError: The file cannot be read, or is empty.
    """
    suffixes = [suffix.lower() for suffix in file.suffixes]
    try:
        if suffixes[-1:] == [".parquet"]:
            found = _parquet(file)
        else:
            data = file.read_bytes()
            if suffixes[-1:] == [".gz"]:
                data = gzip.decompress(data)
                suffixes.pop()
            need_text(file, field, data)
            if suffixes[-1:] in ([".csv"], [".tsv"]):
                delimiter = "," if suffixes[-1] == ".csv" else "\t"
                found = _csv(data, delimiter, skips)
            else:
                found = _json(data, skips)
    except (OSError, EOFError, zlib.error, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        allowed = "a readable file of JSON lines, a JSON array, CSV or parquet"
        refuse(
            field,
            str(file),
            allowed,
            f"check the path, or write the file again ({reason[:120]})",
        )
    if not found.num_read:
        allowed = "a file with lines; this one is empty"
        refuse(field, str(file), allowed, "check the path")
    return found


def _json(data: bytes, skips: Skips) -> Entries:
    """Entries of JSON lines, or of one JSON text; ValueError if it is neither."""
    try:
        whole = parse_json(data.removeprefix(b"\xef\xbb\xbf"), finite=False)
    except ValueError as error:
        found = _lines(data, skips)
        if found.entries or not data.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"["):
            return found
        raise ValueError(f"one JSON array is cut or damaged: {error}") from error
    values = whole
    if isinstance(whole, dict):
        values = _list_in(whole)
    if not isinstance(values, list):
        raise ValueError("neither an object nor an array")
    entries = _objects(enumerate(values, start=1), skips)
    unit = "line" if values == [whole] else "entry"
    return Entries(unit, entries, len(values))


def _list_in(whole: dict[str, Any]) -> list[Any]:
    """The list of entries in an object; the object itself where it holds none."""
    for keys in LISTS:
        value: Any = whole
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            # Spans of OpenTelemetry are found below their resource.
            return [whole] if keys == ("resourceSpans",) else value
    if len(whole) > 1 and all(map(_looks_asked, whole.values())):
        return [{"id": key, **value} for key, value in whole.items()]
    return [whole]


def _looks_asked(fields: Any) -> bool:
    """Whether an object in an object is a question of its own."""
    names = ("question", "query", "input", "user_input")
    return isinstance(fields, dict) and any(name in fields for name in names)


def _lines(data: bytes, skips: Skips) -> Entries:
    """Entries of JSON lines; others are skipped."""
    numbered = []
    num_read = 0
    for number, line in enumerate(data.splitlines(), start=1):
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if not text.strip():
            continue
        num_read += 1
        try:
            numbered.append((number, parse_json(text, finite=False)))
        except UnicodeDecodeError:
            skips.add(number, *NOT_UTF8)
        except ValueError:
            numbered.append((number, None))
    return Entries("line", _objects(numbered, skips), num_read)


def _objects(numbered: Iterable[tuple[int, Any]], skips: Skips) -> list[Entry]:
    """The values that are objects; others are skipped."""
    entries = []
    for number, value in numbered:
        if isinstance(value, dict):
            entries.append(Entry(number, value))
        else:
            skips.add(number, NOT_JSON)
    return entries


def _csv(data: bytes, delimiter: str, skips: Skips) -> Entries:
    """Entries of a CSV file, with the numbers of the lines on which they begin."""
    text = data.decode("utf-8-sig", errors="surrogateescape")
    limit = csv.field_size_limit(MAX_CELL_CHARACTERS)
    entries = []
    num_read = 0
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
        names = reader.fieldnames or []
        need_distinct(names)
        if len(names) == 1:
            _refuse_separators(names[0], delimiter)
        number = reader.line_num + 1
        for row in reader:
            num_read += 1
            if None in row or None in row.values() or not names:
                skips.add(number, "another number of columns than the header")
            elif not _is_utf8(row.values()):
                skips.add(number, *NOT_UTF8)
            else:
                fields = {key: value for key, value in row.items() if value != ""}
                entries.append(Entry(number, fields))
            number = reader.line_num + 1
    finally:
        csv.field_size_limit(limit)
    return Entries("line", entries, num_read)


def _is_utf8(texts: Iterable[str]) -> bool:
    """Whether texts hold none of the surrogates that stand for other bytes."""
    try:
        "".join(texts).encode()
    except UnicodeError:
        return False
    return True


def _refuse_separators(header: str, delimiter: str) -> None:
    """Refuse a header of one column whose text another separator would divide."""
    for separator, name in SEPARATORS.items():
        if header.count(separator) > header.count(delimiter):
            expected = SEPARATORS[delimiter]
            raise ValueError(f"its columns are separated by {name}, not by {expected}")


def _parquet(file: Path) -> Entries:
    """Entries of a parquet file."""
    rows = pd.read_parquet(file).to_dict("records")
    entries = [
        Entry(number, {str(key): _plain(value) for key, value in row.items()})
        for number, row in enumerate(rows, start=1)
    ]
    return Entries("row", entries, len(rows))


def _plain(value: Any) -> Any:
    """A value of a table as JSON would have it."""
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def list_in_text(text: str) -> list[Any] | None:
    """The list that a text spells as JSON, or as Python or NumPy prints it; None if it spells none."""
    if not text.strip().startswith("["):
        return None
    value = json_in_text(text)
    if value is None:
        try:
            value = ast.literal_eval(text.strip())
            value = _texts_of_array(text) or value
            # Sets, bytes and halves of surrogate pairs are no data of a log.
            json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return None
    return value if isinstance(value, list) else None


def _texts_of_array(text: str) -> list[str] | None:
    """The texts of an array as NumPy prints it, which Python reads as one text; None if it is no such array."""
    tokens = tokenize.generate_tokens(io.StringIO(text.strip()).readline)
    written = [token for token in tokens if token.string.strip()]
    texts = [token.string for token in written if token.type == tokenize.STRING]
    if [token.string for token in written] != ["[", *texts, "]"]:
        return None
    return [ast.literal_eval(spelled) for spelled in texts]


def json_in_text(text: str) -> Any:
    """The data of a JSON text; None if it is none."""
    try:
        return parse_json(text, finite=False)
    except ValueError:
        return None
