"""Mean scores against full attention, and sums of single maps against one map of all."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import posbench as package
from posbench.measure.scores import MeanMap, diagonal_normalised, score_maps
from tests.models import BUILDERS
from tests.rounding import EPSILON, assert_same, largest_difference


def _rows(count: int = 3, length: int = 9) -> list[list[int]]:
    torch.manual_seed(3)
    return torch.randint(5, 250, (count, length)).tolist()


@pytest.mark.parametrize("family", ["llama-gqa", "qwen3", "smollm3", "gemma", "phi3"])
def test_scores_give_back_the_attention(family: str) -> None:
    """The softmax of one sample's scores over what a token sees is its attention, averaged over nothing: one
    head."""
    torch.manual_seed(0)
    lm = package.load(BUILDERS[family]())
    rows = _rows()
    found = [each.mean for each in score_maps(lm, [rows[:2], rows[2:]])]
    assert (
        len(found) == lm.layers
        and found[0].shape == (9, 9)
        and np.isnan(found[0][0, 1:]).all()
    )
    single = [[each.mean for each in score_maps(lm, [[row]])] for row in rows]
    exact = score_maps(
        package.load(copy.deepcopy(lm.model).double()), [[row] for row in rows[:1]]
    )
    # Log weights are near -2, whatever the scores are.
    noise = largest_difference(single[0], [each.mean for each in exact]) + EPSILON
    assert_same(
        np.nan_to_num(found), np.nan_to_num(np.mean(single, axis=0)), noise, "scores"
    )
    # Independent: eager weights are exp(score) over a row's sum, so log weights differ from scores by one
    # number per row.
    lm.model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = lm.model(torch.tensor([rows[0]]), output_attentions=True).attentions
    for layer in range(lm.layers):
        logs = weights[layer][0].log().mean(0).numpy()
        for i in range(1, 9):
            away = logs[i, : i + 1] - single[0][layer][i, : i + 1]
            assert_same(away, np.full_like(away, away.mean()), noise, "scores")


def test_mean_map_is_the_mean_of_single_maps() -> None:
    torch.manual_seed(0)
    query = torch.randn(5, 3, 12, 4)
    key = torch.randn(5, 3, 12, 4)
    found = MeanMap(12)
    found.add(query[:3], key[:3], 0.5)
    found.add(query[3:], key[3:], 0.5)
    each = 0.5 * torch.einsum("bhid,bhjd->bij", query, key).double().numpy() / 3
    lower = np.tril_indices(12)
    noise = EPSILON * np.abs(each).max()
    assert_same(found.mean[lower], each.mean(0)[lower], noise, "scores")
    for half, rows in zip(found.halves, ([0, 2, 4], [1, 3]), strict=True):
        assert_same(half[lower], each[rows].mean(0)[lower], noise, "scores")
    for (near, shift), scores in zip(found.each, each, strict=True):
        rows = []
        distances = []
        for i in range(5, 12):
            keys = scores[i, 1:i]
            rows.append(
                keys[-(len(keys) // 4) :].mean() - keys[: len(keys) // 4].mean()
            )
        for distance in range(1, 10):
            pairs = np.array([scores[j + distance, j] for j in range(1, 12 - distance)])
            half = len(pairs) // 2
            distances.append(pairs[:half].mean() - pairs[-half:].mean())
        assert_same([near, shift], [np.mean(rows), np.mean(distances)], noise, "scores")


def test_description_tells_relative_from_absolute_patterns() -> None:
    """Planted scores: a decay with distance, and on top of it, or not, a slope along the keys; noise in every
    sample."""
    n = 24
    samples = 40
    place = torch.arange(n, dtype=torch.float32)
    rng = torch.Generator().manual_seed(0)
    told = {}
    for slope in (0.0, 0.1):
        found = MeanMap(n)
        scores = -0.3 * (place[:, None] - place) + slope * place
        for _ in range(samples):
            noisy = scores + torch.randn(n, n, generator=rng)
            # Keys that are unit vectors make the scores themselves the products.
            found.add(noisy[None, None], torch.eye(n)[None, None])
        told[slope] = found.facts()
    relative = told[0.0]
    absolute = told[0.1]
    lower = np.tril_indices(n - 1, -1)
    exact = scores.numpy()[1:, 1:]
    share = np.var(diagonal_normalised(exact)[lower]) / np.var(exact[lower])
    assert (
        relative["shift_ci_low"] < 0 < relative["shift_ci_high"]
        and relative["beyond"] < 0.01
    )
    assert absolute["shift_ci_high"] < 0 and absolute["beyond"] == pytest.approx(
        share, rel=0.2
    )
    assert (
        relative["near_ci_low"] > 0
        and absolute["near_ci_low"] > relative["near_ci_high"]
        and absolute["n"] == samples
    )
