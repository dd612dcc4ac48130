"""The synthetic trainings of a folder put together, finished or not, with the cells of Wu et al. 2025."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.files.sources import Source
from posbench.late import pd
from posbench.run.base import Run
from posbench.studies.wu2025 import synthetic_tables as tables
from posbench.studies.wu2025.synthetic_claims import thresholds
from posbench.studies.wu2025.synthetic_training import TrainedNetworks
from posbench.studies.wu2025.training import FACTS, ROWS, read_trainings

PUBLISHED = ("gaps", "sinks")
"""Tables of an earlier run that are read."""
FILES = [f"wu2025_fig{number}.csv" for number in (*range(2, 9), *range(13, 19))]
"""The paper's cells in experiments/reference."""
MEANINGS = {
    "agrees": f"the 90 % interval of ours minus the paper's (test sequences) lies within {tables.NEAR} of 0",
    "inconclusive": f"it reaches over {tables.NEAR}",
    "differs": f"it lies beyond {tables.NEAR}; where a training is shorter than 100,000, it may be for that",
    "not learned": "a training loss within a tenth of guessing",
    "not trained": "no such training in the folder; near zero or not",
}
"""Verdicts on the paper's cells."""


@dataclass(frozen=True, kw_only=True)
class SyntheticResults(TrainedNetworks):
    """Trained attention networks and the cells of Wu et al. 2025.

    Attributes:
        trainings: Folder that ``study=synthetic_training study.trainings=DIR`` wrote.
        published: Folder of an earlier run of this study, whose trainings count, too.
    """

    trainings: str = "outputs/trainings"
    published: str | None = None

    def files(self) -> tuple[Source, ...]:
        """See :meth:`Study.files`."""
        measured = Source(
            kind="path",
            id=self.trainings,
            field="study.trainings",
            files=(f"*/{ROWS}", f"*/{FACTS}"),
        )
        if not self.published:
            return (measured,)
        published = Source(
            kind="path",
            id=self.published,
            field="study.published",
            files=tuple(f"{name}.csv" for name in PUBLISHED),
        )
        return (measured, published)

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        self.together()

    def together(self) -> dict[str, pd.DataFrame]:
        """The tables of the trainings, ``gaps`` and ``sinks`` with those of the earlier run.

        Raises:
            UserError: No training is measured, or the earlier run's tables are none of this study.
        """
        measured = read_trainings(Path(self.trainings).expanduser())
        if not measured:
            allowed = "a folder of trainings, one of them with a measured iteration"
            hint = "posbench study=synthetic_training study.trainings=DIR"
            raise UserError("study.trainings", self.trainings, allowed, hint)
        together = tables.tabulate(measured, [])
        if self.published:
            folder = Path(self.published).expanduser()
            for name in PUBLISHED:
                old = self._published(folder / f"{name}.csv", list(together[name]))
                together[name] = tables.combine(together[name], old)
        return together

    def _published(self, file: Path, columns: list[str]) -> pd.DataFrame:
        """A table of the earlier run; UserError unless it has these columns."""
        try:
            table = pd.read_csv(file, keep_default_na=False)
        except (OSError, ValueError):  # pandas raises a ValueError on a malformed CSV
            table = pd.DataFrame()
        if list(table) != columns:
            allowed = (
                "a folder with gaps.csv and sinks.csv of an earlier run of this study"
            )
            hint = f"check {file}"
            raise UserError("study.published", self.published, allowed, hint)
        return table

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """The tables of :class:`Trained`, ``networks``, ``verdicts``, ``misses`` and ``thresholds``."""
        together = self.together()
        gaps = together["gaps"]
        cells = tables.compare_cells(gaps, FILES)
        printed = sum(len(tables.read_printed_cells(file)) for file in FILES)
        return {
            **together,
            "paper_cells": cells,
            "networks": _networks(cells),
            "verdicts": _verdicts(cells, printed),
            "causal_without_pe": _networks(cells[tables.causal_without_pe(cells)]),
            "misses": _misses(cells),
            "thresholds": thresholds(gaps),
        }


def _networks(cells: pd.DataFrame) -> pd.DataFrame:
    """A row per condition: the three gaps, ours with 95 % over test sequences and the paper's cell."""
    rows = []
    for _, group in cells.groupby(["figure", *tables.SETTINGS], sort=False):
        condition = group.iloc[0]
        network = tables.condition_label(condition)
        if condition["vocabulary"] == "fixed":
            network += ", fixed vocabulary"
        row: Row = {
            "figure": condition["figure"],
            "network": network,
            "bias of the data": condition["bias"],
            "std": "1/sqrt(D)" if condition["scale"] == "paper" else "1/D",
            "iterations x seeds": f"{condition['iteration']:,} x {condition['seeds']}",
            "loss": f"{condition['train_loss']:.2f}",
            "accuracy": f"{condition['train_accuracy']:.2f}",
            "accuracy on new classes": f"{condition['novel']:.2f}",
        }
        pairs = group.set_index("pair").loc[tables.PAIR_NAMES]
        for cell in pairs.itertuples():
            text = f"{cell.gap:+.3f} [{cell.ci_low:+.3f}, {cell.ci_high:+.3f}]"
            if cell.seeds > 1:
                text += f", seeds' sd {cell.spread:.3f}"
            row[f"gap {cell.Index}"] = (
                f"{text}; paper {cell.paper:+.3f}: {cell.verdict}"
            )
        rows.append(row)
    return pd.DataFrame(rows)


def _verdicts(cells: pd.DataFrame, printed: int) -> pd.DataFrame:
    """Count the verdicts on the paper's cells, each cell once, and those near zero apart.

    Args:
        cells: The cells that were trained.
        printed: Number of all the paper's cells.

    Returns:
        Rows of verdict, cells, near_zero, meaning.
    """
    counted = cells[cells["counted"]]
    counts = counted.groupby("near_zero")["verdict"].value_counts().unstack(0)
    counts = counts.reindex(list(MEANINGS), columns=[False, True])
    counts = counts.fillna(0).astype(int).set_axis(["cells", "near_zero"], axis=1)
    table = counts.rename_axis("verdict").reset_index()
    table.loc[table["verdict"] == "not trained", "cells"] = printed - len(counted)
    return table.assign(meaning=list(MEANINGS.values()))


def _misses(cells: pd.DataFrame) -> pd.DataFrame:
    """Every counted cell that does not agree, the largest difference first."""
    misses = cells[cells["counted"] & (cells["verdict"] != "agrees")]
    misses = misses.sort_values("difference", key=abs, ascending=False, kind="stable")
    rows = [
        {
            "figure": row["figure"],
            "network": tables.condition_label(row) + tables.scale_suffix(row),
            "bias of the data": row["bias"],
            "gap": row["pair"],
            "paper": f"{row['paper']:+.3f}",
            "ours": f"{row['gap']:+.3f} [{row['ci_low']:+.3f}, {row['ci_high']:+.3f}]",
            "difference": f"{row['difference']:+.3f}",
            "sign": "same" if row["gap"] * row["paper"] > 0 else "other",
            "verdict": row["verdict"],
            "iterations": row["iteration"],
        }
        for row in misses.to_dict("records")
    ]
    return pd.DataFrame(rows)
