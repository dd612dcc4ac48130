"""sha256 of files, cached for big ones, and the folder of posbench's caches."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from posbench.files.atomic import write_text
from posbench.files.parse import parse_json

MIN_CACHED_BYTES = 1 << 22
"""Size from which a file's hash is cached; a smaller file is read again each time."""

SETTLED_NANOSECONDS = 2_000_000_000
"""Time without a change before a hash is cached: two changes within one clock tick look the same."""


def cache_folder() -> Path | None:
    """``POSBENCH_CACHE``, else posbench's part of the user's cache; None where there is no home folder."""
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get("POSBENCH_CACHE") or f"{user_cache}/posbench"
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        return None


def file_stamp(file: Path) -> tuple[int, ...]:
    """Return values that change whenever a file does: size, mtime and ctime (ns), inode, device."""
    status = file.stat()
    return (
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_ino,
        status.st_dev,
    )


def file_sha256(file: Path) -> str:
    """Hash of all bytes of a file; cached for a big one."""
    file = file.resolve()
    stamp_before = file_stamp(file)
    size, modified_ns, moved_ns, *_ = stamp_before
    cache_file = _cache_file(file) if size >= MIN_CACHED_BYTES else None
    if cache_file:
        cached = _cached_hash(cache_file, stamp_before)
        if cached:
            return cached
    with open(file, "rb") as stream:
        checksum = hashlib.file_digest(stream, "sha256").hexdigest()
    if cache_file and file_stamp(file) == stamp_before:
        age_ns = time.time_ns() - max(modified_ns, moved_ns)
        if age_ns > SETTLED_NANOSECONDS:
            entry = {"file": str(file), "stamp": stamp_before, "sha256": checksum}
            _write_cache(cache_file, entry)
    return checksum


def _cache_file(file: Path) -> Path | None:
    """Return the path of a file's cached hash, one file each, so that two processes never write the same."""
    cache = cache_folder()
    if cache is None:
        return None
    name = hashlib.sha256(str(file).encode(errors="surrogateescape")).hexdigest()
    return cache / "sha256" / f"{name[:24]}.json"


def _cached_hash(cache_file: Path, current_stamp: tuple[int, ...]) -> str:
    """The cached hash; empty where there is none, or the file changed since."""
    try:
        entry = parse_json(cache_file.read_text("utf-8"))
        unchanged = tuple(entry["stamp"]) == current_stamp
        checksum = str(entry["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return checksum if unchanged else ""


def _write_cache(cache_file: Path, entry: Mapping[str, Any]) -> None:
    """Write an entry of the cache; where that is impossible, the file is hashed again the next time."""
    with suppress(OSError):
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        write_text(cache_file, json.dumps(entry) + "\n")
