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
from posbench.files.atomic import Row, digest, write_bytes
from posbench.late import F, torch
from posbench.run.folder import RunDir
from posbench.run.lease import owned
from posbench.schema import Count, NonNegative, Positive, Several, build
from posbench.studies.wu2025 import sequences as data
from posbench.studies.wu2025.network import Attention, AttentionNetwork
from posbench.theory import masks

PAIRS = (
    ("first", "middle"),
    ("first", "last"),
    ("middle", "last"),
)  # gaps above 0: bias to the earlier one
CHUNK = 2000
CHECKPOINT_EVERY = 2000  # test sequences at a time; iterations
TEST_SEEDS = 1_000_000  # the generator seed of seed 0's test sets, drawn on the CPU
ROWS = "rows.jsonl"
CHECKPOINT = "checkpoint.pt"
FACTS = "training.json"


@dataclass(frozen=True, kw_only=True)
class Condition(data.Mixture, Attention):
    """One training condition: data, network, AdamW, and how many ``sequences`` a test set has."""

    batch: Count = 128
    learning_rate: Positive = 1e-3
    weight_decay: NonNegative = 1e-6
    sequences: Several = 10_000

    @classmethod
    def of(cls, fields: Mapping[str, Any], where: str) -> Self:
        """A condition from plain data; ``where`` is its dotted name, for errors."""
        made = build(cls, fields, where)
        bias = made.bias
        tokens = f"at most {made.tokens}, the tokens of a sequence"
        unique = len(set(bias)) == len(bias) and max(bias, default=0) < made.items
        even = made.width % 2 == 0 or made.pe == "none"
        for name, fits, allowed in (
            (
                "bias",
                unique,
                f"different items from 0 to {made.items - 1}, or [] for none",
            ),
            ("window", made.window <= made.tokens, tokens),
            ("prefix", made.prefix <= made.tokens, tokens),
            ("width", even, f"an even number with pe {made.pe}"),
        ):
            if not fits:
                raise UserError(
                    f"{where}.{name}",
                    fields.get(name),
                    allowed,
                    f"set {where}.{name}=...",
                )
        return made

    @property
    def settings(self) -> Row:
        """What tells the conditions of the paper apart, as columns of a table."""
        names = {place: name for name, place in self.places.items()}
        bias = "+".join(names.get(item, f"item {item}") for item in self.bias) or "none"
        span = {"window": f" {self.window}", "prefix": f" {self.prefix}"}.get(
            self.mask, ""
        )
        columns = ("vocabulary", "scale", "std", "mask", "pe", "depth", "residual")
        return {name: getattr(self, name) for name in columns} | {
            "mask": self.mask + span,
            "bias": bias,
        }

    @property
    def name(self) -> str:
        """Readable folder name with the hash of all fields."""
        bias = "bias" + "+".join(map(str, self.bias)) if self.bias else "unbiased"
        network = f"{self.pe}_{self.mask}_d{self.depth}_{'residual' if self.residual else 'plain'}"
        return f"{self.vocabulary}_{network}_{self.scale}_{bias}_{digest(asdict(self))}"


Measured = list[
    tuple[Condition, Row]
]  # rows of :meth:`Ensemble.measure` with their conditions


def marks(until: int) -> list[int]:
    """Iterations of a measurement: 1000, 2000, 4000, ... 10,000, every 4000 from 12,000, and the end."""
    early = [1000, 2000, 4000, 6000, 8000, 10_000]
    return sorted(
        {m for m in [*early, *range(12_000, until + 1, 4000)] if m <= until} | {until}
    )


