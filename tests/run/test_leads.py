"""Where the answer begins in a reply, and prompts that go on to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from posbench.pipeline.compose import compose_one
from posbench.pipeline.prepare import build_run, prepare
from posbench.report.folder import study_tables
from posbench.run import leads as module
from posbench.run.leads import examples_at_answer, leads, words_before
from tests.conftest import run_folders
from tests.messages import refused

SMALL = ["task.limit=6", "task.positions=[0,5,11]", "task.pairs=12", "stages=[study]"]


@pytest.mark.parametrize(
    ("reply", "answers", "expected"),
    [
        ('The value of "k1" is "v7".', ["v7"], 'The value of "k1" is "'),
        ("v7", ["v7"], ""),
        ("It is V7", ["v7"], "It is"),
        ("v77 is near v7", ["v7"], "v77 is near"),  # not inside a word
        ("either b or a", ["a", "b"], "either"),  # the first of them
        ("I do not know.", ["v7"], None),
        ("anything", [""], None),
        ("It is $5 (five)", ["$5"], "It is"),
    ],
)
def test_words_before_the_answer(reply: str, answers: list[str], expected: str) -> None:
    assert words_before(reply, answers) == expected


def test_a_wrong_reply_ends_its_lead_where_right_ones_do() -> None:
    replies = [
        'The value of "k1" is "v1".',
        'The value of "k2" is "v2".',
        'The value of "k3" is "v9".',
        "No such key.",
    ]
    answers = [["v1"], ["v2"], ["v3"], ["v4"]]
    assert leads(replies, answers) == [
        'The value of "k1" is "',
        'The value of "k2" is "',
        'The value of "k3" is "',
        None,
    ]
    # One right reply that answers at once, and one in other words, take nothing from the others'.
    odd = [*replies, "v5", "Sure: v6"]
    assert leads(odd, [*answers, ["v5"], ["v6"]]) == [
        *leads(replies, answers),
        "",
        "Sure:",
    ]
    # Right replies that come to the answer in different words say nothing about wrong ones.
    assert leads(["see a: v1", "it is v2", "is v9"], answers[:3])[2] is None
    # Where right replies answer at once, wrong ones do too.
    assert leads(["v1", "v9"], answers[:2]) == ["", ""]
    assert leads(["x", "y"], answers[:2]) == [None, None]


def test_a_prompt_goes_on_with_the_words(
    outputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed = compose_one("method=none", *SMALL[:3], f"runtime.outputs={outputs}")
    run = build_run(prepare(composed).config, Console(quiet=True))
    examples = run.examples("evaluation")[:4]
    texts = [f"kop {example.answers[0]}" for example in examples]
    texts[3] = "bel"  # its answer is not in it

    def reply(lm: Any, task: Any, batch: Any, encoded: Any) -> list[dict[str, str]]:
        by_id = {e.id: t for e, t in zip(examples, texts, strict=True)}
        return [{"output": by_id[example.id]} for example in batch]

    def complete(file: str, label: str, batches: Any, key: Any, compute: Any) -> Any:
        return [
            {**key(example), **row}
            for batch in batches
            for example, row in zip(batch, compute(batch), strict=True)
        ]

    vars(run)["rows"] = SimpleNamespace(complete=complete)
    monkeypatch.setattr(module, "reply_to_batch", reply)
    begun = examples_at_answer(run, examples)
    assert [example.id for example in begun[:3]] == [e.id for e in examples[:3]]
    before = run.prompts.encode(examples)
    after = run.prompts.encode(begun)
    word = run.lm.tokenizer("kop", add_special_tokens=False).input_ids
    for example in begun[:3]:
        assert after[example.id].ids == [*before[example.id].ids, *word]


def test_nothing_changes_for_a_model_that_answers_at_once(
    posbench: Any, outputs: Any
) -> None:
    tables = {}
    for read_at in ("prompt", "answer"):
        status = posbench(
            "study=attention_to_gold",
            "study.examples=6",
            *SMALL,
            f"study.read_at={read_at}",
        )
        assert status.status == 0, status.err
    for folder in run_folders(outputs):
        found = study_tables(folder, ["lengths", "layers", "examples"])
        tables[len(tables)] = found
        assert (found["examples"]["answer_start"].dropna() == 0).all()
    for name in ("lengths", "layers"):
        assert tables[0][name].equals(tables[1][name])


def test_no_answer_anywhere_is_refused(outputs: Any) -> None:
    example = SimpleNamespace(id="a", prompt="p", answers=("v",), items=(), prefill="")
    run = SimpleNamespace(
        task=None,
        prompts=SimpleNamespace(encode=lambda *a: {}, batches=lambda *a: [[example]]),
        rows=SimpleNamespace(complete=lambda *a: [{"id": "a", "output": "no idea"}]),
    )
    with refused("read_at", "answer"):
        examples_at_answer(run, [example])  # type: ignore[arg-type, list-item]
