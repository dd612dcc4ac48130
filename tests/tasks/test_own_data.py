"""Files of one's own: every kind as it is asked, what is tolerated, and what is said of wrong lines."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from posbench.errors import UserError
from posbench.schema import build
from posbench.tasks.kv_retrieval import compact_prompt
from posbench.tasks.own_data import KINDS, OwnData, parse_file
from tests.conftest import Result
from tests.messages import assert_names, assert_refused, refused
from tools.pages import schema

DATA = Path(__file__).parents[1] / "data" / "own"
ITEMS = {
    "question": "Which?",
    "items": ["one", "two", "three"],
    "gold": 1,
    "answers": ["2", "two"],
}
CHOICES = {"question": "Which?", "choices": ["one", "two", "three"], "gold": 2}


def write(file: Path, *rows: Any) -> Path:
    file.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return file


def task(file: Path, **fields: Any) -> OwnData:
    return build(OwnData, {"path": str(file), **fields}, "task")


def test_documents_are_asked_as_by_liu_et_al_and_the_gold_one_moves() -> None:
    examples = task(DATA / "documents.jsonl", positions=[0, "50%", 4]).evaluation()
    assert [e.id for e in examples[:4]] == [
        "0-harbour",
        "2-harbour",
        "4-harbour",
        "0-market",
    ]
    assert examples[1].prompt == (
        "Write a high-quality answer for the given question using only the provided search results "
        "(some of which might be irrelevant).\n\n"
        "Document [1](Title: Library) The library of Velm lends maps as well as books.\n"
        "Document [2](Title: Bridge) The stone bridge of Velm has nine arches.\n"
        "Document [3](Title: Harbour) The harbour of Velm opened in 1911 and has four piers.\n"
        "Document [4](Title: Market) The market of Velm is held every Tuesday.\n"
        "Document [5](Title: Tower) The bell tower of Velm is 42 metres high.\n\n"
        "Question: How many piers does the harbour have?\nAnswer:"
    )
    assert (
        examples[1].answers == ("four", "4") and len({e.cluster for e in examples}) == 4
    )
    for e in examples:
        assert e.gold_position is not None
        start, end = e.items[e.gold_position]
        assert e.prompt[start:end].startswith(f"Document [{e.gold_position + 1}]")
        assert any(answer in e.prompt[start:end] for answer in e.answers)


def test_documents_may_lack_a_title(tmp_path: Path) -> None:
    row = {**ITEMS, "documents": [{"text": "one"}, {"text": "two"}]}
    del row["items"]
    assert (
        "Document [1] two\nDocument [2] one"
        in task(write(tmp_path / "a.jsonl", row)).evaluation()[0].prompt
    )


def test_items_stand_in_a_template_and_the_others_keep_their_order(
    tmp_path: Path,
) -> None:
    own = task(
        write(tmp_path / "a.jsonl", ITEMS),
        positions=[0, 1, 2],
        template="<{question}|{context}>",
        separator="+",
    )
    assert [e.prompt for e in own.evaluation()] == [
        "<Which?|two+one+three>",
        "<Which?|one+two+three>",
        "<Which?|one+three+two>",
    ]
    assert own.items == 3


def test_the_example_in_the_documentation_asks_as_key_value_retrieval_does() -> None:
    file = Path(__file__).parents[2] / "docs/examples/task/own_words.yaml"
    given = yaml.safe_load(file.read_text())
    assert given.pop("path") == "tests/data/own/words.jsonl" and given.pop(
        "_target_"
    ).endswith(".OwnData")
    examples = task(DATA / "words.jsonl", **given).evaluation()
    assert len(examples) == 100
    for e in examples[:10]:
        pairs = re.findall(r'"(\w+)": "(\w+)"', e.prompt)
        key, value = pairs[e.gold_position or 0]
        assert (e.prompt, e.items) == compact_prompt(pairs, key) and e.answers == (
            value,
        )


def test_choices_have_letters_and_are_chosen() -> None:
    own = task(DATA / "choices.jsonl")
    first, second, _ = own.evaluation()
    assert (
        first.prompt
        == "Which of these is a fruit?\nA. brick\nB. pear\nC. spoon\nD. cloud\nAnswer:"
    )
    assert (first.choices, first.answers, second.choices) == (
        (" A", " B", " C", " D"),
        ("B",),
        (" A", " B", " C"),
    )
    assert own.score(first, " B") == {"accuracy": 1.0} and own.score(first, " A") == {
        "accuracy": 0.0
    }
    assert [e.subset for e in own.evaluation()] == [
        "things",
        "days",
        "things",
    ] and own.items is None
    assert [e.id for e in task(DATA / "choices.jsonl", limit=1).evaluation()] == [
        "1",
        "2",
    ], "one of each subset"


def test_subsets_are_asked_by_name() -> None:
    assert [
        e.id for e in task(DATA / "choices.jsonl", subsets=["things"]).evaluation()
    ] == ["1", "3"]
    with refused("task.subsets", "thing", allowed=("things", "days"), hint="things"):
        task(DATA / "choices.jsonl", subsets=["thing"]).evaluation()


def test_a_long_text_can_be_cut() -> None:
    first, _ = task(DATA / "long_text.jsonl").evaluation()
    assert first.document is not None
    start, end = first.document
    assert first.prompt[start:end].startswith("On day 1") and first.prompt[
        start:end
    ].endswith("ate eggs.")
    assert (
        first.prompt[end:]
        == "\n\nQuestion: How many islands did the ship pass on day 4?\nAnswer:"
    )


@pytest.mark.parametrize(
    ("reply", "score"), [("It is TWO.", 1.0), ("2", 1.0), ("three", 0.0), ("", 0.0)]
)
def test_an_accepted_answer_has_to_occur(
    reply: str, score: float, tmp_path: Path
) -> None:
    own = task(write(tmp_path / "a.jsonl", ITEMS))
    assert own.score(own.evaluation()[0], reply) == {"accuracy": score}


def test_accents_count_alike_however_they_are_encoded(tmp_path: Path) -> None:
    row = {**ITEMS, "answers": ["caf\u00e9"]}
    (example, *_) = task(write(tmp_path / "a.jsonl", row)).evaluation()
    own = task(tmp_path / "a.jsonl")
    assert own.score(example, "the cafe\u0301.") == {"accuracy": 1.0}
    assert own.score(example, "the cafe.") == {"accuracy": 0.0}


def test_marks_line_ends_blank_lines_and_gzip_change_nothing(tmp_path: Path) -> None:
    plain = task(DATA / "items.jsonl").evaluation()
    text = (DATA / "items.jsonl").read_bytes()
    windows = b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n")
    (tmp_path / "windows.jsonl").write_bytes(windows)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(windows))
    for name in ("windows.jsonl", "packed.jsonl.gz"):
        assert task(tmp_path / name).evaluation() == plain
    (tmp_path / "blank.jsonl").write_bytes(b"\n" + text.replace(b"\n", b"\n \n"))
    again = task(tmp_path / "blank.jsonl").evaluation()
    assert [e.prompt for e in again] == [e.prompt for e in plain]


WRONG = [
    (
        {"answers": ...},
        'field "answers" is missing; allowed: a list [...] of at least 1: text',
    ),
    ({"question": 3}, 'field "question" is 3; allowed: text'),
    ({"question": " "}, "field \"question\" is ' '; allowed: text, not blank"),
    ({"answers": "two"}, "field \"answers\" is 'two'; allowed: a list"),
    ({"answers": []}, 'field "answers" is []; allowed: a list'),
    ({"answers": ["two", ""]}, "field \"answers[1]\" is ''; allowed: a list"),
    (
        {"items": ["one"]},
        "field \"items\" is ['one']; allowed: a list [...] of at least 2: text",
    ),
    ({"items": ["one", None]}, 'field "items[1]" is None'),
    ({"items": ["two", "one", " two"], "gold": 0}, 'field "items[2]" repeats'),
    ({"gold": "1"}, "field \"gold\" is '1'; allowed: a whole number from 0 up"),
    ({"gold": True}, 'field "gold" is True; allowed: a whole number'),
    ({"gold": 1.0}, 'field "gold" is 1.0; allowed: a whole number'),
    ({"gold": 3}, 'field "gold" is 3; allowed: a place in "items", from 0 to 2'),
    (
        {"id": "first"},
        "field \"id\" is 'first', as on line 1; allowed: an id that occurs once",
    ),
]


@pytest.mark.parametrize(
    ("changed", "said"), WRONG, ids=[said[:28] for _, said in WRONG]
)
def test_a_wrong_line_is_named_with_its_field(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    row = {
        key: value for key, value in {**ITEMS, **changed}.items() if value is not ...
    }
    file = write(tmp_path / "a.jsonl", {**ITEMS, "id": "first"}, "", row)
    with pytest.raises(UserError) as told:
        task(file).evaluation()
    assert str(told.value).startswith(f"{file}, line 3: {said}")
    assert (
        str(told.value).endswith("; next: fix or remove that line")
        and len(told.value.faults) == 1
    )


@pytest.mark.parametrize(
    "subsets", [("a", ""), ("", "a"), ("a", "all"), ("nan", "a"), ("all", "all")]
)
def test_a_subset_has_a_name_on_every_line(
    subsets: tuple[str, str], tmp_path: Path
) -> None:
    rows = [{**ITEMS, "subset": name} for name in subsets]
    file = write(tmp_path / "a.jsonl", *rows)
    with pytest.raises(UserError) as told:
        task(file).evaluation()
    fault = told.value.faults[0]
    assert fault.field.startswith(f"{file}, line")
    assert_names(str(fault.value), "subset")
    assert_names(fault.allowed, "every line", "none", "all", "nan")


def test_a_second_copy_of_the_right_choice_is_refused(tmp_path: Path) -> None:
    """Its letter would count as wrong."""
    row = {"question": "Which?", "choices": ["pear", "spoon", "pear"], "gold": 0}
    file = tmp_path / "choices.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="one place alone"):
        OwnData(path=str(file)).evaluation()


def test_documents_without_gold_are_a_log(tmp_path: Path) -> None:
    texts = [{"text": "Ash."}, {"text": "It is Bern."}]
    row = {"question": "Q?", "documents": texts, "answers": ["Bern"]}
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps(row) + "\n")
    task = OwnData(path=str(file))
    assert task.own.log is not None and task.own.records[0].gold == 1


def test_lines_that_repeat_each_other_are_one_question(tmp_path: Path) -> None:
    other = {**ITEMS, "answers": ["2"]}
    rows = [ITEMS, {**ITEMS, "id": "again"}, other, {**ITEMS, "subset": ""}]
    own = task(write(tmp_path / "a.jsonl", *rows), positions=[0, 2])
    questions = {example.id: example.question_id for example in own.evaluation()}
    assert questions == {
        **{"0-1": "1", "2-1": "1", "0-again": "1", "2-again": "1"},
        **{"0-3": "3", "2-3": "3", "0-4": "1", "2-4": "1"},
    }
    assert_names(own.notes()[0], "2 of 4", "repeat")
    choices = task(write(tmp_path / "b.jsonl", CHOICES, CHOICES)).evaluation()
    assert [example.question_id for example in choices] == ["1", "1"]


def test_answers_outside_the_gold_item_are_told(tmp_path: Path) -> None:
    rows = [
        ITEMS,
        {**ITEMS, "items": ["Two more", "two", "three"]},
        {**ITEMS, "items": ["Two more", "two", "three"], "other_gold": [0]},
        {**ITEMS, "gold": 0},
    ]
    doubled, wrong, _ = task(write(tmp_path / "a.jsonl", *rows)).notes()[::-1]
    assert_names(doubled, "2 of 4", "items", "not gold")
    assert_names(wrong, "1 of 4", "gold", "answers")
    long_answers = {**ITEMS, "items": ["a", "twenty", "c"], "answers": ["twenty"]}
    assert task(write(tmp_path / "b.jsonl", long_answers)).notes() == []


def test_answers_are_whole_words_unless_the_text_is_to_match(tmp_path: Path) -> None:
    row = {**ITEMS, "items": ["one knows", "no two", "three"], "answers": ["no"]}
    file = write(tmp_path / "a.jsonl", row)
    for match, score in (("words", 0.0), ("text", 1.0)):
        own = task(file, match=match)
        example = own.evaluation()[0]
        assert own.score(example, "I do not know.") == {"accuracy": score}
        assert own.score(example, "No!") == {"accuracy": 1.0}
        short, *others = own.notes()
        # "knows" of the first item holds "no" as text alone.
        assert len(others) == score
        assert_names(short, "1 of 1", "'no'", "word")


def test_a_denied_answer_is_right_under_either_rule(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {**ITEMS, "answers": ["Mark Twain"]})
    for match in ("words", "text"):
        own = task(file, match=match)
        scores = own.score(own.evaluation()[0], "It was not Mark Twain.")
        assert scores == {"accuracy": 1.0}


def test_a_document_without_text_is_named(tmp_path: Path) -> None:
    row = {
        "question": "q",
        "documents": [{"text": "a"}, {"title": "b"}],
        "gold": 0,
        "answers": ["a"],
    }
    file = write(tmp_path / "a.jsonl", row)
    with pytest.raises(UserError) as told:
        task(file).evaluation()
    (fault,) = told.value.faults
    assert fault.field == f"{file}, line 1"
    assert_names(str(fault.value), "documents[1].text", "missing")
    assert_names(fault.allowed, "text", "title")


def test_all_faults_are_told_in_order_but_ten_at_most(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", ITEMS, "{broken", {}, "[1]", CHOICES)
    with pytest.raises(UserError) as told:
        task(file).evaluation()
    lines = str(told.value).splitlines()
    assert [re.findall(r", line (\d)", line) for line in lines] == [
        [n] for n in "23333455"
    ]
    first, sixth = told.value.faults[0], told.value.faults[5]
    assert_names(first.allowed, "JSON object", "UTF-8")
    assert_names(sixth.allowed, "JSON object", "UTF-8")
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(file.read_bytes().replace(b"{broken", b"\xe9") + b"\xe9\n" * 20)
    with refused(f"task.path: {latin}, line 2", "", allowed="UTF-8", hint="as UTF-8"):
        task(latin).evaluation()
    with pytest.raises(UserError) as told:
        task(write(tmp_path / "b.jsonl", ITEMS, *[{}] * 3)).evaluation()
    assert len(told.value.faults) == 11 and "2 more" in str(told.value).splitlines()[-1]


def test_an_empty_file_says_so_and_one_of_no_kind_its_fields(tmp_path: Path) -> None:
    with refused(
        "task.path", str(tmp_path / "a.jsonl"), allowed=("rows", "empty"), hint="path"
    ):
        task(write(tmp_path / "a.jsonl", "", " ")).evaluation()
    with refused(
        "task.path",
        f"{tmp_path / 'b.jsonl'} with fields x, y",
        allowed=("items", "documents", "choices", "context"),
        hint="docs/own_data.md",
    ):
        task(write(tmp_path / "b.jsonl", {"x": 1, "y": 2})).evaluation()
    official = DATA.parent / "kv_retrieval/kv-retrieval-75_keys.first3.jsonl"
    with refused(
        "task.path",
        f"{official} with fields ordered_kv_records, key, value",
        allowed="items",
        hint="task=kv_retrieval",
    ):
        task(official).evaluation()
    with refused("task.path", None, allowed="file", hint="posbench check-data FILE"):
        OwnData()


def test_lists_of_different_lengths_are_cut_when_asked_and_keep_the_gold_item(
    tmp_path: Path,
) -> None:
    longer = {**ITEMS, "items": ["one", "zero", "three", "two"], "gold": 3}
    file = write(tmp_path / "a.jsonl", ITEMS, longer)
    with refused(
        "task.items_per_prompt", None, allowed="3", hint="task.items_per_prompt=3"
    ):
        task(file).evaluation()
    with refused(
        "task.items_per_prompt", 4, allowed="3", hint="task.items_per_prompt=3"
    ):
        task(file, items_per_prompt=4).evaluation()
    examples = task(
        file,
        items_per_prompt=2,
        positions=["0%", "100%"],
        template="{context}|{question}",
        separator=",",
    ).evaluation()
    shown = [e.prompt.partition("|")[0] for e in examples]
    assert shown == ["two,one", "one,two", "two,one", "one,two"]


def test_fields_that_nothing_reads_are_known(tmp_path: Path) -> None:
    assert parse_file(
        write(tmp_path / "a.jsonl", {**ITEMS, "url": "x", "anwsers": []})
    ).unread == [
        "anwsers",
        "url",
    ]


def test_white_space_around_answers_does_not_count(tmp_path: Path) -> None:
    record = {**ITEMS, "answers": ["Paris \n"]}
    made = task(write(tmp_path / "a.jsonl", record), positions=["0%"])
    (example,) = made.evaluation()
    assert example.answers == ("Paris",)
    assert made.score(example, "It is Paris.") == {"accuracy": 1.0}


@pytest.mark.parametrize(
    "template",
    ["no place", "{context} {context}", "{context}\nAnswer:", "{context} {Question}"],
)
def test_a_template_without_its_place_is_refused(template: str) -> None:
    with refused(
        "task.template",
        template,
        allowed=("{context}", "{question}"),
        hint="task.template=null",
    ):
        task(DATA / "items.jsonl", template=template)


def test_the_schema_is_what_the_reader_asks(tmp_path: Path) -> None:
    for cls in KINDS.values():
        needed = [
            name for name, form, _ in schema(cls) if not form.endswith("left out")
        ]
        with pytest.raises(UserError) as told:
            parse_file(write(tmp_path / "a.jsonl", {cls.holds: None}))
        said = [
            str(fault).split('field "')[1].split('"')[0] for fault in told.value.faults
        ]
        assert sorted(said) == sorted(needed)


def test_a_prompt_that_is_too_long_names_the_line_and_the_item(tmp_path: Path) -> None:
    long_text = "The minutes of that year. " * 2300
    documents = [{"text": "short"}, {"text": long_text}, {"text": "mid"}]
    row = {**ITEMS, "documents": documents, "gold": 0, "id": "second"}
    del row["items"]
    file = tmp_path / "a.jsonl"
    short = {**row, "id": "first", "documents": documents[::2]}
    file.write_text(f"\n{json.dumps(short)}\n\n{json.dumps(row)}\n")
    own = task(file, items_per_prompt=2)
    hints = {
        own.how_to_shorten(example)
        for example in own.evaluation()
        if example.id.endswith("-second")
    }
    (hint,) = hints
    assert_names(hint, "documents[1]", "line 4", str(file), f"{len(long_text):,}"[:2])
    assert "middle" not in hint and "pairs" not in hint
    text = task(DATA / "long_text.jsonl")
    assert "task.truncation=document" in text.how_to_shorten(text.evaluation()[0])


def test_a_long_document_is_refused_with_its_line(
    tmp_path: Path, posbench: Callable[..., Result]
) -> None:
    items = ['"til": "kep"', '"nap": "dep"', ", ".join(['"dap": "kel"'] * 300)]
    row = {"question": "nap", "items": items, "gold": 1, "answers": ["dep"]}
    file = write(tmp_path / "own.jsonl", row)
    result = posbench("task=own_data", f"task.path={file}", "model=tiny")
    assert result.status == 2
    assert_refused(result.err, "prompt length", hint=("items[2]", "line 1", str(file)))
