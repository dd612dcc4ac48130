"""A method, task, study, search and experiment of one's own: two files each, outside the package."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import yaml

from posbench.run.folder import RunDir
from posbench.tasks import KVRetrieval
from tests.conftest import Result, run_folders
from tests.messages import assert_names, assert_refused

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SMALL = [
    "task=roll_call",
    "task.names=8",
    "task.limit=4",
    "runtime.intervene_examples=2",
    "runtime.resamples=100",
]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The examples, copied to a folder of one's own."""
    return f"--config-dir={shutil.copytree(EXAMPLES, tmp_path_factory.mktemp('own') / 'files')}"


def folder(outputs: Path) -> Path:
    (found,) = run_folders(outputs)
    return found


def test_each_is_a_module_and_a_yaml() -> None:
    for group, module in {
        "method": "damp",
        "task": "roll_call",
        "study": "first_item",
        "search": "tries",
    }.items():
        file = EXAMPLES / group / f"{module}.yaml"
        assert yaml.safe_load(file.read_text())["_target_"].startswith(f"{module}.")
        assert (EXAMPLES / f"{module}.py").is_file()


def test_they_are_listed_and_valid(own: str, posbench) -> None:
    for kind, name in (
        ("methods", "damp"),
        ("tasks", "roll_call"),
        ("studies", "first_item"),
        ("experiments", "damp_table"),
    ):
        assert name in posbench("ls", kind, own, verb=True).out
    assert posbench("validate", own, "experiment=damp_table", verb=True).status == 0


def test_search_intervene_evaluate_report(own: str, posbench, outputs: Path) -> None:
    assert (
        posbench(
            own,
            "method=damp",
            "search=tries",
            "stages=[search,intervene,evaluate,report]",
            *SMALL,
        ).status
        == 0
    )
    run = folder(outputs)
    tried = pd.read_csv(run / "search.csv")
    best = tried.loc[tried["loss"].idxmin(), "strength"]
    assert yaml.safe_load((run / "found.yaml").read_text())["damp"]["strength"] == best
    assert json.loads((run / "method.json").read_text())["strength"] == best
    assert set(pd.read_csv(run / "metrics.csv", dtype=str)["method"]) == {
        "none",
        "damp",
    }
    assert set(pd.read_csv(run / "attention.csv", dtype=str)["method"]) == {
        "none",
        "damp",
    }
    assert "Answer loss by strength." in (run / "report.html").read_text()
    again = posbench(
        own,
        "method=damp",
        "search=tries",
        "stages=[search,intervene,evaluate,report]",
        *SMALL,
    )
    assert "finished before" in again.out and len(run_folders(outputs)) == 1


@pytest.mark.parametrize(
    ("typed", "strength"), [([], 0.25), (["method.strength=0.5"], 0.5)]
)
def test_the_constant_of_the_model_unless_typed(
    own: str, typed: list[str], strength: float, posbench, outputs: Path
) -> None:
    assert (
        posbench(
            own, "model=tiny_damped", "method=damp", "stages=[evaluate]", *SMALL, *typed
        ).status
        == 0
    )
    found = json.loads((folder(outputs) / "method.json").read_text())
    assert found["strength"] == strength
    # The source is that of the constants that ran.
    assert found.get("source") == (None if typed else "tried by hand")


def test_without_the_constant_it_is_refused_in_one_line(own: str, posbench) -> None:
    result = posbench(own, "method=damp", "stages=[evaluate]", *SMALL)
    assert (
        result.status == 2
        and "method.strength = None" in result.err
        and len(result.err.splitlines()) == 1
    )


def test_in_a_list_of_methods(own: str, posbench, outputs: Path) -> None:
    given = [
        "model=tiny_damped",
        "method=[damp,scale_channel]",
        "method.parts.scale_channel.factor=0",
        "stages=[evaluate]",
    ]
    assert posbench(own, *given, *SMALL).status == 0
    parts = json.loads((folder(outputs) / "method.json").read_text())["parts"]
    assert parts["damp"]["strength"] == 0.25 and parts["scale_channel"]["factor"] == 0


@pytest.mark.figures
def test_the_study_under_a_method(own: str, posbench, outputs: Path) -> None:
    result = posbench(
        own,
        "study=first_item",
        "model=tiny_damped",
        "method=damp",
        "study.examples=3",
        *SMALL,
    )
    assert result.status == 0
    assert_names(result.out, "first item")
    run = folder(outputs)
    table = pd.read_csv(run / "first_item.csv")
    total = pd.read_csv(run / "first_item_total.csv")
    assert total["value"].item() == pytest.approx(
        (table["share"] * table["n"]).sum() / table["n"].sum()
    )
    assert (run / "figures" / "first_item.svg").is_file() and "first_item" in (
        run / "report.html"
    ).read_text()


