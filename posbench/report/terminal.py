"""The output of a run at its end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from posbench.late import pd
from posbench.report import tables
from posbench.report.console import fit_columns, line_length, show_glance, show_link
from posbench.report.folder import PAPER_FILES, read_csv, read_json
from posbench.report.glance import run_glance
from posbench.report.text import (
    describe_costs,
    describe_method,
    describe_prompts,
    describe_stop,
)
from posbench.run.folder import METHOD_FILE, open_run_dir
from posbench.search import held_back
from posbench.stats.findings import ALPHA
from posbench.stats.frames import metric_name

FINAL_INTERVAL = re.compile(r"(?<=\d) (\[[^\[\]]+\])$")
"""The interval at the end of a cell; does not match the list of a swept setting."""
WORD_OR_LIST = re.compile(r"\[.*\](?!\S)|\S+")
"""Parts of a cell that are not broken: words, intervals, lists of numbers."""
INTERVAL_RULE = (
    "In brackets: 95 % intervals. A claim holds where its whole interval does, "
    f"and is contradicted where none of it does; it is inconclusive where its p (Holm) is above {ALPHA:g}."
)
"""Line below verdicts."""
MAX_SUBSETS = 24
"""Subsets and averages up to which the terminal shows them all, as the report does."""


def show_run(folder: Path, console: Console) -> None:
    """Print the result of a run: what is to be said in detail, then tables, and last the verdict and the page."""
    glance = run_glance(folder)
    metrics = read_csv(folder / "metrics.csv")
    subsets = read_csv(folder / "subsets.csv")
    if glance.details:
        console.print(glance.details)
    if metrics is not None:
        _show_method_and_prompts(folder, console)
    costs = describe_costs(open_run_dir(folder).status())
    if costs:
        console.print("; ".join(f"{name}: {cost}" for name, cost in costs.items()))
    if metrics is not None:
        show_reference(folder, metrics, subsets, console)
        _show_scores(folder, metrics, subsets, console)
    show_findings(folder, console)
    gains = read_csv(folder / held_back.TABLE_FILE)
    if gains is not None and held_back.shows_no_gain(gains.iloc[0]):
        console.print(held_back.summary_line(gains.iloc[0]))
    page = folder / "report.html"
    show_glance(console, glance)
    if page.is_file():
        show_link(console, "report", page)
    else:
        show_link(console, "run", folder)


def _show_method_and_prompts(folder: Path, console: Console) -> None:
    """Print the method of a run as it was applied, and what there is to say on its prompts."""
    method = read_json(folder / METHOD_FILE) or {}
    if len(method) > 1:
        console.print(f"as applied: {describe_method(method)}")
    prompts_text = describe_prompts(folder)
    if prompts_text:
        console.print(prompts_text)


def _show_scores(
    folder: Path, metrics: pd.DataFrame, subsets: pd.DataFrame | None, console: Console
) -> None:
    """Print the tables of a run's scores, that by gold position last.

    Args:
        folder: The run.
        metrics: Its metrics.csv.
        subsets: Its subsets.csv; None if prompts have no subsets.
        console: Where to print.
    """
    if subsets is not None:
        kind = "average" if subsets["subset"].nunique() > MAX_SUBSETS else ""
        show_table(console, *tables.subset_table(subsets, kind))
    other_scores = tables.other_scores(metrics)
    if len(other_scores):
        show_table(console, *tables.subset_table(other_scores, task_metric=""))
    note = describe_stop(open_run_dir(folder).status())
    console.print(summary_table(metrics, console.width, note))


def summary_table(metrics: pd.DataFrame, width: int = 80, note: str = "") -> Table:
    """Return the table a run ends with: scores by gold position.

    Args:
        metrics: Rows of metrics.csv.
        width: Characters of a line.
        note: Last line below the table.
    """
    header, rows = tables.position_table(metrics)
    table = text_table(header, rows, width)
    names = [
        str(metrics[column].iloc[0])
        for column in ("model", "task")
        if metrics[column].nunique() == 1
    ]
    table.title = Text(", ".join(names))
    units = f"{metric_name(metrics)} in %, difference in points, [95 % interval]"
    lines = [units, tables.describe_positions(metrics), note]
    table.caption = "\n".join(filter(None, lines))
    for column in table.columns:
        column.justify = "right"
    # A rule above the last row, over all positions.
    for row in table.rows[-2:-1]:
        row.end_section = True
    return table


def show_findings(folder: Path, console: Console) -> None:
    """Print the verdicts of a run or a sweep, if it has any."""
    findings = read_csv(folder / "findings.csv")
    if findings is None:
        return
    # Notes are in findings.csv and in the report; a terminal is narrow.
    names, cells = tables.findings_table(findings)
    measured = "claim: what was measured"
    if "model" in names:
        measured = f"model: {measured}"
    header = ["verdict", measured, "value", "p (Holm)"]
    rows = []
    for row in cells:
        cell = dict(zip(names, row, strict=True))
        basis = []
        if cell.get("holds if"):
            basis.append(f"holds {cell['holds if']}")
        if cell["n"] != "0":
            basis.append(f"n = {cell['n']}")
        text = f"{cell['claim']}: {cell['statistic']}"
        if "model" in cell:
            text = f"{cell['model']}: {text}"
        if basis:
            text += f" ({'; '.join(basis)})"
        rows.append([cell["verdict"], text, cell["value"], cell["p (Holm)"]])
    show_table(console, header, rows)
    if any("[" in value for _, _, value, _ in rows):
        console.print(INTERVAL_RULE, markup=False)


def show_reference(
    folder: Path, metrics: pd.DataFrame, subsets: pd.DataFrame | None, console: Console
) -> None:
    """Print a paper's numbers next to ours, or why they cannot be compared.

    Args:
        folder: The run or sweep.
        metrics: Its metrics.csv or summary.csv.
        subsets: Its scores on subsets, if it has any.
        console: Where to print.
    """
    if not any((folder / name).is_file() for name in PAPER_FILES):
        return
    from posbench.report.paper import paper_sections

    for section in paper_sections(folder, metrics, subsets):
        console.print(f"{section.title}. {section.text}".strip())
        if section.rows:
            show_table(console, section.header, section.rows)


def show_table(
    console: Console, header: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print a header and rows as a table of the terminal's width."""
    console.print(text_table(header, rows, console.width))


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], width: int = 80
) -> Table:
    """A table for the terminal, without markup in names and settings such as `[a,b]`.

    Args:
        header: Titles of the columns.
        rows: Cells as text.
        width: Characters of the terminal; in a wider table intervals go below their
            numbers.
    """
    columns = []
    for title, *cells in zip(header, *rows, strict=True):
        # A title may break between its words, a cell only where there is no room for it.
        longest = max(map(len, [*title.split(), *cells]))
        text = title if len(title) <= longest else title.replace(" ", "\n")
        columns.append([text, *cells])
    free_width = width - 3 * (len(header) - 1)
    if sum(max(map(line_length, column)) for column in columns) > free_width:
        columns = [
            [title, *(FINAL_INTERVAL.sub(r"\n\1", cell) for cell in cells)]
            for title, *cells in columns
        ]
    columns = fit_columns(columns, free_width, WORD_OR_LIST)
    table = Table(box=box.HORIZONTALS, show_edge=False, pad_edge=False)
    for title, *_ in columns:
        table.add_column(Text(title), overflow="fold")
    for row in zip(*(cells for _, *cells in columns), strict=True):
        table.add_row(*map(Text, row))
    return table
