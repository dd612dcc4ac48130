"""What the throughput study compares is the same work: it refuses to print a ratio when one output
differs."""

from __future__ import annotations

import pytest

import posbench
from posbench.pipeline.stages import evaluate
from posbench.studies.cost import throughput


def test_both_ways_give_the_same_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = posbench.load("tiny")
    rows = throughput.measure(lm, "tiny", pairs=8, count=7, new_tokens=3, repeats=1)
    assert [row[1] for row in rows] == ["one prompt at a time", "evaluate stage"] * 2
    assert "7 prompts" in rows[0][0] and "4 choices" in rows[2][0]
    replies = evaluate.replies

    def wrong(*args: object) -> list[dict[str, object]]:
        rows = replies(*args)  # type: ignore[arg-type]
        return [{**rows[0], "output": "?"}, *rows[1:]]

    monkeypatch.setattr(evaluate, "replies", wrong)
    with pytest.raises(RuntimeError, match="outputs differ"):
        throughput.measure(lm, "tiny", pairs=8, count=7, new_tokens=3, repeats=1)
