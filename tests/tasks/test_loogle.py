"""Prompts, files and metrics of LooGLE's timeline reorder, against real replies with the values of the
official functions."""

from __future__ import annotations

import json
import os
import zipfile
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from posbench import paths
from posbench.schema import build
from posbench.tasks.loogle_timeline_reorder import (
    HUB,
    LooGLETimelineReorder,
    deviations,
    numerals,
    reorder_scores,
    roman,
    worst,
)
from tests.messages import line_refused, refused

REPLIES = (
    Path(__file__).parents[1]
    / "data/scored/loogle/timeline_reorder_gold_and_gpt4.jsonl"
)
REAL = Path(os.environ.get("POSBENCH_DATA", "/nowhere")) / "loogle"
real = pytest.mark.skipif(
    "POSBENCH_DATA" not in os.environ,
    reason="POSBENCH_DATA names no folder of benchmark files",
)
OFFICIAL = {
    "lsd": "location_square_deviation",
    "lmd": "location_mean_deviation",
    "sd": "swap_deviation",
    "sdd": "swap_distance_deviation",
}
FIRST = {
    "Q": "Order these by year:\n1.The war\n2. The treaty of 1815\n3) The feast",
    "A": "2,1,3",
    "type": "timeline_reorder",
    "S": ["x"],
}
SECOND = {
    "Q": "Order these:\nI. The mill\nII. The fire",
    "A": "II, I",
    "type": "timeline_reorder",
    "S": [],
}
OTHER = {"Q": "Why?", "A": "Because.", "type": "computation", "S": []}


