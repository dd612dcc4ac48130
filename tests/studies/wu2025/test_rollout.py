"""The tables of the study of the rollout on a model that attends evenly."""

from __future__ import annotations

import pytest
import torch

import posbench
from posbench.measure.flow import flow
from posbench.theory import masks
from tests.models import BUILDERS
from wu2025 import rollout as study


def test_sinks_of_a_model_that_attends_evenly() -> None:
    torch.manual_seed(0)
    lm = posbench.load(BUILDERS["llama"]())
    with torch.no_grad():
        for layer in lm.model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    rows = [flow(lm, ids, 2, 4) for ids in ([5, 9, 40, 33, 8, 100], [7, 7, 9, 8], [5])]
    tables = study.summary(
        [{k: v.tolist() for k, v in row.items()} for row in rows], ["a", "b", "c"]
    )
    sinks = tables["sinks"].set_index(["metric", "token"])
    even = masks.uniform(masks.causal(4))
    assert (
        sinks.loc["by_head", "share"].tolist()
        == masks.sink_share_by_head(even[None]).tolist()
        == [1, 1, 0, 0]
    )
    assert (
        sinks.loc["by_entry", "share"].tolist() == [1, 1, 1, 1]
        and sinks["n"].eq(2).all()
    ), "the third prompt is too short"
    rollout = tables["rollout"]
    assert (
        rollout.groupby(["rollout", "layers"])["weight"].sum().to_numpy()
        == pytest.approx(1)
        and rollout["n"].eq(3).all()
    )
    assert (rollout["weight_ci_low"] <= rollout["weight"] + 1e-12).all() and (
        rollout["weight"] <= rollout["weight_ci_high"] + 1e-12
    ).all()
    change = tables["changes"].set_index("what")["value"]
    first = rollout[
        (rollout.rollout == "attention alone") & (rollout.part == 0)
    ].set_index("layers")["weight"]
    assert (
        change["attention alone"] == pytest.approx(first[4] - first[1])
        and change["by_head"] == 0
    )
