"""Hydra's launchers: jobs of other processes leave what those of one process leave; a dead one is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result

STUDY = "_target_: tests.cluster.mortal.Mortal\n"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a sweep over the study, whose jobs find its module."""
    (tmp_path / "own/study").mkdir(parents=True)
    (tmp_path / "own/study/mortal.yaml").write_text(STUDY)
    (tmp_path / "deadly").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    deadly = f"study.deadly={tmp_path / 'deadly'}"
    return [
        "-m",
        f"--config-dir={tmp_path / 'own'}",
        "study=mortal",
        "stages=[study]",
        deadly,
    ]


def tables(outputs: Path) -> dict[str, bytes]:
    """Tables of all runs and of the sweep, whose name holds the outputs folder's."""
    files = [p for p in outputs.rglob("*.csv") if ".sweeps" not in p.parts]
    return {
        f"{p.parent.name.split('__')[0]} {p.name} {i}": p.read_bytes()
        for i, p in enumerate(sorted(files))
    }


LAUNCHERS = [  # each job is a process, which takes seconds to begin
    ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=20"],
]


@pytest.mark.parametrize(
    ("launcher", "numbers"),
    [
        (LAUNCHERS[0], "1,2"),
        pytest.param(LAUNCHERS[1], "2", marks=pytest.mark.slow),
    ],
)
def test_a_launched_sweep_is_that_of_one_process(
    launcher: list[str],
    numbers: str,
    own: list[str],
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
) -> None:
    serial = tmp_path / "serial"
    assert (
        posbench(
            *own, f"study.number={numbers}", f"runtime.outputs={serial}", verb=True
        ).status
        == 0
    )
    launched = posbench(*own, f"study.number={numbers}", *launcher)
    assert launched.status == 0 and not launched.err, launched
    assert (
        tables(outputs) == tables(serial)
        and len(tables(serial)) == 2 * len(numbers.split(",")) + 1
    )
    assert not (outputs / ".sweeps").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_that_dies_is_told_and_resumed(
    launcher: list[str],
    own: list[str],
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
) -> None:
    args = [*own, "study.number=1,2,3", *launcher]
    (tmp_path / "deadly/2").touch()
    failed = posbench(*args)
    (kept,) = outputs.glob(".sweeps/*")
    assert (
        failed.status == 1
        and "study.number=2" in failed.err
        and f"logs: {kept}" in failed.err
    ), failed
    assert "joblib" in launcher[0] or [*kept.rglob("*_log.err")]
    (tmp_path / "deadly/2").unlink()
    again = posbench(*args)
    assert again.status == 0 and not again.err, again
    assert len(tables(outputs)) == 3 * 2 + 2, (
        "a summary of what there was, and one of all"
    )
    assert [*outputs.glob(".sweeps/*")] == [kept], (
        "what failed stays, what went well goes"
    )
