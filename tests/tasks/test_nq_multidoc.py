"""Prompts, gold protocol, files and score of multi-document question answering, against the official data."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from posbench import paths
from posbench.schema import build
from posbench.tasks import Example
from posbench.tasks.nq_multidoc import Document, NQMultiDoc, render
from tests.messages import Tokens, line_refused, refused

DATA = Path(__file__).parents[1] / "data/nq_multidoc"
AT0, AT9 = (
    DATA / f"nq-open-20_total_documents_gold_at_{name}.jsonl"
    for name in ("0.first3", "9.first1")
)
TEN_AT4 = DATA / "nq-open-10_total_documents_gold_at_4.first1.jsonl"
REAL = Path(os.environ.get("POSBENCH_DATA", "/nowhere")) / "nq_multidoc_qa"
real = pytest.mark.skipif(
    "POSBENCH_DATA" not in os.environ,
    reason="POSBENCH_DATA names no folder of benchmark files",
)
DOCUMENTS = [
    Document(4, "first doc", "first doc text"),
    Document(1, "second doc", "second doc text"),
]


def _rows(file: Path) -> list[dict[str, Any]]:
    data = (
        gzip.decompress(file.read_bytes())
        if file.suffix == ".gz"
        else file.read_bytes()
    )
    return [json.loads(line) for line in data.decode().splitlines()]


def _task(path: Path = AT0, count: int = 3, **fields: Any) -> NQMultiDoc:
    return NQMultiDoc(path=str(path), limit=count, **fields)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (
            "official",
            "Write a high-quality answer for the given question using only the provided search results "
            "(some of which might be "
            "irrelevant).\n\nDocument [1](Title: first doc) first doc text\nDocument [2](Title: second "
            "doc) second doc text\n\n"
            "Question: test question\nAnswer:",
        ),
        (
            "query_aware",
            "Write a high-quality answer for the given question using only the provided search results "
            "(some of which might be "
            "irrelevant).\n\nQuestion: test question\n\nDocument [1](Title: first doc) first doc text\n"
            "Document [2](Title: second doc) second doc text\n\nQuestion: test question\nAnswer:",
        ),
        (
            "random_order",
            "Write a high-quality answer for the given question using only the provided search results "
            "(some of which might be "
            "irrelevant). The search results are ordered randomly.\n\nDocument [1](Title: first doc) first "
            "doc text\n"
            "Document [2](Title: second doc) second doc text\n\nQuestion: test question\nAnswer:",
        ),
        ("closed_book", "Question: test question\nAnswer:"),
    ],
)
def test_prompts_character_by_character(prompt: Any, expected: str) -> None:
    text, spans = render(
        prompt, "test question", [] if prompt == "closed_book" else DOCUMENTS
    )
    assert text == expected
    assert [text[a:b] for a, b in spans] == re.findall(r"Document \[.*", text)


def test_original_labels_character_by_character() -> None:
    text, _ = render("official", "test question", DOCUMENTS, renumber=False)
    assert (
        "\n\nDocument [4](Title: first doc) first doc text\nDocument [1](Title: second doc) second doc "
        "text\n\n" in text
    )


def test_the_gold_protocol() -> None:
    assert NQMultiDoc().gold_positions == [0, 4, 9, 14, 19]
    assert NQMultiDoc(documents=30, positions=(0, "50%", "100%")).gold_positions == [
        0,
        14,
        29,
    ]
    assert NQMultiDoc(documents=10).gold_positions == [0, 2, 4, 6, 9]


@pytest.mark.parametrize(
    ("file", "documents", "gold"), [(AT9, 20, 9), (TEN_AT4, 10, 4)]
)
def test_moving_the_gold_document_gives_the_official_files(
    file: Path, documents: int, gold: int
) -> None:
    """From the file with the gold first: the documents of other files, their order, and ten as a prefix of
    twenty."""
    ours = _task(count=1, documents=documents, positions=(gold,)).examples(
        "evaluation"
    )[0]
    theirs = _rows(file)[0]
    lines = [
        f"Document [{k}](Title: {c['title']}) {c['text']}"
        for k, c in enumerate(theirs["ctxs"], start=1)
    ]
    assert [ours.prompt[a:b] for a, b in ours.items] == lines
    assert theirs["ctxs"][gold]["isgold"] and ours.gold_position == gold
    assert ours.answers == tuple(theirs["answers"]) and ours.prompt.endswith(
        f"\n\nQuestion: {theirs['question']}\nAnswer:"
    )


def test_every_question_at_every_position() -> None:
    examples = _task().examples("evaluation")
    assert len(examples) == 15 and len({e.id for e in examples}) == 15
    assert [e.gold_position for e in examples[:5]] == [0, 4, 9, 14, 19]
    assert [e.cluster for e in examples] == [str(n) for n in range(3) for _ in range(5)]
    for example in examples:
        gold = _rows(AT0)[int(example.cluster)]["ctxs"][0]
        shown = [example.prompt[a:b] for a, b in example.items]
        assert [k for k, text in enumerate(shown) if gold["text"] in text] == [
            example.gold_position
        ]


def test_original_labels_stay_with_their_documents() -> None:
    example = _task(count=1, positions=(9,), labels="original").examples("evaluation")[
        0
    ]
    labels = [
        int(re.match(r"Document \[(\d+)\]", example.prompt[a:b]).group(1))
        for a, b in example.items
    ]  # type: ignore[union-attr]
    assert labels == [*range(2, 11), 1, *range(11, 21)]


def test_random_order_shuffles_the_others_alone() -> None:
    plain, mixed, again, other = (
        _task(prompt=prompt, positions=(0, 9), documents=20, seed=seed).examples(
            "evaluation"
        )
        for prompt, seed in (
            ("official", 0),
            ("random_order", 0),
            ("random_order", 0),
            ("random_order", 1),
        )
    )
    assert mixed == again and [e.prompt for e in mixed] != [e.prompt for e in other]

    def texts(example: Example) -> list[str]:
        return [example.prompt[a:b].split("]", 1)[1] for a, b in example.items]

    for one, two in zip(plain, mixed, strict=True):
        gold = one.gold_position
        assert gold is not None and gold == two.gold_position
        assert (
            texts(one)[gold] == texts(two)[gold]
            and texts(one) != texts(two)
            and set(texts(one)) == set(texts(two))
        )
    first, tenth = (texts(e) for e in mixed[:2])
    assert first[1:] == [*tenth[:9], *tenth[10:]]


def test_closed_book_and_oracle_ask_each_question_once() -> None:
    closed, oracle = (
        _task(prompt=prompt).examples("evaluation")
        for prompt in ("closed_book", "oracle")
    )
    assert [e.prompt for e in closed] == [
        f"Question: {row['question']}\nAnswer:" for row in _rows(AT0)
    ]
    assert [(e.gold_position, e.items) for e in closed] == [(None, ())] * 3
    for example, row in zip(oracle, _rows(AT0), strict=True):
        (start, end), gold = example.items[0], row["ctxs"][0]
        assert (
            example.prompt[start:end]
            == f"Document [1](Title: {gold['title']}) {gold['text']}"
        )
        assert example.prompt.count("Document [") == 1 and example.gold_position is None


def test_calibration_takes_the_next_questions() -> None:
    task = _task(count=1, calibration_examples=2, calibration_positions=(3, 7))
    asked = task.examples("evaluation")
    calibration = task.examples("calibration")
    rows = _rows(AT0)
    assert [e.gold_position for e in calibration] == [3, 7]
    assert [e.answers for e in calibration] == [
        tuple(rows[1]["answers"]),
        tuple(rows[2]["answers"]),
    ]
    assert {e.cluster for e in asked}.isdisjoint(e.cluster for e in calibration)


def test_calibration_passes_over_questions_that_the_evaluation_asks(
    tmp_path: Path,
) -> None:
    one, two, three = _rows(AT0)
    file = tmp_path / "twice.jsonl"
    file.write_text(
        "".join(
            json.dumps(row) + "\n"
            for row in (one, {**two, "question": one["question"].upper() + " "}, three)
        )
    )
    calibration = _task(file, 1, calibration_examples=1).examples("calibration")
    assert [e.answers for e in calibration] == [tuple(three["answers"])]
    with refused(
        "task.calibration_examples",
        2,
        allowed=("1", "3 questions"),
        hint=("task.limit", "task.path"),
    ):
        _task(file, 1, calibration_examples=2).examples("calibration")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"question": None}, ("question",)),
        ({"answers": []}, ("answers",)),
        ({"answers": ["yes", ""]}, ("answers",)),
        ({"answers": ["yes", " \t"]}, ("answers", "blank")),
        ({"answers": "yes"}, ("answers",)),
        ({"ctxs": []}, ("ctxs",)),
        ({"ctxs": ["text"]}, ("ctxs",)),
        ({"ctxs": [{"text": "b", "isgold": True}]}, ("title",)),
        ({"ctxs": [{"title": "a", "text": "b"}]}, ("isgold",)),
        ({"ctxs": [{"title": "a", "text": 3, "isgold": True}]}, ("text",)),
        (
            {"ctxs": [{"title": "a", "text": "b", "isgold": False}] * 20},
            ("one", "isgold", "0"),
        ),
        (
            {"ctxs": [{"title": "a", "text": "b", "isgold": True}] * 20},
            ("one", "isgold", "20"),
        ),
        (
            {"ctxs": [{"title": "a", "text": "b", "isgold": True}]},
            ("20 documents", "(1)"),
        ),
    ],
)
def test_a_malformed_line_is_named(
    change: dict[str, Any], named: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps({**_rows(AT0)[0], **change}) + "\n")
    with line_refused(file, 1, *named):
        _task(file, 1).examples("evaluation")


def test_a_file_with_fewer_documents_names_their_number(tmp_path: Path) -> None:
    row = _rows(AT0)[0]
    file = tmp_path / "few.jsonl"
    lines = [json.dumps({**row, "ctxs": row["ctxs"][:n]}) for n in (3, 4)]
    file.write_text("\n".join(lines))
    with refused("task.documents", 20, hint="task.documents=3"):
        _task(file, 1).examples("evaluation")
    few = _task(file, 2, documents=3, positions=(0, 2)).examples("evaluation")
    assert len(few) == 4
    assert len(_task(file, 1, prompt="oracle").examples("evaluation")) == 1


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl.gz"
    broken = tmp_path / "broken.jsonl"
    latin = tmp_path / "latin.jsonl"
    torn.write_bytes(gzip.compress(AT0.read_bytes())[:-400])
    broken.write_text(AT0.read_text().splitlines()[0] + '\n{"question": \n')
    good = AT0.read_bytes().splitlines()[0] + b"\n"
    latin.write_bytes(good + '{"question": "né"}\n'.encode("latin-1") * 2)
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(AT0.read_text().encode("utf-16"))
    unmarked = tmp_path / "unmarked.jsonl.gz"
    unmarked.write_bytes(gzip.compress(AT0.read_text().encode("utf-16-le")))
    for file in (marked, unmarked):
        with refused("task.path", str(file), allowed="UTF-16", hint="as UTF-8"):
            _task(file, 1).examples("evaluation")
    with refused("task.path", str(torn), allowed=".jsonl.gz", hint="2"):
        _task(torn, 1).examples("evaluation")
    with refused("task.path", str(tmp_path), hint="Is a directory") as caught:
        _task(tmp_path, 1).examples("evaluation")
    assert "line" not in caught.value.hint, "no line of a folder was read"
    with line_refused(broken, 2, "JSON"):
        _task(broken, 1).examples("evaluation")
    with refused(f"task.path: {latin}, line 2", "", allowed="UTF-8", hint="as UTF-8"):
        _task(latin, 1).examples("evaluation")
    with refused(
        "task.path",
        str(tmp_path / "absent.jsonl"),
        allowed="file",
        hint="github.com/nelson-liu/lost-in-the-middle",
    ):
        _task(tmp_path / "absent.jsonl").examples("evaluation")


@pytest.mark.parametrize(
    ("fields", "value", "allowed", "hint"),
    [
        ({"documents": 1}, 1, ("2", "1000000"), "task.documents=2"),
        ({"documents": 31}, 31, "30", "task.path"),
        ({"positions": (20,)}, 20, ("0", "19", "task.documents=20"), "list"),
        ({"positions": ()}, (), "1", "task.positions=[1]"),
        ({"positions": ("0%", 0)}, ["0%", 0], "different", "task.documents"),
        ({"calibration_positions": ("101%",)}, "101%", ("0%", "100%"), "list"),
    ],
)
def test_settings_out_of_range(
    fields: dict[str, Any], value: object, allowed: Tokens, hint: Tokens
) -> None:
    (name,) = fields
    with refused(f"task.{name}", value, allowed=allowed, hint=hint):
        build(NQMultiDoc, fields, "task")


def test_a_file_shorter_than_the_limit_is_asked_whole() -> None:
    assert _task(count=4).examples("evaluation") == _task(count=3).examples(
        "evaluation"
    )
    with refused(
        "task.calibration_examples",
        1,
        allowed=("0", "3 questions"),
        hint=("task.limit", "task.path"),
    ):
        _task(count=4, calibration_examples=1).examples("calibration")


def test_official_files() -> None:
    commit = "04cbd0df78d3260600fd04e524a29bd1404ef86b"
    at = f"https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/{commit}/qa_data"
    assert [
        NQMultiDoc(documents=n, positions=(0,)).files()[0].id for n in (2, 10, 11, 30)
    ] == [
        f"{at}/{n}_total_documents/nq-open-{n}_total_documents_gold_at_0.jsonl.gz"
        for n in (10, 10, 20, 30)
    ]
    assert NQMultiDoc(prompt="oracle").files()[0].id == f"{at}/nq-open-oracle.jsonl.gz"


def test_the_official_scores() -> None:
    rows = _rows(
        DATA.parent / "scored/nq_multidoc_qa/scored_predictions_gpt35_first300.jsonl"
    )
    assert len(rows) == 300
    _same_scores(rows)


@real
def test_all_official_files() -> None:
    """A hundred questions: moving the gold document in one file gives the prompts of all the others."""
    for documents, golds in ((20, (0, 4, 9, 14, 19)), (10, (0, 4, 9))):
        for gold in golds:
            size = f"{documents}_total_documents"
            file = REAL / f"qa_data/{size}/nq-open-{size}_gold_at_{gold}.jsonl.gz"
            theirs = _task(file, 100, documents=documents, positions=(gold,)).examples(
                "evaluation"
            )
            base = REAL / "base_20docs_gold_at_0_first300.jsonl.gz"
            assert (
                _task(base, 100, documents=documents, positions=(gold,)).examples(
                    "evaluation"
                )
                == theirs
            )


@real
def test_the_oracle_file_has_the_gold_documents() -> None:
    one, other = (
        REAL / name
        for name in (
            "nq-open-oracle_first300.jsonl.gz",
            "base_20docs_gold_at_0_first300.jsonl.gz",
        )
    )
    assert _task(one, 300, prompt="oracle").examples("evaluation") == _task(
        other, 300, prompt="oracle"
    ).examples("evaluation")


def _same_scores(rows: list[dict[str, Any]]) -> None:
    task = NQMultiDoc(reading="liu")
    for row in rows:
        example = Example(id="x", prompt="", answers=tuple(row["answers"]))
        scores = task.score(example, row["model_answer"])
        assert scores["accuracy"] == row["metric_best_subspan_em"]
        assert scores["whole_reply"] >= scores["accuracy"]


def test_the_two_scripts_differ_on_a_leading_line_break() -> None:
    example = Example(id="x", prompt="", answers=("Paris",))
    whole = {"whole_reply": 1.0}
    yu, liu = NQMultiDoc(reading="yu"), NQMultiDoc(reading="liu")
    assert yu.score(example, "\nParis") == {"accuracy": 1.0, **whole}
    assert liu.score(example, "\nParis") == {"accuracy": 0.0, **whole}
    assert yu.score(example, "London\nParis") == {"accuracy": 0.0, **whole}


def test_the_defaults_of_the_yaml_are_those_of_the_class() -> None:
    given = OmegaConf.to_container(
        OmegaConf.load(paths.CONF / "task/nq_multidoc.yaml"), resolve=True
    )
    assert (
        isinstance(given, dict)
        and given.pop("_target_") == "posbench.tasks.nq_multidoc.NQMultiDoc"
    )
    assert (
        build(NQMultiDoc, {str(k): v for k, v in given.items()}, "task") == NQMultiDoc()
    )
