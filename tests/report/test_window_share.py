"""The share of the context window that a run's prompts take: counted again from prompts, and unsaid where unknown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posbench import load
from posbench.backends.base import NO_WINDOW
from posbench.report.compare import terminal_rows, write_comparison
from posbench.report.text import describe_window_share
from posbench.run.folder import RunDir
from posbench.run.reply_rows import prompt_columns
from tests.conftest import Result, config_of, run_folders
from tests.report.test_compare import best, better, run

WINDOW = 256
"""Context window of the small checkpoint."""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (folder / "predictions.jsonl").read_text().splitlines()
    ]


def test_a_run_says_which_share_of_the_window_its_prompts_take(
    posbench: Callable[..., Result], small: list[str], checkpoint: Path, outputs: Path
) -> None:
    method = ["method.channel=3", "method.factor=0.5", "method.layers=[1,2]"]
    args = [*small, *method, "stages=[evaluate,report]"]
    result = posbench(*args)
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    # Neither the run's token counts nor its window: the prompts, tokenised again, over the checkpoint's config.
    examples = config_of(*args).task.evaluation()
    lm = load(checkpoint)
    mean = np.mean([len(lm.encode(e.prompt, chat=e.chat).ids) for e in examples])
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["max_position_embeddings"] == WINDOW
    assert np.mean([row["tokens"] for row in rows_of(folder)]) == mean
    told = posbench("ls", "runs", "--json", f"--outputs={outputs}", verb=True)
    (listed,) = json.loads(told.out)
    assert listed["window_share"] == pytest.approx(mean / WINDOW, abs=5e-5)
    sentence = f"Prompts of {mean:.0f} tokens on average, {100 * mean / WINDOW:.3g} % of the window of {WINDOW}."
    assert sentence in " ".join(result.out.split())
    assert sentence in (folder / "report.html").read_text()


def test_a_study_says_how_long_its_prompts_are(
    posbench: Callable[..., Result], small: list[str], checkpoint: Path, outputs: Path
) -> None:
    args = [arg for arg in small if not arg.startswith(("search", "stages"))]
    args += ["method=none", "study=attention_to_gold", "study.items=[6,12]"]
    args += ["study.examples=2", 'task.positions=["0%","100%"]']
    result = posbench(*args)
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    lm = load(checkpoint)
    low, high = (
        len(lm.encode(example.prompt, chat=example.chat).ids)
        for pairs in (6, 12)
        for example in config_of(*args, f"task.pairs={pairs}").task.evaluation()[:1]
    )
    sentence = (
        f"Prompts of {low} to {high} tokens, {100 * low / WINDOW:.3g} to "
        f"{100 * high / WINDOW:.3g} % of the window of {WINDOW}."
    )
    assert sentence in (folder / "report.html").read_text()


def test_prompts_without_a_count_are_left_out() -> None:
    rows = [{"tokens": 100}, {"tokens": None}, {"tokens": 201}, {}]
    assert prompt_columns(rows, 1000) == {
        "tokens": 150.5,
        "window": 1000,
        "window_share": 0.1505,
    }


@pytest.mark.parametrize(
    ("tokens", "window", "known"),
    [(100, NO_WINDOW, {"tokens": 100.0}), (None, 1000, {"window": 1000})],
)
def test_an_unknown_share_is_not_mentioned(
    tokens: int | None, window: int, known: dict[str, float]
) -> None:
    columns = prompt_columns([{"tokens": tokens}], window)
    assert columns == {"tokens": None, "window": None, "window_share": None} | known
    assert describe_window_share(columns) == ""
    # A run of an older version has no record.
    assert describe_window_share({}) == ""


def test_a_full_window_and_large_numbers_are_written_out() -> None:
    # Three digits of a share near one, and no exponent.
    for tokens, share in (("32,767", "100"), ("32,600", "99.5"), ("1,455", "4.44")):
        columns = prompt_columns([{"tokens": int(tokens.replace(",", ""))}], 32_768)
        assert describe_window_share(columns) == (
            f"Prompts of {tokens} tokens on average, {share} % of the window of 32,768."
        )


def test_a_comparison_has_a_column_only_where_shares_differ(tmp_path: Path) -> None:
    folders = [run(tmp_path, "aaaa0001", better), run(tmp_path, "aaaa0002", best)]

    def compared(*shares: float | None) -> list[dict[str, Any]]:
        for folder, share in zip(folders, shares, strict=True):
            stages = {"evaluate": {"window_share": share}}
            out = RunDir(folder, folder.name[-8:])
            out.write_facts("status.json", {"state": "done", "stages": stages})
            out.seal("posbench")
        return list(write_comparison(folders)[1])

    for same in (0.25, None):
        rows = compared(same, same)
        assert [row["window_share"] for row in rows] == [same, same]
        assert all("window share" not in row for row in terminal_rows(rows))
    rows = compared(0.25, None)
    assert [row["window share"] for row in terminal_rows(rows)] == ["25 %", ""]
