"""The runs of an outputs folder as a list: what each is, what it measured, its state."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from posbench.errors import UserError, near
from posbench.files.atomic import to_canonical
from posbench.late import pd
from posbench.report.console import Record
from posbench.report.tables import cell
from posbench.report.text import main_claims, tally_verdicts
from posbench.run.folder import (
    CONFIG,
    MANIFEST,
    PROVENANCE,
    STATUS,
    RunDir,
    State,
    open_run_dir,
    runs_in,
)
from posbench.run.lease import in_use
from posbench.run.method import METHOD_FILE
from posbench.run.progress import duration
from posbench.run.shards import is_running
from posbench.schema import override_text
from posbench.stats import outcomes
from posbench.stats.findings import estimate_columns
from posbench.stats.frames import UNMODIFIED, display_name, rows_over_all_positions

ListedState = Literal[State, "done, unchecked", "killed", "damaged"]
"""What a list of runs says of one."""
METRICS = "metrics.csv"
FINDINGS = "findings.csv"
NAMED_GROUPS = ("model", "task", "method", "search", "study")
"""Groups of a config with a name."""
GROUPS = (*NAMED_GROUPS, "runtime")
NEUTRAL_SETTINGS = (
    "runtime.outputs",
    "runtime.log_every",
    "runtime.workers",
    "runtime.cluster",
    "model.concurrency",
    "model.retries",
    "model.timeout",
)
"""Settings that move no number."""
LIST_COLUMNS = {
    "": "score",
    "difference": "difference",
    "position_bias": "position_bias",
}
"""Column of the list by metric, as :func:`posbench.stats.frames.rows_of_metric` names it."""
RAN = "method / study"
SETTINGS = "settings"
MAX_SETTING_CHARACTERS = 24


@dataclass(frozen=True)
class RunSummary:
    """A run folder as it stands.

    Attributes:
        folder: The run folder.
        state: done, running, killed, failed, incomplete, mixed or damaged.
        started: When the run started, in ISO format; empty where unknown.
        seconds: Wall time.
        config: Of a finished run with what a search found where the config has null.
        totals: Rows of metrics.csv over all gold positions, of a finished run.
        verdicts: How a study's claims fared, of a finished run.
    """

    folder: Path
    state: ListedState
    started: str = ""
    seconds: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    totals: Sequence[Mapping[str, str]] = ()
    verdicts: str = ""

    @classmethod
    def read(cls, folder: Path) -> RunSummary:
        """Read a run folder; numbers are taken only from intact, finished runs."""
        run = open_run_dir(folder)
        config = dict[str, Any]()
        try:
            is_intact = not run.damaged((CONFIG, METRICS, FINDINGS, METHOD_FILE))
            config = run.config()
            method = run.read_json(METHOD_FILE)
        except UserError:
            is_intact = False
        status = run.facts(STATUS)
        started = str(run.facts(PROVENANCE).get("started", ""))
        seconds = status.get("seconds")
        state = _state(run, status) if is_intact else "damaged"
        if not state.startswith("done"):
            return cls(folder, state, started, seconds, config)
        return cls(
            folder,
            state,
            started,
            seconds,
            config=fill_nulls(config, {"method": method}),
            totals=_read_totals(folder),
            verdicts=_tally_verdicts(folder),
        )

    @property
    def hash(self) -> str:
        """The end of its folder's name."""
        return self.folder.name.rpartition("__")[2]

    def name(self, group: str) -> str:
        """Name of its model, task, method, search or study; empty where it has none."""
        values = self.config.get(group)
        return str(values.get("name") or "") if isinstance(values, Mapping) else ""

    @property
    def settings(self) -> dict[str, str]:
        """Settings that can move a number, as an override spells them, by dotted key."""
        groups = {group: self.config.get(group) for group in GROUPS}
        return {
            key: value
            for key, value in _flatten(groups, "")
            if not key.startswith(NEUTRAL_SETTINGS)
        }


def _state(run: RunDir, status: Mapping[str, Any]) -> ListedState:
    """The state of a run whose files are intact."""
    if run.done:
        # A run of an older version has no manifest.
        return "done" if (run.path / MANIFEST).is_file() else "done, unchecked"
    state: ListedState = status.get("state", "damaged")
    if state == "running" and not in_use(run.path) and not is_running(run.path):
        return "killed"
    return state


