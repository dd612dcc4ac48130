"""The runs of an outputs folder as a list: their settings, scores and states."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, get_args

from rich.style import Style
from rich.table import Table
from rich.text import Text

from posbench.errors import UserError, near
from posbench.files.parse import parse_yaml
from posbench.report.console import TONE_STYLES, Record
from posbench.report.summaries import (
    NAMED_GROUPS,
    ListedState,
    RunSummary,
    summaries,
)
from posbench.run.folder import RUN_MARKS, RunDir, open_run_dir, runs_in
from posbench.run.lease import in_use
from posbench.run.progress import duration
from posbench.stats import outcomes
from posbench.stats.findings import estimate_columns
from posbench.stats.frames import UNMODIFIED, display_name
from posbench.stats.glance import noun_for
from posbench.stats.verdict import FIXED

RAN_COLUMN = "method / study"
WHAT_COLUMN = "what"
NUMBER_COLUMNS = {
    "score": "score",
    "difference": "difference",
    "bias": "position_bias",
}
"""Columns of a record by header on a terminal."""
MAX_SETTING_CHARACTERS = 24
UNDECIDED = "yellow"
STATE_STYLES = {
    "failed": "red",
    "damaged": "red",
    "mixed": "red",
    "running": "cyan",
    "done": "",
}
"""Colours of states; of all others: UNDECIDED."""
RESUMED = {
    "killed": "goes on where the run was stopped",
    "failed": "goes on where the run failed",
    "incomplete": "asks what has no answer yet",
    "mixed": "a file changed under the run",
    "damaged": "makes damaged files again",
}
"""What the command of a run does that is not done, or why it must be made again, by state."""


class Layout(NamedTuple):
    """How much a list of runs shows.

    Attributes:
        is_wide: With all intervals, reasons where there is no number, and counts of all verdicts of a study.
        intervals: Columns of numbers with intervals.
        hidden: Columns that are left out.
        has_all_settings: It is taken only if all settings fit; else those must that tell runs apart.
        what_width: Characters that are enough for names and settings, where not all of those need fit.
        gap: Spaces between columns.
    """

    is_wide: bool = False
    intervals: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ("difference", "claims")
    has_all_settings: bool = True
    what_width: int | None = None
    gap: int = 2


LAYOUTS = (
    Layout(is_wide=True, intervals=tuple(NUMBER_COLUMNS), hidden=()),
    Layout(is_wide=True, intervals=tuple(NUMBER_COLUMNS), hidden=("difference",)),
    Layout(intervals=("score", "bias")),
    Layout(intervals=("bias",)),
    Layout(intervals=("bias",), has_all_settings=False),
    Layout(intervals=("bias",), has_all_settings=False, gap=1),
    Layout(
        intervals=("bias",),
        hidden=("difference", "claims", "age"),
        what_width=32,
        gap=1,
    ),
    Layout(gap=1),
    Layout(has_all_settings=False, gap=1),
    Layout(hidden=("difference", "claims", "age"), has_all_settings=False, gap=1),
)
"""From the richest to the shortest; in the last one names are cut, too."""


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
    folders = [
        folder
        for folder in runs_in(outputs)
        if any((folder / mark).is_file() for mark in RUN_MARKS)
    ]
    runs: Sequence[RunSummary] = sorted(
        map(_without_lost_results, summaries(folders)),
        key=lambda run: run.started,
        reverse=True,
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
                "tone": run.tone,
            }
        )
    return rows


def _without_lost_results(run: RunSummary) -> RunSummary:
    """Return a summary, without its results where files of the run are missing, added or of another size.

    A summary is made from some of the files alone.
    """
    out = RunDir(run.folder)
    state = run.state
    if out.done:
        # Whoever owns it may be drawing its page again.
        if state == "done" and out.resized() and not in_use(run.folder):
            state = "damaged"
    elif state == "done" or out.is_rescore_unfinished:
        state = "running" if in_use(run.folder) else "killed"
    if state == run.state:
        return run
    return replace(
        run,
        state=state,
        verdict="",
        tone="",
        verdicts="",
        estimates={**dict.fromkeys(run.estimates), "note": ""},
        window_share=None,
    )


def suggest_filter(filters: Sequence[str], runs: Sequence[Record]) -> str:
    """Return `; did you mean tiny?` for the first filter that is close to a name or state of the runs; else empty."""
    for text in filters:
        key, sign, value = text.rpartition("=")
        columns = [key] if sign else [*NAMED_GROUPS, "state"]
        named = {str(run.get(name) or "") for run in runs for name in columns}
        candidates = sorted(named - {""})
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
        "verdict": run.verdict,
    }


def _filter(runs: Sequence[RunSummary], text: str, outputs: Path) -> list[RunSummary]:
    """Return the runs that pass one filter.

    Args:
        runs: The runs.
        text: ``KEY=PATTERN`` with ``*`` as wildcard, or a text that any column of names contains.
        outputs: Folder of outputs as typed.

    Raises:
        UserError: No run has such a key, or no run can be in such a state.
    """
    key, sign, pattern = text.partition("=")
    states = get_args(ListedState)
    if key == "state" and not any(fnmatchcase(state, pattern) for state in states):
        hint = near(pattern, states, "state=done")
        raise UserError("state", pattern, "; ".join(states), hint)
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
        settings = [name for name in keys if name.endswith(f".{key}")]
        hint = "posbench --cfg job prints the settings"
        if settings:
            hint = f"as {settings[0]}={pattern}"
        hint = near(key, keys, hint)
        raise UserError(
            "filter", text, f"{list_columns}, or a setting such as task.pairs", hint
        )
    passing = []
    for run, values_of_run in zip(runs, values_of_runs, strict=True):
        value = values_of_run.get(key, "")
        is_alike = value == pattern
        # A hash such as 12e45678 is no number.
        if "." in key:
            is_alike = _typed(value) == _typed(pattern)
        if is_alike or fnmatchcase(value, pattern):
            passing.append(run)
    return passing


def _typed(text: str) -> object:
    """A setting's value as it is typed, so that -1 is -1.0, and [0, 3] is [0,3]; a text that is none as it is."""
    try:
        value = parse_yaml(text)
        # YAML takes 1e0 for a text.
        return value if isinstance(value, bool | list) else float(value)
    except (ValueError, TypeError):
        return text


