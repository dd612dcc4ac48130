"""Sequences of labelled items with a known position bias, for training and for paired tests (Wu et al. 2025,
Section 5).

A sequence is x1 y1 ... x8 y8 xq: items of two classes, four copies each in random order, every item followed
by its label, and a query of the class of one item. The bias is the list of items (from 0) whose class the
query may take. Whole batches are drawn at once: the official code builds each sequence in Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from posbench.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The data of Wu et al. 2025, Section 5 and Appendices J and L (after Reddy 2024).

    Attributes:
        vocabulary: ``gaussian``: every item is a fresh draw around its class mean (Section 5); ``fixed``: a
            class is one vector with a component that all classes share (Appendix L).
        scale: Standard deviation of every component drawn. ``paper``: 1 / sqrt(width), the variance 1/d of
            the text, tokens of norm 1. ``code``: 1 / width, what the official code draws, tokens of norm
            0.125 at width 64.
        bias: Items (from 0) whose class the query may have, uniformly; empty: any item, no bias.
        width: Dimension of a token.
        classes: Classes K of the training data.
        labels: Labels L; that of a class is drawn uniformly and stays.
        copies: Items of each of the two classes of a sequence (the burstiness B), so there are 2 B items.
        noise: Within-class noise epsilon of ``gaussian``: x = (mean + epsilon eta) / sqrt(1 + epsilon^2).
        anisotropy: Weight lambda of the shared component of ``fixed``: v = (mean + lambda omega) / sqrt(1 +
            lambda^2).
        test_component: Whether the tests of ``fixed`` keep the shared component of the training
            (``training``, the text) or draw one of their own for each set (``fresh``, what the official code
            does).
    """

    vocabulary: Literal["gaussian", "fixed"] = "gaussian"
    scale: Literal["paper", "code"] = "paper"
    bias: tuple[int, ...] = ()
    width: int = 64
    classes: int = 2048
    labels: int = 32
    copies: int = 4
    noise: float = 0.75
    anisotropy: float = 0.75
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

    def check_data(self, where: str) -> None:
        """Raise `UserError` where a number is out of range; ``where`` is the dotted name of these fields."""
        for name, least in (("width", 2), ("classes", 2), ("labels", 2), ("copies", 2)):
            if getattr(self, name) < least:
                raise UserError(f"{where}.{name}", getattr(self, name), f"{least} or more", f"raise {name}")
        for name in ("noise", "anisotropy"):
            if getattr(self, name) < 0:
                raise UserError(f"{where}.{name}", getattr(self, name), "0 or more", "take 0.75")
        if len(set(self.bias)) < len(self.bias) or not set(self.bias) <= set(range(self.items)):
            raise UserError(
                f"{where}.bias",
                list(self.bias),
                f"different items from 0 to {self.items - 1}, or [] for none",
                f"[0, {self.items - 1}] is the bias to both ends",
            )


@dataclass(frozen=True)
class World:
    """What stays fixed in a training: class means [K, D], label of each class [K], label vectors [L, D],
    shared component [D]."""

    means: Tensor
    class_labels: Tensor
    label_vectors: Tensor
    shared: Tensor


@dataclass(frozen=True)
class Sequences:
    """Tokens [B, n, D] and the label asked for [B]."""

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Novel:
    """Sequences of classes that no training saw, before a query is chosen.

    Attributes:
        items: Vectors of the items [B, items, D].
        queries: Query vector of each of the two classes [B, 2, D].
        slots: Which of the two classes an item has [B, items].
        labels: Labels of the two classes [B, 2].
    """

    items: Tensor
    queries: Tensor
    slots: Tensor
    labels: Tensor


def draw_world(mixture: Mixture, rng: torch.Generator) -> World:
    """Class means, labels, label vectors and the shared component of one training, on the generator's
    device."""
    at = {"generator": rng, "device": rng.device}
    means = mixture.std * torch.randn(mixture.classes, mixture.width, **at)
    class_labels = torch.randint(mixture.labels, (mixture.classes,), **at)
    label_vectors = mixture.std * torch.randn(mixture.labels, mixture.width, **at)
    shared = mixture.std * torch.randn(mixture.width, **at)
    return World(means, class_labels, label_vectors, shared)


def _vectors(mixture: Mixture, means: Tensor, shared: Tensor, rng: torch.Generator) -> Tensor:
    """Tokens of the classes with these means [..., D], one draw each."""
    if mixture.vocabulary == "fixed":
        return (means + mixture.anisotropy * shared) / (1 + mixture.anisotropy**2) ** 0.5
    drawn = torch.randn(means.shape, generator=rng, device=rng.device)
    return (means + (mixture.noise * mixture.std) * drawn) / (1 + mixture.noise**2) ** 0.5


