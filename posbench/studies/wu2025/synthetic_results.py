"""The synthetic trainings of a folder put together, finished or not: tables, figures, the paper's cells,
thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from posbench import paths
from posbench.errors import UserError
from posbench.run.base import Run
from posbench.studies.wu2025.synthetic_claims import thresholds
from posbench.studies.wu2025.synthetic_tables import (
    CELL,
    NEAR,
    PAIR_NAMES,
    SETTINGS,
    ZERO,
    label,
    printed_cells,
)
from posbench.studies.wu2025.synthetic_training import Trained
from posbench.studies.wu2025.training import ROWS, trainings

MEANINGS = {
    "agrees": f"within {NEAR} of the paper's cell, a mean of five trainings of 100,000 iterations without interval",
    "same sign": f"both beyond {ZERO} on one side",
    "differs": "any other; of shorter trainings it may be a difference of iterations",
    "not learned": "a training loss within a tenth of guessing",
    "not trained": "no training of this condition in the folder",
}
"""Verdicts on a cell, and what they mean."""


@dataclass(frozen=True, kw_only=True)
class SyntheticResults(Trained):
    """Trained attention networks and the cells of Wu et al. 2025.

    Attributes:
        trainings: Folder of trainings, what ``study=synthetic_training study.trainings=DIR`` wrote.
    """

    trainings: str = "outputs/trainings"

    @property
    def folder(self) -> Path:
        """The folder."""
        return Path(self.trainings).expanduser()

    def reads(self) -> Sequence[Path]:
        """See :meth:`Study.reads`."""
        return sorted(self.folder.glob(f"*/{ROWS}"))

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        if not trainings(self.folder):
            allowed = "a folder of trainings, one of them with a measured iteration"
            hint = "posbench study=synthetic_training study.trainings=DIR"
            raise UserError("study.trainings", self.trainings, allowed, hint)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """The tables of :class:`Trained`, ``networks``, ``verdicts`` and ``thresholds``."""
        files = [file.name for file in (paths.EXPERIMENTS / "reference").glob("wu2025_fig*.csv")]
        files.sort(key=lambda name: int(name.removeprefix("wu2025_fig").removesuffix(".csv")))
        tables = self.tables(trainings(self.folder), files)
        cells = tables["paper_cells"]
        return {
            **tables,
            "networks": _networks(cells),
            "verdicts": _verdicts(cells, pd.concat(map(printed_cells, files))),
            "thresholds": thresholds(tables["gaps"]),
        }


def _networks(cells: pd.DataFrame) -> pd.DataFrame:
    """A row per condition: the three gaps, ours with its 95 % interval over test sequences and the paper's
    cell."""
    rows = []
    for _, each in cells.groupby(["figure", *SETTINGS], sort=False):
        one, texts = each.iloc[0], {}
        for at in each.set_index("pair").loc[PAIR_NAMES].itertuples():
            spread = f", seeds' sd {at.spread:.3f}" if at.seeds > 1 else ""
            ours = f"{at.gap:+.3f} [{at.ci_low:+.3f}, {at.ci_high:+.3f}]{spread}"
            texts[f"gap {at.Index}"] = f"{ours}; paper {at.paper:+.3f}: {at.verdict}"
        fixed = ", fixed vocabulary" if one["vocabulary"] == "fixed" else ""
        row = {"figure": one["figure"], "network": label(one) + fixed, "bias of the data": one["bias"]}
        row |= {"std": "1/sqrt(D)" if one["scale"] == "paper" else "1/D"}
        row |= {
            "iterations x seeds": f"{one['iteration']:,} x {one['seeds']}",
            "loss": f"{one['train_loss']:.2f}",
        }
        rows.append(row | texts)
    return pd.DataFrame(rows)


def _verdicts(cells: pd.DataFrame, printed: pd.DataFrame) -> pd.DataFrame:
    """How many of the paper's cells got each verdict, what it means, and whose cells differ."""
    trained = len(cells.drop_duplicates(["figure", *CELL]))
    counts = {**cells["verdict"].value_counts(), "not trained": len(printed) - trained}
    where = [
        f"Figure {row['figure']}, {label(row)}{', std 1/D' * (row['scale'] == 'code')} ({row['iteration']:,} iterations)"
        for row in cells[cells["verdict"] == "differs"].to_dict("records")
    ]
    rows = [(name, counts.get(name, 0), meaning) for name, meaning in MEANINGS.items()]
    table = pd.DataFrame(rows, columns=["verdict", "cells", "meaning"])
    return table.assign(networks=["; ".join(dict.fromkeys(where)) * (name == "differs") for name in MEANINGS])
