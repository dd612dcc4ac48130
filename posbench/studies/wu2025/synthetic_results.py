"""The synthetic trainings of a folder put together, finished or not, with the cells of Wu et al. 2025."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from posbench.errors import UserError
from posbench.files.sources import Source
from posbench.late import pd
from posbench.run.base import Run
from posbench.studies.wu2025 import synthetic_tables as tables
from posbench.studies.wu2025.synthetic_claims import thresholds
from posbench.studies.wu2025.synthetic_training import Trained
from posbench.studies.wu2025.training import FACTS, ROWS, trainings

PUBLISHED = ("gaps", "sinks")
FILES = [f"wu2025_fig{number}.csv" for number in (*range(2, 9), *range(13, 19))]
MEANINGS = {
    "agrees": f"the 90 % interval of ours minus the paper's (test sequences) lies within {tables.NEAR} of 0",
    "inconclusive": f"it reaches over {tables.NEAR}",
    "differs": f"it lies beyond {tables.NEAR}; where a training is shorter than 100,000, it may be for that",
    "not learned": "a training loss within a tenth of guessing",
    "not trained": "no such training in the folder; near zero or not",
}


@dataclass(frozen=True, kw_only=True)
class SyntheticResults(Trained):
    """Trained attention networks and the cells of Wu et al. 2025."""

    trainings: str = "outputs/trainings"  # what ``study=synthetic_training study.trainings=DIR`` wrote
    published: str | None = (
        None  # folder of an earlier run of this study, whose trainings count, too
    )

    def files(self) -> tuple[Source, ...]:
        """See :meth:`Study.files`."""
        measured = (f"*/{ROWS}", f"*/{FACTS}")
        new = Source(
            kind="path", id=self.trainings, field="study.trainings", files=measured
        )
        if not self.published:
            return (new,)
        csvs = tuple(f"{name}.csv" for name in PUBLISHED)
        return new, Source(
            kind="path", id=self.published, field="study.published", files=csvs
        )

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        self.together()

    def together(self) -> dict[str, pd.DataFrame]:
        """The tables ``gaps`` and ``sinks`` of the trainings, with those of the earlier run."""
        new = trainings(Path(self.trainings).expanduser())
        if not new:
            allowed = "a folder of trainings, one of them with a measured iteration"
            hint = "posbench study=synthetic_training study.trainings=DIR"
            raise UserError("study.trainings", self.trainings, allowed, hint)
        found = tables.tabulated(new, [])
        for name in PUBLISHED if self.published else ():
            old = pd.DataFrame()
            file = Path(self.published or "").expanduser() / f"{name}.csv"
            with suppress(
                OSError, ValueError
            ):  # pandas tells a malformed CSV by a ValueError
                old = pd.read_csv(file, keep_default_na=False)
            if list(old) != list(found[name]):
                allowed = "a folder with gaps.csv and sinks.csv of an earlier run of this study"
                raise UserError(
                    "study.published", self.published, allowed, f"look at {file}"
                )
            found[name] = tables.combined(found[name], old)
        return found

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """The tables of :class:`Trained`, ``networks``, ``verdicts``, ``misses`` and ``thresholds``."""
        found = self.together()
        cells = found["paper_cells"] = tables.paper_cells(found["gaps"], FILES)
        printed = sum(len(tables.printed_cells(file)) for file in FILES)
        found |= {"networks": _networks(cells), "verdicts": _verdicts(cells, printed)}
        found["causal_without_pe"] = _networks(cells[tables.causal_without_pe(cells)])
        return found | {
            "misses": _misses(cells),
            "thresholds": thresholds(found["gaps"]),
        }


def _networks(cells: pd.DataFrame) -> pd.DataFrame:
    """A row per condition: the three gaps, ours with 95 % over test sequences and the paper's cell."""
    rows = []
    for _, each in cells.groupby(["figure", *tables.SETTINGS], sort=False):
        one = each.iloc[0]
        texts = {}
        for at in each.set_index("pair").loc[tables.PAIR_NAMES].itertuples():
            spread = f", seeds' sd {at.spread:.3f}" if at.seeds > 1 else ""
            ours = f"{at.gap:+.3f} [{at.ci_low:+.3f}, {at.ci_high:+.3f}]{spread}"
            texts[f"gap {at.Index}"] = f"{ours}; paper {at.paper:+.3f}: {at.verdict}"
        fixed = ", fixed vocabulary" if one["vocabulary"] == "fixed" else ""
        row = {
            "figure": one["figure"],
            "network": tables.label(one) + fixed,
            "bias of the data": one["bias"],
        }
        row["std"] = "1/sqrt(D)" if one["scale"] == "paper" else "1/D"
        row["iterations x seeds"] = f"{one['iteration']:,} x {one['seeds']}"
        row |= {
            "loss": f"{one['train_loss']:.2f}",
            "accuracy": f"{one['train_accuracy']:.2f}",
        }
        rows.append(row | {"accuracy on new classes": f"{one['novel']:.2f}"} | texts)
    return pd.DataFrame(rows)


def _verdicts(cells: pd.DataFrame, printed: int) -> pd.DataFrame:
    """How many of the paper's cells got each verdict, each once, those near zero apart; what it means."""
    once = cells[cells["counted"]]
    counts = (
        once.groupby("near_zero")["verdict"]
        .value_counts()
        .unstack(0)
        .reindex(columns=[False, True])
    )
    counts = counts.reindex(list(MEANINGS)).fillna(0).astype(int)
    table = (
        counts.set_axis(["cells", "near_zero"], axis=1)
        .rename_axis("verdict")
        .reset_index()
    )
    table.loc[table["verdict"] == "not trained", "cells"] = printed - len(once)
    return table.assign(meaning=list(MEANINGS.values()))


def _misses(cells: pd.DataFrame) -> pd.DataFrame:
    """Every counted cell that does not agree, the largest difference first."""
    rows = cells[cells["counted"] & (cells["verdict"] != "agrees")]
    rows = rows.sort_values("difference", key=abs, ascending=False, kind="stable")
    told = [
        {
            "figure": row["figure"],
            "network": tables.label(row) + tables.scaled(row),
            "bias of the data": row["bias"],
            "gap": row["pair"],
            "paper": f"{row['paper']:+.3f}",
            "ours": f"{row['gap']:+.3f} [{row['ci_low']:+.3f}, {row['ci_high']:+.3f}]",
            "difference": f"{row['difference']:+.3f}",
            "sign": "same" if row["gap"] * row["paper"] > 0 else "other",
            "verdict": row["verdict"],
            "iterations": row["iteration"],
        }
        for row in rows.to_dict("records")
    ]
    return pd.DataFrame(told)
