"""Run the study of a config: its tables, and its verdicts on the paper's claims."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict

import pandas as pd

from posbench.files.atomic import write_csv
from posbench.report import page as report
from posbench.run.base import Run
from posbench.studies.base import FINDING_COLUMNS


def run(run: Run) -> None:
    """Measure, and write one CSV for each table, ``study.json`` with their names, and ``findings.csv``.

    A study that does not apply methods itself runs inside the method of the config.
    """
    study = run.config.study
    assert study is not None
    inside = study.needs_model and not study.uses_method
    with run.config.method(run.found).applied(run.lm) if inside else nullcontext():
        tables = study.measure(run)
    for name, frame in tables.items():
        write_csv(run.out.path / f"{name}.csv", frame)
    # From what was written, as the figures are: a verdict never rests on digits that no file holds.
    found = study.findings(report.study_tables(run.out.path, list(tables)))
    rows = [
        {"model": run.config.model.name if study.needs_model else "", **asdict(finding)} for finding in found
    ]
    if rows:
        write_csv(run.out.path / "findings.csv", pd.DataFrame(rows, columns=list(FINDING_COLUMNS)))
    run.out.write_json("study.json", {"study": run.config.study_name, "tables": list(tables)})
