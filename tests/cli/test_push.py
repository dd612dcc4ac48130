"""posbench push sends tables, figures and the page of a run, and nothing else of it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest

from posbench.cli.main import main
from posbench.run.folder import RunDir
from tests.conftest import Result, run_folders
from tests.messages import assert_refused

STUB = '''"""Writes what it is asked to log into a file beside it."""
import json
from pathlib import Path

CALLS = Path(__file__).with_name("calls.jsonl")
class Error(Exception): pass
def write(*call):
    with CALLS.open("a") as file:
        file.write(json.dumps(call) + "\\n")
def Settings(**fields): return fields
def Table(dataframe, allow_mixed_types):
    return {"columns": list(dataframe.columns), "rows": dataframe.values.tolist()}
def Html(text, inject, data_is_not_path): return text
def init(**fields):
    if fields["project"] == "refused": raise Error("no key")
    write("init", fields)
def log(items): write("log", items)
def finish(): write("finish", {})
'''


@pytest.fixture(scope="module")
def run(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with figures and a page."""
    outputs = tmp_path_factory.mktemp("push") / "outputs"
    stages = "stages=[intervene,evaluate,report]"
    settings = [key for key in small if not key.startswith(("stages=", "search"))]
    args = [*settings, "method=none", stages, f"runtime.outputs={outputs}"]
    assert main(args) == 0
    (folder,) = run_folders(outputs)
    return folder


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Install a stand-in for a tracker; the file of its calls."""

    def install(name: str) -> Path:
        package = tmp_path / "site" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(STUB)
        monkeypatch.syspath_prepend(package.parent)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return package / "calls.jsonl"

    return install


@pytest.mark.figures
@pytest.mark.parametrize("target", ["trackio", "wandb"])
def test_a_tracker_gets_tables_figures_and_the_page(
    target: str, run: Path, stub: Callable[[str], Path], posbench: Callable[..., Result]
) -> None:
    calls = stub(target)
    result = posbench("push", str(run), "--to", target, "--project", "mine", verb=True)
    assert (result.status, result.err) == (0, ""), result.err
    init, log, finish = map(json.loads, calls.read_text().splitlines())
    assert (init[0], log[0], finish[0]) == ("init", "log", "finish")
    assert (init[1]["project"], init[1]["name"]) == ("mine", run.name)
    assert "config" not in init[1]
    tables = {file.stem for file in run.glob("*.csv")}
    figures = {file.stem for file in (run / "figures").glob("*.svg")}
    assert {"metrics", "attention"} <= tables and figures
    names = {f"tables/{name}" for name in tables}
    names |= {f"figures/{name}" for name in figures}
    assert set(log[1]) == {*names, "page"}
    assert log[1]["page"] == (run / "report.html").read_text()
    sent = log[1]["tables/metrics"]
    table = pd.read_csv(run / "metrics.csv")
    assert sent["columns"] == list(table) and len(sent["rows"]) == len(table)
    values = [row[sent["columns"].index("value")] for row in sent["rows"]]
    numbers = table["value"].tolist()
    assert values == [None if pd.isna(number) else number for number in numbers]
    assert not all(table["value"].isna())


def test_wandb_records_nothing_on_its_own(
    run: Path, stub: Callable[[str], Path], posbench: Callable[..., Result]
) -> None:
    calls = stub("wandb")
    assert posbench("push", str(run), "--to", "wandb", verb=True).status == 0
    settings = json.loads(calls.read_text().splitlines()[0])[1]["settings"]
    assert settings["console"] == "off" and settings["disable_git"]
    assert settings["x_disable_meta"] and settings["x_disable_stats"]
    refused = posbench("push", str(run), "--to=wandb", "--project=refused", verb=True)
    assert refused.status == 2
    assert_refused(refused.err, "--to", "wandb", allowed="no key", hint="wandb login")


class Hub:
    """Stands for the client of the hub."""

    calls: ClassVar[list[tuple[str, tuple[Any, ...], dict[str, Any]]]] = []
    error: Exception | None = None

    def create_repo(self, *args: Any, **fields: Any) -> None:
        if self.error:
            raise self.error
        self.calls.append(("create_repo", args, fields))

    def upload_folder(self, **fields: Any) -> None:
        self.calls.append(("upload_folder", (), fields))


def test_the_hub_gets_these_files_alone(
    run: Path, posbench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    push = ("push", str(run), "--to", "hub")
    result = posbench(*push, "--project", "me/bias", verb=True)
    assert (result.status, result.err) == (0, "")
    (made, name, how), (uploaded, _, what) = Hub.calls
    assert (made, uploaded) == ("create_repo", "upload_folder")
    assert name == ("me/bias",) and how["private"] and how["repo_type"] == "dataset"
    assert what["path_in_repo"] == run.name
    allowed = set(what["allow_patterns"])
    assert {"report.html", "metrics.csv"} <= allowed
    assert all(name.endswith((".csv", ".svg", ".html")) for name in allowed)
    for typed in ([], ["--project", "bias"]):
        refused = posbench(*push, *typed, verb=True)
        assert_refused(refused.err, "--project", hint="--project OWNER/NAME")
    for error, status in ((ValueError("bad name"), 2), (OSError("unreachable"), 3)):
        monkeypatch.setattr(Hub, "error", error)
        refused = posbench(*push, "--project", "me/bias", verb=True)
        assert refused.status == status and str(error) in refused.err
        assert refused.err.count("\n") == 1


@pytest.mark.parametrize("target", ["trackio", "wandb"])
def test_a_missing_package_is_one_line(
    target: str,
    run: Path,
    posbench: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, target, None)
    refused = posbench("push", str(run), "--to", target, verb=True)
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert_refused(refused.err, "--to", target, hint=("pip install", "[push]'"))


def test_what_is_no_finished_run_is_refused(
    run: Path,
    tmp_path: Path,
    stub: Callable[[str], Path],
    posbench: Callable[..., Result],
) -> None:
    calls = stub("trackio")
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder in (empty, tmp_path / "missing", run.parent):
        refused = posbench("push", str(folder), "--to", "trackio", verb=True)
        assert refused.status == 2
        assert_refused(refused.err, "DIR", str(folder), allowed="run")
    unfinished = tmp_path / "unfinished"
    shutil.copytree(run, unfinished)
    (unfinished / "DONE").unlink()
    assert not RunDir(unfinished).done
    refused = posbench("push", str(unfinished), "--to", "trackio", verb=True)
    assert_refused(refused.err, "RUN", str(unfinished), allowed="finished")
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    (damaged / "metrics.csv").write_text("value\n1\n")
    refused = posbench("push", str(damaged), "--to", "trackio", verb=True)
    assert_refused(refused.err, "DIR", str(damaged), allowed="metrics.csv")
    assert not calls.exists()


@pytest.mark.parametrize(
    ("args", "field", "allowed"),
    [
        ([], "push", ("trackio", "wandb", "hub")),
        (["a", "b", "--to", "hub"], "push", "one run"),
        (["a", "--too", "hub"], "push", "one run"),
        (["a", "--to", "wandbb"], "--to", ("trackio", "wandb", "hub")),
    ],
)
def test_mistakes_are_one_line(
    args: list[str], field: str, allowed: Any, posbench: Callable[..., Result]
) -> None:
    refused = posbench("push", *args, verb=True)
    assert (refused.status, refused.out, refused.err.count("\n")) == (2, "", 1)
    assert_refused(refused.err, field, allowed=allowed)


@pytest.mark.slow
def test_trackio_itself_keeps_the_tables(
    run: Path,
    tmp_path: Path,
    posbench: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", "0.43", reason="needs positionbench[push]")
    result = posbench("push", str(run), "--to", "trackio", verb=True)
    assert result.status == 0, result.err
    kept = b"".join(
        file.read_bytes()
        for file in (tmp_path / "trackio").rglob("*")
        if file.is_file()
    )
    assert run.name.encode() in kept and b"position_bias" in kept
    assert b"predictions" not in kept
