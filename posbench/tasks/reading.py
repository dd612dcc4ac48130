"""Rows of benchmark files, and the one-line complaint that names file, line and field."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from posbench.errors import Faults, SeveralErrors, UserError, near
from posbench.files.parse import parse_json
from posbench.late import datasets

T = TypeVar("T")
MAX_FAULTS = 10
"""Faults of a file that are reported together."""
UTF16 = "UTF-16 or UTF-32", "save it as UTF-8"
NO_TEXT = (
    (b"PK\x03\x04", "an Excel workbook or an archive", "save the sheet as CSV UTF-8"),
    (b"\xd0\xcf\x11\xe0", "an old Excel workbook", "save the sheet as CSV UTF-8"),
    (b"\x1f\x8b", "gzip", "end its name in .gz"),
    (b"\xff\xfe", *UTF16),
    (b"\xfe\xff", *UTF16),
)
"""First bytes of files that are no text, what they are, and the next step."""
MAX_LINE_CHARACTERS = 1 << 22
"""Longest line of JSON, ten times the longest documents of the benchmarks."""


class Line(dict[str, Any]):
    """The fields of one row, with its place in the file.

    Attributes:
        field: Key that named the file, without ``task.``.
        file_label: The file as messages name it.
        number: Line from 1 (parquet: row).
    """

    def __init__(
        self, fields: Mapping[str, Any], field: str, file_label: str, number: int
    ) -> None:
        super().__init__(fields)
        self.field = field
        self.file_label = file_label
        self.number = number

    def take(self, name: str, kind: type | tuple[type, ...] = str) -> Any:
        """Return a field of the line.

        Args:
            name: The field.
            kind: Type or types that it may have.

        Raises:
            UserError: It is missing, of another type, or empty; names file and line.
        """
        value = self.get(name)
        is_empty = isinstance(value, (str, list, tuple)) and not value
        if is_empty or not isinstance(value, kind):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            expected = " or ".join(kind.__name__ for kind in kinds)
            self.refuse(f'a field "{name}" ({expected}, not empty)')
        return value

    def refuse(self, allowed: str) -> NoReturn:
        """Raise UserError for this line."""
        location = f"task.{self.field}: {self.file_label}, line {self.number}"
        raise LineError(location, "", allowed, "fix or remove that line")

    def fault(self, wrong: str, allowed: str) -> LineError:
        """Return an error about this line, to be raised."""
        location = f"{self.file_label}, line {self.number}"
        return LineError(location, wrong, allowed, "fix or remove that line")


class LineError(UserError):
    """A fault of a line, which is its ``field``, and in words, if any, its ``value``."""

    def __str__(self) -> str:
        wrong = f"{self.value}; " if self.value else ""
        line = f"{self.field}: {wrong}allowed: {self.allowed}; next: {self.hint}"
        return " ".join(line.split())


Row = tuple[int, Line]
"""Number of a line and its fields."""


def refuse(field: str, value: object, allowed: str, hint: str) -> NoReturn:
    """Raise UserError for the config key ``task.<field>``."""
    raise UserError(f"task.{field}", value, allowed, hint)


def parse_rows(
    lines: Iterable[Row], parse: Callable[[Line], T], faults: Faults
) -> list[T]:
    """Parse every row of a file; return what ``parse`` makes of each.

    Args:
        lines: Number and fields of each row.
        parse: Converts a row, or refuses it.
        faults: Faults found by the reader of the rows.

    Raises:
        SeveralErrors: Faults found by the reader and ``parse``, ten at most.
    """
    results: list[T] = []
    for _, line in lines:
        with faults.collecting():
            results.append(parse(line))
    if faults.found:
        raise_faults(faults)
    return results


def raise_faults(faults: Faults) -> NoReturn:
    """Raise faults of a file together, ten at most."""
    errors = [error for fault in faults.found for error in fault.faults]
    excess = len(errors) - MAX_FAULTS
    if excess > 0:
        hint = "correct those above first"
        errors[MAX_FAULTS:] = [UserError("file", f"{excess} more", "none", hint)]
    raise SeveralErrors(errors)


def json_beside(module: str) -> Any:
    """Return the data of the JSON file next to a module (given by its ``__file__``), with the module's name."""
    return json.loads(Path(module).with_suffix(".json").read_text("utf-8"))


