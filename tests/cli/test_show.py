"""`posbench show`: what was asked, what is right, and what every method said; and how verbs are called."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from posbench import paths
from posbench.cli.main import VERBS
from posbench.errors import choices
from posbench.report.console import make_console
from posbench.run.folder import RunDir
from tests.conftest import PROCESS, Result, run_folders
from tests.messages import assert_refused


def test_examples_of_a_run_are_shown(
    posbench: Callable[..., Result], small: list[str], outputs: Path
) -> None:
    channel = ["method.channel=3", "method.factor=0", "method.layers=[1,2]"]
    assert posbench(*small[:-1], *channel, "stages=[evaluate]").status == 0
    (folder,) = run_folders(outputs)
    rows = [
        json.loads(line)
        for line in (folder / "predictions.jsonl").read_text().splitlines()
    ]
    ids = list(dict.fromkeys(row["id"] for row in rows))
    missed = {row["id"] for row in rows if row["scores"]["accuracy"] < 1}
    assert all(len(row["answers"]) == 1 for row in rows) and missed
    # Some, all, and the wrong ones.
    shown = posbench("show", str(folder), verb=True)
    assert (
        shown.status == 0
        and shown.out.count("\nid ") == 5
        and f"{len(ids) - 5} more: " in shown.out
    )
    assert shown.out.startswith(
        f"{len(missed)} of {len(ids)} examples are scored below 1"
    )
    wrong = posbench("show", str(folder), "--wrong", "--all", verb=True).out
    assert {
        line.split(",")[0][3:] for line in wrong.splitlines() if line.startswith("id ")
    } == missed
    # One in full: both methods, the answer of the row, the prompt of the task.
    (one,) = (row for row in rows if row["id"] == ids[7] and row["method"] == "none")
    text = posbench("show", str(folder), "--id", ids[7], verb=True).out
    assert (
        f"expected: {one['answers'][0]}\nunmodified: accuracy {one['scores']['accuracy']:g}"
        in text
    )
    assert (
        "\nscale_channel: accuracy " in text
        and "[..." not in text
        and "Json data: {" in text
    )
    # Mistakes are one line.
    for args, field, allowed in (
        ([str(folder), "--id", f"{ids[7]}9"], "--id", "id"),
        ([str(folder), "--id"], "--id", "value"),
        ([], "show", "folder"),
        ([str(outputs)], "DIR", "config.yaml"),
    ):
        refused = posbench("show", *args, verb=True)
        assert (refused.status, refused.out, refused.err.count("\n")) == (2, "", 1), (
            args
        )
        assert_refused(refused.err, field, allowed=allowed)
    (folder / "predictions.jsonl").unlink()
    damaged = posbench("show", str(folder), verb=True)
    assert_refused(damaged.err, "DIR", str(folder), allowed="predictions.jsonl")
    (outputs / "config.yaml").write_text("{}")
    shown = posbench("show", str(outputs), verb=True)
    assert_refused(shown.err, "DIR", str(outputs), allowed="run", hint="evaluate")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_says_how_it_is_called(
    posbench: Callable[..., Result], verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = posbench(*verb.split(), "--help", verb=True)
    assert (told.status, told.err) == (0, "") and "Raises" not in told.out
    summary, call, *rest = told.out.split("\n\n")
    assert re.fullmatch(r"[A-Z].*\.", " ".join(summary.split()))
    assert call.startswith(f"usage: posbench {verb} ")
    (example,) = (block for block in rest if block.startswith("example: "))
    assert f"posbench {verb} " in example
    lines = told.out.replace(example, "").splitlines()
    assert max(map(len, lines)) <= 80, "words of the help stay whole on a terminal"
    for args in (["-h"], *([["something", "--help"]] if verb != "lm_eval" else [])):
        assert posbench(*verb.split(), *args, verb=True).out == told.out


@pytest.mark.parametrize("text", ["{", "3", "[a]", "{}", "task: 3", "\udcff"])
def test_a_config_that_is_none_is_one_line(
    posbench: Callable[..., Result], tmp_path: Path, text: str
) -> None:
    run = RunDir(tmp_path)
    row = {
        "id": "a",
        "method": "none",
        "answers": ["x"],
        "scores": {"accuracy": 1.0},
        "output": "x",
    }
    run.write_rows("predictions.jsonl", [row])
    (tmp_path / "DONE").touch()
    (tmp_path / "config.yaml").write_bytes(text.encode(errors="surrogateescape"))
    for verb in ("show", "rescore", "report"):
        told = posbench(verb, str(tmp_path), verb=True)
        lines = [
            line for line in told.err.splitlines() if not line.startswith("WARNING ")
        ]
        assert (told.status, len(lines)) == (2, 1) and lines[0].startswith(
            "posbench: config.yaml = "
        ), verb


def test_a_piped_list_has_a_line_for_each_choice(
    posbench: Callable[..., Result],
) -> None:
    header, *listed = [
        line.split("\t") for line in posbench("ls", "tasks", verb=True).out.splitlines()
    ]
    assert header == ["name", "version", "metric", "size", "source", "licence", "from"]
    assert [row[0] for row in listed] == choices(paths.CONF / "task")
    (nq,) = (row for row in listed if row[0] == "nq_multidoc")
    assert (
        nq[3] == "2655 questions with 10, 20 or 30 documents; the first 500 by default"
    )
    as_json = json.loads(posbench("ls", "tasks", "--json", verb=True).out)
    # What is null in JSON is an empty cell.
    cells = [["" if v is None else str(v) for v in row.values()] for row in as_json]
    assert cells == listed


def test_a_reader_that_has_read_enough_gets_no_traceback() -> None:
    """As in ``posbench --help | head``: the pipe is closed before anything is read."""
    call = subprocess.Popen(
        [*PROCESS, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert call.stdout and call.stderr
    call.stdout.close()
    assert call.wait() == 141 and call.stderr.read() == b""
    call.stderr.close()
    with pytest.raises(BrokenPipeError):
        make_console().on_broken_pipe()


@pytest.mark.parametrize(
    ("command", "status", "shown"),
    [
        ("--version <&- >&-", 0, ""),
        ("ls nothing 2>&-", 2, ""),
        ("--version 2>&-", 0, "posbench"),
    ],
)
def test_a_closed_stream_is_as_one_that_nobody_reads(
    command: str, status: int, shown: str
) -> None:
    line = f"{shlex.join(PROCESS)} {command}"
    call = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert call.returncode == status
    assert call.stdout.startswith(shown) and bool(call.stdout) == bool(shown)
    assert call.stderr == ""
