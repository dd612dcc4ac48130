"""The ablations of LPES on an embedded model: kind of curve, control points, search sets, weights, and what
racing saves.

``make lpes``, or ``python -m posbench.studies.lpes.lpes --help``. Tables 6, 7, 8, 15 and 16 of the paper in
small: the same search, on a model of four layers, so that only the order of the rows can be compared, not
their values.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers.utils.logging import disable_progress_bar

import posbench
from posbench import paths
from posbench.files.atomic import write_csv, write_text
from posbench.files.hardware import hardware
from posbench.files.markdown import markdown
from posbench.model.lm import LM
from posbench.plots import base as plots
from posbench.plots import search as curve_plots
from posbench.search import GeneticSearch
from posbench.search.curve_run import answering, calibration
from posbench.search.genetic import Evolution, Scales, Scores, evolve
from posbench.studies.cost.precision import task_of
from posbench.tasks import Task

SUBSETS = 5
"""Search sets of Table 8."""
FINE = tuple(f"{share}%" for share in range(0, 101, 10))
"""Gold positions of Table 16."""


@dataclass
class Bench:
    """An embedded model with a memory of all candidates, which the searches share: they ask the same
    questions.

    Attributes:
        lm: The model.
        task: Its task; the evaluation examples are never searched on.
        search: Settings that all searches share.
    """

    lm: LM
    task: Task
    search: GeneticSearch

    def __post_init__(self) -> None:
        self._known: dict[int, dict[Scales, Any]] = {}
        self._shares: dict[Scales, list[float]] = {}

    def run(self, subset: int = 0, **options: Any) -> tuple[Evolution, Scales, int]:
        """Search; the course of it, its scales, and how many new scores it took.

        Args:
            subset: Number of the search set.
            **options: Fields of the search.
        """
        search = replace(self.search, **options)
        examples, positions = calibration(replace(self.task, seed=subset))  # type: ignore[call-arg]
        scores = Scores(search, np.array(positions), answering(self.lm, self.task, examples))
        scores.known = self._known.setdefault(subset, {})
        before = scores.evaluations
        evolution = Evolution(search, self.lm.layers)
        winner = evolution.scales(evolve(evolution, scores))
        return evolution, winner, scores.evaluations - before

    def shares(self, scales: Scales, positions: Sequence[int | str] | None = None) -> list[float]:
        """Accuracy per gold position of the held-out examples."""
        task = self.task if positions is None else replace(self.task, positions=tuple(positions))  # type: ignore[call-arg]
        key = (*scales, *task.positions)  # type: ignore[attr-defined]
        if key not in self._shares:
            examples = task.evaluation()
            right = answering(self.lm, task, examples)(scales, list(range(len(examples))))
            frame = pd.DataFrame({"position": [e.gold_position for e in examples], "right": right})
            self._shares[key] = frame.groupby("position")["right"].mean().tolist()
        return self._shares[key]


def row(bench: Bench, name: str, found: Sequence[tuple[Evolution, Scales, int]], paper: str) -> list[str]:
    """Accuracy over all positions (mean and range of the searches), its spread over positions, and
    generations needed."""
    shares = [bench.shares(scales) for _, scales, _ in found]
    means = [100 * float(np.mean(s)) for s in shares]
    spread = 100 * float(np.mean([np.std(s) for s in shares]))
    reached = [
        next(r["generation"] for r in e.history if r["best"] == e.history[-1]["best"]) for e, _, _ in found
    ]
    span = f" ({min(means):.1f} to {max(means):.1f})" if len(means) > 1 else ""
    fitness = np.mean([e.history[-1]["best"] for e, _, _ in found])
    return [
        name,
        f"{np.mean(means):.1f}{span}",
        f"{spread:.1f}",
        f"{100 * fitness:.1f}",
        f"{np.mean(reached):.1f}",
        paper,
    ]


def paper(table: str, position: str = "Average") -> Mapping[str, str]:
    """A table's averages by the name of their row, as printed."""
    rows = pd.read_csv(
        paths.EXPERIMENTS / "reference" / f"lpes_{table}.csv", dtype=str, keep_default_na=False
    )
    mean = rows[(rows["position"] == position) & rows["metric"].str.startswith("accuracy(%)")]
    return dict(zip(mean["method"], mean["value"], strict=True))


