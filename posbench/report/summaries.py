"""States and results of runs, with an index file that spares reading an unchanged run again."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from posbench import paths
from posbench.errors import UserError
from posbench.files.atomic import Row, to_canonical, write_text
from posbench.files.parse import CORRECT_FILE, Object, read_yaml
from posbench.late import pd
from posbench.report.folder import (
    applied_or_found,
    config_group,
    name_in_config,
    with_constants,
)
from posbench.run.folder import (
    CONFIG,
    DONE,
    EVALUATE_STAGE,
    FOUND_FILE,
    MANIFEST,
    METHOD_FILE,
    PROVENANCE,
    STATUS,
    RunDir,
    State,
    open_run_dir,
)
from posbench.run.lease import in_use
from posbench.run.shards import is_running
from posbench.schema import override_text
from posbench.stats.findings import estimate_columns
from posbench.stats.frames import UNMODIFIED, rows_over_all_positions

ListedState = Literal[State, "done, unchecked", "killed", "damaged"]
"""State of a run in a list of runs."""
METRICS_FILE = "metrics.csv"
FINDINGS_FILE = "findings.csv"
STUDY_FILE = "study.json"
"""Names the tables of a study."""
SUMMARY_FILES = (
    CONFIG,
    STATUS,
    PROVENANCE,
    MANIFEST,
    DONE,
    METHOD_FILE,
    FOUND_FILE,
    METRICS_FILE,
    FINDINGS_FILE,
    STUDY_FILE,
)
"""All files of a run that its summary is made from."""
NAMED_GROUPS = ("model", "task", "method", "search", "study")
"""Groups of a config with a name."""
RECORDED_GROUPS = (*NAMED_GROUPS, "runtime")
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
INDEX = ".runs.json"
"""The index file of an outputs folder; without it a list only takes longer."""
LIVE_STATES = ("running", "killed")
"""States that a process changes without writing to the run's files."""
SETTLED_SECONDS = 2.0
"""Age from which a file's times show every change: a file system counts them in steps of milliseconds or of
a second."""


@dataclass(frozen=True)
class RunSummary:
    """The state and the results of a run folder.

    Attributes:
        folder: The run folder.
        state: done, running, killed, failed, incomplete, mixed or damaged.
        started: When the run started, in ISO format; empty where unknown.
        seconds: Wall time.
        names: Names of its model, task, method, search and study, by group; empty where it has none.
        settings: Settings that can move a number, as an override spells them, by dotted key. Of a finished run, the
            parameters of its method are those that it applied, or that its search found.
        verdict: What a finished run says first, in a word or a few; empty where its tables are of an older version.
        tone: Whether that is ``good``, ``bad`` or ``open``; empty without a verdict.
        verdicts: How a study's claims fared, of a finished run.
        estimates: Score, difference and position bias of its method, of a finished run; without a
            method, the unmodified model's. None marks a number that was not measured.
        window_share: Mean prompt tokens over the context window, of a finished run; None where not known.
    """

    folder: Path
    state: ListedState
    started: str = ""
    seconds: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    verdict: str = ""
    tone: str = ""
    verdicts: str = ""
    estimates: Mapping[str, Any] = field(default_factory=dict)
    window_share: float | None = None

    @property
    def hash(self) -> str:
        """The end of its folder's name."""
        return self.folder.name.rpartition("__")[2]

    def name(self, group: str) -> str:
        """Name of its model, task, method, search or study; empty where it has none."""
        return self.names.get(group, "")


def summaries(folders: Sequence[Path]) -> list[RunSummary]:
    """Return the summaries of run folders, for unchanged ones from the index of their outputs folder.

    Args:
        folders: Run folders of one outputs folder, resolved.
    """
    if not folders:
        return []
    root = folders[0].parents[2]
    # An index belongs to one outputs folder.
    if any(folder.parents[2] != root for folder in folders):
        return read_summaries(folders)
    old = _read_index(root / INDEX)
    stamps = {folder: _stamp(folder) for folder in folders}
    known: dict[Path, RunSummary] = {}
    for folder, stamp in stamps.items():
        entry = old.get(_key(folder, root))
        if entry and entry["stamp"] == stamp:
            known[folder] = RunSummary(folder, **entry["summary"])
    changed = [folder for folder in folders if folder not in known]
    read = dict(zip(changed, read_summaries(changed), strict=True))
    # Those that stay, without runs that were removed or changed.
    entries = {
        key: entry
        for key, entry in old.items()
        if (root / key).is_dir() and root / key not in read
    }
    for folder, summary in read.items():
        if summary.state not in LIVE_STATES and _is_settled(stamps[folder]):
            fields = asdict(summary)
            del fields["folder"]
            entries[_key(folder, root)] = {"stamp": stamps[folder], "summary": fields}
    if entries != old:
        # A folder that may not be written to has no index.
        with suppress(OSError):
            _write_index(root / INDEX, entries)
    return [known.get(folder) or read[folder] for folder in folders]


