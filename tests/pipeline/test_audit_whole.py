"""An audit of a whole run: every planted fault is named, and no run as it was made has one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from posbench.cli.main import main
from posbench.files.atomic import Row
from posbench.model.lm import LM
from posbench.pipeline.audit import Audit, audit_run
from posbench.pipeline.execute import recorded_config
from posbench.pipeline.identity import run_contents
from posbench.pipeline.prepare import build_run
from posbench.run.folder import RunDir, open_run
from tests.conftest import Result, run_folders
from tests.messages import assert_names
from tests.models import build
from tests.server import serving

FILE = "predictions.jsonl"
FEW = [
    "task.pairs=8",
    "task.limit=8",
    "task.positions=[0,3,7]",
    "task.calibration_pairs=8",
    "runtime.resamples=100",
    "runtime.device=cpu",
    "runtime.threads=1",
    "stages=[evaluate]",
]
COMMAND = ["model=tiny", "method.factor=-6", *FEW]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, which no test changes."""
    outputs = tmp_path_factory.mktemp("finished")
    assert main([*COMMAND, f"runtime.outputs={outputs}"]) == 0
    (folder,) = run_folders(outputs)
    return folder


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> RunDir:
    """A copy of it to spoil."""
    outputs = tmp_path / "outputs"
    shutil.copytree(finished.parents[2], outputs)
    (folder,) = run_folders(outputs)
    return open_run(folder)


def audit(out: RunDir, lm: LM | None, share: float = 1) -> Audit:
    """Audit a run folder with a model that is loaded already."""
    from rich.console import Console

    config = recorded_config(out.path)
    run = build_run(config, Console(quiet=True), contents=run_contents(config))
    run.out = out
    if lm:
        run.lm = lm
    return audit_run(run, "float32", share, 0)


def write(out: RunDir, rows: list[Row]) -> None:
    """Write rows with the checksums that a faulty program would give them."""
    out.write_rows(FILE, rows)
    out.renew([FILE])


def other_word(rows: list[Row], row: Row) -> str:
    """A reply of another row."""
    return next(each["output"] for each in rows if each["output"] != row["output"])


def set_field(name: str, value: Any) -> Callable[[list[Row]], None]:
    return lambda rows: rows[0].update({name: value})


def change_reply(rows: list[Row]) -> None:
    rows[0]["output"] = other_word(rows, rows[0])


def change_score(rows: list[Row]) -> None:
    rows[0]["scores"] = {"accuracy": 1 - rows[0]["scores"]["accuracy"]}


def swap_replies(rows: list[Row]) -> None:
    other = next(r for r in rows if r["output"] != rows[0]["output"])
    rows[0]["output"], other["output"] = other["output"], rows[0]["output"]


def exchange_methods(rows: list[Row]) -> None:
    first = next(
        (a, b)
        for a in rows
        for b in rows
        if a["method"] == "none" != b["method"]
        and a["id"] == b["id"]
        and a["output"] != b["output"]
    )
    for name in ("output", "scores"):
        first[0][name], first[1][name] = first[1][name], first[0][name]


