"""What a page says of single questions is what the files of the run say, and it stays small."""

from __future__ import annotations

import base64
import csv
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posbench.report.explorer import (
    CUT,
    MAX_PROMPT_CHARACTERS,
    Questions,
    prompt_pieces,
)
from posbench.report.failures import RunExamples, full_prompt
from posbench.report.page import render_run
from posbench.run.folder import RunDir
from posbench.tasks import Example, KVRetrieval
from tests.conftest import Result, run_folders
from tests.report.test_failures import folder_of

TASK = KVRetrieval(pairs=12, positions=(0, 5, 11), limit=8)
MAX_BYTES = 500_000
"""Size of a page."""


def data_of(page: str) -> dict[str, Any]:
    """The data that a page embeds."""
    found = re.search('<script type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def questions_of(run: RunDir, config: dict[str, Any]) -> Questions:
    return Questions.of(run, RunExamples.of(run, config))


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunDir, dict[str, Any]]:
    """A run of two methods, the unmodified one wrong on every third question, with the attention of six prompts."""
    examples = TASK.evaluation()
    wrong = {e.id: "no <b>idea</b>" for e in examples[::3]}
    out, _ = folder_of(tmp_path, TASK, wrong)
    random = np.random.default_rng(0)
    weights = random.random((6, 2, 3, 12)) ** 4
    rows = [
        {"id": e.id, "method": method, "attention": weights[i, j].tolist()}
        for i, e in enumerate(examples[::4])
        for j, method in enumerate(("none", "x"))
    ]
    out.append("attention.jsonl", rows)
    return out, out.config("task")


def test_the_data_of_a_page_are_the_rows_of_the_run(
    run: tuple[RunDir, dict[str, Any]],
) -> None:
    out, _ = run
    data = data_of(render_run(out.path).read_text())
    recorded = [
        json.loads(line)
        for line in (out.path / "predictions.jsonl").read_text().splitlines()
    ]
    embedded = {
        (method, question[0]): (question[1], question[2], *reply[:3])
        for question in data["questions"]
        for method, reply in zip(data["methods"], question[3], strict=True)
    }
    assert embedded == {
        (row["method"], row["id"]): (
            row["gold_position"],
            row["answers"],
            row["scores"]["accuracy"],
            "",
            row["output"],
        )
        for row in recorded
    }
    assert data["total"] == len(data["questions"]) == 24
    changed = Counter(
        (before[0], after[0]) for *_, (before, after) in data["questions"]
    )
    assert changed == {(0.0, 1.0): 8, (1.0, 1.0): 16}


def test_prompts_stand_on_the_page_with_their_items_and_attention(
    run: tuple[RunDir, dict[str, Any]],
) -> None:
    out, config = run
    data = questions_of(out, config).data()
    examples = {example.id: example for example in TASK.evaluation()}
    attention = {(row["id"], row["method"]): row for row in out.rows("attention.jsonl")}
    assert len(data["prompts"]) == 24 and len(data["attention"]) == 6
    for number, pieces in data["prompts"].items():
        example = examples[data["questions"][number][0]]
        assert "".join(pieces) == full_prompt(example)
        assert pieces[1::2] == [example.prompt[a:b] for a, b in example.items]
        assert data["gold"][number] == [example.gold_position]
        for method, text in data["attention"].get(number, {}).items():
            shades = np.frombuffer(base64.b64decode(text), np.uint8).reshape(3, 12)
            shown = (shades / 255) ** 2 * data["top"]
            row = attention[example.id, data["methods"][int(method)]]
            # One byte for a square root: half a step of 1/255, where the slope is at most 2.
            assert np.abs(shown - row["attention"]).max() <= 1.01 / 255 * data["top"]
    assert data["top"] == max(np.max(row["attention"]) for row in attention.values())


@pytest.mark.parametrize("max_bytes", [0, 900, 2_000, 6_000, 15_000])
def test_the_data_fit_and_what_is_left_out_is_counted(
    max_bytes: int, run: tuple[RunDir, dict[str, Any]]
) -> None:
    questions = questions_of(*run)
    data = questions.data(max_bytes)
    variable = {name: data[name] for name in ("questions", "prompts", "attention")}
    text = json.dumps(variable, separators=(",", ":"), ensure_ascii=False)
    assert len(text.replace("<", "\\u003c").encode()) <= max_bytes + 60
    assert data["total"] == 24 and len(data["prompts"]) < 24
    html = questions.html(max_bytes + 16_000)
    words = " ".join(re.sub("<[^>]*>", "", html).split())
    assert f"{len(data['prompts'])} with their text here" in words
    assert f"The others: posbench show {data['run']} --id ID." in words
    if len(data["questions"]) < 24:
        assert f"of which {len(data['questions'])}, spread evenly" in words


