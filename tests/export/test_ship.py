"""The five commands of docs/ship.md, as they stand there."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import pytest

from tests.conftest import Result, run_folders

PAGE = Path(__file__).parents[2] / "docs" / "ship.md"
SERVE = "from transformers.cli.transformers import main; main()"


@pytest.mark.slow
def test_from_a_checkpoint_to_a_served_fix(
    posbench: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("uvicorn", reason="needs transformers[serving]")
    monkeypatch.chdir(tmp_path)
    block = re.search(
        r"^## From a checkpoint.*?^```\n(.*?)^```", PAGE.read_text(), re.S | re.M
    )
    assert block
    search, export, serve, ask, compare = (
        shlex.split(line, comments=True) for line in block[1].splitlines()
    )
    few = ["task.limit=20", "runtime.resamples=100"]
    outputs = tmp_path / "outputs"
    assert posbench(*search[1:], *few).status == 0
    (run,) = run_folders(outputs)
    named = [str(run) if word == "RUN" else word for word in export[1:]]
    assert posbench(*named, verb=True).status == 0
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, *serve[1:]], stderr=subprocess.DEVNULL
    ) as server:
        try:
            for _ in range(300):
                try:
                    build_opener(ProxyHandler({})).open(
                        "http://localhost:8000/health", timeout=5
                    ).close()
                    break
                except OSError:
                    assert server.poll() is None, "it ended by itself"
                    time.sleep(0.2)
            result = posbench(*ask[1:], *few)
        finally:
            server.kill()
    assert result.status == 0, result.err
    (served,) = set(run_folders(outputs)) - {run}
    result = posbench(
        compare[1], str(run), str(served), verb=True
    )  # by their own names
    assert result.status == 0, result.err
    (file,) = outputs.glob("compare/*/comparison.csv")
    rows = list(csv.DictReader(file.open()))
    assert float(rows[1]["pairs"]) == 180 and float(rows[1]["score_difference"]) == 0
