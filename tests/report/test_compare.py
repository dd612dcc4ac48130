"""Comparisons: paired where the prompts are the same, else said not to be, and never of two tasks."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from posbench.pipeline.stages.evaluate import write_metrics
from posbench.report.compare import (
    ComparedRun,
    differences,
    label_runs,
    pairing_note,
    terminal_rows,
    verdict,
    write_comparison,
)
from posbench.report.compare import _score_figure as drawn_of
from posbench.run.folder import RunDir
from posbench.schema import instantiate
from posbench.tasks import Task
from tests.conftest import PROCESS, Result
from tests.messages import assert_names, assert_refused, refused

TASK = {
    "_target_": "posbench.tasks.KVRetrieval",
    "name": "kv_retrieval",
    "pairs": 12,
    "records": "words",
}
QUESTIONS = 30
PLACES = (0, 5, 11)
Right = Callable[[int, int], bool]


def run(
    outputs: Path,
    name: str,
    right: Right,
    *,
    seed: int = 0,
    questions: int = QUESTIONS,
    places: Sequence[int] = PLACES,
    task: dict[str, Any] | None = None,
    method: str = "scale_channel",
    model: str = "tiny",
    open_penalties: Sequence[str] | None = None,
) -> Path:
    """A run that answered question q at place p right where ``right(q, p)``; unmodified only at the ends."""
    folder = outputs / "kv_retrieval/v001" / f"{model}__{method}__{name}"
    folder.mkdir(parents=True)
    task = {**TASK, "seed": seed, **(task or {})}
    served = {} if open_penalties is None else {"base_url": "http://localhost/v1"}
    config = {
        "model": {"name": model, **served},
        "task": task,
        "method": {"name": method, "x": name},
    }
    out = RunDir(folder, name)
    (folder / "config.yaml").write_text(
        yaml.safe_dump({**config, "runtime": {"resamples": 100}})
    )
    rows = []
    for way in dict.fromkeys(("none", method)):
        answered: Right = right if way == method else lambda q, p: p != PLACES[1]
        for q in range(questions):
            for p in places:
                one = {
                    "method": way,
                    "id": f"{q}-{p}",
                    "gold_position": p,
                    "cluster": str(q),
                    "subset": "",
                }
                told = {"scores": {"accuracy": float(answered(q, p))}, "output": "x"}
                rows.append({**one, **told, "prompt": f"{seed} {q} {p}"})
    out.write_rows("predictions.jsonl", rows)
    made: Task = instantiate(task, Task, "task")  # type: ignore[type-abstract]
    write_metrics(made, model, 100, out, rows)
    facts: dict[str, Any] = {"started": "2026-05-01T10:00:00+00:00"}
    if open_penalties is not None and open_penalties != "unknown":
        facts["decoding"] = {"open_penalties": open_penalties}
    out.write_facts("provenance.json", facts)
    out.write_facts("status.json", {"state": "done", "stages": {}})
    out.seal("posbench")
    return folder


def better(q: int, p: int) -> bool:
    return p != 5 or q % 3 == 0


def best(q: int, p: int) -> bool:
    return p != 5 or q % 3 != 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of one task by what they are."""
    outputs = tmp_path_factory.mktemp("runs")
    return {
        "better": run(outputs, "aaaa0001", better),
        "best": run(outputs, "aaaa0002", best),
        "seed": run(outputs, "aaaa0003", best, seed=1),
        "few": run(outputs, "aaaa0004", best, questions=12),
        "other": run(outputs, "aaaa0005", best, places=(0, 11), questions=40),
        "plain": run(outputs, "aaaa0006", lambda q, p: p != 5, method="none"),
        "model": run(outputs, "aaaa0007", best, model="tiny_b"),
    }


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        # keys of the task, and what a served run left out: None is a run in process
        (({}, None), ({}, None), ()),
        (({}, None), ({}, []), ()),
        (({"max_new_tokens": 1}, None), ({"max_new_tokens": 4}, None), ("1", "4")),
        (
            ({"repetition_penalty": 1.3}, None),
            ({}, []),
            ("task.repetition_penalty", "1.3"),
        ),
        (({}, None), ({}, ["repetition_penalty"]), ("repetition_penalty", "server")),
        (({}, ["presence_penalty"]), ({}, []), ("presence_penalty", "neutral")),
        # Of an older version: nothing was sent.
        (({}, None), ({}, "unknown"), ("frequency_penalty", "repetition_penalty")),
    ],
)
def test_runs_that_decode_otherwise_are_flagged(
    first: tuple[dict[str, Any], Any],
    second: tuple[dict[str, Any], Any],
    named: tuple[str, ...],
    tmp_path: Path,
) -> None:
    defaults = {"max_new_tokens": 1, "repetition_penalty": 1.0}
    folders = [
        run(
            tmp_path,
            f"aaaa000{index}",
            best,
            task={**defaults, **task},
            open_penalties=open_penalties,
        )
        for index, (task, open_penalties) in enumerate((first, second))
    ]
    _, _, notes = write_comparison(folders, tmp_path / "compared")
    if not named:
        assert notes == []
        return
    (note,) = notes
    assert_names(note, *named)


