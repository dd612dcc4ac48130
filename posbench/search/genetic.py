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
from posbench.plots.search import convergence_figure, curve_figure
from posbench.plots.section import Section
from posbench.run.base import Run
from posbench.run.cost import StudyWorkload
from posbench.schema import Count, NonNegative, Positive, Several, Whole
from posbench.search.base import SEARCH_ROWS_FILE, Read
from posbench.search.scales import (
    NO_SCALES,
    POSITIONS,
    Scales,
    ScaleSearch,
    Scores,
    calibration_questions,
    make_evaluator,
)

DRAWN_POINTS = 101  # points of a curve in its figure
BatchKey = tuple[Scales, tuple[int, ...]]
"""Key of a row of ``search.jsonl``: a candidate and a batch of example indices."""
Genome = tuple[int, ...]
"""Grid indices (x0, y0, x1, y1, ...) of the control points, or without a curve a y for each layer."""


@dataclass(frozen=True, kw_only=True)
class GeneticSearch(ScaleSearch):
    """The genetic search for one RoPE scale per layer.

    The defaults are Table 12 and Table 9 of LPES. Details that the paper leaves open are settled as follows.

    - Mutation draws every coordinate uniformly from the grid values that Eq. 9 allows, given the neighbours
      before the mutation, and draws again while x does not rise strictly or nothing changed.
    - Parents are the best of the population; those to mutate are drawn from them with replacement.
    - A crossover cuts the flat vector (x0, y0, x1, ...) at any index. After ``crossover_tries`` pairs without
      a valid child, a mutation takes its place.
    - Equal fitness: the higher lowest accuracy of the three positions wins, then the smaller sum of |s - 1|,
      then the older candidate.
    - The result is the best candidate ever scored.

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
        racing: Whether to stop scoring a candidate that can no longer become a parent; parents and result
            are the same without.
        patience: Generations without a better candidate after which the search stops; None runs all of them.

    Source: LPES, Section 3.2, Algorithm 1, Eq. 8-10, Tables 9 and 12.
    """

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
        y_can_change = min(self.reach_y, self.high - self.low) >= self.step_y
        if not self.low <= self.start <= self.high or not y_can_change:
            allowed = "low <= start <= high, with room for a step_y between, and reach_y of a step_y or more"
            hint = "set the paper's values: search.low=1 search.start=1.5 search.high=2"
            value = [self.low, self.start, self.high]
            raise UserError("search.low", value, allowed, hint)
        if self.parents > self.population:
            allowed = f"at most {self.population}, the population"
            hint = f"set search.parents={self.population}"
            raise UserError("search.parents", self.parents, allowed, hint)
        if not self.constrained and self.curve in ("linear", "step"):
            allowed = f"true with curve={self.curve}"
            hint = "set search.curve=bezier"
            raise UserError("search.constrained", False, allowed, hint)

    def fields_for_model(
        self, window: int, spells: bool, layers: int
    ) -> Mapping[str, Any]:
        """Return the settings that a model needs: at most one control point per grid value of x.

        That holds if x must rise strictly; else the result is empty. Arguments as of :meth:`Search.fields_for_model`.
        """
        # A free curve has no control points, and others may share an x.
        if self.curve == "free" or not self.constrained:
            return {}
        num_x_values = self._max_x(layers) + 1
        if self.points <= num_x_values:
            return {}
        return {"points": num_x_values}

    def workload(
        self, prompts: int, answer: int, layers: int, channels: int
    ) -> StudyWorkload:
        """Return the work of all candidates without racing, then of both methods of the check.

        Candidates are the unmodified model, the population, mutants, and both children of every crossover; each
        question is asked at three gold positions.

        Args:
            prompts: Number of calibration questions.
            answer: Tokens of an answer.
            layers: Number of layers.
            channels: Number of channels.
        """
        offspring = self.mutations + 2 * self.crossovers
        candidates = 1 + self.population + self.generations * offspring
        search_prompts = len(POSITIONS) * prompts
        check_prompts = len(POSITIONS) * (self.held_back or prompts)
        total = candidates * search_prompts + 2 * check_prompts
        search_batches = math.ceil(search_prompts / self.batch_size)
        check_batches = math.ceil(check_prompts / self.batch_size)
        batches = candidates * search_batches + 2 * check_batches
        return StudyWorkload(total, replies=total, batches=batches)

    def decode(self, genome: Genome, layers: int) -> Scales:
        """The scale of each of the L layers."""
        if self.curve == "free":
            return tuple(self._scale(y) for y in genome)
        points = self.control_points(genome)
        return tuple(curves.layer_scales(self.curve, points, layers, self.x))

    def control_points(self, genome: Genome) -> list[tuple[float, float]]:
        """The control points (x in layers, y a scale) of a genome with a curve."""
        pairs = zip(genome[::2], genome[1::2], strict=True)
        return [(round(x * self.step_x, 10), self._scale(y)) for x, y in pairs]

    def first(self, layers: int) -> Genome:
        """Return the initial genome: points spread evenly over the layers (Eq. 8, rounded to the grid), at ``start``.

        A genome holds grid indices: x and y of each control point in turn, or one y per layer with ``curve=free``.
        """
        y = round((self.start - self.low) / self.step_y)
        if self.curve == "free":
            return (y,) * layers
        genome: list[int] = []
        for point in range(self.points):
            x = round(point * self._max_x(layers) / max(self.points - 1, 1))
            genome += [x, y]
        return tuple(genome)

    def mutate(self, genome: Genome, rng: random.Random, layers: int) -> Genome:
        """Another valid genome within reach (Eq. 9-10)."""
        ranges = self._mutation_ranges(genome, layers)
        while True:
            mutant = tuple(rng.randint(lowest, highest) for lowest, highest in ranges)
            if mutant != genome and self.valid(mutant):
                return mutant

    def _mutation_ranges(self, genome: Genome, layers: int) -> list[tuple[int, int]]:
        """Return the lowest and highest grid index to which Eq. 9 lets each coordinate of a genome mutate.

        Args:
            genome: Grid indices: x and y of each control point in turn, or the y of each layer for a free curve.
            layers: Layers of the model.
        """
        reach_x = _grid_steps(self.reach_x, self.step_x)
        reach_y = _grid_steps(self.reach_y, self.step_y)
        ranges = []
        for index, value in enumerate(genome):
            lowest = 0
            # A y; the others are x, which stay between those of their neighbours.
            if self.curve == "free" or index % 2 == 1:
                highest = _grid_steps(self.high - self.low, self.step_y)
                reach = reach_y
            else:
                highest = self._max_x(layers)
                reach = reach_x
                if self.constrained and index > 0:
                    lowest = genome[index - 2]
                if self.constrained and index + 2 < len(genome):
                    highest = genome[index + 2]
            ranges.append((max(lowest, value - reach), min(highest, value + reach)))
        return ranges

    def cross(self, parents: Sequence[Genome], rng: random.Random) -> list[Genome]:
        """Cut two random parents at one index and swap their tails; the valid children, at most two."""
        a, b = rng.sample(list(parents), 2)
        cut = rng.randrange(1, max(len(a), 2))
        children = [a[:cut] + b[cut:], b[:cut] + a[cut:]]
        return [child for child in children if self.valid(child)]

    def valid(self, genome: Genome) -> bool:
        """Whether x rises strictly along the points, where that is required."""
        if self.curve == "free" or not self.constrained:
            return True
        return all(left < right for left, right in pairwise(genome[::2]))

    def _max_x(self, layers: int) -> int:
        """Grid index of the last layer."""
        return _grid_steps(layers - 1, self.step_x)

    def _scale(self, y: int) -> float:
        return round(self.low + y * self.step_y, 10)

    def search(self, run: Run) -> None:
        """Evolve scales, and write candidates, generations, the curve and the result.

        The files are ``search.csv``, ``generations.csv``, ``curve.csv`` and ``found.yaml``.
        """
        folder = run.out
        unmodified = (1.0,) * run.lm.layers
        examples, positions = calibration_questions(run.task, self.calibration_seed)
        examples = run.as_asked(examples)
        evaluate = make_evaluator(run.lm, run.task, examples, run.method.with_target)

        folder.repair(SEARCH_ROWS_FILE)
        recorded = {
            _batch_key(row): row["scores"] for row in folder.rows(SEARCH_ROWS_FILE)
        }
        row_order: dict[BatchKey, int] = {}

        # A killed search starts again and scores the same batches; those that are recorded cost nothing.
        def evaluate_once(scales: Scales, indices: list[int]) -> list[float]:
            key = scales, tuple(indices)
            row_order.setdefault(key, len(row_order))
            if key not in recorded:
                scores = evaluate(scales, indices)
                recorded[key] = scores
                row = {"scales": scales, "examples": indices, "scores": scores}
                folder.append(SEARCH_ROWS_FILE, [row])
            return recorded[key]

        scores = Scores(self, np.array(positions), evaluate_once)
        evolution = Evolution(self, run.lm.layers)
        with run.progress("search: generations", self.generations + 1) as advance:
            scores.score_all(unmodified)
            fitness_unmodified = scores.fitness_bound(unmodified)
            while not evolution.done:
                num_recorded = len(recorded)
                evolution.step(scores)
                history = pd.DataFrame(evolution.history)
                history["unmodified"] = fitness_unmodified
                write_csv(folder.path / "generations.csv", history)
                run.console.print(_generation_line(evolution, fitness_unmodified))
                advance(1, before=num_recorded == len(recorded))
        folder.sort(
            SEARCH_ROWS_FILE, lambda row: row_order.get(_batch_key(row), len(row_order))
        )

        best = evolution.population[0]
        scales = evolution.scales(best)
        write_csv(folder.path / "search.csv", _candidate_table(scales, scores))
        write_csv(folder.path / "curve.csv", self._curve_table(best, scales))
        generations = f"{len(evolution.history) - 1} generations"
        candidates = f"{len(scores.values)} candidates"
        description = f"genetic search ({self.curve}, {generations}, {candidates}"
        parameters = self._parameters(best, scales)
        self.write_scales(run, parameters, scales, scores, description)

    def _parameters(self, genome: Genome, scales: Scales) -> dict[str, Any]:
        """Fields of layer_scaling: the points, or a scale per layer where its curves refuse the points."""
        outside_curves = not self.constrained or self.low < 1 or self.high > 2
        if self.curve == "free" or outside_curves:
            return {**NO_SCALES, "scales": list(scales)}
        points = [list(point) for point in self.control_points(genome)]
        return {"points": points, "curve": self.curve, "x": self.x, "scales": None}

    def _curve_table(self, genome: Genome, scales: Scales) -> pd.DataFrame:
        """Return the data of the curve's figure: control points, the curve between them, and every layer's scale.

        Args:
            genome: The genome.
            scales: Its scale of each layer.

        Returns:
            Rows of part (``point``, ``curve`` or ``layer``), x (a layer, or between two) and y (its scale).
        """
        rows: list[tuple[str, float, float]] = []
        if self.curve != "free":
            points = self.control_points(genome)
            rows += [("point", x, y) for x, y in points]
            rows += [("curve", x, y) for x, y in self._sampled_curve(points)]
        rows += [("layer", float(layer), scale) for layer, scale in enumerate(scales)]
        return pd.DataFrame(rows, columns=["part", "x", "y"])

    def _sampled_curve(
        self, points: list[tuple[float, float]]
    ) -> list[tuple[float, float]]:
        """Return points (x, y) along the curve through control points, for its figure."""
        point_xs = [x for x, _ in points]
        point_ys = [y for _, y in points]
        if self.curve == "bezier":
            t = np.linspace(0, 1, DRAWN_POINTS)
            xs = curves.bezier_coordinate(point_xs, t).tolist()
            ys = curves.bezier_coordinate(point_ys, t).tolist()
        else:
            xs = np.linspace(point_xs[0], point_xs[-1], DRAWN_POINTS).tolist()
            ys = curves.layer_scales(self.curve, points, DRAWN_POINTS)
        return list(zip(xs, ys, strict=True))

    def sections(self, read: Read) -> list[Section]:
        """Return the report's section on the search: the best candidates, the generations and the curve.

        Args:
            read: Returns a table of the run by name, None if there is none.
        """
        table = read("search")
        generations = read("generations")
        curve = read("curve")
        if table is None:
            return []
        scored = int(table["scored"].sum())
        unraced = len(table) * int(table["scored"].max())
        text = f"The ten best of {len(table)} candidates, accuracy in %. {scored} of {unraced} answers were asked "
        text += "for: a candidate that can no longer become a parent is given up."
        scale_columns = [name for name in table if name.startswith("scale_")]
        accuracy_columns = ["fitness", *POSITIONS]
        rows = []
        for _, row in table[table["complete"]].head(10).iterrows():
            scales = ", ".join(f"{row[column]:.2f}" for column in scale_columns)
            percents = [f"{100 * row[column]:.1f}" for column in accuracy_columns]
            rows.append([scales, *percents, _remark(row)])
        figures = {}
        if generations is not None:
            caption = "Fitness of the best candidate and of the parents on average, generation by generation."
            prompts = table.loc[table["complete"], "scored"]
            figures["convergence"] = convergence_figure(generations, prompts), caption
        if curve is not None:
            caption = "Left: control points and curve. Middle: the scale of every layer. Right: accuracy on the "
            caption += "calibration questions by the place of the answer, and their weighted mean, the fitness."
            figures["curve"] = curve_figure(curve, table), caption
        header = ["scales", *accuracy_columns, ""]
        return [Section("Search", text, header, rows, figures)]


