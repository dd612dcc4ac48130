"""The network against a loop over single numbers."""

from __future__ import annotations

import cmath
import copy
import math

import pytest
import torch

from tests.rounding import EPSILON, assert_same, largest_difference
from wu2025.network import Attention, AttentionNetwork
from wu2025.sequences import Mixture


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loop_logits(
    network: AttentionNetwork, tokens: torch.Tensor, model: int
) -> list[float]:
    """One sequence through one model with Python's own numbers: no batches, no masks added, complex rotation
    by hand."""
    spec = network.spec
    d = tokens.shape[-1]
    n = len(tokens)
    x = [[float(v) for v in row] for row in tokens]
    if spec.pe == "sin":
        for i in range(n):
            for k in range(d // 2):
                angle = i * spec.rope_base ** (-2 * k / d)
                x[i][2 * k] += math.sin(angle)
                x[i][2 * k + 1] += math.cos(angle)

    def times(row: list[float], weight: torch.Tensor) -> list[float]:
        matrix = weight[model].tolist()
        return [
            sum(row[a] * matrix[a][b] for a in range(d))
            for b in range(weight.shape[-1])
        ]

    def rotated(row: list[float], place: int) -> list[float]:
        out: list[float] = []
        for k in range(d // 2):
            turned = complex(row[2 * k], row[2 * k + 1]) * cmath.exp(
                1j * place * spec.rope_base ** (-2 * k / d)
            )
            out += [turned.real, turned.imag]
        return out

    def factor(i: int, j: int) -> float:
        """What exp(score) is multiplied with, as the official code does."""
        if spec.mask == "full":
            return 1.0
        if spec.mask == "prefix" and j < spec.prefix:
            return 1.0
        if j > i or (spec.mask == "window" and j <= i - spec.window):
            return 0.0
        return math.exp(-spec.decay * (i - j)) if spec.mask == "decay" else 1.0

    for layer in range(spec.depth):
        queries = [times(row, network.query[layer]) for row in x]
        keys = [times(row, network.key[layer]) for row in x]
        values = [times(row, network.value[layer]) for row in x]
        if spec.pe == "rope":
            queries = [rotated(row, i) for i, row in enumerate(queries)]
            keys = [rotated(row, i) for i, row in enumerate(keys)]
        out = []
        for i in range(n):
            score = [
                sum(a * b for a, b in zip(queries[i], keys[j], strict=True))
                / math.sqrt(d)
                for j in range(n)
            ]
            weights = [math.exp(s) * factor(i, j) for j, s in enumerate(score)]
            mixed = [
                sum(w * values[j][k] for j, w in enumerate(weights)) / sum(weights)
                for k in range(d)
            ]
            out.append(
                [m + (x[i][k] if spec.residual else 0.0) for k, m in enumerate(mixed)]
            )
        x = out
    h = x[-1]
    for index, (weight, bias) in enumerate(
        zip(network.weight, network.bias, strict=True)
    ):
        h = [
            a + b
            for a, b in zip(times(h, weight), bias[model, 0].tolist(), strict=True)
        ]
        h = [max(v, 0.0) for v in h] if index < 3 else h
    return h


NETWORKS = [
    Attention(mask="causal", pe="none"),
    Attention(mask="full", pe="rope", residual=True),
    Attention(mask="causal", pe="rope", depth=3),
    Attention(mask="decay", pe="none", residual=True),
    Attention(mask="window", pe="sin", window=3, depth=1),
    Attention(mask="prefix", pe="sin", prefix=3, residual=True),
]


@pytest.mark.parametrize(
    "spec", NETWORKS, ids=lambda s: f"{s.mask}-{s.pe}-{s.depth}-{s.residual}"
)
def test_network_is_the_loop(spec: Attention) -> None:
    tokens = torch.randn(2, 2, 9, 8, generator=rng(3))
    network = AttentionNetwork(
        spec, Mixture(width=8, labels=5, copies=2), [rng(0), rng(1)]
    )
    with torch.no_grad():
        for p in network.parameters():
            p.mul_(3)  # so that scores, and with them masks and rotations, matter
        logits = network(tokens)
        weights = network.attentions(tokens)
        exact = copy.deepcopy(network).double()(tokens.double())
    noise = largest_difference(logits, exact)
    for model in range(2):
        expected = loop_logits(network, tokens[model, 1], model)
        assert_same(logits[model, 1], expected, noise, "logits")
    assert weights.shape == (2, 2, spec.depth, 9, 9)
    assert_same(weights.sum(-1), torch.ones(weights.shape[:-1]), EPSILON, "attention")
    assert (weights[..., torch.tensor(~spec.seen(9))] == 0).all()


def test_initial_weights_fill_the_default_range() -> None:
    network = AttentionNetwork(Attention(), Mixture(), [rng()])
    for p in network.parameters():
        assert p.abs().max() <= 1 / 8
        assert p.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.35)
    assert (
        sum(p.numel() for p in network.parameters())
        == 2 * 3 * 64**2 + 3 * (64**2 + 64) + 64 * 32 + 32
    )


def test_full_mask_network_ignores_the_order_of_items() -> None:
    tokens = torch.randn(1, 3, 17, 16, generator=rng())
    order = torch.randperm(8, generator=rng(1))
    moved = torch.cat(
        [
            tokens[:, :, :16].unflatten(2, (8, 2))[:, :, order].flatten(2, 3),
            tokens[:, :, 16:],
        ],
        2,
    )
    for mask, equal in (("full", True), ("causal", False)):
        network = AttentionNetwork(
            Attention(mask=mask), Mixture(width=16, labels=4), [rng(2)]
        )
        with torch.no_grad():
            assert torch.allclose(network(tokens), network(moved), atol=1e-6) is equal
