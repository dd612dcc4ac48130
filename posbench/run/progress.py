"""How far work is, and how long things take: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

clock = time.monotonic


@dataclass
class Work:
    """Work of so many parts, and how fast it goes."""

    label: str
    total: int
    weight: float  # of all parts: where they differ much, it tells how much is left
    note: str = ""  # what it is at
    done: int = 0
    began: float = field(default_factory=lambda: clock())

    def __post_init__(self) -> None:
        self._made = 0
        self._weighed = 0.0
        self._last = self.began

    def __call__(
        self, n: int, *, before: bool = False, weight: float | None = None
    ) -> None:
        """Say that ``n`` more are done; those ``before``, by a session that this one resumes, tell nothing of
        the speed."""
        self.done += n
        if before:
            self.weight -= n
        else:
            self._made += n
            self._weighed += n if weight is None else weight
            self._last = clock()

    def __str__(self) -> str:
        """Parts done, parts a second, time elapsed and time left, as far as they are known. The speed is that
        up to the last part done: nothing seems to slow down while a long one runs."""
        now = clock()
        spent = self._last - self.began
        told = [
            f"{self.label} {self.done}/{self.total} ({100 * self.done // self.total} %)"
        ]
        known = self._weighed and spent > 0
        told += [_rate(self._made / spent)] if known else []
        told.append(f"{duration(now - self.began)} elapsed")
        if known and self.done < self.total:
            left = spent * (self.weight / self._weighed - 1) - (now - self._last)
            told.append(f"{duration(max(left, 0))} left")
        return ", ".join(told) + (f": {self.note}" if self.note else "")


@contextmanager
def progress(
    console: Console,
    every: float,
    label: str,
    total: int,
    done: int = 0,
    weight: float | None = None,
) -> Iterator[Work]:
    """Show work of ``total`` parts, ``done`` before, while the block runs; yields what is told of more. Where
    nothing is left to do nothing is shown.

    Where the console is no terminal there is a line every so many seconds, at the end, and at the start where
    something was done before; none if ``every`` is 0.
    """
    work = Work(label, total, total if weight is None else weight)
    work(done, before=True)
    if done < total and console.is_terminal and not console.is_dumb_terminal:

        def shown() -> Table:
            row = Table.grid(padding=(0, 1))
            row.add_row(ProgressBar(total, work.done, width=12), Text(str(work)))
            return row

        with Live(get_renderable=shown, console=console):
            yield work
    elif done < total and every:

        def tell() -> None:
            console.print(Text(str(work)), soft_wrap=True, highlight=False)

        if done:
            tell()
        try:
            with repeated(tell, every):
                yield work
        finally:
            tell()
    else:
        yield work


@contextmanager
def repeated(call: Callable[[], None], every: float) -> Iterator[None]:
    """Call a function every so many seconds while the block runs, from a thread of its own: one batch may
    take longer than that."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(every):
            try:
                call()
            except (
                OSError
            ):  # a closed pipe or a full disk: what the run prints next tells
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _rate(each: float) -> str:
    """Parts a second, or a minute or an hour where that is less than one."""
    unit = "s" if each >= 1 else "min" if 60 * each >= 1 else "h"
    scaled = each * {"s": 1, "min": 60, "h": 3600}[unit]
    return f"{scaled:,.{0 if scaled >= 10 else 1}f}/{unit}"


def duration(seconds: float) -> str:
    """`4.2 s`, `1.7 min`, `12 h`: a time in the largest unit that it fills."""
    units = (("d", 86400), ("h", 3600), ("min", 60))
    unit, size = next(
        ((unit, size) for unit, size in units if seconds >= size), ("s", 1)
    )
    return (
        f"{round(seconds / size, 1 if seconds < 10 * size else None)} {unit}".replace(
            ".0 ", " "
        )
    )
