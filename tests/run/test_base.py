"""What a study or search of one's own gets from its run."""

from pathlib import Path

import pytest

from posbench.run.base import Run
from posbench.run.folder import RunDir


def test_rows_of_another_folder_go_there(tmp_path: Path) -> None:
    run = Run.__new__(Run)
    run.out = RunDir(tmp_path / "one")
    rows = run.rows
    other = run.in_folder(RunDir(tmp_path / "two"))
    assert other.rows.out.path == tmp_path / "two"
    assert run.rows is rows and rows.out.path == tmp_path / "one"


def test_an_error_inside_a_property_is_the_one_that_is_raised() -> None:
    run = Run.__new__(Run)
    with pytest.raises(AttributeError, match=r"'model'|'runtime'"):
        _ = run.lm
