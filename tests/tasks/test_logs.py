"""Retrieval logs: every library's files as expected, damage is counted or refused in a line, and the known traps."""

from __future__ import annotations

import csv
import gzip
import json
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from posbench.errors import UserError
from posbench.tasks.logs import Log, read_log
from posbench.tasks.logs.order import has_best_at_ends, seems_small_first
from posbench.tasks.own_data import OwnData
from posbench.tasks.retrieval_log import RetrievalLog
from tests.messages import refused

DATA = Path(__file__).parents[1] / "data" / "logs"
EXPECTED = {
    file.name.removesuffix(".expected.jsonl.gz"): file
    for file in sorted(DATA.glob("*.expected.jsonl.gz"))
}
SHAPES = {
    "array": "questions with documents",
    "beir": "BEIR folder with a TREC run",
    "gold_doc_id": "questions with documents",
    "haystack_answer_builder": "Haystack answers",
    "hf_dpr": "DPR",
    "langchain_retrieval_chain": "LangChain retrieval chain",
    "llamaindex_source_nodes": "LlamaIndex source nodes",
    "openinference_flat": "OpenInference spans",
    "openinference_nested": "OpenInference spans",
    "plain": "questions with documents",
    "promptfoo_results": "promptfoo results",
    "ragas_evaluation_dataset": "ragas data set",
}


def log_file(name: str) -> Path:
    """The log of a name."""
    (file,) = (
        file
        for file in DATA.iterdir()
        if file.name.split(".")[0] == name and "expected" not in file.name
    )
    return file


def lines_of(file: Path) -> list[Any]:
    """The JSON lines of a file, which may be compressed."""
    data = file.read_bytes()
    data = gzip.decompress(data) if file.suffix == ".gz" else data
    return [json.loads(line) for line in data.splitlines()]


def normal_form(log: Log) -> list[dict[str, Any]]:
    """The questions of a log as the expected files have them."""
    return [
        {
            "question": question.question,
            "answers": None if question.answers is None else list(question.answers),
            "documents": [
                {"id": d.id, "title": d.title, "text": d.text, "score": d.score}
                for d in question.documents
            ],
            "gold": None if question.gold is None else list(question.gold),
            "reply": question.reply,
        }
        for question in log.questions
    ]


def expected_form(name: str) -> list[dict[str, Any]]:
    """The expected lines of a log, without their remarks."""
    lines = lines_of(EXPECTED[name])
    for line in lines:
        line.pop("unknown", None)
        line.setdefault("reply", None)
    return lines


def write_lines(file: Path, *rows: Any) -> Path:
    """Write JSON lines; a text is written as it is."""
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return file


def test_every_log_has_an_expected_form() -> None:
    assert set(EXPECTED) == set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_a_log_is_read_as_expected(name: str) -> None:
    log = read_log(log_file(name))
    assert log.shape == SHAPES[name]
    assert log.num_read == 40 and not log.problems
    assert normal_form(log) == expected_form(name)


@pytest.mark.parametrize("name", SHAPES)
def test_references_are_joined_and_show_the_gold_documents(name: str) -> None:
    log = read_log(log_file(name), DATA / "references.csv")
    with (DATA / "references.csv").open(encoding="utf-8", newline="") as stream:
        answers = {
            row["question"]: tuple(row["answers"].split(" | "))
            for row in csv.DictReader(stream)
        }
    assert [q.answers for q in log.questions] == [
        answers[q.question] for q in log.questions
    ]
    if not any(question.gold_is_named for question in log.questions):
        wanted = [line["gold"] for line in expected_form("array")]
        assert [q.gold and list(q.gold) for q in log.questions] == wanted


