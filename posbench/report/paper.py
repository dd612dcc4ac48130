"""A paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posbench.files.atomic import Row
from posbench.late import pd
from posbench.plots.section import Section
from posbench.plots.sweep import with_setting
from posbench.report.folder import read_json, unreadable
from posbench.report.tables import Table, cell, points
from posbench.report.text import tally
from posbench.stats.bootstrap import Estimate, wilson
from posbench.stats.findings import columns
from posbench.stats.reference import MARGIN, agreement

OTHER_MODEL = "other model, not comparable"
MIXED = "different in different settings"
AGREEMENT = ("agrees", "differs", "inconclusive", "no interval", "not measured", MIXED)
CELL = ["model", "method", "task", "gold_position", "metric"]
"""Columns that name a cell of a paper."""
TOLERANCE = 0.025  # how far (0..1) a paper's depth label may lie from the nearest depth we measured


def beside(
    folder: Path, metrics: pd.DataFrame, subsets: pd.DataFrame | None
) -> list[Section]:
    """What the paper of a folder's experiment says, and its numbers beside ours where the same model ran.
    Raises `UserError` where reference.json is malformed."""
    facts = read_json(folder / "experiment.json") or {}
    reference = read_json(folder / "reference.json") or []
    if not facts and not reference:
        return []
    try:
        table, label = cells(with_subsets(metrics, subsets), list(reference))
        header, rows = reference_table(table, label)
        text = reference_text(facts, list(reference), table)
    except (KeyError, TypeError, ValueError) as error:
        allowed = (
            "a list of rows with model, method, task, gold_position, metric, value"
        )
        raise unreadable(folder / "reference.json", error, allowed) from error
    return [
        Section(
            str(facts.get("title", "Beside the paper's numbers")), text, header, rows
        )
    ]


def reference_text(
    facts: Mapping[str, Any], reference: Sequence[Row], table: pd.DataFrame
) -> str:
    """What is said beside a paper's rows, from ``experiment.json`` and its :func:`cells` that ran here."""
    text = [str(facts.get("note", ""))]
    if facts.get("claims"):
        text.append("The paper's reading: " + "; ".join(facts["claims"]) + ".")
    if len(table):
        text += [_rule(reference), counted(table)]
    elif reference:
        models = ", ".join(dict.fromkeys(str(row["model"]) for row in reference))
        text.append(
            f"The paper's numbers are for {models}; none of these ran here, so nothing is compared."
        )
    sources = "; ".join(
        dict.fromkeys(str(row["source"]) for row in reference if row.get("source"))
    )
    text.append(f"Source: {sources}." if sources else "")
    return " ".join(filter(None, text))


def _rule(reference: Sequence[Row]) -> str:
    """When a cell agrees, and whose sampling error is in the test."""
    margin = 100 * _margin(reference[0])
    sizes = sorted({row["n"] for row in reference if "n" in row})
    known = all("n" in row for row in reference)
    error = (
        f"the paper's own sampling error (n = {', '.join(map(str, sizes))}) is in it"
        if sizes
        else ""
    )
    error += " where its n is known" if sizes and not known else ""
    error = (
        error
        or "the paper's n is not known, so the interval has our sampling error alone"
    )
    return (
        f"A cell agrees if the 90 % interval of ours minus the paper's lies within {margin:g} points of zero "
        f"(two one-sided tests at 5 %), differs if it lies wholly beyond, else it is inconclusive; {error}."
    )


def counted(table: pd.DataFrame) -> str:
    """How many of the paper's cells agree, each once, those near zero apart."""
    groups = table.groupby(CELL, sort=False)
    verdicts = groups["verdict"].agg(
        lambda each: each.iloc[0] if each.nunique() == 1 else MIXED
    )
    near = groups["near_zero"].first()
    text = f"Cells of the paper: {tally(verdicts[~near], AGREEMENT) or 'none away from zero'}."
    apart = f"{near.sum()} within the margin of zero, where a model that always fails agrees, too"
    return (
        text
        + f" Apart from these {apart}: {tally(verdicts[near], AGREEMENT)}."
        * bool(near.any())
    )


def cells(metrics: pd.DataFrame, reference: Sequence[Row]) -> tuple[pd.DataFrame, str]:
    """:func:`compared` for the models that ran, and what a sweep's settings are called."""
    swept = [c for c in metrics.columns[: list(metrics).index("model")] if c != "run"]
    label = ""
    if swept:
        metrics, _, label = with_setting(metrics, swept)
    table = compared(metrics, reference)
    return table[table["verdict"] != OTHER_MODEL], label


