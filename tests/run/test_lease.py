"""One holder at a time, on one machine and between several that share a file system."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posbench.errors import MachineError
from posbench.run.folder import RunDir
from posbench.run.lease import LEASE_SECONDS, Lease, in_use, is_held, owning
from tests.messages import refused

NODE = """
set -e
mount --make-rprivate / && mount --bind {shared} /mnt && mount -t tmpfs none /tmp
mkdir {seen} && mount --bind /mnt {seen} && cd {seen}
exec {python} -c '{code}'
"""
"""What starts a process with mounts of its own: a private /tmp, and a name of its own for what is shared."""
WORK = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, "{root}")
from posbench.errors import UserError
from posbench.run.folder import RunDir
from posbench.run.lease import owning
run = RunDir(Path("{seen}/v001/run"))
while len(rows := run.rows("rows.jsonl")) < 40:
    try:
        with owning(run.path):
            for number in range(len(run.rows("rows.jsonl")), 40):
                run.append("rows.jsonl", [{{"number": number, "by": "{seen}"}}])
                print(number, flush=True)
                time.sleep(600 if number == 20 and "{seen}" == "/tmp/one" else 0)
    except UserError as error:
        assert "one process at a time" in str(error)
        print("refused", flush=True)
"""


def _marked(place: Path, *record: object, age: float = 0.0) -> Path:
    """A lock that some process left held, its last renewal so many seconds ago."""
    place.mkdir(parents=True)
    file = place / "lock.7"
    file.write_text(json.dumps(record))
    os.utime(file, (time.time() - age,) * 2)
    return file


def test_taken_free_and_taken_again(tmp_path: Path) -> None:
    one = Lease(tmp_path / "x")
    two = Lease(tmp_path / "x")
    assert (
        not is_held(tmp_path / "x")
        and one.take()
        and is_held(tmp_path / "x")
        and not two.take()
    )
    one.free()
    assert not is_held(tmp_path / "x") and two.take()
    assert [file.name for file in (tmp_path / "x").iterdir()] == ["lock.2"]
    two.free()


def test_the_dead_of_this_machine_are_known_at_once(tmp_path: Path) -> None:
    """Killed, ended but not waited for, and one whose number another process has now."""
    lease = Lease(tmp_path / "mine")
    lease.take()
    machine, pid, start = json.loads(lease.file.read_text())
    lease.free()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    began = stat[19]
    _marked(tmp_path / "runs", machine, child.pid, began)
    assert is_held(tmp_path / "runs") and not Lease(tmp_path / "runs").take()
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_held(tmp_path / "runs"), "it is not waited for yet"
    child.wait()
    taken = Lease(tmp_path / "runs")
    assert taken.take() and taken.file.name == "lock.8"
    taken.free()
    _marked(tmp_path / "reused", machine, pid, str(int(start) - 1))
    assert not is_held(tmp_path / "reused")
    # A machine that tells no start: its age tells.
    for age, held in ((LEASE_SECONDS - 20, True), (LEASE_SECONDS + 20, False)):
        _marked(tmp_path / f"{held}", machine, pid, "", age=age)
        assert is_held(tmp_path / f"{held}") == held


@pytest.mark.parametrize("record", [("another machine", 1, "5"), ()])
def test_of_another_machine_only_silence_tells(
    record: tuple[object, ...], tmp_path: Path
) -> None:
    """Also of one that died as it wrote who it is."""
    alive = _marked(tmp_path / "alive", *record, age=LEASE_SECONDS - 20)
    silent = _marked(tmp_path / "silent", *record, age=LEASE_SECONDS + 20)
    if not record:
        alive.write_text("")
        os.utime(alive, (time.time() - LEASE_SECONDS + 20,) * 2)
    assert is_held(alive.parent) and not Lease(alive.parent).take()
    lease = Lease(silent.parent)
    assert not is_held(silent.parent) and lease.take()
    lease.free()


def test_who_lost_the_lock_writes_no_more(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "v001" / "run")
    run.path.mkdir(parents=True)
    with owning(run.path):
        run.append("rows.jsonl", [{"row": 1}])
        lock = next((tmp_path / "v001/.locks/run.lock").glob("lock.*"))
        (lock.parent / "lock.2").write_text(json.dumps(["another machine", 1, "5"]))
        for write in (
            lambda: run.append("rows.jsonl", [{"row": 2}]),
            lambda: run.finish("done"),
        ):
            with refused(
                "lock", str(lock), allowed="process", hint="120", error=MachineError
            ):
                write()
        assert run.rows("rows.jsonl") == [{"row": 1}] and not run.done
        lock.unlink()
        with refused(
            "lock", str(lock), allowed="process", hint="120", error=MachineError
        ):
            run.write_json("x.json", {})
    assert in_use(run.path), "the other one's lock stays"
    with (
        refused("run folder", str(run.path), allowed="process", hint="wait"),
        owning(run.path),
    ):
        pass


def test_of_many_that_find_one_dead_holder_one_follows(tmp_path: Path) -> None:
    for number in range(4):
        place = tmp_path / str(number)
        _marked(place, "another machine", 1, "5", age=2 * LEASE_SECONDS)
        (ready, go), children = os.pipe(), []
        for _ in range(4):
            if not (child := os.fork()):
                os.close(go)
                os.read(ready, 1)  # until the parent closes its end
                won = Lease(place).take()
                time.sleep(0.15 * won)
                os._exit(won)
            children.append(child)
        os.close(go)
        os.close(ready)
        won = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert sum(won) == 1, won


@pytest.mark.skipif(
    not shutil.which("unshare") or os.geteuid() != 0, reason="needs root and unshare"
)
@pytest.mark.skipif(
    any(
        str(place).startswith("/tmp/")
        for place in (sys.executable, Path(__file__).resolve())
    ),
    reason="a /tmp of its own would hide the checkout",
)
def test_two_machines_with_mounts_of_their_own(tmp_path: Path) -> None:
    """One owns the folder, the other is refused and goes on where that one was killed; no row twice."""
    (tmp_path / "v001/run").mkdir(parents=True)
    nodes = list[subprocess.Popen[str]]()
    for seen in ("/tmp/one", "/tmp/two"):
        code = WORK.format(root=Path(__file__).parents[2], seen=seen).replace("'", '"')
        script = NODE.format(
            shared=tmp_path, seen=seen, python=sys.executable, code=code
        )
        start = ["unshare", "-m", "bash", "-c", script]
        nodes.append(subprocess.Popen(start, stdout=subprocess.PIPE, text=True))
        assert nodes[-1].stdout and nodes[-1].stdout.readline().strip() in (
            "0",
            "refused",
        )
    one, two = nodes
    one.kill()
    one.wait()
    assert two.stdout and two.stdout.read().split()[-1] == "39" and two.wait(60) == 0
    rows = RunDir(tmp_path / "v001/run").rows("rows.jsonl")
    assert [row["number"] for row in rows] == [*range(40)]
    assert {row["by"] for row in rows} == {"/tmp/one", "/tmp/two"}
