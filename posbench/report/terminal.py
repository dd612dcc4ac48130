"""What a run prints at its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from posbench.report import tables
from posbench.report.folder import read_csv, read_json
from posbench.report.page import cut_prompts, said
from posbench.report.paper import reference_table, reference_text, with_subsets
from posbench.report.text import applied, short
from posbench.stats.frames import metric_name

WIDE = 120
"""Columns of a terminal from which on verdicts stand beside their statistics."""
FEW = 24
"""Subsets and averages up to which the terminal shows them all."""


def show(folder: Path, console: Console) -> None:
    """Print what a run folder says: the table, the result in words, and where the page is."""
    metrics = read_csv(folder / "metrics.csv")
    if metrics is not None:
        console.print(summary_table(metrics))
        subsets = read_csv(folder / "subsets.csv")
        if subsets is not None:
            # Dozens of subjects belong into the report; the terminal shows few subsets, or the averages.
            few = subsets["subset"].nunique() <= FEW
            print_table(console, *tables.subset_table(subsets, "" if few else "average"))
        others = tables.other_scores(metrics)
        if len(others):
            print_table(console, *tables.subset_table(others, own=""))
        console.print(said(metrics))
        method = read_json(folder / "method.json") or {}
        if len(method) > 1:
            console.print(f"as applied: {applied(method)}")
        if cut_prompts(folder):
            console.print(cut_prompts(folder))
        show_reference(with_subsets(metrics, subsets), folder, console)
    show_findings(folder, console)
    page = folder / "report.html"
    console.print(f"report: {page}" if page.is_file() else f"run: {folder}", soft_wrap=True)


def summary_table(metrics: pd.DataFrame) -> Table:
    """The table a run ends with, at most 100 columns wide for up to two methods: scores and differences by
    position."""
    header, rows = tables.position_table(metrics)
    title = ", ".join(str(metrics[c].iloc[0]) for c in ("model", "task") if metrics[c].nunique() == 1)
    caption = f"{metric_name(metrics)} in %, difference in points, [95 % interval]"
    table = Table(title=Text(title), caption=caption)
    for name in header:
        table.add_column(Text(name), justify="right", overflow="fold")
    tall = len(header) > 5  # several methods: the interval goes below its number
    for index, row in enumerate(rows):
        cells = [Text(short(cell).replace(" [", "\n[") if tall else short(cell)) for cell in row]
        table.add_row(*cells, end_section=index + 2 == len(rows))
    return table


def show_findings(folder: Path, console: Console) -> None:
    """Print the verdicts of a run or a sweep, where it has any."""
    findings = read_csv(folder / "findings.csv")
    if findings is not None:
        header, rows = tables.findings_table(findings)
        # All of it, with the notes, stands in findings.csv and in the report; a narrow terminal holds less.
        wide = console.width >= WIDE
        kept = [header.index(n) for n in ("claim", *(("statistic",) if wide else ()), "value", "verdict")]
        print_table(
            console, [header[i] for i in kept], [[row[i] for i in kept] for row in rows], shorten=False
        )


def show_reference(metrics: pd.DataFrame, folder: Path, console: Console) -> None:
    """Print a paper's numbers beside ours, or why they cannot be compared."""
    facts, reference = read_json(folder / "experiment.json"), read_json(folder / "reference.json") or []
    if facts:
        header, rows = reference_table(metrics, reference)
        console.print(f"{facts['title']}. {reference_text(facts, reference, bool(rows))}".strip())
        if rows:
            print_table(console, header, rows)


def print_table(
    console: Console, header: Sequence[str], rows: Sequence[Sequence[str]], shorten: bool = True
) -> None:
    """Print a table of text."""
    table = Table()
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(short(cell) if shorten else cell for cell in row))
    console.print(table)
