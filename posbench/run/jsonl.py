"""JSON-lines files of a run: every row carries a checksum and the id of its run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from posbench.files.atomic import Row, short_hash


def checksum(row: Mapping[str, object]) -> str:
    """Return a short hash of a row without its field ``sum``."""
    return short_hash({name: value for name, value in row.items() if name != "sum"})


def to_lines(rows: Iterable[Mapping[str, object]], run_id: str) -> str:
    """Return rows as JSON lines, each with the id of its run (unless that is empty) and its checksum.

    Args:
        rows: The rows.
        run_id: Becomes the field ``run``; the checksum is the field ``sum``.
    """
    lines = []
    for row in rows:
        stamped = {**row, "run": run_id} if run_id else dict(row)
        stamped["sum"] = checksum(stamped)
        lines.append(json.dumps(stamped, ensure_ascii=False) + "\n")
    return "".join(lines)


def read_rows(file: Path, run_id: str) -> tuple[list[Row], int]:
    """Read the valid rows of a JSON-lines file.

    Args:
        file: The file; it may be absent.
        run_id: Rows of another run are invalid; empty accepts rows from any run.

    Returns:
        The valid rows without ``run`` and ``sum``, and the number of invalid lines: torn, damaged, or of
        another run.
    """
    if not file.is_file():
        return [], 0
    rows = list[Row]()
    invalid = 0
    for line in file.read_bytes().split(b"\n"):
        if not line:
            continue
        try:
            row = json.loads(line)
            if row.pop("sum") != checksum(row):
                raise ValueError("checksum")
            if row.pop("run", "") != run_id and run_id:
                raise ValueError("another run's")
            rows.append(row)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            invalid += 1
    return rows, invalid
