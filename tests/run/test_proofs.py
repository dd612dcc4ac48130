"""Rows carry what was asked and what answered, and those of another prompt or method are never a run's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from posbench.cli.main import main
from posbench.files.digests import Content
from posbench.pipeline import execute, sharing
from posbench.pipeline.config import Config
from posbench.pipeline.execute import make_run_folder
from posbench.pipeline.prepare import build_run
from posbench.run.folder import RunDir, open_run_dir
from posbench.run.shards import write_found_parameters
from tests.cli.task_files import write_key_values
from tests.conftest import Result, config_of, run_folders
from tests.messages import assert_line_names, assert_refused

FIXED = ["method.channel=3", "method.layers=[1,2]", "stages=[evaluate]"]
FACTOR = "method.factor=0.5"
FILES = "predictions.jsonl", "metrics.csv"


def only(outputs: Path) -> Path:
    (folder,) = run_folders(outputs)
    return folder


def left(folder: Path) -> dict[str, bytes]:
    """The rows and the table of a finished run."""
    assert open_run_dir(folder).done and not open_run_dir(folder).damaged()
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_key_values(tmp_path / "data.jsonl", seed=1)
    return tmp_path / "data.jsonl"


@pytest.fixture
def command(small: list[str], data: Path) -> list[str]:
    """A run on that file, in a second."""
    return [*small, *FIXED, FACTOR, "task.limit=4", f"task.path={data}"]


@pytest.fixture
def wanted(
    command: list[str], posbench: Callable[..., Result], tmp_path: Path
) -> dict[str, bytes]:
    """What that run leaves where nothing disturbs it."""
    outputs = tmp_path / "undisturbed"
    assert posbench(*command, f"runtime.outputs={outputs}", verb=True).status == 0
    return left(only(outputs))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return open_run_dir(folder).rows("predictions.jsonl")


def test_the_digest_of_a_request_is_that_of_its_token_ids(
    command: list[str], posbench: Callable[..., Result], outputs: Path
) -> None:
    assert posbench(*command).status == 0
    run = build_run(config_of(*command), Console(quiet=True))
    encoded = run.prompts.encode(run.evaluation)
    for row in rows_of(only(outputs)):
        ids = np.array(encoded[row["id"]].ids, "<i8").tobytes()
        assert row["request"] == hashlib.sha256(ids).hexdigest()[:12]


def digests_of(folder: Path) -> dict[str, set[str]]:
    """What answered the rows of each method."""
    rows = rows_of(folder)
    return {
        name: {row["computation"] for row in rows if row["method"] == name}
        for name in ("none", "scale_channel")
    }


@pytest.fixture(scope="module")
def answered(
    small: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], dict[str, set[str]]]:
    """A run's command, and what answered its rows."""
    folder = tmp_path_factory.mktemp("answered")
    write_key_values(folder / "data.jsonl", seed=1)
    command = [*small, *FIXED, FACTOR, "task.limit=4"]
    command.append(f"task.path={folder / 'data.jsonl'}")
    assert main([*command, f"runtime.outputs={folder / 'outputs'}"]) == 0
    return command, digests_of(only(folder / "outputs"))


@pytest.mark.parametrize(
    ("override", "unmodified_same", "method_same"),
    [
        ("runtime.batch_size=3", True, True),
        ("runtime.share=null", True, True),
        ("method.factor=0.25", True, False),
        ("method.channel=4", True, False),
        ("model.dtype=float64", False, False),
        ("model.attention=eager", False, False),
        ("task.max_new_tokens=2", False, False),
    ],
)
def test_what_answers_is_told_by_its_digest(
    override: str,
    unmodified_same: bool,
    method_same: bool,
    answered: tuple[list[str], dict[str, set[str]]],
    posbench: Callable[..., Result],
    outputs: Path,
) -> None:
    command, before = answered
    call = posbench(*command, override)
    assert call.status == 0, call.err
    after = digests_of(only(outputs))
    assert all(len(values) == 1 for values in before.values())
    assert before["none"] != before["scale_channel"]
    assert (before["none"] == after["none"]) is unmodified_same
    assert (before["scale_channel"] == after["scale_channel"]) is method_same