# Small logs of shapes for which there is no file, or that are damaged field by field.
TEXTS = ("The tower is 42 metres high.", "The bridge has 9 arches.", "A market.")
NODES = [
    {"node": {"id_": f"n{i}", "text": t}, "score": 3.0 - i} for i, t in enumerate(TEXTS)
]
PAGES = [
    {"page_content": t, "id": None, "metadata": {"source": "a.pdf", "page": i}}
    for i, t in enumerate(TEXTS)
]
HAYSTACK = [
    {"id": f"h{i}", "content": t, "meta": {"title": "T"}, "score": 3.0 - i}
    for i, t in enumerate(TEXTS)
]
FLAT_HAYSTACK = [
    {"id": f"h{i}", "content": t, "blob": None, "score": 3.0 - i, "title": "T"}
    for i, t in enumerate(TEXTS)
]
ASKED = "How high is the tower?"
REPLY = "It is 42 metres high."
ANSWER = {"data": REPLY, "query": ASKED, "documents": HAYSTACK, "meta": {}}
FLAT_ATTRIBUTES = {
    "input.value": ASKED,
    **{f"retrieval.documents.{i}.document.content": t for i, t in enumerate(TEXTS)},
    "openinference.span.kind": "RETRIEVER",
}
SAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "chain": (
        "LangChain retrieval chain",
        {
            "input": ASKED,
            "context": [
                {"lc": 1, "type": "constructor", "id": ["langchain"], "kwargs": page}
                for page in PAGES
            ],
            "answer": REPLY,
        },
    ),
    "retrieval_qa": (
        "LangChain RetrievalQA",
        {"query": ASKED, "result": REPLY, "source_documents": PAGES},
    ),
    "run_tree": (
        "LangChain run",
        {
            "id": "r1",
            "run_type": "chain",
            "inputs": {"query": ASKED},
            "outputs": {"result": REPLY},
            "child_runs": [
                {"run_type": "retriever", "inputs": {}, "outputs": {"documents": PAGES}}
            ],
        },
    ),
    "llama_index": (
        "LlamaIndex source nodes",
        {"query": ASKED, "response": REPLY, "source_nodes": NODES},
    ),
    "haystack": ("Haystack answers", {"answer_builder": {"answers": [ANSWER]}}),
    "haystack_2_9": (
        "Haystack answers",
        {
            "type": "haystack.dataclasses.answer.GeneratedAnswer",
            "init_parameters": ANSWER,
        },
    ),
    "haystack_flat": (
        "questions with documents",
        {"query": ASKED, "documents": FLAT_HAYSTACK, "response": REPLY},
    ),
    "ragas": (
        "ragas data set",
        {
            "user_input": ASKED,
            "retrieved_contexts": list(TEXTS),
            "retrieved_context_ids": [7, 8, "9"],
            "response": REPLY,
            "reference": "42 metres",
            "reference_contexts": [TEXTS[0]],
        },
    ),
    "spans": (
        "OpenInference spans",
        {
            "name": "retrieve",
            "context": {"trace_id": "t"},
            "attributes": FLAT_ATTRIBUTES,
        },
    ),
    "otlp": (
        "OpenInference spans",
        {
            "resourceSpans": [
                {
                    "scopeSpans": [
                        {
                            "spans": [
                                {
                                    "traceId": "t",
                                    "attributes": [
                                        {"key": key, "value": {"stringValue": value}}
                                        for key, value in FLAT_ATTRIBUTES.items()
                                    ],
                                }
                            ]
                        }
                    ]
                }
            ]
        },
    ),
    "promptfoo": (
        "promptfoo results",
        {
            "testIdx": 0,
            "vars": {"question": ASKED, "documents": list(TEXTS)},
            "testCase": {"assert": [{"type": "contains", "value": "42 metres"}]},
            "response": {"output": REPLY},
        },
    ),
    "dpr": (
        "DPR",
        {
            "question": ASKED,
            "answers": ["42 metres"],
            "ctxs": [
                {"id": i, "title": "T", "text": t, "score": "2", "has_answer": i == 0}
                for i, t in enumerate(TEXTS)
            ],
        },
    ),
    "plain": (
        "questions with documents",
        {
            "q": ASKED,
            "passages": [{"doc_id": f"p{i}", "body": t} for i, t in enumerate(TEXTS)],
            "gold_ids": ["p0", "p9"],
            "ground_truth": "42 metres",
            "answer": REPLY,
            "scores": [3, 2, 1],
        },
    ),
}


def for_parquet(value: Any) -> Any:
    """A value whose objects have fields and whose lists have one type, as parquet needs them."""
    if isinstance(value, dict):
        return {key: for_parquet(item) for key, item in value.items()} or {"x": None}
    if isinstance(value, list):
        if any(isinstance(item, int) for item in value):
            return [str(item) for item in value]
        return [for_parquet(item) for item in value]
    return value


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("form", ["lines", "array", "parquet"])
def test_a_small_log_of_every_shape_is_read(
    name: str, form: str, tmp_path: Path
) -> None:
    shape, line = SAMPLES[name]
    if form == "lines":
        file = write_lines(tmp_path / "log.jsonl", line)
    elif form == "array":
        file = tmp_path / "log.json"
        file.write_text(json.dumps([line], indent=1))
    else:
        file = tmp_path / "log.parquet"
        pd.DataFrame([for_parquet(line)]).to_parquet(file)
    log = read_log(file)
    assert (log.shape, log.problems) == (shape, ())
    (question,) = log.questions
    assert question.question == ASKED
    assert tuple(document.text for document in question.documents) == TEXTS
    has_reference = name in ("ragas", "promptfoo", "dpr", "plain")
    assert question.answers == (("42 metres",) if has_reference else None)
    assert question.gold == ((0,) if has_reference else None)
    has_reply = name not in ("spans", "otlp", "dpr")
    assert question.reply == (REPLY if has_reply else None)


def test_ids_scores_titles_and_pages_are_found_where_libraries_put_them(
    tmp_path: Path,
) -> None:
    documents = {}
    for name, (_, line) in SAMPLES.items():
        file = write_lines(tmp_path / f"{name}.jsonl", line)
        documents[name] = read_log(file).questions[0].documents
    assert [d.id for d in documents["chain"]] == [None] * 3
    assert [(d.source, d.page) for d in documents["chain"]] == [
        ("a.pdf", 0),
        ("a.pdf", 1),
        ("a.pdf", 2),
    ]
    assert [d.id for d in documents["ragas"]] == ["7", "8", "9"]
    for name, ids in (("llama_index", "n"), ("haystack", "h"), ("haystack_flat", "h")):
        assert [(d.id, d.score) for d in documents[name]] == [
            (f"{ids}0", 3.0),
            (f"{ids}1", 2.0),
            (f"{ids}2", 1.0),
        ]
    assert {d.title for d in documents["haystack"]} == {"T"}
    assert {d.title for d in documents["haystack_flat"]} == {"T"}
    assert [(d.id, d.score) for d in documents["dpr"]] == [("0", 2), ("1", 2), ("2", 2)]
    assert [(d.id, d.score) for d in documents["plain"]] == [
        ("p0", 3),
        ("p1", 2),
        ("p2", 1),
    ]


def test_lists_in_csv_are_read_as_python_prints_them(tmp_path: Path) -> None:
    _, line = SAMPLES["ragas"]
    tricky = ["It's 42.", 'The "tower", high', "[3] a line\nbreak"]
    row = {**line, "retrieved_contexts": tricky, "reference_contexts": [tricky[0]]}
    pd.DataFrame([row, {**row, "reference": "a | b"}]).to_csv(
        tmp_path / "log.csv", index=False
    )
    log = read_log(tmp_path / "log.csv")
    assert (log.shape, log.unit) == ("ragas data set", "line")
    first, second = log.questions
    assert [d.text for d in first.documents] == tricky
    assert [d.id for d in first.documents] == ["7", "8", "9"]
    assert first.gold == (0,) and first.answers == ("42 metres",)
    assert second.answers == ("a", "b")