class Ensemble:
    """Seeds of one condition at the same iteration, trained as one batch."""

    def __init__(
        self, condition: Condition, seeds: Sequence[int], device: torch.device
    ) -> None:
        self.condition = condition
        self.seeds = list(seeds)
        self.iteration = 0
        self.device = device
        # Each seed has its own, so that no draw depends on the other seeds.
        classes, weights, self.data = (
            [torch.Generator(device).manual_seed(3 * seed + kind) for seed in seeds]
            for kind in range(3)
        )
        self.worlds = [data.draw_world(condition, rng) for rng in classes]
        self.network = AttentionNetwork(condition, condition, weights)
        rates = {"lr": condition.learning_rate, "weight_decay": condition.weight_decay}
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), **rates, fused=True
        )

    def step(self) -> None:
        """One iteration: a fresh batch for every seed."""
        size = self.condition.batch
        both = zip(self.worlds, self.data, strict=True)
        drawn = [
            data.training_batch(self.condition, world, size, rng) for world, rng in both
        ]
        # A stack of one would copy the batch.
        tokens = (
            torch.stack([d.tokens for d in drawn])
            if len(drawn) > 1
            else drawn[0].tokens[None]
        )
        logits = self.network(tokens)
        targets = torch.stack([d.targets for d in drawn])
        # A sum over models of means over sequences: each model gets the gradient that it would get alone.
        loss = (
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            / size
        )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.iteration += 1
        # A GPU is asked now and then, and always before a checkpoint (a multiple of these).
        if (self.device.type == "cpu" or self.iteration % 100 == 0) and not bool(
            torch.isfinite(loss)
        ):
            where = f"loss at iteration {self.iteration}"
            hint = "lower learning_rate in study.conditions"
            raise UserError(
                where, float(loss), f"a number, in {self.condition.name}", hint
            )

    def state(self, index: int) -> dict[str, Any]:
        """Everything that one seed needs to go on after a step, without the other seeds."""
        parameters = list(self.network.parameters())
        moments = [self.optimizer.state[p] for p in parameters]
        first, second = (
            [m[name] for m in moments] for name in ("exp_avg", "exp_avg_sq")
        )
        parts = {"parameters": parameters, "first": first, "second": second}
        own = {
            name: [t[index].detach().cpu().clone() for t in part]
            for name, part in parts.items()
        }
        own["data"] = self.data[index].get_state()
        return {"iteration": self.iteration, "device": self.device.type, **own}

    @torch.no_grad()
    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what `state` gave, a state per seed, all of one iteration."""
        self.iteration = states[0]["iteration"]
        step = torch.tensor(float(self.iteration), device=self.device)
        for rng, state in zip(self.data, states, strict=True):
            rng.set_state(state["data"])
        for k, parameter in enumerate(self.network.parameters()):
            parts = (
                [s[name][k] for s in states]
                for name in ("parameters", "first", "second")
            )
            values, first, second = (
                torch.stack(part).to(self.device) for part in parts
            )
            parameter.copy_(values)
            self.optimizer.state[parameter] = {
                "step": step.clone(),
                "exp_avg": first,
                "exp_avg_sq": second,
            }

    @torch.no_grad()
    def measure(self) -> list[Row]:
        """What every seed has learned at this iteration, one row each.

        Loss (nats) and accuracy on the training's data; accuracy on new classes by item (``novel_``) and of
        each paired set (``acc_``); gaps with standard errors (``sd_``); both sink metrics by token.
        """
        found = []
        count = self.condition.sequences
        for index, seed in enumerate(self.seeds):
            # One model on the CPU, so that every device measures alike.
            network = AttentionNetwork(
                self.condition, self.condition, [torch.Generator()]
            )
            for own, shared in zip(
                network.parameters(), self.network.parameters(), strict=True
            ):
                own.copy_(shared[index : index + 1])
            rng = torch.Generator().manual_seed(TEST_SEEDS + seed)
            world = data.World(*(part.cpu() for part in self.worlds[index]))
            sizes = [min(CHUNK, count - start) for start in range(0, count, CHUNK)]
            parts = [self._scores(network, world, rng, size) for size in sizes]
            scores = {
                name: np.concatenate([part[name] for part in parts])
                for name in parts[0]
            }
            row: Row = {"seed": seed, "iteration": self.iteration, "n": count}
            row |= {name: values.mean(0).tolist() for name, values in scores.items()}
            for a, b in PAIRS:
                difference = (
                    scores[f"acc_{a}_{b}"].astype(np.float64) - scores[f"acc_{b}_{a}"]
                )
                row[f"gap_{a}_{b}"] = float(difference.mean())
                row[f"sd_{a}_{b}"] = float(
                    difference.std(ddof=1) / len(difference) ** 0.5
                )
            found.append(row)
        return found

    def _scores(
        self,
        network: AttentionNetwork,
        world: data.World,
        rng: torch.Generator,
        count: int,
    ) -> Row:
        """Scores of each test sequence, [count] or [count, n], by name."""

        def hits(asked: data.Sequences) -> Any:
            return (network(asked.tokens[None])[0].argmax(-1) == asked.targets).numpy()

        condition, places = self.condition, self.condition.places
        seen, mask = (
            data.training_batch(condition, world, count, rng),
            condition.seen(condition.tokens),
        )
        logits = network(seen.tokens[None])[0]
        attention = network.attentions(seen.tokens[None])[0].double().numpy()
        scores: Row = {
            "train_loss": F.cross_entropy(
                logits, seen.targets, reduction="none"
            ).numpy(),
            "train_accuracy": (logits.argmax(-1) == seen.targets).numpy(),
            # Gu et al. count queries from the token on; if the mask is not causal, earlier ones see it too.
            "sink_by_head": np.stack(
                [masks.sink_by_head(np.tril(each)) for each in attention]
            ),
            "sink_by_entry": np.stack(
                [masks.sink_by_entry(each, mask) for each in attention]
            ),
        }
        novel = data.novel_sequences(condition, world, count, rng)
        for name, place in places.items():
            scores[f"novel_{name}"] = hits(data.ask(novel, world, place))
        for right, other in (pair for a, b in PAIRS for pair in ((a, b), (b, a))):
            if condition.test_component == "fresh":
                novel = data.novel_sequences(condition, world, count, rng)
            scores[f"acc_{right}_{other}"] = hits(
                data.ask(novel, world, places[right], places[other])
            )
        return scores

    def train(
        self, iterations: int, root: Path, hardware: str, advance: Callable[[int], None]
    ) -> None:
        """Train up to an iteration, measure where it is due, and write checkpoints."""
        stops = set(marks(iterations))
        start = self.iteration
        runs = {seed: folder_of(root, self.condition, seed) for seed in self.seeds}
        # From the start itself: a row that was damaged is made again where the training stands at it.
        for at in range(start, max(start, iterations) + 1):
            if at > start:
                self.step()
                if at % 100 == 0 or at == iterations:
                    advance(len(runs) * (at % 100 or 100))
            if at in stops:
                # A training killed between row and checkpoint comes to the same row again, and keeps it.
                kept = {
                    s
                    for s, run in runs.items()
                    if at in [row["iteration"] for row in run.rows(ROWS)]
                }
                for row in self.measure() if len(kept) < len(runs) else []:
                    if row["seed"] not in kept:
                        runs[row["seed"]].append(ROWS, [{**row, "hardware": hardware}])
            if at > start and (at in stops or at % CHECKPOINT_EVERY == 0):
                for index, run in enumerate(runs.values()):
                    stream = io.BytesIO()
                    torch.save(self.state(index), stream)
                    write_bytes(run.path / CHECKPOINT, stream.getvalue())


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
    advance: Callable[..., None] = lambda iterations, **how: None,
) -> Measured:
    """Train every seed for that many iterations in all, going on where its folder under the root has got to.

    On a CPU the seeds run one after another; on a GPU those at the same iteration run as one.

    Raises:
        UserError: A checkpoint is of another device, a seed is in other hands, or was measured only later.
    """
    root.mkdir(parents=True, exist_ok=True)
    where = torch.device(device)
    found = Measured()
    groups = dict[int, dict[int, Any]]()
    with ExitStack() as stack:
        for seed in seeds:
            run = folder_of(root, condition, seed)
            stack.enter_context(owned(run.path))
            state = _open(run, condition, seed, where)
            at = state["iteration"] if state else 0
            advance(min(at, iterations), before=True)
            groups.setdefault(seed if where.type == "cpu" else at, {})[seed] = state
        for group in groups.values():
            ensemble = Ensemble(condition, list(group), where)
            if all(group.values()):
                ensemble.load(list(group.values()))
            ensemble.train(iterations, root, hardware, advance)
    for run in (folder_of(root, condition, seed) for seed in seeds):
        rows = [
            (condition, row) for row in run.rows(ROWS) if row["iteration"] <= iterations
        ]
        if not rows:
            allowed = f"1000 or more: {run.path} is trained further, and was measured later only"
            raise UserError(
                "iterations",
                iterations,
                allowed,
                "ask for more, or take another folder",
            )
        found += rows
    return found


def trainings(root: Path) -> Measured:
    """What was measured in all trainings under a root, oldest first within each."""
    found = []
    for file in sorted(root.glob(f"*/{FACTS}")):
        run = RunDir(file.parent)
        condition = build(Condition, run.read_json(FACTS)["condition"], str(file))
        found += [(condition, row) for row in run.rows(ROWS)]
    return found


def _open(
    run: RunDir, condition: Condition, seed: int, device: torch.device
) -> dict[str, Any] | None:
    """Make or repair a training's folder and read its checkpoint; None at the start."""
    run.path.mkdir(exist_ok=True)
    run.repair(ROWS)
    if not (run.path / FACTS).is_file():
        run.write_json(FACTS, {"condition": asdict(condition), "seed": seed})
    file = run.path / CHECKPOINT
    if not file.is_file():
        return None
    if not zipfile.is_zipfile(file):
        raise UserError(
            "checkpoint",
            str(file),
            "a checkpoint of this training",
            "remove the folder",
        )
    state: dict[str, Any] = torch.load(file, weights_only=True)
    if state["device"] != device.type:
        # The generators of a CPU and a GPU draw different numbers: it would no longer be the same training.
        hint = f"go on on {state['device']}, or start anew"
        raise UserError("checkpoint", str(file), f"one made on {device}", hint)
    return state
