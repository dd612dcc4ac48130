"""What the method does inside: attention of the last prompt token to every item, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from posbench.files.atomic import Row, write_csv
from posbench.model.lm import LM, Encoded, batches
from posbench.report import tables
from posbench.run.base import UNMODIFIED, Run, complete, encode, share_unmodified
from posbench.tasks import Example

FILE = "attention.jsonl"
COLUMNS = ("model", "method", "task", "gold_position", "layer", "pair", "attention", "n")
"""Columns of ``attention.csv``: attention is the mean weight per token of pair ``pair`` (0-based)."""


def item_tokens(encoded: Encoded, example: Example) -> list[tuple[int, int]]:
    """First token of every item and the one behind its last; (0, 0) where the prompt lost the item.

    A token that an item shares with its neighbour belongs to both.
    """
    starts, ends = (np.array(side) for side in zip(*encoded.offsets, strict=True))
    spans = []
    for first, last in example.items:
        tokens = np.flatnonzero((starts < last) & (ends > first))
        spans.append((int(tokens[0]), int(tokens[-1]) + 1) if len(tokens) else (0, 0))
    return spans


@torch.inference_mode()
def attention_to_items(
    lm: LM, encoded: Sequence[Encoded], examples: Sequence[Example], *, heads: bool = False
) -> Tensor:
    """Mean attention weight of the last token to each token of each item, Yu et al. 2025, Eq. 4.

    Args:
        lm: The model, inside a method's block where one is meant.
        encoded: The tokenised prompts.
        examples: Their examples, with equally many items each.
        heads: Keep the heads apart.

    Returns:
        [B, L, N] for B prompts, L layers and N items: averaged over heads and over each item's tokens; [B, L,
        H, N] with ``heads``.
    """
    inputs = lm.pad([e.ids for e in encoded])
    pool = item_pool(encoded, examples, inputs["input_ids"].shape[1])
    with lm.last_attention() as weights:
        lm.model(**inputs, use_cache=False, logits_to_keep=1)
        # A method may run a prompt as several rows next to each other; their weights are averaged as heads
        # are.
        rows = [weights[layer].unflatten(0, (len(examples), -1)).mean(1) for layer in range(lm.layers)]
        kept = [(row if heads else row.mean(1, keepdim=True)).float().cpu() for row in rows]
    found = pooled(kept, pool)
    return found if heads else found[:, :, 0]


def item_pool(encoded: Sequence[Encoded], examples: Sequence[Example], width: int) -> Tensor:
    """One over an item's number of tokens at its tokens and 0 elsewhere, [B, N, width], for prompts padded on
    the left."""
    pool = torch.zeros(len(examples), len(examples[0].items), width)
    for row, (code, example) in enumerate(zip(encoded, examples, strict=True)):
        for item, (first, last) in enumerate(item_tokens(code, example)):
            pad = width - len(code.ids)
            pool[row, item, pad + first : pad + last] = 1 / max(last - first, 1)
    return pool


def pooled(weights: Sequence[Tensor], pool: Tensor) -> Tensor:
    """Weights [B, H, T'] of each layer, averaged over the tokens of each item: [B, L, H, N] from the pool [B,
    N, T]."""
    # A sliding-window layer may hold the newest keys only: the others have no weight.
    layers = [F.pad(row, (pool.shape[-1] - row.shape[-1], 0)) for row in weights]
    return torch.einsum("lbht,bit->blhi", torch.stack(layers), pool)


def run(run: Run) -> None:
    """Measure the attention to every item and write ``attention.csv``."""
    task, runtime = run.config.task, run.config.runtime
    placed = [e for e in run.evaluation if e.gold_position is not None and e.items]
    examples = [
        example
        for _, group in groupby(
            sorted(placed, key=lambda e: e.gold_position or 0), key=lambda e: e.gold_position
        )
        for example in list(group)[: runtime.intervene_examples]
    ]
    if not examples:
        run.console.print(f"intervene: task {task.name} has no gold positions, nothing to measure")
        return
    encoded = {e.id: encode(run.lm, task, e) for e in examples}
    shortened = tables.shortened({"id": name, "dropped": code.dropped} for name, code in encoded.items())
    if shortened:
        run.console.print(f"intervene: {shortened}")
    plan = batches([len(encoded[e.id].ids) for e in examples], runtime.batch_size, runtime.batch_tokens)
    unmodified = share_unmodified(run, FILE, runtime.intervene_examples)
    frames = []
    for name, method in run.methods().items():
        with method.applied(run.lm) as lm:

            def compute(batch: Sequence[Example]) -> list[Row]:
                found = attention_to_items(lm, [encoded[e.id] for e in batch], batch)
                return [
                    {"attention": [[float(f"{x:.6g}") for x in layer] for layer in rows]}
                    for rows in found.tolist()
                ]

            rows = complete(
                run,
                FILE,
                f"intervene {name}",
                [[examples[i] for i in group] for group in plan],
                lambda e: {"method": name, "id": e.id},
                compute,
            )
        if name == UNMODIFIED:
            run.out.mark(FILE, key=unmodified, done=True)
        frames.append(_averaged(run, name, {row["id"]: np.array(row["attention"]) for row in rows}, examples))
    write_csv(run.out.path / "attention.csv", pd.concat(frames, ignore_index=True))


def _averaged(
    run: Run, method: str, measured: dict[str, np.ndarray], examples: Sequence[Example]
) -> pd.DataFrame:
    """Average over the examples of each gold position, as long rows."""
    parts = []
    for position, group in groupby(examples, key=lambda e: e.gold_position):
        values = np.stack([measured[e.id] for e in group])
        mean, n = values.mean(0), len(values)
        layer, pair = np.indices(mean.shape)
        parts.append(
            pd.DataFrame(
                {
                    "model": run.config.model.name,
                    "method": method,
                    "task": run.config.task.name,
                    "gold_position": position,
                    "layer": layer.ravel(),
                    "pair": pair.ravel(),
                    "attention": mean.ravel(),
                    "n": n,
                }
            )
        )
    return pd.concat(parts, ignore_index=True)[list(COLUMNS)]
