"""One part of a report page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    """

    title: str
    text: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    figures: Drawn = field(default_factory=dict)
    block: str = ""
