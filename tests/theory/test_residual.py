"""Rollouts with residual stream against the authors' outputs, and closed forms against brute force."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from posbench.theory import masks, residual

DATA = Path(__file__).parents[1] / "data" / "residual"
SETTINGS = json.loads((DATA / "manifest.json").read_text())["settings"]


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_rollouts_are_the_authors(name: str) -> None:
    setting = SETTINGS[name]
    arrays = np.load(DATA / f"{name}.npz")
    n = setting["tokens"]
    mask = masks.window(n, setting["window"]) if setting["window"] else masks.causal(n)
    by_layer = np.broadcast_to(
        arrays["diagonal"], (setting["layers"], setting["heads"])
    )
    layers = [
        residual.structural_attention(mask, arrays["slopes"], own) for own in by_layer
    ]
    assert np.abs(layers[0] - arrays["attention_first"]).max() < 1e-9
    assert np.abs(layers[-1] - arrays["attention_last"]).max() < 1e-9
    found = residual.rollout(layers, arrays["lambdas"])
    last_rows = np.array([product[-1] for product in found])
    assert np.abs(last_rows - arrays["last_row"]).max() < 1e-9
    assert np.abs(found[-1] - arrays["rollout"]).max() < 1e-9
    row = last_rows[-1]
    assert int(row[:-1].argmin()) == setting["at"]
    assert residual.is_u_shaped(row) == setting["u_without_last_token"]


def test_slopes_of_alibi() -> None:
    official = np.load(DATA / "alibi_mpt7b.npz")["slopes"]
    assert np.abs(residual.alibi_slopes(32) - official).max() < 1e-15
    four = np.load(DATA / "window_alibi_content.npz")["slopes"]
    assert residual.alibi_slopes(4).tolist() == four.tolist()


def _brute_force(n: int, shares: list[float]) -> np.ndarray:
    """The last row of the product of the layers, from its last layer down."""
    row = np.eye(n)[-1]
    for share in reversed(shares):
        mean = np.array([sum(row[i] / (i + 1) for i in range(j, n)) for j in range(n)])
        row = (1 - share) * row + share * mean
    return row


@pytest.mark.parametrize("order", [1, -1])
def test_equal_attention_in_closed_form(order: int) -> None:
    """The paper's setting, and unequal shares in either order, as layers commute."""
    for n, shares in (
        (32, [Fraction(1, 5)] * 12),
        (32, [Fraction(k, 10) for k in (9, 7, 5, 4, 3, 3, 2, 1)][::order]),
    ):
        exact = residual.equal_influence(n, shares)
        floats = [float(share) for share in shares]
        assert sum(exact) == 1
        found = np.array([float(value) for value in exact])
        brute = _brute_force(n, floats)
        assert np.abs(found - brute).max() < 1e-12
        layers = [masks.uniform(masks.causal(n))] * len(shares)
        assert np.abs(residual.rollout(layers, floats)[-1][-1] - brute).max() < 1e-12
        last = residual.last_token_influence(n, floats)
        assert last == pytest.approx(brute[-1], abs=1e-12)
        assert (np.diff(brute[:-1]) < 0).all() and not residual.is_u_shaped(brute)


def test_how_many_layers_attend() -> None:
    shares = [0.1, 0.5, 0.7, 0.2]
    counts = np.zeros(5)
    for chosen in np.ndindex(2, 2, 2, 2):
        odds = [s if c else 1 - s for s, c in zip(shares, chosen, strict=True)]
        counts[sum(chosen)] += np.prod(odds)
    assert np.abs(residual.attending_layers(shares) - counts).max() < 1e-15


def _distance_to_limit(n: int, shares: list[float]) -> float:
    """Total variation between brute force and the limit."""
    attention = masks.uniform(masks.causal(n))
    row = np.eye(n)[-1]
    for share in shares:
        row = (1 - share) * row + share * row @ attention
    return float(np.abs(row - residual.equal_influence_limit(n, shares)).sum() / 2)


def test_the_limit_needs_ln_n_above_the_sum_of_the_shares() -> None:
    falls = [_distance_to_limit(n, [0.2] * 12) for n in (128, 512, 2048)]
    assert falls == pytest.approx([0.015, 0.0067, 0.0028], rel=0.1)
    # At a sum of 12 and ln n of 5 to 8 the distance still grows.
    grows = [_distance_to_limit(n, [0.5] * 24) for n in (128, 2048)]
    assert grows == pytest.approx([0.027, 0.051], rel=0.1)
    for n, shares in ((64, [0.3] * 4), (512, [0.9, 0.1])):
        limit = residual.equal_influence_limit(n, shares)
        assert limit.sum() == pytest.approx(1, abs=1e-12) and (limit > 0).all()


def test_mpt_7b_by_structure_alone() -> None:
    """256 tokens: the rollout without residual collapses to the first token, with the published shares it is a U."""
    shares = np.load(DATA / "alibi_mpt7b.npz")["lambdas"]
    attention = residual.structural_attention(
        masks.causal(256), residual.alibi_slopes(32)
    )
    layers = [attention] * len(shares)
    assert residual.rollout(layers, np.ones(32))[-1][-1, 0] == pytest.approx(
        0.996, abs=1e-3
    )
    row = residual.rollout(layers, shares)[-1][-1]
    assert row[0] == pytest.approx(0.0257, abs=1e-3) and residual.is_u_shaped(row)
    tenths = np.add.reduceat(row, 256 * np.arange(10) // 10)
    assert tenths[[0, 1, 8, 9]] == pytest.approx([0.146, 0.079, 0.119, 0.165], abs=1e-3)
    # Without ALiBi the same shares give a curve that falls up to the last token.
    layers = [masks.uniform(masks.causal(256))] * len(shares)
    assert not residual.is_u_shaped(residual.rollout(layers, shares)[-1][-1])
