"""The runs of an outputs folder as a list: what each is, what it measured, how it stands; reads no model."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from posbench.errors import UserError, near
from posbench.files.atomic import canonical
from posbench.late import pd
from posbench.report.console import Record
from posbench.report.tables import cell
from posbench.report.text import tally
from posbench.run.folder import CONFIG, MANIFEST, PROVENANCE, STATUS, opened, runs_in
from posbench.run.lease import in_use
from posbench.run.progress import duration
from posbench.run.shards import is_running
from posbench.stats.findings import columns
from posbench.stats.frames import UNMODIFIED, overall, shown

METRICS = "metrics.csv"
FINDINGS = "findings.csv"
METHOD = "method.json"
GROUPS = ("model", "task", "method", "search", "study", "runtime")
NAMES = GROUPS[:5]
ASIDE = (
    *("runtime.outputs", "runtime.log_every", "runtime.workers", "runtime.cluster"),
    *("model.concurrency", "model.retries", "model.timeout"),
)
"""Settings that move no number."""
MEASURED = {"": "score", "difference": "difference", "position_bias": "position_bias"}
"""Columns of a list by the metric that they hold, as :func:`posbench.stats.frames.of_metric` names it."""


@dataclass(frozen=True)
class Listed:
    """A run folder as it stands; only what is whole of a finished run is told."""

    folder: Path
    state: str  # done, running, killed, failed, incomplete, mixed, damaged
    started: str = ""
    seconds: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    totals: Sequence[Mapping[str, str]] = ()  # its metrics over all gold positions
    verdicts: str = ""

    @classmethod
    def of(cls, folder: Path) -> Listed:
        """Look at a run folder."""
        run = opened(folder)
        config = dict[str, Any]()
        status = run.facts(STATUS)
        started = str(run.facts(PROVENANCE).get("started", ""))
        try:
            whole = not run.damaged((CONFIG, METRICS, FINDINGS, METHOD))
            config = run.config()
            ran = {"method": run.read_json(METHOD)}
        except UserError:
            whole = False
        state = str(status.get("state", "damaged")) if whole else "damaged"
        if state == "running" and not in_use(folder) and not is_running(folder):
            state = "killed"
        if whole and run.done:
            state = (
                "done" if (folder / MANIFEST).is_file() else "done, unchecked"
            )  # of an older version
        seen = cls(folder, state, started, status.get("seconds"), config)
        if not state.startswith("done"):
            return seen
        return replace(seen, config=_found(config, ran), **_measured(folder))

    @property
    def hash(self) -> str:
        """What its folder's name ends with."""
        return self.folder.name.rpartition("__")[2]

    def name(self, group: str) -> str:
        """Name of its model, task, method, search or study; empty where none took part."""
        node = self.config.get(group)
        return str(node.get("name") or "") if isinstance(node, Mapping) else ""

    @property
    def settings(self) -> dict[str, str]:
        """Every setting as one types it, by its dotted key; what a search found stands where it was null."""
        asked = {group: self.config.get(group) for group in GROUPS}
        return {
            key: value for key, value in _leaves(asked, "") if not key.startswith(ASIDE)
        }


