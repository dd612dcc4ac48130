"""What a study or search of one's own gets where it uses a name of an earlier release."""

from operator import attrgetter
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from posbench.methods.choice import MethodChoice
from posbench.methods.unmodified import Unmodified
from posbench.run.base import RENAMED, Run
from posbench.run.folder import RunDir
from posbench.run.method import MethodUnderTest


@pytest.mark.parametrize("name", RENAMED)
def test_an_earlier_name_gives_what_it_is_now_and_warns(name: str) -> None:
    run = Run.__new__(Run)
    new = RENAMED[name]
    # A run has these only once it is prepared.
    vars(run)[new.split(".")[0]] = MagicMock()
    with pytest.warns(FutureWarning, match=rf"run\.{name} is now run\.{new};") as told:
        assert getattr(run, name) is attrgetter(new)(run)
    assert told[0].filename == __file__, "the line that uses it"


def test_the_method_of_a_run_may_be_called_as_before() -> None:
    method = MethodUnderTest(MethodChoice(name="none", cls=Unmodified, values={}), None)
    with pytest.warns(FutureWarning, match=r"run\.method\(\) is now"):
        assert method() is method.build()


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