def list_title(records: Sequence[Record]) -> str:
    """The number of runs, and the cells that they have in common."""
    count = f"{len(records)} {noun_for(len(records), 'run')}"
    common = ", ".join(
        f"{name} {value}" for name, value in common_cells(records).items()
    )
    if len(records) > 1:
        count += ", the newest first"
    return f"{count}: {common}" if common else count


def common_cells(records: Sequence[Record]) -> dict[str, str]:
    """Return version, model, task, and method or study, where all of several runs that have one have the same."""
    if len(records) < 2:
        return {}
    rows = [_name_cells(record) for record in records]
    common = {}
    for name in rows[0]:
        values = {row[name] for row in rows} - {""}
        if len(values) == 1:
            (common[name],) = values
    return common


def _name_cells(record: Record) -> dict[str, str]:
    """A record's version and names, as they stand in the title of a list."""
    experiment = _experiment(record)
    version = _version(record)
    names = [name for name in (record["study"], record["method"]) if name]
    if len(names) == 2 and names[1] == UNMODIFIED:
        names = names[:1]
    return {
        "in": f"{experiment}/{version}" if experiment else version,
        "model": record["model"],
        "task": record["task"],
        RAN_COLUMN: " ".join(map(display_name, names)),
    }


def _experiment(record: Record) -> str:
    """The experiment that a run belongs to; empty without one: its folder then has the name of the task or study."""
    name = Path(record["folder"]).absolute().parts[-3]
    return "" if name in (record["task"], record["study"]) else name


def _version(record: Record) -> str:
    return Path(record["folder"]).absolute().parts[-2]