def check_subsets(names: Sequence[str], allowed: Sequence[str]) -> None:
    """Refuse names of subsets that do not exist, repeated ones, and none at all.

    Args:
        names: The names.
        allowed: Those that exist.

    Raises:
        UserError: States which.
    """
    choices = f"some of {', '.join(allowed)}"
    for name in names:
        if name not in allowed:
            refuse("subsets", name, choices, near(name, allowed, "remove it"))
    if not names or len(set(names)) < len(names):
        hint = f"set task.subsets=[{allowed[0]}]"
        refuse("subsets", list(names), f"{choices}, at least one, each once", hint)


def find_file(
    folder: Path, names: Sequence[str], hint: str, archive: str = ""
) -> tuple[Path, str]:
    """Return the first of some files that exists in a folder or in a ``.zip``.

    Args:
        folder: A folder, or the ``.zip``.
        names: Paths in the folder or in the zip.
        hint: Where to get the files.
        archive: Name of a zip in the folder, in which they may be as well.

    Returns:
        The file and, of a zip, the path in it.

    Raises:
        UserError: No such file exists, or the zip cannot be read.
    """
    for name in names:
        if (folder / name).is_file():
            return folder / name, ""
    file = folder if folder.suffix == ".zip" else folder / archive
    if file.is_file():
        try:
            with zipfile.ZipFile(file) as zip_file:
                members = zip_file.namelist()
        except (OSError, zipfile.BadZipFile) as error:
            refuse("path", str(file), "a readable .zip file", f"get it again ({error})")
        for name in names:
            if name in members:
                return file, name
    refuse("path", str(folder), f"a folder or .zip with {names[0]}", hint)


def read_data_rows(
    field: str,
    path: Path,
    member: str = "",
    *,
    names: Sequence[str] = (),
    unique: str = "",
    count: int = 0,
    faults: Faults | None = None,
) -> Iterator[Row]:
    """Yield the rows of a file: ``.jsonl``, ``.jsonl.gz``, ``.csv``, ``.parquet``, or one of these in a ``.zip``.

    Args:
        field: Key that named the file, without ``task.``.
        path: The file.
        member: The path inside a zip.
        names: Columns of a CSV without a header line.
        unique: A field whose values may occur once.
        count: Rows of the benchmark's own file, where this must be that file; 0: any number.
        faults: Collects the faults of lines of JSON, if the caller raises them.

    Raises:
        UserError: The file is empty or cannot be read (the message names the line), or the count differs.
    """
    file_label = f"{path}:{member}" if member else str(path)
    total = 0
    unique_values = set()
    for number, fields in _rows(
        field, path.expanduser(), file_label, member, names, faults
    ):
        total += 1
        line = Line(fields, field, file_label, number)
        if unique in fields:
            value = str(fields[unique])
            if value in unique_values:
                line.refuse(
                    f'a "{unique}" that occurs once ({value} stands further up)'
                )
            unique_values.add(value)
        yield number, line
    if not total and not (faults and faults.found):
        refuse(
            field, file_label, "a file with rows; this one is empty", "check the path"
        )
    if count and total != count:
        allowed = f"{count} rows, as in the benchmark"
        hint = "fetch the file again: posbench fetch"
        refuse(field, f"{file_label} with {total} rows", allowed, hint)


