"""LongBench: prompts character by character, files, protocol, averages, and every malformed line."""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from posbench.pipeline.compose import compose_one
from posbench.schema import build
from posbench.tasks.base import Example
from posbench.tasks.longbench import CHINESE, ENGLISH_AND_CODE, EXTENDED, LongBench
from tests.messages import Tokens, line_refused, refused

DATA = Path(__file__).parents[1] / "data/longbench"
REAL = os.environ.get("POSBENCH_DATA", "")
CLASSES = ["City", "Country"]
ANSWERS = {
    "trec": "City",
    "lsht": "City",
    "passage_count": "7",
    "passage_retrieval_en": "Paragraph 7",
    "passage_retrieval_zh": "段落7",
}

PROMPTS_BY_HAND = {
    "narrativeqa": (
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the "
        "question "
        "asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
        "Story: <C>\n\n"
        "Now, answer the question based on the story asconcisely as you can, using a single phrase if "
        "possible. Do "
        "not provide any explanation.\n\n"
        "Question: <I>\n\n"
        "Answer:"
    ),
    "qasper": (
        "You are given a scientific article and a question. Answer the question as concisely as you can, "
        "using a "
        "single phrase or sentence if possible. If the question cannot be answered based on the "
        "information in the "
        'article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", or '
        '"unanswerable". '
        "Do not provide any explanation.\n\n"
        "Article: <C>\n\n"
        " Answer the question based on the above article as concisely as you can, using a single phrase or "
        "sentence "
        "if possible. If the question cannot be answered based on the information in the article, write "
        '"unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable". Do '
        "not provide "
        "any explanation.\n\n"
        "Question: <I>\n\n"
        "Answer:"
    ),
    "multifieldqa_en": (
        "Read the following text and answer briefly.\n\n"
        "<C>\n\n"
        "Now, answer the following question based on the above text, only give me the answer and do not "
        "output any "
        "other words.\n\n"
        "Question: <I>\n"
        "Answer:"
    ),
    "multifieldqa_zh": (
        "阅读以下文字并用中文简短回答：\n\n"
        "<C>\n\n"
        "现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n"
        "问题：<I>\n"
        "回答："
    ),
    "hotpotqa": (
        "Answer the question based on the given passages. Only give me the answer and do not output any "
        "other words.\n\n"
        "The following are given passages.\n"
        "<C>\n\n"
        "Answer the question based on the given passages. Only give me the answer and do not output any "
        "other words.\n\n"
        "Question: <I>\n"
        "Answer:"
    ),
    "2wikimqa": (
        "Answer the question based on the given passages. Only give me the answer and do not output any "
        "other words.\n\n"
        "The following are given passages.\n"
        "<C>\n\n"
        "Answer the question based on the given passages. Only give me the answer and do not output any "
        "other words.\n\n"
        "Question: <I>\n"
        "Answer:"
    ),
    "musique": (
        "Answer the question based on the given passages. Only give me the answer and do not output any "
        "other words.\n\n"
        "The following are given passages.\n"
        "<C>\n\n"
        "Answer the question based on the given passages. Only give me the answer and do not output any "
        "other words.\n\n"
        "Question: <I>\n"
        "Answer:"
    ),
    "dureader": (
        "请基于给定的文章回答下述问题。\n\n文章：<C>\n\n请基于上述文章回答下面的问题。\n\n问题：<I>\n回答："
    ),
    "gov_report": (
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n"
        "<C>\n\n"
        "Now, write a one-page summary of the report.\n\n"
        "Summary:"
    ),
    "qmsum": (
        "You are given a meeting transcript and a query containing a question or instruction. Answer the "
        "query in "
        "one or more sentences.\n\n"
        "Transcript:\n"
        "<C>\n\n"
        "Now, answer the query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: <I>\n"
        "Answer:"
    ),
    "multi_news": (
        "You are given several news passages. Write a one-page summary of all news. \n\n"
        "News:\n"
        "<C>\n\n"
        "Now, write a one-page summary of all the news.\n\n"
        "Summary:"
    ),
    "vcsum": (
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n<C>\n\n会议总结："
    ),
    "trec": (
        "Please determine the type of the question below. Here are some examples of questions.\n\n<C>\n<I>"
    ),
    "triviaqa": (
        "Answer the question based on the given passage. Only give me the answer and do not output any "
        "other words. "
        "The following are some examples.\n\n"
        "<C>\n\n"
        "<I>"
    ),
    "samsum": (
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n<C>\n\n<I>"
    ),
    "lsht": ("请判断给定新闻的类别，下面是一些例子。\n\n<C>\n<I>"),
    "passage_count": (
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please "
        "carefully "
        "read these paragraphs and determine how many unique paragraphs there are after removing "
        "duplicates. In "
        "other words, how many non-repeating paragraphs are there in total?\n\n"
        "<C>\n\n"
        "Please enter the final count of unique paragraphs after removing duplicates. The output format "
        "should only "
        "contain the number, such as 1, 2, 3, and so on.\n\n"
        "The final answer is: "
    ),
    "passage_retrieval_en": (
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the "
        "abstract is from.\n\n"
        "<C>\n\n"
        "The following is an abstract.\n\n"
        "<I>\n\n"
        "Please enter the number of the paragraph that the abstract is from. The answer format must be like "
        '"Paragraph 1", "Paragraph 2", etc.\n\n'
        "The answer is: "
    ),
    "passage_retrieval_zh": (
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n"
        "<C>\n\n"
        "下面是一个摘要\n\n"
        "<I>\n\n"
        '请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n'
        "答案是："
    ),
    "lcc": ("Please complete the code given below. \n<C>Next line of code:\n"),
    "repobench-p": (
        "Please complete the code given below. \n<C><I>Next line of code:\n"
    ),
}


