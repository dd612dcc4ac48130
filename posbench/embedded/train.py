"""One training of the tiny model: one process, one thread, one seed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from posbench.embedded.data import Batch, draw_batch, end_prior
from posbench.embedded.network import block_logits, build_model
from posbench.embedded.recipe import Recipe, TrainStage
from posbench.embedded.tokenizer import END, QUOTE, VOCAB, build_tokenizer

TRAINING_FILE = "training.json"
"""File of a trained directory with the recipe, the seed, the curves and the wall time."""
REPORT_EVERY = 100
"""Steps between two progress lines."""
PROBE_BINS = 8
"""Bins of the gold position in the accuracy curves."""


@dataclass(frozen=True)
class Trained:
    """Result of `train`."""

    model: PreTrainedModel
    """The model in evaluation mode."""
    log: dict[str, object]
    """Contents of ``training.json``."""


def batch_for(recipe: Recipe, stage: TrainStage, step: int, rng: torch.Generator) -> Batch:
    """The training batch of one step of a stage."""
    progress = step / stage.steps
    low, high = stage.pairs
    if progress < stage.grow_until:
        high = max(low, round(stage.grow_from + (high - stage.grow_from) * progress / stage.grow_until))
    pairs = int(torch.randint(low, high + 1, (), generator=rng))
    mix = 1.0 if progress < stage.uniform_until else stage.mix
    contexts = max(recipe.min_contexts, recipe.batch_questions // (pairs + 6))
    prior = end_prior(pairs, recipe.end_scale, mix)
    return draw_batch(contexts, pairs, recipe.questions, prior, stage.noise, rng)


def learning_rate(recipe: Recipe, stage: TrainStage, step: int) -> float:
    """Warm-up, plateau, linear fall."""
    fall = (stage.steps - step) / (stage.steps * (1 - recipe.constant_until))
    factor = min((step + 1) / recipe.warmup, 1.0, recipe.final_lr + (1 - recipe.final_lr) * fall)
    return stage.lr * factor


def batch_loss(logits: Tensor, batch: Batch, closing_weight: float) -> tuple[Tensor, Tensor]:
    """Loss and share of right values; ``logits`` as `posbench.embedded.network.block_logits` returns them."""
    values = batch.blocks[:, :, 3]
    loss = F.cross_entropy(logits[:, :, 0].flatten(0, 1), values.flatten())
    for slot, piece in ((1, QUOTE), (2, END)):
        target = torch.full_like(values, VOCAB[piece]).flatten()
        loss = loss + closing_weight * F.cross_entropy(logits[:, :, slot].flatten(0, 1), target)
    return loss, (logits[:, :, 0].argmax(-1) == values).float().mean()


@torch.no_grad()
def probe(model: PreTrainedModel, pairs: int, seed: int, contexts: int = 48) -> list[float]:
    """Accuracy per bin of the gold position on clean questions with uniform gold, for the training curves
    only."""
    rng = torch.Generator().manual_seed(seed)
    right, count = torch.zeros(PROBE_BINS), torch.zeros(PROBE_BINS)
    for _ in range(contexts // 8):
        batch = draw_batch(8, pairs, 64, torch.full((pairs,), 1 / pairs), 0.0, rng)
        hit = (block_logits(model, batch)[:, :, 0].argmax(-1) == batch.blocks[:, :, 3]).float().flatten()
        where = (batch.gold * PROBE_BINS // pairs).flatten()
        right.index_add_(0, where, hit)
        count.index_add_(0, where, torch.ones_like(hit))
    return [round(float(x), 3) for x in right / count]


def train(recipe: Recipe, seed: int, *, say: bool = True) -> Trained:
    """Train from scratch. Deterministic for a machine and thread count.

    Args:
        recipe: all constants.
        seed: seeds the weights and the data.
        say: print a progress line every `REPORT_EVERY` steps.
    """
    init_rng = torch.Generator().manual_seed(2 * seed)
    data_rng = torch.Generator().manual_seed(2 * seed + 1)
    model = build_model(recipe, init_rng)
    curves: list[dict[str, object]] = []
    probes: dict[str, list[float]] = {}
    began, done = time.monotonic(), 0
    for stage in recipe.stages:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=stage.lr, betas=recipe.betas)
        losses, hits = [], []
        for step in range(stage.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(recipe, stage, step)
            batch = batch_for(recipe, stage, step, data_rng)
            loss, accuracy = batch_loss(block_logits(model, batch), batch, recipe.closing_weight)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            losses.append(float(loss.detach()))
            hits.append(float(accuracy))
            done += 1
            if (step + 1) % REPORT_EVERY == 0 or step + 1 == stage.steps:
                row = {
                    "stage": stage.name,
                    "step": step + 1,
                    "loss": round(sum(losses) / len(losses), 4),
                    "accuracy": round(sum(hits) / len(hits), 4),
                }
                curves.append(row)
                losses, hits = [], []
                if say:
                    left = (time.monotonic() - began) / done * (recipe.total_steps - done)
                    print(
                        f"seed {seed} {stage.name} {step + 1}/{stage.steps} loss {row['loss']:.3f} "
                        f"accuracy {row['accuracy']:.3f} ({left / 60:.1f} min left)",
                        flush=True,
                    )
        probes[stage.name] = probe(model, stage.pairs[1], seed=10_000_000 + seed)
        if say:
            print(f"seed {seed} after {stage.name}: {probes[stage.name]}", flush=True)
    log = {
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "recipe": recipe.as_dict(),
        "curves": curves,
        "probes": probes,
    }
    return Trained(model.eval(), log)


def save(trained: Trained, out: Path) -> None:
    """Write the model, its tokenizer and ``training.json`` to the directory ``out``, all or nothing.

    Raises:
        FileExistsError: ``out`` exists.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists; choose another directory or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        model = trained.model
        model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=VOCAB[END], pad_token_id=VOCAB[END]
        )
        model.save_pretrained(work)
        build_tokenizer().save_pretrained(work)
        (work / TRAINING_FILE).write_text(json.dumps(trained.log, indent=1) + "\n")
        # The temporary folder and safetensors files come readable by their owner only.
        work.chmod(0o755)
        for file in work.iterdir():
            file.chmod(0o644)
        os.rename(work, out)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
