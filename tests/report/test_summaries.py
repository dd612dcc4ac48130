"""The index of an outputs folder never changes a list: it only spares reading runs that did not change."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from posbench.report import summaries as module
from posbench.report.index import records
from posbench.report.summaries import INDEX, read_summaries, summaries
from posbench.run.folder import open_run_dir, runs_in
from posbench.run.lease import owning
from tests.frames import metrics
from tests.report.test_index import made

SUITE = "kv_retrieval/v001"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the runs that were read since the list was cleared; every file counts as old enough."""
    names: list[str] = []
    read_one = module._read_summary

    def counted(folder: Path) -> object:
        names.append(folder.name)
        return read_one(folder)

    monkeypatch.setattr(module, "_read_summary", counted)
    monkeypatch.setattr(module, "SETTLED_SECONDS", 0.0)
    yield names


def add(outputs: Path, number: int, state: str = "done") -> Path:
    method = {"name": "scale_channel", "factor": number / 4}
    folder = outputs.resolve() / SUITE / f"tiny__scale_channel__{number:08x}"
    return made(folder, method, 1 + number % 28, state)


def change(folder: Path, generator: random.Random) -> None:
    """Another score, recorded as posbench does."""
    table = metrics("scale_channel")
    table["value"] *= generator.random()
    table.to_csv(folder / "metrics.csv", index=False)
    open_run_dir(folder).seal("posbench")


def damage(folder: Path, name: str) -> None:
    """Other content of the same size, under the same name, with the old time; done twice, the old content."""
    file = folder / name
    times = file.stat()
    old = file.read_bytes()
    file.write_bytes(old.translate(bytes.maketrans(b"01ab", b"10ba")))
    assert file.read_bytes() != old
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("seed", range(3))
def test_a_list_with_an_index_is_the_list_without(
    seed: int, tmp_path: Path, read: list[str]
) -> None:
    generator = random.Random(seed)
    for number in range(3):
        add(tmp_path, number)
    for number in range(3, 15):
        folders = runs_in(tmp_path)
        folder = generator.choice(folders)
        action = generator.choice(("add", "change", "damage", "delete", "index", "end"))
        if action == "add" or len(folders) < 2:
            add(tmp_path, number)
        elif action == "change":
            change(folder, generator)
        elif action == "damage":
            damage(folder, generator.choice(("metrics.csv", "config.yaml", "DONE")))
        elif action == "delete":
            shutil.rmtree(folder)
        elif action == "index":
            index = tmp_path / INDEX
            data = bytearray(index.read_bytes() if index.is_file() else b"{}")
            data[generator.randrange(len(data))] ^= 1
            index.write_bytes(data)
        else:
            add(tmp_path, number, generator.choice(("failed", "running")))
        folders = runs_in(tmp_path)
        assert summaries(folders) == read_summaries(folders), action
        read.clear()
        again = summaries(folders)
        # Nobody runs them: they may be killed or running the next time.
        live = [run.folder.name for run in again if run.state == "killed"]
        assert read == live
        assert again == read_summaries(folders)


def test_a_process_that_starts_or_ends_is_seen(tmp_path: Path, read: list[str]) -> None:
    folder = add(tmp_path, 1, "running")
    states = []
    for _ in range(2):
        with owning(folder):
            states += [run.state for run in summaries([folder])]
        states += [run.state for run in summaries([folder])]
    assert states == ["running", "killed"] * 2


def test_files_that_just_changed_are_read_again(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = add(tmp_path, 1)
    monkeypatch.setattr(module, "SETTLED_SECONDS", 3600.0)
    for _ in range(2):
        summaries([folder])
    assert read == [folder.name] * 2 and not (tmp_path / INDEX).exists()


def test_other_code_reads_all_runs_again(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [add(tmp_path, number) for number in range(2)]
    summaries(folders)
    monkeypatch.setattr(module, "_code", lambda: "other")
    summaries(folders)
    summaries(folders)
    assert sorted(read) == sorted(2 * [folder.name for folder in folders])


def test_a_list_of_one_version_keeps_the_others_in_the_index(
    tmp_path: Path, read: list[str]
) -> None:
    for number in range(2):
        add(tmp_path, number)
    other = shutil.copytree(
        tmp_path / SUITE / "tiny__scale_channel__00000001",
        tmp_path / "kv_retrieval/v002/tiny__scale_channel__00000002",
    )
    assert len(records(tmp_path)) == 3
    read.clear()
    assert len(records(other.parent)) == 1
    assert len(records(tmp_path / "kv_retrieval")) == 3 == len(records(tmp_path))
    assert read == []


def test_without_an_index_file_a_list_is_only_slower(
    tmp_path: Path, read: list[str]
) -> None:
    folder = add(tmp_path, 1)
    (tmp_path / INDEX).mkdir()
    first = summaries([folder])
    assert first == summaries([folder]) == read_summaries([folder])
    assert read == [folder.name] * 3
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == []
