"""Our scores of real model outputs against the scores that the benchmarks' own programs gave them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from posbench import paths
from posbench.errors import UserError
from posbench.files.sources import Source
from posbench.late import pd
from posbench.run.base import Run
from posbench.stats.findings import Finding
from posbench.studies.base import Study, Tables
from posbench.tasks import Example
from posbench.tasks.leval_closed import gold_letters, letter_score, letters
from posbench.tasks.longbench import PROMPTS, LongBench
from posbench.tasks.loogle_timeline_reorder import reorder_scores
from posbench.tasks.reading import rows
from posbench.tasks.scorers import best_subspan_em

Scored = Iterator[tuple[str, float, float]]
"""Subset, official score and ours of one output after the other."""
TOLERANCE = 1e-9  # sums of floats may round otherwise elsewhere
SHIPPED = (
    paths.PACKAGE.parent / "tests" / "data" / "scored"
)  # what is free to redistribute


def longbench(folder: Path) -> Scored:
    """Fields ``_id``, ``pred``, ``answers``, ``all_classes``, ``official_score``; one file per task."""
    task = LongBench(subsets=tuple(PROMPTS))
    for name in task.subsets:
        for _, row in rows(
            "study.data", folder / "scored_predictions" / f"{name}.jsonl"
        ):
            meta = {"task": name, "all_classes": row["all_classes"]}
            example = Example(
                id=row["_id"],
                prompt="",
                answers=tuple(row["answers"]),
                subset=name,
                meta=meta,
            )
            yield name, row["official_score"], task.score(example, row["pred"])["score"]


def nq(folder: Path) -> Scored:
    """Fields ``answers``, ``model_answer``, ``metric_best_subspan_em`` (the script of Liu et al. 2023)."""
    for _, row in rows(
        "study.data", folder / "scored_predictions_gpt35_first300.jsonl"
    ):
        ours = best_subspan_em(row["model_answer"], row["answers"], strip_first=False)
        yield "20 documents", row["metric_best_subspan_em"], ours


def leval(folder: Path) -> Scored:
    """Fields ``prediction``, ``gt``, ``official_score``; one file per model and exam."""
    for model in ("turbo-16k-0613_{}", "xgen-7b-8k-inst_{}_firsthalf"):
        for exam in ("coursera", "quality", "tpo"):
            for _, row in rows(
                "study.data",
                folder / "scored_predictions" / f"{model.format(exam)}.jsonl",
            ):
                said = letters(row["prediction"], several=exam == "coursera")
                ours = letter_score(said, gold_letters(row["gt"]))
                yield f"{exam}, {model.partition('_')[0]}", row["official_score"], ours


def loogle(folder: Path) -> Scored:
    """Fields ``gold``, ``llm_output``, ``official_function_value`` (no order: ``official_worst_value``)."""
    names = {
        "lsd": "location_square",
        "lmd": "location_mean",
        "sd": "swap",
        "sdd": "swap_distance",
    }
    for _, row in rows("study.data", folder / "timeline_reorder_gold_and_gpt4.jsonl"):
        official = (
            row["official_function_value"]
            if row["standard_format"]
            else row["official_worst_value"]
        )
        ours = reorder_scores(row["llm_output"], row["gold"])
        for short, name in names.items():
            yield short, official[f"{name}_deviation"], ours[short]


BENCHMARKS: dict[str, tuple[str, Callable[[Path], Scored]]] = {
    "longbench": ("longbench", longbench),
    "nq_multidoc": ("nq_multidoc_qa", nq),
    "leval_closed": ("leval", leval),
    "loogle_timeline_reorder": ("loogle", loogle),
}
"""By benchmark its folder, and the reader of that folder."""


@dataclass(frozen=True, kw_only=True)
class Scorers(Study):
    """Whether our scorers give real outputs the scores that the released evaluations gave them."""

    needs_model: ClassVar[bool] = False
    needs_task: ClassVar[bool] = False

    # A folder with outputs and official scores of some BENCHMARKS; None: POSBENCH_DATA, else what ships.
    data: str | None = None

    @property
    def folder(self) -> Path:
        """Where the outputs are."""
        return Path(
            self.data or os.environ.get("POSBENCH_DATA") or SHIPPED
        ).expanduser()

    def files(self) -> tuple[Source, ...]:
        """See :meth:`Study.files`."""
        outputs = tuple(f"{name}/**/*.jsonl" for name, _ in BENCHMARKS.values())
        return (
            Source(kind="path", id=str(self.folder), field="study.data", files=outputs),
        )

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        if parity(self.folder).empty:
            allowed = f"a folder with one of {', '.join(name for name, _ in BENCHMARKS.values())}"
            raise UserError(
                "study.data", str(self.folder), allowed, "set study.data=DIR"
            )

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Table ``scores``; see :func:`parity`."""
        return {"scores": parity(self.folder)}

    def findings(self, tables: Tables) -> list[Finding]:
        """Whether every score is equal."""
        table = tables["scores"]
        equal = int(table["equal"].sum())
        outputs = int(table["outputs"].sum())
        missing = (
            ", ".join(
                name for name in BENCHMARKS if name not in set(table["benchmark"])
            )
            or "none"
        )
        claim = "Our scorers give the scores of the benchmarks' own programs"
        note = f"{equal} of {outputs}; not in that folder: {missing}"
        at = (equal / outputs, outputs)
        return [
            Finding.that(
                equal == outputs, claim, "share of equal scores", at, note
            ).control()
        ]


def parity(root: Path) -> pd.DataFrame:
    """Rows of benchmark, subset, outputs, equal (scores that agree), largest_difference, both means.

    Differences and means are in the benchmark's own unit; LooGLE's are deviations, four for each output.

    Raises:
        UserError: A file of outputs is missing or cannot be read.
    """
    there = {
        key: read(root / name)
        for key, (name, read) in BENCHMARKS.items()
        if (root / name).is_dir()
    }
    scored = [(key, *each) for key, outputs in there.items() for each in outputs]
    frame = pd.DataFrame(scored, columns=["benchmark", "subset", "official", "ours"])
    frame["away"] = (frame["official"] - frame["ours"]).abs()
    frame["equal"] = frame["away"] <= TOLERANCE
    found = frame.groupby(["benchmark", "subset"], sort=False).agg(
        outputs=("equal", "size"),
        equal=("equal", "sum"),
        largest_difference=("away", "max"),
        official_mean=("official", "mean"),
        our_mean=("ours", "mean"),
    )
    return found.reset_index()