# Traps of the samples, numbered as in their README.


def test_an_alias_several_passages_or_none_hold_the_answer() -> None:
    counts = [
        None if q.gold is None else len(q.gold)
        for q in read_log(log_file("plain")).questions
    ]
    assert [counts.count(n) for n in (1, 2, None)] == [28, 8, 4]
    aliases = [
        q
        for q in read_log(log_file("plain")).questions
        if q.answers and len(q.answers) > 1
    ]
    assert len(aliases) == 3
    for question in aliases:
        assert question.gold and question.answers
        text = " ".join(question.documents[question.gold[0]].text.split())
        assert question.answers[1] in text or question.answers[0] in text


def test_an_answer_is_found_as_whole_words(tmp_path: Path) -> None:
    row = {
        "question": "How long?",
        "contexts": ["37 hours", "class 3Rx", "7\n  HOURS", "17 hours"],
        "answers": ["7 hours", "class 3R"],
    }
    (question,) = read_log(write_lines(tmp_path / "a.jsonl", row)).questions
    assert question.gold == (2,)


def test_decomposed_and_folded_letters_are_equal(tmp_path: Path) -> None:
    decomposed = unicodedata.normalize("NFD", "by Zoë Ångström")
    row = {
        "question": "Who?",
        "contexts": [decomposed, "in der Straße", "nobody"],
        "answers": ["zoë ångström", "STRASSE"],
    }
    (question,) = read_log(write_lines(tmp_path / "a.jsonl", row)).questions
    assert question.gold == (0, 1)
    references = write_lines(
        tmp_path / "r.jsonl",
        {"question": unicodedata.normalize("NFD", "Wér  ist\tda?"), "answers": ["x"]},
    )
    row = {"question": "Wér ist da?", "contexts": ["x"], "response": "y"}
    log = read_log(write_lines(tmp_path / "b.jsonl", row), references)
    assert log.questions[0].answers == ("x",)


def test_ids_are_text_and_gold_may_be_null_or_not_retrieved(tmp_path: Path) -> None:
    documents = [{"id": 27, "text": "a"}, {"id": "HB-1#p1", "text": "b"}]
    rows = [
        {"query": "1?", "docs": documents, "gold_doc_id": "27"},
        {"query": "2?", "docs": documents, "gold_doc_id": None},
        {"query": "3?", "docs": documents, "gold_doc_id": "HB-9"},
        {"query": "4?", "docs": documents, "gold_doc_id": []},
        {"query": "5?", "docs": documents, "gold_doc_id": 27.0},
        {"query": "6?", "docs": documents, "gold_doc_id": None, "answers": ["b"]},
    ]
    log = read_log(write_lines(tmp_path / "a.jsonl", *rows))
    assert [d.id for d in log.questions[0].documents] == ["27", "HB-1#p1"]
    assert [q.gold for q in log.questions] == [(0,), None, (), (), (0,), (1,)]


def test_gold_may_be_an_index_where_documents_have_no_numbers(tmp_path: Path) -> None:
    rows = [
        {"question": "1?", "contexts": ["a", "b"], "gold": 1},
        {"question": "2?", "contexts": ["a", "b"], "gold_indices": [1, 0]},
        {"question": "3?", "contexts": ["a", "b"], "gold": 2},
    ]
    log = read_log(write_lines(tmp_path / "a.jsonl", *rows))
    assert [q.gold for q in log.questions] == [(1,), (0, 1)]
    (problem,) = log.problems
    assert (problem.count, problem.line) == (1, 3)


def test_an_index_may_be_a_text_where_no_document_has_a_number(tmp_path: Path) -> None:
    documents = [{"id": "d1", "text": "One."}, {"id": "d2", "text": "Two."}]
    rows = [
        {"question": "Q?", "documents": documents, "gold": gold}
        for gold in ("1", ["d1"], "7")
    ]
    log = read_log(write_lines(tmp_path / "log.jsonl", *rows))
    assert [question.gold for question in log.questions] == [(1,), (0,), ()]


def test_gold_that_seems_to_be_counted_from_one_is_named(tmp_path: Path) -> None:
    rows = [
        {
            "question": f"Q{number}?",
            "documents": ["Ash.", "It is Bern.", "Oak."],
            "gold": gold,
            "answers": ["Bern"],
        }
        for number, gold in enumerate([2, 2, 1])
    ]
    remarks = read_log(write_lines(tmp_path / "log.jsonl", *rows)).remarks
    assert any("2 of 3" in remark and "from 0" in remark for remark in remarks)
    right = read_log(write_lines(tmp_path / "right.jsonl", rows[2]))
    assert not any("from 0" in remark for remark in right.remarks)


def test_a_list_of_texts_spelled_in_a_text_is_a_list_of_answers(tmp_path: Path) -> None:
    spelled = {"['Bern']": ("Bern",), '["a", "b"]': ("a", "b"), "[1, 2]": ("[1, 2]",)}
    rows = [
        {"question": "Q?", "documents": ["One.", "Two."], "answers": answers}
        for answers in spelled
    ]
    log = read_log(write_lines(tmp_path / "log.jsonl", *rows))
    assert [question.answers for question in log.questions] == list(spelled.values())


