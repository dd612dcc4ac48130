"""Keys of earlier releases: read in a run folder, refused anywhere else with the name of today."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posbench.cli.main import main
from posbench.tasks import KVRetrieval, Task
from posbench.tasks.base import read_recorded_task
from posbench.tasks.ceval import CEval
from posbench.tasks.longbench import LongBench
from tests.messages import assert_refused


@pytest.mark.parametrize(
    ("target", "given", "now"),
    [
        (
            "KVRetrieval",
            {"pairs": 5, "examples_per_position": 4, "limit": 2},
            KVRetrieval(pairs=5, limit=2),
        ),
        (
            "KVRetrieval",
            {"pairs": 5, "examples_per_position": 4, "limit": None},
            KVRetrieval(pairs=5, limit=4),
        ),
        ("KVRetrieval", {"pairs": 5, "limit": 3}, KVRetrieval(pairs=5, limit=3)),
        (
            "longbench.LongBench",
            {"tasks": ["lcc"], "limit": 1},
            LongBench(subsets=("lcc",), limit=1),
        ),
        ("ceval.CEval", {"subjects": "all", "limit": None}, CEval()),
    ],
)
def test_a_run_folder_of_an_earlier_release_is_read(
    target: str, given: dict[str, Any], now: Task
) -> None:
    assert read_recorded_task({"_target_": f"posbench.tasks.{target}", **given}) == now


def test_a_model_file_with_an_earlier_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    block = "kv_retrieval:\n  examples_per_position: 3\n"
    (tmp_path / "model" / "mine.yaml").write_text(
        f"path: posbench://tiny\nstages: [search]\n{block}"
    )
    assert main(["validate", "--config-dir", str(tmp_path), "model=mine"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    field = "task.examples_per_position"
    assert_refused(line, field, 3, allowed="task.limit", hint="task.limit=3")
