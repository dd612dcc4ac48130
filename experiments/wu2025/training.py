"""Training and measuring the attention network of Wu et al. 2025: resumable, one folder a seed.

The learning rate is constant and every generator's state is in the checkpoint: a training that was killed, or
is asked for more iterations later, goes on bit for bit as if it had never stopped.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from posbench.errors import UserError
from posbench.files.atomic import Row, short_hash, write_bytes
from posbench.late import F, Tensor, torch
from posbench.run.folder import RunDir
from posbench.run.lease import owning
from posbench.schema import Count, NonNegative, Positive, Several, build
from posbench.theory import masks
from wu2025 import sequences as data
from wu2025.network import Attention, AttentionNetwork

PAIRS = (("first", "middle"), ("first", "last"), ("middle", "last"))
"""Items whose accuracies are compared; a gap above 0 is a bias to the earlier one."""
OMEGA_DRAWS = 5  # draws of the test sets with fresh omegas
TEST_BATCH = 2000  # test sequences at a time
CHECKPOINT_EVERY = 2000  # iterations
REPORT_EVERY = 100  # iterations between two reports of progress, and two looks at the loss on a GPU
TEST_SEED_OFFSET = (
    1_000_000  # the generator seed of seed 0's test sets, drawn on the CPU
)
FRESH_SEED_OFFSET = 2_000_000  # the generator seed of the test sets with fresh omegas
ROWS_FILE = "rows.jsonl"
CHECKPOINT = "checkpoint.pt"
FACTS = "training.json"


@dataclass(frozen=True, kw_only=True)
class Condition(data.Mixture, Attention):
    """One training condition: data, network, AdamW, test sets.

    Attributes:
        batch: Sequences of an iteration.
        learning_rate: Constant learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        sequences: Sequences of a test set.
    """

    batch: Count = 128
    learning_rate: Positive = 1e-3
    weight_decay: NonNegative = 1e-6
    sequences: Several = 10_000

    @classmethod
    def of(cls, fields: Mapping[str, Any], where: str) -> Self:
        """Build and check a condition from plain data.

        Args:
            fields: Values by field name.
            where: Dotted name of the condition, for errors.

        Raises:
            UserError: A field is unknown or does not fit.
        """
        condition = build(cls, fields, where)
        bias = condition.bias
        items = condition.items
        bias_fits = len(set(bias)) == len(bias) and max(bias, default=0) < items
        width_fits = condition.width % 2 == 0 or condition.pe == "none"
        tokens = f"at most {condition.tokens}, the tokens of a sequence"
        checks = {
            "bias": (
                bias_fits,
                f"different items from 0 to {items - 1}, or [] for none",
            ),
            "window": (condition.window <= condition.tokens, tokens),
            "prefix": (condition.prefix <= condition.tokens, tokens),
            "width": (width_fits, f"an even number with pe {condition.pe}"),
        }
        for name, (fits, allowed) in checks.items():
            if not fits:
                field = f"{where}.{name}"
                raise UserError(field, fields.get(name), allowed, f"set {field}=...")
        return condition

    @property
    def settings(self) -> Row:
        """The columns of a table that distinguish the conditions of the paper."""
        names = {item: name for name, item in self.places.items()}
        bias = [names.get(item, f"item {item}") for item in sorted(self.bias)]
        spans = {"window": self.window, "prefix": self.prefix}
        mask: str = self.mask
        if mask in spans:
            mask = f"{mask} {spans[mask]}"
        return {
            "vocabulary": self.vocabulary,
            "scale": self.scale,
            "std": self.std,
            "mask": mask,
            "pe": self.pe,
            "depth": self.depth,
            "residual": self.residual,
            "bias": "+".join(bias) or "none",
        }

    @property
    def changed(self) -> Row:
        """The fields outside these columns that differ from the paper's; sizes of test sets do not count."""
        in_tables = {*self.settings, "window", "prefix", "sequences"}
        usual = asdict(type(self)())
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in in_tables and value != usual[name]
        }

    @property
    def name(self) -> str:
        """Readable folder name with the hash of all fields."""
        bias = "bias" + "+".join(map(str, self.bias)) if self.bias else "unbiased"
        stream = "residual" if self.residual else "plain"
        network = f"{self.pe}_{self.mask}_d{self.depth}_{stream}"
        return f"{self.vocabulary}_{network}_{self.scale}_{bias}_{short_hash(asdict(self))}"


