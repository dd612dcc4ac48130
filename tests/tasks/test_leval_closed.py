"""Prompts, files, parser and score of L-Eval's closed-ended exams. The texts here are our own, in the
benchmark's format."""

from __future__ import annotations

import json
import os
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from posbench import paths
from posbench.schema import build
from posbench.tasks import Example
from posbench.tasks.leval_closed import (
    LEvalClosed,
    gold_letters,
    letter_score,
    letters,
    true_or_false,
)
from tests.messages import line_refused, refused

REAL = Path(os.environ.get("POSBENCH_DATA", "/nowhere")) / "leval"
real = pytest.mark.skipif(
    "POSBENCH_DATA" not in os.environ,
    reason="POSBENCH_DATA names no folder of benchmark files",
)

COURSERA = {
    "input": "Apples are red. Limes are green.",
    "instructions": [
        "Question 1. Which are fruits?\nA. Apples\nB. Limes\nC. Stones\nD. Sand"
    ],
    "outputs": ["AB"],
}
QUALITY = {
    "input": "The cat slept.",
    "instructions": ["Who slept?\n\n (A) The dog \n (B) The cat "],
    "outputs": ["(B) The cat"],
}
TPO = {
    "input": "ok ,  rivers flow",
    "instructions": ["what flows\nA. rivers\nB. hills"],
    "outputs": ["A"],
}
SCI_FI = {
    "input": "On Mars they had two suns.",
    "instructions": [
        "1.\tMars has two suns, True or False? Answer this question based on the world described in the "
        "document."
    ],
    "outputs": ["True [fact: False]"],
}
SETS = {"coursera": COURSERA, "quality": QUALITY, "tpo": TPO, "sci_fi": SCI_FI}


def write(path: Path, **changed: dict[str, Any]) -> Path:
    for name, row in SETS.items():
        (path / f"{name}.jsonl").write_text(
            json.dumps({**row, **changed.get(name, {})}) + "\n"
        )
    return path


def _examples(path: Path) -> dict[str, Example]:
    return {e.subset: e for e in LEvalClosed(path=str(path)).examples("evaluation")}


def test_prompts_character_by_character(tmp_path: Path) -> None:
    shown = {
        subset: (e.system, e.prompt, e.prefill)
        for subset, e in _examples(write(tmp_path)).items()
    }
    long = "Now you are given a very long document. Please follow the instruction based on this document. "
    one = (
        long
        + "For multi-choice questions, there is only a sinlge correct option. Please only provide the "
        "letter corresponding to the answer (like A or B) when answering. For other questions, please "
        "directly give the concise and accurate answer. "
    )
    world = (
        "Now you are given a scientific fiction. I will ask you some questions and the answer should be "
        '"True" or "False". Notice that you should answer the question based on the evidence in the document '
        "instead of your background knowledge."
    )
    ending = ".  Please directly give the answer without any additional output or explanation"
    assert {prefill for _, _, prefill in shown.values()} == {"\nAnswer:"}
    assert {subset for subset, e in _examples(tmp_path).items() if not e.chat} == {
        "sci_fi_fact"
    }
    assert {subset: texts[:2] for subset, texts in shown.items()} == {
        "coursera": (
            long
            + "For multi-choice questions, there could be a sinlge correct option or multiple correct "
            "options. "
            "Please only provide the letter corresponding to the answer (like A or AB) when answering. ",
            "Document is as follows. Apples are red. Limes are green. \nQuestion: Question 1. Which are "
            "fruits?\nA. Apples\n"
            "B. Limes\nC. Stones\nD. Sand" + ending,
        ),
        "quality": (
            one,
            "Document is as follows. The cat slept. \nQuestion: Who slept?\n\n (A) The dog \n (B) The cat "
            + ending,
        ),
        "tpo": (
            one,
            "Document is as follows. ok ,  rivers flow \nQuestion: what flows\nA. rivers\nB. hills"
            + ending,
        ),
        "sci_fi_loyalty": (
            world,
            "Document is as follows. On Mars they had two suns. \nQuestion: 1.\tMars has two suns, True or "
            "False? "
            "Answer this question based on the world described in the document."
            + ending,
        ),
        "sci_fi_fact": (
            "",
            "1.\tMars has two suns, True or False? Answer this question "
            "based on the real-world knowledge and facts up until your last trainingPlease directly answer "
            "without any additional output or explanation. ",
        ),
    }


