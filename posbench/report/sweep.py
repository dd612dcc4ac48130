"""What a multirun leaves behind: one table over its runs and one figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from posbench.files.atomic import digest, write_csv, write_text
from posbench.pipeline.stages.report import show_findings, show_reference
from posbench.report import page as report
from posbench.report import tables
from posbench.report.trend import trends
from posbench.stats.tables import COLUMNS


def summarise(jobs: Sequence[dict[str, Any]], console: Console) -> Path | None:
    """Collect the finished runs of a multirun into ``sweep__<axes>__<hash>/`` beside them.

    Args:
        jobs: Per job its ``overrides`` (list of ``key=value``), run ``folder`` (None if it failed) and exit
            ``status``.
        console: Where the table goes.

    Returns:
        The sweep folder, or None when no job finished.
    """
    settings = [dict(o.split("=", 1) for o in job["overrides"] if "=" in o) for job in jobs]
    varied = [
        k for k in dict.fromkeys(k for s in settings for k in s) if len({s.get(k) for s in settings}) > 1
    ]
    axes = [
        axis for axis in varied if axis not in COLUMNS
    ]  # model, method and task are columns of every table already
    finished = [(s, Path(job["folder"])) for s, job in zip(settings, jobs, strict=True) if job["folder"]]
    for setting, job in zip(settings, jobs, strict=True):
        if not job["folder"]:
            console.print(
                f"failed: {' '.join(f'{k}={v}' for k, v in setting.items())} (exit status {job['status']})"
            )
    if not finished:
        return None
    first = finished[0][1]
    name = "_".join(a.replace(".", "-").replace("/", "-") for a in varied) or "runs"
    folder = first.parent / f"sweep__{name}__{digest([str(p) for _, p in finished])}"
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"metrics.csv": "summary.csv"} | {
        f"{n}.csv": f"{n}_summary.csv" for n in ("attention", "subsets", "findings")
    }
    for file, out in kept.items():
        frames = [
            _labelled(path / file, _label(path), setting, axes)
            for setting, path in finished
            if (path / file).is_file()
        ]
        if frames:
            write_csv(folder / out, pd.concat(frames, ignore_index=True))
    _share_experiment(folder, [path for _, path in finished])
    trend, findings = trends(finished, axes)
    if len(trend):
        write_csv(folder / "trend.csv", trend)
        write_csv(folder / "findings.csv", findings)
    write_text(folder / "jobs.json", json.dumps(list(jobs), indent=2) + "\n")
    if (folder / "summary.csv").is_file():
        summary = report.read_csv(folder / "summary.csv")
        if summary is not None:
            header, rows, sentence = tables.sweep_table(summary, tables.swept_columns(summary))
            table = Table(
                *header[:-1],
                caption="average over gold positions in %, difference in points, [95 % interval]",
            )
            for row in rows:
                table.add_row(*map(tables.short, row[:-1]))
            console.print(table)
            console.print(sentence)
            show_findings(folder, console)
            show_reference(
                tables.with_subsets(summary, report.read_csv(folder / "subsets_summary.csv")), folder, console
            )
        console.print(f"sweep: {report.render_sweep(folder)}", soft_wrap=True)
    elif (folder / "findings_summary.csv").is_file():
        console.print(f"verdicts of all runs: {folder / 'findings_summary.csv'}", soft_wrap=True)
    return folder


def _share_experiment(folder: Path, runs: Sequence[Path]) -> None:
    """Give the sweep its experiment's title, and each run's own part of the paper's numbers: same model, same
    setting."""
    told = [run for run in runs if (run / "experiment.json").is_file()]
    if not told:
        return
    own: list[dict[str, Any]] = []
    every: list[dict[str, Any]] = []
    for run in told:
        rows = json.loads((run / "reference.json").read_text()) if (run / "reference.json").is_file() else []
        metrics = report.read_csv(run / "metrics.csv")
        models = set() if metrics is None else set(metrics["model"])
        own += [{**row, "run": _label(run)} for row in rows if row["model"] in models]
        every = every or rows
    facts = json.loads((told[0] / "experiment.json").read_text())
    if own:
        facts["note"] = ""  # a run in another setting has no row here
    write_text(folder / "experiment.json", json.dumps(facts, indent=2) + "\n")
    write_text(folder / "reference.json", json.dumps(own or every, indent=2) + "\n")


def _label(run: Path) -> str:
    """Version and name: runs of different tasks may share a folder name, in different versions."""
    return f"{run.parent.name}/{run.name}"


def _labelled(file: Path, run: str, setting: dict[str, str], axes: Sequence[str]) -> pd.DataFrame:
    frame = pd.read_csv(file, dtype=str, keep_default_na=False)
    labels = pd.DataFrame([{"run": run, **{axis: setting.get(axis) for axis in axes}}] * len(frame))
    return pd.concat([labels, frame], axis=1)
