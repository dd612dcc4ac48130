"""Our scores of real model outputs against the scores that the benchmarks' own programs gave them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

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
from posbench.tasks.reading import read_data_rows
from posbench.tasks.scorers import best_subspan_em

Scored = Iterator[tuple[str, float, float]]
"""Subset, official score and ours, of one output after the other."""
TOLERANCE = 1e-9  # sums of floats may round otherwise elsewhere


def longbench(folder: Path) -> Scored:
    """Yield subset, official score and our score of each prediction of LongBench; one file per task.

    Files have fields ``_id``, ``pred``, ``answers``, ``all_classes``, ``official_score``.
    """
    task = LongBench(subsets=tuple(PROMPTS))
    for subset in task.subsets:
        file = folder / "scored_predictions" / f"{subset}.jsonl"
        for _, row in read_data_rows("study.data", file):
            example = Example(
                id=row["_id"],
                prompt="",
                answers=tuple(row["answers"]),
                subset=subset,
                meta={"task": subset, "all_classes": row["all_classes"]},
            )
            ours = task.score(example, row["pred"])["score"]
            yield subset, row["official_score"], ours


def nq(folder: Path) -> Scored:
    """Fields ``answers``, ``model_answer``, ``metric_best_subspan_em`` (the script of Liu et al. 2023)."""
    file = folder / "scored_predictions_gpt35_first300.jsonl"
    for _, row in read_data_rows("study.data", file):
        ours = best_subspan_em(row["model_answer"], row["answers"], strip_first=False)
        yield "20 documents", row["metric_best_subspan_em"], ours


def leval(folder: Path) -> Scored:
    """Yield exam and model, official score and our score of each prediction of L-Eval; one file per model and exam.

    Files have fields ``prediction``, ``gt``, ``official_score``.
    """
    for name in ("turbo-16k-0613_{}", "xgen-7b-8k-inst_{}_firsthalf"):
        model = name.partition("_")[0]
        for exam in ("coursera", "quality", "tpo"):
            file = folder / "scored_predictions" / f"{name.format(exam)}.jsonl"
            for _, row in read_data_rows("study.data", file):
                answer = letters(row["prediction"], several=exam == "coursera")
                ours = letter_score(answer, gold_letters(row["gt"]))
                yield f"{exam}, {model}", row["official_score"], ours


def loogle(folder: Path) -> Scored:
    """Yield metric, official score and our score of each reply to LooGLE's timeline reorder task.

    The file has fields ``gold``, ``llm_output``, ``official_function_value``; for a reply that gives no order the score
    is ``official_worst_value``.
    """
    official_names = {
        "lsd": "location_square",
        "lmd": "location_mean",
        "sd": "swap",
        "sdd": "swap_distance",
    }
    for _, row in read_data_rows(
        "study.data", folder / "timeline_reorder_gold_and_gpt4.jsonl"
    ):
        field = "official_worst_value"
        if row["standard_format"]:
            field = "official_function_value"
        ours = reorder_scores(row["llm_output"], row["gold"])
        for metric, name in official_names.items():
            yield metric, row[field][f"{name}_deviation"], ours[metric]


BENCHMARKS: dict[str, tuple[str, Callable[[Path], Scored]]] = {
    "longbench": ("longbench", longbench),
    "nq_multidoc": ("nq_multidoc_qa", nq),
    "leval_closed": ("leval", leval),
    "loogle_timeline_reorder": ("loogle", loogle),
}
"""By benchmark its folder, and the reader of that folder."""
ALLOWED = (
    f"a folder with one of {', '.join(folder for folder, _ in BENCHMARKS.values())}"
)


@dataclass(frozen=True, kw_only=True)
class Scorers(Study):
    """Whether our scorers give real outputs the scores that the released evaluations gave them.

    Attributes:
        data: A folder with outputs and official scores of some BENCHMARKS; None for the environment's POSBENCH_DATA.
    """

    needs_model: ClassVar[bool] = False
    needs_task: ClassVar[bool] = False

    data: str | None = None

    @property
    def folder(self) -> Path:
        """The folder with the benchmarks' outputs, from ``study.data`` or the environment variable POSBENCH_DATA.

        Raises:
            UserError: Neither is set.
        """
        folder = self.data or os.environ.get("POSBENCH_DATA")
        if not folder:
            raise UserError("study.data", self.data, ALLOWED, "set study.data=DIR")
        return Path(folder).expanduser()

    def files(self) -> tuple[Source, ...]:
        """See :meth:`Study.files`."""
        outputs = tuple(f"{folder}/**/*.jsonl" for folder, _ in BENCHMARKS.values())
        source = Source(
            kind="path", id=str(self.folder), field="study.data", files=outputs
        )
        return (source,)

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        if compare_with_official(self.folder).empty:
            raise UserError(
                "study.data", str(self.folder), ALLOWED, "set study.data=DIR"
            )

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Table ``scores``; see :func:`compare_with_official`."""
        return {"scores": compare_with_official(self.folder)}

    def findings(self, tables: Tables) -> list[Finding]:
        """Judge whether every score of ours equals the official one.

        Args:
            tables: Those of :meth:`measure`; ``scores`` has the number of outputs and of equal scores by benchmark.
        """
        table = tables["scores"]
        equal = int(table["equal"].sum())
        outputs = int(table["outputs"].sum())
        present = set(table["benchmark"])
        missing = ", ".join(name for name in BENCHMARKS if name not in present)
        finding = Finding.that(
            equal == outputs,
            "Our scorers give the scores of the benchmarks' own programs",
            "share of equal scores",
            (equal / outputs, outputs),
            f"{equal} of {outputs}; not in that folder: {missing or 'none'}",
        )
        # No paper claims it: it is a control.
        return [finding.control()]


def compare_with_official(root: Path) -> pd.DataFrame:
    """Compare our scores with the official ones.

    Args:
        root: Folder with the folders of some BENCHMARKS.

    Returns:
        Rows of benchmark, subset, outputs, equal (scores that agree), largest_difference, both means. Differences
        and means are in the benchmark's own unit; LooGLE's are deviations, four for each output.

    Raises:
        UserError: A file of outputs is missing or cannot be read.
    """
    scored = []
    for benchmark, (name, read) in BENCHMARKS.items():
        folder = root / name
        if folder.is_dir():
            scored += [(benchmark, *output) for output in read(folder)]
    frame = pd.DataFrame(scored, columns=["benchmark", "subset", "official", "ours"])
    frame["difference"] = (frame["official"] - frame["ours"]).abs()
    frame["equal"] = frame["difference"] <= TOLERANCE
    table = frame.groupby(["benchmark", "subset"], sort=False).agg(
        outputs=("equal", "size"),
        equal=("equal", "sum"),
        largest_difference=("difference", "max"),
        official_mean=("official", "mean"),
        our_mean=("ours", "mean"),
    )
    return table.reset_index()
