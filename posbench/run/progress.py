"""Progress and remaining time of long work: a bar on a terminal, elsewhere a line now and then.

rich.progress prints no intermediate lines without a terminal, and its estimate assumes equally long parts, those of an
earlier session included.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from itertools import repeat as repeat_value

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

clock = time.monotonic

SECONDS_PER_UNIT = {"s": 1, "min": 60, "h": 3600, "d": 86400}
BAR_WIDTH = 12
FIRST_LINE_SECONDS = 8.0
"""Seconds before the first line, where lines are further apart."""


@dataclass
class Progress:
    """Number of finished parts of some work, and its speed.

    Attributes:
        label: Name of the work.
        total: Number of parts.
        weight: Work of all parts, from which the time left is estimated where parts differ much.
        note: Current activity.
        done: Parts done so far, earlier sessions included.
        began: Start, by :data:`clock`.
        tokens: Counts the tokens that a model has read; None: there is no model.
        spent: Returns the spending so far as text; None: nothing is spent.
    """

    label: str
    total: int
    weight: float
    note: str = ""
    done: int = 0
    began: float = field(default_factory=lambda: clock())
    tokens: Callable[[], int] | None = None
    spent: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        self._tokens_before = self.tokens() if self.tokens else 0
        self._session_parts = 0
        self._session_weight = 0.0
        self._last_advance = self.began

    def __call__(
        self, n: int, *, before: bool = False, weight: float | None = None
    ) -> None:
        """Count ``n`` more parts as done.

        Args:
            n: Number of parts.
            before: Whether an earlier session did them: they say nothing about the speed.
            weight: Their work; None: one a part.
        """
        self.done += n
        if before:
            self.weight -= n
            return
        self._session_parts += n
        self._session_weight += n if weight is None else weight
        self._last_advance = clock()

    def __str__(self) -> str:
        """Parts done, parts a second, time elapsed and time left, as far as they are known.

        The speed is measured at the last finished part, so that it does not fall while a long part runs.
        """
        now = clock()
        seconds = self._last_advance - self.began
        speed_known = bool(self._session_weight) and seconds > 0
        percent = 100 * self.done // self.total
        parts = [f"{self.label} {self.done}/{self.total} ({percent} %)"]
        if speed_known:
            parts.append(_rate(self._session_parts / seconds))
        elif self.tokens:
            # The first batch of a large model takes a while.
            num_tokens = self.tokens() - self._tokens_before
            if num_tokens:
                parts.append(f"{num_tokens:,} tokens read")
        parts.append(f"{duration(now - self.began)} elapsed")
        if speed_known and self.done < self.total:
            remaining = seconds * (self.weight / self._session_weight - 1)
            remaining -= now - self._last_advance
            if (
                remaining > 0
            ):  # a part that takes longer than those before has no known end
                parts.append(f"{duration(remaining)} left")
        if self.spent:
            parts.append(f"{self.spent()} spent")
        text = ", ".join(parts)
        return f"{text}: {self.note}" if self.note else text


@contextmanager
def progress(
    console: Console,
    interval: float,
    label: str,
    total: int,
    done: int = 0,
    weight: float | None = None,
    tokens: Callable[[], int] | None = None,
    spent: Callable[[], object] | None = None,
    first_line: bool = True,
) -> Iterator[Progress]:
    """Show the progress of work while the block runs, unless nothing is left to do.

    Where the console is no terminal it prints lines: one every ``interval`` seconds, one at the end, and one at the
    start if parts were done before.

    Args:
        console: Shows the progress.
        interval: Seconds between lines; 0: no lines.
        label: Name of the work.
        total: Number of parts.
        done: Parts that an earlier session did.
        weight: Work of all parts; None: one a part.
        tokens: Counts the tokens that a model has read.
        spent: Returns the spending so far as text.
        first_line: Whether a line comes soon after the start, too.

    Yields:
        A function to call with the number of finished parts.
    """
    all_weight = total if weight is None else weight
    work = Progress(label, total, all_weight, tokens=tokens, spent=spent)
    work(done, before=True)

    def bar() -> Table:
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(total, work.done, width=BAR_WIDTH), Text(str(work)))
        return row

    def print_line() -> None:
        console.print(Text(str(work)), soft_wrap=True, highlight=False)

    if done >= total:
        yield work
    elif console.is_terminal and not console.is_dumb_terminal:
        with Live(get_renderable=bar, console=console):
            yield work
    elif interval:
        if done:
            print_line()
        try:
            first = min(interval, FIRST_LINE_SECONDS) if first_line else None
            with repeating(print_line, interval, first):
                yield work
        finally:
            print_line()
    else:
        yield work


@contextmanager
def repeating(
    call: Callable[[], None], interval: float, first: float | None = None
) -> Iterator[None]:
    """Call a function every ``interval`` seconds while the block runs, in a thread, as one batch may take longer.

    Args:
        call: The function; it is not called again after an OSError (a closed pipe, a full disk).
        interval: Seconds between calls.
        first: Seconds until one more call at the beginning, if given.
    """
    ended = threading.Event()

    def repeat() -> None:
        pauses: Iterator[float] = repeat_value(interval)
        if first is not None and first < interval:
            pauses = chain([first, interval - first], pauses)
        for seconds in pauses:
            if ended.wait(seconds):
                return
            try:
                call()
            except OSError:
                return  # a closed pipe or a full disk: the next print raises

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _rate(per_second: float) -> str:
    """Return a rate as text, such as `12/s`, `3.4/min` or `2.0/h`: in the unit in which it is at least one."""
    if per_second >= 1:
        unit = "s"
    elif 60 * per_second >= 1:
        unit = "min"
    else:
        unit = "h"
    rate = per_second * SECONDS_PER_UNIT[unit]
    decimals = 0 if rate >= 10 else 1
    return f"{rate:,.{decimals}f}/{unit}"


def duration(seconds: float) -> str:
    """Return a time in the largest unit that it fills: `4.2 s`, `1.7 min`, `12 h`."""
    unit = "s"
    for larger in ("min", "h", "d"):
        if seconds >= SECONDS_PER_UNIT[larger]:
            unit = larger
    size = SECONDS_PER_UNIT[unit]
    # One decimal below ten units.
    digits = 1 if seconds < 10 * size else None
    return f"{round(seconds / size, digits)} {unit}".replace(".0 ", " ")