def compared(
    runs: dict[str, Path], first: str, second: str
) -> tuple[dict[str, Any], str]:
    """How two runs differ, and what is said of it."""
    a, b = label_runs([ComparedRun.of(runs[name]) for name in (first, second)])
    found = differences(a, b)
    return found, pairing_note(a, b, found)


@pytest.mark.figures
def test_paired_where_the_prompts_are_the_same(runs: dict[str, Path]) -> None:
    files, told, said = write_comparison([runs["better"], runs["best"]])
    out = runs["best"].parents[2] / "compare/aaaa0001_aaaa0002"
    names = ("comparison.csv", "accuracy.svg", "report.html")
    assert files == [out / name for name in names] and said == []
    lines = pd.read_csv(out / "comparison.csv").set_index("run")
    line = lines.loc["aaaa0002"]
    ours, theirs = (
        [f(q, p) for q in range(QUESTIONS) for p in PLACES] for f in (best, better)
    )
    change = np.subtract(ours, theirs, dtype=float)
    assert (
        line["score"] == pytest.approx(np.mean(ours))
        and line["pairs"] == line["n"] == 90
    )
    assert line["score_difference"] == pytest.approx(change.mean())
    # Of whole questions, by hand: a third of them gains one answer of three.
    each = change.reshape(QUESTIONS, 3).mean(1)
    half = 2.045 * each.std(ddof=1) / np.sqrt(QUESTIONS)
    reach = line["score_difference_ci_high"] - line["score_difference_ci_low"]
    assert reach / 2 == pytest.approx(half, rel=0.2)
    assert line["score_difference_ci_low"] > 0, "every question gains or stays"
    assert line["position_bias_difference"] < 0 and np.isnan(
        lines.loc["aaaa0001", "score_difference"]
    )
    first, second = terminal_rows(told)
    assert first["run"] == "aaaa0001\nx=aaaa0001" and first["score difference"] == ""
    low, high = (100 * line[f"score_difference_ci_{end}"] for end in ("low", "high"))
    assert (
        second["score difference"]
        == f"{100 * change.mean():+.1f}\n[{low:.1f}, {high:.1f}]"
    )
    figure = drawn_of(
        label_runs([ComparedRun.of(runs[name]) for name in ("better", "best")])
    )
    assert figure is not None and len(figure.axes[0].lines) == 3
    assert_names(figure.get_suptitle(), "tiny", "n = 30")
    assert {file.name for file in out.iterdir()} == set(names)
    page = (out / "report.html").read_text()
    contrast = f"{100 * change.mean():+.1f} [{low:.1f}, {high:.1f}] points"
    head = re.search('<p class="result">(.*?)</p>', page, re.DOTALL)
    words = head and re.sub("<[^>]*>", "", head[1])
    gain = f"{100 * change.mean():.1f}"
    assert (
        words
        == f"x=aaaa0002 scores {gain} points above x=aaaa0001 on the 90 prompts that both were asked."
    )
    detail = re.search("<summary>In detail</summary><p>(.*?)</p>", page, re.DOTALL)
    details = re.sub("<[^>]*>", "", detail[1]) if detail else ""
    assert details.startswith("x=aaaa0002 scores higher than x=aaaa0001")
    assert (
        contrast in details
        and details.count("[") == 2
        and "posbench, compare/<wbr>aaaa0001_" in page
    )
    for name in ("better", "best"):
        address = os.path.relpath(runs[name], out)
        assert f'href="{address}/"' in page and (out / address).is_dir()
    # Points of the curve: two runs and the unmodified model at each place.
    assert page.count('class="point"') == 3 * len(PLACES)


def test_the_verdict_follows_the_interval() -> None:
    def row(low: float | None, high: float | None) -> dict[str, Any]:
        value = None if low is None or high is None else (low + high) / 2
        names = ("score_difference", "position_bias_difference")
        columns = dict.fromkeys(f"{n}{e}" for n in names for e in ("_ci_low", ""))
        ends = {"score_difference_ci_low": low, "score_difference_ci_high": high}
        return {**columns, **ends, "score_difference": value, "label": "b", "pairs": 9}

    first = {"label": "a"}
    assert "b scores higher than a (+20.0 [10.0, 30.0]" in verdict(
        [first, row(0.1, 0.3)]
    )
    assert "b scores lower than a (-20.0" in verdict([first, row(-0.3, -0.1)])
    assert "cannot be told apart" in verdict([first, row(-0.1, 0.3)])
    assert "cannot be compared" in verdict([first, row(None, None)])
    unpaired = row(0.1, 0.3) | {"pairs": 0}
    assert_names(verdict([first, *[unpaired] * 6]), "unpaired", "2 more")


def test_other_prompts_are_not_paired_and_that_is_said(runs: dict[str, Path]) -> None:
    alone, said = compared(runs, "better", "seed")
    assert alone["pairs"] == 0
    assert_names(said, "unpaired", "0", "90 prompts")
    paired, nothing = compared(runs, "better", "best")
    assert nothing == "" and alone["score"].value == pytest.approx(
        paired["score"].value
    )
    wide, narrow = (at["score"].ci_high - at["score"].ci_low for at in (alone, paired))
    assert wide > 1.2 * narrow


