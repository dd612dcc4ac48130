"""A sign of life: prints the current activity of a command after a silence.

Loops over rows have :mod:`posbench.run.progress`; this covers the time between them: libraries, files, prompts, plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from posbench.late import transformers
from posbench.run import progress
from posbench.run.progress import duration

SILENT_SECONDS = 7.0
"""Seconds without a line after which the activity is printed."""
INTERVAL_SECONDS = 30.0
"""Default of the seconds between lines about one activity."""
LOOK_SECONDS = 0.5


@dataclass
class Activity:
    """An activity of a command, which lasts as long as a block runs.

    Attributes:
        text: Describes it.
        began: Start, by the clock of :mod:`posbench.run.progress`.
        is_timed: Whether its time is printed, too.
        is_said: Whether a line about it was printed.
    """

    text: Callable[[], str]
    began: float
    is_timed: bool = True
    is_said: bool = False


@dataclass
class Heartbeat:
    """Prints the current activity after :data:`SILENT_SECONDS` without output.

    Attributes:
        say: Prints a line.
        interval: Seconds between lines about the same activity; 0: no lines.
        activities: Current activities, the innermost last.
        num_bars: Loops that show a bar on a terminal now.
    """

    say: Callable[[str], None]
    interval: float = INTERVAL_SECONDS
    activities: list[Activity] = field(default_factory=list)
    num_bars: int = 0

    def __post_init__(self) -> None:
        self._last_sign = progress.clock()

    def sign(self) -> None:
        """Note that something was printed."""
        self._last_sign = progress.clock()

    def look(self) -> None:
        """Print the current activity if nothing was printed for some time.

        It stays silent while a progress bar is on screen. An activity is first printed after ``SILENT_SECONDS``, or the
        interval if that is shorter, and then once an interval.
        """
        if not self.interval or self.num_bars or not self.activities:
            return
        now = progress.clock()
        activity = self.activities[-1]
        pause = self.interval if activity.is_said else SILENT_SECONDS
        if now - self._last_sign < min(pause, self.interval):
            return
        activity.is_said = True
        self.sign()
        text = activity.text()
        if activity.is_timed:
            text = f"{text}, {duration(now - activity.began)} elapsed"
        self.say(text)


_current: list[Heartbeat] = []
"""The heartbeat of the command that runs in this process; empty without one."""


@contextmanager
def beating(say: Callable[[str], None]) -> Iterator[None]:
    """Print regularly what is being done (see :func:`doing`) while the block runs; a nested block changes nothing.

    Args:
        say: Prints a line.
    """
    if _current:
        yield
        return
    heartbeat = Heartbeat(say)
    _current.append(heartbeat)
    try:
        with progress.repeating(heartbeat.look, LOOK_SECONDS):
            yield
    finally:
        _current.clear()


def set_interval(seconds: float) -> None:
    """Set the seconds between lines about one activity; 0: no lines."""
    for heartbeat in _current:
        heartbeat.interval = seconds


def sign_of_life() -> None:
    """Note that something was printed."""
    for heartbeat in _current:
        heartbeat.sign()


def is_beating() -> bool:
    """Return whether this process prints its activities."""
    return bool(_current)


@contextmanager
def doing(text: str | Callable[[], str], is_timed: bool = True) -> Iterator[None]:
    """Name the activity of a block while it runs.

    Args:
        text: The activity, or a function that returns its current description.
        is_timed: Whether its time is printed, too.
    """
    # Nobody prints: a library call, or a command that has ended.
    if not _current:
        yield
        return
    say: Callable[[], str] = text if callable(text) else lambda: str(text)
    activity = Activity(say, progress.clock(), is_timed)
    activities = _current[0].activities
    activities.append(activity)
    try:
        yield
    finally:
        activities.remove(activity)


@contextmanager
def showing_bar() -> Iterator[None]:
    """Keep all heartbeats silent while a block shows a progress bar on a terminal."""
    heartbeats = list(_current)
    for heartbeat in heartbeats:
        heartbeat.num_bars += 1
    try:
        yield
    finally:
        for heartbeat in heartbeats:
            heartbeat.num_bars -= 1
            heartbeat.sign()


@contextmanager
def loading(name: str, console: Console) -> Iterator[None]:
    """Name the loading of a model, with the share of its tensors that are there.

    Args:
        name: Name of the model.
        console: A terminal shows a line that is gone afterwards.
    """
    count = _LoadCount()
    # Before transformers 5.12 there is no such hook, and no share is said.
    set_hook = getattr(transformers.utils.logging, "set_tqdm_hook", None)
    previous = set_hook(count.hook) if set_hook else None

    def line() -> Text:
        return Text(f"loading {name}{count}")

    try:
        if console.is_terminal and not console.is_dumb_terminal:
            with (
                showing_bar(),
                Live(get_renderable=line, console=console, transient=True),
            ):
                yield
        else:
            with doing(lambda: str(line())):
                yield
    finally:
        if set_hook:
            set_hook(previous)


class _LoadCount:
    """Counts the tensors that transformers has loaded, by the bars that it would show."""

    def __init__(self) -> None:
        self.done = 0
        self.total = 0

    def __str__(self) -> str:
        """``: 38 %``; empty where nothing is known."""
        return f": {100 * self.done // self.total} %" if self.total else ""

    def hook(
        self, make_bar: Callable[..., Any], args: Any, settings: dict[str, Any]
    ) -> Any:
        """Return the progress bar that transformers asks for while loading; one over a list also counts here.

        Args:
            make_bar: Makes the bar.
            args: Its positional arguments, the first one what the bar runs over.
            settings: Its keyword arguments.
        """
        bar = make_bar(*args, **settings)
        if len(args) != 1 or not hasattr(args[0], "__len__"):
            return bar
        self.done = 0
        self.total = len(args[0])
        return _CountedBar(bar, self)


class _CountedBar:
    """A bar of transformers whose steps are counted."""

    def __init__(self, bar: Any, count: _LoadCount) -> None:
        self._bar = bar
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        for item in self._bar:
            yield item
            self._count.done += 1

    def __enter__(self) -> _CountedBar:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)
