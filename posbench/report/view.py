"""One page over all runs below a folder: a row each, with a link to the run's own page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posbench.errors import UserError
from posbench.files.atomic import write_text
from posbench.report import index
from posbench.report.console import TONE_STYLES, Record
from posbench.report.links import page_address, read_head, run_address
from posbench.report.template import render_html

PAGE_FILE = "index.html"
GENERATOR = '<meta name="generator" content="posbench view">'
"""Marks our page: no other file is replaced."""
OTHER_PAGES = {
    "Diagnoses": "diagnose/*",
    "Orders of documents": "order/*",
    "Comparisons": "compare/*",
    "Sweeps": "*/v[0-9]*/sweep__*",
}
"""Folders of pages that are no run's, below a folder of outputs, by their heading."""


def write_view(folder: Path) -> tuple[Path, int]:
    """Write ``index.html`` of the runs below a folder, from their files alone.

    Args:
        folder: A folder of outputs, of one experiment or task, or of one version.

    Returns:
        The page, and the number of runs.

    Raises:
        UserError: The folder is missing or holds no run, or has an ``index.html`` that is not ours.
    """
    page = folder / PAGE_FILE
    if page.is_file() and GENERATOR not in page.read_text("utf-8", errors="replace"):
        hint = "move it, or view another folder"
        raise UserError(
            "FOLDER", str(page), "no file, or a page of posbench view", hint
        )
    records = index.records(folder) if folder.is_dir() else []
    if not records:
        hint = "make a first run: posbench"
        raise UserError("FOLDER", str(folder), "a folder that holds runs", hint)
    header, rows = view_rows(records, folder)
    others = {
        title: [_other_row(file, folder) for file in files]
        for title, pattern in OTHER_PAGES.items()
        if (files := sorted(folder.glob(f"{pattern}/report.html")))
    }
    text = render_html(
        "view.html.j2",
        mark=GENERATOR,
        title=index.list_title(records),
        next=index.next_step(records),
        header=header,
        rows=rows,
        others=others,
    )
    write_text(page, text)
    return page, len(records)


def _other_row(page: Path, folder: Path) -> dict[str, str]:
    """The verdict of a page that is no run's with its colour, its title and its address, for a page in ``folder``."""
    head = read_head(page)
    return {
        "word": head.word,
        "colour": TONE_STYLES[head.tone],
        "title": head.title,
        "page": page_address(page, folder),
    }


def view_rows(
    records: Sequence[Record], folder: Path
) -> tuple[list[str], list[list[dict[str, Any]]]]:
    """Return the header and the cells of the page's table.

    Args:
        records: The runs, as :func:`posbench.report.index.records` returns them.
        folder: Folder of the page.

    Returns:
        The header; and for each run a cell for each column: its ``text``, ``page`` (address of a link, or empty),
        ``colour`` (green, red, yellow, cyan or empty), and ``time`` (ISO, of the age alone).
    """
    columns = index.run_columns(records)
    # The verdict comes first, behind the name of the run.
    columns = {name: columns[name] for name in ("run", "verdict")} | columns
    rows = []
    for number, record in enumerate(records):
        cells = []
        for name, texts in columns.items():
            cell = texts[number]
            run = Path(record["folder"])
            cells.append(
                {
                    "text": cell.plain,
                    "page": run_address(run, folder) if name == "run" else "",
                    "colour": str(cell.style) if name == "verdict" else "",
                    "time": record["started"] if name == "age" else "",
                }
            )
        rows.append(cells)
    return list(columns), rows