def measure(bench: Bench, seeds: int) -> tuple[str, pd.DataFrame]:
    """All tables as Markdown, and the course of every search of Table 7."""
    ours = (
        "setting",
        "accuracy (%)",
        "std over positions",
        "fitness (%)",
        "best found in generation",
        "paper: accuracy (%)",
    )
    layers = bench.lm.layers
    unmodified = bench.shares((1.0,) * layers)

    def base(printed: Mapping[str, str]) -> list[str]:
        return [
            "unmodified",
            f"{100 * np.mean(unmodified):.1f}",
            f"{100 * np.std(unmodified):.1f}",
            "",
            "",
            printed["Baseline"],
        ]

    def several(**options: Any) -> list[tuple[Evolution, Scales, int]]:
        return [bench.run(**options, seed=seed) for seed in range(seeds)]

    # The first search has an empty memory: what it takes is what any search takes.
    taken = bench.run()[2]
    search, asked = bench.search, 3 * bench.task.calibration_examples  # type: ignore[attr-defined]
    whole = (search.population + search.generations * (search.mutations + 2 * search.crossovers)) * asked
    cubic = several()
    printed, curves = (
        paper("table6_curve_types"),
        {"linear": several(curve="linear"), "step": several(curve="step")},
    )
    table6 = [
        base(printed),
        row(bench, "step", curves["step"], printed["LPES (Step function)"]),
        row(bench, "linear", curves["linear"], printed["LPES (Linear interpolation)"]),
        row(bench, "Bezier", cubic, printed["LPES (Bézier curve)"]),
    ]
    printed, table7, courses = paper("table7_control_points", ""), [], []
    table7.append(base(printed))
    variants: dict[str, dict[str, Any]] = {
        "1": {"points": 1},
        "2": {"points": 2},
        "3": {"points": 3},
        "4": {},
        "5": {"points": 5},
    }
    for name, options in {
        "no curve": {"curve": "free"},
        **variants,
        "4, x in any order": {"constrained": False},
    }.items():
        found = several(**options)
        table7.append(row(bench, name, found, printed.get({"no curve": "Brute-Force"}.get(name, name), "")))
        courses += [pd.DataFrame(e.history).assign(search=name, seed=n) for n, (e, _, _) in enumerate(found)]
    printed = paper("table8_runs")
    runs = [bench.run(subset=n) for n in range(SUBSETS)]
    table8 = [base(printed)] + [
        row(bench, f"search set {n + 1}", [found], printed[f"LPES (run {n + 1})"])
        for n, found in enumerate(runs)
    ]
    printed = paper("table15_lambda")
    table15 = [base(printed)]
    for weights in ((0.333, 0.333, 0.333), (0.1, 0.3, 0.6), (0.2, 0.3, 0.5)):
        label = ", ".join(f"{w:g}" for w in weights)
        table15.append(row(bench, label, several(weights=weights), printed.get(f"<{label}>", "")))
    rows16 = {
        "unmodified": [(1.0,) * layers],
        "linear": [s for _, s, _ in curves["linear"]],
        "Bezier": [s for _, s, _ in cubic],
    }
    table16 = [
        [name, *(f"{100 * share:.1f}" for share in np.mean([bench.shares(s, FINE) for s in scales], axis=0))]
        for name, scales in rows16.items()
    ]
    # Chosen by the calibration fitness: the held-out examples choose nothing.
    best = max(cubic, key=lambda found: float(found[0].history[-1]["best"]))[1]
    mean = float(np.mean(best))
    compared = {
        "unmodified": unmodified,
        "LPES": bench.shares(best),
        f"{mean:.3f} in all layers": bench.shares((mean,) * layers),
    }
    table1 = [
        [name, f"{100 * np.mean(s):.1f}", *(f"{100 * v:.0f}" for v in s)] for name, s in compared.items()
    ]
    places = [f"index {p}" for p in bench.task.gold_positions]  # type: ignore[attr-defined]
    text = f"""## Against one scale for all layers (Table 1)

{markdown(("method", "accuracy (%)", *places), table1)}

Scales of the search with the highest fitness: {", ".join(f"{s:.3f}" for s in best)}; mean {mean:.3f}.

## Kind of curve (Table 6)

{markdown(ours, table6)}

## Control points (Table 7)

{markdown(ours, table7)}

"No curve": one grid value per layer. That is {layers} numbers here, as few as a curve's, and 32 in the paper's models. The order
that the paper reports is tested on a synthetic fitness over 32 layers (`tests/unit/test_genetic.py`).

## Search sets (Table 8)

{markdown(ours, table8)}

Means {", ".join(f"{100 * np.mean(bench.shares(s)):.1f}" for _, s, _ in runs)}: sample variance
{np.var([100 * np.mean(bench.shares(s)) for _, s, _ in runs], ddof=1):.2f} (paper: 0.027).

## Weights of beginning, middle and end (Table 15)

{markdown(ours, table15)}

## Curves at every tenth of the prompt (Table 16; the paper: Vicuna-13B)

{markdown(("curve", *FINE), table16)}

## What memory and racing save

The first search, with nothing in memory, took {taken} scores. A program that scores every member of the first population, every
mutation and both children of every crossover takes {whole}: {100 * taken / whole:.0f} % remain, and the result is the same.
"""
    return text, pd.concat(courses, ignore_index=True).assign(unmodified=np.nan)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write page, figure and table where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument(
        "--questions", type=int, default=60, help="calibration questions, each asked at three positions"
    )
    parser.add_argument("--seeds", type=int, default=3, help="searches per setting")
    parser.add_argument("--generations", type=int, default=20)
    parser.add_argument("--out", type=Path, help="folder for lpes.md, convergence.png and generations.csv")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    disable_progress_bar()
    task = replace(task_of(options.model), calibration_examples=options.questions)  # type: ignore[call-arg]
    bench = Bench(
        posbench.load(options.model), task, GeneticSearch(step_x=0.5, generations=options.generations)
    )
    tables, courses = measure(bench, options.seeds)
    text = f"""# LPES in small

Model {options.model}, key-value retrieval; {options.questions} calibration questions at beginning, middle and end;
{len(task.evaluation())} held-out prompts; {options.seeds} searches per setting, their mean and range; x in steps of half a layer.
{hardware()}; posbench {posbench.__version__}. The paper's column is Vicuna-7B on ten documents: another model, another task.

{tables}"""
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        write_text(options.out / "lpes.md", text)
        write_csv(options.out / "generations.csv", courses)
        plots.save(curve_plots.convergence(courses), options.out / "convergence")


if __name__ == "__main__":
    main()
