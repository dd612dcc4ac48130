"""Training the attention network of Wu et al. 2025 and measuring its position bias: checkpointed, resumable,
one folder a seed.

The learning rate is constant and every draw comes from a generator whose state is in the checkpoint, so a
training that was killed, or is asked for more iterations later, goes on bit for bit as if it had never
stopped.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from posbench.errors import UserError
from posbench.files.atomic import Row, digest, write_bytes
from posbench.run.folder import RunDir, owned
from posbench.stats.tables import Z95
from posbench.studies.wu2025.network import Attention, AttentionNetwork
from posbench.studies.wu2025.sequences import (
    Mixture,
    Sequences,
    World,
    ask,
    draw_world,
    novel_sequences,
    training_batch,
)
from posbench.theory import masks

PAIRS = (("first", "middle"), ("first", "last"), ("middle", "last"))
"""The pairs of items compared; a positive gap is a bias to the earlier one."""
CHUNK = 2000
"""Test sequences at a time."""
CHECKPOINT_EVERY = 2000
"""Iterations between two checkpoints."""
TEST_SEEDS = 1_000_000
"""Test sets of seed s are drawn from generator seed `TEST_SEEDS` + s, on the CPU: the same on every
device."""
ROWS, CHECKPOINT, FACTS = "rows.jsonl", "checkpoint.pt", "training.json"


@dataclass(frozen=True, kw_only=True)
class Condition(Mixture, Attention):
    """One training condition: data, network and optimiser.

    Attributes:
        batch: Sequences an iteration.
        learning_rate: Constant rate of AdamW.
        weight_decay: Of all parameters.
        sequences: Test sequences of each set.
    """

    batch: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 1e-6
    sequences: int = 10_000

    def check(self, where: str) -> None:
        """Raise `UserError` where a number is out of range; ``where`` is the dotted name of this
        condition."""
        self.check_data(where)
        self.check_network(where, self.width, self.tokens)
        for name, least in (("batch", 1), ("sequences", 2)):
            if getattr(self, name) < least:
                raise UserError(f"{where}.{name}", getattr(self, name), f"{least} or more", f"raise {name}")
        if self.learning_rate <= 0 or self.weight_decay < 0:
            raise UserError(f"{where}.learning_rate", self.learning_rate, "above 0", "the paper takes 0.001")

    @property
    def settings(self) -> Row:
        """What tells the conditions of the paper apart, as columns of a table."""
        names = {place: name for name, place in self.places.items()}
        span = {"window": f" {self.window}", "prefix": f" {self.prefix}"}.get(self.mask, "")
        return {
            "vocabulary": self.vocabulary,
            "scale": self.scale,
            "std": self.std,
            "mask": self.mask + span,
            "pe": self.pe,
            "depth": self.depth,
            "residual": self.residual,
            "bias": "+".join(names.get(item, f"item {item}") for item in self.bias) or "none",
        }

    @property
    def name(self) -> str:
        """Readable folder name with the hash of all fields."""
        parts = [
            self.vocabulary,
            self.pe,
            self.mask,
            f"d{self.depth}",
            "residual" if self.residual else "plain",
            self.scale,
        ]
        bias = "bias" + "+".join(map(str, self.bias)) if self.bias else "unbiased"
        return "_".join([*parts, bias, digest(asdict(self))])


def marks(until: int) -> list[int]:
    """Iterations at which a training is measured: 1000, 2000, 4000, 6000, 8000, 10,000, every 4000 from
    12,000, and the end."""
    early = [1000, 2000, 4000, 6000, 8000, 10_000]
    return sorted({m for m in [*early, *range(12_000, until + 1, 4000)] if m <= until} | {until})


class Ensemble:
    """Several seeds of one condition at the same iteration, trained as one batch; an ensemble of one on a
    CPU."""

    def __init__(self, condition: Condition, seeds: Sequence[int], device: torch.device) -> None:
        """A fresh start: weights, classes and data of a seed have generators of their own."""
        self.condition, self.seeds, self.iteration, self.device = condition, list(seeds), 0, device

        def generators(kind: int) -> list[torch.Generator]:
            return [torch.Generator(device).manual_seed(3 * seed + kind) for seed in seeds]

        self.worlds = [draw_world(condition, rng) for rng in generators(0)]
        self.network = AttentionNetwork(
            condition, condition.width, condition.labels, condition.tokens, generators(1)
        )
        self.data = generators(2)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(),
            lr=condition.learning_rate,
            weight_decay=condition.weight_decay,
            fused=True,
        )

    def step(self) -> None:
        """One iteration: a fresh batch for every seed."""
        drawn = [
            training_batch(self.condition, world, self.condition.batch, rng)
            for world, rng in zip(self.worlds, self.data, strict=True)
        ]
        # A stack of one would copy the batch.
        tokens = torch.stack([d.tokens for d in drawn]) if len(drawn) > 1 else drawn[0].tokens[None]
        logits = self.network(tokens)
        targets = torch.stack([d.targets for d in drawn])
        # A sum over models of means over sequences: each model gets the gradient that it would get alone.
        loss = (
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / self.condition.batch
        )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.iteration += 1

    def state(self, index: int) -> dict[str, Any]:
        """Everything that one seed needs to go on, without the other seeds."""
        parameters = list(self.network.parameters())
        moments = [self.optimizer.state[p] for p in parameters] if self.iteration else []
        return {
            "iteration": self.iteration,
            "device": self.device.type,
            "parameters": [p[index].detach().cpu().clone() for p in parameters],
            "first": [m["exp_avg"][index].cpu().clone() for m in moments],
            "second": [m["exp_avg_sq"][index].cpu().clone() for m in moments],
            "data": self.data[index].get_state(),
        }

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from what `state` gave, a state per seed, all of one iteration."""
        self.iteration = states[0]["iteration"]
        for rng, state in zip(self.data, states, strict=True):
            rng.set_state(state["data"])
        for k, parameter in enumerate(self.network.parameters()):
            with torch.no_grad():
                parameter.copy_(torch.stack([s["parameters"][k] for s in states]))
            if self.iteration:
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(self.iteration), device=self.device),
                    "exp_avg": torch.stack([s["first"][k] for s in states]).to(self.device),
                    "exp_avg_sq": torch.stack([s["second"][k] for s in states]).to(self.device),
                }

    @torch.no_grad()
    def measure(self) -> list[Row]:
        """The gaps, accuracies and sinks of every seed at this iteration, one row each.

        A row has ``iteration``; ``train_loss`` (nats) and ``train_accuracy`` on fresh sequences of the
        training distribution; ``novel_first``, ``novel_middle``, ``novel_last``: accuracy on new classes when
        that item is asked for and nothing is overwritten; ``acc_first_middle`` and so on: accuracy of set
        [first, middle]; ``gap_first_middle`` and ``sd_first_middle``: gap [first, middle] - [middle, first]
        and its standard error over the paired sequences; and ``sink_by_head`` (Gu et al.) and
        ``sink_by_entry`` (Wu et al.), a share per token, on sequences of the training.
        """
        found = []
        for index, seed in enumerate(self.seeds):
            network = self._alone(index)
            rng = torch.Generator().manual_seed(TEST_SEEDS + seed)
            world = World(*(part.cpu() for part in asdict(self.worlds[index]).values()))
            parts = [
                self._chunk(network, world, rng, min(CHUNK, self.condition.sequences - start))
                for start in range(0, self.condition.sequences, CHUNK)
            ]
            scores = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            found.append({"seed": seed, "iteration": self.iteration, **_summary(scores)})
        return found

    def _alone(self, index: int) -> AttentionNetwork:
        """One model of the ensemble, on the CPU: every device measures alike."""
        condition = self.condition
        network = AttentionNetwork(
            condition, condition.width, condition.labels, condition.tokens, [torch.Generator()]
        )
        for own, shared in zip(network.parameters(), self.network.parameters(), strict=True):
            own.copy_(shared[index : index + 1])
        return network

    def _chunk(
        self, network: AttentionNetwork, world: World, rng: torch.Generator, count: int
    ) -> dict[str, Any]:
        """Scores of each test sequence, [count] or [count, n], by name."""
        condition = self.condition
        places = condition.places
        seen = training_batch(condition, world, count, rng)
        logits = network(seen.tokens[None])[0]
        attention = network.attentions(seen.tokens[None])[0].double().numpy()
        mask = condition.seen(condition.tokens)
        scores: dict[str, Any] = {
            "train_loss": F.cross_entropy(logits, seen.targets, reduction="none").numpy(),
            "train_accuracy": (logits.argmax(-1) == seen.targets).numpy(),
            # Gu et al. count queries from the token on; under other masks than causal, earlier ones see it
            # too.
            "sink_by_head": np.stack([masks.sink_by_head(np.tril(each)) for each in attention]),
            "sink_by_entry": np.stack([masks.sink_by_entry(each, mask) for each in attention]),
        }
        novel = novel_sequences(condition, world, count, rng)
        for name, place in places.items():
            scores[f"novel_{name}"] = _hits(network, ask(novel, world, place))
        for a, b in PAIRS:
            for right, other in ((a, b), (b, a)):
                if condition.test_component == "fresh":
                    novel = novel_sequences(condition, world, count, rng)
                scores[f"acc_{right}_{other}"] = _hits(
                    network, ask(novel, world, places[right], places[other])
                )
        return scores


