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
    """A heading, then whatever is given of text, table (header and rows), figures and verbatim block."""

    title: str
    text: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    figures: Drawn = field(default_factory=dict)
    block: str = ""
