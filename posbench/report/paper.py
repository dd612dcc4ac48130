"""A paper's numbers next to ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posbench.files.atomic import Row
from posbench.files.parse import Objects
from posbench.late import pd
from posbench.plots.section import Section
from posbench.plots.sweep import with_setting
from posbench.report.folder import read_json, unreadable_file_error
from posbench.report.tables import Table, cell, has_missing_note, points
from posbench.report.text import swept_keys, tally_verdicts
from posbench.stats.bootstrap import Estimate, wilson
from posbench.stats.findings import estimate, estimate_columns
from posbench.stats.reference import SHARE_MARGIN, agreement

OTHER_MODEL = "other model, not comparable"
DIFFERENT_BY_SETTING = "different in different settings"
MISSING_ANSWERS = "missing answers, not comparable"
AGREEMENT = (
    "agrees",
    "differs",
    "inconclusive",
    "no interval",
    "not measured",
    MISSING_ANSWERS,
    DIFFERENT_BY_SETTING,
)
CELL_COLUMNS = ["model", "method", "task", "gold_position", "metric"]
"""Columns that name a cell of a paper."""
RUN_COLUMNS = ["model", "method", "task", "setting"]
"""Columns that name a set of prompts asked together, which is judged by its missing answers."""
DEPTH_TOLERANCE = 0.025
"""Largest distance (0..1) of a paper's depth label from the nearest depth we measured."""


def paper_sections(
    folder: Path, metrics: pd.DataFrame, subsets: pd.DataFrame | None
) -> list[Section]:
    """The paper's claims and numbers next to ours, as one section; none without a paper.

    Args:
        folder: Folder of a run or a sweep.
        metrics: Its metrics.csv or summary.csv.
        subsets: Its scores on subsets, if it has any.

    Raises:
        UserError: reference.json is malformed.
    """
    facts = read_json(folder / "experiment.json") or {}
    reference = read_json(folder / "reference.json", Objects) or []
    if not facts and not reference:
        return []
    try:
        table, label = paper_cells(with_subsets(metrics, subsets), list(reference))
        header, rows = reference_table(table, label)
        text = reference_text(facts, list(reference), table)
    except (KeyError, TypeError, ValueError) as error:
        allowed = (
            "a list of rows with model, method, task, gold_position, metric, value"
        )
        raise unreadable_file_error(
            folder / "reference.json", error, allowed
        ) from error
    title = str(facts.get("title", "Beside the paper's numbers"))
    return [Section(title, text, header, rows)]


def reference_text(
    facts: Mapping[str, Any], reference: Sequence[Row], table: pd.DataFrame
) -> str:
    """The text above a paper's numbers: its claims, how cells are compared, the source.

    Args:
        facts: Content of experiment.json.
        reference: The paper's rows.
        table: Its :func:`paper_cells` that were measured.
    """
    texts = []
    if facts.get("note"):
        texts.append(str(facts["note"]))
    if facts.get("claims"):
        texts.append(f"The paper's reading: {'; '.join(facts['claims'])}.")
    if len(table):
        texts.append(_agreement_rule(reference))
        texts.append(count_agreement(table))
    elif reference:
        models = ", ".join(dict.fromkeys(str(row["model"]) for row in reference))
        texts.append(
            f"The paper's numbers are for {models}; none of these ran here, so nothing is compared."
        )
    sources = dict.fromkeys(
        str(row["source"]) for row in reference if row.get("source")
    )
    if sources:
        texts.append(f"Source: {'; '.join(sources)}.")
    return " ".join(texts)


def _agreement_rule(reference: Sequence[Row]) -> str:
    """Return the sentence that explains when a number of ours agrees with the paper's.

    Args:
        reference: The paper's numbers; ``n``, where known, gives their sampling error.
    """
    margin = 100 * _margin(reference[0])
    sizes = sorted({row["n"] for row in reference if "n" in row})
    if sizes:
        listed = ", ".join(map(str, sizes))
        error_source = f"the paper's own sampling error (n = {listed}) is in it"
        if not all("n" in row for row in reference):
            error_source += " where its n is known"
    else:
        error_source = (
            "the paper's n is not known, so the interval has our sampling error alone"
        )
    return (
        f"A cell agrees if the 90 % interval of ours minus the paper's lies within {margin:g} points of zero "
        f"(two one-sided tests at 5 %), differs if it lies wholly beyond, else it is inconclusive; {error_source}."
    )