def test_the_experiment_sweeps_and_stands_beside_the_paper(
    own: str, posbench, outputs: Path
) -> None:
    assert posbench(own, "experiment=damp_table", *SMALL[2:]).status == 0
    runs = [
        json.loads((f / "method.json").read_text())["strength"]
        for f in run_folders(outputs)
    ]
    assert sorted(runs) == [0.1, 0.3]
    (page,) = outputs.glob("damp_table/v*/sweep__*/report.html")
    assert_names(page.read_text(), "61.5", "Table 1")


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        (["study=first_item", "study.examples=0"], ["study.examples", "task.names"]),
        (["method=damp", "method.strength=2"], ["task.names", "method.strength"]),
    ],
)
def test_faults_in_files_of_ones_own_are_told_together(
    overrides: list[str], fields: list[str], own: str, posbench
) -> None:
    result = posbench(own, "task=roll_call", "task.names=1", *overrides)
    assert result.status == 2
    assert [line.split(" ")[1] for line in result.err.splitlines()] == fields


@pytest.mark.parametrize("multirun", [False, True])
@pytest.mark.parametrize(
    ("group", "module", "function", "args"),
    [
        ("task", "roll_call", "RollCall.examples", ["method=none"]),
        ("method", "damp", "Damp.changed", ["method.strength=1"]),
    ],
)
def test_a_mistake_in_code_of_ones_own_is_one_line(
    group: str,
    module: str,
    function: str,
    args: list[str],
    multirun: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    posbench: Callable[..., Result],
) -> None:
    """The line names the function, the file, its line and the error; a variable asks for the traceback."""
    own = tmp_path / "own"
    shutil.copytree(EXAMPLES, own)
    file = own / f"{module}.py"
    text, number = with_mistake(file.read_text(), function)
    file.write_text(text)
    args = [f"--config-dir={own}", *SMALL, f"{group}={module}", *args]
    args.append("stages=[evaluate]")
    if multirun:
        args += ["-m", "runtime.batch_size=4,8"]
    result = posbench(*args)
    assert result.status == 2 and len(result.err.splitlines()) == 1 + multirun
    field = f"{function} ({file}, line {number})"
    assert_refused(result.err, field, "ZeroDivisionError: division by zero")
    monkeypatch.setenv("POSBENCH_TRACEBACK", "1")
    assert f'{file}", line {number}' in posbench(*args).err


def with_mistake(text: str, function: str) -> tuple[str, int]:
    """A module where a method of a class fails in its first line, and the number of this line."""
    name = function.partition(".")[2]
    lines = text.splitlines(keepends=True)
    (method,) = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    number = method.body[0].lineno
    lines.insert(number - 1, " " * method.body[0].col_offset + "1 / 0\n")
    return "".join(lines), number


def test_a_backend_answers_from_recorded_replies(
    own: str, posbench, outputs: Path, tmp_path: Path
) -> None:
    task = ["task.pairs=8", "task.positions=[0,3,7]", "task.limit=2"]
    ask = [*task, "task.prompt=compact", "task.records=words"]
    made = KVRetrieval(
        pairs=8, positions=(0, 3, 7), limit=2, prompt="compact", records="words"
    )
    examples = made.evaluation()
    # The middle is answered wrong.
    replies = {e.id: "?" if e.gold_position == 3 else e.answers[0] for e in examples}
    rows = [{"prompt": e.prompt, "reply": replies[e.id]} for e in examples]
    file = tmp_path / "replies.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:-1]))
    backend = ["model=recorded", f"model.backend.file={file}", "model.concurrency=2"]

    refused = posbench(own, *backend, *ask)
    assert_refused(refused.err, "model.backend.file", str(file))
    (incomplete,) = run_folders(outputs)
    kept = RunDir(incomplete).rows("predictions.jsonl")
    assert len(kept) == len(examples) - 1, "what was answered is kept"

    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert posbench(own, *backend, *ask).status == 0
    (run,) = set(run_folders(outputs)) - {incomplete}
    scores = {
        row["id"]: row["scores"]["accuracy"]
        for row in RunDir(run).rows("predictions.jsonl")
    }
    assert scores == {e.id: float(e.gold_position != 3) for e in examples}
    again = posbench(own, *backend, *ask)
    assert "finished before" in again.out
    assert posbench("audit", str(run), verb=True).status == 0

    inside = posbench(own, *backend, *ask, "method=damp")
    assert_refused(inside.err, "method", "damp")
    unknown = posbench(own, *backend, *ask, "model.backend.files=x")
    assert_refused(unknown.err, "model.backend.files")
