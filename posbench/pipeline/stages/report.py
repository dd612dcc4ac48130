"""Draw the figures and write report.html."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posbench.pipeline.config import Config
from posbench.report.folder import read_json
from posbench.report.page import render_run
from posbench.run.base import Run
from posbench.run.folder import as_json


def run(config: Config, run: Run) -> None:
    """Render the run folder; reads files only."""
    for name, content in _files_of_paper(config).items():
        run.out.write_json(name, content)
    render_run(run.out.path)


def is_current(config: Config, folder: Path) -> bool:
    """Whether a report has the current claims of its experiment and the current table of the paper."""
    return all(
        read_json(folder / name, Any) == as_json(content)
        for name, content in _files_of_paper(config).items()
    )


def _files_of_paper(config: Config) -> dict[str, Any]:
    """Return the contents of files on the paper that a run reproduces, by file name: its claims, and its numbers.

    It is empty for a run that is no experiment.
    """
    experiment = config.experiment
    if experiment is None:
        return {}
    rows, note = config.reference()
    facts = {
        "title": experiment.title,
        "claims": list(experiment.claims),
        "note": note,
    }
    files: dict[str, Any] = {"experiment.json": facts}
    if experiment.reference:
        files["reference.json"] = rows
    return files
