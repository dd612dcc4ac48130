"""The budget of a run and the deadline that its rounds of questions keep."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from typing import Any

from posbench.errors import UserError
from posbench.run import progress
from posbench.run.progress import SECONDS_PER_UNIT
from posbench.run.stop import ReadRows, StopRule
from posbench.stats.bootstrap import wilson

BUDGET = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h|d|prompts|tok|ktok|Mtok|usd)")
"""A number, and a unit of time, of tokens or of money, or ``prompts``."""
TOKENS_PER_UNIT = {"tok": 1, "ktok": 10**3, "Mtok": 10**6}
REPORT_SECONDS = 8.0
"""Core-seconds reserved for tables, figures and the page."""
MAX_REPORT_SHARE = 0.4
"""Largest share of a time budget reserved for them."""
Price = tuple[float, float] | tuple[float, float, float]
"""Of a million tokens read and written, and of those from a server's cache, where these have a price of their own."""


@dataclass(frozen=True)
class Budget:
    """The limit of a run: a time, or a number of prompts or tokens, or an amount of money in the unit of
    ``model.price``.

    Attributes:
        text: As the user typed it.
        seconds: The time; None (also below): another unit is limited.
        prompts: The number of prompts, all positions and methods.
        tokens: The number of tokens, read and written.
        usd: The money.
    """

    text: str
    seconds: float | None = None
    prompts: int | None = None
    tokens: int | None = None
    usd: float | None = None

    @classmethod
    def parse(cls, value: Any) -> Budget:
        """Read a budget such as ``10min``, ``2h``, ``90s``, ``500prompts``, ``3Mtok`` or ``2usd``.

        Raises:
            UserError: It has no such form, is zero, or is no whole number of prompts or tokens.
        """
        match = BUDGET.fullmatch(str(value).strip())
        number = float(match[1]) if match else 0.0
        unit = match[2] if match else ""
        size = number * TOKENS_PER_UNIT.get(unit, 1)
        is_counted = unit == "prompts" or unit in TOKENS_PER_UNIT
        if match is None or not number or (is_counted and not size.is_integer()):
            allowed = (
                "a time in s, min, h or d, a whole number of prompts or of tok, ktok or Mtok, "
                "or money in usd"
            )
            hint = "set budget=10min, budget=500prompts, budget=3Mtok or budget=2usd"
            raise UserError("budget", value, allowed, hint)
        text = match[1] + unit
        if unit == "prompts":
            return cls(text, prompts=int(size))
        if unit == "usd":
            return cls(text, usd=number)
        if unit in TOKENS_PER_UNIT:
            return cls(text, tokens=int(size))
        return cls(text, seconds=number * SECONDS_PER_UNIT[unit])

    @property
    def amount(self) -> tuple[str, float]:
        """The field that is set, and its value."""
        for unit in ("seconds", "prompts", "tokens", "usd"):
            value = getattr(self, unit)
            if value is not None:
                return unit, float(value)
        raise ValueError(f"a budget of nothing: {self}")

    @property
    def size(self) -> float:
        """Its amount, in its unit."""
        return self.amount[1]

    def need_price(self, price: Price | None) -> None:
        """Refuse an amount of money where the price of tokens is not known.

        Raises:
            UserError: It is one, and the price is None.
        """
        if self.usd and price is None:
            allowed = (
                "money with model.price=[IN,OUT], of a million tokens read and written"
            )
            hint = "set the price, or budget=3Mtok"
            raise UserError("budget", self.text, allowed, hint)


def price_of(
    read: float, written: float, price: Price | None, cached: float = 0
) -> float | None:
    """Return the cost of tokens read and written; None if the price is not known.

    Args:
        read: Tokens of prompts.
        written: Tokens of replies, thinking among them.
        price: Price per million tokens read and written, and of cached ones where it is another.
        cached: Tokens among ``read`` that the server had in its cache.
    """
    if price is None:
        return None
    price_read, price_written, *price_cached = price
    whole = (read - cached) * price_read + written * price_written
    return (whole + cached * (price_cached or [price_read])[0]) / 1e6


