"""The files of a run or a sweep as tables."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from posbench.errors import UserError
from posbench.files import parse
from posbench.files.parse import Objects
from posbench.late import pd
from posbench.run.folder import JOBS, need_outside_runs
from posbench.stats.findings import FINDING_COLUMNS
from posbench.stats.scores import METRIC_COLUMNS, SUBSET_COLUMNS

RUN_AGAIN = "repeat the run that wrote it"
"""The next step where a file of a run cannot be read."""
EXCHANGE_ATTEMPTS = 5
EXCHANGE_SECONDS = 0.05
"""A pause in which another process, seen while it exchanges a folder for a new one, has done so."""
PAPER_FILES = ("experiment.json", "reference.json")
"""Files of a run or a sweep that belongs to an experiment, or has a paper's numbers to compare with."""
CAPTIONS = "captions.json"
"""Captions of the figures in the same folder, by file name."""
TEXT_COLUMNS = {
    "run",
    "model",
    "method",
    "task",
    "gold_position",
    "metric",
    "channel",
    "site",
    "kind",
    "subset",
    "claim",
    "statistic",
    "verdict",
    "note",
}
ATTENTION_COLUMNS = (
    "model",
    "method",
    "task",
    "gold_position",
    "layer",
    "item",
    "attention",
)
TREND_COLUMNS = (
    "group",
    "axis",
    "statistic",
    "number",
    "value",
    "ci_low",
    "ci_high",
    "n",
)
"""Columns of ``trend.csv``: a statistic at one ``number`` of the swept key, ``none`` when unmodified."""
REQUIRED_METRICS = tuple(column for column in METRIC_COLUMNS if column != "note")
REQUIRED_COLUMNS = {
    "metrics": REQUIRED_METRICS,
    "summary": REQUIRED_METRICS,
    "subsets": SUBSET_COLUMNS,
    "subsets_summary": SUBSET_COLUMNS,
    "attention": ATTENTION_COLUMNS,
    "attention_summary": ATTENTION_COLUMNS,
    "findings": tuple(name for name in FINDING_COLUMNS if name != "holds_if"),
    "trend": TREND_COLUMNS,
}
"""Columns that a table must have; tables of searches and studies are read by their own modules."""


def read_csv(path: Path) -> pd.DataFrame | None:
    """Read a CSV in which texts such as `none` and `null` stay texts; None if it is absent or has no rows.

    A swept key with the name of a later column, such as `method`, gets the name `method (swept)`.

    Raises:
        UserError: It cannot be read or lacks a required column.
    """
    required = REQUIRED_COLUMNS.get(path.stem, ())
    allowed = "a CSV as posbench writes it"
    if required:
        allowed = f"a CSV with {', '.join(required)}"
    frame = read_file(path, _parse_csv, allowed)
    return None if frame is None or frame.empty else frame


def _parse_csv(path: Path) -> pd.DataFrame:
    """Parse a CSV for :func:`read_csv`, with columns of texts as texts and swept keys renamed.

    Raises:
        ValueError: A required column is missing.
    """
    names = _column_names(path)
    required = REQUIRED_COLUMNS.get(path.stem, ())
    missing = [name for name in required if name not in names]
    if missing:
        raise ValueError(f"columns missing: {', '.join(missing)}")
    text_types: dict[str, type] = {}
    new_names: dict[str, str] = {}
    for name in names:
        base = name.removesuffix(".1")
        if base in TEXT_COLUMNS:
            # On tables of a run, pandas' own type of texts takes nearly twice the time.
            text_types[name] = object
        # A swept `method` comes before the metrics' own, which pandas renames to `method.1`.
        if base != name and base in names:
            new_names[base] = f"{base} (swept)"
            new_names[name] = base
    if "metric" not in names:
        text_types.pop("gold_position", None)  # always an index there, never ``all``
    return _plain_csv(path, dtype=text_types).rename(columns=new_names)


def _column_names(path: Path) -> list[str]:
    """Return the columns of a CSV as pandas names them: a second `method` is `method.1`."""
    with open(path, encoding="utf-8", newline="") as file:
        header = next(csv.reader(file), [])
    names = []
    for index, name in enumerate(header):
        repetitions = header[:index].count(name)
        names.append(f"{name}.{repetitions}" if repetitions else name)
    return names


