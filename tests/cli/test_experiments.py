"""Every experiment runs from its command to its report, with all that costs time made small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posbench import paths
from posbench.errors import choices
from posbench.files.choices import read_choice
from posbench.schema import override_text
from tests.cli import test_kills, test_tasks
from tests.cli.task_files import TASKS
from tests.conftest import Result, run_folders

reader = test_tasks.reader
SAMPLE = ("yu2025_table2",)
OWN = (
    "study.show=",
    "study.methods=",
    "study.items=",
)  # of an experiment, whatever the size
EVERY = {
    name: read_choice("experiment", name, paths.config_folders(None))
    for name in choices(*paths.group_folders("experiment"))
}


def _search(settings: list[str]) -> list[str]:
    return [
        setting
        for setting in settings
        if setting.startswith(("search.", "task.calibration_examples"))
    ]


SEARCH = {
    # Two layers have no four places in whole steps.
    "genetic": [*_search(test_kills.BRED), "search.step_x=0.25"],
    "gradient": _search(test_kills.GRADIENT),
    "channel": _search(test_kills.CHANNEL),
}
NETWORK = {"width": 8, "classes": 16, "labels": 4, "batch": 4, "sequences": 40}
TRAINED = [f"study.common.{key}={value}" for key, value in NETWORK.items()]
TRAINED += ["study.seeds=1", "study.iterations=6", "study.processes=1"]
CONSTANTS = {"scale_channel": test_tasks.METHOD}


def _study(name: str) -> list[str]:
    """What the kills make a study small with; an experiment keeps its own figures and networks."""
    if name == "synthetic_training":
        return TRAINED
    job = test_kills.JOBS[name]
    kept = [s for s in job.settings[1:] if not s.startswith(OWN)]
    return kept + ([f"model={job.model}", "runtime.threads=1"] if job.model else [])


def shrunken(name: str, reader: Path, files: Path) -> list[str]:
    """The command line of an experiment at the first point of its grid, small."""
    data = EVERY[name]
    chosen = {
        k: v
        for part in data["defaults"]
        if isinstance(part, dict)
        for k, v in part.items()
    }
    told = {key.removeprefix("override "): value for key, value in chosen.items()}
    point: dict[str, Any] = {
        key: values[0] for key, values in data["experiment"].get("grid", {}).items()
    }
    args = [f"experiment={name}", "runtime.device=cpu", "runtime.resamples=100"]
    if "study" in told:
        small = _study(told["study"])
        if told.get("task", "kv_retrieval") != "kv_retrieval":
            small.append("task=kv_retrieval")  # the studies are made small on pairs
        point.pop("model", None)
    elif data["experiment"].get("needs_weights"):
        task = point.get("task", told.get("task", "kv_retrieval"))
        small = [
            "model=hf",
            "model.name=bytes",
            f"model.path={reader}",
            "task.max_new_tokens=4",
        ]
        small += TASKS[task][0](files)
        small += [
            s
            for s in SEARCH.get(told.get("search", ""), [])
            if not s.startswith("task.")
        ]
        small += CONSTANTS.get(told.get("method", "scale_channel"), [])
        point.pop("model", None)
    else:
        small = [*test_kills.FEW, *SEARCH[told.get("search", "channel")]]
        small += [] if "model" in point else ["model=tiny"]
    typed = {setting.split("=")[0] for setting in small}
    return [
        *args,
        *(
            f"{key}={override_text(value)}"
            for key, value in point.items()
            if key not in typed
        ),
        *small,
    ]


SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in EVERY if n not in SAMPLE]


@pytest.mark.parametrize("name", [*SAMPLE, *SLOW])
def test_an_experiment_runs_shrunken(
    name: str,
    reader: Path,
    tmp_path: Path,
    outputs: Path,
    posbench: Callable[..., Result],
) -> None:
    (tmp_path / "files").mkdir()
    result = posbench(*shrunken(name, reader, tmp_path / "files"))
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    assert (folder / "DONE").is_file() and (folder / "report.html").is_file()
    data = EVERY[name]["experiment"]
    assert folder.parents[1].name == name
    page = (folder / "report.html").read_text()
    assert data["title"].split(":")[0] in page, "the page says what it regenerates"


OWN_EXPERIMENT = """
defaults: [config, {override method: none}, _self_]
experiment:
  name: mine
  title: "My table"
  claims: [first claim]
  reference:
    {file: mine.csv, paper_task: KV, task: kv_retrieval, source: "Paper, Table 1",
     models: {Tiny: tiny}, methods: {Baseline: none}}
stages: [evaluate, report]
task: {limit: 10, positions: ["0%", "100%"]}
"""
OWN_TABLE = "model,method,task,position,metric,value\nTiny,Baseline,KV,0%,accuracy(%),"


def test_a_corrected_table_of_a_paper_is_reported_again(
    tmp_path: Path, outputs: Path, posbench: Callable[..., Result]
) -> None:
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(OWN_EXPERIMENT)
    call = ["--config-dir", str(tmp_path / "conf"), "experiment=mine"]
    call += ["runtime.device=cpu"]
    outs = []
    for value in (50.0, 100.0, 100.0):
        (folder / "mine.csv").write_text(f"{OWN_TABLE}{value}\n")
        result = posbench(*call)
        assert result.status == 0, result.err
        outs.append(" ".join(result.out.split()))
    (run,) = run_folders(outputs)
    wrong, corrected, same = outs
    assert "Cells of the paper: 1 differs." in wrong
    assert "Cells of the paper: 1 differs." not in corrected
    assert "reported again" in corrected and "evaluate:" not in corrected
    assert "nothing is computed again" in same
    text = (folder / "mine.yaml").read_text().replace("first claim", "second claim")
    (folder / "mine.yaml").write_text(text)
    assert posbench(*call).status == 0 and run_folders(outputs) == [run]
    assert "second claim" in (run / "report.html").read_text()
