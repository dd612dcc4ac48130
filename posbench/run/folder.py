"""The run folder: versioned, claimed by one process, config first, rows with checksums, DONE last."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from posbench.errors import UserError
from posbench.files.atomic import Row, digest, write_text

log = logging.getLogger(__name__)


@dataclass
class RunDir:
    """One run folder that this process owns."""

    path: Path

    def write_json(self, name: str, data: Any) -> None:
        """Write a JSON file atomically."""
        write_text(self.path / name, json.dumps(data, indent=2, sort_keys=True, default=str) + "\n")

    def read_json(self, name: str) -> Any:
        """Read a JSON file; an empty dict where there is none yet."""
        file = self.path / name
        return json.loads(file.read_text()) if file.is_file() else {}

    @property
    def done(self) -> bool:
        """Whether the run finished."""
        return (self.path / "DONE").is_file()

    # Rows

    def rows(self, name: str) -> list[Row]:
        """Whole, undamaged rows of a JSON-lines file, oldest first."""
        return _read_rows(self.path / name)[0]

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows, each with a checksum, in one flushed write."""
        lines = _lines(rows)
        with open(self.path / name, "ab+") as stream:
            if stream.tell():
                stream.seek(-1, os.SEEK_END)
                # A line that a killed process left torn must not swallow the next one.
                lines = lines if stream.read(1) == b"\n" else "\n" + lines
            stream.write(lines.encode())
            stream.flush()
            os.fsync(stream.fileno())

    def repair(self, name: str) -> None:
        """Drop torn or damaged lines, and rows that record an error, so that they are computed again."""
        file = self.path / name
        rows, damaged = _read_rows(file)
        kept = [row for row in rows if "error" not in row]
        if damaged or len(kept) < len(rows):
            log.warning("%s: dropped %d damaged and %d errored rows", file, damaged, len(rows) - len(kept))
            write_text(file, _lines(kept))

    def sort(self, name: str, place: Callable[[Row], int]) -> None:
        """Put rows in order of their place: those that were repaired stand where they would have stood."""
        rows = self.rows(name)
        ordered = sorted(rows, key=place)
        if ordered != rows:
            write_text(self.path / name, _lines(ordered))

    # Stages

    def stage(self, name: str) -> Row:
        """What is recorded of a stage: its ``key``, and ``done``."""
        return dict(self.read_json("status.json").get("stages", {}).get(name, {}))

    def mark(self, name: str, **facts: Any) -> None:
        """Record facts of a stage."""
        status = self.read_json("status.json")
        status.setdefault("stages", {}).setdefault(name, {}).update(facts)
        self.write_json("status.json", status)

    def finish(self, state: str, error: str | None = None) -> None:
        """Record how the run ended; ``done`` also writes DONE, last."""
        self.write_json("status.json", self.read_json("status.json") | {"state": state, "error": error})
        if state == "done":
            write_text(self.path / "DONE", "")

    def sibling_with(self, stage: str, key: str) -> RunDir | None:
        """Another run of this version that finished a stage under the same key: its files may be copied."""
        for folder in sorted(self.path.parent.iterdir()):
            known = RunDir(folder).stage(stage) if folder != self.path else {}
            if known.get("key") == key and known.get("done"):
                return RunDir(folder)
        return None