def _hits(network: AttentionNetwork, sequences: Sequences) -> Any:
    return (network(sequences.tokens[None])[0].argmax(-1) == sequences.targets).numpy()


def _summary(scores: dict[str, Any]) -> Row:
    row: Row = {"n": len(scores["train_loss"])}
    for name, values in scores.items():
        row[name] = values.mean(0).tolist()
    for a, b in PAIRS:
        difference = scores[f"acc_{a}_{b}"].astype(np.float64) - scores[f"acc_{b}_{a}"]
        row[f"gap_{a}_{b}"] = float(difference.mean())
        row[f"sd_{a}_{b}"] = float(difference.std(ddof=1) / len(difference) ** 0.5)
    return row


def pair_rows(condition: Condition, row: Row) -> list[Row]:
    """A measured row as one row per pair of items: `Condition.settings`, acc_ab, acc_ba, gap with its 95 %
    interval, losses."""
    shared = {
        k: row[k]
        for k in (
            "n",
            "train_loss",
            "train_accuracy",
            "novel_first",
            "novel_middle",
            "novel_last",
            "hardware",
        )
    }
    rows = []
    for a, b in PAIRS:
        gap, half = row[f"gap_{a}_{b}"], Z95 * row[f"sd_{a}_{b}"]
        measured = {"acc_ab": row[f"acc_{a}_{b}"], "acc_ba": row[f"acc_{b}_{a}"], "gap": gap}
        where = {"seed": row["seed"], "iteration": row["iteration"], "pair": f"{a}-{b}"}
        rows.append(
            {**condition.settings, **where, **measured, "ci_low": gap - half, "ci_high": gap + half, **shared}
        )
    return rows