def run_columns(records: Sequence[Record]) -> dict[str, list[Text]]:
    """Return the columns of a list of runs in full by header, without those in which no run has anything.

    Args:
        records: The runs, as :func:`records` returns them.
    """
    names = [_names_text(record, common_cells(records)) for record in records]
    settings = _settings_texts(records)
    what = [_what_cell(*parts) for parts in zip(names, settings, strict=True)]
    return _columns(records, what, LAYOUTS[0])


def run_table(records: Sequence[Record], width: int) -> Table:
    """Return the list of runs for a terminal: a line for each run, without what :func:`common_cells` has.

    What is least important is left out until the lines fit: first the difference from the unmodified model and the
    counts of claims, then the intervals of scores, settings beyond those that tell runs apart, the intervals of the
    position bias, the age, further settings, the ends of names.

    Args:
        records: The runs, as :func:`records` returns them.
        width: Characters of a line.
    """
    common = common_cells(records)
    names = [_names_text(record, common) for record in records]
    settings = _settings_texts(records)
    num_needed = _num_needed_settings(records, settings)
    whole = [_what_cell(*parts) for parts in zip(names, settings, strict=True)]
    readable = [
        _what_cell(name, texts, count)
        for name, texts, count in zip(names, settings, num_needed, strict=True)
    ]
    has_bias = any(record["position_bias"] is not None for record in records)
    for layout in LAYOUTS:
        if layout.intervals == ("bias",) and not has_bias:
            continue
        what = whole if layout.has_all_settings else readable
        if layout.what_width is not None:
            what = [cell[: layout.what_width] for cell in whole]
        if _total_width(_columns(records, what, layout), layout.gap) <= width:
            break
    columns = _columns(records, whole, layout)
    excess = _total_width(columns, layout.gap) - width
    if excess > 0 and WHAT_COLUMN in columns:
        what_width = max(_column_width(columns, WHAT_COLUMN) - excess, 0)
        columns[WHAT_COLUMN] = [
            _widest_what_cell(name, texts, what_width)
            for name, texts in zip(names, settings, strict=True)
        ]
    table = Table(box=None, pad_edge=False)
    table.padding = (0, layout.gap, 0, 0)
    for name in columns:
        is_number = name in NUMBER_COLUMNS
        table.add_column(
            name,
            justify="right" if is_number else "left",
            no_wrap=True,
            overflow="crop",
        )
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _columns(
    records: Sequence[Record], what: Sequence[Text], layout: Layout
) -> dict[str, list[Text]]:
    """Return the columns of a list of runs by header, without empty and hidden ones.

    Args:
        records: The runs.
        what: For each run its names and settings.
        layout: What is shown.
    """
    columns = {
        "run": [_hash_cell(record) for record in records],
        WHAT_COLUMN: list(what),
        "verdict": [_verdict_cell(record) for record in records],
        "claims": [Text(record["verdicts"]) for record in records],
    }
    for header, name in NUMBER_COLUMNS.items():
        has_interval = header in layout.intervals
        columns[header] = [
            _number_cell(
                record,
                name,
                layout.is_wide,
                has_interval,
                signed=header == "difference",
            )
            for record in records
        ]
    columns["age"] = [Text(age(record["started"])) for record in records]
    return {
        name: cells
        for name, cells in columns.items()
        if name not in layout.hidden and any(cell.plain for cell in cells)
    }


def _total_width(columns: Mapping[str, Sequence[Text]], gap: int) -> int:
    """Characters of a line of a table, with ``gap`` spaces between columns."""
    widths = [_column_width(columns, name) for name in columns]
    return sum(widths) + gap * (len(widths) - 1)


def _column_width(columns: Mapping[str, Sequence[Text]], name: str) -> int:
    """Characters of the widest cell of a column, its header included."""
    return max(len(name), *(cell.cell_len for cell in columns[name]))


def _what_cell(name: str, settings: Sequence[str], count: int | None = None) -> Text:
    """A run's names with the first ``count`` of its settings, all without a count, and dots for those left out."""
    count = len(settings) if count is None else count
    dots = ["..."] if count < len(settings) else []
    text = " ".join([*settings[:count], *dots])
    cell = Text(f"{name}  " if name and text else name)
    return cell.append(text, style="dim")


