"""Run the study of a config: its tables, and its verdicts on the paper's claims."""

from __future__ import annotations

from contextlib import nullcontext

from posbench.errors import UserError
from posbench.files.atomic import write_csv
from posbench.pipeline.config import Config
from posbench.report.folder import study_tables
from posbench.run.base import Run
from posbench.run.folder import STUDY_STAGE
from posbench.stats.findings import Finding, findings_table


def run(config: Config, run: Run) -> None:
    """Run the study: write one CSV for each table, ``study.json`` with their names, and ``findings.csv``.

    A study that does not apply methods itself runs inside the method of the config.
    """
    study = config.study
    assert study is not None
    runs_inside_method = (
        study.needs_model and not study.uses_method and run.model.in_process
    )
    with run.method.build().applied(run.lm) if runs_inside_method else nullcontext():
        tables = study.checked_tables(run)
    if config.budget and run.out.stage(STUDY_STAGE).get("stopped"):
        unit, size = config.budget.amount
        run.out.mark(STUDY_STAGE, budget={unit: size})
    for name, table in tables.items():
        write_csv(run.out.path / f"{name}.csv", table)
    # From the written files, like the figures: a verdict never rests on digits that no file holds.
    written = study_tables(run.out.path, list(tables))
    findings = study.findings(written)
    if not all(isinstance(finding, Finding) for finding in findings):
        hint = f"correct findings() of {type(study).__name__}"
        allowed = f"a list of {Finding.__name__}"
        raise UserError("study: findings", findings, allowed, hint)
    if findings:
        model = run.model.name if study.needs_model else ""
        write_csv(run.out.path / "findings.csv", findings_table(findings, model))
    facts = {"study": config.study_name, "tables": list(tables)}
    run.out.write_json("study.json", facts)
