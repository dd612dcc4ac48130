"""A lock that holds between machines that share a file system, whatever that one makes of ``flock``.

A lock is a folder of numbered files, of which the highest tells who holds it: its process and machine, or, by
its ending, that it is free. It is taken by making the next number, which a file system lets one process do
(``O_EXCL``), so of those that find the same dead holder one alone follows it. The holder renews the time of
its file. A dead one is known at once on its own machine, by the process table, and on another when its file
is older than :data:`LEASE` by the clock of the file system itself. (The soft locks of filelock never take
over from a dead holder where a file system cannot exchange two names, as NFS cannot.)
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from posbench.errors import MachineError, UserError

LEASE = 120.0
"""Seconds of silence after which a process of another machine may take a lock over: longer than a client of
NFS believes its cache (60 seconds), and a renewal."""
FREE = ".free"

OWNED = dict[Path, "Lease"]()
"""Locks of the run folders that this process owns."""


class Lease:
    """One process's hold on the lock in a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.file = Path()
        self._over = threading.Event()

    def take(self) -> bool:
        """Try to take the lock, once; whether it is held now.

        Raises:
            OSError: The file system does not let a file be made.
        """
        self.place.mkdir(parents=True, exist_ok=True)
        number, newest = _newest(self.place)
        if newest and _alive(newest):
            return False
        self.file = self.place / f"lock.{number + 1}"
        try:
            with open(self.file, "x") as stream:
                stream.write(
                    f"{json.dumps([_machine(), os.getpid(), started(os.getpid())])}\n"
                )
        except FileExistsError:
            return False  # another one was faster
        number, newest = _newest(self.place)
        if newest != self.file:
            # A list of files was old: many have followed each other since.
            self.file.unlink(missing_ok=True)
            return False
        for old in self.place.glob("lock.*"):
            if _number(old) < number:
                with suppress(OSError):  # another one's, which only takes room
                    old.unlink()
        self._over.clear()
        threading.Thread(target=self._renew, name="posbench-lease", daemon=True).start()
        return True

    def check(self) -> None:
        """Make sure, in front of a write, that the lock is held still.

        Raises:
            MachineError: Another process took it, or the file is gone.
        """
        try:
            os.utime(
                self.file
            )  # asks the server, where a list of files may come from a cache
            lost = _newest(self.place)[1] != self.file
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            lost = True
        if lost:
            allowed = "held by this process until it ends; another one took it, or it was removed"
            hint = f"silent for {LEASE:g} seconds (asleep, or cut off), this one stops; nothing is lost"
            raise MachineError("lock", str(self.file), allowed, hint)

    def free(self) -> None:
        """Let go of the lock."""
        self._over.set()
        with suppress(FileNotFoundError):  # another process took it
            self.file.rename(f"{self.file}{FREE}")

    def _renew(self) -> None:
        while not self._over.wait(LEASE / 6):
            # A file system that does not answer may do so the next time; writes look for themselves.
            with suppress(OSError):
                os.utime(self.file)


def held(place: Path) -> bool:
    """Whether a process holds the lock in a folder; also where that cannot be seen."""
    try:
        newest = _newest(place)[1]
        return newest is not None and _alive(newest)
    except OSError:
        return True


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run folder.

    Raises:
        UserError: Another process owns it.
    """
    folder = folder.absolute()
    lease = Lease(_lock(folder))
    for pause in (0.0, 0.2):  # whom we raced for it may have lost it as well
        time.sleep(pause)
        if lease.take():
            break
    else:
        hint = "wait for the other run, or stop it"
        raise UserError("run folder", str(folder), "one process at a time", hint)
    OWNED[folder] = lease
    try:
        yield
    finally:
        del OWNED[folder]
        lease.free()


def in_use(folder: Path) -> bool:
    """Whether a process owns a run folder; also where that cannot be seen."""
    return held(_lock(folder.absolute()))


def need_owned(folder: Path) -> None:
    """Raise MachineError where this process owned a run folder and lost it: it may write there no more."""
    if lease := OWNED.get(folder.absolute()):
        lease.check()


def _lock(folder: Path) -> Path:
    """Where the lock of a run folder lies: beside it, as it is taken before there is a folder."""
    return folder.parent / ".locks" / f"{folder.name}.lock"


def _number(file: Path) -> int:
    found = re.fullmatch(rf"lock\.(\d+)({re.escape(FREE)})?", file.name)
    return int(found[1]) if found else 0


def _newest(place: Path) -> tuple[int, Path | None]:
    """The highest number, and its file; 0 and None where the lock was never taken."""
    newest = max(place.glob("lock.*"), key=_number, default=None)
    return (_number(newest), newest) if newest else (0, None)


def _alive(file: Path) -> bool:
    """Whether the process that made the newest file of a lock holds it still."""
    if file.suffix == FREE:
        return False
    try:
        with open(
            file
        ) as stream:  # an open file's time is the server's, not that of a cache
            text = stream.read()
            renewed = os.fstat(stream.fileno()).st_mtime
        machine, pid, start = json.loads(text)
    except FileNotFoundError:
        return True  # let go of, or taken over, as we look
    except ValueError:
        machine = None  # it is being written, or its process died over that
    if machine == _machine() and os.name == "posix":
        return runs(pid, start)
    with tempfile.TemporaryFile(dir=file.parent) as probe:
        return os.fstat(probe.fileno()).st_mtime - renewed < LEASE


def _machine() -> str:
    """What tells machines and containers apart: within one, process numbers mean the same."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def runs(pid: int, start: str) -> bool:
    """Whether a process of this machine runs that began then, and is no other of the same number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return started(pid) in (
            "",
            start,
        )  # another user's, of which we may not see more
    return started(pid) == start


def started(pid: int) -> str:
    """When a process began, in ticks since this machine's start; empty where that is not known, and of one
    that has ended but was not waited for."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""
