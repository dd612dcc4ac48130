"""Whole files or nothing, and short hashes of plain data."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posbench.errors import UserError, is_machine_fault
from posbench.late import pd

Row = dict[str, Any]
"""One line of a JSON-lines file."""


def short_hash(data: Any, length: int = 8) -> str:
    """Short hash of plain data, the same for equal content: 0 and 0.0 are equal, a tuple and a list too."""
    text = json.dumps(to_canonical(data), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def to_canonical(data: Any) -> Any:
    """Plain data where equal content looks equal: 0.0 is 0, a tuple a list."""
    if isinstance(data, float):
        return int(data) if data.is_integer() else data
    # Most data is this: asking whether it is a mapping takes ten times as long.
    if data is None or isinstance(data, str | int):
        return data
    if isinstance(data, list | tuple):
        return [to_canonical(value) for value in data]
    if isinstance(data, Mapping):
        return {key: to_canonical(value) for key, value in data.items()}
    return data


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file or nothing; what a killed process left behind is overwritten by the next write."""
    scratch = path.with_name(f".{path.name}.tmp")
    with naming(path), open(scratch, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(scratch, path)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the file system inside the block name the file, as a write to a full disk does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a whole text file or nothing."""
    write_bytes(path, text.encode())


def write_json(path: Path, data: Any) -> None:
    """Write a whole JSON file or nothing."""
    write_text(path, json.dumps(data, indent=2) + "\n")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that takes the place of ``out`` when the block ends without an error, and else is removed."""
    new = out.with_name(f".{out.name}.new")
    old = out.with_name(f".{out.name}.old")
    # What a killed process left behind.
    shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    try:
        new.mkdir(parents=True)
    except OSError as error:
        if is_machine_fault(error):
            raise
        allowed = f"a folder that can be made ({error.strerror})"
        raise UserError("--out", str(out), allowed, "name another folder") from error
    try:
        yield new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def write_csv(path: Path, frame: pd.DataFrame) -> None:
    """Write a whole CSV or nothing; floats keep 9 significant digits, so equal results give equal bytes."""
    text = frame.to_csv(index=False, float_format="%.9g", lineterminator="\n")
    write_text(path, text)


def round_values(values: Any, digits: int = 6) -> Any:
    """Numbers of nested lists or an array, rounded to so many significant digits for rows in files."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, list):
        return [round_values(value, digits) for value in values]
    return float(f"{values:.{digits}g}")
