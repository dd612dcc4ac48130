"""Prompts that are built again are those that were asked, and every text stands on the page as text."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from posbench.report.failures import (
    CONTEXT_CHARACTERS,
    EDGE_CHARACTERS,
    RunExamples,
    excerpt,
    full_prompt,
    spread_sample,
)
from posbench.report.page import render_run
from posbench.run.folder import RunDir
from posbench.run.reply_rows import prompt_digest
from posbench.tasks import Example, KVRetrieval, Task
from posbench.tasks.leval_closed import LEvalClosed
from posbench.tasks.nq_multidoc import NQMultiDoc
from tests.messages import assert_names

TARGETS = {KVRetrieval: "posbench.tasks.kv_retrieval.KVRetrieval"}


def folder_of(
    path: Path, task: Task, replies: dict[str, str]
) -> tuple[RunDir, dict[str, object]]:
    """A run folder with two methods: the unmodified one says ``replies`` by id, the other what is right."""
    config = {
        "task": {"_target_": TARGETS[type(task)], **asdict(task)},
        "stages": ["evaluate"],
    }
    (path / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(config))))
    run = RunDir(path)
    for e in task.evaluation():
        for method, said in (
            ("none", replies.get(e.id, e.answers[0])),
            ("x", e.answers[0]),
        ):
            row = {
                "method": method,
                "id": e.id,
                "output": said,
                "scores": task.score(e, said),
                "tokens": 9,
            }
            origin = {
                "gold_position": e.gold_position,
                "subset": e.subset,
                "dropped": 0,
            }
            run.append(
                "predictions.jsonl",
                [row | origin | {"answers": e.answers, "prompt": prompt_digest(e)}],
            )
    return run, yaml.safe_load((path / "config.yaml").read_text())


def test_an_example_in_words(tmp_path: Path) -> None:
    task = KVRetrieval(pairs=30, positions=(3, 15), limit=2)
    examples = RunExamples.of(
        *folder_of(tmp_path, task, {"15-1": "no\nidea", "3-0": ""})
    )
    assert examples.wrong() == ["3-0", "15-1"] and examples.ids() == [
        "3-0",
        "3-1",
        "15-0",
        "15-1",
    ]
    asked = {e.id: e for e in task.evaluation()}["15-1"]
    whole = examples.text("15-1", whole=True).splitlines()
    assert_names(whole[0], "15-1", "position 15", "29", "9 tokens")
    start = whole.index("prompt:") + 1
    assert (
        "\n".join(
            line[2:] for line in whole[start : start + asked.prompt.count("\n") + 1]
        )
        == asked.prompt
    )
    tail = [
        f"expected: {asked.answers[0]}",
        "unmodified: accuracy 0",
        "  reply:  no",
        "          idea",
    ]
    assert whole[-6:] == [*tail, "x: accuracy 1", f"  reply:  {asked.answers[0]}"]
    # Shortened, the gold pair stays and so do both ends.
    short, (start, end) = examples.text("15-1"), asked.items[15]
    assert asked.prompt[start:end] in short and short.count(" characters ...]") == 2
    assert len(short) < len(asked.prompt) / 2


def test_an_excerpt_keeps_the_ends_and_the_gold_item() -> None:
    text = "".join(f"{n:05d}" for n in range(1000))
    example = Example(
        id="x",
        prompt=text,
        answers=("a",),
        gold_position=1,
        items=((0, 5), (2500, 2510)),
    )
    head, said, gold, told, tail = excerpt(example).splitlines()
    assert (head, gold, tail) == (
        text[:EDGE_CHARACTERS],
        text[2500 - CONTEXT_CHARACTERS : 2510 + CONTEXT_CHARACTERS],
        text[-EDGE_CHARACTERS:],
    )
    assert said == f"[... {2500 - CONTEXT_CHARACTERS - EDGE_CHARACTERS} characters ...]"
    assert (
        told
        == f"[... {5000 - EDGE_CHARACTERS - 2510 - CONTEXT_CHARACTERS} characters ...]"
    )
    # A gold item that is long itself is shortened, and a short prompt is not.
    long = Example(
        id="x", prompt=text, answers=("a",), gold_position=0, items=((1000, 4000),)
    )
    assert (
        len(excerpt(long)) < 7 * EDGE_CHARACTERS
        and text[1000:1100] in excerpt(long)
        and text[3900:4000] in excerpt(long)
    )
    brief = Example(
        id="x",
        prompt=text[: 2 * EDGE_CHARACTERS],
        answers=("a",),
        system="Be brief.",
        prefill="Answer:",
    )
    assert (
        excerpt(brief)
        == full_prompt(brief)
        == f"Be brief.\n\n{text[: 2 * EDGE_CHARACTERS]}Answer:"
    )
    assert spread_sample(list("abcdefghij"), 5) == list("acegi") and spread_sample(
        ["a"]
    ) == ["a"]


def test_a_prompt_that_cannot_be_built_again_is_not_shown(tmp_path: Path) -> None:
    pairs = [[f"k{n}", f"v{n}"] for n in range(6)]
    row = {"ordered_kv_records": pairs, "key": "k2", "value": "v2"}
    data = tmp_path / "data.jsonl.gz"
    data.write_bytes(gzip.compress(json.dumps(row).encode()))
    task = KVRetrieval(path=str(data), pairs=6, positions=(1,), limit=1)
    run, config = folder_of(tmp_path, task, {"1-0": "no"})
    assert 'Key: "k2"' in RunExamples.of(run, config).text("1-0")
    # Another file under the same name: what was asked is not in it.
    data.write_bytes(
        gzip.compress(json.dumps({**row, "key": "k3", "value": "v3"}).encode())
    )
    text = RunExamples.of(run, config).text("1-0")
    assert "checksum" in text and "k3" not in text and "expected: v2" in text
    data.unlink()
    text = RunExamples.of(run, config).text("1-0")
    assert_names(text, str(data), "not on this")
    assert "reply:  no" in text


def test_the_page_shows_some_wrong_answers_as_text(tmp_path: Path) -> None:
    task = KVRetrieval(pairs=4, positions=(0, 3), limit=20)
    wrong = {e.id: "</pre><script>alert(1)</script>" for e in task.evaluation()[:12]}
    folder_of(tmp_path, task, wrong)
    page = render_run(tmp_path).read_text()
    assert_names(page, "12 of 40", "examples", "below 1", "5 of them")
    assert page.count("<summary>id 0-") == 5
    assert_names(page, "posbench show DIR", "--wrong --all")
    # The script of the page and its data are the only ones.
    assert page.count("<script") == page.count("</script") == 2
    assert "<script>alert" not in page and "&lt;/pre&gt;&lt;script&gt;" in page


@pytest.mark.parametrize(
    ("task", "subset", "reply", "read"),
    [
        (LEvalClosed(), "coursera", " AB.", "B"),
        (LEvalClosed(), "tpo", "The answer is C", "C"),
        (LEvalClosed(), "sci_fi_fact", "It is False", "false"),
        (NQMultiDoc(), "", "\nParis\nRome", "Paris"),
        (NQMultiDoc(reading="liu"), "", "Paris \nRome", "Paris "),
        (KVRetrieval(), "", "value", None),
    ],
)
def test_what_scoring_reads_out_of_a_reply(
    task: Task, subset: str, reply: str, read: str | None
) -> None:
    assert (
        task.extracted(Example(id="x", prompt="", answers=("A",), subset=subset), reply)
        == read
    )
