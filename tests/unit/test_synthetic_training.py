"""The plain loop of the speed table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from posbench.studies.cost import training_speed
from posbench.studies.wu2025.training import Condition, Ensemble

PLAIN = [Condition(pe="rope", residual=True), Condition(mask="decay", bias=(0, 7)), Condition(pe="sin")]


@pytest.mark.parametrize("condition", PLAIN, ids=lambda condition: condition.name)
def test_plain_loop_trains_the_same_network(condition: Condition, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(condition, batch=8)
    ensemble = Ensemble(small, [0], torch.device("cpu"))
    loop, step = training_speed.plain_steps(small, ensemble)
    loop()
    step()
    # Its sequences are those of the whole-batch generator in distribution.
    data, vectors = training_speed.PlainSequences(small, ensemble.worlds[0]), ensemble.worlds[0].label_vectors
    drawn = [data[index] for index in range(200)]
    share = (
        torch.stack([(tokens[1::2] == vectors[target]).all(-1) for tokens, target in drawn]).double().mean()
    )
    assert share.item() == pytest.approx(0.516, abs=0.012)
    monkeypatch.setattr(training_speed.PlainNetwork, "take", lambda self, ensemble: None)
    with pytest.raises(RuntimeError, match="differ by"):
        training_speed.plain_steps(small, ensemble)
