"""Submitting, in this process: what is refused, what a folder alone tells, and shards one after another."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from posbench.files.digests import Content
from posbench.pipeline import jobs, sharing
from posbench.pipeline.config import Config
from posbench.pipeline.execute import make_run_folder, recorded_config
from posbench.pipeline.jobs import Submission
from posbench.run.folder import RunDir, open_run_dir
from posbench.run.lease import owning, process_start
from tests.cli.task_files import write_key_values
from tests.conftest import PROCESS, Result, config_of, run_folders
from tests.messages import assert_line_names, assert_names, assert_refused

LOCAL = "runtime/cluster=local"
SMALL = [
    "stages=[evaluate,report]",
    "task.limit=4",
    "runtime.batch_tokens=512",
    "runtime.resamples=100",
]


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ([], "runtime/cluster"),
        ([LOCAL, "runtime.device=cuda"], "runtime.cluster.gpus"),
        ([LOCAL, "--shards", "0"], "--shards"),
        ([LOCAL, "--shards"], "--shards"),
        ([LOCAL, "--shards=2", "--shards", "2"], "--shards"),
        ([LOCAL, "runtime.cluster.partition=cpu"], "runtime.cluster.partition"),
        ([LOCAL, "runtime.cluster.setup=[exit 3]"], "runtime.cluster.setup"),
        ([LOCAL, "--shards", "2", "study=masks"], "--shards"),
        ([LOCAL, "runtime.cluster.gpus=-1"], "runtime.cluster.gpus"),
        ([LOCAL, "task.pairs=100000"], "task.pairs"),
        (["-m", LOCAL, "method.factor=1,x"], "method.factor"),
        (["runtime/cluster=slum"], "runtime/cluster"),
        (["runtime.cluster=5"], "runtime/cluster"),
    ],
)
def test_nothing_is_sent_unless_every_run_can_go(
    args: list[str], field: str, posbench: Callable[..., Result], outputs: Path
) -> None:
    told = posbench("submit", *args)
    assert told.status == 2 and told.err.startswith(f"posbench: {field} = "), told
    assert not outputs.exists()


def test_a_run_here_takes_no_cluster(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    told = posbench(*SMALL, "runtime/cluster=slurm")
    assert told.status == 2 and not outputs.exists()
    assert_refused(told.err, "runtime/cluster", "slurm", hint="posbench submit")
    none = posbench("jobs", str(outputs), verb=True)
    assert none.status == 2 and "no such folder" in none.err
    outputs.mkdir()
    none = posbench("jobs", str(outputs), verb=True)
    assert none.status == 2 and "posbench submit" in none.err


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["method=[layer_scaling,scale_channel]", "model=tiny_b", "stages=[evaluate]"],
        ["study=rope_curves"],
        ["study=rollout", "method=none"],
        ["experiment=yu2025_table1_kv", "model=tiny"],
        ["method.factor=0.5", "stages=[search]", "search=exhaustive"],
        ["method=ms_poe", "runtime.cluster.gpus=1", "runtime/cluster=slurm"],
    ],
)
def test_a_folder_tells_its_run(args: list[str], outputs: Path) -> None:
    """And none of other code, or settings."""
    config = config_of(*args, f"runtime.outputs={outputs}")
    folder = make_run_folder(config, "posbench")
    again = recorded_config(folder)
    assert {**again.raw, "runtime": 0} == {
        **config.raw,
        "runtime": 0,
    } and again.stages == config.stages
    assert make_run_folder(again, "posbench").samefile(folder)


def test_shards_one_after_another(
    posbench: Callable[..., Result], outputs: Path, tmp_path: Path
) -> None:
    """The last one finishes the run; the search is made once, before."""
    args = [
        *SMALL,
        "stages=[search,intervene,evaluate]",
        "search.strings=6",
        "task.calibration_examples=6",
    ]
    args += ["runtime.intervene_examples=2"]
    assert (
        posbench(*args, f"runtime.outputs={tmp_path / 'serial'}", verb=True).status == 0
    )
    folder = make_run_folder(config_of(*args, f"runtime.outputs={outputs}"), "posbench")
    for number in (2, 0, 1):
        assert not RunDir(folder).done
        assert (
            posbench("resume", str(folder), f"--shard={number}/3", verb=True).status
            == 0
        )
    assert (
        open_run_dir(folder).done
        and not open_run_dir(folder).damaged()
        and not (folder / ".parts").exists()
    )
    (serial,) = run_folders(tmp_path / "serial")
    for name in (
        "found.yaml",
        "attention.jsonl",
        "attention.csv",
        "predictions.jsonl",
        "metrics.csv",
    ):
        assert (folder / name).read_bytes() == (serial / name).read_bytes(), name
    again = posbench("resume", str(folder), "--shard=0/3", verb=True)
    assert again.status == 0 and not (folder / ".parts").exists()


def test_a_part_before_the_search_is_refused(
    posbench: Callable[..., Result], outputs: Path, tmp_path: Path
) -> None:
    """Its constants are the model file's; a shard searches first, and then a part can be made."""
    args = [
        *SMALL,
        "stages=[search,evaluate]",
        "search.strings=6",
        "task.calibration_examples=6",
    ]
    serial = tmp_path / "serial"
    assert posbench(*args, f"runtime.outputs={serial}", verb=True).status == 0
    folder = make_run_folder(config_of(*args, f"runtime.outputs={outputs}"), "posbench")
    early = posbench("resume", str(folder), "--part=0/2", verb=True)
    assert early.status == 2
    assert_refused(
        early.err, "--part", "0/2", allowed="search", hint=("resume", "--shard=0/2")
    )
    assert posbench("resume", str(folder), "--shard=0/2", verb=True).status == 0
    assert posbench("resume", str(folder), "--part=1/2", verb=True).status == 0
    assert posbench(*args).status == 0
    (finished,) = run_folders(serial)
    for name in ("predictions.jsonl", "metrics.csv"):
        assert (folder / name).read_bytes() == (finished / name).read_bytes(), name
    late = posbench("resume", str(folder), "--part=0/2", verb=True)
    assert late.status == 0 and not (folder / ".parts").exists()


