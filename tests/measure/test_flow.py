"""Rollout and sinks from blocks of rows against whole attention maps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import posbench
from posbench.measure import flow as module
from posbench.measure.flow import attention_rows, flow
from posbench.methods.attention_buckets import AttentionBuckets
from posbench.methods.moice import MoICE
from posbench.model import families
from posbench.theory import masks
from tests.models import build
from tests.rounding import (
    EPSILON,
    assert_same,
    attention_noise,
    embedded_attention_noise,
)


def _whole_maps(lm: posbench.LM, ids: list[int]) -> np.ndarray:
    """Eager attention of one prompt, [L, H, n, n]."""
    if families.family_of(lm.model).interface:
        lm.model.set_attn_implementation("eager")
    else:
        lm.model.config._attn_implementation = "eager"
    with torch.no_grad():
        found = lm.model(torch.tensor([ids]), output_attentions=True).attentions
    return np.stack([weights[0].double().numpy() for weights in found])


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "llama-gqa",
        "mistral-window",
        "gemma2",
        "qwen3",
        "smollm3-nope",
        "mpt",
        "falcon",
    ],
)
def test_rollout_and_sinks_are_those_of_whole_maps(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = posbench.load(build(family))
    torch.manual_seed(1)
    ids = torch.randint(5, 250, (41,)).tolist()
    parts = 6
    tokens = 16
    kernel = lm.model.config._attn_implementation
    # Blocks of three rows: what is compared is the sum over blocks.
    monkeypatch.setattr(module, "MAX_BLOCK_WEIGHTS", 3 * 4 * 41)
    found = flow(lm, ids, parts, tokens)
    assert lm.model.config._attn_implementation == kernel
    maps = _whole_maps(lm, ids)
    noise = attention_noise(family)
    for number, share in enumerate((0.0, 0.5)):
        state = np.eye(41)
        for layer, weights in enumerate(maps):
            state = share * state + (1 - share) * weights.mean(0) @ state
            wanted = [part.sum() for part in np.array_split(state[-1], parts)]
            assert_same(
                found["rollout"][number, layer],
                wanted,
                (layer + 1) * noise,
                "attention",
            )
    early = maps[:, :, :tokens, :tokens]
    assert_same(found["by_head"], masks.sink_share_by_head(early), noise, "attention")
    assert_same(
        found["by_entry"],
        masks.sink_share_by_entry(early, masks.causal(tokens)),
        noise,
        "attention",
    )


def test_attention_rows_hold_one_block_and_know_every_kind_of_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_BLOCK_WEIGHTS", 4 * 11 * 2)
    torch.manual_seed(2)
    query = torch.randn(1, 4, 11, 8)
    key = torch.randn(1, 2, 11, 8)
    scores = torch.einsum("bhid,bhjd->bhij", query, key.repeat_interleave(2, 1)) * 0.3
    distance = torch.arange(11)[:, None] - torch.arange(11)
    for width in (None, 4):
        seen = (distance >= 0) & (distance < (width or 11))
        wanted = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        additive = torch.zeros(1, 1, 11, 11).masked_fill(~seen, float("-inf"))
        for mask in (None, seen[None, None], additive, torch.ones(1, 11)):
            blocks = list(
                attention_rows(query, key, mask, scaling=0.3, sliding_window=width)
            )
            assert [start for start, _ in blocks] == [0, 2, 4, 6, 8, 10]
            assert all(weights.numel() <= 88 for _, weights in blocks)
            assert_same(
                torch.cat([weights for _, weights in blocks], dim=2),
                wanted,
                EPSILON,
                "attention",
            )


def test_rollout_under_methods_that_attend_more_than_once() -> None:
    """Bases equal to the model's own change nothing, however often a method attends."""
    lm = posbench.load("tiny")
    ids = lm.encode("bal kop dip gel").ids * 4
    plain = flow(lm, ids, 4, 8)["rollout"]
    noise = lm.layers * embedded_attention_noise()
    for method in (
        MoICE(weights="uniform", bases=(None, None), top_k=2),
        AttentionBuckets(bases=(None, None)),
    ):
        with method.applied(lm):
            assert_same(flow(lm, ids, 4, 8)["rollout"], plain, noise, "attention")
    with AttentionBuckets(bases=(None, 500.0)).applied(lm):
        assert np.abs(flow(lm, ids, 4, 8)["rollout"] - plain).max() > 1e-4
