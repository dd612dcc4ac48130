"""Draw the figures, write report.html, print the table."""

from __future__ import annotations

import pandas as pd

from posbench import report
from posbench.stages.base import Run


def run(run: Run) -> None:
    """Render the run folder; reads files only."""
    page = report.render_run(run.out.path)
    table = run.out.path / "metrics.csv"
    if table.is_file():
        run.console.print(report.summary_table(pd.read_csv(table, dtype={"position": str})))
    run.console.print(f"report: {page}")
