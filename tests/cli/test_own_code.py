"""A run remembers the folder of its own classes, and every verb that opens runs finds them there."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from posbench.cli.main import RUN_VERBS, VERBS, find_verb, usage
from tests.conftest import Result, run_folders
from tests.messages import assert_names

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
MODULE = "called_over"
"""Name of a module that no other test imports."""
SETTINGS = [
    f"task={MODULE}",
    "task.names=8",
    "task.limit=4",
    "runtime.resamples=100",
    "method.channel=15",
    "stages=[evaluate]",
]


def own_task(folder: Path) -> Path:
    """A config folder with the task of the examples, in a module of another name."""
    (folder / "task").mkdir(parents=True)
    shutil.copy(EXAMPLES / "roll_call.py", folder / f"{MODULE}.py")
    text = (EXAMPLES / "task" / "roll_call.yaml").read_text()
    (folder / "task" / f"{MODULE}.yaml").write_text(
        text.replace("roll_call.", f"{MODULE}.")
    )
    return folder


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Such a folder; what is imported from it is forgotten at the end."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield own_task(tmp_path / "own")
    sys.modules.pop(MODULE, None)


def forget() -> None:
    """Let the next command find modules as a process of its own does."""
    sys.modules.pop(MODULE, None)
    sys.path[:] = [entry for entry in sys.path if "own" not in Path(entry).name]


@pytest.fixture
def run(own: Path, outputs: Path, posbench: Callable[..., Result]) -> Path:
    result = posbench(f"--config-dir={own}", *SETTINGS)
    assert result.status == 0, result.err
    forget()
    (folder,) = run_folders(outputs)
    return folder


def test_every_verb_finds_the_code_that_a_run_records(
    run: Path, own: Path, posbench: Callable[..., Result], tmp_path: Path
) -> None:
    facts = json.loads((run / "provenance.json").read_text())
    assert facts["config_dir"] == str(own)
    other = Path(shutil.copytree(run, run.with_name(f"{run.name[:-8]}00000000")))
    out = tmp_path / "fix"
    commands = [
        ["show", str(run)],
        ["rescore", str(run)],
        ["resume", str(run)],
        ["compare", str(run), str(other), "--out", str(tmp_path / "both")],
        ["export", str(run), "--to", "lora", "--out", str(out), "--force"],
        ["verify", str(out)],
    ]
    for command in commands:
        result = posbench(*command, verb=True)
        assert result.status == 0, (command, result.err)
        forget()


def test_a_folder_that_has_moved_is_named_and_can_be_given(
    run: Path, own: Path, posbench: Callable[..., Result]
) -> None:
    moved = own.rename(own.with_name("own_elsewhere"))
    lost = posbench("show", str(run), verb=True)
    assert lost.status == 2
    assert len(lost.err.splitlines()) == 1
    assert_names(lost.err, str(own), f"{MODULE}.py", run.name)
    given = posbench("show", str(run), "--config-dir", str(moved), verb=True)
    assert given.status == 0, given.err
    forget()
    nowhere = posbench("show", str(run), "--config-dir", str(own), verb=True)
    assert nowhere.status == 2
    assert_names(nowhere.err, "--config-dir", str(own))


def test_no_run_is_read_with_the_code_of_another(
    run: Path, tmp_path: Path, posbench: Callable[..., Result], outputs: Path
) -> None:
    """Two folders, each with a module of that name: whichever was imported first would serve both."""
    other = own_task(tmp_path / "own_too")
    code = other / f"{MODULE}.py"
    code.write_text(f"{code.read_text()}\nANOTHER = 1\n")
    result = posbench(f"--config-dir={other}", *SETTINGS)
    assert result.status == 0, result.err
    assert len(run_folders(outputs)) == 2
    refused = posbench("show", str(run), verb=True)
    assert refused.status == 2
    assert_names(refused.err, "module", str(code), run.name)


@pytest.mark.parametrize("verb", RUN_VERBS)
def test_the_help_of_a_verb_names_the_flag(verb: str) -> None:
    assert "--config-dir" in usage(find_verb(verb))
    assert verb in VERBS