def _key(folder: Path, root: Path) -> str:
    """The name of a run in the index."""
    return folder.relative_to(root).as_posix()


def _stamp(folder: Path) -> list[list[int] | None]:
    """Return inode, size and change times of each file behind a summary, None for a missing one.

    A stored summary is used again only while these are the same.
    """
    stamps: list[list[int] | None] = []
    for name in SUMMARY_FILES:
        try:
            stat = os.stat(f"{folder}/{name}")  # building paths would take longer
        except OSError:
            stamps.append(None)
            continue
        stamps.append([stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns])
    return stamps


def _is_settled(stamp: Sequence[Sequence[int] | None]) -> bool:
    """Whether the files were old enough when their stamp was taken for the next change to give another one."""
    newest = max((max(file[2:]) for file in stamp if file), default=0)
    return time.time() - newest / 1e9 >= SETTLED_SECONDS


def _code() -> str:
    """A digest of which posbench makes the summaries: names, sizes and times of its modules."""
    digest = hashlib.sha256()
    for file in sorted(paths.PACKAGE.rglob("*.py")):
        stat = file.stat()
        digest.update(f"{file} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _read_index(file: Path) -> dict[str, Row]:
    """Return the entries of an index file by run; empty if it is missing, damaged or from other code."""
    with suppress(OSError, ValueError):
        checksum, _, text = file.read_text(encoding="utf-8").partition("\n")
        if checksum == hashlib.sha256((_code() + text).encode()).hexdigest():
            entries: dict[str, Row] = json.loads(text)
            return entries
    return {}


def _write_index(file: Path, entries: Mapping[str, Row]) -> None:
    """Write an index: a checksum of the code and of the entries, and on a second line the entries."""
    text = json.dumps(entries)
    checksum = hashlib.sha256((_code() + text).encode()).hexdigest()
    write_text(file, f"{checksum}\n{text}")


def read_summaries(folders: Sequence[Path]) -> list[RunSummary]:
    """Read run folders; numbers are taken only from intact, finished runs."""
    read = [_read_summary(folder) for folder in folders]
    estimates = _estimates({str(run.folder): totals for run, totals in read})
    return [replace(run, estimates=estimates[str(run.folder)]) for run, _ in read]


def _read_summary(folder: Path) -> tuple[RunSummary, list[dict[str, str]]]:
    """Read the summary of a run, without its estimates.

    Returns:
        The summary, and the rows of metrics.csv from which its estimates are made; none unless the run is done.
    """
    run = open_run_dir(folder)
    config = dict[str, Any]()
    config_as_run = dict[str, Any]()
    try:
        tables = [f"{name}.csv" for name in run.read_json(STUDY_FILE).get("tables", ())]
        read_files = (
            CONFIG,
            METRICS_FILE,
            FINDINGS_FILE,
            METHOD_FILE,
            FOUND_FILE,
            STUDY_FILE,
        )
        is_intact = not run.damaged([*read_files, *tables])
        config = run.config()
        config_as_run = read_config_as_run(run)
    except UserError:
        is_intact = False
    status = run.facts(STATUS)
    started = str(run.facts(PROVENANCE).get("started", ""))
    state = _state(run, status) if is_intact else "damaged"
    is_done = state.startswith("done")
    if is_done:
        config = config_as_run
    verdict, tone = _first_look(folder) if state == "done" else ("", "")
    summary = RunSummary(
        folder,
        state,
        started,
        status.get("seconds"),
        names={group: name_in_config(config, group) for group in NAMED_GROUPS},
        settings=_settings(config),
        verdict=verdict,
        tone=tone,
        verdicts=_tally_verdicts(folder) if is_done else "",
        window_share=_window_share(status) if is_done else None,
    )
    return summary, _read_totals(folder) if is_done else []


def _window_share(status: Mapping[str, Any]) -> float | None:
    """The share of the context window that prompts take, from a run's status.json; None where not known."""
    share: float | None = (
        status.get("stages", {}).get(EVALUATE_STAGE, {}).get("window_share")
    )
    return share


def _state(run: RunDir, status: Mapping[str, Any]) -> ListedState:
    """Return the state of a run whose files are intact, as lists show it: done, running, killed, failed, ...

    Args:
        run: The run.
        status: Content of its status.json.
    """
    if run.done:
        # A run of an older version has no manifest.
        return "done" if (run.path / MANIFEST).is_file() else "done, unchecked"
    state: ListedState = status.get("state", "damaged")
    # Its process ended without a word.
    if state == "running" and not in_use(run.path) and not is_running(run.path):
        return "killed"
    return state


def read_config_as_run(run: RunDir) -> dict[str, Any]:
    """The config of a run, with the parameters that it applied, or else found, in place of its method's.

    Raises:
        UserError: A file is damaged.
    """
    config = run.config()
    method = config_group(config, "method")
    if not method:
        return config
    applied = run.read_json(METHOD_FILE) or None
    found: dict[str, Any] = {}
    file = run.path / FOUND_FILE
    if applied is None and file.is_file():
        found = read_yaml(file, dict[str, Object], hint=CORRECT_FILE)
    # The config has the constants of the model's file, which a search replaces.
    constants = applied_or_found(method, applied, found)
    return {**config, "method": with_constants(method, constants)}


def _settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that can move a number, by dotted key, as an override spells them."""
    groups = {group: config.get(group) for group in RECORDED_GROUPS}
    return {
        key: value
        for key, value in _flatten(groups, "")
        if not key.startswith(NEUTRAL_SETTINGS)
    }


def _read_totals(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv over all gold positions."""
    rows = _read_rows(folder / METRICS_FILE)
    return [row for row in rows if row.get("gold_position") == "all"]


def _first_look(folder: Path) -> tuple[str, str]:
    """Word and tone of the first look at a finished run; empty where its tables are of an older version."""
    from posbench.report.glance import run_word

    try:
        return run_word(folder)
    # Other columns than today's: the list has the score, but nothing to judge it by.
    except (UserError, LookupError):
        return "", ""


def _tally_verdicts(folder: Path) -> str:
    """How the paper's claims fared, or our controls where the paper makes none."""
    rows = _read_rows(folder / FINDINGS_FILE)
    if not rows:
        return ""
    from posbench.report.text import main_claims, tally_verdicts

    findings = pd.DataFrame(rows, columns=["kind", "verdict"])
    return tally_verdicts(main_claims(findings)["verdict"])


def _read_rows(file: Path) -> list[dict[str, str]]:
    """The rows of a CSV as text; none where there is no file."""
    if not file.is_file():
        return []
    with open(file, newline="", encoding="utf-8", errors="replace") as stream:
        return list(csv.DictReader(stream))


def _flatten(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield dotted keys and values below a node of a config, without names and class paths.

    Args:
        node: The node, or a value.
        key: Its dotted key.
    """
    if isinstance(node, Mapping):
        for name, value in node.items():
            if name not in ("_target_", "name"):
                yield from _flatten(value, f"{key}.{name}".strip("."))
    elif "." in key:
        # 1.0 as 1
        yield key, override_text(to_canonical(node))


def _estimates(
    totals: Mapping[str, Sequence[Mapping[str, str]]],
) -> dict[str, dict[str, Any]]:
    """Return the estimates of :class:`RunSummary` by run folder: score, difference and position bias.

    Args:
        totals: The rows of metrics.csv over all gold positions, by run folder.
    """
    numbers = [
        column for name in LIST_COLUMNS.values() for column in estimate_columns(name)
    ]
    empty: dict[str, Any] = {**dict.fromkeys(numbers), "n": None, "note": ""}
    estimates = {folder: dict(empty) for folder in totals}
    records = [
        {"run": folder, **row} for folder, of_run in totals.items() for row in of_run
    ]
    if not records:
        return estimates
    rows = pd.DataFrame(records)
    rows[estimate_columns()] = rows[estimate_columns()].apply(pd.to_numeric)
    is_unmodified = rows["method"] == UNMODIFIED
    runs_with_method = rows.loc[~is_unmodified, "run"]
    # The unmodified model's estimates only of runs without a method.
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
                estimate[target] = None if pd.isna(row[source]) else float(row[source])
            if name != "difference":
                estimate["n"] = int(row["n"])
                # It is NaN in runs without the column, next to runs with it.
                note = row.get("note")
                estimate["note"] = note if isinstance(note, str) else ""
    return estimates