def test_the_span_to_cut_is_the_document(tmp_path: Path) -> None:
    for subset, example in _examples(write(tmp_path)).items():
        if subset == "sci_fi_fact":
            assert example.document is None
        else:
            start, end = example.document or (0, 0)
            assert (
                example.prompt[start:end]
                == SETS[subset.removesuffix("_loyalty")]["input"]
            )


def test_sci_fi_asks_twice_and_counts_once(tmp_path: Path) -> None:
    task = LEvalClosed(path=str(write(tmp_path)), subsets=("sci_fi", "tpo"))
    story, world, _ = task.examples("evaluation")
    assert (story.answers, world.answers) == (("true",), ("false",))
    assert story.cluster == world.cluster != "" and story.id != world.id
    assert task.averages() == {
        "sci_fi": ("sci_fi_loyalty", "sci_fi_fact"),
        "all": ("sci_fi", "tpo"),
    }
    assert LEvalClosed(subsets=("tpo",)).averages() == {"all": ("tpo",)}
    assert task.score(story, "The answer is True, not false.") == {"score": 1.0}
    assert task.score(world, "True") == task.score(world, "no idea") == {"score": 0.0}


def test_a_zip_holds_the_same(tmp_path: Path) -> None:
    write(tmp_path)
    with zipfile.ZipFile(tmp_path / "exams.zip", "w") as packed:
        for name in SETS:
            packed.write(tmp_path / f"{name}.jsonl", f"{name}.jsonl")
    assert _examples(tmp_path / "exams.zip") == _examples(tmp_path)


def test_there_is_no_calibration(tmp_path: Path) -> None:
    with refused(
        "stages",
        "search",
        allowed="leval_closed",
        hint=("task=kv_retrieval", "method=from:RUN"),
    ):
        LEvalClosed(path=str(write(tmp_path))).examples("calibration")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tpo": {"input": ""}}, ("input",)),
        ({"tpo": {"instructions": "what"}}, ("instructions", "list")),
        ({"tpo": {"outputs": []}}, ("outputs", "list")),
        ({"tpo": {"outputs": ["A", "B"]}}, ("instructions", "outputs", "length")),
        ({"tpo": {"outputs": [3]}}, ("instructions", "outputs", "str")),
        ({"quality": {"outputs": ["the cat"]}}, ("outputs", "A", "D", "the cat")),
        ({"sci_fi": {"outputs": ["True"]}}, ("outputs", "[fact: False]", "True")),
    ],
)
def test_a_malformed_line_is_named(
    change: dict[str, Any], named: tuple[str, ...], tmp_path: Path
) -> None:
    (subset,) = change
    with line_refused(tmp_path / f"{subset}.jsonl", 1, *named):
        _examples(write(tmp_path, **change))


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with refused(
        "task.path",
        str(tmp_path),
        allowed=(".zip", "coursera.jsonl"),
        hint=("github.com/OpenLMLab/LEval", "task.path=null"),
    ):
        _examples(tmp_path)
    write(tmp_path)
    (tmp_path / "quality.jsonl").write_text('{"input": NaN}\n')
    with refused(
        f"task.path: {tmp_path / 'quality.jsonl'}, line 1",
        "",
        allowed=("JSON object", "NaN"),
        hint="line",
    ):
        _examples(tmp_path)


@pytest.mark.parametrize("subsets", [(), ("tpo", "tpo")])
def test_subsets_are_named_once(subsets: Any) -> None:
    with refused(
        "task.subsets",
        list(subsets),
        allowed=("coursera", "quality", "tpo", "sci_fi"),
        hint="task.subsets=[coursera]",
    ):
        LEvalClosed(subsets=subsets)


@pytest.mark.parametrize(
    ("reply", "several", "read"),
    [
        ("", True, "None"),
        (" \n", False, "None"),
        ("BC", True, "BC"),
        ("BC", False, "BC"),
        ("Based on the text, C", False, "B"),
        ("no capital here", False, "A"),
        ("no capital here", True, "A"),
        ("DBB is right", True, "BD"),
        ("B. Limes", True, "B"),
        ("The answer is A. Apples and C) Stones", True, "AC"),
        ("The answer is C.\nQuestion 2: A. no", True, "C"),
        ("Both", True, "B"),
        ("it is ADB.", True, "B"),
        ("it is ADBut", True, "ADB"),
        # White space at the beginning stays, and nothing behind the word Question is looked at.
        (" AB.", True, "B"),
        (" AB", True, "AB"),
        ("\nBC", True, "BC"),
        ("Question 3. The answer is B", True, "A"),
        ("A)", True, "A"),
        (" AB.", False, "A"),
    ],
)
def test_letters_by_hand(reply: str, several: bool, read: str) -> None:
    assert letters(reply, several=several) == read