Measured = list[tuple[Condition, Row]]
"""Rows of :meth:`Ensemble.measure` with their conditions."""


def measured_iterations(iterations: int) -> list[int]:
    """Iterations of a measurement: 1000, 2000, 4000, ... 10,000, every 4000 from 12,000, and the end."""
    early = [1000, 2000, 4000, 6000, 8000, 10_000]
    regular = [*early, *range(12_000, iterations + 1, 4000)]
    return sorted(
        {iteration for iteration in regular if iteration < iterations} | {iterations}
    )


class Ensemble:
    """Seeds of one condition at the same iteration, trained as one batch.

    Attributes:
        worlds: Classes and labels of each seed.
        data: Generator of each seed's batches.
        network: The networks of all seeds.
    """

    def __init__(
        self, condition: Condition, seeds: Sequence[int], device: torch.device
    ) -> None:
        self.condition = condition
        self.seeds = list(seeds)
        self.iteration = 0
        self.device = device
        # Three generators for each seed, so that no draw depends on the other seeds.
        world_rngs = self._generators(0)
        weight_rngs = self._generators(1)
        self.data = self._generators(2)
        self.worlds = [data.draw_world(condition, rng) for rng in world_rngs]
        self.network = AttentionNetwork(condition, condition, weight_rngs)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(),
            lr=condition.learning_rate,
            weight_decay=condition.weight_decay,
            fused=True,
        )

    def _generators(self, stream: int) -> list[torch.Generator]:
        """A generator for each seed: streams 0, 1, 2 are for classes, weights and batches."""
        seeds = (3 * seed + stream for seed in self.seeds)
        return [torch.Generator(self.device).manual_seed(seed) for seed in seeds]

    def step(self) -> None:
        """Train for one iteration, on a new batch for every seed.

        Raises:
            UserError: The loss is NaN or infinite.
        """
        size = self.condition.batch
        batches = [
            data.training_batch(self.condition, world, size, rng)
            for world, rng in zip(self.worlds, self.data, strict=True)
        ]
        # A stack of one would copy the batch.
        tokens = batches[0].tokens[None]
        if len(batches) > 1:
            tokens = torch.stack([batch.tokens for batch in batches])
        targets = torch.stack([batch.targets for batch in batches])
        logits = self.network(tokens).flatten(0, 1)
        # A sum over models of means over sequences: each model gets the gradient that it would get alone.
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / size
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.iteration += 1
        # A GPU is asked now and then, and always before a checkpoint (a multiple of these).
        checks_loss = self.device.type == "cpu" or self.iteration % REPORT_EVERY == 0
        if checks_loss and not bool(torch.isfinite(loss)):
            where = f"loss at iteration {self.iteration}"
            allowed = f"a number, in {self.condition.name}"
            hint = "lower learning_rate in study.conditions"
            raise UserError(where, float(loss), allowed, hint)

    def state(self, index: int) -> dict[str, Any]:
        """Checkpoint of one seed: everything that it needs to go on after a step, without the other seeds."""
        parameters = list(self.network.parameters())
        moments = [self.optimizer.state[parameter] for parameter in parameters]
        return {
            "iteration": self.iteration,
            "device": self.device.type,
            "parameters": _member(parameters, index),
            "first": _member([moment["exp_avg"] for moment in moments], index),
            "second": _member([moment["exp_avg_sq"] for moment in moments], index),
            "data": self.data[index].get_state(),
        }

    @torch.no_grad()
    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Resume from checkpoints of :meth:`state`, one for each seed, all of the same iteration."""
        self.iteration = states[0]["iteration"]
        step = torch.tensor(float(self.iteration), device=self.device)
        for rng, state in zip(self.data, states, strict=True):
            rng.set_state(state["data"])
        for index, parameter in enumerate(self.network.parameters()):
            parameter.copy_(self._stack(states, "parameters", index))
            self.optimizer.state[parameter] = {
                "step": step.clone(),
                "exp_avg": self._stack(states, "first", index),
                "exp_avg_sq": self._stack(states, "second", index),
            }

    def _stack(
        self, states: Sequence[Mapping[str, Any]], key: str, index: int
    ) -> Tensor:
        """Tensor number ``index`` under a key of all checkpoints, [M, ...]."""
        return torch.stack([state[key][index] for state in states]).to(self.device)

    @torch.no_grad()
    def measure(self) -> list[Row]:
        """Measure the learning of every seed at this iteration.

        Returns:
            A row for each seed: loss (nats) and accuracy on the training's data; accuracy on new classes by
            item (``novel_``) and of each paired set (``acc_``); gaps with standard errors (``sd_``); both sink
            metrics by token. For the ``fixed`` vocabulary also ``fresh_omega``, the accuracies of
            `OMEGA_DRAWS` draws of test sets with other omegas than the training's.
        """
        rows = []
        count = self.condition.sequences
        for index, seed in enumerate(self.seeds):
            network = self._network_on_cpu(index)
            world = data.ClassWorld(*(tensor.cpu() for tensor in self.worlds[index]))
            rng = torch.Generator().manual_seed(TEST_SEED_OFFSET + seed)
            chunks = [
                self._scores(network, world, rng, min(TEST_BATCH, count - start))
                for start in range(0, count, TEST_BATCH)
            ]
            scores = {
                name: np.concatenate([chunk[name] for chunk in chunks])
                for name in chunks[0]
            }
            row: Row = {"seed": seed, "iteration": self.iteration, "n": count}
            for name, values in scores.items():
                row[name] = values.mean(0).tolist()
            for a, b in PAIRS:
                earlier = scores[f"acc_{a}_{b}"].astype(np.float64)
                gap = earlier - scores[f"acc_{b}_{a}"]
                row[f"gap_{a}_{b}"] = float(gap.mean())
                row[f"sd_{a}_{b}"] = float(gap.std(ddof=1) / count**0.5)
            if self.condition.vocabulary == "fixed":
                rng = torch.Generator().manual_seed(FRESH_SEED_OFFSET + seed)
                row["fresh_omega"] = [
                    self._fresh_omega_accuracies(network, world, rng)
                    for _ in range(OMEGA_DRAWS)
                ]
            rows.append(row)
        return rows

    def _network_on_cpu(self, index: int) -> AttentionNetwork:
        """The network of one seed, alone and on the CPU, so that every device measures alike."""
        rng = torch.Generator()  # its weights are replaced
        network = AttentionNetwork(self.condition, self.condition, [rng])
        for parameter, stacked in zip(
            network.parameters(), self.network.parameters(), strict=True
        ):
            parameter.copy_(stacked[index : index + 1])
        return network

    def _scores(
        self,
        network: AttentionNetwork,
        world: data.ClassWorld,
        rng: torch.Generator,
        count: int,
    ) -> Row:
        """Score a network on test sequences.

        Args:
            network: One network.
            world: Its classes and labels.
            rng: Generator of the test sequences.
            count: Number of sequences.

        Returns:
            Scores of each sequence by name, [count], sink metrics [count, n].
        """
        condition = self.condition
        batch = data.training_batch(condition, world, count, rng)
        mask = condition.seen(condition.tokens)
        logits = network(batch.tokens[None])[0]
        loss = F.cross_entropy(logits, batch.targets, reduction="none")
        # [count, depth, n, n]
        attention = network.attentions(batch.tokens[None])[0].double().numpy()
        scores: Row = {
            "train_loss": loss.numpy(),
            "train_accuracy": (logits.argmax(-1) == batch.targets).numpy(),
            # Gu et al. count queries from the token on; if the mask is not causal, earlier ones see it too.
            "sink_by_head": np.stack(
                [masks.sink_share_by_head(np.tril(weights)) for weights in attention]
            ),
            "sink_by_entry": np.stack(
                [masks.sink_share_by_entry(weights, mask) for weights in attention]
            ),
        }
        novel = data.novel_sequences(condition, world, count, rng)
        places = condition.places
        for name, item in places.items():
            scores[f"novel_{name}"] = _hits(network, data.add_query(novel, world, item))
        for pair in PAIRS:
            for right, copy in (pair, pair[::-1]):
                sequences = data.add_query(novel, world, places[right], places[copy])
                scores[f"acc_{right}_{copy}"] = _hits(network, sequences)
        return scores

    def _fresh_omega_accuracies(
        self, network: AttentionNetwork, world: data.ClassWorld, rng: torch.Generator
    ) -> dict[str, float]:
        """Accuracies on test sets with fresh omegas, drawn once as the official program draws them.

        Its first set, first-middle, has an omega of its own; its other five share one. All draws together have
        the same number of sequences as the sets with the training's omega.

        Args:
            network: One network.
            world: Its classes and labels.
            rng: Generator of omegas and test sequences.

        Returns:
            Accuracy on new classes by item (``novel_``, with the five's omega) and of each paired set (``acc_``).
        """
        condition = self.condition
        count = -(-condition.sequences // OMEGA_DRAWS)
        first_set = world._replace(shared=data.draw_omega(condition, rng))
        other_sets = world._replace(shared=data.draw_omega(condition, rng))
        accuracies = {}
        places = condition.places
        for name, item in places.items():
            novel = data.novel_sequences(condition, other_sets, count, rng)
            hits = _hits(network, data.add_query(novel, other_sets, item))
            accuracies[f"novel_{name}"] = float(hits.mean())
        for pair in PAIRS:
            for right, copy in (pair, pair[::-1]):
                test_world = other_sets
                if (right, copy) == PAIRS[0]:
                    test_world = first_set
                novel = data.novel_sequences(condition, test_world, count, rng)
                sequences = data.add_query(
                    novel, test_world, places[right], places[copy]
                )
                hits = _hits(network, sequences)
                accuracies[f"acc_{right}_{copy}"] = float(hits.mean())
        return accuracies

    def train(
        self, iterations: int, root: Path, hardware: str, advance: Callable[[int], None]
    ) -> None:
        """Train up to an iteration; write rows where a measurement is due, and checkpoints.

        Args:
            iterations: The iteration to reach, counted from the start of the training.
            root: Folder of all trainings.
            hardware: Name of this machine, for the rows.
            advance: Called with numbers of iterations done, summed over seeds.
        """
        stops = set(measured_iterations(iterations))
        runs = {
            seed: training_folder(root, self.condition, seed) for seed in self.seeds
        }
        # A damaged row is made again if the training is at its iteration.
        if self.iteration in stops:
            self._write_missing_rows(runs, hardware)
        for iteration in range(self.iteration + 1, iterations + 1):
            self.step()
            if iteration % REPORT_EVERY == 0:
                advance(len(runs) * REPORT_EVERY)
            elif iteration == iterations:
                advance(len(runs) * (iteration % REPORT_EVERY))
            if iteration in stops:
                self._write_missing_rows(runs, hardware)
            if iteration in stops or iteration % CHECKPOINT_EVERY == 0:
                self._write_checkpoints(runs)

    def _write_missing_rows(self, runs: Mapping[int, RunDir], hardware: str) -> None:
        """Measure, and append the rows of the seeds that have none at this iteration.

        A training killed between row and checkpoint comes to the same row again, and keeps it.
        """
        missing = {
            seed
            for seed, run in runs.items()
            if self.iteration not in [row["iteration"] for row in run.rows(ROWS_FILE)]
        }
        if not missing:
            return
        for row in self.measure():
            if row["seed"] in missing:
                runs[row["seed"]].append(ROWS_FILE, [{**row, "hardware": hardware}])

    def _write_checkpoints(self, runs: Mapping[int, RunDir]) -> None:
        for index, run in enumerate(runs.values()):
            stream = io.BytesIO()
            torch.save(self.state(index), stream)
            write_bytes(run.path / CHECKPOINT, stream.getvalue())


def _member(tensors: Sequence[Tensor], index: int) -> list[Tensor]:
    """Copies on the CPU of one seed's part of tensors [M, ...]."""
    return [tensor[index].detach().cpu().clone() for tensor in tensors]


def _hits(network: AttentionNetwork, sequences: data.Sequences) -> Any:
    """Whether a network names the right label of each sequence, [count]."""
    logits = network(sequences.tokens[None])[0]
    return (logits.argmax(-1) == sequences.targets).numpy()


def training_folder(root: Path, condition: Condition, seed: int) -> RunDir:
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
    advance: Callable[..., None] = lambda iterations, before=False: None,
) -> Measured:
    """Train seeds of a condition, each on from its checkpoint if it has one.

    On a CPU the seeds run one after another; on a GPU those at the same iteration run as one.

    Args:
        condition: The condition to train.
        seeds: Seeds of the trainings.
        iterations: Iterations in all, those before the checkpoint included.
        root: Folder of all trainings.
        hardware: Name of this machine, for the rows.
        device: Torch device.
        advance: Called with numbers of finished iterations; ``before=True`` for iterations from a checkpoint.

    Returns:
        The rows measured up to that iteration.

    Raises:
        UserError: A checkpoint is of another device, a seed is in other hands, or was measured only later.
    """
    root.mkdir(parents=True, exist_ok=True)
    torch_device = torch.device(device)
    measured: Measured = []
    # Checkpoint (None at the start) of each seed, in groups that train as one.
    groups: dict[int, dict[int, Any]] = {}
    with ExitStack() as stack:
        for seed in seeds:
            run = training_folder(root, condition, seed)
            stack.enter_context(owning(run.path))
            state = _open(run, condition, seed, torch_device)
            iteration = state["iteration"] if state else 0
            advance(min(iteration, iterations), before=True)
            group = seed if torch_device.type == "cpu" else iteration
            groups.setdefault(group, {})[seed] = state
        for states in groups.values():
            ensemble = Ensemble(condition, list(states), torch_device)
            if all(states.values()):
                ensemble.load(list(states.values()))
            ensemble.train(iterations, root, hardware, advance)
    for seed in seeds:
        run = training_folder(root, condition, seed)
        rows = [row for row in run.rows(ROWS_FILE) if row["iteration"] <= iterations]
        if not rows:
            allowed = f"1000 or more: {run.path} was trained further and has no earlier measurement"
            hint = "set study.iterations to 1000 or more, or choose another folder"
            raise UserError("iterations", iterations, allowed, hint)
        measured += [(condition, row) for row in rows]
    return measured


