"""What files hold: every byte counts, where they lie does not, and a remembered hash goes with its file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from posbench.files import checksums, sources
from posbench.files.checksums import file_sha256
from posbench.files.digests import (
    content_keys,
    find_change,
    hash_paths,
    read_contents,
)
from posbench.files.sources import Source
from tests.messages import refused


@pytest.fixture
def big(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is big enough, and old enough, to be remembered in a cache of its own."""
    monkeypatch.setenv("POSBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checksums, "MIN_CACHED_BYTES", 1000)
    monkeypatch.setattr(checksums, "SETTLED_NANOSECONDS", -(10**12))
    file = tmp_path / "weights.safetensors"
    file.write_bytes(bytes(range(256)) * 20)
    return file


def _true(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_hash_is_remembered_until_the_file_changes(big: Path, tmp_path: Path) -> None:
    assert file_sha256(big) == _true(big)
    (note,) = (tmp_path / "cache").rglob("*.json")
    note.write_text(
        json.dumps({**json.loads(note.read_text()), "sha256": "remembered"})
    )
    assert file_sha256(big) == "remembered"
    at = big.stat()
    with open(big, "r+b") as stream:
        stream.seek(2500)
        stream.write(b"?")
    os.utime(big, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert file_sha256(big) == _true(big), "same size and time, one byte in the middle"
    shutil.copy2(big, other := tmp_path / "other")
    os.replace(other, big)
    note.write_text("{")
    assert file_sha256(big) == _true(big), "a damaged note is no note"


def test_a_file_that_changed_just_now_is_not_remembered(
    big: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "SETTLED_NANOSECONDS", 10**12)
    assert file_sha256(big) == _true(big) and not (tmp_path / "cache").exists()


def test_without_a_cache_a_file_is_hashed_each_time(
    big: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file, where the folder would be")
    assert file_sha256(big) == file_sha256(big) == _true(big)
    monkeypatch.delenv("POSBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-by-that-name/cache")
    assert checksums.cache_folder() is None and file_sha256(big) == _true(big)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert checksums.cache_folder() == tmp_path / "xdg" / "posbench"


def _file(path: Path) -> Source:
    return Source(kind="path", id=str(path), field="task.path")


def test_content_counts_and_the_place_does_not(tmp_path: Path) -> None:
    one = tmp_path / "one.jsonl"
    moved = tmp_path / "folder" / "two.jsonl"
    one.write_text("{}\n")
    moved.parent.mkdir()
    shutil.copy(one, moved)
    first = read_contents([_file(one)])
    second = read_contents([_file(moved)])
    assert content_keys(first, "task") == content_keys(second, "task") and first[
        0
    ].fact["sha256"] == _true(one)
    raws = [{"task": {"path": str(file), "seed": 0}} for file in (one, moved)]
    assert hash_paths(raws[0], first) == hash_paths(raws[1], second) != raws[0]
    os.utime(one)
    assert find_change(first) is None
    one.write_text("[]\n")
    assert find_change(first) == first[0] and content_keys(
        read_contents([_file(one)]), "task"
    ) != content_keys(first, "task")
    one.unlink()
    assert find_change(first) == first[0]
    with refused("task.path", str(one), allowed="file", hint="path"):
        read_contents([_file(one)])


def test_a_folder_is_the_files_that_are_read(tmp_path: Path) -> None:
    folder = Source(
        kind="path",
        id=str(tmp_path),
        field="task.path",
        files=("*.jsonl", "data/*.jsonl"),
    )
    (tmp_path / "data").mkdir()
    for name in ("a.jsonl", "data/b.jsonl"):
        (tmp_path / name).write_text(name)
    first = content_keys(read_contents([folder]), "task")
    assert [name for _, name, _ in first] == ["a.jsonl", "data/b.jsonl"]
    (tmp_path / "README.md").write_text("read by nobody")
    assert content_keys(read_contents([folder]), "task") == first
    (tmp_path / "data/b.jsonl").rename(tmp_path / "data/c.jsonl")
    assert content_keys(read_contents([folder]), "task") != first


def test_a_checkpoint_is_its_index_and_what_that_names(tmp_path: Path) -> None:
    for name in (
        "config.json",
        "tokenizer.json",
        "a.safetensors",
        "consolidated.safetensors",
        "pytorch_model.bin",
    ):
        (tmp_path / name).write_text(name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    found = [
        content.name
        for content in read_contents([sources.checkpoint_source(str(tmp_path))])
    ]
    assert found == ["a.safetensors", "config.json", index.name, "tokenizer.json"]


@pytest.mark.parametrize(
    "index",
    [
        '{"weight_map": ["a"]}',
        '{"weight_map": {"x": 5}}',
        '{"weight_map": {}}',
        "[]",
        "{",
        "\udcff",
    ]
    + [
        f'{{"weight_map": {{"x": "{name}"}}}}'
        for name in ("../x.bin", "../x.safetensors", "sub/x.safetensors")
    ]
    + [
        '{"weight_map": {"x": "model-1.bin"}}',
        '{"weight_map": {"x": "a.safetensors", "y": "/tmp/x.safetensors"}}',
    ],
)
def test_an_index_that_names_anything_else_is_refused(
    index: str, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(
        index.encode(errors="surrogateescape")
    )
    with refused(
        "model.path",
        str(tmp_path / "model.safetensors.index.json"),
        allowed=("weight_map", "safetensors"),
        hint="checkpoint",
    ):
        sources.weight_files(tmp_path)
