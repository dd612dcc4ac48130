"""The runs of an outputs folder as a list: their settings, scores and states."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

from posbench.errors import UserError, near
from posbench.report.console import Record
from posbench.report.summaries import NAMED_GROUPS, RunSummary, summaries
from posbench.run.folder import CONFIG, runs_in
from posbench.run.progress import duration
from posbench.stats import outcomes
from posbench.stats.findings import estimate_columns
from posbench.stats.frames import UNMODIFIED, display_name

RAN_COLUMN = "method / study"
SETTINGS_COLUMN = "settings"
MAX_SETTING_CHARACTERS = 24


def differing_settings(runs: Sequence[RunSummary]) -> list[dict[str, str]]:
    """Return for each run the settings in which it differs from others, by config key.

    Settings are compared only among runs with the same model, task, method, search or study, whichever has the setting.
    """
    first_values: dict[tuple[str, str], str] = {}
    differing = set[tuple[str, str]]()
    for run in runs:
        for key, value in run.settings.items():
            if first_values.setdefault(_owned(run, key), value) != value:
                differing.add(_owned(run, key))
    differing_keys = {key for key, _ in differing}
    return [
        {
            key: value
            for key, value in run.settings.items()
            if key in differing_keys and _owned(run, key) in differing
        }
        for run in runs
    ]


def _owned(run: RunSummary, key: str) -> tuple[str, str]:
    """A setting's key with the name of the model, method ... that it belongs to."""
    return key, run.names.get(key.partition(".")[0], "")


def records(outputs: Path, filters: Sequence[str] = ()) -> list[Record]:
    """The runs of an outputs folder as rows of a list, newest first.

    Args:
        outputs: The outputs folder.
        filters: ``column=value`` or ``key=value`` of a setting, where ``*`` matches
            anything, or words that occur in a row.

    Raises:
        UserError: There is no such folder, or a filter names no column or setting.
    """
    if not outputs.is_dir():
        hint = "make a first run: posbench; or name other outputs: --outputs DIR"
        raise UserError("--outputs", str(outputs), "a folder that holds runs", hint)
    folders = [folder for folder in runs_in(outputs) if (folder / CONFIG).is_file()]
    runs: Sequence[RunSummary] = sorted(
        summaries(folders), key=lambda run: run.started, reverse=True
    )
    for text in filters:
        runs = _filter(runs, text, outputs)
    rows: list[Record] = []
    for run, settings in zip(runs, differing_settings(runs), strict=True):
        rows.append(
            {
                **_names(run, outputs),
                "settings": settings,
                **run.estimates,
                "window_share": run.window_share,
                "verdicts": run.verdicts,
                "started": run.started,
                "seconds": run.seconds,
            }
        )
    return rows


def suggest_filter(filters: Sequence[str], runs: Sequence[Record]) -> str:
    """Return `; did you mean tiny?` for the first filter that is close to a name or state of the runs; else empty."""
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
    """Return the columns of a run that a filter can name, beside its settings.

    Args:
        run: The run.
        outputs: Folder of outputs as typed, so that paths are shown as the user would type them.
    """
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
    """Return the runs that pass one filter.

    Args:
        runs: The runs.
        text: ``KEY=PATTERN`` with ``*`` as wildcard, or a text that any column of names contains.
        outputs: Folder of outputs as typed.

    Raises:
        UserError: No run has such a key.
    """
    key, sign, pattern = text.partition("=")
    if not sign:
        lowered = text.lower()
        return [
            run
            for run in runs
            if lowered in " ".join(_names(run, outputs).values()).lower()
        ]
    values_of_runs = [{**_names(run, outputs), **run.settings} for run in runs]
    keys = list(
        dict.fromkeys(
            name for values_of_run in values_of_runs for name in values_of_run
        )
    )
    if keys and key not in keys:
        list_columns = ", ".join(name for name in keys if "." not in name)
        hint = near(key, keys, f"as task.{text}")
        raise UserError(
            "filter", text, f"{list_columns}, or a setting such as task.pairs", hint
        )
    passing = []
    for run, values_of_run in zip(runs, values_of_runs, strict=True):
        value = values_of_run.get(key, "")
        if value == pattern or fnmatchcase(value, pattern):
            passing.append(run)
    return passing