PLANTED: dict[str, tuple[Callable[[list[Row]], None], str]] = {
    "reply": (change_reply, "output"),
    "score": (change_score, "scores"),
    "two replies swapped": (swap_replies, "output"),
    "replies of two methods exchanged": (exchange_methods, "output"),
    "prompt": (set_field("prompt", "deadbeef"), "prompt"),
    "request": (set_field("request", "deadbeefdead"), "request"),
    "computation": (set_field("computation", "deadbeefdead"), "computation"),
    "gold position": (set_field("gold_position", 7), "gold_position"),
    "answers": (set_field("answers", ["other"]), "answers"),
    "cluster": (set_field("cluster", "other"), "cluster"),
    "subset": (set_field("subset", "x"), "subset"),
    "cut": (set_field("cut", True), "cut"),
    "extra field": (set_field("extra", 1), "extra"),
    "unknown id": (set_field("id", "nope"), "nope"),
    "unknown method": (set_field("method", "nope"), "nope"),
    "row removed": (lambda rows: rows.pop(), "is missing"),
    "row twice": (lambda rows: rows.append(rows[0]), "2 times"),
    "no reply": (lambda rows: rows[0].pop("output"), "no output"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(name: str, out: RunDir, tiny: LM) -> None:
    plant, named = PLANTED[name]
    rows = out.rows(FILE)
    plant(rows)
    write(out, rows)
    result = audit(out, tiny)
    assert result.differences or result.faults
    assert_names(result.words, named)


def test_a_run_as_it_was_made_has_no_fault(out: RunDir, tiny: LM) -> None:
    result = audit(out, tiny)
    assert not result.differences and result.faults == ()
    assert_names(result.words, "48 of 48", "planned", "digests", "tables")
    assert "Not proven" not in result.words
    share = audit(out, tiny, share=0.1)
    assert_names(share.words, "20 of 48", "Not proven", "28")


@pytest.mark.parametrize(
    ("name", "text", "other"),
    [
        ("metrics.csv", "0.", "0.9"),
        ("prompts.json", '"prompts": 24', '"prompts": 25'),
    ],
)
def test_a_table_that_is_not_that_of_the_rows_is_named(
    name: str, text: str, other: str, out: RunDir, tiny: LM
) -> None:
    file = out.path / name
    assert text in file.read_text()
    file.write_text(file.read_text().replace(text, other, 1))
    out.renew([name])
    assert_names(audit(out, tiny).words, name, "of the rows")
    file.unlink()
    assert_names(audit(out, tiny).words, name, "missing")


def test_rounding_of_a_table_is_no_fault(out: RunDir, tiny: LM) -> None:
    file = out.path / "metrics.csv"
    line = file.read_text().splitlines()[1]
    value = line.split(",")[6]
    rounded = line.replace(value, f"{float(value) + 1e-9:.9f}", 1)
    file.write_text(file.read_text().replace(line, rounded, 1))
    assert audit(out, tiny).faults == ()


def test_the_command_names_a_missing_row(
    out: RunDir, posbench: Callable[..., Result]
) -> None:
    rows = out.rows(FILE)
    gone = rows.pop()
    rows[0]["id"] = "nope"
    write(out, rows)
    result = posbench("audit", str(out.path), verb=True)
    assert result.status == 2 and result.err.count("posbench:") == 1
    assert_names(result.err, "audit", gone["id"], "is missing")
    assert_names(result.err, "nope is none", "remove")
    page = (out.path / "report.html").read_text()
    assert f"{gone['id']} is missing" in page


@pytest.mark.parametrize(
    "more",
    [
        ["model.dtype=bfloat16"],
        [
            "method=[layer_scaling,scale_channel]",
            "method.parts.scale_channel.layers=[0,1]",
        ],
        ["runtime.round_questions=2", "runtime.until=decided", "task.limit=60"],
        ["stages=[search,evaluate]", "search.strings=24", "search.length=48"],
    ],
)
def test_runs_of_other_kinds_have_no_fault(
    more: list[str], posbench: Callable[..., Result], outputs: Path
) -> None:
    made = posbench("model=tiny", *FEW, *more)
    assert made.status == 0, made.err
    (folder,) = run_folders(outputs)
    result = posbench("audit", str(folder), verb=True)
    assert result.status == 0, result.err
    assert_names(result.out, "the same", "planned")


def test_choices_and_subsets_have_no_fault(
    posbench: Callable[..., Result], outputs: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    build("qwen2").save_pretrained(folder)
    letters = {letter: i for i, letter in enumerate(bytes_to_unicode().values())}
    tokenizer = Qwen2Tokenizer(vocab=letters | {"<|endoftext|>": 256}, merges=[])
    tokenizer.save_pretrained(folder)
    file = Path(__file__).parents[1] / "data/own/choices.jsonl"
    made = posbench(
        f"model={folder}",
        "task=own_data",
        f"task.path={file}",
        "method=none",
        *FEW[4:],
    )
    assert made.status == 0, made.err
    (folder,) = run_folders(outputs)
    result = posbench("audit", str(folder), verb=True)
    assert result.status == 0, result.err
    assert (folder / "subsets.csv").is_file()
    (folder / "subsets.csv").write_text("model\n")
    open_run(folder).renew(["subsets.csv"])
    assert "subsets.csv" in posbench("audit", str(folder), verb=True).err


def test_a_served_run_is_proven_but_for_its_replies(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    with serving() as server:
        made = posbench(
            f"model.base_url={server.url}",
            "model.name=fake",
            "task.prompt=compact",
            "task.records=words",
            *FEW,
        )
    assert made.status == 0, made.err
    (folder,) = run_folders(outputs)
    result = posbench("audit", str(folder), verb=True)
    assert result.status == 0, result.err
    assert_names(result.out, "No reply", "server", "planned", "24")
    out = open_run(folder)
    whole = out.rows(FILE)
    for name, named in (
        ("computation", "computation"),
        ("request", "request"),
        ("score", "scores"),
        ("row removed", "is missing"),
    ):
        rows = [dict(row) for row in whole]
        PLANTED[name][0](rows)
        write(out, rows)
        assert_names(audit(out, None).words, named)
    result = posbench("audit", str(folder), verb=True)
    assert result.status == 2
    assert_names(result.err, "audit", named)
