"""Which runs are shown of a folder that holds many, and what they say; reads folders, never models."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from posbench import paths
from posbench.late import pd
from posbench.report import tables
from posbench.report.folder import CAPTIONS, read_csv, read_json, runs_of
from posbench.report.page import measured
from posbench.report.paper import cells, counted, paper_table, with_subsets
from posbench.report.sweep import axes_of, sweep_table
from posbench.report.tables import Table
from posbench.report.text import decided, headline
from posbench.run.folder import (
    CONFIG,
    JOBS,
    MANIFEST,
    PROVENANCE,
    RunDir,
    opened,
    runs_in,
)

MOST = 24
"""Runs of no sweep that are shown of an experiment, the newest."""


@dataclass(frozen=True)
class Part:
    """A run or a sweep that is shown, under a name that no other of its experiment has."""

    folder: Path
    label: str

    @cached_property
    def figures(self) -> dict[str, str]:
        """Caption of each figure by its file name without the ending, in the order of the run's page."""
        said = read_json(self.folder / "figures" / CAPTIONS) or {}
        drawn = sorted(file.stem for file in (self.folder / "figures").glob("*.png"))
        return {
            name: str(said.get(name, ""))
            for name in sorted(drawn, key=[*said, *drawn].index)
        }

    @property
    def swept(self) -> bool:
        """Whether it is a sweep."""
        return (self.folder / JOBS).is_file()

    def tables(self, *names: str) -> list[pd.DataFrame]:
        """Those of its tables that there are, behind the run that each row is of."""
        found = [
            frame
            for name in names
            if (frame := read_csv(self.folder / f"{name}.csv")) is not None
        ]
        return [
            f if "run" in f else pd.concat([_column(f, self.label), f], axis=1)
            for f in found
        ]

    @cached_property
    def metrics(self) -> list[pd.DataFrame]:
        """Its scores, one table or none."""
        return self.tables("summary" if self.swept else "metrics")

    def scored(self, metrics: pd.DataFrame) -> tuple[pd.DataFrame, str]:
        """Its scores as a reader wants them, and in words."""
        if not self.swept:
            header, rows = tables.position_table(metrics)
            lines = pd.DataFrame(rows, columns=header)
            return pd.concat([_column(lines, self.label), lines], axis=1), headline(
                metrics
            )
        header, rows, sentence = sweep_table(metrics, axes_of(metrics))
        return pd.DataFrame(rows, columns=header).drop(
            columns="run", errors="ignore"
        ), sentence


