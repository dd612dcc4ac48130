"""MMLU and C-Eval: prompts typed off the official ones, files, scores, categories, and the letters as
tokens."""

from __future__ import annotations

import csv
import json
import os
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from posbench.model.lm import LM
from posbench.pipeline.compose import compose_one
from posbench.schema import build
from posbench.tasks.ceval import SUBJECTS, CEval
from posbench.tasks.exam import Exam
from posbench.tasks.mmlu import MMLU
from tests.messages import Tokens, line_refused, refused

DATA = Path(__file__).parents[1] / "data/mmlu"
OWN = os.environ.get("POSBENCH_DATA")
real = pytest.mark.skipif(
    not OWN, reason="POSBENCH_DATA names no folder with the benchmarks' files"
)

Row = list[str]
DEV = [
    ["1+1=?", "2", "3", "4", "5", "A"],
    [" 2+1=? ", "2", "3", "4", "5", "B"],
    *([["x", "1", "2", "3", "4", "C"]] * 3),
]
TEST = [
    [" 0.10 is ", "0.10", "None", "NA", "1,000\n2", "D"],
    ["y", "a", "b", "c", "d", "A"],
]
C_DEV = [
    ["0", "一加一等于____。", "二", "三", "四", "五", "A", "1. 一加一\n2. 等于二"],
    *(
        [
            [str(number), "二加一等于____。", "二", "三", "四", "五", "B", "略"]
            for number in (1, 2, 3, 4)
        ]
    ),
]
C_VAL = [
    ["0", " 一加二等于____。", "二", "三", "四", "五", "B"],
    ["7", "三", "1", "2", "3", "4", "D"],
]
C_HEAD = ["id", "question", "A", "B", "C", "D", "answer"]


