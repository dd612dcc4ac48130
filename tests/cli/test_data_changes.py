"""A file that a run reads changes: another run, never a mixture, and what cannot be the run's is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from posbench.pipeline.config import Config
from posbench.pipeline.stages import evaluate as evaluate_stage
from posbench.run.base import Run
from posbench.run.folder import open_run_dir
from tests.cli.task_files import write_key_values
from tests.conftest import Result, run_folders
from tests.messages import assert_refused

FIXED = [
    "task.limit=4",
    "method=scale_channel",
    "method.channel=3",
    "method.layers=[1,2]",
    "stages=[evaluate]",
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_key_values(tmp_path / "data.jsonl", 1)
    return tmp_path / "data.jsonl"


@pytest.fixture
def evaluate(
    posbench: Callable[..., Result], small: list[str], data: Path
) -> Callable[..., Result]:
    """A run on that file, in a second."""
    return lambda *args: posbench(*small, *FIXED, f"task.path={data}", *args)


def test_changed_data_is_another_run(
    evaluate: Callable[..., Result], data: Path, outputs: Path
) -> None:
    assert evaluate("method.factor=0.5").status == 0
    (first,) = run_folders(outputs)
    kept = {file.name: file.read_bytes() for file in first.iterdir() if file.is_file()}
    facts = json.loads(kept["provenance.json"])["files"]
    assert [f["file"] for f in facts if f["field"] == "task.path"] == [str(data)]
    # As a killed run leaves it.
    (first / "DONE").unlink()
    rows = (first / "predictions.jsonl").read_bytes().splitlines(keepends=True)
    (first / "predictions.jsonl").write_bytes(b"".join(rows[: len(rows) // 2]))
    write_key_values(data, 2)
    assert (
        evaluate("method.factor=0.5").status == 0
        and evaluate("method.factor=0.0").status == 0
    )
    folders = sorted(run_folders(outputs), key=lambda folder: folder != first)
    assert {folder.parent for folder in folders} == {first.parent} and len(folders) == 3
    asked = [
        json.loads((folder / "prompts.json").read_text())["questions"]
        for folder in folders
    ]
    assert asked[0] != asked[1] == asked[2], (
        "the second method is compared on its own prompts"
    )
    write_key_values(data, 1)
    result = evaluate("method.factor=0.5")
    assert (
        result.status == 0
        and "finished before" not in result.out
        and len(run_folders(outputs)) == 3
    )
    for name in ("metrics.csv", "prompts.json"):
        assert (first / name).read_bytes() == kept[name]


def test_moved_or_touched_data_is_the_same_run(
    evaluate: Callable[..., Result], data: Path, outputs: Path
) -> None:
    assert evaluate("method.factor=0.5").status == 0
    data.touch()
    assert "finished before" in evaluate("method.factor=0.5").out
    data.rename(moved := data.with_name("moved.jsonl"))
    assert "finished before" in evaluate("method.factor=0.5", f"task.path={moved}").out


def test_rescore_refuses_data_that_is_not_the_runs(
    evaluate: Callable[..., Result],
    posbench: Callable[..., Result],
    data: Path,
    outputs: Path,
) -> None:
    assert evaluate("method.factor=0.5").status == 0
    (folder,) = run_folders(outputs)
    before = (folder / "metrics.csv").read_bytes()
    rescored = posbench("rescore", str(folder), verb=True)
    assert rescored.status == 0 and rescored.out.startswith("0 of ")
    write_key_values(data, 2)
    refused = posbench("rescore", str(folder), verb=True)
    assert refused.status == 2 and refused.err.count("\n") == 1
    assert_refused(refused.err, "task.path", str(data), hint="posbench")
    # Without a record of the files, the prompts themselves tell.
    run = open_run_dir(folder)
    facts = run.facts("provenance.json")
    run.write_facts(
        "provenance.json",
        {key: value for key, value in facts.items() if key != "files"},
    )
    run.seal(facts["command"])
    refused = posbench("rescore", str(folder), verb=True)
    assert refused.status == 2 and "the questions that" in refused.err
    assert (folder / "metrics.csv").read_bytes() == before


def test_a_file_that_changes_during_a_run_ends_it(
    evaluate: Callable[..., Result],
    data: Path,
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_stage = evaluate_stage.run

    def disturbed(config: Config, run: Run) -> None:
        run_stage(config, run)
        write_key_values(data, 2)

    monkeypatch.setattr(evaluate_stage, "run", disturbed)
    ended = evaluate("method.factor=0.5")
    assert (
        ended.status == 2
        and ended.err.count("\n") == 1
        and "repeat the command" in ended.err
    )
    monkeypatch.undo()
    write_key_values(data, 1)
    (folder,) = run_folders(outputs)
    refused = evaluate("method.factor=0.5")
    assert (
        refused.status == 2
        and "remove it" in refused.err
        and not (folder / "DONE").exists()
    )
    assert evaluate("method.factor=0.0").status == 0
    other = next(f for f in run_folders(outputs) if f != folder)
    assert "copied_from" not in (other / "status.json").read_text()


def test_a_missing_router_leaves_no_folder(
    posbench: Callable[..., Result], small: list[str], outputs: Path, tmp_path: Path
) -> None:
    gone = tmp_path / "gone.safetensors"
    for method in ("moice", "[position_interpolation,moice]"):
        where = "method.parts.moice" if method.startswith("[") else "method"
        args = [f"method={method}", f"{where}.weights={gone}", "stages=[evaluate]"]
        result = posbench(*small, *args)
        assert (
            result.status == 2
            and result.err.count("\n") == 1
            and f"{where}.weights" in result.err
        )
    assert not outputs.exists()
