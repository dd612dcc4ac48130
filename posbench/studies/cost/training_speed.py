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
from posbench.studies.cost.timing import Timed, table
from posbench.studies.wu2025.network import HIDDEN_LAYERS
from posbench.studies.wu2025.sequences import World, training_batch
from posbench.studies.wu2025.training import Condition, Ensemble

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class TrainingSpeed(Timed):
    """Trainings of one seed on the CPU, causal mask, without and with RoPE; take runtime.threads=1."""

    caption: ClassVar[str] = (
        "Trainings and a plain loop, of the same network (logits equal to 1e-5)."
    )

    depths: tuple[Count, ...] = (2, 6)
    iterations: Count = 20  # a round of each way
    repeats: Count = 5

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Table ``training_speed``; see :meth:`Timed.compared`, with the iterations per second."""
        rows: list[Row] = []
        works = list(product(self.depths, ("none", "rope")))
        with run.progress("works", len(works)) as advance:
            for depth, pe in works:
                rows += self.work(depth, pe)
                advance(1)
        each = [
            {**row, "iterations_per_second": self.iterations / row["seconds"]}
            for row in rows
        ]
        return {"training_speed": table(each)}

    def work(self, depth: int, pe: str) -> list[Row]:
        """Rows of one network."""
        condition = Condition(depth=depth, pe=pe)  # type: ignore[arg-type]
        ensemble = Ensemble(condition, [0], CPU)
        loop, step = plain_steps(condition, Ensemble(condition, [0], CPU))
        draw = partial(
            training_batch,
            condition,
            ensemble.worlds[0],
            condition.batch,
            ensemble.data[0],
        )
        ways: dict[str, Callable[[], object]] = {
            "plain loop, sequences built in Python": loop
        }
        ways |= {"plain loop, its training step alone": step, "posbench": ensemble.step}
        ways["posbench, its batches alone"] = draw
        rounds = {way: partial(self._repeated, work) for way, work in ways.items()}
        return self.compared(
            f"depth {depth}, {'RoPE' if pe == 'rope' else 'no PE'}", rounds, CPU
        )

    def _repeated(self, work: Callable[[], object]) -> None:
        for _ in range(self.iterations):
            work()


@dataclass
class PlainSequences(Dataset[tuple[Tensor, Tensor]]):
    """Training sequences, each built in Python from a seed of its own."""

    condition: Condition
    world: World

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        condition = self.condition
        world = self.world
        torch.manual_seed(index)
        random.seed(index)
        classes = random.sample(range(condition.classes), 2) * condition.copies
        random.shuffle(classes)
        asked = random.choice(condition.bias or range(condition.items))
        tokens = []
        for each in classes:
            tokens += [
                self._vector(each),
                world.label_vectors[int(world.class_labels[each])],
            ]
        tokens.append(self._vector(classes[asked]))
        return torch.stack(tokens), world.class_labels[classes[asked]]

    def _vector(self, each: int) -> Tensor:
        noise = torch.normal(0.0, self.condition.std, (self.condition.width,))
        return (self.world.means[each] + self.condition.noise * noise) / (
            1 + self.condition.noise**2
        ) ** 0.5


class PlainNetwork(nn.Module):
    """The same network as textbook modules: all rows of all layers, the mask as a factor of exp(score)."""

    def __init__(self, condition: Condition) -> None:
        super().__init__()
        self.condition, width = condition, condition.width
        # Query, key and value of each layer.
        projections = (
            nn.Linear(width, width, bias=False) for _ in range(3 * condition.depth)
        )
        sizes = [width] * HIDDEN_LAYERS + [condition.labels]
        self.attention = nn.ModuleList(projections)
        self.hidden = nn.ModuleList(nn.Linear(width, size) for size in sizes)
        base = condition.rope_base ** (-torch.arange(0, width, 2) / width)
        angles = torch.arange(condition.tokens)[:, None] * base
        self.cos = angles.cos()
        self.sin = angles.sin()
        self.factor = condition.score_bias(condition.tokens).exp()

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, L] from tokens [B, n, D]."""
        if self.condition.pe == "sin":
            x = x + torch.stack([self.sin, self.cos], -1).flatten(1)
        for first in range(0, len(self.attention), 3):
            q, k, v = (linear(x) for linear in self.attention[first : first + 3])
            if self.condition.pe == "rope":
                q = self._rotated(q)
                k = self._rotated(k)
            weights = (
                torch.exp(q @ k.transpose(-1, -2) / self.condition.width**0.5)
                * self.factor
            )
            mixed = (weights / weights.sum(-1, keepdim=True)) @ v
            x = x + mixed if self.condition.residual else mixed
        x = x[:, -1]
        for linear in self.hidden[:-1]:
            x = torch.relu(linear(x))
        return self.hidden[-1](x)

    def _rotated(self, x: Tensor) -> Tensor:
        a = x[..., 0::2]
        b = x[..., 1::2]
        return torch.stack(
            [a * self.cos - b * self.sin, a * self.sin + b * self.cos], -1
        ).flatten(-2)

    @torch.no_grad()
    def take(self, ensemble: Ensemble) -> None:
        """The weights of the first model of an ensemble."""
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
    """From an ensemble's weights: the plain loop with its data loader, and its training step on one batch.

    Raises:
        RuntimeError: The plain network gives other logits.
    """
    network = PlainNetwork(condition)
    network.take(ensemble)
    rates = {"lr": condition.learning_rate, "weight_decay": condition.weight_decay}
    optimizer = torch.optim.AdamW(network.parameters(), **rates)
    data = PlainSequences(condition, ensemble.worlds[0])
    # In order, as a shuffled index of a billion would not fit; the seed of each item makes the draw.
    loader = iter(
        DataLoader(data, batch_size=condition.batch, sampler=SequentialSampler(data))
    )
    tokens, targets = next(loader)
    with torch.no_grad():
        difference = float(
            (network(tokens) - ensemble.network(tokens[None])[0]).abs().max()
        )
    if difference > 1e-5:
        raise RuntimeError(f"the two networks' logits differ by {difference:.3g}")

    def step(tokens: Tensor, targets: Tensor) -> None:
        loss = F.cross_entropy(network(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return lambda: step(*next(loader)), lambda: step(tokens, targets)
