"""One training of an embedded model: one seed; a killed one goes on where it was, bit for bit."""

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
from posbench.files.atomic import write_bytes
from posbench.late import F, PreTrainedModel, Tensor, torch

TRAINING_FILE = (
    "training.json"  # next to the weights: seed, recipe, training curve, wall time
)
REPORT_EVERY = 100  # steps between two rows of the curve, and two checkpoints
PROBE_BINS = 8  # of the gold position, whose accuracy is measured after each stage


def batch_for(
    recipe: Recipe, stage: TrainStage, step: int, rng: torch.Generator
) -> Batch:
    """The training batch of one step of a stage."""
    progress, (low, high) = step / stage.steps, stage.pairs
    if progress < stage.grow_until:
        high = max(
            low,
            round(
                stage.grow_from + (high - stage.grow_from) * progress / stage.grow_until
            ),
        )
    pairs = int(torch.randint(low, high + 1, (), generator=rng))
    mix = 1.0 if progress < stage.uniform_until else stage.mix
    contexts = max(recipe.min_contexts, recipe.batch_questions // (pairs + 6))
    prior = end_prior(pairs, recipe.end_scale, mix)
    return draw_batch(contexts, pairs, recipe.questions, prior, stage.noise, rng)


def learning_rate(recipe: Recipe, stage: TrainStage, step: int) -> float:
    """Warm-up, plateau, linear fall."""
    fall = (stage.steps - step) / (stage.steps * (1 - recipe.constant_until))
    return stage.lr * min(
        (step + 1) / recipe.warmup, 1.0, recipe.final_lr + (1 - recipe.final_lr) * fall
    )


def batch_loss(
    logits: Tensor, batch: Batch, closing_weight: float
) -> tuple[Tensor, Tensor]:
    """Loss in nats, and share of right values, from the logits of :func:`block_logits`."""
    values = batch.blocks[:, :, 3]
    loss = F.cross_entropy(logits[:, :, 0].flatten(0, 1), values.flatten())
    for slot, piece in ((1, QUOTE), (2, END)):
        target = torch.full_like(values, VOCAB[piece]).flatten()
        loss = loss + closing_weight * F.cross_entropy(
            logits[:, :, slot].flatten(0, 1), target
        )
    return loss, (logits[:, :, 0].argmax(-1) == values).float().mean()


@torch.no_grad()
def probe(model: PreTrainedModel, pairs: int, seed: int) -> list[float]:
    """Accuracy per bin of the gold position on clean questions with uniform gold; for the record only."""
    rng = torch.Generator().manual_seed(seed)
    batches = [
        draw_batch(8, pairs, 64, torch.full((pairs,), 1 / pairs), 0.0, rng)
        for _ in range(6)
    ]
    hits = torch.cat(
        [
            block_logits(model, b)[:, :, 0].argmax(-1) == b.blocks[:, :, 3]
            for b in batches
        ]
    )
    bins = torch.cat([b.gold * PROBE_BINS // pairs for b in batches])
    return [
        round(float(hits[bins == index].float().mean()), 3)
        for index in range(PROBE_BINS)
    ]


def train(
    recipe: Recipe,
    seed: int,
    checkpoint: Path | None = None,
    advance: Callable[..., None] = lambda n, **how: None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train from scratch, or on from a checkpoint. Deterministic for a machine and a number of threads.

    ``checkpoint`` keeps where the training stands, every :data:`REPORT_EVERY` steps; ``advance`` is told how
    many steps are done, and which were ``before``. Returns the model in evaluation mode, and the contents of
    ``training.json``.
    """
    model = build_model(recipe, torch.Generator().manual_seed(2 * seed))
    rng = torch.Generator().manual_seed(2 * seed + 1)
    log: dict[str, Any] = {
        "seed": seed,
        "seconds": 0.0,
        "threads": torch.get_num_threads(),
    }
    log |= {
        "torch": str(torch.__version__),
        "recipe": asdict(recipe),
        "curves": [],
        "probes": {},
    }
    state = (
        torch.load(checkpoint, weights_only=True)
        if checkpoint and checkpoint.is_file()
        else {}
    )
    if state:
        model.load_state_dict(state["model"])
        rng.set_state(state["data"])
        log = state["log"]
    parts = [
        (stage, first)
        for stage in recipe.stages
        for first in range(0, stage.steps, REPORT_EVERY)
    ]
    began = time.monotonic() - log["seconds"]
    done = len(log["curves"])
    advance(
        sum(min(REPORT_EVERY, stage.steps - first) for stage, first in parts[:done]),
        before=True,
    )
    for stage, first in parts[done:]:
        last = min(first + REPORT_EVERY, stage.steps)
        if state or first == 0:
            optimizer = _optimizer(model, recipe, stage)
        if state and first:
            optimizer.load_state_dict(state["optimizer"])
        state = {}
        losses = []
        hits = []
        for step in range(first, last):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(recipe, stage, step)
            batch = batch_for(recipe, stage, step, rng)
            loss, accuracy = batch_loss(
                block_logits(model, batch), batch, recipe.closing_weight
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                hint = "lower the learning rate of the recipe"
                raise UserError(
                    f"loss at step {step} of stage {stage.name}",
                    losses[-1],
                    "a number",
                    hint,
                )
            hits.append(float(accuracy))
        means = {
            "loss": round(sum(losses) / len(losses), 4),
            "accuracy": round(sum(hits) / len(hits), 4),
        }
        log["curves"].append({"stage": stage.name, "step": last, **means})
        if last == stage.steps:
            log["probes"][stage.name] = probe(
                model, stage.pairs[1], seed=10_000_000 + seed
            )
        log["seconds"] = round(time.monotonic() - began, 1)
        if checkpoint:
            kept = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "log": log,
            }
            torch.save({**kept, "data": rng.get_state()}, buffer := io.BytesIO())
            write_bytes(checkpoint, buffer.getvalue())
        advance(last - first)
    return model.eval(), log


def _optimizer(
    model: PreTrainedModel, recipe: Recipe, stage: TrainStage
) -> torch.optim.AdamW:
    """The optimizer of one stage; vectors do not decay."""
    matrices, vectors = (
        [p for p in model.parameters() if (p.ndim > 1) == many]
        for many in (True, False)
    )
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=stage.lr, betas=recipe.betas, weight_decay=recipe.weight_decay
    )


def save(model: PreTrainedModel, log: dict[str, Any], out: Path) -> None:
    """Write model, tokenizer and ``training.json`` to the new folder ``out``, all or nothing (OSError)."""
    work = out.with_name(f".{out.name}.new")
    shutil.rmtree(work, ignore_errors=True)
    tokens = {"eos_token_id": VOCAB[END], "pad_token_id": VOCAB[END]}
    model.generation_config = GenerationConfig(do_sample=False, **tokens)
    model.save_pretrained(work)
    build_tokenizer().save_pretrained(work)
    (work / TRAINING_FILE).write_text(json.dumps(log, indent=1) + "\n")
    for file in work.iterdir():
        file.chmod(0o644)  # safetensors files come readable by their owner only
    work.rename(out)
