"""The generator of sequences against chances worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wu2025.sequences import (
    Mixture,
    add_query,
    copying_gap,
    draw_omega,
    draw_world,
    novel_sequences,
    training_batch,
)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# The generator


def shares(mixture: Mixture, count: int = 10_000) -> tuple[np.ndarray, np.ndarray]:
    """Share of sequences in which an item's label is the one asked for, per item, and the query's cosine to
    its class."""
    world = draw_world(mixture, rng(1))
    drawn = training_batch(mixture, world, count, rng(2))
    labels = drawn.tokens[:, 1::2]
    asked = world.label_vectors[drawn.targets][:, None]
    same = (labels == asked).all(-1)
    x = drawn.tokens[:, 0:-1:2]
    query = drawn.tokens[:, -1:]
    return same.double().mean(0).numpy(), torch.cosine_similarity(x, query, dim=-1)[
        same
    ].numpy()


@pytest.mark.parametrize("scale", ["paper", "code"])
def test_training_shares(scale: str) -> None:
    # 0.516, 0.723, 0.446: chances of a sequence with two classes of four copies each and 32 labels.
    share, cosine = shares(Mixture(scale=scale))
    assert np.abs(share - (1 / 2 + 1 / 2 / 32)).max() < 0.015
    assert abs(share.mean() - 0.516) < 0.005
    # Both have the mean in common: 1 / (1 + 0.75^2) = 0.64, less the spread of norms in 64 dimensions and
    # equal labels.
    assert cosine.mean() == pytest.approx(0.618, abs=0.01)
    ends, _ = shares(Mixture(scale=scale, bias=(0, 7)))
    assert np.abs(ends[[0, 7]] - 0.723).max() < 0.01
    assert np.abs(ends[1:7] - 0.446).max() < 0.015


@pytest.mark.parametrize("scale, norm", [("paper", 1.0), ("code", 0.125)])
def test_token_norms(scale: str, norm: float) -> None:
    mixture = Mixture(scale=scale)
    tokens = training_batch(mixture, draw_world(mixture, rng()), 2000, rng(1)).tokens
    assert (tokens**2).sum(-1).mean().sqrt().item() == pytest.approx(norm, rel=0.02)


def test_fixed_vocabulary_is_one_vector_a_class() -> None:
    mixture = Mixture(vocabulary="fixed")
    world = draw_world(mixture, rng())
    drawn = training_batch(mixture, world, 100, rng(1))
    # Every item and query is (mean + 0.75 omega) / 1.25 of a class; its label follows it.
    table = (world.means + 0.75 * world.shared) / 1.25
    distance = torch.cdist(
        drawn.tokens[:, ::2], table[None], compute_mode="donot_use_mm_for_euclid_dist"
    )
    assert distance.min(-1).values.max() < 1e-4
    classes = distance.argmin(-1)
    assert torch.equal(
        world.label_vectors[world.class_labels[classes[:, :-1]]], drawn.tokens[:, 1::2]
    )
    assert torch.equal(world.class_labels[classes[:, -1]], drawn.targets)
    # Two classes, four copies each, and the query is one of them.
    assert all(
        sorted(np.unique(row, return_counts=True)[1]) == [4, 4]
        for row in classes[:, :-1].numpy()
    )
    assert all(row[-1] in row[:-1] for row in classes.numpy())


def test_paired_sets() -> None:
    mixture = Mixture()
    world = draw_world(mixture, rng())
    novel = novel_sequences(mixture, world, 5000, rng(1))
    plain = add_query(novel, world, 0)
    one = add_query(novel, world, 0, 4)
    two = add_query(novel, world, 4, 0)
    # Item 4 is overwritten by an exact copy of item 0; nothing else moves; its label stays.
    assert torch.equal(one.tokens[:, 8], one.tokens[:, 0])
    others = [i for i in range(17) if i != 8]
    assert torch.equal(one.tokens[:, others], plain.tokens[:, others])
    assert torch.equal(two.tokens[:, 0], plain.tokens[:, 8])
    # The answer stands behind the asked item; the other item has it by chance.
    label = world.label_vectors[one.targets]
    assert torch.equal(one.tokens[:, 1], label)
    by_chance = (one.tokens[:, 9] == label).all(-1).double().mean().item()
    assert by_chance == pytest.approx(1 - copying_gap(mixture), abs=0.02)
    # Where both items have one class, the sets [a, b] and [b, a] ask the same.
    same = novel.slots[:, 0] == novel.slots[:, 4]
    assert torch.equal(one.targets[same], two.targets[same])
    assert same.double().mean().item() == pytest.approx(3 / 7, abs=0.02)


def test_copying_policies() -> None:
    mixture = Mixture()
    assert copying_gap(mixture) == pytest.approx(1 - (3 / 7 + 4 / 7 / 32))
    assert copying_gap(mixture) == pytest.approx(0.554, abs=5e-4)
    # A simulated policy that answers the first item's label gets just these accuracies.
    world = draw_world(mixture, rng())
    novel = novel_sequences(mixture, world, 10_000, rng(1))
    right = add_query(novel, world, 0, 7)
    wrong = add_query(novel, world, 7, 0)
    hits = [
        (s.tokens[:, 1] == world.label_vectors[s.targets])
        .all(-1)
        .double()
        .mean()
        .item()
        for s in (right, wrong)
    ]
    assert hits[0] - hits[1] == pytest.approx(copying_gap(mixture), abs=0.02)


def test_a_fresh_omega_moves_all_items_alike() -> None:
    mixture = Mixture(vocabulary="fixed")
    world = draw_world(mixture, rng())
    other = world._replace(shared=draw_omega(mixture, rng(1)))
    trained, fresh = (
        novel_sequences(mixture, of, 500, rng(2)) for of in (world, other)
    )
    length = (1 + mixture.anisotropy**2) ** 0.5
    shift = mixture.anisotropy * (other.shared - world.shared) / length
    assert torch.allclose(fresh.items - trained.items, shift, atol=1e-6)
    assert torch.allclose(fresh.queries - trained.queries, shift, atol=1e-6)
    assert shift.norm() > 0.3