def sink_rows(condition: Condition, row: Row) -> list[Row]:
    """A measured row as one row per token (from 0): `Condition.settings`, by_head (Gu et al.), by_entry (Wu
    et al.)."""
    where = {**condition.settings, "seed": row["seed"], "iteration": row["iteration"], "n": row["n"]}
    shares = zip(row["sink_by_head"], row["sink_by_entry"], strict=True)
    return [
        {**where, "token": token, "by_head": head, "by_entry": entry}
        for token, (head, entry) in enumerate(shares)
    ]


def folder_of(root: Path, condition: Condition, seed: int) -> RunDir:
    """The folder of one training under a root."""
    return RunDir(root / f"{condition.name}_s{seed}")


def train(
    condition: Condition,
    seeds: Sequence[int],
    iterations: int,
    root: Path,
    *,
    hardware: str,
    device: str = "cpu",
    advance: Callable[[int], None] = lambda iterations: None,
) -> dict[int, list[Row]]:
    """Train every seed for that many iterations, going on where a folder under the root has got to.

    On a CPU the seeds run one after another, for an ensemble costs one thread as much as its members one by
    one; on a GPU those at the same iteration run as one batched ensemble.

    Args:
        condition: What is trained.
        seeds: Seeds, each with a folder of its own.
        iterations: Total iterations of each, those of earlier calls included.
        root: Folder of the trainings.
        hardware: Written into each row.
        device: Torch device.
        advance: Called with the number of model-iterations done, for a progress bar.

    Returns:
        Rows of `Ensemble.measure` up to ``iterations``, oldest first, by seed.

    Raises:
        UserError: A checkpoint is of another device, another process trains one of the seeds, or the folder
            holds a training that went further and has no row this early.
    """
    root.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        states: dict[int, dict[str, Any] | None] = {}
        for seed in seeds:
            run = folder_of(root, condition, seed)
            stack.enter_context(owned(run.path))
            states[seed] = _open(run, condition, seed, device)
        groups: dict[int, list[int]] = {}
        for position, seed in enumerate(seeds):
            state = states[seed]
            at = state["iteration"] if state else 0
            advance(min(at, iterations))
            groups.setdefault(position if torch.device(device).type == "cpu" else at, []).append(seed)
        for group in groups.values():
            ensemble = Ensemble(condition, group, torch.device(device))
            if states[group[0]]:
                ensemble.load([state for seed in group if (state := states[seed])])
            _run(ensemble, iterations, root, hardware, advance)
    found = {
        seed: [row for row in folder_of(root, condition, seed).rows(ROWS) if row["iteration"] <= iterations]
        for seed in seeds
    }
    for seed, rows in found.items():
        rows.sort(key=lambda row: row["iteration"])
        if not rows:
            raise UserError(
                "iterations",
                iterations,
                f"1000 or more: {folder_of(root, condition, seed).path} is trained further, and was measured later only",
                "ask for more, or take another folder",
            )
    return found