def test_arrays_in_csv_are_read_as_numpy_prints_them(tmp_path: Path) -> None:
    """As a data frame of a parquet file, written as CSV, has them."""
    texts = ["It's one, of more.", 'Two "quoted" words', "Three, " * 30]
    table = pd.DataFrame({"question": ["Q?"], "answers": ["Two"]})
    table["contexts"] = [np.array(texts, dtype=object)]
    table.to_csv(tmp_path / "log.csv", index=False)
    (question,) = read_log(tmp_path / "log.csv").questions
    assert [document.text for document in question.documents] == texts


def test_names_of_fields_may_be_written_as_titles(tmp_path: Path) -> None:
    row = {"Question": "Q?", "Contexts": ["One.", "Two."], "Ground Truth": "Two"}
    (question,) = read_log(write_lines(tmp_path / "log.jsonl", row)).questions
    assert question.answers == ("Two",) and len(question.documents) == 2


@pytest.mark.parametrize(
    ("name", "content", "kind", "hint"),
    [
        ("log.xlsx", b"PK\x03\x04rest", "Excel", "CSV"),
        ("log.jsonl", gzip.compress(b'{"question": "Q?"}\n'), "gzip", ".gz"),
        ("log.csv", "question;contexts\na;b\n".encode("utf-16"), "UTF-16", "UTF-8"),
        ("log.jsonl", '{"question": "a"}\n'.encode("utf-16-le"), "UTF-16", "UTF-8"),
        ("log.jsonl", '{"question": "a"}\n'.encode("utf-16-be"), "UTF-16", "UTF-8"),
    ],
    ids=["workbook", "gzip", "UTF-16", "UTF-16-LE", "UTF-16-BE"],
)
def test_a_file_that_is_no_text_is_named(
    name: str, content: bytes, kind: str, hint: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with refused("task.path", allowed=kind, hint=hint):
        read_log(tmp_path / name)
    with refused("task.path", allowed=kind, hint=hint):
        OwnData(path=str(tmp_path / name)).evaluation()


@pytest.mark.parametrize(
    ("name", "separator", "hint"),
    [
        ("log.csv", ";", "separated by ;"),
        ("log.csv", "\t", "separated by tabs"),
        ("log.tsv", ",", "separated by commas"),
    ],
)
def test_columns_separated_by_another_character_are_refused(
    name: str, separator: str, hint: str, tmp_path: Path
) -> None:
    rows = [["question", "contexts", "answers"], ["Q?", "['a']", "b"]]
    (tmp_path / name).write_text("\n".join(map(separator.join, rows)))
    with refused("task.path", hint=hint):
        read_log(tmp_path / name)


@pytest.mark.parametrize("as_references", [False, True])
def test_columns_of_one_name_are_refused(as_references: bool, tmp_path: Path) -> None:
    """Only the last of two columns `answers` would be read, and a gold document found by it."""
    rows = [["question", "contexts", "answers", "answers"], ["Q?", "['a b']", "a", "b"]]
    file = tmp_path / "log.csv"
    file.write_text("\n".join(",".join(row) for row in rows))
    references = None
    if as_references:
        references = file
        file = write_lines(
            tmp_path / "log.jsonl", {"question": "Q?", "contexts": ["a"]}
        )
    field = "task.references" if as_references else "task.path"
    with refused(field, hint="names answers more"):
        read_log(file, references)
    with refused("task.path", hint="names answers more"):
        OwnData(path=str(tmp_path / "log.csv")).evaluation()


def test_bytes_of_another_encoding_are_told_from_missing_columns(
    tmp_path: Path,
) -> None:
    text = "question,contexts,answers\n" + "Où?,['a'],b\n" * 2
    (tmp_path / "log.csv").write_bytes(text.encode("latin-1"))
    with refused("task.path", allowed="not UTF-8", hint="as UTF-8"):
        read_log(tmp_path / "log.csv")
    row = {"question": "Où?", "contexts": ["a", "b"], "answers": ["b"]}
    file = write_lines(tmp_path / "log.jsonl", row)
    line = json.dumps(row, ensure_ascii=False).encode("latin-1")
    file.write_bytes(file.read_bytes() + line)
    log = read_log(file)
    assert [question.line for question in log.questions] == [1]
    assert any("1 of 2 lines skipped (bytes that are not" in n for n in log.notes())
    (tmp_path / "log.csv").write_text("question,contexts,answers\nQ?,b\n")
    with refused("task.path", allowed="another number of", hint="the fields question"):
        read_log(tmp_path / "log.csv")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["unix", "windows", "mac"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "marked"])
def test_lines_may_end_as_on_any_system(mark: str, end: str, tmp_path: Path) -> None:
    """Not at the separators that only Python takes for ends of lines: they may stand in a text."""
    row = {"contexts": ["a\u2028b\x85c", "d"], "answers": ["d"]}
    texts = [
        json.dumps({"question": f"Q{i}?", **row}, ensure_ascii=False) for i in range(3)
    ]
    file = tmp_path / "log.jsonl"
    file.write_bytes((mark + end.join(texts) + 3 * end).encode())
    log = read_log(file)
    assert [(q.line, q.question) for q in log.questions] == [
        (1, "Q0?"),
        (2, "Q1?"),
        (3, "Q2?"),
    ]
    assert not log.problems
    assert log.questions[0].documents[0].text == row["contexts"][0]


@pytest.mark.parametrize("score", ["0,83", "high", 10**400])
def test_a_score_that_is_no_number_is_refused_with_the_form_of_one(
    score: object, tmp_path: Path
) -> None:
    row = {"question": "Who?", "answers": ["she"]}
    lists = {"documents": [{"text": "she", "score": score}]}
    beside = {"documents": ["she"], "scores": [score]}
    for fields in (lists, beside):
        file = write_lines(tmp_path / "log.jsonl", {**row, **fields})
        with refused("task.path", allowed="not a number", hint=("point", "0.83")):
            read_log(file)


