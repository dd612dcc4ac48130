"""What a run prints at its end."""

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
from posbench.report.folder import read_csv, read_json
from posbench.report.page import cut_prompts
from posbench.report.paper import beside
from posbench.report.text import applied, headline, spent, verdicts
from posbench.run.folder import opened
from posbench.search import held_back
from posbench.stats.frames import metric_name

INTERVAL = r"(?<=\d) (\[[^\[\]]+\])$"
"""Of a cell; a list, such as a swept setting, is none."""
FEW = 24  # subsets and averages up to which the terminal shows them all, as the report does


def show(folder: Path, console: Console) -> None:
    """Print what a run folder says: the table, the result in words, and where the page is."""
    metrics = read_csv(folder / "metrics.csv")
    subsets = read_csv(folder / "subsets.csv")
    if metrics is not None:
        console.print(summary_table(metrics, console.width))
        if subsets is not None:
            few = subsets["subset"].nunique() <= FEW
            console.print(
                text_table(
                    *tables.subset_table(subsets, "" if few else "average"),
                    console.width,
                )
            )
        others = tables.other_scores(metrics)
        if len(others):
            console.print(
                text_table(*tables.subset_table(others, own=""), console.width)
            )
        console.print(headline(metrics))
        method = read_json(folder / "method.json") or {}
        cut = cut_prompts(folder)
        if len(method) > 1:
            console.print(f"as applied: {applied(method)}")
        if cut:
            console.print(cut)
        show_reference(folder, metrics, subsets, console)
    show_findings(folder, console)
    took = spent(opened(folder).status())
    if took:
        console.print(
            "; ".join(f"{name}: {words}" for name, words in took.items()),
            soft_wrap=True,
        )
    page = folder / "report.html"
    console.print(
        f"report: {page}" if page.is_file() else f"run: {folder}", soft_wrap=True
    )
    gained = read_csv(folder / held_back.TABLE)
    if gained is not None and held_back.noise(gained.iloc[0]):
        console.print(held_back.words(gained.iloc[0]), soft_wrap=True)


def summary_table(metrics: pd.DataFrame, width: int = 80) -> Table:
    """The table a run ends with: scores by gold position."""
    table = text_table(*tables.position_table(metrics), width)
    table.title = Text(
        ", ".join(
            str(metrics[c].iloc[0])
            for c in ("model", "task")
            if metrics[c].nunique() == 1
        )
    )
    units = f"{metric_name(metrics)} in %, difference in points, [95 % interval]"
    table.caption = f"{units}\n{tables.position_words(metrics)}".strip()
    for column in table.columns:
        column.justify = "right"
    for line in table.rows[-2:-1]:
        line.end_section = True
    return table


def show_findings(folder: Path, console: Console) -> None:
    """Print the verdicts of a run or a sweep, where it has any."""
    findings = read_csv(folder / "findings.csv")
    if findings is not None:
        header, rows = tables.findings_table(findings)
        # The notes stand in findings.csv and in the report; a narrow terminal holds less.
        lines = [
            [verdict, f"{claim}: {what}", value, p]
            for verdict, claim, value, what, p, *_ in rows
        ]
        told = ["verdict", "claim: what was measured", "value", header[4]]
        console.print(text_table(told, lines, console.width))
        console.print(verdicts(findings))


def show_reference(
    folder: Path, metrics: pd.DataFrame, subsets: pd.DataFrame | None, console: Console
) -> None:
    """Print a paper's numbers beside ours, or why they cannot be compared."""
    for section in beside(folder, metrics, subsets):
        console.print(f"{section.title}. {section.text}".strip())
        if section.rows:
            console.print(text_table(section.header, section.rows, console.width))


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], width: int = 80
) -> Table:
    """A table; intervals stand below their numbers where it is wider than so many letters. Names and settings
    such as `[a,b]` are no markup."""
    table = Table(box=box.HORIZONTALS, show_edge=False, pad_edge=False)
    longest = [
        max(map(len, [*column[0].split(), *column[1:]]))
        for column in zip(header, *rows, strict=True)
    ]
    fits = sum(longest) + 3 * (len(header) - 1) <= width
    for name, most in zip(header, longest, strict=True):
        table.add_column(
            Text(name if len(name) <= most else name.replace(" ", "\n")),
            overflow="fold",
        )
    for row in rows:
        table.add_row(
            *(Text(cell if fits else re.sub(INTERVAL, r"\n\1", cell)) for cell in row)
        )
    return table
