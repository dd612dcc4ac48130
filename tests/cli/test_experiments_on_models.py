"""Every experiment with every model of conf/model: a key that nobody typed is fitted, or the model is named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from posbench import paths
from posbench.errors import UserError, choices
from posbench.pipeline.compose import ComposedConfig, compose, compose_one
from posbench.pipeline.prepare import prepare

MODELS = [
    name for name in choices(paths.CONF / "model") if name not in ("endpoint", "hf")
]
EXPERIMENTS = choices(*paths.group_folders("experiment"))
WITHOUT_FILES = "files that are on this machine"
"""What a checkpoint or a data set that was not fetched is refused with."""


def jobs_of(experiment: str, models: list[str]) -> Iterator[ComposedConfig]:
    """The first job of an experiment's grid for each model."""
    jobs = compose(["-m", f"experiment={experiment}", f"model={','.join(models)}"])
    seen = set()
    for job in jobs.composed:
        name = job.raw["model"]["name"]
        if name not in seen:
            seen.add(name)
            yield job
    assert seen == set(models)


def refusals(job: ComposedConfig) -> list[UserError]:
    """What a run would refuse, without files that were not fetched."""
    try:
        prepare(job, download=False)
    except UserError as error:
        return [f for f in error.faults if not f.allowed.startswith(WITHOUT_FILES)]
    return []


def check(experiment: str, models: list[str]) -> None:
    for job in jobs_of(experiment, models):
        for fault in refusals(job):
            assert fault.field == "model", str(fault)
            assert fault.value == job.raw["model"]["name"]


@pytest.mark.parametrize("number", range(len(EXPERIMENTS)))
def test_only_the_model_is_refused_where_it_alone_was_typed(number: int) -> None:
    """Models take turns; those whose files are here are looked at with their prompts."""
    turns = {MODELS[number % len(MODELS)], ["tiny", "smollm2", "tiny_nope"][number % 3]}
    check(EXPERIMENTS[number], sorted(turns))


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_only_the_model_is_refused_on_all_models(experiment: str) -> None:
    check(experiment, MODELS)


def test_the_places_of_an_experiment_are_moved_into_the_items_of_a_model() -> None:
    """smollm2 reads ten documents; the paper's places are of twenty, and stay the same shares of the list."""
    (job,) = jobs_of("yu2025_table1_nq", ["smollm2"])
    task = job.raw["task"]
    assert task["documents"] == 10 and task["positions"] == [0, 2, 4, 7, 9]
    (note,) = job.notes
    assert (
        "[0, 4, 9, 14, 19] -> [0, 2, 4, 7, 9]" in note and "task.documents=10" in note
    )
    (mistral,) = jobs_of("yu2025_table1_nq", ["mistral7b"])
    assert mistral.raw["task"]["positions"] == [0, 4, 9, 14, 19] and not mistral.notes


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (["task.positions=[0,14]"], "task.positions"),
        (["task.documents=5", "task.positions=[0,9]"], "task.positions"),
    ],
)
def test_places_that_were_typed_are_refused(args: list[str], field: str) -> None:
    faults = refusals(
        compose_one("experiment=yu2025_table1_nq", "model=smollm2", *args)
    )
    assert [fault.field for fault in faults] == [field]


def test_texts_of_a_study_are_as_long_as_the_window() -> None:
    (job,) = jobs_of("behind_rope_fig5", ["tiny"])
    run = prepare(job, download=False)
    study: Any = run.config.study
    assert study.tokens == 512 and any(
        "study.tokens: 1024 -> 512" in w for w in run.warnings
    )
    typed = compose_one("experiment=behind_rope_fig5", "model=tiny", "study.tokens=600")
    (fault,) = refusals(typed)
    assert (fault.field, fault.value) == ("study.tokens", 600)


def test_the_hint_of_missing_files_keeps_the_experiment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("posbench.pipeline.prepare.cached_path", lambda source: None)
    jobs = compose(["experiment=lpes_table2", "method=moice", "model=vicuna_7b"])
    with pytest.raises(UserError) as refused:
        prepare(jobs.composed[0], download=False)
    hint = "posbench fetch experiment=lpes_table2 method=moice model=vicuna_7b"
    assert {fault.hint for fault in refused.value.faults} == {hint}


def test_settings_of_an_experiment_s_own_task_are_left_out_with_another_task() -> None:
    args = ["experiment=liu2023", "model=tiny", "task=kv_retrieval", "task.pairs=20"]
    job = compose_one(*args)
    assert refusals(job) == []
    task = job.raw["task"]
    assert (task["name"], task["pairs"], task["limit"]) == ("kv_retrieval", 20, 500)
    (note,) = job.notes
    assert note.startswith("task.documents, task.reading: left out")
    typed = refusals(compose_one(*args, "task.documents=5"))
    assert [fault.field for fault in typed] == ["task.documents"]
