"""What the throughput study compares is the same work: it refuses to give a ratio when one output differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from posbench.run.runtime import Runtime
from posbench.studies.cost import throughput
from tests.conftest import Result, run_folders


def test_both_ways_give_the_same_outputs(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    study = throughput.Throughput(examples=7, new_tokens=3, repeats=1)
    rows = study.replied(tiny, 8, Runtime())
    assert [row["way"] for row in rows] == ["one prompt at a time", "evaluate stage"] * 2
    assert "7 prompts" in rows[0]["work"] and "4 choices" in rows[2]["work"]
    replies = throughput.replies

    def wrong(*args: Any) -> list[dict[str, Any]]:
        rows = replies(*args)
        return [{**rows[0], "output": "?"}, *rows[1:]]

    monkeypatch.setattr(throughput, "replies", wrong)
    with pytest.raises(RuntimeError, match="evaluate stage gives other results"):
        study.replied(tiny, 8, Runtime())


def test_the_command(posbench: Callable[..., Result], outputs: Path) -> None:
    small = ["study.pairs=[8]", "study.examples=2", "study.new_tokens=1", "study.repeats=1"]
    result = posbench("study=throughput", *small)
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    works = pd.read_csv(folder / "throughput.csv")["work"]
    assert works.str.split(":").str[0].unique().tolist() == ["tiny", "small"] and len(works) == 8
