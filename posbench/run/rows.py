"""Rows of JSON-lines files: each with a checksum and, in a run, with the run that it belongs to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from posbench.files.atomic import Row, digest


def checksum(row: Mapping[str, object]) -> str:
    """Short hash of a row without its ``sum``."""
    return digest({k: v for k, v in row.items() if k != "sum"})


def lines(rows: Iterable[Mapping[str, object]], run: str) -> str:
    """Rows as JSON lines, each with its run, where it has one, and its checksum."""
    stamped = ({**row, **({"run": run} if run else {})} for row in rows)
    return "".join(
        json.dumps({**row, "sum": checksum(row)}, ensure_ascii=False) + "\n"
        for row in stamped
    )


def read_rows(file: Path, run: str) -> tuple[list[Row], int]:
    """The whole rows of a JSON-lines file, and how many lines are torn, damaged or another run's."""
    if not file.is_file():
        return [], 0
    rows = list[Row]()
    damaged = 0
    for line in file.read_bytes().split(b"\n"):
        if not line:
            continue
        try:
            row = json.loads(line)
            if row.pop("sum") != checksum(row):
                raise ValueError("checksum")
            if row.pop("run", "") != run and run:
                raise ValueError("another run's")
            rows.append(row)
        except (ValueError, KeyError, AttributeError, TypeError):
            damaged += 1
    return rows, damaged