@dataclass
class Entry:
    """An experiment, or a suite of runs without one: its runs that are shown, and those that cannot be."""

    name: str
    parts: list[Part] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @cached_property
    def runs(self) -> list[RunDir]:
        """The single runs behind the parts."""
        every = (
            runs_of(part.folder) if part.swept else [part.folder] for part in self.parts
        )
        return [
            opened(run) for runs in every for run in runs if (run / CONFIG).is_file()
        ]

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """What the experiment says of itself: title, paper, covers, claims; empty where there is none."""
        file = paths.EXPERIMENTS / f"{self.name}.yaml"
        known = (
            yaml.safe_load(file.read_text()) if file.is_file() and not self.runs else {}
        )
        return next((run.config() for run in self.runs), known).get("experiment") or {}

    @property
    def command(self) -> str:
        """The command that makes the first part."""
        return _command(opened(self.parts[0].folder)) if self.parts else ""

    @property
    def seconds(self) -> float | None:
        """Wall time of all its runs, sessions added up; None where a run of an older version has none."""
        found = [run.status().get("seconds") for run in self.runs]
        known = [float(seconds) for seconds in found if seconds is not None]
        return sum(known) if len(known) == len(found) else None

    @cached_property
    def made(self) -> str:
        """Models, versions, hardware and dates of the runs, in one line."""
        models = dict.fromkeys(
            (run.config().get("model") or {}).get("name") for run in self.runs
        )
        facts = [known for run in self.runs if (known := run.facts(PROVENANCE))]
        parts = [", ".join(filter(None, models))]
        for known in facts:
            packages = {"posbench": known.get("posbench"), **known.get("packages", {})}
            named = (
                (name, packages.get(name))
                for name in ("posbench", "torch", "transformers")
            )
            parts.append(
                ", ".join(f"{name} {version}" for name, version in named if version)
            )
        parts += [str(known.get("hardware", "")) for known in facts]
        days = sorted(str(known.get("started", ""))[:10] for known in facts)
        parts.append(" to ".join(dict.fromkeys(filter(None, [*days[:1], *days[-1:]]))))
        return "; ".join(dict.fromkeys(filter(None, parts)))

    @cached_property
    def cells(self) -> pd.DataFrame:
        """The paper's cells that were measured, as :func:`posbench.report.paper.cells` has them."""
        found = []
        for part in self.parts:
            subsets = part.tables("subsets_summary" if part.swept else "subsets")
            whole = [
                with_subsets(frame, next(iter(subsets), None)) for frame in part.metrics
            ]
            reference = read_json(part.folder / "reference.json") or []
            found += [cells(frame, reference)[0] for frame in whole if reference]
        return _joined(found)

    @cached_property
    def findings(self) -> pd.DataFrame:
        """All findings; what a sweep shows itself comes before those of its runs."""
        return _joined(
            [
                f
                for part in self.parts
                for f in part.tables("findings", "findings_summary")
            ]
        )

    @cached_property
    def scored(self) -> list[tuple[pd.DataFrame, str]]:
        """The scores of each part that has some, see :meth:`Part.scored`."""
        return [part.scored(metrics) for part in self.parts for metrics in part.metrics]

    @property
    def seen(self) -> str:
        """What we see, in words, all of it from the runs' own numbers."""
        labels = [part.label for part in self.parts for _ in part.metrics]
        fronts = [f"{label}: " if len(self.parts) > 1 else "" for label in labels]
        said = [
            front + words for front, (_, words) in zip(fronts, self.scored, strict=True)
        ]
        said += [decided(self.findings)] if len(self.findings) else []
        said += [counted(self.cells)] if len(self.cells) else []
        fronts = [
            f"{part.label}: " if len(self.parts) > 1 else "" for part in self.parts
        ]
        found = [
            (front, measured(part.folder))
            for front, part in zip(fronts, self.parts, strict=True)
        ]
        return " ".join(said or [front + words for front, words in found if words])

    @property
    def tables(self) -> dict[str, tuple[pd.DataFrame, Table]]:
        """Its tables, each with a row per number and as a reader wants it; the first is the paper's where
        there is one, else the claims, else the scores."""
        found: dict[str, tuple[pd.DataFrame, Table]] = {}
        if len(self.cells):
            found["cells"] = self.cells, paper_table(self.cells)
        if len(self.findings):
            found["claims"] = (
                self.findings,
                tables.findings_table(self.findings, models=True),
            )
        if self.scored:
            lines = _joined([lines for lines, _ in self.scored]).fillna("")
            own = _joined([metrics for part in self.parts for metrics in part.metrics])
            found["scores"] = own, (list(lines), lines.to_numpy().tolist())
        return found


