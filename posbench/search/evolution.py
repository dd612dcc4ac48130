"""The genetic search by ask and tell, and the race that scores its candidates (LPES, Algorithm 1)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from posbench.plots.search import POSITIONS

if TYPE_CHECKING:
    from posbench.search.genetic import GeneticSearch

Genome = tuple[int, ...]
"""Grid indices: x and y of every control point in turn, or one y per layer without a curve."""

Scales = tuple[float, ...]
"""One factor per layer: what a candidate is scored by, and the key of everything that is remembered of it."""


def fitness(weights: Sequence[float], accuracies: Sequence[float]) -> float:
    """Weighted accuracy from those of beginning, middle and end."""
    return sum(weight * accuracy for weight, accuracy in zip(weights, accuracies, strict=True))


@dataclass
class Scores:
    """What each candidate scores on each of N examples, and the race over them.

    Attributes:
        search: Weights, parents, racing and batch size.
        positions: [N], 0 where an example's answer stands at the beginning, 1 in the middle, 2 at the end.
        answer: Scores a candidate on some examples: one number in 0..1 for each, in order.
        known: Candidate to scores [N], NaN where there is none yet.
    """

    search: GeneticSearch
    positions: NDArray[np.int64]
    answer: Callable[[Scales, list[int]], Sequence[float]]
    known: dict[Scales, NDArray[np.float64]] = field(default_factory=dict)

    @property
    def evaluations(self) -> int:
        """Pairs of candidate and example that have been scored."""
        return sum(int(np.isfinite(row).sum()) for row in self.known.values())

    def of(self, scales: Scales) -> NDArray[np.float64]:
        """Scores of a candidate, [N]."""
        return self.known.get(scales, np.full(len(self.positions), np.nan))

    def add(self, scales: Scales, examples: Sequence[int], scores: Sequence[float]) -> None:
        """Remember scores of a candidate."""
        self.known[scales] = self.of(scales)
        self.known[scales][list(examples)] = scores

    def _ask(self, scales: Scales, examples: list[int]) -> None:
        """Score a candidate on some examples, unless it was."""
        if np.isnan(self.of(scales)[examples]).any():
            self.add(scales, examples, self.answer(scales, examples))

    def fill(self, scales: Scales) -> None:
        """Score a candidate on every example that it was not scored on, in batches in order."""
        for batch in self._batches(list(range(len(self.positions)))):
            self._ask(scales, batch)

    def _batches(self, order: list[int]) -> list[list[int]]:
        size = self.search.batch_size
        return [order[i : i + size] for i in range(0, len(order), size)]

    def accuracies(self, scales: Scales) -> list[float]:
        """Accuracy at beginning, middle and end; what is not scored counts as right, so this bounds what it
        can be.

        The bound falls from score to score, also in floating point, and ends as the accuracy itself.
        """
        right = np.nan_to_num(self.of(scales), nan=1.0)
        parts = (right[self.positions == p] for p in range(len(POSITIONS)))
        return [float(part.mean()) if len(part) else 0.0 for part in parts]

    def bound(self, scales: Scales) -> float:
        """Fitness of a candidate that is scored on everything; of any other, the highest it can have."""
        return fitness(self.search.weights, self.accuracies(scales))

    def rank(self, scales: Scales) -> tuple[float, float, float]:
        """Sorts candidates, best first; ties as :class:`posbench.search.genetic.GeneticSearch` says."""
        accuracies = self.accuracies(scales)
        return (-fitness(self.search.weights, accuracies), -min(accuracies), sum(abs(s - 1) for s in scales))

    def race(self, families: Sequence[Sequence[Scales]], rivals: Sequence[Scales]) -> None:
        """Score candidates in turn; each stops where it falls behind the last place among the parents.

        The fitness of the last parent can only rise, in this generation and in later ones. So a candidate
        that cannot reach it is never a parent again, and whatever is skipped cannot change a parent or the
        result. Batches do not depend on racing.

        Args:
            families: To be scored; of each, only the fittest will join the population.
            rivals: The parents of before, scored on everything.
        """
        ahead, scored = [self.bound(scales) for scales in rivals], dict.fromkeys(rivals)
        plan, known_difficulty = self._plan([]), False
        for family in families:
            best: list[float] = []
            full = len(ahead) >= self.search.parents
            if full and not known_difficulty:
                plan, known_difficulty = self._plan(list(scored)), True
            last = sorted(ahead, reverse=True)[self.search.parents - 1] if full else -1.0
            for scales in family:
                for examples in plan:
                    if self.search.racing and self.bound(scales) < last:
                        break
                    self._ask(scales, examples)
                else:
                    best.append(self.bound(scales))
                    scored[scales] = None
            ahead += [max(best)] if best else []

    def _plan(self, scored: Sequence[Scales]) -> list[list[int]]:
        """Batches of examples, those on which candidates lost most first: a bad one is found out early."""
        asked = np.bincount(self.positions, minlength=len(POSITIONS))
        loss = (np.array(self.search.weights) / np.maximum(asked, 1))[self.positions]
        if scored:
            loss = loss * np.mean([1 - self.known[scales] for scales in scored], axis=0)
        return self._batches(np.argsort(-loss, kind="stable").tolist())


@dataclass
class Evolution:
    """The search itself, by ask and tell; plain data, so that it can be saved after every generation.

    Attributes:
        search: The settings.
        layers: Layers of the model.
        generation: Generations that have been scored, the first population included.
        population: Genomes of the generation scored last, best first.
        history: Per generation: fitness of the best, of the parents on average and of the worst parent,
            scores and candidates so far, and generations since the best one changed.
    """

    search: GeneticSearch
    layers: int
    generation: int = 0
    population: list[Genome] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    _rng: random.Random = field(default_factory=random.Random, repr=False)
    _asked: list[list[Genome]] = field(default_factory=list, repr=False)
    _scales: dict[Genome, Scales] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._rng.seed(f"posbench genetic {self.search.seed}")

    @property
    def done(self) -> bool:
        """Whether every generation is scored, or ``patience`` ran out."""
        quiet = self.history[-1]["quiet"] if self.history else 0
        return self.generation > self.search.generations or quiet >= (self.search.patience or math.inf)

    @property
    def parents(self) -> list[Genome]:
        """The best of the generation told last, best first."""
        return self.population[: self.search.parents]

    def scales(self, genome: Genome) -> Scales:
        """The scale of each layer."""
        if genome not in self._scales:
            self._scales[genome] = self.search.decode(genome, self.layers)
        return self._scales[genome]

    def ask(self) -> list[list[Scales]]:
        """What to score next, in families of which the fittest member joins: first the population, then
        offspring."""
        search, rng = self.search, self._rng
        if not self.generation:
            first = search.first(self.layers)
            others = [[search.mutate(first, rng, self.layers)] for _ in range(search.population - 1)]
            self._asked = [[first], *others]
        else:
            families = []
            for _ in range(search.crossovers):
                tries = (search.cross(self.parents, rng) for _ in range(search.crossover_tries))
                families.append(next(filter(None, tries), []) or [self._mutant()])
            self._asked = families + [[self._mutant()] for _ in range(search.mutations)]
        return [[self.scales(genome) for genome in family] for family in self._asked]

    def _mutant(self) -> Genome:
        return self.search.mutate(self._rng.choice(self.parents), self._rng, self.layers)

    def tell(self, scores: Scores) -> None:
        """Choose the fitter children of what was asked, then the parents of the next generation.

        Args:
            scores: Knows each candidate, or that it cannot become a parent.
        """
        ranks = {g: scores.rank(self.scales(g)) for family in [self.parents, *self._asked] for g in family}
        offspring = [min(family, key=ranks.__getitem__) for family in self._asked]
        # The sort is stable: of equals, the older one stays in front.
        self.population = sorted([*self.parents, *offspring], key=ranks.__getitem__)
        known = [-ranks[genome][0] for genome in self.parents]
        better = not self.history or known[0] > self.history[-1]["best"]
        row = {"generation": self.generation, "best": known[0], "mean": sum(known) / len(known)}
        row |= {"worst": known[-1], "evaluations": scores.evaluations, "candidates": len(scores.known)}
        self.history.append({**row, "quiet": 0 if better else self.history[-1]["quiet"] + 1})
        self.generation += 1

    def state(self) -> dict[str, Any]:
        """Everything that the next generation depends on, as plain data."""
        told = {"generation": self.generation, "population": self.population, "history": self.history}
        return {**told, "rng": self._rng.getstate()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved :meth:`state`."""
        self.generation, self.history = int(state["generation"]), list(state["history"])
        self.population = [tuple(genome) for genome in state["population"]]
        version, numbers, gauss = state["rng"]
        self._rng.setstate((version, tuple(numbers), gauss))


def evolve(
    evolution: Evolution, scores: Scores, after: Callable[[Evolution], None] = lambda _: None
) -> Genome:
    """Run a fresh or restored search to its end; ``after`` is called after every generation.

    Returns:
        The best genome.
    """
    while not evolution.done:
        scores.race(evolution.ask(), [evolution.scales(genome) for genome in evolution.parents])
        evolution.tell(scores)
        after(evolution)
    return evolution.population[0]
