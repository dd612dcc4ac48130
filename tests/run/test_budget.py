"""Budgets as they are typed, and a deadline on a clock that the test moves."""

from __future__ import annotations

import math

import pytest

from posbench.run import budget as module
from posbench.run import progress
from posbench.run.budget import Budget, Deadline, Spending, Stopwatch, half_width
from tests.messages import refused


@pytest.mark.parametrize(
    ("text", "seconds", "prompts"),
    [
        ("90s", 90, None),
        ("10min", 600, None),
        ("1.5h", 5400, None),
        ("1d", 86400, None),
        ("500prompts", None, 500),
        ("500 prompts", None, 500),
    ],
)
def test_a_budget_is_a_time_or_a_number_of_prompts(
    text: str, seconds: float | None, prompts: int | None
) -> None:
    budget = Budget.parse(text)
    assert (budget.seconds, budget.prompts) == (seconds, prompts)


@pytest.mark.parametrize(
    ("text", "tokens", "usd"),
    [
        ("3Mtok", 3_000_000, None),
        ("1.5ktok", 1500, None),
        ("7 tok", 7, None),
        ("2usd", None, 2.0),
        ("0.05usd", None, 0.05),
    ],
)
def test_a_budget_is_a_number_of_tokens_or_money(
    text: str, tokens: int | None, usd: float | None
) -> None:
    budget = Budget.parse(text)
    assert (budget.tokens, budget.usd) == (tokens, usd)
    assert budget.size == (tokens or usd)


def test_what_is_spent_adds_up_and_leaves_room_by_what_was_taken() -> None:
    """At 1 and 4 a million: 3,000 tokens read and 500 written cost half a cent."""
    spending = Spending(Budget.parse("35ktok"), (1.0, 4.0), expected=3500)
    for requests in (1, 10, 11):
        assert spending.has_room(requests) == (requests <= 10)
    for made in range(1, 11):
        assert spending.admits(0)
        spending.add(3000, 500)
        assert spending.usd == pytest.approx(0.005 * made)
        assert spending.is_spent == (made == 10)
        assert spending.has_room(1) == (made < 10)
    assert str(spending) == "35,000 tokens of 35ktok, 0.0500 usd"
    # What a request took, not what it was expected to take.
    dear = Spending(Budget.parse("100tok"), expected=1)
    assert dear.admits(1)
    dear.add(40, 20)
    assert not dear.has_room(1) and not dear.is_spent
    # Without such a budget there is always room.
    free = Spending(Budget.parse("5min"), (1.0, 1.0))
    assert free.admits(1)
    free.add(10**9, 10**9)
    assert free.has_room(10**9) and not free.is_spent


@pytest.mark.parametrize(
    "value",
    [
        "",
        "10",
        10,
        "ten minutes",
        "0min",
        "-1h",
        "1.5prompts",
        "1h30min",
        True,
        "1.5tok",
        "0usd",
        "2eur",
    ],
)
def test_anything_else_is_refused(value: object) -> None:
    with refused("budget", value, hint=("budget=10min", "budget=500prompts")):
        Budget.parse(value)


@pytest.mark.parametrize("questions", [1, 4, 30, 1000])
def test_the_widest_interval_is_that_of_one_half(questions: int) -> None:
    # Wilson's interval at one half: z / (2 sqrt(n + z^2)) on either side.
    z = 1.959964
    closed_form = z / (2 * math.sqrt(questions + z**2))
    assert half_width(questions) == pytest.approx(closed_form, rel=1e-5)


class Clock:
    """Wall and processor time, which pass when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = 0.0
        self.computed = 0.0
        monkeypatch.setattr(progress, "clock", lambda: self.wall)
        monkeypatch.setattr(module.time, "process_time", lambda: self.computed)

    def wait(self, seconds: float, load: float = 1.0) -> None:
        self.wall += seconds
        self.computed += seconds / load


def rounds_made(clock: Clock, deadline: Deadline, times: list[float]) -> int:
    """How many rounds of equal work a loop makes that asks the deadline before each."""
    for number, seconds in enumerate(times):
        if number and not deadline.fits(10.0):
            return number
        deadline.begin(10.0)
        clock.wait(seconds)
    return len(times)


def test_rounds_are_made_as_long_as_one_more_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    deadline = Deadline(100.0, Stopwatch())
    # 8 seconds are kept for the page: nine rounds of ten seconds fit into 100.
    assert rounds_made(clock, deadline, [10.0] * 50) == 9
    assert clock.wall + module.REPORT_SECONDS <= 100


def test_a_machine_that_slows_down_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    deadline = Deadline(100.0, Stopwatch())
    # After four rounds of 10 seconds one takes 30: another one would end at 100, too late for the page.
    times = [10.0, 10.0, 10.0, 10.0, 30.0, 30.0]
    assert rounds_made(clock, deadline, times) == 5


def test_a_machine_that_has_become_faster_is_judged_by_its_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    deadline = Deadline(100.0, Stopwatch())
    assert rounds_made(clock, deadline, [40.0, 1.0]) == 2
    # 2.05 seconds for a unit of work on average, 0.1 in the last round.
    assert deadline.fits(20.0) and not deadline.fits(30.0)


def test_where_others_keep_the_machine_busy_more_is_kept_for_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    watch = Stopwatch()
    clock.wait(10.0, load=3.0)
    assert watch.report_seconds(1000.0) == pytest.approx(3 * module.REPORT_SECONDS)
    assert watch.report_seconds(10.0) == pytest.approx(4.0)


def test_waiting_for_a_server_is_no_busy_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    watch = Stopwatch()
    watch.waits_for_server = True
    clock.wait(400.0, load=50.0)
    assert watch.report_seconds(600.0) == module.REPORT_SECONDS


def test_earlier_sessions_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    deadline = Deadline(100.0, Stopwatch(used_before=50.0))
    assert rounds_made(clock, deadline, [10.0] * 50) == 4


def test_the_first_round_may_be_asked_for_when_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    deadline = Deadline(100.0, Stopwatch(used_before=200.0))
    assert not deadline.fits(1.0)
    assert rounds_made(clock, deadline, [10.0] * 50) == 1