def _write(file: Path, rows: list[Row]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows(rows)
    return file


@pytest.fixture
def mmlu(tmp_path: Path) -> Path:
    _write(tmp_path / "mmlu/dev/us_foreign_policy_dev.csv", DEV)
    _write(tmp_path / "mmlu/test/us_foreign_policy_test.csv", TEST)
    return tmp_path / "mmlu"


def write_ceval(folder: Path) -> Path:
    """Short files of our own in the form of the official ones."""
    _write(folder / "dev/law_dev.csv", [[*C_HEAD, "explanation"], *C_DEV])
    _write(folder / "val/law_val.csv", [C_HEAD, *C_VAL])
    _write(folder / "test/law_test.csv", [C_HEAD[:-1], *(row[:-1] for row in C_VAL)])
    return folder


@pytest.fixture
def ceval(tmp_path: Path) -> Path:
    return write_ceval(tmp_path / "ceval")


def _mmlu(path: Path, **given: Any) -> MMLU:
    return MMLU(path=str(path), **{"subsets": ("us_foreign_policy",), **given})


def _ceval(path: Path, **given: Any) -> CEval:
    return CEval(path=str(path), **{"subsets": ("law",), **given})


def test_the_mmlu_prompt_character_by_character(mmlu: Path) -> None:
    example = _mmlu(mmlu, shots=2).evaluation()[0]
    assert example.prompt == (
        "The following are multiple choice questions (with answers) about us foreign policy.\n"
        "\n"
        "1+1=?\n"
        "A. 2\n"
        "B. 3\n"
        "C. 4\n"
        "D. 5\n"
        "Answer: A\n"
        "\n"
        "2+1=?\n"
        "A. 2\n"
        "B. 3\n"
        "C. 4\n"
        "D. 5\n"
        "Answer: B\n"
        "\n"
        "0.10 is\n"
        "A. 0.10\n"
        "B. None\n"
        "C. NA\n"
        "D. 1,000\n"
        "2\n"
        "Answer:"
    )
    assert (example.choices, example.answers, example.chat, example.stop) == (
        (" A", " B", " C", " D"),
        ("D",),
        False,
        (),
    )


def test_the_original_mmlu_prompt_character_by_character(mmlu: Path) -> None:
    example = _mmlu(mmlu, shots=0, prompt="official").evaluation()[0]
    assert example.prompt == (
        "The following are multiple choice questions (with answers) about  us foreign policy.\n"
        "\n"
        " 0.10 is \n"
        "A. 0.10\n"
        "B. None\n"
        "C. NA\n"
        "D. 1,000\n"
        "2\n"
        "Answer:"
    )


def test_the_ceval_prompt_character_by_character(ceval: Path) -> None:
    example = _ceval(ceval, shots=1).evaluation()[0]
    assert example.prompt == (
        "以下是中国关于法学考试的单项选择题，请选出其中的正确答案。\n"
        "\n"
        "一加一等于____。\n"
        "A. 二\n"
        "B. 三\n"
        "C. 四\n"
        "D. 五\n"
        "答案：A\n"
        "\n"
        " 一加二等于____。\n"
        "A. 二\n"
        "B. 三\n"
        "C. 四\n"
        "D. 五\n"
        "答案："
    )
    assert (example.choices, example.answers, example.chat) == (
        ("A", "B", "C", "D"),
        ("B",),
        False,
    )


def test_the_ceval_prompt_of_lm_eval_character_by_character(ceval: Path) -> None:
    example = _ceval(ceval, shots=1, prompt="lm_eval").evaluation()[0]
    assert example.prompt == (
        "以下是中国关于法学的单项选择题，请选出其中的正确答案。\n"
        "\n"
        "一加一等于____。\n"
        "A. 二\n"
        "B. 三\n"
        "C. 四\n"
        "D. 五\n"
        "答案： A\n"
        "\n"
        "一加二等于____。\n"
        "A. 二\n"
        "B. 三\n"
        "C. 四\n"
        "D. 五\n"
        "答案："
    )
    assert example.choices == (" A", " B", " C", " D")


def test_five_real_demonstrations_in_file_order() -> None:
    task = MMLU(path=str(DATA), subsets=("moral_disputes", "abstract_algebra"))
    examples = task.evaluation()
    assert [(e.id, e.answers) for e in examples] == [
        ("moral_disputes-0", ("A",)),
        ("moral_disputes-1", ("C",)),
        ("moral_disputes-2", ("A",)),
        ("abstract_algebra-0", ("B",)),
        ("abstract_algebra-1", ("C",)),
        ("abstract_algebra-2", ("D",)),
    ]
    blocks = examples[3].prompt.split("\n\n")
    with open(DATA / "dev/abstract_algebra_dev.csv", newline="") as stream:
        dev = list(csv.reader(stream))
    assert [block.split("\n")[0] for block in blocks[1:6]] == [
        row[0].strip() for row in dev
    ]
    assert [block[-1] for block in blocks[1:6]] == [row[-1] for row in dev]
    assert blocks[6].startswith(
        "Find the degree for the given field extension Q(sqrt(2), sqrt(3), sqrt(18)) over Q.\nA. 0\n"
    )


def test_answers_by_reply_and_in_a_chat(mmlu: Path, ceval: Path) -> None:
    reply = _mmlu(mmlu, answer="generate").evaluation()[0]
    assert (reply.choices, reply.stop, reply.max_new_tokens) == ((), ("\n",), None)
    for task in (
        _mmlu(mmlu, chat_format=True),
        _ceval(ceval, chat_format=True, prompt="lm_eval"),
    ):
        assert {(e.choices, e.chat) for e in task.evaluation()} == {
            (("A", "B", "C", "D"), True)
        }


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("A", 1),
        (" A", 1),
        ("(a).", 1),
        ("B", 0),
        ("", 0),
        ("A. Paris", 0),
        ("AB", 0),
        ("Answer", 0),
        # In process a reply goes on where the tokenizer has a token for two line ends.
        ("A\n\nWhich of", 1),
        ("B\n\nA", 0),
    ],
)
def test_mmlu_scores_the_exact_letter(mmlu: Path, reply: str, score: float) -> None:
    task = _mmlu(mmlu)
    assert task.score(task.evaluation()[1], reply) == {"accuracy": score}


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("B", "B"),
        (" B\n\n下一题\n答案：C", "B"),
        ("（Ｂ）", "B"),
        ("答案是B。", "B"),
        ("正确答案：选项 B", "B"),
        ("答案应为B，而不是A", "B"),
        ("选项A错误，所以选B", "B"),
        ("A不正确，B正确", "B"),
        ("我认为应该选择B", "B"),
        ("因为DNA的结构，所以是B", "B"),
        ("A和B都可以", ""),
        ("不知道", ""),
        ("Because", ""),
    ],
)
def test_ceval_reads_the_letter_of_a_reply(reply: str, letter: str) -> None:
    assert CEval().letter(reply) == letter


