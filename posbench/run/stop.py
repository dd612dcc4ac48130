"""Rules that end a run before all its questions are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from posbench.files.atomic import Row

ReadRows = Callable[[], Sequence[Row]]
"""Reads the rows of the rounds so far."""


class StopRule:
    """Ends a run between two rounds of questions, or before a question; this one never does.

    Attributes:
        keeps_rounds: Whether a run that it ended keeps only the rounds before, not every complete question.
        drops_methods: Whether methods may drop out, so that a question need not be asked under all; a run that ends
            then keeps every row.
    """

    keeps_rounds = False
    drops_methods = False

    def ends_before(self, size: float, rows: ReadRows) -> bool:
        """Return whether one more round is not made; not asked before the first one.

        Args:
            size: Size of the round, in any unit that its time is proportional to.
            rows: Reads the rows of the rounds before it.
        """
        return False

    def begin(self, size: float) -> None:
        """Begin a round of this size."""

    def leaves_out(self, method: str) -> bool:
        """Return whether a method has dropped out: what it was not asked yet, it is not asked any more."""
        return False

    def admits(self, new_requests: int) -> bool:
        """Return whether one more request may be sent, which is then under way; called by several threads.

        Args:
            new_requests: Where the request is a question's first, requests of that question; else 0.
        """
        return True


class Stop(NamedTuple):
    """The point at which a run stopped.

    Attributes:
        rule: The rule that stopped it.
        asked: Questions that were asked.
        planned: Questions that the run would have asked.
    """

    rule: StopRule
    asked: int
    planned: int


class StopRules(StopRule):
    """Several rules, each of which may stop a run.

    Args:
        rules: The rules; one that counts requests under way comes last.

    Attributes:
        ending: The first rule that ended the run; None: none did.
        ending_round: Number of the first round that this rule prevented.
        stop: Where the run stopped; None: it did not.
    """

    def __init__(self, *rules: StopRule | None) -> None:
        self.ending: StopRule | None = None
        self.ending_round = 0
        self.stop: Stop | None = None
        self._rules = [rule for rule in rules if rule]
        self.drops_methods = any(rule.drops_methods for rule in self._rules)

    def ends_before(self, size: float, rows: ReadRows) -> bool:
        """See :meth:`StopRule.ends_before`."""
        return self._note(r for r in self._rules if r.ends_before(size, rows))

    def begin(self, size: float) -> None:
        """See :meth:`StopRule.begin`."""
        for rule in self._rules:
            rule.begin(size)

    def leaves_out(self, method: str) -> bool:
        """See :meth:`StopRule.leaves_out`."""
        return any(rule.leaves_out(method) for rule in self._rules)

    def admits(self, new_requests: int) -> bool:
        """See :meth:`StopRule.admits`."""
        return not self._note(r for r in self._rules if not r.admits(new_requests))

    def _note(self, ending: Iterator[StopRule]) -> bool:
        """Note the first of the rules that end the run; return whether there is one."""
        rule = next(ending, None)
        self.ending = self.ending or rule
        return rule is not None
