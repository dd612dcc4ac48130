"""Rows of benchmark files, and the one-line complaint that names file, line and field."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from posbench.errors import Faults, SeveralErrors, UserError, near

T = TypeVar("T")
MOST = 10  # faults of a file that are told together


class Line(dict[str, Any]):
    """The fields of one row, which know where they stand: config key, file, line from 1 (parquet: row)."""

    def __init__(
        self, fields: Mapping[str, Any], field: str, shown: str, number: int
    ) -> None:
        super().__init__(fields)
        self.field = field
        self.shown = shown
        self.number = number

    def take(self, name: str, kind: type | tuple[type, ...] = str) -> Any:
        """A field, refused where it is missing, of another type, or empty."""
        value = self.get(name)
        if not isinstance(value, kind) or (
            isinstance(value, (str, list, tuple)) and not value
        ):
            expected = " or ".join(
                k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,))
            )
            self.refuse(f'a field "{name}" ({expected}, not empty)')
        return value

    def refuse(self, allowed: str) -> NoReturn:
        """Raise UserError for this line."""
        place = f"task.{self.field}: {self.shown}, line {self.number}"
        raise LineError(place, "", allowed, "fix or remove that line")

    def fault(self, wrong: str, allowed: str) -> LineError:
        """What is wrong with this line, to be raised."""
        return LineError(
            f"{self.shown}, line {self.number}",
            wrong,
            allowed,
            "fix or remove that line",
        )


class LineError(UserError):
    """A fault of a line, which is its ``field``, and in words, if any, its ``value``."""

    def __str__(self) -> str:
        wrong = f"{self.value}; " if self.value else ""
        line = f"{self.field}: {wrong}allowed: {self.allowed}; next: {self.hint}"
        return " ".join(line.split())


Row = tuple[int, Line]


def refuse(field: str, value: object, allowed: str, hint: str) -> NoReturn:
    """Raise UserError for the config key ``task.<field>``."""
    raise UserError(f"task.{field}", value, allowed, hint)


def each(lines: Iterable[Row], make: Callable[[Line], T], faults: Faults) -> list[T]:
    """What ``make`` makes of every row. Raises what it and the reader (``faults``) refused, ten at most."""
    made = list[T]()
    for _, row in lines:
        with faults.collecting():
            made.append(make(row))
    found = [one for fault in faults.found for one in fault.faults]
    if len(found) > MOST:
        found[MOST:] = [
            UserError(
                "file", f"{len(found) - MOST} more", "none", "correct those above first"
            )
        ]
    if found:
        raise SeveralErrors(found)
    return made


def data_of(module: str) -> Any:
    """What the JSON file with the name of a module holds."""
    return json.loads(Path(module).with_suffix(".json").read_text("utf-8"))


def check_names(field: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse unknown names, repeated ones, and none at all."""
    for name in names:
        if name not in known:
            refuse(
                field,
                name,
                f"some of {', '.join(known)}",
                near(name, known, "remove it"),
            )
    if not names or len(set(names)) < len(names):
        allowed = f"some of {', '.join(known)}, at least one, each once"
        refuse(field, list(names), allowed, f"set task.{field}=[{known[0]}]")


def pick(
    place: Path, names: Sequence[str], hint: str, archive: str = ""
) -> tuple[Path, str]:
    """The first file that is there of some in a folder, in a ``.zip``, or in the folder's zip ``archive``.

    Returns the file and, of a zip, the path in it; raises UserError if none of them is there.
    """
    for name in names:
        if (place / name).is_file():
            return place / name, ""
    file = place if place.suffix == ".zip" else place / archive
    if file.is_file():
        try:
            with zipfile.ZipFile(file) as packed:
                held = packed.namelist()
        except (OSError, zipfile.BadZipFile) as error:
            refuse("path", str(file), "a readable .zip file", f"get it again ({error})")
        for name in names:
            if name in held:
                return file, name
    refuse("path", str(place), f"a folder or .zip with {names[0]}", hint)


