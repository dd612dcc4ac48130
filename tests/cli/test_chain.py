"""The chain on one page is made of its links: each gives the numbers that it gives alone, and the ends those
of a plain run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.conftest import Result, run_folders
from yu2025.crop_mask import NO_LATE

FEW = [
    "task.pairs=12",
    "task.positions=[0,3,5]",
    "task.limit=4",
    "runtime.resamples=100",
]


@pytest.mark.slow
@pytest.mark.figures
def test_chain_is_made_of_its_links(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    sizes = [
        "study.examples=4",
        "study.hidden_perturbation.texts=4",
        "study.hidden_perturbation.controls=2",
    ]
    done = posbench("study=chain", *FEW, *sizes)
    assert done.status == 0, done.err
    (folder,) = run_folders(outputs)
    assert (folder / "figures" / "chain.svg").is_file() and "shifted position ids" in (
        folder / "report.html"
    ).read_text()
    alone = {
        "hidden_perturbation/effects": ["study.texts=4", "study.controls=2"],
        "crop_mask/crop_mask_effects": ["study.examples=4"],
    }
    for table, settings in alone.items():
        study, name = table.split("/")
        assert posbench(f"study={study}", *FEW, *settings).status == 0
        (own,) = outputs.glob(f"{study}/*/*/{name}.csv")
        assert (folder / f"{table}.csv").read_text() == own.read_text(), table
    assert posbench("stages=[evaluate]", *FEW).status == 0
    (metrics,) = outputs.glob("kv_retrieval/*/*/metrics.csv")
    scores = pd.read_csv(metrics, dtype={"gold_position": str})
    scores = scores.query("metric == 'accuracy' and gold_position != 'all'")
    scores = scores.assign(gold_position=scores["gold_position"].astype(int))
    scores = scores.set_index(["method", "gold_position"])["value"].sort_index()
    bias = pd.read_csv(folder / "bias.csv", keep_default_na=False)
    bias = bias.set_index(["method", "gold_position"])["score"].sort_index()
    assert np.allclose(bias.to_numpy(), scores.to_numpy()) and list(bias.index) == list(
        scores.index
    )


def test_without_late_gold_positions_two_claims_are_not_testable(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    assert posbench("study=crop_mask", *FEW, "study.examples=4").status == 0
    (verdicts,) = outputs.glob("crop_mask/*/*/findings.csv")
    assert verdicts.read_text().count(NO_LATE) == 2, "items 0 and 5 of 12"


def test_a_link_refuses_its_own_field(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    result = posbench("study=chain", "study.crop_mask.layers=[0,9]")
    assert (
        result.status == 2
        and result.err.count("\n") == 1
        and "study.crop_mask.layers" in result.err
    )
    assert not run_folders(outputs)
