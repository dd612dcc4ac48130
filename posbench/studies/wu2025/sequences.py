"""Sequences x1 y1 ... x8 y8 xq of labelled items with a known position bias (Wu et al. 2025, Section 5).

The items are of two classes, four copies each in random order; the query is of the class of one item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from posbench.late import F, Tensor, torch
from posbench.schema import NonNegative, Several, Whole


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The data of Wu et al. 2025, Section 5 and Appendices J and L (after Reddy 2024).

    ``gaussian``: every item is a new draw around its class mean, x = (mean + noise eta) / sqrt(1 + noise^2).
    ``fixed`` (Appendix L): a class is one vector, (mean + anisotropy omega) / sqrt(1 + anisotropy^2); all
    share omega, and the tests have the training's or, as in the official code, a ``fresh`` one for each set.
    """

    vocabulary: Literal["gaussian", "fixed"] = "gaussian"
    scale: Literal["paper", "code"] = (
        "paper"  # standard deviation of all draws; the code has 1 / width
    )
    bias: tuple[
        Whole, ...
    ] = ()  # items (from 0) whose class the query may have, uniformly; none: any item
    width: Several = 64  # dimension of a token
    classes: Several = 2048  # of the training data, K
    labels: Several = 32  # L; that of a class is drawn uniformly and stays
    copies: Several = (
        4  # items of each of the two classes of a sequence (the burstiness B)
    )
    noise: NonNegative = 0.75
    anisotropy: NonNegative = 0.75
    test_component: Literal["training", "fresh"] = "training"

    @property
    def items(self) -> int:
        """Items of a sequence."""
        return 2 * self.copies

    @property
    def tokens(self) -> int:
        """Tokens of a sequence: each item, its label, and the query."""
        return 2 * self.items + 1

    @property
    def std(self) -> float:
        """Standard deviation of every component drawn."""
        return self.width**-0.5 if self.scale == "paper" else 1 / self.width

    @property
    def places(self) -> dict[str, int]:
        """The items compared: first, middle (n / 2, from 0) and last."""
        return {"first": 0, "middle": self.items // 2, "last": self.items - 1}


class World(NamedTuple):
    """What stays: class means [K, D], their labels [K], label vectors [L, D], shared component [D]."""

    means: Tensor
    class_labels: Tensor
    label_vectors: Tensor
    shared: Tensor


class Sequences(NamedTuple):
    """Tokens [B, n, D] and the label asked for [B]."""

    tokens: Tensor
    targets: Tensor


class Novel(NamedTuple):
    """Two new classes a sequence."""

    items: Tensor  # [B, n, D]
    queries: Tensor  # one for each class, [B, 2, D]
    slots: Tensor  # class of each item, [B, n]
    labels: Tensor  # of the classes, [B, 2]


def draw_world(mixture: Mixture, rng: torch.Generator) -> World:
    """What stays in one training, on the generator's device."""
    at = {"generator": rng, "device": rng.device}
    means = mixture.std * torch.randn(mixture.classes, mixture.width, **at)
    class_labels = torch.randint(mixture.labels, (mixture.classes,), **at)
    label_vectors = mixture.std * torch.randn(mixture.labels, mixture.width, **at)
    return World(
        means,
        class_labels,
        label_vectors,
        mixture.std * torch.randn(mixture.width, **at),
    )


def _vectors(
    mixture: Mixture, means: Tensor, shared: Tensor, rng: torch.Generator
) -> Tensor:
    """Tokens of the classes with these means [..., D], one draw each."""
    if mixture.vocabulary == "fixed":
        return (means + mixture.anisotropy * shared) / (
            1 + mixture.anisotropy**2
        ) ** 0.5
    drawn = torch.randn(means.shape, generator=rng, device=rng.device)
    return (means + (mixture.noise * mixture.std) * drawn) / (
        1 + mixture.noise**2
    ) ** 0.5


def _slots(mixture: Mixture, count: int, rng: torch.Generator) -> Tensor:
    """Which of its two classes each item of a sequence has, in random order, [count, items]."""
    return (
        torch.rand(count, mixture.items, generator=rng, device=rng.device).argsort(1)
        // mixture.copies
    )


def _interleave(items: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """x1 y1 ... xn yn xq from [B, items, D] twice and [B, D]."""
    tokens = items.new_empty(len(items), 2 * items.shape[1] + 1, items.shape[2])
    tokens[:, 0:-1:2], tokens[:, 1::2], tokens[:, -1] = items, labels, queries
    return tokens


def training_batch(
    mixture: Mixture, world: World, count: int, rng: torch.Generator
) -> Sequences:
    """Sequences of the training distribution: known classes, the query's item drawn from the bias."""
    at = {"generator": rng, "device": rng.device}
    one = torch.randint(mixture.classes, (count,), **at)
    other = (
        one + 1 + torch.randint(mixture.classes - 1, (count,), **at)
    ) % mixture.classes
    item_classes = torch.stack([one, other], 1).gather(1, _slots(mixture, count, rng))
    allowed = torch.tensor(mixture.bias or range(mixture.items), device=rng.device)
    asked = allowed[torch.randint(len(allowed), (count, 1), **at)]
    classes = torch.cat([item_classes, item_classes.gather(1, asked)], 1)
    # embedding reads whole rows, five times as fast as an index.
    vectors = _vectors(mixture, F.embedding(classes, world.means), world.shared, rng)
    labels = world.class_labels[classes]
    tokens = _interleave(
        vectors[:, :-1],
        F.embedding(labels[:, :-1], world.label_vectors),
        vectors[:, -1],
    )
    return Sequences(tokens, labels[:, -1])


def novel_sequences(
    mixture: Mixture, world: World, count: int, rng: torch.Generator
) -> Novel:
    """Sequences of two new classes each, with new labels; the label vectors are the training's."""
    at = {"generator": rng, "device": rng.device}
    means = mixture.std * torch.randn(count, 2, mixture.width, **at)
    labels = torch.randint(mixture.labels, (count, 2), **at)
    slots = _slots(mixture, count, rng)
    item_means = means.gather(1, slots[:, :, None].expand(-1, -1, mixture.width))
    fresh = mixture.test_component == "fresh"
    shared = mixture.std * torch.randn(mixture.width, **at) if fresh else world.shared
    vectors = _vectors(mixture, torch.cat([item_means, means], 1), shared, rng)
    return Novel(vectors[:, :-2], vectors[:, -2:], slots, labels)


def ask(
    novel: Novel, world: World, right: int, copy_at: int | None = None
) -> Sequences:
    """Ask for the class of item ``right`` (from 0), which item ``copy_at`` copies but for its label."""
    asked = novel.slots[:, right]
    items = novel.items
    rows = torch.arange(len(asked), device=asked.device)
    if copy_at is not None:
        items = items.clone()
        items[:, copy_at] = items[:, right]
    labels = world.label_vectors[novel.labels.gather(1, novel.slots)]
    return Sequences(
        _interleave(items, labels, novel.queries[rows, asked]),
        novel.labels[rows, asked],
    )


def copying_gap(mixture: Mixture) -> float:
    """Gap [a, b] - [b, a] of always copying one item's label by its place alone: 0.554 for the paper's data.

    In the rest of the test sequences the overwritten item's own label is right too.
    """
    same = (mixture.copies - 1) / (mixture.items - 1)
    return 1 - (same + (1 - same) / mixture.labels)
