"""Rows of benchmark files, and the one-line complaint that names file, line and field."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from posbench.errors import UserError

Row = tuple[int, dict[str, Any]]
"""Line number from 1 (row number in a parquet file) and fields."""


def rows(
    field: str,
    path: str | Path,
    *,
    member: str | None = None,
    names: tuple[str, ...] = (),
    count: int | None = None,
) -> Iterator[Row]:
    """The rows of a file: ``.jsonl``, ``.jsonl.gz``, ``.csv``, ``.parquet``, or one of these inside a
    ``.zip``.

    Args:
        field: Config key that named the file, without ``task.``.
        path: The file.
        member: Path inside a zip.
        names: Column names of a CSV without a header line.
        count: How many rows the benchmark's own file has, where this must be that file.

    Raises:
        UserError: The file cannot be read; the message names the line where one is at fault. Or the count
            differs.
    """
    total = 0
    for row in _rows(field, path, member, names):
        total += 1
        yield row
    if count is not None and total != count:
        shown = f"{path}:{member}" if member else str(path)
        refuse(
            field,
            f"{shown} with {total} rows",
            f"{count} rows, as in the benchmark",
            "fetch the file again: posbench fetch",
        )


def _rows(field: str, path: str | Path, member: str | None, names: tuple[str, ...]) -> Iterator[Row]:
    file = Path(path).expanduser()
    shown, kind = (f"{path}:{member}", Path(str(member)).suffix) if member else (str(path), file.suffix)
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
            for text in stream:
                line += 1
                if text.strip():
                    row = json.loads(text, parse_constant=_no_constant)
                    if not isinstance(row, dict):
                        raise ValueError("not an object")
                    yield line, row
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, KeyError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        allowed = "a readable .jsonl, .jsonl.gz, .csv, .parquet or .zip file"
        refuse(field, shown, allowed, f"check the path, or the file after line {line} ({reason})")
    except UnicodeDecodeError as error:
        refuse_line(field, shown, line + 1, f"UTF-8 text ({error.reason})")
    except (ValueError, csv.Error) as error:
        what = (
            "a CSV row with the header's columns" if kind == ".csv" else "one JSON object in UTF-8 per line"
        )
        refuse_line(field, shown, max(line, 1), f"{what} ({error})")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _open(file: Path, member: str | None) -> Any:
    if member:
        return io.TextIOWrapper(zipfile.ZipFile(file).open(member), encoding="utf-8", newline="")
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8")
    return open(file, encoding="utf-8", newline="")


def take(
    field: str, path: str, line: int, row: Mapping[str, Any], name: str, kind: type | tuple[type, ...] = str
) -> Any:
    """The field ``name`` of a row, of the given type and not empty.

    Raises:
        UserError: It is missing, of another type, or empty.
    """
    value = row.get(name)
    if not isinstance(value, kind) or (isinstance(value, (str, list, tuple)) and not value):
        expected = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        refuse_line(field, path, line, f'a field "{name}" ({expected}, not empty)')
    return value


def new(field: str, path: str, line: int, name: str, value: str, seen: set[str]) -> str:
    """The value of an id field, remembered in ``seen``.

    Raises:
        UserError: It occurred before.
    """
    if value in seen:
        refuse_line(field, path, line, f'a "{name}" that occurs once ({value} stands further up)')
    seen.add(value)
    return value


def refuse(field: str, value: object, allowed: str, hint: str) -> NoReturn:
    """Raise UserError for the config key ``task.<field>``."""
    raise UserError(f"task.{field}", value, allowed, hint)


def refuse_line(field: str, path: str, line: int, allowed: str) -> NoReturn:
    """Raise UserError for one line of a file."""
    raise UserError(f"task.{field}", f"{path} line {line}", allowed, "mend or remove that line")
