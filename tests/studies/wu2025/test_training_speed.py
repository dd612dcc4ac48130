"""The plain loop trains the same network, on sequences of the same distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from tests.conftest import Result, run_folders
from wu2025 import training_speed
from wu2025.training import Condition, Ensemble

PLAIN = [
    Condition(pe="rope", residual=True),
    Condition(mask="decay", bias=(0, 7)),
    Condition(pe="sin"),
]


@pytest.mark.parametrize("condition", PLAIN, ids=lambda condition: condition.name)
def test_plain_loop_trains_the_same_network(
    condition: Condition, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(condition, batch=8)
    ensemble = Ensemble(small, [0], torch.device("cpu"))
    loop, step = training_speed.plain_steps(small, ensemble)
    loop()
    step()
    # Its sequences are those of the whole-batch generator in distribution.
    data = training_speed.PlainSequences(small, ensemble.worlds[0])
    vectors = ensemble.worlds[0].label_vectors
    drawn = [data[index] for index in range(200)]
    share = (
        torch.stack(
            [(tokens[1::2] == vectors[target]).all(-1) for tokens, target in drawn]
        )
        .double()
        .mean()
    )
    assert share.item() == pytest.approx(0.516, abs=0.012)
    monkeypatch.setattr(
        training_speed.PlainNetwork, "take", lambda self, ensemble: None
    )
    with pytest.raises(RuntimeError, match="differ by"):
        training_speed.plain_steps(small, ensemble)


def test_the_command(posbench: Callable[..., Result], outputs: Path) -> None:
    result = posbench(
        "study=training_speed",
        "study.depths=[1]",
        "study.iterations=2",
        "study.repeats=1",
    )
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    table = pd.read_csv(folder / "training_speed.csv")
    assert table["work"].unique().tolist() == ["depth 1, no PE", "depth 1, RoPE"]
    assert table["iterations_per_second"].to_list() == pytest.approx(
        (2 / table["seconds"]).to_list()
    )