@pytest.mark.parametrize("then", ["shard", "plain"])
def test_rows_of_a_shard_that_read_another_file_are_not_merged(
    then: str,
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file that changed while a shard was made, and changed back."""
    data = tmp_path / "data.jsonl"
    write_key_values(data, seed=1)
    original = data.read_text()
    args = [*SMALL, f"task.path={data}", "task.pairs=12", "task.positions=[0,11]"]
    serial = tmp_path / "serial"
    assert posbench(*args, f"runtime.outputs={serial}", verb=True).status == 0
    folder = make_run_folder(config_of(*args, f"runtime.outputs={outputs}"), "posbench")
    with monkeypatch.context() as patch:
        read = sharing.run_contents

        def read_before_a_change(config: Config) -> list[Content]:
            contents = read(config)
            write_key_values(data, seed=2)
            return contents

        patch.setattr(sharing, "run_contents", read_before_a_change)
        mixed = posbench("resume", str(folder), "--shard=0/2", verb=True)
        assert mixed.status == 2
        assert_refused(mixed.err, "task.path", str(data))
    data.write_text(original)
    if then == "shard":
        for number in (1, 0):
            shard = posbench("resume", str(folder), f"--shard={number}/2", verb=True)
            assert shard.status == 0, shard.err
    else:
        plain = posbench(*args)
        assert plain.status == 0, plain.err
    (finished,) = run_folders(serial)
    for name in ("predictions.jsonl", "metrics.csv"):
        assert (folder / name).read_bytes() == (finished / name).read_bytes(), name


def test_states_are_those_of_the_folders(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    folder = make_run_folder(
        config_of(*SMALL, f"runtime.outputs={outputs}"), "posbench"
    )
    one = Submission(
        "a", "slurm", ("task.limit=4",), True, None, jobs="a", first=1, shards=2
    )
    jobs.record_submission(folder, one)
    assert jobs.submissions(folder) == [one]
    state, note = jobs.run_state(folder, {("a", 2)})
    assert state == "waiting"
    assert_names(note, "0 of 2", "shards")
    assert jobs.run_state(folder, {("a", 0), ("a", 3), ("b", 1)})[0] == "lost"
    assert jobs.run_state(folder, None)[0] == "unknown"
    with owning(folder):
        assert jobs.run_state(folder, set())[0] == "running"
    with owning(folder / ".parts" / "0-of-2"):
        (folder / ".parts" / "0-of-2").mkdir()
        assert jobs.run_state(folder, set())[0] == "running"
    logs = one.logs(folder)
    logs.mkdir(parents=True)
    for number, text in {
        0: "another run's",
        1: "posbench: no memory\n",
        2: "started\n\n",
    }.items():
        (logs / f"77_{number}_0_log.err").write_text(text)
        os.utime(logs / f"77_{number}_0_log.err", (time.time() - number,) * 2)
    RunDir(folder, open_run_dir(folder).id).finish("failed", "MachineError: no memory")
    state, note = jobs.run_state(folder, set())
    assert state == "failed"
    assert_names(note, "0 of 2", "shards", "no memory")
    told = posbench("jobs", str(outputs), "--json", verb=True)
    assert told.status == 1 and json.loads(told.out)[0]["said"].endswith(
        "made; posbench: no memory"
    )
    jobs.record_submission(
        folder,
        Submission(
            "b",
            "local",
            (),
            False,
            None,
            jobs="b",
            first=0,
            pids=((os.getpid(), process_start(os.getpid())),),
        ),
    )
    assert jobs.run_state(folder, set())[0] == "waiting" and [
        s.id for s in jobs.submissions(folder)
    ] == [
        "a",
        "b",
    ]
    unknown = posbench("collect", "--json", verb=True)
    assert unknown.status == 2
    missing = posbench("collect", str(folder), verb=True)
    assert missing.status == 1
    assert_line_names(missing.err, "0 of 1", "runs")


def test_a_run_that_may_wait_is_not_sent_twice(
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is it lost while a job of an earlier submission waits."""
    folder = make_run_folder(
        config_of(*SMALL, f"runtime.outputs={outputs}"), "posbench"
    )
    for name in ("a", "b"):
        sent = Submission(name, "slurm", (), False, None, jobs=name, first=0)
        jobs.record_submission(folder, sent)
    assert jobs.run_state(folder, {("a", 0)})[0] == "waiting"
    assert jobs.run_state(folder, set())[0] == "lost"
    (tmp_path / "squeue").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    told = posbench("submit", *SMALL, "runtime/cluster=slurm")
    assert told.status == 2
    assert_refused(told.err, "squeue", "no answer", allowed="1 run", hint="repeat")
    assert [entry.id for entry in jobs.submissions(folder)] == ["a", "b"]


def test_settings_that_are_one_run_are_sent_once_and_collected(
    posbench: Callable[..., Result], outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Path] = []
    monkeypatch.setattr(
        "posbench.cli.submit._submit_jobs",
        lambda cluster, name, entries: sent.extend(folder for folder, _ in entries),
    )
    sweep = ["-m", *SMALL, "method.factor=0,0.5", "runtime.log_every=10,20"]
    told = posbench("submit", *sweep, LOCAL)
    assert told.status == 0 and sorted(sent) == run_folders(outputs)
    assert_line_names(told.err, "4 settings", "2 runs")
    ran = posbench(*sweep)
    assert ran.status == 0
    assert_line_names(ran.out, "4 settings", "2 runs")
    (made,) = outputs.rglob("summary.csv")
    shutil.rmtree(made.parent)
    collected = posbench("collect", str(outputs), verb=True)
    assert collected.status == 0
    assert_line_names(collected.err, "2 of 2", "runs")
    table = pd.read_csv(made)
    assert table["run"].nunique() == table["method.factor"].nunique() == 2
    assert "runtime.log_every" not in table
    shutil.rmtree(sent[1])
    lacking = posbench("collect", str(outputs), verb=True)
    assert lacking.status == 1
    assert_line_names(lacking.err, "1 of 2", "runs", "posbench submit")
    one = posbench("collect", str(sent[0]), verb=True)
    assert one.status == 0 and "1 of 2" not in one.err


def test_a_machine_without_hangups_submits(
    posbench: Callable[..., Result], outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitit = pytest.importorskip("submitit", reason="needs positionbench[cluster]")
    asked: list[Path] = []

    def refuse(logs: Path, **_: object) -> None:
        asked.append(logs)
        raise RuntimeError("no room")

    monkeypatch.setattr(submitit, "AutoExecutor", refuse)
    monkeypatch.delattr(signal, "SIGHUP", raising=False)  # as on Windows
    told = posbench("submit", *SMALL, LOCAL)
    assert asked and told.status == 2
    assert_refused(told.err, "runtime/cluster", "local", allowed="no room")


@pytest.mark.slow
def test_processes_of_this_machine(
    posbench: Callable[..., Result], outputs: Path, tmp_path: Path
) -> None:
    args = ["-m", *SMALL, "method.factor=1,0"]
    assert (
        posbench(*args, f"runtime.outputs={tmp_path / 'serial'}", verb=True).status == 0
    )
    command = [
        *PROCESS,
        "submit",
        *args,
        LOCAL,
        "--shards",
        "2",
        f"runtime.outputs={outputs}",
    ]
    sent = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sent.stdout.count("\tsubmitted\t") == 2, sent
    early = posbench("jobs", str(outputs), verb=True).out
    assert {"waiting", "running"} & set(early.split()), (
        "its jobs have no part in the pipe that it ends"
    )
    twice = posbench("submit", *args, LOCAL)
    assert twice.status == 0 and "\tsubmitted\t" not in twice.out, (
        "they wait, run, or are done"
    )
    for _ in range(120):
        if not {"waiting", "running"} & set(
            posbench("jobs", str(outputs), verb=True).out.split()
        ):
            break
        time.sleep(1)
    told = posbench("collect", str(outputs), verb=True)
    assert told.status == 0, told
    assert_line_names(told.err, "2 of 2", "runs")
    for one in (tmp_path / "serial").rglob("*.csv"):
        if not one.parent.name.startswith("sweep__"):
            assert (
                outputs / one.relative_to(tmp_path / "serial")
            ).read_bytes() == one.read_bytes()
    (summary,), (same) = (
        (tmp_path / "serial").rglob("summary.csv"),
        [*outputs.rglob("summary.csv")],
    )
    assert [file.read_bytes() for file in same] == [summary.read_bytes()]
