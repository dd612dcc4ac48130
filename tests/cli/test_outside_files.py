"""Files from outside that are not what they should be: one line, status 2, and nothing is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from posbench.cli.main import main
from posbench.export.write import RECORD_FILE
from posbench.files.parse import MAX_DEPTH
from posbench.run.folder import JOBS, SUBMITTED
from tests.conftest import Result, run_folders
from tests.messages import assert_refused, faults_of
from tests.mutations import DEEP, replaced, single_fields, whole_files

Command = Callable[..., Result]
EVALUATE = ["method=none", "stages=[evaluate]"]
SUBMISSION = {
    "id": "a",
    "kind": "local",
    "overrides": ["task.limit=4"],
    "multirun": False,
    "own": None,
    "number": 0,
    "runs": 1,
    "jobs": "a",
    "first": 0,
    "shards": 1,
    "pids": [[1, "2"]],
}
QUESTION = {"question": "Which?", "choices": ["one", "two"], "gold": 1}
RECORDS = {
    "ordered_kv_records": [["a", "b"], ["c", "d"], ["e", "f"]],
    "key": "c",
    "value": "d",
}


def contents(folder: Path) -> dict[str, bytes]:
    """The content of every file below a folder but locks, by its path."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in files
        if ".locks" not in file.parts
    }


def assert_all_refused(
    file: Path,
    texts: Iterable[tuple[str, str]],
    call: Callable[[], Result],
    watched: Path,
) -> None:
    """Fail unless every text of a file is refused in one line with status 2, and nothing is written."""
    wrong = []
    original = file.read_bytes() if file.is_file() else None
    for name, text in texts:
        file.write_text(text)
        before = contents(watched)
        result = call()
        if result.status != 2 or len(faults_of(result.err)) != 1:
            wrong.append((name, result.status, result.err[:300]))
        elif len(result.err.splitlines()) != 1:
            wrong.append((name, "more than one line", result.err[:300]))
        elif contents(watched) != before:
            changed = sorted(set(contents(watched).items()) ^ set(before.items()))
            wrong.append((name, "written", [name for name, _ in changed]))
    if original is None:
        file.unlink()
    else:
        file.write_bytes(original)
    assert not wrong, "\n".join(map(str, wrong))


