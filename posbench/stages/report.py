"""Draw the figures, write report.html, print the table."""

from __future__ import annotations

from posbench import report, tables
from posbench.stages.base import Run


def run(run: Run) -> None:
    """Render the run folder; reads files only."""
    experiment = run.config.experiment
    if experiment and experiment.reference:
        run.out.write_json("reference.json", experiment.reference.rows())
    page = report.render_run(run.out.path)
    metrics = report.read_csv(run.out.path / "metrics.csv")
    if metrics is not None:
        run.console.print(tables.summary_table(metrics))
        run.console.print(tables.headline(metrics))
    run.console.print(f"report: {page}")