def test_questions_that_a_method_changes_get_their_prompts_first(
    run: tuple[RunDir, dict[str, Any]],
) -> None:
    data = questions_of(*run).data(12_000)
    scores = [
        {reply[0] for reply in data["questions"][number][3]}
        for number in data["prompts"]
    ]
    places = {data["questions"][number][1] for number in data["prompts"]}
    assert places == {0, 5, 11} and scores.count({1.0}) < scores.count({0.0, 1.0})


def test_a_row_without_an_answer_is_neither_right_nor_wrong(tmp_path: Path) -> None:
    out, config = folder_of(tmp_path, KVRetrieval(pairs=4, positions=(0,), limit=2), {})
    rows = out.rows("predictions.jsonl")
    first, second, third, _ = ({**row} for row in rows)
    first |= {"scores": {}, "outcome": "cut", "reason": "ended in the thinking"}
    second["rewritten_prompt"] = "other"
    failed = {name: third[name] for name in ("method", "id")} | {"error": "timeout"}
    # The other method was not asked the second question.
    out.write_rows("predictions.jsonl", [first, second, failed])
    data = questions_of(out, config).data()
    replies = {question[0]: question[3] for question in data["questions"]}
    name = first["id"]
    cut, changed = replies[name]
    assert cut[0] is None and cut[1].startswith("cut off (ended in the thinking)")
    assert changed[0] == 1.0 and changed[3] == 1
    lost, absent = replies[third["id"]]
    assert lost[0] is None and lost[1:] == ["failed", "timeout"] and absent is None
    page = render_run(out.path).read_text()
    assert "<option>cut off (ended in the thinking)</option>" in page


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_a_long_prompt_is_an_excerpt_with_every_item(system: str) -> None:
    items = [f"<{n}>" + chr(97 + n % 26) * 900 for n in range(40)]
    text = "Read. " * 200
    spans = []
    for item in items:
        spans.append((len(text), len(text) + len(item)))
        text += item + "\n"
    text += "What is it?"
    example = Example(
        id="a",
        prompt=text,
        answers=("b",),
        gold_position=7,
        other_gold=(9,),
        items=tuple(spans),
        system=system,
        prefill="It is",
    )
    pieces, gold = prompt_pieces(example)
    assert gold == [7, 9] and len(pieces) == 2 * len(items) + 1
    for number, (piece, item) in enumerate(zip(pieces[1::2], items, strict=True)):
        head = piece.partition(CUT.rstrip())[0]
        assert item.startswith(head) and piece != item
        assert len(head) >= (200 if number in gold else 8)
    assert pieces[0].startswith(system or "Read.") and CUT in pieces[0]
    assert pieces[-1] == "\nWhat is it?It is"
    assert sum(map(len, pieces)) < 2 * MAX_PROMPT_CHARACTERS
    short = Example(id="a", prompt="x" * 99, answers=("b",))
    assert prompt_pieces(short) == (["x" * 99], [])
    disordered = Example(
        id="a", prompt="abc", answers=("b",), items=((1, 2), (0, 1)), gold_position=0
    )
    assert prompt_pieces(disordered) == (["abc"], [])


def test_a_page_of_a_run_is_small_and_whole_without_a_script(
    posbench: Callable[..., Result], small: list[str], outputs: Path
) -> None:
    result = posbench(*small)
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    page = render_run(folder).read_text()
    assert len(page.encode()) <= MAX_BYTES
    data = data_of(page)
    with open(folder / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "accuracy"]
    points = re.findall('class="point".*?aria-label="(.*?)"', page)
    at_positions = [row for row in rows if row["gold_position"] != "all"]
    assert len(points) == len(at_positions) > 0
    names = {"none": "unmodified"}
    for row in at_positions:
        method = data["methods"].index(row["method"])
        scores = [
            question[3][method][0]
            for question in data["questions"]
            if str(question[1]) == row["gold_position"]
        ]
        assert np.mean(scores) == pytest.approx(float(row["value"]))
        name = names.get(row["method"], row["method"])
        value, low, high = (
            f"{100 * float(row[column]):.1f}"
            for column in ("value", "ci_low", "ci_high")
        )
        head = f"{name}, gold position {row['gold_position']} ("
        numbers = f"accuracy {value} % [{low}, {high}], n = {row['n']}"
        assert [p for p in points if p.startswith(head) and p.endswith(numbers)]
    # Without the script: the same numbers, and some replies.
    plain = re.sub("<script.*?</script>", "", page, flags=re.DOTALL)
    assert all(point in plain for point in points) and "scored below 1" in plain
    # Nothing is loaded from anywhere.
    outside = re.sub('src="data:image[^"]*"', "", page)
    assert not re.search(
        r"""(src|href)\s*=\s*["']?(https?:|//)|@import|url\(""", outside
    )
    script = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    assert len(script) == 1
    assert not re.search(r"fetch\(|XMLHttp|import\b|https?:", script[0])