def row(task: str, **changed: Any) -> dict[str, Any]:
    """A line in the official form."""
    row = {
        "input": "<I>",
        "context": "<C>",
        "answers": [ANSWERS.get(task, "gold")],
        "length": 3,
        "dataset": task,
        "language": "en",
        "all_classes": CLASSES if task in ("trec", "lsht") else None,
        "_id": "0",
    }
    return {key: value for key, value in {**row, **changed}.items() if value is not ...}


def write(
    folder: Path, task: str, *rows: dict[str, Any], extended: bool = False
) -> Path:
    file = folder / f"{task}{'_e' if extended else ''}.jsonl"
    file.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        encoding="utf-8",
    )
    return file


def _one(folder: Path, task: str, **options: Any) -> Example:
    write(folder, task, row(task))
    (example,) = LongBench(subsets=(task,), path=str(folder), **options).evaluation()
    return example


@pytest.mark.parametrize("task", PROMPTS_BY_HAND)
def test_prompts_character_by_character(task: str, tmp_path: Path) -> None:
    assert _one(tmp_path, task).prompt == PROMPTS_BY_HAND[task]


def test_braces_in_a_text_are_text(tmp_path: Path) -> None:
    write(tmp_path, "lcc", row("lcc", input="", context="f'{x}' {input} {{}}"))
    (example,) = LongBench(subsets=("lcc",), path=str(tmp_path)).evaluation()
    assert (
        example.prompt
        == "Please complete the code given below. \nf'{x}' {input} {{}}Next line of code:\n"
    )


