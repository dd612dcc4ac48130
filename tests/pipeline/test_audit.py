"""Rows made again plainly: planted mistakes are found, rounding is told from them, shards audit themselves."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from posbench.cli.main import main
from posbench.model.lm import LM
from posbench.pipeline.audit import audit_rows
from posbench.pipeline.execute import make_run_folder
from posbench.pipeline.prepare import build_run
from posbench.run.base import Run
from posbench.run.folder import RunDir, open_run
from posbench.run.shards import shard_folders
from tests.conftest import Result, config_of, run_folders
from tests.messages import assert_names

COMMAND = [
    "model=tiny",
    "runtime.device=cpu",
    "runtime.threads=1",
    "task.limit=8",
    "task.positions=[0%,50%,100%]",
    "stages=[evaluate]",
]
FILE = "predictions.jsonl"


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of a finished run, which no test changes."""
    outputs = tmp_path_factory.mktemp("finished")
    assert main([*COMMAND, f"runtime.outputs={outputs}"]) == 0
    return outputs


@pytest.fixture
def finished(made_once: Path, outputs: Path) -> Path:
    """A copy of that run."""
    shutil.copytree(made_once, outputs)
    (folder,) = run_folders(outputs)
    return folder


def run_of(out: RunDir) -> Run:
    """The run of a folder, with its model."""
    run = build_run(config_of(*COMMAND), Console(quiet=True))
    run.out = out
    return run


def change_row(out: RunDir, number: int, **fields: Any) -> dict[str, Any]:
    """Change a row of a run, and all checksums with it: nothing but an audit can tell."""
    rows = out.rows(FILE)
    rows[number] |= fields
    out.write_rows(FILE, rows)
    out.renew([FILE])
    return rows[number]


def test_rows_of_a_run_are_those_of_its_prompts_alone(
    finished: Path, posbench: Callable[..., Result]
) -> None:
    rows = len(open_run(finished).rows(FILE))
    result = posbench("audit", str(finished), "--share", "1", verb=True)
    assert result.status == 0, result.err
    assert_names(result.out, f"{rows} of {rows}", "the same")
    facts = json.loads((finished / "provenance.json").read_text())["audit"]
    assert facts["words"] in result.out
    assert facts["words"] in (finished / "report.html").read_text()
    assert not open_run(finished).damaged()


def test_a_planted_reply_is_found(
    finished: Path, posbench: Callable[..., Result]
) -> None:
    out = open_run(finished)
    other = out.rows(FILE)[0]["output"]
    number = next(
        index for index, row in enumerate(out.rows(FILE)) if row["output"] != other
    )
    row = change_row(out, number, output=other)
    result = posbench("audit", str(finished), "--share", "1", verb=True)
    assert result.status == 2
    assert_names(result.err, "audit", "1 differ", row["method"], row["id"], "output")
    assert_names(result.err, "runtime.share=null")


def test_a_share_of_the_rows_is_chosen_by_its_seed(finished: Path) -> None:
    out = open_run(finished)
    run = run_of(out)
    change_row(out, 0, output="nothing that the model says")
    total = len(out.rows(FILE))
    assert audit_rows(run, "float32", share=1).rows == total
    found = [
        len(audit_rows(run, "float32", share=0.5, seed=seed).differences)
        for seed in range(8)
    ]
    assert set(found) == {0, 1}
    assert len(audit_rows(run, "float32", share=0.5, seed=3).differences) == found[3]


def test_a_token_that_rounding_decides_is_no_difference(
    finished: Path, tiny: LM
) -> None:
    """The distance is that of the two tokens' log-probabilities in a plain forward."""
    out = open_run(finished)
    rows = out.rows(FILE)
    number = next(i for i, row in enumerate(rows) if row["method"] == "none")
    run = run_of(out)
    example = next(e for e in run.evaluation if e.id == rows[number]["id"])
    ids = tiny.encode(example.prompt).ids
    with torch.no_grad():
        logits = tiny.model(torch.tensor([ids])).logits[0, -1].double()
    scores = logits.log_softmax(0)
    first, second = scores.topk(2).indices.tolist()
    text = tiny.need_tokenizer().decode([second])
    change_row(out, number, output=text)
    (difference,) = audit_rows(run, "float32", share=1).differences
    gap = float(scores[first] - scores[second])
    assert difference.nats == pytest.approx(gap, abs=1e-4)
    assert difference.nats > 1e-3
    tied = audit_rows(run, "bfloat16", share=1)
    assert (tied.ties == 1) == (gap <= 0.25)


def test_another_prompt_is_never_a_tie(finished: Path) -> None:
    out = open_run(finished)
    row = out.rows(FILE)[0]
    change_row(out, 0, tokens=row["tokens"] + 1)
    run = run_of(out)
    (difference,) = audit_rows(run, "bfloat16", share=1).differences
    assert difference.field == "tokens"
    assert math.isinf(difference.nats)


def test_shards_audit_themselves(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    folder = make_run_folder(
        config_of(*COMMAND, f"runtime.outputs={outputs}"), "posbench"
    )
    for number in range(2):
        part = posbench("resume", str(folder), f"--part={number}/2", verb=True)
        assert part.status == 0, part.err
    good = posbench(*COMMAND)
    assert good.status == 0, good.err
    assert "rows were made again" in good.out
    assert "audit" in open_run(folder).facts("provenance.json")


def test_a_wrong_shard_does_not_become_a_result(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    folder = make_run_folder(
        config_of(*COMMAND, f"runtime.outputs={outputs}"), "posbench"
    )
    assert posbench("resume", str(folder), "--part=0/1", verb=True).status == 0
    (shard,) = shard_folders(folder)
    part = RunDir(shard, open_run(folder).id)
    rows = part.rows(FILE)
    for row in rows:
        row["output"] = "nothing that the model says"
    part.write_rows(FILE, rows)
    result = posbench(*COMMAND)
    assert result.status == 2
    assert_names(result.err, "audit", "differ", str(folder))
    assert not open_run(folder).done