def reference_table(table: pd.DataFrame, label: str = "") -> Table:
    """A paper's :func:`cells` beside ours as text. Of a sweep each row names the settings that it holds for,
    `all` where these are all that are compared."""
    found = dict[tuple[str, ...], dict[str, None]]()
    for row in table.rename(columns={"ours": "value"}).itertuples():
        missing = pd.isna(row.value)
        paper = f"{100 * row.paper:.1f}"
        numbers = (
            paper,
            *(("", "") if missing else (cell(row, "z.1f"), points(row.difference))),
        )
        verdict = f"{row.verdict}{' (near zero)' if row.near_zero else ''}"
        key = (row.task, verdict, row.model, row.method, row.gold_position, *numbers)
        found.setdefault(key, {})[row.setting] = None
    every = set(table["setting"]) - {""}
    rows = []
    for (_, *texts), settings in found.items():
        where = (
            "all" if len(every) > 1 and set(settings) == every else ", ".join(settings)
        )
        rows.append([*texts, *([where] if label else [])])
    header = [
        "verdict",
        "model",
        "method",
        "gold position",
        "paper %",
        "ours %",
        "difference",
    ]
    return [*header, *([label] if label else [])], rows


def paper_table(table: pd.DataFrame) -> Table:
    """A paper's :func:`cells` in its own layout: a block for each model and method with the paper's number,
    ours with its 95 % interval, the difference in points and the verdict; a column for each gold position."""
    several = [
        name for name in ("task", "metric", "setting") if table[name].nunique() > 1
    ]
    names = [*several, "model", "method"]
    places = list(dict.fromkeys(table["gold_position"]))
    rows = []
    for key, part in table.rename(columns={"ours": "value"}).groupby(names, sort=False):
        at = {row.gold_position: row for row in part.itertuples()}
        lines = {
            "paper %": lambda row: f"{100 * row.paper:.1f}",
            "ours %": lambda row: cell(row, "z.1f"),
            "difference": lambda row: (
                "" if pd.isna(row.difference) else points(row.difference)
            ),
            "verdict": lambda row: row.verdict,
        }
        for line, text in lines.items():
            rows.append(
                [
                    *key,
                    line,
                    *(text(at[place]) if place in at else "" for place in places),
                ]
            )
    return [*names, "", *places], rows


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
    (ours - paper), near_zero (the paper's number lies within the margin of 0), and the verdict of
    :func:`agreement`, or why there is none. Its sampling error is that of `n` examples, also for an average
    over positions: these ask the same questions.
    """
    models = set(metrics["model"].astype(str))
    out = []
    metrics = metrics if "setting" in metrics else metrics.assign(setting="")
    for row in reference:
        match = metrics
        for column in set(row) & set(metrics) - {
            "gold_position",
            "n",
            "depth",
            *columns(),
        }:
            match = match[match[column].map(_plain) == _plain(str(row[column]))]
        match = _at(match, str(row["gold_position"]))
        paper = float(row["value"])
        n = row.get("n")
        margin = _margin(row)
        line: Row = {**{c: str(row[c]) for c in CELL}, "setting": "", "paper": paper}
        line["near_zero"] = abs(paper) <= margin
        printed = Estimate(
            paper, *(wilson(paper * n, n) if n else (paper, paper)), n or 0
        )
        if match.empty:
            out.append(
                {
                    **line,
                    "verdict": "not measured"
                    if line["model"] in models
                    else OTHER_MODEL,
                }
            )
        for setting, *at in match[["setting", *columns(), "n"]].itertuples(index=False):
            ours = Estimate(*at)
            found = {"setting": setting, "difference": at[0] - paper}
            found |= {
                "ours": ours.value,
                "ci_low": ours.ci_low,
                "ci_high": ours.ci_high,
            }
            out.append({**line, **found, "verdict": agreement(ours, printed, margin)})
    numbers = [
        "paper",
        "ours",
        "ci_low",
        "ci_high",
        "difference",
        "near_zero",
        "verdict",
    ]
    return pd.DataFrame(out, columns=[*CELL, "setting", *numbers])


def _margin(row: Row) -> float:
    """The margin of a paper's row; older folders hold none."""
    return float(row.get("margin", MARGIN))


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
