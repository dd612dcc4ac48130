"""The files of a run or a sweep as tables; reads folders, never models."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from posbench.errors import UserError
from posbench.late import pd
from posbench.run.folder import JOBS
from posbench.stats.findings import COLUMNS as FINDINGS
from posbench.stats.scores import COLUMNS as METRICS
from posbench.stats.scores import SUBSET_COLUMNS

CAPTIONS = "captions.json"
"""Captions of the figures beside them, by file name."""
TEXT_COLUMNS = {
    "run",
    "model",
    "method",
    "task",
    "gold_position",
    "metric",
    "channel",
    "site",
}
TEXT_COLUMNS |= {"kind", "claim", "statistic", "verdict", "note"}
ATTENTION = ("model", "method", "task", "gold_position", "layer", "item", "attention")
TREND = ("group", "axis", "statistic", "number", "value", "ci_low", "ci_high", "n")
"""Columns of ``trend.csv``: a statistic at one ``number`` of the swept key, ``none`` when unmodified."""
NEEDED = {
    **dict.fromkeys(("metrics", "summary"), tuple(c for c in METRICS if c != "note")),
    **dict.fromkeys(("subsets", "subsets_summary"), SUBSET_COLUMNS),
    **dict.fromkeys(("attention", "attention_summary"), ATTENTION),
    **{"findings": FINDINGS, "trend": TREND},
}
"""Columns that a table must have; tables of searches and studies are read by their own modules."""


def read_csv(path: Path) -> pd.DataFrame | None:
    """A CSV whose text (`none`, `null`) stays text; None if absent or without rows. Raises `UserError` where
    it cannot be read or lacks a column."""
    needed = NEEDED.get(path.stem, ())

    def parse(path: Path) -> pd.DataFrame:
        with open(path, encoding="utf-8", newline="") as file:
            header = next(csv.reader(file), [])
        names = [
            f"{c}.{header[:i].count(c)}" if c in header[:i] else c
            for i, c in enumerate(header)
        ]
        missing = [c for c in needed if c not in names]
        if missing:
            raise ValueError(f"columns missing: {', '.join(missing)}")
        text = {c: str for c in names if c.removesuffix(".1") in TEXT_COLUMNS}
        if "metric" not in names:
            text.pop("gold_position", None)  # always an index there, never ``all``
        # A swept `method` stands before the `method` of the metrics: pandas calls the later one `method.1`.
        twice = [
            c.removesuffix(".1")
            for c in names
            if c.endswith(".1") and c.removesuffix(".1") in names
        ]
        swept = {c: f"{c} (swept)" for c in twice} | {f"{c}.1": c for c in twice}
        return _plain_csv(path, dtype=text).rename(columns=swept)

    frame = read(
        path,
        parse,
        f"a CSV with {', '.join(needed)}" if needed else "a CSV as posbench writes it",
    )
    return None if frame is None or frame.empty else frame


def study_tables(folder: Path, names: Sequence[str]) -> dict[str, pd.DataFrame]:
    """The tables of a study as its files hold them; text such as ``none`` stays text."""
    return {
        name: read(folder / f"{name}.csv", _plain_csv, "a CSV as posbench writes it")
        for name in names
    }


def _plain_csv(path: Path, **options: Any) -> pd.DataFrame:
    return pd.read_csv(path, keep_default_na=False, na_values=["", "nan"], **options)


def runs_of(sweep: Path) -> list[Path]:
    """Folders of a sweep's finished jobs, wherever the outputs lie now; none of a run."""
    made = [
        Path(job["folder"]) for job in read_json(sweep / JOBS) or () if job["folder"]
    ]
    suites = {run.parents[1].name for run in made}
    # The tasks of a sweep over tasks have folders of their own; one folder may have got another name.
    tops = {
        name: sweep.parents[2] / name if len(suites) > 1 else sweep.parents[1]
        for name in suites
    }
    return [tops[run.parents[1].name] / run.parent.name / run.name for run in made]


def read_text(path: Path) -> str:
    """A text file's content; empty where there is none."""
    return read(path, lambda p: p.read_text(encoding="utf-8"), "UTF-8 text") or ""


def read_json(path: Path) -> Any:
    """A JSON file's content; None where there is none."""
    return read(
        path,
        lambda p: json.loads(p.read_text(encoding="utf-8")),
        "JSON as posbench writes it",
    )


def read(path: Path, parse: Callable[[Path], Any], allowed: str) -> Any:
    """A file's parsed content, None where there is no file; `UserError` where it cannot be parsed."""
    try:
        return parse(path) if path.is_file() else None
    except (
        ValueError,
        csv.Error,
        yaml.YAMLError,
    ) as error:  # of pandas, json, Unicode: the first
        raise unreadable(path, error, allowed) from error


def unreadable(path: Path, error: Exception, allowed: str) -> UserError:
    """The error of a file that cannot be read."""
    return UserError(
        path.name, str(path), allowed, f"repeat the run that wrote it ({error})"
    )


def need_place(out: Path, ours: bool, what: str) -> None:
    """Refuse a place for a new folder where something stands that is not ours to replace."""
    if out.exists() and not ours and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            "--out",
            str(out),
            f"a new folder, or a {what} to replace",
            "name another folder",
        )


def need_folder(folder: Path, allowed: str, *names: str) -> None:
    """Raise `UserError` for a folder that holds none of these files."""
    if not any((folder / name).is_file() for name in names):
        found = "posbench prints the folder of each run"
        hint = found if folder.is_dir() else "no such folder; check the path"
        raise UserError("DIR", str(folder), allowed, hint)
