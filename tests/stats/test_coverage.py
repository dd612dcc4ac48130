"""95 % intervals hold the truth in 93 to 97 of 100 simulated runs: questions of unequal difficulty (a probit
model: the answers to one question correlate) asked at several gold positions, near 0, 50 and 100 %."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from posbench.stats import position_bias
from posbench.stats.bootstrap import Estimate, mean

Array = NDArray[np.float64]
SIZES = [(60, 9), (200, 5), (500, 1)]
"""Questions, and gold positions at which each is asked."""
LEVELS = [0.03, 0.5, 0.97]
CORRELATED = 0.5
"""Share of the variance behind an answer that is the question's."""
HELD = (0.93, 0.97)


def shape(level: float, positions: int, bend: float = 0.4) -> Array:
    """Chances of a right answer at each gold position: a U about a level."""
    place = np.linspace(-1, 1, positions) ** 2
    return norm.cdf(norm.ppf(level) + bend * (place - place.mean()))


def answers(rng: np.random.Generator, questions: int, *curves: Array, own: bool = False) -> list[Array]:
    """Right or wrong, [questions, positions] for each method, whose answers to one prompt correlate too;
    ``own``: each position has questions of its own."""
    places = len(curves[0])
    asked = rng.normal(size=(questions, places if own else 1))
    prompt, rest = rng.normal(size=(questions, places)), (1 - CORRELATED) / 2
    luck = np.sqrt(CORRELATED) * asked + np.sqrt(rest) * prompt
    noise = (np.sqrt(rest) * rng.normal(size=(questions, places)) for _ in curves)
    return [(luck + each < norm.ppf(c)).astype(float) for c, each in zip(curves, noise, strict=True)]


def names(questions: int, positions: int) -> list[str]:
    return np.repeat(np.arange(questions), positions).tolist()


class Tally:
    """How often intervals hold the truth."""

    def __init__(self) -> None:
        self.seen, self.missed = Counter[str](), Counter[str]()

    def add(self, what: str, at: Estimate, true: float) -> None:
        self.seen[what] += 1
        self.missed[what] += not (at.ci_low - 1e-9 <= true <= at.ci_high + 1e-9)

    def held(self) -> dict[str, float]:
        return {what: 1 - self.missed[what] / seen for what, seen in self.seen.items()}

    def check(self, low: float = HELD[0], high: float = HELD[1]) -> None:
        for what, held in self.held().items():
            # Three standard errors of a simulation as long as this one.
            slack = 3 * np.sqrt(0.05 * 0.95 / self.seen[what])
            assert low - slack <= held <= high + slack, (what, held, self.seen[what])


def curve_tally(
    rng: np.random.Generator,
    runs: int,
    questions: int,
    *curves: Array,
    own: bool = False,
    resamples: int = 400,
) -> tuple[Tally, float]:
    """Of the statistics of position bias and of a method's differences in them; share that is withheld."""
    true = [position_bias.curve_statistics(c) | {"position_bias": c.std(ddof=1)} for c in curves]
    tally, withheld, sizes = Tally(), 0, np.full(len(curves[0]), questions)
    for _ in range(runs):
        shape = (resamples, len(sizes)) if own else resamples
        drawn = rng.multinomial(questions, np.full(questions, 1 / questions), size=shape) / questions
        told, limited = [], False
        for number, right in enumerate(answers(rng, questions, *curves, own=own)):
            draws = np.einsum("rkc,ck->rk", drawn, right) if own else drawn @ right
            seed = (int(rng.integers(1 << 30)), number)
            told.append(position_bias.Told(right.mean(0), draws, sizes, questions, True, seed))
            limited = limited or bool(position_bias.limit((mean(at, range(questions)) for at in right.T), 0))
            for key, at in told[-1].estimates.items() if not limited else ():
                tally.add(key, at, float(true[number][key]))
        for key in told[0].estimates if not limited else ():
            if key != "gap":
                truth = float(true[1][key] - true[0][key])
                tally.add(f"{key}_difference", told[1].minus(told[0], key), truth)
        withheld += limited
    return tally, withheld / runs
