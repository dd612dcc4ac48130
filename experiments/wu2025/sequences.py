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

    Attributes:
        vocabulary: ``gaussian``: every item is a new draw around its class mean, x = (mean + noise eta) /
            sqrt(1 + noise^2). ``fixed`` (Appendix L): a class is one vector, (mean + anisotropy omega) /
            sqrt(1 + anisotropy^2), where all classes share omega.
        scale: Standard deviation of all draws: 1 / sqrt(width) in the paper, 1 / width in the official code.
        bias: Items (from 0) whose class the query may have, uniformly; none: any item.
        width: Dimension D of a token.
        classes: Classes K of the training data.
        labels: Labels L; each class draws its label uniformly, once.
        copies: Items of each of the two classes of a sequence (the burstiness B).
        noise: Standard deviation of an item around its class mean, as a multiple of the means' standard deviation.
        anisotropy: Weight of omega in the vectors of ``fixed``.
    """

    vocabulary: Literal["gaussian", "fixed"] = "gaussian"
    scale: Literal["paper", "code"] = "paper"
    bias: tuple[Whole, ...] = ()
    width: Several = 64
    classes: Several = 2048
    labels: Several = 32
    copies: Several = 4
    noise: NonNegative = 0.75
    anisotropy: NonNegative = 0.75

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
        if self.scale == "paper":
            return self.width**-0.5
        return 1 / self.width

    @property
    def places(self) -> dict[str, int]:
        """The items compared: first, middle (n / 2, from 0) and last."""
        return {"first": 0, "middle": self.items // 2, "last": self.items - 1}


class ClassWorld(NamedTuple):
    """Draws made once per training.

    Attributes:
        means: Class means, [K, D].
        class_labels: Label of each class, [K].
        label_vectors: Token of each label, [L, D].
        shared: Shared component omega of the ``fixed`` vocabulary, [D].
    """

    means: Tensor
    class_labels: Tensor
    label_vectors: Tensor
    shared: Tensor


class Sequences(NamedTuple):
    """Tokens [B, n, D] and the label of the query [B]."""

    tokens: Tensor
    targets: Tensor


class NovelSequences(NamedTuple):
    """Sequences of two new classes each, without labels and query.

    Attributes:
        items: Items, [B, items, D].
        queries: A query of each of the two classes, [B, 2, D].
        slots: Class of each item, 0 or 1, [B, items].
        labels: Labels of the two classes, [B, 2].
    """

    items: Tensor
    queries: Tensor
    slots: Tensor
    labels: Tensor


def draw_world(mixture: Mixture, rng: torch.Generator) -> ClassWorld:
    """Draw the classes and labels of one training, on the generator's device."""
    std = mixture.std
    means = std * _normal(mixture.classes, mixture.width, rng=rng)
    class_labels = _integers(mixture.labels, mixture.classes, rng=rng)
    label_vectors = std * _normal(mixture.labels, mixture.width, rng=rng)
    shared = draw_omega(mixture, rng)
    return ClassWorld(means, class_labels, label_vectors, shared)


def draw_omega(mixture: Mixture, rng: torch.Generator) -> Tensor:
    """Draw a shared component omega of the ``fixed`` vocabulary, [D]."""
    return mixture.std * _normal(mixture.width, rng=rng)


def _normal(*shape: int, rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng, device=rng.device)


def _integers(limit: int, *shape: int, rng: torch.Generator) -> Tensor:
    """Integers from 0 to below the limit, drawn uniformly."""
    return torch.randint(limit, shape, generator=rng, device=rng.device)


def _vectors(
    mixture: Mixture, means: Tensor, shared: Tensor, rng: torch.Generator
) -> Tensor:
    """Draw a token of each class with these means.

    Args:
        mixture: The data.
        means: Class means, [..., D].
        shared: Shared component, [D].
        rng: Generator of the noise.

    Returns:
        Tokens, [..., D].
    """
    if mixture.vocabulary == "fixed":
        length = (1 + mixture.anisotropy**2) ** 0.5
        return (means + mixture.anisotropy * shared) / length
    noise_std = mixture.noise * mixture.std
    length = (1 + mixture.noise**2) ** 0.5
    return (means + noise_std * _normal(*means.shape, rng=rng)) / length