def read_trainings(root: Path) -> Measured:
    """The measurements of all trainings under a root, oldest first within each."""
    measured: Measured = []
    for file in sorted(root.glob(f"*/{FACTS}")):
        run = RunDir(file.parent)
        condition = build(Condition, run.read_json(FACTS)["condition"], str(file))
        measured += [(condition, row) for row in run.rows(ROWS_FILE)]
    return measured


def _open(
    run: RunDir, condition: Condition, seed: int, device: torch.device
) -> dict[str, Any] | None:
    """Make or repair a training's folder and read its checkpoint; None at the start."""
    run.path.mkdir(exist_ok=True)
    run.repair(ROWS_FILE)
    if not (run.path / FACTS).is_file():
        run.write_json(FACTS, {"condition": asdict(condition), "seed": seed})
    file = run.path / CHECKPOINT
    if not file.is_file():
        return None
    if not zipfile.is_zipfile(file):
        allowed = "a checkpoint of this training"
        raise UserError("checkpoint", str(file), allowed, "remove the folder")
    state: dict[str, Any] = torch.load(file, weights_only=True)
    if state["device"] != device.type:
        # The generators of a CPU and a GPU draw different numbers: it would no longer be the same training.
        hint = f"resume on {state['device']}, or choose another folder"
        raise UserError("checkpoint", str(file), f"a checkpoint made on {device}", hint)
    return state