def _rows(
    field: str,
    file: Path,
    file_label: str,
    member: str,
    names: Sequence[str],
    faults: Faults | None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and fields of every row of a JSON-lines, CSV or Parquet file.

    Args:
        field: Config key that names the file, for errors.
        file: The file, or the archive.
        file_label: Name of the file in errors.
        member: Its name in the archive; empty without one.
        names: Column names of a CSV without a header.
        faults: Collects faulty lines, which are left out; None raises at the first one.
    """
    kind = Path(member or file).suffix
    number = 0
    try:
        if kind == ".parquet":
            datasets.disable_progress_bars()
            dataset = datasets.Dataset.from_parquet(str(file))  # type: ignore[arg-type]
            for number, row in enumerate(dataset, start=1):
                yield number, dict(row)
            return
        with _open(file, member) as stream:
            need_text(file_label, field, stream.buffer.peek(4))
            if kind == ".csv":
                reader = csv.DictReader(stream, fieldnames=names or None)
                need_distinct(reader.fieldnames or ())
                need_utf8("".join(reader.fieldnames or ()))
                for row in reader:
                    need_utf8("".join(map(str, row.values())))
                    number = reader.line_num
                    if None in row or None in row.values():
                        raise ValueError("another number of columns than the header")
                    yield number, row
                return
            while text := stream.readline(MAX_LINE_CHARACTERS):
                need_utf8(text)
                number += 1
                if not text.strip():
                    continue
                line = Line({}, field, file_label, number)
                # readline() stopped inside the line.
                if len(text) == MAX_LINE_CHARACTERS and not text.endswith("\n"):
                    line.refuse(f"lines of fewer than {MAX_LINE_CHARACTERS} characters")
                row = None
                with nullcontext() if faults is None else faults.collecting():
                    row = _parse_object(text, line)
                if row is not None:
                    yield number, row
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, KeyError) as error:
        allowed = "a readable .jsonl, .jsonl.gz, .csv, .parquet or .zip file"
        reason = getattr(error, "strerror", None) or error
        place = f"the file after line {number}" if number else "the path"
        hint = f"check {place} ({reason})"
        refuse(field, file_label, allowed, hint)
    except UnicodeError as error:
        # Other lines may well have the same fault: one word on the file will do.
        location = f"task.{field}: {file_label}, line {number + 1}"
        hint = "save the file as UTF-8"
        raise LineError(location, "", "UTF-8 text", hint) from error
    except (ValueError, csv.Error) as error:
        line = Line({}, field, file_label, max(number, 1))
        line.refuse(f"one CSV row with the header's columns ({error})")


def need_text(file: Path | str, field: str, data: bytes) -> None:
    """Refuse files that others take for text, with the way to make text of them.

    Args:
        file: The file.
        field: Key that named it, without ``task.``.
        data: Its first bytes.

    Raises:
        UserError: It is a workbook or an archive, is packed, or is UTF-16.
    """
    # Without a mark of its own, UTF-16 shows in the zeros beside Latin letters.
    unmarked = [(data[:4], *UTF16)] if 0 in data[:4] else []
    for start, kind, hint in (*NO_TEXT, *unmarked):
        if data.startswith(start):
            allowed = f"JSON lines, JSON, CSV or parquet; this one is {kind}"
            refuse(field, str(file), allowed, hint)


def need_utf8(text: str) -> None:
    """Raise UnicodeError for a text with surrogates, which stand for bytes that are not UTF-8."""
    text.encode()


def need_distinct(names: Iterable[str]) -> None:
    """Refuse columns of a CSV file with one name, of which only the last would be read; empty names hold nothing.

    Args:
        names: The names of its header.

    Raises:
        ValueError: A name occurs twice.
    """
    repeated = [name for name, count in Counter(names).items() if count > 1 and name]
    if repeated:
        raise ValueError(f"its header names {', '.join(repeated)} more than once")


def _parse_object(text: str, line: Line) -> dict[str, Any]:
    """Return the JSON object in a line's text.

    Args:
        text: The text.
        line: Names file and number of the line in errors.
    """
    try:
        fields = parse_json(text)
        if not isinstance(fields, dict):
            raise ValueError("not an object")
        return fields
    except UnicodeError as error:
        line.refuse(f"UTF-8 text ({getattr(error, 'reason', error)})")
    except ValueError as error:
        line.refuse(f"one JSON object in UTF-8 per line ({error})")


def _open(file: Path, member: str) -> Any:
    """Open a file, or a member of a zip file, as a stream of text; ``.gz`` is unpacked.

    Bytes that are not UTF-8 become surrogates, so that their line can be named.
    """
    form: dict[str, Any] = {"encoding": "utf-8-sig", "errors": "surrogateescape"}
    if member:
        return io.TextIOWrapper(zipfile.ZipFile(file).open(member), newline="", **form)
    if file.suffix == ".gz":
        return gzip.open(file, "rt", **form)
    return open(file, newline="", **form)
