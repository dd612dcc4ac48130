"""The one error a user can cause, printed as one line for each fault."""

from __future__ import annotations

import difflib
import errno
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PACKAGE = Path(__file__).parent
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
TRACEBACK = "POSBENCH_TRACEBACK"
"""Environment variable that has the traceback of an error printed before its line."""
MAX_ERROR_CHARACTERS = 200
"""Characters of another program's error that a line repeats."""
MAX_CLOSEST = 5
"""Names that an error lists of many."""


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
        fault = f"{self.field} = {self.value!r}"
        line = f"{fault}: allowed: {self.allowed}; next: {self.hint}"
        return " ".join(line.split())

    def __reduce__(self) -> tuple[type[UserError], tuple[object, ...]]:
        # Pickled as its parts: an exception is pickled as its text otherwise.
        return type(self), (self.field, self.value, self.allowed, self.hint)

    @property
    def faults(self) -> tuple[UserError, ...]:
        """Every fault; this one alone, but for :class:`SeveralErrors`."""
        return (self,)


class IncompleteRun(Exception):
    """Some rows failed; they are recorded and retried by the next run of the same command."""


class MachineError(UserError):
    """An error of the machine (disk, permission, memory), not of the input."""

    status = 3


MACHINE_ERRNO_NAMES = (
    "ENOSPC",
    "EDQUOT",
    "EACCES",
    "EPERM",
    "EROFS",
    "EMFILE",
    "ENFILE",
    "EFBIG",
    "EIO",
    "ENOMEM",
    "ENOLCK",
)
"""Errors of the system that no argument can correct: disk, permission, open files, memory."""
MACHINE_ERRNOS = {
    number for number, name in errno.errorcode.items() if name in MACHINE_ERRNO_NAMES
}
OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
)


def is_machine_fault(error: BaseException) -> bool:
    """Whether the machine, not input or code, made an error; torch reports memory in its own ways."""
    if isinstance(error, OSError):
        return error.errno in MACHINE_ERRNOS
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    is_runtime_error = isinstance(error, RuntimeError)
    return is_runtime_error and any(t in str(error) for t in OUT_OF_MEMORY_TEXTS)


def in_one_line(error: BaseException) -> UserError | None:
    """An error as one line: bad input, the machine, a name too long for it, a file in the way of a folder, or the
    user's own code.

    None for any other, which is a defect of posbench.
    """
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = f"{str(error.filename)[:60]}..."
        return UserError(
            "file", name, "a file name of at most 255 bytes", "shorten the name"
        )
    return machine_error(error) or own_code_error(error) or _blocked_folder(error)


def _blocked_folder(error: BaseException) -> UserError | None:
    """The error of a folder that cannot be made, as something else has its name; None for any other."""
    if not isinstance(error, FileExistsError | NotADirectoryError):
        return None
    allowed = "a folder that can be made: a file or a link to nothing is in the way"
    hint = "rename or remove that, or name another folder"
    return UserError("folder", str(error.filename), allowed, hint)


def own_code_error(error: BaseException) -> UserError | None:
    """An error of a method, task, search or study of the user's own; None where posbench's code raised it.

    The line that is named is the last one of the user's file on the way to the error. Libraries that it calls may
    have raised the error; where it calls posbench, posbench did.
    """
    user_line = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        file = Path(code.co_filename)
        if file.is_relative_to(PACKAGE):
            user_line = None
        elif not code.co_filename.startswith("<") and not _is_library(file):
            user_line = f"{code.co_qualname} ({file}, line {line})"
    if user_line is None:
        return None
    text = " ".join(str(error).split())[:MAX_ERROR_CHARACTERS]
    value = f"{type(error).__name__}: {text}"
    hint = (
        f"correct that line; {TRACEBACK}=1 in front of the command prints the traceback"
    )
    return UserError(user_line, value, "code that raises no error", hint)