def _widest_what_cell(name: str, settings: Sequence[str], width: int) -> Text:
    """A run's names with as many whole settings as fit into ``width`` characters; too long names are cut."""
    for count in range(len(settings), -1, -1):
        cell = _what_cell(name, settings, count)
        if cell.cell_len <= width:
            return cell
    cell = Text(name)
    if cell.cell_len > width:
        cell.truncate(max(width - 3, 0))
        cell.append("..."[:width])
    return cell


def _names_text(record: Record, common: Mapping[str, str]) -> str:
    """The names of what ran: model, experiment, task, study and method, without those that all runs have in common."""
    cells = _name_cells(record)
    cells["in"] = _experiment(record)
    if record["study"]:
        cells["task"] = ""
    order = ("model", "in", "task", RAN_COLUMN)
    return " ".join(cells[name] for name in order if cells[name] and name not in common)


def _settings_texts(records: Sequence[Record]) -> list[list[str]]:
    """Return for each run the settings in which it differs from others of its kind, as ``key=value``.

    Those with the most values come first. The task of a study and the version of a run count as settings.
    """
    all_settings = [_all_settings(record) for record in records]
    keys: dict[tuple[str, ...], dict[str, None]] = {}
    for record, settings in zip(records, all_settings, strict=True):
        keys.setdefault(_kind(record), {}).update(dict.fromkeys(settings))
    values: dict[tuple[tuple[str, ...], str], set[str]] = {}
    for record, settings in zip(records, all_settings, strict=True):
        kind = _kind(record)
        for key in keys[kind]:
            values.setdefault((kind, key), set()).add(settings.get(key, ""))
    texts = []
    for record, settings in zip(records, all_settings, strict=True):
        kind = _kind(record)
        # Sorting keeps the order of a config among keys with equally many values.
        ordered = sorted(keys[kind], key=lambda key: -len(values[kind, key]))
        texts.append(
            [
                cut_text(
                    f"{key.partition('.')[2] or key}={settings[key]}",
                    MAX_SETTING_CHARACTERS,
                )
                for key in ordered
                if settings.get(key, "null") != "null" and len(values[kind, key]) > 1
            ]
        )
    return texts


def _num_needed_settings(
    records: Sequence[Record], settings: Sequence[Sequence[str]]
) -> list[int]:
    """Return for each run how many of its settings, from the first on, tell it from all others of its kind.

    Args:
        records: The runs.
        settings: The settings of each, as :func:`_settings_texts` returns them.
    """
    num_same = Counter[tuple[tuple[str, ...], tuple[str, ...]]]()
    for record, texts in zip(records, settings, strict=True):
        for count in range(len(texts) + 1):
            num_same[_kind(record), tuple(texts[:count])] += 1
    needed = []
    for record, texts in zip(records, settings, strict=True):
        counts = (
            count
            for count in range(len(texts))
            if num_same[_kind(record), tuple(texts[:count])] == 1
        )
        needed.append(next(counts, len(texts)))
    return needed


def _all_settings(record: Record) -> dict[str, str]:
    """The settings of a run by key, its version and the task of a study among them."""
    settings = {**record["settings"], "version": _version(record)}
    if record["study"]:
        settings["task"] = record["task"]
    return settings


def _kind(record: Record) -> tuple[str, ...]:
    """What runs must have in common for their settings to be compared: all their names; of studies not the task."""
    task = "" if record["study"] else record["task"]
    names = (record[name] for name in ("model", "method", "study"))
    return (task, *names, _experiment(record))


def _hash_cell(record: Record) -> Text:
    """A run's hash, which links to its page where there is one."""
    page = Path(record["folder"]).absolute() / "report.html"
    style = Style(link=page.as_uri()) if page.is_file() else Style()
    return Text(record["run"], style=style)


