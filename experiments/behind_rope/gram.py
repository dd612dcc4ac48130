"""Behind RoPE on trained models (Figure 3): inner products between tokens in the first two layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from behind_rope.maps import (
    long_table,
    maps_figure,
    rows_of_panels,
    stack_maps,
)
from behind_rope.score_map import NEEDS_NO_ROPE, Sampled
from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.late import Tensor, inference_mode, pd
from posbench.measure.scores import (
    MeanMap,
    need_attention_interface,
    read_scores,
    rows_to_heads,
)
from posbench.model import families
from posbench.model.lm import LM
from posbench.model.rope import rotated_layers
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.stats.correlation import spearman
from posbench.stats.findings import SMALLEST_SHARE, Finding, estimate, join_findings
from posbench.studies.base import Tables

PANEL_TITLES = {
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
SCORE_PANELS = ("b", "i")  # scores of the first and of the second layer
STATE_PANELS = ("a", "c", "d", "e", "f", "g", "h")
PANELS_ACROSS = 3
NEAR_KEYS = "nearest quarter of keys minus the farthest, mean product, key 1 left out"
"""The statistic of the claims on how products depend on the key."""


@dataclass(frozen=True, kw_only=True)
class Gram(Sampled):
    """Inner products of nine intermediates of the first two layers (Behind RoPE, Section 4.2, Figure 3)."""

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        super().check(run)
        first_block(run.lm)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Measure the panels.

        Returns:
            ``panels`` (panel, query, key, product) and ``facts`` (by panel): diagonal and below (means of the
            diagonal and below the diagonal), falling (rank correlation of the diagonal with the token, sign
            turned), rising (rank correlation of product and key, mean over queries, token 1 left out), and
            the columns of :meth:`MeanMap.facts`.
        """
        batches = run.prompts.batches_by_length(self.rows(run.lm), len)
        with run.progress("samples", self.samples) as advance:
            maps = gram_panels(run.lm, batches, advance)
        tokens = np.arange(self.tokens)
        rows = []
        for panel, mean_map in maps.items():
            mean = mean_map.mean
            diagonal = np.diagonal(mean)
            rising = [
                spearman(mean[i, 1:i], tokens[1:i]) for i in range(4, self.tokens)
            ]
            row: Row = {
                "panel": panel,
                "diagonal": diagonal.mean(),
                "below": mean[np.tril_indices(self.tokens, -1)].mean(),
                "falling": -spearman(diagonal, tokens),
                "rising": np.mean(rising),
                **mean_map.facts(),
            }
            rows.append(row)
        products = {
            panel: {"product": mean_map.mean} for panel, mean_map in maps.items()
        }
        return {
            "panels": long_table("panel", products, self.cells),
            "facts": pd.DataFrame(rows).assign(
                rotated_layers=len(rotated_layers(run.lm.model))
            ),
        }

    def figures(self, tables: Tables) -> Drawn:
        """The nine panels."""
        maps = stack_maps(tables["panels"], "product", by="panel")
        titled = {
            f"({panel}) {title}": scores
            for (panel, title), scores in zip(PANEL_TITLES.items(), maps, strict=True)
        }
        rows = rows_of_panels(titled, PANELS_ACROSS)
        caption = (
            f"Behind RoPE, Figure 3: mean inner products, {self.source}. "
            "Colours from the 1 % to the 99 % quantile."
        )
        return {"gram": (maps_figure(rows, self.last_token), caption)}

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """The paper's claims on the panels of its model without position embedding."""
        facts = tables["facts"].set_index("panel")
        n = int(facts["n"].iloc[0])
        share = (facts["below"] / facts["diagonal"]).abs()
        no_interval = f"no interval: one model, a mean over {n} samples"
        nearly_orthogonal = Finding.that(
            share["a"] < 0.1,
            "(a) after the first norm tokens are nearly orthogonal (Behind RoPE, Section 4.2)",
            "mean product below the diagonal over mean product on it, size",
            (share["a"], n),
            f"10 % is our bound; the paper: close to 0; {no_interval}",
        )
        growth = share["b"] / share["a"]
        raised = Finding.that(
            growth > 1,
            "(b) W_Q and W_K raise that share",
            "the share in (b) over the share in (a)",
            (growth, n),
            no_interval,
        )
        falling = facts["falling"]["c"]
        diagonal_falls = Finding.that(
            falling > 0.9,
            "(c) the diagonal of A V falls with the token, as h' does",
            "rank correlation of the diagonal with the token, sign turned",
            (falling, self.tokens),
            no_interval,
        )
        findings = [
            nearly_orthogonal,
            raised,
            diagonal_falls,
            *_rising_panels(facts),
            _pattern_turns(facts),
        ]
        if facts["rotated_layers"].any():
            return [finding.not_testable(NEEDS_NO_ROPE) for finding in findings]
        return findings


