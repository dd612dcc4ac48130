"""A paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from posbench.files.atomic import Row
from posbench.plots.section import Section
from posbench.report.folder import read_json, unreadable
from posbench.report.tables import Table, cell, points
from posbench.stats.findings import columns

OTHER_MODEL = "other model, not comparable"
TOLERANCE = 0.025  # how far (0..1) a paper's depth label may lie from the nearest depth we measured


def beside(folder: Path, metrics: pd.DataFrame, subsets: pd.DataFrame | None) -> list[Section]:
    """What the paper of a folder's experiment says, and its numbers beside ours where the same model ran.

    Raises:
        UserError: reference.json is malformed.
    """
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
    """A paper's numbers beside ours as text, for the models that ran; no rows where no model matches."""
    table, rows = compared(metrics, reference).rename(columns={"ours": "value"}), []
    for row in table[table["verdict"] != OTHER_MODEL].itertuples():
        ours = "" if pd.isna(row.value) else cell(row, "{:.1f}")
        change = "" if pd.isna(row.value) else points(row.difference)
        paper = f"{100 * row.paper:.1f}"
        rows.append([row.model, row.method, row.gold_position, paper, ours, change, row.verdict])
    return ["model", "method", "gold position", "paper %", "ours %", "difference", "verdict"], rows


def with_subsets(metrics: pd.DataFrame, subsets: pd.DataFrame | None) -> pd.DataFrame:
    """metrics.csv rows and, with their name as position, those of subsets.csv."""
    if subsets is None:
        return metrics
    named = subsets[subsets["subset"] != "all"].drop(columns="kind")
    named = named.rename(columns={"subset": "gold_position"}).assign(depth=np.nan)
    return pd.concat([metrics, named], ignore_index=True)


def compared(metrics: pd.DataFrame, reference: Sequence[Row]) -> pd.DataFrame:
    """Put a paper's numbers beside those of metrics.csv or summary.csv.

    Args:
        metrics: Our rows.
        reference: Rows with model, method, task, gold_position (`all`, a 0-based index, or a depth such as
            `25%`, which the nearest one within 2.5 points matches), metric, value (0..1), and any further
            column of `metrics`, a swept one, say.

    Returns:
        One row per reference row and match: its names, paper, ours, ci_low, ci_high, difference (ours -
        paper), verdict: `agrees` where the paper's number lies in our interval, `differs`, or why not.
    """
    named = ["model", "method", "task", "gold_position", "metric"]
    models, out = set(metrics["model"].astype(str)), []
    for row in reference:
        match = metrics
        for column in set(row) & set(metrics) - {"gold_position", "n", "depth", *columns()}:
            match = match[match[column].map(_plain) == _plain(str(row[column]))]
        match = _at(match, str(row["gold_position"]))
        line = {**{c: str(row[c]) for c in named}, "paper": float(row["value"])}
        if match.empty:
            out.append({**line, "verdict": "not measured" if line["model"] in models else OTHER_MODEL})
        for value, low, high in match[columns()].itertuples(index=False):
            inside = "agrees" if low <= line["paper"] <= high else "differs"
            verdict = "no interval" if pd.isna(low) or pd.isna(high) else inside
            ours = {"ours": value, "ci_low": low, "ci_high": high, "difference": value - line["paper"]}
            out.append({**line, **ours, "verdict": verdict})
    return pd.DataFrame(out, columns=[*named, "paper", "ours", "ci_low", "ci_high", "difference", "verdict"])


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
