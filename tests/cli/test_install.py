"""The wheel works from any directory, without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from posbench import paths
from posbench.errors import choices
from tests.conftest import PROCESS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel was installed."""
    work = tmp_path_factory.mktemp("install")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [
            *pip,
            "wheel",
            str(ROOT),
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(work),
        ],
        check=True,
    )
    (wheel,) = work.glob("positionbench-*.whl")
    subprocess.run(
        [
            *pip,
            "install",
            "--no-deps",
            "--no-index",
            "--target",
            str(work / "site"),
            str(wheel),
        ],
        check=True,
    )
    return work / "site"


def _posbench(
    installed: Path, cwd: Path, *args: str
) -> subprocess.CompletedProcess[str]:
    """The installed command line; -P and the path order keep the checkout out."""
    cwd.mkdir(exist_ok=True)
    command = [sys.executable, "-P", *PROCESS[1:], *args]
    environment = os.environ | {"PYTHONPATH": str(installed), "COLUMNS": "200"}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment, check=False
    )


def test_the_wheel_holds_configs_experiments_and_models(installed: Path) -> None:
    package = installed / "posbench"
    for name, source in (
        ("conf", paths.CONF),
        ("experiments", paths.EXPERIMENTS),
        ("embedded/models", paths.MODELS),
        # Templates, scripts and styles of pages among the modules.
        ("report", paths.PACKAGE / "report"),
    ):
        wanted = {
            p.relative_to(source)
            for p in source.rglob("*")
            if p.is_file()
            and not {"__pycache__", "results", "captions.csv"} & {*p.parts}
        }
        assert wanted and wanted <= {
            p.relative_to(package / name) for p in (package / name).rglob("*")
        }
    assert not [*(package / "experiments").rglob("results")]
    assert not (package / "experiments" / "captions.csv").exists()
    (wheel,) = installed.parent.glob("positionbench-*.whl")
    assert {
        name.split("/")[0].split("-")[0] for name in zipfile.ZipFile(wheel).namelist()
    } == {"posbench", "positionbench"}  # the package, and its metadata


def test_it_runs_from_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    where = subprocess.run(
        [sys.executable, "-P", "-c", "import posbench; print(posbench.__file__)"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(installed)
    listed = _posbench(installed, tmp_path / "empty", "ls")
    assert listed.returncode == 0, listed.stderr
    assert all(
        name in listed.stdout
        for name in [
            *choices(paths.CONF / "model"),
            *choices(*paths.group_folders("experiment")),
        ]
    )
    few = [
        "task.limit=3",
        "task.calibration_examples=4",
        "search.strings=30",
        "runtime.intervene_examples=1",
    ]
    done = _posbench(installed, tmp_path / "empty", *few, "runtime.resamples=100")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "empty/outputs/kv_retrieval/v001").glob("tiny__*")
    assert (folder / "DONE").is_file() and (folder / "report.html").is_file()
    assert '"git": null' in (folder / "provenance.json").read_text()


@pytest.mark.slow
def test_a_config_dir_of_the_user(
    installed: Path, tmp_path: Path, checkpoint: Path, small: list[str]
) -> None:
    own = tmp_path / "own" / "model"
    own.mkdir(parents=True)
    own.joinpath("mine.yaml").write_text(
        f"name: mine\npath: {checkpoint}\ndtype: float32\n"
    )
    rest = [o for o in small if not o.startswith("model")]
    done = _posbench(
        installed, tmp_path / "empty", "--config-dir", "../own", "model=mine", *rest
    )
    assert done.returncode == 0, done.stderr
    assert (
        len(list((tmp_path / "empty/outputs/kv_retrieval/v001").glob("mine__*/DONE")))
        == 1
    )
