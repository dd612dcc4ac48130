"""The task ``retrieval_log``, and ``own_data`` on the same logs: prompts, orders, gold documents, a share for searches."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posbench.schema import build
from posbench.tasks.logs.fields import comparable
from posbench.tasks.own_data import OwnData, holds_log
from posbench.tasks.retrieval_log import RetrievalLog, natural_key
from tests.conftest import Result
from tests.messages import assert_line_names, assert_names, refused
from tests.tasks.test_logs import DATA, SHAPES, log_file, write_lines

OWN = DATA.parent / "own"
REFERENCES = str(DATA / "references.csv")


def retrieval_log(file: Path, **fields: Any) -> RetrievalLog:
    return build(RetrievalLog, {"path": str(file), **fields}, "task")


def own_data(file: Path, **fields: Any) -> OwnData:
    return build(OwnData, {"path": str(file), **fields}, "task")


def document(name: str, **fields: Any) -> dict[str, Any]:
    return {"id": name, "text": f"text of {name}", **fields}


def one_question(tmp_path: Path, *documents: dict[str, Any], **fields: Any) -> Any:
    row = {"question": "Who?", "docs": documents, **fields}
    (example,) = retrieval_log(write_lines(tmp_path / "a.jsonl", row)).evaluation()
    return example


def test_a_question_is_asked_once_in_the_logged_order(tmp_path: Path) -> None:
    rows = [
        {
            "question": "Who?",
            "docs": [document("b", title="T"), document("a", title="")],
            "gold_ids": ["a"],
            "answers": ["she", "her"],
        },
        {"question": "Why?", "docs": [document("c")]},
    ]
    task = retrieval_log(write_lines(tmp_path / "a.jsonl", *rows))
    first, second = task.evaluation()
    assert first.prompt == (
        "Write a high-quality answer for the given question using only the provided search results "
        "(some of which might be irrelevant).\n\n"
        "Document (Title: T) text of b\nDocument: text of a\n\nQuestion: Who?\nAnswer:"
    )
    assert [first.prompt[slice(*span)] for span in first.items] == [
        "Document (Title: T) text of b",
        "Document: text of a",
    ]
    assert first.question and first.prompt[slice(*first.question)] == "Who?"
    assert (first.id, first.answers, first.gold_position) == ("1", ("she", "her"), None)
    assert first.meta == {"gold": (1,), "ids": ("b", "a")}
    assert task.score(first, "It was HER.") == {"accuracy": 1.0}
    assert task.score(first, "hers") == {"accuracy": 0.0}
    assert task.score(second, "because") == {} and second.answers == ()
    assert second.meta == {"gold": None, "ids": ("c",)}


@pytest.mark.parametrize("name", SHAPES)
def test_every_log_is_asked(name: str) -> None:
    task = retrieval_log(log_file(name), references=REFERENCES)
    examples = task.evaluation()
    assert len(examples) == 40 and all(len(e.items) == 8 for e in examples)
    for e, question in zip(examples, task.log.questions, strict=True):
        texts = [e.prompt[slice(*span)] for span in e.items]
        assert all(
            text.endswith(d.text)
            for text, d in zip(texts, question.documents, strict=True)
        )
        assert e.question and e.prompt[slice(*e.question)] == question.question
        assert "relevance" not in e.orders, "scores fall along the list"
        for order in e.orders.values():
            assert sorted(order) == list(range(8))
    assert not any("order of their scores" in note for note in task.notes())


def test_ids_name_the_examples_where_they_are_unique(tmp_path: Path) -> None:
    assert retrieval_log(log_file("beir")).evaluation()[0].id == "q0"
    rows = [{"id": 5, "question": f"{i}?", "contexts": ["a"]} for i in range(2)]
    task = retrieval_log(write_lines(tmp_path / "a.jsonl", *rows))
    assert [e.id for e in task.evaluation()] == ["1", "2"]


def test_a_repeated_question_is_one_cluster(tmp_path: Path) -> None:
    rows = [{"question": q, "contexts": ["a"]} for q in ("Who?", "Why?", " Who? ")]
    task = retrieval_log(write_lines(tmp_path / "a.jsonl", *rows))
    assert [e.question_id for e in task.evaluation()] == ["1", "2", "1"]


def test_orders_are_those_that_the_log_knows(tmp_path: Path) -> None:
    scores = [document(n, score=s) for n, s in zip("bca", (1.0, 3.0, 2.0), strict=True)]
    assert one_question(tmp_path, *scores).orders == {
        "relevance": (1, 2, 0),
        "id": (2, 0, 1),
    }
    partly = [document("b", score=1), document("a")]
    assert one_question(tmp_path, *partly).orders == {"id": (1, 0)}
    assert one_question(tmp_path, {"text": "x"}, {"text": "y"}).orders == {}
    pages = [
        document("x", source="b.pdf", page=1),
        document("y", source="a.pdf", page=10),
        document("z", source="a.pdf", page="9"),
    ]
    assert one_question(tmp_path, *pages).orders["source"] == (2, 1, 0)
    chapters = [
        document("c#p10", title="B"),
        document("c#p9", title="B"),
        document("q", title="A"),
    ]
    assert one_question(tmp_path, *chapters).orders["source"] == (2, 1, 0)
    unknown = [{"text": "x", "source": "a"}, {"text": "y", "source": "a"}]
    assert one_question(tmp_path, *unknown).orders == {}


def test_numbers_in_ids_are_compared_by_value() -> None:
    names = ["p10", "p2", "p02b", "10", "9", "a", "", "9" * 5000]
    assert sorted(names, key=natural_key)[:5] == ["", "9", "10", "9" * 5000, "a"]
    assert sorted(names, key=natural_key)[5:] == ["p2", "p02b", "p10"]


def test_distances_are_in_order_and_a_reordered_log_is_not(tmp_path: Path) -> None:
    def log(name: str, *scores: float) -> RetrievalLog:
        docs = [document(f"d{i}", score=s) for i, s in enumerate(scores)]
        row = {"question": "Who?", "docs": docs, "answers": ["x"]}
        return retrieval_log(write_lines(tmp_path / f"{name}.jsonl", row))

    rising = log("rising", 0.1, 0.2, 0.3, 0.4)
    assert "relevance" not in rising.evaluation()[0].orders
    assert sum("distances?" in note for note in rising.notes()) == 1
    falling = log("falling", 4, 3, 3, 1)
    assert "relevance" not in falling.evaluation()[0].orders
    # As LangChain and LlamaIndex write eight documents.
    ranks = (2, 4, 6, 8, 7, 5, 3, 1)
    best_first = (7, 0, 6, 1, 5, 2, 4, 3)
    for name, values in (
        ("scores", [-rank for rank in ranks]),
        ("distances", list(ranks)),
    ):
        reordered = log(name, *values)
        assert reordered.evaluation()[0].orders["relevance"] == best_first
        assert_line_names("\n".join(reordered.notes()), "both ends", "1 of 1")


def test_fewer_documents_can_be_shown(tmp_path: Path) -> None:
    row = {"question": "Who?", "contexts": ["a", "b", "c"], "gold_indices": [0, 2]}
    file = write_lines(tmp_path / "a.jsonl", row)
    (example,) = retrieval_log(file, max_documents=2).evaluation()
    assert len(example.items) == 2 and example.meta["gold"] == (0,)
    with refused("task.max_documents"):
        retrieval_log(file, max_documents=0)


def test_a_template_may_repeat_the_question(tmp_path: Path) -> None:
    row = {"question": "Who?", "contexts": ["Who? a", "b"]}
    file = write_lines(tmp_path / "a.jsonl", row)
    for template, before in (
        (
            "{question} {context} {question}!",
            "Who? Document: Who? a+Document: b ",
        ),
        ("Q: {question} {question}\n{context}", "Q: Who? "),
    ):
        task = retrieval_log(file, template=template, separator="+")
        (example,) = task.evaluation()
        assert example.question == (len(before), len(before) + 4)
        assert example.prompt[slice(*example.question)] == "Who?"
    with refused("task.template"):
        retrieval_log(file, template="{question}")


def test_a_long_prompt_names_the_key_and_the_line(
    tmp_path: Path, posbench: Callable[..., Result]
) -> None:
    rows = [{"question": "nap", "contexts": ["til kep", "nap dep " * 2000]}]
    file = write_lines(
        tmp_path / "a.jsonl", {"question": "q", "contexts": ["a"]}, *rows
    )
    task = retrieval_log(file)
    hint = task.how_to_shorten(task.evaluation()[1])
    assert_names(hint, "task.max_documents", "document 1", "line 2", str(file))


def test_own_data_moves_the_gold_document_of_a_log() -> None:
    task = own_data(log_file("gold_doc_id"), positions=[0, 7])
    plain = {e.id: e for e in retrieval_log(log_file("gold_doc_id")).evaluation()}
    examples = task.evaluation()
    assert task.own.log is not None
    names = [name for name, e in plain.items() if e.meta["gold"]]
    assert [e.id for e in examples[::2]] == [f"0-{name}" for name in names]
    for e in examples:
        logged = plain[e.id.partition("-")[2]]
        (gold,) = logged.meta["gold"]
        assert e.gold_position is not None

        def text(example: Any, index: int) -> str:
            shown = example.prompt[slice(*example.items[index])]
            # own_data numbers documents.
            return re.sub(r"^Document(?: \[\d+\])?:? ?", "", shown)

        assert text(e, e.gold_position) == text(logged, gold)
        others = [text(e, i) for i in range(8) if i != e.gold_position]
        assert others == [text(logged, i) for i in range(8) if i != gold]
        assert e.answers == logged.answers
    notes = "\n".join(task.notes())
    assert_line_names(notes, "4 of 40", "left out", "gold document")


def test_own_data_takes_references_for_a_log() -> None:
    file = log_file("langchain_retrieval_chain")
    with refused("task.path", allowed="references", hint="task.references"):
        own_data(file).evaluation()
    task = own_data(file, references=REFERENCES)
    assert len(task.own.records) == 36
    assert sum(bool(record.other_gold) for record in task.own.records) == 8
    assert [f.field for f in task.files()] == ["task.path", "task.references"]


def test_own_data_keeps_its_own_form(tmp_path: Path) -> None:
    for file in OWN.iterdir():
        assert not holds_log(file)
        assert own_data(file).own.log is None
    row = {
        "question": "Who?",
        "documents": [document("a", score=1), document("b")],
        "gold": 1,
        "answers": ["x"],
    }
    own = write_lines(tmp_path / "own.jsonl", row)
    assert not holds_log(own)
    assert own_data(own, positions=[0]).evaluation()[0].answers == ("x",)
    with refused("task.references", allowed="own answers"):
        own_data(own, references=REFERENCES).evaluation()
    # A line of its own form with a fault keeps its message.
    faulty = {
        "question": "Who?",
        "documents": [{"text": "a"}, {"text": "b"}],
        "gold": 1,
    }
    assert not holds_log(write_lines(tmp_path / "faulty.jsonl", faulty))
    for name in SHAPES:
        assert holds_log(log_file(name))


def test_own_data_suggests_the_shortest_list_of_a_log(tmp_path: Path) -> None:
    rows = [
        {"question": f"{n}?", "contexts": ["a"] + ["b"] * n, "answers": ["a"]}
        for n in (1, 2, 4)
    ]
    file = write_lines(
        tmp_path / "a.jsonl",
        *rows,
        {"question": "0?", "contexts": ["a"], "answers": ["a"]},
    )
    with refused("task.items_per_prompt", hint="task.items_per_prompt=2"):
        own_data(file).evaluation()
    task = own_data(file, items_per_prompt=2, positions=[0, 1])
    assert len(task.evaluation()) == 6
    assert_line_names("\n".join(task.notes()), "1 of 4", "single document")


def test_a_second_copy_of_the_gold_document_is_left_out(tmp_path: Path) -> None:
    rows = [
        {"question": "1?", "contexts": ["a", "b", "a"], "gold_indices": [0], "answers": ["a"]},
        {"question": "2?", "contexts": ["a", "b", "c"], "gold_indices": [0], "answers": ["a"]},
        {"question": "3?", "contexts": ["a", "b", "a"], "gold_indices": [0, 2], "answers": ["a"]},
        {"question": "4?", "contexts": ["a 1", "b", "a 2"], "gold_indices": [0, 2], "answers": ["a"]},
    ]  # fmt: skip
    task = own_data(write_lines(tmp_path / "a.jsonl", *rows))
    # A copy is read wherever the other one is moved, whether or not it is called gold.
    assert [record.question for record in task.own.records] == ["2?", "4?"]
    assert_line_names("\n".join(task.notes()), "2 of 4", "second copy")


def test_a_question_without_documents_does_not_decide_what_a_file_is(
    tmp_path: Path,
) -> None:
    of_log = {"question": "1?", "documents": [{"id": "x", "text": "a"}] * 2}
    own = {"question": "1?", "items": ["a", "b"], "gold": 0, "answers": ["a"]}
    for row, key, is_log in ((of_log, "documents", True), (own, "items", False)):
        file = write_lines(tmp_path / "a.jsonl", {**row, key: []}, row, row)
        assert holds_log(file) == is_log


@pytest.mark.parametrize("make", [retrieval_log, own_data])
def test_a_share_of_the_questions_is_kept_for_searches(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    rows = [
        {
            "question": f"Which {i // 2}?",
            "contexts": [f"a{i}", "b"],
            "answers": [f"a{i}"],
        }
        for i in range(40)
    ]
    file = write_lines(tmp_path / "a.jsonl", *rows)

    def questions(examples: Any) -> set[str]:
        return {comparable(e.prompt[slice(*e.question)]) for e in examples}

    def splits(**fields: Any) -> list[set[str]]:
        task = make(file, **fields)
        parts = [task.evaluation(), task.examples("calibration"), task.held_back(1000)]
        return [questions(part) for part in parts]

    evaluation, calibration, held_back = splits(calibration_share=0.3)
    assert [len(evaluation), len(calibration), len(held_back)] == [14, 3, 3]
    assert len(evaluation | calibration | held_back) == 20, (
        "no question is in two parts"
    )
    assert splits(calibration_share=0.3) == [evaluation, calibration, held_back]
    assert splits(calibration_share=0.3, seed=1) != [evaluation, calibration, held_back]
    notes = "\n".join(make(file, calibration_share=0.3, seed=1).notes())
    assert_line_names(notes, "6 of 20", "calibration_share=0.3", "seed=1")
    task = make(file)
    assert len(questions(task.evaluation())) == 20 and task.held_back(5) == []
    with refused("stages", "search", hint="task.calibration_share=0.3"):
        task.examples("calibration")
    for share in (0.01, 0.99):
        with refused("task.calibration_share", share):
            make(file, calibration_share=share).evaluation()


def test_questions_without_a_reference_are_not_searched_on(tmp_path: Path) -> None:
    rows = [{"question": f"{i}?", "contexts": ["a"], "reference": "a" if i < 4 else None} for i in range(20)]  # fmt: skip
    task = retrieval_log(
        write_lines(tmp_path / "a.jsonl", *rows), calibration_share=0.5
    )
    kept = [*task.examples("calibration"), *task.held_back(9)]
    assert len(kept) == 2 and all(e.answers for e in kept)
    assert len(task.evaluation()) == 18
    assert_line_names("\n".join(task.notes()), "16 of 20", "no reference")


def test_check_data_says_what_a_log_holds(
    posbench: Callable[..., Result], tmp_path: Path
) -> None:
    file = log_file("langchain_retrieval_chain")
    result = posbench("check-data", str(file), f"references={REFERENCES}", verb=True)
    assert result.status == 0
    assert_line_names(result.out, "shape", "LangChain retrieval chain")
    assert_line_names(result.out, "read", "40 of 40", "lines")
    assert_line_names(result.out, "one in 28", "several in 8", "known in 4")
    assert_line_names(result.out, "documents", "8 a question")
    assert_line_names(result.out, "posbench order", str(file), "model=DIR_OR_HUB_ID")
    assert_line_names(result.out, "task=own_data", f"task.path={file}")
    assert_line_names(result.out, "task=retrieval_log", "task.references=")
    result = posbench("check-data", str(log_file("llamaindex_source_nodes")), verb=True)
    assert_line_names(result.out, "no references", "task.references=FILE")
    assert "task=own_data" not in result.out
    row = {"question": "Who?", "contexts": ["a"], "answers": ["b"]}
    damaged = write_lines(
        tmp_path / "a.jsonl", row, "{", json.dumps(row)[:20], row, "[]"
    )
    result = posbench("check-data", str(damaged), verb=True)
    assert result.status == 0
    assert_line_names(result.out, "3 of 5", "skipped", "line 2")
    bad = write_lines(tmp_path / "b.jsonl", {"question": "Who?", "contexts": "a"})
    result = posbench("check-data", str(bad), verb=True)
    assert result.status == 2 and len(result.err.splitlines()) == 1
