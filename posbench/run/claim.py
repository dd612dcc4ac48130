"""Where a run lies: in a version folder of its suite, claimed by one process."""

from __future__ import annotations

import errno
import itertools
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
from posbench.run.folder import PROVENANCE, RunDir, ids, plain, run_id
from posbench.run.lease import LEASE, Lease, owned

log = logging.getLogger(__name__)

WAIT = LEASE + 30
"""Seconds to wait for another process that is making a version folder: it may have died elsewhere."""


def find(
    outputs: Path, suite: str, version_key: Mapping[str, Any], name: str
) -> Path | None:
    """The folder that :func:`claim` would resume; None where it would make a new one. Makes nothing.

    Raises:
        UserError: The outputs cannot be read, or not be written where there is something to write.
    """
    try:
        nearest = next(
            p for p in (outputs.absolute(), *outputs.absolute().parents) if p.exists()
        )
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is no folder")
        there = (outputs / suite).is_dir()
        version = (
            _known_version(outputs / suite, version_key, name)[0] if there else None
        )
        folder = version / name if version and (version / name).is_dir() else None
        if not os.access(nearest, os.W_OK) and not (folder and RunDir(folder).done):
            raise PermissionError(errno.EACCES, f"{nearest} cannot be written")
    except OSError as error:
        raise _unusable(outputs, error) from error
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

    The version folder is the one that holds this run, else the newest whose key equals ``version_key``, else
    a new one: what lies in one version was made by the same code. A new run folder
    appears at once, with ``config.yaml`` and ``provenance.json``. A finished run where nothing can be
    written is yielded without a lock: it can be read.

    Raises:
        UserError: Another process owns the folder, or it cannot be written.
    """
    known = find(outputs, suite, version_key, name)
    own = run_id(version_key, name)
    with ExitStack() as stack:
        try:
            (outputs / suite).mkdir(parents=True, exist_ok=True)
            with _waiting_for(outputs / suite / ".locks" / "versions.lock"):
                folder = _version(outputs / suite, version_key, name) / name
            stack.enter_context(owned(folder))
            if not folder.is_dir():
                made = RunDir(_scratch(folder.parent / f".new-{name}"), own)
                (made.path / "figures").mkdir()
                made.write_facts(PROVENANCE, provenance)
                made.resume((), config, provenance)
                os.rename(made.path, folder)
        except OSError as error:
            if not (
                known
                and RunDir(known).done
                and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
            ):
                raise _unusable(outputs, error) from error
            folder = known
        yield RunDir(folder, own)


@contextmanager
def _waiting_for(lock: Path) -> Iterator[None]:
    """Hold a lock that others hold for moments only: say so after a second, give up after ``WAIT`` seconds.

    Raises:
        MachineError: It was held all the time.
    """
    lease = Lease(lock)
    began = time.monotonic()
    told = False
    while not lease.take():
        waited = time.monotonic() - began
        if waited > min(1.0, WAIT) and not told:
            log.warning(
                "waiting up to %d seconds for another process that holds %s", WAIT, lock
            )
            told = True
        if waited > WAIT:
            allowed = f"free within {WAIT:g} seconds"
            hint = "look for a posbench that hangs, and stop it"
            raise MachineError("lock", str(lock), allowed, hint)
        time.sleep(random.uniform(0.02, 0.1))
    try:
        yield
    finally:
        lease.free()


def _unusable(outputs: Path, error: OSError) -> UserError:
    kind = MachineError if is_machine_fault(error) else UserError
    hint = f"set runtime.outputs=DIR ({error.strerror or error})"
    return kind("runtime.outputs", str(outputs), "a folder that can be written", hint)


def _known_version(
    suite: Path, key: Mapping[str, Any], name: str
) -> tuple[Path | None, int]:
    """The version folder that holds the run, else the newest with this key and nothing else under the run's
    name; and the highest number of any."""
    there = {
        int(p.name[1:]): p
        for p in suite.iterdir()
        if re.fullmatch("v[0-9]+", p.name) and p.is_dir()
    }
    newest = [there[number] for number in sorted(there, reverse=True)]
    own = {run_id(key, name)}
    holding = (version for version in newest if own & {*ids(version / name)})
    same = (v for v in newest if _key_of(v) == plain(key) and {*ids(v / name)} <= own)
    return next(itertools.chain(holding, same), None), max(there, default=0)


def _key_of(version: Path) -> Any:
    """The key of a version folder; None where its file is absent or damaged, which stops no other."""
    file = version / "version.json"
    try:
        return json.loads(file.read_bytes()) if file.is_file() else None
    except ValueError:
        log.warning("%s: damaged; no run is added to that version", file)
        return None


def _version(suite: Path, key: Mapping[str, Any], name: str) -> Path:
    """The version folder of a run, its key written again where it is damaged; else a new one."""
    known, highest = _known_version(suite, key, name)
    text = json.dumps(plain(key), indent=2, sort_keys=True) + "\n"
    if known:
        if _key_of(known) != plain(key):
            write_text(known / "version.json", text)
        return known
    folder = suite / f"v{highest + 1:03d}"
    made = _scratch(suite / ".new-version")
    write_text(made / "version.json", text)
    os.rename(made, folder)
    return folder


def _scratch(folder: Path) -> Path:
    """An empty folder; what a killed process left there is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