def write(path: Path, *documents: Any) -> Path:
    rows = [
        {
            "input": "A long text.",
            "title": "T",
            "qa_pairs": repr(pairs),
            "output": "None",
        }
        for pairs in documents
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _task(file: Path, **settings: Any) -> LooGLETimelineReorder:
    return LooGLETimelineReorder(path=str(file), **settings)


def _greedy_swaps(order: tuple[int, ...]) -> float:
    """The paper's swap distance deviation, step by step: always the swap that gains most per place."""
    left = list(order)
    total = 0
    while left != sorted(left):
        pairs = [(i, j) for i in range(len(left)) for j in range(i + 1, len(left))]

        def gain(pair: tuple[int, int], now: list[int]) -> float:
            i, j = pair
            return (
                abs(now[i] - i) + abs(now[j] - j) - abs(now[j] - i) - abs(now[i] - j)
            ) / (j - i)

        i, j = max(pairs, key=lambda pair: gain(pair, left))
        left[i], left[j] = left[j], left[i]
        total += j - i
    return float(total)


def _check_replies(file: Path, count: int) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == count
    for row in rows:
        assert numerals(row["llm_output"]) == row["roman_parse"]
        scores = reorder_scores(row["llm_output"], row["gold"])
        assert scores["standard"] == float(row["standard_format"])
        assert scores["exact_order"] == float(
            ",".join(row["roman_parse"]) == row["gold"]
        )
        assert {
            OFFICIAL[name]: value for name, value in worst(row["n"]).items()
        } == pytest.approx(row["official_worst_value"])
        given = (
            row["official_function_value"]
            if row["standard_format"]
            else row["official_worst_value"]
        )
        assert {OFFICIAL[name]: scores[name] for name in OFFICIAL} == pytest.approx(
            given
        )
        apart = {OFFICIAL[name]: scores.get(f"{name}_s") for name in OFFICIAL}
        assert (
            apart == pytest.approx(row["official_function_value"])
            if row["standard_format"]
            else set(apart.values()) == {None}
        )


def test_real_replies_have_the_values_of_the_official_functions() -> None:
    _check_replies(REPLIES, 126)


@pytest.mark.parametrize("size", range(2, 7))
def test_the_closed_forms_are_those_of_all_orders(size: int) -> None:
    """The greedy swaps of every permutation, and the largest value of each metric."""
    found = {order: deviations(order) for order in permutations(range(size))}
    assert all(value["sdd"] == _greedy_swaps(order) for order, value in found.items())
    assert {
        name: max(value[name] for value in found.values()) for name in OFFICIAL
    } == pytest.approx(worst(size))


@pytest.mark.parametrize("size", [2, 3, 8, 15])
def test_identity_reversal_and_cycle(size: int) -> None:
    assert deviations(range(size)) == dict.fromkeys(OFFICIAL, 0.0)
    assert deviations(range(size)[::-1])["lsd"] == pytest.approx((size**2 - 1) / 3)
    assert deviations([*range(1, size), 0])["sd"] == size - 1


def test_deviations_by_hand() -> None:
    """3 1 2 in place of 1 2 3: displacements 2, 1, 1; one cycle; swap places 1 and 3 (distance 2 or 1+1)."""
    assert deviations([2, 0, 1]) == {
        "lsd": 2.0,
        "lmd": pytest.approx(4 / 3),
        "sd": 2.0,
        "sdd": 2.0,
    }


@pytest.mark.parametrize(
    ("reply", "gold", "standard", "exact"),
    [
        ("II, I, III", "II,I,III", 1, 1),
        ("II > III > I.", "II,I,III", 1, 0),
        ("I think it is II, I, III", "II,I,III", 0, 0),
        ("II, I", "II,I,III", 0, 0),
        ("II, I, IV", "II,I,III", 0, 0),
        ("", "II,I,III", 0, 0),
        ("2, 1, 3", "II,I,III", 0, 0),
        ("2, 1, 3", "2,1,3", 1, 1),
        ("2 (1815), 1, 3", "2,1,3", 0, 0),
        ("II I III", "2,1,3", 0, 0),
    ],
)
def test_standard_format_by_hand(
    reply: str, gold: str, standard: float, exact: float
) -> None:
    scores = reorder_scores(reply, gold)
    assert (scores["standard"], scores["exact_order"]) == (standard, exact)
    assert ("lsd_s" in scores) == bool(standard)


def test_prompts_character_by_character(tmp_path: Path) -> None:
    roman_ones, given = (
        _task(
            write(tmp_path / "a.jsonl", [OTHER, FIRST, SECOND]), numerals=kind
        ).examples("evaluation")
        for kind in ("roman", "as_given")
    )
    head = "Please answer the question based on the long texts below. \nA long text.\nQuestion: "
    assert [(e.prompt, e.answers) for e in roman_ones] == [
        (
            head
            + "Order these by year:\nI. The war\nII. The treaty of 1815\nIII. The feast\nAnswer: ",
            ("II,I,III",),
        ),
        (head + "Order these:\nI. The mill\nII. The fire\nAnswer: ", ("II,I",)),
    ]
    assert [(e.prompt, e.answers) for e in given] == [
        (
            head
            + "Order these by year:\n1.The war\n2. The treaty of 1815\n3) The feast\nAnswer: ",
            ("2,1,3",),
        ),
        (head + "Order these:\nI. The mill\nII. The fire\nAnswer: ", ("II,I",)),
    ]


def test_events_numbered_otherwise_stay(tmp_path: Path) -> None:
    odd = {**FIRST, "Q": "Order 1. the war 2. the treaty 3. the feast"}
    (example,) = _task(write(tmp_path / "a.jsonl", [odd])).examples("evaluation")
    assert odd["Q"] in example.prompt and example.answers == ("2,1,3",)


def test_roman_numerals() -> None:
    assert [roman(n) for n in (1, 4, 9, 10, 14, 19, 23, 39)] == [
        "I",
        "IV",
        "IX",
        "X",
        "XIV",
        "XIX",
        "XXIII",
        "XXXIX",
    ]


def test_one_question_per_document(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [FIRST, SECOND], [OTHER], [SECOND])
    assert [e.id for e in _task(file).examples("evaluation")] == ["1-0", "1-1", "3-0"]
    assert [
        e.id for e in _task(file, first_per_document=True).examples("evaluation")
    ] == ["1-0", "3-0"]
    assert [e.chat for e in _task(file, chat=False).examples("evaluation")] == [
        False
    ] * 3


def test_a_zip_holds_the_same(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [FIRST, SECOND])
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as packed:
        packed.write(file, "data/longdep_qa.jsonl")
    assert _task(tmp_path / "data.zip").examples("evaluation") == _task(file).examples(
        "evaluation"
    )
    with refused(
        "task.path",
        f"{tmp_path / 'data.zip'}:longdep.jsonl",
        allowed=".jsonl",
        hint="longdep.jsonl",
    ):
        _task(tmp_path / "data.zip", member="longdep.jsonl").examples("evaluation")


def test_the_hub_files() -> None:
    assert LooGLETimelineReorder().files() == (HUB,) and len(HUB.revision or "") == 40


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"input": 3}, ("input",)),
        ({"qa_pairs": None}, ("qa_pairs",)),
        ({"qa_pairs": "[{'Q': "}, ("qa_pairs", "Python literal")),
        ({"qa_pairs": "__import__('os')"}, ("qa_pairs", "Python literal")),
        ({"qa_pairs": "['Q']"}, ("qa_pairs", "dicts")),
        ({"qa_pairs": repr([{"Q": "a", "A": "b"}])}, ('"type"',)),
        ({"qa_pairs": repr([{**FIRST, "Q": ""}])}, ('"Q"',)),
        ({"qa_pairs": repr([{**FIRST, "A": ["2", "1"]}])}, ('"A"',)),
        ({"qa_pairs": repr([{**FIRST, "A": "first"}])}, ('"A"', "first")),
        ({"qa_pairs": repr([{**FIRST, "A": "2,1,2"}])}, ('"A"', "2,1,2")),
    ],
)
def test_a_malformed_line_is_named(
    change: dict[str, Any], named: tuple[str, ...], tmp_path: Path
) -> None:
    with line_refused(tmp_path / "bad.jsonl", 1, *named):
        _task(_written(tmp_path, change)).examples("evaluation")


