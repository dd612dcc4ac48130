"""The terminal, and lists on it: tables for people, TSV for a pipe, JSON for a program."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from posbench.run.heartbeat import sign_of_life

if TYPE_CHECKING:
    from posbench.stats.glance import Glance, Tone

Record = Mapping[str, Any]
"""One row of a list, by column; a column with a mapping prints as ``key=value`` pairs."""

TONE_STYLES: Mapping[Tone, str] = {"good": "green", "bad": "red", "open": "yellow"}
"""Colours of verdicts."""
WIDE_COLUMNS = 10_000
WORD = re.compile(r"\S+")
NAME_PART = re.compile(r"(?<=[A-Za-z][_/-])(?=[A-Za-z])")
"""Where a name such as ``kv_retrieval`` or a path may break, if there is no room for it in one line."""


def make_console(width: int | None = None, is_error: bool = False) -> Console:
    """The terminal, without markup: paths and names such as ``[a/b]`` and ``:x:`` print verbatim.

    Args:
        width: Characters of a line; None: those of the terminal.
        is_error: Whether it is stderr.
    """
    console = _Terminal(
        markup=False, emoji=False, highlight=False, width=width, stderr=is_error
    )
    # COLUMNS=0 says that the width is not known; rich takes it for a width.
    if not console.width:
        console.width = shutil.get_terminal_size().columns
    return console


def is_read_by_program(console: Console) -> bool:
    """Whether no terminal shows what is printed, be it coloured (FORCE_COLOR) or not."""
    return not console.file.isatty()


def make_wide_console() -> Console:
    """The terminal; output elsewhere does not wrap."""
    return make_console(width=None if sys.stdout.isatty() else WIDE_COLUMNS)


class _Terminal(Console):
    """Leaves a closed pipe to the command line; rich would end the process with status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def print(self, *objects: Any, **settings: Any) -> None:
        """Print, which is a sign of life; text is broken between words on a terminal, and not at all elsewhere.

        With ``no_wrap`` it is broken nowhere.
        """
        plain = [_plain_text(text) for text in objects]
        if plain and None not in plain:
            if self.is_terminal and not settings.get("no_wrap"):
                objects = tuple(wrap_words(text or "", self.width) for text in plain)
            settings["soft_wrap"] = True
        super().print(*objects, **settings)
        sign_of_life()


def _plain_text(printed: object) -> str | None:
    """The text of a string, or of a text in one style; None for a table and all else."""
    if isinstance(printed, Text) and not printed.spans and not printed.style:
        return printed.plain
    return printed if isinstance(printed, str) else None


def wrap_words(text: str, width: int) -> str:
    """Break a text into lines of at most ``width`` characters where it has spaces; a longer word stays whole."""
    lines = []
    for line in text.split("\n"):
        lines += textwrap.wrap(
            line,
            width,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        ) or [""]
    return "\n".join(lines)


def show_glance(console: Console, glance: Glance) -> None:
    """Print what the page of a result says first: the verdict with its numbers, its sentence, the next command."""
    style = TONE_STYLES[glance.tone]
    numbers = "; ".join(map(str, glance.numbers))
    first = f"{glance.word}: {numbers}" if numbers else glance.word
    console.print(f"{first} ({glance.basis})" if glance.basis else first)
    console.print(glance.sentence, style=style)
    if glance.next:
        purpose = f"  ({glance.purpose})" if glance.purpose else ""
        show_next(console, f"{glance.next}{purpose}")


def show_next(console: Console, step: str) -> None:
    """Print ``next: step`` unbroken: the first line of a broken command is another command."""
    console.print(f"next: {step}", no_wrap=True)


