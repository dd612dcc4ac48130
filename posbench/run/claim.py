"""Where a run lies: in a version folder of its suite, claimed by one process."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from posbench.errors import MachineError, UserError, is_machine_fault
from posbench.files.atomic import write_text
from posbench.files.parse import parse_json
from posbench.run.folder import (
    PROVENANCE,
    RunDir,
    as_json,
    need_outside_runs,
    recorded_run_ids,
    run_id,
)
from posbench.run.lease import LEASE_SECONDS, Lease, owning

log = logging.getLogger(__name__)

WAIT_SECONDS = LEASE_SECONDS + 30
"""Seconds to wait for another process that is making a version folder: it may have died elsewhere."""
SECONDS_BEFORE_WARNING = 1.0
VERSION_FILE = "version.json"
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def find(
    outputs: Path, suite: str, version_key: Mapping[str, Any], name: str
) -> Path | None:
    """Return the folder that :func:`claim` would resume, or None where it would make a new one.

    Nothing is written.

    Args:
        outputs: Folder of all runs.
        suite: The experiment's, study's or task's folder in it.
        version_key: Key that all runs of a version folder share.
        name: Name of the run's folder.

    Raises:
        UserError: The outputs lie in a run, cannot be read, or not be written where there is something to write.
    """
    need_outside_runs("runtime.outputs", outputs)
    try:
        absolute = (outputs / suite).absolute()
        existing = next(p for p in (absolute, *absolute.parents) if os.path.lexists(p))
        if not existing.is_dir():
            kind = "no folder" if existing.exists() else "a link to nothing"
            raise NotADirectoryError(errno.ENOTDIR, f"{existing} is {kind}")
        folder = None
        if (outputs / suite).is_dir():
            version, _ = _find_version(outputs / suite, version_key, name)
            if version and (version / name).is_dir():
                folder = version / name
        finished = folder is not None and RunDir(folder).done
        if not finished and not os.access(existing, os.W_OK):
            raise PermissionError(errno.EACCES, f"{existing} cannot be written")
    except OSError as error:
        raise _unusable_outputs(outputs, error) from error
    return folder


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

    The version folder is the one that holds this run, else the newest whose key equals ``version_key``, else a new one:
    all runs in a version were made by the same code. A new run folder appears at once, with ``config.yaml`` and
    ``provenance.json``. A finished run in a folder that cannot be written is yielded without a lock: it can be read.

    Args:
        outputs: Folder of all runs.
        suite: The experiment's, study's or task's folder in it.
        version_key: Key that all runs of a version folder share.
        name: Name of the run's folder.
        config: Recorded in a new run folder.
        provenance: Recorded in a new run folder.

    Raises:
        UserError: Another process owns the folder, or it cannot be written.
    """
    existing = find(outputs, suite, version_key, name)
    own_id = run_id(version_key, name)
    with ExitStack() as stack:
        try:
            (outputs / suite).mkdir(parents=True, exist_ok=True)
            with _holding(outputs / suite / ".locks" / "versions.lock"):
                folder = (
                    _find_or_make_version(outputs / suite, version_key, name) / name
                )
            stack.enter_context(owning(folder))
            if not folder.is_dir():
                new = RunDir(_empty_folder(folder.parent / f".new-{name}"), own_id)
                (new.path / "figures").mkdir()
                new.write_facts(PROVENANCE, provenance)
                new.resume((), config, provenance)
                os.rename(new.path, folder)
        except OSError as error:
            finished = existing is not None and RunDir(existing).done
            if existing is None or not finished or error.errno not in READ_ONLY:
                raise _unusable_outputs(outputs, error) from error
            folder = existing
        yield RunDir(folder, own_id)


@contextmanager
def _holding(lock: Path) -> Iterator[None]:
    """Hold a lock for a block; other processes hold it for moments only, so this waits for them.

    Raises:
        MachineError: Another process held it for :data:`WAIT_SECONDS`.
    """
    lease = Lease(lock)
    started = time.monotonic()
    warned = False
    while not lease.take():
        waited = time.monotonic() - started
        if waited > min(SECONDS_BEFORE_WARNING, WAIT_SECONDS) and not warned:
            message = "waiting up to %d seconds for another process that holds %s"
            log.warning(message, WAIT_SECONDS, lock)
            warned = True
        if waited > WAIT_SECONDS:
            allowed = f"free within {WAIT_SECONDS:g} seconds"
            hint = "stop the posbench process that holds it"
            raise MachineError("lock", str(lock), allowed, hint)
        time.sleep(random.uniform(0.02, 0.1))
    try:
        yield
    finally:
        lease.free()


def _unusable_outputs(outputs: Path, error: OSError) -> UserError:
    kind = MachineError if is_machine_fault(error) else UserError
    hint = f"set runtime.outputs=DIR ({error.strerror or error})"
    return kind("runtime.outputs", str(outputs), "a folder that can be written", hint)


def _find_version(
    suite: Path, version_key: Mapping[str, Any], name: str
) -> tuple[Path | None, int]:
    """Find the version folder (``vNNN``) that a run belongs to.

    It is the one that holds the run, else the newest with this key in which no other run has its name.

    Args:
        suite: Folder of the experiment or task.
        version_key: What all runs of a version have in common.
        name: Name of the run's folder.

    Returns:
        The version folder, None if there is none, and the highest number of any version, 0 without versions.
    """
    versions = {
        int(folder.name[1:]): folder
        for folder in suite.iterdir()
        if re.fullmatch("v[0-9]+", folder.name) and folder.is_dir()
    }
    newest_first = [versions[number] for number in sorted(versions, reverse=True)]
    highest = max(versions, default=0)
    own_id = run_id(version_key, name)
    for version in newest_first:
        if own_id in recorded_run_ids(version / name):
            return version, highest
    for version in newest_first:
        same_key = _read_version_key(version) == as_json(version_key)
        if same_key and set(recorded_run_ids(version / name)) <= {own_id}:
            return version, highest
    return None, highest


def _read_version_key(version: Path) -> Any:
    """Return the key of a version folder; None where its file is absent, or damaged, of which a warning tells."""
    file = version / VERSION_FILE
    if not file.is_file():
        return None
    try:
        return parse_json(file.read_bytes())
    except ValueError:
        log.warning("%s: damaged; no run is added to that version", file)
        return None


def _find_or_make_version(
    suite: Path, version_key: Mapping[str, Any], name: str
) -> Path:
    """Return the version folder of a run, made if there is none; its key is written again where it is damaged.

    Args:
        suite: Folder of versions v001, v002, ...
        version_key: What runs of a version share, such as digests of data.
        name: Name of the run's folder.
    """
    version, highest = _find_version(suite, version_key, name)
    text = json.dumps(as_json(version_key), indent=2, sort_keys=True) + "\n"
    if version:
        if _read_version_key(version) != as_json(version_key):
            write_text(version / VERSION_FILE, text)
        return version
    folder = suite / f"v{highest + 1:03d}"
    # Made beside and renamed, so that no process sees a version without its key.
    scratch = _empty_folder(suite / ".new-version")
    write_text(scratch / VERSION_FILE, text)
    os.rename(scratch, folder)
    return folder


def _empty_folder(folder: Path) -> Path:
    """Make an empty folder; remove the files that a killed process left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