def count_agreement(table: pd.DataFrame) -> str:
    """Return a sentence with how many of the paper's cells agree, differ or are inconclusive.

    Cells near zero are counted separately; a cell that was measured in several settings counts once.

    Args:
        table: Rows of :func:`paper_cells`.
    """
    groups = table.groupby(CELL_COLUMNS, sort=False)
    verdicts = groups["verdict"].agg(_common_verdict)
    near_zero = groups["near_zero"].first()
    clear_counts = (
        tally_verdicts(verdicts[~near_zero], AGREEMENT) or "none away from zero"
    )
    text = f"Cells of the paper: {clear_counts}."
    if near_zero.any():
        count = near_zero.sum()
        text += (
            f" Apart from these {count} within the margin of zero, where a model that "
            f"always fails agrees, too: {tally_verdicts(verdicts[near_zero], AGREEMENT)}."
        )
    return text


def _common_verdict(verdicts: pd.Series) -> str:
    return verdicts.iloc[0] if verdicts.nunique() == 1 else DIFFERENT_BY_SETTING


def paper_cells(
    metrics: pd.DataFrame, reference: Sequence[Row]
) -> tuple[pd.DataFrame, str]:
    """Select a paper's numbers whose model ran here, and put ours next to them.

    Args:
        metrics: Rows of metrics.csv or summary.csv.
        reference: The paper's rows.

    Returns:
        Rows of :func:`compare_cells` (among them model, method, gold_position, paper, ours, verdict), and the label
        of a sweep's settings, empty for one run.
    """
    swept = swept_keys(metrics)
    label = ""
    if swept:
        metrics, _, label = with_setting(metrics, swept)
    table = compare_cells(metrics, reference)
    return table[table["verdict"] != OTHER_MODEL], label


def reference_table(table: pd.DataFrame, label: str = "") -> Table:
    """A paper's :func:`paper_cells` next to ours as text.

    Args:
        table: The cells.
        label: Label of a sweep's settings: a column of this name holds the
            settings of each row, `all` if a row holds for several. Empty for a run.
    """
    # Equal cells of several settings become one row that lists the settings.
    settings_of: dict[tuple[str, ...], list[str]] = {}
    for row in table.rename(columns={"ours": "value"}).itertuples():
        verdict = f"{row.verdict} (near zero)" if row.near_zero else str(row.verdict)
        ours = ""
        difference = ""
        if not pd.isna(row.value):
            ours = cell(row, "z.1f")
            difference = points(row.difference)
        key = (
            row.task,
            verdict,
            row.model,
            row.method,
            row.gold_position,
            f"{100 * row.paper:.1f}",
            ours,
            difference,
        )
        settings = settings_of.setdefault(key, [])
        if row.setting not in settings:
            settings.append(row.setting)
    all_settings = set(table["setting"]) - {""}
    rows = []
    for (_, *texts), settings in settings_of.items():
        if label:
            is_everywhere = len(all_settings) > 1 and set(settings) == all_settings
            texts.append("all" if is_everywhere else ", ".join(settings))
        rows.append(texts)
    header = [
        "verdict",
        "model",
        "method",
        "gold position",
        "paper %",
        "ours %",
        "difference",
    ]
    if label:
        header.append(label)
    return header, rows


def paper_table(table: pd.DataFrame) -> Table:
    """Return a paper's :func:`paper_cells` as text in its own layout, a column for each gold position.

    Each model and method has four lines: the paper's number, ours with its 95 %
    interval, the difference in points, and the verdict.

    Args:
        table: A row for each number of the paper.

    Returns:
        Header and rows.
    """
    # What is the same everywhere needs no column.
    varied = [
        name for name in ("task", "metric", "setting") if table[name].nunique() > 1
    ]
    names = [*varied, "model", "method"]
    positions = list(dict.fromkeys(table["gold_position"]))
    rows = []
    for key, block in table.rename(columns={"ours": "value"}).groupby(
        names, sort=False
    ):
        cells_at = {row.gold_position: row for row in block.itertuples()}
        texts_at = [_paper_lines(cells_at.get(position)) for position in positions]
        for line in ("paper %", "ours %", "difference", "verdict"):
            rows.append([*key, line, *(texts[line] for texts in texts_at)])
    return [*names, "", *positions], rows


def _paper_lines(row: Any) -> dict[str, str]:
    """Return the four lines of one cell of :func:`paper_table` by their names; empty texts if it was not measured."""
    if row is None:
        return {"paper %": "", "ours %": "", "difference": "", "verdict": ""}
    return {
        "paper %": f"{100 * row.paper:.1f}",
        "ours %": cell(row, "z.1f"),
        "difference": "" if pd.isna(row.difference) else points(row.difference),
        "verdict": row.verdict,
    }


