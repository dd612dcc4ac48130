"""What a study or search of one's own is told where it uses a name of an earlier release."""

from pathlib import Path

import pytest

from posbench.run.base import RENAMED, Run
from posbench.run.folder import RunDir


@pytest.mark.parametrize("name", RENAMED)
def test_an_earlier_name_is_answered_with_the_name_now(name: str) -> None:
    run = Run.__new__(Run)
    with pytest.raises(AttributeError, match=f"run.{RENAMED[name]} now"):
        getattr(run, name)


def test_another_name_is_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = Run.__new__(Run).absent


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
