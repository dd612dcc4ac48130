"""What a study or search of one's own is told where it uses a name of an earlier release."""

import pytest

from posbench.run.base import RENAMED, Run


@pytest.mark.parametrize("name", RENAMED)
def test_an_earlier_name_is_answered_with_the_name_now(name: str) -> None:
    run = Run.__new__(Run)
    with pytest.raises(AttributeError, match=f"run.{RENAMED[name]} now"):
        getattr(run, name)


def test_another_name_is_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = Run.__new__(Run).absent