def _joined(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _column(frame: pd.DataFrame, label: str) -> pd.Series:
    return pd.Series(label, index=frame.index, name="run")


def collect(folder: Path) -> list[Entry]:
    """The newest runs of each experiment in an outputs folder, an experiment's, or one version's.

    Of each experiment: the newest version that has a whole run; there the newest sweep with a page, else the
    runs of the newest sweep, else its newest runs. Damaged and unfinished ones are named and left out.
    """
    suites: dict[str, list[Path]] = {}
    for found in runs_in(folder):
        suites.setdefault(found.parents[1].name, []).append(found)
    return [_entry(name, suites[name]) for name in sorted(suites, key=_natural)]


def _natural(name: str) -> list[Any]:
    """Order in which fig2 comes before fig10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _entry(name: str, folders: Sequence[Path]) -> Entry:
    number = {folder: int(folder.parent.name[1:]) for folder in folders}
    sweeps = {
        folder: runs_of(folder) for folder in folders if (folder / JOBS).is_file()
    }
    said = list[str]()
    entry = Entry(name)
    for version in sorted(
        set(number.values()), reverse=True
    ):  # older ones are not even looked at
        reach = (f for f, runs in sweeps.items() if version in map(number.get, runs))
        there = dict.fromkeys([*(f for f in folders if number[f] == version), *reach])
        entry = _newest(name, list(there), sweeps)
        said += entry.faults
        if entry.parts:
            break
    return Entry(name, entry.parts, list(dict.fromkeys(said)))


def _newest(
    name: str, folders: Sequence[Path], sweeps: Mapping[Path, Sequence[Path]]
) -> Entry:
    """What is shown of one version; only that is checked in every file."""
    faults = {folder: _fault(folder, (CONFIG,)) for folder in folders}

    def whole(folder: Path) -> bool:
        faults[folder] = faults.get(folder) or _fault(folder)
        return not faults[folder]

    newest = sorted(
        sweeps.keys() & faults, key=lambda f: (f / JOBS).stat().st_mtime, reverse=True
    )
    sweep = next(filter(whole, newest), None)
    left = 0
    if sweep:
        runs = [run for run in sweeps[sweep] if (run / CONFIG).is_file()]
        faults |= {run: _fault(run, (CONFIG,)) for run in runs if run not in faults}
        drawn = any((sweep / "figures").glob("*.png"))
        chosen = [sweep] if drawn else [*filter(whole, runs)]
    else:
        runs = [
            folder for folder in folders if folder not in sweeps and not faults[folder]
        ]
        latest = sorted(
            runs,
            key=lambda f: str(opened(f).facts(PROVENANCE).get("started", "")),
            reverse=True,
        )
        chosen = sorted(itertools.islice(filter(whole, latest), MOST))
        left = sum(not faults[run] for run in runs) - len(chosen)
    jobs = read_json(sweep / JOBS) if sweep else []
    said = [fault for fault in faults.values() if fault]
    failed = [job for job in jobs if not job["folder"]]
    said += [
        f"failed: {' '.join(job['overrides'])} (exit status {job['status']})"
        for job in failed
    ]
    said += (
        [f"{left} older runs of {name} are left out: posbench ls runs"] if left else []
    )
    return Entry(name, _labelled(chosen, jobs), said)


def _fault(folder: Path, only: Sequence[str] | None = None) -> str:
    """Why a run cannot be shown: it is unfinished or damaged, looking at ``only`` these files; else empty."""
    run = opened(folder)
    name = f"{folder.parent.name}/{folder.name}"
    again = _command(run) or "the command that made it"
    if not run.done:
        error = run.status().get("error")
        return (
            f"{name} is unfinished{f' ({error})' if error else ''}; go on with: {again}"
        )
    damaged = run.damaged(only)
    return (
        f"{name} is damaged ({', '.join(damaged[:4])}); make it again: {again}"
        if damaged
        else ""
    )


def _command(run: RunDir) -> str:
    return str((run.facts(MANIFEST) or run.facts(PROVENANCE)).get("command", ""))


def _labelled(folders: Sequence[Path], jobs: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Parts by model, or by study where no model takes part; where these are not unique, with what a sweep
    varies, or by folder name."""
    names = [folder.name.split("__")[0] for folder in folders]
    own = {Path(job["folder"]).name: job["overrides"] for job in jobs if job["folder"]}
    same = set.intersection(*map(set, own.values())) if own else set()
    out = []
    for folder, name in zip(folders, names, strict=True):
        varied = [
            o
            for o in own.get(folder.name, ())
            if o not in same and o != f"model={name}"
        ]
        full = "-".join(
            [name, *(re.sub(r"[^\w.-]+", "_", o.split(".", 1)[-1]) for o in varied)]
        )
        out.append(
            Part(
                folder,
                name if names.count(name) == 1 else full if varied else folder.name,
            )
        )
    return out