@pytest.mark.parametrize(("task", "count"), [(MMLU(), 57), (CEval(), 52)])
def test_every_subject_is_in_one_category(task: Exam, count: int) -> None:
    listed = Counter(
        subject for subjects in task.averages().values() for subject in subjects
    )
    assert (
        set(listed.values()) == {1}
        and set(listed) == set(task.categories)
        and len(listed) == count
    )
    assert len(task.files()[0].files) == 2 * count and task.chance == 0.25


def test_categories_as_the_benchmarks_have_them() -> None:
    assert {name: len(subjects) for name, subjects in MMLU().averages().items()} == {
        "STEM": 18,
        "humanities": 13,
        "social sciences": 12,
        "other": 14,
    }
    assert {name: len(subjects) for name, subjects in CEval().averages().items()} == {
        "STEM": 20,
        "Social Science": 10,
        "Humanities": 11,
        "Other": 11,
    }
    assert CEval(subsets=("law", "physician")).averages() == {
        "Humanities": ("law",),
        "Other": ("physician",),
    }


def test_the_mean_is_a_choice() -> None:
    assert (MMLU().average, MMLU(mean="subjects").average) == ("examples", "subsets")
    assert (CEval().average, CEval(mean="questions").average) == ("subsets", "examples")


@pytest.mark.parametrize("task", [MMLU, CEval])
def test_the_yaml_has_the_defaults_of_the_class(task: type[Exam]) -> None:
    values = compose_one(f"task={task.name}").raw["task"]
    assert values.pop("_target_") == f"{task.__module__}.{task.__name__}"
    assert set(values) == {field.name for field in fields(task)}
    assert build(task, values, "task") == task()


def test_calibration_is_refused() -> None:
    with refused(
        "stages",
        "search",
        allowed="mmlu",
        hint=("task=kv_retrieval", "method=from:RUN"),
    ):
        MMLU(path=str(DATA)).examples("calibration")


@pytest.mark.parametrize("prefix", ["", "data/"])
def test_a_zip_reads_like_its_folder(mmlu: Path, tmp_path: Path, prefix: str) -> None:
    packed = tmp_path / "mmlu.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for file in mmlu.rglob("*.csv"):
            archive.write(file, prefix + file.relative_to(mmlu).as_posix())
    assert _mmlu(packed).evaluation() == _mmlu(mmlu).evaluation()


def _hub(
    folder: Path,
    choices: Callable[[Row], Any] = lambda row: row[1:5],
    dev: list[Row] = DEV,
    answer: int = 0,
) -> None:
    from datasets import Dataset

    for part, rows in (("dev", dev), ("test", TEST)):
        table = [
            {
                "question": r[0],
                "subject": "",
                "choices": choices(r),
                "answer": "ABCD".index(r[5]) + answer,
            }
            for r in rows
        ]
        (folder / "us_foreign_policy").mkdir(parents=True, exist_ok=True)
        Dataset.from_list(table).to_parquet(
            folder / f"us_foreign_policy/{part}-00000-of-00001.parquet"
        )