def with_subsets(metrics: pd.DataFrame, subsets: pd.DataFrame | None) -> pd.DataFrame:
    """Rows of metrics.csv, then rows of subsets.csv with the subset as gold position."""
    if subsets is None:
        return metrics
    rows = subsets[subsets["subset"] != "all"].drop(columns="kind")
    rows = rows.rename(columns={"subset": "gold_position"}).assign(depth=np.nan)
    return pd.concat([metrics, rows], ignore_index=True)


def compare_cells(metrics: pd.DataFrame, reference: Sequence[Row]) -> pd.DataFrame:
    """Put a paper's numbers next to ours.

    The sampling error of a paper's number is computed for `n` examples, also for an average
    over gold positions: these ask the same questions.

    Args:
        metrics: Rows of metrics.csv or summary.csv, with a sweep's setting if any.
        reference: The paper's rows: model, method, task, gold_position (`all`, a 0-based
            index, or a depth as `25%`, which matches the nearest one within 2.5
            points), metric, value (0..1), and any further column of ours.

    Returns:
        A row for each match: the columns of :data:`CELL_COLUMNS`, setting, paper, ours, ci_low,
        ci_high, difference (ours - paper), near_zero (the paper's number lies within
        the margin of 0), and the verdict of :func:`agreement`. A paper's row without a
        match says in `verdict` why there is none, and so does one whose answers are missing.
    """
    models = set(metrics["model"].astype(str))
    if "setting" not in metrics:
        metrics = metrics.assign(setting="")
    is_missing = has_missing_note(metrics)
    methods_without_answers = set(
        metrics.loc[is_missing, RUN_COLUMNS].itertuples(index=False, name=None)
    )
    rows = []
    for row in reference:
        value = float(row["value"])
        n = row.get("n")
        # Without n the paper's number is taken as exact.
        low, high = wilson(value * n, n) if n else (value, value)
        paper = Estimate(value, low, high, n or 0)
        margin = _margin(row)
        names: Row = {name: str(row[name]) for name in CELL_COLUMNS}
        facts = {"paper": value, "near_zero": abs(value) <= margin}
        # Several rows of ours in a sweep, one for each setting.
        matches = _matches(metrics, row)
        if matches.empty:
            verdict = "not measured" if names["model"] in models else OTHER_MODEL
            rows.append({**names, "setting": "", **facts, "verdict": verdict})
        for match in matches.to_dict("records"):
            ours = estimate(match)
            verdict = agreement(ours, paper, margin)
            if tuple(match[name] for name in RUN_COLUMNS) in methods_without_answers:
                verdict = MISSING_ANSWERS
            rows.append(
                {
                    **names,
                    "setting": match["setting"],
                    **facts,
                    "ours": ours.value,
                    "ci_low": ours.ci_low,
                    "ci_high": ours.ci_high,
                    "difference": ours.value - value,
                    "verdict": verdict,
                }
            )
    numbers = ["paper", "ours", "ci_low", "ci_high", "difference", "near_zero"]
    return pd.DataFrame(rows, columns=[*CELL_COLUMNS, "setting", *numbers, "verdict"])


def _margin(row: Row) -> float:
    """The margin of a paper's row; older folders hold none."""
    return float(row.get("margin", SHARE_MARGIN))


def _matches(metrics: pd.DataFrame, row: Row) -> pd.DataFrame:
    """Our rows for the measurement in a paper's row."""
    not_compared = {"gold_position", "n", "depth", *estimate_columns()}
    for column in set(row) & set(metrics) - not_compared:
        is_equal = metrics[column].map(_comparable) == _comparable(str(row[column]))
        metrics = metrics[is_equal]
    return _at_position(metrics, str(row["gold_position"]))


def _at_position(rows: pd.DataFrame, position: str) -> pd.DataFrame:
    """Rows at a position label: equal text, or for `25%` the nearest depth."""
    if not position.endswith("%"):
        return rows[rows["gold_position"].astype(str) == position]
    depth = float(position.removesuffix("%")) / 100
    distance = (pd.to_numeric(rows["depth"]) - depth).abs()
    return rows[(distance <= DEPTH_TOLERANCE) & (distance == distance.min())]


def _comparable(value: Any) -> str:
    """Text by which two values are compared: 0, 0.0 and `0` are equal."""
    try:
        return f"{float(value):g}"
    except (TypeError, ValueError):
        return str(value)
