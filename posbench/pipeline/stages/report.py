"""Draw the figures, write report.html, print the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from posbench.report import page as report
from posbench.report import tables
from posbench.run.base import Run

WIDE = 120
"""Columns of a terminal from which on verdicts stand beside their statistics."""
FEW = 24
"""Subsets and averages up to which the terminal shows them all."""


def run(run: Run) -> None:
    """Render the run folder; reads files only."""
    experiment = run.config.experiment
    if experiment:
        facts = {"title": experiment.title, "claims": list(experiment.claims), "note": ""}
        reference = experiment.reference
        if reference:
            rows = [row for row in reference.rows() if row["task"] == run.config.task.name]
            other = [
                f"{k}={getattr(run.config.task, k, None)} (paper {v})"
                for k, v in reference.setting.items()
                if getattr(run.config.task, k, None) != v
            ]
            if other:
                facts["note"] = f"This run has {', '.join(other)}: the paper's numbers do not apply to it."
            run.out.write_json("reference.json", [] if other else rows)
        run.out.write_json("experiment.json", facts)
    report.render_run(run.out.path)
    show(run.out.path, run.console)


def show(folder: Path, console: Console) -> None:
    """Print what a run folder says: the table, the result in words, and where the page is."""
    metrics = report.read_csv(folder / "metrics.csv")
    if metrics is not None:
        console.print(tables.summary_table(metrics))
        subsets = report.read_csv(folder / "subsets.csv")
        if subsets is not None:
            # Dozens of subjects belong into the report; the terminal shows few subsets, or the averages.
            few = subsets["subset"].nunique() <= FEW
            _print(console, *tables.subset_table(subsets, "" if few else "average"))
        others = tables.other_scores(metrics)
        if len(others):
            _print(console, *tables.subset_table(others, own=""))
        console.print(tables.headline(metrics))
        method = _json(folder / "method.json") or {}
        if len(method) > 1:
            console.print(f"as applied: {tables.applied(method)}")
        if report.shortened(folder):
            console.print(report.shortened(folder))
        show_reference(tables.with_subsets(metrics, subsets), folder, console)
    show_findings(folder, console)
    page = folder / "report.html"
    console.print(f"report: {page}" if page.is_file() else f"run: {folder}", soft_wrap=True)


def show_findings(folder: Path, console: Console) -> None:
    """Print the verdicts of a run or a sweep, where it has any."""
    findings = report.read_csv(folder / "findings.csv")
    if findings is not None:
        header, rows = tables.findings_table(findings)
        # All of it, with the notes, stands in findings.csv and in the report; a narrow terminal holds less.
        shown = (
            ("claim", "statistic", "value", "verdict")
            if console.width >= WIDE
            else ("claim", "value", "verdict")
        )
        kept = [header.index(name) for name in shown]
        _print(console, [header[i] for i in kept], [[row[i] for i in kept] for row in rows], shorten=False)


def _print(console: Console, header: list[str], rows: list[list[str]], shorten: bool = True) -> None:
    table = Table()
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(tables.short(cell) if shorten else cell for cell in row))
    console.print(table)


def show_reference(metrics: pd.DataFrame, folder: Path, console: Console) -> None:
    """Print a paper's numbers beside ours, or why they cannot be compared."""
    facts, reference = _json(folder / "experiment.json"), _json(folder / "reference.json") or []
    if not facts:
        return
    header, rows = tables.reference_table(metrics, reference)
    console.print(f"{facts['title']}. {tables.reference_text(facts, reference, bool(rows))}".strip())
    if rows:
        _print(console, header, rows)


def _json(file: Path) -> Any:
    return json.loads(file.read_text()) if file.is_file() else None
