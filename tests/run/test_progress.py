"""What is told of long work, on a clock that the test moves."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from posbench.run import progress as module
from posbench.run.progress import progress, repeating


class Clock:
    """Time that passes when it is told to; what is to be called every so often is called then."""

    def __init__(self) -> None:
        self.now = 0.0
        self.call = lambda: None
        self.due: list[float] = []

    def __call__(self) -> float:
        return self.now

    @contextmanager
    def repeated(
        self, call: Callable[[], None], every: float, first: float
    ) -> Iterator[None]:
        self.call = call
        self.due = [self.now + every * count for count in range(1, 1000)]
        if first < every:
            self.due.insert(0, self.now + first)
        yield
        self.due = []

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.due and self.due[0] <= end:
            self.now = self.due.pop(0)
            self.call()
        self.now = end


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module, "clock", found)
    monkeypatch.setattr(module, "repeating", found.repeated)
    return found


def _told(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_line_every_so_many_seconds_and_at_the_end(clock: Clock) -> None:
    console = Console(file=io.StringIO(), width=20)
    with progress(console, 30, "evaluate [a/b]", 900) as work:
        assert _told(console) == []
        for _ in range(15):  # four in a second
            clock.wait(15)
            work(60)
    # 60 parts in 15 seconds: at 30 seconds the second 60 come after the line.
    assert _told(console) == [
        "evaluate [a/b] 0/900 (0 %), 8 s elapsed",
        "evaluate [a/b] 60/900 (6 %), 4.0/s, 30 s elapsed, 3.2 min left",
        "evaluate [a/b] 180/900 (20 %), 4.0/s, 1 min elapsed, 2.8 min left",
        "evaluate [a/b] 300/900 (33 %), 4.0/s, 1.5 min elapsed, 2.2 min left",
        "evaluate [a/b] 420/900 (46 %), 4.0/s, 2 min elapsed, 1.8 min left",
        "evaluate [a/b] 540/900 (60 %), 4.0/s, 2.5 min elapsed, 1.3 min left",
        "evaluate [a/b] 660/900 (73 %), 4.0/s, 3 min elapsed, 45 s left",
        "evaluate [a/b] 780/900 (86 %), 4.0/s, 3.5 min elapsed, 15 s left",
        "evaluate [a/b] 900/900 (100 %), 4.0/s, 3.8 min elapsed",
    ]


def test_one_long_part_is_not_silent_and_does_not_slow_down_what_was_done(
    clock: Clock,
) -> None:
    console = Console(file=io.StringIO(), width=200)
    with progress(console, 60, "intervene", 4) as work:
        clock.wait(60)
        clock.wait(40)
        work(1)
        clock.wait(100)
    assert _told(console) == [
        "intervene 0/4 (0 %), 8 s elapsed",
        "intervene 0/4 (0 %), 1 min elapsed",
        "intervene 1/4 (25 %), 36/h, 2 min elapsed, 4.7 min left",
        "intervene 1/4 (25 %), 36/h, 3 min elapsed, 3.7 min left",
        "intervene 1/4 (25 %), 36/h, 3.3 min elapsed, 3.3 min left",
    ]


def test_what_an_earlier_session_did_is_done_and_tells_nothing_of_the_speed(
    clock: Clock,
) -> None:
    console = Console(file=io.StringIO(), width=200)
    with progress(console, 30, "train", 1000, done=700) as work:
        work(100, before=True)
        clock.wait(10)
        work(50)
        clock.wait(20)
    assert _told(console)[0].startswith("train 700/1000 (70 %), 0 s elapsed")
    assert _told(console)[1] == "train 800/1000 (80 %), 8 s elapsed"
    assert _told(console)[2] == "train 850/1000 (85 %), 5.0/s, 30 s elapsed, 10 s left"


def test_where_parts_differ_their_weights_tell_how_much_is_left(clock: Clock) -> None:
    console = Console(file=io.StringIO(), width=200)
    with progress(console, 600, "figures", 3, weight=10) as work:
        work.note = "long, short"
        clock.wait(400)
        work(1, weight=8)
        clock.wait(200)
    # The last two are a fifth of all: 100 seconds, long over.
    assert _told(console)[2] == "figures 1/3 (33 %), 9.0/h, 10 min elapsed: long, short"


def test_before_the_first_batch_is_done_the_tokens_that_were_read_are_told(
    clock: Clock,
) -> None:
    console = Console(file=io.StringIO(), width=200)
    read = [500]
    with progress(console, 30, "evaluate", 4, tokens=lambda: read[0]) as work:
        clock.wait(1)
        read[0] += 2048
        clock.wait(9)
        work(1)
        clock.wait(30)
    first, second, *_ = _told(console)
    assert "2,048 tokens" in first and "tokens" not in second


@pytest.mark.parametrize(
    ("every", "total", "done"), [(0, 3, 1), (30, 0, 0), (30, 3, 3)]
)
def test_nothing_is_told_if_nothing_is_asked_for_or_left(
    every: int, total: int, done: int, clock: Clock
) -> None:
    console = Console(file=io.StringIO(), width=200)
    with progress(console, every, "evaluate", total, done) as work:
        clock.wait(100)
        work(total - done)
    assert _told(console) == []


def test_a_finished_bar_shows_how_long_it_took(clock: Clock) -> None:
    console = Console(
        file=io.StringIO(), width=80, force_terminal=True, color_system=None
    )
    with progress(console, 0, "search: 1281 candidates", 40) as work:
        clock.wait(83)
        work(40)
    last = [line for line in _told(console) if "40/40" in line][-1]
    assert (
        "search: 1281 candidates" in last
        and "29/min, 1.4 min elapsed" in last
        and "left" not in last
    )


@pytest.mark.parametrize(
    "ends", ["with the block", "with an error", "with a closed pipe"]
)
def test_the_calls_come_again_and_again_and_end(ends: str) -> None:
    called = threading.Semaphore(0)
    threads = set[threading.Thread]()

    def call() -> None:
        threads.add(threading.current_thread())
        called.release()
        if ends == "with a closed pipe":
            raise BrokenPipeError

    try:
        with repeating(call, 0.001):
            for _ in range(1 if ends == "with a closed pipe" else 3):
                assert called.acquire(timeout=60)
            if ends == "with an error":
                raise KeyError
    except KeyError:
        pass
    (thread,) = threads
    assert not thread.is_alive() and thread is not threading.current_thread()
    assert ends != "with a closed pipe" or not called.acquire(blocking=False)