def show_link(console: Console, label: str, page: Path) -> None:
    """Print ``label: page``; on a terminal a click on the page opens it, elsewhere it is plain text."""
    text = Text(f"{label}: ").append(str(page))
    if not is_read_by_program(console):
        text.stylize(Style(link=page.absolute().as_uri()), len(label) + 2)
    console.print(text, soft_wrap=True)


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
        lists: Records by the title of their list; all records of a list have the same
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
    elif not is_read_by_program(console):
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
    """Return the text of a record's value for a terminal or a pipe: an empty one for None, six digits for numbers."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return " ".join(f"{key}={part}" for key, part in value.items())
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def _table(title: str, rows: Sequence[Mapping[str, str]], width: int) -> Table:
    """Return a table without empty columns, at most as wide as the terminal.

    Args:
        title: Line above the table.
        rows: Cells by header, the same headers in each row.
        width: Characters of a line.
    """
    names = [name for name in rows[0] if any(row[name] for row in rows)] if rows else []
    columns = [[name, *(row[name] for row in rows)] for name in names]
    num_gaps = len(columns) - 1
    gap = 2
    # One space between columns where two would break words.
    if sum(_narrowest_widths(columns, WORD)) + gap * num_gaps > width:
        gap = 1
    fitted = fit_columns(columns, width - gap * num_gaps)
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    table.padding = (0, gap, 0, 0)
    for header, *_ in fitted:
        table.add_column(Text(header), overflow="fold")
    for cells in zip(*(column[1:] for column in fitted), strict=True):
        table.add_row(*map(Text, cells))
    return table


def fit_columns(
    columns: Sequence[Sequence[str]], width: int, word: re.Pattern[str] = WORD
) -> list[list[str]]:
    """Break the cells of a table into lines, between words and, where that is too wide, inside names.

    Args:
        columns: Cells of each column, its header first.
        width: Characters for all columns together, without the gaps between columns.
        word: Pattern of the parts that are broken last.

    Returns:
        The cells with line breaks; too wide together only where their longest words are. The first column,
        the name of a row, is broken last.
    """
    narrowest = _narrowest_widths(columns, word)
    if sum(narrowest) > width:
        narrowest = [_longest_part(column, word) for column in columns]
    widest = [max(map(line_length, column), default=0) for column in columns]
    free_width = max(width - sum(narrowest), 0)
    widths = list(narrowest)
    # Width that one column does not need goes to the others.
    by_need = sorted(range(len(columns)), key=lambda i: widest[i] - narrowest[i])
    for count, i in enumerate(by_need):
        share = free_width // (len(by_need) - count)
        extra = min(max(widest[i] - narrowest[i], 0), share)
        widths[i] += extra
        free_width -= extra
    return [
        [_break_lines(cell, column_width, word) for cell in column]
        for column, column_width in zip(columns, widths, strict=True)
    ]


def line_length(text: str) -> int:
    """Length of the longest line of a text."""
    return max(map(len, text.split("\n")))


def _narrowest_widths(
    columns: Sequence[Sequence[str]], word: re.Pattern[str]
) -> list[int]:
    """Return the least width of each column: the longest name in the first, the longest part of a name in the others.

    Args:
        columns: Cells of each column.
        word: Pattern of a name.
    """
    if not columns:
        return []
    names = [len(name) for cell in columns[0] for name in word.findall(cell)]
    others = [_longest_part(column, word) for column in columns[1:]]
    return [max(names, default=0), *others]


def _longest_part(column: Sequence[str], word: re.Pattern[str]) -> int:
    """Length of the longest part of a column's cells that stays in one line."""
    names = [name for cell in column for name in word.findall(cell)]
    parts = [part for name in names for part in NAME_PART.split(name)]
    return max(map(len, parts), default=0)


def _break_lines(text: str, width: int, word: re.Pattern[str]) -> str:
    """Break a text into lines of at most ``width`` characters.

    Args:
        text: The text; its own line breaks stay.
        width: Characters of a line.
        word: Matches what is kept whole; a longer one is broken where ``NAME_PART`` separates its parts.
    """
    lines = []
    for whole_line in text.split("\n"):
        line = ""
        for name in word.findall(whole_line):
            parts = [name]
            if len(name) > width:
                parts = NAME_PART.split(name)
            for number, part in enumerate(parts):
                # A space separates names, but not the parts of one.
                longer = f"{line} {part}" if line and number == 0 else line + part
                if line and len(longer) > width:
                    lines.append(line)
                    longer = part
                line = longer
        lines.append(line)
    return "\n".join(lines)
