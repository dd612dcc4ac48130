"""The studies of synthetic trainings on the command line: they go on, and refuse what they cannot train."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pandas as pd
import pytest
import yaml

from posbench import paths
from posbench.files.atomic import write_csv
from tests.conftest import Result, run_folders
from tests.messages import assert_names, refused
from wu2025.synthetic_results import SyntheticResults
from wu2025.synthetic_tables import (
    SETTINGS,
    read_printed_cells,
    tabulate,
)
from wu2025.synthetic_training import SyntheticTraining
from wu2025.training import Condition, Ensemble, train

TINY = [
    "study=synthetic_training",
    "study.common={width: 8, classes: 16, labels: 4, batch: 4, sequences: 40, depth: 1}",
    "study.conditions=[{mask: causal}, {mask: full, pe: rope, bias: [0, 7]}]",
    "study.seeds=2",
    "study.processes=1",
    "runtime.device=cpu",
]


def test_study_trains_and_goes_on(
    posbench: Callable[..., Result], outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    step = Ensemble.step

    def counted(self: Ensemble) -> None:
        nonlocal steps
        steps += 1
        step(self)

    monkeypatch.setattr(Ensemble, "step", counted)
    first = posbench(*TINY, "study.iterations=6")
    assert first.status == 0, first.err
    assert steps == 2 * 2 * 6 and "training 24/24 (100 %)" in first.out
    (folder,) = run_folders(outputs)
    gaps = pd.read_csv(folder / "gaps.csv", keep_default_na=False)
    told = [
        "omega",
        "pair",
        "acc_ab",
        "acc_ba",
        "gap",
        "ci_low",
        "ci_high",
        "draws",
        "draw_sd",
        "n",
        "train_loss",
        "train_accuracy",
    ]
    told += ["novel_first", "novel_middle", "novel_last", "hardware"]
    settings = [*SETTINGS[:2], "std", *SETTINGS[2:]]
    assert list(gaps) == [*settings, "seed", "iteration", *told]
    assert (
        len(gaps) == 2 * 2 * 3
        and set(gaps["bias"]) == {"none", "first+last"}
        and set(gaps["iteration"]) == {6}
    )
    assert len(pd.read_csv(folder / "sinks.csv")) == 2 * 2 * 17
    assert "not testable" in (folder / "report.html").read_text(), (
        "nobody learns in six iterations"
    )
    assert posbench(*TINY, "study.iterations=10", "stages=[study]").status == 0
    assert steps == 2 * 2 * 10, "the second run goes on from the first"
    (later,) = [f for f in run_folders(outputs) if f != folder]
    both = pd.read_csv(later / "gaps.csv", keep_default_na=False)
    pd.testing.assert_frame_equal(
        both[both["iteration"] == 6].reset_index(drop=True), gaps
    )


@pytest.mark.slow
def test_processes_change_nothing(
    posbench: Callable[..., Result], outputs: Path, tmp_path: Path
) -> None:
    args = [arg.replace("processes=1", "processes=2") for arg in TINY]
    result = posbench(*args, "study.iterations=5")
    assert result.status == 0 and "training 20/20 (100 %)" in result.out, (
        "each process tells how far it is"
    )
    (folder,) = run_folders(outputs)
    common = {
        "width": 8,
        "classes": 16,
        "labels": 4,
        "batch": 4,
        "sequences": 40,
        "depth": 1,
    }
    conditions = [
        Condition(**common),
        Condition(mask="full", pe="rope", bias=(0, 7), **common),
    ]
    on = pd.read_csv(folder / "gaps.csv")["hardware"][0]
    alone = [
        train(condition, [0, 1], 5, tmp_path, hardware=on) for condition in conditions
    ]
    write_csv(tmp_path / "gaps.csv", tabulate([*chain(*alone)], [])["gaps"])
    assert (folder / "gaps.csv").read_bytes() == (tmp_path / "gaps.csv").read_bytes()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["study.conditions=[]"], "study.conditions = []"),
        (
            ["study.conditions=[{maks: causal}]"],
            "did you mean study.conditions[0].mask?",
        ),
        (["study.conditions=[{mask: half}]"], "study.conditions[0].mask = 'half'"),
        (["study.conditions=[{bias: [8]}]"], "study.conditions[0].bias = [8]"),
        (["study.conditions=[{pe: rope}, {pe: rope}]"], "study.conditions[1]"),
        (["study.common={mask: half}"], "study.common.mask = 'half'"),
        (["study.conditions=[3]"], "study.conditions = [3]"),
        (["study.seeds=0"], "study.seeds = 0"),
        (["study.preset=long"], "quick | paper"),
        (["study.reference=wu2025.csv"], "study.reference = 'wu2025.csv'"),
        (["method=scale_channel"], "method = 'scale_channel': allowed: no method"),
    ],
)
def test_bad_study_is_refused(
    posbench: Callable[..., Result], outputs: Path, args: list[str], message: str
) -> None:
    result = posbench("study=synthetic_training", *args)
    assert (
        result.status == 2 and result.err.count("\n") == 1 and message in result.err
    ), result.err
    assert not run_folders(outputs)


def test_all_bad_conditions_are_told(posbench: Callable[..., Result]) -> None:
    bad = "study.conditions=[{depth: 0}, {mask: causal}, {window: 18}, {width: 15, pe: sin}]"
    lines = posbench(
        "study=synthetic_training", bad, "study.reference=none.csv"
    ).err.splitlines()
    names = [
        "conditions[0].depth = 0",
        "conditions[2].window = 18",
        "conditions[3].width = 15",
        "reference = ",
    ]
    assert len(lines) == 4 and all(
        name in line for name, line in zip(names, lines, strict=True)
    ), lines


@pytest.mark.parametrize(
    "file",
    sorted(paths.EXPERIMENTS.glob("wu2025/experiment/*.yaml")),
    ids=lambda file: file.stem,
)
def test_experiments_train_what_the_paper_prints(file: Path) -> None:
    data = yaml.safe_load(file.read_text())["study"]
    study = SyntheticTraining(**{**data, "conditions": tuple(data["conditions"])})
    settings = pd.DataFrame([condition.settings for condition in study.built()])
    if study.reference:
        both = settings.merge(
            read_printed_cells(study.reference),
            on=[c for c in SETTINGS if c != "scale"],
            how="outer",
            indicator=True,
        )
        assert (both["_merge"] == "both").all() and len(both) == 3 * len(settings)


@pytest.mark.figures
def test_results_of_a_folder(
    posbench: Callable[..., Result], outputs: Path, tmp_path: Path
) -> None:
    small = {"residual": True, "bias": (0, 7), "batch": 4, "sequences": 20}
    for pe in ("none", "rope"):
        train(
            Condition(pe=pe, **small), [0], 2, tmp_path / "trainings", hardware="here"
        )
    args = ["study=synthetic_results", f"study.trainings={tmp_path / 'trainings'}"]
    result = posbench(*args)
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    tables = {
        name: pd.read_csv(folder / f"{name}.csv")
        for name in ("gaps", "networks", "verdicts", "thresholds")
    }
    assert len(tables["gaps"]) == 2 * 3 and set(tables["gaps"]["hardware"]) == {"here"}
    assert (
        len(tables["networks"]) == 2
        and "paper +0.472" in tables["networks"]["gap first-middle"].iloc[1]
    )
    verdicts = tables["verdicts"].set_index("verdict").drop(columns="meaning")
    vocabularies = pd.concat(
        pd.read_csv(file)["vocabulary"]
        for file in (paths.EXPERIMENTS / "wu2025/reference").glob("wu2025_fig*.csv")
    ).value_counts()
    gaussian = verdicts.filter(like="gaussian").sum(axis=1)
    assert gaussian["not trained"] == vocabularies["gaussian"] - 6
    assert gaussian.drop("not trained").sum() == 6
    fresh = verdicts["fixed, fresh omegas"]
    assert fresh["not trained"] == fresh.sum() == vocabularies["fixed"]
    assert set(tables["thresholds"]["verdict"]) == {"not run"}
    assert (folder / "figures" / "gaps_first_last_residual.svg").is_file()
    assert "not testable" in (folder / "findings.csv").read_text()
    # The folder grows, and so do its results.
    assert_names(posbench(*args).out, "nothing", "again")
    train(
        Condition(pe="rope", **small), [0], 3, tmp_path / "trainings", hardware="here"
    )
    assert posbench(*args).status == 0
    assert sorted(
        len(pd.read_csv(run / "gaps.csv")) for run in run_folders(outputs)
    ) == [6, 9]


def test_an_earlier_run_counts_where_its_trainings_are_longer(tmp_path: Path) -> None:
    small = {"residual": True, "bias": (0, 7), "batch": 4, "sequences": 20}
    roots = {name: tmp_path / name for name in ("old", "new")}
    earlier = tmp_path / "earlier"
    for name, pe, iterations in (
        ("old", "none", 4),
        ("old", "rope", 2),
        ("new", "none", 3),
        ("new", "rope", 3),
    ):
        train(Condition(pe=pe, **small), [0], iterations, roots[name], hardware=name)
    train(Condition(pe="sin", **small), [0], 2, roots["old"], hardware="old")
    alone = SyntheticResults(trainings=str(roots["old"])).together()
    earlier.mkdir()
    for name in ("gaps", "sinks"):
        write_csv(earlier / f"{name}.csv", alone[name])
    study = SyntheticResults(trainings=str(roots["new"]), published=str(earlier))
    gaps, sinks = (study.together()[name] for name in ("gaps", "sinks"))
    # The longer training stands alone, with its own hardware; one that only the earlier run has stands, too.
    ends = gaps.groupby("pe")[["hardware", "iteration"]].agg(
        lambda column: [*column.unique()]
    )
    assert ends.loc["none"].tolist() == [["old"], [4]] and ends.loc[
        "rope"
    ].tolist() == [["new"], [3]]
    assert ends.loc["sin"].tolist() == [["old"], [2]] and len(gaps) == 3 * 3
    assert sinks.groupby("pe")["iteration"].unique().map(list).to_dict() == {
        "none": [4],
        "rope": [3],
        "sin": [2],
    }
    both = [
        table[table["pe"] == "sin"].reset_index(drop=True)
        for table in (gaps, alone["gaps"])
    ]
    pd.testing.assert_frame_equal(*both)
    for text in ("a,b\n1,2\n", "\0\0", None):
        (earlier / "gaps.csv").unlink() if text is None else (
            earlier / "gaps.csv"
        ).write_text(text)
        with refused(
            "study.published",
            study.published,
            allowed=("gaps.csv", "sinks.csv"),
            hint="gaps.csv",
        ):
            study.together()


def test_results_of_no_folder(
    posbench: Callable[..., Result], outputs: Path, tmp_path: Path
) -> None:
    result = posbench("study=synthetic_results", f"study.trainings={tmp_path}")
    assert (
        result.status == 2
        and f"study.trainings = '{tmp_path}'" in result.err
        and result.err.count("\n") == 1
    )
    assert not run_folders(outputs)
