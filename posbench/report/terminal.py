"""What a run prints at its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from posbench.late import pd
from posbench.report import tables
from posbench.report.folder import read_csv, read_json
from posbench.report.page import cut_prompts
from posbench.report.paper import beside
from posbench.report.text import applied, headline, short, spent, verdicts
from posbench.run.folder import opened
from posbench.search import held_back
from posbench.stats.frames import metric_name

FEW = 24  # subsets and averages up to which the terminal shows them all, as the report does


def show(folder: Path, console: Console) -> None:
    """Print what a run folder says: the table, the result in words, and where the page is."""
    metrics, subsets = read_csv(folder / "metrics.csv"), read_csv(folder / "subsets.csv")
    if metrics is not None:
        console.print(summary_table(metrics))
        if subsets is not None:
            few = subsets["subset"].nunique() <= FEW
            console.print(text_table(*tables.subset_table(subsets, "" if few else "average")))
        others = tables.other_scores(metrics)
        if len(others):
            console.print(text_table(*tables.subset_table(others, own="")))
        console.print(headline(metrics))
        method, cut = read_json(folder / "method.json") or {}, cut_prompts(folder)
        if len(method) > 1:
            console.print(f"as applied: {applied(method)}")
        if cut:
            console.print(cut)
        show_reference(folder, metrics, subsets, console)
    show_findings(folder, console)
    took = spent(opened(folder).status())
    if took:
        console.print("; ".join(f"{name}: {words}" for name, words in took.items()), soft_wrap=True)
    page = folder / "report.html"
    console.print(f"report: {page}" if page.is_file() else f"run: {folder}", soft_wrap=True)
    gained = read_csv(folder / held_back.TABLE)
    if gained is not None and held_back.noise(gained.iloc[0]):
        console.print(held_back.words(gained.iloc[0]), soft_wrap=True)


def summary_table(metrics: pd.DataFrame) -> Table:
    """The table a run ends with, at most 100 columns wide for up to two methods: scores by position."""
    header, rows = tables.position_table(metrics)
    title = ", ".join(str(metrics[c].iloc[0]) for c in ("model", "task") if metrics[c].nunique() == 1)
    caption = f"{metric_name(metrics)} in %, difference in points, [95 % interval]"
    # Of several methods the interval goes below its number.
    gap = "\n[" if len(header) > 5 else " ["
    cells = [[short(cell).replace(" [", gap) for cell in row] for row in rows]
    table = text_table(header, cells)
    table.title, table.caption = Text(title), caption
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
        lines = [[verdict, f"{claim}: {what}", value, p] for verdict, claim, value, what, p, *_ in rows]
        told = ["verdict", "claim: what was measured", "value", header[4]]
        console.print(text_table(told, lines, shorten=False))
        console.print(verdicts(findings))


def show_reference(
    folder: Path, metrics: pd.DataFrame, subsets: pd.DataFrame | None, console: Console
) -> None:
    """Print a paper's numbers beside ours, or why they cannot be compared."""
    for section in beside(folder, metrics, subsets):
        console.print(f"{section.title}. {section.text}".strip())
        if section.rows:
            console.print(text_table(section.header, section.rows))


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], shorten: bool = True) -> Table:
    """A table; names and settings such as `[a,b]` are no markup."""
    table = Table()
    for name in header:
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*(Text(short(cell) if shorten else cell) for cell in row))
    return table