def rows(
    field: str,
    path: Path,
    member: str = "",
    *,
    names: Sequence[str] = (),
    unique: str = "",
    count: int = 0,
    faults: Faults | None = None,
) -> Iterator[Row]:
    """The rows of a file: ``.jsonl``, ``.jsonl.gz``, ``.csv``, ``.parquet``, or one of these in a ``.zip``.

    ``field`` is the config key that named it, without ``task.``; ``member`` the path inside a zip; ``names``
    the columns of a CSV without a header line. A value of the field ``unique`` may occur once. ``count`` is
    how many rows the benchmark's own file has, where this must be that file. ``faults`` takes what is wrong
    with lines of JSON one by one, where the caller raises it. Raises UserError where a file is empty or
    cannot be read (the message names the line), or the count differs.
    """
    shown = f"{path}:{member}" if member else str(path)
    total = 0
    seen = set()
    for number, row in _rows(field, path.expanduser(), shown, member, names, faults):
        total = total + 1
        line = Line(row, field, shown, number)
        if unique in row:
            if (name := str(row[unique])) in seen:
                line.refuse(f'a "{unique}" that occurs once ({name} stands further up)')
            seen.add(name)
        yield number, line
    if not total and not (faults and faults.found):
        refuse(field, shown, "a file with rows; this one is empty", "check the path")
    if count and total != count:
        told = f"{shown} with {total} rows"
        allowed = f"{count} rows, as in the benchmark"
        refuse(field, told, allowed, "fetch the file again: posbench fetch")


def _rows(
    field: str,
    file: Path,
    shown: str,
    member: str,
    names: Sequence[str],
    faults: Faults | None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    kind = Path(member or file).suffix
    line = 0
    try:
        if kind == ".parquet":
            # Slow to import, and wanted by few tasks.
            from datasets import Dataset, disable_progress_bars

            disable_progress_bars()
            for line, row in enumerate(Dataset.from_parquet(str(file)), start=1):  # type: ignore[arg-type]
                yield line, dict(row)
            return
        with _open(file, member) as stream:
            if kind == ".csv":
                reader = csv.DictReader(stream, fieldnames=names or None)
                for row in reader:
                    line = reader.line_num
                    if None in row or None in row.values():
                        raise ValueError("another number of columns than the header")
                    yield line, row
                return
            for line, text in enumerate(stream, start=1):
                if text.strip():
                    row = None
                    with faults.collecting() if faults is not None else nullcontext():
                        row = _object(text, Line({}, field, shown, line))
                    if row is not None:
                        yield line, row
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, KeyError) as error:
        allowed = "a readable .jsonl, .jsonl.gz, .csv, .parquet or .zip file"
        reason = getattr(error, "strerror", None) or error
        refuse(
            field,
            shown,
            allowed,
            f"check the path, or the file after line {line} ({reason})",
        )
    except UnicodeError as error:
        Line({}, field, shown, line + 1).refuse(
            f"UTF-8 text ({getattr(error, 'reason', error)})"
        )
    except (ValueError, csv.Error) as error:
        Line({}, field, shown, max(line, 1)).refuse(
            f"one CSV row with the header's columns ({error})"
        )


def _object(text: str, line: Line) -> dict[str, Any]:
    try:
        row = json.loads(text, parse_constant=_no_constant)
        if not isinstance(row, dict):
            raise ValueError("not an object")
        if "\\ud" in text.lower():
            json.dumps(
                row, ensure_ascii=False
            ).encode()  # half of a pair of surrogates is no text
        return row
    except UnicodeError as error:
        line.refuse(f"UTF-8 text ({getattr(error, 'reason', error)})")
    except ValueError as error:
        line.refuse(f"one JSON object in UTF-8 per line ({error})")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _open(file: Path, member: str) -> Any:
    if member:
        return io.TextIOWrapper(
            zipfile.ZipFile(file).open(member), encoding="utf-8-sig", newline=""
        )
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8-sig")
    return open(file, encoding="utf-8-sig", newline="")
