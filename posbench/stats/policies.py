"""Prompt policies compared on the same questions: who gains for sure, who may drop out, and the verdict."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from posbench.stats.bootstrap import Array, Estimate, mean
from posbench.stats.sequential import (
    ALPHA,
    FIRST_QUESTIONS,
    anytime_intervals,
    log_capital,
)

USE = "use"
LEAVE = "leave"
CANNOT_TELL = "cannot tell"
CANNOT_DO = "cannot do the task"
VERDICTS = (USE, LEAVE, CANNOT_TELL, CANNOT_DO)

MARGIN = 0.05
"""Difference from the policy in use that is not worth a change."""
FLOOR = 0.1
"""Accuracy that a policy must be able to reach; if surely none does, the model cannot do the task."""
SAME = 0.01
"""Accuracy within which policies are alike: of these the cheapest is recommended."""
MAX_MISSING = 0.1
"""Share of questions without an answer above which a policy is not recommended."""
DROP_ALPHA = 0.01
"""Probability with which a policy drops out although it is no worse than the best."""
MAX_BET = 0.9
"""Largest share of the capital in a bet on a difference: most differences are zero, and so is most of the risk."""
CHANGING = 0.1
"""Share of questions whose correctness changes with the policy, assumed before the first one is asked."""
POWER = 0.8
"""Probability with which a difference is to be detected."""
SIMULATIONS = 200
"""Simulated logs behind a detectable difference or a forecast."""
FORECAST_FACTORS = (1.5, 2, 3, 5, 8, 12, 20)
"""Numbers of questions, relative to those asked, at which a forecast looks."""

Scores = Mapping[str, float]
"""Score of a policy, in 0..1, by the id of the question; questions without an answer are left out."""


class Standing(NamedTuple):
    """A policy beside the base policy.

    Attributes:
        accuracy: Mean score with a 95 % interval for this policy alone.
        difference: Mean score minus the base policy's on the same questions; its interval holds for all policies
            together and whenever the questions end.
        flips: Share of these questions whose score is another one than the base policy's.
    """

    accuracy: Estimate
    difference: Estimate
    flips: float


class PolicyVerdict(NamedTuple):
    """What to do.

    Attributes:
        name: One of :data:`VERDICTS`.
        policy: The policy to use: the recommended one, or the base policy.
        reason: The numbers behind it, in words.
        needed: Where the questions cannot tell: how many would, in all; None: not known.
    """

    name: str
    policy: str
    reason: str
    needed: int | None = None


def within_margin(ci_low: float, ci_high: float) -> bool:
    """Whether a change of a score, as a share with its interval, is surely smaller than :data:`MARGIN`."""
    return ci_low > -MARGIN and ci_high < MARGIN


@dataclass(frozen=True)
class PolicyRace:
    """A comparison of policies with a base policy, at any number of questions.

    The intervals of the differences are betting intervals (:func:`posbench.stats.sequential.anytime_intervals`) at a
    level that is divided by the number of policies (Bonferroni): they hold for all policies together, whatever ended
    the questions and whichever policy is looked at.

    Attributes:
        base: The policy in use, against which all others are paired.
        policies: The other policies, before any dropped out.
    """

    base: str
    policies: tuple[str, ...]

    @property
    def alpha(self) -> float:
        """Level of one policy's interval."""
        return ALPHA / max(len(self.policies), 1)

    def standings(self, scores: Mapping[str, Scores]) -> dict[str, Standing]:
        """Return the standing of every policy with a score, the base policy first.

        Args:
            scores: Scores by policy, the base policy among them; the order of a policy's questions is the order in
                which they were asked.
        """
        result = {}
        for name in (self.base, *self.policies):
            own = scores.get(name, {})
            if not own:
                continue
            pairs = _differences(own, scores[self.base])
            accuracy = mean(list(own.values()), list(own))
            difference = Estimate(0.0, 0.0, 0.0, len(own))
            if name != self.base:
                difference = _anytime(pairs, self.alpha)
            flips = float(np.mean(pairs != 0)) if len(pairs) else 0.0
            result[name] = Standing(accuracy, difference, flips)
        return result

    def remaining(
        self, scores: Mapping[str, Scores], names: Collection[str]
    ) -> list[str]:
        """Return the policies that may still be the best, among those in the race; the base policy stays.

        A policy drops out once it is surely worse than the best one, at the level :data:`DROP_ALPHA`.

        Args:
            scores: Scores by policy, of at least :data:`posbench.stats.sequential.FIRST_QUESTIONS` questions.
            names: The policies in the race.
        """
        asked = [name for name in names if scores.get(name)]
        if not asked or len(scores[self.base]) < FIRST_QUESTIONS:
            return list(names)
        base = scores[self.base]

        def gain(name: str) -> float:
            pairs = _differences(scores[name], base)
            return float(pairs.mean()) if len(pairs) else -1.0

        best = max(asked, key=lambda name: (gain(name), name == self.base))
        kept = []
        for name in names:
            pairs = _differences(scores.get(name, {}), scores[best])
            is_worse = (
                name != best
                and len(pairs) > 0
                and _anytime(pairs, DROP_ALPHA).ci_high < 0
            )
            if name == self.base or not is_worse:
                kept.append(name)
        return kept

    def is_decided(self, scores: Mapping[str, Scores], names: Collection[str]) -> bool:
        """Return whether more questions cannot change the verdict: one policy is left, and surely gains; or none can.

        Args:
            scores: Scores by policy.
            names: The policies that are still in the race, the base policy among them.
        """
        if len(scores.get(self.base, {})) < FIRST_QUESTIONS:
            return False
        standings = self.standings(scores)
        rest = [
            standings[name].difference
            for name in names
            if name != self.base and name in standings
        ]
        if not rest or all(d.ci_high < MARGIN for d in rest):
            return True
        return len(rest) == 1 and rest[0].ci_low > 0

    def leader(
        self,
        scores: Mapping[str, Scores],
        names: Collection[str],
        tokens: Mapping[str, float],
        missing: Mapping[str, float],
    ) -> str:
        """Return the best policy of those that surely gain, or of all where none does.

        Of policies within :data:`SAME` of the highest accuracy it is the cheapest.

        Args:
            scores: Scores by policy.
            names: The policies that are still in the race.
            tokens: Tokens of a question by policy.
            missing: Share of questions without an answer, by policy; above :data:`MAX_MISSING` one is passed over.
        """
        base = scores[self.base]
        gains = {
            name: float(np.mean(_differences(scores[name], base)))
            for name in names
            if scores.get(name) and missing.get(name, 0.0) <= MAX_MISSING
        }
        standings = self.standings(scores)
        sure = {n: g for n, g in gains.items() if standings[n].difference.ci_low > 0}
        gains = sure or gains
        if not gains:
            return self.base
        best = max(gains.values())
        alike = [name for name, gain in gains.items() if gain >= best - SAME]
        return min(alike, key=lambda name: (tokens.get(name, 0.0), -gains[name]))

    def verdict(
        self,
        scores: Mapping[str, Scores],
        leader: str,
        held_back: Estimate | None = None,
        names: Collection[str] | None = None,
        unsound: Collection[str] = (),
    ) -> PolicyVerdict:
        """Return what to do.

        Args:
            scores: Scores by policy, held-back questions among them.
            leader: The best policy by the questions of the race alone.
            held_back: The leader's gain on held-back questions; None where none is held back.
            names: The policies that may be recommended; None: all.
            unsound: Policies in the race that cannot be recommended, as too many of their replies are no answers.
        """
        standings = self.standings(scores)
        if not standings:
            return PolicyVerdict(CANNOT_TELL, self.base, "no question has a score")
        best_high = max(s.accuracy.ci_high for s in standings.values())
        if best_high < FLOOR:
            reason = f"under no policy more than {_percent(best_high)} % right"
            return PolicyVerdict(CANNOT_DO, self.base, reason)
        candidates = self.policies if names is None else names
        differences = {
            name: standing.difference
            for name, standing in standings.items()
            if name != self.base and name in {*candidates, leader}
        }
        open_names = ", ".join(
            name
            for name in unsound
            if name not in standings
            or standings[name].difference.ci_high >= (MARGIN if differences else 0)
        )
        unjudged = f"too many of the replies under {open_names} are no answers"
        if not differences:
            if open_names:
                return PolicyVerdict(CANNOT_TELL, self.base, unjudged)
            reason = "no other policy changes these prompts"
            if len(standings) > 1:
                reason = f"every other policy that could be recommended is surely worse than {self.base}"
            return PolicyVerdict(LEAVE, self.base, reason)
        gain = differences.get(leader)
        if gain and gain.ci_low > 0:
            text = f"{_points(gain)} points more than {self.base}, n = {gain.n}"
            unanswered = len(scores[self.base]) - gain.n
            if self._worst_gain(scores, leader).ci_low <= 0:
                reason = f"{leader} has {text}, but this is not sure where its {unanswered} questions without an answer"
                return PolicyVerdict(CANNOT_TELL, self.base, f"{reason} count as wrong")
            if held_back is None:
                return PolicyVerdict(USE, leader, text)
            checked = f"on held-back questions {_points(held_back)}, n = {held_back.n}"
            if held_back.value > 0:
                return PolicyVerdict(USE, leader, f"{text}; {checked}")
            reason = f"{leader} has {text}, but {checked}"
            return PolicyVerdict(CANNOT_TELL, self.base, reason)
        largest = max(d.ci_high for d in differences.values())
        if largest < MARGIN:
            reason = f"no policy is worth more than {_percent(largest)} points over {self.base}"
            if open_names:
                reason = f"no other {reason.removeprefix('no ')}, but {unjudged}"
                return PolicyVerdict(CANNOT_TELL, self.base, reason)
            return PolicyVerdict(LEAVE, self.base, reason)
        reason = (
            f"a gain of up to {_percent(largest)} points is possible, and none is sure"
        )
        needed = None
        if gain:
            # Held-back questions may have put it behind another one, or behind the prompts as they are.
            is_best = 0 < gain.value == max(d.value for d in differences.values())
            rank = "the best is" if is_best else "the race was led by"
            reason = f"{reason}; {rank} {leader}, {_points(gain)} points, n = {gain.n}"
            needed = self.questions_needed(scores, leader)
        return PolicyVerdict(CANNOT_TELL, self.base, reason, needed)

    def _worst_gain(self, scores: Mapping[str, Scores], name: str) -> Estimate:
        """A policy's gain where each question that it has no answer to, and the base policy has, counts as wrong."""
        base = scores[self.base]
        complete = {**dict.fromkeys(base, 0.0), **scores[name]}
        return _anytime(_differences(complete, base), self.alpha)

    def questions_needed(self, scores: Mapping[str, Scores], leader: str) -> int | None:
        """Forecast how many questions in all would tell whether the leader gains.

        Questions are drawn from those asked; None where the largest of :data:`FORECAST_FACTORS` is too small.

        Args:
            scores: Scores by policy.
            leader: The policy that leads.
        """
        pairs = _differences(scores[leader], scores[self.base])
        if leader == self.base or len(pairs) < 2:
            return None
        rng = np.random.default_rng(0)
        for factor in FORECAST_FACTORS:
            count = int(np.ceil(factor * len(pairs)))
            drawn = rng.choice(pairs, (SIMULATIONS // 4, count))
            low, high = anytime_intervals(drawn, -1, 1, self.alpha, MAX_BET)
            if np.mean((low > 0) | (high < MARGIN)) >= 0.5:
                return count
        return None


def detectable_difference(questions: int, num_policies: int) -> float:
    """Return the gain that a comparison detects with a probability of :data:`POWER`, before anything is asked.

    Logs are simulated in which the share :data:`CHANGING` of the questions changes its correctness, more often to the
    better; of a gain that needs more changes, all are to the better.

    Args:
        questions: Number of questions.
        num_policies: Policies that are compared with the base policy.

    Returns:
        The gain, in 0..1, to a point; 1 where none is detected.
    """
    rng = np.random.default_rng(0)
    draws = rng.random((SIMULATIONS, questions))
    alpha = ALPHA / max(num_policies, 1) / 2

    def is_detected(points: int) -> bool:
        gain = points / 100
        changing = max(CHANGING, gain)
        share_better = (changing + gain) / 2
        pairs = np.where(draws < share_better, 1.0, 0.0)
        pairs[draws >= 1 - (changing - share_better)] = -1.0
        capital = log_capital((1 + pairs) / 2, 0.5, alpha, MAX_BET).max(axis=-1)
        return bool(np.mean(capital >= np.log(1 / alpha)) >= POWER)

    return bisect_left(range(100), True, lo=1, key=is_detected) / 100


def _differences(scores: Scores, base: Scores) -> Array:
    """Score minus that of another policy, of the questions that have both, in the order in which they were asked."""
    return np.array([scores[name] - base[name] for name in base if name in scores])


def _anytime(values: Array, alpha: float) -> Estimate:
    """Mean of differences in -1..1, with an interval that holds at any time; without values, the whole range."""
    if not len(values):
        return Estimate(0.0, -1.0, 1.0, 0)
    (low,), (high,) = anytime_intervals(values[None], -1, 1, alpha, MAX_BET)
    value = float(values.mean())
    return Estimate(value, min(float(low), value), max(float(high), value), len(values))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _points(estimate: Estimate) -> str:
    value, low, high = (100 * end for end in estimate[:3])
    return f"{value:+.1f} [{low:.1f}, {high:.1f}]"
