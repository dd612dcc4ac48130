"""The genetic search by ask and tell, and the race that scores its candidates (LPES, Algorithm 1)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Genome = tuple[int, ...]
"""Grid indices: x and y of every control point in turn, or one y per layer without a curve."""

Scales = tuple[float, ...]
"""One factor per layer: what a candidate is scored by, and the key of everything that is remembered of it."""

POSITIONS = ("beginning", "middle", "end")


class Space(Protocol):
    """What the search needs to know of its candidates; :class:`posbench.search.genetic.GeneticSearch`
    documents the settings."""

    population: int
    parents: int
    generations: int
    mutations: int
    crossovers: int
    crossover_tries: int
    racing: bool
    patience: int | None
    batch_size: int
    seed: int
    weights: tuple[float, float, float]

    def decode(self, genome: Genome, layers: int) -> Scales:
        """The scale of each layer."""

    def first(self, layers: int) -> Genome:
        """The start."""

    def mutate(self, genome: Genome, rng: random.Random, layers: int) -> Genome:
        """Another valid genome within reach."""

    def cross(self, parents: Sequence[Genome], rng: random.Random) -> list[Genome]:
        """The valid children of two parents."""


def fitness(weights: Sequence[float], accuracies: Sequence[float]) -> float:
    """Weighted accuracy from those of beginning, middle and end."""
    return sum(weight * accuracy for weight, accuracy in zip(weights, accuracies, strict=True))


@dataclass
class Scores:
    """What each candidate scores on each of N examples, and the race over them.

    Attributes:
        search: Weights and racing.
        positions: [N], 0 where an example's answer stands at the beginning, 1 in the middle, 2 at the end.
        answer: Scores a candidate on some examples: one number in 0..1 for each, in order.
        known: Candidate to scores [N], NaN where there is none yet.
    """

    search: Space
    positions: NDArray[np.int64]
    answer: Callable[[Scales, list[int]], Sequence[float]]
    known: dict[Scales, NDArray[np.float64]] = field(default_factory=dict)

    @property
    def evaluations(self) -> int:
        """Pairs of candidate and example that have been scored."""
        return sum(int(np.isfinite(row).sum()) for row in self.known.values())

    def add(self, scales: Scales, examples: Sequence[int], scores: Sequence[float]) -> None:
        """Remember scores of a candidate."""
        self.known.setdefault(scales, np.full(len(self.positions), np.nan))[list(examples)] = scores

    def fill(self, scales: Scales) -> None:
        """Score a candidate on every example that it was not scored on, in batches in order."""
        everything = range(len(self.positions))
        for start in range(0, len(everything), self.search.batch_size):
            batch = list(everything[start : start + self.search.batch_size])
            if scales not in self.known or np.isnan(self.known[scales][batch]).any():
                self.add(scales, batch, self.answer(scales, batch))

    def accuracies(self, scales: Scales) -> list[float]:
        """Accuracy at beginning, middle and end; what is not scored counts as right, so this bounds what it
        can be.

        The bound falls from score to score, also in floating point, and ends as the accuracy itself.
        """
        right = (
            np.nan_to_num(self.known[scales], nan=1.0)
            if scales in self.known
            else np.ones(len(self.positions))
        )
        return [
            float(right[self.positions == p].mean()) if (self.positions == p).any() else 0.0
            for p in range(len(POSITIONS))
        ]

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
                    if scales not in self.known or np.isnan(self.known[scales][examples]).any():
                        self.add(scales, examples, self.answer(scales, examples))
                else:
                    best.append(self.bound(scales))
                    scored[scales] = None
            ahead += [max(best)] if best else []

    def _plan(self, scored: Sequence[Scales]) -> list[list[int]]:
        """Batches of examples; those on which candidates lost most come first, so that a bad candidate is
        found out early."""
        asked = np.bincount(self.positions, minlength=len(POSITIONS))
        loss = (np.array(self.search.weights) / np.maximum(asked, 1))[self.positions]
        if scored:
            loss = loss * np.mean([1 - self.known[scales] for scales in scored], axis=0)
        order = np.argsort(-loss, kind="stable").tolist()
        return [order[i : i + self.search.batch_size] for i in range(0, len(order), self.search.batch_size)]


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

    search: Space
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
        return self.generation > self.search.generations or bool(
            self.search.patience and quiet >= self.search.patience
        )

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
        """What to score next: the first population, or the offspring; in families, of which the fittest
        member joins."""
        search, rng = self.search, self._rng
        if not self.generation:
            first = search.first(self.layers)
            self._asked = [
                [first],
                *([search.mutate(first, rng, self.layers)] for _ in range(search.population - 1)),
            ]
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
        """Take the scores of what was asked: choose the fitter children, then the parents of the next
        generation.

        Args:
            scores: Knows each candidate, or that it cannot become a parent.
        """
        ranks = {g: scores.rank(self.scales(g)) for family in [self.parents, *self._asked] for g in family}
        offspring = [min(family, key=ranks.__getitem__) for family in self._asked]
        # The sort is stable: of equals, the older one stays in front.
        self.population = sorted([*self.parents, *offspring], key=ranks.__getitem__)
        best, known = self.population[0], [-ranks[genome][0] for genome in self.parents]
        better = not self.history or -ranks[best][0] > self.history[-1]["best"]
        self.history.append(
            {
                "generation": self.generation,
                "best": -ranks[best][0],
                "mean": sum(known) / len(known),
                "worst": known[-1],
                "evaluations": scores.evaluations,
                "candidates": len(scores.known),
                "quiet": 0 if better else self.history[-1]["quiet"] + 1,
            }
        )
        self.generation += 1

    def state(self) -> dict[str, Any]:
        """Everything that the next generation depends on, as plain data."""
        version, numbers, gauss = self._rng.getstate()
        return {
            "generation": self.generation,
            "population": self.population,
            "history": self.history,
            "rng": [version, list(numbers), gauss],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved :meth:`state`."""
        self.generation, self.history = int(state["generation"]), list(state["history"])
        self.population = [tuple(genome) for genome in state["population"]]
        version, numbers, gauss = state["rng"]
        self._rng.setstate((version, tuple(numbers), gauss))


def evolve(
    evolution: Evolution, scores: Scores, after: Callable[[Evolution], None] = lambda _: None
) -> Genome:
    """Run a search to its end.

    Args:
        evolution: Fresh or restored.
        scores: Scores candidates, and remembers.
        after: Called after every generation.

    Returns:
        The best genome.
    """
    while not evolution.done:
        scores.race(evolution.ask(), [evolution.scales(genome) for genome in evolution.parents])
        evolution.tell(scores)
        after(evolution)
    return evolution.population[0]
