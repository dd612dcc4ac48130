"""ZeroSCROLLS: prompts character by character, references, scores, the leaderboard's file, and every
malformed line."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posbench.pipeline.compose import compose_one
from posbench.schema import build
from posbench.stats.scores import Tabulator
from posbench.tasks.base import Example
from posbench.tasks.zero_scrolls import LPES, NEW_TOKENS, ZeroSCROLLS
from tests.messages import Tokens, line_refused, refused

QASPER = (
    "You are given a scientific article and a question. Answer the question as concisely as you can, using "
    "a single phrase or "
    "sentence if possible. If the question cannot be answered based on the information in the article, write "
    '"unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable".'
)
OUTPUTS = {"quality": "B", "space_digest": "50%", "book_sum_sort": "2, 3, 1"}


def row(subset: str, *, instruction: str = QASPER, **changed: Any) -> dict[str, Any]:
    """A line in the official form, about a document of one sentence."""
    parts = [
        f"{instruction}\n\nArticle:\n",
        "The sky is blue.\n\nSo is the sea.",
        "\n\n",
        "Question:\nWhat is blue?",
        "\n\nAnswer:\n",
    ]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    row = {
        "id": "q1",
        "pid": "q1_0",
        "input": "".join(parts),
        "output": OUTPUTS.get(subset, "the sky"),
        "document_start_index": ends[0],
        "document_end_index": ends[1],
        "query_start_index": ends[2],
        "query_end_index": ends[3],
        "truncation_seperator": "... [The rest of the article is omitted]\n\n",
    }
    return {key: value for key, value in {**row, **changed}.items() if value is not ...}


def write(
    folder: Path, subset: str, *rows: dict[str, Any], split: str = "validation"
) -> Path:
    file = folder / subset / f"{split}.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _one(folder: Path, subset: str, *rows: dict[str, Any], **options: Any) -> Example:
    write(folder, subset, *(rows or (row(subset),)))
    (example,) = ZeroSCROLLS(
        subsets=(subset,), path=str(folder), **options
    ).evaluation()
    return example


def _asked(subset: str, *answers: str) -> Example:
    return Example(id="x", prompt="", answers=answers, subset=subset)


def test_the_prompt_of_a_chat_model_character_by_character(tmp_path: Path) -> None:
    example = _one(tmp_path, "qasper")
    assert example.prompt == (
        "You are given a scientific article and a question. Answer the question as concisely as you can, "
        "using a single phrase "
        "or sentence if possible. If the question cannot be answered based on the information in the "
        "article, write "
        '"unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable". '
        "Do not provide any explanation.\n"
        "\n"
        "Article:\n"
        "The sky is blue.\n"
        "\n"
        "So is the sea.\n"
        "\n"
        "Question:\n"
        "What is blue?"
    )
    assert (
        example.chat and example.id == "qasper-q1" and example.answers == ("the sky",)
    )


def test_the_prompt_of_other_models_is_the_files_input(tmp_path: Path) -> None:
    example = _one(tmp_path, "qasper", chat_format=False)
    assert example.prompt == (
        "You are given a scientific article and a question. Answer the question as concisely as you can, "
        "using a single phrase "
        "or sentence if possible. If the question cannot be answered based on the information in the "
        "article, write "
        '"unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable".\n'
        "\n"
        "Article:\n"
        "The sky is blue.\n"
        "\n"
        "So is the sea.\n"
        "\n"
        "Question:\n"
        "What is blue?\n"
        "\n"
        "Answer:\n"
    )
    assert not example.chat


@pytest.mark.parametrize(
    "subset", ["gov_report", "summ_screen_fd", "qmsum", "squality"]
)
def test_summaries_are_not_asked_to_leave_out_explanations(
    subset: str, tmp_path: Path
) -> None:
    assert _one(tmp_path, subset, row(subset, instruction="Summarize.")).prompt == (
        "Summarize.\n\nArticle:\nThe sky is blue.\n\nSo is the sea.\n\nQuestion:\nWhat is blue?"
    )


@pytest.mark.parametrize("chat", [True, False])
def test_cutting_the_document_leaves_instruction_separator_and_query(
    chat: bool, tmp_path: Path
) -> None:
    example = _one(tmp_path, "qasper", chat_format=chat)
    assert example.document
    start, end = example.document
    cut = (
        example.prompt[: start + len("The sky is")]
        + example.separator
        + example.prompt[end:]
    )
    request = " Do not provide any explanation." if chat else ""
    header = "" if chat else "\n\nAnswer:\n"
    assert cut == (
        f"{QASPER}{request}\n\nArticle:\nThe sky is... [The rest of the article is "
        f"omitted]\n\nQuestion:\nWhat is blue?{header}"
    )
    assert ZeroSCROLLS().truncation == "document"


def test_tokens_to_generate(tmp_path: Path) -> None:
    numbers = {subset: _one(tmp_path, subset).max_new_tokens for subset in NEW_TOKENS}
    assert numbers == {
        "gov_report": 512,
        "summ_screen_fd": 512,
        "qmsum": 512,
        "squality": 512,
        "qasper": 128,
        "narrative_qa": 64,
        "quality": 10,
        "musique": 32,
        "space_digest": 36,
        "book_sum_sort": 256,
    }
    assert _one(tmp_path, "gov_report", max_new_tokens=1024).max_new_tokens == 1024
    assert LPES == (
        "gov_report",
        "summ_screen_fd",
        "qmsum",
        "squality",
        "qasper",
        "narrative_qa",
        "space_digest",
    )


def test_rows_with_one_id_are_references_of_one_example(tmp_path: Path) -> None:
    rows = [
        row("qasper"),
        row("qasper", id="q2", output="sea"),
        row("qasper", pid="q1_1", output="blue sea"),
    ]
    write(tmp_path, "qasper", *rows)
    first, second = ZeroSCROLLS(subsets=("qasper",), path=str(tmp_path)).evaluation()
    assert (first.answers, second.answers) == (("the sky", "blue sea"), ("sea",))
    assert ZeroSCROLLS().score(first, "The blue sea") == {"score": 1.0}


def test_a_zip_is_its_folder(tmp_path: Path) -> None:
    write(tmp_path, "qasper", row("qasper"))
    task = ZeroSCROLLS(subsets=("qasper",), path=str(tmp_path))
    expected = task.evaluation()
    with zipfile.ZipFile(tmp_path / "qasper.zip", "w") as packed:
        packed.write(tmp_path / "qasper/validation.jsonl", "qasper/validation.jsonl")
    (tmp_path / "qasper/validation.jsonl").unlink()
    assert task.evaluation() == expected
    (source,) = ZeroSCROLLS(subsets=("qasper", "qmsum")).files()
    assert (source.kind, source.id, source.files) == (
        "dataset",
        "tau/zero_scrolls",
        ("qasper.zip", "qmsum.zip"),
    )


def test_summaries_take_the_best_of_each_rouge() -> None:
    """One by one: of two references, the first may give ROUGE-1 and the second ROUGE-2."""
    one, other, both = (
        ZeroSCROLLS().score(_asked("qmsum", *gold), "a b c")
        for gold in (["a b d"], ["b c"], ["a b d", "b c"])
    )
    assert (one["rouge1"], one["rouge2"], one["rougeL"]) == pytest.approx(
        (2 / 3, 1 / 2, 2 / 3)
    )
    assert one["score"] == pytest.approx((2 / 3 * 1 / 2 * 2 / 3) ** (1 / 3))
    assert (other["rouge1"], other["rouge2"], other["rougeL"]) == pytest.approx(
        (4 / 5, 2 / 3, 4 / 5)
    )
    assert both == pytest.approx(other)
    mixed = ZeroSCROLLS().score(_asked("qmsum", "c b a", "a b"), "a b c")
    assert (mixed["rouge1"], mixed["rouge2"]) == pytest.approx((1, 2 / 3))


def test_the_defaults_are_the_data_sets_of_table_14_of_lpes() -> None:
    """Four scored by ROUGE, two by F1, one by exponential similarity: 30 % and 50 % are two tenths apart."""
    task = ZeroSCROLLS()
    half = {"space_digest": ("50%", "30%", 0.25), "qasper": ("blue sea", "blue", 2 / 3)}
    summaries = {"gov_report", "summ_screen_fd", "qmsum", "squality"}
    assert set(task.subsets) == summaries | {"qasper", "narrative_qa", "space_digest"}
    for subset in task.subsets:
        gold, reply, score = half.get(subset, half["qasper"])
        found = task.score(
            Example(id="q", prompt="", answers=(gold,), subset=subset), reply
        )
        assert ("rouge1" in found) == (subset in summaries)
        assert subset in summaries or found["score"] == pytest.approx(score)


def test_the_two_readings_of_a_rouge_total() -> None:
    """Replies with ROUGE (1, 1, 1) and (1, 0, 1/3) against mean ROUGEs of 1, 1/2, 2/3."""
    task = ZeroSCROLLS()
    scores = [
        task.score(_asked("qmsum", "a b c"), reply) for reply in ("a b c", "c b a")
    ]
    assert [s["score"] for s in scores] == pytest.approx([1, 0])
    means = {name: np.array([np.mean([s[name] for s in scores])]) for name in scores[0]}
    assert task.total("qmsum", means) == pytest.approx((1 * 1 / 2 * 2 / 3) ** (1 / 3))
    assert ZeroSCROLLS(rouge="example").total("qmsum", means) == pytest.approx(0.5)
    assert task.total("qasper", {"score": np.array([0.25])}) == pytest.approx(0.25)


def test_the_benchmarks_number_is_the_mean_of_the_tasks_totals() -> None:
    """qmsum as above, the cube root of 1/3; qasper one right of three: their plain mean, whatever their
    sizes."""
    task = ZeroSCROLLS(subsets=("qmsum", "qasper"))
    said = [
        ("qmsum", "a b c", "a b c"),
        ("qmsum", "a b c", "c b a"),
        *(("qasper", "x", reply) for reply in "xyz"),
    ]
    rows = [
        {
            "method": "none",
            "id": str(n),
            "subset": subset,
            "gold_position": None,
            "cluster": "",
            "scores": task.score(e, reply),
        }
        for n, (subset, e, reply) in enumerate(
            (subset, _asked(subset, gold), reply) for subset, gold, reply in said
        )
    ]
    frame = Tabulator(
        task=task, model="m", unmodified="none", resamples=10, seed=0
    ).subsets(rows)
    value = frame[frame["metric"] == "score"].set_index("subset")["value"]
    assert value["qmsum"] == pytest.approx((1 / 3) ** (1 / 3)) and value[
        "qasper"
    ] == pytest.approx(1 / 3)
    assert value["all"] == pytest.approx(((1 / 3) ** (1 / 3) + 1 / 3) / 2)


@pytest.mark.parametrize(
    ("subset", "gold", "reply", "score"),
    [
        ("qasper", "Café au lait", "the cafe", 0.5),  # 1/1 and 1/3
        ("narrative_qa", "yes", "Yes.", 1),
        ("musique", "Rome", "Paris", 0),
        ("quality", "(B) Rome", "Answer: B", 1),
        ("quality", "B", "Both", 0),
        ("space_digest", "50%", "40%", 0.5),
        ("space_digest", "50%", "half", 0),
        ("book_sum_sort", "2, 3, 1", "2, 1, 3", 2 / 3),
    ],
)
def test_scores_by_hand(subset: str, gold: str, reply: str, score: float) -> None:
    assert ZeroSCROLLS().score(_asked(subset, gold), reply) == {
        "score": pytest.approx(score)
    }


def test_test_questions_are_not_scored_but_handed_in(tmp_path: Path) -> None:
    for subset in ("qasper", "qmsum"):
        write(tmp_path, subset, row(subset, output=None), split="test")
    task = ZeroSCROLLS(subsets=("qmsum", "qasper"), path=str(tmp_path), split="test")
    examples = task.evaluation()
    assert [e.answers for e in examples] == [(), ()] and task.score(
        examples[0], "x"
    ) == {}
    texts = ['a "quoted", text\nof two lines', "NA"]
    files = task.submission(list(zip(examples, texts, strict=True)))
    read = list(csv.reader(io.StringIO(files["zero_scrolls_predictions.csv"])))
    assert list(files) == ["zero_scrolls_predictions.csv"]
    assert read == [
        ["Task", "ID", "Prediction"],
        ["qmsum", "q1", texts[0]],
        ["qasper", "q1", texts[1]],
    ]
    assert ZeroSCROLLS().submission(list(zip(examples, texts, strict=True))) == {}


@pytest.mark.parametrize(
    ("subset", "changed", "named"),
    [
        ("qasper", {"id": ...}, ('"id"',)),
        ("qasper", {"input": ""}, ('"input"',)),
        ("qasper", {"input": "short"}, ("document_start_index", "5")),
        ("qasper", {"output": None}, ("output",)),
        ("quality", {"output": "none"}, ("output", "letter")),
        ("space_digest", {"output": "half"}, ("output", "percentage")),
        ("book_sum_sort", {"output": "1, 1, 2"}, ("output", "different")),
        ("qasper", {"document_start_index": "3"}, ("document_start_index",)),
        ("qasper", {"document_start_index": -1}, ("0 <= document_start_index",)),
        ("qasper", {"query_start_index": 3}, ("document_start_index", "<=")),
        ("qasper", {"query_end_index": ...}, ("query_end_index",)),
        ("qasper", {"truncation_seperator": ...}, ("truncation_seperator",)),
        ("qasper", {"document_start_index": 3}, ("instruction", "line")),
        (
            "qasper",
            {"id": "q1", "input": row("qasper")["input"].replace("sky", "sun")},
            ('"input"', '"id" q1'),
        ),
    ],
)
def test_a_malformed_line_is_named(
    subset: str, changed: dict[str, Any], named: tuple[str, ...], tmp_path: Path
) -> None:
    write(tmp_path, subset, row(subset), row(subset, **{"id": "q2", **changed}))
    with line_refused(tmp_path / subset / "validation.jsonl", 2, *named):
        ZeroSCROLLS(subsets=(subset,), path=str(tmp_path)).evaluation()


def test_missing_and_torn_files(tmp_path: Path) -> None:
    task = ZeroSCROLLS(subsets=("qasper",), path=str(tmp_path))
    with refused(
        "task.path",
        str(tmp_path),
        allowed="qasper/validation.jsonl",
        hint=("qasper.zip", "hf.co/datasets/tau/zero_scrolls"),
    ):
        task.evaluation()
    (tmp_path / "qasper.zip").write_bytes(b"PK torn")
    with refused("task.path", str(tmp_path / "qasper.zip"), allowed=".zip", hint="zip"):
        task.evaluation()
    write(tmp_path, "qasper").write_text('{"id": "q1"\n')
    with refused(
        f"task.path: {tmp_path / 'qasper/validation.jsonl'}, line 1",
        "",
        allowed="JSON object",
        hint="line",
    ):
        task.evaluation()


@pytest.mark.parametrize(
    ("given", "value", "allowed", "hint"),
    [
        ({"subsets": ("qaspr",)}, "qaspr", "qasper", "qasper"),
        (
            {"subsets": ("qasper", "qasper")},
            ["qasper", "qasper"],
            "once",
            "task.subsets=[gov_report]",
        ),
        ({"subsets": ()}, [], "qasper", "task.subsets=[gov_report]"),
        ({"max_new_tokens": 0}, 0, ("1", "1000000"), "task.max_new_tokens=1"),
        ({"limit": 0}, 0, ("1", "null"), "task.limit=1"),
    ],
)
def test_bad_fields(
    given: dict[str, Any], value: object, allowed: Tokens, hint: Tokens
) -> None:
    (name,) = given
    with refused(f"task.{name}", value, allowed=allowed, hint=hint):
        build(ZeroSCROLLS, given, "task")


def test_there_is_nothing_to_calibrate_on() -> None:
    with refused(
        "stages",
        "search",
        allowed="zero_scrolls",
        hint=("task=kv_retrieval", "method=from:RUN"),
    ):
        ZeroSCROLLS().examples("calibration")


@pytest.mark.parametrize(
    ("model", "tokens"), [("phi4", None), ("llama2_7b", 3584), ("vicuna_7b_16k", 15872)]
)
def test_the_yaml_has_the_defaults_of_the_class_and_models_bring_their_length(
    model: str, tokens: int | None
) -> None:
    values = compose_one("task=zero_scrolls", f"model={model}").raw["task"]
    assert values.pop("_target_") == "posbench.tasks.zero_scrolls.ZeroSCROLLS"
    assert build(ZeroSCROLLS, values, "task") == ZeroSCROLLS(max_prompt_tokens=tokens)
    assert set(values) == {field.name for field in fields(ZeroSCROLLS)}
