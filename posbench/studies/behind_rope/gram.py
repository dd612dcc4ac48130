"""Behind RoPE on trained models (Figure 3): inner products between tokens in the first two layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from posbench.errors import UserError
from posbench.late import Tensor, inference_mode, pd
from posbench.measure.scores import MeanMap, by_sample, check_interface, read_scores
from posbench.model import families
from posbench.model.lm import LM
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.stats.correlation import spearman
from posbench.stats.findings import Finding, estimate, joint
from posbench.studies.base import Tables
from posbench.studies.behind_rope.maps import long_table, maps_figure, stacked
from posbench.studies.behind_rope.score_map import Sampled

PANELS = {
    "a": "LN(X)",
    "b": "scores of the first layer",
    "c": "A V",
    "d": "A V W_O",
    "e": "(d) + X",
    "f": "LN of (e)",
    "g": "output of the first block",
    "h": "input of the second attention",
    "i": "scores of the second layer",
}
"""The paper's nine intermediates of the first two layers."""


@dataclass(frozen=True, kw_only=True)
class Gram(Sampled):
    """Inner products of nine intermediates of the first two layers (Behind RoPE, Section 4.2, Figure 3)."""

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        super().check(run)
        first_block(run.lm)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``panels`` (panel, query, key, product) and ``facts`` (:meth:`MeanMap.facts` by panel).

        ``facts`` has also diagonal and below (means of the diagonal and of what is below it), falling (rank
        correlation of the diagonal with the token, sign turned), rising (the same of product and key, mean
        over queries, token 1 left out).
        """
        with run.progress("samples", self.samples) as advance:
            found = gram_panels(
                run.lm, run.prompts.batches_by_length(self.rows(run.lm), len), advance
            )
        rows = []
        tokens = np.arange(self.tokens)
        for panel, each in found.items():
            mean = each.mean
            rising = [
                spearman(mean[i, 1:i], tokens[1:i]) for i in range(4, self.tokens)
            ]
            row = {"panel": panel, "diagonal": np.diagonal(mean).mean()}
            row["below"] = mean[np.tril_indices(self.tokens, -1)].mean()
            row["falling"] = -spearman(np.diagonal(mean), tokens)
            rows.append({**row, "rising": np.mean(rising), **each.facts()})
        products = {panel: {"product": each.mean} for panel, each in found.items()}
        return {
            "panels": long_table("panel", products, self.cells),
            "facts": pd.DataFrame(rows),
        }

    def figures(self, tables: Tables) -> Drawn:
        """The nine panels."""
        values = stacked(tables["panels"], "product", by="panel")
        maps = [
            (f"({panel}) {PANELS[panel]}", each)
            for panel, each in zip(PANELS, values, strict=True)
        ]
        figure = maps_figure(
            [("", dict(maps[first : first + 3])) for first in (0, 3, 6)], self.last
        )
        words = f"mean inner products, {self.source}. Colours from the 1 % to the 99 % quantile."
        return {"gram": (figure, f"Behind RoPE, Figure 3: {words}")}

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """What the paper reads off the panels of its model without position embedding."""
        facts = tables["facts"].set_index("panel")
        n = int(facts["n"].iloc[0])
        share = (facts["below"] / facts["diagonal"]).abs()
        near = {panel: estimate(row, "near") for panel, row in facts.iterrows()}
        claim = "(a) after the first norm tokens are nearly orthogonal (Behind RoPE, Section 4.2)"
        size = "mean product below the diagonal over mean product on it, size"
        ours = "10 % is our bound"
        mean = f"no interval: one model, a mean over {n} samples"
        note = f"{ours}; the paper: close to 0; {mean}"
        more = share["b"] / share["a"]
        found = [Finding.that(share["a"] < 0.1, claim, size, (share["a"], n), note)]
        claim = "(b) W_Q and W_K raise that share"
        size = "the share in (b) over the share in (a)"
        found.append(Finding.that(more > 1, claim, size, (more, n), mean))
        claim = "(c) the diagonal of A V falls with the token, as h' does"
        falls = facts["falling"]["c"]
        size = "rank correlation of the diagonal with the token, sign turned"
        found.append(Finding.that(falls > 0.9, claim, size, (falls, self.tokens), mean))
        size = (
            "nearest quarter of keys minus the farthest, mean product, key 1 left out"
        )
        for panel, words in (
            ("f", "after the norm products"),
            ("i", "the scores of the second layer"),
        ):
            note = f"rank correlation of product and key {facts['rising'][panel]:.2f}, mean over queries"
            found.append(
                Finding.above(
                    f"({panel}) {words} rise with the key", size, near[panel], note=note
                )
            )
        claim = "(g) the feedforward block turns the pattern round, and (h) the next norm turns it back"
        words, note = f"(g): {size}", f"(h): {near['h'].words}"
        parts = [
            Finding.below(claim, words, near["g"], note=note),
            Finding.above(claim, words, near["h"]),
        ]
        return [*found, joint(parts, shown=parts[0])]


def first_block(lm: LM) -> Any:
    """The first decoder layer.

    Raises:
        UserError: Layers lack ``o_proj`` or ``post_attention_layernorm``, are too few, or cannot be heard.
    """
    check_interface(lm)
    block = families.blocks(lm.model)[0]
    first = families.attention_modules(lm.model)[0]
    if (
        lm.layers < 2
        or not hasattr(block, "post_attention_layernorm")
        or not hasattr(first, "o_proj")
    ):
        allowed = "two layers or more with o_proj and post_attention_layernorm (Llama, Qwen2, Mistral, ...)"
        raise UserError("model", lm.name, allowed, "study=score_map needs neither")
    return block


@inference_mode
def gram_panels(
    lm: LM,
    plan: Sequence[Sequence[Sequence[int]]],
    advance: Callable[[int], None] = lambda n: None,
) -> dict[str, MeanMap]:
    """Mean inner products between tokens, by panel; arguments as :func:`posbench.measure.scores.score_maps`.

    Raises:
        UserError: See :func:`first_block`.
    """
    block, (first, second, *_) = first_block(lm), families.attention_modules(lm.model)
    found = {name: MeanMap(len(plan[0][0])) for name in PANELS}
    states: dict[str, Tensor] = {}

    def scored(layer: int, query: Tensor, key: Tensor, factor: float) -> None:
        if layer < 2:
            found["bi"[layer]].add(query, key, factor)

    def before(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs: states.update(
            {name: families.attention_input(args, kwargs)}
        )

    def behind(name: str) -> Callable[..., None]:
        return lambda _, __, out: states.update(
            {name: out[0] if isinstance(out, tuple) else out}
        )

    with ExitStack() as stack:
        for name, module in (
            ("X", block),
            ("a", first),
            ("c", first.o_proj),
            ("h", second),
        ):
            hook = module.register_forward_pre_hook(before(name), with_kwargs=True)
            stack.callback(hook.remove)
        for name, module in (
            ("d", first),
            ("f", block.post_attention_layernorm),
            ("g", block),
        ):
            stack.callback(module.register_forward_hook(behind(name)).remove)
        for batch in plan:
            read_scores(lm, batch, scored)
            states["e"] = states["d"] + states["X"]
            for name in "acdefgh":
                rows = by_sample(states[name][:, None], len(batch))
                found[name].add(rows, rows)
            advance(len(batch))
    return found