def study_tables(folder: Path, names: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Return the tables of a study by name, as its files hold them; text such as ``none`` stays text."""
    return {
        name: read_file(
            folder / f"{name}.csv", _plain_csv, "a CSV as posbench writes it"
        )
        for name in names
    }


def _plain_csv(path: Path, **options: Any) -> pd.DataFrame:
    return pd.read_csv(path, keep_default_na=False, na_values=["", "nan"], **options)


def sweep_runs(sweep: Path) -> list[Path]:
    """Return the folders of a sweep's finished jobs; empty if the folder is a run's.

    They are looked up beside the sweep, as outputs may have been moved since their paths were recorded.
    """
    sweep = sweep.resolve()
    jobs = read_json(sweep / JOBS, Objects) or []
    recorded = [Path(job["folder"]) for job in jobs if job["folder"]]
    suites = {run.parents[1].name for run in recorded}
    folders = []
    for run in recorded:
        # A sweep over tasks has runs in several suites; a single one may be renamed.
        suite = sweep.parents[1]
        if len(suites) > 1:
            suite = sweep.parents[2] / run.parents[1].name
        folders.append(suite / run.parent.name / run.name)
    return folders


def read_text(path: Path) -> str:
    """A text file's content; empty where there is none."""
    return read_file(path, parse.read_text, "UTF-8 text") or ""


def read_json(path: Path, shape: Any = parse.Object, hint: str = RUN_AGAIN) -> Any:
    """A JSON file's content, as :func:`posbench.files.parse.read_json` checks it; None where there is none."""
    return parse.read_json(path, shape, hint=hint) if path.is_file() else None


def read_file(path: Path, parse: Callable[[Path], Any], allowed: str) -> Any:
    """Return what ``parse`` makes of a file; None where there is no file.

    Args:
        path: The file.
        parse: Reads it.
        allowed: What the file should be, in words, for the error.

    Raises:
        UserError: It cannot be parsed.
    """
    try:
        return parse(path) if path.is_file() else None
    # Errors of pandas and Unicode are ValueErrors.
    except (ValueError, csv.Error) as error:
        raise unreadable_file_error(path, error, allowed) from error


def unreadable_file_error(path: Path, error: Exception, allowed: str) -> UserError:
    """The error of a file that cannot be read."""
    return parse.unreadable(path, error, allowed, RUN_AGAIN)


def config_group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A group of a run's config, as ``model``; empty where the config has none."""
    group = config.get(name)
    return group if isinstance(group, Mapping) else {}


def name_in_config(config: Mapping[str, Any], group: str) -> str:
    """The name of a run's model, task, method, search or study, from its config; empty where it has none."""
    return str(config_group(config, group).get("name") or "")


def applied_or_found(
    node: Mapping[str, Any],
    applied: Mapping[str, Any] | None,
    found: Mapping[str, Mapping[str, Any]],
) -> Mapping[str, Any]:
    """The constants that a run applied; of one that searched and has not applied its result yet, that result.

    Args:
        node: The config node of its method.
        applied: Content of its method.json; None without one.
        found: Content of its found.yaml, by method; empty without one.
    """
    if applied is not None:
        return applied
    return {"parts": found} if "parts" in node else found.get(str(node.get("name")), {})


def with_constants(
    node: Mapping[str, Any], constants: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a method's config node with other constants, also in the methods that it is composed of.

    Args:
        node: The node; its name, class and list of parts stay.
        constants: New values by parameter, those of parts below ``parts`` by name.

    Returns:
        Lists, dictionaries, strings and numbers only.
    """
    fixed_keys = ("name", "_target_", "parts")
    filled = {
        key: constants.get(key, value) if key not in fixed_keys else value
        for key, value in node.items()
    }
    if "parts" in node:
        parts = constants.get("parts", {})
        filled["parts"] = {
            name: with_constants(part, parts.get(name, {}))
            for name, part in node["parts"].items()
        }
    # Through JSON, so that tuples become lists as in a recorded config.
    return json.loads(json.dumps(filled))  # type: ignore[no-any-return]


def need_destination(out: Path, is_ours: Callable[[], bool], kind: str) -> None:
    """Raise `UserError` if a new folder would replace something that is not ours.

    Args:
        out: Place of the new folder.
        is_ours: Returns whether the place holds a folder of the same kind.
        kind: The kind of folder, in words.
    """
    need_outside_runs("--out", out)
    for _ in range(EXCHANGE_ATTEMPTS):
        if is_ours() or not out.exists() or (out.is_dir() and not _has_files(out)):
            return
        # Another process may be putting its folder there.
        time.sleep(EXCHANGE_SECONDS)
    allowed = f"a new folder, or a {kind} to replace"
    raise UserError("--out", str(out), allowed, "name another folder")


def _has_files(folder: Path) -> bool:
    """Whether a folder holds anything; false for one that is gone."""
    with suppress(FileNotFoundError):
        return any(folder.iterdir())
    return False


def need_files(folder: Path, allowed: str, *names: str) -> None:
    """Refuse a folder that holds none of some files.

    Args:
        folder: The folder.
        allowed: What it should be, for the error.
        names: The files.

    Raises:
        UserError: It holds none.
    """
    if any((folder / name).is_file() for name in names):
        return
    hint = "no such folder; check the path"
    if folder.is_dir():
        hint = "posbench prints the folder of each run"
    raise UserError("DIR", str(folder), allowed, hint)