def test_protocol_of_every_task(tmp_path: Path) -> None:
    short = {
        "hotpotqa",
        "2wikimqa",
        "musique",
        "triviaqa",
        "passage_count",
        "passage_retrieval_en",
        "passage_retrieval_zh",
    }
    tokens = {
        **dict.fromkeys(short, 32),
        **dict.fromkeys(("narrativeqa", "qasper", "dureader", "samsum"), 128),
        **dict.fromkeys(("gov_report", "qmsum", "multi_news", "vcsum"), 512),
    }
    for task in PROMPTS_BY_HAND:
        example = _one(tmp_path, task)
        assert example.max_new_tokens == tokens.get(task, 64), task
        assert example.chat == (
            task not in {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
        ), task
        assert (example.stop, example.min_new_tokens) == (
            (("\n",), 1) if task == "samsum" else ((), 0)
        ), task
        yu = _one(tmp_path, task, protocol="yu")
        assert (yu.stop, yu.min_new_tokens) == ((), 1) and yu.prompt == example.prompt
        assert (example.id, example.subset) == (f"{task}-0", task)
    assert _one(tmp_path, "gov_report", max_new_tokens=100).max_new_tokens == 100
    assert _one(tmp_path, "trec", max_new_tokens=100).max_new_tokens == 64
    assert LongBench().truncation == "middle"


def test_the_tasks_of_yu_are_14_english_ones_and_2_of_code() -> None:
    assert (
        len(ENGLISH_AND_CODE) == 16
        and len(CHINESE) == 5
        and {*ENGLISH_AND_CODE, *CHINESE} == set(PROMPTS_BY_HAND)
    )
    assert set(EXTENDED) < set(ENGLISH_AND_CODE) and len(EXTENDED) == 13


def test_real_lines() -> None:
    task = LongBench(
        subsets=("multi_news", "multifieldqa_zh", "passage_retrieval_zh"),
        path=str(DATA),
    )
    examples = task.evaluation()
    assert [e.subset for e in examples] == [
        name for name in task.subsets for _ in range(2)
    ]
    for example in examples:
        file = DATA / f"{example.subset}.jsonl"
        row = next(
            r
            for r in map(json.loads, file.read_text().splitlines())
            if example.id == f"{example.subset}-{r['_id']}"
        )
        assert (
            row["context"] in example.prompt
            and row["input"] in example.prompt
            and example.answers == tuple(row["answers"])
        )
        for answer in example.answers:
            # ROUGE ends at 1 - 5e-9, as the package adds 1e-8 to the denominator.
            assert task.score(example, answer)["score"] == pytest.approx(1, abs=1e-8)
        assert task.score(example, "") == {"score": 0.0}
    assert (
        len(LongBench(subsets=task.subsets, path=str(DATA), limit=1).evaluation()) == 3
    )


def test_a_zip_is_its_folder(tmp_path: Path) -> None:
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for file in DATA.glob("*.jsonl"):
            packed.write(file, f"data/{file.name}")
    tasks = ("multi_news", "passage_retrieval_zh")
    plain_folder, folder, file = (
        LongBench(subsets=tasks, path=str(p)).evaluation()
        for p in (DATA, tmp_path, archive)
    )
    assert plain_folder == folder == file and len(file) == 4


def test_the_first_line_of_few_shot_replies_counts() -> None:
    task = LongBench()
    question = Example(
        id="x",
        prompt="",
        answers=("gold",),
        subset="triviaqa",
        meta={"task": "triviaqa"},
    )
    assert task.score(question, "\n\ngold\nQuestion: another one") == {"score": 1.0}
    assert task.score(question, "no\ngold") == {"score": 0.0}
    # The same reply in a task that reads all of it: 1 word of 4.
    whole = Example(
        id="x", prompt="", answers=("gold",), subset="qasper", meta={"task": "qasper"}
    )
    assert task.score(whole, "\n\ngold\nQuestion: another one")[
        "score"
    ] == pytest.approx(2 / 5)
    kind = Example(
        id="x",
        prompt="",
        answers=("City",),
        subset="trec",
        meta={"task": "trec", "all_classes": CLASSES},
    )
    assert task.score(kind, "City\nType: Country") == {"score": 1.0}


def test_what_stripping_changes() -> None:
    """A space before the line break hides the first line from the official program; an indent is part of a
    line of code."""
    question = Example(
        id="x",
        prompt="",
        answers=("gold",),
        subset="triviaqa",
        meta={"task": "triviaqa"},
    )
    code = Example(
        id="x", prompt="", answers=("    x = 1",), subset="lcc", meta={"task": "lcc"}
    )
    official = LongBench()
    yu = LongBench(protocol="yu")
    assert (official.score(question, " \ngold"), yu.score(question, " \ngold")) == (
        {"score": 0.0},
        {"score": 1.0},
    )
    assert (official.score(code, "    x = 1\n"), yu.score(code, "    x = 1\n")) == (
        {"score": 1.0},
        {"score": 0.71},
    )


def test_the_best_gold_text_counts() -> None:
    example = Example(
        id="x",
        prompt="",
        answers=("a city", "b", "c d"),
        subset="qasper",
        meta={"task": "qasper"},
    )
    assert LongBench().score(example, "c")["score"] == pytest.approx(2 / 3)


def test_averages_are_categories_of_the_chosen_tasks() -> None:
    averages = LongBench().averages()
    assert averages["few_shot"] == ("trec", "triviaqa", "samsum") and averages[
        "code"
    ] == (
        "lcc",
        "repobench-p",
    )
    six = (
        "single_doc_qa",
        "multi_doc_qa",
        "summarization",
        "few_shot",
        "synthetic",
        "code",
    )
    assert averages["categories"] == six and len(averages) == 7
    assert LongBench(subsets=("lsht", "lcc")).averages() == {
        "few_shot": ("lsht",),
        "code": ("lcc",),
        "categories": ("few_shot", "code"),
    }
    assert LongBench.average == "subsets"


def test_longbench_e_by_length(tmp_path: Path) -> None:
    lengths = (0, 3999, 4000, 7999, 8000)
    write(
        tmp_path,
        "qasper",
        *(row("qasper", _id=str(n), length=n) for n in lengths),
        extended=True,
    )
    task = LongBench(
        subsets=("narrativeqa", "qasper"), path=str(tmp_path), extended=True
    )
    buckets = ["0-4k", "0-4k", "4-8k", "4-8k", "8k+"]
    assert [e.subset for e in task.evaluation()] == [
        f"qasper/{bucket}" for bucket in buckets
    ]
    assert task.averages() == {
        bucket: (f"qasper/{bucket}",) for bucket in ("0-4k", "4-8k", "8k+")
    }
    with refused("task.subsets", "narrativeqa", allowed="qasper"):
        LongBench(subsets=("narrativeqa",), extended=True)


def test_the_official_files_have_their_numbers_of_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as packed:
        for task, count in {
            "qasper": 200,
            "lcc": 500,
            "multifieldqa_en": 150,
            "trec": 199,
        }.items():
            packed.writestr(
                f"data/{task}.jsonl",
                "".join(json.dumps(row(task, _id=str(n))) + "\n" for n in range(count)),
            )
    monkeypatch.setattr("posbench.tasks.base.local", lambda source: tmp_path)
    (source,) = LongBench().files()
    assert (source.kind, source.id, source.files) == (
        "dataset",
        "THUDM/LongBench",
        ("data.zip",),
    )
    assert (
        len(LongBench(subsets=("qasper", "lcc", "multifieldqa_en")).evaluation()) == 850
    )
    with refused(
        "task.path",
        f"{tmp_path / 'data.zip'}:data/trec.jsonl with 199 rows",
        allowed="200 rows",
        hint="posbench fetch",
    ):
        LongBench(subsets=("trec",)).evaluation()


@pytest.mark.parametrize(
    ("task", "changed", "named"),
    [
        ("qasper", {"context": ...}, ("context",)),
        ("qasper", {"context": ""}, ("context",)),
        ("qasper", {"input": ...}, ("input",)),
        ("qasper", {"input": ""}, ("input",)),
        ("lcc", {"input": None}, ("input",)),
        ("qasper", {"answers": []}, ("answers",)),
        ("qasper", {"answers": "gold"}, ("answers",)),
        ("qasper", {"answers": ["gold", 3]}, ("answers",)),
        ("passage_retrieval_en", {"answers": ["7"]}, ("answers", "Paragraph")),
        ("passage_retrieval_zh", {"answers": ["Paragraph 7"]}, ("answers", "段落")),
        ("passage_count", {"answers": ["seven"]}, ("answers",)),
        ("trec", {"all_classes": None}, ("all_classes",)),
        ("trec", {"all_classes": ["City", 3]}, ("all_classes",)),
        ("lsht", {"answers": ["Town"]}, ("all_classes",)),
        ("qasper", {"_id": ...}, ("_id",)),
        ("qasper", {"_id": "0"}, ("_id", "once")),
    ],
)
def test_a_malformed_line_is_named(
    task: str, changed: dict[str, Any], named: tuple[str, ...], tmp_path: Path
) -> None:
    file = write(tmp_path, task, row(task), row(task, **{"_id": "1", **changed}))
    with line_refused(file, 2, *named):
        LongBench(subsets=(task,), path=str(tmp_path)).evaluation()


def test_a_line_of_longbench_e_without_a_length(tmp_path: Path) -> None:
    write(tmp_path, "qasper", row("qasper", length="3"), extended=True)
    with refused(
        f"task.path: {tmp_path / 'qasper_e.jsonl'}, line 1",
        "",
        allowed="length",
        hint="line",
    ):
        LongBench(subsets=("qasper",), path=str(tmp_path), extended=True).evaluation()


@pytest.mark.parametrize(
    ("content", "named", "hint"),
    [
        (b'{"input": \n', "JSON", "line"),
        (b"[1]\n", "JSON object", "line"),
        (b'{"input": "\xff"}\n', "UTF-8", "as UTF-8"),
    ],
)
def test_a_broken_file_is_named(
    content: bytes, named: str, hint: str, tmp_path: Path
) -> None:
    file = tmp_path / "qasper.jsonl"
    file.write_bytes(content)
    with refused(f"task.path: {file}, line 1", "", allowed=named, hint=hint):
        LongBench(subsets=("qasper",), path=str(tmp_path)).evaluation()


def test_missing_and_torn_files(tmp_path: Path) -> None:
    with refused(
        "task.path",
        str(tmp_path),
        allowed="qasper.jsonl",
        hint=("data.zip", "hf.co/datasets/THUDM/LongBench"),
    ):
        LongBench(subsets=("qasper",), path=str(tmp_path)).evaluation()
    (tmp_path / "data.zip").write_bytes(b"PK torn")
    with refused("task.path", str(tmp_path / "data.zip"), allowed=".zip", hint="zip"):
        LongBench(subsets=("qasper",), path=str(tmp_path)).evaluation()
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as packed:
        packed.writestr("data/trec.jsonl", "")
    with refused(
        "task.path",
        str(tmp_path),
        allowed=(".zip", "qasper.jsonl"),
        hint="hf.co/datasets/THUDM/LongBench",
    ):
        LongBench(subsets=("qasper",), path=str(tmp_path)).evaluation()
    with refused(
        "task.path",
        str(tmp_path / "nowhere"),
        allowed="folder",
        hint="github.com/THUDM/LongBench",
    ):
        LongBench(path=str(tmp_path / "nowhere")).evaluation()


@pytest.mark.parametrize(
    ("given", "value", "allowed", "hint"),
    [
        ({"subsets": ("qaspr",)}, "qaspr", "qasper", "qasper"),
        (
            {"subsets": ("qasper", "qasper")},
            ["qasper", "qasper"],
            "once",
            "task.subsets=[narrativeqa]",
        ),
        ({"subsets": ()}, [], "qasper", "task.subsets=[qasper]"),
        ({"max_new_tokens": 0}, 0, ("1", "1000000"), "task.max_new_tokens=1"),
        ({"max_prompt_tokens": 1}, 1, ("2", "null"), "task.max_prompt_tokens=2"),
    ],
)
def test_bad_fields(
    given: dict[str, Any], value: object, allowed: Tokens, hint: Tokens
) -> None:
    (name,) = given
    with refused(f"task.{name}", value, allowed=allowed, hint=hint):
        build(LongBench, given, "task")


def test_there_is_nothing_to_calibrate_on() -> None:
    with refused(
        "stages",
        "search",
        allowed="longbench",
        hint=("task=kv_retrieval", "method=from:RUN"),
    ):
        LongBench(path=str(DATA)).examples("calibration")


@pytest.mark.parametrize(
    ("model", "tokens"), [("phi4", None), ("llama2_7b", 3500), ("mistral7b", 19500)]
)
def test_the_yaml_has_the_defaults_of_the_class_and_models_bring_their_length(
    model: str, tokens: int | None
) -> None:
    values = compose_one("task=longbench", f"model={model}").raw["task"]
    assert values.pop("_target_") == "posbench.tasks.longbench.LongBench"
    assert build(LongBench, values, "task") == LongBench(max_prompt_tokens=tokens)
    assert set(values) == {field.name for field in fields(LongBench)}


@pytest.mark.skipif(not REAL, reason="POSBENCH_DATA names no folder")
def test_all_21_tasks_read_real_lines() -> None:
    examples = LongBench(
        subsets=tuple(PROMPTS_BY_HAND), path=f"{REAL}/longbench"
    ).evaluation()
    assert len(examples) == 244 and {e.subset for e in examples} == set(PROMPTS_BY_HAND)