@pytest.mark.parametrize("kind", ["scores", "document_ids"])
@pytest.mark.parametrize("cell", ["[1,0; 0,9]", "1.0 0.9", "0.9"])
def test_a_column_beside_the_documents_that_is_no_list_is_named(
    cell: str, kind: str, tmp_path: Path
) -> None:
    """Without their scores the documents would be ordered as logged, and nobody told why."""
    row = {"question": "Who?", "contexts": "['she', 'he']", "answers": "she"}
    pd.DataFrame([{**row, kind: cell}, {**row, kind: "['2', '1']"}]).to_csv(
        tmp_path / "log.csv", index=False
    )
    log = read_log(tmp_path / "log.csv")
    assert len(log.questions) == 2 and log.questions[0].scores is None
    (note,) = (note for note in log.notes() if "not used" in note)
    assert note.startswith(kind.removeprefix("document_")) and ": 1 " in note


@pytest.mark.parametrize("score", [None, float("nan"), float("inf")])
def test_scores_that_a_document_lacks_are_named(
    score: float | None, tmp_path: Path
) -> None:
    """Its question keeps the order of the log then, whatever the other documents score."""
    documents = [{"text": "she", "score": 0.1}, {"text": "he", "score": 0.9}]
    row = {"question": "Who?", "documents": documents, "answers": ["she"]}
    gap = {**row, "documents": [documents[0], {**documents[1], "score": score}]}
    none = {**row, "documents": [{"text": "she"}, {"text": "he"}]}
    single = {**row, "documents": documents[:1]}
    log = read_log(write_lines(tmp_path / "log.jsonl", row, gap, none, single))
    assert [q.scores for q in log.questions] == [[0.1, 0.9], None, None, [0.1]]
    (note,) = (note for note in log.notes() if "scores are not used" in note)
    assert note.endswith(": 1 of 4 lines, the first is line 2")
    (note,) = (note for note in log.notes() if "single document" in note)
    assert note.startswith("1 of 4 ")


def test_gold_ids_without_ids_of_documents_are_not_taken_for_indices(
    tmp_path: Path,
) -> None:
    row = {"question": "Who?", "contexts": ["she", "he"], "answers": ["she"]}
    texts = {"reference_context_ids": ["x"], "reference_contexts": ["he"]}
    rows = [{**row, "gold_doc_id": 1}, {**row, "gold": "x"}, {**row, **texts}]
    log = read_log(write_lines(tmp_path / "a.jsonl", *rows))
    assert [q.gold for q in log.questions] == [(0,), (0,), (1,)]
    assert [q.gold_is_named for q in log.questions] == [False, False, True]
    assert any("ids" in note and "2 of 3 lines" in note for note in log.notes())


def test_titles_may_be_empty_and_passages_long_or_repeated() -> None:
    log = read_log(log_file("gold_doc_id"))
    documents = [d for q in log.questions for d in q.documents]
    assert any(d.title == "" for d in documents)
    assert max(len(d.text.split()) for d in documents) == 2521
    assert any(
        len({d.text for d in q.documents}) < len(q.documents) for q in log.questions
    )


@pytest.mark.parametrize(
    "reply", ["result", "data", "response", "output", "actual_output"]
)
def test_a_reply_is_never_a_reference(reply: str, tmp_path: Path) -> None:
    row = {"question": "Who?", "contexts": ["nobody"], reply: "nobody"}
    (question,) = read_log(write_lines(tmp_path / "a.jsonl", row)).questions
    assert (question.answers, question.reply) == (None, "nobody")


def test_answer_is_a_reply_beside_another_reference(tmp_path: Path) -> None:
    row = {"question": "Who?", "contexts": ["nobody"], "answer": "he"}
    log = read_log(write_lines(tmp_path / "a.jsonl", row))
    assert log.questions[0].answers == ("he",)
    assert any('"answer" is read as the reference' in line for line in log.notes())
    # A file has one meaning: a line without a reference does not turn its reply into one.
    rows = [{**row, "ground_truth": "nobody"}, row, {**row, "ground_truth": None}]
    log = read_log(write_lines(tmp_path / "b.jsonl", *rows))
    assert [q.answers for q in log.questions] == [("nobody",), None, None]
    assert [q.reply for q in log.questions] == ["he"] * 3
    chain = {"input": "Who?", "context": [], "answer": "he"}
    _, good = SAMPLES["chain"]
    log = read_log(write_lines(tmp_path / "c.jsonl", chain, good))
    assert [(q.answers, q.reply) for q in log.questions] == [(None, REPLY)]


def test_spans_that_lost_attributes_are_skipped(tmp_path: Path) -> None:
    names = ["input.value"]
    for i in range(40):
        names += [f"retrieval.documents.{i}.document.{k}" for k in ("id", "content")]
        names += [f"retrieval.documents.{i}.document.metadata"]
    attributes = {name: "{}" if name.endswith("metadata") else name for name in names}
    last = dict(list(attributes.items())[-115:])
    whole = {"context": {"trace_id": "b"}, "attributes": FLAT_ATTRIBUTES}
    lost = {"context": {"trace_id": "a"}, "attributes": last}
    counted = {**whole, "droppedAttributesCount": 12}
    log = read_log(write_lines(tmp_path / "a.jsonl", lost, whole, counted))
    assert [q.line for q in log.questions] == [2]
    (problem,) = log.problems
    assert (problem.count, problem.line) == (2, 1) and "128" in problem.right
    for missing in (0, 1, 2):
        gap = dict(FLAT_ATTRIBUTES)
        del gap[f"retrieval.documents.{missing}.document.content"]
        gap[f"retrieval.documents.{missing}.document.metadata"] = "{}"
        with refused("task.path", hint="128"):
            read_log(write_lines(tmp_path / "b.jsonl", {"attributes": gap}))


