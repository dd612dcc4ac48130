"""The numbers of a run as tables of text, from data frames."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from posbench.late import pd
from posbench.stats import outcomes
from posbench.stats.bootstrap import with_interval
from posbench.stats.frames import (
    UNMODIFIED,
    display_name,
    metric_of_task,
    rows_at_positions,
    rows_of_metric,
    rows_over_all_positions,
)
from posbench.stats.position_bias import MINUS_HALF, STATISTICS
from posbench.tasks.scorers import WHOLE_REPLY

LATEX_PARAGRAPH_CHARACTERS = 24
"""Length from which on a LaTeX column breaks its lines."""
LATEX_PAGE_LINES = 40
"""Lines from which on a LaTeX table may break over pages."""
Table = tuple[list[str], list[list[str]]]
"""A header, and rows."""

BIAS_LABELS = {
    "position_bias": "position bias (std over positions)",
    "gap": "gap (best - worst)",
    "gap_null": "gap if positions did not matter",
    "primacy": "primacy (first - inner)",
    "recency": "recency (last - inner)",
    "middle_drop": "middle drop (ends - lowest inner)",
}

SHARE_COLUMNS = {WHOLE_REPLY: "whole reply", **outcomes.OUTCOME_METRICS}
"""Columns of the table by position: the score of the whole reply where the task's own reads its first line, and the
shares of replies without an answer."""


def cell(row: Any, form: str, scale: float = 100) -> str:
    """Return a value with its interval, as `76.6 [72.1, 80.5]`.

    Args:
        row: Has ``value``, ``ci_low`` and ``ci_high``; None where nothing was measured.
        form: Number format of the value, such as ``+z.1f``.
        scale: Factor of the numbers; 100 gives percent.

    Returns:
        The text; without a value the beginning of the row's ``note``, or nothing.
    """
    if row is None or row.value is None or math.isnan(row.value):
        note = getattr(row, "note", "")
        return note.partition(":")[0] if isinstance(note, str) else ""
    return with_interval(
        scale * row.value, scale * row.ci_low, scale * row.ci_high, form
    )


def finding_value(finding: Any) -> str:
    """The value of a finding with its interval, which may have no width; empty where it has none."""
    if pd.isna(finding.value):
        return ""
    if finding.ci_low == finding.value == finding.ci_high:
        value = with_interval(finding.value, math.nan, math.nan)
        return f"{value} (the same in every resample)"
    return with_interval(finding.value, finding.ci_low, finding.ci_high)


def latex(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a LaTeX table with booktabs, and with longtable if it is longer than a page.

    Text is escaped; columns with long texts become paragraphs.

    Args:
        header: Name of each column.
        rows: Texts of the cells.
    """
    frame = pd.DataFrame(rows, columns=list(header))
    is_wide = [
        max(map(len, [name, *frame[name]])) > LATEX_PARAGRAPH_CHARACTERS
        for name in header
    ]
    paragraph_width = min(0.3, 0.55 / max(sum(is_wide), 1))
    paragraph = rf"p{{{paragraph_width:.2f}\linewidth}}"
    # A guess: paragraphs break into several lines.
    lines_per_row = 4 if any(is_wide) else 1
    is_long = len(rows) * lines_per_row > LATEX_PAGE_LINES
    style = (
        frame.style.hide(axis="index")
        .format(escape="latex")
        .format_index(escape="latex", axis="columns")
    )
    text: str = style.to_latex(
        hrules=True,
        column_format="".join(paragraph if wide else "l" for wide in is_wide),
        environment="longtable" if is_long else None,
    )
    # LaTeX's default font encoding, the old one, has other signs in these places.
    for sign, command in {"<": "less", ">": "greater", "|": "bar"}.items():
        text = text.replace(sign, rf"\text{command}{{}}")
    return text


def pct(share: float) -> str:
    """A share in %, or a dash where it is not known."""
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"