def test_the_hubs_files_read_like_the_originals(
    mmlu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posbench.tasks.base.local", lambda source: tmp_path / "hub")
    _hub(tmp_path / "hub")
    from_hub = MMLU(subsets=("us_foreign_policy",)).evaluation()
    monkeypatch.undo()
    assert from_hub == _mmlu(mmlu).evaluation()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"choices": lambda row: row[1:4]}, ("choices", "four")),
        ({"answer": 4}, ("answer", "0", "3", "4")),
    ],
)
def test_bad_rows_of_the_hub(
    change: Any,
    named: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("posbench.tasks.base.local", lambda source: tmp_path / "hub")
    _hub(tmp_path / "hub", **change)
    file = tmp_path / "hub/us_foreign_policy/dev-00000-of-00001.parquet"
    with line_refused(file, 1, *named):
        MMLU(subsets=("us_foreign_policy",)).evaluation()


def test_a_file_of_the_hub_with_a_row_too_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posbench.tasks.base.local", lambda source: tmp_path / "hub")
    _hub(tmp_path / "hub", dev=DEV[:4])
    file = tmp_path / "hub/us_foreign_policy/dev-00000-of-00001.parquet"
    value = f"{file} with 4 rows"
    with refused("task.path", value, allowed="5 rows", hint="posbench fetch"):
        MMLU(subsets=("us_foreign_policy",)).evaluation()


def test_all_subjects_of_the_hub_must_be_all_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posbench.tasks.base.local", lambda source: tmp_path)
    monkeypatch.setattr(MMLU, "_subject", lambda self, folder, subject: [None] * 246)
    with refused(
        "task.path",
        "14022 questions of cais/mmlu",
        allowed="14042",
        hint="posbench fetch",
    ):
        MMLU().examples("evaluation")


@pytest.mark.parametrize(
    ("rows", "line", "named"),
    [
        ([TEST[0], ["q", "a", "b", "c", "d", "E"]], 3, ("answer", "A", "D", '"E"')),
        ([["q", "a", "b", "c", "d", ""]], 1, ("answer",)),
        ([["q", "a", "b", "c", "d"]], 1, ("columns",)),
        ([["q", "a", "b", "c", "d", "A", "A"]], 1, ("columns",)),
        ([["", "a", "b", "c", "d", "A"]], 1, ("question",)),
        ([["q", "a", "", "c", "d", "B"]], 1, ('"B"',)),
    ],
)
def test_bad_rows_name_file_line_and_field(
    mmlu: Path, rows: list[Row], line: int, named: tuple[str, ...]
) -> None:
    file = mmlu / "test/us_foreign_policy_test.csv"
    _write(file, rows)
    with line_refused(file, line, *named):
        _mmlu(mmlu).evaluation()


def test_a_file_without_rows_is_named(mmlu: Path) -> None:
    file = mmlu / "test/us_foreign_policy_test.csv"
    _write(file, [])
    with refused("task.path", str(file), allowed="empty", hint="path"):
        _mmlu(mmlu).evaluation()


@pytest.mark.parametrize(
    ("rows", "line", "named"),
    [
        ([C_HEAD, C_VAL[0], C_VAL[0]], 3, ('"id"', "0")),
        ([C_HEAD[:-1], C_VAL[0][:-1]], 2, ("answer",)),
        ([["id", "question", "A", "B", "C", "E", "answer"], C_VAL[0]], 2, ('"D"',)),
        ([C_HEAD, ["", *C_VAL[0][1:]]], 2, ('"id"',)),
    ],
)
def test_bad_rows_of_ceval(
    ceval: Path, rows: list[Row], line: int, named: tuple[str, ...]
) -> None:
    _write(ceval / "val/law_val.csv", rows)
    with line_refused(ceval / "val/law_val.csv", line, *named):
        _ceval(ceval).evaluation()


def test_questions_of_ceval_without_ids_are_numbered(ceval: Path) -> None:
    _write(ceval / "val/law_val.csv", [["", *C_HEAD[1:]], *C_VAL])
    assert [e.id for e in _ceval(ceval).evaluation()] == ["law-0", "law-1"]


def test_bad_files(mmlu: Path, tmp_path: Path) -> None:
    (mmlu / "test/us_foreign_policy_test.csv").write_bytes(
        "中".encode("gb18030") + b",a,b,c,d,A\n"
    )
    with refused(
        f"task.path: {mmlu / 'test/us_foreign_policy_test.csv'}, line 1",
        "",
        allowed="UTF-8",
        hint="as UTF-8",
    ):
        _mmlu(mmlu).evaluation()
    with refused(
        "task.path",
        str(mmlu),
        allowed="dev/virology_dev.csv",
        hint=("github.com/hendrycks/test", "task.subsets=[...]"),
    ):
        _mmlu(mmlu, subsets=("virology",)).evaluation()
    with refused(
        "task.path",
        str(tmp_path / "absent"),
        allowed="file",
        hint="github.com/hendrycks/test",
    ):
        _mmlu(tmp_path / "absent").evaluation()
    (tmp_path / "torn.zip").write_bytes(b"PK")
    with refused("task.path", str(tmp_path / "torn.zip"), allowed=".zip", hint="zip"):
        _mmlu(tmp_path / "torn.zip").evaluation()
    _write(mmlu / "dev/us_foreign_policy_dev.csv", DEV[:2])
    with refused(
        "task.shots", 5, allowed=("2", "us_foreign_policy"), hint="task.shots=2"
    ):
        _mmlu(mmlu).evaluation()


@pytest.mark.parametrize(
    ("given", "value", "allowed", "hint"),
    [
        ({"shots": 6}, 6, ("0", "5"), "task.shots=0"),
        ({"shots": -1}, -1, ("0", "5"), "task.shots=0"),
        ({"max_new_tokens": 0}, 0, ("1", "1000000"), "task.max_new_tokens=1"),
        ({"subsets": ("anatomi",)}, "anatomi", "anatomy", "anatomy"),
        ({"subsets": ()}, [], "anatomy", "task.subsets=[abstract_algebra]"),
        (
            {"subsets": ("anatomy", "anatomy")},
            ["anatomy", "anatomy"],
            "once",
            "task.subsets=[abstract_algebra]",
        ),
    ],
)
def test_bad_fields(
    given: dict[str, Any], value: object, allowed: Tokens, hint: Tokens
) -> None:
    (name,) = given
    with refused(f"task.{name}", value, allowed=allowed, hint=hint):
        build(MMLU, given, "task")


def test_the_ceval_test_files_make_a_submission(ceval: Path) -> None:
    task = _ceval(ceval, split="test")
    examples = task.evaluation()
    assert [e.id for e in examples] == ["law-0", "law-7"] and task.score(
        examples[0], "B"
    ) == {}
    made = task.submission([(examples[0], "B"), (examples[1], "答案：D")])
    assert json.loads(made["ceval_submission.json"]) == {"law": {"0": "B", "7": "D"}}
    assert _ceval(ceval).submission([(examples[0], "B")]) == {}


def test_answers_in_ceval_test_files_are_scored(ceval: Path) -> None:
    _write(ceval / "test/law_test.csv", [C_HEAD, *C_VAL])
    task = _ceval(ceval, split="test")
    assert [task.score(e, "B") for e in task.evaluation()] == [
        {"accuracy": 1.0},
        {"accuracy": 0.0},
    ]


@pytest.fixture(scope="module")
def sentencepiece() -> LM:
    """A tokenizer with Llama 2's rules: a blank put first, blanks as ▁, one token for ▁A."""
    signs = ["<unk>", "▁", *"Answer:", *"ABCD", *"答案："]
    vocab = {
        sign: number
        for number, sign in enumerate(
            dict.fromkeys([*signs, *(f"▁{letter}" for letter in "ABCD")])
        )
    }
    raw = Tokenizer(
        models.BPE(
            vocab=vocab, merges=[("▁", letter) for letter in "ABCD"], unk_token="<unk>"
        )
    )
    raw.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    raw.decoder = decoders.Replace("▁", " ")
    return LM(
        model=None,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=raw),
        name="x",
        context_window=99,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "choice", "alone", "after"),
    [("Answer:", " B", ["▁", "▁B"], ["▁B"]), ("答案：", "B", ["▁B"], ["B"])],
)
def test_letters_are_tokenised_together_with_the_prompt(
    sentencepiece: LM, prompt: str, choice: str, alone: list[str], after: list[str]
) -> None:
    """Alone, MMLU's letter would become two tokens, and C-Eval's a token with a blank that the prompt does
    not have."""
    tokenizer = sentencepiece.tokenizer
    assert tokenizer is not None and tokenizer.tokenize(choice) == alone
    head, answer = sentencepiece.answer_ids(prompt, choice)
    assert tokenizer.convert_ids_to_tokens(answer) == after
    assert head == tokenizer(prompt)["input_ids"]


