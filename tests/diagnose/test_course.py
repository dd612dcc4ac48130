"""``posbench diagnose`` from the command line to its files, on models whose answer is known."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest

import posbench as library
from posbench.diagnose.signal import answer_signal, has_no_signal, spread_over_positions
from posbench.tasks import KVRetrieval
from tests.conftest import Result
from tests.messages import assert_line_names, assert_refused

FEW = ("task.positions=[0%,50%,100%]", "task.limit=40", "runtime.resamples=200")


@pytest.fixture
def diagnose(
    posbench: Callable[..., Result], outputs: Path
) -> Callable[..., tuple[Result, dict[str, Any]]]:
    """The verb in this process, and what its JSON file says."""

    def call(*args: str) -> tuple[Result, dict[str, Any]]:
        result = posbench("diagnose", *args)
        files = sorted(outputs.glob("diagnose/*/diagnosis.json"))
        return result, json.loads(files[-1].read_text()) if files else {}

    return call


def test_a_model_that_loses_the_middle_is_explained_and_fixed(
    posbench: Callable[..., Result],
    diagnose: Callable[..., tuple[Result, dict[str, Any]]],
    outputs: Path,
) -> None:
    result, found = diagnose("model=tiny", *FEW)
    assert result.status == 0, result.err
    assert found["verdict"] == "fixed"
    assert found["shape"]["name"] == "middle drop"
    assert set(found["source"]["named"]) == {"causal mask", "position ids"}
    # The race and its winner: both methods that help tiny raise the answer's likelihood (LPES Table 1 on tiny).
    assert found["winner"] in ("scale_channel", "layer_scaling")
    gains = {entry["name"]: entry["gain"] for entry in found["remedies"]}
    assert gains[found["winner"]]["ci_low"] > 0
    assert found["next"].startswith("posbench export ")

    # The last token sees less of a gold item in the middle, where the answers are lost.
    attention = pd.read_csv(Path(found["runs"]["attention"]) / "attention.csv")
    to_gold = attention[attention["item"] == attention["gold_position"]]
    by_position = to_gold.groupby("gold_position")["attention"].sum()
    assert by_position.iloc[1] < min(by_position.iloc[0], by_position.iloc[2])

    # Held-back questions are none of those before.
    shape = questions_of(Path(found["runs"]["shape"]))
    held_back = questions_of(Path(found["runs"]["held-back"]))
    assert shape and held_back and shape.isdisjoint(held_back)

    folder = next(outputs.glob("diagnose/*"))
    page = (folder / "report.html").read_text()
    for part in (
        "Shape",
        "Attention",
        "Source",
        "Remedies",
        "Held-back",
        "Cost",
        found["next"],
    ):
        assert part in page
    badge = ElementTree.parse(folder / "badge.svg").getroot()
    assert "fixed" in "".join(badge.itertext())
    assert_line_names(result.out, "next:", "posbench export")

    before = replies_of(outputs)
    again, found_again = diagnose("model=tiny", *FEW)
    assert again.status == 0
    for part in ("verdict", "shape", "source", "winner", "runs", "next"):
        assert found_again[part] == found[part]
    assert before == replies_of(outputs)

    # The next command is one that runs.
    command = shlex.split(found["next"])
    exported = posbench(*command[1:-1], str(outputs / "fix"), verb=True)
    assert exported.status == 0, exported.err


def replies_of(outputs: Path) -> dict[Path, bytes]:
    """The rows of every run, by its folder."""
    files = outputs.glob("*/v*/*/*.jsonl")
    return {file: file.read_bytes() for file in files}


def questions_of(folder: Path) -> set[str]:
    """Prompts of a run, by their digests."""
    lines = (folder / "predictions.jsonl").read_text().splitlines()
    return {json.loads(line)["prompt"] for line in lines}


def test_a_random_model_ends_at_the_floor(
    diagnose: Callable[..., tuple[Result, dict[str, Any]]], checkpoint: Path
) -> None:
    result, found = diagnose(f"model={checkpoint}", "task.pairs=8", *FEW)
    assert result.status == 0, result.err
    assert found["verdict"] == "cannot do the task"
    assert set(found["runs"]) <= {"pilot"} and sum(found["prompts"].values()) <= 150


def test_a_prompt_tells_a_trained_model_its_answer_and_a_blind_one_nothing(
    tiny: Any, checkpoint: Path
) -> None:
    task = KVRetrieval(
        prompt="compact", records="words", pairs=8, limit=10, max_new_tokens=1
    )
    examples = spread_over_positions(task.evaluation())
    assert len({example.question_id for example in examples}) == len(examples) == 10
    assert len({example.gold_position for example in examples}) > 1
    gain = answer_signal(tiny, task, examples)
    own = tiny.answer_token_loss(
        [
            (tiny.encode(e.prompt).ids, tiny.tokenizer(e.answers[0])["input_ids"])
            for e in examples
        ]
    )
    # Under a prompt without it an answer is about one of 72 words.
    assert gain.value > 1 and float(own.mean()) < 1
    assert not has_no_signal(gain)
    # Without attention a model sees the last token alone, which all prompts share.
    blind = library.load(str(checkpoint), dtype="float32")
    for layer in blind.model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    gain = answer_signal(blind, task, examples)
    assert has_no_signal(gain) and gain.value == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (("stages=[search]",), "stages"),
        (("study=crop_mask",), "study"),
        (("task=mmlu",), "task"),
        (("budget=soon",), "budget"),
    ],
)
def test_what_a_diagnosis_chooses_or_cannot_ask_is_refused(
    posbench: Callable[..., Result], outputs: Path, args: tuple[str, ...], field: str
) -> None:
    result = posbench("diagnose", "model=tiny", *args)
    assert result.status == 2
    assert_refused(result.err, field)
    assert not outputs.exists()
