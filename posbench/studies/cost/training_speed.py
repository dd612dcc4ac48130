"""How fast the synthetic trainings of Wu et al. 2025 run, beside a plain loop that builds each sequence in
Python.

``python -m posbench.studies.cost.training_speed --help``. The plain loop is ours, written the way the
released code works: a data set whose items are seeded by their index and put together in Python, a data
loader over it, linear layers one by one, and every row of every layer. Both train the same network: the
program stops if their logits differ.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from posbench.studies.cost.latency import CLOCKS, publish, ratios, side_by_side
from posbench.studies.wu2025.network import HIDDEN_LAYERS
from posbench.studies.wu2025.sequences import World, training_batch
from posbench.studies.wu2025.training import Condition, Ensemble


class PlainSequences(Dataset[tuple[Tensor, Tensor]]):
    """Training sequences, each built in Python from a seed of its own."""

    def __init__(self, condition: Condition, world: World) -> None:
        self.condition, self.world = condition, world

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        condition, world = self.condition, self.world
        torch.manual_seed(index)
        random.seed(index)
        classes = random.sample(range(condition.classes), 2) * condition.copies
        random.shuffle(classes)
        asked = random.choice(condition.bias or range(condition.items))
        tokens = []
        for each in classes:
            tokens.append(self._vector(each))
            tokens.append(world.label_vectors[int(world.class_labels[each])])
        tokens.append(self._vector(classes[asked]))
        return torch.stack(tokens), world.class_labels[classes[asked]]

    def _vector(self, each: int) -> Tensor:
        noise = torch.normal(0.0, self.condition.std, (self.condition.width,))
        return (self.world.means[each] + self.condition.noise * noise) / (1 + self.condition.noise**2) ** 0.5


class PlainNetwork(nn.Module):
    """The same network as textbook modules: all rows of all layers, the mask as a factor of exp(score)."""

    def __init__(self, condition: Condition) -> None:
        super().__init__()
        width = condition.width
        self.condition = condition
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
            for _ in range(condition.depth)
        )
        sizes = [width] * HIDDEN_LAYERS + [condition.labels]
        self.hidden = nn.ModuleList(nn.Linear(width, size) for size in sizes)
        tokens = torch.arange(condition.tokens)
        angles = tokens[:, None] * condition.rope_base ** (-torch.arange(0, width, 2) / width)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("factor", condition.score_bias(condition.tokens).exp())

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, L] from tokens [B, n, D]."""
        if self.condition.pe == "sin":
            x = x + torch.stack([self.sin, self.cos], -1).flatten(1)
        for query, key, value in self.layers:
            q, k, v = query(x), key(x), value(x)
            if self.condition.pe == "rope":
                q, k = self._rotated(q), self._rotated(k)
            weights = torch.exp(q @ k.transpose(-1, -2) / self.condition.width**0.5) * self.factor
            mixed = (weights / weights.sum(-1, keepdim=True)) @ v
            x = x + mixed if self.condition.residual else mixed
        x = x[:, -1]
        for index, linear in enumerate(self.hidden):
            x = torch.relu(linear(x)) if index < HIDDEN_LAYERS else linear(x)
        return x

    def _rotated(self, x: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * self.cos - odd * self.sin, even * self.sin + odd * self.cos], -1).flatten(
            -2
        )

    @torch.no_grad()
    def take(self, ensemble: Ensemble) -> None:
        """The weights of the first model of an ensemble."""
        network = ensemble.network
        for index, (query, key, value) in enumerate(self.layers):
            for linear, weight in ((query, network.query), (key, network.key), (value, network.value)):
                linear.weight.copy_(weight[index][0].T)
        for linear, weight, bias in zip(self.hidden, network.weight, network.bias, strict=True):
            linear.weight.copy_(weight[0].T)
            linear.bias.copy_(bias[0, 0])


def plain_steps(condition: Condition, ensemble: Ensemble) -> tuple[Callable[[], None], Callable[[], None]]:
    """The plain loop with its data loader, and its training step alone on one batch; from an ensemble's
    weights.

    Raises:
        RuntimeError: The plain network gives other logits.
    """
    network = PlainNetwork(condition)
    network.take(ensemble)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=condition.learning_rate, weight_decay=condition.weight_decay
    )
    data = PlainSequences(condition, ensemble.worlds[0])
    # In order, as a shuffled index of a billion would not fit; the seed of each item makes the draw.
    loader: Iterator[Any] = iter(
        DataLoader(data, batch_size=condition.batch, sampler=SequentialSampler(data))
    )
    tokens, targets = next(loader)
    with torch.no_grad():
        difference = float((network(tokens) - ensemble.network(tokens[None])[0]).abs().max())
    if difference > 1e-5:
        raise RuntimeError(f"the two networks' logits differ by {difference:.3g}")

    def step(tokens: Tensor, targets: Tensor) -> None:
        loss = F.cross_entropy(network(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return lambda: step(*next(loader)), lambda: step(tokens, targets)


def speeds(
    condition: Condition, *, iterations: int, repeats: int, clock: Callable[[], float]
) -> list[list[str]]:
    """Rows of condition, way, iterations per second (median round), and the ratio to the plain loop, in one
    run.

    Args:
        condition: What is trained.
        iterations: Iterations a round of each way.
        repeats: Measured rounds.
        clock: Gives the time in seconds.
    """
    device = torch.device("cpu")
    ensemble = Ensemble(condition, [0], device)
    loop, step = plain_steps(condition, Ensemble(condition, [0], device))

    def repeated(work: Callable[[], object]) -> None:
        for _ in range(iterations):
            work()

    draw = partial(training_batch, condition, ensemble.worlds[0], condition.batch, ensemble.data[0])
    works: dict[str, Callable[[], Any]] = {
        "plain loop, sequences built in Python": partial(repeated, loop),
        "plain loop, its training step alone": partial(repeated, step),
        "posbench": partial(repeated, ensemble.step),
        "posbench, its batches alone": partial(repeated, draw),
    }
    times = side_by_side(works, device, repeats, clock)
    base = times["plain loop, sequences built in Python"]
    what = f"depth {condition.depth}, {'RoPE' if condition.pe == 'rope' else 'no PE'}"
    return [
        [what, name, f"{iterations / median(spent):.1f}", ratios(base, spent)]
        for name, spent in times.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write the table where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 6])
    parser.add_argument("--iterations", type=int, default=20, help="iterations a round")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="processor: where a CPU is shared with other work"
    )
    parser.add_argument("--out", type=Path, help="write the table as Markdown")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for depth in options.depths:
        for pe in ("none", "rope"):
            condition = replace(Condition(), depth=depth, pe=pe)
            rows += speeds(
                condition, iterations=options.iterations, repeats=options.repeats, clock=CLOCKS[options.clock]
            )
    title = f"Synthetic trainings, batch 128, causal mask, one thread, {options.repeats} rounds, {options.clock} time"
    note = (
        "speed-up: over the plain loop with its data loader, round by round. The plain loop is our own, written the way the "
        "released code of Wu et al. 2025 works; both train the same network (logits equal to 1e-5)."
    )
    header = ("condition", "way", "iterations per second (median)", "speed-up: median (min to max)")
    publish(title, rows, note, options.out, header=header)


if __name__ == "__main__":
    main()
