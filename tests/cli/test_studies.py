"""Studies on the command line: tables, figures, verdicts, resume, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from posbench.stats.findings import FINDING_COLUMNS
from tests.conftest import Result, run_folders
from tests.messages import assert_names

ROLLOUT = ["study=rollout", "study.prompts=6", "study.tokens=32", "study.parts=4"]


@pytest.mark.figures
def test_study_writes_tables_figures_and_verdicts_and_draws_them_again(
    posbench: Callable[..., Result], outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = posbench(*ROLLOUT)
    assert first.status == 0, first.err
    (folder,) = run_folders(outputs)
    assert folder.parent.parent.name == "rollout" and folder.name.startswith(
        "tiny__rollout__none__"
    )
    rollout = pd.read_csv(folder / "rollout.csv")
    assert np.allclose(rollout.groupby(["rollout", "layers"])["weight"].sum(), 1), (
        "every layer hands on all of its weight"
    )
    findings = pd.read_csv(folder / "findings.csv")
    assert tuple(findings) == FINDING_COLUMNS and set(findings["model"]) == {"tiny"}
    page = (folder / "report.html").read_text()
    assert (
        "Theorem 4.1" in page and "data:image/svg+xml" in page and "rollout.csv" in page
    )
    drawn = (folder / "figures" / "rollout.svg").read_bytes()
    (folder / "figures" / "rollout.svg").unlink()
    monkeypatch.setattr(
        "posbench.run.base.load",
        lambda *args, **kwargs: pytest.fail("a finished run loaded the model"),
    )
    assert posbench("report", str(folder), verb=True).status == 0
    assert (folder / "figures" / "rollout.svg").read_bytes() == drawn, "byte-stable"
    again = posbench(*ROLLOUT)
    assert_names(again.out, "nothing", "again", "Theorem")


def test_study_runs_inside_a_typed_method_and_by_default_in_none(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    scaling = "method=position_interpolation"
    for method in ([], [scaling], [scaling, "method.scale=1"]):
        assert posbench(*ROLLOUT, *method).status == 0
    tables = {}
    for folder in run_folders(outputs):
        method = yaml.safe_load((folder / "config.yaml").read_text())["method"]
        tables[method["name"], method.get("scale")] = pd.read_csv(
            folder / "rollout.csv"
        )["weight"].to_numpy()
    plain, scaled, neutral = (
        tables[key] for key in (("none", None), (scaling[7:], 1.585), (scaling[7:], 1))
    )
    assert np.abs(plain - scaled).max() > 1e-3 and np.abs(plain - neutral).max() < 1e-6


def test_study_without_a_model_loads_none(
    posbench: Callable[..., Result], outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "posbench.run.base.load",
        lambda *args, **kwargs: pytest.fail("it loaded a model"),
    )
    result = posbench("study=masks")
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    assert folder.name.startswith("masks__")
    assert set(pd.read_csv(folder / "findings.csv")["verdict"]) == {
        "holds",
        "contradicted",
    }


def test_sweep_over_models_collects_the_verdicts(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    assert posbench("-m", "model=tiny,tiny_b", *ROLLOUT).status == 0
    (summary,) = outputs.glob("*/*/sweep__*/findings_summary.csv")
    assert set(pd.read_csv(summary)["model"]) == {"tiny", "tiny_b"}


def test_a_sweep_without_a_model_has_a_page(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    few = ["study.draws=20", "study.tokens=8", "study.dim=16", "study.show=[1]"]
    result = posbench("-m", "study=causal_mask", "study.input_norm=unit,sqrt_dim", *few)
    assert result.status == 0, result.err
    (page,) = outputs.glob("*/*/sweep__*/report.html")
    assert "<h1>study causal_mask, by study.input_norm</h1>" in page.read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["study=rollot"], "did you mean rollout?"),
        (["study=rollout", "study.prompt=3"], "did you mean study.prompts?"),
        (
            ["study=rollout", "study.prompts=1"],
            "study.prompts = 1: allowed: a whole number from 2 to 1000000",
        ),
        (
            ["study=rollout", "study.prompts=many"],
            "study.prompts = 'many': allowed: a whole number",
        ),
        (
            ["study=doubling", "task=mmlu"],
            "task = 'mmlu': allowed: kv_retrieval with model tiny",
        ),
        (
            ["study=crop_mask", "task=mmlu"],
            "task = 'mmlu': allowed: kv_retrieval with model tiny",
        ),
        (["study=masks", "model=tiny"], "model = 'tiny': allowed: no model"),
        (
            ["study=rollout", "method=scale_channel"],
            "scale_channel runs the last token apart",
        ),
        (
            ["study=rollout", "stages=[evaluate]"],
            "stages = ['evaluate']: allowed: stages",
        ),
        (["stages=[study]"], "posbench ls studies"),
        (["study=masks", "method=none"], "allowed: no method: study masks"),
        (
            ["study=masks", "study._target_=posbench.model.lm.LM"],
            "a subclass of posbench.studies.base.Study",
        ),
    ],
)
def test_bad_study_gets_one_line_and_leaves_nothing(
    posbench: Callable[..., Result], outputs: Path, args: list[str], message: str
) -> None:
    result = posbench(*args)
    assert (
        result.status == 2 and result.err.count("\n") == 1 and message in result.err
    ), result.err
    assert not run_folders(outputs)