@dataclass
class Evolution:
    """The genetic search itself (Algorithm 1), generation by generation.

    Attributes:
        search: The settings.
        layers: Layers of the model.
        population: Genomes of the generation scored last, best first.
        history: Per generation from 0: fitness of the best, of the parents on average and of the worst
            parent, scores and candidates so far, and generations since the best one changed (``quiet``).
    """

    search: GeneticSearch
    layers: int
    population: list[Genome] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(f"posbench genetic {self.search.seed}")
        self._scales: dict[Genome, Scales] = {}

    @property
    def done(self) -> bool:
        """Whether every generation is scored, or ``patience`` ran out."""
        if not self.history:
            return False
        if len(self.history) > self.search.generations:
            return True
        patience = self.search.patience
        return patience is not None and self.history[-1]["quiet"] >= patience

    @property
    def parents(self) -> list[Genome]:
        """The best of the generation scored last, best first."""
        return self.population[: self.search.parents]

    def scales(self, genome: Genome) -> Scales:
        """The scale of each layer; cached, for reading scales off a curve is slow."""
        if genome not in self._scales:
            self._scales[genome] = self.search.decode(genome, self.layers)
        return self._scales[genome]

    def breed(self) -> list[list[Genome]]:
        """Return groups of candidates; the fittest of each group joins the next population.

        The first generation has one group each for the initial genome and its mutants. Later ones have one group for
        each crossover, its children, then one for each mutant.
        """
        search = self.search
        if not self.history:
            first = search.first(self.layers)
            families = [[first]]
            for _ in range(search.population - 1):
                families.append([search.mutate(first, self._rng, self.layers)])
            return families
        families = [self._cross() for _ in range(search.crossovers)]
        families += [[self._mutant()] for _ in range(search.mutations)]
        return families

    def _cross(self) -> list[Genome]:
        """The valid children of two parents; a mutant where no pair that was tried has any."""
        for _ in range(self.search.crossover_tries):
            children = self.search.cross(self.parents, self._rng)
            if children:
                return children
        return [self._mutant()]

    def _mutant(self) -> Genome:
        parent = self._rng.choice(self.parents)
        return self.search.mutate(parent, self._rng, self.layers)

    def race(self, families: Sequence[Sequence[Genome]], scores: Scores) -> None:
        """Score candidates in turn; each stops where it falls behind the last place among the parents.

        The fitness of the last parent can only rise, in this generation and in later ones. So a candidate
        that cannot reach it is never a parent again, and whatever is skipped cannot change a parent or the
        result. Batches do not depend on racing.

        Args:
            families: Groups of genomes, from :meth:`breed`.
            scores: Scores so far; gets those of the candidates.
        """
        num_parents = self.search.parents
        fully_scored = [self.scales(genome) for genome in self.parents]
        fitnesses = [scores.fitness_bound(scales) for scales in fully_scored]
        question_batches = scores.plan_batches([])
        hardest_first = False
        for family in families:
            cutoff = -1.0
            if len(fitnesses) >= num_parents:
                cutoff = sorted(fitnesses, reverse=True)[num_parents - 1]
                # Once there are enough candidates: questions that they fail come first.
                if not hardest_first:
                    distinct = list(dict.fromkeys(fully_scored))
                    question_batches = scores.plan_batches(distinct)
                    hardest_first = True
            family_fitnesses = []
            for genome in family:
                scales = self.scales(genome)
                if self._finishes(scales, question_batches, cutoff, scores):
                    family_fitnesses.append(scores.fitness_bound(scales))
                    fully_scored.append(scales)
            if family_fitnesses:
                fitnesses.append(max(family_fitnesses))

    def _finishes(
        self, scales: Scales, batches: list[list[int]], cutoff: float, scores: Scores
    ) -> bool:
        """Score a candidate batch by batch; return False if it was given up, as its fitness cannot reach the cutoff.

        Args:
            scales: The candidate's scale of each layer.
            batches: Batches of question indices.
            cutoff: Fitness of the last parent.
            scores: Scores so far; gets the candidate's.
        """
        for batch in batches:
            if self.search.racing and scores.fitness_bound(scales) < cutoff:
                return False
            scores.score(scales, batch)
        return True

    def step(self, scores: Scores) -> None:
        """Score a generation, and choose the fitter children, then the parents of the next one.

        Args:
            scores: Scores so far; gets those of the generation.
        """
        families = self.breed()
        self.race(families, scores)

        def rank_key(genome: Genome) -> tuple[float, float, float]:
            return scores.rank_key(self.scales(genome))

        offspring = [min(family, key=rank_key) for family in families]
        # The sort is stable: of equals, the older one stays in front.
        self.population = sorted([*self.parents, *offspring], key=rank_key)
        fitnesses = [scores.fitness_bound(self.scales(g)) for g in self.parents]
        quiet = 0
        if self.history and fitnesses[0] <= self.history[-1]["best"]:
            quiet = self.history[-1]["quiet"] + 1
        row = {
            "generation": len(self.history),
            "best": fitnesses[0],
            "mean": sum(fitnesses) / len(fitnesses),
            "worst": fitnesses[-1],
            "evaluations": scores.evaluations,
            "candidates": len(scores.values),
            "quiet": quiet,
        }
        self.history.append(row)


