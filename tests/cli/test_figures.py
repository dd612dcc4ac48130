"""`posbench figures`: what runs, beside what, what is not run again, and how failures and stops end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from posbench import paths
from posbench.cli import figures
from posbench.errors import choices
from tests.conftest import PROCESS, Result
from tests.messages import assert_line_names, assert_names, assert_refused

SMALL = {"pairs": 4, "positions": [0, 3], "limit": 4}

CHILD = """
import os, signal, sys, time
from pathlib import Path
name = sys.argv[1].removeprefix("experiment=")
root = Path(sys.argv[-1].removeprefix("runtime.outputs=")).parent
with open(root / "order", "a") as out:
    out.write(" ".join(sys.argv[1:-1]) + "\\n")
(root / f"began-{name}").write_text(str(os.getpid()))
"""
"""A process in the place of an experiment's: says that it began; what it does then follows."""

MEET = """
end = time.monotonic() + 60
while len(list(root.glob("began-*"))) < 2 and time.monotonic() < end:
    time.sleep(0.02)
if len(list(root.glob("began-*"))) < 2:
    sys.exit("alone")
"""

FAIL = """
if name == "bad":
    print("posbench: task.path = 'x': allowed: data; next: get it\\nthe sweep goes on")
    sys.exit(3)
if name == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
(root / f"done-{name}").touch()
"""


def _experiment(folder: Path, name: str, study: str = "", **facts: Any) -> None:
    data = {
        "defaults": [
            "config",
            *([{"override study": study}] if study else []),
            "_self_",
        ],
        "experiment": {"name": name, "title": name, **facts},
        "runtime": {"resamples": 100, "device": "cpu"},
    }
    if not study:
        data |= {"task": SMALL, "stages": ["evaluate"]}
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / f"{name}.yaml").write_text(yaml.safe_dump(data))


