"""One part of a report page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from posbench.late import Figure

Drawn: TypeAlias = "Mapping[str, tuple[Figure, str]]"
"""Figures with their captions, by file name."""


@dataclass
class Section:
    """A part of a report page; empty fields are left out.

    Attributes:
        title: Its heading.
        text: A paragraph below the heading.
        header: Titles of the table's columns.
        rows: Cells of the table.
        figures: Figures with their captions, by file name.
        block: Text that is shown verbatim.
        pictures: Further figures as SVG files, each with its caption.
        curves: HTML that a page shows in place of a figure, by its name.
        insert: Makes the HTML below all this from the bytes that it may take at most.
    """

    title: str
    text: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    figures: Drawn = field(default_factory=dict)
    block: str = ""
    pictures: Sequence[tuple[Path, str]] = ()
    curves: Mapping[str, str] = field(default_factory=dict)
    insert: Callable[[int], str] | None = None
