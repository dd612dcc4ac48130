"""Rows that several processes make: the bytes of one process, whoever is killed when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from posbench.run.folder import open_run_dir
from tests.conftest import PROCESS, Result, run_folders
from tests.messages import assert_line_names

RUN = [
    "stages=[intervene,evaluate]",
    "task.limit=6",
    "runtime.batch_tokens=512",
    "runtime.resamples=100",
]
RUN += ["runtime.intervene_examples=3"]
FILES = "attention.jsonl", "attention.csv", "predictions.jsonl", "metrics.csv"


def left(outputs: Path) -> dict[str, bytes]:
    """The rows and tables of the one run; nothing else of the parts may stay."""
    (folder,) = run_folders(outputs)
    assert (
        open_run_dir(folder).done
        and not open_run_dir(folder).damaged()
        and not (folder / ".parts").exists()
    )
    return {name: (folder / name).read_bytes() for name in FILES}


def test_two_workers_leave_the_bytes_of_one(
    posbench: Callable[..., Result], tmp_path: Path
) -> None:
    one = tmp_path / "one"
    two = tmp_path / "two"
    assert posbench(*RUN, f"runtime.outputs={one}", verb=True).status == 0
    made = posbench(*RUN, "runtime.workers=2", f"runtime.outputs={two}", verb=True)
    assert made.status == 0 and "ended with status" not in made.out, made
    assert left(two) == left(one)
    spent = [
        open_run_dir(run_folders(out)[0]).status()["spent"]["evaluate"]
        for out in (one, two)
    ]
    assert spent[0]["prompt_tokens"] == spent[1]["prompt_tokens"], (
        "no prompt was read by both"
    )


def owner(part: Path) -> int:
    """The process that owns a part, once it has made a row."""
    for _ in range(600):
        locks = [*(part.parent / ".locks" / f"{part.name}.lock").glob("lock.*")]
        if locks and any((part / name).is_file() for name in FILES):
            return int(json.loads(max(locks).read_text())[1])
        time.sleep(0.05)
    raise AssertionError(f"nobody made {part}")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "parent"])
def test_killed_at_work(
    victim: str, posbench: Callable[..., Result], tmp_path: Path
) -> None:
    more = [*RUN, "task.limit=40"]
    one = tmp_path / "one"
    two = tmp_path / "two"
    assert posbench(*more, f"runtime.outputs={one}", verb=True).status == 0
    command = [*PROCESS, *more, "runtime.workers=2", f"runtime.outputs={two}"]
    # As a shell starts it in the background, where signals from the terminal are not heard.
    deaf = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=deaf
    )
    while not (found := run_folders(two)):
        time.sleep(0.05)
    worker = owner(found[0] / ".parts" / "1-of-2")
    os.kill(worker if victim == "worker" else process.pid, signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    if victim == "parent":
        end = time.monotonic() + 20
        while Path(f"/proc/{worker}").exists() and time.monotonic() < end:
            time.sleep(0.1)
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)
        again = posbench(
            *more, "runtime.workers=2", f"runtime.outputs={two}", verb=True
        )
        assert again.status == 0, again
    else:
        assert process.returncode == 0
        assert_line_names(out, "worker 1", "status -9")
    assert left(two) == left(one)