@pytest.fixture(scope="module")
def finished(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests change copies."""
    outputs = tmp_path_factory.mktemp("finished")
    settings = [*small, "stages=[evaluate]", "method.channel=3", "method.factor=0.5"]
    assert main([*settings, "method.layers=[1,2]", f"runtime.outputs={outputs}"]) == 0
    (folder,) = run_folders(outputs)
    return folder


@pytest.fixture
def run(finished: Path, outputs: Path) -> Path:
    """A copy of the finished run."""
    shutil.copytree(finished.parents[2], outputs)
    (folder,) = run_folders(outputs)
    return folder


def test_bookkeeping_of_submitted_runs(
    run: Path, outputs: Path, posbench: Command
) -> None:
    data = [SUBMISSION]
    fields = [(0, key) for key in ("id", "kind", "overrides", "multirun", "own")]
    file = run / SUBMITTED
    file.write_text(json.dumps(data))
    assert posbench("collect", str(outputs), verb=True).status == 0
    texts = [
        *whole_files(data),
        *single_fields(data, fields),
        ("unknown field", replaced(data, (0, "unknown"), "1")),
        ("shards in words", replaced(data, (0, "shards"), '"two"')),
        ("many shards", replaced(data, (0, "shards"), "1000000000")),
        ("first job", replaced(data, (0, "first"), "1" + "0" * 30)),
        ("pids null", replaced(data, (0, "pids"), "null")),
        ("pids text", replaced(data, (0, "pids"), '"abc"')),
        ("pids short", replaced(data, (0, "pids"), "[[1]]")),
    ]
    # null is a value of ``own``.
    texts = [text for text in texts if text[0] != "0.own null"]
    assert_all_refused(
        file, texts, lambda: posbench("collect", str(outputs), verb=True), outputs
    )
    (run / "DONE").unlink()
    assert_all_refused(
        file, texts, lambda: posbench("jobs", str(outputs), verb=True), outputs
    )


def test_record_of_an_export(run: Path, tmp_path: Path, posbench: Command) -> None:
    fix = tmp_path / "fix"
    written = posbench(
        "export",
        str(run),
        "--to",
        "checkpoint",
        "--force",
        "--out",
        str(fix),
        verb=True,
    )
    assert written.status == 0, written.err
    data: dict[str, Any] = json.loads((fix / RECORD_FILE).read_text())
    fields: list[tuple[str | int, ...]] = [
        (key,) for key in ("format", "command", "raw", "base", "files")
    ]
    fields += [("raw", "model"), ("raw", "method"), ("raw", "task")]
    fields += [("base", 0, key) for key in ("field", "name", "sha256")]
    texts = [
        *whole_files(data),
        *single_fields(data, fields),
        ("no base", replaced(data, ("base",), "[]")),
        ("base of data", replaced(data, ("base", 0, "field"), '"task.path"')),
        ("no files", replaced(data, ("files",), "{}")),
        ("no config", replaced(data, ("raw",), "{}")),
        ("unknown field", replaced(data, ("unknown",), "1")),
        ("unknown format", replaced(data, ("format",), '"zip"')),
    ]
    assert_all_refused(
        fix / RECORD_FILE,
        texts,
        lambda: posbench("verify", str(fix), verb=True),
        tmp_path,
    )


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "generation_config.json"]
)
def test_a_deep_file_of_a_checkpoint(
    name: str,
    checkpoint: Path,
    small: list[str],
    tmp_path: Path,
    outputs: Path,
    posbench: Command,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    for text in (DEEP, '{"model_type": "llama", "x": ' + DEEP + "}"):
        (folder / name).write_text(text)
        result = posbench(*small, *EVALUATE, f"model.path={folder}")
        assert result.status == 2, (name, result)
        assert_refused(result.err, "model.path", hint="model.path=DIR")
    assert not outputs.exists()


def test_the_index_of_the_weights(
    checkpoint: Path,
    small: list[str],
    tmp_path: Path,
    outputs: Path,
    posbench: Command,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    data = {"weight_map": {"x": "model-1.safetensors"}}
    file = folder / "model.safetensors.index.json"
    texts = [*whole_files(data), *single_fields(data, [("weight_map",)])]
    args = [*small, *EVALUATE, f"model.path={folder}"]
    assert_all_refused(file, texts, lambda: posbench(*args), tmp_path)


@pytest.mark.parametrize("verb", [["check-data"], []])
def test_lines_of_own_data(verb: list[str], tmp_path: Path, posbench: Command) -> None:
    file = tmp_path / "data.jsonl"
    fields: list[tuple[str | int, ...]] = [(key,) for key in QUESTION]
    texts = [*whole_files(QUESTION), *single_fields(QUESTION, fields)]
    args = [*verb, str(file)]
    if not verb:
        args = ["task=own_data", f"task.path={file}", *EVALUATE]
    assert_all_refused(file, texts, lambda: posbench(*args, verb=bool(verb)), tmp_path)


def test_lines_of_key_value_records(tmp_path: Path, posbench: Command) -> None:
    file = tmp_path / "data.jsonl"
    fields: list[tuple[str | int, ...]] = [(key,) for key in RECORDS]
    texts = [*whole_files(RECORDS), *single_fields(RECORDS, fields)]
    args = [f"task.path={file}", "task.pairs=3", "task.positions=[0]", "task.limit=1"]
    args += ["task.prompt=compact", "stages=[evaluate]"]
    assert_all_refused(file, texts, lambda: posbench(*args), tmp_path)


@pytest.mark.parametrize("key", list(RECORDS))
def test_a_missing_field_of_a_key_value_record_is_named(
    key: str, tmp_path: Path, posbench: Command
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({k: v for k, v in RECORDS.items() if k != key}))
    result = posbench(f"task.path={file}", "task.pairs=3", "task.prompt=compact")
    assert result.status == 2
    assert_refused(result.err, f"task.path: {file}, line 1", allowed=key)


RUN_FILES = (
    "config.yaml",
    "method.json",
    "metrics.csv",
    "prompts.json",
    "status.json",
    "provenance.json",
    "manifest.json",
)


@pytest.mark.parametrize("name", RUN_FILES)
@pytest.mark.parametrize("verb", ["report", "show", "rescore", "export"])
def test_files_of_a_run(
    verb: str, name: str, run: Path, tmp_path: Path, posbench: Command
) -> None:
    args = [verb, str(run)]
    if verb == "export":
        args += ["--to", "checkpoint", "--force", "--out", str(tmp_path / "fix")]
    if (verb, name) == ("rescore", "metrics.csv"):
        pytest.skip("rescore makes it anew")
    data = {"name": "none"}
    assert_all_refused(
        run / name, whole_files(data), lambda: posbench(*args, verb=True), tmp_path
    )


def test_jobs_of_a_sweep(
    finished: Path, small: list[str], tmp_path: Path, posbench: Command
) -> None:
    args = [*small, "stages=[evaluate]", "method.channel=3", "method.layers=[1,2]"]
    assert posbench("-m", *args, "method.factor=0.5,0").status == 0
    (file,) = tmp_path.glob(f"outputs/*/*/*/{JOBS}")
    data = json.loads(file.read_text())
    assert_all_refused(
        file,
        whole_files(data),
        lambda: posbench("report", str(file.parent), verb=True),
        tmp_path,
    )


@pytest.mark.parametrize("group", ["method", "model", "task", "experiment"])
def test_own_yaml(group: str, tmp_path: Path, posbench: Command) -> None:
    folder = tmp_path / "conf" / group
    folder.mkdir(parents=True)
    file = folder / "mine.yaml"
    cyclic = "x: &loop [*loop]"
    texts = [("deep", f"x: {DEEP}"), ("cyclic", cyclic), ("torn", "x: [1")]
    texts += [("list", "[1]"), ("text", "text"), ("number", "3")]
    shallow = "[" * MAX_DEPTH * 2 + "]" * MAX_DEPTH * 2
    texts += [("deep and closed", f"x: {shallow}")]
    args = ["--config-dir", str(folder.parent), f"{group}=mine"]
    assert_all_refused(file, texts, lambda: posbench(*args), tmp_path)
    listing = ["ls", f"{group}s", "--config-dir", str(folder.parent)]
    assert_all_refused(file, texts, lambda: posbench(*listing, verb=True), tmp_path)


@pytest.mark.parametrize("out", ["/proc/1/x", "/proc/x", "{here}/file/x"])
def test_a_place_where_no_folder_can_be_made(
    out: str, run: Path, tmp_path: Path, posbench: Command
) -> None:
    (tmp_path / "file").write_text("in the way")
    out = out.replace("{here}", str(tmp_path))
    args = ["export", str(run), "--to", "checkpoint", "--force", "--out", out]
    result = posbench(*args, verb=True)
    assert result.status == 2
    assert_refused(result.err, "--out", out, allowed="folder", hint="folder")


def test_a_foreign_folder_is_refused_unread(
    run: Path, tmp_path: Path, posbench: Command
) -> None:
    """A file of a terabyte, which takes no room, would be read for an hour."""
    fix = tmp_path / "fix"
    args = ["export", str(run), "--to", "checkpoint", "--force", "--out", str(fix)]
    assert posbench(*args, verb=True).status == 0
    with open(fix / "0.bin", "wb") as stream:
        stream.truncate(1 << 40)
    result = posbench(*args, verb=True)
    assert result.status == 2
    assert_refused(result.err, "--out", str(fix), allowed="folder", hint="folder")


def test_a_long_line_of_data(tmp_path: Path, posbench: Command) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(QUESTION | {"question": "a b " * 5_000_000}))
    result = posbench("check-data", str(file), verb=True)
    assert result.status == 2
    assert_refused(result.err, f"task.path: {file}, line 1", allowed="characters")


def test_a_message_does_not_repeat_a_long_text(
    tmp_path: Path, posbench: Command
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(QUESTION | {"question": "a b " * 2_000}))
    result = posbench("task=own_data", f"task.path={file}", *EVALUATE)
    assert result.status == 2 and len(result.err) < 1_000
    assert_refused(result.err, "task", allowed=("tokenizer", "100%"), hint="words")


def test_a_run_is_read_as_it_was_written(run: Path, posbench: Command) -> None:
    """The readers refuse nothing that posbench wrote."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["method"]["factor"] == 0.5
    for verb in ("report", "show", "rescore"):
        assert posbench(verb, str(run), verb=True).status == 0
