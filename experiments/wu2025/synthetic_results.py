"""The synthetic trainings of a folder put together, finished or not, with the cells of Wu et al. 2025."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.files.sources import Source
from posbench.late import pd
from posbench.run.base import Run
from wu2025 import synthetic_tables as tables
from wu2025.synthetic_claims import thresholds
from wu2025.synthetic_training import TrainedNetworks
from wu2025.training import FACTS, ROWS_FILE, read_trainings

PUBLISHED_TABLES = ("gaps", "sinks")
"""Tables of an earlier run that are read."""
CELL_FILES = [f"wu2025_fig{number}.csv" for number in (*range(2, 9), *range(13, 19))]
"""The paper's cells in reference/."""
ENOUGH_SEEDS = f"{tables.MIN_SEEDS} seeds or more"
MEANINGS = {
    "agrees": (
        f"{ENOUGH_SEEDS}: the 90 % interval of ours minus the paper's, with the variance between seeds, lies "
        f"within {tables.NEAR} of 0"
    ),
    "inconclusive": f"{ENOUGH_SEEDS}: it reaches over {tables.NEAR}",
    "differs": f"{ENOUGH_SEEDS}: it lies beyond {tables.NEAR}",
    "this network agrees": (
        f"one or two seeds: the 90 % interval over test sequences lies within {tables.NEAR} of the paper; another "
        "seed may not"
    ),
    "cannot tell": f"one or two seeds: it reaches over {tables.NEAR}",
    "this network differs": f"one or two seeds: it lies beyond {tables.NEAR}",
    "not learned": "a training loss within a tenth of guessing",
    "not trained": "no such training in the folder; near zero or not",
}
"""Verdicts on the paper's cells."""
TESTED = {
    ("gaussian", "none"): "gaussian",
    ("fixed", "training"): "fixed, training's omega",
    ("fixed", "fresh"): "fixed, fresh omegas",
}
"""Vocabulary and omega of the tests, and their column in the table of verdicts."""


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
            files=(f"*/{ROWS_FILE}", f"*/{FACTS}"),
        )
        if not self.published:
            return (measured,)
        published = Source(
            kind="path",
            id=self.published,
            field="study.published",
            files=tuple(f"{name}.csv" for name in PUBLISHED_TABLES),
        )
        return (measured, published)

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        self.together()

    def together(self) -> dict[str, pd.DataFrame]:
        """The tables of the trainings, ``gaps`` and ``sinks`` merged with the earlier run's.

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
            for name in PUBLISHED_TABLES:
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
        """The tables of :class:`TrainedNetworks` and those below, without the empty ones."""
        together = self.together()
        gaps = together["gaps"]
        cells = tables.compare_cells(gaps, CELL_FILES)
        printed = pd.concat([tables.read_printed_cells(file) for file in CELL_FILES])
        measured = {
            **together,
            "paper_cells": cells,
            "networks": _networks(cells),
            "verdicts": _verdicts(cells, printed["vocabulary"].value_counts()),
            "omega_counts": _omega_counts(cells),
            "omegas": _omegas(cells),
            "causal_without_pe": _networks(cells[tables.causal_without_pe(cells)]),
            "misses": _misses(cells),
            "thresholds": thresholds(gaps),
        }
        return {name: table for name, table in measured.items() if len(table.columns)}


def _networks(cells: pd.DataFrame) -> pd.DataFrame:
    """A row per condition: the three gaps, ours with 95 % over the tests and the paper's cell."""
    rows = []
    for _, group in cells.groupby(["figure", *tables.GAP_SETTINGS], sort=False):
        condition = group.iloc[0]
        row: Row = {
            "figure": condition["figure"],
            "network": tables.condition_label(condition)
            + tables.omega_suffix(condition),
            "bias of the data": condition["bias"],
            "std": "1/sqrt(D)" if condition["scale"] == "paper" else "1/D",
            "iterations x seeds": _iterations_and_seeds(condition),
            "loss": f"{condition['train_loss']:.2f}",
            "accuracy": f"{condition['train_accuracy']:.2f}",
            "accuracy on new classes": f"{condition['novel']:.2f}",
        }
        pairs = group.set_index("pair").loc[tables.PAIR_NAMES]
        for cell in pairs.itertuples():
            interval = f"[{cell.ci_low:+.3f}, {cell.ci_high:+.3f}]"
            text = f"{cell.gap:+.3f} {interval}{_spreads(cell)}"
            row[f"gap {cell.Index}"] = (
                f"{text}; paper {cell.paper:+.3f}: {cell.verdict}"
            )
        rows.append(row)
    return pd.DataFrame(rows)


def _iterations_and_seeds(condition: Mapping[str, Any]) -> str:
    return f"{condition['iteration']:,} x {condition['seeds']}"


def _spreads(cell: Any) -> str:
    """Standard deviations over seeds and draws of omega, where there are several."""
    text = ""
    if cell.seeds > 1:
        text += f", seeds' sd {cell.spread:.3f}"
    if cell.draws > 1:
        text += f", draws' sd {cell.draw_sd:.3f}"
    return text