def test_a_file_without_a_question_of_the_task_is_named(tmp_path: Path) -> None:
    file = _written(tmp_path, {"qa_pairs": repr([OTHER])})
    with refused("task.path", str(file), allowed=("type", "timeline_reorder")):
        _task(file).examples("evaluation")


def _written(folder: Path, change: dict[str, Any]) -> Path:
    """A file of one line, changed in some fields."""
    row = {"input": "text", "qa_pairs": repr([FIRST]), **change}
    file = folder / "bad.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return file


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with refused(
        "task.path",
        str(tmp_path / "absent.jsonl"),
        allowed="file",
        hint="huggingface.co/datasets/bigai-nlco/LooGLE",
    ):
        _task(tmp_path / "absent.jsonl").examples("evaluation")
    with refused(
        "stages",
        "search",
        allowed="loogle_timeline_reorder",
        hint=("task=kv_retrieval", "method=from:RUN"),
    ):
        _task(write(tmp_path / "a.jsonl", [FIRST])).examples("calibration")


@real
def test_the_official_sample_asks_as_the_official_output_does() -> None:
    """The sample documents number their events 1., 2., ...; the official evaluation file has the same ones in
    Roman numerals."""
    ours = _task(REAL / "longdep_qa.jsonl").examples("evaluation")
    rows = [
        json.loads(line)
        for line in (REAL / "timeline_reorder_gold_and_gpt4.jsonl")
        .read_text()
        .splitlines()[:2]
    ]
    assert [e.answers for e in ours] == [(row["gold"],) for row in rows]
    for example, row in zip(ours, rows, strict=True):
        question = example.prompt.rpartition("\nQuestion: ")[2].removesuffix(
            "\nAnswer: "
        )

        def words(text: str) -> list[str]:
            return [line.rstrip(".?:").lower() for line in text.splitlines()]

        assert words(question) == words(row["question"])


def test_the_defaults_of_the_yaml_are_those_of_the_class() -> None:
    given = OmegaConf.to_container(
        OmegaConf.load(paths.CONF / "task/loogle_timeline_reorder.yaml"), resolve=True
    )
    assert isinstance(given, dict)
    assert (
        given.pop("_target_")
        == "posbench.tasks.loogle_timeline_reorder.LooGLETimelineReorder"
    )
    assert (
        build(LooGLETimelineReorder, {str(k): v for k, v in given.items()}, "task")
        == LooGLETimelineReorder()
    )
