"""Whole files or nothing, and short hashes of plain data."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
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
    # Most data is a dict; isinstance(..., Mapping) takes ten times longer.
    if data is None or isinstance(data, str | int):
        return data
    if isinstance(data, list | tuple):
        return [to_canonical(value) for value in data]
    if isinstance(data, Mapping):
        return {key: to_canonical(value) for key, value in data.items()}
    return data


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file or nothing; of several processes that write it at once, the last one's stays."""
    scratch = _scratch(path, "tmp")
    try:
        with naming(path), open(scratch, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def _scratch(path: Path, kind: str) -> Path:
    """Return a new hidden path next to a path, for this process alone; remove such files of dead processes.

    Args:
        path: The file or folder that will be written.
        kind: The ending of the name.
    """
    for name in _names_beginning(path.parent, f".{path.name}."):
        machine, _, rest = name.removeprefix(f".{path.name}.").partition("-")
        pid = rest.partition("-")[0]
        is_ours = machine == machine_id() and rest.endswith(f".{kind}")
        if is_ours and pid.isdecimal() and not _is_alive(int(pid)):
            left = path.with_name(name)
            shutil.rmtree(left, ignore_errors=True)
            with suppress(OSError):
                left.unlink(missing_ok=True)
    number = next(_NUMBERS)
    return path.with_name(f".{path.name}.{machine_id()}-{os.getpid()}-{number}.{kind}")


_NUMBERS = itertools.count()
"""Numbers that keep the scratch names of a process's threads apart."""


def _names_beginning(folder: Path, prefix: str) -> list[str]:
    """Return the names in a folder with a prefix; none if the folder cannot be listed."""
    with suppress(OSError):
        return [name for name in os.listdir(folder) if name.startswith(prefix)]
    return []


def _is_alive(pid: int) -> bool:
    """Whether a process of this machine runs; true if it cannot be checked."""
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@cache
def machine_id() -> str:
    """A short id of this machine or container, within which a process number means one process."""
    name = socket.gethostname()
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        name = f"{name} {boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return hashlib.sha256(name.encode()).hexdigest()[:8]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an error of the file system inside the block, which a write to a full disk lacks."""
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
    """A folder that takes the place of ``out`` when the block ends without an error, and else is removed.

    Of several processes that write the same folder at once, the last one's stays.

    Raises:
        UserError: No folder can be made there.
    """
    new = _scratch(out, "new")
    try:
        new.mkdir(parents=True)
    except OSError as error:
        if is_machine_fault(error):
            raise
        allowed = f"a folder that can be made ({error.strerror})"
        raise UserError("--out", str(out), allowed, "name another folder") from error
    try:
        yield new
        _put_in_place(new, out)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _put_in_place(new: Path, out: Path) -> None:
    """Rename a folder to ``out``, and remove the folder that was there."""
    while True:
        old = _scratch(out, "old")
        with suppress(FileNotFoundError):
            out.rename(old)
        try:
            new.rename(out)
        except OSError as error:
            # Another process has put its folder there meanwhile.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        else:
            return
        finally:
            shutil.rmtree(old, ignore_errors=True)


def write_csv(path: Path, frame: pd.DataFrame) -> None:
    """Write a whole CSV or nothing; floats keep 9 significant digits, so equal results give equal bytes."""
    write_text(path, csv_text(frame))


def csv_text(frame: pd.DataFrame) -> str:
    """Return the text that :func:`write_csv` writes for a table."""
    return frame.to_csv(index=False, float_format="%.9g", lineterminator="\n")


def round_values(values: Any, digits: int = 6) -> Any:
    """Round the numbers of nested lists or an array to ``digits`` significant digits, for rows in files."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, list):
        return [round_values(value, digits) for value in values]
    return float(f"{values:.{digits}g}")