def test_rows_of_other_constants_are_not_merged(
    small: list[str],
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A shard made with a search's result that is not the run's."""
    args = [*small, "stages=[search,evaluate]", "task.limit=4"]
    undisturbed = tmp_path / "undisturbed"
    assert posbench(*args, f"runtime.outputs={undisturbed}", verb=True).status == 0
    method = RunDir(only(undisturbed)).read_json("method.json")
    folder = make_run_folder(config_of(*args, f"runtime.outputs={outputs}"), "posbench")
    other = {"channel": (method["channel"] + 1) % 16, "factor": 3.0, "layers": [0, 3]}
    write_found_parameters(open_run_dir(folder), other)
    assert posbench("resume", str(folder), "--part=0/1", verb=True).status == 0
    finished = posbench(*args)
    assert finished.status == 0
    assert left(folder) == left(only(undisturbed))
    assert_line_names(caplog.text, "predictions.jsonl", "computation", "made again")


@pytest.mark.parametrize("flag", [None, "--part=0/1"])
def test_rows_of_another_file_are_made_again(
    flag: str | None,
    command: list[str],
    wanted: dict[str, bytes],
    data: Path,
    posbench: Callable[..., Result],
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The process died before it could see that the file changed, which then changed back."""
    original = data.read_bytes()
    config = config_of(*command, f"runtime.outputs={outputs}")
    folder = make_run_folder(config, "posbench")
    module = sharing if flag else execute
    read = module.run_contents

    def read_before_a_change(config: Config) -> list[Content]:
        contents = read(config)
        write_key_values(data, seed=2)
        return contents

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "run_contents", read_before_a_change)
        patch.setattr(module, "need_unchanged", killed)
        if flag:
            posbench("resume", str(folder), flag, verb=True)
        else:
            posbench(*command)
    data.write_bytes(original)
    finished = posbench(*command)
    assert finished.status == 0, finished.err
    assert left(folder) == wanted
    assert_line_names(caplog.text, "predictions.jsonl", "request", "made again")


def without_proofs(folder: Path) -> None:
    """Rows as an earlier version wrote them."""
    run = open_run_dir(folder)
    old = [
        {k: v for k, v in row.items() if k not in ("request", "computation")}
        for row in run.rows("predictions.jsonl")
    ]
    run.write_rows("predictions.jsonl", old)
    run.seal(run.command)


def test_old_rows_can_be_read_and_are_not_merged(
    command: list[str],
    wanted: dict[str, bytes],
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert posbench(*command).status == 0
    folder = only(outputs)
    without_proofs(folder)
    other = only(tmp_path / "undisturbed")
    for verb in (["show"], ["report"], ["rescore"], ["compare", str(other)]):
        name, *others = verb
        read = posbench(name, str(folder), *others, verb=True)
        assert read.status == 0, read.err
    # As a killed run leaves it.
    for name in ("DONE", "manifest.json", "status.json"):
        (folder / name).unlink()
    again = posbench(*command)
    assert again.status == 0
    assert left(folder) == wanted
    assert_line_names(caplog.text, "predictions.jsonl", "request", "None", "made again")


def test_a_row_of_another_prompt_is_not_scored_again(
    command: list[str], posbench: Callable[..., Result], outputs: Path
) -> None:
    assert posbench(*command).status == 0
    folder = only(outputs)
    run = open_run_dir(folder)
    rows = run.rows("predictions.jsonl")
    rows[0]["prompt"] = "0" * 8
    run.write_rows("predictions.jsonl", rows)
    run.seal(run.command)
    refused = posbench("rescore", str(folder), verb=True)
    assert refused.status == 2
    assert_refused(refused.err, "task", hint="run it again")


def test_a_check_of_other_constants_is_made_again(
    small: list[str], posbench: Callable[..., Result], outputs: Path
) -> None:
    """Held-back prompts measured under what an earlier search found."""
    args = [*small, "stages=[search]"]
    assert posbench(*args).status == 0
    folder = only(outputs)
    run = open_run_dir(folder)
    wanted = run.rows("held_back.jsonl")
    table = (folder / "held_back.csv").read_bytes()
    assert {row["method"] for row in wanted} == {"none", "found"}
    other = [
        {**row, "value": 9.0, "computation": "0" * 12}
        if row["method"] == "found"
        else row
        for row in wanted
    ]
    run.write_rows("held_back.jsonl", other)
    for name in ("DONE", "manifest.json", "status.json"):
        (folder / name).unlink()
    assert posbench(*args).status == 0
    assert run.rows("held_back.jsonl") == wanted
    assert (folder / "held_back.csv").read_bytes() == table
