"""Does attention cause the answer? The last prompt token's weight on one item is multiplied, and accuracy is
read off."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.model import families
from posbench.model.hooks import attending
from posbench.model.attention import last_row
from posbench.model.encode import Encoded
from posbench.model.lm import LM
from posbench.pipeline.config import Config
from posbench.pipeline.stages.evaluate import plan, replies
from posbench.pipeline.stages.intervene import item_pool, pooled
from posbench.plots.base import (
    ATTENTION_LABEL,
    DEPTH_LABEL,
    PAGE,
    from_zero,
    legend_below,
    line_style,
    new_figure,
    percent_axes,
    styled,
)
from posbench.run.base import Run, complete, encode
from posbench.stats.tables import mean_interval
from posbench.studies.base import Finding, Study
from posbench.studies.gold_positions import RESAMPLES, by_length, facts, need_items, need_layers, placed
from posbench.tasks import Example, Task

Mode = Literal["none", "item", "gold", "other"]
MODES: tuple[Mode, ...] = ("none", "item", "gold", "other")
WORDS = {
    "none": "unmodified",
    "item": "one place, whatever it holds",
    "gold": "the gold item",
    "other": "a random other item (control)",
}
OUTPUT = {"mpt": "out_proj", "falcon": "dense"}
"""Output projection of the attention modules that compute everything themselves."""


@dataclass(frozen=True, kw_only=True)
class Doubling(Study):
    """Attention weight on one item, multiplied in the forward pass: what it does to attention and accuracy.

    Three changes beside the unmodified model: of the item at one place whatever it holds (``item``: Figure
    7), of the gold item at every position (``gold``), and of an item drawn among the others (``other``, the
    negative control).

    Only the last prompt token's row changes, in every layer unless ``layers`` says otherwise; later layers
    see the consequences. Of a reply the first token therefore depends on the change directly, and further
    ones through what came before, unless ``generated`` has their rows changed too.

    Source: Yu et al. 2025, Appendix D.2, Figure 7. The paper states neither layers nor renormalisation.

    Attributes:
        examples: Examples per gold position at most; None: all of the task.
        item: Place of the changed item as a depth (0 first, 1 last), rounded down to an item as gold
            positions are; the paper's 25th of 50 is 0.5.
        factor: What its weight is multiplied with.
        renormalise: Whether the row sums to 1 again. Otherwise the head's output grows by the added weight.
        layers: Layers, 0-based; None: all.
        generated: Whether rows of generated tokens are changed too.
        seed: Seed of the control's items.
    """

    examples: int | None = 100
    item: float = 0.5
    factor: float = 2.0
    renormalise: bool = True
    layers: tuple[int, ...] | None = None
    generated: bool = False
    seed: int = 0

    def check(self, config: Config, lm: LM | None) -> None:
        """Refuse a task without gold positions, layers that the model lacks, and numbers that mean
        nothing."""
        assert lm is not None
        need_items(config.task, self.examples)
        need_layers(lm, "layers", self.layers)
        if not 0 <= self.item <= 1:
            raise UserError("study.item", self.item, "a depth from 0 to 1", "set study.item=0.5")
        if self.factor <= 0:
            raise UserError("study.factor", self.factor, "a number above 0", "set study.factor=2")
        encode(lm, config.task, max(config.task.evaluation(), key=lambda e: len(e.prompt)))

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``examples`` (mode, id, gold_position, depth, target, attention, score) and ``doubling``,
        their means.

        Attention is the mean weight per token of the gold item after the change, over heads and over the
        layers used here.
        """
        task = run.config.task
        chosen = placed(task, self.examples)
        encoded = {e.id: encode(run.lm, task, e) for e in chosen}
        order = plan(task, chosen, encoded, run.config.runtime)
        shown = list(range(run.lm.layers)) if self.layers is None else list(self.layers)
        parts = []
        for mode in MODES:
            targets = {e.id: self.target(mode, e) for e in chosen}

            def compute(batch: Sequence[Example]) -> list[Row]:
                answers, weights = self.answered(run.lm, task, batch, encoded, [targets[e.id] for e in batch])  # noqa: B023
                gold = [int(e.gold_position or 0) for e in batch]
                seen = [float(weights[i, shown, g].mean()) for i, g in enumerate(gold)]
                return [
                    {
                        "output": row["output"],
                        "score": task.score(e, str(row["output"]))[task.metric],
                        "attention": float(f"{value:.6g}"),
                    }
                    for e, row, value in zip(batch, answers, seen, strict=True)
                ]

            rows = complete(
                run,
                "doubling.jsonl",
                f"changed: {WORDS[mode].split(',')[0]}",
                [[chosen[i] for i in group] for group in order],
                lambda e: {"mode": mode, "id": e.id},
                compute,
            )
            by_id = {row["id"]: row for row in rows}
            frame = facts(chosen).assign(mode=mode, target=[targets[e.id] for e in chosen])
            for column in ("attention", "score"):
                frame[column] = [float(by_id[e.id][column]) for e in chosen]
            parts.append(frame)
        examples = pd.concat(parts, ignore_index=True)
        means = [by_length(part).assign(mode=mode) for mode, part in examples.groupby("mode", sort=False)]
        return {"doubling": pd.concat(means, ignore_index=True), "examples": examples}

    def target(self, mode: Mode, example: Example) -> int | None:
        """Item whose weight is changed in an example; None in the unmodified model."""
        gold, count = int(example.gold_position or 0), len(example.items)
        if mode == "none":
            return None
        if mode == "gold":
            return gold
        if mode == "item":
            return int(self.item * (count - 1))
        others = [item for item in range(count) if item != gold]
        return random.Random(f"posbench doubling {self.seed} {example.id}").choice(others)

    def answered(
        self,
        lm: LM,
        task: Task,
        batch: Sequence[Example],
        encoded: Mapping[str, Encoded],
        targets: Sequence[int | None],
    ) -> tuple[list[Row], Tensor]:
        """Replies under the change, and the weights of the last prompt token [B, L, N] after it, averaged
        over heads."""
        codes = [encoded[e.id] for e in batch]
        width = max(len(code.ids) for code in codes)
        pool = item_pool(codes, batch, width)
        tokens = torch.zeros(len(batch), width)
        for row, target in enumerate(targets):
            if target is not None:
                tokens[row] = (pool[row, target] > 0).float()
        chosen = range(lm.layers) if self.layers is None else self.layers
        with multiplied(
            lm, tokens, self.factor, layers=chosen, renormalise=self.renormalise, generated=self.generated
        ) as weights:
            answers = replies(lm, task, batch, encoded, {})
        kept = [
            weights[layer].unflatten(0, (len(batch), -1)).mean((1, 2)).float().cpu()
            for layer in range(lm.layers)
        ]
        return answers, pooled([row[:, None] for row in kept], pool)[:, :, 0]

    def _place(self, examples: pd.DataFrame) -> int:
        """The item that mode ``item`` changes."""
        return int(self.item * (int(examples["items"].iloc[0]) - 1))

    def figures(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[Figure, str]]:
        """Attention to the gold item and score over the gold position, a line for each change."""
        place = self._place(tables["examples"])
        renormalised = "" if self.renormalise else ", not renormalised"
        layers = "all layers" if self.layers is None else f"layers {', '.join(map(str, self.layers))}"
        caption = (
            f"The last prompt token's weight on one item times {self.factor:g}{renormalised}: on item {place} (dotted line), on "
            f"the gold item, or on another one. Attention after the change: mean over heads of {layers}. Bands: 95 %."
        )
        return {"doubling": (doubling_figure(tables["doubling"], place), caption)}

    def findings(self, tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        """Whether accuracy rises where the gold item gets more weight, and does not where another one
        does."""
        keys, place = ["id", "cluster", "gold_position"], self._place(tables["examples"])
        wide = tables["examples"].pivot(index=keys, columns="mode", values="score").reset_index()
        there = wide[wide["gold_position"] == place]
        words = f"score with the weight of {{}} times {self.factor:g}, minus the unmodified model's, in points, {{}}"
        found = [
            _gain(there, "item", AT_ITEM, words.format(f"item {place}", "where it is the gold item"), +1)
            if len(there)
            else Finding(
                claim=AT_ITEM,
                statistic=words.format(f"item {place}", "where it is the gold item"),
                value=float("nan"),
                n=0,
                verdict="not testable here",
                note="no gold position stands there: see study.item and task.positions",
            ),
            _gain(wide, "gold", EVERYWHERE, words.format("the gold item", "all positions"), +1),
            _gain(wide, "other", CONTROL, words.format("a random other item", "all positions"), 0),
            _gain(
                wide,
                "gold",
                SPECIFIC,
                "the same of the gold item minus the same of the other item, in points",
                +1,
                "other",
            ),
        ]
        return found


AT_ITEM = "C1: more attention to the gold item where it stands raises its accuracy (Yu et al. 2025, Appendix D.2, Figure 7)"
EVERYWHERE = (
    "C1: accuracy depends on attention to the gold item (Yu et al. 2025, Appendix D.2), at every position"
)
CONTROL = "Negative control: more attention to another item does not raise accuracy"
SPECIFIC = "C1: it is the gold item's attention that counts, not a change as such (control subtracted)"


def _gain(
    wide: pd.DataFrame, mode: str, claim: str, statistic: str, sign: int, base: str = "none"
) -> Finding:
    """Paired difference of a change to the unmodified model, or to another change, in points."""
    values = 100 * (wide[mode] - wide[base]).to_numpy(dtype=np.float64)
    low, high = mean_interval(values, list(wide["cluster"].astype(str)), resamples=RESAMPLES, seed=0)
    holds = low > 0 if sign else low <= 0
    scores = ", ".join(f"{name} {100 * wide[name].mean():.1f} %" for name in (base, mode))
    return Finding(
        claim=claim,
        statistic=statistic,
        value=float(values.mean()),
        low=low,
        high=high,
        n=len(values),
        verdict="holds" if holds else "does not hold",
        note=scores,
    )


@contextmanager
def multiplied(
    lm: LM,
    tokens: Tensor,
    factor: float,
    *,
    layers: Sequence[int] | range,
    renormalise: bool = True,
    generated: bool = False,
) -> Iterator[dict[int, Tensor]]:
    """Multiply the last prompt token's attention weights on some tokens, for one batch: a forward, or a
    generation.

    With a the weights of the row, v the values, o = sum a_j v_j and S the tokens, the head's output becomes o
    + (factor - 1) sum_S a_j v_j; with ``renormalise`` divided by 1 + (factor - 1) sum_S a_j, which equals
    log(factor) added to the scores of S. Only that row is computed a second time, so memory is linear in the
    prompt and any kernel will do.

    Args:
        lm: The model.
        tokens: 1 at the tokens S and 0 elsewhere, [B, T], left padding included; rows of equal length or
            longest first, the order in which :meth:`LM.generate` runs them.
        factor: The factor, above 0.
        layers: Layers to change, 0-based.
        renormalise: Whether the weights sum to 1 again.
        generated: Whether rows of generated tokens, one at a time, are changed too.

    Yields:
        Dict layer -> weights of the last prompt token after the change, [B, H, T'], for all layers, as in
        :meth:`LM.last_attention`.

    Raises:
        ValueError: Families outside the library's attention functions ran without a cache, which holds their
            values.

    Source: Yu et al. 2025, Appendix D.2; the reading of last row and renormalisation is ours.
    """
    chosen, prompt = set(layers), tokens.shape[1]
    weights: dict[int, Tensor] = {}
    seen: dict[int, int] = {}

    def change(layer: int, row: Tensor, value: Tensor, queries: int) -> Tensor | None:
        """What the output of the last row gains, [B, H, d], from its weights [B, H, T'] and values [B, G, T',
        d]."""
        seen[layer] = seen.get(layer, 0) + queries
        if seen[layer] < prompt or (seen[layer] > prompt and not generated):
            return None
        if layer not in chosen:
            weights.setdefault(layer, row)
            return None
        # Generated tokens lie behind the prompt, and a sliding window holds the newest keys only.
        part = F.pad(tokens, (0, seen[layer] - prompt))[:, -row.shape[-1] :].to(row)
        # A method may run a prompt as several rows next to each other.
        part = part.repeat_interleave(len(row) // len(part), dim=0)[:, None]
        values = repeat_kv(value, row.shape[1] // value.shape[1]).to(row)
        before, extra = row[:, :, None] @ values, (factor - 1) * (row * part)[:, :, None] @ values
        total = (
            1 + (factor - 1) * (row * part).sum(-1, keepdim=True)
            if renormalise
            else torch.ones_like(row[..., :1])
        )
        weights.setdefault(layer, row * (1 + (factor - 1) * part) / total)
        return ((before + extra) / total[..., None] - before)[:, :, 0]

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        following: Any,
        **rest: Any,
    ) -> Any:
        output, *others = following(module, query, key, value, mask, **rest)
        gain = change(module.layer_idx, last_row(query, key, mask, **rest), value, query.shape[2])
        if gain is not None:
            output = output.clone()
            output[:, -1] += gain.to(output)
        return (output, *others)

    def hook(
        module: nn.Module, args: Any, kwargs: dict[str, Any], output: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        cache = kwargs.get("past_key_values") or kwargs.get("layer_past")
        if cache is None:
            raise ValueError("this family's values are read from its cache: run it with use_cache=True")
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        gain = change(layer, output[1][:, :, -1], cache.layers[layer].values, output[0].shape[1])
        if gain is None:
            return output
        project = getattr(module, OUTPUT[lm.model.config.model_type])
        moved = output[0].clone()
        moved[:, -1] += project(gain.flatten(1).to(moved)) - project(
            torch.zeros_like(gain.flatten(1)).to(moved)
        )
        return (moved, *output[1:])

    with ExitStack() as stack:
        if families.family_of(lm.model).interface:
            stack.enter_context(attending(lm.model, attend))
        else:
            stack.enter_context(lm.eager())
            for module in families.attention_modules(lm.model):
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield weights


@styled
def doubling_figure(table: pd.DataFrame, item: int) -> Figure:
    """Attention to the gold item and score over the gold position, a line for each change; a dotted line at
    the changed place."""
    figure = new_figure(PAGE, 2.6)
    left, right = figure.subplots(1, 2)
    for index, (mode, line) in enumerate(table.groupby("mode", sort=False)):
        line = line.sort_values("depth")
        style = line_style(max(index - 1, 0), unmodified=mode == "none")
        for axes, column, scale in ((left, "attention", 1), (right, "score", 100)):
            axes.plot(100 * line["depth"], scale * line[column], label=WORDS[str(mode)], **style)
            low, high = (scale * line[f"{column}_{end}"] for end in ("low", "high"))
            axes.fill_between(100 * line["depth"], low, high, color=style["color"], alpha=0.12, linewidth=0)
    left.set(xlabel=DEPTH_LABEL, ylabel=ATTENTION_LABEL)
    from_zero(left)
    percent_axes(right, "score (%)")
    for axes in (left, right):
        axes.axvline(
            100 * item / max(int(table["items"].iloc[0]) - 1, 1),
            color="0.5",
            linestyle=":",
            linewidth=1,
            zorder=0,
        )
    legend_below(figure, left)
    return figure
