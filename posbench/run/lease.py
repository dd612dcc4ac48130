"""A lock that holds between machines that share a file system, whatever that one makes of ``flock``.

A lock is a folder of numbered files, of which the highest says who holds it: its process and machine, or, by
its ending, that it is free. It is taken by making the next number, which a file system lets one process do
(``O_EXCL``), so of those that find the same dead holder one alone follows it. The holder renews the time of
its file. A dead one is known at once on its own machine, by the process table, and on another when its file
is older than :data:`LEASE_SECONDS` by the clock of the file system itself. (The soft locks of filelock never take
over from a dead holder where a file system cannot exchange two names, as NFS cannot.)
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from posbench.errors import MachineError, UserError
from posbench.files.atomic import machine_id, naming
from posbench.files.parse import parse_json
from posbench.schema import check_shape

ONE_PROCESS = "one process at a time"
"""Allowed value in the error for a run folder that another process owns."""
LEASE_SECONDS = 120.0
"""Seconds without renewal after which a process on another machine may take over a lock: longer than an NFS client
trusts its cache (60 seconds), plus a renewal."""
RENEWALS_PER_LEASE = 6
FREE = ".free"
LeaseHolder = tuple[str, int, str]
"""Machine, process number and start of the process that holds a lock."""

OWNED = dict[Path, "Lease"]()
"""Locks of the run folders that this process owns."""


class Lease:
    """One process's hold on the lock in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = Path()
        self._released = threading.Event()

    def take(self) -> bool:
        """Try once to take the lock; return whether this process holds it now.

        The holder made the file ``lock.N`` with the highest N; creating ``lock.N+1``, which only one process can do,
        takes the lock.

        Raises:
            OSError: The file system does not let a file be made.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        number, newest = _newest_file(self.folder)
        if newest and _is_held(newest):
            return False
        self.file = self.folder / f"lock.{number + 1}"
        holder = [machine_id(), os.getpid(), process_start(os.getpid())]
        try:
            with naming(self.file), open(self.file, "x") as stream:
                stream.write(f"{json.dumps(holder)}\n")
        except FileExistsError:
            return False  # another process was faster
        number, newest = _newest_file(self.folder)
        if newest != self.file:
            # The first listing was old: other processes have taken and freed the lock since.
            self.file.unlink(missing_ok=True)
            return False
        for file in self.folder.glob("lock.*"):
            if _file_number(file) < number:
                with suppress(OSError):  # another process's, which only takes space
                    file.unlink()
        self._released.clear()
        threading.Thread(target=self._renew, name="posbench-lease", daemon=True).start()
        return True

    def check(self) -> None:
        """Make sure, before a write, that this process still holds the lock.

        Raises:
            MachineError: Another process took it, or the file is gone.
        """
        try:
            # This asks the server, where a listing may come from a cache.
            os.utime(self.file)
            lost = _newest_file(self.folder)[1] != self.file
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            lost = True
        if lost:
            allowed = "a lock that this process holds until it ends; another process took or removed it"
            silence = f"silent for {LEASE_SECONDS:g} seconds (asleep or cut off)"
            hint = f"repeat the command: this process was {silence} and stopped; nothing is lost"
            raise MachineError("lock", str(self.file), allowed, hint)

    def free(self) -> None:
        """Release the lock."""
        self._released.set()
        with suppress(FileNotFoundError):  # another process took it
            self.file.rename(f"{self.file}{FREE}")

    def _renew(self) -> None:
        while not self._released.wait(LEASE_SECONDS / RENEWALS_PER_LEASE):
            # A file system that does not answer may do so the next time; writes check for themselves.
            with suppress(OSError):
                os.utime(self.file)


def is_held(folder: Path) -> bool:
    """Return whether a process holds the lock in a folder; true where that cannot be read."""
    try:
        _, newest = _newest_file(folder)
        return newest is not None and _is_held(newest)
    except OSError:
        return True


@contextmanager
def owning(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run folder for a block.

    Raises:
        UserError: Another process owns it.
    """
    folder = folder.absolute()
    lease = Lease(_lock_folder(folder))
    if not lease.take():
        time.sleep(0.2)  # the process that was faster may have lost it as well
        if not lease.take():
            hint = "wait for the other run, or stop it"
            raise UserError("run folder", str(folder), ONE_PROCESS, hint)
    OWNED[folder] = lease
    try:
        yield
    finally:
        del OWNED[folder]
        lease.free()


def in_use(folder: Path) -> bool:
    """Return whether a process owns a run folder; true where that cannot be read."""
    return is_held(_lock_folder(folder.absolute()))


def need_owned(folder: Path) -> None:
    """Check before a write to a run folder that this process still owns it, if it ever did.

    Raises:
        MachineError: Another process took the folder.
    """
    lease = OWNED.get(folder.absolute())
    if lease:
        lease.check()


def _lock_folder(run_folder: Path) -> Path:
    """Return the path of a run folder's lock: next to the folder, as the lock is taken before the folder exists."""
    return run_folder.parent / ".locks" / f"{run_folder.name}.lock"


def _file_number(file: Path) -> int:
    match = re.fullmatch(rf"lock\.(\d+)({re.escape(FREE)})?", file.name)
    return int(match[1]) if match else 0


def _newest_file(folder: Path) -> tuple[int, Path | None]:
    """The highest number of a lock, and its file; 0 and None where the lock was never taken."""
    newest = max(folder.glob("lock.*"), key=_file_number, default=None)
    if newest is None:
        return 0, None
    return _file_number(newest), newest


def _is_held(file: Path) -> bool:
    """Whether the process that made a lock's newest file still holds the lock.

    On this machine it does as long as it lives; on another, as long as it renewed the file's time lately.
    """
    if file.suffix == FREE:
        return False
    machine = None
    try:
        # The time of an open file comes from the file server, not from a cache.
        with open(file) as stream:
            text = stream.read()
            renewed = os.fstat(stream.fileno()).st_mtime
        holder = parse_json(text)
        machine, pid, start = check_shape(holder, LeaseHolder, str(file), "wait")
    except FileNotFoundError:
        return True  # freed, or taken over, at this moment
    except (ValueError, UserError):
        pass  # it is being written, or its process died over that
    # Without its start (as on macOS) another process that has its number by now would pass for it.
    if machine is not None and machine == machine_id() and os.name == "posix" and start:
        return is_alive(pid, start)
    # A new file has the file server's present time, as clocks of machines differ.
    with tempfile.TemporaryFile(dir=file.parent) as probe:
        return os.fstat(probe.fileno()).st_mtime - renewed < LEASE_SECONDS


def is_alive(pid: int, start: str) -> bool:
    """Return whether a process of this machine still runs.

    Args:
        pid: Its number, which another process may have by now.
        start: When it began, by :func:`process_start`.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # Another user's process, whose start we may not be allowed to read.
        return process_start(pid) in ("", start)
    return process_start(pid) == start


def process_start(pid: int) -> str:
    """Return when a process began, in ticks since this machine's start.

    Empty where that is not known, and for a process that has ended but was not waited for.
    """
    with suppress(OSError):
        # After the command's name, which may contain spaces: state first, start time as the 20th.
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""