@real
def test_all_official_mmlu_files() -> None:
    folder = Path(str(OWN)) / "mmlu"
    tested = {
        file.name.removesuffix("_test.csv") for file in (folder / "test").iterdir()
    }
    examples = MMLU(path=str(folder), subsets=tuple(sorted(tested))).evaluation()
    assert Counter(e.subset for e in examples) == {
        "abstract_algebra": 100,
        "anatomy": 135,
        "college_computer_science": 100,
        "high_school_geography": 198,
        "international_law": 121,
        "machine_learning": 112,
        "moral_disputes": 346,
        "us_foreign_policy": 100,
    }
    task = MMLU(path=str(folder))
    assert [len(task._read(folder, subject, "dev")) for subject in task.chosen] == [
        5
    ] * 57
    literal = [
        e.prompt
        for e in examples
        if "\nB. None\n" in e.prompt
        or "\nA. None\n" in e.prompt
        or ". NA\n" in e.prompt
    ]
    assert literal


@real
def test_all_official_ceval_files() -> None:
    folder = Path(str(OWN)) / "ceval"
    mapping = json.loads((folder / "subject_mapping.json").read_text())
    assert {name: (row[1], row[2]) for name, row in mapping.items()} == SUBJECTS
    held = tuple(
        subject for subject in SUBJECTS if (folder / f"val/{subject}_val.csv").is_file()
    )
    assert (
        len(held) == 26
        and len(CEval(path=str(folder), subsets=held).evaluation()) == 688
    )
    task = CEval(path=str(folder))
    assert [len(task._read(folder, subject, "dev")) for subject in task.chosen] == [
        5
    ] * 52
