"""What the files of a run hold: sha256 of every byte, remembered for big files."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posbench import paths
from posbench.errors import MachineError, UserError
from posbench.files import sources
from posbench.files.atomic import digest, write_text
from posbench.files.sources import CHECKPOINT, Source

BIG = 1 << 22
"""Bytes from which a hash is remembered; a smaller file is read again each time."""

SETTLED = 2_000_000_000
"""Nanoseconds that a file must have rested: two changes within one tick of its clock look the same."""

UNREAD = {".md", ".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".safetensors"}
"""Files of a checkpoint folder that loading does not read; of safetensors it reads those that it names."""


@dataclass(frozen=True)
class Content:
    """A file of a source, or a data set or checkpoint of the hub, as a run found it."""

    source: Source
    name: str  # path in the source's folder; of a single file its suffix, which says how it is read
    file: Path | None  # None: the hub's
    held: str  # sha256; the hub's commit
    stamp: tuple[int, ...] = ()  # see :func:`stamp`

    @property
    def key(self) -> tuple[str, str, str]:
        """What it means for a run: where it lies does not count."""
        return self.source.field, self.name, self.held

    @property
    def fact(self) -> dict[str, str]:
        """For the record of a run."""
        place, kind = (
            (str(self.file), "sha256") if self.file else (self.source.id, "commit")
        )
        return {
            "field": self.source.field,
            "name": self.name,
            "file": place,
            kind: self.held,
        }


def contents(wanted: Iterable[Source]) -> list[Content]:
    """What the files of sources hold, in a fixed order; what is missing is downloaded where it can be.

    Raises:
        UserError: A file is missing or cannot be read.
    """
    jobs: list[tuple[Source, str, Path | None]] = []
    for source in dict.fromkeys(wanted):
        try:
            jobs += [(source, *each) for each in _files(source)]
        except OSError as error:
            hint = f"check the path ({error.strerror or error})"
            raise UserError(
                source.field, source.id, "a file or folder on this machine", hint
            ) from error
    # Hashing lets other threads run: the shards of a checkpoint are hashed side by side.
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        return list(pool.map(lambda job: _content(*job), jobs))


def keys(found: Iterable[Content], *groups: str) -> list[tuple[str, str, str]]:
    """The keys of what some groups of the config read."""
    return sorted(c.key for c in found if c.source.field.partition(".")[0] in groups)


def in_place(raw: Mapping[str, Any], found: Iterable[Content]) -> dict[str, Any]:
    """A config in which what a local file holds stands in place of its path."""
    data = deepcopy(dict(raw))
    held = dict[Source, list[Any]]()
    for content in found:
        held.setdefault(content.source, []).append(content.key)
    for source in held:
        *groups, last = source.field.split(".")
        node: Any = data
        for group in groups:
            node = node.get(group, {}) if isinstance(node, dict) else {}
        if (
            isinstance(node, dict)
            and source.kind == "path"
            and node.get(last) == source.id
        ):
            node[last] = f"sha256:{digest(held[source], 12)}"
    return data


def changed(found: Iterable[Content]) -> Content | None:
    """The first file that no longer holds what it held; one that was only touched does."""
    for content in found:
        try:
            if (
                content.file
                and stamp(content.file) != content.stamp
                and sha256(content.file) != content.held
            ):
                return content
        except OSError:
            return content
    return None


def stamp(file: Path) -> tuple[int, ...]:
    """What changes whenever a file does: size, times of its content and of its entry (ns), inode, device."""
    at = file.stat()
    return at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino, at.st_dev


def sha256(file: Path) -> str:
    """Hash of all bytes of a file."""
    file = file.resolve()
    before = stamp(file)
    note = _note(file) if before[0] >= BIG else None
    if note and (known := _remembered(note, before)):
        return known
    with open(file, "rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if note and stamp(file) == before and time.time_ns() - max(before[1:3]) > SETTLED:
        try:
            note.parent.mkdir(parents=True, exist_ok=True)
            write_text(
                note,
                json.dumps({"file": str(file), "stamp": before, "sha256": found})
                + "\n",
            )
        except OSError:
            # Nowhere to remember it: it is hashed again the next time.
            pass
    return found


def _note(file: Path) -> Path | None:
    """Where the hash of a file is remembered: a file each, so that two processes never write the same."""
    cache = sources.cache_folder()
    name = hashlib.sha256(str(file).encode(errors="surrogateescape"))
    return cache / "sha256" / f"{name.hexdigest()[:24]}.json" if cache else None


def _remembered(note: Path, now: tuple[int, ...]) -> str:
    """The remembered hash; empty where there is none, or the file changed since."""
    try:
        known = json.loads(note.read_text())
        return str(known["sha256"]) if tuple(known["stamp"]) == now else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _content(source: Source, name: str, file: Path | None) -> Content:
    if file is None:
        return Content(source, "", None, name)
    try:
        before = stamp(file)
        return Content(source, name, file.resolve(), sha256(file), before)
    except OSError as error:
        hint = f"check its permissions ({error.strerror or error})"
        raise MachineError(
            source.field, str(file), "a file that can be read", hint
        ) from error


def _files(source: Source) -> Iterator[tuple[str, Path | None]]:
    """Name and path of every file of a source; of a repository of the hub its commit alone."""
    if source.kind in ("model", "dataset"):
        yield sources.commit(source), None
        return
    place = (
        sources.local(source)
        if source.kind == "url"
        else Path(paths.model_path(source.id))
    )
    if not sources.there(place):
        allowed = (
            "a file or folder on this machine"
            if source.files
            else "a file on this machine"
        )
        raise UserError(source.field, source.id, allowed, "check the path")
    if source.files == CHECKPOINT and place.is_dir():
        named = set(sources.shards(place))
        for file in sorted(
            p for p in place.iterdir() if p.is_file() and not p.name.startswith(".")
        ):
            adapter = file.name.startswith("adapter") and file.suffix == ".safetensors"
            if file.suffix not in UNREAD or file.name in named or adapter:
                yield file.name, file
    elif place.is_dir() and source.files:
        found = {
            p for pattern in source.files for p in place.glob(pattern) if p.is_file()
        }
        yield from sorted((p.relative_to(place).as_posix(), p) for p in found)
    elif place.is_file():
        yield place.suffix, place
    else:
        raise UserError(
            source.field, source.id, "a file on this machine", "check the path"
        )
