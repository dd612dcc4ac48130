"""The one error a user can cause, printed as one line for each fault."""

from __future__ import annotations

import difflib
import errno
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """Bad input: the dotted name of a field, argument or file, its value, what is allowed and the next step.

    The command line prints ``str(error)`` and exits with its ``status``.
    """

    status = 2

    def __init__(self, field: str, value: object, allowed: str, hint: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        line = (
            f"{self.field} = {self.value!r}: allowed: {self.allowed}; next: {self.hint}"
        )
        return " ".join(line.split())

    def __reduce__(self) -> tuple[type[UserError], tuple[object, ...]]:
        # What an error is made of goes between processes, not its text.
        return type(self), (self.field, self.value, self.allowed, self.hint)

    @property
    def faults(self) -> tuple[UserError, ...]:
        """Every fault; this one alone, but for :class:`SeveralErrors`."""
        return (self,)


class MachineError(UserError):
    """The machine stands in the way (disk, permission, memory), not the input."""

    status = 3


NAMES = "ENOSPC EDQUOT EACCES EPERM EROFS EMFILE ENFILE EFBIG EIO ENOMEM ENOLCK"
OF_THE_MACHINE = {
    number for number, name in errno.errorcode.items() if name in NAMES.split()
}
"""Errors of the system that no argument can correct: disk, permission, open files, memory."""
NO_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")


def is_machine_fault(error: BaseException) -> bool:
    """Whether the machine, not input or code, made an error; torch reports memory in its own ways."""
    if isinstance(error, OSError):
        return error.errno in OF_THE_MACHINE
    out_of_memory = (
        isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    )
    return out_of_memory or (
        isinstance(error, RuntimeError) and any(t in str(error) for t in NO_MEMORY)
    )


def in_one_line(error: BaseException) -> UserError | None:
    """An error as one line: bad input, the machine, or a name too long for it; None for any other."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = str(error.filename)
        return UserError(
            "file", f"{name[:60]}...", "a name of at most 255 bytes", "shorten it"
        )
    return error if isinstance(error, UserError) else machine_error(error)


def machine_error(error: BaseException) -> MachineError | None:
    """An error of the machine as one line; None for any other."""
    if not is_machine_fault(error):
        return None
    if not isinstance(error, OSError):
        hint = "set a smaller runtime.batch_size, or take a smaller model; the same command resumes"
        return MachineError(
            "memory", " ".join(str(error).split())[:120], "enough of it", hint
        )
    hint = (
        f"see to that ({error.strerror or error}), then repeat the command: it resumes"
    )
    return MachineError(
        "file",
        error.filename or "none named",
        "a disk that takes and gives files",
        hint,
    )


class SeveralErrors(UserError):
    """Several faults that were found together; its text has a line for each."""

    def __init__(self, faults: Sequence[UserError]) -> None:
        self._faults = tuple(one for fault in faults for one in fault.faults)
        first = self._faults[0]
        super().__init__(first.field, first.value, first.allowed, first.hint)

    def __reduce__(self) -> tuple[type[UserError], tuple[object, ...]]:
        return SeveralErrors, (self._faults,)

    def __str__(self) -> str:
        return "\n".join(str(fault) for fault in self._faults)

    @property
    def faults(self) -> tuple[UserError, ...]:
        """Every fault."""
        return self._faults


class Faults:
    """Collects faults in ``found``, so that a user hears of all of them at once."""

    def __init__(self) -> None:
        self.found: list[UserError] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Keep a fault of this block and go on behind it."""
        try:
            yield
        except UserError as error:
            self.found.append(error)

    def raise_any(self) -> None:
        """Raise the UserError that was collected; several make a :class:`SeveralErrors`."""
        if self.found:
            raise _together(self.found)


def _together(faults: Sequence[UserError]) -> UserError:
    first = dict[tuple[str, str], UserError]()
    for fault in (one for several in faults for one in several.faults):
        # Several checks may look at one value: the first word on it is as good as the others.
        first.setdefault((fault.field, repr(fault.value)), fault)
    found = [*first.values()]
    return found[0] if len(found) == 1 else SeveralErrors(found)


def complain(error: UserError) -> None:
    """Print each fault of an error as one line on stderr."""
    for fault in error.faults:
        print(f"posbench: {fault}", file=sys.stderr)


@contextmanager
def renamed(own: str, shown: str) -> Iterator[None]:
    """Let the errors of a block name ``shown`` where they would name ``own``, in all their parts."""

    def told(fault: UserError) -> UserError:
        if fault.field.startswith(shown):
            return fault
        field, allowed, hint = (
            t.replace(own, shown) for t in (fault.field, fault.allowed, fault.hint)
        )
        return type(fault)(field, fault.value, allowed, hint)

    try:
        yield
    except UserError as error:
        found = _together([told(fault) for fault in error.faults])
        if found is error:
            raise
        raise found from error


def choices(*folders: Path) -> list[str]:
    """Names of the YAML files in config folders."""
    return sorted({p.stem for folder in folders for p in folder.glob("*.yaml")})


def near(name: str, known: Sequence[str], otherwise: str) -> str:
    """A hint that names the closest known name, or says something else."""
    begun = [k for k in known if name and k.startswith(name)]
    match = begun[:1] or difflib.get_close_matches(name, known, n=1)
    return f"did you mean {match[0]}?" if match else otherwise
