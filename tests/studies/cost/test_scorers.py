"""The study of the scorers: real outputs score as officially; what differs or is missing is told."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from posbench.studies.cost import scorers as study
from posbench.tasks.longbench import PROMPTS
from tests.conftest import Result, run_folders
from tests.messages import assert_refused

SCORED = Path(__file__).parents[2] / "data" / "scored"
REAL = os.environ.get("POSBENCH_DATA", "")


@pytest.mark.skipif(not REAL, reason="POSBENCH_DATA names no folder")
def test_every_stored_output_scores_as_officially() -> None:
    table = study.compare_with_official(Path(REAL))
    assert table.groupby("benchmark")["outputs"].sum().to_dict() == {
        "longbench": 124,
        "nq_multidoc": 300,
        "leval_closed": 964,
        "loogle_timeline_reorder": 4 * 126,
    }
    assert (table["equal"] == table["outputs"]).all()
    assert table["our_mean"].to_list() == pytest.approx(
        table["official_mean"].to_list(), abs=1e-12
    )


def test_every_output_that_ships_scores_as_officially() -> None:
    table = study.compare_with_official(SCORED)
    assert [(row.benchmark, row.outputs, row.equal) for row in table.itertuples()] == [
        ("nq_multidoc", 300, 300),
        *[("loogle_timeline_reorder", 126, 126)] * 4,
    ]


def _folder(root: Path, score: float) -> Path:
    """Outputs of two tasks, two answers, an exam and an order; one official score as given."""
    for name in PROMPTS:
        file = root / "longbench/scored_predictions" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        row = {
            "_id": "a",
            "pred": "x\ny",
            "answers": ["x"],
            "all_classes": ["x"],
            "official_score": score,
        }
        # Nothing answered is 0 by every score.
        row |= (
            {}
            if name in ("trec", "triviaqa")
            else {"pred": "", "answers": ["Paragraph 1"], "official_score": 0.0}
        )
        file.write_text(json.dumps(row) + "\n")
    (root / "nq_multidoc_qa").mkdir()
    lines = [
        {"answers": ["x"], "model_answer": said, "metric_best_subspan_em": 0.0}
        for said in ("\nx", "y")
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (root / "nq_multidoc_qa/scored_predictions_gpt35_first300.jsonl").write_text(text)
    (root / "leval/scored_predictions").mkdir(parents=True)
    row = {"prediction": "A", "gt": "AB", "official_score": 0.25}
    for exam in ("coursera", "quality", "tpo"):
        for name in (f"turbo-16k-0613_{exam}", f"xgen-7b-8k-inst_{exam}_firsthalf"):
            file = root / "leval/scored_predictions" / f"{name}.jsonl"
            nothing = (
                {}
                if name.startswith("turbo-16k-0613_c")
                else {"prediction": "", "official_score": 0.0}
            )
            file.write_text(json.dumps(row | nothing) + "\n")
    (root / "loogle").mkdir()
    parts = {
        "location_square": 2 / 3,
        "location_mean": 2 / 3,
        "swap": 1.0,
        "swap_distance": 1.0,
    }
    official = {f"{part}_deviation": value for part, value in parts.items()}
    row = {
        "gold": "I,II,III",
        "llm_output": "II, I, III",
        "standard_format": True,
        "official_function_value": official,
    }
    (root / "loogle/timeline_reorder_gold_and_gpt4.jsonl").write_text(
        json.dumps(row) + "\n"
    )
    return root


@pytest.mark.parametrize(("score", "equal"), [(1.0, 33), (0.5, 31)])
def test_the_study_counts_equal_scores(
    score: float,
    equal: int,
    tmp_path: Path,
    outputs: Path,
    posbench: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = _folder(tmp_path, score)
    if equal == 33:
        monkeypatch.setenv("POSBENCH_DATA", str(data))
    given = [] if equal == 33 else [f"study.data={data}"]
    result = posbench("study=scorers", *given)
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    table = pd.read_csv(folder / "scores.csv").set_index("subset")
    assert (table["equal"].sum(), table["outputs"].sum()) == (equal, 33)
    expected = {"outputs": 1, "equal": int(score == 1), "largest_difference": 1 - score}
    expected |= {"official_mean": score, "our_mean": 1.0}
    assert {name: table.loc["trec", name] for name in expected} == expected
    assert table.loc["20 documents", ["outputs", "equal", "our_mean"]].to_list() == [
        2,
        2,
        0.0,
    ]
    finding = pd.read_csv(folder / "findings.csv").iloc[0]
    assert finding["value"] == pytest.approx(equal / 33) and finding["n"] == 33


def test_a_study_without_its_files_says_which(
    tmp_path: Path,
    outputs: Path,
    posbench: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("POSBENCH_DATA", raising=False)
    unsaid = posbench("study=scorers")
    assert unsaid.status == 2
    assert_refused(
        unsaid.err, "study.data", None, allowed="longbench", hint="study.data=DIR"
    )
    nothing = posbench("study=scorers", f"study.data={tmp_path}")
    assert nothing.status == 2
    assert_refused(
        nothing.err,
        "study.data",
        str(tmp_path),
        allowed="longbench",
        hint="study.data=DIR",
    )
    (tmp_path / "longbench").mkdir()
    result = posbench("study=scorers", f"study.data={tmp_path}")
    assert (
        result.status == 2
        and "narrativeqa.jsonl" in result.err
        and not run_folders(outputs)
    )