def _verdicts(cells: pd.DataFrame, printed: Mapping[str, int]) -> pd.DataFrame:
    """Count the verdicts on the paper's cells, each cell once for each omega, and those near zero apart.

    Args:
        cells: The cells that were trained.
        printed: Number of the paper's cells by vocabulary.

    Returns:
        Rows of verdict, two columns for each vocabulary and omega, meaning.
    """
    counted = cells[cells["counted"]]
    table = pd.DataFrame({"verdict": list(MEANINGS)})
    for (vocabulary, omega), name in TESTED.items():
        rows = counted[
            (counted["vocabulary"] == vocabulary) & (counted["omega"] == omega)
        ]
        for near_zero in (False, True):
            verdicts = rows.loc[rows["near_zero"] == near_zero, "verdict"]
            counts = verdicts.value_counts().reindex(list(MEANINGS), fill_value=0)
            if not near_zero:
                counts["not trained"] = printed[vocabulary] - len(rows)
            column = f"{name}, near zero" if near_zero else name
            table[column] = counts.to_numpy()
    return table.assign(meaning=list(MEANINGS.values()))


def _both_omegas(cells: pd.DataFrame) -> pd.DataFrame:
    """The counted cells of the fixed vocabulary that were measured with both omegas."""
    fixed = cells[cells["counted"] & (cells["vocabulary"] == "fixed")]
    omegas = fixed.groupby(["figure", *tables.CELL_COLUMNS])["omega"].transform(
        "nunique"
    )
    return fixed[omegas == 2]


def _omega_counts(cells: pd.DataFrame) -> pd.DataFrame:
    """Distance of the fixed vocabulary's cells from the paper's with each omega, by position encoding."""
    both = _both_omegas(cells)
    rows = []
    for pe, label in {**tables.PE_LABELS, "": "all"}.items():
        for omega in ("training", "fresh"):
            of_pe = (both["pe"] == pe) | (pe == "")
            group = both[of_pe & (both["omega"] == omega)]
            if group.empty:
                continue
            judged = group[group["seeds"] >= tables.MIN_SEEDS]
            contains_zero = (judged["difference_ci_low"] <= 0) & (
                judged["difference_ci_high"] >= 0
            )
            row: Row = {
                "network": label,
                "omega of the tests": omega,
                "cells": len(group),
                "mean distance from the paper": f"{group['difference'].abs().mean():.3f}",
                "largest": f"{group['difference'].abs().max():.3f}",
                f"of {tables.MIN_SEEDS} seeds or more": len(judged),
            }
            for verdict in ("agrees", "inconclusive", "differs"):
                row[verdict] = int((judged["verdict"] == verdict).sum())
            row["no difference seen"] = int(contains_zero.sum())
            rows.append(row)
    return pd.DataFrame(rows)


def _omegas(cells: pd.DataFrame) -> pd.DataFrame:
    """Every counted cell of the fixed vocabulary with both omegas next to the paper's."""
    fixed = cells[cells["counted"] & (cells["vocabulary"] == "fixed")]
    rows = []
    for (figure, *_), group in fixed.groupby(
        ["figure", *tables.CELL_COLUMNS], sort=False
    ):
        cell = group.iloc[0]
        row: Row = {
            "figure": figure,
            "network": tables.condition_label(cell),
            "bias of the data": cell["bias"],
            "gap": cell["pair"],
            "paper": f"{cell['paper']:+.3f}",
        }
        for omega, name in {
            "training": "training's omega",
            "fresh": "fresh omegas",
        }.items():
            row[name] = "not measured"
            for tested in group[group["omega"] == omega].itertuples():
                row[name] = (
                    f"{tested.gap:+.3f}{_spreads(tested)}: {tested.verdict} "
                    f"({tested.iteration:,} x {tested.seeds})"
                )
        rows.append(row)
    return pd.DataFrame(rows)


def _misses(cells: pd.DataFrame) -> pd.DataFrame:
    """Every counted cell that does not agree, the largest difference first."""
    agrees = cells["verdict"].isin(["agrees", tables.FEW_SEEDS_VERDICTS["agrees"]])
    misses = cells[cells["counted"] & ~agrees]
    misses = misses.sort_values("difference", key=abs, ascending=False, kind="stable")
    rows = [
        {
            "figure": row["figure"],
            "network": tables.condition_label(row)
            + tables.scale_suffix(row)
            + tables.omega_suffix(row),
            "bias of the data": row["bias"],
            "gap": row["pair"],
            "paper": f"{row['paper']:+.3f}",
            "ours": f"{row['gap']:+.3f} [{row['ci_low']:+.3f}, {row['ci_high']:+.3f}]",
            "difference": f"{row['difference']:+.3f}",
            "sign": "same" if row["gap"] * row["paper"] > 0 else "other",
            "verdict": row["verdict"],
            "iterations x seeds": _iterations_and_seeds(row),
        }
        for row in misses.to_dict("records")
    ]
    return pd.DataFrame(rows)
