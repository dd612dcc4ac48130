"""One training of an embedded model: one seed; a killed one resumes bit for bit."""

from __future__ import annotations

import io
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from posbench.embedded.data import Batch, draw_batch, end_prior
from posbench.embedded.network import block_logits, build_model
from posbench.embedded.recipe import Recipe, TrainStage
from posbench.embedded.tokenizer import END, QUOTE, VOCAB, build_tokenizer
from posbench.errors import UserError
from posbench.files.atomic import Row, write_bytes
from posbench.late import F, PreTrainedModel, Tensor, torch

TRAINING_FILE = "training.json"
"""Next to the weights: seed, recipe, training curve, wall time."""
REPORT_EVERY = 100  # steps between two rows of the curve, and two checkpoints
PROBE_BINS = 8  # of the gold position, whose accuracy is measured after each stage
PROBE_SEEDS = 10_000_000  # the generator seed of seed 0's probes
VALUE_TOKEN = 3  # index of the value in a question block


def batch_for(
    recipe: Recipe, stage: TrainStage, step: int, rng: torch.Generator
) -> Batch:
    """The training batch of one step of a stage."""
    progress = step / stage.steps
    low, high = stage.pairs
    if progress < stage.grow_until:
        growth = (high - stage.grow_from) * progress / stage.grow_until
        high = max(low, round(stage.grow_from + growth))
    pairs = int(torch.randint(low, high + 1, (), generator=rng))
    mix = 1.0 if progress < stage.uniform_until else stage.mix
    contexts = max(recipe.min_contexts, recipe.batch_questions // (pairs + 6))
    prior = end_prior(pairs, recipe.end_scale, mix)
    return draw_batch(contexts, pairs, recipe.questions, prior, stage.noise, rng)


def learning_rate(recipe: Recipe, stage: TrainStage, step: int) -> float:
    """Warm-up, plateau, linear fall."""
    rise = (step + 1) / recipe.warmup
    left = (stage.steps - step) / (stage.steps * (1 - recipe.constant_until))
    fall = recipe.final_lr + (1 - recipe.final_lr) * left
    return stage.lr * min(rise, 1.0, fall)


def batch_loss(
    logits: Tensor, batch: Batch, closing_weight: float
) -> tuple[Tensor, Tensor]:
    """Loss and accuracy of a batch.

    Args:
        logits: Of :func:`block_logits`, [contexts, questions, 3, vocabulary].
        batch: The batch.
        closing_weight: Weight of the closing quote's and the end token's loss.

    Returns:
        Loss in nats, and share of right values, both scalars.
    """
    values = batch.blocks[:, :, VALUE_TOKEN]
    loss = F.cross_entropy(logits[:, :, 0].flatten(0, 1), values.flatten())
    for index, piece in ((1, QUOTE), (2, END)):
        target = torch.full_like(values, VOCAB[piece]).flatten()
        closing_loss = F.cross_entropy(logits[:, :, index].flatten(0, 1), target)
        loss = loss + closing_weight * closing_loss
    return loss, _hits(logits, batch).float().mean()


def _hits(logits: Tensor, batch: Batch) -> Tensor:
    """Whether the value of each question is right, [contexts, questions]."""
    return logits[:, :, 0].argmax(-1) == batch.blocks[:, :, VALUE_TOKEN]


@torch.no_grad()
def probe(model: PreTrainedModel, pairs: int, seed: int) -> list[float]:
    """Accuracy per bin of the gold position on clean questions with uniform gold; for the record only."""
    rng = torch.Generator().manual_seed(seed)
    prior = torch.full((pairs,), 1 / pairs)
    batches = [draw_batch(8, pairs, 64, prior, 0.0, rng) for _ in range(6)]
    hits = torch.cat([_hits(block_logits(model, batch), batch) for batch in batches])
    bins = torch.cat([batch.gold * PROBE_BINS // pairs for batch in batches])
    accuracies = [hits[bins == index].float().mean() for index in range(PROBE_BINS)]
    return [round(float(accuracy), 3) for accuracy in accuracies]


def train(
    recipe: Recipe,
    seed: int,
    checkpoint: Path | None = None,
    advance: Callable[..., None] = lambda n, before=False: None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train from scratch, or on from a checkpoint. Deterministic for a machine and a number of threads.

    Args:
        recipe: The recipe.
        seed: Seed of weights and batches.
        checkpoint: File that is read if it is there, and written every :data:`REPORT_EVERY` steps.
        advance: Called with numbers of finished steps; ``before=True`` for steps from the checkpoint.

    Returns:
        The model in evaluation mode, and the contents of ``training.json``.

    Raises:
        UserError: The loss is NaN or infinite.
    """
    model = build_model(recipe, torch.Generator().manual_seed(2 * seed))
    rng = torch.Generator().manual_seed(2 * seed + 1)
    log: dict[str, Any] = {
        "seed": seed,
        "seconds": 0.0,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "recipe": asdict(recipe),
        "curves": [],
        "probes": {},
    }
    state: dict[str, Any] = {}
    if checkpoint and checkpoint.is_file():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        rng.set_state(state["data"])
        log = state["log"]
    began = time.monotonic() - log["seconds"]
    intervals = [
        (stage, range(first, min(first + REPORT_EVERY, stage.steps)))
        for stage in recipe.stages
        for first in range(0, stage.steps, REPORT_EVERY)
    ]
    done = len(log["curves"])
    advance(sum(len(steps) for _, steps in intervals[:done]), before=True)
    for stage, steps in intervals[done:]:
        if state or steps.start == 0:
            optimizer = _optimizer(model, recipe, stage)
        if state and steps.start:
            optimizer.load_state_dict(state["optimizer"])
        state = {}
        means = _train_steps(model, optimizer, recipe, stage, steps, rng)
        log["curves"].append({"stage": stage.name, "step": steps.stop, **means})
        if steps.stop == stage.steps:
            accuracies = probe(model, stage.pairs[1], seed=PROBE_SEEDS + seed)
            log["probes"][stage.name] = accuracies
        log["seconds"] = round(time.monotonic() - began, 1)
        if checkpoint:
            new_state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "log": log,
                "data": rng.get_state(),
            }
            stream = io.BytesIO()
            torch.save(new_state, stream)
            write_bytes(checkpoint, stream.getvalue())
        advance(len(steps))
    return model.eval(), log


def _train_steps(
    model: PreTrainedModel,
    optimizer: torch.optim.AdamW,
    recipe: Recipe,
    stage: TrainStage,
    steps: range,
    rng: torch.Generator,
) -> Row:
    """Train some steps of a stage in place; mean loss and accuracy over them."""
    losses = []
    accuracies = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, stage, step)
        batch = batch_for(recipe, stage, step, rng)
        logits = block_logits(model, batch)
        loss, accuracy = batch_loss(logits, batch, recipe.closing_weight)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        loss_value = float(loss.detach())
        if not math.isfinite(loss_value):
            where = f"loss at step {step} of stage {stage.name}"
            hint = "lower the learning rate of the recipe"
            raise UserError(where, loss_value, "a number", hint)
        losses.append(loss_value)
        accuracies.append(float(accuracy))
    return {
        "loss": round(sum(losses) / len(losses), 4),
        "accuracy": round(sum(accuracies) / len(accuracies), 4),
    }


def _optimizer(
    model: PreTrainedModel, recipe: Recipe, stage: TrainStage
) -> torch.optim.AdamW:
    """The optimizer of one stage; vectors do not decay."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=stage.lr, betas=recipe.betas, weight_decay=recipe.weight_decay
    )


def save(model: PreTrainedModel, log: dict[str, Any], out: Path) -> None:
    """Write model, tokenizer and ``training.json`` to the new folder ``out``, all or nothing (OSError)."""
    work = out.with_name(f".{out.name}.new")
    shutil.rmtree(work, ignore_errors=True)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=VOCAB[END], pad_token_id=VOCAB[END]
    )
    model.save_pretrained(work)
    build_tokenizer().save_pretrained(work)
    (work / TRAINING_FILE).write_text(json.dumps(log, indent=1) + "\n")
    for file in work.iterdir():
        file.chmod(0o644)  # safetensors files come readable by their owner only
    work.rename(out)
