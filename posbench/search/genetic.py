"""Which RoPE scale per layer: the genetic search of LPES over curves, on calibration questions asked at three
gold positions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pandas as pd
from annotated_types import Ge

from posbench.errors import UserError
from posbench.files.atomic import write_csv
from posbench.methods import curves
from posbench.plots.search import convergence, curve_figure
from posbench.plots.section import Section
from posbench.run.base import Run
from posbench.schema import Count, NonNegative, Positive, Several, Whole
from posbench.search.base import Read
from posbench.search.evolution import POSITIONS, Evolution, Genome, Scales, Scores, evolve
from posbench.search.scales import ScaleSearch, answering, calibration

ROWS, STATE = "search.jsonl", "search_state.json"
SAMPLES = 101
"""Points at which a curve is drawn."""


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

    results: ClassVar[Sequence[str]] = ("search.csv", "generations.csv", "curve.csv")

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
        if (
            not self.low <= self.start <= self.high
            or self.reach_y < self.step_y
            or self.high - self.low < self.step_y
        ):
            allowed = "low <= start <= high, with room for a step_y between, and reach_y of a step_y or more"
            hint = "the paper takes search.low=1 search.start=1.5 search.high=2"
            raise UserError("search.low", [self.low, self.start, self.high], allowed, hint)
        if self.parents > self.population:
            allowed = f"at most {self.population}, the population"
            raise UserError("search.parents", self.parents, allowed, f"set search.parents={self.population}")
        if not self.constrained and self.curve in ("linear", "step"):
            raise UserError(
                "search.constrained", False, f"true with curve={self.curve}", "set search.curve=bezier"
            )

    def check(self, run: Run) -> None:
        """Refuse more points than the grid has places, too."""
        super().check(run)
        places = self._places(run.lm.layers) + 1
        if self.curve != "free" and self.constrained and self.points > places:
            allowed = f"at most {places} ({run.lm.layers} layers in steps of {self.step_x:g})"
            hint = f"set search.step_x={self.step_x / 2:g}, or search.points={places}"
            raise UserError("search.points", self.points, allowed, hint)

    def decode(self, genome: Genome, layers: int) -> Scales:
        """The scale of each of the L layers."""
        if self.curve == "free":
            return tuple(self._y(value) for value in genome)
        return tuple(curves.layer_scales(self.curve, self.control_points(genome), layers, self.x))

    def control_points(self, genome: Genome) -> list[tuple[float, float]]:
        """The control points (x, y) of a genome with a curve."""
        pairs = zip(genome[::2], genome[1::2], strict=True)
        return [(round(x * self.step_x, 10), self._y(y)) for x, y in pairs]

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
        return self.curve == "free" or not self.constrained or all(a < b for a, b in pairwise(genome[::2]))

    def _places(self, layers: int) -> int:
        return int((layers - 1) / self.step_x + 1e-9)

    def _y(self, index: int) -> float:
        return round(self.low + index * self.step_y, 10)

    # The run

    def search(self, run: Run) -> None:
        """Write ``search.csv`` (candidates), ``generations.csv`` and ``curve.csv``; scores and state are kept
        as they come."""
        lm, out = run.lm, run.out
        examples, positions = calibration(run.task, self.calibration_seed)
        measure = answering(lm, run.task, examples, run.whole)

        def answer(scales: Scales, numbers: list[int]) -> list[float]:
            found = measure(scales, numbers)
            out.append(ROWS, [{"scales": scales, "examples": numbers, "scores": found}])
            return found

        scores = Scores(self, np.array(positions), answer)
        out.repair(ROWS)
        for row in out.rows(ROWS):
            scores.add(tuple(row["scales"]), row["examples"], row["scores"])
        scores.fill((1.0,) * lm.layers)
        evolution, saved = Evolution(self, lm.layers), out.read_json(STATE)
        if saved:
            evolution.restore(saved)
        base = scores.bound((1.0,) * lm.layers)
        with run.progress("search: generations", self.generations + 1) as advance:
            advance(evolution.generation)

            def after(evolution: Evolution) -> None:
                out.write_json(STATE, evolution.state())
                write_csv(
                    out.path / "generations.csv", pd.DataFrame(evolution.history).assign(unmodified=base)
                )
                best, scales = evolution.history[-1], evolution.scales(evolution.population[0])
                front = f"generation {best['generation']}: fitness {best['best']:.4f} ({base:.4f} unmodified)"
                run.console.print(f"{front}, scales {' '.join(f'{s:.2f}' for s in scales)}")
                advance(1)

            winner = evolve(evolution, scores, after)
        write_csv(out.path / "search.csv", _table(evolution, scores, winner))
        write_csv(out.path / "curve.csv", self._curve(winner, evolution.scales(winner)))
        bred = f"{len(evolution.history) - 1} generations, {len(scores.known)} candidates"
        parameters, scales = self._parameters(winner, evolution.scales(winner)), evolution.scales(winner)
        self.write_scales(run, parameters, scales, scores, f"genetic search ({self.curve}, {bred}")
        (out.path / STATE).unlink(missing_ok=True)

    def _parameters(self, genome: Genome, scales: Scales) -> dict[str, Any]:
        """Fields of layer_scaling; a scale per layer where the points are not those of a curve that the
        method takes."""
        if self.curve == "free" or not self.constrained or self.low < 1 or self.high > 2:
            return {"points": None, "curve": "bezier", "x": "stretched", "scales": list(scales)}
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
                xs, ys = (curves.bernstein(values, t).tolist() for values in zip(*points, strict=True))
            else:
                xs = np.linspace(points[0][0], points[-1][0], SAMPLES).tolist()
                ys = curves.layer_scales(self.curve, points, SAMPLES)
            rows += [("curve", x, y) for x, y in zip(xs, ys, strict=True)]
        rows += [("layer", float(layer), scale) for layer, scale in enumerate(scales)]
        return pd.DataFrame(rows, columns=["part", "x", "y"])

    # The report

    def sections(self, read: Read) -> list[Section]:
        """Its best candidates, its course and its curve."""
        table, generations, curve = read("search"), read("generations"), read("curve")
        if table is None:
            return []
        scales = [column for column in table if column.startswith("scale_")]
        full = len(table) * int(table["scored"].max())
        text = (
            f"The ten best of {len(table)} candidates, accuracy in %. {int(table['scored'].sum())} of {full} answers were "
            "asked for: a candidate that can no longer become a parent is given up."
        )
        header = ["scales", "fitness", *POSITIONS, ""]
        rows = [
            [
                ", ".join(f"{row[column]:.2f}" for column in scales),
                *(f"{100 * row[column]:.1f}" for column in header[1:5]),
                "selected" if row["selected"] else "unmodified" if row["unmodified"] else "",
            ]
            for _, row in table[table["complete"]].head(10).iterrows()
        ]
        drawn = {}
        if generations is not None:
            words = "Fitness of the best candidate and of the parents on average, generation by generation."
            drawn["convergence"] = convergence(generations), words
        if curve is not None:
            words = (
                "Left: control points and curve. Middle: the scale of every layer. Right: accuracy on the calibration "
                "questions by the place of the answer, and their weighted mean, the fitness."
            )
            drawn["curve"] = curve_figure(curve, table), words
        return [Section("Search", text, header, rows, drawn)]


def _table(evolution: Evolution, scores: Scores, winner: Genome) -> pd.DataFrame:
    """All candidates, best first; the accuracy of one that was given up is the highest that it could have
    had."""
    best, rows = evolution.scales(winner), []
    for scales in sorted(scores.known, key=scores.rank):
        scored = int(np.isfinite(scores.known[scales]).sum())
        rows.append(
            {
                "fitness": scores.bound(scales),
                **dict(zip(POSITIONS, scores.accuracies(scales), strict=True)),
                "scored": scored,
                "complete": scored == len(scores.positions),
                "unmodified": all(s == 1 for s in scales),
                "selected": scales == best,
                **{f"scale_{layer}": scale for layer, scale in enumerate(scales)},
            }
        )
    return pd.DataFrame(rows)
