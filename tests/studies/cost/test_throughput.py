"""What the throughput study compares is the same work: it refuses to give a ratio when one output differs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from posbench.pipeline.prepare import build_run
from posbench.run import replies as run_replies
from posbench.studies.cost import throughput
from tests.conftest import Result, config_of, run_folders
from tests.messages import assert_refused, refused


def run_of(*overrides: str) -> Any:
    config = config_of("study=throughput", *overrides)
    return build_run(config, Console(quiet=True))


def test_all_ways_give_the_same_outputs(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = throughput.Throughput(examples=7, new_tokens=3, repeats=1)
    run = run_of()
    rows = study.time_replies(run, tiny, 8)
    ways = ["one prompt at a time", "in batches", "in batches, prefills shared"]
    assert [row["way"] for row in rows] == [*ways, throughput.STOCK, *ways]
    assert "7 prompts" in rows[0]["work"] and "4 choices" in rows[4]["work"]
    for row in rows[:4]:
        assert row["over_limit"] == row["seconds"] / rows[3]["seconds"]
    replies = run_replies.reply_to_batch

    def wrong(*args: Any) -> list[dict[str, Any]]:
        rows = replies(*args)
        return [{**rows[0], "output": "?"}, *rows[1:]]

    monkeypatch.setattr(run_replies, "reply_to_batch", wrong)
    with pytest.raises(RuntimeError, match="in batches gives other results"):
        study.time_replies(run, tiny, 8)


def test_prompts_of_the_papers_shapes_differ_in_the_gold_position_alone(
    tiny: Any,
) -> None:
    """Tokens computed, from a count of different beginnings, and what the shapes let one hope for."""
    study = throughput.Throughput(new_tokens=1, repeats=1, tokens=400)
    for shape, factors, least in (("Table 1", 1, 2.5), ("Figure 6", 9, 8)):
        examples = throughput.moved_gold(tiny, 400, 0)
        assert (
            len(
                {
                    frozenset(re.findall('"[a-z]+": "[a-z]+"', e.prompt))
                    for e in examples
                }
            )
            == 1
        )
        (alone, batched, shared, stock, by_hand) = study.time_paper_work(
            run_of(), tiny, shape, 400
        )
        ids = [tiny.encode(e.prompt).ids for e in examples]
        assert (
            alone["tokens_computed"]
            == batched["tokens_computed"]
            == stock["tokens_computed"]
            == alone["tokens_asked"]
        )
        assert alone["tokens_asked"] == (1 + factors) * sum(map(len, ids))
        different = len({tuple(row[:n]) for row in ids for n in range(1, len(row))})
        last = len(ids) * (1 + factors)
        assert different + last <= shared["tokens_computed"] <= 1.15 * different + last
        assert by_hand["tokens_computed"] <= shared["tokens_computed"]
        assert by_hand["over_limit"] == 1
        assert least * shared["tokens_computed"] < shared["tokens_asked"]


def test_the_command(posbench: Callable[..., Result], outputs: Path) -> None:
    small = [
        "study.pairs=[]",
        "study.new_tokens=1",
        "study.repeats=1",
        "study.tokens=64",
        "study.works=[Table 1]",
        "study.candidates=5",
    ]
    result = posbench("study=throughput", *small)
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    rows = pd.read_csv(folder / "throughput.csv")
    is_tiny = rows["work"].str.startswith("tiny")
    assert len(rows[is_tiny]) == 5
    rows = rows[~is_tiny]
    assert rows["work"].str.startswith("small").all()
    assert rows["over_limit"].notna().all()
    is_search = rows["work"].str.contains("channel search, 5 candidates")
    search, rows = rows[is_search], rows[~is_search]
    assert search["way"].tolist() == [throughput.LIMIT, throughput.SHARED]
    assert search["equal"].tolist() == [1, 1], "losses differ"
    assert rows["work"].str.contains(", Table 1: ").all()
    assert rows["way"].tolist() == [
        throughput.ALONE,
        throughput.BATCHED,
        throughput.SHARED,
        throughput.STOCK,
        throughput.LIMIT,
    ]
    assert (rows["tokens_asked"] == rows["tokens_computed"]).tolist() == [
        True,
        True,
        False,
        True,
        False,
    ]


def test_a_study_of_nothing_and_prompts_of_too_many_pairs_are_refused(
    posbench: Callable[..., Result], outputs: Path, tiny: Any
) -> None:
    nothing = ["study.pairs=[]", "study.works=[]", "study.candidates=null"]
    result = posbench("study=throughput", *nothing)
    assert result.status == 2 and not run_folders(outputs)
    assert_refused(result.err, "study.works")
    with refused("study.tokens", 100_000):
        throughput.moved_gold(tiny, 100_000, 0)
    # Each gold pair has another position, and so another prompt.
    examples = throughput.moved_gold(tiny, 3000, 0)
    assert len({example.prompt for example in examples}) == throughput.NUM_POSITIONS