def _is_library(file: Path) -> bool:
    """Whether a file is Python's or an installed package's."""
    if {"site-packages", "dist-packages"} & set(file.parts):
        return True
    return file.is_relative_to(STANDARD_LIBRARY)


def machine_error(error: BaseException) -> MachineError | None:
    """An error of the machine as one line; None for any other."""
    if not is_machine_fault(error):
        return None
    if isinstance(error, OSError):
        # Of a stream that cannot be written the system tells no name.
        name = error.filename or "the output, or another file without a name"
        allowed = "a file system that can be read and written"
        hint = f"free space or correct the permissions ({error.strerror or error}), then repeat the command: it resumes"
        return MachineError("file", name, allowed, hint)
    text = " ".join(str(error).split())[:120]
    hint = "set a smaller runtime.batch_size or use a smaller model; the same command resumes"
    return MachineError("memory", text, "enough memory", hint)


class SeveralErrors(UserError):
    """Several faults that were found together; its text has a line for each."""

    def __init__(self, faults: Sequence[UserError]) -> None:
        self._faults = tuple(fault for error in faults for fault in error.faults)
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
    """Collects errors in ``found``, so that a user sees all at once."""

    def __init__(self) -> None:
        self.found: list[UserError] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Record a UserError of this block, and continue after the block."""
        try:
            yield
        except UserError as error:
            self.found.append(error)

    def raise_any(self) -> None:
        """Raise the UserError that was collected; several make a :class:`SeveralErrors`."""
        if self.found:
            raise merge_errors(self.found)


def merge_errors(errors: Sequence[UserError]) -> UserError:
    """One error with the faults of all."""
    by_value: dict[tuple[str, str], UserError] = {}
    for error in errors:
        for fault in error.faults:
            # Several checks may refuse one value: the first one that does is as good as the others.
            by_value.setdefault((fault.field, repr(fault.value)), fault)
    faults = list(by_value.values())
    return faults[0] if len(faults) == 1 else SeveralErrors(faults)


def complain(error: UserError) -> None:
    """Print each fault of an error as one line on stderr."""
    for fault in error.faults:
        print(f"posbench: {fault}", file=sys.stderr)


@contextmanager
def renamed(old: str, new: str) -> Iterator[None]:
    """Let the errors of a block name ``new`` where they would name ``old``: in field, allowed and hint.

    A method says ``method.KEY`` and a task ``task.KEY``, for they do not know their place in the config.
    """
    try:
        yield
    except UserError as error:
        merged = merge_errors([_rename(fault, old, new) for fault in error.faults])
        if merged is error:
            raise
        raise merged from error


def _rename(fault: UserError, old: str, new: str) -> UserError:
    if fault.field.startswith(new):
        return fault
    field = fault.field.replace(old, new)
    allowed = fault.allowed.replace(old, new)
    hint = fault.hint.replace(old, new)
    return type(fault)(field, fault.value, allowed, hint)


def choices(*folders: Path) -> list[str]:
    """Names of the YAML files in config folders."""
    return sorted({p.stem for folder in folders for p in folder.glob("*.yaml")})


def unknown_name(
    field: str, name: str, candidates: Sequence[str], listing: str
) -> UserError:
    """The error for a name out of many: the few that are closest, the number of the others, and the command for all."""
    matches = difflib.get_close_matches(
        name, candidates, n=MAX_CLOSEST, cutoff=0.5
    ) or list(candidates[:MAX_CLOSEST])
    others = len(candidates) - len(matches)
    text = ", ".join(matches)
    if others:
        text += f" and {others} others ({listing})"
    return UserError(field, name, text, near(name, candidates, listing))


def near(name: str, candidates: Sequence[str], otherwise: str) -> str:
    """A hint that names the closest candidate; ``otherwise`` where none is close."""
    longer = [
        candidate for candidate in candidates if name and candidate.startswith(name)
    ]
    matches = longer or difflib.get_close_matches(name, candidates, n=1)
    return f"did you mean {matches[0]}?" if matches else otherwise