def _found(config: Mapping[str, Any], ran: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the values of what ran where it has none."""
    deeper = {
        k: _found(v, ran.get(k) or {})
        for k, v in config.items()
        if isinstance(v, Mapping)
    }
    return {k: ran.get(k) if v is None else v for k, v in config.items()} | deeper


def _measured(folder: Path) -> dict[str, Any]:
    totals = [
        row for row in _rows(folder / METRICS) if row.get("gold_position") == "all"
    ]
    found = pd.DataFrame(_rows(folder / FINDINGS), columns=["kind", "verdict"])
    papers = found[found["kind"] == "paper"]
    return {
        "totals": totals,
        "verdicts": tally((papers if len(papers) else found)["verdict"]),
    }


def _rows(file: Path) -> list[dict[str, str]]:
    if not file.is_file():
        return []
    with open(file, newline="", encoding="utf-8", errors="replace") as stream:
        return list(csv.DictReader(stream))


def _leaves(node: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key not in ("_target_", "name"):
                yield from _leaves(value, f"{where}.{key}".strip("."))
    elif where.count("."):
        yield where, spelled(node)


def spelled(value: Any) -> str:
    """A value as an override spells it; 1.0 as 1."""
    return json.dumps(canonical(value), separators=(",", ":"), default=str).replace(
        '"', ""
    )


def differing(runs: Sequence[Listed]) -> list[dict[str, str]]:
    """Of each run the settings in which it differs from another whose model, task, method, search or study is
    the same."""
    values = dict[tuple[str, str], set[str]]()
    every = [
        {(k, run.name(k.split(".")[0])): value for k, value in run.settings.items()}
        for run in runs
    ]
    for key, value in ((key, value) for own in every for key, value in own.items()):
        values.setdefault(key, set()).add(value)
    return [
        {key[0]: value for key, value in own.items() if len(values[key]) > 1}
        for own in every
    ]


def records(outputs: Path, filters: Sequence[str] = ()) -> list[Record]:
    """The runs of an outputs folder, newest first, as rows of a list.

    ``filters`` are ``column=value`` or ``key=value`` of a setting, where ``*`` stands for anything, and words
    that occur in a row.

    Raises:
        UserError: There is no such folder, or a filter names nothing.
    """
    if not outputs.is_dir():
        hint = "make a first run: posbench; or name other outputs: --outputs DIR"
        raise UserError("--outputs", str(outputs), "a folder that holds runs", hint)
    top = outputs.resolve()
    folders = [folder for folder in runs_in(outputs) if (folder / CONFIG).is_file()]
    listed = sorted(map(Listed.of, folders), key=lambda run: run.started, reverse=True)
    rows = [(run, _known(run, outputs / run.folder.relative_to(top))) for run in listed]
    for text in filters:
        rows = _passing(text, rows)
    runs = [run for run, _ in rows]
    numbers = _numbers(runs)
    return [
        {
            **{
                **facts,
                "settings": settings,
                **numbers[str(run.folder)],
                "verdicts": run.verdicts,
            },
            **{"started": run.started, "seconds": run.seconds},
        }
        for (run, facts), settings in zip(rows, differing(runs), strict=True)
    ]


def nearest(filters: Sequence[str], runs: Sequence[Record]) -> str:
    """`; did you mean tiny?` of the first filter that nothing passes, but nearly does; else empty."""
    known = sorted(
        {str(run.get(name) or "") for run in runs for name in (*NAMES, "state")} - {""}
    )
    hints = (
        near(want, known, "")
        for text in filters
        if (want := text.rpartition("=")[2]) not in known
    )
    return next((f"; {hint}" for hint in hints if hint), "")


Rows = list[tuple[Listed, dict[str, str]]]


def _known(run: Listed, folder: Path) -> dict[str, str]:
    names = {group: run.name(group) for group in NAMES if group != "search"}
    return {"run": run.hash, "folder": str(folder), **names, "state": run.state}


def _passing(text: str, rows: Rows) -> Rows:
    """The runs that pass a filter."""
    key, sign, want = text.partition("=")
    if not sign:
        return [
            row for row in rows if text.lower() in " ".join(row[1].values()).lower()
        ]
    found = [facts | run.settings for run, facts in rows]
    there = list(dict.fromkeys(name for each in found for name in each))
    if there and key not in there:
        columns = ", ".join(name for name in there if "." not in name)
        raise UserError(
            "filter",
            text,
            f"{columns}, or a setting",
            near(key, there, f"as task.{text}"),
        )
    values = [each.get(key, "") for each in found]
    return [
        row
        for row, v in zip(rows, values, strict=True)
        if v == want or fnmatchcase(v, want)
    ]


def _numbers(runs: Sequence[Listed]) -> dict[str, dict[str, Any]]:
    """Score, difference and position bias of the method under test with their intervals, by folder."""
    rows = pd.DataFrame(
        [{"run": str(run.folder), **row} for run in runs for row in run.totals]
    )
    empty: dict[str, Any] = {
        c: None for name in MEASURED.values() for c in (name, *columns(name)[1:])
    }
    out = {str(run.folder): {**empty, "n": None, "note": ""} for run in runs}
    if rows.empty:
        return out
    rows[columns()] = rows[columns()].apply(pd.to_numeric)
    modified = rows["run"].isin(rows.loc[rows["method"] != UNMODIFIED, "run"])
    rows = rows[(rows["method"] != UNMODIFIED) | ~modified]
    for metric, name in MEASURED.items():
        for row in overall(rows, metric).drop_duplicates("run").to_dict("records"):
            ends = zip(columns(name), (row[c] for c in columns()), strict=True)
            out[row["run"]] |= {
                c: None if pd.isna(value) else value for c, value in ends
            }
            if name != "difference":
                out[row["run"]] |= {"n": int(row["n"]), "note": row.get("note") or ""}
    return out


def look(records: Sequence[Record]) -> list[dict[str, str]]:
    """The list as a terminal shows it; what all runs share is left to :func:`title`. Settings stand below the
    method or study where that has a column."""
    same = shared(records)
    rows = [_seen(record) for record in records]
    for row in rows if RAN not in same else ():
        row[RAN] = f"{row[RAN]}\n{row.pop(SETTINGS)}".strip()
    return [{k: v for k, v in row.items() if k not in same} for row in rows]


def title(records: Sequence[Record]) -> str:
    """How many runs there are, and what is the same of them all."""
    told = ", ".join(f"{name} {value}" for name, value in shared(records).items())
    return f"{len(records)} run{'s' * (len(records) != 1)}{f', all: {told}' if told else ''}"


def shared(records: Sequence[Record]) -> dict[str, str]:
    """What several runs share of their names and states."""
    rows = [_seen(record) for record in records]
    names = ("in", "model", "task", RAN, "state")
    return {
        n: rows[0][n]
        for n in names
        if len(rows) > 1 and rows[0][n] and len({r[n] for r in rows}) == 1
    }


RAN = "method / study"
SETTINGS = "settings"
LONG = 24  # columns of the terminal's list; letters of a setting


def _seen(record: Record) -> dict[str, str]:
    at: Any = record
    suite, version = Path(at["folder"]).absolute().parts[-3:-1]
    ran = [name for name in (at["study"], at["method"]) if name]
    parts = [
        f"{key.partition('.')[2]}={value}" for key, value in at["settings"].items()
    ]
    return {
        "run": at["run"],
        "in": version if suite in (at["task"], at["study"]) else f"{suite}/{version}",
        **{name: at[name] for name in ("model", "task")},
        RAN: ", ".join(map(shown, ran[:1] if ran[1:] == [UNMODIFIED] else ran)),
        SETTINGS: "\n".join(
            p if len(p) <= LONG else f"{p[: LONG - 3]}..." for p in parts
        ),
        "score": at["verdicts"].replace(", ", "\n") or number(at, "score"),
        "difference": number(at, "difference", "+"),
        "position bias": number(at, "position_bias"),
        **{"age": age(at["started"]), "state": at["state"]},
    }


def number(record: Record, name: str, sign: str = "") -> str:
    """An estimate of a record in points, its interval below it; where there is none the record's note."""
    at: Any = record
    value, low, high = (float("nan") if at[c] is None else at[c] for c in columns(name))
    note = at.get("note", "") if name == "position_bias" else ""
    made = SimpleNamespace(value=value, ci_low=low, ci_high=high, note=note)
    return cell(made, f"{sign}z.1f").replace(" [", "\n[")


def age(started: str, now: datetime | None = None) -> str:
    """How long ago a time was; empty where none is told."""
    try:
        return duration(
            (
                (now or datetime.now(UTC)) - datetime.fromisoformat(started)
            ).total_seconds()
        )
    except (ValueError, TypeError):
        return ""


def run_named(name: str, outputs: Path) -> Path:
    """The folder that a path or the hash of ``posbench ls runs`` names; what it names may be absent.

    Raises:
        UserError: Several runs have that hash.
    """
    path = Path(name).expanduser()
    if path.exists() or not outputs.is_dir() or not re.fullmatch("[0-9a-f]{4,}", name):
        return path
    found = [
        run for run in runs_in(outputs) if run.name.rpartition("__")[2].startswith(name)
    ]
    if len(found) > 1:
        raise UserError(
            "RUN", name, "one run", f"take the folder: {', '.join(map(str, found))}"
        )
    return found[0] if found else path