def _slots(mixture: Mixture, count: int, rng: torch.Generator) -> Tensor:
    """Class (0 or 1) of each item of a sequence, in random order, [count, items]."""
    keys = torch.rand(count, mixture.items, generator=rng, device=rng.device)
    return keys.argsort(1) // mixture.copies


def _interleave(items: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """Tokens x1 y1 ... xn yn xq, [B, 2 n + 1, D], from items and labels [B, n, D] and queries [B, D]."""
    count, length, width = items.shape
    tokens = items.new_empty(count, 2 * length + 1, width)
    tokens[:, 0:-1:2] = items
    tokens[:, 1::2] = labels
    tokens[:, -1] = queries
    return tokens


def training_batch(
    mixture: Mixture, world: ClassWorld, count: int, rng: torch.Generator
) -> Sequences:
    """Draw sequences of the training distribution: known classes, the query's item drawn from the bias.

    Args:
        mixture: The data.
        world: Its classes and labels.
        count: Sequences B.
        rng: Generator, on the device of the world.

    Returns:
        Tokens [B, n, D] and targets [B].
    """
    first = _integers(mixture.classes, count, rng=rng)
    step = 1 + _integers(mixture.classes - 1, count, rng=rng)
    second = (first + step) % mixture.classes
    slots = _slots(mixture, count, rng)
    item_classes = torch.stack([first, second], 1).gather(1, slots)
    allowed = torch.tensor(mixture.bias or range(mixture.items), device=rng.device)
    query_item = allowed[_integers(len(allowed), count, 1, rng=rng)]
    classes = torch.cat([item_classes, item_classes.gather(1, query_item)], 1)
    # embedding reads whole rows, five times as fast as an index.
    vectors = _vectors(mixture, F.embedding(classes, world.means), world.shared, rng)
    labels = world.class_labels[classes]
    label_vectors = F.embedding(labels[:, :-1], world.label_vectors)
    tokens = _interleave(vectors[:, :-1], label_vectors, vectors[:, -1])
    return Sequences(tokens, labels[:, -1])


def novel_sequences(
    mixture: Mixture, world: ClassWorld, count: int, rng: torch.Generator
) -> NovelSequences:
    """Draw sequences of two new classes each, with labels of the training's.

    Args:
        mixture: The data.
        world: Labels of the training, and the shared component of these sequences.
        count: Sequences B.
        rng: Generator, on the device of the world.

    Returns:
        Items, queries and labels, see :class:`NovelSequences`.
    """
    means = mixture.std * _normal(count, 2, mixture.width, rng=rng)
    labels = _integers(mixture.labels, count, 2, rng=rng)
    slots = _slots(mixture, count, rng)
    item_means = means.gather(1, slots[:, :, None].expand(-1, -1, mixture.width))
    all_means = torch.cat([item_means, means], 1)
    vectors = _vectors(mixture, all_means, world.shared, rng)
    return NovelSequences(vectors[:, :-2], vectors[:, -2:], slots, labels)


def add_query(
    novel: NovelSequences,
    world: ClassWorld,
    query_item: int,
    copied_to: int | None = None,
) -> Sequences:
    """Complete sequences of new classes by a query of one item's class.

    Args:
        novel: The sequences.
        world: The label vectors of the training.
        query_item: Item (from 0) whose class the query has.
        copied_to: Item that becomes a copy of item ``query_item``, but keeps its own label.

    Returns:
        Tokens [B, n, D] and targets [B].
    """
    slot = novel.slots[:, query_item]
    items = novel.items
    if copied_to is not None:
        items = items.clone()
        items[:, copied_to] = items[:, query_item]
    rows = torch.arange(len(slot), device=slot.device)
    label_vectors = world.label_vectors[novel.labels.gather(1, novel.slots)]
    tokens = _interleave(items, label_vectors, novel.queries[rows, slot])
    return Sequences(tokens, novel.labels[rows, slot])


def copying_gap(mixture: Mixture) -> float:
    """Gap [a, b] - [b, a] of a network that always copies the label of one item: 0.554 for the paper's data.

    It is also right where the overwritten item has the right label itself.
    """
    same_class = (mixture.copies - 1) / (mixture.items - 1)
    same_label = same_class + (1 - same_class) / mixture.labels
    return 1 - same_label
