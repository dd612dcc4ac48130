"""The budget of a run: what it may take, and the deadline that its rounds of questions keep."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

from posbench.errors import UserError
from posbench.run import progress
from posbench.run.progress import SECONDS_PER_UNIT
from posbench.stats.bootstrap import wilson

BUDGET = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h|d|prompts)")
"""A number, and a unit of time or ``prompts``."""
REPORT_SECONDS = 8.0
MAX_REPORT_SHARE = 0.4
"""Time that is kept for tables, figures and the page: so much of one core, at most this share of a budget."""


@dataclass(frozen=True)
class Budget:
    """What a run may take: a time or a number of prompts.

    Attributes:
        text: As the user typed it.
        seconds: The time; None: it counts prompts.
        prompts: The number of prompts, all positions and methods; None: it is a time.
    """

    text: str
    seconds: float | None = None
    prompts: int | None = None

    @classmethod
    def parse(cls, value: Any) -> Budget:
        """Read a budget such as ``10min``, ``2h``, ``90s`` or ``500prompts``.

        Raises:
            UserError: It is none.
        """
        match = BUDGET.fullmatch(str(value).strip())
        number = float(match[1]) if match else 0.0
        if match and match[2] == "prompts" and not number.is_integer():
            match = None
        if match is None or not number:
            allowed = "a time in s, min, h or d, or a whole number of prompts"
            hint = "set budget=10min, or budget=500prompts"
            raise UserError("budget", value, allowed, hint)
        text = match[1] + match[2]
        if match[2] == "prompts":
            return cls(text, prompts=int(number))
        return cls(text, seconds=number * SECONDS_PER_UNIT[match[2]])


class Stopwatch:
    """The time of a session of a run, and how busy others keep the machine.

    Args:
        used_before: Seconds that earlier sessions took.
    """

    def __init__(self, used_before: float = 0.0) -> None:
        self.used_before = used_before
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
        """Return the seconds to keep for what follows the last row.

        They are more where this process had to share its cores so far.

        Args:
            budget: Seconds of the whole run.
        """
        computed = max(time.process_time() - self._computed, 1e-3)
        load = max(self.seconds / computed, 1.0)
        return min(REPORT_SECONDS * load, MAX_REPORT_SHARE * budget)


class Deadline:
    """Decides before each round of questions whether it still fits into the time of a run.

    The time of a round follows from the rounds that this session made, whichever is slower: all of them, or the
    last one; so it holds on a machine whose speed changes.

    Args:
        seconds: The time of the run.
        watch: Measures it.

    Attributes:
        stopped: Questions that were asked, and those that the run would have asked; None: it did not stop.
        stopped_round: Number of the first round that was not made.
    """

    def __init__(self, seconds: float, watch: Stopwatch) -> None:
        self.seconds = seconds
        self.watch = watch
        self.stopped: tuple[int, int] | None = None
        self.stopped_round = 0
        self._began = 0.0
        self._round_began = 0.0
        self._round_work = 0.0
        self._total_work = 0.0

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
            seconds_per_work = max(last_round, all_rounds)
        needed = seconds_per_work * work + self.watch.report_seconds(self.seconds)
        return self.watch.total + needed <= self.seconds

    def begin(self, work: float) -> None:
        """Begin a round of this size."""
        now = progress.clock()
        if not self._total_work:
            self._began = now
        self._round_began = now
        self._round_work = work
        self._total_work += work

    def stop(self, number: int, asked: int, planned: int) -> None:
        """Record that round ``number`` is the first that is not made, and how many questions that leaves."""
        self.stopped = (asked, planned)
        self.stopped_round = number


def half_width(questions: int) -> float:
    """Half the width of the 95 % interval of a share of so many questions, at its widest: half of them right."""
    low, high = wilson(questions / 2, questions)
    return (high - low) / 2