def test_averages_over_other_gold_positions_are_not_compared(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    """A model that loses the middle scores more on its ends alone, and has less bias there."""
    found, said = compared(runs, "better", "other")
    assert found["score"] is None and found["position_bias"] is None
    assert_names(said, "gold positions", "not compared")
    # A quarter of 20 and of 41 items: the same positions, but for rounding.
    folders = {
        name: run(tmp_path, name, better, places=places, task={"pairs": pairs})
        for name, places, pairs in (
            ("aaaa0001", (0, 4, 19), 20),
            ("aaaa0002", (0, 10, 40), 41),
        )
    }
    assert compared(folders, *folders)[0]["score"] is not None


def test_fewer_prompts_are_paired_over_those_that_both_asked(
    runs: dict[str, Path],
) -> None:
    for names, sign in ((("better", "few"), 1), (("few", "better"), -1)):
        found, said = compared(runs, *names)
        assert found["pairs"] == 36
        assert_names(said, "36 prompts")
        assert found["score"].value == pytest.approx(sign * 4 / 36)


def test_two_models_answer_the_same_prompts(runs: dict[str, Path]) -> None:
    found = label_runs(
        [ComparedRun.of(runs[name]) for name in ("plain", "best", "model")]
    )
    told = ["tiny, unmodified", "tiny, scale_channel", "tiny_b, scale_channel"]
    assert [run.label.split(", x=")[0] for run in found] == told
    assert differences(found[0], found[2])["pairs"] == 90


def test_rows_that_do_not_tell_their_prompt_are_not_taken_for_the_same(
    tmp_path: Path,
) -> None:
    runs = {
        name: run(tmp_path, name, better, seed=seed)
        for seed, name in enumerate(("aaaa0001", "aaaa0002"))
    }
    for name, folder in runs.items():
        out = RunDir(folder, name)
        rows = [
            {k: v for k, v in row.items() if k != "prompt"}
            for row in out.rows("predictions.jsonl")
        ]
        out.write_rows("predictions.jsonl", rows)
        out.seal("posbench")
    assert "unpaired" in compared(runs, *runs)[1]


@pytest.mark.figures
def test_refusals(tmp_path: Path, posbench: Callable[..., Result]) -> None:
    first = run(tmp_path, "aaaa0001", better)
    other = run(tmp_path, "aaaa0002", better, task={"name": "mine"})
    for runs in ((first,), (first, first)):
        value = " ".join(map(str, runs))
        with refused("RUN", value, allowed="two", hint="posbench ls runs"):
            write_comparison(runs)
    with refused(
        "RUN",
        f"{other} (task mine)",
        allowed="kv_retrieval",
        hint=("posbench ls runs", "task=kv_retrieval"),
    ):
        write_comparison((first, other))
    nowhere = tmp_path / "nowhere"
    with refused("RUN", str(nowhere), allowed="config.yaml", hint="path"):
        write_comparison((first, nowhere))
    second = run(tmp_path, "aaaa0003", best)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("")
    with refused(
        "--out", str(tmp_path / "mine"), allowed=("folder", "comparison"), hint="folder"
    ):
        write_comparison([first, second], tmp_path / "mine")
    old = tmp_path / "compare/aaaa0001_aaaa0003"
    old.mkdir(parents=True)
    for name in ("comparison.csv", "of_another_version.png"):
        (old / name).write_text("old")
    told = posbench(
        "compare",
        "aaaa0001",
        "aaaa0003",
        "--format=pdf",
        "--outputs",
        str(tmp_path),
        verb=True,
    )
    assert told.status == 0 and f"comparison: {old / 'comparison.csv'}" in told.err
    header, *lines = [line.split("\t") for line in told.out.splitlines()]
    assert header == [*pd.read_csv(old / "comparison.csv")] and [
        line[0] for line in lines
    ] == [*("aaaa0001", "aaaa0003")]
    absent = posbench("compare", "x", "y", verb=True)
    assert_refused(absent.err, "RUN", "x", allowed="config.yaml")
    assert not (old / "of_another_version.png").exists(), (
        "it takes the place of the first"
    )
    assert (old / "accuracy.pdf").read_bytes().startswith(b"%PDF")
    assert len(pd.read_csv(old / "comparison.csv")) == 2
    (second / "DONE").unlink()
    unfinished = posbench("compare", str(first), str(second), verb=True)
    assert_refused(
        unfinished.err, "RUN", str(second), allowed="finished", hint="state=done"
    )
    (second / "metrics.csv").write_text("")
    assert "damaged" in posbench("compare", str(first), str(second), verb=True).err


@pytest.mark.slow
def test_two_processes_that_compare_the_same_runs_both_print_their_table(
    runs: dict[str, Path],
) -> None:
    command = [*PROCESS, "compare", *map(str, list(runs.values())[:2])]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for process in both:
        out, err = process.communicate()
        assert process.returncode == 0, err.decode()
        assert b"score_difference" in out
