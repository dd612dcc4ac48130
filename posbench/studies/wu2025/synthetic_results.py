"""The synthetic trainings of a folder put together, finished or not, with the cells of Wu et al. 2025."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from posbench.errors import UserError
from posbench.files.sources import Source
from posbench.run.base import Run
from posbench.studies.wu2025 import synthetic_tables as tables
from posbench.studies.wu2025.synthetic_claims import thresholds
from posbench.studies.wu2025.synthetic_training import Trained
from posbench.studies.wu2025.training import FACTS, ROWS, trainings

FILES = [f"wu2025_fig{number}.csv" for number in (*range(2, 9), *range(13, 19))]
MEANINGS = {
    "agrees": f"within {tables.NEAR} of the paper's cell: a mean of five trainings of 100,000 iterations",
    "same sign": f"both beyond {tables.ZERO} on one side",
    "differs": "any other; where a training is shorter, it may be for that",
    "not learned": "a training loss within a tenth of guessing",
    "not trained": "no such training in the folder",
}


@dataclass(frozen=True, kw_only=True)
class SyntheticResults(Trained):
    """Trained attention networks and the cells of Wu et al. 2025."""

    trainings: str = "outputs/trainings"  # what ``study=synthetic_training study.trainings=DIR`` wrote

    def files(self) -> tuple[Source, ...]:
        """See :meth:`Study.files`."""
        measured = (f"*/{ROWS}", f"*/{FACTS}")
        return (Source(kind="path", id=self.trainings, field="study.trainings", files=measured),)

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        if not trainings(Path(self.trainings).expanduser()):
            allowed = "a folder of trainings, one of them with a measured iteration"
            hint = "posbench study=synthetic_training study.trainings=DIR"
            raise UserError("study.trainings", self.trainings, allowed, hint)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """The tables of :class:`Trained`, ``networks``, ``verdicts`` and ``thresholds``."""
        found = tables.tabulated(trainings(Path(self.trainings).expanduser()), FILES)
        cells, printed = found["paper_cells"], sum(len(tables.printed_cells(file)) for file in FILES)
        found |= {"networks": _networks(cells), "verdicts": _verdicts(cells, printed)}
        return found | {"thresholds": thresholds(found["gaps"])}


def _networks(cells: pd.DataFrame) -> pd.DataFrame:
    """A row per condition: the three gaps, ours with 95 % over test sequences and the paper's cell."""
    rows = []
    for _, each in cells.groupby(["figure", *tables.SETTINGS], sort=False):
        one, texts = each.iloc[0], {}
        for at in each.set_index("pair").loc[tables.PAIR_NAMES].itertuples():
            spread = f", seeds' sd {at.spread:.3f}" if at.seeds > 1 else ""
            ours = f"{at.gap:+.3f} [{at.ci_low:+.3f}, {at.ci_high:+.3f}]{spread}"
            texts[f"gap {at.Index}"] = f"{ours}; paper {at.paper:+.3f}: {at.verdict}"
        fixed = ", fixed vocabulary" if one["vocabulary"] == "fixed" else ""
        row = {"figure": one["figure"], "network": tables.label(one) + fixed, "bias of the data": one["bias"]}
        row["std"] = "1/sqrt(D)" if one["scale"] == "paper" else "1/D"
        row["iterations x seeds"] = f"{one['iteration']:,} x {one['seeds']}"
        rows.append(row | {"loss": f"{one['train_loss']:.2f}"} | texts)
    return pd.DataFrame(rows)


def _verdicts(cells: pd.DataFrame, printed: int) -> pd.DataFrame:
    """How many of the paper's cells got each verdict, what it means, and whose cells those are."""
    counts = cells["verdict"].value_counts()
    counts["not trained"] = printed - len(cells.drop_duplicates(["figure", *tables.CELL]))
    rows = []
    for verdict, meaning in MEANINGS.items():
        where = dict[str, None]()
        for row in cells[cells["verdict"] == verdict].to_dict("records"):
            network = tables.label(row) + tables.scaled(row)
            where[f"Figure {row['figure']}, {network} ({row['iteration']:,} iterations)"] = None
        rows.append((verdict, counts.get(verdict, 0), meaning, "; ".join(where)))
    return pd.DataFrame(rows, columns=["verdict", "cells", "meaning", "networks"])
