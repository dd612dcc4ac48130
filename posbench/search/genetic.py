"""Which RoPE scale per layer: the genetic search of LPES over curves, on calibration questions."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge

from posbench.errors import UserError
from posbench.files.atomic import Row, write_csv
from posbench.late import pd
from posbench.methods import curves
from posbench.plots.search import convergence, curve_figure
from posbench.plots.section import Section
from posbench.run.base import Run
from posbench.run.cost import StudyWorkload
from posbench.schema import Count, NonNegative, Positive, Several, Whole
from posbench.search.base import ROWS, Read
from posbench.search.scales import (
    NEUTRAL,
    POSITIONS,
    Scales,
    ScaleSearch,
    Scores,
    answering,
    calibration,
)

SAMPLES = 101  # points of a curve as it is drawn
Asked = tuple[Scales, tuple[int, ...]]
"""What a row of ``search.jsonl`` scores: scales, and the numbers of the examples."""
Genome = tuple[int, ...]
"""Grid indices: x and y of every control point in turn, or one y per layer without a curve."""


@dataclass(frozen=True, kw_only=True)
class GeneticSearch(ScaleSearch):
    """The search for one RoPE scale per layer.

    The defaults are Table 12 and Table 9 of LPES. What the paper leaves open is settled so: mutation draws
    every coordinate uniformly from the grid values that Eq. 9 allows, with the neighbours of before the
    mutation, and draws again while x does not rise strictly or nothing changed; parents are the best of the
    population, mutated ones are drawn from them with replacement; a crossover cuts the flat vector (x0, y0,
    x1, ...) at any place, and after ``crossover_tries`` pairs without a valid child a mutation takes its
    place; equal fitness goes to the higher lowest position, then to the smaller sum of |s - 1|, then to the
    older candidate; the result is the best candidate ever scored.

    Args:
        curve: ``bezier`` (paper), ``linear``, ``step`` (Table 6), or ``free``: a value per layer (Table 7).
        points: Control points (paper 4: a cubic).
        x: ``stretched`` (Eq. 6) or ``absolute``; see :func:`posbench.methods.curves.layer_scales`.
        constrained: Whether x must rise strictly (Eq. 10); only a Bezier curve can do without.
        population: Candidates of the first generation (32).
        parents: Best candidates that breed and survive (12).
        generations: Generations that are bred (20).
        mutations: Offspring by mutation per generation (16).
        crossovers: Offspring by crossover per generation (4), each the fitter of two children.
        crossover_tries: Pairs tried for one valid child (4).
        reach_x: Largest change of an x in one mutation, in layers (2).
        reach_y: Largest change of a y in one mutation (0.2).
        step_x: Grid step of x in layers (1); a model of few layers has no choice of x without smaller ones.
        step_y: Grid step of y (0.1).
        low: Smallest scale (1).
        high: Largest scale (2).
        start: Scale of the first candidate in every layer (1.5).
        racing: Whether what can no longer become a parent is given up, which changes no parent or result.
        patience: Generations without a better candidate after which the search stops; None runs all of them.

    Source: LPES, Section 3.2, Algorithm 1, Eq. 8-10, Tables 9 and 12.
    """

    results: ClassVar[Sequence[str]] = ("search.csv", "generations.csv", "curve.csv")
    measure: ClassVar[str] = "fitness"

    curve: Literal["bezier", "linear", "step", "free"] = "bezier"
    points: Count = 4
    x: Literal["stretched", "absolute"] = "stretched"
    constrained: bool = True
    population: Several = 32
    parents: Several = 12
    generations: Whole = 20
    mutations: Whole = 16
    crossovers: Whole = 4
    crossover_tries: Count = 4
    reach_x: Annotated[float, Ge(0)] = 2
    reach_y: NonNegative = 0.2
    step_x: Positive = 1
    step_y: Positive = 0.1
    low: Positive = 1.0
    high: float = 2.0
    start: float = 1.5
    racing: bool = True
    patience: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        room = min(self.reach_y, self.high - self.low) >= self.step_y
        if not self.low <= self.start <= self.high or not room:
            allowed = "low <= start <= high, with room for a step_y between, and reach_y of a step_y or more"
            hint = "the paper takes search.low=1 search.start=1.5 search.high=2"
            raise UserError(
                "search.low", [self.low, self.start, self.high], allowed, hint
            )
        if self.parents > self.population:
            allowed = f"at most {self.population}, the population"
            raise UserError(
                "search.parents",
                self.parents,
                allowed,
                f"set search.parents={self.population}",
            )
        if not self.constrained and self.curve in ("linear", "step"):
            allowed = f"true with curve={self.curve}"
            hint = "set search.curve=bezier"
            raise UserError("search.constrained", False, allowed, hint)

    def fitted(self, window: int, spells: bool, layers: int) -> Mapping[str, Any]:
        """No more points than the grid has places, where x rises strictly."""
        places = self._places(layers) + 1
        few = self.curve != "free" and self.constrained and self.points > places
        return {"points": places} if few else {}

    def asks(
        self, prompts: int, answer: int, layers: int, channels: int
    ) -> StudyWorkload:
        """All candidates, every child and the unmodified model among them, then both methods of the check, on
        questions with the answer at three places."""
        tried = (
            1
            + self.population
            + self.generations * (self.mutations + 2 * self.crossovers)
        )
        asked = [
            (tried, len(POSITIONS) * prompts),
            (2, len(POSITIONS) * (self.held_back or prompts)),
        ]
        batches = sum(n * -(-count // self.batch_size) for n, count in asked)
        prompts = sum(n * count for n, count in asked)
        return StudyWorkload(prompts, replies=prompts, batches=batches)

    def decode(self, genome: Genome, layers: int) -> Scales:
        """The scale of each of the L layers."""
        if self.curve == "free":
            return tuple(self._y(value) for value in genome)
        return tuple(
            curves.layer_scales(self.curve, self.control_points(genome), layers, self.x)
        )

    def control_points(self, genome: Genome) -> list[tuple[float, float]]:
        """The control points (x, y) of a genome with a curve."""
        pairs = zip(genome[::2], genome[1::2], strict=True)
        return [(round(x * self.step_x, 10), self._y(y)) for x, y in pairs]

    def first(self, layers: int) -> Genome:
        """Points spread evenly over the layers (Eq. 8, rounded to the grid), all at ``start``."""
        y = round((self.start - self.low) / self.step_y)
        last = self._places(layers)
        if self.curve == "free":
            return (y,) * layers
        places = (round(k * last / max(self.points - 1, 1)) for k in range(self.points))
        return tuple(value for place in places for value in (place, y))

    def mutate(self, genome: Genome, rng: random.Random, layers: int) -> Genome:
        """Another valid genome within reach (Eq. 9-10)."""
        reach_x = int(self.reach_x / self.step_x + 1e-9)
        reach_y = int(self.reach_y / self.step_y + 1e-9)
        top = int((self.high - self.low) / self.step_y + 1e-9)
        last = self._places(layers)

        spans = []
        for k, value in enumerate(genome):
            low = 0
            high = top
            reach = reach_y
            if self.curve != "free" and k % 2 == 0:
                low = genome[k - 2] if self.constrained and k else 0
                high = (
                    genome[k + 2] if self.constrained and k + 2 < len(genome) else last
                )
                reach = reach_x
            spans.append((max(low, value - reach), min(high, value + reach)))
        while True:
            child = tuple(rng.randint(*span) for span in spans)
            if child != genome and self.valid(child):
                return child

    def cross(self, parents: Sequence[Genome], rng: random.Random) -> list[Genome]:
        """The valid children, at most two, of two parents that are cut at one place."""
        one, other = rng.sample(list(parents), 2)
        cut = rng.randrange(1, max(len(one), 2))
        return [
            child
            for child in (one[:cut] + other[cut:], other[:cut] + one[cut:])
            if self.valid(child)
        ]

    def valid(self, genome: Genome) -> bool:
        """Whether x rises strictly along the points, where that is asked for."""
        return (
            self.curve == "free"
            or not self.constrained
            or all(a < b for a, b in pairwise(genome[::2]))
        )

    def _places(self, layers: int) -> int:
        return int((layers - 1) / self.step_x + 1e-9)

    def _y(self, index: int) -> float:
        return round(self.low + index * self.step_y, 10)

    def search(self, run: Run) -> None:
        """Write ``search.csv`` (candidates), ``generations.csv`` and ``curve.csv``."""
        lm, out, unmodified = run.lm, run.out, (1.0,) * run.lm.layers
        examples, positions = calibration(run.task, self.calibration_seed)
        measure = answering(lm, run.task, examples, run.method.with_target)

        out.repair(ROWS)
        known = {_asked(row): row["scores"] for row in out.rows(ROWS)}
        places = dict[Asked, int]()

        # A search that was killed is repeated: it asks the same again, and what it scored is known.
        def answer(scales: Scales, numbers: list[int]) -> list[float]:
            key = scales, tuple(numbers)
            places.setdefault(key, len(places))
            if key not in known:
                known[key] = measure(scales, numbers)
                out.append(
                    ROWS,
                    [{"scales": scales, "examples": numbers, "scores": known[key]}],
                )
            return known[key]

        scores = Scores(self, np.array(positions), answer)
        evolution = Evolution(self, lm.layers)
        with run.progress("search: generations", self.generations + 1) as advance:
            scores.fill(unmodified)
            base = scores.bound(unmodified)
            while not evolution.done:
                scored = len(known)
                evolution.step(scores)
                best = evolution.history[-1]
                history = pd.DataFrame(evolution.history)
                write_csv(out.path / "generations.csv", history.assign(unmodified=base))
                scales = evolution.scales(evolution.population[0])
                front = f"generation {best['generation']}: fitness {best['best']:.4f} ({base:.4f} unmodified)"
                run.console.print(
                    f"{front}, scales {' '.join(f'{s:.2f}' for s in scales)}"
                )
                advance(1, before=scored == len(known))
        out.sort(ROWS, lambda row: places.get(_asked(row), len(places)))
        winner = evolution.population[0]
        scales = evolution.scales(evolution.population[0])
        write_csv(out.path / "search.csv", _table(scales, scores))
        write_csv(out.path / "curve.csv", self._curve(winner, scales))
        bred = (
            f"{len(evolution.history) - 1} generations, {len(scores.known)} candidates"
        )
        how = f"genetic search ({self.curve}, {bred}"
        self.write_scales(run, self._parameters(winner, scales), scales, scores, how)

    def _parameters(self, genome: Genome, scales: Scales) -> dict[str, Any]:
        """Fields of layer_scaling; a scale per layer where its curves do not hold the points."""
        if (
            self.curve == "free"
            or not self.constrained
            or self.low < 1
            or self.high > 2
        ):
            return {**NEUTRAL, "scales": list(scales)}
        points = [list(point) for point in self.control_points(genome)]
        return {"points": points, "curve": self.curve, "x": self.x, "scales": None}

    def _curve(self, genome: Genome, scales: Scales) -> pd.DataFrame:
        """What the figure draws: control points, the curve between them, and the scale of every layer."""
        rows: list[tuple[str, float, float]] = []
        if self.curve != "free":
            points = self.control_points(genome)
            rows += [("point", x, y) for x, y in points]
            if self.curve == "bezier":
                t = np.linspace(0, 1, SAMPLES)
                xs, ys = (
                    curves.bernstein(values, t).tolist()
                    for values in zip(*points, strict=True)
                )
            else:
                xs = np.linspace(points[0][0], points[-1][0], SAMPLES).tolist()
                ys = curves.layer_scales(self.curve, points, SAMPLES)
            rows += [("curve", x, y) for x, y in zip(xs, ys, strict=True)]
        rows += [("layer", float(layer), scale) for layer, scale in enumerate(scales)]
        return pd.DataFrame(rows, columns=["part", "x", "y"])

    def sections(self, read: Read) -> list[Section]:
        """Its best candidates, its generations and its curve."""
        table = read("search")
        generations = read("generations")
        curve = read("curve")
        if table is None:
            return []
        asked = int(table["scored"].sum())
        full = len(table) * int(table["scored"].max())
        text = f"The ten best of {len(table)} candidates, accuracy in %. {asked} of {full} answers were asked "
        text += "for: a candidate that can no longer become a parent is given up."
        columns = [column for column in table if column.startswith("scale_")]
        rows = []
        header = ["scales", "fitness", *POSITIONS, ""]
        for _, row in table[table["complete"]].head(10).iterrows():
            named = (
                "selected"
                if row["selected"]
                else "unmodified"
                if row["unmodified"]
                else ""
            )
            shares = [f"{100 * row[column]:.1f}" for column in header[1:5]]
            rows.append(
                [", ".join(f"{row[column]:.2f}" for column in columns), *shares, named]
            )
        drawn = {}
        if generations is not None:
            words = "Fitness of the best candidate and of the parents on average, generation by generation."
            drawn["convergence"] = (
                convergence(generations, table.loc[table["complete"], "scored"]),
                words,
            )
        if curve is not None:
            words = "Left: control points and curve. Middle: the scale of every layer. Right: accuracy on the "
            words += "calibration questions by the place of the answer, and their weighted mean, the fitness."
            drawn["curve"] = curve_figure(curve, table), words
        return [Section("Search", text, header, rows, drawn)]


@dataclass
class Evolution:
    """The search itself (Algorithm 1), generation by generation.

    The population is that of the generation scored last, best first. The history has, per generation from 0,
    fitness of the best, of the parents on average and of the worst parent, scores and candidates so far, and
    generations since the best one changed.
    """

    search: GeneticSearch
    layers: int
    population: list[Genome] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(f"posbench genetic {self.search.seed}")
        self._scales = dict[Genome, Scales]()

    @property
    def done(self) -> bool:
        """Whether every generation is scored, or ``patience`` ran out."""
        quiet = self.history[-1]["quiet"] if self.history else 0
        return len(self.history) > self.search.generations or quiet >= (
            self.search.patience or math.inf
        )

    @property
    def parents(self) -> list[Genome]:
        """The best of the generation scored last, best first."""
        return self.population[: self.search.parents]

    def scales(self, genome: Genome) -> Scales:
        """The scale of each layer; remembered, for curves are slow to read."""
        if genome not in self._scales:
            self._scales[genome] = self.search.decode(genome, self.layers)
        return self._scales[genome]

    def bred(self) -> list[list[Genome]]:
        """What comes next: the population, then offspring, in families of which the fittest joins."""
        search = self.search
        rng = self._rng
        if not self.history:
            first = search.first(self.layers)
            return [
                [first],
                *(
                    [search.mutate(first, rng, self.layers)]
                    for _ in range(search.population - 1)
                ),
            ]
        families = []
        for _ in range(search.crossovers):
            tries = (
                search.cross(self.parents, rng) for _ in range(search.crossover_tries)
            )
            families.append(next(filter(None, tries), []) or [self._mutant()])
        return families + [[self._mutant()] for _ in range(search.mutations)]

    def _mutant(self) -> Genome:
        return self.search.mutate(
            self._rng.choice(self.parents), self._rng, self.layers
        )

    def race(self, families: Sequence[Sequence[Genome]], scores: Scores) -> None:
        """Score candidates in turn; each stops where it falls behind the last place among the parents.

        The fitness of the last parent can only rise, in this generation and in later ones. So a candidate
        that cannot reach it is never a parent again, and whatever is skipped cannot change a parent or the
        result. Batches do not depend on racing.
        """
        rivals = [self.scales(genome) for genome in self.parents]
        ahead = [scores.bound(scales) for scales in rivals]
        scored = dict.fromkeys(rivals)
        plan = scores.plan([])
        known_difficulty = False
        for family in families:
            best: list[float] = []
            full = len(ahead) >= self.search.parents
            if full and not known_difficulty:
                plan = scores.plan(list(scored))
                known_difficulty = True
            last = (
                sorted(ahead, reverse=True)[self.search.parents - 1] if full else -1.0
            )
            for scales in map(self.scales, family):
                for examples in plan:
                    if self.search.racing and scores.bound(scales) < last:
                        break
                    scores.ask(scales, examples)
                else:
                    best.append(scores.bound(scales))
                    scored[scales] = None
            ahead += [max(best)] if best else []

    def step(self, scores: Scores) -> None:
        """Score a generation, and choose the fitter children, then the parents of the next one."""
        families = self.bred()
        self.race(families, scores)
        ranks = {
            g: scores.rank(self.scales(g))
            for family in [self.parents, *families]
            for g in family
        }
        offspring = [min(family, key=ranks.__getitem__) for family in families]
        # The sort is stable: of equals, the older one stays in front.
        self.population = sorted([*self.parents, *offspring], key=ranks.__getitem__)
        known = [-ranks[genome][0] for genome in self.parents]
        better = not self.history or known[0] > self.history[-1]["best"]
        row = {
            "generation": len(self.history),
            "best": known[0],
            "mean": sum(known) / len(known),
        }
        row |= {
            "worst": known[-1],
            "evaluations": scores.evaluations,
            "candidates": len(scores.known),
        }
        self.history.append(
            {**row, "quiet": 0 if better else self.history[-1]["quiet"] + 1}
        )


def _asked(row: Row) -> Asked:
    return tuple(row["scales"]), tuple(row["examples"])


def _table(best: Scales, scores: Scores) -> pd.DataFrame:
    """All candidates, best first; the accuracy of one that was given up is the highest it could have had."""
    rows = []
    for scales in sorted(scores.known, key=scores.rank):
        scored = int(np.isfinite(scores.known[scales]).sum())
        accuracies = dict(zip(POSITIONS, scores.accuracies(scales), strict=True))
        row = {"fitness": scores.bound(scales), **accuracies, "scored": scored}
        row |= {
            "complete": scored == len(scores.positions),
            "unmodified": all(s == 1 for s in scales),
        }
        named = {f"scale_{layer}": scale for layer, scale in enumerate(scales)}
        rows.append({**row, "selected": scales == best, **named})
    return pd.DataFrame(rows)
