"""Pacing on a clock that stands still, and headers as real servers send them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from posbench.backends.pacing import (
    MAX_WAIT_SECONDS,
    Pacer,
    ServerBusy,
    ServerSpeed,
    Timing,
    parse_seconds,
    pause_until_refilled,
    retry_after,
)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2", 2),
        ("0.5", 0.5),
        ("20ms", 0.02),
        ("6m0s", 360),
        ("1m6.5s", 66.5),
        ("2h", 7200),
        ("", None),
        ("soon", None),
    ],
)
def test_times_of_headers(text: str, seconds: float | None) -> None:
    assert parse_seconds(text) == (
        seconds if seconds is None else pytest.approx(seconds)
    )


def test_moments_of_headers() -> None:
    moment = datetime.now(UTC) + timedelta(seconds=30)
    assert parse_seconds(moment.isoformat()) == pytest.approx(30, abs=2)
    assert retry_after({"retry-after": format_datetime(moment)}) == pytest.approx(
        30, abs=2
    )
    assert retry_after({"retry-after": "7", "retry-after-ms": "50"}) == 0.05
    assert retry_after({}) is None


def test_a_pause_lasts_until_the_next_request_fits() -> None:
    """A limit of 1,000 tokens that is full after 60 s refills 16.7 a second."""
    headers = {
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "200",
        "x-ratelimit-reset-tokens": "48s",
        "x-ratelimit-remaining-requests": "5",
        "x-ratelimit-reset-requests": "60s",
    }
    assert pause_until_refilled(headers, 200) == 0
    assert pause_until_refilled(headers, 500) == pytest.approx(48 * 300 / 800)
    empty = {**headers, "x-ratelimit-remaining-requests": "0"}
    # Without the limit, all of the time.
    assert pause_until_refilled(empty, 1) == 60
    other_order = {
        "anthropic-ratelimit-requests-remaining": "0",
        "anthropic-ratelimit-requests-reset": "10",
    }
    assert pause_until_refilled(other_order, 1) == 10


def test_refusals_halve_the_requests_at_a_time_and_answers_add_one() -> None:
    clock = Clock()
    pacer = Pacer(8, clock)
    with pacer.turn() as began, pacer.turn() as also:
        pacer.refused(began, {"retry-after": "1"})
        clock.now += 0.5
        pacer.refused(also, {"retry-after": "1"})  # it was under way: halved once
    assert pacer.limit == 4
    clock.now += 5
    for _ in range(4):
        pacer.answered({})
    assert pacer.limit == 4
    pacer.answered({})
    assert pacer.limit == 5
    for _ in range(100):
        pacer.answered({})
    assert pacer.limit == 8


def test_a_turn_comes_after_the_pause_and_within_the_limit() -> None:
    pacer = Pacer(2)
    with pacer.turn() as began:
        pacer.refused(began, {"retry-after-ms": "60"})
    entered = threading.Event()
    leave = threading.Event()

    def ask() -> None:
        with pacer.turn():
            entered.set()
            leave.wait(5)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert entered.wait(5)
    # Half of two: one at a time.
    assert pacer._active == 1
    leave.set()
    for thread in threads:
        thread.join(5)
    assert pacer._active == 0


def test_patience_has_an_end_where_nothing_is_answered() -> None:
    clock = Clock()
    pacer = Pacer(4, clock)
    with pytest.raises(ServerBusy, match="asks to wait"):
        pacer.refused(clock(), {"retry-after": str(MAX_WAIT_SECONDS + 1)})
    pacer = Pacer(4, clock)
    for _ in range(100):
        pacer.refused(clock(), {"retry-after": "30"})
        clock.now += MAX_WAIT_SECONDS / 2
        pacer.answered({})
    pacer.refused(clock(), {})
    clock.now += MAX_WAIT_SECONDS + 1
    with pytest.raises(ServerBusy, match="15 minutes"):
        pacer.refused(clock(), {})


# Speed


def timings(seconds: Callable[[int], float], *lengths: int) -> tuple[Timing, ...]:
    """Requests of texts of these lengths, each with a reply of 16 tokens, by what a server takes to read them."""
    return tuple(Timing(n, 16, seconds(n) + 16 * 0.02) for n in lengths)


@pytest.mark.parametrize(
    "seconds",
    [
        lambda n: 0.001 * n,  # as a processor reads
        lambda n: 2.0 if n > 900 else 0.0,  # as scripted servers do
        lambda n: 0.5 + 0.0002 * n,  # far away
    ],
)
def test_the_time_of_a_request_is_that_of_one_of_its_length(
    seconds: Callable[[int], float],
) -> None:
    speed = ServerSpeed(timings(seconds, 200, 400, 4000, 12_000))
    for characters, written in ((4000, 16), (12_000, 100), (8000, 60)):
        truth = seconds(characters) + 0.02 * written
        estimate = speed.seconds_of_request(characters, written)
        assert truth / 2 < estimate < 2 * truth
    # Beyond what was timed it grows with the length.
    assert speed.seconds_of_request(24_000, 0) == pytest.approx(
        2 * speed.seconds_of_request(12_000, 0)
    )


@pytest.mark.parametrize(
    ("parallel", "sent", "concurrency", "at_once"),
    [
        (1.05, 8, 8, 1.05),  # one slot
        (3.9, 8, 8, 3.9),  # four slots
        (7.5, 8, 8, 7.5),
        (1.0, 2, 8, 1.0),  # one slot, slow: two were sent
        (2.0, 2, 8, 8.0),  # as many as were sent
        (None, 1, 8, 8.0),  # not measured
        (1.0, 1, 1, 1.0),
    ],
)
def test_requests_at_once_are_those_that_a_server_answered(
    parallel: float | None, sent: int, concurrency: int, at_once: float
) -> None:
    speed = ServerSpeed(timings(lambda n: 0.1, 400), parallel, sent)
    assert speed.at_once(concurrency) == pytest.approx(at_once)


def test_a_length_was_timed_where_one_is_near() -> None:
    speed = ServerSpeed(timings(lambda n: 0.1, 400, 4000))
    assert speed.was_timed_at(500) and speed.was_timed_at(5000)
    assert not speed.was_timed_at(1500) and not speed.was_timed_at(9000)
