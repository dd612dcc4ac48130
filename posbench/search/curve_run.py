"""Find one RoPE scale per layer by the genetic search of LPES, on calibration questions asked at three gold
positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml

import posbench
from posbench.errors import UserError
from posbench.files.atomic import digest, write_csv, write_text
from posbench.methods import Method, curves
from posbench.methods.composed import Composed
from posbench.methods.layer_scaling import LayerScaling
from posbench.model.lm import LM
from posbench.pipeline.config import Config
from posbench.run.base import Run, encode, search_once
from posbench.search.genetic import POSITIONS, Evolution, GeneticSearch, Genome, Scales, Scores, evolve
from posbench.tasks import Example, Task

ROWS = "search.jsonl"
STATE = "search_state.json"
RESULTS = ("search.csv", "generations.csv", "curve.csv", "found.yaml")
SAMPLES = 101
"""Points at which a curve is drawn."""


def run(run: Run) -> None:
    """Search, write ``search.csv``, ``generations.csv``, ``curve.csv`` and ``found.yaml``, and hand the
    result on."""
    search_once(run, key_of(run), RESULTS, lambda: _search(run))
    hand_over(run)


def key_of(run: Run) -> str:
    """What the result of a search for scales depends on."""
    return digest(
        {
            "identity": run.identity,
            "search": run.config.raw["search"],
            "task": run.config.raw["task"],
            **others(run),
        }
    )


def others(run: Run) -> dict[str, Any]:
    """In a list of methods, the other parts, in the order in which they stand around the one that is
    searched."""
    parts = run.config.raw["method"]["parts"] if run.config.part else {}
    return (
        {"parts": [[name, None if name == run.config.part else part] for name, part in parts.items()]}
        if parts
        else {}
    )


def within(config: Config) -> Callable[[Method], Method]:
    """The function from the method that the search serves to the whole list of methods, where it is a part of
    one."""
    part, whole = config.part, config.trial()
    if part is None or not isinstance(whole, Composed):
        return lambda method: method
    return lambda method: replace(whole, parts=whole.parts | {part: method})


def hand_over(run: Run) -> None:
    """Give what was found to the later stages, and say it."""
    block = yaml.safe_load((run.out.path / "found.yaml").read_text())["layer_scaling"]
    run.found = {name: block[name] for name in run.config.search.finds}
    remark = (
        "" if block["fitness"] > block["fitness_unmodified"] else "; not better than the unmodified model"
    )
    run.console.print(
        f"search chose scales {block['lowest']:.3g} to {block['highest']:.3g}: fitness {block['fitness']:.4f}, "
        f"unmodified {block['fitness_unmodified']:.4f}{remark}"
    )
    if "evaluate" not in run.config.stages:
        run.console.print(
            "paste into the model's YAML:\n\n" + (run.out.path / "found.yaml").read_text(), soft_wrap=True
        )


def check(config: Config, lm: LM) -> None:
    """Refuse points, typed parameters and tasks that do not fit, before anything runs.

    Raises:
        UserError: See above.
    """
    check_task(config)
    assert isinstance(config.search, GeneticSearch)
    config.search.check(lm.layers)


def check_task(config: Config) -> None:
    """Refuse what no search for scales can use: typed scales, or a task whose gold answers have no places.

    Raises:
        UserError: See above.
    """
    typed = sorted(set(config.typed) & set(config.search.finds))
    if typed:
        raise UserError(
            f"method.parts.{config.part}.{typed[0]}" if config.part else f"method.{typed[0]}",
            config.typed[typed[0]],
            "nothing typed, with the search stage: it finds this (search.curve and search.x choose the kind)",
            "leave the search out: stages=[evaluate,report]",
        )
    calibration(config.task)


def calibration(task: Task) -> tuple[list[Example], list[int]]:
    """Every calibration question three times, with the answer at the beginning, in the middle and at the end.

    Args:
        task: A task with gold positions. Three ``calibration_positions`` replace the first, the middle (n //
            2) and the last.

    Returns:
        The examples, and for each 0, 1 or 2.

    Raises:
        UserError: The task has no such positions.
    """
    count, given = task.calibration_items, getattr(task, "calibration_positions", None)
    if count is None or getattr(task, "calibration_path", None):
        raise UserError(
            "task",
            task.name,
            "a task that puts the answers of calibration questions anywhere: kv_retrieval, nq_multidoc",
            "search there, then set the method's parameters here and stages=[evaluate,report]",
        )
    places = given or (0, count // 2, count - 1)
    if len(places) != len(POSITIONS):
        raise UserError(
            "task.calibration_positions",
            list(places),
            "null, or the beginning, the middle and the end: three of them",
            'set task.calibration_positions=["0%","50%","100%"]',
        )
    examples, positions = list[Example](), list[int]()
    for number, place in enumerate(places):
        asked = replace(task, calibration_positions=(place,)).examples("calibration")  # type: ignore[call-arg]
        examples += [replace(example, id=f"{POSITIONS[number]}-{example.id}") for example in asked]
        positions += [number] * len(asked)
    return examples, positions


def answering(
    lm: LM, task: Task, examples: Sequence[Example], whole: Callable[[Method], Method] = lambda method: method
) -> Callable[[Scales, list[int]], list[float]]:
    """The function that scores scales on some of the examples, by the task's own metric.

    Args:
        lm: The model.
        task: Its task.
        examples: What is asked.
        whole: Puts other methods around the scales or inside them.
    """
    encoded = [encode(lm, task, example) for example in examples]

    def answer(scales: Scales, numbers: list[int]) -> list[float]:
        try:
            with whole(LayerScaling(scales=scales)).applied(lm):
                texts = lm.generate(
                    [encoded[i].ids for i in numbers],
                    max_new_tokens=task.max_new_tokens,
                    repetition_penalty=task.repetition_penalty,
                    batch_size=len(numbers),
                )
        except torch.OutOfMemoryError:
            if len(numbers) == 1:
                raise
            texts = []
        if not texts:
            # Only behind the handler are the tensors of the failed forward free.
            torch.cuda.empty_cache()
            half = len(numbers) // 2
            return answer(scales, numbers[:half]) + answer(scales, numbers[half:])
        return [task.score(examples[i], text)[task.metric] for i, text in zip(numbers, texts, strict=True)]

    return answer


def _search(run: Run) -> None:
    search, lm, task = run.config.search, run.lm, run.config.task
    assert isinstance(search, GeneticSearch)
    examples, positions = calibration(task)
    measure = answering(lm, task, examples, within(run.config))

    def answer(scales: Scales, numbers: list[int]) -> list[float]:
        found = measure(scales, numbers)
        run.out.append(ROWS, [{"scales": scales, "examples": numbers, "scores": found}])
        return found

    scores = Scores(search, np.array(positions), answer)
    run.out.mend(ROWS)
    for row in run.out.rows(ROWS):
        scores.add(tuple(row["scales"]), row["examples"], row["scores"])
    unmodified = (1.0,) * lm.layers
    everything = range(len(examples))
    for start in range(0, len(examples), search.batch_size):
        batch = list(everything[start : start + search.batch_size])
        if unmodified not in scores.known or np.isnan(scores.known[unmodified][batch]).any():
            scores.add(unmodified, batch, answer(unmodified, batch))
    evolution = Evolution(search, lm.layers)
    saved = run.out.read_json(STATE)
    if saved:
        evolution.restore(saved)
    base = scores.bound(unmodified)
    with run.progress("search: generations", search.generations + 1) as advance:
        advance(evolution.generation)

        def after(evolution: Evolution) -> None:
            run.out.write_json(STATE, evolution.state())
            write_csv(
                run.out.path / "generations.csv", pd.DataFrame(evolution.history).assign(unmodified=base)
            )
            shown = " ".join(f"{s:.2f}" for s in evolution.scales(evolution.population[0]))
            best = evolution.history[-1]
            run.console.print(
                f"generation {best['generation']}: fitness {best['best']:.4f} ({base:.4f} unmodified), scales {shown}"
            )
            advance(1)

        winner = evolve(evolution, scores, after)
    write_csv(run.out.path / "search.csv", _table(evolution, scores, winner))
    write_csv(run.out.path / "curve.csv", _curve(evolution, winner))
    source = (
        f"posbench {posbench.__version__} genetic search ({search.curve}, {len(evolution.history) - 1} generations, "
        f"{len(scores.known)} candidates, {len(examples)} calibration prompts of {task.name}, seed {search.seed})"
        f"{beside(run.config)}; run {run.out.path.name}"
    )
    write_text(
        run.out.path / "found.yaml",
        found_block(_parameters(evolution, winner), evolution.scales(winner), scores, source),
    )
    (run.out.path / STATE).unlink(missing_ok=True)


def beside(config: Config) -> str:
    """Which other methods were applied, for the line that says where found values come from."""
    return f" in the list {config.method_name}" if config.part else ""


def _parameters(evolution: Evolution, genome: Genome) -> dict[str, Any]:
    """The fields of layer_scaling; one scale per layer where the points are not those of a curve that the
    method takes."""
    search = evolution.search
    if search.curve == "free" or not search.constrained or search.low < 1 or search.high > 2:
        return {"points": None, "curve": "bezier", "x": "stretched", "scales": list(evolution.scales(genome))}
    points = [list(point) for point in search.control_points(genome)]
    return {"points": points, "curve": search.curve, "x": search.x, "scales": None}


def found_block(parameters: Mapping[str, Any], scales: Scales, scores: Scores, source: str) -> str:
    """The model YAML block to paste, with its mean scale (LPES' uniform baseline) and where it comes from."""
    block = {
        **parameters,
        "lowest": min(scales),
        "highest": max(scales),
        "mean": float(np.mean(scales)),
        "fitness": round(scores.bound(scales), 6),
        "fitness_unmodified": round(scores.bound((1.0,) * len(scales)), 6),
        "source": source,
    }
    return yaml.safe_dump({"layer_scaling": block}, sort_keys=False, width=1000)


def _table(evolution: Evolution, scores: Scores, winner: Genome) -> pd.DataFrame:
    """All candidates, best first; the accuracy of one that was given up is the highest that it could have
    had."""
    best = evolution.scales(winner)
    rows = []
    for scales in sorted(scores.known, key=scores.rank):
        accuracies = dict(zip(POSITIONS, scores.accuracies(scales), strict=True))
        scored = int(np.isfinite(scores.known[scales]).sum())
        rows.append(
            {
                "fitness": scores.bound(scales),
                **accuracies,
                "scored": scored,
                "complete": scored == len(scores.positions),
                "unmodified": all(s == 1 for s in scales),
                "selected": scales == best,
                **{f"scale_{layer}": scale for layer, scale in enumerate(scales)},
            }
        )
    return pd.DataFrame(rows)


def _curve(evolution: Evolution, winner: Genome) -> pd.DataFrame:
    """What the figure draws: control points, the curve between them, and the scale of every layer."""
    search, rows = evolution.search, list[tuple[str, float, float]]()
    if search.curve != "free":
        points = search.control_points(winner)
        rows += [("point", x, y) for x, y in points]
        if search.curve == "bezier":
            xs, ys = [x for x, _ in points], [y for _, y in points]
            t = np.linspace(0, 1, SAMPLES)
            drawn = zip(curves.bernstein(xs, t).tolist(), curves.bernstein(ys, t).tolist(), strict=True)
            rows += [("curve", x, y) for x, y in drawn]
        else:
            at = np.linspace(points[0][0], points[-1][0], SAMPLES).tolist()
            rows += [
                ("curve", x, y)
                for x, y in zip(at, curves.layer_scales(search.curve, points, SAMPLES), strict=True)
            ]
    rows += [("layer", float(layer), scale) for layer, scale in enumerate(evolution.scales(winner))]
    return pd.DataFrame(rows, columns=["part", "x", "y"])