def _slots(mixture: Mixture, count: int, rng: torch.Generator) -> Tensor:
    """Which of its two classes each item of a sequence has, in random order, [count, items]."""
    return torch.rand(count, mixture.items, generator=rng, device=rng.device).argsort(1) // mixture.copies


def _interleave(items: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """x1 y1 ... xn yn xq from [B, items, D] twice and [B, D]."""
    count, items_, width = items.shape
    tokens = items.new_empty(count, 2 * items_ + 1, width)
    tokens[:, 0:-1:2], tokens[:, 1::2], tokens[:, -1] = items, labels, queries
    return tokens


def training_batch(mixture: Mixture, world: World, count: int, rng: torch.Generator) -> Sequences:
    """Sequences of the training distribution: known classes, the query's item drawn from the bias."""
    at = {"generator": rng, "device": rng.device}
    one = torch.randint(mixture.classes, (count,), **at)
    other = (one + 1 + torch.randint(mixture.classes - 1, (count,), **at)) % mixture.classes
    item_classes = torch.stack([one, other], 1).gather(1, _slots(mixture, count, rng))
    allowed = torch.tensor(mixture.bias or range(mixture.items), device=rng.device)
    asked = allowed[torch.randint(len(allowed), (count, 1), **at)]
    classes = torch.cat([item_classes, item_classes.gather(1, asked)], 1)
    # embedding reads whole rows, five times as fast as an index.
    vectors = _vectors(mixture, F.embedding(classes, world.means), world.shared, rng)
    labels = world.class_labels[classes]
    tokens = _interleave(vectors[:, :-1], F.embedding(labels[:, :-1], world.label_vectors), vectors[:, -1])
    return Sequences(tokens, labels[:, -1])


def novel_sequences(mixture: Mixture, world: World, count: int, rng: torch.Generator) -> Novel:
    """Sequences of two new classes each, with new labels; the label vectors are the training's.

    The official code draws all K means anew for each sequence and uses two of them: the same distribution.
    """
    at = {"generator": rng, "device": rng.device}
    means = mixture.std * torch.randn(count, 2, mixture.width, **at)
    labels, slots = torch.randint(mixture.labels, (count, 2), **at), _slots(mixture, count, rng)
    item_means = means.gather(1, slots[:, :, None].expand(-1, -1, mixture.width))
    shared = world.shared
    if mixture.test_component == "fresh":
        shared = mixture.std * torch.randn(mixture.width, **at)
    vectors = _vectors(mixture, torch.cat([item_means, means], 1), shared, rng)
    return Novel(vectors[:, :-2], vectors[:, -2:], slots, labels)


def ask(novel: Novel, world: World, right: int, copy_at: int | None = None) -> Sequences:
    """Ask for the class of one item; with ``copy_at``, that other item gets the asked item's vector and keeps
    its own label.

    Sets [a, b] and [b, a] made from the same `Novel` are paired: same classes, same order, same draws.

    Args:
        novel: The sequences.
        world: Gives the label vectors.
        right: Item a (from 0) whose class is asked for.
        copy_at: Item b (from 0) that is overwritten by an exact copy of item a.
    """
    asked = novel.slots[:, right]
    rows = torch.arange(len(asked), device=asked.device)
    items = novel.items
    if copy_at is not None:
        items = items.clone()
        items[:, copy_at] = items[:, right]
    labels = world.label_vectors[novel.labels.gather(1, novel.slots)]
    return Sequences(_interleave(items, labels, novel.queries[rows, asked]), novel.labels[rows, asked])


def other_is_right(mixture: Mixture) -> float:
    """Share of the test sequences in which the overwritten item's own label is the right one too.

    Of the other items, copies - 1 out of items - 1 have the query's class, and two classes may share a label:
    0.446.
    """
    same = (mixture.copies - 1) / (mixture.items - 1)
    return same + (1 - same) / mixture.labels


def copying_gap(mixture: Mixture, weight_first: float, weight_other: float) -> float:
    """Accuracy gap [a, b] - [b, a] of a policy that copies a label by its place alone, with these shares on
    items a and b.

    A content-blind policy: 0.554 times the difference of the shares for the paper's data. Half first, half
    last: 0.277 for first against middle, 0 for first against last, -0.277 for middle against last.
    """
    return (1 - other_is_right(mixture)) * (weight_first - weight_other)
