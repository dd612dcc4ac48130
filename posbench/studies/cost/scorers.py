"""Our scores of real model outputs against the scores that the benchmarks' own programs gave them.

``make scorers``, or ``make scorers DATA=DIR``, or ``python -m posbench.studies.cost.scorers --help``; DIR
holds a folder per benchmark with outputs and their official scores.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from posbench import paths
from posbench.errors import UserError
from posbench.files.atomic import write_text
from posbench.files.markdown import markdown
from posbench.tasks import Example
from posbench.tasks.leval_closed import gold_letters, letter_score, letters
from posbench.tasks.longbench import PROMPTS, LongBench
from posbench.tasks.loogle_timeline_reorder import reorder_scores
from posbench.tasks.reading import rows
from posbench.tasks.scorers import best_subspan_em

Scored = Iterator[tuple[str, float, float]]
"""Subset, official score and ours of one output after the other."""

TOLERANCE = 1e-9
"""Two scores this near are equal: sums of floats may round otherwise elsewhere."""


class Row(NamedTuple):
    """One subset: ``equal`` of ``outputs`` scores agree; differences and means are in the benchmark's own
    unit."""

    benchmark: str
    subset: str
    outputs: int
    equal: int
    largest_difference: float
    official_mean: float
    our_mean: float


def longbench(folder: Path) -> Scored:
    """Fields ``_id``, ``pred``, ``answers``, ``all_classes``, ``official_score``; one file per task."""
    task = LongBench(tasks=tuple(PROMPTS))
    for name in task.tasks:
        for _, row in rows("data", folder / "scored_predictions" / f"{name}.jsonl"):
            meta = {"task": name, "all_classes": row["all_classes"]}
            example = Example(id=row["_id"], prompt="", answers=tuple(row["answers"]), subset=name, meta=meta)
            yield name, row["official_score"], task.score(example, row["pred"])["score"]


def nq(folder: Path) -> Scored:
    """Fields ``answers``, ``model_answer``, ``metric_best_subspan_em``; scored by the script of Liu et al.
    2023."""
    for _, row in rows("data", folder / "scored_predictions_gpt35_first300.jsonl"):
        ours = best_subspan_em(row["model_answer"], row["answers"], strip_first=False)
        yield "20 documents", row["metric_best_subspan_em"], ours


def leval(folder: Path) -> Scored:
    """Fields ``prediction``, ``gt``, ``official_score``; one file per model and exam."""
    for model in ("turbo-16k-0613_{}", "xgen-7b-8k-inst_{}_firsthalf"):
        for exam in ("coursera", "quality", "tpo"):
            for _, row in rows("data", folder / "scored_predictions" / f"{model.format(exam)}.jsonl"):
                said = letters(row["prediction"], several=exam == "coursera")
                yield (
                    f"{exam}, {model.partition('_')[0]}",
                    row["official_score"],
                    letter_score(said, gold_letters(row["gt"])),
                )


def loogle(folder: Path) -> Scored:
    """Fields ``gold``, ``llm_output``, ``official_function_value``; ``official_worst_value`` where the reply
    is no order."""
    names = {
        "lsd": "location_square_deviation",
        "lmd": "location_mean_deviation",
        "sd": "swap_deviation",
        "sdd": "swap_distance_deviation",
    }
    for _, row in rows("data", folder / "timeline_reorder_gold_and_gpt4.jsonl"):
        official = row["official_function_value"] if row["standard_format"] else row["official_worst_value"]
        ours = reorder_scores(row["llm_output"], row["gold"])
        for short, name in names.items():
            yield short, official[name], ours[short]


BENCHMARKS: list[tuple[str, str, Callable[[Path], Scored]]] = [
    ("longbench", "longbench", longbench),
    ("nq_multidoc", "nq_multidoc_qa", nq),
    ("leval_closed", "leval", leval),
    ("loogle_timeline_reorder", "loogle", loogle),
]
"""Benchmark, its folder, and the reader of that folder."""

SHIPPED = paths.PACKAGE.parent / "tests" / "data" / "scored"
"""The outputs that are free to redistribute: NaturalQuestions and LooGLE."""


def parity(folder: Path) -> list[Row]:
    """One row per benchmark that has a folder there, and subset.

    Raises:
        UserError: A file of outputs is missing or cannot be read.
    """
    table = []
    for benchmark, name, read in BENCHMARKS:
        subsets: dict[str, list[tuple[float, float]]] = {}
        for subset, official, ours in read(folder / name) if (folder / name).is_dir() else ():
            subsets.setdefault(subset, []).append((official, ours))
        for subset, pairs in subsets.items():
            away = [abs(official - ours) for official, ours in pairs]
            means = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
            table.append(
                Row(benchmark, subset, len(pairs), sum(d <= TOLERANCE for d in away), max(away), *means)
            )
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; exit with status 1 when any score differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of the outputs with official scores; else $POSBENCH_DATA, else what ships",
    )
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    args = parser.parse_args(argv)
    folder = Path(args.data or os.environ.get("POSBENCH_DATA") or SHIPPED)
    missing = [f"{benchmark} ({name}/)" for benchmark, name, _ in BENCHMARKS if not (folder / name).is_dir()]
    if len(missing) == len(BENCHMARKS):
        parser.error(f"no outputs in {folder}: name another folder with --data DIR")
    try:
        table = parity(folder)
    except UserError as error:
        sys.exit(str(error))
    outputs, equal = sum(row.outputs for row in table), sum(row.equal for row in table)
    cells = [[*row[:4], f"{row[4]:.2g}", f"{row[5]:.6f}", f"{row[6]:.6f}"] for row in table]
    text = (
        "# Scores against the benchmarks' own programs\n\n"
        f"Real model outputs, scored here and by the released evaluation: {equal} of {outputs} scores are equal.\n"
        "Means are over these outputs only; they say nothing about a model. Those of LooGLE are deviations,\n"
        "four for each output. Made by `make scorers`.\n"
        + (
            f"Not in that folder, because their licences do not let them travel: {', '.join(missing)}.\n"
            if missing
            else ""
        )
        + "\n"
        + markdown([field.replace("_", " ") for field in Row._fields], cells)
        + "\n"
    )
    print(text, end="")
    if args.out:
        write_text(args.out, text)
    sys.exit(int(equal < outputs))


if __name__ == "__main__":
    main()
