"""A paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from posbench.files.atomic import Row
from posbench.plots.section import Section
from posbench.plots.sweep import with_setting
from posbench.report.folder import read_json, unreadable
from posbench.report.tables import Table, cell, points
from posbench.stats.findings import columns

OTHER_MODEL = "other model, not comparable"
TOLERANCE = 0.025  # how far (0..1) a paper's depth label may lie from the nearest depth we measured


def beside(folder: Path, metrics: pd.DataFrame, subsets: pd.DataFrame | None) -> list[Section]:
    """What the paper of a folder's experiment says, and its numbers beside ours where the same model ran.
    Raises `UserError` where reference.json is malformed."""
    facts, reference = read_json(folder / "experiment.json") or {}, read_json(folder / "reference.json") or []
    if not facts and not reference:
        return []
    try:
        header, rows = reference_table(with_subsets(metrics, subsets), list(reference))
        text = reference_text(facts, list(reference), bool(rows))
    except (KeyError, TypeError, ValueError) as error:
        allowed = "a list of rows with model, method, task, gold_position, metric, value"
        raise unreadable(folder / "reference.json", error, allowed) from error
    return [Section(str(facts.get("title", "Beside the paper's numbers")), text, header, rows)]


def reference_text(facts: Mapping[str, Any], reference: Sequence[Row], compared: bool) -> str:
    """What is said beside a paper's rows, from ``experiment.json`` and whether one of its models ran."""
    text = [str(facts.get("note", ""))]
    if facts.get("claims"):
        text.append("The paper's reading: " + "; ".join(facts["claims"]) + ".")
    if compared:
        text.append("A number agrees if the paper's value lies within our 95 % interval.")
    elif reference:
        models = ", ".join(dict.fromkeys(str(row["model"]) for row in reference))
        text.append(f"The paper's numbers are for {models}; none of these ran here, so nothing is compared.")
    sources = "; ".join(dict.fromkeys(str(row["source"]) for row in reference if row.get("source")))
    text.append(f"Source: {sources}." if sources else "")
    return " ".join(filter(None, text))


def reference_table(metrics: pd.DataFrame, reference: Sequence[Row]) -> Table:
    """A paper's numbers beside ours as text, for the models that ran; no rows where no model matches. Of a
    sweep each row names the settings that it holds for, `all` where these are all that are compared."""
    swept, label = [c for c in metrics.columns[: list(metrics).index("model")] if c != "run"], ""
    if swept:
        metrics, _, label = with_setting(metrics, swept)
    table = compared(metrics, reference).rename(columns={"ours": "value"})
    table, cells = table[table["verdict"] != OTHER_MODEL], dict[tuple[str, ...], dict[str, None]]()
    for row in table.itertuples():
        missing, paper = pd.isna(row.value), f"{100 * row.paper:.1f}"
        numbers = (paper, *(("", "") if missing else (cell(row, "{:.1f}"), points(row.difference))))
        key = (row.task, row.model, row.method, row.gold_position, *numbers, row.verdict)
        cells.setdefault(key, {})[row.setting] = None
    every, rows = set(table["setting"]) - {""}, []
    for (_, *texts), settings in cells.items():
        where = "all" if len(every) > 1 and set(settings) == every else ", ".join(settings)
        rows.append([*texts, *([where] if swept else [])])
    header = ["model", "method", "gold position", "paper %", "ours %", "difference", "verdict"]
    return [*header, *([label] if swept else [])], rows


def with_subsets(metrics: pd.DataFrame, subsets: pd.DataFrame | None) -> pd.DataFrame:
    """metrics.csv rows and, with their name as position, those of subsets.csv."""
    if subsets is None:
        return metrics
    named = subsets[subsets["subset"] != "all"].drop(columns="kind")
    named = named.rename(columns={"subset": "gold_position"}).assign(depth=np.nan)
    return pd.concat([metrics, named], ignore_index=True)


def compared(metrics: pd.DataFrame, reference: Sequence[Row]) -> pd.DataFrame:
    """Put a paper's numbers beside those of metrics.csv or summary.csv.

    The paper's rows have model, method, task, gold_position (`all`, a 0-based index, or a depth as `25%`,
    which the nearest one within 2.5 points matches), metric, value (0..1), and any further column of ours.
    Each gives a row per match: its names, our setting of a sweep, paper, ours, ci_low, ci_high, difference
    (ours - paper), verdict: `agrees` where the paper's number lies in our interval, `differs`, or why not.
    """
    named = ["model", "method", "task", "gold_position", "metric"]
    models, out = set(metrics["model"].astype(str)), []
    metrics = metrics if "setting" in metrics else metrics.assign(setting="")
    for row in reference:
        match = metrics
        for column in set(row) & set(metrics) - {"gold_position", "n", "depth", *columns()}:
            match = match[match[column].map(_plain) == _plain(str(row[column]))]
        match = _at(match, str(row["gold_position"]))
        line = {**{c: str(row[c]) for c in named}, "setting": "", "paper": float(row["value"])}
        if match.empty:
            out.append({**line, "verdict": "not measured" if line["model"] in models else OTHER_MODEL})
        for setting, value, low, high in match[["setting", *columns()]].itertuples(index=False):
            inside = "agrees" if low <= line["paper"] <= high else "differs"
            verdict = "no interval" if pd.isna(low) or pd.isna(high) else inside
            ours = {"ours": value, "ci_low": low, "ci_high": high, "difference": value - line["paper"]}
            out.append({**line, "setting": setting, **ours, "verdict": verdict})
    front = [*named, "setting", "paper", "ours"]
    return pd.DataFrame(out, columns=[*front, "ci_low", "ci_high", "difference", "verdict"])


def _at(rows: pd.DataFrame, position: str) -> pd.DataFrame:
    """Rows at a position label: equal text, or for `25%` the nearest depth within the tolerance."""
    if not position.endswith("%"):
        return rows[rows["gold_position"].astype(str) == position]
    far = (pd.to_numeric(rows["depth"]) - float(position[:-1]) / 100).abs()
    return rows[(far <= TOLERANCE) & (far == far.min())]


def _plain(value: Any) -> str:
    """Text by which two values are compared: 0, 0.0 and `0` are equal."""
    try:
        return f"{float(value):g}"
    except (TypeError, ValueError):
        return str(value)
