"""A run that was killed, damaged or repeated ends with the same bytes as one that was left alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from posbench.files.atomic import Row
from posbench.model.lm import LM
from posbench.run.folder import PREDICTIONS, open_run_dir, open_undamaged
from posbench.run.lease import owning
from posbench.tasks.kv_retrieval import KVRetrieval
from tests.conftest import Result, run_folders
from tests.kills import Kills, loaded_once
from tests.messages import assert_line_names, assert_refused, refused

RESULTS = ("metrics.csv", "search.csv", "channels.csv", "attention.csv", "found.yaml")


def _results(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in RESULTS}


def _only(outputs: Path) -> Path:
    (folder,) = run_folders(outputs)
    return folder


def test_killed_at_any_moment(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stages, in this process; tests/cli/test_kills.py kills every search and study sixty times."""
    args = [*small, "task.limit=4", "task.calibration_examples=4"]
    monkeypatch.setattr("posbench.run.base.load", loaded_once(args))
    kills = Kills(args, tmp_path)
    assert kills.tried(6, whole=1) == (6, 6), kills.failures


@pytest.fixture
def finished(posbench: Callable[..., Result], small: list[str], outputs: Path) -> Path:
    """A finished run."""
    assert posbench(*small).status == 0
    return _only(outputs)


def _count_work(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that are generated from now on."""
    sizes: list[int] = []
    generate = LM._generate_batch

    def counted(lm: LM, rows: list[list[int]], *args: int) -> list[str]:
        sizes.append(len(rows))
        return generate(lm, rows, *args)

    monkeypatch.setattr(LM, "_generate_batch", counted)
    return sizes


def test_a_finished_run_repeats_no_work(
    finished: Path,
    posbench: Callable[..., Result],
    small: list[str],
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = {
        p: p.read_bytes()
        for p in finished.iterdir()
        if p.suffix in (".jsonl", ".csv", ".yaml")
    }
    inodes = {p: p.stat().st_ino for p in before if p.suffix == ".jsonl"}
    sizes = _count_work(monkeypatch)
    for module in (
        "measure.states.average_states",
        "measure.losses.candidate_losses",
        "pipeline.stages.intervene.attention_to_items",
    ):
        monkeypatch.setattr(
            f"posbench.{module}", lambda *args: pytest.fail("work was repeated")
        )
    assert posbench(*small).status == 0
    assert sizes == []
    assert {p: p.read_bytes() for p in before} == before
    assert {p: p.stat().st_ino for p in inodes} == inodes
    assert _only(outputs) == finished and (finished / "DONE").is_file()


@pytest.mark.parametrize("damage", ["torn", "newline", "flipped", "errored", "foreign"])
def test_damaged_rows_are_computed_again(
    damage: str,
    finished: Path,
    posbench: Callable[..., Result],
    small: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = finished / PREDICTIONS
    wanted = _results(finished)
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    if damage == "torn":
        file.write_bytes(whole[:-30])
    elif damage == "newline":
        file.write_bytes(whole[:-1])
    elif damage == "flipped":
        at = lines[3].index(b'"accuracy": ') + len(b'"accuracy": ')
        flipped = (
            lines[3][:at]
            + (b"1" if lines[3][at : at + 1] == b"0" else b"0")
            + lines[3][at + 1 :]
        )
        assert flipped != lines[3]
        file.write_bytes(b"".join([*lines[:3], flipped, *lines[4:]]))
    elif damage == "errored":
        from posbench.run.folder import RunDir

        row = json.loads(lines[5])
        file.write_bytes(b"".join([*lines[:5], *lines[6:]]))
        RunDir(finished).append(
            PREDICTIONS,
            [{"method": row["method"], "id": row["id"], "error": "out of memory"}],
        )
    else:
        file.write_bytes(whole + b"[1, 2]\n\xff\xfe\n{}\n")
    for late in ("metrics.csv", "DONE"):  # what a killed run lacks
        (finished / late).unlink()
    sizes = _count_work(monkeypatch)
    result = posbench(*small)
    assert result.status == 0
    assert len(sizes) == (1 if damage in ("torn", "flipped", "errored") else 0)
    if damage in ("torn", "newline"):
        # Of the batch of 8 the method that lacks a row is asked again; what both sessions read adds up, one reply
        # token a prompt. Both methods read all tokens of the prompts but the last once, and these 36 are one group.
        assert ("evaluate 68/72 (94 %)" in result.out) is (damage == "torn")
        tokens = [json.loads(line)["tokens"] for line in lines]
        again = 4 if damage == "torn" else 0
        spent = open_run_dir(finished).status()["spent"]["evaluate"]
        once = sum(tokens[:36]) - 36
        assert (
            spent["prompt_tokens"] == once * (2 if again else 1) + len(tokens) + again
        )
        assert spent["reply_tokens"] == len(tokens) + again
    assert _results(finished) == wanted
    rows = [json.loads(line) for line in file.read_bytes().splitlines()]
    assert sorted((r["method"], r["id"]) for r in rows) == sorted(
        (r["method"], r["id"]) for r in map(json.loads, lines)
    )


def test_an_error_in_a_batch_is_recorded_and_retried(
    posbench: Callable[..., Result],
    small: list[str],
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
    finished: Path,
    tmp_path: Path,
) -> None:
    generate = LM._generate_batch
    calls = []

    def fails_once(lm: LM, rows: list[list[int]], *args: int) -> list[str]:
        calls.append(len(rows))
        if len(calls) == 2:
            raise RuntimeError("device-side assert")
        return generate(lm, rows, *args)

    monkeypatch.setattr(LM, "_generate_batch", fails_once)
    other = tmp_path / "other"
    first = posbench(*small, f"runtime.outputs={other}", verb=True)
    assert first.status == 1
    assert_line_names(
        first.err, "8 rows", "predictions.jsonl", "failed", "same command"
    )
    folder = _only(other)
    assert not (folder / "DONE").exists() and not (folder / "metrics.csv").exists()
    assert (
        sum(
            "error" in json.loads(line)
            for line in (folder / PREDICTIONS).read_text().splitlines()
        )
        == calls[1]
    )
    assert json.loads((folder / "status.json").read_text())["state"] == "incomplete"
    assert posbench(*small, f"runtime.outputs={other}", verb=True).status == 0
    assert _results(folder) == _results(finished)


def test_out_of_memory_halves_the_batches_and_loses_nothing(
    posbench: Callable[..., Result],
    small: list[str],
    monkeypatch: pytest.MonkeyPatch,
    finished: Path,
    tmp_path: Path,
) -> None:
    generate = LM._generate_batch
    calls = []

    def holds_three(lm: LM, rows: list[list[int]], *args: Any) -> list[str]:
        calls.append(len(rows))
        if len(rows) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(lm, rows, *args)

    monkeypatch.setattr(LM, "_generate_batch", holds_three)
    other = tmp_path / "other"
    assert posbench(*small, f"runtime.outputs={other}", verb=True).status == 0
    # 36 prompts under both methods in batches of 8 rows, longest first: 8 and 4 fail, and every batch after runs in
    # quarters.
    assert calls == [8, 4, *[2] * 36]
    folder = _only(other)
    assert pd.read_csv(folder / "metrics.csv").equals(
        pd.read_csv(finished / "metrics.csv")
    )
    monkeypatch.setattr(
        LM,
        "_generate_batch",
        lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")),
    )
    full = posbench(
        *small,
        f"runtime.outputs={tmp_path / 'full'}",
        "stages=[evaluate]",
        "method=none",
        verb=True,
    )
    assert full.status == 1
    assert_line_names(full.err, "36 rows", "predictions.jsonl", "failed")


def test_one_process_per_folder(
    finished: Path, posbench: Callable[..., Result], small: list[str]
) -> None:
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}
    with owning(finished):
        second = posbench(*small)
    assert second.status == 2 and second.err.count("\n") == 1
    assert_refused(second.err, "run folder", str(finished), hint="wait")
    assert {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()} == before
    assert posbench(*small).status == 0


def test_nothing_is_overwritten(
    finished: Path, posbench: Callable[..., Result], small: list[str], outputs: Path
) -> None:
    assert finished.parent.name == "v001"
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}
    assert posbench(*small, "task.seed=1").status == 0
    second = [p for p in run_folders(outputs) if p != finished]
    assert [p.parent for p in second] == [finished.parent], "the same code"
    assert {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()} == before
    # Another method beside the first task; then back to each.
    assert posbench(*small, "method=none", "stages=[intervene,evaluate]").status == 0
    assert posbench(*small, "task.seed=1").status == 0
    assert [p.parent.name for p in run_folders(outputs)] == ["v001"] * 3


def test_the_unmodified_model_is_evaluated_once(
    finished: Path,
    posbench: Callable[..., Result],
    small: list[str],
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = _count_work(monkeypatch)
    assert posbench(*small, "method.factor=-1").status == 0
    assert sum(sizes) == 36
    other = next(p for p in run_folders(outputs) if p != finished)
    assert other.parent == finished.parent

    def unmodified(folder: Path) -> list[Row]:
        return [
            row
            for row in open_run_dir(folder).rows(PREDICTIONS)
            if row["method"] == "none"
        ]

    assert unmodified(other) == unmodified(finished) and len(unmodified(other)) == 36


def test_a_run_that_was_interrupted_is_called_killed(
    small: list[str],
    posbench: Callable[..., Result],
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("posbench.pipeline.stages.evaluate.run", interrupt)
        assert posbench(*small, "method=none", "stages=[evaluate]").status == 130
    assert "killed" in posbench("ls", "runs", "--outputs", str(outputs), verb=True).out
    assert posbench(*small, "method=none", "stages=[evaluate]").status == 0
    assert (
        "killed" not in posbench("ls", "runs", "--outputs", str(outputs), verb=True).out
    )


def test_rescore_refuses_a_study(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    study = ("study=remedies", "model=tiny", "study.methods=[rope_base]")
    assert (
        posbench(*study, "task.limit=2", "task.pairs=8", "stages=[study]").status == 0
    )
    result = posbench("rescore", str(_only(outputs)), verb=True)
    assert result.status == 2
    assert_refused(result.err, "DIR", allowed="not a study")


def test_rescore_needs_no_model(
    finished: Path, posbench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = (finished / "metrics.csv").read_bytes()
    (finished / "metrics.csv").unlink()
    monkeypatch.setattr(
        "posbench.model.load._load_checkpoint",
        lambda *args: pytest.fail("a model was loaded"),
    )
    result = posbench("rescore", str(finished), verb=True)
    assert result.status == 0, result.err
    assert_line_names(result.out, "0 of 72", "scores")
    assert (finished / "metrics.csv").read_bytes() == table


def contrasts_of(folder: Path) -> pd.Series:
    """The contrasts of the positions in metrics.csv of a run."""
    metrics = pd.read_csv(folder / "metrics.csv")
    return metrics.loc[metrics["metric"] == "position_contrast", "value"]


def test_scores_of_rescore_go_to_no_other_run_and_are_made_again_by_a_run(
    posbench: Callable[..., Result], outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["stages=[evaluate,report]", "task.limit=6", "runtime.resamples=100"]
    settings += ["runtime.round_questions=3", "runtime.until=decided", "method=none"]
    assert posbench(*settings).status == 0
    folder = _only(outputs)
    files = ("metrics.csv", PREDICTIONS)
    before = {name: (folder / name).read_bytes() for name in files}
    contrasts = contrasts_of(folder)
    assert (contrasts != 0).any()

    with monkeypatch.context() as changed:
        changed.setattr(KVRetrieval, "score", lambda *args: {"accuracy": 0.5})
        assert posbench("rescore", str(folder), verb=True).status == 0
        assert "changed by posbench rescore" in (folder / "report.html").read_text()
    assert (contrasts_of(folder) == 0).all()
    assert (pd.read_csv(folder / "metrics.csv")["value"] <= 0.5).all()

    scaled = [*settings, "method=scale_channel", "method.channel=15"]
    assert posbench(*scaled).status == 0
    other = next(path for path in run_folders(outputs) if path != folder)
    scores = [
        row["scores"]["accuracy"]
        for row in open_run_dir(other).rows(PREDICTIONS)
        if row["method"] == "none"
    ]
    assert set(scores) == {0.0, 1.0}

    assert posbench(*settings).status == 0
    assert {name: (folder / name).read_bytes() for name in files} == before
    assert "changed by posbench rescore" not in (folder / "report.html").read_text()


def test_a_rescored_run_moves_the_sweeps_that_it_belongs_to(
    posbench: Callable[..., Result], outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["stages=[evaluate]", "task.limit=4", "method.channel=15"]
    assert posbench("-m", "method.factor=1,0", *settings).status == 0
    (summary,) = outputs.glob("*/v*/sweep__*/summary.csv")
    folder = run_folders(outputs)[0]
    monkeypatch.setattr(KVRetrieval, "score", lambda *args: {"accuracy": 0.5})
    result = posbench("rescore", str(folder), verb=True)
    assert result.status == 0
    assert "scores of 1 of 2 runs" in " ".join(result.out.split())
    rows = pd.read_csv(summary)
    values = rows[rows["metric"] == "accuracy"].groupby("run")["value"]
    assert sorted(values.nunique() == 1) == [False, True]
    result = posbench("rescore", str(summary.parent), verb=True)
    assert result.status == 0 and "of 2 runs" not in result.out


def test_a_rescore_that_was_stopped_can_be_repeated(
    posbench: Callable[..., Result],
    small: list[str],
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopped in front of some file that it writes; until then other verbs name the command that goes on."""
    few = ["task.limit=2", "search.strings=4", "stages=[search,evaluate]"]
    assert posbench(*small, *few).status == 0
    folder = _only(outputs)
    made = shutil.copytree(folder, outputs.parent / "made")
    monkeypatch.setattr(KVRetrieval, "score", lambda *args: {"accuracy": 0.5})
    assert posbench("rescore", str(folder), verb=True).status == 0
    assert open_run_dir(folder).damaged() == []
    wanted = _whole(folder)
    assert wanted["found.yaml"] != (made / "found.yaml").read_bytes(), "its verdict"

    replace = os.replace
    for name in ("metrics.csv", "found.yaml", "report.html", "DONE"):
        shutil.rmtree(folder)
        shutil.copytree(made, folder)

        def stops(scratch: Path, file: Path) -> None:
            if file == folder / name:  # noqa: B023
                raise KeyboardInterrupt
            replace(scratch, file)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", stops)
            assert posbench("rescore", str(folder), verb=True).status == 130
        with refused("DIR", str(folder), hint=f"posbench rescore {folder}"):
            open_undamaged(folder)
        again = posbench("rescore", str(folder), verb=True)
        assert again.status == 0, again.err
        assert _whole(folder) == wanted, name


def test_a_run_goes_on_where_its_rescore_was_stopped(
    posbench: Callable[..., Result],
    small: list[str],
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = ["task.limit=2", "stages=[evaluate]", "method=none"]
    assert posbench(*small, *few).status == 0
    folder = _only(outputs)
    names = ("metrics.csv", PREDICTIONS)
    before = {name: (folder / name).read_bytes() for name in names}

    def stops(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(KVRetrieval, "score", lambda *args: {"accuracy": 0.5})
        patch.setattr("posbench.cli.verbs.render_run", stops)
        assert posbench("rescore", str(folder), verb=True).status == 130
    assert (folder / PREDICTIONS).read_bytes() != before[PREDICTIONS]
    assert posbench(*small, *few).status == 0
    assert {name: (folder / name).read_bytes() for name in names} == before
    assert posbench("show", str(folder), verb=True).status == 0


def _whole(folder: Path) -> dict[str, bytes]:
    """Content of every file of a folder by name, hidden ones included, but for the lock."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and not file.name.startswith("lock.")
    }


def test_a_task_without_scores_rescores_nothing(
    finished: Path, posbench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _results(finished)
    monkeypatch.setattr(KVRetrieval, "score", lambda *args: {})
    result = posbench("rescore", str(finished), verb=True)
    assert result.status == 2
    assert_refused(result.err, "task", "kv_retrieval")
    assert _results(finished) == before


def test_interrupt_from_the_keyboard(
    posbench: Callable[..., Result],
    small: list[str],
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LM, "_generate_batch", interrupt)
    result = posbench(*small)
    assert result.status == 130 and "Traceback" not in result.err
    assert_line_names(result.err, "same command", "resumes")
    assert not (_only(outputs) / "DONE").exists()
