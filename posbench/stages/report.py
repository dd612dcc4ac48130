"""Draw the figures, write report.html, print the table."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from posbench import report, tables
from posbench.stages.base import Run


def run(run: Run) -> None:
    """Render the run folder; reads files only."""
    experiment = run.config.experiment
    if experiment and experiment.reference:
        run.out.write_json("reference.json", experiment.reference.rows())
    report.render_run(run.out.path)
    show(run.out.path, run.console)


def show(folder: Path, console: Console) -> None:
    """Print what a run folder says: the table, the result in words, and where the page is."""
    metrics = report.read_csv(folder / "metrics.csv")
    if metrics is not None:
        console.print(tables.summary_table(metrics))
        console.print(tables.headline(metrics))
    page = folder / "report.html"
    console.print(f"report: {page}" if page.is_file() else f"run: {folder}", soft_wrap=True)
