"""Files that are whole or absent, and what of a number they keep."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from posbench.files import atomic
from posbench.files.atomic import (
    new_folder,
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


def test_two_that_write_one_file_at_once_both_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "table.csv"

    def write_another(_: int) -> None:
        monkeypatch.undo()
        write_text(file, "second")

    monkeypatch.setattr(os, "fsync", write_another)
    write_text(file, "first")
    assert file.read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]


def test_two_that_write_one_folder_at_once_both_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with new_folder(out) as first:
        write_text(first / "a", "first")
        with new_folder(out) as second:
            write_text(second / "a", "second")
        assert (out / "a").read_text() == "second"
        write_text(first / "b", "first")
    assert (out / "a").read_text() == (out / "b").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_many_that_write_one_folder_at_once_all_end(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def write(number: int) -> None:
        with new_folder(out) as folder:
            for name in ("a", "b"):
                write_text(folder / name, str(number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(60)))
    assert (out / "a").read_text() == (out / "b").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_process_left_is_removed_by_the_next_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    living = atomic._scratch(tmp_path / "a", "tmp")
    living.write_text("half")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: ended.pid)
        atomic._scratch(tmp_path / "a", "tmp").write_text("half")
        atomic._scratch(tmp_path / "b", "new").mkdir()
    assert len(list(tmp_path.iterdir())) == 3
    write_text(tmp_path / "a", "whole")
    with new_folder(tmp_path / "b"):
        pass
    assert sorted(tmp_path.iterdir()) == sorted(
        [living, tmp_path / "a", tmp_path / "b"]
    )


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
