"""``posbench check-data``: what it says of a file, and that the command it prints asks just that."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from posbench import paths
from posbench.cli.main import main
from posbench.pipeline.compose import compose_one
from posbench.schema import instantiate
from posbench.tasks import Example, Task
from tests.conftest import Result, run_folders
from tests.messages import assert_line_names
from tools import pages

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "own"


def check(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[str, list[Example]]:
    """What is printed, and the examples that the printed command asks."""
    assert main(["check-data", *args]) == 0
    out = capsys.readouterr().out
    command = (
        out.rstrip().splitlines()[-1].replace("model=DIR_OR_HUB_ID", "model=mistral7b")
    )
    raw = compose_one(*shlex.split(command)[1:]).raw
    return out, instantiate(raw["task"], Task, "task").evaluation()  # type: ignore[type-abstract]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "items",
            [
                "items with a gold one",
                "6, each at gold positions 0, 1, 2, 3, 5: 30 prompts",
                "items     6 a",
            ],
        ),
        (
            "documents",
            [
                "documents with a gold one",
                "20 prompts",
                "1 to 2 (median 2) a question",
                "expects 'four'",
            ],
        ),
        (
            "choices",
            [
                "choices, by the field choices",
                "subsets   things, days",
                "3 to 4 (median 4)",
                "expects 'B'",
            ],
        ),
        (
            "long_text",
            [
                "long text, by the field context",
                "examples  2\n",
                "520 to 533 (median 526) characters",
            ],
        ),
    ],
)
def test_every_kind_is_told_and_can_be_asked(
    name: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out, examples = check(capsys, str(DATA / f"{name}.jsonl"))
    assert [words for words in said if words not in out] == []
    for line in examples[0].prompt.splitlines():
        assert f"    {line}\n" in out


def test_a_model_gives_the_lengths_in_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, examples = check(capsys, str(DATA / "words.jsonl"), "model=tiny")
    encode = Tokenizer.from_file(str(paths.MODELS / "tiny" / "tokenizer.json")).encode
    counts = [len(encode(e.prompt).ids) for e in examples]
    assert set(counts) == {67}
    assert_line_names(out, "tokens", "67", "512")


@pytest.mark.parametrize(
    "given",
    [["items", "model=tiny"], ["words", "model=tiny", "model.context_window=60"]],
)
def test_a_model_that_cannot_be_asked_is_refused_as_by_the_run(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file, *rest = f"{DATA / given[0]}.jsonl", *given[1:]
    assert main(["check-data", file, *rest]) == 2
    told = capsys.readouterr()
    assert "the first prompt" in told.out and "to run it" not in told.out
    for verb in ([], ["validate"]):
        assert main([*verb, "task=own_data", f"task.path={file}", *rest]) == 2
        assert capsys.readouterr().err == told.err


def test_a_name_with_odd_signs_comes_back_quoted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "größe, it's (1) {a}=b.jsonl"
    file.write_text((DATA / "items.jsonl").read_text())
    assert len(check(capsys, str(file))[1]) == 30


def test_lists_of_different_lengths_and_fields_that_nothing_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [
        json.loads(line) for line in (DATA / "items.jsonl").read_text().splitlines()
    ]
    rows[0]["items"] += ["The moon is far."] * 3
    rows[1]["url"], rows[1]["gold"] = "x", rows[1]["gold"] - 1
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out, examples = check(capsys, str(tmp_path / "a.jsonl"))
    assert "unread    fields url" in out
    assert_line_names(out, "6 to 9", "median 6", "items")
    assert_line_names(out, "note", "1 of 6", "gold", "answers", "0")
    assert "task.items_per_prompt=6" in out and {len(e.items) for e in examples} == {6}


def test_the_file_of_a_benchmark_is_told_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = DATA.parent / "kv_retrieval/kv-retrieval-75_keys.first3.jsonl"
    out, examples = check(
        capsys, str(file), "task=kv_retrieval", "task.pairs=10", "task.positions=[0,9]"
    )
    assert_line_names(out, "3", "0, 9", "6 prompts")
    assert len(examples) == 6
    assert "Extract the value corresponding" in out, (
        "as any model is asked, not the embedded ones"
    )


def test_a_long_prompt_is_shortened(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    row = {"question": "q", "context": "word " * 5000, "answers": ["a"]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    out, (example,) = check(capsys, str(tmp_path / "a.jsonl"))
    assert (
        f"[... {len(example.prompt) - 3000:,} characters ...]" in out
        and len(out) < 4000
    )


@pytest.mark.parametrize(
    "args", [[], ["task=mmlu"], ["--all"], ["nowhere.jsonl"], ["{empty}"], ["{wrong}"]]
)
def test_what_is_wrong_ends_in_lines(
    args: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "wrong").write_text('{"items": []}\n')
    assert (
        main(
            [
                "check-data",
                *(
                    a.format(empty=tmp_path / "empty", wrong=tmp_path / "wrong")
                    for a in args
                ),
            ]
        )
        == 2
    )
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == (
        4 if args == ["{wrong}"] else 1
    )
    assert all(
        line.startswith("posbench: ") and "; next: " in line
        for line in told.err.splitlines()
    )


def test_the_documentation_has_the_fields_of_the_code() -> None:
    page = ROOT / "docs" / "own_data.md"
    text = page.read_text()
    assert pages.between_marks(page, "data", pages.data_page()) == text, (
        "python tools/pages.py data --out docs/own_data.md"
    )
    for line in re.search(r"```json\n(.*?)\n```", text, re.DOTALL)[1].splitlines():  # type: ignore[index]
        assert json.loads(line)["question"]


def test_the_first_own_file_of_the_documentation_works_anywhere(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    posbench: Callable[..., Result],
    outputs: Path,
) -> None:
    text = (ROOT / "docs" / "own_data.md").read_text()
    name, lines, commands = re.findall(
        r"^cat > (\S+) <<'END'\n(.*?)END\n(.*?)```", text, re.M | re.S
    )[0]
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(lines)
    looked, asked = (shlex.split(line)[1:] for line in commands.splitlines())
    assert shlex.split(check(capsys, *looked[1:])[0].splitlines()[-1])[1:] == asked
    assert posbench(*asked, "stages=evaluate", "runtime.resamples=100").status == 0
    (run,) = run_folders(outputs)
    assert json.loads((run / "method.json").read_text())["channel"] == 15
    words = re.search(r"```text\n((?:[a-z]{3}\s)+)```", text)[1].split()  # type: ignore[index]
    for folder in (
        f for f in paths.MODELS.iterdir() if (f / "tokenizer.json").is_file()
    ):
        known = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
        assert {word for word in known if re.fullmatch("[a-z]+", word)} == set(words), (
            folder
        )
