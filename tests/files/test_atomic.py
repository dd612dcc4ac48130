"""Files that are whole or absent, and what of a number they keep."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from posbench.files.atomic import (
    round_values,
    short_hash,
    write_bytes,
    write_csv,
    write_text,
)
from posbench.files.markdown import markdown


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "table.csv"
    write_text(file, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(file, "new")
    assert file.read_text() == "old"
    monkeypatch.undo()
    write_bytes(file, b"new")
    assert file.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == [
        "table.csv"
    ]


def test_csv_bytes_do_not_depend_on_rounding_noise(tmp_path: Path) -> None:
    for name, value in (("a", 0.1 + 0.2), ("b", 0.3)):
        write_csv(
            tmp_path / name, pd.DataFrame({"x": [value, float("nan")], "y": ["é", ""]})
        )
    assert (
        (tmp_path / "a").read_bytes()
        == (tmp_path / "b").read_bytes()
        == "x,y\n0.3,é\n,\n".encode()
    )


def test_equal_content_has_an_equal_digest() -> None:
    same = [{"a": 1, "b": [1, 2.5]}, {"b": (1.0, 2.5), "a": 1.0}]
    assert short_hash(same[0]) == short_hash(same[1]) and len(short_hash(same[0])) == 8
    assert short_hash({"a": 1}) != short_hash({"a": 1.5}) != short_hash({"a": "1.5"})


def test_rows_keep_six_significant_digits() -> None:
    assert round_values(np.array([[1 / 3, 2e-9 / 3], [123456.7, 0]])) == [
        [0.333333, 6.66667e-10],
        [123457.0, 0.0],
    ]


def test_a_markdown_table() -> None:
    assert markdown(["a", "b"], [[1, "x"]]) == "| a | b |\n| --- | --- |\n| 1 | x |"