def points(share: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    return f"{100 * share:+z.1f}"


def papers_first(findings: pd.DataFrame) -> pd.DataFrame:
    """Findings in their order, claims of a paper before our controls."""
    return findings.sort_values("kind", key=lambda kind: kind != "paper", kind="stable")


def findings_table(findings: pd.DataFrame, models: bool = False) -> Table:
    """One row per finding, claims of the paper first: verdict, claim, statistic.

    Args:
        findings: Rows of findings.csv.
        models: Whether a column names the model of each finding even where it is one.

    Returns:
        The table; it has a column of models if there are several, and columns of notes and of bounds only if a
        finding has one.
    """
    findings = findings.fillna({"note": "", "model": ""})
    bounds = pd.Series("", index=findings.index)
    if "holds_if" in findings:  # a run of an older version has none
        bounds = findings["holds_if"].astype(object).fillna("")
    findings = findings.assign(holds_if=bounds)
    header = ["verdict"]
    if models or findings["model"].nunique() > 1:
        header.append("model")
    header += ["claim", "value", "statistic", "p (Holm)", "n"]
    if findings["holds_if"].any():
        header.append("holds if")
    if findings["note"].any():
        header.append("note")
    rows = []
    for finding in papers_first(findings).itertuples():
        claim = finding.claim
        if finding.kind == "control" and "ontrol: " not in claim:
            claim = f"Control: {claim}"
        cells = {
            "verdict": finding.verdict,
            "model": finding.model,
            "claim": claim,
            "value": finding_value(finding),
            "statistic": finding.statistic,
            "p (Holm)": format_p_value(finding.p_holm),
            "n": str(finding.n),
            "holds if": str(finding.holds_if),
            "note": str(finding.note),
        }
        rows.append([cells[name] for name in header])
    return header, rows


def format_p_value(p: float) -> str:
    """A p value as tables show it; empty without one."""
    if pd.isna(p):
        return ""
    return f"{p:.2g}" if p >= 0.001 else "<0.001"


class _MethodColumns:
    """A column per method, then one per method for its difference from the unmodified model."""

    def __init__(self, rows: pd.DataFrame) -> None:
        is_difference = rows["metric"].str.endswith("_difference")
        compared = set(rows.loc[is_difference, "method"])
        self.methods = sorted(rows["method"].unique(), key=lambda m: m != UNMODIFIED)
        self.compared = [method for method in self.methods if method in compared]
        titles = [f"{method}: difference" for method in self.compared]
        if len(titles) == 1:
            titles = ["difference"]
        self.header = [*map(display_name, self.methods), *titles]

    def cells(self, rows: pd.DataFrame, metric: str, scale: float = 100) -> list[str]:
        """Return the cells of one metric: its value under each method, then the difference of each method compared.

        Args:
            rows: Rows of metrics.csv with the metric once for each method.
            metric: Name of the metric; its differences are rows named METRIC_difference.
            scale: 100 for percentages and points, 1 for plain numbers.
        """
        form = "z.1f" if scale == 100 else "z.3f"
        by_key: dict[Any, Any] = {(r.method, r.metric): r for r in rows.itertuples()}
        values = [
            cell(by_key.get((method, metric)), form, scale) for method in self.methods
        ]
        differences = [
            cell(by_key.get((method, f"{metric}_difference")), f"+{form}", scale)
            for method in self.compared
        ]
        return values + differences


def position_table(metrics: pd.DataFrame) -> Table:
    """Return a table with one row per gold position, then `all`, from metrics.csv rows of one run.

    Columns: depth of the gold position, score of each method in %, difference of each
    modified method in points (both with 95 % intervals), n, and the columns in
    :data:`SHARE_COLUMNS` that the run has, for each method.
    """
    scores = rows_of_metric(metrics).assign(metric="score")
    differences = rows_of_metric(metrics, "difference").assign(
        metric="score_difference"
    )
    rows = pd.concat([scores, differences])
    columns = _MethodColumns(rows)
    by_depth = rows_at_positions(rows).sort_values("depth")
    labels = {
        str(row.gold_position): f"{round(100 * row.depth, 1):g} %"
        for row in by_depth.itertuples()
    }
    labels["all"] = "all"
    table = []
    for position, label in labels.items():
        at_position = rows[rows["gold_position"].astype(str) == position]
        n = "/".join(dict.fromkeys(map(str, at_position["n"])))
        table.append([label, *columns.cells(at_position, "score"), n])
    header = ["gold position", *columns.header, "n"]
    for metric, title in SHARE_COLUMNS.items():
        share_rows = rows_of_metric(metrics, metric)
        if not len(share_rows):
            continue
        header.append(title)
        for line, position in zip(table, labels, strict=True):
            at_position = share_rows[
                share_rows["gold_position"].astype(str) == position
            ]
            shares = dict(zip(at_position["method"], at_position["value"], strict=True))
            line.append("/".join(pct(shares.get(m, math.nan)) for m in columns.methods))
    return header, table


def describe_positions(metrics: pd.DataFrame) -> str:
    """Say how many items a prompt has and how gold positions count; empty where unknown."""
    # Where the task gives no depth, the number of items is not known.
    position = pd.to_numeric(metrics["gold_position"], errors="coerce")
    # depth = position / (items - 1).
    items = (1 + position / pd.to_numeric(metrics["depth"])).max()
    if pd.isna(items):
        return ""
    return f"gold position: of {items:.0f} items, 0 % the first, 100 % the last"


def bias_table(metrics: pd.DataFrame) -> Table:
    """Return a table with one row per statistic of position bias, from metrics.csv rows of one run.

    Columns: the statistic of each method, and the difference of each modified method,
    in points with 95 % intervals.
    """
    rows = metrics[metrics["metric"].str.removesuffix("_difference").isin(STATISTICS)]
    columns = _MethodColumns(rows)
    measured = set(rows["metric"])
    table = [
        [label, *columns.cells(rows, metric)]
        for metric, label in BIAS_LABELS.items()
        if metric in measured
    ]
    return ["statistic", *columns.header], table


def unmeasurable_bias(metrics: pd.DataFrame) -> dict[str, str]:
    """Return by method the reason why its position bias cannot be measured, from metrics.csv rows of a run.

    Methods whose bias was measured are left out.
    """
    if "note" not in metrics:
        return {}
    # Where a method lacks answers, its scores mean nothing: that is the reason, where there is one.
    missing = missing_notes(metrics)
    is_missing = (metrics["metric"] == "position_bias") & metrics["value"].isna()
    return missing | {
        row.method: row.note
        for row in metrics[is_missing].itertuples()
        if cell(row, "")
    }


def missing_notes(metrics: pd.DataFrame) -> dict[str, str]:
    """Why the scores of a method mean nothing as answers are missing, by method, from metrics.csv rows of a run."""
    if "note" not in metrics:
        return {}
    rows = rows_of_metric(metrics)
    rows = rows[has_missing_note(rows)]
    return dict(zip(rows["method"], rows["note"], strict=True))


def first_line_notes(metrics: pd.DataFrame) -> dict[str, str]:
    """Return by method the note that a reply's first line scores lower than the whole reply, from metrics.csv rows."""
    if "note" not in metrics:
        return {}
    rows = rows_over_all_positions(metrics, WHOLE_REPLY)
    return {
        row.method: row.note
        for row in rows.itertuples()
        if isinstance(row.note, str) and row.note
    }


def has_missing_note(metrics: pd.DataFrame) -> pd.Series:
    """Which rows of metrics.csv mean nothing as answers are missing."""
    if "note" not in metrics:
        return pd.Series(False, index=metrics.index)
    return metrics["note"].astype(str).str.startswith(outcomes.PROBLEM)


def without_missing_scores(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return rows of metrics.csv, or of several runs, with NaN for scores of a method whose answers are missing."""
    own_rows = rows_of_metric(metrics)
    keys = [column for column in ("run", "method") if column in metrics]
    lacking = pd.MultiIndex.from_frame(own_rows.loc[has_missing_note(own_rows), keys])
    is_lacking = pd.MultiIndex.from_frame(metrics[keys]).isin(lacking)
    scores = metrics.copy()
    scores.loc[is_lacking, ["value", "ci_low", "ci_high"]] = float("nan")
    return scores


def other_scores(metrics: pd.DataFrame) -> pd.DataFrame:
    """Scores over all examples other than the task's own, in columns of subsets.csv."""
    metric = metrics["metric"].str.removesuffix("_difference")
    shown_elsewhere = [*STATISTICS, MINUS_HALF, *SHARE_COLUMNS]
    is_other = (metric != metric_of_task(metrics)) & ~metric.isin(shown_elsewhere)
    is_overall = metrics["gold_position"].astype(str) == "all"
    return metrics[is_other & is_overall].assign(subset="all", kind="average")


def subset_table(
    subsets: pd.DataFrame, kind: str = "", task_metric: str | None = None
) -> Table:
    """One row per subset (or average) and metric, from subsets.csv rows of one run.

    Columns: subset, metric (if there are several), value of each method with its
    interval, difference of each modified method, n. The task's own metric is in % and
    points, other metrics are in their own unit.

    Args:
        subsets: Rows of subsets.csv.
        kind: ``subset`` or ``average`` to take those rows alone.
        task_metric: The task's own metric; None takes it from the rows, an empty name
            says that it is not among them.
    """
    rows = subsets[subsets["kind"] == kind] if kind else subsets
    if task_metric is None:
        task_metric = metric_of_task(subsets).iloc[0]
    columns = _MethodColumns(rows)
    values = rows[~rows["metric"].str.endswith("_difference")]
    keys = dict.fromkeys(
        values[["kind", "subset", "metric"]].itertuples(index=False, name=None)
    )
    table = []
    for kind_of_row, subset, metric in keys:
        # An average may have the name of a subset.
        in_subset = rows[(rows["kind"] == kind_of_row) & (rows["subset"] == subset)]
        n = str(in_subset.loc[in_subset["metric"] == metric, "n"].iloc[0])
        scale = 100 if metric == task_metric else 1
        table.append([subset, metric, *columns.cells(in_subset, metric, scale), n])
    header = ["subset", "metric", *columns.header, "n"]
    if task_metric and len({metric for _, _, metric in keys}) == 1:
        header.remove("metric")
        table = [[subset, *cells] for subset, _, *cells in table]
    return header, table