def find(outputs: Path, suite: str, version_key: Mapping[str, Any], name: str) -> Path | None:
    """The folder that :func:`claim` would resume; None where it would make a new one. Makes nothing.

    Raises:
        UserError: The outputs cannot be read.
    """
    try:
        nearest = next(p for p in (outputs.absolute(), *outputs.absolute().parents) if p.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise PermissionError(f"{nearest} is no folder that can be written")
        there = (outputs / suite).is_dir()
        version = _known_version(outputs / suite, version_key)[0] if there else None
    except OSError as error:
        raise _unusable(outputs, error) from error
    return version / name if version and (version / name).is_dir() else None


@contextmanager
def claim(
    outputs: Path,
    suite: str,
    version_key: Mapping[str, Any],
    name: str,
    config: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> Iterator[RunDir]:
    """Claim ``outputs/suite/vNNN/name`` for this process.

    The version folder is the newest whose key equals ``version_key``, else a new one: what lies in one
    version was scored on the same examples by the same code. A new run folder appears at once, with
    ``config.yaml`` and ``provenance.json``.

    Raises:
        UserError: Another process owns the folder, or it cannot be written.
    """
    try:
        (outputs / suite).mkdir(parents=True, exist_ok=True)
        with FileLock(outputs / suite / ".lock"):
            version = _version(outputs / suite, version_key)
    except OSError as error:
        raise _unusable(outputs, error) from error
    folder = version / name
    with owned(folder):
        if not folder.is_dir():
            made = _scratch(version / f".new-{name}")
            (made / "figures").mkdir()
            write_text(made / "config.yaml", yaml.safe_dump(_plain(config), sort_keys=False))
            RunDir(made).write_json("provenance.json", provenance)
            RunDir(made).write_json("status.json", {"state": "running", "stages": {}})
            os.rename(made, folder)
        yield RunDir(folder)


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run folder.

    Raises:
        UserError: Another process owns it.
    """
    locks = folder.parent / ".locks"
    locks.mkdir(exist_ok=True)
    # The lock lies beside the folder and goes with the process that holds it, however that one ends.
    lock = FileLock(locks / folder.name)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        hint = "wait for the other run, or stop it"
        raise UserError("run folder", str(folder), "one process at a time", hint) from error
    try:
        yield
    finally:
        lock.release()


def open_run(folder: Path) -> RunDir:
    """Open a run folder for reading.

    Raises:
        UserError: It is no run folder.
    """
    if not (folder / "config.yaml").is_file():
        allowed, hint = "a run folder (it holds config.yaml)", "posbench prints the folder of each run"
        raise UserError("DIR", str(folder), allowed, hint)
    return RunDir(folder)


def _unusable(outputs: Path, error: OSError) -> UserError:
    hint = f"set runtime.outputs=DIR ({error.strerror or error})"
    return UserError("runtime.outputs", str(outputs), "a folder that can be written", hint)


def _known_version(suite: Path, key: Mapping[str, Any]) -> tuple[Path | None, int]:
    """The newest version folder with this key, and the highest number of any."""
    there = {int(p.name[1:]): p for p in suite.iterdir() if p.name[:1] == "v" and p.name[1:].isdigit()}
    files = [there[number] / "version.json" for number in sorted(there, reverse=True)]
    same = (f.parent for f in files if f.is_file() and json.loads(f.read_text()) == _plain(key))
    return next(same, None), max(there, default=0)


def _version(suite: Path, key: Mapping[str, Any]) -> Path:
    """The newest version folder with this key, else a new one."""
    known, highest = _known_version(suite, key)
    if known:
        return known
    folder = suite / f"v{highest + 1:03d}"
    made = _scratch(suite / ".new-version")
    write_text(made / "version.json", json.dumps(_plain(key), indent=2, sort_keys=True) + "\n")
    os.rename(made, folder)
    return folder


def _scratch(folder: Path) -> Path:
    """An empty folder; what a killed process left there is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _plain(data: Any) -> Any:
    return json.loads(json.dumps(data, default=str))


def _sum(row: Mapping[str, Any]) -> str:
    return digest({k: v for k, v in row.items() if k != "sum"})


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as JSON lines, each with its checksum."""
    return "".join(json.dumps({**row, "sum": _sum(row)}, ensure_ascii=False) + "\n" for row in rows)


def _read_rows(file: Path) -> tuple[list[Row], int]:
    """The whole rows of a JSON-lines file, and how many lines are torn or damaged."""
    if not file.is_file():
        return [], 0
    rows, damaged = [], 0
    for line in file.read_bytes().split(b"\n"):
        if not line:
            continue
        try:
            row = json.loads(line)
            if row.pop("sum") != _sum(row):
                raise ValueError("checksum")
            rows.append(row)
        except (ValueError, KeyError, AttributeError, TypeError):
            damaged += 1
    return rows, damaged
