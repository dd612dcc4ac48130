"""Last week's runs: a sweep in one version, found again, compared, scored again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from posbench.model.lm import LM
from posbench.report.console import make_console
from posbench.report.sweep import summarise_again as again_of
from posbench.run.folder import PREDICTIONS, open_run_dir
from tests.cli.task_files import write_key_values
from tests.conftest import Result, run_folders
from tests.messages import assert_line_names, assert_names, refused

FEW = ["task.limit=4", "method.channel=3", "method.layers=[1,2]", "stages=[evaluate]"]


def test_a_sweep_over_the_task_is_found_compared_and_scored_again(
    posbench: Callable[..., Result], small: list[str], outputs: Path
) -> None:
    assert (
        posbench("-m", *small, *FEW, "method.factor=0.5", "task.seed=1,2").status == 0
    )
    runs = run_folders(outputs)
    (sweep,) = (outputs / "kv_retrieval").glob("v*/sweep__*")
    assert {run.parent for run in (*runs, sweep)} == {
        outputs / "kv_retrieval/v001"
    } and len(runs) == 2
    listed = posbench("ls", "runs", "--json", "--outputs", str(outputs), verb=True)
    found = {record["run"]: record for record in json.loads(listed.out)}
    assert {record["settings"]["task.seed"] for record in found.values()} == {"1", "2"}
    for run in runs:
        table = pd.read_csv(run / "metrics.csv").query(
            "gold_position == 'all' and method != 'none'"
        )
        own = table.set_index("metric")["value"]
        record = found[run.name.rpartition("__")[2]]
        assert record["folder"] == str(run) and record["score"] == own["accuracy"]
        assert record["difference"] == own["accuracy_difference"]
    compared = posbench("compare", *found, "--outputs", str(outputs), verb=True)
    assert compared.status == 0
    assert_names(compared.err, "unpaired", "0", "12 prompts")
    _another_score(runs[0])
    summary = pd.read_csv(sweep / "summary.csv")
    again = posbench(
        "rescore", sweep.name.rpartition("__")[2], "--outputs", str(outputs), verb=True
    )
    assert again.status == 0
    assert_line_names(again.out, "1 of 24", "scores")
    assert_line_names(again.out, "0 of 24", "scores")
    assert pd.read_csv(sweep / "summary.csv").equals(summary)
    assert not open_run_dir(sweep).damaged() and not open_run_dir(runs[0]).damaged()
    (runs[1] / "metrics.csv").write_bytes((runs[0] / "metrics.csv").read_bytes())
    with refused("DIR", allowed="metrics.csv", hint="posbench"):
        again_of(sweep, make_console())


def _another_score(folder: Path) -> None:
    """Let a run hold a score that the task would not give."""
    run = open_run_dir(folder)
    first, *rest = run.rows("predictions.jsonl")
    first["scores"] = {"accuracy": 1 - first["scores"]["accuracy"]}
    run.write_rows("predictions.jsonl", [first, *rest])
    run.seal("posbench")


def test_the_step_after_a_sweep_runs_as_printed(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    """Outside the default outputs, with files whose names hold commas: labels are without the quotes."""
    source = outputs.parent / "data"
    source.mkdir(parents=True)
    for name, seed in (("a, b", 1), ("c d", 2)):
        write_key_values(source / f"{name}.jsonl", seed)
    files = ",".join(f"'{source / name}.jsonl'" for name in ("a, b", "c d"))
    asked = ["model=tiny", "method=none", "task.pairs=12", "stages=[evaluate]"]
    swept = posbench("-m", *asked, f"task.path={files}")
    assert swept.status == 0, swept
    (summary,) = outputs.rglob("summary.csv")
    assert set(pd.read_csv(summary)["task.path"]) == {
        str(source / "a, b.jsonl"),
        str(source / "c d.jsonl"),
    }
    step = swept.out.partition("next: posbench ")[2].partition("  (")[0]
    assert posbench(*shlex.split(step), verb=True).status == 0


def test_runs_with_any_methods_ask_the_unmodified_model_once(
    posbench: Callable[..., Result],
    small: list[str],
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the method's code is no part of every run, as that of composed methods is not."""
    num_asked = [0]
    generate = LM._generate_batch

    def counted(lm: LM, rows: list[list[int]], *args: int) -> list[str]:
        num_asked[0] += len(rows)
        return generate(lm, rows, *args)

    monkeypatch.setattr(LM, "_generate_batch", counted)
    command = [*small, "task.limit=4", "stages=[evaluate]"]
    smaller_base = ["method=rope_base", "method.base=900"]
    both = "method=[question_first_and_last,rope_base]"
    both_smaller = [both, "method.parts.rope_base.base=900"]
    for method in (["method=none"], smaller_base, both_smaller):
        num_asked[0] = 0
        assert posbench(*command, *method).status == 0
        assert num_asked[0] == 12
    unmodified = [
        [
            row["output"]
            for row in open_run_dir(run).rows(PREDICTIONS)
            if row["method"] == "none"
        ]
        for run in run_folders(outputs)
    ]
    assert len(unmodified) == 3 and all(len(rows) == 12 for rows in unmodified)
    assert unmodified[0] == unmodified[1] == unmodified[2]
