"""Behind RoPE on trained models (Figure 3): inner products between tokens, from the embeddings to the scores
of layer 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from torch import Tensor, nn

from posbench.errors import UserError
from posbench.model import families
from posbench.model.lm import LM
from posbench.pipeline.config import Config
from posbench.plots.base import PAGE, new_figure, styled
from posbench.run.base import Run
from posbench.studies.base import Finding
from posbench.studies.behind_rope.causal_mask import Array, draw_map
from posbench.studies.behind_rope.score_map import (
    MeanMap,
    Sampled,
    by_sample,
    check_interface,
    describe,
    long_map,
    read_scores,
    stacked,
)

PANELS = {
    "a": "LN(X)",
    "b": "scores of layer 1",
    "c": "A V",
    "d": "A V W_O",
    "e": "(d) + X",
    "f": "LN of (e)",
    "g": "output of block 1",
    "h": "input of attention 2",
    "i": "scores of layer 2",
}
"""The paper's nine intermediates of the first two layers."""


@dataclass(frozen=True, kw_only=True)
class Gram(Sampled):
    """Inner products of nine intermediates of the first two layers (Behind RoPE, Section 4.2, Figure 3)."""

    def check(self, config: Config, lm: LM | None) -> None:
        """As :meth:`Sampled.check`, and refuse a family whose blocks have other parts."""
        super().check(config, lm)
        assert lm is not None
        first_block(lm)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``panels`` (panel, query, key, product) and ``facts``, a row for each panel.

        ``facts``: panel, diagonal and below (means of the diagonal and of what is below it), falling (rank
        correlation of the diagonal with the position, sign turned), rising (the same of product and key, mean
        over queries, token 1 left out), and what :func:`posbench.studies.behind_rope.score_map.describe`
        says.
        """
        plan = self.batches(run)
        with run.progress("samples", self.samples) as advance:
            found = gram_panels(run.lm, plan, advance)
        long = [
            long_map({"product": each.mean}, self.cells).assign(panel=name) for name, each in found.items()
        ]
        rows = []
        for name, each in found.items():
            mean = each.mean
            rising = [spearmanr(mean[i, 1:i], np.arange(i - 1)).statistic for i in range(4, len(mean))]
            own = {
                "panel": name,
                "diagonal": np.diagonal(mean).mean(),
                "below": mean[np.tril_indices(len(mean), -1)].mean(),
                "falling": -spearmanr(np.diagonal(mean), np.arange(len(mean))).statistic,
                "rising": np.mean(rising),
            }
            rows.append({**own, **describe(each)})
        columns = ["panel", "query", "key", "product"]
        return {"panels": pd.concat(long, ignore_index=True)[columns], "facts": pd.DataFrame(rows)}

    def figures(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[Figure, str]]:
        """The nine panels."""
        values = stacked(tables["panels"], "product", by="panel")
        last = self.tokens if self.tokens > self.cells else None
        caption = f"Behind RoPE, Figure 3: mean inner products, {self.source}. Colours from the 1 % to the 99 % quantile."
        return {"gram": (panels_figure(values, last), caption)}

    def findings(self, tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        """What the paper reads off the panels of its model without position embedding."""
        facts = tables["facts"].set_index("panel")
        n, share = int(facts["n"].iloc[0]), (facts["below"] / facts["diagonal"]).abs()
        found = [
            Finding(
                claim="(a) after the first norm tokens are nearly orthogonal (Behind RoPE, Section 4.2)",
                statistic="mean product below the diagonal over mean product on it, size",
                value=share["a"],
                n=n,
                verdict=_holds(share["a"] < 0.1),
                note="10 % is our bound; the paper says close to zero",
            ),
            Finding(
                claim="(b) W_Q and W_K raise that share",
                statistic="the share in (b) over the share in (a)",
                value=share["b"] / share["a"],
                n=n,
                verdict=_holds(share["b"] > share["a"]),
            ),
            Finding(
                claim="(c) the diagonal of A V falls with the position, as h' does",
                statistic="rank correlation of the diagonal with the position, sign turned",
                value=facts["falling"]["c"],
                n=self.tokens,
                verdict=_holds(facts["falling"]["c"] > 0.9),
            ),
        ]
        for panel, words in (
            ("f", "(f) after the norm products rise with the key"),
            ("i", "(i) the scores of layer 2 rise with the key"),
        ):
            row = facts.loc[panel]
            found.append(
                Finding(
                    claim=words,
                    statistic="nearest quarter of keys minus the farthest, mean product, key 1 left out",
                    value=row["near"],
                    low=row["near_low"],
                    high=row["near_high"],
                    n=n,
                    verdict=_holds(row["near_low"] > 0),
                    note=f"rank correlation of product and key {row['rising']:.2f}, mean over queries",
                )
            )
        turned, back = facts.loc["g"], facts.loc["h"]
        found.append(
            Finding(
                claim="(g) after the feedforward block the pattern is turned round, and (h) the next norm turns it back",
                statistic="nearest quarter of keys minus the farthest, mean product of (g), key 1 left out",
                value=turned["near"],
                low=turned["near_low"],
                high=turned["near_high"],
                n=n,
                verdict=_holds(turned["near_high"] < 0 < back["near_low"]),
                note=f"(h): {back['near']:.3g} [{back['near_low']:.3g}, {back['near_high']:.3g}]",
            )
        )
        return found


def _holds(does: bool) -> Any:
    return "holds" if does else "does not hold"


def first_block(lm: LM) -> nn.Module:
    """The first decoder layer.

    Raises:
        UserError: The family has no ``o_proj`` and ``post_attention_layernorm`` in its layers, too few
            layers, or cannot be listened to.
    """
    check_interface(lm)
    attentions = families.attention_modules(lm.model)
    blocks = [
        module for module in lm.model.modules() if any(child is attentions[0] for child in module.children())
    ]
    if (
        len(attentions) < 2
        or not hasattr(blocks[0], "post_attention_layernorm")
        or not hasattr(attentions[0], "o_proj")
    ):
        raise UserError(
            "model",
            lm.name,
            "two layers or more with o_proj and post_attention_layernorm (Llama, Qwen2, Mistral, SmolLM3, ...)",
            "study=score_map needs neither",
        )
    return blocks[0]


@torch.inference_mode()
def gram_panels(
    lm: LM, plan: Sequence[Sequence[Sequence[int]]], advance: Callable[[int], None] = lambda n: None
) -> dict[str, MeanMap]:
    """Mean inner products between tokens of nine intermediates of the first two layers; see :data:`PANELS`.

    Args:
        lm: The model, inside a method's block where one is meant; see
            :func:`posbench.studies.behind_rope.score_map.score_maps`.
        plan: Batches of token rows, all of one length.
        advance: Told the size of each batch that is done.

    Raises:
        UserError: See :func:`first_block`.
    """
    block, attentions = first_block(lm), families.attention_modules(lm.model)
    found = {name: MeanMap(len(plan[0][0])) for name in PANELS}
    kept: dict[str, Tensor] = {}
    size = 0

    def add(name: str, states: Tensor) -> None:
        rows = by_sample(states[:, None], size)
        found[name].add(rows, rows)

    def scored(layer: int, query: Tensor, key: Tensor, factor: float) -> None:
        if layer < 2:
            found["bi"[layer]].add(query, key, factor)

    def entering(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs: add(name, families.attention_input(args, kwargs))

    def keep_input(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept["X"] = families.attention_input(args, kwargs)

    def left(_: Any, __: Any, out: Any) -> None:
        add("d", out[0])
        add("e", out[0] + kept["X"])

    first: Any = attentions[0]
    norm: Any = block.post_attention_layernorm
    with ExitStack() as stack:
        for handle in (
            block.register_forward_pre_hook(keep_input, with_kwargs=True),
            first.register_forward_pre_hook(entering("a"), with_kwargs=True),
            first.o_proj.register_forward_pre_hook(lambda _, args: add("c", args[0])),
            first.register_forward_hook(left),
            norm.register_forward_hook(lambda _, __, out: add("f", out)),
            block.register_forward_hook(
                lambda _, __, out: add("g", out[0] if isinstance(out, tuple) else out)
            ),
            attentions[1].register_forward_pre_hook(entering("h"), with_kwargs=True),
        ):
            stack.callback(handle.remove)
        for batch in plan:
            size = len(batch)
            read_scores(lm, batch, scored)
            advance(size)
    return found


@styled
def panels_figure(panels: Array, last: int | None = None) -> Figure:
    """Behind RoPE, Figure 3: the nine intermediates [9, cells, cells], each with its own colours."""
    figure = new_figure(PAGE, 6.2)
    for axes, values, (name, words) in zip(figure.subplots(3, 3).flat, panels, PANELS.items(), strict=True):
        draw_map(figure, axes, values, last)
        axes.set_title(f"({name}) {words}")
    return figure