def test_partial_credit_by_hand() -> None:
    told = {
        "ABD": 1,
        "AB": 0.25,
        "D": 0.25,
        "ADB": 0.25,
        "DD": 0.25,
        "ABC": 0,
        "ABCD": 0,
        "C": 0,
        "None": 0,
    }
    assert {p: letter_score(p, "ABD") for p in told} == told
    assert [gold_letters(t) for t in ("(B) At last", "AB", "C", "none", "")] == [
        "B",
        "AB",
        "C",
        "A",
        "A",
    ]
    told = {
        "It is FALSE. True?": "false",
        "Truest": "true",
        "maybe": "",
        "False/true": "true",
    }
    assert {reply: true_or_false(reply) for reply in told} == told


@real
@pytest.mark.parametrize(
    "file", sorted(p.name for p in (REAL / "scored_predictions").glob("*.jsonl"))
)
def test_the_official_scores(file: str) -> None:
    """Every reply of two models: the letters read, the gold letters, the score, and the published means."""
    lines = [
        json.loads(line)
        for line in (REAL / "scored_predictions" / file).read_text().splitlines()
    ]
    subset = file.split("_")[1].removesuffix(".jsonl")
    task = LEvalClosed()
    total = 0.0
    for row in lines:
        assert (
            letters(row["prediction"], several=subset == "coursera")
            == row["parsed_prediction"]
        )
        assert gold_letters(row["gt"]) == row["parsed_gt"]
        example = Example(
            id="x", prompt="", answers=(gold_letters(row["gt"]),), subset=subset
        )
        assert task.score(example, row["prediction"]) == {
            "score": row["official_score"]
        }
        total += row["official_score"]
    published = {
        "turbo-16k-0613_coursera": 63.52,
        "turbo-16k-0613_quality": 61.39,
        "turbo-16k-0613_tpo": 78.44,
    }
    if file.removesuffix(".jsonl") in published:
        assert (
            round(100 * total / len(lines), 2) == published[file.removesuffix(".jsonl")]
        )


@real
def test_the_official_files() -> None:
    examples = LEvalClosed(path=str(REAL)).examples("evaluation")
    assert Counter(e.subset for e in examples) == {
        "coursera": 172,
        "quality": 202,
        "tpo": 269,
        "sci_fi_loyalty": 64,
        "sci_fi_fact": 64,
    }
    assert len({e.id for e in examples}) == len(examples)
    sys = json.loads(
        (REAL / "scored_predictions/turbo-16k-0613_tpo.jsonl")
        .read_text()
        .splitlines()[0]
    )["prompt_template"]
    assert sys.startswith(next(e.system for e in examples if e.subset == "tpo"))


@real
def test_the_checksums_are_those_of_the_official_files() -> None:
    import hashlib

    for source in LEvalClosed().files():
        assert (
            hashlib.sha256(
                (REAL / source.id.rpartition("/")[2]).read_bytes()
            ).hexdigest()
            == source.sha256
        )


def test_the_defaults_of_the_yaml_are_those_of_the_class() -> None:
    given = OmegaConf.to_container(
        OmegaConf.load(paths.CONF / "task/leval_closed.yaml"), resolve=True
    )
    assert (
        isinstance(given, dict)
        and given.pop("_target_") == "posbench.tasks.leval_closed.LEvalClosed"
    )
    assert (
        build(LEvalClosed, {str(k): v for k, v in given.items()}, "task")
        == LEvalClosed()
    )


def test_the_defaults_are_the_exams_of_table_13_of_lpes() -> None:
    """Three of multiple choice and one of true and false, a right answer counts 1 and a wrong one 0."""
    task = LEvalClosed()
    told = {"sci_fi_loyalty": ("true", "false")}
    assert task.subsets == ("coursera", "quality", "tpo", "sci_fi")
    for subset in (*task.subsets[:3], "sci_fi_loyalty"):
        gold, wrong = told.get(subset, ("B", "C"))
        asked = Example(id="q", prompt="", answers=(gold,), subset=subset)
        assert [task.score(asked, reply)["score"] for reply in (gold, wrong)] == [1, 0]