def fill_nulls(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A config in which every null is replaced by the value of its key, if there is one."""
    filled = dict[str, Any]()
    for key, value in config.items():
        if isinstance(value, Mapping):
            filled[key] = fill_nulls(value, values.get(key) or {})
        else:
            filled[key] = values.get(key) if value is None else value
    return filled


def _read_totals(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv over all gold positions."""
    rows = _read_rows(folder / METRICS)
    return [row for row in rows if row.get("gold_position") == "all"]


def _tally_verdicts(folder: Path) -> str:
    """How the paper's claims fared, or our controls where the paper makes none."""
    rows = _read_rows(folder / FINDINGS)
    findings = pd.DataFrame(rows, columns=["kind", "verdict"])
    return tally_verdicts(main_claims(findings)["verdict"])


def _read_rows(file: Path) -> list[dict[str, str]]:
    """The rows of a CSV as text; none where there is no file."""
    if not file.is_file():
        return []
    with open(file, newline="", encoding="utf-8", errors="replace") as stream:
        return list(csv.DictReader(stream))


def _flatten(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """Dotted keys and values below a node of a config, but names and class paths."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            if name not in ("_target_", "name"):
                yield from _flatten(value, f"{key}.{name}".strip("."))
    elif "." in key:
        # 1.0 as 1
        yield key, override_text(to_canonical(node))


def differing_settings(runs: Sequence[RunSummary]) -> list[dict[str, str]]:
    """For each run, the settings that differ between runs.

    A setting is compared among runs whose model, task, method, search or study, to
    which it belongs, has the same name.
    """
    values: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        for key, value in run.settings.items():
            values.setdefault(_owner(run, key), set()).add(value)
    return [
        {
            key: value
            for key, value in run.settings.items()
            if len(values[_owner(run, key)]) > 1
        }
        for run in runs
    ]


def _owner(run: RunSummary, key: str) -> tuple[str, str]:
    """A setting's key with the name of the model, method ... that it belongs to."""
    group, _, _ = key.partition(".")
    return key, run.name(group)


def records(outputs: Path, filters: Sequence[str] = ()) -> list[Record]:
    """The runs of an outputs folder as rows of a list, newest first.

    Args:
        outputs: The outputs folder.
        filters: ``column=value`` or ``key=value`` of a setting, where ``*`` stands for
            anything, or words that occur in a row.

    Raises:
        UserError: There is no such folder, or a filter names no column or setting.
    """
    if not outputs.is_dir():
        hint = "make a first run: posbench; or name other outputs: --outputs DIR"
        raise UserError("--outputs", str(outputs), "a folder that holds runs", hint)
    folders = [folder for folder in runs_in(outputs) if (folder / CONFIG).is_file()]
    runs = sorted(
        map(RunSummary.read, folders), key=lambda run: run.started, reverse=True
    )
    for text in filters:
        runs = _filter(runs, text, outputs)
    estimates = _estimates(runs)
    rows: list[Record] = []
    for run, settings in zip(runs, differing_settings(runs), strict=True):
        rows.append(
            {
                **_names(run, outputs),
                "settings": settings,
                **estimates[str(run.folder)],
                "verdicts": run.verdicts,
                "started": run.started,
                "seconds": run.seconds,
            }
        )
    return rows


def suggest_filter(filters: Sequence[str], runs: Sequence[Record]) -> str:
    """`; did you mean tiny?` for the first filter close to a name; else empty."""
    names = {str(run.get(name) or "") for run in runs for name in NAMED_GROUPS}
    states = {str(run.get("state") or "") for run in runs}
    candidates = sorted((names | states) - {""})
    for text in filters:
        value = text.rpartition("=")[2]
        hint = near(value, candidates, "")
        if value not in candidates and hint:
            return f"; {hint}"
    return ""


def _names(run: RunSummary, outputs: Path) -> dict[str, str]:
    """The columns of a run that a filter can name beside its settings."""
    return {
        "run": run.hash,
        "folder": str(outputs / run.folder.relative_to(outputs.resolve())),
        "model": run.name("model"),
        "task": run.name("task"),
        "method": run.name("method"),
        "study": run.name("study"),
        "state": run.state,
    }


def _filter(runs: Sequence[RunSummary], text: str, outputs: Path) -> list[RunSummary]:
    """The runs that pass a filter, see :func:`records`."""
    key, sign, pattern = text.partition("=")
    if not sign:
        lowered = text.lower()
        return [
            run
            for run in runs
            if lowered in " ".join(_names(run, outputs).values()).lower()
        ]
    values = [_names(run, outputs) | run.settings for run in runs]
    keys = list(dict.fromkeys(name for of_run in values for name in of_run))
    if keys and key not in keys:
        list_columns = ", ".join(name for name in keys if "." not in name)
        hint = near(key, keys, f"as task.{text}")
        raise UserError(
            "filter", text, f"{list_columns}, or a setting such as task.pairs", hint
        )
    passing = []
    for run, of_run in zip(runs, values, strict=True):
        value = of_run.get(key, "")
        if value == pattern or fnmatchcase(value, pattern):
            passing.append(run)
    return passing


def _estimates(runs: Sequence[RunSummary]) -> dict[str, dict[str, Any]]:
    """Score, difference and position bias of each run's method, by run folder.

    Of a run that applied no method they are the unmodified model's. None stands where a
    run did not measure a number.
    """
    numbers = [
        column for name in LIST_COLUMNS.values() for column in estimate_columns(name)
    ]
    empty: dict[str, Any] = {**dict.fromkeys(numbers), "n": None, "note": ""}
    estimates = {str(run.folder): dict(empty) for run in runs}
    rows = pd.DataFrame(
        [{"run": str(run.folder), **row} for run in runs for row in run.totals]
    )
    if rows.empty:
        return estimates
    rows[estimate_columns()] = rows[estimate_columns()].apply(pd.to_numeric)
    is_unmodified = rows["method"] == UNMODIFIED
    runs_with_method = rows.loc[~is_unmodified, "run"]
    rows = rows[~is_unmodified | ~rows["run"].isin(runs_with_method)]
    for metric, name in LIST_COLUMNS.items():
        for row in (
            rows_over_all_positions(rows, metric)
            .drop_duplicates("run")
            .to_dict("records")
        ):
            estimate = estimates[row["run"]]
            for target, source in zip(
                estimate_columns(name), estimate_columns(), strict=True
            ):
                estimate[target] = None if pd.isna(row[source]) else row[source]
            if name != "difference":
                estimate["n"] = int(row["n"])
                estimate["note"] = row.get("note") or ""
    return estimates


def terminal_rows(records: Sequence[Record]) -> list[dict[str, str]]:
    """The list as a terminal shows it, without what :func:`list_title` says of all runs.

    Settings stand below the method or study, if that has a column.
    """
    common = common_cells(records)
    rows = [_terminal_row(record) for record in records]
    if RAN not in common:
        for row in rows:
            row[RAN] = f"{row[RAN]}\n{row.pop(SETTINGS)}".strip()
    return [
        {name: text for name, text in row.items() if name not in common} for row in rows
    ]


def list_title(records: Sequence[Record]) -> str:
    """How many runs there are, and what they have in common."""
    count = f"{len(records)} run" if len(records) == 1 else f"{len(records)} runs"
    common = ", ".join(
        f"{name} {value}" for name, value in common_cells(records).items()
    )
    return f"{count}, all: {common}" if common else count


def common_cells(records: Sequence[Record]) -> dict[str, str]:
    """What several runs have in common of their names and states."""
    if len(records) < 2:
        return {}
    rows = [_terminal_row(record) for record in records]
    common = {}
    for name in ("in", "model", "task", RAN, "state"):
        values = {row[name] for row in rows}
        if len(values) == 1 and rows[0][name]:
            common[name] = rows[0][name]
    return common


def _terminal_row(record: Record) -> dict[str, str]:
    """A record's cells on a terminal."""
    suite, version = Path(record["folder"]).absolute().parts[-3:-1]
    # The suite is left out where it has the name of the task or study.
    is_named = suite in (record["task"], record["study"])
    names = [name for name in (record["study"], record["method"]) if name]
    if len(names) == 2 and names[1] == UNMODIFIED:
        names = names[:1]
    settings = []
    for key, value in record["settings"].items():
        text = f"{key.partition('.')[2]}={value}"
        settings.append(cut_text(text, MAX_SETTING_CHARACTERS))
    verdicts = record["verdicts"].replace(", ", "\n")
    score = estimate_cell(record, "score")
    difference = estimate_cell(record, "difference", signed=True)
    if str(record.get("note", "")).startswith(outcomes.PROBLEM):
        score = outcomes.PROBLEM
        difference = ""
    return {
        "run": record["run"],
        "in": version if is_named else f"{suite}/{version}",
        "model": record["model"],
        "task": record["task"],
        RAN: ", ".join(map(display_name, names)),
        SETTINGS: "\n".join(settings),
        "score": verdicts or score,
        "difference": difference,
        "position bias": estimate_cell(record, "position_bias"),
        "age": age(record["started"]),
        "state": record["state"],
    }


def cut_text(text: str, max_characters: int) -> str:
    """A text, its end replaced by dots where it is too long."""
    if len(text) <= max_characters:
        return text
    return f"{text[: max_characters - 3]}..."


def estimate_cell(record: Record, name: str, signed: bool = False) -> str:
    """An estimate of a record in points with its interval on a second line.

    Without an estimate of the position bias it is the reason why.

    Args:
        record: Has the columns of the estimate, None where not measured.
        name: The estimate's column.
        signed: Whether a positive value has a plus sign.
    """
    value, low, high = (
        float("nan") if record[column] is None else record[column]
        for column in estimate_columns(name)
    )
    note = record.get("note", "") if name == "position_bias" else ""
    estimate = SimpleNamespace(value=value, ci_low=low, ci_high=high, note=note)
    text = cell(estimate, "+z.1f" if signed else "z.1f")
    return text.replace(" [", "\n[")


def age(started: str, now: datetime | None = None) -> str:
    """How long ago an ISO time was; empty for any other text."""
    if now is None:
        now = datetime.now(UTC)
    try:
        return duration((now - datetime.fromisoformat(started)).total_seconds())
    except (ValueError, TypeError):
        return ""
