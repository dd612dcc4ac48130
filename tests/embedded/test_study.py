"""The study of the embedded models: which seed is finished, what is written, what a checkpoint measures."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from posbench import paths
from posbench.embedded import criteria as measuring
from posbench.embedded import study
from posbench.embedded.criteria import criteria, kv_task, measure
from posbench.embedded.recipe import RECIPES, SHIPPED_SEEDS
from posbench.embedded.training import TRAINING_FILE
from tests.conftest import run_folders
from tests.embedded.test_training import MICRO

torch.set_num_threads(1)
GOOD = json.loads((paths.MODELS / "tiny" / study.MEASURED_FILE).read_text())
BAD = GOOD | {"found": GOOD["found"] | {"gain": 0.01}}


@pytest.fixture
def trainings(monkeypatch):
    """Trainings of a micro model whose numbers are good from the third one on; their seeds in order."""
    asked = []
    monkeypatch.setattr(study, "RECIPES", dict.fromkeys(RECIPES, MICRO))
    train = study.train

    def counted(recipe, seed, *rest):
        asked.append(seed)
        return train(recipe, seed, *rest)

    def numbers(folder, name, seed, per_position=64):
        seeds = list(dict.fromkeys(asked))
        trained = json.loads((Path(folder) / TRAINING_FILE).read_text())["seed"]
        return (GOOD if trained in seeds and seeds.index(trained) >= 2 else BAD) | {
            "task_seed": seed
        }

    monkeypatch.setattr(study, "train", counted)
    monkeypatch.setattr(study, "measure", numbers)
    return asked


def test_the_first_seed_that_meets_the_criteria_is_finished(
    trainings, posbench, outputs
):
    assert posbench("study=embedded_model").status == 0
    assert trainings[0] == SHIPPED_SEEDS["tiny"] and trainings == [9, 0, 1]
    (run,) = run_folders(outputs)
    finished = run / "tiny"
    shipped = {p.name for p in (paths.MODELS / "tiny").iterdir()}
    assert {p.name for p in finished.iterdir()} == shipped - {
        "README.md",
        "moice.safetensors",
    }
    assert json.loads((finished / TRAINING_FILE).read_text())["seed"] == 1
    assert json.loads((finished / study.MEASURED_FILE).read_text())["task_seed"] == 2
    table = pd.read_csv(run / "criteria.csv")
    assert list(table.groupby(["prompts", "seed"], sort=False).size().index) == [
        ("choosing", 1),
        ("choosing", 9),
        ("choosing", 0),
        ("evaluation", 1),
    ]
    failed = table[~table["passed"]]
    assert (
        set(failed["seed"]) == {9, 0}
        and failed["criterion"].str.startswith("gain").all()
    )
    assert (pd.read_csv(run / "findings.csv")["verdict"] == "holds").all()
    seeds = pd.read_csv(run / "seeds.csv")
    assert list(seeds["seed"]) == [0, 1, 9]
    assert list(seeds.columns) == list(
        pd.read_csv(paths.MODELS / "tiny" / study.SEEDS_FILE).columns
    )
    assert (
        seeds.loc[1, "gain"] == GOOD["found"]["gain"]
        and seeds.loc[1, "base"] == GOOD["base"]["mean"]
    )


def test_named_seeds_are_all_trained_and_shared_between_runs(
    trainings, posbench, outputs
):
    assert posbench("study=embedded_model", "study.seeds=[4,5,6,7]").status == 0
    assert trainings == [4, 5, 6, 7]
    (run,) = run_folders(outputs)
    assert json.loads((run / "tiny" / TRAINING_FILE).read_text())["seed"] == 6
    # The second run finds them; tiny_b has nothing to gain, so that its first seed is the one.
    assert posbench("study=embedded_model", "study.seeds=[7,6]").status == 0
    assert trainings == [4, 5, 6, 7]
    assert (
        posbench(
            "study=embedded_model", "study.model=tiny_b", "study.seeds=[5,4]"
        ).status
        == 0
    )
    b = next(
        folder / "tiny_b"
        for folder in run_folders(outputs)
        if (folder / "tiny_b").is_dir()
    )
    assert json.loads((b / TRAINING_FILE).read_text())["seed"] == 5


def test_a_changed_recipe_is_trained_anew(trainings, posbench, monkeypatch):
    posbench("study=embedded_model", "study.seeds=[4]")
    monkeypatch.setitem(
        study.RECIPES, "tiny", RECIPES["tiny"].__class__(**{**vars(MICRO), "clip": 0.5})
    )
    posbench("study=embedded_model", "study.seeds=[4,5]")
    assert trainings == [4, 4, 5]


def test_without_seeds_the_shipped_checkpoint_is_measured(trainings, posbench, outputs):
    assert posbench("study=embedded_model", "study.seeds=[]").status == 0
    (run,) = run_folders(outputs)
    assert not trainings and set(pd.read_csv(run / "criteria.csv")["prompts"]) == {
        "evaluation"
    }
    assert [p.name for p in (run / "tiny").iterdir()] == [study.MEASURED_FILE]
    curve = json.loads((paths.MODELS / "tiny" / TRAINING_FILE).read_text())["curves"]
    assert list(pd.read_csv(run / "training.csv")["loss"]) == [
        row["loss"] for row in curve
    ]


def test_bad_fields_are_refused(posbench):
    result = posbench(
        "study=embedded_model",
        "study.model=huge",
        "study.seeds=[-1]",
        "study.attempts=0",
    )
    assert result.status == 2
    assert all(
        f"study.{name} = " in result.err for name in ("model", "seeds", "attempts")
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_nope", "tiny_alibi"])
def test_a_shipped_checkpoint_measures_as_published(name, monkeypatch):
    monkeypatch.setattr(measuring, "STRING_SETS", 1)
    published = json.loads((paths.MODELS / name / study.MEASURED_FILE).read_text())
    measured = measure(paths.MODELS / name, name, study.EVALUATION_SEED, per_position=2)
    # What does not depend on the number of scored prompts.
    assert measured["ranking"] == published["ranking"]
    for part in ("found", "best"):
        for key in ("channel", "factor", "layers"):
            assert measured[part][key] == published[part][key]
        for key in ("loss", "loss_unmodified"):
            assert measured[part][key] == pytest.approx(
                published[part][key], abs=1.5e-4
            )
    assert measured["n"] == 2 * published["pairs"]
    assert [row["pairs"] for row in measured["lengths"]] == [
        row["pairs"] for row in published["lengths"]
    ]


def test_a_model_without_a_monotone_channel_fails():
    rows = criteria(GOOD | {"found": None, "channels_monotone": 0}, "tiny_nope")
    failed = {row["criterion"]: row["required"] for row in rows if not row["passed"]}
    assert failed == {"monotone channels": True, "gain of the found channel": False}


def test_the_three_example_sets_are_disjoint():
    sets = [{e.prompt for e in kv_task("tiny", 0).examples("calibration")}]
    sets += [
        {e.prompt for e in kv_task("tiny", seed, per_position=2).evaluation()}
        for seed in (1, 2)
    ]
    assert not sets[0] & sets[1] and not sets[0] & sets[2] and not sets[1] & sets[2]