def test_distances_are_named_once(tmp_path: Path) -> None:
    rows = [
        {"question": f"{i}?", "docs": [{"text": t, "score": s} for t, s in zip("abc", (0.1, 0.2, 0.9), strict=True)]}
        for i in range(3)
    ]  # fmt: skip
    log = read_log(write_lines(tmp_path / "a.jsonl", *rows))
    assert log.are_distances
    assert sum("distances?" in line for line in log.notes()) == 1
    for name in SHAPES:
        assert not read_log(log_file(name)).are_distances


def langchain_reordered(documents: list[int]) -> list[int]:
    """LangChain's LongContextReorder, by its own rule."""
    result: list[int] = []
    for index, document in enumerate(reversed(documents)):
        if index % 2:
            result.append(document)
        else:
            result.insert(0, document)
    return result


def test_reordered_lists_are_recognised() -> None:
    haystack = {5: [1, 3, 5, 4, 2], 8: [1, 3, 5, 7, 8, 6, 4, 2]}
    for size in range(5, 12):
        for order in (langchain_reordered([*range(1, size + 1)]), haystack.get(size)):
            if order is None:
                continue
            scores = [-float(rank) for rank in order]
            assert has_best_at_ends(scores, False)
            assert not has_best_at_ends(scores, True)
            assert not seems_small_first([scores])
            assert seems_small_first([[-score for score in scores]])
    assert not has_best_at_ends([5, 4, 3, 2, 1], False)
    # Three documents may stand so by chance.
    assert not has_best_at_ends([3, 1, 2], False)


def test_a_reference_pattern_leaves_only_cited_documents(tmp_path: Path) -> None:
    cited = [{**HAYSTACK[2], "meta": {"source_index": 3}}]
    line = {"answer_builder": {"answers": [{**ANSWER, "documents": cited}]}}
    log = read_log(write_lines(tmp_path / "a.jsonl", line))
    assert any("cited" in note for note in log.notes())
    line["retriever"] = {"documents": HAYSTACK}
    log = read_log(write_lines(tmp_path / "b.jsonl", line))
    assert len(log.questions[0].documents) == 3
    # What a ranker left was read, not all that was retrieved.
    line["ranker"] = {"documents": HAYSTACK[1:]}
    line["other"] = {"documents": HAYSTACK[:1]}
    ranked = read_log(write_lines(tmp_path / "c.jsonl", line)).questions[0]
    assert [d.id for d in ranked.documents] == ["h1", "h2"]
    assert not any("cited" in note for note in log.notes())


@pytest.mark.parametrize(
    "line",
    [
        {"question": "Who?", "retrieved_context_ids": ["a", "b"], "reference": "x"},
        {"question": "Who?", "documents": [{"id": "a", "score": 1}]},
        {"question": "Who?", "documents": [3, 4]},
        {
            "attributes": {
                "input.value": "Who?",
                "gen_ai.retrieval.documents": '[{"id": "a", "score": 1.0}]',
            }
        },
    ],
)
def test_ids_without_text_are_refused_in_a_line(line: Any, tmp_path: Path) -> None:
    with refused("task.path", allowed="but no text", hint="texts"):
        read_log(write_lines(tmp_path / "a.jsonl", line, line))


def test_nested_retrievers_and_repeated_tests_count_once(tmp_path: Path) -> None:
    def span(name: str, parent: str | None) -> dict[str, Any]:
        context = {"trace_id": "t", "span_id": name}
        return {"context": context, "parent_id": parent, "attributes": FLAT_ATTRIBUTES}

    file = write_lines(tmp_path / "a.jsonl", span("b", "a"), span("a", "root"))
    assert [q.line for q in read_log(file).questions] == [2]
    _, test = SAMPLES["promptfoo"]
    log = read_log(write_lines(tmp_path / "b.jsonl", test, test))
    assert len(log.questions) == 1 and log.problems[0].count == 1


def test_runs_of_a_trace_are_one_question(tmp_path: Path) -> None:
    root = {"trace_id": "t", "inputs": {"input": ASKED}, "outputs": {"output": REPLY}}
    retriever = {
        "trace_id": "t",
        "parent_run_id": "x",
        "inputs": {"query": "rewritten"},
        "outputs": {"documents": PAGES},
    }
    (question,) = read_log(write_lines(tmp_path / "a.jsonl", retriever, root)).questions
    assert (question.question, question.reply) == (ASKED, REPLY)
    assert len(question.documents) == 3


# Damage.


def as_lines(name: str) -> list[Any]:
    """The entries of a log as JSON lines; empty for a folder and parquet."""
    file = log_file(name)
    if file.is_dir() or file.suffix == ".parquet":
        return []
    if ".jsonl" in file.name:
        return lines_of(file)
    data = json.loads(gzip.decompress(file.read_bytes()))
    return data["results"]["results"] if isinstance(data, dict) else list(data)


