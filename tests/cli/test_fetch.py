"""`posbench fetch` with a stand-in for the hub, and runs that touch no network afterwards."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

import posbench as package
from posbench.files import sources
from posbench.files.digests import read_contents
from posbench.files.sources import Source
from posbench.model import load as load_module
from posbench.pipeline import identity
from tests.conftest import Result
from tests.messages import assert_line_names, refused

REPO = "some/model"
http = importlib.import_module(
    HTTPError.__module__
)  # what this version of the hub client speaks through
OLD = "a" * 40
NEW = "b" * 40
UNUSED = (
    "pytorch_model.bin",
    "consolidated.safetensors",
    "original/params.json",
    "README.md",
    "model.onnx",
)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection fails, and the hub's own offline switch is off: nothing but the code keeps it from
    trying."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def _put(root: Path, commit: str, name: str, data: bytes) -> None:
    """A file in the layout of the hub's cache: a blob, and a link to it in the commit's snapshot."""
    blob = root / "blobs" / hashlib.sha256(data).hexdigest()
    link = root / "snapshots" / commit / name
    for path in (blob.parent, link.parent, root / "refs"):
        path.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    link.unlink(missing_ok=True)
    link.symlink_to(blob)


@dataclass
class Hub:
    """A hub of one repository, whose files are those of a folder; counts what is asked and fetched."""

    cache: Path
    folder: Path
    commit: str = OLD
    error: Exception | None = None
    asked: int = 0
    downloads: list[str] = field(default_factory=list)

    def repo_info(self, repo: str, **kwargs: Any) -> Any:
        self.asked += 1
        if self.error:
            raise self.error
        files = [p for p in self.folder.rglob("*") if p.is_file()]
        entries = [
            SimpleNamespace(
                rfilename=p.relative_to(self.folder).as_posix(), size=p.stat().st_size
            )
            for p in files
        ]
        return SimpleNamespace(sha=self.commit, siblings=entries)

    def snapshot_download(
        self, repo: str, *, local_files_only: bool = False, **kwargs: Any
    ) -> str:
        if local_files_only:
            return str(self.real(repo, local_files_only=True, **kwargs))
        from huggingface_hub.utils import filter_repo_objects

        if self.error:
            raise self.error
        names = [
            p.relative_to(self.folder).as_posix()
            for p in self.folder.rglob("*")
            if p.is_file()
        ]
        root = self.cache / f"{kwargs['repo_type']}s--{repo.replace('/', '--')}"
        for name in filter_repo_objects(
            names, **{k: kwargs[k] for k in ("allow_patterns", "ignore_patterns")}
        ):
            self.downloads.append(name)
            _put(root, self.commit, name, (self.folder / name).read_bytes())
        if kwargs["revision"] != self.commit:
            (root / "refs" / (kwargs["revision"] or "main")).write_text(self.commit)
        return str(root / "snapshots" / self.commit)


@pytest.fixture
def hub(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    folder = tmp_path / "on_the_hub"
    shutil.copytree(checkpoint, folder)
    for name in UNUSED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x" * 1000)
    hub = Hub(tmp_path / "cache", folder)
    hub.real = huggingface_hub.snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub.cache))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    monkeypatch.setenv("COLUMNS", "200")
    return hub


def _answer(kind: type[Exception], status: int) -> Exception:
    request = http.Request("GET", "https://hub.invalid/some/model")
    return kind(
        f"{status} Client Error.", response=http.Response(status, request=request)
    )  # type: ignore[call-arg]


def _expect_refusal(result: Result, *words: str) -> None:
    assert result.status == 2
    assert result.err.startswith("posbench: ") and result.err.count("\n") == 1, (
        result.err
    )
    assert [word for word in words if word not in result.err] == [], result.err


def fingerprint(config: Any) -> str:
    return identity.fingerprint(
        read_contents([sources.checkpoint_source(config.path, config.revision)])
    )


FETCH = ("fetch", "model=hf", f"model.path={REPO}")


def test_it_lists_every_file_that_loading_reads_and_no_other(
    posbench: Callable[..., Result], hub: Hub, checkpoint: Path
) -> None:
    result = posbench(*FETCH, "--dry-run", verb=True)
    assert result.status == 0, result.err
    rows = {
        line.split()[2]: line
        for line in result.out.splitlines()
        if REPO in line and ("missing" in line or "cached" in line)
    }
    assert set(rows) == {p.name for p in checkpoint.iterdir()}
    assert all(row.rstrip().endswith("missing") for row in rows.values())
    assert rows["tokenizer.json"].startswith("tokenizer ") and rows[
        "model.safetensors"
    ].startswith("model ")
    total = sum(p.stat().st_size for p in checkpoint.iterdir())
    assert (
        f"{len(rows)} files, {total / 1000:.1f} kB; to download: {total / 1000:.1f} kB"
        in result.out
    )
    assert (
        "nothing was downloaded" in result.out and f"model.revision={OLD}" in result.out
    )
    assert hub.downloads == [] and not hub.cache.exists()


def test_what_was_fetched_runs_without_a_network(
    posbench: Callable[..., Result],
    hub: Hub,
    checkpoint: Path,
    small: list[str],
    request: pytest.FixtureRequest,
) -> None:
    result = posbench(*FETCH, verb=True)
    assert result.status == 0 and sorted(hub.downloads) == sorted(
        p.name for p in checkpoint.iterdir()
    )
    # Where it is, and what to do with it.
    (place,) = re.findall("^model: (.*)$", result.out, re.MULTILINE)
    assert (Path(place) / "config.json").is_file()
    assert f"next: posbench diagnose {' '.join(FETCH[1:])} " in result.out
    request.getfixturevalue("no_network")
    hub.error = AssertionError("the hub was asked")
    config = [
        f"model.path={REPO}" if a.startswith("model.path=") else a
        for a in small
        if not a.startswith("stages=")
    ]
    done = posbench(*config, "stages=[evaluate]", "method=none")
    assert done.status == 0, done.err
    ids = torch.arange(1, 20)[None]
    assert torch.equal(
        package.load(REPO).logits(ids), package.load(checkpoint).logits(ids)
    )
    again = posbench(*config, "stages=[evaluate]", "method=none")
    assert again.status == 0 and "finished before" in again.out


def test_a_run_downloads_what_is_missing_once(hub: Hub) -> None:
    package.load(REPO)
    asked = hub.asked
    fetched = len(hub.downloads)
    package.load(REPO)
    assert (
        asked >= 1
        and fetched > 0
        and (hub.asked, len(hub.downloads)) == (asked, fetched)
    )


def test_fetch_takes_what_is_newer_and_runs_alone_do_not(
    posbench: Callable[..., Result], hub: Hub
) -> None:
    assert posbench(*FETCH, verb=True).status == 0
    config = load_module.model_config(REPO)
    assert fingerprint(config) == f"{REPO}@{OLD}"
    hub.commit = NEW
    assert fingerprint(config) == f"{REPO}@{OLD}"
    refreshed = posbench(*FETCH, verb=True)
    assert refreshed.status == 0 and f"model.revision={NEW}" in refreshed.out
    assert fingerprint(config) == f"{REPO}@{NEW}"
    again = posbench(*FETCH, verb=True)
    assert (
        "nothing to download" in again.out
        and "cached" in again.out
        and "missing" not in again.out
    )
    # Another commit is another model: a pinned run and an unpinned one at the same commit are the same.
    pinned = load_module.model_config(REPO, revision=NEW)
    assert fingerprint(pinned) == fingerprint(config)


def test_a_snapshot_without_a_shard_is_not_complete(hub: Hub) -> None:
    (hub.folder / "model.safetensors").rename(
        hub.folder / "model-00001-of-00002.safetensors"
    )
    shards = {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }
    (hub.folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": shards})
    )
    source = sources.checkpoint_source(REPO)
    folder = sources.local(source)
    assert (
        sources.missing_file(folder) == shards["b"]
        and sources.cached_path(source) is None
    )
    (hub.folder / shards["b"]).write_bytes(b"weights")
    assert sources.local(source) == folder == sources.cached_path(source)
    for name in ("config.json", "tokenizer.json", shards["a"]):
        (folder / name).rename(folder / "away")
        # Any file whose name starts with tokenizer counts; the loader names what else it wants.
        assert (sources.missing_file(folder) == name) is (name != "tokenizer.json"), (
            name
        )
        (folder / "away").rename(folder / name)


def test_an_unreachable_hub(posbench: Callable[..., Result], hub: Hub) -> None:
    hub.error = http.ConnectError("no route to host")
    for verb in (FETCH, (*FETCH, "--dry-run")):
        result = posbench(*verb, verb=True)
        _expect_refusal(
            result, "model.path", f"'{REPO}'", "reachable hub id", "no route to host"
        )
        # What was not listed has no size.
        assert (
            "missing" in result.out
            and "bytes" not in result.out
            and "files" not in result.out
        )
    hub.error = None
    assert posbench(*FETCH, verb=True).status == 0
    hub.error = http.ConnectError("no route to host")
    result = posbench(*FETCH, verb=True)
    assert result.status == 0
    assert_line_names(result.out, "not reachable", "ConnectError", "cached")


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        (
            GatedRepoError,
            403,
            [
                "model.path",
                "accept its licence at https://huggingface.co/some/model",
                "hf auth login",
            ],
        ),
        (
            RepositoryNotFoundError,
            401,
            ["model.path", "check the spelling", "hf auth login"],
        ),
        (
            RevisionNotFoundError,
            404,
            ["model.revision", "'main'", "a branch, tag or commit of some/model"],
        ),
    ],
)
def test_a_repository_that_the_hub_refuses(
    kind: type[Exception],
    status: int,
    words: list[str],
    posbench: Callable[..., Result],
    hub: Hub,
    outputs: Path,
) -> None:
    hub.error = _answer(kind, status)
    _expect_refusal(posbench(*FETCH, verb=True), *words)
    _expect_refusal(posbench("model=hf", f"model.path={REPO}", "method=none"), *words)
    assert not outputs.exists()


def test_a_repository_without_safetensors(
    posbench: Callable[..., Result], hub: Hub
) -> None:
    (hub.folder / "model.safetensors").unlink()
    _expect_refusal(
        posbench(*FETCH, verb=True), "model.path", "model*.safetensors", "revision"
    )
    assert hub.downloads == []


@pytest.mark.usefixtures("no_network")
def test_the_embedded_model_needs_nothing(posbench: Callable[..., Result]) -> None:
    result = posbench("fetch", verb=True)
    assert (
        result.status == 0
        and "nothing to download" in result.out
        and "posbench://tiny" in result.out
    )


@pytest.mark.usefixtures("no_network")
def test_an_experiment_is_fetched_for_every_job(
    posbench: Callable[..., Result],
) -> None:
    result = posbench("fetch", "experiment=yu2025_table1_kv", verb=True)
    assert (
        result.status == 0
        and "posbench://tiny " in result.out
        and "posbench://tiny_b" in result.out
    )


@pytest.mark.usefixtures("no_network")
def test_files_of_the_task_must_be_there(
    posbench: Callable[..., Result], tmp_path: Path
) -> None:
    there = tmp_path / "there.jsonl"
    there.write_text("{}\n")
    result = posbench("fetch", f"task.path={there}", verb=True)
    assert (
        result.status == 0 and "there.jsonl" in result.out and "3 bytes" in result.out
    )
    gone = posbench(
        "fetch",
        f"task.path={there}",
        f"task.calibration_path={tmp_path}/gone.jsonl",
        verb=True,
    )
    _expect_refusal(gone, "task.calibration_path", "gone.jsonl", "no such file")
    assert "missing" in gone.out and "there.jsonl" in gone.out
    _expect_refusal(
        posbench("fetch", "model=hf", f"model.path={tmp_path}", verb=True),
        "model.path",
        "it lacks config.json",
    )
    _expect_refusal(posbench("fetch", "model=hf", verb=True), "model.path", "None")
    _expect_refusal(posbench("fetch", "model=nope", verb=True), "model", "'nope'")


def test_files_of_a_data_set(hub: Hub) -> None:
    """What a later task names: single files of a repository, subfolders included."""
    (hub.folder / "data").mkdir()
    (hub.folder / "data" / "qa.jsonl").write_text("{}\n")
    source = Source(
        kind="dataset", id="some/set", field="task.source", files=("data/qa.jsonl",)
    )
    assert sources.list_files(source) == (
        OLD,
        [sources.File("data/qa.jsonl", 3, False)],
    )
    assert sources.cached_path(source) is None
    assert (
        sources.local(source) / "data" / "qa.jsonl"
    ).read_text() == "{}\n" and hub.downloads == ["data/qa.jsonl"]
    with refused("task.source", "some/set", allowed="data/gone.jsonl", hint="revision"):
        sources.local(replace(source, files=("data/gone.jsonl",)))
    hub.error = RuntimeError("the hub was asked")
    assert (sources.local(source) / "data" / "qa.jsonl").is_file()


def test_a_url_is_downloaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.command)
            found = self.path == "/data.jsonl"
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", "5" if found else "0")
            self.end_headers()
            if found and self.command == "GET":
                self.wfile.write(b"12345")

        do_HEAD = do_GET

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    monkeypatch.setenv("POSBENCH_CACHE", str(tmp_path / "cache"))
    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        root = f"http://127.0.0.1:{server.server_port}"
        source = Source(kind="url", id=f"{root}/data.jsonl", field="task.url")
        assert (
            sources.list_files(source) == ("", [sources.File("data.jsonl", 5, False)])
            and sources.cached_path(source) is None
        )
        assert sources.local(source).read_bytes() == b"12345"
        before = list(asked)
        assert (
            sources.local(source).name == "data.jsonl"
            and sources.list_files(source)[1][0].here
            and asked == before
        )
        with refused(
            "task.url", f"{root}/nothing", allowed="URL", hint=("task.url", "404")
        ):
            sources.local(Source(kind="url", id=f"{root}/nothing", field="task.url"))
    finally:
        server.shutdown()
        server.server_close()
