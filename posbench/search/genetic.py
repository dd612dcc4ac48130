"""Which scale per layer: a genetic search over curves, and the race that scores its candidates (LPES,
Algorithm 1)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from posbench.errors import UserError
from posbench.methods.curves import layer_scales
from posbench.search.base import Search

Genome = tuple[int, ...]
"""Grid indices: x and y of every control point in turn, or one y per layer without a curve."""

Scales = tuple[float, ...]
"""One factor per layer: what a candidate is scored by, and the key of everything that is remembered of it."""

POSITIONS = ("beginning", "middle", "end")


@dataclass(frozen=True, kw_only=True)
class GeneticSearch(Search):
    """The search for one RoPE scale per layer. The fields are the keys of ``conf/search/genetic.yaml``.

    The defaults are Table 12 and Table 9 of LPES. What the paper leaves open is settled so: mutation draws every coordinate
    uniformly from the grid values that Eq. 9 allows, with the neighbours of before the mutation, and draws again while x does not
    rise strictly or nothing changed; parents are the best of the population, mutated ones are drawn from them with replacement; a
    crossover cuts the flat vector (x0, y0, x1, ...) at any place, and after ``crossover_tries`` pairs without a valid child a
    mutation takes its place; equal fitness goes to the higher lowest position, then to the smaller sum of |s - 1|, then to the
    older candidate; the result is the best candidate ever scored.

    Args:
        curve: ``bezier`` (paper), ``linear``, ``step`` (Table 6), or ``free``: a value per layer (brute
            force, Table 7).
        points: Control points (paper 4: a cubic).
        x: ``stretched`` (Eq. 6) or ``absolute``; see :func:`posbench.methods.curves.layer_scales`.
        constrained: Whether x must rise strictly along the points (Eq. 10); only a Bezier curve can do
            without.
        population: Candidates of the first generation (32).
        parents: Best candidates that breed and survive (12).
        generations: Generations that are bred (20).
        mutations: Offspring by mutation per generation (16).
        crossovers: Offspring by crossover per generation (4), each the fitter of two children.
        crossover_tries: Pairs tried for one valid child (4).
        reach_x: Largest change of an x in one mutation, in layers (2).
        reach_y: Largest change of a y in one mutation (0.2).
        step_x: Grid step of x in layers (1). Points on whole layers leave a model of few layers no choice of
            x: take less there.
        step_y: Grid step of y (0.1).
        low: Smallest scale (1).
        high: Largest scale (2).
        start: Scale of the first candidate in every layer (1.5).
        weights: Weights of the accuracy with the answer at the beginning, in the middle and at the end (0.2,
            0.3, 0.5).
        racing: Whether a candidate is given up as soon as it can no longer become a parent. Changes no parent
            and no result.
        patience: Generations without a better candidate after which the search stops; None runs all of them.
        batch_size: Prompts scored at once.
        seed: Seed of the draws.

    Source: LPES, Section 3.2, Algorithm 1, Eq. 8-10, Tables 9 and 12.
    """

    serves: ClassVar[str] = "LayerScaling"
    finds: ClassVar[Mapping[str, Any]] = {
        "points": ((0.0, 1.0),),
        "scales": None,
        "curve": "bezier",
        "x": "stretched",
    }
    stage: ClassVar[str] = "curve_run"

    curve: Literal["bezier", "linear", "step", "free"] = "bezier"
    points: int = 4
    x: Literal["stretched", "absolute"] = "stretched"
    constrained: bool = True
    population: int = 32
    parents: int = 12
    generations: int = 20
    mutations: int = 16
    crossovers: int = 4
    crossover_tries: int = 4
    reach_x: float = 2
    reach_y: float = 0.2
    step_x: float = 1
    step_y: float = 0.1
    low: float = 1.0
    high: float = 2.0
    start: float = 1.5
    weights: tuple[float, float, float] = (0.2, 0.3, 0.5)
    racing: bool = True
    patience: int | None = None
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        self._at_least(
            points=1,
            population=2,
            parents=2,
            generations=0,
            mutations=0,
            crossovers=0,
            crossover_tries=1,
            patience=1,
            batch_size=1,
        )
        self._at_least(reach_x=0.0, reach_y=0.0)
        for name in ("step_x", "step_y", "low"):
            if getattr(self, name) <= 0:
                raise UserError(
                    f"search.{name}", getattr(self, name), "a number above 0", f"set search.{name}=1"
                )
        if (
            not self.low <= self.start <= self.high
            or self.reach_y < self.step_y
            or self.high - self.low < self.step_y
        ):
            raise UserError(
                "search.low",
                [self.low, self.start, self.high],
                "low <= start <= high, with room for a step_y between, and reach_y of a step_y or more",
                "the paper takes search.low=1 search.start=1.5 search.high=2",
            )
        if self.parents > self.population:
            raise UserError(
                "search.parents",
                self.parents,
                f"at most {self.population}, the population",
                f"set search.parents={self.population}",
            )
        check_weights(self.weights)
        if not self.constrained and self.curve in ("linear", "step"):
            raise UserError(
                "search.constrained", False, f"true with curve={self.curve}", "set search.curve=bezier"
            )

    def check(self, layers: int) -> None:
        """Refuse more points than the grid has places.

        Args:
            layers: Layers of the model, L.

        Raises:
            UserError: The points do not fit.
        """
        places = self._places(layers) + 1
        if self.curve != "free" and self.constrained and self.points > places:
            raise UserError(
                "search.points",
                self.points,
                f"at most {places} ({layers} layers in steps of {self.step_x:g})",
                f"set search.step_x={self.step_x / 2:g}, or search.points={places}",
            )

    def decode(self, genome: Genome, layers: int) -> Scales:
        """The scale of each of the L layers."""
        if self.curve == "free":
            return tuple(self._y(value) for value in genome)
        return tuple(layer_scales(self.curve, self.control_points(genome), layers, self.x))

    def control_points(self, genome: Genome) -> list[tuple[float, float]]:
        """The control points (x, y) of a genome with a curve."""
        pairs = zip(genome[::2], genome[1::2], strict=True)
        return [(round(x * self.step_x, 10), self._y(y)) for x, y in pairs]

    def fitness(self, accuracies: Sequence[float]) -> float:
        """Weighted accuracy from those of beginning, middle and end."""
        return sum(weight * accuracy for weight, accuracy in zip(self.weights, accuracies, strict=True))

    # The operators

    def first(self, layers: int) -> Genome:
        """Points spread evenly over the layers (Eq. 8, rounded to the grid), all at ``start``."""
        y = round((self.start - self.low) / self.step_y)
        if self.curve == "free":
            return (y,) * layers
        last = self._places(layers)
        return tuple(
            value for k in range(self.points) for value in (round(k * last / max(self.points - 1, 1)), y)
        )

    def mutate(self, genome: Genome, rng: random.Random, layers: int) -> Genome:
        """Another valid genome within reach (Eq. 9-10)."""
        reach_x, reach_y = int(self.reach_x / self.step_x + 1e-9), int(self.reach_y / self.step_y + 1e-9)
        top, last = int((self.high - self.low) / self.step_y + 1e-9), self._places(layers)

        def draw(value: int, reach: int, low: int, high: int) -> int:
            return rng.randint(max(low, value - reach), min(high, value + reach))

        while True:
            if self.curve == "free":
                child = tuple(draw(y, reach_y, 0, top) for y in genome)
            else:
                xs, ys = genome[::2], genome[1::2]
                flat: list[int] = []
                for k, (x, y) in enumerate(zip(xs, ys, strict=True)):
                    left = xs[k - 1] if self.constrained and k else 0
                    right = xs[k + 1] if self.constrained and k + 1 < len(xs) else last
                    flat += [draw(x, reach_x, left, right), draw(y, reach_y, 0, top)]
                child = tuple(flat)
            if child != genome and self.valid(child):
                return child

    def cross(self, parents: Sequence[Genome], rng: random.Random) -> list[Genome]:
        """The valid children, at most two, of two parents that are cut at one place."""
        one, other = rng.sample(list(parents), 2)
        cut = rng.randrange(1, max(len(one), 2))
        return [child for child in (one[:cut] + other[cut:], other[:cut] + one[cut:]) if self.valid(child)]

    def valid(self, genome: Genome) -> bool:
        """Whether x rises strictly along the points, where that is asked for."""
        xs = genome[::2]
        return self.curve == "free" or not self.constrained or all(a < b for a, b in pairwise(xs))

    def _places(self, layers: int) -> int:
        return int((layers - 1) / self.step_x + 1e-9)

    def _y(self, index: int) -> float:
        return round(self.low + index * self.step_y, 10)


def check_weights(weights: Sequence[float]) -> None:
    """Raise UserError unless they are shares; the paper itself prints three times 0.333."""
    if min(weights) < 0 or abs(sum(weights) - 1) > 5e-3:
        raise UserError(
            "search.weights",
            list(weights),
            "three numbers from 0 up with sum 1",
            "the paper takes [0.2,0.3,0.5]",
        )


@dataclass
class Scores:
    """What each candidate scores on each of N examples, and the race over them.

    Attributes:
        search: Weights and racing.
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

    def add(self, scales: Scales, examples: Sequence[int], scores: Sequence[float]) -> None:
        """Remember scores of a candidate."""
        self.known.setdefault(scales, np.full(len(self.positions), np.nan))[list(examples)] = scores

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
        return self.search.fitness(self.accuracies(scales))

    def rank(self, scales: Scales) -> tuple[float, float, float]:
        """Sorts candidates, best first; ties as :class:`GeneticSearch` says."""
        accuracies = self.accuracies(scales)
        return (-self.search.fitness(accuracies), -min(accuracies), sum(abs(s - 1) for s in scales))

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