@pytest.mark.parametrize("name", sorted(set(SHAPES) - {"beir", "hf_dpr"}))
def test_damaged_lines_are_counted_and_the_others_read(
    name: str, tmp_path: Path
) -> None:
    lines = as_lines(name)
    whole = normal_form(read_log(log_file(name)))
    texts = [json.dumps(line) for line in lines]
    texts[-1] = texts[-1][: len(texts[-1]) // 2]
    log = read_log(write_lines(tmp_path / "cut.jsonl", *texts))
    cut = [p for p in log.problems if p.line == len(lines)]
    assert len(cut) == 1 and cut[0].count == 1
    kept = normal_form(log)
    if name == "openinference_flat":
        # The line that was cut is the root, which held the reply; the model's own span still does.
        assert kept == whole
    else:
        assert kept == whole[:-1]
    data = tmp_path / "bytes.jsonl"
    raw = [json.dumps(line).encode() for line in lines]
    data.write_bytes(b"\n".join([b'{"\xff": 1}', *raw]))
    log = read_log(data)
    assert normal_form(log) == whole
    assert [(p.count, p.line) for p in log.problems] == [(1, 1)]


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_cut_short_is_refused_or_counted(name: str, tmp_path: Path) -> None:
    source = log_file(name)
    if source.is_dir():
        source = source / "corpus.jsonl.gz"
    data = source.read_bytes()
    file = tmp_path / source.name
    file.write_bytes(data[: len(data) * 2 // 3])
    with refused("task.path"):
        read_log(file)
    if source.suffix == ".gz":
        unpacked = gzip.decompress(data)
        file = tmp_path / source.stem
        file.write_bytes(unpacked[: len(unpacked) * 2 // 3])
        if file.suffix == ".json" or name == "beir":
            with refused("task.path"):
                read_log(file)
        else:
            assert sum(p.count for p in read_log(file).problems) == 1


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a value, of lists only those of the first element."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths_of(item, (*path, key))
    elif isinstance(value, list) and value:
        yield from paths_of(value[0], (*path, 0))


REPLACEMENTS: list[Any] = [
    *(None, True, 0, -1, 1.5, 1e308, 10**30, "", " ", "x", "[1, 'a'", "[1, 2]"),
    *([], [None], [[]], [1], ["", "a"], {}, {"a": 1}, {"text": [None]}, [{"id": 1}]),
    *({"0": {}}, "é" * 9, "{", '{"question": []}', float("nan")),
    *('{"title": "\\ud800"}', r"['\ud800', 'b']", "[{1, 2}]", "[" * 500),
]


@pytest.mark.parametrize("name", SAMPLES)
def test_any_value_in_any_field_is_read_skipped_or_refused(
    name: str, tmp_path: Path
) -> None:
    _, line = SAMPLES[name]
    other = {**line, "testIdx": 7} if name == "promptfoo" else line
    whole = read_log(write_lines(tmp_path / "whole.jsonl", line)).questions[0]
    for path in paths_of(line):
        for replacement in REPLACEMENTS:
            damaged = deepcopy(line)
            if path:
                target = damaged
                for key in path[:-1]:
                    target = target[key]
                target[path[-1]] = replacement
            else:
                damaged = replacement
            file = write_lines(tmp_path / "log.jsonl", damaged, other)
            task = RetrievalLog(path=str(file))
            try:
                log = task.log
            except UserError as error:
                assert "\n" not in str(error)
                continue
            for example in task.evaluation():
                example.prompt.encode()
                assert all(
                    sorted(order) == list(range(len(example.items)))
                    for order in example.orders.values()
                )
            with suppress(UserError):
                OwnData(path=str(file)).evaluation()
            # What is right is read whatever stands beside it.
            assert whole.documents in [q.documents for q in log.questions]
            assert all("\n" not in note for note in task.notes())


@pytest.mark.parametrize(
    "content",
    ["", "\n\n", "[]", "{}", "[1, 2]", "null", "nothing", "[", "{", '{"a": 1}'],
)
def test_what_is_no_log_is_refused_in_a_line(content: str, tmp_path: Path) -> None:
    for suffix in ("jsonl", "json", "csv", "parquet", "jsonl.gz"):
        file = tmp_path / f"a.{suffix}"
        file.write_text(content)
        with refused("task.path"):
            read_log(file)


def test_a_folder_needs_corpus_queries_and_one_run(tmp_path: Path) -> None:
    with refused("task.path", allowed=("corpus.jsonl", "*.trec")):
        read_log(tmp_path)
    write_lines(tmp_path / "corpus.jsonl", {"_id": "a", "text": "A"}, {"_id": "b"})
    write_lines(
        tmp_path / "queries.jsonl",
        {"_id": "1", "text": "One?"},
        {"_id": 2, "text": "Two?"},
    )
    with refused("task.path", allowed="run"):
        read_log(tmp_path)
    (tmp_path / "run.trec").write_text("2 Q0 a 1 0.5 x\n1 Q0 b 1 3 x\n")
    log = read_log(tmp_path)
    assert [(q.id, q.question, q.gold) for q in log.questions] == [("2", "Two?", None)]
    assert any("ids, but no text" in note for note in log.notes())
    (tmp_path / "other.trec").write_text("")
    with refused("task.path", allowed=("run.trec", "other.trec")):
        read_log(tmp_path)


@pytest.mark.parametrize("score", ["12,5", "nan", "high", ""])
def test_a_line_that_would_cost_a_query_a_document_is_refused(
    score: str, tmp_path: Path
) -> None:
    write_lines(tmp_path / "corpus.jsonl", *({"_id": n, "text": n} for n in "ab"))
    write_lines(tmp_path / "queries.jsonl", {"_id": "q", "text": "Q?"})
    (tmp_path / "run.trec").write_text(f"q Q0 a 1 9 x\nq Q0 b 2 {score} x\n")
    with pytest.raises(UserError) as refusal:
        read_log(tmp_path)
    assert "run.trec, line 2" in str(refusal.value) and score in str(refusal.value)
    for encoding, named in (("utf-16", "UTF-16"), ("latin-1", "UTF-8")):
        (tmp_path / "run.trec").write_bytes("q Q0 é 1 9 x\n".encode(encoding))
        with refused("task.path", allowed=named, hint="as UTF-8"):
            read_log(tmp_path)
    (tmp_path / "run.trec").write_text("q Q0 a 1 9 x\nq Q0 b 2 8 x\n")
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\ta\tyes\n")
    with pytest.raises(UserError, match=r"qrels\.tsv, line 2"):
        read_log(tmp_path)
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\ta\t1\n")
    (question,) = read_log(tmp_path).questions
    assert len(question.documents) == 2 and question.gold == (0,)


def test_a_run_is_read_by_its_scores(tmp_path: Path) -> None:
    write_lines(tmp_path / "corpus.jsonl", *({"_id": n, "text": n} for n in "abcd"))
    write_lines(tmp_path / "queries.jsonl", {"_id": "q", "text": "Q?"})
    (tmp_path / "run.trec").write_text(
        "q Q0 a 1 1.0 x\nq Q0 b 2 9.0 x\nq Q0 c 4 5.0 x\nq Q0 d 3 5.0 x\n"
    )
    (question,) = read_log(tmp_path).questions
    assert [d.id for d in question.documents] == ["b", "d", "c", "a"]


def test_references_that_fit_nothing_are_refused(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "a.jsonl", SAMPLES["retrieval_qa"][1])
    other = write_lines(tmp_path / "r.jsonl", {"question": "Else?", "answers": ["x"]})
    with refused("task.references", allowed="text or id"):
        read_log(log, other)
    with refused("task.references"):
        read_log(log, tmp_path / "missing.csv")
    by_id = write_lines(tmp_path / "i.jsonl", {"id": "r1", "answer": 42}, {"id": "r2"})
    run = write_lines(tmp_path / "b.jsonl", SAMPLES["run_tree"][1])
    joined = read_log(run, by_id)
    assert joined.questions[0].answers == ("42",) and joined.questions[0].gold == (0,)
    assert any("line 2" in note for note in joined.notes())


def test_the_text_of_a_question_joins_before_its_id(tmp_path: Path) -> None:
    """Ids may count the lines of another file, and one id may stand for several questions."""
    texts = ["Who came?", "Who left?", "Who sang?"]
    asked = [{"id": i, "question": q, "contexts": ["a b"]} for i, q in enumerate(texts)]
    log = asked_log = write_lines(tmp_path / "log.jsonl", *asked)

    def answers(log: Path, *references: dict[str, Any]) -> list[Any]:
        file = write_lines(tmp_path / "references.jsonl", *references)
        read = read_log(log, file)
        (note,) = (note for note in read.notes() if note.startswith("references of"))
        return [*(q.answers for q in read.questions), note.partition("; ")[2]]

    turned = [{"id": i, "question": q} for i, q in enumerate(reversed(texts))]
    found = answers(log, *(r | {"answer": r["question"]} for r in turned))
    assert found == [*((q,) for q in texts), ""]
    reworded = {"id": 1, "question": "who was it that left", "answer": "b"}
    *found, remark = answers(log, reworded)
    assert found == [None, ("b",), None] and remark.startswith("1 by id alone")
    shared = write_lines(
        tmp_path / "shared.jsonl",
        *(row | {"id": min(i, 1)} for i, row in enumerate(asked)),
    )
    *found, remark = answers(shared, {"id": 0, "answer": "a"}, {"id": 1, "answer": "b"})
    assert found == [("a",), None, None] and remark.startswith("2 share their id")
    both = [{"id": 7, "question": texts[0], "contexts": [c]} for c in "ab"]
    both[1]["id"] = 8
    log = write_lines(tmp_path / "both.jsonl", *both)
    references = [{"id": row["id"], "question": texts[0]} for row in both]
    found = answers(log, *(r | {"answer": str(r["id"])} for r in references))
    assert found == [("7",), ("8",), ""]
    # Neither of these is an answer to "Who left?".
    for references in (
        [{"id": 1, "question": texts[2], "answer": "c"}],
        [{"id": 1, "question": f"{n}?", "answer": "c"} for n in "12"],
    ):
        *found, remark = answers(asked_log, {"id": 0, "answer": "a"}, *references)
        assert found[:2] == [("a",), None] and remark.startswith("1 share their id")
    alike = [
        {"question": texts[0], "answer": "a"},
        {"question": texts[0], "answer": "b"},
    ]
    *found, remark = answers(asked_log, *alike)
    assert found[0] == ("a", "b") and remark.startswith("1 have answers from several")
    *found, remark = answers(asked_log, *alike[:1] * 2)
    assert found[0] == ("a",) and not remark


@pytest.mark.parametrize("name", ["corpus.jsonl", "queries.jsonl"])
def test_an_id_of_a_folder_that_stands_for_two_texts_is_refused(
    name: str, tmp_path: Path
) -> None:
    write_lines(tmp_path / "corpus.jsonl", {"_id": "a", "title": "", "text": "A"})
    write_lines(tmp_path / "queries.jsonl", {"_id": "q", "text": "Who?"})
    (tmp_path / "run.trec").write_text("q Q0 a 1 9 x\n")
    rows = [*map(json.loads, (tmp_path / name).read_text().splitlines())]
    write_lines(tmp_path / name, *rows, *rows)
    assert {q.question for q in read_log(tmp_path).questions} == {"Who?"}
    write_lines(tmp_path / name, *rows, {**rows[0], "text": "B"})
    with refused(f"task.path: {name}, line 2", allowed="once", hint="remove"):
        read_log(tmp_path)
