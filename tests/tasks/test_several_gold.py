"""Prompts with several gold items: one is moved, all are gold to studies, tables and pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from random import Random

import numpy as np
import pandas as pd
import pytest
import yaml

from posbench.errors import UserError
from posbench.report.failures import excerpt
from posbench.schema import build
from posbench.studies.attention_to_gold import head_row
from posbench.studies.prompts import mean_distractor_attention, random_distractor
from posbench.tasks import Example
from posbench.tasks.base import check_gold_positions
from posbench.tasks.kv_retrieval import WORDS
from posbench.tasks.own_data import OwnData
from tests.conftest import Result, run_folders

ITEMS = ("a", "b", "c", "d", "e", "f")


def example(gold: int | None, *other_gold: int, items: int = 6) -> Example:
    return Example(
        id="x",
        prompt="",
        answers=("y",),
        gold_position=gold,
        other_gold=other_gold,
        items=((0, 1),) * items,
    )


def write(file: Path, *rows: dict[str, object]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def own_data(file: Path, **fields: object) -> OwnData:
    return build(OwnData, {"path": str(file), **fields}, "task")


def record(gold: int, *other_gold: int) -> dict[str, object]:
    fields = {"question": "Which?", "items": ITEMS, "answers": ["y"]}
    return {**fields, "gold": gold, "other_gold": other_gold}


def test_a_distractor_is_never_gold() -> None:
    for gold in combinations(range(6), 3):
        drawn = {
            random_distractor(replace(example(*gold), id=str(number)), "test", 0)
            for number in range(60)
        }
        assert drawn == set(range(6)) - set(gold)


def test_mean_attention_to_distractors_leaves_out_every_gold_item() -> None:
    weights = np.random.default_rng(0).random((2, 3, 6))
    several = example(4, 0, 2)
    expected = (weights[..., 1] + weights[..., 3] + weights[..., 5]) / 3
    assert mean_distractor_attention(weights, several) == pytest.approx(expected)
    row = head_row(weights, several)
    assert np.array(row["gold"]) == pytest.approx(weights[..., 4], rel=1e-4)
    assert np.array(row["others"]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [example(6), example(-1), example(2, 2), example(2, 6), example(None, 1)],
)
def test_a_gold_position_outside_the_items_is_refused(wrong: Example) -> None:
    with pytest.raises(UserError) as error:
        check_gold_positions(wrong)
    assert "example x" in str(error.value.value)
    assert "0 to 5" in error.value.allowed


def test_gold_positions_inside_the_items_are_taken() -> None:
    for right in (example(0), example(5, 0, 3), example(None), example(3, items=0)):
        check_gold_positions(right)


@pytest.mark.parametrize("seed", range(10))
def test_own_data_moves_one_gold_item_and_keeps_the_others(
    seed: int, tmp_path: Path
) -> None:
    rng = Random(seed)
    gold, *other_gold = rng.sample(range(6), 3)
    size = rng.choice([3, 4, 5, 6])
    file = write(tmp_path / "a.jsonl", record(gold, *other_gold))
    task = own_data(
        file,
        positions=list(range(size)),
        items_per_prompt=size,
        template="{context}|{question}",
    )
    for position, prompt in enumerate(task.evaluation()):
        shown = prompt.prompt.partition("|")[0].split("\n")
        assert len(shown) == size
        assert prompt.gold_position == position
        gold_texts = [shown[i] for i in prompt.gold_positions]
        assert gold_texts == [ITEMS[i] for i in (gold, *other_gold)]
        # What is not moved stays in the order of the file.
        rest = [text for text in shown if text != ITEMS[gold]]
        assert rest == sorted(rest)


@pytest.mark.parametrize("other_gold", [[1], [2, 2], [6], [-1], "2"])
def test_a_wrong_field_of_own_data_is_refused(
    other_gold: object, tmp_path: Path
) -> None:
    line = {**record(1), "other_gold": other_gold}
    file = write(tmp_path / "a.jsonl", line)
    with pytest.raises(UserError) as error:
        own_data(file).evaluation()
    assert "other_gold" in str(error.value)
    assert "line 1" in str(error.value)


def test_a_prompt_has_room_for_all_gold_items(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", record(0, 2, 4))
    with pytest.raises(UserError) as error:
        own_data(file, items_per_prompt=2).evaluation()
    assert error.value.field == "task.items_per_prompt"
    assert error.value.value == 2
    assert "task.items_per_prompt=3" in error.value.hint


def test_an_excerpt_shows_every_gold_item() -> None:
    items = [f"<{number}:{'.' * 2000}>" for number in range(6)]
    starts = np.cumsum([0, *map(len, items)])
    spans = tuple((int(a), int(b)) for a, b in pairwise(starts))
    prompt = replace(example(4, 1), prompt="".join(items), items=spans)
    text = excerpt(prompt)
    shown = [number for number in range(1, 6) if f"<{number}:" in text]
    # Item 2 begins where item 1 ends, item 5 where item 4 does.
    assert shown == [1, 2, 4, 5]


def test_a_run_a_study_and_show_follow_them(
    posbench: Callable[..., Result], outputs: Path, tmp_path: Path
) -> None:
    rng = Random(0)
    lines = []
    for number in range(6):
        keys = rng.sample(WORDS, 6)
        values = rng.sample(WORDS, 6)
        items = [f'"{k}": "{v}"' for k, v in zip(keys, values, strict=True)]
        gold, other = rng.sample(range(6), 2)
        lines.append(
            {
                "question": keys[gold],
                "items": items,
                "gold": gold,
                "other_gold": [other],
                "answers": [values[gold]],
                "id": f"q{number}",
            }
        )
    file = write(tmp_path / "needles.jsonl", *lines)
    command = ["task=own_data", f"task.path={file}", "task.positions=[0,2,5]"]
    evaluated = posbench(*command, "stages=[intervene,evaluate]")
    assert evaluated.status == 0, evaluated.err
    (run,) = run_folders(outputs)
    rows = [json.loads(line) for line in (run / "predictions.jsonl").open()]
    config = yaml.safe_load((run / "config.yaml").read_text())
    prompts = {e.id: e for e in build(OwnData, _own(config), "task").evaluation()}
    for row in rows:
        assert tuple(row["other_gold"]) == prompts[row["id"]].other_gold
    metrics = pd.read_csv(run / "metrics.csv", dtype={"gold_position": str})
    assert set(metrics["gold_position"]) >= {"0", "2", "5", "all"}
    shown = posbench("show", str(run), "--id", "0-q0", verb=True)
    assert shown.status == 0, shown.err
    (other,) = prompts["0-q0"].other_gold
    assert f"other gold items {other}" in shown.out

    studied = posbench("study=crop_mask", *command, "study.examples=2")
    assert studied.status == 0, studied.err


def _own(config: dict[str, dict[str, object]]) -> dict[str, object]:
    return {k: v for k, v in config["task"].items() if k != "_target_"}
