"""Put the synthetic trainings of a folder together, finished or not: tables, figures, the paper's cells.

``python -m posbench.studies.wu2025.synthetic_results DIR``
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from posbench import paths
from posbench.files.atomic import write_csv, write_text
from posbench.files.markdown import markdown
from posbench.plots.base import save
from posbench.report.tables import findings_table
from posbench.studies.wu2025.synthetic_claims import findings, thresholds
from posbench.studies.wu2025.synthetic_tables import (
    HALF,
    NEAR,
    PAIR_NAMES,
    SETTINGS,
    ZERO,
    beside_paper,
    figures,
    frames,
    label,
    paper_cells,
)
from posbench.studies.wu2025.training import trainings


def condition_table(beside: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """One row per condition: the three gaps, ours with the paper's cell and the verdict."""
    header = [
        "figure",
        "network",
        "bias of the data",
        "std",
        "iterations x seeds",
        "loss",
        *(f"gap {pair}" for pair in PAIR_NAMES),
    ]
    rows = []
    for _, cells in beside.groupby(["figure", *SETTINGS], sort=False):
        one, by_pair = cells.iloc[0], cells.set_index("pair")
        texts = []
        for pair in PAIR_NAMES:
            at = by_pair.loc[pair]
            spread = f", seeds' sd {at['spread']:.3f}" if at["seeds"] > 1 else ""
            texts.append(
                f"{at['gap']:+.3f} [{at['ci_low']:+.3f}, {at['ci_high']:+.3f}]{spread}; paper {at['paper']:+.3f}: "
                f"**{at['verdict']}**"
            )
        vocabulary = ", fixed vocabulary" if one["vocabulary"] == "fixed" else ""
        std = "1/sqrt(D)" if one["scale"] == "paper" else "1/D"
        network, trained = (
            label(one).replace("\n", ", ") + vocabulary,
            f"{one['iteration']:,} x {one['seeds']}",
        )
        rows.append(
            [str(one["figure"]), network, str(one["bias"]), std, trained, f"{one['train_loss']:.2f}", *texts]
        )
    return header, rows


def _differing(beside: pd.DataFrame) -> str:
    """Conditions with a cell that differs from the paper's, in words."""
    rows = beside[beside["verdict"] == "differs"]
    where = [
        f"Figure {row['figure']}, {label(row).replace(chr(10), ', ')}{', std 1/D' if row['scale'] == 'code' else ''} "
        f"({row['iteration']:,} iterations)"
        for row in rows.to_dict("records")
    ]
    return "; ".join(dict.fromkeys(where)) or "none"


def page(
    gaps: pd.DataFrame, sinks: pd.DataFrame, beside: pd.DataFrame, missing: int, drawn: Mapping[str, str]
) -> str:
    """The page of results as Markdown.

    Args:
        gaps: All measured gaps.
        sinks: All measured sinks.
        beside: Rows of `beside_paper`.
        missing: Cells of the paper whose condition was not trained.
        drawn: Captions of the figures, by file name without suffix.
    """
    counts = beside["verdict"].value_counts()
    said = ", ".join(
        f"{counts.get(verdict, 0)} {verdict}" for verdict in ("agrees", "same sign", "differs", "not learned")
    )
    held = pd.DataFrame([vars(finding) for finding in findings(gaps, sinks)])
    limits = thresholds(gaps)
    text = [
        "# Trained attention networks beside Wu et al. 2025",
        "Written by `python -m posbench.studies.wu2025.synthetic_results DIR` from a folder of trainings; every seed and iteration is "
        "in [wu2025_gaps.csv](wu2025_gaps.csv) and [wu2025_sinks.csv](wu2025_sinks.csv). "
        f"{gaps.groupby([*SETTINGS, 'seed']).ngroups} trainings on {'; '.join(gaps['hardware'].unique())}.",
        f"A gap is accuracy [a, b] - [b, a] on {gaps['n'].max():,} paired test sequences of new classes a set; FM, FL, ML are "
        "first-middle, first-last, middle-last; above 0 the earlier item wins. Intervals: 95 % over test sequences, for these "
        "networks; another seed moves a gap further (sd about 0.04 on biased data). The paper's cells are means of five "
        "trainings of 100,000 iterations, printed without intervals. **agrees**: within "
        f"{NEAR} of the paper; **same sign**: both beyond {ZERO} on one side; **differs**: else; **not learned**: a "
        "training loss (nats, column loss) within a tenth of guessing. Trainings shorter than the paper's are compared as they "
        "are: a difference there may be one of iterations.",
        f"Copying by position alone gives gaps of {2 * HALF:.3f} (always one item) or {HALF:.3f} (two items in turn).",
        "## The paper's cells",
        f"{len(beside)} cells: {said}. {missing} further cells were not trained. Std 1/sqrt(D) is the text's data, 1/D what the "
        "official code draws.",
        f"Not reproduced so far: {_differing(beside)}.",
        markdown(*condition_table(beside)),
        "## The paper's claims",
        markdown(*findings_table(held)),
        "## Thresholds",
        "What an independent re-implementation reached. Measured: FM / FL / ML of each seed at its last iteration in the range.",
        markdown(list(limits.columns), limits.to_numpy().tolist()),
        "## Figures",
        *(f"![{caption}]({name}.png)\n\n*{caption}*" for name, caption in drawn.items()),
    ]
    return "\n\n".join(text) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Put the trainings of a folder together, finished or not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path, help="folder of trainings (study.trainings)")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args(argv)
    measured = [(condition, row) for condition, rows in trainings(options.dir) for row in rows]
    if not measured:
        parser.error(f"{options.dir} holds no training with a measured iteration")
    gaps, sinks = frames(measured)
    files = sorted(
        (file.name for file in (paths.EXPERIMENTS / "reference").glob("wu2025_fig*.csv")), key=_figure_number
    )
    beside = beside_paper(gaps, files)
    cells = sum(len(paper_cells(file)) for file in files)
    trained = beside.drop(columns="scale").drop_duplicates(
        ["figure", *(c for c in SETTINGS if c != "scale"), "pair"]
    )
    options.out.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for name, (figure, caption) in figures(gaps, sinks, beside).items():
        save(figure, options.out / f"wu2025_{name}")
        drawn[f"wu2025_{name}"] = caption
    write_csv(options.out / "wu2025_gaps.csv", gaps)
    write_csv(options.out / "wu2025_sinks.csv", sinks)
    write_text(options.out / "wu2025.md", page(gaps, sinks, beside, cells - len(trained), drawn))


def _figure_number(file: str) -> int:
    return int(file.removeprefix("wu2025_fig").removesuffix(".csv"))


if __name__ == "__main__":
    main()