def _verdict_cell(record: Record) -> Text:
    """The verdict on a run in a word or a few, in its colour; of a run without one, its state."""
    state = record["state"]
    if state != "done":
        return Text(state, style=STATE_STYLES.get(state, UNDECIDED))
    if _lacks_answers(record):
        return Text(outcomes.PROBLEM, style=UNDECIDED)
    if not record["verdict"]:
        return Text(record["verdicts"] or state)
    return Text(record["verdict"], style=TONE_STYLES[record["tone"]])


def _number_cell(
    record: Record,
    name: str,
    is_wide: bool,
    has_interval: bool,
    signed: bool,
) -> Text:
    """An estimate of a record in points; empty where nothing is known.

    Args:
        record: The run.
        name: Column of the estimate.
        is_wide: Whether the reason is shown why there is no number.
        has_interval: Whether its interval is shown.
        signed: Whether a positive value has a plus sign.
    """
    if name != "position_bias" and _lacks_answers(record):
        return Text("")
    value = record[name]
    if is_wide or (has_interval and value is not None):
        return Text(estimate_cell(record, name, signed).replace("\n", " "))
    if value is None:
        return Text("")
    return Text(f"{100 * value:+z.1f}" if signed else f"{100 * value:z.1f}")


def legend(table: Table, records: Sequence[Record]) -> str:
    """The units of the numbers in a list of runs, and how many prompts they rest on; empty where it has none.

    Args:
        table: See :func:`run_table`.
        records: Its runs.
    """
    shown = [str(column.header) for column in table.columns]
    units = {"score": "score in %", "difference": "difference in points"}
    units["bias"] = "bias: position bias in points"
    texts = [text for name, text in units.items() if name in shown]
    cells = [cell for column in table.columns for cell in column.cells]
    if any(re.search(r"\d \[-?\d", str(cell)) for cell in cells):
        texts.append("[95 % interval]")
    counts = sorted({int(r["n"]) for r in records if r["score"] is not None and r["n"]})
    if counts:
        ends = dict.fromkeys((counts[0], counts[-1]))
        texts.append(f"{' to '.join(f'{count:,}' for count in ends)} prompts a run")
    return ", ".join(texts)


def next_step(records: Sequence[Record]) -> str:
    """The command to run next, and what it does; empty without one.

    It is that after the newest run that is not running; where that one is fixed, after the fixed run of its model and
    task with the least position bias.

    Args:
        records: The runs, as :func:`records` returns them.
    """
    for newest in records:
        record = _least_biased_fix(newest, records)
        state = record["state"]
        name = record["run"]
        if record is not newest:
            name += ", the fixed run with the least bias"
        folder = Path(record["folder"])
        if state in RESUMED:
            run = open_run_dir(folder)
            command = run.command
            purpose = RESUMED[state]
            if run.is_rescore_unfinished:
                command = run.rescore_command
                purpose = "goes on where the rescore was stopped"
            if state == "mixed" and command:
                command = f"remove {folder}, then {command}"
        elif state == "done" and record["verdict"]:
            from posbench.report.glance import run_glance

            try:
                glance = run_glance(folder)
            except UserError:
                continue  # of a class that is no longer there; the other runs have next commands, too
            command, purpose = glance.next, glance.purpose
        else:
            continue
        if command:
            about = f"{name}: {purpose}" if purpose else name
            return f"{command}  (after {about})"
    return ""


def _least_biased_fix(run: Record, records: Sequence[Record]) -> Record:
    """A fixed run becomes the fixed run of its model and task with the least position bias; others stay."""

    def is_fixed(record: Record) -> bool:
        same = all(record[name] == run[name] for name in ("model", "task"))
        return same and record["state"] == "done" and record["verdict"] == FIXED

    if not is_fixed(run):
        return run
    return min(filter(is_fixed, records), key=lambda record: record["position_bias"])


def _lacks_answers(record: Record) -> bool:
    """Whether so many answers of a run are missing that its score says nothing."""
    return str(record.get("note", "")).startswith(outcomes.PROBLEM)


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
