"""Draw the figures, write report.html, print the table."""

from __future__ import annotations

from posbench.pipeline.config import Config
from posbench.report.page import render_run
from posbench.report.terminal import show_run
from posbench.run.base import Run

__all__ = ["run", "show_run"]


def run(config: Config, run: Run) -> None:
    """Render the run folder; reads files only."""
    experiment = config.experiment
    if experiment:
        rows, note = config.reference()
        facts = {
            "title": experiment.title,
            "claims": list(experiment.claims),
            "note": note,
        }
        if experiment.reference:
            run.out.write_json("reference.json", rows)
        run.out.write_json("experiment.json", facts)
    render_run(run.out.path)
    show_run(run.out.path, run.console)
