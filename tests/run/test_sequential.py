"""The rule that ends the rounds of questions: which examples belong together, and what a run does with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from posbench.run.folder import open_run_dir
from posbench.run.sequential import tuples_of_examples
from posbench.stats.sequential import curve_intervals
from posbench.tasks import Example
from tests.conftest import Result, run_folders
from tests.messages import assert_refused

POSBENCH = Callable[..., Result]
EVALUATE = ["stages=[evaluate,report]", "method=none"]
DECIDE = ["runtime.round_questions=10", "runtime.until=decided"]


def example(name: str, position: int | None, cluster: str = "") -> Example:
    return Example(
        id=name, prompt="?", answers=("!",), gold_position=position, cluster=cluster
    )


def test_the_nth_examples_of_all_positions_belong_together() -> None:
    examples = [example(f"{p}-{n}", p) for p in (4, 0, 2) for n in range(3)]
    assert tuples_of_examples(examples) == [
        [f"{p}-{n}" for p in (0, 2, 4)] for n in range(3)
    ]
    # What is not at every position yet counts when it is.
    assert len(tuples_of_examples(examples[:-1])) == 2
    assert tuples_of_examples(examples[:6]) == []


def test_tuples_that_share_a_question_are_none() -> None:
    aligned = [example(f"{p}{c}", p, cluster=c) for p in range(3) for c in "ab"]
    assert tuples_of_examples(aligned) == [["0a", "1a", "2a"], ["0b", "1b", "2b"]]
    crossed = [example("0b", 0, "b"), example("0a", 0, "a"), *aligned[2:]]
    assert tuples_of_examples(crossed) == []


def intervals_of(folder: Path) -> pd.DataFrame:
    """The contrasts of the positions in metrics.csv of a run."""
    metrics = pd.read_csv(folder / "metrics.csv")
    return metrics[metrics["metric"] == "position_contrast"]


def test_a_run_stops_when_the_shape_is_decided(
    posbench: POSBENCH, outputs: Path
) -> None:
    assert posbench(*EVALUATE, *DECIDE).status == 0
    (folder,) = run_folders(outputs)
    out = open_run_dir(folder)
    stage = out.stage("evaluate")
    asked, planned = stage["stopped"]
    assert stage["decided"] and asked % 10 == 0 and 20 <= asked < planned == 100
    rows = out.rows("predictions.jsonl")
    counts = pd.DataFrame(rows)["gold_position"].value_counts()
    assert set(counts) == {asked}
    # The intervals of the shape hold although the answers decided when it stopped.
    stopped = intervals_of(folder)
    assert (stopped["n"] == asked).all()
    scores = np.array(
        [
            [row["scores"]["accuracy"] for row in rows if row["gold_position"] == p]
            for p in sorted(counts.index)
        ]
    ).T
    expected = curve_intervals(scores)
    np.testing.assert_allclose(
        stopped[["value", "ci_low", "ci_high"]],
        [e[:3] for e in expected.contrasts],
        atol=1e-6,
    )

    # The same command shows it; without the rule the run goes on, and keeps these rows.
    repeated = posbench(*EVALUATE, *DECIDE)
    assert "nothing is computed again" in repeated.out
    assert "stopped when the shape was decided" in repeated.out
    assert posbench(*EVALUATE, DECIDE[0]).status == 0
    assert run_folders(outputs) == [folder]
    all_rows = {
        row["id"]: row for row in open_run_dir(folder).rows("predictions.jsonl")
    }
    assert len(all_rows) == 9 * 100
    assert all(all_rows[row["id"]]["output"] == row["output"] for row in rows)
    complete = intervals_of(folder)
    assert (complete["n"] == 100).all()
    # A number of questions that was chosen beforehand has narrower ones.
    assert (complete["ci_high"] - complete["ci_low"]).max() < 0.3


def test_a_sweep_stops_each_job_as_it_stops_alone(
    posbench: POSBENCH, outputs: Path
) -> None:
    assert posbench("-m", *EVALUATE, *DECIDE, "task.seed=0,1").status == 0
    for folder in run_folders(outputs):
        asked, planned = open_run_dir(folder).stage("evaluate")["stopped"]
        assert asked < planned == 100


def test_several_processes_cannot_tell_when_it_is_decided(posbench: POSBENCH) -> None:
    result = posbench(*EVALUATE, *DECIDE, "runtime.workers=2")
    assert_refused(result.err, "runtime.until", "decided", hint="runtime.workers=1")


def test_without_rounds_there_is_nothing_to_stop_between(posbench: POSBENCH) -> None:
    assert_refused(posbench(*EVALUATE, DECIDE[1]).err, "runtime.until")