def _rising_panels(facts: pd.DataFrame) -> list[Finding]:
    """Panels (f) and (i): products rise with the key; from the facts by panel."""
    subjects = {
        "f": "after the norm products",
        "i": "the scores of the second layer",
    }
    findings = []
    for panel, subject in subjects.items():
        claim = f"({panel}) {subject} rise with the key"
        rank = facts["rising"][panel]
        note = f"rank correlation of product and key {rank:.2f}, mean over queries"
        near = estimate(facts.loc[panel], "near")
        bound = _smallest_product(facts, panel)
        findings.append(Finding.above(claim, NEAR_KEYS, near, bound, note))
    return findings


def _smallest_product(facts: pd.DataFrame, panel: str) -> float:
    """Smallest difference of two products worth naming: a share of the panel's range, without its tails."""
    row = facts.loc[panel]
    return float(SMALLEST_SHARE * (row["score_high"] - row["score_low"]))


def _pattern_turns(facts: pd.DataFrame) -> Finding:
    """Panels (g) and (h): the pattern turns round and back; from the facts by panel."""
    claim = "(g) the feedforward block turns the pattern round, and (h) the next norm turns it back"
    statistic = f"(g): {NEAR_KEYS}"
    output = estimate(facts.loc["g"], "near")
    normed = estimate(facts.loc["h"], "near")
    note = f"(h): {normed.words}"
    bound = -_smallest_product(facts, "g")
    turned = Finding.below(claim, statistic, output, bound, note)
    bound = _smallest_product(facts, "h")
    turned_back = Finding.above(claim, statistic, normed, bound)
    return join_findings([turned, turned_back], numbers_of=turned)


def first_block(lm: LM) -> Any:
    """The first decoder layer.

    Raises:
        UserError: Layers lack ``o_proj`` or ``post_attention_layernorm``, have norms behind their parts, are too few,
            or cannot be heard.
    """
    need_attention_interface(lm)
    block = families.decoder_layers(lm.model)[0]
    attention = families.attention_modules(lm.model)[0]
    # With a norm behind each part, as in Gemma 2 and OLMo 2, this one is not the feedforward block's.
    has_norm = hasattr(block, "post_attention_layernorm") and not hasattr(
        block, "post_feedforward_layernorm"
    )
    if lm.layers < 2 or not has_norm or not hasattr(attention, "o_proj"):
        allowed = (
            "two layers or more with o_proj and post_attention_layernorm, and no norm behind them "
            "(Llama, Qwen2, Mistral, ...)"
        )
        raise UserError("model", lm.name, allowed, "study=score_map needs neither")
    return block


@inference_mode
def gram_panels(
    lm: LM,
    plan: Sequence[Sequence[Sequence[int]]],
    advance: Callable[[int], None] = lambda n: None,
) -> dict[str, MeanMap]:
    """Average inner products between tokens over samples.

    Args:
        lm: The model.
        plan: Batches of token rows, all of one length.
        advance: Called with the size of each batch done.

    Returns:
        Mean maps by panel.

    Raises:
        UserError: See :func:`first_block`.
    """
    block = first_block(lm)
    first, second, *_ = families.attention_modules(lm.model)
    maps = {panel: MeanMap(len(plan[0][0])) for panel in PANEL_TITLES}
    states: dict[str, Tensor] = {}
    # X is the input of the first block.
    inputs = {"X": block, "a": first, "c": first.o_proj, "h": second}
    outputs = {"d": first, "f": block.post_attention_layernorm, "g": block}
    with ExitStack() as stack:
        for name, module in inputs.items():
            store = partial(_store_input, states, name)
            hook = module.register_forward_pre_hook(store, with_kwargs=True)
            stack.callback(hook.remove)
        for name, module in outputs.items():
            store = partial(_store_output, states, name)
            stack.callback(module.register_forward_hook(store).remove)
        for batch in plan:
            read_scores(lm, batch, partial(_add_scores, maps))
            states["e"] = states["d"] + states["X"]
            for panel in STATE_PANELS:
                # [B, 1, n, d]: states as of one head.
                rows = rows_to_heads(states[panel][:, None], len(batch))
                maps[panel].add(rows, rows)
            advance(len(batch))
    return maps


def _store_input(
    states: dict[str, Tensor], name: str, module: Any, args: Any, kwargs: Any
) -> None:
    """Forward pre-hook: store the hidden states that a module reads."""
    states[name] = families.attention_input(args, kwargs)


def _store_output(
    states: dict[str, Tensor], name: str, module: Any, args: Any, output: Any
) -> None:
    """Forward hook: store the hidden states that a module returns."""
    states[name] = output[0] if isinstance(output, tuple) else output


def _add_scores(
    maps: Mapping[str, MeanMap], layer: int, query: Tensor, key: Tensor, factor: float
) -> None:
    """Add the scores of the first two layers to their panels; see :func:`read_scores`."""
    if layer < len(SCORE_PANELS):
        maps[SCORE_PANELS[layer]].add(query, key, factor)
