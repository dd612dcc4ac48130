"""Masks and stacks of attention against brute force, closed forms, and numbers of independent runs."""

from __future__ import annotations

from math import expm1, log

import numpy as np
import pytest

from posbench.theory import masks

M = -log(0.8)


def test_the_first_token_takes_over() -> None:
    """Theorem 4.1 with equal weights, 17 tokens."""
    found = masks.rollout([masks.uniform(masks.causal(17))] * 20)
    printed = {1: 0.0588, 2: 0.2023, 4: 0.5831, 6: 0.8413, 10: 0.9860, 20: 0.99998}
    for layers, mass in printed.items():
        assert found[layers - 1][-1, 0] == pytest.approx(mass, abs=6e-5)
        assert (
            found[layers - 1][-1] <= masks.causal_bound(17, layers, 1 / 17) + 1e-15
        ).all()
    late = [found[layers][-1, 1] for layers in (18, 19)]
    assert log(late[0] / late[1]) == pytest.approx(log(2), rel=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_bounds_hold_for_random_scores(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 12
    layers = 6
    stack = [
        masks.attention(rng.uniform(-1, 1, (n, n)), masks.causal(n))
        for _ in range(layers)
    ]
    smallest = min(weights[masks.causal(n)].min() for weights in stack)
    for t, found in enumerate(masks.rollout(stack), start=1):
        assert (
            found.sum(-1) == pytest.approx(1)
            and (found[-1] <= masks.causal_bound(n, t, smallest) + 1e-12).all()
        )
    scores = rng.uniform(-0.7, 0.4, (n, n))
    weights = masks.attention(scores + masks.decay(n, M), masks.causal(n))
    low, high = masks.decay_bounds(n, M, -0.7, 0.4)
    assert (low[masks.causal(n)] <= weights[masks.causal(n)]).all() and (
        weights <= high + 1e-15
    ).all()


def test_the_printed_upper_bound_fails_in_the_first_row() -> None:
    printed = masks.decay_bounds(5, M, 0, 0, printed=True)[1][0, 0]
    assert printed == pytest.approx(1 / (1 + np.exp(-M)))
    assert (
        printed
        < 1
        == masks.attention(masks.decay(5, M), masks.causal(5))[0, 0]
        <= masks.decay_bounds(5, M, 0, 0)[1][0, 0]
    )


def test_window_and_prefix_masses() -> None:
    for width, printed in (
        (5, (0, 0.114, 0.9993)),
        (9, (0.012, 0.665, 1)),
        (13, (0.084, 0.790, 1)),
    ):
        found = masks.rollout([masks.uniform(masks.window(17, width))] * 20)
        assert [found[t - 1][-1, 0] for t in (2, 6, 20)] == pytest.approx(
            printed, abs=6e-4
        )
    for width in (2, 3, 5):
        found = masks.rollout([masks.uniform(masks.window(32, width))] * 80)
        first = next(t for t, p in enumerate(found, start=1) if p[-1, 0] >= 0.5)
        assert first == pytest.approx(masks.window_half_time(32, width), rel=0.06)
    last = masks.rollout([masks.uniform(masks.prefix(12, 4))] * 60)[-1][-1]
    assert last[:4] == pytest.approx(0.25, abs=1e-9) and last[4:] == pytest.approx(
        0, abs=1e-9
    )


@pytest.mark.parametrize("m", [M, 0.5])
def test_decay_gives_the_negative_binomial_law(m: float) -> None:
    n = 256
    weights = masks.attention(masks.decay(n, m), masks.causal(n))
    x = np.arange(100)
    for t in (2, 4, 6):
        row = masks.rollout([weights] * t)[-1][-1, ::-1][:100]
        assert row == pytest.approx(masks.decay_law(t, m, x), abs=1e-11)
        peak = masks.decay_peak(t, m)
        assert peak == pytest.approx((t - 1) / expm1(m)) and int(row.argmax()) in {
            int(peak + 1e-9),
            int(peak + 1e-9) - 1,
        }


def test_sinks_by_hand() -> None:
    first = np.zeros((4, 4))
    first[:, 0] = 1
    own = np.eye(4)
    stack = np.stack([first, own])
    # The first head sees token 1 alone; the second sees itself: mean weights 1/4, 1/3, 1/2, 1 over the
    # queries that see a token.
    assert masks.sink_share_by_head(stack).tolist() == [
        0.5,
        0.5,
        0.5,
        0.5,
    ] and masks.sink_share_by_head(own[None]).tolist() == [0, 1, 1, 1]
    assert masks.sink_share_by_entry(stack, masks.causal(4)) == pytest.approx(
        [(1 + 1 / 4) / 2, 1 / 6, 1 / 4, 1 / 2]
    )
    even = masks.uniform(masks.prefix(12, 4))
    assert (masks.sink_share_by_entry(even, masks.prefix(12, 4), 0.08)[:4] == 1).all()
    deep = masks.rollout([masks.uniform(masks.causal(16))] * 10)[-1]
    assert (
        masks.sink_share_by_head(deep)[0] == 1
        and masks.sink_share_by_head(deep)[1:].sum() == 0
    )