class Spending(StopRule):
    """Tokens and money spent on requests to a server, and whether a budget allows more.

    Its methods may be called from several threads.

    Args:
        budget: The limit; None, or a budget of time or prompts: no limit on spending.
        price: Price per million tokens read and written; None: not known.
        tokens: Tokens of earlier sessions.
        usd: Money of earlier sessions.
        expected: Estimate of a request in the budget's unit, used until the first one is done.
    """

    def __init__(
        self,
        budget: Budget | None = None,
        price: Price | None = None,
        tokens: int = 0,
        usd: float = 0.0,
        expected: float = 0.0,
    ) -> None:
        self.price = price
        self.tokens = tokens
        self.usd = usd
        self._budget = budget
        self._expected = expected
        self._made = 0
        self._made_amount = 0.0
        self._under_way = 0
        self._lock = threading.Lock()

    @property
    def _limit(self) -> float | None:
        """Limit of the spending, in the budget's unit."""
        budget = self._budget
        if budget is None or (budget.tokens is None and budget.usd is None):
            return None
        return budget.size

    @property
    def _spent(self) -> float:
        is_money = self._budget is not None and self._budget.usd is not None
        return self.usd if is_money else float(self.tokens)

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left of the budget."""
        limit = self._limit
        return limit is not None and self._spent >= limit

    @property
    def share_spent(self) -> float:
        """Share of the budget that is spent; 0 without a limit."""
        return self._spent / self._limit if self._limit else 0.0

    def has_room(self, requests: int) -> bool:
        """Return whether more requests fit in besides those under way, at the average of the earlier ones."""
        each = self._expected
        if self._made:
            each = self._made_amount / self._made
        needed = (self._under_way + requests) * each
        return self._limit is None or self._spent + needed <= self._limit

    def admits(self, new_requests: int) -> bool:
        """See :meth:`posbench.run.stop.StopRule.admits`."""
        with self._lock:
            if self.is_spent or (new_requests and not self.has_room(new_requests)):
                return False
            self._under_way += 1
            return True

    def add(self, read: int, written: int, cached: int = 0) -> None:
        """Count the tokens and the cost of a request that was answered, which until now was only expected.

        Args:
            read: Tokens of the prompt.
            written: Tokens of the reply.
            cached: Tokens of the prompt that the server had in its cache.
        """
        cost = price_of(read, written, self.price, cached) or 0.0
        with self._lock:
            before = self._spent
            self.tokens += read + written
            self.usd += cost
            self._made += 1
            self._made_amount += self._spent - before
            self._under_way -= 1

    def __str__(self) -> str:
        """The amount spent, and the limit."""
        text = f"{self.tokens:,} tokens"
        if self._budget and self._budget.tokens is not None:
            text += f" of {self._budget.text}"
        if self.price is not None:
            text += f", {money(self.usd)}"
            if self._budget and self._budget.usd is not None:
                text += f" of {self._budget.text}"
        return text


def money(amount: float) -> str:
    """Money in words: cents for an amount, more digits for a small one."""
    digits = 2 if amount >= 1 or not amount else 4
    return f"{amount:,.{digits}f} usd"


class Stopwatch:
    """The time of a session of a run, and how busy others keep the machine.

    Args:
        used_before: Seconds that earlier sessions took.

    Attributes:
        waits_for_server: Whether the model is behind a server, so that this process computes little.
    """

    def __init__(self, used_before: float = 0.0) -> None:
        self.used_before = used_before
        self.waits_for_server = False
        self._began = progress.clock()
        self._computed = time.process_time()

    @property
    def seconds(self) -> float:
        """Seconds since this session began."""
        return progress.clock() - self._began

    @property
    def total(self) -> float:
        """Seconds of all sessions."""
        return self.used_before + self.seconds

    def report_seconds(self, budget: float) -> float:
        """Return the seconds to reserve for the report after the last row.

        They grow if this process had to share its cores so far (not measurable while it waits for a server).

        Args:
            budget: Seconds of the whole run.
        """
        load = 1.0
        if not self.waits_for_server:
            computed = max(time.process_time() - self._computed, 1e-3)
            # Wall time over processor time: 2 if half of the time went to other processes.
            load = max(self.seconds / computed, 1.0)
        return min(REPORT_SECONDS * load, MAX_REPORT_SHARE * budget)


class Deadline(StopRule):
    """Decides before each round of questions whether it still fits into the time of a run.

    The time of a round follows from the rounds that this session made, whichever is slower: all of them, or the
    last one; so the deadline holds on a machine whose speed changes.

    Args:
        seconds: The time of the run.
        watch: Measures the time.
    """

    def __init__(self, seconds: float, watch: Stopwatch) -> None:
        self.seconds = seconds
        self.watch = watch
        self._lock = threading.Lock()
        self._is_begun = False
        self._first_request = 0.0
        self._requests = 0
        self._replies = 0
        self._began = 0.0
        self._round_began = 0.0
        self._round_work = 0.0
        self._total_work = 0.0

    def ends_before(self, size: float, rows: ReadRows) -> bool:
        """See :meth:`posbench.run.stop.StopRule.ends_before`."""
        return not self.fits(size)

    def admits(self, new_requests: int) -> bool:
        """See :meth:`posbench.run.stop.StopRule.admits`: no second question is begun that would not end in time."""
        with self._lock:
            now = progress.clock()
            if new_requests and self._is_begun and not self._can_end(now, new_requests):
                return False
            if not self._is_begun:
                self._first_request = now
            self._is_begun = True
            self._requests += new_requests
            return True

    def count_reply(self) -> None:
        """Count a request of an admitted question as answered."""
        with self._lock:
            self._replies += 1

    def _can_end(self, now: float, new_requests: int) -> bool:
        """Return whether so many requests can be answered in time after those under way.

        All of a question were sent when the next one begins; on average those under way are half done.
        """
        if self.is_over:
            return False
        if not self._replies:
            return True
        half_done = max(self._requests - self._replies, 0) / 2
        seconds_each = (now - self._first_request) / (self._replies + half_done)
        needed = seconds_each * (half_done + new_requests)
        needed += self.watch.report_seconds(self.seconds)
        return self.watch.total + needed <= self.seconds

    def fits(self, work: float) -> bool:
        """Return whether one more round can be made in time; the first one of a session can while there is time.

        Args:
            work: Size of the round, in any unit that its time is proportional to.
        """
        now = progress.clock()
        seconds_per_work = 0.0
        if self._total_work:
            # Seconds that a unit of work took.
            last_round = (now - self._round_began) / self._round_work
            all_rounds = (now - self._began) / self._total_work
            # The slower of the last round and the mean, to be on the safe side.
            seconds_per_work = max(last_round, all_rounds)
        needed = seconds_per_work * work + self.watch.report_seconds(self.seconds)
        return self.watch.total + needed <= self.seconds

    @property
    def is_over(self) -> bool:
        """Whether only the time of tables, figures and page is left."""
        return (
            self.watch.total + self.watch.report_seconds(self.seconds) >= self.seconds
        )

    def begin(self, work: float) -> None:
        """Note that a round begins now.

        Args:
            work: Size of the round, as of :meth:`fits`.
        """
        now = progress.clock()
        if not self._total_work:
            self._began = now
        self._round_began = now
        self._round_work = work
        self._total_work += work


def half_width(questions: int) -> float:
    """Return half the width of the 95 % interval of a share of ``questions``, at its widest (half right)."""
    low, high = wilson(questions / 2, questions)
    return (high - low) / 2
