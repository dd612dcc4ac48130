"""The synthetic trainings of Wu et al. 2025 against a plain loop that builds each sequence in Python.

The plain loop is ours, written the way the released code works: items seeded by their index and put together
in Python, a data loader over them, linear layers one by one, and every row of every layer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import ClassVar

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from posbench.files.atomic import Row
from posbench.late import F, nn, pd, torch
from posbench.run.base import Run
from posbench.schema import Count
from posbench.studies.cost.timing import TimingStudy, with_environment
from wu2025.network import HIDDEN_LAYERS
from wu2025.sequences import ClassWorld, training_batch
from wu2025.training import Condition, Ensemble

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class TrainingSpeed(TimingStudy):
    """Trainings of one seed on the CPU, causal mask, without and with RoPE; take runtime.threads=1.

    Attributes:
        depths: Attention layers of the networks.
        iterations: Training steps in a round of each way.
    """

    caption: ClassVar[str] = (
        "Trainings and a plain loop, of the same network (logits equal to 1e-5)."
    )

    depths: tuple[Count, ...] = (2, 6)
    iterations: Count = 20
    repeats: Count = 5

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Table ``training_speed``; see :meth:`TimingStudy.compared`, with the iterations per second."""
        rows: list[Row] = []
        works = list(product(self.depths, ("none", "rope")))
        with run.progress("works", len(works)) as advance:
            for depth, pe in works:
                rows += self.work(depth, pe)
                advance(1)
        for row in rows:
            row["iterations_per_second"] = self.iterations / row["seconds"]
        return {"training_speed": with_environment(rows)}

    def work(self, depth: int, pe: str) -> list[Row]:
        """Rows of one network."""
        condition = Condition(depth=depth, pe=pe)  # type: ignore[arg-type]
        ensemble = Ensemble(condition, [0], CPU)
        plain_loop, plain_step = plain_steps(condition, Ensemble(condition, [0], CPU))
        draw_batch = partial(
            training_batch,
            condition,
            ensemble.worlds[0],
            condition.batch,
            ensemble.data[0],
        )
        ways: dict[str, Callable[[], object]] = {
            "plain loop, sequences built in Python": plain_loop,
            "plain loop, its training step alone": plain_step,
            "posbench": ensemble.step,
            "posbench, its batches alone": draw_batch,
        }
        rounds = {way: partial(self._repeat, step) for way, step in ways.items()}
        encoding = "RoPE" if pe == "rope" else "no PE"
        return self.compared(f"depth {depth}, {encoding}", rounds, CPU)

    def _repeat(self, step: Callable[[], object]) -> None:
        """Take the steps of a round."""
        for _ in range(self.iterations):
            step()


@dataclass
class PlainSequences(Dataset[tuple[Tensor, Tensor]]):
    """Training sequences, each built in Python from a seed of its own."""

    condition: Condition
    world: ClassWorld

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Items and labels in turn, then the query item, [n, D], and the query's label."""
        condition = self.condition
        world = self.world
        torch.manual_seed(index)
        random.seed(index)
        classes = random.sample(range(condition.classes), 2) * condition.copies
        random.shuffle(classes)
        target = random.choice(condition.bias or range(condition.items))
        tokens = []
        for item_class in classes:
            tokens.append(self._item(item_class))
            tokens.append(world.label_vectors[int(world.class_labels[item_class])])
        tokens.append(self._item(classes[target]))
        return torch.stack(tokens), world.class_labels[classes[target]]

    def _item(self, item_class: int) -> Tensor:
        """An item of a class, [D]: the mean of the class with noise."""
        condition = self.condition
        noise = torch.normal(0.0, condition.std, (condition.width,))
        item = self.world.means[item_class] + condition.noise * noise
        return item / (1 + condition.noise**2) ** 0.5


class PlainNetwork(nn.Module):
    """The same network as textbook modules: all rows of all layers, the mask as a factor of exp(score)."""

    def __init__(self, condition: Condition) -> None:
        super().__init__()
        self.condition = condition
        width = condition.width
        # Query, key and value of each layer.
        self.attention = nn.ModuleList(
            nn.Linear(width, width, bias=False) for _ in range(3 * condition.depth)
        )
        sizes = [width] * HIDDEN_LAYERS + [condition.labels]
        self.hidden = nn.ModuleList(nn.Linear(width, size) for size in sizes)
        frequencies = condition.rope_base ** (-torch.arange(0, width, 2) / width)
        angles = torch.arange(condition.tokens)[:, None] * frequencies
        self.cos = angles.cos()
        self.sin = angles.sin()
        self.factor = condition.score_bias(condition.tokens).exp()

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, L] from tokens [B, n, D]."""
        condition = self.condition
        if condition.pe == "sin":
            x = x + torch.stack([self.sin, self.cos], -1).flatten(1)
        for first in range(0, len(self.attention), 3):
            q, k, v = (linear(x) for linear in self.attention[first : first + 3])
            if condition.pe == "rope":
                q = self._rotated(q)
                k = self._rotated(k)
            scores = q @ k.transpose(-1, -2) / condition.width**0.5
            weights = torch.exp(scores) * self.factor
            output = (weights / weights.sum(-1, keepdim=True)) @ v
            x = x + output if condition.residual else output
        x = x[:, -1]
        for linear in self.hidden[:-1]:
            x = torch.relu(linear(x))
        return self.hidden[-1](x)

    def _rotated(self, x: Tensor) -> Tensor:
        """Rotary embedding of queries or keys [B, n, D], whose pairs are neighbours."""
        even = x[..., 0::2]
        odd = x[..., 1::2]
        rotated_even = even * self.cos - odd * self.sin
        rotated_odd = even * self.sin + odd * self.cos
        return torch.stack([rotated_even, rotated_odd], -1).flatten(-2)

    @torch.no_grad()
    def take(self, ensemble: Ensemble) -> None:
        """Copy the weights of the first model of an ensemble."""
        network = ensemble.network
        attention = chain(*zip(network.query, network.key, network.value, strict=True))
        linears = (*self.attention, *self.hidden)
        weights = (*attention, *network.weight)
        for linear, weight in zip(linears, weights, strict=True):
            linear.weight.copy_(weight[0].T)
        for linear, bias in zip(self.hidden, network.bias, strict=True):
            linear.bias.copy_(bias[0, 0])


def plain_steps(
    condition: Condition, ensemble: Ensemble
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Make the training steps of the plain loop, from an ensemble's weights.

    Returns:
        A step on the next batch of the data loader, and a step on one batch that stays the same.

    Raises:
        RuntimeError: The plain network gives other logits.
    """
    network = PlainNetwork(condition)
    network.take(ensemble)
    optimizer = torch.optim.AdamW(
        network.parameters(),
        lr=condition.learning_rate,
        weight_decay=condition.weight_decay,
    )
    data = PlainSequences(condition, ensemble.worlds[0])
    # In order, as a shuffled index of a billion would not fit; the seed of each item makes the draw.
    loader = iter(
        DataLoader(data, batch_size=condition.batch, sampler=SequentialSampler(data))
    )
    first_tokens, first_targets = next(loader)
    with torch.no_grad():
        logits = ensemble.network(first_tokens[None])[0]
        difference = float((network(first_tokens) - logits).abs().max())
    if difference > 1e-5:
        raise RuntimeError(f"the two networks' logits differ by {difference:.3g}")

    def step(tokens: Tensor, targets: Tensor) -> None:
        loss = F.cross_entropy(network(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return lambda: step(*next(loader)), lambda: step(first_tokens, first_targets)
