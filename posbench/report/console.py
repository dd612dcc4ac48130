"""The terminal, and lists on it: tables for who reads, TSV for a pipe, JSON for a program."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

Record = Mapping[str, object]
"""One row of a list, by column; a column that holds a mapping shows as ``key=value`` pairs."""

NARROW = 16
"""Letters up to which the lines of a column are not broken, where there is room for that."""


def terminal(width: int | None = None) -> Console:
    """The terminal, where paths and names such as ``[a/b]`` and ``:x:`` are no markup."""
    return _Terminal(markup=False, emoji=False, width=width)


class _Terminal(Console):
    """Leaves a closed pipe to the command line; rich would end the process with status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show_lists(
    lists: Mapping[str, Sequence[Record]],
    as_json: bool = False,
    look: Callable[[Sequence[Record]], Sequence[Mapping[str, str]]] | None = None,
) -> None:
    """Print lists by their titles; all records of a list have the same columns.

    On a terminal each is a table, of what ``look`` makes of its records, without empty columns. A pipe gets
    TSV: a header, then a line for each record; where there are several lists, each below ``# title`` and a
    blank line apart.
    ``as_json``: the records of the one list, or of several by title.
    """
    console = terminal()
    if as_json:
        data = {title: list(map(dict, records)) for title, records in lists.items()}
        print(
            json.dumps(
                data if len(data) > 1 else next(iter(data.values())),
                indent=2,
                default=str,
            )
        )
    elif console.is_terminal:
        for title, records in lists.items():
            seen = look(records) if look else [*map(_cells, records)]
            console.print(_table(title, seen, console.width))
    else:
        parts = []
        for title, records in lists.items():
            lines = [f"# {title}"] * (len(lists) > 1) + [
                "\t".join(r) for r in records[:1]
            ]
            parts.append(
                "\n".join([*lines, *("\t".join(_cells(r).values()) for r in records)])
            )
        print("\n\n".join(parts))


def _cells(record: Record) -> dict[str, str]:
    """A record as text, each cell in one line without tabs."""
    return {name: " ".join(_text(value).split()) for name, value in record.items()}


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={part}" for key, part in value.items())
    return (
        ""
        if value is None
        else f"{value:.6g}"
        if isinstance(value, float)
        else str(value)
    )


def _table(title: str, rows: Sequence[Mapping[str, str]], width: int) -> Table:
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    told = [
        name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)
    ]
    most = {
        name: max(len(line) for row in rows for line in row[name].split("\n"))
        for name in told
    }
    fits = sum(min(letters, NARROW) + 2 for letters in most.values()) <= width + 2
    for name in told:
        whole = most[name] <= NARROW if fits else name == told[0]
        header = name if len(name) <= most[name] else name.replace(" ", "\n")
        table.add_column(Text(header), no_wrap=whole, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[name]) for name in told))
    return table
