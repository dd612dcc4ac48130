"""Submitted runs on a real Slurm of two nodes, one of them with a /tmp of its own: whatever is killed when,
the tables are those of one process. Run with ``-m cluster``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from posbench.pipeline import jobs
from posbench.run.folder import open_run_dir
from posbench.run.lease import in_use
from tests.cluster.slurm import Slurm, missing
from tests.conftest import PROCESS, Result, run_folders

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        bool(missing()), reason=f"Slurm is not here: {', '.join(missing())}"
    ),
]
SMALL = [
    "stages=[evaluate,report]",
    "runtime.batch_tokens=1024",
    "runtime.resamples=100",
]
CLUSTER = ["runtime/cluster=slurm", "runtime.cluster.minutes=10"]
FACTORS = "method.factor=1,0.75,0.5,0.25,0,-0.25,-0.5,-0.75,-1,-1.25,-1.5,-2"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """The cluster; what both nodes see lies under /var/tmp."""
    place = Path(tempfile.mkdtemp(prefix="posbench-slurm-", dir="/var/tmp"))
    found = Slurm(place)
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    try:
        found.start()
        yield found
        local = Path(f"/proc/{found.daemons['n2'].pid}/root/tmp")
        assert not [file for file in local.iterdir() if "torch" not in file.name], (
            "nothing stays on a node"
        )
    finally:
        found.stop()
        shutil.rmtree(place)


@pytest.fixture
def shared(slurm: Slurm) -> Iterator[Path]:
    """A folder that both nodes see."""
    subprocess.run(["scancel", "--user=root"], check=True)  # what a failed test left
    slurm.wait_idle()
    found = Path(tempfile.mkdtemp(prefix="runs-", dir=slurm.place))
    yield found


def settled(
    posbench: Callable[..., Result], outputs: Path, shown: list[str]
) -> Counter[str]:
    """Wait until nothing waits or runs; how many runs stand how."""
    for _ in range(600):
        told = posbench("jobs", str(outputs), "--json", verb=True)
        states = Counter(row["state"] for row in json.loads(told.out))
        if not shown or shown[-1] != str(dict(states)):
            shown.append(str(dict(states)))
        if not states["waiting"] + states["running"]:
            assert told.status == int(set(states) != {"done"})
            return states
        time.sleep(1)
    raise AssertionError(f"jobs do not end: {told.out}")


def need_same(outputs: Path, serial: Path) -> int:
    """Compare rows and tables of all runs, and of the sweep, byte by byte; how many files."""
    names = {
        f.relative_to(serial): f for s in ("*.csv", "*.jsonl") for f in serial.rglob(s)
    }
    names = {
        name: file
        for name, file in names.items()
        if not name.parts[2].startswith("sweep__")
    }
    for name, file in names.items():
        assert (outputs / name).read_bytes() == file.read_bytes(), name
    assert {f.name for f in run_folders(outputs)} == {
        f.name for f in run_folders(serial)
    }
    for out in run_folders(outputs):
        assert open_run_dir(out).done and not open_run_dir(out).damaged()
        rows = open_run_dir(out).rows("predictions.jsonl")
        assert len({(row["method"], row["id"]) for row in rows}) == len(rows), (
            "no row twice"
        )
    for one in serial.glob("*/v*/sweep__*"):
        (same,) = outputs.glob("*/v*/sweep__*")
        for table in one.glob("*.csv"):
            assert (same / table.name).read_bytes() == table.read_bytes(), table.name
    return len(names)


def running(name: str) -> list[str]:
    """Ids of the jobs of a name that run."""
    ask = ["squeue", "-h", "--array", "-t", "R", f"--name={name}", "-o", "%i"]
    return subprocess.run(
        ask, capture_output=True, text=True, check=True
    ).stdout.split()


def one_is_at_work(outputs: Path, rows: str) -> Path:
    """The first file of rows that a job has begun."""
    for _ in range(600):
        if found := sorted(outputs.glob(rows)):
            return found[0]
        time.sleep(0.1)
    raise AssertionError(f"nothing at {rows}")


def sent(outputs: Path) -> str:
    """The id of the last submission."""
    return jobs.submissions(run_folders(outputs)[0])[-1].id


def test_a_sweep_of_twelve_runs_some_requeued_or_preempted(
    posbench: Callable[..., Result],
    shared: Path,
    slurm: Slurm,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = ["-m", FACTORS, *SMALL, "task.limit=20"]
    outputs = shared / "outputs"
    shown = list[str]()
    assert posbench(*args, f"runtime.outputs={tmp_path}", verb=True).status == 0
    asked = posbench("submit", *args, *CLUSTER, f"runtime.outputs={outputs}", verb=True)
    assert (
        asked.status == 0
        and asked.out.count("\tsubmitted\t") == 12
        and "posbench collect" in asked.err
    ), asked
    early = posbench("collect", str(outputs), verb=True)
    assert early.status == 1 and "of 12 runs done" in early.err
    rows = one_is_at_work(outputs, "*/v*/*/predictions.jsonl")
    subprocess.run(["scontrol", "requeue", running(sent(outputs))[0]], check=True)
    while not (
        now := [
            run for run in run_folders(outputs) if run != rows.parent and in_use(run)
        ]
    ):
        time.sleep(0.1)
    number = jobs.submissions(now[0])[-1].first
    for job in running(
        sent(outputs)
    ):  # as Slurm says that a job is preempted, or that its time is nearly up
        if job.endswith(f"_{number}"):
            # One that ends just now cannot be told.
            subprocess.run(["scancel", "--signal=USR2", job], check=False)
    assert settled(posbench, outputs, shown) == {"done": 12}
    told = posbench("collect", str(outputs), verb=True)
    assert (
        told.status == 0 and "12 of 12 runs done" in told.err and "sweep:" in told.out
    ), told
    files = need_same(outputs, tmp_path)
    with capsys.disabled():
        print(
            f"\nsweep of 12, requeued at {rows.parent.name}, {now[0].name} preempted: {'; '.join(shown)}"
        )
        print(f"{files} files the same")


def test_a_sharded_run_of_900_prompts_whatever_is_killed(
    posbench: Callable[..., Result],
    shared: Path,
    slurm: Slurm,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The submitter, a worker and a node daemon by kill -9, and a job by scontrol requeue."""
    args = [*SMALL, "task.limit=100"]
    outputs = shared / "outputs"
    shown = list[str]()
    assert posbench(*args, f"runtime.outputs={tmp_path}", verb=True).status == 0
    command = ["submit", *args, *CLUSTER, "--shards", "6", f"runtime.outputs={outputs}"]
    submitter = subprocess.Popen(
        [*PROCESS, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not subprocess.run(
        ["squeue", "-h"], capture_output=True, check=True
    ).stdout.strip():
        assert submitter.poll() is None
    submitter.kill()
    submitter.wait()
    shown.append("submitter killed")
    if (
        len([*outputs.glob(".jobs/*/*_submitted.pkl")]) < 6
    ):  # it died before the jobs had all that they need
        assert settled(posbench, outputs, shown)["lost"] == 1
        assert posbench(*command, verb=True).status == 0
    part = one_is_at_work(outputs, "*/v*/*/.parts/*/predictions.jsonl").parent
    locks = sorted((part.parent / ".locks" / f"{part.name}.lock").glob("lock.*"))
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(json.loads(locks[-1].read_text())[1]), signal.SIGKILL)
        shown.append(f"worker of {part.name} killed")
    number = part.name.split("-")[0]
    while not (
        found := [
            job for job in running(sent(outputs)) if not job.endswith(f"_{number}")
        ]
    ):
        time.sleep(0.1)
    subprocess.run(["scontrol", "requeue", found[0]], check=True)
    shown.append(f"{found[0]} requeued")
    slurm.daemons["n2"].kill()
    slurm.daemons["n2"].wait()
    shown.append("slurmd of n2 killed")
    time.sleep(25)  # until the node is taken to be down, and its job goes elsewhere
    slurm.start_node("n2")
    states = settled(posbench, outputs, shown)
    assert (
        sum(states.values()) == 1
        and states["done"] + states["lost"] + states["failed"] == 1
    )
    if not states["done"]:
        assert posbench(*command, verb=True).status == 0
        shown.append("submitted again")
        assert settled(posbench, outputs, shown) == {"done": 1}
    told = posbench("collect", str(outputs), verb=True)
    assert told.status == 0 and "1 of 1 runs done" in told.err
    (folder,) = run_folders(outputs)
    assert len(open_run_dir(folder).rows("predictions.jsonl")) == 2 * 900
    files = need_same(outputs, tmp_path)
    with capsys.disabled():
        print(f"\n900 prompts in 6 shards: {'; '.join(shown)}; {files} files the same")


def test_hydras_launcher(
    posbench: Callable[..., Result], shared: Path, tmp_path: Path
) -> None:
    args = ["-m", "method.factor=1,0,-1", *SMALL, "task.limit=4"]
    assert posbench(*args, f"runtime.outputs={tmp_path}", verb=True).status == 0
    launcher = [
        "hydra/launcher=submitit_slurm",
        f"runtime.outputs={shared / 'outputs'}",
    ]
    told = posbench(*args, *launcher, verb=True)
    assert told.status == 0, told
    assert (
        need_same(shared / "outputs", tmp_path) == 2 * 3
        and not (shared / "outputs/.sweeps").exists()
    )


def test_what_fails_is_listed_with_its_last_line(
    posbench: Callable[..., Result], shared: Path
) -> None:
    outputs = shared / "outputs"
    shown = list[str]()
    args = ["method=none", *SMALL, "task.limit=4", f"runtime.outputs={outputs}"]
    setup = "runtime.cluster.setup=['echo no such module >&2','exit 7']"
    assert posbench("submit", *args, *CLUSTER, setup, verb=True).status == 0
    assert settled(posbench, outputs, shown) == {"lost": 1}
    told = posbench("collect", str(outputs), verb=True)
    assert told.status == 1 and "lost (no such module)" in told.err, told
    assert posbench("submit", *args, *CLUSTER, verb=True).status == 0
    assert settled(posbench, outputs, shown) == {"done": 1}
    refused = posbench(
        "submit",
        *args,
        *CLUSTER,
        "runtime.cluster.partition=none",
        "task.seed=5",
        verb=True,
    )
    assert refused.status == 2 and "invalid partition" in refused.err.lower(), refused
