"""A paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from posbench.files.atomic import Row
from posbench.report.text import points

NUMBERS = ("value", "ci_low", "ci_high")
OTHER_MODEL = "other model, not comparable"
TOLERANCE = 0.025  # how far (0..1) a paper's depth label may lie from the nearest depth we measured


def reference_text(facts: Mapping[str, Any], reference: Sequence[Row], compared: bool) -> str:
    """What is said beside a paper's numbers.

    Args:
        facts: ``experiment.json``: ``note`` on the setting and ``claims`` of the paper.
        reference: The paper's rows.
        compared: Whether one of the paper's models ran.
    """
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
    return " ".join(part for part in text if part)


def reference_table(metrics: pd.DataFrame, reference: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """A paper's numbers beside ours as text, for the models that ran: header and rows, none where no model
    matches."""
    table = compared(metrics, reference)
    table = table[table["verdict"] != OTHER_MODEL]
    rows = []
    for row in table.itertuples():
        ours = (
            ""
            if pd.isna(row.ours)
            else f"{100 * row.ours:.1f} [{100 * row.ci_low:.1f}, {100 * row.ci_high:.1f}]"
        )
        change = "" if pd.isna(row.difference) else points(row.difference)
        rows.append(
            [row.model, row.method, row.gold_position, f"{100 * row.paper:.1f}", ours, change, row.verdict]
        )
    return ["model", "method", "gold position", "paper %", "ours %", "difference", "verdict"], rows


def with_subsets(metrics: pd.DataFrame, subsets: pd.DataFrame | None) -> pd.DataFrame:
    """metrics.csv rows and, with their name as position, those of subsets.csv: what a paper's table is
    compared with."""
    if subsets is None:
        return metrics
    named = (
        subsets[subsets["subset"] != "all"].rename(columns={"subset": "gold_position"}).drop(columns="kind")
    )
    return pd.concat([metrics, named.assign(depth=np.nan)], ignore_index=True)


def compared(metrics: pd.DataFrame, reference: Sequence[Row]) -> pd.DataFrame:
    """Put a paper's numbers beside ours.

    Args:
        metrics: metrics.csv or summary.csv rows.
        reference: Rows with model, method, task, gold_position (`all`, a 0-based index, or a depth such as
            `25%`), metric, value (0..1). A depth matches the nearest one measured within 2.5 points. Any
            further key that is a column of `metrics` (a swept one, say) must match too.

    Returns:
        One row per reference row and match: model, method, task, gold_position, metric, paper, ours, ci_low,
        ci_high, difference (ours - paper), verdict: `agrees` if the paper's number lies in our interval, else
        `differs`; `other model, not comparable`, `not measured` or `no interval` where that cannot be said.
    """
    named = ["model", "method", "task", "gold_position", "metric"]
    out = []
    for row in reference:
        outside = ("gold_position", *NUMBERS, "n", "depth")
        same = {c: str(v) for c, v in row.items() if c in metrics and c not in outside}
        match = metrics
        for column, value in same.items():
            match = match[match[column].map(_plain) == _plain(value)]
        match = _at(match, str(row["gold_position"]))
        line = {**{c: str(row[c]) for c in named}, "paper": float(row["value"])}
        none = dict.fromkeys(("ours", "ci_low", "ci_high", "difference"), np.nan)
        if str(row["model"]) not in set(metrics["model"].astype(str)):
            out.append({**line, **none, "verdict": OTHER_MODEL})
        elif match.empty:
            out.append({**line, **none, "verdict": "not measured"})
        for value, low, high in match[list(NUMBERS)].itertuples(index=False):
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
