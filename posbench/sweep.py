"""What a multirun leaves behind: one table over its runs and one figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from posbench import report, tables
from posbench.metrics import COLUMNS
from posbench.record import digest, write_csv, write_text
from posbench.stages.report import show_reference


def summarise(jobs: Sequence[dict[str, Any]], console: Console) -> Path | None:
    """Collect the finished runs of a multirun into ``sweep__<axes>__<hash>/`` beside them.

    Args:
        jobs: Per job its ``overrides`` (list of ``key=value``), run ``folder`` (None if it failed) and exit ``status``.
        console: Where the table goes.

    Returns:
        The sweep folder, or None when no job finished.
    """
    settings = [dict(o.split("=", 1) for o in job["overrides"] if "=" in o) for job in jobs]
    varied = [k for k in dict.fromkeys(k for s in settings for k in s) if len({s.get(k) for s in settings}) > 1]
    axes = [axis for axis in varied if axis not in COLUMNS]  # model, method and task are columns of every table already
    finished = [(s, Path(job["folder"])) for s, job in zip(settings, jobs, strict=True) if job["folder"]]
    for setting, job in zip(settings, jobs, strict=True):
        if not job["folder"]:
            console.print(f"failed: {' '.join(f'{k}={v}' for k, v in setting.items())} (exit status {job['status']})")
    if not finished:
        return None
    first = finished[0][1]
    name = "_".join(a.replace(".", "-").replace("/", "-") for a in varied) or "runs"
    folder = first.parent / f"sweep__{name}__{digest([str(p) for _, p in finished])}"
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for file, out in (("metrics.csv", "summary.csv"), ("attention.csv", "attention_summary.csv")):
        # Runs of different tasks may share a folder name, in different versions.
        frames = [
            _labelled(path / file, f"{path.parent.name}/{path.name}", setting, axes)
            for setting, path in finished
            if (path / file).is_file()
        ]
        if frames:
            write_csv(folder / out, pd.concat(frames, ignore_index=True))
    # A run in another setting than the paper's has an empty reference; another of the grid may have the numbers.
    told = max((path for _, path in finished), key=lambda path: _size(path / "reference.json"))
    for file in ("experiment.json", "reference.json"):
        if (told / file).is_file():
            write_text(folder / file, (told / file).read_text())
    write_text(folder / "jobs.json", json.dumps(list(jobs), indent=2) + "\n")
    if (folder / "summary.csv").is_file():
        summary = report.read_csv(folder / "summary.csv")
        if summary is not None:
            header, rows, sentence = tables.sweep_table(summary, tables.swept_columns(summary))
            table = Table(*header[:-1], caption="average over gold positions in %, difference in points, [95 % interval]")
            for row in rows:
                table.add_row(*map(tables.short, row[:-1]))
            console.print(table)
            console.print(sentence)
            show_reference(summary, folder, console)
        console.print(f"sweep: {report.render_sweep(folder)}", soft_wrap=True)
    return folder


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def _labelled(file: Path, run: str, setting: dict[str, str], axes: Sequence[str]) -> pd.DataFrame:
    frame = pd.read_csv(file, dtype=str, keep_default_na=False)
    labels = pd.DataFrame([{"run": run, **{axis: setting.get(axis) for axis in axes}}] * len(frame))
    return pd.concat([labels, frame], axis=1)