def _grid_steps(length: float, step: float) -> int:
    """Whole steps in a length; the tolerance makes up for rounding of the quotient."""
    return int(length / step + 1e-9)


def _batch_key(row: Row) -> BatchKey:
    return tuple(row["scales"]), tuple(row["examples"])


def _generation_line(evolution: Evolution, fitness_unmodified: float) -> str:
    """Fitness and scales of the best candidate so far, for the console."""
    best = evolution.history[-1]
    front = f"generation {best['generation']}: fitness {best['best']:.4f} ({fitness_unmodified:.4f} unmodified)"
    scales = evolution.scales(evolution.population[0])
    return f"{front}, scales {' '.join(f'{scale:.2f}' for scale in scales)}"


def _remark(row: pd.Series) -> str:
    """Return the remark on a candidate in the report's table."""
    if row["selected"]:
        return "selected"
    if row["unmodified"]:
        return "unmodified"
    return ""


def _candidate_table(best: Scales, scores: Scores) -> pd.DataFrame:
    """Return the table of all candidates, best first.

    One that was given up has the highest accuracy it could still have had.

    Args:
        best: The result's scales.
        scores: Scores of all candidates.

    Returns:
        A row for each, with columns fitness, the accuracy at each gold position, scored (number of prompts), complete,
        unmodified, selected, and scale_0, scale_1, ... of the layers.
    """
    rows = []
    for scales in sorted(scores.values, key=scores.rank_key):
        scored = int(np.isfinite(scores.values[scales]).sum())
        row: Row = {"fitness": scores.fitness_bound(scales)}
        row.update(zip(POSITIONS, scores.accuracy_bounds(scales), strict=True))
        row["scored"] = scored
        row["complete"] = scored == len(scores.positions)
        row["unmodified"] = all(scale == 1 for scale in scales)
        row["selected"] = scales == best
        for layer, scale in enumerate(scales):
            row[f"scale_{layer}"] = scale
        rows.append(row)
    return pd.DataFrame(rows)
