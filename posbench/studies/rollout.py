"""Where a model's content comes from, and which tokens are attention sinks: the theory's quantities on trained weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from posbench.config import Config
from posbench.errors import UserError
from posbench.lm import LM
from posbench.plots import PAGE, line_style, new_figure, styled
from posbench.stages.base import Run, encode
from posbench.studies.base import Finding, Study
from posbench.theory import masks

Array = NDArray[np.float64]
KINDS = {"attention alone": 0.0, "with the residual stream": 0.5}
"""Shares of a layer's own input: the product of attentions of Wu et al. 2025, and the rollout of Abnar and Zuidema 2020."""


@dataclass(frozen=True, kw_only=True)
class Rollout(Study):
    """Attention rollout and attention sinks of a model.

    Source: Wu et al. 2025, Section 3 (cumulative context probability) and Appendix K.4; Gu et al. 2024 (sink metric).

    Attributes:
        prompts: Prompts of the task, evenly over its gold positions. Eager attention holds a whole map of one prompt at a time.
        parts: Equal parts of the prompt whose weights are summed.
        tokens: First tokens of a prompt among which sinks are looked for (Gu et al.: 64).
    """

    prompts: int = 64
    parts: int = 10
    tokens: int = 64

    def check(self, config: Config, lm: LM | None) -> None:
        """Refuse counts that leave nothing to measure, and a method whose last row is computed apart from the others."""
        if config.trial().needs_prompt:
            allowed = f"a method that leaves whole attention maps; {config.method_name} runs the last token apart"
            raise UserError(field="method", value=config.method_name, allowed=allowed, hint="leave the method out")
        for name in ("prompts", "parts", "tokens"):
            if getattr(self, name) < 2:
                raise UserError(
                    field=f"study.{name}",
                    value=getattr(self, name),
                    allowed="a whole number from 2 up",
                    hint=f"set study.{name}=10",
                )

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``rollout`` (rollout, layers, part, weight, n) and ``sinks`` (token, by_head, by_entry, n)."""
        chosen = run.evaluation[:: max(len(run.evaluation) // self.prompts, 1)][: self.prompts]
        prompts = [encode(run.lm, run.config.task, example).ids for example in chosen]
        parts = [model_rollout(run.lm, prompts, share, self.parts).assign(rollout=name) for name, share in KINDS.items()]
        return {"rollout": pd.concat(parts, ignore_index=True), "sinks": model_sinks(run.lm, prompts, self.tokens)}

    def figures(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[Figure, str]]:
        """The rollout by depth of the prompt."""
        caption = "Weight of the last token on each part of the prompt after the first 1, 2, ... layers, mean over prompts."
        return {"rollout": (rollout_figure(tables["rollout"]), caption)}

    def findings(self, tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        """Whether the first token is the strongest sink of the first half, by both metrics; late tokens average few queries."""
        sinks = tables["sinks"].set_index("token")
        found = []
        for column, words in (("by_head", "heads (Gu et al.)"), ("by_entry", "attention entries (Wu et al.)")):
            first, other = sinks[column].iloc[0], sinks[column].iloc[1 : len(sinks) // 2 + 1].max()
            found.append(
                Finding(
                    claim="Under a causal mask the first token is the attention sink (Wu et al. 2025, Theorem 4.1, Figure 10)",
                    statistic=f"share of {words} in which token 1 is a sink, minus the strongest other of the first half",
                    value=first - other,
                    n=int(sinks["n"].iloc[0]),
                    verdict="holds" if first > other else "does not hold",
                    note=f"token 1: {first:.3f}, strongest other: {other:.3f}",
                )
            )
        return found


@torch.inference_mode()
def _attentions(lm: LM, prompts: Sequence[Sequence[int]]) -> Iterator[Array]:
    """All attention weights of each prompt, [L, H, n, n], from eager attention."""
    before = lm.model.config.get_text_config()._attn_implementation
    lm.model.set_attn_implementation("eager")
    try:
        for ids in prompts:
            out = lm.model(**lm.pad([ids]), output_attentions=True, use_cache=False)
            yield np.stack([weights[0].double().cpu().numpy() for weights in out.attentions])
    finally:
        lm.model.set_attn_implementation(before)


def model_rollout(lm: LM, prompts: Sequence[Sequence[int]], residual: float = 0.5, places: int = 10) -> pd.DataFrame:
    """Where the last token's content comes from, layer by layer: attention rollout of a model, averaged over heads.

    Args:
        lm: A model; it runs with eager attention inside.
        prompts: Token ids.
        residual: Share of a layer's own input: 0 is the theory's product of attentions, 0.5 Abnar and Zuidema's rollout.
        places: Equal parts of the prompt to sum over.

    Returns:
        Rows of layers, part (from 0), weight (mean over prompts), n.
    """
    total = np.zeros((lm.layers, places))
    for stack in _attentions(lm, prompts):
        mixed = [residual * np.eye(len(weights)) + (1 - residual) * weights for weights in stack.mean(1)]
        for layer, found in enumerate(masks.rollout(mixed)):
            total[layer] += [part.sum() for part in np.array_split(found[-1], places)]
    at, part = np.indices(total.shape)
    values = {"layers": at.ravel() + 1, "part": part.ravel(), "weight": total.ravel() / len(prompts)}
    return pd.DataFrame({**values, "n": len(prompts)})


def model_sinks(lm: LM, prompts: Sequence[Sequence[int]], tokens: int = 64) -> pd.DataFrame:
    """Both sink metrics of a model on the first tokens of each prompt, which is where sinks are looked for.

    Args:
        lm: A model; it runs with eager attention inside.
        prompts: Token ids, each at least that long to count.
        tokens: Tokens T of each prompt (Gu et al.: 64).

    Returns:
        Rows of token (from 0), by_head (Gu et al.), by_entry (Wu et al.), n.
    """
    long = [list(ids[:tokens]) for ids in prompts if len(ids) >= tokens]
    weights = np.stack(list(_attentions(lm, long)))
    values = {"by_head": masks.sink_by_head(weights), "by_entry": masks.sink_by_entry(weights, masks.causal(tokens))}
    return pd.DataFrame({"token": np.arange(tokens), **values, "n": len(long)})


@styled
def rollout_figure(table: pd.DataFrame) -> Figure:
    """Rollout of a model by depth of the prompt, a line per number of layers; a panel per share of the residual stream."""
    figure = new_figure(PAGE, 2.6)
    parts = list(table.groupby("rollout", sort=False))
    for axes, (title, frame) in zip(figure.subplots(1, len(parts)), parts, strict=True):
        count = frame["part"].nunique()
        for index, (layers, line) in enumerate(frame.groupby("layers")):
            label = f"{layers} layer{'s' if layers > 1 else ''}"
            axes.plot(
                100 * (line["part"] + 0.5) / count, line["weight"], label=label, **line_style(index, of=frame["layers"].nunique())
            )
        axes.set(xlabel="place in the prompt (%)", ylabel="weight of the last token", title=str(title), ylim=(0, None))
        axes.legend()
    return figure
