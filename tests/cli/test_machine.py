"""What the machine does to a run: full disks, permissions, memory, signals, other processes."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from posbench.run import claim
from posbench.run.folder import RunDir, open_run_dir, open_undamaged
from tests.conftest import Result, config_of, run_folders
from tests.messages import assert_names, assert_refused

ROLLOUT = [
    "study=rollout",
    "study.prompts=2",
    "study.tokens=24",
    "study.parts=3",
    "stages=[study]",
]


def fault(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/full/rows")


STOPS = {
    "disk full": (fault(errno.ENOSPC), 3, "No space left on device"),
    "quota": (fault(errno.EDQUOT), 3, "file = '/full/rows'"),
    "no permission": (
        PermissionError(errno.EACCES, "Permission denied"),
        3,
        "Permission denied",
    ),
    "memory": (MemoryError("of an array"), 3, "memory = 'of an array'"),
    "SIGTERM": (None, 143, "stopped; the same command resumes"),
}


@pytest.mark.parametrize("stop", STOPS)
def test_it_is_one_line_and_the_same_command_resumes(
    stop: str,
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error, status, text = STOPS[stop]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def stops(*_: object) -> None:
        if error:
            raise error
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "append", stops)
        told = posbench(*ROLLOUT)
    assert told.status == status and told.err.count("\n") == 1 and text in told.err, (
        told.err
    )
    (folder,) = run_folders(outputs)
    # Whoever stops a run finds it killed: nobody makes it, and it has not ended.
    state = "running" if status in (130, 143) else "failed"
    assert open_run_dir(folder).status()["state"] == state
    assert not list(scratch.glob("posbench-*"))
    if stop == "SIGTERM":
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert posbench(*ROLLOUT).status == 0
        assert open_undamaged(folder).done


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_names_the_file(
    posbench: Callable[..., Result], outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert posbench(*ROLLOUT).status == 0
    (folder,) = run_folders(outputs)
    (folder / "DONE").unlink()
    (rows,) = folder.glob("*.jsonl")
    status = folder / "status.json"
    # What is written to this device meets a full disk.
    rows.unlink()
    rows.symlink_to("/dev/full")
    with pytest.raises(OSError) as caught:
        RunDir(folder).append(rows.name, [{"a": 1}])
    assert caught.value.filename == str(rows)
    rows.unlink()
    whole = os.fsync

    def full(number: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{number}")).name.startswith(".status"):
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(number)

    monkeypatch.setattr(os, "fsync", full)
    result = posbench(*ROLLOUT)
    assert result.status == 3 and result.err.count("\n") == 1
    assert_refused(result.err, "file", str(status), allowed="written", hint="free")


def test_a_finished_run_is_shown_where_nothing_can_be_written(
    posbench: Callable[..., Result], outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert posbench(*ROLLOUT).status == 0
    (folder,) = run_folders(outputs)
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(claim.Lease, "take", read_only)
    shown = posbench(*ROLLOUT)
    assert shown.status == 0 and "finished before" in shown.out and not shown.err
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before
    refused = posbench(*ROLLOUT, "study.tokens=25")
    assert (
        refused.status == 3
        and refused.err.count("\n") == 1
        and "runtime.outputs" in refused.err
    )
    monkeypatch.undo()
    (outputs.parent / "file").write_text("")
    assert (
        posbench(
            *ROLLOUT, f"runtime.outputs={outputs.parent / 'file'}", verb=True
        ).status
        == 2
    )


def test_names_are_no_markup(posbench: Callable[..., Result], tmp_path: Path) -> None:
    folder = tmp_path / "x[/y]z a[b]c :apple:"
    args = [*ROLLOUT, f"runtime.outputs='{folder}'"]
    first = posbench(*args, verb=True)
    again = posbench(*args, verb=True)
    for shown in (first, again):
        assert shown.status == 0 and f"run: {folder}" in shown.out.replace("\n", ""), (
            shown
        )


SMALL = [
    "task.limit=4",
    "task.positions=[0%,50%,100%]",
    "runtime.batch_tokens=512",
    "runtime.intervene_examples=2",
    "runtime.resamples=100",
]


def test_a_run_that_goes_on_on_another_processor_says_so(
    posbench: Callable[..., Result], outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert posbench(*SMALL, "stages=[intervene]").status == 0
    (folder,) = run_folders(outputs)
    (first,) = open_run_dir(folder).hardware()
    with monkeypatch.context() as patch:
        patch.setattr(
            "posbench.pipeline.identity.describe_hardware", lambda: "another machine"
        )
        again = posbench(*SMALL, "stages=[intervene]")
        assert again.status == 0 and open_run_dir(folder).hardware() == [first], (
            "nothing was computed there"
        )
        drawn = posbench(*SMALL, "stages=[intervene,report]")
        assert drawn.status == 0 and open_run_dir(folder).hardware() == [first], (
            "a page is no row"
        )
        more = posbench(*SMALL, "stages=[intervene,evaluate,report]")
    assert more.status == 0
    assert f"begun on {first}" in more.out and "another machine" in more.out
    assert open_run_dir(folder).facts("provenance.json")["other_hardware"] == [
        "another machine"
    ]
    assert open_undamaged(folder).done
    page = (folder / "report.html").read_text()
    assert_names(page, "another machine", "several machines")


def test_shards_of_several_machines_are_named(
    posbench: Callable[..., Result], outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posbench.pipeline.execute import make_run_folder

    command = [*SMALL, "stages=[evaluate]", f"runtime.outputs={outputs}"]
    folder = make_run_folder(config_of(*command), "posbench")
    assert open_run_dir(folder).hardware() == [], "who prepares a folder makes no row"
    for number, machine in enumerate(("one", "other")):
        with monkeypatch.context() as patch:
            patch.setattr(
                "posbench.pipeline.sharing.describe_hardware",
                lambda machine=machine: machine,
            )
            part = posbench("resume", str(folder), f"--part={number}/2", verb=True)
            assert part.status == 0, part.err
    with monkeypatch.context() as patch:
        patch.setattr("posbench.pipeline.identity.describe_hardware", lambda: "one")
        assert posbench(*SMALL, "stages=[evaluate]").status == 0
    assert open_run_dir(folder).hardware() == ["one", "other"]
