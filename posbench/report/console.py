"""The terminal, and lists on it: tables for people, TSV for a pipe, JSON for a program."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Record = Mapping[str, Any]
"""One row of a list, by column; a column with a mapping prints as ``key=value`` pairs."""

WIDE_COLUMNS = 10_000
NARROW_CHARACTERS = 16
"""Width up to which the lines of a column are not broken, if there is room for that."""


def make_console(width: int | None = None) -> Console:
    """The terminal, where paths and names such as ``[a/b]`` and ``:x:`` are no markup."""
    return _Terminal(markup=False, emoji=False, width=width)


def make_wide_console() -> Console:
    """The terminal; where output is none, nothing wraps."""
    return make_console(width=None if sys.stdout.isatty() else WIDE_COLUMNS)


class _Terminal(Console):
    """Leaves a closed pipe to the command line; rich would end the process with status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show_lists(
    lists: Mapping[str, Sequence[Record]],
    as_json: bool = False,
    terminal_rows: Callable[[Sequence[Record]], Sequence[Mapping[str, str]]]
    | None = None,
) -> None:
    """Print lists of records.

    A terminal gets a table for each list, without empty columns. A pipe gets TSV: a
    header, then a line for each record; several lists are a blank line apart, each
    below ``# title``.

    Args:
        lists: Records by the title of their list; those of one list have the same
            columns.
        as_json: Print the records of the one list, or of several by title.
        terminal_rows: Makes the cells that a terminal shows; None prints the records' values.
    """
    console = make_console()
    if as_json:
        data: Any = {title: list(map(dict, lists[title])) for title in lists}
        if len(data) == 1:
            (data,) = data.values()
        print(json.dumps(data, indent=2, default=str))
    elif console.is_terminal:
        for title, records in lists.items():
            rows = (
                terminal_rows(records) if terminal_rows else list(map(_cells, records))
            )
            console.print(_table(title, rows, console.width))
    else:
        texts = []
        for title, records in lists.items():
            lines = [] if len(lists) == 1 else [f"# {title}"]
            if records:
                lines.append("\t".join(records[0]))
            lines += ["\t".join(_cells(record).values()) for record in records]
            texts.append("\n".join(lines))
        print("\n\n".join(texts))


def _cells(record: Record) -> dict[str, str]:
    """A record as text, each cell in one line without tabs."""
    return {name: " ".join(_text(value).split()) for name, value in record.items()}


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return " ".join(f"{key}={part}" for key, part in value.items())
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def _table(title: str, rows: Sequence[Mapping[str, str]], width: int) -> Table:
    """A table without empty columns; lines of wide columns may break."""
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    names = [name for name in rows[0] if any(row[name] for row in rows)] if rows else []
    widths = {
        name: max(len(line) for row in rows for line in row[name].split("\n"))
        for name in names
    }
    narrowest = sum(min(w, NARROW_CHARACTERS) + 2 for w in widths.values()) - 2
    for name in names:
        unbroken = widths[name] <= NARROW_CHARACTERS
        if narrowest > width:
            # There is no room for that: only the first column, the name, stays whole.
            unbroken = name == names[0]
        header = name if len(name) <= widths[name] else name.replace(" ", "\n")
        table.add_column(Text(header), no_wrap=unbroken, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[name]) for name in names))
    return table