def _open(run: RunDir, condition: Condition, seed: int, device: str) -> dict[str, Any] | None:
    """Make or mend a training's folder and read its checkpoint; None at the start."""
    run.path.mkdir(exist_ok=True)
    run.repair(ROWS)
    if not (run.path / FACTS).is_file():
        run.write_json(FACTS, {"condition": asdict(condition), "seed": seed})
    file = run.path / CHECKPOINT
    if not file.is_file():
        return None
    if not zipfile.is_zipfile(file):
        raise UserError("checkpoint", str(file), "a checkpoint of this training", "remove the folder")
    state: dict[str, Any] = torch.load(file, weights_only=True)
    if state["device"] != torch.device(device).type:
        # The generators of a CPU and a GPU draw different numbers: going on would be no longer the same
        # training.
        raise UserError(
            "checkpoint", str(file), f"one made on {device}", f"go on on {state['device']}, or start anew"
        )
    return state


def _run(
    ensemble: Ensemble, iterations: int, root: Path, hardware: str, advance: Callable[[int], None]
) -> None:
    stops = set(marks(iterations))
    # A row that was damaged is made again where the training stands at it.
    _record(ensemble, stops, root, hardware)
    while ensemble.iteration < iterations:
        ensemble.step()
        if ensemble.iteration % 100 == 0 or ensemble.iteration == iterations:
            advance(len(ensemble.seeds) * (ensemble.iteration % 100 or 100))
        _record(ensemble, stops, root, hardware)
        if ensemble.iteration in stops or ensemble.iteration % CHECKPOINT_EVERY == 0:
            for index, seed in enumerate(ensemble.seeds):
                stream = io.BytesIO()
                torch.save(ensemble.state(index), stream)
                write_bytes(folder_of(root, ensemble.condition, seed).path / CHECKPOINT, stream.getvalue())


def _record(ensemble: Ensemble, stops: set[int], root: Path, hardware: str) -> None:
    """Measure where it is due; a training killed between a row and its checkpoint comes to the same row
    again, and keeps it."""
    if ensemble.iteration not in stops:
        return
    runs = {seed: folder_of(root, ensemble.condition, seed) for seed in ensemble.seeds}
    missing = {
        seed
        for seed, run in runs.items()
        if ensemble.iteration not in {row["iteration"] for row in run.rows(ROWS)}
    }
    for row in ensemble.measure() if missing else []:
        if row["seed"] in missing:
            runs[row["seed"]].append(ROWS, [{**row, "hardware": hardware}])


def trainings(root: Path) -> list[tuple[Condition, list[Row]]]:
    """Every training under a root with its rows, oldest first, to put tables together from several runs."""
    found = []
    for file in sorted(root.glob(f"*/{FACTS}")):
        facts = json.loads(file.read_text())
        condition = Condition(**{**facts["condition"], "bias": tuple(facts["condition"]["bias"])})
        rows = sorted(RunDir(file.parent).rows(ROWS), key=lambda row: row["iteration"])
        found.append((condition, rows))
    return found