def terminal_rows(records: Sequence[Record]) -> list[dict[str, str]]:
    """Return the cells of a list of runs as a terminal shows them, without those that :func:`common_cells` has.

    Settings stand below the method or study if that has a column, else in a column of their own.
    """
    common = common_cells(records)
    rows = [_terminal_row(record) for record in records]
    if RAN_COLUMN not in common:
        for row in rows:
            row[RAN_COLUMN] = f"{row[RAN_COLUMN]}\n{row.pop(SETTINGS_COLUMN)}".strip()
    return [
        {name: text for name, text in row.items() if name not in common} for row in rows
    ]


def list_title(records: Sequence[Record]) -> str:
    """The number of runs, and the cells that all have in common."""
    count = f"{len(records)} run" if len(records) == 1 else f"{len(records)} runs"
    common = ", ".join(
        f"{name} {value}" for name, value in common_cells(records).items()
    )
    return f"{count}, all: {common}" if common else count


def common_cells(records: Sequence[Record]) -> dict[str, str]:
    """Return version, model, task, method or study, and state, as far as all of several runs have them in common."""
    if len(records) < 2:
        return {}
    rows = [_name_cells(record) for record in records]
    common = {}
    for name, cell in rows[0].items():
        if cell and all(row[name] == cell for row in rows):
            common[name] = cell
    return common


def _name_cells(record: Record) -> dict[str, str]:
    """A record's names and state on a terminal."""
    suite, version = Path(record["folder"]).absolute().parts[-3:-1]
    # The suite is left out where it has the name of the task or study.
    is_named = suite in (record["task"], record["study"])
    names = [name for name in (record["study"], record["method"]) if name]
    if len(names) == 2 and names[1] == UNMODIFIED:
        names = names[:1]
    return {
        "in": version if is_named else f"{suite}/{version}",
        "model": record["model"],
        "task": record["task"],
        RAN_COLUMN: ", ".join(map(display_name, names)),
        "state": record["state"],
    }


def _terminal_row(record: Record) -> dict[str, str]:
    """A record's cells on a terminal."""
    names = _name_cells(record)
    settings = []
    for key, value in record["settings"].items():
        text = f"{key.partition('.')[2]}={value}"
        settings.append(cut_text(text, MAX_SETTING_CHARACTERS))
    # A study has verdicts on claims in place of a score.
    verdicts = record["verdicts"].replace(", ", "\n")
    score = estimate_cell(record, "score")
    difference = estimate_cell(record, "difference", signed=True)
    if str(record.get("note", "")).startswith(outcomes.PROBLEM):
        score = outcomes.PROBLEM
        difference = ""
    return {
        "run": record["run"],
        "in": names["in"],
        "model": names["model"],
        "task": names["task"],
        RAN_COLUMN: names[RAN_COLUMN],
        SETTINGS_COLUMN: "\n".join(settings),
        "score": verdicts or score,
        "difference": difference,
        "position bias": estimate_cell(record, "position_bias"),
        "age": age(record["started"]),
        "state": names["state"],
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
    from posbench.report.tables import cell  # a pipe gets plain numbers

    value, low, high = (
        float("nan") if record[column] is None else record[column]
        for column in estimate_columns(name)
    )
    note = record.get("note", "") if name == "position_bias" else ""
    estimate = SimpleNamespace(value=value, ci_low=low, ci_high=high, note=note)
    text = cell(estimate, "+z.1f" if signed else "z.1f")
    return text.replace(" [", "\n[")


def age(started: str, now: datetime | None = None) -> str:
    """Return how long ago an ISO time was, in words; empty for any other text."""
    if now is None:
        now = datetime.now(UTC)
    try:
        return duration((now - datetime.fromisoformat(started)).total_seconds())
    except (ValueError, TypeError):
        return ""
