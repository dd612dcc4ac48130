"""Random schedules of a command end with the bytes of the command run once (``tests/schedules.py``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.schedules import Schedules

SCHEDULES = 4
ALL_SCHEDULES = 500


@pytest.fixture(scope="module")
def schedules(tmp_path_factory: pytest.TempPathFactory) -> Schedules:
    """What plays schedules, and knows the runs that were left alone."""
    return Schedules(tmp_path_factory.mktemp("schedules"))


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_a_schedule_leaves_the_bytes_of_one_run(
    schedules: Schedules, seed: int
) -> None:
    assert schedules.play(seed), schedules.failures[-1]


@pytest.mark.slow
def test_many_schedules(tmp_path: Path) -> None:
    many = Schedules(tmp_path)
    held = sum(many.play(seed) for seed in range(SCHEDULES, SCHEDULES + ALL_SCHEDULES))
    assert held == ALL_SCHEDULES, "\n".join(many.failures)