@pytest.fixture
def call(
    posbench: Callable[..., Result],
    tmp_path: Path,
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Result]:
    """`posbench figures` over experiments of the test's own folder and no others."""
    monkeypatch.setattr(figures, "choices", lambda *folders: choices(folders[-1]))
    given = "--config-dir", str(tmp_path), f"runtime.outputs={outputs}"
    return lambda *args: posbench("figures", *args, *given, verb=True)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Put a process in the place of an experiment's; `done-NAME` in the test's folder is its whole result."""

    def finished(config: Any) -> Path | None:
        mark = tmp_path / f"done-{config.experiment.name}"
        return mark if mark.exists() else None

    def put(script: str) -> None:
        monkeypatch.setattr(figures, "COMMAND", [sys.executable, "-c", CHILD + script])
        monkeypatch.setattr(figures, "find_finished_run", finished)

    return put


def _states(result: Result) -> dict[str, str]:
    """State of every experiment in the table at the end."""
    lines = re.findall(r"^(\w[\w ]*?) {2,}(\w+) ", result.out.split("\n\n")[-1], re.M)
    return {name: state for state, name in lines}


def test_what_is_finished_is_not_run_again(
    posbench: Callable[..., Result],
    call: Callable[..., Result],
    tmp_path: Path,
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _experiment(tmp_path, "one")
    _experiment(tmp_path, "two", grid={"method.factor": [0, 1]})
    for name in ("one", "two"):
        assert posbench(f"experiment={name}", "--config-dir", str(tmp_path)).status == 0
    monkeypatch.setattr(
        figures, "COMMAND", [sys.executable, "-c", "raise SystemExit('ran')"]
    )
    stamps = {p: p.stat().st_mtime_ns for p in outputs.rglob("*") if p.is_file()}
    result = call()
    assert (result.status, result.err) == (0, ""), result.err
    assert _states(result) == {"one": "finished before", "two": "finished before"}
    (run,), (sweep,) = outputs.glob("one/v*/tiny*"), outputs.glob("two/v*/sweep*")
    assert str(run) in result.out and str(sweep) in result.out
    assert f"posbench report {outputs}" in result.out
    assert stamps == {
        p: p.stat().st_mtime_ns for p in outputs.rglob("*") if p.is_file()
    }
    # Other settings are other runs, and what is damaged or was cut short is not done.
    assert _states(call("one", "task.pairs=5")) == {"one": "failed"}
    with open(run / "metrics.csv", "a") as file:
        file.write("\n")
    (sweep / "DONE").unlink()
    result = call()
    assert _states(result) == {"one": "failed", "two": "failed"} and result.status == 1


def test_a_failure_stops_no_other(
    call: Callable[..., Result],
    child: Callable[[str], None],
    tmp_path: Path,
    outputs: Path,
) -> None:
    for name in ("bad", "good"):
        _experiment(tmp_path, name)
    (tmp_path / "experiment" / "wrong.yaml").write_text(
        "defaults: [config, _self_]\nexperiment: {name: wrong}\n"
    )
    _experiment(tmp_path, "killed", minutes=2)
    child(MEET + FAIL)
    result = call("--jobs", "2")
    assert result.status == 3
    assert _states(result) == {
        "bad": "failed",
        "good": "done",
        "killed": "failed",
        "wrong": "refused",
    }
    assert_line_names(result.err, "status 3")
    assert_refused(result.err, "task.path", "x", allowed="data", hint="get it")
    assert result.out.count("experiment.title") == 0  # said once, on stderr
    assert (
        "signal 9" in result.err
        and "experiment.title" in result.err
        and "good" not in result.err
    )
    assert (
        f"posbench experiment=bad --config-dir {tmp_path} runtime.outputs={outputs}"
        in result.err
    )
    assert str(outputs / "figures" / "bad.log") in result.err
    # The next call does what is left, the long one first.
    (tmp_path / "order").unlink()
    child("(root / f'done-{name}').touch()")
    result = call("--jobs", "1")
    assert (
        _states(result)["good"] == "finished before"
        and _states(result)["bad"] == "done"
    )
    lines = [line for line in result.out.splitlines() if line.startswith("figures ")]
    assert [line.split(",")[0] for line in lines] == ["figures 2/2 (100 %)"]
    order = [line.split()[0] for line in (tmp_path / "order").read_text().splitlines()]
    assert order == ["experiment=killed", "experiment=bad"]


def test_an_exit_without_a_result_is_no_success(
    call: Callable[..., Result], child: Callable[[str], None], tmp_path: Path
) -> None:
    _experiment(tmp_path, "one")
    child("print('nothing done')")
    result = call()
    assert (result.status, _states(result)) == (1, {"one": "failed"})
    assert "nothing done" in result.out, "the output of one alone is shown"


def test_a_stop_ends_all_processes(
    call: Callable[..., Result], child: Callable[[str], None], tmp_path: Path
) -> None:
    for name in ("one", "two"):
        _experiment(tmp_path, name)
    child(
        f"{MEET}\nif name == 'two': os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(300)"
    )
    result = call("--jobs", "2")
    assert result.status == 143
    assert_line_names(result.err, "same command", "resumes")
    for name in ("one", "two"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"began-{name}").read_text()), 0)
    child(FAIL)
    assert set(_states(call()).values()) == {"done"}


def test_which_experiments_run(
    call: Callable[..., Result],
    child: Callable[[str], None],
    tmp_path: Path,
    checkpoint: Path,
) -> None:
    _experiment(
        tmp_path,
        "lpes_one",
        paper="lpes",
        grid={"model": ["tiny", "tiny_b"]},
        minutes=2,
    )
    _experiment(tmp_path, "yu_one", paper="yu2025", minutes=5)
    _experiment(tmp_path, "heavy", paper="yu2025", needs_weights=True)
    _experiment(tmp_path, "trained", "synthetic_training", paper="wu2025")
    _experiment(tmp_path, "modelless", "causal_mask", paper="behind_rope")
    child("(root / f'done-{name}').touch()")
    result = call("--jobs", "2")
    assert set(_states(result)) == {"lpes_one", "yu_one", "modelless"}
    assert_line_names(result.out, "left out", "heavy", "weights")
    assert_line_names(result.out, "left out", "trained", "training")
    assert set(_states(call("paper=lpes"))) == {"lpes_one"}
    assert set(_states(call("heavy", "yu_one"))) == {"heavy", "yu_one"}
    for mark in tmp_path.glob("done-*"):
        mark.unlink()
    assert_line_names(call("lpes_one", "yu_one").out, "2 of 2", "about 7 minutes")
    # A model goes to all that look at one, and takes the place of the grid's.
    (tmp_path / "order").unlink()
    for mark in tmp_path.glob("done-*"):
        mark.unlink()
    own_model = "model=hf", f"model.path={checkpoint}", "model.name=mine"
    result = call("lpes_one", *own_model, "method=none")
    assert _states(result) == {"lpes_one": "done"}
    assert "minutes of one core" not in result.out, "they are those of embedded models"
    (tmp_path / "order").unlink()
    (tmp_path / "done-lpes_one").unlink()
    result = call(*own_model, "method=none")
    assert set(_states(result)) == {"lpes_one", "yu_one", "heavy"}
    assert_names(result.out, "1 at")
    assert re.search("left out: modelless .*study causal_mask", result.out)
    assert (
        len(
            re.findall(
                f"model=hf model.path={checkpoint}", (tmp_path / "order").read_text()
            )
        )
        == 3
    )
    assert set(_states(call("model=tiny_b"))) == {"lpes_one", "yu_one"}
    for args, word in {
        ("paper=lpse",): "did you mean lpes?",
        ("yu_on",): "did you mean yu_one?",
        ("experiment=yu_one",): "posbench figures yu_one",
        ("--cfg", "yu_one"): "--cfg",
        ("yu_one", "--jobs", "0"): "--jobs = '0': allowed: a whole number from 1",
        ("model=tinny",): "posbench ls experiments",
        ("paper=wu2025",): "posbench ls experiments",
    }.items():
        result = call(*args)
        assert result.status == 2 and word in result.err, (args, result.err)


def test_it_says_what_to_fetch(
    posbench: Callable[..., Result],
    tmp_path: Path,
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    args = "yu2025_table3", "model=mistral7b"
    result = posbench("figures", *args, f"runtime.outputs={outputs}", verb=True)
    assert result.status == 2 and not outputs.exists()
    text = " ".join(result.out.split())
    for words in (
        "mistralai/Mistral-7B-Instruct-v0.2 missing about 14.5 GB",
        "cais/mmlu",
        "LooGLE",
        "MIT",
    ):
        assert words in text, text
    assert_line_names(
        result.err, "posbench fetch", "experiment=yu2025_table3", "model=mistral7b"
    )
    assert "0 bytes" not in text


def test_sizes_of_the_models_follow_their_names() -> None:
    for file in sorted((paths.CONF / "model").glob("*.yaml")):
        model = yaml.safe_load(file.read_text())
        billions = re.search(
            r"(\d+(?:\.\d+)?)b", str(model["path"]).rpartition("/")[2].lower()
        )
        if billions:
            stored = 4 if model["dtype"] == "float32" else 2
            assert 0.9 < model["gigabytes"] / stored / float(billions[1]) < 1.25, file
        elif not str(model["path"]).startswith(("posbench://", "None")):
            assert model["gigabytes"], file


def test_make_calls_it() -> None:
    root = Path(__file__).parents[2]
    # A make that runs the tests hands its own variables down, ARGS among them.
    own = {
        key: value
        for key, value in os.environ.items()
        if key not in ("MAKEFLAGS", "MAKEOVERRIDES", "ARGS")
    }
    for args, words in {
        ("figures", "PAPER=yu2025"): "posbench figures paper=yu2025",
        ("figures", "MODEL=mistral7b"): "posbench figures model=mistral7b",
        (
            "figure",
            "NAME=yu2025_fig6",
            "MODEL=phi4",
        ): "posbench figures model=phi4 yu2025_fig6",
    }.items():
        made = ["make", "-n", *args]
        told = subprocess.run(
            made, cwd=root, env=own, capture_output=True, text=True, check=True
        )
        assert words in " ".join(told.stdout.split()), told.stdout


@pytest.mark.slow
def test_killed_and_called_again(tmp_path: Path, outputs: Path) -> None:
    """Real processes: stopped in the midst of a run, the next call goes on, the third does nothing."""
    for name in ("one", "two"):
        _experiment(tmp_path, name, grid={"method.factor": [0, 0.5, 1]})
    args = (
        "figures",
        "one",
        "two",
        "--config-dir",
        str(tmp_path),
        f"runtime.outputs={outputs}",
    )
    running = subprocess.Popen(
        [*PROCESS, *args, "--jobs", "2"], stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 300
    while not list(outputs.glob("*/v*/*/predictions.jsonl")) and time.monotonic() < end:
        time.sleep(0.05)
    running.terminate()
    assert_line_names(running.communicate(timeout=60)[1], "same command", "resumes")
    assert running.returncode == 143
    kept = {
        p: p.stat().st_mtime_ns for p in outputs.glob("*/v*/tiny*/predictions.jsonl")
    }
    assert kept
    done = subprocess.run(
        [*PROCESS, *args], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(list(outputs.glob("*/v*/*/DONE"))) == 8
    stamps = {p: p.stat().st_mtime_ns for p in outputs.rglob("*") if p.is_file()}
    again = subprocess.run(
        [*PROCESS, *args], capture_output=True, text=True, check=False
    )
    assert again.returncode == 0 and again.stdout.count("finished before") == 2, (
        again.stderr
    )
    assert stamps == {
        p: p.stat().st_mtime_ns for p in outputs.rglob("*") if p.is_file()
    }


@pytest.mark.skipif(
    sys.platform != "linux", reason="Linux tells a process that its parent is gone"
)
def test_a_process_ends_with_the_one_that_started_it() -> None:
    child = "import os, signal; from posbench.cli import main; "
    child += "main.run = lambda: (print('began', flush=True), signal.pause()); main.run_below(os.getppid())"
    starts = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout and parent.stdout.readline() == "began\n"
    parent.kill()
    # The pipe closes when the last of the two is gone.
    assert parent.communicate(timeout=60)[0] == ""
